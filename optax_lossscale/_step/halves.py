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
    if getattr(param, "dtype", None) not in HALF:
        return param
    if isinstance(param, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=param.sharding)
    return jnp.asarray(param, jnp.float32)


def bits(half: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(half, jnp.uint16)


def is_zero(half: jax.Array) -> jax.Array:
    return bits(half) << 1 == 0


def is_same(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return where two numbers have the same bits, or are both zero."""
    return (bits(a) == bits(b)) | ((bits(a) | bits(b)) << 1 == 0)


def is_infinite(half: jax.Array) -> jax.Array:
    return bits(half) << 1 == np.array(np.inf, half.dtype).view(np.uint16) << 1


@jax.custom_jvp
def join(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """Return the float32 of which `param` is the upper half."""
    word = jax.lax.bitcast_convert_type(bits(param).astype(jnp.uint32) << 16, jnp.int32)
    remainder = remainder.astype(jnp.int32)
    # No number leaves these, but a parameter may have been replaced.
    is_foreign = (is_zero(param) & (remainder < 0)) | (is_infinite(param) & (remainder > 0))
    word += jnp.where(is_foreign, 0, remainder)
    return jax.lax.bitcast_convert_type(word, jnp.float32)


@jax.custom_jvp
def upper_half(new: jax.Array, remainder: jax.Array) -> jax.Array:
    """Return the bfloat16 that is nearest to a float32, in float32."""
    # Of the forms tried, this one alone is fused into one loop by XLA:TPU (libtpu 0.0.42).
    word = jax.lax.bitcast_convert_type(new, jnp.int32) - remainder.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(word, jnp.float32)


join.defjvps(lambda tangent, *_: tangent.astype(jnp.float32), None)
upper_half.defjvps(lambda tangent, *_: tangent, None)


def remainder_of(new: jax.Array) -> jax.Array:
    """Return the lower half of a float32; none of NaN, which must stay NaN."""
    lower = jax.lax.bitcast_convert_type(new, jnp.int32).astype(jnp.int16)
    return jnp.where(jnp.isnan(new), jnp.zeros_like(lower), lower)


def written_once(new: jax.Array, remainder: jax.Array) -> jax.Array:
    """Return `new`, which XLA:CPU writes to memory.

    Parameter and remainder are both computed from it. XLA:CPU (seen in jaxlib 0.10.2) would compute
    it in both loops, and copy the old parameter and the old remainder for the second. It does not
    compute a division twice, and what it divides by here is an odd number modulo 2.
    """
    one = (2 * remainder.astype(jnp.int32) + 1) & 1
    return jax.lax.platform_dependent(
        new, one.astype(jnp.float32), cpu=jax.lax.div, default=lambda new, _: new
    )


def move(new: jax.Array, kept: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what the state keeps of a new master, and the update that leads to its parameter."""
    start = param.astype(jnp.float32)
    if kept.dtype == jnp.int16:
        new = written_once(new, kept)
        kept = remainder_of(new)
        rounded = upper_half(new, kept)
        rounds_to_zero = rounded == 0
        is_there = rounds_to_zero & is_zero(param) & (jnp.signbit(new) == jnp.signbit(start))
    else:
        if param.dtype == jnp.float16:  # from infinity, no addition leads back
            largest = jnp.finfo(jnp.float16).max.astype(jnp.float32)
            new = jnp.where(jax.lax.is_finite(new), jax.lax.clamp(-largest, new, largest), new)
        kept, half = new, new.astype(param.dtype)
        rounds_to_zero = is_zero(half)
        is_there = rounds_to_zero & (bits(half) == bits(param))
        # Of a cast there and straight back, XLA:GPU takes neither (see `masters.py`). It keeps both
        # with a choice in between.
        rounded = jnp.where(rounds_to_zero, jnp.ones_like(half), half).astype(jnp.float32)
    end = jnp.where(rounds_to_zero, new, rounded)  # of zero it has the sign
    return kept, jnp.where(
        is_there | ~jax.lax.is_finite(start), jnp.full_like(start, -0.0), end - start
    )
