"""Combine flags, and select between two trees by a flag."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from optax_lossscale._support import checks
from optax_lossscale._support.nnx import is_nnx
from optax_lossscale._support.tree import (
    ARRAYS,
    Flag,
    Leaf,
    Tree,
    is_inexact,
    is_selectable,
    path_name,
)


def all_true(flags: Sequence[jax.Array]) -> jax.Array:
    """Return whether all flags are true, as a minimum over numbers.

    XLA rewrites a conjunction of L flags into one wide `and`, and XLA:CPU fuses that into each of
    the L selections that read it: L**2 instructions, and minutes of compilation for a thousand
    arrays (jaxlib 0.10.2; `test_the_program_grows_linearly_with_the_number_of_arrays`).
    """
    return jnp.min(jnp.stack(flags).astype(jnp.int32)).astype(jnp.bool_)


def tree_where(pred: ArrayLike, on_true: Tree, on_false: Tree) -> Tree:
    """Select one of two trees with the same structure.

    With `applied`, it keeps the old values of everything that a skipped step must not change and
    that is not part of the optimizer's state: BatchNorm statistics, a moving average of the
    parameters, a random key.

    Args:
      pred: Which tree to return. `bool[]`, or a Python `bool`.
      on_true: The tree that is returned if `pred` is true. `jnp.where` selects its arrays, of any
        dtype, and its PRNG keys. Any other leaf must be the same in both trees.
      on_false: The tree that is returned otherwise, with the same structure, shapes and dtypes.

    Returns:
      A tree with the structure, shapes and dtypes of both.

    Raises:
      TypeError: If `pred` is not boolean, or the dtypes of a leaf differ.
      ValueError: If `pred` is not a scalar, or if the trees differ in their structure, the shape of
        a leaf, or a leaf that is not an array. The message names the key path.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> new = {"mean": jnp.array([3.0]), "momentum": 0.9}
      >>> old = {"mean": jnp.array([2.0]), "momentum": 0.9}
      >>> ols.tree_where(False, new, old)
      {'mean': Array([2.], dtype=float32), 'momentum': 0.9}
    """
    pred = checks.read_flag("pred", pred)
    remedy = "`on_true` and `on_false` are two versions of one tree."
    checks.require_same_structure("on_true", on_true, on_false, remedy)

    paths, treedef = jax.tree_util.tree_flatten_with_path(on_true)
    chosen: list[Leaf] = []
    for (path, new), old in zip(paths, jax.tree.leaves(on_false), strict=True):
        dtypes = [leaf.dtype for leaf in (new, old) if isinstance(leaf, ARRAYS)]
        if len({*dtypes}) > 1:
            raise TypeError(
                f"the leaf at {path_name(path)} must have one dtype in both trees, got {dtypes[0]} "
                f"and {dtypes[1]}. Cast one of them with `astype`."
            )
        if is_selectable(new) and is_selectable(old):
            chosen.append(jnp.where(pred, new, old))
        else:
            checks.require_same(path, new, old)
            chosen.append(new)
    return treedef.unflatten(chosen)


def constant_if_skipped(applied: Flag, tree: Tree) -> Tree:
    """Return `tree`, whose numbers have a derivative of zero if the step is skipped."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        jax.lax.select_n(applied, jax.lax.stop_gradient(leaf), leaf)
        if isinstance(leaf, Tracer) and is_inexact(leaf)
        else leaf
        for leaf in leaves
    )


def zeros_if_skipped(applied: Flag, tree: Tree) -> Tree:
    """Return `tree` with zeros for its floating-point numbers if the step is skipped.

    =========  ===========  ================================================
    `applied`  a number     becomes
    =========  ===========  ================================================
    traced     traced       itself or zero
    traced     constant     itself, since Python code may branch on it
    True       either       itself
    False      either       zero
    =========  ===========  ================================================

    A tree in which nothing changes is returned itself, since a function may write into it.
    """
    is_traced = isinstance(applied, Tracer)

    def zero(leaf: Leaf) -> Leaf:
        is_changed = isinstance(leaf, Tracer) if is_traced else not applied
        if not is_changed or not is_inexact(leaf):
            return leaf
        if isinstance(leaf, (float, complex)):
            return type(leaf)(0)
        return jnp.where(applied, leaf, jax.lax.full_like(jnp.asarray(leaf), 0))

    leaves, treedef = jax.tree.flatten(tree)
    zeros = [*map(zero, leaves)]
    is_same = all(new is old for new, old in zip(zeros, leaves, strict=True))
    return tree if is_same else treedef.unflatten(zeros)


def safe_extra_args(applied: Flag, extra_args: dict[str, Any]) -> dict[str, Any]:
    """Return the extra arguments of an update with zeros for NaN if the step is skipped.

    Objects of flax.nnx are passed on unchanged, since a function may write into them.
    """
    safe = dict(extra_args)
    for name, arg in extra_args.items():
        is_leaf = jax.tree_util.all_leaves([arg])
        if is_leaf or not is_nnx(arg, "Module", "Variable"):
            safe[name] = zeros_if_skipped(applied, arg)
    return safe
