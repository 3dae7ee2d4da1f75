"""Pytrees: kinds of leaves, paths, dtypes, and taking a tree apart."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

#: Any nested container that JAX knows, with any leaves.
PyTree: TypeAlias = Any

#: A leaf of a tree: an array, a Python number, or any other object.
Leaf: TypeAlias = Any

#: The path to a leaf in a tree, as JAX returns it.
KeyPath: TypeAlias = tuple[Any, ...]

#: The name of a mapped axis, or several.
AxisName: TypeAlias = Hashable | tuple[Hashable, ...]
Flag: TypeAlias = jax.Array | np.bool_

Tree = TypeVar("Tree")

HALF = (jnp.dtype("float16"), jnp.dtype("bfloat16"))

#: An array of JAX, traced or not, or of NumPy.
Array: TypeAlias = jax.Array | np.ndarray | np.generic
ARRAYS = (jax.Array, np.ndarray, np.generic)


def is_inexact(leaf: object) -> TypeGuard[ArrayLike]:
    """Return whether a leaf has floating-point or complex numbers, including Python's own."""
    if isinstance(leaf, ARRAYS):
        # Half of the host's time in `check_health` was `issubdtype` (jax 0.10.2).
        kind = getattr(leaf.dtype, "kind", "")  # PRNG keys have none
        return kind in ("f", "c") or bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
    return isinstance(leaf, (float, complex))


def is_selectable(leaf: Leaf) -> bool:
    """Return whether `jnp.where` takes a leaf, unlike NumPy's strings, objects, dates or float0."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm" and leaf.dtype != jax.dtypes.float0
    return isinstance(leaf, jax.Array)


def is_finite(array: jax.Array) -> jax.Array:
    """Return which elements of a floating-point or complex array are finite."""
    # `jnp.isfinite` does not take every eight-bit format.
    return jnp.isfinite(array.astype(jnp.float32) if jnp.finfo(array.dtype).bits < 16 else array)


def at_least_float32(leaf: Leaf) -> Leaf:
    """Return a leaf in float32 if it has floating-point numbers of a smaller dtype."""
    if not is_inexact(leaf):
        return leaf
    value = jnp.asarray(leaf)
    # `promote_types` raises for eight-bit types and under strict dtype promotion.
    return value.astype(jnp.float32) if jnp.finfo(value.dtype).bits < 32 else value


# The collection of the metadata of Flax's fp8 layers. Its gradient is its new value.
FP8_METADATA = "_overwrite_with_gradient"
FP8_KEY = jax.tree_util.DictKey(FP8_METADATA)


def has_fp8_metadata(params: PyTree) -> bool:
    """Return whether `params` has the collection of fp8 metadata beside the parameters."""
    return isinstance(params, Mapping) and FP8_METADATA in params


def shown(value: object) -> str:
    """Return a value as messages show it: never the numbers of an array, and at most 200 letters.

    Reading the numbers would wait for the device.
    """
    text = _structure(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def _structure(value: object) -> str:
    if isinstance(value, (*ARRAYS, jax.ShapeDtypeStruct)):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if value is None or isinstance(value, (str, bytes, int, float, complex, type, np.dtype)):
        return repr(value)
    kind = type(value).__name__
    if name := getattr(value, "__qualname__", ""):
        return f"{kind} `{name}`"
    if jax.tree_util.all_leaves([value]):
        members = getattr(value, "__dict__", {})
        has_arrays = any(isinstance(x, ARRAYS) for x in jax.tree.leaves(members))
        is_hidden = has_arrays or isinstance(value, functools.partial)
        return f"an object of type {kind}" if is_hidden else repr(value)
    return f"{kind}({', '.join(shown(child) for _, child in children(value)[0])})"


def path_name(path: KeyPath | None) -> str:
    """Return a path as messages show it. The empty path is the tree itself."""
    return f"`{jax.tree_util.keystr(path)}`" if path else "the root of the tree"


def some_paths(paths: Sequence[KeyPath]) -> str:
    """Return paths as messages show them, at most three."""
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(map(path_name, paths[:3])) + more


def children(tree: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Hashable]:
    """Return the children of a node with their keys, and the definition of the node.

    The only child of a leaf is the leaf itself, at the empty path.
    """
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def first_difference(a: PyTree, b: PyTree, path: KeyPath = ()) -> tuple[KeyPath, PyTree, PyTree]:
    """Return the first path at which two trees differ in structure, and the nodes there."""
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
    tree: PyTree, is_chosen: Callable[[Leaf], bool]
) -> tuple[list[Leaf], Callable[[Sequence[Leaf]], PyTree]]:
    """Return the chosen leaves of `tree`, and a function that replaces them with others."""
    leaves, treedef = jax.tree.flatten(tree)
    # The function may outlive a trace, so it must not hold its tracers.
    rest = [_CHOSEN if is_chosen(leaf) else leaf for leaf in leaves]

    def join(chosen: Sequence[Leaf]) -> PyTree:
        remaining = iter(chosen)
        return treedef.unflatten(next(remaining) if leaf is _CHOSEN else leaf for leaf in rest)

    return [leaf for leaf in leaves if is_chosen(leaf)], join


_CHOSEN = object()  # in place of a chosen leaf


def in_dtype(array: Leaf, dtype: DTypeLike) -> Leaf:
    """Return an array, or a `jax.ShapeDtypeStruct`, in another dtype."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=dtype)
    return jnp.asarray(array, dtype)


def as_array(leaf: Leaf) -> Leaf:
    """Return a number of Python or NumPy as a JAX array, and any other leaf unchanged."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jnp.asarray(leaf) if is_selectable(leaf) else leaf
    return jnp.asarray(leaf) if isinstance(leaf, (int, float, complex)) else leaf


def is_in(leaf: Leaf, *dtypes: DTypeLike) -> bool:
    """Return whether a leaf is an array in one of these dtypes."""
    return getattr(leaf, "dtype", None) in [jnp.dtype(dtype) for dtype in dtypes]


def in_float32(tree: Tree, *dtypes: DTypeLike) -> Tree:
    """Return a tree with its arrays in these dtypes in float32."""
    return jax.tree.map(lambda x: in_dtype(x, jnp.float32) if is_in(x, *dtypes) else x, tree)


def is_symbolic(size: object) -> bool:
    """Return whether a size is only known when an exported function runs."""
    return not isinstance(size, int)
