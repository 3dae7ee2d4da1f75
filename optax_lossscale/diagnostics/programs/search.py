"""Find by measurement which lines of a function need float32."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._autocast import Product, autocast_except, products_of, total_flops
from optax_lossscale._loss_scale import differentiated
from optax_lossscale._support import checks, jaxprs, nnx
from optax_lossscale._support.lines import GivenWarnings, source_of
from optax_lossscale._support.tree import Leaf, PyTree, is_inexact, split
from optax_lossscale.diagnostics.exponents import EXPONENTS, GradientExponents, suggest_loss_scale
from optax_lossscale.diagnostics.reports import Report

_FLOAT32 = np.dtype(np.float32)
_LIBRARY = "products that only installed packages make"
_HOW_TO_KEEP = (
    'Keep a line in float32 with `precision="highest"` in its product, or with\n'
    '`with jax.default_matmul_precision("highest"):` around it, which works around a call of\n'
    "somebody else's layer, too."
)
_WHAT_IT_IS = (
    "This is the error of one gradient, for one batch and one set of parameters. It need not harm\n"
    "training."
)


@dataclasses.dataclass(frozen=True)
class LineError:
    """What one line costs in exactness, from `precision_search`.

    Attributes:
      error: The error of the gradient if only the products of this line run in half precision.
      flops: Their share of the floating-point operations in the function's products, from 0 to 1.
    """

    error: float
    flops: float


class LineErrors(Report[LineError]):
    """Errors by line."""

    def __repr__(self) -> str:
        """Return the table, with the largest error first."""
        rows = sorted(self.items(), key=lambda item: -item[1].error)
        return "\n".join(f"  {x.error:8.2g}  {x.flops:5.1%}  {line}" for line, x in rows)


@dataclasses.dataclass(frozen=True, repr=False)
class PrecisionSearch:
    """Which lines need float32, from `precision_search`. It prints as a table.

    Attributes:
      error: The error of the gradient with all products in half precision.
      array: The array of the gradient with this error, as a key path.
      lines: The error of each line alone in half precision, and its share of the operations. Empty
        if `error` is within the tolerance.
      keep: The lines that must stay in float32, the most sensitive first: keys of `lines`.
      error_kept: The error with these lines in float32. It equals `error` if there are none.
      dtype: The half precision, as text.
      tolerance: The largest error that was allowed.
    """

    error: float
    array: str
    lines: Mapping[str, LineError]
    keep: tuple[str, ...]
    error_kept: float
    dtype: str
    tolerance: float

    def __repr__(self) -> str:
        """Return the table."""
        where = f" (worst in `{self.array}`)" if self.array else ""
        text = [
            f"With all products in {self.dtype}, the gradient is off by {self.error:.2g}{where}."
        ]
        if not self.lines:
            text.append(f"No line needs float32 for a tolerance of {self.tolerance:g}.")
        else:
            text += [f"Each line alone in {self.dtype}: error, share of the operations, line", ""]
            text += [repr(self.lines), "", "Lines to keep in float32:", ""]
            text += [f"  {line}" for line in self.keep]
            text += [
                "",
                f"With these in float32, it is off by {self.error_kept:.2g}.",
                _HOW_TO_KEEP,
            ]
        return "\n".join([*text, _WHAT_IT_IS])


def precision_search(
    fun: Callable[..., Any],
    *args: Any,
    dtype: DTypeLike = jnp.bfloat16,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    tolerance: float = 0.05,
    progress: Callable[[Iterable[str]], Iterable[str]] | None = None,
    **kwargs: Any,
) -> PrecisionSearch:
    """Find the lines of a loss function whose matrix products must stay in float32.

    `autocast` casts by a rule, and no rule can tell a codebook's distances, random Fourier features
    or a covariance from a layer. What goes wrong there stays finite, so no other diagnostic shows
    it. This function measures it: it compares the gradients of `autocast(fun, dtype)` with those in
    float32, first with all products in half precision, then with each line alone in half precision.
    Then it keeps the most sensitive lines in float32, one after the other, until the error is
    within the tolerance.

    The error is that of the worst array of the gradient: the norm of the difference, divided by the
    norm in float32 plus .03 of the typical size. The typical size is the root mean square over all
    arrays, times the square root of the array's size, so that an array whose true gradient is zero
    blames no line. An array whose norm is below a six-hundredth of the typical size is not seen.

    It is for one batch and one set of parameters, which may be trained. An error in the first
    gradient need not harm training. All runs see the same random numbers.

    Args:
      fun: The loss function before `autocast`.
      *args: The arguments of `fun`, any pytrees. Only arrays of JAX are compiled over; everything
        else is passed through. No argument is changed: modules of `flax.nnx` are copied.
      dtype: `jnp.bfloat16` or `jnp.float16`. In float16, gradients are computed at the loss scale
        that `suggest_loss_scale` finds for those of float32, so that no underflow is blamed on a
        line.
      argnums: Which arguments of `fun` to differentiate with respect to.
      has_aux: Whether `fun` returns `(loss, aux)`.
      transform: The function that differentiates, as in `value_and_grad`.
      tolerance: The largest error of the gradient that is fine. Rounding alone makes about .01.
      progress: A function around the lines, such as `tqdm.tqdm`.
      **kwargs: The keyword arguments of `fun`. Bind those with names of the search's own by a
        lambda.

    Returns:
      A `PrecisionSearch`, which prints as a table. It takes two compilations if no line needs
      float32, and otherwise at most one more for each line and for each line that is kept.

    Raises:
      TypeError: If `fun`, `transform` or `progress` is not a function, `dtype` is not half
        precision, an argument is traced, or `autocast` would cast no product of `fun`.
      ValueError: If `tolerance` is not positive, or the loss or the gradient in float32 is not
        finite.

    Examples:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> angles = 30 * jax.random.normal(keys[0], (16, 32))
      >>> params = {"angles": angles, "head": jnp.ones((32, 8))}
      >>> def loss_fn(params, x):
      ...     features = jnp.sin(x @ params["angles"])
      ...     return jnp.mean((features @ params["head"] - x[:, :8]) ** 2)
      >>> x = jax.random.normal(keys[1], (64, 16))
      >>> found = ols.diagnostics.precision_search(loss_fn, params, x)
      >>> found.error > 0.3, len(found.lines), len(found.keep), found.error_kept < 0.03
      (True, 2, 1, True)
    """
    checks.require_function("fun", fun, "Pass its arguments separately.")
    half = checks.read_half(dtype)
    tolerance = checks.read_positive("tolerance", tolerance)
    if progress is not None:
        checks.require_function("progress", progress, "For example `tqdm.tqdm`.")
    checks.require_values("args", (args, kwargs), "Call it outside of `jax.jit`.")
    given = GivenWarnings()  # about the loss, which is the same in all runs
    parts, join_objects = nnx.taken_apart((args, kwargs))
    arrays, join_arrays = split(parts, lambda leaf: isinstance(leaf, jax.Array))
    program = _Program(
        arrays=arrays,
        arguments=lambda arrays: join_objects(join_arrays(arrays)),
        differentiate=lambda fun: differentiated(
            fun, argnums, has_aux, transform=transform, given=given
        ),
        loss_of=lambda value: value[0] if has_aux else value,
    )
    # JAX's debugging flags would raise at the overflow that this measures.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        return _search(fun, program, half, tolerance, progress or iter)


def _search(
    fun: Callable[..., Any],
    program: "_Program",
    dtype: np.dtype,
    tolerance: float,
    progress: Callable[[Iterable[str]], Iterable[str]],
) -> PrecisionSearch:
    lines, shares = _lines(program, lambda kept: autocast_except(kept, fun, dtype, None), dtype)
    with jax.default_matmul_precision("highest"):
        loss, exact = program.gradient(autocast_except(frozenset(), fun, _FLOAT32, None))
    if not all(np.isfinite(array).all() for array in (*loss, *exact.values())):
        raise ValueError(
            "`fun` must have a finite loss and gradient in float32. `first_nonfinite` finds the "
            "operation that makes the first NaN or infinity."
        )
    loss_scale = _loss_scale_for(exact.values()) if dtype == jnp.float16 else 1.0

    def error(kept: Iterable[str], given: set[str] | None = None) -> tuple[float, str]:
        half = autocast_except(frozenset(kept), fun, dtype, given)
        return _worst(program.gradient(half, loss_scale)[1], exact)

    whole, array = error((), GivenWarnings())
    alone: dict[str, float] = {}
    for line in progress([*shares]) if whole > tolerance else ():
        others = lines - {line}
        alone[line] = error(others)[0] if others else whole
    kept: list[str] = []
    left = whole
    for line in sorted(alone, key=lambda line: -alone[line]):
        if left <= tolerance:
            break
        kept.append(line)
        left, _ = error(kept)
    return PrecisionSearch(
        error=whole,
        array=array,
        lines=LineErrors({x or _LIBRARY: LineError(alone[x], shares[x]) for x in alone}),
        keep=tuple(line or _LIBRARY for line in kept),
        error_kept=left,
        dtype=dtype.name,
        tolerance=tolerance,
    )


@dataclasses.dataclass(frozen=True)
class _Program:
    """The arguments of a loss function, of which each run gets a copy, and how to differentiate."""

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

        def run(arrays: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
            args, kwargs = self.arguments(arrays)
            value, grads = self.differentiate(fun)(jnp.float32(loss_scale), *args, **kwargs)
            found = [(name, x) for name, _, x in nnx.named_leaves(grads) if is_inexact(x)]
            names.extend(name for name, _ in found)
            return jax.tree.leaves(self.loss_of(value)), [x for _, x in found]

        options = {"xla_allow_excess_precision": False}
        loss, grads = jax.jit(run, compiler_options=options)(self.arrays)
        numbers = (_in_float64(x) / loss_scale for x in grads)
        return [*map(np.asarray, loss)], dict(zip(names, numbers, strict=True))

    def products(self, fun: Callable[..., Any]) -> list[Product]:
        """Return the products of a function, in the order of the program."""

        def run(arrays: list[Leaf]) -> list[Leaf]:
            args, kwargs = self.arguments(arrays)
            results = jax.tree.leaves(fun(*args, **kwargs))
            return [leaf for leaf in results if isinstance(leaf, jax.Array)]

        return products_of(jaxprs.make_jaxpr(run)(self.arrays))[::-1]


def _lines(
    program: _Program, half: Callable[[frozenset[str]], Callable[..., Any]], dtype: np.dtype
) -> tuple[frozenset[str], dict[str, float]]:
    """Return all lines with products, and the share of the operations that each has cast.

    `half` casts the products of all but the given lines. A line is `""` for products that no user's
    line makes.
    """

    def flops(products: Iterable[Product]) -> dict[str, int]:
        found: dict[str, int] = {}
        for product in products:
            if product.dtype == dtype.name:
                found[_line(product)] = found.get(_line(product), 0) + product.flops
        return found

    products = program.products(half(frozenset()))
    lines = frozenset(map(_line, products))
    stays = flops(program.products(half(lines)))
    cast = {line: n - stays.get(line, 0) for line, n in flops(products).items()}
    shares = {line: n / total_flops(products) for line, n in cast.items() if n}
    if products and not shares:
        raise TypeError(
            f"`fun` must have products that `autocast(fun, {dtype})` casts, and none of its "
            f"{len(products)} is. Perhaps it is wrapped by `autocast` already: give the loss "
            "before. `precision_report` counts its products."
        )
    return lines, shares


def _line(product: Product) -> str:
    return source_of(product.equations[0])


def _worst(grads: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> tuple[float, str]:
    """Return the error of the worst array of a gradient, and its key path."""
    squares = sum(float(np.sum(np.abs(x) ** 2)) for x in exact.values())
    typical = math.sqrt(squares / max(1, sum(x.size for x in exact.values())))

    def error(name: str) -> float:
        difference = float(np.linalg.norm(grads[name] - exact[name]))
        size = float(np.linalg.norm(exact[name])) + 0.03 * typical * math.sqrt(exact[name].size)
        if not math.isfinite(difference):
            return math.inf
        return difference and (difference / size if size else math.inf)

    errors = {name: error(name) for name in exact}
    name = max(errors, key=lambda name: errors[name], default="")
    return errors.get(name, 0.0), name


def _in_float64(array: jax.Array) -> np.ndarray:
    return np.asarray(array).astype(np.complex128 if jnp.iscomplexobj(array) else np.float64)


def _loss_scale_for(grads: Iterable[np.ndarray]) -> float:
    """Return the loss scale that `suggest_loss_scale` finds for gradients, 1 if all are zero."""
    largest = max((float(np.abs(array).max(initial=0)) for array in grads), default=0.0)
    if not largest:
        return 1.0
    counts: Any = np.zeros(EXPONENTS.shape, np.int32)
    counts[np.searchsorted(EXPONENTS, math.frexp(largest)[1] - 1)] = 1
    none: Any = np.int32(0)
    return suggest_loss_scale(GradientExponents(counts, none, none, none, none, none))
