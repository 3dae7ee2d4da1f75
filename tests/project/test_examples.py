"""The examples run and learn, and the demonstration fails when it should."""

import math
import re
import runpy
from pathlib import Path

import jax
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quickly_compiled")]

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOAT32, FLOAT16, SCALED = "float32", "float16", "float16 + loss scaling"
SMALL, ONE = 1e-5, 1.0
# Final accuracies of a correct demonstration.
RIGHT = {
    (SMALL, FLOAT32): 0.978,
    (SMALL, FLOAT16): 0.167,
    (SMALL, SCALED): 0.969,
    (ONE, FLOAT32): 0.978,
    (ONE, FLOAT16): 0.980,
    (ONE, SCALED): 0.987,
}


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_digits_trains_and_draws(python, tmp_path):
    options = "--epochs=10", "--seeds=2"
    out, err = python("-W", "error", EXAMPLES / "digits.py", *options, cwd=tmp_path)
    assert err == ""  # no progress bar without a terminal
    rows = [line for line in out.splitlines() if line.count("%") == 5]
    assert [re.search(r"(-|2\*\*[\d.]+)$", row)[0][0] for row in rows] == [*"--2--2"]
    assert "picture: output/digits.png" in out
    (picture,) = tmp_path.rglob("*.*")
    assert picture == tmp_path / "output/digits.png"
    assert is_picture(picture)


def test_digits_exits_with_an_error_when_training_was_too_short(monkeypatch, tmp_path):
    arguments = ["digits.py", "--epochs=1", "--seeds=1", f"--output={tmp_path / 'a.png'}"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match="at loss weight 1, float32 reached"):
        runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
    assert is_picture(tmp_path / "a.png")  # shows the reason


@pytest.mark.parametrize(
    ("case", "accuracy", "message"),
    [
        ((SMALL, SCALED), 0.96, "1e-05, float16 + loss scaling reached 96.0%, expected within one"),
        ((SMALL, SCALED), math.nan, "1e-05, float16 + loss scaling reached nan%"),
        ((SMALL, FLOAT16), 0.80, "1e-05, float16 reached 80.0%, expected a failure"),
        ((ONE, FLOAT16), 0.5, "weight 1, float16 reached 50.0%, expected within one point"),
    ],
)
def test_digits_names_each_number_that_is_wrong(case, accuracy, message):
    problems = load("digits")["problems"]
    assert problems(RIGHT) == []
    (found,) = problems(RIGHT | {case: accuracy})
    assert message in found
    # Equal but low accuracies are wrong too.
    found = problems(dict.fromkeys(RIGHT, 0.5) | {(SMALL, FLOAT16): 0.1})
    assert [message.partition(" reached")[0][-7:] for message in found] == ["float32", "float32"]


@pytest.mark.parametrize("name", ["flax_train_state", "nnx_training", "equinox_training"])
def test_a_framework_example_learns_and_skips_steps(name):
    result = load(name)["main"](["--epochs=6"])
    assert result.skipped >= 3
    assert result.accuracy > 0.8
    assert getattr(result, "kept", True)  # a skipped step must not change these


def test_both_ways_to_accumulate_learn():
    results = load("gradient_accumulation")["main"](["--epochs=6"])
    windows = 6 * (1437 // 128)
    assert results["window"].applied + results["window"].skipped == windows
    # Only the bad micro-batch is dropped, so the windows shift.
    assert results["wrapped"].applied == (4 * windows - results["wrapped"].skipped) // 4
    for result in results.values():
        assert result.skipped >= 3
        assert result.accuracy > 0.8


@pytest.fixture
def train_transformer(tmp_path, capsys):
    """Return a function that trains the sharded transformer up to a given step, at a tiny size."""
    main = load("sharded_transformer")["main"]
    size = "--layers=1", "--width=64", "--length=64", "--heads=2", "--generate=20"
    options = *size, "--horizon=80", "--rate=0.01", f"--checkpoints={tmp_path / 'saved'}"

    def run(steps):
        problems = main([f"--steps={steps}", *options])
        out = capsys.readouterr().out
        return problems, out, int(re.search(r"skipped (\d+) steps", out)[1])

    return run


def test_the_sharded_transformer_runs_on_all_devices_and_skips_steps(train_transformer):
    (problem,), out, skipped = train_transformer(5)
    assert "train for more --steps" in problem
    assert f"on {jax.device_count()} devices of 1 processes, from step 0" in out
    assert skipped >= 2


@pytest.mark.exhaustive
def test_the_sharded_transformer_resumes_and_learns_more_than_frequencies(train_transformer):
    _, _, skipped = train_transformer(10)
    problems, out, skipped_in_all = train_transformer(80)
    assert problems == []
    assert "from step 10" in out
    assert skipped <= skipped_in_all <= skipped + 3  # the loss scale was saved too


@pytest.mark.exhaustive
def test_diagnose_finds_each_of_three_causes_and_draws_them(tmp_path, capsys):
    assert load("diagnose")["main"](["--epochs=6", f"--output={tmp_path}"]) == []
    _, *sections = re.split(r"\n\d\. ", capsys.readouterr().out)
    symptoms = ["healthy", "at its floor of 1. Likely", "at its floor of 1. Likely"]
    causes = ["of the entries to zero", "1. The forward pass", "3. The batch or the parameters"]
    found = ["suggest_scale`: 2**", "layer: params['second']", "['images']: 5748 NaN"]
    for section, *expected in zip(sections, symptoms, causes, found, strict=True):
        for text in [*expected, "accuracy 9"]:  # after the fix
            assert text in section
    names = [path.name for path in tmp_path.iterdir() if is_picture(path)]
    assert sorted(names) == ["gradient_exponents.png", "loss_scale.png"]


def test_diagnose_notices_a_remedy_that_does_not_help():
    example = load("diagnose")["overflow"].__globals__
    example["softplus_in_float32"] = example["softplus_by_hand"]
    (problem,), _ = example["overflow"](example["load_data"](), 6)
    assert "float32 did not help: accuracy" in problem
    assert "66 of 66 steps skipped" in problem
