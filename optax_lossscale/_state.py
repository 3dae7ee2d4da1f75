"""Every state that a checkpoint holds, and finding one in any optimizer's state."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._support import checks
from optax_lossscale._support.bounds import INT32_MAX, LARGEST_SCALE, SMALLEST_SCALE
from optax_lossscale._support.tree import (
    ARRAYS,
    Flag,
    KeyPath,
    PyTree,
    Tree,
    in_dtype,
    path_name,
)


class LossScaleState(NamedTuple):
    """The state of loss scaling: five scalars, whose names and types checkpoints depend on.

    Attributes:
      loss_scale: The number that the next loss is multiplied by. `float32[]`.
      growth_count: Steps in a row whose gradients and loss were finite, since the loss scale last
        moved, whether a rule skipped them or not. `int32[]`.
      overflow_count: Overflows towards `hysteresis` since it was last refilled. `int32[]`.
      consecutive_skipped: Skipped steps in a row, for any reason; 0 means that the last step was
        applied. `int32[]`.
      total_skipped: Skipped steps since the start, for any reason. `int32[]`.

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


class GuardState(NamedTuple):
    """The state of a guard: `with_loss_scaling`, or `with_skipping`.

    Attributes:
      loss_scale_state: The loss scale, which is 1 in `with_skipping`, and the counts of steps.
      rule_states: A tuple with the state of each rule, in the order in which they were given.
      inner_state: The inner optimizer's own state: a plain optimizer's checkpoint goes in and out.
    """

    loss_scale_state: LossScaleState
    rule_states: tuple[PyTree, ...]
    inner_state: optax.OptState


class SpikeState(NamedTuple):
    """The state of a `Spike`.

    Attributes:
      values: The remembered values, the newest last, after zeros. `float32[window]`.
      held: The number of values, up to `window`. `int32[]`.
      consecutive_skipped: Spikes in a row that were skipped. `int32[]`.
    """

    values: jax.Array
    held: jax.Array
    consecutive_skipped: jax.Array


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      master_weights: A tree like the parameters: `float32` arrays for those in float16 and
        bfloat16, with `remainders=True` `int16` arrays for those in bfloat16, and
        `optax.MaskedNode()` for all others.
      inner_state: The inner optimizer's state, as it would be for float32 parameters.
    """

    master_weights: PyTree
    inner_state: optax.OptState


class Bfloat16State(NamedTuple):
    """The state of `with_bfloat16_state`.

    Attributes:
      rounding_count: Steps, modulo 2**32, which choose the random bits. `uint32[]`.
      inner_state: The inner optimizer's state, its large float32 arrays in bfloat16.
    """

    rounding_count: jax.Array
    inner_state: optax.OptState


class StochasticRoundingState(NamedTuple):
    """The state of `with_stochastic_rounding`.

    Attributes:
      rounding_count: Steps, modulo 2**32, which choose the random bits. `uint32[]`.
      inner_state: The inner optimizer's state, as it would be for float32 parameters.
    """

    rounding_count: jax.Array
    inner_state: optax.OptState


class DecayedState(NamedTuple):
    """The state of an optimizer with decoupled weight decay.

    Attributes:
      inner_state: The optimizer's own state.
      decay_steps: Applied steps, which a schedule of the rate counts. `int32[]`.
    """

    inner_state: optax.OptState
    decay_steps: jax.Array


class EmaParamsState(NamedTuple):
    """The moving average of the parameters.

    Attributes:
      ema_params: The average, as `ema_params(opt_state)` returns it.
      ema_steps: Applied steps. `int32[]`.
    """

    ema_params: optax.Params
    ema_steps: jax.Array


# The names in pickles are those under which states are imported, and outlive a move of this file.
for _state in (
    *(LossScaleState, GuardState, SpikeState),
    *(MasterWeightsState, Bfloat16State, StochasticRoundingState),
):
    _state.__module__ = "optax_lossscale"
for _state in (DecayedState, EmaParamsState):
    _state.__module__ = "optax_lossscale.keras"

# The fields that a mapping must hold. Flax's `nnx.split` and `to_state_dict`, and Orbax without a
# target, make mappings, and may leave out fields that hold no arrays.
_NEEDED: dict[type[Any], tuple[str, ...]] = {
    LossScaleState: LossScaleState._fields,
    GuardState: ("loss_scale_state",),
    SpikeState: SpikeState._fields,
    MasterWeightsState: ("master_weights",),
    EmaParamsState: EmaParamsState._fields,
}
_REMEDIES: dict[type[Any], str] = {
    LossScaleState: (
        "Wrap the whole optimizer with one guard, or pass the state that is meant: the optimizer's "
        "state comes first, before the parameters."
    ),
    MasterWeightsState: (
        "Wrap the optimizer with `with_master_weights`, or pass the state that is meant."
    ),
    EmaParamsState: "Build the optimizer with `use_ema=True`, or pass the state that is meant.",
}


def initial_state(loss_scale: float) -> LossScaleState:
    """Return a state with all counters at zero."""
    # One buffer for each counter: a buffer that occurs twice cannot be donated.
    counts = (jnp.zeros((), jnp.int32) for _ in LossScaleState._fields[1:])
    return LossScaleState(jnp.asarray(loss_scale, jnp.float32), *counts)


def increment(count: jax.Array) -> jax.Array:
    """Add one, and saturate at the largest int32."""
    return jnp.where(count < INT32_MAX, count + 1, count)


def count_step(new: LossScaleState, old: LossScaleState, applied: Flag) -> LossScaleState:
    """Return the state `new` of a policy with the counts of skipped steps after `old`."""
    return new._replace(
        consecutive_skipped=jnp.where(applied, 0, increment(old.consecutive_skipped)),
        total_skipped=jnp.where(applied, old.total_skipped, increment(old.total_skipped)),
    )


def typed(state: LossScaleState) -> LossScaleState:
    """Return a state whose fields are arrays of their dtypes, also if it holds Python numbers.

    `optax.tree.set(opt_state, loss_scale=1024.0)` stores a Python float. It would be weakly
    typed: float16 next to a float16 loss, and one more compilation.
    """
    remedy = "Find it in an optimizer's state with `loss_scale_state(opt_state)`."
    checks.read_state(state, LossScaleState, remedy=remedy)

    for name, value in state._asdict().items():
        # Array values are not checked: they may be traced, and reading them waits for the device.
        if isinstance(value, (*ARRAYS, jax.ShapeDtypeStruct)):
            continue
        if name == "loss_scale":
            checks.read_scale(f"state.{name}", value)
        else:
            checks.read_count(f"state.{name}", value, least=0)
    return LossScaleState(*map(in_dtype, state, _DTYPES))


_DTYPES = (jnp.float32, jnp.int32, jnp.int32, jnp.int32, jnp.int32)


def loss_scale_of(state: LossScaleState, argument: str = "state") -> jax.Array:
    """Return the loss scale, which is constant in every derivative. `float32[]`."""
    remedy = "Map over the replicas, or take one: `jax.tree.map(lambda x: x[0], state)`."
    checks.require_scalar(f"{argument}.loss_scale", state.loss_scale, remedy)
    # It cancels out of every step, and so out of every derivative, also of one that is skipped.
    return jax.lax.stop_gradient(state.loss_scale)


def applied(opt_state: PyTree) -> jax.Array:
    """Return whether the last step was applied.

    With it, all else that a step changes, such as BatchNorm statistics or an average of the
    parameters, stays as it was on a skipped step: `tree_where(applied(opt_state), new, old)`.

    Args:
      opt_state: The state after the step, in any form that `loss_scale_state` takes.

    Returns:
      False if the step was skipped, because of its gradients, its loss or a rule. True before the
      first step. `bool[]`; of a state with further axes, as under `jax.vmap`, one for each member.

    Raises:
      ValueError: As `loss_scale_state`.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
      >>> opt_state = tx.init(jnp.ones(3))
      >>> for grads in (jnp.ones(3), jnp.full(3, jnp.inf)):
      ...     _, opt_state = tx.update(grads, opt_state)
      ...     print(ols.applied(opt_state))
      True
      False
    """
    return loss_scale_state(opt_state).consecutive_skipped == 0


def loss_scale_state(opt_state: PyTree) -> LossScaleState:
    """Find the one `LossScaleState` in an optimizer's state.

    Args:
      opt_state: A `LossScaleState`, or any pytree that holds exactly one, however deep: the state
        of `with_loss_scaling` or `with_skipping`, alone or in that of `optax.chain`, `masked`,
        `partition`, `MultiSteps` or `inject_hyperparams`, a Flax TrainState, an `nnx.Optimizer`.
        It may be a mapping of the fields, as `nnx.split` and Orbax without a target make it.

    Raises:
      ValueError: If there is none, or more than one. The message says where each was found.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(optax.adam(1e-3), ols.FixedLossScale(1024))
      >>> float(ols.loss_scale_state(tx.init(jnp.ones(3))).loss_scale)
      1024.0
    """
    return find(LossScaleState, "opt_state", opt_state)


def find(kind: type[Tree], argument: str, tree: PyTree) -> Tree:
    """Return the one state of a kind in `tree`, typed, or raise an error that names `argument`."""
    found = list(subtrees(tree, kind))
    if len(found) != 1:
        where = ", ".join(path_name(path) for path, _ in found) or "nowhere"
        remedy = next(_incomplete(kind, tree), _REMEDIES[kind])
        raise ValueError(
            f"`{argument}` must hold exactly one {kind.__name__}, got {len(found)} in a "
            f"{type(tree).__name__}, found at: {where}. {remedy}"
        )
    ((_, state),) = found
    if kind is LossScaleState:
        # The arrays themselves, without the Variables of flax.nnx.
        leaves = jax.tree.leaves(state, is_leaf=lambda leaf: leaf is None)
        state: Any = typed(LossScaleState(*leaves))
    return state


def subtrees(tree: PyTree, *kinds: type[Tree]) -> Iterator[tuple[KeyPath, Tree]]:
    """Yield every sub-tree that is of one of these NamedTuples, with its path."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: bool(read_as(kinds, x)))
    return ((path, sub) for path, node in found if (sub := read_as(kinds, node)))


def read_as(kinds: tuple[type[Any], ...], node: Any) -> Any:
    """Return a node as a NamedTuple of one of these, or None if it is none."""
    if isinstance(node, kinds):
        return node
    for kind in kinds if isinstance(node, Mapping) else ():
        if {*_NEEDED.get(kind, ("",))} <= node.keys() <= {*kind._fields}:
            return kind(**dict.fromkeys(kind._fields, ()) | dict(node))
    return None


def _incomplete(kind: type[Any], tree: PyTree) -> Iterator[str]:
    """Yield what to do about each mapping that lacks a field, as an older checkpoint may."""
    fields = kind._fields

    def is_some(node: Any) -> bool:
        return isinstance(node, Mapping) and fields[0] in node and node.keys() <= {*fields}

    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_some):
        if is_some(node):
            missing = next(name for name in _NEEDED[kind] if name not in node)
            yield (
                f"The one at {path_name(path)} lacks the field `{missing}`: add its initial value."
            )


def spike_statistics(state: SpikeState) -> tuple[jax.Array, jax.Array]:
    """Return the mean and the standard deviation of the values that a `Spike` remembers.

    Both are 0 before the first. `float32[]`.
    """
    if state.held.ndim:  # as under `jax.vmap`
        return jax.vmap(spike_statistics)(state)
    mean, deviation, magnitude = relative_statistics(repaired(state))
    return mean * magnitude, deviation * magnitude


def repaired(state: SpikeState) -> SpikeState:
    """Return the state with a count within the window, and zeros for what is not held."""
    held = jnp.clip(state.held, 0, state.values.size)
    values = jnp.where(_is_held(state._replace(held=held)), state.values, 0)
    return state._replace(values=values, held=held)


def _is_held(state: SpikeState) -> jax.Array:
    """Return which places of the window hold a value."""
    window = state.values.size
    return jnp.arange(window, dtype=jnp.int32) >= window - state.held


def relative_statistics(state: SpikeState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the mean and the deviation of the values, relative to a magnitude, and that."""
    # Relative to the largest, since the squares of 1e-20 and 1e30 do not fit a float32.
    largest = jnp.max(jnp.abs(state.values))
    magnitude = jnp.clip(largest, SMALLEST_SCALE, LARGEST_SCALE)
    relative = state.values / magnitude
    n = jnp.maximum(state.held, 1).astype(jnp.float32)
    mean = jnp.sum(relative) / n
    squares = jnp.where(_is_held(state), (relative - mean) ** 2, 0)
    return mean, jnp.sqrt(jnp.sum(squares) / n), magnitude
