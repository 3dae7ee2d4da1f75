"""Train in float32, bfloat16, float16, and float16 with loss scaling, and compare the results.

    python -m benchmarks.fidelity --pages docs --results benchmarks/results

Each part of the pages is measured anew: `fidelity` and `sensitive` of evidence.md, `gain` and
`edge` of why.md, `memory`, `state` and `optimizers` of bfloat16_state.md, `parameters`, `rounding`
and `continued` of master_weights.md, `spikes` of skipping.md, and `reinforce` of recipes.md. The
numbers that a page shows are stored as JSON in a file with the part's name.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import page, reinforcement, spikes
from benchmarks.fidelity import edge, gain, parameters, report, rounding, sensitive, state, training
from benchmarks.fidelity.tasks import all_tasks


def fidelity(*, quick: bool) -> page.Report:
    """Measure what training learns in each format."""
    results = training.measure(all_tasks(quick=quick), seeds=2 if quick else 4)
    return page.Report(report.block(results), results, {"training": report.draw(results)})


VERSIONS = "versions"  # of what was installed as a part was measured

# The page of each part, and what measures it.
PARTS: dict[str, tuple[str, Callable[..., page.Report]]] = {
    "fidelity": ("evidence", fidelity),
    "sensitive": ("evidence", sensitive.measure),
    "parameters": ("master_weights", parameters.measure),
    "gain": ("why", gain.measure),
    "edge": ("why", edge.measure),
    "memory": ("bfloat16_state", state.memory),
    "state": ("bfloat16_state", state.measure),
    "optimizers": ("bfloat16_state", state.measure_each),
    "rounding": ("master_weights", rounding.wander),
    "continued": ("master_weights", rounding.going_on),
    "spikes": ("skipping", spikes.measure),
    "reinforce": ("recipes", reinforcement.measure),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the parts, print them, and write each to its page as soon as it is measured."""
    parser = page.parser("benchmarks.fidelity", __doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="the parts to measure")
    add("--quick", action="store_true", help="train for a few steps only, as a check")
    add("--pages", type=Path, default=Path("output/fidelity"), help="folder of the pages")
    add("--results", type=Path, default=Path("output/fidelity"), help="folder of the numbers")
    args = parser.parse_args(argv)
    for folder in (args.pages, args.results):
        folder.mkdir(parents=True, exist_ok=True)
    print(page.INTERRUPTED.format("--only"))
    for part in tqdm(args.only, unit="part", disable=None):
        name, measure = PARTS[part]
        file = args.pages / f"{name}.md"
        if not file.exists():
            shutil.copy(f"docs/{name}.md", file)
        found = measure(quick=args.quick)
        page.publish(found, part, file)
        if found.numbers:
            (args.results / f"{part}.json").write_text(page.as_json(found.numbers))
        record(part, args.pages, args.results)
        print(f"{found.text}\n\nWritten to {file}\n")


def record(part: str, pages: Path, results: Path) -> None:
    """Store when and with what a part was measured, and list that of all parts on a page."""
    stored, listed = results / f"{VERSIONS}.json", pages / f"{PARTS['fidelity'][0]}.md"
    for file, folder in ((stored, page.RESULTS), (listed, Path("docs"))):
        if not file.exists():
            shutil.copy(folder / file.name, file)
    of_parts = json.loads(stored.read_text())
    of_parts[part] = page.environment("jax", "jaxlib", "optax", "flax", "scikit-learn")
    stored.write_text(page.as_json(of_parts))
    page.publish(page.Report(versions(of_parts)), VERSIONS, listed)


def versions(of_parts: Mapping[str, str]) -> str:
    """Return the dates and versions of all parts, and by part where versions differ."""
    measured: dict[str, dict[str, str]] = {}  # dates of parts, by what was installed
    for part, environment in of_parts.items():
        date, _, installed = environment.partition(", ")
        measured.setdefault(installed, {})[part] = date
    lines = []
    for installed, dates in measured.items():
        parts = f" ({', '.join(dates)})" if len(measured) > 1 else ""
        first, last = min(dates.values()), max(dates.values())
        lines.append(f"{first} to {last}{parts}, {installed}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
