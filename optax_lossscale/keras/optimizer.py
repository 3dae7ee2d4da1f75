"""Keras' `LossScaleOptimizer` with its arguments, as a chain of Optax transformations."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from optax_lossscale._guard import with_loss_scaling
from optax_lossscale._loss_scale import DynamicLossScale, FixedLossScale
from optax_lossscale._state import Guard, find
from optax_lossscale._support import checks
from optax_lossscale._support.bounds import SMALLEST_SCALE
from optax_lossscale._support.tree import AxisName, PyTree, shown
from optax_lossscale.keras import parts


def loss_scale_optimizer(
    inner_optimizer: optax.GradientTransformation,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
    *,
    name: str | None = None,
    dynamic: bool | None = True,
    learning_rate: float | optax.Schedule | None = None,
    weight_decay: float | None = None,
    clipnorm: float | None = None,
    clipvalue: float | None = None,
    global_clipnorm: float | None = None,
    use_ema: bool | None = False,
    ema_momentum: float | None = 0.99,
    ema_overwrite_frequency: int | None = None,
    loss_scale_factor: float | None = None,
    gradient_accumulation_steps: int | None = None,
    axis_name: AxisName | None = None,
) -> Guard:
    """Build Keras' `LossScaleOptimizer` around an Optax optimizer.

    The arguments mean the same as in `keras.optimizers.LossScaleOptimizer` and Keras' optimizers. A
    step is applied if its gradients are finite and, with accumulation, if it is the last of its
    window. Other steps change neither the inner optimizer nor the average, and are not counted.

    Args:
      inner_optimizer: Any Optax optimizer.
      initial_scale: The loss scale of the first step, 2**15 by default. If `dynamic` is false, it
        is required, and the loss scale never changes. Otherwise, the loss scale stays between 1 and
        2**24. An `initial_scale` outside of these bounds replaces the nearer one.
      dynamic_growth_steps: The number of consecutive finite steps after which the loss scale
        doubles, 2000 by default.
      name: A string. It is accepted because Keras and R pass one, and ignored.
      dynamic: Whether the loss scale changes. If false, nonfinite steps are still skipped.
      learning_rate: The learning rate of the weight decay: a number, or a schedule of the number of
        applied steps. By default, the hyper-parameter `learning_rate` of the inner optimizer, if
        `optax.inject_hyperparams` injected one. It is not passed to the inner optimizer.
      weight_decay: At each applied step, `learning_rate * weight_decay * params` is subtracted from
        the params, in addition to the inner optimizer's update.
      clipnorm: The maximum norm of each leaf of the gradients. Larger leaves are scaled down.
      clipvalue: The maximum magnitude of each element of the gradients. Larger ones are clipped.
      global_clipnorm: The maximum norm of all gradients together. Larger ones are scaled down.
      use_ema: Whether to keep an average of the params, which `ema_params` reads. It starts as the
        params after the first applied step. Each later one sets it to `ema_momentum * average +
        (1 - ema_momentum) * params`.
      ema_momentum: The weight of the old average, from 0 to 1.
      ema_overwrite_frequency: The number of applied steps between two replacements of the params
        by the average. The new params then differ from the average by at most two units in the last
        place of the larger of the average and the old params.
      loss_scale_factor: A fixed loss scale without any check, so that no step is skipped.
      gradient_accumulation_steps: The number of finite steps for each update of the inner
        optimizer. It is given the mean of their gradients, computed in float32.
      axis_name: The mapped axis, or a tuple of them, whose devices skip steps together.

    Returns:
      An optimizer whose state is a `GuardState`.

    Raises:
      TypeError: If `inner_optimizer` is not an optimizer or is an `optax.MultiSteps`, `name` is not
        text, `dynamic` or `use_ema` is not a bool, or another argument is not a number.
      ValueError: If an argument is out of bounds, contradicts another, or has no effect (except
        `ema_momentum`). From `init`, if `weight_decay` has no learning rate, the inner optimizer
        already skips steps, or it keeps master weights, which would undo `weight_decay` and
        `use_ema`. From `update`, if `params` are needed and not given.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> from optax_lossscale.keras import ema_params, loss_scale_optimizer
      >>> inner = optax.sgd(0.5)
      >>> tx = loss_scale_optimizer(inner, initial_scale=8, clipvalue=1.0, use_ema=True)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> loss, grads = ols.value_and_grad(lambda w: jnp.sum(w**2))(opt_state, params)
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> optax.apply_updates(params, updates)
      Array([0.5, 1.5], dtype=float32)
      >>> ema_params(opt_state)
      Array([0.5, 1.5], dtype=float32)
    """
    # R passes NULL for each argument that is left out.
    dynamic = True if dynamic is None else dynamic
    use_ema = False if use_ema is None else use_ema
    ema_momentum = 0.99 if ema_momentum is None else ema_momentum
    given = {argument: value for argument, value in locals().items() if value is not None}
    _check(given)
    tx: Any = checks.read_optimizer("inner_optimizer", inner_optimizer)
    if weight_decay is not None:
        tx = parts.decayed(tx, weight_decay, learning_rate)
    if clipnorm is not None:
        tx = optax.chain(parts.clipped_each(clipnorm), tx)
    if clipvalue is not None:
        tx = optax.chain(optax.clip(clipvalue), tx)
    if global_clipnorm is not None:
        tx = optax.chain(optax.clip_by_global_norm(global_clipnorm), tx)
    if use_ema:
        tx = optax.chain(tx, parts.averaged(ema_momentum, ema_overwrite_frequency))
    if gradient_accumulation_steps is not None:
        tx = parts.accumulated(tx, int(gradient_accumulation_steps))

    first_scale = given.get("initial_scale", 2.0**15)
    if loss_scale_factor is not None:
        policy = FixedLossScale(loss_scale_factor, skip_nonfinite=False)
    elif not dynamic:
        policy = FixedLossScale(first_scale)
    else:
        policy = DynamicLossScale(
            initial_scale=first_scale,
            growth_interval=given.get("dynamic_growth_steps", 2000),
            min_scale=min(1.0, first_scale),
            max_scale=max(2.0**24, first_scale),
        )
    return with_loss_scaling(tx, policy, axis_name=axis_name)


def ema_params(opt_state: PyTree) -> PyTree:
    """Return the average of the params that `use_ema=True` keeps.

    Args:
      opt_state: An optimizer's state, or any pytree that holds exactly one such average.

    Returns:
      The average, with the structure and shapes of the params. It is float32 if they have a
      narrower dtype. Before the first applied step, it equals the params that `init` was given.

    Raises:
      ValueError: If `opt_state` holds no average, or several.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from optax_lossscale.keras import ema_params, loss_scale_optimizer
      >>> tx = loss_scale_optimizer(optax.sgd(0.5), use_ema=True)
      >>> ema_params(tx.init({"w": jnp.array([1.0, 2.0])}))
      {'w': Array([1., 2.], dtype=float32)}
    """
    return find(parts.EmaParamsState, "opt_state", opt_state).ema_params


def _require_string(argument: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"`{argument}` must be a string, got {shown(value)}.")


def _require_between(name: str, value: object, low: float, high: float) -> None:
    if not low <= checks.read_number(name, value) <= high:
        raise ValueError(f"`{name}` must be between {low:g} and {high:g}, got {value}.")


_LARGEST = float(jnp.finfo(jnp.float32).max)
_norm = functools.partial(_require_between, low=SMALLEST_SCALE, high=_LARGEST)
_rate = functools.partial(_require_between, low=0, high=_LARGEST)

# Optax and the policies also check some of these, but under other names.
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "name": _require_string,
    "dynamic": checks.read_bool,
    "use_ema": checks.read_bool,
    "initial_scale": checks.read_scale,
    "loss_scale_factor": checks.read_scale,
    "clipnorm": _norm,
    "clipvalue": _norm,
    "global_clipnorm": _norm,
    "learning_rate": lambda name, value: callable(value) or _rate(name, value),
    "weight_decay": _rate,
    "ema_momentum": functools.partial(_require_between, low=0, high=1),
    "dynamic_growth_steps": checks.read_count,
    "ema_overwrite_frequency": checks.read_count,
    "gradient_accumulation_steps": functools.partial(checks.read_count, least=2),
}


def _check(given: dict[str, Any]) -> None:
    """Refuse arguments that are wrong, contradict each other or have no effect."""
    if isinstance(given.get("inner_optimizer"), optax.MultiSteps):
        raise TypeError(
            "`inner_optimizer` must be an optax.GradientTransformation, got an optax.MultiSteps. "
            "Use `gradient_accumulation_steps`."
        )
    if isinstance(given.get("initial_scale"), bool):
        raise TypeError(
            f"`initial_scale` must be a Python number, got {given['initial_scale']}. The second "
            "argument of tf.keras is a keyword here: `dynamic=False, initial_scale=1024`."
        )
    for name, value in given.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)
    is_fixed = "loss_scale_factor" in given
    if not (given["dynamic"] or is_fixed or "initial_scale" in given):
        raise ValueError("`initial_scale` must be given if `dynamic` is false, got None.")
    clips = {name: value for name, value in given.items() if "clip" in name}
    if len(clips) > 1:
        raise ValueError(
            f"only one of `clipnorm`, `clipvalue` and `global_clipnorm` may be given, got "
            f"{', '.join(clips)}."
        )
    for name, has_no_effect, where in (
        ("initial_scale", is_fixed, "with `loss_scale_factor`"),
        ("dynamic_growth_steps", is_fixed or not given["dynamic"], "for a fixed loss scale"),
        ("learning_rate", "weight_decay" not in given, "without `weight_decay`"),
        ("ema_overwrite_frequency", not given["use_ema"], "without `use_ema=True`"),
    ):
        if has_no_effect and name in given:
            raise ValueError(f"`{name}` must be None {where}, got {shown(given[name])}.")
