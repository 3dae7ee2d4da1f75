"""The magnitudes of gradients, and the loss scale that fits them."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from optax_lossscale._support import checks, tree
from optax_lossscale._support.bounds import INT32_MAX
from optax_lossscale._support.lines import warn
from optax_lossscale._support.tree import PyTree
from optax_lossscale.diagnostics.reports import table_or_shapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is optional, and `typing.get_type_hints` reads this name

# The exponents of all float32 numbers. Below -126, the numbers are subnormal.
EXPONENTS = np.arange(-149, 128)


class GradientExponents(NamedTuple):
    """Counts of gradient elements by magnitude, from `gradient_exponents`.

    They print as a table. Add two with `jax.tree.map(operator.add, a, b)`.

    Attributes:
      histogram: The number of finite nonzero elements for each floor(log2(|g|)) from -149 to 127.
        `int32[277]`.
      zero: The number of elements that are zero. `int32[]`.
      flushed: The number of nonzero elements that would round to zero. `int32[]`.
      subnormal: The number of elements that would round to a subnormal number, which has fewer
        digits. `int32[]`.
      overflow: The number of elements that are infinite or would round to infinity. `int32[]`.
      size: The number of all elements, including NaN. `int32[]`.
    """

    histogram: jax.Array
    zero: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    overflow: jax.Array
    size: jax.Array

    def __repr__(self) -> str:
        """Return the counts as a table."""
        return table_or_shapes(self._table, self._asdict())

    def _table(self) -> str:
        size, seen = int(self.size), EXPONENTS[np.asarray(self.histogram) > 0]
        span = f", magnitudes from 2**{seen[0]} to 2**{seen[-1]}" if seen.size else ""
        lines = [f"{size:,} elements{span}:"]
        for name in ("zero", "flushed", "subnormal", "overflow"):
            count = int(getattr(self, name))
            lines.append(f"  {name}: {count:,} ({100 * count / max(size, 1):.3g} %)")
        if count := _count_nonfinite(self):
            lines.append(f"  NaN or infinite: {count:,} ({100 * count / size:.3g} %)")
        return "\n".join(lines)


def _count_nonfinite(exponents: GradientExponents) -> int:
    finite = int(exponents.zero) + int(np.asarray(exponents.histogram).sum(dtype=np.int64))
    return int(exponents.size) - finite


def gradient_exponents(
    grads: PyTree, *, dtype: DTypeLike = jnp.float16, loss_scale: ArrayLike = 1.0
) -> GradientExponents:
    """Count gradient elements by magnitude, and those that a narrow dtype would lose.

    Add the counts of several steps with `jax.tree.map(operator.add, a, b)`, and the counts of
    several devices with `jax.lax.psum`. Beyond 2**31 - 1 elements, add on the host in `np.int64`.

    Args:
      grads: True gradients, computed in float32, since float16 has already lost the small ones.
        Only floating-point and complex leaves count. The real and imaginary parts of a complex
        number count separately.
      dtype: The floating-point dtype to round to, with at most 32 bits.
      loss_scale: The factor to multiply by before rounding, between 2**-126 and 2**126. The
        histogram counts the gradients without this factor. A traced value is not checked.
        `float32[]`.

    Returns:
      The counts. float64 elements outside the range of float32 count in the first or last bin.

    Raises:
      TypeError: If `dtype` is not a floating-point dtype of at most 32 bits, or `loss_scale` is not
        a real number.
      ValueError: If `loss_scale` is out of bounds, or `grads` has more than 2**31 - 1 elements.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> grads = {"w": jnp.array([0.0, 1e-9, 1e-6, 1.0])}
      >>> counts = ols.diagnostics.gradient_exponents(grads)
      >>> print(counts)
      4 elements, magnitudes from 2**-30 to 2**0:
        zero: 1 (25 %)
        flushed: 1 (25 %)
        subnormal: 1 (25 %)
        overflow: 0 (0 %)
      >>> int(ols.diagnostics.gradient_exponents(grads, loss_scale=2.0**15).flushed)
      0

    References:
      Figure 3 of Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    dtype = checks.read_float_dtype(dtype, most_bits=32)
    checks.require_scalar("loss_scale", loss_scale, "Count one replica at a time.")
    if not isinstance(loss_scale, Tracer):
        is_array = isinstance(loss_scale, tree.ARRAYS)
        number = jax.device_get(loss_scale).item() if is_array else loss_scale
        checks.read_scale("loss_scale", number)
    parts = [jnp.zeros(0)]  # so that the list is never empty
    for leaf in filter(tree.is_inexact, jax.tree.leaves(grads)):
        array = tree.at_least_float32(leaf)
        parts += [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    size = sum(part.size for part in parts)
    if not tree.is_symbolic(size) and size > INT32_MAX:
        raise ValueError(
            f"`grads` must have at most 2**31 - 1 elements, got {size}. Count parts of the tree "
            "separately, and add the counts on the host as `np.int64`."
        )
    scale = jnp.asarray(loss_scale, jnp.float32)
    counts = [_exponents(part, dtype, scale) for part in parts]
    return jax.tree.map(lambda *each: sum(each[1:], each[0]), *counts)


@functools.partial(jax.jit, static_argnames="dtype")  # one dispatch in eager execution
def _exponents(array: jax.Array, dtype: np.dtype, scale: jax.Array) -> GradientExponents:
    # Read the bits, and multiply significands and exponents separately. On some platforms, XLA
    # flushes subnormal numbers to zero, so even `x != 0` is false for them.
    info, target = jnp.finfo(array.dtype), jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(array, f"uint{info.bits}")
    largest = 2 ** (info.bits - 1 - info.nmant) - 1  # the biased exponent of infinity and NaN
    biased = (bits >> info.nmant).astype(jnp.int32) & largest
    # A number is an integer times a power of two. The integer has a leading one that is not
    # stored, unless the number is subnormal.
    digits = (bits & (2**info.nmant - 1)) | ((biased > 0).astype(bits.dtype) << info.nmant)
    wide = jnp.float64 if info.bits == 64 else jnp.float32
    significand, digits_exponent = jnp.frexp(digits.astype(wide))
    exponent = jnp.maximum(biased, 1) - 1 + info.minexp - info.nmant + digits_exponent - 1
    is_number = (digits > 0) & (biased < largest)
    is_infinite = (digits == 2**info.nmant) & (biased == largest)

    scale_significand, scale_exponent = jnp.frexp(scale)
    product = 2 * significand * scale_significand.astype(wide)  # between 1/2 and 2
    power = exponent + scale_exponent
    # In units of the smallest normal number, the product is far from float32's own limits.
    in_tiny = jnp.ldexp(product, power - target.minexp)
    half_last_place = 2.0 ** -(target.nmant + 1)
    is_flushed = in_tiny <= half_last_place
    # Formats without infinity (float8_e4m3fn) overflow to NaN.
    is_rounded = jnp.isfinite(jnp.ldexp(product, power).astype(dtype).astype(jnp.float32))

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, dtype=jnp.int32)

    return GradientExponents(
        histogram=_histogram(exponent, is_number),
        zero=count(digits == 0),
        flushed=count(is_number & is_flushed),
        subnormal=count(is_number & ~is_flushed & (in_tiny < 1 - half_last_place)),
        overflow=count(is_infinite | (is_number & ~is_rounded)),
        size=jnp.asarray(array.size, jnp.int32),
    )


def _histogram(exponent: jax.Array, is_number: jax.Array) -> jax.Array:
    def count(bins: jax.Array) -> jax.Array:
        return jnp.bincount(bins.ravel(), length=EXPONENTS.size + 1)[1:].astype(jnp.int32)

    bins = jnp.where(is_number, jnp.clip(exponent + 149, 0, EXPONENTS.size - 1) + 1, 0)
    mesh = jax.typeof(bins).sharding.mesh
    if mesh.explicit_axes:  # JAX (0.7 to 0.12) cannot shard a scatter over them
        replicated = NamedSharding(mesh, PartitionSpec())
        auto_axes: Any = jax.sharding.auto_axes
        count = auto_axes(count, axes=mesh.explicit_axes, out_sharding=replicated)
    return count(bins)


def suggest_loss_scale(
    exponents: GradientExponents, *, headroom: int = 4, dtype: DTypeLike = jnp.float16
) -> float:
    """Return the power of two that scales gradients to the upper end of the range of `dtype`.

    Args:
      exponents: The counts from `gradient_exponents`, on the host, ideally added over many steps.
      headroom: The number of powers of two to leave free above the largest gradient so far. With 0,
        the largest gradient may itself round to infinity.
      dtype: The floating-point dtype that gradients are computed in.

    Returns:
      A loss scale in [2**-126, 2**126], for `FixedLossScale` or as `initial_scale`. If it is above
      2**24, a `DynamicLossScale` also needs a larger `max_scale`.

    Raises:
      TypeError: If `exponents` is traced, or is not a `GradientExponents`; if `headroom` is not an
        integer, or `dtype` is not floating-point.
      ValueError: If `headroom` is negative, or the histogram is empty, stacked or has overflowed.

    Warns:
      UserWarning: If the power of two that fits is outside these bounds.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> exponents = ols.diagnostics.gradient_exponents(jnp.array([1e-6, 2.0**-10]))
      >>> ols.diagnostics.suggest_loss_scale(exponents)
      2097152.0
    """
    headroom = checks.read_count("headroom", headroom, least=0)
    dtype = checks.read_float_dtype(dtype, most_bits=32)
    histogram = _histogram_of(exponents)
    if not histogram.any():
        remedy = "Count float32 gradients, before they are rounded to float16."
        if nonfinite := _count_nonfinite(exponents):
            remedy = f"{nonfinite:,} are NaN or infinite: `first_nonfinite` finds the cause."
        raise ValueError(
            f"`exponents` must count at least one finite number other than zero, got none. {remedy}"
        )
    return fitting_loss_scale(int(EXPONENTS[histogram > 0][-1]), headroom, dtype)


def fitting_loss_scale(largest: int, headroom: int = 4, dtype: DTypeLike = jnp.float16) -> float:
    """Return the loss scale for gradients whose largest magnitude has this exponent.

    Warn if the power of two that fits is out of bounds.
    """
    power = int(jnp.finfo(dtype).maxexp) - 1 - largest - headroom
    within = min(max(power, -126), 126)
    if power != within:
        warn(
            f"The loss scale that fits is 2**{power}, but the limit is 2**{within}. Multiply the "
            f"loss itself by 2**{power - within}."
        )
    return 2.0**within


def _histogram_of(exponents: GradientExponents) -> np.ndarray:
    checks.require_values("exponents", exponents, "Return them from the compiled step first.")
    checks.read_state(exponents, GradientExponents, "exponents", "Use `gradient_exponents`.")
    histogram = np.asarray(exponents.histogram)
    if histogram.shape != EXPONENTS.shape:
        raise ValueError(
            f"`exponents` must hold one histogram, got shape {histogram.shape}. Add them: "
            "`jax.tree.map(lambda x: x.sum(0), exponents)`."
        )
    if not (histogram >= 0).all():
        raise ValueError(
            "`exponents` must hold counts, got negative numbers: an int32 has overflowed. Convert "
            "them with `jax.tree.map(np.int64, exponents)`, and add them on the host."
        )
    return histogram


def plot_gradient_exponents(
    exponents: GradientExponents, ax: "Axes | None" = None, *, dtype: DTypeLike = jnp.float16
) -> "Axes":
    """Plot the histogram and the range of `dtype`.

    Needs matplotlib (install the extra `plot`).

    Args:
      exponents: As for `suggest_loss_scale`. Count scaled gradients to see what training computes.
      ax: The axes to draw into. By default, the axes of a new figure.
      dtype: The floating-point dtype whose range is drawn.

    Returns:
      The axes. `ax.figure.savefig(path)` saves the plot.

    Raises:
      TypeError, ValueError: As for `suggest_loss_scale`, but an empty histogram is allowed.
      ModuleNotFoundError: If matplotlib is not installed.
    """
    info = jnp.finfo(checks.read_float_dtype(dtype, most_bits=32))
    histogram = _histogram_of(exponents)
    if not (ax is None or hasattr(ax, "axvspan")):
        raise TypeError(f"`ax` must be matplotlib axes, got {tree.shown(ax)}. Use `plt.gca()`.")
    if ax is None:
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 - matplotlib is an extra
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "`plot_gradient_exponents` needs matplotlib, the extra `plot`: "
                '`pip install ".[plot]"` in a checkout.',
                name="matplotlib",
            ) from error
        ax = Figure(figsize=(8, 3.5), layout="constrained").subplots()
    zero, seen = int(exponents.zero), EXPONENTS[histogram > 0]
    total = max(histogram.sum() + zero, 1)
    share = 100 * histogram / total
    ax.bar(EXPONENTS + 0.5, share, width=1.0, color="#0072b2", edgecolor="white", linewidth=0.5)
    # Numbers below half of the smallest subnormal number round to zero.
    flushed_below, normal_from = info.minexp - info.nmant - 1, info.minexp
    for low, high, color, name in (
        (-150, flushed_below, "#d55e00", f"zero in {info.dtype}"),
        (flushed_below, normal_from, "#f0e442", "subnormal"),
        (normal_from, info.maxexp, "#009e73", "normal"),
        (info.maxexp, 129, "#555555", "infinite"),
    ):
        label = f"{name}: {share[(low <= EXPONENTS) & (high > EXPONENTS)].sum():.1f} %"
        ax.axvspan(low, high, facecolor=color, alpha=0.25, linewidth=0, zorder=0, label=label)
    ax.set(
        xlim=(min([flushed_below - 6, *seen - 1]), max([info.maxexp + 4, *seen + 2])),
        ylim=(0, 1.3 * max(share.max(), 1)),  # leaves room for the legend
        xlabel="log2 of the gradient's magnitude",
        ylabel="% of the elements",
        title=f"{100 * zero / total:.1f} % of the elements are exactly zero",
    )
    ax.legend(loc="upper center", ncols=4, fontsize="small")
    return ax
