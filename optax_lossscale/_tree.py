"""What holds for any pytree: whether it is finite, and choosing between two of them."""

import functools
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

#: Any nested container that JAX knows, with leaves of any kind.
PyTree: TypeAlias = Any

#: Where a leaf stands in a tree: JAX's key path.
KeyPath: TypeAlias = tuple[Any, ...]

Tree = TypeVar("Tree")


def is_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray]:
    """Say whether `leaf` is an array or a traced array, of any dtype."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_inexact(leaf: object) -> TypeGuard[ArrayLike]:
    """Say whether `leaf` holds floating-point or complex numbers.

    Python's own `float` and `complex` count, so that a function of the library gives the same
    answer eagerly as under `jax.jit`, which turns them into arrays. PRNG keys, float0 and arrays
    of integers or objects do not.
    """
    if is_array(leaf):
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
    return isinstance(leaf, (float, complex))


def all_finite(tree: PyTree) -> jax.Array:
    """Say whether no number in `tree` is NaN or infinite.

    The check is exact: it looks at every element and never at a sum or a norm, which finite
    values can overflow. It is as cheap under `jax.jit` for a thousand leaves as for their
    concatenation.

    Args:
      tree: Any pytree. Leaves that hold no floating-point or complex numbers (`None`, integers,
        booleans, float0, PRNG keys, anything that is no array) count as finite, and so do arrays
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


def readable(leaf: ArrayLike) -> jax.Array:
    """Return an array of a type that every function of JAX takes.

    `isfinite`, for one, is not defined for every eight-bit format.
    """
    array = jnp.asarray(leaf)
    return array.astype(jnp.float32) if jnp.finfo(array.dtype).bits < 16 else array


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
        is_symbolic = not isinstance(array.size, int)  # a dimension of `jax.export`
        is_plain = is_symbolic or array.size < 2**16 or jnp.finfo(array.dtype).bits < 16
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
    """Return a shape in which an axis is split into groups, and which axis the groups are.

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


def tree_where(pred: ArrayLike, on_true: Tree, on_false: Tree) -> Tree:
    """Choose between two trees of the same structure.

    Use it for whatever must not move on a skipped step and is not part of the optimizer's state:
    BatchNorm statistics, a moving average of the parameters, a random key.

    Args:
      pred: Which tree to take. `bool[]`, or a Python `bool`.
      on_true: The tree that is returned where `pred` is true. Arrays of any dtype and PRNG keys
        are selected with `jnp.where`; a leaf that is no array must be the same in both trees.
      on_false: The tree that is returned where `pred` is false; the same structure, shapes and
        dtypes as `on_true`.

    Returns:
      A tree with the structure, shapes and dtypes of `on_true`.

    Raises:
      TypeError: If `pred` is not boolean, or the dtypes of a leaf differ.
      ValueError: If `pred` is not a scalar, or the trees differ in structure, in the shape of a
        leaf or in a leaf that is no array. The message names the key path.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> new = {"mean": jnp.array([3.0]), "momentum": 0.9}
      >>> old = {"mean": jnp.array([2.0]), "momentum": 0.9}
      >>> ols.tree_where(False, new, old)
      {'mean': Array([2.], dtype=float32), 'momentum': 0.9}
    """
    pred = as_flag("pred", pred)
    true_leaves, true_def = jax.tree_util.tree_flatten_with_path(on_true)
    false_leaves, false_def = jax.tree_util.tree_flatten_with_path(on_false)
    if true_def != false_def:
        raise ValueError(
            "`on_true` and `on_false` must have the same structure, got a difference at "
            f"{path_name(first_difference(on_true, on_false) or ())}: {true_def} and {false_def}. "
            "Select between two versions of one tree."
        )
    selected = [
        _select(pred, path, a, b)
        for (path, a), (_, b) in zip(true_leaves, false_leaves, strict=True)
    ]
    return jax.tree.unflatten(true_def, selected)


def _select(pred: jax.Array, path: KeyPath, on_true: Any, on_false: Any) -> Any:
    name = path_name(path)
    if not (is_array(on_true) and is_array(on_false)):
        if on_true is on_false or (type(on_true) is type(on_false) and bool(on_true == on_false)):
            return on_true
        raise ValueError(
            f"the leaf at {name} must be an array in both trees or the same in both, got "
            f"{on_true!r} and {on_false!r}. Make it an array with `jnp.asarray` if it changes."
        )
    if on_true.dtype != on_false.dtype:
        raise TypeError(
            f"the leaf at {name} must have one dtype in both trees, got {on_true.dtype} and "
            f"{on_false.dtype}. Cast one of them with `astype`."
        )
    if on_true.shape != on_false.shape:
        raise ValueError(
            f"the leaf at {name} must have one shape in both trees, got {on_true.shape} and "
            f"{on_false.shape}. Select between two versions of one tree."
        )
    if on_true.dtype == jax.dtypes.float0:
        return on_true  # float0 has a single value, and `jnp.where` does not take it
    return jnp.where(pred, on_true, on_false)


def as_flag(name: str, value: ArrayLike) -> jax.Array:
    """Return `value` as bool[], or raise an error that calls it `name`."""
    if not (isinstance(value, bool) or (is_array(value) and value.dtype == jnp.bool_)):
        raise TypeError(
            f"`{name}` must be a bool or a boolean array, got {value!r}. Compute it with "
            "`all_finite`, `unscale_and_check` or a comparison."
        )
    flag = jnp.asarray(value)
    if flag.shape:
        raise ValueError(
            f"`{name}` must be a scalar, got shape {flag.shape}. Reduce it with `jnp.all`, or map "
            "over it with `jax.vmap`."
        )
    return flag


def path_name(path: KeyPath) -> str:
    """Return `path` as a message shows it; the empty path is the tree itself."""
    return f"`{jax.tree_util.keystr(path)}`" if path else "the root of the tree"


def first_difference(a: PyTree, b: PyTree, path: KeyPath = ()) -> KeyPath | None:
    """Return the key path of the first place where two trees differ in structure."""
    (a_children, a_def), (b_children, b_def) = (
        jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x, tree=tree: x is not tree)
        for tree in (a, b)
    )
    if a_def != b_def:
        a_keys, b_keys = ([key for key, _ in children] for children in (a_children, b_children))
        # The key of a leaf is empty.
        only_in_one = (key for key in a_keys + b_keys if key and (key in a_keys) != (key in b_keys))
        return path + next(only_in_one, ())
    for (key, x), (_, y) in zip(a_children, b_children, strict=True):
        # A leaf is its own only child, at the empty path.
        difference = first_difference(x, y, path + key) if key else None
        if difference is not None:
            return difference
    return None


def leaves_of_type(tree: PyTree, kind: type[Tree]) -> Iterator[tuple[KeyPath, Tree]]:
    """Yield every sub-tree of `tree` that is a `kind`, with its path."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    return ((path, sub) for path, sub in found if isinstance(sub, kind))
