"""The calls that users make, and their types: read by a type checker, never run.

`test_typing.py` has pyright check this file against an installed copy of the package. A line with
`pyright: ignore` must be rejected under the rule that it names. If pyright accepts the call, it
reports the comment as unnecessary.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.flax import TrainState
from optax_lossscale.keras import ema_params, loss_scale_optimizer

Params = dict[str, jax.Array]


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] * x)


class OwnPolicy:
    skip_nonfinite = True

    def init(self) -> ols.LossScaleState:
        return ols.init(8)

    def update(
        self, state: ols.LossScaleState, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> ols.LossScaleState:
        return ols.update(state, grads_finite, "dynamic", loss_finite=loss_finite)


def policies() -> None:
    dynamic = ols.DynamicLossScale(initial_scale=2**12, growth_interval=500, hysteresis=2)
    fixed = ols.FixedLossScale(1024, skip_nonfinite=False)
    assert_type((dynamic.growth_interval, fixed.scale), tuple[int, float])
    assert_type(dynamic.get_config(), dict[str, Any])
    assert_type(ols.DynamicLossScale.from_config(dynamic.get_config()), ols.DynamicLossScale)
    accepted: list[ols.LossScaleLike] = ["dynamic", 128, 1e3, None, fixed, OwnPolicy()]
    accepted.append(dynamic.get_config())
    assert_type([ols.as_loss_scale(policy) for policy in accepted], list[ols.LossScale])

    ols.DynamicLossScale(growth_interval=2.5)  # pyright: ignore[reportArgumentType]
    dynamic.initial_scale = 8.0  # pyright: ignore[reportAttributeAccessIssue]
    ols.as_loss_scale("dynamical")  # pyright: ignore[reportArgumentType]
    ols.as_loss_scale(dynamic.init())  # pyright: ignore[reportArgumentType]


def pure_functions(params: Params, x: jax.Array) -> None:
    state = ols.init()
    assert_type((state.loss_scale, state.total_skipped), tuple[jax.Array, jax.Array])
    assert_type(ols.scale_loss(loss_fn(params, x), state), jax.Array)
    assert_type(ols.scale_loss({"a": x}, state), dict[str, jax.Array])
    grads, grads_finite = ols.unscale_and_check(params, state)
    assert_type((grads, grads_finite), tuple[Params, jax.Array])
    assert_type(ols.update(state, grads_finite, "dynamic"), ols.LossScaleState)
    ols.update(state, grads_finite=True, policy=ols.DynamicLossScale(), loss_finite=False)
    assert_type((ols.all_finite(grads), ols.applied(state)), tuple[jax.Array, jax.Array])
    assert_type(ols.tree_where(grads_finite, grads, params), Params)
    assert_type(ols.value_and_grad(loss_fn)(state, params, x), tuple[jax.Array, Any])
    assert_type(ols.scale_inside(loss_fn, 2.0**15)(params, x), jax.Array)
    ols.scale_inside(loss_fn, "dynamic")  # pyright: ignore[reportArgumentType]
    ols.value_and_grad(loss_fn, argnums=(0, 1), has_aux=False, transform=jax.value_and_grad)

    ols.update(state, grads_finite)  # pyright: ignore[reportCallIssue]
    ols.update(state, grads_finite, 8.0)  # pyright: ignore[reportArgumentType]
    ols.unscale_and_check(grads, state, "data")  # pyright: ignore[reportCallIssue]


def wrappers(params: Params, x: jax.Array) -> None:
    tx = ols.with_loss_scaling(optax.adam(1e-3))
    ols.with_loss_scaling(optax.MultiSteps(optax.adam(1e-3), 4), OwnPolicy(), axis_name="data")
    opt_state = tx.init(params)
    loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    assert_type(optax.apply_updates(params, updates), optax.Params)
    assert_type(opt_state._replace(loss_scale_state=ols.init()), ols.GuardState)
    assert_type(ols.loss_scale_state(opt_state), ols.LossScaleState)
    optax.chain(optax.identity(), tx).init(params)

    inner = ols.with_master_weights(optax.adam(1e-3))
    small = ols.with_bfloat16_state(optax.adam(1e-3), keep=lambda path: "nu" in path)
    guard = ols.with_skipping(inner, ols.Spike("grad_norm", window=64))
    rounded = ols.with_stochastic_rounding(small)
    assert_type(rounded.init(params), ols.StochasticRoundingState)
    optax.chain(tx, inner, small, rounded, guard)
    ols.with_skipping(optax.MultiSteps(tx, 2), lambda *_, **__: x > 1, axis_name="data")
    opt_state, small_state = guard.init(params), small.init(params)
    assert_type(opt_state, ols.GuardState)
    assert_type(opt_state.rule_states, tuple[Any, ...])
    assert isinstance(opt_state.rule_states[0], ols.SpikeState)
    assert isinstance(opt_state.inner_state, ols.MasterWeightsState)
    assert_type(ols.master_weights(opt_state, params), Params)
    assert_type(ols.cast(params, jnp.float16, keep=lambda path: "norm" in path), Params)
    ols.autocast(loss_fn, jnp.bfloat16, keep=["model.py:3: x @ w"])
    ols.grad(ols.autocast(loss_fn, "float16", checkpoint_dtype=jnp.bfloat16), has_aux=True)(
        ols.init(), params, x
    )
    is_stalled = diagnostics.is_stalled(opt_state, max_consecutive_skipped=9)
    assert_type(small_state, ols.Bfloat16State)
    assert_type((is_stalled, small_state.rounding_count), tuple[jax.Array, jax.Array])

    ols.with_loss_scaling(optax.adam)  # pyright: ignore[reportArgumentType]
    ols.Spike(3)  # pyright: ignore[reportArgumentType]


class FarAboveTheBest:
    def init(self, _params: Params) -> jax.Array:
        return jnp.float32(jnp.inf)

    def measure(
        self, _grads: Params, _params: Params | None, *, value: jax.Array, **_: Any
    ) -> jax.Array:
        return value

    def judge(self, lowest: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return value > 10 * lowest, jnp.minimum(lowest, value)


def is_large(_grads: Params, _params: Params, *, value: jax.Array) -> jax.Array:
    return value > 10


def rules(inner: optax.GradientTransformationExtraArgs) -> None:
    rule: ols.Rule = FarAboveTheBest()
    ols.with_skipping(inner, rule)
    ols.with_skipping(inner, is_large)
    ols.with_loss_scaling(inner, skip_if=[FarAboveTheBest(), is_large, ols.Spike()])
    ols.with_loss_scaling(inner, skip_if=(ols.Spike(), lambda *_, **__: jnp.array(True)))

    ols.with_skipping(inner, inner)  # pyright: ignore[reportArgumentType]
    ols.with_skipping(inner, ols.DynamicLossScale())  # pyright: ignore[reportArgumentType]
    ols.with_loss_scaling(inner, skip_if=3)  # pyright: ignore[reportArgumentType]
    ols.with_loss_scaling(inner, skip_if=[inner])  # pyright: ignore[reportArgumentType]
    ols.DynamicLossScale(8.0, 2000)  # pyright: ignore[reportCallIssue]


def differentiated(params: Params, x: jax.Array) -> None:
    loss, _ = ols.value_and_grad(loss_fn)(ols.init(), params, x)
    assert_type(loss, jax.Array)
    ols.value_and_grad(loss_fn)(ols.init(), params, y=x)  # pyright: ignore[reportCallIssue]
    ols.grad(loss_fn)(ols.init())  # pyright: ignore[reportCallIssue]


class BatchNormState(TrainState):
    batch_stats: Any  # a user-defined field


def flax_states(apply_fn: Callable[..., Any], params: Params, x: jax.Array) -> None:
    state = TrainState.create(apply_fn=apply_fn, params=params, tx=optax.adam(1e-3))
    assert_type((state.loss_scale, state.applied), tuple[jax.Array, jax.Array])
    assert_type(state.scale_loss(loss_fn(params, x)), jax.Array)
    assert_type(state.apply_gradients(grads=params, value=1.0), TrainState)
    TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    own = BatchNormState.create(
        apply_fn=apply_fn, params=params, tx=optax.MultiSteps(optax.sgd(0.1), 2), loss_scale=128,
        axis_name="data", count_skipped=True, batch_stats={},
    )  # fmt: skip
    assert_type(own.apply_gradients(grads=params, batch_stats={}), BatchNormState)
    own.apply_gradients(grads=params, value=1.0, extra_args={"kl": x})

    state.apply_gradients(params)  # pyright: ignore[reportCallIssue]
    state.apply_gradients(grads=params, value="loss")  # pyright: ignore[reportArgumentType]


def keras_arguments(params: Params) -> None:
    sgd = optax.sgd(0.1)
    rate = optax.constant_schedule(0.1)
    tx = loss_scale_optimizer(sgd, 2**15, 2000, learning_rate=rate, weight_decay=0.01, use_ema=True)
    assert_type(tx.init(params), ols.GuardState)
    ema_params(tx.init(params))

    loss_scale_optimizer(sgd, 8, 2000, True)  # pyright: ignore[reportCallIssue]
    loss_scale_optimizer(sgd, dynamic_growth_steps=0.5)  # pyright: ignore[reportArgumentType]


def diagnose(opt_state: optax.OptState, params: Params, x: jax.Array) -> None:
    assert_type(ols.diagnostics.metrics(opt_state), dict[str, jax.Array])
    with contextlib.suppress(diagnostics.LossScaleStalledError):
        diagnostics.check_health(opt_state, max_consecutive_skipped=20, policy="dynamic")
    report = diagnostics.nonfinite_report(params)
    assert_type(report, Mapping[str, diagnostics.NonfiniteCounts])
    found = diagnostics.first_nonfinite(loss_fn, params, x=x)
    assert_type(found, diagnostics.FirstNonfinite | None)
    if found:
        assert_type((found.layer, found.operation, found.nan), tuple[str, str | None, int])
    found = diagnostics.precision_search(loss_fn, params, x=x)
    assert_type(found, diagnostics.PrecisionSearch)
    assert_type(found.lines, Mapping[str, diagnostics.LineError])
    products = diagnostics.precision_report(loss_fn, params, x=x)
    assert_type(products, Mapping[str, diagnostics.MatrixProducts])
    exponents = diagnostics.gradient_exponents(params, dtype=jnp.bfloat16, loss_scale=x)
    assert_type(exponents, diagnostics.GradientExponents)
    assert_type(diagnostics.suggest_loss_scale(exponents, headroom=2, dtype="float16"), float)
    diagnostics.plot_gradient_exponents(exponents).set_title("gradients")
    ols.testing.assert_scaled_once(ols.grad(loss_fn), ols.init(), params, x)

    diagnostics.check_health(opt_state, 20)  # pyright: ignore[reportCallIssue]
    diagnostics.suggest_loss_scale(exponents, headroom=0.5)  # pyright: ignore[reportArgumentType]
