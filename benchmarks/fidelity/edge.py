"""Where plain float16 begins to fail: the word model with other sizes and another optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.fidelity.tasks import Params, Task, words
from benchmarks.fidelity.training import FLOAT16, FLOAT32, fit, make_train
from benchmarks.page import Report, table

VOCABULARIES = 512, 2048, 8192
BATCHES = 1024, 4096, 16384
OPTIMIZERS = {"Adam": None, "SGD": optax.sgd(1.0, momentum=0.9)}  # None: the task's


def learned(vocabulary: int) -> Params:
    """Return the parameters after a short training in float32, with batches of 1024."""
    task = words(vocabulary=vocabulary, batch=1024)
    keys = jax.random.split(jax.random.key(1), task.steps)
    params = task.init(jax.random.key(0))
    return fit(task.tx, task.loss_with(task.data, jnp.float32), params, keys)[0][0]


def lost_share(params: Params, task: Task) -> float:
    """Return the share of entries in the output layer's gradient that are zero only in float16."""

    @jax.jit
    def lost(params: Params, data: Any) -> jax.Array:
        key = jax.random.key(2)
        exact, rounded = (
            jax.grad(task.loss_fn)(params, data, key, dtype)["output"]["weights"]
            for dtype in (jnp.float32, jnp.float16)
        )
        return jnp.mean((rounded == 0) & (exact != 0))

    return float(lost(params, task.data))


def behind(batch: int, tx: Any) -> float:
    """Return the test loss after training in float16 minus the test loss in float32."""
    task = words(batch=batch, tx=tx)
    rounded, exact = (make_train(task, way)(0)["curve"][-1] for way in (FLOAT16, FLOAT32))
    return rounded - exact


def measure(*, quick: bool) -> Report:
    """Return a table: what float16 loses of the gradient, and how training ends, by batch."""
    vocabularies, batches = ((512,), (64,)) if quick else (VOCABULARIES, BATCHES)
    params = {vocabulary: learned(vocabulary) for vocabulary in vocabularies}
    head = ["batch", *(f"zeros in %, {v:,} words" for v in vocabularies)]
    head += [f"loss, {name}" for name in OPTIMIZERS]
    rows = []
    for batch in batches:
        lost = [lost_share(each, words(vocabulary=v, batch=batch)) for v, each in params.items()]
        ends = [behind(batch, tx) for tx in OPTIMIZERS.values()]
        shares = [f"{100 * share:.1f}" for share in lost]
        rows.append([f"{batch:,}", *shares, *(f"{end:+.3f}" for end in ends)])
    return Report(table(head, rows, texts=()))
