"""`autocast` and what a function is given: objects of every framework, and the one warning."""

import functools
import re
import types

import equinox as eqx
import flax.errors
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal, shape
from flax import nnx
from jax import lax
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale.diagnostics import first_nonfinite, precision_report

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
X = normal(shape(16, 8))


def dtypes(fun, *args):
    return sorted(precision_report(fun, *args))


# -- flax.nnx


class Block(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 8, rngs=rngs)
        self.same = self.inner  # shared
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))
        self.scale = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        self.calls[...] += 1
        self.seen = nnx.Variable(jnp.mean(x))  # a new attribute
        return self.dropout(self.norm(self.same(self.inner(x)))) * self.scale[None]


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def states(*objects):
    return [jax.tree.map(jnp.asarray, nnx.to_pure_dict(nnx.state(each))) for each in objects]


def key_free(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("jit", [lambda fun: fun, nnx.jit])
@pytest.mark.parametrize("training", [True, False])
def test_state_of_nnx_is_updated_as_without_autocast(jit, training):
    def run(cast):
        model, metric = Block(nnx.Rngs(0)), nnx.metrics.Average()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        rngs, count = nnx.Rngs(1), nnx.Variable(jnp.int32(3))
        model.train() if training else model.eval()

        def fun(model, metric, more, x):
            noise = 1e-3 * jax.random.normal(more["rngs"](), x.shape)
            more["count"][...] += 1
            loss = loss_fn(model, x + noise)
            metric.update(values=loss)
            return loss

        loss_and_grads = nnx.value_and_grad(cast(fun))
        for _ in range(2):
            loss, grads = jit(loss_and_grads)(model, metric, {"rngs": rngs, "count": count}, X)
            optimizer.update(model, grads)
        return loss, key_free(states(model, metric, optimizer, rngs)), count[...], model.seen[...]

    plain, cast = run(lambda fun: fun), run(lambda fun: ols.autocast(fun, F16))
    assert jax.tree.structure(plain) == jax.tree.structure(cast)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(cast), strict=True):
        assert a.dtype == b.dtype
        is_float = jnp.issubdtype(a.dtype, jnp.floating)  # counts and keys are equal
        # Adam moves a weight by 0.01 in each of two steps, whatever the size of its gradient.
        np.testing.assert_allclose(a, b, rtol=0.02 * is_float, atol=0.04 * is_float)
    np.testing.assert_allclose(plain[0], cast[0], rtol=0.02)
    assert plain[0] != cast[0]
    assert plain[2] == 5


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_objects_of_nnx_from_an_outer_trace_can_be_read_but_not_written_as_without_autocast(jit):
    w, scale, rngs = jnp.ones((8, 8)), nnx.Param(jnp.ones((16, 8))), nnx.Rngs(0)

    def loss(w, scale, rngs, draws, label):
        assert label == "a text"
        noise = jax.random.normal(rngs(), (16, 8)) if draws else 0.0
        return jnp.sum((scale[...] + noise) @ w)

    def step(loss, draws):
        loss = functools.partial(loss, draws=draws, label="a text")
        return jit(jax.value_and_grad(loss))(w, scale, rngs)

    assert_same_bits(step(ols.autocast(loss, jnp.float16), draws=False), step(loss, draws=False))
    pytest.importorskip("flax", minversion="0.12", reason="0.11 lets Variables leak")
    for fun in (loss, ols.autocast(loss, jnp.float16)):
        with pytest.raises(flax.errors.TraceContextError, match="different trace level"):
            step(fun, draws=True)
    assert int(rngs.default.count[...]) == 0

    def evaluated(w, norm):
        norm.eval()
        return jnp.sum(norm(w))

    for fun in (evaluated, ols.autocast(evaluated, jnp.float16)):
        with pytest.raises(flax.errors.TraceContextError, match="different trace level"):
            jax.value_and_grad(fun)(w, nnx.BatchNorm(8, rngs=nnx.Rngs(0)))


@pytest.mark.slow
@pytest.mark.integration
def test_it_works_in_a_training_step_of_nnx():
    model = Block(nnx.Rngs(0))
    tx = ols.with_loss_scaling(optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, F16), transform=nnx.value_and_grad)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = loss_and_grads(optimizer.opt_state, model, x)
        optimizer.update(model, grads, value=loss)
        return loss

    losses = [step(model, optimizer, X) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert int(model.calls[...]) == 20
    assert dtypes(ols.autocast(loss_fn, F16), model, X) == ["float16"]


@pytest.mark.integration
def test_an_optimizer_of_nnx_can_be_updated_inside():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    cast = ols.autocast(step, F16)
    losses = [cast(model, optimizer, X) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert int(optimizer.step[...]) == 10
    nested = ols.autocast(cast, BF16)
    assert nested(model, optimizer, X) < losses[-1]
    assert int(optimizer.step[...]) == 11


# -- Linen, Haiku, Equinox


@pytest.mark.slow
@pytest.mark.integration
def test_linen_with_collections_and_random_streams():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))
            return nn.Dense(8)(nn.Dropout(0.5, deterministic=False)(x))

    net, key = Net(), jax.random.key(1)
    variables = jax.jit(net.init)({"params": key, "dropout": key}, X)

    def fun(variables, x, key):
        y, updates = net.apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean(y**2), updates

    value_and_grad = jax.value_and_grad(ols.autocast(fun, F16), has_aux=True)
    (_, updates), grads = jax.jit(value_and_grad)(variables, X, key)
    assert {x.dtype.name for x in jax.tree.leaves((updates, grads))} == {"float32"}
    assert dtypes(value_and_grad, variables, X, key) == ["float16"]
    statistics = updates["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(
        statistics,
        jax.jit(fun)(variables, X, key)[1]["batch_stats"]["BatchNorm_0"]["mean"],
        rtol=0.1,
        atol=1e-4,
    )


@pytest.mark.integration
def test_gradients_of_a_haiku_model_run_in_half_precision():
    net = hk.transform(lambda x: hk.nets.MLP([16, 8])(hk.LayerNorm(-1, True, True)(x)))
    key = jax.random.key(1)
    params = jax.eval_shape(net.init, key, X)
    loss = ols.autocast(lambda params, key, x: jnp.mean(net.apply(params, key, x) ** 2), F16)
    assert dtypes(jax.grad(loss), params, key, X) == ["float16"]


@pytest.mark.slow
@pytest.mark.integration
def test_equinox_with_its_transform():
    model = eqx.filter_jit(eqx.nn.MLP)(8, 8, 16, 2, key=jax.random.key(1))

    def fun(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    grad = ols.value_and_grad(ols.autocast(fun, F16), transform=eqx.filter_value_and_grad)
    _, grads = eqx.filter_jit(grad)(ols.init(8), model, X)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}
    assert dtypes(ols.autocast(fun, F16), model, X) == ["float16"]
    with pytest.warns(UserWarning, match="Is there a `jax.vmap`"):
        assert_same_bits(ols.autocast(model, F16)(X[0]), model(X[0]))


# -- what is no array of JAX


@pytest.mark.filterwarnings("ignore:Only .*of the floating-point operations:UserWarning")
def test_everything_but_arrays_of_jax_is_passed_through():
    thing, array = object(), np.ones((8, 8), np.float32)
    given = (array, "mean", True, 3, 2.5, None, thing, types.SimpleNamespace(x=1), jnp.tanh)

    def fun(*args, key, **kwargs):
        assert all(a is b for a, b in zip(args[1:], given, strict=True))
        if kwargs["how"] == "mean" and args[2] == "mean" and args[3]:  # decided by Python
            return {"loss": jnp.mean(args[0] @ args[1]), "aux": args[1:], "key": key, "n": 3}
        raise AssertionError

    key = jax.random.key(1)
    found = ols.autocast(fun, F16)(X, *given, how="mean", key=key)
    assert all(a is b for a, b in zip(found["aux"], given, strict=True))
    assert (found["n"], found["key"]) == (3, key)
    assert isinstance(found["loss"], jax.Array)
    assert ols.autocast(lambda: "x", F16)() == "x"


@pytest.mark.parametrize("dtype", [F16, F32])
def test_it_keeps_the_signature_and_the_name_of_the_function(dtype):
    def fun(params, x, *, mode="train"):
        """Documented."""
        return jnp.sum(params @ x) if mode == "train" else None

    cast = ols.autocast(fun, dtype)
    assert (cast.__name__, cast.__doc__) == ("fun", "Documented.")
    step = jax.jit(ols.value_and_grad(cast), static_argnames="mode")
    loss, _ = step(ols.init(8), X[:8], X[:8], mode="train")
    np.testing.assert_allclose(loss, fun(X[:8], X[:8]), rtol=0.02)
    assert ols.autocast(functools.partial(fun, X[:8]), dtype)(X[:8]).shape == ()


# -- with the library's own functions


def test_diagnostics_of_a_cast_function_name_lines():
    params = {"first": jnp.full((8, 8), 200.0), "head": jnp.ones((8, 8))}

    def fun(params, x):
        hidden = (x * 100) @ params["first"]  # overflows
        return jnp.mean(hidden @ params["head"])

    found = first_nonfinite(ols.autocast(fun, F16), params, jnp.ones((8, 8)))
    assert (found.layer, found.operation, found.dtype) == (
        "params['first']",
        "dot_general",
        "float16",
    )
    assert "# overflows" in found.source
    assert first_nonfinite(fun, params, jnp.ones((8, 8))) is None
    products = precision_report(ols.autocast(fun, F16), params, jnp.ones((8, 8)))
    assert "# overflows" in products["float16"].source


@pytest.mark.integration
def test_parameters_with_remainders_learn_through_a_loss_under_autocast():
    params = ols.cast({"w": jnp.eye(8)}, BF16)
    tx = ols.with_loss_scaling(ols.with_master_weights(optax.adam(1e-2), remainders=True))

    def fun(params, x):
        return jnp.mean((x @ params["w"].astype(F32)) ** 2)

    loss_and_grads = ols.value_and_grad(ols.autocast(fun, BF16))
    opt_state = tx.init(params)
    first = fun(params, X)

    @jax.jit
    def step(params, opt_state):
        _, grads = loss_and_grads(opt_state, params, X)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(5):
        params, opt_state = step(params, opt_state)
    assert fun(params, X) < first
    assert params["w"].dtype == BF16


# -- the one warning


def own(name):
    def fun(x, w):
        return x @ w

    fun.__name__ = fun.__qualname__ = name
    fun = jax.custom_jvp(fun)
    fun.defjvp(lambda primals, tangents: (primals[0] @ primals[1], tangents[0] @ primals[1]))
    return fun


def product(dtype, result=F32):
    def fun(x, w):
        dimensions = (((1,), (0,)), ((), ()))
        return lax.dot_general(x, w.astype(dtype), dimensions, preferred_element_type=result)

    return fun


def looped(x, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]


BIG, BIG_ROWS, ROW = shape(64, 64), shape(4, 64), shape(64)
WARNED = {
    "its sizes": (
        lambda x, w: x @ w,
        (BIG_ROWS, BIG),
        r"It has 4 rows, 64 columns and a contraction over 64\. Each must be at least 8\. `diag",
    ),
    "its sizes, in a function of jit": (
        jax.jit(lambda x, w: x @ w),
        (BIG_ROWS, BIG),
        r"It has 4 rows, 64 columns and a contraction over 64\. Each must be at least 8\. `diag",
    ),
    "vmap": (
        lambda x, w: x @ w,
        (ROW, BIG),
        r"It has 1 rows, 64 columns .* Is there a `jax.vmap` around `autocast`\?",
    ),
    "precision": (
        lambda x, w: jnp.dot(x, w, precision="highest"),
        (BIG, BIG),
        r"Its precision is not the default one \(its own argument\)",
    ),
    "a rule of its own": (own("kernel"), (BIG, BIG), r"It is inside `kernel`, which has a rule"),
    "a library's rule of its own": (
        lambda x, w: jnp.linalg.pinv(x) + w,
        (BIG, BIG),
        r"It is inside a function, which has a rule of its own \(`custom_jvp_call`\)",
    ),
    "in a loop": (
        lambda x, w: lax.map(lambda x: own("inner")(x, w), x[None]),
        (BIG, BIG),
        r"It is inside `inner`, which has a rule",
    ),
    "while_loop": (
        looped,
        (BIG, BIG),
        r"It is inside a `while_loop`\. Leave it so if a tolerance .* If a count or a token does",
    ),
    "complex numbers": (
        lambda x, w: (x + 0j) @ (w + 0j),
        (BIG, BIG),
        r"Its operands are complex64 and its result is complex64\.",
    ),
    "weights in int8": (
        product(jnp.int8),
        (BIG, BIG),
        r"Its operands are float32 and int8 and its result is float32\.",
    ),
    "weights in fp8": (
        product(jnp.float8_e4m3fn),
        (BIG, BIG),
        r"Its operands are float32 and float8_e4m3fn and its result is float32\.",
    ),
    "a result in half precision": (
        product(F32, BF16),
        (BIG, BIG),
        r"Its operands are float32 and its result is bfloat16\.",
    ),
    "one half operand and a half result": (
        product(BF16, BF16),
        (BIG, BIG),
        r"Its operands are float32 and bfloat16 and its result is bfloat16\.",
    ),
    "experts with a float32 result": (
        lambda x, w: lax.ragged_dot(
            x.astype(BF16),
            w[None].astype(BF16),
            jnp.full(1, 64, jnp.int32),
            preferred_element_type=F32,
        ),
        (BIG, BIG),
        r"Its operands are bfloat16 and its result is float32\.",
    ),
    "two others": (
        lambda x, w: (x[:4] @ w, w[:7] @ x, x[:3] @ w),
        (BIG, BIG),
        r"It has 7 rows, 64 columns",
    ),
    "half operands with a float32 result": (
        lambda x, w: product(BF16)(x.astype(BF16), w),
        (BIG, BIG),
        r"Its operands are bfloat16 and its result is float32\.",
    ),
    "a fixed operand": (
        lambda x, w: jnp.tri(64) @ x + w,
        (BIG, BIG),
        r"One operand depends on no argument of `fun`",
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", WARNED)
def test_the_warning_gives_reason_share_and_line_once(name, recwarn):
    fun, args, reason = WARNED[name]

    def both(x, w):
        cast = jnp.reshape(w, (-1, 8))[:8]
        return fun(x, w), cast @ cast

    cast = ols.autocast(both, F16)
    jax.eval_shape(cast, *args)
    jax.eval_shape(cast, *args)
    (warning,) = recwarn
    assert warning.filename == __file__
    text = str(warning.message)
    total = sum(p.flops for p in precision_report(both, *args).values())
    assert text.startswith(f"Only {2 * 8**3 / total:.0%} of the floating-point operations")
    assert __file__ in text or name in ("a rule of its own", "in a loop")
    assert re.search(reason, text), text


def test_the_warning_names_the_option_that_sets_the_precision():
    with (
        jax.default_matmul_precision("tensorfloat32"),
        pytest.warns(UserWarning, match=r"`jax_default_matmul_precision` is 'tensorfloat32'"),
    ):
        jax.eval_shape(ols.autocast(jnp.dot, BF16), BIG, BIG)


@pytest.mark.usefixtures("x64")
def test_the_warning_names_float64():
    with pytest.warns(UserWarning, match="Its operands are float64 and its result is float64"):
        jax.eval_shape(ols.autocast(jnp.dot, BF16), *[shape(64, 64, dtype="float64")] * 2)


def wide(x, w):
    """Return a product of half precision whose sums are in float32, as kernels have them."""
    return jnp.matmul(x.astype(BF16), w.astype(BF16), preferred_element_type=F32)


def with_derivative(define, derivative):
    fun = define(lambda x, w: jnp.sum(wide(x, w)))
    fun.defvjp(*derivative) if define is jax.custom_vjp else fun.defjvp(derivative)
    return fun


OWN_RULES = {
    "custom_vjp": with_derivative(
        jax.custom_vjp,
        (lambda x, w: (jnp.sum(wide(x, w)), (x, w)), lambda saved, g: (g * saved[0], g * saved[1])),
    ),
    "custom_jvp": with_derivative(
        jax.custom_jvp, lambda primals, _: (jnp.sum(wide(*primals)), jnp.sum(wide(*primals)))
    ),
    "while_loop": lambda x, w: lax.while_loop(
        lambda y: jnp.max(y) < 0, lambda y: wide(y, w) / 64, x
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", OWN_RULES)
def test_a_product_in_a_rule_of_its_own_counts_by_its_operands(name):
    jax.eval_shape(ols.autocast(OWN_RULES[name], BF16), BIG, BIG)


def test_a_plain_product_with_a_float32_result_counts_by_its_result():
    with pytest.warns(UserWarning, match="So both backward products are float32"):
        jax.eval_shape(ols.autocast(wide, BF16), BIG, BIG)


def test_no_warning_without_products_or_if_half_of_them_are_cast_or_narrower(recwarn):
    def fun(x, w):
        return x @ w, x[:1] @ w, jnp.sin(x), lax.dot(x.astype("int8"), w.astype("int8"))

    jax.eval_shape(ols.autocast(fun, F16), BIG, BIG)
    jax.eval_shape(ols.autocast(jnp.sin, F16), BIG)
    jax.eval_shape(ols.autocast(jnp.outer, F32), ROW, ROW)
    half = lambda x, w: (x @ w, jnp.dot(x, w, precision="highest"))  # noqa: E731
    jax.eval_shape(ols.autocast(half, F16), BIG, BIG)
    assert list(recwarn) == []
