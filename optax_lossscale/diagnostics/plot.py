"""Draw how large gradients are."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._support import checks
from optax_lossscale.diagnostics.exponents import EXPONENTS, GradientExponents, histogram_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_gradient_exponents(
    exponents: GradientExponents, ax: "Axes | None" = None, *, dtype: DTypeLike = jnp.float16
) -> "Axes":
    """Draw the histogram, with the limits of `dtype` in it.

    Needs matplotlib, the extra `plot`. Save the picture with
    `plot_gradient_exponents(exponents).figure.savefig(path)`.

    Args:
      exponents: From `gradient_exponents`, on the host. To see the gradients as training computes
        them, count scaled gradients.
      ax: The axes to draw into, by default those of a new figure.
      dtype: The type whose limits are drawn.

    Returns:
      The axes.

    Raises:
      TypeError: If `exponents` is traced, or `dtype` is not a floating-point type of at most 32
        bits.
      ValueError: If the histogram is stacked or wrapped around.
    """
    info, name = jnp.finfo(checks.small_float(dtype)), jnp.dtype(dtype).name
    histogram = histogram_of(exponents)
    if ax is None:
        from matplotlib.figure import Figure  # noqa: PLC0415 - matplotlib is an extra

        ax = Figure(figsize=(8, 3.5), layout="constrained").subplots()
    zero = int(exponents.zero)
    entries = max(histogram.sum() + zero, 1)
    share = 100 * histogram / entries
    seen = EXPONENTS[histogram > 0]
    ax.bar(EXPONENTS + 0.5, share, width=1.0, color="#0072b2", edgecolor="white", linewidth=0.5)
    # What is less than half of the smallest number is rounded to zero.
    flushed_below, normal_from = info.minexp - info.nmant - 1, info.minexp
    for low, high, color, what in (
        (-150, flushed_below, "#d55e00", f"zero in {name}"),
        (flushed_below, normal_from, "#f0e442", "subnormal"),
        (normal_from, info.maxexp, "#009e73", "normal"),
        (info.maxexp, 129, "#555555", "infinite"),
    ):
        within = share[(low <= EXPONENTS) & (high > EXPONENTS)].sum()
        label = f"{what}: {within:.1f} %"
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
