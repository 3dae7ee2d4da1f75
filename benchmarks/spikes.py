"""Record the losses of training runs, and count which steps four rules would skip.

Training applies every step. The rules judge the recorded losses afterwards, and only the losses.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from benchmarks import guards
from benchmarks.fidelity.tasks import Data, Params, Task, characters, diabetes, digits, perceptron
from benchmarks.fidelity.training import fit
from benchmarks.page import Report, table


def rule(wrap: Callable[..., Any], **arguments: Callable) -> Callable[[np.ndarray], np.ndarray]:
    """Return which steps a guard skips, given functions of the losses."""
    tx = wrap(optax.identity())

    def step(state: Any, loss: jax.Array) -> tuple[Any, jax.Array]:
        extra = {name: of(loss) for name, of in arguments.items()}
        update, state = tx.update(jnp.ones(()), state, jnp.zeros(()), **extra)
        return state, update == 0

    return jax.jit(lambda losses: jax.lax.scan(step, tx.init(jnp.zeros(())), losses)[1])


RULES = {
    "`Spike()`": rule(partial(ols.with_skipping, skip_if=ols.Spike()), value=jnp.asarray),
    '`Spike("log_loss")`': rule(
        partial(ols.with_skipping, skip_if=ols.Spike("log_loss")), log_loss=jnp.log
    ),
    "MaxText": rule(guards.maxtext, loss=jnp.asarray),
    "Levanter": rule(guards.levanter, loss=jnp.asarray),
}


class Trace(NamedTuple):
    """A training run, and which of its steps use other data."""

    name: str
    task: Task
    steps: int = 2000
    other: Data = None
    share: float = 0.0  # of random steps that use `other`; 1 for all steps after the middle


def all_traces() -> list[Trace]:
    """Return the runs, on data that come with scikit-learn."""
    plain, patients = digits(features=64), diabetes()
    images, labels, *_ = plain.data

    def noisy(params: Params, data: Data, key: jax.Array, dtype: Any) -> jax.Array:
        images, labels, share = data  # the share of labels that are random, drawn at each step
        first, second, third = jax.random.split(key, 3)
        drawn = jax.random.randint(first, labels.shape, 0, 10)
        labels = jnp.where(jax.random.bernoulli(second, share, labels.shape), drawn, labels)
        return plain.loss_fn(params, (images, labels), third, dtype)

    def reinforce(params: Params, data: Data, key: jax.Array, dtype: Any) -> jax.Array:
        first, second = jax.random.split(key)
        chosen = jax.random.randint(first, (32,), 0, len(labels))
        logits = perceptron(list(params.values()), data[0][chosen], dtype)
        answers = jax.random.categorical(second, logits)
        rewards = (answers == data[1][chosen]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
        return jnp.mean(losses * (rewards - rewards.mean()))

    def heavy(params: Params, data: Data, key: jax.Array, dtype: Any) -> jax.Array:
        inputs, targets, *_ = data
        first, second = jax.random.split(key)
        chosen = jax.random.randint(first, (32,), 0, len(targets))
        targets = (targets[chosen] - targets.mean()) / targets.std()
        outputs = perceptron(list(params.values()), inputs[chosen], dtype)[:, 0]
        return jnp.mean((outputs - targets - jax.random.t(second, 3, (32,))) ** 2)

    clean = plain._replace(loss_fn=noisy, data=(images, labels, 0.0))
    fifth = images, labels, 0.2
    text = characters(blocks=1, batch=8, context=32)._replace(tx=optax.adam(1e-3))
    shuffled = jax.random.permutation(jax.random.key(0), text.data[0]), text.data[1]
    return [
        Trace("digits, bad: random labels", clean, other=(images, labels, 1.0), share=0.02),
        Trace("digits, bad: inverted images", clean, other=(1 - images, labels, 0.0), share=0.02),
        Trace("characters, bad: shuffled text", text, 1000, shuffled, 0.02),
        Trace("digits, a fifth of all labels random", clean._replace(data=fifth)),
        Trace("digits, policy gradients", plain._replace(loss_fn=reinforce)),
        Trace("regression, heavy-tailed noise", patients._replace(loss_fn=heavy)),
        Trace("digits in batches of 8, loss near 0", digits(batch=8, features=64), 4000),
        Trace("digits, a fifth of all labels random from the middle on", clean, 2000, fifth, 1.0),
    ]


def record(trace: Trace, seeds: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Train. Return, for each seed, the losses and whether each step used the other data."""
    task = trace.task
    data = task.data, task.data if trace.other is None else trace.other
    start = trace.steps // 2 if trace.share == 1 else 100  # after the warm-up of every rule

    @jax.jit
    def run(data: tuple[Data, Data], is_other: jax.Array, key: jax.Array) -> jax.Array:
        def loss_fn(params: Params, step: tuple) -> jax.Array:
            key, is_other = step
            chosen = jax.tree.map(lambda a, b: jnp.where(is_other, b, a), *data)
            return task.loss_fn(params, chosen, key, jnp.float32)

        params, keys = task.init(key), jax.random.split(jax.random.fold_in(key, 1), trace.steps)
        return fit(task.tx, loss_fn, params, (keys, is_other))[1]

    def one(seed: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = np.random.default_rng(seed).random(trace.steps)
        is_other = (drawn < trace.share) & (np.arange(trace.steps) >= start)
        return np.asarray(run(data, is_other, jax.random.key(seed))), is_other

    return [one(seed) for seed in range(seeds)]


def measure(*, quick: bool) -> Report:
    """Return the table: the numbers of bad and of other steps that each rule skips."""
    rows = []
    for trace in all_traces():
        runs = record(trace._replace(steps=200) if quick else trace, 2 if quick else 3)
        losses, others = zip(*runs, strict=True)
        is_other = np.concatenate(others)
        skipped = [np.concatenate([rule(one) for one in losses]) for rule in RULES.values()]
        if is_other.any():
            what = "lost, of {:,} after it" if trace.share == 1 else "skipped, of {:,} bad"
            hits = [f"{each[is_other].sum():,}" for each in skipped]
            rows.append([trace.name, what.format(is_other.sum()), *hits])
        false = [f"{10_000 * each[~is_other].mean():.1f}" for each in skipped]
        if any(map(float, false)):
            rows.append(["" if is_other.any() else trace.name, "false, per 10,000", *false])
    return Report(table(["losses", "steps", *RULES], rows, (0, 1)))
