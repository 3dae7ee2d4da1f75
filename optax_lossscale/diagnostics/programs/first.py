"""Find the operation that makes the first NaN or infinity: run a jaxpr operation by operation."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import eval_jaxpr

from optax_lossscale._support import checks
from optax_lossscale._support.jaxprs import (
    Equation,
    Jaxpr,
    is_literal,
    operands_of_scan,
    read_by,
    trace,
)
from optax_lossscale._support.lines import source_of
from optax_lossscale._support.primitives import CALLS
from optax_lossscale._support.tree import PyTree, is_inexact
from optax_lossscale.diagnostics.programs.first_values import (
    FirstNonfinite,
    Leaf,
    Origin,
    Value,
    count_nonfinite,
    earliest,
    kinds_of,
    layer_of,
)


def first_nonfinite(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> FirstNonfinite | None:
    """Find the operation that makes the first NaN or infinity: which layer overflowed?

    `fun` is traced, and run on the host operation by operation. The result is the earliest
    operation that turns finite numbers into NaN or infinity which reach the output. An infinity
    that does not is harmless: `x / (1 + exp(-x))` is right where `exp` overflows. Its
    derivative is not: if the loss is finite and the gradients are not, search `jax.grad(loss_fn)`.

    Infinities in the code (`jnp.where(mask, scores, -jnp.inf)`) and negative ones in the arguments
    are taken as meant, unless the result is not finite because of them alone; an operation that
    makes NaN of them is returned. A finite number in the code that a small dtype makes infinite
    (the -1e30 of a mask, in float16) is returned as the cast of a constant: such a mask should be
    `jnp.finfo(x.dtype).min`.

    This is much slower than a compiled call, which may also keep more digits between operations,
    and overflow later. Calls, `jax.checkpoint`, `jax.lax.cond` and `jax.lax.scan` are followed;
    other operations that hold a function, such as `jax.lax.while_loop`, are returned as a whole.

    Args:
      fun: The loss, the model, or a gradient function for the backward pass, of any framework. Give
        the parameters or the module as an argument: layers are named after key paths.
      *args: The arguments of `fun`, any pytrees, of which the arrays are traced.
      **kwargs: Its keyword arguments, likewise.

    Returns:
      The operation, or an argument or closed-over array whose NaN or infinity reaches the output.
      None if the result is finite.

    Raises:
      TypeError: If `fun` is not a function, or an argument is traced: call it outside of `jax.jit`.

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
    checks.require_function("fun", fun, "Give its arguments after it.")
    checks.require_values(
        "args", (args, kwargs), "Call it outside of `jax.jit`; `fun` may be jitted."
    )
    # JAX's debugging flags would stop at the NaN that the search is for.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        closed, inputs = trace(fun, args, kwargs)

        def results_of(*, takes_as_meant: bool) -> list[Value]:
            place = _Place(itertools.count(), takes_as_meant)
            return _call(closed, list(_arguments(closed.jaxpr, inputs, place)), place)

        results = results_of(takes_as_meant=True)
        if not earliest(results) and any(value.kinds for value in results):
            # Only infinities that are taken as meant reach the result: one of them was not.
            results = results_of(takes_as_meant=False)
    origin = earliest(results)
    return origin.found if origin else None


class _Place(NamedTuple):
    """Where an operation stands in the program."""

    clock: Iterator[int]  # the same for all operations, which run one after the other
    takes_as_meant: bool  # infinities in the code, and some of those that are given
    scope: str = ""  # the `jax.named_scope`s around it, and the steps of scans
    calls: tuple[Equation, ...] = ()  # the equations that it lies within, the innermost first


def _arguments(jaxpr: Jaxpr, inputs: list[tuple[str, Any, Any]], place: _Place) -> Iterator[Value]:
    """Yield the inputs of the jaxpr."""
    # The model is the argument of which the most arrays are used; batches have few.
    used = read_by(jaxpr.eqns)
    pairs = zip(jaxpr.invars, inputs, strict=True)
    counts = collections.Counter(
        argument for var, (argument, _, array) in pairs if var in used and is_inexact(array)
    )
    models = [argument for argument, n in counts.items() if 2 * n > max(counts.values())]
    for position, (argument, keys, array) in enumerate(inputs):
        path = (argument, *map(str, keys))
        name = "".join(path)
        path = path[:-1] if path[-1] == ".value" else path  # a box of Flax
        layer = path[:-1] if len(path) > 2 else path
        leaf = Leaf(position, name, layer if argument in models else ())
        value = _given(array, name, {"-inf"}, place)
        yield value._replace(leaf=leaf if is_inexact(array) else None)


def _given(array: Any, name: str, meant: set[str], place: _Place) -> Value:
    """Return an array that is not computed, of which infinities of these kinds are meant."""
    kinds, origin = kinds_of(array), None
    if not kinds <= (meant if place.takes_as_meant else set()):
        found = FirstNonfinite(layer=name, operation=None, **count_nonfinite(array))
        origin = Origin(next(place.clock), found)
    return Value(array, kinds, origin)


def _call(function: Any, operands: list[Value], place: _Place) -> list[Value]:
    """Evaluate a jaxpr, with or without its constants."""
    consts = [
        _given(x, "an array that `fun` closes over", {"inf", "-inf"}, place)
        for x in getattr(function, "consts", ())
    ]
    consts = [x._replace(is_constant=True) for x in consts]
    jaxpr = getattr(function, "jaxpr", function)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))

    def read(atom: Any) -> Value:
        if is_literal(atom):
            return Value(atom.val, kinds_of(atom.val), is_constant=True)
        return env[atom]

    for eqn in jaxpr.eqns:
        scope = f"{place.scope}/{eqn.source_info.name_stack}"
        inside = place._replace(scope=scope, calls=(eqn, *place.calls))
        results = _follow(jaxpr, eqn, [read(atom) for atom in eqn.invars], inside)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _follow(jaxpr: Jaxpr, eqn: Equation, operands: list[Value], place: _Place) -> list[Value]:
    """Run an operation, by way of the function that it holds if there is one to follow."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return _call(params.get("jaxpr") or params["call_jaxpr"], operands, place)
    if name == "cond":
        index, *rest = operands
        return _call(params["branches"][int(index.array)], rest, place)
    results = _apply(jaxpr, eqn, operands, place)
    if name == "scan" and params["length"] and earliest(results):
        # If each step is finite and the whole, which may be rounded differently, is not, the
        # origin is the scan itself. Infinities that are meant have no origin.
        results = [
            x._replace(origin=step.origin) if x.origin and step.kinds else x
            for x, step in zip(results, _step_by_step(eqn, operands, place), strict=True)
        ]
    return results


def _step_by_step(eqn: Equation, operands: list[Value], place: _Place) -> list[Value]:
    """Run a scan step by step, and return its results, with one step of those that it stacks.

    A stacked result is that of the first step that makes NaN or infinity. A carried one is that of
    the last, since a number that a later step discards does not reach the output.
    """
    body = eqn.params["jaxpr"]
    constants, carried, _ = operands_of_scan(eqn)
    consts, carry = operands[:constants], operands[constants : constants + carried]
    rows = operands[constants + carried :]
    stacked = []
    steps = range(eqn.params["length"])
    for step in reversed(steps) if eqn.params["reverse"] else steps:
        inside = place._replace(scope=f"{place.scope}/step {step}")
        row = [x._replace(array=x.array[step], kinds=kinds_of(x.array[step])) for x in rows]
        results = _call(body, [*consts, *carry, *row], inside)
        carry = results[:carried]
        stacked.append(results[carried:])
    severity = lambda x: (bool(x.kinds), bool(x.origin))  # noqa: E731
    return [*carry, *(max(each, key=severity) for each in zip(*stacked, strict=True))]


def _apply(jaxpr: Jaxpr, eqn: Equation, operands: list[Value], place: _Place) -> list[Value]:
    """Run an operation as a whole, and write down the history of its results."""
    pairs = zip(eqn.invars, operands, strict=True)
    given = {atom: x for atom, x in pairs if not is_literal(atom)}
    alone = jaxpr.replace(constvars=[], invars=[*given], outvars=eqn.outvars, eqns=[eqn])
    arrays = eval_jaxpr(alone, [], *(x.array for x in given.values()))
    time, read = next(place.clock), list(given.values())
    # `jax.checkpoint` computes the forward pass a second time in the backward pass.
    is_backward = "transpose(" in place.scope.rpartition("rematted_computation")[2]
    layer, is_cotangent = layer_of(read, time, is_backward=is_backward)
    for origin, array in ((x.origin, x.array) for x in read):
        # Layers cast their input before they read their parameters. A constant belongs to the layer
        # of the first operation that reads it beside numbers of a layer.
        if origin and origin.cast is not None and layer:
            is_input = origin.cast is array and layer[0] == time
            if is_input or origin.found.constant is not None:
                origin.found = dataclasses.replace(origin.found, layer=layer[1])
                origin.cast = None
    is_cast = eqn.primitive.name == "convert_element_type"
    constant = operands[0].number() if is_cast and not operands[0].kinds else None
    meant = frozenset[str]().union(*(x.kinds for x in operands if place.takes_as_meant))
    leaves = [x.leaf for x in read if x.leaf]
    leaf = leaves[0] if leaves and len(read) == 1 else None
    scope = "/".join(name for name in re.split(r"\w+\(|\)|/", place.scope) if name)
    reaching = operands
    if eqn.primitive.name == "select_n":  # those that are selected
        chosen = np.asarray(operands[0].array)
        cases = ((i, x) for i, x in enumerate(operands[1:]) if x.kinds)  # PRNG keys have none
        reaching = [x for i, x in cases if kinds_of(np.asarray(x.array)[chosen == i])]
    before = earliest(reaching)

    def result(array: Any) -> Value:
        kinds, origin = kinds_of(array), before
        if not origin and kinds and not (meant and kinds <= meant | {"-inf"}):
            found = FirstNonfinite(
                layer=layer[1] if layer else leaves[0].name if leaves else scope,
                operation=eqn.primitive.name,
                scope=scope,
                backward=is_backward,
                source=source_of(*place.calls),
                constant=constant,
                **count_nonfinite(array),
            )
            origin = Origin(time, found, cast=array if is_cast else None)
        return Value(array, kinds, origin if kinds else None, leaf, layer, is_cotangent)

    return [result(array) for array in arrays]
