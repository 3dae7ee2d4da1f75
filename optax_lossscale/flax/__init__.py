"""Loss scaling in Flax: Linen's `TrainState` that skips bad steps.

With `flax.nnx`, pass `with_loss_scaling(...)` to `nnx.Optimizer`.
"""

from optax_lossscale.flax.train_state import TrainState

__all__ = ["TrainState"]
