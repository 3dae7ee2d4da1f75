"""Compile steps for GPUs and TPUs that need not be there, and count what they do.

    python -m benchmarks.aot

XLA compiles for a device that it is told about. What it compiles to can be counted: bytes, kernels,
exchanges between devices, memory, and XLA's own estimates of time. It is the same in every run, and
no measurement. The tables are written to `aot.md`, all numbers to `aot.json`, programs to `hlo`.
"""

import argparse
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks import command, page, suite
from benchmarks.contenders import (
    ALL_CONTENDERS,
    CONTENDERS,
    MASTERS,
    REMAINDERS,
    Contender,
    Control,
    HalfStack,
    KerasAlone,
    MastersByHand,
    OptaxAlone,
    Ours,
    Stack,
)
from benchmarks.hlo import count
from benchmarks.workloads import (
    SIZES,
    Gradients,
    Sizes,
    Training,
    gradients,
    half_parameters,
    many,
    resnet50,
    transformer,
    wide,
)

TARGETS = Path(__file__).with_name("targets")  # XLA's own descriptions of two GPUs
GPUS = {"h100": "h100_sxm.txtpb", "a100": "a100_sxm_80.txtpb"}
TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
BACKENDS = (*GPUS, *TPUS, "cpu")
# XLA has a cost model of the H100, and none of the A100. Autotuning, for which there must be a GPU,
# takes cuBLAS or Triton for each matrix product; without, XLA takes Triton wherever it may.
COMPILER_OPTIONS = {
    "h100": {"xla_gpu_autotune_level": 0, "xla_gpu_collect_cost_model_stats": True},
    "a100": {"xla_gpu_autotune_level": 0},
}
DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled: arrays, the inner optimizer, and how four devices share them."""

    title: str
    optimizer: str = "adamw"
    arrays: str = "wide"
    spread: str = ""


CASES = {
    "wide": Case("12 arrays, `adamw`"),
    "deep": Case("161 arrays, `adamw`", arrays="deep"),
    "many": Case("480 arrays, `adamw`", arrays="many"),
    "float16": Case("12 arrays, float16 gradients, `adamw`", arrays="float16"),
    "clip": Case("12 arrays, clipping and `adamw`", "clipping + adamw"),
    "clip-deep": Case("161 arrays, clipping and `adamw`", "clipping + adamw", "deep"),
    "lion": Case("12 arrays, `lion`", "lion"),
    "adafactor": Case("12 arrays, `adafactor`", "adafactor"),
    "fsdp": Case("161 arrays, first axes over 4 devices", arrays="deep", spread="fsdp"),
    "explicit": Case("the same, the mesh's axis Explicit", arrays="deep", spread="explicit"),
    "replicated": Case("those of one axis on all devices", arrays="deep", spread="replicated"),
    "tensor": Case("161 arrays, alternating axes over 4 devices", arrays="deep", spread="tensor"),
    "shard_map": Case("161 arrays, `shard_map` over 4 devices", arrays="deep", spread="shard_map"),
    "masters": Case("12 float16 arrays with masters, `adamw`", arrays="half"),
    "remainders": Case("12 bfloat16 arrays with masters, `adamw`", arrays="bfloat16"),
    "remainders-clip": Case("the same with clipping", "clipping + adamw", "bfloat16"),
    "stack": Case("12 arrays, clipping, `adamw`, Spike and scaling", "clipping + adamw"),
    "stack-half": Case("the same, float16 parameters with masters", "clipping + adamw", "half"),
    "stack-shard_map": Case("the same over 4 devices", "clipping + adamw", spread="shard_map"),
    "training": Case("training step, float16 transformer", arrays="transformer"),
    "training-clip": Case("the same with clipping", "clipping + adamw", "transformer"),
    "training-large": Case(
        "the same with 142M parameters", "clipping + adamw", "transformer: large"
    ),
    "training-scanned": Case(
        "the same, its layers scanned", "clipping + adamw", "transformer: scan"
    ),
    "training-bfloat16": Case("the same in bfloat16", "clipping + adamw", "transformer: bfloat16"),
}
ARRAYS: dict[str, Callable[[Sizes], Any]] = {
    "wide": lambda s: gradients(wide(s.wide // 2), jnp.float32),
    "deep": lambda s: gradients(resnet50(s), jnp.float32),
    "many": lambda s: gradients(many(3 * len(resnet50(s)) - 3), jnp.float32),
    "float16": lambda s: gradients(wide(s.wide // 2), jnp.float16),
    "half": lambda s: half_parameters(wide(s.wide // 2)),
    "bfloat16": lambda s: half_parameters(wide(s.wide // 2), jnp.bfloat16),
    "transformer": transformer,
    "transformer: large": lambda s: transformer(s.larger()),
    "transformer: scan": lambda s: transformer(s.larger(), scanned=True),
    "transformer: bfloat16": lambda s: transformer(s.larger(), jnp.bfloat16, scanned=True),
}


class OverAxis(Ours):
    """This library in `shard_map`."""

    axis_name = "data"


class StackOverAxis(Stack):
    """All of it in `shard_map`."""

    axis_name = "data"


CONTENDERS_OF = {
    "masters": MASTERS,
    "remainders": REMAINDERS,
    "remainders-clip": REMAINDERS,
    "shard_map": (OptaxAlone, OverAxis),
    "stack": (OptaxAlone, Stack),
    "stack-half": (MastersByHand, HalfStack),
    "stack-shard_map": (OptaxAlone, StackOverAxis),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Compile everything that was asked for, and write the tables."""
    args = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    (args.output / "hlo").mkdir(parents=True, exist_ok=True)
    rows = []
    for backend in args.backends:
        for row in run(backend, args):
            rows.append(row)
            print(json.dumps(row), flush=True)
            (args.output / "aot.json").write_text(json.dumps(rows, indent=1) + "\n")
            (args.output / "aot.md").write_text(markdown(rows))
    print(f"Written to {args.output}: aot.md, aot.json, hlo")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = command.parser("benchmarks.aot", __doc__)
    add = parser.add_argument
    add("--backends", nargs="+", choices=BACKENDS, default=BACKENDS[:-1])
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    names = [kind.__name__ for kind in (*ALL_CONTENDERS, OverAxis, StackOverAxis)]
    add("--contenders", nargs="+", choices=names, default=names, help="baselines always run")
    add("--triton", action="store_true", help="matrix products by Triton in place of cuBLAS")
    add("--size", choices=SIZES, default="full", help="size of the workloads")
    add("--output", type=Path, default=Path("output/aot"), help="folder for the results")
    return parser.parse_args(argv)


def run(backend: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compile for one backend, and yield what is counted."""
    devices = find_devices(backend)
    for name in args.cases:
        case = CASES[name]
        workload = shapes(case.arrays, SIZES[args.size])
        for kind in CONTENDERS_OF.get(name, CONTENDERS):
            chosen = kind.__name__ in args.contenders or kind.name == kind.baseline
            if not chosen or issubclass(kind, (KerasAlone, Control)):
                continue  # Keras' optimizer holds arrays of the device on which Keras runs
            row = {"backend": backend, "case": name, "contender": kind.name}
            start = time.perf_counter()
            options = dict(COMPILER_OPTIONS.get(backend, {}))
            if backend in GPUS:
                options["xla_gpu_enable_triton_gemm"] = args.triton
            try:
                compiled = compile_case(options, case, kind, workload, devices)
            except suite.LeftOutError as reason:
                yield row | {"left_out": str(reason)}
                continue
            row["seconds"] = round(time.perf_counter() - start, 1)
            text, memory = compiled.as_text(), compiled.memory_analysis()
            (args.output / "hlo" / f"{backend}-{name}-{kind.__name__}.txt").write_text(text)
            row |= {"temporary": memory.temp_size_in_bytes, "in_place": memory.alias_size_in_bytes}
            yield row | dataclasses.asdict(count(text))


def find_devices(backend: str) -> list[Any]:
    """Return four devices to compile for."""
    if backend == "cpu":
        return jax.devices()[:DEVICES]
    if backend in GPUS:
        target = (TARGETS / GPUS[backend]).read_text()
        one_host = f"1x1x{DEVICES}"
        return topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=one_host
        ).devices
    return topologies.get_topology_desc(TPUS[backend], "tpu").devices[:DEVICES]


def shapes(arrays: str, sizes: Sizes) -> Gradients | Training:
    """Return a workload with shapes in place of arrays, unless it holds a function, too."""
    workload = functools.partial(ARRAYS[arrays], sizes)
    return workload() if arrays.startswith("transformer") else jax.eval_shape(workload)


def compile_case(
    options: dict[str, Any],
    case: Case,
    kind: type[Contender],
    workload: Gradients | Training,
    devices: list[Any],
) -> Any:
    """Compile a contender's step, with its state donated."""
    jax.clear_caches()
    lowered = lower(case, kind, workload, devices if case.spread else devices[:1])
    try:
        return lowered.compile(options)
    except Exception as error:
        raise suite.LeftOutError(f"raises {type(error).__name__}") from error


def lower(
    case: Case, kind: type[Contender], workload: Gradients | Training, devices: list[Any]
) -> Any:
    """Trace a contender's step for these devices."""
    # An axis is not there before `shard_map`, so what uses it cannot be checked on its own.
    build = suite.take if kind.axis_name else functools.partial(suite.build, chosen=[kind])
    contender, step, data = build(kind, case.optimizer, workload)
    axis_type = AxisType.Explicit if case.spread == "explicit" else AxisType.Auto
    mesh = Mesh(devices, ("data",), axis_types=(axis_type,))

    def place(path: Any, leaf: Any) -> Any:
        sharding: Any = SingleDeviceSharding(devices[0])
        if case.spread:
            index = next((key.idx for key in reversed(path) if hasattr(key, "idx")), 0)
            is_rule = "rule_state" in jax.tree_util.keystr(path)  # the same on every device
            sharding = NamedSharding(mesh, P() if is_rule else spec(leaf.shape, index, case.spread))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = jax.eval_shape(contender.init, workload.params)
    arguments = jax.tree_util.tree_map_with_path(place, (state, data))
    if case.spread == "shard_map":
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    out = jax.tree.map(lambda leaf: leaf.sharding, arguments[0])
    return jax.jit(step, donate_argnums=0, out_shardings=out).lower(*arguments)


def spec(shape: tuple[int, ...], index: int, spread: str) -> P:
    """Say which axis of an array is split: the first that can be, or one after the other."""
    axes = [axis for axis, n in enumerate(shape) if n % DEVICES == 0 and n >= 16 * DEVICES]
    if not axes or (spread == "replicated" and len(shape) == 1):
        return P()
    chosen = axes[index % len(axes)] if spread == "tensor" else axes[0]
    return P(*("data" if axis == chosen else None for axis in range(len(shape))))


COLUMNS = ("bytes", "kernels", "collectives", "exchanged", "temporary MB", "estimate", "seconds")


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table for each backend and case."""
    parts = [f"# Compiled ahead of time\n\njax {jax.__version__}."]
    for backend in dict.fromkeys(row["backend"] for row in rows):
        for name in dict.fromkeys(row["case"] for row in rows if row["backend"] == backend):
            found = [row for row in rows if (row["backend"], row["case"]) == (backend, name)]
            lines = [[row["contender"], *cells(row, found[0])] for row in found]
            table = page.table(["", *COLUMNS], lines)
            parts.append(f"## {backend}: {CASES[name].title}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def cells(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Return a row of a table; bytes and estimates are ratios to the baseline."""
    if "left_out" in row:
        return [row["left_out"], *[""] * (len(COLUMNS) - 1)]
    measure = "cycles" if base["cycles"] else "microseconds"
    return [
        f"{row['bytes'] / base['bytes']:.3f}",
        str(row["kernels"]),
        str(row["collectives"]),
        str(row["exchanged"]),
        f"{row['temporary'] / 1e6:.1f}",
        f"{row[measure] / base[measure]:.3f}" if base[measure] else "",
        str(row["seconds"]),
    ]


if __name__ == "__main__":
    main()
