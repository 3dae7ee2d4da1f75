"""Say why training stalls."""

import math
import warnings

import jax
import numpy as np

from optax_lossscale._policy import LossScale, LossScaleLike, as_loss_scale
from optax_lossscale._state import LossScaleState, loss_scale_state, strongly_typed
from optax_lossscale._support import checks
from optax_lossscale._support.checks import LARGEST_SCALE, SMALLEST_SCALE
from optax_lossscale._support.tree import PyTree, leaves_of_type
from optax_lossscale.diagnostics.progress import skip_counts


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
      opt_state: A `LossScaleState`, or an optimizer's state that holds exactly one, or the state
        of `skip_if`, or both.
      max_consecutive_skipped: The number of skipped steps in a row that is still healthy. More
        raise the error.
      loss_scale: What `with_loss_scaling` was given. Where the policy's bounds lie is part of the
        diagnosis. With None they are unknown, and the diagnosis is less precise.

    Raises:
      LossScaleStalledError: If more steps in a row were skipped. The message says how many, where
        the loss scale stands against its floor, the likely causes, and what to do about each.
      TypeError: If `max_consecutive_skipped` is not an integer, or `opt_state` is traced: an error
        cannot be raised from a compiled step.
      ValueError: If `max_consecutive_skipped` is negative, or `opt_state` holds no
        `LossScaleState`, or several, or one of several replicas, or one that no training leads
        to: a loss scale that is not between 2**-126 and 2**126, a negative count.

    Warns:
      UserWarning: If the loss scale has grown to its cap and no step was ever skipped. Training
        works, but either the loss need not be scaled or the cap is too low.

    Examples:
      >>> import optax_lossscale as ols
      >>> ols.diagnostics.check_health(ols.init())
    """
    limit = checks.count("max_consecutive_skipped", max_consecutive_skipped, least=0)
    policy = None if loss_scale is None else as_loss_scale(loss_scale)
    skips = skip_counts(opt_state)
    if skips:
        _check_skips(skips, limit)
        if not any(leaves_of_type(opt_state, LossScaleState)):
            return
    state = _on_host(loss_scale_state(opt_state))
    scale, skipped = state.loss_scale.item(), state.consecutive_skipped.item()
    bounds = bounds_of(policy)
    if skipped > limit:
        if policy is None:
            standing = ""
        elif bounds is None:
            standing = f", under {type(policy).__name__}, which has no floor"
        else:
            standing = f", {'at' if scale <= bounds[0] else 'above'} its floor of {bounds[0]:g}"
        raise LossScaleStalledError(
            f"The last {skipped} steps were skipped ({state.total_skipped} since the start), and "
            f"the loss scale is {scale:g}{standing}. {_listed(_likely_causes(state, policy))}"
        )
    at_cap = bounds is not None and scale == bounds[1] and not state.total_skipped
    if policy is not None and at_cap and _starts_at(policy) < scale:
        warnings.warn(
            f"The loss scale is at its cap of {scale:g} and no step was ever skipped. "
            "Either the loss need not be scaled, as in bfloat16 and float32: `loss_scale=None` "
            "saves the check. Or the gradients are so small that a larger loss scale would fit: "
            "raise `max_scale`. `gradient_exponents` shows which.",
            stacklevel=2,
        )


_OUTSIDE = (
    "Call `check_health` outside of `jax.jit`, on the state that the compiled step returned; "
    "`is_stalled` works inside."
)
_REPLICA = "Take one replica: `x[0]` of every leaf."


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
    "The loss scale started too large and is still on its way down. Start from `calibrate`, or "
    "with a smaller `initial_scale`, or allow for more with `max_consecutive_skipped`."
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
    "The rule of `skip_if` rejects every step, for example because the loss has reached a new "
    "level for good: let `Spike` accept it with `max_consecutive_skipped`."
)


def _check_skips(skips: dict[str, jax.Array], limit: int) -> None:
    """Raise an error if `skip_if` has skipped too many steps in a row."""
    _check_readable(skips)
    in_a_row, total = (jax.device_get(count).item() for count in skips.values())
    if in_a_row > limit:
        raise LossScaleStalledError(
            f"`skip_if` has skipped the last {in_a_row} steps ({total} since the start). "
            + _listed((_FORWARD, _BACKWARD, _INPUT, _RULE))
        )


def _listed(causes: tuple[str, ...]) -> str:
    lines = (f"\n  {i}. {cause}" for i, cause in enumerate(causes, start=1))
    return "Likely causes, the likeliest first:" + "".join(lines)


def _check_readable(fields: dict[str, jax.Array]) -> None:
    """Refuse traced fields, and those of several replicas."""
    checks.concrete("opt_state", fields, _OUTSIDE)
    for name, field in fields.items():
        checks.scalar(f"opt_state.{name}", field, _REPLICA)


def _likely_causes(state: LossScaleState, policy: LossScale | None) -> tuple[str, ...]:
    """Order the causes of many skipped steps by how well they agree with the state."""
    bounds = bounds_of(policy)
    if policy is None:
        return _FORWARD, _BACKWARD, _INPUT, _UNKNOWN
    if bounds is None:
        return _FIXED, _FORWARD, _BACKWARD, _INPUT
    if not state.overflow_count:
        return _FORWARD, _INPUT  # not even gradients that are not finite were counted
    scale, (floor, ceiling) = state.loss_scale.item(), bounds
    if scale <= max(floor, 1.0):
        others = _FORWARD, _BACKWARD, _INPUT
        return (_LARGE, *others) if floor > 1 else (*others, _LARGE)
    # Overflows lower the loss scale. More skipped steps than it takes to come here from the ceiling
    # were a loss that is not finite, which the policy forgave.
    backoffs = math.log(ceiling / scale) / -math.log(getattr(policy, "backoff_factor", 0.5))
    if state.consecutive_skipped > backoffs + getattr(policy, "hysteresis", 1):
        return _FORWARD, _INPUT
    return _DESCENT, _FORWARD, _BACKWARD, _INPUT


def bounds_of(policy: LossScale | None) -> tuple[float, float] | None:
    """Return the float32 bounds of the loss scale, if they are known."""
    bounds = getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)
    return None if None in bounds else (float(np.float32(bounds[0])), float(np.float32(bounds[1])))


def _starts_at(policy: LossScale) -> float:
    """Return the loss scale of the first step."""
    with jax.transfer_guard("allow"):  # asked for
        return policy.init().loss_scale.item()


def _on_host(state: LossScaleState) -> LossScaleState:
    _check_readable(state._asdict())
    # On the host from here on, where comparing moves nothing to the device (`jax_transfer_guard`).
    state = LossScaleState(*(np.asarray(jax.device_get(f)) for f in strongly_typed(state)))  # pyright: ignore[reportArgumentType]
    # Neither training nor a policy makes these, but damaged checkpoints and manual edits do. Above
    # the bounds all gradients would be unscaled to zero, and the steps applied.
    scale, counts = state.loss_scale.item(), {n: c.item() for n, c in state._asdict().items()}
    del counts["loss_scale"]
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE or min(counts.values()) < 0:
        raise ValueError(
            "`opt_state` must hold a loss scale between 2**-126 and 2**126 and counts of at least "
            f"0, got {scale:g} and {counts}. Restore an earlier checkpoint, or put the state of "
            "`init` in its place."
        )
    return state
