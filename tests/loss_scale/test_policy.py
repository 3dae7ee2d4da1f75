"""When the loss scale changes: the rule against its oracle, and the ways to specify a policy."""

import dataclasses
import fractions
import functools
import itertools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_where import types
from reference import DYNAMIC_DEFAULTS, INT32_MAX, Reference, dynamic_step, fixed_step, trajectory

import optax_lossscale as ols

# Small hyper-parameters let ten steps reach every branch, bound and reset.
NAMES = [*DYNAMIC_DEFAULTS][:6]
BRISK = {"initial_scale": 64, "growth_interval": 2}
DYNAMIC = {
    "default": {},
    "interval 3": {"initial_scale": 64, "growth_interval": 3},
    "hysteresis 3": BRISK | {"hysteresis": 3},
    "consecutive 3": BRISK | {"hysteresis": 3, "consecutive_hysteresis": True},
    "patience 1": BRISK | {"loss_patience": 1},
    "patience 3, hysteresis 2": BRISK | {"loss_patience": 3, "hysteresis": 2},
    "patience without end": BRISK | {"loss_patience": INT32_MAX},  # the rule of the first edition
    "bounds": {"initial_scale": 4, "growth_interval": 1, "min_scale": 3, "max_scale": 6},
    "bounds that touch": {"initial_scale": 4, "growth_interval": 1, "min_scale": 4, "max_scale": 4},
    "smallest": {"initial_scale": 2**-124, "growth_interval": 2, "min_scale": 2**-126},
    "largest": {"initial_scale": 2.0**124, "growth_interval": 1, "max_scale": 2.0**126},
    "no powers of two": dict(zip(NAMES, (10.1, 2, 1.7, 0.3, 0.37, 33.3), strict=True)),
    "products that leave float32": dict(zip(NAMES, (4, 2, 3e38, 2e-38, 1, 2.0**126), strict=True)),
}
UNCHECKED = {"skip_nonfinite": False}
CASES = {name: (ols.DynamicLossScale(**h), dynamic_step(**h)) for name, h in DYNAMIC.items()} | {
    "fixed": (ols.FixedLossScale(12.5), fixed_step()),
    "fixed, unchecked": (ols.FixedLossScale(3, **UNCHECKED), fixed_step(**UNCHECKED)),
}
QUICK = {"consecutive 3", "no powers of two", "fixed"}

F32_MAX = float(np.finfo(np.float32).max)
T, F = True, False
GOOD, BAD_GRADS, BAD_LOSS, ALL_BAD = (T, T), (F, T), (T, F), (F, F)  # grads_finite, loss_finite
KINDS = [GOOD, BAD_GRADS, BAD_LOSS, ALL_BAD]
# All sequences of ten flags, of seven with bad losses, and of five with all four kinds, each
# followed by finite steps.
SEQUENCES = [
    *itertools.product([GOOD, BAD_GRADS], repeat=10),
    *(s + (GOOD,) * 3 for s in itertools.product([GOOD, BAD_GRADS, BAD_LOSS], repeat=7)),
    *(s + (GOOD,) * 5 for s in itertools.product(KINDS, repeat=5)),
]
# States as restored from training under any other policy.
RESTORED = [
    Reference(scale, growth, overflows, consecutive, total)
    for scale, growth, overflows, (consecutive, total) in itertools.product(
        [2.0**-126, 0.375, 5.0, 2.0**24, 2.0**126, F32_MAX, np.nan, np.inf, -1.0, 0.0],
        [0, 1, 2, 5, 1999, INT32_MAX - 1, INT32_MAX],
        [0, 1, 2, 9, INT32_MAX],
        [(0, 3), (1, INT32_MAX - 1), (INT32_MAX, INT32_MAX)],
    )
]


@functools.partial(jax.jit, static_argnums=0)
def trajectories(policy, states, flags):
    def step(state, both):
        after = policy.update(state, both[0], loss_finite=both[1])
        return after, after

    return jax.vmap(lambda state, flags: jax.lax.scan(step, state, flags)[1])(states, flags)


def assert_states_equal(state, expected):
    """Compare every field with the last axis of `expected`, exactly."""
    for number, name in enumerate(ols.LossScaleState._fields):
        actual = np.asarray(getattr(state, name), np.float64)
        np.testing.assert_array_equal(actual, expected[..., number], err_msg=name)


@pytest.mark.parametrize(
    ("policy", "step"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_every_sequence_of_flags_gives_what_the_written_rule_gives(policy, step):
    step = functools.cache(step)
    start = Reference(float(policy.init().loss_scale))
    runs = [(start, sequence) for sequence in SEQUENCES]
    runs += [(state, (kind,) + (GOOD,) * 9) for state in RESTORED for kind in KINDS]
    starts, flags = zip(*runs, strict=True)
    columns = map(np.array, zip(*starts, strict=True), ["f4", *["i4"] * 4])
    states = trajectories(policy, ols.LossScaleState(*columns), np.array(flags))
    assert_states_equal(states, np.array([trajectory(step, *run) for run in runs]))


@pytest.mark.slow
def test_bad_batches_do_not_wear_the_loss_scale_down():
    policy, best, steps = ols.DynamicLossScale(), 20, 10_000

    def mean_exponent(rate, key):
        """Return the mean of log2 of the loss scale, if `rate` of the batches have a NaN loss."""

        def step(state, is_bad):
            fits = state.loss_scale <= 2.0**best
            state = policy.update(state, fits & ~is_bad, loss_finite=~is_bad)
            return state, state.loss_scale

        start = policy.init()._replace(loss_scale=jnp.float32(2**best))
        are_bad = jax.random.bernoulli(key, rate, steps)
        return jnp.mean(jnp.log2(jax.lax.scan(step, start, are_bad)[1]))

    rates, keys = jnp.array([0, 0.01, 0.05, 0.1]), jax.random.split(jax.random.key(0), 32)
    over_seeds = jax.vmap(mean_exponent, in_axes=(None, 0))
    means = jax.jit(jax.vmap(over_seeds, in_axes=(0, None)))(rates, keys).mean(axis=1)
    np.testing.assert_allclose(means, best, atol=0.3)
    np.testing.assert_allclose(means[:3], best, atol=0.02)


@pytest.mark.parametrize(
    ("policy", "name"),
    [(ols.DynamicLossScale(8), "initial_scale"), (ols.FixedLossScale(8), "scale")],
)
def test_a_policy_is_frozen_hashable_and_equal_to_another_with_its_hyper_parameters(policy, name):
    twin = type(policy)(8.0)
    assert (policy, hash(policy)) == (twin, hash(twin))
    assert policy != type(policy)(16)
    assert policy == pickle.loads(pickle.dumps(policy))  # noqa: S301
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, name, 4)
    assert float(jax.jit(lambda p: p.init(), static_argnums=0)(policy).loss_scale) == 8
    assert dataclasses.replace(policy, **{name: 4}) == type(policy)(4)
    with pytest.raises(ValueError, match=f"`{name}` must be between"):
        dataclasses.replace(policy, **{name: 0})


CONFIGURED = [
    ols.DynamicLossScale(),
    # Numbers of NumPy and others become Python's, or JSON would refuse them.
    ols.DynamicLossScale(
        np.float16(10.5),
        growth_interval=np.int32(3),
        growth_factor=np.float32(1.5),
        backoff_factor=fractions.Fraction(1, 4),
        min_scale=0.125,
        max_scale=99.5,
        hysteresis=np.int64(4),
        consecutive_hysteresis=np.True_,
        loss_patience=5,
    ),
    ols.FixedLossScale(np.int32(10), skip_nonfinite=np.False_),
]


@pytest.mark.parametrize("policy", CONFIGURED, ids=["default", "dynamic", "fixed"])
def test_a_config_survives_json(policy):
    config = json.loads(json.dumps(policy.get_config()))
    assert config == {"class_name": type(policy).__name__} | dataclasses.asdict(policy)
    assert type(config.get("initial_scale", config.get("scale"))) is float
    assert ols.as_loss_scale(config) == type(policy).from_config(config) == policy
    del config["class_name"]
    assert type(policy).from_config(config) == policy


class Halving:  # a policy of one's own, without inheritance
    skip_nonfinite = True

    def init(self):
        return ols.init(64)

    def update(self, state, grads_finite, *, loss_finite=True):
        finite = grads_finite & loss_finite
        return state._replace(loss_scale=jnp.where(~finite, state.loss_scale * 0.5, 64))


class Numbers:  # another, which keeps Python numbers
    skip_nonfinite = False

    def init(self):
        return ols.LossScaleState(64.0, 0, 0, 0, 0)

    def update(self, state, grads_finite, *, loss_finite=True):
        return state._replace(loss_scale=32.0 if grads_finite and loss_finite else 16.0)


def test_a_policy_may_keep_python_numbers_and_negate_flags():
    assert float(ols.update(ols.init(64), True, Halving()).loss_scale) == 64
    tx = ols.with_loss_scaling(optax.sgd(0.1), Numbers())
    state = tx.init(jnp.ones(2))
    after = tx.update(jnp.ones(2), state)[1]
    assert types(after) == types(state) == types(jax.jit(tx.update)(jnp.ones(2), state)[1])
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, after)))
    assert float(after.loss_scale_state.loss_scale) == 32
    assert float(ols.update(ols.init(Numbers()), False, Numbers()).loss_scale) == 16


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("dynamic", ols.DynamicLossScale()),
        (128, ols.FixedLossScale(128)),
        (np.float32(4), ols.FixedLossScale(4)),
        (np.int64(4), ols.FixedLossScale(4)),
        (None, ols.FixedLossScale(1, skip_nonfinite=False)),
        ({"class_name": "FixedLossScale", "scale": 4}, ols.FixedLossScale(4)),
    ],
)
def test_as_loss_scale_accepts(given, expected):
    assert ols.as_loss_scale(given) == expected
    assert float(ols.init(given).loss_scale) == float(expected.init().loss_scale)


@pytest.mark.parametrize("policy", [*CONFIGURED, Halving()])
def test_as_loss_scale_returns_a_policy_unchanged(policy):
    assert ols.as_loss_scale(policy) is policy
    assert isinstance(policy, ols.LossScale)
    assert policy.skip_nonfinite is (policy is not CONFIGURED[2])


@pytest.mark.parametrize(
    ("policy", "loss_finite", "after"),
    [
        ("dynamic", True, [2.0**14, 0, 1, 1, 1]),
        ("dynamic", False, [2.0**15, 0, 0, 1, 1]),
        (ols.FixedLossScale(8).get_config(), True, [8, 0, 0, 1, 1]),
        (None, True, [1, 0, 0, 0, 0]),
        (Halving(), True, [32, 0, 0, 1, 1]),  # counted for it
    ],
)
def test_update_takes_any_policy_and_any_boolean_scalar(policy, loss_finite, after):
    for boolean in (bool, np.bool_, np.array, jnp.asarray):
        flags = {"grads_finite": boolean(False), "loss_finite": boolean(loss_finite)}
        state = ols.update(ols.init(policy), policy=policy, **flags)
        assert_states_equal(state, np.array(after))


@pytest.mark.parametrize("number", [8, 8.0, np.float32(8), jnp.float32(8), True])
def test_a_number_is_no_policy(number):
    with pytest.raises(TypeError, match=r"`policy` must be .* `FixedLossScale\(x\)`"):
        ols.update(ols.init(8), True, number)


@pytest.mark.parametrize("policy", [ols.DynamicLossScale(8), ols.FixedLossScale(8)])
def test_a_loss_that_is_not_given_counts_as_finite(policy):
    for after in (policy.update(policy.init(), True), ols.update(policy.init(), True, policy)):
        assert_states_equal(after, np.array([8, 1, 0, 0, 0]))


class PowerOfTwo(ols.FixedLossScale):
    """A policy with arguments of its own."""

    def __init__(self, power):
        super().__init__(2.0**power, skip_nonfinite=False)


@pytest.mark.slow
def test_a_derived_policy_with_its_own_arguments_works_under_a_rule():
    policy = PowerOfTwo(3)
    tx = ols.with_loss_scaling(optax.sgd(0.1), policy, skip_if=ols.Spike())
    grads = jnp.array([jnp.nan])
    _, state = tx.update(grads, tx.init(grads), value=1.0)
    assert not ols.applied(state)
    assert ols.loss_scale_state(state).loss_scale == 8
    assert not policy.skip_nonfinite
