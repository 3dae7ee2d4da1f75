"""Whether all numbers of a tree are finite, and whether all devices agree that they are."""

import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.tree import PyTree, is_inexact, is_symbolic, readable


def all_finite(tree: PyTree) -> jax.Array:
    """Say whether no number in `tree` is NaN or infinite.

    The check is exact: it looks at every element and never at a sum or a norm, which finite
    values can overflow. It is as cheap under `jax.jit` for a thousand leaves as for their
    concatenation.

    Args:
      tree: Any pytree. Leaves that hold no floating-point or complex numbers (`None`, integers,
        booleans, float0, PRNG keys, anything but arrays) count as finite, and so do arrays
        without elements.

    Returns:
      True if every number is finite. `bool[]`, also for an empty tree.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> bool(ols.all_finite({"w": jnp.ones(3), "step": 7}))
      True
      >>> bool(ols.all_finite({"w": jnp.array([1.0, jnp.nan]), "step": 7}))
      False
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return _arrays_finite(arrays) if arrays else jnp.asarray(True)


@jax.jit  # one dispatch in eager execution; inlined elsewhere
def _arrays_finite(arrays: list[jax.Array]) -> jax.Array:
    flags = jax.lax.platform_dependent(arrays, cpu=_finite_in_groups, default=_finite)
    # The minimum is taken over numbers. XLA (seen in jaxlib 0.10.2) rewrites a conjunction of L
    # flags into one wide `and`, which it then fuses into each of the L selections that read it:
    # L**2 instructions, and minutes of compilation for a model of a thousand arrays.
    return jnp.min(flags.astype(jnp.int32)).astype(jnp.bool_)


def _finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.all(_is_finite(array)) for array in arrays])


def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(readable(array))


def _finite_in_groups(arrays: list[jax.Array]) -> jax.Array:
    """Say for each array whether it is finite, the way XLA:CPU does it in one pass.

    XLA:CPU turns a reduction over more than 32 elements into a `reduce-window`, which it does not
    fuse with what it reduces: the mask of the whole array is written to memory and read again
    (seen in jaxlib 0.10.2, `tree_reduction_rewriter.cc`). A reduction over 16 elements is left
    alone and fused, and so is the maximum of two slices before it; in groups of 64 the loop is no
    longer vectorised. What remains to be reduced is that much smaller. The maximum is taken of the
    magnitudes' bits, where NaN and infinity lie above every finite number: as integers, since
    XLA:CPU's maximum of floats drops NaN. Other platforms fuse the plain form, and would pay for
    the reshape. It can go when XLA:CPU fuses the plain form too: a test says so.
    """

    def finite(array: jax.Array) -> jax.Array:
        is_plain = is_symbolic(array.size) or array.size < 2**16 or jnp.finfo(array.dtype).bits < 16
        grouping = None if is_plain else _grouping(array.shape)
        if grouping is None:
            return jnp.all(_is_finite(array))
        if jnp.iscomplexobj(array):
            return finite(array.real) & finite(array.imag)
        integer = np.dtype(f"i{array.dtype.itemsize}")
        infinity = int(np.array(np.inf, array.dtype).view(integer))
        magnitude = jax.lax.bitcast_convert_type(array, integer) & np.iinfo(integer).max
        axis, shape = grouping
        slices = jnp.unstack(magnitude.reshape(shape), axis=axis)
        largest = jnp.max(functools.reduce(jnp.maximum, slices), axis=axis)
        return jnp.min((largest < infinity).astype(jnp.uint8)) > 0

    return jnp.stack([finite(array) for array in arrays])


def _grouping(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Return a shape in which an axis is split into groups, and the axis of the groups.

    The groups, `slices` of `group` elements, are two axes of the shape. They are taken from an
    axis that is not the last: most gradients of weights are transposed products, XLA:CPU fuses
    the transposition into whatever reads them, and groups of the last axis are then far apart in
    memory, 10 to 50 times as slow to read. Groups of an axis before it are read well in both
    orders. Only where no such axis can be split is it the last one, above rows of eight elements.
    None means that the array is to be checked in the plain way.

    The number of groups stays a multiple of every power of two that the devices can be divided
    into, so that an axis that is spread over devices is split without moving anything.
    """
    devices = 1 << (jax.device_count().bit_length() - 1)
    views = [(shape, axis) for axis in reversed(range(len(shape) - 1))]
    rows = [((*shape[:-1], shape[-1] // 8, 8), len(shape) - 1)] if shape[-1] % 8 == 0 else []
    for candidates in (views, rows):
        for slices, group in ((2, 16), (1, 16), (1, 8)):
            for view, axis in candidates:
                if view[axis] % (slices * group * devices) == 0:
                    return axis + 1, (*view[:axis], -1, slices, group, *view[axis + 1 :])
    return None


def agree(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Return whether `flag` holds on every member of the mapped axes, if there are any."""
    return _reduce_over(jax.lax.pmin, flag, axis_name)


def average(array: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Return the mean over the members of the mapped axes, if there are any."""
    return _reduce_over(jax.lax.pmean, array, axis_name)


def _reduce_over(
    reduce: Callable[..., jax.Array], array: jax.Array, axis_name: AxisName | None
) -> jax.Array:
    if axis_name is None:
        return array
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
    # of jax 0.12 refuses the others. The index of an axis varies over it, and so does what is
    # computed from it: if that is another type, the array does not. (JAX's versions disagree on the
    # type's attribute.)
    index = jnp.full(array.shape, jax.lax.axis_index(name) < 0, array.dtype)
    return jax.typeof(array + index) == jax.typeof(array)
