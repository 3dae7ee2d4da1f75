"""`first_nonfinite` names the layer that overflows first, in every framework."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal, shape

import optax_lossscale as ols
from optax_lossscale.diagnostics import first_nonfinite

F16, F32 = jnp.float16, jnp.float32
X = normal(shape(16, 8))
NAN, INF = jnp.nan, jnp.inf
CAST = "convert_element_type"


# --- Every framework: the output of `energy` is squared in float16.


def loss_of(energy, head, x):
    return jnp.mean(head(energy(3000 * x) ** 2).astype(F32))


class NNXNet(flax.nnx.Module):
    def __init__(self):
        rngs = flax.nnx.Rngs(0)
        self.norm = flax.nnx.BatchNorm(8, rngs=rngs)  # its state must not change
        self.energy = flax.nnx.Linear(8, 8, dtype=F16, rngs=rngs)
        self.head = flax.nnx.Linear(8, 8, dtype=F16, rngs=rngs)


class EquinoxNet(eqx.Module):
    energy: eqx.nn.Linear
    head: eqx.nn.Linear
    activation: object = jax.nn.relu  # not an array


# Each returns the loss, its model, the framework's transform and its `jit`.
def pure():
    def loss_fn(params, x):
        layers = (lambda x, w=params[name]["w"]: x @ w for name in ("energy", "head"))
        return loss_of(*layers, x.astype(F16))

    params = {name: {"w": jnp.full((8, 8), 0.1, F16)} for name in ("energy", "head")}
    return loss_fn, params, jax.value_and_grad, jax.jit


def nnx():
    def loss_fn(net, x):
        return loss_of(net.energy, net.head, net.norm(x))

    return loss_fn, NNXNet(), flax.nnx.value_and_grad, flax.nnx.jit


def equinox():
    def loss_fn(net, x):
        net, x = ols.cast((net, x), F16)
        return loss_of(jax.vmap(net.energy), jax.vmap(net.head), net.activation(x))

    net = EquinoxNet(*(eqx.nn.Linear(8, 8, key=key) for key in jax.random.split(jax.random.key(0))))
    return loss_fn, net, eqx.filter_value_and_grad, eqx.filter_jit


def arrays(net):
    return [np.array(x) for x in jax.tree.leaves(net) if isinstance(x, jax.Array)]


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("framework", "how"),
    [(framework, how) for framework in (pure, nnx, equinox) for how in ("loss", "jit", "scaled")]
    + [(pure, "remat"), (equinox, "remat")],
)
def test_the_layer_that_overflows_is_named_in_every_framework(framework, how):
    loss_fn, net, transform, jit = framework()
    before, args = arrays(net), (net, X)
    if how == "jit":
        loss_fn = jit(loss_fn)
    elif how == "scaled":
        loss_fn = ols.value_and_grad(loss_fn, transform=transform)
        args = (ols.init(), *args)
    elif how == "remat":
        loss_fn = transform(eqx.filter_checkpoint(loss_fn))
    found = first_nonfinite(loss_fn, *args)
    # Wrappers hide the name of the argument, but not the key path in it.
    name = ("params" if framework is pure else "net") if how == "loss" else ""
    assert found.layer.endswith(name + ("['energy']" if framework is pure else ".energy"))
    assert (found.operation, found.dtype, found.nan) == ("integer_pow", "float16", 0)
    assert not found.backward
    assert 0 < found.inf <= found.size == 128
    assert f"{__file__}:" in found.source
    assert "** 2" in found.source
    jax.tree.map(np.testing.assert_array_equal, before, arrays(net))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return (200 * nn.Dense(4, dtype=F16)(x)).astype(jnp.float32), None


@pytest.mark.slow
@pytest.mark.integration
def test_the_step_of_a_scan_over_layers_is_named():
    blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=5)
    net, x = blocks(), X[:, :4]
    shapes = jax.eval_shape(net.init, jax.random.key(0), x, None)
    variables = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    found = first_nonfinite(net.apply, variables, x, None)
    assert (found.layer, found.scope) == ("variables['params']['Dense_0']", "step 1/Block")


def scanned(step, rows=lambda _: jnp.arange(4.0), **options):
    """Return a function that carries `x` through `step(w, carry, row)`."""

    def fun(p, x):
        return jax.lax.scan(lambda carry, row: step(p["w"], carry, row), x, rows(x), **options)

    return fun


def over_rows(step):
    return scanned(step, rows=lambda x: x)


def large_steps(w, carry, row):
    return carry, w * row * row * 1e30 + carry


def large_after_a_mask(w, carry, row):
    return carry, jnp.where(row > 0, w * row * row * 1e29 * carry, -INF)


def second_result_first(w, carry, row):
    large = w * (1 + row) * 1e30
    return carry, (jnp.sqrt(-carry - row), large)


def saved(p, x):
    """Compute the operands of a scan in the same call as the scan."""

    def layers(p, x):
        return jax.lax.scan(lambda c, _: (c * (p["w"] @ p["w"]), None), x, None, length=3)[0].sum()

    policy = jax.checkpoint_policies.everything_saveable
    return jax.grad(jax.checkpoint(layers, policy=policy), 1)(p, x)


BRANCHES = jnp.sin, lambda y: y.astype(F16).astype(F32)


@jax.custom_vjp
def straight(x):
    return 1e30 * x


straight.defvjp(lambda x: (x, x), lambda x, g: (g / (x - x),))


@jax.custom_jvp
def halved(x):
    return x.astype(F16) / 2


halved.defjvps(lambda t, _, __: t.astype(F16) / 2)


def masked_softmax(p, x, mask=(True, False)):
    return jax.nn.softmax(jnp.where(jnp.array(mask), p["w"] * x, -INF))


def silu(p, x):
    return p["w"] * x / (1 + jnp.exp(-x))


def product(p, x):
    return p["w"] * x


def after_a_logarithm(p, x):
    earlier = jnp.log(-x)
    return jnp.where(x > 0, p["w"] * x, earlier)


ONE, BIG, PART = (np.float32(numbers) for numbers in ([1, 1], [1e30, 1e30], [1, NAN]))
CLOSED_OVER = "an array that `fun` closes over"
LARGEST = jnp.float32(1e30)
CONSTANT, LARGE, LIMITS = np.float32([[1.0, np.nan], [1e30, 1.0], [np.inf, -np.inf]])


@pytest.mark.parametrize(
    ("fun", "w", "x", "expected"),
    [
        (product, BIG, BIG, ("mul", "p['w']", "")),
        (lambda p, x: p["w"].sum() * jnp.sqrt(-x), ONE, ONE, ("sqrt", "x", "")),
        (
            lambda p, x: jax.lax.complex(0 * x, x) * p["w"].astype("complex64"),
            BIG,
            BIG,
            ("mul", "p['w']", ""),
        ),
        # The second result is made first.
        (lambda p, x: (product(p, x), jnp.sqrt(-x))[::-1], BIG, BIG, ("mul", "p['w']", "")),
        (lambda p, x: halved(product(p, x)), ONE, BIG, (CAST, "p['w']", "")),
        (lambda p, x: straight(product(p, x)), ONE, BIG, ("mul", "p['w']", "")),
        (saved, BIG, ONE, ("dot_general", "p['w']", "")),
        (lambda p, x: x.astype(F16) * p["w"].astype(F16), ONE, BIG, (CAST, "p['w']", "")),
        (lambda p, x: jax.lax.switch(7, BRANCHES, p["w"] * x), ONE, BIG, (CAST, "p['w']", "")),
        (scanned(large_steps), BIG, ONE, ("mul", "p['w']", "step 1")),
        (scanned(large_steps, reverse=True), BIG, ONE, ("mul", "p['w']", "step 3")),
        (scanned(lambda w, c, row: (c * w, row)), 1e10 * ONE, ONE, ("mul", "p['w']", "step 3")),
        (scanned(second_result_first), BIG, ONE, ("mul", "p['w']", "step 0")),
        (over_rows(lambda w, _, x: (w, w * x)), BIG, 1e30 * PART, ("mul", "p['w']", "step 0")),
        (jax.named_scope("block")(product), BIG, BIG, ("mul", "p['w']", "block")),
        # Inputs that are not finite.
        (product, ONE, PART, (None, "x", "")),
        (product, np.float32([INF, 1]), ONE, (None, "p['w']", "")),
        (over_rows(lambda w, c, row: (c, w * row)), ONE, PART, (None, "x", "")),
        (jax.jit(lambda p, x: product(p, x) * CONSTANT), ONE, ONE, (None, CLOSED_OVER, "")),
        # Intended infinities, and the NaN that they cause.
        (masked_softmax, ONE, ONE, None),
        (lambda p, x: jnp.where(x > 0, p["w"], -INF), ONE, ONE, None),
        (lambda p, x: masked_softmax(p, x, (False, False)), ONE, ONE, ("sub", "p['w']", "")),
        (lambda p, x: jax.nn.softmax(p["w"] + x), ONE, np.float32([0, -INF]), None),
        (lambda p, x: jax.nn.softmax(p["w"] + x), ONE, -INF * ONE, ("sub", "p['w']", "")),
        (jax.jit(lambda p, x: jnp.where(x > 0, p["w"], LIMITS)), ONE, ONE, None),
        (jax.jit(lambda p, x: p["w"] * x + LIMITS - LIMITS), ONE, ONE, ("sub", "p['w']", "")),
        (scanned(large_after_a_mask), BIG, ONE, ("mul", "p['w']", "step 1")),
        # Infinities that are not intended, since the result is not finite only because of them.
        (lambda p, x: jnp.where(x > 0, p["w"], -INF), ONE, -ONE, (CAST, "", "")),
        (
            jax.jit(lambda p, x: jnp.where(x > 0, p["w"], LIMITS)),
            ONE,
            -ONE,
            (None, CLOSED_OVER, ""),
        ),
        (lambda p, x: -jnp.where(x > 0, p["w"], INF), ONE, -ONE, (CAST, "", "")),
        (lambda p, x: p["w"] * x, ONE, -INF * ONE, (None, "x", "")),
        (lambda p, x: jnp.where(x > 0, NAN, p["w"]), ONE, ONE, (CAST, "", "")),
        (
            scanned(lambda w, c, row: (c + row, jnp.where(row > 1, INF, c * w))),
            *(ONE, ONE, (CAST, "step 2", "step 2")),
        ),
        (
            lambda p, x: jax.scipy.stats.beta.logpdf(p["w"] * x, 2.0, 2.0),
            ONE,
            2 * ONE,
            (CAST, "", ""),
        ),
        # Values that do not reach the output.
        (silu, ONE, -100 * ONE, None),
        (after_a_logarithm, BIG, BIG, ("mul", "p['w']", "")),
        (lambda p, x: jnp.where(x > 0, jnp.log(p["w"] * x), 0.0), ONE, -ONE, None),
        (lambda p, x: p["w"] * x > jnp.exp(1000 * x), ONE, ONE, None),
        # The backward pass.
        (jax.grad(lambda p, x: silu(p, x).sum(), 1), ONE, -100 * ONE, ("exp", "x", "")),
        (jax.grad(lambda p, x: jnp.sqrt(p["w"] * x).sum()), 0 * ONE, ONE, ("div", "p['w']", "")),
        (jax.grad(lambda p, x: straight(product(p, x)).sum()), ONE, ONE, ("div", "p['w']", "")),
    ],
)
def test_the_operation_that_makes_the_first_nonfinite_number_is_named(fun, w, x, expected):
    found = first_nonfinite(fun, {"w": w}, x)
    assert (found and (found.operation, found.layer, found.scope)) == expected


def both(params, x):
    return x * params["net"]["first"]["w"] * params["net"]["last"]["w"]


def sharded(params, x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec)({"net": params["net"]}, x)


def looped(params, x):
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (1, both(params, c[1])), (0, x))[1]


@pytest.mark.parametrize(
    ("fun", "operation", "layer"),
    [
        (both, "mul", "params['net']['last']"),
        (jax.jit(sharded), "shard_map", "params['net']"),
        (looped, "while", "params['net']"),
        (lambda params, _: params["net"]["last"]["w"] * params["head"]["w"], "mul", "params"),
    ],
)
def test_an_operation_on_several_layers_is_named_after_their_common_path(fun, operation, layer):
    params = {"net": {"first": {"w": ONE}, "last": {"w": BIG}}, "head": {"w": BIG}}
    found = first_nonfinite(fun, params, BIG)
    assert (found.operation, found.layer) == (operation, layer)
    assert Path(__file__).name in found.source


def test_a_scan_whose_single_steps_are_finite_is_itself_the_origin():
    # XLA may compute `x * (1e30 * 1e30)` in a scan.
    reassociated = scanned(lambda w, carry, _: (carry, carry * w * 1e30 * 1e30))
    given = {"w": 1e-30 * ONE}, ONE
    if jnp.isfinite(reassociated(*given)[1]).all():
        pytest.skip("this XLA rounds the scan as its steps (jax 0.12)")
    found = first_nonfinite(reassociated, *given)
    assert (found.operation, found.layer) == ("scan", "p['w']")


def test_a_batch_is_not_taken_for_a_layer():
    def predict(params, batch):
        predicted = batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"]
        for array in params.get("head", {}).values():
            predicted = predicted + array
        return jnp.where(batch["mask"] > 0, predicted, 0)

    def loss_fn(params, batch):
        return jnp.mean(((predict(params, batch) - batch["y"]) * 1e30) ** 2)

    def of_the_batch(params, batch):
        return jnp.sqrt(-batch["x"]) + predict(params, batch) + batch["y"]

    @jax.named_scope("error")
    def of_two_in_the_batch(params, batch):
        return jnp.log(batch["y"] - batch["x"]) + predict(params, batch)

    ones = jnp.ones((2, 2))
    batch = {"x": ones, "y": 0 * ones, "mask": jnp.ones((2, 2), int)}
    params = {"hidden": {"w": ones, "b": ones}, "unused": 5 * [ONE]}
    # The same number of arrays is read from both, so they cannot be distinguished.
    assert first_nonfinite(loss_fn, params, batch).layer == "batch['y']"
    params["head"] = {"w": ones, "b": ones}
    expected = {loss_fn: "params['head']", of_the_batch: "batch['x']", of_two_in_the_batch: "error"}
    for fun, layer in expected.items():
        assert first_nonfinite(fun, params, batch).layer == layer


LAYERS = {"a": {"w": 1e-30 * ONE}, "b": {"w": 1e30 * ONE}, "c": {"w": ONE}}


def through(first, second, third):
    return lambda p, x: (p[third]["w"] * (p[second]["w"] * (p[first]["w"] * x))).sum()


def large_before(p, x):
    return 1e20 * (p["a"]["w"] * x) * jax.grad(through("a", "b", "c"))(p, ONE)["a"]["w"]


def cast_before_both_are_read(p, x):
    return (1e10 * (p["a"]["w"] * x)).astype(F16) * (p["c"]["w"] - x).astype(F16)


def recomputed(p, x):
    return jax.checkpoint(lambda x: 1 / (1 + jnp.exp(-p["c"]["w"] * x)))(-x).sum()


BETWEEN = {
    "the last to be read": (
        lambda p, x: jnp.exp(100 * ((p["a"]["w"] * x) + (p["b"]["w"] - x))) * p["c"]["w"],
        ("b", False),
    ),
    "cast before both are read": (cast_before_both_are_read, ("a", False)),
    "cast and negated before the next is read": (
        lambda p, x: -(1e10 * (p["a"]["w"] * x)).astype(F16) * p["c"]["w"].astype(F16),
        ("a", False),
    ),
    "the batch times the cotangent from b": (jax.grad(through("a", "b", "c")), ("b", True)),
    "the output of c times the cotangent from b": (jax.grad(through("c", "a", "b")), ("c", True)),
    "the cotangent from c divided, in a rule, by a residual of a": (
        jax.grad(lambda p, x: (p["c"]["w"] * straight(p["a"]["w"] * x)).sum()),
        ("a", True),
    ),
    "after the backward pass": (large_before, ("b", False)),
    "computed again by a checkpoint": (jax.grad(recomputed, 1), ("c", False)),
}


@pytest.mark.parametrize(("fun", "expected"), BETWEEN.values(), ids=BETWEEN)
def test_an_operation_between_layers_is_attributed_to_one_of_them(fun, expected):
    found = first_nonfinite(fun, LAYERS, 1e30 * ONE)
    assert (found.layer[3:4], found.backward) == expected


def masked(number, dtype=F16, mask=False):
    def fun(p, x):
        return jax.nn.softmax(jnp.where(mask, p["w"].astype(dtype), number)).astype(F32) * x

    return fun


@pytest.mark.parametrize(
    ("fun", "says"),
    [
        # A row that is masked completely: infinity minus infinity.
        (masked(-1e30), "-1e+30 is beyond float16; write `jnp.finfo(x.dtype).min`"),
        (masked(7e4), "70000 is beyond float16; write `jnp.finfo(x.dtype).max`"),
        (masked(500.0, jnp.float8_e4m3fn), "500 is beyond float8_e4m3fn; write"),
        (
            lambda p, _: p["w"].astype(F16) * LARGEST.astype(F16),
            "1e+30 is beyond float16",
        ),
        (lambda p, _: p["w"].astype(F16) * jnp.asarray(LARGE).astype(F16), None),
    ],
)
def test_a_constant_that_a_cast_makes_infinite_is_reported_with_its_line(fun, says):
    found = first_nonfinite(fun, {"w": ONE}, ONE)
    assert (found.operation, found.layer) == (CAST, "p['w']")
    assert __file__ in found.source
    assert (found.constant is None) == (says is None)
    assert says is None or f"  constant: {says}" in str(found)
    part_of_a_row = masked(-1e30, mask=np.array([True, False]))
    assert first_nonfinite(part_of_a_row, {"w": ONE}, ONE) is None
    computed = first_nonfinite(lambda x: jnp.sum(LARGE * x).astype(F16), ONE)
    assert (computed.operation, computed.constant) == (CAST, None)


@pytest.mark.usefixtures("x64")
def test_a_complex_constant_gets_no_remedy():
    x, huge = jnp.complex64(1), jnp.complex128(1e300j)
    found = first_nonfinite(lambda x: x * huge.astype(x.dtype), x)
    assert (found.operation, found.constant) == (CAST, None)


def test_a_box_around_a_parameter_is_not_a_layer():
    params = {"net": {"energy": {"w": nn.Partitioned(BIG, (None,))}, "head": {"w": ONE}}}

    def fun(params, x):
        return params["net"]["energy"]["w"].value * x * params["net"]["head"]["w"]

    assert first_nonfinite(fun, params, BIG).layer == "params['net']['energy']"


def test_arguments_are_named_by_signature_or_by_position():
    def fun(first, *rest, **named):
        return first * rest[0] * named["b"] * len(named["a"])

    for position, name in enumerate(["first", "rest[0]", "b"]):
        arrays = [jnp.where(position == i, NAN, 1.0) for i in range(3)]
        found = first_nonfinite(fun, *arrays[:2], b=arrays[2], a="text")
        assert (found.layer, found.operation, found.backward) == (name, None, False)
    assert first_nonfinite(getattr, NAN * ONE, "T").layer == "args[0]"  # it has no signature


def test_arrays_of_every_type_are_traced_and_other_leaves_are_not():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def fun(key, mask, x, train, scale):
        noise = jax.random.bits(jnp.where(mask[0], key, key), (2,)).astype(F32)
        return jnp.where(mask, noise, jnp.log(x)) / (1 if train else 0) * scale

    def operation(x, train):
        args = jax.random.key(0), np.array([True, False]), jax.device_put(x, sharding), train, 2.0
        found = first_nonfinite(fun, *args)
        return found and found.operation

    assert [operation(ONE, True), operation(0 * ONE, True)] == [None, "log"]
    assert operation(ONE, False) == "div"


def test_debugging_flags_of_jax_do_not_stop_the_search():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert first_nonfinite(lambda x: jnp.sqrt(x - 2), ONE).operation == "sqrt"


def test_the_result_prints_as_text_and_is_immutable():
    def fun(p, x):
        with jax.named_scope("block"):
            return straight(p["w"] * x).sum()

    found = first_nonfinite(jax.grad(fun), {"w": ONE}, ONE)
    first, *facts, source = str(found).splitlines()
    counts = "0 NaN and 2 infinite of 2 elements (float32)"
    assert first == f"`div` in the backward pass is the first to make {counts}"
    assert facts == ["  layer: p['w']", "  scope: block"]
    assert source.startswith(f"  source: {__file__}:")
    assert "backward" not in str(first_nonfinite(jnp.multiply, BIG, BIG)).partition("\n")[0]
    counts = "2 NaN and 0 infinite of 2 elements (float32)"
    text = str(first_nonfinite(jnp.negative, NAN * ONE))
    assert text == f"`args[0]` is not finite before the first operation: {counts}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.nan = 0
    with pytest.raises(TypeError, match="positional"):
        type(found)("layer", None, "float32", 0, 1, 2)
    counted = first_nonfinite(jnp.log, jnp.array([0.0, -1.0, 1.0, -1.0]))
    assert (counted.nan, counted.inf, counted.size) == (2, 1, 4)


def test_the_source_is_empty_without_a_line_of_the_users_code():
    with ThreadPoolExecutor(1) as pool:  # its stack has only lines of libraries
        found = pool.submit(first_nonfinite, jnp.multiply, BIG, BIG).result()
    assert found.source == ""


# A number that does not reach the output is harmless, even in a scan.


def reset_by_the_next_step(carry, step):
    overflows = jnp.where(step == 0, carry * 1e30, 1.0)
    return jnp.where(step == 2, jnp.sqrt(overflows - 5), overflows), carry


@pytest.mark.parametrize(
    ("result", "steps", "x", "operation"),
    [
        (0, [0, 1, 2], 1e30, "sqrt"),
        (1, [0, 1, 2], 1e30, "mul"),  # a stacked result comes from the first step
        (1, [0, 1, 2], 1.0, None),  # the last carry is not stacked
        (0, [], -1.0, "log"),
    ],
)
def test_an_infinity_that_the_next_step_discards_is_not_blamed(result, steps, x, operation):
    def fun(x, reverse):
        order = jnp.array(steps[::-1] if reverse else steps, int)
        x = x if steps else jnp.log(x)
        return jax.lax.scan(reset_by_the_next_step, x, order, reverse=reverse)[result]

    for reverse in (False, True):
        found = first_nonfinite(fun, jnp.float32(x), reverse)
        assert (found and found.operation) == operation


@pytest.mark.slow
def test_a_training_step_with_a_python_number_is_searched():
    tx = ols.with_loss_scaling(optax.sgd(1.0), 1.0)
    step = lambda g: jnp.log(tx.update(g, tx.init(ONE), value=1.0)[0].sum() + 2)  # noqa: E731
    assert first_nonfinite(step, ONE).operation == "log"
