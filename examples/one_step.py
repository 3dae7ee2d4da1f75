"""One training step for float32, bfloat16 and float16: only the line of the optimizer differs.

A network learns scikit-learn's digits. One batch of the run is broken. In any precision, the guard
around the optimizer skips its step. float16 also needs loss scaling, which the guard can do too.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import trange

import optax_lossscale as ols

Params = dict[str, jax.Array]
ADAMW = optax.adamw(3e-3)
OPTIMIZERS = {
    "float32": ols.with_skipping(ADAMW),
    "bfloat16": ols.with_skipping(ADAMW),
    "float16": ols.with_loss_scaling(ADAMW),
}
BROKEN_STEP = 5


class Result(NamedTuple):
    """How a run ended: loss and accuracy on unseen digits, skipped steps and loss scale."""

    loss: float
    accuracy: float
    skipped: int
    loss_scale: float


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Return the scores of the ten digits."""
    return jax.nn.relu(images @ params["hidden"]) @ params["output"]


def loss_fn(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    scores = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def train(dtype: str, steps: int) -> Result:
    """Train in one precision."""
    tx = OPTIMIZERS[dtype]

    @jax.jit
    def train_step(params: Params, opt_state: optax.OptState, batch: tuple) -> tuple:
        loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, dtype))
        loss, grads = loss_and_grads(opt_state, params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    shapes = {"hidden": (64, 128), "output": (128, 10)}
    params = {name: jnp.float32(rng.normal(0, 0.1, shape)) for name, shape in shapes.items()}
    opt_state = tx.init(params)
    for step in trange(steps, desc=dtype, unit="step", disable=None):
        chosen = rng.integers(0, 1500, 128)
        batch = images[chosen], labels[chosen]
        if step == BROKEN_STEP:
            batch[0][0, 0] = np.nan
        params, opt_state = train_step(params, opt_state, batch)
    unseen = images[1500:], labels[1500:]
    right = jnp.argmax(logits(params, unseen[0]), axis=1) == unseen[1]
    state = ols.loss_scale_state(opt_state)
    learned = float(loss_fn(params, *unseen)), float(right.mean())
    return Result(*learned, int(state.total_skipped), float(state.loss_scale))


def main(argv: list[str] | None = None) -> dict[str, Result]:
    """Train in each precision, print a table, and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(argv).steps
    results = {dtype: train(dtype, steps) for dtype in OPTIMIZERS}
    print(f"{'':<10}{'test loss':>10}{'accuracy':>10}{'skipped':>10}{'loss scale':>12}")
    for dtype, (loss, accuracy, skipped, loss_scale) in results.items():
        print(f"{dtype:<10}{loss:>10.4f}{accuracy:>10.1%}{skipped:>10}{loss_scale:>12,.0f}")
    return results


if __name__ == "__main__":
    main()
