"""Flags, and choosing between two trees by one."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from optax_lossscale._support import checks
from optax_lossscale._support.nnx import is_nnx
from optax_lossscale._support.tree import KeyPath, Tree, is_array, is_inexact, path_name


def all_true(flags: Sequence[jax.Array]) -> jax.Array:
    """Return whether all flags are true, as a minimum over numbers.

    XLA rewrites a conjunction of L flags into one wide `and`, and XLA:CPU fuses that into each of
    the L selections that read it: L**2 instructions, and minutes of compilation for a thousand
    arrays (jaxlib 0.10.2; `test_the_program_grows_linearly_with_the_number_of_arrays`).
    """
    return jnp.min(jnp.stack(flags).astype(jnp.int32)).astype(jnp.bool_)


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
    pred = checks.flag("pred", pred)
    check_alike(on_true, on_false)

    def choose(new: Any, old: Any) -> Any:
        return jnp.where(pred, new, old) if is_selectable(new) else new

    return jax.tree.map(choose, on_true, on_false)


def check_alike(new: Tree, old: Tree) -> None:
    """Refuse trees between whose leaves `jnp.where` cannot choose."""
    checks.same_structure("on_true", new, old, "Select between two versions of one tree.")

    def check(path: KeyPath, new: Any, old: Any) -> None:
        if not (is_array(new) and is_array(old)):
            if new is old or (type(new) is type(old) and bool(new == old)):
                return
            raise ValueError(
                f"the leaf at {path_name(path)} must be an array in both trees or the same in "
                f"both, got {new!r} and {old!r}. Make it an array with `jnp.asarray` if it changes."
            )
        if new.dtype != old.dtype:
            raise TypeError(
                f"the leaf at {path_name(path)} must have one dtype in both trees, got {new.dtype} "
                f"and {old.dtype}. Cast one of them with `astype`."
            )

    jax.tree_util.tree_map_with_path(check, new, old)


def is_selectable(leaf: Any) -> bool:
    """Return whether `jnp.where` takes a leaf."""
    return is_array(leaf) and leaf.dtype != jax.dtypes.float0  # which has a single value


def constant_unless(pred: jax.Array, array: Any) -> Any:
    """Return `array`, with a derivative of zero where `pred` is false."""
    if not (isinstance(array, Tracer) and is_inexact(array)):
        return array
    return jax.lax.select_n(pred, jax.lax.stop_gradient(array), array)


def zero_unless(pred: jax.Array, tree: Tree) -> Tree:
    """Return `tree` with zeros for its floating-point and complex numbers where `pred` is false.

    In a compiled step, constants stay: a function may branch by them. A tree in which nothing
    changes is returned itself, since a function may write into it.
    """
    if not isinstance(pred, Tracer):
        return tree if pred else jax.tree.map(_zeros_like, tree)
    if not any(map(_is_traced, jax.tree.leaves(tree))) or is_nnx(tree, "Module", "Variable"):
        return tree

    def select(leaf: Any) -> Any:
        return jnp.where(pred, leaf, _zeros_like(leaf)) if _is_traced(leaf) else leaf

    return jax.tree.map(select, tree)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tracer) and is_inexact(leaf)


def _zeros_like(leaf: Any) -> Any:
    if isinstance(leaf, (float, complex)):
        return type(leaf)(0)
    return jax.lax.full_like(jnp.asarray(leaf), 0) if is_inexact(leaf) else leaf
