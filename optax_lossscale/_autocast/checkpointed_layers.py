"""Inputs of checkpointed layers, saved in half precision for the backward pass.

`jax.checkpoint` without a policy saves only the inputs of a layer, and computes the layer again in
the backward pass. Under `autocast` these inputs are float32. Here the forward pass does not change.
The backward pass reads inputs that are rounded to half precision, and computes the layer there.

An input is rounded only if it has the error of half precision already: it depends on a product that
runs in half precision. So positions, masks, angles, parameters and targets are saved unchanged.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import linear_util
from jax.extend.core import Literal, Var

from optax_lossscale._autocast import edits
from optax_lossscale._autocast.matrix_products import SHORTEST
from optax_lossscale._autocast.what_is_cast import reason_not_to_follow
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr
from optax_lossscale._support.tree import HALF, is_symbolic

_SAVES_INPUTS_ONLY = (None, jax.checkpoint_policies.nothing_saveable)


def with_saved_halves(jaxpr: Jaxpr, dtype: np.dtype) -> Jaxpr:
    """Return a program whose checkpoints save inputs in `dtype`.

    Its products are in half precision already. The same object is returned if nothing changes.
    """
    return _with_saved_halves(jaxpr, dtype, (False,) * len(jaxprs.without_constants(jaxpr).invars))


@edits.memoized
def _with_saved_halves(jaxpr: Jaxpr, dtype: np.dtype, are_rounded: tuple[bool, ...]) -> Jaxpr:
    def saving_halves(inner: Jaxpr) -> Jaxpr:
        rounded = _rounded_variables(inner, are_rounded)
        return edits.with_equations(
            inner, [_edited_equation(eqn, dtype, rounded) for eqn in inner.eqns]
        )

    return edits.with_edit(saving_halves, jaxpr)


def _edited_equation(eqn: Equation, dtype: np.dtype, rounded: AbstractSet[Var]) -> Equation:
    # The derivative of a checkpoint, as in a gradient penalty, has saved its inputs already.
    if reason_not_to_follow(eqn) or eqn.params.get("differentiated"):
        return eqn
    eqn = edits.with_edited_functions(
        eqn, _with_saved_halves, dtype, _inputs_to_round(eqn, rounded)
    )
    if eqn.params.get("policy", "") not in _SAVES_INPUTS_ONLY:
        return eqn
    params = dict(eqn.params)
    body = params.pop("jaxpr")
    are_halves = tuple(_is_rounded(x, rounded) and _is_convertible(x) for x in eqn.invars)
    if not body.eqns or jaxprs.has_effects(body) or not any(are_halves):
        return eqn
    (layer,) = _layer(body, dtype, are_halves, eqn.primitive, tuple(params.items())).eqns
    return eqn.replace(primitive=layer.primitive, params=layer.params)


def _is_convertible(atom: Atom) -> bool:
    """Return whether an input is in float32, and as large as the smallest product that is cast."""
    aval = atom.aval
    sizes = [SHORTEST if is_symbolic(size) else size for size in aval.shape]
    # XLA cannot convert what is offloaded to the host's memory. jax 0.7 has no types for it.
    space = getattr(getattr(aval, "memory_space", None), "name", "Device")
    is_large = len(sizes) > 1 and math.prod(sizes) >= SHORTEST**2
    return aval.dtype == jnp.float32 and is_large and space == "Device"


def _is_rounded(atom: Atom, rounded: AbstractSet[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in rounded


@edits.memoized
def _rounded_variables(jaxpr: Jaxpr, are_rounded: tuple[bool, ...]) -> frozenset[Var]:
    """Return the variables that depend on a product in half precision.

    `are_rounded` marks the inputs that do. What is computed from integers or flags, such as a mask,
    does not depend on the product that they come from.
    """
    rounded = {x for x, yes in zip(jaxpr.invars, are_rounded, strict=True) if yes}
    for eqn in jaxpr.eqns:
        results = zip(eqn.outvars, _rounded_results(eqn, rounded), strict=True)
        rounded.update(x for x, yes in results if yes and _has_tangent(x))
    return frozenset(rounded)


def _rounded_results(eqn: Equation, rounded: AbstractSet[Var]) -> Sequence[bool]:
    """Return, for each result of an equation, whether it depends on a product in half precision."""
    name = eqn.primitive.name
    if name in primitives.PRODUCTS and all(x.aval.dtype in HALF for x in eqn.invars[:2]):
        return [True]
    sources = tuple(_is_rounded(x, rounded) for x in jaxprs.inputs_of_functions(eqn))
    if name not in primitives.FOLLOWED | primitives.CUSTOM_DERIVATIVES:
        return [any(sources)] * len(eqn.outvars)
    if name == primitives.SCAN:
        sources = _with_carries(eqn, sources)
    return _either(*(_rounded_outputs(f, sources) for f in jaxprs.functions_in(eqn.params)))


def _rounded_outputs(jaxpr: Jaxpr, are_rounded: tuple[bool, ...]) -> tuple[bool, ...]:
    rounded = _rounded_variables(jaxpr, are_rounded)
    return tuple(_is_rounded(x, rounded) for x in jaxpr.outvars)


def _with_carries(scan: Equation, are_rounded: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which inputs of the body of a scan are rounded, in any of its iterations."""
    (body,) = jaxprs.functions_in(scan.params)
    first, carried, _ = jaxprs.operands_of_scan(scan)
    end = first + carried
    carries = _either(are_rounded[first:end], _rounded_outputs(body, are_rounded)[:carried])
    new = (*are_rounded[:first], *carries, *are_rounded[end:])
    return new if new == are_rounded else _with_carries(scan, new)


def _either(*marks: Sequence[bool]) -> tuple[bool, ...]:
    return tuple(map(any, zip(*marks, strict=True)))


def _inputs_to_round(eqn: Equation, rounded: AbstractSet[Var]) -> tuple[bool, ...]:
    """Return, for each input of an equation's functions, whether a checkpoint inside may round it.

    The constants and rows of a scan exist outside of its body, and are not saved again.
    """
    sources = tuple(_is_rounded(x, rounded) for x in jaxprs.inputs_of_functions(eqn))
    if eqn.primitive.name != primitives.SCAN:
        return sources
    first, carried, scanned = jaxprs.operands_of_scan(eqn)
    carries = _with_carries(eqn, sources)[first : first + carried]
    return (*(False,) * first, *carries, *(False,) * scanned)


def _has_tangent(atom: Atom) -> bool:
    return atom.aval.to_tangent_aval().dtype != jax.dtypes.float0


@edits.memoized
def _layer(
    body: Jaxpr,
    dtype: np.dtype,
    are_halves: tuple[bool, ...],
    checkpoint: Any,
    options: tuple[tuple[str, Any], ...],
) -> Jaxpr:
    """Return a program of one equation: a checkpoint of `body`, with a derivative of its own.

    The derivative is a checkpoint of the derivative of `body`, and saves inputs in `dtype`. It
    calls this program again, so that derivatives of higher order save halves, too.
    """
    body = body.replace(debug_info=body.debug_info)  # else the cache would keep `body` alive
    params = dict(options)
    moved_results = [_has_tangent(x) for x in body.outvars]

    def of_inputs(moving: list[int], saved: list[Any], tangents: list[Any]) -> list[Any]:
        """Return the tangents of the results, given those of the `moving` inputs."""
        halves = zip(saved, are_halves, strict=True)
        inputs = [x.astype(jnp.float32) if is_half else x for x, is_half in halves]

        def of_moved(*moved: Any) -> Any:
            given = dict(zip(moving, moved, strict=True))
            results = jaxprs.evaluate(body, (), *(given.get(i, x) for i, x in enumerate(inputs)))
            return [*itertools.compress(results, moved_results)]

        return jax.jvp(of_moved, [inputs[i] for i in moving], tangents)[1]

    @functools.cache
    def derivative(*are_zero: bool) -> tuple[Any, ...]:
        """Trace the derivative, given which inputs have no tangent. JAX calls this."""
        moving = [i for i, is_zero in enumerate(are_zero) if not is_zero]
        cse = params["prevent_cse"]  # one for each input, or one for all
        prevent_cse: Any = ([*cse], True) if isinstance(cse, tuple) else cse
        checkpointed = jax.checkpoint(functools.partial(of_inputs, moving), prevent_cse=prevent_cse)

        def with_tangents(inputs: list[Any], tangents: list[Any]) -> list[Any]:
            halves = zip(inputs, are_halves, strict=True)
            saved = [x.astype(dtype) if is_half else x for x, is_half in halves]
            return [*jaxprs.evaluate(layer, (), *inputs), *checkpointed(saved, tangents)]

        avals = [x.aval for x in body.invars]
        jaxpr = jaxprs.make_jaxpr(with_tangents)(
            avals, [avals[i].to_tangent_aval() for i in moving]
        )
        return jaxprs.without_constants(jaxpr), jaxpr.consts, [not moved for moved in moved_results]

    # With the checkpoint inside, XLA:GPU accesses 13 % fewer bytes (jaxlib 0.10.2, 7B).
    checkpointed = _with_one_equation(body, checkpoint, params | {"jaxpr": body})
    custom = _custom_jvp()
    layer = _with_one_equation(
        body,
        custom.primitive,
        custom.params
        | {
            "call_jaxpr": edits.with_edit(lambda _: checkpointed, custom.params["call_jaxpr"]),
            "jvp_jaxpr_fun": linear_util.wrap_init(derivative, debug_info=body.debug_info),
        },
    )
    return layer


def _with_one_equation(body: Jaxpr, primitive: Any, params: Mapping[str, Any]) -> Jaxpr:
    """Return a program of one equation, with the types of `body`."""
    results = [Var(x.aval) for x in body.outvars]
    eqn = body.eqns[0].replace(  # so it has their context, such as the mesh
        primitive=primitive,
        invars=body.invars,
        outvars=results,
        params=params,
        effects=body.effects,
    )
    return body.replace(eqns=[eqn], outvars=results)


@functools.cache
def _custom_jvp() -> Equation:
    """Return the equation of a function with a `custom_jvp`, whose parameters are undocumented."""
    fun = jax.custom_jvp(lambda x: x)
    fun.defjvp(lambda primals, tangents: (*primals, *tangents), symbolic_zeros=True)
    (eqn,) = jax.make_jaxpr(fun)(jnp.float32(0)).eqns
    return eqn
