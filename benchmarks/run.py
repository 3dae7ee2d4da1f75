"""Measure the cost of loss scaling in this library and in others.

    python -m benchmarks.run

Writes tables (`benchmarks.md`) and all measurements (`benchmarks.json`) to the output folder. Close
other programs first. The row A/A compares plain Optax with itself: its distance from 1.00 is the
noise of the ratios.
"""

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks import page, report
from benchmarks.cases import CASES, Case, LeftOutError, build, excused, select
from benchmarks.contenders import CONTENDERS
from benchmarks.hlo import compile_step
from benchmarks.workloads import SIZES, Sizes

INNER = "sgd", "momentum", "lion", "adafactor", "clip"
STEPS = "wide", "deep", "float16", "guards", "masters", "training", *INNER
PRECISIONS = "autocast", "autocast-scanned", "flash"
Results = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks and write the results."""
    parser = page.parser("benchmarks.run", __doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="full", help="size of the workloads")
    add(
        "--only",
        nargs="+",
        choices=(*STEPS, *PRECISIONS, "row-major"),
        default=STEPS,
        help="what to run",
    )
    names = [*CONTENDERS]
    add("--contenders", nargs="+", choices=names, default=names, help="baselines always run")
    add("--rounds", type=int, default=11, help="rounds of timed steps")
    add("--sample-seconds", type=float, default=0.3, help="length of one sample")
    add("--output", type=Path, default=Path("output/benchmarks"), help="folder for the results")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_compilation_cache", False)  # compilation is timed
    results = {
        "environment": page.environment("jax", "jaxlib", *{c.package for c in CONTENDERS.values()}),
        "settings": vars(args) | {"output": str(args.output), "load": os.getloadavg()[0]},
        "steps": {},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    print(page.INTERRUPTED.format("--only"))
    sizes = SIZES[args.size]
    inner = dataclasses.replace(sizes, wide=sizes.inner)
    for name in args.only:
        if name in PRECISIONS and args.size == "full" and jax.default_backend() == "cpu":
            print("A CPU is slow in half precision: here, the transformer is a small one.")
            found = time_steps(CASES[name], SIZES["small"], args)
        else:
            found = time_steps(CASES[name], inner if name in INNER else sizes, args)
        results["steps"][name] = found
        (args.output / "benchmarks.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.output / "benchmarks.md").write_text(report.markdown(results))
    print((args.output / "benchmarks.md").read_text())
    print(f"Written to {args.output}: benchmarks.md, benchmarks.json")


def time_steps(case: Case, sizes: Sizes, args: argparse.Namespace) -> Results:
    """Compile and time every contender of a case, and record why any is left out."""
    contenders = select(case, args.contenders).values()
    first = CONTENDERS[case.contenders[0]].name
    workload = case.workload(sizes)
    samplers: dict[str, Callable[[int], float]] = {}
    rows: dict[str, Results] = {}
    for contender in tqdm(contenders, desc=f"{case.title}: compiling", leave=False):
        row = rows[contender.name] = {"baseline": contender.baseline or first}
        try:
            with excused(contender, row["baseline"]):
                init, step = build(contender, case.optimizer, workload)
                jax.clear_caches()  # compilation is timed too
                run, facts = compile_step(*step, unknown_trips=case.unknown_trips)
        except LeftOutError as reason:
            row["left_out"] = str(reason)
            continue
        samplers[contender.name] = partial(sample, run, partial(init, workload.params), step.data)
        row |= facts
    seconds = time_in_turns(samplers, args.rounds, args.sample_seconds, case.title)
    for name, taken in seconds.items():
        base = seconds[rows[name]["baseline"]]
        ratios = [time / other for time, other in zip(taken, base, strict=True)]
        rows[name] |= {"seconds": taken, "ratios": ratios}
    arrays = [leaf.size for leaf in jax.tree.leaves(workload.params)]
    size = f"{sum(arrays):,} parameters in {len(arrays)} arrays"
    return {"title": case.title, "size": size, "rows": rows}


def sample(run: Callable, init: Callable[[], Any], data: Any, count: int) -> float:
    """Run `count` steps after a discarded one, and return the seconds that a step takes."""
    state = jax.block_until_ready(run(init(), data))
    start = time.perf_counter()
    for _ in range(count):
        state = run(state, data)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / count


def time_in_turns(
    samplers: dict[str, Callable[[int], float]], rounds: int, sample_seconds: float, title: str
) -> dict[str, list[float]]:
    """Return the seconds of a step in each round, by contender.

    Each round samples every step once, in shuffled order. A sample has as many steps as fill
    `sample_seconds`, estimated from a discarded step. Only one state exists at a time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    counts: dict[str, int] = {}
    rng = np.random.default_rng(0)
    turns = [name for _ in range(rounds) for name in rng.permutation([*samplers]).tolist()]
    for name in tqdm([*samplers, *turns], desc=title):
        taken = samplers[name](counts.get(name, 1))
        if name in counts:
            seconds[name].append(taken)
        else:
            counts[name] = min(1000, max(1, math.ceil(sample_seconds / taken)))
    return seconds


if __name__ == "__main__":
    main()
