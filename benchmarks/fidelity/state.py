"""Optimizer state in bfloat16: how much memory it saves, and how well training works."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_lossscale as ols
from benchmarks.fidelity.tasks import Task, all_tasks, supervised
from benchmarks.fidelity.training import facts, fit
from benchmarks.page import Interval, Report, compared, interval, table

Wrap = Callable[[Any], Any]


def nearest(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Store the same arrays in bfloat16 as `with_bfloat16_state`, but round to nearest."""
    inner = optax.with_extra_args_support(inner)
    chosen: Any = ols.with_bfloat16_state(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        wide = jax.tree.map(lambda x: jnp.float32(x) if x.dtype == jnp.bfloat16 else x, state)
        updates, new = inner.update(updates, wide, params, **extra_args)
        return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)

    return optax.GradientTransformationExtraArgs(
        lambda params: chosen.init(params).inner_state, update
    )


# How the state is stored: in float32, rounded stochastically, or rounded to nearest.
WAYS: dict[str, Wrap] = {
    "float32": optax.with_extra_args_support,
    "stochastic": ols.with_bfloat16_state,
    "nearest": nearest,
}


def autoencoder(*, batch: int = 128, features: int = 256, steps: int = 6000) -> Task:
    """Compress handwritten digits to 16 numbers."""
    images = jnp.asarray(load_digits(return_X_y=True)[0] / 16, jnp.float32)

    def squares(outputs: jax.Array, images: jax.Array) -> jax.Array:
        return jnp.mean((outputs - images) ** 2)

    return supervised(
        widths=(64, features, 16, features, 64),
        loss=squares,
        score=squares,
        data=(images, images, images, images),
        batch=batch,
        name="autoencoder",
        metric="training loss",
        decimals=5,
        steps=steps,
        tx=optax.adam(optax.cosine_decay_schedule(1e-3, steps)),
    )


def stack(tx: Any) -> Any:
    """Keep the masters of bfloat16 parameters as remainders, and skip spikes of the loss."""
    return ols.with_skipping(ols.with_master_weights(tx, remainders=True), ols.Spike())


def train(task: Task, tx: Any, seeds: range, *, params_dtype: Any = jnp.float32) -> np.ndarray:
    """Train from each seed, and return the mean training loss over the last tenth of the steps."""

    @jax.jit
    def run(data: Any, key: jax.Array) -> jax.Array:
        init_key, key = jax.random.split(key)
        params = ols.cast(task.init(init_key), params_dtype)
        keys = jax.random.split(key, task.steps)
        _, losses = fit(tx, task.loss_with(data, jnp.float32), params, keys)
        return jnp.mean(losses[-max(task.steps // 10, 1) :])

    return np.array([float(run(task.data, jax.random.key(seed))) for seed in seeds])


def measure(*, quick: bool) -> Report:
    """Return a table of three trainings: float32's result, and the differences from it."""
    seeds = range(2 if quick else 4)
    digits, characters = (
        task._replace(metric="training loss", decimals=5)
        for task in all_tasks(("digits", "characters"), quick=quick)
    )
    first = autoencoder(features=64, steps=4) if quick else autoencoder()
    both = digits._replace(name="digits, remainders and Spike")
    trainings = (
        (first, optax.with_extra_args_support),
        (both, stack),
        (characters, optax.with_extra_args_support),
    )
    rows = []
    for task, around in trainings:
        dtype = jnp.bfloat16 if around is stack else jnp.float32
        ends = {
            way: train(task, around(wrap(task.tx)), seeds, params_dtype=dtype)
            for way, wrap in WAYS.items()
        }
        rows.append([f"{task.name}, {task.steps:,} steps", *compared(facts(task), ends)[1:]])
    listed = table([f"training, {len(seeds)} seeds", *WAYS], rows)
    return Report(listed)


# Optimizers by name, at learning rates that work.
OPTIMIZERS: dict[str, Any] = {
    "AdamW": optax.adamw(1e-3),
    "AMSGrad": optax.amsgrad(1e-3),
    "AdaBelief": optax.adabelief(1e-3),
    "Adan": optax.adan(1e-3),
    "RMSprop": optax.rmsprop(1e-3),
    "Adagrad": optax.adagrad(3e-2),
    "Lion": optax.lion(1e-4),
    "SGD with momentum": optax.sgd(0.3, momentum=0.9),
    "Adafactor (factored)": optax.adafactor(1e-2, min_dim_size_to_factor=16, momentum=0.9),
    "SM3": optax.sm3(1e-1),
    "Muon": optax.contrib.muon(1e-2),
    "MADGRAD": optax.contrib.madgrad(1e-3),
    "schedule_free_adamw": optax.contrib.schedule_free_adamw(3e-3),
    "Prodigy": optax.contrib.prodigy(),
    "mechanize(Adam)": optax.contrib.mechanize(optax.adam(1.0)),
    "DoWG": optax.contrib.dowg(),
    "COCOB": optax.contrib.cocob(),
    "D-Adaptation": optax.contrib.dadapt_adamw(),
    "L-BFGS": optax.lbfgs(),
    "MultiSteps(Adam) inside": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
}


def measure_each(*, quick: bool) -> Report:
    """Group the optimizers by the most that the loss may differ from float32's, in %."""
    seeds = range(2 if quick else 3)
    task = autoencoder(features=64, steps=4) if quick else autoencoder(steps=1000)
    found = {}
    for name, tx in list(OPTIMIZERS.items())[: 2 if quick else None]:
        plain, rounded = (train(task, wrap(tx), seeds) for wrap in list(WAYS.values())[:2])
        found[name] = interval(100 * (rounded / plain - 1))
        print(f"{name} {found[name].mean:+.1f} ± {found[name].margin:.1f}", flush=True)
    return Report(grouped(found))


def grouped(found: Mapping[str, Interval]) -> str:
    """Return a table of optimizers by the end of their interval that is farther from zero.

    An optimizer whose interval leaves out zero is bold, with its mean.
    """
    rows, low = [], 0.0
    for high in (1.0, 5.0, math.inf):
        names = [
            name if abs(mean) <= margin else f"**{name}** ({mean:+.1f})"
            for name, (mean, margin) in found.items()
            if low <= abs(mean) + margin < high
        ]
        if names:
            ends = f"below {high:g} %" if math.isfinite(high) else f"{low:g} % or more"
            rows.append([ends, ", ".join(names)])
        low = high
    return table(["may differ by", "optimizers"], rows, texts=(0, 1))


PLANS: dict[str, tuple[Any, Wrap]] = {
    "float32": (jnp.float32, optax.with_extra_args_support),
    "float32, state": (jnp.float32, ols.with_bfloat16_state),
    "masters": (jnp.bfloat16, ols.with_master_weights),
    "remainders": (jnp.bfloat16, lambda tx: ols.with_master_weights(tx, remainders=True)),
    "remainders, state": (
        jnp.bfloat16,
        lambda tx: ols.with_master_weights(ols.with_bfloat16_state(tx), remainders=True),
    ),
    "rounding, state": (
        jnp.bfloat16,
        lambda tx: ols.with_stochastic_rounding(ols.with_bfloat16_state(tx)),
    ),
}
SAVED = {name: OPTIMIZERS[name] for name in ("AdamW", "Lion", "SGD with momentum")}
SAVED |= {"Adafactor": optax.adafactor(1e-3)}


def bytes_per_parameter(tx: Any, dtype: Any) -> float:
    """Return the size of parameters and state, for each of 2**24 parameters in four matrices."""
    params = [jax.ShapeDtypeStruct((2048, 2048), dtype)] * 4
    arrays = jax.tree.leaves((params, jax.eval_shape(tx.init, params)))
    return sum(a.size * a.dtype.itemsize for a in arrays) / sum(p.size for p in params)


def memory(*, quick: bool) -> Report:
    """Return the table of bytes per parameter."""
    del quick
    rows = [
        [name, *(f"{bytes_per_parameter(wrap(tx), dtype):.1f}" for dtype, wrap in PLANS.values())]
        for name, tx in SAVED.items()
    ]
    return Report(table(["optimizer", *PLANS], rows))
