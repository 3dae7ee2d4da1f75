"""The benchmark of reinforcement learning: two policies that agree, and the numbers of a page."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from benchmarks import reinforcement
from benchmarks.page import interval
from examples import reinforce

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quickly_compiled")]

PAGE = Path(__file__).parents[2] / "docs/reinforcement_learning.md"
STORED = json.loads(PAGE.with_suffix(".json").read_text())
FLOAT32, SCALED = "float32", "float16 + loss scaling"
PARAMS = {
    name: jax.ShapeDtypeStruct(shape, jnp.float16) for name, shape in reinforce.SHAPES.items()
}


def both(params):
    """Return the log-probabilities of sampled tokens, as sampled and as trained."""
    prompts = jax.random.randint(jax.random.key(0), (64, reinforce.DIGITS), 0, 10)
    answers, sampled = reinforce.sample(params, prompts, jax.random.key(1))
    return sampled, reinforce.trained(params, prompts, answers)


def test_decoding_with_the_cache_gives_the_log_probabilities_of_the_whole_sequence():
    draw = np.random.default_rng(0)
    params = {name: jnp.float32(draw.normal(0, 0.2, shape.shape)) for name, shape in PARAMS.items()}
    sampled, trained = jax.jit(both)(params)
    np.testing.assert_allclose(sampled, trained, rtol=0, atol=1e-5)
    assert np.ptp(sampled) > 1  # the tokens differ in probability


def test_every_product_of_both_policies_is_in_the_format():
    (products,) = ols.diagnostics.precision_report(both, PARAMS).items()
    assert products[0] == "float16"
    assert products[1].count >= 15


@pytest.mark.exhaustive
def test_a_short_run_has_every_format():
    numbers = reinforcement.measure(quick=True).numbers
    (ways,) = numbers["runs"].values()
    gap = {way: np.mean([run["gap"] for run in runs]) for way, runs in ways.items()}
    assert gap[FLOAT32] < gap[SCALED] < gap["bfloat16"]


def test_the_page_shows_the_stored_numbers_which_show_its_conclusions():
    assert PAGE.read_text().count(reinforcement.tables(STORED)) == 1
    for ways in STORED["runs"].values():
        right, gap = (
            {way: np.array([run[name] for run in runs]) for way, runs in ways.items()}
            for name in ("right", "gap")
        )
        for way in ways.keys() - {FLOAT32}:
            mean, margin = interval(right[way] - right[FLOAT32])
            assert abs(mean) <= margin  # nothing is learnt better or worse
        assert gap["bfloat16"].mean() / gap[SCALED].mean() == pytest.approx(8, rel=0.15)
