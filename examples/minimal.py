"""Loss scaling in thirty seconds: gradients that underflow in float16, and the fix."""

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


def loss_fn(w, x, y):
    predicted = w.astype(jnp.float16) * x.astype(jnp.float16)
    return 1e-7 * jnp.mean((predicted.astype(jnp.float32) - y) ** 2)  # small, and float32


def train(loss_scale, x, y):
    tx = ols.with_loss_scaling(optax.adam(0.1), loss_scale)

    @jax.jit
    def step(w, opt_state):
        loss, grads = ols.value_and_grad(loss_fn)(opt_state, w, x, y)  # scaled gradients
        updates, opt_state = tx.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state

    w, opt_state = jnp.float32(0), tx.init(jnp.float32(0))
    for _ in range(200):
        w, opt_state = step(w, opt_state)
    return w


x = jnp.linspace(-1, 1, 128)
print(f"float16 alone:             w = {train(None, x, 3 * x):.2f}")
print(f"float16 with loss scaling: w = {train('dynamic', x, 3 * x):.2f}")
