"""Take a step of an optimizer with float32 weights in place of half-precision parameters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._support import checks
from optax_lossscale._support.notes import add_likely_causes
from optax_lossscale._support.tree import Leaf, PyTree, at_least_float32


def step_in_float32(
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    inner_state: optax.OptState,
    params: PyTree,
    *,
    weights: Mapping[int, jax.Array],
    extra_args: Mapping[str, Any],
) -> tuple[list[Leaf], dict[int, jax.Array], optax.OptState]:
    """Take a step of `inner` with float32 weights in place of some parameters.

    Return the updates of all parameters, the new weights in float32, and the new state. The keys of
    weights are the positions of their parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    wide = treedef.unflatten(weights.get(i, leaf) for i, leaf in enumerate(leaves))
    grads = jax.tree.map(at_least_float32, updates)
    try:
        updates, inner_state = inner.update(grads, inner_state, wide, **extra_args)
    except Exception as error:
        add_likely_causes(error, updates, params)
        raise
    try:
        moves = treedef.flatten_up_to(updates)
    except ValueError:  # whose message prints the arrays
        raise checks.differing_structures(updates, params) from None
    new = {
        i: jnp.asarray(optax.apply_updates(weight, moves[i]), jnp.float32)
        for i, weight in weights.items()
    }
    return moves, new, inner_state
