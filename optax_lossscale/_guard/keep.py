"""An optimizer's step, after which the state is the old one, bit for bit, where a flag is false."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optax_lossscale import _xla
from optax_lossscale._precision.halves import HALF
from optax_lossscale._support import checks
from optax_lossscale._support.choose import constant_unless, tree_where, zero_unless
from optax_lossscale._support.tree import KeyPath, Tree, is_array, is_inexact, path_name


def step_where(
    applied: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    *,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Take a step where `applied` is true. Elsewhere updates are -0.0, and the state is kept."""
    extra_args = {name: zero_unless(applied, arg) for name, arg in extra_args.items()}
    params = jax.tree.map(functools.partial(constant_unless, applied), params)
    updates, state = update_where(
        applied,
        lambda grads, state: take_step(inner, grads, state, params, extra_args),
        grads,
        state,
    )

    def negative_zero_unless_applied(leaf: Any) -> Any:
        is_integer = is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer)
        if not (is_inexact(leaf) or is_integer):
            return leaf
        return jnp.where(applied, leaf, -jax.lax.full_like(jnp.asarray(leaf), 0))

    return jax.tree.map(negative_zero_unless_applied, updates), state


def update_where(
    pred: jax.Array, update: Callable[[Any, Any], tuple[Any, Any]], grads: Any, state: Any
) -> tuple[Any, Any]:
    """Return `update(grads, state)`, but the old state where `pred` is false.

    There `update` sees zeros for `grads`, since a line search loops on NaN and a callback may
    raise; the first output is undefined; and the derivative of the state is that of the old one.
    """
    if _xla.enabled and isinstance(pred, Tracer):
        replayed = _xla.update_where(pred, update, grads, state)
        if replayed is not None:
            return replayed
    constant = jax.tree.map(functools.partial(constant_unless, pred), state)
    out, new_state = update(zero_unless(pred, grads), constant)
    return out, tree_where(pred, new_state, state)


def as_arrays(state: Tree) -> Tree:
    """Return `state` with arrays for numbers of Python and NumPy, as `jax.jit` does."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, (np.ndarray, np.generic)):
            is_number = leaf.dtype.kind not in "OSU" and leaf.dtype != jax.dtypes.float0
        else:
            is_number = isinstance(leaf, (int, float, complex))
        return jnp.asarray(leaf) if is_number else leaf

    return jax.tree.map(convert, state)


def take_step(
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Take a step, after which the state has the dtypes that it had before."""
    try:
        updates, new_state = inner.update(grads, state, params, **extra_args)
        return updates, _cast_like(new_state, state)
    except (TypeError, ValueError) as error:
        for note in _likely_causes(grads, params):
            error.add_note(note)
        raise


def _cast_like(new: Tree, old: Tree) -> Tree:
    """Return the new state of the inner optimizer with the dtypes of the old one.

    Optax promotes: Adam's float16 moments become float32 when they meet float32 gradients.
    """
    remedy = "Give it the parameters it was initialized with; its state has fixed shapes."
    checks.same_structure("inner", new, old, remedy)

    def cast(path: KeyPath, new_leaf: Any, old_leaf: Any) -> Any:
        if not is_array(old_leaf) or getattr(new_leaf, "dtype", None) == old_leaf.dtype:
            return new_leaf
        if is_inexact(new_leaf) and not jnp.issubdtype(old_leaf.dtype, jnp.inexact):
            raise TypeError(
                f"`inner` must keep the kind of numbers, got {jnp.result_type(new_leaf)} for "
                f"{old_leaf.dtype} at {path_name(path)}. Initialize it with that dtype."
            )
        return jnp.asarray(new_leaf, old_leaf.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)


def _likely_causes(grads: optax.Updates, params: optax.Params | None) -> list[str]:
    """Return what may have made an optimizer fail: small dtypes, and gradients that are None."""
    notes: list[str] = []
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(params) if is_inexact(leaf)}
    if any(jnp.finfo(dtype).bits < 32 for dtype in dtypes):
        masters = "Wrap it: `with_master_weights(inner)`. Or keep" if dtypes & {*HALF} else "Keep"
        notes.append(
            "`params` are smaller than float32, and `inner` may not take them with float32 "
            f"gradients. {masters} the parameters in float32, and cast them in the loss function."
        )
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda grad: grad is None)
    nones = [path_name(path) for path, grad in leaves if grad is None]
    if nones:
        notes.append(
            f"The gradient is None at {', '.join(nones)}. Give zeros, or leave the parameter out: "
            "`optax.masked`, `optax.partition`."
        )
    return notes
