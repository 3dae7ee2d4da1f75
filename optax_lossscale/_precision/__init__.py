"""Storing arrays in half precision. Other folders import from here."""

from optax_lossscale._precision.bfloat16_state import with_bfloat16_state
from optax_lossscale._precision.cast import cast
from optax_lossscale._precision.masters import master_weights, with_master_weights
from optax_lossscale._precision.stochastic_rounding import with_stochastic_rounding

__all__ = [
    "cast",
    "master_weights",
    "with_bfloat16_state",
    "with_master_weights",
    "with_stochastic_rounding",
]
