"""One step of an optimizer that is either applied or leaves no trace."""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._step.select import negative_zero_unless, update_where, zero_unless
from optax_lossscale._support import checks
from optax_lossscale._support.tree import KeyPath, Tree, is_array, is_inexact, path_name


class Guarded(optax.GradientTransformationExtraArgs):
    """An optimizer that skips some steps, and can also say whether it applied one.

    Attributes:
      update_and_flag: As `update`, with one more result: whether the step was applied. `bool[]`.
    """

    update_and_flag: Callable[..., tuple[optax.Updates, Any, jax.Array]]

    def __new__(cls, init: Any, update_and_flag: Any) -> Self:
        """Build the transformation whose `update` leaves the flag out."""

        def update_fn(
            updates: optax.Updates,
            state: optax.OptState,
            params: optax.Params | None = None,
            **extra_args: Any,
        ) -> tuple[optax.Updates, optax.OptState]:
            return update_and_flag(updates, state, params, **extra_args)[:2]

        self = super().__new__(cls, init, update_fn)
        self.update_and_flag = update_and_flag
        return self


def apply_where(
    applied: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    **extra_args: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """Take a step where `applied` is true. Elsewhere updates are -0.0, and the state is kept."""
    given = zero_unless(applied, extra_args)
    updates, inner_state = update_where(
        applied,
        lambda g, s: apply(inner, g, s, params, **given),
        grads,
        as_arrays(inner_state),
    )
    return negative_zero_unless(applied, updates), inner_state


def apply(
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    **extra_args: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """Take a step, after which the state has the dtypes that it had before."""
    try:
        updates, new_state = inner.update(grads, inner_state, params, **extra_args)
    except (TypeError, ValueError) as error:
        dtypes = [jnp.result_type(p) for p in jax.tree.leaves(params) if is_inexact(p)]
        if any(jnp.finfo(dtype).bits < 32 for dtype in dtypes):
            error.add_note(
                "`params` are of a smaller type than float32, and the gradients may be float32, "
                "which `inner` may not take together. Wrap it: `with_master_weights(inner)`. Or "
                "keep the parameters in float32, and cast them inside the loss function."
            )
        raise
    return updates, _cast_like(new_state, inner_state)


def as_arrays(state: Tree) -> Tree:
    """Return `state` with arrays for numbers of Python and NumPy, as `jax.jit` does."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, (np.ndarray, np.generic)):
            is_number = leaf.dtype.kind not in "OSU" and leaf.dtype != jax.dtypes.float0
        else:
            is_number = isinstance(leaf, (int, float, complex))
        return jnp.asarray(leaf) if is_number else leaf

    return jax.tree.map(convert, state)


def _cast_like(new: Tree, old: Tree) -> Tree:
    """Return the new state of the inner optimizer with the dtypes of the old one.

    Optax promotes: Adam's float16 moments become float32 when they meet float32 gradients. The
    state would change its type from one step to the next, which `jax.lax.scan` refuses and
    `jax.jit` compiles twice.
    """
    checks.same_structure(
        "inner", new, old, "Keep what changes in the state in arrays of a fixed shape."
    )

    def cast(path: KeyPath, new_leaf: Any, old_leaf: Any) -> Any:
        if not is_array(old_leaf):
            return new_leaf
        checks.same_shape(
            "inner", path, new_leaf, old_leaf, "Give it the parameters it was initialized with."
        )
        if is_array(new_leaf) and new_leaf.dtype == old_leaf.dtype:
            return new_leaf
        if is_inexact(new_leaf) and not jnp.issubdtype(old_leaf.dtype, jnp.inexact):
            raise TypeError(
                "`inner` must keep the kind of numbers in its state, got "
                f"{jnp.result_type(new_leaf)} for {old_leaf.dtype} at {path_name(path)}. Start "
                "with the type that it becomes."
            )
        return jnp.asarray(new_leaf, old_leaf.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)
