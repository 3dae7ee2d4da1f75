"""Rules that skip finite steps."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._guard.keep import run_where
from optax_lossscale._loss_scale.convert import LossScale
from optax_lossscale._support import checks
from optax_lossscale._support.choose import tree_where, zeros_if_skipped
from optax_lossscale._support.lines import warn
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


def warn_of_loss(rules: tuple[Rule, ...]) -> None:
    """Warn of the extra argument `loss`, which Optax calls `value`, unless a rule asks for it."""
    if not any(map(_asks_for_loss, rules)):
        warn(
            "`loss` is an extra argument, and is not checked: a step whose loss is NaN may be "
            "applied. Optax calls the loss `value`: `tx.update(grads, state, params, value=loss)`."
        )


def _asks_for_loss(rule: Any) -> bool:
    fun = rule.function if isinstance(rule, Function) else rule.measure
    try:
        named = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # of some functions written in C
        named = {}
    return "loss" in named or getattr(rule, "of", None) == "loss"


def measure(
    rule: Rule,
    finite: jax.Array,
    grads: optax.Updates,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> jax.Array:
    """Return what a rule measures, and 0 on a step that is not finite. `float32[]`."""
    safe_args = {name: zeros_if_skipped(finite, arg) for name, arg in extra_args.items()}

    def without_state(grads: optax.Updates, none: tuple[()]) -> tuple[jax.Array, tuple[()]]:
        measure = rule.measure(grads, params, **safe_args)
        name, remedy = f"{type(rule).__name__}.measure", "Return one number: a mean."
        checks.require_scalar(name, measure, remedy)
        return jnp.asarray(measure, jnp.float32), none

    # A measure of finite gradients may overflow, which is a skip and no error.
    with jax.debug_nans(False), jax.debug_infs(False):
        measure, _ = run_where(finite, without_state, grads, ())
        return zeros_if_skipped(finite, measure)


def judge(
    rule: Rule, state: PyTree, measure: jax.Array, finite: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Return whether a rule skips the step, and its state after a step that is finite."""
    old = jax.tree.map(as_array, state)
    with jax.debug_nans(False), jax.debug_infs(False):
        skip, new = rule.judge(old, measure)
    skip = checks.read_flag(f"{type(rule).__name__}.judge", skip)
    try:
        new = tree_where(finite, new, old)
    except (TypeError, ValueError) as error:
        error.add_note(f"It is in the state of {rule!r}: `judge` must return one like `init`.")
        raise
    # A memory decides, and decisions have no derivative.
    return skip, jax.lax.stop_gradient(new)
