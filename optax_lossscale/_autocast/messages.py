"""The warnings of `autocast`. Each function that it returns gives each of them once."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast.edits import constants_of
from optax_lossscale._autocast.float16_operations import first_overflowing
from optax_lossscale._autocast.matrix_products import Product, products_of, total_flops
from optax_lossscale._autocast.stored_arguments import lookups_in_half
from optax_lossscale._autocast.what_is_cast import (
    has_default_precision,
    is_inside_autocast,
    matmul_precision,
    reason_not_to_cast,
    reason_not_to_follow,
)
from optax_lossscale._support import primitives
from optax_lossscale._support.jaxprs import Jaxpr
from optax_lossscale._support.lines import LIBRARY, GivenWarnings, line_key, source_of, warn_once
from optax_lossscale._support.tree import HALF, is_in


def warn_of_program(
    jaxpr: Jaxpr, cast: Jaxpr, dtype: np.dtype, keep: frozenset[str], given: GivenWarnings
) -> None:
    """Warn about a traced program, and about what `autocast` made of it."""
    _warn_of_closed_over_halves(jaxpr, given)
    if dtype == jnp.float16:
        _warn_of_float16(jaxpr, given)
    if dtype == jnp.float32 and not keep:
        return
    products = products_of(cast)
    if keep:  # else no line is read
        sources = (product.source() for product in products_of(cast, of_all_branches=True))
        _warn_of_unknown_lines(keep, {line_key(source): source for source in sources}, given)
        products = [product for product in products if line_key(product.source()) not in keep]
    if dtype != jnp.float32:
        _warn_of_products(products, dtype, given)


def warn_of_lookups(jaxpr: Jaxpr, given: GivenWarnings) -> None:
    """Warn about tables whose gradients would be added in half precision."""
    for path in lookups_in_half(jaxpr):
        source = source_of(*path)
        warn_once(
            "`fun` casts an argument that is stored in half precision back to it, and looks up "
            f"rows{source and f', at {source}'}. Their gradients would be added in half precision. "
            "Give that layer `dtype=jnp.float32`, or make its parameters in float32 and then store "
            "them: `nnx.update(model, ols.cast(nnx.state(model, nnx.Param), jnp.bfloat16))`.",
            given,
            key="lookups",
        )


def _warn_of_closed_over_halves(jaxpr: Jaxpr, given: GivenWarnings) -> None:
    """Warn about arrays that cannot be read as float32, if there are any."""
    halves = [x for x in constants_of(jaxpr) if is_in(x, *HALF)]
    if not halves:
        return
    largest = max(halves, key=np.size)
    arrays = f"{len(halves)} arrays in half precision, the largest" if halves[1:] else "an array,"
    warn_once(
        f"`fun` closes over {arrays} {jax.typeof(largest).str_short()}, which `autocast` cannot "
        "read as float32. Pass them as arguments. (`functools.partial` closes over, too.)",
        given,
        key="closed over",
    )


def _warn_of_float16(jaxpr: Jaxpr, given: GivenWarnings) -> None:
    """Warn if the program itself computes something in float16 that may overflow there."""
    if found := first_overflowing(jaxpr):
        what, path = found
        source = source_of(*path)
        warn_once(
            f"`fun` itself computes {what} in float16{source and f', at {source}'}. It may "
            "overflow, unlike in float32. Leave out the `dtype` of the layers before it (in Keras, "
            "use the policy `float32`): `autocast` casts their products anyway.",
            given,
            key="float16",
        )


def _warn_of_unknown_lines(
    keep: frozenset[str], lines: dict[str, str], given: GivenWarnings
) -> None:
    """Warn about lines to keep that make no product, as after an edit. `lines` has the others."""
    unknown = sorted(key or LIBRARY for key in keep - lines.keys())
    if unknown:
        made = "".join(f"\n  {source or LIBRARY}" for source in lines.values())
        warn_once(
            f"`keep` names lines that make no product of `fun`: {', '.join(unknown)}. Search again "
            f"with `precision_search`. The lines that do are:{made or ' none'}",
            given,
            key="keep",
        )


def _warn_of_products(products: list[Product], dtype: np.dtype, given: GivenWarnings) -> None:
    """Warn if most operations in products run neither in `dtype` nor in a narrower one.

    Products that the code keeps in float32 do not count, unless nearly all are kept: then the code
    asks for exact products everywhere, as code for TPUs does.
    """
    others = [product for product in products if not _runs_in(dtype, product)]
    total, elsewhere = total_flops(products), total_flops(others)
    if 10 * (total - elsewhere) >= total and not matmul_precision():
        others = [product for product in others if not _is_float32_by_the_code(product)]
        total += total_flops(others) - elsewhere
        elsewhere = total_flops(others)
    if 2 * elsewhere <= total:
        return
    largest = max(others, key=lambda product: product.flops)
    source = largest.source()
    warn_once(
        f"Only {1 - elsewhere / total:.0%} of the floating-point operations in the matrix products "
        f"of `fun` run in {dtype} or in a narrower dtype. The largest other product is "
        f"{f'at {source}' if source else 'in an installed package'}. {reason_of(largest)} "
        "`diagnostics.precision_report(autocast(fun, dtype), ...)` counts all.",
        given,
        key="products",
    )


def _runs_in(dtype: np.dtype, product: Product) -> bool:
    """Return whether a product runs in `dtype` or in a narrower one, forward and backward."""
    eqn, *around = product.equations
    operands = [x.aval.dtype for x in eqn.invars[:2]]
    # float16 has fewer exponents than bfloat16: it needs loss scaling, which bfloat16 does not.
    if dtype == jnp.bfloat16 and jnp.float16 in operands:
        return is_inside_autocast(np.dtype(jnp.float16), *product.equations)
    is_half = all(operand in HALF for operand in operands)
    # The cotangent of a float32 result makes both backward products float32. JAX differentiates no
    # product inside a function with a rule of its own.
    is_differentiated = all(outer.primitive.name in primitives.FOLLOWED for outer in around)
    by_result = is_half and is_differentiated
    itemsize = eqn.outvars[0].aval.dtype.itemsize if by_result else product.itemsize
    return itemsize <= dtype.itemsize


def _is_float32_by_the_code(product: Product) -> bool:
    return product.dtype == "float32" and not has_default_precision(product.equations[0])


def reason_of(product: Product) -> str:
    """Return why a product does not run in half precision."""
    eqn, *around = product.equations
    # If no other reason applies, one operand is fixed.
    return next(filter(None, map(reason_not_to_follow, around)), None) or reason_not_to_cast(
        eqn, has_fixed_operand=True
    )
