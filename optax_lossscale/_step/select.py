"""Selecting between two trees, and keeping the old state of a function where a flag is false.

The result is that of `jnp.where` on what the function returns. Where the function is compiled and
the state is large, `replay` selects in a way that copies nothing.
"""

import cmath
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.typing import ArrayLike

from optax_lossscale._step.replay import constant_unless, repeats_or_acts, replay_where
from optax_lossscale._support import checks
from optax_lossscale._support.tree import (
    KeyPath,
    PyTree,
    Tree,
    is_array,
    is_inexact,
    is_symbolic,
    path_name,
)

Out = TypeVar("Out")

# The number of elements below which a state may be copied: tracing costs more than that.
SMALL = 2**12


def update_where(
    pred: jax.Array, update: Callable[[Any, Tree], tuple[Out, Tree]], grads: Any, state: Tree
) -> tuple[Out, Tree]:
    """Return `update(grads, state)`, but the old state where `pred` is false.

    Args:
      pred: Whether the state moves. `bool[]`.
      update: Returns an output and a new state with the structure, shapes and dtypes of the one
        it is given.
      grads: What the state moves by. Where `pred` is false, `update` is given zeros if it needs
        them: see `_zeroed_if_needed`.
      state: The old state.

    Returns:
      The output, which means nothing where `pred` is false, and the chosen state.

    Raises:
      ValueError: If `update` returns a state of another structure: see `tree_where`.
    """
    given, join_given, _ = _split(grads)
    old, join_old, skeleton = _split(state)
    join: dict[str, Callable[[list[Any]], PyTree]] = {}

    def traced(given: list[Any], old: list[Any]) -> tuple[list[Any], list[Any]]:
        out, new_state = update(join_given(given), join_old(old))
        new, join["new"], new_skeleton = _split(new_state)
        if new_skeleton != skeleton:
            raise ValueError  # `tree_where` says what differs
        outputs, join["out"], _ = _split(out)
        return new, outputs

    closed = None
    if isinstance(pred, Tracer) and _is_large(old):
        # Some code runs only in its caller's trace, such as a write to an `nnx.Variable`. The call
        # below raises any other error again.
        with contextlib.suppress(Exception):
            closed = jax.make_jaxpr(traced)(given, old)
    if closed is None:
        kept = join_old([constant_unless(pred, leaf) for leaf in old])
        out, new_state = update(zero_unless(pred, grads), kept)
        return out, tree_where(pred, new_state, state)
    given = _zeroed_if_needed(pred, given, closed.jaxpr)
    values = replay_where(pred, closed, given, old)
    return join["out"](values[len(old) :]), join["new"](values[: len(old)])


def tree_where(pred: ArrayLike, on_true: Tree, on_false: Tree) -> Tree:
    """Choose between two trees of the same structure.

    Use it for whatever must not move on a skipped step and is not part of the optimizer's state:
    BatchNorm statistics, a moving average of the parameters, a random key.

    Args:
      pred: Which tree to take. `bool[]`, or a Python `bool`.
      on_true: The tree that is returned where `pred` is true. Arrays of any dtype and PRNG keys
        are selected with `jnp.where`; any other leaf must be the same in both trees.
      on_false: The tree that is returned where `pred` is false; the same structure, shapes and
        dtypes as `on_true`.

    Returns:
      A tree with the structure, shapes and dtypes of `on_true`.

    Raises:
      TypeError: If `pred` is not boolean, or the dtypes of a leaf differ.
      ValueError: If `pred` is not a scalar, or the trees differ in structure, in the shape of a
        leaf or in a leaf that is not an array. The message names the key path.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> new = {"mean": jnp.array([3.0]), "momentum": 0.9}
      >>> old = {"mean": jnp.array([2.0]), "momentum": 0.9}
      >>> ols.tree_where(False, new, old)
      {'mean': Array([2.], dtype=float32), 'momentum': 0.9}
    """
    pred = checks.flag("pred", pred)
    checks.same_structure("on_true", on_true, on_false, "Select between two versions of one tree.")
    return jax.tree_util.tree_map_with_path(
        lambda path, a, b: _select(pred, path, a, b), on_true, on_false
    )


def _select(pred: jax.Array, path: KeyPath, on_true: Any, on_false: Any) -> Any:
    if not (is_array(on_true) and is_array(on_false)):
        if on_true is on_false or (type(on_true) is type(on_false) and bool(on_true == on_false)):
            return on_true
        raise ValueError(
            f"the leaf at {path_name(path)} must be an array in both trees or the same in both, "
            f"got {on_true!r} and {on_false!r}. Make it an array with `jnp.asarray` if it changes."
        )
    if on_true.dtype != on_false.dtype:
        raise TypeError(
            f"the leaf at {path_name(path)} must have one dtype in both trees, got "
            f"{on_true.dtype} and {on_false.dtype}. Cast one of them with `astype`."
        )
    checks.same_shape("on_true", path, on_true, on_false, "Select between versions of one tree.")
    if on_true.dtype == jax.dtypes.float0:
        return on_true  # float0 has a single value, and `jnp.where` does not take it
    return jnp.where(pred, on_true, on_false)


def _is_large(arrays: list[Any]) -> bool:
    sizes = [array.size for array in arrays]
    return not any(map(is_symbolic, sizes)) and sum(sizes) >= SMALL


def zero_unless(pred: jax.Array, tree: Tree) -> Tree:
    """Return `tree` with zeros for its floating-point and complex numbers where `pred` is false."""

    def select(leaf: Any) -> Any:
        if isinstance(leaf, (float, complex)) and isinstance(pred, Tracer):
            # Stays a Python number, which the function may compare and branch by.
            return leaf if cmath.isfinite(leaf) else 0.0
        return jnp.where(pred, leaf, _zeros_like(leaf)) if is_inexact(leaf) else leaf

    return jax.tree.map(select, tree)


def _zeroed_if_needed(pred: jax.Array, grads: list[Any], jaxpr: core.Jaxpr) -> list[Any]:
    """Return the gradients that the update is evaluated with.

    A line search loops on NaN, and a callback may raise: they are given zeros where `pred` is
    false. So is everything on the CPU, where that costs nothing. Elsewhere zeros would cost one
    more read of the gradients if the update takes their norm: without them, XLA reads them once
    for the norm and the check. What becomes of NaN is not chosen, nor is its derivative.
    """
    if not repeats_or_acts(jaxpr):
        # The flag is chosen, and not the arrays: of those, XLA:CPU would write some to memory.
        pred = jax.lax.platform_dependent(
            pred, cpu=lambda flag: flag, default=lambda flag: flag | True
        )
    return zero_unless(pred, grads)


def negative_zero_unless(pred: jax.Array, updates: Tree) -> Tree:
    """Return `updates`, or updates without effect where `pred` is false."""

    def select(leaf: Any) -> Any:
        is_number = is_inexact(leaf) or (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer))
        return jnp.where(pred, leaf, -_zeros_like(leaf)) if is_number else leaf

    return jax.tree.map(select, updates)


def _zeros_like(leaf: ArrayLike) -> jax.Array:
    return jax.lax.full_like(jnp.asarray(leaf), 0)  # weakly typed if `leaf` is


def _split(tree: PyTree) -> tuple[list[Any], Callable[[list[Any]], PyTree], Any]:
    """Return the arrays of `tree`, a function that puts others in their place, and the rest."""
    leaves, treedef = jax.tree.flatten(tree)
    is_traced = [is_array(leaf) and leaf.dtype != jax.dtypes.float0 for leaf in leaves]
    arrays = [leaf for leaf, traced in zip(leaves, is_traced, strict=True) if traced]
    # Objects that outlive the trace must not hold its tracers.
    rest = [None if traced else leaf for leaf, traced in zip(leaves, is_traced, strict=True)]

    def join(arrays: list[Any]) -> PyTree:
        remaining = iter(arrays)
        return treedef.unflatten(
            next(remaining) if traced else leaf
            for leaf, traced in zip(rest, is_traced, strict=True)
        )

    # float0 holds nothing but a shape.
    skeleton = treedef, is_traced, [leaf.shape if is_array(leaf) else leaf for leaf in rest]
    return arrays, join, skeleton
