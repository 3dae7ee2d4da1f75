"""Gradients that are handed in twice: an extra argument that equals them is unscaled too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_where import assert_same_bits

import optax_lossscale as ols

pytestmark = pytest.mark.integration

CURVE, TARGET = jnp.array([1.0, 10.0, 100.0]), jnp.array([1.0, 2.0, 3.0])
BACKTRACKING = optax.scale_by_backtracking_linesearch(max_backtracking_steps=20)
SEARCHES = {
    "L-BFGS, zoom": optax.lbfgs(),
    "L-BFGS, backtracking": optax.lbfgs(linesearch=BACKTRACKING),
    "SGD, backtracking": optax.chain(optax.sgd(1.0), BACKTRACKING),
}
GUARDS = {
    "with_loss_scaling": ols.with_loss_scaling,
    "a fixed loss scale": functools.partial(ols.with_loss_scaling, loss_scale=2.0**10),
    "with_skipping": ols.with_skipping,
}


def loss_fn(w):
    return 0.5 * jnp.sum(CURVE * w * w) - TARGET @ w


def step_of(tx, value_and_grad, update):
    def step(carry, _=None):
        w, state = carry
        loss, grads = value_and_grad(state, w)
        updates, state = update(tx, grads, grads, state, w, loss)
        return (optax.apply_updates(w, updates), state), loss

    return step


def update(tx, grads, again, state, w, loss):  # noqa: PLR0917
    return tx.update(grads, state, w, value=loss, grad=again, value_fn=loss_fn)


@functools.partial(jax.jit, static_argnums=0)
def update_of_two_arguments(tx, grads, again, state, w, loss):  # noqa: PLR0917
    """Take the gradients as two arguments, of which only their numbers say that they are one."""
    return update(tx, grads, again, state, w, loss)


def in_a_loop(step, carry):
    for _ in range(6):
        carry, _ = step(carry)
    return carry


WAYS = {
    "eager": (update, in_a_loop),
    "jit": (update, lambda step, carry: in_a_loop(jax.jit(step), carry)),
    "two arguments of jit": (update_of_two_arguments, in_a_loop),
    "scan": (update, lambda step, carry: jax.lax.scan(step, carry, length=6)[0]),
}


def searches():
    """One search in each way, and each search compiled; `make test-all` has the rest."""
    for search, guard, way in itertools.product(SEARCHES, GUARDS, WAYS):
        is_plain = guard == "with_loss_scaling"
        is_one = (is_plain and way == "jit") or (search == "SGD, backtracking" and way != "scan")
        yield pytest.param(
            search, guard, way, marks=pytest.mark.slow if is_one else pytest.mark.exhaustive
        )


@pytest.mark.parametrize(("search", "guard", "way"), [*searches()])
def test_a_line_search_finds_what_it_finds_in_plain_optax(search, guard, way):
    update, run = WAYS[way]
    inner = SEARCHES[search]
    plain = step_of(inner, lambda _, w: jax.value_and_grad(loss_fn)(w), update)
    tx = GUARDS[guard](inner)
    guarded = step_of(tx, ols.value_and_grad(loss_fn), update)
    w = jnp.zeros(3)
    expected, _ = run(plain, (w, inner.init(w)))
    found, _ = run(guarded, (w, tx.init(w)))
    # XLA may round the two programs of a search otherwise; op by op they are the same.
    compare = (
        assert_same_bits
        if way == "eager"
        else functools.partial(np.testing.assert_allclose, rtol=1e-5)
    )
    compare(found, expected)
    assert loss_fn(found) < loss_fn(w)


def test_gradients_are_told_through_the_variables_of_nnx():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    tx = ols.with_loss_scaling(optax.chain(optax.sgd(1.0), BACKTRACKING), 2.0**10)
    seen = {}

    def record(grads, _params, *, grad, **_):
        seen["grads"], seen["grad"] = jax.tree.leaves(grads), jax.tree.leaves(grad)
        return jnp.array(False)

    tx = ols.with_loss_scaling(optax.sgd(0.1), 2.0**10, skip_if=record)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_of(model):
        return jnp.mean(model(jnp.ones((4, 3))) ** 2)

    loss, grads = ols.value_and_grad(loss_of, transform=nnx.value_and_grad)(
        optimizer.opt_state, model
    )
    optimizer.update(model, grads, value=loss, grad=grads)
    assert_same_bits(seen["grad"], seen["grads"])
    assert_same_bits(
        seen["grads"], jax.tree.leaves(nnx.grad(loss_of)(nnx.Linear(3, 1, rngs=nnx.Rngs(0))))
    )


GRADS = {"w": jnp.array([2.0, -0.0, 4.0]), "n": jnp.arange(2)}
OTHERS = {
    "one bit": {"w": jnp.array([2.0, 0.0, 4.0]), "n": jnp.arange(2)},
    "another structure": [GRADS["w"], GRADS["n"]],
    "another shape": {"w": GRADS["w"][:2], "n": jnp.arange(2)},
    "another dtype": {"w": GRADS["w"].astype(jnp.float16), "n": jnp.arange(2)},
    "no array": {"w": "x", "n": jnp.arange(2)},
    "a number": 2.0,
    "nothing": None,
    "a function": loss_fn,
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_in_anything_is_in_true_units_and_stays(other, jitted):
    given = OTHERS[other]
    if jitted and other in ("no array", "a function"):
        pytest.skip("no argument of jit")
    seen = {}

    def record(_grads, _params, *, more, again, **_):
        seen.update(more=more, again=again)
        return jnp.array(False)

    tx = ols.with_loss_scaling(optax.identity(), 2.0, skip_if=record)
    copy = jax.tree.map(jnp.array, GRADS)

    def run(grads, again, more):
        tx.update(grads, tx.init(grads), again=again, more=more, value=jnp.float32(2))
        return seen

    found = jax.jit(run)(GRADS, copy, given) if jitted else run(GRADS, copy, given)
    assert_same_bits(found["again"], {"w": GRADS["w"] / 2, "n": GRADS["n"]})
    if jitted or other == "one bit":
        assert_same_bits(found["more"], jax.tree.map(jnp.asarray, given))
    else:
        assert found["more"] is given


def test_copies_are_told_whole_and_the_loss_is_no_copy():
    seen = {}

    def record(_grads, _params, **extra_args):
        seen.update(extra_args)
        return jnp.array(False)

    tx = ols.with_loss_scaling(optax.identity(), 2.0, skip_if=record)
    grads = {"v": jnp.array([2.0, 4.0]), "w": jnp.array([2.0, 4.0])}
    partly = {**grads, "w": jnp.zeros(2)}
    tx.update(grads, tx.init(grads), partly=partly, parts=[*map(jnp.array, grads.values())])
    assert_same_bits(seen["partly"], partly)
    assert_same_bits(seen["parts"], [*grads.values()])
    loss = jnp.float32(2)  # a function that is its own derivative
    tx.update(loss, tx.init(loss), value=loss)
    assert seen["value"] == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "float8_e5m2"])
def test_gradients_of_every_dtype_are_compared_bit_by_bit(dtype):
    seen = []

    def record(grads, _params, *, again, **_):
        seen.append((grads, again))
        return jnp.array(False)

    tx = ols.with_loss_scaling(optax.identity(), 2.0, skip_if=record)
    grads = jnp.array([2.0, 8.0, -0.0]).astype(dtype)
    tx.update(grads, tx.init(jnp.ones(3)), again=jnp.array(grads))
    assert_same_bits(*seen[0])
    tx.update(grads, tx.init(jnp.ones(3)), again=-grads)
    assert_same_bits(seen[1][1], -grads.astype(seen[1][0].dtype))


@pytest.mark.slow
def test_true_gradients_from_the_state_are_scaled_by_hand():
    inner = SEARCHES["L-BFGS, zoom"]
    tx, skipping = ols.with_loss_scaling(inner, 2.0**10), ols.with_skipping(inner)
    value_and_grad = optax.value_and_grad_from_state(loss_fn)

    def trained(tx, scale):
        w = jnp.zeros(3)
        state = tx.init(w)
        for _ in range(8):
            loss, grads = value_and_grad(w, state=state)
            given = scale(grads, state)
            updates, state = tx.update(given, state, w, value=loss, grad=grads, value_fn=loss_fn)
            w = optax.apply_updates(w, updates)
        return w

    expected = trained(inner, lambda grads, _: grads)
    assert_same_bits(trained(tx, ols.scale_loss), expected)
    assert_same_bits(trained(skipping, lambda grads, _: grads), expected)
