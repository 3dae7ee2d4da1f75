"""Training in half precision for JAX, around any Optax optimizer: small, exact, functional."""

import typing as _typing

from optax_lossscale import diagnostics, testing
from optax_lossscale._autocast import autocast
from optax_lossscale._guard import Rule, Spike, with_loss_scaling, with_skipping
from optax_lossscale._loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    LossScaleLike,
    all_finite,
    as_loss_scale,
    grad,
    init,
    loss_scale_state,
    scale_inside,
    scale_loss,
    unscale_and_check,
    update,
    value_and_grad,
)
from optax_lossscale._precision import (
    cast,
    master_weights,
    with_bfloat16_state,
    with_master_weights,
    with_stochastic_rounding,
)
from optax_lossscale._state import (
    Bfloat16State,
    GuardState,
    LossScaleState,
    MasterWeightsState,
    SpikeState,
    StochasticRoundingState,
    applied,
)
from optax_lossscale._support.choose import tree_where

__version__ = "0.1.0"

__all__ = [
    "Bfloat16State",
    "DynamicLossScale",
    "FixedLossScale",
    "GuardState",
    "LossScale",
    "LossScaleLike",
    "LossScaleState",
    "MasterWeightsState",
    "Rule",
    "Spike",
    "SpikeState",
    "StochasticRoundingState",
    "all_finite",
    "applied",
    "as_loss_scale",
    "autocast",
    "cast",
    "diagnostics",
    "grad",
    "init",
    "loss_scale_state",
    "master_weights",
    "scale_inside",
    "scale_loss",
    "testing",
    "tree_where",
    "unscale_and_check",
    "update",
    "value_and_grad",
    "with_bfloat16_state",
    "with_loss_scaling",
    "with_master_weights",
    "with_skipping",
    "with_stochastic_rounding",
]

# For a type checker, each name that is not in this module stays an error.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Raise an error that names what is called so elsewhere."""
        here = {
            "GradScaler": "It is `with_loss_scaling(optimizer)` here.",
            "LossScaleOptimizer": "It is `with_loss_scaling(optimizer)` here.",
            "DynamicScale": "It is `with_loss_scaling(optimizer)` here.",
            "flax": "Import it: `import optax_lossscale.flax`.",
            "keras": "Import it: `import optax_lossscale.keras`.",
        }
        remedy = f". {here[name]}" if name in here else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}")
