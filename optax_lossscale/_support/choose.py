"""Choosing between two trees by a flag."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from optax_lossscale._support import checks
from optax_lossscale._support.nnx import is_nnx
from optax_lossscale._support.tree import (
    Flag,
    KeyPath,
    Tree,
    is_array,
    is_inexact,
    is_selectable,
    path_name,
)


def tree_where(pred: ArrayLike, on_true: Tree, on_false: Tree) -> Tree:
    """Choose between two trees of the same structure.

    Use it with `applied` for all that must not move on a skipped step and is not part of the
    optimizer's state: BatchNorm statistics, a moving average of the parameters, a random key.

    Args:
      pred: Which tree to take. `bool[]`, or a Python `bool`.
      on_true: The tree that is returned where `pred` is true. Arrays of any dtype and PRNG keys
        are selected with `jnp.where`; any other leaf must be the same in both trees.
      on_false: The tree that is returned elsewhere, of the same structure, shapes and dtypes.

    Raises:
      TypeError: If `pred` is not boolean, or the dtypes of a leaf differ.
      ValueError: If `pred` is not a scalar, or the trees differ in structure, in the shape of a
        leaf or in a leaf that is not an array. The message names the key path.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> new = {"mean": jnp.array([3.0]), "momentum": 0.9}
      >>> old = {"mean": jnp.array([2.0]), "momentum": 0.9}
      >>> ols.tree_where(False, new, old)
      {'mean': Array([2.], dtype=float32), 'momentum': 0.9}
    """
    pred = checks.read_flag("pred", pred)
    require_alike(on_true, on_false)

    def choose(new: Any, old: Any) -> Any:
        return jnp.where(pred, new, old) if is_selectable(new) else new

    return jax.tree.map(choose, on_true, on_false)


def require_alike(new: Tree, old: Tree) -> None:
    """Raise unless `jnp.where` can select between the trees."""
    checks.require_same_structure("on_true", new, old, "Select between two versions of one tree.")

    def check(path: KeyPath, new: Any, old: Any) -> None:
        if is_array(new) and is_array(old) and new.dtype != old.dtype:
            raise TypeError(
                f"the leaf at {path_name(path)} must have one dtype in both trees, got {new.dtype} "
                f"and {old.dtype}. Cast one of them with `astype`."
            )
        if is_selectable(new) and is_selectable(old):
            return
        if not (new is old or (type(new) is type(old) and np.all(new == old))):
            raise ValueError(
                f"the leaf at {path_name(path)} must be an array in both trees or the same in "
                f"both, got {new!r} and {old!r}. Make it an array with `jnp.asarray` if it changes."
            )

    jax.tree_util.tree_map_with_path(check, new, old)


def constant_if_skipped(applied: Flag, tree: Tree) -> Tree:
    """Return `tree`, with a derivative of zero where a step is skipped."""

    def constant(leaf: Any) -> Any:
        if not _is_traced_number(leaf):
            return leaf
        return jax.lax.select_n(applied, jax.lax.stop_gradient(leaf), leaf)

    return jax.tree.map(constant, tree)


def zeros_if_skipped(applied: Flag, tree: Tree) -> Tree:
    """Return `tree` with zeros for its numbers where a step is skipped: they may be NaN.

    In a compiled step, constants stay: a function may branch by them. A tree in which nothing
    changes is returned itself, since a function may write into it.
    """
    if not isinstance(applied, Tracer):
        return tree if applied else jax.tree.map(_zeros_like, tree)
    if not any(map(_is_traced_number, jax.tree.leaves(tree))) or is_nnx(tree, "Module", "Variable"):
        return tree

    def zero(leaf: Any) -> Any:
        return jnp.where(applied, leaf, _zeros_like(leaf)) if _is_traced_number(leaf) else leaf

    return jax.tree.map(zero, tree)


def _is_traced_number(leaf: Any) -> bool:
    return isinstance(leaf, Tracer) and is_inexact(leaf)


def _zeros_like(leaf: Any) -> Any:
    if isinstance(leaf, (float, complex)):
        return type(leaf)(0)
    return jax.lax.full_like(jnp.asarray(leaf), 0) if is_inexact(leaf) else leaf
