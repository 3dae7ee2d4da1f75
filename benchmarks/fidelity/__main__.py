"""Train in float32, bfloat16, float16, and float16 with loss scaling, and compare the results.

    python -m benchmarks.fidelity

Writes `training.json` (all numbers), `training.md` (the table), `training.png` and
`training_edge.png` to the output folder. `--write docs/training.md` updates the table in that page,
and the numbers and the pictures that belong to it. The numbers are saved after each run, and
`--resume` continues from there; it trains a task again if its steps or size have changed.
`--tasks words diabetes --seeds 2` measures only these.
"""

import argparse
import functools
import json
import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks import command
from benchmarks.fidelity import report
from benchmarks.fidelity.edge import measure_edge
from benchmarks.fidelity.report import Results
from benchmarks.fidelity.tasks import TASKS, Task, all_tasks, corpus_facts
from benchmarks.fidelity.training import SCALED, WAYS, make_train


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or load the numbers of an earlier run, and write the results."""
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "training.json"
    if args.results:
        results = json.loads(args.results.read_text())
    else:
        tasks = all_tasks(args.tasks, quick=args.quick)
        results = measure(tasks, seeds=args.seeds, file=file, resume=args.resume)
        if not args.tasks and not args.quick:
            measure_edge(results, functools.partial(save, results, file))
    save(results, file)
    (args.output / "training.md").write_text(report.block(results) + "\n")
    report.draw(results, args.output / "training.png")
    if results["edge"]["trained"]:
        report.draw_edge(results["edge"], args.output / "training_edge.png")
    print(report.block(results))
    print(f"Written to {args.output}: training.md, training.json and the pictures")
    if args.write:
        report.write(results, args.write)
        print(f"Updated {args.write}, its numbers and its pictures")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = command.parser("benchmarks.fidelity", __doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=4, help="number of seeds, at least 2")
    add("--tasks", nargs="*", default=[], choices=list(TASKS), help="tasks to train instead of all")
    add("--quick", action="store_true", help="train each task for a few steps only, as a check")
    add("--resume", action="store_true", help="continue the run in the output folder")
    add("--results", type=Path, help="training.json to load instead of training")
    add("--output", type=Path, default=Path("output/fidelity"), help="folder for the results")
    add("--write", type=Path, help="page to update")
    args = parser.parse_args(argv)
    if args.write and (args.tasks or args.quick):
        parser.error("--write needs all tasks in full length: leave out --tasks and --quick")
    if args.seeds < 2:
        parser.error(f"--seeds must be at least 2, got {args.seeds}: one seed gives no interval")
    return args


def measure(tasks: Sequence[Task], *, seeds: int, file: Path, resume: bool) -> Results:
    """Train every task in every way from every seed, and save the numbers after each run."""
    results = {
        "environment": environment(),
        "loss_scale": WAYS[SCALED][1].get_config(),
        "text": corpus_facts(),
        "seconds": 0,
        "processor_seconds": 0,
        "tasks": [
            {
                "name": task.name,
                "fails": task.fails,
                "metric": task.metric,
                "decimals": task.decimals,
                "steps": task.steps,
                "parameters": parameters(task),
                "runs": {way: [] for way in WAYS},
            }
            for task in tasks
        ],
        "edge": {"gradients": [], "trained": []},
    }
    if resume:
        take_up(results, json.loads(file.read_text()))
    before = results["seconds"] - time.perf_counter()
    processor_before = results["processor_seconds"] - time.process_time()
    rounds = seeds * sum(task.evaluations * len(WAYS) for task in tasks)
    with tqdm(total=rounds, disable=None) as progress:  # None: in a terminal only
        for task, stored in zip(tasks, results["tasks"], strict=True):
            for way, runs in stored["runs"].items():
                train = make_train(task, way)
                progress.update(len(runs) * task.evaluations)
                for seed in range(len(runs), seeds):
                    progress.set_description(f"{task.name}, {way}, seed {seed}")
                    runs.append(train(seed, progress.update)._asdict())
                    results["seconds"] = round(before + time.perf_counter())
                    results["processor_seconds"] = round(processor_before + time.process_time())
                    save(results, file)
    return results


def save(results: Results, file: Path) -> None:
    """Write the numbers to a file."""
    file.write_text(report.to_json(results))


def take_up(results: Results, earlier: Results) -> None:
    """Copy what an earlier start measured. Tasks that have changed since are trained again."""
    for name in ("text", "loss_scale"):
        if earlier[name] != results[name]:
            raise ValueError(f"the stored runs have another {name}: start without --resume")

    def facts(task: Results) -> Results:
        return task | {"runs": list(task["runs"])}

    for task in results["tasks"]:
        for stored in earlier["tasks"]:
            if facts(stored) == facts(task):
                task["runs"] = stored["runs"]
    results["edge"] = earlier["edge"]
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
