"""A small float16 network in Equinox, on handwritten digits.

Equinox returns a gradient of None for each leaf that is not an array: an activation function, a
size, or an omitted bias. Loss scaling passes None through.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import optax_lossscale as ols

BATCH = 128
TX = ols.with_loss_scaling(
    optax.adam(1e-3), ols.DynamicLossScale(initial_scale=2.0**24, growth_interval=50)
)


class Result(NamedTuple):
    """The result of a run."""

    accuracy: float
    skipped: int
    loss_scale: float


def loss_fn(model: eqx.Module, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    logits = jax.vmap(model)(images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@eqx.filter_jit
def train_step(
    model: eqx.Module, opt_state: Any, images: jax.Array, labels: jax.Array
) -> tuple[eqx.Module, Any]:
    """Apply one step, or skip it."""
    half_loss = ols.autocast(loss_fn, jnp.float16)
    loss_and_grads = ols.value_and_grad(half_loss, transform=eqx.filter_value_and_grad)
    loss, grads = loss_and_grads(opt_state, model, images, labels)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return eqx.apply_updates(model, updates), opt_state


def main(argv: Sequence[str] | None = None) -> Result:
    """Train, test, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    args = parser.parse_args(argv)

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, split)

    model = eqx.nn.MLP(64, 10, 128, depth=2, use_final_bias=False, key=jax.random.key(0))
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    for epoch in tqdm(range(args.epochs), unit="epoch", disable=None):
        order = jax.random.permutation(jax.random.key(epoch), len(train_images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            model, opt_state = train_step(
                model, opt_state, train_images[batch], train_labels[batch]
            )

    scale_state = ols.loss_scale_state(opt_state)
    predicted = jnp.argmax(jax.vmap(model)(test_images), axis=-1)
    result = Result(
        accuracy=float(jnp.mean(predicted == test_labels)),
        skipped=int(scale_state.total_skipped),
        loss_scale=float(scale_state.loss_scale),
    )
    print(f"test accuracy {result.accuracy:.1%}, loss scale {result.loss_scale:,.0f}")
    print(f"{result.skipped} steps skipped")
    return result


if __name__ == "__main__":
    main()
