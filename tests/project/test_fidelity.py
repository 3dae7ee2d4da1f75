"""`make fidelity`: the pages show the stored measurements, and these can be reproduced."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from benchmarks import page, reinforcement, spikes
from benchmarks.fidelity import __main__ as command
from benchmarks.fidelity import gain, report, rounding, sensitive, state, tasks, training
from examples import reinforce

DOCS = Path(__file__).parents[2] / "docs"
STORED = json.loads((page.RESULTS / "fidelity.json").read_text())
FLOAT32, FLOAT16, SCALED = training.FLOAT32, training.FLOAT16, training.SCALED


@pytest.fixture(scope="module")
def all_tasks():
    return tasks.all_tasks()


def assert_trained(task):
    assert list(task["runs"]) == list(training.WAYS)
    for way, runs in task["runs"].items():
        first, second = runs
        # The summed loss of the patients overflows in float16.
        overflows = task["name"] == "diabetes" and way == FLOAT16
        assert overflows or first["curve"] != second["curve"]  # different seeds
        for one in runs:
            assert len(one["curve"]) == 2
            assert np.isfinite(one["curve"]).all() != overflows
            # The run is too short for growth, so only skipped steps change the loss scale.
            assert one["loss_scale"] == (2**15 if way == SCALED else 1) * 0.5 ** one["skipped"]


def test_a_short_run_trains_with_and_without_loss_scaling(monkeypatch):
    ways = {way: training.WAYS[way] for way in (FLOAT16, SCALED)}
    monkeypatch.setattr(training, "WAYS", ways)
    (task,) = training.measure(tasks.all_tasks(["diabetes"], quick=True), seeds=2)["tasks"]
    assert_trained(task)
    assert [one["skipped"] for one in task["runs"][SCALED]] == [4, 4]  # every step


@pytest.mark.exhaustive
def test_a_short_run_trains_every_task_and_writes_the_page(python, tmp_path):
    folders = f"--pages={tmp_path}", f"--results={tmp_path / 'results'}"
    options = "--quick", "--only", "fidelity", *folders
    python("-W", "error", "-m", "benchmarks.fidelity", *options, cwd=DOCS.parent)
    trained = json.loads((tmp_path / "results/fidelity.json").read_text())["tasks"]
    assert [task["name"] for task in trained] == list(tasks.TASKS)
    for task in trained:
        assert_trained(task)
        assert f"| **{task['name']}**" in (tmp_path / "evidence.md").read_text()
    assert (tmp_path / "images/training.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_the_stored_numbers_and_those_are_of_the_tasks_as_they_are(all_tasks):
    text = (DOCS / "evidence.md").read_text()
    assert page.replaced(text, "fidelity", report.block(STORED)) == text
    assert STORED["loss_scale"] == training.WAYS[SCALED][1].get_config()
    for stored, task in zip(STORED["tasks"], all_tasks, strict=True):
        assert stored == {**training.facts(task), "runs": stored["runs"]}
        assert list(stored["runs"]) == list(training.WAYS)
        assert {len(runs) for runs in stored["runs"].values()} == {4}  # seeds


@pytest.mark.exhaustive
def test_a_run_made_again_gives_the_stored_result(all_tasks):
    place = list(tasks.TASKS).index("characters")
    task = all_tasks[place]
    again = training.make_train(task, SCALED)(0)
    stored = STORED["tasks"][place]["runs"][SCALED][0]
    # Another processor or XLA rounds differently, and training amplifies the differences.
    assert again["curve"][-1] == pytest.approx(stored["curve"][-1], abs=2)
    assert abs(math.log2(again["loss_scale"]) - math.log2(stored["loss_scale"])) <= 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_product_forward_and_backward_is_in_the_format(all_tasks, dtype):
    key = jax.random.key(0)
    for task in all_tasks:
        params = jax.eval_shape(task.init, key)
        grad = jax.grad(lambda params, task=task: task.loss_fn(params, task.data, key, dtype))
        assert list(ols.diagnostics.precision_report(grad, params)) == [dtype.__name__], task.name


@pytest.mark.parametrize("task", STORED["tasks"], ids=lambda task: task["name"])
def test_float16_failed_or_not_as_the_page_says_and_scaling_is_close_to_float32(task):
    lost, scaled = report.difference(task, FLOAT16), report.difference(task, SCALED)
    near = 0.005 * np.mean(report.final(task, FLOAT32))
    assert abs(scaled.mean) < near
    if task["name"] in {"words", "photograph"}:
        assert abs(lost.mean) > lost.margin
        assert abs(scaled.mean) + scaled.margin < 0.1 * abs(lost.mean)
    elif task["name"] == "diabetes":
        assert np.isnan(report.final(task, FLOAT16)).all()
    else:
        assert abs(lost.mean) < near


def test_versions_are_stored_for_each_part_and_listed_once(tmp_path):
    text = (DOCS / "evidence.md").read_text()
    stored = json.loads((page.RESULTS / "versions.json").read_text())
    assert set(stored) <= set(command.PARTS)
    assert page.replaced(text, "versions", command.versions(stored)) == text
    assert "jax 0." not in (DOCS / "master_weights.md").read_text()

    command.record("edge", tmp_path, tmp_path)
    again = json.loads((tmp_path / "versions.json").read_text())
    assert again == {**stored, "edge": again["edge"]}
    assert f"jax {jax.__version__}" in again["edge"]
    several = command.versions({"edge": "2026-01-02, jax 2", "state": "2026-01-01, jax 1"})
    assert "(edge), jax 2.\n2026-01-01" in several


def test_the_interval_is_students():
    # With one degree of freedom, the 97.5 % quantile is 12.706.
    assert page.interval([1.0, 3.0]) == pytest.approx((2, 12.706205))
    assert page.interval([2.0, 2.0, 2.0]) == (2.0, 0.0)


def test_the_bytes_per_parameter_on_the_page_are_those_of_today():
    text = (DOCS / "bfloat16_state.md").read_text()
    assert page.replaced(text, "memory", state.memory(quick=False).text) == text


@pytest.mark.exhaustive
@pytest.mark.parametrize(("part", "number"), [("parameters", 3), ("edge", 2), ("state", 3)])
def test_a_short_run_measures_each_way(part, number):
    _, measure = command.PARTS[part]
    found = [
        len(re.findall(r"±|[+-]0\.\d+(?= \|)", row))
        for row in measure(quick=True).text.splitlines()
    ]
    assert set(found) - {0} == {number}  # the head of a table has none


@pytest.mark.exhaustive
def test_a_short_run_measures_each_optimizer():
    text = state.measure_each(quick=True).text
    assert all(text.count(name) == 1 for name in list(state.OPTIMIZERS)[:2])


def test_an_optimizer_is_listed_by_the_end_of_its_interval_that_is_farther_from_zero():
    found = {"A": page.Interval(0.5, 0.6), "B": page.Interval(-0.3, 0.4)}
    found |= {"C": page.Interval(-2.0, 1.0), "D": page.Interval(1.0, 9.0)}
    _, _, *rows = state.grouped(found).splitlines()
    assert rows == ["| below 1 % | B |", "| below 5 % | A, **C** (-2.0) |", "| 5 % or more | D |"]


def test_a_short_run_measures_how_far_weights_wander():
    found = rounding.wander(quick=True)
    _, _, *rows = found.text.partition("\n\n")[0].splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(rounding.OPTIMIZERS)
    assert list(found.pictures) == ["rounding"]


def test_a_short_run_measures_what_going_on_costs():
    rows = rounding.going_on(quick=True).text.partition("\n\n")[0].splitlines()
    assert [row.partition(":")[0] for row in rows] == [f"- rate 1e-0{n}" for n in (3, 4, 5)]
    assert {row.count("±") for row in rows} == {2}


def test_the_page_estimates_the_cost_of_rounding_as_the_measurement_does():
    text = (DOCS / "master_weights.md").read_text("utf-8")
    params, momentum = [jnp.full(8, 1.5, jnp.bfloat16)], [jnp.full(8, -2.0)]
    names = {"jax": jax, "jnp": jnp}
    exec(re.search(r"^def cost_of_rounding.*?(?=\n\n\n)", text, re.MULTILINE | re.DOTALL)[0], names)  # noqa: S102
    by_page, ours = names["cost_of_rounding"](params, momentum), rounding.estimate(params, momentum)
    assert by_page == ours == 8 * 2.0**-7 * 2 / 4


# --- docs/why.md: what half precision gains


def test_the_page_shows_the_stored_gain_the_same_loss_in_fewer_bytes():
    text = (DOCS / "why.md").read_text()
    stored = json.loads((page.RESULTS / "gain.json").read_text())
    assert page.replaced(text, "gain", gain.block(stored)) == text
    losses = np.array([stored["losses"][way] for way in gain.WAYS])
    assert losses.shape == (2, gain.POINTS)
    np.testing.assert_allclose(*losses, rtol=0.01)
    before, after = (stored["megabytes"][way] for way in gain.WAYS)
    assert all(after[name] < 0.7 * before[name] for name in before)


@pytest.mark.slow
def test_the_bytes_of_the_gain_are_those_of_today():
    stored = json.loads((page.RESULTS / "gain.json").read_text())["megabytes"]
    assert gain.megabytes(gain.FLOAT32) == pytest.approx(stored[gain.FLOAT32], rel=0.2)
    assert gain.megabytes(gain.BFLOAT16) == pytest.approx(stored[gain.BFLOAT16], rel=0.05)


@pytest.mark.exhaustive
def test_a_short_run_measures_the_gain():
    found = gain.measure(quick=True)
    assert list(found.pictures) == ["gain"]
    assert np.isfinite([*found.numbers["losses"].values()]).all()


# --- docs/evidence.md: which lines need float32


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "codebook" else pytest.mark.exhaustive)
        for name in sensitive.PROGRAMS
    ],
)
def test_precision_search_names_the_lines_that_are_kept_and_no_others(name):
    program = sensitive.PROGRAMS[name]()
    found = sensitive.search(program)
    assert found.array_error > 0.3
    assert found.error_kept < 0.03
    assert {line for line in found.lines if "# needs float32" in line} == set(found.keep)

    def gradient(way):
        loss = sensitive.cast(program, way, found)
        options = {"xla_allow_excess_precision": False}
        params = program.init(jax.random.key(0))
        return jax.jit(jax.grad(loss), compiler_options=options)(params, program.x)

    exact, kept = gradient(FLOAT32), gradient(sensitive.KEPT)
    off = optax.tree.norm(optax.tree.sub(kept, exact)) / optax.tree.norm(exact)
    assert off < 0.03


def test_the_page_shows_the_stored_search_and_keeping_the_lines_learns_as_float32_does():
    stored = json.loads((page.RESULTS / "sensitive.json").read_text())
    text = (DOCS / "evidence.md").read_text()
    assert page.replaced(text, "sensitive", sensitive.block(stored)) == text
    assert list(stored["programs"]) == list(sensitive.PROGRAMS)
    for found in stored["programs"].values():
        assert all("# needs float32" in line for line in found["kept"])
        exact, half, kept = (np.mean(found["losses"][way]) for way in sensitive.WAYS)
        assert half > 3 * exact
        assert abs(kept - exact) < 0.01 * (half - exact)


@pytest.mark.exhaustive
def test_a_short_search_and_training_of_the_sensitive_programs_has_every_row():
    numbers = sensitive.measure(quick=True).numbers["programs"]
    for found in numbers.values():
        assert np.isfinite([*found["losses"].values()]).all()


# --- docs/recipes.md: two policies that should agree

HALVES = {n: jax.ShapeDtypeStruct(shape, jnp.float16) for n, shape in reinforce.SHAPES.items()}


def both(params):
    """Return the log-probabilities of sampled tokens, as sampled and as trained."""
    prompts = jax.random.randint(jax.random.key(0), (64, reinforce.DIGITS), 0, 10)
    answers, sampled = reinforce.sample(params, prompts, jax.random.key(1))
    return sampled, reinforce.trained(params, prompts, answers)


def test_decoding_with_the_cache_gives_the_log_probabilities_of_the_whole_sequence():
    draw = np.random.default_rng(0)
    params = {name: jnp.float32(draw.normal(0, 0.2, shape.shape)) for name, shape in HALVES.items()}
    sampled, trained = jax.jit(both)(params)
    np.testing.assert_allclose(sampled, trained, rtol=0, atol=1e-5)
    assert np.ptp(sampled) > 1  # the tokens differ in probability


def test_every_product_of_both_policies_is_in_the_format():
    (products,) = ols.diagnostics.precision_report(both, HALVES).items()
    assert products[0] == "float16"
    assert products[1].count >= 15


@pytest.mark.exhaustive
def test_a_short_run_has_every_format():
    numbers = reinforcement.measure(quick=True).numbers
    (ways,) = numbers["runs"].values()
    gap = {way: np.mean([run["gap"] for run in runs]) for way, runs in ways.items()}
    assert gap[FLOAT32] < gap[SCALED] < gap["bfloat16"]


def test_the_page_shows_the_stored_numbers_which_show_its_conclusions():
    stored = json.loads((page.RESULTS / "reinforce.json").read_text())
    assert (DOCS / "recipes.md").read_text().count(reinforcement.summary(stored)) == 1
    for ways in stored["runs"].values():
        right, gap = (
            {way: np.array([run[name] for run in runs]) for way, runs in ways.items()}
            for name in ("right", "gap")
        )
        for way in ways.keys() - {FLOAT32}:
            mean, margin = page.interval(right[way] - right[FLOAT32])
            assert abs(mean) <= margin  # nothing is learnt better or worse
        assert gap["bfloat16"].mean() / gap[SCALED].mean() == pytest.approx(8, rel=0.15)


# --- docs/skipping.md: what four rules skip of real losses

QUIET = np.tile(np.float32([1, 1.1, 0.9]), 200)  # deviation 0.082


def skipped(name, losses):
    return list(np.flatnonzero(spikes.RULES[name](losses)))


def test_only_spike_skips_a_small_spike_after_a_large_one():
    spiked = QUIET.copy()
    spiked[[300, 310]] = 100, 3
    assert [310 in skipped(name, spiked) for name in spikes.RULES] == [True, True, False, False]


def test_a_new_level_is_learnt_by_every_rule_and_by_the_peers_sooner():
    risen = QUIET + np.where(np.arange(len(QUIET)) < 300, 0, 20 * 0.082).astype(np.float32)
    lost = {name: len(skipped(name, risen)) for name in spikes.RULES}
    assert 10 < lost["`Spike()`"] <= 20
    assert 0 < lost["MaxText"] <= lost["Levanter"] < lost["`Spike()`"]
    assert all(np.isin(skipped(name, risen), np.arange(300, 330)).all() for name in spikes.RULES)


@pytest.mark.parametrize("name", spikes.RULES)
def test_each_rule_of_the_page_skips_a_spike_alone_once_the_window_is_half_full(name):
    assert " | ".join(["losses", "steps", *spikes.RULES]) in (DOCS / "skipping.md").read_text()
    first = 63 if name == "MaxText" else 64
    for step in (first - 1, first, 300):
        spiked = np.where(np.arange(len(QUIET)) == step, 5, QUIET)
        assert skipped(name, spiked) == [step] * (step >= first)
