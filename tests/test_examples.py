"""The examples run from a terminal, and the demonstration fails when it should."""

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FLOAT32, FLOAT16, SCALED = "float32", "float16", "float16 + loss scaling"
SMALL, ONE = 1e-5, 1.0
# Final accuracies as the demonstration should give them.
RIGHT = {
    (SMALL, FLOAT32): 0.978,
    (SMALL, FLOAT16): 0.167,
    (SMALL, SCALED): 0.969,
    (ONE, FLOAT32): 0.978,
    (ONE, FLOAT16): 0.980,
    (ONE, SCALED): 0.987,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where one run leaves what it compiled for the next."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def run_example(name, *args, cwd, env=None):
    return subprocess.run(  # noqa: S603, our own script
        [sys.executable, "-W", "error", EXAMPLES / name, *args],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def problems():
    return runpy.run_path(str(EXAMPLES / "digits.py"))["problems"]


def test_the_minimal_example_prints_a_failure_and_a_success(tmp_path):
    done = run_example("minimal.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("w = ")[1] for line in done.stdout.splitlines()] == ["0.00", "3.00"]


def test_digits_trains_and_draws(tmp_path, compiled):
    done = run_example("digits.py", "--epochs=10", "--seeds=2", cwd=tmp_path, env=compiled)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.count("%") == 4]
    assert len(rows) == 6
    assert "picture: output/digits.png" in done.stdout
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")] == [
        "output/digits.png"
    ]
    assert (tmp_path / "output/digits.png").read_bytes().startswith(b"\x89PNG")


def test_digits_exits_with_an_error_when_training_was_too_short(tmp_path, compiled):
    args = "--epochs=1", "--seeds=2", "--output=a.png"
    done = run_example("digits.py", *args, cwd=tmp_path, env=compiled)
    assert done.returncode == 1
    assert "at loss weight 1, float32 reached" in done.stderr
    assert (tmp_path / "a.png").exists()  # to see why


def test_digits_refuses_to_train_on_nothing(tmp_path):
    done = run_example("digits.py", "--seeds", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "must be at least 1, got" in done.stderr


def test_digits_accepts_the_right_numbers(problems):
    assert problems(RIGHT) == []


@pytest.mark.parametrize(
    ("case", "accuracy", "message"),
    [
        ((SMALL, SCALED), 0.96, "1e-05, float16 + loss scaling reached 96.0%, expected within one"),
        ((SMALL, SCALED), 0.99, "1e-05, float16 + loss scaling reached 99.0%, expected within one"),
        ((SMALL, SCALED), math.nan, "1e-05, float16 + loss scaling reached nan%"),
        ((SMALL, FLOAT16), 0.978, "1e-05, float16 reached 97.8%, expected a failure"),
        ((SMALL, FLOAT16), 0.80, "1e-05, float16 reached 80.0%, expected a failure"),
        ((SMALL, FLOAT16), math.nan, "1e-05, float16 reached nan%"),
        ((ONE, FLOAT16), 0.5, "weight 1, float16 reached 50.0%, expected within one point"),
        ((ONE, SCALED), 0.1, "weight 1, float16 + loss scaling reached 10.0%"),
    ],
)
def test_digits_names_each_number_that_is_wrong(problems, case, accuracy, message):
    (found,) = problems(RIGHT | {case: accuracy})
    assert message in found


@pytest.mark.parametrize("accuracy", [0.5, math.nan])
def test_digits_does_not_compare_with_a_float32_that_has_not_learned(problems, accuracy):
    found = problems(dict.fromkeys(RIGHT, accuracy) | {(SMALL, FLOAT16): 0.1})
    assert sum("float32 reached" in message for message in found) == 2
