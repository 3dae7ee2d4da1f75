"""Train public programs with parameters in float32 and bfloat16, and write a page of results.

    python -m benchmarks.programs FOLDER --pages docs

FOLDER holds checkouts or Git directories of the programs' repositories, which others wrote and
which are no part of this one: `FOLDER/owner+name/repo`, `FOLDER/owner+name`, `FOLDER/owner/name` or
`FOLDER/name`. Nothing is downloaded: the command names the checkouts that it misses, and the table
says that their programs were not run. The functions of `drivers.py` and `kinds.py` make each
program small and give it data that needs no download. `sensitive.py` searches the first and the
last step of each for lines that need float32. `--search` does only this, for programs whose results
are in the file: a minute for each.

The programs need what the programs import beyond
the group `test`: `clu`, `diffrax`, `distrax`, `dm-pix`, `draccus`, `einops`, `gin-config`,
`gymnax<0.0.9`, `haliax>=1.4.dev0`, `jmp`, `jraph`, `ml_collections`, `scipy`, `tabulate`.

All of them take about an hour on two cores. The table has every program in the file of results, so
that `--only` trains some of them again, and `--only` without a name writes the page again. Parts
can run beside one another, each with its own `--results`, and `--merge` puts them together. All
results must be of the same versions and machine.
"""

import math
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import page
from benchmarks.programs.listed import PROGRAMS
from benchmarks.programs.memory import table as memory_table
from benchmarks.programs.sensitive import cell, search_alone
from benchmarks.programs.source import RESULTS, Program, commit, find, library, read
from benchmarks.programs.training import EXACT, WAYS, Result, distance, train_alone

COMMAND = "python -m benchmarks.programs"
PART, PAGE = "programs", "evidence"
SHOWN = "float32", "autocast", "masters"
HEAD = (
    "program",
    "products in half, %",
    "loss: float32",
    "`autocast`",
    "masters, bfloat16 parameters and moments",
    "first gradient off, %: `autocast`/bfloat16 parameters",
    "lines that `precision_search` names: gradient off (worst array), %, fresh/trained",
)
OWN = (
    "program",
    *("their setting", "half, %: theirs", "ours"),
    *("loss: float32", "theirs", "ours"),
    *("gradient off, %: theirs", "ours"),
)
MEMORY = """\
Temporary memory of the gradient on an H100, as XLA's compiler counts it, by what the backward pass
keeps."""
NOT_RUN = "not run"
PACKAGES = "jax", "optax", "flax", "dm-haiku", "equinox", "diffrax", "distrax", "haliax", "jraph"


def server_for(program: Program) -> ForkServerContext:
    """Return what starts processes for a program."""
    # Threads wait for one another in collectives: with few of them, or on a busy machine, for ever.
    os.environ.setdefault("PJRT_NPROC", str(4 * program.devices))
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=900")
    server = multiprocessing.get_context("forkserver")  # imports JAX once for all of them
    server.set_forkserver_preload(["benchmarks.programs.listed", "benchmarks.programs.training"])
    return server


def measure(program: Program, folder: Path) -> dict[str, Result]:
    """Train a program in each way, each in a process of its own."""
    server = server_for(program)
    found: dict[str, Result] = {}
    gradients: dict[str, list[np.ndarray]] = {}
    for name, way in WAYS.items():
        if way.own and not program.own:
            continue
        with ProcessPoolExecutor(1, mp_context=server) as pool:
            training = pool.submit(train_alone, program, folder, way).result()
        result, gradients[name] = training
        if name in EXACT:
            result = result._replace(distance=distance(gradients[name], gradients[EXACT[name]]))
        found[name] = result
        print(f"  {name}: {result}", flush=True)
    return found


def search(program: Program, folder: Path) -> dict[str, Any]:
    """Search the lines of a program that need float32, in a process of its own."""
    server = server_for(program)
    with ProcessPoolExecutor(1, mp_context=server) as pool:
        found = pool.submit(search_alone, program, folder).result()
    print(f"  {found}", flush=True)
    environment = {"library": library(), "environment": page.environment(*PACKAGES)}
    return environment | {step: each._asdict() for step, each in found.items()}


def link(program: Program, sha: str) -> str:
    """Return the program's name with a link to its file."""
    file = program.file.replace("[", "%5B").replace("]", "%5D")
    name, colon, result = program.name.partition(":")
    return f"[{name}](https://github.com/{program.repository}/blob/{sha[:8]}/{file}){colon}{result}"


def row(program: Program, results: Mapping[str, Result], sha: str) -> list[str]:
    """Return the row of a program in the table of losses and gradients."""
    shares = dict.fromkeys(share(results[way]) for way in SHOWN[1:])
    finals = (final(results[way]) + mark(program, way) for way in SHOWN)
    off = dict.fromkeys(percent(results[way].distance) for way in SHOWN[1:])
    return [link(program, sha), "/".join(shares), *finals, "/".join(off)]


def own_row(program: Program, results: Mapping[str, Result], sha: str) -> list[str]:
    """Return the row of a program in the table of the authors' own half precision."""
    theirs, ours = results["own"], results["autocast"]
    return [
        *(link(program, sha), program.own, share(theirs), share(ours)),
        *(final(result) for result in (results["float32"], theirs, ours)),
        *(percent(theirs.distance), percent(ours.distance)),
    ]


def mark(program: Program, way: str) -> str:
    """Return a mark for a way that the program should not use."""
    return " †" if way in program.unsuited else ""


def note(program: Program) -> str:
    """Return what to know about a program's row, after a mark if a way is not for it."""
    name = program.name.partition(":")[0]
    marked = f"† {name}, {' and '.join(program.unsuited)}" if program.unsuited else name
    return f"- {marked}: {program.reason}."


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
    return f"{100 * part:.2g}" if math.isfinite(part) else "none"


def main(argv: Sequence[str] | None = None) -> None:
    """Train the programs, keep the results of each, and write the tables to their page."""
    parser = page.parser("benchmarks.programs", str(__doc__))
    add = parser.add_argument
    add("folder", type=Path, help="where the programs' repositories are")
    add("--only", nargs="*", choices=PROGRAMS, default=[*PROGRAMS], help="the programs to train")
    add("--search", action="store_true", help="only search the lines that need float32")
    add("--merge", nargs="+", type=Path, default=[], help="files of results to add")
    add("--results", type=Path, default=RESULTS, help="the file of results")
    add("--pages", type=Path, help="folder of the pages; without it, the tables are printed")
    args = parser.parse_args(argv)
    here = [name for name in args.only if found(args.folder, PROGRAMS[name])]
    for repository in sorted({PROGRAMS[name].repository for name in set(args.only) - set(here)}):
        owner, name = repository.split("/")
        print(f"wanted: https://github.com/{repository} in {args.folder / owner}+{name}")
    results = read(args.results)
    for file in args.merge:
        for part, added in read(file).items():
            results[part] |= added
        args.results.write_text(page.as_json(results))
    for name in here:
        program = PROGRAMS[name]
        print(f"{name}: {program.repository}, {program.file}", flush=True)
        sha = commit(find(args.folder, program.repository))
        if args.search:
            trained = results["programs"][name]
            if trained["commit"] != sha:
                raise ValueError(f"the results of {name} are of {trained['commit']}, got {sha}")
            trained["search"] = search(program, args.folder)
            args.results.write_text(page.as_json(results))
            continue
        ways = measure(program, args.folder)
        results["programs"][name] = {
            "commit": sha,
            "library": library(),
            "environment": page.environment(*PACKAGES),
            "ways": {way: result._asdict() for way, result in ways.items()},
            "search": search(program, args.folder),
        }
        args.results.write_text(page.as_json(results))
    text = table(results["programs"])
    if args.pages:
        page.publish(page.Report(text), PART, args.pages / f"{PAGE}.md", COMMAND)
    else:
        print(text, *further_tables(**results), sep="\n\n")


def found(folder: Path, program: Program) -> bool:
    """Return whether the program's repository is in the folder."""
    try:
        return find(folder, program.repository).exists()
    except FileNotFoundError:
        return False


def table(programs: Mapping[str, Any]) -> str:
    """Return the table of the page, notes on some rows, and how all was measured."""
    body: list[list[str]] = []
    for name, program in PROGRAMS.items():
        if name in programs:
            found = programs[name]
            cells = row(program, ways_of(found), found["commit"])
            body.append([*cells, cell(found.get("search"))])
        else:
            body.append([link(program, "HEAD"), NOT_RUN, *[""] * (len(HEAD) - 2)])
    columns_of_text = 0, len(HEAD) - 1
    notes = [note(program) for program in PROGRAMS.values() if program.reason]
    shown = page.table(HEAD, body, columns_of_text)
    texts = [shown, "\n".join(notes), beside_their_own(programs)]
    return "\n\n".join(filter(None, [*texts, " ".join(about(programs)) if programs else ""]))


def ways_of(found: Mapping[str, Any]) -> dict[str, Result]:
    """Return the stored results of a program, by the way in which it was trained."""
    return {way: Result(**result) for way, result in found["ways"].items()}


def beside_their_own(programs: Mapping[str, Any]) -> str:
    """Return a sentence that compares `autocast` with the authors' own half precision."""
    own = [ways_of(found) for name, found in programs.items() if PROGRAMS[name].own]
    if not own:
        return ""
    ways = [[each[way] for each in own] for way in ("own", "autocast")]
    theirs, ours = (span([100 * result.share for result in way], ".3g") for way in ways)
    off, ours_off = (span([100 * result.distance for result in way], ".2g") for way in ways)
    return (
        f"Where authors have their own half precision ({len(own)} programs), it runs {theirs} "
        f"% of the operations, `autocast` {ours} %, and the first gradient is off by {off} %, with "
        f"`autocast` by {ours_off} %."
    )


def span(values: Sequence[float], form: str) -> str:
    """Return the smallest and the largest of the values."""
    return f"{min(values):{form}} to {max(values):{form}}"


def further_tables(programs: Mapping[str, Any], memory: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables that the page has no room for: the authors' own settings, and memory."""
    own = [
        own_row(PROGRAMS[name], ways_of(found), found["commit"])
        for name, found in programs.items()
        if PROGRAMS[name].own
    ]
    if own:
        yield page.table(OWN, own, (0, 1))
    if memory:
        yield f"{MEMORY}\n\n{memory_table(memory)}"


def about(programs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the libraries and the versions with which all was measured, when, and the licenses."""
    dates, machines, libraries = set[str](), set[str](), dict[str, list[str]]()
    searched: dict[str, set[str]] = {}
    for name, each in programs.items():
        date, _, machine = each["environment"].partition(", ")
        dates.add(date)
        machines.add(machine)
        libraries.setdefault(each["library"], []).append(PROGRAMS[name].name.partition(":")[0])
        if "environment" in (search := each.get("search", {})):
            date, _, machine = search["environment"].partition(", ")
            machines.add(machine)
            searched.setdefault(date, set()).add(search["library"])
    if len(machines) > 1:
        raise ValueError(f"the results must be of one machine and set of versions, got {machines}")
    usual, *others = sorted(libraries, key=lambda commit: -len(libraries[commit]))
    exceptions = "".join(f", {len(libraries[commit])} of them at {commit}" for commit in others)
    when, machine = " and ".join(sorted(dates)), machines.pop()
    yield f"{when}, {machine}, optax_lossscale at {usual}{exceptions}."
    for date, commits in sorted(searched.items()):
        yield f"Searched {date} at {', '.join(sorted(commits))}."
    licenses = [
        f"{p.repository}: {p.license}" for p in PROGRAMS.values() if p.license != "Apache-2.0"
    ]
    yield f"Licenses: Apache-2.0; {', '.join(licenses) or 'no other'}."


if __name__ == "__main__":
    main()
