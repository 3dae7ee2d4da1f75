"""Scale losses, unscale their gradients, and check those."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _xla
from optax_lossscale._loss_scale.agreement import agree
from optax_lossscale._loss_scale.never_scaled import mark_if_traced, mark_scaled
from optax_lossscale._order import warn_of_outside
from optax_lossscale._state import LossScaleState, find, loss_scale_of
from optax_lossscale._support import bounds, checks, tree
from optax_lossscale._support.choose import all_true
from optax_lossscale._support.lines import warn
from optax_lossscale._support.tree import AxisName, KeyPath, PyTree, Tree, is_finite, is_inexact

FLOAT16_LOSS = (
    "The loss is float16, and so is the loss scale in the backward pass, where it is infinite "
    "above 65504. Compute the loss in float32, for example from `logits.astype(jnp.float32)`."
)


def loss_scale_state(opt_state: PyTree) -> LossScaleState:
    """Find the one `LossScaleState` in an optimizer's state.

    Args:
      opt_state: A `LossScaleState`, or any pytree that contains exactly one, at any depth: the
        state of `with_loss_scaling` or `with_skipping`, alone or in the state of `optax.chain`,
        `masked`, `partition`, `MultiSteps` or `inject_hyperparams`, a Flax TrainState, an
        `nnx.Optimizer`. A mapping of the fields is found too: `nnx.split`, and Orbax without a
        target, make those.

    Returns:
      The state. Its fields are arrays, even if `flax.nnx` has put them into Variables.

    Raises:
      ValueError: If there is none, or more than one. The message lists where each was found.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(optax.adam(1e-3), ols.FixedLossScale(1024))
      >>> float(ols.loss_scale_state(tx.init(jnp.ones(3))).loss_scale)
      1024.0
    """
    state = find(LossScaleState, "opt_state", opt_state)
    mark_if_traced(state.loss_scale)
    return state


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
        in float16, which is infinite above 65504. Compute the loss in float32. Once per message and
        process, if the optimizer's state shows transformations outside the guard.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> float(ols.scale_loss(jnp.float32(0.5), ols.init(1024)))
      512.0
    """
    order = "`scale_loss(loss, state)` takes the loss first."
    found = find(LossScaleState, "state", state, order)
    mark_scaled()
    warn_of_outside(state, _WARNED)
    return scaled(loss, loss_scale_of(found))


_WARNED: set[str] = set()  # messages that `scale_loss` has given in this process


def scaled(loss: Tree, loss_scale: jax.Array) -> Tree:
    """Multiply the loss by `loss_scale`, `float32[]`."""
    if any(
        isinstance(leaf, tree.ARRAYS) and leaf.dtype == jnp.float16 and not leaf.shape
        for leaf in jax.tree.leaves(loss)
    ):
        warn(FLOAT16_LOSS)

    def scale(path: KeyPath, leaf: Any) -> jax.Array:
        if not is_inexact(leaf) or jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            kind = leaf.dtype if isinstance(leaf, tree.ARRAYS) else type(leaf).__name__
            raise TypeError(
                f"`loss` must be floating-point, got {kind} at {tree.path_name(path)}. Cast it "
                "with `astype(jnp.float32)`, take the real part of a complex loss, or give "
                "`value_and_grad` the argument `has_aux=True` if `fun` returns more than the loss."
            )
        value = tree.at_least_float32(leaf)
        return value * loss_scale.astype(value.dtype)

    return jax.tree_util.tree_map_with_path(scale, loss)


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


def unscaled(grads: Tree, loss_scale: jax.Array, *, keep_dtypes: bool = False) -> Tree:
    """Multiply gradients by `1 / loss_scale`, in float32 or their own larger dtype.

    NaN and infinity remain, and a loss scale that is out of bounds makes NaN, so it is enough to
    check the result. With `keep_dtypes`, the results are rounded to the dtypes of the gradients.
    """
    is_within = (loss_scale >= bounds.SMALLEST_SCALE) & (loss_scale <= bounds.LARGEST_SCALE)
    reciprocal = jnp.where(is_within, 1 / loss_scale, jnp.nan)

    paths, treedef = jax.tree_util.tree_flatten_with_path(grads)
    leaves = [leaf for _, leaf in paths]
    # An overflow here is not an error: the check of the step detects it.
    with jax.debug_nans(False), jax.debug_infs(False):
        for place, (path, leaf) in enumerate(paths):
            if not is_inexact(leaf) or tree.FP8_KEY in path:
                continue
            value = tree.at_least_float32(leaf)
            if jnp.iscomplexobj(value):  # by parts: a product with 1 + 0j loses the signs of zeros
                times = reciprocal.astype(value.real.dtype)
                product = jax.lax.complex(value.real * times, value.imag * times)
            else:
                product = value * reciprocal.astype(value.dtype)
            leaves[place] = product.astype(jnp.result_type(leaf)) if keep_dtypes else product
    return treedef.unflatten(leaves)


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
