"""A gradient penalty in float16: the inner gradient has its own loss scale state, or shares one.

`docs/gradient_penalty.md` explains the recipe.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import INT32_MAX

import optax_lossscale as ols

pytestmark = pytest.mark.integration  # Optax's Adam

STEPS = 200
KEYS = jax.random.split(jax.random.key(0), 5)
PARAMS = [
    0.35 * jax.random.normal(KEYS[0], (8, 32)),
    0.18 * jax.random.normal(KEYS[1], (32, 32)),
    0.18 * jax.random.normal(KEYS[2], (32, 1)),
]
X = jax.random.normal(KEYS[3], (64, 8))
Y = jnp.sin(X @ jax.random.normal(KEYS[4], (8, 1)) / 3)


def network(params, x, dtype):
    *hidden, last = (w.astype(dtype) for w in params)
    x = x.astype(dtype)
    for w in hidden:
        x = jnp.tanh(x @ w)
    return (x @ last).astype(jnp.float32)


def penalty(params, inner_state, dtype):
    """Return the penalty, and whether the gradient in it is finite."""
    _, scaled = ols.value_and_grad(lambda x: network(params, x, dtype).sum())(inner_state, X)
    grads, grads_finite = ols.unscale_and_check(scaled, inner_state)
    norms = jnp.sqrt(jnp.sum(grads**2, axis=-1) + 1e-12)
    return jnp.mean((norms - 1) ** 2), grads_finite


def loss_fn(params, inner_state, dtype):
    added, inner_finite = penalty(params, inner_state, dtype)
    return jnp.mean((network(params, X, dtype) - Y) ** 2) + 0.1 * added, inner_finite


@functools.partial(jax.jit, static_argnames=("policy", "dtype", "shared"))
def train(policy, *, dtype=jnp.float16, shared=False):
    """Return the parameters and both states after the last step, and of each step the loss."""
    tx = ols.with_loss_scaling(optax.adam(3e-3), policy)

    def step(carry, _):
        params, opt_state, inner_state = carry
        if shared:
            inner_state = opt_state.loss_scale_state
        (loss, inner_finite), grads = ols.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params, inner_state, dtype
        )
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        inner_state = ols.update(inner_state, inner_finite, policy)
        applied = opt_state.loss_scale_state.consecutive_skipped == 0
        return (optax.apply_updates(params, updates), opt_state, inner_state), (loss, applied)

    start = PARAMS, tx.init(PARAMS), ols.init(policy)
    (params, opt_state, inner_state), (losses, applied) = jax.lax.scan(step, start, length=STEPS)
    return params, opt_state.loss_scale_state, inner_state, losses, applied


@functools.cache
def losses_in_float32():
    """Return the loss of float32 training before each step."""
    return train(ols.FixedLossScale(1), dtype=jnp.float32)[3]


def assert_trained_as_in_float32(params, applied):
    """Compare with as many steps in float32: the batch is the same in each."""
    loss, _ = jax.jit(loss_fn, static_argnums=2)(params, ols.init(1), jnp.float32)
    np.testing.assert_allclose(loss, losses_in_float32()[applied.sum()], rtol=0.01)
    assert loss < losses_in_float32()[0] / 20


def test_an_inner_gradient_with_its_own_state_trains_as_in_float32():
    policy = ols.DynamicLossScale(growth_interval=5)
    params, state, inner_state, _, applied = train(policy)
    assert_trained_as_in_float32(params, applied)
    assert 20 < inner_state.total_skipped <= state.total_skipped < STEPS / 3
    # Each overflow of the inner gradient is forgiven: the outer loss scale finds its own level.
    assert state.loss_scale > 16 * inner_state.loss_scale


def test_a_shared_state_recovers_from_every_overflow_of_the_inner_gradient():
    policy = ols.DynamicLossScale(growth_interval=5)
    params, state, _, _, applied = train(policy, shared=True)
    assert_trained_as_in_float32(params, applied)
    assert 20 < state.total_skipped < STEPS / 3
    assert applied[-6:].any()


def test_a_shared_state_deadlocks_without_an_end_to_the_patience():
    """So did the rule that never backs off for the loss."""
    policy = ols.DynamicLossScale(growth_interval=5, loss_patience=INT32_MAX)
    _, state, _, _, _ = train(policy, shared=True)
    assert state.consecutive_skipped == state.total_skipped > 150


@jax.jit
def gradient_of_a_small_penalty(state, inner_state):
    def small(params):
        return 1e-6 * penalty(params, inner_state, jnp.float16)[0]

    _, scaled = ols.value_and_grad(small)(state, PARAMS)
    return ols.unscale_and_check(scaled, state)[0]


@pytest.mark.parametrize("exponent", [0, 8, 14])
def test_a_shared_loss_scale_cancels_in_the_gradient_of_the_penalty(exponent):
    shared = ols.init(2.0**exponent)
    for grad in gradient_of_a_small_penalty(shared, shared):
        np.testing.assert_array_equal(grad, 0)
    expected = jax.grad(lambda p: 1e-6 * penalty(p, shared, jnp.float32)[0])(PARAMS)
    own = gradient_of_a_small_penalty(ols.init(2.0 ** (exponent + 16)), shared)
    for grad, true in zip(own, expected, strict=True):
        np.testing.assert_allclose(grad, true, atol=0.01 * jnp.abs(true).max())
