"""Arguments stored in half precision, which `autocast` reads as float32.

Each is converted once, in the function that uses it, so that the cotangents of its uses are added
in float32 and rounded once. If its only use is a call or a loop over its rows, it is converted
inside. So a stack of layers is never in float32 as a whole, and its gradient is written in the
dtype that it is stored in.
"""

from collections import Counter
from typing import NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import Literal, Var

from optax_lossscale._support.jaxprs import (
    Atom,
    Equation,
    Jaxpr,
    conversion,
    holds_equations,
    inner_jaxprs,
    is_move,
    memoized,
    operands_of_scan,
    with_edit,
    without_constants,
)
from optax_lossscale._support.primitives import PLAIN_CALLS


def with_stored_inputs(jaxpr: Jaxpr, number: int) -> Jaxpr:
    """Return a traced program that converts its stored inputs to float32 where it uses them.

    The first `number` equations of `jaxpr` are these conversions. If such an input is a result, it
    is returned in the dtype that it is stored in.
    """
    return with_edit(lambda inner: _with_moved_conversions(inner, number), jaxpr)


def _with_moved_conversions(jaxpr: Jaxpr, number: int) -> Jaxpr:
    conversions, rest = jaxpr.eqns[:number], jaxpr.eqns[number:]
    wide = {eqn.invars[0]: eqn.outvars[0] for eqn in conversions}
    in_float32 = jaxpr.replace(invars=[wide.get(x, x) for x in jaxpr.invars], eqns=rest)
    results = list(jaxpr.outvars)
    stops: list[Equation] = []
    for index, returned in enumerate(_returned_inputs(in_float32)):
        if returned is None:
            continue
        results[index] = stored = jaxpr.invars[returned.position]
        if returned.stop:
            results[index] = Var(stored.aval)
            stops.append(returned.stop.replace(invars=[stored], outvars=[results[index]]))
    in_float32 = in_float32.replace(outvars=results, eqns=[*rest, *stops])
    return _with_inputs(in_float32, jaxpr.invars)


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
        if name == "stop_gradient" and (source := find(eqn.invars[0])):
            known[eqn.outvars[0]] = source._replace(stop=eqn)
        if name not in _ENTERED:
            continue
        (inner,) = inner_jaxprs(eqn)
        for index, returned in enumerate(_returned_inputs(inner)):
            if returned is None or not _is_whole(eqn, returned.position, index):
                continue
            if source := find(eqn.invars[returned.position]):
                known[eqn.outvars[index]] = source._replace(stop=returned.stop or source.stop)
    return [find(result) for result in jaxpr.outvars]


def _is_whole(call: Equation, operand: int, result: int) -> bool:
    """Return whether a call that returns this operand returns the same array to its caller."""
    if call.primitive.name != "shard_map":
        return True
    return call.params["in_specs"][operand] == call.params["out_specs"][result]


# Calls that can convert an operand inside.
_ENTERED = PLAIN_CALLS | {"shard_map"}
# For each operand, the dtype that it is stored in, or None if it is passed unchanged.
_Stored: TypeAlias = tuple[np.dtype | None, ...]


@memoized
def _with_stored_operands(jaxpr: Jaxpr, stored: _Stored) -> Jaxpr:
    """Return a function that takes some of its float32 inputs in the dtypes they are stored in."""
    pairs = list(zip(without_constants(jaxpr).invars, stored, strict=True))
    inputs = [x if dtype is None else Var(x.aval.update(dtype=dtype)) for x, dtype in pairs]
    return with_edit(lambda inner: _with_inputs(inner, inputs), jaxpr)


def _with_inputs(jaxpr: Jaxpr, inputs: list[Atom]) -> Jaxpr:
    """Return a function that takes `inputs`, and converts them to the dtypes of its old inputs."""
    stored = {x: y for x, y in zip(jaxpr.invars, inputs, strict=True) if x is not y}
    atoms = [x for eqn in jaxpr.eqns for x in eqn.invars] + jaxpr.outvars
    uses = Counter(x for x in atoms if not isinstance(x, Literal))
    converted: set[Var] = set()
    eqns: list[Equation] = []

    def convert(atoms: list[Atom], beside: Equation) -> None:
        for x in atoms:
            if not isinstance(x, Literal) and x in stored and x not in converted:
                converted.add(x)
                eqns.append(conversion(stored[x], x, _in_mesh_of(x, beside, jaxpr)))

    for eqn in jaxpr.eqns:
        as_stored = [
            stored[x] if not isinstance(x, Literal) and x in stored and uses[x] == 1 else None
            for x in eqn.invars
        ]
        first = _first_entered(eqn)
        as_entered = [None if i < first else x for i, x in enumerate(as_stored)]
        dtypes = {x and x.aval.dtype for x in as_stored}
        if len(dtypes) == 1 and None not in dtypes and is_move(eqn):
            (result,) = eqn.outvars
            stored[result] = Var(result.aval.update(dtype=dtypes.pop()))
            eqns.append(eqn.replace(invars=as_stored, outvars=[stored[result]]))
            continue
        convert([x for x, y in zip(eqn.invars, as_entered, strict=True) if y is None], eqn)
        eqns.append(_entered(eqn, as_entered) if any(as_entered) else eqn)
    if eqns:
        convert(jaxpr.outvars, eqns[-1])
    return jaxpr.replace(invars=inputs, eqns=eqns)


def _in_mesh_of(x: Atom, beside: Equation, jaxpr: Jaxpr) -> Equation:
    """Return an equation under the mesh of a variable, with its other properties from `beside`.

    An equation that reshards an array, as in `jax.sharding.auto_axes`, is under the mesh that the
    result has. JAX refuses to convert an array under another mesh than its own.
    """
    mesh = x.aval.sharding.mesh
    contexts = (eqn.ctx for eqn in (beside, *jaxpr.eqns))
    own = (context for context in contexts if context.cur_abstract_mesh == mesh)
    return beside.replace(ctx=next(own, beside.ctx))


def _first_entered(eqn: Equation) -> int:
    """Return the index of the first operand that an equation can convert inside."""
    name = eqn.primitive.name
    if not any(inner.eqns for inner in inner_jaxprs(eqn)):
        return len(eqn.invars)
    if name == "scan":
        return len(eqn.invars) - operands_of_scan(eqn).scanned
    return 0 if name in _ENTERED else len(eqn.invars)


def _entered(eqn: Equation, as_entered: list[Atom]) -> Equation:
    """Return a call or loop that takes the operands in `as_entered`, and converts them inside."""
    dtypes = tuple(x and x.aval.dtype for x in as_entered)
    params = {
        key: _with_stored_operands(param, dtypes) if holds_equations(param) else param
        for key, param in eqn.params.items()
    }
    operands = [y or x for x, y in zip(eqn.invars, as_entered, strict=True)]
    return eqn.replace(invars=operands, params=params)
