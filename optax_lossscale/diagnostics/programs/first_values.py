"""The history of values that are not finite: their origin, and the layer that made them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._support.tree import is_inexact


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstNonfinite:
    """The origin of the first NaN or infinity, from `first_nonfinite`.

    It prints as text.

    Attributes:
      layer: The layer whose parameters were read last, or whose input is cast, as a key path in the
        arguments of the function. If one operation reads several layers, the part that their paths
        share. If there is no layer, this is the named scope. For an argument, its own key path.
      operation: The name of the operation in JAX, such as `"dot_general"` or
        `"convert_element_type"` (a cast). None for an argument.
      dtype: The dtype of the array that is not finite.
      nan: The number of its elements that are NaN.
      inf: The number of its elements that are infinite.
      size: The number of all its elements.
      scope: The operation's `jax.named_scope`: the path of the module in Flax's Linen, the types of
        layers in Equinox.
      backward: Whether the operation belongs to the backward pass.
      source: The line of your own code that the operation comes from, with its file.
      constant: The constant, if the operation is a cast that makes a finite constant infinite, such
        as the -1e30 of a mask. None otherwise.
    """

    layer: str
    operation: str | None
    dtype: str
    nan: int
    inf: int
    size: int
    scope: str = ""
    backward: bool = False
    source: str = ""
    constant: float | None = None

    def __repr__(self) -> str:
        """Return a description, with one fact per line."""
        counts = f"{self.nan} NaN and {self.inf} infinite of {self.size} elements ({self.dtype})"
        if self.operation is None:
            return f"`{self.layer}` is not finite before the first operation: {counts}"
        when = " in the backward pass" if self.backward else ""
        lines = [f"`{self.operation}`{when} is the first to make {counts}"]
        if self.constant is not None:
            limit = f"`jnp.finfo(x.dtype).{'min' if self.constant < 0 else 'max'}`"
            remedy = f"write {limit}, in a `jnp.where`: added to numbers, it may overflow too"
            lines.append(f"  constant: {self.constant:g} is beyond {self.dtype}; {remedy}")
        facts = {"layer": self.layer, "scope": self.scope, "source": self.source}
        lines += [f"  {name}: {fact}" for name, fact in facts.items() if fact]
        return "\n".join(lines)


class Input(NamedTuple):
    """A floating-point array of the arguments."""

    position: int
    name: str  # the name of the argument, and the key path within it
    layer: tuple[str, ...]  # the keys of a parameter's layer, or its own keys if it has none


@dataclasses.dataclass
class Origin:
    """The operation that made the first NaN or infinity on the way to a value."""

    time: int
    found: FirstNonfinite
    cast: Any = None  # the result of a cast, until the layer that reads it is known


@dataclasses.dataclass
class Tracked:
    """An array and its history."""

    array: Any
    origin: Origin | None = None  # what made its NaN and infinities; None if they are intended
    input: Input | None = None  # the only argument that it was computed from, by a cast for example
    layer: tuple[int, str] | None = None  # when the last layer was read for it, and which
    is_cotangent: bool = False  # computed in the backward pass, and not only from residuals
    is_constant: bool = False  # a number or an array in the code

    @functools.cached_property
    def nonfinite(self) -> frozenset[str]:
        """Which of "nan", "inf" and "-inf" the array holds."""
        if not is_inexact(self.array):
            return frozenset()
        numbers = np.asarray(self.array)
        bad: Any = numbers[~np.isfinite(numbers)].astype(complex)
        return frozenset(str(x) for x in np.unique([bad.real, bad.imag]) if not np.isfinite(x))

    def counts(self) -> dict[str, Any]:
        """Return the fields of `FirstNonfinite` that describe the array."""
        numbers = np.asarray(self.array)
        nan = int(np.isnan(numbers).sum())
        inf = int((~np.isfinite(numbers)).sum()) - nan
        return {"dtype": str(numbers.dtype), "nan": nan, "inf": inf, "size": numbers.size}

    def number(self) -> float | None:
        """Return the number, if the value is a single real constant."""
        is_number = self.is_constant and np.size(self.array) == 1 and np.isrealobj(self.array)
        return float(np.asarray(self.array).item()) if is_number else None


def earliest(values: Iterable[Tracked]) -> Origin | None:
    """Return the earliest origin of values that are not finite."""
    origins = (value.origin for value in values if value.nonfinite and value.origin)
    return min(origins, key=lambda origin: origin.time, default=None)


def layer_of(
    operands: list[Tracked], time: int, *, is_backward: bool
) -> tuple[tuple[int, str] | None, bool]:
    """Return the layer of an operation, and whether it computes a cotangent.

    ==============================================  ================================================
    an operation that reads                         belongs to
    ==============================================  ================================================
    parameters                                      their layer
    only other values, in the forward pass          the layer that was read last for any of them
    also residuals, in the backward pass            the layer that was read last for the residuals
    ==============================================  ================================================
    """
    forward = [x.layer for x in operands if x.layer and not x.is_cotangent]
    # A `custom_vjp` rule may first compute with residuals only, which come from the forward pass.
    is_cotangent = is_backward and len(forward) < len(operands)
    # If several arguments may be the model, take the first: parameters come before the batch.
    read = sorted(x.input for x in operands if x.input and x.input.layer)
    if read:
        layers = [x.layer for x in read if x.layer[0] == read[0].layer[0]]
        shared = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*layers, strict=False))
        return (time, "".join(keys[0] for keys in shared)), is_cotangent
    layers = forward if is_backward and forward else [x.layer for x in operands if x.layer]
    return max(layers, default=None), is_cotangent
