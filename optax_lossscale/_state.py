"""The states of training, and finding them inside an optimizer's state."""

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from optax_lossscale._support import checks
from optax_lossscale._support.tree import KeyPath, PyTree, children, is_array, path_name, subtrees


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


class Guard(optax.GradientTransformationExtraArgs):
    """An optimizer that decides about each step, and whose state says how: `applied`."""


ONE_GUARD = "`with_loss_scaling(inner, skip_if=rule)` or `with_skipping(inner, skip_if=rule)`"


def refuse_guard(name: str, inner_state: optax.OptState, instead: str = ONE_GUARD) -> None:
    """Refuse the state of an optimizer that decides about steps inside of another that does."""
    for path, _ in subtrees(inner_state, LossScaleState):
        raise ValueError(
            f"`{name}` must not decide about steps itself, got a LossScaleState at "
            f"{path_name(path)} of its state. Use one guard, around the whole optimizer: {instead}."
        )


def initial_state(loss_scale: float) -> LossScaleState:
    """Return a state with all counters at zero."""
    # One buffer for each counter: a buffer that occurs twice cannot be donated.
    counts = (jnp.zeros((), jnp.int32) for _ in LossScaleState._fields[1:])
    return LossScaleState(jnp.asarray(loss_scale, jnp.float32), *counts)


def typed_state(state: LossScaleState) -> LossScaleState:
    """Return `state` with the dtypes of its fields, even if it holds Python numbers.

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
    """Return the field `name` of a state in its dtype."""
    # Array values are not checked: they may be traced, and reading them waits for the device.
    if name == "loss_scale":
        number = value if is_array(value) else checks.scale_number("state.loss_scale", value)
        return jnp.asarray(number, jnp.float32)
    number = value if is_array(value) else checks.count(f"state.{name}", value, least=0)
    return jnp.asarray(number, jnp.int32)


def increment(count: jax.Array) -> jax.Array:
    """Add one, and saturate at the largest int32."""
    return jnp.where(count < checks.INT32_MAX, count + 1, count)


def count_step(new: LossScaleState, old: LossScaleState, applied: jax.Array) -> LossScaleState:
    """Return the state `new` of a policy with the counts of skipped steps after `old`."""
    old = typed_state(old)
    consecutive = jnp.where(applied, 0, increment(old.consecutive_skipped))
    return typed_state(new)._replace(
        consecutive_skipped=consecutive,
        # Read from the other count: XLA:GPU then computes both in one kernel (jaxlib 0.10.2).
        total_skipped=jnp.where(consecutive == 0, old.total_skipped, increment(old.total_skipped)),
    )


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
    return typed_state(loss_scale_state(opt_state)).consecutive_skipped == 0


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
    return find_state("opt_state", opt_state)


def find_state(argument: str, tree: PyTree) -> LossScaleState:
    """Return the one `LossScaleState` in `tree`, or raise an error that calls it `argument`."""
    remedy = "Wrap the whole optimizer with one guard, or pass the state that is meant."
    state = checks.only_one(argument, tree, LossScaleState, remedy)
    # The arrays themselves, without the Variables of flax.nnx.
    return LossScaleState(*jax.tree.leaves(state, is_leaf=lambda leaf: leaf is None))


def scale_in(argument: str, tree: PyTree) -> jax.Array:
    """Return the loss scale of the one state in `tree`, strongly typed. `float32[]`."""
    loss_scale = find_state(argument, tree).loss_scale
    remedy = "Map over the replicas, or take one: `jax.tree.map(lambda x: x[0], state)`."
    checks.scalar(f"{argument}.loss_scale", loss_scale, remedy)
    # It cancels out of every step, and so out of every derivative, also of one that is skipped.
    return jax.lax.stop_gradient(as_field("loss_scale", loss_scale))


# What to write in place of a transformation around the guard, by the type of its state.
_INSIDE = {
    optax.MultiStepsState: "optax.MultiSteps(inner, k)",
    optax.ApplyIfFiniteState: "inner",
    optax.LookaheadState: "optax.lookahead(inner, ...)",
    optax.contrib.ScheduleFreeState: "optax.contrib.schedule_free(inner, ...)",
    optax.InjectHyperparamsState: "optax.inject_hyperparams(inner)(...)",
    optax.InjectStatefulHyperparamsState: "optax.inject_hyperparams(inner)(...)",
}
_CHAINS = (tuple, collections.OrderedDict)  # of `chain` and of `named_chain`


def warn_of_what_stands_outside(opt_state: PyTree) -> None:
    """Warn if a state shows transformations around the guard or beside it."""
    for path, _ in subtrees(opt_state, GuardState):
        if inside := next(_found_outside(opt_state, path), None):
            checks.warn(
                "Transformations stand outside of the guard. If any of them is more than an "
                "identity, it sees scaled gradients, or moves on skipped steps. Write "
                f"`with_loss_scaling({inside})`, or the same with `with_skipping`. To silence "
                "this, pass `loss_scale_state(opt_state)`."
            )
            return


def _found_outside(node: PyTree, path: KeyPath) -> Iterator[str]:
    """Yield what belongs inside of the guard at a path, the outermost first."""
    above, is_one_of_groups = None, False
    for key in path:
        nodes = {own: child for (own,), child in children(node)[0]}
        guarded = nodes.pop(key)
        others = list(nodes.values())
        if type(node) in _INSIDE:
            yield _INSIDE[type(node)]
        elif isinstance(node, optax.MaskedState) and not is_one_of_groups:
            yield "optax.masked(inner, mask)"
        is_one_of_groups = False
        if isinstance(above, optax.MultiTransformState):  # `node` holds the states by label
            is_one_of_groups = True
            if jax.tree.leaves(others):
                yield "optax.partition({label: inner, ...}, labels)"
        elif type(node) in _CHAINS and others and all(map(_is_of_optax, others)):
            masked = [isinstance(state, optax.MaskedState) for state in (guarded, *others)]
            is_one_of_groups = all(masked)
            if jax.tree.leaves(others) or not is_one_of_groups:
                yield "optax.chain(...)"
        above, node = node, guarded


def _is_of_optax(state: Any) -> bool:
    """Return whether a node is the state of a transformation, or of a chain of them."""
    if type(state) in _CHAINS:
        return all(map(_is_of_optax, jax.tree.leaves(state, is_leaf=lambda x: x is not state)))
    return type(state).__module__.startswith("optax")


for _state in (LossScaleState, GuardState, SpikeState):
    _state.__module__ = "optax_lossscale"  # the name in pickles, which outlives that of this file
