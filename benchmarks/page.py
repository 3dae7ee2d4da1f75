"""Helpers for command lines, tables, confidence intervals, and generated parts of pages."""

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # only some programs need it

RESULTS = Path(__file__).with_name("results")  # the numbers that the pages show
FIDELITY = "make fidelity"
INTERRUPTED = "An interrupted run keeps its results, but starts over: choose the rest with {}."


def parser(module: str, doc: str) -> argparse.ArgumentParser:
    """Return a parser for `python -m` of a module, described by the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def version(package: str) -> str | None:
    """Return the version that is installed or imported, such as this checkout's, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def environment(*packages: str) -> str:
    """Describe the date, the machine and the versions of these packages."""
    device = describe(jax.devices()[0])
    machine = f"{device}, {platform.machine()}, {os.cpu_count()} cores"
    versions = [f"{name} {version(name) or 'not installed'}" for name in packages]
    python = f"CPython {platform.python_version()}"
    return ", ".join([time.strftime("%Y-%m-%d"), machine, python, *versions])


def describe(device: jax.Device) -> str:
    """Return the kind of a device. Of a GPU, also return its memory and driver."""
    if device.platform not in ("gpu", "cuda"):
        return device.device_kind
    query = "--query-gpu=memory.total,driver_version", "--format=csv,noheader"
    command = ["nvidia-smi", *query, f"--id={device.local_hardware_id}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
        memory, driver = found.stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError):
        memory = driver = "unknown"
    return f"{device.device_kind}, memory {memory}, driver {driver}"


def table(head: Sequence[str], body: Sequence[Sequence[str]], texts: Collection[int] = (0,)) -> str:
    """Return a Markdown table. `texts` are the columns of text; all others are numbers."""
    aligned = ["---" if column in texts else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, aligned, *body])


class Interval(NamedTuple):
    """A mean, and half the width of its confidence interval."""

    mean: float
    margin: float


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Return the mean of two or more values, with its 95 % interval by Student's t."""
    n = len(values)
    quantile = stats.t.ppf(0.975, n - 1)
    return Interval(float(np.mean(values)), float(quantile * np.std(values, ddof=1) / n**0.5))


class Report(NamedTuple):
    """The text of a generated part of a page, its pictures, and the numbers that both show."""

    text: str
    numbers: dict[str, Any] | None = None
    pictures: dict[str, "Figure"] = {}  # by name  # noqa: RUF012


def publish(report: Report, part: str, page: Path, command: str = FIDELITY) -> None:
    """Replace a part of a page, and its pictures beside the page."""
    page.write_text(replaced(page.read_text(), part, report.text, command))
    for name, figure in report.pictures.items():
        path = page.parent / f"images/{name}.png"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=100)


def comments(part: str, command: str = FIDELITY) -> tuple[str, str]:
    """Return the lines that mark the beginning and end of a part that this command writes."""
    return f"<!-- {part}: `{command}` writes this part -->", f"<!-- {part}: end -->"


def replaced(page: str, part: str, text: str, command: str = FIDELITY) -> str:
    """Return the page with new text in one part."""
    begin, end = comments(part, command)
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page must hold the lines {begin!r} and {end!r}, in this order")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def as_json(results: dict[str, Any]) -> str:
    """Return the results as JSON, with eight digits and each list of numbers on one line."""
    short = json.loads(
        json.dumps(results), parse_float=lambda number: float(f"{float(number):.8g}")
    )
    indented = json.dumps(short, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), indented) + "\n"


def items(title: str, ends: Mapping[str, str]) -> str:
    """Return an item of a Markdown list: a title, and results by name."""
    return f"- {title}: " + ", ".join(f"{name} {end}" for name, end in ends.items())


def compared(task: Mapping[str, Any], ends: Mapping[str, np.ndarray]) -> list[str]:
    """Return a row of a table: a task, the results of the first way, and differences from them.

    `ends` has the results of each way, one for each seed.
    """
    form = f".{task['decimals']}f"

    def shown(values: np.ndarray, sign: str = "+") -> str:
        mean, margin = interval(values)
        return f"{mean:{sign}{form}} ± {margin:{form}}" if math.isfinite(mean) else "NaN"

    first, *others = ends.values()
    title = f"**{task['name']}**: {task['metric']}"
    return [title, shown(first, ""), *(shown(other - first) for other in others)]
