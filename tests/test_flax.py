"""`optax_lossscale.flax.TrainState`: what moves on which step, and that it is one compiled step."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import core, jax_utils, serialization
from flax.training import checkpoints, train_state
from jax.sharding import PartitionSpec
from plain_where import assert_same_bits, bits
from sklearn.datasets import load_digits

import optax_lossscale as ols
from optax_lossscale.flax import TrainState

pytestmark = pytest.mark.integration

TOO_LARGE = 2.0**24  # overflows in the gradients of a float16 network
GUARDED = "batch_stats", "ema", "key"


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for features in (4, 8):
            x = nn.Conv(features, (3, 3), strides=2, dtype=jnp.float16)(x)
            x = nn.relu(nn.BatchNorm(not train, momentum=0.9, dtype=jnp.float16)(x))
        return nn.Dense(10, dtype=jnp.float16)(jnp.mean(x, axis=(1, 2))).astype(jnp.float32)


class NetState(TrainState):
    batch_stats: Any
    ema: Any
    key: jax.Array


@functools.cache
def variables():
    return Net().init(jax.random.key(0), jnp.ones((1, 8, 8, 1)), train=False)


@functools.cache
def batch(bad=False):
    images, labels = load_digits(return_X_y=True)
    images = jnp.asarray(images[:32].reshape(-1, 8, 8, 1), jnp.float32) / 16
    return (images.at[3, 4, 4].set(jnp.inf) if bad else images), jnp.asarray(labels[:32])


@functools.cache  # the optimizer is a static field: a new one is a new step to compile
def create(freeze=False, initial_scale=2.0**15, **options):
    container = core.freeze if freeze else core.unfreeze
    options.setdefault("loss_scale", ols.DynamicLossScale(initial_scale, growth_interval=3))
    return NetState.create(
        apply_fn=Net().apply,
        params=container(variables()["params"]),
        batch_stats=container(variables()["batch_stats"]),
        ema=container(jax.tree.map(jnp.copy, variables()["params"])),
        key=jax.random.key(1),
        tx=optax.adam(1e-2),
        **options,
    )


def take_step(state, batch, axis_name=None):
    """Train one step, and let every field move."""
    images, labels = batch

    def loss_fn(params):
        logits, updated = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return state.scale_loss(jnp.mean(losses)), updated["batch_stats"]

    grads, batch_stats = jax.grad(loss_fn, has_aux=True)(state.params)
    if axis_name is not None:
        grads, batch_stats = jax.lax.pmean((grads, batch_stats), axis_name)
    return state.apply_gradients(
        grads=grads,
        batch_stats=batch_stats,
        ema=jax.tree.map(lambda ema, p: 0.9 * ema + 0.1 * p + 1, state.ema, state.params),
        key=jax.random.split(state.key)[0],
    )


step = jax.jit(take_step)


def with_factor(state, factor):
    return state.replace(opt_state=optax.tree.set(state.opt_state, loss_scale=jnp.float32(factor)))


def moved(before, after, name):
    """Say whether every leaf of a field changed, or none; anything between is an error."""
    leaves = (jax.tree.leaves(getattr(state, name)) for state in (before, after))
    changed = {not np.array_equal(bits(a), bits(b)) for a, b in zip(*leaves, strict=True)}
    assert len(changed) == 1, name
    return changed.pop()


def types(tree):
    leaves, treedef = jax.tree.flatten(tree)
    return [str(jax.typeof(x)) + str(getattr(x, "weak_type", False)) for x in leaves], treedef


@pytest.mark.parametrize("freeze", [False, True], ids=["dict", "FrozenDict"])
def test_a_good_step_moves_everything(freeze):
    before = create(freeze)
    after = step(before, batch())
    assert [moved(before, after, name) for name in ("params", *GUARDED)] == [True] * 4
    assert (int(after.step), bool(after.grads_finite)) == (1, True)
    assert float(after.loss_scale) == 2.0**15
    assert types(after) == types(before)


@pytest.mark.parametrize("freeze", [False, True], ids=["dict", "FrozenDict"])
@pytest.mark.parametrize("reason", ["factor", "batch"])
def test_a_skipped_step_moves_the_loss_scale_only(reason, freeze):
    before = step(create(freeze), batch())  # no field at its default
    if reason == "factor":
        before = with_factor(before, TOO_LARGE)
    after = step(before, batch(bad=reason == "batch"))
    for name in ("step", "params", *GUARDED):
        assert_same_bits(getattr(after, name), getattr(before, name))
    assert_same_bits(after.opt_state.inner_state, before.opt_state.inner_state)
    assert not after.grads_finite
    assert float(after.loss_scale) == float(before.loss_scale) / 2
    assert types(after) == types(before)


def test_step_counts_skipped_steps_too_where_asked():
    state = create(count_skipped=True)
    for bad, expected in ((False, 1), (True, 2), (True, 3), (False, 4)):
        after = step(state, batch(bad))
        assert int(after.step) == expected
        assert moved(state, after, "batch_stats") is not bad
        state = after


def test_good_and_bad_steps_and_restored_states_are_one_trace():
    traces = []

    @jax.jit
    def counted(state, batch):
        traces.append(None)
        return take_step(state, batch)

    state = create().replace(key=jax.random.key_data(jax.random.key(1)))
    for bad in (False, True, True, False):
        state = counted(state, batch(bad))
    counted(serialization.from_bytes(state, serialization.to_bytes(state)), batch())
    assert len(traces) == 1


def test_every_leaf_is_a_strongly_typed_array_from_the_start():
    class State(TrainState):
        epoch: int
        average: float
        flags: dict

    params = {"w": jnp.asarray(1.0)}  # weakly typed
    state = State.create(
        apply_fn=None,
        params=params,
        tx=optax.inject_hyperparams(optax.sgd)(0.1),
        epoch=3,
        average=0.5,
        flags={"on": True},
    )
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
        assert not leaf.weak_type
    assert (state.step.dtype, state.epoch.dtype) == (jnp.int32, jnp.int32)
    assert (state.average.dtype, state.flags["on"].dtype) == (jnp.float32, jnp.bool_)
    after = jax.jit(lambda s: s.apply_gradients(grads=params, epoch=s.epoch + 1))(state)
    assert types(after) == types(state)


def test_scanning_is_stepping():
    flags = (False, True, True, False, False, False, False)
    images, labels = (jnp.stack(x) for x in zip(*map(batch, flags), strict=True))

    def body(state, batch):
        state = take_step(state, batch)
        return state, state.grads_finite

    run = jax.jit(lambda state, batches: jax.lax.scan(body, state, batches))
    scanned, applied = run(create(), (images, labels))
    assert applied.tolist() == [not bad for bad in flags]
    looped = create()
    for bad in flags:
        looped = step(looped, batch(bad))
    assert int(scanned.step) == int(looped.step) == 5
    assert float(scanned.loss_scale) == float(looped.loss_scale) == 2.0**14  # grown once
    np.testing.assert_array_equal(jax.random.key_data(scanned.key), jax.random.key_data(looped.key))
    for name in ("params", "batch_stats", "ema"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3),
            getattr(scanned, name),
            getattr(looped, name),
        )


def test_it_can_be_donated():
    state = jax.tree.map(jnp.copy, create())
    after = jax.jit(take_step, donate_argnums=0)(state, batch(bad=True))
    # A step does not read the flag of the step before.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.bool_)
    assert_same_bits(after.params, create().params)


def on_two_devices(state, how):
    """Take a step on two devices, the second of which has a bad batch."""
    devices = jax.devices()[:2]
    batches = jax.tree.map(lambda *x: jnp.stack(x), batch(), batch(bad=True))

    def on_each(state, batch):
        # Gradients are not averaged, so that the good replica's stay finite.
        images, labels = batch

        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updated = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return state.scale_loss(jnp.mean(losses)), updated["batch_stats"]

        grads, batch_stats = jax.grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats)

    state = state.replace(key=jnp.uint32(0))
    if how == "pmap":
        return jax.pmap(on_each, "batch", devices=devices)(
            jax_utils.replicate(state, devices), batches
        )
    mesh = jax.make_mesh((2,), ("batch",), devices=devices)
    everywhere, rows = PartitionSpec(), PartitionSpec("batch")

    def on_each_row(state, batch):
        after = on_each(state, jax.tree.map(lambda x: x[0], batch))
        return jax.tree.map(lambda x: x[None], after)

    sharded = jax.shard_map(
        on_each_row, mesh=mesh, in_specs=(everywhere, rows), out_specs=rows, check_vma=False
    )
    batches = jax.device_put(batches, jax.sharding.NamedSharding(mesh, rows))
    return jax.jit(sharded)(state, batches)


@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_one_bad_replica_skips_everywhere(how):
    before = create(axis_name="batch")
    after = on_two_devices(before, how)
    assert after.step.tolist() == [0, 0]
    assert after.loss_scale.tolist() == [2.0**14] * 2
    for name in ("params", "batch_stats"):
        old = jax.tree.map(lambda x: jnp.stack([x, x]), getattr(before, name))
        assert_same_bits(getattr(after, name), old)


def test_without_the_axis_name_replicas_part():
    assert on_two_devices(create(), "pmap").step.tolist() == [1, 0]


def test_replicas_train_like_one():
    devices = jax.devices()[:2]
    mapped = jax.pmap(functools.partial(take_step, axis_name="batch"), "batch", devices=devices)
    same = jax.tree.map(lambda x: jnp.stack([x, x]), batch())
    after = mapped(jax_utils.replicate(create(axis_name="batch"), devices), same)
    for x in jax.tree.leaves(jax_utils.unreplicate(after).params):
        assert jnp.isfinite(x).all()
    assert (after.step.tolist(), after.grads_finite.tolist()) == ([1, 1], [True, True])
    assert_same_bits(*(jax.tree.map(lambda x, i=i: x[i], after.params) for i in range(2)))


@pytest.mark.parametrize(
    "loss_scale", [None, ols.FixedLossScale(8, skip_nonfinite=False)], ids=["None", "no skip"]
)
def test_where_nothing_is_skipped_everything_moves(loss_scale):
    before = create(loss_scale=loss_scale)
    # As restored from a run with another policy, which had just skipped a step.
    scale_state = before.opt_state.loss_scale_state._replace(consecutive_skipped=jnp.int32(3))
    before = before.replace(opt_state=before.opt_state._replace(loss_scale_state=scale_state))
    for bad in (False, True):
        after = step(before, batch(bad))
        assert [moved(before, after, name) for name in ("ema", "key")] == [True, True]
        assert int(after.step) == 1
    nan = [jnp.isnan(x).any() for x in jax.tree.leaves((after.params, after.batch_stats))]
    assert any(nan)


def scalar_state(cls=TrainState, tx=None, **options):
    tx = optax.sgd(1.0) if tx is None else tx
    return cls.create(apply_fn=None, params={"w": jnp.float32(1)}, tx=tx, **options)


class Counting(TrainState):
    seen: Any = None


def grads_of(state, value):
    return {"w": jnp.float32(value) * state.loss_scale}


@dataclasses.dataclass(frozen=True)
class Uncounted:
    """A policy that counts nothing."""

    skip_nonfinite = True

    def init(self):
        return ols.init(8)

    def update(self, state, grads_finite, *, loss_finite=True):
        del loss_finite
        return state._replace(loss_scale=state.loss_scale * jnp.where(grads_finite, 1, 0.5))


@pytest.mark.parametrize(
    ("loss_scale", "skipped_before"),
    [(Uncounted(), 0), ("dynamic", np.iinfo(np.int32).max)],
    ids=["not counted", "saturated"],
)
def test_a_step_is_skipped_whatever_the_policy_counts(loss_scale, skipped_before):
    state = scalar_state(Counting, loss_scale=loss_scale, seen=jnp.float32(0))
    state = state.replace(
        opt_state=optax.tree.set(state.opt_state, consecutive_skipped=jnp.int32(skipped_before))
    )
    assert state.grads_finite
    for value, applied in ((jnp.inf, 0), (1, 1)):
        state = state.apply_gradients(
            grads=grads_of(state, value), seen=jnp.float32(1 if applied else jnp.nan)
        )
        assert (int(state.step), bool(state.grads_finite)) == (applied, applied)
        assert (float(state.params["w"]), float(state.seen)) == (1 - applied, applied)


def test_a_step_is_that_of_flax_on_the_true_gradients():
    tx = optax.adamw(0.1)
    ours, theirs = scalar_state(tx=tx), scalar_state(train_state.TrainState, tx)
    for g in (1.0, -3.0, 0.3):
        ours = ours.apply_gradients(grads=grads_of(ours, g))
        theirs = theirs.apply_gradients(grads={"w": jnp.float32(g)})
        assert_same_bits(ours.params, theirs.params)
        assert_same_bits(ours.opt_state.inner_state, theirs.opt_state)
        assert int(ours.step) == theirs.step


def test_a_loss_that_is_not_finite_skips_without_moving_the_factor():
    state = scalar_state()
    after = state.apply_gradients(grads=grads_of(state, 1), value=jnp.float32(jnp.nan))
    assert (int(after.step), bool(after.grads_finite)) == (0, False)
    assert float(after.loss_scale) == float(state.loss_scale)


def test_the_value_is_handed_to_the_optimizer():
    def update(updates, state, params=None, *, value):
        del params
        return jax.tree.map(lambda u: u * value, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    state = scalar_state(tx=tx)
    after = state.apply_gradients(grads=grads_of(state, 2), value=jnp.float32(3))
    assert float(after.params["w"]) == 1 + 2 * 3


def test_multi_steps_accumulates_and_drops_a_bad_micro_step():
    state = scalar_state(tx=optax.MultiSteps(optax.sgd(1.0), 2))
    params = []
    for g in (1.0, np.inf, 3.0):
        state = state.apply_gradients(grads=grads_of(state, g))
        params.append(float(state.params["w"]))
    assert params == [1, 1, 1 - (1 + 3) / 2]


def test_the_state_goes_where_an_optimizer_state_goes():
    state = scalar_state(loss_scale=8)
    assert_same_bits(ols.loss_scale_state(state), ols.init(8))
    value, grads = ols.value_and_grad(lambda p: p["w"] ** 2)(state, state.params)
    assert (float(value), float(grads["w"])) == (1, 16)
    assert float(state.scale_loss(jnp.float32(3))) == 24
    assert state.grads_finite


def test_parameters_may_be_a_bare_array():
    state = TrainState.create(apply_fn=None, params=jnp.ones(2), tx=optax.sgd(1.0))
    assert state.apply_gradients(grads=state.loss_scale * jnp.ones(2)).params.tolist() == [0, 0]


# Mistakes.


@pytest.mark.parametrize(
    "tx",
    [
        ols.with_loss_scaling(optax.sgd(1.0)),
        optax.chain(optax.clip(1.0), ols.with_loss_scaling(optax.sgd(1.0))),
        optax.MultiSteps(ols.with_loss_scaling(optax.sgd(1.0)), 2),
    ],
    ids=["plain", "chain", "MultiSteps"],
)
def test_an_optimizer_that_scales_already_is_refused(tx):
    with pytest.raises(ValueError, match=r"must not scale the loss itself, got .* at `.+`"):
        scalar_state(tx=tx)


@pytest.mark.parametrize("chain", [False, True])
def test_an_optimizer_that_is_not_wrapped_as_a_whole_is_refused_by_a_step(chain):
    tx = optax.chain(ols.with_loss_scaling(optax.sgd(1.0))) if chain else optax.sgd(1.0)
    state = scalar_state().replace(tx=tx)
    with pytest.raises(TypeError, match=r"`tx` must be what `with_loss_scaling` returns, got"):
        state.apply_gradients(grads=grads_of(state, 1))


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"must be an optax\.GradientTransformation"):
        scalar_state(tx=optax.adam)


def test_a_field_that_is_not_known_is_refused_when_created():
    with pytest.raises(TypeError, match="batch_stat"):
        scalar_state(batch_stat={})


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("batch_stat", AttributeError),
        *((each, TypeError) for each in ("loss_scale", "step", "params", "opt_state")),
        ("grads_finite", TypeError),
    ],
)
def test_a_field_that_it_does_not_take_is_refused(name, error):
    state = scalar_state()
    with pytest.raises(error, match=f"'{name}'"):
        state.apply_gradients(
            grads=grads_of(state, 1), **{name: getattr(state, name, jnp.float32(1))}
        )


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (jnp.float32(1), jnp.float16(1), TypeError),
        (jnp.ones(2), jnp.ones(3), ValueError),
        ({"a": 1.0}, {"b": jnp.float32(1)}, ValueError),
        (None, jnp.float32(1), ValueError),
    ],
    ids=["dtype", "shape", "structure", "from nothing"],
)
def test_a_field_that_changes_its_type_is_refused_by_name(old, new, error):
    state = scalar_state(Counting, seen=old)
    with pytest.raises(error, match="seen"):
        state.apply_gradients(grads=grads_of(state, 1), seen=new)


# Saving and restoring, with no field at its default.


@functools.cache
def trained():
    state = create(freeze=True)
    for bad in (False, True, False):
        state = step(state, batch(bad))
    state = state.replace(key=jnp.uint32(7))  # Flax's formats hold no PRNG keys
    counts = {"growth_count": 2, "overflow_count": 4, "consecutive_skipped": 5, "total_skipped": 6}
    opt_state = optax.tree.set(
        state.opt_state, **{name: jnp.int32(n) for name, n in counts.items()}
    )
    return state.replace(opt_state=opt_state, grads_finite=jnp.asarray(False))


def through_bytes(state, target, path):
    del path
    return serialization.from_bytes(target, serialization.to_bytes(state))


def through_state_dict(state, target, path):
    del path
    return serialization.from_state_dict(target, serialization.to_state_dict(state))


def through_flax_checkpoints(state, target, path):
    checkpoints.save_checkpoint(path, state, step=1)
    return checkpoints.restore_checkpoint(path, target)


def through_orbax(state, target, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(
            path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
        )


@pytest.mark.filterwarnings(
    # Flax's and Orbax's own, about their own future.
    "ignore:.*orbax.*:DeprecationWarning",
    "ignore::DeprecationWarning:orbax.*",
    "ignore::DeprecationWarning:flax.*",
)
@pytest.mark.parametrize(
    "through", [through_bytes, through_state_dict, through_flax_checkpoints, through_orbax]
)
def test_a_state_is_restored_and_goes_on_bit_for_bit(through, tmp_path):
    state, fresh = trained(), create(freeze=True).replace(key=jnp.uint32(0))
    assert all(
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (state, fresh)), strict=True)
        if a.size == 1
    )
    restored = through(state, fresh, tmp_path)
    assert_same_bits(restored, state)
    assert types(restored) == types(state)
    assert int(restored.step) == 2
    goes_on = [step(s.replace(key=jax.random.key(2)), batch()) for s in (restored, state)]
    assert_same_bits(*goes_on)


# Flax's fp8 layers. They compute in bfloat16: products of float8 numbers overflow float16.


class Fp8Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        fp8 = {"dot_general_cls": nn.Fp8DirectDotGeneralOp, "dtype": jnp.bfloat16}
        x = nn.relu(nn.Dense(16, **fp8)(x))
        return nn.Dense(1, dtype=jnp.float16)(x).astype(jnp.float32)


@functools.cache
def fp8_state(freeze):
    params = Fp8Net().init(jax.random.key(0), jnp.ones((4, 16)))
    return TrainState.create(
        apply_fn=Fp8Net().apply,
        params=core.freeze(params) if freeze else params,
        tx=optax.adam(1e-2),
        loss_scale=2.0**10,
    )


def fp8_loss(params, x):
    return jnp.mean(Fp8Net().apply(params, x) ** 2)


@jax.jit
def fp8_step(state, x):
    value, grads = ols.value_and_grad(fp8_loss)(state, state.params, x)
    return state.apply_gradients(grads=grads, value=value), grads


OWG = "_overwrite_with_gradient"


@pytest.mark.parametrize("freeze", [False, True], ids=["dict", "FrozenDict"])
def test_fp8_metadata_are_overwritten_as_they_come(freeze):
    x = jax.random.normal(jax.random.key(1), (4, 16))
    state = fp8_state(freeze)
    for n in range(1, 4):
        before = state
        state, grads = fp8_step(state, x)
        assert_same_bits(state.params[OWG], grads[OWG])
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), before.params, state.params)
        assert all(jax.tree.leaves(changed["params"]))
        assert int(state.step) == n
        assert types(state) == types(before)
    metadata = state.params[OWG]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    assert float(metadata["input_amax_history"][0]) == jnp.abs(x.astype(jnp.bfloat16)).max()
    # The optimizer knows nothing of them.
    plain = optax.adam(1e-2).init(state.params["params"])
    assert jax.tree.structure(state.opt_state.inner_state) == jax.tree.structure(plain)


@pytest.mark.parametrize("freeze", [False, True], ids=["dict", "FrozenDict"])
def test_fp8_metadata_stand_still_on_a_skipped_step(freeze):
    state, _ = fp8_step(fp8_state(freeze), jnp.ones((4, 16)))
    after, grads = fp8_step(state, jnp.ones((4, 16)).at[0, 0].set(jnp.inf))
    assert not ols.all_finite(grads[OWG])
    assert_same_bits(after.params, state.params)
    assert_same_bits(after.opt_state.inner_state, state.opt_state.inner_state)
    assert int(after.step) == 1


def test_an_overflow_that_an_fp8_layer_clips_is_seen_in_its_metadata():
    # The layer notes the infinite gradient and goes on with the largest float8 instead.
    class Clipping(nn.Module):
        @nn.compact
        def __call__(self, x):
            fp8 = {"dot_general_cls": nn.Fp8DirectDotGeneralOp, "dtype": jnp.bfloat16}
            x = nn.Dense(1, use_bias=False, **fp8)(x)
            return x.astype(jnp.float16).astype(jnp.float32)

    x = jnp.ones((4, 16))
    state = TrainState.create(
        apply_fn=Clipping().apply,
        params=Clipping().init(jax.random.key(0), x),
        tx=optax.sgd(1.0),
        loss_scale=ols.DynamicLossScale(TOO_LARGE),
    )
    grads = jax.grad(lambda p: state.scale_loss(jnp.sum(state.apply_fn(p, x))))(state.params)
    assert ols.all_finite(grads["params"])
    assert not ols.all_finite(grads[OWG])
    after = state.apply_gradients(grads=grads)
    assert_same_bits(after.params, state.params)
    assert float(after.loss_scale) == TOO_LARGE / 2


def test_a_state_built_without_create_counts_applied_steps():
    tx = ols.with_loss_scaling(optax.sgd(1.0), 8)
    params = jnp.float32(1)
    state = TrainState(0, None, params, tx, tx.init(params))
    steps = [state.apply_gradients(grads=jnp.float32(g)).step for g in (8, jnp.inf)]
    assert [int(n) for n in steps] == [1, 0]


def test_a_gradient_may_be_a_python_number():
    state = TrainState.create(
        apply_fn=None, params={"w": 1.0}, tx=optax.sgd(1.0), loss_scale=ols.FixedLossScale(8)
    )
    assert float(state.apply_gradients(grads={"w": 4.0}).params["w"]) == 0.5


@pytest.mark.parametrize("frozen", [False, True])
def test_a_field_stays_frozen_or_not_whatever_it_is_given(frozen):
    container, other = (core.freeze, core.unfreeze)[:: 1 if frozen else -1]
    old, new = {"a": {"mean": jnp.zeros(2)}}, {"a": {"mean": jnp.ones(2)}}
    state = NetState.create(
        apply_fn=None,
        params=jnp.ones(1),
        tx=optax.sgd(1.0),
        batch_stats=container(old),
        ema=None,
        key=None,
    )
    for given in (container(new), other(new)):
        after = state.apply_gradients(grads=jnp.ones(1), batch_stats=given)
        assert type(after.batch_stats) is type(container(old))
        assert_same_bits(after.batch_stats, container(new))
