"""Loss scaling in Flax: Linen's `TrainState` that skips bad steps, and a better `DynamicScale`.

With `flax.nnx`, hand `with_loss_scaling(...)` to `nnx.Optimizer`.
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

from optax_lossscale._policy import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicLossScale,
    LossScaleLike,
    finite_number,
    scale_number,
)
from optax_lossscale._scaling import (
    AxisName,
    check_axis_name,
    over_axes,
    scale_loss,
    unscale,
    value_and_grad,
)
from optax_lossscale._state import LossScaleState, loss_scale_state
from optax_lossscale._transform import with_extra_args, with_loss_scaling
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


class TrainState(train_state.TrainState):
    """Flax's `TrainState` with loss scaling: a step with non-finite gradients changes nothing.

    Make one with `create`; subclass it to add fields. Every leaf is an array from the start, so
    that a training step compiles once and can be scanned. `step` counts applied steps, unless
    `count_skipped`.

    If `params` has the collection `_overwrite_with_gradient` of Flax's fp8 layers, it is
    overwritten by its gradient, as Flax does it. That gradient is checked too: fp8 layers clip
    infinite gradients, which then show only in what the layers note about them.

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
      >>> for factor in (1, jnp.inf):
      ...     state = train_step(state, factor * x)
      ...     print(int(state.step), bool(state.grads_finite), float(state.loss_scale))
      1 True 32768.0
      1 False 16384.0
    """

    # By keyword only, so that fields without a default can follow in a subclass.
    count_skipped: bool = struct.field(pytree_node=False, kw_only=True, default=False)

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
          tx: The optimizer, which is wrapped here by `with_loss_scaling`.
          loss_scale: The policy, or anything that `as_loss_scale` takes.
          axis_name: The mapped axis, or a tuple of them, over which all must skip together. The
            gradients are averaged by the caller.
          count_skipped: Whether `step` counts skipped steps too.
          **kwargs: The fields that a subclass adds. Python numbers in them become arrays.

        Raises:
          TypeError: If `tx` is no optimizer, `loss_scale` no policy, `count_skipped` no bool, or a
            field is not known.
          ValueError: If `tx` scales the loss already.
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
        """The factor that the next loss is multiplied by. `float32[]`."""
        return loss_scale_state(self.opt_state).loss_scale

    @property
    def grads_finite(self) -> jax.Array:
        """Whether the last step was applied; true before the first one. `bool[]`."""
        return loss_scale_state(self.opt_state).consecutive_skipped == 0

    def scale_loss(self, loss: Tree) -> Tree:
        """Multiply the loss by the loss scale, in the function that is differentiated."""
        return scale_loss(loss, self.opt_state)

    def apply_gradients(
        self, *, grads: PyTree, value: ArrayLike | None = None, **kwargs: Any
    ) -> Self:
        """Apply the step if its gradients are finite, and otherwise move the loss scale only.

        Args:
          grads: The gradients of the scaled loss, with the structure of `params`.
          value: The loss, unscaled. If given, it is handed on to the optimizer, and a loss that is
            itself NaN or infinite skips the step without moving the factor.
          **kwargs: New values of other fields, such as `batch_stats`. On a skipped step each keeps
            its old value. What is computed from the result, such as an average of the parameters,
            is kept with `tree_where(state.grads_finite, new, old)`.

        Returns:
          The state after the step, of the same type.

        Raises:
          TypeError: If a field is not known, or a dtype in it changes.
          ValueError: If the structure or a shape in a field changes, or `grads` has not those of
            `params`.
        """
        _check_grads(grads, self.params)
        known = {field.name for field in dataclasses.fields(self)} - {"step", "params", "opt_state"}
        if unknown := sorted(set(kwargs) - known):
            raise TypeError(
                f"`apply_gradients` must be given fields of {type(self).__name__} that it does not "
                f"set itself, got {unknown}. Choose from {sorted(known)}, or add a field in a "
                "subclass."
            )
        extra_args = {} if value is None else {"value": value}
        updates, opt_state = optax.with_extra_args_support(self.tx).update(
            grads, self.opt_state, self.params, **extra_args
        )
        # Not `== 0`: a policy that checks nothing leaves the counters as it found them.
        before, after = map(loss_scale_state, (self.opt_state, opt_state))
        applied = jnp.asarray(after.consecutive_skipped <= before.consecutive_skipped)
        old = {name: getattr(self, name) for name in kwargs}
        new = {name: _contained_like(kwargs[name], old[name]) for name in kwargs}
        moved = jnp.logical_or(applied, self.count_skipped).astype(jnp.int32)
        return self.replace(
            step=jnp.asarray(self.step, jnp.int32) + moved,
            params=_apply_updates(self.params, updates, applied),
            opt_state=opt_state,
            **tree_where(applied, new, old),
        )


class DynamicScale(dynamic_scale.DynamicScale):
    """A drop-in for `flax.training.dynamic_scale.DynamicScale`, with the same fields and results.

    It differs in what the rule of `DynamicLossScale` and the rest of this library do differently:

    * The factor grows on exactly the `growth_interval`-th finite step in a row, in Flax one later.
    * `scale` and `fin_steps` are arrays from the start: a training step compiles once, not twice.
    * The factor stays between 2**-126 and 2**126, where its reciprocal is a normal number.
    * The loss is returned as `fun` returned it; Flax scales it, which may overflow, and divides.
    * Gradients of a larger type than float32 keep it, and fp8 metadata are not divided.

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

    # Annotated as in Flax. A new array for each object: a shared buffer cannot be donated.
    fin_steps: int = struct.field(default_factory=lambda: jnp.zeros((), jnp.int32))

    def __post_init__(self) -> None:
        """Turn Python numbers into arrays."""
        # JAX builds this object, too, with axes, None or specs in place of the numbers. Those are
        # never floats, and never stand beside an array.
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
        """Differentiate a loss function, scaled.

        Args:
          fun: The loss function, as for `jax.value_and_grad`. It knows nothing of loss scaling.
          argnums: Which arguments of `fun` to differentiate with respect to.
          has_aux: Whether `fun` returns `(loss, aux)`.
          axis_name: The mapped axis over which to average the gradients.

        Returns:
          A function of the arguments of `fun` that returns a `DynamicScaleResult`, which holds the
          next `dynamic_scale`, whether all gradients are `finite`, `aux`, which is what `fun`
          returned, and `grad`, the true gradients, in float32 or larger.

        Raises:
          TypeError: If `fun` is not callable, or a hyper-parameter is of the wrong type.
          ValueError: If a hyper-parameter is out of the bounds of `DynamicLossScale`.
        """
        floor, ceiling = SMALLEST_SCALE, LARGEST_SCALE
        if self.minimum_scale is not None:
            # Flax takes 0 for no floor, too.
            minimum = finite_number("minimum_scale", self.minimum_scale)
            floor = scale_number("minimum_scale", max(minimum, floor))
        policy = DynamicLossScale(
            initial_scale=floor,
            growth_interval=self.growth_interval,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            min_scale=floor,
            max_scale=ceiling,
        )
        # The factor may start below the floor, as in Flax, and one saved by Flax above the ceiling.
        state = policy.init()._replace(
            loss_scale=jnp.minimum(jnp.asarray(self.scale, jnp.float32), ceiling),
            growth_count=jnp.asarray(self.fin_steps, jnp.int32),
        )
        check_axis_name(axis_name)
        scaled_value_and_grad = value_and_grad(fun, argnums, has_aux)

        def finite_value_and_grad(*args: Any, **kwargs: Any) -> dynamic_scale.DynamicScaleResult:
            value, grads = scaled_value_and_grad(state, *args, **kwargs)
            grads = over_axes(jax.lax.pmean, unscale(grads, state), axis_name)
            finite = all_finite(grads)  # of the mean, as in Flax: it may overflow, and all agree
            new_state = policy.update(state, finite)
            new_self = self.replace(fin_steps=new_state.growth_count, scale=new_state.loss_scale)
            return dynamic_scale.DynamicScaleResult(new_self, finite, value, grads)

        return finite_value_and_grad


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
                f"`grads` must hold arrays, got {grad!r} at {path_name(path)}. Hand in what "
                "`jax.grad` returned."
            )
        # Summed with the parameter, another shape would be broadcast.
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
    """Return `tx` for trees in which Flax's fp8 metadata, which it must not see, lie beside."""
    inner = with_extra_args("tx", tx)

    def init_fn(params: Any) -> optax.OptState:
        state = inner.init(params["params"] if _has_metadata(params) else params)
        for path, _ in leaves_of_type(state, LossScaleState):
            raise ValueError(
                "`tx` must not scale the loss itself, got a LossScaleState at "
                f"`{jax.tree_util.keystr(path)}` of its state. Hand in the optimizer that "
                "`with_loss_scaling` was given, and the policy as `loss_scale`."
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
    # NumPy's arrays and PRNG keys do not say.
    if getattr(leaf, "weak_type", False) or isinstance(leaf, (int, float, complex)):
        return jnp.asarray(leaf, dtype or jnp.result_type(leaf))
    return leaf


def _contained_like(new: PyTree, old: PyTree) -> PyTree:
    """Return `new` frozen or not as `old` is: `apply` returns dicts, whatever it is given."""
    if isinstance(old, core.FrozenDict):
        return core.freeze(new) if isinstance(new, dict) else new
    return core.unfreeze(new) if isinstance(new, core.FrozenDict) else new
