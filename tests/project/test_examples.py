"""The examples run, learn and are notebooks, and the demonstration fails when it should."""

import json
import re
import runpy
from pathlib import Path

import jax
import pytest
from process_worker import tiny_example

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_an_example_is_short_enough_to_copy_whole():
    lengths = {path.stem: path.read_text("utf-8").count("\n") for path in EXAMPLES.glob("*.py")}
    assert lengths.pop("reinforce") <= 150  # a policy, with its cache, that samples and learns
    assert max(lengths.values()) <= 120


def test_a_notebook_has_the_code_of_its_example_and_all_that_the_format_requires(tmp_path):
    runpy.run_path(str(EXAMPLES.parent / "docs/notebooks.py"))["write"](tmp_path)
    examples = [*EXAMPLES.glob("*.py")]
    assert len(examples) == len([*tmp_path.glob("*.ipynb")]) > 5
    for example in examples:
        notebook = json.loads((tmp_path / f"{example.stem}.ipynb").read_text("utf-8"))
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        cells = notebook["cells"]
        assert len({cell["id"] for cell in cells}) == len(cells) > 3
        for cell in cells:
            more = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
            assert cell.keys() == {"id", "cell_type", "metadata", "source"} | more

        first, *codes = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        assert first.startswith("import sys\n\nsys.argv = ")
        docstring, code = example.read_text("utf-8").removeprefix('"""').split('"""\n', 1)
        assert docstring.strip() in cells[0]["source"]
        lines = [line for line in "\n".join(codes).splitlines() if line]
        assert lines == [line for line in code.splitlines() if line]
        assert all(code and not code.startswith("\n") for code in codes)


def test_word_model_prints_and_draws_and_fails_when_too_short(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["word_model.py", "--steps=5", "--batch=64"])
    with pytest.raises(SystemExit, match=r"final test loss, float32: [\d.]+, expected at most 5.1"):
        runpy.run_path(str(EXAMPLES / "word_model.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert err == ""
    first, head, *rows, last = out.splitlines()  # the bars are only for terminals
    assert first.endswith("on two cores. Writes output/word_model.png")
    assert last == "Written to output/word_model.png"
    assert head.split()[:2] == ["test", "loss"]
    ends = [["0", "1", "12.0"], ["0", "1", "12.0"], ["0", "65,536", "12.0"]]
    assert [row.split()[-3:] for row in rows] == ends
    (picture,) = tmp_path.rglob("*.*")
    assert picture == tmp_path / "output/word_model.png"
    assert is_picture(picture)


@pytest.mark.exhaustive
def test_word_model_loses_most_of_a_gradient_only_in_float16():
    example = load("word_model")
    data = example["load_data"]()
    zeros = {name: example["train"](name, data, 1, 16384)[0][1, 0] for name in example["FORMATS"]}
    assert list(zeros.values()) == [0, pytest.approx(0.8, abs=0.1), 0]


# docs/flax.md trains as the first does.
slowest = pytest.param("flax_train_state", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("name", [slowest, "nnx_training", "equinox_training"])
def test_a_framework_example_learns_and_skips_steps(name):
    result = load(name)["main"](["--epochs=6"])
    assert result.skipped >= 3
    assert result.accuracy > 0.8
    assert getattr(result, "kept", True)  # a skipped step must not change these


def test_one_step_learns_and_skips_the_broken_batch_in_every_precision():
    results = load("one_step")["main"](["--steps=100"])
    assert list(results) == ["float32", "bfloat16", "float16"]
    assert all(result.accuracy > 0.85 for result in results.values())
    assert [result.skipped for result in results.values()] == [1, 1, 1]
    assert [result.loss_scale for result in results.values()] == [1, 1, 2**15]


def test_both_ways_to_accumulate_learn():
    results = load("gradient_accumulation")["main"](["--epochs=6"])
    windows = 6 * (1437 // 128)
    accuracy, applied, skipped = zip(*map(results.get, ("wrapped", "window")), strict=True)
    # Only the bad micro-batch is dropped, so the windows shift.
    assert applied == ((4 * windows - skipped[0]) // 4, windows - skipped[1])
    assert min(skipped) >= 3
    assert min(accuracy) > 0.8


def test_the_sharded_transformer_runs_on_all_devices_and_skips_steps(tmp_path, capsys):
    main = tiny_example(batch=16, length=32, width=64)
    main(["--steps=5", f"--checkpoints={tmp_path / 'saved'}"])
    heading, columns, *lines = capsys.readouterr().out.splitlines()
    assert columns == "  step  loss on unseen text    loss scale  skipped"
    assert heading == f"{jax.device_count()} devices of 1 processes, from step 0"
    rows = [[float(x.replace(",", "")) for x in line.split()] for line in lines]
    steps, losses, scales, skipped = zip(*rows, strict=True)
    assert steps == skipped == tuple(range(6))  # every step is skipped at first
    assert len(set(losses)) == 1
    assert scales == tuple(2.0**n for n in range(24, 18, -1))


@pytest.mark.exhaustive
def test_diagnose_finds_and_fixes_three_failures_and_draws_them(tmp_path, capsys):
    runs = load("diagnose")["main"](["--steps=60", f"--output={tmp_path / 'a.png'}"])
    for (_, bad, skipped, _), (_, good, fewer, _) in runs.values():
        assert skipped[-1] in {0, 60}
        assert fewer[-1] <= 3
        assert (bad[-1] < 0.2, good[-1] > 0.9) == (True, True)
    sections = re.split(r"\n\d\. ", capsys.readouterr().out)
    found = [
        ["gradient_exponents: float16 rounds ", "suggest_loss_scale, "],
        ["at its floor of 1. Possible", "1. The forward pass", "layer: params['second']"],
        ["at its floor of 1. Possible", "3. The batch or the parameters", "['images']: 4311 NaN"],
    ]
    for section, texts in zip(sections, found, strict=True):
        assert all(text in section for text in texts), section
    assert is_picture(tmp_path / "a.png")


@pytest.mark.exhaustive
def test_reinforce_learns_in_every_format(tmp_path, capsys):
    main = load("reinforce")["main"]
    main.__globals__["PROMPTS"] = 16
    runs = main(["--steps=40", f"--output={tmp_path / 'a.png'}"])
    for right, _, skipped, _ in runs.values():
        assert right[-10:].mean() > right[:10].mean() + 0.1
        assert skipped[-1] == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert re.findall(r"\d+", head) == ["10", "20", "30", "40"]
    assert len(rows) == 3
    assert is_picture(tmp_path / "a.png")
