"""What a person asks when training goes wrong.

Which layer overflowed, is the loss scale too small, is the loss itself broken, why does nothing
learn: one function for each. Functions of gradients run inside `jax.jit` and never wait for the
device; functions that answer in words or pictures run on the host.
"""

from optax_lossscale.diagnostics.calibration import calibrate
from optax_lossscale.diagnostics.exponents import (
    GradientExponents,
    gradient_exponents,
    suggest_scale,
)
from optax_lossscale.diagnostics.first import FirstNonfinite, first_nonfinite
from optax_lossscale.diagnostics.health import LossScaleStalledError, check_health, metrics
from optax_lossscale.diagnostics.nonfinite import (
    NonfiniteCounts,
    format_nonfinite_report,
    nonfinite_report,
)
from optax_lossscale.diagnostics.plot import plot_gradient_exponents

__all__ = [
    "FirstNonfinite",
    "GradientExponents",
    "LossScaleStalledError",
    "NonfiniteCounts",
    "calibrate",
    "check_health",
    "first_nonfinite",
    "format_nonfinite_report",
    "gradient_exponents",
    "metrics",
    "nonfinite_report",
    "plot_gradient_exponents",
    "suggest_scale",
]
