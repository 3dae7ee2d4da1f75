"""Differentiate a scaled loss."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from optax_lossscale._loss_scale.never_scaled import mark_scaled
from optax_lossscale._loss_scale.scale import scaled
from optax_lossscale._order import warn_of_outside
from optax_lossscale._state import LossScaleState, find, loss_scale_of
from optax_lossscale._support import checks, tree
from optax_lossscale._support.lines import GivenWarnings, warn_once
from optax_lossscale._support.tree import PyTree

P = ParamSpec("P")
Result = TypeVar("Result")


def value_and_grad(
    fun: Callable[P, Result],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[Concatenate[PyTree, P], tuple[Result, PyTree]]:
    """Differentiate a scaled loss, and return its value unscaled.

    Args:
      fun: The loss function, as for `jax.value_and_grad`. It need not know about loss scaling.
        With `autocast(loss_fn, jnp.float16)`, its matrix products run in float16.
      argnums: Which arguments of `fun` to differentiate with respect to.
      has_aux: Whether `fun` returns `(loss, aux)`.
      transform: The function that differentiates: `jax.value_and_grad`,
        `flax.nnx.value_and_grad`, `equinox.filter_value_and_grad`, or another one that takes
        `has_aux`.
      **kwargs: Passed on to `transform`.

    Returns:
      `f(state, *args, **kwargs) -> (value, grads)`, where `state` is a `LossScaleState` or an
      optimizer's state that holds exactly one. `value` is what `fun` returned, unscaled, including
      the aux if there is one. `grads` are still scaled, for `tx.update` and `unscale_and_check`.

    Raises:
      TypeError: If the loss is not floating-point; with `has_aux`, if `fun` does not return a pair;
        if `transform` does not return what `jax.value_and_grad` does.
      ValueError: If `state` holds no `LossScaleState`, or several.

    Warns:
      UserWarning: Once per message: if the optimizer's state shows transformations outside the
        guard (pass `loss_scale_state(opt_state)` to silence it); if the loss is bfloat16. If the
        loss is a float16 scalar: see `scale_loss`.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> loss_and_grads = ols.value_and_grad(lambda w: jnp.sum(w**2))
      >>> loss_and_grads(ols.init(8), jnp.array([1.0, 2.0]))
      (Array(5., dtype=float32), Array([16., 32.], dtype=float32))
    """
    given = GivenWarnings()
    differentiate = differentiated(
        fun, argnums, has_aux, transform=transform, given=given, **kwargs
    )

    def scaled_value_and_grad(
        state: PyTree, /, *args: P.args, **kwds: P.kwargs
    ) -> tuple[Result, PyTree]:
        order = "`loss_and_grads(opt_state, params, ...)` takes the state first."
        loss_scale = loss_scale_of(find(LossScaleState, "state", state, order))
        mark_scaled()
        warn_of_outside(state, given)
        return differentiate(loss_scale, *args, **kwds)

    return _with_signature_of(fun, scaled_value_and_grad)


def differentiated(
    fun: Callable[P, Result],
    argnums: int | Sequence[int],
    has_aux: bool,
    *,
    transform: Callable[..., Callable[..., Any]],
    given: set[str],
    **kwargs: Any,
) -> Callable[Concatenate[jax.Array, P], tuple[Result, PyTree]]:
    """Return `value_and_grad` of `fun` that takes a loss scale, `float32[]`, instead of a state.

    `given` has the warnings that were given.
    """
    checks.require_function("fun", fun, "Pass the loss function itself, not its result.")
    checks.require_function("transform", transform, "Use `jax.value_and_grad`, its default.")
    has_aux = checks.read_bool("has_aux", has_aux)
    # Another transform may take other `argnums`.
    positions = checks.read_argnums(argnums) if transform is jax.value_and_grad else ()
    if argnums != 0:  # the default of every transform; Equinox's does not take the argument
        kwargs["argnums"] = argnums
    # Closures hold no dict and no list, which cannot be hashed: see `GivenWarnings`.
    names = ("has_aux", *kwargs)
    differentiate = functools.partial(transform, has_aux=True, **kwargs)

    def run(loss_scale: jax.Array, /, *args: P.args, **kwds: P.kwargs) -> tuple[Result, PyTree]:
        def scaled_loss(*args: P.args, **kwds: P.kwargs) -> tuple[Any, _Unscaled]:
            value = fun(*args, **kwds)
            loss: Any = value
            if has_aux:
                checks.require_pair(value)
                loss, _ = loss
            result = scaled(loss, loss_scale)
            if jnp.dtype("bfloat16") in map(jnp.result_type, jax.tree.leaves(loss)):
                warn_once(_BFLOAT16_LOSS, given)
            return result, _Unscaled(value)

        try:
            differentiated = differentiate(scaled_loss)
        except TypeError as error:
            raise TypeError(
                f"`transform` must take a function and {', '.join(names)}, as "
                f"`jax.value_and_grad` does, got {tree.shown(transform)}: {error}."
            ) from error
        by_position, by_name = _arguments_by_position(fun, args, kwds)
        try:
            result = differentiated(*by_position, **by_name)
        except TypeError:
            checks.require_no_functions(args, positions)
            raise
        match result:
            case ((_, _Unscaled(value)), grads):
                return value, grads
            case _:  # `jax.grad` returns gradients and aux
                raise TypeError(
                    "`transform` must return ((loss, aux), grads), as `jax.value_and_grad` does, "
                    f"got {tree.shown(result)} from {tree.shown(transform)}. Pass the function "
                    "that also returns the value."
                )

    return run


def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[Concatenate[PyTree, P], Any]:
    """Differentiate a scaled loss, and return only the gradients.

    It raises and warns as `value_and_grad` does.

    Args:
      fun: The loss function, as for `jax.grad`.
      argnums: Which arguments of `fun` to differentiate with respect to.
      has_aux: Whether `fun` returns `(loss, aux)`.
      transform: The function that differentiates and also returns the value, as in
        `value_and_grad`.
      **kwargs: Passed on to `transform`.

    Returns:
      `f(state, *args, **kwargs) -> grads`, still scaled, or `(grads, aux)` with `has_aux`.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> ols.grad(lambda w: jnp.sum(w**2))(ols.init(8), jnp.array([1.0, 2.0]))
      Array([16., 32.], dtype=float32)
    """
    loss_and_grads = value_and_grad(fun, argnums, has_aux, transform=transform, **kwargs)

    def scaled_grad(state: PyTree, /, *args: P.args, **kwds: P.kwargs) -> Any:
        value, grads = loss_and_grads(state, *args, **kwds)
        return (grads, value[1]) if has_aux else grads

    return _with_signature_of(fun, scaled_grad)


class _Unscaled(NamedTuple):
    """What the loss function returned. Gradients are never mistaken for it."""

    value: PyTree


_BFLOAT16_LOSS = (
    "The loss is bfloat16, which has three digits. Probably nothing is computed in float32. "
    "Compute the loss in float32, for example from `logits.astype(jnp.float32)`, or differentiate "
    "`autocast(loss_fn, jnp.bfloat16)`."
)


def _with_signature_of(fun: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Return `function` with the signature of `fun` after a state.

    `jax.jit` looks up the positions of `static_argnames` in the signature.
    """
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return function
    name = "opt_state" if "state" in parameters else "state"
    while name in parameters:
        name += "_"
    state = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = inspect.Signature([state, *parameters.values()])
    return function


def _arguments_by_position(
    fun: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Sequence[PyTree], Mapping[str, PyTree]]:
    """Return the arguments of a call of `fun`, by position where its signature has one.

    Flax's transforms look up keyword arguments in the signature of the function that they are
    given, and only take those that have a position.
    """
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, or other arguments: calling `fun` raises
        return args, kwargs
    names = [
        name
        for name, parameter in bound.signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    # Defaults are only filled in before an argument that is given.
    number = max([len(args), *(names.index(name) + 1 for name in kwargs if name in names)])
    bound.apply_defaults()
    by_name = {name: kwargs[name] for name in kwargs if name in bound.kwargs}
    return bound.args[:number], by_name
