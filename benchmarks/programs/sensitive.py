"""Which lines of a public program need float32, by `precision_search` of its first step."""

import contextlib
import io
import tempfile
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
    """What the search finds in a program.

    Attributes:
      error: Of the first gradient, with all products in bfloat16.
      error_kept: The same with the named lines in float32.
      named: The code of the lines to keep.
      missing: Why it could not be searched, if it could not.
    """

    error: float | None = None
    error_kept: float | None = None
    named: list[str] = []  # noqa: RUF012 (never changed)
    missing: str = ""


class Recorder(Library):
    """Trains in float32, and records the loss function of the first step with its arguments.

    A program differentiates inside its compiled step, where arguments have no values. So the
    function is recorded as a jaxpr, and the arrays leave the step by a callback.
    """

    def __init__(self) -> None:
        super().__init__(WAY)
        self.loss: jax.extend.core.ClosedJaxpr | None = None
        self.arrays: list[jax.Array] = []  # the loss function's, then those that it closes over
        self.differentiable = 0  # the first of them
        self.keys: dict[int, Any] = {}  # which are random keys, and their kinds

    def autocast(self, fun: Callable[..., Any], dtype: str) -> Callable[..., Any]:
        """Leave the function alone: the search takes the loss before `autocast`."""
        del dtype
        return fun

    def value_and_grad(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Differentiate as the library does, and record the first call."""
        differentiate = super().value_and_grad(fun, **options)

        def recorded(state: Any, *args: Any, **kwargs: Any) -> Any:
            if self.loss is None:
                self.record(fun, args, kwargs, has_aux=options.get("has_aux", False))
            return differentiate(state, *args, **kwargs)

        return recorded

    def record(self, fun: Callable[..., Any], args: Any, kwargs: Any, *, has_aux: bool) -> None:
        """Record a loss function of its arrays, those to differentiate first."""
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
        self.differentiable = len(params)
        arrays = [*(leaves[n] for n in order), *self.loss.consts]
        self.keys = {
            n: jax.random.key_impl(array)
            for n, array in enumerate(arrays)
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        }
        data = [jax.random.key_data(a) if n in self.keys else a for n, a in enumerate(arrays)]
        jax.debug.callback(self.keep, data)

    def keep(self, data: list[jax.Array]) -> None:
        """Keep the arrays of the first step. Random keys leave it as their data."""
        if not self.arrays:
            self.arrays = [jnp.asarray(array) for array in data]
            for n, implementation in self.keys.items():
                self.arrays[n] = jax.random.wrap_key_data(data[n], impl=implementation)

    def search(self) -> Found:
        """Search the recorded function."""
        if self.loss is None or not self.arrays:
            return Found(missing="no step was recorded")
        jaxpr, given = self.loss.jaxpr, len(self.loss.in_avals)

        def loss(params: list[jax.Array], rest: list[jax.Array]) -> Any:
            arrays = [*params, *rest]
            return jax.core.eval_jaxpr(jaxpr, arrays[given:], *arrays[:given])[0]

        params, rest = self.arrays[: self.differentiable], self.arrays[self.differentiable :]
        found = ols.diagnostics.precision_search(loss, params, rest)
        named = [line.partition(": ")[2] or line for line in found.keep]
        return Found(found.error, found.error_kept, named)


def search_alone(program: Program, folder: Path) -> Found:
    """Train a program in float32 in a process of its own, and search its first step."""
    jax.config.update("jax_num_cpu_devices", program.devices)
    return search(program, folder)


def search(program: Program, folder: Path) -> Found:
    """Train a program in float32, and search its first step."""
    library = Recorder()
    with tempfile.TemporaryDirectory() as root, as_names(library):
        extract(program, folder, Path(root))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                program.run(Source(Path(root), program.file, library, WAY.half, WAY.stored))
            jax.effects_barrier()
            return library.search()
        except Exception as raised:  # noqa: BLE001 (an error is a result)
            return Found(missing=f"{type(raised).__name__}: {raised}".partition("\n")[0])


def cell(found: Mapping[str, Any] | None) -> str:
    """Return the cell of a program in the table. It is empty if it was not searched."""
    read = Found(**found) if found else Found()
    if read.error is None:
        return ""
    named = ", ".join(f"`{line}`" for line in read.named) or "none"
    return f"{named} ({100 * read.error:.2g} %)"
