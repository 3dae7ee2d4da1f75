"""Loss scaling in thirty seconds: gradients that underflow in float16, and the fix."""

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


def loss_fn(params, hidden, words):  # the last layer of a language model
    logits = hidden @ params
    return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()


def first_step(dtype, loss_scale=None):
    tx = ols.with_loss_scaling(optax.adam(1e-3), loss_scale)
    loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, dtype))
    _, grads = loss_and_grads(tx.init(params), params, hidden, words)
    return tx.update(grads, tx.init(params), params)[0]


keys = jax.random.split(jax.random.key(0), 3)
params = 0.02 * jax.random.normal(keys[0], (64, 32768))  # a vocabulary of 32,768
hidden = jax.random.normal(keys[1], (2048, 64))  # one sequence of 2,048 words
words = jax.random.randint(keys[2], (2048,), 0, 32768)
exact = first_step(jnp.float32)
steps = {
    "bfloat16": first_step(jnp.bfloat16),
    "float16 alone": first_step(jnp.float16),
    "float16 with loss scaling": first_step(jnp.float16, "dynamic"),
}
for name, step in steps.items():
    error = jnp.linalg.norm(step - exact) / jnp.linalg.norm(exact)
    print(f"{name}: off by {error:.0%}")
