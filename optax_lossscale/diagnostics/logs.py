"""Numbers to log: the state of loss scaling, and counts of nonfinite elements."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from optax_lossscale._guard import spike_statistics, spikes_in
from optax_lossscale._order import warn_of_outside
from optax_lossscale._state import GuardState, LossScaleState, applied, find, subtrees
from optax_lossscale._support import checks
from optax_lossscale._support.bounds import INT32_MAX
from optax_lossscale._support.tree import PyTree, is_finite, is_inexact, is_symbolic
from optax_lossscale.diagnostics.reports import Report, table_or_shapes

_WARNED: set[str] = set()  # messages that this process has given


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Return numbers to log at every step, without copying or waiting for the device.

    Call it in the compiled step, or between two steps if the state is not donated.

    Args:
      opt_state: An optimizer's state, or any pytree that holds exactly one `LossScaleState`.

    Returns:
      Arrays by name.

      - `loss_scale`: The loss scale, 1 for `with_skipping`. `float32[]`.
      - `applied`: Whether the last step was applied. `bool[]`.
      - `growth_count`, `consecutive_skipped`, `total_skipped`: See `LossScaleState`. `int32[]`.
      - `spike_mean`, `spike_deviation`: For a `Spike` in the guard, the mean and the standard
        deviation of the values that it remembers. 0 while it remembers none. `float32[]`.
      - `spike_consecutive_skipped`: The number of spikes that it skipped in a row. `int32[]`.

      Several spikes are numbered in their order: `spike_0_mean` and so on.

    Raises:
      ValueError: If `opt_state` holds no `LossScaleState`, or several.

    Warns:
      UserWarning: If transformations are outside the guard. Each message appears once per process.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.update(ols.init(), False, "dynamic")
      >>> print(*(f"{k}={v}" for k, v in ols.diagnostics.metrics(state).items()))
      loss_scale=16384.0 applied=False growth_count=0 consecutive_skipped=1 total_skipped=1
    """
    warn_of_outside(opt_state, _WARNED)
    state = find(LossScaleState, "opt_state", opt_state)
    found = {
        "loss_scale": state.loss_scale,
        "applied": applied(state),
        "growth_count": state.growth_count,
        "consecutive_skipped": state.consecutive_skipped,
        "total_skipped": state.total_skipped,
    }
    guards = [guard for _, guard in subtrees(opt_state, GuardState)]
    spikes = [spike for guard in guards for _, spike in spikes_in(guard.rule_states)]
    for number, spike in enumerate(spikes):
        arrays = jax.tree.map(jnp.asarray, spike)
        with jax.transfer_guard("allow"):  # op by op, its constants are copied to the device
            mean, deviation = spike_statistics(arrays)
        prefix = "spike_" if len(spikes) == 1 else f"spike_{number}_"
        found |= {
            f"{prefix}mean": mean,
            f"{prefix}deviation": deviation,
            f"{prefix}consecutive_skipped": arrays.consecutive_skipped,
        }
    return found


def is_stalled(opt_state: PyTree, *, max_consecutive_skipped: int = 50) -> jax.Array:
    """Return whether too many steps in a row were skipped, for use inside a compiled loop.

    Use it in the condition of a `jax.lax.while_loop`, or return it from a `jax.lax.scan` and test
    it between two scans. `check_health` lists possible causes.

    Args:
      opt_state: As for `metrics`.
      max_consecutive_skipped: The largest number of skipped steps in a row that is still healthy.

    Returns:
      Whether more than `max_consecutive_skipped` steps in a row were skipped. `bool[]`.

    Raises:
      TypeError: If `max_consecutive_skipped` is not an integer.
      ValueError: If `max_consecutive_skipped` is negative, or `opt_state` holds no `LossScaleState`
        or several.

    Examples:
      >>> import optax_lossscale as ols
      >>> state = ols.init()
      >>> bool(ols.diagnostics.is_stalled(state._replace(consecutive_skipped=51)))
      True
    """
    limit = checks.read_count("max_consecutive_skipped", max_consecutive_skipped, least=0)
    return _exceeds(find(LossScaleState, "opt_state", opt_state).consecutive_skipped, limit)


# Op by op, the limit would be copied to the device.
_exceeds = jax.jit(operator.gt, static_argnums=1, inline=True)


class NonfiniteCounts(NamedTuple):
    """Counts of the elements of one array, from `nonfinite_report`.

    Attributes:
      nan: The number of elements that are NaN. `int32[]`.
      inf: The number of elements that are infinite. `int32[]`.
      size: The number of all elements. `int32[]`.
    """

    nan: jax.Array
    inf: jax.Array
    size: jax.Array


@jax.tree_util.register_pytree_with_keys_class
class NonfiniteReport(Report[NonfiniteCounts]):
    """Counts by key path. It is a pytree, so functions inside `jit` and `scan` can return it."""

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """Return the counts with their keys, and the names of the arrays."""
        return [(jax.tree_util.DictKey(name), self[name]) for name in self], tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], counts: Sequence[Any]) -> Self:
        """Return a report with these names and counts."""
        return cls(dict(zip(names, counts, strict=True)))

    def __repr__(self) -> str:
        """Return the table, sorted by the share of nonfinite elements, largest first."""
        return table_or_shapes(self._table, self)

    def _table(self) -> str:
        counts = {name: [int(count) for count in each] for name, each in self.items()}
        bad = {name: (nan + inf) / size for name, (nan, inf, size) in counts.items() if nan + inf}
        lines = [f"{len(bad)} of {len(counts)} arrays are not finite" + (":" if bad else ".")]
        for name, share in sorted(bad.items(), key=lambda item: -item[1]):
            nan, inf, size = counts[name]
            where, percent = name or "the root of the tree", f"{100 * share:.3g} %"
            lines.append(f"  {where}: {nan} NaN and {inf} infinite of {size} elements ({percent})")
        return "\n".join(lines)


def nonfinite_report(grads: PyTree) -> Mapping[str, NonfiniteCounts]:
    """Count the NaN and infinite elements of each array.

    Gradients do not show which layer overflowed: in the backward pass, NaN spreads to all earlier
    layers, and from the loss to every layer. `first_nonfinite` names the layer.

    Args:
      grads: Gradients, a batch, or any pytree. Only floating-point and complex leaves are counted.
        A complex element counts once, as NaN if either part is NaN.

    Returns:
      The counts by key path, as `jax.tree_util.keystr` formats it. They print as a table. In an
      array with more than 2**31 - 1 elements, counts are approximate, and saturate there.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> grads = {"dense": jnp.array([1.0, jnp.nan]), "head": jnp.ones(3)}
      >>> report = ols.diagnostics.nonfinite_report(grads)
      >>> print(report)
      1 of 2 arrays are not finite:
        ['dense']: 1 NaN and 0 infinite of 2 elements (50 %)
      >>> int(report["['dense']"].nan)
      1
    """

    def counts(array: jax.Array) -> NonfiniteCounts:
        is_large = not is_symbolic(array.size) and array.size > INT32_MAX
        # An int32 would overflow, to 0 for 2**32 elements.
        dtype, largest = (jnp.float32, 2.0**31 - 128) if is_large else (jnp.int32, INT32_MAX)
        is_nan = array != array  # noqa: PLR0124 - `jnp.isnan` does not support every 8-bit format
        masks = is_nan, ~(is_finite(array) | is_nan)
        nan, inf = (jnp.minimum(jnp.sum(mask, dtype=dtype), largest) for mask in masks)
        size = INT32_MAX if is_large else array.size
        return NonfiniteCounts(*(jnp.asarray(x, jnp.int32) for x in (nan, inf, size)))

    leaves = jax.tree_util.tree_leaves_with_path(grads)
    arrays = {jax.tree_util.keystr(path): x for path, x in leaves if is_inexact(x)}
    return NonfiniteReport({name: counts(jnp.asarray(x)) for name, x in arrays.items()})
