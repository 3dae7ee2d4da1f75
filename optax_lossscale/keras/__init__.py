"""Keras' `LossScaleOptimizer` and its arguments, as a chain of Optax transformations.

The chain accumulates, clips, runs the inner optimizer, decays and averages, in this order. It is
inside `with_loss_scaling`, so it sees true gradients, and a skipped step does not change its state.
Keras itself is not needed.
"""

from optax_lossscale.keras.optimizer import ema_params, loss_scale_optimizer
from optax_lossscale.keras.parts import DecayedState, EmaParamsState

__all__ = ["DecayedState", "EmaParamsState", "ema_params", "loss_scale_optimizer"]
