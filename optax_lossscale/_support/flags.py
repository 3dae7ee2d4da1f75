"""Flags, and the agreement of all devices on them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._support.tree import AxisName


def all_true(flags: Sequence[jax.Array]) -> jax.Array:
    """Return whether all flags are true, as a minimum over numbers.

    XLA rewrites a conjunction of L flags into one wide `and`, and XLA:CPU fuses that into each of
    the L selections that read it: L**2 instructions, and minutes of compilation for a thousand
    arrays (jaxlib 0.10.2; `test_the_program_grows_linearly_with_the_number_of_arrays`).
    """
    return jnp.min(jnp.stack(flags).astype(jnp.int32)).astype(jnp.bool_)


def agree(
    flags: Sequence[jax.Array], axis_name: AxisName | None, measures: Sequence[jax.Array] = ()
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return which flags hold on every member of the mapped axes, and the mean of each measure.

    Flags are `bool[]`, measures `float32[]`, and there is one collective for all of them.
    """
    if axis_name is None:
        return [*flags], [*measures]
    if not measures:
        return [*_reduce_over(axis_name, jax.lax.pmin, jnp.stack(flags))], []
    # Average the failures: exactly 0 if none fails. An average of successes may round below 1.
    numbers = jnp.stack([*((~flag).astype(jnp.float32) for flag in flags), *measures])
    means = [*_reduce_over(axis_name, jax.lax.pmean, numbers)]
    return [mean == 0 for mean in means[: len(flags)]], means[len(flags) :]


def _reduce_over(axis_name: AxisName, reduce: Callable[..., Any], array: jax.Array) -> jax.Array:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        # The `pmin` of jax 0.12 refuses axes over which the type says that the array is constant.
        # Without `check_vma`, types say so of everything, the index of an axis included.
        is_typed = [name in _varying(jax.lax.axis_index(name)) for name in names]
        pairs = zip(names, is_typed, strict=True)
        varying = tuple(name for name, typed in pairs if not typed or name in _varying(array))
        return reduce(array, varying) if varying else array
    except NameError as error:  # what JAX raises for an axis that is not mapped
        raise ValueError(
            f"`axis_name` must be the name of a mapped axis, or a tuple of them, got "
            f"{axis_name!r}. Call the function within `jax.shard_map`, `jax.pmap` or `jax.vmap` "
            "over that axis, or leave `axis_name` out under plain `jax.jit`."
        ) from error


def _varying(array: jax.Array) -> frozenset[Any]:
    """Return the mapped axes over which the type says that an array varies."""
    kind: Any = jax.typeof(array)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # its name before jax 0.10
