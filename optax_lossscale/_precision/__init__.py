"""Half precision: matrix products, casts, master weights, the state of an optimizer."""
