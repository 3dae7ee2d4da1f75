"""Gradient accumulation with loss scaling, in two ways, on handwritten digits in float16.

`wrapped`: `with_loss_scaling(optax.MultiSteps(...))`. Each micro-batch is checked separately: an
overflow drops only that micro-batch, and the loss scale may change after each one. The order
matters. With `MultiSteps` outside, an overflow would stay in its accumulator forever.

`window`: the pure functions. The loss scale is constant within a window, while the scaled gradients
are summed. At the end of the window, the sum is checked once, and the loss scale and the parameters
are updated once. A bad micro-batch drops the whole window. The table counts skipped micro-batches
for the first way, and skipped windows for the second.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import optax_lossscale as ols

MICRO_BATCH, WINDOW = 32, 4  # 128 images in a window
POLICY = ols.DynamicLossScale(initial_scale=2.0**24, growth_interval=100)
INNER = optax.adam(1e-3)
WRAPPED = ols.with_loss_scaling(optax.MultiSteps(INNER, WINDOW), POLICY)

Batch = tuple[jax.Array, jax.Array]  # with a leading axis over the micro-batches of a window
Carry = tuple[Any, Any]  # parameters, optimizer state


def init_params(key: jax.Array) -> list[jax.Array]:
    """Return the weights of three layers, in float32."""
    draw = jax.nn.initializers.he_normal()
    shapes = [(64, 128), (128, 128), (128, 10)]
    return [draw(k, shape) for k, shape in zip(jax.random.split(key, 3), shapes, strict=True)]


def forward(params: list[jax.Array], images: jax.Array) -> jax.Array:
    """Return the logits."""
    *hidden, last = params
    x = images
    for weights in hidden:
        x = jax.nn.relu(x @ weights)
    return x @ last


def loss_fn(params: list[jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy, unscaled."""
    losses = optax.softmax_cross_entropy_with_integer_labels(forward(params, images), labels)
    return jnp.mean(losses)


loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, jnp.float16))


@jax.jit
def wrapped(carry: Carry, window: Batch) -> Carry:
    """Train on a window, with one call of the wrapper for each micro-batch."""

    def micro_step(carry: Carry, batch: Batch) -> tuple[Carry, None]:
        params, opt_state = carry
        loss, grads = loss_and_grads(opt_state, params, *batch)
        updates, opt_state = WRAPPED.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), None

    return jax.lax.scan(micro_step, carry, window)[0]


@jax.jit
def window(carry: Carry, window: Batch) -> Carry:
    """Train on a window, with one step for the mean gradient of its micro-batches."""
    params, (scale_state, inner_state) = carry

    def accumulate(total: Any, batch: Batch) -> tuple[Any, None]:
        _, grads = loss_and_grads(scale_state, params, *batch)  # the same loss scale
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), window)
    total, grads_finite = ols.unscale_and_check(total, scale_state)
    grads = jax.tree.map(lambda g: g / WINDOW, total)
    updates, new_inner = INNER.update(grads, inner_state, params)
    new = optax.apply_updates(params, updates), new_inner
    params, inner_state = ols.tree_where(grads_finite, new, (params, inner_state))
    return params, (ols.update(scale_state, grads_finite, POLICY), inner_state)


def main(argv: list[str] | None = None) -> dict[str, tuple]:
    """Train in both ways, print a table, and return its last rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    args = parser.parse_args(argv)

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    params = init_params(jax.random.key(0))
    starts = {wrapped: WRAPPED.init(params), window: (ols.init(POLICY), INNER.init(params))}
    results, table = {}, ["way      epoch  updates  skipped        loss scale  test accuracy"]
    for train_window, opt_state in starts.items():
        name, carry = train_window.__name__, (params, opt_state)
        for epoch in trange(args.epochs, unit="epoch", desc=name, disable=None):
            order = jax.random.permutation(jax.random.key(epoch), len(images))
            for rows in order[: len(order) // 128 * 128].reshape(-1, WINDOW, MICRO_BATCH):
                carry = train_window(carry, (images[rows], labels[rows]))
            predicted = jnp.argmax(forward(carry[0], test_images), axis=-1)
            applied, state = optax.tree.get(carry[1], "count"), ols.loss_scale_state(carry[1])
            correct, skipped = float(jnp.mean(predicted == test_labels)), int(state.total_skipped)
            row = f"{name:9}{epoch + 1:5}{applied:9}{skipped:9}{state.loss_scale:18,.0f}"
            table += [f"{row}{correct:15.1%}"] if epoch in {0, args.epochs - 1} else []
        results[name] = correct, int(applied), skipped
    print(*table, sep="\n")
    return results


if __name__ == "__main__":
    main()
