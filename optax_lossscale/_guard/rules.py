"""Rules, which skip finite steps: functions, objects that judge a measure, and `Spike`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lossscale._loss_scale import LossScale
from optax_lossscale._state import SpikeState, increment, subtrees
from optax_lossscale._support import bounds, checks, nnx, tree
from optax_lossscale._support.lines import warn_once
from optax_lossscale._support.tree import Flag, KeyPath, PyTree


@runtime_checkable
class Rule(Protocol):
    """A rule that judges one number at each step, and may remember some. See `with_skipping`.

    Any object with these methods is a rule. The methods are traceable. `measure` may name the extra
    arguments of `update` that it reads.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, optax_lossscale as ols
      >>> class FarAboveTheBest:
      ...     def init(self, params):
      ...         return jnp.float32(jnp.inf)
      ...
      ...     def measure(self, grads, params, *, value, **extra_args):
      ...         return value
      ...
      ...     def judge(self, lowest, value):
      ...         return value > 10 * lowest, jnp.minimum(lowest, value)
      >>> tx = ols.with_skipping(optax.sgd(1.0), FarAboveTheBest())
      >>> isinstance(FarAboveTheBest(), ols.Rule)
      True
    """

    def init(self, params: PyTree, /) -> PyTree:
        """Return the state before the first step."""
        ...

    # `*args` makes a type checker accept methods that name some of the extra arguments.
    def measure(self, grads: PyTree, params: PyTree, /, *args: Any, **extra_args: Any) -> ArrayLike:
        """Return the number that is judged, `float32[]`. The gradients are true."""
        ...

    def judge(self, state: PyTree, measure: jax.Array, /) -> tuple[jax.Array | bool, PyTree]:
        """Return whether to skip the step, `bool[]`, and the new state, of the type of `init`."""
        ...


#: A rule, or a function `(grads, params, **extra_args) -> bool[]`.
RuleLike: TypeAlias = Rule | Callable[..., Flag | bool]

#: What the guards take as `skip_if`.
SkipIf: TypeAlias = RuleLike | Sequence[RuleLike] | None


@dataclasses.dataclass(frozen=True, repr=False)
class StatelessRule:
    """A function as a rule, which measures 1 if the function returns True."""

    function: Callable[..., Any]

    def __repr__(self) -> str:
        return tree.shown(self.function)

    def init(self, params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def measure(self, grads: PyTree, params: PyTree, **extra_args: Any) -> jax.Array:
        checks.require_extra_args(self.function, grads, params, **extra_args)
        skips = checks.read_flag("skip_if", self.function(grads, params, **extra_args))
        return skips.astype(jnp.float32)

    def judge(self, state: PyTree, measure: jax.Array) -> tuple[jax.Array, optax.EmptyState]:
        return measure > 0, checks.read_state(state, optax.EmptyState, "state.rule_states")


def as_rules(skip_if: SkipIf) -> tuple[Rule, ...]:
    """Return the rules in `skip_if`: a rule, a sequence of them, or None."""
    if skip_if is None:
        return ()
    # A string and an optimizer are sequences too, but not of rules.
    is_one = isinstance(skip_if, (str, optax.GradientTransformation, Rule))
    rules = skip_if if isinstance(skip_if, Sequence) and not is_one else [skip_if]
    return tuple(map(_as_rule, rules))


def _as_rule(rule: object) -> Rule:
    if isinstance(rule, Rule) and not isinstance(rule, type):
        return rule
    if callable(rule) and not isinstance(rule, (type, optax.MultiSteps)):
        return StatelessRule(rule)
    remedy = ""
    if isinstance(rule, type) and isinstance(rule, Rule):
        remedy = f" Call it: `{rule.__name__}()`."
    elif isinstance(rule, LossScale) and not isinstance(rule, type):
        remedy = " Use `with_loss_scaling(inner, policy)`."
    raise TypeError(
        "`skip_if` must be a function of the gradients and parameters, an object with `init`, "
        f"`measure` and `judge`, or a sequence of these, got {tree.shown(rule)}.{remedy}"
    )


def warn_of_loss(rules: tuple[Rule, ...], given: set[str]) -> None:
    """Warn that Optax calls the extra argument `loss` `value`, unless a rule asks for `loss`."""
    if not any(map(_asks_for_loss, rules)):
        warn_once(
            "`loss` is an extra argument that nothing checks: a step whose loss is NaN may be "
            "applied. Optax calls the loss `value`: `tx.update(grads, state, params, value=loss)`. "
            'If a trainer calls `update`, use `skip_if=Spike("loss")`.',
            given,
        )


def _asks_for_loss(rule: Rule) -> bool:
    fun = rule.function if isinstance(rule, StatelessRule) else rule.measure
    try:
        named = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        named = {}
    return "loss" in named or (isinstance(rule, Spike) and rule.of == "loss")


@dataclasses.dataclass(frozen=True)
class Spike:
    """Skip a step whose loss, or another measure, is far above its recent values.

    A step is skipped if its measure exceeds the mean of the remembered values by more than `sigmas`
    standard deviations. A measure that is not finite is skipped, and not remembered.

    A skipped value is remembered as `mean + 2 / 3 * sigmas * deviation`, so one spike barely raises
    the threshold: the next step is skipped above 6.4 deviations. A new level is still learned:
    after 20 steps if it is 20 deviations higher, and after about `window` steps if it is thousands
    of deviations higher.

    Args:
      of: What is measured: `"value"`, the loss; `"grad_norm"`, the Euclidean norm of all gradients,
        whose square must fit a float32; or the name of another extra argument of `update`, a
        scalar.
      window: How many values are remembered. At least 2.
      sigmas: How many standard deviations above the mean a spike is. More than 1.5: with less, a
        spike would be remembered below one deviation, and a new level never learned.
      warmup: How many values are remembered before a step may be skipped, from 1 to `window`. None
        for half of the window.
      max_consecutive_skipped: How many spikes in a row are skipped before a value is accepted, and
        remembered unchanged. None for no limit.

    Raises:
      TypeError: If `of` is not text, or another argument is not a number; from `update`, if it is
        not given the extra argument that `of` names.
      ValueError: If an argument is out of bounds; from `update`, if the measure is not a scalar, or
        the state was made with another `window`.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_skipping(optax.sgd(1.0), ols.Spike(window=8))
      >>> opt_state = tx.init(jnp.zeros(2))
      >>> for loss in [1.0, 1.1, 0.9, 1.0, 1.1, 7.0, 1.0]:
      ...     _, opt_state = tx.update(jnp.ones(2), opt_state, value=loss)
      >>> print(opt_state.loss_scale_state.total_skipped)
      1
    """

    of: str = "value"
    _: dataclasses.KW_ONLY
    window: int = 128
    sigmas: float = 6.0
    warmup: int | None = None
    max_consecutive_skipped: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.of, str):
            raise TypeError(
                '`of` must be "value", "grad_norm" or the name of an extra argument, got '
                f"{tree.shown(self.of)}."
            )
        window = checks.read_count("window", self.window, least=2)
        if bounds.as_float32(checks.read_number("sigmas", self.sigmas)) <= 1.5:
            raise ValueError(
                f"`sigmas` must be greater than 1.5, got {self.sigmas}. With less, a new level of "
                "the loss would never be learned."
            )
        if self.warmup is not None and checks.read_count("warmup", self.warmup) > window:
            raise ValueError(f"`warmup` must be at most `window`, got {self.warmup} for {window}.")
        if self.max_consecutive_skipped is not None:
            checks.read_count("max_consecutive_skipped", self.max_consecutive_skipped)

    def init(self, params: optax.Params) -> SpikeState:
        """Return the state before the first step."""
        del params
        held, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)  # a buffer for each
        return SpikeState(jnp.zeros(self.window, jnp.float32), held, skipped)

    def measure(self, grads: PyTree, params: PyTree = None, **extra_args: Any) -> jax.Array:
        """Return the loss, the norm or the extra argument that is compared. `float32[]`."""
        del params
        if self.of == "grad_norm":
            arrays = [
                tree.at_least_float32(leaf)
                for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
                if tree.is_inexact(leaf) and tree.FP8_KEY not in path
            ]
            return jnp.asarray(optax.tree.norm(arrays), jnp.float32)
        value = extra_args.get(self.of)
        if value is None:
            raise TypeError(
                f"`{self.of}` must be given to `update`, because {self} measures it. Call "
                f"`tx.update(grads, opt_state, params, {self.of}=...)`."
            )
        checks.require_scalar(self.of, value, "Take its mean.")
        return jnp.asarray(value, jnp.float32)

    def judge(self, state: SpikeState, measure: jax.Array) -> tuple[jax.Array, SpikeState]:
        """Return whether a measure is too high, and the state that remembers it."""
        checks.read_state(state, SpikeState, "state.rule_states")
        # With 64-bit types enabled in JAX, NumPy's numbers would widen the state.
        window, sigmas = int(self.window), float(self.sigmas)
        if state.values.shape != (window,):
            raise ValueError(
                f"`state.rule_states` must hold a window of shape {(window,)} for {self}, got "
                f"{state.values.shape}. If the window has changed, start with a new state from its "
                "`init`. Under `jax.shard_map`, give `rule_states` the spec `P()`."
            )
        mean, deviation, unit = relative_statistics(state)
        # The deviation of equal values is 0, but their mean is rounded.
        rounding = jnp.finfo(jnp.float32).eps * jnp.abs(mean)
        warmup = window // 2 if self.warmup is None else int(self.warmup)
        is_high = measure / unit > mean + sigmas * jnp.maximum(deviation, rounding)
        is_spike = (state.held >= warmup) & is_high
        if self.max_consecutive_skipped is not None:
            is_spike &= state.consecutive_skipped < int(self.max_consecutive_skipped)
        # A spike above equal values is remembered unchanged: they have no deviation to use.
        as_spike = (mean + sigmas * 2 / 3 * deviation) * unit
        remembered = jnp.where(is_spike & (deviation > 0), as_spike, measure)
        after = SpikeState(
            values=jnp.concatenate([state.values[1:], remembered[None]]),
            held=jnp.clip(state.held, 0, window - 1) + 1,
            consecutive_skipped=jnp.where(is_spike, increment(state.consecutive_skipped), 0),
        )
        is_finite = jnp.isfinite(measure)
        # `tree_where` would not take a state with Python's numbers or NumPy's wider ones.
        new = jax.tree.map(functools.partial(jnp.where, is_finite), after, state)
        return is_spike | ~is_finite, new


def spikes_in(rule_states: PyTree) -> Iterator[tuple[KeyPath, SpikeState]]:
    """Yield the states of all `Spike`s, and their paths."""
    for path, spike in subtrees(rule_states, SpikeState):
        yield path, nnx.without_variables(spike)


def spike_statistics(state: SpikeState) -> tuple[jax.Array, jax.Array]:
    """Return the mean and the standard deviation of the values that a `Spike` remembers.

    Both are 0 before the first value. `float32[]`.
    """
    if state.held.ndim:  # as under `jax.vmap`
        return jax.vmap(spike_statistics)(state)
    mean, deviation, unit = relative_statistics(state)
    return mean * unit, deviation * unit


def relative_statistics(state: SpikeState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the mean and the standard deviation in a unit, and the unit. `float32[]`.

    The unit is the largest magnitude in the window: in this unit, squares fit a float32. Values in
    unused places do not count. Equal values have a deviation of 0, however the compiler divides:
    distances from the newest value are then 0 exactly, and what rounding leaves of them is ignored.
    """
    window = state.values.size
    held = jnp.clip(state.held, 1, window)  # before the first value, a place holds 0
    is_held = jnp.arange(window, dtype=jnp.int32) >= window - held
    values = jnp.where(is_held, state.values, 0)
    unit = jnp.clip(jnp.max(jnp.abs(values)), bounds.SMALLEST_SCALE, bounds.LARGEST_SCALE)
    relative = values / unit
    n = held.astype(jnp.float32)
    mean = jnp.sum(relative) / n
    distances = jnp.where(is_held, relative - relative[-1], 0)
    squares = jnp.where(is_held, (distances - jnp.sum(distances) / n) ** 2, 0)
    deviation = jnp.sqrt(jnp.sum(squares) / n)
    is_rounding = deviation <= jnp.finfo(jnp.float32).eps * jnp.abs(mean)
    return mean, jnp.where(is_rounding, 0, deviation), unit


Rule.__module__ = Spike.__module__ = "optax_lossscale"  # pickles name them there, as their states
