"""The interface of a rule, and what `skip_if` takes."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
from jax.typing import ArrayLike

from optax_lossscale._support.tree import Flag, PyTree


@runtime_checkable
class Rule(Protocol):
    """A rule that judges one number at each step, and may remember some. See `with_skipping`.

    Any object with these methods is a rule. The methods are traceable. `measure` may name the extra
    arguments of `update` that it reads.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, optax_lossscale as ols
      >>> class FarAboveTheBest:
      ...     def init(self, params):
      ...         return jnp.float32(jnp.inf)
      ...
      ...     def measure(self, grads, params, *, value, **extra_args):
      ...         return value
      ...
      ...     def judge(self, lowest, value):
      ...         return value > 10 * lowest, jnp.minimum(lowest, value)
      >>> tx = ols.with_skipping(optax.sgd(1.0), FarAboveTheBest())
      >>> isinstance(FarAboveTheBest(), ols.Rule)
      True
    """

    def init(self, params: PyTree, /) -> PyTree:
        """Return the state before the first step."""
        ...

    # `*args` makes a type checker accept methods that name some of the extra arguments.
    def measure(self, grads: PyTree, params: PyTree, /, *args: Any, **extra_args: Any) -> ArrayLike:
        """Return the number that is judged, `float32[]`. The gradients are true."""
        ...

    def judge(self, state: PyTree, measure: jax.Array, /) -> tuple[jax.Array | bool, PyTree]:
        """Return whether to skip the step, `bool[]`, and the new state, of the type of `init`."""
        ...


#: A rule, or a function `(grads, params, **extra_args) -> bool[]`.
RuleLike: TypeAlias = Rule | Callable[..., Flag | bool]

#: What the guards take as `skip_if`.
SkipIf: TypeAlias = RuleLike | Sequence[RuleLike] | None

Rule.__module__ = "optax_lossscale"
