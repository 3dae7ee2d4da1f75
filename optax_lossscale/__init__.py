"""Loss scaling for float16 training in JAX: small, exact, functional, made for Optax."""

from optax_lossscale._policy import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    as_loss_scale,
    init,
    update,
)
from optax_lossscale._scaling import scale_loss, unscale_and_check, value_and_grad
from optax_lossscale._state import LossScaleState, loss_scale_state
from optax_lossscale._transform import LossScaledState, with_loss_scaling
from optax_lossscale._tree import all_finite, tree_where

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleState",
    "LossScaledState",
    "all_finite",
    "as_loss_scale",
    "init",
    "loss_scale_state",
    "scale_loss",
    "tree_where",
    "unscale_and_check",
    "update",
    "value_and_grad",
    "with_loss_scaling",
]
