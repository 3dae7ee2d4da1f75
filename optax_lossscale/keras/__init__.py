"""Keras' `LossScaleOptimizer` and its arguments, as a chain of Optax transformations.

Everything is inside `with_loss_scaling`, in the order accumulate, clip, inner optimizer, decay,
average: it sees true gradients and is unchanged by a skipped step. Keras itself is not needed.
"""

from optax_lossscale.keras.optimizer import ema_params, loss_scale_optimizer
from optax_lossscale.keras.states import DecayedState, EmaParamsState

__all__ = ["DecayedState", "EmaParamsState", "ema_params", "loss_scale_optimizer"]
