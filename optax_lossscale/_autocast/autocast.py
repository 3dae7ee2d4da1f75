"""Run matrix products in half precision, and leave everything else in float32.

A function is traced, its jaxpr is edited, and the edited jaxpr is evaluated.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._autocast.edits import constants_of
from optax_lossscale._autocast.inside import hidden_storage
from optax_lossscale._autocast.matrix_products import Product, products_of, total_flops
from optax_lossscale._autocast.products import with_halves
from optax_lossscale._autocast.stored_arguments import lookups_in_half
from optax_lossscale._autocast.what_is_cast import (
    has_default_precision,
    is_inside_autocast,
    matmul_precision,
    reason_not_to_cast,
    reason_not_to_follow,
    scope_of,
)
from optax_lossscale._support import checks, nnx
from optax_lossscale._support.jaxprs import Jaxpr, evaluate, traced, without_constants
from optax_lossscale._support.lines import GivenWarnings, is_own, source_of, warn_once
from optax_lossscale._support.notes import add_note
from optax_lossscale._support.tree import HALF, Leaf, is_in

P = ParamSpec("P")
Result = TypeVar("Result")


def autocast(fun: Callable[P, Result], dtype: DTypeLike) -> Callable[P, Result]:
    """Return `fun` with its matrix products and convolutions in half precision.

    `autocast` is to JAX what `torch.autocast` is to PyTorch. The code of the model does not change.
    Dense layers, convolutions and attention are matrix products, so they run in `dtype`, forward
    and backward. Norms, softmax, masks, positions, statistics and losses are not, so they run in
    float32. Together with `with_loss_scaling`, this is automatic mixed precision.

    Half precision is a storage format here: arguments in float16 and bfloat16 are read as float32.
    Each is converted where it is used, so that the cotangents of all its uses are added in float32.
    Gradients have the dtypes of the arguments.

    A product runs in `dtype` if it meets all of these conditions:

    - Its rows, columns and contracted length are at least 8 each. Batch dimensions do not count. A
      convolution needs 8 output positions in the whole batch, 8 output channels, and 8 weights for
      each channel. So outer and inner products, products of a matrix and a vector, and products of
      3-D coordinates stay in float32.
    - Its operands are float32 or half precision, and at least one is float32. Its result is
      float32.
    - Its precision is the default one. To keep a product in float32, use JAX's own settings:
      `precision="highest"`, or `with jax.default_matmul_precision("highest"):`.
    - Neither operand is computed only from constants in the code, as an identity, a triangle of
      ones or a Fourier matrix is.

    Products inside `jax.jit`, `jax.checkpoint`, `scan`, `cond`, `shard_map` and `pmap` are cast
    too. A `while_loop` is left alone, since its end may depend on digits that half precision does
    not have. So are functions with custom derivative or batching rules (`custom_vjp`,
    `custom_jvp`), Pallas kernels and foreign calls: cast their arguments yourself. The backward
    pass of a `scan` repeats cheap arithmetic, and elementary functions where that saves memory,
    instead of storing their results.

    Args:
      fun: The loss or the model. It must be pure and traceable, as for `jax.checkpoint`: no Python
        `if` on values, and nothing written to a closure. Pass parameters, random keys and modules
        of `flax.nnx` as arguments. Write `autocast(jax.vmap(f))`: a `vmap` outside hides the batch.
        Do not wrap a training step: inside, an optimizer cannot see which arrays are stored in half
        precision.
      dtype: `jnp.float16`, `jnp.bfloat16`, or `jnp.float32`, which casts no product. If one
        `autocast` is inside another, the inner one decides.

    Returns:
      A function with the same signature. Each call traces `fun` once. Results are float32. An
      argument that is returned unchanged keeps its stored dtype, as does each `Variable` of
      `flax.nnx`, whatever is written into it. Only JAX arrays are traced; everything else is passed
      through.

    Raises:
      TypeError: If `fun` cannot be called, or `dtype` is not one of these three.
      ValueError: If `fun` has half-precision arguments and updates an optimizer that stores arrays
        in half precision: `with_master_weights`, `with_stochastic_rounding` or
        `with_bfloat16_state`.

    Warns:
      UserWarning: Once, if less than half of the floating-point operations in products run in
        `dtype` or a narrower one. float16 does not count as narrower than bfloat16. Products that
        the code keeps in float32 by their precision are left out, unless less than a tenth of all
        operations is cast. The message names the line of the largest other product, and the reason.
        Once, if `fun` closes over arrays in half precision, which `autocast` cannot read as
        float32. Once, if `fun` casts a stored argument back to half precision and looks up rows in
        it, as `nnx.Embed(param_dtype=jnp.bfloat16)` does: their gradients would be added in half
        precision.

    Examples:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> params = {"hidden": jnp.ones((8, 64)), "head": jnp.ones((64, 8))}
      >>> def loss_fn(params, x):
      ...     return jnp.mean(jnp.tanh(x @ params["hidden"]) @ params["head"])
      >>> step = jax.grad(ols.autocast(loss_fn, jnp.float16))
      >>> report = ols.diagnostics.precision_report(step, params, jnp.ones((32, 8)))
      >>> {dtype: products.count for dtype, products in report.items()}
      {'float16': 4}
      >>> stored = ols.cast(params, jnp.bfloat16)
      >>> loss_and_grads = jax.value_and_grad(ols.autocast(loss_fn, jnp.bfloat16))
      >>> loss, grads = loss_and_grads(stored, jnp.ones((32, 8)))
      >>> str(loss.dtype), {name: str(grad.dtype) for name, grad in grads.items()}
      ('float32', {'head': 'bfloat16', 'hidden': 'bfloat16'})

    References:
      Tensor cores multiply blocks whose shortest side is 8: Micikevicius et al., `Mixed Precision
      Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    checks.require_function(
        "fun", fun, "Give the loss function or the model itself, not its result."
    )
    return autocast_except(frozenset(), fun, checks.read_half_or_float32(dtype), GivenWarnings())


def autocast_except(
    kept: frozenset[str], fun: Callable[P, Result], dtype: np.dtype, given: set[str] | None
) -> Callable[P, Result]:
    """Return `autocast(fun, dtype)`, except that products on `kept` lines stay in float32.

    A line is the `source_of` a product, `""` if no user's line makes it. `given` has the warnings
    that were given; if it is None, none is.
    """

    def edit(jaxpr: Jaxpr) -> Jaxpr:
        _warn_of_closed_over_halves(jaxpr, given)
        jaxpr = with_halves(jaxpr, dtype, kept)
        if dtype != jnp.float32:
            _warn_of_products(jaxpr, dtype, given)
        return jaxpr

    def transform(call: Callable[..., Any]) -> Callable[..., Any]:
        marked = jax.named_call(call, name=scope_of(dtype))  # for an outer `autocast`
        return _evaluated(edit, given, marked)

    return nnx.transformed(fun, transform, keep_dtypes=True)


def _evaluated(
    edit: Callable[[Jaxpr], Jaxpr], given: set[str] | None, fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that traces `fun`, edits its jaxpr and evaluates it.

    `fun` reads arrays in half precision as float32. `given` has the warnings that were given.
    """

    def run(*args: Any) -> Any:
        as_stored: dict[int, Leaf] = {}  # NumPy arrays by the `id` of the array that `fun` reads

        def numpy_in_float32(leaf: Leaf) -> Leaf:
            if not isinstance(leaf, (np.ndarray, np.generic)) or leaf.dtype not in HALF:
                return leaf
            wide = leaf.astype(np.float32)
            as_stored[id(wide)] = leaf
            return wide

        def call(args: tuple[Any, ...]) -> Any:
            return fun(*jax.tree.map(lambda x: x.astype(jnp.float32) if _is_half(x) else x, args))

        args = jax.tree.map(numpy_in_float32, args)
        if as_stored or any(map(_is_half, jax.tree.leaves(args))):
            with hidden_storage(), _note_about_dtypes():
                jaxpr, arrays, join = traced(call, args, _is_jax_array)
            _warn_of_lookups(jaxpr, given)
        else:
            jaxpr, arrays, join = traced(call, args, _is_jax_array)
        jaxpr = edit(jaxpr)
        results = join(evaluate(without_constants(jaxpr), jaxpr.consts, *arrays))
        return jax.tree.map(lambda x: as_stored.get(id(x), x), results)

    return run


def _is_jax_array(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array)


def _is_half(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array) and leaf.dtype in HALF


@contextlib.contextmanager
def _note_about_dtypes() -> Generator[None]:
    """Add a note to an error of code that may depend on how its arguments are stored."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not is_own(error):
            add_note(
                error,
                "If the error is about dtypes: `autocast` reads arguments in half precision as "
                "float32, so a dtype that the code names may not fit, such as the bfloat16 of a "
                "carry, a cache, or a layer made with `param_dtype=jnp.bfloat16`. Leave it out, or "
                "make the layer in float32, and store its parameters with `cast`.",
            )
        raise


def _warn_of_lookups(jaxpr: Jaxpr, given: set[str] | None) -> None:
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


def _warn_of_closed_over_halves(jaxpr: Jaxpr, given: set[str] | None) -> None:
    """Warn about arrays that cannot be read as float32, if there are any."""
    halves = [x for x in constants_of(jaxpr) if is_in(x, *HALF)]
    if not halves:
        return
    largest = max(halves, key=np.size)
    arrays = f"{len(halves)} arrays in half precision, the largest" if halves[1:] else "an array,"
    warn_once(
        f"`fun` closes over {arrays} {jax.typeof(largest).str_short()}. `autocast` cannot read "
        "closed-over arrays as float32, so computations with them run in half precision. Pass them "
        "as arguments. `functools.partial` closes over its arguments too.",
        given,
        key="closed over",
    )


def _warn_of_products(jaxpr: Jaxpr, dtype: np.dtype, given: set[str] | None) -> None:
    """Warn if most operations in products run neither in `dtype` nor in a narrower one.

    Products that the code keeps in float32 do not count, unless nearly all are kept: then the code
    asks for exact products everywhere, as code for TPUs does.
    """
    products = products_of(jaxpr)
    others = [product for product in products if not _runs_in(dtype, product)]
    total, elsewhere = total_flops(products), total_flops(others)
    if 10 * (total - elsewhere) >= total and not matmul_precision():
        others = [product for product in others if not _is_kept_in_float32(product)]
        total += total_flops(others) - elsewhere
        elsewhere = total_flops(others)
    if 2 * elsewhere <= total:
        return
    largest = max(others, key=lambda product: product.flops)
    source = largest.source()
    warn_once(
        f"Only {1 - elsewhere / total:.0%} of the floating-point operations in the matrix products "
        f"of `fun` run in {dtype} or in a narrower dtype. The largest other product runs in "
        f"{largest.dtype}{source and f', at {source}'}. {_reason(largest)} "
        "`diagnostics.precision_report(autocast(fun, dtype), ...)` counts all products.",
        given,
        key="products",
    )


def _runs_in(dtype: np.dtype, product: Product) -> bool:
    """Return whether a product runs in `dtype` or in a narrower one, forward and backward."""
    eqn = product.equations[0]
    operands = [x.aval.dtype for x in eqn.invars[:2]]
    # float16 has fewer exponents than bfloat16: it needs loss scaling, which bfloat16 does not.
    if dtype == jnp.bfloat16 and jnp.float16 in operands:
        return is_inside_autocast(np.dtype(jnp.float16), *product.equations)
    is_half = all(operand in HALF for operand in operands)
    # The cotangent of a float32 result makes both backward products float32.
    itemsize = eqn.outvars[0].aval.dtype.itemsize if is_half else product.itemsize
    return itemsize <= dtype.itemsize


def _is_kept_in_float32(product: Product) -> bool:
    return product.dtype == "float32" and not has_default_precision(product.equations[0])


def _reason(product: Product) -> str:
    """Return why a product does not run in half precision."""
    eqn, *around = product.equations
    # If no other reason applies, one operand is fixed.
    return next(filter(None, map(reason_not_to_follow, around)), None) or reason_not_to_cast(
        eqn, has_fixed_operand=True
    )
