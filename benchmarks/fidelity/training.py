"""The formats to train in, and functions that train."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks.fidelity.tasks import Params, Task

# The dtype of the forward and backward passes, and the loss scale. `None` neither scales nor
# checks. The default growth interval is 2000 finite steps, longer than these runs. With 25, the
# scale grows until steps overflow and are skipped, far more often than in long training. A summed
# loss needs a lower bound below the default of 1.
FLOAT32, BFLOAT16, FLOAT16, SCALED = "float32", "bfloat16", "float16", "float16 + loss scaling"
WAYS = {
    FLOAT32: (jnp.float32, None),
    BFLOAT16: (jnp.bfloat16, None),
    FLOAT16: (jnp.float16, None),
    SCALED: (jnp.float16, ols.DynamicLossScale(growth_interval=25, min_scale=2.0**-6)),
}


def fit(
    tx: Any, loss_fn: Callable[..., jax.Array], params: Params, steps: Any, dtype: Any = jnp.float32
) -> tuple[tuple[Params, optax.OptState], jax.Array]:
    """Minimize `loss_fn(params, step)` for each of `steps`. Return parameters, state and losses.

    Gradients have dtype `dtype`, whatever the dtype of the parameters is.
    """
    tx = optax.with_extra_args_support(tx)

    def train_step(carry: tuple, step: Any) -> tuple:
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(ols.cast(params, dtype), step)
        extra = {"value": loss, "grad": grads, "value_fn": lambda params: loss_fn(params, step)}
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.lax.scan(train_step, (params, tx.init(params)), steps)


def make_train(task: Task, way: str) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains from a seed."""
    dtype, loss_scale = WAYS[way]
    tx = ols.with_loss_scaling(task.tx, loss_scale)
    chunk = max(task.steps // 10, 2)  # steps between evaluations
    loss_and_grads = ols.value_and_grad(task.loss_fn)

    @jax.jit
    def run(data: Any, seed: jax.Array) -> dict[str, Any]:
        def train_step(carry: tuple, step: jax.Array) -> tuple:
            params, opt_state = carry
            loss, grads = loss_and_grads(opt_state, params, data, batch_key(step), dtype)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
            zeros = {name: jnp.mean(ravel_pytree(tree)[0] == 0) for name, tree in grads.items()}
            return (optax.apply_updates(params, updates), opt_state), zeros

        def train_chunk(carry: tuple, first: jax.Array) -> tuple:
            carry, zeros = jax.lax.scan(train_step, carry, first + jnp.arange(chunk))
            return carry, (task.evaluate(carry[0], data), zeros)

        def batch_key(step: jax.Array | int) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), task.steps), step)

        params = task.init(jax.random.key(seed))
        opt_state = tx.init(params)
        _, grads = loss_and_grads(opt_state, params, data, batch_key(0), dtype)
        exact = jax.grad(task.loss_fn)(params, data, batch_key(0), jnp.float32)
        scale = ols.loss_scale_state(opt_state).loss_scale
        errors = jax.tree.map(lambda scaled, exact: scaled / scale - exact, grads, exact)
        starts = jnp.arange(0, task.steps, chunk)
        (_, opt_state), (curve, zeros) = jax.lax.scan(train_chunk, (params, opt_state), starts)
        return {
            "curve": curve,  # the metric at each evaluation
            # of the first gradient, relative to the norm of the exact one
            "first_error": optax.tree.norm(errors) / optax.tree.norm(exact),
            # Of each layer's gradient entries, over all steps.
            "zero_shares": jax.tree.map(jnp.mean, zeros),
            "skipped": ols.loss_scale_state(opt_state).total_skipped,
            "loss_scale": ols.loss_scale_state(opt_state).loss_scale,  # at the end
        }

    return lambda seed: jax.tree.map(lambda array: array.tolist(), run(task.data, seed))


def measure(tasks: Sequence[Task], seeds: int) -> dict[str, Any]:
    """Train every task in every format from every seed."""
    stored = []
    for task in tasks:
        runs: dict[str, list] = {way: [] for way in WAYS}
        for way in WAYS:
            train = make_train(task, way)
            # disable=None shows the bar in a terminal only.
            for seed in tqdm(range(seeds), f"{task.name}, {way}", leave=False, disable=None):
                runs[way].append(train(seed))
        stored.append({**facts(task), "runs": runs})
    return {
        "loss_scale": WAYS[SCALED][1].get_config(),
        "tasks": stored,
    }


def facts(task: Task) -> dict[str, Any]:
    """Return the facts that describe a task next to its results."""
    names = "name", "metric", "decimals", "steps"
    shapes = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    return {**{name: getattr(task, name) for name in names}, "parameters": parameters}
