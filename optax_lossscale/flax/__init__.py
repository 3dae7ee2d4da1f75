"""Loss scaling for Flax: a `TrainState` for Linen that skips bad steps.

For `flax.nnx`, pass `with_loss_scaling(...)` to `nnx.Optimizer`.
"""

try:
    from optax_lossscale.flax.train_state import TrainState
except ModuleNotFoundError as _error:
    if _error.name != "flax":
        raise
    raise ModuleNotFoundError(
        '`optax_lossscale.flax` needs Flax, the extra `flax`: `pip install ".[flax]"` in a '
        "checkout.",
        name="flax",
    ) from _error

__all__ = ["TrainState"]
