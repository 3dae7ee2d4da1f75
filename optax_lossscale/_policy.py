"""Policies and their update rule."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._state import (
    INT32_MAX,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScaleState,
    initial_state,
    strongly_typed,
)
from optax_lossscale._tree import as_flag


@runtime_checkable
class LossScale(Protocol):
    """The interface of a policy: any object with these members is one.

    `init` and `update` must be pure and traceable, and `update` must return a state of the same
    type, shapes and dtypes as its argument. The object itself holds Python values only and should
    be hashable.

    Attributes:
      skip_nonfinite: Whether a step with non-finite gradients is skipped. If false, nothing is
        checked and `update` receives `grads_finite=True`.
    """

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a step with non-finite gradients is skipped."""
        ...

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        ...

    def update(
        self, state: LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> LossScaleState:
        """Return the state after a step with these flags."""
        ...


class _Configurable:
    """Converts a policy to plain data and back; a base of the two dataclasses below."""

    def get_config(self) -> dict[str, Any]:
        """Return the class name and the hyper-parameters as a JSON-compatible dict.

        Examples:
          >>> import optax_lossscale as ols
          >>> ols.FixedLossScale(128).get_config()
          {'class_name': 'FixedLossScale', 'scale': 128.0, 'skip_nonfinite': True}
        """
        hyperparams = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        return {"class_name": type(self).__name__, **hyperparams}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the policy that `get_config` described.

        Args:
          config: A dict from `get_config`. Missing hyper-parameters take their defaults, and
            `class_name` is optional.

        Raises:
          TypeError: If `config` is not a mapping.
          ValueError: If it names another class or has unknown keys.

        Examples:
          >>> import optax_lossscale as ols
          >>> ols.DynamicLossScale.from_config({"growth_interval": 100}).growth_interval
          100
        """
        if not isinstance(config, Mapping):
            raise TypeError(
                f"`config` must be a dict from `get_config`, got {config!r}. Use `as_loss_scale` "
                "for the other ways to name a policy."
            )
        hyperparams = dict(config)
        class_name = hyperparams.pop("class_name", cls.__name__)
        if class_name != cls.__name__:
            raise ValueError(
                f"`config` must describe a {cls.__name__}, got class_name={class_name!r}. Use "
                "`as_loss_scale(config)`, which looks the class up."
            )
        known = [f.name for f in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
        unknown = sorted(set(hyperparams) - set(known), key=str)
        if unknown:
            raise ValueError(
                f"`config` has unknown keys {unknown}; {cls.__name__} has {known}. Remove them."
            )
        return cls(**hyperparams)


@dataclasses.dataclass(frozen=True)
class FixedLossScale(_Configurable):
    """A constant loss scale.

    Args:
      scale: The loss scale. A number in [2**-126, 2**126]; a power of two makes scaling and
        unscaling exact.
      skip_nonfinite: Whether a step whose gradients are not finite is skipped. If false, nothing
        is checked, every step is applied and the counters are unchanged, at no cost for the check
        (TensorFlow's `FixedLossScale`, MindSpore's `drop_overflow_update=False`).

    Raises:
      TypeError: If `scale` is not a real number or `skip_nonfinite` is not a bool.
      ValueError: If `scale` is out of bounds.

    Examples:
      >>> import optax_lossscale as ols
      >>> policy = ols.FixedLossScale(1024)
      >>> state = policy.update(policy.init(), grads_finite=False)
      >>> float(state.loss_scale), int(state.consecutive_skipped)
      (1024.0, 1)
    """

    scale: float
    skip_nonfinite: bool = True

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        _set(self, "scale", scale_number("scale", self.scale))
        _set(self, "skip_nonfinite", _bool("skip_nonfinite", self.skip_nonfinite))

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        return initial_state(self.scale)

    def update(
        self, state: LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> LossScaleState:
        """Count the step; the loss scale is unchanged. See `update` for the arguments."""
        state = strongly_typed(state)
        applied = as_flag("grads_finite", grads_finite) & as_flag("loss_finite", loss_finite)
        return _count_step(state, applied) if self.skip_nonfinite else state


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Configurable):
    """A loss scale that follows the largest value at which gradients stay finite.

    The first line that applies is taken, once for each step::

        loss not finite, and consecutive_skipped + 1 < loss_patience:
                           growth_count = 0
                           (most often a bad batch, which a smaller loss scale does not fix)
        grads not finite, or a loss that is not finite for longer:
                           growth_count = 0
                           overflow_count = min(overflow_count + 1, hysteresis)
                           if overflow_count >= hysteresis:
                               loss_scale = max(loss_scale * backoff_factor, min_scale)
        otherwise:         growth_count += 1
                           if consecutive_hysteresis: overflow_count = 0
                           if growth_count >= growth_interval:
                               loss_scale = min(loss_scale * growth_factor, max_scale)
                               growth_count = 0; overflow_count = 0

    The first two skip the step and add one to `consecutive_skipped` and `total_skipped`; the last
    applies it and sets `consecutive_skipped` to 0. So the loss scale grows on exactly the
    `growth_interval`-th finite step in a row. Powers of two make scaling and unscaling exact;
    other values work.

    Args:
      initial_scale: The loss scale of the first step. If it is too large, the first few steps are
        skipped until it fits; if it is too small, gradients underflow until it has grown.
      growth_interval: Finite steps in a row after which the loss scale grows. A smaller number
        follows the gradients faster and skips more steps: about one in `growth_interval`.
      growth_factor: What the loss scale is multiplied by when it grows. Greater than 1.
      backoff_factor: What the loss scale is multiplied by on an overflow. Between 0 and 1.
      min_scale: The loss scale never backs off below this. Values below 1 are allowed, for
        gradients that are too large for float16 even unscaled.
      max_scale: The loss scale never grows above this.
      hysteresis: Overflows after which the loss scale backs off. Every step that overflows is
        skipped; 2 or more lets a rare bad batch pass without a change of the loss scale.
      consecutive_hysteresis: When the count of overflows is reset. False: when the loss scale
        grows (Megatron-LM, DeepSpeed's default); until then every further overflow backs off.
        True: on every finite step as well (Apex, NeMo), so that only overflows in a row back off.
      loss_patience: Skipped steps in a row at which a loss that is not finite counts as an
        overflow. 1: at once. 2 or more: not before, since most often the batch is bad, which a
        smaller loss scale does not fix. It does where the loss itself depends on the loss scale,
        as in a gradient penalty whose inner gradient is scaled with the same state.

    Raises:
      TypeError: If a hyper-parameter is of the wrong type.
      ValueError: Unless 2**-126 <= min_scale <= initial_scale <= max_scale <= 2**126,
        growth_factor > 1 and finite, 0 < backoff_factor < 1, and growth_interval, hysteresis and
        loss_patience are at least 1.

    Examples:
      >>> import optax_lossscale as ols
      >>> policy = ols.DynamicLossScale(initial_scale=8, growth_interval=2)
      >>> state = policy.init()
      >>> for grads_finite in (True, True, False):
      ...     state = policy.update(state, grads_finite)
      ...     print(float(state.loss_scale), int(state.growth_count))
      8.0 1
      16.0 0
      8.0 0

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    loss_patience: int = 2

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        for name in ("initial_scale", "min_scale", "max_scale"):
            _set(self, name, scale_number(name, getattr(self, name)))
        for name in ("growth_interval", "hysteresis", "loss_patience"):
            _set(self, name, _count(name, getattr(self, name)))
        for name in ("growth_factor", "backoff_factor"):
            _set(self, name, finite_number(name, getattr(self, name)))
        _set(
            self,
            "consecutive_hysteresis",
            _bool("consecutive_hysteresis", self.consecutive_hysteresis),
        )
        # Compared as the float32 that will be multiplied: 1 + 1e-9 is 1 there, and never grows.
        if not _float32(self.growth_factor) > 1:
            raise ValueError(
                f"`growth_factor` must be greater than 1 in float32, got {self.growth_factor}. "
                "Use 2, or `FixedLossScale` for a constant loss scale."
            )
        if not SMALLEST_SCALE <= _float32(self.backoff_factor) < 1:
            raise ValueError(
                "`backoff_factor` must lie between 0 and 1, both excluded, as a normal number in "
                f"float32, got {self.backoff_factor}. Use 0.5."
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                "`initial_scale` must lie between `min_scale` and `max_scale`, got "
                f"initial_scale={self.initial_scale}, min_scale={self.min_scale}, "
                f"max_scale={self.max_scale}. Move the bound, or start within."
            )

    @property
    def skip_nonfinite(self) -> bool:
        """Always true: the rule depends on the gradients."""
        return True

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        return initial_state(self.initial_scale)

    def update(
        self, state: LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> LossScaleState:
        """Apply the rule above once. See `update` for the arguments."""
        state = strongly_typed(state)
        grads_finite = as_flag("grads_finite", grads_finite)
        loss_finite = as_flag("loss_finite", loss_finite)
        applied = grads_finite & loss_finite
        counted = _count_step(state, applied)
        forgiven = ~loss_finite & (counted.consecutive_skipped < self.loss_patience)
        overflowed = ~(applied | forgiven)

        grow = counted.growth_count >= self.growth_interval
        overflow_count = jnp.minimum(_increment(state.overflow_count), self.hysteresis)
        back_off = overflowed & (overflow_count >= self.hysteresis)
        refill = applied if self.consecutive_hysteresis else grow
        grown = jnp.minimum(state.loss_scale * self.growth_factor, self.max_scale)
        backed_off = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        return counted._replace(
            loss_scale=jnp.where(grow, grown, jnp.where(back_off, backed_off, state.loss_scale)),
            growth_count=jnp.where(grow, 0, counted.growth_count),
            overflow_count=jnp.where(
                overflowed, overflow_count, jnp.where(refill, 0, state.overflow_count)
            ),
        )


#: Everything that `as_loss_scale` turns into a policy.
LossScaleLike: TypeAlias = LossScale | Literal["dynamic"] | float | Mapping[str, Any] | None

_POLICIES = {cls.__name__: cls for cls in (FixedLossScale, DynamicLossScale)}


def as_loss_scale(loss_scale: LossScaleLike) -> LossScale:
    """Convert `loss_scale` to a policy.

    Args:
      loss_scale: One of

        * a policy, which is returned as it is;
        * `"dynamic"`: `DynamicLossScale` with its defaults;
        * an int or a float: `FixedLossScale` with that loss scale;
        * `None`: a loss scale of 1 with nothing checked, to switch loss scaling off without
          changing the shape of the state;
        * a dict from `get_config`.

    Raises:
      TypeError: If `loss_scale` is anything else, bool included.
      ValueError: If it is another string, a dict of another class, or out of bounds.

    Examples:
      >>> import optax_lossscale as ols
      >>> ols.as_loss_scale(128)
      FixedLossScale(scale=128.0, skip_nonfinite=True)
      >>> ols.as_loss_scale(None)
      FixedLossScale(scale=1.0, skip_nonfinite=False)
    """
    accepted = (
        "a policy (FixedLossScale, DynamicLossScale, or an object with `init`, `update` and "
        '`skip_nonfinite`), "dynamic", an int or a float, None, or a dict from `get_config`'
    )
    if isinstance(loss_scale, LossScale) and not isinstance(loss_scale, type):
        return loss_scale
    if loss_scale is None:
        return FixedLossScale(1.0, skip_nonfinite=False)
    if isinstance(loss_scale, str):
        if loss_scale == "dynamic":
            return DynamicLossScale()
        raise ValueError(f"`loss_scale` must be {accepted}; got {loss_scale!r}.")
    if isinstance(loss_scale, Mapping):
        class_name = loss_scale.get("class_name")
        if not isinstance(class_name, str) or class_name not in _POLICIES:
            raise ValueError(
                f"`loss_scale` must name a class in {sorted(_POLICIES)}, got "
                f"class_name={class_name!r}. Call `from_config` of your own class instead."
            )
        return _POLICIES[class_name].from_config(loss_scale)
    if isinstance(loss_scale, numbers.Real) and not isinstance(loss_scale, bool):
        return FixedLossScale(scale_number("loss_scale", loss_scale))
    raise TypeError(f"`loss_scale` must be {accepted}; got {loss_scale!r}.")


def init(loss_scale: LossScaleLike = "dynamic") -> LossScaleState:
    """Return the state before the first step.

    Args:
      loss_scale: `"dynamic"`, a number (fixed), None (off), or a policy; see `as_loss_scale`.

    Examples:
      >>> import optax_lossscale as ols
      >>> float(ols.init(128).loss_scale)
      128.0
    """
    return as_loss_scale(loss_scale).init()


def update(
    state: LossScaleState,
    grads_finite: ArrayLike,
    loss_scale: LossScaleLike,
    *,
    loss_finite: ArrayLike = True,
) -> LossScaleState:
    """Apply the policy's rule once, after each step.

    Args:
      state: The state that the loss was scaled with.
      grads_finite: Whether every gradient is finite, from `unscale_and_check`. `bool[]`.
      loss_scale: The policy that `state` was made with, or the argument of `init`; the same at
        every step.
      loss_finite: Whether the loss itself is finite. If not, the step is skipped, and
        `loss_patience` of `DynamicLossScale` says when it counts as an overflow. `bool[]`.

    Returns:
      The state to scale the next loss with. The same type, shapes and dtypes as `state`.

    Raises:
      TypeError: If `state` is not a `LossScaleState` or a flag is not boolean.
      ValueError: If a flag is not a scalar.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.update(ols.init(), grads_finite=False, loss_scale="dynamic")
      >>> float(state.loss_scale), int(state.total_skipped)
      (16384.0, 1)
    """
    return as_loss_scale(loss_scale).update(state, grads_finite, loss_finite=loss_finite)


def _count_step(state: LossScaleState, applied: jax.Array) -> LossScaleState:
    """Count what every policy counts."""
    return state._replace(
        growth_count=jnp.where(applied, _increment(state.growth_count), 0),
        consecutive_skipped=jnp.where(applied, 0, _increment(state.consecutive_skipped)),
        total_skipped=jnp.where(applied, state.total_skipped, _increment(state.total_skipped)),
    )


def _increment(count: jax.Array) -> jax.Array:
    """Add one, and stay at the largest int32 instead of wrapping around."""
    return jnp.where(count < INT32_MAX, count + 1, count)


def _set(policy: FixedLossScale | DynamicLossScale, name: str, value: object) -> None:
    object.__setattr__(policy, name, value)  # the documented way to set a frozen dataclass's field


def _float32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def finite_number(name: str, value: object) -> float:
    """Return `value` as a Python float, or raise an error that calls it `name`."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"`{name}` must be a Python number, got {value!r}. Hyper-parameters are fixed when a "
            "step is compiled; convert an array with `float`."
        )
    try:
        number = float(value)
    except OverflowError:  # an int or a Fraction beyond float64
        number = math.inf
    if not math.isfinite(_float32(number)):
        raise ValueError(f"`{name}` must be finite in float32, got {value}. Use a power of two.")
    return number


def scale_number(name: str, value: object) -> float:
    """Return `value` as a Python float within the bounds of a loss scale, or raise an error."""
    number = finite_number(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"`{name}` must lie between 2**-126 and 2**126, where a float32 has a normal "
            f"reciprocal, got {value}. Use a power of two within."
        )
    return number


def _count(name: str, value: object) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {value!r}. Use `int` to convert it.")
    if not 1 <= int(value) <= INT32_MAX:
        raise ValueError(
            f"`{name}` must be at least 1 and fit an int32, got {value}. Use 1, or "
            "`FixedLossScale` for a constant loss scale."
        )
    return int(value)


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
    return bool(value)
