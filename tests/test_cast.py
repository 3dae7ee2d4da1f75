"""Casting trees, and casting what a loss function is given."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_where import assert_same_bits, types

import optax_lossscale as ols

TREE = {
    "w": jnp.ones(2),
    "half": jnp.ones(2, jnp.bfloat16),
    "norm": {"scale": np.ones(2, np.float32)},
    "steps": jnp.zeros((), jnp.int32),
    "mask": jnp.array([True]),
    "z": jnp.ones(1, jnp.complex64),
    "key": jax.random.key(0),
    "float": 1.5,
    "none": None,
    "name": "x",
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, "float32", jnp.float8_e4m3fn])
def test_floating_point_arrays_are_cast_and_nothing_else(dtype):
    cast = ols.cast(TREE, dtype)
    for array in (cast.pop("w"), cast.pop("half"), cast.pop("norm")["scale"]):
        assert array.dtype == jnp.dtype(dtype)
    assert all(leaf is TREE[name] for name, leaf in cast.items())


def test_keep_names_paths_as_keystr_writes_them():
    paths = []
    cast = ols.cast(TREE, jnp.float16, keep=lambda path: paths.append(path) or "norm" in path)
    assert cast["norm"]["scale"] is TREE["norm"]["scale"]
    assert cast["w"].dtype == jnp.float16
    assert paths == ["['half']", "['norm']['scale']", "['w']"]
    assert ols.cast(jnp.ones(2), jnp.float16, keep=lambda path: not path).dtype == jnp.float32


def test_a_keep_that_names_nothing_is_warned_of():
    with pytest.warns(UserWarning, match=r"`keep` names none .*\['w'\]"):
        cast = ols.cast({"w": jnp.ones(1)}, jnp.float16, keep=lambda _: False)
    assert cast["w"].dtype == "float16"
    assert ols.cast({"n": 1}, jnp.float16, keep=lambda _: False) == {"n": 1}


def test_the_loss_scale_in_a_state_of_dicts_is_not_cast():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = ols.with_loss_scaling(optax.trace(0.9))
    state = ols.cast(nnx.state(nnx.Optimizer(model, tx, wrt=nnx.Param)), jnp.float16)
    assert type(state) is nnx.State
    opt_state = state["opt_state"]
    assert opt_state["loss_scale_state"]["loss_scale"][...].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(opt_state["inner_state"])} == {jnp.dtype("float16")}


def test_random_streams_of_nnx_are_not_copied():
    def loss_fn(w, rngs):
        return jnp.sum(w * jax.random.normal(rngs.noise(), (2,), w.dtype)).astype(jnp.float32)

    step = ols.value_and_grad(loss_fn, compute_dtype=jnp.float16, transform=nnx.value_and_grad)
    rngs = nnx.Rngs(0)
    losses = [float(nnx.jit(step)(ols.init(), jnp.ones(2), rngs)[0]) for _ in range(3)]
    assert len(set(losses)) == 3
    assert ols.cast([rngs], jnp.float16)[0] is rngs


def test_flax_need_not_be_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "flax.nnx")
    assert ols.cast(jnp.ones(2), jnp.float16).dtype == jnp.float16


def loss(params, batch, *, weight):
    hidden = jnp.tanh(batch["x"] @ params["w"]) * params["norm"][None]
    return jnp.mean(jnp.float32(hidden.sum(-1) - batch["y"]) ** 2) * jnp.float32(weight)


PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "norm": jnp.linspace(0.5, 1, 4)}
BATCH = {"x": jnp.linspace(0, 1, 6).reshape(2, 3), "y": jnp.array([1.0, -1.0])}
WEIGHT = jnp.float32(0.3)


@pytest.mark.parametrize("keep_norm", [False, True])
@pytest.mark.integration
def test_the_bits_are_those_of_casting_by_hand(keep_norm):
    def by_hand(params, batch, weight):
        kept = {"norm": params["norm"]} if keep_norm else {}
        given = params, batch, weight
        params, batch, weight = jax.tree.map(lambda x: x.astype(jnp.float16), given)
        return loss(params | kept, batch, weight=weight)

    keep = "params['norm']".__eq__ if keep_norm else None
    cast = ols.value_and_grad(loss, compute_dtype=jnp.float16, keep=keep)
    found, expected = (
        jax.jit(function)(ols.init(1024), PARAMS, BATCH, weight=WEIGHT)
        for function in (cast, ols.value_and_grad(by_hand))
    )
    assert_same_bits(found, expected)
    assert types(found[1]) == types(PARAMS)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_path_begins_with_the_name_of_the_argument(jitted):
    seen = []

    def fun(params, x, /, y, *rest, weight, **more):
        return sum(map(jnp.float32, jax.tree.leaves((params, x, y, rest, weight, more))))

    fun = jax.jit(fun) if jitted else fun
    cast = ols.value_and_grad(fun, compute_dtype=jnp.float16, keep=seen.append)
    one = jnp.ones(())
    with pytest.warns(UserWarning, match=r"paths are: params\['norm'\]\['scale'\], x, y, rest"):
        cast(ols.init(2), {"norm": {"scale": one}}, one, one, one, (one,), weight=one, other=[one])
    names = ["params['norm']['scale']", "x", "y", "rest[0]", "rest[1][0]", "weight", "other[0]"]
    assert seen == names


def test_a_function_without_a_signature_has_numbered_arguments():
    class Loss:
        __signature__ = "none"  # as of some functions written in C

        def __call__(self, x, y):
            assert (x.dtype, y.dtype) == (jnp.float16, jnp.float32)
            return x.astype(jnp.float32) * y

    cast = ols.value_and_grad(Loss(), compute_dtype=jnp.float16, keep="args[1]".__eq__)
    cast(ols.init(2), jnp.ones(()), jnp.ones(()))


@pytest.mark.parametrize("has_aux", [False, True])
def test_grad_is_value_and_grad_without_the_value(has_aux):
    def fun(x, y):
        loss = jnp.sum(x * y.astype(jnp.float32))
        return (loss, y) if has_aux else loss

    given = {"argnums": 1, "has_aux": has_aux, "compute_dtype": jnp.float16, "keep": "x".__eq__}
    arguments = ols.init(4), jnp.arange(3.0), jnp.ones(3)
    value, grads = ols.value_and_grad(fun, **given)(*arguments)
    found = ols.grad(fun, **given)(*arguments)
    assert_same_bits(found, (grads, value[1]) if has_aux else grads)
    assert not has_aux or found[1].dtype == jnp.float16


@pytest.mark.parametrize("scale", [2.0**15, 2.0**17])
def test_the_state_of_loss_scaling_and_fp8_metadata_are_never_cast(scale):
    state = ols.init(scale)
    opt_state = ols.with_loss_scaling(optax.sgd(0.1), scale).init(jnp.ones(2))
    metadata = {"_overwrite_with_gradient": {"amax": jnp.full(2, 1e6)}, "w": jnp.ones(2)}
    expected = state, opt_state, metadata | {"w": jnp.ones(2, jnp.float16)}
    assert_same_bits(ols.cast((state, opt_state, metadata), jnp.float16), expected)

    def loss_fn(params, inner_state, metadata):
        assert metadata["_overwrite_with_gradient"]["amax"].dtype == jnp.float32
        assert params.dtype == jnp.float16
        return ols.scale_loss(jnp.sum(params.astype(jnp.float32)), inner_state)

    cast = ols.value_and_grad(loss_fn, compute_dtype=jnp.float16)
    assert cast(ols.init(1), jnp.ones(2), state, metadata)[0] == 2 * scale


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("framework", ["equinox", "nnx"])
def test_a_model_of_equinox_and_a_state_of_nnx_compute_in_half_precision(framework):
    graph, model = nnx.split(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    given = {"has_aux": True, "compute_dtype": jnp.float16}
    if framework == "equinox":
        model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
        given["transform"] = eqx.filter_value_and_grad

    def loss_fn(model, x):
        net = jax.vmap(model) if framework == "equinox" else nnx.merge(graph, model)
        return jnp.mean(net(x).astype(jnp.float32) ** 2), net(x)

    step = eqx.filter_jit(ols.value_and_grad(loss_fn, **given))
    (_, prediction), grads = step(ols.init(), model, jnp.ones((8, 4)))
    assert prediction.dtype == jnp.float16
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
