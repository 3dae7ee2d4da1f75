"""Scale losses, unscale their gradients, and check those."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _xla
from optax_lossscale._state import LossScaleState, find, loss_scale_of, mark_scaled
from optax_lossscale._support import checks
from optax_lossscale._support.agreement import agree
from optax_lossscale._support.choose import all_true
from optax_lossscale._support.lines import warn
from optax_lossscale._support.tree import (
    ARRAYS,
    AxisName,
    KeyPath,
    PyTree,
    Tree,
    at_least_float32,
    is_finite,
    is_inexact,
    path_name,
    unscaled,
)


def scale_loss(loss: Tree, state: PyTree) -> Tree:
    """Multiply the loss by the loss scale.

    Args:
      loss: A loss, or a pytree of losses, with any floating-point dtype and shape. float16 and
        bfloat16 are promoted to float32 before the multiplication; float32 and float64 keep their
        dtype.
      state: A `LossScaleState`, or an optimizer's state that holds exactly one.

    Returns:
      The scaled loss, to be differentiated.

    Raises:
      TypeError: If a loss is not floating-point.
      ValueError: If `state` holds no `LossScaleState`, or several.

    Warns:
      UserWarning: If a loss is a float16 scalar: the backward pass then starts from the loss scale
        in float16, which is infinite above 65504. Compute the loss in float32.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> float(ols.scale_loss(jnp.float32(0.5), ols.init(1024)))
      512.0
    """
    order = "`scale_loss(loss, state)` takes the loss first."
    found = find(LossScaleState, "state", state, order)
    mark_scaled()
    return scaled(loss, loss_scale_of(found))


def scaled(loss: Tree, loss_scale: jax.Array) -> Tree:
    """Multiply the loss by `loss_scale`, `float32[]`."""
    warn_of_float16(loss)

    def scale(path: KeyPath, leaf: Any) -> jax.Array:
        if not is_inexact(leaf) or jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            kind = leaf.dtype if isinstance(leaf, ARRAYS) else type(leaf).__name__
            raise TypeError(
                f"`loss` must be floating-point, got {kind} at {path_name(path)}. Cast it with "
                "`astype(jnp.float32)`, take the real part of a complex loss, or give "
                "`value_and_grad` the argument `has_aux=True` if `fun` returns more than the loss."
            )
        value = at_least_float32(leaf)
        return value * loss_scale.astype(value.dtype)

    return jax.tree_util.tree_map_with_path(scale, loss)


def warn_of_float16(loss: PyTree) -> None:
    """Warn that the cotangent of a float16 scalar, the loss scale, may be infinite."""
    if any(
        isinstance(leaf, ARRAYS) and leaf.dtype == jnp.float16 and not leaf.shape
        for leaf in jax.tree.leaves(loss)
    ):
        warn(
            "The loss is float16, and so is the loss scale in the backward pass, where it is "
            "infinite above 65504. Compute the loss in float32, for example from "
            "`logits.astype(jnp.float32)`."
        )


def unscale_and_check(
    grads: Tree, state: PyTree, *, axis_name: AxisName | None = None
) -> tuple[Tree, jax.Array]:
    """Divide the gradients by the loss scale, and check that they are all finite.

    The gradients are multiplied by the float32 reciprocal of the loss scale. This is exact for
    powers of two, and otherwise within one unit in the last place of float32, even for float64
    gradients.

    Args:
      grads: Gradients of a loss that was scaled with `state`. Leaves without floating-point or
        complex numbers are returned unchanged. So is everything under a dict key
        `_overwrite_with_gradient`: the state of Flax's fp8 layers, which was never scaled.
      state: The `LossScaleState` that the loss was scaled with, not the updated one, or an
        optimizer's state that holds exactly one.
      axis_name: The mapped axis, or a tuple of them, over which replicas or shards must agree
        (`jax.pmap`, `jax.shard_map`, `jax.vmap`). Plain `jax.jit` needs none: arrays are global.

    Returns:
      `(grads, grads_finite)`. The gradients are true, in their own dtype, or in float32 if that is
      smaller. They are NaN if the loss scale is not between 2**-126 and 2**126. `grads_finite`,
      `bool[]`, is whether every gradient is finite, both before and after unscaling.

    Raises:
      TypeError: If `axis_name` cannot be the name of an axis.
      ValueError: If `state` holds no `LossScaleState`, or several, or `axis_name` is not mapped.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> state = ols.init(1024)
      >>> ols.unscale_and_check({"w": jnp.array([512.0, 2048.0], jnp.float16)}, state)
      ({'w': Array([0.5, 2. ], dtype=float32)}, Array(True, dtype=bool))
    """
    checks.require_axis_name(axis_name)
    order = "`unscale_and_check(grads, state)` takes the gradients first."
    loss_scale = loss_scale_of(find(LossScaleState, "state", state, order))
    grads = unscaled(grads, loss_scale)
    grads_finite = all_finite(grads)
    if axis_name is not None:
        (grads_finite,), _ = agree(axis_name, [grads_finite])
    return grads, grads_finite


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether every number in `tree` is finite.

    The check is exact: it reads each element, and uses no sum, which finite values can overflow.

    Args:
      tree: Any pytree. Leaves without floating-point or complex numbers (`None`, integers,
        booleans, float0, PRNG keys, objects that are not arrays) count as finite. So do empty ones.

    Returns:
      Whether every number is finite. `bool[]`.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> bool(ols.all_finite({"w": jnp.ones(3), "step": 7}))
      True
      >>> bool(ols.all_finite({"w": jnp.array([1.0, jnp.nan]), "step": 7}))
      False
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    if not arrays:
        return jnp.asarray(True)
    if _xla.enabled:
        return _xla.all_finite(arrays)
    return all_true([jnp.all(is_finite(array)) for array in arrays])
