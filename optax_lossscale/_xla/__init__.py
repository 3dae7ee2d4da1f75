"""Faster forms of a step: the same results in fewer passes over memory, for each XLA compiler.

With `enabled = False`, steps are traced in the plain forms of `_guard` and `_loss_scale`. Flags,
counts and the state that a skipped step keeps are the same to the bit. Other results agree up to
the rounding of two different programs. Each file names its compilers and its benefit, and the test
that fails once the file is no longer needed.
"""

from optax_lossscale._xla.finite import all_finite
from optax_lossscale._xla.replay import CannotReplayError, replay

__all__ = ["CannotReplayError", "all_finite", "enabled", "replay"]

enabled = True
