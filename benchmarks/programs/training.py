"""One training of a program: what stands for the library in it, and what is read off."""

import builtins
import contextlib
import io
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from benchmarks.programs.source import Program, Source, extract

HALVES = "float16", "bfloat16"


class Way(NamedTuple):
    """How a program is trained.

    Attributes:
      half: The dtype of its matrix products.
      stored: The dtype of its parameters.
      rounded: Whether float32 parameters start from numbers that bfloat16 holds.
      masters: Whether bfloat16 parameters have masters. Otherwise they are rounded stochastically.
      own: Whether the authors' own setting for half precision replaces `autocast`.
    """

    half: str
    stored: str = "float32"
    rounded: bool = False
    masters: bool = False
    own: bool = False

    def wrap(self, tx: Any) -> Any:
        """Return the optimizer that a user of this way writes."""
        if self.masters:
            tx = ols.with_master_weights(ols.with_bfloat16_state(tx), remainders=True)
        elif self.stored == "bfloat16":
            tx = ols.with_stochastic_rounding(ols.with_bfloat16_state(tx))
        return ols.with_skipping(tx)


WAYS = {
    "float32": Way("float32"),
    "rounded": Way("float32", rounded=True),
    "autocast": Way("bfloat16"),
    "masters": Way("bfloat16", stored="bfloat16", masters=True),
    "stochastic": Way("bfloat16", stored="bfloat16"),
    "own": Way("bfloat16", own=True),
}
# The float32 run that starts from the same weights, and so has the exact first gradient.
EXACT = {"autocast": "float32", "masters": "rounded", "stochastic": "rounded", "own": "float32"}
WRAPPERS = ols.GuardState, ols.MasterWeightsState, ols.StochasticRoundingState, ols.Bfloat16State


class Result(NamedTuple):
    """What one training gives.

    Attributes:
      lines: The lines that are changed in the program.
      flops: The operations of the products in the gradient of its loss, by dtype.
      final: The mean loss in the last tenth of the steps, or another result.
      steps: The number of steps.
      skipped: Those that were skipped, without the last step.
      held: Bytes of parameters and optimizer state, for each parameter.
      distance: Between the first gradient and the exact one, relative to the exact one.
      error: What it raised, if it did.
    """

    lines: int
    flops: dict[str, int]
    final: float
    steps: int
    skipped: int = 0
    held: float = math.nan
    distance: float = math.nan
    error: str = ""

    @property
    def share(self) -> float:
        """The part of the operations that run in half precision."""
        half = sum(flops for dtype, flops in self.flops.items() if dtype in HALVES)
        return half / max(1, sum(self.flops.values()))


class Library:
    """The library as the changed programs find it: `ols.autocast` and others follow the given way.

    Losses are noted in each step, the first gradient, and the products and bytes once. Whatever
    else is asked for is the library's own.
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self.losses: list[float] = []
        self.skipped = 0
        self.flops: dict[str, int] = {}
        self.held = math.nan
        self.gradient: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        """Return what the library itself has by this name."""
        return getattr(ols, name)

    def autocast(self, fun: Callable[..., Any], dtype: str) -> Callable[..., Any]:
        """Run matrix products in this dtype, unless the authors' own setting does."""
        return fun if self.way.own else ols.autocast(fun, dtype)

    def cast(self, tree: Any, dtype: Any) -> Any:
        """Store parameters in this dtype, and round the first ones if they are to start so."""
        if self.way.rounded and not self.flops:
            tree = ols.cast(tree, "bfloat16")
        return ols.cast(tree, dtype)

    def with_loss_scaling(self, tx: Any) -> Any:
        """Make the optimizer of this way. No format here needs a loss scale."""
        return self.way.wrap(tx)

    def inner(self, opt_state: Any) -> Any:
        """Return the state of the program's own optimizer."""
        while isinstance(opt_state, WRAPPERS):
            opt_state = opt_state.inner_state
        return opt_state

    def note(self, loss: jax.Array, state: ols.LossScaleState, gradient: list[jax.Array]) -> None:
        """Note a step's loss, how many steps were skipped before it, and the first gradient."""
        self.losses.append(float(loss))
        self.skipped = int(state.total_skipped)
        # A program that makes another optimizer later has another state without any step.
        if not self.gradient and not state.growth_count and not state.total_skipped:
            self.gradient = [np.asarray(g, np.float32) for g in gradient]

    def value_and_grad(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Differentiate, count products and bytes, and note the loss and the gradient."""
        differentiate = ols.value_and_grad(fun, **options)

        def noted(state: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.flops:
                report = ols.diagnostics.precision_report(differentiate, state, *args, **kwargs)
                self.flops = {dtype: found.flops for dtype, found in report.items()}
            value, grads = differentiate(state, *args, **kwargs)
            params, gradient = numbers(args[0]), numbers(grads)
            held = sum(a.size * a.dtype.itemsize for a in params + numbers(state))
            self.held = held / sum(a.size for a in params)
            loss = value[0] if options.get("has_aux") else value
            jax.debug.callback(self.note, loss, ols.loss_scale_state(state), gradient)
            return value, grads

        return noted

    def grad(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Differentiate as `value_and_grad` does, and return no value."""
        both = self.value_and_grad(fun, **options)

        def gradient(*args: Any, **kwargs: Any) -> Any:
            value, grads = both(*args, **kwargs)
            return (grads, value[1]) if options.get("has_aux") else grads

        return gradient


def numbers(tree: Any) -> list[Any]:
    """Return the arrays of a tree that hold numbers."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))
    return [a for a in arrays if jnp.issubdtype(a.dtype, jnp.number)]


def distance(gradient: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Return how far a gradient is from the exact one, relative to the exact one."""
    if len(gradient) != len(exact) or not exact:
        return math.nan
    apart = sum(np.sum(abs(g - e) ** 2) for g, e in zip(gradient, exact, strict=True))
    return math.sqrt(apart / sum(np.sum(abs(e) ** 2) for e in exact))


def as_names(library: Library) -> contextlib.AbstractContextManager[Any]:
    """Give the changed lines the names `ols`, `half` and `stored`, which a user would write."""
    way = library.way
    names: dict[str, Any] = {"ols": library, "half": way.half, "stored": way.stored}
    return mock.patch.multiple(builtins, create=True, **names)


def train_alone(program: Program, folder: Path, way: Way) -> tuple[Result, list[np.ndarray]]:
    """Train a program in a process of its own: programs import and set what they like."""
    jax.config.update("jax_num_cpu_devices", program.devices)
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    warnings.simplefilter("ignore")  # deprecations, and autocast's own about a low share
    return train(program, folder, way)


def train(
    program: Program,
    folder: Path,
    way: Way,
    library: Library | None = None,
    large: Mapping[str, Any] | None = None,
) -> tuple[Result, list[np.ndarray]]:
    """Change a program, train it, and return what is found and its first gradient."""
    library = library or Library(way)
    final, error = None, ""
    with tempfile.TemporaryDirectory() as root, as_names(library):
        lines = extract(program, folder, Path(root))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                dtypes = way.half, way.stored, way.own
                final = program.run(Source(Path(root), program.file, library, *dtypes, large or {}))
            jax.effects_barrier()
        except Exception as raised:  # noqa: BLE001 (an error is a result)
            first = str(raised).partition("\n")[0]
            error = f"{type(raised).__name__}: {first.replace(root, '')}"
    losses = np.array(library.losses)
    if final is None:
        final = losses[-max(1, len(losses) // 10) :].mean() if len(losses) else np.nan
    result = Result(lines, library.flops, float(final), len(losses), library.skipped, library.held)
    return result._replace(error=error), library.gradient
