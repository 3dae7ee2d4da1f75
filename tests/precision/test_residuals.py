"""What the backward pass of a scan keeps under `autocast`, and that it computes nothing twice."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale._precision import products

BF16 = jnp.bfloat16
W = jax.random.normal(jax.random.key(0), (3, 16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (8, 16))


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
    *("cumsum", "custom_vjp_call", "dot_general", "exp", "logistic", "psum", "random_bits"),
    *("random_fold_in", "reduce_max", "reduce_sum", "sort", "tanh", "threefry2x32", "while"),
]


def kept_bytes(jaxpr):
    """Return the bytes that the first scan of a program stacks."""
    scan = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return sum(x.aval.size * x.aval.dtype.itemsize for x in scan.outvars)


@pytest.fixture
def without_rule(monkeypatch):
    """Return a function that runs `fun` without the rule."""

    def run(fun):
        with monkeypatch.context() as patch:
            patch.setattr(products, "with_fewer_residuals", lambda body, _: body)
            return fun()

    return run


@pytest.mark.integration
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_same_and_nothing_expensive_is_computed_twice(name, without_rule):
    def measured():
        step = jax.value_and_grad(ols.autocast(loss_of(LAYERS[name]), BF16), argnums=(0, 1))
        jaxpr = jax.make_jaxpr(step)(W, X).jaxpr
        with jax.disable_jit():
            exact = step(W, X)
        return primitives(jaxpr), kept_bytes(jaxpr), exact, jax.jit(step)(W, X)

    counts, kept, exact, compiled = measured()
    old_counts, old_kept, old_exact, old_compiled = without_rule(measured)
    assert_same_bits(exact, old_exact)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0.02, 0.02), compiled, old_compiled)
    assert [counts[name] for name in EXPENSIVE] == [old_counts[name] for name in EXPENSIVE]
    assert kept < old_kept or name == "a loop without derivative"


def test_what_is_kept_of_a_layer_is_half_precision_and_elementary_functions():
    def layer(x, w):
        y = x @ w
        return x + y * jnp.tanh(y)

    step = jax.grad(ols.autocast(loss_of(layer), BF16))
    jaxpr = jax.make_jaxpr(step)(W, X).jaxpr
    scan = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    stacked = [x.aval.dtype.name for x in scan.outvars if x.aval.shape == (3, 8, 16)]
    assert sorted(stacked) == ["bfloat16", "float32", "float32"]  # the product, tanh, the carry


def test_what_depends_only_on_constants_is_computed_before_the_loop():
    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(h @ jnp.exp(w) + x), None)  # noqa: E731
        return jnp.mean(lax.scan(step, jnp.zeros((8, 16)), xs)[0])

    jaxpr = jax.make_jaxpr(jax.grad(ols.autocast(loss, BF16)))(W[0], jnp.ones((5, 8, 16))).jaxpr
    assert primitives(jaxpr)["exp"] == 1


def test_a_body_that_depends_only_on_constants_is_left_to_jax():
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
def test_bodies_that_decide_for_themselves_are_left_alone(layer, without_rule):
    if layer is with_reference and not hasattr(jax, "new_ref"):
        pytest.skip("this version of JAX has no references")
    cast = lambda: str(jax.make_jaxpr(ols.autocast(loss_of(layer), BF16))(W, X))  # noqa: E731
    own = 1 if layer is decided_by_the_program else 0
    assert cast().count("remat2[") == own
    assert cast().count("remat2[") == without_rule(cast).count("remat2[")


def test_a_body_with_a_collective_keeps_less(without_rule):
    rows = jnp.concatenate([X, X])
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def loss(ws, x):
        def body(x, w):
            y = lax.psum(x @ w, "i") / 2
            return jnp.tanh(y) * y, None

        return lax.psum(jnp.mean(lax.scan(body, x, ws)[0] ** 2), "i")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False)

    def measured():
        step = jax.grad(ols.autocast(lambda ws, x: mapped(ws, x), BF16))  # noqa: PLW0108
        jaxpr = jax.make_jaxpr(step)(W, rows).jaxpr
        (first, *_) = (
            eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"
        )
        return kept_bytes(first), primitives(jaxpr)["psum"], jax.jit(step)(W, rows)

    kept, sums, grads = measured()
    old_kept, old_sums, old_grads = without_rule(measured)
    assert kept < old_kept
    assert sums == old_sums > 0
    np.testing.assert_allclose(grads, old_grads, rtol=0.02, atol=1e-3)
