"""A fixed loss scale inside a function, whose derivatives come out true."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._loss_scale.scale import FLOAT16_LOSS
from optax_lossscale._support import checks, nnx
from optax_lossscale._support.lines import warn
from optax_lossscale._support.tree import FP8_KEY, PyTree, Tree, at_least_float32, is_inexact

P = ParamSpec("P")
Result = TypeVar("Result")


def scale_inside(fun: Callable[P, Result], loss_scale: float) -> Callable[P, Result]:
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
            return _with_tangents_times(scale, result, _warn_of_float16)

        return run

    return nnx.transformed(fun, scaled_inside)


def _with_tangents_times(factor: float, tree: Tree, check: Callable[[jax.Array], None]) -> Tree:
    """Return `tree`, whose tangents are multiplied by `factor`, after `check` of what has some.

    All arrays pass one operation, so that an outer differentiation ignores it for all or for none.
    """

    @jax.custom_jvp
    def identity(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
        return arrays

    def jvp(
        primals: tuple[dict[int, jax.Array]], tangents: tuple[dict[int, Any]]
    ) -> tuple[dict[int, jax.Array], dict[int, Any]]:
        (arrays,), (given,) = primals, tangents
        return arrays, jax.tree.map(scaled_tangent, arrays, given)

    def scaled_tangent(array: jax.Array, tangent: Any) -> Any:
        if isinstance(tangent, SymbolicZero):
            return tangent
        tangent = jnp.asarray(tangent)  # jax 0.7 gives the rule Python's numbers
        check(jnp.asarray(array))
        # A factor in half precision would be rounded.
        wide = at_least_float32(tangent)
        return (wide * jnp.asarray(factor, wide.dtype)).astype(tangent.dtype)

    identity.defjvp(jvp, symbolic_zeros=True)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {place: leaf for place, (_, leaf) in enumerate(paths)}
    arrays = {
        place: leaf
        for place, (path, leaf) in enumerate(paths)
        if isinstance(leaf, jax.Array) and is_inexact(leaf) and FP8_KEY not in path
    }
    return treedef.unflatten((leaves | identity(arrays)).values())


def _warn_of_float16(result: jax.Array) -> None:
    if result.dtype == jnp.float16 and not result.shape:
        warn(FLOAT16_LOSS)
