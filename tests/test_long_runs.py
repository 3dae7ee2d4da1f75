"""Runs of up to a million steps: no bound is crossed, and no step is miscounted.

The counters are recounted by NumPy from the flags alone, and each move of the factor by the rule as
the contract words it. Neither shares code with the package.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import (
    DYNAMIC_DEFAULTS,
    INT32_MAX,
    Reference,
    dynamic_step,
    fixed_step,
    trajectory,
)

import optax_lossscale as ols

STEPS = 1_000_000
# (hyper-parameters, how often gradients overflow, how often the loss is not finite)
RUNS = {
    "defaults": ({}, 1 / 2000, 1e-4),
    "to_the_ceiling": ({"growth_interval": 3, "max_scale": 2.0**126}, 1e-5, 1e-5),
    "to_the_floor": (
        {"growth_interval": 50, "min_scale": 2.0**-126, "loss_patience": 1},
        0.5,
        0.1,
    ),
    "hysteresis": ({"growth_interval": 20, "hysteresis": 3, "loss_patience": 3}, 0.05, 0.2),
    "in_a_row": (
        {"growth_interval": 10, "hysteresis": 2, "consecutive_hysteresis": True},
        0.2,
        0.05,
    ),
    # No powers of two: each product is rounded, a million times.
    "rounded": (
        {
            "initial_scale": 1000.0,
            "growth_interval": 4,
            "growth_factor": 1.001,
            "backoff_factor": 0.997,
            "min_scale": 0.1,
            "max_scale": 1e7,
        },
        0.1,
        0.001,
    ),
    "every_step": ({"growth_interval": 1, "hysteresis": INT32_MAX}, 0.5, 0.1),
    "endless_patience": ({"growth_interval": 5, "loss_patience": INT32_MAX}, 0.1, 0.5),
}


def random_flags(name):
    """Return whether the gradients and the loss of each step are finite, as bool[steps, 2]."""
    _, grads_bad, loss_bad = RUNS[name]
    rng = np.random.default_rng(list(RUNS).index(name))
    flags = rng.random((STEPS, 2)) >= (grads_bad, loss_bad)
    # A stretch in which every step overflows, and one in which none does: from bound to bound.
    flags[100_000:100_600] = (False, True)
    flags[200_000:260_000] = True
    return flags


def consecutive(flags):
    """Count the true flags in a row up to each step, without a loop."""
    steps = np.arange(1, len(flags) + 1)
    return steps - np.maximum.accumulate(np.where(flags, 0, steps))


@pytest.fixture(scope="module")
def histories():
    """Run every policy for a million steps in one compiled loop, with flags of its own."""
    flags = np.stack([random_flags(name) for name in RUNS], axis=1)
    policies = [ols.DynamicLossScale(**hyper) for hyper, *_ in RUNS.values()]

    @jax.jit
    def run(flags):
        def step(states, both):
            states = [
                policy.update(state, both[i, 0], loss_finite=both[i, 1])
                for i, (policy, state) in enumerate(zip(policies, states, strict=True))
            ]
            return states, states

        return jax.lax.scan(step, [policy.init() for policy in policies], flags)[1]

    states = jax.device_get(run(flags))
    return {name: (flags[:, i], states[i]) for i, name in enumerate(RUNS)}


@pytest.mark.parametrize("name", RUNS)
def test_the_factor_stays_finite_positive_and_within_its_bounds(histories, name):
    _, states = histories[name]
    policy = ols.DynamicLossScale(**RUNS[name][0])
    low, high = np.float32(policy.min_scale), np.float32(policy.max_scale)
    assert len(states.loss_scale) == STEPS
    assert np.isfinite(states.loss_scale).all()
    assert (states.loss_scale >= low).all()
    assert (states.loss_scale <= high).all()
    # It has a normal reciprocal, too, or unscaling would give zeros.
    assert (1 / states.loss_scale >= np.finfo(np.float32).tiny).all()


def test_the_runs_come_to_their_bounds(histories):
    """Otherwise the test above would say little."""
    reached = {name: (s.loss_scale.min(), s.loss_scale.max()) for name, (_, s) in histories.items()}
    assert reached["defaults"] == (1, 2**24)
    assert reached["to_the_ceiling"] == (1, 2**126)
    assert reached["to_the_floor"][0] == 2**-126
    assert reached["rounded"][0] == np.float32(0.1)
    assert reached["every_step"][1] == 2**24


@pytest.mark.parametrize("name", RUNS)
def test_the_counters_are_those_that_the_flags_give(histories, name):
    flags, states = histories[name]
    applied = flags.all(axis=1)
    np.testing.assert_array_equal(states.total_skipped, np.cumsum(~applied))
    np.testing.assert_array_equal(states.consecutive_skipped, consecutive(~applied))
    interval = ols.DynamicLossScale(**RUNS[name][0]).growth_interval
    np.testing.assert_array_equal(states.growth_count, consecutive(applied) % interval)


@pytest.mark.parametrize("name", RUNS)
def test_every_one_of_a_million_steps_follows_the_written_rule(histories, name):
    flags, states = histories[name]
    hyper = DYNAMIC_DEFAULTS | RUNS[name][0]
    first = (hyper["initial_scale"], 0)
    scale, overflows = (
        np.concatenate([np.asarray([start], field.dtype), field[:-1]])
        for start, field in zip(first, (states.loss_scale, states.overflow_count), strict=True)
    )
    loss_finite = flags[:, 1]
    applied = flags.all(axis=1)
    overflowed = ~applied & (loss_finite | (consecutive(~applied) >= hyper["loss_patience"]))
    counted = np.minimum(overflows.astype(np.int64) + 1, hyper["hysteresis"])
    grows = applied & (consecutive(applied) % hyper["growth_interval"] == 0)
    backs_off = overflowed & (counted >= hyper["hysteresis"])
    with np.errstate(under="ignore", over="ignore"):
        grown = np.minimum(
            scale * np.float32(hyper["growth_factor"]), np.float32(hyper["max_scale"])
        )
        backed = np.maximum(
            scale * np.float32(hyper["backoff_factor"]), np.float32(hyper["min_scale"])
        )
    expected = np.where(grows, grown, np.where(backs_off, backed, scale))
    np.testing.assert_array_equal(states.loss_scale, expected)
    refilled = grows | (applied & hyper["consecutive_hysteresis"])
    expected = np.where(overflowed, counted, np.where(refilled, 0, overflows))
    np.testing.assert_array_equal(states.overflow_count, expected)


def near_the_end(missing):
    """Return a state whose counters lack so many steps to the largest int32."""
    count = INT32_MAX - missing
    return Reference(2.0**10, count, 0, count, count)


@pytest.mark.parametrize("flag", [True, False, None], ids=["good", "bad", "mixed"])
@pytest.mark.parametrize(
    ("policy", "step"),
    [
        (ols.FixedLossScale(2.0**10), fixed_step()),
        (
            ols.DynamicLossScale(growth_interval=INT32_MAX, hysteresis=INT32_MAX),
            dynamic_step(growth_interval=INT32_MAX, hysteresis=INT32_MAX),
        ),
        (ols.DynamicLossScale(growth_interval=7), dynamic_step(growth_interval=7)),
    ],
    ids=["fixed", "longest", "short"],
)
def test_counters_stay_at_the_largest_int32(policy, step, flag):
    rng = np.random.default_rng(0)
    flags = np.full((500, 2), flag) if flag is not None else rng.random((500, 2)) < 0.9
    start = near_the_end(missing=20)
    state = policy.init()
    state = ols.LossScaleState(
        *(jnp.asarray(n, a.dtype) for n, a in zip(start, state, strict=True))
    )

    def body(state, both):
        state = policy.update(state, both[0], loss_finite=both[1])
        return state, state

    _, states = jax.jit(lambda state, flags: jax.lax.scan(body, state, flags))(state, flags)
    ours = np.stack([np.asarray(field, np.float64) for field in states], axis=1)
    np.testing.assert_array_equal(ours, trajectory(step, start, flags.tolist()))
    if flag is False:
        assert (ours[-1, 3:] == INT32_MAX).all()
    if flag is True and isinstance(policy, ols.FixedLossScale):
        assert ours[-1, 1] == INT32_MAX


@pytest.mark.integration  # Optax's Adam
def test_a_hundred_thousand_training_steps_skip_what_is_bad_and_nothing_else():
    steps = 100_000
    rng = np.random.default_rng(1)
    x = rng.normal(size=steps).astype(np.float16)
    x[rng.random(steps) < 0.01] = np.inf  # loss and gradient are bad
    weight = np.where(rng.random(steps) < 0.01, 1e12, 1).astype(np.float32)  # only the gradient is
    policy = ols.DynamicLossScale(growth_interval=50, max_scale=2.0**15)
    tx = ols.with_loss_scaling(optax.adam(1e-3), policy)

    def loss_fn(w, x, weight):
        error = (w.astype(jnp.float16) - jnp.float16(3)) * (1 + x / 8) + x / 64
        return weight * error.astype(jnp.float32) ** 2

    def step(carry, batch):
        w, opt_state = carry
        loss, grad = ols.value_and_grad(loss_fn)(opt_state, w, *batch)
        updates, opt_state = tx.update(grad, opt_state, w, value=loss)
        w = optax.apply_updates(w, updates)
        return (w, opt_state), (w, loss, grad, opt_state.loss_scale_state)

    w = jnp.float32(0)
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, (x, weight)))
    (w, opt_state), (ws, losses, grads, states) = jax.device_get(run((w, tx.init(w))))

    flags = np.stack([np.isfinite(grads), np.isfinite(losses)], axis=1)
    applied = flags.all(axis=1)
    assert (~flags[:, 0] & flags[:, 1]).sum() > 500  # overflows
    assert (~flags[:, 1]).sum() > 500
    np.testing.assert_array_equal(
        np.stack([np.asarray(field, np.float64) for field in states], axis=1),
        trajectory(
            dynamic_step(growth_interval=50, max_scale=2.0**15),
            Reference(policy.initial_scale),
            flags.tolist(),
        ),
    )
    before = np.concatenate([np.zeros(1, np.float32), ws[:-1]])
    assert (ws.view(np.int32) == before.view(np.int32))[~applied].all()
    assert int(opt_state.inner_state[0].count) == applied.sum()
    assert np.isfinite(ws).all()
    assert abs(w - 3) < 0.1
