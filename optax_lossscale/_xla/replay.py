"""Select between old and new state leaf by leaf, where each is computed, not after the update.

For XLA:CPU (jaxlib 0.10.2 to 0.12.0). If the selection follows the update, XLA:CPU computes Adam's
new moments twice, the second time in the loop that writes the parameters. The old moments then have
two readers, so they are copied, not overwritten in place. A step costs 3.9 to 4.8 times as much as
plain Optax, and 1.1 to 1.3 times with this file. XLA:GPU and XLA:TPU compile both forms alike.

The update is traced and evaluated equation by equation. Each new leaf is selected as soon as it is
computed. Later equations read the selected leaf, so the old one has a single reader. Remove this
file once `test_plain_where_on_the_outputs_copies_the_state` fails.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Literal, Var

from optax_lossscale._support import jaxprs
from optax_lossscale._support.choose import constant_if_skipped, zeros_if_skipped
from optax_lossscale._support.jaxprs import Equation, Jaxpr
from optax_lossscale._support.nnx import is_write_error
from optax_lossscale._support.primitives import LOOPS_AND_CALLBACKS
from optax_lossscale._support.tree import Flag, PyTree, is_selectable


class CannotReplayError(Exception):
    """The step cannot be replayed, and must be run in the plain form."""


def replay(
    applied: Flag,
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    grads: PyTree,
    state: PyTree,
) -> tuple[PyTree, PyTree]:
    """Do what `_guard.keep.run_where` does.

    A step without loops, callbacks or other effects is given the gradients unchanged. With zeros
    instead, a norm of the gradients would wait for the flag, and a GPU or TPU would read all
    gradients again.

    Raises:
      CannotReplayError: If the step is not being compiled, or cannot be traced separately.
    """
    if not isinstance(applied, Tracer):
        raise CannotReplayError

    def state_first(state_and_grads: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """Take and return the state first, so that both begin with the same leaves."""
        state, grads = state_and_grads
        out, new_state = step(grads, state)
        return new_state, out

    try:
        closed, inputs, join = jaxprs.traced(state_first, (state, grads), is_selectable)
    except Exception as error:
        if is_write_error(error):  # an optimizer may write into Variables of flax.nnx
            raise CannotReplayError from error
        raise
    old = [leaf for leaf in jax.tree.leaves(state) if is_selectable(leaf)]
    names = (eqn.primitive.name for eqn in jaxprs.all_equations(closed.jaxpr))
    needs_zeros = jaxprs.has_effects(closed.jaxpr) or not LOOPS_AND_CALLBACKS.isdisjoint(names)
    given = inputs[len(old) :]
    given = zeros_if_skipped(applied, given) if needs_zeros else given
    early = {} if needs_zeros else _leaves_read_later(closed.jaxpr, len(old))
    inputs = constant_if_skipped(applied, [*closed.consts, *old, *given])
    new_state, out = join(_evaluate(applied, closed.jaxpr, inputs, old, early))
    return out, new_state


def _evaluate(
    applied: Flag,
    jaxpr: Jaxpr,
    inputs: list[jax.Array],
    old: list[jax.Array],
    early: dict[Var, int],
) -> list[jax.Array]:
    """Evaluate a jaxpr whose first outputs are the new leaves, and select between them and `old`.

    `early` maps variables of leaves that are selected where they are computed to their positions in
    `old`.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    returned = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    read = returned | jaxprs.read_by(jaxpr.eqns).keys()
    chosen: dict[int, jax.Array] = {}
    for eqns, ends in _pieces(jaxpr.eqns, early):
        made = [var for eqn in eqns for var in eqn.outvars if var in read]
        needed = [var for var in jaxprs.read_by(eqns) if var in values]
        # Evaluating a jaxpr keeps the contexts and names of its equations.
        piece = jaxpr.replace(constvars=[], invars=needed, outvars=made, eqns=eqns)
        values.update(zip(made, jaxprs.evaluate(piece, [], *map(values.get, needed)), strict=True))
        for var in ends:
            leaf = early[var]
            choice = jnp.where(applied, values[var], old[leaf])
            # Under `shard_map`, old and new leaf may vary over different mesh axes. The later
            # equations were traced for one type.
            if jax.typeof(choice) == jax.typeof(old[leaf]) == var.aval:
                chosen[leaf] = choice
                values[var] = constant_if_skipped(applied, choice)
    results = [var.val if isinstance(var, Literal) else values[var] for var in jaxpr.outvars]
    for leaf, array in enumerate(old):
        is_chosen = leaf in chosen
        results[leaf] = chosen[leaf] if is_chosen else jnp.where(applied, results[leaf], array)
    return results


def _pieces(
    eqns: list[Equation], early: dict[Var, int]
) -> Iterator[tuple[list[Equation], list[Var]]]:
    """Split equations after each one that computes leaves. Yield the pieces and these leaves."""
    piece: list[Equation] = []
    for eqn in eqns:
        piece.append(eqn)
        if chosen := [var for var in eqn.outvars if var in early]:
            yield piece, chosen
            piece = []
    yield piece, []


def _leaves_read_later(jaxpr: Jaxpr, leaves: int) -> dict[Var, int]:
    """Return variables and positions of the new leaves, except scalars, that equations read."""
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars} & jaxprs.read_by(jaxpr.eqns).keys()
    found: dict[Var, int] = {}
    for leaf, var in enumerate(jaxpr.outvars[:leaves]):
        if not isinstance(var, Literal) and var in made and var.aval.shape:
            found.setdefault(var, leaf)  # the first, if leaves share a variable
    return found
