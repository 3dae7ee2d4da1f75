"""Train in float32, bfloat16, float16, and float16 with loss scaling, and compare the results.

    python -m benchmarks.fidelity

Writes `training.json` (all numbers), `training.md` (the table) and `training.png` to the output
folder. `--write docs/training.md` updates the table in that page, and the numbers and the picture
that belong to it. The numbers are saved after each seed, and `--resume` continues from there.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks.fidelity import report
from benchmarks.fidelity.report import Results
from benchmarks.fidelity.tasks import Task, all_tasks, corpus_facts
from benchmarks.fidelity.training import SCALED, WAYS, make_train, ways


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or load the numbers of an earlier run, and write the results."""
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "training.json"
    if args.results:
        results = json.loads(args.results.read_text())
    else:
        results = measure(seeds=args.seeds, quick=args.quick, file=file, resume=args.resume)
    file.write_text(report.to_json(results))
    (args.output / "training.md").write_text(report.block(results) + "\n")
    report.draw(results, args.output / "training.png")
    print(report.block(results))
    print(f"Written to {args.output}: training.md, training.json, training.png")
    if args.write:
        report.write(results, args.write)
        print(f"Updated {args.write}, its numbers and its picture")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seeds", type=int, default=8, help="number of seeds, at least 2")
    add("--quick", action="store_true", help="train each task for a few steps only, as a check")
    add("--resume", action="store_true", help="continue the run in the output folder")
    add("--results", type=Path, help="training.json to load instead of training")
    add("--output", type=Path, default=Path("output/fidelity"), help="folder for the results")
    add("--write", type=Path, help="page to update")
    args = parser.parse_args(argv)
    if args.seeds < 2:
        parser.error(f"--seeds must be at least 2, got {args.seeds}: one seed gives no interval")
    return args


def measure(*, seeds: int, quick: bool, file: Path, resume: bool) -> Results:
    """Train every task in every way from every seed, and save the numbers after each seed."""
    tasks = all_tasks(quick=quick)
    trains = {(task.name, way): make_train(task, way) for task in tasks for way in ways(task)}
    results = {
        "environment": environment(),
        "loss_scale": WAYS[SCALED][1].get_config(),
        "text": corpus_facts(),
        "seconds": 0,
        "processor_seconds": 0,
        "tasks": [
            {
                "name": task.name,
                "metric": task.metric,
                "decimals": task.decimals,
                "steps": task.steps,
                "parameters": parameters(task),
                "runs": {way: [] for way in ways(task)},
            }
            for task in tasks
        ],
    }
    if resume:
        take_up(results, json.loads(file.read_text()))
    before = results["seconds"] - time.perf_counter()
    processor_before = results["processor_seconds"] - time.process_time()
    rounds = seeds * sum(task.evaluations * len(ways(task)) for task in tasks)
    with tqdm(total=rounds) as progress:
        for seed in range(seeds):
            for task, stored in zip(tasks, results["tasks"], strict=True):
                for way, runs in stored["runs"].items():
                    progress.set_description(f"seed {seed}, {task.name}, {way}")
                    if seed < len(runs):
                        progress.update(task.evaluations)
                    else:
                        runs.append(trains[task.name, way](seed, progress.update)._asdict())
            results["seconds"] = round(before + time.perf_counter())
            results["processor_seconds"] = round(processor_before + time.process_time())
            file.write_text(report.to_json(results))
    return results


def take_up(results: Results, earlier: Results) -> None:
    """Copy the runs of an interrupted start into the results; the tasks must be the same."""

    def facts(results: Results) -> tuple:
        tasks = [task | {"runs": list(task["runs"])} for task in results["tasks"]]
        return tasks, results["text"], results["loss_scale"]

    if facts(earlier) != facts(results):
        raise ValueError("the stored runs are of other tasks: start without --resume")
    results["tasks"] = earlier["tasks"]
    results["seconds"] = earlier["seconds"]
    results["processor_seconds"] = earlier["processor_seconds"]


def parameters(task: Task) -> int:
    """Return the number of parameters."""
    shapes = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def environment() -> Results:
    """Return the date, the machine and the versions."""
    packages = "jax", "jaxlib", "optax", "flax", "scikit-learn"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{jax.devices()[0].platform}, {platform.machine()}",
        "cores": os.cpu_count(),
        "versions": {"CPython": platform.python_version()}
        | {name: metadata.version(name) for name in packages},
    }


if __name__ == "__main__":
    main()
