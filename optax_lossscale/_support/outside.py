"""Transformations that stand outside of a guard, as an optimizer's state shows them."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import optax
import optax.contrib

from optax_lossscale._support import checks
from optax_lossscale._support.tree import KeyPath, PyTree, children, leaves_of_type

# What to write in place of a transformation around the guard, by the type of its state.
_INSIDE = {
    optax.MultiStepsState: "optax.MultiSteps(inner, k)",
    optax.ApplyIfFiniteState: "inner",
    optax.LookaheadState: "optax.lookahead(inner, ...)",
    optax.contrib.ScheduleFreeState: "optax.contrib.schedule_free(inner, ...)",
    optax.InjectHyperparamsState: "optax.inject_hyperparams(inner)(...)",
    optax.InjectStatefulHyperparamsState: "optax.inject_hyperparams(inner)(...)",
}
_CHAINS = (tuple, collections.OrderedDict)  # of `chain` and of `named_chain`


def warn_of_what_stands_outside(opt_state: PyTree, guard: type) -> None:
    """Warn if a state shows transformations around that of a guard, which is of this type."""
    for path, _ in leaves_of_type(opt_state, guard):
        if inside := next(_found(opt_state, path), None):
            checks.warn(
                "Transformations stand outside of the guard. If any of them is more than an "
                "identity, it sees scaled gradients, or moves on skipped steps. Write "
                f"`with_loss_scaling({inside})`, or the same with `skip_if`. To silence this, pass "
                "`loss_scale_state(opt_state)`."
            )
            return


def _found(node: PyTree, path: KeyPath) -> Iterator[str]:
    """Yield what belongs inside of the guard at a path, the outermost first."""
    above, is_one_of_groups = None, False
    for key in path:
        nodes = {own: child for (own,), child in children(node)[0]}
        guarded = nodes.pop(key)
        others = list(nodes.values())
        if type(node) in _INSIDE:
            yield _INSIDE[type(node)]
        elif isinstance(node, optax.MaskedState) and not is_one_of_groups:
            yield "optax.masked(inner, mask)"
        is_one_of_groups = False
        if isinstance(above, optax.MultiTransformState):  # `node` holds the states by label
            is_one_of_groups = True
            if jax.tree.leaves(others):
                yield "optax.partition({label: inner, ...}, labels)"
        elif type(node) in _CHAINS and others and all(map(_is_of_optax, others)):
            masked = [isinstance(state, optax.MaskedState) for state in (guarded, *others)]
            is_one_of_groups = all(masked)
            if jax.tree.leaves(others) or not is_one_of_groups:
                yield "optax.chain(...)"
        above, node = node, guarded


def _is_of_optax(state: Any) -> bool:
    """Return whether a node is the state of a transformation, or of a chain of them."""
    if type(state) in _CHAINS:
        return all(map(_is_of_optax, jax.tree.leaves(state, is_leaf=lambda x: x is not state)))
    return type(state).__module__.startswith("optax")
