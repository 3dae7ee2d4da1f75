"""A check for stalled training, and a table of its possible causes."""

import concurrent.futures
import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from optax_lossscale._guard import spikes_in
from optax_lossscale._loss_scale import FixedLossScale, LossScale, all_finite, as_loss_scale, init
from optax_lossscale._state import GuardState, LossScaleState, find, subtrees
from optax_lossscale._support import checks
from optax_lossscale._support.bounds import LARGEST_SCALE, SMALLEST_SCALE, as_float32
from optax_lossscale._support.lines import warn
from optax_lossscale._support.tree import Array, PyTree, is_inexact, path_name


class LossScaleStalledError(RuntimeError):
    """Training has stalled: `check_health` found too many skipped steps in a row."""


def check_health(
    opt_state: PyTree,
    *,
    max_consecutive_skipped: int = 50,
    policy: LossScale | Literal["dynamic"] | Mapping[str, Any] | None = None,
) -> None:
    """Raise an error that lists possible causes if training has stalled.

    Call it on the host now and then. It waits for the step that computes `opt_state`, once. If
    arrays span several processes, each process checks its own parts, and need not wait for others.
    With a dynamic loss scale, the first few steps may be skipped, and later a single step now and
    then. If dozens are skipped in a row, something is wrong.

    Args:
      opt_state: As for `metrics`.
      max_consecutive_skipped: The largest number of skipped steps in a row that is still healthy.
      policy: The policy of the run, `"dynamic"` or a `get_config()` dict. If it is None, the bounds
        of the loss scale are unknown, and more causes are listed.

    Raises:
      LossScaleStalledError: If more than `max_consecutive_skipped` steps in a row were skipped. The
        message gives their number, the loss scale, and possible causes with their remedies.
      TypeError: If `max_consecutive_skipped` is not an integer, `policy` is a number, or
        `opt_state` is traced or abstract: a compiled step cannot raise an error, and the result of
        `jax.eval_shape` has no values.
      ValueError: If `max_consecutive_skipped` is negative; if `opt_state` holds no `LossScaleState`
        or several, or is stacked over replicas; or if training cannot go on from it. Such a state
        has a negative count of steps; a loss scale outside of the bounds of `policy` (without one,
        2**-126 and 2**126) or different from a `FixedLossScale`; or NaN or infinity in an array of
        the inner state. Then a checkpoint is damaged, or a finite gradient had an infinite square.

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
    with jax.ensure_compile_time_eval():  # JAX may be tracing a function that calls this
        state = _read(find(LossScaleState, "opt_state", opt_state)._asdict())
    guards = [guard for _, guard in subtrees(opt_state, GuardState)]
    rule_states, inner_state = guards[0][1:] if guards else ((), ())
    scale, skipped = state["loss_scale"], state["consecutive_skipped"]
    if not low <= scale <= high or min(state.values()) < 0:
        raise ValueError(
            f"`opt_state` must hold a loss scale from {low:g} to {high:g}, and counts of at least "
            f"0, got {state}. Restore a checkpoint or the state of `init`."
        )
    checks.require_values("opt_state", inner_state, _REMEDY)
    _refuse_nonfinite(inner_state)
    if skipped > limit:
        spikes = [spike.consecutive_skipped for _, spike in spikes_in(rule_states)]
        in_a_row = max(jax.device_get(spikes), default=0)
        is_low = scale <= (low if is_dynamic else 1)
        causes = list(_possible_causes(scale, is_dynamic=is_dynamic, is_low=is_low))
        if rule_states:  # one of them may have recorded all skipped steps
            causes = [_A_RULE] if in_a_row >= skipped else [*causes, _A_RULE]
        where = f", {'at' if is_low else 'above'} its floor of {low:g}" if is_dynamic else ""
        raise LossScaleStalledError(
            f"The last {skipped} steps were skipped ({state['total_skipped']} since the start), "
            f"and the loss scale is {scale:g}{where}. Possible causes, most likely first:"
            + "".join(f"\n  {i}. {cause}" for i, cause in enumerate(causes, start=1))
        )
    if known is not None and scale == high and not state["total_skipped"]:
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):  # it is intended
            start = init(known).loss_scale.item()
        if start < scale:
            warn(
                f"The loss scale is at its cap of {scale:g} and no step was ever skipped. Either "
                "the loss need not be scaled, as in bfloat16 and float32, or the cap is too low: "
                "raise `max_scale`. `gradient_exponents` shows which."
            )


def _possible_causes(loss_scale: float, *, is_dynamic: bool | None, is_low: bool) -> Iterator[str]:
    """Yield the possible causes of skipped steps except for rules, most likely first.

    Args:
      loss_scale: The current loss scale.
      is_dynamic: Whether the loss scale changes, None if that is unknown.
      is_low: Whether the loss scale is at its floor or, if that is unknown, at most 1.
    """
    if not is_low and is_dynamic is not False:
        yield (
            "The loss scale started too large and is still falling. Start with a smaller "
            "`initial_scale`, or allow more skipped steps with `max_consecutive_skipped`."
        )
    if not is_dynamic and loss_scale != 1:
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
    if not is_dynamic and loss_scale == 1:
        yield (
            "The function that the step differentiates is wrapped by `scale_inside`, with too "
            "large a number. Divide it by 16."
        )
    if is_dynamic is None or (is_dynamic and is_low):
        yield (
            "The gradients are too large for float16 even at this loss scale. Average the loss "
            "instead of summing it, normalize the data, or lower `min_scale` under "
            "`with_loss_scaling`, below 1 if need be."
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


_REMEDY = "Call it outside of the compiled step. Inside, use `is_stalled`."


def _read(fields: dict[str, Any]) -> dict[str, float]:
    """Return the scalar fields of a state as Python numbers."""
    checks.require_values("opt_state", fields, _REMEDY)
    for name, field in fields.items():
        checks.require_scalar(f"opt_state.{name}", field, "Pass one replica: `x[0]` of every leaf.")
    return {name: np.asarray(field).item() for name, field in jax.device_get(fields).items()}


def _refuse_nonfinite(inner_state: PyTree) -> None:
    """Raise if an array of the inner optimizer has NaN or infinity. A scalar may have them."""
    leaves = jax.tree_util.tree_leaves_with_path(inner_state)
    arrays = [(path, leaf) for path, leaf in leaves if np.ndim(leaf) and is_inexact(leaf)]
    # In a thread of its own, neither a function that JAX traces nor a mesh that the caller has set
    # (it takes no other arrays than its own) is the context of the check.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        place = thread.submit(_first_nonfinite, [array for _, array in arrays]).result()
    if place is not None:
        raise ValueError(
            "`opt_state` must hold arrays of finite numbers, got NaN or infinity at "
            f"{path_name(arrays[place][0])} of the inner state. Probably a gradient's square "
            "overflows: clip inside the guard, then go on from an older state."
        )


def _first_nonfinite(arrays: Sequence[Any]) -> int | None:
    """Return the place of the first array that is not finite, None if all are.

    All checks are started before the first is waited for.
    """
    with jax.transfer_guard("allow"), _no_mesh():
        groups = list(_groups(arrays))
        flags = jax.device_get([_is_finite(part for _, part in group) for group in groups])
        failed = (group for group, flag in zip(groups, flags, strict=True) if not flag)
        places = sorted({place for group in failed for place, _ in group})
        parts = {place: _local_parts(arrays[place]) for place in places}
        return next((i for i in places if not all(_is_finite([x]) for x in parts[i])), None)


_compiled = jax.jit(all_finite)


def _is_finite(arrays: Iterable[Any]) -> Any:
    """Return whether arrays of one placement are finite. `bool[]`."""
    arrays = list(arrays)
    if isinstance(arrays[0], jax.Array):
        return _compiled(arrays)
    return all(np.isfinite(array).all() for array in arrays)


_ALIKE = 16  # arrays of one shape in a compiled check: cheap to compile (jaxlib 0.10.2)
_MOST = 256  # arrays in a compiled check: a program of thousands takes minutes to compile


def _groups(arrays: Sequence[Any]) -> Iterator[list[tuple[int, Any]]]:
    """Yield groups of arrays that one compiled check takes, each with its place.

    Most optimizers hold many arrays of a few shapes. Their groups share a compiled check.
    """
    alike: dict[Hashable, list[tuple[int, Any]]] = {}
    for place, array in enumerate(arrays):
        sharding = getattr(array, "sharding", None)  # NumPy's arrays have none
        alike.setdefault((sharding, array.shape, array.dtype), []).append((place, array))
    others: dict[Hashable, list[tuple[int, Any]]] = {}
    for group in alike.values():
        full = 0
        if getattr(group[0][1], "is_fully_addressable", True):
            full = len(group) - len(group) % _ALIKE
            yield from (group[i : i + _ALIKE] for i in range(0, full, _ALIKE))
        for place, array in group[full:]:
            for part in _local_parts(array):
                others.setdefault(_placement(part), []).append((place, part))
    for group in others.values():
        yield from (group[i : i + _MOST] for i in range(0, len(group), _MOST))


def _local_parts(array: Array) -> list[Array]:
    """Return the array, or the different shards of this process if it spans several."""
    if getattr(array, "is_fully_addressable", True):
        return [array]
    sharded: Any = array
    return list({str(shard.index): shard.data for shard in sharded.addressable_shards}.values())


def _placement(array: Array) -> Hashable:
    """Return what arrays must share to be the arguments of one compiled function."""
    if not isinstance(array, jax.Array):
        return ()
    devices = tuple(shard.device for shard in array.addressable_shards)
    return devices, jax.typeof(array).sharding.mesh


def _no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Return a context without the mesh that is set for all threads. jax 0.7.0 has none."""
    empty = jax.sharding.Mesh(np.empty((), object), ())
    return jax.set_mesh(empty) if hasattr(jax, "set_mesh") else contextlib.nullcontext()
