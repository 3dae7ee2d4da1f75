"""Which wrappers may contain which, read from the state. Other folders import from here."""

from optax_lossscale._order.inside import (
    refuse_changed_updates,
    refuse_masters_inside,
    refuse_second_guard,
    refuse_state_of_parameters,
    refuse_two_for_parameters,
    warn_of_half_precision,
)
from optax_lossscale._order.outside import warn_of_outside

__all__ = [
    "refuse_changed_updates",
    "refuse_masters_inside",
    "refuse_second_guard",
    "refuse_state_of_parameters",
    "refuse_two_for_parameters",
    "warn_of_half_precision",
    "warn_of_outside",
]
