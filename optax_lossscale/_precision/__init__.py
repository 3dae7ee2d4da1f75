"""Casting, and storing in half precision. Other folders import from here."""

from optax_lossscale._precision.autocast import autocast, autocast_except
from optax_lossscale._precision.bfloat16_state import with_bfloat16_state
from optax_lossscale._precision.cast import cast
from optax_lossscale._precision.masters import master_weights, with_master_weights
from optax_lossscale._precision.matrix_products import Product, products_of, total_flops
from optax_lossscale._precision.rule import AUTOCAST_SCOPE
from optax_lossscale._precision.stochastic_rounding import with_stochastic_rounding

__all__ = [
    "AUTOCAST_SCOPE",
    "Product",
    "autocast",
    "autocast_except",
    "cast",
    "master_weights",
    "products_of",
    "total_flops",
    "with_bfloat16_state",
    "with_master_weights",
    "with_stochastic_rounding",
]
