"""Count the matrix products and convolutions of a traced program."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from optax_lossscale._support.jaxprs import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    inner_jaxprs,
    is_literal,
    read_by,
    source_of,
)


class Product(NamedTuple):
    """A matrix product or convolution in a traced program."""

    dtype: str  # the wider dtype of its operands, or both if they are as wide
    itemsize: int  # the bytes of a number of that dtype
    times: int  # how often it runs
    flops: int  # the operations of all its runs: a multiplication and an addition are two
    equations: tuple[Equation, ...]  # its own, and those that it lies within, the innermost first

    def source(self) -> str:
        """Return the line of the user's code that it comes from, with its file; `""` if none."""
        return source_of(*self.equations)


def products_of(jaxpr: Jaxpr | ClosedJaxpr) -> list[Product]:
    """Return the products on the way to the outputs of a jaxpr, the last one first.

    Of the branches of a conditional, those of the branch with the most operations in their dtype.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return list(_products(jaxpr, [True] * len(jaxpr.outvars)))


def total_flops(products: Iterable[Product]) -> int:
    """Return the operations of all products."""
    return sum(product.flops for product in products)


def _products(
    jaxpr: Jaxpr, is_used: list[bool], times: int = 1, within: tuple[Equation, ...] = ()
) -> Iterator[Product]:
    used = {x for x, u in zip(jaxpr.outvars, is_used, strict=True) if u and not is_literal(x)}
    for equation in reversed(jaxpr.eqns):
        results = [result in used for result in equation.outvars]
        if not any(results) and not equation.effects:
            continue
        used.update(read_by([equation]))
        name, path = _name(equation), (equation, *within)
        if name in _FLOPS:
            lhs, rhs = (operand.aval for operand in equation.invars[:2])
            flops = _FLOPS[name](equation.params, lhs, rhs, equation.outvars[0].aval)
            widest = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
            dtypes = {x.dtype.name for x in (lhs, rhs) if x.dtype.itemsize == widest}
            yield Product(" x ".join(sorted(dtypes)), widest, times, times * flops, path)
            continue
        # A linear solve holds the product that it inverts, too.
        solve = [equation.params["jaxprs"].solve.jaxpr] if name == "custom_linear_solve" else None
        again = times * _iterations(equation)
        inside = [
            list(_products(inner, _used_of(inner, equation, results), again, path))
            for inner in solve or inner_jaxprs(equation)
        ]
        yield from _largest(inside) if name == "cond" else itertools.chain(*inside)


def _largest(branches: list[list[Product]]) -> Iterator[Product]:
    """Yield, for each dtype, the products of the branch that has the most operations in it."""
    for dtype in {product.dtype for branch in branches for product in branch}:
        alike = [[product for product in branch if product.dtype == dtype] for branch in branches]
        yield from max(alike, key=total_flops)


def _used_of(inner: Jaxpr, equation: Equation, is_used: list[bool]) -> list[bool]:
    """Return which results of a function are used, given those of the equation that runs it."""
    name = _name(equation)
    if name == "while" or len(inner.outvars) != len(is_used):
        return [True] * len(inner.outvars)
    # The next iteration of a scan may use a result that is carried, and so not stacked.
    ranks = zip(inner.outvars, equation.outvars, strict=True)
    carried = [name == "scan" and x.aval.ndim == y.aval.ndim for x, y in ranks]
    return [u or c for u, c in zip(is_used, carried, strict=True)]


def _name(equation: Equation) -> str:
    # In the jaxpr that the function returned by `jax.vjp` holds, jax 0.12 calls a scan
    # `vjp_node[scan]`.
    return equation.primitive.name.removeprefix("vjp_node[").removesuffix("]")


def _iterations(equation: Equation) -> int:
    if _name(equation) == "pallas_call":
        return math.prod(equation.params["grid_mapping"].grid)
    return equation.params["length"] if _name(equation) == "scan" else 1


def _of_dot(params: Mapping[str, Any], lhs: Any, rhs: Any, _: Any) -> int:
    dimensions, grouped = params.get("dimension_numbers"), ()
    if dimensions is None:  # a ragged product, of which each row takes part in one group
        ragged = params["ragged_dot_dimension_numbers"]
        dimensions, grouped = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    (_, contracted), (_, batch) = dimensions
    shared = {*contracted, *batch, *grouped}
    return 2 * lhs.size * math.prod(n for axis, n in enumerate(rhs.shape) if axis not in shared)


def _of_convolution(params: Mapping[str, Any], _: Any, kernel: Any, result: Any) -> int:
    channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    # The gradient of a convolution with strides reads zeros between the elements.
    zeros = math.prod(params["lhs_dilation"])
    return 2 * result.size * kernel.size // channels // zeros


_FLOPS = {
    "dot_general": _of_dot,
    "ragged_dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
    # `jax.nn.scaled_matmul`, scaled by blocks
    "scaled_matmul_wrapper": lambda _, lhs, __, result: 2 * result.size * lhs.shape[-1],
}
