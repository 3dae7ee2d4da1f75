"""Differentiate a loss function, scaled."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from optax_lossscale._state import current_scale
from optax_lossscale._step.cast import cast_named
from optax_lossscale._step.scale import scale_by
from optax_lossscale._support import checks
from optax_lossscale._support.tree import PyTree


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

    def scaled_value_and_grad(state: PyTree, *args: Any, **kwds: Any) -> tuple[Any, PyTree]:
        loss_scale = current_scale("state", state)

        def scaled(*args: Any, **kwds: Any) -> tuple[Any, Any]:
            if compute_dtype is not None:
                names = [*_argument_names(fun, len(args)), *kwds]
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

    return scaled_value_and_grad


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

    def scaled_grad(state: PyTree, *args: Any, **kwds: Any) -> Any:
        value, grads = loss_and_grads(state, *args, **kwds)
        return (grads, value[1]) if has_aux else grads

    return scaled_grad


def _argument_names(fun: Callable[..., Any], number: int) -> list[str]:
    """Return what the signature of `fun` calls this many positional arguments."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # of some functions written in C
        parameters = []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in by_position][:number]
    rest = (p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL)
    rest = next(rest, "args")
    return [*names, *(f"{rest}[{i}]" for i in range(number - len(names)))]


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2
