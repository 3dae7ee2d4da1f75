"""Whether all numbers of a tree are finite, and whether all devices agree that they are."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _xla
from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.choose import all_true
from optax_lossscale._support.tree import PyTree, is_inexact, readable


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether every number in `tree` is finite.

    The check is exact: it looks at each element, never at a sum, which finite values can overflow.

    Args:
      tree: Any pytree. Leaves without floating-point or complex numbers (`None`, integers,
        booleans, float0, PRNG keys, objects that are not arrays) count as finite, as empty ones do.

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
    return all_true([jnp.all(jnp.isfinite(readable(array))) for array in arrays])


def agree(
    flags: Sequence[jax.Array], axis_name: AxisName | None, measures: Sequence[jax.Array] = ()
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return which flags hold on every member of the mapped axes, and the mean of each measure.

    Flags are `bool[]`, measures `float32[]`, and there is one collective for all of them.
    """
    if axis_name is None:
        return list(flags), list(measures)
    if not measures:
        return list(_reduce_over(jax.lax.pmin, jnp.stack(flags), axis_name)), []
    # The mean of what fails is 0 if nothing does. That of what holds need not be 1: XLA multiplies
    # by the reciprocal of the number of devices, and in float32 41 * (1 / 41) is less than 1.
    numbers = jnp.stack([*((~flag).astype(jnp.float32) for flag in flags), *measures])
    means = list(_reduce_over(jax.lax.pmean, numbers, axis_name))
    return [mean == 0 for mean in means[: len(flags)]], means[len(flags) :]


def _reduce_over(reduce: Callable[..., Any], array: jax.Array, axis_name: AxisName) -> jax.Array:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        varying = tuple(name for name in names if _may_vary(array, name))
        return reduce(array, varying) if varying else array
    except NameError as error:  # what JAX raises for an axis that is not mapped
        raise ValueError(
            f"`axis_name` must be the name of a mapped axis, or a tuple of them, got "
            f"{axis_name!r}. Call the function within `jax.shard_map`, `jax.pmap` or `jax.vmap` "
            "over that axis, or leave `axis_name` out under plain `jax.jit`."
        ) from error


def _may_vary(array: jax.Array, name: Hashable) -> bool:
    # `shard_map` with `check_vma` keeps in the type over which axes a value varies, and the `pmin`
    # of jax 0.12 refuses the others. A sum with the index of an axis varies over it: if that is of
    # another type, the array does not. (The type's attribute differs between versions of JAX.)
    index = jnp.full(array.shape, jax.lax.axis_index(name) < 0, array.dtype)
    return jax.typeof(array + index) == jax.typeof(array)
