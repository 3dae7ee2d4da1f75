"""Loss scaling around any Optax optimizer."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._policy import LossScaleLike, as_loss_scale
from optax_lossscale._state import LossScaleState, current_scale
from optax_lossscale._step.finite import agree, all_finite
from optax_lossscale._step.guard import Guarded, apply, apply_where, as_arrays
from optax_lossscale._step.masters import MasterWeightsState
from optax_lossscale._step.scale import unscale_by
from optax_lossscale._support import checks
from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.tree import leaves_of_type, path_name


class WithLossScalingState(NamedTuple):
    """The state of `with_loss_scaling`.

    Attributes:
      loss_scale_state: The state of loss scaling.
      inner_state: The inner optimizer's state, as the inner optimizer itself would keep it: a
        checkpoint of the plain optimizer goes in and out here.
    """

    loss_scale_state: LossScaleState
    inner_state: optax.OptState


def with_loss_scaling(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScaleLike = "dynamic",
    *,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer with loss scaling.

    At each step the wrapper unscales the gradients and checks them. If all are finite, the inner
    optimizer moves by them, bit for bit as if it had been given `grads * (1 / loss_scale)`.
    Otherwise the step is skipped: the inner state is bitwise unchanged, and the updates are
    negative zeros, since `p + -0.0` is `p` for every `p` that is not subnormal (`-0.0 + 0.0` is not
    `-0.0`, and XLA flushes subnormal numbers). Then the policy updates the loss scale. The skip is
    a selection with `jnp.where`, so that a step stays one compiled program, and its derivative is
    that of a step that was never taken.

    Wrap the whole optimizer, once. Clipping, gradient accumulation, weight decay and averages
    inside see true gradients and are unchanged by a skipped step. `optax.MultiSteps` above all
    belongs inside: outside, a single overflow stays in its accumulator for ever.

    The extra argument `value` of `update` (Optax's name for the loss, here unscaled) is passed on
    to `inner`. If it is given, a loss that is NaN or infinite skips the step too, and the policy
    can tell a bad batch from an overflow: see `DynamicLossScale`. Extra arguments are in true
    units, as `inner` expects them.

    Under `jax.jit` the inner update is traced in a trace of its own, as a nested `jax.jit` does it.
    What it stores elsewhere as a Python side effect, in a list for example, cannot be used later.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      loss_scale: `"dynamic"`, a number (fixed), a policy, or whatever else `as_loss_scale` takes.
      axis_name: The mapped axis, or a tuple of them, over which all must skip together. See
        `unscale_and_check`.

    Returns:
      A gradient transformation whose `update` takes gradients of the scaled loss (see
      `scale_loss` and `value_and_grad`) and whose state is a `WithLossScalingState`.

    Raises:
      TypeError: If `inner` is not a gradient transformation, `loss_scale` does not name a policy
        or `axis_name` an axis; from `update`, if its state is not a `WithLossScalingState`.
      ValueError: From `init`, if `inner` has a loss scale already.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(initial_scale=8))
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> loss_and_grads = ols.value_and_grad(lambda w: jnp.sum(w**2))
      >>> loss, grads = loss_and_grads(opt_state, params)
      >>> updates, opt_state = tx.update(grads, opt_state, params, value=loss)
      >>> optax.apply_updates(params, updates)
      Array([0., 0.], dtype=float32)
    """
    inner = checks.transformation("inner", inner)
    policy = as_loss_scale(loss_scale)
    checks.axis_names(axis_name)

    def init_fn(params: optax.Params) -> WithLossScalingState:
        inner_state = inner.init(params)
        for path, _ in leaves_of_type(inner_state, LossScaleState):
            raise ValueError(
                "`inner` must not scale the loss itself, got a LossScaleState at "
                f"{path_name(path)} of its state. Call `with_loss_scaling` once, around the whole "
                "optimizer."
            )
        if _has_float16(params) and not any(leaves_of_type(inner_state, MasterWeightsState)):
            warnings.warn(
                "`params` are float16, and no float32 master weights are kept: an update below "
                "1/2048 of a weight is lost. Use `with_loss_scaling(with_master_weights(inner))`, "
                "or keep the parameters in float32 and cast them in the loss function.",
                stacklevel=2,
            )
        return WithLossScalingState(policy.init(), inner_state)

    def update_and_flag(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScalingState, jax.Array]:
        scale_state, inner_state = checks.own_state(state, WithLossScalingState)
        grads = unscale_by(updates, current_scale("state", scale_state))
        if not policy.skip_nonfinite:
            updates, inner_state = apply(inner, grads, as_arrays(inner_state), params, **extra_args)
            new_scale_state = policy.update(scale_state, grads_finite=True)
            return updates, WithLossScalingState(new_scale_state, inner_state), jnp.asarray(True)
        # One collective for both flags.
        flags = jnp.stack([all_finite(grads), all_finite(extra_args.get("value"))])
        grads_finite, loss_finite = agree(flags, axis_name)
        applied = grads_finite & loss_finite
        updates, inner_state = apply_where(applied, inner, grads, inner_state, params, **extra_args)
        new_scale_state = policy.update(scale_state, grads_finite, loss_finite=loss_finite)
        return updates, WithLossScalingState(new_scale_state, inner_state), applied

    return Guarded(init_fn, update_and_flag)


def _has_float16(params: optax.Params) -> bool:
    # A `jax.ShapeDtypeStruct` has a dtype, too.
    return any(getattr(leaf, "dtype", None) == jnp.float16 for leaf in jax.tree.leaves(params))
