"""Compile steps for GPUs and TPUs, which need not be present, and count what the programs do.

    python -m benchmarks.aot

XLA can compile for a device from a description of it. The tables count bytes, kernels, collectives
and memory in the compiled programs, and have XLA's own estimates of time. These figures are the
same in every run. They are not measurements. The tables are written to `aot.md`, all numbers to
`aot.json`, and programs to `hlo`.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from benchmarks import page, report
from benchmarks.cases import CASES, LeftOutError, Step, build, excused, select
from benchmarks.contenders import CONTENDERS
from benchmarks.hlo import compile_step, for_another_platform
from benchmarks.workloads import SIZES

TARGETS = Path(__file__).with_name("targets")  # XLA's own description of a GPU
BACKENDS = "h100", "v5e", "v6e", "cpu"
# Autotuning needs a GPU, and chooses cuBLAS or Triton for each matrix product. Without it, XLA uses
# Triton wherever it can.
ON_GPU = {"xla_gpu_autotune_level": 0, "xla_gpu_collect_cost_model_stats": True}
DEVICES = 4
# Keras' optimizer holds arrays of the device that Keras runs on. The control measures noise, which
# programs do not have.
LEFT_OUT = "Keras", "KerasScaled", "Control"
TIMED = "sgd", "momentum", "row-major"  # cases that are only timed


def main(argv: Sequence[str] | None = None) -> None:
    """Compile the requested cases, and write the tables."""
    parser = page.parser("benchmarks.aot", __doc__)
    add = parser.add_argument
    add("--backends", nargs="+", choices=BACKENDS, default=BACKENDS[:-1])
    add("--cases", nargs="+", choices=CASES, default=[c for c in CASES if c not in TIMED])
    names = [name for name in CONTENDERS if name not in LEFT_OUT]
    add("--contenders", nargs="+", choices=names, default=names, help="baselines always run")
    add("--triton", action="store_true", help="use Triton instead of cuBLAS for matrix products")
    add("--size", choices=SIZES, default="full", help="size of the workloads")
    add("--output", type=Path, default=Path("output/aot"), help="folder for the results")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    (args.output / "hlo").mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    print(page.INTERRUPTED.format("--backends and --cases"))
    cases = [*product(args.backends, args.cases)]
    for backend, name in tqdm(cases, unit="case", disable=None):
        rows: dict[str, Any] = {}
        results[f"{backend} {name}"] = {"title": f"{backend}: {CASES[name].title}", "rows": rows}
        for contender, row in run(backend, name, args):
            rows[contender] = row
            tqdm.write(f"{backend} {name} {contender} {row}")
            (args.output / "aot.json").write_text(json.dumps(results, indent=1) + "\n")
            (args.output / "aot.md").write_text(markdown(results))
    print(f"Written to {args.output}: aot.md, aot.json, hlo")


def run(backend: str, name: str, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Compile a case for one backend, and yield the counts of each contender."""
    devices = find_devices(backend)
    options = ON_GPU | {"xla_gpu_enable_triton_gemm": args.triton} if backend == "h100" else {}
    sizes = SIZES[args.size]
    case = CASES[name]
    workload = jax.eval_shape(partial(case.workload, replace(sizes, wide=sizes.wide // 2)))
    contenders = select(case, args.contenders)
    first = next(iter(contenders.values())).name
    for key, contender in contenders.items():
        jax.clear_caches()
        try:
            with excused(contender, first):
                _, step = build(contender, case.optimizer, workload)
                step, out = place(step, case.spread, devices)
                compiled, row = compile_step(
                    *step, options=options, unknown_trips=case.unknown_trips, out_shardings=out
                )
            (args.output / "hlo" / f"{backend}-{name}-{key}.txt").write_text(compiled.as_text())
        except LeftOutError as reason:
            row = {"left_out": str(reason)}
        yield contender.name, {"baseline": first} | row


def find_devices(backend: str) -> list[Any]:
    """Return four devices to compile for."""
    if backend == "cpu":
        return jax.devices()[:DEVICES]
    find = topologies.get_topology_desc
    if backend != "h100":
        return find(f"{backend}:2x2", "tpu").devices[:DEVICES]
    target = (TARGETS / "h100_sxm.txtpb").read_text()
    return find(platform="cuda", target_config=target, topology=f"1x1x{DEVICES}").devices


def place(step: Step, spread: str, devices: list[Any]) -> tuple[Step, Any]:
    """Return a step with its arguments on these devices, and the sharding of its results.

    Without a `spread`, everything is on the first device.
    """
    axis_type = AxisType.Explicit if spread == "explicit" else AxisType.Auto
    mesh = Mesh(devices, ("data",), axis_types=(axis_type,))

    def placed(path: Any, leaf: Any) -> Any:
        sharding: Any = SingleDeviceSharding(devices[0])
        if spread:
            is_rule = "rule_states" in jax.tree_util.keystr(path)  # the same on every device
            sharding = NamedSharding(mesh, P() if is_rule else spec(leaf.shape, spread))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    arguments = jax.tree_util.tree_map_with_path(placed, (step.state, step.data))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments)
    run = step.run
    if not spread and devices[0].platform != "cpu":
        run = for_another_platform()(run)
    if spread == "shard_map":
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return Step(run, *arguments), shardings[0]


def spec(shape: tuple[int, ...], spread: str) -> P:
    """Return the sharding that splits the first axis that can be split."""
    axes = [axis for axis, n in enumerate(shape) if n % DEVICES == 0 and n >= 16 * DEVICES]
    if not axes or (spread == "replicated" and len(shape) == 1):
        return P()
    return P(*[None] * axes[0], "data")


def markdown(results: dict[str, Any]) -> str:
    """Return a table for each backend and case. Bytes and estimates are ratios to the baseline."""
    columns = {
        "bytes": report.quotient("bytes", ".3f"),
        **{name: report.number(name) for name in ("kernels", "collectives", "exchanged")},
        "temporary MB": report.number("temporary", 1e6, ".1f"),
        "estimated time": report.quotient("microseconds", ".3f"),
        "estimated cycles": report.quotient("cycles", ".3f"),
        "compile s": report.number("compile_seconds", 1, ".1f"),
    }
    tables = (f"## {r['title']}\n\n{report.tabulate(r['rows'], columns)}" for r in results.values())
    return "\n\n".join([f"# Compiled ahead of time\n\njax {jax.__version__}.", *tables]) + "\n"


if __name__ == "__main__":
    main()
