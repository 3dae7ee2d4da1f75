"""Bounds of loss scales and counts."""

import numpy as np

# Outside these bounds the float32 reciprocal of the loss scale is infinite or subnormal, and XLA
# flushes subnormal numbers to zero: the gradients would vanish.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
INT32_MAX = int(np.iinfo(np.int32).max)


def as_float32(value: float) -> float:
    """Return `value` rounded to float32."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))
