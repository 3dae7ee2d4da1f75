"""`assert_scaled_once` accepts right steps of every framework, and names each mistake."""

import equinox as eqx
import flax.linen as nn
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.flax import TrainState
from optax_lossscale.testing import assert_scaled_once

pytestmark = pytest.mark.integration

X = jax.random.normal(jax.random.key(0), (16, 8))
Y = jnp.ones((16, 1))
TX = ols.with_loss_scaling(optax.adam(1e-3))


def mean_square(predicted):
    return jnp.mean((predicted.astype(jnp.float32) - Y) ** 2)


# --- One network in each framework: its loss, a state, and `value_and_grad` of the framework.


def linen(dtype):
    model = nn.Sequential([nn.Dense(16, dtype=dtype), nn.relu, nn.Dense(1, dtype=dtype)])
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(1), X), tx=optax.adam(1e-3)
    )
    return lambda params: mean_square(model.apply(params, X)), state, state.params, None


def nnx(dtype):
    rngs = flax.nnx.Rngs(1)
    model = flax.nnx.Sequential(
        flax.nnx.Linear(8, 16, dtype=dtype, rngs=rngs),
        flax.nnx.relu,
        flax.nnx.Linear(16, 1, dtype=dtype, rngs=rngs),
    )
    state = flax.nnx.Optimizer(model, TX, wrt=flax.nnx.Param)
    return lambda model: mean_square(model(X)), state, model, flax.nnx.value_and_grad


def equinox(dtype):
    model = eqx.nn.MLP(8, 1, 16, 1, key=jax.random.key(1))
    state = TX.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model):
        model = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
        return mean_square(jax.vmap(model)(X.astype(dtype)))

    return loss_fn, state, model, eqx.filter_value_and_grad


@jax.custom_vjp
def squared(x):
    return x * x


# Its derivative of second order is not defined: the factor can be moved, and not differentiated.
squared.defvjp(lambda x: (x * x, np.float32(2) * x), lambda residual, g: (g * residual,))


def custom(dtype):
    params = {"w": jnp.arange(1.0, 4.0), "b": jnp.float32(0.5)}

    def loss_fn(params):
        return jnp.sum(squared(params["w"].astype(dtype)).astype(jnp.float32)) * params["b"]

    return loss_fn, TX.init(params), params, None


FRAMEWORKS = {"linen": linen, "nnx": nnx, "equinox": equinox, "custom_vjp": custom}


# --- What is right, and the three classic mistakes.


def right(loss_fn, transform):
    return lambda state, params: ols.value_and_grad(loss_fn, transform=transform)(state, params)[1]


def not_scaled(loss_fn, transform):
    return lambda _state, params: transform(loss_fn)(params)[1]


def scaled_twice(loss_fn, transform):
    def grad_fn(state, params):
        def scaled(params):
            return ols.scale_loss(loss_fn(params), state)

        return ols.value_and_grad(scaled, transform=transform)(state, params)[1]

    return grad_fn


def unscaled_too_early(loss_fn, transform):
    def grad_fn(state, params):
        grads = ols.value_and_grad(loss_fn, transform=transform)(state, params)[1]
        return ols.unscale_and_check(grads, state)[0]

    return grad_fn


def unscaled_only(loss_fn, transform):
    return lambda state, params: ols.unscale_and_check(transform(loss_fn)(params)[1], state)[0]


MISTAKES = [
    (not_scaled, "0.00 at .* not scaled"),
    (scaled_twice, "2.00 at .* scaled twice"),
    (unscaled_too_early, "0.00 at .* not scaled, or unscaled before `tx.update`"),
    (unscaled_only, "-1.00 at .* not scaled, but unscaled"),
]


def setting(framework, dtype):
    loss_fn, state, params, transform = FRAMEWORKS[framework](dtype)
    return loss_fn, transform or jax.value_and_grad, state, params


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_right_step_passes(framework, dtype):
    loss_fn, transform, state, params = setting(framework, dtype)
    assert assert_scaled_once(right(loss_fn, transform), state, params) is None


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_mistake_is_named(framework, mistake, message, dtype):
    loss_fn, transform, state, params = setting(framework, dtype)
    with pytest.raises(AssertionError, match=message):
        assert_scaled_once(mistake(loss_fn, transform), state, params)


@pytest.mark.parametrize("factor", [2.0**-100, 1.0, 3000.7, 2.0**100])
def test_the_factor_in_the_state_does_not_matter(factor):
    loss_fn, transform, _, params = setting("custom_vjp", jnp.float16)
    state = ols.init(factor)
    assert_scaled_once(jax.jit(right(loss_fn, transform)), state, params)
    assert state.loss_scale == np.float32(factor)


def test_a_mistake_that_adam_hides_is_found():
    loss_fn, transform, state, params = setting("custom_vjp", jnp.float32)
    steps = []
    for make in (right, scaled_twice):
        updates, _ = TX.update(make(loss_fn, transform)(state, params), state, params)
        steps.append(jax.tree.leaves(updates))
    np.testing.assert_allclose(np.hstack(steps[0]), np.hstack(steps[1]), rtol=1e-3)
    with pytest.raises(AssertionError, match="scaled twice"):
        assert_scaled_once(scaled_twice(loss_fn, transform), state, params)


def test_one_wrong_array_among_right_ones_is_named():
    def grad_fn(state, x):
        factor = ols.loss_scale_state(state).loss_scale
        return {"right": [factor * x, 1e3 * factor * x], "wrong": x}

    message = r"0\.00 at `\['wrong'\]` \(1 of 3 arrays are wrong\): not scaled"
    with pytest.raises(AssertionError, match=message):
        assert_scaled_once(grad_fn, ols.init(), jnp.ones(3))


def powers(*ks):
    """Gradients that grow with the factor to these powers."""
    return lambda state: [state.loss_scale**k for k in ks]


@pytest.mark.parametrize(
    ("ks", "message"),
    [
        ((1, 0, 3), r"3\.00 at `\[2\]` \(2 of 3 arrays are wrong\): they depend"),
        ((1, 2, -1), r"-1\.00 at `\[2\]` \(2 of 3 arrays are wrong\): not scaled, but unscaled"),
    ],
)
def test_the_worst_of_several_wrong_arrays_is_named(ks, message):
    with pytest.raises(AssertionError, match=message):
        assert_scaled_once(powers(*ks), ols.init())


def test_the_power_is_rounded_to_a_quarter():
    assert_scaled_once(powers(1.2, 0.8), ols.init())
    with pytest.raises(AssertionError, match=r"got 2\.20 .* scaled twice"):
        assert_scaled_once(powers(2.2), ols.init())
    for k in (0.6, 1.4, 2.4):
        with pytest.raises(AssertionError, match=rf"got {k}0 .* in some other way"):
            assert_scaled_once(powers(k), ols.init())


def test_the_factors_come_down_from_two_to_the_24():
    seen = []

    def grad_fn(state):
        seen.append(float(state.loss_scale))
        return jnp.inf

    with pytest.raises(
        ValueError, match=r"at no loss scale between 0\.000976562 and 1\.67772e\+07"
    ):
        assert_scaled_once(grad_fn, ols.init())
    assert seen == [2.0**n for top in range(24, -12, -4) for n in (top - 2, top)]


@pytest.mark.parametrize("top", [24, 22])
def test_what_is_zero_at_one_of_the_factors_is_not_judged(top):
    def grad_fn(state):
        return [state.loss_scale, jnp.where(state.loss_scale == 2.0**top, 0.0, 1.0)]

    assert_scaled_once(grad_fn, ols.init())


@pytest.mark.parametrize("above", [0.0, np.inf])
def test_smaller_factors_are_tried_where_one_array_says_nothing(above):
    def grad_fn(state):
        factor = state.loss_scale
        return [jnp.where(factor > 2.0**20, above, factor), factor if above else None]

    assert_scaled_once(grad_fn, ols.init())


def test_a_single_traced_array_is_refused():
    def step(w):
        assert_scaled_once(lambda state: [state.loss_scale, w], ols.init())

    with pytest.raises(TypeError, match=r"`grad_fn` must hold values, got traced arrays"):
        jax.jit(step)(jnp.ones(2))


def test_another_dependence_is_stated_as_it_is():
    with pytest.raises(AssertionError, match=r"got 0\.50 .* in some other way"):
        assert_scaled_once(lambda state: jnp.sqrt(state.loss_scale), ols.init())
    with pytest.raises(AssertionError, match=r"got 3\.00 .* in some other way"):
        assert_scaled_once(lambda state: state.loss_scale**3, ols.init())


@pytest.mark.parametrize(
    "beside",
    [
        None,
        np.zeros(3, jax.dtypes.float0),
        jnp.arange(3),
        jax.random.key(0),
        "relu",
        jnp.zeros((0, 3)),
        jnp.zeros(3),  # a gradient of zero says nothing
        {"_overwrite_with_gradient": {"scale": jnp.ones(3)}},  # what Flax's fp8 layers keep
    ],
    ids=["None", "float0", "integers", "key", "name", "empty", "zeros", "fp8 metadata"],
)
def test_what_has_no_scaled_gradient_is_not_judged(beside):
    assert_scaled_once(lambda state: [state.loss_scale, beside], ols.init())


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.float8_e5m2, jnp.bfloat16, jnp.float16])
def test_every_kind_of_number_is_judged(dtype):
    def grads(factor):
        return {"g": (factor * jnp.array([0.25, 0.5])).astype(dtype)}

    assert_scaled_once(lambda state: grads(state.loss_scale), ols.init())
    with pytest.raises(AssertionError, match="not scaled"):
        assert_scaled_once(lambda _: grads(1.0), ols.init())


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_gradients_that_say_nothing_are_an_error(value):
    with pytest.raises(ValueError, match="gradients that are finite and not all zero"):
        assert_scaled_once(lambda state: value * state.loss_scale, ols.init())


def test_it_needs_exactly_one_state():
    with pytest.raises(ValueError, match="exactly one LossScaleState"):
        assert_scaled_once(lambda state: state, jnp.ones(3))


# --- `calibrate` moves the factor in the same way.


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_can_be_calibrated(framework):
    loss_fn, transform, state, params = setting(framework, jnp.float16)
    grad_fn = right(loss_fn, transform)
    found = ols.diagnostics.calibrate(grad_fn, state, params)
    assert ols.all_finite(grad_fn(found, params))
    assert found.loss_scale == 2.0**24 or not ols.all_finite(
        grad_fn(found._replace(loss_scale=2 * found.loss_scale), params)
    )
