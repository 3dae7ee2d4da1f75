"""What a person asks when training goes wrong.

Which layer overflowed, is the loss scale too small, is the loss itself broken, why is nothing
learning: one function for each. Those that look at gradients run inside of `jax.jit` and never
wait for the device; those that answer in words or pictures run on the host.
"""

import functools
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from optax_lossscale._policy import LossScale, LossScaleLike, as_loss_scale
from optax_lossscale._scaling import AxisName, unscale_and_check
from optax_lossscale._state import (
    INT32_MAX,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScaleState,
    loss_scale_state,
    strongly_typed,
)
from optax_lossscale._tree import PyTree, Tree, is_array, is_inexact, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The exponents that floor(log2|x|) takes for a float32 that is neither zero nor infinite; below
# -126 the number is subnormal.
_EXPONENTS = np.arange(-149, 128)


class LossScaleStalledError(RuntimeError):
    """Training makes no progress: `check_health` found too many skipped steps in a row."""


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Return what is worth logging at every step.

    Nothing is copied and nothing is waited for. Call it in the compiled step and return what it
    gives; between two steps it works too, unless the next step is given the state's buffers to
    overwrite (`donate_argnums`).

    Args:
      opt_state: A `LossScaleState`, or an optimizer's state that holds exactly one.

    Returns:
      `loss_scale` (float32[]), `grads_finite` (bool[], whether the last step was applied),
      `growth_count`, `consecutive_skipped` and `total_skipped` (int32[]). With
      `skip_nonfinite=False` every step is applied unchecked, so `grads_finite` is always true.

    Raises:
      ValueError: If `opt_state` holds no `LossScaleState`, or several.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.update(ols.init(), False, "dynamic")
      >>> for name, value in ols.metrics(state).items():
      ...     print(name, value)
      loss_scale 16384.0
      grads_finite False
      growth_count 0
      consecutive_skipped 1
      total_skipped 1
    """
    state = strongly_typed(loss_scale_state(opt_state))
    return {
        "loss_scale": state.loss_scale,
        "grads_finite": state.consecutive_skipped == 0,
        "growth_count": state.growth_count,
        "consecutive_skipped": state.consecutive_skipped,
        "total_skipped": state.total_skipped,
    }


def check_health(
    opt_state: PyTree, *, max_consecutive_skipped: int = 50, loss_scale: LossScaleLike = None
) -> None:
    """Raise an error if training has stalled, and say why.

    Call it on the host now and then, for example with each log line: it waits for the step that
    makes `opt_state`. A dynamic loss scale skips a step when it is too large, a few in a row at
    the start, and one now and then. Dozens in a row mean that something else is wrong.

    Args:
      opt_state: A `LossScaleState`, or an optimizer's state that holds exactly one.
      max_consecutive_skipped: The number of skipped steps in a row that is still healthy. More
        raise the error.
      loss_scale: What `with_loss_scaling` was given. Where the policy's bounds lie is part of the
        diagnosis. With None they are unknown, and the diagnosis is less precise.

    Raises:
      LossScaleStalledError: If more steps in a row were skipped. The message says how many, where
        the loss scale stands against its floor, the likely causes, and what to do about each.
      TypeError: If `max_consecutive_skipped` is not an integer, or `opt_state` is traced: an error
        cannot be raised from a compiled step.
      ValueError: If `max_consecutive_skipped` is negative, or `opt_state` holds no
        `LossScaleState`, or several, or one of several replicas, or one that no training leads
        to: a loss scale that is not between 2**-126 and 2**126, a negative count.

    Warns:
      UserWarning: If the loss scale has grown to its cap and no step was ever skipped. Training
        works, but either the loss need not be scaled or the cap is too low.

    Examples:
      >>> import optax_lossscale as ols
      >>> ols.check_health(ols.init())
    """
    limit = _natural("max_consecutive_skipped", max_consecutive_skipped)
    policy = None if loss_scale is None else as_loss_scale(loss_scale)
    state = _on_host(loss_scale_state(opt_state))
    scale, skipped = state.loss_scale.item(), state.consecutive_skipped.item()
    bounds = _bounds(policy)
    if skipped > limit:
        causes = enumerate(_likely_causes(state, policy), start=1)
        if policy is None:
            standing = ""
        elif bounds is None:
            standing = f", under {type(policy).__name__}, which has no floor"
        else:
            standing = f", {'at' if scale <= bounds[0] else 'above'} its floor of {bounds[0]:g}"
        raise LossScaleStalledError(
            f"The last {skipped} steps were skipped ({state.total_skipped} since the start), and "
            f"the loss scale is {scale:g}{standing}. Likely causes, the likeliest first:\n"
            + "\n".join(f"  {i}. {cause}" for i, cause in causes)
        )
    at_cap = bounds is not None and scale == bounds[1] and not state.total_skipped
    if policy is not None and at_cap and _starts_at(policy) < scale:
        warnings.warn(
            f"The loss scale is at its cap of {scale:g} and no step was ever skipped. "
            "Either the loss need not be scaled, as in bfloat16 and float32: `loss_scale=None` "
            "saves the check. Or the gradients are so small that a larger loss scale would fit: "
            "raise `max_scale`. `gradient_exponents` shows which.",
            stacklevel=2,
        )


_FORWARD = (
    "The forward pass overflows: the loss is NaN or infinite although the batch and the parameters "
    "are finite, and no loss scale can fix that. `first_nonfinite(loss_fn, params, batch)` names "
    "the layer that overflows first. Compute it in float32, or make its input smaller. A step "
    "under `jax.debug_infs(True)` and `jax.debug_nans(True)` stops there, too; the latter alone "
    "stops later."
)
_INPUT = (
    "The batch or the parameters hold NaN or infinity. `nonfinite_report` of both lists the "
    "arrays. Repair the data, or restore an earlier checkpoint."
)
_BACKWARD = (
    "The loss is finite, and one layer's derivative is not, at any loss scale: a division by zero, "
    "the root or logarithm of zero, a number above 65504 in float16. "
    "`first_nonfinite(jax.grad(loss_fn), params, batch)` names the layer. Compute it in float32."
)
_LARGE = (
    "The gradients are too large for float16 even at this loss scale. Average the loss instead of "
    "summing it, normalize the data, or lower `min_scale`, below 1 if need be."
)
_DESCENT = (
    "The loss scale started too large and is still on its way down. Start from `calibrate`, or "
    "with a smaller `initial_scale`, or allow for more with `max_consecutive_skipped`."
)
_FIXED = (
    "The loss scale is too large, and does not move. Take the one that `suggest_scale` returns, or "
    "a `DynamicLossScale`."
)
_UNKNOWN = (
    "The loss scale is too large: it is fixed, or still on its way down. Give `check_health` the "
    "policy as `loss_scale`, and it can tell."
)


def _likely_causes(state: LossScaleState, policy: LossScale | None) -> tuple[str, ...]:
    """Order the causes of many skipped steps by how well they agree with the state."""
    bounds = _bounds(policy)
    if policy is None:
        return _FORWARD, _BACKWARD, _INPUT, _UNKNOWN
    if bounds is None:
        return _FIXED, _FORWARD, _BACKWARD, _INPUT
    if not state.overflow_count:
        return _FORWARD, _INPUT  # not even gradients that are not finite were counted
    scale, (floor, ceiling) = state.loss_scale.item(), bounds
    if scale <= max(floor, 1.0):
        others = _FORWARD, _BACKWARD, _INPUT
        return (_LARGE, *others) if floor > 1 else (*others, _LARGE)
    # Overflows lower the loss scale. More skipped steps than it takes to come here from the ceiling
    # were a loss that is not finite, which the policy forgave.
    backoffs = math.log(ceiling / scale) / -math.log(getattr(policy, "backoff_factor", 0.5))
    if state.consecutive_skipped > backoffs + getattr(policy, "hysteresis", 1):
        return _FORWARD, _INPUT
    return _DESCENT, _FORWARD, _BACKWARD, _INPUT


def _bounds(policy: LossScale | None) -> tuple[float, float] | None:
    """Return between which float32 numbers the loss scale moves, if it is known to."""
    bounds = getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)
    return None if None in bounds else (float(np.float32(bounds[0])), float(np.float32(bounds[1])))


def _starts_at(policy: LossScale) -> float:
    """Return the loss scale of the first step."""
    with jax.transfer_guard("allow"):  # asked for
        return policy.init().loss_scale.item()


def _on_host(state: LossScaleState) -> LossScaleState:
    if any(isinstance(field, Tracer) for field in state):
        raise TypeError(
            "`opt_state` must hold values, got traced arrays. Call `check_health` outside of "
            "`jax.jit`, on the state that the compiled step returned."
        )
    if any(np.shape(field) for field in state):
        raise ValueError(
            "`opt_state` must hold scalars, got a loss scale of shape "
            f"{np.shape(state.loss_scale)}. Take one replica: `jax.tree.map(lambda x: x[0], ...)`."
        )
    # On the host from here on, where comparing moves nothing to the device (`jax_transfer_guard`).
    state = LossScaleState(*(np.asarray(jax.device_get(f)) for f in strongly_typed(state)))  # pyright: ignore[reportArgumentType]
    # Neither training nor a policy makes these, but damaged checkpoints and manual edits do. The
    # rule cannot lead out of some of them.
    scale = state.loss_scale.item()
    # Above the bounds all gradients would be unscaled to zero, and the steps applied.
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(
            f"`opt_state` must hold a loss scale between 2**-126 and 2**126, got {scale:g}. "
            "Restore an earlier checkpoint, or put the state of `init` in its place."
        )
    for name, count in list(state._asdict().items())[1:]:
        if count < 0:
            raise ValueError(
                f"`opt_state` must hold counts of at least 0, got {name}={count}. Restore an "
                "earlier checkpoint, or put the state of `init` in its place."
            )
    return state


class NonfiniteCounts(NamedTuple):
    """What `nonfinite_report` says of one array.

    Attributes:
      nan: Elements that are NaN. `int32[]`.
      inf: Elements that are infinite. `int32[]`.
      size: All elements. `int32[]`.
    """

    nan: jax.Array
    inf: jax.Array
    size: jax.Array


def nonfinite_report(grads: PyTree) -> dict[str, NonfiniteCounts]:
    """Count the NaN and infinite elements of each array.

    It takes any tree: gradients, the batch, the parameters. Gradients alone do not name the layer
    that overflowed: NaN made in the backward pass spreads to all layers before it, and a loss that
    is not finite makes every gradient NaN. `first_nonfinite` names the layer.

    Args:
      grads: Gradients, or any pytree. Leaves that hold no floating-point or complex numbers are
        left out. A complex element counts once, as NaN if either part is.

    Returns:
      The counts, by the key path of the array as `jax.tree_util.keystr` writes it. Those of
      arrays with more than 2**31 - 1 elements are approximate, and stop there.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"dense": jnp.array([1.0, jnp.nan]), "head": jnp.ones(3)}
      >>> ols.nonfinite_report(grads)["['dense']"].nan
      Array(1, dtype=int32)
    """

    def count(leaf: Any) -> NonfiniteCounts:
        array = readable(leaf)
        is_nan = jnp.isnan(array)
        return NonfiniteCounts(
            nan=_saturated_count(is_nan),
            inf=_saturated_count(jnp.isinf(array) & ~is_nan),
            size=_as_count(array.size),
        )

    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {jax.tree_util.keystr(path): count(leaf) for path, leaf in leaves if is_inexact(leaf)}


def _as_count(size: Any) -> jax.Array:
    return jnp.asarray(size if _is_symbolic(size) else min(size, INT32_MAX), jnp.int32)


def _is_symbolic(size: Any) -> bool:
    """Say whether a size is known only when an exported function runs; it cannot be compared."""
    return not isinstance(size, int)


def _saturated_count(mask: jax.Array) -> jax.Array:
    if _is_symbolic(mask.size) or mask.size <= INT32_MAX:
        return jnp.sum(mask, dtype=jnp.int32)
    # An int32 would wrap around, to 0 for 2**32 elements.
    largest = np.nextafter(np.float32(2**31), np.float32(0))
    return jnp.minimum(jnp.sum(mask, dtype=jnp.float32), largest).astype(jnp.int32)


def format_nonfinite_report(report: Mapping[str, NonfiniteCounts]) -> str:
    """Write a report in words, the worst array first.

    Args:
      report: From `nonfinite_report`, on the host.

    Returns:
      A line that counts the arrays that are not finite, and then one for each of them. Those with
      the larger share of bad elements come first.

    Raises:
      TypeError: If `report` is no dict of counts, or is traced.
      ValueError: If it holds the counts of several devices or steps, or what cannot be counts.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"dense": jnp.array([1.0, jnp.nan]), "head": jnp.ones(3)}
      >>> print(ols.format_nonfinite_report(ols.nonfinite_report(grads)))
      1 of 2 arrays are not finite:
        ['dense']: 1 NaN and 0 infinite of 2 elements (50 %)
    """
    if not isinstance(report, Mapping):
        raise TypeError(
            f"`report` must be a dict from `nonfinite_report`, got {report!r}. Hand in "
            "`nonfinite_report(grads)`."
        )
    counts = {name: _checked_counts(name, each) for name, each in report.items()}
    bad = {name: (nan + inf) / size for name, (nan, inf, size) in counts.items() if nan + inf}
    if not bad:
        return f"0 of {len(counts)} arrays are not finite."
    lines = [f"{len(bad)} of {len(counts)} arrays are not finite:"]
    for name in sorted(bad, key=lambda name: -bad[name]):
        nan, inf, size = counts[name]
        lines.append(
            f"  {name or 'the root of the tree'}: {nan} NaN and {inf} infinite of {size} elements "
            f"({100 * bad[name]:.3g} %)"
        )
    return "\n".join(lines)


def _checked_counts(name: str, counts: Any) -> list[int]:
    what = f"`report[{name!r}]`"
    if not isinstance(counts, tuple) or len(counts) != len(NonfiniteCounts._fields):
        raise TypeError(
            f"{what} must be NonfiniteCounts, got {counts!r}. Hand in `nonfinite_report(grads)`."
        )
    if any(isinstance(count, Tracer) for count in counts):
        raise TypeError(
            f"{what} must hold values, got traced arrays. Return the report from the compiled "
            "step, and format it outside."
        )
    nan, inf, size = arrays = [np.asarray(count) for count in counts]
    if not all(each.shape == () and each.dtype.kind in "iu" for each in arrays) or not (
        0 <= nan + inf <= size
    ):
        raise ValueError(
            f"{what} must hold three counts, nan and inf of at most size, got "
            f"{tuple(each.tolist() for each in arrays)}. Take one device or step, or sum over them."
        )
    return [int(nan), int(inf), int(size)]


class GradientExponents(NamedTuple):
    """How large gradients are, from `gradient_exponents`; two add by `jax.tree.map`.

    Attributes:
      histogram: Elements by floor(log2(|g|)), from -149 (the smallest float32) to 127. Zeros, NaN
        and infinities are left out. `int32[277]`.
      zero: Elements that are zero. `int32[]`.
      flushed: Elements that are not zero, and would be rounded to zero. `int32[]`.
      subnormal: Elements that would be rounded to a subnormal number, with fewer digits. `int32[]`.
      overflow: Elements that are infinite or would be rounded to infinity. `int32[]`.
      size: All elements, NaN included. `int32[]`.
    """

    histogram: jax.Array
    zero: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    overflow: jax.Array
    size: jax.Array


def gradient_exponents(
    grads: PyTree, *, dtype: DTypeLike = jnp.float16, loss_scale: ArrayLike = 1.0
) -> GradientExponents:
    """Say how large gradients are, and what a small dtype would make of them.

    Add those of several steps with `jax.tree.map(operator.add, a, b)`, and those of several
    devices under `jax.shard_map` with `jax.lax.psum`. Beyond 2**31 - 1 elements in all, add on
    the host, after `jax.tree.map(np.int64, ...)`.

    Args:
      grads: True gradients, computed in float32: those that have been in float16 have lost
        already what this counts. Leaves that hold no floating-point or complex numbers are left
        out; the two parts of a complex number count one by one.
      dtype: The floating-point type to round to, of at most 32 bits.
      loss_scale: What to multiply by before rounding. `float32[]`. The histogram is that of
        the gradients themselves.

    Returns:
      The counts. Numbers of a float64 beyond float32's exponents count at the histogram's ends.

    Raises:
      TypeError: If `dtype` is no real floating-point type of at most 32 bits, or `loss_scale` no
        real number.
      ValueError: If there are more than 2**31 - 1 elements, which an int32 cannot count, or
        `loss_scale` is no scalar, or a Python number that is not positive and finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"w": jnp.array([0.0, 1e-9, 1e-6, 1.0])}
      >>> counts = ols.gradient_exponents(grads)
      >>> int(counts.zero), int(counts.flushed), int(counts.subnormal), int(counts.overflow)
      (1, 1, 1, 0)
      >>> int(ols.gradient_exponents(grads, loss_scale=2.0**15).flushed)
      0

    References:
      Figure 3 of Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    dtype = _small_float(dtype)
    parts: list[jax.Array] = []
    for leaf in jax.tree.leaves(grads):
        if is_inexact(leaf):
            array = readable(leaf)
            parts += [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    size = sum(part.size for part in parts)
    if not _is_symbolic(size) and size > INT32_MAX:
        raise ValueError(
            f"`grads` must have at most 2**31 - 1 elements, got {size}. Look at one part of the "
            "tree at a time, and add on the host: `jax.tree.map(np.int64, ...)`."
        )
    scale = _positive("loss_scale", loss_scale)
    total = GradientExponents(
        jnp.zeros(_EXPONENTS.size, jnp.int32),
        *(jnp.zeros((), jnp.int32) for _ in range(5)),
    )
    for part in parts:
        total = jax.tree.map(jnp.add, total, _exponents(part, dtype, scale))
    return total


@functools.partial(jax.jit, static_argnames="dtype")  # one dispatch in eager execution
def _exponents(array: jax.Array, dtype: np.dtype, scale: jax.Array) -> GradientExponents:
    # Read from the bits, and multiplied part by part: XLA flushes subnormal numbers to zero on
    # some platforms, and there even `x != 0` is false for them.
    info, target = jnp.finfo(array.dtype), jnp.finfo(dtype)
    magnitude_bits = 2 ** (info.bits - 1) - 1
    bits = jax.lax.bitcast_convert_type(array, f"uint{info.bits}") & magnitude_bits
    infinity = magnitude_bits + 1 - 2**info.nmant
    is_zero, is_infinite = bits == 0, bits == infinity
    is_number = ~is_zero & (bits < infinity)
    # How far a subnormal number is shifted until it starts with a one, as the others do.
    places = jax.lax.clz(bits).astype(jnp.int32) - (info.bits - 1 - info.nmant)
    shift = jnp.clip(places, 0, info.nmant)
    biased = (bits >> info.nmant).astype(jnp.int32)
    exponent = jnp.maximum(biased, 1) - 1 + info.minexp - shift
    digits = (bits << shift.astype(bits.dtype)) & (2**info.nmant - 1)
    wide = jnp.float64 if info.bits == 64 else jnp.float32
    significand = 1 + digits.astype(wide) / 2**info.nmant

    scale_significand, scale_exponent = jnp.frexp(scale)
    product = significand * scale_significand.astype(wide)  # between 1/2 and 2
    power = exponent + scale_exponent
    # The product in units of the smallest normal number, far from where float32 itself ends.
    in_tiny = jnp.ldexp(product, power - target.minexp)
    half_last_place = 2.0 ** -(target.nmant + 1)
    is_flushed = in_tiny <= half_last_place
    rounded = jnp.ldexp(product, power).astype(dtype).astype(jnp.float32)

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, dtype=jnp.int32)

    return GradientExponents(
        histogram=_histogram(exponent, is_number),
        zero=count(is_zero),
        flushed=count(is_number & is_flushed),
        subnormal=count(is_number & ~is_flushed & (in_tiny < 1 - half_last_place)),
        # Formats without infinity (float8_e4m3fn) have NaN in its place.
        overflow=count(is_infinite | (is_number & ~jnp.isfinite(rounded))),
        size=jnp.asarray(array.size, jnp.int32),
    )


def _histogram(exponent: jax.Array, is_number: jax.Array) -> jax.Array:
    """Count how often each of `_EXPONENTS` occurs where there is a number."""

    def count(bins: jax.Array) -> jax.Array:
        return jnp.bincount(bins.ravel(), length=_EXPONENTS.size + 1)[1:].astype(jnp.int32)

    bins = jnp.where(is_number, jnp.clip(exponent + 149, 0, _EXPONENTS.size - 1) + 1, 0)
    # JAX does not say (seen in 0.10.2) how a scatter goes over explicitly sharded axes.
    mesh = jax.typeof(bins).sharding.mesh
    axes = tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    )
    if not axes:
        return count(bins)
    replicated = NamedSharding(mesh, PartitionSpec())
    by_compiler: Any = jax.sharding.auto_axes(count, axes=axes, out_sharding=replicated)
    return by_compiler(bins)


def suggest_scale(
    exponents: GradientExponents, *, headroom: int = 4, dtype: DTypeLike = jnp.float16
) -> float:
    """Return the power of two that moves the histogram to the upper end of what `dtype` holds.

    Args:
      exponents: From `gradient_exponents`, on the host; best the sum over many steps.
      headroom: Powers of two to leave free above the largest gradient that was seen, for larger
        ones to come. With 0 it may be rounded to infinity.
      dtype: The type that gradients are computed in.

    Returns:
      A loss scale within [2**-126, 2**126], for `FixedLossScale` or as `initial_scale`. Above
      2**24, which is the default, a `DynamicLossScale` needs a larger `max_scale`, too.

    Raises:
      TypeError: If `exponents` are none or traced, `dtype` is no real floating-point type of at
        most 32 bits, or `headroom` no integer.
      ValueError: If `headroom` is negative, or the histogram is empty, stacked or wrapped around.

    Warns:
      UserWarning: If the power of two that fits lies outside of these bounds.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> ols.suggest_scale(ols.gradient_exponents(jnp.array([1e-6, 2.0**-10])))
      2097152.0
    """
    headroom = _natural("headroom", headroom)
    histogram = _counts(exponents)
    if not histogram.any():
        raise ValueError(
            "`exponents` must count at least one gradient that is neither zero nor infinite, got "
            "an empty histogram. Count float32 gradients, before they are rounded to float16."
        )
    largest = int(_EXPONENTS[histogram > 0][-1])
    power = int(jnp.finfo(_small_float(dtype)).maxexp) - 1 - largest - headroom
    within = min(max(power, -126), 126)
    if power != within:
        warnings.warn(
            f"The loss scale that fits is 2**{power}, got its bound of 2**{within}. "
            + ("Increase the weight of the loss." if power > 0 else "Decrease it, or `headroom`."),
            stacklevel=2,
        )
    return 2.0**within


def plot_gradient_exponents(
    exponents: GradientExponents, ax: "Axes | None" = None, *, dtype: DTypeLike = jnp.float16
) -> "Axes":
    """Draw the histogram, with the limits of `dtype` in it.

    Needs matplotlib, the extra `plot`. Save the picture with
    `plot_gradient_exponents(exponents).figure.savefig(path)`.

    Args:
      exponents: From `gradient_exponents`, on the host. What is drawn are the gradients as they
        were given; for those that training computes, give it scaled ones.
      ax: The axes to draw into, by default those of a new figure.
      dtype: The type whose limits are drawn.

    Returns:
      The axes.

    Raises:
      TypeError: If `exponents` are none or traced, `ax` is no axes, or `dtype` no real
        floating-point type of at most 32 bits.
      ValueError: If the histogram is stacked or wrapped around.
    """
    info, name = jnp.finfo(_small_float(dtype)), jnp.dtype(dtype).name
    histogram = _counts(exponents)
    if ax is None:
        from matplotlib.figure import Figure  # noqa: PLC0415 - matplotlib is an extra

        ax = Figure(figsize=(8, 3.5), layout="constrained").subplots()
    elif not hasattr(ax, "axvspan"):
        raise TypeError(
            f"`ax` must be one axes of matplotlib, got {ax!r}. Leave it out, or take it from "
            "`figure.subplots()`."
        )
    zero = int(exponents.zero)
    entries = max(histogram.sum() + zero, 1)
    share = 100 * histogram / entries
    seen = _EXPONENTS[histogram > 0]
    ax.bar(_EXPONENTS + 0.5, share, width=1.0, color="#0072b2", edgecolor="white", linewidth=0.5)
    # What is less than half of the smallest number is rounded to zero.
    flushed_below, normal_from = info.minexp - info.nmant - 1, info.minexp
    for low, high, color, what in (
        (-150, flushed_below, "#d55e00", f"zero in {name}"),
        (flushed_below, normal_from, "#f0e442", "subnormal"),
        (normal_from, info.maxexp, "#009e73", "normal"),
        (info.maxexp, 129, "#555555", "infinite"),
    ):
        within = share[(low <= _EXPONENTS) & (high > _EXPONENTS)].sum()
        label = f"{what}: {within:.1f} %"
        ax.axvspan(low, high, facecolor=color, alpha=0.25, linewidth=0, zorder=0, label=label)
    ax.set(
        xlim=(min([flushed_below - 6, *seen - 1]), max([info.maxexp + 4, *seen + 2])),
        ylim=(0, 1.3 * max(share.max(), 1)),  # the legend stands above the bars
        xlabel="log2 of the gradient's magnitude",
        ylabel="% of the entries",
        title=f"{100 * zero / entries:.1f} % of the entries are exactly zero",
    )
    ax.legend(loc="upper center", ncols=4, fontsize="small")
    return ax


def _counts(exponents: GradientExponents) -> np.ndarray:
    """Return the histogram on the host."""
    if not isinstance(exponents, GradientExponents):
        raise TypeError(
            f"`exponents` must be GradientExponents, got {exponents!r}. Hand in "
            "`gradient_exponents(grads)`."
        )
    if any(isinstance(field, Tracer) for field in exponents):
        raise TypeError(
            "`exponents` must hold values, got traced arrays. Return them from the compiled step, "
            "and look at them outside."
        )
    for name, field in exponents._asdict().items():
        if np.asarray(field).dtype.kind not in "iuf":
            raise TypeError(
                f"`exponents.{name}` must hold counts, got {field!r}. Hand in "
                "`gradient_exponents(grads)`."
            )
    histogram = np.asarray(exponents.histogram)
    if histogram.shape != _EXPONENTS.shape:
        raise ValueError(
            f"`exponents` must hold one histogram, got shape {histogram.shape}. Sum over the "
            "steps or devices: `jax.tree.map(lambda x: x.sum(0), exponents)`."
        )
    if not (histogram >= 0).all():
        raise ValueError(
            "`exponents` must hold counts, got negative ones: an int32 has wrapped around. Add on "
            "the host, after `jax.tree.map(np.int64, exponents)`."
        )
    return histogram


def _small_float(dtype: DTypeLike | None) -> np.dtype:
    try:
        kind = None if dtype is None else jnp.dtype(dtype)  # NumPy takes None for float64
    except TypeError:
        kind = None
    if kind is None or not jnp.issubdtype(kind, jnp.floating) or jnp.finfo(kind).bits > 32:
        raise TypeError(
            "`dtype` must be a floating-point type of at most 32 bits, got "
            f"{dtype if kind is None else kind}. Use `jnp.float16`."
        )
    return kind


def _positive(name: str, value: Any) -> jax.Array:
    """Return `value` as float32[], or raise an error that calls it `name`."""
    kind = value.dtype if is_array(value) else type(value)
    if not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise TypeError(f"`{name}` must be a real number, got {value!r}. Use a power of two.")
    if jnp.shape(value):
        raise ValueError(
            f"`{name}` must be a scalar, got shape {jnp.shape(value)}. Use one power of two."
        )
    # What an array holds is data.
    if not is_array(value) and not 0 < value <= float(jnp.finfo(jnp.float32).max):
        raise ValueError(
            f"`{name}` must be positive, and finite in float32, got {value}. Use a power of two."
        )
    return jnp.asarray(value, jnp.float32)


def _natural(name: str, value: object) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {value!r}. Use `int` to convert it.")
    if value < 0:
        raise ValueError(f"`{name}` must be at least 0, got {value}. Use 0 for none.")
    return int(value)


def calibrate(
    grad_fn: Callable[..., PyTree],
    state: PyTree,
    *args: Any,
    loss_scale: LossScaleLike = "dynamic",
    axis_name: AxisName | None = None,
) -> LossScaleState:
    """Find the loss scale to start with, so that training need not skip its first steps.

    It is the largest power of two, within the bounds of the policy, at which the gradients are
    finite, found by bisection: five evaluations of the gradients for the default bounds, in one
    compiled loop. Put it into the optimizer's state with
    `opt_state._replace(loss_scale_state=...)`.

    Args:
      grad_fn: `grad_fn(state, *args)` returns the scaled gradients, for example
        `lambda state, *args: ols.value_and_grad(loss_fn)(state, *args)[1]`.
      state: The state to start from, or an optimizer's state that holds exactly one. `grad_fn` is
        given copies of it with other loss scales.
      *args: The rest of what `grad_fn` takes: the parameters and a batch, as training will see
        them.
      loss_scale: The policy that training uses, or anything that `as_loss_scale` takes.
      axis_name: The mapped axis, or a tuple of them, over which to agree. See `unscale_and_check`.

    Returns:
      The state with the loss scale that was found. If the gradients are finite at none, the
      smallest: `first_nonfinite` says where they are not.

    Raises:
      TypeError: If `grad_fn` is not callable, or the policy has no bounds, since its loss scale
        does not move.
      ValueError: If `state` holds no `LossScaleState`, or several, if there is no power of two
        within the bounds, or if `grad_fn` returns no gradients.

    Warns:
      UserWarning: If the gradients are finite even at the policy's `max_scale`, so that a larger
        loss scale might fit. Under `jax.jit` nothing warns.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def grad_fn(state, w):
      ...     return (3.0 * state.loss_scale * w).astype(jnp.float16)
      >>> float(ols.calibrate(grad_fn, ols.init(), jnp.ones(())).loss_scale)
      16384.0
    """
    check_grad_fn(grad_fn)
    policy = as_loss_scale(loss_scale)
    bounds = _bounds(policy)
    if bounds is None:
        raise TypeError(
            "`loss_scale` must have `min_scale` and `max_scale` to search between, got "
            f"{policy!r}. Calibrate for a `DynamicLossScale`, and build a `FixedLossScale` from "
            "the result."
        )
    lowest, highest = math.ceil(math.log2(bounds[0])), math.floor(math.log2(bounds[1]))
    if lowest > highest:
        raise ValueError(
            f"`loss_scale` must have a power of two between its bounds, got {policy!r}. Widen them."
        )

    def scale_at(power: jax.Array) -> jax.Array:
        return jnp.ldexp(jnp.float32(1), power)

    def bisect(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        candidate = with_scale(state, scale_at(middle))
        # Modules of `flax.nnx` can be used only in the trace that they were made in: these are.
        grads = grad_fn(candidate, *jax.tree.map(lambda leaf: leaf, args))
        if not any(map(is_inexact, jax.tree.leaves(grads))):
            raise ValueError(
                "`grad_fn` must return gradients, got a tree without floating-point numbers: "
                f"{jax.tree.structure(grads)}. Return what `value_and_grad` returns second."
            )
        _, grads_finite = unscale_and_check(grads, candidate, axis_name=axis_name)
        return jnp.where(grads_finite, middle, low), jnp.where(grads_finite, high, middle - 1)

    start = strongly_typed(loss_scale_state(state))
    power, _ = jax.lax.while_loop(
        lambda bounds: bounds[0] < bounds[1], bisect, (jnp.int32(lowest), jnp.int32(highest))
    )
    searched = lowest < highest and not isinstance(power, Tracer)
    if searched and jax.device_get(power) == highest:
        warnings.warn(
            f"The gradients are finite even at 2**{highest}, the cap of {policy!r}. If they are "
            "small, raise its `max_scale`.",
            stacklevel=2,
        )
    return start._replace(loss_scale=scale_at(power))


def check_grad_fn(grad_fn: Any) -> None:
    """Raise an error if `grad_fn` is no function."""
    if not callable(grad_fn):
        raise TypeError(
            "`grad_fn` must be a function of the state that returns scaled gradients, got "
            f"{grad_fn!r}. See `value_and_grad`."
        )


def with_scale(state: Tree, scale: ArrayLike) -> Tree:
    """Return `state`, or the optimizer's state that it is, with another loss scale."""

    def replace(node: Any) -> Any:
        if not isinstance(node, LossScaleState):
            return node
        leaves, treedef = jax.tree.flatten(node)  # in `flax.nnx` each field is a Variable of one
        return treedef.unflatten([jnp.asarray(scale, jnp.float32), *leaves[1:]])

    return jax.tree.map(replace, state, is_leaf=lambda node: isinstance(node, LossScaleState))
