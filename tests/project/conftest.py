"""Shared by the tests of the examples, the benchmarks, the documents and the packaging."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ and examples/ are not installed


@pytest.fixture(scope="module", autouse=True)
def _promotion(_defaults):
    """Run as the documents do: with the promotion of users."""


@pytest.fixture(scope="session")
def python():
    """Return a function that runs Python in a folder and returns its stdout and stderr."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

    def run(*arguments, cwd):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(  # noqa: S603, our own scripts
            command, cwd=cwd, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, done.stderr

    return run


@pytest.fixture(scope="session")
def files():
    """List the files that git tracks, and those that `git add --all` would add."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)  # noqa: S603
    names = listed.stdout.decode().split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())
