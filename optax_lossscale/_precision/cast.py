"""Cast the floating-point arrays of a tree."""

import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._state import LossScaleState, read_as
from optax_lossscale._support import checks
from optax_lossscale._support.lines import warn
from optax_lossscale._support.nnx import is_nnx
from optax_lossscale._support.tree import ARRAYS, FP8_KEY, KeyPath, Leaf, PyTree, Tree


def cast(tree: Tree, dtype: DTypeLike, *, keep: Callable[[str], bool] | None = None) -> Tree:
    """Return a copy of `tree` with its floating-point arrays cast to `dtype`.

    Args:
      tree: Any pytree: parameters, a batch, an Equinox module. All other leaves are returned
        unchanged, and so are every `LossScaleState` and Flax's fp8 metadata
        (`_overwrite_with_gradient`).
      dtype: The floating-point dtype to cast to, such as `jnp.float16` or `jnp.bfloat16`.
      keep: A predicate that selects arrays that are not cast, by their path, as
        `jax.tree_util.keystr` formats it: `lambda path: "norm" in path`.

    Returns:
      A tree with the same structure and shapes.

    Raises:
      TypeError: If `dtype` is not a floating-point dtype, `keep` is not a function, or `tree` holds
        an `nnx.Module` or `nnx.Metric`: only the copy would be updated.

    Warns:
      UserWarning: If `keep` selects none of the floating-point arrays.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> params = {"dense": jnp.ones(2), "norm": jnp.ones(2), "steps": jnp.int32(0)}
      >>> params = ols.cast(params, jnp.float16, keep=lambda path: "norm" in path)
      >>> {name: str(array.dtype) for name, array in params.items()}
      {'dense': 'float16', 'norm': 'float32', 'steps': 'int32'}
    """
    dtype = checks.read_float_dtype(dtype)
    checks.require_keep(keep)
    selected: dict[str, bool] = {}

    def convert(path: KeyPath, leaf: Leaf) -> Leaf:
        if is_nnx(leaf, "Module", "Metric"):
            raise TypeError(
                f"`tree` must not hold a stateful flax.nnx object, got {type(leaf).__name__}. Only "
                "the copy would be updated. Cast `nnx.state(model)`, and merge it; of a model with "
                "BatchNorm, cast only the parameters, `nnx.state(model, nnx.Param)`."
            )
        is_floating = isinstance(leaf, ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not is_floating or FP8_KEY in path:
            return leaf
        name = jax.tree_util.keystr(path)
        selected[name] = keep is not None and bool(keep(name))
        return leaf if selected[name] else jnp.asarray(leaf, dtype)

    def stays_whole(node: PyTree) -> bool:
        # Random streams hold nothing to cast, and a copy would repeat their random numbers.
        is_state = read_as((LossScaleState,), node) is not None
        return is_state or is_nnx(node, "Module", "Metric", "Rngs", "RngStream")

    converted = jax.tree_util.tree_map_with_path(convert, tree, is_leaf=stays_whole)
    if keep is not None:
        warn_if_unused(selected)
    return converted


def warn_if_unused(selected: Mapping[str, bool]) -> None:
    """Warn if `keep` selects none of the arrays. `selected` has its answer for each name."""
    if selected and not any(selected.values()):
        some = ", ".join(itertools.islice(selected, 5))
        more = f" and {len(selected) - 5:,} more" if len(selected) > 5 else ""
        warn(f"`keep` names none of the arrays. Their paths are: {some}{more}.")
