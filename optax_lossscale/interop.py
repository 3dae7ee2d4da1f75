"""The state of loss scaling from and to Flax's `DynamicScale`, JMP and torch's `GradScaler`.

Whoever moves in the middle of training keeps the rule, the factor and the count of finite steps:
the next move of the factor comes at the step at which it would have come there. None of the three
libraries is imported; what is handed in is read by its attributes or keys.

They differ in when the factor grows. With an interval of N, JMP and torch grow on the N-th finite
step in a row, as this library does, and Flax on the one after it. A count that lies beyond the
interval, because the interval was made shorter, grows on the next finite step here.

They differ in the bounds, too. None has a ceiling but what the dtype of the factor can hold, and
torch has no floor. Here the factor stays between 2**-126 and 2**126, where its float32 reciprocal
is a normal number. The counters of skipped steps start at 0: nobody else has them.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._policy import INT32_MAX, LARGEST_SCALE, SMALLEST_SCALE, DynamicLossScale
from optax_lossscale._state import LossScaleState, loss_scale_state

# What counts steps, whatever it is called.
_COUNTS = {"fin_steps", "counter", "_growth_tracker", "growth_count", "growth_interval", "period"}


def from_flax_dynamic_scale(ds: Any) -> tuple[DynamicLossScale, LossScaleState]:
    """Go on where a `flax.training.dynamic_scale.DynamicScale` stands.

    Flax grows one step later than its `growth_interval` says, so the policy's is one larger; of an
    `optax_lossscale.flax.DynamicScale`, which grows when it says, the policy's is the same.

    Args:
      ds: The `DynamicScale`, outside of `jax.jit`; of a replicated one, a single replica.

    Returns:
      The policy for `with_loss_scaling`, and the state to put into the optimizer's.

    Raises:
      TypeError: If `ds` lacks an attribute of a `DynamicScale`, or one is no concrete number.
      ValueError: If one is no scalar or is out of bounds.

    Examples:
      >>> from flax.training.dynamic_scale import DynamicScale
      >>> from optax_lossscale.interop import from_flax_dynamic_scale
      >>> policy, state = from_flax_dynamic_scale(DynamicScale(growth_interval=100, fin_steps=7))
      >>> policy.growth_interval, float(state.loss_scale), int(state.growth_count)
      (101, 65536.0, 7)
    """
    expected = "a flax.training.dynamic_scale.DynamicScale"
    names = ("scale", "fin_steps", "growth_interval", "growth_factor", "backoff_factor")
    scale, count, interval, growth, backoff = _numbers("ds", ds, names, expected)
    minimum = getattr(ds, "minimum_scale", None)
    floor = 0.0 if minimum is None else _number("ds", "minimum_scale", minimum)
    is_ours = any(cls.__module__ == "optax_lossscale.flax" for cls in type(ds).__mro__)
    rule = {"growth_factor": growth, "backoff_factor": backoff, "min_scale": floor}
    return _convert("ds", scale, count, interval if is_ours else interval + 1, **rule)


def from_jmp(ls: Any) -> tuple[DynamicLossScale, LossScaleState]:
    """Go on where a `jmp.DynamicLossScale` stands.

    The floor is the one that the object holds. JMP itself forgets it whenever the object passes
    through `jax.jit`, and then uses 1. A factor of float16 never grows above 2**15 in JMP, where
    twice as much is infinite, and neither does the policy's.

    Args:
      ls: The `jmp.DynamicLossScale`, outside of `jax.jit`; of a replicated one, a single replica.

    Returns:
      The policy for `with_loss_scaling`, and the state to put into the optimizer's.

    Raises:
      TypeError: If `ls` lacks an attribute of a `jmp.DynamicLossScale`, as JMP's other two classes
        do, or one is no concrete number.
      ValueError: If one is no scalar or is out of bounds.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jmp
      >>> from optax_lossscale.interop import from_jmp
      >>> policy, state = from_jmp(jmp.DynamicLossScale(jnp.float32(1024), period=100))
      >>> policy.growth_interval, float(state.loss_scale), int(state.growth_count)
      (100, 1024.0, 0)
    """
    expected = (
        "a jmp.DynamicLossScale; for a jmp.StaticLossScale use "
        "`FixedLossScale(float(ls.loss_scale))`, for a jmp.NoOpLossScale `as_loss_scale(None)`"
    )
    names = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
    scale, count, period, factor, floor = _numbers("ls", ls, names, expected)
    ceiling = LARGEST_SCALE
    if jnp.result_type(ls.loss_scale) == jnp.float16:
        ceiling = scale
        while factor > 1 and ceiling * factor <= float(jnp.finfo(jnp.float16).max):
            ceiling *= factor
    rule = {"growth_factor": factor, "backoff_factor": 1 / factor if factor else 0.0}
    return _convert("ls", scale, count, period, min_scale=floor, max_scale=ceiling, **rule)


def from_torch_state_dict(d: Mapping[str, Any]) -> tuple[DynamicLossScale, LossScaleState]:
    """Go on where a `torch.amp.GradScaler` stands.

    Args:
      d: What `GradScaler.state_dict()` returned.

    Returns:
      The policy for `with_loss_scaling`, and the state to put into the optimizer's.

    Raises:
      TypeError: If `d` is no mapping or lacks a key, as the empty dict of a disabled scaler does,
        or a value is no concrete number.
      ValueError: If one is no scalar or is out of bounds.

    Examples:
      >>> from optax_lossscale.interop import from_torch_state_dict
      >>> d = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5}
      >>> d |= {"growth_interval": 100, "_growth_tracker": 7}
      >>> policy, state = from_torch_state_dict(d)
      >>> policy.growth_interval, float(state.loss_scale), int(state.growth_count)
      (100, 1024.0, 7)
    """
    expected = (
        "what `GradScaler.state_dict()` of torch returned; for a scaler with `enabled=False`, "
        "which returns an empty dict, use `as_loss_scale(None)`"
    )
    names = ("scale", "_growth_tracker", "growth_interval", "growth_factor", "backoff_factor")
    numbers = _numbers("d", d if isinstance(d, Mapping) else {}, names, expected)
    scale, count, interval, growth, backoff = numbers
    return _convert("d", scale, count, interval, growth_factor=growth, backoff_factor=backoff)


def to_torch_state_dict(policy: DynamicLossScale, state: Any) -> dict[str, Any]:
    """Return what `torch.amp.GradScaler.load_state_dict` takes.

    Torch has no bounds: `min_scale` and `max_scale` stay behind, and so do the counters of skipped
    steps. Until the factor meets a bound, it moves at the same steps.

    Args:
      policy: The policy of the run, with `hysteresis=1`: torch backs off on every overflow.
      state: Its `LossScaleState`, or an optimizer's state that holds exactly one, outside of
        `jax.jit`.

    Raises:
      TypeError: If `policy` is no `DynamicLossScale`, or `state` does not hold concrete numbers.
      ValueError: If `hysteresis` is greater than 1, or `state` does not hold exactly one
        `LossScaleState` of scalars, or one that is out of bounds.

    Examples:
      >>> import optax_lossscale as ols
      >>> from optax_lossscale.interop import to_torch_state_dict
      >>> policy = ols.DynamicLossScale(growth_interval=100)
      >>> d = to_torch_state_dict(policy, policy.init())
      >>> d["scale"], d["growth_interval"], d["_growth_tracker"]
      (32768.0, 100, 0)
    """
    if not isinstance(policy, DynamicLossScale):
        raise TypeError(
            f"`policy` must be a DynamicLossScale, the rule of torch's GradScaler, got {policy!r}. "
            "For a fixed factor multiply the loss yourself in torch."
        )
    if policy.hysteresis > 1:
        raise ValueError(
            f"`policy` must have hysteresis=1, got {policy.hysteresis}: torch's GradScaler backs "
            "off on every overflow. Hand in `dataclasses.replace(policy, hysteresis=1)` if it may."
        )
    found = loss_scale_state(state)._asdict()
    scale, count = _numbers("state", found, ("loss_scale", "growth_count"), "a LossScaleState")
    _check_standing("state", scale, count)
    return {
        "scale": scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.growth_interval,
        # Torch asks whether the count is the interval: beyond it, the factor would never grow.
        "_growth_tracker": min(int(count), policy.growth_interval - 1),
    }


def _numbers(
    argument: str, theirs: Any, names: tuple[str, ...], expected: str
) -> tuple[float, ...]:
    """Return the attributes or values of these names, or say what is wrong with which."""
    if not isinstance(theirs, Mapping):
        theirs = {name: getattr(theirs, name) for name in names if hasattr(theirs, name)}
    missing = [name for name in names if name not in theirs]
    if missing:
        raise TypeError(f"`{argument}` lacks {', '.join(missing)}. It must be {expected}.")
    return tuple(_number(argument, name, theirs[name]) for name in names)


def _number(argument: str, name: str, value: Any) -> float:
    if np.ndim(value):
        raise ValueError(
            f"`{argument}` must hold scalars, got {name} of shape {np.shape(value)}. Take a single "
            f"replica: `jax.tree.map(lambda x: x[0], {argument})`."
        )
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError("a flag is no number")  # noqa: TRY301, the message below says it
        number = float(value)
    except (TypeError, ValueError) as error:  # a traced value is a TypeError, too
        raise TypeError(
            f"`{argument}` must hold concrete numbers, got {name}={value!r}. Convert it outside of "
            "`jax.jit` and other transformations."
        ) from error
    except OverflowError:  # an integer beyond float64
        number = math.inf
    if name in _COUNTS and not number.is_integer():
        raise ValueError(
            f"`{argument}` has no equal here. Steps must be whole numbers, got {name}={value}. Use "
            "`int` to convert it."
        )
    return number


def _check_standing(argument: str, loss_scale: float, growth_count: float) -> None:
    if not (SMALLEST_SCALE <= loss_scale <= LARGEST_SCALE and growth_count >= 0):
        raise ValueError(
            f"`{argument}` must hold a factor between 2**-126 and 2**126 and a count of at least "
            f"0, got {loss_scale} and {growth_count:g}. Start anew with a `DynamicLossScale`."
        )


def _convert(
    argument: str,
    loss_scale: float,
    growth_count: float,
    growth_interval: float,
    *,
    growth_factor: float,
    backoff_factor: float,
    min_scale: float = SMALLEST_SCALE,
    max_scale: float = LARGEST_SCALE,
) -> tuple[DynamicLossScale, LossScaleState]:
    _check_standing(argument, loss_scale, growth_count)
    min_scale = max(min_scale, SMALLEST_SCALE)
    max_scale = max(max_scale, min_scale)
    try:
        policy = DynamicLossScale(
            # A factor below the floor may be: the next overflow lifts it, here as there.
            initial_scale=min(max(loss_scale, min_scale), max_scale),
            growth_interval=int(min(growth_interval, INT32_MAX)),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            min_scale=min_scale,
            max_scale=max_scale,
        )
    except ValueError as error:
        raise ValueError(f"`{argument}` has no equal here. {error}") from error
    state = policy.init()
    return policy, state._replace(
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        growth_count=jnp.asarray(int(min(growth_count, INT32_MAX)), jnp.int32),
    )
