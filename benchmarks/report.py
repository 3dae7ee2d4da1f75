"""Results as Markdown tables."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.page import table

Results = dict[str, Any]
Columns = dict[str, Callable[[Results, Results], str]]  # of a row and its baseline

METHOD = """\
A ratio compares a step with the same step without loss scaling in the same round (for Keras, with
Keras' own optimizer): medians over the rounds, and quartiles. *Bytes*: what the compiled program
reads and writes. Memory is XLA's own analysis. *Peak*: arguments, results and temporary memory of a
step. *Not in place*: parameters and state that are donated but not overwritten. *Copies*: of 4 kB
and more. *Transpositions*: of matrices, also inside of fused loops."""


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return float(low), float(median), float(high)


def quotient(name: str, form: str = ".2f") -> Callable[[Results, Results], str]:
    """Return a column: a number of each row, divided by the same number of its baseline."""
    return lambda row, base: format(row[name] / base[name], form) if base[name] else ""


def number(name: str, unit: float = 1, form: str = ".0f") -> Callable[[Results, Results], str]:
    """Return a column: a number of each row, in this unit."""
    return lambda row, _base: format(row[name] / unit, form)


TIMES: Columns = {
    "ratio": lambda row, _base: f"{quartiles(row['ratios'])[1]:.2f}",
    "quartiles": lambda row, _base: "{:.2f} to {:.2f}".format(*quartiles(row["ratios"])[::2]),
    "ms": lambda row, _base: f"{1e3 * quartiles(row['seconds'])[1]:.3g}",
}
ANALYSIS: Columns = {
    "bytes": quotient("bytes"),
    "peak MB": number("peak", 1e6, ".1f"),
    "temporary MB": number("temporary", 1e6, ".1f"),
    "not in place MB": lambda row, _base: f"{(row['state'] - row['in_place']) / 1e6:.1f}",
    "copies": number("copies"),
    "transpositions": number("transpositions"),
    "trace s": number("trace_seconds", 1, ".2f"),
    "compile s": number("compile_seconds", 1, ".1f"),
}


def tabulate(rows: dict[str, Results], columns: Columns) -> str:
    """Return a table with a row for each contender."""
    body = []
    for name, row in rows.items():
        show = {"": lambda row, _base: row["left_out"]} if "left_out" in row else columns
        cells = [cell(row, rows[row["baseline"]]) for cell in show.values()]
        body.append([name, *cells, *[""] * (len(columns) - len(cells))])
    return table(["", *columns], body)


def markdown(results: Results) -> str:
    """Return the times as Markdown."""
    settings = ", ".join(f"{name} {value}" for name, value in results["settings"].items())
    about = f"{results['environment']}.\n\nSettings: {settings}."
    parts = ["# What loss scaling costs", about, METHOD]
    for found in results["steps"].values():
        rows = tabulate(found["rows"], TIMES | ANALYSIS)
        parts += [f"## {found['title']}", f"{found['size']}.", rows]
    return "\n\n".join(parts) + "\n"
