"""One adapter for each library, written as the library's own documentation shows.

An adapter is built from an optimizer and a tree of parameters. `optimizer_step` takes gradients of
the scaled loss (or of the unscaled loss if `scales` is false), and `training_step` takes a batch.
Both are pure, and callers donate the whole `State` to them.
"""

# ruff: noqa: D102 - `Contender` documents the methods, and each class what is special.

import functools
import importlib
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from benchmarks.workloads import ADAMW, LOSS_SCALE, OPTIMIZERS, LossFn, Tree


class State(NamedTuple):
    """Everything that a step changes."""

    params: Tree
    opt_state: Any
    scaler: Any = ()


class Contender:
    """The interface of an adapter, implemented with Optax alone. Subclasses override parts of it.

    Attributes:
      name: The name in the tables.
      package: The distribution that must be installed.
      module: The module to import as `self.lib`.
      baseline: The name of the contender that its ratios compare with.
      scales: Whether it scales the loss.
      skips: Whether it skips a step whose gradients are not finite.
      optimizers: The inner optimizers that it supports.
      axis_name: The axis of `shard_map` that it runs over.
    """

    name: ClassVar[str]
    package: ClassVar[str] = "optax"
    module: ClassVar[str] = "optax"
    baseline: ClassVar[str] = "Optax alone"
    scales: ClassVar[bool] = False
    skips: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...]] = tuple(OPTIMIZERS)
    axis_name: ClassVar[str | None] = None

    def __init__(self, optimizer: str, params: Tree) -> None:
        """Build the optimizer. Subclasses may read the shapes of `params`."""
        del params
        self.lib: Any = importlib.import_module(self.module)
        self.tx = self.wrap(OPTIMIZERS[optimizer]())

    @classmethod
    def version(cls) -> str | None:
        """Return the installed version, or None."""
        try:
            return metadata.version(cls.package)
        except metadata.PackageNotFoundError:
            return None

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the optimizer, wrapped if this contender needs it."""
        return tx

    def init(self, params: Tree) -> State:
        """Return the state before the first step, in new buffers."""
        params = jax.tree.map(jnp.copy, params)
        return State(params, self.tx.init(params), self.init_scaler())

    def init_scaler(self) -> Any:
        """Return any state other than the parameters and the optimizer state."""
        return ()

    def optimizer_step(self, state: State, grads: Tree) -> State:
        """Take one step with given gradients."""
        # Squares of float16 gradients underflow, so training without a scaler casts them too.
        return self.apply(state, jax.tree.map(lambda g: g.astype(jnp.float32), grads))

    def training_step(self, loss_fn: LossFn, state: State, batch: jax.Array) -> State:
        """Compute the gradients of a batch and take one step."""
        return self.optimizer_step(
            state, jax.grad(self.scaled(loss_fn, state))(state.params, batch)
        )

    def scaled(self, loss_fn: LossFn, state: State) -> LossFn:
        """Return `loss_fn` multiplied by the loss scale."""
        del state
        return loss_fn

    def apply(self, state: State, grads: Tree) -> State:
        """Take one step of the optimizer, as in Optax's documentation."""
        updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, state.scaler)


class OptaxAlone(Contender):
    """The baseline of the other contenders."""

    name = "Optax alone"


class Control(Contender):
    """The baseline again: the distance of its ratio from 1.00 is the noise."""

    name = "Optax alone, again (A/A)"


class Ours(Contender):
    """This library."""

    name = "optax_lossscale"
    package = "optax_lossscale"
    module = "optax_lossscale"
    scales = True
    skips = True

    @classmethod
    def version(cls) -> str | None:
        return ols.__version__  # available even if not installed

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        policy = ols.DynamicLossScale(initial_scale=LOSS_SCALE)
        return ols.with_loss_scaling(tx, policy, axis_name=self.axis_name)

    def optimizer_step(self, state: State, grads: Tree) -> State:
        return self.apply(state, grads)

    def training_step(self, loss_fn: LossFn, state: State, batch: jax.Array) -> State:
        _, grads = ols.value_and_grad(loss_fn)(state.opt_state, state.params, batch)
        return self.apply(state, grads)


class OursUnchecked(Ours):
    """This library with a fixed loss scale, without checks or skips."""

    name = "optax_lossscale, unchecked"
    skips = False

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return ols.with_loss_scaling(tx, ols.FixedLossScale(LOSS_SCALE, skip_nonfinite=False))


class SkipIf(Ours):
    """This library's skip alone."""

    name = "optax_lossscale, skip_if (no scaling)"
    scales = False

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return ols.skip_if(tx)

    optimizer_step = Contender.optimizer_step
    training_step = Contender.training_step


class SkipSpikes(SkipIf):
    """This library's skip, also of spikes in the norm of the gradients."""

    name = "optax_lossscale, skip_if and Spike (no scaling)"

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return ols.skip_if(tx, ols.Spike("grad_norm"))


class Stack(Ours):
    """What the README combines: loss scaling, a rule about the loss, and masters if needed."""

    name = "optax_lossscale, with Spike and masters"

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        policy = ols.DynamicLossScale(initial_scale=LOSS_SCALE)
        inner = ols.with_master_weights(tx)  # nothing for float32 parameters
        return ols.with_loss_scaling(inner, policy, skip_if=ols.Spike(), axis_name=self.axis_name)

    def apply(self, state: State, grads: Tree) -> State:
        loss = ols.loss_scale_state(state.opt_state).loss_scale  # any number will do
        updates, opt_state = self.tx.update(grads, state.opt_state, state.params, value=loss)
        return State(optax.apply_updates(state.params, updates), opt_state, state.scaler)


class HalfStack(Stack):
    """The same against masters by hand."""

    baseline = "Masters by hand"


class Jmp(Contender):
    """The recipe of JMP's README."""

    name = "JMP"
    package = "jmp"
    module = "jmp"
    scales = True
    skips = True

    def init_scaler(self) -> Any:
        # Only the arrays: JMP's class rejects the placeholders that `jit(...).lower` passes.
        return jnp.float32(LOSS_SCALE), jnp.int32(0)

    def scaled(self, loss_fn: LossFn, state: State) -> LossFn:
        scaler = self.lib.DynamicLossScale(*state.scaler)
        return lambda params, batch: scaler.scale(loss_fn(params, batch))

    def optimizer_step(self, state: State, grads: Tree) -> State:
        scaler = self.lib.DynamicLossScale(*state.scaler)
        grads = scaler.unscale(grads)
        finite = self.lib.all_finite(grads)
        new = self.apply(state, grads)
        scaler = scaler.adjust(finite)
        return State(
            self.lib.select_tree(finite, new.params, state.params),
            self.lib.select_tree(finite, new.opt_state, state.opt_state),
            (scaler.loss_scale, scaler.counter),
        )


class Flax(Contender):
    """`DynamicScale`, with the selection from Flax's ImageNet example."""

    name = "Flax DynamicScale"
    package = "flax"
    module = "flax.training.dynamic_scale"
    scales = True
    skips = True

    def init_scaler(self) -> Any:
        # Flax's own defaults are Python numbers, which would recompile the second step.
        return self.lib.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(LOSS_SCALE))

    def optimizer_step(self, state: State, grads: Tree) -> State:
        return self._select(state, state.scaler.value_and_grad(_own_gradient)(grads))

    def training_step(self, loss_fn: LossFn, state: State, batch: jax.Array) -> State:
        result = state.scaler.value_and_grad(lambda params: loss_fn(params, batch))(state.params)
        return self._select(state, result)

    def _select(self, state: State, result: Any) -> State:
        scaler, finite, _, grads = result
        new = self.apply(state, grads)
        select = functools.partial(jax.tree.map, functools.partial(jnp.where, finite))
        return State(
            select(new.params, state.params), select(new.opt_state, state.opt_state), scaler
        )


class Mpx(Contender):
    """mpx: `filter_value_and_grad`, or its parts, and `optimizer_update`."""

    name = "mpx"
    package = "mixed-precision-for-jax"
    module = "mpx"
    scales = True
    skips = True

    def init_scaler(self) -> Any:
        return jnp.float32(LOSS_SCALE), jnp.int32(0)

    def optimizer_step(self, state: State, grads: Tree) -> State:
        scaling = self._scaling(state)
        finite = self.lib.all_finite(grads)
        new_scaling = scaling.adjust(finite)
        return self._update(state, new_scaling, finite, scaling.unscale(grads))

    def training_step(self, loss_fn: LossFn, state: State, batch: jax.Array) -> State:
        value_and_grad = self.lib.filter_value_and_grad(loss_fn, scaling=self._scaling(state))
        _, scaling, finite, grads = value_and_grad(state.params, batch)
        return self._update(state, scaling, finite, grads)

    def _scaling(self, state: State) -> Any:
        # Rebuilt at each step, so its `factor` and `period` stay static, as under `filter_jit`.
        loss_scale, counter = state.scaler
        return self.lib.DynamicLossScaling(loss_scale, jnp.float32(1), counter=counter)

    def _update(self, state: State, scaling: Any, finite: jax.Array, grads: Tree) -> State:
        params, opt_state = self.lib.optimizer_update(
            state.params, self.tx, state.opt_state, grads, finite
        )
        return State(params, opt_state, (scaling.loss_scaling, scaling.counter))


class Jaxamp(Contender):
    """jaxamp's scaler, with `optax.apply_if_finite` to skip steps, as in its README."""

    name = "jaxamp"
    package = "jaxamp"
    module = "jaxamp"
    scales = True
    skips = True

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.apply_if_finite(tx, max_consecutive_errors=100)

    def init_scaler(self) -> Any:
        # Copies, because the defaults are module-level arrays and donation would delete them.
        defaults = self.lib.DynamicScalerState()
        return jax.tree.map(jnp.copy, defaults._replace(scaler=jnp.float32(LOSS_SCALE)))

    def optimizer_step(self, state: State, grads: Tree) -> State:
        return self._step(_own_gradient, state, grads)

    def training_step(self, loss_fn: LossFn, state: State, batch: jax.Array) -> State:
        return self._step(loss_fn, state, state.params, batch)

    def _step(self, loss_fn: Callable[..., jax.Array], state: State, *args: Any) -> State:
        grad_fn = self.lib.dynamic_scale_grad(loss_fn, filter=False)
        scaler, grads = grad_fn(*args, dynamic_scaler_state=state.scaler)
        return self.apply(state, grads)._replace(scaler=scaler)


class ApplyIfFinite(Contender):
    """Optax's own way to skip steps, without loss scaling."""

    name = "optax.apply_if_finite (no scaling)"
    skips = True

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.apply_if_finite(tx, max_consecutive_errors=100)


class KerasAlone(Contender):
    """Keras' AdamW, the baseline of Keras' loss scaling."""

    name = "Keras AdamW alone"
    package = "keras"
    module = "keras"
    baseline = "Keras AdamW alone"
    optimizers = (ADAMW,)

    def __init__(self, optimizer: str, params: Tree) -> None:
        """Build the optimizer for variables with the shapes of `params`."""
        if optimizer != ADAMW:
            raise ValueError(f"`optimizer` must be {ADAMW!r} for Keras, got {optimizer!r}.")
        os.environ["KERAS_BACKEND"] = "jax"
        self.lib = importlib.import_module(self.module)
        self.optimizer = self.make()
        self.optimizer.build([self.lib.Variable(p) for p in jax.tree.leaves(params)])

    def make(self) -> Any:
        """Return the optimizer, with the hyper-parameters of `optax.adamw(1e-3)`."""
        return self.lib.optimizers.AdamW(1e-3, weight_decay=1e-4, epsilon=1e-8)

    def init(self, params: Tree) -> State:
        variables = [jnp.copy(v.value) for v in self.optimizer.variables]
        return State(jax.tree.map(jnp.copy, params), variables)

    def optimizer_step(self, state: State, grads: Tree) -> State:
        leaves, treedef = jax.tree.flatten(state.params)
        leaves, variables = self.optimizer.stateless_apply(
            state.opt_state, jax.tree.leaves(grads), leaves
        )
        return State(jax.tree.unflatten(treedef, leaves), variables)

    def scaled(self, loss_fn: LossFn, state: State) -> LossFn:
        def scaled_loss(params: Tree, batch: jax.Array) -> jax.Array:
            values = zip(self.optimizer.variables, state.opt_state, strict=True)
            with self.lib.StatelessScope(state_mapping=list(values)):
                return self.optimizer.scale_loss(loss_fn(params, batch))

        return scaled_loss


class KerasScaled(KerasAlone):
    """Keras' `LossScaleOptimizer` around Keras' AdamW."""

    name = "Keras LossScaleOptimizer"
    scales = True
    skips = True

    def make(self) -> Any:
        return self.lib.optimizers.LossScaleOptimizer(super().make(), initial_scale=LOSS_SCALE)


class MastersByHand(Contender):
    """Float32 parameters, and a copy in half precision for the next forward pass."""

    name = "Masters by hand"
    baseline = "Masters by hand"

    def init(self, params: Tree) -> State:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return State(jax.tree.map(jnp.copy, params), self.tx.init(masters), masters)

    def apply(self, state: State, grads: Tree) -> State:
        updates, opt_state = self.tx.update(grads, state.opt_state, state.scaler)
        masters = optax.apply_updates(state.scaler, updates)
        params = jax.tree.map(lambda p, m: m.astype(p.dtype), state.params, masters)
        return State(params, opt_state, masters)


class Masters(Ours):
    """This library's master weights alone."""

    name = "optax_lossscale, with_master_weights (no scaling)"
    baseline = MastersByHand.name
    scales = False
    skips = False

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return ols.with_master_weights(tx)

    training_step = Contender.training_step


class Remainders(Masters):
    """This library's master weights in two bytes."""

    name = "optax_lossscale, with_master_weights(remainders=True) (no scaling)"

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return ols.with_master_weights(tx, remainders=True)


class RemaindersSkipped(Remainders):
    """The same in a guard."""

    name = "optax_lossscale, skip_if and remainders (no scaling)"
    skips = True

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return ols.skip_if(super().wrap(tx))


class MastersScaled(Ours):
    """This library's loss scaling around its master weights."""

    name = "optax_lossscale"
    baseline = MastersByHand.name

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return super().wrap(ols.with_master_weights(tx))


CONTENDERS: tuple[type[Contender], ...] = (
    OptaxAlone,
    Control,
    Ours,
    OursUnchecked,
    SkipIf,
    SkipSpikes,
    Jmp,
    Flax,
    Mpx,
    Jaxamp,
    ApplyIfFinite,
    KerasAlone,
    KerasScaled,
)
# For parameters in half precision.
MASTERS: tuple[type[Contender], ...] = (MastersByHand, Masters, MastersScaled)
REMAINDERS: tuple[type[Contender], ...] = (MastersByHand, Masters, Remainders, RemaindersSkipped)
ALL_CONTENDERS = (*CONTENDERS, *MASTERS, Remainders, RemaindersSkipped, Stack, HalfStack)


@jax.custom_vjp
def _own_gradient(grads: Tree) -> jax.Array:
    """A loss whose gradient is its argument, at no cost.

    It passes given gradients to scalers that require a loss to differentiate. They multiply the
    loss by the loss scale, but the backward pass below ignores that: the given gradients are
    already scaled.
    """
    del grads
    return jnp.zeros(())


_own_gradient.defvjp(
    lambda grads: (jnp.zeros(()), grads),
    lambda grads, loss_cotangent: (grads,),  # noqa: ARG005
)
