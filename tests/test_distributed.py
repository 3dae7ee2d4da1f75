"""Many devices give the results of one: same parameters, same loss scale, same skipped steps.

The oracle is the same task on one device, with the simplest optimizer that scales the loss. Each
way to distribute the step is compiled once, and then runs with the bad number on different devices.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import bytes_accessed, compiled_step, nbytes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from process_worker import (
    BATCH,
    INNER,
    POLICY,
    STEPS,
    TOLERANCE,
    batch,
    init_params,
    loss_fn,
    one_device,
)

import optax_lossscale as ols

pytestmark = pytest.mark.integration

DEVICES = 8
AUTO = AxisType.Auto
EVERYWHERE, SPREAD, OVER_MODEL = (
    dict.fromkeys(("w1", "b1", "w2"), spec) for spec in (P(), P("data"), P("model"))
)


class Way(NamedTuple):
    """A way to distribute a step over the devices."""

    transform: Callable  # makes a step run on all devices, given the mesh and partition specs
    specs: dict[str, P] = EVERYWHERE
    batch: P = P("data")
    mesh: dict[str, int] = {"data": DEVICES}  # noqa: RUF012, never changed
    loss_fn: Callable = loss_fn
    reduce: Callable = lambda loss, grads: (loss, grads)
    inner: optax.GradientTransformation = INNER
    axis_name: Any = None
    axis_type: AxisType = AUTO
    added: tuple[str, ...] = ()  # collectives that loss scaling adds


def shard_mapped(*, check_vma):
    def transform(step, mesh, specs):
        both = {"in_specs": specs, "out_specs": (*specs[:2], P())}
        mapped = jax.shard_map(step, mesh=mesh, check_vma=check_vma, **both)
        return jax.jit(mapped, donate_argnums=(0, 1))

    return transform


def jitted(step, mesh, specs):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (*specs[:2], P()))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)


def mean_of_gradients(loss, grads):
    """Average the gradients. The optimizer receives the loss of its own replica."""
    return loss, jax.lax.pmean(grads, "data")


def averaged(axis_name):
    """Average the loss over the devices, and so its gradient."""
    return lambda *args: jax.lax.pmean(loss_fn(*args), axis_name)


def averaged_in_float32(params, *data):
    """Sum the gradients after the cast to float32 instead of before."""
    return averaged("data")(jax.lax.pcast(params, "data", to="varying"), *data)


def gathered(axis, loss_fn):
    """Gather the parameters: each device holds a part of them."""
    return lambda params, *data: loss_fn(jax.lax.all_gather(params, axis, tiled=True), *data)


def resharded(params, *data):
    """Gather the parameters where JAX checks in the types how they are sharded."""
    mesh = jax.typeof(params["w1"]).sharding.mesh
    return loss_fn(jax.sharding.reshard(params, NamedSharding(mesh, P())), *data)


def divided(params, x, y):
    """Divide first: without `check_vma`, the transpose of a gather sums over the devices."""
    return loss_fn(params, x, y) / jax.lax.axis_size("data")


WITHOUT_VMA, WITH_VMA = shard_mapped(check_vma=False), shard_mapped(check_vma=True)
REDUCED_INSIDE = optax.chain(optax.stateless(lambda g, _: jax.lax.pmean(g, "data")), INNER)
FLAGS = ("pred[2]",)
ONE_FLAG_EACH = ("pred[] pred[] pred[]",)
GRID = {"data": 4, "model": 2}
LOCAL = {"axis_name": "data", "added": FLAGS}  # devices see different gradients or losses
EXPLICIT = {"loss_fn": resharded, "axis_type": AxisType.Explicit}
WAYS = {
    "shard_map without check_vma": Way(WITHOUT_VMA, reduce=mean_of_gradients, **LOCAL),
    "reduced inside": Way(WITHOUT_VMA, inner=REDUCED_INSIDE, **LOCAL),
    "shard_map": Way(WITH_VMA, loss_fn=averaged("data"), axis_name="data"),
    "shard_map, summed in float32": Way(WITH_VMA, loss_fn=averaged_in_float32),
    "manual FSDP without check_vma": Way(
        WITHOUT_VMA, SPREAD, loss_fn=gathered("data", divided), **LOCAL
    ),
    "manual FSDP": Way(WITH_VMA, SPREAD, loss_fn=gathered("data", averaged("data")), **LOCAL),
    "manual FSDP over one axis of two": Way(
        WITH_VMA,
        OVER_MODEL,
        batch=P(("data", "model")),
        mesh=GRID,
        loss_fn=gathered("model", averaged(("data", "model"))),
        axis_name=("data", "model"),
        added=FLAGS,
    ),
    "jit, FSDP": Way(jitted, specs=SPREAD, added=ONE_FLAG_EACH),
    "jit, FSDP over an Explicit axis": Way(jitted, SPREAD, added=ONE_FLAG_EACH, **EXPLICIT),
}

# One of each kind. `make test-all` runs the others.
KINDS = "shard_map without check_vma", "shard_map", "manual FSDP over one axis of two", "jit, FSDP"
needs_pcast = pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="this JAX is older")


class Trainer:
    """A way with its compiled step and its initial arguments."""

    def __init__(self, way, tx):
        self.way, self.tx = way, tx
        types = (way.axis_type,) * len(way.mesh)
        self.mesh = jax.make_mesh(tuple(way.mesh.values()), tuple(way.mesh), types)
        shapes = jax.eval_shape(tx.init, init_params())
        state_specs = optax.tree.map_params(
            tx, lambda _, spec: spec, shapes, way.specs, transform_non_params=lambda _: P()
        )
        self.specs = way.specs, state_specs, way.batch, way.batch
        # The plain optimizer's state has no loss scale.
        is_scaled = isinstance(shapes, ols.GuardState)

        def step(params, state, x, y):
            scale = state.loss_scale_state if is_scaled else ols.init(None)
            loss, grads = ols.value_and_grad(way.loss_fn)(scale, params, x, y)
            loss, grads = way.reduce(loss, grads)
            updates, state = tx.update(grads, state, params, value=loss)
            return optax.apply_updates(params, updates), state, loss

        jitted = way.transform(step, self.mesh, self.specs)
        self.compiled = jitted.lower(*self.start(), *self.batch(0)).compile()

    def step(self, *args):
        return self.compiled(*args)[:2]

    def start(self):
        params = init_params()
        return self._put((params, self.tx.init(params)), self.specs[:2])

    def batch(self, step, row=None):
        return self._put(batch(step, row), self.specs[2:])

    def _put(self, tree, specs):
        shardings = jax.tree.map(lambda _, spec: NamedSharding(self.mesh, spec), tree, specs)
        return jax.device_put(jax.tree.map(np.asarray, tree), shardings)

    def run(self, row):
        """Return the final params and state, and the counters of each step, of all devices."""
        params, state = self.start()
        seen = []
        for i in range(STEPS):
            params, state = self.step(params, state, *self.batch(i, row))
            fields = [[float(s.data) for s in field.addressable_shards] for field in state[0]]
            seen.append(list(zip(*fields, strict=True)))
        return params, state, seen


@functools.cache
def scaled(name, **changes):
    axis_name = changes.pop("axis_name", WAYS[name].axis_name)
    way = WAYS[name]._replace(**changes)
    return Trainer(way, ols.with_loss_scaling(way.inner, POLICY, axis_name=axis_name))


def ways():
    for name in WAYS:
        marks = [pytest.mark.slow if name in KINDS else pytest.mark.exhaustive]
        marks += [needs_pcast] * (name == "shard_map, summed in float32")
        yield pytest.param(name, marks=marks)


@pytest.fixture(params=ways())
def trainer(request):
    return scaled(request.param)


oracle = functools.cache(one_device)


def furthest(run, expected):
    """Return the largest error of any device, and whether two devices differ."""
    far, apart = 0.0, False
    for array, whole in zip(jax.tree.leaves(run), jax.tree.leaves(expected), strict=True):
        first = {}
        for shard in array.addressable_shards:
            data = np.asarray(shard.data)
            far = max(far, float(np.max(np.abs(data - whole[shard.index]))))
            apart |= data.tobytes() != first.setdefault(str(shard.index), data).tobytes()
    return far, apart


def test_a_bad_number_on_one_device_skips_the_step_on_all(trainer):
    for device in (None, 0, 5):
        row = None if device is None else device * BATCH // DEVICES + 1
        *run, seen = trainer.run(row)
        expected, seen_alone = oracle(row)
        # The same loss scale and counters on every device after every step.
        assert seen == [[tuple(alone)] * DEVICES for alone in seen_alone]
        far, apart = furthest(run, expected)
        assert far < TOLERANCE
        assert not apart


def test_everything_stays_where_it_was_put(trainer):
    before = trainer.start()
    after = trainer.step(*before, *trainer.batch(0))
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert b.is_deleted()  # donated
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)(?:-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(compiled):
    """Return the kind, dtypes and shapes of each collective."""
    return sorted(
        (kind, " ".join(f"{dtype}[{shape}]" for dtype, shape in _ARRAY.findall(arrays)))
        for arrays, kind in _COLLECTIVE.findall(compiled.as_text())
    )


def test_at_most_one_small_collective_is_added(trainer):
    inner = optax.with_extra_args_support(trainer.way.inner)
    added, plain = (collectives(each.compiled) for each in (trainer, Trainer(trainer.way, inner)))
    for kind, arrays in plain:
        # The compiler chooses the order of the arrays in a collective.
        same = [f for f in added if f[0] == kind and sorted(f[1].split()) == sorted(arrays.split())]
        added.remove(same[0])
    assert [arrays for _, arrays in added] == list(trainer.way.added)
    assert {kind for kind, _ in added} <= {"all-reduce"}


@pytest.mark.slow
@pytest.mark.needs_xla
@pytest.mark.usefixtures("optimized")
def test_each_device_reads_its_own_part_of_the_gradients_once_more():
    """docs/performance.md relies on this number."""
    mesh = jax.make_mesh((DEVICES,), ("data",), (AUTO,))
    split = NamedSharding(mesh, P("data"))
    params = [jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=split)] * 6

    def place(shapes):
        return jax.tree.map(lambda a: params[0] if a.shape else a, shapes)

    plain, scaling = (
        compiled_step(tx, params, place=place)
        for tx in (optax.adamw(1e-3), ols.with_loss_scaling(optax.adamw(1e-3)))
    )
    own_part = nbytes(params) / DEVICES
    # XLA:CPU also writes and reads a mask of a byte for each 16 numbers.
    assert 0.98 * own_part <= bytes_accessed(scaling) - bytes_accessed(plain) <= 1.1 * own_part
    assert collectives(plain) == []
    # A byte for each array.
    assert collectives(scaling) == [("all-reduce", " ".join(["pred[]"] * len(params)))]


# The silent mistakes of docs/distributed.md.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mistake"),
    [  # the gradients are summed already, by the types or by the transpose of the gather
        ("shard_map", {"loss_fn": loss_fn, "reduce": lambda *both: jax.lax.pmean(both, "data")}),
        ("manual FSDP without check_vma", {"loss_fn": gathered("data", averaged("data"))}),
    ],
    ids=["of gradients", "of losses"],
)
def test_a_mean_in_the_wrong_place_is_as_many_times_too_large_as_there_are_devices(name, mistake):
    def first_update(trainer):
        params, _ = trainer.step(*trainer.start(), *trainer.batch(0))
        return np.asarray(params["w2"]) - np.asarray(init_params()["w2"])

    right, wrong = first_update(scaled(name)), first_update(scaled(name, **mistake))
    loud = np.abs(right) > np.max(np.abs(right)) / 2  # smaller entries suffer from float16 rounding
    np.testing.assert_allclose(wrong[loud] / right[loud], DEVICES, rtol=0.02)


def one_bad_element(loss, grads):
    """Make one element of one shard's gradient bad."""
    bad = (jax.lax.axis_index("data") == 5) & (jnp.arange(grads["b1"].size) == 2)
    return loss, {**grads, "b1": jnp.where(bad, jnp.inf, grads["b1"])}


def masked(params, x, y):
    """Hide the gradients of an infinite loss, as clipping or masking the loss does."""
    loss = loss_fn(params, x, jnp.where(jnp.isfinite(y), y, 0.0))
    return loss + jax.lax.stop_gradient(jnp.max(jnp.where(jnp.isfinite(y), 0.0, y)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("reduced inside", {}),
        # The gradients are averaged, so every replica sees bad ones, but not a bad loss.
        ("shard_map without check_vma", {"loss_fn": masked}),
        ("manual FSDP without check_vma", {"reduce": one_bad_element}),
    ],
    ids=["local gradients", "local loss", "shards"],
)
def test_devices_that_decide_each_for_itself_diverge(name, changes):
    expected, _ = oracle(None)
    for axis_name, diverge in ((None, True), ("data", False)):
        *run, _ = scaled(name, axis_name=axis_name, **changes).run(row=9)
        assert furthest(run, expected)[1] is diverge


@pytest.mark.slow
def test_check_vma_refuses_a_replicated_state_that_was_not_agreed():
    with pytest.raises(ValueError, match="replicat"):
        scaled("manual FSDP", axis_name=None)


@pytest.mark.slow
@needs_pcast
def test_check_vma_sums_in_float16_unless_the_params_vary_before_the_cast():
    def dtypes(name):
        found = [_ARRAY.findall(arrays) for _, arrays in collectives(scaled(name).compiled)]
        return {dtype for arrays in found for dtype, shape in arrays if "," in shape}  # matrices

    assert dtypes("shard_map") == {"f16"}
    assert dtypes("shard_map, summed in float32") == {"f32"}
    assert dtypes("shard_map without check_vma") == {"f32"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`params` are b?float16")
def test_a_float16_mean_overflows_where_a_float32_mean_does_not():
    mesh = jax.make_mesh((2,), ("data",), (AUTO,), devices=jax.devices()[:2])
    tx = ols.with_loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(2.0**10), axis_name="data")

    def update(dtype):
        def step(g):
            mean = jax.lax.pmean(g[0].astype(dtype), "data")
            updates, state = tx.update(mean, tx.init(g[0]), g[0])
            return jnp.stack([updates.astype(jnp.float32), state.loss_scale_state.loss_scale])[None]

        mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return jax.jit(mapped)(jnp.full(2, 40_000.0, jnp.float16)).tolist()

    assert update(jnp.float16) == [[0, 512]] * 2  # skipped
    assert update(jnp.float32) == [[-40_000 / 1024, 1024]] * 2


@pytest.mark.parametrize(
    ("varying", "axis_name", "check_vma"),
    [
        ((), ("data", "model"), True),
        (("data",), ("data",), True),
        (("model",), ("data", "model"), True),
        (("data", "model"), ("data",), True),
        (("data", "model"), ("data", "model"), False),
    ],
    ids=str,
)
def test_devices_agree_over_the_named_axes_whichever_of_them_the_flag_varies_over(
    varying, axis_name, check_vma
):
    tx = ols.with_loss_scaling(optax.sgd(1.0), 8.0, axis_name=axis_name)
    mesh = jax.make_mesh(tuple(GRID.values()), tuple(GRID), (AUTO, AUTO))
    spec = P(*(axis if axis in varying else None for axis in GRID))

    def step(grads, loss):
        state = tx.init(grads)
        _, finite = ols.unscale_and_check(grads, state, axis_name=axis_name)
        updates, state = tx.update(grads, state, grads, value=loss[0, 0])
        return updates, finite[None, None], state.loss_scale_state.total_skipped[None, None]

    out_specs = spec, P(*GRID), P(*GRID)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=out_specs, check_vma=check_vma)
    run = jax.jit(mapped)
    shape = tuple(size if axis in varying else 1 for axis, size in GRID.items())
    good = 8 + np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    agreeing = tuple(i for i, axis in enumerate(GRID) if axis in axis_name)
    for where in np.ndindex(shape):
        bad = np.zeros(shape, bool)
        bad[where] = True
        spoilt = np.where(bad, np.float32(np.inf), good)
        reached = bad.any(agreeing, keepdims=True)
        everywhere = np.broadcast_to(reached, tuple(GRID.values()))
        for grads, loss in ((spoilt, good), (good, spoilt)):
            updates, finite, skipped = run(grads, loss)
            np.testing.assert_array_equal(updates, np.where(reached, 0, -good / 8))
            np.testing.assert_array_equal(finite, ~everywhere if grads is spoilt else True)
            np.testing.assert_array_equal(skipped, everywhere)
