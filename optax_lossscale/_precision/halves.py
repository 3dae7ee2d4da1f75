"""Half precision as a storage format: its bits, steps in float32, and the mark that it is hidden.

A bfloat16 has the upper 16 bits of a float32. To get the float32 back, shift the bits of the
bfloat16 left by 16 and add the remainder as a signed integer. Splitting rounds to nearest, ties
away from zero.
"""

import contextlib
import threading
from collections.abc import Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_lossscale._support import checks
from optax_lossscale._support.notes import add_likely_causes
from optax_lossscale._support.tree import Leaf, PyTree, Tree, at_least_float32, in_dtype


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


def is_in(leaf: Leaf, *dtypes: DTypeLike) -> bool:
    """Return whether a leaf is an array in one of these dtypes."""
    return getattr(leaf, "dtype", None) in [jnp.dtype(dtype) for dtype in dtypes]


def in_float32(tree: Tree, *dtypes: DTypeLike) -> Tree:
    """Return a tree with its arrays in these dtypes in float32."""
    return jax.tree.map(lambda x: in_dtype(x, jnp.float32) if is_in(x, *dtypes) else x, tree)


def step_in_float32(
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    inner_state: optax.OptState,
    params: PyTree,
    *,
    weights: Mapping[int, jax.Array],
    extra_args: Mapping[str, Any],
) -> tuple[list[Leaf], dict[int, jax.Array], optax.OptState]:
    """Take a step of `inner` with float32 weights in place of some parameters.

    Return the updates of all parameters, the new weights in float32, and the new state. The keys of
    weights are the positions of their parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    wide = treedef.unflatten(weights.get(i, leaf) for i, leaf in enumerate(leaves))
    grads = jax.tree.map(at_least_float32, updates)
    try:
        updates, inner_state = inner.update(grads, inner_state, wide, **extra_args)
    except Exception as error:
        add_likely_causes(error, updates, params)
        raise
    try:
        moves = treedef.flatten_up_to(updates)
    except ValueError:  # whose message prints the arrays
        raise checks.differing_structures(updates, params) from None
    new = {
        i: jnp.asarray(optax.apply_updates(weight, moves[i]), jnp.float32)
        for i, weight in weights.items()
    }
    return moves, new, inner_state


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
