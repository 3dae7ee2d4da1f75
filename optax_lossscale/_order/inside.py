"""What an optimizer must not contain where: errors, and warnings about half precision."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._order.containers import (
    INJECTED,
    Container,
    containers,
    is_chain,
    is_partition,
)
from optax_lossscale._state import (
    Bfloat16State,
    LossScaleState,
    MasterWeightsState,
    StochasticRoundingState,
    subtrees,
)
from optax_lossscale._support.lines import warn, warn_once
from optax_lossscale._support.tree import HALF, KeyPath, PyTree, path_name, some_paths

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
        for container in containers(inner_state, path):
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
        for container in containers(inner_state, path):
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


# What hands gradients and updates through unchanged.
_HAND_THROUGH = (optax.MaskedState, optax.MultiTransformState, optax.MultiStepsState, *INJECTED)


def _hands_through(container: Container) -> bool:
    """Return whether a container does not change the updates of its member."""
    is_last = is_chain(container.node) and container.key == [*container.members][-1]
    return is_last or is_partition(container) or isinstance(container.node, _HAND_THROUGH)


def _half_dtypes(tree: PyTree) -> list[str]:
    dtypes = {getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(tree)}
    return sorted(str(dtype) for dtype in dtypes.intersection(HALF))


def _injected(state: PyTree) -> Iterator[PyTree]:
    """Yield the numbers that each `inject_hyperparams` keeps, including nested ones."""
    for _, found in subtrees(state, *INJECTED):
        yield found.hyperparams
        yield from _injected(found.inner_state)
