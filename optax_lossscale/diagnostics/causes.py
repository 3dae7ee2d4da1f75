"""The causes of many skipped steps in a row: a table, and the facts that choose its rows."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from optax_lossscale._policy import FixedLossScale, LossScale


class Run(NamedTuple):
    """The facts about a stalled run that decide between the causes."""

    finite: float  # the last skipped steps that are known to be finite: a rule skipped them
    has_rules: bool
    scale: float  # the loss scale
    is_fixed: bool | None  # None: unknown
    is_low: bool  # the loss scale moves, and is at most 1 or cannot fall any lower
    is_loss: bool  # no gradients overflowed where the loss was finite


class Cause(NamedTuple):
    """A cause of skipped steps: its text, when the facts rule it out, and when it comes first."""

    text: str
    ruled_out: Callable[[Run], bool] = lambda _: False
    comes_first: Callable[[Run], bool] = lambda _: False


CAUSES = (
    Cause(
        "The loss scale started too large and is still on its way down. Start with a smaller "
        "`initial_scale`, or allow for more with `max_consecutive_skipped`.",
        ruled_out=lambda run: run.is_fixed is not False or run.is_low or run.is_loss,
    ),
    Cause(
        "The loss scale is too large, and does not move. Take the one that `suggest_scale` "
        "returns, or a `DynamicLossScale`.",
        ruled_out=lambda run: not run.is_fixed or run.scale <= 1,
    ),
    Cause(
        "The forward pass overflows: the loss is NaN or infinite although the batch and the "
        "parameters are finite, and no loss scale can fix that. `first_nonfinite(loss_fn, params, "
        "batch)` names the layer that overflows first. Compute it in float32, or make its input "
        "smaller. A step under `jax.debug_infs(True)` and `jax.debug_nans(True)` stops there, too; "
        "the latter alone stops later."
    ),
    Cause(
        "The loss is finite, and one layer's derivative is not, at any loss scale: a division by "
        "zero, the root or logarithm of zero, a number above 65504 in float16. "
        "`first_nonfinite(jax.grad(loss_fn), params, batch)` names the layer. Compute it in "
        "float32.",
        ruled_out=lambda run: run.is_loss,
    ),
    Cause(
        "The batch or the parameters hold NaN or infinity. `nonfinite_report` of both lists the "
        "arrays. Repair the data, or restore an earlier checkpoint."
    ),
    Cause(
        "The gradients are too large for float16 even at this loss scale. Average the loss instead "
        "of summing it, normalize the data, or lower `min_scale`, below 1 if need be.",
        ruled_out=lambda run: not run.is_low,
        comes_first=lambda run: run.scale > 1 and not run.finite,
    ),
    Cause(
        "The loss scale is too large: it is fixed, or still on its way down. Give `check_health` "
        "the `policy`, and it can tell.",
        ruled_out=lambda run: run.is_fixed is not None or run.scale <= 1,
    ),
    Cause(
        "A rule (`skip_if`) rejects steps whose gradients and loss are finite, for example because "
        "the loss has reached a new level for good. Relax the rule. `Spike` learns a new level, "
        "after `max_consecutive_skipped` steps at the latest.",
        ruled_out=lambda run: not (run.has_rules or run.finite),
        comes_first=lambda run: run.finite > 0,
    ),
)


def likely_causes(
    state: dict[str, float], has_rules: bool, spikes: float, policy: LossScale | None
) -> list[str]:
    """Return the causes that the fields of a `LossScaleState` do not rule out, the likeliest first.

    Of the steps skipped in a row, a `Spike` has skipped the last `spikes`. None is no known policy.
    """
    scale, skipped = state["loss_scale"], state["consecutive_skipped"]
    bounds = bounds_of(policy)
    floor, cap = bounds or (scale, scale)
    # The policy would have counted a last step that is not finite: it was finite, and the loss
    # scale grew, which sets both counts to 0.
    has_grown = has_rules and scale > floor and not state["growth_count"] + state["overflow_count"]
    has_grown &= skipped >= getattr(policy, "loss_patience", math.inf)
    finite = getattr(policy, "growth_interval", 1) if has_grown else state["growth_count"]
    if max(finite, spikes) >= skipped:
        return [CAUSES[-1].text]  # only a rule skips a finite step
    # Every overflow is counted and lowers the loss scale, and only a finite step raises it again.
    is_low = bounds is not None and scale <= max(floor, 1.0)
    backoffs = math.log(cap / scale) / -math.log(getattr(policy, "backoff_factor", 0.5))
    too_many = not has_rules and skipped > backoffs + getattr(policy, "hysteresis", 1)
    is_loss = bounds is not None and not is_low and (too_many or not state["overflow_count"])
    run = Run(
        finite=finite,
        has_rules=has_rules,
        scale=scale,
        is_fixed=False if bounds else isinstance(policy, FixedLossScale) or None,
        is_low=is_low,
        is_loss=is_loss and not finite,
    )
    possible = [cause for cause in CAUSES if not cause.ruled_out(run)]
    return [cause.text for cause in sorted(possible, key=lambda cause: not cause.comes_first(run))]


def bounds_of(policy: LossScale | None) -> tuple[float, float] | None:
    """Return the float32 bounds of the loss scale, if they are known."""
    bounds = getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)
    return None if None in bounds else (float(np.float32(bounds[0])), float(np.float32(bounds[1])))
