"""A check for stalled training, and a table of its possible causes."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._guard import spikes_in
from optax_lossscale._loss_scale import FixedLossScale, LossScale, all_finite, as_loss_scale, init
from optax_lossscale._state import GuardState, LossScaleState, SpikeState, find, subtrees
from optax_lossscale._support import checks
from optax_lossscale._support.bounds import LARGEST_SCALE, SMALLEST_SCALE, as_float32
from optax_lossscale._support.lines import warn
from optax_lossscale._support.nnx import plain_keys
from optax_lossscale._support.tree import KeyPath, Leaf, PyTree, is_inexact, path_name


class LossScaleStalledError(RuntimeError):
    """Training has stalled: `check_health` found too many skipped steps in a row."""


def check_health(
    opt_state: PyTree,
    *,
    max_consecutive_skipped: int = 50,
    policy: LossScale | Literal["dynamic"] | Mapping[str, Any] | None = None,
) -> None:
    """Raise an error that lists possible causes if training has stalled.

    Call it on the host now and then. It waits for the step that computes `opt_state`. With a
    dynamic loss scale, the first few steps may be skipped, and later a single step now and then. If
    dozens are skipped in a row, something is wrong.

    Args:
      opt_state: As for `metrics`.
      max_consecutive_skipped: The largest number of skipped steps in a row that is still healthy.
      policy: The policy of the run, `"dynamic"` or a `get_config()` dict. If it is None, the bounds
        of the loss scale are unknown, and more causes are listed.

    Raises:
      LossScaleStalledError: If more than `max_consecutive_skipped` steps in a row were skipped. The
        message gives their number, the loss scale, and possible causes with their remedies.
      TypeError: If `max_consecutive_skipped` is not an integer, `policy` is a number, or
        `opt_state` is traced: a compiled step cannot raise an error.
      ValueError: If `max_consecutive_skipped` is negative; if `opt_state` holds no `LossScaleState`
        or several, or is stacked over replicas; or if training cannot produce it, for example
        because a checkpoint is damaged. Such a state has a negative count (including counts of the
        inner optimizer); a loss scale outside of the bounds of `policy` (without one, 2**-126 and
        2**126) or different from a `FixedLossScale`; a `Spike` with more values than its window; or
        NaN or infinity in an array of the inner state.

    Warns:
      UserWarning: If the loss scale has grown to its cap and no step was ever skipped. Then the
        loss need not be scaled, or the cap is too low.

    Examples:
      >>> import optax_lossscale as ols
      >>> ols.diagnostics.check_health(ols.init())
    """
    limit = checks.read_count("max_consecutive_skipped", max_consecutive_skipped, least=0)
    checks.require_policy(policy)
    known = None if policy is None else as_loss_scale(policy)
    low, high, is_dynamic = _range_of(known)
    state = _read(find(LossScaleState, "opt_state", opt_state)._asdict())
    guards = [guard for _, guard in subtrees(opt_state, GuardState)]
    rule_states, inner_state = guards[0][1:] if guards else ((), ())
    _refuse_impossible(state, rule_states, inner_state, low, high)
    scale, skipped = state["loss_scale"], state["consecutive_skipped"]
    if skipped > limit:
        spikes = [_read_spike(spike) for _, spike in spikes_in(rule_states)]
        in_a_row = max((spike["consecutive_skipped"] for spike in spikes), default=0)
        is_low = scale <= (low if is_dynamic else 1)
        causes = list(_possible_causes(is_dynamic=is_dynamic, is_low=is_low))
        if rule_states:  # one of them may have recorded all skipped steps
            causes = [_A_RULE] if in_a_row >= skipped else [*causes, _A_RULE]
        where = f", {'at' if is_low else 'above'} its floor of {low:g}" if is_dynamic else ""
        raise LossScaleStalledError(
            f"The last {skipped} steps were skipped ({state['total_skipped']} since the start), "
            f"and the loss scale is {scale:g}{where}. Possible causes, most likely first:"
            + "".join(f"\n  {i}. {cause}" for i, cause in enumerate(causes, start=1))
        )
    if known is not None and scale == high and not state["total_skipped"]:
        with jax.transfer_guard("allow"):  # this transfer is intended
            start = init(known).loss_scale.item()
        if start < scale:
            warn(
                f"The loss scale is at its cap of {scale:g} and no step was ever skipped. Either "
                "the loss need not be scaled, as in bfloat16 and float32, or the cap is too low: "
                "raise `max_scale`. `gradient_exponents` shows which."
            )


def _possible_causes(*, is_dynamic: bool | None, is_low: bool) -> Iterator[str]:
    """Yield the possible causes of skipped steps except for rules, most likely first.

    Args:
      is_dynamic: Whether the loss scale changes, None if that is unknown.
      is_low: Whether the loss scale is at its floor or, if that is unknown, at most 1.
    """
    if not is_low and is_dynamic is not False:
        yield (
            "The loss scale started too large and is still falling. Start with a smaller "
            "`initial_scale`, or allow more skipped steps with `max_consecutive_skipped`."
        )
    if not is_low and not is_dynamic:
        yield (
            "The loss scale is too large, and fixed. Use the one that `suggest_loss_scale` "
            "returns, or a `DynamicLossScale`."
        )
    yield (
        "The forward pass overflows: the loss is not finite although the batch and the parameters "
        "are, at any loss scale. `first_nonfinite(fun, params, batch)` names the layer that "
        "overflows first, if `fun` is what the step differentiates: `autocast(loss_fn, dtype)`, "
        "not `loss_fn`. Compute the layer in float32, or make its input smaller."
    )
    yield (
        "The loss is finite, and one layer's derivative is not, at any loss scale: a division by "
        "zero, the root or logarithm of zero, a number above 65504 in float16. "
        "`first_nonfinite(jax.grad(fun), params, batch)` names it, if `fun` is what the step "
        "differentiates. Compute it in float32."
    )
    yield (
        "The batch or the parameters hold NaN or infinity. `nonfinite_report` of both lists the "
        "arrays. Repair the data, or restore an earlier checkpoint."
    )
    if is_low or is_dynamic is None:
        yield (
            "The gradients are too large for float16 even at this loss scale. Average the loss "
            "instead of summing it, normalize the data, or lower `min_scale`, below 1 if need be."
        )


_A_RULE = (
    "A rule (`skip_if`) rejects steps whose gradients and loss are finite, for example because the "
    "loss has reached a new level. Relax the rule: a `Spike` accepts a new level after "
    "`max_consecutive_skipped` steps at the latest."
)


def _range_of(policy: object) -> tuple[float, float, bool | None]:
    """Return the bounds of the float32 loss scale, and whether it changes (None if unknown)."""
    low, high = getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)
    if low is not None and high is not None:
        return as_float32(low), as_float32(high), True
    if isinstance(policy, FixedLossScale):
        return as_float32(policy.scale), as_float32(policy.scale), False
    return SMALLEST_SCALE, LARGEST_SCALE, None


def _read(fields: dict[str, Any]) -> dict[str, float]:
    """Return the scalar fields of a state as Python numbers."""
    remedy = "Call it outside of the compiled step. Inside, use `is_stalled`."
    checks.require_values("opt_state", fields, remedy)
    for name, field in fields.items():
        checks.require_scalar(f"opt_state.{name}", field, "Pass one replica: `x[0]` of every leaf.")
    return {name: np.asarray(jax.device_get(field)).item() for name, field in fields.items()}


def _read_spike(spike: SpikeState) -> dict[str, float]:
    return _read({"held": spike.held, "consecutive_skipped": spike.consecutive_skipped})


def _refuse_impossible(
    state: dict[str, float], rule_states: PyTree, inner_state: PyTree, low: float, high: float
) -> None:
    """Refuse a state that training cannot produce. It is damaged, or was edited by hand.

    A loss scale that is far too large or small would make all gradients zero, and skip no step.
    """
    if not low <= state["loss_scale"] <= high or min(state.values()) < 0:
        raise _impossible(f"a loss scale from {low:g} to {high:g}, and counts of at least 0", state)
    for path, spike in spikes_in(rule_states):
        numbers, window = _read_spike(spike), spike.values.shape[0]
        if numbers["held"] > window or min(numbers.values()) < 0:
            expected = f"a Spike with at most {window} values, and counts of at least 0"
            raise _impossible(expected, f"{numbers} at {path_name(path)}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(inner_state):
        where = f"at {path_name(path)} of the inner state"
        if np.ndim(leaf) and not _is_finite(leaf):
            raise _impossible("arrays of finite numbers", f"NaN or infinity {where}")
        if _is_count(path, leaf) and jax.device_get(leaf) < 0:
            raise _impossible("counts of at least 0", f"{leaf} {where}")


def _impossible(expected: str, got: object) -> ValueError:
    return ValueError(
        f"`opt_state` must hold {expected}, got {got}. Restore a checkpoint or the state of `init`."
    )


def _is_count(path: KeyPath, leaf: Leaf) -> bool:
    """Return whether a leaf is a scalar integer named `count`, as in Optax, or `..._count`."""
    is_integer = jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.integer)
    is_named = any(str(key).endswith("count") for key in plain_keys(path)[-1:])
    return is_named and is_integer and not np.ndim(leaf)


def _is_finite(array: Any) -> bool:
    if getattr(array, "is_fully_addressable", True):
        return bool(jax.device_get(all_finite(array)))
    # Check only the shards of this process, since other processes may not call this function. Check
    # replicated shards once. Check on the host, since JAX rejects single-device arrays while a mesh
    # is set.
    shards = {str(s.index): s.data for s in array.addressable_shards if is_inexact(array)}
    return all(np.isfinite(jax.device_get(shard)).all() for shard in shards.values())
