"""Scale losses, differentiate them, unscale gradients."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._state import current_scale
from optax_lossscale._step.cast import cast_named
from optax_lossscale._step.finite import agree, all_finite
from optax_lossscale._support import checks
from optax_lossscale._support.checks import AxisName
from optax_lossscale._support.jaxprs import argument_names
from optax_lossscale._support.tree import (
    KeyPath,
    PyTree,
    Tree,
    at_least_float32,
    is_array,
    is_fp8_metadata,
    is_inexact,
    path_name,
)


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
      UserWarning: If a loss is float16. The loss scale is then cast back to float16 on its way into
        the backward pass, where everything above 65504 is infinite. Compute the loss in float32.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> float(ols.scale_loss(jnp.float32(0.5), ols.init(1024)))
      512.0
    """
    return scale_by(loss, current_scale("state", state))


def scale_by(loss: Tree, loss_scale: jax.Array) -> Tree:
    """Multiply the loss by a number, `float32[]`."""
    if any(is_array(leaf) and leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(loss)):
        warnings.warn(
            "The loss is float16: the loss scale is cast to float16 on its way into the backward "
            "pass and is infinite there above 65504. Compute the loss in float32, for example "
            "from `logits.astype(jnp.float32)`.",
            stacklevel=3,
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
        return value * loss_scale.astype(value.dtype)

    return jax.tree_util.tree_map_with_path(scale, loss)


def unscale_and_check(
    grads: Tree, state: PyTree, *, axis_name: AxisName | None = None
) -> tuple[Tree, jax.Array]:
    """Divide the gradients by the loss scale and say whether they are all finite.

    The gradients are multiplied by the reciprocal of the loss scale, which is taken once, in
    float32. That is exact for powers of two. Otherwise it is within one unit in the last place of
    float32, for float64 gradients too.

    Args:
      grads: Gradients of a loss that was scaled with `state`. Leaves without floating-point or
        complex numbers are returned unchanged, and so is everything under a dict key
        `_overwrite_with_gradient`: the state of Flax's fp8 layers, which was never scaled.
      state: The `LossScaleState` that the loss was scaled with, not the updated one, or an
        optimizer's state that holds exactly one.
      axis_name: The mapped axis, or a tuple of them, over which the replicas or shards must agree
        (`jax.pmap`, `jax.shard_map`, `jax.vmap`). Not needed under plain `jax.jit`, where arrays
        are global, however they are sharded.

    Returns:
      The true gradients, in float32 where their dtype was smaller and in their own otherwise, and
      whether all of them are finite, both before and after unscaling. `bool[]`.

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
    checks.axis_names(axis_name)
    unscaled = unscale_by(grads, current_scale("state", state))
    # The reciprocal is positive and finite, so NaN and infinity are preserved. One check of the
    # unscaled gradients covers both.
    (grads_finite,), _ = agree([all_finite(unscaled)], axis_name)
    return unscaled, grads_finite


def unscale_by(grads: Tree, loss_scale: jax.Array) -> Tree:
    """Divide the gradients by a number, `float32[]`."""
    reciprocal = 1 / loss_scale

    def multiply(path: KeyPath, leaf: Any) -> Any:
        if not is_inexact(leaf) or is_fp8_metadata(path):
            return leaf
        value = at_least_float32(leaf)
        return value * reciprocal.astype(value.dtype)

    # An overflow here is not an error. The check below detects it.
    with jax.debug_nans(False), jax.debug_infs(False):
        return jax.tree_util.tree_map_with_path(multiply, grads)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compute_dtype: DTypeLike | None = None,
    keep: Callable[[str], bool] | None = None,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., tuple[Any, PyTree]]:
    """Differentiate a loss function scaled, and return its value unscaled.

    Args:
      fun: The loss function, as for `jax.value_and_grad`. It is unaware of loss scaling.
      argnums: Which arguments of `fun` to differentiate with respect to.
      has_aux: Whether `fun` returns `(loss, aux)`.
      compute_dtype: The dtype to which the floating-point arrays in all arguments of `fun` are
        cast. The cast is part of what is differentiated, so gradients have the dtypes of the
        parameters. None casts nothing. Compute the loss itself in float32. See `cast`.
      keep: A function from a path to whether the array there is left uncast, as for `cast`. A path
        begins with the argument's name in the signature of `fun`: `params['norm']['scale']`, `x`,
        `rest[0]` for the first of `*rest`.
      transform: What differentiates: `jax.value_and_grad`, `flax.nnx.value_and_grad`,
        `equinox.filter_value_and_grad`, or another that takes `has_aux`.
      **kwargs: Passed on to `transform`.

    Returns:
      `f(state, *args, **kwargs) -> (value, grads)`, where `state` is a `LossScaleState` or an
      optimizer's state that holds exactly one. `value` is what `fun` returned, unscaled, with the
      aux if there is one. `grads` are still scaled, as `tx.update` and `unscale_and_check` expect
      them.

    Raises:
      TypeError: If `fun` returns a loss that is not floating-point, or does not return a pair with
        `has_aux`; if `transform` does not return what `jax.value_and_grad` does; if `compute_dtype`
        is not a floating-point dtype, or an argument is a stateful `flax.nnx` module to be cast.
      ValueError: If `state` holds no `LossScaleState`, or several.

    Warns:
      UserWarning: If `keep` names none of the floating-point arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> loss_and_grads = ols.value_and_grad(lambda w: jnp.sum(w**2))
      >>> loss_and_grads(ols.init(8), jnp.array([1.0, 2.0]))
      (Array(5., dtype=float32), Array([16., 32.], dtype=float32))
    """
    if compute_dtype is not None:
        checks.floating("compute_dtype", compute_dtype)
    elif keep is not None:
        raise ValueError(
            "`keep` must be given together with `compute_dtype`, got `keep` alone. Say what to "
            "cast to, for example `compute_dtype=jnp.float16`."
        )
    if argnums != 0:  # the default of every transform; Equinox's does not take the argument
        kwargs["argnums"] = argnums

    def scaled_value_and_grad(state: PyTree, /, *args: Any, **kwds: Any) -> tuple[Any, PyTree]:
        loss_scale = current_scale("state", state)

        def scaled(*args: Any, **kwds: Any) -> tuple[Any, Any]:
            if compute_dtype is not None:
                names = [*argument_names(fun, len(args)), *kwds]
                given = zip(names, [*args, *kwds.values()], strict=True)
                cast_args = cast_named(given, compute_dtype, keep)
                kwds = dict(zip(kwds, cast_args[len(args) :], strict=True))
                args = tuple(cast_args[: len(args)])
            value = fun(*args, **kwds)
            if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
                raise TypeError(
                    "`fun` must return a pair, the loss and the aux, because of `has_aux=True`, "
                    f"got {value!r}. Return both, or leave `has_aux` out."
                )
            return scale_by(value[0] if has_aux else value, loss_scale), value

        result: Any = transform(scaled, has_aux=True, **kwargs)(*args, **kwds)
        # `jax.grad` returns gradients and aux, which could be taken for a value and gradients.
        if not (_is_pair(result) and _is_pair(result[0])):
            raise TypeError(
                "`transform` must return ((loss, aux), grads) with `has_aux=True`, as "
                f"`jax.value_and_grad` does, got {result!r} of {transform!r}. Pass the function "
                "that returns the value too."
            )
        (_, value), grads = result
        return value, grads

    return _with_signature_of(fun, scaled_value_and_grad)


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compute_dtype: DTypeLike | None = None,
    keep: Callable[[str], bool] | None = None,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Differentiate a loss function scaled, as `value_and_grad`, without its value.

    It is to `value_and_grad` what `jax.grad` is to `jax.value_and_grad`, and takes the same
    arguments.

    Returns:
      `f(state, *args, **kwargs) -> grads`, or `(grads, aux)` with `has_aux`. The gradients are
      still scaled.

    Raises:
      TypeError: As `value_and_grad`.
      ValueError: As `value_and_grad`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> ols.grad(lambda w: jnp.sum(w**2))(ols.init(8), jnp.array([1.0, 2.0]))
      Array([16., 32.], dtype=float32)
    """
    kwargs |= {"compute_dtype": compute_dtype, "keep": keep, "transform": transform}
    loss_and_grads = value_and_grad(fun, argnums, has_aux, **kwargs)

    def scaled_grad(state: PyTree, /, *args: Any, **kwds: Any) -> Any:
        value, grads = loss_and_grads(state, *args, **kwds)
        return (grads, value[1]) if has_aux else grads

    return _with_signature_of(fun, scaled_grad)


def _with_signature_of(fun: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Return a function that says that it takes a state and the arguments of `fun`.

    `jax.jit` reads there where the arguments stand that `static_argnames` names.
    """
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # of some functions written in C
        return function
    name = "opt_state" if "state" in parameters else "state"
    while name in parameters:
        name += "_"
    state = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = inspect.Signature([state, *parameters.values()])
    return function


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2
