"""Policies, scaling and differentiating. Other folders import from here."""

from optax_lossscale._loss_scale.agreement import agree
from optax_lossscale._loss_scale.differentiate import differentiated, grad, value_and_grad
from optax_lossscale._loss_scale.inside import scale_inside
from optax_lossscale._loss_scale.never_scaled import warn_if_never_scaled
from optax_lossscale._loss_scale.policies import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    LossScaleLike,
    as_loss_scale,
    checking,
    init,
    update,
)
from optax_lossscale._loss_scale.scale import (
    all_finite,
    loss_scale_state,
    scale_loss,
    unscale_and_check,
    unscaled,
)

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleLike",
    "agree",
    "all_finite",
    "as_loss_scale",
    "checking",
    "differentiated",
    "grad",
    "init",
    "loss_scale_state",
    "scale_inside",
    "scale_loss",
    "unscale_and_check",
    "unscaled",
    "update",
    "value_and_grad",
    "warn_if_never_scaled",
]
