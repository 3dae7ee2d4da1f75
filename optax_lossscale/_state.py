"""Every state of the core that a checkpoint holds, and finding one in any optimizer's state."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale._support import checks
from optax_lossscale._support.bounds import INT32_MAX
from optax_lossscale._support.transformation import Transformation
from optax_lossscale._support.tree import (
    ARRAYS,
    Flag,
    KeyPath,
    PyTree,
    Tree,
    in_dtype,
    path_name,
    some_paths,
)


class _Registered(NamedTuple):
    needed: tuple[str, ...]
    remedy: str


_REGISTERED: dict[type, _Registered] = {}


def public_state(
    module: str = "optax_lossscale", *, needed: tuple[str, ...] = (), remedy: str = ""
) -> Callable[[type[Tree]], type[Tree]]:
    """Register a `NamedTuple` as a state of this library.

    Args:
      module: The module that users import the state from. Pickles refer to it there, so they still
        load after its file has moved.
      needed: The fields that a mapping must have to be read as this state; none if no mapping is.
        Flax's `nnx.split` and `to_state_dict`, and Orbax without a target, make mappings, and may
        leave out fields without arrays.
      remedy: What to do if `find` does not find exactly one.
    """

    def register(state: type[Tree]) -> type[Tree]:
        state.__module__ = module
        _REGISTERED[state] = _Registered(needed, remedy)
        return state

    return register


@public_state(
    needed=("loss_scale", "growth_count", "overflow_count", "consecutive_skipped", "total_skipped"),
    remedy="Wrap the whole optimizer with one guard, or pass the state that is meant.",
)
class LossScaleState(NamedTuple):
    """The state of loss scaling: five scalars. Checkpoints depend on their names and types.

    Attributes:
      loss_scale: The factor that the next loss is multiplied by. `float32[]`.
      growth_count: Steps with finite gradients and loss since the loss scale last changed or a step
        overflowed, whether or not a rule skipped them. A loss that is not finite, until
        `loss_patience` in a row, neither counts nor resets it. `int32[]`.
      overflow_count: Overflows counted towards `hysteresis` since the count was last reset.
        `int32[]`.
      consecutive_skipped: Consecutive skipped steps, for any reason; 0 if the last step was
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


_DTYPES = (jnp.float32, jnp.int32, jnp.int32, jnp.int32, jnp.int32)  # of `LossScaleState`'s fields


@public_state(needed=("loss_scale_state",))
class GuardState(NamedTuple):
    """The state of a guard: `with_loss_scaling` or `with_skipping`.

    Attributes:
      loss_scale_state: The loss scale, which is 1 in `with_skipping`, and the counts of steps.
      rule_states: A tuple with the state of each rule, in the order of `skip_if`.
      inner_state: The inner optimizer's own state, the same as in a plain optimizer's checkpoint.
    """

    loss_scale_state: LossScaleState
    rule_states: tuple[PyTree, ...]
    inner_state: PyTree


class Guard(Transformation[GuardState]):
    """An optimizer that applies or skips each step, as `applied` reads from its state."""

    # How it was made. A copy with another `init` or `update` (`_replace`) does not have it.
    call: str = ""  # pyright: ignore[reportGeneralTypeIssues]

    def __repr__(self) -> str:
        """Return the policy and the rules, which the functions close over."""
        return self.call or super().__repr__()


@public_state(needed=("values", "held", "consecutive_skipped"))
class SpikeState(NamedTuple):
    """The state of a `Spike`.

    Attributes:
      values: The remembered values, the newest last. Unused places are first, and 0.
        `float32[window]`.
      held: How many values are remembered, up to `window`. `int32[]`.
      consecutive_skipped: Consecutive spikes that were skipped. `int32[]`.
    """

    values: jax.Array
    held: jax.Array
    consecutive_skipped: jax.Array


@public_state(
    needed=("master_weights",),
    remedy="Wrap the optimizer with `with_master_weights`, or pass the state that is meant.",
)
class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      master_weights: A tree like the parameters. It has a `float32` array for each float16 or
        bfloat16 parameter (an `int16` array for bfloat16 with `remainders=True`), and
        `optax.MaskedNode()` for every other leaf.
      inner_state: The inner optimizer's state, as it would be for float32 parameters.
    """

    master_weights: PyTree
    inner_state: PyTree


@public_state()
class Bfloat16State(NamedTuple):
    """The state of `with_bfloat16_state`.

    Attributes:
      rounding_count: The number of steps, modulo 2**32. It selects the random bits. `uint32[]`.
      inner_state: The inner optimizer's state, its large float32 arrays in bfloat16.
    """

    rounding_count: jax.Array
    inner_state: PyTree


@public_state()
class StochasticRoundingState(NamedTuple):
    """The state of `with_stochastic_rounding`.

    Attributes:
      rounding_count: The number of steps, modulo 2**32. It selects the random bits. `uint32[]`.
      inner_state: The inner optimizer's state, as it would be for float32 parameters.
    """

    rounding_count: jax.Array
    inner_state: PyTree


def initial_state(loss_scale: float) -> LossScaleState:
    """Return a state with all counters at zero."""
    # One buffer for each counter: a buffer that occurs twice cannot be donated.
    zeros = LossScaleState(*(jnp.zeros((), dtype) for dtype in _DTYPES))
    return zeros._replace(loss_scale=jnp.asarray(loss_scale, jnp.float32))


def increment(count: jax.Array) -> jax.Array:
    """Add one, and saturate at the largest int32."""
    return jnp.where(count < INT32_MAX, count + 1, count)


def count_step(new: LossScaleState, old: LossScaleState, applied: Flag) -> LossScaleState:
    """Return a policy's `new` state, with the counts of skipped steps one step after `old`."""
    return new._replace(
        consecutive_skipped=jnp.where(applied, 0, increment(old.consecutive_skipped)),
        total_skipped=jnp.where(applied, old.total_skipped, increment(old.total_skipped)),
    )


def typed(state: LossScaleState) -> LossScaleState:
    """Return the state with each field as an array of its dtype, even if it holds Python numbers.

    `optax.tree.set(opt_state, loss_scale=1024.0)` stores a Python float. It would be weakly typed:
    float16 next to a float16 loss, and one more compilation.
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


def loss_scale_of(state: LossScaleState) -> jax.Array:
    """Return the loss scale, which is constant in every derivative. `float32[]`."""
    remedy = "Map over the replicas, or take one: `jax.tree.map(lambda x: x[0], state)`."
    checks.require_scalar("state.loss_scale", state.loss_scale, remedy)
    # It cancels out of every step, including skipped ones, and so out of every derivative.
    return jax.lax.stop_gradient(state.loss_scale)


def applied(opt_state: PyTree) -> jax.Array:
    """Return whether the last step was applied.

    Use it to keep everything else that a skipped step must not change, such as BatchNorm statistics
    or an average of the parameters: `tree_where(applied(opt_state), new, old)`.

    Args:
      opt_state: The state after the step, in any form that `loss_scale_state` takes.

    Returns:
      False if the step was skipped, because of its gradients, its loss or a rule. True before the
      first step. `bool[]`, or with the axes of a batched state, as `jax.vmap` returns.

    Raises:
      ValueError: Under the same conditions as in `loss_scale_state`.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
      >>> opt_state = tx.init(jnp.ones(3))
      >>> for x in (1.0, jnp.inf):
      ...     grads = ols.grad(lambda w: jnp.sum(w * x))(opt_state, jnp.ones(3))
      ...     _, opt_state = tx.update(grads, opt_state)
      ...     print(ols.applied(opt_state))
      True
      False
    """
    return _is_zero(find(LossScaleState, "opt_state", opt_state).consecutive_skipped)


@functools.partial(jax.jit, inline=True)  # op by op, the 0 would be copied to the device
def _is_zero(count: jax.Array) -> jax.Array:
    return count == 0


def find(kind: type[Tree], argument: str, tree: PyTree, order: str = "") -> Tree:
    """Return the only state of a type in `tree`, or raise an error that names `argument`.

    The error also says what `order` the arguments have.
    """
    found = list(subtrees(tree, kind))
    if len(found) != 1:
        paths = some_paths([path for path, _ in found])
        where = f", found at: {paths}" if found else ""
        remedy = next(_incomplete(kind, tree), _REGISTERED[kind].remedy)
        raise ValueError(
            f"`{argument}` must hold exactly one {kind.__name__}, got {len(found)} in a "
            f"{type(tree).__name__}{where}. {' '.join(filter(None, [remedy, order]))}"
        )
    ((_, state),) = found
    if kind is LossScaleState:
        # Their leaves are arrays, even if flax.nnx has wrapped each field in a Variable.
        leaves = jax.tree.leaves(state, is_leaf=lambda leaf: leaf is None)
        state: Any = typed(LossScaleState(*leaves))
    return state


def subtrees(tree: PyTree, *kinds: type[Tree]) -> Iterator[tuple[KeyPath, Tree]]:
    """Yield every sub-tree that is a NamedTuple of one of these types, with its path."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: bool(read_as(kinds, x)))
    return ((path, sub) for path, node in found if (sub := read_as(kinds, node)))


def read_as(kinds: tuple[type[Any], ...], node: PyTree) -> Any:
    """Return a node as a NamedTuple of one of these types, or None if it is not one."""
    if isinstance(node, kinds):
        return node
    for kind in kinds if isinstance(node, Mapping) else ():
        needed = _REGISTERED[kind].needed if kind in _REGISTERED else ()
        if needed and {*needed} <= node.keys() <= {*kind._fields}:
            return kind(**dict.fromkeys(kind._fields, ()) | dict(node))
    return None


def _incomplete(kind: type[Any], tree: PyTree) -> Iterator[str]:
    """Yield what to do about each mapping that lacks a field, as an older checkpoint may."""
    fields, needed = kind._fields, _REGISTERED[kind].needed

    def is_some(node: PyTree) -> bool:
        return isinstance(node, Mapping) and fields[0] in node and node.keys() <= {*fields}

    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_some):
        missing = [name for name in needed if name not in node] if is_some(node) else []
        if missing:
            yield (
                f"The one at {path_name(path)} lacks the field `{missing[0]}`: add its initial "
                "value."
            )
