"""Where float16 alone begins to fail: the word model at other sizes and with another optimizer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.fidelity.tasks import Params, Task, words
from benchmarks.fidelity.training import FLOAT16, FLOAT32, make_train

VOCABULARIES = 512, 2048, 8192
BATCHES = 1024, 4096, 16384
OPTIMIZERS = {
    "Adam": None,  # as in the task
    "SGD with momentum": lambda: optax.sgd(1.0, momentum=0.9),
}

Cell = dict[str, Any]


def gradient_cells() -> list[Cell]:
    """Return the cells of the heat map: what float16 loses of the output layer's gradient."""
    return [
        {"vocabulary": vocabulary, "batch": batch}
        for vocabulary in VOCABULARIES
        for batch in BATCHES
    ]


def trained_cells() -> list[Cell]:
    """Return the cells that are trained."""
    return [{"optimizer": name, "batch": batch} for batch in BATCHES for name in OPTIMIZERS]


@functools.cache
def learned(vocabulary: int) -> Params:
    """Return the parameters after a short training in float32, in batches of 1024."""
    task = words(vocabulary=vocabulary, batch=1024)

    @jax.jit
    def train() -> Params:
        def train_step(carry: tuple, key: jax.Array) -> tuple:
            params, opt_state = carry
            grads = jax.grad(task.loss_fn)(params, task.data, key, jnp.float32)
            updates, opt_state = task.tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        params = task.init(jax.random.key(0))
        keys = jax.random.split(jax.random.key(1), task.steps)
        return jax.lax.scan(train_step, (params, task.tx.init(params)), keys)[0][0]

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


def measure_edge(results: dict[str, Any], save: Callable[[], Any]) -> None:
    """Add the cells that are not yet among the results, and save after each."""
    stored = results["edge"]
    for cell in gradient_cells()[len(stored["gradients"]) :]:
        params = learned(cell["vocabulary"])
        share = lost_share(params, words(**cell))
        stored["gradients"].append({**cell, "lost_share": share})
        save()
    (measured,) = (task["runs"] for task in results["tasks"] if task["name"] == "words")
    for cell in trained_cells()[len(stored["trained"]) :]:
        tx = OPTIMIZERS[cell["optimizer"]]
        task = words(batch=cell["batch"], tx=tx and tx())
        itself = tx is None and cell["batch"] == BATCHES[-1]  # measured for the table
        ends = {}
        for way in (FLOAT32, FLOAT16):
            run = measured[way][0] if itself else make_train(task, way)(0, lambda: None)._asdict()
            ends[way] = run["curve"][-1]
        stored["trained"].append({**cell, "results": ends})
        save()
