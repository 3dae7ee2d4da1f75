"""Line searches, which take the gradients a second time, as `grad`."""

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

CURVE, TARGET = np.float32([1, 10, 100]), np.float32([1, 2, 3])
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


def step_of(tx, value_and_grad):
    def step(carry, _=None):
        w, state = carry
        loss, grads = value_and_grad(state, w)
        updates, state = tx.update(grads, state, w, value=loss, grad=grads, value_fn=loss_fn)
        return (optax.apply_updates(w, updates), state), loss

    return step


def in_a_loop(step, carry):
    for _ in range(6):
        carry, _ = step(carry)
    return carry


WAYS = {
    "eager": in_a_loop,
    "jit": lambda step, carry: in_a_loop(jax.jit(step), carry),
    "scan": lambda step, carry: jax.lax.scan(step, carry, length=6)[0],
}


def searches():
    """Each search and each guard compiled, and one eager search; `make test-all` has the rest."""
    for search, guard, way in itertools.product(SEARCHES, GUARDS, WAYS):
        is_plain, is_cheap = guard == "with_loss_scaling", search == "SGD, backtracking"
        is_one = (
            (is_plain or is_cheap) if way == "jit" else (is_plain, is_cheap, way) == (1, 1, "eager")
        )
        yield pytest.param(
            search, guard, way, marks=pytest.mark.slow if is_one else pytest.mark.exhaustive
        )


@pytest.mark.parametrize(("search", "guard", "way"), [*searches()])
def test_a_line_search_finds_what_it_finds_in_plain_optax(search, guard, way):
    inner, run = SEARCHES[search], WAYS[way]
    plain = step_of(inner, lambda _, w: jax.value_and_grad(loss_fn)(w))
    tx = GUARDS[guard](inner)
    guarded = step_of(tx, ols.value_and_grad(loss_fn))
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


@pytest.mark.slow
def test_gradients_in_variables_of_nnx_are_recognized():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
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


GRADS = jax.tree.map(jnp.asarray, {"w": np.float32([2, -0.0, 4]), "n": np.int32([0, 1])})


def seen_by(guard, grads, **given):
    """Return the gradients and the extra arguments that a rule and the optimizer see."""
    seen = []

    def update(updates, state, params=None, **extra_args):
        del params
        seen.append((updates, extra_args))
        return updates, state

    def record(grads, _params, **extra_args):
        seen.append((grads, extra_args))
        return jnp.array(False)

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = guard(inner, skip_if=record)
    tx.update(grads, tx.init(grads), **given)
    (grads, by_rule), (_, by_optimizer) = seen
    is_function = lambda leaf: leaf is loss_fn  # noqa: E731
    by_both = [
        jax.tree.map(lambda x: 0 if is_function(x) else x, y) for y in (by_rule, by_optimizer)
    ]
    assert_same_bits(*by_both)
    return grads, by_rule


SCALES = functools.partial(ols.with_loss_scaling, loss_scale=2.0)


@pytest.mark.filterwarnings("ignore:`params` are")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "float32"])
def test_grad_becomes_the_true_gradients_in_its_own_containers(dtype):
    grads = {"w": GRADS["w"].astype(dtype), "n": GRADS["n"]}
    tx = ols.with_loss_scaling(optax.identity(), 2.0)
    true, _ = ols.unscale_and_check(grads, tx.init(GRADS))
    for grad in (grads, {**grads}, [grads["n"], grads["w"]]):
        seen, extra_args = seen_by(SCALES, grads, grad=grad)
        assert_same_bits(seen, true)
        expected = true if isinstance(grad, dict) else [true["n"], true["w"]]
        assert_same_bits(extra_args["grad"], expected)


OTHERS = {
    "equal gradients": jax.tree.map(jnp.array, GRADS),
    "one bit": {"w": np.float32([2, 0, 4]), "n": GRADS["n"]},
    "another dtype": {"w": jnp.bfloat16([2, -0.0, 4]), "n": GRADS["n"]},
    "integers that are not scaled": [GRADS["n"]],
    "a number": 2.0,
    "nothing": None,
    "a function": loss_fn,
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_argument_is_in_true_units_and_the_same_object(other):
    for guard in (SCALES, ols.with_skipping):
        _, extra_args = seen_by(guard, GRADS, more=OTHERS[other], grad=None)
        assert extra_args["more"] is OTHERS[other]
        assert extra_args["grad"] is None


@pytest.mark.parametrize("other", ["equal gradients", "one bit", "a number"])
def test_another_grad_is_refused_under_a_loss_scale_and_passed_on_without(other):
    with pytest.raises(ValueError, match=r"^`grad` must be the gradients .* one jitted step"):
        seen_by(SCALES, GRADS, grad=OTHERS[other])
    _, extra_args = seen_by(ols.with_skipping, GRADS, grad=OTHERS[other])
    assert extra_args["grad"] is OTHERS[other]
    assert seen_by(ols.with_skipping, GRADS, again=GRADS)[1]["again"] is GRADS


def test_scaled_gradients_under_another_name_are_refused_but_not_the_loss():
    for other in (GRADS, [jnp.ones(2), GRADS["w"]]):
        with pytest.raises(ValueError, match=r"^`again` must be in true units"):
            seen_by(SCALES, GRADS, again=other)
    loss = jnp.float32(2)  # a function that is its own derivative
    assert seen_by(SCALES, loss, value=loss)[1]["value"] == 2


def test_two_arguments_of_jit_are_two_arrays():
    tx = ols.with_loss_scaling(optax.identity(), 2.0)
    update = jax.jit(lambda grads, grad: tx.update(grads, tx.init(grads), grad=grad))
    with pytest.raises(ValueError, match="`grad` must be the gradients themselves"):
        update(GRADS, GRADS)


def test_grad_is_unscaled_with_the_gradients_after_a_restore_under_with_skipping():
    def record(grads, _params, *, grad, **_):
        assert_same_bits(grad, grads)
        return jnp.array(False)

    tx = ols.with_skipping(optax.identity(), record)
    grads = jnp.array([8.0, 16.0])
    state = tx.init(grads)._replace(loss_scale_state=ols.init(8.0))
    updates, _ = tx.update(grads, state, grad=grads)
    np.testing.assert_array_equal(updates, [1.0, 2.0])


@pytest.mark.slow
def test_true_gradients_from_the_state_are_scaled_by_hand():
    inner = SEARCHES["L-BFGS, zoom"]
    tx, skipping = ols.with_loss_scaling(inner, 2.0**10), ols.with_skipping(inner)
    value_and_grad = optax.value_and_grad_from_state(loss_fn)

    def trained(tx, scale):
        @jax.jit
        def step(w, state):
            loss, grads = value_and_grad(w, state=state)
            given = scale(grads, state)
            updates, state = tx.update(given, state, w, value=loss, grad=given, value_fn=loss_fn)
            return optax.apply_updates(w, updates), state

        w = jnp.zeros(3)
        state = tx.init(w)
        for _ in range(8):
            w, state = step(w, state)
        return w

    expected = trained(inner, lambda grads, _: grads)
    for found in trained(tx, ols.scale_loss), trained(skipping, lambda grads, _: grads):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
