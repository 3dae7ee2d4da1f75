"""One adapter for each library, written as the library's own documentation shows.

A contender wraps an inner optimizer in its own, `tx`. `optimizer_step` takes the loss and the
gradients of the scaled loss (of the unscaled loss if `scales` is false), and `training_step` takes
a batch. Both are pure, and callers donate the whole `State` to them.
"""

# ruff: noqa: D102 - `Contender` documents the methods, and each class its differences.

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint

import optax_lossscale as ols
from benchmarks import guards
from benchmarks.workloads import ADAMW, LOSS_SCALE, OPTIMIZERS, LossFn, Tree

os.environ["KERAS_BACKEND"] = "jax"
POLICY = ols.DynamicLossScale(initial_scale=LOSS_SCALE)
Optimizer = Any  # of Optax, or of Keras


class State(NamedTuple):
    """Everything that a step changes."""

    params: Tree
    opt_state: Any
    kept: Any = ()  # beside the optimizer: a loss scale, masters, past losses


@dataclasses.dataclass(frozen=True)
class Contender:
    """The interface of an adapter, implemented with plain Optax. Subclasses override parts."""

    name: str  # in the tables
    wrap: Callable[..., Optimizer] = lambda tx: tx  # wraps the inner optimizer
    _: dataclasses.KW_ONLY
    scales: bool = False  # the loss
    skips: bool = False  # a step whose gradients are not finite
    # Computes further arguments of `update` from the gradients and the loss.
    arguments: Callable[[Tree, Any], Mapping[str, jax.Array]] = lambda _grads, _loss: {}
    package: str = "optax"  # the distribution that must be installed
    module: str = "optax"  # of the package, used as `self.lib`
    baseline: str = ""  # the contender that ratios are relative to; by default, the first one
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)  # the inner optimizers that it supports
    compute: Callable[[LossFn], LossFn] = lambda loss_fn: loss_fn  # in which precision

    @property
    def lib(self) -> Any:
        """The library."""
        return importlib.import_module(self.module)

    def make(self, optimizer: str, params: Tree) -> Optimizer:
        """Return the optimizer for parameters of these shapes."""
        del params
        return self.wrap(OPTIMIZERS[optimizer]())

    def init(self, tx: Optimizer, params: Tree) -> State:
        """Return the state before the first step, in new buffers."""
        params = jax.tree.map(jnp.copy, params)
        return State(params, tx.init(params), self.init_kept())

    def init_kept(self) -> Any:
        """Return any state other than the parameters and the optimizer state."""
        return ()

    def optimizer_step(self, tx: Optimizer, state: State, grads: Tree, loss: Any) -> State:
        """Take one step with given gradients."""
        # Squares of float16 gradients underflow, so training without a scaler casts them too.
        return self.apply(tx, state, optax.tree.cast(grads, jnp.float32), loss)

    def training_step(self, loss_fn: LossFn, tx: Optimizer, state: State, batch: Any) -> State:
        """Compute the gradients of a batch and take one step."""
        loss_and_grads = jax.value_and_grad(self.scaled(self.compute(loss_fn), tx, state))
        loss, grads = loss_and_grads(state.params, batch)
        return self.optimizer_step(tx, state, grads, loss)

    def scaled(self, loss_fn: LossFn, tx: Optimizer, state: State) -> LossFn:
        """Return `loss_fn` multiplied by the loss scale."""
        del tx, state
        return loss_fn

    def apply(self, tx: Optimizer, state: State, grads: Tree, loss: Any) -> State:
        """Take one step of the optimizer, as in Optax's documentation."""
        extra = self.arguments(grads, loss)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
        return State(optax.apply_updates(state.params, updates), opt_state, state.kept)


@dataclasses.dataclass(frozen=True)
class Products(Contender):
    """Plain Optax, with float32 matrix products in this precision instead of JAX's default."""

    precision: str = "float32"

    def training_step(self, loss_fn: LossFn, tx: Optimizer, state: State, batch: Any) -> State:
        with jax.default_matmul_precision(self.precision):
            return super().training_step(loss_fn, tx, state, batch)


@dataclasses.dataclass(frozen=True)
class ByHand(Contender):
    """Code that users write around Optax: JMP's recipe, Apex' masters, and a rule for spikes."""

    package: str = "jmp"
    module: str = "jmp"
    masters: bool = False  # updates float32 masters, and copies them to the parameters
    skips_spikes: bool = False  # of the loss

    def init(self, tx: Optimizer, params: Tree) -> State:
        params = jax.tree.map(jnp.copy, params)
        kept: dict[str, Any] = {}
        if self.scales:
            # Only the arrays: JMP's class rejects the placeholders that `jit(...).lower` passes.
            kept["scaler"] = jnp.float32(LOSS_SCALE), jnp.int32(0)
        if self.masters:
            kept["masters"] = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
        if self.skips_spikes:
            kept["past"] = jnp.zeros(guards.WINDOW), jnp.int32(0)
        return State(params, tx.init(kept.get("masters", params)), kept)

    def scaled(self, loss_fn: LossFn, tx: Optimizer, state: State) -> LossFn:
        del tx
        if not self.scales:
            return loss_fn
        scaler = self.lib.DynamicLossScale(*state.kept["scaler"])
        return lambda params, batch: scaler.scale(loss_fn(params, batch))

    def optimizer_step(self, tx: Optimizer, state: State, grads: Tree, loss: Any) -> State:
        kept = dict(state.kept)
        scaler = self.lib.DynamicLossScale(*kept["scaler"]) if self.scales else None
        grads = scaler.unscale(grads) if scaler else optax.tree.cast(grads, jnp.float32)
        old = State(kept.get("masters", state.params), state.opt_state)
        new = self.apply(tx, old, grads, loss)
        if self.skips:
            applied = finite = self.lib.all_finite(grads)
            if scaler:
                scaler = scaler.adjust(finite)
                kept["scaler"] = scaler.loss_scale, scaler.counter
            if self.skips_spikes:
                past, count = kept["past"]
                applied = finite & ~guards.is_above(past, count, loss)
                longer = past.at[count % guards.WINDOW].set(loss), count + 1
                kept["past"] = self.lib.select_tree(finite, longer, kept["past"])
            new = self.lib.select_tree(applied, new, old)
        if not self.masters:
            return new._replace(kept=kept)
        params = jax.tree.map(lambda p, m: m.astype(p.dtype), state.params, new.params)
        return State(params, new.opt_state, {**kept, "masters": new.params})


@dataclasses.dataclass(frozen=True)
class Ours(Contender):
    """This library."""

    package: str = "optax_lossscale"
    axis_name: str | None = None  # of `shard_map`

    def make(self, optimizer: str, params: Tree) -> Optimizer:
        del params
        axis = {"axis_name": self.axis_name} if self.axis_name else {}
        return self.wrap(OPTIMIZERS[optimizer](), **axis)

    def optimizer_step(self, tx: Optimizer, state: State, grads: Tree, loss: Any) -> State:
        grads = grads if self.scales else optax.tree.cast(grads, jnp.float32)
        return self.apply(tx, state, grads, loss)

    def training_step(self, loss_fn: LossFn, tx: Optimizer, state: State, batch: Any) -> State:
        if not self.scales:
            return super().training_step(loss_fn, tx, state, batch)
        # Select one of the two states. Given a `LossScaleState`, `value_and_grad` does not warn
        # about the order of transformations.
        scale_state = ols.loss_scale_state(state.kept or state.opt_state)
        loss_and_grads = ols.value_and_grad(self.compute(loss_fn))
        loss, grads = loss_and_grads(scale_state, state.params, batch)
        return self.optimizer_step(tx, state, grads, loss)


@dataclasses.dataclass(frozen=True)
class Functional(Ours):
    """This library's pure functions and `tree_where`."""

    def init_kept(self) -> Any:
        return ols.init(POLICY)

    def optimizer_step(self, tx: Optimizer, state: State, grads: Tree, loss: Any) -> State:
        grads, finite = ols.unscale_and_check(grads, state.kept)
        new = self.apply(tx, state, grads, loss)
        new = ols.tree_where(finite, new, state)
        return new._replace(kept=ols.update(state.kept, finite, POLICY))


@dataclasses.dataclass(frozen=True)
class Scaler(Contender):
    """A library whose scaler differentiates the loss."""

    def optimizer_step(self, tx: Optimizer, state: State, grads: Tree, loss: Any) -> State:
        del loss
        return self.step(_own_gradient, tx, state, grads)

    def training_step(self, loss_fn: LossFn, tx: Optimizer, state: State, batch: Any) -> State:
        return self.step(loss_fn, tx, state, state.params, batch)

    def step(self, loss_fn: Callable, tx: Optimizer, state: State, *args: Any) -> State:
        """Differentiate a loss with respect to its first argument, and take one step."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Flax(Scaler):
    """`DynamicScale`, with the selection from Flax's ImageNet example."""

    package: str = "flax"
    module: str = "flax.training.dynamic_scale"

    def init_kept(self) -> Any:
        # Flax's own defaults are Python numbers, which would recompile the second step.
        return self.lib.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(LOSS_SCALE))

    def step(self, loss_fn: Callable, tx: Optimizer, state: State, *args: Any) -> State:
        scaler, finite, loss, grads = state.kept.value_and_grad(loss_fn)(*args)
        new = self.apply(tx, state, grads, loss)
        select = functools.partial(jnp.where, finite)
        params = jax.tree.map(select, new.params, state.params)
        return State(params, jax.tree.map(select, new.opt_state, state.opt_state), scaler)


@dataclasses.dataclass(frozen=True)
class Jaxamp(Scaler):
    """jaxamp's scaler, with `optax.apply_if_finite` to skip steps, as in its README."""

    package: str = "jaxamp"
    module: str = "jaxamp"

    def init_kept(self) -> Any:
        # Copies, because the defaults are module-level arrays and donation would delete them.
        defaults = self.lib.DynamicScalerState()
        return jax.tree.map(jnp.copy, defaults._replace(scaler=jnp.float32(LOSS_SCALE)))

    def step(self, loss_fn: Callable, tx: Optimizer, state: State, *args: Any) -> State:
        grad_fn = self.lib.dynamic_scale_grad(loss_fn, filter=False)
        scaler, grads = grad_fn(*args, dynamic_scaler_state=state.kept)
        return self.apply(tx, state, grads, None)._replace(kept=scaler)


@dataclasses.dataclass(frozen=True)
class Mpx(Contender):
    """mpx: `filter_value_and_grad`, or its parts, and `optimizer_update`."""

    package: str = "mixed-precision-for-jax"
    module: str = "mpx"

    def init_kept(self) -> Any:
        return jnp.float32(LOSS_SCALE), jnp.int32(0)

    def optimizer_step(self, tx: Optimizer, state: State, grads: Tree, loss: Any) -> State:
        del loss
        scaling, finite = self._scaling(state), self.lib.all_finite(grads)
        return self._update(tx, state, scaling.adjust(finite), finite, scaling.unscale(grads))

    def training_step(self, loss_fn: LossFn, tx: Optimizer, state: State, batch: Any) -> State:
        loss_and_grads = self.lib.filter_value_and_grad(loss_fn, scaling=self._scaling(state))
        _, *results = loss_and_grads(state.params, batch)
        return self._update(tx, state, *results)

    def _scaling(self, state: State) -> Any:
        # Rebuilt at each step, so its `factor` and `period` stay static, as under `filter_jit`.
        loss_scale, counter = state.kept
        return self.lib.DynamicLossScaling(loss_scale, jnp.float32(1), counter=counter)

    def _update(self, tx: Any, state: State, scaling: Any, finite: Any, grads: Tree) -> State:
        update = self.lib.optimizer_update
        params, opt_state = update(state.params, tx, state.opt_state, grads, finite)
        return State(params, opt_state, (scaling.loss_scaling, scaling.counter))


@dataclasses.dataclass(frozen=True)
class Keras(Contender):
    """Keras' AdamW, with the hyper-parameters of `optax.adamw(1e-3)`."""

    package: str = "keras"
    module: str = "keras"
    baseline: str = "Keras AdamW alone"
    optimizers: tuple[str, ...] = (ADAMW,)

    def make(self, optimizer: str, params: Tree) -> Optimizer:
        del optimizer  # `optimizers` has only one
        library = self.lib.optimizers
        tx = library.AdamW(1e-3, weight_decay=1e-4, epsilon=1e-8)
        tx = library.LossScaleOptimizer(tx, initial_scale=LOSS_SCALE) if self.scales else tx
        tx.build([self.lib.Variable(p) for p in jax.tree.leaves(params)])
        return tx

    def init(self, tx: Optimizer, params: Tree) -> State:
        return State(jax.tree.map(jnp.copy, params), [jnp.copy(v.value) for v in tx.variables])

    def optimizer_step(self, tx: Optimizer, state: State, grads: Tree, loss: Any) -> State:
        del loss
        leaves, treedef = jax.tree.flatten(state.params)
        leaves, variables = tx.stateless_apply(state.opt_state, jax.tree.leaves(grads), leaves)
        return State(jax.tree.unflatten(treedef, leaves), variables)

    def scaled(self, loss_fn: LossFn, tx: Optimizer, state: State) -> LossFn:
        def scaled_loss(params: Tree, batch: jax.Array) -> jax.Array:
            values = list(zip(tx.variables, state.opt_state, strict=True))
            with self.lib.StatelessScope(state_mapping=values):
                return tx.scale_loss(loss_fn(params, batch))

        return scaled_loss


@jax.custom_vjp
def _own_gradient(grads: Tree) -> jax.Array:
    """A loss with the given gradients, for scalers that differentiate the loss.

    Its backward pass ignores their loss scale, since the given gradients are scaled already.
    """
    del grads
    return jnp.zeros(())


_own_gradient.defvjp(
    lambda grads: (jnp.zeros(()), grads),
    lambda grads, loss_cotangent: (grads,),  # noqa: ARG005
)


def _row_major(tx: Optimizer) -> Optimizer:
    """Return an optimizer that stores gradients in row-major order, like arguments and results."""

    def order(grad: jax.Array) -> jax.Array:
        return with_layout_constraint(grad, Layout(major_to_minor=tuple(range(grad.ndim))))

    return optax.chain(optax.stateless(lambda grads, _params: jax.tree.map(order, grads)), tx)


def _stack(tx: Optimizer, **axis: str) -> Optimizer:
    """Return a combination of loss scaling, a rule about the loss, and masters."""
    inner = ols.with_master_weights(tx)  # changes nothing for float32 parameters
    return ols.with_loss_scaling(inner, POLICY, skip_if=ols.Spike(), **axis)


_SCALED = functools.partial(ols.with_loss_scaling, loss_scale=POLICY)
_REMAINDERS = functools.partial(ols.with_master_weights, remainders=True)
_TWO_BYTES = lambda tx: _REMAINDERS(ols.with_bfloat16_state(tx))  # noqa: E731
_ROUNDED = lambda tx: ols.with_stochastic_rounding(ols.with_bfloat16_state(tx))  # noqa: E731
_IF_FINITE = functools.partial(optax.apply_if_finite, max_consecutive_errors=100)
_LIBRARY = {"scales": True, "skips": True}


def _spike(of: str = "value") -> Callable[[Optimizer], Optimizer]:
    return lambda tx: ols.with_skipping(tx, ols.Spike(of))


def _autocast(dtype: Any, **options: Any) -> dict[str, Any]:
    return {"compute": functools.partial(ols.autocast, dtype=dtype, **options)}


def _by_hand(dtype: Any) -> dict[str, Any]:
    def cast(loss_fn: LossFn) -> LossFn:
        return lambda params, batch: loss_fn(ols.cast(params, dtype), batch)

    return {"compute": cast}


_VALUE = {"arguments": lambda _grads, loss: {"value": loss}}
_LOSS = {"arguments": lambda _grads, loss: {"loss": loss}}
_LOSS_AND_NORM = {"arguments": lambda g, loss: {"loss": loss, "grad_norm": optax.tree.norm(g)}}

CONTENDERS: dict[str, Contender] = {
    "Optax": Contender("Optax alone"),
    "Control": Contender("Optax alone, again (A/A)"),  # its distance from 1.00 is the noise
    "Ours": Ours("optax_lossscale", _SCALED, **_LIBRARY),
    "Jmp": ByHand("JMP", **_LIBRARY),
    "Flax": Flax("Flax DynamicScale", **_LIBRARY),
    "Mpx": Mpx("mpx", **_LIBRARY),
    "Jaxamp": Jaxamp("jaxamp", _IF_FINITE, **_LIBRARY),
    "IfFinite": Contender("optax.apply_if_finite (no scaling)", _IF_FINITE, skips=True),
    "Keras": Keras("Keras AdamW alone"),
    "KerasScaled": Keras("Keras LossScaleOptimizer", **_LIBRARY),
    "OptaxRowMajor": Contender("Optax alone, row-major", _row_major),
    "OursRowMajor": Ours("ours, row-major", lambda tx: _row_major(_SCALED(tx)), **_LIBRARY),
    # Without the wrapper.
    "Functional": Functional("ours, pure functions and tree_where", **_LIBRARY),
    # Without loss scaling.
    "Bfloat16State": Ours("ours, state in two bytes", ols.with_bfloat16_state),
    "SkipIf": Ours("ours, with_skipping", ols.with_skipping, skips=True),
    "Spike": Ours("ours, Spike()", _spike(), skips=True, **_VALUE),
    "SpikeNorm": Ours('ours, Spike("grad_norm")', _spike("grad_norm"), skips=True),
    "MaxText": Contender("MaxText, spikes of both", guards.maxtext, **_LOSS_AND_NORM),
    "Levanter": Contender("Levanter, spikes of both", guards.levanter, **_LOSS),
    # For parameters in half precision.
    "MastersByHand": ByHand("masters by hand", masters=True),
    "Masters": Ours("ours, masters", ols.with_master_weights),
    "MastersScaled": Ours(
        "optax_lossscale", lambda tx: _SCALED(ols.with_master_weights(tx)), **_LIBRARY
    ),
    "Remainders": Ours("ours, remainders", _REMAINDERS),
    "SkipIfRemainders": Ours(
        "ours, with_skipping and remainders",
        lambda tx: ols.with_skipping(_REMAINDERS(tx)),
        skips=True,
    ),
    "RemaindersBfloat16State": Ours("ours, remainders and state in two bytes", _TWO_BYTES),
    "SpikeRemaindersBfloat16State": Ours(
        "the same with Spike()",
        lambda tx: ols.with_skipping(_TWO_BYTES(tx), ols.Spike()),
        skips=True,
        **_VALUE,
    ),
    "RoundedBfloat16State": Ours("ours, stochastic rounding and state in two bytes", _ROUNDED),
    "SpikeRoundedBfloat16State": Ours(
        "stochastic rounding, state in two bytes, Spike()",
        lambda tx: ols.with_skipping(_ROUNDED(tx), ols.Spike()),
        skips=True,
        **_VALUE,
    ),
    "Stack": Ours("optax_lossscale", _stack, **_LIBRARY, **_VALUE),
    "StackByHand": ByHand("by hand", masters=True, skips_spikes=True, **_LIBRARY),
    # For a model in float32: in float32, cast by hand, or with autocast.
    "Float32": Products("float32"),
    "Tf32": Products("TF32 (on a GPU)", precision="tensorfloat32"),
    "Autocast": Ours("autocast, float16", _SCALED, **_LIBRARY, **_autocast(jnp.float16)),
    "AutocastCheckpoints": Ours(
        "autocast, float16, `checkpoint_dtype`",
        _SCALED,
        **_LIBRARY,
        **_autocast(jnp.float16, checkpoint_dtype=jnp.bfloat16),
    ),
    "AutocastBfloat16": Ours(
        "autocast, bfloat16", ols.with_skipping, skips=True, **_autocast(jnp.bfloat16)
    ),
    "AutocastRemaindersBfloat16State": Ours(
        "autocast, bfloat16, remainders and state in two bytes",
        lambda tx: ols.with_skipping(_TWO_BYTES(tx)),
        skips=True,
        **_autocast(jnp.bfloat16),
    ),
    "ByHand": Ours("by hand, float16", _SCALED, **_LIBRARY, **_by_hand(jnp.float16)),
    "ByHandBfloat16": Ours(
        "by hand, bfloat16", ols.with_skipping, skips=True, **_by_hand(jnp.bfloat16)
    ),
}
