"""The state of loss scaling, and finding it inside an optimizer's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._tree import PyTree, is_array, leaves_of_type, path_name

# Outside these bounds the float32 reciprocal of the factor is infinite or subnormal, and XLA
# flushes subnormal numbers to zero: the gradients would vanish.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
INT32_MAX = int(np.iinfo(np.int32).max)


class LossScaleState(NamedTuple):
    """What loss scaling remembers from one step to the next.

    The state is a pytree of five scalars. `update` returns a new one of the same type, so it can be
    carried through `jax.lax.scan`, donated, and saved by any checkpointer. The fields are part of
    the public interface.

    Attributes:
      loss_scale: What the next loss is multiplied by. `float32[]`.
      growth_count: Finite steps in a row since the loss scale last changed or a step was skipped.
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
    return LossScaleState(*map(as_field, state._fields, state))


def as_field(name: str, value: Any) -> jax.Array:
    """Return the field `name` of a state in the dtype of the contract, or raise an error."""
    dtype, kinds, low, high = (
        (jnp.float32, (jnp.floating, jnp.integer), SMALLEST_SCALE, LARGEST_SCALE)
        if name == "loss_scale"
        else (jnp.int32, (jnp.integer,), 0, INT32_MAX)
    )
    kind = value.dtype if is_array(value) else type(value)
    if not any(jnp.issubdtype(kind, each) for each in kinds):
        expected = "a real number" if name == "loss_scale" else "an integer"
        raise TypeError(
            f"`state.{name}` must be {expected}, got {value!r}. Start from `init`, and replace "
            "fields by numbers of the same kind."
        )
    # What an array holds is data: it may be traced, and looking would wait for the device.
    if not is_array(value) and not low <= value <= high:
        raise ValueError(
            f"`state.{name}` must lie between {low:g} and {high:g}, got {value}. Start from "
            "`init`, and replace fields by numbers within."
        )
    return jnp.asarray(value, dtype)


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
    return find_state("opt_state", opt_state)


def find_state(argument: str, tree: PyTree) -> LossScaleState:
    """Return the one `LossScaleState` in `tree`, or raise an error that calls it `argument`."""
    found = list(leaves_of_type(tree, LossScaleState))
    if len(found) != 1:
        where = ", ".join(path_name(path) for path, _ in found) or "nowhere"
        raise ValueError(
            f"`{argument}` must hold exactly one LossScaleState, got {len(found)} in a "
            f"{type(tree).__name__}, found at: {where}. Wrap the whole optimizer once with "
            "`with_loss_scaling`, or hand in the state that is meant."
        )
    path, state = found[0]
    # flax.nnx keeps each array of an optimizer's state in a Variable, which is a pytree of one
    # leaf; what is returned holds the arrays themselves.
    leaves = [jax.tree.leaves(field) for field in state]
    for name, field, arrays in zip(state._fields, state, leaves, strict=True):
        if len(arrays) != 1:
            raise ValueError(
                f"`{argument}` must hold one array as {name} of the LossScaleState at "
                f"{path_name(path)}, got {field!r}. Start from `init`, or complete the state that "
                "was restored."
            )
    return LossScaleState(*(array for (array,) in leaves))
