"""What the backward pass of a scan keeps under `autocast`, and that it computes nothing twice.

`autocast` around a scan chooses what the scan keeps. Around the layer inside, it casts the same
products, and JAX chooses: that is the oracle.
"""

import collections
import functools
import itertools

import jax
import jax.export
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


def looped(x):
    """Return the result of a `while_loop` around another loop."""

    def turn(carry):
        return carry[0] + 1, lax.fori_loop(0, 2, lambda _, y: jnp.sin(y) / 2 + x, carry[1])

    return lax.while_loop(lambda carry: carry[0] < 3, turn, (0, x))[1]


def scanned(x):
    return lax.fori_loop(0, 4, lambda _, y: jnp.sin(y) / 2 + x, x)


def with_rule(function, forward, backward, **options):
    """Return a function whose derivative is written by hand."""
    fun = jax.custom_vjp(function)
    fun.defvjp(
        lambda x: ((y := forward(x)), (x, y * 2)),
        lambda saved, g: (backward(saved[1]) * g,),
        **options,
    )
    return fun


def with_tangent_rule(function, rule):
    fun = jax.custom_jvp(function)

    @fun.defjvp
    def _(primals, tangents):
        y = rule(*primals)
        return y, jnp.cos(y) * tangents[0]

    return fun


def dropout(x, w):
    key = jax.random.fold_in(jax.random.key(0), lax.convert_element_type(x[0, 0], jnp.int32))
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jax.nn.relu(x @ w), 0)


def of_all_types(x, w):
    def turn(carry):
        count, key, nothing = carry
        return count + 1, jax.random.split(key)[0], nothing

    key = jax.random.fold_in(jax.random.key(0), lax.convert_element_type(x[0, 0], jnp.int32))
    start = 0, key, x[:, :0]
    start = lax.while_loop(lambda carry: carry[0] < 3, turn, lax.stop_gradient(start))
    (count, key, nothing), _ = lax.scan(lambda carry, _: (turn(carry), None), start, length=2)
    noise = jax.random.normal(key, x.shape)
    return jnp.tanh(x @ w) * noise * count.astype(x.dtype) + jnp.sum(nothing)


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


LAYERS = {
    "tanh": lambda x, w: jnp.tanh(x @ w),
    "silu": lambda x, w: jax.nn.silu(x @ w),
    "gelu in jit": lambda x, w: jax.jit(lambda x: jax.nn.gelu(x @ w))(x),
    "exact gelu": lambda x, w: jax.nn.gelu(x @ w, approximate=False),
    "softplus of relu": lambda x, w: jax.nn.softplus(jax.nn.relu(x @ w)),
    "softmax": lambda x, w: jax.nn.softmax(x @ w) @ w,
    "layer norm": lambda x, w: normalized(x @ w),
    "dropout": dropout,
    "sort and cumulative sum": lambda x, w: jnp.sort(x @ w) * jnp.cumsum(x @ w, 0),
    "custom_vjp": lambda x, w: jnp.tanh(sorted_product(x, w) @ w),
    "conditional": lambda x, w: lax.cond(
        x[0, 0] > 0, lambda x: jnp.sort(x @ w), lambda x: jnp.tanh(x @ w) * 2, x
    ),
    "scan in scan": lambda x, w: lax.scan(lambda h, row: (jnp.tanh(h @ w) * row[None], None), x, x)[
        0
    ],
    "scans in scan": lambda x, w: lax.scan(lambda h, _: (scanned(h) * jnp.exp(h), None), x @ w, x)[
        0
    ],
    "a loop without derivative": lambda x, w: (
        jnp.tanh(x @ w)
        * lax.stop_gradient(lax.while_loop(lambda x: jnp.max(x) > 9, lambda x: x @ w, x))
    ),
    "loops in rules": lambda x, w: with_rule(looped, looped, scanned)(
        with_tangent_rule(looped, scanned)(jax.nn.gelu(x @ w)) @ w
    ),
    "keys, integers and nothing": of_all_types,
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
    *("cumsum", "custom_vjp_call", "dot_general", "random_bits", "random_fold_in", "random_split"),
    *("reduce_max", "reduce_sum", "scan", "sort", "while"),
]


def kept_bytes(jaxpr):
    """Return the bytes that the first scan of a program over three layers stacks."""
    scans = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    scan = next(eqn for eqn in scans if eqn.params["length"] == 3)
    return sum(x.aval.size * x.aval.dtype.itemsize for x in scan.outvars)


def around_and_inside(layer):
    """Return the step whose scan keeps less, and the one whose scan keeps what JAX chooses."""
    losses = ols.autocast(loss_of(layer), BF16), loss_of(ols.autocast(layer, BF16))
    return [jax.value_and_grad(loss, argnums=(0, 1)) for loss in losses]


@pytest.mark.each_case
@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("layer norm", "softmax") else pytest.mark.slow)
        for name in LAYERS
    ],
)
def test_gradients_are_the_same_and_nothing_expensive_runs_twice(name):
    ws, x = normal(W) / 4, normal(X, seed=1)
    steps = around_and_inside(LAYERS[name])

    def measured(step):
        jaxpr = jax.make_jaxpr(step)(ws, x).jaxpr
        with jax.disable_jit():
            return primitives(jaxpr), kept_bytes(jaxpr), step(ws, x)

    (counts, kept, exact), by_jax = map(measured, steps)
    assert_same_bits(exact, by_jax[2])
    assert [counts[name] for name in EXPENSIVE] == [by_jax[0][name] for name in EXPENSIVE]
    assert kept < by_jax[1]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("name", dict.fromkeys(["scan in scan", "loops in rules", *LAYERS]))
def test_compiled_gradients_are_the_same_up_to_fusion(name):
    ws, x = normal(W) / 4, normal(X, seed=1)
    step, _ = around_and_inside(LAYERS[name])
    with jax.disable_jit():
        exact = step(ws, x)
    for a, b in zip(*map(jax.tree.leaves, (jax.jit(step)(ws, x), exact)), strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))  # noqa: PLW2901
        assert np.linalg.norm(a - b) <= 0.03 * np.linalg.norm(b)


# Their results are kept in float32, although the derivative does not read them.
KEPT_IN_FULL = {
    "eight products": lambda x, w: normalized(sum(x @ w for _ in range(8))),
    "sort and sum": lambda x, w: normalized(x + jnp.sort(x @ w) * 0.3 + jnp.cumsum(x, 0) / 8),
    "gamma": lambda x, w: normalized(x + jax.random.gamma(jax.random.key(0), jnp.exp(x @ w))),
    "cumulative sum": lambda x, w: x + jnp.cumsum(x @ w, 0),
    "median": lambda x, w: (x @ w) - jnp.median(x @ w, -1, keepdims=True),
    "sorted rows": lambda x, w: jnp.tanh(x @ w) + x[jnp.argsort(x[:, 0])],
    "scan": lambda x, w: lax.scan(lambda h, y: (jnp.cumsum(h * y), jnp.sort(h)), x[0], x @ w)[1],
}


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize("rows", ["stored", "float32", "constant"])
@pytest.mark.parametrize("name", KEPT_IN_FULL)
def test_a_body_never_keeps_more_than_jax_chooses(name, rows):
    def kept(around, inside):
        body = inside(KEPT_IN_FULL[name])
        loss = around(
            (lambda w, x: jnp.sum(lax.scan(lambda x, _: (body(x, w), None), x, length=4)[0]))
            if rows == "constant"
            else (lambda ws, x: jnp.sum(lax.scan(lambda x, w: (body(x, w), None), x, ws)[0] ** 3))
        )
        dtype = BF16 if rows == "stored" else jnp.float32
        w = jax.ShapeDtypeStruct((16, 16) if rows == "constant" else (4, 16, 16), dtype)
        pullback = jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], w, shape(64, 16))
        # The weights exist anyway.
        arrays = [x for x in jax.tree.leaves(pullback) if (x.shape, x.dtype) != (w.shape, dtype)]
        return sum(x.size * x.dtype.itemsize for x in arrays)

    cast, same = functools.partial(ols.autocast, dtype=BF16), lambda fun: fun
    assert kept(around=cast, inside=same) <= kept(around=same, inside=cast)


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        # The product, which is kept anyway, and the carry.
        (lambda x, y: x + y * jnp.tanh(y), ["bfloat16", "float32"]),
        (lambda x, y: x + y * jnp.broadcast_to(y[:, :1], y.shape), ["bfloat16", "float32"]),
        # The elementary function instead of a product that is kept for nothing else.
        (lambda x, y: x + jnp.tanh(y), ["float32", "float32"]),
    ],
)
def test_elementary_functions_are_repeated_if_that_keeps_much_less(layer, kept):
    step = jax.grad(ols.autocast(loss_of(lambda x, w: layer(x, x @ w)), BF16))
    for rows in (8, *jax.export.symbolic_shape("rows")):
        jaxpr = jax.make_jaxpr(step)(W, shape(rows, 16)).jaxpr
        scan = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        stacked = [x.aval.dtype.name for x in scan.outvars if x.aval.shape == (3, rows, 16)]
        assert sorted(stacked) == kept
    assert "optimization_barrier" not in jax.jit(step).lower(W, X).as_text()


def test_an_elementary_function_that_is_repeated_in_a_scan_needs_no_other_loop():
    def layer(x, w):
        return x + lax.scan(lambda h, _: ((y := h @ w) * jnp.tanh(y), None), x, length=2)[0]

    ours, by_jax = (jax.make_jaxpr(step)(W, X).jaxpr for step in around_and_inside(layer))
    assert primitives(ours)["scan"] == primitives(by_jax)["scan"] > 0
    assert kept_bytes(ours) < kept_bytes(by_jax)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.gelu])
def test_what_depends_only_on_constants_is_computed_before_the_loop(activation):
    def layer(h, w):
        turned = lax.scan(lambda h, _: (jax.nn.silu(h * jnp.exp(w[:8])), None), h, length=2)[0]
        return activation(turned @ jnp.exp(jnp.exp(w)))

    def loss(w, xs):
        return jnp.mean(lax.scan(lambda h, x: (layer(h, w) + x, None), xs[0], xs)[0])

    traced = jax.jit(jax.grad(ols.autocast(loss, BF16))).trace(shape(16, 16), shape(5, 8, 16))
    assert primitives(traced.jaxpr.jaxpr)["exp"] == 3
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


def test_a_scan_inside_that_computes_nothing_is_left_alone():
    def layer(x, w):
        return jnp.tanh(lax.scan(lambda carry, row: (carry, row), 1.0, x)[1] @ w)

    ours, by_jax = (jax.make_jaxpr(step)(W, X).jaxpr for step in around_and_inside(layer))
    assert primitives(ours)["scan"] == primitives(by_jax)["scan"]
    assert kept_bytes(ours) <= kept_bytes(by_jax)


def decided_by_the_program(x, w):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)


def with_effect(x, w):
    jax.debug.callback(lambda _: None, x[0, 0])
    return jnp.tanh(x @ w)


def with_reference(x, w):
    reference = jax.new_ref(x)
    reference[...] = jnp.tanh(reference[...] @ w)
    return reference[...]


@pytest.mark.integration
@pytest.mark.parametrize("layer", [decided_by_the_program, with_effect, with_reference])
def test_a_scan_whose_body_chooses_itself_keeps_what_jax_chooses(layer):
    if layer is with_reference and not hasattr(jax, "new_ref"):
        pytest.skip("this version of JAX has no references")
    ours, by_jax = (jax.make_jaxpr(step)(W, X).jaxpr for step in around_and_inside(layer))
    assert primitives(ours) == primitives(by_jax)
    assert kept_bytes(ours) == kept_bytes(by_jax) > 0


WHERE = {"the function": (1, 0, 0), "the forward rule": (0, 1, 0), "the backward rule": (0, 0, 1)}
PLACES = {
    "directly": lambda fun: fun,
    "in a jit": jax.jit,
    "in a conditional": lambda fun: lambda x: lax.cond(x[0, 0] > 0, fun, jnp.tanh, x),
    "in a checkpoint": jax.checkpoint,
    "in a rule": lambda fun: with_rule(fun, fun, jnp.cos),
    "in a map": lambda fun: lambda x: lax.map(fun, x[None])[0],
    "without a derivative": lambda fun: lambda x: jnp.tanh(x) * lax.stop_gradient(fun(x)),
}


def functions_with(loop):
    """Return functions with a loop in each place of their derivative."""
    return {
        where: with_rule(*(loop if there else jnp.cos for there in three))
        for where, three in (WHERE | {"all": (1, 1, 1)}).items()
    } | {
        "no rule": scanned,
        "the rule for tangents": with_tangent_rule(jnp.cos, loop),
        "an optimized rule": with_rule(loop, loop, jnp.cos, optimize_remat=True),
    }


def each_place():
    for place, where in itertools.product(PLACES, functions_with(looped)):
        is_quick = place == "in a jit" and where in ("all", "no rule")
        is_typical = place == "directly" or where == "all"
        marks = () if is_quick else pytest.mark.slow if is_typical else pytest.mark.exhaustive
        yield pytest.param(place, where, id=f"{where}, {place}", marks=marks)


@pytest.mark.each_case
@pytest.mark.parametrize(("place", "where"), list(each_place()))
def test_a_gradient_has_no_more_loops_than_without_autocast(place, where):
    # A `while_loop` needs a rule for its derivative.
    for loop in (scanned,) if where == "no rule" else (looped, scanned):
        fun = PLACES[place](functions_with(loop)[where])

        def layer(x, w, fun=fun):
            return jnp.tanh(fun(jax.nn.gelu(x @ w)) @ w)

        losses = [loss_of(layer), loss_of(ols.autocast(layer, BF16))]
        losses.append(ols.autocast(losses[0], BF16))
        jaxprs = [jax.make_jaxpr(jax.grad(loss))(W, X).jaxpr for loss in losses]
        plain, _, ours = map(primitives, jaxprs)
        assert all(ours[name] <= plain[name] for name in EXPENSIVE)
        is_left_alone = place == "in a checkpoint"
        assert is_left_alone or kept_bytes(jaxprs[2]) < kept_bytes(jaxprs[1])


def test_a_recurrent_network_computes_no_function_twice():
    def lstm(h, c, x, w):
        i, f, g, o = jnp.split(h @ w[:16] + x @ w[16:], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def gru(h, c, x, w):
        (r, z, n, _), (s, y, m, _) = (jnp.split(a, 4, -1) for a in (h @ w[:16], x @ w[16:]))
        z = jax.nn.sigmoid(z + y)
        return (1 - z) * jnp.tanh(n * jax.nn.sigmoid(r + s) + m) + z * h, c

    def rnn(h, c, x, w):
        return jnp.tanh(h @ w[:16, :16] + x @ w[16:, :16]), c

    for cell in (rnn, lstm, gru):

        def loss(w, xs, cell=cell):
            start = jnp.zeros((8, 16)), jnp.zeros((8, 16))
            return jnp.mean(lax.scan(lambda c, x: (cell(*c, x, w), c[0]), start, xs)[1] ** 2)

        args = shape(32, 64), shape(5, 8, 16)
        steps = jax.grad(loss), jax.grad(ols.autocast(loss, BF16))
        plain, ours = (primitives(jax.make_jaxpr(step)(*args).jaxpr) for step in steps)
        assert all(plain[name] == ours[name] > 0 for name in ("tanh", "scan", "dot_general"))
        assert plain["logistic"] == ours["logistic"]


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@jax.custom_vjp
def by_blocks(q, k, v):
    """Return `attention`, computed in a loop over blocks of the keys."""
    return by_blocks_forward(q, k, v)[0]


def by_blocks_forward(q, k, v):
    def add_block(carry):
        i, out, total = carry
        block = [lax.dynamic_slice_in_dim(x, 8 * i, 8, 1).astype(jnp.float32) for x in (k, v)]
        weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), block[0]))
        out += jnp.einsum("bhqk,bkhd->bqhd", weights, block[1])
        return i + 1, out, total + weights.sum(-1)

    start = 0, jnp.zeros(q.shape), jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))
    _, out, total = lax.while_loop(lambda carry: carry[0] < q.shape[1] // 8, add_block, start)
    out = (out / jnp.swapaxes(total, 1, 2)[..., None]).astype(q.dtype)
    return out, (q, k, v, out, jnp.log(total))


def by_blocks_backward(saved, g):
    return jax.vjp(attention, *saved[:3])[1](g)


by_blocks.defvjp(by_blocks_forward, by_blocks_backward)


def transformer(activation, attention, *, by_hand):
    """Return the loss of a transformer in float32, or cast to bfloat16 by hand."""
    up = (lambda x: x.astype(jnp.float32)) if by_hand else (lambda x: x)
    down = (lambda x: x.astype(BF16)) if by_hand else (lambda x: x)

    def norm(x):
        y = up(x)
        y -= y.mean(-1, keepdims=True)
        return down(y * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6))

    def layer(x, w):
        heads = (a.reshape(*x.shape[:2], 4, -1) for a in jnp.split(norm(x) @ w["qkv"], 3, -1))
        x += attention(*heads).reshape(x.shape) @ w["out"]
        return x + activation(norm(x) @ w["up"]) @ w["down"], None

    def loss(ws, x):
        return jnp.mean(up(norm(lax.scan(layer, down(x), jax.tree.map(down, ws))[0])) ** 2)

    return loss


@pytest.mark.integration
@pytest.mark.parametrize(
    ("activation", "attention", "share"),
    [
        (jax.nn.gelu, attention, 0.52),
        (functools.partial(jax.nn.gelu, approximate=False), attention, 0.52),
        (jax.nn.silu, attention, 0.52),
        (jax.nn.gelu, by_blocks, 0.75),
    ],
)
def test_a_transformer_keeps_less_than_in_half_precision_by_hand(activation, attention, share):
    sizes = {"qkv": (32, 96), "out": (32, 32), "up": (32, 128), "down": (128, 32)}
    args = {name: shape(3, *size) for name, size in sizes.items()}, shape(8, 64, 32)
    half = ols.autocast(transformer(activation, attention, by_hand=False), BF16)
    by_hand = transformer(activation, attention, by_hand=True)
    kept = [
        sum(
            x.size * x.dtype.itemsize
            for x in jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], *args))  # noqa: B023
        )
        for loss in (half, by_hand)
    ]
    assert kept[0] < share * kept[1]


def checked(loss, *args):
    with jax.enable_checks(True), jax.checking_leaks():
        return jax.grad(loss)(*args)


TRANSFORMS = {
    "forward mode": lambda loss, *args: jax.jvp(loss, args, args),
    "second derivative": lambda loss, *args: jax.jvp(jax.grad(loss), args, args),
    "batched": lambda loss, ws, x: jax.grad(lambda xs: jnp.sum(jax.vmap(loss, (None, 0))(ws, xs)))(
        jnp.stack([x, x / 2])
    ),
    "in a checkpoint that keeps names": lambda loss, *args: jax.grad(
        jax.checkpoint(loss, policy=jax.checkpoint_policies.save_any_names_but_these())
    )(*args),
}


def with_loops(x, w):
    return scanned(jax.nn.gelu(x @ w)) * lax.stop_gradient(looped(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        *(pytest.param(TRANSFORMS[name], id=name) for name in TRANSFORMS),
        pytest.param(checked, marks=pytest.mark.exhaustive),
    ],
)
def test_a_scan_with_loops_inside_can_be_transformed(transform):
    args = normal(W) / 4, normal(X, seed=1)
    losses = ols.autocast(loss_of(with_loops), BF16), loss_of(ols.autocast(with_loops, BF16))
    ours, by_jax = (functools.partial(transform, loss) for loss in losses)
    with jax.disable_jit():
        assert_same_bits(ours(*args), by_jax(*args))
    counts = [primitives(jax.make_jaxpr(fun)(*args).jaxpr) for fun in (ours, by_jax)]
    assert counts[0]["while"] == counts[1]["while"] > 0


@pytest.mark.exhaustive
def test_the_program_of_a_scan_with_loops_inside_passes_jaxs_own_checks():
    jax.make_jaxpr(functools.partial(checked, ols.autocast(loss_of(with_loops), BF16)))(W, X)


def test_a_body_without_a_derivative_runs():
    def body(x, w):
        return jax.pure_callback(np.tanh, X, jnp.exp(x @ w)), None

    loss = ols.autocast(lambda ws, x: jnp.sum(lax.scan(body, x, ws)[0]), BF16)
    result = loss(jnp.zeros((3, 16, 16)), jnp.ones((8, 16)))
    np.testing.assert_allclose(result, 128 * np.tanh(1), rtol=1e-5)


@pytest.mark.parametrize("error", [RuntimeError, TypeError, NameError])
def test_a_derivative_that_nobody_asks_for_may_raise_anything(error):
    @jax.custom_jvp
    def constant(x):
        return jnp.sin(x)

    @constant.defjvp
    def _(*_):
        raise error

    def loss(ws, rows):
        body = lambda x, row: (jnp.tanh((x + constant(row[1])) @ row[0]), None)  # noqa: E731
        return jnp.sum(lax.scan(body, rows[0], (ws, rows))[0])

    ws, rows = normal(W) / 4, normal(shape(3, 8, 16))
    half = ols.autocast(loss, BF16)
    assert abs(half(ws, rows) - loss(ws, rows)) < 0.1
    grad, exact = jax.grad(half)(ws, rows), jax.grad(loss)(ws, rows)
    assert jnp.linalg.norm(grad - exact) < 0.03 * jnp.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
def test_a_body_with_a_collective_keeps_less(check_vma):
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def body(x, w):
        y = lax.psum(x @ w, "i") / 2
        return jax.nn.gelu(y) * y + 0 * x, None

    def mapped(body):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=check_vma
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
        sums = sum(n for name, n in primitives(jaxpr).items() if name.startswith("psum"))
        return kept_bytes(first), sums, jax.jit(step)(ws, rows)

    kept, sums, grads = measured(ols.autocast(mapped(body), BF16))
    kept_by_jax, sums_by_jax, grads_by_jax = measured(mapped(ols.autocast(body, BF16)))
    assert kept < kept_by_jax
    assert sums == sums_by_jax > 0
    np.testing.assert_allclose(grads, grads_by_jax, rtol=0.02, atol=1e-3)


def spectral(x, w):
    return x + jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(w[:1]), n=16) + jnp.tanh(x @ w)


def rotated(x, w):
    y = lax.complex(*jnp.split(x @ w, 2, -1)) * jnp.exp(1j * jnp.arange(8.0)[None])
    return jnp.concatenate([y.real, y.imag], -1)


def state_space(x, w):
    decay = jnp.exp(-jnp.abs(w[:8]) + 1j * w[:8])
    start = decay, lax.convert_element_type(x @ w, jnp.complex64)
    return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), start)[1].real


def recurrence(x, w):
    def turn(state, row):
        state = state * jnp.exp(1j * w[0]) + row
        return state, state.real

    return lax.scan(turn, jnp.zeros(16, jnp.complex64), jnp.tanh(x @ w))[1]


def transformed(x):
    """Return complex numbers that a function on the host computes."""
    return jax.pure_callback(
        lambda x: np.asarray(x) * (1 + 1j), shape(*x.shape, dtype="complex64"), x
    )


COMPLEX = {
    "spectral": spectral,
    "rotated": rotated,
    "state space": state_space,
    "recurrence": recurrence,
    "magnitude": lambda x, w: jnp.abs(jnp.fft.fft(x @ w) + 0.1),
    "conditional": lambda x, w: lax.cond(x[0, 0] > 0, spectral, rotated, x, w),
    "in jit": jax.jit(spectral),
    "remat": jax.checkpoint(spectral),
    "from a callback": lambda x, w: jnp.abs(transformed(lax.stop_gradient(x))) * (x @ w),
    "with a rule": lambda x, w: jnp.abs(
        with_tangent_rule(transformed, lambda x: lax.complex(jnp.sin(x), x))(x @ w)
    ),
}


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_values_are_residuals_as_any_other(name):
    ws, x = normal(W) / 4, normal(X, seed=1)
    steps = around_and_inside(COMPLEX[name])
    saved, by_jax = (kept_bytes(jax.make_jaxpr(step)(ws, x).jaxpr) for step in steps)
    assert saved <= by_jax
    exact = jax.jit(jax.grad(loss_of(COMPLEX[name]), argnums=(0, 1)))(ws, x)
    for grad, true in zip(jax.jit(steps[0])(ws, x)[1], exact, strict=True):
        assert jnp.linalg.norm(grad - true) < 0.03 * jnp.linalg.norm(true)
