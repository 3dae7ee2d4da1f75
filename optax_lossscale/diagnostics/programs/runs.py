"""Compile a loss function again and again, on copies of its arguments."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast import Product, products_of
from optax_lossscale._support import jaxprs, nnx
from optax_lossscale._support.tree import Leaf, PyTree, is_inexact, split


@dataclasses.dataclass(frozen=True)
class Program:
    """The arguments of a loss function, of which each run gets a copy, and how to differentiate.

    Attributes:
      arrays: The arguments that are compiled over.
      arguments: Makes positional and keyword arguments of arrays.
      differentiate: Turns a function into one that takes a loss scale, too, and returns its value
        and its gradient.
      loss_of: Returns the loss of such a value.
    """

    arrays: list[Leaf]
    arguments: Callable[[Sequence[Leaf]], tuple[Any, dict[str, Any]]]
    differentiate: Callable[[Callable[..., Any]], Callable[..., Any]]
    loss_of: Callable[[Any], PyTree]

    def gradient(
        self, fun: Callable[..., Any], loss_scale: float = 1.0
    ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Return the loss, and the arrays of the gradient by their key paths, in float64.

        Without excess precision, the numbers on a CPU are those of an accelerator.
        """
        names: list[str] = []

        def loss_and_grads(arrays: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
            args, kwargs = self.arguments(arrays)
            value, grads = self.differentiate(fun)(jnp.float32(loss_scale), *args, **kwargs)
            found = [(name, x) for name, _, x in nnx.named_leaves(grads) if is_inexact(x)]
            names.extend(name for name, _ in found)
            return jax.tree.leaves(self.loss_of(value)), [x for _, x in found]

        def true(array: jax.Array) -> np.ndarray:
            wide = np.complex128 if jnp.iscomplexobj(array) else np.float64
            return np.asarray(array).astype(wide) / loss_scale

        options = {"xla_allow_excess_precision": False}
        loss, grads = jax.jit(loss_and_grads, compiler_options=options)(self.arrays)
        return [*map(np.asarray, loss)], dict(zip(names, map(true, grads), strict=True))

    def products(self, fun: Callable[..., Any]) -> list[Product]:
        """Return the products of a function, in all branches, in the order of the program."""

        def results(arrays: list[Leaf]) -> list[Leaf]:
            args, kwargs = self.arguments(arrays)
            leaves = jax.tree.leaves(fun(*args, **kwargs))
            return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

        return products_of(jaxprs.make_jaxpr(results)(self.arrays), of_all_branches=True)[::-1]


def arrays_of(
    args: tuple[PyTree, ...], kwargs: dict[str, PyTree], is_compiled_over: Callable[[Leaf], bool]
) -> tuple[list[Leaf], Callable[[Sequence[Leaf]], tuple[Any, dict[str, Any]]]]:
    """Return the chosen arrays in arguments, and a function that makes copies of the arguments."""
    parts, join_objects = nnx.taken_apart((args, kwargs))
    arrays, join_arrays = split(parts, is_compiled_over)
    return arrays, lambda arrays: join_objects(join_arrays(arrays))
