#!/usr/bin/env python3
"""Runs the tests on the oldest and the newest versions that are supported, on every Python.

    python tools/matrix.py                         everything
    python tools/matrix.py --list                  what would run, and with which interpreter
    python tools/matrix.py --only 'newest-*'       some of the cells
    python tools/matrix.py --only oldest-3.11 --tests tests/test_policy.py optax_lossscale

A cell is a set of versions on a Python: `newest` are those in `constraints.txt`, on every Python
that is supported, and `oldest` those in `tools/oldest.txt`, on the oldest Python alone, since half
of them were never built for a later one. Each has an environment of its own in the folder that
`--folder` names, which is made anew when the versions, `pyproject.toml` or the interpreter have
changed.

Interpreters are looked for by name (`python3.12`) in every folder of the PATH, and then among those
of pyenv, if there is one. An interpreter that is not found is reported as missing; with `--strict`
that is a failure, too. The exit status is 1 if a cell fails, or if none could run.

The table, and what each cell printed, are written to the folder that `--output` names.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PINS = {"newest": "constraints.txt", "oldest": "tools/oldest.txt"}
# The table names the versions of these.
SHOWN = ("jax", "jaxlib", "optax", "flax", "numpy")
# What cannot run on the oldest versions, and why: a file, or how the name that pytest gives a test
# begins. A test of what is newer than they are says so itself, and is skipped.
_NAN = "Optax 0.2.6 itself gives NaN"
_MANY = "XLA of jaxlib 0.7.0 does not merge the collectives of the arrays' flags into one"
NOT_ON_THE_OLDEST: dict[str, str] = {
    "docs/distributed.md": "it shows jax.lax.pcast and jax.set_mesh, which are newer",
    "tests/test_benchmarks.py": "jaxlib 0.7.0 crashes when all that was compiled is dropped",
    "tests/test_config_flags.py::test_no_array_lies_in_a_reference_cycle": (
        "JAX_ARRAY_GARBAGE_COLLECTION_GUARD logs nothing in jax 0.7.0"
    ),
    "tests/test_distributed.py::test_everything_stays_where_it_was_put[pmap": (
        "pmap of jax 0.7.0 lays results out in a way of its own"
    ),
    "tests/test_distributed.py::test_at_most_one_small_collective_is_added[jit, FSDP": _MANY,
    "tests/test_distributed.py::test_at_most_one_small_collective_is_added[jit, tensor": _MANY,
    "tests/test_distributed.py::test_each_device_reads_its_own_part_of_the_gradients": _MANY,
    "tests/test_optax_inner.py::test_a_good_step_is_the_inner_optimizers_to_the_bit"
    "[scale_by_distance": _NAN,
    "tests/test_optax_inner.py::test_every_step_is_that_of_plain_where[scale_by_distance": _NAN,
    "tests/test_optax_inner.py::test_training_goes_on_as_if_a_bad_step_had_never_been"
    "[scale_by_distance": _NAN,
    "tests/test_processes.py": (
        "helpers of jax 0.7.0 for several processes warn of themselves, which is an error in tests"
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A set of versions on a Python."""

    pins: str
    python: str

    @property
    def name(self) -> str:
        """How the cell is called on the command line and in the table."""
        return f"{self.pins}-{self.python}"


CELLS = (*(Cell("newest", python) for python in PYTHONS), Cell("oldest", PYTHONS[0]))


@dataclasses.dataclass
class Result:
    """What became of a cell."""

    cell: Cell
    status: str  # passed, failed, broken (the environment could not be made) or missing
    versions: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    counts: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    seconds: float = 0.0


def find_interpreter(python: str) -> Path | None:
    """Return an interpreter of this version that can make an environment, if there is one."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    candidates = [Path(sys.executable), *(Path(folder) / f"python{python}" for folder in folders)]
    for candidate in candidates + _interpreters_of_pyenv(python):
        if _works(candidate, python):
            return candidate
    return None


def _interpreters_of_pyenv(python: str) -> list[Path]:
    # Its entries on the PATH work only for the versions that it was told to use in this folder.
    pyenv = shutil.which("pyenv")
    if pyenv is None:
        return []
    versions = _printed([pyenv, "versions", "--bare"]).split()
    matching = [version for version in versions if version.startswith(f"{python}.")]
    prefixes = [_printed([pyenv, "prefix", version]).strip() for version in reversed(matching)]
    return [Path(prefix) / "bin" / "python" for prefix in prefixes if prefix]


def _works(interpreter: Path, python: str) -> bool:
    # Debian's own interpreter may come without `ensurepip`, and cannot make an environment then.
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    return interpreter.is_file() and _printed([interpreter, "-c", code]).strip() == python


def _printed(command: Sequence[str | Path]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:
        return ""
    return "" if result.returncode else result.stdout


def stamp(cell: Cell, interpreter: Path) -> str:
    """Return all that an environment depends on."""
    version = _printed([interpreter, "-c", "import sys; print(sys.version)"])
    files = (ROOT / PINS[cell.pins], ROOT / "pyproject.toml")
    return "\n".join([version, *(path.read_text("utf-8") for path in files)])


def prepare(cell: Cell, interpreter: Path, folder: Path, log: Path) -> Path | None:
    """Make the environment of a cell, or find it made; return its Python, or None if that fails."""
    environment = folder / cell.name
    python, made = environment / "bin" / "python", environment / "made.txt"
    wanted = stamp(cell, interpreter)
    if made.is_file() and made.read_text("utf-8") == wanted:
        return python
    shutil.rmtree(environment, ignore_errors=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--constraint", ROOT / PINS[cell.pins]]
    for command in (
        [interpreter, "-m", "venv", environment],
        [*pip, "--upgrade", "pip"],
        [*pip, "--group", "test", "--editable", ".[flax,plot]"],
    ):
        if not _logged(command, log):
            return None
    made.write_text(wanted, "utf-8")
    return python


def _logged(command: Sequence[str | Path], log: Path) -> bool:
    """Run a command in the project, add what it prints to the log, and say whether it succeeded."""
    shown = " ".join(map(str, command))
    print(f"$ {shown}", flush=True)
    # No folder from outside may come before those of the environment.
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shown}\n")
        file.flush()
        result = subprocess.run(  # noqa: S603
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    return result.returncode == 0


def versions(python: Path) -> dict[str, str]:
    """Return the versions that are installed beside this interpreter, of what the table shows."""
    code = (
        "import importlib.metadata, json, platform, sys\n"
        "found = {name: importlib.metadata.version(name) for name in sys.argv[1:]}\n"
        "print(json.dumps({'Python': platform.python_version(), **found}))"
    )
    return json.loads(_printed([python, "-c", code, *SHOWN]) or "{}")


def left_out(cell: Cell) -> list[str]:
    """Return the arguments that keep pytest from what cannot run in a cell."""
    if cell.pins != "oldest":
        return []
    return [f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in NOT_ON_THE_OLDEST]


def run(cell: Cell, interpreter: Path, arguments: argparse.Namespace) -> Result:
    """Make a cell and run the tests in it."""
    start = time.monotonic()
    log = arguments.output / f"{cell.name}.log"
    report = arguments.output / f"{cell.name}.xml"
    for path in (log, report):
        path.unlink(missing_ok=True)
    python = prepare(cell, interpreter, arguments.folder, log)
    if python is None:
        return Result(cell, "broken", seconds=time.monotonic() - start)
    # A whole file goes to one worker: the blocks of a document build on each other.
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    if arguments.workers:
        pytest += ["-n", str(arguments.workers), "--dist", "loadfile"]
    passed = _logged([*pytest, *left_out(cell), *arguments.tests], log)
    return Result(
        cell,
        "passed" if passed else "failed",
        versions(python),
        counts(report),
        time.monotonic() - start,
    )


def counts(report: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from what pytest wrote."""
    if not report.is_file():
        return {}
    suites = list(ET.parse(report).iter("testsuite"))  # noqa: S314, our own pytest wrote it
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def table(results: Sequence[Result]) -> str:
    """Return the results as Markdown."""
    columns = ["cell", "result", "Python", *SHOWN, "passed", "failed", "skipped", "minutes"]
    rows = [columns, ["---"] * len(columns)]
    for result in results:
        shown = [result.versions.get(name, "") for name in ("Python", *SHOWN)]
        number = [str(result.counts.get(name, "")) for name in ("passed", "failed", "skipped")]
        minutes = f"{result.seconds / 60:.1f}" if result.seconds else ""
        rows.append([result.cell.name, result.status, *shown, *number, minutes])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="CELL", help="cells to run")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="tests to run")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="for environments")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "matrix")
    parser.add_argument("--workers", type=int, default=2, help="processes; 0 for pytest's own")
    parser.add_argument("--strict", action="store_true", help="a missing interpreter is a failure")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parsed = parser.parse_args(arguments)
    # The commands run in the project, wherever this script was started.
    parsed.folder, parsed.output = parsed.folder.resolve(), parsed.output.resolve()
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that are asked for; return the exit status."""
    parsed = parse(arguments)
    cells = [cell for cell in CELLS if any(fnmatch.fnmatch(cell.name, x) for x in parsed.only)]
    if not cells:
        print(f"No cell is named {' or '.join(parsed.only)}. There are:")
        print(*(cell.name for cell in CELLS), sep="\n")
        return 1
    interpreters = {cell: find_interpreter(cell.python) for cell in cells}
    if parsed.list:
        for cell, interpreter in interpreters.items():
            print(f"{cell.name}: {interpreter or 'missing'}")
        for name, reason in NOT_ON_THE_OLDEST.items():
            print(f"not on the oldest: {name}: {reason}")
        return 0
    parsed.output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for cell, interpreter in interpreters.items():
        results.append(
            Result(cell, "missing") if interpreter is None else run(cell, interpreter, parsed)
        )
        (parsed.output / "table.md").write_text(table(results), "utf-8")
        print(f"{cell.name}: {results[-1].status}", flush=True)
    print(f"\n{table(results)}")
    statuses = [result.status for result in results]
    fine = {"passed"} if parsed.strict else {"passed", "missing"}
    return 0 if "passed" in statuses and set(statuses) <= fine else 1


if __name__ == "__main__":
    sys.exit(main())
