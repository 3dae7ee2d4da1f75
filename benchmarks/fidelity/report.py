"""The results: the table of docs/evidence.md, and its pictures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.fidelity.training import BFLOAT16, FLOAT16, FLOAT32, SCALED
from benchmarks.page import Interval, compared, interval, table

Results = dict[str, Any]

# The colour-blind-safe palette of `make demo` (Okabe and Ito).
STYLES = {
    FLOAT32: {"color": "#999999", "linewidth": 5},
    BFLOAT16: {"color": "#009e73", "linewidth": 1.8, "linestyle": ":"},
    FLOAT16: {"color": "#d55e00", "linewidth": 1.8},
    SCALED: {"color": "#0072b2", "linewidth": 1.8, "linestyle": "--"},
}


def final(task: Results, way: str) -> np.ndarray:
    """Return the metric after the last step, for each seed."""
    return np.array([run["curve"][-1] for run in task["runs"][way]])


def difference(task: Results, way: str) -> Interval:
    """Return the difference from float32, paired by seed. It is NaN if training failed."""
    return interval(final(task, way) - final(task, FLOAT32))


def block(results: Results) -> str:
    """Return the table and its notes, as Markdown."""
    head = ["task", *results["tasks"][0]["runs"], "skipped steps"]
    body = [
        [
            *compared(task, {way: final(task, way) for way in task["runs"]}),
            span([run["skipped"] for run in task["runs"][SCALED]]),
        ]
        for task in results["tasks"]
    ]
    return "\n\n".join([table(head, body), notes(results)])


def span(values: Sequence[float]) -> str:
    """Return the range of the values, or one value if all are equal."""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def notes(results: Results) -> str:
    """Describe the intervals."""
    return (
        f"Means with 95 % confidence intervals over {len(results['tasks'][0]['runs'][FLOAT32])} "
        "seeds; beside float32, differences from it."
    )


def draw(results: Results) -> Figure:
    """Draw learning curves, and below them the zero entries of each layer's gradient."""
    tasks = results["tasks"]
    rows = -(-len(tasks) // 3)
    figure = Figure(figsize=(9, 0.3 + 5 * rows), layout="constrained")
    axes = figure.subplots(2 * rows, 3, squeeze=False, height_ratios=(3, 2) * rows)
    for place in range(3 * rows):
        curves, zeros = axes[2 * (place // 3) :, place % 3][:2]
        if place < len(tasks):
            _draw_curves(curves, tasks[place])
            _draw_zeros(zeros, tasks[place])
        else:
            curves.remove()
            zeros.remove()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _draw_curves(ax: Axes, task: Results) -> None:
    for way, runs in task["runs"].items():
        curves = np.array([run["curve"] for run in runs])
        steps = task["steps"] * np.arange(1, curves.shape[1] + 1) / curves.shape[1]
        ax.plot(steps, curves.mean(axis=0), label=way, **STYLES[way])
        band = curves.min(axis=0), curves.max(axis=0)
        ax.fill_between(steps, *band, color=STYLES[way]["color"], alpha=0.15, linewidth=0)
        if np.isnan(curves).all():
            ax.text(0.5, 0.5, f"{way}: NaN", color=STYLES[way]["color"], transform=ax.transAxes)
    ax.grid(alpha=0.3)
    ax.set(title=task["name"], ylabel=task["metric"], xlabel="step")


def _draw_zeros(ax: Axes, task: Results) -> None:
    """Draw the share of zero entries by layer, where it is 1 % or more."""
    # The gradients of NaN parameters mean nothing.
    ways = [way for way in (FLOAT32, FLOAT16, SCALED) if np.isfinite(difference(task, way).mean)]
    runs = task["runs"]
    shares = {
        layer: [100 * np.mean([run["zero_shares"][layer] for run in runs[way]]) for way in ways]
        for layer in runs[FLOAT32][0]["zero_shares"]
    }
    layers = [layer for layer, values in shares.items() if max(values) >= 1]
    for place, way in enumerate(ways):
        heights = np.arange(len(layers)) + 0.27 * (place - 1)
        values = [shares[layer][place] for layer in layers]
        ax.barh(heights, values, 0.27, color=STYLES[way]["color"])
    ax.set_yticks(range(len(layers)), [layer.replace("_", " ") for layer in layers], fontsize=8)
    ax.invert_yaxis()
    ax.set(xlim=(0, 100), xlabel="zero gradient entries in %")
    ax.grid(axis="x", alpha=0.3)
