"""Running the matrix products of a function in half precision. Other folders import from here."""

from optax_lossscale._autocast.autocast import autocast, autocast_except
from optax_lossscale._autocast.edits import is_move, propagated
from optax_lossscale._autocast.inside import refuse_hidden_storage
from optax_lossscale._autocast.matrix_products import Product, products_of, total_flops
from optax_lossscale._autocast.what_is_cast import AUTOCAST_SCOPE

__all__ = [
    "AUTOCAST_SCOPE",
    "Product",
    "autocast",
    "autocast_except",
    "is_move",
    "products_of",
    "propagated",
    "refuse_hidden_storage",
    "total_flops",
]
