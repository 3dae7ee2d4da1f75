"""Mistakes that are seen while a step is traced: what stays in float32, what stands outside."""

import contextlib
import warnings

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits

import optax_lossscale as ols

PARAMS = {"a": jnp.ones(3), "b": jnp.ones(3)}
GUARD = ols.with_loss_scaling(optax.sgd(0.1))
MASK, OTHERS = {"a": True, "b": False}, {"a": False, "b": True}
MASKED = optax.masked(GUARD, MASK)
LABELS = {"a": "train", "b": "frozen"}


def groups(train, frozen):
    return optax.partition({"train": train, "frozen": frozen}, LABELS)


OUTSIDE = {
    "clip": (optax.chain(optax.clip_by_global_norm(1.0), GUARD), "optax.chain("),
    "a chain in a chain": (optax.chain(GUARD, optax.adam(0.1)), "optax.chain("),
    "named": (optax.named_chain(("decay", optax.add_decayed_weights(0.1)), ("g", GUARD)), "chain("),
    "MultiSteps": (
        optax.MultiSteps(ols.with_skipping(optax.sgd(0.1)), 2),
        "optax.MultiSteps(inner, k)",
    ),
    "apply_if_finite": (optax.apply_if_finite(GUARD, 3), "with_loss_scaling(inner)"),
    "masked": (MASKED, "optax.masked("),
    "deep": (optax.MultiSteps(optax.chain(optax.clip(1.0), GUARD), 2), "optax.MultiSteps("),
    "schedule_free": (optax.contrib.schedule_free(GUARD, 0.1), "schedule_free("),
    "injected": (
        optax.inject_hyperparams(lambda rate: ols.with_loss_scaling(optax.sgd(rate)))(rate=0.1),
        "optax.inject_hyperparams(",
    ),
    "masked in a group": (groups(MASKED, optax.identity()), "optax.masked("),
    "masked and more": (
        optax.chain(MASKED, optax.masked(optax.clip(1.0), MASK), optax.clip(1.0)),
        "optax.chain(",
    ),
    "two masked": (optax.chain(MASKED, optax.masked(optax.adam(0.1), MASK)), "optax.chain("),
    "two groups": (groups(GUARD, optax.adam(0.1)), "optax.partition("),
}
INSIDE = {
    "in a chain of its own": optax.chain(GUARD).init,
    "all inside": ols.with_loss_scaling(optax.MultiSteps(optax.chain(optax.clip(1.0)), 2)).init,
    "frozen": groups(GUARD, optax.set_to_zero()).init,
    "masked twice": optax.chain(MASKED, optax.masked(optax.set_to_zero(), OTHERS)).init,
    "a tuple of one's own": lambda params: (
        *(GUARD.init(params), optax.clip(1.0).init(params)),
        (optax.EmptyState(), {"mean": jnp.ones(3)}),
    ),
    "a dict of one's own": lambda params: {"a": GUARD.init(params), "b": optax.EmptyState()},
    "the numbers alone": lambda _: ols.init(),
}


def loss_fn(params):
    return jnp.sum(params["a"] ** 2)


@contextlib.contextmanager
def warnings_of(*words):
    """Expect one warning for each of these, where it was called."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen
    assert len(seen) == len(words), [str(each.message) for each in seen]
    for each, word in zip(seen, words, strict=True):
        assert word in str(each.message)
        assert each.filename == __file__


def test_a_warning_names_the_users_line_below_any_library():
    for wrap in (jax.jit, nnx.jit, equinox.filter_jit, lambda fun: fun):  # and contextlib, below
        warnings_of("The loss is float16")(wrap(ols.scale_loss))(jnp.float16(1), ols.init())
    with warnings_of("`params` are float16"):
        optax.chain(GUARD).init(jnp.float16(1))


@pytest.mark.integration
@pytest.mark.parametrize(("tx", "line"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_stands_outside_of_the_guard_is_named_once_with_the_line_to_write(tx, line):
    state = tx.init(PARAMS)
    for function in (ols.value_and_grad(loss_fn), ols.grad(loss_fn)):
        with warnings_of(line):
            function(state, PARAMS)
            function(state, PARAMS)
    with warnings_of(line):
        ols.diagnostics.metrics(state)
    with warnings_of():
        ols.grad(loss_fn)(ols.loss_scale_state(state), PARAMS)


@pytest.mark.parametrize("init", INSIDE.values(), ids=INSIDE)
def test_an_order_that_is_right_is_silent(init):
    with warnings_of():
        ols.grad(loss_fn)(init(PARAMS), PARAMS)


X, Y = jnp.ones((8, 4)), jnp.ones((8, 1))
WEIGHTS = {"in": jnp.ones((4, 16)), "h": jnp.eye(16), "out": jnp.ones((16, 1))}


def error(out, y):
    return jnp.mean((out.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def network(params, x):
    return error(x @ params["in"] @ params["h"] @ params["out"], Y)


def casts_itself(params, x):
    return network(params, x.astype(jnp.float32))


def recurrent(params, x, dtype):
    def cell(h, row):
        return jnp.tanh(row @ params["in"] + h @ params["h"]), None

    h, _ = jax.lax.scan(cell, jnp.zeros((8, 16), dtype), jnp.stack([x] * 5))
    return error(h @ params["out"], Y)


LOSSES = {
    "closes over its batch": (lambda params: network(params, X), (WEIGHTS,), True),
    "takes its batch": (network, (WEIGHTS, X), False),
    "casts itself": (casts_itself, (WEIGHTS, X), True),
    "a carry of zeros": (lambda p, x: recurrent(p, x, jnp.float32), (WEIGHTS, X), True),
    "a carry of its dtype": (lambda p, x: recurrent(p, x, x.dtype), (WEIGHTS, X), False),
    "no products": (lambda p, x: jnp.sum(p["in"].astype("f4")) * jnp.sum(x), (WEIGHTS, X), False),
}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("loss", "run"),
    [
        *((loss, jax.jit) for loss in LOSSES),
        ("casts itself", lambda fun: fun),
        ("casts itself", lambda fun: jax.jit(jax.checkpoint(fun))),
    ],
    ids=[*LOSSES, "eager", "remat"],
)
def test_what_stays_in_float32_is_named_once(loss, run):
    fun, args, warns = LOSSES[loss]
    calls = []

    def counted(*args):
        calls.append(None)
        return fun(*args)

    function = ols.value_and_grad(counted, compute_dtype=jnp.float16)
    with warnings_of(*["`compute_dtype` is float16, but only"] * warns) as seen:
        value, grads = run(function)(ols.init(8), *args)
        assert len(calls) == 1
        jax.eval_shape(function, ols.init(8), *args)
    for each in seen:
        for part in (f"of float32, at {__file__}", "\n  1. ", "\n  2. ", "\n  3. "):
            assert part in str(each.message)
    by_hand = jax.value_and_grad(lambda *args: 8 * fun(*ols.cast(args, jnp.float16)))
    expected, expected_grads = run(by_hand)(*args)
    assert_same_bits((8 * value, grads), (expected, expected_grads))


@pytest.mark.parametrize(
    ("columns", "dtype", "words"),
    [(4, "float32", ()), (6, "float32", ("large = x",)), (6, "bfloat16", ("large = x",))],
)
def test_less_than_half_of_the_operations_is_said_with_the_largest_other(columns, dtype, words):
    def fun(w, x):
        half = x @ w[:, columns:]
        x, w = x.astype(dtype), w.astype(dtype)
        small = x @ w[:, :1]
        large = x @ w[:, 1:columns]
        return sum(jnp.sum(y.astype(jnp.float32)) for y in (small, large, small, half))

    with warnings_of(*words):
        ols.grad(fun, compute_dtype=jnp.float16)(ols.init(8), jnp.ones((4, 10)), X)


@pytest.mark.integration
def test_aux_of_any_kind_and_side_effects_are_untouched():
    log = []

    def fun(params, x, mode):
        log.append(mode)
        return casts_itself(params, x), {"mode": mode, "function": len, "number": 3}

    function = ols.value_and_grad(fun, argnums=(0, -2), has_aux=True, compute_dtype=jnp.float16)
    with pytest.warns(UserWarning, match="0%"):
        (_, aux), grads = function(ols.init(8), WEIGHTS, X, "train")
    assert aux == {"mode": "train", "function": len, "number": 3}
    assert log == ["train"]
    assert [grad.dtype for grad in jax.tree.leaves(grads)] == [jnp.float32] * 4


@pytest.mark.integration
def test_with_another_transform_nothing_is_counted_and_narrower_products_are_half_precision():
    def fp8(w, x):
        w, x = w.astype(jnp.float8_e4m3fn), x.astype(jnp.float8_e4m3fn)
        return jnp.sum(jax.lax.dot(x, w, preferred_element_type=jnp.float32))

    transform = equinox.filter_value_and_grad
    function = ols.value_and_grad(casts_itself, compute_dtype=jnp.float16, transform=transform)
    with warnings_of():
        function(ols.init(8), WEIGHTS, X)
        ols.grad(fp8, compute_dtype=jnp.float16)(ols.init(8), np.ones((4, 2), np.float32), X)


def mean(w, x):
    return jnp.mean((x @ w).astype(jnp.float32))


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_in_shard_map_is_that_of_jax(check_vma):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])

    def loss(w, x):
        return jax.lax.pmean(mean(w, x), "i")

    def run(value_and_grad):
        specs = {"in_specs": (P(), P("i")), "out_specs": (P(), P())}
        mapped = jax.shard_map(value_and_grad, mesh=mesh, check_vma=check_vma, **specs)
        return jax.jit(mapped)(jnp.ones((4, 2), jnp.float16), X.astype(jnp.float16))

    ours = ols.value_and_grad(loss, compute_dtype=jnp.float16)
    assert_same_bits(run(lambda w, x: ours(ols.init(1), w, x)), run(jax.value_and_grad(loss)))


@pytest.mark.parametrize("argnums", [1, np.int64(1), -2, (1,), [0, 1]])
def test_arguments_are_chosen_as_jax_chooses_them(argnums):
    args = jnp.ones((4, 2), jnp.float16), X.astype(jnp.float16)
    ours = ols.grad(mean, argnums, compute_dtype=jnp.float16)(ols.init(1), *args)
    assert_same_bits(ours, jax.grad(mean, argnums)(*args))


MIXED = {"w": X, "n": jnp.arange(3)}


def total(params):
    return jnp.sum(params["w"].astype(jnp.float32))


def test_an_argument_of_the_transform_is_passed_on():
    grads = ols.grad(total, compute_dtype=jnp.float16, allow_int=True)(ols.init(8), MIXED)
    assert grads["n"].dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    ("fun", "args", "kwargs", "message"),
    [
        (lambda w: w.astype(jnp.float32), (X,), {}, r"scalar loss, got shape \(8, 4\)"),
        (jnp.sum, (jnp.arange(3),), {}, "inputs .*int32"),
        (total, (MIXED,), {}, "inputs .*int32"),
        (jnp.sum, (X,), {"argnums": 1}, "argnums"),
        (jnp.sum, (X,), {"argnums": (0, 1)}, "argnums"),
    ],
)
def test_what_jax_refuses_is_refused(fun, args, kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ols.value_and_grad(fun, compute_dtype=jnp.float16, **kwargs)(ols.init(8), *args)
