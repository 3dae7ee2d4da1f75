"""Notes on an optimizer's own exceptions: what this library knows about the likely cause."""

import contextlib
import numbers
from collections.abc import Callable, Generator
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._support.tree import HALF, PyTree, first_difference, is_inexact, path_name

#: Returns a note for an exception, or None.
Cause: TypeAlias = Callable[[Exception], str | None]


@contextlib.contextmanager
def notes_on_errors(*causes: Cause) -> Generator[None, None, None]:
    """Add the notes of `causes` to an exception of any type. Its `args` do not change."""
    try:
        yield
    except Exception as error:
        for cause in causes:
            note = cause(error)
            # Another wrapper inside may have added the same.
            if note is not None and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def other_leaf(params: PyTree) -> Cause:
    """Name the leaf of `params` that is not an array."""

    def cause(_: Exception) -> str | None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not hasattr(leaf, "shape") and not isinstance(leaf, numbers.Number):
                return f"`params` must be a tree of arrays, got {leaf!r} at {path_name(path)}."
        return None

    return cause


def difference(updates: PyTree, params: PyTree) -> Cause:
    """Name the place where `updates` and `params` differ in structure or shape."""

    def cause(_: Exception) -> str | None:
        if params is None:
            return None
        if jax.tree.structure(updates) != jax.tree.structure(params):
            path = first_difference(updates, params)[0]
            return f"`updates` and `params` differ in structure at {path_name(path)}."
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        for (path, a), b in zip(leaves, jax.tree.leaves(params), strict=True):
            if np.shape(a) != np.shape(b):
                return f"`updates` and `params` differ in shape at {path_name(path)}."
        return None

    return cause


def missing_gradients(grads: PyTree) -> Cause:
    """Name the gradients that are None."""

    def cause(_: Exception) -> str | None:
        leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda grad: grad is None)
        nones = [path_name(path) for path, grad in leaves if grad is None]
        if not nones:
            return None
        return (
            f"The gradient is None at {', '.join(nones)}. Give zeros, or leave the parameter out: "
            "`optax.masked`, `optax.partition`."
        )

    return cause


def small_parameters(params: PyTree) -> Cause:
    """Say that parameters are smaller than float32."""

    def cause(_: Exception) -> str | None:
        dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(params) if is_inexact(leaf)}
        if all(jnp.finfo(dtype).bits >= 32 for dtype in dtypes):
            return None
        masters = "Wrap it: `with_master_weights(inner)`. Or keep" if dtypes & {*HALF} else "Keep"
        return (
            "`params` are smaller than float32, and `inner` may not take them with float32 "
            f"gradients. {masters} the parameters in float32, and cast them in the loss function."
        )

    return cause


def plain_container(error: Exception) -> str | None:
    """Say that a state has plain containers, as a checkpoint restored without a target has."""
    if isinstance(error, AttributeError) and type(error.obj) in (dict, list, tuple, str):
        return (
            "`inner` may have been given a state in other containers than it made. Restore a "
            "checkpoint onto the state of `init`, so that `inner_state` has the same containers."
        )
    return None
