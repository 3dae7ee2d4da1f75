"""What the backward pass of a scan keeps.

JAX stacks every value that the derivative of a scan's body reads: for a norm, softmax or activation
in float32, several arrays in float32. Here the backward pass repeats moves and plain arithmetic
from what it keeps anyway: the results of matrix products in half precision, of kernels, reductions
and elementary functions. The gradients are the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from optax_lossscale._support.jaxprs import (
    Equation,
    Jaxpr,
    has_effects,
    inner_jaxprs,
    is_literal,
    memoized,
    read_by,
    with_edit,
)
from optax_lossscale._support.primitives import ARITHMETIC, COMPARISONS


@memoized
def with_fewer_residuals(body: Jaxpr, constants: int) -> Jaxpr:
    """Return the body of a scan with the same results, which keeps less for its backward pass.

    Args:
      body: The body, with or without the arrays that it closes over.
      constants: How many of its inputs are constants of the loop. What depends only on them is
        computed before the loop, as JAX does without this.
    """
    return with_edit(lambda inner: _checkpointed(inner, constants), body)


def _is_kept(primitive: Any, *avals: Any, **_: Any) -> bool:
    """Return whether the backward pass keeps a result: the policy of `jax.checkpoint`.

    Comparing floats makes one byte of eight or more. An elementary function that was computed again
    would make a recurrent network 1.3 times slower (jaxlib 0.10.2, CPU).
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


def _is_variable(atom: Any) -> bool:
    return not is_literal(atom)


@functools.cache
def _checkpoint() -> Equation:
    """Return an equation with the primitive of `jax.checkpoint`, not public in jax 0.7."""
    fun = jax.checkpoint(jnp.sin, policy=_is_kept, prevent_cse=False)
    (eqn,) = jax.make_jaxpr(fun)(jnp.float32(0)).eqns
    return eqn


def _is_left_alone(jaxpr: Jaxpr) -> bool:
    """Return whether a program decides what is kept, has references, or has a `while_loop`.

    A policy cannot keep the results of a `while_loop`: JAX would run it twice (jax 0.7 to 0.12).
    """
    return any(
        eqn.params.get("policy", _is_kept) is not _is_kept
        or eqn.primitive.name == "while"
        or any("Ref" in type(x.aval).__name__ for x in eqn.outvars)
        or any(map(_is_left_alone, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
