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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks import page, report
from benchmarks.cases import CASES, Case, LeftOutError, build, excused, select
from benchmarks.contenders import CONTENDERS
from benchmarks.hlo import compile_step
from benchmarks.workloads import ADAMW, SIZES, Sizes, gradients, resnet50

INNER = "sgd", "momentum", "lion", "adafactor", "muon", "clip"
STEPS = "wide", "deep", "float16", "guards", "masters", "training", *INNER
COMPILATION = "compilation"
COMPILE_LIMIT = 15.0  # seconds; who is slower is not asked to compile more arrays
Results = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks and write the results."""
    args = parse(argv)
    jax.config.update("jax_enable_compilation_cache", False)  # compilation is timed
    results = {
        "environment": page.environment("jax", "jaxlib", *{c.package for c in CONTENDERS.values()}),
        "settings": vars(args) | {"output": str(args.output), "load": os.getloadavg()[0]},
        "steps": {},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    print(page.INTERRUPTED.format("--only"))
    for name, found in run(args):
        results["steps"][name] = found
        (args.output / "benchmarks.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.output / "benchmarks.md").write_text(report.markdown(results))
    print((args.output / "benchmarks.md").read_text())
    print(f"Written to {args.output}: benchmarks.md, benchmarks.json")


def run(args: argparse.Namespace) -> Iterator[tuple[str, Results]]:
    """Run what was asked for, and yield the names and the results."""
    sizes = SIZES[args.size]
    for name in args.only:
        if name == COMPILATION:
            yield from time_compilation(sizes, args)
        else:
            inner = dataclasses.replace(sizes, wide=sizes.inner)
            yield name, time_steps(CASES[name], inner if name in INNER else sizes, args)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = page.parser("benchmarks.run", __doc__)
    add = parser.add_argument
    every = *STEPS, COMPILATION
    add("--size", choices=SIZES, default="full", help="size of the workloads")
    add("--only", nargs="+", choices=(*every, "row-major"), default=every, help="what to run")
    names = [*CONTENDERS]
    add("--contenders", nargs="+", choices=names, default=names, help="baselines always run")
    add("--rounds", type=int, default=11, help="rounds of timed steps")
    add("--sample-seconds", type=float, default=0.3, help="length of one sample")
    add("--output", type=Path, default=Path("output/benchmarks"), help="folder for the results")
    return parser.parse_args(argv)


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
                run, facts = compile_step(*step)
        except LeftOutError as reason:
            row["left_out"] = str(reason)
            continue
        samplers[contender.name] = partial(sample, run, partial(init, workload.params), step.data)
        row |= facts
    seconds = time_in_turns(samplers, args.rounds, args.sample_seconds, case.title)
    for name, taken in seconds.items():
        rows[name]["seconds"] = taken
    return finish(case.title, workload.params, rows)


def finish(title: str, params: Any, rows: dict[str, Results]) -> Results:
    """Return the results, with ratios of times to those of the baseline in the same round."""
    for row in rows.values():
        if "seconds" in row:
            pairs = zip(row["seconds"], rows[row["baseline"]]["seconds"], strict=False)
            row["ratios"] = [seconds / base for seconds, base in pairs]
    arrays = [leaf.size for leaf in jax.tree.leaves(params)]
    size = f"{sum(arrays) / 1e6:.1f}M" if sum(arrays) >= 1e5 else f"{sum(arrays):,}"
    return {"title": title, "size": f"{size} parameters in {len(arrays)} arrays", "rows": rows}


def sample(run: Callable, init: Callable[[], Any], data: Any, count: int) -> float:
    """Run `count` steps in a row after a discarded one, and return the seconds of one."""
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

    Each round samples every step once, in shuffled order, and a first one, which is discarded,
    estimates the time of a step. A sample has as many as fill `sample_seconds`, at least one. Only
    one state is alive at a time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    counts: dict[str, int] = {}
    for name in tqdm([*samplers, *in_turns(samplers, rounds)], desc=title):
        taken = samplers[name](counts.get(name, 1))
        if name in counts:
            seconds[name].append(taken)
        else:
            counts[name] = min(1000, max(1, math.ceil(sample_seconds / taken)))
    return seconds


def in_turns(names: Iterable[str], rounds: int) -> list[str]:
    """Return the names in each round, in shuffled order."""
    rng = np.random.default_rng(0)
    return [name for _ in range(rounds) for name in rng.permutation([*names]).tolist()]


def time_compilation(sizes: Sizes, args: argparse.Namespace) -> Iterator[tuple[str, Results]]:
    """Time tracing and compilation, and yield the results for each number of arrays."""
    contenders = {each.name: each for each in select(CASES["wide"], args.contenders).values()}
    first = next(iter(contenders))
    for arrays in sizes.arrays:
        workload = gradients([*islice(cycle(resnet50(Sizes())), arrays)])
        rows: dict[str, Results] = {
            n: {"baseline": c.baseline or first} for n, c in contenders.items()
        }
        for name in tqdm(in_turns(rows, min(3, args.rounds)), desc=f"Compilation, {arrays} arrays"):
            row = rows[name]
            if "left_out" in row or max(row.get("seconds", [0])) > COMPILE_LIMIT:
                continue
            try:
                with excused(contenders[name], row["baseline"]):
                    _, step = build(contenders[name], ADAMW, workload)
                    jax.clear_caches()
                    _, facts = compile_step(*step)
            except LeftOutError as reason:
                row["left_out"] = str(reason)
                continue
            row.setdefault("seconds", []).append(facts["compile_seconds"])
        slow = {n for n, row in rows.items() if max(row.get("seconds", [0])) > COMPILE_LIMIT}
        contenders = {
            n: each for n, each in contenders.items() if not slow & {n, rows[n]["baseline"]}
        }
        title = f"`adamw`, to compile {arrays} arrays"
        yield f"{COMPILATION}, {arrays}", finish(title, workload.params, rows)


if __name__ == "__main__":
    main()
