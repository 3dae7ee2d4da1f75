"""A float16 convolutional network with BatchNorm in Flax Linen, on handwritten digits.

The parameters and the loss are float32. The network computes in float16. The loss scale starts too
high, so the first steps are skipped. A skipped step leaves the step count, the BatchNorm statistics
and the average of the parameters unchanged.
"""

import argparse
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import optax_lossscale as ols
from optax_lossscale.flax import TrainState

BATCH = 128
POLICY = ols.DynamicLossScale(initial_scale=2.0**24, growth_interval=50)


class Network(nn.Module):
    """Two convolutions and a linear layer."""

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Return the logits."""
        x = images
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), strides=2)(x)
            x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


class State(TrainState):
    """The state that training carries from one step to the next."""

    batch_stats: Any
    average: Any  # moving average of the parameters, for testing


class Result(NamedTuple):
    """The result of a run."""

    accuracy: float
    skipped: int
    kept: bool  # whether every skipped step left the statistics and the average unchanged


@jax.jit
def train_step(state: State, images: jax.Array, labels: jax.Array) -> State:
    """Apply one step, or skip it."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses), updated["batch_stats"]

    loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, jnp.float16), has_aux=True)
    (loss, batch_stats), grads = loss_and_grads(state.opt_state, state.params)
    # On a skipped step, `batch_stats` and all other fields passed here keep their old values.
    new = state.apply_gradients(grads=grads, value=loss, batch_stats=batch_stats)
    # A value computed from the new state needs its own `tree_where`.
    average = optax.incremental_update(new.params, state.average, step_size=0.05)
    return new.replace(average=ols.tree_where(new.applied, average, state.average))


@jax.jit
def accuracy(state: State, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the accuracy of the averaged parameters."""
    variables = {"params": state.average, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images, train=False)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


def main(argv: list[str] | None = None) -> Result:
    """Train, print a table, and return the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    args = parser.parse_args(argv)

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1) / 16
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    images, test_images, labels, test_labels = map(jnp.asarray, split)

    network = Network()
    variables = network.init(jax.random.key(0), images[:1], train=False)
    average, tx = jax.tree.map(jnp.copy, variables["params"]), optax.adam(2e-3)
    state = State.create(
        apply_fn=network.apply, tx=tx, loss_scale=POLICY, average=average, **variables
    )
    kept, table = True, ["epoch  steps  skipped  loss scale  test accuracy"]
    for epoch in trange(args.epochs, unit="epoch", disable=None):  # None: in a terminal only
        order = jax.random.permutation(jax.random.key(epoch), len(images))
        for batch in order[: len(order) // BATCH * BATCH].reshape(-1, BATCH):
            old, state = state, train_step(state, images[batch], labels[batch])
            if not state.applied:
                old, new = ((s.step, s.params, s.batch_stats, s.average) for s in (old, state))
                kept &= jax.tree.all(jax.tree.map(np.array_equal, old, new))
        skipped = int(ols.loss_scale_state(state).total_skipped)
        correct = float(accuracy(state, test_images, test_labels))
        row = f"{epoch + 1:5}{state.step:7}{skipped:9}{state.loss_scale:12,.0f}{correct:15.1%}"
        table += [row] if epoch == 0 or (epoch + 1) % 4 == 0 else []
    print(*table, f"a skipped step changed nothing: {kept}", sep="\n")
    return Result(correct, skipped, kept)


if __name__ == "__main__":
    main()
