"""Find copies of parameters in the state of an optimizer."""

import itertools
from collections.abc import Callable, Sequence

import jax
import optax

from optax_lossscale._autocast import is_move, propagated
from optax_lossscale._support.jaxprs import Equation, traced, without_constants
from optax_lossscale._support.primitives import CONVERSIONS
from optax_lossscale._support.tree import ARRAYS, KeyPath, PyTree


def copies_of(
    is_chosen: Sequence[bool],
    params: optax.Params,
    init: Callable[[optax.Params], PyTree],
    inner_state: optax.OptState,
) -> list[KeyPath]:
    """Return the paths of the arrays in `inner_state` that `init` copies from chosen parameters.

    They are found in its jaxpr, since neither identity nor values are enough: `jax.jit` and
    `optax.flatten` return new arrays, and equal arrays need not be copies.
    """
    is_array = lambda x: isinstance(x, (*ARRAYS, jax.ShapeDtypeStruct))  # noqa: E731
    chosen = [*itertools.compress(is_chosen, map(is_array, jax.tree.leaves(params)))]
    leaves = jax.tree_util.tree_leaves_with_path(inner_state)
    try:
        # Return leaves, since a user's node may not take a mark in the place of an array.
        jaxpr, _, join = traced(lambda params: jax.tree.leaves(init(params)), params, is_array)
    except Exception:  # noqa: BLE001 - `init` reads values, so it cannot be traced, but ran before
        originals = [*itertools.compress(filter(is_array, jax.tree.leaves(params)), chosen)]
        is_copy = [any(leaf is array for array in originals) for _, leaf in leaves]
    else:
        marks = propagated(without_constants(jaxpr), chosen, _is_copy)
        is_copy = [leaf is _COPY for leaf in join([_COPY if mark else None for mark in marks])]
    return [path for (path, _), yes in zip(leaves, is_copy, strict=True) if yes]


_COPY = object()  # in place of an array that is a copy


def _is_copy(path: tuple[Equation, ...], sources: Sequence[bool | None]) -> list[bool | None]:
    """Return whether results have elements of chosen parameters; None if they are not copies."""
    eqn = path[0]
    is_copy = None not in sources and (is_move(eqn) or eqn.primitive.name in CONVERSIONS)
    return [any(sources) if is_copy else None] * len(eqn.outvars)
