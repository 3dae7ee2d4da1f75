"""docs/skipping.md shows what four rules skip of real losses, and the ports do as their sources."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import spikes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quickly_compiled")]

PAGE = Path(__file__).parents[2] / "docs/skipping.md"
QUIET = np.tile(np.float32([1, 1.1, 0.9]), 200)  # deviation 0.082


def skipped(name, losses):
    return list(np.flatnonzero(spikes.RULES[name](losses)))


@pytest.mark.parametrize("name", spikes.RULES)
def test_every_rule_skips_the_spike_and_nothing_else(name):
    spiked = QUIET.copy()
    spiked[300] = 5
    assert skipped(name, spiked) == [300]


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


@pytest.mark.parametrize(("name", "first"), [("MaxText", 63), ("Levanter", 64), ("`Spike()`", 64)])
def test_nothing_is_skipped_before_the_window_is_half_full(name, first):
    for step in (first - 1, first):
        spiked = QUIET.copy()
        spiked[step] = 5
        assert skipped(name, spiked) == [step] * (step == first)


def test_the_deviation_of_maxtext_has_one_degree_of_freedom_less_and_no_least_value():
    losses = np.tile(np.float32([0, 2]), 32)  # 64 values: deviation 1, or 1.0079
    ended = np.append(losses, np.float32(1 + 6 * 1.004))
    assert (skipped("MaxText", ended), skipped("Levanter", ended)) == ([], [64])
    equal = np.ones(200, np.float32)
    equal[100] += 4e-6
    assert (skipped("MaxText", equal), skipped("Levanter", equal)) == ([100], [])


def test_the_page_shows_each_rule():
    assert " | ".join(["losses", "steps", *spikes.RULES]) in PAGE.read_text()
