"""Find the operation that makes the first NaN or infinity: run a jaxpr operation by operation."""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr

from optax_lossscale._support import checks
from optax_lossscale._support.jaxprs import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    inner_jaxprs,
    is_literal,
    source_of,
)
from optax_lossscale._support.tree import KeyPath, PyTree, is_array, is_inexact
from optax_lossscale.diagnostics.programs.first_values import (
    FirstNonfinite,
    Leaf,
    Origin,
    Place,
    Value,
    constant_of,
    count_nonfinite,
    kinds_of,
    layer_of,
    layer_path,
    readable_scope,
    sliced,
)
from optax_lossscale.diagnostics.programs.trace import named_arrays, trace

_TIME = operator.attrgetter("time")

# Operations that do nothing but run a function, which is followed instead.
_CALLS = frozenset(
    # `eval_jaxpr` is the name of `closed_call` since jax 0.12.
    ["closed_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "jit", "remat2"]
)


def first_nonfinite(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> FirstNonfinite | None:
    """Find the operation that makes the first NaN or infinity: which layer overflowed?

    `fun` is traced, and run on the host operation by operation in the order of the program. Of the
    operations that turn finite numbers into NaN or infinity, the earliest whose result reaches the
    output is returned. An infinity that does not reach the output is harmless: `x / (1 + exp(-x))`
    is right where `exp` overflows. Its derivative is not, so if the loss is finite and the
    gradients are not, search `jax.grad(loss_fn)`.

    Infinities that are written into the code (`jnp.where(mask, scores, -jnp.inf)`), and negative
    ones in the arguments, are taken as meant. An operation that makes NaN of them is returned. A
    finite number that a small dtype makes infinite (the -1e30 of a mask, in float16) is returned
    itself, as the cast of a constant: such a mask should be `jnp.finfo(x.dtype).min`.

    This is much slower than a compiled call: use it after training has failed. Each operation is
    rounded to its own dtype. A compiled function may keep more digits in between, and overflow
    later. Calls, `jax.checkpoint`, `jax.lax.cond` and `jax.lax.scan` are followed; other operations
    that hold a function, such as `jax.lax.while_loop` and `jax.shard_map`, are returned as a whole.

    Args:
      fun: The function: the loss, the model, or a gradient function for the backward pass. Any
        framework's; give the parameters or the module as an argument, because layers are named
        after the arguments' key paths.
      *args: The arguments of `fun`, any pytrees. Arrays are traced, and `fun` gets every other leaf
        as it is.
      **kwargs: Its keyword arguments, likewise.

    Returns:
      The operation that made the first NaN or infinity, or None if the outputs are finite. If an
      argument holds NaN or positive infinity that reaches the output, that argument.

    Raises:
      TypeError: If `fun` is not a function, or an argument is traced: call it outside of `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> params = {"energy": jnp.full((2, 2), 300.0), "head": jnp.ones((2, 1))}
      >>> def loss_fn(params, x):
      ...     energy = (x @ params["energy"]).astype(jnp.float16) ** 2
      ...     return jnp.mean(energy.astype(jnp.float32) @ params["head"])
      >>> found = ols.diagnostics.first_nonfinite(loss_fn, params, jnp.ones((4, 2)))
      >>> found.layer, found.operation, found.inf
      ("params['energy']", 'integer_pow', 8)
    """
    checks.function("fun", fun, "Give its arguments after it.")
    named = named_arrays(fun, args, kwargs)
    arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
    checks.concrete(
        "args", arrays, "Call `first_nonfinite` outside of `jax.jit`; `fun` itself may be jitted."
    )
    # JAX's debugging flags would stop at the NaN that the search is for.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        closed, arrays = trace(fun, *args, **kwargs)
        return Search(named).run_all(closed, arrays)


class Search:
    """An evaluation of a jaxpr that keeps the history of each array."""

    def __init__(self, named: list[tuple[str, KeyPath]]) -> None:
        self._named = named
        self._clock = itertools.count()

    def run_all(self, closed: ClosedJaxpr, arrays: Sequence[Any]) -> FirstNonfinite | None:
        """Evaluate the jaxpr, and return the origin of the first NaN or infinity in its outputs."""
        outputs = self._run(
            closed.jaxpr,
            [self._constant(const) for const in closed.consts],
            list(self._arguments(closed.jaxpr, arrays)),
            Place(),
        )
        origins = [output.origin for output in outputs if output.origin]
        return min(origins, key=_TIME).found if origins else None

    def _arguments(self, jaxpr: Jaxpr, arrays: Sequence[Any]) -> Iterator[Value]:
        # The model is the argument of which the most arrays are used; batches have few.
        used = {var for eqn in jaxpr.eqns for var in eqn.invars if not is_literal(var)}
        counts: dict[str, int] = {}
        for (name, _), var, array in zip(self._named, jaxpr.invars, arrays, strict=True):
            counts[name] = counts.get(name, 0) + (var in used and is_inexact(array))
        for position, ((name, path), array) in enumerate(zip(self._named, arrays, strict=True)):
            leaf = Leaf(
                position=position,
                name=name + jax.tree_util.keystr(path),
                layer=name + jax.tree_util.keystr(layer_path(path)),
                is_parameter=2 * counts[name] > max(counts.values()),
            )
            value = self._input(array, leaf.name, meant={"-inf"})
            yield value._replace(leaf=leaf if is_inexact(array) else None)

    def _constant(self, array: Any) -> Value:
        value = self._input(array, "an array that `fun` closes over", meant={"inf", "-inf"})
        return value._replace(is_constant=True)

    def _input(self, array: Any, name: str, meant: set[str]) -> Value:
        kinds = kinds_of(array)
        if kinds <= meant:
            return Value(array, kinds)
        found = FirstNonfinite(layer=name, operation=None, **count_nonfinite(array))
        return Value(array, kinds, Origin(next(self._clock), found))

    def _run(
        self, jaxpr: Jaxpr, consts: list[Value], args: list[Value], place: Place
    ) -> list[Value]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Value:
            if is_literal(atom):
                return Value(atom.val, kinds_of(atom.val), is_constant=True)
            return env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            results = self._follow(jaxpr, eqn, operands, place.within(eqn))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _follow(
        self, jaxpr: Jaxpr, eqn: Equation, operands: list[Value], place: Place
    ) -> list[Value]:
        """Run an operation, by way of the function that it holds if there is one to follow."""
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            held = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return self._run_held(held, operands, place)
        if name == "cond":
            index, *rest = operands
            return self._run_held(params["branches"][int(index.array)], rest, place)
        results = self._apply(jaxpr, eqn, operands, place)
        if name == "scan" and params["length"] and any(x.origin for x in results):
            by_step = self._step_by_step(eqn, [*operands], place)
            # If each step is finite and the whole, which may be rounded differently, is not, the
            # origin is the scan itself. Infinities that are meant have no origin.
            results = [
                x._replace(origin=step.origin) if x.origin and step.kinds else x
                for x, step in zip(results, by_step, strict=True)
            ]
        return results

    def _run_held(self, held: Any, operands: list[Value], place: Place) -> list[Value]:
        consts = [self._constant(const) for const in getattr(held, "consts", ())]
        return self._run(getattr(held, "jaxpr", held), consts, operands, place)

    def _step_by_step(self, eqn: Equation, operands: list[Value], place: Place) -> list[Value]:
        """Run a scan step by step, and return its results: of those that it stacks, one step.

        Of a stacked result, it is the first step that makes NaN or infinity. Of a carried one, it
        is the last, since a number that a later step discards does not reach the output.
        """
        body = eqn.params["jaxpr"]
        # Sliced and stacked arrays have one axis more outside of the body than inside. (The
        # parameters that say so have other names in other versions of JAX.)
        stacked = [
            outside.aval.ndim > inside.ndim
            for outside, inside in zip(eqn.invars, body.in_avals, strict=True)
        ]
        carried = sum(
            outside.aval.ndim == inside.ndim
            for outside, inside in zip(eqn.outvars, body.out_avals, strict=True)
        )
        start = stacked.index(True) if True in stacked else len(stacked)
        found: list[Value] = []
        steps = range(eqn.params["length"])
        for step in reversed(steps) if eqn.params["reverse"] else steps:
            inputs = [
                sliced(x, step) if is_stacked else x
                for x, is_stacked in zip(operands, stacked, strict=True)
            ]
            results = self._run_held(body, inputs, place.in_step(step))
            operands[start - carried : start] = results[:carried]
            stacks = zip(found[carried:] or results[carried:], results[carried:], strict=True)
            worse = (max(pair, key=lambda x: (bool(x.origin), bool(x.kinds))) for pair in stacks)
            found = [*results[:carried], *worse]
        return found

    def _apply(
        self, jaxpr: Jaxpr, eqn: Equation, operands: list[Value], place: Place
    ) -> list[Value]:
        known = {
            atom: value
            for atom, value in zip(eqn.invars, operands, strict=True)
            if not is_literal(atom)
        }
        variables = list(known.values())
        alone = jaxpr.replace(
            constvars=[],
            invars=[*known],
            outvars=eqn.outvars,
            eqns=[eqn],
            effects=eqn.effects,
        )
        arrays = eval_jaxpr(alone, [], *(value.array for value in variables))
        time = next(self._clock)
        is_backward = place.is_backward()
        # The rule of a `custom_vjp` may compute from its residuals first: that is known forward.
        reads_cotangent = is_backward and not (
            variables and all(x.layer and not x.is_cotangent for x in variables)
        )
        leaf = variables[0].leaf if len(variables) == 1 else None
        # The function inside of a scatter or a reduction only combines two numbers.
        combines = eqn.primitive.name.startswith(("reduce", "scatter"))
        held = [] if combines else [each for inner in inner_jaxprs(eqn) for each in inner.eqns]
        layer = layer_of(variables, time, is_backward=is_backward, holds_function=bool(held))
        origins = [x.origin for x in _selected(eqn, operands) if x.origin]
        for origin, array in ((x.origin, x.array) for x in variables):
            # Layers cast their input before they read their parameters. A constant belongs to the
            # layer of the first operation that reads it beside numbers of a layer.
            is_input = origin and origin.cast is array and layer and layer[0] == time
            if origin and layer and (is_input or origin.is_constant):
                origin.found = dataclasses.replace(origin.found, layer=layer[1])
                origin.is_constant = False
        given = frozenset[str]().union(*(x.kinds for x in operands))

        def result(array: Any) -> Value:
            kinds = kinds_of(array)
            value = Value(array, kinds, None, leaf, layer, is_cotangent=reads_cotangent)
            if not kinds:
                return value
            if origins:
                return value._replace(origin=min(origins, key=_TIME))
            if given and not kinds - given - {"-inf"}:
                return value  # infinities that are meant
            read = next((x.leaf.name for x in variables if x.leaf), "")
            is_cast = eqn.primitive.name == "convert_element_type"
            constant = constant_of(operands[0]) if is_cast else None
            found = FirstNonfinite(
                layer=layer[1] if layer else read or readable_scope(place.scope),
                operation=eqn.primitive.name,
                scope=readable_scope(place.scope),
                backward=is_backward,
                source=source_of(eqn, *held, *place.calls),
                constant=constant,
                **count_nonfinite(array),
            )
            cast = array if is_cast else None
            return value._replace(origin=Origin(time, found, cast, constant is not None))

        return [result(array) for array in arrays]


def _selected(eqn: Equation, operands: list[Value]) -> list[Value]:
    """Return the operands that reach the result: of a selection, those that are selected."""
    if eqn.primitive.name != "select_n":
        return operands
    which, *cases = operands
    chosen = np.asarray(which.array)
    return [x for i, x in enumerate(cases) if kinds_of(np.where(chosen == i, x.array, 0))]
