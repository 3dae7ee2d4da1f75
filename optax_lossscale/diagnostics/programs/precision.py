"""Report the precision of a function's matrix products."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from optax_lossscale._autocast import Product, products_of, total_flops
from optax_lossscale._support import checks
from optax_lossscale._support.tree import PyTree, shown
from optax_lossscale.diagnostics.programs.trace import trace
from optax_lossscale.diagnostics.reports import Report


@dataclasses.dataclass(frozen=True)
class MatrixProducts:
    """Counts of the matrix products whose operands have one dtype, from `precision_report`.

    Attributes:
      count: The number of products that run.
      flops: The number of their floating-point operations. A multiplication and an addition are
        two.
      source: The line of your own code that makes the largest product (the first, if several are
        equally large), with its file. `""` if only installed packages make it.
    """

    count: int
    flops: int
    source: str


class PrecisionReport(Report[MatrixProducts]):
    """Counts of a program's matrix products by the dtype of their operands."""

    def __repr__(self) -> str:
        """Return the table, with the dtype with the most operations first."""
        total = max(1, sum(products.flops for products in self.values()))
        lines = []
        for dtype, products in self.items():
            count = f"{products.count:,} matrix product" + ("s" if products.count != 1 else "")
            share = f"{100 * products.flops / total:.3g} %"
            lines.append(f"{dtype}: {count}, {products.flops:,} operations ({share})")
            if products.source:
                lines.append(f"  the largest at {products.source}")
        return "\n".join(lines) or "No matrix products or convolutions."


def precision_report(
    fun: Callable[..., PyTree], *args: Any, **kwargs: Any
) -> Mapping[str, MatrixProducts]:
    """Count the matrix products and convolutions by the dtypes of their operands.

    A model whose arrays are cast by hand silently runs in float32 after its first
    `x.astype(jnp.float32)`. A report of `autocast(fun, dtype)` shows which products stay in
    float32, and on which line.

    `fun` is traced, not run. A product counts once for each iteration of a scan and of a Pallas
    grid, but only once in a `jax.lax.while_loop`. In a conditional, the branch with the most
    operations in a dtype counts. Under `jax.shard_map`, the products of one device count. A product
    whose result is unused does not count, unless a loop carries it. A GPU may compute float32
    products in TF32.

    Args:
      fun: A whole training step, a gradient function, or the model, of any framework.
      *args: The arguments of `fun`, any pytrees. Arrays and `jax.ShapeDtypeStruct` are traced, and
        all other leaves are passed through.
      **kwargs: The keyword arguments of `fun`, any pytrees.

    Returns:
      The counts by dtype, with the most operations first. They print as a table. If two operands
      have different dtypes, the wider one counts. If both are equally wide, both are named:
      `"float8_e4m3fn x float8_e5m2"`.

    Raises:
      TypeError: If `fun` is not a function that JAX can trace.

    Examples:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> params = {"hidden": jnp.ones((8, 64)), "value": jnp.ones((64, 1))}
      >>> def loss_fn(params, x):
      ...     return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["value"]) ** 2)
      >>> step = ols.grad(ols.autocast(loss_fn, jnp.float16))
      >>> x = jnp.ones((32, 8))
      >>> report = ols.diagnostics.precision_report(step, ols.init(), params, x)
      >>> {dtype: products.count for dtype, products in report.items()}
      {'float16': 2, 'float32': 3}
      >>> print(str(report).splitlines()[0])
      float16: 2 matrix products, 65,536 operations (84.2 %)
    """
    checks.require_function("fun", fun, "Pass its arguments separately.")
    try:
        closed, _ = trace(fun, args, kwargs)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TypeError(
            f"`fun` must be a function that JAX can trace, got {shown(fun)}. Close over values "
            "that determine control flow or shapes, or pass them as Python numbers."
        ) from error
    by_dtype: dict[str, list[Product]] = {}
    for product in products_of(closed):
        by_dtype.setdefault(product.dtype, []).append(product)
    report = {
        dtype: MatrixProducts(
            count=sum(product.times for product in products),
            flops=total_flops(products),
            source=max(reversed(products), key=lambda product: product.flops).source(),
        )
        for dtype, products in by_dtype.items()
    }
    return PrecisionReport(dict(sorted(report.items(), key=lambda item: -item[1].flops)))
