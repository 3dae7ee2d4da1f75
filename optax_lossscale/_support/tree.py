"""Pytrees: kinds of leaves, and where they stand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Say whether `leaf` holds floating-point or complex numbers, Python's own among them."""
    if is_array(leaf):
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
    return isinstance(leaf, (float, complex))


def readable(leaf: ArrayLike) -> jax.Array:
    """Return an array of a dtype that `isfinite` takes: not of every eight-bit format."""
    array = jnp.asarray(leaf)
    return array.astype(jnp.float32) if jnp.finfo(array.dtype).bits < 16 else array


def at_least_float32(leaf: Any) -> Any:
    """Return `leaf` in float32 if it holds floating-point numbers of a smaller type."""
    if not is_inexact(leaf):
        return leaf
    value = jnp.asarray(leaf)
    # `promote_types` raises for eight-bit types and under strict dtype promotion.
    return value.astype(jnp.float32) if jnp.finfo(value.dtype).bits < 32 else value


def is_fp8_metadata(path: KeyPath) -> bool:
    """Return whether a leaf is metadata of Flax's fp8 layers, whose gradient is the new value."""
    return jax.tree_util.DictKey(FP8_METADATA) in path


def has_fp8_metadata(params: Any) -> bool:
    """Return whether Flax keeps fp8 metadata beside the parameters in this collection."""
    return isinstance(params, Mapping) and FP8_METADATA in params


FP8_METADATA = "_overwrite_with_gradient"


def path_name(path: KeyPath | None) -> str:
    """Return `path` as a message shows it; the empty path is the tree itself."""
    return f"`{jax.tree_util.keystr(path)}`" if path else "the root of the tree"


def children(tree: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Any]:
    """Return the children of a node with their keys, and its definition.

    A leaf is its own only child, at the empty path.
    """
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def first_difference(a: PyTree, b: PyTree, path: KeyPath = ()) -> KeyPath | None:
    """Return the key path of the first place where two trees differ in structure."""
    (a_children, a_def), (b_children, b_def) = children(a), children(b)
    if a_def != b_def:
        a_keys, b_keys = ([key for key, _ in children] for children in (a_children, b_children))
        # The key of a leaf is empty.
        only_in_one = (key for key in a_keys + b_keys if key and (key in a_keys) != (key in b_keys))
        return path + next(only_in_one, ())
    for (key, x), (_, y) in zip(a_children, b_children, strict=True):
        difference = first_difference(x, y, path + key) if key else None
        if difference is not None:
            return difference
    return None


def subtrees(tree: PyTree, *kinds: type[Tree]) -> Iterator[tuple[KeyPath, Tree]]:
    """Yield every sub-tree that is of one of these NamedTuples, with its path."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: bool(read_as(kinds, x)))
    return ((path, sub) for path, node in found if (sub := read_as(kinds, node)))


def read_as(kinds: tuple[type[Any], ...], node: Any) -> Any:
    """Return a node as a NamedTuple of one of these, or None if it is none.

    `flax.nnx.split`, Flax's `to_state_dict` and Orbax without a target make mappings of it, and may
    leave out fields that hold no arrays.
    """
    if isinstance(node, kinds):
        return node
    for kind in kinds if isinstance(node, Mapping) else ():
        first, *rest = kind._fields
        required = {first, *(name for name in rest if kind.__annotations__[name] is jax.Array)}
        if required <= node.keys() <= {first, *rest}:
            return kind(**dict.fromkeys(rest, ()) | dict(node))
    return None


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


def as_strong_array(leaf: Any, dtype: Any = None) -> Any:
    """Return `leaf` as a strongly typed array if it is a Python number or a weakly typed one."""
    # NumPy arrays and PRNG keys lack the attribute.
    if isinstance(leaf, (int, float, complex)) or getattr(leaf, "weak_type", False):
        return jnp.asarray(leaf, dtype or jnp.result_type(leaf))
    return leaf


def is_symbolic(size: Any) -> bool:
    """Say whether a size is known only when an exported function runs; it cannot be compared."""
    return not isinstance(size, int)
