"""`scale_inside`: a fixed loss scale inside a function, for trainers that differentiate alone."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal, ones, shape
from flax import nnx
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits

import optax_lossscale as ols

F16, F32 = jnp.float16, jnp.float32
SMALL = 2.0**-24  # multiplies a loss so that its gradients are zero in float16


def network(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def loss_fn(params, x):
    return SMALL * jnp.mean((network(params, x) - x) ** 2)


def parameters():
    return {"in": normal(shape(16, 32)) / 4, "out": normal(shape(32, 16), seed=1) / 6}


X = normal(shape(64, 16), seed=2)
HALF = ols.autocast(loss_fn, F16)
SCALED = ols.scale_inside(HALF, 2.0**24)


# -- trainers of others, which take an optimizer and a loss


def fit(params, tx, loss_fn, steps=40):
    """Train in a loop over a compiled step."""

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params, X)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
    return loss


def fit_in_scan(params, tx, loss_fn, steps=40):
    def step(carry, _):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, X)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=steps)[1])(params)[-1]


class Model(nnx.Module):
    def __init__(self, params):
        self.first, self.last = nnx.Param(params["in"]), nnx.Param(params["out"])
        self.calls = nnx.Variable(jnp.zeros(()))

    def params(self):
        self.calls[...] += 1
        return {"in": self.first[...], "out": self.last[...]}


def fit_nnx(params, tx, loss_fn, steps=40):
    model = Model(params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model, X)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer) for _ in range(steps)]
    assert model.calls[...] == steps
    return losses[-1]


class Tanh(eqx.Module):
    weights: dict
    activation: object = jnp.tanh

    def params(self):
        assert self.activation is jnp.tanh
        return self.weights


def fit_equinox(params, tx, loss_fn, steps=40):
    @eqx.filter_jit
    def step(model, opt_state):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, X)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    model = Tanh(params)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(steps):
        model, opt_state, loss = step(model, opt_state)
    return loss


def of_model(model, x):
    return loss_fn(model.params(), x)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("trainer", [fit, fit_in_scan, fit_nnx, fit_equinox])
@pytest.mark.parametrize(
    "tx", [optax.sgd(1 / SMALL), optax.adam(1e-2, eps=1e-20)], ids=["sgd", "adam"]
)
def test_a_trainer_that_differentiates_by_itself_learns_in_float16_as_in_float32(trainer, tx):
    loss = loss_fn if trainer in (fit, fit_in_scan) else of_model
    exact = trainer(parameters(), tx, loss)
    half = ols.autocast(loss, F16)
    plain = trainer(parameters(), tx, half)
    scaled = trainer(parameters(), ols.with_skipping(tx), ols.scale_inside(half, 2.0**24))
    assert abs(scaled / exact - 1) < 0.01
    assert abs(plain / exact - 1) > 0.1  # its gradients are zero


# -- values, and derivatives of every kind


def test_values_are_equal_to_the_bit_and_the_compiled_forward_pass_is_the_same_program():
    assert_same_bits(SCALED(parameters(), X), HALF(parameters(), X))
    texts = (jax.jit(f).lower(parameters(), X).compile().as_text() for f in (SCALED, HALF))
    # Without the lines of the source, which are those of the program that was compiled first.
    scaled, plain = (re.findall(" = (.*?)(?:, metadata.*)?\n", text) for text in texts)
    assert scaled == plain != []


def quadratic(w, x):
    return jnp.sum(jnp.sin(w) * x.reshape(-1) ** 2)


W, Y = normal(shape(5)), normal(shape(5), seed=3)
BOTH, ZERO, total = jnp.stack([Y, W]), jnp.float32(0), jnp.sum
INSIDE = ols.scale_inside(quadratic, 2.0**10)


def partial_sum(fun, w):
    return lambda carry, y: (carry + fun(w, y), carry)


DERIVATIVES = {
    "grad": lambda f: jax.grad(f, (0, 1))(W, Y),
    "jvp": lambda f: jax.jvp(f, (W, Y), (Y, W)),
    "forward over reverse": lambda f: jax.jvp(jax.grad(f), (W, Y), (Y, W)),
    "of another argument": lambda f: jax.jacfwd(jax.grad(f, 1), 0)(W, Y),
    "reverse over reverse": lambda f: jax.grad(lambda *a: total(jax.grad(f)(*a)), (0, 1))(W, Y),
    "vmap": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, BOTH),
    "of vmap": lambda f: jax.grad(lambda w: total(jax.vmap(f, (None, 0))(w, BOTH)))(W),
    "of scan": lambda f: jax.grad(lambda w: jax.lax.scan(partial_sum(f, w), ZERO, BOTH)[0])(W),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(W, Y),
    "linearize": lambda f: jax.linearize(f, W, Y)[1](Y, W),
}  # fmt: skip


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_derivatives_are_true(name, jit):
    got, right = (DERIVATIVES[name](jit(fun)) for fun in (INSIDE, quadratic))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, right)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_over_devices_are_true(check_vma):
    mesh = jax.make_mesh((4,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    def gradient(fun):
        local = lambda w, x: jax.lax.pmean(fun(w, x), "i")  # noqa: E731
        specs = {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": P(), "check_vma": check_vma}
        return jax.jit(jax.grad(jax.shard_map(local, **specs)))(W, jnp.stack([Y, W, Y, Y]))

    assert_same_bits(gradient(INSIDE), gradient(quadratic))


def test_any_number_and_dtype_gives_true_gradients_within_one_unit_in_the_last_place():
    fun = ols.scale_inside(lambda x: jnp.sum(jnp.abs(x) ** 2).astype(F32), 1000)
    for x in (Y, Y.astype(jnp.bfloat16), jax.lax.complex(Y, W)):
        got, exact = jax.grad(fun)(x), jax.grad(lambda x: jnp.sum(jnp.abs(x) ** 2).astype(F32))(x)
        assert got.dtype == x.dtype
        np.testing.assert_allclose(*ols.cast((got, exact), F32), rtol=2e-7)


# -- what it takes, and what it refuses


def test_leaves_that_have_no_gradient_pass_through_and_fp8_metadata_are_not_divided():
    key, seen = jax.random.key(0), []

    def fun(tree, *, name):
        seen.append(tree["key"] is key and tree["text"] == name and tree["none"] is None)
        scaled = tree["_overwrite_with_gradient"]
        return jnp.sum(tree["w"] * scaled), {"ints": tree["ints"], "text": name}

    tree = {"key": key, "text": "a", "none": None, "ints": jnp.arange(3), "w": ones(shape(3))}
    tree["_overwrite_with_gradient"] = ones(shape(3))
    inside = ols.scale_inside(fun, 8)
    gradient = jax.grad(lambda x: inside(tree | x, name="a")[0])
    assert (gradient({"w": tree["w"]})["w"] == 1).all()
    name = "_overwrite_with_gradient"
    assert (gradient({name: tree[name]})[name] == 8).all()  # the rule of a layer replaces it
    assert inside(tree, name="a")[1]["ints"] is tree["ints"]
    assert all(seen)


def test_an_overflow_comes_out_and_the_step_is_skipped_without_a_warning_about_scaling():
    tx = ols.with_skipping(optax.sgd(1.0))
    grads = jax.grad(ols.scale_inside(HALF, 2.0**60))(parameters(), X)
    assert not ols.all_finite(grads)
    _, opt_state = tx.update(grads, tx.init(parameters()), parameters())
    assert not ols.applied(opt_state)


def test_narrow_arguments_are_refused_only_if_they_are_differentiated():
    fun = ols.scale_inside(lambda w, x: jnp.sum(w * x.astype(F32)), 8)
    half = ones(shape(3, dtype=F16))
    assert (jax.grad(fun)(ones(shape(3)), half) == 1).all()
    assert (jax.jit(jax.grad(fun))(ones(shape(3)), half) == 1).all()
    for differentiate in (jax.grad(fun, 1), jax.jit(jax.grad(fun, 1))):
        with pytest.raises(
            ValueError, match=r"`fun` must not be .* float16 arguments, got .*\[3\]"
        ):
            differentiate(ones(shape(3)), half)


def test_a_float16_loss_warns_if_it_is_differentiated():
    fun = ols.scale_inside(lambda w: jnp.sum(w.astype(F16)), 8)
    fun(W)
    with pytest.warns(UserWarning, match="The loss is float16"):
        jax.grad(fun)(W)


def test_the_signature_is_that_of_the_function():
    def fun(a, b=2.0, *, c=3.0):
        return a * b * c

    inside = ols.scale_inside(fun, 8)
    assert inside.__name__ == "fun"
    assert jax.grad(inside)(1.0, c=1.0) == 2
    assert jax.jit(inside, static_argnames="c")(1.0, c=2.0) == 4
    assert jax.grad(ols.scale_inside(functools.partial(fun, b=5.0), 8))(1.0) == 15
