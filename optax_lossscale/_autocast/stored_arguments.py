"""Inputs of a traced program that are stored in half precision, and read as float32."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import Literal, Var

from optax_lossscale._autocast import edits
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr
from optax_lossscale._support.tree import HALF


def with_inputs_in_float32(jaxpr: Jaxpr) -> Jaxpr:
    """Return a traced program that takes its stored inputs in float32.

    `jaxpr` reads each of them by one conversion. If one is a result, it is still returned as it is
    stored: the program then has variables that it is not given.
    """
    wide = _as_read(jaxpr)
    if not wide:
        return jaxpr
    rest = [eqn for eqn in jaxpr.eqns if wide.keys().isdisjoint(jaxprs.variables(eqn.invars))]
    in_float32 = jaxpr.replace(invars=edits.renamed(jaxpr.invars, wide), eqns=rest)
    results = list(jaxpr.outvars)
    stops: list[Equation] = []
    for index, returned in enumerate(_returned_inputs(in_float32)):
        if returned is None:
            continue
        results[index] = stored = jaxpr.invars[returned.position]
        if returned.stop:
            results[index] = Var(stored.aval)
            stops.append(returned.stop.replace(invars=[stored], outvars=[results[index]]))
    return in_float32.replace(outvars=results, eqns=[*rest, *stops])


def _as_read(jaxpr: Jaxpr) -> dict[Atom, Atom]:
    """Return the float32 variable that each stored input of a traced program is read as."""
    stored = {x for x in jaxpr.invars if x.aval.dtype in HALF}
    return {
        eqn.invars[0]: eqn.outvars[0]
        for eqn in jaxpr.eqns
        if not stored.isdisjoint(jaxprs.variables(eqn.invars))
    }


class _Returned(NamedTuple):
    """An input that a function returns."""

    position: int  # among the inputs
    stop: Equation | None  # a `stop_gradient` between input and result, if any


def _returned_inputs(jaxpr: Jaxpr) -> list[_Returned | None]:
    """Return, for each result, the input that it is, or None. Calls are followed."""
    known = {x: _Returned(position, None) for position, x in enumerate(jaxpr.invars)}

    def find(atom: Atom) -> _Returned | None:
        return None if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == primitives.STOP_GRADIENT and (source := find(eqn.invars[0])):
            known[eqn.outvars[0]] = source._replace(stop=eqn)
        if name not in primitives.ENTERED:
            continue
        (inner,) = jaxprs.functions_in(eqn.params)
        for index, returned in enumerate(_returned_inputs(inner)):
            if returned is None or not _is_whole(eqn, returned.position, index):
                continue
            if source := find(eqn.invars[returned.position]):
                known[eqn.outvars[index]] = source._replace(stop=returned.stop or source.stop)
    return [find(result) for result in jaxpr.outvars]


def _is_whole(call: Equation, operand: int, result: int) -> bool:
    """Return whether a call that returns this operand returns the same array to its caller."""
    params = call.params
    if call.primitive.name == primitives.SHARD_MAP:
        return params["in_specs"][operand] == params["out_specs"][result]
    if "out_shardings" in params:  # a `jit` may give it another sharding
        shardings = params["in_shardings"][operand], params["out_shardings"][result]
        return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
    return True


def lookups_in_half(jaxpr: Jaxpr) -> list[tuple[Equation, ...]]:
    """Return the lookups in stored inputs that `fun` casts back to half precision.

    Their transpose adds cotangents in half precision. Each is returned with the equations that
    contain it, the innermost first. `jaxpr` is as in `with_inputs_in_float32`.
    """
    found: list[tuple[Equation, ...]] = []

    def is_half(path: tuple[Equation, ...], sources: Sequence[bool | None]) -> list[bool | None]:
        """Return whether stored results are cast back. None is for results that are not stored."""
        eqn, name = path[0], path[0].primitive.name
        if name in primitives.LOOKUPS and sources[0]:
            found.append(path)
        if name == primitives.CONVERSION and sources != [None]:
            return [eqn.outvars[0].aval.dtype in HALF]
        is_passed = edits.is_move(eqn) or name in primitives.PASSED - {primitives.STOP_GRADIENT}
        if is_passed and None not in sources:
            return [any(sources)] * len(eqn.outvars)
        return [None] * len(eqn.outvars)

    inner = jaxprs.without_constants(jaxpr)
    stored = _as_read(inner)
    edits.propagated(inner, [True if x in stored else None for x in inner.invars], is_half)
    return found
