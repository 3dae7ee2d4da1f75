"""Loss scaling for Flax: a `TrainState` for Linen that skips bad steps.

For `flax.nnx`, pass `with_loss_scaling(...)` to `nnx.Optimizer`.
"""

from optax_lossscale.flax.train_state import TrainState

__all__ = ["TrainState"]
