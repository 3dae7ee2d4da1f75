"""How other systems change the loss scale, step by step, compared with this library.

- `oracles/published.json` holds results of their own tests and programs. `ours` are the loss scales
  after each step. If `theirs` differ by design, `why` completes the sentence "their system ...".
- `oracles/recorded/*.json` are runs of TensorFlow, tf.keras and MindSpore, which are too large to
  install here. `oracles/record.py` says how each was written.

Live Keras: `keras/test_keras.py`. Live torch: `oracles/test_torch.py`.
Each letter is a step: T is good; in F, n, + and - the gradients are not finite.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import DYNAMIC_DEFAULTS

import optax_lossscale as ols

pytestmark = pytest.mark.integration

ORACLES = Path(__file__).parents[1] / "oracles"
PUBLISHED = json.loads((ORACLES / "published.json").read_text("utf-8"))
FILES = "tensorflow-2.4", "tensorflow-2.21", "mindspore-2.10"
RECORDED = [json.loads((ORACLES / f"recorded/{n}.json").read_text("utf-8")) for n in FILES]
NOT_FINITE = {"F": np.nan, "n": np.nan, "+": np.inf, "-": -np.inf}
LARGEST = 2.0**126
# A run of a policy and its results, in the format of the recordings. Those have no ceiling.
RUNS = [{"kind": row["peer"], **row, "loss_scale": row["ours"]} for row in PUBLISHED]
RUNS += [
    {**run, "policy": {"max_scale": LARGEST} | run["policy"]}
    for recording in RECORDED
    for run in recording["trajectories"]
]


class Traced(ols.DynamicLossScale):
    """The policy itself, without its check that hyper-parameters are Python numbers."""

    def __post_init__(self):
        pass


def multipliers(runs):
    """Return the multipliers of the gradients of each step, [runs, steps], padded with 1."""
    longest = max(len(run["steps"]) for run in runs)
    padded = [run["steps"].ljust(longest, "T") for run in runs]
    return np.float32([[NOT_FINITE.get(step, 1.0) for step in steps] for steps in padded])


def as_arrays(runs):
    """Return the hyper-parameters of many policies, each as one array."""
    dtypes = {float: np.float32, int: np.int32}
    return {
        name: np.array([run["policy"].get(name, default) for run in runs], dtypes[type(default)])
        for name, default in DYNAMIC_DEFAULTS.items()
        if name != "consecutive_hysteresis"
    }


def test_what_differs_from_a_published_sequence_has_a_reason():
    for row in PUBLISHED:
        assert ("theirs" in row) == ("why" in row), row["what"]
        assert row["ours"] != row.get("theirs"), row["what"]


def train_one_parameter(policy, start, grads):
    """Return the results of each step, by the names in the recordings."""
    tx = ols.with_loss_scaling(optax.sgd(0.01), policy)

    def step(carry, grad):
        param, state = carry
        updates, state = tx.update(ols.scale_loss(grad, state), state, param)
        after = optax.apply_updates(param, updates)
        applied = (after != param) | ~jnp.isfinite(after)  # an infinite param does not change
        return (after, state), state.loss_scale_state._asdict() | {"applied": applied}

    param = jnp.zeros(())
    state = tx.init(param)
    first = state.loss_scale_state._replace(loss_scale=start)
    return jax.lax.scan(step, (param, state._replace(loss_scale_state=first)), grads)[1]


def assert_all_as_recorded(runs, ours):
    """Compare until their loss scale comes near our ceiling, which they do not share."""
    for row, run in enumerate(runs):
        factor = run["policy"].get("growth_factor", 2)
        scales = np.array(run["loss_scale"], np.float32)
        near = np.flatnonzero(scales > LARGEST / factor)
        upto = near[0] if near.size and "peer" not in run else len(scales)
        # They divide by the growth factor; we multiply by its reciprocal.
        rtol = 0 if factor in {2, 4, 8} else 2**-23 * len(scales)
        message = str({name: run[name] for name in ("kind", "policy", "steps")})
        found = {name: np.asarray(array)[row, :upto] for name, array in ours.items()}
        np.testing.assert_allclose(found["loss_scale"], scales[:upto], rtol, err_msg=message)
        for name in {"growth_count", "applied"} & run.keys():
            np.testing.assert_array_equal(found[name], run[name][:upto], message)


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_step_moves_a_dynamic_loss_scale_and_skips_as_the_peers_do(consecutive):
    runs = [run for run in RUNS if "scale" not in run["policy"]]
    runs = [r for r in runs if r["policy"].get("consecutive_hysteresis", False) is consecutive]

    def train(hyper, grads):
        policy = Traced(**hyper, consecutive_hysteresis=consecutive)
        return train_one_parameter(policy, hyper["initial_scale"], grads)

    assert_all_as_recorded(runs, jax.jit(jax.vmap(train))(as_arrays(runs), multipliers(runs)))


@pytest.mark.parametrize("skips", [False, True])
def test_a_step_leaves_a_fixed_loss_scale_and_skips_as_the_peers_do(skips):
    runs = [run for run in RUNS if run["policy"].get("skip_nonfinite") is skips]
    policy = ols.FixedLossScale(1, skip_nonfinite=skips)
    train = jax.jit(jax.vmap(functools.partial(train_one_parameter, policy)))
    ours = train(np.float32([run["policy"]["scale"] for run in runs]), multipliers(runs))
    assert_all_as_recorded(runs, ours)
    for row, run in enumerate(runs):
        skipped = sum(step != "T" for step in run["steps"]) if skips else 0
        assert ours["total_skipped"][row, -1] == skipped
