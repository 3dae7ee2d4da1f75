"""Stochastically rounded parameters: how far they wander, and what that costs near a minimum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import optax_lossscale as ols
from benchmarks.fidelity.state import autoencoder
from benchmarks.fidelity.tasks import Task
from benchmarks.fidelity.training import fit
from benchmarks.page import Report, interval, items, table

BFLOAT16_STEP = 2.0**-7  # between 1 and 2


def nearest(inner: Any) -> optax.GradientTransformation:
    """Optimize bfloat16 parameters in float32, and round them to nearest."""
    wide = lambda params: ols.cast(params, jnp.float32)  # noqa: E731
    return optax.GradientTransformation(
        lambda params: inner.init(wide(params)),
        lambda grads, state, params: inner.update(grads, state, wide(params)),
    )


# The dtype of the parameters, the function that wraps the optimizer, and the style of its curve.
WAYS: dict[str, tuple[Any, Callable[[Any], Any], dict[str, Any]]] = {
    "float32": (jnp.float32, lambda tx: tx, {"color": "#999999", "linewidth": 5}),
    "remainders": (
        jnp.bfloat16,
        lambda tx: ols.with_master_weights(tx, remainders=True),
        {"color": "#009e73", "linestyle": ":"},
    ),
    "stochastic": (jnp.bfloat16, ols.with_stochastic_rounding, {"color": "#0072b2"}),
    "nearest": (jnp.bfloat16, nearest, {"color": "#d55e00", "linestyle": "--"}),
}
OPTIMIZERS = {
    "Adam, constant rate 1e-3": lambda _: optax.adam(1e-3),
    "Adam, constant rate 1e-4": lambda _: optax.adam(1e-4),
    "Adam, rate from 1e-3 to 0": lambda steps: optax.adam(optax.linear_schedule(1e-3, 0, steps)),
}


def distances(tx: Any, way: str, *, weights: int, steps: int) -> np.ndarray:
    """Return the root mean square distance from the minimum, in bfloat16 steps, at 50 times.

    Each weight has its own minimum between 1.25 and 1.75. Gradients are distances plus noise.
    """
    dtype, wrap, _ = WAYS[way]
    start, target, noise = jax.random.split(jax.random.key(0), 3)
    target = jax.random.uniform(target, (weights,), minval=1.25, maxval=1.75)
    away = 20 * BFLOAT16_STEP * jax.random.uniform(start, (weights,), minval=-1)
    params = ols.cast(ols.cast(target + away, jnp.bfloat16), dtype)
    tx = wrap(tx)

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        grads = ols.cast(params, jnp.float32) - target + 0.1 * jax.random.normal(key, (weights,))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def chunk(carry: Any, key: jax.Array) -> Any:
        carry, _ = jax.lax.scan(step, carry, jax.random.split(key, steps // 50))
        squares = (ols.cast(carry[0], jnp.float32) - target) ** 2
        return carry, jnp.sqrt(jnp.mean(squares)) / BFLOAT16_STEP

    keys = jax.random.split(noise, 50)
    run = jax.jit(lambda params: jax.lax.scan(chunk, (params, tx.init(params)), keys)[1])
    return np.asarray(run(params))


def wander(*, quick: bool) -> Report:
    """Return the distances from the minimum after training, with a picture."""
    size = {"weights": 16, "steps": 100} if quick else {"weights": 512, "steps": 20_000}
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    rows = []
    axes = figure.subplots(1, len(OPTIMIZERS), sharey=True)
    for ax, (name, make) in zip(axes, OPTIMIZERS.items(), strict=True):
        curves = {way: distances(make(size["steps"]), way, **size) for way in WAYS}
        for way, curve in curves.items():
            at = np.arange(1, 51) * size["steps"] / 50
            ax.plot(at, curve, label=way, **WAYS[way][2])
        rows.append([name, *(f"{curve[-5:].mean():.2f}" for curve in curves.values())])
        print(*rows[-1], flush=True)
        ax.set(title=name, xlabel="step", yscale="log")
        ax.title.set_fontsize(9)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("distance in bfloat16 steps")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    notes = f"{size['weights']} weights, {size['steps']:,} steps; mean of the last tenth."
    return Report(f"{table(['optimizer', *WAYS], rows)}\n\n{notes}", {}, {"rounding": figure})


def estimate(params: Any, momentum: Any) -> jax.Array:
    """Return how much rounding adds to the loss in equilibrium, by the formula on the page."""

    def of(w: jax.Array, m: jax.Array) -> jax.Array:
        ulp = 2.0 ** (jnp.floor(jnp.log2(jnp.maximum(jnp.abs(w), 1e-30))) - 7)
        return jnp.sum(ulp * jnp.abs(m)) / 4

    return sum(jax.tree.leaves(jax.tree.map(of, params, momentum)), jnp.float32(0))


def going_on(*, quick: bool) -> Report:
    """Return the cost of continuing from a trained model at several rates, with the estimate."""
    seeds = range(2 if quick else 4)
    steps = 10 if quick else 2000
    task = autoencoder(features=64, steps=steps)
    first, data = optax.adamw(1e-3), task.data
    key, start = jax.random.split(jax.random.key(0))

    @jax.jit
    def trained(key: jax.Array) -> Any:
        keys = jax.random.split(key, steps)
        return fit(first, task.loss_with(data, jnp.float32), task.init(start), keys)[0]

    params, state = trained(key)
    added = float(estimate(params, state[0].mu))
    loss = float(task.evaluate(params, data))
    rows = []
    ways = list(WAYS)[:3]
    for rate in (1e-3, 1e-4, 1e-5):
        ends = {way: continued(task, rate, way, params, seeds) for way in ways}
        plain = ends.pop("float32")
        cells = [interval(100 * (end / plain - 1)) for end in ends.values()]
        more = ["{:+.2f} ± {:.2f}".format(*cell) for cell in cells]
        rows.append(items(f"rate {rate:.0e}", dict(zip(ends, more, strict=True))))
        print(rows[-1], flush=True)
    size = f"AdamW on a small autoencoder: {steps:,} steps, then as many"
    notes = f"The estimate is {100 * added / loss:+.2f}. {size}; {len(seeds)} seeds."
    return Report("\n".join(rows) + f"\n\n{notes}")


def continued(task: Task, rate: float, way: str, params: Any, seeds: range) -> np.ndarray:
    """Return the training loss over the last tenth of further steps, for each seed."""
    dtype, wrap, _ = WAYS[way]

    @jax.jit
    def run(params: Any, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, task.steps)
        loss_fn = task.loss_with(task.data, jnp.float32)
        _, losses = fit(wrap(optax.adamw(rate)), loss_fn, ols.cast(params, dtype), keys)
        return jnp.mean(losses[-max(task.steps // 10, 1) :])

    return np.array([float(run(params, jax.random.key(100 + seed))) for seed in seeds])
