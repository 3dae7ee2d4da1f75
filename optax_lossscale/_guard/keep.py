"""Take an optimizer's step, or keep the old state bit for bit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale import _xla
from optax_lossscale._state import MasterWeightsState, StochasticRoundingState, subtrees
from optax_lossscale._support import checks, notes, tree
from optax_lossscale._support.choose import constant_if_skipped, safe_extra_args, zeros_if_skipped
from optax_lossscale._support.tree import Flag, KeyPath, Leaf, PyTree, Tree


def step_where(
    applied: Flag,
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    *,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Update with `inner` if `applied` is true; otherwise return updates of -0.0 and `state`."""
    state = jax.tree.map(tree.as_array, state)
    extra_args = safe_extra_args(applied, extra_args)
    params = constant_if_skipped(applied, params)

    def step(grads: optax.Updates, state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
        try:
            updates, new_state = inner.update(grads, state, params, **extra_args)
            return updates, _like(state, new_state)
        except Exception as error:
            notes.add_likely_causes(error, grads, params)
            if not any(subtrees(state, MasterWeightsState, StochasticRoundingState)):
                _add_small_parameters(error, params)
            raise

    updates, state = run_where(applied, step, grads, state)

    def negative_zero_if_skipped(leaf: Leaf) -> Leaf:
        is_numeric = isinstance(leaf, tree.ARRAYS) and jnp.issubdtype(leaf.dtype, np.number)
        if not (is_numeric or isinstance(leaf, (float, complex))):
            return leaf
        array = jnp.asarray(leaf)
        return jnp.where(applied, array, -jax.lax.full_like(array, 0))

    return jax.tree.map(negative_zero_if_skipped, updates), state


def _add_small_parameters(error: Exception, params: PyTree) -> None:
    """Note that parameters are smaller than float32, if they are."""
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(params) if tree.is_inexact(leaf)}
    if any(jnp.finfo(dtype).bits < 32 for dtype in dtypes):
        is_half = dtypes & {*tree.HALF}
        masters = "Wrap it: `with_master_weights(inner)`. Or keep" if is_half else "Keep"
        notes.add_note(
            error,
            "`params` are smaller than float32, and `inner` may not take them with float32 "
            f"gradients. {masters} the parameters in float32, and cast them in the loss function.",
        )


def run_where(
    applied: Flag,
    step: Callable[[optax.Updates, PyTree], tuple[PyTree, PyTree]],
    grads: optax.Updates,
    state: PyTree,
) -> tuple[PyTree, PyTree]:
    """Return `step(grads, state)`, with the old state if `applied` is false.

    If it is false, a `step` with loops, callbacks or other effects is called with zeros instead of
    `grads`: given NaN, a line search may loop forever and a callback may raise. The first output is
    then undefined, and the returned state differentiates like the old one. `step` must preserve the
    structure, shapes and dtypes of the state.
    """
    if _xla.enabled:
        try:
            return _xla.replay(applied, step, grads, state)
        except _xla.CannotReplayError:
            pass
    zeros = zeros_if_skipped(applied, grads)
    out, new_state = step(zeros, constant_if_skipped(applied, state))
    kept = jax.tree.map(
        lambda new, old: jnp.where(applied, new, old) if isinstance(old, jax.Array) else new,
        new_state,
        state,
    )
    return out, kept


def call_where(
    applied: Flag, fun: Callable[[optax.Updates], PyTree], grads: optax.Updates
) -> PyTree:
    """Return `fun(grads)`, which is undefined if `applied` is false, as in `run_where`."""
    result, _ = run_where(applied, lambda grads, state: (fun(grads), state), grads, ())
    return result


def _like(old: Tree, new: Tree) -> Tree:
    """Return the inner optimizer's new state, cast to the dtypes of the old one.

    Optax promotes: float16 moments of Adam become float32 when combined with float32 gradients.
    """
    remedy = (
        "Pass the same parameters to `init` and `update`. Restore a checkpoint onto the state that "
        "`init` returns, so that `inner_state` has the same containers."
    )
    checks.require_same_structure("inner", new, old, remedy)

    def cast(path: KeyPath, old_leaf: Leaf, new_leaf: Leaf) -> Leaf:
        if not isinstance(old_leaf, jax.Array):
            checks.require_same(path, new_leaf, old_leaf)
            return new_leaf
        if getattr(new_leaf, "dtype", None) == old_leaf.dtype:
            return new_leaf
        if tree.is_inexact(new_leaf) and not jnp.issubdtype(old_leaf.dtype, jnp.inexact):
            raise TypeError(
                f"`inner` must not replace integers in its state with floating-point numbers, got "
                f"{jnp.result_type(new_leaf)} for {old_leaf.dtype} at {tree.path_name(path)}. Let "
                "its `init` return floating-point numbers."
            )
        return jnp.asarray(new_leaf, old_leaf.dtype)

    return jax.tree_util.tree_map_with_path(cast, old, new)
