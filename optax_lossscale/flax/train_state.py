"""A `TrainState` for Flax's Linen that skips bad steps."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import core, struct
from flax.training import train_state
from jax.typing import ArrayLike

from optax_lossscale._guard import SkipIf, with_loss_scaling
from optax_lossscale._loss_scale import LossScaleLike, loss_scale_state, scale_loss
from optax_lossscale._order import refuse_second_guard
from optax_lossscale._state import Guard, applied, increment
from optax_lossscale._support import checks, tree
from optax_lossscale._support.choose import tree_where
from optax_lossscale._support.tree import AxisName, Leaf, PyTree, Tree


class TrainState(train_state.TrainState):
    """Flax's `TrainState` with loss scaling: a bad step leaves every field unchanged.

    Make one with `create`. Subclass it to add fields. Every leaf is an array from the start, so a
    training step compiles once and can be scanned. `step` counts applied steps, or all steps if
    `count_skipped` is true. It saturates at 2**31 - 1.

    Each call of `create` makes a new `tx`, which is part of the pytree structure. If two states
    must have the same structure, for example because `out_shardings` come from `jax.eval_shape`,
    write `state.replace(tx=other.tx)`.

    As in Flax, the collection `_overwrite_with_gradient` of fp8 layers is replaced by its gradient.
    This gradient is checked too, since fp8 layers clip infinite gradients and only record there
    that they were large.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> from optax_lossscale.flax import TrainState
      >>> model, x = nn.Dense(1), jnp.ones((4, 3))
      >>> params = model.init(jax.random.key(0), x)
      >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
      >>> @jax.jit
      ... def train_step(state, x):
      ...     def loss_fn(params):
      ...         return state.scale_loss(jnp.mean(state.apply_fn(params, x) ** 2))
      ...
      ...     return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))
      >>> for batch in (x, jnp.inf * x):
      ...     state = train_step(state, batch)
      ...     print(int(state.step), bool(state.applied), float(state.loss_scale))
      1 True 32768.0
      1 False 16384.0
    """

    __module__ = "optax_lossscale.flax"  # the public name, for pickle

    # Keyword-only, so that a subclass can add fields without a default.
    count_skipped: bool = struct.field(pytree_node=False, kw_only=True, default=False)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: PyTree,
        tx: optax.GradientTransformation | optax.MultiSteps,
        loss_scale: LossScaleLike = "dynamic",
        skip_if: SkipIf = None,
        axis_name: AxisName | None = None,
        count_skipped: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Create the state before the first step.

        Args:
          apply_fn: Usually the model's `apply`. As in Flax, it may be None if nothing calls it.
          params: The parameters, a pytree.
          tx: The optimizer. `create` wraps it with `with_loss_scaling`.
          loss_scale: `"dynamic"`, a number (fixed), a policy, or None.
          skip_if: A rule that skips finite steps, such as `Spike()`, or a sequence of rules.
          axis_name: The mapped axis, or a tuple of them, whose devices skip steps together.
          count_skipped: Whether `step` also counts skipped steps.
          **kwargs: Fields that a subclass adds. Python numbers in them become arrays.

        Raises:
          TypeError: If `tx`, `loss_scale`, `skip_if` or `axis_name` is not one that
            `with_loss_scaling` takes, `count_skipped` is not a bool, or a field is unknown.
          ValueError: If `tx` already scales the loss or skips steps.
        """
        inner = _without_fp8_metadata(tx)
        guard = with_loss_scaling(inner, loss_scale, skip_if=skip_if, axis_name=axis_name)
        field: Any = apply_fn  # Flax declares the field as a Callable that is never None
        state = cls(
            step=jnp.zeros((), jnp.int32),
            apply_fn=field,
            params=params,
            tx=guard,
            opt_state=guard.init(params),
            count_skipped=checks.read_bool("count_skipped", count_skipped),
            **kwargs,
        )
        return jax.tree.map(_strongly_typed, state)

    @property
    def loss_scale(self) -> jax.Array:
        """The factor that the next loss is multiplied by. `float32[]`."""
        return loss_scale_state(self.opt_state).loss_scale

    @property
    def applied(self) -> jax.Array:
        """Whether the last step was applied, as in `optax_lossscale.applied`. `bool[]`."""
        return applied(self.opt_state)

    def scale_loss(self, loss: Tree) -> Tree:
        """Multiply the loss by the loss scale, inside the function that is differentiated."""
        return scale_loss(loss, self.opt_state)

    def apply_gradients(
        self,
        *,
        grads: PyTree,
        value: ArrayLike | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Self:
        """Apply the step, or skip it and only update the loss scale.

        Args:
          grads: The gradients of the scaled loss, with the structure and shapes of `params` (with a
            lookahead, `params.fast`).
          value: The unscaled loss, which is passed to the optimizer. If it is not finite, the step
            is skipped.
          extra_args: Further arguments for the optimizer and its rules, by name: `{"kl": kl}` for
            `Spike("kl")`, `{"grad": grads, "value_fn": value_fn}` for a line search.
          **fields: New values of other fields, such as `batch_stats`. A skipped step keeps the old
            values.

        Returns:
          The state after the step, with the same structure, shapes and dtypes.

        Raises:
          AttributeError: If a field is unknown.
          TypeError: If a keyword names a field that this method sets itself, a dtype in a field
            changes, or `extra_args` is not a mapping or holds `value`, `grads` or `params`.
          ValueError: If a structure or shape changes in a field, or differs between `grads` and
            `params`.
        """
        if not isinstance(self.tx, Guard):
            raise TypeError(
                f"`tx` must be the result of `with_loss_scaling`, got {tree.shown(self.tx)}."
            )
        params: PyTree = self.params
        params = params.fast if isinstance(params, optax.LookaheadParams) else params
        # Adding a gradient of another shape to the parameter would broadcast it.
        remedy = "Differentiate with respect to all of `state.params`."
        checks.require_same_structure("grads", grads, params, remedy)
        old = {name: self._field(name) for name in fields}
        loss = {} if value is None else {"value": value}
        updates, opt_state = self.tx.update(
            grads, self.opt_state, self.params, **loss, **_read_extra_args(extra_args)
        )
        is_applied = applied(opt_state)
        new = {name: _same_container(fields[name], old[name]) for name in fields}
        step = jnp.asarray(self.step, jnp.int32)
        return self.replace(
            step=jnp.where(is_applied | self.count_skipped, increment(step), step),
            params=_apply_updates(self.params, updates, is_applied),
            opt_state=opt_state,
            **tree_where(is_applied, new, old),
        )

    def _field(self, name: str) -> PyTree:
        """Return the value of a field that `apply_gradients` may replace."""
        if name in ("step", "params", "opt_state"):
            raise TypeError(f"`apply_gradients` must not be given {name!r}, which it sets itself.")
        if name not in (field.name for field in dataclasses.fields(self)):
            raise AttributeError(
                f"`{name}` must be a field of {type(self).__name__}. Pass an argument of the "
                f"optimizer or of a rule as `extra_args={{{name!r}: {name}}}`."
            )
        return getattr(self, name)


def _strongly_typed(leaf: Leaf) -> Leaf:
    """Return a number as an array whose dtype no step changes, so that the step compiles once."""
    leaf = tree.as_array(leaf)
    return jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _read_extra_args(extra_args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return `extra_args` as keyword arguments for `tx.update`."""
    if extra_args is None:
        return {}
    if not isinstance(extra_args, Mapping):
        raise TypeError(
            f"`extra_args` must be a mapping from names to values, got {tree.shown(extra_args)}."
        )
    for name in ("value", "grads", "params"):
        if name in extra_args:
            raise TypeError(
                f"`extra_args` must not have `{name}`, which `apply_gradients` passes itself."
            )
    return extra_args


def _without_fp8_metadata(
    tx: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformation:
    """Wrap `tx` so that it does not see Flax's fp8 metadata."""
    inner = checks.read_optimizer("tx", tx)

    def init_fn(params: PyTree) -> optax.OptState:
        state = inner.init(params["params"] if tree.has_fp8_metadata(params) else params)
        instead = "`TrainState.create(tx=inner, loss_scale=policy, skip_if=rule, ...)`"
        refuse_second_guard("tx", state, instead)
        return state

    def update_fn(
        updates: PyTree, state: optax.OptState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, optax.OptState]:
        if not tree.has_fp8_metadata(updates):
            return inner.update(updates, state, params, **extra_args)
        new, state = inner.update(updates["params"], state, params["params"], **extra_args)
        return {**updates, "params": new}, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _apply_updates(params: PyTree, updates: PyTree, is_applied: jax.Array) -> PyTree:
    if not tree.has_fp8_metadata(params):
        return optax.apply_updates(params, updates)
    metadata = tree_where(is_applied, updates[tree.FP8_METADATA], params[tree.FP8_METADATA])
    new = optax.apply_updates(params["params"], updates["params"])
    return type(params)({**params, "params": new, tree.FP8_METADATA: metadata})


def _same_container(new: PyTree, old: PyTree) -> PyTree:
    """Freeze `new` if `old` is frozen, else unfreeze it. Linen's `apply` always returns dicts."""
    if isinstance(old, core.FrozenDict):
        return core.freeze(new) if isinstance(new, dict) else new
    return core.unfreeze(new) if isinstance(new, core.FrozenDict) else new
