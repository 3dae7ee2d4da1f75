"""The interface of a policy, and what else names one: a number, a string or a config."""

import numbers
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from jax.typing import ArrayLike

from optax_lossscale._loss_scale.policies import DynamicLossScale, FixedLossScale
from optax_lossscale._state import LossScaleState, count_step, typed
from optax_lossscale._support import checks


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
