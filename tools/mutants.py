"""Break lines of the package one at a time, and report which of them `make test` finds.

`python tools/mutants.py` breaks each line of `tools/mutants.toml` in a copy of the checkout, and
runs the tests named there as `make test` selects them. `python tools/mutants.py NAME...` breaks
only these. The exit status is 1 if a broken line is not found.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = tomllib.loads((ROOT / "tools/mutants.toml").read_text("utf-8"))
# A broken line may keep a loop from ending.
ENDS = "-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "output")


def broken(source: str, mutant: dict) -> str:
    """Return the source of a file with its line broken. It has this line once."""
    if source.count(mutant["old"]) != 1:
        raise ValueError(f"{mutant['file']} must have this once: {mutant['old']}")
    return source.replace(mutant["old"], mutant["new"])


def failures(checkout: Path, tests: list[str], *options: str) -> list[str]:
    """Return the names of the tests that fail in a copy of the checkout."""
    settings = ["-m", "not exhaustive", "-q", "--tb=no", "-o", f"cache_dir={ROOT}/.pytest_cache"]
    command = [sys.executable, "-m", "pytest", *settings, *ENDS, *options, *tests]
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(  # noqa: S603, our own tests
        command, cwd=checkout, env=env, capture_output=True, text=True, check=False
    )
    if re.search(r"^Timeout \(", done.stderr, re.MULTILINE):
        return ["a test that does not end"]
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    return re.findall(r"^(?:FAILED|ERROR|SUBFAILED\S*) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)


def main(names: list[str]) -> int:
    """Break the lines with these names, or all of them, and print what finds each."""
    mutants = {name: MUTANTS[name] for name in names or MUTANTS}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        tests = sorted({test for mutant in mutants.values() for test in mutant["tests"]})
        fail_anyway = failures(copy, tests)
        for test in fail_anyway:
            print(f"{test} fails anyway, and is left out", flush=True)
        options = "--exitfirst", *(f"--deselect={test}" for test in fail_anyway)
        found = 0
        for name, mutant in mutants.items():
            path = copy / "optax_lossscale" / mutant["file"]
            source = path.read_text("utf-8")
            path.write_text(broken(source, mutant), "utf-8")
            failed = failures(copy, mutant["tests"], *options)
            path.write_text(source, "utf-8")
            found += bool(failed)
            print(f"{name}: {', '.join(failed) or 'NOT FOUND'}", flush=True)
    print(f"{found} of {len(mutants)} are found")
    return found < len(mutants)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
