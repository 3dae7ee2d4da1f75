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
from jax.extend.core import Var

from optax_lossscale._support.jaxprs import (
    Equation,
    Jaxpr,
    all_equations,
    has_effects,
    memoized,
    with_edit,
)
from optax_lossscale._support.primitives import ARITHMETIC, COMPARISONS


@memoized
def with_fewer_residuals(body: Jaxpr) -> Jaxpr:
    """Return the body of a scan, with or without its constants, with fewer residuals."""
    return with_edit(_checkpointed, body)


def _is_kept(primitive: Any, *avals: Any, **_: Any) -> bool:
    """Return whether a result is kept for the backward pass. A policy for `jax.checkpoint`.

    A comparison of floats is kept: it needs one byte, and its operands at least eight. Elementary
    functions are kept: recomputing them makes a recurrent network 1.3 times slower (jaxlib 0.10.2,
    CPU).
    """
    if primitive.name in COMPARISONS:
        return bool(jnp.issubdtype(avals[0].dtype, jnp.floating))
    return primitive.name not in ARITHMETIC


def _checkpointed(jaxpr: Jaxpr) -> Jaxpr:
    """Return a program of one equation, which runs `jaxpr` in `jax.checkpoint`.

    JAX still computes what depends only on the scan's constants before its loop.
    """
    if has_effects(jaxpr) or _is_left_alone(jaxpr):
        return jaxpr
    operands = [*jaxpr.constvars, *jaxpr.invars]
    results = [Var(x.aval) for x in jaxpr.outvars]
    debug_info = jaxpr.debug_info._replace(
        arg_names=("",) * len(operands), result_paths=("",) * len(results)
    )
    body = jaxpr.replace(constvars=[], invars=operands, debug_info=debug_info)
    checkpoint = _checkpoint()
    eqn = jaxpr.eqns[0].replace(  # so it has their context, such as the mesh
        primitive=checkpoint.primitive,
        invars=operands,
        outvars=results,
        params=checkpoint.params | {"jaxpr": body},
        effects=jaxpr.effects,
    )
    return jaxpr.replace(eqns=[eqn], outvars=results)


@functools.cache
def _checkpoint() -> Equation:
    """Return an equation with the primitive of `jax.checkpoint`, which jax 0.7 does not export."""
    fun = jax.checkpoint(jnp.sin, policy=_is_kept, prevent_cse=False)
    (eqn,) = jax.make_jaxpr(fun)(jnp.float32(0)).eqns
    return eqn


def _is_left_alone(jaxpr: Jaxpr) -> bool:
    """Return whether a program has a `jax.checkpoint` of its own or a `while_loop`.

    No policy can keep the results of a `while_loop`: JAX would run it twice (jax 0.7 to 0.12).
    """
    return any(
        eqn.params.get("policy", _is_kept) is not _is_kept or eqn.primitive.name == "while"
        for eqn in all_equations(jaxpr)
    )
