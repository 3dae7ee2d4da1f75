"""The warning about gradients that are divided by the loss scale and were never multiplied by it.

It needs one mark of the process: whether a loss was scaled. Reading the loss scale counts if the
value is traced, as in a jitted loop that multiplies by hand. Read eagerly, it is nearly always
printed.
"""

from typing import Any

from jax.core import Tracer

from optax_lossscale._support.lines import warn


class _Process:
    has_scaled = False


def mark_scaled(*, has_scaled: bool = True) -> None:
    """Mark that this process has scaled a loss. Tests may take the mark back."""
    _Process.has_scaled = has_scaled


def mark_if_traced(loss_scale: Any) -> None:
    """Mark that this process has scaled a loss if it reads the loss scale in a traced function."""
    if isinstance(loss_scale, Tracer):
        mark_scaled()


def warn_if_never_scaled() -> None:
    """Warn, once per process, that gradients are divided although no loss was scaled."""
    if _Process.has_scaled:
        return
    warn(
        "`update` divides gradients by the loss scale, but this process has not scaled a loss so "
        "far. If they are gradients of the loss itself, differentiate with "
        "`value_and_grad(loss_fn)(opt_state, params, ...)`. In a trainer that differentiates by "
        "itself, use `with_skipping` and `autocast(loss_fn, jnp.bfloat16)` or `scale_inside`. If "
        "you multiply by hand, or run an exported function, take `scale_loss(1.0, opt_state)` as "
        "the factor: it is silent."
    )
    mark_scaled()  # not if the warning is turned into an error, so that the next call raises too
