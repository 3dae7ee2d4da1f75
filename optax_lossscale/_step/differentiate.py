"""Differentiate a loss function scaled."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._state import scale_in, warn_of_what_stands_outside
from optax_lossscale._step.cast import cast_named
from optax_lossscale._step.scale import scale_by
from optax_lossscale._support import checks
from optax_lossscale._support.jaxprs import argument_names, products_of, total_flops
from optax_lossscale._support.tree import PyTree, is_inexact


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
      compute_dtype: The dtype to which `cast` casts all arguments of `fun`. The cast is
        differentiated too, so gradients have the dtypes of the parameters. None casts nothing.
        Compute the loss itself in float32.
      keep: As for `cast`. A path begins with the argument's name in the signature of `fun`:
        `params['norm']['scale']`, `x`, `rest[0]` for the first of `*rest`.
      transform: What differentiates: `jax.value_and_grad`, `flax.nnx.value_and_grad`,
        `equinox.filter_value_and_grad`, or another that takes `has_aux`.
      **kwargs: Passed on to `transform`.

    Returns:
      `f(state, *args, **kwargs) -> (value, grads)`, where `state` is a `LossScaleState` or an
      optimizer's state that holds exactly one. `value` is the result of `fun`, unscaled, with the
      aux if there is one. `grads` are still scaled, for `tx.update` and `unscale_and_check`.

    Raises:
      TypeError: If the loss is not floating-point; if `fun` returns no pair with `has_aux`; if
        `transform` does not return what `jax.value_and_grad` does; if `compute_dtype` is not a
        floating-point dtype, or an argument to be cast is a stateful `flax.nnx` module.
      ValueError: If `state` holds no `LossScaleState`, or several.

    Warns:
      UserWarning: If `keep` names none of the arrays. Once, if less than half of the operations in
        matrix products run in `compute_dtype` or a narrower dtype (`jax.value_and_grad` alone is
        counted). Once, if transformations stand outside of the guard in an optimizer's state;
        `loss_scale_state(opt_state)` in its place is silent.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> loss_and_grads = ols.value_and_grad(lambda w: jnp.sum(w**2))
      >>> loss_and_grads(ols.init(8), jnp.array([1.0, 2.0]))
      (Array(5., dtype=float32), Array([16., 32.], dtype=float32))
    """
    checks.function("fun", fun, "Give the loss function itself, not its result.")
    cast_arguments = _casting(fun, compute_dtype, keep)
    if compute_dtype is not None and transform is jax.value_and_grad and not kwargs:
        transform = _counting_products(jnp.dtype(compute_dtype))
    if argnums != 0:  # the default of every transform; Equinox's does not take the argument
        kwargs["argnums"] = argnums
    is_first_call = True

    def scaled_value_and_grad(state: PyTree, /, *args: Any, **kwds: Any) -> tuple[Any, PyTree]:
        nonlocal is_first_call
        loss_scale = scale_in("state", state)
        if is_first_call:
            warn_of_what_stands_outside(state)
            is_first_call = False

        def scaled(*args: Any, **kwds: Any) -> tuple[Any, Any]:
            args, kwds = cast_arguments(args, kwds)
            value = fun(*args, **kwds)
            if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
                raise TypeError(
                    f"`fun` must return a pair with `has_aux=True`, got {value!r}. Return the loss "
                    "and the aux, or leave `has_aux` out."
                )
            return scale_by(value[0] if has_aux else value, loss_scale), value

        result: Any = transform(scaled, has_aux=True, **kwargs)(*args, **kwds)
        # `jax.grad` returns gradients and aux, which could be taken for a value and gradients.
        if not (_is_pair(result) and _is_pair(result[0])):
            raise TypeError(
                "`transform` must return ((loss, aux), grads), as `jax.value_and_grad` does, got "
                f"{result!r} of {transform!r}. Pass the function that returns the value too."
            )
        (_, value), grads = result
        return value, grads

    return _with_signature_of(fun, scaled_value_and_grad)


def _casting(
    fun: Callable[..., Any], dtype: DTypeLike | None, keep: Callable[[str], bool] | None
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return what casts the arguments of `fun`, in each of which paths begin with its name."""
    if dtype is None:
        if keep is not None:
            raise ValueError("`keep` must be given with `compute_dtype`: add `jnp.float16`.")
        return lambda args, kwds: (args, kwds)
    kind = checks.floating("compute_dtype", dtype)
    checks.keep(keep)

    def cast_arguments(args: tuple[Any, ...], kwds: dict[str, Any]) -> tuple[Any, Any]:
        names = [*argument_names(fun, len(args)), *kwds]
        named = zip(names, [*args, *kwds.values()], strict=True)
        cast_args = cast_named(named, kind, keep)
        return tuple(cast_args[: len(args)]), dict(zip(kwds, cast_args[len(args) :], strict=True))

    return cast_arguments


def _counting_products(compute_dtype: np.dtype) -> Callable[..., Callable[..., Any]]:
    """Return `jax.value_and_grad`, which warns once if most products run in another dtype.

    It reads the jaxpr that `jax.vjp` transposes, so that the function runs no more often.
    """
    is_counted = False

    def transform(
        fun: Callable[..., Any], *, has_aux: bool, argnums: int | Sequence[int] = 0
    ) -> Callable[..., Any]:
        is_one = not np.ndim(argnums)  # a number of NumPy's, too
        numbers: Any = (argnums,) if is_one else argnums

        def value_and_grad(*args: Any, **kwds: Any) -> tuple[Any, Any]:
            nonlocal is_counted
            known = all(-len(args) <= number < len(args) for number in numbers)
            chosen = [args[number] for number in numbers] if known else []
            if not known or not all(map(is_inexact, jax.tree.leaves(chosen))):  # JAX says why
                return jax.value_and_grad(fun, argnums, has_aux)(*args, **kwds)

            def of_chosen(*chosen: Any) -> Any:
                replaced = list(args)
                for number, arg in zip(numbers, chosen, strict=True):
                    replaced[number] = arg
                return fun(*replaced, **kwds)

            loss, pullback, aux = jax.vjp(of_chosen, *chosen, has_aux=True)
            if np.shape(loss):
                raise TypeError(
                    f"`fun` must return a scalar loss, got shape {loss.shape}. Take its mean."
                )
            # It has none in old versions of JAX, and then nothing is counted.
            jaxpr = getattr(pullback, "jaxpr", None)
            if jaxpr is not None and not is_counted:
                is_counted = True
                _warn_of_products(jaxpr, compute_dtype)
            grads = pullback(jnp.ones_like(loss))
            return (loss, aux), grads[0] if is_one else grads

        return value_and_grad

    return transform


def _warn_of_products(jaxpr: Any, compute_dtype: np.dtype) -> None:
    """Warn if less than half of the operations of products run in a dtype or a narrower one."""
    products = products_of(jaxpr)
    others = [
        product
        for product in products
        if product.dtype != compute_dtype.name and product.itemsize >= compute_dtype.itemsize
    ]
    total, elsewhere = total_flops(products), total_flops(others)
    if 2 * elsewhere <= total:
        return
    largest = max(others, key=lambda product: product.flops)
    source = largest.source()
    checks.warn(
        f"`compute_dtype` is {compute_dtype}, but only {1 - elsewhere / total:.0%} of the "
        "floating-point operations in the matrix products of `fun` run in it or in a narrower "
        f"dtype. The largest other product is of {largest.dtype}{source and f', at {source}'}. "
        "Likely causes:"
        "\n  1. `fun` closes over its batch, which is not cast: make the batch an argument."
        "\n  2. `fun` casts to float32 itself, as with `x.astype(jnp.float32)`: cast the output "
        "alone, from which the loss is computed."
        "\n  3. A recurrent carry starts from `jnp.zeros(n)`, which is float32: write "
        "`jnp.zeros(n, x.dtype)`."
        "\n`diagnostics.precision_report` counts all products."
    )


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
    """Differentiate a loss function scaled: `value_and_grad` without the value.

    Args:
      fun: The loss function.
      argnums: Which of its arguments to differentiate with respect to.
      has_aux: Whether it returns `(loss, aux)`.
      compute_dtype: The dtype to which its arguments are cast; None casts nothing.
      keep: A function from a path to whether the array there is left uncast.
      transform: What differentiates: `jax.value_and_grad`, or as for `value_and_grad`.
      **kwargs: Passed on to `transform`.

    Returns:
      `f(state, *args, **kwargs) -> grads`, still scaled, or `(grads, aux)` with `has_aux`.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
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
