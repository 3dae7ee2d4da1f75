"""Pytrees: kinds of leaves and where they stand, dtypes, and taking a tree apart."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._support.bounds import LARGEST_SCALE, SMALLEST_SCALE

#: Any nested container that JAX knows, with leaves of any kind.
PyTree: TypeAlias = Any

#: Where a leaf stands in a tree: JAX's key path.
KeyPath: TypeAlias = tuple[Any, ...]

#: The name of a mapped axis, or several.
AxisName: TypeAlias = Hashable | tuple[Hashable, ...]
Flag: TypeAlias = jax.Array | np.bool_

Tree = TypeVar("Tree")

HALF = (jnp.dtype("float16"), jnp.dtype("bfloat16"))

# Where Flax's fp8 layers keep metadata, whose gradient is the new value.
FP8_METADATA = "_overwrite_with_gradient"
FP8_KEY = jax.tree_util.DictKey(FP8_METADATA)

ARRAYS = (jax.Array, np.ndarray, np.generic)  # the types of arrays, traced ones among them


def is_inexact(leaf: object) -> TypeGuard[ArrayLike]:
    """Say whether `leaf` holds floating-point or complex numbers, Python's own among them."""
    if isinstance(leaf, ARRAYS):
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
    return isinstance(leaf, (float, complex))


def is_selectable(leaf: Any) -> bool:
    """Return whether `jnp.where` takes a leaf: not texts, objects, dates and float0 of NumPy."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm" and leaf.dtype != jax.dtypes.float0
    return isinstance(leaf, jax.Array)


def is_finite(array: jax.Array) -> jax.Array:
    """Return which elements are finite, of an array of any floating-point or complex dtype."""
    # `jnp.isfinite` does not take every eight-bit format.
    return jnp.isfinite(array.astype(jnp.float32) if jnp.finfo(array.dtype).bits < 16 else array)


def at_least_float32(leaf: Any) -> Any:
    """Return `leaf` in float32 if it holds floating-point numbers of a smaller type."""
    if not is_inexact(leaf):
        return leaf
    value = jnp.asarray(leaf)
    # `promote_types` raises for eight-bit types and under strict dtype promotion.
    return value.astype(jnp.float32) if jnp.finfo(value.dtype).bits < 32 else value


def unscaled(grads: Tree, loss_scale: jax.Array, *, keep_dtypes: bool = False) -> Tree:
    """Multiply gradients by `1 / loss_scale`, at least in float32.

    NaN and infinity stay, and a loss scale out of its bounds makes NaN: one check of the result
    sees all. With `keep_dtypes`, gradients are rounded to the dtypes that they had.
    """
    is_within = (loss_scale >= SMALLEST_SCALE) & (loss_scale <= LARGEST_SCALE)
    reciprocal = jnp.where(is_within, 1 / loss_scale, jnp.nan)

    def unscale(path: KeyPath, leaf: Any) -> Any:
        if not is_inexact(leaf) or FP8_KEY in path:
            return leaf
        value = at_least_float32(leaf)
        if jnp.iscomplexobj(value):  # by parts: a product with 1 + 0j loses the signs of zeros
            times = reciprocal.astype(value.real.dtype)
            product = jax.lax.complex(value.real * times, value.imag * times)
        else:
            product = value * reciprocal.astype(value.dtype)
        return product.astype(jnp.result_type(leaf)) if keep_dtypes else product

    # An overflow here is not an error: the check of the step detects it.
    with jax.debug_nans(False), jax.debug_infs(False):
        return jax.tree_util.tree_map_with_path(unscale, grads)


def has_fp8_metadata(params: Any) -> bool:
    """Return whether Flax keeps fp8 metadata beside the parameters in this collection."""
    return isinstance(params, Mapping) and FP8_METADATA in params


def path_name(path: KeyPath | None) -> str:
    """Return `path` as a message shows it; the empty path is the tree itself."""
    return f"`{jax.tree_util.keystr(path)}`" if path else "the root of the tree"


def children(tree: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Any]:
    """Return the children of a node with their keys, and its definition.

    A leaf is its own only child, at the empty path.
    """
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def first_difference(a: PyTree, b: PyTree, path: KeyPath = ()) -> tuple[KeyPath, PyTree, PyTree]:
    """Return the first place where two trees of different structure differ, and the nodes there."""
    (a_children, a_def), (b_children, b_def) = children(a), children(b)
    if a_def != b_def:
        a_keys, b_keys = ([key for key, _ in children] for children in (a_children, b_children))
        # The key of a leaf is empty.
        only_in_one = (key for key in a_keys + b_keys if key and (key in a_keys) != (key in b_keys))
        return path + next(only_in_one, ()), a, b
    pairs = zip(a_children, b_children, strict=True)
    differ = lambda x, y: jax.tree.structure(x) != jax.tree.structure(y)  # noqa: E731
    key, x, y = next((key, x, y) for (key, x), (_, y) in pairs if differ(x, y))
    return first_difference(x, y, path + key)


def split(
    tree: PyTree, is_chosen: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """Return the chosen leaves of `tree`, and a function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    # Objects that outlive a trace must not hold its tracers.
    rest = [_CHOSEN if is_chosen(leaf) else leaf for leaf in leaves]

    def join(chosen: Sequence[Any]) -> PyTree:
        remaining = iter(chosen)
        return treedef.unflatten(next(remaining) if leaf is _CHOSEN else leaf for leaf in rest)

    return [leaf for leaf in leaves if is_chosen(leaf)], join


_CHOSEN = object()  # stands for a chosen leaf


def in_dtype(array: Any, dtype: Any) -> Any:
    """Return an array in another dtype, or the description of one."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=dtype)
    return jnp.asarray(array, dtype)


def as_array(leaf: Any, dtype: Any = None, *, strong: bool = False) -> Any:
    """Return a number of Python or NumPy as an array, and every other leaf as it is.

    If `strong`, neither it nor an array that was given is weakly typed.
    """
    if isinstance(leaf, (np.ndarray, np.generic)):
        is_number = is_selectable(leaf)
    else:
        is_number = isinstance(leaf, (int, float, complex))
    if strong and (is_number or getattr(leaf, "weak_type", False)):
        return jnp.asarray(leaf, dtype or jnp.result_type(leaf))
    return jnp.asarray(leaf, dtype) if is_number else leaf


def is_symbolic(size: Any) -> bool:
    """Say whether a size is known only when an exported function runs; it cannot be compared."""
    return not isinstance(size, int)
