"""The rule of `autocast`: which matrix products of a program run in half precision, and how.

A program is edited equation by equation. Only products change: their operands are converted to half
precision, and their results back to float32.
"""

import re
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from optax_lossscale._precision import edits
from optax_lossscale._precision.matrix_products import SHORTEST, sizes_of
from optax_lossscale._precision.residuals import with_fewer_residuals
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr
from optax_lossscale._support.lines import is_users

# The named scope of an inner `autocast` to float32. No scope of a user has this name.
UNCAST_SCOPE = "optax_lossscale.autocast_float32"
_KEPT_BY_INNER = "An inner `autocast` to float32 keeps it."
_DEFAULT_PRECISION = (None, (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT))
_HALF_OR_FLOAT32 = frozenset(["float32", "float16", "bfloat16"])


def reason_not_to_follow(eqn: Equation) -> str:
    """Return why the function of an equation is left alone; `""` if it is followed."""
    if _is_uncast(eqn):
        return _KEPT_BY_INNER
    name = eqn.primitive.name
    if name in primitives.FOLLOWED:
        return ""
    if name == primitives.WHILE:
        return (
            "It is inside a `while_loop`. Leave it so if a tolerance ends the loop, as in solvers: "
            "half precision may never reach it. If a count or a token does, as in decoders, wrap "
            "the functions that the loop calls in `autocast`."
        )
    infos = [inner.debug_info for inner in jaxprs.functions_in(eqn.params)]
    names = [
        f"`{info.func_name}`"
        for info in infos
        if info.func_filename and is_users(info.func_filename)
    ]
    return (
        f"It is inside {next(iter(names), 'a function')}, which has a rule of its own (`{name}`) "
        "that autocast does not rewrite. Cast its arguments yourself."
    )


def reason_not_to_cast(eqn: Equation, *, has_fixed_operand: bool) -> str:
    """Return why a product is left alone; `""` if it is cast."""
    if _is_uncast(eqn):
        return _KEPT_BY_INNER
    precision = eqn.params.get("precision")
    if precision not in _DEFAULT_PRECISION:
        option: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        where = f"`jax_default_matmul_precision` is {option!r}" if option else "its own argument"
        return f"Its precision is not the default one ({where})."
    *operands, result = (x.aval.dtype.name for x in (*eqn.invars[:2], eqn.outvars[0]))
    is_float32 = "float32" in operands and result == "float32"
    if not is_float32 or not {*operands} <= _HALF_OR_FLOAT32:
        dtypes = " and ".join(sorted({*operands}, key=lambda name: name != "float32"))
        return f"Its operands are {dtypes} and its result is {result}. Use float32 for all of them."
    _, rows, columns, contracted = sizes_of(eqn)
    if min(rows, columns, contracted) < SHORTEST:
        vmap = " Is there a `jax.vmap` around `autocast`? It hides the batch: put it inside."
        return (
            f"It has {rows} rows, {columns} columns and a contraction over {contracted}. Each must "
            f"be at least {SHORTEST}.{vmap if 1 in (rows, columns) else ''}"
        )
    if has_fixed_operand:
        return (
            "One operand depends on no argument of `fun`, and on no array that `fun` closes over. "
            "Products with constants stay exact. To cast this one, cast its operands yourself."
        )
    return ""


def _is_uncast(eqn: Equation) -> bool:
    return UNCAST_SCOPE in re.split(r"[/()]", str(eqn.source_info.name_stack))


def with_products_in(dtype: np.dtype, jaxpr: Jaxpr) -> Jaxpr:
    """Return a program with its products in `dtype`, or the same object if nothing changes."""
    return _with_products_in(jaxpr, dtype, (False,) * len(jaxprs.without_constants(jaxpr).invars))


@edits.memoized
def _with_products_in(jaxpr: Jaxpr, dtype: np.dtype, is_fixed: tuple[bool, ...]) -> Jaxpr:
    return edits.with_edit(lambda inner: _Edit(dtype, inner, is_fixed).edited(), jaxpr)


class _Edit:
    """One pass over the equations of a function."""

    def __init__(self, dtype: np.dtype, jaxpr: Jaxpr, is_fixed: tuple[bool, ...]) -> None:
        self.dtype, self.jaxpr = dtype, jaxpr
        self.fixed = _fixed_variables(jaxpr, is_fixed)
        self.named = _named_variables(jaxpr)
        self.halves: dict[Atom, Atom] = {}  # of results that are converted back after their names

    def edited(self) -> Jaxpr:
        eqns = [new for eqn in self.jaxpr.eqns for new in self.edited_equation(eqn)]
        return edits.with_equations(self.jaxpr, eqns)

    def edited_equation(self, eqn: Equation) -> list[Equation]:
        if eqn.primitive.name in primitives.PRODUCTS:
            has_fixed_operand = any(_is_fixed(x, self.fixed) for x in eqn.invars[:2])
            stays = reason_not_to_cast(eqn, has_fixed_operand=has_fixed_operand)
            return [eqn] if stays else self.edited_product(eqn)
        if eqn.primitive.name in primitives.FOLLOWED:
            return [eqn if reason_not_to_follow(eqn) else self.edited_functions(eqn)]
        if eqn.invars and not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in self.halves:
            return self.converted_back(eqn.replace(invars=[self.halves[eqn.invars[0]]]))
        return [eqn]

    def edited_functions(self, eqn: Equation) -> Equation:
        is_fixed = _fixed_inputs(eqn, self.fixed)

        def edit(jaxpr: Jaxpr) -> Jaxpr:
            new = _with_products_in(jaxpr, self.dtype, is_fixed)
            if eqn.primitive.name != primitives.SCAN or new is jaxpr:
                return new
            return with_fewer_residuals(new, jaxprs.operands_of_scan(eqn).constants)

        return edits.with_edited_functions(eqn, edit)

    def edited_product(self, eqn: Equation) -> list[Equation]:
        """Return conversions of the operands, the product, and the conversion of its result.

        The result is in `dtype`: from a float32 result, JAX's transpose would make float32
        products. Each product converts its own operands: with shared conversions, the cotangents of
        several uses would be summed in half precision.
        """
        lhs, rhs, *rest = eqn.invars
        halves = [self.half(lhs), self.half(rhs)]
        params = eqn.params | {"preferred_element_type": self.dtype}
        return [
            edits.conversion(lhs, halves[0], beside=eqn),
            edits.conversion(rhs, halves[1], beside=eqn),
            *self.converted_back(eqn.replace(invars=[*halves, *rest], params=params)),
        ]

    def converted_back(self, eqn: Equation) -> list[Equation]:
        """Return an equation with its result in `dtype`, and the conversion back to float32.

        If a `checkpoint_name` follows, the conversion comes after it, so that the name saves the
        half-precision array.
        """
        (result,) = eqn.outvars
        half = self.half(result)
        eqn = eqn.replace(outvars=[half])
        if result in self.named:
            self.halves[result] = half
            return [eqn]
        return [eqn, edits.conversion(half, result, beside=eqn)]

    def half(self, atom: Atom) -> Atom:
        return edits.variable_like(atom, self.dtype)


def _is_fixed(atom: Atom, fixed: AbstractSet[Var]) -> bool:
    # A literal array counts as closed over, since it may be a batch in NumPy.
    return not np.shape(atom.val) if isinstance(atom, Literal) else atom in fixed


@edits.memoized
def _fixed_variables(jaxpr: Jaxpr, is_fixed: tuple[bool, ...]) -> frozenset[Var]:
    """Return the variables that depend on no argument and on no array that `fun` closes over.

    `is_fixed` marks the inputs that are such variables. A product with one of them is not a layer:
    it extracts patches, sums with a triangle of ones, or applies a Fourier transform.
    """
    fixed = {x for x, yes in zip(jaxpr.invars, is_fixed, strict=True) if yes}
    for eqn in jaxpr.eqns:
        if eqn.effects:
            continue
        if all(_is_fixed(x, fixed) for x in eqn.invars):
            fixed.update(eqn.outvars)
        elif eqn.primitive.name in primitives.PLAIN_CALLS | primitives.DEVICE_MAPS:
            (inner,) = jaxprs.functions_in(eqn.params)
            inside = _fixed_variables(inner, _fixed_inputs(eqn, fixed))
            pairs = zip(eqn.outvars, inner.outvars, strict=True)
            fixed.update(outer for outer, result in pairs if _is_fixed(result, inside))
    return frozenset(fixed)


def _fixed_inputs(eqn: Equation, fixed: AbstractSet[Var]) -> tuple[bool, ...]:
    """Return, for each input of an equation's functions, whether it is fixed. Carries are not."""
    is_fixed = [_is_fixed(x, fixed) for x in eqn.invars]
    if eqn.primitive.name == primitives.CONDITIONAL:
        return tuple(is_fixed[1:])
    if eqn.primitive.name == primitives.SCAN:
        constants, carried, _ = jaxprs.operands_of_scan(eqn)
        is_fixed[constants : constants + carried] = [False] * carried
    return tuple(is_fixed)


def _named_variables(jaxpr: Jaxpr) -> set[Var]:
    """Return the variables whose only use is a `checkpoint_name`, directly or after moves."""
    uses = edits.number_of_uses(jaxpr)
    named: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        leads_to_name = edits.is_move(eqn) and len(eqn.invars) == 1 and eqn.outvars[0] in named
        if eqn.primitive.name == primitives.CHECKPOINT_NAME or leads_to_name:
            named.update(x for x in eqn.invars if not isinstance(x, Literal) and uses[x] == 1)
    return named
