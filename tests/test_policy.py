"""When the loss scale moves: the rule against its oracle, and what a policy refuses."""

import dataclasses
import functools
import itertools
import json
import pickle
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import INT32_MAX, Reference, dynamic_step, fixed_step, trajectory

import optax_lossscale as ols

# Small numbers, so that ten steps reach every branch, bound and refill.
DYNAMIC = {
    "interval 1": {"initial_scale": 8, "growth_interval": 1},
    "interval 2": {"initial_scale": 4, "growth_interval": 2},
    "interval 3": {"initial_scale": 64, "growth_interval": 3},
    "hysteresis 2": {"initial_scale": 64, "growth_interval": 2, "hysteresis": 2},
    "hysteresis 3": {"initial_scale": 64, "growth_interval": 2, "hysteresis": 3},
    "hysteresis 3, interval 3": {"initial_scale": 64, "growth_interval": 3, "hysteresis": 3},
    "consecutive 1": {"initial_scale": 64, "growth_interval": 2, "consecutive_hysteresis": True},
    "consecutive 2": {
        "initial_scale": 64,
        "growth_interval": 2,
        "hysteresis": 2,
        "consecutive_hysteresis": True,
    },
    "consecutive 3": {
        "initial_scale": 64,
        "growth_interval": 3,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
    },
    "no powers of two": {
        "initial_scale": 10.1,
        "growth_interval": 2,
        "growth_factor": 1.7,
        "backoff_factor": 0.3,
        "min_scale": 0.37,
        "max_scale": 33.3,
    },
    "patience 1": {"initial_scale": 64, "growth_interval": 2, "loss_patience": 1},
    "patience 2": {"initial_scale": 64, "growth_interval": 2},
    "patience 3": {"initial_scale": 64, "growth_interval": 2, "loss_patience": 3},
    "patience 3, hysteresis 2": {
        "initial_scale": 64,
        "growth_interval": 2,
        "hysteresis": 2,
        "loss_patience": 3,
    },
    "longest patience": {"initial_scale": 64, "growth_interval": 2, "loss_patience": INT32_MAX},
    "bounds": {"initial_scale": 4, "growth_interval": 1, "min_scale": 3, "max_scale": 6},
    "bounds that touch": {"initial_scale": 4, "growth_interval": 1, "min_scale": 4, "max_scale": 4},
    "smallest": {"initial_scale": 2**-124, "growth_interval": 2, "min_scale": 2**-126},
    "largest": {"initial_scale": 2.0**124, "growth_interval": 1, "max_scale": 2.0**126},
    "factors that leave float32": {
        "initial_scale": 4,
        "growth_interval": 2,
        "growth_factor": 3e38,
        "backoff_factor": 2e-38,
        "max_scale": 2.0**126,
    },
    "default": {},
}
CASES = {
    **{
        name: (ols.DynamicLossScale(**hyper), dynamic_step(**hyper))
        for name, hyper in DYNAMIC.items()
    },
    "fixed": (ols.FixedLossScale(12.5), fixed_step()),
    "fixed, unchecked": (
        ols.FixedLossScale(3, skip_nonfinite=False),
        fixed_step(skip_nonfinite=False),
    ),
}
every_policy = pytest.mark.parametrize(("policy", "step"), CASES.values(), ids=CASES.keys())

T, F = True, False
GOOD, BAD_GRADS, BAD_LOSS, ALL_BAD = (T, T), (F, T), (T, F), (F, F)  # grads_finite, loss_finite
# Every sequence of ten flags; every one of seven with bad losses, and of five with all four kinds,
# each followed by finite steps.
SEQUENCES = [
    *itertools.product([GOOD, BAD_GRADS], repeat=10),
    *(s + (GOOD,) * 3 for s in itertools.product([GOOD, BAD_GRADS, BAD_LOSS], repeat=7)),
    *(s + (GOOD,) * 5 for s in itertools.product([GOOD, BAD_GRADS, BAD_LOSS, ALL_BAD], repeat=5)),
]

REFUSED = [
    ("initial_scale", "8", TypeError, "must be a Python number, got '8'.*Convert"),
    ("initial_scale", True, TypeError, "must be a Python number, got True"),
    ("initial_scale", 1 + 2j, TypeError, r"must be a Python number, got \(1\+2j\)"),
    ("initial_scale", None, TypeError, "must be a Python number, got None"),
    (
        "initial_scale",
        np.array(8.0),
        TypeError,
        r"must be a Python number, got array\(8\.\).*`float`",
    ),
    ("initial_scale", float("nan"), ValueError, "must be finite in float32, got nan"),
    ("initial_scale", float("inf"), ValueError, "must be finite in float32, got inf"),
    ("initial_scale", 1e39, ValueError, r"must be finite in float32, got 1e\+39"),
    ("initial_scale", 10**400, ValueError, "must be finite in float32, got 1000"),
    ("initial_scale", Fraction(10**400), ValueError, "must be finite in float32, got 1000"),
    ("initial_scale", 0, ValueError, r"must lie between 2\*\*-126 and 2\*\*126.*got 0\. Use"),
    ("initial_scale", -8, ValueError, r"must lie between 2\*\*-126 and 2\*\*126.*got -8\. Use"),
    (
        "initial_scale",
        2**127,
        ValueError,
        r"must lie between 2\*\*-126 and 2\*\*126.*got 17014.*Use",
    ),
    ("initial_scale", 2.0**126 * (1 + 2**-23), ValueError, r"must lie between 2"),
    (
        "initial_scale",
        2.0**-127,
        ValueError,
        r"must lie between 2\*\*-126 and 2\*\*126.*got 5\.87.*Use",
    ),
    (
        "initial_scale",
        0.5,
        ValueError,
        r"`initial_scale` must lie between `min_scale` and.*=0\.5, min_scale=1\.0.*Move",
    ),
    (
        "initial_scale",
        2**25,
        ValueError,
        r"`initial_scale` .*`max_scale`.*33554432\.0.*max_scale=16777216\.0.*Move",
    ),
    ("min_scale", 0, ValueError, r"must lie between 2.*got 0"),
    ("min_scale", 2**16, ValueError, r"`initial_scale`.*min_scale=65536\.0.*Move the bound"),
    ("max_scale", 2**14, ValueError, r"`initial_scale`.*max_scale=16384\.0.*Move the bound"),
    ("max_scale", float(np.finfo(np.float32).max), ValueError, r"must lie between 2.*got 3.4028"),
    ("max_scale", "2**20", TypeError, r"must be a Python number, got '2\*\*20'"),
    (
        "growth_factor",
        1,
        ValueError,
        r"must be greater than 1 in float32, got 1\.0.*`FixedLossScale`",
    ),
    ("growth_factor", 1 + 1e-9, ValueError, r"must be greater than 1 in float32, got 1\.000000001"),
    ("growth_factor", 0.5, ValueError, r"must be greater than 1 in float32, got 0.5"),
    ("growth_factor", float("inf"), ValueError, "must be finite in float32, got inf"),
    ("growth_factor", False, TypeError, "must be a Python number, got False"),
    ("backoff_factor", 0, ValueError, r"must lie between 0 and 1.*in float32, got 0\.0\. Use 0\.5"),
    (
        "backoff_factor",
        1e-60,
        ValueError,
        r"must lie between 0 and 1.*in float32, got 1e-60\. Use 0\.5",
    ),
    ("backoff_factor", 1e-38, ValueError, r"must.*normal number in float32, got 1e-38\. Use 0\.5"),
    ("backoff_factor", 1, ValueError, r"must lie between 0 and 1.*in float32, got 1\.0\. Use 0\.5"),
    ("backoff_factor", 1 - 1e-9, ValueError, r"must lie between 0 and 1.*in float32, got 0\.99"),
    ("backoff_factor", -0.5, ValueError, r"must lie between 0 and 1.*got -0.5"),
    ("backoff_factor", float("nan"), ValueError, "must be finite in float32, got nan"),
    ("backoff_factor", "0.5", TypeError, "must be a Python number, got '0.5'"),
    *[
        (name, value, kind, match)
        for name in ("growth_interval", "hysteresis", "loss_patience")
        for value, kind, match in (
            (0, ValueError, r"must be at least 1 and fit an int32, got 0\. Use"),
            (-3, ValueError, r"must be at least 1 and fit an int32, got -3\. Use"),
            (2**31, ValueError, r"must be at least 1 and fit an int32, got 2147483648\. Use"),
            (2.5, TypeError, r"must be an integer, got 2\.5\. Use `int`"),
            (2.0, TypeError, r"must be an integer, got 2\.0\. Use `int`"),
            (True, TypeError, r"must be an integer, got True\. Use `int`"),
            ("2", TypeError, "must be an integer, got '2'"),
            (None, TypeError, "must be an integer, got None"),
            (np.array(2), TypeError, r"must be an integer, got array\(2\)"),
        )
    ],
]

NO_LOSS_SCALES = {
    "bool": (True, TypeError),
    "numpy bool": (np.bool_(True), TypeError),
    "object": (object(), TypeError),
    "complex": (8j, TypeError),
    "list": ([8], TypeError),
    "numpy array": (np.array(8.0), TypeError),
    "jax array": (np.ones(2), TypeError),
    "policy's class": (ols.DynamicLossScale, TypeError),
    "function": (float, TypeError),
    "unknown string": ("static", ValueError),
    "number in a string": ("128", ValueError),
    "empty string": ("", ValueError),
}


class Halving:
    """A user's own policy, which satisfies the Protocol and inherits from nothing."""

    skip_nonfinite = True

    def init(self):
        return ols.init(64)

    def update(self, state, grads_finite, *, loss_finite=True):
        scale = jnp.where(grads_finite & loss_finite, state.loss_scale, state.loss_scale * 0.5)
        return state._replace(loss_scale=scale)


@functools.partial(jax.jit, static_argnums=0)
def trajectories(policy, state, grads_finite, loss_finite):
    """Return the state after each step of every sequence: [sequences, steps] in each field."""

    def step(carry, flags):
        after = policy.update(carry, flags[0], loss_finite=flags[1])
        return after, after

    def scan(*flags):
        return jax.lax.scan(step, state, flags)[1]

    return jax.vmap(scan)(grads_finite, loss_finite)


def assert_states_equal(state, expected):
    """Compare every field with the last axis of `expected`, exactly."""
    for number, name in enumerate(ols.LossScaleState._fields):
        actual = np.asarray(getattr(state, name), np.float64)
        np.testing.assert_array_equal(actual, expected[..., number], err_msg=name)


@every_policy
def test_every_sequence_of_flags_gives_what_the_written_rule_gives(policy, step):
    grads_finite, loss_finite = np.moveaxis(np.array(SEQUENCES), -1, 0)
    start = Reference(float(policy.init().loss_scale))
    expected = np.array([trajectory(step, start, sequence) for sequence in SEQUENCES])
    states = trajectories(policy, policy.init(), grads_finite, loss_finite)
    assert_states_equal(states, expected)


def test_the_sequences_hold_every_kind_of_step_and_tell_each_patience_apart():
    every = itertools.product([GOOD, BAD_GRADS, BAD_LOSS, ALL_BAD], repeat=5)
    assert {sequence[:5] for sequence in SEQUENCES} >= set(every)
    names = ["patience 1", "patience 2", "patience 3", "longest patience"]
    steps = [CASES[name][1] for name in names]
    ends = [[trajectory(s, Reference(64.0), q)[-1, 0] for q in SEQUENCES] for s in steps]
    assert all(one != other for one, other in itertools.combinations(ends, 2))


@every_policy
def test_a_state_restored_under_another_policy_moves_by_the_written_rule(policy, step):
    starts = [
        Reference(*fields)
        for fields in itertools.product(
            [2.0**-126, 0.375, 5.0, 2.0**24, 2.0**126, float(np.finfo(np.float32).max)],
            [0, 1, 2, 5, 1999, INT32_MAX - 1, INT32_MAX],
            [0, 1, 2, 9, INT32_MAX],
            [0, 1, INT32_MAX],
            [3, INT32_MAX - 1, INT32_MAX],
        )
    ]
    columns = zip(*starts, strict=True)
    states = ols.LossScaleState(
        *(np.array(c, t) for c, t in zip(columns, ["f4", *["i4"] * 4], strict=True))
    )
    kinds = [GOOD, BAD_GRADS, BAD_LOSS, ALL_BAD]
    flags = np.repeat(np.array(kinds)[:, None], len(starts), axis=1)
    update = jax.vmap(lambda state, flag: policy.update(state, flag[0], loss_finite=flag[1]))
    after = jax.jit(jax.vmap(update, in_axes=(None, 0)))(states, flags)
    expected = np.array([[step(start, *kind) for start in starts] for kind in kinds])
    assert_states_equal(after, expected)


@pytest.mark.parametrize("case", ["hysteresis 3", "consecutive 2", "fixed", "fixed, unchecked"])
def test_the_rule_is_the_same_however_it_is_run(case, runner):
    policy, step = CASES[case]
    update = runner(lambda state, good, loss: policy.update(state, good, loss_finite=loss))
    state = policy.init()
    expected = Reference(float(state.loss_scale))
    for flags in (GOOD, BAD_GRADS, BAD_LOSS, BAD_GRADS, BAD_GRADS, GOOD, GOOD):
        state = update(state, *map(jnp.asarray, flags))
        expected = step(expected, *flags)
        assert_states_equal(state, np.array(expected))


@pytest.mark.parametrize("interval", [1, 2, 7, 2000])
def test_it_grows_on_exactly_the_nth_finite_step(interval):
    policy = ols.DynamicLossScale(initial_scale=8, growth_interval=interval)
    flags = np.ones((1, 2 * interval), bool)
    scales = np.asarray(trajectories(policy, policy.init(), flags, flags).loss_scale)[0]
    expected = np.full(2 * interval, 8.0)
    expected[interval - 1 :] = 16
    expected[-1] = 32
    np.testing.assert_array_equal(scales, expected)


@pytest.mark.parametrize(
    ("patience", "flags", "scales"),
    [
        (1, "LLTL", "32 16 16 8"),
        (2, "LLLTL", "64 32 16 16 16"),
        (3, "LLLLTLL", "64 64 32 16 16 16 16"),
        (2, "FLBL", "32 16 8 4"),  # every skipped step counts towards it
        (3, "FLBL", "32 32 16 8"),
        (2, "BFB", "64 32 16"),
        (INT32_MAX, "LLBBLL", "64 64 64 64 64 64"),  # the rule of the first edition
    ],
)
def test_a_loss_that_is_not_finite_backs_off_once_the_patience_is_spent(patience, flags, scales):
    """T: all is finite; F: the gradients are not; L: the loss is not; B: neither is."""
    policy = ols.DynamicLossScale(64, loss_patience=patience)
    kinds = {"T": GOOD, "F": BAD_GRADS, "L": BAD_LOSS, "B": ALL_BAD}
    grads_finite, loss_finite = np.array([kinds[flag] for flag in flags]).T[:, None]
    states = trajectories(policy, policy.init(), grads_finite, loss_finite)
    assert [f"{scale:g}" for scale in states.loss_scale[0].tolist()] == scales.split()
    assert states.total_skipped[0].tolist()[-1] == len(flags) - flags.count("T")


def test_the_defaults_are_those_of_the_contract():
    assert ols.DynamicLossScale() == ols.DynamicLossScale(
        initial_scale=2.0**15,
        growth_interval=2000,
        growth_factor=2.0,
        backoff_factor=0.5,
        min_scale=1.0,
        max_scale=2.0**24,
        hysteresis=1,
        consecutive_hysteresis=False,
        loss_patience=2,
    )
    assert ols.FixedLossScale(8) == ols.FixedLossScale(scale=8.0, skip_nonfinite=True)


@pytest.mark.parametrize(
    ("name", "value", "error", "match"), REFUSED, ids=[f"{r[0]}={r[1]!r:.20}" for r in REFUSED]
)
def test_a_dynamic_policy_refuses(name, value, error, match):
    with pytest.raises(error, match=match if match.startswith("`") else f"`{name}` {match}"):
        ols.DynamicLossScale(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("8",), TypeError, "`scale` must be a Python number, got '8'"),
        ((True,), TypeError, "`scale` must be a Python number, got True"),
        ((None,), TypeError, "`scale` must be a Python number, got None"),
        ((np.ones(1),), TypeError, r"`scale` must be a Python number, got array\(\[1\.\]\)"),
        ((0,), ValueError, r"`scale` must lie between 2\*\*-126 and 2\*\*126.*got 0\. Use"),
        ((-1.0,), ValueError, r"`scale` must lie between .*got -1\.0\. Use"),
        ((2.0**127,), ValueError, "`scale` must lie between .*got 1.7014.*Use"),
        ((2.0**-127,), ValueError, "`scale` must lie between .*got 5.87.*Use"),
        ((float("inf"),), ValueError, "`scale` must be finite in float32, got inf"),
        ((float("nan"),), ValueError, "`scale` must be finite in float32, got nan"),
    ],
)
def test_a_fixed_policy_refuses(arguments, error, match):
    with pytest.raises(error, match=match):
        ols.FixedLossScale(*arguments)


def test_a_traced_number_is_no_hyper_parameter():
    with pytest.raises(TypeError, match=r"`scale` must be a Python number, got .*`float`"):
        jax.jit(lambda scale: ols.FixedLossScale(scale).init())(8.0)


@pytest.mark.parametrize("bound", [2.0**-126, 2.0**126])
def test_the_bounds_themselves_are_allowed(bound):
    policy = ols.DynamicLossScale(initial_scale=bound, min_scale=bound, max_scale=bound)
    assert float(policy.init().loss_scale) == float(ols.FixedLossScale(bound).init().loss_scale)
    assert float(policy.init().loss_scale) == bound


@pytest.mark.parametrize("backoff", [2.0**-126, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_the_extreme_backoff_factors_are_allowed(backoff):
    policy = ols.DynamicLossScale(2.0**126, backoff_factor=backoff, max_scale=2.0**126)
    state = policy.update(policy.init(), grads_finite=False)
    assert float(state.loss_scale) == 2.0**126 * backoff


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis", "loss_patience"])
def test_the_largest_int32_is_allowed(name):
    assert getattr(ols.DynamicLossScale(**{name: INT32_MAX}), name) == INT32_MAX


def test_numbers_of_numpy_become_numbers_of_python():
    policy = ols.DynamicLossScale(
        initial_scale=np.float32(8),
        growth_interval=np.int64(3),
        growth_factor=np.float16(2),
        backoff_factor=Fraction(1, 4),
        min_scale=np.int8(2),
        max_scale=np.float64(16),
        hysteresis=np.uint8(2),
        consecutive_hysteresis=np.bool_(True),
        loss_patience=np.uint16(3),
    )
    assert policy == ols.DynamicLossScale(8, 3, 2, 0.25, 2, 16, 2, True, 3)
    kinds = [type(value) for value in dataclasses.astuple(policy)]
    assert kinds == [float, int, float, float, float, float, int, bool, int]
    fixed = ols.FixedLossScale(np.int32(8), np.bool_(False))
    assert [type(value) for value in dataclasses.astuple(fixed)] == [float, bool]


@pytest.mark.parametrize("policy", [ols.DynamicLossScale(8), ols.FixedLossScale(8)])
def test_a_policy_is_frozen_hashable_and_equal_to_its_like(policy):
    twin = type(policy)(8.0)
    assert (policy, hash(policy)) == (twin, hash(twin))
    assert policy != type(policy)(16)
    assert policy == pickle.loads(pickle.dumps(policy))  # noqa: S301
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.scale = 4
    assert float(jax.jit(lambda p: p.init(), static_argnums=0)(policy).loss_scale) == 8
    name = next(name for name in ("scale", "initial_scale") if hasattr(policy, name))
    assert dataclasses.replace(policy, **{name: 4}) == type(policy)(4)
    with pytest.raises(ValueError, match=f"`{name}` must lie between"):
        dataclasses.replace(policy, **{name: 0})


def test_skip_nonfinite_says_whether_a_step_is_checked():
    policies = [ols.DynamicLossScale(), ols.FixedLossScale(2), ols.FixedLossScale(2, False)]
    assert [policy.skip_nonfinite for policy in policies] == [True, True, False]
    assert all(isinstance(policy, ols.LossScale) for policy in [*policies, Halving()])


CONFIGURED = [
    ols.DynamicLossScale(),
    ols.DynamicLossScale(10.5, 3, 1.5, 0.25, 0.125, 99.5, 4, True, 5),
    ols.FixedLossScale(10.5, skip_nonfinite=False),
]


@pytest.mark.parametrize("policy", CONFIGURED, ids=["default", "dynamic", "fixed"])
def test_a_config_survives_json(policy):
    config = json.loads(json.dumps(policy.get_config()))
    assert config["class_name"] == type(policy).__name__
    assert set(config) == {"class_name", *(f.name for f in dataclasses.fields(policy))}
    assert type(policy).from_config(config) == policy
    assert ols.as_loss_scale(config) == policy
    assert json.loads(json.dumps(policy.get_config())) == config  # from_config took nothing away


def test_a_config_without_a_class_name_names_this_class():
    assert ols.DynamicLossScale.from_config({"hysteresis": 2}) == ols.DynamicLossScale(hysteresis=2)
    assert ols.FixedLossScale.from_config({"scale": 4}) == ols.FixedLossScale(4)


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        ({"intial_scale": 8}, ValueError, r"`config` has unknown keys \['intial_scale'\].*Remove"),
        ({"class_name": "FixedLossScale"}, ValueError, "`config`.*Dynamic.*'Fixed.*as_loss_scale"),
        ({"class_name": None}, ValueError, "`config` must describe.*class_name=None"),
        ({"growth_interval": 0}, ValueError, "`growth_interval` must be at least 1.*got 0"),
        ("dynamic", TypeError, "`config` must be a dict.*got 'dynamic'.*`as_loss_scale`"),
        (None, TypeError, "`config` must be a dict.*got None.*`as_loss_scale`"),
    ],
)
def test_from_config_refuses(config, error, match):
    with pytest.raises(error, match=match):
        ols.DynamicLossScale.from_config(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("dynamic", ols.DynamicLossScale()),
        (128, ols.FixedLossScale(128)),
        (0.5, ols.FixedLossScale(0.5)),
        (np.float32(4), ols.FixedLossScale(4)),
        (np.int64(4), ols.FixedLossScale(4)),
        (None, ols.FixedLossScale(1, skip_nonfinite=False)),
        ({"class_name": "FixedLossScale", "scale": 4}, ols.FixedLossScale(4)),
        ({"class_name": "DynamicLossScale"}, ols.DynamicLossScale()),
    ],
)
def test_as_loss_scale_accepts(given, expected):
    assert ols.as_loss_scale(given) == expected
    assert float(ols.init(given).loss_scale) == float(expected.init().loss_scale)


@pytest.mark.parametrize("policy", [*CONFIGURED, Halving()])
def test_as_loss_scale_leaves_a_policy_itself(policy):
    assert ols.as_loss_scale(policy) is policy


@pytest.mark.parametrize(("given", "error"), NO_LOSS_SCALES.values(), ids=NO_LOSS_SCALES.keys())
def test_as_loss_scale_lists_what_it_accepts(given, error):
    listed = '`loss_scale` must be a policy.*"dynamic".*int or a float.*None.*`get_config`; got '
    with pytest.raises(error, match=listed) as info:
        ols.as_loss_scale(given)
    assert str(info.value).endswith(f"got {given!r}.")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "`loss_scale` must name a class in .*class_name=None.*`from_config`"),
        ({"class_name": "Halving"}, "`loss_scale` must name a class.*'FixedLoss.*'Halving'"),
        ({"class_name": ["FixedLossScale"]}, "`loss_scale` must name a class"),
        ({"class_name": "FixedLossScale", "x": 1}, r"`config` has unknown keys \['x'\]"),
        (0, r"`loss_scale` must lie between 2\*\*-126 and 2\*\*126.*got 0"),
        (-1.0, "`loss_scale` must lie between"),
        (float("inf"), "`loss_scale` must be finite"),
        (float("nan"), "`loss_scale` must be finite"),
        (2.0**127, "`loss_scale` must lie between"),
        pytest.param(10**400, "`loss_scale` must be finite", id="10**400"),
    ],
)
def test_as_loss_scale_refuses(given, match):
    with pytest.raises(ValueError, match=match):
        ols.as_loss_scale(given)


def test_none_has_a_state_of_the_same_type():
    assert jax.tree.map(jax.typeof, ols.init(None)) == jax.tree.map(jax.typeof, ols.init())
    assert_states_equal(ols.update(ols.init(None), False, None), np.array([1, 0, 0, 0, 0]))


def test_a_users_own_policy_works_in_init_and_update():
    policy = Halving()
    state = ols.update(ols.init(policy), jnp.asarray(False), policy)
    assert_states_equal(state, np.array([32, 0, 0, 0, 0]))
    state = ols.update(state, jnp.asarray(True), policy, loss_finite=jnp.asarray(False))
    assert_states_equal(state, np.array([16, 0, 0, 0, 0]))


@pytest.mark.parametrize("flag", [False, np.bool_(False), np.array(False), jnp.asarray(False)])
def test_a_flag_may_be_a_python_bool_or_an_array(flag):
    assert float(ols.update(ols.init(), flag, "dynamic").loss_scale) == 2.0**14
    assert float(ols.update(ols.init(), flag, "dynamic", loss_finite=flag).loss_scale) == 2.0**15
    assert int(ols.update(ols.init(8), flag, 8).total_skipped) == 1


@pytest.mark.parametrize("policy", ["dynamic", 8, None])
@pytest.mark.parametrize("name", ["grads_finite", "loss_finite"])
@pytest.mark.parametrize(
    ("flag", "error", "match"),
    [
        (1, TypeError, "must be a bool or a boolean array, got 1"),
        (None, TypeError, "must be a bool or a boolean array, got None"),
        (np.float32(1), TypeError, "must be a bool or a boolean array"),
        (np.ones(3, bool), ValueError, r"must be a scalar, got shape \(3,\).*`jnp.all`"),
        (np.ones(1, bool), ValueError, r"must be a scalar, got shape \(1,\).*`jax.vmap`"),
    ],
)
def test_a_flag_that_is_no_boolean_scalar_is_refused(policy, name, flag, error, match):
    flags = {"grads_finite": True, name: flag}
    with pytest.raises(error, match=f"`{name}` {match}"):
        ols.update(ols.init(policy), loss_scale=policy, **flags)


@pytest.mark.parametrize("policy", ["dynamic", 8, None])
def test_a_state_that_is_none_is_refused(policy):
    with pytest.raises(
        TypeError, match=r"`state` must be a LossScaleState, got tuple.*`loss_scale_"
    ):
        ols.update(tuple(ols.init()), True, policy)
