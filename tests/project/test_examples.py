"""The examples run and learn, and the demonstration fails when it should."""

import math
import re
import runpy
from pathlib import Path

import jax
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quickly_compiled")]

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_enough_to_copy_whole(path):
    assert len(path.read_text("utf-8").splitlines()) <= 120


def test_word_model_prints_and_draws_and_fails_when_training_was_too_short(python, tmp_path):
    command = "-W", "error", EXAMPLES / "word_model.py", "--steps=5", "--batch=64"
    out, err = python(*command, cwd=tmp_path, status=1)
    first, *_ = err.splitlines()  # no progress bar without a terminal
    assert re.fullmatch(r"final test loss, float32: [\d.]+, expected at most 5.5", first)
    head, *rows = out.splitlines()
    assert re.findall(r"\d+", head) == [*"12345"]
    assert [row.split()[-2:] for row in rows] == [["-", "-"], ["-", "-"], ["0", "2**15"]]
    (picture,) = tmp_path.rglob("*.*")
    assert picture == tmp_path / "output/word_model.png"
    assert is_picture(picture)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ((5.6, 6.2, 5.6), "float32: 5.60, expected at most 5.5"),
        ((5.0, 5.2, 5.0), "float16: 5.20, expected 5.30 or more"),
        ((5.0, 5.5, 5.2), "with scaling: 5.20, expected 5.00 ± 0.1"),
        ((5.0, 5.5, math.nan), "with scaling: nan, expected 5.00 ± 0.1"),
    ],
)
def test_word_model_names_each_number_that_is_wrong(losses, message):
    problems = load("word_model")["problems"]
    assert problems(5.0, 5.5, 5.05) == []
    assert problems(*losses) == [f"final test loss, {message}"]


@pytest.mark.exhaustive
def test_word_model_loses_most_of_a_gradient_in_float16_alone():
    example = load("word_model")
    data = example["load_data"]()
    zeros = {name: example["train"](name, data, 1, 16384)[1, 0] for name in example["FORMATS"]}
    assert list(zeros.values()) == [0, pytest.approx(0.8, abs=0.1), 0]


@pytest.mark.parametrize("name", ["flax_train_state", "nnx_training", "equinox_training"])
def test_a_framework_example_learns_and_skips_steps(name):
    result = load(name)["main"](["--epochs=6"])
    assert result.skipped >= 3
    assert result.accuracy > 0.8
    assert getattr(result, "kept", True)  # a skipped step must not change these


def test_both_ways_to_accumulate_learn():
    results = load("gradient_accumulation")["main"](["--epochs=6"])
    windows = 6 * (1437 // 128)
    accuracy, applied, skipped = zip(
        *(results[name] for name in ("wrapped", "window")), strict=True
    )
    # Only the bad micro-batch is dropped, so the windows shift.
    assert applied == ((4 * windows - skipped[0]) // 4, windows - skipped[1])
    assert min(skipped) >= 3
    assert min(accuracy) > 0.8


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
