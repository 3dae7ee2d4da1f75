"""Each question that a person asks when training goes wrong, and the function that answers it."""

import contextlib
import functools
import operator
import re

import chex
import jax
import jax.numpy as jnp
import matplotlib.figure
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_lossscale as ols

INF, NAN = np.inf, np.nan
DYNAMIC = ols.DynamicLossScale()

# What a gradient's tree may hold besides arrays of numbers, as in `test_tree.py`.
OTHER_LEAVES = {
    "none": None,
    "float0": np.zeros(3, jax.dtypes.float0),
    "integers": jnp.arange(3),
    "booleans": jnp.array([True, False]),
    "key": jax.random.key(0),
    "name": "relu",
    "function": jnp.sin,
}

# In which order the causes are named: the first words of each.
FORWARD, INPUT = "The forward pass overflows", "The batch or the parameters hold NaN"
BACKWARD, LARGE = "The loss is finite, and one layer's", "The gradients are too large"
DESCENT, FIXED = "The loss scale started too large", "The loss scale is too large, and does"
UNKNOWN = "The loss scale is too large: it is fixed, or still on its way down"
OTHERS = [FORWARD, BACKWARD, INPUT]


def state(loss_scale=2.0**15, growth=0, overflows=0, consecutive=0, total=0):
    return ols.LossScaleState(
        jnp.float32(loss_scale), *(jnp.int32(n) for n in (growth, overflows, consecutive, total))
    )


# --- metrics: what should I log?


def test_metrics_are_those_of_the_contract(runner):
    found = runner(ols.diagnostics.metrics)(state(512.0, 3, 1, 0, 7))
    assert {name: (value.dtype.name, value.item()) for name, value in found.items()} == {
        "loss_scale": ("float32", 512.0),
        "grads_finite": ("bool", True),
        "growth_count": ("int32", 3),
        "consecutive_skipped": ("int32", 0),
        "total_skipped": ("int32", 7),
    }


def test_metrics_say_whether_the_last_step_was_applied():
    skipped = ols.update(ols.init(), False, "dynamic")
    applied = ols.update(skipped, True, "dynamic")
    assert [
        bool(ols.diagnostics.metrics(s)["grads_finite"]) for s in (ols.init(), skipped, applied)
    ] == [
        True,
        False,
        True,
    ]


@pytest.mark.integration
def test_metrics_of_an_optimizer_are_strongly_typed_whatever_was_set():
    tx = ols.with_loss_scaling(optax.chain(optax.clip(1.0), optax.adam(1e-3)))
    opt_state = optax.tree.set(tx.init(jnp.ones(3)), loss_scale=1024.0)
    found = ols.diagnostics.metrics(opt_state)
    assert found["loss_scale"].item() == 1024
    assert not any(value.weak_type for value in found.values())


@pytest.mark.parametrize("tree", [jnp.ones(3), (ols.init(), ols.init())])
def test_metrics_need_exactly_one_state(tree):
    with pytest.raises(ValueError, match="exactly one LossScaleState"):
        ols.diagnostics.metrics(tree)


@pytest.mark.integration
def test_a_step_with_all_diagnostics_neither_waits_nor_compiles_twice():
    tx = ols.with_loss_scaling(optax.adam(1e-3))

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=1)
    def step(params, opt_state):
        loss, grads = ols.value_and_grad(lambda w: jnp.sum(w**2))(opt_state, params)
        true_grads, _ = ols.unscale_and_check(grads, opt_state)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        reports = (
            ols.diagnostics.metrics(opt_state),
            ols.diagnostics.nonfinite_report(grads),
            ols.diagnostics.gradient_exponents(
                true_grads, loss_scale=ols.loss_scale_state(opt_state).loss_scale
            ),
        )
        return optax.apply_updates(params, updates), opt_state, reports

    params = jnp.ones(3)
    opt_state = tx.init(params)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            params, opt_state, reports = step(params, opt_state)
    measured, report, exponents = jax.device_get(reports)
    assert measured["growth_count"] == 3
    assert report[""].size == 3
    assert exponents.histogram.sum() == 3


# --- check_health: is training still alive, and if not, why?


@pytest.mark.parametrize(
    ("healthy", "policy"),
    [
        (ols.init(), DYNAMIC),
        (state(1024.0, growth=3, total=100), DYNAMIC),  # a step skipped now and then
        (state(1024.0, overflows=1, consecutive=1, total=100), DYNAMIC),
        (state(1.0, overflows=1, consecutive=50, total=50), DYNAMIC),  # as many as are allowed
        (state(1.0, growth=3, overflows=1, total=50), DYNAMIC),  # at the floor, and learning
        (state(2.0**24, total=1), DYNAMIC),  # at the cap, which it has had to leave before
        (state(2.0**23), DYNAMIC),  # not at the cap
        (state(2.0**24), ols.DynamicLossScale(2.0**24)),  # it started there
        (state(2.0**24), 2.0**24),  # as it was told to
        (state(1.0), None),
        (state(2.0**24), None),
        (state(2.0**-126), DYNAMIC),
        (state(2.0**126), DYNAMIC),
    ],
)
def test_healthy_training_raises_and_warns_of_nothing(healthy, policy):
    assert ols.diagnostics.check_health(healthy, loss_scale=policy) is None


@pytest.mark.parametrize("limit", [0, 1, 7, 50, np.int32(3)])
def test_one_more_skipped_step_than_allowed_raises(limit):
    ols.diagnostics.check_health(state(consecutive=int(limit)), max_consecutive_skipped=limit)
    with pytest.raises(ols.diagnostics.LossScaleStalledError):
        ols.diagnostics.check_health(
            state(consecutive=int(limit) + 1), max_consecutive_skipped=limit
        )


def test_the_default_allows_fifty_skipped_steps_in_a_row():
    ols.diagnostics.check_health(state(consecutive=50))
    with pytest.raises(ols.diagnostics.LossScaleStalledError):
        ols.diagnostics.check_health(state(consecutive=51))


def test_the_error_says_where_the_loss_scale_stands():
    assert issubclass(ols.diagnostics.LossScaleStalledError, RuntimeError)
    match = r"last 51 steps were skipped \(99 since the start\).* is 4, above its floor of 1\."
    with pytest.raises(ols.diagnostics.LossScaleStalledError, match=match):
        ols.diagnostics.check_health(state(4.0, 0, 1, 51, 99), loss_scale=DYNAMIC)
    with pytest.raises(
        ols.diagnostics.LossScaleStalledError, match=r"the loss scale is 1\. Likely"
    ) as raised:
        ols.diagnostics.check_health(state(1.0, 0, 1, 51, 99))
    assert "floor" not in str(raised.value)
    policy = ols.DynamicLossScale(min_scale=0.1)  # which float32 holds as something above 0.1
    with pytest.raises(
        ols.diagnostics.LossScaleStalledError, match=r"is 0\.1, at its floor of 0\.1\."
    ):
        ols.diagnostics.check_health(state(0.1, 0, 1, 51, 99), loss_scale=policy)
    with pytest.raises(
        ols.diagnostics.LossScaleStalledError, match="FixedLossScale, which has no floor"
    ):
        ols.diagnostics.check_health(state(128.0, consecutive=51), loss_scale=128)


class Bounded(ols.FixedLossScale):
    """A policy of one's own that has bounds, and names nothing else."""

    min_scale, max_scale = 1.0, 2.0**126


@pytest.mark.parametrize(
    ("stalled", "policy", "causes"),
    [
        # no overflow was counted
        (state(2.0**15, consecutive=51), DYNAMIC, [FORWARD, INPUT]),
        (state(1.0, consecutive=51), DYNAMIC, [FORWARD, INPUT]),
        # at the floor, or below 1, where no loss scaling is to blame
        (state(1.0, overflows=1, consecutive=51), DYNAMIC, [*OTHERS, LARGE]),
        (
            state(2.0**-10, overflows=1, consecutive=51),
            ols.DynamicLossScale(min_scale=2.0**-100),
            [*OTHERS, LARGE],
        ),
        (
            state(128.0, overflows=1, consecutive=51),
            ols.DynamicLossScale(min_scale=128.0),
            [LARGE, *OTHERS],
        ),
        # on its way down from 2**126, or 51 steps that are more than the way from the cap
        (
            state(2.0**75, overflows=1, consecutive=51),
            ols.DynamicLossScale(max_scale=2.0**126),
            [DESCENT, *OTHERS],
        ),
        (state(2.0**15, overflows=1, consecutive=51), DYNAMIC, [FORWARD, INPUT]),
        (
            state(2.0**20, overflows=3, consecutive=51),
            ols.DynamicLossScale(backoff_factor=0.95, hysteresis=3),
            [DESCENT, *OTHERS],
        ),
        (
            state(2.0**20, overflows=60, consecutive=51),
            ols.DynamicLossScale(hysteresis=60),
            [DESCENT, *OTHERS],
        ),
        # nothing is known of the bounds
        (state(1.0, overflows=1, consecutive=51), None, [*OTHERS, UNKNOWN]),
        (state(128.0, consecutive=51), None, [*OTHERS, UNKNOWN]),
        (state(128.0, consecutive=51), 128.0, [FIXED, *OTHERS]),
        # near the floor, and near 1
        (state(2.0, overflows=1, consecutive=51), DYNAMIC, [FORWARD, INPUT]),
        (
            state(2.0, overflows=1, consecutive=51),
            ols.DynamicLossScale(min_scale=2.0),
            [LARGE, *OTHERS],
        ),
        # 50 steps down from 2**126 after the first, and one more; half as far
        (state(2.0**76, overflows=1, consecutive=51), Bounded(8), [DESCENT, *OTHERS]),
        (state(2.0**76, overflows=1, consecutive=52), Bounded(8), [FORWARD, INPUT]),
        (state(2.0**100, overflows=1, consecutive=51), Bounded(8), [FORWARD, INPUT]),
    ],
)
def test_the_likeliest_cause_comes_first(stalled, policy, causes):
    with pytest.raises(ols.diagnostics.LossScaleStalledError) as raised:
        ols.diagnostics.check_health(stalled, loss_scale=policy)
    _, *lines = str(raised.value).splitlines()
    assert len(lines) == len(causes)
    for i, (line, cause) in enumerate(zip(lines, causes, strict=True), start=1):
        assert line.startswith(f"  {i}. {cause}")


@pytest.mark.parametrize(
    "policy",
    [
        DYNAMIC,
        ols.DynamicLossScale(2.0**24, hysteresis=2),
        ols.DynamicLossScale(loss_patience=100),
        ols.DynamicLossScale(min_scale=2.0**-100, loss_patience=40),
    ],
)
def test_a_loss_that_stays_nan_is_looked_for_in_the_forward_pass(policy):
    failing = policy.init()
    for _ in range(60):
        failing = policy.update(failing, False, loss_finite=False)
    advice = r"1\. The forward pass overflows.*`first_nonfinite\(loss_fn.*`jax\.debug_infs\(True\)`"
    with pytest.raises(ols.diagnostics.LossScaleStalledError, match=advice):
        ols.diagnostics.check_health(failing, loss_scale=policy)


def test_a_loss_scale_at_its_cap_that_never_overflowed_warns_that_it_may_not_be_needed():
    policy = ols.DynamicLossScale(growth_interval=1)
    idle = policy.init()
    for _ in range(9):
        ols.diagnostics.check_health(idle, loss_scale=policy)
        idle = policy.update(idle, grads_finite=True)
    ols.diagnostics.check_health(idle)  # nobody said where the cap is
    with pytest.warns(UserWarning, match="at its cap of 1.67772e\\+07 and no step was ever skip"):
        ols.diagnostics.check_health(idle, loss_scale=policy)


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (True, TypeError, "must be an integer, got True"),
        (3.0, TypeError, r"must be an integer, got 3\.0"),
        (None, TypeError, "must be an integer, got None"),
        (-1, ValueError, "must be at least 0.*, got -1"),
    ],
)
def test_the_number_of_allowed_steps_is_a_natural_number(limit, error, message):
    with pytest.raises(error, match=f"`max_consecutive_skipped` {message}"):
        ols.diagnostics.check_health(ols.init(), max_consecutive_skipped=limit)


def test_health_is_never_checked_inside_jit():
    with pytest.raises(TypeError, match=r"Call `check_health` outside of `jax\.jit`"):
        jax.jit(ols.diagnostics.check_health)(ols.init())


@pytest.mark.parametrize("field", ols.LossScaleState._fields)
def test_health_is_of_values_in_every_field(field):
    healthy = ols.init()
    with pytest.raises(TypeError, match=r"`opt_state` must hold values, got traced arrays"):
        jax.jit(lambda n: ols.diagnostics.check_health(healthy._replace(**{field: n})))(1)
    with pytest.raises(ValueError, match=rf"`opt_state.{field}` must be a scalar"):
        ols.diagnostics.check_health(ols.init()._replace(**{field: jnp.ones(2, jnp.int32)}))


def test_health_is_that_of_one_replica():
    replicated = jax.tree.map(lambda x: jnp.stack([x, x]), ols.init())
    with pytest.raises(ValueError, match=r"got shape \(2,\)\. Take one replica"):
        ols.diagnostics.check_health(replicated)


# --- nonfinite_report: which layer overflowed?


def test_the_report_counts_the_bad_elements_of_each_array(runner):
    grads = {
        "dense": {"bias": jnp.array([1.0, NAN, INF, -INF]), "kernel": jnp.ones((2, 2))},
        "head": [jnp.array(NAN)],
    }
    report = runner(ols.diagnostics.nonfinite_report)(grads)
    assert {name: tuple(map(int, counts)) for name, counts in report.items()} == {
        "['dense']['bias']": (1, 2, 4),
        "['dense']['kernel']": (0, 0, 4),
        "['head'][0]": (1, 0, 1),
    }
    assert {n.dtype.name for counts in report.values() for n in counts} == {"int32"}
    assert isinstance(report["['head'][0]"], ols.diagnostics.NonfiniteCounts)


@pytest.mark.parametrize(
    ("leaf", "counts"),
    [
        (jnp.array([INF, NAN, 1], jnp.float16), (1, 1, 3)),
        (jnp.array([INF, NAN, 1], jnp.bfloat16), (1, 1, 3)),
        (jnp.array([INF, NAN, 1], jnp.float8_e5m2), (1, 1, 3)),
        (jnp.array([NAN, 1], jnp.float8_e4m3fn), (1, 0, 2)),
        (jnp.array([NAN, 2.0**127], jnp.float8_e8m0fnu), (1, 0, 2)),
        (jnp.array([complex(0, INF), complex(NAN, INF), 1j]), (1, 1, 3)),
        (np.array([INF, NAN]), (1, 1, 2)),
        (np.float32(INF), (0, 1, 1)),
        (float("nan"), (1, 0, 1)),
        (jnp.zeros((0, 3)), (0, 0, 0)),
    ],
)
def test_the_report_reads_every_kind_of_number(leaf, counts):
    (found,) = ols.diagnostics.nonfinite_report([leaf]).values()
    assert tuple(map(int, found)) == counts


@pytest.mark.usefixtures("x64")
def test_the_report_reads_float64():
    (found,) = ols.diagnostics.nonfinite_report([jnp.array([1e300, INF], jnp.float64)]).values()
    assert tuple(map(int, found)) == (0, 1, 2)


def test_the_report_leaves_out_what_is_no_number():
    assert list(ols.diagnostics.nonfinite_report(OTHER_LEAVES | {"w": jnp.ones(2)})) == ["['w']"]
    assert ols.diagnostics.nonfinite_report({}) == {}


def test_counts_of_arrays_too_large_for_int32_do_not_wrap_around():
    # Compiled, and not run: the array would need 8 GB.
    large = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float16)
    compiled = jax.jit(ols.diagnostics.nonfinite_report).lower(large).as_text()
    assert "dense<2.14748352E+9>" in compiled
    assert "stablehlo.minimum" in compiled
    largest = jax.ShapeDtypeStruct((2**31 - 1,), jnp.float16)
    assert (
        "stablehlo.minimum"
        not in jax.jit(ols.diagnostics.nonfinite_report).lower(largest).as_text()
    )
    found = jax.eval_shape(ols.diagnostics.nonfinite_report, large)[""]
    assert {n.dtype.name for n in found} == {"int32"}


@pytest.mark.parametrize(
    "function", [ols.diagnostics.nonfinite_report, ols.diagnostics.gradient_exponents]
)
def test_arrays_of_symbolic_shape_are_counted(function):
    (n,) = export.symbolic_shape("n")
    exported = export.export(jax.jit(function))(jax.ShapeDtypeStruct((n, 2), jnp.float32))
    x = jnp.array([[0.0, NAN], [1e-9, INF], [1e6, 1.0]])
    chex.assert_trees_all_equal(exported.call(x), function(x))


def test_the_worst_array_comes_first():
    grads = {
        "a": jnp.array([NAN, 1, 1, 1]),
        "b": jnp.ones(3),
        "c": jnp.array([INF, NAN, 1]),
        "d": jnp.array([NAN, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    }
    assert ols.diagnostics.format_nonfinite_report(
        jax.jit(ols.diagnostics.nonfinite_report)(grads)
    ).splitlines() == [
        "3 of 4 arrays are not finite:",
        "  ['c']: 1 NaN and 1 infinite of 3 elements (66.7 %)",
        "  ['a']: 1 NaN and 0 infinite of 4 elements (25 %)",
        "  ['d']: 1 NaN and 0 infinite of 10 elements (10 %)",
    ]


def test_the_words_of_a_report_on_one_array_and_on_none():
    bad = ols.diagnostics.nonfinite_report(jnp.array([NAN]))
    assert "the root of the tree: 1 NaN" in ols.diagnostics.format_nonfinite_report(bad)
    bad = ols.diagnostics.nonfinite_report(jnp.array([INF, -INF, 1.0]))
    assert "0 NaN and 2 infinite of 3 elements (66.7 %)" in ols.diagnostics.format_nonfinite_report(
        bad
    )
    good = ols.diagnostics.nonfinite_report([jnp.ones(3), jnp.zeros(0)])
    assert ols.diagnostics.format_nonfinite_report(good) == "0 of 2 arrays are not finite."


def test_a_report_with_a_single_traced_count_is_refused():
    def formatted(n):
        return ols.diagnostics.format_nonfinite_report(
            {"w": ols.diagnostics.NonfiniteCounts(n, 0, 3)}
        )

    with pytest.raises(TypeError, match="`report` must hold values, got traced"):
        jax.jit(formatted)(1)


# --- gradient_exponents: how large are the gradients, and does the factor fit them?


def numbers_of_every_size(count=20_000):
    """Return float32 numbers with random bits, and those that are special."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    special = [0.0, -0.0, INF, -INF, NAN, 65504, 65519, 65520, 65536, 2.0**-149, -(2.0**-126)]
    ties = [s * 2.0**-25 for s in (0.999, 1, 1.001)] + [2.0**-14 * (1 - 2.0**-11)]
    return np.concatenate([bits.view(np.float32), np.float32(special + ties)])


def exponents_by_numpy(x, dtype, factor):
    """Return the counts, from the definitions."""
    with np.errstate(all="ignore"):
        numbers = np.abs(x[np.isfinite(x) & (x != 0)])
        exponent = np.frexp(numbers)[1] - 1
        rounded = (numbers.astype(np.float64) * factor).astype(dtype).astype(np.float64)
    tiny = float(ml_dtypes.finfo(dtype).tiny)
    return ols.diagnostics.GradientExponents(
        histogram=np.bincount(np.clip(exponent, -149, 127) + 149, minlength=277),
        zero=np.sum(x == 0),
        flushed=np.sum(rounded == 0),
        subnormal=np.sum((rounded > 0) & (rounded < tiny)),
        overflow=np.sum(~np.isfinite(rounded)) + np.sum(np.isinf(x)),
        size=x.size,
    )


def assert_equal_counts(actual, expected):
    assert {field.dtype.name for field in actual} == {"int32"}
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("factor", [1.0, 2.0**15, 2.0**24, 2.0**-20, 2.0**126, 2.0**-126])
@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
def test_exponents_and_roundings_are_those_of_numpy(dtype, factor):
    x = numbers_of_every_size()
    counts = jax.jit(ols.diagnostics.gradient_exponents, static_argnames="dtype")(
        x, dtype=dtype, loss_scale=factor
    )
    assert_equal_counts(counts, exponents_by_numpy(x, dtype, factor))


def test_a_factor_that_is_no_power_of_two_is_multiplied_in_float32():
    x = np.abs(numbers_of_every_size())
    x = x[(x > 1e-20) & (x < 1e20)]
    expected = exponents_by_numpy(x, np.float16, 1.0)._replace(
        **{
            name: getattr(exponents_by_numpy(x * np.float32(3000.7), np.float16, 1.0), name)
            for name in ("flushed", "subnormal", "overflow")
        }
    )
    assert_equal_counts(ols.diagnostics.gradient_exponents(x, loss_scale=3000.7), expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_gradients_are_read_exactly(dtype):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    counts = ols.diagnostics.gradient_exponents(jnp.asarray(x))
    assert_equal_counts(counts, exponents_by_numpy(x.astype(np.float32), np.float16, 1.0))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_eight_bit_gradients_are_read_exactly(dtype):
    x = np.arange(2**8, dtype=np.uint8).view(dtype)
    counts = ols.diagnostics.gradient_exponents(jnp.asarray(x))
    assert_equal_counts(counts, exponents_by_numpy(x.astype(np.float32), np.float16, 1.0))


@pytest.mark.usefixtures("x64")
def test_float64_gradients_beyond_float32_count_at_the_ends():
    bits = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    numbers = numbers_of_every_size()
    x = np.concatenate([bits.view(np.float64), np.float64(numbers[~np.isnan(numbers)])])
    counts = ols.diagnostics.gradient_exponents(jnp.asarray(x))
    assert_equal_counts(counts, exponents_by_numpy(x, np.float16, 1.0))
    assert counts.histogram[0] > 1000  # 1e-300 is not zero
    assert counts.histogram[-1] > 1000


@pytest.mark.usefixtures("x64")
def test_gradients_in_float64_are_compared_in_float64():
    x = jnp.asarray(2.0**-25 * np.array([1 - 2.0**-40, 1, 1 + 2.0**-40]))
    assert int(ols.diagnostics.gradient_exponents(x).flushed) == 2


@pytest.mark.parametrize("factor", [8, np.int32(8), jnp.int32(8), jnp.float16(8), 8.0])
def test_the_factor_may_be_any_real_number(factor):
    counts = ols.diagnostics.gradient_exponents(jnp.array([2.0**-27, 2.0**-30]), loss_scale=factor)
    assert int(counts.flushed) == 1


def test_the_factor_may_be_the_largest_float32():
    largest = float(np.finfo(np.float32).max)
    assert int(ols.diagnostics.gradient_exponents(jnp.ones(3), loss_scale=largest).overflow) == 3


def test_both_parts_of_a_complex_gradient_count(runner):
    counts = runner(ols.diagnostics.gradient_exponents)(
        jnp.array([complex(2.0, 1e-9), complex(0.0, INF)])
    )
    assert [int(n) for n in counts[1:]] == [1, 1, 0, 1, 4]
    assert counts.histogram[149 + 1] == 1


def test_exponents_leave_out_what_is_no_number():
    tree = OTHER_LEAVES | {"w": jnp.ones(2), "empty": jnp.zeros((0, 3)), "number": 4.0}
    counts = ols.diagnostics.gradient_exponents(tree)
    assert int(counts.size) == counts.histogram.sum() == 3
    assert int(ols.diagnostics.gradient_exponents({}).size) == 0


def test_two_counts_add(runner):
    first, second = numbers_of_every_size(500), numbers_of_every_size(200)
    each = [runner(ols.diagnostics.gradient_exponents)(x) for x in (first, second)]
    both = runner(ols.diagnostics.gradient_exponents)([first, second])
    chex.assert_trees_all_equal(jax.tree.map(operator.add, *each), both)
    joined = np.concatenate([first, second])
    assert_equal_counts(both, exponents_by_numpy(joined, np.float16, 1.0))


SPECS = [
    PartitionSpec("data", "model"),
    PartitionSpec(None, "model"),
    PartitionSpec(("data", "model")),
    PartitionSpec(),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_counts_of_an_array_on_eight_devices_are_those_of_the_whole(kind, spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    x = numbers_of_every_size()[-2048:].reshape(32, 64)
    expected = exponents_by_numpy(x, np.float16, 1.0)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    with jax.transfer_guard("disallow"):
        counts = jax.jit(ols.diagnostics.gradient_exponents)({"w": sharded})
    assert_equal_counts(jax.device_get(counts), expected)
    assert counts.histogram.sharding.is_fully_replicated


@pytest.mark.parametrize("check_vma", [True, False])
def test_counts_of_shards_sum_to_those_of_the_whole(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = numbers_of_every_size()[-2048:]

    def summed(shard):
        return jax.tree.map(
            lambda n: jax.lax.psum(n, "data"), ols.diagnostics.gradient_exponents(shard)
        )

    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec()}
    counts = jax.jit(jax.shard_map(summed, mesh=mesh, check_vma=check_vma, **specs))(x)
    # The size is known when the shards are compiled; it is summed all the same.
    assert_equal_counts(counts, exponents_by_numpy(x, np.float16, 1.0))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.complex64, jnp.float64])
def test_the_dtype_to_round_to_is_a_small_floating_point_type(dtype):
    for function in (
        ols.diagnostics.gradient_exponents,
        ols.diagnostics.suggest_scale,
        ols.diagnostics.plot_gradient_exponents,
    ):
        argument = jnp.ones(3) if function is ols.diagnostics.gradient_exponents else counts_of(1.0)
        with pytest.raises(TypeError, match=r"`dtype` must be .* of at most 32 bits"):
            function(argument, dtype=dtype)


def test_more_elements_than_an_int32_counts_are_refused():
    half = jax.ShapeDtypeStruct((2**15, 2**15), jnp.float16)
    less = jax.ShapeDtypeStruct((2**30 - 1,), jnp.float16)
    jax.eval_shape(ols.diagnostics.gradient_exponents, [half, less])
    with pytest.raises(ValueError, match=r"at most 2\*\*31 - 1 elements, got 2147483648"):
        jax.eval_shape(ols.diagnostics.gradient_exponents, [half, half])


def test_the_counting_of_an_array_is_dispatched_once():
    jaxpr = jax.make_jaxpr(ols.diagnostics.gradient_exponents)(jnp.ones((2, 5, 7)))
    assert [eqn.params["name"] for eqn in jaxpr.eqns if "clz" in str(eqn)] == ["_exponents"]


# --- suggest_scale: which factor fits?


def counts_of(*values):
    return ols.diagnostics.gradient_exponents(jnp.asarray(values, jnp.float32))


@pytest.mark.parametrize("headroom", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
def test_at_the_suggested_scale_nothing_overflows_and_the_headroom_is_left(dtype, headroom):
    rng = np.random.default_rng(headroom)
    top = int(ml_dtypes.finfo(dtype).maxexp) - 1
    for power in rng.integers(top - 110, 60, size=20):  # the factor stays within 2**126
        x = np.float32(rng.lognormal(0, 3, size=100) * 2.0**power)
        scale = ols.diagnostics.suggest_scale(
            ols.diagnostics.gradient_exponents(x), headroom=headroom, dtype=dtype
        )
        assert np.log2(scale) == round(np.log2(scale))
        after = ols.diagnostics.gradient_exponents(x, dtype=dtype, loss_scale=scale)
        assert int(after.overflow) == 0
        largest = np.frexp(np.max(x.astype(np.float64) * scale))[1] - 1
        assert largest == top - headroom


def test_without_headroom_the_largest_gradient_is_moved_to_the_very_top():
    assert ols.diagnostics.suggest_scale(counts_of(1.0, 1e-3), headroom=0) == 2.0**15
    assert (
        ols.diagnostics.suggest_scale(counts_of(4.0, 1e-3), headroom=0, dtype=np.float32)
        == 2.0**125
    )


@pytest.mark.parametrize(
    ("value", "settings", "scale", "message"),
    [
        (np.float32(3e38), {}, 2.0 ** (15 - 127 - 4), None),
        (2.0**-115, {}, 2.0**126, None),
        (
            2.0**-116,
            {},
            2.0**126,
            r"that fits is 2\*\*127, got its bound of 2\*\*126\. Increase the",
        ),
        (1.0, {"headroom": 0, "dtype": np.float32}, 2.0**126, r"that fits is 2\*\*127"),
        (np.float32(3e38), {"headroom": 20}, 2.0**-126, r"is 2\*\*-132, .* Decrease it"),
    ],
)
def test_the_suggested_scale_is_one_that_a_policy_takes(value, settings, scale, message):
    with pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext():
        suggested = ols.diagnostics.suggest_scale(counts_of(value), **settings)
    assert isinstance(suggested, float)
    assert suggested == ols.FixedLossScale(suggested).scale == scale


@pytest.mark.parametrize(
    ("exponents", "headroom", "error", "message"),
    [
        (counts_of(0.0, NAN, INF), 4, ValueError, "an empty histogram"),
        (
            jax.vmap(ols.diagnostics.gradient_exponents)(jnp.ones((2, 3))),
            4,
            ValueError,
            r"shape \(2, 277\)",
        ),
        (jax.tree.map(operator.neg, counts_of(1.0)), 4, ValueError, "an int32 has wrapped around"),
        (counts_of(1.0), -1, ValueError, "`headroom` must be at least 0"),
        (counts_of(1.0), 1.5, TypeError, "`headroom` must be an integer"),
        (counts_of(1.0), True, TypeError, "`headroom` must be an integer"),
    ],
)
def test_no_scale_is_suggested_for_what_is_no_histogram(exponents, headroom, error, message):
    with pytest.raises(error, match=message):
        ols.diagnostics.suggest_scale(exponents, headroom=headroom)


@pytest.mark.parametrize(
    "function", [ols.diagnostics.suggest_scale, ols.diagnostics.plot_gradient_exponents]
)
def test_counts_of_which_a_single_one_is_traced_are_refused(function):
    counts = counts_of(1.0)
    with pytest.raises(TypeError, match="`exponents` must hold values, got traced arrays"):
        jax.jit(lambda n: function(counts._replace(zero=n)))(1)


def test_counts_added_on_the_host_may_exceed_int32():
    counts = jax.tree.map(lambda n: np.int64(n) * 2**33, counts_of(2.0**-10, 0.0))
    assert ols.diagnostics.suggest_scale(counts) == 2.0**21
    assert (
        ols.diagnostics.plot_gradient_exponents(counts).get_title()
        == "50.0 % of the entries are exactly zero"
    )


# --- plot_gradient_exponents


def shares(ax):
    """Return the percentages that the legend states."""
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    return {
        name: float(share) for name, share in (re.findall(r"(.*): (.*) %", s)[0] for s in labels)
    }


def test_the_plot_says_what_the_dtype_makes_of_the_gradients():
    counts = counts_of(0.0, 0.0, 1e-9, 1e-10, 1e-11, 1e-6, 1.0, 2.0, 3.0, 1e6)
    ax = ols.diagnostics.plot_gradient_exponents(counts)
    assert shares(ax) == {"zero in float16": 30, "subnormal": 10, "normal": 30, "infinite": 10}
    assert ax.get_title() == "20.0 % of the entries are exactly zero"
    assert "log2" in ax.get_xlabel()
    assert "%" in ax.get_ylabel()
    heights = {bar.get_x(): bar.get_height() for bar in ax.patches if bar.get_width() == 1}
    assert heights[1.0] == 20  # 2 and 3
    assert sum(heights.values()) == pytest.approx(80)


def test_the_limits_drawn_are_those_where_the_dtype_rounds():
    x = np.float32(2.0) ** np.arange(-40, 30) * np.float32(1.5)
    ax = ols.diagnostics.plot_gradient_exponents(
        ols.diagnostics.gradient_exponents(x), dtype=jnp.float16
    )
    expected = exponents_by_numpy(x, np.float16, 1.0)
    found = shares(ax)
    for name, count in (
        ("zero in float16", expected.flushed),
        ("subnormal", expected.subnormal),
        ("infinite", expected.overflow),
    ):
        assert found[name] == pytest.approx(100 * count / x.size, abs=0.06)


def test_the_plot_frames_what_the_dtype_holds_and_all_that_was_seen():
    ax = ols.diagnostics.plot_gradient_exponents(counts_of(1.0))
    assert (ax.get_xlim(), ax.get_ylim()) == ((-31, 20), (0, 130))
    handles, _ = ax.get_legend_handles_labels()
    spans = [h.get_path().transformed(h.get_patch_transform()).get_extents() for h in handles]
    # float16: the smallest number is 2**-24, the smallest normal one 2**-14, the largest 65504.
    assert [(s.x0, s.x1) for s in spans] == [(-150, -25), (-25, -14), (-14, 16), (16, 129)]
    wide = ols.diagnostics.plot_gradient_exponents(counts_of(2.0**-100, 2.0**100))
    assert (wide.get_xlim(), wide.get_ylim()) == ((-101, 102), (0, 65))
    far = ols.diagnostics.plot_gradient_exponents(counts_of(2.0**100))
    assert far.get_xlim() == (-31, 102)
    flat = ols.diagnostics.plot_gradient_exponents(counts_of(*2.0 ** np.arange(-100, 100)))
    assert flat.get_ylim() == (0, 1.3)


def test_the_plot_is_drawn_where_it_is_told_to():
    figure = matplotlib.figure.Figure()
    upper, lower = figure.subplots(2)
    assert (
        ols.diagnostics.plot_gradient_exponents(counts_of(1.0), lower, dtype=jnp.bfloat16) is lower
    )
    assert not upper.has_data()
    assert "zero in bfloat16" in shares(lower)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [NAN], [2.0**-149, 3e38]])
def test_the_plot_shows_all_there_is(values, tmp_path):
    ax = ols.diagnostics.plot_gradient_exponents(counts_of(*values))
    assert sum(shares(ax).values()) == (100 if values and 3e38 in values else 0)
    ax.figure.savefig(tmp_path / "a.png", dpi=50)


# --- calibrate: where should the factor start?


def network(params, x):
    """Return logits in float32 that were computed in float16."""
    for weights in params[:-1]:
        x = jax.nn.relu(x.astype(jnp.float16) @ weights.astype(jnp.float16))
    return (x @ params[-1].astype(jnp.float16)).astype(jnp.float32)


def loss_fn(params, x, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(network(params, x), labels)
    return jnp.mean(losses)


def problem(size=1.0):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(64, 128), (128, 128), (128, 10)]
    params = [0.1 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False)]
    return params, size * jax.random.normal(keys[3], (32, 64)), jnp.arange(32) % 10


def grad_fn(state, *args):
    return ols.value_and_grad(loss_fn)(state, *args)[1]


@pytest.mark.integration
@pytest.mark.parametrize("size", [1.0, 100.0, 1e-3])
def test_training_that_starts_calibrated_skips_no_step_and_cannot_start_higher(size):
    policy = ols.DynamicLossScale(max_scale=2.0**60)
    tx = ols.with_loss_scaling(optax.adam(1e-3), policy)
    params, *batch = problem(size)
    opt_state = tx.init(params)
    found = ols.diagnostics.calibrate(grad_fn, opt_state, params, *batch, loss_scale=policy)

    @jax.jit
    def skipped(factor):
        start = opt_state._replace(loss_scale_state=found._replace(loss_scale=factor))
        loss, grads = ols.value_and_grad(loss_fn)(start, params, *batch)
        _, after = tx.update(grads, start, params, value=loss)
        return ols.diagnostics.metrics(after)["total_skipped"]

    assert skipped(found.loss_scale) == 0
    assert skipped(2 * found.loss_scale) == 1
    assert found.loss_scale != opt_state.loss_scale_state.loss_scale


def test_calibration_is_one_loop_in_one_compilation():
    params, *batch = problem()

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=1)
    def calibrate(*args):
        return ols.diagnostics.calibrate(grad_fn, *args)

    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(functools.partial(ols.diagnostics.calibrate, grad_fn))(
            ols.init(), params, *batch
        )
        start = ols.init()
        with jax.transfer_guard("disallow"):
            first = calibrate(start, params, *batch)
            second = calibrate(first, params, *batch)
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("while") == 1
    assert "dot_general" not in [eqn.primitive.name for eqn in jaxpr.eqns]
    assert first.loss_scale == second.loss_scale


def fits(limit):
    """Return a `grad_fn` whose gradients are finite up to a factor of `limit`."""

    def grad_fn(state):
        return jnp.where(ols.loss_scale_state(state).loss_scale <= limit, 1.0, INF)

    return grad_fn


def expect_cap(is_expected):
    message = r"finite even at 2\*\*\d+, the cap of DynamicLossScale.*, raise its `max_scale`"
    return pytest.warns(UserWarning, match=message) if is_expected else contextlib.nullcontext()


@pytest.mark.parametrize("limit", [2.0**power for power in (-1, 0, 1, 7, 23, 24, 25)])
def test_calibration_finds_the_largest_factor_within_the_default_bounds(limit):
    with expect_cap(limit >= 2.0**24):
        found = ols.diagnostics.calibrate(fits(limit), ols.init())
    assert found.loss_scale == min(max(limit, 1.0), 2.0**24)


@pytest.mark.parametrize(
    ("low", "high", "limit", "expected"),
    [
        (2.0**-126, 2.0**126, 2.0**-100, 2.0**-100),
        (2.0**-126, 2.0**126, 2.0**126, 2.0**126),
        (2.0**-126, 2.0**126, 0.0, 2.0**-126),
        (2.0**-10, 2.0**-7, 2.0**-8, 2.0**-8),
        (3.0, 100.0, 50.0, 32.0),
        (3.0, 100.0, 1e9, 64.0),
        (3.0, 100.0, 1.0, 4.0),
        (8.0, 8.0, 1e9, 8.0),
    ],
)
def test_calibration_stays_within_the_bounds_of_the_policy(low, high, limit, expected):
    policy = ols.DynamicLossScale(low, min_scale=low, max_scale=high)
    with expect_cap(low < expected <= limit and high < 2 * expected):
        found = ols.diagnostics.calibrate(fits(limit), ols.init(), loss_scale=policy)
    assert found.loss_scale == expected


def test_calibration_takes_few_evaluations():
    calls = []

    def counted(state):
        jax.debug.callback(lambda: calls.append(1))
        return state.loss_scale.astype(jnp.float16)

    ols.diagnostics.calibrate(counted, ols.init())
    jax.effects_barrier()
    assert len(calls) <= 5


def test_calibration_moves_the_factor_only(runner):
    before = state(2.0, 3, 1, 4, 7)
    after = runner(functools.partial(ols.diagnostics.calibrate, fits(1024.0)))(before)
    assert [leaf.item() for leaf in after] == [1024.0, 3, 1, 4, 7]
    assert [leaf.dtype for leaf in after] == [leaf.dtype for leaf in before]


def test_calibration_hands_on_the_optimizer_state_it_was_given():
    tx = ols.with_loss_scaling(optax.sgd(1.0, momentum=0.9))
    opt_state = tx.init(jnp.ones(3))

    def of_optimizer(state, factor):
        assert jax.tree.structure(state) == jax.tree.structure(opt_state)
        return (state.loss_scale_state.loss_scale * factor).astype(jnp.float16)

    assert ols.diagnostics.calibrate(of_optimizer, opt_state, 3.0).loss_scale == 2.0**14


def test_shards_agree_on_the_factor_that_fits_all():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def calibrated(shard):
        found = ols.diagnostics.calibrate(
            lambda state, x: (state.loss_scale * x).astype(jnp.float16),
            ols.init(),
            shard,
            axis_name="data",
        )
        return found.loss_scale

    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec()}
    x = 2.0 ** jnp.arange(8.0)
    assert jax.jit(jax.shard_map(calibrated, mesh=mesh, **specs))(x) == 2.0 ** (15 - 7)


@pytest.mark.parametrize("policy", [128, None, ols.FixedLossScale(2.0)])
def test_a_fixed_loss_scale_is_not_calibrated(policy):
    with pytest.raises(TypeError, match=r"`min_scale` and `max_scale` .* got FixedLossScale"):
        ols.diagnostics.calibrate(fits(1.0), ols.init(), loss_scale=policy)


def test_calibration_needs_a_power_of_two():
    policy = ols.DynamicLossScale(3.2, min_scale=3.1, max_scale=3.3)
    with pytest.raises(ValueError, match="a power of two between its bounds"):
        ols.diagnostics.calibrate(fits(1.0), ols.init(), loss_scale=policy)


# --- all of them


@pytest.mark.integration
def test_a_step_without_diagnostics_pays_for_none():
    tx = ols.with_loss_scaling(optax.sgd(1.0))

    def step(params, opt_state):
        loss, grads = ols.value_and_grad(lambda w: jnp.sum(w**2))(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    def step_with(params, opt_state):
        exponents = ols.diagnostics.gradient_exponents(params)
        return *step(params, opt_state), exponents

    def primitives(function):
        return str(jax.make_jaxpr(function)(jnp.ones(3), tx.init(jnp.ones(3))))

    assert "clz" not in primitives(step)
    assert "clz" in primitives(step_with)
