"""The calls that users make, and the types they get: read by a type checker, never run.

`test_typing.py` has pyright check this file against an installed copy of the package. A line with
`pyright: ignore` is a call that must be rejected, by the rule that it names: were it accepted, the
comment would be reported as unnecessary.
"""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from optax_lossscale.flax import DynamicScale, DynamicScaleResult, TrainState
from optax_lossscale.interop import (
    from_flax_dynamic_scale,
    from_jmp,
    from_torch_state_dict,
    to_torch_state_dict,
)
from optax_lossscale.keras import ema_params, loss_scale_optimizer
from optax_lossscale.testing import assert_scaled_once

Params = dict[str, jax.Array]


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] * x)


# --- Policies ---------------------------------------------------------------------------------


class OwnPolicy:
    """What a user writes: the three members of `LossScale`, and nothing to inherit from."""

    skip_nonfinite = True

    def init(self) -> ols.LossScaleState:
        return ols.init(8)

    def update(
        self,
        state: ols.LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        *,
        loss_finite: jax.typing.ArrayLike = True,
    ) -> ols.LossScaleState:
        return ols.update(state, grads_finite, "dynamic", loss_finite=loss_finite)


class NoPolicy:
    """It cannot be asked for the next state."""

    skip_nonfinite = True

    def init(self) -> ols.LossScaleState:
        return ols.init(8)


def policies() -> None:
    dynamic = ols.DynamicLossScale(initial_scale=2**12, growth_interval=500, hysteresis=2)
    fixed = ols.FixedLossScale(1024, skip_nonfinite=False)
    assert_type(dynamic.growth_interval, int)
    assert_type(dynamic.initial_scale, float)
    assert_type(dynamic.skip_nonfinite, bool)
    assert_type(fixed.scale, float)
    assert_type(dynamic.get_config(), dict[str, Any])
    assert_type(ols.DynamicLossScale.from_config(dynamic.get_config()), ols.DynamicLossScale)
    assert_type(ols.FixedLossScale.from_config({"scale": 8}), ols.FixedLossScale)
    assert_type({dynamic: 1}[dynamic], int)  # hashable

    accepted: list[ols.LossScaleLike] = ["dynamic", 128, 1e3, None, fixed, OwnPolicy()]
    accepted.append(dynamic.get_config())
    assert_type([ols.as_loss_scale(policy) for policy in accepted], list[ols.LossScale])

    ols.DynamicLossScale(growth_interval=2.5)  # pyright: ignore[reportArgumentType]
    ols.DynamicLossScale(initial="dynamic")  # pyright: ignore[reportCallIssue]
    ols.FixedLossScale("1024")  # pyright: ignore[reportArgumentType]
    ols.FixedLossScale()  # pyright: ignore[reportCallIssue]
    dynamic.initial_scale = 8.0  # pyright: ignore[reportAttributeAccessIssue]
    ols.DynamicLossScale.from_config([("growth_interval", 2)])  # pyright: ignore[reportArgumentType]
    ols.as_loss_scale("dynamical")  # pyright: ignore[reportArgumentType]
    ols.as_loss_scale(fixed.init().loss_scale)  # pyright: ignore[reportArgumentType]
    ols.as_loss_scale(NoPolicy())  # pyright: ignore[reportArgumentType]


# --- The pure functions -----------------------------------------------------------------------


def pure_functions(params: Params, x: jax.Array) -> None:
    state = ols.init()
    assert_type(state, ols.LossScaleState)
    assert_type(state.loss_scale, jax.Array)
    assert_type(state.total_skipped, jax.Array)
    assert_type(state._replace(loss_scale=jnp.float32(8)), ols.LossScaleState)

    loss = loss_fn(params, x)
    assert_type(ols.scale_loss(loss, state), jax.Array)
    assert_type(ols.scale_loss({"a": loss}, state), dict[str, jax.Array])

    grads, grads_finite = ols.unscale_and_check(params, state)
    assert_type(grads, Params)
    assert_type(grads_finite, jax.Array)
    ols.unscale_and_check(grads, state, axis_name="data")
    ols.unscale_and_check(grads, state, axis_name=("data", "model"))

    assert_type(ols.update(state, grads_finite, "dynamic"), ols.LossScaleState)
    ols.update(state, grads_finite=True, loss_scale=ols.DynamicLossScale(), loss_finite=False)
    assert_type(ols.all_finite(grads), jax.Array)
    assert_type(ols.tree_where(grads_finite, grads, params), Params)
    assert_type(ols.tree_where(True, (x, None), (x, None)), tuple[jax.Array, None])

    value_and_grads = ols.value_and_grad(loss_fn)
    assert_type(value_and_grads, Callable[..., tuple[Any, Any]])
    value_and_grads(state, params, x)
    ols.value_and_grad(loss_fn, argnums=(0, 1), has_aux=False, transform=jax.value_and_grad)

    ols.scale_loss(loss)  # pyright: ignore[reportCallIssue]
    ols.update(state, grads_finite)  # pyright: ignore[reportCallIssue]
    ols.update(state.loss_scale, grads_finite, "dynamic")  # pyright: ignore[reportArgumentType]
    ols.update(state, "finite", "dynamic")  # pyright: ignore[reportArgumentType]
    ols.update(state, grads_finite, "dynamic", True)  # pyright: ignore[reportCallIssue]
    ols.tree_where("finite", grads, params)  # pyright: ignore[reportArgumentType]
    ols.unscale_and_check(grads, state, "data")  # pyright: ignore[reportCallIssue]
    ols.value_and_grad(loss)  # pyright: ignore[reportArgumentType]
    ols.init(initial_scale=8)  # pyright: ignore[reportCallIssue]


# --- The Optax wrapper ------------------------------------------------------------------------


def wrapper(params: Params, x: jax.Array) -> None:
    tx = ols.with_loss_scaling(optax.adam(1e-3))
    assert_type(tx, optax.GradientTransformationExtraArgs)
    ols.with_loss_scaling(optax.MultiSteps(optax.adam(1e-3), 4), OwnPolicy(), axis_name="data")
    ols.with_loss_scaling(optax.chain(optax.clip(1.0), optax.sgd(0.1)), 128)

    opt_state = tx.init(params)
    loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    optax.apply_updates(params, updates)
    assert_type(ols.loss_scale_state(opt_state), ols.LossScaleState)

    assert isinstance(opt_state, ols.WithLossScalingState)
    assert_type(opt_state.loss_scale_state, ols.LossScaleState)
    assert_type(opt_state._replace(loss_scale_state=ols.init()), ols.WithLossScalingState)

    @jax.jit
    def step(params: Params, opt_state: optax.OptState, x: jax.Array) -> optax.OptState:
        return tx.update(jax.grad(loss_fn)(params, x), opt_state, params)[1]

    step(params, opt_state, x)

    ols.with_loss_scaling(optax.adam)  # pyright: ignore[reportArgumentType]
    ols.with_loss_scaling(tx, "static")  # pyright: ignore[reportArgumentType]
    ols.with_loss_scaling(tx, axis_name=["data"])  # pyright: ignore[reportArgumentType]
    ols.with_loss_scaling(tx, None, "data")  # pyright: ignore[reportCallIssue]
    ols.with_loss_scaling()  # pyright: ignore[reportCallIssue]


# --- Flax -------------------------------------------------------------------------------------


class BatchNormState(TrainState):
    """A user's own field."""

    batch_stats: Any


def flax_states(apply_fn: Callable[..., Any], params: Params, x: jax.Array) -> None:
    state = TrainState.create(apply_fn=apply_fn, params=params, tx=optax.adam(1e-3))
    assert_type(state, TrainState)
    assert_type(state.loss_scale, jax.Array)
    assert_type(state.grads_finite, jax.Array)
    assert_type(state.count_skipped, bool)
    assert_type(state.scale_loss(loss_fn(params, x)), jax.Array)
    assert_type(state.apply_gradients(grads=params), TrainState)
    assert_type(state.apply_gradients(grads=params, value=1.0), TrainState)

    own = BatchNormState.create(
        apply_fn=apply_fn,
        params=params,
        tx=optax.MultiSteps(optax.adam(1e-3), 2),
        loss_scale=ols.FixedLossScale(128),
        axis_name="data",
        count_skipped=True,
        batch_stats={},
    )
    assert_type(own, BatchNormState)
    assert_type(own.apply_gradients(grads=params, batch_stats={}), BatchNormState)

    dynamic_scale = DynamicScale(growth_interval=100, scale=1024.0)
    result = dynamic_scale.value_and_grad(loss_fn, has_aux=False, axis_name="data")(params, x)
    assert_type(result, DynamicScaleResult)

    TrainState.create(apply_fn, params, optax.adam(1e-3))  # pyright: ignore[reportCallIssue]
    TrainState.create(apply_fn=apply_fn, params=params, tx=optax.adam)  # pyright: ignore[reportArgumentType]
    state.apply_gradients(params)  # pyright: ignore[reportCallIssue]
    state.apply_gradients(grads=params, value="loss")  # pyright: ignore[reportArgumentType]
    state.loss_scale = x  # pyright: ignore[reportAttributeAccessIssue]


# --- Keras' arguments -------------------------------------------------------------------------


def keras_arguments(params: Params) -> None:
    tx = loss_scale_optimizer(
        optax.sgd(0.1),
        2**15,
        2000,
        learning_rate=optax.constant_schedule(0.1),
        weight_decay=0.01,
        clipnorm=1.0,
        use_ema=True,
        ema_overwrite_frequency=10,
        gradient_accumulation_steps=2,
        axis_name="data",
    )
    assert_type(tx, optax.GradientTransformationExtraArgs)
    ema_params(tx.init(params))
    loss_scale_optimizer(optax.sgd(0.1), 1024, dynamic=False)

    loss_scale_optimizer(optax.sgd(0.1), 8, 2000, True)  # pyright: ignore[reportCallIssue]
    loss_scale_optimizer(optax.sgd(0.1), use_ema="yes")  # pyright: ignore[reportArgumentType]
    loss_scale_optimizer(optax.sgd(0.1), dynamic_growth_steps=0.5)  # pyright: ignore[reportArgumentType]
    loss_scale_optimizer(optax.sgd(0.1), clip_norm=1.0)  # pyright: ignore[reportCallIssue]
    loss_scale_optimizer(optax.MultiSteps(optax.sgd(0.1), 2))  # pyright: ignore[reportArgumentType]


# --- Diagnostics, interop, testing ------------------------------------------------------------


def diagnostics(opt_state: optax.OptState, params: Params, x: jax.Array) -> None:
    assert_type(ols.diagnostics.metrics(opt_state), dict[str, jax.Array])
    ols.diagnostics.check_health(
        opt_state, max_consecutive_skipped=20, loss_scale=ols.DynamicLossScale()
    )
    report = ols.diagnostics.nonfinite_report(params)
    assert_type(report, dict[str, ols.diagnostics.NonfiniteCounts])
    assert_type(report["['w']"].nan, jax.Array)
    assert_type(ols.diagnostics.format_nonfinite_report(report), str)
    found = ols.diagnostics.first_nonfinite(loss_fn, params, x=x)
    assert_type(found, ols.diagnostics.FirstNonfinite | None)
    if found:
        assert_type((found.layer, found.operation, found.nan), tuple[str, str | None, int])
    exponents = ols.diagnostics.gradient_exponents(
        params, dtype=jnp.bfloat16, loss_scale=jnp.float32(8)
    )
    assert_type(exponents, ols.diagnostics.GradientExponents)
    assert_type(exponents.histogram, jax.Array)
    assert_type(ols.diagnostics.suggest_scale(exponents, headroom=2, dtype="float16"), float)
    ols.diagnostics.plot_gradient_exponents(exponents).set_title("gradients")

    def grad_fn(state: ols.LossScaleState, params: Params, x: jax.Array) -> Params:
        return jax.grad(lambda p: ols.scale_loss(loss_fn(p, x), state))(params)

    assert_type(ols.diagnostics.calibrate(grad_fn, ols.init(), params, x), ols.LossScaleState)
    assert_scaled_once(grad_fn, ols.init(), params, x)
    stalled: RuntimeError = ols.diagnostics.LossScaleStalledError("stalled")
    assert_type(stalled, ols.diagnostics.LossScaleStalledError)

    ols.diagnostics.check_health(opt_state, 20)  # pyright: ignore[reportCallIssue]
    ols.diagnostics.first_nonfinite(params, x)  # pyright: ignore[reportArgumentType]
    ols.diagnostics.suggest_scale(params)  # pyright: ignore[reportArgumentType]
    ols.diagnostics.suggest_scale(ols.diagnostics.gradient_exponents(params), headroom=0.5)  # pyright: ignore[reportArgumentType]
    ols.diagnostics.format_nonfinite_report(params)  # pyright: ignore[reportArgumentType]
    assert_scaled_once(params, ols.init())  # pyright: ignore[reportArgumentType]


def interop(theirs: Any) -> None:
    policy, state = from_flax_dynamic_scale(theirs)
    assert_type(policy, ols.DynamicLossScale)
    assert_type(state, ols.LossScaleState)
    assert_type(from_jmp(theirs), tuple[ols.DynamicLossScale, ols.LossScaleState])
    assert_type(
        from_torch_state_dict({"scale": 8.0}), tuple[ols.DynamicLossScale, ols.LossScaleState]
    )
    assert_type(to_torch_state_dict(policy, state), dict[str, Any])

    to_torch_state_dict(ols.FixedLossScale(8), state)  # pyright: ignore[reportArgumentType]
    from_torch_state_dict([8.0])  # pyright: ignore[reportArgumentType]
