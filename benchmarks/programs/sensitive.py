"""Which lines of a public program need float32, in its first and its last step."""

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from benchmarks.programs.source import Program, Source, extract
from benchmarks.programs.training import Library, Way, as_names

WAY = Way("float32")


class Found(NamedTuple):
    """What the search finds in a step of a program.

    Attributes:
      error: Of the gradient, with all products in bfloat16.
      array_error: Of its worst array.
      error_kept: The error with the named lines in float32.
      named: The code of the lines to keep.
      missing: Why it could not be searched, if it could not.
    """

    error: float | None = None
    array_error: float | None = None
    error_kept: float | None = None
    named: list[str] = []  # noqa: RUF012 (never changed)
    missing: str = ""


class Step:
    """The loss function of a step, with the arrays of the first and the last time that it ran.

    A program differentiates inside its compiled step, where arguments have no values. So the
    function is recorded as a jaxpr, and the arrays leave the step by a callback.
    """

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any, *, has_aux: bool) -> None:
        leaves, structure = jax.tree.flatten((args, kwargs))
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        first = len(jax.tree.leaves(args[0]))
        params = [n for n in at if n < first and jnp.issubdtype(leaves[n].dtype, jnp.inexact)]
        order = [*params, *(n for n in at if n not in params)]

        def loss(*arrays: jax.Array) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(order, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(structure, filled.values())
            value = fun(*args, **kwargs)
            return value[0] if has_aux else value

        self.loss = jax.make_jaxpr(loss)(*(leaves[n] for n in order))
        # The loss function's arrays, those to differentiate first, then those that it closes over.
        arrays = [*(leaves[n] for n in order), *self.loss.consts]
        self.differentiable = len(params)
        self.types = [jax.typeof(array) for array in arrays]
        self.mesh = without_manual_axes(jax.sharding.get_abstract_mesh())
        self.runs: list[list[Any]] = []
        keys = [jnp.issubdtype(array.dtype, jax.dtypes.prng_key) for array in arrays]
        self.kinds = [
            jax.random.key_impl(array) if is_key else None
            for array, is_key in zip(arrays, keys, strict=True)
        ]
        data = [
            jax.random.key_data(array) if is_key else array
            for array, is_key in zip(arrays, keys, strict=True)
        ]
        jax.debug.callback(self.keep, data)

    def keep(self, data: list[jax.Array]) -> None:
        """Keep the arrays of the first run, and of the last. Random keys come as their data."""
        self.runs[1:] = [data]

    def search(self, data: list[Any]) -> Found:
        """Search the function with the arrays of a run."""
        jaxpr, given = self.loss.jaxpr, len(self.loss.in_avals)

        def loss(params: list[jax.Array], rest: list[jax.Array]) -> Any:
            arrays = [*params, *rest]
            return jax.core.eval_jaxpr(jaxpr, arrays[given:], *arrays[:given])[0]

        is_set = not self.mesh.empty
        with jax.set_mesh(concrete(self.mesh)) if is_set else contextlib.nullcontext():
            arrays = list(map(self.placed, data, self.types, self.kinds))
            parts = arrays[: self.differentiable], arrays[self.differentiable :]
            found = ols.diagnostics.precision_search(loss, *parts)
        named = [line.partition(": ")[2] or line for line in found.keep]
        return Found(found.error, found.array_error, found.error_kept, named)

    def placed(self, data: Any, type_: Any, kind: Any) -> jax.Array:
        """Return an array as the step had it, also over the devices of an explicit mesh."""
        array = jnp.asarray(data)
        if kind is not None:
            array = jax.random.wrap_key_data(array, impl=kind)
        own = without_manual_axes(type_.sharding.mesh)
        mesh = self.mesh if own.empty else own
        if mesh.empty:
            return array
        return jax.device_put(array, jax.NamedSharding(concrete(mesh), type_.sharding.spec))


def without_manual_axes(mesh: jax.sharding.AbstractMesh) -> jax.sharding.AbstractMesh:
    """Return a mesh, or an empty one in `pmap` and `shard_map`, where an array is one shard."""
    is_manual = jax.sharding.AxisType.Manual in mesh.axis_types
    return jax.sharding.AbstractMesh((), ()) if is_manual else mesh


def concrete(mesh: jax.sharding.AbstractMesh) -> jax.sharding.Mesh:
    """Return a mesh of this machine's devices with the axes of another one."""
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types)


class Recorder(Library):
    """Trains in float32, and records the loss functions of the steps with their arguments."""

    def __init__(self) -> None:
        super().__init__(WAY)
        self.steps: list[Step] = []  # one for each time that a program traces its step

    def autocast(self, fun: Callable[..., Any], dtype: str) -> Callable[..., Any]:
        """Leave the function alone: the search takes the loss before `autocast`."""
        del dtype
        return fun

    def value_and_grad(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Differentiate as the library does, and record each call."""
        differentiate = super().value_and_grad(fun, **options)

        def recorded(state: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps.append(Step(fun, args, kwargs, has_aux=options.get("has_aux", False)))
            return differentiate(state, *args, **kwargs)

        return recorded

    def search(self) -> dict[str, Found]:
        """Search the first and the last step."""
        steps = [step for step in self.steps if step.runs]
        if not steps:
            return {"fresh": Found(missing="no step was recorded")}
        first, last = steps[0], steps[-1]
        return {"fresh": first.search(first.runs[0]), "trained": last.search(last.runs[-1])}


def search_alone(program: Program, folder: Path) -> dict[str, Found]:
    """Train a program in float32 in a process of its own, and search its steps."""
    jax.config.update("jax_num_cpu_devices", program.devices)
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    warnings.simplefilter("ignore")
    return search(program, folder)


def search(program: Program, folder: Path) -> dict[str, Found]:
    """Train a program in float32, and search its first step and its last one."""
    library = Recorder()
    with tempfile.TemporaryDirectory() as root, as_names(library):
        extract(program, folder, Path(root))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                program.run(Source(Path(root), program.file, library, WAY.half, WAY.stored))
            jax.effects_barrier()
            return library.search()
        except Exception as raised:  # noqa: BLE001 (an error is a result)
            return {"fresh": Found(missing=f"{type(raised).__name__}: {raised}".partition("\n")[0])}


def cell(found: Mapping[str, Any] | None) -> str:
    """Return the cell of a program in the table. It is empty if it was not searched."""
    steps = [Found(**found[step]) for step in ("fresh", "trained") if found and step in found]
    read = [each for each in steps if not each.missing]
    named = dict.fromkeys(", ".join(f"`{line}`" for line in each.named) or "none" for each in read)
    pairs = [(each.error or 0.0, each.array_error or 0.0) for each in read]
    errors = ["/".join(f"{100 * error:.2g}" for error in way) for way in zip(*pairs, strict=True)]
    return f"{'/'.join(named)}: {errors[0]} ({errors[1]})" if read else ""
