"""How other systems change the loss scale, step by step, compared with this library.

- `oracles/published.json` holds results of their own tests and programs. `ours` are the loss scales
  after each step. If `theirs` differ by design, `why` completes the sentence "their system ...".
- `oracles/recorded/*.json` are runs of TensorFlow, tf.keras and MindSpore, which are too large to
  install here. `oracles/recording.py` lists the script, versions and command for each file.
- Flax and JMP run live, on the same random runs. (Keras does in `test_keras.py`.)

Each letter is a step: T is good; in F, n, + and - the gradients are not finite.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from reference import DYNAMIC_DEFAULTS

import optax_lossscale as ols

pytestmark = pytest.mark.integration

ORACLES = Path(__file__).parent / "oracles"


def load(name):
    return json.loads((ORACLES / f"{name}.json").read_text(encoding="utf-8"))


PUBLISHED = load("published")
RECORDED = [load(f"recorded/{n}") for n in ("tensorflow-2.4", "tensorflow-2.21", "mindspore-2.10")]
# A run of a policy and its results, in the format of the recordings.
RUNS = [run for recording in RECORDED for run in recording["trajectories"]]
RUNS += [{"kind": row["peer"], **row, "loss_scale": row["ours"]} for row in PUBLISHED]
NOT_FINITE = {"F": np.nan, "n": np.nan, "+": np.inf, "-": -np.inf}
LARGEST = 2.0**126


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
    # The recorded systems have no ceiling.
    ceilings = [{} if "peer" in run else {"max_scale": LARGEST} for run in runs]
    given = [ceiling | run["policy"] for ceiling, run in zip(ceilings, runs, strict=True)]
    dtypes = {float: np.float32, int: np.int32}
    return {
        name: np.array([policy.get(name, default) for policy in given], dtypes[type(default)])
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


def assert_as_recorded(run, ours):
    """Compare until their loss scale comes near our ceiling, which they do not share."""
    factor = run["policy"].get("growth_factor", 2)
    scales = np.array(run["loss_scale"], np.float32)
    near = np.flatnonzero(scales > LARGEST / factor)
    upto = near[0] if near.size and "peer" not in run else len(scales)
    # They divide by the growth factor; we multiply by its reciprocal.
    rtol = 0 if factor in {2, 4, 8} else 2**-23 * len(scales)
    message = str({name: run[name] for name in ("kind", "policy", "steps")})
    np.testing.assert_allclose(ours["loss_scale"][:upto], scales[:upto], rtol, err_msg=message)
    for name in {"growth_count", "applied"} & run.keys():
        np.testing.assert_array_equal(ours[name][:upto], run[name][:upto], message)


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_step_moves_a_dynamic_loss_scale_and_skips_as_the_peers_do(consecutive):
    runs = [run for run in RUNS if "scale" not in run["policy"]]
    runs = [r for r in runs if r["policy"].get("consecutive_hysteresis", False) is consecutive]

    def train(hyper, grads):
        policy = Traced(**hyper, consecutive_hysteresis=consecutive)
        return train_one_parameter(policy, hyper["initial_scale"], grads)

    ours = jax.device_get(jax.jit(jax.vmap(train))(as_arrays(runs), multipliers(runs)))
    for row, run in enumerate(runs):
        assert_as_recorded(run, {name: array[row] for name, array in ours.items()})


@pytest.mark.parametrize("skips", [False, True])
def test_a_step_leaves_a_fixed_loss_scale_and_skips_as_the_peers_do(skips):
    runs = [run for run in RUNS if run["policy"].get("skip_nonfinite") is skips]
    policy = ols.FixedLossScale(1, skip_nonfinite=skips)
    train = jax.jit(jax.vmap(functools.partial(train_one_parameter, policy)))
    starts = np.float32([run["policy"]["scale"] for run in runs])
    ours = jax.device_get(train(starts, multipliers(runs)))
    for row, run in enumerate(runs):
        assert_as_recorded(run, {name: array[row] for name, array in ours.items()})
        skipped = sum(step != "T" for step in run["steps"]) if skips else 0
        assert ours["total_skipped"][row, -1] == skipped


# Live peers, each with its own scaling and its own check. Training is exact in float32, so the
# comparison is exact.

CASES, STEPS = 1000, 48
START = np.float32([1.0, 0.25, 0.5, -2.0, 0.0, 4.0])
REST = np.float32([0.25, 0.0, -0.5, 0.125, 2.0, 1.0])  # the other gradients
INNER = optax.sgd(0.5, momentum=0.5)


class Steps(NamedTuple):
    """The steps of a run: entry `at` of the true gradient is `grad`."""

    grad: np.ndarray
    at: np.ndarray


def draw_steps(rng, intervals):
    """Draw steps: a third of the runs are balanced; in the others, none to all steps are bad."""
    shape = len(intervals), STEPS
    balanced = 1 - 0.5 ** (1 / intervals)
    others = rng.choice([0.0, 0.03, 0.2, 0.6, 1.0], shape[0])
    probability = np.where(rng.random(shape[0]) < 1 / 3, balanced, others)[:, None]
    bad = rng.choice(np.float32([np.nan, np.inf, -np.inf]), shape)
    good = rng.choice(np.float32([1, -1]), shape) * np.exp2(rng.integers(-12, 4, shape, "i4"))
    grad = np.where(rng.random(shape) < probability, bad, np.float32(good))
    return Steps(grad, rng.integers(0, START.size, shape, np.int32))


def loss_of(hyper, given):
    """Return a loss with the step's gradient, computed in float16 if `half`."""
    gradient = jnp.where(jnp.arange(START.size) == given.at, given.grad, REST)

    def loss(params):
        rounded = params.astype(jnp.float16).astype(jnp.float32)
        return jnp.sum(jnp.where(hyper["half"], rounded, params) * gradient)

    return loss


def train_ours(hyper, steps):
    """Train with our full step; return the results of each step by name."""
    policy = {name: hyper[name] for name in DYNAMIC_DEFAULTS if name in hyper}
    tx = ols.with_loss_scaling(INNER, Traced(**policy))

    def step(carry, given):
        params, state = carry
        _, grads = ols.value_and_grad(loss_of(hyper, given))(state, params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        left = {"params": params, "inner": optax.tree.get(state, "trace")}
        return (params, state), state.loss_scale_state._asdict() | left

    params = jnp.asarray(START)
    return jax.lax.scan(step, (params, tx.init(params)), steps)[1]


def train_by_hand(peer, hyper, steps):
    """Train as users of Flax and JMP do, with their own selection on a bad step."""

    def step(carry, given):
        scale, count, params, state = carry
        loss = loss_of(hyper, given)
        scale, count, finite, grads = peer(hyper, scale, count, loss, params)
        updates, new_state = INNER.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        params, state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state))
        left = {"loss_scale": scale, "growth_count": count, "total_skipped": ~finite}
        left |= {"params": params, "inner": optax.tree.get(state, "trace")}
        return (scale, count, params, state), left

    params = jnp.asarray(START)
    start = hyper["initial_scale"], jnp.int32(0), params, INNER.init(params)
    left = jax.lax.scan(step, start, steps)[1]
    return left | {"total_skipped": jnp.cumsum(left["total_skipped"], dtype=jnp.int32)}


def flax_step(hyper, scale, count, loss, params):
    """Take Flax's step, with an interval one shorter because Flax grows one step late."""
    ds = DynamicScale(
        growth_factor=hyper["growth_factor"],
        backoff_factor=hyper["backoff_factor"],
        growth_interval=hyper["growth_interval"] - 1,
        fin_steps=count,
        scale=scale,
        minimum_scale=hyper["min_scale"],
    )
    ds, finite, _, grads = ds.value_and_grad(loss)(params)
    return ds.scale, ds.fin_steps, finite, grads


def jmp_step(hyper, scale, count, loss, params):
    """Take JMP's step. A new object at each step keeps the floor, which `jit` would lose."""
    interval, factor, floor = (hyper[n] for n in ("growth_interval", "growth_factor", "min_scale"))
    ls = jmp.DynamicLossScale(scale, count, interval, factor, floor)
    grads = ls.unscale(jax.grad(lambda params: ls.scale(loss(params)))(params))
    finite = jmp.all_finite(grads)
    ls = ls.adjust(finite)
    return ls.loss_scale, ls.counter, finite, grads


def powers(rng, low, high):
    return np.exp2(rng.integers(low, high + 1, CASES)).astype(np.float32)


def draw_runs(rng, factors, floor):
    """Draw the hyper-parameters that the peers have, too."""
    start, factor = powers(rng, -10, 20), rng.choice(np.float32(factors), CASES)
    return {
        "initial_scale": start,
        "growth_interval": rng.choice(np.int32([1, 1, 2, 2, 3, 4, 7, 20, 2000]), CASES),
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "min_scale": np.minimum(powers(rng, *floor), start),
        "max_scale": np.full(CASES, LARGEST, np.float32),
        "half": rng.random(CASES) < 0.5,
    }


LIVE = {"Flax": (flax_step, [2, 2, 4], (-40, 20)), "JMP": (jmp_step, [2, 2, 4], (-30, 10))}


@pytest.mark.slow
@pytest.mark.parametrize("peer", LIVE)
def test_random_runs_are_those_of_a_live_peer(peer):
    their_step, *limits = LIVE[peer]
    rng = np.random.default_rng(len(peer))
    hyper = draw_runs(rng, *limits)
    steps = draw_steps(rng, hyper["growth_interval"])
    ours, theirs = (
        jax.device_get(jax.jit(jax.vmap(train))(hyper, steps))
        for train in (train_ours, functools.partial(train_by_hand, their_step))
    )
    for name, array in theirs.items():
        assert array.dtype == ours[name].dtype
        np.testing.assert_array_equal(ours[name], array, name)
    # In float16, some good steps overflow too, depending on the loss scale.
    skipped = np.diff(ours["total_skipped"], axis=1, prepend=0) > 0
    unspoilt = skipped & np.isfinite(steps.grad) & hyper["half"][:, None]
    assert unspoilt.any(axis=1).sum() > CASES / 20
