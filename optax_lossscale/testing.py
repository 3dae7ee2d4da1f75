"""Helpers for users' tests: assert that the loss is scaled exactly once."""

import collections
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._state import LossScaleState, find, subtrees
from optax_lossscale._support import checks
from optax_lossscale._support.nnx import plain_keys
from optax_lossscale._support.tree import FP8_KEY, KeyPath, PyTree, is_inexact, path_name

__all__ = ["assert_scaled_once"]

# Gradients are compared at one of these loss scales and at a quarter of it: at the largest one that
# keeps them finite, since fewer gradients round to zero at large loss scales.
_SCALES = tuple(2.0**power for power in range(24, -12, -4))

# A term that is added after scaling is lost in gradients at large loss scales. So it is also sought
# at small ones, from the smallest on: it adds the same to the gradients at all of them.
_SMALL_SCALES = tuple(2.0**power for power in range(-12, 17))
_NEIGHBOURS = 5
_LEAST_TERM = 0.005  # relative to the unscaled gradient


class _Array(NamedTuple):
    """A scaled gradient, flat and in double precision, and the precision it was stored in."""

    numbers: Any
    eps: float


_MISTAKES = {
    0: "not scaled, or unscaled before `tx.update`, which unscales. Only use `value_and_grad`",
    2: "scaled twice. Multiply by the loss scale only once",
    -1: "not scaled, but unscaled, which `tx.update` does. Only use `value_and_grad`",
}

_WITH_LOSS = (
    "it returned a tuple of which only the first member is wrong, like the `(loss, grads)` of "
    "`value_and_grad`. Take the gradients: `lambda *args: loss_and_grads(*args)[1]`"
)


def assert_scaled_once(grad_fn: Callable[..., PyTree], state: PyTree, *args: Any) -> None:
    """Assert that gradients are proportional to the loss scale.

    For each array, this measures k in `gradients ~ loss_scale**k`. 1 is correct. 0 means that the
    loss was not scaled, or the gradients were already unscaled. 2 means that the loss was scaled
    twice. Adam's updates hide such a mistake, since Adam divides by the magnitude of the gradients.
    Arrays of zeros are not checked.

    A term that is added after scaling, such as a penalty, is found if it is at least 1 % of the
    gradient, and the unscaled gradients do not underflow.

    Args:
      grad_fn: The function whose gradients are measured. `grad_fn(state, *args)` returns the scaled
        gradients that are passed to `tx.update`.
      state: A `LossScaleState`, or any pytree that holds exactly one, such as a Flax TrainState.
        `grad_fn` is given copies of it with other loss scales, from 2**-12 to 2**24.
      *args: The other arguments of `grad_fn`.

    Raises:
      TypeError: If the gradients are traced.
      AssertionError: If the gradients are not proportional to the loss scale. The message gives k
        and the likely mistake, or how large the term is that is not scaled.
      ValueError: If `state` holds no `LossScaleState`, or several, or if at every loss scale the
        gradients are all zero or not finite.

    Examples:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def grad_fn(state, w):
      ...     return ols.value_and_grad(lambda w: jnp.sum(w**2))(state, w)[1]
      >>> ols.testing.assert_scaled_once(grad_fn, ols.init(), jnp.ones(3))
    """
    checks.require_function("grad_fn", grad_fn, "Pass the function, and its arguments separately.")
    find(LossScaleState, "state", state)
    ((state_path, _),) = subtrees(state, LossScaleState)

    def grads_at(loss_scale: float) -> PyTree:
        def replace(path: KeyPath, leaf: Any) -> Any:
            is_inside = path[: len(state_path)] == state_path
            is_scale = is_inside and plain_keys(path[len(state_path) :])[0] == "loss_scale"
            return jnp.asarray(loss_scale, jnp.float32) if is_scale else leaf

        return grad_fn(jax.tree_util.tree_map_with_path(replace, state), *args)

    for scale in _SCALES:
        low, grads = _largest_magnitudes(grads_at(scale / 4)), grads_at(scale)
        high = _largest_magnitudes(grads)
        measured = [name for name in low if low[name] and high.get(name)]
        if measured and all(map(math.isfinite, (*low.values(), *high.values()))):
            break
    else:
        raise ValueError(
            "`grad_fn` must return gradients that are finite and not all zero, got none at any "
            f"loss scale from {_SCALES[-1] / 4:g} to {_SCALES[0]:g}. `first_nonfinite` finds a NaN."
        )
    powers = {name: math.log(high[name] / low[name], 4) for name in measured}
    wrong = {name: k for name, k in powers.items() if abs(k - 1) > 0.25}
    if not wrong:
        with np.errstate(invalid="ignore"):  # gradients may overflow at the larger ones
            _assert_no_term(grads_at, measured)
        return
    name, k = max(wrong.items(), key=lambda item: abs(item[1] - 1))
    mistake = _MISTAKES.get(round(k)) if abs(k - round(k)) <= 0.25 else None
    is_first = all(name.startswith("`[0]") for name in wrong)
    if type(grads) is tuple and is_first and len(wrong) < len(powers):
        mistake = _WITH_LOSS
    mistake = mistake or "they depend on it in some other way. Look for an underflow in float16"
    raise AssertionError(
        f"`grad_fn` must return gradients proportional to `loss_scale**k` with k = 1, got "
        f"{k:.2f} at {name} ({len(wrong)} of {len(powers)} arrays are wrong): {mistake}."
    )


def _assert_no_term(grads_at: Callable[[float], PyTree], names: list[str]) -> None:
    """Raise if gradients have a term that the loss scale does not multiply."""
    near = collections.deque[dict[str, _Array]](maxlen=_NEIGHBOURS)
    terms: dict[str, _Term] = {}
    unknown = {*names}
    for scale in _SMALL_SCALES:
        near.append(_arrays(grads_at(scale)))
        for name, term in [*terms.items()]:
            if not term.is_in(*(arrays[name] for arrays in [*near][-2:])):
                del terms[name]
                unknown.add(name)
        if len(near) == _NEIGHBOURS:
            found = {x: _term_of([arrays[x] for arrays in near], scale) for x in sorted(unknown)}
            unknown -= {name for name, term in found.items() if term}
            terms |= {name: term for name, term in found.items() if term and term.share}
        if not unknown and not terms:
            return
    if terms:
        name, term = max(terms.items(), key=lambda item: item[1].share)
        raise AssertionError(
            "`grad_fn` must return gradients proportional to the loss scale, got a term at "
            f"{name} that is not scaled, {term.share:.2g} times the size of the gradient "
            f"({len(terms)} of {len(names)} arrays have one): it is added after scaling, like a "
            "penalty. Add it to the loss that is scaled."
        )


class _Term(NamedTuple):
    """What the loss scale does not multiply in an array, and its size relative to the gradient."""

    array: Any
    share: float

    def is_in(self, low: _Array, high: _Array) -> bool:
        """Return whether gradients at a loss scale and at its double have this term.

        True where they are too large to show it.
        """
        rounding = 4 * high.eps * _norm(high.numbers)
        rest = 2 * low.numbers - high.numbers
        return not _norm(rest - self.array) > 0.2 * _norm(self.array) + rounding


def _term_of(near: list[_Array], scale: float) -> _Term | None:
    """Return the term that is not scaled, or None if the gradients underflow.

    The loss scales of the arrays double up to `scale`. What doubling does not explain is the term
    if it is the same at all of them. What underflow leaves is not.
    """
    arrays = [array.numbers for array in near]
    if not np.any(arrays[0]):
        return None
    rests = [2 * low - high for low, high in itertools.pairwise(arrays)]
    term = np.mean(rests, axis=0)
    gradient, size = _norm(arrays[-1] - term) / scale, _norm(term)
    if max(map(_norm, rests)) <= _LEAST_TERM * gradient:
        return _Term(term, 0.0)
    if not all(_norm(rest - term) <= 0.2 * size for rest in rests):
        return None
    return _Term(term, size / gradient if gradient else math.inf)


def _norm(array: Any) -> float:
    return float(np.linalg.norm(array))


def _largest_magnitudes(grads: PyTree) -> dict[str, float]:
    """Return the largest magnitude in each array of scaled gradients."""
    arrays = _arrays(grads).items()
    return {name: float(np.max(np.abs(array.numbers), initial=0)) for name, array in arrays}


def _arrays(grads: PyTree) -> dict[str, _Array]:
    """Return the arrays of scaled gradients, by name."""
    remedy = "Call it outside of `jax.jit`. The function may be jitted."
    checks.require_values("grad_fn", grads, remedy)
    return {
        path_name(path): _Array(
            np.asarray(leaf).astype(np.complex128).reshape(-1),
            float(jnp.finfo(np.asarray(leaf).dtype).eps),
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if is_inexact(leaf) and FP8_KEY not in path
    }
