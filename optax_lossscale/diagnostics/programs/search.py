"""Find by measurement which lines of a function need float32."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._autocast import (
    AUTOCAST_SCOPE,
    Product,
    autocast_except,
    reason_of,
    total_flops,
)
from optax_lossscale._loss_scale import differentiated
from optax_lossscale._support import checks
from optax_lossscale._support.lines import LIBRARY, GivenWarnings, Silence, line_key
from optax_lossscale._support.tree import Leaf, is_inexact
from optax_lossscale.diagnostics.exponents import fitting_loss_scale
from optax_lossscale.diagnostics.programs.runs import Program, arrays_of
from optax_lossscale.diagnostics.programs.search_result import (
    LineError,
    LineErrors,
    PrecisionSearch,
)

_FLOAT32 = np.dtype(np.float32)
_MOST_ALONE = 16  # of more lines, halves are measured first
_NUMPY = (
    "The code needs the values of NumPy's arrays, so they were passed through. Products of two of\n"
    "them are NumPy's, which this does not see."
)


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

    No rule can tell a codebook's distances, random Fourier features or a covariance from a layer.
    What goes wrong there stays finite, so no other diagnostic shows it. This function measures it:
    it compares the gradients of `autocast(fun, dtype)` with those in float32, first with all
    products in half precision, then with each line alone in half precision. Of more than 16 lines,
    halves are measured first, and only those above the tolerance are looked into. Then it keeps the
    most sensitive lines in float32, one after the other, until the error is within the tolerance.
    `autocast(fun, dtype, keep=found.keep)` trains with them.

    The error is a root mean square over the arrays of the gradient. Each array has an error: the
    norm of the difference, divided by the norm in float32 plus .03 of the typical size. The typical
    size is the root mean square over all arrays, times the square root of the array's size, so that
    an array whose true gradient is zero blames no line. One wrong array among many is diluted (one
    that is 140 % wrong is seen among 780 arrays, 21 % among 16), so the text also names the worst
    array, and says so if its error is above .5.

    It is for one batch and one set of parameters, which may be trained. An error in the first
    gradient need not harm training. All runs see the same random numbers of JAX.

    Args:
      fun: The loss function before `autocast`.
      *args: The arguments of `fun`, any pytrees. Arrays of JAX, and those of NumPy with a
        floating-point or complex dtype, are compiled over, as in a compiled step; everything else
        is passed through. If `fun` needs the values of NumPy's arrays, they are passed through too,
        and the text says so. No argument is changed: modules of `flax.nnx` are copied.
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
      float32. Otherwise, it takes at most one more for each of up to 16 lines, and one for each
      line that is kept; 17 for one sensitive line among 100.

    Raises:
      TypeError: If `fun`, `transform` or `progress` is not a function, `dtype` is not half
        precision, an argument is traced, or `autocast` would cast no product of `fun`; the message
        says why.
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

    def program(is_compiled_over: Callable[[Leaf], bool]) -> Program:
        arrays, arguments = arrays_of(args, kwargs, is_compiled_over)
        return Program(
            arrays=arrays,
            arguments=arguments,
            differentiate=lambda fun: differentiated(
                fun, argnums, has_aux, transform=transform, given=given
            ),
            loss_of=lambda value: value[0] if has_aux else value,
        )

    # JAX's debugging flags would raise at the overflow that this measures.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        compiled, notes = program(_is_array), ()
        try:
            lines = _lines(fun, compiled, half)
        except Exception as error:
            # Code may need values of NumPy's arrays, write into them, or ask for their class.
            if all(isinstance(array, jax.Array) for array in compiled.arrays):
                raise
            compiled, notes = program(lambda leaf: isinstance(leaf, jax.Array)), (_NUMPY,)
            try:
                lines = _lines(fun, compiled, half)
            except Exception:  # noqa: BLE001 - the first error is the one that explains
                raise error from None
        return _search(
            fun, compiled, lines, half, tolerance=tolerance, progress=progress or iter, notes=notes
        )


def _is_array(leaf: Leaf) -> bool:
    """Return whether `jax.jit` would trace an argument that products may have as an operand."""
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and is_inexact(leaf))


class _Line(NamedTuple):
    """A line with products that `autocast` casts. Lines that `keep` cannot tell apart are one."""

    source: str  # where it is first
    flops: float  # its share of the operations


class _Lines(NamedTuple):
    """The lines of a function, by their keys for `keep`."""

    all: frozenset[str]
    cast: dict[str, _Line]


class _Error(NamedTuple):
    """The error of a gradient."""

    whole: float  # the root mean square over its arrays
    array: str  # the key path of the worst one
    array_error: float


def _lines(fun: Callable[..., Any], program: Program, dtype: np.dtype) -> _Lines:
    """Return the lines with products of a function, and those that `autocast` casts."""

    def flops(products: Iterable[Product]) -> dict[str, int]:
        found: dict[str, int] = {}
        for product in products:
            if product.dtype == dtype.name:
                key = line_key(product.source())
                found[key] = found.get(key, 0) + product.flops
        return found

    def half(keep: frozenset[str]) -> list[Product]:
        return program.products(autocast_except(keep, fun, dtype, Silence()))

    products = half(frozenset())
    sources = {line_key(x.source()): x.source() or LIBRARY for x in reversed(products)}
    stays = flops(half(frozenset(sources)))
    cast = {key: n - stays.get(key, 0) for key, n in flops(products).items()}
    total = total_flops(products)
    lines = {key: _Line(sources[key], n / total) for key, n in cast.items() if n}
    if products and not lines:
        raise TypeError(
            f"`fun` must have products that `autocast(fun, {dtype})` casts, and none of its "
            f"{len(products)} is. {_why_nothing_is_cast(program.products(fun))}"
        )
    return _Lines(frozenset(sources), lines)


def _why_nothing_is_cast(products: Sequence[Product]) -> str:
    largest = max(products, key=lambda product: product.flops)
    scopes = "/".join(str(eqn.source_info.name_stack) for eqn in largest.equations)
    if AUTOCAST_SCOPE in scopes:
        return "It is wrapped by `autocast` already: give the loss before."
    return f"The largest is at {largest.source() or LIBRARY}. {reason_of(largest)}"


def _search(
    fun: Callable[..., Any],
    program: Program,
    lines: _Lines,
    dtype: np.dtype,
    *,
    tolerance: float,
    progress: Callable[[Iterable[str]], Iterable[str]],
    notes: Iterable[str],
) -> PrecisionSearch:
    with jax.default_matmul_precision("highest"):
        loss, exact = program.gradient(autocast_except(frozenset(), fun, _FLOAT32, Silence()))
    if not all(np.isfinite(array).all() for array in (*loss, *exact.values())):
        raise ValueError(
            "`fun` must have a finite loss and gradient in float32. `first_nonfinite` finds the "
            "operation that makes the first NaN or infinity."
        )
    loss_scale = _loss_scale_for(exact.values()) if dtype == jnp.float16 else 1.0

    def error(keep: Iterable[str], given: GivenWarnings) -> _Error:
        half = autocast_except(frozenset(keep), fun, dtype, given)
        return _error(program.gradient(half, loss_scale)[1], exact)

    def error_alone(group: Sequence[str]) -> float:
        others = lines.all - {*group}
        return error(others, Silence()).whole if others else whole.whole

    whole = error((), GivenWarnings())
    search, left = _Sensitive(error_alone, tolerance), whole.whole
    if left > tolerance:
        search.measure({key: line.source for key, line in lines.cast.items()}, progress)
    keep: list[str] = []
    while left > tolerance and (line := search.most_sensitive(but=keep)) is not None:
        keep.append(line)
        left = error(keep, Silence()).whole
    sources = {key: lines.cast[key].source for key in search.alone}
    found = PrecisionSearch(
        error=whole.whole,
        array=whole.array,
        array_error=whole.array_error,
        lines=LineErrors(
            {sources[x]: LineError(search.alone[x], lines.cast[x].flops) for x in search.alone}
        ),
        keep=tuple(sources[key] for key in keep),
        error_kept=left,
        dtype=dtype.name,
        tolerance=tolerance,
    )
    if not any(np.any(array) for array in exact.values()):
        notes = (*notes, "The gradient is zero in float32, so nothing was measured.")
    object.__setattr__(found, "notes", (*_of_groups(search, lines), *notes))  # it is frozen
    return found


def _of_groups(search: "_Sensitive", lines: _Lines) -> Iterator[str]:
    if number := len(lines.cast) - len(search.alone) if search.alone else 0:
        yield (
            f"{number} other lines were not measured alone: together with all lines that are not\n"
            "kept, they are within the tolerance."
        )


class _Sensitive:
    """How sensitive lines are. `error_of` measures lines in half precision, and all others not."""

    def __init__(self, error_of: Callable[[Sequence[str]], float], tolerance: float) -> None:
        self.error_of, self.tolerance = error_of, tolerance
        self.alone: dict[str, float] = {}  # the error of each line that was measured alone
        self.within: list[tuple[float, Sequence[str]]] = []  # groups within the tolerance

    def measure(
        self, names: dict[str, str], progress: Callable[[Iterable[str]], Iterable[str]]
    ) -> None:
        """Measure each line, or halves of many lines."""
        if len(names) > _MOST_ALONE:
            for _ in progress(self.halves_of([*names])):
                pass
        else:
            for key, _ in zip(names, progress([*names.values()]), strict=False):
                self.alone[key] = self.error_of([key])

    def halves_of(self, group: Sequence[str]) -> Iterator[str]:
        """Measure two halves of a group, and look into those above the tolerance."""
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            yield half[0] if len(half) == 1 else f"{len(half)} lines"
            error = self.error_of(half)
            if len(half) == 1:
                self.alone[half[0]] = error
            elif error > self.tolerance:
                yield from self.halves_of(half)
            else:
                self.within.append((error, half))

    def most_sensitive(self, but: Sequence[str]) -> str | None:
        """Return the line with the largest error that is not among others, None if all are.

        A group may have a larger one, as long as its own error is larger.
        """
        while True:
            left = {line: error for line, error in self.alone.items() if line not in but}
            line = max(left, key=lambda line: left[line], default=None)
            error, group = max(self.within, default=(-1.0, ()))
            if not group or (line is not None and left[line] >= error):
                return line
            self.within.remove((error, group))
            for _ in self.halves_of(group):
                pass


def _error(grads: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> _Error:
    squares = sum(float(np.sum(np.abs(x) ** 2)) for x in exact.values())
    typical = math.sqrt(squares / max(1, sum(x.size for x in exact.values())))

    def error_of(name: str) -> float:
        difference = float(np.linalg.norm(grads[name] - exact[name]))
        size = float(np.linalg.norm(exact[name])) + 0.03 * typical * math.sqrt(exact[name].size)
        if not math.isfinite(difference):
            return math.inf
        return difference and (difference / size if size else math.inf)

    errors = {name: error_of(name) for name in exact}
    worst = max(errors, key=lambda name: errors[name], default="")
    mean_square = sum(error**2 for error in errors.values()) / max(1, len(errors))
    return _Error(math.sqrt(mean_square), worst, errors.get(worst, 0.0))


def _loss_scale_for(grads: Iterable[np.ndarray]) -> float:
    """Return the loss scale that `suggest_loss_scale` finds for gradients, 1 if all are zero."""
    largest = max((float(np.abs(array).max(initial=0)) for array in grads), default=0.0)
    return fitting_loss_scale(math.frexp(largest)[1] - 1) if largest else 1.0
