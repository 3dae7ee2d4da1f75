"""The states of Keras' arguments."""

from typing import NamedTuple

import jax

from optax_lossscale._state import public_state
from optax_lossscale._support.tree import PyTree


@public_state("optax_lossscale.keras")
class DecayedState(NamedTuple):
    """The state of an optimizer with decoupled weight decay.

    Attributes:
      inner_state: The optimizer's own state.
      decay_steps: The number of applied steps, which a schedule of the rate counts. `int32[]`.
    """

    inner_state: PyTree
    decay_steps: jax.Array


@public_state(
    "optax_lossscale.keras",
    needed=("ema_params", "ema_steps"),
    remedy="Build the optimizer with `use_ema=True`, or pass the state that is meant.",
)
class EmaParamsState(NamedTuple):
    """The moving average of the parameters.

    Attributes:
      ema_params: The average, as `ema_params(opt_state)` returns it.
      ema_steps: The number of applied steps. `int32[]`.
    """

    ema_params: PyTree
    ema_steps: jax.Array
