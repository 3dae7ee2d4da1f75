"""Say why training stalls."""

import math
import warnings
from typing import Any

import jax
import numpy as np

from optax_lossscale._policy import FixedLossScale, LossScale, LossScaleLike, as_loss_scale, init
from optax_lossscale._state import (
    WRAP_ONCE,
    LossScaleState,
    SpikeState,
    WithLossScalingState,
    as_field,
)
from optax_lossscale._step.finite import all_finite
from optax_lossscale._support import checks
from optax_lossscale._support.checks import LARGEST_SCALE, SMALLEST_SCALE
from optax_lossscale._support.tree import (
    PyTree,
    is_inexact,
    leaves_of_type,
    path_name,
)


class LossScaleStalledError(RuntimeError):
    """Training makes no progress: `check_health` found too many skipped steps in a row."""


def check_health(
    opt_state: PyTree, *, max_consecutive_skipped: int = 50, loss_scale: LossScaleLike = None
) -> None:
    """Raise an error if training has stalled, and say why.

    Call it on the host now and then, for example with each log line: it waits for the step that
    makes `opt_state`. A dynamic loss scale skips a step when it is too large, a few in a row at
    the start, and one now and then. Dozens in a row mean that something else is wrong.

    Args:
      opt_state: The state of `with_loss_scaling` or `skip_if`, or any pytree that holds exactly
        one, however deep; or a `LossScaleState`.
      max_consecutive_skipped: The number of skipped steps in a row that is still healthy. More
        raise the error.
      loss_scale: What `with_loss_scaling` was given. Where the policy's bounds lie is part of the
        diagnosis. With None they are unknown, and the diagnosis is less precise.

    Raises:
      LossScaleStalledError: If more steps in a row were skipped. The message says how many, where
        the loss scale stands against its floor, the causes that the state does not rule out, the
        likeliest first, and what to do about each.
      TypeError: If `max_consecutive_skipped` is not an integer, or `opt_state` is traced: an error
        cannot be raised from a compiled step.
      ValueError: If `max_consecutive_skipped` is negative, or `opt_state` holds no such state, or
        several, or one of several replicas, or an impossible state, as a damaged checkpoint does: a
        negative count, a loss scale outside of the bounds of `loss_scale` (of 2**-126 and 2**126
        without them), a `Spike` that holds more values than its window, NaN or infinity in an array
        of the inner optimizer's state.

    Warns:
      UserWarning: If the loss scale has grown to its cap and no step was ever skipped. Training
        works, but either the loss need not be scaled or the cap is too low.

    Examples:
      >>> import optax_lossscale as ols
      >>> ols.diagnostics.check_health(ols.init())
    """
    limit = checks.count("max_consecutive_skipped", max_consecutive_skipped, least=0)
    policy = None if loss_scale is None else as_loss_scale(loss_scale)
    _, counts = checks.only_one("opt_state", opt_state, LossScaleState, WRAP_ONCE)
    guard = next((g for _, g in leaves_of_type(opt_state, WithLossScalingState)), None)
    state = _read(counts, *LossScaleState._fields)
    rule_state = getattr(guard, "rule_state", ())
    _refuse_impossible(state, rule_state, getattr(guard, "inner_state", ()), bounds_of(policy))
    if state["consecutive_skipped"] > limit:
        causes = _likely_causes(state, rule_state, policy)
        listed = (f"\n  {i}. {cause}" for i, cause in enumerate(causes, start=1))
        raise LossScaleStalledError(
            f"{_standing(state, policy)} Likely causes, the likeliest first:" + "".join(listed)
        )
    _warn_at_cap(state, policy)


def _standing(state: dict[str, float], policy: LossScale | None) -> str:
    skipped, total = state["consecutive_skipped"], state["total_skipped"]
    if "loss_scale" not in state:
        return f"`skip_if` has skipped the last {skipped} steps ({total} since the start)."
    scale, bounds = state["loss_scale"], bounds_of(policy)
    where = ""
    if bounds is not None:
        where = f", {'at' if scale <= bounds[0] else 'above'} its floor of {bounds[0]:g}"
    elif isinstance(policy, FixedLossScale):
        where = ", under FixedLossScale, which has no floor"
    return (
        f"The last {skipped} steps were skipped ({total} since the start), and the loss scale is "
        f"{scale:g}{where}."
    )


def _warn_at_cap(state: dict[str, float], policy: LossScale | None) -> None:
    bounds = bounds_of(policy)
    if policy is None or bounds is None or "loss_scale" not in state or state["total_skipped"]:
        return
    with jax.transfer_guard("allow"):  # asked for
        start = init(policy).loss_scale.item()
    if start < state["loss_scale"] == bounds[1]:
        warnings.warn(
            f"The loss scale is at its cap of {bounds[1]:g} and no step was ever skipped. "
            "Either the loss need not be scaled, as in bfloat16 and float32: `loss_scale=None` "
            "saves the check. Or the gradients are so small that a larger loss scale would fit: "
            "raise `max_scale`. `gradient_exponents` shows which.",
            stacklevel=3,
        )


_OUTSIDE = (
    "Call `check_health` outside of `jax.jit`, on the state that the compiled step returned; "
    "`is_stalled` works inside."
)
_REPLICA = "Take one replica: `x[0]` of every leaf."

# The causes of many skipped steps, and the remedy of each.
_FORWARD = (
    "The forward pass overflows: the loss is NaN or infinite although the batch and the parameters "
    "are finite, and no loss scale can fix that. `first_nonfinite(loss_fn, params, batch)` names "
    "the layer that overflows first. Compute it in float32, or make its input smaller. A step "
    "under `jax.debug_infs(True)` and `jax.debug_nans(True)` stops there, too; the latter alone "
    "stops later."
)
_INPUT = (
    "The batch or the parameters hold NaN or infinity. `nonfinite_report` of both lists the "
    "arrays. Repair the data, or restore an earlier checkpoint."
)
_BACKWARD = (
    "The loss is finite, and one layer's derivative is not, at any loss scale: a division by zero, "
    "the root or logarithm of zero, a number above 65504 in float16. "
    "`first_nonfinite(jax.grad(loss_fn), params, batch)` names the layer. Compute it in float32."
)
_LARGE = (
    "The gradients are too large for float16 even at this loss scale. Average the loss instead of "
    "summing it, normalize the data, or lower `min_scale`, below 1 if need be."
)
_DESCENT = (
    "The loss scale started too large and is still on its way down. Start with "
    "a smaller `initial_scale`, or allow for more with `max_consecutive_skipped`."
)
_FIXED = (
    "The loss scale is too large, and does not move. Take the one that `suggest_scale` returns, or "
    "a `DynamicLossScale`."
)
_UNKNOWN = (
    "The loss scale is too large: it is fixed, or still on its way down. Give `check_health` the "
    "policy as `loss_scale`, and it can tell."
)
_RULE = (
    "A rule (`skip_if`) rejects steps whose gradients and loss are finite, for example because the "
    "loss has reached a new level for good. Relax the rule. `Spike` learns a new level, after "
    "`max_consecutive_skipped` steps at the latest."
)


def _likely_causes(
    state: dict[str, float], rule_state: PyTree, policy: LossScale | None
) -> tuple[str, ...]:
    """Return the causes of many skipped steps that the state does not rule out, in order."""
    spikes = [
        _read(found, "consecutive_skipped") for _, found in leaves_of_type(rule_state, SpikeState)
    ]
    in_a_row = [spike["consecutive_skipped"] for spike in spikes]
    # Only a rule skips steps that are finite.
    finite, skipped = state.get("growth_count", 0), state["consecutive_skipped"]
    if max(finite, *in_a_row, 0) >= skipped:
        return (_RULE,)
    # A policy that forgives only some bad losses in a row has counted the others.
    is_forgiven = skipped < getattr(policy, "loss_patience", math.inf)
    if rule_state is not None and not (is_forgiven or state.get("overflow_count", 1)):
        return (_RULE,)
    if "loss_scale" not in state:
        return _FORWARD, _BACKWARD, _INPUT, _RULE
    others = _causes_of_overflows(state, policy)
    if finite:
        return _RULE, *others
    # A policy that grows has counted what a rule skips, but for the step at which it grew.
    counted = bounds_of(policy) is not None and state["overflow_count"]
    unlikely = counted and not jax.tree.leaves(rule_state)
    return others if rule_state is None or unlikely else (*others, _RULE)


def _causes_of_overflows(state: dict[str, float], policy: LossScale | None) -> tuple[str, ...]:
    """Order the causes of gradients or losses that are not finite by how well the state agrees."""
    bounds = bounds_of(policy)
    if bounds is None and isinstance(policy, FixedLossScale):
        return _FIXED, _FORWARD, _BACKWARD, _INPUT
    if bounds is None:
        return _FORWARD, _BACKWARD, _INPUT, _UNKNOWN
    if not state["overflow_count"]:
        return _FORWARD, _INPUT  # not even gradients that are not finite were counted
    scale, (floor, ceiling) = state["loss_scale"], bounds
    if scale <= max(floor, 1.0):
        others = _FORWARD, _BACKWARD, _INPUT
        return (_LARGE, *others) if floor > 1 else (*others, _LARGE)
    # Overflows lower the loss scale. More skipped steps than it takes to come here from the ceiling
    # were a loss that is not finite, which the policy forgave.
    backoffs = math.log(ceiling / scale) / -math.log(getattr(policy, "backoff_factor", 0.5))
    if state["consecutive_skipped"] > backoffs + getattr(policy, "hysteresis", 1):
        return _FORWARD, _INPUT
    return _DESCENT, _FORWARD, _BACKWARD, _INPUT


def bounds_of(policy: LossScale | None) -> tuple[float, float] | None:
    """Return the float32 bounds of the loss scale, if they are known."""
    bounds = getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)
    return None if None in bounds else (float(np.float32(bounds[0])), float(np.float32(bounds[1])))


def _read(node: Any, *names: str) -> dict[str, float]:
    """Return scalar fields of a state as Python numbers."""
    # flax.nnx keeps each array in a Variable, a pytree of one leaf.
    fields = {name: jax.tree.leaves(getattr(node, name))[0] for name in names}
    checks.concrete("opt_state", fields, _OUTSIDE)
    for name, field in fields.items():
        checks.scalar(f"opt_state.{name}", field, _REPLICA)
    return {name: jax.device_get(as_field(name, field)).item() for name, field in fields.items()}


def _refuse_impossible(
    state: dict[str, float],
    rule_state: PyTree,
    inner_state: PyTree,
    bounds: tuple[float, float] | None,
) -> None:
    """Refuse a state to which no training leads, but damage or an edit by hand does.

    With a loss scale far too large or too small, all gradients are zero, and the steps applied.
    """
    remedy = "Restore an earlier checkpoint, or put the state of `init` in its place."
    low, high = bounds or (SMALLEST_SCALE, LARGEST_SCALE)
    counts = {name: number for name, number in state.items() if name != "loss_scale"}
    scale = state.get("loss_scale", low)
    if not low <= scale <= high or min(counts.values()) < 0:
        between = f"{low:g} and {high:g}" if bounds else "2**-126 and 2**126"
        raise ValueError(
            f"`opt_state` must hold a loss scale between {between} and counts of at least 0, got "
            f"{scale:g} and {counts}. {remedy}"
        )
    for path, spike in leaves_of_type(rule_state, SpikeState):
        numbers, window = _read(spike, "held", "consecutive_skipped"), spike.values.shape[0]
        if not 0 <= numbers["held"] <= window or numbers["consecutive_skipped"] < 0:
            raise ValueError(
                f"`opt_state` must hold a Spike with at most the {window} values of its window "
                f"and counts of at least 0, got {numbers} at {path_name(path)}. {remedy}"
            )
    for path, array in jax.tree_util.tree_leaves_with_path(inner_state):
        if np.ndim(array) and not _is_finite(array):
            raise ValueError(
                "`opt_state` must hold arrays of finite numbers, got NaN or infinity at "
                f"{path_name(path)} of the inner state, for example the square of a huge gradient. "
                f"{remedy}"
            )


def _is_finite(array: Any) -> bool:
    if getattr(array, "is_fully_addressable", True):
        return bool(jax.device_get(all_finite(array)))
    # The parts of this process alone, since only one process may be looking, and each once, however
    # many devices hold it; on the host, since JAX refuses arrays of one device where a mesh is set.
    parts = {str(s.index): s.data for s in array.addressable_shards if is_inexact(array)}
    return all(np.isfinite(jax.device_get(part)).all() for part in parts.values())
