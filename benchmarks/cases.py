"""The cases to time or compile: their workloads, their inner optimizers and their contenders."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.attention import INNER_TRIPS
from benchmarks.contenders import CONTENDERS, Contender, Ours, State
from benchmarks.page import version
from benchmarks.workloads import (
    ADAMW,
    Gradients,
    Sizes,
    Training,
    Tree,
    checkpointed_layer,
    gradients,
    layer_by_blocks,
    layer_that_keeps_dots,
    resnet50,
    transformer,
    wide,
)

CLIP = "clipping + adamw"
LIBRARIES = (
    "Optax", "Control", "Ours", "Jmp", "Flax", "Mpx", "Jaxamp", "IfFinite", "Keras", "KerasScaled",
)  # fmt: skip
GUARDS = "Optax", "Control", "SkipIf", "IfFinite", "Spike", "SpikeNorm", "MaxText", "Levanter"
AUTOCAST = (
    "Optax", "Control", "Float32", "Tf32", "Autocast", "ByHand", "AutocastBfloat16",
    "ByHandBfloat16",
)  # fmt: skip
STORED = "RemaindersBfloat16State", "AutocastRemaindersBfloat16State"
REMAINDERS = (
    "MastersByHand", "Masters", "Remainders", "SkipIfRemainders", "RemaindersBfloat16State",
    "SpikeRemaindersBfloat16State", "RoundedBfloat16State", "SpikeRoundedBfloat16State",
)  # fmt: skip


class Case(NamedTuple):
    """A title, a workload, the names of the contenders, and how four devices share the workload.

    The first contender is the baseline. A loop runs `unknown_trips` times if the compiled
    program does not show how often.
    """

    title: str
    workload: Callable[[Sizes], Gradients | Training]
    optimizer: str = ADAMW
    contenders: tuple[str, ...] = LIBRARIES
    spread: str = ""
    unknown_trips: float = 1


def _wide(dtype: Any = jnp.float32, params_dtype: Any = jnp.float32) -> Callable:
    return lambda sizes: gradients(wide(sizes.wide), dtype, params_dtype)


def _deep(sizes: Sizes) -> Gradients:
    return gradients(resnet50(sizes))


def _larger(**options: Any) -> Callable:
    return lambda sizes: transformer(sizes.larger(), **options)


_STORED = {"scanned": True, "plain": True, "stored": jnp.bfloat16}


def _deep_bfloat16(sizes: Sizes) -> Gradients:
    return gradients(resnet50(sizes), jnp.bfloat16, jnp.bfloat16)


_HALF = _wide(jnp.float16, jnp.float16)
_BFLOAT16 = _wide(jnp.bfloat16, jnp.bfloat16)

CASES = {
    "wide": Case("12 arrays, `adamw`", _wide()),
    "deep": Case("ResNet-50's 161 arrays, `adamw`", _deep),
    "float16": Case("12 arrays, float16 gradients, `adamw`", _wide(jnp.float16)),
    "functions": Case(
        "12 arrays, pure functions", _wide(),
        contenders=("Optax", "Functional", "Ours", "Jmp"),
    ),
    "guards": Case("12 arrays, skips without scaling", _wide(), contenders=GUARDS),
    "state": Case(
        "12 arrays, state in two bytes", _wide(), contenders=("Optax", "Control", "Bfloat16State")
    ),
    "sgd": Case("12 arrays, `sgd`", _wide(), "sgd"),
    "momentum": Case("12 arrays, `sgd` with momentum", _wide(), "sgd, momentum"),
    "lion": Case("12 arrays, `lion`", _wide(), "lion"),
    "adafactor": Case("12 arrays, `adafactor`", _wide(), "adafactor"),
    "clip": Case("12 arrays, clipping and `adamw`", _wide(), CLIP),
    "clip-deep": Case("161 arrays, clipping and `adamw`", _deep, CLIP),
    "fsdp": Case("161 arrays, first axes over 4 devices", _deep, spread="fsdp"),
    "explicit": Case("the same, the mesh's axis Explicit", _deep, spread="explicit"),
    "replicated": Case("those of one axis on all devices", _deep, spread="replicated"),
    "shard_map": Case(
        "161 arrays, `shard_map` over 4 devices", _deep,
        contenders=("Optax", "Ours"), spread="shard_map",
    ),
    "masters": Case(
        "12 float16 arrays with masters, `adamw`", _HALF,
        contenders=("MastersByHand", "Masters", "MastersScaled"),
    ),
    "remainders": Case(
        "12 bfloat16 arrays with masters, `adamw`", _BFLOAT16, contenders=REMAINDERS
    ),
    "remainders-clip": Case("the same with clipping", _BFLOAT16, CLIP, REMAINDERS),
    "remainders-lion": Case("the same with `lion`", _BFLOAT16, "lion", REMAINDERS),
    "remainders-fsdp": Case(
        "161 bfloat16 arrays, first axes over 4 devices", _deep_bfloat16,
        contenders=("Optax", "RoundedBfloat16State"), spread="fsdp",
    ),
    "stack": Case(
        "12 arrays, clipping, `adamw`, Spike and scaling", _wide(), CLIP, ("Optax", "Stack")
    ),
    "stack-half": Case(
        "the same, float16 parameters with masters", _HALF, CLIP,
        ("MastersByHand", "Stack", "StackByHand"),
    ),
    "stack-shard_map": Case(
        "the same over 4 devices", _wide(), CLIP, ("Optax", "Stack"), "shard_map"
    ),
    "training": Case("training step, float16 transformer", transformer),
    # XLA:CPU (seen in jaxlib 0.10.2) transposes a weight's gradient in each loop that reads it.
    "row-major": Case(
        "training step, float16 transformer, gradients in row-major order", transformer,
        contenders=("Optax", "Control", "OptaxRowMajor", "Ours", "OursRowMajor"),
    ),
    "training-clip": Case("the same with clipping", transformer, CLIP),
    "training-large": Case("the same with 142M parameters", _larger(), CLIP),
    "training-scanned": Case("the same, its layers scanned", _larger(scanned=True), CLIP),
    "autocast": Case(
        "training step, plain float32 transformer", _larger(plain=True), contenders=AUTOCAST
    ),
    "autocast-scanned": Case(
        "the same, its layers scanned", _larger(scanned=True, plain=True), contenders=AUTOCAST
    ),
    "autocast-remat": Case(
        "the same, its layers scanned, in `jax.checkpoint`",
        _larger(scanned=True, plain=True, run_layer=checkpointed_layer),
        contenders=("Optax", "Control", "Autocast", "AutocastCheckpoints", "ByHand"),
    ),
    "flash": Case(
        "the same with attention by blocks, in loops",
        _larger(scanned=True, plain=True, run_layer=layer_by_blocks),
        contenders=AUTOCAST, unknown_trips=INNER_TRIPS,
    ),
    "autocast-stored": Case(
        "the same, its layers scanned, parameters stored in bfloat16", _larger(**_STORED),
        contenders=STORED,
    ),
    "autocast-stored-dots": Case(
        "the same, with `checkpoint_dots`",
        _larger(**_STORED, run_layer=layer_that_keeps_dots), contenders=STORED,
    ),
}  # fmt: skip


class Step(NamedTuple):
    """A step, `state = run(state, data)`, with the first state or its shapes."""

    run: Callable[[State, Tree], State]
    state: State
    data: Tree


class LeftOutError(Exception):
    """A contender is left out. The message gives the reason."""


def select(case: Case, names: Collection[str]) -> dict[str, Contender]:
    """Return the contenders of a case with these names, and their baselines."""
    baselines = {CONTENDERS[name].baseline for name in case.contenders if name in names}
    found = {}
    for name in case.contenders:
        each = CONTENDERS[name]
        if name == case.contenders[0] or name in names or each.name in baselines:
            mapped = case.spread == "shard_map" and isinstance(each, Ours)
            found[name] = replace(each, axis_name="data") if mapped else each
    return found


def build(
    contender: Contender, optimizer: str, workload: Gradients | Training
) -> tuple[Callable[[Tree], State], Step]:
    """Return the function that makes a contender's first state, and the step with its shapes.

    Raises:
      LeftOutError: If the contender is not installed, or does not support the optimizer.
    """
    if version(contender.package) is None:
        raise LeftOutError("not installed")
    if optimizer not in contender.optimizers:
        raise LeftOutError(f"{' and '.join(contender.optimizers)} only")
    tx = contender.make(optimizer, workload.params)
    init = partial(contender.init, tx)
    state = jax.eval_shape(init, workload.params)
    if isinstance(workload, Training):
        run = partial(contender.training_step, workload.loss_fn, tx)
        return init, Step(run, state, workload.batch)

    def run(state: State, data: tuple[Tree, jax.Array]) -> State:
        return contender.optimizer_step(tx, state, *data)

    grads = workload.scaled if contender.scales else workload.unscaled
    return init, Step(run, state, (grads, workload.loss))


@contextmanager
def excused(contender: Contender, baseline: str) -> Iterator[None]:
    """Leave out a peer that raises. Errors of this library and of baselines are not caught."""
    try:
        yield
    except Exception as error:
        own = isinstance(contender, Ours) or contender.name == baseline
        if own or isinstance(error, LeftOutError):
            raise
        message = str(error).partition("\n")[0].replace("|", "/")  # safe in a table cell
        raise LeftOutError(f"raises {type(error).__name__}: {message}") from error
