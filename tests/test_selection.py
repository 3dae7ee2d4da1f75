"""The skip, chosen where each leaf of the new state is made: the shapes a jaxpr can have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale._step import select
from optax_lossscale._step.select import tree_where, update_where

X = jnp.arange(1.0, 5.0)


def stores_an_input(state):
    """As adan does: the new state is what came in from outside."""
    return state["a"] * 2, {"a": X, "b": state["a"]}


def swaps(state):
    return X, {"a": state["b"], "b": state["a"]}


def returns_one_variable_twice(state):
    new = state["a"] + X
    return new * 2, {"a": new, "b": new}


def returns_a_literal(state):
    return state["a"] - state["b"], {"a": jnp.zeros(4), "b": state["b"] + 1}


def returns_what_stays(state):
    return state["a"] + 1, state


def defines_state_in_sequence(state):
    a = 0.9 * state["a"] + 0.1 * X
    b = 0.5 * state["b"] + a**2
    return -a / jnp.sqrt(b), {"a": a, "b": b}


@jax.jit
def is_jitted(state):
    return defines_state_in_sequence(state)


def scans(state):
    a, out = jax.lax.scan(lambda c, x: (c + x, c * x), state["a"], jnp.ones((3, 4)))
    return out, {"a": a, "b": state["b"] * a}


def loops(state):
    a = jax.lax.while_loop(lambda v: jnp.sum(v) < 100, lambda v: v * 2, state["a"] + X)
    return a + 1, {"a": a, "b": state["b"] + a}


def branches(state):
    a = jax.lax.cond(jnp.sum(state["a"]) > 0, lambda v: v + X, lambda v: v - X, state["a"])
    return a * 3, {"a": a, "b": jax.lax.switch(1, [jnp.sin, jnp.cos], a)}


@jax.custom_jvp
def _square(x):
    return x * x


_square.defjvp(lambda x, t: (x[0] * x[0], 2 * x[0] * t[0]))


@jax.custom_vjp
def _cube(x):
    return x**3


_cube.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))


def has_custom_derivatives(state):
    a = _square(state["a"]) + X
    return jax.grad(lambda v: jnp.sum(_cube(v)))(a), {"a": a, "b": _cube(a)}


def sorts_with_two_results(state):
    a, b = jax.lax.sort((state["b"], state["a"]), num_keys=1)
    return a - b, {"a": a, "b": b}


def uses_only_half(state):
    unused = jnp.sin(X)
    quotient, _ = jnp.divmod(state["a"], 2.0)
    del unused
    return quotient, {"a": quotient, "b": state["b"]}


UPDATES = [
    stores_an_input,
    swaps,
    returns_one_variable_twice,
    returns_a_literal,
    returns_what_stays,
    defines_state_in_sequence,
    is_jitted,
    scans,
    loops,
    branches,
    has_custom_derivatives,
    sorts_with_two_results,
    uses_only_half,
]


def old_state():
    return {"a": jnp.array([1.0, -0.0, 3.0, 0.5]), "b": jnp.array([2.0, 2.5, -0.0, 1.0])}


def where(pred, update, state):
    """Select a state that moves by itself, without gradients."""
    return update_where(pred, lambda _, old: update(old), (), state)


def plain_where(pred, update, state):
    out, new_state = update(state)
    return out, tree_where(pred, new_state, state)


@pytest.fixture(params=["jit", "vmap", "scan", "eager"])
def transform(request):
    """Ways to call `f(pred, state)`, each returning what one call returns."""

    def mapped(f):
        def run(pred, state):
            stacked = jax.tree.map(lambda x: jnp.stack([x, x]), (pred, state))
            return jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(f))(*stacked))

        return run

    def scanned(f):
        def step(state, pred):
            out, state = f(pred, state)
            return state, out

        def run(pred, state):
            state, outs = jax.jit(functools.partial(jax.lax.scan, step))(state, pred[None])
            return jax.tree.map(lambda x: x[0], outs), state

        return run

    return {"jit": jax.jit, "vmap": mapped, "scan": scanned, "eager": lambda f: f}[request.param]


@pytest.mark.parametrize("update", UPDATES, ids=lambda f: getattr(f, "__name__", "jitted"))
def test_it_is_plain_where_on_the_outputs(update, transform):
    run = transform(lambda pred, state: where(pred, update, state))
    reference = transform(lambda pred, state: plain_where(pred, update, state))
    state = old_state()
    _, kept = run(jnp.asarray(False), state)
    assert_same_bits(kept, state)
    out, moved = run(jnp.asarray(True), state)
    expected_out, expected = reference(jnp.asarray(True), state)
    # XLA may fuse a product and a sum into one rounding here and not there.
    jax.tree.map(
        functools.partial(np.testing.assert_array_max_ulp, maxulp=2),
        (out, moved),
        (expected_out, expected),
    )


def test_the_old_leaf_has_one_reader():
    # This is what saves the copies. The new leaf is a sum, of which the old one is a part.
    def chained(state):
        a = state["a"] * 2
        return a + 1, {"a": a, "b": state["b"]}

    jaxpr = jax.make_jaxpr(lambda pred, state: where(pred, chained, state))(True, old_state()).jaxpr
    readers = [eqn for eqn in jaxpr.eqns if jaxpr.invars[1] in eqn.invars]
    assert len(readers) == 3  # the update, the choice, and what takes its derivative away


@pytest.mark.parametrize("pred", [True, False])
def test_what_follows_in_the_update_never_meets_old_and_new_leaves_together(transform, pred):
    # Each leaf moves by the same amount, so that their differences are those of the old state.
    def update(state):
        a = state["a"] + 1
        b = state["b"] + (a - state["a"])
        return {"difference": b - a, "a": a, "ratio": a / b}, {"a": a, "b": b}

    out, _ = transform(lambda pred, state: where(pred, update, state))(
        jnp.asarray(pred), old_state()
    )
    expected, _ = update(old_state())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), out, expected)


def test_the_gradients_of_a_bad_step_are_zeros_wherever_they_are_read(transform):
    def update(grads, state):
        norm = jnp.linalg.norm(grads)
        a = 0.5 * state["a"] + grads / (1 + norm)
        return {"a": a, "next": a / (1 + norm)}, {"a": a, "b": state["b"]}

    step = transform(
        lambda pred, state: update_where(pred, update, jnp.where(pred, X, jnp.nan), state)
    )
    out, kept = step(jnp.asarray(False), old_state())
    assert_same_bits(kept, old_state())
    half = 0.5 * old_state()["a"]
    np.testing.assert_array_equal(out["a"], half)
    np.testing.assert_array_equal(out["next"], half)
    out, moved = step(jnp.asarray(True), old_state())
    np.testing.assert_allclose(moved["a"], half + X / (1 + jnp.linalg.norm(X)), rtol=1e-6)


def test_what_may_run_for_ever_or_raise_is_evaluated_once():
    # The new leaf is made by a loop and seen by a callback, and later equations read it.
    seen = []

    def update(state):
        a = jax.lax.while_loop(lambda v: v[0] < 100, lambda v: 2 * v, state["a"])
        b = jax.pure_callback(lambda v: seen.append(v) or v, state["b"], state["b"])
        return jnp.sin(a) + jnp.cos(b), {"a": a, "b": b}

    jaxpr = jax.make_jaxpr(lambda pred, state: where(pred, update, state))(True, old_state())
    names = [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns]
    assert (names.count("while"), names.count("pure_callback")) == (1, 1)
    jax.block_until_ready(jax.jit(lambda p, s: where(p, update, s))(False, old_state()))
    assert len(seen) == 1


def test_the_derivative_of_what_is_kept_is_that_of_the_old_state_alone():
    # The update has an infinite derivative at the old state, and NaN at NaN.
    def kept(pred, a, x):
        update = lambda grads, old: (None, jnp.sqrt(old - a) * grads)  # noqa: E731
        _, new = update_where(pred, update, x, a)
        return jnp.sum(2 * new)

    for derivative in (jax.grad, jax.jacfwd):
        by_a, by_x = jax.jit(derivative(kept, argnums=(1, 2)))(False, X, X * jnp.nan)
        np.testing.assert_array_equal(by_a, jnp.full(4, 2.0))
        np.testing.assert_array_equal(by_x, jnp.zeros(4))


def test_an_update_that_traces_in_its_callers_trace_alone_is_called_there():
    # `flax.nnx` refuses to write a Variable in another trace than the one that it was made in.
    nnx = pytest.importorskip("flax.nnx")

    @jax.jit
    def step(pred, state):
        calls = nnx.Variable(jnp.zeros(()))

        def update(old):
            calls[...] = calls[...] + 1
            return old["a"] + 1, {"a": old["a"] + 1, "b": old["b"]}

        return where(pred, update, state), calls[...]

    (_, kept), calls = step(False, old_state())
    assert calls == 1
    assert_same_bits(kept, old_state())


def test_a_small_state_is_updated_in_its_callers_trace(monkeypatch):
    monkeypatch.setattr(select, "SMALL", 2**12)
    seen = []

    @jax.jit
    def step(pred, state):
        def update(old):
            seen.append(jnp.sum(old["a"]))
            return old["a"] + 1, {"a": old["a"] + 1, "b": old["b"]}

        return where(pred, update, state), seen.pop()

    (_, kept), total = step(False, old_state())
    assert total == 4.5
    assert_same_bits(kept, old_state())
    assert not seen


def test_leaves_that_are_no_arrays_stay():
    state = {"a": X, "name": "adam", "nothing": None, "float0": np.zeros(3, jax.dtypes.float0)}

    def step(pred, a):
        def update(s):
            assert s["name"] == "adam"
            return {"u": s["a"], "label": "updates"}, {**s, "a": s["a"] + 1}

        out, new = where(pred, update, {**state, "a": a})
        assert out["label"] == "updates"
        assert new["name"] == "adam"
        assert new["float0"] is state["float0"]
        return new["a"]

    np.testing.assert_array_equal(jax.jit(step)(True, X), X + 1)
    np.testing.assert_array_equal(jax.jit(step)(False, X), X)


@pytest.mark.parametrize("pred", [True, False])
def test_a_counter_that_is_reset_is_chosen_too(pred):
    # A number that the update knows when it is traced is a literal in the jaxpr's results.
    update = jax.jit(lambda pred, n: where(pred, lambda old: (old + 1, np.float32(0)), n))
    out, new = update(pred, jnp.float32(7))
    assert (float(out), float(new)) == (8, 0 if pred else 7)


def test_prng_keys_are_chosen():
    def update(key):
        key, sample = jax.random.split(key)
        return jax.random.normal(sample), key

    key = jax.random.key(3)
    step = jax.jit(lambda pred, key: where(pred, update, key))
    assert_same_bits(step(False, key)[1], key)
    assert_same_bits(step(True, key), jax.jit(update)(key))


@pytest.mark.parametrize(
    "update",
    [
        lambda s: (X, {"a": s["a"]}),
        lambda s: (X, {**s, "b": "text"}),
        lambda s: (X, {**s, "c": X}),
    ],
    ids=["leaf lost", "array to text", "leaf more"],
)
def test_a_state_of_another_structure_is_refused(update):
    with pytest.raises(ValueError, match=r"structure|must be an array in both"):
        jax.jit(lambda pred, state: where(pred, update, state))(True, old_state())
    with pytest.raises(ValueError, match=r"structure|must be an array in both"):
        where(jnp.asarray(True), update, old_state())


def test_callbacks_run_once_and_in_order():
    seen = []

    def update(state):
        jax.debug.callback(lambda v: seen.append(float(v)), jnp.sum(state["a"]), ordered=True)
        a = state["a"] + 1
        jax.debug.callback(lambda v: seen.append(float(v)), jnp.sum(a), ordered=True)
        return a, {"a": a, "b": state["b"]}

    jax.block_until_ready(
        jax.jit(lambda pred, state: where(pred, update, state))(True, old_state())
    )
    jax.effects_barrier()
    assert seen == [4.5, 8.5]


def test_an_equations_context_and_name_are_kept():
    def update(state):
        with jax.named_scope("inner_moment"), jax.default_matmul_precision("highest"):
            a = jnp.outer(state["a"], X) @ X
        return a, {"a": a, "b": state["b"]}

    lowered = jax.jit(lambda p, s: where(p, update, s)).lower(True, old_state())
    text = lowered.as_text(debug_info=True)
    assert "inner_moment" in text
    assert "HIGHEST" in text


@pytest.mark.skipif(not hasattr(jax, "reshard"), reason="jax.reshard is newer than this JAX")
def test_shard_map_inside_of_the_update_is_replayed():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("x")
    total = jax.shard_map(
        lambda v: v + jax.lax.psum(jnp.sum(v), "x"), mesh=mesh, in_specs=spec, out_specs=spec
    )

    def update(state):
        sharded = jax.reshard(state["a"], jax.sharding.NamedSharding(mesh, spec))
        a = jax.reshard(total(sharded), jax.sharding.NamedSharding(mesh, jax.P()))
        return a, {"a": a, "b": state["b"]}

    state = jax.device_put(old_state(), jax.sharding.NamedSharding(mesh, jax.P()))
    step = jax.jit(lambda pred, state: where(pred, update, state))
    np.testing.assert_array_equal(step(True, state)[1]["a"], state["a"] + 4.5)
    np.testing.assert_array_equal(step(False, state)[1]["a"], state["a"])


def test_no_tracer_leaks():
    with jax.check_tracer_leaks():
        jax.jit(lambda pred, s: where(pred, defines_state_in_sequence, s))(True, old_state())


@pytest.mark.integration
def test_an_optimizer_that_cannot_be_traced_works_eagerly():
    # The fall-back: nothing is fused in eager execution, so nothing needs to be traced.
    def update(updates, state, params=None):
        del params
        if float(jnp.sum(state)) >= 0:
            updates = jax.tree.map(jnp.negative, updates)
        return updates, state + 1

    inner = optax.GradientTransformation(lambda _: jnp.zeros(()), update)
    tx = ols.with_loss_scaling(inner, 4)
    updates, state = tx.update(X, tx.init(X), X)
    np.testing.assert_array_equal(updates, -X / 4)
    assert state.inner_state == 1
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(tx.update)(X, tx.init(X), X)
