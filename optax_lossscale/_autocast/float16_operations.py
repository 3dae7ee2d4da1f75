"""Find what a program itself computes in float16 although it may overflow there.

Under `autocast`, only products are in half precision. Layers made with `dtype=jnp.float16` compute
their activations in it too: a square overflows above 255, and then a norm written by hand is zero.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from optax_lossscale._autocast import edits
from optax_lossscale._autocast.what_is_cast import AUTOCAST_SCOPE
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Equation, Jaxpr

# What is known of a value, as far as moves, conversions and selections pass it on.
_CONSTANT = "a number in the code"
_SUM = "a sum"
_MAXIMUM = "a maximum"
_POSITIVE = "at least 0"
_NEGATIVE = "at most 0, such as a difference from a maximum"
_BOUNDED = "between 0 and 1, such as the exponential of that"
_PASSED = primitives.MOVES | primitives.CONVERSIONS | primitives.PASSED
_FROM_MAXIMUM = _PASSED | {primitives.SELECTION, primitives.MAXIMUM}


def first_overflowing(jaxpr: Jaxpr) -> tuple[str, tuple[Equation, ...]] | None:
    """Return what a traced program first computes in float16 that may overflow, if anything.

    That is a power, a sum that is stored in float16, or an exponential, with its equation and those
    that contain it, innermost first. These are harmless: the exponential of a number that is at
    most 0, as in softmax, a sum of such, a sum that is divided in float32, as in `jnp.mean`, the
    powers in JAX's own activation functions, and what depends on no argument. Kernels, functions
    with a derivative of their own and an inner `autocast` are left out.
    """
    found: list[tuple[str, tuple[Equation, ...]]] = []
    propagate = functools.partial(edits.propagated, of_literals=_CONSTANT)

    def marks_of(path: tuple[Equation, ...], sources: Sequence[str | None]) -> list[str | None]:
        eqn = path[0]
        if eqn.primitive.name == primitives.WHILE:
            for inner in jaxprs.functions_in(eqn.params):
                propagate(inner, [None] * len(inner.invars), marks_of, path)
        if all(mark == _CONSTANT for mark in sources):
            return [_CONSTANT] * len(eqn.outvars)
        what = _overflowing(eqn, sources)
        if what and not found and not _is_someone_elses(path):
            found.append((what, path))
        return [_mark(eqn, sources)] * len(eqn.outvars)

    inner = jaxprs.without_constants(jaxpr)
    propagate(inner, [None] * len(inner.invars), marks_of)
    return found[0] if found else None


def _overflowing(eqn: Equation, sources: Sequence[str | None]) -> str:
    """Return what an equation computes in float16 that may overflow, `""` if nothing."""
    name = eqn.primitive.name
    if not eqn.outvars or getattr(eqn.outvars[0].aval, "dtype", None) != jnp.float16:
        return ""
    if _is_power(eqn):
        return "a power"
    is_sum = name in primitives.SUMS or _is_sum_of_squares(eqn)
    is_stored = name == primitives.CONVERSION and sources[0] == _SUM
    if (is_sum and sources[0] != _BOUNDED) or is_stored:
        return "a sum"
    is_exponential = name in primitives.EXPONENTIALS
    return "an exponential" if is_exponential and sources[0] != _NEGATIVE else ""


def _is_power(eqn: Equation) -> bool:
    name = eqn.primitive.name
    if name == primitives.MULTIPLICATION:
        return eqn.invars[0] is eqn.invars[1]
    if name == primitives.POWER:  # a root or a decay, if one of the operands is a small number
        return not any(isinstance(x, Literal) and abs(x.val) <= 1 for x in eqn.invars)
    return name in primitives.POWERS and eqn.params.get("y", 2) > 1


def _is_sum_of_squares(eqn: Equation) -> bool:
    """Return whether an equation multiplies each row of an array by itself."""
    if eqn.primitive.name != primitives.PRODUCT or eqn.invars[0] is not eqn.invars[1]:
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return eqn.outvars[0].aval.ndim == len(batch)


def _mark(eqn: Equation, sources: Sequence[str | None]) -> str | None:
    """Return what is known of the results of an equation, given what is known of its operands."""
    name, known = eqn.primitive.name, {*sources}
    first, second = (*sources, None, None)[:2]
    is_flag = name == primitives.CONVERSION and eqn.invars[0].aval.dtype == jnp.bool_
    cases = {*sources[1:]} if name == primitives.SELECTION else known
    is_masked = name in (primitives.SELECTION, primitives.MULTIPLICATION)
    # The first that applies.
    marks = (
        (name in primitives.SUMS, None if first == _BOUNDED else _SUM),
        (name == primitives.MAXIMUM_OF_ALL, _MAXIMUM),
        (name in _FROM_MAXIMUM and _MAXIMUM in known, _MAXIMUM),
        (name == primitives.SUBTRACTION and second == _MAXIMUM, _NEGATIVE),
        (name == primitives.SUBTRACTION and first == _NEGATIVE, _NEGATIVE),
        (name == primitives.NEGATION and first in (_POSITIVE, _BOUNDED), _NEGATIVE),
        (name in primitives.EXPONENTIALS, _BOUNDED if first == _NEGATIVE else _POSITIVE),
        (name in primitives.POSITIVE or _is_power(eqn), _POSITIVE),
        (is_flag or (is_masked and cases <= {_BOUNDED, _CONSTANT}), _BOUNDED),
        (name in _PASSED, first),
    )
    return next((mark for applies, mark in marks if applies), None)


def _is_someone_elses(path: tuple[Equation, ...]) -> bool:
    """Return whether an equation belongs to JAX, a rule of its own, or an inner `autocast`."""
    names = {eqn.primitive.name for eqn in path[1:]}
    scopes = "/".join(str(eqn.source_info.name_stack) for eqn in path)
    # The function itself is in one scope, by which an outer `autocast` would recognize it.
    is_inner = scopes.count(AUTOCAST_SCOPE) > 1
    return (
        is_inner or not names.isdisjoint(primitives.CUSTOM_DERIVATIVES) or _is_activation(path[0])
    )


def _is_activation(eqn: Equation) -> bool:
    """Return whether an activation function of `jax.nn` makes an equation, as gelu its cube."""
    traceback: Any = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    made_by = [frame.function_name for frame in frames if frame.file_name == _ACTIVATIONS]
    return bool(made_by) and "standardize" not in made_by


_ACTIVATIONS = inspect.getsourcefile(inspect.unwrap(jax.nn.gelu))
