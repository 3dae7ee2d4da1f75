"""One training step: scale, differentiate, unscale, check, select, and the Optax wrapper."""
