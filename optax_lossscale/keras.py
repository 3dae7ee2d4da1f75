"""Keras' `LossScaleOptimizer` and its arguments, as a chain of Optax transformations.

Everything stands inside `with_loss_scaling`, in the order accumulate, clip, inner optimizer, decay,
average: all of it sees true gradients and stands still on a skipped step. Keras itself is not
needed.
"""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, GetAttrKey

from optax_lossscale._policy import (
    INT32_MAX,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicLossScale,
    FixedLossScale,
)
from optax_lossscale._scaling import AxisName, at_least_float32
from optax_lossscale._transform import with_loss_scaling
from optax_lossscale._tree import PyTree, is_inexact, leaves_of_type, path_name

_SCALE = (numbers.Real, SMALLEST_SCALE, LARGEST_SCALE)
_STEPS = (numbers.Integral, 1, INT32_MAX)
_POSITIVE = (numbers.Real, SMALLEST_SCALE, float(np.finfo(np.float32).max))
_RATE = (numbers.Real, 0, float(np.finfo(np.float32).max))
# The type of each number, and between what it must lie.
_NUMBERS: dict[str, tuple[type[Any], float, float]] = {
    "initial_scale": _SCALE,
    "dynamic_growth_steps": _STEPS,
    "learning_rate": _RATE,
    "weight_decay": _RATE,
    "clipnorm": _POSITIVE,
    "clipvalue": _POSITIVE,
    "global_clipnorm": _POSITIVE,
    "ema_momentum": (numbers.Real, 0, 1),
    "ema_overwrite_frequency": _STEPS,
    "loss_scale_factor": _SCALE,
    "gradient_accumulation_steps": (numbers.Integral, 2, INT32_MAX),
}


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
      ema_params: The average, float32 where the params are of a smaller type, and before the
        first applied step the params that `init` was given. Shapes of the params.
      ema_steps: Applied steps. `int32[]`.
    """

    ema_params: optax.Params
    ema_steps: jax.Array


def loss_scale_optimizer(
    inner_optimizer: optax.GradientTransformation,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
    *,
    dynamic: bool = True,
    learning_rate: float | optax.Schedule | None = None,
    weight_decay: float | None = None,
    clipnorm: float | None = None,
    clipvalue: float | None = None,
    global_clipnorm: float | None = None,
    use_ema: bool = False,
    ema_momentum: float = 0.99,
    ema_overwrite_frequency: int | None = None,
    loss_scale_factor: float | None = None,
    gradient_accumulation_steps: int | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Build Keras' `LossScaleOptimizer` around an Optax optimizer.

    The arguments are those of `keras.optimizers.LossScaleOptimizer` and of the optimizers of Keras,
    and do what they do there. A step is applied when its gradients are finite, and with
    accumulation when it is also the last of its window; only then do clipping, the inner optimizer,
    decay and the average take part, and only such steps are counted.

    Args:
      inner_optimizer: Any Optax optimizer.
      initial_scale: The factor of the first step, 2**15 by default. Must be given, and stays the
        factor, if `dynamic` is false. Bounds of the dynamic factor are 1 and 2**24, or
        `initial_scale` where it lies beyond.
      dynamic_growth_steps: Finite steps in a row after which the factor doubles; 2000 by default.
      dynamic: Whether the factor moves. If false, a step that is not finite is still skipped.
      learning_rate: What `weight_decay` is multiplied by: a number, or a schedule of the number of
        applied steps. By default the inner optimizer's hyper-parameter of this name is read at
        each step, if `optax.inject_hyperparams` injected one. It is not handed to the inner
        optimizer, which has a rate of its own.
      weight_decay: At each applied step, `learning_rate * weight_decay * params` is subtracted from
        the params, besides what the inner optimizer does to them.
      clipnorm: Each leaf of the gradients is scaled down to at most this norm.
      clipvalue: Each element of the gradients is clipped to plus or minus this value.
      global_clipnorm: All gradients together are scaled down to at most this norm.
      use_ema: Whether an average of the params is kept, for `ema_params` to read. It is the params
        after the first applied step, and then
        `ema_momentum * average + (1 - ema_momentum) * params`.
      ema_momentum: How much of the average stays at each step. A number in [0, 1].
      ema_overwrite_frequency: Applied steps after which the average replaces the params, each time.
        It does so through the updates, `average - params`, so that adding them gives the average
        to within rounding: exactly, where the two are within a factor of two of each other and
        XLA fuses nothing, and within two units in the last place of the larger of them always.
      loss_scale_factor: A fixed factor in place of the dynamic one. Nothing is checked, and no step
        is skipped.
      gradient_accumulation_steps: The inner optimizer moves once in so many finite steps, by the
        mean of their gradients. A step that is not finite is dropped alone. The mean is taken in
        float32.
      axis_name: The mapped axis, or a tuple of them, over which all must skip together. See
        `unscale_and_check`.

    Returns:
      What `with_loss_scaling` returns.

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If an argument is out of its bounds, contradicts another or has no effect without
        another; from `init`, if there is `weight_decay` and no rate for it; from `update`, if
        `params` are needed and not given.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> from optax_lossscale.keras import ema_params, loss_scale_optimizer
      >>> tx = loss_scale_optimizer(optax.sgd(0.5), initial_scale=8, clipvalue=1.0, use_ema=True)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> loss, grads = ols.value_and_grad(lambda w: jnp.sum(w**2))(opt_state, params)
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> optax.apply_updates(params, updates)
      Array([0.5, 1.5], dtype=float32)
      >>> ema_params(opt_state)
      Array([0.5, 1.5], dtype=float32)
    """
    given = {name: value for name, value in locals().items() if value is not None}
    _check_each(given)
    _check_together(given)
    tx = inner_optimizer
    if weight_decay is not None:
        tx = _decayed(tx, weight_decay, learning_rate)
    if clipnorm is not None:
        tx = optax.chain(_clip_each_by_norm(clipnorm), tx)
    if clipvalue is not None:
        tx = optax.chain(optax.clip(clipvalue), tx)
    if global_clipnorm is not None:
        tx = optax.chain(optax.clip_by_global_norm(global_clipnorm), tx)
    if use_ema:
        tx = optax.chain(tx, _average_params(ema_momentum, ema_overwrite_frequency))
    if gradient_accumulation_steps is not None:
        tx = _accumulated(tx, int(gradient_accumulation_steps))

    if loss_scale_factor is not None:
        policy = FixedLossScale(loss_scale_factor, skip_nonfinite=False)
    elif not dynamic and initial_scale is not None:
        policy = FixedLossScale(initial_scale)
    else:
        default = DynamicLossScale()
        start = default.initial_scale if initial_scale is None else initial_scale
        policy = DynamicLossScale(
            initial_scale=start,
            growth_interval=dynamic_growth_steps or default.growth_interval,
            min_scale=min(default.min_scale, start),
            max_scale=max(default.max_scale, start),
        )
    return with_loss_scaling(tx, policy, axis_name=axis_name)


def ema_params(opt_state: PyTree) -> PyTree:
    """Return the average of the params that `use_ema=True` keeps.

    Args:
      opt_state: An optimizer's state, or any pytree that holds exactly one such average.

    Returns:
      The average, in the structure and shapes of the params, float32 where they are of a smaller
      type. Before the first applied step it is the params that `init` was given.

    Raises:
      ValueError: If there is none, or more than one. The message says where each was found.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale.keras import ema_params, loss_scale_optimizer
      >>> tx = loss_scale_optimizer(optax.sgd(0.5), use_ema=True)
      >>> ema_params(tx.init({"w": jnp.array([1.0, 2.0])}))
      {'w': Array([1., 2.], dtype=float32)}
    """
    found = list(leaves_of_type(opt_state, EmaParamsState))
    if len(found) != 1:
        where = ", ".join(path_name(path) for path, _ in found) or "nowhere"
        raise ValueError(
            f"`opt_state` must hold exactly one average of the params, got {len(found)} in a "
            f"{type(opt_state).__name__}, found at: {where}. Build the optimizer with "
            "`loss_scale_optimizer(..., use_ema=True)`, or hand in the state that is meant."
        )
    return found[0][1].ema_params


def _clip_each_by_norm(max_norm: float) -> optax.GradientTransformation:
    clip = optax.clip_by_global_norm(max_norm)
    return optax.stateless(
        lambda grads, _: jax.tree.map(lambda grad: clip.update(grad, optax.EmptyState())[0], grads)
    )


def _decayed(
    inner: optax.GradientTransformation,
    weight_decay: float,
    learning_rate: float | optax.Schedule | None,
) -> optax.GradientTransformation:
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> DecayedState:
        inner_state = inner.init(params)
        if learning_rate is None:
            _injected_learning_rate(inner_state)  # an error now rather than at the first step
        return DecayedState(inner_state, jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, DecayedState]:
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        if learning_rate is None:
            # Of the new state, which holds the rate that the inner optimizer has just used.
            rate = _injected_learning_rate(inner_state)
        else:
            rate = learning_rate(state.decay_steps) if callable(learning_rate) else learning_rate
        # Products of small numbers, which float16 would round to zero.
        decay = optax.add_decayed_weights(-at_least_float32(rate) * weight_decay)
        params = jax.tree.map(at_least_float32, _required(params, "weight_decay"))
        updates, _ = decay.update(updates, optax.EmptyState(), params)
        return updates, DecayedState(inner_state, _increment(state.decay_steps))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _injected_learning_rate(inner_state: optax.OptState) -> jax.Array:
    where = (GetAttrKey("hyperparams"), DictKey("learning_rate"))
    leaves = jax.tree_util.tree_leaves_with_path(inner_state)
    found = [(path, leaf) for path, leaf in leaves if path[-2:] == where]
    if len(found) != 1:
        paths = ", ".join(path_name(path) for path, _ in found) or "nowhere"
        raise ValueError(
            "`weight_decay` must have one learning rate to be multiplied by, got no "
            f"`learning_rate` and {len(found)} injected into `inner_optimizer`, found at: {paths}. "
            "Give `learning_rate=`, a number or a schedule, or build the inner optimizer with "
            "`optax.inject_hyperparams(...)(learning_rate=...)`."
        )
    return found[0][1]


def _average_params(
    momentum: float, overwrite_frequency: int | None
) -> optax.GradientTransformation:
    def start(param: Any) -> jax.Array:
        shape_only = isinstance(param, jax.ShapeDtypeStruct)
        value = at_least_float32(jnp.zeros(param.shape, param.dtype) if shape_only else param)
        # A copy, since a buffer that occurs twice cannot be donated; and never weakly typed.
        return jnp.array(value, jnp.result_type(value))

    def init_fn(params: optax.Params) -> EmaParamsState:
        return EmaParamsState(jax.tree.map(start, params), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, EmaParamsState]:
        params = _required(params, "use_ema")
        ema_steps = _increment(state.ema_steps)

        def average(old: jax.Array, param: jax.Array) -> jax.Array:
            param = at_least_float32(param)
            if not is_inexact(param):
                return param
            # Rounded to the array's dtype first, so that the two weights add up to 1: with 0.9999
            # and 0.0001 in float32 the average would come out 2e-4 too small.
            m = jnp.asarray(momentum, old.dtype)
            return jnp.where(state.ema_steps == 0, param, m * old + (1 - m) * param)

        ema = jax.tree.map(average, state.ema_params, optax.apply_updates(params, updates))
        if overwrite_frequency is not None:
            overwrites = ema_steps % overwrite_frequency == 0
            updates = jax.tree.map(
                lambda update, new, old: jnp.where(
                    overwrites, new - at_least_float32(old), at_least_float32(update)
                ),
                updates,
                ema,
                params,
            )
        return updates, EmaParamsState(ema, ema_steps)

    return optax.GradientTransformation(init_fn, update_fn)


def _accumulated(tx: optax.GradientTransformation, steps: int) -> optax.GradientTransformation:
    multi_steps = optax.MultiSteps(tx, every_k_schedule=steps)

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        updates, state = multi_steps.update(updates, state, params, **extra_args)
        # Between its steps MultiSteps returns the inner updates times zero, which is NaN where they
        # are infinite, and 0.0 where adding must not turn -0.0 into 0.0.
        applied = state.mini_step == 0
        updates = jax.tree.map(lambda u: jnp.where(applied, u, -jnp.zeros_like(u)), updates)
        return updates, state

    # `multi_steps.gradient_transformation()` would drop the extra arguments.
    return optax.GradientTransformationExtraArgs(multi_steps.init, update_fn)


def _increment(steps: jax.Array) -> jax.Array:
    return jnp.asarray(optax.safe_increment(steps))


def _required(params: optax.Params | None, argument: str) -> optax.Params:
    if params is None:
        raise ValueError(
            f"`params` must be given to `update` because of `{argument}`, got None. Call "
            "`tx.update(grads, opt_state, params)`."
        )
    return params


def _check_each(given: dict[str, Any]) -> None:
    inner_optimizer = given.get("inner_optimizer")
    if not isinstance(inner_optimizer, optax.GradientTransformation):
        raise TypeError(
            "`inner_optimizer` must be an optax.GradientTransformation, got "
            f"{inner_optimizer!r}. Use Optax's optimizer of that name, for example "
            "`optax.adam(1e-3)`, and `gradient_accumulation_steps` in place of optax.MultiSteps."
        )
    for name in ("dynamic", "use_ema"):
        if not isinstance(given.get(name), bool):
            raise TypeError(f"`{name}` must be True or False, got {given.get(name)!r}.")
    for name, (kind, low, high) in _NUMBERS.items():
        value = given.get(name, None if name == "ema_momentum" else low)
        if name == "learning_rate" and callable(value):
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            expected = "an integer" if kind is numbers.Integral else "a Python number"
            raise TypeError(
                f"`{name}` must be {expected}, got {value!r}. Convert it, or leave it out."
            )
        if not low <= value <= high:
            raise ValueError(
                f"`{name}` must lie between {low} and {high}, got {value}. Change it, or leave it "
                "out."
            )


def _check_together(given: dict[str, Any]) -> None:
    if not given["dynamic"] and not given.keys() & {"initial_scale", "loss_scale_factor"}:
        raise ValueError(
            "`initial_scale` must be given if `dynamic` is False, got None. It is the factor then, "
            "for example 2**15."
        )
    clips = {name: value for name, value in given.items() if "clip" in name}
    if len(clips) > 1:
        raise ValueError(
            "only one of `clipnorm`, `clipvalue` and `global_clipnorm` may be given, got "
            f"{clips}. Leave the others out, or chain another clip into `inner_optimizer`."
        )
    fixed = "loss_scale_factor" in given
    in_vain = {
        "initial_scale": (fixed, "with `loss_scale_factor`", "Leave one of them out"),
        "dynamic_growth_steps": (
            fixed or not given["dynamic"],
            "for a factor that does not move",
            "Leave it out, or let the factor be dynamic",
        ),
        "learning_rate": (
            "weight_decay" not in given,
            "without `weight_decay`, which alone it serves",
            "Give the rate to `inner_optimizer`",
        ),
        "ema_overwrite_frequency": (
            not given["use_ema"],
            "without an average",
            "Set `use_ema=True`, or leave it out",
        ),
    }
    for name, (refused, where, remedy) in in_vain.items():
        if refused and name in given:
            raise ValueError(f"`{name}` must be None {where}, got {given[name]!r}. {remedy}.")
