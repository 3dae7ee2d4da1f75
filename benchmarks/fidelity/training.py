"""The ways to train, and how to run one."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks.fidelity.tasks import Params, Task, corpus_facts
from benchmarks.page import environment

# The dtype of the forward and backward passes, and the loss scale. `None` neither scales nor
# checks. The default growth interval is 2000 finite steps, longer than these runs. With 25, the
# scale climbs until steps overflow and are skipped, far more often than in long training. The
# default lower bound is 1, and a summed loss needs less.
FLOAT32, BFLOAT16, FLOAT16, SCALED = "float32", "bfloat16", "float16", "float16 + loss scaling"
WAYS = {
    FLOAT32: (jnp.float32, None),
    BFLOAT16: (jnp.bfloat16, None),
    FLOAT16: (jnp.float16, None),
    SCALED: (jnp.float16, ols.DynamicLossScale(growth_interval=25, min_scale=2.0**-6)),
}


def zero_share(grads: Any) -> jax.Array:
    """Return the share of entries that are exactly zero."""
    leaves = jax.tree.leaves(grads)
    return sum(jnp.sum(g == 0) for g in leaves) / sum(g.size for g in leaves)


def fit(
    tx: optax.GradientTransformation, loss_fn: Callable[..., jax.Array], params: Params, steps: Any
) -> tuple[tuple[Params, optax.OptState], jax.Array]:
    """Train with what `loss_fn` takes in each step; return parameters, state and the losses."""

    def train_step(carry: tuple, step: Any) -> tuple:
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, step)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.lax.scan(train_step, (params, tx.init(params)), steps)


def make_train(task: Task, way: str) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains from a seed."""
    dtype, loss_scale = WAYS[way]
    tx = ols.with_loss_scaling(task.tx, loss_scale)
    chunk = task.steps // task.evaluations

    @jax.jit
    def start(seed: jax.Array) -> tuple:
        params = task.init(jax.random.key(seed))
        return params, tx.init(params)

    def batch_key(seed: jax.Array, step: jax.Array | int) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), task.steps), step)

    @jax.jit
    def first_error(carry: tuple, data: Any, seed: jax.Array) -> jax.Array:
        params, opt_state = carry
        key = batch_key(seed, 0)
        _, grads = ols.value_and_grad(task.loss_fn)(opt_state, params, data, key, dtype)
        exact = jax.grad(task.loss_fn)(params, data, key, jnp.float32)
        scale = ols.loss_scale_state(opt_state).loss_scale
        errors = jax.tree.map(lambda scaled, exact: scaled / scale - exact, grads, exact)
        return optax.tree.norm(errors) / optax.tree.norm(exact)

    @jax.jit
    def train_chunk(carry: tuple, data: Any, seed: jax.Array, first: jax.Array) -> tuple:
        def train_step(carry: tuple, step: jax.Array) -> tuple:
            params, opt_state = carry
            key = batch_key(seed, step)
            loss, grads = ols.value_and_grad(task.loss_fn)(opt_state, params, data, key, dtype)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
            zeros = {layer: zero_share(tree) for layer, tree in grads.items()}
            return (optax.apply_updates(params, updates), opt_state), zeros

        carry, zeros = jax.lax.scan(train_step, carry, first + jnp.arange(chunk))
        return carry, task.evaluate(carry[0], data), jax.tree.map(jnp.mean, zeros)

    def train(seed: int) -> dict[str, Any]:
        carry = start(seed)
        error = float(first_error(carry, task.data, seed))
        curve, zeros = [], []
        for first in range(0, task.steps, chunk):
            carry, metric, zero = train_chunk(carry, task.data, seed, first)
            curve.append(float(metric))
            zeros.append(zero)
        state = ols.loss_scale_state(carry[1])
        shares = {layer: float(sum(z[layer] for z in zeros)) / len(zeros) for layer in zero}
        return {
            "curve": curve,  # the metric at each evaluation
            "first_error": error,  # of the first gradient, relative to the exact one's norm
            "zero_shares": shares,  # of each layer's gradient entries, over all steps
            "skipped": int(state.total_skipped),
            "loss_scale": float(state.loss_scale),  # at the end
        }

    return train


def measure(tasks: Sequence[Task], seeds: int) -> dict[str, Any]:
    """Train every task in every way from every seed."""
    start, stored = time.process_time(), []
    for task in tasks:
        runs: dict[str, list] = {way: [] for way in WAYS}
        for way in WAYS:
            train = make_train(task, way)
            # disable=None shows the bar in a terminal only.
            for seed in tqdm(range(seeds), f"{task.name}, {way}", leave=False, disable=None):
                runs[way].append(train(seed))
        stored.append({**facts(task), "runs": runs})
    packages = "jax", "jaxlib", "optax", "flax", "scikit-learn"
    return {
        "environment": environment(*packages),
        "loss_scale": WAYS[SCALED][1].get_config(),
        "text": corpus_facts(),
        "processor_seconds": round(time.process_time() - start),
        "tasks": stored,
    }


def facts(task: Task) -> dict[str, Any]:
    """Return what describes a task beside its results."""
    names = "name", "fails", "metric", "decimals", "steps"
    shapes = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    return {**{name: getattr(task, name) for name in names}, "parameters": parameters}
