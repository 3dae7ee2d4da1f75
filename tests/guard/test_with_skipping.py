"""The exact skip: any rule, any context, and no trace of a skipped step."""

import functools
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import LOSS, compiled_step, nbytes, temporaries
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits, types

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale._guard import spike_statistics

pytestmark = pytest.mark.integration

PARAMS = jax.tree.map(
    jnp.asarray,
    {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.float32([-0.0, 0.5])},
)
SGD = optax.sgd(1.0)


def above(limit):
    return lambda *_, value, **__: value > limit


class Countdown:
    """Lets two finite steps pass, and skips all later ones."""

    def init(self, params):
        return {"left": jnp.asarray(2, jnp.int32), "size": len(params)}

    def measure(self, grads, params, *, value):
        return jnp.sum(grads["b"]) + jnp.sum(params["b"]) + value

    def judge(self, state, measure):
        return (state["left"] == 0) & (measure > 0), {**state, "left": state["left"] - 1}


def test_a_rule_with_a_state_keeps_it_on_a_step_that_is_not_finite():
    tx = ols.with_skipping(SGD, Countdown())
    state, update, seen = tx.init(PARAMS), jax.jit(tx.update), []
    for grad, value in ((np.inf, 1), (1, np.nan), (1, 1), (1, 1), (1, 1)):
        grads = {**PARAMS, "b": jnp.array([grad, 1])}
        _, state = update(grads, state, PARAMS, value=value)
        seen.append((state.rule_states[0]["left"], state.loss_scale_state.consecutive_skipped))
    assert seen == [(2, 1), (2, 2), (1, 0), (0, 0), (-1, 1)]


@functools.partial(jax.jit, static_argnums=0)
def spikes(rule, values, state=None):
    """Return the last state, and for each value whether the rule skips it."""

    def step(state, value):
        measure = rule.measure({"w": value}, None, value=value, other=value)
        return rule.judge(state, measure)[::-1]

    start = rule.init(None) if state is None else state
    return jax.lax.scan(step, start, jnp.asarray(values, jnp.float32))


EPS = float(np.finfo(np.float32).eps)


def written_rule(values, window=128, sigmas=6.0, warmup=None, max_consecutive_skipped=None):
    """Return what is skipped and what is held by contract, in float64, one value after another."""
    held, skips, in_a_row = [], [], 0
    for value in values:
        ready = len(held) >= (window // 2 if warmup is None else warmup)
        mean, deviation = (np.mean(held), np.std(held)) if held else (0.0, 0.0)
        deviation = deviation if deviation > EPS * abs(mean) else 0.0
        skip = ready and value > mean + sigmas * deviation
        if max_consecutive_skipped is not None:
            skip = skip and in_a_row < max_consecutive_skipped
        in_a_row = in_a_row + 1 if skip else 0
        remembered = mean + 2 / 3 * sigmas * deviation if skip and deviation else value
        held = [*held, remembered][-window:]
        skips.append(bool(skip))
    return skips, held


@pytest.mark.parametrize(
    ("of", "arguments"),
    [
        ("value", {"window": 8, "sigmas": 3.0}),
        ("grad_norm", {"window": 9, "sigmas": 2.0, "warmup": 3}),
        ("other", {"window": 6, "sigmas": 1.75, "warmup": 6, "max_consecutive_skipped": 2}),
        ("value", {"window": 3, "sigmas": 1.6, "warmup": 1, "max_consecutive_skipped": 1}),
    ],
)
def test_a_spike_is_what_the_written_rule_says_at_every_magnitude(of, arguments):
    random = np.random.default_rng(0)
    values = random.normal(3, 0.5, 300).clip(0.1)
    values[random.random(300) < 0.2] *= 4
    values[200:] += 8
    for size in (1, 1e-37, 1e-30, 1e-20, 1e20, 1e30, 1e37):
        if of != "grad_norm" or size == 1:  # whose square must fit a float32
            state, skips = spikes(ols.Spike(of, **arguments), values * size)
            expected, held = written_rule(np.float64(np.float32(values * size)), **arguments)
            assert skips.tolist() == expected
            assert 0 < sum(expected) < 300
            np.testing.assert_allclose(state.values, held, rtol=1e-5)  # rounded


TINY = 1.00726193e-16


@pytest.mark.parametrize(
    ("how", "size"),
    [
        *(("jit", 1e30), ("eager", TINY), ("vmap", 1.0)),
        *(pytest.param("jit", size, marks=pytest.mark.exhaustive) for size in (TINY, 1.0)),
        *(pytest.param("eager", size, marks=pytest.mark.exhaustive) for size in (1.0, 1e30)),
        *(pytest.param("vmap", size, marks=pytest.mark.exhaustive) for size in (TINY, 1e30)),
    ],
)
def test_equal_values_have_no_deviation_and_a_level_half_as_high_again_is_learnt(how, size):
    rule = ols.Spike(window=16)

    def run(value):
        values = jnp.where(jnp.arange(60) < 20, value, 1.5 * value)
        full = jax.lax.scan(judged, rule.init(None), values[:20])[0]
        return spike_statistics(full)[1], jnp.sum(jax.lax.scan(judged, full, values[20:])[1])

    def judged(state, value):
        return rule.judge(state, value)[::-1]

    sizes = jnp.float32(size) * jnp.linspace(1, 3, 8, dtype=jnp.float32)
    if how == "eager":
        with jax.disable_jit():
            deviation, skipped = run(sizes[0])
    else:
        many = jax.vmap(run) if how == "vmap" else functools.partial(jax.lax.map, run)
        deviation, skipped = jax.jit(many)(sizes)
    assert not np.any(deviation)
    assert (skipped > 0).all()
    assert (skipped <= 20).all()


LOOPS = {
    "scan": lambda step, carry: jax.lax.scan(lambda c, _: (step(c), None), carry, length=3)[0],
    "fori_loop": lambda step, carry: jax.lax.fori_loop(0, 3, lambda _, c: step(c), carry),
    "while_loop": lambda step, carry: jax.lax.while_loop(lambda c: c[0] > 0.9, step, carry),
    "cond": lambda step, carry: jax.lax.cond(carry[0] > 1.5, step, lambda c: c, carry),
}


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize(
    "tx",
    [
        ols.with_skipping(optax.sgd(0.1)),
        ols.with_skipping(optax.sgd(0.1), ols.Spike("grad_norm", window=4)),
        ols.with_loss_scaling(optax.sgd(0.1), 2.0),
        ols.with_loss_scaling(optax.sgd(0.1), None),
        ols.with_loss_scaling(ols.with_bfloat16_state(optax.adam(0.1))),
    ],
)
def test_the_state_can_be_the_carry_of_a_loop_where_it_varies_over_devices(tx, kind):
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def step(carry):
        params, state = carry
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    def member(*carry):  # one member of an ensemble on each device
        carry = LOOPS[kind](step, jax.tree.map(lambda x: x[0], carry))
        return jax.tree.map(lambda x: x[None], carry)

    params = jnp.array([1.0, 2.0])
    state = jax.vmap(tx.init)(params)
    specs = {"mesh": mesh, "in_specs": jax.P("d"), "out_specs": jax.P("d")}
    after, _ = jax.jit(jax.shard_map(member, **specs))(params, state)
    assert (after != params).any()


def test_the_defaults_of_a_spike():
    twin = ols.Spike("value", window=128, sigmas=6.0, warmup=None)
    assert {ols.Spike(), twin} == {twin}  # frozen, and so hashable
    values = [1.0, 1.1] * 32 + [9.0]
    assert not spikes(ols.Spike(), values[2:])[1][-1]  # half the window is the warm-up
    assert spikes(ols.Spike(), values)[1].tolist() == [False] * 64 + [True]


def noise(steps):
    """Return numbers whose mean is 0 and whose standard deviation is 1."""
    random = np.random.default_rng(0).normal(size=steps)
    return (random - random.mean()) / random.std()


@pytest.mark.parametrize(("rise", "least", "most"), [(20, 10, 30), (1e3, 60, 100), (1e4, 100, 135)])
def test_a_level_that_rises_for_good_is_learnt_within_a_window(rise, least, most):
    values = np.r_[noise(128), rise + noise(400)] + 3 * rise
    _, skips = spikes(ols.Spike(), values)
    assert least <= skips.sum() <= most
    assert not skips[-200:].any()
    _, skips = spikes(ols.Spike(), np.r_[np.zeros(128), np.full(50, rise * 1e-20)])
    assert skips[128]
    assert not skips[-30:].any()


def test_one_spike_hardly_moves_the_threshold():
    for above, skipped in ((6.2, False), (6.6, True)):
        _, skips = spikes(ols.Spike(), np.r_[noise(128), 100, above])
        assert skips[-2:].tolist() == [True, skipped]


def test_equal_values_are_no_spikes_in_spite_of_their_rounded_mean_but_one_above_is():
    rows = (0.1, 0.10001), (1e-30, 1.0001e-30), (3e4, 3.0001e4), (-0.7, -0.6999), (0, 1e-30)
    for (value, above), times in itertools.product(rows, (1, 50)):
        _, skips = spikes(ols.Spike(window=7, warmup=1), [value] * times + [above])
        assert skips.tolist() == [False] * times + [True], value


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 3e4])
def test_a_spike_among_equal_values_is_remembered_whole(value):
    state, skips = spikes(ols.Spike(window=4), [value] * 3 + [6 * value + 1e-20])
    assert skips[-1]
    np.testing.assert_allclose(state.values[-1], 6 * value + 1e-20, rtol=1e-6)


@pytest.mark.slow
def test_a_spike_judges_a_state_of_numpy_or_python():
    rule = ols.Spike(window=4, warmup=2)
    state, _ = spikes(rule, [1, 1.1])
    restored = ols.SpikeState(np.float64(state.values), np.int64(2), 0)
    for measure in (1.2, 9.0, np.nan):
        expected, result = (jax.tree.leaves(rule.judge(s, measure)) for s in (state, restored))
        np.testing.assert_array_equal(np.hstack(result), np.hstack(expected))


def test_a_spike_computes_its_statistics_once():
    rule = ols.Spike()
    program = str(jax.make_jaxpr(rule.judge)(rule.init(None), 1.0))
    assert program.count(" reduce_max[") == 1


class Hidden:
    """An object that JAX converts to an array."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


@pytest.mark.parametrize("run", [jax.jit, lambda update: update])
def test_a_measure_may_be_an_object_that_converts_to_an_array(run):
    rule = Countdown()
    rule.measure = lambda *_, value: Hidden(value)
    tx = ols.with_skipping(SGD, skip_if=rule)
    _, state = run(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.float32(3))
    assert ols.applied(state)
    assert state.rule_states[0]["left"] == 1


@pytest.mark.parametrize("held", [-5, 9, 2**30])
def test_a_damaged_count_is_repaired(held):
    rule = ols.Spike(window=8)
    state, _ = spikes(rule, [1, 1.1] * 8)
    repaired, _ = spikes(rule, [1, 1.1] * 8, state._replace(held=jnp.int32(held)))
    assert_same_bits(repaired, state)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_measure_that_is_not_finite_is_skipped_and_never_remembered(bad):
    rule = ols.Spike("other", window=4, warmup=1, max_consecutive_skipped=1)
    state, skips = spikes(rule, [1, 1, bad, 1, bad])
    assert skips.tolist() == [False, False, True, False, True]
    values = jnp.array([0, 1, 1, 1], jnp.float32)
    assert_same_bits(state, type(state)(values, jnp.int32(3), jnp.int32(0)))


# Each with how many of the seven steps it skips beside the two that are not finite.
RULES = [(None, 0), (above(3), 2), (ols.Spike(window=4), 0), ([above(3), ols.Spike(window=4)], 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "more"), RULES, ids=["none", "function", "spike", "a list"])
def test_both_guards_do_the_same_and_a_rule_does_not_lower_the_loss_scale(rule, more):
    policy = ols.DynamicLossScale(8.0, loss_patience=9)
    tx, other = ols.with_loss_scaling(SGD, policy, skip_if=rule), ols.with_skipping(SGD, rule)
    state, other_state = tx.init(PARAMS), other.init(PARAMS)
    step, other_step = (jax.jit(each.update, donate_argnums=1) for each in (tx, other))
    for value, grad in ((1, 1), (5, 1), (np.nan, 1), (1, -np.inf), (1, 1), (4, 1), (1, 1)):
        grads = jax.tree.map(lambda p, g=grad: p * np.float32(g), PARAMS)
        found, state = step(ols.scale_loss(grads, state), state, PARAMS, value=value)
        expected, other_state = other_step(grads, other_state, PARAMS, value=value)
        assert ols.applied(state) == ols.applied(other_state)
        assert_same_bits((found, state.rule_states), (expected, other_state.rule_states))
    scale, growth, _, *counts = state.loss_scale_state
    # A rule skips finite steps, which count towards growth; `with_skipping` counts as
    # `FixedLossScale`.
    assert (scale, growth) == (4, 3)
    alone = other_state.loss_scale_state
    assert_same_bits(counts, list(alone[3:]))
    assert (*alone[:3], alone.total_skipped) == (1, 3, 0, 2 + more)


@pytest.mark.slow
def test_a_step_is_skipped_without_a_trace_if_any_rule_says_so_and_all_of_them_remember_it():
    rules = above(3), ols.Spike("other", window=4, warmup=2), lambda *_, other, **__: other < 0
    tx = ols.with_skipping(optax.MultiSteps(optax.adamw(0.1), 2), rules)
    state, update, skipped = tx.init(PARAMS), jax.jit(tx.update), []
    for value, other in [(1, 1), (1, 1.1), (5, 1), (1, 9), (1, 1), (1, -1)]:
        before = state.inner_state
        updates, state = update(PARAMS, state, PARAMS, value=value, other=other)
        skipped.append(not ols.applied(state))
        if skipped[-1]:
            nothing = jax.tree.map(lambda p: -jnp.zeros_like(p), PARAMS)
            assert_same_bits((updates, state.inner_state), (nothing, before))
    assert skipped == [False, False, True, True, False, True]
    assert state.rule_states[1].values[0] == 1
    assert 1.1 < state.rule_states[1].values[1] < 9  # a spike, remembered lower
    assert_same_bits(state.rule_states[1].values[2:], jnp.array([1.0, -1.0]))


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize("runner", ["vmap", "shard_map", "check_vma"])
@pytest.mark.parametrize(("rule", "skipped"), [(above(3), 1), (ols.Spike(window=2, warmup=1), 0)])
def test_all_members_of_an_axis_skip_together_after_one_collective(rule, skipped, runner):
    tx = ols.with_skipping(optax.sgd(1.0, momentum=0.9), rule, axis_name="i")
    # In float32, 41 * (1 / 41) is less than 1, and XLA computes a mean like that.
    n = 41 if runner == "vmap" else 4

    def step(grads, loss):
        params = jnp.zeros(2)
        return tx.update(grads, tx.init(params), params, value=loss)[1]

    def shard(grads, loss):
        return jax.tree.map(lambda x: x[None], step(grads[0], loss[0]))

    if runner == "vmap":
        run = jax.jit(jax.vmap(step, axis_name="i"))
    else:
        mesh = jax.sharding.Mesh(jax.devices()[:4], ("i",))
        specs = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}
        run = jax.jit(jax.shard_map(shard, check_vma=runner == "check_vma", **specs))
        run = run.lower(jnp.ones((n, 2)), jnp.ones(n)).compile()
        assert run.as_text().count(" all-reduce(") == 1
    bad = jnp.ones((n, 2)).at[2, 0].set(jnp.nan)
    assert run(bad, jnp.ones(n)).loss_scale_state.total_skipped.tolist() == [1] * n
    state = run(jnp.ones((n, 2)), jnp.full(n, 3.0).at[:2].set([0, 6]))
    assert state.loss_scale_state.total_skipped.tolist() == [skipped] * n
    if isinstance(rule, ols.Spike):  # the mean of the losses
        np.testing.assert_allclose(state.rule_states[0].values, [[0, 3]] * n, rtol=1e-6)


@pytest.mark.needs_xla
@pytest.mark.usefixtures("optimized")
@pytest.mark.slow
def test_a_step_takes_next_to_no_memory():
    shapes = [jax.ShapeDtypeStruct((512, 256), jnp.float32)] * 3
    adamw = optax.adamw(1e-3)
    plain = temporaries(compiled_step(adamw, shapes))
    for rule, gradients in ((None, 0), (ols.Spike(), 0), (ols.Spike("grad_norm"), 1)):
        ours = temporaries(compiled_step(ols.with_skipping(adamw, rule), shapes, value=LOSS))
        assert ours <= plain + (0.02 + gradients) * nbytes(shapes)
    theirs = temporaries(compiled_step(optax.apply_if_finite(adamw, 3), shapes))
    assert theirs >= plain + nbytes(shapes)


def test_metrics_and_the_flag_for_loops_count_the_skips():
    healthy = ols.with_skipping(SGD, above(0)).init(PARAMS)
    counts = {"growth_count": 51, "consecutive_skipped": 51, "total_skipped": 52}
    stalled = optax.tree.set(healthy, **{name: jnp.int32(count) for name, count in counts.items()})
    assert diagnostics.metrics(stalled) == {"loss_scale": 1, "applied": False} | counts
    is_stalled = jax.jit(diagnostics.is_stalled)
    assert (is_stalled(healthy), is_stalled(stalled)) == (False, True)
    assert not diagnostics.is_stalled(stalled, max_consecutive_skipped=51)
    assert not diagnostics.is_stalled(healthy, max_consecutive_skipped=0)


def test_a_measure_with_a_loop_sees_zeros_for_nonfinite_gradients():
    class Halvings(NamedTuple):  # a tuple, but not one of rules
        limit: float

        def init(self, _params):
            return ()

        def measure(self, grads, _params):
            start = jnp.max(grads), jnp.float32(0)
            return jax.lax.while_loop(lambda c: c[0] > 1, lambda c: (c[0] / 2, c[1] + 1), start)[1]

        def judge(self, state, halvings):
            return halvings > self.limit, state

    tx = ols.with_skipping(SGD, Halvings(3))
    state, update = tx.init(jnp.ones(2)), jax.jit(tx.update)
    for largest, is_applied in ((8, True), (16, False), (jnp.inf, False)):
        assert ols.applied(update(jnp.array([1.0, largest]), state)[1]) == is_applied


def test_the_norm_of_the_gradients_leaves_out_fp8_metadata():
    tx = ols.with_skipping(SGD, ols.Spike("grad_norm", window=2))
    grads = {"w": jnp.array([3.0, 4.0]), "_overwrite_with_gradient": {"scale": jnp.full(4, 1e4)}}
    _, state = jax.jit(tx.update)(grads, tx.init(grads))
    np.testing.assert_array_equal(state.rule_states[0].values, [0, 5])
    assert ols.Spike("grad_norm").measure(grads | {"count": jnp.arange(3)}) == 5


@pytest.mark.usefixtures("x64")
def test_a_spike_keeps_its_dtypes_with_64_bits_and_strict_promotion():
    four, three, six = np.int64(4), np.int64(3), np.float64(6)
    rule = ols.Spike(window=four, warmup=three, sigmas=six, max_consecutive_skipped=three)
    tx, params = ols.with_skipping(SGD, rule), jnp.ones(2, jnp.float32)
    state = tx.init(params)
    with jax.numpy_dtype_promotion("strict"):
        after = jax.jit(tx.update)(params, state, params, value=jnp.float32(1))[1]
    assert ols.applied(after)
    assert types(after) == types(state)


def test_a_rule_that_changes_its_state_is_named():
    judge = lambda *_: (jnp.bool_(False), jnp.int32(0))  # noqa: E731
    rule = SimpleNamespace(init=lambda _: jnp.float32(0), measure=lambda *_: 0, judge=judge)
    tx = ols.with_skipping(SGD, rule)
    with pytest.raises(TypeError, match="one dtype in both trees") as raised:
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    assert raised.value.__notes__[0].startswith("This is the state of namespace(")


@pytest.mark.filterwarnings("ignore:`params` are")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_a_good_step_equals_the_inner_optimizers_bit_for_bit_in_every_dtype(dtype):
    inner = optax.sgd(0.5, momentum=0.9)
    tx = ols.with_skipping(inner)
    smallest = jnp.finfo(dtype).smallest_subnormal
    grads = jnp.array([1.5, -0.0, smallest, jnp.finfo(dtype).max]).astype(dtype)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    expected, inner_state = jax.jit(inner.update)(grads, inner.init(grads))
    assert_same_bits((updates, state.inner_state), (expected, inner_state))


@pytest.mark.parametrize("loss_scale", [8.0, 0.25, 3.0])
def test_the_state_of_a_guard_that_scales_is_unscaled_once(loss_scale):
    tx, guard_that_scales = ols.with_skipping(SGD), ols.with_loss_scaling(SGD, loss_scale)
    grads = jnp.array([1.5, -0.75], jnp.bfloat16)
    scaled = start = guard_that_scales.init(jnp.ones(2))
    for given in (grads * jnp.bfloat16(loss_scale), grads):
        updates, scaled = jax.jit(tx.update)(given, scaled)
        assert_same_bits(updates, SGD.update(grads, SGD.init(grads))[0])
        assert scaled.loss_scale_state.loss_scale == 1
    for before in (start, scaled):
        _, after = tx.update(jnp.full(2, jnp.inf, jnp.bfloat16), before)
        assert not ols.applied(after)
        assert after.loss_scale_state.loss_scale == 1
    # A finite gradient that is infinite in its own dtype once it is unscaled skips the step.
    updates, state = tx.update(jnp.float16(6e4), start)
    assert ols.applied(state) == (loss_scale > 1)
    assert np.isfinite(updates)
    assert ols.applied(guard_that_scales.update(jnp.float32(3e38), start)[1]) == (loss_scale > 1)
