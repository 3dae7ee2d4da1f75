"""Compile the gradients of public programs with scanned layers for an H100, and count their memory.

    python -m benchmarks.programs.memory FOLDER

FOLDER is that of `benchmarks.programs`. XLA needs no GPU for this, but the group `aot`. The models
have the size that their authors use, and each is compiled with the authors' settings for what
the backward pass keeps: in float32, with the authors' own half precision, with `autocast`, and
with `autocast` and parameters stored in bfloat16.
"""

import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.sharding import SingleDeviceSharding

import optax_lossscale as ols
from benchmarks import aot, hlo, page
from benchmarks.programs.listed import PROGRAMS
from benchmarks.programs.source import RESULTS, Program, commit, find, library, read
from benchmarks.programs.training import WAYS, Library, Way, train

FLASH, PLAIN = {"attn_backend": "jax_flash"}, {"use_flash_attention": False}
KEPT = {
    "siglip": {
        "nothing": {"remat_policy": "nothing_saveable"},
        "products with weights": {"remat_policy": "dots_with_no_batch_dims_saveable"},
    },
    "named_axes": {
        "layers' inputs": {"gradient_checkpointing": True, **FLASH},
        "all, with flash attention": {"gradient_checkpointing": False, **FLASH},
        "all, with plain attention": {"gradient_checkpointing": False, **PLAIN},
    },
}
DEVICE = "h100"
COLUMNS = {"float32": "float32", "own": "theirs", "autocast": "ours", "masters": "ours, stored"}


class Compiler(Library):
    """The library as it counts the memory of a gradient, and then ends the program."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.counts: dict[str, Any] = {}

    def value_and_grad(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Compile the gradient for its first arguments."""
        differentiate = ols.value_and_grad(fun, **options)

        def compiled(*args: Any) -> None:
            leaves, structure = jax.tree.flatten(args)
            places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

            def on_arrays(*arrays: Any) -> Any:
                all_leaves = [*leaves]
                for place, array in zip(places, arrays, strict=True):
                    all_leaves[place] = array
                results = jax.tree.leaves(differentiate(*jax.tree.unflatten(structure, all_leaves)))
                return [result for result in results if hasattr(result, "dtype")]

            # What the loss closes over may be traced. It becomes an argument.
            closed = jax.make_jaxpr(on_arrays)(*(leaves[place] for place in places))
            sharding = SingleDeviceSharding(aot.find_devices(DEVICE)[0])
            inputs = [*closed.consts, *(leaves[place] for place in places)]
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in inputs]

            def run(_: Any, inputs: Sequence[Any]) -> list[Any]:
                consts = inputs[: len(closed.consts)]
                return eval_jaxpr(closed.jaxpr, consts, *inputs[len(consts) :])

            options = aot.ON_GPU | {"xla_gpu_enable_triton_gemm": False}
            _, self.counts = hlo.compile_step(run, (), shapes, options=options)
            raise StopIteration

        return compiled


def count(program: Program, folder: Path, way: Way, large: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is counted in a program's gradient, in a process of its own."""
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    warnings.simplefilter("ignore")
    compiler = Compiler(way)
    with hlo.for_another_platform():
        result, _ = train(program, folder, way, compiler, large)
    return compiler.counts or {"error": result.error}


def main(argv: Sequence[str] | None = None) -> None:
    """Compile all, and print a table."""
    parser = page.parser("benchmarks.programs.memory", str(__doc__))
    parser.add_argument("folder", type=Path, help="where the programs' repositories are")
    parser.add_argument("--only", nargs="+", choices=KEPT, default=[*KEPT], help="the programs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    args = parser.parse_args(argv)
    spawn = multiprocessing.get_context("spawn")
    results = read(args.results)
    for name in args.only:
        program = PROGRAMS[name]
        sha = commit(find(args.folder, program.repository))
        for kept, large in KEPT[name].items():
            row: dict[str, Any] = {"commit": sha, "library": library()}
            results["memory"][f"{program.name}, keeps {kept}"] = row
            for way in COLUMNS:
                with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                    task = pool.submit(count, program, args.folder, WAYS[way], large)
                    row[way] = task.result()
                print(name, kept, way, row[way], flush=True)
            args.results.write_text(page.as_json(results))
    print(table(results["memory"]))


def table(found: Mapping[str, Any]) -> str:
    """Return a row for each model and setting, with temporary memory in gigabytes."""

    def shown(counts: dict[str, Any]) -> str:
        return f"{counts['temporary'] / 1e9:.2f}" if "temporary" in counts else counts["error"]

    rows = [[name, *(shown(row[way]) for way in COLUMNS)] for name, row in found.items()]
    return page.table(("temporary memory, GB", *COLUMNS.values()), rows)


if __name__ == "__main__":
    main()
