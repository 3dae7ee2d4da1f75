"""Differentiate a scaled loss, or a function that is scaled inside."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._loss_scale.scale import scaled, warn_of_float16
from optax_lossscale._order import warn_of_outside
from optax_lossscale._state import (
    GuardState,
    LossScaleState,
    find,
    loss_scale_of,
    mark_scaled,
)
from optax_lossscale._support import checks, nnx
from optax_lossscale._support.lines import warn_once
from optax_lossscale._support.tree import (
    PyTree,
    Tree,
    at_least_float32,
    is_fp8_metadata,
    is_inexact,
    shown,
    times,
)

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
        loss_scale = loss_scale_of(find(LossScaleState, "state", state, _ORDER))
        mark_scaled()
        if not isinstance(state, GuardState):
            warn_of_outside(state, warnings_given)

        def scaled_loss(*args: P.args, **kwds: P.kwargs) -> tuple[Any, _Unscaled]:
            value = fun(*args, **kwds)
            loss: Any = value
            if has_aux:
                checks.require_pair(value)
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
                f"`jax.value_and_grad` does, got {shown(transform)}: {error}."
            ) from error
        by_position, by_name = _by_position(fun, args, kwds)
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
                    f"got {shown(result)} from {shown(transform)}. Pass the function that also "
                    "returns the value."
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


_ORDER = "`loss_and_grads(opt_state, params, ...)` takes the state first."
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


def _by_position(
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


def scale_inside(fun: Callable[P, Value], loss_scale: float) -> Callable[P, Value]:
    """Return `fun` with derivatives that are computed at a fixed loss scale, and come out true.

    It is for trainers that differentiate by themselves, in float16, where `value_and_grad` has no
    place. Cotangents are multiplied by the loss scale where they enter `fun`, and divided by it
    where they leave. Values do not change, and the forward pass has no further operation. Put it
    around `autocast`, and skip bad steps with `with_skipping`::

        half_loss_fn = scale_inside(autocast(loss_fn, jnp.float16), 2.0**15)
        fit(params, with_skipping(tx), half_loss_fn)

    The loss scale does not adapt. If it is too large, gradients are infinite or NaN, and
    `with_skipping` skips the step; `check_health` reports a run that only skips. Do not use it
    under `with_loss_scaling`, which would divide the gradients once more.

    In reverse over reverse differentiation, the second pass is not scaled: compute a gradient
    penalty inside `fun`.

    Args:
      fun: The loss or the model, usually from `autocast`. Pass what is differentiated as an
        argument, since cotangents of closed-over arrays come out multiplied. Arguments may hold
        modules of `flax.nnx`. Flax's fp8 metadata, whose gradient is its new value, and everything
        that is not a JAX array are passed through.
      loss_scale: The loss scale, between 2**-126 and 2**126. A power of two makes scaling exact.
        `suggest_loss_scale` chooses one.

    Returns:
      A function with the same signature and the same values.

    Raises:
      TypeError: If `fun` cannot be called, or `loss_scale` is not a number.
      ValueError: If `loss_scale` is out of bounds, or an argument that is differentiated is
        float16 or narrower: its gradient would underflow when it is divided.

    Warns:
      UserWarning: If a result that is differentiated is a float16 scalar: see `scale_loss`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(w):  # the gradient of the product is 2**-26, zero in float16
      ...     return 2.0**-26 * w.astype(jnp.float16).astype(jnp.float32)
      >>> print(jax.grad(loss_fn)(1.0), jax.grad(ols.scale_inside(loss_fn, 2.0**15))(1.0))
      0.0 1.4901161e-08
    """
    checks.require_function("fun", fun, "Pass the loss function itself, not its result.")
    scale = checks.read_scale("loss_scale", loss_scale)

    def scaled_inside(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: PyTree) -> PyTree:
            result = call(*_with_tangents_times(1 / scale, args, checks.require_wide))
            return _with_tangents_times(scale, result, warn_of_float16)

        return run

    @functools.wraps(fun, updated=())
    def run(*args: P.args, **kwargs: P.kwargs) -> Value:
        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
            return fun(*args, **kwargs)

        if nnx.holds_objects((args, kwargs)):
            return nnx.on_arrays(scaled_inside, call)(args, kwargs)
        return scaled_inside(call)(args, kwargs)

    return run


def _with_tangents_times(factor: float, tree: Tree, check: Callable[[jax.Array], None]) -> Tree:
    """Return `tree`, whose tangents are multiplied by `factor`, after `check` of what has some.

    All arrays pass one operation, so that an outer differentiation ignores it for all or for none.
    """

    @jax.custom_jvp
    def identity(arrays: list[jax.Array]) -> list[jax.Array]:
        return arrays

    def jvp(
        primals: tuple[list[jax.Array]], tangents: tuple[list[Any]]
    ) -> tuple[list[jax.Array], list[Any]]:
        (arrays,), (given,) = primals, tangents
        return arrays, [*map(scaled_tangent, arrays, given)]

    def scaled_tangent(array: jax.Array, tangent: Any) -> Any:
        if isinstance(tangent, SymbolicZero):
            return tangent
        check(array)
        # A factor in half precision would be rounded.
        return times(at_least_float32(tangent), jnp.float32(factor)).astype(tangent.dtype)

    identity.defjvp(jvp, symbolic_zeros=True)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    places = [
        place
        for place, (path, leaf) in enumerate(paths)
        if isinstance(leaf, jax.Array) and is_inexact(leaf) and not is_fp8_metadata(path)
    ]
    leaves = [leaf for _, leaf in paths]
    for place, array in zip(places, identity([leaves[i] for i in places]), strict=True):
        leaves[place] = array
    return treedef.unflatten(leaves)
