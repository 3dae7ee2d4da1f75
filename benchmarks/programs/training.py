"""One training of a program: what stands for the library in it, and what is read off."""

import builtins
import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from flax import nnx

import optax_lossscale as ols
from benchmarks.programs.source import Program, Source, extract

HALVES = "float16", "bfloat16"


class Way(NamedTuple):
    """How a program computes: a dtype, and whether arrays are cast to it rather than products."""

    dtype: str
    arrays: bool = False


WAYS = {
    "float32": Way("float32"),
    "float16": Way("float16"),
    "bfloat16": Way("bfloat16"),
    "arrays": Way("float16", arrays=True),
}


class Result(NamedTuple):
    """What one training gives.

    Attributes:
      lines: The lines that are changed in the program.
      flops: The operations of the products in the gradient of its loss, by dtype.
      final: The mean loss in the last tenth of the steps, or another result.
      steps: The number of steps.
      skipped: Those that were skipped, without the last step.
      error: What it raised, if it did.
    """

    lines: int
    flops: dict[str, int]
    final: float
    steps: int
    skipped: int = 0
    error: str = ""

    @property
    def share(self) -> float:
        """The part of the operations that run in half precision."""
        half = sum(flops for dtype, flops in self.flops.items() if dtype in HALVES)
        return half / max(1, sum(self.flops.values()))


class Library:
    """The library as the changed programs find it: `ols.autocast` computes in the given way.

    Losses are noted in each step, and the products once. Whatever else is asked for is the
    library's own.
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self.losses: list[float] = []
        self.skipped = 0
        self.flops: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what the library itself has by this name."""
        return getattr(ols, name)

    def autocast(self, fun: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
        """Cast the products of a function, or its arguments."""
        if not self.way.arrays:
            return ols.autocast(fun, dtype)

        def by_arrays(*args: Any) -> Any:
            # A random stream of Flax holds no numbers to cast, and `cast` refuses to copy it.
            return fun(*(a if isinstance(a, nnx.Rngs) else ols.cast(a, dtype) for a in args))

        return by_arrays

    def with_loss_scaling(self, tx: Any) -> Any:
        """Scale the loss in float16. The other formats need it not."""
        return (ols.with_loss_scaling if self.way.dtype == "float16" else ols.with_skipping)(tx)

    def note(self, loss: jax.Array, skipped: jax.Array) -> None:
        """Note a step's loss, and how many steps were skipped before it."""
        self.losses.append(float(loss))
        self.skipped = int(skipped)

    def value_and_grad(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Differentiate, count the products of the gradient, and note the loss."""
        differentiate = ols.value_and_grad(fun, **options)

        def noted(state: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.flops:
                report = ols.diagnostics.precision_report(differentiate, state, *args, **kwargs)
                self.flops = {dtype: found.flops for dtype, found in report.items()}
            value, grads = differentiate(state, *args, **kwargs)
            loss = value[0] if options.get("has_aux") else value
            jax.debug.callback(self.note, loss, ols.loss_scale_state(state).total_skipped)
            return value, grads

        return noted

    def grad(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Differentiate as `value_and_grad` does, and return no value."""
        both = self.value_and_grad(fun, **options)

        def gradient(*args: Any, **kwargs: Any) -> Any:
            value, grads = both(*args, **kwargs)
            return (grads, value[1]) if options.get("has_aux") else grads

        return gradient


def train_alone(program: Program, folder: Path, way: Way) -> Result:
    """Train a program in a process of its own: programs import and set what they like."""
    jax.config.update("jax_num_cpu_devices", program.devices)
    warnings.simplefilter("ignore")  # deprecations, and autocast's own about a low share
    return train(program, folder, way)


def train(program: Program, folder: Path, way: Way) -> Result:
    """Change a program, train it, and return what is found."""
    library = Library(way)
    # The changed lines say `ols` and `half`. A user's would import the one and write the other.
    names = mock.patch.multiple(builtins, create=True, ols=library, half=way.dtype)
    final, error = None, ""
    with tempfile.TemporaryDirectory() as root, names:
        lines = extract(program, folder, Path(root))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                final = program.run(Source(Path(root), program.file, library, way.dtype))
            jax.effects_barrier()
        except Exception as raised:  # noqa: BLE001 (an error is a result)
            first = str(raised).partition("\n")[0]
            error = f"{type(raised).__name__}: {first.replace(root, '')}"
    losses = np.array(library.losses)
    if final is None:
        final = losses[-max(1, len(losses) // 10) :].mean() if len(losses) else np.nan
    return Result(lines, library.flops, float(final), len(losses), library.skipped, error)
