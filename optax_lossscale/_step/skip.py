"""Skip steps that would do harm, in any precision."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._state import count_skip
from optax_lossscale._step.finite import agree, all_finite, average
from optax_lossscale._step.guard import Guarded, apply_where, as_arrays
from optax_lossscale._step.select import tree_where, zero_unless
from optax_lossscale._step.spike import Spike
from optax_lossscale._support import checks
from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.tree import PyTree


class SkipIfState(NamedTuple):
    """The state of `skip_if`.

    Attributes:
      rule_state: The rule's own state; `optax.EmptyState()` for a function.
      consecutive_skipped: Skipped steps in a row; 0 means that the last step was applied.
        `int32[]`.
      total_skipped: Skipped steps since the start. `int32[]`.
      inner_state: The inner optimizer's state, as the inner optimizer itself would keep it.
    """

    rule_state: PyTree
    consecutive_skipped: jax.Array
    total_skipped: jax.Array
    inner_state: optax.OptState


def skip_if(
    inner: optax.GradientTransformation | optax.MultiSteps,
    rule: Any = None,
    *,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip a step if its gradients or its loss are not finite, or if a rule says so.

    A skipped step leaves no trace: the inner state is bitwise unchanged, and the updates are
    negative zeros. It is the skip of `with_loss_scaling`, without the loss scale, for bfloat16 and
    float32. Unlike `optax.apply_if_finite`, it copies no state and never gives up.

    `skip_if` may be used inside of `with_loss_scaling`, which then skips overflows and updates the
    loss scale, while the rule skips what is finite and bad. Both must be given `axis_name`.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      rule: A function `(grads, params, **extra_args) -> bool[]` that returns True for a step to
        skip; or an object with `init(params) -> state` and `update(state, grads, params,
        **extra_args) -> (bool[], state)`, such as `Spike`; or None. Both must be traceable. On a
        step that is not finite, the rule is given zeros, its answer does not count, and its state
        is unchanged.
      axis_name: The mapped axis, or a tuple of them, over which all must skip together. A rule's
        answer counts if it is true on any member; the measure of a `Spike` is averaged. See
        `unscale_and_check`.

    Returns:
      A gradient transformation whose state is a `SkipIfState`. The loss is the extra argument
      `value`, as Optax calls it; where it is given, it must be finite, too.

    Raises:
      TypeError: If `inner` is not a gradient transformation, `rule` is not a rule or `axis_name`
        not the name of an axis; from `update`, if its state is not a `SkipIfState`, or the rule
        needs an extra argument that is missing or does not return a boolean.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> tx = ols.skip_if(optax.sgd(1.0), lambda grads, params, *, value: value > 10)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(params, opt_state, params, value=11.0)
      >>> print(updates, opt_state.total_skipped)
      [-0. -0.] 1
    """
    inner = checks.transformation("inner", inner)
    checks.axis_names(axis_name)
    is_object = callable(getattr(rule, "init", None)) and callable(getattr(rule, "update", None))
    if isinstance(rule, type) or not (rule is None or is_object or callable(rule)):
        raise TypeError(
            "`rule` must be a function of the gradients and parameters, an object with `init` and "
            f"`update`, or None, got {rule!r}. Use for example `Spike()`."
        )
    rule_object: Any = rule if is_object else None

    def init_fn(params: optax.Params) -> SkipIfState:
        return SkipIfState(
            rule_state=rule_object.init(params) if is_object else optax.EmptyState(),
            consecutive_skipped=jnp.zeros((), jnp.int32),
            total_skipped=jnp.zeros((), jnp.int32),
            inner_state=inner.init(params),
        )

    def judge(
        finite: jax.Array, state: PyTree, grads: optax.Updates, params: Any, extra_args: Any
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Return whether the step is finite everywhere, whether to skip it, and a new state."""
        if rule is None:
            return agree(finite, axis_name), jnp.asarray(False), state
        if isinstance(rule, Spike):
            # Of the gradients as they came: XLA:CPU would write those with zeros to memory.
            with jax.debug_nans(False), jax.debug_infs(False):
                measure = zero_unless(finite, rule.measure(grads, extra_args))
            # One collective for the flag and the measure: the flags' mean is 1 if all are true.
            both = jnp.stack([finite.astype(jnp.float32), measure])
            share, measure = average(both, axis_name)
            return share == 1, *rule.judge(state, measure)
        grads, extra_args = zero_unless(finite, (grads, extra_args))
        if is_object:
            skip, state = rule_object.update(state, grads, params, **extra_args)
        else:
            skip: Any = rule(grads, params, **extra_args)
        # One collective for both flags.
        finite, keep = agree(jnp.stack([finite, ~checks.flag("rule", skip)]), axis_name)
        return finite, ~keep, state

    def update_and_flag(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipIfState, jax.Array]:
        state = checks.own_state(state, SkipIfState)
        old = as_arrays(state.rule_state)
        finite = all_finite((updates, extra_args.get("value")))
        finite, skip, new = judge(finite, old, updates, params, extra_args)
        checks.same_structure("rule", new, old, "Return a state like that of `init`.")
        applied = finite & ~skip
        updates, inner_state = apply_where(
            applied, inner, updates, state.inner_state, params, **extra_args
        )
        consecutive, total = count_skip(applied, *map(as_arrays, state[1:3]))
        state = SkipIfState(
            rule_state=tree_where(finite, new, old),
            consecutive_skipped=consecutive,
            total_skipped=total,
            inner_state=inner_state,
        )
        return updates, state, applied

    return Guarded(init_fn, update_and_flag)
