"""Arrays that are described where tests are collected, and made where one runs."""

import jax
import jax.numpy as jnp
import numpy as np


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def normal(tree, seed=0):
    """Return normally distributed numbers for each shape in a tree, without compiling anything."""
    rng = np.random.default_rng(seed)

    def made(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype))

    return jax.tree.map(made, tree)


def ones(tree):
    """Return ones for each shape in a tree, without compiling anything."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.ones(leaf.shape, leaf.dtype)), tree)
