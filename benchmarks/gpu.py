"""Check on a GPU what was so far only compiled for one, the riskiest first, in ten minutes.

    python3 -m benchmarks.gpu

Runs from a bare checkout with only JAX, Optax, Flax and tqdm. Prints a table for
docs/performance.md, and writes all figures to the output folder (`gpu.json`) after each check. A
check that fails or raises does not stop the others. The exit code is 0 if all checks have passed.
"""

import collections
import dataclasses
import functools
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from benchmarks import page
from benchmarks.cases import build
from benchmarks.contenders import CONTENDERS, Contender, Ours, State
from benchmarks.report import quartiles
from benchmarks.run import sample, time_in_turns
from benchmarks.workloads import ADAMW, Gradients, Sizes, Training, Tree, gradients, transformer
from benchmarks.workloads import wide as wide_shapes

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run: out of time"
_SIZE = """\
A transformer of {layers} scanned layers, {features} features, {vocabulary} words and {batch} \
times {length} tokens; {wide:,} parameters in the step of `adamw`"""
LOSS_SCALE = 2.0**12  # for gradients in float16, exact


@dataclasses.dataclass(frozen=True)
class Settings:
    """How large and how long the checks are."""

    sizes: Sizes
    halves: tuple[str, ...]
    steps: int  # of training
    rounds: int  # of timed steps
    sample_seconds: float
    has_limits: bool  # of time and memory


# Without layers, each program compiles in a moment.
DRY = Settings(
    Sizes(wide=6_000, inner=6_000, layers=0, features=64, vocabulary=64, batch=2, length=16),
    halves=("bfloat16",), steps=6, rounds=1, sample_seconds=0, has_limits=False,
)  # fmt: skip
# About 120M parameters and 4,096 tokens.
FULL = Settings(
    Sizes(layers=8, features=1024, vocabulary=8192, batch=8, length=512),
    halves=("bfloat16", "float16"), steps=30, rounds=11, sample_seconds=0.3, has_limits=True,
)  # fmt: skip


class Found(NamedTuple):
    """What a check has found: figures by name, and claims and limits by whether they hold."""

    figures: Mapping[str, Any]
    claims: Mapping[str, bool] = {}
    limits: Mapping[str, bool] = {}  # of time and memory, which hold on a GPU


@functools.cache
def _training(sizes: Sizes) -> Training:
    return transformer(sizes, scanned=sizes.layers > 0, plain=True)


def _compile(fun: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    return jax.jit(fun, donate_argnums=donate).lower(*args).compile()


def _differing(one: Tree, other: Tree) -> int:
    """Return how many elements of two trees do not have the same bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(int(np.sum(_bits(a) != _bits(b))) for a, b in pairs)


def _bits(array: jax.Array) -> np.ndarray:
    host = np.asarray(array)
    return host.view(f"u{host.itemsize}")


# --- A guard


def guard_is_exact(settings: Settings) -> Found:
    """Compare a good step with plain Optax's, and the state after a bad step with that before."""
    params, _, grads, _ = gradients(wide_shapes(settings.sizes.inner))
    plain, tx = optax.adamw(1e-3), ols.with_loss_scaling(optax.adamw(1e-3))
    expected, _ = jax.jit(plain.update)(grads, jax.jit(plain.init)(params), params)
    opt_state = jax.jit(tx.init)(params)
    scaled = optax.tree.scale(ols.scale_loss(1.0, opt_state), grads)
    bad = [*scaled[:-1], scaled[-1].at[-1, -1].set(jnp.inf)]
    update = _compile(tx.update, scaled, opt_state, params)
    jax.block_until_ready((bad, expected, opt_state))
    with jax.transfer_guard("disallow"):
        updates, good_state = update(scaled, opt_state, params)
        no_updates, bad_state = update(bad, good_state, params)
    figures = {
        "updates of a good step": _differing(updates, expected),
        "parameters after a bad step": _differing(optax.apply_updates(params, no_updates), params),
        "state after a bad step": _differing(bad_state.inner_state, good_state.inner_state),
    }
    claims = {f"{name} have the same bits": not count for name, count in figures.items()}
    claims["the good step is applied"] = bool(ols.applied(good_state))
    claims["the bad step is skipped"] = not ols.applied(bad_state)
    return Found(figures, claims)


# --- Gradients

EXACT, DEFAULT = "float32", "JAX's default"
AUTOCAST, BY_HAND = "{} with autocast", "{} by hand"
MOST_OFF = {"bfloat16": 0.05, "float16": 0.01}


def _ways(settings: Settings) -> list[str]:
    """Return the ways to compute a gradient, each in a format."""
    return [EXACT, DEFAULT, *(w.format(h) for h in settings.halves for w in (AUTOCAST, BY_HAND))]


@functools.cache
def _compiled_gradient(sizes: Sizes, way: str) -> Any:
    params, loss_fn, batch = _training(sizes)
    half, _, how = way.partition(" ")
    scale = LOSS_SCALE if half == "float16" else 1.0
    in_half = ols.autocast(loss_fn, half) if how == "with autocast" else loss_fn

    def gradient(params: Tree, batch: jax.Array) -> Tree:
        def scaled(params: Tree) -> jax.Array:
            stored = ols.cast(params, half) if how == "by hand" else params
            return in_half(stored, batch) * scale

        return jax.tree.map(lambda g: g / scale, jax.grad(scaled)(params))

    with jax.default_matmul_precision("float32" if way == EXACT else None):
        return _compile(gradient, params, batch)


def gradients_are_close(settings: Settings) -> Found:
    """Compare gradients with those in float32, by the relative error of the worst array."""
    params, _, batch = _training(settings.sizes)
    exact = _compiled_gradient(settings.sizes, EXACT)(params, batch)
    errors = {
        way: worst_error(_compiled_gradient(settings.sizes, way)(params, batch), exact)
        for way in _ways(settings)
        if way != EXACT
    }
    claims = {
        f"{AUTOCAST.format(half)}: at most {MOST_OFF[half]}": errors[AUTOCAST.format(half)]
        <= MOST_OFF[half]
        for half in settings.halves
    }
    return Found({way: f"{error:.1e}" for way, error in errors.items()}, claims)


def worst_error(grads: Tree, exact: Tree) -> float:
    """Return the largest relative error of an array, or NaN if any error is NaN."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True)
    norm = jnp.linalg.norm
    return float(np.max([norm((g - e).ravel()) / norm(e.ravel()) for g, e in pairs]))


def kernels_and_temporary_memory(settings: Settings) -> Found:
    """Name the kernels of the gradient's matrix products, as XLA chose them on this device."""
    figures, temporary = {}, {}
    for way in _ways(settings):
        compiled = _compiled_gradient(settings.sizes, way)
        temporary[way] = compiled.memory_analysis().temp_size_in_bytes
        kernels = _kernels(compiled.as_text() or "")
        named = [f"{count} {name}" for name, count in kernels.most_common()]
        figures[way] = " + ".join([f"{temporary[way] / 1e6:.0f} MB", *named])
    ways = [AUTOCAST.format(half) for half in settings.halves]
    limits = {f"{way}: less than {EXACT}": temporary[way] < temporary[EXACT] for way in ways}
    return Found(figures, limits=limits)


def _kernels(text: str) -> collections.Counter[str]:
    """Count calls of libraries, and of Triton's kernels, in a compiled program."""
    names = re.findall(r'custom_call_target="([^"]+)"|"kind":"(__[^"]+)"', text)
    return collections.Counter(library or triton for library, triton in names)


# --- Times


class Stored(Ours):
    """Parameters in bfloat16, which it makes of the workload's."""

    def init(self, tx: Any, params: Tree) -> State:
        """Return the state before the first step, in new buffers."""
        return super().init(tx, ols.cast(params, jnp.bfloat16))


STEPS: dict[str, dict[str, Contender]] = {
    "": {EXACT: CONTENDERS["Float32"], DEFAULT: CONTENDERS["Optax"]},
    "bfloat16": {
        AUTOCAST: CONTENDERS["AutocastBfloat16"],
        BY_HAND: CONTENDERS["ByHandBfloat16"],
        "{} with autocast, remainders, moments in two bytes": Stored(
            **vars(CONTENDERS["AutocastRemaindersBfloat16State"])
        ),
    },
    "float16": {AUTOCAST: CONTENDERS["Autocast"], BY_HAND: CONTENDERS["ByHand"]},
}
GUARDS: dict[str, Contender] = {
    "plain Optax": CONTENDERS["Optax"],
    "again (A/A)": CONTENDERS["Control"],
    "with_skipping": CONTENDERS["SkipIf"],
    "with_loss_scaling": CONTENDERS["Ours"],
    "apply_if_finite": CONTENDERS["IfFinite"],
}


def a_step_is_fast(settings: Settings) -> Found:
    """Time a whole training step in turns, each way around AdamW."""
    steps = {
        way.format(half): contender
        for half in ("", *settings.halves)
        for way, contender in STEPS[half].items()
    }
    ms = _milliseconds(steps, _training(settings.sizes), settings)
    limits = {
        f"{half}: autocast at most 1.1 of by hand": ms[AUTOCAST.format(half)]
        <= 1.1 * ms[BY_HAND.format(half)]
        for half in settings.halves
    }
    return Found(_with_ratios(ms), limits=limits)


def a_guard_is_cheap(settings: Settings) -> Found:
    """Time an optimizer's step in turns, with and without guards."""
    workload = gradients(wide_shapes(settings.sizes.wide))
    ms = _milliseconds(GUARDS, workload, settings)
    share = ms["with_skipping"] / ms["plain Optax"]
    return Found(_with_ratios(ms), limits={"with_skipping: at most 1.35": share <= 1.35})


def _milliseconds(
    contenders: Mapping[str, Contender], workload: Gradients | Training, settings: Settings
) -> dict[str, float]:
    """Return the median time of a step, each of which is sampled once in each round."""
    samplers = {}
    for name, contender in contenders.items():
        init, step = build(contender, ADAMW, workload)
        run = _compile(step.run, step.state, step.data, donate=(0,))
        samplers[name] = functools.partial(
            sample, run, functools.partial(init, workload.params), step.data
        )
    seconds = time_in_turns(samplers, settings.rounds, settings.sample_seconds, "timing")
    return {name: 1e3 * quartiles(taken)[1] for name, taken in seconds.items()}


def _with_ratios(ms: Mapping[str, float]) -> dict[str, str]:
    """Return each time, and its ratio to the first one."""
    first = next(iter(ms.values()))
    return {name: f"{value:.3g} ms ({value / first:.2f})" for name, value in ms.items()}


# --- Parameters in bfloat16


def remainders_are_masters(settings: Settings) -> Found:
    """Train with masters in float32 and in remainders, and compare parameters and masters."""
    params, _, grads, _ = gradients(wide_shapes(settings.sizes.inner), jnp.bfloat16, jnp.bfloat16)
    ends = []
    for remainders in (False, True):
        tx = ols.with_master_weights(optax.adamw(1e-3), remainders=remainders)
        ends.append(_after(tx, params, grads, settings.steps))
    differing = _differing(*ends)
    figures = {f"after {settings.steps} steps": differing}
    claims = {
        "the same bits": differing == 0,
        "the parameters have changed": _differing(ends[0][0], params) > 0,
    }
    return Found(figures, claims)


def _after(tx: Any, params: Tree, grads: Tree, steps: int) -> tuple[Tree, Tree]:
    """Return the parameters and their masters after some steps."""
    opt_state = jax.jit(tx.init)(params)

    def step(params: Tree, opt_state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    run = _compile(step, params, opt_state, grads)
    for _ in range(steps):
        params, opt_state = run(params, opt_state, grads)
    return params, ols.master_weights(opt_state, params)


def rounding_is_stochastic(settings: Settings) -> Found:
    """Compare the mean of many rounded weights with the exact one, and the bits with a CPU's."""
    count, rate = 2**16, 2.0**-10
    tx = ols.with_stochastic_rounding(optax.sgd(rate))

    def train(params: Tree, grads: Tree) -> Tree:
        def step(carry: Any, _: None) -> Any:
            params, opt_state = carry
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=settings.steps)
        return params

    start = {"w": jnp.ones(count, jnp.bfloat16)}, {"w": -jnp.ones(count)}
    here = jax.jit(train)(*start)
    there = jax.jit(train)(*jax.device_put(start, jax.devices("cpu")[0]))
    exact = 1 + settings.steps * rate
    error = float(jnp.mean(here["w"], dtype=jnp.float32)) - exact
    # A rounding to one of two neighbors deviates by at most half of their distance, 2**-7.
    deviation = 2.0**-8 * math.sqrt(settings.steps / count)
    differing = _differing(here, there)
    figures = {
        "error of the mean": f"{error:.1e}",
        "one deviation, at most": f"{deviation:.1e}",
        "weights that differ from the CPU's": differing,
    }
    claims = {
        "the mean is within 6 deviations": abs(error) <= 6 * deviation,
        "the bits of the CPU": differing == 0,
    }
    return Found(figures, claims)


# --- Training


def float16_trains(settings: Settings) -> Found:
    """Train on one batch in float32, and in float16 with loss scaling, and compare the losses."""
    first, exact, _ = _train(jnp.float32, settings)
    _, half, skipped = _train(jnp.float16, settings)
    figures = {
        "first loss": f"{first:.4g}",
        f"after {settings.steps} steps: float32": f"{exact:.4g}",
        "float16": f"{half:.4g}",
        "skipped steps": skipped,
    }
    claims = {
        "float32 learns": exact < first,
        "float16 learns the same": abs(half - exact) <= 0.02 * first,
        "few steps are skipped": skipped < settings.steps / 2,
    }
    return Found(figures, claims)


def _train(dtype: Any, settings: Settings) -> tuple[float, float, int]:
    """Return the first loss, the last one, and how many steps were skipped."""
    params, loss_fn, batch = _training(settings.sizes)
    tx = ols.with_loss_scaling(optax.adamw(1e-3))
    loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, dtype))
    opt_state = jax.jit(tx.init)(params)

    def step(params: Tree, opt_state: Tree, batch: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = loss_and_grads(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    run, losses = _compile(step, params, opt_state, batch), []
    for _ in range(settings.steps):
        params, opt_state, loss = run(params, opt_state, batch)
        losses.append(loss)
    skipped = int(ols.loss_scale_state(opt_state).total_skipped)
    return float(losses[0]), float(losses[-1]), skipped


def peak_memory(settings: Settings) -> Found:
    """Read how much memory the process has held at once."""
    del settings
    return Found({"peak": f"{_peak() / 1e6:.0f} MB" if _peak() else "not reported"})


def _peak() -> int:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


CHECKS: dict[str, Callable[[Settings], Found]] = {
    "elements that differ beside plain Optax": guard_is_exact,
    "relative error of the worst gradient": gradients_are_close,
    "a training step": a_step_is_fast,
    "an `adamw` step": a_guard_is_cheap,
    "elements that differ, remainders beside float32 masters": remainders_are_masters,
    "stochastic rounding": rounding_is_stochastic,
    "training in float16": float16_trains,
    "temporary memory and kernels of the gradient": kernels_and_temporary_memory,
    "memory of the process": peak_memory,
}


_EMPTY: dict[str, Any] = {"figures": {}, "broken": []}


def check(name: str, settings: Settings) -> dict[str, Any]:
    """Run a check, and return what it found. If it raises, it has failed."""
    start = time.perf_counter()
    try:
        figures, claims, limits = CHECKS[name](settings)
        judged = {**claims, **(limits if settings.has_limits else {})}
        broken = [claim for claim, holds in judged.items() if not holds]
        result = {"figures": dict(figures), "broken": broken}
    except Exception as error:  # noqa: BLE001, the others must run
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        result = _EMPTY | {"broken": [message], "traceback": traceback.format_exc()}
    result["result"] = FAILED if result["broken"] else PASSED
    return result | {"seconds": time.perf_counter() - start, "peak": _peak()}


def tabulate(results: Mapping[str, Any]) -> str:
    """Return a table with a row for each check, and what it was run with."""
    rows = []
    for name, found in results["checks"].items():
        result = "; ".join([found["result"], *found["broken"]])
        figures = "; ".join(f"{figure} {value}" for figure, value in found["figures"].items())
        rows.append([cell.replace("|", "/") for cell in (name, result, figures)])
    head = results["device"], "result", "figures"
    about = "{environment}. {size}. Ratios are to the first of a row.".format(**results)
    return f"{page.table(head, rows, range(len(head)))}\n\n{about}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, print the table, and return how many have not passed."""
    parser = page.parser("benchmarks.gpu", __doc__)
    add = parser.add_argument
    add("--dry", action="store_true", help="small sizes, for a CPU")
    add("--seconds", type=float, default=540, help="no check starts later than this")
    add("--output", type=Path, default=Path("output/gpu"), help="folder for the figures")
    args = parser.parse_args(argv)
    settings, start = DRY if args.dry else FULL, time.perf_counter()
    results: dict[str, Any] = {
        "device": page.describe(jax.devices()[0]),
        "environment": page.environment("jax", "jaxlib", "optax", "optax_lossscale"),
        "size": _SIZE.format(**vars(settings.sizes)),
        "checks": {},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "gpu.json"
    for name in CHECKS:
        in_time = time.perf_counter() - start < args.seconds
        found = check(name, settings) if in_time else _EMPTY | {"result": NOT_RUN}
        results["checks"][name] = found
        print(f"{name}: {found.get('traceback', found['result'])}", flush=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{tabulate(results)}\n\nWritten to {file}")
    return sum(found["result"] != PASSED for found in results["checks"].values())


if __name__ == "__main__":
    sys.exit(main())
