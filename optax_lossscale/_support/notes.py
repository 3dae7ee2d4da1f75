"""Notes that this library adds to exceptions of an optimizer, about likely causes."""

import jax
import numpy as np

from optax_lossscale._support.tree import KeyPath, PyTree, first_difference, path_name, some_paths


def add_note(error: Exception, note: str) -> None:
    """Add a note to an exception, unless it already has it. Its `args` do not change."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def add_likely_causes(error: Exception, updates: PyTree, params: PyTree) -> None:
    """Add notes about what probably made the `update` of an optimizer fail."""
    if params is not None:
        _add_difference(error, updates, params)
    missing = [path for path in _nones(updates) if path not in _nones(params)]
    if missing:
        add_note(
            error,
            f"The gradient is None at {some_paths(missing)}. Pass zeros, or exclude the parameter "
            "with `optax.masked` or `optax.partition`.",
        )
    if isinstance(error, AttributeError) and type(error.obj) in (dict, list, tuple, str):
        add_note(
            error,
            "`inner` may have received a state in other containers than its own. Restore a "
            "checkpoint onto the state of `init`, so that `inner_state` has the same containers.",
        )


def _nones(tree: PyTree) -> list[KeyPath]:
    """Return the paths at which a tree has None, as Equinox puts for what is not trained."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return [path for path, leaf in leaves if leaf is None]


def _add_difference(error: Exception, updates: PyTree, params: PyTree) -> None:
    """Name the path at which `updates` and `params` differ in structure or shape."""
    if jax.tree.structure(updates) != jax.tree.structure(params):
        path = first_difference(updates, params)[0]
        add_note(error, f"`updates` and `params` differ in structure at {path_name(path)}.")
        return
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, a), b in zip(leaves, jax.tree.leaves(params), strict=True):
        if np.shape(a) != np.shape(b):
            add_note(error, f"`updates` and `params` differ in shape at {path_name(path)}.")
            return
