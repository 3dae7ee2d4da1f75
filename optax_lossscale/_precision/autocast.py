"""Run matrix products in half precision, and everything else as it is written.

A function is traced, its jaxpr is edited, and the edited jaxpr is evaluated. Only equations that
are products change: their operands are converted before them, and their result after them.
"""

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var, jaxpr_as_fun
from jax.lax import convert_element_type_p
from jax.typing import DTypeLike

from optax_lossscale._support import checks, nnx
from optax_lossscale._support.jaxprs import (
    CALLS,
    HAVE_RULES,
    LONG,
    Equation,
    Jaxpr,
    Product,
    holds_equations,
    inner_jaxprs,
    products_of,
    sides_of,
    total_flops,
)
from optax_lossscale._support.lines import warn
from optax_lossscale._support.tree import split


def autocast(fun: Callable[..., Any], dtype: DTypeLike) -> Callable[..., Any]:
    """Return `fun` with its matrix products and convolutions in half precision.

    It is to JAX what `torch.autocast` is to PyTorch: the model stays as it is written, in float32.
    Layers run in `dtype`, forwards and backwards, because they are products; norms, softmax, masks,
    positions, statistics and losses run as they are written, because they are none. Gradients have
    the dtypes of the parameters. With `with_loss_scaling`, this is automatic mixed precision.

    A product runs in `dtype` if it has at least 8 rows, 8 columns and 8 terms in each sum, batch
    dimensions apart; a convolution, if it has 8 output positions in all examples, 8 output
    channels and 8 weights for each. So outer and inner products, a matrix times a vector, and
    products of coordinates stay. Its operands are float32 or half, at least one and the result
    float32, and its precision is the default one. A product that must stay float32 says so in
    JAX's own words: `precision="highest"`, or `with jax.default_matmul_precision("highest"):`.

    The operands are converted to `dtype`, each for each product, and so is what flows back; the
    result is converted back from `dtype`. The functions of `jax.jit`, `jax.checkpoint`, `scan`,
    `while_loop`, `cond`, `shard_map` and `pmap` are followed. Those with a derivative or batching
    rule of their own (`custom_vjp`, `custom_jvp`), Pallas kernels and foreign calls stay as they
    are: give them operands in `dtype` by hand.

    Args:
      fun: The loss, the model, or any other function that is pure and traceable, as for
        `jax.checkpoint`: no Python `if` on values, and nothing written to a closure. Random keys
        and modules of `flax.nnx` are arguments, which move on as they would without `autocast`.
        Put `jax.vmap` inside of `autocast`: outside, it hides the batch.
      dtype: `jnp.float16`, `jnp.bfloat16`, or `jnp.float32`, which casts nothing. Where one
        `autocast` stands in another, the inner one decides.

    Returns:
      A function of the same signature. It traces `fun` once in each call. Its arguments and results
      are those of `fun`: only arrays of JAX are traced, and all else arrives as it is.

    Raises:
      TypeError: If `fun` cannot be called, or `dtype` is another dtype.

    Warns:
      UserWarning: Once, if less than half of the floating-point operations in products run in
        `dtype` or a narrower one. It names the line of the largest other product, and why.

    Examples:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> params = {"hidden": jnp.ones((8, 64)), "head": jnp.ones((64, 8))}
      >>> def loss_fn(params, x):
      ...     return jnp.mean(jnp.tanh(x @ params["hidden"]) @ params["head"])
      >>> step = jax.grad(ols.autocast(loss_fn, jnp.float16))
      >>> report = ols.diagnostics.precision_report(step, params, jnp.ones((32, 8)))
      >>> {dtype: products.count for dtype, products in report.items()}
      {'float16': 4}
      >>> {name: str(grad.dtype) for name, grad in step(params, jnp.ones((32, 8))).items()}
      {'head': 'float32', 'hidden': 'float32'}

    References:
      Tensor cores multiply blocks whose shortest side is 8: Micikevicius et al., `Mixed Precision
      Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    checks.require_function(
        "fun", fun, "Give the loss function or the model itself, not its result."
    )
    half = checks.read_half_or_float32("dtype", dtype)
    if half == jnp.float32:
        return jax.named_call(fun, name=_AS_WRITTEN)
    has_warned = False

    def edited(jaxpr: Jaxpr) -> Jaxpr:
        nonlocal has_warned
        jaxpr = _with_products_in(half, jaxpr)
        has_warned = has_warned or _warn_of_products(jaxpr, half)
        return jaxpr

    @functools.wraps(fun, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return fun(*args, **kwargs)

        transform = functools.partial(_traced, edited)
        on_arrays = nnx.on_arrays if nnx.holds_objects((args, kwargs)) else lambda t, f: t(f)
        return on_arrays(transform, call)(args, kwargs)

    return run


def _traced(edit: Callable[[Jaxpr], Jaxpr], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces `fun`, edits its jaxpr and evaluates it."""

    def run(*args: Any) -> Any:
        arrays, join_args = split(args, _is_jax_array)
        join_results: list[Callable[..., Any]] = []

        def on_arrays(arrays: list[jax.Array]) -> list[jax.Array]:
            results, join = split(fun(*join_args(arrays)), _is_jax_array)
            join_results.append(join)
            return results

        jaxpr = edit(jax.make_jaxpr(on_arrays)(arrays))
        return join_results[0](jaxpr_as_fun(jaxpr)(*arrays))

    return run


def _is_jax_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


# The scope of what an inner `autocast` leaves in float32 on purpose.
_AS_WRITTEN = "autocast_float32"
_PRODUCTS = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated"])
# Operations that hold functions whose types stay as they are.
_FOLLOWED = (CALLS - HAVE_RULES) | {"scan", "while", "cond", "shard_map", "xla_pmap"}
_DEFAULT_PRECISION = (None, (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT))

# The edited jaxprs by dtype, each the same object every time, so that JAX compiles it once. One
# without products is None: a value that held its key would keep it for ever.
_edited: weakref.WeakKeyDictionary[Jaxpr, dict[np.dtype, Jaxpr | None]]
_edited = weakref.WeakKeyDictionary()


def _with_products_in(dtype: np.dtype, jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr of the same type with its products in `dtype`, itself if it has none."""
    known = _edited.setdefault(jaxpr, {})
    if dtype not in known:
        known[dtype] = _edit(dtype, jaxpr)
    return known[dtype] or jaxpr


def _edit(dtype: np.dtype, jaxpr: Jaxpr) -> Jaxpr | None:
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # of one with constants, a class of its own before 0.12
    if inner is not jaxpr:
        new = _with_products_in(dtype, inner)
        return None if new is inner else jaxpr.replace(jaxpr=new)
    edits = [_edit_equation(dtype, eqn) for eqn in jaxpr.eqns]
    if all(edit is None for edit in edits):
        return None
    pairs = zip(jaxpr.eqns, edits, strict=True)
    return jaxpr.replace(eqns=[new for eqn, edit in pairs for new in edit or [eqn]])


def _edit_equation(dtype: np.dtype, eqn: Equation) -> list[Equation] | None:
    """Return the equations in place of one, or None if it stays."""
    name = eqn.primitive.name
    if _is_cast(eqn):
        return _edit_product(dtype, eqn)
    if name not in _FOLLOWED or _is_as_written(eqn):
        return None

    def edit_functions(param: Any) -> Any:
        if holds_equations(param):
            return _with_products_in(dtype, param)
        if type(param) is tuple:  # the branches of a conditional
            new = tuple(map(edit_functions, param))
            return param if all(map(operator.is_, new, param)) else new
        return param

    params = {key: edit_functions(param) for key, param in eqn.params.items()}
    if all(params[key] is param for key, param in eqn.params.items()):
        return None
    return [eqn.replace(params=params)]


def _is_as_written(eqn: Equation) -> bool:
    return _AS_WRITTEN in str(eqn.source_info.name_stack)


def _is_cast(eqn: Equation) -> bool:
    if eqn.primitive.name not in _PRODUCTS or _is_as_written(eqn):
        return False
    dtypes = {operand.aval.dtype.name for operand in eqn.invars[:2]}
    return (
        "float32" in dtypes <= {"float32", "float16", "bfloat16"}
        and eqn.outvars[0].aval.dtype == jnp.float32
        and eqn.params["precision"] in _DEFAULT_PRECISION
        and min(sides_of(eqn)[1:]) >= LONG
    )


def _edit_product(dtype: np.dtype, eqn: Equation) -> list[Equation]:
    """Return conversions of the operands, the product, and the conversion of its result.

    The result is in `dtype`: of one in float32, JAX's transpose would make products of float32. And
    each product has conversions of its own: of shared ones, the cotangents of several uses would be
    added in half precision.
    """
    lhs, rhs, *rest = eqn.invars
    halves = [Var(x.aval.update(dtype=dtype, weak_type=False)) for x in (lhs, rhs, *eqn.outvars)]

    def convert(old: Any, new: Any) -> Equation:
        aval = new.aval
        params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
        conversion = {"primitive": convert_element_type_p, "effects": frozenset(), "params": params}
        return eqn.replace(invars=[old], outvars=[new], **conversion)

    params = eqn.params | {"preferred_element_type": dtype}
    return [
        convert(lhs, halves[0]),
        convert(rhs, halves[1]),
        eqn.replace(invars=[*halves[:2], *rest], outvars=halves[2:], params=params),
        convert(halves[2], eqn.outvars[0]),
    ]


def _warn_of_products(jaxpr: Jaxpr, dtype: np.dtype) -> bool:
    """Warn if less than half of the operations in products run in `dtype` or a narrower dtype."""
    products = products_of(jaxpr)
    others = [product for product in products if product.itemsize > dtype.itemsize]
    total, elsewhere = total_flops(products), total_flops(others)
    if 2 * elsewhere <= total:
        return False
    largest = max(others, key=lambda product: product.flops)
    source = largest.source()
    warn(
        f"Only {1 - elsewhere / total:.0%} of the floating-point operations in the matrix products "
        f"of `fun` run in {dtype} or in a narrower dtype. The largest other product is of "
        f"{largest.dtype}{source and f', at {source}'}. {_why(largest)} "
        "`diagnostics.precision_report(autocast(fun, dtype), ...)` counts all products."
    )
    return True


def _why(product: Product) -> str:
    """Return why a product does not run in half precision."""
    eqn, *around = product.equations
    if any(map(_is_as_written, product.equations)):
        return "An inner `autocast` to float32 keeps it."
    ruled = [outer for outer in around if outer.primitive.name not in _FOLLOWED]
    if ruled:
        names = [inner.debug_info.func_name for inner in inner_jaxprs(ruled[0])]
        rule = ruled[0].primitive
        return (
            f"It lies in `{next(iter(names), rule)}`, which has a rule of its own (`{rule}`) and "
            "stays as it is written: cast its arguments."
        )
    precision = eqn.params.get("precision")
    if precision not in _DEFAULT_PRECISION:
        option: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        where = f"`jax_default_matmul_precision` is {option!r}" if option else "its own"
        return f"Its precision is not the default one ({where}), so it stays as it is written."
    if product.dtype == "float32":
        _, rows, columns, terms = sides_of(eqn)
        vmap = " Is there a `jax.vmap` around `autocast`? It hides the batch: put it inside."
        return (
            f"Its rows, columns and terms in each sum are {rows}, {columns} and {terms}; all must "
            f"be at least {LONG}.{vmap if 1 in (rows, columns) else ''}"
        )
    return f"Products of {product.dtype} stay as they are written: make the operands float32."
