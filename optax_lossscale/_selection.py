"""Keeping the old state of a function, chosen where each leaf of the new one is made.

`jnp.where(pred, new, old)` on what an optimizer step returns is right and slow: XLA:CPU (seen in
jaxlib 0.10.2) computes Adam's new moments a second time inside the loop that writes the
parameters, so that the old moments have two readers, cannot be overwritten in place, and are
copied: three to six times the cost of the step. If the choice is made at the place where each new
moment is computed, everything after it reads the chosen value, the old one has a single reader,
and nothing is copied. The results are the same: where `pred` holds, the chosen value is the new
one, and where it does not, all that is computed from it is thrown away.

The function is therefore traced to a jaxpr, which is cut after each equation that defines a leaf
of the new state, and the pieces are evaluated one after the other with a `jnp.where` in between.
A piece is evaluated by JAX itself (`jax.extend.core.jaxpr_as_fun`), nested jaxprs and all. Where
there is nothing to fuse, in eager execution, plain `jnp.where` on the outputs does.

The choice cannot be made early for a leaf that is made inside of a nested jaxpr, as when the
optimizer's update is itself jitted: it is then made at the call's end. This module can go when
XLA:CPU writes the outputs that share a computation in one loop, as XLA:TPU does.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core

from optax_lossscale._tree import PyTree, Tree, is_array, tree_where

Out = TypeVar("Out")


def update_where(
    pred: jax.Array, update: Callable[[Tree], tuple[Out, Tree]], state: Tree
) -> tuple[Out, Tree]:
    """Return `update(state)` with the old state in place of the new one where `pred` is false.

    Args:
      pred: Whether the state moves. `bool[]`.
      update: Returns an output and a new state with the structure, shapes and dtypes of the one
        it is given.
      state: The old state.

    Returns:
      The output, which means nothing where `pred` is false, and the chosen state.

    Raises:
      ValueError: If `update` returns a state of another structure.
    """
    if not isinstance(pred, Tracer):
        out, new_state = update(state)
        return out, tree_where(pred, new_state, state)

    old, join_old, skeleton = _split(state)
    join: dict[str, Callable[[list[Any]], PyTree]] = {}

    def traced(arrays: list[jax.Array]) -> tuple[list[Any], list[Any]]:
        out, new_state = update(join_old(arrays))
        new, join["new"], new_skeleton = _split(new_state)
        if new_skeleton != skeleton:
            raise ValueError(
                "the optimizer must return a state of the structure it was given, got "
                f"{new_skeleton} for {skeleton}. Keep what changes in arrays of a fixed shape."
            )
        outputs, join["out"], _ = _split(out)
        return new, outputs

    jaxpr = jax.make_jaxpr(traced)(old)
    values = _evaluate_where(pred, jaxpr, old)
    return join["out"](values[len(old) :]), join["new"](values[: len(old)])


def _split(tree: PyTree) -> tuple[list[Any], Callable[[list[Any]], PyTree], Any]:
    """Return the arrays of `tree`, a function that puts others in their place, and the rest."""
    leaves, treedef = jax.tree.flatten(tree)
    is_traced = [is_array(leaf) and leaf.dtype != jax.dtypes.float0 for leaf in leaves]
    arrays = [leaf for leaf, traced in zip(leaves, is_traced, strict=True) if traced]
    # Nothing that outlives the trace may hold its tracers.
    rest = [None if traced else leaf for leaf, traced in zip(leaves, is_traced, strict=True)]

    def join(arrays: list[Any]) -> PyTree:
        remaining = iter(arrays)
        return treedef.unflatten(
            next(remaining) if traced else leaf
            for leaf, traced in zip(rest, is_traced, strict=True)
        )

    return arrays, join, (treedef, is_traced, rest)


def _evaluate_where(pred: jax.Array, closed: core.ClosedJaxpr, old: list[Any]) -> list[Any]:
    """Evaluate a jaxpr that maps the old state to the new state and more outputs."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *old], strict=True))
    # What each equation has to choose. An output that is an input or a literal is defined by no
    # equation, and one that stands for two leaves is chosen early for the first alone.
    early: dict[core.Var, Any] = {}
    for var, old_value in zip(jaxpr.outvars, old, strict=False):
        if not isinstance(var, core.Literal) and var not in values:
            early.setdefault(var, old_value)
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, core.Literal)}
    read.update(v for v in jaxpr.outvars if not isinstance(v, core.Literal))

    def evaluate(eqns: list[core.JaxprEqn]) -> None:
        made = [v for eqn in eqns for v in eqn.outvars if v in read]
        needed = {v: None for eqn in eqns for v in eqn.invars if not isinstance(v, core.Literal)}
        for var in made:
            needed.pop(var, None)
        piece = jaxpr.replace(constvars=[], invars=list(needed), outvars=made, eqns=eqns)
        function = core.jaxpr_as_fun(core.ClosedJaxpr(piece, []))
        values.update(zip(made, function(*(values[v] for v in needed)), strict=True))

    start = 0
    for end, eqn in enumerate(jaxpr.eqns, start=1):
        chosen = [var for var in eqn.outvars if var in early]
        if chosen or end == len(jaxpr.eqns):
            evaluate(jaxpr.eqns[start:end])
            start = end
        for var in chosen:
            values[var] = jnp.where(pred, values[var], early[var])

    outputs = [v.val if isinstance(v, core.Literal) else values[v] for v in jaxpr.outvars]
    for i, (var, old_value) in enumerate(zip(jaxpr.outvars, old, strict=False)):
        if isinstance(var, core.Literal) or early.get(var) is not old_value:
            outputs[i] = jnp.where(pred, outputs[i], old_value)
    return outputs
