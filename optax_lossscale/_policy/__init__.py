"""Policies: when the loss scale changes."""

from optax_lossscale._policy.convert import (
    LossScale,
    LossScaleLike,
    PolicyLike,
    as_loss_scale,
    as_policy,
    init,
    update,
)
from optax_lossscale._policy.policies import DynamicLossScale, FixedLossScale

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleLike",
    "PolicyLike",
    "as_loss_scale",
    "as_policy",
    "init",
    "update",
]
