"""Train public programs with parameters in float32 and bfloat16, and write a page of results.

    python -m benchmarks.programs FOLDER --pages docs

FOLDER holds checkouts or Git directories of the programs' repositories, which others wrote and
which are no part of this one: `FOLDER/owner+name/repo`, `FOLDER/owner+name`, `FOLDER/owner/name` or
`FOLDER/name`. Nothing is downloaded: the command names the checkouts that it misses, and the table
says that their programs were not run. The functions of `drivers.py` make each program small and
give it data that needs no download. They need what the programs import beyond the group `test`:
`clu`, `diffrax`, `distrax`, `dm-pix`, `draccus`, `einops`, `gin-config`, `gymnax<0.0.9`,
`haliax>=1.4.dev0`, `jraph`, `ml_collections`, `scipy`, `tabulate`.

All of them take about an hour on two cores. The table has every program whose results are in the
folder of `--output`, so that `--only` measures some of them anew.
"""

import json
import math
import multiprocessing
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import page
from benchmarks.programs.listed import PROGRAMS
from benchmarks.programs.source import Program, commit, find
from benchmarks.programs.training import EXACT, WAYS, Result, distance, train_alone

COMMAND = "python -m benchmarks.programs"
PART, PAGE = "programs", "trust"
LOSSES = ("program", "license", "changed lines", "half, %", *WAYS)
STORED = (
    "program",
    *(f"gradient off, %: {way}" for way in EXACT),
    *(f"bytes: {way}" for way in WAYS if way not in ("rounded", "autocast")),
)
NOT_RUN = "not run"
PACKAGES = "jax", "optax", "flax", "dm-haiku", "equinox", "diffrax", "distrax", "haliax", "jraph"


def measure(program: Program, folder: Path) -> dict[str, Result]:
    """Train a program in each way, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, Result] = {}
    gradients: dict[str, list[np.ndarray]] = {}
    for name, way in WAYS.items():
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            training = pool.submit(train_alone, program, folder, way).result()
        result, gradients[name] = training
        if name in EXACT:
            result = result._replace(distance=distance(gradients[name], gradients[EXACT[name]]))
        found[name] = result
        print(f"  {name}: {result}", flush=True)
    return found


def link(program: Program, sha: str) -> str:
    """Return the program's name with a link to its file."""
    file = program.file.replace("[", "%5B").replace("]", "%5D")
    name, colon, result = program.name.partition(":")
    return f"[{name}](https://github.com/{program.repository}/blob/{sha[:8]}/{file}){colon}{result}"


def losses(program: Program, results: Mapping[str, Result], sha: str) -> list[str]:
    """Return the row of a program in the table of losses."""
    lines = str(results["autocast"].lines) if program.changes else "our loop"
    shares = [share(results[way]) for way in ("autocast", "masters")]
    finals = (final(result) + mark(program, way) for way, result in results.items())
    return [
        link(program, sha),
        program.license,
        lines,
        " / ".join(dict.fromkeys(shares)),
        *finals,
    ]


def stored(program: Program, results: Mapping[str, Result], sha: str) -> list[str]:
    """Return the row of a program in the table of gradients and bytes."""
    off = (percent(results[way].distance) + mark(program, way) for way in EXACT)
    held = (results[way].held for way in WAYS if way not in ("rounded", "autocast"))
    return [link(program, sha), *off, *(number(bytes_) for bytes_ in held)]


def mark(program: Program, way: str) -> str:
    """Return a mark for a way that the program should not use."""
    return " †" if way in program.unsuited else ""


def share(result: Result) -> str:
    """Return the percentage of the products' operations in half precision."""
    return f"{100 * result.share:.3g}" if result.flops else "none"


def final(result: Result) -> str:
    """Return the final loss with four digits, or what went wrong."""
    if result.error:
        return result.error.partition(":")[0]
    return f"{result.final:.4g}" if math.isfinite(result.final) else "NaN"


def percent(part: float) -> str:
    """Return a percentage with two digits."""
    return number(100 * part)


def number(value: float) -> str:
    """Return a number with three digits, or that there is none."""
    return f"{value:.3g}" if math.isfinite(value) else "none"


def main(argv: Sequence[str] | None = None) -> None:
    """Train the programs, and write the tables to their page after each of them."""
    parser = page.parser("benchmarks.programs", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="where the programs' repositories are")
    add("--only", nargs="+", choices=PROGRAMS, default=[*PROGRAMS], help="the programs to train")
    add("--output", type=Path, default=Path("output/programs"), help="folder of the results")
    add("--pages", type=Path, help="folder of the pages; without it, a copy beside the results")
    args = parser.parse_args(argv)
    pages = args.pages or args.output
    args.output.mkdir(parents=True, exist_ok=True)
    if not (pages / f"{PAGE}.md").exists():
        shutil.copy(f"docs/{PAGE}.md", pages)
    here = [name for name in args.only if found(args.folder, PROGRAMS[name])]
    for repository in sorted({PROGRAMS[name].repository for name in set(args.only) - set(here)}):
        owner, name = repository.split("/")
        print(f"wanted: https://github.com/{repository} in {args.folder / owner}+{name}")
    for name in here:
        program = PROGRAMS[name]
        print(f"{name}: {program.repository}, {program.file}", flush=True)
        results = measure(program, args.folder)
        kept = {
            "commit": commit(find(args.folder, program.repository)),
            "environment": page.environment(*PACKAGES),
            "ways": {way: result._asdict() for way, result in results.items()},
        }
        (args.output / f"{name}.json").write_text(json.dumps(kept, indent=1))
        publish(args.output, pages)
    publish(args.output, pages)


def found(folder: Path, program: Program) -> bool:
    """Return whether the program's repository is in the folder."""
    try:
        return find(folder, program.repository).exists()
    except FileNotFoundError:
        return False


def publish(output: Path, pages: Path) -> None:
    """Write the tables and the numbers of all results."""
    files = {name: output / f"{name}.json" for name in PROGRAMS}
    kept = {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}
    page.publish(page.Report(tables(kept), kept), PART, pages / f"{PAGE}.md", COMMAND)


def tables(kept: Mapping[str, Any]) -> str:
    """Return both tables, why some ways are not for some programs, and how all was measured."""
    bodies: tuple[list[list[str]], list[list[str]]] = [], []
    about: dict[str, None] = {}
    for name, program in PROGRAMS.items():
        for body, row, head in zip(bodies, (losses, stored), (LOSSES, STORED), strict=True):
            if name in kept:
                ways = {way: Result(**result) for way, result in kept[name]["ways"].items()}
                body.append(row(program, ways, kept[name]["commit"]))
            else:
                body.append([link(program, "HEAD"), *[NOT_RUN] * (len(head) - 1)])
        if name in kept:
            about[kept[name]["environment"]] = None
    marked = [
        f"- † {program.name.partition(':')[0]}, {' and '.join(program.unsuited)}: {program.reason}."
        for program in PROGRAMS.values()
        if program.unsuited
    ]
    texts = page.table(LOSSES, bodies[0], (0, 1)), page.table(STORED, bodies[1]), "\n".join(marked)
    return "\n\n".join(filter(None, [*texts, *(f"{each}." for each in about)]))


if __name__ == "__main__":
    main()
