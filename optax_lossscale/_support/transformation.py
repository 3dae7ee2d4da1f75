"""The type of the wrappers in this library."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import optax

State_co = TypeVar("State_co", covariant=True)


class Update(Protocol[State_co]):
    """The `update` of a gradient transformation with extra arguments."""

    def __call__(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, State_co]:
        """Return the updates and the new state."""
        ...


class Transformation(optax.GradientTransformationExtraArgs, Generic[State_co]):
    """A gradient transformation whose state has a known type, so that editors know its fields."""

    # These narrow the types of the base class, which pyright does not allow for a NamedTuple.
    init: Callable[[optax.Params], State_co]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Update[State_co]  # pyright: ignore[reportIncompatibleVariableOverride]
