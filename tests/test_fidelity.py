"""What docs/training.md shows is what was measured, and can be measured again."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# No package, not installed.
from benchmarks.fidelity import __main__ as command  # noqa: E402
from benchmarks.fidelity import report, tasks, training  # noqa: E402

pytestmark = pytest.mark.integration

PAGE = ROOT / "docs/training.md"
STORED = json.loads(PAGE.with_suffix(".json").read_text())
FLOAT32, BFLOAT16 = training.FLOAT32, training.BFLOAT16
FLOAT16, SCALED = training.FLOAT16, training.SCALED
BY_NAME = {task["name"]: task for task in STORED["tasks"]}
SMALL_WEIGHTS = [name for name in BY_NAME if not name.endswith(" 1")]

# Additional hours of sleep under two drugs, ten patients, and what R says about their differences:
# a classic of W. S. Gosset, who wrote as Student.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
LOW, HIGH = 0.7001142, 2.4598858


@pytest.fixture(autouse=True)
def _rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def all_tasks():
    """Every task, made once: the text takes seconds."""
    return tasks.all_tasks()


def run(*args, cwd=ROOT):
    return subprocess.run(  # noqa: S603, our own script
        [sys.executable, "-W", "error", "-m", "benchmarks.fidelity", *map(str, args)],
        cwd=cwd,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiling is nearly all of it
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder into which a short run wrote."""
    output = tmp_path_factory.mktemp("quick")
    done = run("--quick", "--seeds=2", "--output", output)
    assert done.returncode == 0, done.stderr
    return output


def test_a_short_run_trains_every_task_in_every_way(quick):
    results = json.loads((quick / "training.json").read_text())
    assert [task["name"].split(",")[0] for task in results["tasks"]] == [
        "digits",
        "photograph",
        "text",
    ]
    for task in results["tasks"]:
        small = not task["name"].endswith(" 1")
        assert list(task["runs"]) == [way for way in training.WAYS if not small or way != BFLOAT16]
        for way, runs in task["runs"].items():
            assert len(runs) == 2
            for one in runs:
                assert len(one["curve"]) == 2
                assert np.isfinite(one["curve"]).all()
                # Too short to grow: each skipped step, and nothing else, has moved the scale.
                start = 2**15 if way == SCALED else 1
                assert one["loss_scale"] == start * 0.5 ** one["skipped"]
            first, second = (one["curve"] for one in runs)
            assert first != second  # another seed


def test_at_a_small_weight_float16_alone_loses_its_gradients(quick):
    digits, *_ = json.loads((quick / "training.json").read_text())["tasks"]
    share = {
        way: np.mean([one["zero_share"] for one in digits["runs"][way]]) for way in digits["runs"]
    }
    assert share[FLOAT16] > 0.9
    assert share[SCALED] == pytest.approx(share[FLOAT32], abs=0.02)


def test_table_and_picture_are_made_from_the_numbers(quick):
    results = json.loads((quick / "training.json").read_text())
    assert (quick / "training.md").read_text() == report.block(results) + "\n"
    assert (quick / "training.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in quick.iterdir()) == [
        "training.json",
        "training.md",
        "training.png",
    ]


def test_write_replaces_the_table_and_nothing_else(quick, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\nAfter.\n")
    taken = "--results", quick / "training.json", "--output", tmp_path / "out", "--write", page
    done = run(*taken)
    assert done.returncode == 0, done.stderr
    results = json.loads((quick / "training.json").read_text())
    expected = f"Before.\n\n{report.BEGIN}\n\n{report.block(results)}\n\n{report.END}\n\nAfter.\n"
    assert page.read_text() == expected
    assert (tmp_path / "page.json").read_bytes() == (quick / "training.json").read_bytes()
    assert (tmp_path / "images/page.png").read_bytes().startswith(b"\x89PNG")
    report.write(results, page)
    assert page.read_text() == expected


def test_an_interrupted_run_goes_on_where_it_was(quick, tmp_path):
    stored = json.loads((quick / "training.json").read_text())
    complete = json.loads((quick / "training.json").read_text())
    last = stored["tasks"][0]["runs"][SCALED].pop()
    (tmp_path / "training.json").write_text(json.dumps(stored))
    done = run("--quick", "--seeds=2", "--resume", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    resumed = json.loads((tmp_path / "training.json").read_text())
    assert resumed["tasks"][0]["runs"][SCALED][1] == last  # the same seed gives the same numbers
    assert resumed["tasks"] == complete["tasks"]
    assert resumed["seconds"] >= complete["seconds"]


@pytest.mark.parametrize(
    "other",
    [
        {"text": {"sha256": "another"}},
        {"loss_scale": {"growth_interval": 1}},
        {"tasks": STORED["tasks"][1:]},
        {"tasks": [STORED["tasks"][0] | {"steps": 1}, *STORED["tasks"][1:]]},
    ],
    ids=["text", "loss scale", "tasks", "steps"],
)
def test_runs_of_other_tasks_are_not_taken_up(other):
    results = {**STORED, "seconds": 0}
    with pytest.raises(ValueError, match="of other tasks: start without --resume"):
        command.take_up(results, STORED | other)
    command.take_up(results, STORED)
    assert results == STORED


@pytest.mark.parametrize(
    "page",
    [
        "",
        report.BEGIN,
        report.END,
        f"{report.END}\n{report.BEGIN}",
        f"{report.BEGIN}\n{report.BEGIN}\n{report.END}",
    ],
)
def test_a_page_without_its_two_markers_is_refused(page):
    with pytest.raises(ValueError, match="the page must hold the lines"):
        report.replaced(page, "text")


def test_one_seed_is_refused():
    done = run("--seeds=1")
    assert done.returncode == 2
    assert "--seeds must be at least 2, got 1" in done.stderr


def test_the_page_shows_the_stored_numbers():
    page = PAGE.read_text()
    assert report.replaced(page, report.block(STORED)) == page


def test_the_stored_numbers_are_those_of_the_tasks_as_they_are(all_tasks):
    def facts(task):
        params = jax.eval_shape(task.init, jax.random.key(0))
        return {
            "name": task.name,
            "metric": task.metric,
            "decimals": task.decimals,
            "steps": task.steps,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "runs": training.ways(task),
            "evaluations": task.evaluations,
        }

    stored = [
        {name: value for name, value in task.items() if name != "runs"}
        | {"runs": list(task["runs"]), "evaluations": len(task["runs"][FLOAT32][0]["curve"])}
        for task in STORED["tasks"]
    ]
    assert stored == [facts(task) for task in all_tasks]


def test_the_stored_numbers_were_made_with_this_loss_scale():
    assert STORED["loss_scale"] == training.WAYS[SCALED][1].get_config()


def test_a_run_made_again_gives_the_stored_result(all_tasks):
    task = all_tasks[1]
    again = training.make_train(task, SCALED)(0, lambda: None)
    stored = BY_NAME[task.name]["runs"][SCALED][0]
    # Another processor or XLA rounds elsewhere, and a run is not that stable.
    assert again.curve[-1] == pytest.approx(stored["curve"][-1], abs=2)
    assert abs(math.log2(again.loss_scale) - math.log2(stored["loss_scale"])) <= 2


def test_the_stored_runs_have_skipped_steps():
    """Otherwise nothing would be said about the skip."""
    for task in STORED["tasks"]:
        for way, runs in task["runs"].items():
            assert way == SCALED or not any(one["skipped"] for one in runs)
    assert sum(one["skipped"] for task in STORED["tasks"] for one in task["runs"][SCALED]) > 0


def test_the_stored_numbers_are_of_eight_seeds_or_more():
    seeds = {len(runs) for task in STORED["tasks"] for runs in task["runs"].values()}
    assert len(seeds) == 1
    assert min(seeds) >= 8


def test_the_text_is_the_stored_one():
    sklearn = pytest.importorskip("sklearn")
    if sklearn.__version__ != STORED["environment"]["versions"]["scikit-learn"]:
        pytest.skip("another scikit-learn has other docstrings")
    assert tasks.corpus_facts() == STORED["text"]


def test_all_docstrings_of_a_module_are_read(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""Module."""\n\n\nclass A:\n    """Class."""\n\n    def f(self):\n        """Method.'
        '\n\n        More.\n        """\n\n\ndef g():\n    return "no docstring"\n'
    )
    assert tasks.docstrings(module) == ["Module.", "Class.", "Method.\n\nMore."]


def products(jaxpr):
    """Return the type of every matrix product, in the functions that are called too."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.add(equation.outvars[0].aval.dtype)
        for value in jax.tree.leaves(equation.params):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= products(inner)
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_product_forward_and_backward_is_in_the_format(all_tasks, dtype):
    key = jax.random.key(0)
    for task in all_tasks:
        params = jax.eval_shape(task.init, key)
        grad = jax.grad(lambda params, task=task: task.loss_fn(params, task.data, key, dtype))
        assert products(jax.make_jaxpr(grad)(params).jaxpr) == {jnp.dtype(dtype)}, task.name


@pytest.mark.parametrize("name", SMALL_WEIGHTS)
def test_at_the_small_weights_float16_failed_and_scaling_mended_it(name):
    task = BY_NAME[name]
    lost = report.difference(task, FLOAT16)
    assert not lost.contains(0)
    scaled = report.difference(task, SCALED)
    assert abs(scaled.mean) + scaled.margin < 0.1 * (abs(lost.mean) - lost.margin)


@pytest.mark.parametrize("what", ["photograph", "text"])
def test_float32_learns_the_same_at_every_power_of_two(what):
    """The small weight takes nothing from float32, so that what float16 loses is the format's."""
    one, small = (task for name, task in BY_NAME.items() if name.startswith(what))
    # Squares that are subnormal at the small weight are all that may differ.
    shown = 10.0 ** -one["decimals"]
    np.testing.assert_allclose(
        report.final(one, FLOAT32), report.final(small, FLOAT32), rtol=0, atol=shown / 10
    )


def test_the_interval_is_students():
    mean, margin = report.interval(np.subtract(DRUG_2, DRUG_1))
    assert (mean - margin, mean + margin) == pytest.approx((LOW, HIGH), abs=1e-7)


@pytest.mark.parametrize("n", [2, 3, 8, 30])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_the_interval_is_scipys(n, confidence):
    values = np.random.default_rng(n).normal(3, 2, n)
    expected = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    mean, margin = report.interval(values, confidence)
    assert (mean - margin, mean + margin) == pytest.approx((expected.low, expected.high))


def test_two_values_have_the_interval_of_the_table():
    # With one degree of freedom the quantile of 97.5 % is 12.706.
    mean, margin = report.interval([1.0, 3.0])
    assert mean == 2
    assert margin == pytest.approx(12.706205)


def test_equal_values_have_no_interval_but_a_mean():
    assert report.interval([2.0, 2.0, 2.0]) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("value", "within"), [(-1.5, True), (2.5, True), (0.0, True), (2.6, False), (math.nan, False)]
)
def test_an_interval_contains_its_bounds(value, within):
    assert report.Interval(0.5, 2.0).contains(value) is within


def test_the_difference_is_taken_seed_by_seed():
    def runs(*finals):
        return [{"curve": [0.0, final]} for final in finals]

    # Seeds differ by far more than the ways do.
    task = {"runs": {FLOAT32: runs(10.0, 50.0, 90.0), SCALED: runs(11.0, 51.1, 90.9)}}
    found = report.difference(task, SCALED)
    assert found == pytest.approx(report.interval([1.0, 1.1, 0.9]))
    assert not found.contains(0)


def test_json_holds_six_decimals_and_each_list_on_one_line():
    results = {"tasks": [{"curve": [1.23456789, 2.0], "loss_scale": 2.0**24}], "text": {"a": 1}}
    text = report.to_json(results)
    assert '"curve": [ 1.234568, 2.0 ]' in text
    results["tasks"][0]["curve"][0] = 1.234568
    assert json.loads(text) == results


@pytest.mark.parametrize(
    ("weight", "text"), [(1, "1"), (1e-5, "1e-5"), (1 / 16, "1/16"), (1 / 512, "1/512"), (2, "2")]
)
def test_weights_are_written_as_people_do(weight, text):
    assert tasks.shown(weight) == text
