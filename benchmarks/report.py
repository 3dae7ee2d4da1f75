"""The results, as Markdown tables and as a picture."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.contenders import (
    CONTENDERS,
    ApplyIfFinite,
    Control,
    Flax,
    Jaxamp,
    Jmp,
    KerasScaled,
    Mpx,
    OptaxAlone,
    Ours,
    OursUnchecked,
    SkipIf,
    SkipSpikes,
)
from benchmarks.measure import quartiles
from benchmarks.page import table

Results = dict[str, Any]
Row = dict[str, Any]

# A colour-blind-safe palette (Okabe and Ito). Baselines are grey.
COLOURS = {
    OptaxAlone.name: "#666666",
    Control.name: "#aaaaaa",
    Ours.name: "#0072b2",
    OursUnchecked.name: "#56b4e9",
    SkipIf.name: "#004c7a",
    SkipSpikes.name: "#00304d",
    Jmp.name: "#e69f00",
    Flax.name: "#d55e00",
    Mpx.name: "#cc79a7",
    Jaxamp.name: "#009e73",
    ApplyIfFinite.name: "#b8a800",
    KerasScaled.name: "#7b3294",
}
NAMES = [kind.name for kind in CONTENDERS]
MB = 1e6

METHOD = """\
Each round runs every contender once, in shuffled order, from a fresh state, with parameters and
state donated, and discards its first step. A ratio compares a step with the same step without loss
scaling in the same round (for Keras, with Keras' own optimizer). The tables show the median over
the rounds and the quartiles. Bytes accessed, temporary memory, memory in place, copies and the size
of the program are XLA's own analysis of the compiled step, and do not depend on the load of the
machine. *Not in place*: parameters and state that are donated but not overwritten. *Copies*: copy
instructions with the shape of a parameter array.
"""

COMPILATION = """\
`adamw` on arrays that cycle through the shapes of ResNet-50 (161 arrays are one ResNet-50), with
cleared caches. The cells show seconds, and in parentheses the ratio within a round.
"""


def markdown(results: Results) -> str:
    """Return the results as Markdown."""
    parts = ["# What loss scaling costs", _environment(results), METHOD]
    for group, benchmarks in results["steps"].items():
        if group == "inner":
            parts += ["## Other inner optimizers", _inner_intro(benchmarks), _inner(benchmarks)]
            continue
        for benchmark in benchmarks:
            parts += [f"## {benchmark['title']}", _workload(benchmark), _steps(benchmark)]
    if results["compilation"]:
        heading = "## Tracing and compilation, by number of arrays"
        parts += [heading, COMPILATION, _compilation(results["compilation"])]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _environment(results: Results) -> str:
    environment, settings = results["environment"], results["settings"]
    versions = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in environment["versions"].items()
    )
    return f"""\
- {environment["date"]}, device `{environment["device"]}`
- {environment["processor"]}, {environment["cores"]} cores, {environment["system"]}
- Python {environment["python"]}, {versions}
- XLA_FLAGS `{environment["xla_flags"]}`
- size `{settings["size"]}`, {settings["rounds"]} rounds, samples of \
{settings["sample_seconds"]:g} s, seed {settings["seed"]}
- load average {environment["load_before"]:.1f} before, {environment["load_after"]:.1f} after
"""


def _workload(benchmark: Results) -> str:
    return f"{_size(benchmark)}, `{benchmark['optimizer']}`."


def _size(benchmark: Results) -> str:
    parameters = benchmark["parameters"]
    number = f"{parameters / 1e6:.1f}M" if parameters >= 1e5 else f"{parameters:,}"
    return f"{number} parameters in {benchmark['arrays']} arrays"


def _inner_intro(benchmarks: list[Results]) -> str:
    return (
        f"{_size(benchmarks[0])}. The ratio to the same optimizer alone, and in parentheses the "
        "temporary memory in MB."
    )


def _steps(benchmark: Results) -> str:
    head = [
        "", "ratio", "quartiles", "ms", "bytes accessed", "temporary MB", "not in place MB",
        "copies", "page faults", "program kB", "compile s",
    ]  # fmt: skip
    rows = benchmark["rows"]
    body = []
    for name, row in rows.items():
        if "left_out" in row:
            body.append([name, row["left_out"], *[""] * (len(head) - 2)])
            continue
        low, ratio, high = quartiles(row["ratios"])
        base = rows[row["baseline"]]
        body.append(
            [
                name,
                f"{ratio:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{1e3 * quartiles(row['seconds'])[1]:.3g}",
                _quotient(row["bytes_accessed"], base["bytes_accessed"]),
                f"{row['temporary'] / MB:.1f}",
                f"{(row['state'] - row['in_place']) / MB:.1f}",
                str(row["copies"]),
                f"{quartiles(row['page_faults'])[1]:.0f}",
                f"{row['hlo_length'] / 1e3:.0f}",
                f"{row['compile_seconds']:.1f}",
            ]
        )
    return table(head, body)


def _quotient(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value and base else "unknown"


def _inner(benchmarks: list[Results]) -> str:
    head = ["", *(benchmark["optimizer"] for benchmark in benchmarks)]

    def cell(row: Row) -> str:
        if "left_out" in row:
            return row["left_out"]
        return f"{quartiles(row['ratios'])[1]:.2f} ({row['temporary'] / MB:.0f})"

    body = [[name, *(cell(b["rows"][name]) for b in benchmarks)] for name in NAMES]
    return table(head, body)


def _compilation(results: list[Results]) -> str:
    head = ["", *(f"{result['arrays']} arrays" for result in results)]

    def cell(row: Row) -> str:
        if "left_out" in row:
            return row["left_out"]
        return f"{quartiles(row['seconds'])[1]:.2f} ({quartiles(row['ratios'])[1]:.1f})"

    body = [[name, *(cell(result["rows"][name]) for result in results)] for name in NAMES]
    return table(head, body)


def draw(results: Results, path: Path) -> None:
    """Draw one panel for each benchmark."""
    bars = [b for group, found in results["steps"].items() if group != "inner" for b in found]
    inner = results["steps"].get("inner", [])
    panels = len(bars) + bool(inner) + bool(results["compilation"])
    columns = min(2, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(7.2 * columns, 4.2 * rows), layout="constrained")
    axes = iter(figure.subplots(rows, columns, squeeze=False).flat)
    for benchmark in bars:
        _draw_bars(next(axes), benchmark)
    if inner:
        _draw_inner(next(axes), inner)
    if results["compilation"]:
        _draw_compilation(next(axes), results["compilation"])
    for unused in axes:
        unused.set_axis_off()
    environment = results["environment"]
    figure.suptitle(
        f"Cost of loss scaling, as a ratio to the same step without\n{environment['device']}; "
        f"{environment['processor']}, {environment['cores']} cores; "
        f"jax {environment['versions']['jax']}"
    )
    if inner or results["compilation"]:  # bars are labelled directly
        keys = [Line2D([], [], color=c, marker="o", label=name) for name, c in COLOURS.items()]
        figure.legend(handles=keys, loc="outside lower center", ncols=5 if columns > 1 else 2)
    figure.savefig(path, dpi=110)


def _draw_bars(ax: Axes, benchmark: Results) -> None:
    rows = benchmark["rows"]
    names = [name for name, row in rows.items() if name != row["baseline"]]
    longest = 1.0
    for place, name in enumerate(names):
        row = rows[name]
        if "left_out" in row:
            ax.text(1, place, f"  {row['left_out']}"[:48], va="center", color="#777777")
            continue
        low, ratio, high = quartiles(row["ratios"])
        longest = max(longest, high)
        ax.barh(
            place,
            ratio,
            color=COLOURS.get(name, COLOURS[Ours.name]),
            xerr=[[ratio - low], [high - ratio]],
        )
        ax.text(high, place, f"  {ratio:.2f}", va="center")
    ax.axvline(1, color="black", linewidth=1)
    ax.set_xlim(0, 1.25 * longest)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_title(f"{benchmark['title']}\n{_workload(benchmark).replace('`', '')}", fontsize=10)
    ax.set_xlabel("time, ratio (median and quartiles)")


def _draw_inner(ax: Axes, benchmarks: list[Results]) -> None:
    for name, colour in COLOURS.items():
        points = [
            (quartiles(benchmark["rows"][name]["ratios"])[1], place)
            for place, benchmark in enumerate(benchmarks)
            if name != OptaxAlone.name and "ratios" in benchmark["rows"][name]
        ]
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=colour, markersize=8)
    ax.axvline(1, color="black", linewidth=1)
    ax.set_yticks(range(len(benchmarks)), [benchmark["optimizer"] for benchmark in benchmarks])
    ax.set_ylim(len(benchmarks) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.set_xlabel("time, ratio (median)")
    ax.set_title(f"Optimizer step, other inner optimizers\n{_size(benchmarks[0])}", fontsize=10)
    ax.grid(alpha=0.3)


def _draw_compilation(ax: Axes, results: list[Results]) -> None:
    for name, colour in COLOURS.items():
        points = [
            (result["arrays"], quartiles(result["rows"][name]["seconds"])[1])
            for result in results
            if "seconds" in result["rows"][name]
        ]
        if points:
            width = 3 if name in (Ours.name, OptaxAlone.name) else 1.5
            ax.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=width)
    ax.set_xscale("log")
    ax.set_yscale("log")
    arrays = [result["arrays"] for result in results]
    ax.set_xticks(arrays, map(str, arrays))
    ax.minorticks_off()
    ax.set_xlabel("arrays")
    ax.set_ylabel("seconds")
    ax.set_title("Trace and compile, adamw", fontsize=10)
    ax.grid(alpha=0.3)
