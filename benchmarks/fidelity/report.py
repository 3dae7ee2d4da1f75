"""The results: intervals, the table of docs/training.md, and the picture."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.fidelity.training import BFLOAT16, FLOAT16, FLOAT32, SCALED

Results = dict[str, Any]
BEGIN = "<!-- fidelity: `make fidelity` writes this part -->"
END = "<!-- fidelity: end -->"

# The colour-blind-safe palette of `make demo` (Okabe and Ito).
STYLES = {
    FLOAT32: {"color": "#999999", "linewidth": 5},
    BFLOAT16: {"color": "#009e73", "linewidth": 1.8, "linestyle": ":"},
    FLOAT16: {"color": "#d55e00", "linewidth": 1.8},
    SCALED: {"color": "#0072b2", "linewidth": 1.8, "linestyle": "--"},
}


class Interval(NamedTuple):
    """A mean, and half the width of its confidence interval."""

    mean: float
    margin: float

    def contains(self, value: float) -> bool:
        """Return whether the interval contains a value; the bounds count as inside."""
        return abs(value - self.mean) <= self.margin


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of two or more values, with its interval by Student's t."""
    n = len(values)
    quantile = stats.t.ppf((1 + confidence) / 2, n - 1)
    return Interval(float(np.mean(values)), float(quantile * np.std(values, ddof=1) / n**0.5))


def final(task: Results, way: str) -> np.ndarray:
    """Return the metric after the last step, for each seed."""
    return np.array([run["curve"][-1] for run in task["runs"][way]])


def difference(task: Results, way: str) -> Interval:
    """Return the difference between a way and float32, paired by seed."""
    return interval(final(task, way) - final(task, FLOAT32))


def block(results: Results) -> str:
    """Return the table and its notes, as Markdown."""
    head = [
        "task", "computed in", "result", "minus float32, same seed", "zero gradient entries",
        "skipped steps", "final loss scale",
    ]  # fmt: skip
    body = [row(task, way) for task in results["tasks"] for way in task["runs"]]
    aligned = ["---", "---", *["---:"] * (len(head) - 2)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in [head, aligned, *body])
    return f"{table}\n\n{summary(results)}\n\n{circumstances(results)}"


def row(task: Results, way: str) -> list[str]:
    """Return the table row of one task in one way."""
    runs = task["runs"][way]
    decimals = task["decimals"]
    result = interval(final(task, way))
    above = difference(task, way)
    scaled = way == SCALED
    exponents = [math.log2(run["loss_scale"]) for run in runs]
    return [
        f"**{task['name']}**: {task['metric']}" if way == FLOAT32 else "",
        way,
        f"{result.mean:.{decimals}f} ± {result.margin:.{decimals}f}",
        "" if way == FLOAT32 else f"{above.mean:+.{decimals}f} ± {above.margin:.{decimals}f}",
        f"{100 * np.mean([run['zero_share'] for run in runs]):.1f} %",
        span([run["skipped"] for run in runs]) if scaled else "",
        f"2^{span(exponents)}" if scaled else "",
    ]


def span(values: Sequence[float]) -> str:
    """Return the range of the values, or the value if all are the same."""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def summary(results: Results) -> str:
    """Describe the intervals, and count the tasks where a way agrees with float32."""
    counts = []
    for way in (BFLOAT16, FLOAT16, SCALED):
        tasks = [task for task in results["tasks"] if way in task["runs"]]
        near = sum(difference(task, way).contains(0) for task in tasks)
        counts.append(f"{near} of {len(tasks)} cases with {way}")
    return (
        "Means with 95 % confidence intervals over "
        f"{len(results['tasks'][0]['runs'][FLOAT32])} seeds, by Student's t. The interval of the "
        f"difference from float32 contains zero in {', '.join(counts)}."
    )


def circumstances(results: Results) -> str:
    """Describe the machine, the versions, the sizes and the text."""
    environment, text = results["environment"], results["text"]
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
    sizes = {
        f"{task['name'].partition(',')[0]} {task['parameters']:,} parameters, {task['steps']} steps"
        for task in results["tasks"]
    }
    return (
        f"{environment['date']}, {environment['device']}, {environment['cores']} cores, "
        f"{versions}; {results['processor_seconds'] / 60:.0f} minutes of CPU time. "
        f"Sizes: {'; '.join(sorted(sizes))}. "
        f"The training text has {text['train_characters']:,} characters and the test text "
        f"{text['test_characters']:,}. The SHA-256 of the two, joined, begins with "
        f"`{text['sha256'][:16]}`."
    )


def replaced(page: str, text: str) -> str:
    """Return the page with the text between its two markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must hold the lines {BEGIN!r} and {END!r}, in this order")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def write(results: Results, page: Path) -> None:
    """Replace the table in a page, and the numbers and the picture beside it."""
    page.write_text(replaced(page.read_text(), block(results)))
    page.with_suffix(".json").write_text(to_json(results))
    pictures = page.parent / "images"
    pictures.mkdir(exist_ok=True)
    draw(results, pictures / f"{page.stem}.png")


def to_json(results: Results) -> str:
    """Return the results as JSON, with six decimals and each list of numbers on one line."""
    rounded = json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 6))
    indented = json.dumps(rounded, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), indented) + "\n"


def draw(results: Results, path: Path) -> None:
    """Draw learning curves, and below them the final differences from float32."""
    tasks = results["tasks"]
    columns = len({task["metric"] for task in tasks})
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.2 * columns, 3 * rows + 2.6), layout="constrained")
    axes = figure.subplots(rows + 1, columns, squeeze=False)
    for place, task in enumerate(tasks):
        _draw_curves(axes[place % rows, place // rows], task)
    for column in range(columns):
        _draw_differences(axes[-1, column], tasks[column * rows : (column + 1) * rows])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=90)


def _draw_curves(ax: Axes, task: Results) -> None:
    for way, runs in task["runs"].items():
        curves = np.array([run["curve"] for run in runs])
        steps = task["steps"] * np.arange(1, curves.shape[1] + 1) / curves.shape[1]
        ax.plot(steps, curves.mean(axis=0), label=way, **STYLES[way])
        band = curves.min(axis=0), curves.max(axis=0)
        ax.fill_between(steps, *band, color=STYLES[way]["color"], alpha=0.2, linewidth=0)
    ax.set_title(task["name"])
    ax.set_ylabel(task["metric"])
    ax.set_xlabel("step")
    ax.grid(alpha=0.3)


def _draw_differences(ax: Axes, tasks: Sequence[Results]) -> None:
    """Draw each seed as a dot, and the interval of the mean. Float16 alone is off the chart."""
    labels = []
    for task in tasks:
        for way in (BFLOAT16, SCALED):
            if way not in task["runs"]:
                continue
            place = len(labels)
            colour = STYLES[way]["color"]
            dots = final(task, way) - final(task, FLOAT32)
            mean, margin = interval(dots)
            ax.plot(dots, np.full(len(dots), place + 0.18), ".", color=colour, alpha=0.6)
            ax.errorbar(mean, place, xerr=margin, fmt="o", color=colour, capsize=4)
            weight = task["name"].rpartition(" ")[2]
            labels.append(f"weight {weight}\n{'scaled' if way == SCALED else way}")
    ax.axvline(0, color="black", linewidth=1)
    ax.locator_params(axis="x", nbins=5)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel(f"{tasks[0]['metric']}\nminus float32, same seed")
    ax.grid(axis="x", alpha=0.3)
