"""Programs with products that must stay in float32: what `precision_search` names, and training.

The lines that `precision_search` should name have the comment `needs float32`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import optax_lossscale as ols
from benchmarks.fidelity.tasks import Params, init_layers, perceptron
from benchmarks.fidelity.training import BFLOAT16, FLOAT32, fit
from benchmarks.page import Report, interval, table

STEPS = 400
KEPT = "kept"
WAYS = FLOAT32, BFLOAT16, KEPT
HEAD = "program", "lines named", "gradient off, %: bfloat16", "kept", *(f"loss: {w}" for w in WAYS)


class Program(NamedTuple):
    """A loss to train, the batch of every step, and the first parameters from a random key."""

    loss: Callable[..., jax.Array]
    x: Any
    init: Callable[[jax.Array], Params]


def _layers(*widths: int) -> dict[str, tuple[int, int]]:
    return {f"{n}": pair for n, pair in enumerate(itertools.pairwise(widths))}


def _network(params: Params, x: jax.Array) -> jax.Array:
    return perceptron(list(params.values()), x, jnp.float32)


def fourier_features() -> Program:
    """Classify images of digits by sines and cosines of their random projections."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = jnp.float32(pixels[:512] / 16), jax.nn.one_hot(labels[:512], 10)

    def loss(params: Params, data: Any) -> jax.Array:
        images, targets = data
        angles = images @ params["waves"]  # needs float32
        features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return jnp.mean((_network(params["net"], features) - targets) ** 2)

    def init(key: jax.Array) -> Params:
        first, second = jax.random.split(key)
        waves = 20 * jax.random.normal(first, (64, 64))
        return {"waves": waves, "net": init_layers(second, _layers(128, 64, 10))}

    return Program(loss, (images, targets), init)


def codebook() -> Program:
    """Describe images of digits by entries of a codebook, chosen by their distances."""
    images = jnp.float32(load_digits().data[:512] / 16)

    def loss(params: Params, images: jax.Array) -> jax.Array:
        codes = _network(params["encoder"], images) + 20
        book = params["book"]
        products = codes @ book.T  # needs float32
        distances = jnp.sum(codes**2, 1)[:, None] - 2 * products + jnp.sum(book**2, 1)[None]
        chosen = jax.nn.softmax(-distances) @ book  # needs float32
        outputs = _network(params["decoder"], chosen - 20)
        return jnp.mean((outputs - images) ** 2) + 0.25 * jnp.mean((codes - chosen) ** 2)

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 3)
        return {
            "encoder": init_layers(keys[0], _layers(64, 64, 8)),
            "decoder": init_layers(keys[1], _layers(8, 64, 64)),
            "book": 20 + jax.random.normal(keys[2], (64, 8)),
        }

    return Program(loss, images, init)


def covariance() -> Program:
    """Make uncorrelated features of images of digits, whose mean is not zero."""
    images = jnp.float32(load_digits().data[:512] / 16)

    def loss(params: Params, images: jax.Array) -> jax.Array:
        features = _network(params["net"], images) + 20
        mean = jnp.mean(features, 0)
        squares = features.T @ features / len(features)  # needs float32
        return jnp.mean((squares - jnp.outer(mean, mean) - jnp.eye(len(mean))) ** 2)

    def init(key: jax.Array) -> Params:
        return {"net": init_layers(key, _layers(64, 64, 16))}

    return Program(loss, images, init)


PROGRAMS = {
    "Fourier features": fourier_features,
    "codebook": codebook,
    "covariance": covariance,
}


def search(program: Program) -> ols.diagnostics.PrecisionSearch:
    """Return which lines of a program need float32, with its first parameters."""
    params = program.init(jax.random.key(0))
    return ols.diagnostics.precision_search(program.loss, params, program.x)


def cast(
    program: Program, way: str, found: ols.diagnostics.PrecisionSearch
) -> Callable[..., jax.Array]:
    """Return the loss of a program as it is trained in a way, after the search."""
    if way == FLOAT32:
        return program.loss
    keep = found.keep if way == KEPT else ()
    return ols.autocast(program.loss, jnp.bfloat16, keep=keep)


def train(loss: Callable[..., jax.Array], program: Program, steps: int, seeds: int) -> list[float]:
    """Return the mean loss in the last tenth of the steps, for each seed."""

    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def run(x: Any, params: Params) -> jax.Array:
        _, losses = fit(optax.adam(1e-3), lambda p, _: loss(p, x), params, jnp.arange(steps))
        return jnp.mean(losses[-max(1, steps // 10) :])

    return [float(run(program.x, program.init(jax.random.key(seed)))) for seed in range(seeds)]


def measure(*, quick: bool) -> Report:
    """Return a table: the named lines, the gradient's error, and the loss after training."""
    seeds, steps = (2, 4) if quick else (4, STEPS)
    programs: dict[str, Any] = {}
    for name, make in PROGRAMS.items():
        program = make()
        found = search(program)
        programs[name] = {
            "lines": [line.partition(": ")[2] for line in found.lines],
            "kept": [line.partition(": ")[2] for line in found.keep],
            "errors": [found.error, found.error_kept],
            "losses": {
                way: train(cast(program, way, found), program, steps, seeds) for way in WAYS
            },
        }
    numbers = {"steps": steps, "programs": programs}
    return Report(block(numbers), numbers)


def block(results: dict[str, Any]) -> str:
    """Return the table and what it shows, as Markdown."""
    steps, programs = results["steps"], results["programs"]
    note = f"Mean loss of the last {steps // 10} of {steps} steps, with 95 % confidence intervals."
    return f"{table(HEAD, [_row(*each) for each in programs.items()])}\n\n{note}"


def _row(name: str, found: dict[str, Any]) -> list[str]:
    named = f"{len(found['kept'])} of {len(found['lines'])}"
    off = [f"{float(f'{100 * error:.2g}'):,g}" for error in found["errors"]]
    ends = [interval(losses) for losses in found["losses"].values()]
    return [f"**{name}**", named, *off, *(f"{mean:.2g} ± {margin:.1g}" for mean, margin in ends)]
