"""What traces bare traces wrapped, and a skipped step shows its checks nothing."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.experimental import checkify
from jax.sharding import PartitionSpec
from optimizers import OPTIMIZERS
from plain_where import assert_same_bits

import optax_lossscale as ols

pytestmark = pytest.mark.integration

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, -0.0])}
BAD = {"w": jnp.array([[1.0, jnp.inf], [jnp.nan, 0.0]]), "b": jnp.array([1.0, 2.0])}


def stateful(update, state=0.0):
    """Return an optimizer with this update, extra arguments included."""
    start = jax.tree.map(jnp.asarray, state)
    return optax.GradientTransformationExtraArgs(lambda _: start, update)


@pytest.mark.parametrize(
    "name",
    ["adam", "adamax", "adamaxw", "adafactor", "lamb", "radam", "contrib.muon", "rmsprop"],
)
def test_float_checks_see_no_error_in_a_skipped_first_step(name):
    tx = ols.with_loss_scaling(OPTIMIZERS[name].make(), 8.0)
    update = jax.jit(checkify.checkify(tx.update, errors=checkify.float_checks))
    # Infinite: the product of a NaN is one, and an error already.
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), PARAMS)
    error, (updates, state) = update(bad, tx.init(PARAMS), PARAMS)
    assert error.get() is None
    assert_same_bits(state.inner_state, tx.init(PARAMS).inner_state)
    assert_same_bits(updates, jax.tree.map(lambda p: jnp.full_like(p, -0.0), PARAMS))


def test_an_assertion_about_the_updates_holds_in_a_skipped_step():
    def check(updates, state, params=None):
        del params
        finite = jnp.isfinite(updates["w"]).all()
        return eqx.error_if(updates, ~finite, "the updates are not finite"), state

    checked = optax.chain(
        optax.adam(0.1), optax.GradientTransformation(lambda _: optax.EmptyState(), check)
    )
    tx = ols.with_loss_scaling(checked, 8.0)
    jax.block_until_ready(jax.jit(tx.update)(BAD, tx.init(PARAMS), PARAMS))


def test_a_callback_sees_counters_of_the_same_step():
    seen = []

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        new = jax.tree.map(lambda x: x + 1, state)
        seen_so_far = jax.pure_callback(
            lambda n, twice: seen.append((float(n), float(twice))) or np.float32(0),
            jax.ShapeDtypeStruct((), jnp.float32),
            new["n"][0],
            new["twice"][0] + 1,
        )
        return jax.tree.map(lambda u: u + seen_so_far * new["n"][0], updates), {
            "n": new["n"],
            "twice": new["twice"] + 1,
        }

    tx = ols.with_loss_scaling(stateful(update, {"n": [0.0] * 2, "twice": [0.0] * 2}), 8.0)
    state = tx.init(PARAMS)._replace(inner_state={"n": jnp.zeros(2), "twice": jnp.zeros(2)})
    for grads in (BAD, PARAMS, BAD):
        _, state = jax.jit(tx.update)(grads, state, PARAMS)
    jax.block_until_ready(state)
    assert seen == [(1, 2), (1, 2), (2, 4)]


def test_a_loop_meets_the_numbers_of_one_step():
    # Between an old position and a new target the loop would never end.
    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        target = state["target"] + 1
        position, turns = jax.lax.while_loop(
            lambda c: jnp.any(c[0] != target) & (c[1] < 1000),
            lambda c: (c[0] + 1, c[1] + 1),
            (state["position"] + 1, 0),
        )
        updates = jax.tree.map(lambda u: u * 0 + turns, updates)
        return updates, {"position": position, "target": target}

    start = {"position": jnp.zeros(3, jnp.int32), "target": jnp.zeros(3, jnp.int32)}
    turns = []
    inner = stateful(update, start)
    tapped = optax.chain(
        inner,
        optax.stateless(lambda u, _: jax.debug.callback(turns.append, u["b"][0]) or u),
    )
    tx = ols.with_loss_scaling(tapped, 8.0)
    jax.block_until_ready(jax.jit(tx.update)(BAD, tx.init(PARAMS), PARAMS))
    jax.effects_barrier()
    assert turns == [0]


def test_a_leaf_that_is_reset_keeps_its_type_under_check_vma():
    def update(updates, state, params=None, **extra_args):
        del state, extra_args
        reset = jnp.ones(2) * params.sum()  # the same on each device, where the old leaf is not
        return jax.lax.fori_loop(0, 2, lambda _, c: c * params.sum(), reset) + updates, reset

    tx = ols.with_loss_scaling(stateful(update, [0.0, 0.0]), 8.0)
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("d",))
    everywhere, sharded = PartitionSpec(), PartitionSpec("d")

    def step(grads, leaf, scale):
        state = ols.WithLossScalingState(scale, leaf)
        return tx.update(grads, state, jnp.array([1.0, -2.0]))[1].inner_state

    specs = {"in_specs": (everywhere, sharded, everywhere), "out_specs": sharded}
    new = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(jnp.ones(2), jnp.zeros(4), ols.init(8.0))
    np.testing.assert_array_equal(new, -jnp.ones(4))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "leaf", [np.zeros(3, jax.dtypes.float0), np.zeros(2), np.int64(3)], ids=["float0", "f8", "i8"]
)
def test_a_state_may_hold_leaves_of_numpy(leaf, compiled):
    # As `init` makes it, and made anew at each step; without float64 in JAX.
    def update(updates, state, params=None):
        del params
        new = np.zeros(3, jax.dtypes.float0) if leaf.dtype == jax.dtypes.float0 else state[0] + 1
        return updates, (new,)

    tx = ols.with_loss_scaling(optax.GradientTransformation(lambda _: (leaf,), update), 2.0)
    run = (
        jax.jit(lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS))
        if compiled
        else (lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS))
    )
    for grads, moved in ((PARAMS, 1), (BAD, 0)):
        updates, state = run(grads)
        assert jnp.isfinite(updates["w"]).all()
        if leaf.dtype != jax.dtypes.float0:
            np.testing.assert_array_equal(state.inner_state[0], leaf + moved)


@pytest.mark.parametrize(
    ("grads", "compiled"),
    [(PARAMS, False), (PARAMS, True), (BAD, True)],
    ids=["good, eager", "good, jit", "bad, jit"],
)
def test_an_extra_argument_keeps_its_kind(grads, compiled):
    def update(updates, state, params=None, *, rate):
        if rate > 0.05:  # would raise for a traced array
            updates = jax.tree.map(lambda p: rate * p, params)
        return updates, state

    half = jax.tree.map(lambda p: p.astype(jnp.float16), (grads, PARAMS))
    tx = ols.with_loss_scaling(stateful(update), 1.0)

    def run(grads, params):
        return tx.update(grads, tx.init(params), params, rate=0.1)[0]

    updates = (jax.jit(run) if compiled else run)(*half)
    assert {u.dtype for u in updates.values()} == {jnp.dtype(jnp.float16)}


def test_a_python_number_that_is_not_finite_does_not_reach_the_inner_optimizer():
    seen = []

    def update(updates, state, params=None, *, value):
        del params
        seen.append(value)
        return updates, state

    tx = ols.with_loss_scaling(stateful(update), 1.0)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=float("nan"))
    assert seen == [0.0]
    assert_same_bits(updates, jax.tree.map(lambda p: jnp.full_like(p, -0.0), PARAMS))


def test_weakly_typed_updates_stay_weakly_typed():
    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda _: 1.0, updates), state

    tx = ols.with_loss_scaling(stateful(update), 1.0)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert all(u.weak_type for u in updates.values())


@pytest.mark.parametrize("name", ["adam", "chain"])
def test_a_step_exports_with_symbolic_dimensions(name):
    (rows,) = export.symbolic_shape("rows")
    params = {
        name: jax.ShapeDtypeStruct((rows, *p.shape[1:]), p.dtype) for name, p in PARAMS.items()
    }
    tx = ols.with_loss_scaling(OPTIMIZERS[name].make())
    state = jax.eval_shape(tx.init, params)
    exported = export.export(jax.jit(tx.update))(params, state, params)
    updates, new = jax.jit(exported.call)(BAD, tx.init(PARAMS), PARAMS)
    assert new.loss_scale_state.total_skipped == 1
    assert_same_bits(updates, jax.tree.map(lambda p: jnp.full_like(p, -0.0), PARAMS))


@pytest.mark.parametrize("name", ["novograd", "contrib.mechanize"])
def test_an_error_about_half_precision_parameters_names_the_remedy(name):
    optimizer = OPTIMIZERS[name]
    half = jax.tree.map(lambda p: p.astype(jnp.float16), optimizer.params())
    tx = ols.with_loss_scaling(optimizer.make(), 8.0)
    extra_args = optimizer.extra_args(0, value=jnp.float32(1), grad=half)
    with pytest.raises((TypeError, ValueError)) as caught:
        jax.jit(lambda g: tx.update(g, tx.init(half), half, **extra_args))(half)
    assert "Keep the parameters in float32" in caught.value.__notes__[0]
