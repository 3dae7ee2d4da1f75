"""Policies: their interface, the two of this library and their rule, and what names one."""

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


@runtime_checkable
class LossScale(Protocol):
    """The interface of a policy: any hashable object with these members, pure and traceable."""

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a step that is not finite is skipped.

        If false, and there is no rule (`skip_if`), `update` always receives `grads_finite=True`.
        """
        ...

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        ...

    def update(
        self, state: LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> LossScaleState:
        """Return the state after a step, of the same type, shapes and dtypes.

        Skipped steps are counted afterwards, by `optax_lossscale.update` and the guard.
        """
        ...


class _Policy:
    """The plain data that describe a policy, and the way back."""

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
        """Build the policy that `get_config` described; what is missing takes its default.

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
                f"`config` must be a dict from `get_config`, got {config!r}. See `as_loss_scale`."
            )
        hyperparams = {**config}
        class_name = hyperparams.pop("class_name", cls.__name__)
        unknown = sorted({*hyperparams} - {*cls.__dataclass_fields__}, key=str)  # pyright: ignore[reportAttributeAccessIssue]
        if class_name != cls.__name__ or unknown:
            raise ValueError(
                f"`config` must describe a {cls.__name__}, got class_name={class_name!r} and the "
                f"unknown keys {unknown}. Use `as_loss_scale(config)`, which looks the class up."
            )
        return cls(**hyperparams)

    def _check_each(self, **kinds: Callable[[str, Any], object]) -> None:
        """Check each hyper-parameter, and keep it as a Python number or bool."""
        for name, check in kinds.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))  # it is frozen


@dataclasses.dataclass(frozen=True)
class FixedLossScale(_Policy):
    """A constant loss scale.

    Args:
      scale: A number in [2**-126, 2**126]; a power of two makes scaling and unscaling exact.
      skip_nonfinite: Whether a step that is not finite is skipped. If false, and there is no rule
        (`skip_if`), nothing is checked or counted and every step is applied, as in TensorFlow's
        `FixedLossScale` and with MindSpore's `drop_overflow_update=False`.

    Raises:
      TypeError: If an argument is of the wrong type.
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
        self._check_each(scale=checks.read_scale, skip_nonfinite=checks.read_bool)

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        return initial_state(self.scale)

    def update(
        self, state: LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> LossScaleState:
        """Count the step; the loss scale is unchanged. See `update` for the arguments."""
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
                           growth_count = 0
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

    The first two skip the step and count it. The last applies it, unless a rule (`skip_if`) skips
    it. A loss scale out of its bounds is clamped into them first, NaN to `min_scale`. Powers of two
    make scaling and unscaling exact; other values work.

    Args:
      initial_scale: The loss scale of the first step. The first steps are skipped if it is too
        large, and gradients underflow until it has grown if it is too small.
      growth_interval: Finite steps in a row after which the loss scale grows. Smaller numbers
        follow the gradients faster, and skip more steps: about one in `growth_interval`.
      growth_factor: Greater than 1.
      backoff_factor: Between 0 and 1.
      min_scale: The least loss scale. Below 1 for gradients that overflow even unscaled.
      max_scale: The greatest loss scale.
      hysteresis: Overflows after which the loss scale backs off. Each skips its step.
      consecutive_hysteresis: Whether each finite step resets the count of overflows (Apex, NeMo),
        and not growth alone (Megatron-LM, DeepSpeed's default).
      loss_patience: Skipped steps in a row at which a loss that is not finite counts as an
        overflow. Before that, the batch is most likely bad, which a smaller loss scale does not
        fix. It does where the loss itself depends on the loss scale, as in a gradient penalty.

    Raises:
      TypeError: If a hyper-parameter is of the wrong type.
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
    loss_patience: int = 2
    skip_nonfinite = True  # no field: the rule depends on the gradients

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        self._check_each(
            **dict.fromkeys(("initial_scale", "min_scale", "max_scale"), checks.read_scale),
            **dict.fromkeys(("growth_interval", "hysteresis", "loss_patience"), checks.read_count),
            **dict.fromkeys(("growth_factor", "backoff_factor"), checks.read_number),
            consecutive_hysteresis=checks.read_bool,
        )
        # Compared in float32, where 1 + 1e-9 is 1 and the loss scale would never grow.
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
        """Apply the rule above once. See `update` for the arguments."""
        state = typed(state)
        grads_finite = checks.read_flag("grads_finite", grads_finite)
        loss_finite = checks.read_flag("loss_finite", loss_finite)
        applied = grads_finite & loss_finite
        skipped = increment(state.consecutive_skipped)
        is_forgiven = ~loss_finite & (skipped < self.loss_patience)
        # A loss scale that is NaN or out of bounds recovers.
        scale = jnp.clip(state.loss_scale, self.min_scale, self.max_scale)
        state = state._replace(loss_scale=jnp.where(jnp.isnan(scale), self.min_scale, scale))

        forgiven = state._replace(growth_count=jnp.zeros_like(state.growth_count))
        overflow, finite = self._after_overflow(state), self._after_finite(state)
        skip = jax.tree.map(functools.partial(jnp.where, is_forgiven), forgiven, overflow)
        new = jax.tree.map(functools.partial(jnp.where, applied), finite, skip)
        return count_step(new, state, applied)

    def _after_overflow(self, state: LossScaleState) -> LossScaleState:
        """Return the state after an overflow."""
        overflow_count = jnp.minimum(increment(state.overflow_count), self.hysteresis)
        backed_off = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        backs_off = overflow_count >= self.hysteresis
        return state._replace(
            loss_scale=jnp.where(backs_off, backed_off, state.loss_scale),
            growth_count=jnp.zeros_like(state.growth_count),
            overflow_count=overflow_count,
        )

    def _after_finite(self, state: LossScaleState) -> LossScaleState:
        """Return the state after a step that is finite."""
        growth_count = increment(state.growth_count)
        grown = jnp.minimum(state.loss_scale * self.growth_factor, self.max_scale)
        grows = growth_count >= self.growth_interval
        refills = grows | self.consecutive_hysteresis
        return state._replace(
            loss_scale=jnp.where(grows, grown, state.loss_scale),
            growth_count=jnp.where(grows, 0, growth_count),
            overflow_count=jnp.where(refills, 0, state.overflow_count),
        )


for _public in (FixedLossScale, DynamicLossScale):
    _public.__module__ = "optax_lossscale"  # the name in pickles, as of the states


#: Everything that `as_loss_scale` turns into a policy.
LossScaleLike: TypeAlias = LossScale | Literal["dynamic"] | float | Mapping[str, Any] | None


def as_loss_scale(loss_scale: LossScaleLike) -> LossScale:
    """Convert `loss_scale` to a policy.

    Args:
      loss_scale: One of

        * a policy, which is returned as it is;
        * `"dynamic"`: `DynamicLossScale` with its defaults;
        * an int or a float: `FixedLossScale` with that loss scale;
        * `None`: a loss scale of 1 with nothing checked, in a state of the same shape;
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
            f"class_name={class_name!r}. Call `from_config` of your own class instead."
        )
    if isinstance(loss_scale, numbers.Real) and not isinstance(loss_scale, bool):
        return FixedLossScale(checks.read_scale("loss_scale", loss_scale))
    raise (ValueError if isinstance(loss_scale, str) else TypeError)(
        "`loss_scale` must be a policy (FixedLossScale, DynamicLossScale, or an object with "
        '`init`, `update` and `skip_nonfinite`), "dynamic", an int or a float, None, or a dict '
        f"from `get_config`; got {loss_scale!r}. A rule such as `Spike()` is given as `skip_if=`."
    )


def init(loss_scale: LossScaleLike = "dynamic") -> LossScaleState:
    """Return the state before the first step.

    Args:
      loss_scale: `"dynamic"`, a number (fixed), None (off), or a policy; see `as_loss_scale`.

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
    """Apply the policy's rule once, after each step, and count the step if it was skipped.

    Args:
      state: The state that the loss was scaled with.
      grads_finite: Whether every gradient is finite, from `unscale_and_check`. `bool[]`.
      policy: The policy that `state` was made with, `"dynamic"`, a dict from `get_config`, or None
        where `state` is that of `init(None)`.
      loss_finite: Whether the loss is finite; see `loss_patience` of `DynamicLossScale`. `bool[]`.

    Returns:
      The state to scale the next loss with, of the same type.

    Raises:
      TypeError: If `state` is not a `LossScaleState`, a flag is not boolean, or `policy` is a
        number: `FixedLossScale(x)` is the policy of a loss scale that never moves.
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
