"""The bits of numbers in half precision, and a float32 as a bfloat16 and the rest.

A bfloat16 number is the upper half of a float32. If it is rounded to the nearest, away from zero,
the lower half as a signed integer is what to add to its word for the whole.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HALF = (jnp.dtype("float16"), jnp.dtype("bfloat16"))


def widened(param: Any) -> Any:
    """Return a parameter in half precision in float32, and any other as it is."""
    return in_dtype(param, jnp.float32) if getattr(param, "dtype", None) in HALF else param


def in_dtype(array: Any, dtype: Any) -> Any:
    """Return an array in another dtype, or the description of one."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=dtype)
    return jnp.asarray(array, dtype)


def with_derivative_of(x: jax.Array, value: jax.Array) -> jax.Array:
    """Return the float32 `value`, bit for bit, with the derivative of `x`, of which it is made.

    A rounding has no derivative, nor has a bitcast. A `custom_jvp` would give it one, but jax
    0.10.2 loses such a rule in `scan`, forward over reverse.
    """
    value = jax.lax.stop_gradient(value)
    # Positive zero, which is subtracted because `-0.0 - 0.0` is -0.0, and `-0.0 + 0.0` is not.
    zero = jax.lax.stop_gradient(x) - x
    # Arithmetic flushes subnormal numbers on XLA:CPU. They are told by their bits.
    is_subnormal = (jax.lax.bitcast_convert_type(value, jnp.uint32) << 1) - 1 < 2**24 - 1
    return jnp.where(jax.lax.is_finite(x) & ~is_subnormal, value - zero, value)


def bits(half: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(half, jnp.uint16)


def is_zero(half: jax.Array) -> jax.Array:
    return bits(half) << 1 == 0


def join(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """Return the float32 of which `param` is the upper half."""
    word = jax.lax.bitcast_convert_type(bits(param).astype(jnp.uint32) << 16, jnp.int32)
    remainder = remainder.astype(jnp.int32)
    # No number leaves these, but a parameter may have been replaced.
    is_infinite = bits(param) << 1 == np.array(np.inf, param.dtype).view(np.uint16) << 1
    is_foreign = (is_zero(param) & (remainder < 0)) | (is_infinite & (remainder > 0))
    word += jnp.where(is_foreign, 0, remainder)
    whole = jax.lax.bitcast_convert_type(word, jnp.float32)
    return with_derivative_of(param.astype(jnp.float32), whole)


def start(param: jax.Array, kept: jax.Array) -> jax.Array:
    """Return the float32 weight from which a step starts, of a parameter and its master."""
    if kept.dtype == jnp.int16:
        return join(param, kept)
    # Compared as integers. Of a cast there and straight back, XLA:GPU takes neither (jaxlib 0.10.2,
    # which allows excess precision by default: `xla_allow_excess_precision`), and XLA:CPU compares
    # bfloat16 in float32, which it writes to memory. Zeros of both signs are the same.
    rounded = kept.astype(param.dtype)
    is_its_own = (bits(rounded) == bits(param)) | (is_zero(rounded) & is_zero(param))
    return jnp.where(is_its_own, kept, param.astype(jnp.float32))


def move_remainder(new: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the remainder of a new master, and the update that leads to its parameter."""
    word = jax.lax.bitcast_convert_type(new, jnp.int32)
    remainder = jnp.where(jnp.isnan(new), 0, word).astype(jnp.int16)  # NaN must stay NaN
    # Of the forms tried, this one alone is fused into one loop by XLA:TPU (libtpu 0.0.42).
    upper = jax.lax.bitcast_convert_type(word - remainder.astype(jnp.int32), jnp.float32)
    rounded = with_derivative_of(new, upper)
    return remainder, _update_to(new, rounded, rounded == 0, param)


def move_master(new: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the master that the state keeps, and the update that leads to its parameter."""
    if param.dtype == jnp.float16:  # from infinity, no addition leads back
        largest = jnp.finfo(jnp.float16).max.astype(jnp.float32)
        new = jnp.where(jax.lax.is_finite(new), jax.lax.clamp(-largest, new, largest), new)
    half = new.astype(param.dtype)
    # Of a cast there and straight back, XLA:GPU takes neither (see `start`). It keeps both
    # with a choice in between.
    is_nothing = is_zero(half)
    rounded = jnp.where(is_nothing, jnp.ones_like(half), half).astype(jnp.float32)
    return new, _update_to(new, rounded, is_nothing, param)


def _update_to(
    new: jax.Array, rounded: jax.Array, rounds_to_zero: jax.Array, param: jax.Array
) -> jax.Array:
    """Return what to add to a parameter in float32 for `rounded`, or for a zero of `new`'s sign."""
    start = param.astype(jnp.float32)
    end = jnp.where(rounds_to_zero, new, rounded)
    is_there = rounds_to_zero & is_zero(param) & (jnp.signbit(new) == jnp.signbit(start))
    stays = is_there | ~jax.lax.is_finite(start)
    return jnp.where(stays, jnp.full_like(start, -0.0), end - start)


def rounded_at_random(x: jax.Array, count: jax.Array, place: int) -> jax.Array:
    """Return one of the two nearest bfloat16 numbers; the expectation is the number itself.

    The random bits are those of the step `count`, of the array at a `place` and of each element.
    """
    x = x.astype(jnp.float32)
    # The lower half carries into the upper one as often as it is large, but for the largest number,
    # which has no lower half, and so does not become infinite.
    largest = jnp.finfo(jnp.bfloat16).max.astype(jnp.float32)
    word = jax.lax.bitcast_convert_type(jax.lax.clamp(-largest, x, largest), jnp.uint32)
    # The random bits are a hash, so that nothing is stored or read. XLA:GPU (jaxlib 0.10.2) would
    # make a kernel for each array of a hash of the count alone, and one of indices that arrays of
    # one shape share. So the count is mixed in with the elements, and each array starts at its own
    # index: by the golden ratio, far from the others.
    start = np.uint32(place * 0x9E3779B9 % 2**32)
    index = jnp.full(x.shape, start)
    for axis, size in enumerate(x.shape):
        index = index * size + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    word += _mixed(_mixed(index) + start + count) >> 16
    upper = jax.lax.bitcast_convert_type(word & np.uint32(0xFFFF0000), jnp.float32)
    zero = jax.lax.stop_gradient(x) - x  # has the derivative, as in `with_derivative_of`
    return jnp.where(jax.lax.is_finite(x), upper - zero, x).astype(jnp.bfloat16)


def _mixed(x: jax.Array) -> jax.Array:
    """Return a hash of 32 bits, of which no two numbers have the same."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
