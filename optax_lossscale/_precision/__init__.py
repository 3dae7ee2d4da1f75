"""Half precision: matrix products, casts, master weights and optimizer state."""
