"""The same results in fewer passes over memory: forms of a step that suit XLA's compilers.

With `enabled = False`, steps traced from then on run in the plain forms of `_guard` and
`_loss_scale`, with the same results: flags, counts and kept states to the bit, numbers as far as
XLA rounds two programs alike. Each file says which compiler it is for, what it buys, and which test
fails when it can go.
"""

from optax_lossscale._xla.finite import all_finite
from optax_lossscale._xla.replay import CannotReplayError, replay

__all__ = ["CannotReplayError", "all_finite", "enabled", "replay"]

enabled = True
