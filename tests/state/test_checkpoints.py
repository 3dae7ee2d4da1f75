"""Saved training resumes in a new process, this file as a script, as if it had never stopped."""

import json
import os
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_formats import FORMATS
from plain_where import assert_same_bits
from process_worker import BAD_ROW, POLICY, STEPS, batch, init_params, make_step

import optax_lossscale as ols

pytestmark = pytest.mark.integration

# After a finite step with a history of overflows, and after an overflow.
SAVED_AFTER = {3: [1, 1, 0, 1], 2: [0, 1, 1, 1]}


def make_trainer(policy):
    """Return a fresh state, a function that trains, and a list that grows with each trace."""
    schedule = optax.cosine_decay_schedule(0.05, 100)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = ols.with_loss_scaling(optax.MultiSteps(chain, 2), policy)
    traces = []

    @jax.jit
    def step(params, opt_state, x, y):
        traces.append(None)
        return make_step(tx)(params, opt_state, x, y)

    def train(state, first, last=STEPS):
        for i in range(first, last):
            state = step(*state, *batch(i, BAD_ROW))
        return state

    return (init_params(), tx.init(init_params())), train, traces


def resume_all(folder):
    """Restore every checkpoint in `folder`, train to the end, and write the results."""
    policy = ols.as_loss_scale(json.loads((folder / "policy.json").read_text("utf-8")))
    fresh, train, traces = make_trainer(policy)
    results = {}
    for name, (_, restore) in FORMATS.items():
        for saved_after in SAVED_AFTER:
            restored = restore(folder / f"{name}_{saved_after}", fresh)
            results[name, saved_after] = restored, train(restored, saved_after)
    results["traces"] = len(traces)
    (folder / "results.pickle").write_bytes(pickle.dumps(results))


@pytest.mark.slow
def test_training_goes_on_bit_for_bit_in_a_new_process(tmp_path):
    fresh, train, _ = make_trainer(POLICY)
    states = {saved_after: train(fresh, 0, saved_after) for saved_after in SAVED_AFTER}
    for name, (save, _) in FORMATS.items():
        for saved_after, state in states.items():
            save(tmp_path / f"{name}_{saved_after}", state)
    (tmp_path / "policy.json").write_text(json.dumps(POLICY.get_config()), "utf-8")
    subprocess.run(  # noqa: S603, the interpreter and this file
        [sys.executable, __file__, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    resumed = pickle.loads((tmp_path / "results.pickle").read_bytes())  # noqa: S301

    assert resumed["traces"] == 1  # a restored state does not compile the step again
    for saved_after, state in states.items():
        counts = ols.loss_scale_state(state)[1:]
        assert [int(count) for count in counts] == SAVED_AFTER[saved_after]
        expected = train(state, saved_after)
        for name in FORMATS:
            restored, final = resumed[name, saved_after]
            assert_same_bits(restored, state)
            assert_same_bits(final, expected)


@pytest.mark.parametrize("name", ["flax", "orbax"])
def test_a_plain_optimizers_file_is_the_inner_state_and_not_taken_for_the_wrappers(name, tmp_path):
    save, restore = FORMATS[name]
    state = ols.with_loss_scaling(optax.trace(0.9)).init({"w": jnp.ones(4)})
    save(tmp_path / "plain", jax.tree.map(jnp.ones_like, state.inner_state))
    restored = restore(tmp_path / "plain", state.inner_state)
    assert_same_bits(restored, jax.tree.map(np.ones_like, state.inner_state))
    with pytest.raises(ValueError, match=r"do not match"):
        restore(tmp_path / "plain", state)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    resume_all(pathlib.Path(sys.argv[1]))


@pytest.mark.slow
def test_a_state_of_with_skipping_starts_the_loss_scale_anew_under_with_loss_scaling():
    policy, params = ols.DynamicLossScale(2.0**10), jnp.ones(2)
    skipping = ols.with_skipping(optax.adam(0.1))
    opt_state = skipping.update(params, skipping.init(params), params)[1]
    tx = ols.with_loss_scaling(optax.adam(0.1), policy)
    assert ols.loss_scale_state(tx.update(params, opt_state, params)[1]).loss_scale == 1
    opt_state = opt_state._replace(loss_scale_state=ols.init(policy))
    updates, new = tx.update(params * 2.0**10, opt_state, params)
    expected, _ = skipping.update(params, opt_state._replace(loss_scale_state=ols.init(1)), params)
    np.testing.assert_array_equal(updates, expected)
    assert ols.loss_scale_state(new).loss_scale == 2.0**10
