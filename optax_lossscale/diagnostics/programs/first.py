"""Find the operation that makes the first NaN or infinity: run a jaxpr operation by operation."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import eval_jaxpr

from optax_lossscale._support import checks
from optax_lossscale._support.jaxprs import (
    Equation,
    Jaxpr,
    argument_names,
    inner_jaxprs,
    is_literal,
    read_by,
    source_of,
    trace,
)
from optax_lossscale._support.tree import KeyPath, PyTree, is_inexact
from optax_lossscale.diagnostics.programs.first_values import (
    FirstNonfinite,
    Leaf,
    Origin,
    Value,
    count_nonfinite,
    earliest,
    kinds_of,
    layer_of,
    readable_scope,
)

# Operations that do nothing but run a function, which is followed instead.
_CALLS = frozenset(
    # `eval_jaxpr` is the name of `closed_call` since jax 0.12.
    ["closed_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "jit", "remat2"]
)


def first_nonfinite(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> FirstNonfinite | None:
    """Find the operation that makes the first NaN or infinity: which layer overflowed?

    `fun` is traced, and run on the host operation by operation. Of the operations that turn finite
    numbers into NaN or infinity, the earliest whose result reaches the output is returned. An
    infinity that does not is harmless: `x / (1 + exp(-x))` is right where `exp` overflows. Its
    derivative is not: if the loss is finite and the gradients are not, search `jax.grad(loss_fn)`.

    Infinities in the code (`jnp.where(mask, scores, -jnp.inf)`) and negative ones in the arguments
    are taken as meant; an operation that makes NaN of them is returned. A finite number in the code
    that a small dtype makes infinite (the -1e30 of a mask, in float16) is returned as the cast of a
    constant: such a mask should be `jnp.finfo(x.dtype).min`.

    This is much slower than a compiled call, which may also keep more digits between operations,
    and overflow later. Calls, `jax.checkpoint`, `jax.lax.cond` and `jax.lax.scan` are followed;
    other operations that hold a function, such as `jax.lax.while_loop` and `jax.shard_map`, are
    returned as a whole.

    Args:
      fun: The loss, the model, or a gradient function for the backward pass, of any framework. Give
        the parameters or the module as an argument, because layers are named after the arguments'
        key paths.
      *args: The arguments of `fun`, any pytrees. Arrays are traced, and `fun` gets every other leaf
        as it is.
      **kwargs: Its keyword arguments, likewise.

    Returns:
      The operation, or an argument whose NaN or positive infinity reaches the output; None if the
      outputs are finite.

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
    checks.concrete(
        "args",
        (args, kwargs),
        "Call `first_nonfinite` outside of `jax.jit`; `fun` itself may be jitted.",
    )
    # JAX's debugging flags would stop at the NaN that the search is for.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        closed, inputs = trace(fun, args, kwargs)
        search = _Search()
        values = search.arguments(argument_names(fun, len(args)), closed.jaxpr, inputs)
        origin = earliest(search.call(closed, [*values], _Place()))
    return origin.found if origin else None


class _Place(NamedTuple):
    """Where an operation stands in the program."""

    scope: str = ""  # the `jax.named_scope`s around it, and the steps of scans
    calls: tuple[Equation, ...] = ()  # the equations that it lies within, the innermost first


class _Search:
    """An evaluation of a jaxpr that keeps the history of each array."""

    def __init__(self) -> None:
        self._clock = itertools.count()

    def arguments(
        self, names: list[str], jaxpr: Jaxpr, inputs: list[tuple[KeyPath, Any]]
    ) -> Iterator[Value]:
        """Yield the inputs of the jaxpr, whose positional arguments have these names."""
        paths = [
            (names[root.idx] if isinstance(root, jax.tree_util.SequenceKey) else root.key, *path)
            for (_, root, *path), _ in inputs
        ]
        # The model is the argument of which the most arrays are used; batches have few.
        used = read_by(jaxpr.eqns)
        counts = collections.Counter(
            name
            for (name, *_), var, (_, array) in zip(paths, jaxpr.invars, inputs, strict=True)
            if var in used and is_inexact(array)
        )
        for position, ((name, *path), (_, array)) in enumerate(zip(paths, inputs, strict=True)):
            is_parameter = 2 * counts[name] > max(counts.values(), default=0)
            keys = (name, *(jax.tree_util.keystr((key,)) for key in path))
            leaf = Leaf(position, keys, is_parameter) if is_inexact(array) else None
            yield self._input(array, "".join(keys), meant={"-inf"})._replace(leaf=leaf)

    def _input(self, array: Any, name: str, meant: set[str]) -> Value:
        kinds = kinds_of(array)
        if kinds <= meant:
            return Value(array, kinds)
        found = FirstNonfinite(layer=name, operation=None, **count_nonfinite(array))
        return Value(array, kinds, Origin(next(self._clock), found))

    def call(self, function: Any, operands: list[Value], place: _Place) -> list[Value]:
        """Evaluate a jaxpr, with or without its constants."""
        consts = [
            self._input(const, "an array that `fun` closes over", meant={"inf", "-inf"})
            for const in getattr(function, "consts", ())
        ]
        consts = [const._replace(is_constant=True) for const in consts]
        jaxpr = getattr(function, "jaxpr", function)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))

        def read(atom: Any) -> Value:
            if is_literal(atom):
                return Value(atom.val, kinds_of(atom.val), is_constant=True)
            return env[atom]

        for eqn in jaxpr.eqns:
            inside = _Place(f"{place.scope}/{eqn.source_info.name_stack}", (eqn, *place.calls))
            results = self._follow(jaxpr, eqn, [read(atom) for atom in eqn.invars], inside)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _follow(
        self, jaxpr: Jaxpr, eqn: Equation, operands: list[Value], place: _Place
    ) -> list[Value]:
        """Run an operation, by way of the function that it holds if there is one to follow."""
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            held = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return self.call(held, operands, place)
        if name == "cond":
            index, *rest = operands
            return self.call(params["branches"][int(index.array)], rest, place)
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

    def _step_by_step(self, eqn: Equation, operands: list[Value], place: _Place) -> list[Value]:
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
                x.at(step) if is_stacked else x
                for x, is_stacked in zip(operands, stacked, strict=True)
            ]
            results = self.call(body, inputs, place._replace(scope=f"{place.scope}/step {step}"))
            operands[start - carried : start] = results[:carried]
            stacks = zip(found[carried:] or results[carried:], results[carried:], strict=True)
            worse = (max(pair, key=lambda x: (bool(x.origin), bool(x.kinds))) for pair in stacks)
            found = [*results[:carried], *worse]
        return found

    def _apply(
        self, jaxpr: Jaxpr, eqn: Equation, operands: list[Value], place: _Place
    ) -> list[Value]:
        given = zip(eqn.invars, operands, strict=True)
        known = {atom: value for atom, value in given if not is_literal(atom)}
        variables = list(known.values())
        alone = jaxpr.replace(constvars=[], invars=[*known], outvars=eqn.outvars, eqns=[eqn])
        arrays = eval_jaxpr(alone, [], *(value.array for value in variables))
        time = next(self._clock)
        # `jax.checkpoint` computes the forward pass a second time in the backward pass.
        is_backward = "transpose(" in place.scope.rpartition("rematted_computation")[2]
        # The rule of a `custom_vjp` may compute from its residuals first: that is known forward.
        reads_residuals = bool(variables) and all(x.layer and not x.is_cotangent for x in variables)
        # The function inside of a scatter or a reduction only combines two numbers.
        combines = eqn.primitive.name.startswith(("reduce", "scatter"))
        held = [] if combines else [each for inner in inner_jaxprs(eqn) for each in inner.eqns]
        layer = layer_of(variables, time, is_backward=is_backward, holds_function=bool(held))
        for origin, array in ((x.origin, x.array) for x in variables):
            # Layers cast their input before they read their parameters. A constant belongs to the
            # layer of the first operation that reads it beside numbers of a layer.
            is_input = origin and origin.cast is array and layer and layer[0] == time
            if origin and layer and (is_input or origin.is_constant):
                origin.found = dataclasses.replace(origin.found, layer=layer[1])
                origin.is_constant = False
        before = Value(
            array=None,
            origin=earliest(_selected(eqn, operands)),
            leaf=variables[0].leaf if len(variables) == 1 else None,
            layer=layer,
            is_cotangent=is_backward and not reads_residuals,
        )
        meant = frozenset[str]().union(*(x.kinds for x in operands))
        read = next(("".join(x.leaf.keys) for x in variables if x.leaf), "")
        scope = readable_scope(place.scope)
        is_cast = eqn.primitive.name == "convert_element_type"

        def result(array: Any) -> Value:
            value = before._replace(array=array, kinds=kinds_of(array))
            if not value.kinds:
                return value._replace(origin=None)
            if value.origin or (meant and value.kinds <= meant | {"-inf"}):
                return value
            constant = operands[0].number() if is_cast else None
            found = FirstNonfinite(
                layer=layer[1] if layer else read or scope,
                operation=eqn.primitive.name,
                scope=scope,
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
