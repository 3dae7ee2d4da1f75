"""Half precision as a storage format: what `autocast` does with arguments stored in it."""

import contextlib
import functools
import threading

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal, ones, shape
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16
from plain_where import assert_same_bits

import optax_lossscale as ols

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
WORDS, WIDTH = 32, 16


def parameters():
    return {
        "words": normal(shape(WORDS, WIDTH)),
        "layers": normal(shape(3, WIDTH, WIDTH), seed=1) / 4,
        "gain": ones(shape(3, WIDTH)),
        "head": normal(shape(WIDTH, WORDS), seed=2) / 4,
    }


def loss_fn(params, tokens):
    """Return the loss of a model whose only inputs are integers."""

    def layer(x, p):
        w, gain = p
        norm = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        norm = norm * gain[None, None]
        return x + jnp.tanh(norm @ w), None

    x = params["words"][tokens[:, :-1]]
    x, _ = lax.scan(layer, x, (params["layers"], params["gain"]))
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(WORDS, size=(8, 33)))


def relative_error(a, b):
    norm = lambda tree: optax.tree.norm(ols.cast(tree, F32))  # noqa: E731
    difference = jax.tree.map(lambda x, y: x.astype(F32) - y.astype(F32), a, b)
    return float(norm(difference) / norm(b))


# -- the right numbers


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_model_that_reads_tokens_has_the_loss_and_gradients_of_float32_parameters(dtype):
    stored = ols.cast(parameters(), dtype)
    wide = ols.cast(stored, F32)
    exact = jax.jit(jax.grad(loss_fn))(wide, tokens())
    half_loss = ols.autocast(loss_fn, dtype)
    loss, grads = jax.jit(jax.value_and_grad(half_loss))(stored, tokens())
    wide_loss, wide_grads = jax.jit(jax.value_and_grad(half_loss))(wide, tokens())
    assert loss.dtype == F32
    np.testing.assert_allclose(loss, wide_loss, rtol=1e-6)
    assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
    # Each gradient is that of float32 parameters, rounded once.
    rounded = ols.cast(wide_grads, dtype)
    assert relative_error(grads, rounded) < 2e-4
    assert relative_error(grads, exact) < 1.1 * relative_error(rounded, exact)


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_uses_of_a_stored_weight_are_added_in_float32(wrap):
    words = jnp.zeros(1000, jnp.int32)

    def embedded(table):
        return jnp.sum(table[words])

    def recurrent(w):
        step = lambda total, x: (total + jnp.sum(x * w), None)  # noqa: E731
        return lax.scan(step, 0.0, jnp.ones((2048, 8)))[0]

    grad = jax.grad(ols.autocast(wrap(embedded), BF16))(jnp.ones((10, 8), BF16))
    assert (grad.dtype, float(grad[0, 0])) == (BF16, 1000)

    def called_often(w):
        call = jax.jit(lambda w, factor: jnp.sum(w * factor))
        return sum(call(w, 1.0) for _ in range(8)) + call(w, 256.0)

    grad = jax.grad(ols.autocast(wrap(recurrent), BF16))(jnp.ones(8, BF16))
    assert (grad.dtype, float(grad[0])) == (BF16, 2048)
    grad = jax.grad(ols.autocast(wrap(called_often), BF16))(jnp.ones(8, BF16))
    assert (grad.dtype, float(grad[0])) == (BF16, 264)


@pytest.mark.slow
@pytest.mark.integration
def test_float32_reads_stored_arguments_in_the_same_way():
    stored = ols.cast(parameters(), BF16)
    read = jax.jit(jax.value_and_grad(ols.autocast(loss_fn, F32)))
    loss, grads = read(stored, tokens())
    wide = ols.cast(stored, F32)
    exact, exact_grads = jax.jit(jax.value_and_grad(loss_fn))(wide, tokens())
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    assert relative_error(grads, ols.cast(exact_grads, BF16)) < 1e-4
    assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype(BF16)}


def test_only_half_precision_is_converted(x64):
    del x64
    given = {
        "fp8": jnp.ones(8, jnp.float8_e4m3fn),
        "float64": jnp.ones(8, "float64"),
        "complex": jnp.ones(8, "complex64"),
        "integers": jnp.arange(8),
        "key": jax.random.key(0),
        "float16": jnp.ones(8, F16),
        "bfloat16": jnp.ones(8, BF16),
        "float32": jnp.ones(8, F32),
    }
    seen = {}
    ols.autocast(lambda given: seen.update({k: str(x.dtype) for k, x in given.items()}), BF16)(
        given
    )
    halves = dict.fromkeys(("float16", "bfloat16"), "float32")
    assert seen == {name: str(x.dtype) for name, x in given.items()} | halves


def test_half_precision_that_the_function_makes_is_not_converted():
    def fun(x):
        y = x.astype(BF16) * 2
        return y, jnp.zeros(3, F16)

    assert [x.dtype for x in ols.autocast(fun, BF16)(jnp.ones(3, BF16))] == [BF16, F16]


def test_arrays_of_numpy_stay_numpys_and_are_read_as_float32():
    array, number = np.ones((8, 8), bfloat16), bfloat16(2)

    def fun(array, number, x):
        assert (type(array), array.dtype, number.dtype) == (np.ndarray, F32, F32)
        return x @ array * number, array, number

    result, same, same_number = ols.autocast(fun, BF16)(array, number, jnp.ones((8, 8)))
    assert (result.dtype, float(result[0, 0])) == (F32, 16)
    assert same is array
    assert same_number is number


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", jnp.dtype("float32")])
def test_a_dtype_may_be_named_and_arguments_may_be_anything(dtype):
    cast = ols.autocast(lambda *args: args, dtype)
    assert cast() == ()
    assert cast({}, [], None) == ({}, [], None)
    assert cast(2.5, 3, True) == (2.5, 3, True)
    assert ols.autocast(lambda: 1, dtype)() == 1


# -- where the conversion is


def large(jaxpr, dtype):
    """Return the shapes of the large arrays of a dtype in a program, outside its functions."""
    avals = [x.aval for eqn in jaxpr.eqns for x in eqn.outvars]
    return [x.shape for x in avals if x.dtype == dtype and x.size >= 2 * 16 * 16]


def body(jaxpr, name):
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == name)
    (inner,) = (p for p in eqn.params.values() if hasattr(p, "eqns"))
    return getattr(inner, "jaxpr", inner)


STACK, W, X = shape(3, 16, 16, dtype=BF16), shape(16, 16, dtype=BF16), shape(8, 16)


def layer(x, w):
    return jnp.tanh(x @ w), None


def scanned(stack, x):
    return jnp.mean(lax.scan(layer, x, stack)[0])


# What becomes of a stack before it is scanned.
STACKS = {
    "one array": (lambda s: s, STACK),
    "a list of layers": (jnp.stack, [W] * 3),
    "concatenated": (jnp.concatenate, [shape(n, 16, 16, dtype=BF16) for n in (2, 1)]),
    "moved": (lambda s: s.reshape(3, 16, 16).transpose(0, 2, 1), shape(3, 256, dtype=BF16)),
    "stop_gradient": (lax.stop_gradient, STACK),
    "checkpoint_name": (lambda s: checkpoint_name(s, "stack"), STACK),
    "device_put": (lambda s: jax.device_put(s, jax.devices()[0]), STACK),
    "optimization_barrier": (lambda s: lax.optimization_barrier((s, jnp.ones(3)))[0], STACK),
    "reshard": (lambda s: jax.sharding.reshard(s, P()), STACK),
    "a slice": (lambda s: s[:-1], STACK),
    "a strided slice": (lambda s: lax.slice(s, (0, 0, 0), s.shape, (2, 1, 1)), STACK),
    "split": (lambda s: jnp.concatenate(jnp.split(s, 3)[::-1]), STACK),
    "unstack": (lambda s: jnp.stack(jnp.unstack(s)[::-1]), STACK),
    "several": (lambda s: lax.stop_gradient(checkpoint_name(s, "s")[1:]).reshape(2, 16, 16), STACK),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_of_layers_is_never_float32_as_a_whole(name):
    passed, stack = STACKS[name]
    cast = ols.autocast(lambda s, x: scanned(passed(s), x), BF16)
    mesh = jax.make_mesh((1,), ("i",), (AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh) if name == "reshard" else contextlib.nullcontext():
        for fun in (cast, jax.grad(cast)):
            assert large(jax.make_jaxpr(fun)(stack, X).jaxpr, F32) == []
        stack, x = ones((stack, X))
        grads = jax.grad(cast)(ols.cast(stack, F32), x)
        assert_same_bits(jax.grad(cast)(stack, x), ols.cast(grads, BF16))


def with_two_uses(stack, x):
    return scanned(stack, x) + jnp.sum(stack)


def through_cond(w, x):
    return lax.cond(x[0, 0] > 0, lambda: jnp.sum(x @ w), lambda: jnp.sum(w))


def as_carry(w, x):
    return jnp.sum(lax.scan(lambda w, _: (jnp.tanh(w @ x.T @ x), None), w, length=2)[0])


def sharded(spec, check_vma):
    def fun(w, x):
        axis_types = (AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("i",), axis_types, devices=jax.devices()[:2])
        specs = {"in_specs": (spec, P(None, "i")), "out_specs": P(), "check_vma": check_vma}
        local = lambda w, x: lax.psum(jnp.sum(x[:, : len(w)] @ w), "i")  # noqa: E731
        return jax.shard_map(local, mesh=mesh, **specs)(w, x)

    return fun


INSIDE = {
    "jit": jax.jit(lambda w, x: jnp.sum(x @ w)),
    "remat2": jax.checkpoint(lambda w, x: jnp.sum(x @ w)),
    "shard_map": sharded(P("i"), check_vma=True),
    "shard_map of whole weights": sharded(P(), check_vma=True),
    "shard_map without check_vma": sharded(P("i"), check_vma=False),
}


@pytest.mark.parametrize("name", INSIDE)
def test_the_only_use_in_a_call_converts_inside_of_it(name):
    call = name.split()[0]
    x = shape(16, 32 if call == "shard_map" else 16)
    jaxpr = jax.make_jaxpr(ols.autocast(INSIDE[name], BF16))(W, x).jaxpr
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == [call]
    assert body(jaxpr, call).invars[0].aval.dtype == BF16


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [("i",), ("j",), ("i", "j")])
def test_cotangents_of_devices_are_added_in_float32(axes, check_vma, dtype):
    mesh = jax.make_mesh((2, 2), ("i", "j"), (AxisType.Auto,) * 2)

    def loss_fn(w, x):
        local = lambda w, x: lax.psum(jnp.sum(w * x), ("i", "j"))  # noqa: E731
        whole = tuple(axis for axis in ("i", "j") if axis not in axes)
        specs = {"in_specs": (P(whole), P(("i", "j"))), "out_specs": P(), "check_vma": check_vma}
        return jax.shard_map(local, mesh=mesh, **specs)(w, x)

    rows = 2 ** (2 - len(axes))
    w, x = jnp.ones((rows, 8), dtype), jnp.stack([jnp.full(8, v) for v in (257.0, -256, 1, 3)])
    grad = jax.jit(jax.grad(ols.autocast(loss_fn, BF16)))(w, x)
    exact = jax.jit(jax.grad(loss_fn))(w.astype(F32), x)
    assert_same_bits(grad, exact.astype(dtype))


def test_what_passed_is_float32_as_a_result_unless_it_is_the_argument_behind_a_stop():
    fun = lambda s: [pass_on(s) for pass_on in (lax.stop_gradient, STACKS["checkpoint_name"][0])]  # noqa: E731
    assert [x.dtype for x in ols.autocast(fun, BF16)(ones(shape(4, dtype=BF16)))] == [BF16, F32]


def test_a_barrier_takes_each_operand_for_itself():
    def fun(w, v, x):
        w, v, x = lax.optimization_barrier((w, v, x))
        return jnp.sum(x @ w) + jnp.sum(jnp.tanh(v)) + jnp.sum(v)

    jaxpr = jax.make_jaxpr(ols.autocast(lambda w, v, x: fun(w, v, x) + jnp.sum(v), BF16))(W, W, X)
    (barrier,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "optimization_barrier")
    assert [x.aval.dtype for x in barrier.invars] == [BF16, F32, F32]  # `v` has another use


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_an_argument_that_a_jit_reshards_has_the_new_sharding(wrap):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.NamedSharding(mesh, P("i"))
    for place in (
        jax.jit(lambda w: w, out_shardings=rows),
        jax.jit(lambda w: w, in_shardings=rows),
    ):
        w = ones(shape(8, 8, dtype=BF16))
        found = wrap(ols.autocast(place, BF16))(w)
        assert found.sharding.is_equivalent_to(place(w).sharding, 2)


@pytest.mark.parametrize("fun", [with_two_uses, through_cond, as_carry])
def test_other_uses_convert_once_outside(fun):
    stored = STACK if fun is with_two_uses else W
    jaxpr = jax.make_jaxpr(ols.autocast(fun, BF16))(stored, X).jaxpr
    converted = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0] is jaxpr.invars[0]
    ]
    assert [eqn.outvars[0].aval.dtype for eqn in converted] == [F32]


def test_eager_calls_with_stored_arguments_compile_once(compilations):
    jitted = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fun(params, x):
        x = jitted(jitted(x, params["a"]), params["b"])
        return scanned(params["stack"], x)

    params, x = ones(({"a": W, "b": W, "stack": STACK}, X))
    cast = ols.autocast(fun, BF16)
    cast(params, x)
    assert compilations  # it counts
    compilations.clear()
    cast(params, x)
    jax.block_until_ready(ols.autocast(fun, BF16)(params, x))
    assert compilations == []
    text = str(jax.make_jaxpr(cast)(params, x))
    assert text.count("tanh") == 2  # the layer is written once for both calls, and the scan


# -- results


def test_a_result_that_is_an_argument_keeps_its_stored_dtype():
    def fun(w, x):
        total, again = jax.jit(lambda w, x: (jnp.sum(x @ w), w))(w, x)
        through = lambda w: jax.checkpoint(lambda w: (w, w + 1))(w)[0]  # noqa: E731
        return {
            "itself": w,
            "through jit": again,
            "through checkpoint": through(w),
            "stopped": lax.stop_gradient(w),
            "stopped in jit": jax.jit(lax.stop_gradient)(w),
            "stopped, through checkpoint": through(lax.stop_gradient(w)),
            "computed, through checkpoint": through(w * 1),
            "computed": w + 0,
            "moved": w.T,
            "loss": total,
        }

    w, x = ones((W, X))
    found = ols.autocast(fun, BF16)(w, x)
    computed = {"computed", "computed, through checkpoint", "moved", "loss"}
    assert {name for name, x in found.items() if x.dtype == F32} == computed
    assert_same_bits(found["through jit"], w)
    for name in found.keys() - computed - {"loss"}:
        grad = jax.grad(lambda w, name=name: jnp.sum(ols.autocast(fun, BF16)(w, x)[name]))(w)
        assert float(jnp.max(grad)) == (0 if "stopped" in name else 1)


def test_an_array_that_a_call_returns_unchanged_is_float32_for_what_follows():
    with_itself = jax.checkpoint(lambda a, x: (a, x + 1))

    def fun(w, v, x):
        return x @ with_itself(w, x)[0] + with_itself(x @ v, x)[0]

    w, x = ones((W, X))
    result = ols.autocast(fun, F32)(w, w, x)
    assert (result.dtype, float(result[0, 0])) == (F32, 32)


def test_arrays_in_two_stored_dtypes_are_joined_in_float32():
    fun = ols.autocast(lambda a, b: jnp.concatenate([a, b]), F32)
    joined = fun(jnp.ones(2, F16), jnp.ones(3, BF16))
    assert_same_bits(joined, jnp.ones(5))


def test_a_result_of_shard_map_is_the_argument_only_if_it_is_placed_alike():
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    for out_spec, dtype in (P(), BF16), (P("i"), F32):
        fun = jax.shard_map(
            lambda w: w, mesh=mesh, in_specs=P(), out_specs=out_spec, check_vma=False
        )
        assert jax.eval_shape(ols.autocast(fun, BF16), W).dtype == dtype


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("jit", [lambda fun: fun, nnx.jit])
def test_variables_of_nnx_keep_the_dtypes_that_they_had(jit):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, param_dtype=BF16, rngs=rngs)
            self.mean = nnx.Variable(jnp.zeros(8, BF16))
            self.wide = nnx.Variable(jnp.zeros(8))

        def __call__(self, x):
            assert self.linear.kernel.dtype == F32
            y = self.linear(x)
            self.mean[...] = self.mean[...] * 0.5 + y.mean(0)
            self.wide[...] += y.mean(0)
            return jnp.mean(y**2)

    model = Model(nnx.Rngs(0))
    loss_and_grads = jit(nnx.value_and_grad(ols.autocast(lambda m, x: m(x), BF16)))
    for _ in range(2):
        loss, grads = loss_and_grads(model, jnp.ones((8, 8)))
    assert loss.dtype == F32
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(BF16)}
    assert (model.linear.kernel.dtype, model.mean.dtype, model.wide.dtype) == (BF16, BF16, F32)
    assert float(jnp.abs(model.mean[...]).max()) > 0


@pytest.mark.integration
class Net(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((8, 8), BF16))
        self.target, self.other = (nnx.Variable(jnp.ones((8, 8))) for _ in range(2))
        self.half = nnx.Variable(jnp.ones((8, 8), F16))
        self.count = nnx.Variable(jnp.int32(0))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_variable_of_nnx_keeps_its_dtype_whatever_is_written_into_it(dtype):
    def loss_fn(net):
        net.target[...], net.other[...] = net.kernel[...], net.half[...] * 2
        net.half[...], net.count[...] = net.kernel[...], net.count[...] + 1
        return jnp.sum(net.kernel[...])

    net = Net()
    ols.autocast(loss_fn, dtype)(net)
    names = "kernel", "target", "other", "half", "count"
    assert [getattr(net, name)[...].dtype for name in names] == [BF16, F32, F32, F16, jnp.int32]
    assert (net.other[...] == 2).all()


# -- code that depends on how its parameters are stored


class Tokens(nnx.Module):
    def __init__(self, **kwargs):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(32, 16, rngs=rngs, **kwargs)
        self.out = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, words):
        return self.out(self.table(words))


def stored(model):
    nnx.update(model, ols.cast(nnx.state(model, nnx.Param), BF16))
    return model


def cast_back(pick):
    """Return a function that looks up rows of a table that it casts back."""
    return lambda table, i: jnp.sum(pick(table.T.astype(BF16), i).astype(F32))


LOOKUPS = {
    "index": cast_back(lambda t, i: t[i]),
    "take": cast_back(lambda t, i: jnp.take(t, i, axis=1)),
    "dynamic_slice": cast_back(lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 2)),
    "jit": cast_back(jax.jit(lambda t, i: t[i])),
    "scan": cast_back(lambda t, i: lax.scan(lambda c, j: (c, t[j]), 0, i)[1]),
    "cond": cast_back(lambda t, i: lax.cond(i[0] > 0, lambda: t[i], lambda: t[i + 1])),
    "checkpoint": cast_back(jax.checkpoint(lambda t, i: t[i])),
    "after moves": cast_back(lambda t, i: t.reshape(2, -1)[::-1][0][i]),
}
NO_LOOKUPS = {
    "in float32": lambda table, i: jnp.sum(table[i]),
    "behind a stop": lambda table, i: jnp.sum(lax.stop_gradient(table).astype(BF16)[i].astype(F32)),
    "of something computed": lambda table, i: jnp.sum((2 * table).astype(BF16)[i].astype(F32)),
}


@pytest.mark.parametrize("name", LOOKUPS | NO_LOOKUPS)
def test_a_lookup_in_a_table_that_is_cast_back_is_warned_of_once(name, recwarn):
    fun = ols.autocast((LOOKUPS | NO_LOOKUPS)[name], BF16)
    for _ in range(2):
        fun(ones(shape(16, 16, dtype=BF16)), jnp.arange(3))
    heard = [str(warning.message) for warning in recwarn]
    assert len(heard) == (name in LOOKUPS)
    for text in heard:
        assert "test_stored_arguments.py:" in text
        assert "`dtype=jnp.float32`" in text
        assert "`nnx.update(model, ols.cast(nnx.state(model, nnx.Param), jnp.bfloat16))`" in text


@pytest.mark.slow
@pytest.mark.integration
def test_the_remedies_for_an_embedding_work():
    words = jnp.zeros(1000, jnp.int32)
    loss = ols.autocast(lambda model: jnp.mean(model(words)), BF16)
    exact = nnx.grad(lambda model: jnp.mean(model(words)))(Tokens())["table"]["embedding"][...]
    with pytest.warns(
        UserWarning, match=r"looks up rows, at .*test_stored_arguments.py:\d+: return self.out"
    ):
        wrong = nnx.grad(loss)(Tokens(param_dtype=BF16))["table"]["embedding"][...]
    assert relative_error(wrong, exact) > 0.5
    for model in (Tokens(param_dtype=BF16, dtype=F32), stored(Tokens())):
        assert relative_error(nnx.grad(loss)(model)["table"]["embedding"][...], exact) < 0.01


@pytest.mark.integration
def test_an_error_about_dtypes_gets_one_note_and_only_with_stored_arguments():
    def fun(w, x):
        return lax.scan(lambda c, _: (c @ w, None), x.astype(BF16), length=2)[0]

    w, x = ones(shape(8, 8, dtype=BF16)), ones(shape(8, 8))
    for wrapped, args, number in (
        (ols.autocast(fun, BF16), (w, x), 1),
        (ols.autocast(ols.autocast(fun, BF16), F32), (w, x), 1),
        (jax.jit(ols.autocast(fun, F32)), (np.asarray(w), x), 1),
        (ols.autocast(fun, BF16), (w.astype(F32), x), 0),
    ):
        with pytest.raises(TypeError, match="carry") as caught:
            wrapped(*args)
        notes = [n for n in getattr(caught.value, "__notes__", []) if "`autocast` reads" in n]
        assert len(notes) == number
    init = nnx.initializers.ones
    cell = nnx.SimpleCell(16, 16, param_dtype=BF16, recurrent_kernel_init=init, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError) as caught:
        ols.autocast(lambda m, x: m(x), BF16)(nnx.RNN(cell), ones(shape(8, 5, 16, dtype=BF16)))
    assert "param_dtype" in "".join(caught.value.__notes__)
    tx = ols.with_bfloat16_state(optax.sgd(0.1))
    with pytest.raises(ValueError, match="inside `autocast`") as caught:  # this library's own
        ols.autocast(lambda w: tx.update(w, tx.init(w), w)[0], BF16)(w)
    assert "`autocast` reads" not in "".join(caught.value.__notes__)


def test_equinox_and_linen_models_stored_in_half_precision():
    def loss_and_grads(x):
        model = ols.cast(eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)), BF16)
        fun = ols.autocast(lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), BF16)
        return eqx.filter_value_and_grad(fun)(model, x)

    loss, grads = eqx.filter_eval_shape(loss_and_grads, shape(16, 8))
    assert loss.dtype == F32
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(BF16)}

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(WORDS, WIDTH)(tokens)
            return nn.Dense(WORDS)(nn.LayerNorm()(x))

    def predict(tokens):
        params = ols.cast(Net().init(jax.random.key(0), tokens), BF16)
        return ols.autocast(Net().apply, BF16)(params, tokens)

    assert jax.eval_shape(predict, tokens()).dtype == F32


# -- what it refuses, and warns about


@pytest.mark.integration
def test_an_array_that_is_closed_over_is_named_once_with_its_number_and_shape(recwarn):
    def fun(tables, x):
        return sum(jnp.sum(x @ table) for table in tables)

    w, x = ones((W, X))
    tables = [w, jnp.ones((16, 32), F16)]
    cast = ols.autocast(functools.partial(fun, tables), BF16)
    cast(x)
    cast(x)
    (warning,) = recwarn
    assert warning.filename == __file__
    assert "closes over 2 arrays in half precision" in str(warning.message)
    assert "float16[16,32]" in str(warning.message)
    recwarn.clear()
    inner = jax.jit(lambda x: jnp.sum(x @ w))
    jax.jit(ols.autocast(inner, BF16))(x)
    assert ["an array, bfloat16[16,16]" in str(w.message) for w in recwarn] == [True]
    recwarn.clear()
    ols.autocast(fun, BF16)(tables, x)
    ols.autocast(lambda x: jnp.sum(x.astype(BF16) @ jnp.zeros((16, 16), BF16)), F32)(x)
    assert not recwarn.list


UPDATES = {
    "with_master_weights": ols.with_master_weights(optax.sgd(0.1)),
    "with_stochastic_rounding": ols.with_stochastic_rounding(optax.sgd(0.1)),
    "with_bfloat16_state": ols.with_bfloat16_state(optax.adam(0.1)),
    "masters in a guard": ols.with_loss_scaling(ols.with_master_weights(optax.sgd(0.1))),
    "a state in a guard": ols.with_skipping(ols.with_bfloat16_state(optax.adam(0.1))),
    "a state in masters": ols.with_master_weights(
        ols.with_bfloat16_state(optax.adam(0.1)), remainders=True
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit])
def test_an_optimizer_that_stores_half_precision_is_not_updated_inside(name, dtype, jit):
    tx = UPDATES[name]
    params = shape(64, 64, dtype=F32 if name == "a state in a guard" else BF16)
    opt_state = jax.eval_shape(tx.init, params)

    def step(params, opt_state):
        grads = jax.grad(lambda params: jnp.mean((params @ params) ** 2))(params)
        return jit(tx.update)(grads, opt_state, params)

    wrapper = name if name.startswith("with_") else r"with_\w+"
    match = f"`{wrapper}` must not be updated inside `autocast`.*Wrap the loss"
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(ols.autocast(step, dtype), params, opt_state)
    jax.eval_shape(step, params, opt_state)  # the mark ends with the trace, even by an exception


def test_nor_if_only_arrays_of_numpy_are_stored_in_half_precision():
    params = np.ones((8, 8), bfloat16)
    update = lambda params: UPDATES["with_stochastic_rounding"].update(params, None, params)  # noqa: E731
    with pytest.raises(ValueError, match="must not be updated inside `autocast`"):
        ols.autocast(update, BF16)(params)


@pytest.mark.integration
def test_the_mark_belongs_to_the_thread_and_other_optimizers_may_be_updated_inside():
    tx, plain = UPDATES["with_master_weights"], ols.with_loss_scaling(optax.adam(0.1))
    params = shape(8, 8, dtype=BF16)
    opt_state, errors = jax.eval_shape(tx.init, params), []

    def update():
        try:
            jax.eval_shape(tx.update, params, opt_state, params)
        except ValueError as error:
            errors.append(error)

    def fun(params):
        thread = threading.Thread(target=update)
        thread.start()
        thread.join()
        update()
        return plain.update(params, plain.init(params), params)

    jax.eval_shape(ols.autocast(fun, BF16), params)
    assert len(errors) == 1


def test_a_model_is_decoded_on_cast_parameters_or_its_cache_is_cast_back():
    cache = jnp.zeros((4, 8), BF16)

    def decode(params, cache, x):
        return x @ params, cache.at[0].set((x @ params)[0])

    params, x = jnp.eye(8, dtype=BF16), jnp.ones((8, 8), BF16)
    assert decode(params, cache, x)[1].dtype == BF16
    assert ols.autocast(decode, BF16)(params, cache, x)[1].dtype == F32


def test_batch_statistics_in_half_precision_come_back_in_float32():
    norm = nn.BatchNorm(use_running_average=False)

    def updates(x):
        variables = ols.cast(norm.init(jax.random.key(0), x), BF16)
        apply = lambda variables, x: norm.apply(variables, x, mutable=["batch_stats"])  # noqa: E731
        return ols.autocast(apply, BF16)(variables, x)[1]

    found = jax.eval_shape(updates, shape(8, 8))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(F32)}
