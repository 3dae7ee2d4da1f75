"""The edit of `autocast`: matrix products in half precision, and inputs that are stored in it.

A float32 variable may *have a half*: an input that is stored in half precision, or the result of a
product that runs in it. Each function is edited in one pass over its equations. A variable with a
half is converted once, before the first equation that reads it in float32, so that the cotangents
of its uses are added in float32 and rounded once. If a variable has only one use, that use may take
the half itself:

- An equation that passes elements on, such as a reshape, a transfer or a name. Its result then has
  a half, too. So `jax.checkpoint` saves and offloads named results in half precision.
- A call, or a loop over rows, which converts it inside. So a stack of layers is never in float32 as
  a whole, and its gradient is written in the dtype that it is stored in.

No other type changes: what calls and loops return, carry, and take as constants is float32.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._autocast import edits, products_on_cpu, stored_arguments, what_is_cast
from optax_lossscale._autocast.residuals import with_fewer_residuals
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr
from optax_lossscale._support.lines import line_key, source_of

# For each input of a function, the half-precision dtype that it is given in, or None for its own.
Halves: TypeAlias = tuple[np.dtype | None, ...]
_FLOAT32 = np.dtype(np.float32)


class Casting(NamedTuple):
    """How the products of a program are edited, the same in all of its functions."""

    dtype: np.dtype  # float32 casts none
    keep: frozenset[str]  # the keys of lines whose products stay in float32
    on_cpu: bool | None  # as in `products_on_cpu`


def with_halves(jaxpr: Jaxpr, dtype: np.dtype, keep: frozenset[str]) -> Jaxpr:
    """Return a traced program with its products in `dtype`, except on the lines with these keys.

    Inputs that are stored in half precision are converted to float32 where they are used. The same
    object is returned if nothing changes.
    """
    casting = Casting(dtype, keep, products_on_cpu.is_default_device())

    def cast(inner: Jaxpr) -> Jaxpr:
        in_float32 = stored_arguments.with_inputs_in_float32(inner)
        return _Edit(in_float32, casting, inner.invars, (False,) * len(inner.invars)).edited()

    return edits.with_edit(cast, jaxpr)


@edits.memoized
def _with_halves(
    jaxpr: Jaxpr, casting: Casting, halves: Halves, are_fixed: tuple[bool, ...]
) -> Jaxpr:
    """Return an edited function that takes these halves, or the same object if nothing changes."""

    def cast(inner: Jaxpr) -> Jaxpr:
        pairs = zip(inner.invars, halves, strict=True)
        inputs = [x if half is None else edits.variable_like(x, half) for x, half in pairs]
        return _Edit(inner, casting, inputs, are_fixed).edited()

    return edits.with_edit(cast, jaxpr)


class _Edit:
    """One pass over the equations of a function, which is to take `inputs` instead of its own."""

    def __init__(
        self, jaxpr: Jaxpr, casting: Casting, inputs: Sequence[Atom], are_fixed: tuple[bool, ...]
    ) -> None:
        self.jaxpr, self.casting, self.inputs = jaxpr, casting, inputs
        pairs = zip(jaxpr.invars, inputs, strict=True)
        self.halves: dict[Atom, Atom] = {wide: half for wide, half in pairs if wide is not half}
        self.converted: set[Atom] = set()
        self.uses = edits.number_of_uses(jaxpr)
        self.fixed = what_is_cast.fixed_variables(jaxpr, are_fixed)

    def edited(self) -> Jaxpr:
        eqns = [new for eqn in self.jaxpr.eqns for new in self.edited_equation(eqn)]
        # What is returned is float32, so that the type of the function does not change.
        if eqns:
            eqns += self.conversions(self.jaxpr.outvars, beside=eqns[-1])
        if all(map(operator.is_, self.inputs, self.jaxpr.invars)):
            return edits.with_equations(self.jaxpr, eqns)
        return self.jaxpr.replace(invars=self.inputs, eqns=eqns)

    def edited_equation(self, eqn: Equation) -> list[Equation]:
        """Return an equation that takes halves where it can, after conversions of the others."""
        taken = self.taken(eqn)
        read = [x for x in jaxprs.variables(eqn.invars) if x not in taken]
        conversions = self.conversions(read, beside=eqn)
        if eqn.primitive.name in primitives.PRODUCTS:
            return [*conversions, *self.edited_product(eqn)]
        if eqn.primitive.name in primitives.FOLLOWED:
            eqn = self.with_edited_functions(eqn, taken)
        if taken:
            invars = edits.renamed(eqn.invars, taken)
            eqn = eqn.replace(invars=invars, outvars=edits.renamed(eqn.outvars, self.halves))
        return [*conversions, eqn]

    def taken(self, eqn: Equation) -> dict[Atom, Atom]:
        """Return the halves that an equation takes. Results that they become have halves too."""
        # One operand of two, or of another format, would need a conversion: then none is taken.
        taken: dict[Atom, Atom] = {}
        for operands, results in _passed_elements(eqn):
            halves = self.halves_used_once(operands)
            dtypes = {half.aval.dtype for half in halves.values()}
            if len(halves) == len(operands) and len(dtypes) == 1:
                taken |= halves
                self.halves |= {x: edits.variable_like(x, *dtypes) for x in results}
        return taken | self.halves_used_once(_entered_operands(eqn))

    def halves_used_once(self, operands: Iterable[Atom]) -> dict[Atom, Atom]:
        """Return the halves of the operands that have no other use."""
        variables = (x for x in jaxprs.variables(operands) if self.uses[x] == 1)
        return {x: self.halves[x] for x in variables if x in self.halves}

    def with_edited_functions(self, eqn: Equation, taken: Mapping[Atom, Atom]) -> Equation:
        is_followed = not what_is_cast.reason_not_to_follow(eqn)
        casting = self.casting._replace(keep=self.keep_inside(eqn))
        if not is_followed:
            casting = casting._replace(dtype=_FLOAT32)
        are_fixed = what_is_cast.fixed_inputs(eqn, self.fixed)
        halves = tuple(
            taken[x].aval.dtype if not isinstance(x, Literal) and x in taken else None
            for x in jaxprs.inputs_of_functions(eqn)
        )

        def cast(jaxpr: Jaxpr) -> Jaxpr:
            new = _with_halves(jaxpr, casting, halves, are_fixed)
            if eqn.primitive.name != primitives.SCAN:
                return new
            if _with_halves(jaxpr, casting, (None,) * len(halves), are_fixed) is jaxpr:
                return new  # it has no product in half precision
            return with_fewer_residuals(new, jaxprs.operands_of_scan(eqn))

        return edits.with_edited_functions(eqn, cast)

    def keep_inside(self, eqn: Equation) -> frozenset[str]:
        """Return the lines to keep in the functions of an equation.

        There, products without a line of the user's belong to the line of the equation.
        """
        keep = self.casting.keep
        line = line_key(source_of(eqn)) if keep else ""
        if not line:
            return keep
        return keep | {""} if line in keep else keep - {""}

    def edited_product(self, eqn: Equation) -> list[Equation]:
        """Return conversions of the operands, and the product, whose result has a half.

        From a float32 result, JAX's transpose would make float32 products. Each product converts
        its own operands: with shared conversions, the cotangents of several uses would be summed in
        half precision.
        """
        dtype, keep, on_cpu = self.casting
        if keep and line_key(source_of(eqn)) in keep:
            return [what_is_cast.with_highest_precision(eqn)]
        is_fixed = any(what_is_cast.is_fixed(x, self.fixed) for x in eqn.invars[:2])
        if dtype == _FLOAT32 or what_is_cast.reason_not_to_cast(eqn, has_fixed_operand=is_fixed):
            return [eqn]
        (result,) = eqn.outvars
        lhs, rhs, half = (edits.variable_like(x, dtype) for x in (*eqn.invars[:2], result))
        self.halves[result] = half
        params = eqn.params | {"preferred_element_type": dtype}
        product = eqn.replace(invars=[lhs, rhs, *eqn.invars[2:]], outvars=[half], params=params)
        return [
            edits.conversion(eqn.invars[0], lhs, beside=eqn),
            edits.conversion(eqn.invars[1], rhs, beside=eqn),
            *products_on_cpu.product_of_matrices(product, is_default=on_cpu),
        ]

    def conversions(self, atoms: Iterable[Atom], beside: Equation) -> list[Equation]:
        """Return the conversions of halves that are not converted yet."""
        new = [x for x in jaxprs.variables(atoms) if x in self.halves and x not in self.converted]
        self.converted.update(new)
        return [edits.conversion(self.halves[x], x, self.in_mesh_of(x, beside)) for x in new]

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
    return eqn.invars if name in primitives.ENTERED else []
