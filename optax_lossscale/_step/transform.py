"""Loss scaling around any Optax optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._policy import LossScaleLike, as_loss_scale
from optax_lossscale._state import LossScaleState, current_scale
from optax_lossscale._step.finite import agree, all_finite
from optax_lossscale._step.scale import unscale_by
from optax_lossscale._step.select import negative_zero_unless, update_where, zero_unless
from optax_lossscale._support import checks
from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.tree import (
    KeyPath,
    Tree,
    is_array,
    is_inexact,
    leaves_of_type,
    path_name,
)


class WithLossScalingState(NamedTuple):
    """The state of `with_loss_scaling`.

    Attributes:
      loss_scale_state: The state of loss scaling.
      inner_state: The inner optimizer's state, as the inner optimizer itself would keep it: a
        checkpoint of the plain optimizer goes in and out here.
    """

    loss_scale_state: LossScaleState
    inner_state: optax.OptState


class LossScaling(optax.GradientTransformationExtraArgs):
    """What `with_loss_scaling` returns: an optimizer that can also say whether it applied a step.

    Attributes:
      update_and_flag: As `update`, with one more result: whether the step was applied. `bool[]`.
    """

    update_and_flag: Callable[..., tuple[optax.Updates, WithLossScalingState, jax.Array]]

    def __new__(cls, init: Any, update_and_flag: Any) -> Self:
        """Build the transformation whose `update` leaves the flag out."""

        def update_fn(
            updates: optax.Updates,
            state: optax.OptState,
            params: optax.Params | None = None,
            **extra_args: Any,
        ) -> tuple[optax.Updates, WithLossScalingState]:
            return update_and_flag(updates, state, params, **extra_args)[:2]

        self = super().__new__(cls, init, update_fn)
        self.update_and_flag = update_and_flag
        return self


def with_loss_scaling(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScaleLike = "dynamic",
    *,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer with loss scaling.

    At each step the wrapper unscales the gradients and checks them. If all are finite, the inner
    optimizer moves by them, bit for bit as if it had been given `grads * (1 / loss_scale)`.
    Otherwise the step is skipped: the inner state is bitwise unchanged, and the updates are
    negative zeros, since `p + -0.0` is `p` for every `p` that is not subnormal (`-0.0 + 0.0` is not
    `-0.0`, and XLA flushes subnormal numbers). Then the policy updates the loss scale. The skip is
    a selection with `jnp.where`, so that a step stays one compiled program, and its derivative is
    that of a step that was never taken.

    Wrap the whole optimizer, once. Clipping, gradient accumulation, weight decay and averages
    inside see true gradients and are unchanged by a skipped step. `optax.MultiSteps` above all
    belongs inside: outside, a single overflow stays in its accumulator for ever.

    The extra argument `value` of `update` (Optax's name for the loss, here unscaled) is passed on
    to `inner`. If it is given, a loss that is NaN or infinite skips the step too, and the policy
    can tell a bad batch from an overflow: see `DynamicLossScale`. Extra arguments are in true
    units, as `inner` expects them.

    Under `jax.jit` the inner update is traced in a trace of its own, as a nested `jax.jit` does it.
    What it stores elsewhere as a Python side effect, in a list for example, cannot be used later.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      loss_scale: `"dynamic"`, a number (fixed), a policy, or whatever else `as_loss_scale` takes.
      axis_name: The mapped axis, or a tuple of them, over which all must skip together. See
        `unscale_and_check`.

    Returns:
      A gradient transformation whose `update` takes gradients of the scaled loss (see
      `scale_loss` and `value_and_grad`) and whose state is a `WithLossScalingState`.

    Raises:
      TypeError: If `inner` is not a gradient transformation, `loss_scale` does not name a policy
        or `axis_name` an axis; from `update`, if its state is not a `WithLossScalingState`.
      ValueError: From `init`, if `inner` has a loss scale already.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(initial_scale=8))
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> loss_and_grads = ols.value_and_grad(lambda w: jnp.sum(w**2))
      >>> loss, grads = loss_and_grads(opt_state, params)
      >>> updates, opt_state = tx.update(grads, opt_state, params, value=loss)
      >>> optax.apply_updates(params, updates)
      Array([0., 0.], dtype=float32)
    """
    inner = checks.transformation("inner", inner)
    policy = as_loss_scale(loss_scale)
    checks.axis_names(axis_name)

    def init_fn(params: optax.Params) -> WithLossScalingState:
        inner_state = inner.init(params)
        for path, _ in leaves_of_type(inner_state, LossScaleState):
            raise ValueError(
                "`inner` must not scale the loss itself, got a LossScaleState at "
                f"{path_name(path)} of its state. Call `with_loss_scaling` once, around the whole "
                "optimizer."
            )
        return WithLossScalingState(policy.init(), inner_state)

    def inner_update(
        grads: optax.Updates,
        inner_state: optax.OptState,
        params: optax.Params | None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        try:
            updates, new_state = inner.update(grads, inner_state, params, **extra_args)
        except (TypeError, ValueError) as error:
            dtypes = [jnp.result_type(p) for p in jax.tree.leaves(params) if is_inexact(p)]
            if any(jnp.finfo(dtype).bits < 32 for dtype in dtypes):
                error.add_note(
                    "`params` are of a smaller type than float32, and the unscaled gradients are "
                    "float32, which `inner` may not take together. Keep the parameters in float32, "
                    "and cast them inside the loss function."
                )
            raise
        return updates, _cast_like(new_state, inner_state)

    def update_and_flag(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScalingState, jax.Array]:
        if not isinstance(state, WithLossScalingState):
            raise TypeError(
                f"`state` must be a WithLossScalingState, got {type(state).__name__}. Make it with "
                "`init` of this transformation; put the state of a plain optimizer into its "
                "`inner_state`."
            )
        scale_state, inner_state = state.loss_scale_state, _as_arrays(state.inner_state)
        grads = unscale_by(updates, current_scale("state", scale_state))
        if not policy.skip_nonfinite:
            updates, inner_state = inner_update(grads, inner_state, params, **extra_args)
            new_scale_state = policy.update(scale_state, grads_finite=True)
            return updates, WithLossScalingState(new_scale_state, inner_state), jnp.asarray(True)
        # One collective for both flags.
        flags = jnp.stack([all_finite(grads), all_finite(extra_args.get("value"))])
        grads_finite, loss_finite = agree(flags, axis_name)
        applied = grads_finite & loss_finite
        extra_args = zero_unless(applied, extra_args)
        updates, inner_state = update_where(
            applied, lambda g, s: inner_update(g, s, params, **extra_args), grads, inner_state
        )
        new_scale_state = policy.update(scale_state, grads_finite, loss_finite=loss_finite)
        updates = negative_zero_unless(applied, updates)
        return updates, WithLossScalingState(new_scale_state, inner_state), applied

    return LossScaling(init_fn, update_and_flag)


def _as_arrays(state: Tree) -> Tree:
    """Return `state` with arrays for numbers of Python and NumPy, as `jax.jit` does."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, (np.ndarray, np.generic)):
            is_number = leaf.dtype.kind not in "OSU" and leaf.dtype != jax.dtypes.float0
        else:
            is_number = isinstance(leaf, (int, float, complex))
        return jnp.asarray(leaf) if is_number else leaf

    return jax.tree.map(convert, state)


def _cast_like(new: Tree, old: Tree) -> Tree:
    """Return the new state of the inner optimizer with the dtypes of the old one.

    Optax promotes: Adam's float16 moments become float32 when they meet float32 gradients. The
    state would change its type from one step to the next, which `jax.lax.scan` refuses and
    `jax.jit` compiles twice.
    """
    checks.same_structure(
        "inner", new, old, "Keep what changes in the state in arrays of a fixed shape."
    )

    def cast(path: KeyPath, new_leaf: Any, old_leaf: Any) -> Any:
        if not is_array(old_leaf):
            return new_leaf
        checks.same_shape(
            "inner", path, new_leaf, old_leaf, "Give it the parameters it was initialized with."
        )
        if is_array(new_leaf) and new_leaf.dtype == old_leaf.dtype:
            return new_leaf
        if is_inexact(new_leaf) and not jnp.issubdtype(old_leaf.dtype, jnp.inexact):
            raise TypeError(
                "`inner` must keep the kind of numbers in its state, got "
                f"{jnp.result_type(new_leaf)} for {old_leaf.dtype} at {path_name(path)}. Start "
                "with the type that it becomes."
            )
        return jnp.asarray(new_leaf, old_leaf.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)
