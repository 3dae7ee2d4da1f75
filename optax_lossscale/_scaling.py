"""Where the loss scale goes in and out: the loss, the gradients, the function that makes both."""

import numbers
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from optax_lossscale._state import as_field, find_state
from optax_lossscale._tree import KeyPath, PyTree, Tree, all_finite, is_array, is_inexact, path_name

#: The name of a mapped axis, or several.
AxisName: TypeAlias = Hashable | tuple[Hashable, ...]

# Flax keeps what an fp8 layer needs to know about its tensors (scales, histories of maxima) in
# this collection. Its "gradients" are the new values themselves, which no factor has touched.
_OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def scale_loss(loss: Tree, state: PyTree) -> Tree:
    """Multiply the loss by the loss scale.

    Args:
      loss: A loss, or a pytree of them. Any floating-point dtype and any shape. Eight- and
        sixteen-bit losses are promoted to float32 before the product, which float16 could not
        hold; float32 and float64 keep their type.
      state: A `LossScaleState`, or an optimizer's state that holds exactly one.

    Returns:
      The scaled loss, to be differentiated.

    Raises:
      TypeError: If a loss is not floating-point.
      ValueError: If `state` holds no `LossScaleState`, or several.

    Warns:
      UserWarning: If a loss is float16. The factor is then cast back to float16 on its way into
        the backward pass, where everything above 65504 is infinite. Compute the loss in float32.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> float(ols.scale_loss(jnp.float32(0.5), ols.init(1024)))
      512.0
    """
    factor = _factor(state)
    if any(is_array(leaf) and leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(loss)):
        warnings.warn(
            "The loss is float16: the loss scale is cast to float16 on its way into the backward "
            "pass and is infinite there above 65504. Compute the loss in float32, for example "
            "from `logits.astype(jnp.float32)`.",
            stacklevel=2,
        )

    def scale(path: KeyPath, leaf: Any) -> jax.Array:
        if not is_inexact(leaf) or jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            kind = leaf.dtype if is_array(leaf) else type(leaf).__name__
            raise TypeError(
                f"`loss` must be floating-point, got {kind} at {path_name(path)}. Cast it with "
                "`astype(jnp.float32)`, take the real part of a complex loss, or give "
                "`value_and_grad` the argument `has_aux=True` if `fun` returns more than the loss."
            )
        value = at_least_float32(leaf)
        return value * factor.astype(value.dtype)

    return jax.tree_util.tree_map_with_path(scale, loss)


def unscale_and_check(
    grads: Tree, state: PyTree, *, axis_name: AxisName | None = None
) -> tuple[Tree, jax.Array]:
    """Divide the gradients by the loss scale and say whether they are all finite.

    The gradients are multiplied by the reciprocal of the loss scale, which is taken once, in
    float32. That is exact for powers of two. Otherwise it is within one unit in the last place of
    float32, for float64 gradients too.

    Args:
      grads: Gradients of a loss that was scaled with `state`. Leaves that hold no floating-point
        or complex numbers pass through as they are, and so does whatever stands under a dict key
        `_overwrite_with_gradient` (what Flax's fp8 layers keep, which was never scaled).
      state: The `LossScaleState` that the loss was scaled with, not the updated one, or an
        optimizer's state that holds exactly one.
      axis_name: The mapped axis, or a tuple of them, over which the replicas or shards must agree
        (`jax.pmap`, `jax.shard_map`, `jax.vmap`). Not needed under plain `jax.jit`, where arrays
        are global, however they are sharded.

    Returns:
      The true gradients, in float32 where they were of a smaller type and in their own type
      otherwise, and whether every one of them is finite, both as it came and unscaled. `bool[]`.

    Raises:
      TypeError: If `axis_name` cannot be the name of an axis.
      ValueError: If `state` holds no `LossScaleState`, or several, or `axis_name` is not mapped.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> state = ols.init(1024)
      >>> ols.unscale_and_check({"w": jnp.array([512.0, 2048.0], jnp.float16)}, state)
      ({'w': Array([0.5, 2. ], dtype=float32)}, Array(True, dtype=bool))
    """
    check_axis_name(axis_name)
    unscaled = unscale(grads, state)
    # The factor's reciprocal is positive and finite, so what came in as NaN or infinite is so
    # still: one look, at the unscaled gradients, answers for both.
    return unscaled, agree(all_finite(unscaled), axis_name)


def unscale(grads: Tree, state: PyTree) -> Tree:
    """Divide the gradients by the loss scale, without a check."""
    reciprocal = 1 / _factor(state)

    def multiply(path: KeyPath, leaf: Any) -> Any:
        if not is_inexact(leaf) or _overwrites(path):
            return leaf
        value = at_least_float32(leaf)
        return value * reciprocal.astype(value.dtype)

    # An overflow is what the check is about to look for, no error to stop at.
    with jax.debug_nans(False), jax.debug_infs(False):
        return jax.tree_util.tree_map_with_path(multiply, grads)


def agree(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Return whether `flag` holds on every member of the mapped axes, if there are any."""
    return over_axes(_minimum, flag, axis_name)


def _minimum(flag: jax.Array, axis_name: AxisName) -> jax.Array:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    varying = tuple(name for name in names if _may_vary(flag, name))
    return jax.lax.pmin(flag, varying) if varying else flag


def _may_vary(flag: jax.Array, name: Hashable) -> bool:
    # `shard_map` with `check_vma` keeps in the type over which axes a value varies, and the `pmin`
    # of jax 0.12 refuses the others. The index of an axis varies over it, and so does what is
    # computed from it: if that is another type, the flag does not. (JAX's versions disagree on the
    # type's attribute.)
    varying = jnp.full(flag.shape, jax.lax.axis_index(name) < 0)
    return jax.typeof(flag | varying) == jax.typeof(flag)


def over_axes(reduce: Callable[[Tree, Any], Tree], tree: Tree, axis_name: AxisName | None) -> Tree:
    """Return the reduction of `tree` over the mapped axes, if there are any."""
    if axis_name is None:
        return tree
    try:
        return reduce(tree, axis_name)
    except NameError as error:  # what JAX raises for an axis that is not mapped
        raise ValueError(
            f"`axis_name` must be the name of a mapped axis, or a tuple of them, got "
            f"{axis_name!r}. Call the function within `jax.shard_map`, `jax.pmap` or `jax.vmap` "
            "over that axis, or leave `axis_name` out under plain `jax.jit`."
        ) from error


def check_axis_name(axis_name: AxisName | None) -> None:
    """Raise an error if `axis_name` cannot name axes, whether or not they are mapped."""
    for name in axis_name if isinstance(axis_name, tuple) else (axis_name,):
        try:
            hash(name)
        except TypeError:
            is_name = False
        else:  # an integer would stand for an axis of the array
            is_name = not isinstance(name, numbers.Integral)
        if not is_name:
            raise TypeError(
                "`axis_name` must be the name of a mapped axis, usually a string, or a tuple of "
                f"them, got {axis_name!r}. Give the one that `jax.shard_map`, `jax.pmap` or "
                "`jax.vmap` maps over."
            )


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., tuple[Any, PyTree]]:
    """Differentiate a loss function scaled, and return its value unscaled.

    Args:
      fun: The loss function, as for `jax.value_and_grad`. It knows nothing of loss scaling.
      argnums: Which arguments of `fun` to differentiate with respect to.
      has_aux: Whether `fun` returns `(loss, aux)`.
      transform: What differentiates: `jax.value_and_grad`, `flax.nnx.value_and_grad`,
        `equinox.filter_value_and_grad`, or another that takes `has_aux`.
      **kwargs: Passed on to `transform`.

    Returns:
      `f(state, *args, **kwargs) -> (value, grads)`, where `state` is a `LossScaleState` or an
      optimizer's state that holds exactly one. `value` is what `fun` returned, unscaled, with the
      aux if there is one. `grads` are still scaled, as `tx.update` and `unscale_and_check` expect
      them.

    Raises:
      TypeError: If `fun` or `transform` is not callable, `argnums` holds no positions or `has_aux`
        is no bool; if `fun` returns a loss that is not floating-point, or no pair although
        `has_aux`; if `transform` does not return what `jax.value_and_grad` does.
      ValueError: If `argnums` names a position twice, or `state` holds no `LossScaleState`, or
        several.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> loss_and_grads = ols.value_and_grad(lambda w: jnp.sum(w**2))
      >>> loss_and_grads(ols.init(8), jnp.array([1.0, 2.0]))
      (Array(5., dtype=float32), Array([16., 32.], dtype=float32))
    """
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function that returns a loss, got {fun!r}. Hand in the function, not "
            "what it returns."
        )
    if not callable(transform):
        raise TypeError(
            "`transform` must be a function such as `jax.value_and_grad`, got "
            f"{transform!r}. Leave it out, or hand in the function itself."
        )
    if not isinstance(has_aux, bool):
        raise TypeError(f"`has_aux` must be True or False, got {has_aux!r}.")
    if transform is jax.value_and_grad:  # that of `flax.nnx` takes more
        _check_argnums(argnums)
    if argnums != 0:  # the default of every transform; Equinox's does not take the argument
        kwargs["argnums"] = argnums

    def scaled_value_and_grad(state: PyTree, *args: Any, **kwds: Any) -> tuple[Any, PyTree]:
        scale_state = find_state("state", state)

        def scaled(*args: Any, **kwds: Any) -> tuple[Any, Any]:
            value = fun(*args, **kwds)
            if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
                raise TypeError(
                    "`fun` must return a pair, the loss and the aux, because of `has_aux=True`, "
                    f"got {value!r}. Return both, or leave `has_aux` out."
                )
            loss = value[0] if has_aux else value
            return scale_loss(loss, scale_state), value

        result: Any = transform(scaled, has_aux=True, **kwargs)(*args, **kwds)
        # `jax.grad` returns gradients and aux, which could be taken for a value and gradients.
        if not (_is_pair(result) and _is_pair(result[0])):
            raise TypeError(
                "`transform` must return ((loss, aux), grads) with `has_aux=True`, as "
                f"`jax.value_and_grad` does, got {result!r} of {transform!r}. Take the function "
                "that returns the value too."
            )
        (_, value), grads = result
        return value, grads

    return scaled_value_and_grad


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _check_argnums(argnums: Any) -> None:
    positions = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    if not positions or not all(
        isinstance(each, numbers.Integral) and not isinstance(each, bool) for each in positions
    ):
        raise TypeError(
            f"`argnums` must be the position of an argument, or a tuple of them, got {argnums!r}. "
            "Count from 0, the first argument of `fun`."
        )
    if len(set(positions)) < len(positions):
        raise ValueError(
            f"`argnums` must name each position once, got {argnums!r}. Leave the repeated out."
        )


def _factor(state: PyTree) -> jax.Array:
    factor = find_state("state", state).loss_scale
    if jnp.shape(factor):
        raise ValueError(
            f"`state` must hold a scalar loss scale, got shape {jnp.shape(factor)}. Map over the "
            "replicas with `jax.pmap` or `jax.vmap`, or take one: "
            "`jax.tree.map(lambda x: x[0], state)`."
        )
    # Strongly typed, for a state in which a Python number was set: see `strongly_typed`.
    return as_field("loss_scale", factor)


def at_least_float32(leaf: Any) -> Any:
    """Return `leaf` in float32 if it holds floating-point numbers of a smaller type."""
    if not is_inexact(leaf):
        return leaf
    value = jnp.asarray(leaf)
    # `promote_types(dtype, float32)` would say the same, but raises for eight-bit types and
    # under strict dtype promotion.
    return value.astype(jnp.float32) if jnp.finfo(value.dtype).bits < 32 else value


def _overwrites(path: KeyPath) -> bool:
    return any(
        isinstance(key, jax.tree_util.DictKey) and key.key == _OVERWRITE_WITH_GRADIENT
        for key in path
    )
