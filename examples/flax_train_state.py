"""A float16 convolutional network with BatchNorm in Flax Linen, on handwritten digits.

The parameters and the loss are float32. The network's activations and their gradients are float16.
The loss scale starts too high, so the first steps are skipped. A skipped step leaves the step
count, the BatchNorm statistics and the average of the parameters unchanged.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import optax_lossscale as ols
from optax_lossscale.flax import TrainState

BATCH = 128


class Network(nn.Module):
    """Two convolutions and a linear layer, computed in float16."""

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Return the logits in float32."""
        x = images
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), strides=2, dtype=jnp.float16)(x)
            x = nn.BatchNorm(not train, momentum=0.9, dtype=jnp.float16)(x)
            x = nn.relu(x)
        x = x.reshape(len(x), -1)
        return nn.Dense(10, dtype=jnp.float16)(x).astype(jnp.float32)


class State(TrainState):
    """What training carries from one step to the next."""

    batch_stats: Any
    average: Any  # moving average of the parameters, for testing


class Result(NamedTuple):
    """The result of a run."""

    accuracy: float
    steps: int  # applied
    skipped: int
    kept: bool  # whether every skipped step left the statistics and the average unchanged


def create_state(key: jax.Array, images: jax.Array) -> State:
    """Return the state before the first step."""
    network = Network()
    variables = network.init(key, images[:1], train=False)
    return State.create(
        apply_fn=network.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        average=jax.tree.map(jnp.copy, variables["params"]),
        tx=optax.adam(2e-3),
        loss_scale=ols.DynamicLossScale(initial_scale=2.0**24, growth_interval=50),
    )


@jax.jit
def train_step(state: State, images: jax.Array, labels: jax.Array) -> State:
    """Apply one step, or skip it."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses), updated["batch_stats"]

    loss_and_grads = ols.value_and_grad(loss_fn, has_aux=True)
    (loss, batch_stats), grads = loss_and_grads(state.opt_state, state.params)
    old = state
    # On a skipped step, `batch_stats` and all other fields passed here keep their old values.
    state = state.apply_gradients(grads=grads, value=loss, batch_stats=batch_stats)
    # A value computed from the new state needs its own `tree_where`.
    average = optax.incremental_update(state.params, old.average, step_size=0.05)
    return state.replace(average=ols.tree_where(state.grads_finite, average, old.average))


@jax.jit
def accuracy(state: State, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the accuracy of the averaged parameters."""
    variables = {"params": state.average, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images, train=False)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


@jax.jit
def same(old: Any, new: Any) -> jax.Array:
    """Return whether two trees are equal."""
    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(jnp.array_equal, old, new))))


def main(argv: Sequence[str] | None = None) -> Result:
    """Train, test, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    args = parser.parse_args(argv)

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, split)
    train_images, test_images = (x.reshape(-1, 8, 8, 1) for x in (train_images, test_images))

    state = create_state(jax.random.key(0), train_images)
    kept = True
    for epoch in tqdm(range(args.epochs), unit="epoch", disable=None):
        order = jax.random.permutation(jax.random.key(epoch), len(train_images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            old, state = state, train_step(state, train_images[batch], train_labels[batch])
            if not state.grads_finite:
                guarded = [(s.step, s.params, s.batch_stats, s.average) for s in (old, state)]
                kept = kept and bool(same(*guarded))

    result = Result(
        accuracy=float(accuracy(state, test_images, test_labels)),
        steps=int(state.step),
        skipped=int(ols.loss_scale_state(state).total_skipped),
        kept=kept,
    )
    print(f"test accuracy {result.accuracy:.1%}, loss scale {float(state.loss_scale):.0f}")
    print(f"{result.steps} steps applied, {result.skipped} skipped")
    print(f"skipped steps left statistics, average and step count unchanged: {result.kept}")
    return result


if __name__ == "__main__":
    main()
