"""Trace a function of any arguments, and name the arrays among them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_lossscale._support.jaxprs import ClosedJaxpr, argument_names
from optax_lossscale._support.tree import KeyPath, PyTree, is_array


def trace(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the jaxpr of `fun`, and the arrays among its arguments, in the order of its inputs.

    Arrays and `jax.ShapeDtypeStruct`s are traced; every other leaf stays as it is. Arrays that the
    function writes into its arguments, such as modules of `flax.nnx`, are among its results.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_traced = [is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

    def on_arrays(arrays: Sequence[Any]) -> PyTree:
        replaced = iter(arrays)
        both = [next(replaced) if t else x for x, t in zip(leaves, is_traced, strict=True)]
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, both)
        results = jax.tree.leaves(fun(*inner_args, **inner_kwargs))
        given = set(map(id, both))
        written = [x for x in jax.tree.leaves((inner_args, inner_kwargs)) if id(x) not in given]
        return [x for x in [*results, *written] if is_array(x)]

    arrays = [x for x, t in zip(leaves, is_traced, strict=True) if t]
    return jax.make_jaxpr(on_arrays)(arrays), arrays


def named_arrays(
    fun: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, KeyPath]]:
    """Return the argument and the key path within it of each array, in the order of the tree."""
    given = dict(sorted(kwargs.items()))  # as JAX flattens dicts
    names = [*argument_names(fun, len(args)), *given]
    roots = zip(names, [*args, *given.values()], strict=True)
    return [
        (name, path)
        for name, tree in roots
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_array(leaf)
    ]
