"""Find the loss scale to start with."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_lossscale._policy import LossScaleLike, as_loss_scale
from optax_lossscale._state import LossScaleState, loss_scale_state, strongly_typed, with_scale
from optax_lossscale._step.scale import unscale_and_check
from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.tree import PyTree, is_inexact
from optax_lossscale.diagnostics.health import bounds_of


def calibrate(
    grad_fn: Callable[..., PyTree],
    state: PyTree,
    *args: Any,
    loss_scale: LossScaleLike = "dynamic",
    axis_name: AxisName | None = None,
) -> LossScaleState:
    """Find the loss scale to start with, so that training does not skip its first steps.

    It is the largest power of two, within the bounds of the policy, at which the gradients are
    finite, found by bisection: five evaluations of the gradients for the default bounds, in one
    compiled loop. Put it into the optimizer's state with
    `opt_state._replace(loss_scale_state=...)`.

    Args:
      grad_fn: `grad_fn(state, *args)` returns the scaled gradients, for example
        `lambda state, *args: ols.value_and_grad(loss_fn)(state, *args)[1]`.
      state: The state to start from, or an optimizer's state that holds exactly one. `grad_fn` is
        given copies of it with other loss scales.
      *args: The rest of what `grad_fn` takes: the parameters and a batch, as training will see
        them.
      loss_scale: The policy that training uses, or anything that `as_loss_scale` takes.
      axis_name: The mapped axis, or a tuple of them, over which to agree. See `unscale_and_check`.

    Returns:
      The state with the loss scale that was found. If the gradients are finite at none, the
      smallest: `first_nonfinite` says where they are not.

    Raises:
      TypeError: If the policy has no bounds, since its loss scale does not move.
      ValueError: If `state` holds no `LossScaleState`, or several, if there is no power of two
        within the bounds, or if `grad_fn` returns no gradients.

    Warns:
      UserWarning: If the gradients are finite even at the policy's `max_scale`, so that a larger
        loss scale might fit. Under `jax.jit` nothing warns.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def grad_fn(state, w):
      ...     return (3.0 * state.loss_scale * w).astype(jnp.float16)
      >>> float(ols.diagnostics.calibrate(grad_fn, ols.init(), jnp.ones(())).loss_scale)
      16384.0
    """
    policy = as_loss_scale(loss_scale)
    bounds = bounds_of(policy)
    if bounds is None:
        raise TypeError(
            "`loss_scale` must have `min_scale` and `max_scale` to search between, got "
            f"{policy!r}. Calibrate for a `DynamicLossScale`, and build a `FixedLossScale` from "
            "the result."
        )
    lowest, highest = math.ceil(math.log2(bounds[0])), math.floor(math.log2(bounds[1]))
    if lowest > highest:
        raise ValueError(
            f"`loss_scale` must have a power of two between its bounds, got {policy!r}. Widen them."
        )

    def scale_at(power: jax.Array) -> jax.Array:
        return jnp.ldexp(jnp.float32(1), power)

    def bisect(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        candidate = with_scale(state, scale_at(middle))
        # Modules of `flax.nnx` can be used only in the trace that they were made in: these are.
        grads = grad_fn(candidate, *jax.tree.map(lambda leaf: leaf, args))
        if not any(map(is_inexact, jax.tree.leaves(grads))):
            raise ValueError(
                "`grad_fn` must return gradients, got a tree without floating-point numbers: "
                f"{jax.tree.structure(grads)}. Return what `value_and_grad` returns second."
            )
        _, grads_finite = unscale_and_check(grads, candidate, axis_name=axis_name)
        return jnp.where(grads_finite, middle, low), jnp.where(grads_finite, high, middle - 1)

    start = strongly_typed(loss_scale_state(state))
    power, _ = jax.lax.while_loop(
        lambda bounds: bounds[0] < bounds[1], bisect, (jnp.int32(lowest), jnp.int32(highest))
    )
    searched = lowest < highest and not isinstance(power, Tracer)
    if searched and jax.device_get(power) == highest:
        warnings.warn(
            f"The gradients are finite even at 2**{highest}, the cap of {policy!r}. If they are "
            "small, raise its `max_scale`.",
            stacklevel=2,
        )
    return start._replace(loss_scale=scale_at(power))
