"""The examples run from a terminal, and the demonstration fails when it should."""

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
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
    assert (done.returncode, done.stderr) == (0, "")  # no progress bar where nobody looks
    rows = [line for line in done.stdout.splitlines() if line.count("%") == 5]
    assert [re.search(r"(-|2\*\*[\d.]+)$", row)[0][0] for row in rows] == [*"--2--2"]
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


@pytest.fixture
def run_main():
    """Run an example here, where what it returns can be looked at."""
    return lambda name, *args: runpy.run_path(str(EXAMPLES / name))["main"](list(args))


@pytest.mark.integration
def test_the_linen_example_keeps_what_must_stand_still_and_learns(run_main, capsys):
    result = run_main("flax_train_state.py", "--epochs=6")
    assert result.steps + result.skipped == 6 * (1437 // 128)
    assert result.skipped >= 3
    assert result.kept
    assert result.accuracy > 0.8
    assert f"{result.steps} steps applied, {result.skipped} skipped" in capsys.readouterr().out


@pytest.mark.integration
def test_the_nnx_example_keeps_what_must_stand_still_and_learns(run_main):
    result = run_main("nnx_training.py", "--epochs=6")
    assert result.skipped >= 3
    assert result.kept
    assert result.accuracy > 0.8


@pytest.mark.integration
def test_the_equinox_example_learns(run_main):
    result = run_main("equinox_training.py", "--epochs=6")
    assert result.skipped >= 3
    assert result.loss_scale < 2.0**24
    assert result.accuracy > 0.8


@pytest.mark.integration
def test_both_ways_to_accumulate_learn(run_main):
    results = run_main("gradient_accumulation.py", "--epochs=6")
    windows = 6 * (1437 // 128)
    assert results["window"].applied + results["window"].skipped == windows
    # A bad micro-batch is dropped alone: the windows shift.
    assert results["wrapped"].applied == (4 * windows - results["wrapped"].skipped) // 4
    for result in results.values():
        assert result.skipped >= 3
        assert result.accuracy > 0.8


@pytest.mark.integration
def test_the_sharded_transformer_resumes_and_learns_more_than_frequencies(
    run_main, tmp_path, capsys
):
    def run(steps):
        size = "--layers=1", "--width=64", "--length=64", "--heads=2", "--generate=20"
        with jax.numpy_rank_promotion("allow"):
            options = *size, "--horizon=80", "--rate=0.01", f"--checkpoints={tmp_path / 'saved'}"
            problems = run_main("sharded_transformer.py", f"--steps={steps}", *options)
        out = capsys.readouterr().out
        return problems, out, int(re.search(r"skipped (\d+) steps", out)[1])

    (problem,), out, skipped = run(10)
    assert "train for more --steps" in problem
    assert f"on {jax.device_count()} devices of 1 processes, from step 0" in out
    assert skipped >= 2
    problems, out, skipped_in_all = run(80)
    assert problems == []
    assert "from step 10" in out
    assert skipped <= skipped_in_all <= skipped + 3  # the scale is part of what was saved


def test_the_sharded_transformer_never_passes_with_nan():
    problems = runpy.run_path(str(EXAMPLES / "sharded_transformer.py"))["problems"]
    assert problems(3.0, 3.3) == []
    for reached in (3.4, math.nan):
        (problem,) = problems(reached, 3.3)
        assert f"is {reached:.3f}, expected less than the 3.300" in problem


def test_the_sharded_transformer_refuses_what_it_cannot_train(tmp_path):
    for option, message in (("--steps=0", "at least 1"), ("--heads=3", "must divide --width")):
        done = run_example("sharded_transformer.py", option, cwd=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr


def test_diagnose_finds_each_of_three_causes_and_draws_them(tmp_path):
    done = run_example("diagnose.py", "--epochs=8", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")  # nor a progress bar in a file
    sections = re.split(r"\n\d\. ", done.stdout)
    symptoms = ["healthy", "at its floor of 1. Likely", "at its floor of 1. Likely"]
    causes = ["of the entries to zero", "1. The forward pass", "3. The batch or the parameters"]
    found = ["suggest_scale`: 2**", "layer: params['second']", "['images']: 5748 NaN"]
    for section, *expected in zip(sections[1:], symptoms, causes, found, strict=True):
        for text in expected:
            assert text in section
        assert len(re.findall(r"accuracy 9\d\.\d%", section)) == 1  # fixed
    pictures = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*"))
    assert pictures == ["output/gradient_exponents.png", "output/loss_scale.png"]
    for picture in pictures:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.integration
def test_diagnose_notices_a_remedy_that_does_not_help(capsys):
    example = runpy.run_path(str(EXAMPLES / "diagnose.py"))["overflow"].__globals__
    example["softplus_in_float32"] = example["softplus_by_hand"]
    with jax.numpy_rank_promotion("allow"):
        (problem,), _ = example["overflow"](example["load_data"](), 6)
    assert "float32 did not help: accuracy" in problem
    assert "66 of 66 steps skipped" in problem
    capsys.readouterr()


def test_diagnose_refuses_to_train_too_little(tmp_path):
    done = run_example("diagnose.py", "--epochs=5", cwd=tmp_path)
    assert done.returncode == 2
    assert "--epochs must be at least 6" in done.stderr
