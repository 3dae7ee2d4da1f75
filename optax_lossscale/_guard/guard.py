"""The guard around an optimizer, which applies or skips each step: `with_loss_scaling`.

`with_skipping` is the same guard without a loss scale.
"""

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _state
from optax_lossscale._guard.decision import Decision, decide
from optax_lossscale._guard.keep import step_where
from optax_lossscale._guard.rules import Rule, SkipIf, as_rules, warn_of_loss
from optax_lossscale._loss_scale import (
    FixedLossScale,
    LossScale,
    LossScaleLike,
    as_loss_scale,
    checking,
    init,
    unscaled,
    warn_if_never_scaled,
)
from optax_lossscale._order import (
    refuse_changed_updates,
    refuse_second_guard,
    warn_of_half_precision,
)
from optax_lossscale._state import Guard, GuardState, LossScaleState
from optax_lossscale._support import checks, notes, tree
from optax_lossscale._support.lines import GivenWarnings
from optax_lossscale._support.tree import AxisName, PyTree


def with_loss_scaling(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScaleLike = "dynamic",
    *,
    skip_if: SkipIf = None,
    axis_name: AxisName | None = None,
) -> Guard:
    """Wrap an optimizer with loss scaling.

    Each step unscales and checks the gradients. If all are finite, the inner optimizer is applied
    to them, bit for bit as to `grads * (1 / loss_scale)`. Otherwise the step is skipped: the inner
    state is bitwise unchanged, and the updates are negative zeros, since `p + -0.0` is `p` for
    every normal `p`. A skip is a selection with `jnp.where`, so the step stays one compiled program
    and differentiates as if it had not been taken. Then the policy updates the loss scale.
    `applied(opt_state)` returns whether the step was applied.

    Wrap the whole optimizer, once. Clipping, gradient accumulation, weight decay, averages and
    master weights inside the guard see true gradients, and a skipped step does not change them.
    `optax.MultiSteps` in particular belongs inside: outside, a single overflow stays in its
    accumulator forever.

    The extra arguments of `update` must be unscaled, and `inner` gets them, except `grad`, which
    line searches take. It must be the gradients themselves (the same arrays), and is unscaled
    with them. If you pass the loss as `value`, as Optax calls it, a loss that is NaN or infinite
    skips the step too, and the policy can tell a bad batch from an overflow: see
    `DynamicLossScale`.

    Under `jax.jit` the inner update is traced on its own, as in a nested `jax.jit`: values that it
    leaks through Python side effects cannot be used afterwards.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      loss_scale: `"dynamic"`, a number (fixed), a policy, or anything else that `as_loss_scale`
        takes.
      skip_if: A rule that skips finite steps, such as `Spike()`, or a sequence of rules; see
        `with_skipping`. Such a step does not lower the loss scale. With a rule, steps that are not
        finite are skipped under every policy.
      axis_name: The mapped axis, or a tuple of them, whose devices skip steps together. See
        `unscale_and_check`.

    Returns:
      A gradient transformation. Its `update` takes gradients of the scaled loss (see `scale_loss`
      and `value_and_grad`) and returns the updates of `inner`, in their dtypes, which are those for
      gradients of at least float32. Its state is a `GuardState`.

    Raises:
      TypeError: If `inner` is not an optimizer, `as_loss_scale` does not take `loss_scale`,
        `skip_if` is not a rule, or `axis_name` cannot name an axis. From `update`, if `state` is
        not a `GuardState`, or a rule lacks an extra argument or does not return a boolean.
      ValueError: From `init`, if `inner` already has a loss scale or skips steps, or changes the
        updates of `with_master_weights` or `with_stochastic_rounding`; from `update`, if `grad` is
        not the gradients themselves, or another extra argument has one of their arrays.

    Warns:
      UserWarning: From `init`, if parameters in half precision have no master weights inside, or if
        `optax.inject_hyperparams` keeps numbers in half precision; from `update`, if it is given
        `loss` without `value`.

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
) -> Guard:
    """Skip each step whose gradients or loss are not finite, or that a rule rejects.

    This is the guard of `with_loss_scaling` without a loss scale, for bfloat16 and float32. Unlike
    `optax.apply_if_finite`, it copies no state and never gives up. If you need a loss scale, give
    the rule to that guard: `with_loss_scaling(inner, skip_if=rule)`.

    A rule is a function `(grads, params, **extra_args) -> bool[]`, or a `Rule`: an object that
    judges one number, such as `Spike`. It is traceable, sees true gradients, and returns True to
    skip the step. On a step that is not finite, its answer is ignored and its state does not
    change; it may see NaN there, or zeros if it has a loop or a callback.

    It raises and warns as `with_loss_scaling` does.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      skip_if: A rule that selects finite steps to skip, or a sequence of rules, any of which may
        skip a step. None for no rule.
      axis_name: The mapped axis, or a tuple of them, whose devices skip steps together. A step is
        skipped if a rule returns True on any device; what a `Rule` measures is averaged. See
        `unscale_and_check`.

    Returns:
      A gradient transformation whose state is a `GuardState` with a loss scale of 1. The gradients
      keep their dtype. If `update` is given the loss, as the extra argument `value`, it must be
      finite too. A state restored from a guard with a loss scale works: the first step divides by
      that loss scale and sets it to 1.

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
) -> Guard:
    inner = checks.read_optimizer("inner", inner)
    checks.require_axis_name(axis_name)
    if rules:  # a rule brings the check with it
        policy = checking(policy)
    is_one = isinstance(policy, FixedLossScale) and policy.scale == 1
    warnings_given = GivenWarnings()

    def init_fn(params: optax.Params) -> GuardState:
        try:
            inner_state = inner.init(params)
        except Exception as error:
            _add_other_leaf(error, params)
            raise
        refuse_second_guard("inner", inner_state)
        refuse_changed_updates(inner_state)
        warn_of_half_precision(params, inner_state)
        rule_states = tuple(rule.init(params) for rule in rules)
        return GuardState(init(policy), rule_states, inner_state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, GuardState]:
        if "loss" in extra_args and "value" not in extra_args:
            warn_of_loss(rules, warnings_given)
        state = checks.read_state(state, GuardState)
        if not is_one:
            warn_if_never_scaled()
        scale_state = _state.find(LossScaleState, "state", state.loss_scale_state)
        checks.require_rule_states(state.rule_states, rules)
        loss_scale = _state.loss_scale_of(scale_state)
        grads = unscaled(updates, loss_scale, keep_dtypes=not is_scaled)
        extra_args = _in_true_units(extra_args, updates, grads, is_scaled=is_scaled)
        decision = Decision()
        if policy.skip_nonfinite or rules:
            decision = decide(
                rules, axis_name, state.rule_states, grads, params, extra_args=extra_args
            )
        updates, inner_state = step_where(
            decision.applied, inner, grads, state.inner_state, params, extra_args=extra_args
        )
        new = policy.update(scale_state, decision.grads_finite, loss_finite=decision.loss_finite)
        scale_state = _state.count_step(_state.typed(new), scale_state, decision.applied)
        if not is_scaled:  # the state may have been restored from a guard that scales
            scale_state = scale_state._replace(loss_scale=jnp.ones_like(scale_state.loss_scale))
        return updates, GuardState(scale_state, decision.rule_states, inner_state)

    guard = Guard(init_fn, update_fn)
    guard.call = _call_of(policy if is_scaled else None, rules)
    return guard


def _call_of(policy: LossScale | None, rules: tuple[Rule, ...]) -> str:
    """Return the call that makes a guard, with a loss scale if it has a policy."""
    name = "with_loss_scaling" if policy else "with_skipping"
    arguments = ["inner", *([tree.shown(policy)] if policy else [])]
    if rules:
        shown = ", ".join(map(tree.shown, rules))
        arguments.append(f"skip_if=({shown})" if rules[1:] else f"skip_if={shown}")
    return f"{name}({', '.join(arguments)})"


def _add_other_leaf(error: Exception, params: PyTree) -> None:
    """Name the first leaf of `params` that is not an array, if there is one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "shape") and not isinstance(leaf, numbers.Number):
            found = f"{tree.shown(leaf)} at {tree.path_name(path)}"
            notes.add_note(error, f"`params` must be a tree of arrays, got {found}.")
            return


def _in_true_units(
    extra_args: dict[str, Any], scaled: optax.Updates, grads: optax.Updates, *, is_scaled: bool
) -> dict[str, Any]:
    """Return the extra arguments, with `grads` for `grad` if that is the `scaled` gradients.

    Optax's line searches are called with `grad=grads`. Arrays are compared by identity.
    """
    leaves = jax.tree.leaves(scaled)
    if extra_args.get("grad") is not None:
        grad_leaves, grad_def = jax.tree.flatten(extra_args["grad"])
        if len(grad_leaves) == len(leaves) and all(map(operator.is_, grad_leaves, leaves)):
            extra_args = {**extra_args, "grad": grad_def.unflatten(jax.tree.leaves(grads))}
        elif is_scaled:
            raise ValueError(
                "`grad` must be the gradients themselves, got other arrays, which may or may not "
                "be scaled. Pass the same arrays twice, inside one jitted step: "
                "`tx.update(grads, state, params, value=loss, grad=grads, value_fn=f)`."
            )
    if not is_scaled:
        return extra_args
    scaled_arrays = {id(leaf) for leaf in leaves if tree.is_inexact(leaf)}
    for name, arg in extra_args.items():
        is_found = any(id(leaf) in scaled_arrays for leaf in jax.tree.leaves(arg))
        if is_found and name != "value":
            raise ValueError(
                f"`{name}` must be in true units, got an array of the scaled gradients. Unscale it "
                "with `unscale_and_check`, or call it `grad` if it is all of the gradients."
            )
    return extra_args
