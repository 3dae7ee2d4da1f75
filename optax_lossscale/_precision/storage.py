"""Arguments stored in half precision, which `autocast` reads as float32.

Each is converted once, in the function that uses it, so that the cotangents of its uses are added
in float32 and rounded once. If its only use is a call or a loop over its rows, it is converted
inside. Operations that only pass its elements on, such as a reshape or a transfer, come before the
conversion. So a stack of layers is never in float32 as a whole, and its gradient is written in the
dtype that it is stored in.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import Literal, Var

from optax_lossscale._precision import edits
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr
from optax_lossscale._support.tree import HALF


def with_stored_inputs(jaxpr: Jaxpr) -> Jaxpr:
    """Return a traced program that converts its stored inputs to float32 where it uses them.

    `jaxpr` reads each input in half precision by one conversion. If such an input is a result, it
    is returned in the dtype that it is stored in.
    """
    return edits.with_edit(_with_moved_conversions, jaxpr)


def _with_moved_conversions(jaxpr: Jaxpr) -> Jaxpr:
    wide = _as_read(jaxpr)
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
    in_float32 = in_float32.replace(outvars=results, eqns=[*rest, *stops])
    return _Edit(in_float32, jaxpr.invars).edited()


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
        if name not in _ENTERED:
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


# Calls that can convert an operand inside.
_ENTERED = primitives.PLAIN_CALLS | {primitives.SHARD_MAP}
# For each operand, the dtype that it is stored in, or None if it is passed unchanged.
_Stored: TypeAlias = tuple[np.dtype | None, ...]


@edits.memoized
def _with_stored_operands(jaxpr: Jaxpr, stored: _Stored) -> Jaxpr:
    """Return a function that takes some of its float32 inputs in the dtypes they are stored in."""
    pairs = list(zip(jaxprs.without_constants(jaxpr).invars, stored, strict=True))
    inputs = [x if dtype is None else edits.variable_like(x, dtype) for x, dtype in pairs]
    return edits.with_edit(lambda inner: _Edit(inner, inputs).edited(), jaxpr)


class _Edit:
    """One pass over the equations of a function, which is to take `inputs` as they are stored."""

    def __init__(self, jaxpr: Jaxpr, inputs: Sequence[Atom]) -> None:
        self.jaxpr, self.inputs = jaxpr, inputs
        pairs = zip(jaxpr.invars, inputs, strict=True)
        self.stored: dict[Atom, Atom] = {wide: half for wide, half in pairs if wide is not half}
        self.uses = edits.number_of_uses(jaxpr)
        self.converted: set[Atom] = set()

    def edited(self) -> Jaxpr:
        eqns = [new for eqn in self.jaxpr.eqns for new in self.edited_equation(eqn)]
        if eqns:
            eqns += self.conversions(self.jaxpr.outvars, beside=eqns[-1])
        return self.jaxpr.replace(invars=self.inputs, eqns=eqns)

    def edited_equation(self, eqn: Equation) -> list[Equation]:
        """Return an equation that takes what it can as it is stored, after conversions of the rest.

        What it passes on is then stored, too.
        """
        taken: dict[Atom, Atom] = {}
        for operands, results in _passed_elements(eqn):
            halves = {x: half for x in operands if (half := self.only_use(x))}
            dtypes = {half.aval.dtype for half in halves.values()}
            if len(halves) == len(operands) and len(dtypes) == 1:
                taken |= halves
                self.stored |= {x: edits.variable_like(x, *dtypes) for x in results}
        taken |= {x: half for x in _entered_operands(eqn) if (half := self.only_use(x))}
        rest = [x for x in jaxprs.variables(eqn.invars) if x not in taken]
        conversions = self.conversions(rest, beside=eqn)
        if not taken:
            return [*conversions, eqn]
        invars = edits.renamed(eqn.invars, taken)
        pairs = zip(invars, eqn.invars, strict=True)
        stored = tuple(None if x is wide else x.aval.dtype for x, wide in pairs)
        eqn = edits.with_edited_functions(eqn, _with_stored_operands, stored)
        outvars = edits.renamed(eqn.outvars, self.stored)
        return [*conversions, eqn.replace(invars=invars, outvars=outvars)]

    def only_use(self, atom: Atom) -> Atom | None:
        """Return the stored form of an operand whose only use is this one."""
        if isinstance(atom, Literal) or self.uses[atom] != 1:
            return None
        return self.stored.get(atom)

    def conversions(self, atoms: Iterable[Atom], beside: Equation) -> list[Equation]:
        """Return the conversions of stored variables that are not converted yet."""
        new = [x for x in jaxprs.variables(atoms) if x in self.stored and x not in self.converted]
        self.converted.update(new)
        return [edits.conversion(self.stored[x], x, self.in_mesh_of(x, beside)) for x in new]

    def in_mesh_of(self, x: Atom, beside: Equation) -> Equation:
        """Return an equation under the mesh of a variable, with its other properties from `beside`.

        An equation that reshards an array, as in `jax.sharding.auto_axes`, is under the mesh that
        the result has. JAX refuses to convert an array under another mesh than its own.
        """
        mesh = x.aval.sharding.mesh
        contexts = (eqn.ctx for eqn in (beside, *self.jaxpr.eqns))
        own = (context for context in contexts if context.cur_abstract_mesh == mesh)
        return beside.replace(ctx=next(own, beside.ctx))


def _passed_elements(eqn: Equation) -> list[tuple[Sequence[Atom], Sequence[Atom]]]:
    """Return the operands whose elements an equation passes on, with the results that they become.

    Its transpose then adds no cotangents, except zeros.
    """
    is_passed = eqn.primitive.name in primitives.PASSED
    if is_passed and len(eqn.invars) == len(eqn.outvars):  # each operand for itself
        return [([x], [y]) for x, y in zip(eqn.invars, eqn.outvars, strict=True)]
    return [(eqn.invars, eqn.outvars)] if is_passed or edits.is_move(eqn) else []


def _entered_operands(eqn: Equation) -> Sequence[Atom]:
    """Return the operands that an equation can convert inside its function."""
    name = eqn.primitive.name
    if not any(inner.eqns for inner in jaxprs.functions_in(eqn.params)):
        return []
    if name == primitives.SCAN:
        return eqn.invars[len(eqn.invars) - jaxprs.operands_of_scan(eqn).scanned :]
    if name == primitives.SHARD_MAP and not eqn.params["check_vma"]:
        # Its transpose adds the cotangents of devices that share an operand, in its stored dtype.
        pairs = zip(eqn.invars, eqn.params["in_specs"], strict=True)
        axes = edits.manual_axes_of(eqn)
        return [x for x, spec in pairs if axes <= {*jax.tree.leaves([*spec])}]
    return eqn.invars if name in _ENTERED else []


def lookups_in_half(jaxpr: Jaxpr) -> list[tuple[Equation, ...]]:
    """Return the lookups in stored inputs that `fun` casts back to half precision.

    Their transpose adds cotangents in half precision. Each is returned with the equations that
    contain it, the innermost first. `jaxpr` is as in `with_stored_inputs`.
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
