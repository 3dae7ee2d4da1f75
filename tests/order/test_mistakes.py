"""The mistakes that only the table of docs/order.md shows do what it says; the remedies work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

W = jnp.float32(1)
SGD = optax.sgd(1.0)
NAN = jnp.float32(jnp.nan)


def updated(tx, *grads, **extra_args):
    """Return the updates of the steps, and the last state."""
    opt_state, found, update = tx.init(W), [], jax.jit(tx.update)
    for g in grads:
        updates, opt_state = update(jnp.float32(g), opt_state, W, **extra_args)
        found.append(float(updates))
    return found, opt_state


@pytest.mark.slow
def test_apply_if_finite_hides_overflows_until_it_gives_up_and_applies_nan_where_a_guard_skips():
    tx = optax.apply_if_finite(ols.with_loss_scaling(SGD, ols.DynamicLossScale(1024)), 2)
    for bad_steps, loss_scale in (1, 1024), (2, 1024), (3, 512):
        _, opt_state = updated(tx, *[jnp.inf] * bad_steps)
        assert ols.loss_scale_state(opt_state).loss_scale == loss_scale
    alone, steps = optax.apply_if_finite(SGD, 2), (1, np.nan, np.nan, np.nan)
    np.testing.assert_array_equal(updated(alone, *steps)[0], [-1, 0, 0, np.nan])
    assert updated(ols.with_skipping(SGD), *steps)[0] == [-1, 0, 0, 0]


def test_masked_outside_leaves_other_gradients_scaled():
    params, mask = {"a": W, "b": W}, {"a": True, "b": False}
    right = ols.with_loss_scaling(optax.masked(SGD, mask), 1024)
    wrong = optax.masked(ols.with_loss_scaling(SGD, 1024), mask)
    for tx, other in (right, 1.0), (wrong, 1024.0):
        opt_state = tx.init(params)
        scale_state = ols.loss_scale_state(opt_state)
        grads = ols.grad(lambda p: p["a"] + p["b"])(scale_state, params)
        updates, _ = tx.update(grads, opt_state, params)
        assert updates == {"a": -1.0, "b": other}


@pytest.mark.parametrize("scaled", [False, True])
def test_spike_takes_a_doubled_loss_scale_for_a_spike_of_a_scaled_loss(scaled):
    tx = ols.with_loss_scaling(SGD, ols.DynamicLossScale(growth_interval=300), skip_if=ols.Spike())

    def step(opt_state, loss):
        loss_scale = ols.loss_scale_state(opt_state).loss_scale
        value = loss * loss_scale if scaled else loss
        return tx.update(loss_scale, opt_state, W, value=value)[1], None

    losses = 1 + 0.05 * np.random.default_rng(0).normal(size=450)
    opt_state, _ = jax.lax.scan(step, tx.init(W), jnp.asarray(losses, jnp.float32))
    assert bool(ols.loss_scale_state(opt_state).total_skipped) is scaled


def test_a_loss_that_is_not_called_value_is_not_checked_and_warned_of_if_no_rule_asks_for_it():
    tx = ols.with_loss_scaling(SGD, 1024)
    assert updated(tx, 1024, value=NAN)[0] == [0.0]
    with pytest.warns(UserWarning, match=r"loss `value`: .* `skip_if=Spike\(.loss.\)`") as caught:
        assert updated(tx, 1024, 1024, loss=NAN)[0] == [-1.0, -1.0]
    assert len(caught) == 1
    tx.update(W, tx.init(W), W, loss=W + 0)  # said once, and warnings are errors here
    updated(ols.with_loss_scaling(SGD, 1024), 1024, value=W, loss=NAN)
    with pytest.warns(UserWarning, match="Optax calls the loss"), pytest.raises(TypeError):
        # Nobody can say which arguments a function in C takes.
        ols.with_skipping(SGD, max).update(W, ols.with_skipping(SGD, max).init(W), W, loss=W)
    for rule in ols.Spike("loss"), lambda _grads, _params, *, loss: loss > 9:
        updated(ols.with_loss_scaling(SGD, 1024, skip_if=rule), 1024, loss=W)


def test_parameters_are_not_checked():
    tx = ols.with_loss_scaling(SGD, 1)
    _, opt_state = tx.update(W, tx.init(NAN), NAN, value=W)
    assert ols.applied(opt_state)
    assert not ols.all_finite(NAN)


@pytest.mark.slow
@pytest.mark.integration
def test_a_huge_gradient_makes_adams_second_moment_infinite_unless_it_is_clipped():
    adam = optax.adam(1e-1)
    assert updated(ols.with_skipping(adam), 1e25, 1, 1)[0] == [0.0] * 3
    tx, params = ols.with_skipping(adam), jnp.ones(2)
    _, opt_state = jax.jit(tx.update)(jnp.array([1e25, 1.0]), tx.init(params), params)
    with pytest.raises(ValueError, match=r"`\[0\].nu` of the inner state"):
        ols.diagnostics.check_health(opt_state)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adam)
    assert updated(ols.with_skipping(clipped), 1e25, 1, 1)[0][-1] < -0.01
