"""The matrix products of a traced program: their dtypes, sizes and numbers of operations."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Equation, Jaxpr
from optax_lossscale._support.lines import source_of
from optax_lossscale._support.tree import is_symbolic


class Product(NamedTuple):
    """A matrix product or convolution in a traced program."""

    dtype: str  # the wider dtype of its operands, or both if they are equally wide
    itemsize: int  # of that dtype, in bytes
    times: int  # how often it runs
    flops: int  # in all runs; a multiplication and an addition are two
    equations: tuple[Equation, ...]  # its own, and those that contain it, innermost first

    def source(self) -> str:
        """Return the file and line of the user's code that it comes from, `""` if unknown."""
        return source_of(*self.equations)


def products_of(jaxpr: Jaxpr, *, of_all_branches: bool = False) -> list[Product]:
    """Return the products that the outputs of a jaxpr depend on, the last one first.

    For a conditional, these are the products of the branch with the most operations in their dtype,
    or those of all branches.
    """
    jaxpr = jaxprs.without_constants(jaxpr)
    branches = itertools.chain.from_iterable if of_all_branches else _largest_branches
    return list(_products(jaxpr, [True] * len(jaxpr.outvars), branches))


def total_flops(products: Iterable[Product]) -> int:
    """Return the number of floating-point operations in all products."""
    return sum(product.flops for product in products)


def _products(
    jaxpr: Jaxpr,
    is_used: list[bool],
    of_branches: Callable[[list[list[Product]]], Iterable[Product]],
    times: int = 1,
    within: tuple[Equation, ...] = (),
) -> Iterator[Product]:
    used = {
        x for x, u in zip(jaxpr.outvars, is_used, strict=True) if u and not isinstance(x, Literal)
    }
    for equation in reversed(jaxpr.eqns):
        results = [result in used for result in equation.outvars]
        if not any(results) and not equation.effects:
            continue
        used.update(jaxprs.read_by([equation]))
        name, path = equation.primitive.name, (equation, *within)
        if name in primitives.PRODUCTS or name == primitives.SCALED_PRODUCT:
            lhs, rhs = (operand.aval for operand in equation.invars[:2])
            flops = 2 * math.prod(sizes_of(equation))
            if name == primitives.CONVOLUTION:
                # The gradient of a strided convolution reads zeros between the elements.
                flops //= math.prod(equation.params["lhs_dilation"])
            widest = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
            dtypes = {x.dtype.name for x in (lhs, rhs) if x.dtype.itemsize == widest}
            yield Product(" x ".join(sorted(dtypes)), widest, times, times * flops, path)
            continue
        runs = _RUNS[name](equation.params) if name in _RUNS else 1
        functions = _FUNCTIONS[name](equation.params) if name in _FUNCTIONS else None
        inside = [
            list(_products(f, _used_of(f, equation, results), of_branches, times * runs, path))
            for f in functions or jaxprs.functions_in(equation.params)
        ]
        yield from (
            of_branches(inside) if name == primitives.CONDITIONAL else itertools.chain(*inside)
        )


# How often an equation runs its functions, if not once.
_RUNS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    primitives.SCAN: lambda params: params["length"],
    primitives.KERNEL: lambda params: math.prod(params["grid_mapping"].grid),
}
# The functions that an equation runs, if not all that it contains.
_FUNCTIONS: dict[str, Callable[[Mapping[str, Any]], list[Jaxpr]]] = {
    primitives.LINEAR_SOLVE: lambda params: [params["jaxprs"].solve.jaxpr]
}


def _largest_branches(branches: list[list[Product]]) -> Iterator[Product]:
    """Yield, for each dtype, the products of the branch with the most operations in that dtype."""
    dtypes = dict.fromkeys(product.dtype for branch in branches for product in branch)
    for dtype in dtypes:
        alike = [[product for product in branch if product.dtype == dtype] for branch in branches]
        yield from max(alike, key=total_flops)


def _used_of(inner: Jaxpr, equation: Equation, is_used: list[bool]) -> list[bool]:
    """Return which results of a function are used, given which results of its equation are."""
    if len(inner.outvars) != len(is_used):
        return [True] * len(inner.outvars)
    # Carried results, which have no extra axis, may be used by the next iteration of a loop.
    is_loop = equation.primitive.name in primitives.LOOPS
    results = zip(is_used, inner.outvars, equation.outvars, strict=True)
    return [used or (is_loop and x.aval.ndim == y.aval.ndim) for used, x, y in results]


# The shortest side of a tensor core's block. Symbolic dimensions count as this size.
SHORTEST = 8


class ProductSizes(NamedTuple):
    """The sizes of a matrix product: batch, rows, columns, and contracted length.

    For a convolution, these are 1, the number of output positions in the whole batch, the number of
    output channels, and the number of weights for each channel.
    """

    batch: int
    rows: int
    columns: int
    contracted: int


# Those of `SCALED_PRODUCT`, which has no parameter for them.
_SCALED_DIMENSIONS = (((2,), (2,)), ((0,), (0,)))


def sizes_of(equation: Equation) -> ProductSizes:
    """Return the sizes of the product that an equation computes."""
    params = equation.params
    lhs, rhs, result = (
        [SHORTEST if is_symbolic(size) else size for size in x.aval.shape]
        for x in (*equation.invars[:2], equation.outvars[0])
    )
    if equation.primitive.name == primitives.CONVOLUTION:
        numbers = params["dimension_numbers"]
        channels = rhs[numbers.rhs_spec[0]]
        positions = _product(result, but=[numbers.out_spec[1]])
        return ProductSizes(1, positions, channels, _product(rhs, but=[numbers.rhs_spec[0]]))
    groups: Sequence[int] = ()
    if ragged := params.get("ragged_dot_dimension_numbers"):  # each row belongs to one group
        dimensions, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    else:
        dimensions = params.get("dimension_numbers", _SCALED_DIMENSIONS)
    (contracted, rhs_contracted), (batch, rhs_batch) = dimensions
    return ProductSizes(
        batch=math.prod(lhs[axis] for axis in batch),
        rows=_product(lhs, but=[*contracted, *batch]),
        columns=_product(rhs, but=[*rhs_contracted, *rhs_batch, *groups]),
        contracted=math.prod(lhs[axis] for axis in contracted),
    )


def _product(shape: Sequence[int], but: Sequence[int]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in but)
