"""The state: its type never changes, it survives every container, and is found in each."""

import pickle
import re

import flax.nnx
import flax.serialization
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_where import types

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.testing import assert_scaled_once

DTYPES = ("float32", "int32", "int32", "int32", "int32")
STRONG = [(dtype, (), False) for dtype in DTYPES]
# No field has its default, and no two are equal.
VALUES = (12.5, 3, 2, 5, 7)

POLICIES = {
    "hysteresis": ols.DynamicLossScale(16, 2, hysteresis=3, consecutive_hysteresis=True),
    "fixed": ols.FixedLossScale(16),
    "unchecked": ols.FixedLossScale(16, skip_nonfinite=False),
    "none": ols.as_loss_scale(None),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@pytest.fixture
def state():
    return ols.LossScaleState(*(jnp.asarray(x, t) for x, t in zip(VALUES, DTYPES, strict=True)))


def types_of(state):
    """Return the dtype, the shape and the weak type of each field."""
    assert type(state) is ols.LossScaleState
    return [(str(field.dtype), field.shape, field.weak_type) for field in state]


def numbers(state):
    return [field.tolist() for field in state]


def assert_intact(restored):
    assert type(restored) is ols.LossScaleState
    assert numbers(restored) == [*VALUES]
    assert [(str(field.dtype), field.shape) for field in restored] == [s[:2] for s in STRONG]


@every_policy
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_type_of_the_state_is_a_fixed_point(policy, run):
    update = run(lambda s, flag: policy.update(s, flag, loss_finite=flag))
    state = policy.init()
    assert types_of(state) == STRONG
    assert numbers(state) == [1 if policy is POLICIES["none"] else 16, 0, 0, 0, 0]
    for flag in (True, False):
        after = update(state, jnp.asarray(flag))
        assert types_of(after) == STRONG
        assert [str(jax.typeof(x)) for x in after] == [str(jax.typeof(x)) for x in state]
        # A Python number becomes an array.
        by_hand = state._replace(loss_scale=1024.0, growth_count=0)
        assert types_of(policy.update(by_hand, flag)) == STRONG


@every_policy
def test_one_program_takes_every_step_and_overwrites_the_state(policy):
    update = jax.jit(policy.update, donate_argnums=0)
    state, other = policy.init(), policy.init()
    assert types_of(jax.eval_shape(policy.update, state, jnp.asarray(True))) == STRONG
    for flag in (True, False, True):
        # A buffer that occurs twice cannot be donated.
        assert len({field.unsafe_buffer_pointer() for field in (*state, *other)}) == 10
        before, state = state, update(state, jnp.asarray(flag))
        assert all(field.is_deleted() for field in before)
    assert update._cache_size() == 1  # noqa: SLF001, the only way to ask


def test_a_python_number_that_was_set_scales_in_float32():
    state = ols.init()._replace(loss_scale=2.0**16)
    with pytest.warns(UserWarning, match="float16"):
        scaled = ols.scale_loss(jnp.float16(2), state)
    assert (float(scaled), scaled.dtype, scaled.weak_type) == (2**17, jnp.float32, False)
    grads, _ = ols.unscale_and_check(jnp.float16(2), state)
    assert (float(grads), grads.dtype, grads.weak_type) == (2**-15, jnp.float32, False)


def test_counts_that_were_set_to_python_numbers_stay_int32():
    tx = ols.skip_if(optax.sgd(0.1))
    state = optax.tree.set(tx.init(jnp.ones(2)), total_skipped=3, consecutive_skipped=0)
    after = tx.update(jnp.ones(2), state)[1]
    assert types(after) == types(tx.init(jnp.ones(2)))
    assert int(after.loss_scale_state.total_skipped) == 3


def _stacked(state):
    return jax.tree.map(lambda x: np.stack([np.asarray(x)] * 2), state)


def _first(state):
    return jax.tree.map(lambda x: x[0], state)


def _by_path(state):
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert names == [f".{name}" for name in ols.LossScaleState._fields]
    return treedef.unflatten([leaf for _, leaf in leaves])


def _flax_bytes(state):
    return flax.serialization.from_bytes(ols.init(), flax.serialization.to_bytes(state))


ROUND_TRIPS = {
    "flatten": _by_path,
    "jit": jax.jit(_by_path),
    "vmap": lambda state: _first(jax.vmap(lambda s: s)(_stacked(state))),
    "pmap": lambda state: _first(jax.pmap(lambda s: s)(_stacked(state))),
    "scan": lambda state: jax.lax.scan(lambda s, _: (s, None), state, length=3)[0],
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),  # noqa: S301
    "Flax bytes": _flax_bytes,
    "optimizer's state": lambda state: ols.loss_scale_state(
        {"deep": [(TX.init(PARAMS)._replace(loss_scale_state=state),)]}
    ),
}


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_every_field_survives(round_trip, state):
    assert_intact(round_trip(state))


def test_a_state_of_numpy_arrays_works_as_restored(state):
    restored = _flax_bytes(state)
    assert isinstance(restored.loss_scale, np.ndarray)
    after = ols.DynamicLossScale(min_scale=2**-3).update(restored, False)
    assert types_of(after) == STRONG
    assert float(after.loss_scale) == 6.25
    assert float(ols.scale_loss(np.float32(2), restored)) == 25


TX = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9), ols.FixedLossScale(12.5))
PARAMS = {"a": jnp.ones(3), "b": jnp.ones(2)}


def _injected(learning_rate):
    return ols.with_loss_scaling(optax.sgd(learning_rate), ols.FixedLossScale(12.5))


def _train_state(params):
    return flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=TX)


def _nnx_optimizer(params):
    del params
    model = flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0))
    return flax.nnx.Optimizer(model, TX, wrt=flax.nnx.Param)


CONTAINERS = {
    "itself": lambda _: ols.init(12.5),
    "wrapper": TX.init,
    "chain": optax.chain(optax.identity(), TX, optax.identity()).init,
    "named chain": optax.named_chain(("clip", optax.identity()), ("scaled", TX)).init,
    "masked": optax.masked(TX, {"a": True, "b": False}).init,
    "partition": optax.partition(
        {"scaled": TX, "frozen": optax.set_to_zero()}, {"a": "scaled", "b": "frozen"}
    ).init,
    "MultiSteps": optax.MultiSteps(TX, 2).init,
    "inject_hyperparams": optax.inject_hyperparams(_injected)(learning_rate=0.1).init,
    "dict, list, None": lambda _: {"x": [None, (ols.init(12.5), 3)], "y": "text"},
    "Flax TrainState": _train_state,
    "nnx.Optimizer": _nnx_optimizer,
    "nnx.split": lambda params: flax.nnx.split(_nnx_optimizer(params))[1],
    "Flax' dicts": lambda params: flax.serialization.to_state_dict(TX.init(params)),
}


@pytest.mark.filterwarnings("ignore:Transformations stand outside")
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_it_is_found_in(make):
    opt_state = make(PARAMS)
    found = ols.loss_scale_state(opt_state)
    assert types_of(found) == STRONG
    assert numbers(found) == [12.5, 0, 0, 0, 0]
    assert all(isinstance(x, jax.Array) for x in found)
    assert float(ols.scale_loss(np.float32(2), opt_state)) == 25
    grads, grads_finite = ols.unscale_and_check(np.float32(25), opt_state)
    assert (float(grads), bool(grads_finite)) == (2, True)
    assert_scaled_once(ols.grad(jnp.sum), opt_state, jnp.ones(3))


GUARDS = {
    "sgd": ols.with_loss_scaling(optax.sgd(0.1)),
    "everything": ols.with_loss_scaling(
        ols.with_master_weights(optax.adam(0.1)), skip_if=(ols.Spike(), lambda *_, **__: False)
    ),
    "skip_if": ols.skip_if(optax.sgd(0.1)),
    "skip_if, Spike": ols.skip_if(optax.adam(0.1), ols.Spike("grad_norm")),
}


def _skipped_in_nnx(tx):
    model = flax.nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=flax.nnx.Rngs(0))
    optimizer = flax.nnx.Optimizer(model, tx, wrt=flax.nnx.Param)
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), flax.nnx.state(model, flax.nnx.Param))
    for _ in range(3):
        optimizer.update(model, bad, value=jnp.float32(1))
    return optimizer, flax.nnx.state(optimizer)


def _skipped(tx):
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    opt_state = tx.init(params)
    for _ in range(3):
        _, opt_state = tx.update({"w": jnp.full(2, jnp.inf)}, opt_state, params, value=1.0)
    return opt_state, flax.serialization.to_state_dict(opt_state)


@pytest.mark.parametrize("tx", GUARDS.values(), ids=GUARDS.keys())
@pytest.mark.integration
@pytest.mark.parametrize("skipped", [_skipped, _skipped_in_nnx])
@pytest.mark.filterwarnings("ignore:`params` are bfloat16")
def test_a_state_of_dicts_says_what_the_state_says(tx, skipped):
    tree, dicts = skipped(tx)
    assert not ols.applied(dicts)
    assert diagnostics.metrics(dicts) == diagnostics.metrics(tree)
    assert diagnostics.is_stalled(dicts, max_consecutive_skipped=2)
    diagnostics.check_health(dicts)
    with pytest.raises(diagnostics.LossScaleStalledError) as expected:
        diagnostics.check_health(tree, max_consecutive_skipped=2)
    with pytest.raises(diagnostics.LossScaleStalledError, match=re.escape(str(expected.value))):
        diagnostics.check_health(dicts, max_consecutive_skipped=2)


def test_what_only_resembles_a_state_of_dicts_is_none():
    fields = ols.init()._asdict()
    assert ols.loss_scale_state(fields) == ols.init()
    counts = {name: field for name, field in fields.items() if name != "loss_scale"}
    for tree in (fields | {"more": 1}, counts, [*fields], str(fields)):
        with pytest.raises(ValueError, match="must hold exactly one LossScaleState, got 0"):
            ols.loss_scale_state(tree)


def test_its_shapes_are_found_too():
    found = ols.loss_scale_state(jax.eval_shape(TX.init, PARAMS))
    assert found.loss_scale == jax.ShapeDtypeStruct((), jnp.float32)
    assert jax.eval_shape(ols.init).loss_scale == found.loss_scale
