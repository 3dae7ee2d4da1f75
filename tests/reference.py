"""The update rule in plain Python: an oracle written from the text of the contract.

It shares no code with the package. `loss_scale` is rounded to float32 after every product.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

INT32_MAX = 2**31 - 1

DYNAMIC_DEFAULTS = {
    "initial_scale": 2.0**15,
    "growth_interval": 2000,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "min_scale": 1.0,
    "max_scale": 2.0**24,
    "hysteresis": 1,
    "consecutive_hysteresis": False,
    "loss_patience": 5,
}


class Reference(NamedTuple):
    """The five fields of the state, as Python numbers."""

    loss_scale: float
    growth_count: int = 0
    overflow_count: int = 0
    consecutive_skipped: int = 0
    total_skipped: int = 0


Step = Callable[[Reference, bool, bool], Reference]


def float32(number: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(number))


def times(a: float, b: float) -> float:
    """Multiply as float32 does. In float64, the product of two float32s is exact."""
    return float32(float32(a) * float32(b))


def add_one(count: int) -> int:
    return min(count + 1, INT32_MAX)


def dynamic_step(**given) -> Step:
    """Return the dynamic rule with these hyper-parameters."""
    hyper = DYNAMIC_DEFAULTS | given
    low, high = float32(hyper["min_scale"]), float32(hyper["max_scale"])

    def step(state: Reference, grads_finite: bool, loss_finite: bool = True) -> Reference:
        scale, growth, overflows, consecutive, total = state
        scale = low if math.isnan(scale) else min(max(scale, low), high)
        if not loss_finite and add_one(consecutive) < hyper["loss_patience"]:
            return Reference(scale, growth, overflows, add_one(consecutive), add_one(total))
        if not (grads_finite and loss_finite):
            overflows = min(overflows + 1, hyper["hysteresis"])
            if overflows >= hyper["hysteresis"]:
                scale = max(times(scale, hyper["backoff_factor"]), low)
            return Reference(scale, 0, overflows, add_one(consecutive), add_one(total))
        growth = add_one(growth)
        if hyper["consecutive_hysteresis"]:
            overflows = 0
        if growth >= hyper["growth_interval"]:
            scale = min(times(scale, hyper["growth_factor"]), high)
            growth = overflows = 0
        return Reference(scale, growth, overflows, 0, total)

    return step


def fixed_step(*, skip_nonfinite: bool = True) -> Step:
    """Return the rule of a fixed loss scale."""

    def step(state: Reference, grads_finite: bool, loss_finite: bool = True) -> Reference:
        if not skip_nonfinite:
            return state
        if grads_finite and loss_finite:
            return state._replace(growth_count=add_one(state.growth_count), consecutive_skipped=0)
        return state._replace(
            growth_count=0,
            consecutive_skipped=add_one(state.consecutive_skipped),
            total_skipped=add_one(state.total_skipped),
        )

    return step


def trajectory(step: Step, state: Reference, flags: Iterable[tuple[bool, bool]]) -> np.ndarray:
    """Return the state after each step, as float64[steps, 5]."""
    states = itertools.accumulate(flags, lambda before, both: step(before, *both), initial=state)
    return np.array(list(states)[1:], np.float64)
