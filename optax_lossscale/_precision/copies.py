"""Find copies of parameters in the state of an optimizer."""

import itertools
from collections.abc import Callable, Sequence

import jax
import optax

from optax_lossscale._support.jaxprs import (
    Equation,
    is_move,
    make_jaxpr,
    propagated,
    without_constants,
)
from optax_lossscale._support.primitives import CONVERSIONS
from optax_lossscale._support.tree import ARRAYS, KeyPath, Leaf, PyTree, split


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
    arrays, join = split(params, is_array)
    paths: list[KeyPath] = []

    def init_arrays(arrays: list[Leaf]) -> list[Leaf]:
        leaves = jax.tree_util.tree_leaves_with_path(init(join(arrays)))
        found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, ARRAYS)]
        paths.extend(path for path, _ in found)
        return [leaf for _, leaf in found]

    try:
        jaxpr = without_constants(make_jaxpr(init_arrays)(arrays))
    except Exception:  # noqa: BLE001 - `init` reads values, so it cannot be traced, but ran before
        originals = [*itertools.compress(arrays, chosen)]
        leaves = jax.tree_util.tree_leaves_with_path(inner_state)
        return [path for path, leaf in leaves if any(leaf is array for array in originals)]
    return [*itertools.compress(paths, propagated(jaxpr, chosen, _is_copy))]


def _is_copy(path: tuple[Equation, ...], sources: Sequence[bool | None]) -> list[bool | None]:
    """Return whether results have elements of chosen parameters; None if they are not copies."""
    eqn = path[0]
    is_copy = None not in sources and (is_move(eqn) or eqn.primitive.name in CONVERSIONS)
    return [any(sources) if is_copy else None] * len(eqn.outvars)
