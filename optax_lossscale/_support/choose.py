"""Flags: the agreement of all devices on them, and choosing between two trees by one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import treedef_is_leaf
from jax.typing import ArrayLike

from optax_lossscale._support import checks
from optax_lossscale._support.nnx import is_nnx
from optax_lossscale._support.tree import (
    ARRAYS,
    AxisName,
    Flag,
    KeyPath,
    Tree,
    is_inexact,
    is_selectable,
    path_name,
)


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


def tree_where(pred: ArrayLike, on_true: Tree, on_false: Tree) -> Tree:
    """Choose between two trees of the same structure.

    Use it with `applied` for all that must not move on a skipped step and is not part of the
    optimizer's state: BatchNorm statistics, a moving average of the parameters, a random key.

    Args:
      pred: Which tree to take. `bool[]`, or a Python `bool`.
      on_true: The tree that is returned where `pred` is true. Arrays of any dtype and PRNG keys
        are selected with `jnp.where`; any other leaf must be the same in both trees.
      on_false: The tree that is returned elsewhere, of the same structure, shapes and dtypes.

    Raises:
      TypeError: If `pred` is not boolean, or the dtypes of a leaf differ.
      ValueError: If `pred` is not a scalar, or the trees differ in structure, in the shape of a
        leaf or in a leaf that is not an array. The message names the key path.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> new = {"mean": jnp.array([3.0]), "momentum": 0.9}
      >>> old = {"mean": jnp.array([2.0]), "momentum": 0.9}
      >>> ols.tree_where(False, new, old)
      {'mean': Array([2.], dtype=float32), 'momentum': 0.9}
    """
    pred = checks.read_flag("pred", pred)
    remedy = "`on_true` and `on_false` are two versions of one tree."
    checks.require_same_structure("on_true", on_true, on_false, remedy)

    def choose(path: KeyPath, new: Any, old: Any) -> Any:
        dtypes = [leaf.dtype for leaf in (new, old) if isinstance(leaf, ARRAYS)]
        if len({*dtypes}) > 1:
            raise TypeError(
                f"the leaf at {path_name(path)} must have one dtype in both trees, got {dtypes[0]} "
                f"and {dtypes[1]}. Cast one of them with `astype`."
            )
        if is_selectable(new) and is_selectable(old):
            return jnp.where(pred, new, old)
        checks.require_same(path, new, old)
        return new

    return jax.tree_util.tree_map_with_path(choose, on_true, on_false)


def constant_if_skipped(applied: Flag, tree: Tree) -> Tree:
    """Return `tree`, with a derivative of zero for its numbers where a step is skipped."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        jax.lax.select_n(applied, jax.lax.stop_gradient(leaf), leaf)
        if isinstance(leaf, Tracer) and is_inexact(leaf)
        else leaf
        for leaf in leaves
    )


def zeros_if_skipped(applied: Flag, tree: Tree) -> Tree:
    """Return `tree` with zeros for its numbers where a step is skipped: they may be NaN.

    In a compiled step, constants stay: a function may branch by them. A tree in which nothing
    changes is returned itself, since a function may write into it.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_known = not isinstance(applied, Tracer)

    def zero(leaf: Any) -> Any:
        if (is_known and applied) or not is_inexact(leaf):
            return leaf
        if is_known and isinstance(leaf, (float, complex)):
            return type(leaf)(0)
        if is_known or isinstance(leaf, Tracer):
            return jnp.where(applied, leaf, jax.lax.full_like(jnp.asarray(leaf), 0))
        return leaf

    zeros = [*map(zero, leaves)]
    is_same = all(new is old for new, old in zip(zeros, leaves, strict=True))
    is_object = not treedef_is_leaf(treedef) and is_nnx(tree, "Module", "Variable")
    return tree if is_same or is_object else treedef.unflatten(zeros)
