"""Residuals of a scan: what it keeps for its backward pass.

JAX stacks every value that the derivative of a scan's body reads: for a norm, softmax or activation
in float32, several float32 arrays. Here the backward pass recomputes moves and cheap arithmetic
from values that are kept anyway: the results of half-precision products, kernels, reductions and
elementary functions. The gradients are the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from optax_lossscale._support.jaxprs import (
    Atom,
    Equation,
    Jaxpr,
    all_equations,
    has_effects,
    memoized,
    read_by,
    with_edit,
)
from optax_lossscale._support.primitives import ARITHMETIC, COMPARISONS


@memoized
def with_fewer_residuals(body: Jaxpr, constants: int) -> Jaxpr:
    """Return the body of a scan with the same results and fewer residuals.

    Args:
      body: The body, with or without its constants.
      constants: The number of its first inputs that are the same in every step. JAX computes
        whatever depends only on them before the loop, with this edit too.
    """
    return with_edit(lambda inner: _checkpointed(inner, constants), body)


def _is_kept(primitive: Any, *avals: Any, **_: Any) -> bool:
    """Return whether a result is kept for the backward pass. A policy for `jax.checkpoint`.

    A comparison of floats is kept: it needs one byte, and its operands at least eight. Elementary
    functions are kept: recomputing them makes a recurrent network 1.3 times slower (jaxlib 0.10.2,
    CPU).
    """
    if primitive.name in COMPARISONS:
        return bool(jnp.issubdtype(avals[0].dtype, jnp.floating))
    return primitive.name not in ARITHMETIC


def _checkpointed(jaxpr: Jaxpr, constants: int) -> Jaxpr:
    if has_effects(jaxpr) or _is_left_alone(jaxpr):
        return jaxpr
    known, once, inside = {*jaxpr.constvars, *jaxpr.invars[:constants]}, [], []
    for eqn in jaxpr.eqns:
        if known.issuperset(read_by([eqn])):
            once.append(eqn)
            known.update(eqn.outvars)
        else:
            inside.append(eqn)
    if not inside:
        return jaxpr
    made = {x for eqn in inside for x in eqn.outvars}
    operands = [x for x in read_by(inside) if x not in made]
    results = [x for x in dict.fromkeys(filter(_is_variable, jaxpr.outvars)) if x in made]
    body = jaxpr.replace(
        constvars=[],
        invars=operands,
        outvars=results,
        eqns=inside,
        debug_info=jaxpr.debug_info._replace(
            arg_names=("",) * len(operands), result_paths=("",) * len(results)
        ),
    )
    outside = {x: Var(x.aval) for x in results}
    checkpoint = _checkpoint()
    eqn = inside[0].replace(
        primitive=checkpoint.primitive,
        invars=operands,
        outvars=[*outside.values()],
        params=checkpoint.params | {"jaxpr": body},
        effects=jaxpr.effects,
    )
    outvars = [outside.get(x, x) if _is_variable(x) else x for x in jaxpr.outvars]
    return jaxpr.replace(eqns=[*once, eqn], outvars=outvars)


def _is_variable(atom: Atom) -> bool:
    return not isinstance(atom, Literal)


@functools.cache
def _checkpoint() -> Equation:
    """Return an equation with the primitive of `jax.checkpoint`, which jax 0.7 does not export."""
    fun = jax.checkpoint(jnp.sin, policy=_is_kept, prevent_cse=False)
    (eqn,) = jax.make_jaxpr(fun)(jnp.float32(0)).eqns
    return eqn


def _is_left_alone(jaxpr: Jaxpr) -> bool:
    """Return whether a program has a checkpoint policy or a `while_loop`.

    No policy can keep the results of a `while_loop`: JAX would run it twice (jax 0.7 to 0.12).
    """
    return any(
        eqn.params.get("policy", _is_kept) is not _is_kept or eqn.primitive.name == "while"
        for eqn in all_equations(jaxpr)
    )
