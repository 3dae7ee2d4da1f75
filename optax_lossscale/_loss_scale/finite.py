"""Whether all numbers of a tree are finite."""

import jax
import jax.numpy as jnp

from optax_lossscale import _xla
from optax_lossscale._support.flags import all_true
from optax_lossscale._support.tree import PyTree, is_finite, is_inexact


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether every number in `tree` is finite.

    The check is exact: it looks at each element, never at a sum, which finite values can overflow.

    Args:
      tree: Any pytree. Leaves without floating-point or complex numbers (`None`, integers,
        booleans, float0, PRNG keys, objects that are not arrays) count as finite, as empty ones do.

    Returns:
      Whether every number is finite. `bool[]`.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> bool(ols.all_finite({"w": jnp.ones(3), "step": 7}))
      True
      >>> bool(ols.all_finite({"w": jnp.array([1.0, jnp.nan]), "step": 7}))
      False
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    if not arrays:
        return jnp.asarray(True)
    if _xla.enabled:
        return _xla.all_finite(arrays)
    return all_true([jnp.all(is_finite(array)) for array in arrays])
