"""`optax_lossscale.flax.TrainState`: which fields an applied and a skipped step change."""

import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, serialization
from flax.training import train_state
from plain_where import assert_same_bits, types

import optax_lossscale as ols
from optax_lossscale.flax import TrainState

pytestmark = pytest.mark.integration

OWG = "_overwrite_with_gradient"  # the metadata of Flax's fp8 layers
TOO_LARGE = 2.0**24  # overflows float16 gradients
CONTAINERS = pytest.mark.parametrize(
    "container", [core.unfreeze, core.freeze], ids=["dict", "FrozenDict"]
)


class Counting(TrainState):
    seen: Any
    key: Any = None


GUARDED = "params", "seen", "key"
X = np.random.default_rng(0).standard_normal((16, 4), np.float32)
BAD = np.where(np.arange(64).reshape(16, 4) == 14, np.float32(np.inf), X)
TRACES = []


@jax.jit
def step(state, x):
    """Train one step, in which every field changes."""
    TRACES.append(None)

    def loss_fn(params):
        out = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
        return state.scale_loss(jnp.mean((out.astype(jnp.float32) - 1) ** 2))

    new = {"seen": {"mean": state.seen["mean"] + x.mean(0)}, "key": state.key + 1}
    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params), **new)


def test_a_good_step_updates_every_field_and_a_skipped_one_only_the_loss_scale():
    given = {"seen": {"mean": jnp.zeros(4)}, "key": jax.random.key_data(jax.random.key(1))}
    params, tx = {"w": jnp.full(4, 0.1)}, optax.adam(1e-2)
    start = Counting.create(apply_fn=None, params=params, tx=tx, **given)
    before = step(start, X)
    for name in GUARDED:
        old, new = (jax.tree.leaves(getattr(state, name)) for state in (start, before))
        assert not any(map(np.array_equal, old, new))
    assert (int(before.step), bool(before.applied)) == (1, True)
    assert float(before.loss_scale) == 2.0**15
    assert types(before) == types(start)

    for loss_scale, x in ((2.0**15, BAD), (TOO_LARGE, X)):
        opt_state = optax.tree.set(before.opt_state, loss_scale=jnp.float32(loss_scale))
        after = step(before.replace(opt_state=opt_state), x)
        for name in ("step", *GUARDED):
            assert_same_bits(getattr(after, name), getattr(before, name))
        assert_same_bits(after.opt_state.inner_state, before.opt_state.inner_state)
        assert not after.applied
        assert float(after.loss_scale) == loss_scale / 2
        assert types(after) == types(before)

    # A restored state, with no field at its default, continues without a new trace.
    counts = {"growth_count": 2, "overflow_count": 4, "consecutive_skipped": 5, "total_skipped": 6}
    counts = {name: jnp.int32(n) for name, n in counts.items()}
    after = after.replace(opt_state=optax.tree.set(after.opt_state, **counts))
    restored = serialization.from_bytes(start, serialization.to_bytes(after))
    assert_same_bits(restored, after)
    assert types(restored) == types(after)
    assert_same_bits(step(restored, X), step(after, X))
    assert len(TRACES) == 1


def scalar_state(tx=None, seen=None, **options):
    tx, params = tx or optax.sgd(1.0), {"w": jnp.float32(1)}
    return Counting.create(apply_fn=None, params=params, tx=tx, seen=seen, **options)


def grads_of(state, value):
    return {"w": jnp.float32(value) * state.loss_scale}


def test_every_leaf_is_a_strongly_typed_array_from_the_start():
    params, tx = {"w": jnp.asarray(1.0)}, optax.inject_hyperparams(optax.sgd)(0.1)  # weakly typed
    seen = {"epoch": 3, "average": 0.5, "on": True}
    state = Counting.create(apply_fn=None, params=params, tx=tx, seen=seen)
    assert [state.seen[name].dtype for name in seen] == [jnp.int32, jnp.float32, jnp.bool_]
    after = jax.jit(lambda s: s.apply_gradients(grads=params, seen=s.seen))(state)
    assert types(after) == types(state)
    for leaf in jax.tree.leaves((state, after)):
        assert isinstance(leaf, jax.Array)
        assert not leaf.weak_type
    assert Counting.create(apply_fn=None, params=params, tx=tx, seen="text").seen == "text"


def test_two_states_with_the_same_tx_have_the_same_structure():
    one, other = scalar_state(), scalar_state()
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert jax.tree.structure(one) == jax.tree.structure(other.replace(tx=one.tx))


def test_states_are_pickled_under_public_names():
    state = TrainState.create(apply_fn=None, params=jnp.ones(2), tx=optax.sgd(1.0))
    state = pickle.loads(pickle.dumps(state.replace(tx=None)))  # noqa: S301, our own
    assert type(state) is TrainState
    assert TrainState.__module__ == "optax_lossscale.flax"


def test_it_can_be_scanned_and_donated():
    policy = ols.DynamicLossScale(growth_interval=3)
    state = scalar_state(loss_scale=policy, tx=optax.adam(0.1), seen=0)
    values = jnp.array([1, jnp.inf, jnp.nan, 1, 1, 1, 1])

    def body(state, value):
        state = state.apply_gradients(grads=grads_of(state, value), seen=state.seen + 1)
        return state, state.applied

    run = jax.jit(lambda state: jax.lax.scan(body, state, values), donate_argnums=0)
    scanned, applied = run(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert applied.tolist() == np.isfinite(values).tolist()
    assert int(scanned.step) == int(scanned.seen) == 5
    assert float(scanned.loss_scale) == 2.0**14  # halved twice, doubled once


@pytest.mark.slow
def test_step_counts_skipped_steps_on_request_and_saturates():
    state, last = scalar_state(count_skipped=True), np.iinfo(np.int32).max
    assert state.count_skipped is True  # not a leaf of the tree
    for start, expected in ((0, [1, 2, 3]), (last - 2, [last - 1, last, last])):
        state = state.replace(step=jnp.int32(start))
        for g, step in zip((1, jnp.inf, 1), expected, strict=True):
            state = state.apply_gradients(grads=grads_of(state, g))
            assert int(state.step) == step


def test_without_checks_every_field_is_updated():
    state = scalar_state(loss_scale=None, seen=0)
    # As if restored from a run with another policy that had just skipped a step.
    opt_state = optax.tree.set(state.opt_state, consecutive_skipped=jnp.int32(3))
    after = state.replace(opt_state=opt_state)
    after = after.apply_gradients(grads=grads_of(state, jnp.nan), seen=jnp.int32(1))
    assert (int(after.step), int(after.seen), bool(after.applied)) == (1, 1, True)
    assert jnp.isnan(after.params["w"])


@pytest.mark.slow
def test_a_step_equals_flaxs_step_with_the_true_gradients():
    w = {"w": jnp.ones(3)}
    lookahead = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    for tx, params in ((optax.adamw(0.1), w), (lookahead, optax.LookaheadParams.init_synced(w))):
        given = {"apply_fn": None, "params": params, "tx": tx}
        ours, theirs = TrainState.create(**given), train_state.TrainState.create(**given)
        for g in (1.0, -3.0, 0.3):
            grads = {"w": jnp.full(3, g)}
            theirs = theirs.apply_gradients(grads=grads)
            ours = ours.apply_gradients(grads=ours.scale_loss(grads))
            assert_same_bits(ours.params, theirs.params)
            assert_same_bits(ours.opt_state.inner_state, theirs.opt_state)
            assert int(ours.step) == theirs.step
    with pytest.raises(ValueError, match="`grads` must keep its structure"):
        ours.apply_gradients(grads=params)


def test_the_value_is_passed_to_the_optimizer_and_can_skip_the_step():
    tx = optax.GradientTransformationExtraArgs(
        lambda _: (), lambda grads, state, _params, *, value: ({"w": grads["w"] * value}, state)
    )
    state = scalar_state(tx=tx)
    for value, w, applied in ((3, 1 + 2 * 3, 1), (jnp.nan, 1, 0)):
        after = state.apply_gradients(grads=grads_of(state, 2), value=jnp.float32(value))
        assert (float(after.params["w"]), int(after.step)) == (w, applied)
        assert bool(after.applied) == applied
        assert float(after.loss_scale) == float(state.loss_scale)


@pytest.mark.slow
def test_parameters_may_be_an_array_and_gradients_python_numbers():
    state = scalar_state(loss_scale=8)
    assert float(state.apply_gradients(grads={"w": 4.0}).params["w"]) == 0.5
    # A state built without `create` also counts applied steps.
    state = TrainState(0, None, jnp.float32(1), state.tx, state.tx.init(jnp.float32(1)))
    with jax.numpy_dtype_promotion("strict"):
        after = [state.apply_gradients(grads=jnp.float32(g)) for g in (8, jnp.inf)]
    assert [(int(s.step), float(s.params)) for s in after] == [(1, 0), (0, 1)]


@CONTAINERS
def test_a_field_keeps_its_container_frozen_or_not(container):
    state = scalar_state(seen=container({"a": {"mean": jnp.zeros(2)}}))
    new = {"a": {"mean": jnp.ones(2)}}
    for given in (core.freeze(new), new):
        after = state.apply_gradients(grads=grads_of(state, 1), seen=given)
        assert type(after.seen) is type(state.seen)
        assert_same_bits(after.seen, container(new))


def test_a_field_that_apply_gradients_does_not_take_is_refused():
    state = scalar_state()
    for name in ("batch_stat", "loss_scale", "step", "params", "opt_state", "applied"):
        given = {name: getattr(state, name, jnp.float32(1))}
        with pytest.raises((AttributeError, TypeError), match=f"'{name}'"):
            state.apply_gradients(grads=grads_of(state, 1), **given)


@CONTAINERS
def test_fp8_metadata_are_overwritten_on_a_good_step_and_kept_on_a_skipped_one(container):
    params = container({"params": {"w": jnp.float32(1)}, OWG: {"amax": jnp.float32(3)}})
    tx = optax.sgd(0.5, momentum=0.9)
    state = TrainState.create(apply_fn=None, params=params, tx=tx, loss_scale=8)
    # The optimizer does not see the metadata.
    expected = jax.tree.structure(tx.init(params["params"]))
    for w, amax, applied in ((16, 5, 1), (jnp.inf, 7, 0), (8, jnp.nan, 0)):
        grads = {"params": {"w": jnp.float32(w)}, OWG: {"amax": jnp.float32(amax)}}
        after = state.apply_gradients(grads=container(grads))
        assert type(after.params) is type(params)
        assert jax.tree.structure(after.opt_state.inner_state) == expected
        assert int(after.step) == applied
        assert after.params == container(
            {"params": {"w": 0 if applied else 1}, OWG: {"amax": 5 if applied else 3}}
        )


@pytest.mark.parametrize(("container", "remainders"), [(core.unfreeze, True), (core.freeze, False)])
def test_master_weights_are_read_from_params_with_fp8_metadata(container, remainders):
    params = container({"params": {"w": jnp.bfloat16(1)}, OWG: {"amax": jnp.float32(3)}})
    tx = ols.with_master_weights(optax.sgd(1e-4), remainders=remainders)
    state = TrainState.create(apply_fn=None, params=params, tx=tx, loss_scale=8)
    grads = {"params": {"w": jnp.bfloat16(8)}, OWG: {"amax": jnp.float32(5)}}
    state = state.apply_gradients(grads=container(grads))
    expected = {"params": {"w": jnp.float32(1) - jnp.float32(1e-4)}, OWG: {"amax": 5}}
    assert ols.master_weights(state.opt_state, state.params) == container(expected)
    # Outside of a TrainState the optimizer sees the metadata.
    opt_state = tx.init(params)
    assert ols.master_weights(opt_state, params) == params


@pytest.mark.slow
def test_an_fp8_layer_trains_and_its_metadata_reveal_an_overflow_that_it_clips():
    # Use bfloat16, since products of float8 numbers overflow float16.
    fp8 = {"dot_general_cls": nn.Fp8DirectDotGeneralOp, "dtype": jnp.bfloat16}
    layer = nn.Dense(1, use_bias=False, **fp8)
    x = jax.random.normal(jax.random.key(1), (4, 16))
    params, tx = jax.jit(layer.init)(jax.random.key(0), x), optax.adam(1e-2)
    policy = ols.DynamicLossScale(2.0**10)
    start = TrainState.create(apply_fn=layer.apply, params=params, tx=tx, loss_scale=policy)

    @jax.jit
    def step(state):
        def loss_fn(params):
            out = state.apply_fn(params, x).astype(jnp.float16)
            return state.scale_loss(jnp.mean(out.astype(jnp.float32)))

        grads = jax.grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), grads

    state, grads = step(start)
    assert_same_bits(state.params[OWG], grads[OWG])
    assert types(state) == types(start)
    assert not np.array_equal(*(jax.tree.leaves(s.params["params"]) for s in (state, start)))

    # The layer records the infinite gradient and continues with the largest float8.
    opt_state = optax.tree.set(state.opt_state, loss_scale=jnp.float32(TOO_LARGE))
    after, grads = step(state.replace(opt_state=opt_state))
    assert ols.all_finite(grads["params"])
    assert not ols.all_finite(grads[OWG])
    assert_same_bits(after.params, state.params)
    assert float(after.loss_scale) == TOO_LARGE / 2


def quadratic(params):
    return 0.5 * jnp.sum(jnp.array([1.0, 10.0, 100.0]) * params["w"] ** 2) - jnp.sum(params["w"])


def test_extra_arguments_reach_rules():
    def in_a_range(_grads, _params, *, step, **_):
        return (step >= 3) & (step < 5)

    params = {"w": jnp.ones(3)}
    rules = (ols.Spike("kl", window=4), in_a_range)
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), skip_if=rules)

    @jax.jit
    def train_step(state, kl, step):
        grads = ols.grad(quadratic)(state, state.params)
        return state.apply_gradients(grads=grads, value=1.0, extra_args={"kl": kl, "step": step})

    applied = []
    for step, kl in enumerate([1.0, 1.1, 0.9, 1.0, 1.1, 9.0, 1.0]):
        state = train_step(state, jnp.float32(kl), jnp.int32(step))
        applied.append(bool(state.applied))
    assert applied == [True, True, True, False, False, False, True]


@pytest.mark.slow
def test_line_searches_get_their_arguments_from_apply_gradients():
    inner, params = optax.lbfgs(), {"w": jnp.zeros(3)}

    @jax.jit
    def plain_step(params, opt_state):
        loss, grads = jax.value_and_grad(quadratic)(params)
        search = {"value": loss, "grad": grads, "value_fn": quadratic}
        updates, opt_state = inner.update(grads, opt_state, params, **search)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def step(state):
        loss, grads = ols.value_and_grad(quadratic)(state, state.params)
        search = {"grad": grads, "value_fn": quadratic}
        return state.apply_gradients(grads=grads, value=loss, extra_args=search)

    expected, opt_state = params, inner.init(params)
    for _ in range(4):
        expected, opt_state = plain_step(expected, opt_state)
    for loss_scale in (None, 2.0**10, "dynamic"):
        state = TrainState.create(apply_fn=None, params=params, tx=inner, loss_scale=loss_scale)
        for _ in range(4):
            state = step(state)
        np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-5)


@pytest.mark.slow
def test_sophia_gets_its_function_from_apply_gradients():
    inner = optax.contrib.sophia(0.1)
    params = {"w": jnp.ones(3)}
    state = TrainState.create(apply_fn=None, params=params, tx=inner, loss_scale=2.0**10)
    opt_state = inner.init(params)

    @jax.jit
    def step(state, params, opt_state):
        grads = jax.grad(quadratic)(params)
        updates, opt_state = inner.update(grads, opt_state, params, obj_fn=quadratic)
        params = optax.apply_updates(params, updates)
        grads = ols.grad(quadratic)(state, state.params)
        state = state.apply_gradients(grads=grads, extra_args={"obj_fn": quadratic})
        return state, params, opt_state

    for _ in range(2):
        state, params, opt_state = step(state, params, opt_state)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-6)
