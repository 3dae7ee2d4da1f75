"""Differentiate a scaled loss."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from optax_lossscale._loss_scale.scale import scaled
from optax_lossscale._order import warn_of_outside
from optax_lossscale._state import GuardState, LossScaleState, find, loss_scale_of
from optax_lossscale._support import checks
from optax_lossscale._support.lines import warn_once
from optax_lossscale._support.tree import PyTree

P = ParamSpec("P")
Value = TypeVar("Value")


def value_and_grad(
    fun: Callable[P, Value],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[Concatenate[PyTree, P], tuple[Value, PyTree]]:
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
    checks.require_function("fun", fun, "Pass the loss function itself, not its result.")
    checks.require_function("transform", transform, "Use `jax.value_and_grad`, its default.")
    has_aux = checks.read_bool("has_aux", has_aux)
    # Another transform may take other `argnums`.
    positions = checks.read_argnums(argnums) if transform is jax.value_and_grad else ()
    if argnums != 0:  # the default of every transform; Equinox's does not take the argument
        kwargs["argnums"] = argnums
    warnings_given: set[str] = set()

    def scaled_value_and_grad(
        state: PyTree, /, *args: P.args, **kwds: P.kwargs
    ) -> tuple[Value, PyTree]:
        loss_scale = loss_scale_of(find(LossScaleState, "state", state))
        if not isinstance(state, GuardState):
            warn_of_outside(state, warnings_given)

        def scaled_loss(*args: P.args, **kwds: P.kwargs) -> tuple[Any, _Unscaled]:
            value = fun(*args, **kwds)
            loss: Any = value
            if has_aux:
                checks.require_pair("fun", value)
                loss, _ = loss
            result = scaled(loss, loss_scale)
            if jnp.dtype("bfloat16") in map(jnp.result_type, jax.tree.leaves(loss)):
                warn_once(_BFLOAT16_LOSS, warnings_given)
            return result, _Unscaled(value)

        try:
            differentiated = transform(scaled_loss, has_aux=True, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"`transform` must take a function and {', '.join(['has_aux', *kwargs])}, as "
                f"`jax.value_and_grad` does, got {transform!r}: {error}."
            ) from error
        try:
            result = differentiated(*args, **kwds)
        except TypeError:
            checks.require_no_functions(args, positions)
            raise
        match result:
            case ((_, _Unscaled(value)), grads):
                return value, grads
            case _:  # `jax.grad` returns gradients and aux
                raise TypeError(
                    "`transform` must return ((loss, aux), grads), as `jax.value_and_grad` does, "
                    f"got {result!r} from {transform!r}. Pass the function that also returns the "
                    "value."
                )

    return _with_signature_of(fun, scaled_value_and_grad)


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
