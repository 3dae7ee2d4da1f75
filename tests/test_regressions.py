"""Bugs of other libraries that this one must not have, each by name.

Where the other library is installed and imports fast, its own behaviour is shown next to ours, so
that a test says so when the bug is gone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_where import assert_same_bits

import optax_lossscale as ols

pytestmark = pytest.mark.integration

NAN, INF = float("nan"), float("inf")


def scales(policy, flags, *, jit=True):
    """Return the loss scale after each step."""
    update = jax.jit(policy.update) if jit else policy.update
    state, history = policy.init(), []
    for grads_finite in flags:
        state = update(state, jnp.asarray(grads_finite))
        history.append(float(state.loss_scale))
    return history


def steps(tx, params, true_grads):
    """Return the params after each step under jit, with gradients scaled as they should be."""
    update, state, history = jax.jit(tx.update), tx.init(params), []
    for true_grad in true_grads:
        factor = getattr(state, "loss_scale_state", ols.init(1.0)).loss_scale
        grads = jax.tree.map(lambda p, g=true_grad, s=factor: jnp.full_like(p, g) * s, params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history, state


# The factor.


@pytest.mark.parametrize("jit", [False, True])
def test_jmp_loses_its_floor_under_jit(jit):
    # JMP's `tree_unflatten` drops `min_loss_scale`, which then is 1 again.
    policy = ols.DynamicLossScale(initial_scale=4, min_scale=0.25)
    assert scales(policy, [False] * 6, jit=jit) == [2.0, 1.0, 0.5, 0.25, 0.25, 0.25]

    jmp = pytest.importorskip("jmp")
    theirs = jmp.DynamicLossScale(
        jnp.float32(4), min_loss_scale=jnp.float32(0.25), counter=jnp.int32(0)
    )
    adjust = jax.jit(lambda ls, finite: ls.adjust(finite)) if jit else lambda ls, f: ls.adjust(f)
    for _ in range(6):
        theirs = adjust(theirs, jnp.asarray(False))
    assert theirs.loss_scale == (1.0 if jit else 0.25)


def test_flax_grows_one_step_late():
    # Flax compares the count with the interval before it adds the step: N + 1 finite steps.
    flags = [True] * 6
    assert scales(ols.DynamicLossScale(1, growth_interval=2), flags) == [1, 2, 2, 4, 4, 8]

    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    theirs = dynamic_scale.DynamicScale(growth_interval=2, scale=jnp.float32(1), fin_steps=0)
    history = []
    for _ in flags:
        theirs, _, _, _ = theirs.value_and_grad(lambda p: p**2)(jnp.float32(1))
        history.append(float(theirs.scale))
    assert history == [1, 1, 2, 2, 2, 4]


def test_deepspeed_grows_one_step_late_the_first_time():
    # The first growth takes `window + 1` clean steps.
    policy = ols.DynamicLossScale(256, growth_interval=2)
    assert scales(policy, [True] * 4) == [256, 512, 512, 1024]


def test_mpx_unscales_with_the_factor_that_has_already_grown():
    # Every growth step reported half of the gradient and of the loss.
    policy = ols.DynamicLossScale(8, growth_interval=2)
    tx = ols.with_loss_scaling(optax.scale(1.0), policy)
    loss_and_grads = ols.value_and_grad(lambda p: 3 * p)

    @jax.jit
    def step(state):
        value, grads = loss_and_grads(state, jnp.float32(1))
        updates, state = tx.update(grads, state, value=value)
        return value, updates, state

    state, history = tx.init(jnp.float32(1)), []
    for _ in range(4):
        value, updates, state = step(state)
        history.append((float(value), float(updates), float(state.loss_scale_state.loss_scale)))
    assert history == [(3, 3, 8), (3, 3, 16), (3, 3, 16), (3, 3, 32)]


def test_mpx_leaves_the_powers_of_two():
    # It clips the factor at float16's maximum, 65504, after which scaling is no longer exact.
    policy = ols.DynamicLossScale(2.0**15, growth_interval=1)
    factors = scales(policy, [True, True, False, False, True] + [True] * 20)
    assert all(np.frexp(factor)[0] == 0.5 for factor in factors)


def test_keras_is_stuck_at_infinity():
    # Without an upper bound the factor grows to infinity, half of which is infinity.
    policy = ols.DynamicLossScale(2.0**126, max_scale=2.0**126, growth_interval=1)
    assert scales(policy, [True, True, False, False]) == [2.0**126, 2.0**126, 2.0**125, 2.0**124]


def test_keras_shrinks_to_zero():
    # Without a floor the factor halves until it is subnormal, and its reciprocal infinite.
    for policy in (ols.DynamicLossScale(4), ols.DynamicLossScale(4, min_scale=2.0**-126)):
        factors = scales(policy, [False] * 300)
        assert factors[-1] == policy.min_scale
        assert np.isfinite(1 / np.float32(factors[-1]))


def test_a_counter_of_skipped_steps_wraps_around():
    # As an int32 does after 2**31 - 1 steps: a run that long would seem never to have skipped.
    state = ols.LossScaleState(
        jnp.float32(1), *(jnp.full((), np.iinfo(np.int32).max) for _ in range(4))
    )
    after = ols.update(state, False, "dynamic")
    assert after.total_skipped == after.consecutive_skipped == np.iinfo(np.int32).max


def test_flax_compiles_a_second_time_for_a_state_of_python_numbers():
    # Flax starts from a Python int and a Python float and returns arrays.
    tx = ols.with_loss_scaling(optax.adam(0.1))
    params, traces = jnp.ones(2), []

    @jax.jit
    def step(grads, state, params):
        traces.append(1)
        return tx.update(grads, state, params)

    state = tx.init(params)
    for grad in (1.0, INF, 1.0, NAN):
        _, state = step(jnp.full(2, grad), state, params)
    assert len(traces) == 1

    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    theirs, traces = dynamic_scale.DynamicScale(), []

    @jax.jit
    def their_step(theirs):
        traces.append(1)
        return theirs.value_and_grad(lambda p: p**2)(jnp.float32(1))[0]

    for _ in range(3):
        theirs = their_step(theirs)
    assert len(traces) == 2


def test_flax_a_weak_factor_becomes_float16_next_to_a_float16_loss():
    # A Python float of 65536 is infinite in float16.
    for state in (ols.init(65536), ols.init(1)._replace(loss_scale=65536.0)):
        with pytest.warns(UserWarning, match="float16"):
            scaled = ols.scale_loss(jnp.float16(1), state)
        assert_same_bits(scaled, jnp.float32(65536))


def test_torch_backs_off_for_a_loss_that_is_nan_until_gradients_underflow():
    # One bad sample whose loss is NaN says nothing about the loss scale.
    tx = ols.with_loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(1024))
    params = jnp.ones(2)
    state = tx.init(params)
    for value in [NAN, 1.0] * 20:
        _, state = tx.update(jnp.full(2, value), state, params, value=jnp.float32(value))
    assert state.loss_scale_state.loss_scale == 1024


# The check.


def test_a_norm_as_the_check_skips_gradients_that_are_finite():
    # The sum of their squares overflows, and so does their sum.
    tx = ols.with_loss_scaling(optax.sgd(1.0), 1.0)
    params = jnp.zeros(2)
    updates, state = jax.jit(tx.update)(jnp.array([3e38, 3e38]), tx.init(params), params)
    np.testing.assert_array_equal(updates, np.full(2, -3e38, np.float32))
    assert state.loss_scale_state.total_skipped == 0


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 8191])
def test_a_maximum_as_the_check_misses_nan_on_cpu(at):
    # XLA:CPU drops NaN from the maximum of an array of 4096 elements and more.
    tx = ols.with_loss_scaling(optax.sgd(1.0))
    grads = np.ones(8192, np.float32)
    grads[at] = NAN
    _, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert state.loss_scale_state.total_skipped == 1


def test_a_clip_in_front_hides_the_overflow():
    # optax.clip turns an infinite gradient into 1: the factor never backs off, the step is wrong.
    params, grads = jnp.zeros(2), jnp.array([INF, 8.0])
    outside = optax.chain(optax.clip(1.0), ols.with_loss_scaling(optax.sgd(1.0), 8.0))
    updates, state = outside.update(grads, outside.init(params), params)
    np.testing.assert_array_equal(updates, [-0.125, -0.125])
    assert ols.loss_scale_state(state).total_skipped == 0

    inside = ols.with_loss_scaling(optax.chain(optax.clip(1.0), optax.sgd(1.0)), 8.0)
    updates, state = inside.update(grads, inside.init(params), params)
    assert_same_bits(updates, jnp.full(2, -0.0))
    assert ols.loss_scale_state(state).total_skipped == 1


# The skip.


def test_optax_multisteps_outside_keeps_a_nan_in_its_accumulator_for_ever():
    # It resets the accumulator by a product with zero. Around the wrapper nothing can help it.
    micro_steps = [1.0, 2.0, NAN, 1.0, 1.0, 1.0, 1.0, 1.0]
    params = jnp.float32(0)
    tx = ols.with_loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(2, growth_interval=100))

    outside = optax.MultiSteps(tx, 2).gradient_transformation()
    state, update = outside.init(params), jax.jit(outside.update)
    for grad in micro_steps:
        factor = ols.loss_scale_state(state).loss_scale
        _, state = update(grad * factor, state, params)
    assert np.isnan(state.acc_grads)
    assert ols.loss_scale_state(state).total_skipped == 3  # each call since the NaN
    assert ols.loss_scale_state(state).loss_scale == 1.0  # down at its floor

    inside = ols.with_loss_scaling(
        optax.MultiSteps(optax.sgd(1.0), 2), ols.DynamicLossScale(2, growth_interval=100)
    )
    history, state = steps(inside, params, micro_steps)
    assert [float(p) for p in history] == [0, -1.5, -1.5, -1.5, -2.5, -2.5, -3.5, -3.5]
    assert state.loss_scale_state.total_skipped == 1


def test_optax_multisteps_outside_hides_the_overflow_if_told_to_skip():
    params = jnp.float32(0)
    tx = ols.with_loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(2))
    outside = optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation()
    _, state = outside.update(jnp.float32(INF), outside.init(params), params)
    assert ols.loss_scale_state(state).loss_scale == 2.0  # the factor has not seen it


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_optax_apply_if_finite_refuses_half_precision(dtype):
    # Adam's moments of float16 params become float32 when they meet float32 gradients, and the two
    # branches of its `lax.cond` differ.
    params, grads = jnp.ones(2, dtype), jnp.ones(2, jnp.float32)
    theirs = optax.apply_if_finite(optax.adam(0.1), 5)
    with pytest.raises(TypeError, match="cond"):
        theirs.update(grads, theirs.init(params), params)

    ours = ols.with_loss_scaling(optax.adam(0.1), ols.DynamicLossScale(1))
    state = ours.init(params)
    for grad in (1.0, NAN, 1.0):
        _, new_state = jax.jit(ours.update)(grads * grad, state, params)
        assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)
        state = new_state
    assert optax.tree.get(state, "count") == 2


def test_optax_apply_if_finite_gives_up_and_applies_nan():
    params = jnp.float32(0)
    bad = [1.0, NAN, NAN, NAN, NAN, 1.0]
    history, _ = steps(optax.apply_if_finite(optax.sgd(1.0), 2), params, bad)
    assert [float(p) for p in history[:3]] == [-1, -1, -1]
    assert np.isnan(history[3])

    history, _ = steps(ols.with_loss_scaling(optax.sgd(1.0)), params, bad)
    assert [float(p) for p in history] == [-1, -1, -1, -1, -1, -2]


def test_optax_apply_if_finite_clears_the_sign_of_zero():
    # It returns positive zeros, and -0.0 + 0.0 is 0.0. (Eagerly: XLA drops the addition.)
    params = jnp.array([-0.0, 1.0])
    theirs = optax.apply_if_finite(optax.sgd(1.0), 5)
    updates, _ = theirs.update(jnp.full(2, NAN), theirs.init(params), params)
    assert not np.signbit(optax.apply_updates(params, updates)[0])

    ours = ols.with_loss_scaling(optax.sgd(1.0))
    for transform in (jax.jit, lambda f: f):
        updates, _ = transform(ours.update)(jnp.full(2, NAN), ours.init(params), params)
        assert_same_bits(optax.apply_updates(params, updates), params)


@pytest.mark.parametrize(
    "optimizer", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)], ids=["adam", "momentum"]
)
def test_paddle_feeds_zeros_and_the_optimizer_still_moves(optimizer):
    # With gradients of zero Adam takes 0.067 of its step, decays its moments and counts.
    params = jnp.array([1.0])
    fed, fed_state = steps(optimizer, params, [1.0, 0.0])
    assert fed[1] != fed[0]
    ours, state = steps(ols.with_loss_scaling(optimizer, 8.0), params, [1.0, INF])
    assert_same_bits(ours[1], ours[0])
    _, expected = steps(optimizer, params, [1.0])
    assert_same_bits(state.inner_state, expected)
    assert any(
        np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (fed_state, expected)), strict=True)
    )


def test_a_line_search_loops_on_nan():
    # It runs on a bad step too, whose result is thrown away, and must end.
    tx = ols.with_loss_scaling(optax.lbfgs(memory_size=2), ols.DynamicLossScale(8))
    params = jnp.array([1.0, -2.0])

    def loss(p):
        return jnp.sum(p**2)

    @jax.jit
    def step(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value, grad=grads / 8, value_fn=loss)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    after, state = step(params, state, jnp.array([NAN, INF]), jnp.float32(NAN))
    assert_same_bits(after, params)
    value, grads = jax.value_and_grad(loss)(params)
    after, state = step(params, state, grads * 8, value)
    assert loss(after) < loss(params)


def test_zeroed_gradients_are_no_update_of_lookahead():
    # Lookahead's updates have both its slow and its fast params, its gradients the fast ones only.
    params = optax.LookaheadParams.init_synced({"w": jnp.array([-0.0, 1.0])})
    tx = ols.with_loss_scaling(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    updates, _ = tx.update({"w": jnp.full(2, NAN)}, tx.init(params), params)
    assert_same_bits(optax.apply_updates(params, updates), params)


def test_a_cast_of_the_whole_state_fails_for_prng_keys():
    # They have no `astype`, and must not move on a skipped step either.
    tx = ols.with_loss_scaling(optax.noisy_sgd(0.1, key=jax.random.key(0)), 1.0)
    params = jnp.ones(2)
    before = tx.init(params)
    _, after = jax.jit(tx.update)(jnp.full(2, NAN), before, params)
    assert_same_bits(after.inner_state, before.inner_state)
    _, after = jax.jit(tx.update)(jnp.ones(2), before, params)
    assert not np.array_equal(
        *(jax.random.key_data(optax.tree.get(s, "rng_key")) for s in (before, after))
    )


def test_torch_schedules_advance_on_skipped_steps():
    # Its schedulers are stepped apart from the optimizer. Ours counts applied steps.
    tx = ols.with_loss_scaling(optax.sgd(lambda count: 1.0 / (1 + count)), 1.0)
    history, _ = steps(tx, jnp.float32(0), [1.0, NAN, NAN, 1.0])
    assert [float(p) for p in history] == [-1.0, -1.0, -1.0, -1.5]


# Several devices.


def test_flax_replicas_drift_apart_without_a_minimum_over_the_axis():
    params = jnp.ones((2, 2))
    grads = np.ones((2, 2), np.float32)
    grads[1] = INF
    drifting, agreeing = (
        jax.pmap(
            functools.partial(_first_step, optax.sgd(0.1), axis_name=axis_name),
            axis_name="replicas",
            devices=jax.devices()[:2],
        )(grads, params)
        for axis_name in (None, "replicas")
    )
    np.testing.assert_array_equal(drifting, [2.0**15, 2.0**14])
    np.testing.assert_array_equal(agreeing, [2.0**14, 2.0**14])


def _first_step(inner, grads, params, *, axis_name):
    tx = ols.with_loss_scaling(inner, axis_name=axis_name)
    _, state = tx.update(grads, tx.init(params), params)
    return state.loss_scale_state.loss_scale


def test_a_mean_of_scaled_float16_gradients_overflows_and_one_of_unscaled_ones_does_not():
    # 40000 twice is infinite in float16. What the inner optimizer is given is float32.
    mean = optax.stateless(lambda updates, _: jax.lax.pmean(updates, "replicas"))
    tx = ols.with_loss_scaling(mean, 2.0, axis_name="replicas")

    def step(grads):
        updates, state = tx.update(grads, tx.init(grads), grads)
        return updates, state.loss_scale_state.total_skipped

    grads = np.full((2, 1), 40000, np.float16)
    updates, skipped = jax.pmap(step, axis_name="replicas", devices=jax.devices()[:2])(grads)
    np.testing.assert_array_equal(updates, np.full((2, 1), 20000, np.float32))
    np.testing.assert_array_equal(skipped, [0, 0])
