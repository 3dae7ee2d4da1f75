"""The benchmark of reinforcement learning: its two policies agree, and it learns."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.page import publish

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quickly_compiled")]

ROOT = Path(__file__).parents[2]
PATH = ROOT / "benchmarks/reinforcement.py"
PAGE = ROOT / "docs/reinforcement_learning.md"
STORED = json.loads(PAGE.with_suffix(".json").read_text())
FLOAT32, SCALED = "float32", "float16 + loss scaling"


def load():
    spec = importlib.util.spec_from_file_location("reinforcement", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark():
    return load()


@pytest.fixture(scope="module")
def small():
    """The benchmark at a size that learns within seconds."""
    module = load()
    module.DIGITS, module.LENGTH, module.LAYERS, module.WIDTH = 3, 6, 1, 16
    *_, (name, program) = module.PROGRAMS.items()
    module.PROGRAMS = {name: program}
    return module


@pytest.fixture(scope="module")
def short(small):
    """A short run in float32."""
    return small.compare(2, 60, 150, (5e-3,), [FLOAT32])


def test_decoding_with_the_cache_gives_the_log_probabilities_of_the_whole_sequence(small):
    params = small.init_params(jax.random.key(0))
    prompts = small.draw_prompts(jax.random.key(1), 64)

    @jax.jit
    def both(params):
        answers, sampled = small.sample(params, prompts, jax.random.key(2))
        return answers, sampled, small.trained_log_probs(params, prompts, answers)

    answers, sampled, trained = both(params)
    assert answers.shape == (64, 3)
    np.testing.assert_allclose(sampled, trained, rtol=0, atol=1e-5)
    assert np.ptp(sampled) > 1  # the tokens differ in probability


@pytest.mark.exhaustive
def test_finer_formats_sample_closer_to_what_is_trained(short):
    (gap,) = short.numbers["sources"].values()
    assert gap["float32"] < 1e-5
    assert gap["float16"] > 20 * gap["float32"]
    assert 4 < gap["bfloat16"] / gap["float16"] < 16  # three bits


def assert_learned(small, runs):
    start = 100 * np.array([run["reward"][0] for run in runs])
    assert np.all(small.end_reward(runs) > start + 10)


@pytest.mark.exhaustive
def test_the_reward_improves_in_float32(short, small):
    (ways,) = short.numbers["runs"].values()
    assert_learned(small, ways[FLOAT32])


@pytest.mark.exhaustive
def test_the_reward_improves_in_every_format(small):
    (ways,) = small.compare(2, 60, 150, (5e-3,)).numbers["runs"].values()
    for runs in ways.values():
        assert_learned(small, runs)
    gap = {way: np.mean([run["gap"] for run in runs]) for way, runs in ways.items()}
    assert gap[FLOAT32] < gap["float16"] < gap["bfloat16"]
    assert 4 < gap["bfloat16"] / gap[SCALED] < 16


@pytest.mark.exhaustive
def test_publishing_replaces_the_tables_and_nothing_else(short, small, tmp_path):
    page = tmp_path / "page.md"
    whole = PAGE.read_text()
    page.write_text(whole)
    publish(short, "reinforce", page)
    assert page.read_text() == whole.replace(small.tables(STORED), short.text)
    assert page.read_text() != whole
    assert json.loads(page.with_suffix(".json").read_text())["runs"].keys() == {"0.005"}
    assert (tmp_path / "images/reinforce.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_the_stored_numbers(benchmark):
    assert PAGE.read_text().count(benchmark.tables(STORED)) == 1
    for ways in STORED["runs"].values():
        assert list(ways) == list(benchmark.WAYS)
        for way, runs in ways.items():
            assert len(runs) == 5  # seeds
            assert {len(run[name]) for run in runs for name in ("reward", "gap")} == {40}
            assert way == SCALED or not any(run["skipped"] for run in runs)


def test_the_stored_numbers_show_what_the_page_concludes(benchmark):
    for ways in STORED["runs"].values():
        base = benchmark.end_reward(ways[FLOAT32])
        for way in ways.keys() - {FLOAT32}:
            mean, margin = benchmark.interval(benchmark.end_reward(ways[way]) - base)
            assert abs(mean) <= margin  # nothing is learnt better or worse
        coarse, fine = (
            {name: np.mean([run[name] for run in ways[way]]) for name in ("gap", "kl")}
            for way in ("bfloat16", SCALED)
        )
        assert coarse["gap"] / fine["gap"] == pytest.approx(8, rel=0.1)
        assert coarse["kl"] / fine["kl"] == pytest.approx(64, rel=0.1)


def test_every_product_of_both_policies_is_in_the_format(benchmark):
    params = jax.eval_shape(benchmark.init_params, jax.random.key(0))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float16), params)
    prompts = jnp.zeros((2, benchmark.DIGITS), int)

    def both(params):
        answers, sampled = benchmark.sample(params, prompts, jax.random.key(2))
        return sampled, benchmark.trained_log_probs(params, prompts, answers)

    text = str(jax.make_jaxpr(both)(params))
    products = [line for line in text.splitlines() if "= dot_general" in line]
    assert len(products) >= 15
    assert all(":f16[" in line.partition("=")[0] for line in products)
