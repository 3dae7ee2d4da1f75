"""The state: its type is a fixed point, it survives every container, and it is found in each."""

import copy
import pickle

import chex
import flax.nnx
import flax.serialization
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_lossscale as ols

INT32_MAX = 2**31 - 1
DTYPES = ("float32", "int32", "int32", "int32", "int32")
# No field at its default, no two alike.
VALUES = (12.5, 3, 2, 5, 7)

POLICIES = {
    "dynamic": ols.DynamicLossScale(16, 2),
    "hysteresis": ols.DynamicLossScale(16, 2, hysteresis=3, consecutive_hysteresis=True),
    "fixed": ols.FixedLossScale(16),
    "unchecked": ols.FixedLossScale(16, skip_nonfinite=False),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
flags = pytest.mark.parametrize("flag", [True, False])


@pytest.fixture
def state():
    return ols.LossScaleState(*(jnp.asarray(x, t) for x, t in zip(VALUES, DTYPES, strict=True)))


def types_of(state):
    """Return what `jax.jit` compiles for, weak types and shardings included."""
    return [jax.typeof(leaf) for leaf in state]


def assert_intact(restored):
    assert type(restored) is ols.LossScaleState
    assert tuple(field.tolist() for field in restored) == VALUES
    assert tuple(str(field.dtype) for field in restored) == DTYPES
    assert all(field.shape == () for field in restored)


def pointers(state):
    return [field.unsafe_buffer_pointer() for field in state]


# Types


@every_policy
def test_the_first_state_is_strongly_typed_and_empty(policy):
    state = policy.init()
    assert type(state) is ols.LossScaleState
    assert [(str(x.dtype), x.shape, x.weak_type) for x in state] == [(t, (), False) for t in DTYPES]
    assert [float(x) for x in state] == [16, 0, 0, 0, 0]


@pytest.mark.parametrize("policy", [POLICIES["hysteresis"], POLICIES["fixed"]])
@flags
def test_the_type_of_every_leaf_is_a_fixed_point(policy, flag, runner):
    update = runner(lambda s, f: policy.update(s, f, loss_finite=f))
    before = policy.init()
    after = update(before, jnp.asarray(flag))
    strong = [(str(x.dtype), x.shape, x.weak_type) for x in after]
    assert strong == [(t, (), False) for t in DTYPES]
    assert [str(t) for t in types_of(after)] == [str(t) for t in types_of(before)]


@every_policy
@flags
def test_plain_and_compiled_updates_agree_in_type(policy, flag):
    before = policy.init()
    plain = policy.update(before, flag)
    compiled = jax.jit(policy.update)(before, jnp.asarray(flag))
    shapes = jax.eval_shape(policy.update, before, jnp.asarray(flag))
    assert types_of(plain) == types_of(compiled) == types_of(before)
    assert [(s.shape, s.dtype, s.weak_type) for s in shapes] == [
        (x.shape, x.dtype, x.weak_type) for x in before
    ]


@every_policy
def test_a_second_step_does_not_compile(policy):
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(policy.update, n=1))
    state = policy.init()
    for flag in (True, False, True):
        state = update(state, jnp.asarray(flag))


@every_policy
def test_the_state_is_a_carry_of_scan_and_of_while(policy):
    def body(state, flag):
        return policy.update(state, flag), None

    state, _ = jax.lax.scan(body, policy.init(), jnp.array([True, False, True]))
    looped = jax.lax.fori_loop(0, 3, lambda i, s: policy.update(s, i != 1), policy.init())
    assert [x.tolist() for x in state] == [x.tolist() for x in looped]


@every_policy
@flags
@pytest.mark.parametrize(
    "replace",
    [
        lambda state, **kw: state._replace(**kw),
        lambda state, **kw: optax.tree.set({"inner": (state,)}, **kw)["inner"][0],
    ],
    ids=["_replace", "optax.tree.set"],
)
def test_a_python_number_that_was_set_is_strongly_typed_afterwards(policy, flag, replace):
    state = replace(policy.init(), loss_scale=1024.0, growth_count=0)
    assert isinstance(state.loss_scale, float)
    after = policy.update(state, flag)
    assert [(str(x.dtype), x.weak_type) for x in after] == [(t, False) for t in DTYPES]
    backs_off = policy is POLICIES["dynamic"] and not flag
    assert float(after.loss_scale) == (512 if backs_off else 1024)


def test_a_python_number_that_was_set_scales_a_loss_in_float32():
    state = ols.init()._replace(loss_scale=2.0**16)
    with pytest.warns(UserWarning, match="float16"):
        scaled = ols.scale_loss(jnp.float16(2), state)
    assert (float(scaled), scaled.dtype, scaled.weak_type) == (2**17, jnp.float32, False)
    grads, _ = ols.unscale_and_check(jnp.float16(2), state)
    assert (float(grads), grads.dtype, grads.weak_type) == (2**-15, jnp.float32, False)


@pytest.mark.parametrize(
    ("loss_scale", "count", "after"),
    [
        (2.0**-126, 0, [1, 0, 1, 1, 1]),
        (2.0**126, INT32_MAX, [2.0**125, 0, 1, INT32_MAX, INT32_MAX]),
    ],
)
def test_python_numbers_at_the_bounds_may_be_set(loss_scale, count, after):
    state = ols.LossScaleState(loss_scale, *[count] * 4)
    assert [x.item() for x in ols.DynamicLossScale().update(state, False)] == after


# Buffers


@every_policy
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_no_two_fields_share_a_buffer(policy, transform):
    state = transform(policy.init)()
    assert len(set(pointers(state))) == 5
    for flag in (True, False, True, True):
        state = transform(policy.update)(state, jnp.asarray(flag))
        assert len(set(pointers(state))) == 5


@every_policy
def test_the_state_can_be_donated(policy):
    update = jax.jit(policy.update, donate_argnums=0)
    state = policy.init()
    for flag in (True, False, True):
        before, state = state, update(state, jnp.asarray(flag))
        assert all(field.is_deleted() for field in before)
    assert [field.shape for field in state] == [()] * 5


def test_two_states_of_one_policy_are_independent():
    policy = POLICIES["dynamic"]
    assert not set(pointers(policy.init())) & set(pointers(policy.init()))


# Counters


@pytest.mark.parametrize("policy", [ols.DynamicLossScale(), ols.FixedLossScale(8)])
@pytest.mark.parametrize(
    ("grads_finite", "loss_finite"), [(True, True), (False, True), (True, False)]
)
def test_counters_saturate(policy, grads_finite, loss_finite, runner):
    full = policy.init()._replace(
        consecutive_skipped=jnp.int32(INT32_MAX), total_skipped=jnp.int32(INT32_MAX)
    )
    update = runner(lambda s, g, f: policy.update(s, g, loss_finite=f))
    after = update(full, jnp.asarray(grads_finite), jnp.asarray(loss_finite))
    applied = grads_finite and loss_finite
    assert int(after.consecutive_skipped) == (0 if applied else INT32_MAX)
    assert int(after.total_skipped) == INT32_MAX


def test_the_growth_count_saturates_where_nothing_resets_it():
    policy = ols.FixedLossScale(8)
    state = policy.init()._replace(growth_count=jnp.int32(INT32_MAX - 1))
    counts = [int((state := policy.update(state, True)).growth_count) for _ in range(3)]
    assert counts == [INT32_MAX] * 3


# Round trips


def _stacked(state):
    return jax.tree.map(lambda x: np.stack([np.asarray(x)] * 2), state)


def _first(state):
    return jax.tree.map(lambda x: x[0], state)


def _flattened(state):
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == 5
    return jax.tree.unflatten(treedef, leaves)


def _by_path(state):
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert names == [f".{name}" for name in ols.LossScaleState._fields]
    return treedef.unflatten([leaf for _, leaf in leaves])


def _flax_bytes(state):
    return flax.serialization.from_bytes(ols.init(), flax.serialization.to_bytes(state))


def _flax_state_dict(state):
    by_name = flax.serialization.to_state_dict(state)
    assert list(by_name) == list(ols.LossScaleState._fields)
    return flax.serialization.from_state_dict(ols.init(), by_name)


ROUND_TRIPS = {
    "flatten": _flattened,
    "flatten with path": _by_path,
    "tree.map": lambda state: jax.tree.map(lambda x: x, state),
    "jit": jax.jit(_flattened),
    "vmap": lambda state: _first(jax.vmap(lambda s: s)(_stacked(state))),
    "pmap": lambda state: _first(jax.pmap(lambda s: s)(_stacked(state))),
    "scan": lambda state: jax.lax.scan(lambda s, _: (s, None), state, length=3)[0],
    "cond": lambda state: jax.lax.cond(jnp.asarray(True), lambda s: s, lambda _: ols.init(), state),
    "remat": jax.checkpoint(_flattened),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),  # noqa: S301
    "deepcopy": copy.deepcopy,
    "device_get": jax.device_get,
    "device_put": lambda state: jax.device_put(state, jax.devices()[3]),
    "tuple": lambda state: ols.LossScaleState(*tuple(state)),
    "dict": lambda state: ols.LossScaleState(**state._asdict()),
    "flax bytes": _flax_bytes,
    "flax state dict": _flax_state_dict,
}


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_every_field_survives(round_trip, state):
    assert_intact(round_trip(state))


def test_eval_shape_keeps_the_type(state):
    shapes = jax.eval_shape(lambda s: s, state)
    assert type(shapes) is ols.LossScaleState
    assert [(str(s.dtype), s.shape, s.weak_type) for s in shapes] == [
        (t, (), False) for t in DTYPES
    ]
    assert jax.eval_shape(ols.init).loss_scale == jax.ShapeDtypeStruct((), jnp.float32)


def test_a_state_of_numpy_arrays_works_as_restored(state):
    restored = _flax_bytes(state)
    assert isinstance(restored.loss_scale, np.ndarray)
    policy = ols.DynamicLossScale(min_scale=2**-3)
    after = policy.update(restored, False)
    assert types_of(after) == types_of(state)
    assert float(after.loss_scale) == 6.25
    assert float(ols.scale_loss(jnp.float32(2), restored)) == 25


@pytest.mark.parametrize("devices", [1, 8])
def test_every_field_survives_orbax_onto_another_mesh(state, tmp_path, devices):
    def placed(count, name):
        mesh = jax.make_mesh((count,), (name,), devices=jax.devices()[-count:])
        return NamedSharding(mesh, PartitionSpec())

    sharding = placed(devices, "restored")
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), ols.init()
    )
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", jax.device_put(state, placed(4, "saved")))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", template)
    assert_intact(restored)
    assert {leaf.sharding for leaf in restored} == {sharding}


# Finding it

TX = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9), ols.FixedLossScale(12.5))
PARAMS = {"a": jnp.ones(3), "b": jnp.ones(2)}


def _injected(params):
    def factory(learning_rate):
        return ols.with_loss_scaling(optax.sgd(learning_rate), ols.FixedLossScale(12.5))

    return optax.inject_hyperparams(factory)(learning_rate=0.1).init(params)


def _train_state(params):
    return flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=TX)


def _nnx_optimizer(params):
    del params
    model = flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0))
    return flax.nnx.Optimizer(model, TX, wrt=flax.nnx.Param)


def _partitioned(params):
    txs = {"scaled": TX, "frozen": optax.set_to_zero()}
    return optax.partition(txs, {"a": "scaled", "b": "frozen"}).init(params)


CONTAINERS = {
    "itself": lambda _: ols.init(12.5),
    "wrapper": TX.init,
    "wrapper with extra arguments": optax.with_extra_args_support(TX).init,
    "chain": optax.chain(optax.identity(), TX, optax.identity()).init,
    "named chain": optax.named_chain(("clip", optax.identity()), ("scaled", TX)).init,
    "masked": optax.masked(TX, {"a": True, "b": False}).init,
    "partition": _partitioned,
    "MultiSteps": optax.MultiSteps(TX, 2).init,
    "inject_hyperparams": _injected,
    "apply_if_finite": optax.apply_if_finite(TX, 2).init,
    "dict, list, None": lambda _: {"x": [None, (ols.init(12.5), 3)], "y": "text"},
    "Flax TrainState": _train_state,
    "nnx.Optimizer": _nnx_optimizer,
}
every_container = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())


@every_container
def test_it_is_found_in(make):
    found = ols.loss_scale_state(make(PARAMS))
    assert type(found) is ols.LossScaleState
    assert [x.tolist() for x in found] == [12.5, 0, 0, 0, 0]
    assert all(isinstance(x, jax.Array) for x in found)


@every_container
def test_what_is_found_scales_and_unscales(make):
    opt_state = make(PARAMS)
    assert float(ols.scale_loss(jnp.float32(2), opt_state)) == 25
    grads, grads_finite = ols.unscale_and_check(jnp.float32(25), opt_state)
    assert (float(grads), bool(grads_finite)) == (2, True)


def test_the_shapes_of_it_are_found():
    found = ols.loss_scale_state(jax.eval_shape(TX.init, PARAMS))
    assert found.loss_scale == jax.ShapeDtypeStruct((), jnp.float32)


def test_it_is_found_under_jit():
    found = jax.jit(ols.loss_scale_state)(TX.init(PARAMS))
    assert float(found.loss_scale) == 12.5


def test_every_field_is_found_as_it_is(state):
    opt_state = TX.init(PARAMS)._replace(loss_scale_state=state)
    assert_intact(ols.loss_scale_state({"deep": [(opt_state,)]}))


NONE = (
    r"`(opt_)?state` must hold exactly one LossScaleState, got 0 in a .*nowhere.*`with_loss_scaling`"
)
FUNCTIONS = {
    "loss_scale_state": ols.loss_scale_state,
    "scale_loss": lambda s: ols.scale_loss(jnp.float32(1), s),
    "unscale_and_check": lambda s: ols.unscale_and_check(jnp.float32(1), s),
    "value_and_grad": lambda s: ols.value_and_grad(lambda w: w**2)(s, jnp.float32(1)),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())


@every_function
@pytest.mark.parametrize(
    "opt_state", [None, {}, optax.sgd(0.1).init(PARAMS), 8.0, "dynamic", (1.0, 0, 0, 0, 0)], ids=str
)
def test_none_is_an_error(function, opt_state):
    with pytest.raises(ValueError, match=NONE):
        function(opt_state)


@every_function
def test_several_are_an_error_that_names_each_path(function):
    opt_state = {"generator": TX.init(PARAMS), "critic": [ols.init()]}
    match = (
        r"`(opt_)?state` must hold exactly one LossScaleState, got 2 in a dict, found at: "
        r"`\['critic'\]\[0\]`, `\['generator'\]\.loss_scale_state`"
    )
    with pytest.raises(ValueError, match=match):
        function(opt_state)


def test_a_policy_is_not_a_state():
    with pytest.raises(ValueError, match=r"got 0 in a DynamicLossScale"):
        ols.loss_scale_state(ols.DynamicLossScale())
