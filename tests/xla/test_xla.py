"""The programs of the check for each platform, and that the plain and the fast forms agree."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import shape as shape_of
from compiled import OPTIMIZED, temporaries
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale import _xla

pytestmark = pytest.mark.needs_xla

MANY = [
    *(np.ones(2**16, np.float32) for _ in range(9)),  # more arrays than one kernel checks
    *(np.ones((8, 2**13), np.float32), np.ones((2**13, 8), np.float16), np.ones(2**14 - 1)),
    *(np.ones((3, n), np.complex64) for n in (5, 2**12)),
    *(np.ones(5, np.float16) for _ in range(17)),
    *(np.ones((), np.float32), np.ones((0, 3), np.float32)),
]


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "metal", "tpu"])
def test_the_program_for_each_platform_checks_every_element(platform, devices):
    mesh = jax.make_mesh((devices,), ("d",), (AxisType.Auto,), devices=jax.devices()[:devices])
    step = jax.jit(ols.all_finite, in_shardings=NamedSharding(mesh, P()))
    anywhere = [export.DisabledSafetyCheck.platform()]  # the program also runs on a CPU
    exported = export.export(step, platforms=[platform], disabled_checks=anywhere)(MANY)
    check = jax.jit(exported.call, in_shardings=NamedSharding(mesh, P()))
    assert check(MANY)
    for i, array in enumerate(MANY):
        for position in {0, array.size // 3, array.size - 1} if array.size else ():
            spoilt = array.copy()
            spoilt.flat[position] = -np.inf
            assert not check([*MANY[:i], spoilt, *MANY[i + 1 :]])


def lowered(check, arrays, shardings=None, platform="tpu"):
    """Return the program for as many devices as the shardings have."""
    step = jax.jit(check, in_shardings=(shardings,))
    return step.trace(arrays).lower(lowering_platforms=(platform,)).as_text()


def reductions(*args, **kwargs):
    """Return the length of each reduction's result: a kernel or two of the check, on a GPU."""
    lines = lowered(*args, **kwargs).splitlines()
    results = [re.search(r"tensor<(?:(\d+)x)?i\d+>$", x)[1] for x in lines if "lo.reduce(" in x]
    return [int(length or 1) for length in results]


@pytest.mark.parametrize(
    ("shape", "in_groups"),
    [
        ((256, 256), True),  # 2**16 elements
        ((257, 256), True),  # grouped only along the last axis, above rows of eight
        ((255, 260), False),
        ((128, 256), False),  # small
        ((512, 8, 64), True),
        ((240, 512), True),
        ((3, 32, 1024), True),
        ((48, 1367), True),
        ((3, 48, 457), True),
        ((2**16,), True),
        ((2**16 + 8,), False),
    ],
)
@pytest.mark.usefixtures("optimized")
def test_on_a_cpu_a_single_array_of_its_shape_is_counted_in_groups(shape, in_groups):
    check = jax.jit(ols.all_finite).lower(shape_of(*shape)).compile(OPTIMIZED)
    # A group writes one byte for its 16 elements. Without groups, each element writes one.
    assert (temporaries(check) <= math.prod(shape) / 15) == in_groups
    assert not check(jnp.full(shape, jnp.nan))  # 256 would overflow to 0 in an int8


@pytest.mark.parametrize("shape", [(4, 4), (16,)])
@pytest.mark.parametrize("axes", [(), ("manual",), ("auto",), ("manual", "auto")])
def test_arrays_of_one_shape_are_checked_together_if_local_or_one_dimensional(axes, shape):
    check, sharding = ols.all_finite, None
    if axes:
        mesh = jax.make_mesh((2,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes))
        sharding = NamedSharding(mesh, P())
    if "manual" in axes:
        specs = {"mesh": mesh, "in_specs": P(), "out_specs": P()}
        check = jax.shard_map(check, **specs, axis_names=set(axes) - {"auto"}, check_vma=False)
    together = "auto" not in axes or shape == (16,)
    for platform in ("cuda", "metal"):
        found = reductions(check, [shape_of(*shape)] * 17, sharding, platform)
        assert len(found) == (2 if together else 17)


@pytest.mark.parametrize("shape", [(8, 8), (16,)])
def test_arrays_of_one_shape_are_checked_together_if_explicitly_sharded_alike(shape):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    shardings = [NamedSharding(mesh, spec) for spec in (P("a"), P("b"), P(), P("a"), P("b"))]
    for bad in (None, 0, 1, 2, 3, 4):
        arrays = [np.full(shape, np.inf if i == bad else 1.0) for i in range(5)]
        arrays = jax.device_put(arrays, shardings)
        assert ols.all_finite(arrays) == (bad is None)
    assert len(reductions(ols.all_finite, arrays, shardings, "cuda")) == 3


@pytest.mark.parametrize(
    ("platform", "number", "shape", "reduced"),
    [
        # A GPU reduces arrays of one size together, the large ones first to one row.
        ("cuda", 16, (2**13 - 1,), [1]),
        ("cuda", 17, (2**13 - 1,), [1, 1]),
        ("cuda", 7, (2**13,), [64, 1]),
        ("cuda", 8, (2**13,), [64, 64, 1]),
        ("cuda", 8, (2**16,), [256, 256, 1]),
        ("cuda", 7, (2**13 + 1,), [1]),  # it cannot be split into 64 equal parts
        # A CPU checks eight arrays or more together, and then all flags.
        ("cpu", 8, (8, 8), [1, 1]),
        ("cpu", 7, (8, 8), [1] * 8),
        # A TPU checks together what its fast memory holds.
        ("tpu", 12, (8, 8), [1]),
        ("tpu", 12, (2048, 2048), [1] * 3),
        ("tpu", 12, (8192, 4096), [1] * 12),
    ],
)
def test_each_platform_groups_arrays_in_its_own_way(platform, number, shape, reduced):
    arrays = [shape_of(*shape)] * number
    assert reductions(ols.all_finite, arrays, platform=platform) == reduced


def test_an_eager_check_is_one_program(compilations):
    arrays = [jnp.asarray(np.ones(n, np.float32)) for n in (173, 179)]  # new ones
    compilations.clear()
    assert ols.all_finite(arrays)
    assert len(compilations) == 1


def test_a_check_works_with_jit_disabled():
    with jax.disable_jit():
        assert ols.all_finite([jnp.ones(2), jnp.ones(3)])
        assert not ols.all_finite([jnp.ones(2), jnp.array([1.0, jnp.nan])])


def test_flags_of_sharded_arrays_are_stacked_on_a_tpu_and_chained_on_a_gpu():
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    given = ols.all_finite, [shape_of(2**13, 2)] * 3, NamedSharding(mesh, P())
    assert len(reductions(*given, "cuda")) == 3
    stacked = ["stablehlo.concatenate" in lowered(*given, name) for name in ("tpu", "cuda")]
    assert stacked == [True, False]


@pytest.mark.integration
@pytest.mark.parametrize(
    "transform", [pytest.param(lambda f: f, id="eager", marks=pytest.mark.slow), jax.jit]
)
def test_the_plain_forms_give_the_same_results(transform, monkeypatch):
    rules = ols.Spike("grad_norm", window=2), lambda grads, _: optax.tree.norm(grads) > 100
    tx = ols.with_loss_scaling(optax.sgd(1e-3, momentum=0.9), 8.0, skip_if=rules)
    params = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4)}

    def run():
        state, found, step = tx.init(params), [], transform(functools.partial(tx.update))
        for grad in (1.0, 2.0, np.inf, 1e4, 1.0):
            grads = {"w": 8 * params["w"].at[1, 2].multiply(grad)}
            updates, state = step(grads, state, params)
            found.append((updates, state))
        return found

    expected = run()
    for name, value in {"enabled": False, "all_finite": None, "replay": None}.items():
        monkeypatch.setattr(_xla, name, value)
    for (updates, state), (with_xla, state_with_xla) in zip(run(), expected, strict=True):
        assert_same_bits(state.loss_scale_state, state_with_xla.loss_scale_state)
        np.testing.assert_allclose(updates["w"], with_xla["w"], rtol=1e-6)
