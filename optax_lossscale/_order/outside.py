"""What is outside of a guard, and probably belongs inside: warnings.

An optimizer's state shows which transformations are around a guard, though not what they do.
"""

import jax
import optax
import optax.contrib

from optax_lossscale._order.containers import (
    INJECTED,
    Container,
    containers,
    is_chain,
    is_partition,
)
from optax_lossscale._state import GuardState, subtrees
from optax_lossscale._support.lines import warn_once
from optax_lossscale._support.tree import PyTree, children


def warn_of_outside(opt_state: PyTree, given: set[str]) -> None:
    """Warn if a state shows transformations outside the guard, once per corrected line."""
    if isinstance(opt_state, GuardState):  # the usual case
        return
    for path, _ in subtrees(opt_state, GuardState):
        for container in containers(opt_state, path):
            if line := _belongs_inside(container):
                unknown = _unknown_state(container)
                warn_once(
                    f"Some transformations are outside the guard{unknown}. If one of them is more "
                    "than an identity, it sees scaled gradients, or changes on skipped steps. "
                    f"Write `with_loss_scaling({line})`, or the same with `with_skipping`. To "
                    "silence this warning, pass `loss_scale_state(opt_state)`.",
                    given,
                )
                return


# What to write inside the guard instead of a transformation around it, by the type of its state.
_INSIDE = {
    optax.MultiStepsState: "optax.MultiSteps(inner, k)",
    optax.ApplyIfFiniteState: "inner",
    optax.LookaheadState: "optax.lookahead(inner, ...)",
    optax.contrib.ScheduleFreeState: "optax.contrib.schedule_free(inner, ...)",
    **dict.fromkeys(INJECTED, "optax.inject_hyperparams(inner)(...)"),
}
# States of containers that hand everything through, each part to its own optimizer.
_SPLIT = (optax.MultiTransformState, optax.contrib.SplitRealAndImaginaryState)


def _belongs_inside(container: Container) -> str | None:
    """Return what to write inside the guard instead of a container around it.

    =================  ==================================================================
    container          belongs inside, unless
    =================  ==================================================================
    `optax.masked`     it is one of several groups, each of which has its own optimizer
    `optax.partition`  its other groups have no state
    a chain            its other members are groups without state, or not of Optax
    others             they only split the parameters, or are not of Optax
    =================  ==================================================================
    """
    node, members = container.node, container.members
    others = [member for key, member in members.items() if key != container.key]
    if isinstance(node, optax.MaskedState):
        return None if _holds_groups(container.around) else "optax.masked(inner, mask)"
    if is_partition(container):
        label = "optax.partition({label: inner, ...}, labels)"
        return label if jax.tree.leaves(others) else None
    if is_chain(node) and others and all(map(_is_of_optax, others)):
        is_more = jax.tree.leaves(others) or not _holds_groups(container)
        return "optax.chain(...)" if is_more else None
    if not _is_from(node, "optax") or isinstance(node, _SPLIT):
        return None
    return _INSIDE.get(type(node), "wrapper(inner, ...)")


def _unknown_state(container: Container) -> str:
    """Return the class of a state whose wrapper is not known by name."""
    node = container.node
    is_known = not _is_from(node, "optax") or type(node) in {*_INSIDE, optax.MaskedState}
    return "" if is_known else f" (one has the state {type(node).__name__})"


def _holds_groups(container: Container | None) -> bool:
    """Return whether each member is the state of one group of the parameters."""
    if container is None:
        return False
    masked = [isinstance(member, optax.MaskedState) for member in container.members.values()]
    return is_partition(container) or (is_chain(container.node) and all(masked))


def _is_of_optax(state: PyTree) -> bool:
    """Return whether a node is the state of a transformation, or of a chain of them."""
    if is_chain(state):
        return all(_is_of_optax(child) for _, child in children(state)[0])
    return _is_from(state, "optax", "optax_lossscale")


def _is_from(state: PyTree, *packages: str) -> bool:
    """Return whether the class of a state is in one of these packages."""
    return type(state).__module__.partition(".")[0] in packages
