"""How large gradients are, and which loss scale fits them."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from optax_lossscale._support import checks
from optax_lossscale._support.bounds import INT32_MAX
from optax_lossscale._support.lines import warn
from optax_lossscale._support.tree import (
    ARRAYS,
    PyTree,
    at_least_float32,
    is_inexact,
    is_symbolic,
)
from optax_lossscale.diagnostics.reports import table_or_shapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Those of all float32 numbers; below -126 they are subnormal.
EXPONENTS = np.arange(-149, 128)


class GradientExponents(NamedTuple):
    """The exponents of gradients, from `gradient_exponents`. Add two with `jax.tree.map`.

    They print as a table.

    Attributes:
      histogram: Finite elements by floor(log2(|g|)), from -149 to 127, no zeros. `int32[277]`.
      zero: Elements that are zero. `int32[]`.
      flushed: Other elements that would be rounded to zero. `int32[]`.
      subnormal: Elements that would be rounded to a subnormal number, with fewer digits. `int32[]`.
      overflow: Elements that are infinite or would be rounded to infinity. `int32[]`.
      size: All elements, NaN included. `int32[]`.
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
        return "\n".join(lines)


def gradient_exponents(
    grads: PyTree, *, dtype: DTypeLike = jnp.float16, loss_scale: ArrayLike = 1.0
) -> GradientExponents:
    """Count gradients by magnitude, and those that a small dtype would lose.

    Add those of several steps with `jax.tree.map(operator.add, a, b)`, of several devices with
    `jax.lax.psum`, and beyond 2**31 - 1 elements on the host, in `np.int64`.

    Args:
      grads: True gradients, computed in float32: float16 has already lost the small ones. Only
        floating-point and complex leaves count, the two parts of a complex number separately.
      dtype: The floating-point dtype to round to, of at most 32 bits.
      loss_scale: The number to multiply by before rounding, between 2**-126 and 2**126.
        `float32[]`; a traced one is not checked. The histogram is that of the gradients themselves.

    Returns:
      The counts. Numbers of a float64 beyond float32's exponents count at the histogram's ends.

    Raises:
      TypeError: If `dtype` is not such a dtype, or `loss_scale` not a real number.
      ValueError: If `loss_scale` is out of its bounds, or there are more than 2**31 - 1 elements.

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
    dtype = checks.read_float_dtype("dtype", dtype, most_bits=32)
    checks.require_scalar("loss_scale", loss_scale, "Look at one replica at a time.")
    if not isinstance(loss_scale, Tracer):
        number = jax.device_get(loss_scale).item() if isinstance(loss_scale, ARRAYS) else loss_scale
        checks.read_scale("loss_scale", number)
    parts = [jnp.zeros(0)]  # so that there is one
    for array in (at_least_float32(leaf) for leaf in jax.tree.leaves(grads) if is_inexact(leaf)):
        parts += [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    size = sum(part.size for part in parts)
    if not is_symbolic(size) and size > INT32_MAX:
        raise ValueError(
            f"`grads` must have at most 2**31 - 1 elements, got {size}. Look at one part of the "
            "tree at a time, and add on the host: `jax.tree.map(np.int64, ...)`."
        )
    scale = jnp.asarray(loss_scale, jnp.float32)
    counts = [_exponents(part, dtype, scale) for part in parts]
    return jax.tree.map(lambda *each: sum(each[1:], each[0]), *counts)


@functools.partial(jax.jit, static_argnames="dtype")  # one dispatch in eager execution
def _exponents(array: jax.Array, dtype: np.dtype, scale: jax.Array) -> GradientExponents:
    # Read from the bits, and multiplied part by part: XLA flushes subnormal numbers to zero on
    # some platforms, and there even `x != 0` is false for them.
    info, target = jnp.finfo(array.dtype), jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(array, f"uint{info.bits}")
    largest = 2 ** (info.bits - 1 - info.nmant) - 1  # of infinity and NaN
    biased = (bits >> info.nmant).astype(jnp.int32) & largest
    # A number is an integer of its digits, of which only subnormal ones have no leading one, times
    # a power of two.
    digits = (bits & (2**info.nmant - 1)) | ((biased > 0).astype(bits.dtype) << info.nmant)
    wide = jnp.float64 if info.bits == 64 else jnp.float32
    significand, places = jnp.frexp(digits.astype(wide))
    exponent = jnp.maximum(biased, 1) - 1 + info.minexp - info.nmant + places - 1
    is_number = (digits > 0) & (biased < largest)
    is_infinite = (digits == 2**info.nmant) & (biased == largest)

    scale_significand, scale_exponent = jnp.frexp(scale)
    product = 2 * significand * scale_significand.astype(wide)  # between 1/2 and 2
    power = exponent + scale_exponent
    # The product in units of the smallest normal number, far from where float32 itself ends.
    in_tiny = jnp.ldexp(product, power - target.minexp)
    half_last_place = 2.0 ** -(target.nmant + 1)
    is_flushed = in_tiny <= half_last_place
    # Formats without infinity (float8_e4m3fn) have NaN in its place.
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
    if mesh.explicit_axes:  # over which JAX (0.7 to 0.12) has no rule for a scatter
        replicated = NamedSharding(mesh, PartitionSpec())
        auto_axes: Any = jax.sharding.auto_axes
        count = auto_axes(count, axes=mesh.explicit_axes, out_sharding=replicated)
    return count(bins)


def suggest_loss_scale(
    exponents: GradientExponents, *, headroom: int = 4, dtype: DTypeLike = jnp.float16
) -> float:
    """Return the power of two that moves the histogram to the upper end of the range of `dtype`.

    Args:
      exponents: From `gradient_exponents`, on the host; best the sum over many steps.
      headroom: Powers of two to leave free above the largest gradient so far. With 0, that one
        itself may be rounded to infinity.
      dtype: The type that gradients are computed in.

    Returns:
      A loss scale within [2**-126, 2**126], for `FixedLossScale` or as `initial_scale`; above
      2**24, a `DynamicLossScale` needs a larger `max_scale`, too.

    Raises:
      TypeError: If an argument is of the wrong type, or `exponents` is traced.
      ValueError: If `headroom` is negative, or the histogram is empty, stacked or wrapped around.

    Warns:
      UserWarning: If the power of two that fits lies outside of these bounds.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> exponents = ols.diagnostics.gradient_exponents(jnp.array([1e-6, 2.0**-10]))
      >>> ols.diagnostics.suggest_loss_scale(exponents)
      2097152.0
    """
    headroom = checks.read_count("headroom", headroom, least=0)
    info = jnp.finfo(checks.read_float_dtype("dtype", dtype, most_bits=32))
    histogram = _histogram_of(exponents)
    if not histogram.any():
        raise ValueError(
            "`exponents` must count at least one number that is neither zero nor infinite, got an "
            "empty histogram. Count float32 gradients, before they are rounded to float16."
        )
    largest = int(EXPONENTS[histogram > 0][-1])
    power = int(info.maxexp) - 1 - largest - headroom
    within = min(max(power, -126), 126)
    if power != within:
        warn(
            f"The loss scale that fits is 2**{power}, got its bound of 2**{within}. Multiply the "
            f"loss itself by 2**{power - within}."
        )
    return 2.0**within


def _histogram_of(exponents: GradientExponents) -> np.ndarray:
    remedy = "Return them from the compiled step, and look at them outside."
    checks.require_values("exponents", exponents, remedy)
    remedy = "Count them with `gradient_exponents`."
    checks.read_state(exponents, GradientExponents, "exponents", remedy)
    histogram = np.asarray(exponents.histogram)
    if histogram.shape != EXPONENTS.shape:
        raise ValueError(
            f"`exponents` must hold one histogram, got shape {histogram.shape}. Take the sum: "
            "`jax.tree.map(lambda x: x.sum(0), exponents)`."
        )
    if not (histogram >= 0).all():
        raise ValueError(
            "`exponents` must hold counts, got negative ones: an int32 has wrapped around. Add "
            "`jax.tree.map(np.int64, exponents)` on the host."
        )
    return histogram


def plot_gradient_exponents(
    exponents: GradientExponents, ax: "Axes | None" = None, *, dtype: DTypeLike = jnp.float16
) -> "Axes":
    """Draw the histogram, with the limits of `dtype` in it.

    Needs matplotlib, the extra `plot`.

    Args:
      exponents: As for `suggest_loss_scale`. Count scaled gradients to see what training computes.
      ax: The axes to draw into, by default those of a new figure.
      dtype: The type whose limits are drawn.

    Returns:
      The axes, of which `ax.figure.savefig(path)` saves the picture.

    Raises:
      TypeError, ValueError: As `suggest_loss_scale`, but for an empty histogram.
    """
    info = jnp.finfo(checks.read_float_dtype("dtype", dtype, most_bits=32))
    histogram = _histogram_of(exponents)
    if not (ax is None or hasattr(ax, "axvspan")):
        raise TypeError(f"`ax` must be the axes of a figure, got {ax!r}. Use `plt.gca()`.")
    if ax is None:
        from matplotlib.figure import Figure  # noqa: PLC0415 - matplotlib is an extra

        ax = Figure(figsize=(8, 3.5), layout="constrained").subplots()
    zero, seen = int(exponents.zero), EXPONENTS[histogram > 0]
    entries = max(histogram.sum() + zero, 1)
    share = 100 * histogram / entries
    ax.bar(EXPONENTS + 0.5, share, width=1.0, color="#0072b2", edgecolor="white", linewidth=0.5)
    # Numbers below half of the smallest one are rounded to zero.
    flushed_below, normal_from = info.minexp - info.nmant - 1, info.minexp
    for low, high, color, kind in (
        (-150, flushed_below, "#d55e00", f"zero in {info.dtype}"),
        (flushed_below, normal_from, "#f0e442", "subnormal"),
        (normal_from, info.maxexp, "#009e73", "normal"),
        (info.maxexp, 129, "#555555", "infinite"),
    ):
        label = f"{kind}: {share[(low <= EXPONENTS) & (high > EXPONENTS)].sum():.1f} %"
        ax.axvspan(low, high, facecolor=color, alpha=0.25, linewidth=0, zorder=0, label=label)
    ax.set(
        xlim=(min([flushed_below - 6, *seen - 1]), max([info.maxexp + 4, *seen + 2])),
        ylim=(0, 1.3 * max(share.max(), 1)),  # the legend stands above the bars
        xlabel="log2 of the gradient's magnitude",
        ylabel="% of the entries",
        title=f"{100 * zero / entries:.1f} % of the entries are exactly zero",
    )
    ax.legend(loc="upper center", ncols=4, fontsize="small")
    return ax
