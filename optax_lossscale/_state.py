"""The state of loss scaling, and finding it inside an optimizer's state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale._tree import PyTree, leaves_of_type, path_name


class LossScaleState(NamedTuple):
    """What loss scaling remembers from one step to the next.

    The state is a pytree of five scalars. Every function of the library takes one and returns
    a new one of the same type, so that it can be carried through `jax.lax.scan`, donated, and
    saved by any checkpointer. The fields are part of the public interface.

    Attributes:
      loss_scale: The factor that the next loss is multiplied by. `float32[]`.
      growth_count: Finite steps in a row since the factor last moved or a step was skipped.
        `int32[]`.
      overflow_count: Overflows counted towards `hysteresis` since it was last refilled.
        `int32[]`.
      consecutive_skipped: Skipped steps in a row; 0 means that the last step was applied.
        `int32[]`.
      total_skipped: Skipped steps since the start. `int32[]`.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.init("dynamic")
      >>> float(state.loss_scale), int(state.total_skipped)
      (32768.0, 0)
    """

    loss_scale: jax.Array
    growth_count: jax.Array
    overflow_count: jax.Array
    consecutive_skipped: jax.Array
    total_skipped: jax.Array


def initial_state(loss_scale: float) -> LossScaleState:
    """Return the state in which nothing has been counted yet."""
    # One buffer for each counter: a buffer that occurs twice cannot be donated.
    return LossScaleState(
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        growth_count=jnp.zeros((), jnp.int32),
        overflow_count=jnp.zeros((), jnp.int32),
        consecutive_skipped=jnp.zeros((), jnp.int32),
        total_skipped=jnp.zeros((), jnp.int32),
    )


def strongly_typed(state: LossScaleState) -> LossScaleState:
    """Return `state` with the dtypes of the contract, also where it holds Python numbers.

    `optax.tree.set(opt_state, loss_scale=1024.0)` stores a Python float. It would be weakly
    typed: float16 next to a float16 loss, and one more compilation.
    """
    if not isinstance(state, LossScaleState):
        raise TypeError(
            f"`state` must be a LossScaleState, got {type(state).__name__}. Find it in an "
            "optimizer's state with `loss_scale_state(opt_state)`."
        )
    loss_scale, *counts = state
    return LossScaleState(
        jnp.asarray(loss_scale, jnp.float32), *(jnp.asarray(n, jnp.int32) for n in counts)
    )


def loss_scale_state(opt_state: PyTree) -> LossScaleState:
    """Find the one `LossScaleState` in an optimizer's state.

    Args:
      opt_state: A `LossScaleState`, or any pytree that holds exactly one, however deep: the state
        of `optax.chain`, `masked`, `partition`, `MultiSteps` or `inject_hyperparams`, a Flax
        TrainState, an `nnx.Optimizer`.

    Returns:
      The state that was found.

    Raises:
      ValueError: If there is none, or more than one. The message says where each was found.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(optax.adam(1e-3), ols.FixedLossScale(1024))
      >>> float(ols.loss_scale_state(tx.init(jnp.ones(3))).loss_scale)
      1024.0
    """
    found = list(leaves_of_type(opt_state, LossScaleState))
    if len(found) != 1:
        where = ", ".join(path_name(path) for path, _ in found) or "nowhere"
        raise ValueError(
            f"`opt_state` must hold exactly one LossScaleState, got {len(found)} in a "
            f"{type(opt_state).__name__}, found at: {where}. Wrap the whole optimizer once with "
            "`with_loss_scaling`, or hand in the state that is meant."
        )
    (_, state) = found[0]
    # flax.nnx keeps each array of an optimizer's state in a Variable, which is a pytree of one
    # leaf; what is returned holds the arrays themselves.
    return LossScaleState(*jax.tree.leaves(state))
