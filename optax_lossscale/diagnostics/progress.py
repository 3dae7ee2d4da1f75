"""Log how training goes, and let a compiled loop end it."""

import functools
import operator

import jax

from optax_lossscale._state import LossScaleState, loss_scale_state, strongly_typed
from optax_lossscale._step.skip import SkipIfState
from optax_lossscale._support import checks
from optax_lossscale._support.tree import PyTree, leaves_of_type


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Return what is worth logging at every step.

    It copies nothing and does not wait. Call it in the compiled step and return what it
    gives; between two steps it works too, unless the next step is given the state's buffers to
    overwrite (`donate_argnums`).

    Args:
      opt_state: A `LossScaleState`, or an optimizer's state that holds exactly one, or the state
        of `skip_if`, or both.

    Returns:
      `loss_scale` (float32[]), `grads_finite` (bool[], whether the last step was applied),
      `growth_count`, `consecutive_skipped` and `total_skipped` (int32[]). With
      `skip_nonfinite=False` every step is applied unchecked, so `grads_finite` is always true.
      Of `skip_if` alone, `consecutive_skipped` and `total_skipped`; next to a loss scale, these are
      called `skip_if_consecutive_skipped` and `skip_if_total_skipped`.

    Raises:
      ValueError: If `opt_state` holds neither a `LossScaleState` nor a `SkipIfState`, or several
        of a kind.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.update(ols.init(), False, "dynamic")
      >>> for name, value in ols.diagnostics.metrics(state).items():
      ...     print(name, value)
      loss_scale 16384.0
      grads_finite False
      growth_count 0
      consecutive_skipped 1
      total_skipped 1
    """
    skips = skip_counts(opt_state)
    if skips and not any(leaves_of_type(opt_state, LossScaleState)):
        return skips
    state = strongly_typed(loss_scale_state(opt_state))
    return {
        "loss_scale": state.loss_scale,
        "grads_finite": state.consecutive_skipped == 0,
        "growth_count": state.growth_count,
        "consecutive_skipped": state.consecutive_skipped,
        "total_skipped": state.total_skipped,
        **{f"skip_if_{name}": count for name, count in skips.items()},
    }


def is_stalled(opt_state: PyTree, *, max_consecutive_skipped: int = 50) -> jax.Array:
    """Say whether too many steps in a row were skipped, inside a compiled loop.

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
    logged = metrics(opt_state)
    return functools.reduce(
        operator.or_,
        (count > limit for name, count in logged.items() if name.endswith("consecutive_skipped")),
    )


def skip_counts(opt_state: PyTree) -> dict[str, jax.Array]:
    """Return the counts of the one `SkipIfState` in `opt_state`, or nothing if there is none."""
    if not any(leaves_of_type(opt_state, SkipIfState)):
        return {}
    _, state = checks.only_one("opt_state", opt_state, SkipIfState, "Pass the state that is meant.")
    # `flax.nnx` keeps each array in a Variable, which is a pytree of one leaf.
    consecutive, total = jax.tree.leaves(state[1:3])
    return {"consecutive_skipped": consecutive, "total_skipped": total}
