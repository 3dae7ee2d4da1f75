"""What the backward pass of a scan keeps under `autocast`, and that it computes nothing twice.

`autocast` around a scan chooses what the scan keeps. Around the layer inside, it casts the same
products, and JAX chooses: that is the oracle.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal, shape
from jax import lax
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits

import optax_lossscale as ols

BF16 = jnp.bfloat16
W, X = shape(3, 16, 16), shape(8, 16)


@jax.custom_vjp
def sorted_product(x, w):
    return jnp.sort(x @ w)


sorted_product.defvjp(
    lambda x, w: (sorted_product(x, w), (x, w)),
    lambda saved, g: (g @ saved[1].T, saved[0].T @ g),
)


def dropout(x, w):
    key = jax.random.fold_in(jax.random.key(0), lax.convert_element_type(x[0, 0], jnp.int32))
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jax.nn.relu(x @ w), 0)


def layer_norm(x, w):
    y = x @ w
    return (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)


LAYERS = {
    "tanh": lambda x, w: jnp.tanh(x @ w),
    "silu": lambda x, w: jax.nn.silu(x @ w),
    "gelu in jit": lambda x, w: jax.jit(lambda x: jax.nn.gelu(x @ w))(x),
    "softmax": lambda x, w: jax.nn.softmax(x @ w) @ w,
    "layer norm": layer_norm,
    "dropout": dropout,
    "sort and cumulative sum": lambda x, w: jnp.sort(x @ w) * jnp.cumsum(x @ w, 0),
    "custom_vjp": lambda x, w: jnp.tanh(sorted_product(x, w) @ w),
    "conditional": lambda x, w: lax.cond(
        x[0, 0] > 0, lambda x: jnp.sort(x @ w), lambda x: jnp.tanh(x @ w) * 2, x
    ),
    "scan in scan": lambda x, w: lax.scan(lambda h, row: (jnp.tanh(h @ w) * row[None], None), x, x)[
        0
    ],
    "a loop without derivative": lambda x, w: (
        jnp.tanh(x @ w)
        * lax.stop_gradient(lax.while_loop(lambda x: jnp.max(x) > 9, lambda x: x @ w, x))
    ),
    "two results": lambda x, w: (jnp.tanh(x @ w), jnp.mean(x)),
    "a number": lambda x, w: (jnp.tanh(x @ w), 0.0),
    "the input": lambda x, w: (x, jnp.tanh(x @ w)),
}


def loss_of(layer):
    def body(x, w):
        result = layer(x, w)
        return result if isinstance(result, tuple) else (result, None)

    def loss(ws, x):
        x, rest = lax.scan(body, x, ws)
        return jnp.mean(x**2) + sum(jnp.mean(leaf) for leaf in jax.tree.leaves(rest))

    return loss


def primitives(jaxpr, times=1):
    """Return how often each primitive runs."""
    counts = collections.Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        counts[name] += times
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(param, "eqns"):
                inner = getattr(param, "jaxpr", param)
                counts += primitives(inner, times * eqn.params.get("length", 1))
    return counts


EXPENSIVE = [
    *("cumsum", "custom_vjp_call", "dot_general", "random_bits", "scan"),
    *("random_fold_in", "reduce_max", "reduce_sum", "sort", "while"),
]


def kept_bytes(jaxpr):
    """Return the bytes that the first scan of a program stacks."""
    scan = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return sum(x.aval.size * x.aval.dtype.itemsize for x in scan.outvars)


def around_and_inside(layer):
    """Return the step whose scan keeps less, and the one whose scan keeps what JAX chooses."""
    losses = ols.autocast(loss_of(layer), BF16), loss_of(ols.autocast(layer, BF16))
    return [jax.value_and_grad(loss, argnums=(0, 1)) for loss in losses]


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("layer norm", "softmax") else pytest.mark.slow)
        for name in LAYERS
    ],
)
def test_gradients_are_the_same_and_nothing_expensive_is_computed_twice(name):
    ws, x = normal(W) / 4, normal(X, seed=1)

    def measured(step):
        jaxpr = jax.make_jaxpr(step)(ws, x).jaxpr
        with jax.disable_jit():
            exact = step(ws, x)
        return primitives(jaxpr), kept_bytes(jaxpr), exact, jax.jit(step)(ws, x)

    (counts, kept, exact, compiled), by_jax = map(measured, around_and_inside(LAYERS[name]))
    assert_same_bits(exact, by_jax[2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0.02, 0.02), compiled, by_jax[3])
    assert [counts[name] for name in EXPENSIVE] == [by_jax[0][name] for name in EXPENSIVE]
    assert kept < by_jax[1] or name == "a loop without derivative"


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        # The product, tanh and the carry.
        (lambda x, y: x + y * jnp.tanh(y), ["bfloat16", "float32", "float32"]),
        # The product and the carry, but no broadcast.
        (lambda x, y: x + y * jnp.broadcast_to(y[:, :1], y.shape), ["bfloat16", "float32"]),
    ],
)
def test_a_layer_keeps_half_precision_products_and_elementary_functions(layer, kept):
    step = jax.grad(ols.autocast(loss_of(lambda x, w: layer(x, x @ w)), BF16))
    jaxpr = jax.make_jaxpr(step)(W, X).jaxpr
    scan = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    stacked = [x.aval.dtype.name for x in scan.outvars if x.aval.shape == (3, 8, 16)]
    assert sorted(stacked) == kept
    assert "optimization_barrier" not in jax.jit(step).lower(W, X).as_text()


def test_what_depends_only_on_constants_is_computed_before_the_loop():
    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(h @ jnp.exp(jnp.exp(w)) + x), None)  # noqa: E731
        return jnp.mean(lax.scan(step, jnp.zeros((8, 16)), xs)[0])

    traced = jax.jit(jax.grad(ols.autocast(loss, BF16))).trace(shape(16, 16), shape(5, 8, 16))
    assert primitives(traced.jaxpr.jaxpr)["exp"] == 2
    assert "optimization_barrier" not in traced.lower().as_text()


def test_a_scan_without_products_keeps_what_jax_chooses():
    def loss(w, x):
        x, _ = lax.scan(lambda h, _: (jnp.tanh(h) * h, None), x @ w, length=3)
        return jnp.sum(x)

    ours, plain = (
        jax.make_jaxpr(jax.grad(fun, argnums=1))(shape(16, 16), X).jaxpr
        for fun in (ols.autocast(loss, BF16), loss)
    )
    assert kept_bytes(ours) == kept_bytes(plain) > 0


def test_a_body_that_depends_only_on_constants_has_the_same_derivative():
    def loss(w, x):
        carry, products = lax.scan(lambda carry, _: (carry, x @ w), 1.0, length=3)
        return jnp.sum(products) * carry

    grad = jax.grad(ols.autocast(loss, BF16))(jnp.ones((16, 16)), jnp.ones((8, 16)))
    np.testing.assert_array_equal(grad, 3 * 8)


def decided_by_the_program(x, w):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)


def with_effect(x, w):
    jax.debug.callback(lambda _: None, x[0, 0])
    return jnp.tanh(x @ w)


def with_reference(x, w):
    reference = jax.new_ref(x)
    reference[...] = jnp.tanh(reference[...] @ w)
    return reference[...]


def with_while(x, w):
    return jnp.tanh(LAYERS["a loop without derivative"](x, w))


@pytest.mark.integration
@pytest.mark.parametrize("layer", [decided_by_the_program, with_effect, with_reference, with_while])
def test_a_scan_whose_body_chooses_itself_keeps_what_jax_chooses(layer):
    if layer is with_reference and not hasattr(jax, "new_ref"):
        pytest.skip("this version of JAX has no references")
    ours, by_jax = (jax.make_jaxpr(step)(W, X).jaxpr for step in around_and_inside(layer))
    assert primitives(ours) == primitives(by_jax)
    assert kept_bytes(ours) == kept_bytes(by_jax) > 0


@pytest.mark.slow
def test_a_body_with_a_collective_keeps_less():
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def body(x, w):
        y = lax.psum(x @ w, "i") / 2
        return jnp.tanh(y) * y, None

    def mapped(body):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False
        )
        def loss(ws, x):
            return lax.psum(jnp.mean(lax.scan(body, x, ws)[0] ** 2), "i")

        return loss

    ws, rows = normal(W) / 4, normal(shape(16, 16), seed=1)

    def measured(loss):
        step = jax.grad(loss)
        jaxpr = jax.make_jaxpr(step)(ws, rows).jaxpr
        (first, *_) = (
            eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"
        )
        return kept_bytes(first), primitives(jaxpr)["psum"], jax.jit(step)(ws, rows)

    kept, sums, grads = measured(ols.autocast(mapped(body), BF16))
    kept_by_jax, sums_by_jax, grads_by_jax = measured(mapped(ols.autocast(body, BF16)))
    assert kept < kept_by_jax
    assert sums == sums_by_jax > 0
    np.testing.assert_allclose(grads, grads_by_jax, rtol=0.02, atol=1e-3)
