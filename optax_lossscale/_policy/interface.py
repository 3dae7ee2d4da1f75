"""The interface of a policy, and policies as plain data."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

from jax.typing import ArrayLike

from optax_lossscale._state import LossScaleState


@runtime_checkable
class LossScale(Protocol):
    """The interface of a policy. Any object with these members is a policy.

    `init` and `update` must be pure and traceable, and `update` must return a state of the same
    type, shapes and dtypes as its argument. It need not count skipped steps: `update` and
    `with_loss_scaling` do, after it. The object itself holds Python values only and should be
    hashable.

    Attributes:
      skip_nonfinite: Whether a step with non-finite gradients is skipped. If false, nothing is
        checked, and `update` receives `grads_finite=True`, unless there is a rule (`skip_if`).
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


class Configurable:
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
