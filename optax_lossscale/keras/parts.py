"""Parts of Keras' optimizers that work differently in Optax, and their states."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, GetAttrKey

from optax_lossscale._state import increment, public_state
from optax_lossscale._support.tree import Leaf, PyTree, at_least_float32, is_inexact, path_name


def clipped_each(max_norm: float) -> optax.GradientTransformation:
    """Return a transformation that scales down each leaf whose norm exceeds `max_norm`."""
    clip = optax.clip_by_global_norm(max_norm)
    return optax.stateless(
        lambda grads, _: jax.tree.map(lambda grad: clip.update(grad, optax.EmptyState())[0], grads)
    )


@public_state("optax_lossscale.keras")
class DecayedState(NamedTuple):
    """The state of an optimizer with decoupled weight decay.

    Attributes:
      inner_state: The optimizer's own state.
      decay_steps: The number of applied steps, which a schedule of the rate counts. `int32[]`.
    """

    inner_state: PyTree
    decay_steps: jax.Array


def decayed(
    inner: optax.GradientTransformationExtraArgs,
    weight_decay: float,
    learning_rate: float | optax.Schedule | None,
) -> optax.GradientTransformation:
    """Return `inner` with decoupled weight decay at `learning_rate`."""

    def init_fn(params: optax.Params) -> DecayedState:
        inner_state = inner.init(params)
        if learning_rate is None:
            _injected_learning_rate(inner_state)  # raise now, not at the first step
        return DecayedState(inner_state, jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, DecayedState]:
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        if learning_rate is None:
            # The new state holds the rate that the inner optimizer has just used.
            rate = _injected_learning_rate(inner_state)
        else:
            rate = learning_rate(state.decay_steps) if callable(learning_rate) else learning_rate
        # In float32: float16 would round the product of two small numbers to zero.
        decay = optax.add_decayed_weights(-at_least_float32(rate) * weight_decay)
        params = jax.tree.map(at_least_float32, params)
        updates, _ = decay.update(updates, optax.EmptyState(), params)
        return updates, DecayedState(inner_state, increment(state.decay_steps))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _injected_learning_rate(inner_state: optax.OptState) -> jax.Array:
    where = (GetAttrKey("hyperparams"), DictKey("learning_rate"))
    leaves = jax.tree_util.tree_leaves_with_path(inner_state)
    found = [(path, leaf) for path, leaf in leaves if path[-2:] == where]
    if len(found) != 1:
        paths = ", ".join(path_name(path) for path, _ in found) or "nowhere"
        raise ValueError(
            "`weight_decay` must have one learning rate to be multiplied by, got "
            f"{len(found)} injected into `inner_optimizer`, found at: {paths}. Give "
            "`learning_rate=`, or inject one: `optax.inject_hyperparams(...)(learning_rate=...)`."
        )
    return found[0][1]


@public_state(
    "optax_lossscale.keras",
    needed=("ema_params", "ema_steps"),
    remedy="Build the optimizer with `use_ema=True`, or pass the state that is meant.",
)
class EmaParamsState(NamedTuple):
    """The moving average of the parameters.

    Attributes:
      ema_params: The average, as `ema_params(opt_state)` returns it.
      ema_steps: The number of applied steps. `int32[]`.
    """

    ema_params: PyTree
    ema_steps: jax.Array


def averaged(momentum: float, overwrite_frequency: int | None) -> optax.GradientTransformation:
    """Return a transformation that keeps a moving average of the parameters."""

    def initial_average(param: Leaf) -> jax.Array:
        if isinstance(param, jax.ShapeDtypeStruct):
            param = jnp.zeros(param.shape, param.dtype)
        value = at_least_float32(param)
        # Copy, since a buffer that occurs twice cannot be donated. The copy is strongly typed.
        return jnp.array(value, jnp.result_type(value))

    def init_fn(params: optax.Params) -> EmaParamsState:
        return EmaParamsState(jax.tree.map(initial_average, params), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree, state: PyTree, params: optax.Params | None = None
    ) -> tuple[optax.Updates, EmaParamsState]:
        if params is None:
            raise ValueError("`params` must be given to `update` because of `use_ema`.")
        ema_steps = increment(state.ema_steps)

        def average(old: jax.Array, param: jax.Array) -> jax.Array:
            param = at_least_float32(param)
            if not is_inexact(param):
                return param
            # Round the momentum before subtracting it from 1, so that the two weights add up to 1.
            # With 0.9999 and 0.0001 each rounded to float32, the average would be 2e-4 too small.
            m = jnp.asarray(momentum, old.dtype)
            return jnp.where(state.ema_steps == 0, param, m * old + (1 - m) * param)

        ema = jax.tree.map(average, state.ema_params, optax.apply_updates(params, updates))
        if overwrite_frequency is not None:
            overwrites = ema_steps % overwrite_frequency == 0

            def overwritten(update: Leaf, new: Leaf, old: Leaf) -> jax.Array:
                update, old = at_least_float32(update), at_least_float32(old)
                return jnp.where(overwrites, new - old, update)

            updates = jax.tree.map(overwritten, updates, ema, params)
        return updates, EmaParamsState(ema, ema_steps)

    return optax.GradientTransformation(init_fn, update_fn)


def accumulated(tx: optax.GradientTransformation, steps: int) -> optax.GradientTransformation:
    """Return `tx`, updated once in `steps` steps, with the mean of their gradients."""
    multi_steps = optax.MultiSteps(tx, every_k_schedule=steps)

    def update_fn(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        updates, state = multi_steps.update(updates, state, params, **extra_args)
        # Between its steps, MultiSteps (Optax 0.2.8) multiplies the inner updates by zero. The
        # product of an infinite update is NaN, and adding 0.0 would turn a parameter of -0.0 into
        # 0.0.
        applied = state.mini_step == 0
        updates = jax.tree.map(lambda u: jnp.where(applied, u, -jnp.zeros_like(u)), updates)
        return updates, state

    return optax.GradientTransformationExtraArgs(multi_steps.init, update_fn)
