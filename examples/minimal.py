"""Loss scaling in thirty seconds: gradients that underflow in float16, and the fix."""

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


def loss_fn(params, hidden, words):  # the last layer of a language model
    logits = hidden @ params
    return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()


def zeros(loss_scale):
    tx = ols.with_loss_scaling(optax.adam(1e-3), loss_scale)
    loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, jnp.float16))
    _, grads = jax.jit(loss_and_grads)(tx.init(params), params, hidden, words)
    return jnp.mean(grads == 0)


keys = jax.random.split(jax.random.key(0), 3)
params = 0.02 * jax.random.normal(keys[0], (64, 32768))  # a vocabulary of 32,768
hidden = jax.random.normal(keys[1], (2048, 64))  # one sequence of 2,048 words
words = jax.random.randint(keys[2], (2048,), 0, 32768)
print(f"float16 alone:             {zeros(None):.0%} of the gradient is zero")
print(f"float16 with loss scaling: {zeros('dynamic'):.0%} of the gradient is zero")
