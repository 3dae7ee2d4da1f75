"""Break the package in every small way, and check that a test fails each time.

A mutant is the package with one change: see `changes.py`. The tests that execute the changed line,
including doctests and documents, run until one fails. A mutant that survives must be listed in
`survivors.toml` with the reason. The exit status is 1 if the list and the survivors differ, and 2
if some mutants were not judged.

This process imports JAX once; each run of tests is a fork of it. The lines that each test executes
are recorded first. A test kills a mutant only if it passes, on its own, on the unchanged package.
JAX does not execute a traced function again, and `--budget` leaves tests out, so check twice before
you list a survivor. Records, kills and the log are in `output/mutants`. An interrupted run
continues.
"""

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from changes import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "optax_lossscale"
SURVIVORS = Path(__file__).with_name("survivors.toml")
PRELOADED = (
    *("coverage", "equinox", "flax.linen", "flax.nnx", "flax.training.train_state"),
    *("jax.numpy", "jmp", "keras", "matplotlib.figure", "optax.contrib", "orbax.checkpoint"),
    *("pytest", "sybil", "tensorboardX"),
)
TESTS = ("tests/**/test_*.py", "README.md", "docs/**/*.md", f"{PACKAGE}/**/*.py")
# These start other programs, or do not test the package.
NOT_RUN = {"test_mutants", "test_processes", "test_typing", "oracles", "project"}
OPTIONS = (
    *("-q", "--no-header", "--tb=short", "-m", "not exhaustive"),
    "--assert=plain",  # otherwise pytest compiles the modules with doctests itself
    *("-pno:cacheprovider", "-pno:xdist", "-pno:pytest_cov"),
    # Another process may be about to write it.
    *("-W", "ignore:Error reading persistent compilation cache:UserWarning"),
)


def forked(log: Path, limit: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work` in a fork and return its result, or None if the fork dies or takes too long."""
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            answer.seek(0)
            return json.loads(answer.read() or "null")
        try:
            signal.alarm(limit)
            sys.stdout = sys.stderr = log.open("a")
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            warnings.resetwarnings()
            json.dump(work(*arguments), answer)
            answer.flush()
        except BaseException:  # noqa: BLE001 - the log shows any error
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)


class _Watch:
    """A pytest plugin that records failures and the time of each test, and limits the time."""

    def __init__(self, coverage: Any = None, limit: int = 0) -> None:
        self.coverage, self.limit = coverage, limit
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []

    def pytest_runtest_setup(self, item: Any) -> None:
        if self.limit:
            signal.alarm(self.limit)
        if self.coverage:
            self.coverage.switch_context(_unit(item.nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[_unit(report.nodeid)] += report.duration
        if report.failed:
            self.failed.append(_unit(report.nodeid))


def _unit(test: str) -> str:
    """Return the smallest unit that can run on its own: a test, or a whole document."""
    return _file(test) if _file(test).endswith(".md") else test


def _file(test: str) -> str:
    return test.partition("::")[0]


def record(file: str) -> dict[str, Any]:
    """Run a test file. Return the time of each test, and the lines that it executes."""
    import pytest  # noqa: PLC0415 - the options do not need it
    from coverage import Coverage  # noqa: PLC0415

    coverage = Coverage(data_file=None, config_file=False, source=[str(Path(PACKAGE).resolve())])
    watch = _Watch(coverage)
    with coverage.collect():
        # Outside of all tests, or a test that imports a module would seem to test its constants.
        for module in pkgutil.walk_packages([PACKAGE], f"{PACKAGE}."):
            importlib.import_module(module.name)
        code = pytest.main([*OPTIONS, file], plugins=[watch])
    data = coverage.get_data()
    lines = {
        str(Path(path).relative_to(Path.cwd())): data.contexts_by_lineno(path)
        for path in data.measured_files()
    }
    return {"code": code, "seconds": watch.seconds, "lines": lines}


def first_failure(mutant: Mutant | None, stages: list[list[str]], limit: int) -> str:
    """Run tests on a mutant or on the unchanged package. Return the first failure, or "".

    A test that takes more than `limit` seconds kills the process.
    """
    import pytest  # noqa: PLC0415

    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        if mutant and self.path == str(Path(mutant.path).resolve()):
            return compile(mutant.source, self.path, "exec")
        return original(self, name)

    SourceFileLoader.get_code = get_code
    for stage in stages:
        watch = _Watch(limit=limit)
        code = pytest.main([*OPTIONS, "-x", *stage], plugins=[watch])
        if code == pytest.ExitCode.USAGE_ERROR:  # the change may have renamed a test
            code = pytest.main([*OPTIONS, "-x", *sorted(set(map(_file, stage)))], plugins=[watch])
        if code:
            return (watch.failed or stage)[0]
    return ""


class Run:
    """A run of the tool, in a copy of the tree. All paths are relative to the copy."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.log = options, options.output / "log"
        self.log.unlink(missing_ok=True)
        self.end = time.monotonic() + 60 * options.minutes
        paths = sorted(path for path in Path().rglob("*") if path.suffix in {".py", ".md"})
        self.digests = {str(p): hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in paths}
        self.seconds: dict[str, float] = {}  # of each test
        # By path and row, the tests that execute it; "" means that the import does.
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        # By path and by scope, the number of mutants that each test has killed.
        self.killers: dict[Any, Counter[str]] = defaultdict(Counter)
        self.last: dict[str, str] = {}  # by mutant, the test that killed it in the last run
        self.trusted: dict[str, bool] = {}

    def record(self, file: str, changed: list[str]) -> dict[str, Any]:
        """Record the lines that a test file executes, unless the stored record is up to date."""
        store = self.options.output / f"{file.replace('/', '__')}.json"
        found = json.loads(store.read_text()) if store.exists() else {"digests": {}}
        read = [file, *(f for f in self.digests if f.startswith("tests/") and "/test_" not in f)]
        if any(found["digests"].get(path) != self.digests[path] for path in (*read, *changed)):
            found = forked(self.log, 3600, record, file)
            if not found or found["code"] not in {0, 5}:  # 5: the file has no tests
                raise SystemExit(f"{file} fails on the unchanged package: see {self.log}")
            store.write_text(json.dumps(found | {"digests": self.digests}))
            print(f"recorded {file}", flush=True)
        return found

    def add(self, found: dict[str, Any]) -> None:
        """Add the record of a file."""
        self.seconds |= found["seconds"]
        for path, lines in found["lines"].items():
            for row, tests in lines.items():
                self.lines[path][int(row)].update(tests)

    def covering(self, mutant: Mutant) -> tuple[set[str], set[str]]:
        """Return the tests that can detect a mutant.

        These are the tests that execute its code and, if it runs at import (a constant, a default,
        a decorator), other tests too.
        """
        lines = self.lines[mutant.path]
        here, around = (
            set().union(*(lines[row] for row in range(first, last + 1)))
            for first, last in (mutant.rows, mutant.scope)
        )
        if "" not in here:
            return here or around - {""}, set()  # Python does not execute a line of constants
        executing = (here | around) - {""} or self.naming(mutant)
        return executing, self.seconds.keys() - executing

    def naming(self, mutant: Mutant) -> set[str]:
        """Return the tests that execute a line with the name of the constant that is changed."""
        statement = Path(mutant.path).read_text("utf-8").splitlines()[mutant.scope[0] - 1]
        name = statement.removeprefix("class ").split()[0].partition("(")[0].strip(":")
        return {
            test
            for path in [*self.lines]
            for row, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1)
            if name in line
            for test in self.lines[path][row] - {""}
        }

    def judge(self, mutant: Mutant) -> str | None:
        """Return the test that kills a mutant, "" if it survives, None if time runs out."""
        deaths = 0
        while time.monotonic() < self.end:
            killer = self.run(mutant, self.stages(mutant))
            if killer is None:
                deaths += 1
                if deaths == 2:  # a single timeout may be due to a slow machine
                    return "a crash or the time limit"
            elif not killer or self.is_trusted(killer):
                self.killers[mutant.path][killer] += 1
                self.killers[mutant.path, mutant.scope][killer] += 5
                return killer
        return None

    def stages(self, mutant: Mutant) -> list[list[str]]:
        """Return the tests to run within the budget, the likeliest to fail first."""
        executing, others = self.covering(mutant)
        near, far = self.killers[mutant.path, mutant.scope], self.killers[mutant.path]
        # A test that executes a line that few tests execute can tell how its condition is wrong.
        rare: Counter[str] = Counter()
        for row in range(mutant.scope[0], mutant.scope[1] + 1):
            tests = self.lines[mutant.path][row]
            rare.update(dict.fromkeys(tests, 30 / max(len(tests), 1)))
        home = f"test_{Path(mutant.path).parts[1].strip('_').removesuffix('.py')}.py"

        def rank(test: str) -> tuple[bool, float, str]:
            likelihood = 1 + near[test] + far[test] + rare[test] + 9 * (home in test)
            likelihood += 99 * (test == self.last.get(mutant.key))
            return test in others, (self.seconds[test] + 0.05) / likelihood, test

        left, chosen = self.options.budget, []
        for test in sorted(executing | others, key=rank):
            cost = self.seconds[test] + 0.05
            if cost <= left and self.trusted.get(test, True):
                left -= cost
                chosen.append(test)
        # Importing a test file takes longer than most of its tests, so one file runs first.
        best = [test for test in chosen if _file(test) == _file(chosen[0])][:10]
        likely = [test for test in chosen if test not in {*best, *others}]
        unlikely = [test for test in chosen if test in others - {*best}]
        return [stage for stage in (best, likely, unlikely) if stage]

    def is_trusted(self, test: str) -> bool:
        """Return whether a test passes on its own on the unchanged package."""
        if test not in self.trusted:  # a whole file passed when it was recorded
            self.trusted[test] = "::" not in test or self.run(None, [[test]]) == ""
            if not self.trusted[test]:
                print(f"left out, since on its own it fails on the unchanged package: {test}")
        return self.trusted[test]

    def run(self, mutant: Mutant | None, stages: list[list[str]]) -> str | None:
        """Run `first_failure` in a fork and return its result, or None if the fork dies."""
        longest = max((self.seconds.get(test, 60) for stage in stages for test in stage), default=0)
        limit = 60 + int(10 * longest)
        return forked(self.log, limit, first_failure, mutant, stages, limit)

    def seen(self, mutant: Mutant, killer: str) -> list[str | None]:
        """Return the digests of the files that a stored kill depends on."""
        return [self.digests.get(path) for path in (mutant.path, _file(killer))]

    def judge_all(self, mutants: list[Mutant], pool: ThreadPoolExecutor) -> dict[str, str]:
        """Return the killer of each judged mutant, and store the kills for the next run."""
        store = self.options.output / "kills.json"
        kills = json.loads(store.read_text()) if store.exists() else {}
        results, todo = {}, {}
        for mutant in mutants:
            killer, *seen = kills.get(mutant.key, [""])
            if killer and seen == self.seen(mutant, killer):
                results[mutant.key] = killer
            else:
                self.last[mutant.key] = killer
                todo[pool.submit(self.judge, mutant)] = mutant
        print(f"{len(todo)} mutants are to be judged. An interrupted run continues.", flush=True)
        for number, future in enumerate(as_completed(todo), 1):
            mutant, killer = todo[future], future.result()
            if killer is not None:
                print(f"{number} of {len(todo)}: {mutant.key}: {killer or 'survived'}", flush=True)
                results[mutant.key] = killer
                kills[mutant.key] = [killer, *self.seen(mutant, killer)]
                store.write_text(json.dumps(kills, indent=1))
        return results


def main() -> int:
    """Judge the requested mutants, and return the exit status."""
    paths = (path.relative_to(ROOT) for path in sorted((ROOT / PACKAGE).rglob("*.py")))
    modules = {str(p.relative_to(PACKAGE).with_suffix("")): str(p) for p in paths}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--module", nargs="+", metavar="M", choices=modules, help="only these")
    parser.add_argument("--tests", nargs="+", help="run only these test files")
    parser.add_argument("--budget", type=float, default=30, help="seconds of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants to judge at once")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "mutants")
    options = parser.parse_args()
    chosen = [modules[module] for module in options.module or modules]
    mutants = [m for path in chosen for m in mutants_of(path, (ROOT / path).read_bytes())]
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:  # so that files can be edited meanwhile
        ignored = shutil.ignore_patterns(".*", "__pycache__", "output")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
        os.chdir(folder)
        _preload(options.output)
        run = Run(options)
        found = (path for pattern in TESTS for path in sorted(Path().glob(pattern)))
        files = [str(p) for p in found if NOT_RUN.isdisjoint({p.stem, p.parent.name})]
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                for found in pool.map(lambda f: run.record(f, chosen), options.tests or files):
                    run.add(found)
                results = run.judge_all(mutants, pool)
            finally:
                pool.shutdown(cancel_futures=True)
    return _report(mutants, results)


def _preload(output: Path) -> None:
    """Import what the tests import, except for the package."""
    os.environ |= {
        "COVERAGE_CORE": "ctrace",  # it can record which test executes a line
        "JAX_COMPILATION_CACHE_DIR": str(output / "compiled"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",  # as `make test`
        "JAX_NUM_CPU_DEVICES": "8",  # as tests/conftest.py, but for doctests too
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": str(Path.cwd()),
    }
    sys.path.insert(0, str(Path.cwd()))
    warnings.simplefilter("ignore")  # from imports and forks; the tests set their own filters
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy all of this memory
    if importlib.import_module("jax._src.xla_bridge").backends_are_initialized():
        raise SystemExit("an import has made JAX start its devices, which no fork survives")


def _report(mutants: list[Mutant], results: dict[str, str]) -> int:
    """Print the results, and return the exit status."""
    tables = tomllib.loads(SURVIVORS.read_text("utf-8"))
    chosen = {mutant.path for mutant in mutants}
    listed = {f"{path} {change}" for path in chosen for change in tables.get(path, {})}
    count: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        alive = "justified" if mutant.key in listed else "SURVIVED"
        killer = results.get(mutant.key)
        status = "not judged" if killer is None else "killed" if killer else alive
        count[mutant.path][status] += 1
        if status == "SURVIVED":
            print(f"\n{mutant.path}:{mutant.rows[0]} {status}\n  {mutant.line}\n  {mutant.change}")
    total = sum(count.values(), Counter())
    for path, counter in (*count.items(), ("all", total)):
        print(f"{path}: {counter.total()} mutants: {dict(counter)}")
    stale = listed - {mutant.key for mutant in mutants} | {k for k in listed if results.get(k)}
    print(*(f"OUT OF DATE in {SURVIVORS.name}: {key}" for key in sorted(stale)), sep="\n")
    return 1 if total["SURVIVED"] or stale else 2 if total["not judged"] else 0


if __name__ == "__main__":
    sys.exit(main())
