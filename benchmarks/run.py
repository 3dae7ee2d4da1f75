"""Measure the cost of loss scaling in this library and in others.

    python -m benchmarks.run

Writes tables (`benchmarks.md`), a picture (`benchmarks.png`) and all measurements
(`benchmarks.json`) to the output folder. Close other programs first. The row A/A compares plain
Optax with itself: its distance from 1.00 is the noise of the ratios.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from benchmarks import command, report, suite
from benchmarks.contenders import ALL_CONTENDERS, Contender
from benchmarks.workloads import SIZES

ALL = (*suite.STEPS, suite.COMPILATION)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks and write the results."""
    args = parse(argv)
    jax.config.update("jax_enable_compilation_cache", False)  # compilation is timed
    options = suite.Options(
        sizes=SIZES[args.size],
        contenders=chosen(args.contenders),
        rounds=args.rounds,
        sample_seconds=args.sample_seconds,
        compile_rounds=args.compile_rounds,
        compile_limit=args.compile_limit,
        seed=args.seed,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    results = {
        "environment": environment(),
        "settings": vars(args) | {"output": str(args.output)},
        "steps": {},
        "compilation": [],
    }
    # Written after each benchmark, so that an interrupted run keeps its results.
    for group in (group for group in suite.STEPS if group in args.only):
        found = results["steps"].setdefault(group, [])
        for benchmark in suite.STEPS[group]:
            found.append(suite.run_steps(benchmark, options))
            write(results, args.output)
    if suite.COMPILATION in args.only:
        for found in suite.run_compilation(options):
            results["compilation"].append(found)
            write(results, args.output)
    print((args.output / "benchmarks.md").read_text())
    print(f"Written to {args.output}: benchmarks.md, benchmarks.png, benchmarks.json")


def write(results: dict[str, Any], output: Path) -> None:
    """Write the results so far: the measurements, the tables and the picture."""
    results["environment"]["load_after"] = os.getloadavg()[0]
    (output / "benchmarks.json").write_text(json.dumps(results, indent=1) + "\n")
    (output / "benchmarks.md").write_text(report.markdown(results))
    report.draw(results, output / "benchmarks.png")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = command.parser("benchmarks.run", __doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="full", help="size of the workloads")
    add("--only", nargs="+", choices=ALL, default=ALL, help="the benchmarks to run")
    add(
        "--contenders",
        nargs="+",
        choices=[kind.__name__ for kind in ALL_CONTENDERS],
        default=[kind.__name__ for kind in ALL_CONTENDERS],
        help="contenders to run; baselines always run",
    )
    add("--rounds", type=int, default=11, help="rounds of timed steps")
    add("--sample-seconds", type=float, default=0.3, help="length of one sample")
    add("--compile-rounds", type=int, default=3, help="rounds of timed compilation")
    add(
        "--compile-limit",
        type=float,
        default=15.0,
        help="seconds after which a contender is not compiled again",
    )
    add("--seed", type=int, default=0, help="seed of the order within a round")
    add("--output", type=Path, default=Path("output/benchmarks"), help="folder for the results")
    args = parser.parse_args(argv)
    if min(args.rounds, args.compile_rounds) < 1:
        parser.error("--rounds and --compile-rounds must be at least 1")
    return args


def chosen(names: Sequence[str]) -> tuple[type[Contender], ...]:
    """Return the contenders with these class names, and their baselines."""
    baselines = {kind.baseline for kind in ALL_CONTENDERS if kind.__name__ in names}
    return tuple(k for k in ALL_CONTENDERS if k.__name__ in names or k.name in baselines)


def environment() -> dict[str, Any]:
    """Return the hardware, the versions, and the current load of the machine."""
    device = jax.devices()[0]
    versions = {kind.package: kind.version() for kind in ALL_CONTENDERS}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": f"{device.platform}: {device.device_kind}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")} | versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "load_before": os.getloadavg()[0],
    }


def processor() -> str:
    """Return the name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


if __name__ == "__main__":
    main()
