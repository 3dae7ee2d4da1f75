"""A drop-in for Flax's `DynamicScale`."""

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.training import dynamic_scale

from optax_lossscale._loss_scale.differentiate import value_and_grad
from optax_lossscale._loss_scale.scale import all_finite, unscale_and_check
from optax_lossscale._state import increment, initial_state
from optax_lossscale._support import checks
from optax_lossscale._support.bounds import INT32_MAX, LARGEST_SCALE, SMALLEST_SCALE
from optax_lossscale._support.tree import ARRAYS, as_array

#: The result of `DynamicScale.value_and_grad`: Flax's own class.
DynamicScaleResult = dynamic_scale.DynamicScaleResult


class DynamicScale(dynamic_scale.DynamicScale):
    """A drop-in for `flax.training.dynamic_scale.DynamicScale`, with the same fields and results.

    The differences are deliberate:

    * The loss scale grows on the `growth_interval`-th finite step in a row; in Flax, one step
      later. A count beyond the interval grows on the next finite step; in Flax, never.
    * `scale` and `fin_steps` are strongly typed arrays: a training step compiles once, not twice.
      Two Python ints below 2 stay ints, which may be axes; write a loss scale of 1 as `1.0`.
    * The loss scale stays between 2**-126 and 2**126, where its float32 reciprocal is normal.
    * The loss is returned as `fun` returned it; Flax scales it, which may overflow, and divides.
      A float16 loss warns, as in `optax_lossscale.scale_loss`.
    * Gradients wider than float32 keep their dtype, and fp8 metadata are not divided.

    As in Flax, hyper-parameters are not checked: any scalars will do, even traced ones.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lossscale.flax import DynamicScale
      >>> @jax.jit
      ... def gradient(dynamic_scale, w):
      ...     return dynamic_scale.value_and_grad(lambda w: jnp.sum(w**2))(w)
      >>> dynamic_scale = DynamicScale(scale=8.0)
      >>> dynamic_scale, is_finite, loss, grad = gradient(dynamic_scale, jnp.ones(2))
      >>> bool(is_finite), float(loss), grad.tolist(), int(dynamic_scale.fin_steps)
      (True, 2.0, [2.0, 2.0], 1)
    """

    __module__ = "optax_lossscale.flax"  # the public name, which pickles keep
    # Annotated as in Flax. Arrays cannot be hashed, and a static argument must be. Each object has
    # an array of its own: a shared buffer cannot be donated.
    fin_steps: int = struct.field(default_factory=lambda: jnp.zeros((), jnp.int32), hash=False)
    scale: float = struct.field(default=65536.0, hash=False)

    def __post_init__(self) -> None:
        """Turn Python numbers into arrays, but not axes."""
        for name in ("growth_factor", "backoff_factor", "growth_interval", "minimum_scale"):
            value = getattr(self, name)
            is_given = value is not None or name != "minimum_scale"
            if is_given and not (isinstance(value, (numbers.Real, ARRAYS))):
                raise TypeError(f"`{name}` must be a number, got {value!r}. Leave it out.")
        # Ints below 2, and None, may be axes of `jax.vmap`, as in `jax.tree.map(lambda _: 0, ds)`.
        fields: tuple[Any, ...] = (self.fin_steps, self.scale)
        if not all(x is None or (isinstance(x, int) and x < 2) for x in fields):
            object.__setattr__(self, "fin_steps", as_array(self.fin_steps, jnp.int32, strong=True))
            object.__setattr__(self, "scale", as_array(self.scale, jnp.float32, strong=True))

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: str | None = None,
    ) -> Callable[..., dynamic_scale.DynamicScaleResult]:
        """Differentiate a scaled loss, and return its value and gradients unscaled.

        Args:
          fun: The loss function, as for `jax.value_and_grad`. It returns the loss unscaled.
          argnums: The arguments of `fun` to differentiate with respect to.
          has_aux: Whether `fun` returns `(loss, aux)`.
          axis_name: The mapped axis over which to average the gradients.

        Returns:
          A function of the arguments of `fun` that returns a `DynamicScaleResult`: the next
          `dynamic_scale`, whether all gradients are `finite` (`bool[]`), `aux`, the result of
          `fun`, and `grad`, the true gradients, in float32 or wider.

        Raises:
          TypeError: If `axis_name` cannot name an axis, or the loss is not floating-point.
        """
        checks.require_axis_name(axis_name)
        has_aux = checks.read_bool("has_aux", has_aux)
        interval: Any = self.growth_interval
        if not isinstance(interval, jax.Array):  # a number may be beyond an int32, or infinite
            interval = jnp.int32(min(interval, INT32_MAX))
        # Scalars of any dtype would otherwise promote the loss scale.
        growth, backoff = jnp.float32(self.growth_factor), jnp.float32(self.backoff_factor)
        floor = _within_bounds(SMALLEST_SCALE if self.minimum_scale is None else self.minimum_scale)
        state = initial_state(_within_bounds(self.scale))

        def loss_and_aux(*args: Any, **kwargs: Any) -> Any:
            result = fun(*args, **kwargs)  # Flax drops all but the first two
            return tuple(result[:2]) if isinstance(result, (tuple, list)) else result

        scaled_value_and_grad = value_and_grad(loss_and_aux if has_aux else fun, argnums, has_aux)

        def grad_fn_wrapper(*args: Any, **kwargs: Any) -> dynamic_scale.DynamicScaleResult:
            aux, grad = scaled_value_and_grad(state, *args, **kwargs)
            grad, finite = unscale_and_check(grad, state)
            if axis_name is not None:
                # The mean is checked, as in Flax: it may overflow, and all replicas agree.
                grad = jax.lax.pmean(grad, axis_name)
                finite = all_finite(grad)
            count = jnp.where(finite, increment(jnp.int32(self.fin_steps)), 0)
            # As in Flax, an interval of 0 grows on every finite step, and a negative one never.
            grows = finite & (interval >= 0) & (count >= interval)
            # As in Flax, overflows alone meet the floor: below it, a loss scale grows from there.
            backed_off = jnp.fmax(_within_bounds(state.loss_scale * backoff), floor)
            scale = state.loss_scale * jnp.where(grows, growth, 1)
            new_self = self.replace(
                fin_steps=jnp.where(grows, 0, count),
                scale=jnp.where(finite, _within_bounds(scale), backed_off),
            )
            return DynamicScaleResult(new_self, finite, aux, grad)

        return grad_fn_wrapper


def _within_bounds(scale: Any) -> Any:
    return jnp.clip(jnp.asarray(scale, jnp.float32), SMALLEST_SCALE, LARGEST_SCALE)
