"""Many devices do what one device does: same parameters, same loss scale, same skipped steps.

The oracle is the same task on one device, with the plainest optimizer that scales the loss. Each
way to spread the step is compiled once and then run with the bad number on each device in turn.
"""

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_where import with_plain_where
from process_worker import BATCH, INNER, POLICY, batch, counts, init_params, loss_fn, spec_of_state

import optax_lossscale as ols

pytestmark = pytest.mark.integration

STEPS = 8
DEVICES = 8
# What float16 makes of a sum in another order, and less than a tenth of what one step does.
TOLERANCE = 4e-4
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
EVERYWHERE = {"w1": P(), "b1": P(), "w2": P()}
SPREAD = {"w1": P("data"), "b1": P("data"), "w2": P("data")}
TENSOR_PARALLEL = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model")}


class Way(NamedTuple):
    """How a step is spread over the devices.

    `transform` turns a step into one that runs on all devices, given the mesh and the partition
    specs of its arguments and results. `None` for the mesh is pmap, which has its own.
    """

    transform: Callable
    specs: dict[str, P] = EVERYWHERE
    batch: P = P("data")
    mesh: dict[str, int] | None = {"data": DEVICES}  # noqa: RUF012, never changed
    axis_type: AxisType = AUTO
    loss_fn: Callable = loss_fn
    reduce: Callable = lambda loss, grads: (loss, grads)
    inner: optax.GradientTransformation = INNER
    axis_name: Any = None
    added: tuple[str, ...] = ()  # collectives that loss scaling adds


# How a step is spread.


def pmapped(step, mesh, specs):
    del mesh, specs
    return jax.pmap(step, axis_name="data", donate_argnums=(0, 1))


def shard_mapped(*, check_vma):
    def transform(step, mesh, specs):
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(*specs[:2], P()), check_vma=check_vma
        )
        return jax.jit(mapped, donate_argnums=(0, 1))

    return transform


def jitted(step, mesh, specs):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (*specs[:2], P()))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)


# What a loss function or a reduction has to do, and where.


def mean_over(axis_name):
    """The gradients are averaged; the loss that the optimizer is given stays a replica's own."""
    return lambda loss, grads: (loss, jax.lax.pmean(grads, axis_name))


def averaged(axis_name):
    """The loss is a mean over the devices, so its gradient is one too."""
    return lambda *args: jax.lax.pmean(loss_fn(*args), axis_name)


def averaged_in_float32(params, *data):
    """As above, and the gradients are summed after the cast to float32 rather than before."""
    return averaged("data")(jax.lax.pcast(params, "data", to="varying"), *data)


def gathered(axis_name, loss_fn):
    """Each device gathers the parameters that it has a part of."""

    def gathering(params, *data):
        return loss_fn(jax.lax.all_gather(params, axis_name, tiled=True), *data)

    return gathering


def divided(axis_names):
    """Without `check_vma` the transpose of a gather sums over the devices: divide before."""
    return lambda *args: loss_fn(*args) / jax.lax.axis_size(axis_names)


def tensor_parallel(params, x, y):
    """Each device has some of the hidden units; their contributions are summed."""
    p = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    hidden = jax.nn.relu(x.astype(jnp.float16) @ p["w1"] + p["b1"][None])
    out = jax.lax.psum((hidden @ p["w2"]).astype(jnp.float32), "model")
    return jax.lax.pmean(jnp.mean((out - y) ** 2), "data")


def explicit_fsdp(params, *data):
    return loss_fn(jax.sharding.reshard(params, P()), *data)


def explicit_tensor_parallel(params, x, y):
    p = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    hidden = jax.nn.relu(x.astype(jnp.float16) @ p["w1"] + p["b1"][None])
    out = jnp.matmul(hidden, p["w2"], out_sharding=P("data"))
    return jnp.mean((out.astype(jnp.float32) - y) ** 2)


def reduce_inside(axis_name):
    """The wrapper unscales and checks each replica's gradients, and then they are averaged."""
    return optax.chain(optax.stateless(lambda g, _: jax.lax.pmean(g, axis_name)), INNER)


WITHOUT_VMA, WITH_VMA = shard_mapped(check_vma=False), shard_mapped(check_vma=True)
FLAGS = ("pred[2]",)
ONE_FLAG_EACH = ("pred[] pred[] pred[]",)
GRID = {"data": 4, "model": 2}
WAYS = {
    "pmap": Way(pmapped, mesh=None, reduce=mean_over("data"), axis_name="data", added=FLAGS),
    "pmap, reduced inside": Way(
        pmapped, mesh=None, inner=reduce_inside("data"), axis_name="data", added=FLAGS
    ),
    "shard_map without check_vma": Way(
        WITHOUT_VMA, reduce=mean_over("data"), axis_name="data", added=FLAGS
    ),
    "shard_map without check_vma, reduced inside": Way(
        WITHOUT_VMA, inner=reduce_inside("data"), axis_name="data", added=FLAGS
    ),
    "shard_map without check_vma, two axes": Way(
        WITHOUT_VMA,
        mesh=GRID,
        batch=P(("data", "model")),
        reduce=mean_over(("data", "model")),
        axis_name=("data", "model"),
        added=FLAGS,
    ),
    "shard_map": Way(WITH_VMA, loss_fn=averaged("data")),
    "shard_map, with axis_name": Way(WITH_VMA, loss_fn=averaged("data"), axis_name="data"),
    "shard_map, summed in float32": Way(WITH_VMA, loss_fn=averaged_in_float32),
    "shard_map, two axes": Way(
        WITH_VMA,
        mesh=GRID,
        batch=P(("model", "data")),
        loss_fn=averaged(("data", "model")),
        axis_name=("model", "data"),
    ),
    "manual FSDP without check_vma": Way(
        WITHOUT_VMA,
        specs=SPREAD,
        loss_fn=gathered("data", divided("data")),
        axis_name="data",
        added=FLAGS,
    ),
    "manual FSDP": Way(
        WITH_VMA,
        specs=SPREAD,
        loss_fn=gathered("data", averaged("data")),
        axis_name="data",
        added=FLAGS,
    ),
    "manual FSDP over one axis of two": Way(
        WITH_VMA,
        mesh=GRID,
        specs={"w1": P("model"), "b1": P("model"), "w2": P("model")},
        batch=P(("data", "model")),
        loss_fn=gathered("model", averaged(("data", "model"))),
        axis_name=("data", "model"),
        added=FLAGS,
    ),
    "manual tensor parallel": Way(
        WITH_VMA,
        mesh=GRID,
        specs=TENSOR_PARALLEL,
        loss_fn=tensor_parallel,
        axis_name=("data", "model"),
        added=FLAGS,
    ),
    "jit": Way(jitted),
    "jit, FSDP": Way(jitted, specs=SPREAD, added=ONE_FLAG_EACH),
    "jit, tensor parallel": Way(jitted, mesh=GRID, specs=TENSOR_PARALLEL, added=ONE_FLAG_EACH),
    "jit, explicit": Way(jitted, axis_type=EXPLICIT),
    "jit, FSDP, explicit": Way(
        jitted, axis_type=EXPLICIT, specs=SPREAD, loss_fn=explicit_fsdp, added=ONE_FLAG_EACH
    ),
    "jit, tensor parallel, explicit": Way(
        jitted,
        axis_type=EXPLICIT,
        mesh=GRID,
        specs=TENSOR_PARALLEL,
        loss_fn=explicit_tensor_parallel,
        added=ONE_FLAG_EACH,
    ),
}

# What needs `jax.set_mesh` or `jax.lax.pcast`, which came after jax 0.7.0.
NEWER = {
    name
    for name, way in WAYS.items()
    if way.axis_type == EXPLICIT or way.loss_fn is averaged_in_float32
}
needs_pcast = pytest.mark.skipif(
    not hasattr(jax.lax, "pcast"), reason="jax.lax.pcast and jax.set_mesh are newer than this JAX"
)


class Trainer:
    """A way with its compiled step, and what to start it with."""

    def __init__(self, way, tx):
        self.way, self.tx = way, tx
        axes = way.mesh or {"data": DEVICES}
        types = (way.axis_type,) * len(axes)
        self.mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), types)
        self.specs = way.specs, spec_of_state(tx, init_params(), way.specs), way.batch, way.batch

        def step(params, state, x, y):
            # What the optimizer's state holds decides whether the loss is scaled.
            if isinstance(state, ols.WithLossScalingState):
                loss, grads = ols.value_and_grad(way.loss_fn)(state, params, x, y)
            else:
                loss, grads = jax.value_and_grad(way.loss_fn)(params, x, y)
            loss, grads = way.reduce(loss, grads)
            updates, state = tx.update(grads, state, params, value=loss)
            return optax.apply_updates(params, updates), state, loss

        self._step = way.transform(step, self.mesh, self.specs)

    def step(self, *args):
        with self._context():
            return self._step(*args)

    def _context(self):
        # Explicit axes are named by the model, which then has to know the mesh.
        explicit = self.way.axis_type == EXPLICIT
        return jax.set_mesh(self.mesh) if explicit else contextlib.nullcontext()

    def start(self):
        params = init_params()
        return self._put((params, self.tx.init(params)), self.specs[:2], np.broadcast_to)

    def batch(self, step, row=None):
        def split(array, shape):
            return array.reshape(shape[0], -1, *array.shape[1:])

        return self._put(batch(step, row), self.specs[2:], split)

    def _put(self, tree, specs, rows):
        if self.way.mesh is None:
            shape = (DEVICES,)
            stacked = jax.tree.map(
                lambda a: rows(
                    np.asarray(a), shape if rows is not np.broadcast_to else shape + a.shape
                ),
                tree,
            )
            return jax.device_put(stacked, NamedSharding(self.mesh, P("data")))
        return jax.tree.map(
            lambda a, spec: jax.device_put(np.asarray(a), NamedSharding(self.mesh, spec)),
            tree,
            specs,
        )

    def compile(self):
        with self._context():
            return self._step.lower(*self.start(), *self.batch(0)).compile()

    def run(self, row):
        """Return params and state after the last step, and the counters after each, everywhere."""
        params, state = self.start()
        seen = []
        for i in range(STEPS):
            params, state, _ = self.step(params, state, *self.batch(i, row))
            fields = [[float(s.data.reshape(())) for s in f.addressable_shards] for f in state[0]]
            seen.append(list(zip(*fields, strict=True)))
        return params, state, seen


def scaled(way, **kwargs):
    axis_name = kwargs.pop("axis_name", way.axis_name)
    way = way._replace(**kwargs)
    return Trainer(way, ols.with_loss_scaling(way.inner, POLICY, axis_name=axis_name))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[needs_pcast] * (name in NEWER), id=name) for name in WAYS],
)
def trainer(request):
    return scaled(WAYS[request.param])


@pytest.fixture(scope="module")
def oracle():
    """What one device does when this row of the batch is bad, or none."""
    tx = with_plain_where(INNER, POLICY)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = ols.value_and_grad(loss_fn)(state, params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    def run(row):
        params = init_params()
        state = tx.init(params)
        seen = []
        for i in range(STEPS):
            params, state = step(params, state, *batch(i, row))
            seen.append(tuple(counts(state)))
        return jax.device_get((params, state)), seen

    return run


def shards(array, ndim):
    """Return, for each part of an array, what each device that has it holds."""
    by_part = {}
    for shard in array.addressable_shards:
        part = shard.index[array.ndim - ndim :]
        data = np.asarray(shard.data)
        by_part.setdefault(str(part), (part, []))[1].append(
            data.reshape(data.shape[-ndim:] if ndim else ())
        )
    return list(by_part.values())


def furthest(run, expected):
    """Return how far any device is from what one device has."""
    far = 0.0
    for array, whole in zip(jax.tree.leaves(run), jax.tree.leaves(expected), strict=True):
        for part, copies in shards(array, whole.ndim):
            far = max(far, *(float(np.max(np.abs(copy - whole[part]))) for copy in copies))
    return far


def diverged(run, expected):
    """Say whether two devices differ in a bit of what they should both have."""
    return any(
        copy.tobytes() != copies[0].tobytes()
        for array, whole in zip(jax.tree.leaves(run), jax.tree.leaves(expected), strict=True)
        for _, copies in shards(array, whole.ndim)
        for copy in copies
    )


def test_the_task_would_show_a_mistake(oracle):
    (good, _), _ = oracle(None)
    (_, _), seen = oracle(5)
    # Scales go up and down, two overflows and one bad loss are skipped, and a step is far larger
    # than the tolerance.
    assert [s[0] for s in seen] == [256, 128, 128, 256, 256, 256, 128, 128]
    assert [s[4] for s in seen] == [0, 1, 1, 1, 2, 2, 3, 3]
    moved = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), good, init_params())
    assert min(jax.tree.leaves(moved)) > 50 * TOLERANCE


@pytest.mark.parametrize("device", [None, *range(DEVICES)])
def test_a_bad_number_on_one_device_does_everywhere_what_it_does_alone(trainer, oracle, device):
    row = None if device is None else device * BATCH // DEVICES + 1
    params, state, seen = trainer.run(row)
    expected, seen_alone = oracle(row)
    # The same loss scale and counters on every device after every step.
    assert seen == [[alone] * DEVICES for alone in seen_alone]
    assert furthest((params, state), expected) < TOLERANCE
    assert not diverged((params, state), expected)


def test_everything_stays_where_it_was_put(trainer):
    before = trainer.start()
    where = jax.tree.map(lambda a: a.sharding, before)
    after = before
    for i in range(2):
        *after, _ = trainer.step(*after, *trainer.batch(i, row=3))
    jax.tree.map(
        lambda a, sharding: sharding.is_equivalent_to(a.sharding, a.ndim) or pytest.fail(str(a)),
        tuple(after),
        where,
    )
    if trainer.way.mesh:
        assert all(a.sharding.is_fully_replicated for a in after[1].loss_scale_state)


def test_params_and_state_are_donated(trainer):
    params, state = trainer.start()
    if trainer.way.mesh is None:  # which copies what it has not laid out itself
        params, state, _ = trainer.step(params, state, *trainer.batch(0))
    trainer.step(params, state, *trainer.batch(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))


# What travels between devices.

_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)(?:-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(compiled):
    """Return the kind, and the dtypes and shapes, of everything that travels."""
    return sorted(
        (kind, " ".join(f"{dtype}[{shape}]" for dtype, shape in _ARRAY.findall(arrays)))
        for arrays, kind in _COLLECTIVE.findall(compiled.as_text())
    )


def elements(arrays):
    return sum(math.prod(map(int, filter(None, s.split(",")))) for _, s in _ARRAY.findall(arrays))


def total(found):
    return sum(elements(arrays) for _, arrays in found)


def test_at_most_one_small_collective_is_added(trainer):
    found = collectives(trainer.compile())
    plain = collectives(
        Trainer(trainer.way, optax.with_extra_args_support(trainer.way.inner)).compile()
    )
    added = list(found)
    for kind, arrays in plain:
        # The order of the arrays in one collective is the compiler's.
        same = [f for f in added if f[0] == kind and sorted(f[1].split()) == sorted(arrays.split())]
        added.remove(same[0])
    assert [arrays for _, arrays in added] == list(trainer.way.added)
    assert {kind for kind, _ in added} <= {"all-reduce"}
    assert total(found) <= total(plain) + 3


# Where users go wrong, and nothing says so.


def end(trainer, oracle, row):
    """Return how far the run ends from the oracle, and whether devices differ."""
    *run, _ = trainer.run(row)
    expected, _ = oracle(row)
    return furthest(run, expected), diverged(run, expected)


def first_update(way):
    trainer = scaled(way)
    params, *_ = trainer.step(*trainer.start(), *trainer.batch(0))
    return np.asarray(params["w2"]) - np.asarray(init_params()["w2"])


def assert_as_many_times_larger_as_devices(wrong, right):
    loud = np.abs(right) > np.max(np.abs(right)) / 2  # elsewhere float16 has rounded it
    np.testing.assert_allclose(wrong[loud] / right[loud], DEVICES, rtol=0.02)


@needs_pcast
def test_a_mean_of_gradients_that_are_summed_already_is_as_many_times_too_large_as_devices():
    way = WAYS["shard_map"]
    right = first_update(way)
    wrong = way._replace(loss_fn=loss_fn, reduce=lambda *both: jax.lax.pmean(both, "data"))
    assert_as_many_times_larger_as_devices(first_update(wrong), right)
    right_too = first_update(way._replace(loss_fn=averaged_in_float32))
    np.testing.assert_allclose(right_too, right, atol=TOLERANCE / 10)


def test_a_mean_of_losses_is_no_mean_of_gathered_gradients_without_check_vma():
    way = WAYS["manual FSDP without check_vma"]
    wrong = way._replace(loss_fn=gathered("data", averaged("data")))
    assert_as_many_times_larger_as_devices(first_update(wrong), first_update(way))
    right = first_update(WAYS["manual FSDP"])
    np.testing.assert_allclose(first_update(way), right, atol=TOLERANCE / 10)


def test_adam_hides_gradients_that_are_too_large():
    # Why nobody notices the mistake above by looking at the loss.
    tx = ols.with_loss_scaling(optax.adam(1e-3), POLICY)
    params = init_params()
    grads = jax.tree.map(lambda p: jnp.cos(100 * p) * 256, params)
    update = jax.jit(lambda grads: tx.update(grads, tx.init(params), params)[0])
    once, often = update(grads), update(optax.tree.scale(8.0, grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), once, often)


@pytest.mark.parametrize(
    "name", ["pmap, reduced inside", "shard_map without check_vma, reduced inside"]
)
def test_replicas_diverge_when_each_decides_for_itself(oracle, name):
    wrong = scaled(WAYS[name], axis_name=None)
    far, apart = end(wrong, oracle, row=9)
    assert apart
    assert far > 10 * TOLERANCE
    assert end(scaled(WAYS[name]), oracle, row=9) == (pytest.approx(0, abs=TOLERANCE), False)


@pytest.mark.parametrize("name", ["pmap", "shard_map without check_vma"])
def test_the_loss_of_one_replica_parts_it_from_the_others(name):
    # The gradients are averaged, so every replica knows of a bad one; of a bad loss it does not.
    # The gradients of the bad loss are hidden here, as by a loss that is clipped or masked.
    def masked(params, x, y):
        return loss_fn(params, x, jnp.where(jnp.isfinite(y), y, 0.0)) + jax.lax.stop_gradient(
            jnp.max(jnp.where(jnp.isfinite(y), 0.0, y))
        )

    for axis_name, apart in ((None, True), ("data", False)):
        trainer = scaled(WAYS[name], loss_fn=masked, axis_name=axis_name)
        state = trainer.start()
        for i in (3, 4):
            *state, _ = trainer.step(*state, *trainer.batch(i, row=9))
        expected = jax.tree.map(np.asarray, (init_params(), trainer.tx.init(init_params())))
        assert diverged(tuple(state), expected) is apart, axis_name


@pytest.mark.parametrize(
    ("name", "axis_name", "moved"),
    [
        ("manual FSDP without check_vma", None, DEVICES - 1),
        ("manual FSDP without check_vma", "data", 0),
        ("manual FSDP", "data", 0),
    ],
)
def test_shards_skip_together_only_if_the_flag_is_agreed(name, axis_name, moved):
    # One element of one shard's gradient is bad.
    def spoil(loss, grads):
        bad = (jax.lax.axis_index("data") == 5) & (jnp.arange(grads["b1"].size) == 2)
        return loss, {**grads, "b1": jnp.where(bad, jnp.inf, grads["b1"])}

    trainer = scaled(WAYS[name], reduce=spoil, axis_name=axis_name)
    params, state, _ = trainer.step(*trainer.start(), *trainer.batch(0))
    before = np.asarray(init_params()["w1"]).reshape(DEVICES, -1)
    after = np.asarray(params["w1"]).reshape(DEVICES, -1)
    assert (before != after).any(axis=1).sum() == moved
    skipped = [int(s.data) for s in state.loss_scale_state.total_skipped.addressable_shards]
    assert sum(skipped) == DEVICES - moved


def test_check_vma_refuses_a_replicated_state_that_was_not_agreed():
    trainer = scaled(WAYS["manual FSDP"], axis_name=None)
    with pytest.raises(ValueError, match="replicat"):
        trainer.step(*trainer.start(), *trainer.batch(0))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("axis_name", [("data",), ("data", "model")], ids=str)
@pytest.mark.parametrize("varying", [(), ("data",), ("model",), ("data", "model")], ids=str)
def test_devices_agree_over_the_named_axes_whichever_of_them_the_flag_varies_over(
    varying, axis_name, check_vma
):
    tx = ols.with_loss_scaling(optax.sgd(1.0), 8.0, axis_name=axis_name)
    mesh = jax.make_mesh(tuple(GRID.values()), tuple(GRID), (AUTO, AUTO))
    spec = P(*(axis if axis in varying else None for axis in GRID))

    def step(grads, loss):
        state = tx.init(grads)
        unscaled, finite = ols.unscale_and_check(grads, state, axis_name=axis_name)
        updates, state = tx.update(grads, state, grads, value=loss[0, 0])
        skipped = state.loss_scale_state.total_skipped
        return unscaled, updates, finite[None, None], skipped[None, None]

    out_specs = (spec, spec, P(*GRID), P(*GRID))
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=out_specs, check_vma=check_vma)
    )
    shape = tuple(size if axis in varying else 1 for axis, size in GRID.items())
    good = 8 + np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    agreeing = tuple(i for i, axis in enumerate(GRID) if axis in axis_name)
    for where in (None, *np.ndindex(shape)):
        bad = np.zeros(shape, bool)
        if where:
            bad[where] = True
        spoilt = np.where(bad, np.float32(np.inf), good)
        reached = bad.any(agreeing, keepdims=True)
        everywhere = np.broadcast_to(reached, tuple(GRID.values()))
        for grads, loss in ((spoilt, good), (good, spoilt)):
            unscaled, updates, finite, skipped = run(grads, loss)
            np.testing.assert_array_equal(unscaled, grads / 8)
            np.testing.assert_array_equal(updates, np.where(reached, 0, -good / 8))
            np.testing.assert_array_equal(finite, ~everywhere if grads is spoilt else True)
            np.testing.assert_array_equal(skipped, everywhere)


@needs_pcast
def test_check_vma_sums_in_float16_unless_the_params_vary_before_the_cast():
    def dtypes(name):
        arrays = (a for kind, a in collectives(scaled(WAYS[name]).compile()) if elements(a) > 64)
        return {dtype for a in arrays for dtype, _ in _ARRAY.findall(a)}

    assert dtypes("shard_map") == {"f16"}
    assert dtypes("shard_map, summed in float32") == {"f32"}
    assert dtypes("shard_map without check_vma") == {"f32"}


# Gradients in float16, of parameters in float16.


def two_devices(fun):
    mesh = jax.make_mesh((2,), ("data",), (AUTO,), devices=jax.devices()[:2])
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P("data")))


def test_a_float16_mean_overflows_where_a_float32_mean_does_not():
    grads = jnp.full(2, 40_000.0, jnp.float16)
    state = ols.init(1024)

    def reduce_first(g):
        return ols.unscale_and_check(jax.lax.pmean(g, "data"), state, axis_name="data")[0][None]

    def cast_first(g):
        mean = jax.lax.pmean(g.astype(jnp.float32), "data")
        return ols.unscale_and_check(mean, state, axis_name="data")[0][None]

    def unscale_first(g):
        unscaled, _ = ols.unscale_and_check(g, state, axis_name="data")
        return jax.lax.pmean(unscaled, "data")[None]

    drop = lambda fun: lambda g: fun(g[0])  # noqa: E731, one element for each device
    assert two_devices(drop(reduce_first))(grads).tolist() == [np.inf] * 2
    assert two_devices(drop(cast_first))(grads).tolist() == [40_000 / 1024] * 2
    assert two_devices(drop(unscale_first))(grads).tolist() == [40_000 / 1024] * 2


def test_float16_gradients_are_reduced_inside_of_the_wrapper():
    grads = jnp.full(2, 40_000.0, jnp.float16)
    inside = optax.chain(optax.stateless(lambda g, _: jax.lax.pmean(g, "data")), optax.sgd(1.0))

    def update(inner, reduce):
        tx = ols.with_loss_scaling(inner, ols.DynamicLossScale(2.0**10), axis_name="data")

        def step(g):
            params = jnp.float16(0)
            updates, state = tx.update(reduce(g[0]), tx.init(params), params)
            return jnp.stack([updates, state.loss_scale_state.loss_scale])[None]

        return two_devices(step)(grads).tolist()

    assert (
        update(optax.sgd(1.0), lambda g: jax.lax.pmean(g, "data")) == [[0, 512]] * 2
    )  # skipped without need
    assert update(inside, lambda g: g) == [[-40_000 / 1024, 1024]] * 2


# What docs/scale.md reckons with.


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
def test_each_device_reads_its_own_part_of_the_gradients_once_more(axis_type):
    mesh = jax.make_mesh((DEVICES,), ("data",), (axis_type,))
    split, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    params = [jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=split)] * 6

    def compile_update(tx):
        def update(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=split if a.shape else everywhere
            ),
            jax.eval_shape(tx.init, params),
        )
        return jax.jit(update, donate_argnums=(0, 1)).lower(params, state, params).compile()

    plain, scaling = (
        compile_update(tx) for tx in (optax.adamw(1e-3), ols.with_loss_scaling(optax.adamw(1e-3)))
    )
    own_part = sum(4 * p.size for p in params) / DEVICES
    more = scaling.cost_analysis()["bytes accessed"] - plain.cost_analysis()["bytes accessed"]
    assert 0.98 * own_part <= more <= 1.05 * own_part
    assert collectives(plain) == []
    ((kind, arrays),) = collectives(scaling)
    assert kind == "all-reduce"
    assert arrays.split() == ["u8[]"] * len(params)  # a byte for each array
