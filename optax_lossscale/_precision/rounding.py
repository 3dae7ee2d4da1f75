"""Stochastic rounding to bfloat16: each number becomes one of its two neighbors, at random."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._precision.bits import with_derivative_of
from optax_lossscale._support.tree import is_symbolic, shown


def array_seed(name: str) -> int:
    """Return the seed for the random bits of the array of this name.

    It is the same in every process, unlike `hash(name)`, and unlike the address of an object.
    """
    if " at 0x" in name:
        raise ValueError(
            f"`params` must have keys with the same text in every process, got {shown(name)}. "
            "Define `__repr__` for the key, since the random bits depend on its text."
        )
    return zlib.crc32(name.encode())


def rounded_at_random(x: jax.Array, count: jax.Array, seed: int) -> jax.Array:
    """Round each element to one of the two nearest bfloat16 numbers at random, without bias.

    The random bits depend on the step's `count`, the array's `seed` and each element's index.
    """
    x = x.astype(jnp.float32)
    return with_derivative_of(x, _neighbor(x, count, seed)).astype(jnp.bfloat16)


def update_at_random(new: jax.Array, param: jax.Array, count: jax.Array, seed: int) -> jax.Array:
    """Return the update that makes a bfloat16 `param` equal to one of the two neighbors of `new`.

    Adding it gives exactly that neighbor. `new` is the float32 sum of `param` and an update. If the
    two nearly cancel, `new` has few digits, so the difference from `param` is exact. If they do
    not, the neighbor is the larger term, and absorbs what rounding loses of the difference.
    """
    old = param.astype(jnp.float32)
    target = _neighbor(new, count, seed)
    # If a number rounds to zero, aim at half of it, so that the sum is a zero of the same sign.
    target = jnp.where(target == 0, jax.lax.stop_gradient(new) / 2, target)
    # A zero that did not change keeps its sign, even if 0.0 was added to -0.0.
    target = with_derivative_of(new, jnp.where(new == old, old, target))
    # `-(old - target)` is -0.0 if the two are equal, and leaves a zero of either sign unchanged.
    # No update makes an infinite parameter finite.
    return jnp.where(jax.lax.is_finite(old), -(old - target), jnp.zeros_like(old))


def _neighbor(x: jax.Array, count: jax.Array, seed: int) -> jax.Array:
    """Return, in float32, one of the two bfloat16 numbers nearest to each element.

    Infinity and NaN are returned unchanged.
    """
    # Adding random bits to the lower half carries into the upper half with a probability
    # proportional to the lower half. The lower half of the largest bfloat16 is zero, so it never
    # becomes infinite.
    largest = jnp.finfo(jnp.bfloat16).max.astype(jnp.float32)
    word = jax.lax.bitcast_convert_type(jax.lax.clamp(-largest, x, largest), jnp.uint32)
    # The random bits are hashes, so none are stored or read. Each array's indices start at its
    # seed. If arrays of one shape shared their indices, XLA:GPU (jaxlib 0.10.2) would update many
    # of them in one kernel, after all of their gradients: training 24 matrices with AdamW and both
    # roundings then takes 8.5 bytes per parameter on an H100 instead of 7.6.
    first = np.uint32(seed)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        # A size may exceed the integers that JAX takes. Indices are modulo 2**32 anyway.
        factor = size if is_symbolic(size) else np.uint32(size % 2**32)
        index = index * factor + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    word += _mixed(_mixed(index + first) + first + count) >> 16
    neighbor = jax.lax.bitcast_convert_type(word & np.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jax.lax.is_finite(x), neighbor, x)


def _mixed(x: jax.Array) -> jax.Array:
    """Return a 32-bit hash. Distinct inputs have distinct hashes."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
