"""Loss scaling in Flax: a Linen `TrainState` that skips bad steps, and a drop-in `DynamicScale`.

`import optax_lossscale.flax as dynamic_scale_lib` replaces `flax.training.dynamic_scale`. With
`flax.nnx`, pass `with_loss_scaling(...)` to `nnx.Optimizer`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import core, struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import dynamic_scale, train_state
from jax.typing import ArrayLike

from optax_lossscale._policy import DynamicLossScale, LossScaleLike
from optax_lossscale._scaling import (
    AxisName,
    check_axis_name,
    over_axes,
    scale_loss,
    unscale,
    value_and_grad,
)
from optax_lossscale._state import (
    INT32_MAX,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScaleState,
    loss_scale_state,
)
from optax_lossscale._transform import LossScaling, with_extra_args, with_loss_scaling
from optax_lossscale._tree import (
    PyTree,
    Tree,
    all_finite,
    first_difference,
    is_array,
    leaves_of_type,
    path_name,
    tree_where,
)

#: What `DynamicScale.value_and_grad` returns: Flax's own class.
DynamicScaleResult = dynamic_scale.DynamicScaleResult


class TrainState(train_state.TrainState):
    """Flax's `TrainState` with loss scaling: a step with non-finite gradients is skipped.

    Make one with `create`; subclass it to add fields. Every leaf is an array from the start, so
    that a training step compiles once and can be scanned. `step` counts applied steps, or all
    steps if `count_skipped` is true.

    If `params` has the collection `_overwrite_with_gradient` of Flax's fp8 layers, its gradient
    replaces it, as in Flax. That gradient is checked too: fp8 layers clip infinite gradients, which
    then appear only in the maxima that the layers record.

    Examples:
      >>> import flax.linen as nn
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_lossscale.flax import TrainState
      >>> model, x = nn.Dense(1), jnp.ones((4, 3))
      >>> state = TrainState.create(
      ...     apply_fn=model.apply, params=model.init(jax.random.key(0), x), tx=optax.sgd(0.1)
      ... )
      >>> @jax.jit
      ... def train_step(state, x):
      ...     def loss_fn(params):
      ...         return state.scale_loss(jnp.mean(state.apply_fn(params, x) ** 2))
      ...
      ...     return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))
      >>> for batch in (x, jnp.inf * x):
      ...     state = train_step(state, batch)
      ...     print(int(state.step), bool(state.grads_finite), float(state.loss_scale))
      1 True 32768.0
      1 False 16384.0
    """

    # Keyword-only, so that a subclass can add fields without a default.
    count_skipped: bool = struct.field(pytree_node=False, kw_only=True, default=False)
    #: Whether the last step was applied; true before the first one. `bool[]`.
    grads_finite: jax.Array = struct.field(kw_only=True, default_factory=lambda: jnp.asarray(True))

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: PyTree,
        tx: optax.GradientTransformation | optax.MultiSteps,
        loss_scale: LossScaleLike = "dynamic",
        axis_name: AxisName | None = None,
        count_skipped: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Return the state before the first step.

        Args:
          apply_fn: Usually the model's `apply`.
          params: The parameters.
          tx: The optimizer. `create` wraps it with `with_loss_scaling`.
          loss_scale: `"dynamic"`, a number (fixed), a policy, or None.
          axis_name: The mapped axis, or a tuple of them, whose members skip steps together. The
            caller averages the gradients.
          count_skipped: Whether `step` counts skipped steps too.
          **kwargs: The fields that a subclass adds. Python numbers in them become arrays.

        Raises:
          TypeError: If `tx` is not an optimizer, `loss_scale` is not a policy, `count_skipped` is
            not a bool, or a field is unknown.
          ValueError: If `tx` already scales the loss.
        """
        if not isinstance(count_skipped, bool):
            raise TypeError(f"`count_skipped` must be True or False, got {count_skipped!r}.")
        wrapped = with_loss_scaling(_beside_metadata(tx), loss_scale, axis_name=axis_name)
        state = cls(
            step=jnp.zeros((), jnp.int32),
            apply_fn=apply_fn,
            params=params,
            tx=wrapped,
            opt_state=wrapped.init(params),
            count_skipped=count_skipped,
            **kwargs,
        )
        return jax.tree.map(_strongly_typed, state)

    @property
    def loss_scale(self) -> jax.Array:
        """The number that the next loss is multiplied by. `float32[]`."""
        return loss_scale_state(self.opt_state).loss_scale

    def scale_loss(self, loss: Tree) -> Tree:
        """Multiply the loss by the loss scale, inside the function that is differentiated."""
        return scale_loss(loss, self.opt_state)

    def apply_gradients(
        self, *, grads: PyTree, value: ArrayLike | None = None, **kwargs: Any
    ) -> Self:
        """Apply the step if its gradients are finite; otherwise only update the loss scale.

        Args:
          grads: The gradients of the scaled loss, with the structure of `params`.
          value: The loss, unscaled. If given, it is passed to the optimizer, and a loss that is
            itself NaN or infinite skips the step; see `optax_lossscale.update`.
          **kwargs: New values of other fields, such as `batch_stats`. On a skipped step each keeps
            its old value. For what is computed from the result, such as an average of the
            parameters, use `tree_where(state.grads_finite, new, old)`.

        Returns:
          The state after the step, of the same type.

        Raises:
          TypeError: If a field is unknown, a dtype in it changes, or `tx` was replaced by an
            optimizer without loss scaling.
          ValueError: If the structure or a shape in a field changes, or `grads` does not match
            `params`.
        """
        _check_grads(grads, self.params)
        set_here = {"step", "params", "opt_state", "grads_finite"}
        known = {field.name for field in dataclasses.fields(self)} - set_here
        if unknown := sorted(set(kwargs) - known):
            raise TypeError(
                f"`apply_gradients` must be given fields of {type(self).__name__} that it does not "
                f"set itself, got {unknown}. Choose from {sorted(known)}, or add a field in a "
                "subclass."
            )
        extra_args = {} if value is None else {"value": value}
        if not isinstance(self.tx, LossScaling):
            raise TypeError(
                f"`tx` must be what `with_loss_scaling` returns, got {self.tx!r}. Make the state "
                "with `create`, or wrap the whole optimizer."
            )
        updates, opt_state, applied = self.tx.update_and_flag(
            grads, self.opt_state, self.params, **extra_args
        )
        old = {name: getattr(self, name) for name in kwargs}
        new = {name: _contained_like(kwargs[name], old[name]) for name in kwargs}
        moved = jnp.logical_or(applied, self.count_skipped).astype(jnp.int32)
        return self.replace(
            step=jnp.asarray(self.step, jnp.int32) + moved,
            params=_apply_updates(self.params, updates, applied),
            opt_state=opt_state,
            grads_finite=applied,
            **tree_where(applied, new, old),
        )


class DynamicScale(dynamic_scale.DynamicScale):
    """A drop-in for `flax.training.dynamic_scale.DynamicScale`, with the same fields and results.

    The differences are deliberate:

    * The loss scale grows on exactly the `growth_interval`-th finite step in a row; in Flax, one
      step later. A count beyond the interval grows on the next finite step; in Flax, never.
    * `scale` and `fin_steps` are strongly typed arrays from the start: a training step compiles
      once, not twice.
    * The loss scale stays between 2**-126 and 2**126, where its float32 reciprocal is a normal
      number.
    * The loss is returned as `fun` returned it; Flax scales it, which may overflow, and divides.
      A float16 loss warns, as in `optax_lossscale.scale_loss`.
    * Gradients wider than float32 keep their dtype, and fp8 metadata are not divided.

    Like Flax's class, it does not check its hyper-parameters: `growth_factor` and `backoff_factor`
    may be 1, and `minimum_scale` may be any scalar, even a traced one.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lossscale.flax import DynamicScale
      >>> @jax.jit
      ... def gradient(dynamic_scale, w):
      ...     return dynamic_scale.value_and_grad(lambda w: jnp.sum(w**2))(w)
      >>> dynamic_scale, is_finite, loss, grad = gradient(DynamicScale(scale=8.0), jnp.ones(2))
      >>> bool(is_finite), float(loss), grad.tolist(), int(dynamic_scale.fin_steps)
      (True, 2.0, [2.0, 2.0], 1)
    """

    # Annotated as in Flax. Arrays cannot be hashed, and a static argument must be. Each object has
    # an array of its own: a shared buffer cannot be donated.
    fin_steps: int = struct.field(default_factory=lambda: jnp.zeros((), jnp.int32), hash=False)
    scale: float = struct.field(default=65536.0, hash=False)

    def __post_init__(self) -> None:
        """Turn Python numbers into arrays."""
        # JAX also builds this object with axes, None or specs instead of numbers. Those are never
        # floats and never appear beside an array.
        if any(is_array(x) or isinstance(x, float) for x in (self.fin_steps, self.scale)):
            for name, dtype in (("fin_steps", jnp.int32), ("scale", jnp.float32)):
                object.__setattr__(self, name, _strongly_typed(getattr(self, name), dtype))

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
          `dynamic_scale`, whether all gradients are `finite` (`bool[]`), `aux`, which is what
          `fun` returned, and `grad`, the true gradients, in float32 or wider.

        Raises:
          TypeError: If `axis_name` cannot be the name of an axis; from the function returned, if
            the loss is not floating-point.
        """
        check_axis_name(axis_name)
        rule = _flax_rule(self)
        state = rule.init()._replace(
            loss_scale=jnp.clip(
                jnp.asarray(self.scale, jnp.float32), SMALLEST_SCALE, LARGEST_SCALE
            ),
            growth_count=jnp.asarray(self.fin_steps, jnp.int32),
        )

        def loss_and_aux(*args: Any, **kwargs: Any) -> Any:
            loss, aux, *_ = fun(*args, **kwargs)  # Flax drops the rest, too
            return loss, aux

        scaled_value_and_grad = value_and_grad(loss_and_aux if has_aux else fun, argnums, has_aux)

        def grad_fn_wrapper(*args: Any, **kwargs: Any) -> dynamic_scale.DynamicScaleResult:
            aux, grad = scaled_value_and_grad(state, *args, **kwargs)
            grad = over_axes(jax.lax.pmean, unscale(grad, state), axis_name)
            # The mean is checked, as in Flax: it may overflow, and all replicas agree.
            finite = all_finite(grad)
            new_state = rule.update(state, finite)
            new_self = self.replace(fin_steps=new_state.growth_count, scale=new_state.loss_scale)
            return DynamicScaleResult(new_self, finite, aux, grad)

        return grad_fn_wrapper


class _UncheckedLossScale(DynamicLossScale):
    """The rule of `DynamicLossScale` with whatever hyper-parameters Flax takes."""

    def __post_init__(self) -> None:
        """Check nothing."""


def _flax_rule(ds: dynamic_scale.DynamicScale) -> DynamicLossScale:
    interval: Any = ds.growth_interval
    floor = SMALLEST_SCALE if ds.minimum_scale is None else ds.minimum_scale
    hyperparams: dict[str, Any] = {
        # Flax grows on every finite step if the interval is 0, and never if it is negative.
        "growth_interval": max(interval, 1) if 0 <= interval <= INT32_MAX else INT32_MAX,
        # Scalars of any dtype would otherwise promote the loss scale.
        "growth_factor": jnp.asarray(ds.growth_factor, jnp.float32),
        "backoff_factor": jnp.asarray(ds.backoff_factor, jnp.float32),
        "min_scale": jnp.clip(jnp.asarray(floor, jnp.float32), SMALLEST_SCALE, LARGEST_SCALE),
        "max_scale": LARGEST_SCALE,
    }
    return _UncheckedLossScale(**hyperparams)


def _check_grads(grads: PyTree, params: PyTree) -> None:
    if jax.tree.structure(grads) != jax.tree.structure(params):
        raise ValueError(
            "`grads` must have the structure of `params`, got a difference at "
            f"{path_name(first_difference(grads, params) or ())}. Differentiate with respect to "
            "all of `state.params`."
        )
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    for (path, grad), param in zip(leaves, jax.tree.leaves(params), strict=True):
        if not (is_array(grad) or isinstance(grad, (int, float, complex))):
            raise TypeError(
                f"`grads` must hold arrays, got {grad!r} at {path_name(path)}. Pass what "
                "`jax.grad` returned."
            )
        # A sum with the parameter would broadcast another shape.
        if jnp.shape(grad) != jnp.shape(param):
            raise ValueError(
                f"`grads` must have the shapes of `params`, got {jnp.shape(grad)} for "
                f"{jnp.shape(param)} at {path_name(path)}. Differentiate with respect to "
                "`state.params`."
            )


def _has_metadata(params: PyTree) -> bool:
    return isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params


def _beside_metadata(
    tx: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformation:
    """Return `tx` for trees that also hold Flax's fp8 metadata, which it must not see."""
    inner = with_extra_args("tx", tx)

    def init_fn(params: Any) -> optax.OptState:
        state = inner.init(params["params"] if _has_metadata(params) else params)
        for path, _ in leaves_of_type(state, LossScaleState):
            raise ValueError(
                "`tx` must not scale the loss itself, got a LossScaleState at "
                f"`{jax.tree_util.keystr(path)}` of its state. Pass the optimizer without "
                "`with_loss_scaling`, and the policy as `loss_scale`."
            )
        return state

    def update_fn(
        updates: Any, state: optax.OptState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, optax.OptState]:
        if not _has_metadata(updates):
            return inner.update(updates, state, params, **extra_args)
        new, state = inner.update(updates["params"], state, params["params"], **extra_args)
        return {**updates, "params": new}, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _apply_updates(params: Any, updates: Any, applied: jax.Array) -> Any:
    if not _has_metadata(params):
        return optax.apply_updates(params, updates)
    new, name = optax.apply_updates(params["params"], updates["params"]), OVERWRITE_WITH_GRADIENT
    metadata = tree_where(applied, updates[name], params[name])
    return type(params)({**params, "params": new, name: metadata})


def _strongly_typed(leaf: Any, dtype: Any = None) -> Any:
    """Return `leaf` as a strongly typed array if it is a Python number or a weakly typed one."""
    # NumPy arrays and PRNG keys lack the attribute.
    if getattr(leaf, "weak_type", False) or isinstance(leaf, (int, float, complex)):
        return jnp.asarray(leaf, dtype or jnp.result_type(leaf))
    return leaf


def _contained_like(new: PyTree, old: PyTree) -> PyTree:
    """Return `new` frozen if `old` is: `apply` returns dicts even for frozen variables."""
    if isinstance(old, core.FrozenDict):
        return core.freeze(new) if isinstance(new, dict) else new
    return core.unfreeze(new) if isinstance(new, core.FrozenDict) else new
