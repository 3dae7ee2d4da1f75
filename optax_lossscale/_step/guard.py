"""The guard around an optimizer: each step is either applied, or leaves no trace.

It checks the gradients and the loss once, asks the rules, decides once for all devices, takes the
new state or keeps the old one, and counts. `with_loss_scaling` and `skip_if` are this guard with
and without a loss scale.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._policy import LossScaleLike, as_loss_scale, init, update
from optax_lossscale._state import (
    Guard,
    LossScaleState,
    SkipIfState,
    count_skip,
    count_step,
    current_scale,
    refuse_guard,
    skip_counts,
)
from optax_lossscale._step.choose import zero_unless
from optax_lossscale._step.finite import agree, all_finite
from optax_lossscale._step.keep import acts, apply, apply_where, as_arrays
from optax_lossscale._step.masters import refuse_changed_updates, warn_without_masters
from optax_lossscale._step.rules import Rules, is_measured
from optax_lossscale._step.scale import unscale_by
from optax_lossscale._support import checks
from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.tree import PyTree, leaves_of_type


class WithLossScalingState(NamedTuple):
    """The state of `with_loss_scaling`.

    Attributes:
      loss_scale_state: The state of loss scaling, which counts the skipped steps.
      rule_state: The state of the rule `skip_if`; a tuple of states if several rules were given,
        and `optax.EmptyState()` for a function or if there is no rule.
      inner_state: The inner optimizer's state, as the inner optimizer itself would keep it: a
        checkpoint of the plain optimizer goes in and out here.
    """

    loss_scale_state: LossScaleState
    rule_state: PyTree
    inner_state: optax.OptState


def with_loss_scaling(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScaleLike = "dynamic",
    *,
    skip_if: Any = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer with loss scaling.

    At each step the wrapper unscales the gradients and checks them. If all are finite, the inner
    optimizer is applied to them, bit for bit as if it had received `grads * (1 / loss_scale)`.
    Otherwise the step is skipped: the inner state is bitwise unchanged, and the updates are
    negative zeros, since `p + -0.0` is `p` for every normal `p` (`-0.0 + 0.0` is not `-0.0`). A
    skip is a selection with `jnp.where`: a step stays one compiled program, and the derivative is
    that of a step that was never taken. Then the policy updates the loss scale.
    `applied(opt_state)` says whether the step was applied.

    Wrap the whole optimizer, once. Clipping, gradient accumulation, weight decay, averages and
    master weights inside see true gradients and are unchanged by a skipped step. `optax.MultiSteps`
    above all belongs inside: outside, a single overflow stays in its accumulator forever.

    The extra argument `value` of `update` (Optax's name for the loss, here unscaled) is passed on
    to `inner`. If it is given, a loss that is NaN or infinite skips the step too, and the policy
    can tell a bad batch from an overflow: see `DynamicLossScale`. Extra arguments are in true
    units, as `inner` expects them.

    Under `jax.jit` the inner update is traced on its own, as in a nested `jax.jit`. Values that it
    leaks through Python side effects are tracers, and cannot be used afterwards.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      loss_scale: `"dynamic"`, a number (fixed), a policy, or whatever else `as_loss_scale` takes.
      skip_if: A rule that skips steps which are finite, such as `Spike()`, or a tuple of rules: see
        the function `skip_if`. Such a step does not lower the loss scale. With a rule, steps that
        are not finite are skipped under every policy.
      axis_name: The mapped axis, or a tuple of them, over which all must skip together. See
        `unscale_and_check`.

    Returns:
      A gradient transformation whose `update` takes gradients of the scaled loss (see
      `scale_loss` and `value_and_grad`) and whose state is a `WithLossScalingState`.

    Raises:
      TypeError: If `inner` is not a gradient transformation, `loss_scale` does not name a policy,
        `skip_if` is not a rule or `axis_name` not an axis; from `update`, if its state is not a
        `WithLossScalingState`, or a rule needs an extra argument that is missing or does not return
        a boolean.
      ValueError: From `init`, if `inner` has a loss scale or skips steps already.

    Warns:
      UserWarning: From `init`, if parameters are float16 or bfloat16, and nothing inside keeps
        master weights.

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
    rules = Rules("skip_if", skip_if)
    checks.axis_names(axis_name)

    def init_fn(params: optax.Params) -> WithLossScalingState:
        inner_state = _init(inner, params, "with_loss_scaling(inner, skip_if=rule)")
        return WithLossScalingState(init(policy), rules.init(params), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScalingState]:
        state = checks.expect_state(state, WithLossScalingState)
        scale_state = state.loss_scale_state
        grads = unscale_by(updates, current_scale("state", scale_state))
        if not (policy.skip_nonfinite or rules.each):
            inner_state = as_arrays(state.inner_state)
            updates, inner_state = apply(inner, grads, inner_state, params, extra_args=extra_args)
            scale_state = update(scale_state, True, policy)
            # The last step may have been skipped under another policy; this one is applied.
            scale_state = scale_state._replace(consecutive_skipped=jnp.zeros((), jnp.int32))
            return updates, state._replace(loss_scale_state=scale_state, inner_state=inner_state)
        is_applied, (grads_finite, loss_finite), rule_state = _judge(
            rules, state.rule_state, grads, params, extra_args=extra_args, axis_name=axis_name
        )
        updates, inner_state = apply_where(
            is_applied, inner, grads, state.inner_state, params, extra_args=extra_args
        )
        new_scale_state = policy.update(scale_state, grads_finite, loss_finite=loss_finite)
        scale_state = count_step(new_scale_state, scale_state, is_applied)
        return updates, WithLossScalingState(scale_state, rule_state, inner_state)

    return Guard(init_fn, update_fn)


def skip_if(
    inner: optax.GradientTransformation | optax.MultiSteps,
    rule: Any = None,
    *,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip a step if its gradients or its loss are not finite, or if a rule says so.

    A skipped step leaves no trace: the inner state is bitwise unchanged, and the updates are
    negative zeros. It is the skip of `with_loss_scaling`, without the loss scale, for bfloat16 and
    float32. Unlike `optax.apply_if_finite`, it copies no state and never gives up. With a loss
    scale, give the rule to that guard: `with_loss_scaling(inner, skip_if=rule)`.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      rule: Which steps to skip although they are finite; see below. Of a tuple or list of rules,
        any may skip a step. None for no rule.
      axis_name: The mapped axis, or a tuple of them, over which all must skip together. A rule's
        answer counts if it is true on any member; a measure is averaged. See `unscale_and_check`.

    Returns:
      A gradient transformation whose state is a `SkipIfState`. The loss is the extra argument
      `value`, as Optax calls it; where it is given, it must be finite, too.

    Raises:
      TypeError: If `inner` is not a gradient transformation, `rule` is not a rule or `axis_name`
        not the name of an axis; from `update`, if its state is not a `SkipIfState`, or the rule
        needs an extra argument that is missing or does not return a boolean.
      ValueError: From `init`, if `inner` has a loss scale or skips steps already.

    Warns:
      UserWarning: As `with_loss_scaling`.

    A rule is traceable, and True skips the step. On a step that is not finite, it is given zeros,
    its answer is ignored, and its state is unchanged. It is one of these:

    * a function `(grads, params, **extra_args) -> bool[]`;
    * an object with `init(params) -> state` and `update(state, grads, params, **extra_args) ->
      (bool[], state)`;
    * an object that compares one number, such as `Spike`: `init(params) -> state`,
      `measure(grads, extra_args) -> float32[]` and `judge(state, measure) -> (bool[], state)`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> tx = ols.skip_if(optax.sgd(1.0), lambda grads, params, *, value: value > 10)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(params, opt_state, params, value=11.0)
      >>> print(updates, ols.applied(opt_state))
      [-0. -0.] False
    """
    inner = checks.transformation("inner", inner)
    rules = Rules("rule", rule)
    checks.axis_names(axis_name)

    def init_fn(params: optax.Params) -> SkipIfState:
        inner_state = _init(inner, params, "skip_if(inner, (rule, another_rule))")
        zeros = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return SkipIfState(rules.init(params), *zeros, inner_state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipIfState]:
        state = checks.expect_state(state, SkipIfState)
        is_applied, _, rule_state = _judge(
            rules, state.rule_state, updates, params, extra_args=extra_args, axis_name=axis_name
        )
        updates, inner_state = apply_where(
            is_applied, inner, updates, state.inner_state, params, extra_args=extra_args
        )
        counts = count_skip(is_applied, *skip_counts(state).values())
        return updates, SkipIfState(rule_state, *counts, inner_state)

    return Guard(init_fn, update_fn)


def _judge(
    rules: Rules,
    rule_state: PyTree,
    grads: optax.Updates,
    params: optax.Params | None,
    *,
    extra_args: dict[str, Any],
    axis_name: AxisName | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], PyTree]:
    """Check the gradients and the loss, ask the rules, and decide for all members of the axis.

    Returns:
      Whether the step is applied, whether its gradients and its loss are finite (`bool[]` each),
      and the state of the rules after it.
    """
    grads_finite, loss_finite = all_finite(grads), all_finite(extra_args.get("value"))
    finite = grads_finite & loss_finite
    old = rules.split(as_arrays(rule_state))
    new, keeps, measures = list(old), [], []
    for i, rule in enumerate(rules.each):
        if is_measured(rule):
            measures.append(_measure(rules, rule, finite, (grads, extra_args)))
        else:
            seen = zero_unless(finite, grads)
            given = {name: zero_unless(finite, arg) for name, arg in extra_args.items()}
            skip, new[i] = rule.update(old[i], seen, params, **given)
            keeps.append(~checks.flag(rules.argument, skip))
    flags = [grads_finite, loss_finite, *keeps]
    (grads_finite, loss_finite, *keeps), measures = agree(flags, axis_name, measures)
    for i, rule in enumerate(rules.each):
        if is_measured(rule):
            skip, new[i] = rule.judge(old[i], measures.pop(0))
            keeps.append(~checks.flag(rules.argument, skip))
    finite = applied = grads_finite & loss_finite
    if keeps:
        # A minimum over numbers (see `finite.py`): XLA:CPU fuses a conjunction into all selections.
        applied = jnp.min(jnp.stack([finite, *keeps]).astype(jnp.int32)).astype(jnp.bool_)
    return applied, (grads_finite, loss_finite), rules.join(finite, new, old)


def _measure(rules: Rules, rule: Any, finite: jax.Array, given: tuple[Any, Any]) -> jax.Array:
    """Return what a rule compares, and zero on a step that is not finite."""

    def measured() -> jax.Array:
        return checks.measure(rules.argument, rule.measure(*given))

    with jax.debug_nans(False), jax.debug_infs(False):
        # A loop might not end on NaN. Otherwise, XLA:CPU would write the zeros to memory.
        if acts(jax.make_jaxpr(measured)().jaxpr):
            given = zero_unless(finite, given)
        return zero_unless(finite, measured())


def _init(
    inner: optax.GradientTransformation, params: optax.Params, instead: str
) -> optax.OptState:
    """Return the state of an optimizer that a guard can hold."""
    inner_state = inner.init(params)
    if any(leaves_of_type(inner_state, LossScaleState)):
        instead = "with_loss_scaling(inner, skip_if=rule)"
    refuse_guard("inner", inner_state, instead)
    refuse_changed_updates(inner_state)
    warn_without_masters(params, inner_state)
    return inner_state
