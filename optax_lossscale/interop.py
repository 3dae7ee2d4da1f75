"""Convert the state of loss scaling of Flax, JMP and torch, and back to torch.

A run that switches midway keeps its rule, its loss scale and its count of finite steps: the loss
scale next changes at the step at which it would have changed before. No library is imported.

With an interval of N, JMP and torch grow on the N-th finite step in a row, as this library does;
releases of Flax grow one step later. A count beyond a shortened interval grows on the next step.

The libraries have no ceiling, and torch has no floor. A loss scale beyond a bound moves to it on
the next step here; in Flax and JMP, an overflow lifts it to the floor. The counts of skipped steps,
which the others do not keep, start at 0.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from optax_lossscale._policy.policies import DynamicLossScale
from optax_lossscale._state import LossScaleState, loss_scale_state
from optax_lossscale._support import checks
from optax_lossscale._support.checks import INT32_MAX, LARGEST_SCALE, SMALLEST_SCALE

__all__ = ["from_flax_dynamic_scale", "from_jmp", "from_torch_state_dict", "to_torch_state_dict"]


def from_flax_dynamic_scale(
    ds: Any, *, grows_late: bool = True
) -> tuple[DynamicLossScale, LossScaleState]:
    """Return the policy and the state of a `flax.training.dynamic_scale.DynamicScale`.

    Args:
      ds: The `DynamicScale`, with concrete numbers; one replica of a replicated one.
      grows_late: Whether the class of `ds` grows on the step after the `growth_interval`-th finite
        one, as the releases of Flax do; the policy's `growth_interval` is then one larger. False
        for a class that grows on that step itself, as in commit 8163517a of Flax.
        `optax_lossscale.flax.DynamicScale`, which does so too, is recognized.

    Raises:
      TypeError: If `ds` lacks an attribute, or one is not a concrete number.
      ValueError: If one is not a scalar or is out of bounds.

    Examples:
      >>> from flax.training.dynamic_scale import DynamicScale
      >>> from optax_lossscale.interop import from_flax_dynamic_scale
      >>> policy, state = from_flax_dynamic_scale(DynamicScale(fin_steps=7))
      >>> policy.growth_interval, float(state.loss_scale), int(state.growth_count)
      (2001, 65536.0, 7)
    """
    names = ("scale", "fin_steps", "growth_interval", "growth_factor", "backoff_factor")
    scale, count, interval, growth, backoff = _numbers("ds", ds, names, "a Flax DynamicScale")
    floor = 0.0 if ds.minimum_scale is None else _number("ds", "minimum_scale", ds.minimum_scale)
    # An interval of 0 grows on every finite step in both, as one of 1 does here.
    interval += getattr(ds, "grows_late", grows_late) or interval == 0
    rule = {"growth_factor": growth, "backoff_factor": backoff, "min_scale": floor}
    return _convert(scale, count, interval, **rule)


def from_jmp(ls: Any) -> tuple[DynamicLossScale, LossScaleState]:
    """Return the policy and the state of a `jmp.DynamicLossScale`.

    The floor is the one that the object holds. JMP itself loses it when the object passes through
    `jax.jit`, and then uses 1. A float16 loss scale gets the ceiling 2**15: twice that is infinite.

    Args:
      ls: The `jmp.DynamicLossScale`, with concrete numbers; one replica of a replicated one.

    Raises:
      TypeError: If `ls` lacks an attribute, as JMP's others do, or one is not a concrete number.
      ValueError: If one is not a scalar or is out of bounds.

    Examples:
      >>> import jax.numpy as jnp, jmp
      >>> from optax_lossscale.interop import from_jmp
      >>> policy, state = from_jmp(jmp.DynamicLossScale(jnp.float32(1024), period=100))
      >>> policy.growth_interval, float(state.loss_scale), int(state.growth_count)
      (100, 1024.0, 0)
    """
    expected = "a jmp.DynamicLossScale; JMP's others are `FixedLossScale` and `as_loss_scale(None)`"
    names = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
    scale, count, period, factor, floor = _numbers("ls", ls, names, expected)
    ceiling = 2.0**15 if jnp.result_type(ls.loss_scale) == jnp.float16 else LARGEST_SCALE
    rule = {"growth_factor": factor, "backoff_factor": 1 / factor if factor else 0.0}
    return _convert(scale, count, period, min_scale=floor, max_scale=ceiling, **rule)


def from_torch_state_dict(d: Mapping[str, Any]) -> tuple[DynamicLossScale, LossScaleState]:
    """Return the policy and the state of a `torch.amp.GradScaler`.

    Args:
      d: The result of `GradScaler.state_dict()`.

    Raises:
      TypeError: If `d` is no mapping or lacks a key, or a value is not a concrete number.
      ValueError: If one is not a scalar or is out of bounds.

    Examples:
      >>> from optax_lossscale.interop import from_torch_state_dict
      >>> d = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5}
      >>> d |= {"growth_interval": 100, "_growth_tracker": 7}
      >>> policy, state = from_torch_state_dict(d)
      >>> policy.growth_interval, float(state.loss_scale), int(state.growth_count)
      (100, 1024.0, 7)
    """
    expected = "the state_dict of a GradScaler; a disabled one is `as_loss_scale(None)`"
    names = ("scale", "_growth_tracker", "growth_interval", "growth_factor", "backoff_factor")
    theirs = SimpleNamespace(**d) if isinstance(d, Mapping) else d
    scale, count, interval, growth, backoff = _numbers("d", theirs, names, expected)
    return _convert(scale, count, interval, growth_factor=growth, backoff_factor=backoff)


def to_torch_state_dict(policy: DynamicLossScale, state: Any) -> dict[str, Any]:
    """Return a dict for `torch.amp.GradScaler.load_state_dict`; torch keeps no bounds or skips.

    Args:
      policy: The policy of the run, with `hysteresis=1`: torch backs off on every overflow.
      state: Its `LossScaleState`, or an optimizer's state that holds exactly one; not traced.

    Raises:
      TypeError: If `policy` is not a `DynamicLossScale`, or `state` does not hold concrete numbers.
      ValueError: If `hysteresis` exceeds 1, or `state` holds no one `LossScaleState` within bounds.

    Examples:
      >>> import optax_lossscale as ols
      >>> from optax_lossscale.interop import to_torch_state_dict
      >>> policy = ols.DynamicLossScale(growth_interval=100)
      >>> d = to_torch_state_dict(policy, policy.init())
      >>> d["scale"], d["growth_interval"], d["_growth_tracker"]
      (32768.0, 100, 0)
    """
    if not isinstance(policy, DynamicLossScale):
        raise TypeError(f"`policy` must be a DynamicLossScale, got {policy!r}. Pass the run's.")
    if policy.hysteresis > 1:
        raise ValueError(
            f"`policy` must have hysteresis=1, got {policy.hysteresis}: torch backs off on every "
            "overflow. To accept that, write `dataclasses.replace(policy, hysteresis=1)`."
        )
    found, names = loss_scale_state(state), ("loss_scale", "growth_count")
    scale, count = _numbers("state", found, names, "a LossScaleState")
    return {
        "scale": scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.growth_interval,
        # Torch tests for equality: with a count beyond the interval it would never grow.
        "_growth_tracker": min(int(count), policy.growth_interval - 1),
    }


def _numbers(argument: str, theirs: Any, names: tuple[str, ...], kind: str) -> tuple[float, ...]:
    """Return the attributes of these names, of which the first are a loss scale and a count."""
    missing = [name for name in names if not hasattr(theirs, name)]
    if missing:
        raise TypeError(f"`{argument}` lacks {', '.join(missing)}. It must be {kind}.")
    scale, count, *rest = (_number(argument, name, getattr(theirs, name)) for name in names)
    if not (SMALLEST_SCALE <= scale <= LARGEST_SCALE and count >= 0 and count.is_integer()):
        raise ValueError(
            f"`{argument}` must hold a loss scale between 2**-126 and 2**126 and a count of at "
            f"least 0, got {scale} and {count:g}. Start again with `init`."
        )
    return scale, count, *rest


def _number(argument: str, name: str, value: Any) -> float:
    checks.scalar(f"{argument}.{name}", value, "Take one replica: `x[0]` of every leaf.")
    try:
        return float(value)
    except (TypeError, ValueError) as error:  # a traced value is a TypeError, too
        raise TypeError(
            f"`{argument}` must hold concrete numbers, got {name}={value!r}. Convert it outside of "
            "`jax.jit`."
        ) from error


def _convert(
    loss_scale: float,
    growth_count: float,
    growth_interval: float,
    *,
    min_scale: float = SMALLEST_SCALE,
    max_scale: float = LARGEST_SCALE,
    **factors: Any,
) -> tuple[DynamicLossScale, LossScaleState]:
    interval: Any = min(growth_interval, float(INT32_MAX))
    min_scale = max(min_scale, SMALLEST_SCALE)
    policy = DynamicLossScale(
        # The state may be below the floor: the next step lifts it, and there the next overflow.
        initial_scale=min(max(loss_scale, min_scale), max_scale),
        growth_interval=int(interval) if interval.is_integer() else interval,
        min_scale=min_scale,
        max_scale=max_scale,
        **factors,
    )
    return policy, policy.init()._replace(
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        growth_count=jnp.asarray(int(min(growth_count, INT32_MAX)), jnp.int32),
    )
