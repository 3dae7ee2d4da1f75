"""Cast a model and its batch."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._support import checks
from optax_lossscale._support.tree import KeyPath, Tree, is_array


def cast(tree: Tree, dtype: DTypeLike, *, keep: Callable[[str], bool] | None = None) -> Tree:
    """Return `tree` with its floating-point arrays in another dtype.

    Args:
      tree: Any pytree: parameters, a batch, an Equinox module. Integers, booleans, complex numbers,
        PRNG keys and whatever is not an array stay as they are.
      dtype: A floating-point type, such as `jnp.float16` or `jnp.bfloat16`.
      keep: Says of a path, as `jax.tree_util.keystr` writes it, whether the array there stays as
        it is: `lambda path: "norm" in path`.

    Returns:
      A tree of the same structure and shapes.

    Raises:
      TypeError: If `dtype` is not a floating-point type, or `tree` holds a stateful `flax.nnx`
        module.

    Warns:
      UserWarning: If `keep` names none of the floating-point arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> params = {"dense": jnp.ones(2), "norm": jnp.ones(2), "steps": jnp.int32(0)}
      >>> params = ols.cast(params, jnp.float16, keep=lambda path: "norm" in path)
      >>> {name: str(array.dtype) for name, array in params.items()}
      {'dense': 'float16', 'norm': 'float32', 'steps': 'int32'}
    """
    return cast_each([tree], checks.floating("dtype", dtype), keep)[0]


def cast_each(trees: list[Any], dtype: DTypeLike, keep: Callable[[str], bool] | None) -> list[Any]:
    """Cast several trees, in each of which the paths begin anew."""
    paths: list[str] = []
    kept: list[str] = []

    def convert(path: KeyPath, leaf: Any) -> Any:
        if _is_nnx_module(leaf):
            raise TypeError(
                f"`tree` must not hold a stateful flax.nnx module, got {type(leaf).__name__}: its "
                "updates would be lost with the copy. Give its layers the argument "
                "`dtype=jnp.float16`, or cast the state from `nnx.split` and `nnx.merge` it."
            )
        if not (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        name = jax.tree_util.keystr(path)
        paths.append(name)
        if keep is not None and keep(name):
            kept.append(name)
            return leaf
        return jnp.asarray(leaf, dtype)

    result = [jax.tree_util.tree_map_with_path(convert, t, is_leaf=_is_nnx_module) for t in trees]
    if keep is not None and paths and not kept:
        warnings.warn(
            f"`keep` names none of the floating-point arrays, whose paths are: {', '.join(paths)}. "
            "All of them are cast.",
            stacklevel=3,
        )
    return result


def _is_nnx_module(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # there is no such module before it is imported
    return nnx is not None and isinstance(node, nnx.Module)
