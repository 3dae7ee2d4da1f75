"""`autocast`: which products run in half precision, to which bits, and inside which structures."""

import functools
import gc
import operator
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal, shape
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale.diagnostics import precision_report

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
EIGHT = P("i")


def dtypes(fun, *args):
    return sorted(precision_report(fun, *args))


# -- which products

X, W = shape(16, 32), shape(32, 24)
IMAGES = shape(2, 3, 8, 8)
PARAMS = [shape(32, 32)] * 3


@pytest.fixture(scope="module")
def x():
    return normal(X)


@pytest.fixture(scope="module")
def w():
    return normal(W, seed=1)


@pytest.fixture(scope="module")
def params():
    return [w / 6 for w in normal(PARAMS)]


conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")


def experts(x, w):
    return lax.ragged_dot(x, w, jnp.array([9, 3, 4], jnp.int32))


def after_an_effect(x):
    jax.debug.callback(lambda _: None, x[0, 0])
    return jnp.tri(16) @ x


def looped(x, w):
    def body(carry):
        count, x = carry
        return count + 1, jnp.tanh(x @ w)

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


def convolved(channels, filters, *, size=6, window=3, count=1):
    kernel = shape(filters, channels // count, window, window)
    return functools.partial(conv, feature_group_count=count), [
        shape(2, channels, size, size),
        kernel,
    ]


# A function, and the shapes of its arguments.
CAST = {
    "dense": (jnp.dot, [X, W]),
    "dense, as einsum": (
        functools.partial(jnp.einsum, "...i,ij->...j"),
        [shape(2, 3, 9, 8), shape(8, 24)],
    ),
    "just long enough": (jnp.dot, [shape(8, 8), shape(8, 8)]),
    "attention of heads": (
        functools.partial(jnp.einsum, "bqhd,bkhd->bhqk"),
        [shape(2, 8, 3, 8), shape(2, 8, 3, 8)],
    ),
    "half precision beside float32": (
        lambda x, w: lax.dot(x, w.astype(F16), preferred_element_type=F32),
        [X, W],
    ),
    "LoRA of rank 8": (lambda x, a, b: x @ a @ b, [X, shape(32, 8), shape(8, 32)]),
    "experts": (experts, [X, shape(3, 32, 24)]),
    "experts of equal sizes": (
        lambda x, w: lax.ragged_dot(x, w, jnp.full(2, 8, jnp.int32)),
        [X, shape(2, 32, 24)],
    ),
    "a stem of three channels": convolved(3, 8),
    "a depthwise convolution": convolved(16, 16, count=16),
    "a grouped convolution": convolved(16, 8, count=2),
    "one pixel each of many": convolved(32, 8, size=2, window=1),
    "vmap inside": (jax.vmap(jnp.dot, in_axes=(0, None)), [shape(2, 8, 32), W]),
    "a vector under vmap inside": (jax.vmap(jnp.dot, in_axes=(0, None)), [X, W]),
    "scores of default precision": (functools.partial(jnp.dot, precision="default"), [X, W]),
    "an array of NumPy that the code holds": (lambda x: x @ np.ones((32, 8), np.float32), [X]),
    "a carry that starts as a constant": (
        lambda x: lax.scan(lambda h, _: (h @ x, None), jnp.eye(16), length=2)[0],
        [shape(16, 16)],
    ),
    "weights stored in half precision": (jnp.dot, [X, shape(32, 24, dtype=BF16)]),
}
STAYS = {
    "seven rows": (jnp.dot, [shape(7, 32), W]),
    "seven columns": (jnp.dot, [X, shape(32, 7)]),
    "seven terms": (jnp.dot, [shape(16, 7), shape(7, 24)]),
    "an outer product": (jnp.outer, [shape(32), shape(24)]),
    "an inner product": (jnp.vdot, [shape(32), shape(32)]),
    "a matrix times a vector": (jnp.dot, [X, shape(32)]),
    "a value head": (jnp.dot, [X, shape(32, 1)]),
    "coordinates": (jnp.dot, [shape(64, 3), shape(3, 64)]),
    "rotations": (functools.partial(jnp.einsum, "nij,nj->ni"), [shape(64, 3, 3), shape(64, 3)]),
    "many small products": (jnp.matmul, [shape(64, 4, 8), shape(64, 8, 4)]),
    "experts of few columns": (experts, [X, shape(3, 32, 4)]),
    "filters of few channels": convolved(16, 7),
    "weights that are few": convolved(16, 16, count=16, window=2),
    "one output position": (
        lambda x, w: conv(x, w, padding="VALID"),
        [shape(7, 8, 3, 3), shape(8, 8, 3, 3)],
    ),
    "a precision of its own": (functools.partial(jnp.dot, precision="highest"), [X, W]),
    "a float32 result of half operands": (
        lambda x, w: jnp.dot(x.astype(F16), w.astype(F16), preferred_element_type=F32),
        [X, W],
    ),
    "half precision": (lambda x, w: x.astype(BF16) @ w.astype(BF16), [X, W]),
    "a while_loop": (looped, [shape(16, 24), shape(24, 24)]),
    "patches": (lambda x: lax.conv_general_dilated_patches(x, (3, 3), (1, 1), "SAME"), [IMAGES]),
    "a triangle of ones": (lambda x: jnp.tril(jnp.ones((16, 16))) @ x, [X]),
    "the identity": (lambda x: jnp.eye(16) @ x, [X]),
    "a Fourier matrix": (
        lambda x: jnp.cos(jnp.outer(jnp.arange(32.0), jnp.arange(16.0))) @ x,
        [X],
    ),
    "numbers of a constant key": (
        lambda x: jax.random.normal(jax.random.key(0), (16, 16)) @ x,
        [X],
    ),
    "a constant through jit": (lambda x: jax.jit(lambda x, a: a.T @ x)(x, jnp.eye(16)), [X]),
    "a constant from jit": (
        lambda x: operator.matmul(*jax.jit(lambda x: (jnp.tri(16), 2 * x))(x)),
        [X],
    ),
    "a constant from a map over devices": (
        lambda x: operator.matmul(*mapped(lambda x: (jnp.tri(16), 2 * x), P(), P())(x)),
        [X],
    ),
    "a constant after an effect": (after_an_effect, [X]),
    "a constant of a scan": (
        lambda x: lax.scan(lambda x, a: (a @ x, None), x, jnp.ones((3, 16, 16)) / 16)[0],
        [X],
    ),
    "integers": (jnp.dot, [shape(8, 8, dtype=jnp.int32), shape(8, 8, dtype=jnp.int32)]),
    "complex numbers": (jnp.dot, [shape(*s.shape, dtype=jnp.complex64) for s in (X, W)]),
    "fp8": (
        functools.partial(lax.dot, preferred_element_type=F32),
        [shape(*s.shape, dtype=jnp.float8_e4m3fn) for s in (X, W)],
    ),
    "a Fourier transform": (lambda x: jnp.fft.rfft(x).real, [X]),
    "solve": (lambda a, b: jnp.linalg.solve(a + 8 * jnp.eye(16), b), [shape(16, 16), X]),
    "no product at all": (jnp.cumsum, [X]),
}
quiet = pytest.mark.filterwarnings("ignore:Only .*of the floating-point operations:UserWarning")


@pytest.mark.parametrize("name", CAST)
def test_matrix_products_that_fill_the_hardware_are_cast(name):
    fun, shapes = CAST[name]
    assert dtypes(ols.autocast(fun, F16), *shapes) == ["float16"]


@pytest.mark.each_case
@pytest.mark.slow
@quiet
@pytest.mark.parametrize("name", STAYS)
def test_every_other_product_keeps_its_dtype_and_its_bits(name):
    fun, shapes = STAYS[name]
    args = normal(shapes)
    cast = ols.autocast(fun, F16)
    assert dtypes(cast, *args) == dtypes(fun, *args)
    assert_same_bits(jax.jit(cast)(*args), jax.jit(fun)(*args))


@quiet
@pytest.mark.usefixtures("x64")
def test_float64_products_stay_in_float64():
    x = jnp.ones((8, 8), jnp.float64)
    assert dtypes(ols.autocast(jnp.dot, F16), x, x) == ["float64"]
    assert dtypes(ols.autocast(jnp.dot, F16), x.astype(F32), x.astype(F32)) == ["float16"]


@quiet
def test_a_default_precision_set_at_the_call_counts():
    cast = ols.autocast(jnp.dot, F16)
    for option, dtype in (
        ("highest", "float32"),
        ("tensorfloat32", "float32"),
        ("default", "float16"),
    ):
        with jax.default_matmul_precision(option):
            assert dtypes(cast, X, W) == [dtype]


# -- to which bits


def by_hand(product, dtype):
    return lambda *args: product(*(x.astype(dtype) for x in args)).astype(F32)


@pytest.mark.parametrize(
    ("name", "dtype", "wrap"),
    [
        ("dense", F16, lambda fun: fun),
        ("dense", BF16, jax.jit),
        ("attention of heads", F16, jax.jit),
        ("a stem of three channels", BF16, jax.jit),
    ],
)
def test_results_and_gradients_equal_casts_by_hand_bit_for_bit(name, dtype, wrap):
    product, shapes = CAST[name]
    args = normal(shapes)

    def loss_and_grads(product):
        def loss_fn(*args):
            return jnp.sum(jnp.tanh(product(*args)) ** 2)

        return wrap(jax.value_and_grad(loss_fn, argnums=(0, 1)))(*args)

    found = loss_and_grads(ols.autocast(product, dtype))
    assert_same_bits(found, loss_and_grads(by_hand(product, dtype)))
    assert {grad.dtype.name for grad in found[1]} == {"float32"}


def mlp(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


HALF = ols.autocast(mlp, F16)


def mlp_by_hand(params, x):
    for w in params:
        x = jnp.tanh((x.astype(F16) @ w.astype(F16)).astype(F32))
    return jnp.mean(x**2)


# How each differentiates a function of parameters and an input, given a direction too.
MODES = {
    "value": lambda fun, p, x, _: fun(p, x),
    "grad": lambda fun, p, x, _: jax.grad(fun)(p, x),
    "grad of jit": lambda fun, p, x, _: jax.grad(jax.jit(fun))(p, x),
    "jvp": lambda fun, p, x, v: jax.jvp(lambda p: fun(p, x), (p,), (v,)),
    "linearize": lambda fun, p, x, v: jax.linearize(lambda p: fun(p, x), p)[1](v),
    "vjp": lambda fun, p, x, _: jax.vjp(fun, p, x)[1](jnp.float32(2)),
    "hvp": lambda fun, p, x, v: jax.jvp(lambda p: jax.grad(fun)(p, x), (p,), (v,)),
    "hessian": lambda fun, p, x, _: jax.hessian(lambda w: fun([w], x[:, :8]))(p[0][:8, :8]),
    "vmap over parameters": lambda fun, p, x, _: jax.vmap(lambda p: fun(p, x))(
        jax.tree.map(lambda w: jnp.stack([w, 2 * w]), p)
    ),
    "grad of checkpoint": lambda fun, p, x, _: jax.grad(jax.checkpoint(fun))(p, x),
}


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_differentiation_equals_casts_by_hand_bit_for_bit(mode, params, x):
    run = jax.jit(MODES[mode], static_argnums=0)
    args = params, x, normal(PARAMS, seed=1)
    assert_same_bits(run(HALF, *args), run(mlp_by_hand, *args))


def test_backward_products_run_in_half_precision_and_gradients_are_float32(params, x):
    report = precision_report(jax.value_and_grad(HALF), PARAMS, X)
    assert {dtype: products.count for dtype, products in report.items()} == {"float16": 8}
    assert {grad.dtype.name for grad in jax.grad(HALF)(params, x)} == {"float32"}


@pytest.mark.slow
def test_gradients_of_several_uses_of_a_weight_are_added_in_float32():
    def loss_fn(w, x):
        return lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, x)[0]

    xs = jnp.ones((4096, 8, 8))
    grad = jax.jit(jax.grad(ols.autocast(loss_fn, F16)))(jnp.ones((8, 8)), xs)
    np.testing.assert_array_equal(grad, 8.0 * 4096)
    cast_array = jax.jit(jax.grad(lambda w: loss_fn(w.astype(F16), xs.astype(F16)).astype(F32)))
    with jax.numpy_dtype_promotion("standard"):
        assert float(cast_array(jnp.ones((8, 8)))[0, 0]) < 8.0 * 4096
    twice = ols.autocast(lambda w: jnp.sum((xs[0] / 8) @ w) + jnp.sum((256 * xs[0]) @ w), F16)
    np.testing.assert_array_equal(jax.grad(twice)(xs[0]), 1 + 2048)  # in float16, 2048


def test_parameters_in_half_precision_get_gradients_in_their_dtype(params, x):
    params = ols.cast(params, BF16)

    def loss_fn(params, x):
        return mlp([w.astype(F32) for w in params], x)

    grads = jax.grad(ols.autocast(loss_fn, BF16))(params, x)
    assert {grad.dtype.name for grad in grads} == {"bfloat16"}
    assert dtypes(jax.grad(ols.autocast(loss_fn, BF16)), params, X) == ["bfloat16"]


# -- through which structures


def with_effects(x, w):
    y = x @ w
    jax.debug.callback(lambda total: CALLED.append(float(total)), jnp.sum(y) * 0 + 1)
    return y


CALLED = []


def with_references(x, w):
    reference = jax.new_ref(x) if hasattr(jax, "new_ref") else None
    if reference is None:
        return x @ w
    reference[...] = reference[...] @ w
    return reference[...]


def kernel(x, y):
    y[...] = 2 * x[...]


def with_pallas(x, w):
    y = x @ w
    out = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(y)


@functools.partial(jax.jit, static_argnames="power", keep_unused=True)
def jitted(x, w, unused=None, power=1):
    del unused
    return (x @ w) ** power


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2,), ("i",), (kind,), devices=jax.devices()[:2])


def mapped(fun, in_specs, out_specs, *, check_vma=True):
    return jax.shard_map(
        fun, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


def sharded(x, w, *, check_vma):
    return mapped(jnp.dot, (EIGHT, P()), EIGHT, check_vma=check_vma)(x, w)


def constrained(x, w):
    return lax.with_sharding_constraint(x @ w, jax.NamedSharding(mesh(), EIGHT))


def pmapped(x, w):
    return jax.pmap(jnp.dot, in_axes=(0, None))(x.reshape(2, 8, 32), w).reshape(16, 24)


def of_platform(x, w):
    return lax.platform_dependent(x, w, cpu=jnp.dot, default=lambda x, w: 2 * (x @ w))


SQUARE = [shape(16, 24), shape(24, 24)]
STRUCTURES = {
    "jit": (jitted, [X, W]),
    "jit of jit": (jax.jit(lambda x, w: jitted(x + 0, w, power=2)), [X, W]),
    "inlined": (jax.jit(jnp.dot, inline=True), [X, W]),
    "jit with shardings": (constrained, [X, W]),
    "checkpoint": (jax.checkpoint(jnp.dot), [X, W]),
    "scan": (
        lambda x, w: lax.scan(lambda x, _: (jnp.tanh(x @ w), x), x, length=3),
        SQUARE,
    ),
    "map": (lambda x, w: lax.map(lambda x: x @ w, x), [shape(3, 8, 32), W]),
    "fori_loop with static bounds": (
        lambda x, w: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x),
        SQUARE,
    ),
    "cond": (lambda x, w: lax.cond(x[0, 0] > 0, jnp.dot, lambda x, w: x @ w * 2, x, w), [X, W]),
    "switch": (lambda x, w: lax.switch(1, [jnp.dot, lambda x, w: -(x @ w)], x, w), [X, W]),
    "platform_dependent": (of_platform, [X, W]),
    "shard_map": (functools.partial(sharded, check_vma=True), [X, W]),
    "shard_map without check_vma": (functools.partial(sharded, check_vma=False), [X, W]),
    "pmap": (pmapped, [X, W]),
    "named_call": (jax.named_call(jnp.dot, name="layer"), [X, W]),
    "a callback": (with_effects, [X, W]),
    "references": (with_references, SQUARE),
    "a Pallas kernel": (with_pallas, [X, W]),
    "a product that is weakly typed": (
        lambda x, y: jnp.full((8, 8), y) @ jnp.full((8, 8), x),
        [0.5, 2.0],
    ),
}


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*includes a pmap:UserWarning")  # jax 0.7
@pytest.mark.parametrize("name", STRUCTURES)
def test_products_are_cast_inside_every_structure_and_no_type_changes(name):
    fun, shapes = STRUCTURES[name]
    args = jax.tree.map(jnp.asarray, normal(shapes))
    cast = ols.autocast(fun, F16)
    assert dtypes(cast, *args) == ["float16"]
    exact = jax.tree.leaves(fun(*args))
    jax.effects_barrier()
    CALLED.clear()  # by `fun` itself
    for run in (cast, jax.jit(cast)):
        found = jax.tree.leaves(run(*args))
        for a, b in zip(found, exact, strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * float(jnp.max(jnp.abs(b))))
    if name not in ("a callback", "references", "jit", "jit of jit", "a Pallas kernel"):
        total = lambda *args: jnp.sum(jax.tree.leaves(cast(*args))[0])  # noqa: E731
        assert dtypes(jax.grad(total), *args) == ["float16"]
    if name == "a callback":
        jax.effects_barrier()
        assert len(CALLED) == 2  # eager, and compiled


def test_results_keep_their_sharding_with_explicit_axes(x, w):
    both = mesh(AxisType.Explicit)
    x = jax.device_put(x, jax.NamedSharding(both, P(None, "i")))
    w = jax.device_put(w, jax.NamedSharding(both, P("i", None)))

    def fun(x, w):
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=jax.NamedSharding(both, P("i", None)))

    cast = jax.jit(ols.autocast(fun, F16))
    assert jax.typeof(cast(x, w)) == jax.typeof(jax.jit(fun)(x, w))
    assert dtypes(cast, x, w) == ["float16"]


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="newer than jax 0.7.0")
@pytest.mark.parametrize("uses", [1, 2])
def test_rows_of_a_stored_argument_are_looked_up_under_an_explicit_mesh(uses):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        table = jax.device_put(jnp.ones((32, 24), jnp.bfloat16), P(None, "i"))

        def loss_fn(table):
            # JAX looks rows up with automatic axes.
            rows = [table.at[jnp.arange(4)].get(out_sharding=P(None, "i")) for _ in range(uses)]
            return 2 * sum(map(jnp.sum, rows))

        grads = jax.jit(jax.grad(ols.autocast(loss_fn, jnp.bfloat16)))(table)
    assert jax.typeof(grads) == jax.typeof(table)
    np.testing.assert_array_equal(grads[:4], 2 * uses)
    np.testing.assert_array_equal(grads[4:], 0)


def test_products_saved_by_a_checkpoint_policy_are_in_half_precision(params, x):
    policy = jax.checkpoint_policies.checkpoint_dots

    def loss_fn(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(jax.checkpoint(layer, policy=policy), x, jnp.stack(params))[0])

    _, pullback = jax.vjp(ols.autocast(loss_fn, F16), params, x)
    stacked = [leaf.dtype.name for leaf in jax.tree.leaves(pullback) if leaf.shape == (3, 16, 32)]
    assert sorted(stacked) == ["float16", "float32"]  # the results, and the carries


def test_a_checkpoint_name_directly_after_a_product_names_the_half_precision_result(params, x):
    def loss_fn(w, x):
        y = checkpoint_name((x @ w).reshape(4, 4, 32).transpose(1, 0, 2), "hidden")
        z = checkpoint_name(jnp.tanh(y), "activation")  # behind an activation: float32
        return jnp.mean((z.reshape(16, 32) @ w) ** 2)

    for name, dtype in ("hidden", "float16"), ("activation", "float32"):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        keeping = ols.autocast(jax.checkpoint(loss_fn, policy=policy), F16)
        _, pullback = jax.vjp(keeping, params[0], x)
        kept = [x.dtype.name for x in jax.tree.leaves(pullback) if x.shape == (4, 4, 32)]
        assert kept == [dtype]
        expected = jax.grad(ols.autocast(loss_fn, F16))(params[0], x)
        assert_same_bits(jax.grad(keeping)(params[0], x), expected)


def test_a_checkpoint_name_may_hold_two_products_or_a_number_or_a_product_that_is_used_again(x, w):
    def fun(product, x, w):
        joined = checkpoint_name(jnp.concatenate([product(x, w), product(2 * x, w)]), "joined")
        again = product(x, w)
        return joined, checkpoint_name(again, "again") + again, checkpoint_name(2.0, "number")

    found = jax.jit(ols.autocast(functools.partial(fun, jnp.dot), F16))(x, w)
    assert_same_bits(found, jax.jit(functools.partial(fun, by_hand(jnp.dot, F16)))(x, w))


def test_debug_nans_blames_the_same_operation_as_without_autocast(w):
    def fun(x, w):
        y = jnp.log(x @ w - 1e9)  # NaN
        return jnp.sum(jnp.nan_to_num(y))

    messages = []
    for each in (fun, ols.autocast(fun, F16)):
        with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
            each(jnp.ones((16, 32)), w)
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]
    assert "encountered in log" in messages[0]


def test_functions_with_custom_rules_are_left_alone():
    @jax.custom_vjp
    def own(x, w):
        return x @ w

    own.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

    @jax.custom_jvp
    def tangent(x, w):
        return x @ w

    tangent.defjvp(lambda primals, tangents: (primals[0] @ primals[1], tangents[0] @ primals[1]))
    batched = jax.custom_batching.custom_vmap(lambda x, w: x @ w)
    batched.def_vmap(lambda _, __, x, w: (x @ w, True))
    solved = lambda x, w: lax.custom_linear_solve(lambda y: w @ y, x, lambda _, b: w.T @ b)  # noqa: E731
    for fun, shapes in (own, W), (tangent, W), (batched, W), (solved, shape(16, 16)):
        cast = ols.autocast(lambda x, w, fun=fun: fun(x, w), F16)
        with pytest.warns(UserWarning, match="has a rule of its own"):
            assert dtypes(cast, X, shapes) == ["float32"]


# -- how often, and for how long


def test_under_jit_the_function_is_traced_once(params, x):
    traces = []
    step = jax.jit(
        jax.value_and_grad(ols.autocast(lambda p, x: (traces.append(0), mlp(p, x))[1], F16))
    )
    for _ in range(3):
        step(params, x)
    assert len(traces) == 1


def test_eager_calls_compile_inner_functions_once(x, w, compilations):
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w))
    plain = jax.jit(jnp.tanh)
    cast = ols.autocast(lambda x, w: plain(inner(x, w)), F16)
    cast(x, w)
    assert compilations  # it counts
    compilations.clear()
    cast(x, w)
    ols.autocast(lambda x, w: plain(inner(x, w)), F16)(x, w)
    assert compilations == []


@pytest.mark.slow
def test_nothing_is_kept_when_the_function_is_gone(x, w):
    class Big:
        pass

    def made():
        big, own = Big(), jnp.array(w)
        fun = jax.jit(lambda x: (big, x @ own)[1])
        cast = jax.jit(
            ols.autocast(lambda x: lax.cond(x[0, 0] > 0, fun, lambda x: -fun(x), x), F16)
        )
        cast(x)
        ols.autocast(fun, F16)(x)
        return weakref.ref(big), weakref.ref(own)

    big, own = made()
    jax.clear_caches()
    gc.collect()
    assert (big(), own()) == (None, None)


@pytest.mark.slow
def test_it_works_in_threads_and_with_all_debug_checks_of_jax(params, x):
    found = []
    threads = [threading.Thread(target=lambda: found.append(HALF(params, x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(float, found))) == 1 < len(found)
    with jax.checking_leaks(), jax.debug_nans(True):
        assert_same_bits(
            jax.jit(jax.grad(HALF))(params, x), jax.jit(jax.grad(mlp_by_hand))(params, x)
        )
    with jax.disable_jit():
        assert dtypes(HALF, PARAMS, X) == ["float16"]
        np.testing.assert_allclose(HALF(params, x), found[0], rtol=1e-2)


def test_it_can_be_exported_with_symbolic_sizes_which_count_as_large(params, x):
    (n,) = export.symbolic_shape("n")
    given = PARAMS, shape(n, 32)
    exported = export.export(jax.jit(HALF))(*given)
    np.testing.assert_allclose(exported.call(params, x), HALF(params, x), rtol=1e-6)
    assert "xf16>" in exported.mlir_module()
    report = precision_report(HALF, *given)
    assert report["float16"].flops == 3 * 2 * 8 * 32 * 32


# -- what is warned about


def layers(precisions, dtype=None):
    """Return a function of equal layers with these precisions."""

    def fun(x, w):
        for precision in precisions:
            y = x if dtype is None else x.astype(dtype)
            x = jnp.dot(y, w if dtype is None else w.astype(dtype), precision=precision)
        return x.astype(F32)

    return fun


KEPT = "highest"
SQUARE = shape(32, 32)


@pytest.mark.parametrize(
    ("precisions", "share"),
    [
        ([None, KEPT], None),  # a last layer that is kept on purpose
        ([None, *[KEPT] * 9], None),
        ([None, *[KEPT] * 10], "9%"),
        ([KEPT], "0%"),  # as in code for TPUs
        ([KEPT] * 3, "0%"),
        (["high"], "0%"),
    ],
)
def test_products_that_the_code_keeps_do_not_count_unless_nearly_all_are_kept(precisions, share):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        jax.eval_shape(ols.autocast(layers(precisions), BF16), SQUARE, SQUARE)
        with jax.default_matmul_precision("highest"):
            jax.eval_shape(ols.autocast(layers([None]), BF16), SQUARE, SQUARE)
    *ours, by_setting = (str(warning.message) for warning in given)
    assert "`jax_default_matmul_precision` is 'highest'" in by_setting
    assert [text[: len(f"Only {share}")] for text in ours] == ([f"Only {share}"] if share else [])


def test_a_layer_that_is_kept_by_a_context_does_not_count():
    def fun(x, w):
        with jax.default_matmul_precision("highest"):
            y = x @ w
        return y @ w

    assert dtypes(ols.autocast(fun, BF16), SQUARE, SQUARE) == ["bfloat16", "float32"]


@pytest.mark.parametrize("precision", [None, KEPT])
def test_layers_in_float16_do_not_count_as_bfloat16(precision):
    with pytest.warns(UserWarning, match=r"Only 0% .* float16 .* Leave out the layer's `dtype`"):
        jax.eval_shape(ols.autocast(layers([precision], F16), BF16), SQUARE, SQUARE)
    for layer, dtype in (F16, F16), (BF16, BF16), (BF16, F16):
        jax.eval_shape(ols.autocast(layers([None], layer), dtype), SQUARE, SQUARE)
    inner = ols.autocast(layers([precision and "default"]), F16)  # and an inner one decides
    jax.eval_shape(ols.autocast(jax.jit(inner), BF16), SQUARE, SQUARE)


# -- one in another, and float32


def test_an_inner_autocast_overrides_an_outer_one():
    def fun(x, w):
        return ols.autocast(jnp.dot, BF16)(x, w), ols.autocast(jnp.dot, F32)(x, w), x @ w

    report = precision_report(ols.autocast(fun, F16), X, W)
    assert {name: products.count for name, products in report.items()} == {
        "bfloat16": 1,
        "float32": 1,
        "float16": 1,
    }
    with jax.named_scope("autocast_float32"):  # a scope of the user's
        assert dtypes(ols.autocast(jnp.dot, F16), X, W) == ["float16"]
    inner = ols.autocast(jax.jit(lambda x, w: lax.map(lambda x: x @ w, x)), F32)
    with pytest.warns(UserWarning, match="An inner `autocast` to float32 keeps it"):
        assert dtypes(ols.autocast(inner, F16), shape(2, 8, 32), W) == ["float32"]


def test_autocast_to_float32_casts_nothing(params, x):
    assert_same_bits(ols.autocast(mlp, F32)(params, x), mlp(params, x))
    given = str(jax.make_jaxpr(mlp)(PARAMS, X))
    assert str(jax.make_jaxpr(ols.autocast(mlp, "float32"))(PARAMS, X)) == given


@pytest.mark.slow
@pytest.mark.integration
def test_the_products_of_muon_run_in_half_precision():
    muon = optax.contrib.muon(1e-3)
    half_update = ols.autocast(muon.update, BF16)
    params = normal({"a": shape(64, 64), "b": shape(32, 64)})
    step = jax.tree.map(jnp.tanh, params), muon.init(params), params
    (products,) = precision_report(half_update, *step).items()
    assert (products[0], products[1].count) == ("bfloat16", 30)
    (exact, _), (half, _) = jax.jit(muon.update)(*step), jax.jit(half_update)(*step)
    off = optax.tree.norm(optax.tree.sub(half, exact)) / optax.tree.norm(exact)
    assert 0.015 < off < 0.03  # docs/recipes.md
    tx = ols.with_skipping(optax.GradientTransformationExtraArgs(muon.init, half_update))
    assert dtypes(tx.update, step[0], tx.init(params), params) == ["bfloat16"]
