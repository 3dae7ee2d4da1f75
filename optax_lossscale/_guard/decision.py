"""The decision about a step: check the gradients and the loss, and ask the rules."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._guard.keep import call_where
from optax_lossscale._guard.rules import Rule
from optax_lossscale._loss_scale import agree, all_finite
from optax_lossscale._support import checks, notes, tree
from optax_lossscale._support.choose import (
    all_true,
    safe_extra_args,
    tree_where,
    zeros_if_skipped,
)
from optax_lossscale._support.tree import AxisName, Flag, PyTree


class Decision(NamedTuple):
    """The decision about a step, the same on all devices. One that nothing checks is applied."""

    applied: Flag = np.True_
    grads_finite: Flag = np.True_
    loss_finite: Flag = np.True_
    rule_states: tuple[PyTree, ...] = ()


def decide(
    rules: tuple[Rule, ...],
    axis_name: AxisName | None,
    rule_states: tuple[PyTree, ...],
    grads: optax.Updates,
    params: optax.Params | None,
    *,
    extra_args: dict[str, Any],
) -> Decision:
    """Check the gradients and the loss, and ask the rules."""
    value = extra_args.get("value")
    checks.require_numbers(value)
    flags = [all_finite(grads), all_finite(value)]
    finite_here = flags[0] & flags[1]
    measures = [_measured(rule, finite_here, grads, params, extra_args) for rule in rules]
    if axis_name is not None:
        flags, measures = agree(axis_name, flags, measures)
    grads_finite, loss_finite = flags
    finite = grads_finite & loss_finite
    judged = [_judged(*each, finite) for each in zip(rules, rule_states, measures, strict=True)]
    applied = all_true([finite, *(~skip for skip, _ in judged)])
    return Decision(applied, grads_finite, loss_finite, tuple(after for _, after in judged))


def _measured(
    rule: Rule,
    finite: jax.Array,
    grads: optax.Updates,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> jax.Array:
    """Return what a rule measures, or 0 if the step is not finite. `float32[]`."""
    safe_args = safe_extra_args(finite, extra_args)

    def measure(grads: optax.Updates) -> jax.Array:
        number = rule.measure(grads, params, **safe_args)
        name, remedy = f"{type(rule).__name__}.measure", "Return one number, such as a mean."
        checks.require_scalar(name, number, remedy)
        # Convert it here: an object with `__jax_array__` hides its array from `call_where`.
        return jnp.asarray(number, jnp.float32)

    # The measure of finite gradients may overflow. That skips the step, and is not an error.
    with jax.debug_nans(False), jax.debug_infs(False):
        return zeros_if_skipped(finite, call_where(finite, measure, grads))


def _judged(
    rule: Rule, state: PyTree, measure: jax.Array, finite: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Return whether a rule skips the step, and its new state, or the old one if not `finite`."""
    old = jax.tree.map(tree.as_array, state)
    with jax.debug_nans(False), jax.debug_infs(False):
        skip, new = rule.judge(old, measure)
    skip = checks.read_flag(f"{type(rule).__name__}.judge", skip)
    try:
        new = tree_where(finite, new, old)
    except Exception as error:
        notes.add_note(
            error, f"This is the state of {tree.shown(rule)}: `judge` must return one like `init`."
        )
        raise
    # The state only serves decisions, and decisions have no derivative.
    return skip, jax.lax.stop_gradient(new)
