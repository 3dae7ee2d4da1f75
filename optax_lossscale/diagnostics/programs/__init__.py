"""Questions about a program, which is traced to answer them. Nothing here knows of loss scaling."""

from optax_lossscale.diagnostics.programs.first import FirstNonfinite, first_nonfinite
from optax_lossscale.diagnostics.programs.precision import (
    MatrixProducts,
    format_precision_report,
    precision_report,
)

__all__ = [
    "FirstNonfinite",
    "MatrixProducts",
    "first_nonfinite",
    "format_precision_report",
    "precision_report",
]
