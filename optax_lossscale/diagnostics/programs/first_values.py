"""The history of numbers that are not finite: their origin, and the layer that made them."""

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._support.tree import is_inexact


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstNonfinite:
    """Where the first NaN or infinity comes from, as `first_nonfinite` found it.

    `str` writes it in words.

    Attributes:
      layer: The key path, in the arguments of the function, of the layer whose parameters were read
        last, or whose input is cast; of several layers that one operation with a function in it
        reads, the part that their paths share; without any, the named scope. For an argument that
        is not finite itself, its own key path.
      operation: The name of the operation in JAX, such as `"dot_general"` or
        `"convert_element_type"` (a cast). None for an argument.
      dtype: The type of the array that is not finite.
      nan: Elements of it that are NaN.
      inf: Elements of it that are infinite.
      size: All its elements.
      scope: The `jax.named_scope` of the operation: in Flax's Linen the module's path, in Equinox
        the types of the layers, `""` without any.
      backward: Whether the operation belongs to the backward pass.
      source: The line of your own code that the operation comes from, with its file.
      constant: The finite number in the code, such as the -1e30 of a mask, that a cast to this
        dtype makes infinite. None otherwise.
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

    def __str__(self) -> str:
        """Return the finding in words, one fact a line."""
        counts = f"{self.nan} NaN and {self.inf} infinite of {self.size} elements ({self.dtype})"
        if self.operation is None:
            return f"`{self.layer}` is not finite before the first operation: {counts}"
        when = " in the backward pass" if self.backward else ""
        lines = [f"`{self.operation}`{when} is the first to make {counts}"]
        if self.constant is not None:
            remedy = f"write `jnp.finfo(x.dtype).{'min' if self.constant < 0 else 'max'}`"
            lines.append(f"  constant: {self.constant:g} is beyond {self.dtype}; {remedy}")
        facts = {"layer": self.layer, "scope": self.scope, "source": self.source}
        lines += [f"  {name}: {fact}" for name, fact in facts.items() if fact]
        return "\n".join(lines)


class Leaf(NamedTuple):
    """An array of the arguments."""

    position: int
    keys: tuple[str, ...]  # the name of the argument, and the keys within it
    is_parameter: bool

    def layer(self) -> tuple[str, ...]:
        """Return the keys of the layer that it belongs to, or its own outside of any layer."""
        keys = self.keys[:-1] if self.keys[-1] == ".value" else self.keys  # a box of Flax
        return keys[:-1] if len(keys) > 2 else keys


@dataclasses.dataclass
class Origin:
    """The operation that made the first NaN or infinity on the way to a value."""

    time: int
    found: FirstNonfinite
    cast: Any = None  # the result, if a cast made them
    is_constant: bool = False  # a cast of a number in the code, which no layer has read yet


class Value(NamedTuple):
    """An array and its history."""

    array: Any
    kinds: frozenset[str] = frozenset()  # those of "nan", "inf" and "-inf" that it holds
    origin: Origin | None = None  # where they come from; None if they are meant
    leaf: Leaf | None = None  # the argument that it was computed from alone, by a cast for example
    layer: tuple[int, str] | None = None  # when parameters were last read for it, and whose
    is_cotangent: bool = False  # computed in the backward pass, and not from residuals alone
    is_constant: bool = False  # a number or an array in the code

    def at(self, step: int) -> "Value":
        """Return one step of an array that a scan slices."""
        array = self.array[step]
        kinds = kinds_of(array)
        return self._replace(array=array, kinds=kinds, origin=self.origin if kinds else None)

    def number(self) -> float | None:
        """Return the number that it is, if it is one real number in the code."""
        is_number = self.is_constant and np.size(self.array) == 1 and np.isrealobj(self.array)
        return np.asarray(self.array).item() if is_number else None


def earliest(values: Iterable[Value]) -> Origin | None:
    """Return the earliest of the origins of values."""
    origins = (value.origin for value in values if value.origin)
    return min(origins, key=lambda origin: origin.time, default=None)


def layer_of(
    operands: list[Value], time: int, *, is_backward: bool, holds_function: bool
) -> tuple[int, str] | None:
    """Return the layer that an operation belongs to."""
    # Parameters come before the batch, if the model is not known.
    read = sorted(x.leaf for x in operands if x.leaf and x.leaf.is_parameter)
    if read:
        first, *others = (leaf.layer() for leaf in read)
        # A function may read several layers, of which any may be the one that is looked for.
        likely = [first, *(keys for keys in others if holds_function and keys[0] == first[0])]
        shared = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*likely, strict=False))
        return time, "".join(keys[0] for keys in shared)
    # A derivative is taken where the forward pass was, not where the backward pass comes from.
    forward = [x.layer for x in operands if x.layer and not x.is_cotangent]
    layers = forward if is_backward and forward else [x.layer for x in operands if x.layer]
    return max(layers, default=None)


def kinds_of(array: Any) -> frozenset[str]:
    """Return which of NaN, infinity and negative infinity an array holds."""
    if not is_inexact(array):
        return frozenset()
    numbers: Any = np.asarray(array)
    if np.isfinite(numbers).all():
        return frozenset()
    parts = (numbers.real, numbers.imag) if np.iscomplexobj(numbers) else (numbers,)
    tests = {"nan": np.isnan, "inf": lambda x: x == np.inf, "-inf": lambda x: x == -np.inf}
    return frozenset(name for name, test in tests.items() if any(test(x).any() for x in parts))


def count_nonfinite(array: Any) -> dict[str, Any]:
    """Return the fields of `FirstNonfinite` that describe an array."""
    numbers = np.asarray(array)
    is_nan = np.isnan(numbers)
    return {
        "dtype": str(numbers.dtype),
        "nan": int(is_nan.sum()),
        "inf": int((~np.isfinite(numbers) & ~is_nan).sum()),
        "size": numbers.size,
    }


def readable_scope(scope: str) -> str:
    """Return the names in a scope, without the transformations around them."""
    names = re.sub(r"\w+\(|\)", "", scope)
    return "/".join(name for name in names.split("/") if name)
