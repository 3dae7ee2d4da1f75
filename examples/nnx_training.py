"""A float16 convolutional network with BatchNorm in Flax NNX, on handwritten digits.

`nnx.Optimizer` accepts the wrapped optimizer. NNX updates BatchNorm's statistics in place, so the
training step saves them first and restores them if the step is skipped.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import optax_lossscale as ols

BATCH = 128


class Network(nnx.Module):
    """Two convolutions and a linear layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.linear = nnx.Linear(2 * 2 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Return the logits."""
        x = nnx.relu(self.norm1(self.conv1(images), use_running_average=not train))
        x = nnx.relu(self.norm2(self.conv2(x), use_running_average=not train))
        return self.linear(x.reshape(len(x), -1))


class Result(NamedTuple):
    """The result of a run."""

    accuracy: float
    skipped: int
    kept: bool  # whether every skipped step left parameters and statistics unchanged


def loss_fn(network: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy, unscaled."""
    logits = network(images, train=True)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@nnx.jit
def train_step(
    network: Network, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """Apply one step or skip it, and return whether it was applied."""
    old_stats = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    half_loss = ols.autocast(loss_fn, jnp.float16)
    loss_and_grads = ols.value_and_grad(half_loss, transform=nnx.value_and_grad)
    loss, grads = loss_and_grads(optimizer.opt_state, network, images, labels)
    optimizer.update(network, grads, value=loss)

    applied = ols.applied(optimizer.opt_state)
    new_stats = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    nnx.update(network, ols.tree_where(applied, new_stats, old_stats))
    return applied


@nnx.jit
def accuracy(network: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the accuracy."""
    return jnp.mean(jnp.argmax(network(images, train=False), axis=-1) == labels)


def main(argv: Sequence[str] | None = None) -> Result:
    """Train, test, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    args = parser.parse_args(argv)

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, split)
    train_images, test_images = (x.reshape(-1, 8, 8, 1) for x in (train_images, test_images))

    network = Network(nnx.Rngs(0))
    policy = ols.DynamicLossScale(initial_scale=2.0**24, growth_interval=50)
    tx = ols.with_loss_scaling(optax.adam(2e-3), policy)
    optimizer = nnx.Optimizer(network, tx, wrt=nnx.Param)

    kept = True
    for epoch in tqdm(range(args.epochs), unit="epoch", disable=None):
        order = jax.random.permutation(jax.random.key(epoch), len(train_images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            old = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(network)))
            if not train_step(network, optimizer, train_images[batch], train_labels[batch]):
                same = jax.tree.map(jnp.array_equal, old, nnx.to_pure_dict(nnx.state(network)))
                kept = kept and all(jax.tree.leaves(same))

    scale_state = ols.loss_scale_state(optimizer.opt_state)
    result = Result(
        accuracy=float(accuracy(network, test_images, test_labels)),
        skipped=int(scale_state.total_skipped),
        kept=kept,
    )
    print(f"test accuracy {result.accuracy:.1%}, loss scale {scale_state.loss_scale:,.0f}")
    print(f"parameters and statistics unchanged on {result.skipped} skipped steps: {result.kept}")
    return result


if __name__ == "__main__":
    main()
