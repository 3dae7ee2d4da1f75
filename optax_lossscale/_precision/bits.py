"""The bits of half precision.

A bfloat16 has the upper 16 bits of a float32. To get the float32 back, shift the bits of the
bfloat16 left by 16 and add the remainder as a signed integer. Splitting rounds to nearest, ties
away from zero.
"""

import jax
import jax.numpy as jnp
import numpy as np


def with_derivative_of(x: jax.Array, value: jax.Array) -> jax.Array:
    """Return the float32 `value`, differentiated as if it were `x`.

    Rounding and bitcasts have no derivative. A `custom_jvp` would define one, but jax 0.10.2 drops
    it in `scan` under forward-over-reverse differentiation. XLA:CPU flushes a subnormal `value` to
    zero.
    """
    value = jax.lax.stop_gradient(value)
    # This is 0.0. Subtract it, since adding it would turn -0.0 into 0.0.
    zero = jax.lax.stop_gradient(x) - x
    return jnp.where(jax.lax.is_finite(x), value - zero, value)


def of(half: jax.Array) -> jax.Array:
    """Return the bits of a half-precision array as uint16."""
    return jax.lax.bitcast_convert_type(half, jnp.uint16)


def is_zero(half: jax.Array) -> jax.Array:
    """Return, for each element of a half-precision array, whether it is zero of either sign."""
    return of(half) << 1 == 0


def join(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """Return the float32 that was split into `param` and `remainder`."""
    word = jax.lax.bitcast_convert_type(of(param).astype(jnp.uint32) << 16, jnp.int32)
    remainder = remainder.astype(jnp.int32)
    # Splitting never makes these pairs. They arise when a parameter is replaced.
    is_infinite = of(param) << 1 == np.array(np.inf, param.dtype).view(np.uint16) << 1
    is_foreign = (is_zero(param) & (remainder < 0)) | (is_infinite & (remainder > 0))
    word += jnp.where(is_foreign, 0, remainder)
    whole = jax.lax.bitcast_convert_type(word, jnp.float32)
    # XLA:CPU flushes subnormal numbers to zero in arithmetic and comparisons, so detect them by
    # their bits.
    is_subnormal = (jax.lax.bitcast_convert_type(whole, jnp.uint32) << 1) - 1 < 2**24 - 1
    return jnp.where(is_subnormal, whole, with_derivative_of(param.astype(jnp.float32), whole))
