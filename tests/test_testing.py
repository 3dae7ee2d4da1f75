"""`assert_scaled_once` accepts gradients that are scaled once, and names each mistake.

`docs/testing.md` shows it with real training steps, right and wrong.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from leaves import not_numbers

import optax_lossscale as ols
from optax_lossscale.flax import TrainState
from optax_lossscale.testing import assert_scaled_once

pytestmark = pytest.mark.integration

TX = ols.with_loss_scaling(optax.adam(1e-3))


@pytest.mark.slow
def test_an_optimizer_of_nnx_is_a_state():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(1))
    grad_fn = ols.grad(lambda model: jnp.sum(model(jnp.ones((4, 3)))), transform=nnx.value_and_grad)
    assert_scaled_once(grad_fn, nnx.Optimizer(model, TX, wrt=nnx.Param), model)


@pytest.mark.parametrize("loss_scale", [2.0**-100, 3000.7, 2.0**100])
def test_the_loss_scale_in_the_state_does_not_matter(loss_scale):
    state = ols.init(loss_scale)
    assert_scaled_once(jax.jit(lambda state: state.loss_scale.astype(jnp.float16)), state)
    assert state.loss_scale == np.float32(loss_scale)


@pytest.mark.parametrize(
    "holder",
    [
        lambda: TrainState.create(apply_fn=None, params=jnp.ones(2), tx=optax.adam(1e-3)),
        lambda: [serialization.to_state_dict(TX.init(jnp.ones(2)))],
        lambda: {"not_the_loss_scale": jnp.ones(()), "tx": TX.init(jnp.ones(2))},
        lambda: optax.tree.set(TX.init(jnp.ones(2)), loss_scale=8.0),
    ],
    ids=["TrainState", "dicts", "among others", "Python number"],
)
def test_the_state_may_be_anywhere_and_only_its_loss_scale_changes(holder):
    state = holder()
    others = jax.tree.leaves(optax.tree.set(state, loss_scale=None))

    def grad_fn(given):
        assert jax.tree.structure(given) == jax.tree.structure(state)
        kept = jax.tree.leaves(optax.tree.set(given, loss_scale=None))
        assert all(a is b for a, b in zip(kept, others, strict=True))
        return ols.loss_scale_state(given).loss_scale

    assert_scaled_once(grad_fn, state)


@pytest.mark.parametrize(
    ("powers", "message"),
    [
        ((1.2, 0.8), None),
        ((2.2,), r"got 2\.20 .* scaled twice"),
        *(((k,), rf"got {k:.2f} .* in some other way") for k in (0.5, 0.6, 1.4, 2.4, 3)),
        ((1, 1, 0), r"0\.00 at `\[2\]` \(1 of 3 arrays are wrong\): not scaled"),
        ((1, 0, 3), r"3\.00 at `\[2\]` \(2 of 3 arrays are wrong\): they depend"),
        ((1, 2, -1), r"-1\.00 at `\[2\]` \(2 of 3 arrays are wrong\): not scaled, but unscaled"),
    ],
)
def test_the_power_of_the_worst_array_is_rounded_to_a_quarter_and_named(powers, message):
    def grad_fn(state):
        return [state.loss_scale**k for k in powers]

    wrong = pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext()
    with wrong:
        assert_scaled_once(grad_fn, ols.init())


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_function_that_also_returns_the_loss_is_recognized(has_aux):
    fun = lambda w: (jnp.sum(w**2), jnp.ones(2)) if has_aux else jnp.sum(w**2)  # noqa: E731
    loss_and_grads = ols.value_and_grad(fun, has_aux=has_aux)
    with pytest.raises(AssertionError, match=r"`\(loss, grads\)`.*loss_and_grads\(\*args\)\[1\]`"):
        assert_scaled_once(loss_and_grads, ols.init(), jnp.ones(3))
    assert_scaled_once(lambda *args: loss_and_grads(*args)[1], ols.init(), jnp.ones(3))
    with pytest.raises(AssertionError, match="not scaled"):  # both are gradients
        assert_scaled_once(lambda *args: (args[1], args[1]), ols.init(), jnp.ones(3))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_all_loss_scales_are_tried_down_from_two_to_the_24_if_gradients_are_zero_or_infinite(value):
    seen = []

    def grad_fn(state):
        seen.append(float(state.loss_scale))
        return jnp.float32(value)

    message = r"finite and not all zero, got none at any loss scale from 0\.000976562 to 1\.67772e"
    with pytest.raises(ValueError, match=message):
        assert_scaled_once(grad_fn, ols.init())
    assert seen == [2.0**n for top in range(24, -12, -4) for n in (top - 2, top)]


@pytest.mark.parametrize(
    "grads_at",
    [
        lambda scale: [scale, jnp.where(scale == 2.0**24, 0.0, 1.0)],
        lambda scale: [scale, jnp.where(scale == 2.0**22, 0.0, 1.0)],
        lambda scale: [jnp.where(scale > 2.0**20, 0.0, scale), None],
        lambda scale: [jnp.where(scale > 2.0**20, jnp.inf, scale), scale],
    ],
    ids=["zero at the first", "zero at its quarter", "zero above", "infinite above"],
)
def test_an_array_that_is_zero_or_infinite_at_some_loss_scales_is_judged_at_others(grads_at):
    assert_scaled_once(lambda state: grads_at(state.loss_scale), ols.init())


def test_leaves_without_a_scaled_gradient_are_not_judged():
    fp8_metadata = {"_overwrite_with_gradient": {"scale": jnp.ones(3)}}
    for leaf in (*not_numbers().values(), jnp.zeros((0, 3)), jnp.zeros(3), fp8_metadata):
        assert_scaled_once(lambda state, leaf=leaf: [state.loss_scale, leaf], ols.init())


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.float8_e5m2, jnp.bfloat16, jnp.float16])
def test_every_kind_of_number_is_judged(dtype):
    def grads(loss_scale):
        return {"g": (loss_scale * jnp.array([0.25, 0.5])).astype(dtype)}

    assert_scaled_once(lambda state: grads(state.loss_scale), ols.init())
    with pytest.raises(AssertionError, match="not scaled"):
        assert_scaled_once(lambda _: grads(1.0), ols.init())


def network(dtype, factor, *, after, where=("first", "last"), size=1.0):
    """Return a function that makes scaled gradients, with a penalty before or after scaling."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embedding": jax.random.normal(keys[0], (32, 16)),
        "first": jax.random.normal(keys[1], (16, 32)) / 4,
        "bias": jnp.ones((1, 32)),
        "last": jax.random.normal(keys[2], (32, 8)) / 6,
        "unused": jnp.ones(3),
    }

    def loss_fn(p):
        hidden = jnp.tanh(p["embedding"][:8] @ p["first"] + p["bias"])
        return size * jnp.mean((hidden @ p["last"] - 1) ** 2)

    half_loss = ols.autocast(loss_fn, dtype)
    norms = {name: jnp.linalg.norm(g) for name, g in jax.grad(loss_fn)(params).items()}

    def penalty(p):  # its gradient is `factor` times as large as the loss'
        terms = (norms[name] * jnp.linalg.norm(p[name]) for name in where)
        return factor * sum(terms)

    @jax.jit
    def grad_fn(state):
        if after:
            return jax.grad(lambda p: ols.scale_loss(half_loss(p), state) + penalty(p))(params)
        return jax.grad(lambda p: ols.scale_loss(half_loss(p) + penalty(p), state))(params)

    return grad_fn


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("where", [("first", "last"), ("bias",), ("embedding",)], ids=str)
def test_a_term_that_is_added_after_scaling_is_found(dtype, where):
    for factor in (0.01, 0.3, 1, 1000):
        assert_scaled_once(network(dtype, factor, after=False, where=where), ols.init(3000.7))
        names = "|".join(where)
        message = rf"a term at `\['({names})'\]` .*\({len(where)} of 4 arrays .*after scaling"
        with pytest.raises(AssertionError, match=message):
            assert_scaled_once(network(dtype, factor, after=True, where=where), ols.init(3000.7))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e-4, 1e-2, 1.0, 100.0])
def test_gradients_that_underflow_at_a_small_loss_scale_are_no_term(dtype, size):
    assert_scaled_once(network(dtype, 0.0, after=False, size=size), ols.init())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("magnitude", [1e-8, 1e-6, 1e-4, 1e-2])
def test_rounding_of_gradients_stored_in_half_precision_is_no_term(dtype, magnitude):
    for seed in range(8):
        keys = jax.random.split(jax.random.key(seed))
        grads = magnitude * jax.random.normal(keys[0], (4, 32))
        assert_scaled_once(lambda state, g=grads: (state.loss_scale * g).astype(dtype), ols.init())
        sums = lambda state, g=grads: [*(state.loss_scale * g).astype(dtype).sum(0)]  # noqa: E731
        assert_scaled_once(sums, ols.init())
