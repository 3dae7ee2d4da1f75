"""Trace a function that a diagnostic was given."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from optax_lossscale._support.jaxprs import Jaxpr, traced
from optax_lossscale._support.tree import ARRAYS, KeyPath, Leaf, PyTree


def trace(
    fun: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Jaxpr, list[tuple[str, KeyPath, Leaf]]]:
    """Return the jaxpr of `fun` and its inputs: each array with its argument's name and key path.

    Arrays and `jax.ShapeDtypeStruct`s are traced; all other leaves are passed through. Arrays that
    `fun` writes into its arguments, such as modules of `flax.nnx`, are among the results.
    """
    names = [*argument_names(fun, len(args)), *kwargs]
    given = [*args, *kwargs.values()]
    is_array = lambda x: isinstance(x, (*ARRAYS, jax.ShapeDtypeStruct))  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(given)
    inputs = [(names[root.idx], tuple(path), x) for (root, *path), x in leaves if is_array(x)]

    def results_and_written(given: list[PyTree]) -> PyTree:
        before = {id(x): x for x in jax.tree.leaves(given)}  # it keeps them, so no `id` is reused
        by_name = dict(zip(kwargs, given[len(args) :], strict=True))
        results = fun(*given[: len(args)], **by_name)
        return results, [x for x in jax.tree.leaves(given) if id(x) not in before]

    return traced(results_and_written, given, is_array)[0], inputs


def argument_names(fun: Callable[..., Any], number: int) -> list[str]:
    """Return the names that the signature of `fun` gives its first `number` arguments."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return [*names, *(f"{rest}[{i}]" for i in range(number))][:number]
