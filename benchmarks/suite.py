"""The benchmarks, and how to run each with every contender."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks import measure
from benchmarks.contenders import CONTENDERS, MASTERS, Contender, Ours, State
from benchmarks.workloads import (
    ADAMW,
    OPTIMIZERS,
    Gradients,
    Sizes,
    Training,
    Tree,
    gradients,
    half_parameters,
    many,
    resnet50,
    transformer,
    wide,
)

Row = dict[str, Any]
Rows = dict[str, Row]  # by contender


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line; see its help."""

    sizes: Sizes
    contenders: tuple[type[Contender], ...]
    rounds: int
    sample_seconds: float
    compile_rounds: int
    compile_limit: float
    seed: int


@dataclasses.dataclass(frozen=True)
class StepBenchmark:
    """A timed step: its heading, its inner optimizer, what makes its workload, and who takes it."""

    title: str
    optimizer: str
    workload: Callable[[Sizes], Gradients | Training]
    contenders: tuple[type[Contender], ...] = CONTENDERS


STEPS: dict[str, list[StepBenchmark]] = {
    "wide": [
        StepBenchmark(
            "Optimizer step, large arrays", ADAMW, lambda s: gradients(wide(s.wide), jnp.float32)
        )
    ],
    "deep": [
        StepBenchmark(
            "Optimizer step, ResNet-50", ADAMW, lambda s: gradients(resnet50(s), jnp.float32)
        )
    ],
    "float16": [
        StepBenchmark(
            "Optimizer step, float16 gradients",
            ADAMW,
            lambda s: gradients(wide(s.wide), jnp.float16),
        )
    ],
    "masters": [
        StepBenchmark(
            "Optimizer step, float16 parameters and masters",
            ADAMW,
            lambda s: half_parameters(wide(s.wide)),
            MASTERS,
        )
    ],
    "training": [StepBenchmark("Training step, float16 transformer", ADAMW, transformer)],
    "inner": [
        StepBenchmark(
            f"Optimizer step, {name}", name, lambda s: gradients(wide(s.inner), jnp.float32)
        )
        for name in OPTIMIZERS
        if name != ADAMW
    ],
}
COMPILATION = "compilation"


class LeftOutError(Exception):
    """A contender is left out. The message gives the reason."""


def run_steps(benchmark: StepBenchmark, options: Options) -> dict[str, Any]:
    """Compile and time every contender on one workload, and record why any is left out."""
    contenders = benchmark.contenders
    workload = benchmark.workload(options.sizes)
    steps: dict[str, measure.Compiled] = {}
    rows: Rows = {kind.name: {"baseline": kind.baseline} for kind in contenders}
    with tqdm(contenders, desc=f"{benchmark.title}: compiling", leave=False) as bar:
        for kind in bar:
            bar.set_postfix_str(kind.name)
            try:
                contender, step, data = build(
                    kind, benchmark.optimizer, workload, options.contenders
                )
            except LeftOutError as reason:
                rows[kind.name]["left_out"] = str(reason)
                continue
            init = functools.partial(contender.init, workload.params)
            run, facts = measure.compile_step(step, init(), data)
            steps[kind.name] = measure.Compiled(run, init, data)
            rows[kind.name] |= dataclasses.asdict(facts)
    with tqdm(total=len(steps) * (options.rounds + 1), desc=benchmark.title) as bar:
        samples = measure.time_steps(
            steps,
            rounds=options.rounds,
            sample_seconds=options.sample_seconds,
            seed=options.seed,
            tick=functools.partial(_tick, bar),
        )
    for kind in contenders:
        if kind.name in samples:
            taken = samples[kind.name]
            ratios = measure.ratios(taken.seconds, samples[kind.baseline].seconds)
            rows[kind.name] |= {**dataclasses.asdict(taken), "ratios": ratios}
    leaves = jax.tree.leaves(workload.params)
    return {
        "title": benchmark.title,
        "optimizer": benchmark.optimizer,
        "arrays": len(leaves),
        "parameters": sum(leaf.size for leaf in leaves),
        "rows": rows,
    }


def run_compilation(options: Options) -> Iterator[dict[str, Any]]:
    """Time tracing and compilation, and yield the results for each number of arrays."""
    too_slow: dict[str, str] = {}
    for arrays in options.sizes.arrays:
        workload = gradients(many(arrays), jnp.float32)
        rows: Rows = {kind.name: {"baseline": kind.baseline} for kind in CONTENDERS}
        compilers: dict[str, Callable[[], Any]] = {}
        for kind in CONTENDERS:
            try:
                if kind.name in too_slow:
                    raise LeftOutError(too_slow[kind.name])  # noqa: TRY301 - handled like others
                contender, step, data = build(kind, ADAMW, workload, options.contenders)
            except LeftOutError as reason:
                rows[kind.name]["left_out"] = str(reason)
                continue
            state = contender.init(workload.params)
            shapes = jax.eval_shape(lambda *args: args, state, data)
            compilers[kind.name] = functools.partial(measure.compile_step, step, *shapes)
        turns = len(compilers) * options.compile_rounds
        with tqdm(total=turns, desc=f"Compilation, {arrays} arrays") as bar:
            seconds = measure.time_compilation(
                compilers,
                rounds=options.compile_rounds,
                limit=options.compile_limit,
                seed=options.seed,
                tick=functools.partial(_tick, bar),
            )
        for kind in CONTENDERS:
            if kind.name in seconds:
                taken = seconds[kind.name]
                ratios = measure.ratios(taken, seconds[kind.baseline][: len(taken)])
                rows[kind.name] |= {"seconds": taken, "ratios": ratios}
                if max(taken) > options.compile_limit:
                    too_slow[kind.name] = f"{max(taken):.0f} s at {arrays} arrays, then stopped"
        yield {"arrays": arrays, "rows": rows}


def build(
    kind: type[Contender],
    optimizer: str,
    workload: Gradients | Training,
    chosen: Collection[type[Contender]],
) -> tuple[Contender, Callable[[State, Tree], State], Tree]:
    """Return a contender, its step, and the second argument of the step.

    Raises:
      LeftOutError: If the contender was not chosen, is not installed, does not support the
        optimizer, or fails. Errors of this library and of baselines are raised unchanged.
    """
    if kind not in chosen:
        raise LeftOutError("not chosen")
    if kind.version() is None:
        raise LeftOutError("not installed")
    if optimizer not in kind.optimizers:
        raise LeftOutError(f"{' and '.join(kind.optimizers)} only")
    try:
        contender, step, data = take(kind, optimizer, workload)
        jax.eval_shape(step, jax.eval_shape(contender.init, workload.params), data)
    except Exception as error:
        if issubclass(kind, Ours) or kind.name == kind.baseline:
            raise
        message = str(error).partition("\n")[0].replace("|", "/")  # safe in a table cell
        raise LeftOutError(f"raises {type(error).__name__}: {message}") from error
    return contender, step, data


def take(
    kind: type[Contender], optimizer: str, workload: Gradients | Training
) -> tuple[Contender, Callable[[State, Tree], State], Tree]:
    """Return a contender, its step, and the second argument of the step, unchecked."""
    contender = kind(optimizer, workload.params)
    if isinstance(workload, Training):
        step = functools.partial(contender.training_step, workload.loss_fn)
        return contender, step, workload.batch
    data = workload.scaled if kind.scales else workload.unscaled
    return contender, contender.optimizer_step, data


def _tick(bar: tqdm, name: str) -> None:
    bar.set_postfix_str(name, refresh=False)
    bar.update()
