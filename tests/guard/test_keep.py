"""A skipped step keeps the optimizer's old state, whatever its update consists of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits

import optax_lossscale as ols

X = np.float32([1, 2, 3, 4])
OLD = np.float32([1.0, -0.0, 3.0, 0.5]), np.float32([2.0, 2.5, -0.0, 1.0])


def in_sequence(a, b):
    a = 0.9 * a + 0.1 * X
    b = 0.5 * b + a**2
    return -a / jnp.sqrt(b), a, b


def uses_only_half(a, b):
    jnp.sin(X)
    quotient, _ = jnp.divmod(a, 2.0)
    return quotient, quotient, b


def factorized(matrix):
    """Return the Cholesky factor, as LAPACK has it."""
    jax.jit(jnp.linalg.cholesky).lower(matrix)  # this registers LAPACK's function with XLA
    shapes = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", shapes, vmap_method="sequential")
    return jnp.tril(call(matrix, uplo=np.uint8(ord("L")))[0])


# What may not end or acts, and so must see gradients and a state as a step produces them.
ACTS = {
    "while": lambda a: jax.lax.while_loop(lambda v: v[0] < 100, lambda v: v + 50, a),
    "a loop in a branch": lambda a: jax.lax.cond(a[0] > 0, ACTS["while"], jnp.cos, a),
    "pure_callback": lambda a: jax.pure_callback(np.copy, a, a),
    "io_callback": lambda a: io_callback(np.copy, a, a),
    "eig": lambda a: jnp.linalg.eigvals(jnp.outer(a, a)).real,
    "eigh": lambda a: jnp.linalg.eigh(jnp.outer(a, a))[0],
    "ffi_call": lambda a: factorized(jnp.outer(a, a) + jnp.eye(4))[0],
    "schur": lambda a: jax.scipy.linalg.schur(jnp.outer(a, a))[0][0],
    "svd": lambda a: jnp.linalg.svd(jnp.outer(a, a), compute_uv=False),
}
COMPUTES = {
    "scan": lambda a: jax.lax.scan(lambda c, _: (c + 1, None), a, length=2)[0],
    "cond": lambda a: jax.lax.cond(a[0] > 0, jnp.negative, jnp.cos, a),
    "platform_dependent": lambda a: jax.lax.platform_dependent(a, cpu=jnp.sin, default=jnp.cos),
    "dot_general": lambda a: jax.lax.dot(jnp.eye(4), a),
    "nested": jax.jit(jax.lax.sort),
    "a collective": lambda a: jax.vmap(lambda a: jax.lax.psum(a, "i"), axis_name="i")(a[None])[0],
}


def doubled_often(x):
    """Lead from a leaf to another on 2**40 paths."""
    return functools.reduce(lambda x, _: x + x, range(40), x)


# Each computes an output and two new leaves from two old leaves.
UPDATES = {
    "what comes from outside": lambda a, b: (a * 2, X, a + b),  # as adan does
    "leaves that change places": lambda a, b: (X, b, a),
    "a constant": lambda a, b: (a - b, np.zeros(4, np.float32), b + 1),
    "what stays": lambda a, b: (a + 1, a, b),
    "many paths": lambda a, b: (jnp.sin(x := doubled_often(a)), x, b),
    "one variable in both": lambda a, _: (2 * (new := a + X), new, new),
    "a sequence": in_sequence,
    "a nested jit": jax.jit(in_sequence),
    "custom derivatives": lambda a, b: (2 * jax.nn.relu(a), jax.nn.relu(a), b),
    "two results of one equation": lambda a, b: (a, *jax.lax.sort((b, a), num_keys=1)),
    "half of the results": uses_only_half,
}


def guarded_step(update, grads, state, **options):
    """Take a step of the optimizer with this update, and return its updates and its new state."""
    inner = optax.GradientTransformation(lambda _: state, lambda g, state, _: update(g, state))
    tx = ols.with_skipping(inner, **options)
    updates, new = tx.update(grads, tx.init(X), X)
    return updates, new.inner_state


def where(applied, update, state):
    """Take a step, or skip it, with an update that does not depend on the gradients."""

    def without_gradients(_, old):
        out, *new = update(*old)
        return out, tuple(new)

    return guarded_step(without_gradients, jnp.where(applied, X, jnp.nan), state)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_the_state_is_kept_whatever_an_update_computes_it_from(update, transform):
    run = transform(lambda applied, state: where(applied, update, state))
    assert_same_bits(run(False, OLD)[1], OLD)
    out, moved = run(True, OLD)
    # XLA may fuse a product and a sum into one rounding in only one of the programs.
    jax.tree.map(
        functools.partial(np.testing.assert_array_max_ulp, maxulp=2),
        (out, *moved),
        transform(update)(*OLD),
    )


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.needs_xla
@pytest.mark.parametrize("name", ACTS | COMPUTES)
def test_only_an_update_that_may_not_end_or_has_effects_is_given_zeros(name):
    fun = (ACTS | COMPUTES)[name]

    def update(grads, state):
        out = fun(grads)
        return jnp.isnan(out), state + out  # the guard passes booleans through

    step = jax.jit(lambda grads: guarded_step(update, grads, X))
    saw_nan, kept = step(jnp.full(4, jnp.nan))
    assert saw_nan.all() == saw_nan.any() == (name in COMPUTES)
    assert_same_bits(kept, X)
    np.testing.assert_allclose(step(X)[1], X + fun(X), rtol=1e-6)


@pytest.mark.needs_xla
def test_a_collective_over_an_axis_outside_is_no_effect():
    def update(grads, state):
        return jnp.isnan(jax.lax.psum(grads, "i")), state + grads

    mapped = jax.jit(jax.vmap(lambda grads: guarded_step(update, grads, X)[0], axis_name="i"))
    assert mapped(jnp.full((2, 4), jnp.nan)).all()


def test_callbacks_run_once_and_in_order_and_see_leaves_of_one_step():
    seen = []

    def update(a, b):
        a, b = a + 1, b + 1
        result = jax.pure_callback(
            lambda a, b: seen.append((a[0].item(), b[0].item())) or a, a, a, b
        )
        jax.debug.callback(lambda a: seen.append(a.item()), result[0], ordered=True)
        return result, a, b

    _, kept = jax.jit(lambda applied, state: where(applied, update, state))(False, OLD)
    jax.block_until_ready(kept)
    jax.effects_barrier()
    assert seen == [(2.0, 3.0), 2.0]


def test_a_loop_in_a_skipped_update_reads_leaves_of_the_same_step():
    # Between an old position and a new target the loop would never end.
    def update(position, target):
        target = target + 1
        position, turns = jax.lax.while_loop(
            lambda carry: jnp.any(carry[0] != target) & (carry[1] < 1000),
            lambda carry: (carry[0] + 1, carry[1] + 1),
            (position + 1, 0),
        )
        return turns > 0, position, target

    step = jax.jit(lambda applied, *state: where(applied, update, state))
    looped, kept = step(False, X, X)
    assert not looped
    assert_same_bits(kept, (X, X))


@pytest.mark.needs_xla  # the plain form makes NaN of an infinite derivative that is closed over
def test_the_kept_state_differentiates_like_the_old_one():
    # The update has an infinite derivative at the old state, and NaN at NaN.
    def kept(a, x):
        return jnp.sum(2 * guarded_step(lambda g, old: (g, jnp.sqrt(old - a) * g), x, a)[1])

    for derivative in (jax.grad, jax.jacfwd):
        found = jax.jit(derivative(kept, argnums=(0, 1)))(X, X * jnp.nan)
        np.testing.assert_array_equal(found, [[2] * 4, [0] * 4])


def test_an_update_may_write_variables_of_the_callers_trace():
    # `flax.nnx` allows writes to a Variable only in the trace that created it.
    @jax.jit
    def step(applied, *state):
        calls = nnx.Variable(jnp.zeros(()))

        def update(a, b):
            calls[...] = calls[...] + 1
            return a + 1, a + 1, b

        return where(applied, update, state)[1], calls[...]

    kept, calls = step(False, *OLD)
    assert calls == 1
    assert_same_bits(kept, OLD)


def test_keys_are_selected_leaves_that_are_no_arrays_stay_and_tracers_do_not_leak():
    rest = {"name": "adam", "nothing": None, "float0": np.zeros(3, jax.dtypes.float0)}
    key = jax.random.key(3)
    new_key, sample = jax.random.split(key)

    def update(_, old):
        assert old["name"] == "adam"
        new_key, sample = jax.random.split(old["key"])
        return {"sample": sample, "label": "updates"}, {**old, "a": old["a"] + 1, "key": new_key}

    def step(grads, a, key):
        out, new = guarded_step(update, grads, {**rest, "a": a, "key": key})
        assert out.pop("label") == "updates"
        assert new["name"] == "adam"
        assert new["float0"] is rest["float0"]
        return out, new["a"], new["key"]

    with jax.check_tracer_leaks():
        assert_same_bits(jax.jit(step)(X, X, key), ({"sample": sample}, X + 1, new_key))
        assert_same_bits(jax.jit(step)(X * np.nan, X, key)[1:], (X, key))


@pytest.mark.parametrize(
    "update",
    [lambda a, _: (X, a), lambda a, _: (X, a, "text"), lambda a, b: (X, a, b, X)],
    ids=["leaf lost", "array to text", "leaf more"],
)
def test_a_state_of_another_structure_is_refused(update):
    inner = optax.GradientTransformation(lambda _: OLD, lambda g, state, _: (g, update(*state)[1:]))
    tx = ols.with_skipping(inner)
    for transform in (lambda f: f, jax.jit):
        with pytest.raises(ValueError, match=r"must keep its (structure|shapes)"):
            transform(tx.update)(X, tx.init(X))


def test_scopes_and_precision_of_an_update_are_kept():
    def update(a, b):
        with jax.named_scope("inner_moment"), jax.default_matmul_precision("highest"):
            a = jnp.outer(a, X) @ X
        return a, a, b

    lowered = jax.jit(lambda applied, *state: where(applied, update, state)).lower(True, *OLD)
    text = lowered.as_text(debug_info=True)
    assert "inner_moment" in text
    assert "HIGHEST" in text


@pytest.mark.skipif(not hasattr(jax, "reshard"), reason="jax.reshard is newer than this JAX")
def test_an_update_may_contain_a_shard_map():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharded, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    spread = {"in_specs": P("x"), "out_specs": P("x")}
    total = jax.shard_map(lambda v: v + jax.lax.psum(jnp.sum(v), "x"), mesh=mesh, **spread)

    def update(a, b):
        a = jax.reshard(total(jax.reshard(a, sharded)), everywhere)
        return a, a, b

    state = jax.device_put(OLD, everywhere)
    step = jax.jit(lambda applied, *state: where(applied, update, state)[1][0])
    np.testing.assert_array_equal(step(True, *state), OLD[0] + 4.5)
    np.testing.assert_array_equal(step(False, *state), OLD[0])


def test_a_replicated_leaf_may_be_replaced_by_one_that_varies_over_devices():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("x",))

    def step(grads, leaf):
        update = lambda g, s: (jnp.sin(s + g), s + g)  # noqa: E731
        return guarded_step(update, grads, leaf, axis_name="x")

    specs = {"in_specs": (P("x"), P()), "out_specs": P("x")}
    run = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    np.testing.assert_array_equal(run(X, X[:2])[1], [2, 4, 4, 6])
    np.testing.assert_array_equal(run(X * np.nan, X[:2])[1], [1, 2, 1, 2])


def test_an_optimizer_that_cannot_be_traced_works_eagerly():
    def update(updates, state, _):
        return (-updates if float(jnp.sum(state)) >= 0 else updates), state + 1

    tx = ols.with_loss_scaling(optax.GradientTransformation(lambda _: jnp.zeros(()), update), 4)
    updates, state = tx.update(X, tx.init(X), X)
    np.testing.assert_array_equal(updates, -X / 4)
    assert state.inner_state == 1


def test_an_update_that_raises_is_called_once():
    calls = []

    def update(*given):
        calls.append(given)
        raise KeyError

    tx = ols.with_skipping(optax.GradientTransformation(lambda _: X, update))
    with pytest.raises(KeyError):
        jax.jit(tx.update)(X, tx.init(X), X)
    assert len(calls) == 1


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_weakly_typed_leaf_of_the_state_stays_weakly_typed(transform):
    inner = optax.GradientTransformation(lambda _: jnp.asarray(1.0), lambda g, s, _: (g, s * 2))
    tx = ols.with_skipping(inner)
    state = tx.init(X)
    _, new = transform(tx.update)(X, state)
    assert jax.typeof(new.inner_state) == jax.typeof(state.inner_state)
    assert state.inner_state.weak_type
