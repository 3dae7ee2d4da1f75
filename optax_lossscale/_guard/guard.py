"""The guard around an optimizer: each step is either applied, or leaves no trace.

It checks the gradients and the loss once, asks the rules, decides once for all devices, takes the
new state or keeps the old one, and counts: `with_loss_scaling`, and without a loss scale
`with_skipping`.
"""

import copy
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._guard.keep import step_where
from optax_lossscale._guard.rules import as_rules, judge, measure, warn_of_loss
from optax_lossscale._loss_scale.policies import (
    FixedLossScale,
    LossScale,
    LossScaleLike,
    as_loss_scale,
    init,
)
from optax_lossscale._loss_scale.scale import all_finite
from optax_lossscale._order import (
    Guard,
    refuse_changed_updates,
    refuse_second_guard,
    warn_of_half_precision,
)
from optax_lossscale._state import (
    GuardState,
    LossScaleState,
    count_step,
    find,
    loss_scale_of,
    typed,
)
from optax_lossscale._support import checks
from optax_lossscale._support.choose import agree, all_true
from optax_lossscale._support.notes import add_other_leaf
from optax_lossscale._support.rule import Rule, SkipIf
from optax_lossscale._support.tree import AxisName, Flag, PyTree, is_inexact, unscaled


def with_loss_scaling(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScaleLike = "dynamic",
    *,
    skip_if: SkipIf = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer with loss scaling.

    At each step the gradients are unscaled and checked. If all are finite, the inner optimizer is
    applied to them, bit for bit as to `grads * (1 / loss_scale)`. Otherwise the step is skipped:
    the inner state is bitwise unchanged, and the updates are negative zeros, since `p + -0.0` is
    `p` for every normal `p`. A skip is a selection with `jnp.where`: a step stays one compiled
    program, and the derivative is that of a step that was never taken. Then the policy updates the
    loss scale. `applied(opt_state)` says whether the step was applied.

    Wrap the whole optimizer, once. Clipping, gradient accumulation, weight decay, averages and
    master weights inside see true gradients and are unchanged by a skipped step. `optax.MultiSteps`
    above all belongs inside: outside, a single overflow stays in its accumulator forever.

    The extra arguments of `update` are in true units and passed on to `inner`, unchanged, but for
    `grad`, which line searches take: it must be the gradients themselves, the same arrays, and is
    unscaled with them. If `value` is given, Optax's name for the loss, a loss that is NaN or
    infinite skips the step too, and the policy can tell a bad batch from an overflow: see
    `DynamicLossScale`.

    Under `jax.jit` the inner update is traced on its own, as in a nested `jax.jit`: values that it
    leaks through Python side effects cannot be used afterwards.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      loss_scale: `"dynamic"`, a number (fixed), a policy, or what else `as_loss_scale` takes.
      skip_if: A rule that skips steps which are finite, such as `Spike()`, or a sequence of rules:
        see `with_skipping`. Such a step does not lower the loss scale. With a rule, steps that are
        not finite are skipped under every policy.
      axis_name: The mapped axis, or a tuple of them, over which all must skip together. See
        `unscale_and_check`.

    Returns:
      A gradient transformation whose `update` takes gradients of the scaled loss (see `scale_loss`
      and `value_and_grad`) and whose state is a `GuardState`.

    Raises:
      TypeError: If an argument is of the wrong type, the state that `update` is given included;
        from `update`, if a rule lacks an extra argument or does not return a boolean.
      ValueError: From `init`, if `inner` has a loss scale or skips steps already; from `update`, if
        `grad` is not the gradients themselves, or another extra argument has one of their arrays.

    Warns:
      UserWarning: From `init`, if parameters in half precision have no master weights inside.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(initial_scale=8))
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> loss_and_grads = ols.value_and_grad(lambda w: jnp.sum(w**2))
      >>> loss, grads = loss_and_grads(opt_state, params)
      >>> updates, opt_state = tx.update(grads, opt_state, params, value=loss)
      >>> optax.apply_updates(params, updates)
      Array([0., 0.], dtype=float32)
    """
    policy = as_loss_scale(loss_scale)
    return _guard(inner, policy, as_rules(skip_if), axis_name, is_scaled=True)


def with_skipping(
    inner: optax.GradientTransformation | optax.MultiSteps,
    skip_if: SkipIf = None,
    *,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip a step if its gradients or its loss are not finite, or if a rule says so.

    It is the guard of `with_loss_scaling` without the loss scale, for bfloat16 and float32. Unlike
    `optax.apply_if_finite`, it copies no state and never gives up. With a loss scale, give the rule
    to that guard: `with_loss_scaling(inner, skip_if=rule)`.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      skip_if: The rule that says which finite steps to skip, see below, or a sequence of rules, any
        of which may skip a step. None for no rule.
      axis_name: The mapped axis, or a tuple of them, over which all must skip together. A rule's
        answer counts if it is true on any member; a measure is averaged. See `unscale_and_check`.

    Returns:
      A gradient transformation whose state is a `GuardState` with a loss scale of 1. The
      gradients keep their dtype. The loss is the extra argument `value`; where it is given, it must
      be finite, too. A state that was restored from a guard with a loss scale works: the first step
      divides by that loss scale, and leaves 1.

    It raises and warns as `with_loss_scaling` does.

    A rule is traceable, sees true gradients, and True skips the step. On a step that is not finite,
    its answer is ignored, and its state is unchanged; it may see NaN there, or zeros if it has a
    loop or a callback. It is a function `(grads, params, **extra_args) -> bool[]`, or a `Rule`, an
    object that judges one number, such as `Spike`.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_skipping(optax.sgd(1.0), lambda grads, params, *, value: value > 10)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(params, opt_state, params, value=11.0)
      >>> print(updates, ols.applied(opt_state))
      [-0. -0.] False
    """
    return _guard(inner, FixedLossScale(1), as_rules(skip_if), axis_name, is_scaled=False)


def _guard(
    inner: optax.GradientTransformation | optax.MultiSteps,
    policy: LossScale,
    rules: tuple[Rule, ...],
    axis_name: AxisName | None,
    *,
    is_scaled: bool,
) -> optax.GradientTransformationExtraArgs:
    inner = checks.read_optimizer("inner", inner)
    checks.require_axis_name(axis_name)
    if rules and isinstance(policy, FixedLossScale) and not policy.skip_nonfinite:
        # A rule brings the check with it. A subclass may have an `__init__` of its own.
        policy = copy.copy(policy)
        object.__setattr__(policy, "skip_nonfinite", True)  # it is frozen
    warnings_given: set[str] = set()

    def init_fn(params: optax.Params) -> GuardState:
        try:
            inner_state = inner.init(params)
        except Exception as error:
            add_other_leaf(error, params)
            raise
        refuse_second_guard("inner", inner_state)
        refuse_changed_updates(inner_state)
        warn_of_half_precision(params, inner_state)
        rule_states = tuple(rule.init(params) for rule in rules)
        return GuardState(init(policy), rule_states, inner_state)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, GuardState]:
        state = checks.read_state(state, GuardState)
        scale_state = find(LossScaleState, "state", state.loss_scale_state)
        if "loss" in extra_args and "value" not in extra_args:
            warn_of_loss(rules, warnings_given)
        checks.require_rule_states(state.rule_states, rules)
        grads = unscaled(updates, loss_scale_of(scale_state), keep_dtypes=not is_scaled)
        extra_args = _in_true_units(extra_args, updates, grads, is_scaled=is_scaled)
        if policy.skip_nonfinite or rules:
            decision = decide(
                rules, state.rule_states, grads, params, extra_args, axis_name=axis_name
            )
        else:  # nothing is checked
            decision = Decision(np.True_, np.True_, np.True_, ())
        updates, inner_state = step_where(
            decision.applied, inner, grads, state.inner_state, params, extra_args=extra_args
        )
        new = policy.update(scale_state, decision.grads_finite, loss_finite=decision.loss_finite)
        scale_state = count_step(typed(new), scale_state, decision.applied)
        if not is_scaled:  # a state restored from a guard that scales
            scale_state = scale_state._replace(loss_scale=jnp.ones((), jnp.float32))
        return updates, GuardState(scale_state, decision.rule_states, inner_state)

    return Guard(init_fn, update_fn)


class Decision(NamedTuple):
    """The decision about a step, the same on all devices."""

    applied: Flag
    grads_finite: Flag
    loss_finite: Flag
    rule_states: tuple[PyTree, ...]


def decide(
    rules: tuple[Rule, ...],
    rule_states: tuple[PyTree, ...],
    grads: optax.Updates,
    params: optax.Params | None,
    extra_args: dict[str, Any],
    *,
    axis_name: AxisName | None,
) -> Decision:
    """Check the gradients and the loss, and ask the rules."""
    value = extra_args.get("value")
    checks.require_numbers("value", value)
    flags = [all_finite(grads), all_finite(value)]
    finite_here = flags[0] & flags[1]
    measures = [measure(rule, finite_here, grads, params, extra_args) for rule in rules]
    (grads_finite, loss_finite), measures = agree(flags, axis_name, measures)
    finite = grads_finite & loss_finite
    judged = [judge(*each, finite) for each in zip(rules, rule_states, measures, strict=True)]
    applied = all_true([finite, *(~skip for skip, _ in judged)])
    return Decision(applied, grads_finite, loss_finite, tuple(after for _, after in judged))


def _in_true_units(
    extra_args: dict[str, Any], given: PyTree, grads: PyTree, *, is_scaled: bool
) -> dict[str, Any]:
    """Return the extra arguments with true gradients for `grad`, if it is the gradients given.

    Line searches of Optax are called with `grad=grads`. Arrays are told by identity.
    """
    leaves = jax.tree.leaves(given)  # the arrays themselves, even in Variables of flax.nnx
    grad_leaves, grad_def = jax.tree.flatten(extra_args.get("grad"))
    is_same = len(grad_leaves) == len(leaves) and all(map(operator.is_, grad_leaves, leaves))
    has_grad = extra_args.get("grad") is not None
    if has_grad and is_same:
        extra_args = {**extra_args, "grad": grad_def.unflatten(jax.tree.leaves(grads))}
    elif has_grad and is_scaled:
        raise ValueError(
            "`grad` must be the gradients themselves, got other arrays, whose loss scale is not "
            "known. Pass the same arrays twice, inside one jitted step: "
            "`tx.update(grads, state, params, value=loss, grad=grads, value_fn=f)`."
        )
    scaled = {id(leaf) for leaf in leaves if is_scaled and is_inexact(leaf)}
    for name, arg in extra_args.items():
        held = (id(leaf) in scaled for leaf in jax.tree.leaves(arg))
        if name not in ("grad", "value") and any(held):
            raise ValueError(
                f"`{name}` must be in true units, got an array of the scaled gradients. Unscale it "
                "with `unscale_and_check`, or call it `grad` if it is all of the gradients."
            )
    return extra_args
