"""Diagnostics: the questions about failing training, and the functions that answer them.

`test_bad_input.py` tests the arguments that these functions reject.
"""

import contextlib
import re
import types
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import matplotlib.figure
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from leaves import not_numbers

import optax_lossscale as ols
from optax_lossscale import diagnostics as diag
from optax_lossscale.diagnostics import (
    check_health,
    gradient_exponents,
    health,
    nonfinite_report,
)

INF, NAN = np.inf, np.nan
DYNAMIC = ols.DynamicLossScale()


def state(loss_scale=2.0**15, growth=0, overflows=0, consecutive=0, total=0):
    return ols.LossScaleState(
        np.float32(loss_scale), *(np.int32(n) for n in (growth, overflows, consecutive, total))
    )


# --- metrics: what should I log?


def test_metrics_have_the_documented_names_and_dtypes_for_both_guards():
    found = jax.jit(diag.metrics)(state(512.0, 3, 1, 0, 7))
    assert {name: (value.dtype.name, value.item()) for name, value in found.items()} == {
        "loss_scale": ("float32", 512.0),
        "applied": ("bool", True),
        "growth_count": ("int32", 3),
        "consecutive_skipped": ("int32", 0),
        "total_skipped": ("int32", 7),
    }
    skipped = trained(ols.with_skipping(SGD), [NAN])
    assert [value.item() for value in diag.metrics(skipped).values()] == [1, False, 0, 1, 1]
    assert not diag.metrics(state()._replace(loss_scale=8.0))["loss_scale"].weak_type


# --- check_health: is training still alive, and if not, why?

SGD = optax.sgd(0.1)


def trained(tx, losses, grads=1.0):
    """Return the optimizer's state after steps with these losses."""

    def step(state, given):
        loss, grad = given
        return tx.update(grad * jnp.ones(2), state, jnp.zeros(2), value=loss)[1], None

    grads = np.broadcast_to(grads, len(losses))
    given = jnp.asarray(losses, jnp.float32), jnp.asarray(grads, jnp.float32)
    return jax.lax.scan(step, tx.init(jnp.zeros(2)), given)[0]


def own_policy(**members):
    """Return a user's own policy, which has only these members and the required ones."""
    needed = {"init": ols.init, "update": ols.update, "skip_nonfinite": True}
    return types.SimpleNamespace(**needed | members)


def guarded(inner_state):
    return ols.GuardState(state(), (), inner_state)


SPIKED = ols.Spike().init(None)


@pytest.mark.parametrize(
    ("healthy", "policy"),
    [
        (state(1024.0, growth=3, total=100), DYNAMIC),  # a step skipped now and then
        (state(1.0, overflows=1, consecutive=50, total=50), "dynamic"),  # as many as allowed
        (state(1.0, growth=3, overflows=1, total=50), DYNAMIC),  # at the floor, but learning
        (state(2.0**20), DYNAMIC),  # grown, but not to the cap
        (state(2.0**24, total=1), DYNAMIC),  # at the cap, which overflowed before
        (state(2.0**24), ols.DynamicLossScale(2.0**24)),  # started there
        (state(0.1), ols.FixedLossScale(0.1).get_config()),  # a float32 is not 0.1
        (ols.with_skipping(SGD).init(jnp.ones(2)), DYNAMIC),
        (state(2.0**126), None),  # the cap is unknown
        (state(2.0**-126), ols.DynamicLossScale(min_scale=2.0**-126)),
        (state(2.0**126, total=1), ols.DynamicLossScale(max_scale=2.0**126)),
        # One bound is not a range.
        (state(4.0), own_policy(min_scale=8.0)),
        (state(16.0), own_policy(max_scale=8.0)),
        # A scalar may be infinite.
        (ols.with_skipping(optax.contrib.reduce_on_plateau()).init(jnp.ones(2)), None),
        # A restored state may hold NumPy arrays and strings.
        (guarded([np.ones(2), "adam"]), None),
        # What the numbers of other states mean is unknown, and a `Spike` repairs its own.
        (guarded({"count": np.int32(-1), "plateau_count": jnp.array([-1, -2])}), None),
        (guarded(())._replace(rule_states=(SPIKED._replace(held=np.int32(129)),)), None),
        (guarded(())._replace(rule_states=(SPIKED._replace(held=np.int32(-1)),)), None),
    ],
)
def test_healthy_training_neither_raises_nor_warns(healthy, policy):
    assert check_health(healthy, policy=policy) is None


def test_a_loss_scale_at_its_cap_without_skipped_steps_is_warned_about():
    numbers = ols.LossScaleState(8.0, 0, 0, 0, 0)
    for policy in (DYNAMIC, own_policy(init=lambda: numbers, min_scale=1.0, max_scale=2.0**24)):
        with pytest.warns(UserWarning, match=r"at its cap of 1.67772e\+07 and no step was ever"):
            check_health(state(2.0**24), policy=policy)


@pytest.mark.parametrize(
    ("loss_scale", "policy", "message"),
    [
        (4.0, DYNAMIC, "the loss scale is 4, above its floor of 1. Possible"),
        (4.0, None, "the loss scale is 4. Possible"),
        # The float32 closest to 0.1 is above it.
        (0.1, ols.DynamicLossScale(min_scale=0.1), "is 0.1, at its floor of 0.1. Possible"),
        (128.0, ols.FixedLossScale(128), "the loss scale is 128. Possible"),
    ],
)
def test_the_error_gives_the_loss_scale_and_its_floor(loss_scale, policy, message):
    match = r"The last 51 steps were skipped \(99 since the start\).*" + re.escape(message)
    with pytest.raises(RuntimeError, match=match):
        check_health(state(loss_scale, 0, 1, 51, 99), policy=policy)
    check_health(state(consecutive=52), max_consecutive_skipped=np.int32(52))


# The first words of each cause.
INSIDE = "The function that the step differentiates is wrapped by `scale_inside`"
FORWARD, INPUT = "The forward pass overflows", "The batch or the parameters hold NaN"
BACKWARD, LARGE = "The loss is finite, and one layer's", "The gradients are too large"
DESCENT, FIXED = "The loss scale started too large", "The loss scale is too large, and fixed"
RULE = "A rule (`skip_if`) rejects steps whose gradients and loss are finite"
OTHERS = [FORWARD, BACKWARD, INPUT]


def assert_causes(opt_state, causes, **given):
    with pytest.raises(diag.LossScaleStalledError) as raised:
        check_health(opt_state, **given)
    first, *lines = str(raised.value).splitlines()
    assert first.endswith("Possible causes, most likely first:")
    listed = [f"  {i}. {cause}" for i, cause in enumerate(causes, start=1)]
    assert [line[: len(cause)] for line, cause in zip(lines, listed, strict=True)] == listed


@pytest.mark.parametrize(
    ("loss_scale", "policy", "causes"),
    [
        (2.0**15, DYNAMIC, [DESCENT, *OTHERS]),
        (2.0, DYNAMIC, [DESCENT, *OTHERS]),
        (1.0, DYNAMIC, [*OTHERS, LARGE]),  # at the floor
        (2.0, ols.DynamicLossScale(min_scale=2.0), [*OTHERS, LARGE]),
        (2.0**-9, ols.DynamicLossScale(min_scale=2.0**-10), [DESCENT, *OTHERS]),
        (2.0**76, own_policy(min_scale=1.0, max_scale=2.0**126), [DESCENT, *OTHERS]),
        (2.0, ols.FixedLossScale(2), [FIXED, *OTHERS]),
        (1.0, ols.FixedLossScale(1), [*OTHERS, INSIDE]),
        (0.5, ols.FixedLossScale(0.5), [FIXED, *OTHERS]),
        # Without known bounds, the loss scale may be dynamic or fixed.
        (2.0, None, [DESCENT, FIXED, *OTHERS, LARGE]),
        (128.0, own_policy(), [DESCENT, FIXED, *OTHERS, LARGE]),
        (1.0, None, [*OTHERS, INSIDE, LARGE]),
        (0.5, None, [FIXED, *OTHERS, LARGE]),
    ],
)
def test_causes_have_a_fixed_order_and_the_state_excludes_some(loss_scale, policy, causes):
    assert_causes(state(loss_scale, 0, 1, 51), causes, policy=policy)


SPIKE = ols.Spike(window=128, warmup=4)
RISING = ([1, 1.1, 0.9, 1, 1.1, 1] + [2.0**n for n in range(2, 62)],)
NANS = ([1.0] * 60, NAN)
SPIKES_AND_NANS = *RISING, [1.0] * (len(*RISING) - 10) + [NAN] * 10


def above_two(*_, value):
    return value > 2


@pytest.mark.parametrize(
    ("policy", "rule", "steps", "causes"),
    [
        # The state of a `Spike` records that it skipped each of these steps.
        ("dynamic", (above_two, SPIKE), RISING, [RULE]),
        (None, (SPIKE, ols.Spike()), RISING, [RULE]),
        # A function records nothing.
        ("dynamic", above_two, RISING, [DESCENT, *OTHERS, RULE]),
        # Not finite, for some or all of the steps.
        ("dynamic", SPIKE, NANS, [*OTHERS, LARGE, RULE]),
        ("dynamic", SPIKE, SPIKES_AND_NANS, [DESCENT, *OTHERS, RULE]),
    ],
)
def test_a_rule_is_the_only_cause_if_it_skipped_every_step(policy, rule, steps, causes):
    stalled = trained(ols.with_loss_scaling(SGD, policy, skip_if=rule), *steps)
    assert diag.is_stalled(stalled)
    assert_causes(stalled, causes, policy=ols.as_loss_scale(policy))


def test_a_rule_that_records_nothing_is_one_cause_of_a_single_skipped_step():
    skipped = trained(ols.with_skipping(SGD, above_two), [1.0, 3.0])
    assert_causes(skipped, [*OTHERS, INSIDE, LARGE, RULE], max_consecutive_skipped=0)


@pytest.mark.slow
@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
def test_metrics_include_the_statistics_of_a_spike(run):
    tx = ols.with_skipping(SGD, (above_two, SPIKE))
    started = run(diag.metrics)(tx.init(jnp.ones(2)))
    names = ["spike_mean", "spike_deviation", "spike_consecutive_skipped"]
    assert [float(started[name]) for name in names] == [0, 0, 0]
    found = run(diag.metrics)(trained(tx, [1.0, 1.5, 0.5, 1.0]))
    expected = [1.0, np.std([1.0, 1.5, 0.5, 1.0]), 0]
    np.testing.assert_allclose([found[name] for name in names], expected, rtol=1e-6)
    assert [found[name].dtype.name for name in names] == ["float32", "float32", "int32"]
    spiked = run(diag.metrics)(trained(tx, [1.0, 1.5, 0.5, 1.0, 90.0, 90.0]))
    assert spiked["spike_consecutive_skipped"] == 2


def test_a_look_between_two_steps_copies_nothing_to_the_device():
    tx = ols.with_skipping(SGD, SPIKE)
    opt_state = trained(tx, [1.0, 1.5, NAN])
    with jax.transfer_guard("disallow"):
        assert not ols.applied(opt_state)
        assert not diag.is_stalled(opt_state)
        assert diag.metrics(opt_state)["spike_consecutive_skipped"].shape == ()


def test_metrics_number_several_spikes_and_accept_stacked_states():
    tx = ols.with_skipping(SGD, (SPIKE, above_two, ols.Spike("grad_norm", window=8)))
    opt_state = trained(tx, [1e30, 3e30])
    found = diag.metrics(opt_state)
    assert list(found)[5:] == [
        f"spike_{i}_{name}" for i in (0, 1) for name in ("mean", "deviation", "consecutive_skipped")
    ]
    np.testing.assert_allclose(found["spike_0_mean"], 2e30)
    np.testing.assert_allclose(found["spike_0_deviation"], 1e30)
    stacked = diag.metrics(jax.tree.map(lambda x: jnp.stack([x, x]), opt_state))
    np.testing.assert_array_equal(stacked["spike_0_mean"], [found["spike_0_mean"]] * 2)


@pytest.mark.parametrize("processes", [1, 2])
def test_sharded_arrays_are_checked_shard_by_shard(processes, monkeypatch):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, P("data"))
    opt_state = ols.with_skipping(optax.adam(0.1)).init(jax.device_put(jnp.zeros(16), spread))
    bad = jax.device_put(jnp.zeros(16).at[15].set(NAN), spread)
    if processes == 2:  # as if other processes had the other shards
        on_one_device = property(lambda array: len(array.sharding.device_set) == 1)
        monkeypatch.setattr(type(bad), "is_fully_addressable", on_one_device)
    with jax.transfer_guard("disallow"):
        check_health(opt_state)
    with pytest.raises(ValueError, match=r"NaN or infinity at `\[0\].mu`"):
        check_health(optax.tree.set(opt_state, mu=bad))
    if hasattr(jax, "set_mesh"):  # since jax 0.7.1
        with jax.set_mesh(mesh):  # JAX rejects single-device arrays here
            check_health(opt_state)


@pytest.mark.integration
def test_a_gradient_whose_square_overflows_is_named_before_an_older_state():
    tx = ols.with_loss_scaling(optax.adam(1e-3), 1.0)
    _, after = tx.update(jnp.full(2, 1e20), tx.init(jnp.ones(2)), jnp.ones(2))
    assert ols.applied(after)
    with pytest.raises(ValueError, match=r"\[0\].nu.*square overflows: clip inside.*older state"):
        check_health(after)


def test_arrays_on_several_devices_are_read_once(monkeypatch):
    def spread(count, devices):
        layers = [jax.device_put(jnp.ones(i + 1), devices[i % len(devices)]) for i in range(count)]
        return ols.with_skipping(optax.adam(0.1)).init(layers)

    reads, real = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: reads.append(x) or real(x))
    for count, devices in ((4, 1), (12, 1), (12, 3)):
        opt_state = spread(count, jax.devices()[:devices])
        reads.clear()
        check_health(opt_state)
        _, flags = reads
        assert len(flags) == devices
    if hasattr(jax, "set_mesh"):
        with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
            check_health(opt_state)
    last = opt_state.inner_state[0].nu[-1].at[0].set(INF)
    bad = optax.tree.set(opt_state, nu=[*opt_state.inner_state[0].nu[:-1], last])
    with pytest.raises(ValueError, match=r"NaN or infinity at `\[0\].nu\[11\]`"):
        check_health(bad)


def test_a_concrete_state_is_checked_while_jax_traces_a_function():
    opt_state = ols.with_loss_scaling(optax.adam(0.1)).init(jnp.ones(3))
    bad = optax.tree.set(opt_state, mu=jnp.array([0, NAN, 0]))
    number = optax.tree.set(opt_state, loss_scale=8.0)

    def checked(x):
        for healthy in (opt_state, number):
            check_health(healthy, policy="dynamic")
        with pytest.raises(ValueError, match=r"NaN or infinity at `\[0\].mu`"):
            check_health(bad)
        with pytest.raises(TypeError, match="must hold values, got traced arrays"):
            check_health(jax.tree.map(lambda leaf: leaf * jnp.asarray(x, leaf.dtype), opt_state))
        with pytest.raises(TypeError, match="must hold values, got traced arrays"):
            check_health(opt_state._replace(inner_state=x * jnp.ones(3)))
        return x

    def run_all():
        jax.grad(checked)(1.0)
        jax.vmap(checked)(jnp.ones(2))
        jax.jit(checked)(1.0)
        jax.lax.scan(lambda carry, _: (checked(carry), None), 1.0, length=2)

    run_all()
    if hasattr(jax, "set_mesh"):  # since jax 0.7.1
        with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
            run_all()


def test_an_abstract_state_is_refused_by_name():
    abstract = jax.eval_shape(lambda: ols.with_loss_scaling(optax.adam(0.1)).init(jnp.ones(3)))
    with pytest.raises(TypeError, match=r"`opt_state` must hold values, got abstract arrays"):
        check_health(abstract)
    with pytest.raises(TypeError, match=r"`opt_state` must hold values, got abstract arrays"):
        check_health(guarded(abstract.inner_state))


def test_many_arrays_are_checked_in_small_programs_before_any_is_waited_for(monkeypatch):
    shapes = [(2,), (3, 2), *[(i,) for i in range(1, 12)]]
    arrays = [np.ones(shapes[i % len(shapes)], np.float32) for i in range(1200)]
    arrays = [*map(jnp.asarray, arrays), *arrays[:3]]
    calls, real = [], health._compiled  # noqa: SLF001
    monkeypatch.setattr(health, "_compiled", lambda group: calls.append(len(group)) or real(group))
    reads, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: reads.append(len(calls)) or get(x))
    check_health(guarded(arrays))
    assert (sum(calls), max(calls) <= 256) == (1200, True)
    assert reads == [0, len(calls)]
    for place in (0, 777, 1199, 1202):
        bad = arrays.copy()
        bad[place] = bad[place] * np.float32(INF)
        bad[1200:] = [bad[place]] * 3  # the first is named
        with pytest.raises(ValueError, match=rf"NaN or infinity at `\[{min(place, 1200)}\]`"):
            check_health(guarded(bad))


def test_arrays_of_different_meshes_and_of_numpy_are_checked():
    devices = np.array(jax.devices()[:2])
    meshes = [
        jax.sharding.Mesh(devices[order], (name,), axis_types=(kind,))
        for order in ([0, 1], [1, 0])
        for name in ("a", "b")
        for kind in (AxisType.Auto, AxisType.Explicit)
    ]
    arrays = [jax.device_put(jnp.ones(2), NamedSharding(m, P(*m.axis_names))) for m in meshes]
    check_health(guarded([arrays, np.ones(2), np.ones(2, jnp.bfloat16), "adam"]))
    with pytest.raises(ValueError, match=r"`\[1\]` of the inner"):
        check_health(guarded([arrays, np.array([1, NAN], jnp.bfloat16)]))


# --- nonfinite_report: which layer overflowed?


@pytest.mark.usefixtures("x64")
def test_the_report_counts_every_inexact_dtype_and_leaves_out_other_leaves():
    leaves = {
        "kernel": (jnp.ones((2, 2)), (0, 0, 4)),
        "bias": ([jnp.array([1.0, NAN, INF, -INF])], (1, 2, 4)),
        "float16": (jnp.array([INF, NAN, 1], jnp.float16), (1, 1, 3)),
        "bfloat16": (jnp.array([INF, NAN, 1], jnp.bfloat16), (1, 1, 3)),
        "e5m2": (jnp.array([INF, NAN, 1], jnp.float8_e5m2), (1, 1, 3)),
        "e4m3fn": (jnp.array([NAN, 1], jnp.float8_e4m3fn), (1, 0, 2)),
        "complex": (jnp.array([complex(0, INF), complex(NAN, INF), 1j]), (1, 1, 3)),
        "float64": (np.array([1e300, INF, NAN]), (1, 1, 3)),
        "scalar": (np.float32(INF), (0, 1, 1)),
        "python": (float("nan"), (1, 0, 1)),
        "empty": (jnp.zeros((0, 3)), (0, 0, 0)),
    }
    tree = {name: leaf for name, (leaf, _) in leaves.items()}
    report = jax.jit(lambda: nonfinite_report(not_numbers() | tree))()
    assert {name: tuple(map(int, counts)) for name, counts in report.items()} == {
        f"['{name}']" + ("[0]" if name == "bias" else ""): counts
        for name, (_, counts) in leaves.items()
    }
    assert {n.dtype.name for counts in report.values() for n in counts} == {"int32"}
    assert {type(counts) for counts in report.values()} == {diag.NonfiniteCounts}


def test_counts_of_arrays_with_more_elements_than_int32_do_not_overflow():
    # Lowered but not run: they would need 4 GB.
    large, fits = (jax.ShapeDtypeStruct((size,), jnp.float16) for size in (2**31, 2**31 - 1))
    lowered, usual = (jax.jit(nonfinite_report).lower(x).as_text() for x in (large, fits))
    assert "dense<2.14748352E+9>" in lowered
    assert "f32>" not in usual
    assert {n.dtype.name for n in jax.eval_shape(nonfinite_report, large)[""]} == {"int32"}
    jax.eval_shape(gradient_exponents, fits)


@pytest.mark.slow
def test_arrays_with_symbolic_shapes_are_counted():
    def counted(x):
        return nonfinite_report(x)[""], gradient_exponents(x)

    (n,) = export.symbolic_shape("n")
    exported = export.export(jax.jit(counted))(jax.ShapeDtypeStruct((n, 2), jnp.float32))
    report, exponents = exported.call(jnp.array([[0.0, NAN], [1e-9, INF], [1e6, 1.0]]))
    assert [int(count) for count in report] == [1, 1, 6]
    assert [int(count) for count in exponents[1:]] == [1, 1, 0, 2, 6]


def array_of(nan, inf, size):
    return np.array([NAN] * nan + [INF] * inf + [0.0] * (size - nan - inf), np.float32)


def test_a_report_prints_the_worst_array_first():
    sizes = {"a": (1, 0, 4), "b": (0, 0, 3), "c": (1, 1, 3), "d": (1, 0, 10)}
    report = jax.jit(nonfinite_report)({name: array_of(*size) for name, size in sizes.items()})
    assert (
        str(report)
        == repr(report)
        == """3 of 4 arrays are not finite:
  ['c']: 1 NaN and 1 infinite of 3 elements (66.7 %)
  ['a']: 1 NaN and 0 infinite of 4 elements (25 %)
  ['d']: 1 NaN and 0 infinite of 10 elements (10 %)"""
    )
    root = "  the root of the tree: 0 NaN and 2 infinite of 3 elements (66.7 %)"
    assert str(nonfinite_report(array_of(0, 2, 3))) == f"1 of 1 arrays are not finite:\n{root}"
    finite = nonfinite_report([array_of(0, 0, 3), array_of(0, 0, 0)])
    assert str(finite) == "0 of 2 arrays are not finite."


@pytest.mark.slow
def test_a_report_is_a_mapping_and_transformations_preserve_its_order():
    tree = {"z": jnp.ones((2, 3)), "a": jnp.array([[NAN, 1.0], [INF, NAN]])}

    def scanned(tree):
        return jax.lax.scan(lambda _, x: (None, nonfinite_report(x)), None, tree)[1]

    report = nonfinite_report(jax.tree.map(lambda x: x[1], tree))
    assert isinstance(report, Mapping)
    assert not isinstance(report, dict)
    for transformed in jax.vmap(nonfinite_report), jax.jit(jax.vmap(nonfinite_report)), scanned:
        last = jax.tree.map(lambda x: x[1], transformed(tree))
        assert list(last) == list(report) == ["['a']", "['z']"]
        assert last == report
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(report)]
    assert paths[1] == (jax.tree_util.DictKey("['a']"), jax.tree_util.GetAttrKey("inf"))


@pytest.mark.parametrize("report", [nonfinite_report, gradient_exponents])
def test_printing_never_raises_and_shows_shapes_if_values_cannot_be_read(report):
    x = {"w": jnp.ones((2, 3))}
    assert "int32[" not in repr(report(x))

    def shown_while_traced(x):
        found = report(x)
        assert "int32[]" in repr(found) == str(found)
        return found

    assert "int32[]" in repr(jax.eval_shape(shown_while_traced, x))
    stacked = jax.vmap(report)(x)
    assert "int32[2]" in repr(stacked)
    donated = report(x)
    jax.tree.map(lambda x: x.delete(), donated)
    assert "int32[]" in repr(donated)
    assert "str" in repr(jax.tree.map(lambda _: "x", donated))
    assert repr(jax.tree.map(lambda _: None, donated))


def test_exponents_print_as_percentages_of_all_elements():
    grads = jnp.array([0.0, 1e-9, 1e-6, 1.0, 1e6, NAN, INF, 2.0])
    assert (
        str(gradient_exponents(grads))
        == """8 elements, magnitudes from 2**-30 to 2**19:
  zero: 1 (12.5 %)
  flushed: 1 (12.5 %)
  subnormal: 1 (12.5 %)
  overflow: 2 (25 %)
  NaN or infinite: 2 (25 %)"""
    )
    assert str(gradient_exponents([])).startswith("0 elements:\n  zero: 0 (0 %)")
    assert "infinite" not in str(gradient_exponents(jnp.ones(3)))
    with pytest.raises(ValueError, match=r"got none\. 3 are NaN or infinite: `first_nonfinite`"):
        diag.suggest_loss_scale(gradient_exponents(jnp.array([NAN, INF, NAN, 0.0])))


# --- gradient_exponents: how large are the gradients, and does the loss scale fit them?


def numbers_of_every_size():
    """Return float32[64, 128] of random bits, including special values."""
    bits = np.random.default_rng(0).integers(0, 2**32, 64 * 128, dtype=np.uint32)
    special = [0.0, -0.0, INF, -INF, NAN, 65504, 65519, 65520, 65536]
    tiny = [2.0**-149, 3 * 2.0**-149, -(2.0**-126)]
    ties = [s * 2.0**-25 for s in (0.999, 1, 1.001)] + [2.0**-14 * (1 - 2.0**-11)]
    numbers = bits.view(np.float32)
    numbers[: len(special + tiny + ties)] = special + tiny + ties
    return numbers.reshape(64, 128)


NUMBERS = numbers_of_every_size()


def counts_of(*values, **settings):
    """Count the values, padded with NaN to one shape so that JAX compiles once."""
    padded = np.full(NUMBERS.shape, NAN, np.float32)
    padded.flat[: len(values)] = values
    return gradient_exponents(padded, **settings)


def exponents_by_numpy(x, dtype=np.float16, loss_scale=1.0):
    """Return the counts, computed from their definitions."""
    with np.errstate(all="ignore"):
        significand, exponent = np.frexp(np.abs(x[np.isfinite(x) & (x != 0)]))
        scale_significand, scale_exponent = np.frexp(np.float32(loss_scale))
        product = (significand * scale_significand).astype(np.float64)
        rounded = np.ldexp(product, exponent + scale_exponent).astype(dtype).astype(np.float64)
    tiny = float(ml_dtypes.finfo(dtype).tiny)
    return diag.GradientExponents(
        histogram=np.bincount(np.clip(exponent - 1, -149, 127) + 149, minlength=277),
        zero=np.sum(x == 0),
        flushed=np.sum(rounded == 0),
        subnormal=np.sum((rounded > 0) & (rounded < tiny)),
        overflow=np.sum(~np.isfinite(rounded)) + np.sum(np.isinf(x)),
        size=x.size,
    )


def assert_equal_counts(actual, expected):
    assert {field.dtype.name for field in actual} == {"int32"}
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# float8_e4m3fn has no infinity.
SMALL_DTYPES = np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*SMALL_DTYPES, np.float32])
def test_exponents_and_rounding_agree_with_numpy(dtype):
    compiled = jax.jit(lambda scale: gradient_exponents(NUMBERS, dtype=dtype, loss_scale=scale))
    scales = 1.0, 2.0**-20, 2.0**123, 2.0**126, 2.0**-126, 3000.7
    for loss_scale in (*scales, np.int32(8), jnp.int32(8), jnp.float16(8)):
        expected = exponents_by_numpy(NUMBERS, dtype, loss_scale)
        counts = gradient_exponents(NUMBERS, dtype=dtype, loss_scale=loss_scale)
        assert_equal_counts(counts, expected)
    assert_equal_counts(compiled(loss_scale), expected)


@pytest.mark.parametrize("dtype", SMALL_DTYPES)
def test_small_gradients_are_read_exactly(dtype):
    bits = 8 * np.dtype(dtype).itemsize
    x = np.arange(2**bits, dtype=f"uint{bits}").view(dtype)
    assert_equal_counts(gradient_exponents(jnp.asarray(x)), exponents_by_numpy(np.float32(x)))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_float64_gradients_are_read_exactly_and_outliers_count_in_the_outer_bins():
    bits = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    ties = 2.0**-25 * np.array([1 - 2.0**-40, 1, 1 + 2.0**-40])
    x = np.concatenate([bits.view(np.float64), np.float64(np.nan_to_num(NUMBERS.ravel())), ties])
    counts = gradient_exponents(jnp.asarray(x))
    assert_equal_counts(counts, exponents_by_numpy(x))
    assert counts.histogram[0] > 1000  # 1e-300 is not zero
    assert counts.histogram[-1] > 1000


def test_both_parts_of_a_complex_gradient_count_and_other_leaves_do_not():
    parts = jnp.array([complex(2.0, 1e-9), complex(0.0, INF)])
    tree = not_numbers() | {"complex": parts, "empty": jnp.zeros((0, 3)), "number": 4.0}
    counts = jax.jit(lambda: gradient_exponents(tree))()
    assert [int(n) for n in counts[1:]] == [1, 1, 0, 1, 5]
    assert counts.histogram[149 + 1] == counts.histogram[149 + 2] == 1
    assert int(gradient_exponents({}).size) == 0


@pytest.mark.parametrize("spec", [P("data", "model"), P(None, "model"), P()], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_an_array_sharded_over_eight_devices_is_counted_as_a_whole(axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    sharded = jax.device_put(NUMBERS, NamedSharding(mesh, spec))
    with jax.transfer_guard("disallow"):
        counts = jax.jit(gradient_exponents)({"w": sharded})
    assert_equal_counts(jax.device_get(counts), exponents_by_numpy(NUMBERS))
    assert counts.histogram.sharding.is_fully_replicated


# --- suggest_loss_scale: which loss scale fits?


@pytest.mark.parametrize("headroom", [1, 8])
@pytest.mark.parametrize("dtype", SMALL_DTYPES)
def test_the_suggested_scale_avoids_overflow_and_leaves_the_headroom(dtype, headroom):
    rng = np.random.default_rng(headroom)
    top = int(ml_dtypes.finfo(dtype).maxexp) - 1
    for power in rng.integers(top - 110, 60, size=5):  # the loss scale stays within 2**126
        x = np.float32(rng.lognormal(0, 3, size=100) * 2.0**power)
        scale = diag.suggest_loss_scale(counts_of(*x), headroom=headroom, dtype=dtype)
        assert int(counts_of(*x, dtype=dtype, loss_scale=scale).overflow) == 0
        assert np.frexp(scale)[0] == 0.5
        assert np.frexp(np.max(x.astype(np.float64) * scale))[1] - 1 == top - headroom


@pytest.mark.parametrize(
    ("value", "settings", "scale", "message"),
    [
        # Without headroom, gradients are scaled to the very top of the range.
        (1.0, {"headroom": 0}, 2.0**15, None),
        (2.0**-10, {}, 2.0**21, None),
        (np.float32(3e38), {}, 2.0 ** (15 - 127 - 4), None),
        (2.0**-115, {}, 2.0**126, None),
        # The result is clipped to the bounds of a policy.
        (2.0**-116, {}, 2.0**126, r"is 2\*\*127, but the limit is 2\*\*126\. .* by 2\*\*1\."),
        (1.0, {"headroom": 0, "dtype": np.float32}, 2.0**126, r"that fits is 2\*\*127"),
        (np.float32(3e38), {"headroom": 20}, 2.0**-126, r"is 2\*\*-132, .* by 2\*\*-6\."),
    ],
)
def test_the_suggested_scale_is_within_the_bounds_of_a_policy(value, settings, scale, message):
    with pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext():
        suggested = diag.suggest_loss_scale(counts_of(value, value / 1024), **settings)
    assert isinstance(suggested, float)
    assert suggested == ols.FixedLossScale(suggested).scale == scale


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.slow
def test_the_plot_shows_which_gradients_the_dtype_loses(tmp_path):
    powers = np.arange(-40, 30)
    counts = counts_of(*[0.0] * 30, *1.5 * 2.0**powers)
    upper, lower = matplotlib.figure.Figure().subplots(2)
    assert diag.plot_gradient_exponents(counts, lower) is lower
    assert not upper.has_data()
    shares = ["zero in float16: 15.0 %", "subnormal: 11.0 %", "normal: 30.0 %", "infinite: 14.0 %"]
    assert legend(lower) == shares
    assert [int(n) for n in counts[1:5]] == [30, 15, 11, 14]
    assert lower.get_title() == "30.0 % of the elements are exactly zero"
    assert ("log2" in lower.get_xlabel(), "%" in lower.get_ylabel()) == (True, True)
    heights = {bar.get_x(): bar.get_height() for bar in lower.patches if bar.get_width() == 1}
    assert {x: height for x, height in heights.items() if height} == dict.fromkeys(powers, 1)
    lower.figure.savefig(tmp_path / "a.png", dpi=50)
    tiny = diag.plot_gradient_exponents(counts_of(2.0**-149, 3e38), dtype=jnp.bfloat16)
    assert legend(tiny)[0] == "zero in bfloat16: 50.0 %"
    assert diag.plot_gradient_exponents(counts_of(0.0)).get_title().startswith("100.0 %")


def test_counts_added_on_the_host_may_exceed_int32():
    counts = jax.tree.map(lambda n: np.int64(n) * 2**33, counts_of(2.0**-10, 0.0))
    assert diag.suggest_loss_scale(counts) == 2.0**21
    assert diag.plot_gradient_exponents(counts).get_title().startswith("50.0 %")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "x", "y"),
    [
        ([2.0**-100, 2.0**100], (-101, 102), (0, 65)),
        (2.0 ** np.arange(-20, 15), (-31, 20), (0, 130 / 35)),
        (2.0 ** np.arange(-100, 100), (-101, 101), (0, 1.3)),
        ([0.0], (-31, 20), (0, 1.3)),
    ],
)
def test_the_plot_covers_the_range_of_the_dtype_and_all_gradients(values, x, y):
    ax = diag.plot_gradient_exponents(counts_of(*values))
    assert ax.get_xlim() == x
    assert ax.get_ylim() == pytest.approx(y)
    handles, _ = ax.get_legend_handles_labels()
    spans = [h.get_path().transformed(h.get_patch_transform()).get_extents() for h in handles]
    # float16: the smallest number is 2**-24, the smallest normal one 2**-14, the largest 65504.
    assert [(s.x0, s.x1) for s in spans] == [(-150, -25), (-25, -14), (-14, 16), (16, 129)]
