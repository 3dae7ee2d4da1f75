"""The ways to train, and how to run one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from benchmarks.fidelity.tasks import Task
from examples.digits import zero_share

# The dtype of the forward and backward passes, and the loss scale. `None` neither scales nor
# checks. The default growth interval is 2000 finite steps, longer than these runs. With 25, the
# scale climbs until steps overflow and are skipped, far more often than in long training.
FLOAT32, BFLOAT16, FLOAT16, SCALED = "float32", "bfloat16", "float16", "float16 + loss scaling"
WAYS = {
    FLOAT32: (jnp.float32, None),
    BFLOAT16: (jnp.bfloat16, None),
    FLOAT16: (jnp.float16, None),
    SCALED: (jnp.float16, ols.DynamicLossScale(growth_interval=25)),
}


def ways(task: Task) -> list[str]:
    """Return the ways to train a task. bfloat16 has float32's range, so weight 1 is enough."""
    return [way for way in WAYS if way != BFLOAT16 or task.weight == 1]


class Run(NamedTuple):
    """The result of one seed."""

    curve: list[float]  # the metric at each evaluation
    zero_share: float  # of the gradients' entries, over all steps
    skipped: int  # steps
    loss_scale: float  # at the end


def make_train(task: Task, way: str) -> Callable[[int, Callable[[], Any]], Run]:
    """Return a function that trains from a seed, and calls a callback after each evaluation."""
    dtype, loss_scale = WAYS[way]
    tx = ols.with_loss_scaling(task.tx, loss_scale)
    chunk = task.steps // task.evaluations

    @jax.jit
    def start(seed: jax.Array) -> tuple:
        params = task.init(jax.random.key(seed))
        return params, tx.init(params)

    @jax.jit
    def train_chunk(carry: tuple, data: Any, seed: jax.Array, first: jax.Array) -> tuple:
        batch_key = jax.random.fold_in(jax.random.key(seed), task.steps)

        def train_step(carry: tuple, step: jax.Array) -> tuple:
            params, opt_state = carry
            key = jax.random.fold_in(batch_key, step)
            loss, grads = ols.value_and_grad(task.loss_fn)(opt_state, params, data, key, dtype)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
            return (optax.apply_updates(params, updates), opt_state), zero_share(grads)

        carry, zeros = jax.lax.scan(train_step, carry, first + jnp.arange(chunk))
        return carry, task.evaluate(carry[0], data), jnp.mean(zeros)

    def train(seed: int, after_chunk: Callable[[], Any]) -> Run:
        carry = start(seed)
        curve, zeros = [], []
        for first in range(0, task.steps, chunk):
            carry, metric, zero = train_chunk(carry, task.data, seed, first)
            curve.append(float(metric))
            zeros.append(float(zero))
            after_chunk()
        state = ols.loss_scale_state(carry[1])
        return Run(
            curve=curve,
            zero_share=sum(zeros) / len(zeros),
            skipped=int(state.total_skipped),
            loss_scale=float(state.loss_scale),
        )

    return train
