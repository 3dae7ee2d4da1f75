"""Half precision as a storage format: its bits, its rounding, and the mark that it is hidden.

A bfloat16 has the upper 16 bits of a float32. To get the float32 back, shift the bits of the
bfloat16 left by 16 and add the remainder as a signed integer. Splitting rounds to nearest, ties
away from zero.
"""

import contextlib
import threading
import zlib
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._support.tree import is_symbolic, shown


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


def bits(half: jax.Array) -> jax.Array:
    """Return the bits of a half-precision array as uint16."""
    return jax.lax.bitcast_convert_type(half, jnp.uint16)


def is_zero(half: jax.Array) -> jax.Array:
    """Return, for each element of a half-precision array, whether it is zero of either sign."""
    return bits(half) << 1 == 0


def join(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """Return the float32 that was split into `param` and `remainder`."""
    word = jax.lax.bitcast_convert_type(bits(param).astype(jnp.uint32) << 16, jnp.int32)
    remainder = remainder.astype(jnp.int32)
    # Splitting never makes these pairs. They arise when a parameter is replaced.
    is_infinite = bits(param) << 1 == np.array(np.inf, param.dtype).view(np.uint16) << 1
    is_foreign = (is_zero(param) & (remainder < 0)) | (is_infinite & (remainder > 0))
    word += jnp.where(is_foreign, 0, remainder)
    whole = jax.lax.bitcast_convert_type(word, jnp.float32)
    # XLA:CPU flushes subnormal numbers to zero in arithmetic and comparisons, so detect them by
    # their bits.
    is_subnormal = (jax.lax.bitcast_convert_type(whole, jnp.uint32) << 1) - 1 < 2**24 - 1
    return jnp.where(is_subnormal, whole, with_derivative_of(param.astype(jnp.float32), whole))


def current_master(param: jax.Array, kept: jax.Array) -> jax.Array:
    """Return the master weight, or the parameter if it was replaced since the last step."""
    if kept.dtype == jnp.int16:
        return join(param, kept)
    # Compare bits. If this compared numbers, XLA:GPU would remove the cast to half precision and
    # back (jaxlib 0.10.2, by its default `xla_allow_excess_precision`), and XLA:CPU would write
    # both sides to memory in float32.
    rounded = kept.astype(param.dtype)
    is_its_own = (bits(rounded) == bits(param)) | (is_zero(rounded) & is_zero(param))
    return jnp.where(is_its_own, kept, param.astype(jnp.float32))


def move_remainder(new: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the remainder of a new master weight, and the update of `param` to its upper half."""
    word = jax.lax.bitcast_convert_type(new, jnp.int32)
    remainder = jnp.where(jnp.isnan(new), 0, word).astype(jnp.int16)  # NaN must stay NaN
    # Subtract instead of masking `word`. With a mask, a step of AdamW reads and writes 38 bytes per
    # parameter on a TPU v5e instead of 26, in 1.56 times the estimated cycles (libtpu 0.0.42.1).
    upper = jax.lax.bitcast_convert_type(word - remainder.astype(jnp.int32), jnp.float32)
    rounded = with_derivative_of(new, upper)
    return remainder, _update_to(new, rounded, rounded == 0, param)


def move_master(new: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the master weight to keep, and the update of `param` to its rounded value."""
    if param.dtype == jnp.float16:  # adding an update to infinity cannot make it finite
        largest = jnp.finfo(jnp.float16).max.astype(jnp.float32)
        new = jnp.where(jax.lax.is_finite(new), jax.lax.clamp(-largest, new, largest), new)
    half = new.astype(param.dtype)
    # A `where` between the casts stops XLA:GPU from removing both (see `current_master`).
    rounds_to_zero = is_zero(half)
    rounded = jnp.where(rounds_to_zero, jnp.ones_like(half), half).astype(jnp.float32)
    return new, _update_to(new, rounded, rounds_to_zero, param)


def _update_to(
    new: jax.Array, rounded: jax.Array, rounds_to_zero: jax.Array, param: jax.Array
) -> jax.Array:
    """Return the update that makes `param` equal to `rounded`, including the sign of zero.

    ============  ========================  =====================================================
    rounded       param                     update
    ============  ========================  =====================================================
    not zero      finite                    `rounded - param`
    zero          zero of the same sign     `-0.0`: no change
    zero          any other finite number   `new - param`: the sum rounds to zero, signed as `new`
    any           infinite or NaN           `-0.0`: no update makes it finite
    ============  ========================  =====================================================
    """
    old = param.astype(jnp.float32)
    target = jnp.where(rounds_to_zero, new, rounded)
    is_same_zero = rounds_to_zero & is_zero(param) & (jnp.signbit(new) == jnp.signbit(old))
    is_unchanged = is_same_zero | ~jax.lax.is_finite(old)
    return jnp.where(is_unchanged, jnp.full_like(old, -0.0), target - old)


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


class _Thread(threading.local):
    hides_storage = False


_thread = _Thread()


@contextlib.contextmanager
def hidden_storage() -> Generator[None]:
    """Mark that this thread traces a function in which stored half precision looks like float32."""
    before, _thread.hides_storage = _thread.hides_storage, True
    try:
        yield
    finally:
        _thread.hides_storage = before


def refuse_hidden_storage(wrapper: str) -> None:
    """Raise if the update of `wrapper` is inside `autocast`, which hides half precision."""
    if _thread.hides_storage:
        raise ValueError(
            f"`{wrapper}` must not be updated inside `autocast`, where arrays in half precision "
            "look like float32, so that nothing would be rounded. Wrap the loss function, not the "
            "training step: `value_and_grad(autocast(loss_fn, dtype))`."
        )
