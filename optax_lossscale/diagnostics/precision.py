"""Say in which precision the matrix products of a function run."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from optax_lossscale._support.jaxprs import (
    Equation,
    Jaxpr,
    inner_jaxprs,
    is_literal,
    read_by,
    source_of,
    trace,
)
from optax_lossscale._support.tree import PyTree


@dataclasses.dataclass(frozen=True)
class MatrixProducts:
    """What `precision_report` says of the products whose operands have one dtype.

    Attributes:
      count: How many products run.
      flops: Their floating-point operations: a multiplication and an addition are two.
      source: The line of your own code, with its file, of the first product of those that take the
        most operations; `""` if all of it lies in installed packages.
    """

    count: int
    flops: int
    source: str


def precision_report(
    fun: Callable[..., PyTree], *args: Any, **kwargs: Any
) -> dict[str, MatrixProducts]:
    """Count the matrix products and convolutions by the dtypes of their operands.

    One float32 array makes all that is computed from it float32: a model whose own
    `x.astype(jnp.float32)` comes first trains in float32, whatever the dtype of its parameters.

    `fun` is traced, and does not run. A product in a scan counts once for each iteration, and so
    does one in the grid of a Pallas kernel. In a `jax.lax.while_loop`, whose iterations are not
    known, it counts once. Of the branches of a conditional, the one with the most operations in a
    dtype counts. Under `jax.shard_map`, one device counts. A product whose result is not used does
    not count, unless a loop carries it. The report is of the program as JAX hands it to XLA, which
    may compute a product in another precision, as a GPU computes those of float32 in TF32.

    Args:
      fun: The function: a whole training step, a gradient function, or the model. Any framework's.
      *args: The arguments of `fun`, any pytrees. Arrays, or `jax.ShapeDtypeStruct` in their place,
        are traced, and every other leaf is handed on as it is.
      **kwargs: Its keyword arguments, likewise.

    Returns:
      The counts by dtype, that with the most operations first. A product of float16 and float32 is
      one of float32. Of two dtypes of the same width, both are named:
      `"float8_e4m3fn x float8_e5m2"`.

    Raises:
      TypeError: If `fun` is not a function that JAX can trace.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> params = {"first": jnp.ones((8, 8)), "head": jnp.ones((8, 1))}
      >>> def loss_fn(params, x):
      ...     x = jnp.tanh(x @ params["first"]).astype(jnp.float32)
      ...     return jnp.mean(x @ params["head"].astype(jnp.float32))
      >>> step = ols.grad(loss_fn, compute_dtype=jnp.float16)
      >>> x = jnp.ones((4, 8))
      >>> report = ols.diagnostics.precision_report(step, ols.init(), params, x)
      >>> {dtype: products.count for dtype, products in report.items()}
      {'float16': 2, 'float32': 2}
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}. Give its arguments after it.")
    try:
        closed, _ = trace(fun, *args, **kwargs)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TypeError(
            f"`fun` must be a function that JAX can trace, got {fun!r}, which reads the values of "
            "arrays. Close over what decides about the program, or give it as a number of Python's."
        ) from error
    by_dtype: dict[str, list[_Product]] = {}
    for product in _products(closed.jaxpr, [True] * len(closed.jaxpr.outvars)):
        by_dtype.setdefault(product.dtype, []).append(product)
    report = {
        dtype: MatrixProducts(
            count=sum(product.times for product in products),
            flops=_flops(products),
            source=_source(max(reversed(products), key=lambda product: product.flops)),
        )
        for dtype, products in by_dtype.items()
    }
    return dict(sorted(report.items(), key=lambda item: -item[1].flops))


def format_precision_report(report: Mapping[str, MatrixProducts]) -> str:
    """Write a report in words, the dtype with the most operations first.

    Args:
      report: From `precision_report`.

    Returns:
      For each dtype, a line with the number of products and their share of all operations, and a
      line that says where in your code most of them come from.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 2))
      >>> report = ols.diagnostics.precision_report(jnp.dot, x, w)
      >>> print(ols.diagnostics.format_precision_report(report).splitlines()[0])
      float32: 1 matrix product, 128 operations (100 %)
    """
    total = max(1, sum(products.flops for products in report.values()))
    lines = []
    for dtype, products in report.items():
        count = f"{products.count:,} matrix product" + ("s" if products.count != 1 else "")
        share = f"{100 * products.flops / total:.3g} %"
        lines.append(f"{dtype}: {count}, {products.flops:,} operations ({share})")
        if products.source:
            lines.append(f"  the largest at {products.source}")
    return "\n".join(lines) or "No matrix products or convolutions."


class _Product(NamedTuple):
    """A product or convolution.

    Attributes:
      dtype: The name of the wider dtype of its operands.
      times: How often it runs.
      flops: The operations of all its runs.
      equations: Its equation, and those that it lies within, the innermost first.
    """

    dtype: str
    times: int
    flops: int
    equations: tuple[Equation, ...]


def _source(product: _Product) -> str:
    # JAX forgets where the caller of a function with `jax.checkpoint` stands.
    return next(filter(None, map(source_of, product.equations)), "")


def _flops(products: list[_Product]) -> int:
    return sum(product.flops for product in products)


def _products(
    jaxpr: Jaxpr, is_used: list[bool], times: int = 1, within: tuple[Equation, ...] = ()
) -> Iterator[_Product]:
    """Yield the products on the way to the outputs that are used, the last one first."""
    used = {x for x, u in zip(jaxpr.outvars, is_used, strict=True) if u and not is_literal(x)}
    for equation in reversed(jaxpr.eqns):
        results = [result in used for result in equation.outvars]
        if not any(results) and not equation.effects:
            continue
        used.update(read_by([equation]))
        name, path = equation.primitive.name, (equation, *within)
        if name in _FLOPS:
            lhs, rhs = (operand.aval for operand in equation.invars[:2])
            flops = _FLOPS[name](equation.params, lhs, rhs, equation.outvars[0].aval)
            widest = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
            dtypes = {x.dtype.name for x in (lhs, rhs) if x.dtype.itemsize == widest}
            yield _Product(" x ".join(sorted(dtypes)), times, times * flops, path)
            continue
        inside = []
        for inner in _run_by(equation):
            inner_used = _used_of(inner, equation, results)
            inside.append(list(_products(inner, inner_used, times * _iterations(equation), path)))
        yield from _largest(inside) if name == "cond" else itertools.chain(*inside)


def _largest(branches: list[list[_Product]]) -> Iterator[_Product]:
    """Yield, for each dtype, the products of the branch that has the most operations in it."""
    for dtype in {product.dtype for branch in branches for product in branch}:
        alike = [[product for product in branch if product.dtype == dtype] for branch in branches]
        yield from max(alike, key=_flops)


def _used_of(inner: Jaxpr, equation: Equation, is_used: list[bool]) -> list[bool]:
    """Return which results of a function are used, given those of the equation that runs it."""
    name = equation.primitive.name
    if name == "while" or len(inner.outvars) != len(is_used):
        return [True] * len(inner.outvars)
    # What a scan carries, and does not stack, may be used in its next iteration.
    ranks = zip(inner.outvars, equation.outvars, strict=True)
    carried = [name == "scan" and x.aval.ndim == y.aval.ndim for x, y in ranks]
    return [u or c for u, c in zip(is_used, carried, strict=True)]


def _run_by(equation: Equation) -> Iterator[Jaxpr]:
    """Yield the functions that an equation runs."""
    if equation.primitive.name == "custom_linear_solve":  # it holds the product that it inverts
        yield equation.params["jaxprs"].solve.jaxpr
    else:
        yield from inner_jaxprs(equation)


def _iterations(equation: Equation) -> int:
    if equation.primitive.name == "pallas_call":
        return math.prod(equation.params["grid_mapping"].grid)
    return equation.params["length"] if equation.primitive.name == "scan" else 1


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
}
