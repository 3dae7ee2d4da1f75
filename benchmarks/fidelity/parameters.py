"""Train with parameters in bfloat16: with float32 masters, with remainders, and with neither."""

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from benchmarks.fidelity.tasks import Task, all_tasks
from benchmarks.fidelity.training import facts, fit
from benchmarks.page import Report, compared, items

# The dtype of the parameters, and the wrapper that keeps their other bits.
WAYS = {
    "float32 parameters": (jnp.float32, lambda tx: tx),
    "masters": (jnp.bfloat16, ols.with_master_weights),
    "remainders": (jnp.bfloat16, lambda tx: ols.with_master_weights(tx, remainders=True)),
    "nothing": (jnp.bfloat16, lambda tx: tx),
}
NAMES = "photograph", "digits", "characters"


def train(task: Task, way: str, seed: int) -> float:
    """Compute in bfloat16, and return the metric of the float32 weights after the last step."""
    dtype, keep = WAYS[way]

    @jax.jit
    def run(data: tuple, key: jax.Array) -> jax.Array:
        init_key, key = jax.random.split(key)
        params = ols.cast(task.init(init_key), dtype)
        keys = jax.random.split(key, task.steps)
        loss_fn = task.loss_with(data, jnp.bfloat16)
        (params, opt_state), _ = fit(keep(task.tx), loss_fn, params, keys, dtype)
        if isinstance(opt_state, ols.MasterWeightsState):
            params = ols.master_weights(opt_state, params)
        return task.evaluate(ols.cast(params, jnp.float32), data)

    return float(run(task.data, jax.random.key(seed)))


def measure(*, quick: bool) -> Report:
    """Return a list of all tasks: the differences from float32's result."""
    seeds, rows = range(2 if quick else 4), []
    for task in all_tasks(NAMES, quick=quick):
        ends = {way: np.array([train(task, way, seed) for seed in seeds]) for way in WAYS}
        title, _, *others = compared(facts(task), ends)
        rows.append(items(title, dict(zip(list(WAYS)[1:], others, strict=True))))
    return Report("\n".join(rows))
