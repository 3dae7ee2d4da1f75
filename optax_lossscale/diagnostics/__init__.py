"""Diagnostics for training that fails.

Each function answers one question: which layer overflowed, whether the loss scale is too small,
whether the loss itself is broken, why the model does not learn, which parts run in float16.
Functions of gradients can run inside `jax.jit`, and never wait for the device. Functions that
search, plot or raise run on the host. Their results print as tables.
"""

from optax_lossscale.diagnostics.exponents import (
    GradientExponents,
    gradient_exponents,
    plot_gradient_exponents,
    suggest_loss_scale,
)
from optax_lossscale.diagnostics.health import LossScaleStalledError, check_health
from optax_lossscale.diagnostics.logs import NonfiniteCounts, is_stalled, metrics, nonfinite_report
from optax_lossscale.diagnostics.programs.first import FirstNonfinite, first_nonfinite
from optax_lossscale.diagnostics.programs.precision import MatrixProducts, precision_report
from optax_lossscale.diagnostics.programs.search import precision_search
from optax_lossscale.diagnostics.programs.search_result import LineError, PrecisionSearch

__all__ = [
    "FirstNonfinite",
    "GradientExponents",
    "LineError",
    "LossScaleStalledError",
    "MatrixProducts",
    "NonfiniteCounts",
    "PrecisionSearch",
    "check_health",
    "first_nonfinite",
    "gradient_exponents",
    "is_stalled",
    "metrics",
    "nonfinite_report",
    "plot_gradient_exponents",
    "precision_report",
    "precision_search",
    "suggest_loss_scale",
]
