"""Loss scaling for float16 training in JAX: small, exact, functional, made for Optax."""

from optax_lossscale._diagnostics import (
    GradientExponents,
    LossScaleStalledError,
    NonfiniteCounts,
    calibrate,
    check_health,
    format_nonfinite_report,
    gradient_exponents,
    metrics,
    nonfinite_report,
    plot_gradient_exponents,
    suggest_scale,
)
from optax_lossscale._first_nonfinite import FirstNonfinite, first_nonfinite
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
    "FirstNonfinite",
    "FixedLossScale",
    "GradientExponents",
    "LossScale",
    "LossScaleStalledError",
    "LossScaleState",
    "LossScaledState",
    "NonfiniteCounts",
    "all_finite",
    "as_loss_scale",
    "calibrate",
    "check_health",
    "first_nonfinite",
    "format_nonfinite_report",
    "gradient_exponents",
    "init",
    "loss_scale_state",
    "metrics",
    "nonfinite_report",
    "plot_gradient_exponents",
    "scale_loss",
    "suggest_scale",
    "tree_where",
    "unscale_and_check",
    "update",
    "value_and_grad",
    "with_loss_scaling",
]
