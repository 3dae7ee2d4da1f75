"""Training differentiates through every rounding as if it was not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.integration

MODES_OF_TWO_ORDERS = {
    "forward": lambda f, x, along: jax.jvp(f, x, along)[1],
    "reverse": lambda f, x, _: jax.grad(f, (0, 1))(*x),
    "forward over reverse": lambda f, x, along: jax.jvp(jax.grad(f), x, along)[1],
    "reverse over forward": lambda f, x, along: jax.grad(lambda *x: jax.jvp(f, x, along)[1])(*x),
    "twice forward": lambda f, x, along: jax.jvp(lambda *x: jax.jvp(f, x, along)[1], x, along)[1],
}
ROUNDED = {
    "masters": ols.with_master_weights,
    "remainders": lambda tx: ols.with_master_weights(tx, remainders=True),
    "state": ols.with_bfloat16_state,
    "parameters": ols.with_stochastic_rounding,
}
# A first derivative that is wrong makes the second wrong.
HOW = [
    *(
        pytest.param(mode, True, marks=() if " " in mode else pytest.mark.exhaustive)
        for mode in MODES_OF_TWO_ORDERS
    ),
    ("reverse over forward", False),
]


def final(wrap, dtype, rate, w):
    """Train for three steps, and return a number that depends on all weights."""
    tx = wrap(optax.sgd(rate, momentum=0.9))
    w = w.astype(dtype)

    def weights(w, state):
        if isinstance(state, ols.MasterWeightsState):
            return ols.master_weights(state, w)
        return w.astype(jnp.float32)

    def step(carry, _=None):
        w, state = carry
        updates, state = tx.update(jnp.cos(3 * weights(w, state)), state, w)
        return (optax.apply_updates(w, updates), state), None

    carry, _ = jax.lax.scan(step, (w, tx.init(w)), length=3)
    return jnp.mean(jnp.sin(weights(*carry)))


@functools.cache
def differentiated(wrap, dtype, mode, *, compiled):
    """Differentiate by the learning rate and the initial parameters, one of which is zero."""
    start = jnp.linspace(-2, 2, 4097).astype(jnp.bfloat16).astype(jnp.float32)
    at = jnp.float32(0.1), start
    derivative = functools.partial(MODES_OF_TWO_ORDERS[mode], functools.partial(final, wrap, dtype))
    return (jax.jit(derivative) if compiled else derivative)(at, jax.tree.map(jnp.ones_like, at))


@functools.cache
def in_float32(mode, *, compiled):
    return differentiated(optax.with_extra_args_support, jnp.float32, mode, compiled=compiled)


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize(("mode", "compiled"), HOW)
def test_derivatives_pass_through_every_rounding(rounded, mode, compiled):
    dtype = jnp.float32 if rounded == "state" else jnp.bfloat16
    found = differentiated(ROUNDED[rounded], dtype, mode, compiled=compiled)
    expected = in_float32(mode, compiled=compiled)
    # Tangents of parameters, or those that are stored, are in bfloat16.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.03, atol=0.03 * float(jnp.abs(b).max()))
