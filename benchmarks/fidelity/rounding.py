"""bfloat16 parameters without masters: what training learns, and how far weights wander."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import optax_lossscale as ols
from benchmarks.fidelity.state import OPTIMIZERS, autoencoder
from benchmarks.fidelity.tasks import Params, Task, all_tasks
from benchmarks.fidelity.training import facts, fit
from benchmarks.page import Report, compared, environment, interval, table

# The dtype of the parameters, and what wraps the optimizer.
WAYS: dict[str, tuple[Any, Any]] = {
    "float32": (jnp.float32, optax.with_extra_args_support),
    "remainders": (jnp.bfloat16, lambda tx: ols.with_master_weights(tx, remainders=True)),
    "stochastic": (jnp.bfloat16, ols.with_stochastic_rounding),
    "nearest": (jnp.bfloat16, optax.with_extra_args_support),
}
COLORS = dict(zip(WAYS, ("#999999", "#0072b2", "#009e73", "#d55e00"), strict=True))
RATES = 1e-3, 1e-4, 1e-5


def ends(task: Task, way: str, tx: Any, seeds: range, start: Params | None = None) -> np.ndarray:
    """Return the mean training loss over the last tenth of the steps, for each seed."""
    dtype, wrap = WAYS[way]

    def run(data: Any, seed: jax.Array) -> jax.Array:
        init_key, key = jax.random.split(jax.random.key(seed))
        params = ols.cast(task.init(init_key) if start is None else start, dtype)
        loss_fn, keys = task.loss_with(data, jnp.float32), jax.random.split(key, task.steps)
        _, losses = fit(wrap(tx), loss_fn, params, keys, dtype)
        return jnp.mean(losses[-max(task.steps // 10, 1) :])

    # Not `vmap`, under which all seeds would share the random bits of rounding.
    in_turn = jax.jit(lambda data, seeds: jax.lax.map(lambda seed: run(data, seed), seeds))
    return np.asarray(in_turn(task.data, jnp.array(seeds)))


def measure(*, quick: bool) -> Report:
    """Return the table of tasks and optimizers: float32's loss, and the differences from it."""
    seeds = range(2 if quick else 4)
    names = "digits", "photograph", "characters", "words"
    tasks = {f"{task.name}, AdamW": task for task in all_tasks(names, quick=quick)}
    for name, task in tasks.items():
        if task.name != "characters":
            tasks[name] = task._replace(tx=optax.adamw(1e-2 if task.steps < 200 else 1e-3))
    digits = tasks["digits, AdamW"]
    others = "Lion", "SGD with momentum", "Adafactor, factored", "Muon"
    tasks |= {f"digits, {name}": digits._replace(tx=OPTIMIZERS[name]) for name in others}
    rows = []
    for name, task in tasks.items():
        described = facts(task) | {"name": name, "metric": "training loss", "decimals": 5}
        found = {way: ends(task, way, task.tx, seeds) for way in WAYS}
        rows.append(compared(described, found))
        print(*rows[-1], flush=True)
    about = environment("jax", "jaxlib", "optax", "scikit-learn")
    return Report(f"{table(['task', *WAYS], rows)}\n\n{len(seeds)} seeds. {about}.")


def estimate(params: Params, momentum: Params) -> jax.Array:
    """Return what stochastic rounding adds to the loss in equilibrium."""

    def of_one(weight: jax.Array, moment: jax.Array) -> jax.Array:
        size = jnp.maximum(jnp.abs(weight), jnp.finfo(jnp.float32).tiny)
        ulp = 2.0 ** (jnp.floor(jnp.log2(size)) - 7)
        return jnp.sum(ulp * jnp.abs(moment)) / 4

    return sum(jax.tree.leaves(jax.tree.map(of_one, params, momentum)), jnp.zeros(()))


def equilibrium(*, quick: bool) -> Report:
    """Return the table of going on from one trained model, and the picture of the wandering."""
    seeds = range(2 if quick else 4)
    task = autoencoder(features=64, steps=4) if quick else autoencoder(steps=2000)
    tx = optax.adamw(1e-3)

    @jax.jit
    def trained(data: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), task.steps)
        loss_fn = task.loss_with(data, jnp.float32)
        return fit(tx, loss_fn, task.init(jax.random.key(1)), keys)[0]

    params, opt_state = trained(task.data)
    predicted = float(estimate(params, opt_state[0].mu))
    rows = []
    for rate in RATES:
        tx = optax.adamw(rate)
        plain, *others = (ends(task, way, tx, seeds, params) for way in WAYS)
        more = ["{:+.2f} ± {:.2f}".format(*interval(100 * (end / plain - 1))) for end in others]
        share = f"{100 * predicted / plain.mean():+.2f}"
        rows.append([f"{rate:g}", f"{plain.mean():.6f}", *more, share])
        print(*rows[-1], flush=True)
    about = environment("jax", "jaxlib", "optax", "scikit-learn")
    text = table(["learning rate", *WAYS, "estimate"], rows, texts=())
    notes = f"{len(seeds)} seeds, {task.steps:,} steps each. {about}."
    return Report(
        f"{text}\n\n{notes}", pictures={"rounding": draw(wander(steps=8 if quick else 40000))}
    )


def wander(*, steps: int, weights: int = 4096) -> dict[str, np.ndarray]:
    """Return the mean distance from a minimum in bfloat16 steps, at 80 times of training."""
    goal = jax.random.uniform(jax.random.key(0), (weights,), minval=0.25, maxval=1.0)
    ulp = 2.0 ** (jnp.floor(jnp.log2(goal)) - 7)
    chunk = max(steps // 80, 1)

    def run(way: str) -> np.ndarray:
        dtype, wrap = WAYS[way]
        tx = wrap(optax.adam(1e-4))

        def step(carry: Any, key: jax.Array) -> Any:
            params, state = carry
            noise = 0.01 * jax.random.normal(key, goal.shape)
            grads = (params.astype(jnp.float32) - goal + noise).astype(dtype)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        def chunk_of_steps(carry: Any, key: jax.Array) -> Any:
            carry, _ = jax.lax.scan(step, carry, jax.random.split(key, chunk))
            return carry, jnp.mean(jnp.abs(carry[0].astype(jnp.float32) - goal) / ulp)

        start = (goal + 0.05).astype(dtype)
        keys = jax.random.split(jax.random.key(1), max(steps // chunk, 1))
        return np.asarray(
            jax.jit(lambda c: jax.lax.scan(chunk_of_steps, c, keys)[1])((start, tx.init(start)))
        )

    return {way: run(way) for way in WAYS} | {
        "steps": chunk * np.arange(1, max(steps // chunk, 1) + 1)
    }


def draw(curves: dict[str, np.ndarray]) -> Figure:
    """Draw the distances from the minimum by steps of training."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    ax = figure.subplots()
    for way, color in COLORS.items():
        ax.plot(curves["steps"], curves[way], label=way, color=color)
    ax.set(xlabel="step", ylabel="distance in bfloat16 steps", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend()
    return figure
