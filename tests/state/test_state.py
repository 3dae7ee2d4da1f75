"""The state: its type never changes, it survives every container, and is found in each."""

import functools
import pickle
import re

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from plain_where import types

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.testing import assert_scaled_once

DTYPES = ("float32", "int32", "int32", "int32", "int32")
STRONG = [(dtype, (), False) for dtype in DTYPES]
# No field has its default, and no two are equal.
POLICIES = {
    "dynamic": ols.DynamicLossScale(
        16, growth_interval=2, hysteresis=3, consecutive_hysteresis=True
    ),
    "fixed": ols.FixedLossScale(16),
    "unchecked": ols.FixedLossScale(16, skip_nonfinite=False),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def types_of(state):
    """Return the dtype, the shape and the weak type of each field."""
    assert type(state) is ols.LossScaleState
    return [(str(field.dtype), field.shape, field.weak_type) for field in state]


def numbers(state):
    return [field.tolist() for field in state]


@every_policy
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_type_of_the_state_is_a_fixed_point(policy, run):
    update = run(lambda s, flag: policy.update(s, flag, loss_finite=flag))
    state = policy.init()
    assert types_of(state) == STRONG
    assert numbers(state) == [16, 0, 0, 0, 0]
    for flag in (True, False):
        after = update(state, jnp.asarray(flag))
        assert types_of(after) == STRONG
        assert [str(jax.typeof(x)) for x in after] == [str(jax.typeof(x)) for x in state]
        # A Python number becomes an array.
        by_hand = state._replace(loss_scale=1024.0, growth_count=0)
        assert types_of(policy.update(by_hand, flag)) == STRONG


@every_policy
def test_one_program_takes_every_step_and_overwrites_the_state(policy):
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, flag):
        traces.append(flag)
        return policy.update(state, flag)

    state, other = policy.init(), policy.init()
    for flag in (True, False, True):
        # A buffer that occurs twice cannot be donated.
        assert len({field.unsafe_buffer_pointer() for field in (*state, *other)}) == 10
        before, state = state, update(state, jnp.asarray(flag))
        assert all(field.is_deleted() for field in before)
    assert len(traces) == 1


def test_numbers_of_python_that_were_set_become_arrays():
    tx = ols.with_skipping(optax.sgd(0.1))
    state = optax.tree.set(tx.init(jnp.ones(2)), total_skipped=3, consecutive_skipped=0)
    after = tx.update(jnp.ones(2), state)[1]
    assert types(after) == types(tx.init(jnp.ones(2)))
    assert int(after.loss_scale_state.total_skipped) == 3
    state = ols.init()._replace(loss_scale=2.0**16)
    grads, _ = ols.unscale_and_check(jnp.float16(2), state)
    for number, expected in ((ols.scale_loss(2.0, state), 2**17), (grads, 2**-15)):
        assert (float(number), number.dtype, number.weak_type) == (expected, jnp.float32, False)


@pytest.mark.parametrize(
    "restore",
    [
        lambda state: pickle.loads(pickle.dumps(state)),  # noqa: S301
        lambda state: serialization.from_bytes(ols.init(), serialization.to_bytes(state)),
        jax.jit(lambda state: state),
    ],
    ids=["pickle", "Flax bytes", "jit"],
)
def test_every_field_survives(restore):
    # No field has its default, and no two are equal.
    fields = zip((12.5, 3, 2, 5, 7), DTYPES, strict=True)
    restored = restore(ols.LossScaleState(*(jnp.asarray(x, dtype) for x, dtype in fields)))
    assert type(restored) is ols.LossScaleState
    assert numbers(restored) == [12.5, 3, 2, 5, 7]
    assert [str(field.dtype) for field in restored] == [*DTYPES]
    # A state restored as NumPy arrays works unchanged.
    after = ols.DynamicLossScale(min_scale=2**-3).update(restored, False)
    assert types_of(after) == STRONG
    assert float(after.loss_scale) == 6.25
    assert float(ols.scale_loss(np.float32(2), restored)) == 25


TX = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9), ols.FixedLossScale(12.5))
PARAMS = {"a": jnp.ones(3), "b": jnp.ones(2)}


def nnx_optimizer(tx, dtype):
    model = flax.nnx.Linear(2, 3, param_dtype=dtype, rngs=flax.nnx.Rngs(0))
    return model, flax.nnx.Optimizer(model, tx, wrt=flax.nnx.Param)


CONTAINERS = {
    "itself": lambda _: ols.init(12.5),
    "wrapper": TX.init,
    "named chain": optax.named_chain(("clip", optax.identity()), ("scaled", TX)).init,
    "masked": optax.masked(TX, {"a": True, "b": False}).init,
    "partition": optax.partition(
        {"scaled": TX, "frozen": optax.set_to_zero()}, {"a": "scaled", "b": "frozen"}
    ).init,
    "MultiSteps": optax.MultiSteps(TX, 2).init,
    "dict, list, None": lambda _: {"x": [None, (ols.init(12.5), 3)], "y": "text"},
    "Flax TrainState": lambda params: TrainState.create(apply_fn=None, params=params, tx=TX),
    "nnx.Optimizer": lambda _: nnx_optimizer(TX, jnp.float32)[1],
    "nnx.split": lambda _: flax.nnx.split(nnx_optimizer(TX, jnp.float32)[1])[1],
    "Flax' dicts": lambda params: serialization.to_state_dict(TX.init(params)),
}


@pytest.mark.filterwarnings("ignore:Some transformations are outside")
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_it_is_found_in(make):
    opt_state = make(PARAMS)
    found = ols.loss_scale_state(opt_state)
    assert types_of(found) == STRONG
    assert numbers(found) == [12.5, 0, 0, 0, 0]
    assert float(ols.scale_loss(np.float32(2), opt_state)) == 25
    grads, grads_finite = ols.unscale_and_check(np.float32(25), opt_state)
    assert (float(grads), bool(grads_finite)) == (2, True)
    assert_scaled_once(ols.grad(jnp.sum), opt_state, jnp.ones(3))


def test_it_is_found_in_a_state_of_shapes():
    shapes = jax.eval_shape(TX.init, PARAMS)
    assert ols.loss_scale_state(shapes) == jax.eval_shape(ols.init)


EVERYTHING = ols.with_loss_scaling(
    ols.with_master_weights(optax.adam(0.1)), skip_if=(ols.Spike(), lambda *_, **__: False)
)


def _skipped_in_nnx(tx):
    model, optimizer = nnx_optimizer(tx, jnp.bfloat16)

    @flax.nnx.jit
    def step(model, optimizer):
        params = flax.nnx.state(model, flax.nnx.Param)
        bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), params)
        optimizer.update(model, bad, value=jnp.float32(1))

    for _ in range(3):
        step(model, optimizer)
    return optimizer, flax.nnx.state(optimizer)


def _skipped(tx):
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    opt_state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        _, opt_state = update({"w": jnp.full(2, jnp.inf)}, opt_state, params, value=1.0)
    return opt_state, serialization.to_state_dict(opt_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx", [EVERYTHING, ols.with_skipping(optax.sgd(0.1))], ids=["everything", "with_skipping"]
)
@pytest.mark.integration
@pytest.mark.parametrize("skipped", [_skipped, _skipped_in_nnx])
@pytest.mark.filterwarnings("ignore:`params` are bfloat16")
def test_a_state_restored_into_dicts_reads_like_the_state(tx, skipped):
    tree, dicts = skipped(tx)
    assert not ols.applied(dicts)
    assert diagnostics.metrics(dicts) == diagnostics.metrics(tree)
    assert diagnostics.is_stalled(dicts, max_consecutive_skipped=2)
    diagnostics.check_health(dicts)
    with pytest.raises(diagnostics.LossScaleStalledError) as expected:
        diagnostics.check_health(tree, max_consecutive_skipped=2)
    with pytest.raises(diagnostics.LossScaleStalledError, match=re.escape(str(expected.value))):
        diagnostics.check_health(dicts, max_consecutive_skipped=2)


def test_dicts_that_only_resemble_a_state_are_not_read_as_one():
    fields = ols.init()._asdict()
    assert ols.loss_scale_state(fields) == ols.init()
    counts = {name: field for name, field in fields.items() if name != "loss_scale"}
    others = fields | {"more": 1}, counts, [*fields], str(fields), {"an empty state": {}}
    for tree in (*others, {"loss_scale": 1.0, "of something else": 2.0}):
        found = rf"exactly one LossScaleState, got 0 in a {type(tree).__name__}\. Wrap the whole"
        with pytest.raises(ValueError, match=found):  # no field is missing
            ols.loss_scale_state(tree)
    with pytest.raises(ValueError, match=r"got 2 in a list, found at: `\[0\]`, `\[1\]`\. Wrap the"):
        ols.loss_scale_state([fields] * 2)


@pytest.mark.parametrize("field", ols.LossScaleState._fields[1:])
def test_a_mapping_that_lacks_a_field_is_refused_by_its_name(field):
    restored = serialization.to_state_dict(ols.with_loss_scaling(optax.identity()).init(()))
    del restored["loss_scale_state"][field]
    where = r"The one at `\['loss_scale_state'\]` "
    with pytest.raises(ValueError, match=rf"{where}lacks the field `{field}`: add its initial"):
        ols.loss_scale_state(restored)
