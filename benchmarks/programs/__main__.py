"""Train public programs in float32, float16 and bfloat16, and write what changes to a page.

    python -m benchmarks.programs FOLDER --pages docs

FOLDER holds checkouts or Git directories of the programs' repositories, which others wrote and
which are no part of this one: `FOLDER/owner+name/repo`, `FOLDER/owner+name`, `FOLDER/owner/name` or
`FOLDER/name`. The functions of `drivers.py` make each program small and give it data that needs no
download. They need what the programs import beyond the group `test`: `diffrax`, `distrax`,
`einops`, `gymnax<0.0.9`, `ml_collections`, `scipy`, `tabulate`.
All of them take about half an hour on two cores. The table has every program whose results lie in
the folder of `--output`, so that `--only` measures some of them anew.
"""

import json
import math
import multiprocessing
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import page
from benchmarks.programs.listed import PROGRAMS
from benchmarks.programs.source import Program, commit, find
from benchmarks.programs.training import WAYS, Result, train_alone

COMMAND = "python -m benchmarks.programs"
PART, PAGE = "programs", "trust"
HEAD = (
    "program",
    "changed lines",
    *("half, %: `autocast`", "half, %: arrays"),
    *("float32", "float16", "bfloat16", "float16 arrays"),
)
PACKAGES = "jax", "optax", "flax", "dm-haiku", "equinox", "diffrax"


def measure(program: Program, folder: Path) -> dict[str, Result]:
    """Train a program in each way, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    found = {}
    for name, way in WAYS.items():
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            found[name] = pool.submit(train_alone, program, folder, way).result()
        print(f"  {name}: {found[name]}", flush=True)
    return found


def row(program: Program, results: Mapping[str, Result], sha: str) -> list[str]:
    """Return the row of a program."""
    file = program.file.replace("[", "%5B").replace("]", "%5D")
    link = f"https://github.com/{program.repository}/blob/{sha[:8]}/{file}"
    name, colon, result = program.name.partition(":")
    return [
        f"[{name}]({link}){colon}{result}",
        str(results["float16"].lines),
        *(share(results[way]) for way in ("float16", "arrays")),
        *(final(results[way]) for way in WAYS),
    ]


def share(result: Result) -> str:
    """Return the percentage of the products' operations in half precision."""
    return f"{100 * result.share:.3g}" if result.flops else "none"


def final(result: Result) -> str:
    """Return the final loss with four digits, or what went wrong."""
    if result.error:
        return result.error.partition(":")[0]
    if result.skipped and result.skipped == result.steps - 1:
        return "every step skipped"
    return f"{result.final:.4g}" if math.isfinite(result.final) else "NaN"


def main(argv: Sequence[str] | None = None) -> None:
    """Train the programs, and write the table to its page after each of them."""
    parser = page.parser("benchmarks.programs", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="where the programs' repositories lie")
    add("--only", nargs="+", choices=PROGRAMS, default=[*PROGRAMS], help="the programs to train")
    add("--output", type=Path, default=Path("output/programs"), help="folder of the results")
    add("--pages", type=Path, help="folder of the pages; without it, a copy beside the results")
    args = parser.parse_args(argv)
    pages = args.pages or args.output
    args.output.mkdir(parents=True, exist_ok=True)
    if not (pages / f"{PAGE}.md").exists():
        shutil.copy(f"docs/{PAGE}.md", pages)
    for name in args.only:
        program = PROGRAMS[name]
        print(f"{name}: {program.repository}, {program.file}", flush=True)
        results = measure(program, args.folder)
        kept = {
            "commit": commit(find(args.folder, program.repository)),
            "environment": page.environment(*PACKAGES),
            "ways": {way: result._asdict() for way, result in results.items()},
        }
        (args.output / f"{name}.json").write_text(json.dumps(kept, indent=1))
    text = table(args.output)
    page.publish(page.Report(text), PART, pages / f"{PAGE}.md", COMMAND)
    print(text)


def table(output: Path) -> str:
    """Return the table of all programs that have results, and how it was measured."""
    body, about = [], ""
    for name, program in PROGRAMS.items():
        if (path := output / f"{name}.json").exists():
            kept = json.loads(path.read_text())
            results = {way: Result(**result) for way, result in kept["ways"].items()}
            body.append(row(program, results, kept["commit"]))
            about = kept["environment"]
    return f"{page.table(HEAD, body)}\n\n{about}."


if __name__ == "__main__":
    main()
