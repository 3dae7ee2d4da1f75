"""Which wrappers may contain which: errors and warnings about their order.

The order is read from the state, where every transformation has its own container.
"""

import collections
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from optax_lossscale._state import (
    Bfloat16State,
    GuardState,
    LossScaleState,
    MasterWeightsState,
    StochasticRoundingState,
    subtrees,
)
from optax_lossscale._support.lines import warn, warn_once
from optax_lossscale._support.tree import HALF, KeyPath, PyTree, children, path_name, some_paths

# The wrappers that let half-precision parameters take small updates, by the types of their states.
_FOR_PARAMETERS: dict[type, str] = {
    MasterWeightsState: "with_master_weights",
    StochasticRoundingState: "with_stochastic_rounding",
}
ONE_GUARD = "`with_loss_scaling(inner, skip_if=rule)` or `with_skipping(inner, skip_if=rule)`"


def refuse_second_guard(argument: str, inner_state: PyTree, instead: str = ONE_GUARD) -> None:
    """Raise if an optimizer inside a guard skips steps itself."""
    for path, _ in subtrees(inner_state, LossScaleState):
        raise ValueError(
            f"`{argument}` must not decide about steps itself, got a LossScaleState at "
            f"{path_name(path)} of its state. Use one guard, around the whole optimizer: {instead}."
        )


def refuse_masters_inside(inner_state: PyTree) -> None:
    """Raise if `with_bfloat16_state` contains itself, or a wrapper that must contain it."""
    for path, found in subtrees(inner_state, *_FOR_PARAMETERS, Bfloat16State):
        around, right = _FOR_PARAMETERS.get(type(found)), "with_bfloat16_state(inner)"
        right = f"{around}({right})" if around else right
        raise ValueError(
            f"`inner` must be a plain optimizer, got a {type(found).__name__} at "
            f"{path_name(path)} of its state. Write `{right}`."
        )


def refuse_two_for_parameters(inner_state: PyTree, *kinds: type) -> None:
    """Raise if a wrapper for half-precision parameters contains another one."""
    for path, found in subtrees(inner_state, *kinds):
        raise ValueError(
            "`inner` must not keep masters or round parameters itself, got a "
            f"{type(found).__name__} at {path_name(path)} of its state. Use one wrapper: "
            "`with_master_weights(inner)` or `with_stochastic_rounding(inner)`."
        )


# The states of optimizers that compute where they are from the parameters, by name, since Optax
# 0.2.6 does not export all of these classes.
_FROM_PARAMETERS = frozenset(["ScheduleFreeState", "MechanicState", "DoGState", "DoWGState"])


def refuse_state_of_parameters(
    inner_state: PyTree, copies: Sequence[KeyPath], given: set[str]
) -> None:
    """Raise, or warn, if an optimizer inside stochastic rounding has copies of the parameters.

    `copies` are their paths. The optimizer takes a rounding of the parameters for a step.
    """
    remedy = "Use `with_master_weights(inner, remainders=True)`, which is exact here."
    for path in copies:
        for container in _containers(inner_state, path):
            kind = type(container.node).__name__
            if kind in _FROM_PARAMETERS:
                raise ValueError(
                    "`inner` must not compute its state from parameters that are rounded "
                    f"stochastically, got a {kind} with a copy at {path_name(path)}. {remedy}"
                )
    if copies:
        warn_once(
            f"`inner` keeps copies of bfloat16 parameters, at {some_paths(copies)} of its state. "
            "If it compares them with the parameters, it takes a stochastic rounding for a step. "
            f"{remedy}",
            given,
        )


def refuse_changed_updates(inner_state: PyTree) -> None:
    """Raise if a transformation may change the updates of masters or rounded parameters."""
    for path, found in subtrees(inner_state, *_FOR_PARAMETERS):
        wrapper = _FOR_PARAMETERS[type(found)]
        for container in _containers(inner_state, path):
            if not _hands_through(container):
                raise ValueError(
                    f"`inner` must not change the updates of `{wrapper}`, got a "
                    f"{type(found).__name__} at {path_name(path)} inside a "
                    f"{type(container.node).__name__}. Wrap everything, including decay and "
                    f"averages: `{wrapper}(inner)`."
                )


def warn_of_half_precision(params: PyTree, inner_state: PyTree) -> None:
    """Warn if half-precision parameters lose small updates, or injected numbers lose digits."""
    half = _half_dtypes(params)
    if half and not any(subtrees(inner_state, *_FOR_PARAMETERS)):
        least = 4 / max(jnp.finfo(dtype).eps for dtype in half)
        warn(
            f"`params` are {' and '.join(half)}, and no float32 master weights are kept: an update "
            f"below 1/{least:.0f} of a weight is lost. Use `with_master_weights(inner)`, or keep "
            "the parameters in float32 and differentiate `autocast(loss_fn, dtype)`."
        )
    for injected in _injected(inner_state):
        if half := _half_dtypes(injected):
            warn(
                f"`inject_hyperparams` keeps numbers in {' and '.join(half)}, where 0.999 is 1: "
                "the first step of Adam is NaN. Inject them in float32, "
                "`inject_hyperparams(..., hyperparam_dtype=jnp.float32)`, or keep masters around "
                "it, `with_master_weights(inject_hyperparams(...))`."
            )
            return


def warn_of_outside(opt_state: PyTree, given: set[str]) -> None:
    """Warn if a state shows transformations outside the guard, once per corrected line."""
    if isinstance(opt_state, GuardState):  # the usual case
        return
    for path, _ in subtrees(opt_state, GuardState):
        for container in _containers(opt_state, path):
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


class _Container(NamedTuple):
    """A node on the path to a state."""

    node: PyTree
    key: Hashable  # of the child on the path
    members: dict[Hashable, PyTree]  # all children
    around: "_Container | None"


def _containers(tree: PyTree, path: KeyPath) -> Iterator[_Container]:
    """Yield the nodes on a path, the outermost first."""
    container = None
    for key in path:
        members = {own: child for (own,), child in children(tree)[0]}
        container = _Container(tree, key, members, container)
        yield container
        tree = members[key]


_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
# What hands gradients and updates through unchanged.
_HAND_THROUGH = (optax.MaskedState, optax.MultiTransformState, optax.MultiStepsState, *_INJECTED)


def _hands_through(container: _Container) -> bool:
    """Return whether a container does not change the updates of its member."""
    is_last = _is_chain(container.node) and container.key == [*container.members][-1]
    return is_last or _is_partition(container) or isinstance(container.node, _HAND_THROUGH)


# What to write inside the guard instead of a transformation around it, by the type of its state.
_INSIDE = {
    optax.MultiStepsState: "optax.MultiSteps(inner, k)",
    optax.ApplyIfFiniteState: "inner",
    optax.LookaheadState: "optax.lookahead(inner, ...)",
    optax.contrib.ScheduleFreeState: "optax.contrib.schedule_free(inner, ...)",
    **dict.fromkeys(_INJECTED, "optax.inject_hyperparams(inner)(...)"),
}
# States of containers that hand everything through, each part to its own optimizer.
_SPLIT = (optax.MultiTransformState, optax.contrib.SplitRealAndImaginaryState)


def _belongs_inside(container: _Container) -> str | None:
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
    if _is_partition(container):
        label = "optax.partition({label: inner, ...}, labels)"
        return label if jax.tree.leaves(others) else None
    if _is_chain(node) and others and all(map(_is_of_optax, others)):
        is_more = jax.tree.leaves(others) or not _holds_groups(container)
        return "optax.chain(...)" if is_more else None
    if not _is_from(node, "optax") or isinstance(node, _SPLIT):
        return None
    return _INSIDE.get(type(node), "wrapper(inner, ...)")


def _unknown_state(container: _Container) -> str:
    """Return the class of a state whose wrapper is not known by name."""
    node = container.node
    is_known = not _is_from(node, "optax") or type(node) in {*_INSIDE, optax.MaskedState}
    return "" if is_known else f" (one has the state {type(node).__name__})"


def _is_chain(node: PyTree) -> bool:
    return type(node) in (tuple, collections.OrderedDict)  # from `chain` and `named_chain`


def _is_partition(container: _Container) -> bool:
    """Return whether a container is the dict of states by label."""
    around = container.around
    return around is not None and isinstance(around.node, optax.MultiTransformState)


def _holds_groups(container: _Container | None) -> bool:
    """Return whether each member is the state of one group of the parameters."""
    if container is None:
        return False
    masked = [isinstance(member, optax.MaskedState) for member in container.members.values()]
    return _is_partition(container) or (_is_chain(container.node) and all(masked))


def _is_of_optax(state: PyTree) -> bool:
    """Return whether a node is the state of a transformation, or of a chain of them."""
    if _is_chain(state):
        return all(_is_of_optax(child) for _, child in children(state)[0])
    return _is_from(state, "optax", "optax_lossscale")


def _is_from(state: PyTree, *packages: str) -> bool:
    """Return whether the class of a state is in one of these packages."""
    return type(state).__module__.partition(".")[0] in packages


def _half_dtypes(tree: PyTree) -> list[str]:
    dtypes = {getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(tree)}
    return sorted(str(dtype) for dtype in dtypes.intersection(HALF))


def _injected(state: PyTree) -> Iterator[PyTree]:
    """Yield the numbers that each `inject_hyperparams` keeps, including nested ones."""
    for _, found in subtrees(state, *_INJECTED):
        yield found.hyperparams
        yield from _injected(found.inner_state)
