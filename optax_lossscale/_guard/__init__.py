"""The guards around an optimizer, and their rules. Other folders import from here."""

from optax_lossscale._guard.guard import with_loss_scaling, with_skipping
from optax_lossscale._guard.rules import Rule, SkipIf, Spike, spike_statistics, spikes_in

__all__ = [
    "Rule",
    "SkipIf",
    "Spike",
    "spike_statistics",
    "spikes_in",
    "with_loss_scaling",
    "with_skipping",
]
