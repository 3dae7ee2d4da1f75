"""Agree on flags across devices."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._support.tree import AxisName, shown


def agree(
    axis_name: AxisName, flags: Sequence[jax.Array], measures: Sequence[jax.Array] = ()
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return, for each flag, whether it is true on every device, and the mean of each measure.

    Flags are `bool[]`, measures `float32[]`. The devices are those of the mapped axes. There is one
    collective for all flags and measures.
    """
    if not measures:
        return [*_reduce_over(axis_name, jax.lax.pmin, jnp.stack(flags))], []
    # Average the failures: exactly 0 if none fails. An average of successes may round below 1.
    numbers = jnp.stack([*((~flag).astype(jnp.float32) for flag in flags), *measures])
    means = [*_reduce_over(axis_name, jax.lax.pmean, numbers)]
    return [mean == 0 for mean in means[: len(flags)]], means[len(flags) :]


def _reduce_over(
    axis_name: AxisName,
    reduce: Callable[[jax.Array, tuple[Hashable, ...]], jax.Array],
    array: jax.Array,
) -> jax.Array:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        # The `pmin` of jax 0.12 raises for axes over which the array's type is constant. Without
        # `check_vma`, all types are constant, even the index of an axis.
        is_typed = [name in _varying(jax.lax.axis_index(name)) for name in names]
        pairs = zip(names, is_typed, strict=True)
        varying = tuple(name for name, typed in pairs if not typed or name in _varying(array))
        return reduce(array, varying) if varying else array
    except NameError as error:  # what JAX raises for an axis that is not mapped
        raise ValueError(
            f"`axis_name` must be the name of a mapped axis, or a tuple of them, got "
            f"{shown(axis_name)}. Call the function within `jax.shard_map`, `jax.pmap` or "
            "`jax.vmap` over that axis, or leave `axis_name` out under plain `jax.jit`."
        ) from error


def _varying(array: jax.Array) -> frozenset[Hashable]:
    """Return the mapped axes over which an array varies, according to its type."""
    kind: Any = jax.typeof(array)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # its name before jax 0.10
