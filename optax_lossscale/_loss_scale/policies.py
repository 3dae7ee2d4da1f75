"""Policies, which update the loss scale: their interface, the two of this library, `update`."""

import copy
import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_lossscale._state import LossScaleState, count_step, increment, initial_state, typed
from optax_lossscale._support import checks
from optax_lossscale._support.bounds import SMALLEST_SCALE, as_float32
from optax_lossscale._support.tree import shown


@runtime_checkable
class LossScale(Protocol):
    """The interface of a policy: a hashable object with these members, pure and traceable."""

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a step that is not finite is skipped.

        If false, a guard without a rule (`skip_if`) always passes `grads_finite=True` to `update`.
        """
        ...

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        ...

    def update(
        self, state: LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> LossScaleState:
        """Return the state after a step, with the same type, shapes and dtypes.

        It need not count skipped steps: `optax_lossscale.update` and the guard do it afterwards.
        """
        ...


class _Policy:
    """A policy that can be saved as plain data."""

    def get_config(self) -> dict[str, Any]:
        """Return the class name and the hyper-parameters as a JSON-compatible dict.

        Examples:
          >>> import optax_lossscale as ols
          >>> ols.FixedLossScale(128).get_config()
          {'class_name': 'FixedLossScale', 'scale': 128.0, 'skip_nonfinite': True}
        """
        return {"class_name": type(self).__name__, **vars(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the policy that `get_config` described. Missing hyper-parameters take defaults.

        Raises:
          TypeError: If `config` is not a mapping.
          ValueError: If it names another class or has unknown keys.

        Examples:
          >>> import optax_lossscale as ols
          >>> ols.DynamicLossScale.from_config({"growth_interval": 100}).growth_interval
          100
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"`config` must be a dict from `get_config`, got {shown(config)}.")
        hyperparams = {**config}
        class_name = hyperparams.pop("class_name", cls.__name__)
        unknown = sorted({*hyperparams} - {*cls.__dataclass_fields__}, key=str)  # pyright: ignore[reportAttributeAccessIssue]
        if class_name != cls.__name__ or unknown:
            raise ValueError(
                f"`config` must describe a {cls.__name__}, got class_name={class_name!r} and the "
                f"unknown keys {unknown}. Use `as_loss_scale(config)`, which looks the class up."
            )
        return cls(**hyperparams)

    def _read(self, read: Callable[[str, object], float], *names: str) -> None:
        """Check these hyper-parameters, and keep them as Python numbers or bools."""
        for name in names:
            value = read(name, getattr(self, name))
            object.__setattr__(self, name, value)  # the dataclass is frozen


@dataclasses.dataclass(frozen=True)
class FixedLossScale(_Policy):
    """A constant loss scale.

    Args:
      scale: The loss scale, from 2**-126 to 2**126. A power of two makes scaling exact.
      skip_nonfinite: Whether a step that is not finite is skipped. If false, and without a rule
        (`skip_if`), nothing is checked or counted and every step is applied, as in TensorFlow's
        `FixedLossScale` and with MindSpore's `drop_overflow_update=False`.

    Raises:
      TypeError: If `scale` is not a number, or `skip_nonfinite` is not a bool.
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
        self._read(checks.read_scale, "scale")
        self._read(checks.read_bool, "skip_nonfinite")

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        return initial_state(self.scale)

    def update(
        self, state: LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> LossScaleState:
        """Count the step. The loss scale does not change. `update` describes the arguments."""
        state = typed(state)
        grads_finite = checks.read_flag("grads_finite", grads_finite)
        loss_finite = checks.read_flag("loss_finite", loss_finite)
        if not self.skip_nonfinite:
            return state
        applied = grads_finite & loss_finite
        growth_count = jnp.where(applied, increment(state.growth_count), 0)
        return count_step(state._replace(growth_count=growth_count), state, applied)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Policy):
    """A loss scale that follows the largest value at which gradients stay finite.

    The first case that applies is used::

        loss not finite, and consecutive_skipped + 1 < loss_patience:
                           nothing changes
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

    The first two cases skip the step and count it. The last one applies it, unless a rule
    (`skip_if`) skips it. In the first case the batch is probably bad. That says nothing about the
    loss scale, whatever the gradients are, so it neither lowers the loss scale nor delays its
    growth. A loss scale that is out of bounds is clamped first, and NaN becomes `min_scale`. Powers
    of two make scaling and unscaling exact; other values work.

    Args:
      initial_scale: The loss scale of the first step. If it is too large, the first steps are
        skipped; if it is too small, gradients underflow until it has grown.
      growth_interval: After how many finite steps without an overflow the loss scale grows. A
        smaller interval follows the gradients faster, and skips more steps: about one per interval.
      growth_factor: What the loss scale is multiplied by when it grows. Greater than 1.
      backoff_factor: What it is multiplied by after an overflow. Between 0 and 1.
      min_scale: The smallest loss scale. It may be below 1, for gradients that overflow unscaled.
      max_scale: The largest loss scale.
      hysteresis: After how many overflows the loss scale backs off. Each one skips its step.
      consecutive_hysteresis: Whether every finite step resets the count of overflows (as in Apex
        and NeMo), instead of only growth (as in Megatron-LM, and in DeepSpeed by default).
      loss_patience: At how many consecutive skipped steps a loss that is not finite counts as an
        overflow. Before that, the batch is probably bad, which a smaller loss scale does not fix.
        Use 1 if the loss itself depends on the loss scale, as a gradient penalty that shares it
        does: then a smaller loss scale helps.

    Raises:
      TypeError: If `growth_interval`, `hysteresis` or `loss_patience` is not an integer,
        `consecutive_hysteresis` is not a bool, or another hyper-parameter is not a number.
      ValueError: Unless 2**-126 <= min_scale <= initial_scale <= max_scale <= 2**126, growth_factor
        > 1, 0 < backoff_factor < 1, and growth_interval, hysteresis, loss_patience >= 1.

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
    _: dataclasses.KW_ONLY
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    loss_patience: int = 5
    skip_nonfinite = True  # no field: the rule depends on the gradients

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        self._read(checks.read_scale, "initial_scale", "min_scale", "max_scale")
        self._read(checks.read_count, "growth_interval", "hysteresis", "loss_patience")
        self._read(checks.read_number, "growth_factor", "backoff_factor")
        self._read(checks.read_bool, "consecutive_hysteresis")
        # Compare in float32, where 1 + 1e-9 is 1, so that the loss scale would never grow.
        if not as_float32(self.growth_factor) > 1:
            raise ValueError(f"`growth_factor` must be greater than 1, got {self.growth_factor}.")
        if not SMALLEST_SCALE <= as_float32(self.backoff_factor) < 1:
            raise ValueError(
                "`backoff_factor` must be between 0 and 1, both excluded, as a normal number in "
                f"float32, got {self.backoff_factor}."
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"`initial_scale` must be between `min_scale` and `max_scale`, got {self}."
            )

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        return initial_state(self.initial_scale)

    def update(
        self, state: LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> LossScaleState:
        """Apply the rule above once. `update` describes the arguments."""
        state = typed(state)
        grads_finite = checks.read_flag("grads_finite", grads_finite)
        loss_finite = checks.read_flag("loss_finite", loss_finite)
        applied = grads_finite & loss_finite
        # So that a loss scale that is NaN or out of bounds recovers.
        scale = jnp.clip(state.loss_scale, self.min_scale, self.max_scale)
        state = state._replace(loss_scale=jnp.where(jnp.isnan(scale), self.min_scale, scale))

        growth_count = increment(state.growth_count)
        grown = jnp.minimum(state.loss_scale * self.growth_factor, self.max_scale)
        grows = growth_count >= self.growth_interval
        resets = grows | self.consecutive_hysteresis
        after_finite = state._replace(
            loss_scale=jnp.where(grows, grown, state.loss_scale),
            growth_count=jnp.where(grows, 0, growth_count),
            overflow_count=jnp.where(resets, 0, state.overflow_count),
        )

        overflow_count = jnp.minimum(increment(state.overflow_count), self.hysteresis)
        backed_off = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        backs_off = overflow_count >= self.hysteresis
        after_overflow = state._replace(
            loss_scale=jnp.where(backs_off, backed_off, state.loss_scale),
            growth_count=jnp.zeros_like(growth_count),
            overflow_count=overflow_count,
        )

        skipped = increment(state.consecutive_skipped)
        is_forgiven = ~loss_finite & (skipped < self.loss_patience)
        skip = jax.tree.map(functools.partial(jnp.where, is_forgiven), state, after_overflow)
        new = jax.tree.map(functools.partial(jnp.where, applied), after_finite, skip)
        return count_step(new, state, applied)


def checking(policy: LossScale) -> LossScale:
    """Return a policy that skips steps that are not finite. A dynamic one always does."""
    if isinstance(policy, FixedLossScale):
        policy = copy.copy(policy)  # a subclass may have an `__init__` of its own
        object.__setattr__(policy, "skip_nonfinite", True)  # it is frozen
    return policy


for _public in (FixedLossScale, DynamicLossScale):
    _public.__module__ = "optax_lossscale"  # pickles name it there, as they do the states


#: Everything that `as_loss_scale` turns into a policy.
LossScaleLike: TypeAlias = LossScale | Literal["dynamic"] | float | Mapping[str, Any] | None


def as_loss_scale(loss_scale: LossScaleLike) -> LossScale:
    """Convert `loss_scale` to a policy.

    Args:
      loss_scale: One of

        * a policy, which is returned unchanged;
        * `"dynamic"`: `DynamicLossScale` with its defaults;
        * an int or a float: `FixedLossScale` with that loss scale;
        * `None`: a loss scale of 1 and no check, with the same kind of state;
        * a dict from `get_config`.

    Returns:
      A policy. It has a hash, so it can be a static argument of `jax.jit`.

    Raises:
      TypeError: If `loss_scale` is anything else, including a bool.
      ValueError: If it is another string, a dict of another class, or out of bounds.

    Examples:
      >>> import optax_lossscale as ols
      >>> ols.as_loss_scale(128)
      FixedLossScale(scale=128.0, skip_nonfinite=True)
      >>> ols.as_loss_scale(None)
      FixedLossScale(scale=1.0, skip_nonfinite=False)
    """
    if isinstance(loss_scale, LossScale) and not isinstance(loss_scale, type):
        return loss_scale
    if loss_scale is None:
        return FixedLossScale(1.0, skip_nonfinite=False)
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    if isinstance(loss_scale, Mapping):
        class_name = loss_scale.get("class_name")
        for cls in (DynamicLossScale, FixedLossScale):
            if class_name == cls.__name__:
                return cls.from_config(loss_scale)
        raise ValueError(
            "`loss_scale` must name a class in ['DynamicLossScale', 'FixedLossScale'], got "
            f"class_name={class_name!r}. For a class of your own, call its `from_config`."
        )
    if isinstance(loss_scale, numbers.Real) and not isinstance(loss_scale, bool):
        return FixedLossScale(checks.read_scale("loss_scale", loss_scale))
    raise (ValueError if isinstance(loss_scale, str) else TypeError)(
        "`loss_scale` must be a policy (FixedLossScale, DynamicLossScale, or an object with "
        '`init`, `update` and `skip_nonfinite`), "dynamic", an int or a float, None, or a dict '
        f"from `get_config`; got {shown(loss_scale)}. Pass a rule such as `Spike()` as `skip_if=`."
    )


def init(loss_scale: LossScaleLike = "dynamic") -> LossScaleState:
    """Return the state before the first step.

    Args:
      loss_scale: `"dynamic"`, a number (fixed), None (off), or a policy; see `as_loss_scale`.

    Returns:
      A `LossScaleState` with the first loss scale of the policy, and counts of 0.

    Examples:
      >>> import optax_lossscale as ols
      >>> float(ols.init(128).loss_scale)
      128.0
    """
    return typed(as_loss_scale(loss_scale).init())


def update(
    state: LossScaleState,
    grads_finite: ArrayLike,
    policy: LossScale | Literal["dynamic"] | Mapping[str, Any] | None,
    *,
    loss_finite: ArrayLike = True,
) -> LossScaleState:
    """Update the loss scale after a step, and count the step if it was skipped.

    Args:
      state: The state that the loss was scaled with.
      grads_finite: Whether every gradient is finite, from `unscale_and_check`. `bool[]`.
      policy: The policy that `state` was made with, `"dynamic"`, a dict from `get_config`, or None
        if `state` came from `init(None)`.
      loss_finite: Whether the loss is finite; see `loss_patience` of `DynamicLossScale`. `bool[]`.

    Returns:
      The state to scale the next loss with.

    Raises:
      TypeError: If `state` is not a `LossScaleState`, a flag is not boolean, or `policy` is a
        number: write `FixedLossScale(x)` for a loss scale that never changes.
      ValueError: If a flag is not a scalar.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.update(ols.init(), grads_finite=False, policy="dynamic")
      >>> float(state.loss_scale), int(state.total_skipped)
      (16384.0, 1)
    """
    checks.require_policy(policy)
    policy = as_loss_scale(policy)
    grads_finite = checks.read_flag("grads_finite", grads_finite)
    loss_finite = checks.read_flag("loss_finite", loss_finite)
    state = typed(state)
    new = typed(policy.update(state, grads_finite, loss_finite=loss_finite))
    applied = grads_finite & loss_finite | (not policy.skip_nonfinite)
    return count_step(new, state, applied)
