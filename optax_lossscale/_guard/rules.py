"""Rules that skip finite steps."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._guard.keep import run_where
from optax_lossscale._loss_scale.convert import LossScale
from optax_lossscale._support import checks
from optax_lossscale._support.choose import tree_where, zeros_if_skipped
from optax_lossscale._support.tree import PyTree, as_array


@runtime_checkable
class Rule(Protocol):
    """A rule with a state: it measures one number, and judges it. See `with_skipping`."""

    def init(self, params: optax.Params) -> PyTree: ...

    def measure(
        self, grads: optax.Updates, params: optax.Params | None, **extra_args: Any
    ) -> jax.Array: ...

    def judge(self, state: PyTree, measure: jax.Array) -> tuple[jax.Array, PyTree]: ...


@dataclasses.dataclass(frozen=True)
class Function:
    """A function as a rule: it measures 1 where it skips."""

    function: Callable[..., Any]

    def init(self, params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def measure(self, grads: Any, params: Any, **extra_args: Any) -> jax.Array:
        checks.require_extra_args("skip_if", self.function, grads, params, **extra_args)
        skips = checks.read_flag("skip_if", self.function(grads, params, **extra_args))
        return skips.astype(jnp.float32)

    def judge(self, state: Any, measure: jax.Array) -> tuple[jax.Array, optax.EmptyState]:
        return measure > 0, checks.read_state(state, optax.EmptyState, "state.rule_states")


def as_rules(skip_if: Any) -> tuple[Rule, ...]:
    """Return the rules in `skip_if`: a rule, a tuple or list of them, or None."""
    if skip_if is None:
        return ()
    rules: list[Rule] = []
    for rule in skip_if if type(skip_if) in (tuple, list) else (skip_if,):
        if isinstance(rule, Rule) and not isinstance(rule, type):
            rules.append(rule)
        elif callable(rule) and not isinstance(rule, (type, optax.MultiSteps)):
            rules.append(Function(rule))
        else:
            is_policy = isinstance(rule, LossScale) and not isinstance(rule, type)
            remedy = "`with_loss_scaling(inner, policy)`" if is_policy else "`Spike()`"
            raise TypeError(
                "`skip_if` must be a function of the gradients and parameters, an object with "
                f"`init`, `measure` and `judge`, or a tuple of these, got {rule!r}. Use {remedy}."
            )
    return tuple(rules)


def measures_of(
    rules: tuple[Rule, ...],
    finite: jax.Array,
    grads: optax.Updates,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> list[jax.Array]:
    """Return what each rule measures, and zeros on a step that is not finite."""
    extra_args = {name: zeros_if_skipped(finite, arg) for name, arg in extra_args.items()}

    def measure(rule: Rule) -> jax.Array:
        def without_state(grads: optax.Updates, none: tuple[()]) -> tuple[jax.Array, tuple[()]]:
            measure = rule.measure(grads, params, **extra_args)
            name, remedy = f"{type(rule).__name__}.measure", "Return one number: a mean."
            checks.require_scalar(name, measure, remedy)
            return jnp.asarray(measure, jnp.float32), none

        # A measure of finite gradients may overflow, which is a skip and no error.
        with jax.debug_nans(False), jax.debug_infs(False):
            measure, _ = run_where(finite, without_state, grads, ())
            return zeros_if_skipped(finite, measure)

    return [measure(rule) for rule in rules]


def judge(
    rules: tuple[Rule, ...],
    rule_states: tuple[PyTree, ...],
    measures: list[jax.Array],
    finite: jax.Array,
) -> tuple[list[jax.Array], tuple[PyTree, ...]]:
    """Return whether each rule skips the step, and its state after a step that is finite."""
    if type(rule_states) is not tuple or len(rule_states) != len(rules):
        raise ValueError(
            f"`state.rule_states` must be a tuple with the state of each of {len(rules)} rules, "
            f"got {rule_states!r}. Add or drop one: "
            "`state._replace(rule_states=(rule.init(params),))`."
        )
    skips: list[jax.Array] = []
    new_states: list[PyTree] = []
    for rule, given, measure in zip(rules, rule_states, measures, strict=True):
        old = jax.tree.map(as_array, given)
        with jax.debug_nans(False), jax.debug_infs(False):
            skip, new = rule.judge(old, measure)
        skips.append(checks.read_flag(f"{type(rule).__name__}.judge", skip))
        try:
            new_states.append(tree_where(finite, new, old))
        except (TypeError, ValueError) as error:
            error.add_note(f"It is in the state of {rule!r}: `judge` must return one like `init`.")
            raise
    # A memory decides, and decisions have no derivative.
    return skips, jax.lax.stop_gradient(tuple(new_states))
