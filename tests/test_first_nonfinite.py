"""`first_nonfinite` names the layer that overflows first, in every framework."""

import re

import equinox as eqx
import flax.linen as nn
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

F16 = jnp.float16
X = jax.random.normal(jax.random.key(0), (16, 8))
NAN, INF = jnp.nan, jnp.inf
CAST = "convert_element_type"


# --- Every framework: `energy` is squared in float16, after two layers and before two.


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, dtype=F16, name="first")(x))
        energy = nn.Dense(8, dtype=F16, name="energy")(3000 * x) ** 2
        return nn.Dense(1, dtype=F16, name="head")(x + energy / (1 + energy))


class NNXNet(flax.nnx.Module):
    def __init__(self, rngs):
        self.first = flax.nnx.Linear(8, 8, dtype=F16, rngs=rngs)
        self.norm = flax.nnx.BatchNorm(8, rngs=rngs)
        self.dropout = flax.nnx.Dropout(0.1, rngs=rngs)
        self.energy = flax.nnx.Linear(8, 8, dtype=F16, rngs=rngs)
        self.head = flax.nnx.Linear(8, 1, dtype=F16, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.norm(flax.nnx.relu(self.first(x))))
        energy = self.energy(3000 * x) ** 2
        return self.head(x + energy / (1 + energy))


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    energy: eqx.nn.Linear
    head: eqx.nn.Linear
    activation: object = jax.nn.relu  # no array

    def __init__(self, key):
        self.first, self.energy = (eqx.nn.Linear(8, 8, key=k) for k in jax.random.split(key))
        self.head = eqx.nn.Linear(8, 1, key=key)

    def __call__(self, x):
        x = self.activation(self.first(x))
        energy = self.energy(3000 * x) ** 2
        return self.head(x + energy / (1 + energy))


def linen():
    net = LinenNet()
    params = net.init(jax.random.key(1), X)["params"]
    return (
        lambda params, x: net.apply({"params": params}, x).mean(dtype=jnp.float32),
        params,
        "params['energy']",
    )


def nnx():
    return lambda net, x: net(x).mean(dtype=jnp.float32), NNXNet(flax.nnx.Rngs(0)), "net.energy"


def equinox():
    def loss_fn(net, x):
        net = jax.tree.map(lambda p: p.astype(F16) if eqx.is_array(p) else p, net)
        return jax.vmap(net)(x.astype(F16)).mean(dtype=jnp.float32)

    return loss_fn, EquinoxNet(jax.random.key(1)), "net.energy"


def pure():
    def loss_fn(params, x):
        x = x.astype(F16) @ params["first"]["w"]
        energy = (3000 * x @ params["energy"]["w"]) ** 2
        return ((x + energy / (1 + energy)) @ params["head"]["w"]).mean(dtype=jnp.float32)

    params = {name: {"w": jnp.full((8, 8), 0.1, F16)} for name in ("first", "energy", "head")}
    return loss_fn, params, "params['energy']"


TRANSFORMS = {"nnx": flax.nnx.value_and_grad, "equinox": eqx.filter_value_and_grad}
JITS = {"nnx": flax.nnx.jit, "equinox": eqx.filter_jit}


@pytest.mark.integration
@pytest.mark.parametrize("how", ["loss", "jit", "grad", "scaled", "remat"])
@pytest.mark.parametrize("framework", [linen, nnx, equinox, pure])
def test_the_layer_that_overflows_is_named_in_every_framework(framework, how):
    loss_fn, params, layer = framework()
    transform = TRANSFORMS.get(framework.__name__, jax.value_and_grad)
    args = (params, X)
    if how == "jit":
        loss_fn = JITS.get(framework.__name__, jax.jit)(loss_fn)
    elif how == "grad":
        loss_fn = transform(loss_fn)
    elif how == "scaled":
        loss_fn = ols.value_and_grad(loss_fn, transform=transform)
        args = (ols.init(), *args)
    elif how == "remat":
        if framework is nnx:
            pytest.skip("`jax.checkpoint` takes no stateful modules")
        loss_fn = transform(eqx.filter_checkpoint(loss_fn))
    found = ols.diagnostics.first_nonfinite(loss_fn, *args)
    # Wrappers that hide the names of the parameters leave their positions.
    assert found.layer.endswith(layer.removeprefix("params").removeprefix("net"))
    if how == "loss":
        assert found.layer == layer
    assert (found.operation, found.dtype, found.nan, found.backward) == (
        "integer_pow",
        "float16",
        0,
        False,
    )
    assert 0 < found.inf <= found.size == 128
    assert f"{__file__}:" in found.source
    assert "** 2" in found.source


@pytest.mark.integration
def test_the_module_that_is_handed_in_is_unchanged():
    loss_fn, net, _ = nnx()
    before = jax.tree.map(np.array, flax.nnx.state(net, flax.nnx.BatchStat))
    ols.diagnostics.first_nonfinite(loss_fn, net, X)
    jax.tree.map(np.testing.assert_array_equal, before, flax.nnx.state(net, flax.nnx.BatchStat))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return (200 * nn.Dense(4, dtype=F16)(x)).astype(jnp.float32), None


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=5)
        return blocks()(x, None)[0]


@pytest.mark.integration
def test_the_step_of_a_scan_over_layers_is_named():
    net, x = Deep(), X[:, :4]
    variables = net.init(jax.random.key(1), x, train=False)

    def forward(variables, x, key, *, train):
        rngs = {"dropout": key}
        return net.apply(variables, x, train=train, rngs=rngs, mutable=["batch_stats"])

    found = ols.diagnostics.first_nonfinite(forward, variables, x, jax.random.key(2), train=True)
    assert found.layer == "variables['params']['ScanBlock_0']['Dense_0']"
    assert re.fullmatch(r"Deep/step [0-4]/ScanBlock_0", found.scope)


# --- Operations.


def scanned(p, x, *, reverse=False):
    rows = jnp.arange(4.0)
    step = lambda carry, row: (carry, p["w"] * row * row * 1e30 + carry)  # noqa: E731
    return jax.lax.scan(step, x, rows, reverse=reverse)


def branches(p, x):
    down = lambda y: y.astype(F16).astype(jnp.float32)  # noqa: E731
    return jax.lax.switch(jnp.int32(7), [jnp.sin, down], p["w"] * x)


def doubled(p, x):
    return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * p["w"]), (0, x))[1]


@jax.custom_vjp
def straight(x):
    return x


straight.defvjp(lambda x: (x, x), lambda x, g: (g / (x - x),))


def masked_softmax(p, x, mask=(True, False)):
    return jax.nn.softmax(jnp.where(jnp.array(mask), p["w"] * x, -INF))


def silu(p, x):
    return p["w"] * x / (1 + jnp.exp(-x))


ONE, BIG = jnp.ones(2), jnp.full(2, 1e30)
CONSTANT = np.array([1.0, np.nan], np.float32)


@pytest.mark.parametrize(
    ("fun", "w", "x", "expected"),
    [
        (lambda p, x: p["w"] * x, BIG, BIG, ("mul", "p['w']", "")),
        (lambda p, x: (p["w"] * x).astype(F16), ONE, BIG, (CAST, "p['w']", "")),
        (lambda p, x: p["w"].sum() * jnp.sqrt(-x), ONE, ONE, ("sqrt", "x", "")),
        (
            lambda p, x: (p["w"] * x).astype("complex64") ** 2,
            ONE,
            BIG,
            ("integer_pow", "p['w']", ""),
        ),
        (lambda p, x: x.astype(F16) * p["w"].astype(F16), ONE, BIG, (CAST, "p['w']", "")),
        (branches, ONE, BIG, (CAST, "p['w']", "")),
        (scanned, BIG, ONE, ("mul", "p['w']", "step 1")),
        (lambda p, x: scanned(p, x, reverse=True), BIG, ONE, ("mul", "p['w']", "step 3")),
        (doubled, BIG, ONE, ("while", "p['w']", "")),
        (jax.named_scope("block")(lambda p, x: p["w"] * x), BIG, BIG, ("mul", "p['w']", "block")),
        # What is not finite from the start.
        (lambda p, x: p["w"] * x, ONE, ONE.at[1].set(NAN), (None, "x", "")),
        (lambda p, x: p["w"] * x, ONE.at[0].set(INF), ONE, (None, "p['w']", "")),
        (
            jax.jit(lambda p, x: p["w"] * x * CONSTANT),
            ONE,
            ONE,
            (None, "an array that `fun` closes over", ""),
        ),
        # What is meant, and what is made of it.
        (masked_softmax, ONE, ONE, None),
        (lambda p, x: jnp.where(x > 0, p["w"], -INF), ONE, -ONE, None),
        (lambda p, x: masked_softmax(p, x, (False, False)), ONE, ONE, ("sub", "p['w']", "")),
        (lambda p, x: jax.nn.softmax(p["w"] + x), ONE, jnp.array([0.0, -INF]), None),
        # What does not reach the output.
        (silu, ONE, -100 * ONE, None),
        (lambda p, x: jnp.where(x > 0, jnp.log(p["w"] * x), 0.0), ONE, -ONE, None),
        (lambda p, x: p["w"] * x > jnp.exp(1000 * x), ONE, ONE, None),
        # The backward pass.
        (jax.grad(lambda p, x: silu(p, x).sum(), 1), ONE, -100 * ONE, ("exp", "x", "")),
        (jax.grad(lambda p, x: jnp.sqrt(p["w"] * x).sum()), 0 * ONE, ONE, ("div", "p['w']", "")),
        (
            jax.grad(lambda p, x: jnp.sum(straight(p["w"] * x))),
            ONE,
            ONE,
            ("div", "p['w']", ""),
        ),
    ],
)
def test_the_operation_is_named(fun, w, x, expected):
    found = ols.diagnostics.first_nonfinite(fun, {"w": w}, x)
    assert (found and (found.operation, found.layer, found.scope)) == expected


def test_the_backward_pass_is_told_from_the_forward_pass():
    grad = jax.grad(lambda p, x: jnp.sum(straight(p * x)))
    assert ols.diagnostics.first_nonfinite(grad, ONE, ONE).backward
    assert not ols.diagnostics.first_nonfinite(jnp.multiply, BIG, BIG).backward


def test_a_batch_does_not_count_as_a_layer():
    def loss_fn(params, batch):
        predicted = batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"]
        return jnp.mean(((predicted - batch["y"]) * 1e30) ** 2)

    params = {"hidden": {"w": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}, "unused": ONE}
    found = ols.diagnostics.first_nonfinite(
        loss_fn, params, {"x": jnp.ones((2, 2)), "y": jnp.zeros((2, 2))}
    )
    assert found.layer == "batch['y']"  # as many arrays are read: they cannot be told apart
    params["head"] = {"w": jnp.eye(2), "b": jnp.ones((2, 2)), "c": jnp.ones((2, 2))}

    def deeper(params, batch):
        hidden = batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"]
        predicted = hidden @ params["head"]["w"] + params["head"]["b"] + params["head"]["c"]
        return jnp.mean(((predicted - batch["y"]) * 1e30) ** 2)

    found = ols.diagnostics.first_nonfinite(
        deeper, params, {"x": jnp.ones((2, 2)), "y": jnp.zeros((2, 2))}
    )
    assert found.layer == "params['head']"


def test_arguments_are_named_as_well_as_can_be():
    def fun(first, *rest, **named):
        return first * rest[0] * named["b"] * len(named["a"])

    names = {"first": 0, "args[1]": 1, "b": 2}
    for name, position in names.items():
        arrays = [jnp.where(position == i, NAN, 1.0) for i in range(3)]
        found = ols.diagnostics.first_nonfinite(fun, *arrays[:2], b=arrays[2], a="text")
        assert (found.layer, found.operation) == (name, None)


def test_arrays_alone_are_traced():
    def fun(x, train, scale):
        return x / (1 if train else 0) * scale

    assert ols.diagnostics.first_nonfinite(fun, ONE, True, 2.0) is None
    assert ols.diagnostics.first_nonfinite(fun, ONE, False, 2.0).operation == "div"


def test_numpy_arrays_keys_and_sharded_arrays_are_read():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def fun(key, mask, x):
        return jnp.where(mask, jax.random.normal(key, (2,)), jnp.log(x))

    args = jax.random.key(0), np.array([True, False])
    assert ols.diagnostics.first_nonfinite(fun, *args, jax.device_put(ONE, sharding)) is None
    assert (
        ols.diagnostics.first_nonfinite(fun, *args, jax.device_put(0 * ONE, sharding)).operation
        == "log"
    )


def test_the_guards_of_jax_do_not_stop_the_search():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert ols.diagnostics.first_nonfinite(lambda x: jnp.sqrt(x - 2), ONE).operation == "sqrt"


def test_the_finding_reads_as_text():
    def fun(p, x):
        with jax.named_scope("block"):
            return straight(p["w"] * x)

    text = str(
        ols.diagnostics.first_nonfinite(jax.grad(lambda p, x: fun(p, x).sum()), {"w": ONE}, ONE)
    )
    counts = "0 NaN and 2 infinite of 2 elements (float32)"
    assert text.startswith(f"`div` in the backward pass is the first to make {counts}\n")
    assert text.splitlines()[1] == "  layer: p['w']"
    counts = "2 NaN and 0 infinite of 2 elements (float32)"
    text = str(ols.diagnostics.first_nonfinite(jnp.negative, NAN * ONE))
    assert text == f"`args[0]` is not finite before the first operation: {counts}"


def test_a_traced_argument_is_refused():
    with pytest.raises(TypeError, match=r"`args` must hold values, got traced arrays"):
        jax.jit(lambda x: ols.diagnostics.first_nonfinite(jnp.sin, x))(ONE)
