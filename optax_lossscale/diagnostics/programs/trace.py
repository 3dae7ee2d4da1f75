"""Trace a function of any arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_lossscale._support.jaxprs import ClosedJaxpr
from optax_lossscale._support.tree import PyTree, is_array


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
