"""Policies: when the loss scale changes."""

from optax_lossscale._policy.convert import LossScale, LossScaleLike, as_loss_scale, init, update
from optax_lossscale._policy.policies import DynamicLossScale, FixedLossScale

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleLike",
    "as_loss_scale",
    "init",
    "update",
]
