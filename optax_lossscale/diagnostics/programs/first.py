"""Find the operation that makes the first NaN or infinity, by running one at a time."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._autocast import AUTOCAST_SCOPE
from optax_lossscale._support import checks, jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr
from optax_lossscale._support.lines import source_of
from optax_lossscale._support.tree import PyTree, is_inexact
from optax_lossscale.diagnostics.programs import first_values
from optax_lossscale.diagnostics.programs.first_values import FirstNonfinite, Input, Origin, Tracked
from optax_lossscale.diagnostics.programs.trace import trace


def first_nonfinite(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> FirstNonfinite | None:
    """Find the operation, and so the layer, that makes the first NaN or infinity.

    `fun` is traced and run on the host, one operation at a time. The result is the earliest
    operation that turns finite numbers into a NaN or infinity that reaches the output. One that
    does not reach it is harmless: `x / (1 + exp(-x))` is correct where `exp` overflows. But its
    derivative is not. If the loss is finite and the gradients are not, search `jax.grad(loss_fn)`.

    Infinities in the code (`jnp.where(mask, scores, -jnp.inf)`) and negative ones in the arguments
    count as intended, unless the result is not finite only because of them. An operation that makes
    NaN from them is returned. If a cast makes a finite constant infinite (the -1e30 of a mask, in
    float16), the cast is returned, with the constant. For a mask, write `jnp.finfo(x.dtype).min` in
    a `jnp.where`.

    The search is much slower than a compiled call, which may also keep more digits between
    operations, and so overflow later. The search enters calls, `jax.checkpoint`, `jax.lax.cond` and
    `jax.lax.scan`. Other operations that contain a function, such as `jax.lax.while_loop`, are
    returned as a whole.

    Args:
      fun: The loss, the model, or a gradient function for the backward pass, of any framework. Make
        the parameters or the module one of its arguments: layers are named after key paths.
      *args: The arguments of `fun`, any pytrees. Their arrays are traced.
      **kwargs: The keyword arguments of `fun`, any pytrees.

    Returns:
      The operation, or an argument or closed-over array whose NaN or infinity reaches the output.
      None if the result is finite.

    Raises:
      TypeError: If `fun` is not a function, or an argument is traced.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> params = {"energy": jnp.full((2, 2), 300.0), "head": jnp.ones((2, 1))}
      >>> def loss_fn(params, x):
      ...     energy = (x @ params["energy"]).astype(jnp.float16) ** 2
      ...     return jnp.mean(energy.astype(jnp.float32) @ params["head"])
      >>> found = ols.diagnostics.first_nonfinite(loss_fn, params, jnp.ones((4, 2)))
      >>> found.layer, found.operation, found.inf
      ("params['energy']", 'integer_pow', 8)
    """
    checks.require_function("fun", fun, "Pass its arguments separately.")
    remedy = "Call it outside of `jax.jit`. `fun` may be jitted."
    checks.require_values("args", (args, kwargs), remedy)
    # JAX's debugging flags would raise at the NaN that this searches for.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        closed, inputs = trace(fun, args, kwargs)

        def results_of(*, allows_infinities: bool) -> list[Tracked]:
            context = _Context(itertools.count(), allows_infinities)
            return _call(closed, list(_arguments(closed.jaxpr, inputs, context)), context)

        results = results_of(allows_infinities=True)
        if not first_values.earliest(results) and any(value.nonfinite for value in results):
            # Only infinities that count as intended reach the result. One of them was not intended.
            results = results_of(allows_infinities=False)
    origin = first_values.earliest(results)
    return origin.found if origin else None


class _Context(NamedTuple):
    """The context of an operation in the program."""

    clock: Iterator[int]  # shared by all operations, which run one after another
    allows_infinities: bool  # whether those in the code and some in the arguments are intended
    scope: str = ""  # the `jax.named_scope`s and the steps of scans around the operation
    calls: tuple[Equation, ...] = ()  # the operation and those that contain it, innermost first


def _arguments(
    jaxpr: Jaxpr, inputs: list[tuple[str, Any, Any]], context: _Context
) -> Iterator[Tracked]:
    """Yield the inputs of the jaxpr as values."""
    # The model is the argument with the most arrays that are used. A batch has few.
    used = jaxprs.read_by(jaxpr.eqns)
    pairs = zip(jaxpr.invars, inputs, strict=True)
    counts = collections.Counter(
        argument for var, (argument, _, array) in pairs if var in used and is_inexact(array)
    )
    models = [argument for argument, n in counts.items() if 2 * n > max(counts.values())]
    for position, (argument, keys, array) in enumerate(inputs):
        path = (argument, *map(str, keys))
        name = "".join(path)
        path = path[:-1] if path[-1] == ".value" else path  # the array in one of Flax's boxes
        layer = path[:-1] if len(path) > 2 else path
        found = Input(position, name, layer if argument in models else ())
        value = Tracked(array, input=found if is_inexact(array) else None)
        yield _given(value, name, {"-inf"}, context)


def _given(value: Tracked, name: str, intended: set[str], context: _Context) -> Tracked:
    """Return an input or constant, its own origin unless it only holds `intended` infinities."""
    if not value.nonfinite <= (intended if context.allows_infinities else set()):
        found = FirstNonfinite(layer=name, operation=None, **value.counts())
        value.origin = Origin(next(context.clock), found)
    return value


def _call(function: Any, operands: list[Tracked], context: _Context) -> list[Tracked]:
    """Evaluate a jaxpr, with or without constants."""
    jaxpr = jaxprs.without_constants(function)
    constants = (Tracked(array, is_constant=True) for array in getattr(function, "consts", ()))
    name = "an array that `fun` closes over"
    consts = [_given(value, name, {"inf", "-inf"}, context) for value in constants]
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))

    def read(atom: Atom) -> Tracked:
        if isinstance(atom, Literal):
            return Tracked(atom.val, is_constant=True)
        return env[atom]

    for eqn in jaxpr.eqns:
        scope = f"{context.scope}/{eqn.source_info.name_stack}"
        inside = context._replace(scope=scope, calls=(eqn, *context.calls))
        results = _follow(jaxpr, eqn, [read(atom) for atom in eqn.invars], inside)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _follow(
    jaxpr: Jaxpr, eqn: Equation, operands: list[Tracked], context: _Context
) -> list[Tracked]:
    """Run an operation. If it contains a function that can be searched, search that."""
    name, params = eqn.primitive.name, eqn.params
    if name in primitives.CALLS:
        return _call(params.get("jaxpr") or params["call_jaxpr"], operands, context)
    if name == primitives.CONDITIONAL:
        index, *rest = operands
        return _call(params["branches"][int(index.array)], rest, context)
    results = _apply(jaxpr, eqn, operands, context)
    if name == primitives.SCAN and params["length"] and first_values.earliest(results):
        # XLA may round a scan and its steps differently. If only the scan is not finite, it is the
        # origin itself. Intended infinities have no origin.
        results = [
            dataclasses.replace(x, origin=step.origin) if x.origin and step.nonfinite else x
            for x, step in zip(results, _step_by_step(eqn, operands, context), strict=True)
        ]
    return results


def _step_by_step(eqn: Equation, operands: list[Tracked], context: _Context) -> list[Tracked]:
    """Run a scan step by step. Return its final carry, and one step of each stacked result.

    A stacked result comes from the first step that makes NaN or infinity. A carried result comes
    from the last step: what a later step discards never reaches the output.
    """
    body = eqn.params["jaxpr"]
    constants, carried, _ = jaxprs.operands_of_scan(eqn)
    consts, carry = operands[:constants], operands[constants : constants + carried]
    rows = operands[constants + carried :]
    stacked = []
    steps = range(eqn.params["length"])
    for step in reversed(steps) if eqn.params["reverse"] else steps:
        inside = context._replace(scope=f"{context.scope}/step {step}")
        row = [dataclasses.replace(x, array=x.array[step]) for x in rows]
        results = _call(body, [*consts, *carry, *row], inside)
        carry = results[:carried]
        stacked.append(results[carried:])
    severity = lambda x: (bool(x.nonfinite), bool(x.origin))  # noqa: E731
    return [*carry, *(max(each, key=severity) for each in zip(*stacked, strict=True))]


def _apply(
    jaxpr: Jaxpr, eqn: Equation, operands: list[Tracked], context: _Context
) -> list[Tracked]:
    """Run an operation as a whole, and record the history of its results."""
    pairs = zip(eqn.invars, operands, strict=True)
    given = {atom: x for atom, x in pairs if not isinstance(atom, Literal)}
    program = jaxpr.replace(constvars=[], invars=[*given], outvars=eqn.outvars, eqns=[eqn])
    arrays = jaxprs.evaluate(program, [], *(x.array for x in given.values()))
    time, read = next(context.clock), list(given.values())
    # `jax.checkpoint` repeats the forward pass within the backward pass.
    is_backward = "transpose(" in context.scope.rpartition("rematted_computation")[2]
    layer, is_cotangent = first_values.layer_of(read, time, is_backward=is_backward)
    if layer:
        _name_layer_of_casts(read, layer, is_first=layer[0] == time)
    is_cast = eqn.primitive.name == primitives.CONVERSION
    inputs = [x.input for x in read if x.input]
    only = inputs[0] if len(inputs) == len(read) == 1 else None
    names = re.split(r"\w+\(|\)|/", context.scope)
    scope = "/".join(name for name in names if name and not name.startswith(AUTOCAST_SCOPE))
    intended = frozenset[str]().union(*(x.nonfinite for x in operands if context.allows_infinities))
    before = first_values.earliest(_reaching(eqn, operands))

    def result(array: Any) -> Tracked:
        value = Tracked(array, None, only, layer, is_cotangent)
        if not value.nonfinite:
            return value
        value.origin = before
        if not before and not (intended and value.nonfinite <= intended | {"-inf"}):
            is_finite_cast = is_cast and not operands[0].nonfinite
            found = FirstNonfinite(
                layer=layer[1] if layer else inputs[0].name if inputs else scope,
                operation=eqn.primitive.name,
                scope=scope,
                backward=is_backward,
                source=source_of(*context.calls),
                constant=operands[0].number() if is_finite_cast else None,
                **value.counts(),
            )
            value.origin = Origin(time, found, cast=array if is_cast else None)
        return value

    return [result(array) for array in arrays]


def _name_layer_of_casts(read: list[Tracked], layer: tuple[int, str], *, is_first: bool) -> None:
    """Name the layer of the casts that made operands NaN or infinite, if this operation shows it.

    Layers cast their input before they read their parameters, in the operation that `is_first`. A
    constant belongs to the first layer whose values are combined with it.
    """
    for origin, array in ((x.origin, x.array) for x in read):
        if origin and origin.cast is not None:
            is_input = origin.cast is array and is_first
            if is_input or origin.found.constant is not None:
                origin.found = dataclasses.replace(origin.found, layer=layer[1])
                origin.cast = None


def _reaching(eqn: Equation, operands: list[Tracked]) -> list[Tracked]:
    """Return the operands that may make a result NaN or infinite: of a selection, the selected."""
    if eqn.primitive.name != primitives.SELECTION:
        return operands
    chosen = np.asarray(operands[0].array)
    cases = ((i, x) for i, x in enumerate(operands[1:]) if x.nonfinite)  # never PRNG keys
    return [x for i, x in cases if Tracked(np.asarray(x.array)[chosen == i]).nonfinite]
