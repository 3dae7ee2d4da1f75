"""Log how training goes, and let a compiled loop end it."""

import jax

from optax_lossscale._state import LossScaleState, loss_scale_state, skip_counts, strongly_typed
from optax_lossscale._support import checks
from optax_lossscale._support.tree import PyTree, leaves_of_type


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Return what is worth logging at every step.

    It copies nothing and does not wait. Call it in the compiled step and return its result; between
    two steps it works too, unless the next step is given the state's buffers to overwrite
    (`donate_argnums`).

    Args:
      opt_state: The state of `with_loss_scaling` or `skip_if`, or any pytree that holds exactly
        one, however deep; or a `LossScaleState`.

    Returns:
      `loss_scale` (float32[]), `applied` (bool[], whether the last step was applied),
      `growth_count`, `consecutive_skipped` and `total_skipped` (int32[]). Of `skip_if`, which has
      no loss scale: `applied` and the two counts of skipped steps.

    Raises:
      ValueError: If `opt_state` holds no such state, or several.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.update(ols.init(), False, "dynamic")
      >>> for name, value in ols.diagnostics.metrics(state).items():
      ...     print(name, value)
      loss_scale 16384.0
      applied False
      growth_count 0
      consecutive_skipped 1
      total_skipped 1
    """
    counts = skip_counts(opt_state)
    is_applied = {"applied": counts["consecutive_skipped"] == 0}
    if not any(leaves_of_type(opt_state, LossScaleState)):
        return is_applied | counts
    state = strongly_typed(loss_scale_state(opt_state))
    return {
        "loss_scale": state.loss_scale,
        **is_applied,
        "growth_count": state.growth_count,
        **counts,
    }


def is_stalled(opt_state: PyTree, *, max_consecutive_skipped: int = 50) -> jax.Array:
    """Return whether too many steps in a row were skipped, inside a compiled loop.

    A loop over steps on the device cannot raise an error, but it can end: test the flag in the
    condition of `jax.lax.while_loop`, or return it from a `jax.lax.scan` and look at it between two
    scans. `check_health` says why.

    Args:
      opt_state: As for `metrics`.
      max_consecutive_skipped: The number of skipped steps in a row that is still healthy.

    Returns:
      Whether more steps in a row were skipped. `bool[]`.

    Raises:
      TypeError: If `max_consecutive_skipped` is not an integer.
      ValueError: If it is negative; and as `metrics`.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.init()
      >>> bool(ols.diagnostics.is_stalled(state._replace(consecutive_skipped=51)))
      True
    """
    limit = checks.count("max_consecutive_skipped", max_consecutive_skipped, least=0)
    return skip_counts(opt_state)["consecutive_skipped"] > limit
