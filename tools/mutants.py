"""Breaks the package in every small way and shows that some test fails each time.

    python tools/mutants.py                       everything, or what a run before has left
    python tools/mutants.py --module _policy      one module
    python tools/mutants.py --module _policy --lines 60-80 --again
    python tools/mutants.py --changed             the modules that differ from the last commit
    python tools/mutants.py --survivors --budget 60   what survived again, with more tests for each
    python tools/mutants.py --list                what would be done

A mutant is a copy of the package with one change: a comparison, a number, a name in quotes, an
operator, a condition, a default, what a function returns, a decorator. The tests that execute its
line are run on it, those first that have killed its neighbours, then the fastest, until one fails.
Doctests and the blocks of the documents count as tests.

A mutant that no test kills must stand in `tools/surviving_mutants.toml` with the reason why it may
live: most often that it is no change. An entry names the module, the function, the line and the
change, not where the line stands. The exit status is 1 if a mutant survives without such an entry,
or an entry without a survivor; and 2 if all is well so far, but some mutant was not judged.

What is changed and what is left alone stands in `mutations.py`.

Neither mutmut nor Cosmic Ray is used. A process that imports JAX and what the tests import, and in
which every `jnp.ones` is compiled anew, takes ten times as long as the test that kills a mutant.
Here one process imports it all, a fork of it judges forty mutants in a row with what it has
compiled, and imports only the package and the tests anew. What one mutant does to the process might
fail a test of the next: so the tests that killed one of the forty are run again at their end on the
package as it is, and a kill counts only if its test passes there.

What the tests execute is recorded first, file by file, and again when a file or the package has
changed. A function that JAX has traced for one test is not executed for the next one with the same
shapes, so that a record may lack a test: look twice before you call a survivor one. Records and
results are in `output/mutants`, so that a run can be stopped and go on. So are the programs that
XLA compiles, in JAX's own cache: the tests compile the same ones for each mutant.
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mutations import Mutant, mutants_of, program, rows_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "optax_lossscale"
SURVIVORS = Path(__file__).with_name("surviving_mutants.toml")
# The order in which modules are gone through: each rests on those before it.
MODULES = [
    "_tree",
    "_state",
    "_policy",
    "_scaling",
    "_replay",
    "_selection",
    "_transform",
    "interop",
    "testing",
    "flax",
    "keras",
    "_diagnostics",
    "_first_nonfinite",
]
DOCUMENTS = ("README.md", "BUILD.md", "docs/")
# Tests that start processes of their own, or are about other things than what the package does.
NOT_RUN = {
    "tests/test_benchmarks.py",
    "tests/test_docs_site.py",
    "tests/test_documents.py",
    "tests/test_examples.py",
    "tests/test_fidelity.py",
    "tests/test_matrix.py",
    "tests/test_mutants.py",
    "tests/test_package.py",
    "tests/test_processes.py",
    "tests/test_public_names.py",
    "tests/test_typing.py",
}

# How it begins, if pytest did not come to run tests; then it must on the package as it is.
_NOT_RUN = ("import", "pytest")
# Mutants that one process judges. It keeps what was compiled, and grows.
BATCH = 40


# Running tests, each time in a forked process


class _Watch:
    """A pytest plugin that notes what ran, for how long, and what failed."""

    def __init__(self, coverage: Any = None) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.not_collected: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.not_collected.append(f"{report.nodeid}: {str(report.longrepr).splitlines()[-1]}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[_unit(report.nodeid)] += report.duration
        if report.failed:
            self.failed.append(_unit(report.nodeid))

    def pytest_runtest_setup(self, item: Any) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(_unit(item.nodeid))


# Pytest warns of plugins of pytest that were imported before it could rewrite them.
_PRELOADED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"


def _unit(nodeid: str) -> str:
    """Return what can be run by itself: the blocks of a document build on each other."""
    path = nodeid.partition("::")[0]
    return path if path.startswith(DOCUMENTS) else nodeid


class Worker:
    """A forked process that runs tests on the package as it lies in a folder, again and again.

    What JAX has compiled for one mutant serves the next. The package and the tests are imported
    anew each time.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        """Fork, before this process has made JAX start its devices."""
        read_order, self._order = os.pipe()
        self._answer, write_answer = os.pipe()
        self._child = os.fork()
        if self._child:
            os.close(read_order)
            os.close(write_answer)
            return
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self._order)
            os.close(self._answer)
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            self._serve(folder, read_order, write_answer)
        except BaseException:  # noqa: BLE001 - whatever it is, the log says so
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    @staticmethod
    def _serve(folder: Path, orders: int, answers: int) -> None:
        with os.fdopen(orders) as lines, os.fdopen(answers, "w") as out:
            for line in lines:
                out.write(json.dumps(_pytest(folder, **json.loads(line))) + "\n")
                out.flush()

    def run(self, tests: Iterable[str], limit: float, *, record: bool = False) -> Any:
        """Return what happened; the process may have died, or taken longer than `limit`."""
        os.write(
            self._order, (json.dumps({"tests": list(tests), "record": record}) + "\n").encode()
        )
        answer, deadline = b"", time.monotonic() + limit
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._answer], [], [], max(deadline - time.monotonic(), 0))
            part = os.read(self._answer, 2**20) if ready else b""
            if not part:
                return {"died": "a crash" if ready else "the time limit"}
            answer += part
        return json.loads(answer)

    def stop(self) -> None:
        """End the process, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.close(self._order)
        os.close(self._answer)


def _pytest(folder: Path, tests: list[str], *, record: bool = False) -> dict[str, Any]:
    """Run tests on the package in `folder`; call it in a forked process."""
    import jax  # noqa: PLC0415 - the options do not need it
    import pytest  # noqa: PLC0415

    warnings.resetwarnings()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))
        # JAX takes no settings of its devices once it has started, not even those that it has.
        set_config = jax.config.update
        jax.config.update = lambda name, value: (
            None if getattr(jax.config, name) == value else set_config(name, value)
        )
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        if str(where).startswith(str(folder)):
            del sys.modules[name]
    # Python tells a changed file by its size and the second in which it was written.
    shutil.rmtree(folder / PACKAGE / "__pycache__", ignore_errors=True)
    importlib.invalidate_caches()
    coverage = None
    if record:
        from coverage import Coverage  # noqa: PLC0415

        coverage = Coverage(data_file=None, config_file=False, source=[str(folder / PACKAGE)])
        coverage.start()
    watch = _Watch(coverage)
    begin = time.perf_counter()
    options = ["-q", "-W", _PRELOADED, "--no-header", "--tb=short"]
    options += [f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "pytest_cov")]
    code = pytest.main([*options, *([] if record else ["-x"]), *tests], plugins=[watch])
    found = {
        "code": int(code),
        "wall": time.perf_counter() - begin,
        "seconds": dict(watch.seconds),
        "failed": watch.failed,
        "not_collected": watch.not_collected,
        "lines": {},
    }
    if coverage is not None:
        coverage.stop()
        data = coverage.get_data()
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            found["lines"][Path(file).stem] = {
                line: sorted(filter(None, tests)) for line, tests in by_line.items()
            }
    module = sys.modules.get(PACKAGE)
    if module is not None and not str(module.__file__).startswith(str(folder)):
        raise RuntimeError(f"{module.__file__} was tested, not {folder}")
    return found


def _preload(folder: Path, output: Path) -> None:
    """Import what the tests import, except for the package, so that a fork has it."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # as tests/conftest.py, but for doctests too
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(output / "compiled"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    own = {path.stem for path in (folder / "tests").glob("*.py")} | {PACKAGE, "benchmarks"}
    names = {"jax.numpy", "optax", "pytest", "coverage", "sybil"}
    for path in (folder / "tests").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(names):
            if name.partition(".")[0] not in own:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        from jax._src import xla_bridge  # noqa: PLC0415

        if xla_bridge.backends_are_initialized():
            raise RuntimeError("an import has made JAX start its devices, which no fork survives")
    warnings.filterwarnings("ignore", "os.fork")


# What the tests execute


@dataclasses.dataclass
class Records:
    """Which tests execute which line of which module, and how long they take."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]

    def covering(self, module: str, rows: tuple[int, int]) -> set[str]:
        """Return the tests that execute some of these rows, other than by import."""
        lines = self.lines.get(module, {})
        return set().union(*(lines.get(row, ()) for row in range(rows[0], rows[1] + 1)))


def _files(folder: Path) -> list[str]:
    """Return the files with tests, the quick ones first, and so the package's own doctests."""
    doctests = [f"{PACKAGE}/{module}.py" for module in MODULES]
    tests = sorted(f"tests/{path.name}" for path in (folder / "tests").glob("test_*.py"))
    documents = [p.relative_to(folder).as_posix() for p in sorted(folder.glob("docs/*.md"))]
    files = (*doctests, *tests, "README.md", *documents)
    return [file for file in files if file not in NOT_RUN and (folder / file).is_file()]


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def record(folder: Path, output: Path, files: list[str], modules: list[str]) -> Records:
    """Run each file of tests once, unless that was done, and put together what they execute."""
    helpers = {
        path.stem.encode(): path.read_bytes()
        for path in sorted((folder / "tests").glob("*.py"))
        if not path.name.startswith("test_")
    }
    sources = {m: _digest(program((folder / PACKAGE / f"{m}.py").read_bytes())) for m in MODULES}
    records = Records({}, {module: defaultdict(set) for module in MODULES})
    store = output / "records"
    store.mkdir(parents=True, exist_ok=True)
    log = output / "record.log"
    worker = None
    try:
        for file in files:
            path = store / (file.replace("/", "__") + ".json")
            content = (folder / file).read_bytes()
            read = [helpers[name] for name in helpers if name in content or name == b"conftest"]
            digest = _digest(content, *read)
            found = json.loads(path.read_text()) if path.exists() else {}
            fresh = found.get("digest") == digest and all(
                found["sources"].get(m) == sources[m] for m in modules
            )
            if not fresh:
                begin = time.monotonic()
                worker = worker or Worker(folder, log)
                found = worker.run([file], 3600, record=True)
                if "died" in found or found["not_collected"] or found["code"] not in {0, 1, 5}:
                    raise SystemExit(f"{file} cannot be run: see {log}")
                found |= {"digest": digest, "sources": sources}
                path.write_text(json.dumps(found))
                note = f"; FAILED, left out: {found['failed']}" if found["failed"] else ""
                print(f"recorded {file} in {time.monotonic() - begin:.0f} s{note}", flush=True)
            passed = {
                test: s for test, s in found["seconds"].items() if test not in found["failed"]
            }
            records.seconds.update(passed)
            for module, lines in found["lines"].items():
                if module in records.lines and found["sources"].get(module) == sources[module]:
                    for row, tests in lines.items():
                        records.lines[module][int(row)].update(t for t in tests if t in passed)
    finally:
        if worker is not None:
            worker.stop()
    return records


def tests_for(mutant: Mutant, records: Records, trees: dict[str, ast.Module]) -> set[str]:
    """Return the tests that can see a mutant.

    A line that runs only when the module is imported (a constant, a default, a decorator) is seen
    by those that execute the function or class it belongs to, or a function that uses its name.
    """
    tests = records.covering(mutant.module, mutant.rows)
    if tests:
        return tests
    tree = trees[mutant.module]
    if mutant.function:
        for node, name in _definitions(tree):
            if name == mutant.function:
                tests |= records.covering(mutant.module, rows_of(node))
    else:
        names = {
            name.id
            for node in tree.body
            if rows_of(node)[0] <= mutant.rows[0] <= rows_of(node)[1]
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        names |= {  # and what is made of it at import
            name.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and _uses(node, names)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        for module, other in trees.items():
            for node, _ in _definitions(other):
                if _uses(node, names):
                    tests |= records.covering(module, rows_of(node))
        tests = tests or records.covering(mutant.module, (1, 10**6))
    return tests


def _uses(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child, prefix + child.name
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from _definitions(child, prefix)


# The run


@dataclasses.dataclass
class Run:
    """What stays the same from mutant to mutant."""

    folder: Path
    output: Path
    records: Records
    budget: float
    killers: dict[tuple[str, str], Counter[str]] = dataclasses.field(
        default_factory=lambda: defaultdict(Counter)
    )
    trusted: dict[str, bool] = dataclasses.field(default_factory=dict)
    worker: Worker | None = None

    def judge(self, mutant: Mutant, tests: set[str]) -> dict[str, Any]:
        """Run tests on a mutant until one fails; say which, or that none did."""
        begin = time.monotonic()
        path = self.folder / PACKAGE / f"{mutant.module}.py"
        original = path.read_bytes()
        left_out: list[str] = []
        path.write_bytes(mutant.source)
        try:
            for some in self._stages(mutant, tests, left_out):
                found = self._attempt(some)
                if found != "survived":
                    path.write_bytes(original)
                    if found.startswith(_NOT_RUN) and self._attempt(some).startswith(_NOT_RUN):
                        raise SystemExit(f"{some} cannot be run: see {self.output / 'worker.log'}")
                    return {"status": "killed", "by": found, "took": time.monotonic() - begin}
        finally:
            path.write_bytes(original)
        return {
            "status": "survived" if tests else "not covered",
            "tests": len(tests) - len(left_out),
            "left_out": len(left_out),
            "took": time.monotonic() - begin,
        }

    def _stages(self, mutant: Mutant, tests: set[str], left_out: list[str]) -> Iterator[list[str]]:
        near = self.killers[mutant.module, mutant.function]
        counts = (c for (module, _), c in self.killers.items() if module == mutant.module)
        far = sum(counts, Counter())
        home = f"test_{mutant.module.strip('_')}.py"

        def rank(test: str) -> float:
            likely = (1 + 5 * near[test] + far[test]) * (5 if home in test else 1)
            return (self.records.seconds[test] + 0.05) / likely

        ordered = sorted((t for t in tests if self.trusted.get(t, True)), key=rank)
        total, chosen = 0.0, []
        for test in ordered:
            total += self.records.seconds[test]
            (chosen if total <= self.budget or not chosen else left_out).append(test)
        # Importing a file of tests takes longer than most tests in it: one file alone is first.
        file = chosen[0].split("::")[0] if chosen else ""
        best = [test for test in chosen if test.split("::")[0] == file][:10]
        rest = [test for test in chosen if test not in best]
        yield from filter(None, (best, rest[:40], rest[40:]))

    def _attempt(self, tests: list[str]) -> str:
        """Return the test that fails, what else went wrong, or "survived"."""
        while tests:
            found = self._run(tests)
            if "died" in found:
                return found["died"]
            if found["failed"]:
                (failed, *_) = found["failed"]
                if self.trusted.get(failed, True):
                    return failed
                tests = [test for test in tests if test != failed]
            elif found["not_collected"]:
                return f"import of {found['not_collected'][0]}"
            elif found["code"]:
                return f"pytest's exit status {found['code']}"
            else:
                break
        return "survived"

    def _run(self, tests: Iterable[str]) -> Any:
        if self.worker is None:
            self.worker = Worker(self.folder, self.output / "worker.log")
        tests = list(tests)
        expected = sum(self.records.seconds[test] for test in tests)
        found = self.worker.run(tests, 45 + 5 * expected)
        if "died" in found:
            self.stop()
        return found

    def stop(self) -> None:
        """End the worker; the next test has another one."""
        if self.worker is not None:
            self.worker.stop()
            self.worker = None

    def doubtful(self, tests: Iterable[str]) -> set[str]:
        """Return which of these fail on the package as it is, in the worker as it has become."""
        doubtful: set[str] = set()
        left = sorted(set(tests) & self.records.seconds.keys())
        while left:
            found = self._run(left)
            if not found.get("failed"):
                return doubtful | (set(left) if found.get("code") != 0 else set())
            doubtful.update(found["failed"])
            left = [test for test in left if test not in doubtful]
            self.stop()
        return doubtful


def _copy(folder: Path) -> None:
    """Copy the tree as it is now, without what Git ignores."""
    for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard"):
        source = ROOT / name
        if source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)


def _git(*arguments: str) -> list[str]:
    """Return the names of files that Git lists."""
    command = ["git", *arguments]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S603
    return [name for name in listed.stdout.split("\0") if name]


def _justified() -> dict[tuple[Any, ...], str]:
    if not SURVIVORS.exists():
        return {}
    entries = tomllib.loads(SURVIVORS.read_text("utf-8")).get("survivor", [])
    return {
        (e["module"], e["function"], e["line"], e["change"], e.get("number", 0)): e["reason"]
        for e in entries
    }


def _in_rows(mutant: Mutant, spans: list[tuple[int, int]]) -> bool:
    first, last = mutant.rows
    return not spans or any(a <= last and first <= b for a, b in spans)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--module", nargs="+", choices=MODULES, help="only these modules")
    parser.add_argument("--lines", help="only mutants on these lines: 60-80,95")
    parser.add_argument("--changed", action="store_true", help="only modules that Git sees changed")
    parser.add_argument("--tests", nargs="+", help="only these files of tests")
    parser.add_argument("--again", action="store_true", help="judge anew what was judged")
    parser.add_argument("--survivors", action="store_true", help="judge anew what survived")
    parser.add_argument("--budget", type=float, default=30, help="seconds of tests for a mutant")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--record", action="store_true", help="record what tests execute and stop")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "mutants")
    return parser.parse_args()


def main() -> int:
    """Go through the mutants that were asked for; return the exit status."""
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a worker must not be left alone
    modules = options.module or MODULES
    if options.changed:
        names = _git("diff", "--name-only", "-z", "HEAD", "--", PACKAGE)
        modules = [m for m in modules if f"{PACKAGE}/{m}.py" in names]
    spans = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?:-(\d+))?", options.lines or "")]
    sources = {m: (ROOT / PACKAGE / f"{m}.py").read_bytes() for m in MODULES}
    mutants = [m for name in modules for m in mutants_of(name, sources[name]) if _in_rows(m, spans)]
    if options.list:
        for m in mutants:
            print(f"{m.module}:{m.rows[0]} {m.function}: {m.change}    [{m.line}]")
        print(f"{len(mutants)} mutants")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        _copy(folder)
        _preload(folder, options.output)
        records = record(folder, options.output, options.tests or _files(folder), modules)
        if options.record:
            return 0
        run = Run(folder, options.output, records, options.budget)
        try:
            return _go(mutants, sources, run, options)
        finally:
            run.stop()


def _go(
    mutants: list[Mutant], sources: dict[str, bytes], run: Run, options: argparse.Namespace
) -> int:
    path = options.output / "results.json"
    results = {tuple(r["key"]): r for r in json.loads(path.read_text())} if path.exists() else {}
    for key, result in results.items():
        if result["status"] == "killed":
            run.killers[key[0], key[1]][result["by"]] += 1
    trees = {module: ast.parse(source) for module, source in sources.items()}
    end = time.monotonic() + 60 * options.minutes
    todo = []
    for mutant in mutants:
        known = results.get(mutant.key, {})
        redo = options.again or (options.survivors and known.get("status") != "killed")
        if redo or known.get("source") != _digest(program(mutant.source)):
            todo.append(mutant)
    todo.sort(key=lambda mutant: mutant.is_coarse)  # the others are more likely to survive
    done = 0
    while todo and time.monotonic() < end:
        batch = {}
        for mutant in todo[:BATCH]:
            result = run.judge(mutant, tests_for(mutant, run.records, trees))
            batch[mutant.key] = result | {
                "key": mutant.key,
                "source": _digest(program(mutant.source)),
            }
            print(
                f"{mutant.module}:{mutant.rows[0]} {mutant.change}: "
                f"{result['status']} {result.get('by', '')} ({result['took']:.1f} s)",
                flush=True,
            )
            if result["status"] == "killed":
                run.killers[mutant.module, mutant.function][result["by"]] += 1
            if time.monotonic() > end:
                break
        # A test that fails on the package itself, here and now, has proved nothing.
        doubtful = run.doubtful(result.get("by", "") for result in batch.values())
        run.stop()
        for test in doubtful:
            print(f"left out from here on, since it fails on the package as it is: {test}")
            run.trusted[test] = False
        sure = {key: r for key, r in batch.items() if r.get("by") not in doubtful}
        results |= sure
        path.write_text(json.dumps(list(results.values()), indent=1))
        todo = [mutant for mutant in todo if mutant.key not in sure]
        done += len(sure)
        print(f"{done} judged, {len(todo)} left", flush=True)
    exist = {m.key for name in trees for m in mutants_of(name, sources[name])}
    return _report(mutants, results, _justified(), exist)


def _report(
    mutants: list[Mutant],
    results: dict[tuple[Any, ...], dict[str, Any]],
    justified: dict[tuple[Any, ...], str],
    exist: set[tuple[Any, ...]],
) -> int:
    judged = {m.key: (m, results[m.key]) for m in mutants if m.key in results}
    alive = {key: both for key, both in judged.items() if both[1]["status"] != "killed"}
    modules = {m.module for m in mutants}
    count: dict[str, Counter[str]] = {module: Counter() for module in MODULES}
    for m in mutants:
        status = judged[m.key][1]["status"] if m.key in judged else "not judged"
        count[m.module]["justified" if m.key in alive and m.key in justified else status] += 1
    for module in filter(modules.__contains__, MODULES):
        parts = ", ".join(f"{n} {status}" for status, n in sorted(count[module].items()))
        print(f"{module}: {count[module].total()} mutants: {parts}")
    unjustified = [both for key, both in alive.items() if key not in justified]
    for m, result in unjustified:
        print(
            f"\n{result['status'].upper()} {m.module}:{m.rows[0]}, in {m.function or 'the module'}"
        )
        print(f"  {m.line}\n  {m.change}" + (f"  (number {m.number})" if m.number else ""))
        if result.get("left_out"):
            print(f"  {result['left_out']} tests were left out: see --budget")
    # An entry is out of date if its mutant is gone, or was judged and killed.
    stale = [
        key
        for key in justified
        if key[0] in modules and (key not in exist or (key in judged and key not in alive))
    ]
    for module, function, line, change, _ in stale:
        print(f"\nOUT OF DATE in {SURVIVORS.name}: {module} {function} `{line}` {change}")
    not_judged = len(mutants) - len(judged)
    if not_judged:
        print(f"\nNOT GONE THROUGH: {not_judged} of {len(mutants)} mutants")
    return 1 if unjustified or stale else 2 if not_judged else 0


if __name__ == "__main__":
    sys.exit(main())
