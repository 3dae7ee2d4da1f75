"""Whether all numbers of a tree are finite, and whether all devices agree that they are."""

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir
from jax.sharding import AxisType

from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.tree import PyTree, is_inexact, is_symbolic, readable


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether every number in `tree` is finite.

    The check is exact: it looks at every element, never at a sum or a norm, which can overflow
    when all values are finite. Under `jax.jit`, a thousand leaves cost no more than their
    concatenation.

    Args:
      tree: Any pytree. Leaves without floating-point or complex numbers (`None`, integers,
        booleans, float0, PRNG keys, objects that are not arrays) count as finite, and so do empty
        arrays.

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
    return _operation().bind(*map(jax.lax.stop_gradient, arrays), maps=())  # a flag is constant


@functools.cache
def _operation() -> Any:
    """Return a primitive that is written out when the platform and the devices are known.

    What is fast depends on both (see docs/performance.md), and neither is known while a step is
    traced: it may be compiled for another machine. JAX says so only to the lowering of a primitive.
    Its parameter `maps` holds the `in_axes` of each `jax.vmap` around it, the innermost first.
    """
    from jax.extend.core import Primitive  # noqa: PLC0415 - it takes as long as all of the package

    operation = Primitive("all_finite")

    def mapped(check: Callable[..., jax.Array], maps: tuple[Any, ...]) -> Callable[..., jax.Array]:
        return functools.reduce(lambda fun, axes: jax.vmap(fun, in_axes=axes), maps, check)

    def run(*arrays: jax.Array, maps: tuple[Any, ...]) -> jax.Array:
        return mapped(_finite, maps)(*arrays)

    def typed(*avals: Any, maps: tuple[Any, ...]) -> Any:
        return jax.make_jaxpr(functools.partial(run, maps=maps))(*avals).out_avals[0]

    def batched(arrays: Sequence[Any], axes: Any, *, maps: tuple[Any, ...]) -> tuple[Any, int]:
        return operation.bind(*arrays, maps=(*maps, tuple(axes))), 0

    def lowering(check: Callable[..., jax.Array]) -> Callable[..., Any]:
        def lower(context: Any, *operands: Any, maps: tuple[Any, ...]) -> Any:
            devices = _devices(context.module_context.axis_context)
            check_there = mapped(functools.partial(check, devices=devices), maps)
            return mlir.lower_fun(check_there, multiple_results=False)(context, *operands)

        return lower

    operation.def_impl(lambda *numbers, maps: run(*map(jnp.asarray, numbers), maps=maps))
    operation.def_abstract_eval(typed)
    batching.primitive_batchers[operation] = batched
    mlir.register_lowering(operation, lowering(_finite))
    mlir.register_lowering(operation, lowering(_finite_on_cpu), platform="cpu")
    # Of larger groups, XLA:TPU keeps less in fast memory for the update (libtpu 0.0.42, v5e).
    on_tpu = functools.partial(_finite, elements=2**24)
    mlir.register_lowering(operation, lowering(on_tpu), platform="tpu")
    for gpu in ("cuda", "rocm"):
        mlir.register_lowering(operation, lowering(_finite_on_gpu), platform=gpu)
    return operation


def _devices(context: Any) -> int:
    """Return over how many devices XLA may spread an array of the program that is lowered."""
    if mesh := getattr(context, "mesh", None):  # within `shard_map`, which divides arrays itself
        return math.prod(n for name, n in mesh.shape.items() if name not in context.manual_axes)
    return getattr(context, "num_devices", 1)


def _finite(*arrays: jax.Array, devices: int = 0, elements: int | None = None) -> jax.Array:
    """Check arrays of one shape in one kernel, where that moves nothing between devices.

    Under `jax.jit`, arrays of one shape may be sharded differently. Their types say how if the axes
    of the mesh are Explicit. One-dimensional arrays are small and usually sharded alike.
    """
    joined, alone = _parted(
        arrays, lambda array: devices == 1 or array.ndim == 1 or _is_explicit(array)
    )
    # The other way round, XLA exchanges a byte for each array that is alone (jaxlib 0.10.2).
    groups = [*([array] for array in alone), *_by_shape(joined, 16, elements)]
    return _all([jnp.all(_jointly_finite(group)) for group in groups])


def _finite_on_gpu(*arrays: jax.Array, devices: int) -> jax.Array:
    """Check arrays of one size in one kernel, and take a second step for all of them together.

    XLA:GPU reduces a large array in two kernels: to about the square root of its size, and from
    there to one number. Here the second one is shared. XLA fuses the first with a norm of the same
    gradients, such as that of clipping, if both reduce to the same number, the power of two below
    the square root, and if no more than seven norms are fused with one check (seen in jaxlib
    0.10.2).
    """
    if devices != 1 or any(is_symbolic(array.size) for array in arrays):
        return _finite(*arrays, devices=devices)
    flat = [array.reshape(-1) for array in arrays]
    small, large = _parted(flat, lambda array: array.size < 2**13)
    flags = [jnp.all(_jointly_finite(group)) for group in _by_shape(small, 16)]
    rows = []
    for group in _by_shape(large, 7):
        size = group[0].size
        count = 1 << ((size.bit_length() - 1) // 2)
        if size % count:
            flags.append(jnp.all(_jointly_finite(group)))
        else:
            finite = _jointly_finite([array.reshape(count, -1) for array in group])
            rows.append(jnp.all(finite, axis=1))
    if rows:
        longest = max(row.size for row in rows)
        padded = [jax.lax.pad(row, True, [(0, longest - row.size, 0)]) for row in rows]
        flags.append(jnp.all(functools.reduce(jnp.logical_and, padded)))
    return _all(flags)


def _parted(
    arrays: Sequence[jax.Array], belongs: Callable[[jax.Array], bool]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the arrays that belong to the first part, and the others."""
    parts: tuple[list[jax.Array], list[jax.Array]] = ([], [])
    for array in arrays:
        parts[not belongs(array)].append(array)
    return parts


def _by_shape(
    arrays: list[jax.Array], most: int, elements: int | None = None
) -> Iterator[list[jax.Array]]:
    """Group arrays of one shape, dtype and explicit sharding.

    A group has at most `most` arrays, and `elements` in all, but at least one array.
    """
    found: dict[Any, list[jax.Array]] = {}
    for array in arrays:
        kind = array.shape, array.dtype, jax.typeof(array).sharding
        found.setdefault(kind, []).append(array)
    for group in found.values():
        size = group[0].size
        limit = most if elements is None or is_symbolic(size) else elements // max(size, 1)
        step = max(1, min(most, limit))
        yield from (group[i : i + step] for i in range(0, len(group), step))


def _jointly_finite(arrays: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, map(_is_finite, arrays))


def _all(flags: list[jax.Array]) -> jax.Array:
    # Off the CPU the flags are not stacked: if arrays are sharded, the devices would exchange each
    # of them, and take the stack apart again. The barrier stops XLA from fusing the conjunction
    # into everything that reads it.
    return jax.lax.optimization_barrier(functools.reduce(jnp.logical_and, flags))


def _is_explicit(array: jax.Array) -> bool:
    return set(jax.typeof(array).sharding.mesh.axis_types) == {AxisType.Explicit}


def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(readable(array))


def _finite_on_cpu(*arrays: jax.Array, devices: int) -> jax.Array:
    """Check each array in a form that XLA:CPU computes in one pass.

    XLA:CPU turns a reduction over more than 32 elements into a `reduce-window`, which it does not
    fuse with what it reduces: the mask of the whole array is written to memory and read again
    (seen in jaxlib 0.10.2, `tree_reduction_rewriter.cc`). A reduction over 16 elements is left
    alone and fused, and so is the maximum of two slices before it; in groups of 64 the loop is no
    longer vectorised. What remains to be reduced is that much smaller. The maximum is taken of the
    magnitudes' bits, where NaN and infinity lie above every finite number: as integers, since
    XLA:CPU's maximum of floats drops NaN. Other platforms fuse the plain form. It can go when
    XLA:CPU fuses the plain form too: a test says so.
    """

    def finite(array: jax.Array) -> jax.Array:
        is_plain = is_symbolic(array.size) or array.size < 2**16 or jnp.finfo(array.dtype).bits < 16
        grouping = None if is_plain else _grouping(array.shape, devices)
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

    # The minimum is taken over numbers. XLA (seen in jaxlib 0.10.2) rewrites a conjunction of L
    # flags into one wide `and`, which it then fuses into each of the L selections that read it:
    # L**2 instructions, and minutes of compilation for a model of a thousand arrays.
    flags = jnp.stack([finite(array) for array in arrays])
    return jnp.min(flags.astype(jnp.int32)).astype(jnp.bool_)


def _grouping(shape: tuple[int, ...], devices: int) -> tuple[int, tuple[int, ...]] | None:
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
    parts = 1 << (devices.bit_length() - 1)
    views = [(shape, axis) for axis in reversed(range(len(shape) - 1))]
    rows = [((*shape[:-1], shape[-1] // 8, 8), len(shape) - 1)] if shape[-1] % 8 == 0 else []
    for candidates in (views, rows):
        for slices, group in ((2, 16), (1, 16), (1, 8)):
            for view, axis in candidates:
                if view[axis] % (slices * group * parts) == 0:
                    return axis + 1, (*view[:axis], -1, slices, group, *view[axis + 1 :])
    return None


def agree(
    flags: Sequence[jax.Array], axis_name: AxisName | None, measures: Sequence[jax.Array] = ()
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return which flags hold on every member of the mapped axes, and the mean of each measure.

    There is one collective for all of them.

    Args:
      flags: `bool[]` each.
      axis_name: The mapped axes; None if there are none.
      measures: `float32[]` each.
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


def _reduce_over(
    reduce: Callable[..., jax.Array], array: jax.Array, axis_name: AxisName
) -> jax.Array:
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
