"""The rule of `autocast`: which matrix products run in half precision, and why others do not."""

import re
from collections.abc import Set as AbstractSet

import jax
import numpy as np
from jax.extend.core import Literal, Var

from optax_lossscale._autocast import edits
from optax_lossscale._autocast.matrix_products import SHORTEST, sizes_of
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr
from optax_lossscale._support.lines import is_users

AUTOCAST_SCOPE = "optax_lossscale.autocast"
_KEPT_BY_INNER = "An inner `autocast` to float32 keeps it."
_DEFAULT_PRECISION = (None, (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT))
_HALF_OR_FLOAT32 = frozenset(["float32", "float16", "bfloat16"])


def reason_not_to_follow(eqn: Equation) -> str:
    """Return why products in the function of an equation are left alone; `""` if they are cast."""
    if is_inside_autocast(np.dtype(np.float32), eqn):
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
    if is_inside_autocast(np.dtype(np.float32), eqn):
        return _KEPT_BY_INNER
    *operands, result = (x.aval.dtype.name for x in (*eqn.invars[:2], eqn.outvars[0]))
    is_float32 = "float32" in operands and result == "float32"
    if not is_float32 or not {*operands} <= _HALF_OR_FLOAT32:
        dtypes = " and ".join(sorted({*operands}, key=lambda name: name != "float32"))
        is_half = {*operands} == {result} and result in ("float16", "bfloat16")
        remedy = "Leave out the layer's `dtype`" if is_half else "Use float32 for all of them"
        return f"Its operands are {dtypes} and its result is {result}. {remedy}."
    if not has_default_precision(eqn):
        option = matmul_precision()
        where = f"`jax_default_matmul_precision` is {option!r}" if option else "its own argument"
        return f"Its precision is not the default one ({where})."
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


def has_default_precision(eqn: Equation) -> bool:
    """Return whether the code does not ask for another precision of a product."""
    return eqn.params.get("precision") in _DEFAULT_PRECISION


def with_highest_precision(eqn: Equation) -> Equation:
    """Return a product as `precision="highest"` makes it, unless it has a precision of its own."""
    if not has_default_precision(eqn):
        return eqn
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    return eqn.replace(params=eqn.params | {"precision": highest})


def matmul_precision() -> str | None:
    """Return the precision that JAX is set to, which every product without its own has."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def is_inside_autocast(dtype: np.dtype, *equations: Equation) -> bool:
    """Return whether one of the equations belongs to an inner `autocast` to this dtype."""
    stacks = (str(eqn.source_info.name_stack) for eqn in equations)
    return any(scope_of(dtype) in re.split(r"[/()]", stack) for stack in stacks)


def scope_of(dtype: np.dtype) -> str:
    """Return the named scope of `autocast` to a dtype. No scope of a user has this name."""
    return f"{AUTOCAST_SCOPE}_{dtype.name}"


def is_fixed(atom: Atom, fixed: AbstractSet[Var]) -> bool:
    """Return whether an operand is one of the `fixed` variables, or a number in the code."""
    # A literal array counts as closed over, since it may be a batch in NumPy.
    return not np.shape(atom.val) if isinstance(atom, Literal) else atom in fixed


@edits.memoized
def fixed_variables(jaxpr: Jaxpr, are_fixed: tuple[bool, ...]) -> frozenset[Var]:
    """Return the variables that depend on no argument and on no array that `fun` closes over.

    `are_fixed` marks the inputs that are such variables. A product with one of them is not a layer:
    it extracts patches, sums with a triangle of ones, or applies a Fourier transform.
    """
    fixed = {x for x, yes in zip(jaxpr.invars, are_fixed, strict=True) if yes}
    for eqn in jaxpr.eqns:
        if eqn.effects:
            continue
        if all(is_fixed(x, fixed) for x in eqn.invars):
            fixed.update(eqn.outvars)
        elif eqn.primitive.name in primitives.PLAIN_CALLS | primitives.DEVICE_MAPS:
            (inner,) = jaxprs.functions_in(eqn.params)
            inside = fixed_variables(inner, fixed_inputs(eqn, fixed))
            pairs = zip(eqn.outvars, inner.outvars, strict=True)
            fixed.update(outer for outer, result in pairs if is_fixed(result, inside))
    return frozenset(fixed)


def fixed_inputs(eqn: Equation, fixed: AbstractSet[Var]) -> tuple[bool, ...]:
    """Return, for each input of an equation's functions, whether it is fixed. Carries are not."""
    are_fixed = [is_fixed(x, fixed) for x in jaxprs.inputs_of_functions(eqn)]
    if eqn.primitive.name == primitives.SCAN:
        constants, carried, _ = jaxprs.operands_of_scan(eqn)
        are_fixed[constants : constants + carried] = [False] * carried
    return tuple(are_fixed)
