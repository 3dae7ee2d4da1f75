"""What half precision gains: a transformer learns the same, and takes fewer bytes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import optax_lossscale as ols
from benchmarks import workloads
from benchmarks.fidelity.report import STYLES
from benchmarks.fidelity.tasks import corpus
from benchmarks.fidelity.training import BFLOAT16, FLOAT32
from benchmarks.page import Report

SIZES = dataclasses.replace(
    workloads.SIZES["small"], layers=4, features=128, vocabulary=128, batch=16, length=64
)
STEPS, POINTS = 600, 30
ADAMW = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 60, STEPS))
HALVED = ols.with_skipping(ols.with_master_weights(ols.with_bfloat16_state(ADAMW), remainders=True))
# The dtype of products and of stored parameters, and the optimizer.
WAYS: dict[str, tuple[Any, Any]] = {FLOAT32: (jnp.float32, ADAMW), BFLOAT16: (jnp.bfloat16, HALVED)}


def program(way: str) -> tuple[Any, Any]:
    """Return the first parameters and the loss of a transformer with scanned layers."""
    dtype, _ = WAYS[way]
    training = workloads.transformer(SIZES, scanned=True, plain=True)
    return ols.cast(training.params, dtype), ols.autocast(training.loss_fn, dtype)


def batches(steps: int) -> np.ndarray:
    """Return batches of scikit-learn's docstrings, as the numbers of ASCII characters."""
    train, _ = corpus()
    text = np.frombuffer(train.encode("ascii"), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    starts = rng.integers(len(text) - SIZES.length, size=(steps, SIZES.batch, 1))
    return text[starts + np.arange(SIZES.length + 1)]


def train(way: str, steps: int) -> list[float]:
    """Return the mean loss of each part of the training."""
    _, tx = WAYS[way]
    params, loss_fn = program(way)

    def step(carry: Any, batch: jax.Array) -> Any:
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    run = jax.jit(lambda params, data: jax.lax.scan(step, (params, tx.init(params)), data)[1])
    losses = np.asarray(run(params, jnp.asarray(batches(steps))))
    return losses.reshape(min(POINTS, steps), -1).mean(axis=1).tolist()


def megabytes(way: str) -> dict[str, float]:
    """Return what parameters and state take, and what is kept for the backward pass."""
    _, tx = WAYS[way]
    params, loss_fn = program(way)
    batch = jnp.asarray(batches(1)[0])

    def kept(params: Any) -> Any:
        return jax.vjp(lambda params: loss_fn(params, batch), params)[1]

    def size(tree: Any) -> float:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree)) / 1e6

    return {
        "parameters and state": size((params, jax.eval_shape(tx.init, params))),
        "kept for the backward pass": size(jax.eval_shape(kept, params)),
    }


def measure(*, quick: bool) -> Report:
    """Return the last loss and the bytes of both ways, with a picture."""
    curves = {way: train(way, 4 if quick else STEPS) for way in WAYS}
    sizes = {way: megabytes(way) for way in WAYS}
    numbers = {"losses": curves, "megabytes": sizes}
    return Report(block(numbers), numbers, {"gain": draw(curves, sizes)})


def block(results: dict[str, Any]) -> str:
    """Return the results as a Markdown list."""
    rows = []
    for way, losses in results["losses"].items():
        parts = [f"{size:.1f} MB {name}" for name, size in results["megabytes"][way].items()]
        rows.append(f"- {way}: loss {losses[-1]:.3f}, {', '.join(parts)}")
    return "\n".join(rows)


def draw(curves: dict[str, list[float]], sizes: dict[str, dict[str, float]]) -> Figure:
    """Draw the losses on one another, and below them the bytes, narrow enough for a phone."""
    figure = Figure(figsize=(4.6, 5.2), layout="constrained")
    loss, memory = figure.subplots(2, 1, height_ratios=(3, 2))
    for place, way in enumerate(WAYS):
        at = STEPS * np.arange(1, len(curves[way]) + 1) / len(curves[way])
        loss.plot(at, curves[way], label=way, **STYLES[way])
        heights = np.arange(len(sizes[way])) + 0.37 * (place - 0.5)
        bars = memory.barh(heights, list(sizes[way].values()), 0.35, color=STYLES[way]["color"])
        memory.bar_label(bars, fmt=f"{way}: %.1f MB", padding=4)
    loss.set(title="The same loss", xlabel="step", ylabel="training loss")
    loss.grid(alpha=0.3)
    loss.legend()
    memory.set(title="Fewer bytes", xticks=[])
    memory.set_xlim(0, 1.7 * max(max(each.values()) for each in sizes.values()))
    names = [name.replace(" and", "\nand").replace(" the", "\nthe") for name in sizes[FLOAT32]]
    memory.set_yticks(range(len(names)), names)
    memory.invert_yaxis()
    memory.spines[["top", "right", "bottom"]].set_visible(False)
    return figure
