"""Training with skipped steps differentiates like training with only the applied steps.

Training is a function of the learning rate, the initial parameters and the data. Hyper-gradients
and meta-learning differentiate it. The oracle is the bare optimizer, run only for the applied
steps.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import OPTIMIZERS, tiers

import optax_lossscale as ols

pytestmark = pytest.mark.integration

APPLIED = 3
SKIPPED = list(itertools.combinations(range(5), 2))  # of five steps
# `scale` multiplies the gradients, and `start` shifts the initial parameters.
THETA = {"scale": jnp.float32(1.25), "start": jnp.float32(0.75)}

# The other optimizers consist of the same parts.
KINDS = {"adafactor", "MultiSteps"}


def plan(skipped):
    """Return the number of applied steps before each step, and the term to add to its gradients."""
    bad = np.isin(np.arange(APPLIED + len(skipped)), skipped)
    return jnp.asarray(np.cumsum(~bad) - ~bad, jnp.float32), jnp.where(bad, jnp.inf, 0.0)


def train(tx, optimizer, loss_scale, theta, steps):
    """Return a number that depends on all parameters after the last step."""

    def step(carry, inputs):
        (params, state), (number, add) = carry, inputs
        grads = jax.tree.map(lambda g: g * theta["scale"], optimizer.grads(params, number))
        scaled = jax.tree.map(lambda g: g * loss_scale + add, grads)
        extra_args = optimizer.extra_args(number, value=theta["scale"], grad=scaled)
        updates, state = tx.update(scaled, state, params, **extra_args)
        return (optax.apply_updates(params, updates), state), None

    params = jax.tree.map(lambda p: p * theta["start"] + 0.125, optimizer.params())
    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), steps)
    return sum(jnp.sum(jnp.abs(p) ** 2 * (i + 1)) for i, p in enumerate(jax.tree.leaves(params)))


# Reverse mode is built on forward mode.
MODES = [jax.grad, pytest.param(jax.jacfwd, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("derivative", MODES)
@pytest.mark.parametrize("name", tiers(KINDS))
def test_skipped_steps_leave_no_trace_in_the_derivative(name, derivative):
    optimizer = OPTIMIZERS[name]
    bare = functools.partial(train, optimizer.plain(), optimizer, 1.0)
    try:
        expected = jax.jit(derivative(bare))(THETA, plan(()))
    except ValueError as error:
        assert "Reverse-mode differentiation does not work" in str(error)  # noqa: PT017
        pytest.skip(f"the bare optimizer has no derivative: {error}")
    if not all(jnp.isfinite(each) for each in expected.values()):
        assert name not in KINDS
        pytest.skip("the bare optimizer's derivative is not finite")
    tx = ols.with_loss_scaling(optimizer.make(), 8.0)
    wrapped = jax.jit(derivative(functools.partial(train, tx, optimizer, 8.0)))
    for skipped in SKIPPED:
        found = wrapped(THETA, plan(skipped))
        np.testing.assert_allclose(
            list(found.values()), list(expected.values()), rtol=1e-4, atol=1e-5, err_msg=skipped
        )


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
def test_a_learning_rate_that_is_differentiated_is_closed_over(order):
    def last(learning_rate, added):
        tx = ols.with_loss_scaling(optax.adam(learning_rate), 8.0)
        params = jnp.array([1.0, -2.0, 0.5])
        state = tx.init(params)
        for add in added:
            updates, state = tx.update(16 * params**3 + add, state, params)
            params = optax.apply_updates(params, updates)
        return jnp.sum(params**2)

    differentiate = jax.jit(jax.grad(last) if order == 1 else jax.grad(jax.grad(last)))
    added = jnp.array([jnp.inf, 0.0, jnp.nan, 0.0])
    found, expected = differentiate(0.1, added), differentiate(0.1, jnp.zeros(2))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert np.isfinite(found)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["value", "grad_norm"])
def test_the_state_of_a_rule_has_no_derivative(of):
    # The root of a deviation of zero has an infinite derivative, and 0 times infinity is NaN.
    tx = ols.with_skipping(optax.sgd(0.1), ols.Spike(of, window=4))

    def total(params, state):
        leaves = jax.tree.leaves(tx.update(params, state, value=jnp.sum(params**2)))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)

    params = jnp.array([1.0, 2.0])
    state = tx.init(params)
    for _ in range(2):  # which remember two values without a deviation
        _, state = tx.update(params, state, value=jnp.sum(params**2))
    by_state = jax.jit(jax.grad(total, 1, allow_int=True))(params, state)
    np.testing.assert_array_equal(by_state.rule_states[0].values, 0)


@pytest.mark.slow
def test_a_step_skipped_eagerly_and_the_loss_scale_have_no_derivative():
    normalized = optax.stateless(lambda grads, _: -0.1 * grads / jnp.linalg.norm(grads))
    tx = ols.with_loss_scaling(normalized, 8.0)

    def train(w, state, bad):
        for skipped in bad:
            grads = ols.grad(lambda w: jnp.sum(w**2))(state, w)
            updates, state = tx.update(jnp.full(2, jnp.inf) if skipped else grads, state, w)
            w = w + updates
        return jnp.sum(w**2)

    derivative, w = jax.grad(train, (0, 1), allow_int=True), jnp.ones(2)
    expected, _ = derivative(w, tx.init(w), (False, False))
    found, by_state = derivative(w, tx.init(w), (False, True, False))
    np.testing.assert_array_equal(found, expected)
    assert by_state.loss_scale_state.loss_scale == 0
