"""Where float16 alone begins to fail: the word model at other sizes and with another optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.fidelity.tasks import Params, Task, words
from benchmarks.fidelity.training import FLOAT16, FLOAT32, fit, make_train

VOCABULARIES = 512, 2048, 8192
BATCHES = 1024, 4096, 16384
OPTIMIZERS = {
    "Adam": None,  # as in the task
    "SGD with momentum": lambda: optax.sgd(1.0, momentum=0.9),
}

GRADIENTS = [{"vocabulary": v, "batch": b} for v in VOCABULARIES for b in BATCHES]
TRAINED = [{"optimizer": name, "batch": b} for b in BATCHES for name in OPTIMIZERS]


def learned(vocabulary: int) -> Params:
    """Return the parameters after a short training in float32, in batches of 1024."""
    task = words(vocabulary=vocabulary, batch=1024)

    @jax.jit
    def train() -> Params:
        keys = jax.random.split(jax.random.key(1), task.steps)
        params = task.init(jax.random.key(0))
        return fit(task.tx, task.loss_with(task.data, jnp.float32), params, keys)[0][0]

    return train()


def lost_share(params: Params, task: Task) -> float:
    """Return the share of the output layer's gradient entries that are zero in float16 only."""

    @jax.jit
    def lost(params: Params, data: Any) -> jax.Array:
        key = jax.random.key(2)
        exact, rounded = (
            jax.grad(task.loss_fn)(params, data, key, dtype)["output"]["weights"]
            for dtype in (jnp.float32, jnp.float16)
        )
        return jnp.mean((rounded == 0) & (exact != 0))

    return float(lost(params, task.data))


def measure_edge() -> dict[str, Any]:
    """Return what float16 loses of the output layer's gradient, and how training ends."""
    params = {vocabulary: learned(vocabulary) for vocabulary in VOCABULARIES}
    shares = [lost_share(params[cell["vocabulary"]], words(**cell)) for cell in GRADIENTS]

    def ends(optimizer: str, batch: int) -> dict[str, float]:
        tx = OPTIMIZERS[optimizer]
        task = words(batch=batch, tx=tx and tx())
        return {way: make_train(task, way)(0).curve[-1] for way in (FLOAT32, FLOAT16)}

    return {
        "gradients": [
            c | {"lost_share": share} for c, share in zip(GRADIENTS, shares, strict=True)
        ],
        "trained": [cell | {"results": ends(**cell)} for cell in TRAINED],
    }
