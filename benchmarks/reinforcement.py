"""Reinforcement learning in four formats: examples/reinforce.py with several seeds and rates."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from benchmarks.fidelity.training import FLOAT16, FLOAT32, SCALED
from benchmarks.page import Report, interval, items
from examples import reinforce

FORMATS = jnp.float32, jnp.bfloat16, jnp.float16
WAYS = {name: how for name, (*how, _) in reinforce.FORMATS.items()}
WAYS[FLOAT16] = [jnp.float16, None]

# How sampling differs from training: whether its attention divides last, and XLA's options.
PROGRAMS = {
    "the same operations, each rounded": (False, reinforce.ROUND),
    "the same operations, XLA's default": (False, None),
    "the division last, each operation rounded": (True, reinforce.ROUND),
}


def train(way: str, steps: int, rate: float, seed: int) -> dict[str, float]:
    """Train once. Return the right digits in the last fifth, the mean gap and the skipped steps."""
    _, (right, gap, skipped, _) = reinforce.train(*WAYS[way], steps, rate, seed)
    end = 100 * right[-steps // 5 :].mean()
    return {"right": float(end), "gap": float(gap.mean()), "skipped": int(skipped[-1])}


def gaps(params: Any) -> dict[str, dict[str, float]]:
    """Return the mean gap of one policy in each format, for programs that differ more and more."""

    def gap(divides_last: bool, params: Any) -> jax.Array:
        prompts = jax.random.randint(jax.random.key(0), (4096, reinforce.DIGITS), 0, 10)
        answers, sampled = reinforce.sample(
            params, prompts, jax.random.key(1), divides_last=divides_last
        )
        return jnp.abs(reinforce.trained(params, prompts, answers) - sampled).mean()

    found: dict[str, dict[str, float]] = {}
    for name, (divides_last, options) in PROGRAMS.items():
        run = jax.jit(functools.partial(gap, divides_last), compiler_options=options)
        found[name] = {dtype.__name__: float(run(ols.cast(params, dtype))) for dtype in FORMATS}
    return found


def summary(results: dict[str, Any]) -> str:
    """Return, for each format, the gap, and the right digits less float32's, as Markdown."""
    rows = []
    for way in (FLOAT32, "bfloat16", SCALED, FLOAT16):
        cells = {}
        for rate, ways in results["runs"].items():
            right, exact = (np.array([run["right"] for run in ways[w]]) for w in (way, FLOAT32))
            gap = np.mean([run["gap"] for run in ways[way]])
            end = interval(right) if way == FLOAT32 else interval(right - exact)
            sign = "" if way == FLOAT32 else "+"
            cells[f"at rate {rate},"] = f"{end.mean:{sign}.1f} ± {end.margin:.1f} % and {gap:.1e}"
        rows.append(items(way, cells))
    return "\n".join(rows) + f"\n\n{len(right)} seeds, {results['steps']} steps."


def measure(*, quick: bool) -> Report:
    """Train in every format at two learning rates."""
    seeds, steps, rates = (2, 10, [3e-3]) if quick else (5, 300, [1e-3, 3e-3])
    runs: dict[str, dict[str, list]] = {f"{rate:g}": {} for rate in rates}
    for rate, way in itertools.product(rates, WAYS):
        runs[f"{rate:g}"][way] = [train(way, steps, rate, seed) for seed in range(seeds)]
    params, _ = reinforce.train(*WAYS[FLOAT32], steps)
    results = {"steps": steps, "gaps": gaps(params), "runs": runs}
    return Report(summary(results), results)
