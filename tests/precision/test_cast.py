"""Casting the arrays of trees."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_where import assert_same_bits, types

import optax_lossscale as ols


@pytest.fixture
def tree():
    return {
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
def test_floating_point_arrays_are_cast_and_nothing_else(tree, dtype):
    cast = ols.cast(tree, dtype)
    for array in (cast.pop("w"), cast.pop("half"), cast.pop("norm")["scale"]):
        assert array.dtype == jnp.dtype(dtype)
    assert all(leaf is tree[name] for name, leaf in cast.items())


def test_keep_names_paths_as_keystr_writes_them(tree):
    paths = []
    cast = ols.cast(tree, jnp.float16, keep=lambda path: paths.append(path) or "norm" in path)
    assert cast["norm"]["scale"] is tree["norm"]["scale"]
    assert cast["w"].dtype == jnp.float16
    assert paths == ["['half']", "['norm']['scale']", "['w']"]
    assert ols.cast(jnp.ones(2), jnp.float16, keep=lambda path: not path).dtype == jnp.float32


def test_a_keep_that_names_nothing_is_warned_of():
    with pytest.warns(UserWarning, match=r"`keep` names none .*\['w'\]"):
        cast = ols.cast({"w": jnp.ones(1)}, jnp.float16, keep=lambda _: False)
    assert cast["w"].dtype == "float16"
    for number, end in ((5, r"\['4'\]"), (6, r"\['4'\] and 1 more"), (2000, r" and 1,995 more")):
        tree = {f"{i}": jnp.ones(1) for i in range(number)}
        with pytest.warns(UserWarning, match=rf"{end}\.$"):
            ols.cast(tree, jnp.float16, keep=lambda _: False)
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

    step = ols.value_and_grad(loss_fn, transform=nnx.value_and_grad)
    rngs = nnx.Rngs(0)
    losses = [float(nnx.jit(step)(ols.init(), jnp.ones(2), rngs)[0]) for _ in range(3)]
    assert len(set(losses)) == 3
    assert ols.cast([rngs], jnp.float16)[0] is rngs


def test_flax_need_not_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax.nnx", None)  # an import raises
    assert ols.cast(jnp.ones(2), jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize("has_aux", [False, True])
def test_grad_is_value_and_grad_without_the_value(has_aux):
    def fun(x, y):
        loss = jnp.sum(x * y.astype(jnp.float32))
        return (loss, y) if has_aux else loss

    given = {"argnums": 1, "has_aux": has_aux}
    arguments = ols.init(4), jnp.arange(3.0), jnp.ones(3)
    value, grads = ols.value_and_grad(fun, **given)(*arguments)
    found = ols.grad(fun, **given)(*arguments)
    assert_same_bits(found, (grads, value[1]) if has_aux else grads)


@pytest.mark.parametrize("scale", [2.0**15, 2.0**17])
def test_the_state_of_loss_scaling_and_fp8_metadata_are_never_cast(scale):
    state = ols.init(scale)
    opt_state = ols.with_loss_scaling(optax.sgd(0.1), scale).init(jnp.ones(2))
    metadata = {"_overwrite_with_gradient": {"amax": jnp.full(2, 1e6)}, "w": jnp.ones(2)}
    expected = state, opt_state, metadata | {"w": jnp.ones(2, jnp.float16)}
    assert_same_bits(ols.cast((state, opt_state, metadata), jnp.float16), expected)


@pytest.mark.slow
@pytest.mark.integration
def test_a_whole_model_is_cast_by_hand_in_one_line():
    params = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "norm": jnp.linspace(0.5, 1, 4)}
    batch = {"x": jnp.linspace(0, 1, 6).reshape(2, 3), "y": jnp.array([1.0, -1.0])}

    def loss_fn(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"]) * params["norm"][None]
        return jnp.mean(jnp.float32(hidden.sum(-1) - batch["y"]) ** 2)

    def cast_loss(params, batch):
        return loss_fn(ols.cast(params, jnp.float16), ols.cast(batch, jnp.float16))

    grads = jax.grad(cast_loss)(params, batch)
    assert types(grads) == types(params)
    assert list(ols.diagnostics.precision_report(cast_loss, params, batch)) == ["float16"]


def test_a_model_of_nnx_is_cast_by_its_state():
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    half = nnx.merge(graph, ols.cast(state, jnp.bfloat16))
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(half))} == {"bfloat16"}
    with pytest.raises(TypeError, match=r"Cast `nnx.state\(model\)`, and merge it"):
        ols.cast(model, jnp.bfloat16)
