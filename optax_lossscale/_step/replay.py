"""Evaluate a jaxpr, keeping the old state without a copy where a flag is false.

`jnp.where(pred, new, old)` on what an optimizer step returns is right, and is the oracle of this
module; XLA:CPU (seen in jaxlib 0.10.2) makes it slow. It computes Adam's new moments a second time
inside the loop that writes the parameters. The old moments then have two readers, cannot be
overwritten in place, and are copied: three to six times the cost of the step. Here the choice is
made where each new leaf is computed: what comes after it reads the chosen leaf, and the old one
has a single reader.

What comes after it must not meet an old leaf among new ones: Adam's bias correction of an old
count of 0 is 0/0. Where `pred` is false, it therefore reads what the equations between the old leaf
and the new one make of the leaf that was kept, and of gradients of zero. So everything is computed
from one consistent state, and where `pred` is false, the derivative is that of keeping the state.

The module can be removed once XLA:CPU writes the outputs that share a computation in one loop, as
XLA:TPU does: `test_plain_where_on_the_outputs_copies_the_state` fails then.
"""

import functools
import operator
from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend import core

from optax_lossscale._support.tree import is_inexact

# Loops may not end, and callbacks may raise, on numbers that no step produces.
_LOOPS_AND_CALLBACKS = frozenset(["while", "scan", "cond", "pure_callback"])
# What else is evaluated only once: it costs more than copying a leaf.
_COSTLY = frozenset(["dot_general", "conv_general_dilated", "sort"])

_READ_AS_KEPT = "optax_lossscale: read as kept"

# Equations that lead from an old leaf, whose position comes first, to the new one.
_Path = tuple[int, list[core.JaxprEqn]]


def replay_where(
    pred: jax.Array, closed: core.ClosedJaxpr, grads: list[Any], old: list[Any]
) -> list[Any]:
    """Return the outputs of a jaxpr, with the old state for the new one where `pred` is false.

    Args:
      pred: Whether the state moves. `bool[]`.
      closed: Maps gradients and the old state to the new state, and more outputs behind it.
      grads: The gradients, which may be zeros where `pred` is false.
      old: The old state.
    """
    jaxpr = closed.jaxpr
    read = {*_variables(jaxpr.outvars), *_read_by(jaxpr.eqns)}

    def evaluate(eqns: list[core.JaxprEqn], values: Mapping[core.Var, Any]) -> dict[core.Var, Any]:
        made = [var for eqn in eqns for var in eqn.outvars if var in read]
        needed = _read_by(eqns)
        for var in made:
            needed.pop(var, None)
        piece = jaxpr.replace(constvars=[], invars=list(needed), outvars=made, eqns=eqns)
        function = core.jaxpr_as_fun(core.ClosedJaxpr(piece, []))
        return dict(zip(made, function(*(values[var] for var in needed)), strict=True))

    inputs = [constant_unless(pred, array) for array in (*closed.consts, *grads, *old)]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    grad_vars, old_vars = set(jaxpr.invars[: len(grads)]), jaxpr.invars[len(grads) :]
    early = _early_choices(jaxpr, grad_vars, old_vars)
    kept: dict[int, Any] = {}
    start = 0
    for end, eqn in enumerate(jaxpr.eqns, start=1):
        chosen = [var for var in eqn.outvars if var in early]
        if chosen or end == len(jaxpr.eqns):
            values.update(evaluate(jaxpr.eqns[start:end], values))
            start = end
        for var in chosen:
            leaf, path = early[var]
            choice = jnp.where(pred, values[var], old[leaf])
            # Under `shard_map` one leaf may vary over axes over which the other does not, and the
            # equations were traced for their types.
            if jax.typeof(choice) == var.aval == old_vars[leaf].aval:
                if eqn.params.get("name") == _READ_AS_KEPT:
                    values[var] = kept[leaf] = read_as_kept(choice)
                    continue
                kept[leaf] = choice
                replaced = {
                    v: jnp.zeros_like(values[v])
                    for v in _read_by(path)
                    if v in grad_vars and _alike(v, var)
                }
                replaced[old_vars[leaf]] = choice
                again = evaluate(path, ChainMap(replaced, values))[var]
                values[var] = jnp.where(pred, choice, jax.lax.stop_gradient(again))

    outputs = [v.val if isinstance(v, core.Literal) else values[v] for v in jaxpr.outvars]
    for leaf, array in enumerate(old):
        outputs[leaf] = kept[leaf] if leaf in kept else jnp.where(pred, outputs[leaf], array)
    return outputs


def read_as_kept(leaf: jax.Array) -> jax.Array:
    """Return a new leaf, marked: what reads it may be given the old one where `pred` is false.

    Without the mark, that reads what the leaf's own equations make of the old leaf. They are
    evaluated again, and XLA:CPU writes the large arrays among their inputs to memory.
    """
    return checkpoint_name(leaf, _READ_AS_KEPT)


def constant_unless(pred: jax.Array, array: Any) -> Any:
    """Return `array`, with a derivative of zero where `pred` is false."""
    if not (isinstance(array, Tracer) and is_inexact(array)):
        return array
    return jax.lax.select_n(pred, jax.lax.stop_gradient(array), array)


def _early_choices(
    jaxpr: core.Jaxpr, grads: set[core.Var], old: list[core.Var]
) -> dict[core.Var, _Path]:
    """Return the variables at which to choose early, each with the path from the old leaf.

    Those are the arrays that are made from the old leaf, by equations that may be evaluated twice,
    and that later equations read. For any other, a choice at the end does as well. Each equation
    of the path takes the old leaf, or gradients to something of the leaf's shape: of zeros that is
    a constant, and the gradients are not read once more.
    """
    leaves = _leaves_read_later(jaxpr, len(old))
    # The sources of each variable, as bits: the first for gradients, then one for each old leaf,
    # except through leaves that are chosen early.
    origins = dict.fromkeys(grads, 1) | {var: 2 << leaf for leaf, var in enumerate(old)}
    made_by: dict[core.Var, int] = {}

    def path_to(new: core.Var, leaf: int) -> list[core.JaxprEqn]:
        found: set[int] = set()
        pending = [new]
        while pending:
            index = made_by.get(pending.pop())
            if index is not None and index not in found:
                found.add(index)
                for var in _variables(jaxpr.eqns[index].invars):
                    origin = origins.get(var, 0)
                    if origin & 2 << leaf or (origin & 1 and _alike(var, new)):
                        pending.append(var)
        return [jaxpr.eqns[index] for index in sorted(found)]

    early: dict[core.Var, _Path] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        origin = functools.reduce(
            operator.or_, (origins.get(var, 0) for var in _variables(eqn.invars)), 0
        )
        for var in eqn.outvars:
            origins[var], made_by[var] = origin, index
            if var in leaves and origin & 2 << leaves[var]:
                path = path_to(var, leaves[var])
                if all(map(_may_repeat, path)):
                    early[var] = leaves[var], path
                    origins[var] = 0
    return early


def _leaves_read_later(jaxpr: core.Jaxpr, leaves: int) -> dict[core.Var, int]:
    """Return the new leaves, other than scalars, that equations read."""
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}.intersection(_read_by(jaxpr.eqns))
    found: dict[core.Var, int] = {}
    for leaf, var in enumerate(jaxpr.outvars[:leaves]):
        if not isinstance(var, core.Literal) and var in made and _shape(var):
            found.setdefault(var, leaf)  # two leaves that are one variable: the first
    return found


def _may_repeat(eqn: core.JaxprEqn) -> bool:
    return not _any_is([eqn], _LOOPS_AND_CALLBACKS | _COSTLY)


def repeats_or_acts(jaxpr: core.Jaxpr) -> bool:
    """Say whether a jaxpr has a loop, a callback or another effect."""
    return _any_is(jaxpr.eqns, _LOOPS_AND_CALLBACKS)


def _any_is(eqns: Iterable[core.JaxprEqn], names: frozenset[str]) -> bool:
    """Say whether an equation, or one inside of it, has one of these names or an effect."""
    return any(
        eqn.primitive.name in names
        or eqn.effects
        or any(_any_is(inner.eqns, names) for inner in _inner_jaxprs(eqn))
        for eqn in eqns
    )


def _inner_jaxprs(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    found = (getattr(param, "jaxpr", param) for param in eqn.params.values())
    return [jaxpr for jaxpr in found if isinstance(jaxpr, core.Jaxpr)]


def _read_by(eqns: Iterable[core.JaxprEqn]) -> dict[core.Var, None]:
    """Return the variables that the equations read, without duplicates, in order."""
    return dict.fromkeys(var for eqn in eqns for var in _variables(eqn.invars))


def _variables(atoms: Iterable[Any]) -> list[core.Var]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _alike(a: core.Var, b: core.Var) -> bool:
    return _shape(a) == _shape(b)


def _shape(var: core.Var) -> tuple[int, ...]:
    aval: Any = var.aval  # of an abstract type without a shape, for type checkers
    return aval.shape
