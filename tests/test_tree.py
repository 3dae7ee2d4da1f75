"""Pytrees: the check for finite numbers, and the choice between two trees."""

import re

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from leaves import FP8, NOT_NUMBERS
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale._step.finite import _finite, _finite_on_cpu, _finite_on_gpu, _operation

FLOATS = ["float16", "bfloat16", "float32"]
# Large shapes: with an axis that splits into groups first, last, in the middle, and not at all.
LARGE = [
    (2**16,),
    (2**16 + 8,),
    (65_537,),
    (2**16, 1),
    (257, 257),
    (17, 31, 131),
    # Split for eight devices into groups of 32, 16 and 8: rows first, then columns.
    (512, 200),
    (384, 200),
    (192, 500),
    (33, 2048),
    (100, 1024),
    (200, 512),
    (5, 256, 64),
]
BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}


@jax.jit
def each_finite(tree):
    """Return `all_finite` of each array, all compiled together."""
    return jax.tree.map(ols.all_finite, tree)


def largest(shapes, dtypes):
    """Return arrays of the largest finite number, whose sums and norms overflow."""
    return {
        f"{dtype} {shape}": np.full(shape, jnp.finfo(dtype).max, jnp.dtype(dtype))
        for shape in shapes
        for dtype in dtypes
    }


def assert_found_anywhere(arrays, positions):
    """Put each kind of bad number into all arrays, at one position at a time."""
    assert all(each_finite(arrays).values())
    for i, position in enumerate(positions):
        bad = list(BAD.values())[i % 3]
        for array in arrays.values():
            parts = array.view("f4") if array.dtype == np.complex64 else array
            parts.flat[position % parts.size] = bad
        found = each_finite(arrays)
        assert not any(found.values()), (position, bad, found)
        for array in arrays.values():
            array.fill(1)


def verdict(tree):
    """Return `all_finite`, and check the type of the result."""
    finite = ols.all_finite(tree)
    assert isinstance(finite, jax.Array)
    assert (finite.shape, finite.dtype) == ((), jnp.bool_)
    return bool(finite)


@pytest.mark.slow
def test_one_bad_element_of_a_large_array_is_found_wherever_it_stands():
    arrays = largest(LARGE, ["float32"]) | largest([(512, 200)], ["float16", "bfloat16"])
    arrays |= largest([(2**16,), (512, 200)], ["complex64"])
    anywhere = np.random.default_rng(0).integers(2**20, size=20)
    assert_found_anywhere(arrays, [0, 7, 8, 31, 32, -33, -1, *anywhere])


def test_one_bad_element_of_a_small_array_is_found():
    # XLA:CPU's `max` drops NaN in arrays of 4096 elements and more.
    arrays = largest([(1,), (2,), (4095,), (4096,)], [*FLOATS, "complex64"])
    assert_found_anywhere(arrays, [0, 0, 0, -1, -1, -1, 2048, 2049])
    assert_found_anywhere(largest([(3,), (2**16,)], FP8), [0, 1, 2, -1, -2, -3])


EMPTY = {
    "containers": {"a": [], "b": ((), None)},
    "zero-size": jnp.zeros((0, 3)),
    "zero-size float16": np.zeros((3, 0), np.float16),
}


@pytest.mark.parametrize("leaf", (NOT_NUMBERS | EMPTY).values(), ids=NOT_NUMBERS | EMPTY)
def test_a_leaf_without_floating_point_numbers_counts_as_finite(leaf):
    assert verdict(leaf)
    assert verdict({"a": leaf, "w": np.ones(2)})
    assert not verdict({"a": leaf, "w": np.array([1.0, np.nan])})


@pytest.mark.parametrize("bad", [float("nan"), complex(0, float("inf")), np.float16("inf")])
def test_numbers_of_python_and_numpy_are_looked_at(bad):
    assert verdict([1.0, 1j, np.float16(1)])
    assert not verdict([1.0, bad])
    assert not verdict(flax.core.freeze({"params": {"scale": bad}, "w": np.ones(2)}))


MANY = [
    *(np.ones(2**16, np.float32) for _ in range(9)),  # more than one kernel takes
    *(np.ones((8, 2**13), np.float32), np.ones((2**13, 8), np.float16), np.ones(2**14 - 1)),
    *(np.ones((3, n), np.complex64) for n in (5, 2**12)),
    *(np.ones(5, np.float16) for _ in range(17)),
    *(np.ones((), np.float32), np.ones((0, 3), np.float32)),
]


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("way", [_finite, _finite_on_cpu, _finite_on_gpu])
def test_every_way_to_check_looks_at_every_element(way, devices):
    check = jax.jit(lambda arrays: way(*arrays, devices=devices))
    assert check(MANY)
    for i, array in enumerate(MANY):
        for position in {0, array.size // 3, array.size - 1} if array.size else ():
            spoilt = array.copy()
            spoilt.flat[position] = -np.inf
            assert not check([*MANY[:i], spoilt, *MANY[i + 1 :]])


def lowered(check, arrays, shardings, platform="tpu"):
    """Return the program for as many devices as the shardings have."""
    _operation.cache_clear()  # so that a mutation tester sees what is registered for a platform
    step = jax.jit(check, in_shardings=(shardings,))
    return step.trace(arrays).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("devices", "shape", "dtype", "groups"),
    [
        # The groups, of slices of elements, are axes of their own.
        (1, (256, 256), "float16", ["8x2x16x256"]),  # 2**16 elements
        (1, (256, 255), "float32", []),
        (1, (257, 257), "float32", []),  # no group size divides it
        # If the last axis is split, XLA:CPU reads a transposed product against its memory order.
        (1, (512, 8, 64), "bfloat16", ["16x2x16x8x64"]),
        # The number of groups can be divided among the devices.
        (8, (256, 256), "float32", ["8x2x16x256"]),
        (8, (128, 600), "float32", ["8x1x16x600"]),
        (8, (64, 2052), "float32", ["8x1x8x2052"]),
        (8, (32, 2052), "float32", []),
        (8, (256, 256, 3), "float32", ["256x8x2x16x3"]),
        (8, (256, 128, 3), "float32", ["8x2x16x128x3"]),
        # Only where it must be the last axis, above rows of eight.
        (8, (64, 2048), "float32", ["8x1x8x2048"]),
        (8, (32, 2048), "float32", ["32x8x2x16x8"]),
        (8, (96, 1024), "float32", ["96x8x1x16x8"]),
        (8, (160, 512), "float32", ["160x8x1x8x8"]),
        (8, (160, 576), "float32", []),
        (8, (2, 16, 2048), "float32", ["2x16x8x2x16x8"]),
        (8, (2**16,), "float32", ["256x2x16x8"]),
        (8, (2**16 + 1,), "float32", []),
    ],
)
def test_large_arrays_are_split_into_groups_for_every_device(devices, shape, dtype, groups):
    mesh = jax.make_mesh((devices,), ("d",), (AxisType.Auto,), devices=jax.devices()[:devices])
    sharding = NamedSharding(mesh, P())
    text = lowered(ols.all_finite, jax.ShapeDtypeStruct(shape, dtype), sharding, "cpu")
    reshaped = r"stablehlo.reshape %\w+ : \(tensor<[\dx]+xi\d+>\) -> tensor<([\dx]+)xi\d+>"
    assert re.findall(reshaped, text)[:1] == groups
    # Of two slices at most, and then over the elements of each group.
    assert text.count("stablehlo.maximum") <= 2


@pytest.mark.parametrize("shape", [(4, 4), (16,)])
@pytest.mark.parametrize("axes", [(), ("manual",), ("auto",), ("manual", "auto")])
def test_arrays_of_one_shape_are_checked_together_where_they_are_local_or_of_one_axis(axes, shape):
    arrays = [jnp.ones(shape) for _ in range(17)]
    check, sharding = ols.all_finite, None
    if axes:
        mesh = jax.make_mesh((2,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes))
        sharding = NamedSharding(mesh, P())
    if "manual" in axes:
        check = jax.shard_map(
            check, mesh=mesh, in_specs=P(), out_specs=P(),
            axis_names=set(axes) - {"auto"}, check_vma=False,
        )  # fmt: skip
    together = "auto" not in axes or shape == (16,)
    for platform in ("tpu", "metal"):
        text = lowered(check, arrays, sharding, platform)
        assert text.count("stablehlo.reduce(") == (2 if together else 17)


@pytest.mark.parametrize("shape", [(8, 8), (16,)])
def test_arrays_of_one_shape_are_checked_together_where_their_types_shard_them_alike(shape):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    shardings = [NamedSharding(mesh, spec) for spec in (P("a"), P("b"), P(), P("a"), P("b"))]
    good, bad = np.ones(shape), np.full(shape, np.inf)
    together = [jax.device_put(good, sharding) for sharding in shardings]
    assert lowered(ols.all_finite, together, shardings).count("stablehlo.reduce(") == 3
    assert ols.all_finite(together)
    for i, sharding in enumerate(shardings):
        assert not ols.all_finite(
            [*together[:i], jax.device_put(bad, sharding), *together[i + 1 :]]
        )


@pytest.mark.parametrize(
    ("platform", "number", "shape", "reduced"),
    [
        # A GPU reduces arrays of one size together, the large ones first to one row.
        ("cuda", 16, (2**13 - 1,), ["i1"]),
        ("cuda", 17, (2**13 - 1,), ["i1", "i1"]),
        ("rocm", 7, (2**13,), ["64xi1", "i1"]),
        ("cuda", 8, (2**13,), ["64xi1", "64xi1", "i1"]),
        ("rocm", 8, (2**16,), ["256xi1", "256xi1", "i1"]),
        ("cuda", 7, (2**13 + 1,), ["i1"]),  # it cannot be split into 64 equal parts
        # A TPU checks together what its fast memory holds.
        ("tpu", 12, (8, 8), ["i1"]),
        ("tpu", 12, (2048, 2048), ["i1"] * 3),
        ("tpu", 12, (8192, 4096), ["i1"] * 12),
    ],
)
def test_arrays_are_checked_together_as_suits_the_platform(platform, number, shape, reduced):
    text = lowered(
        ols.all_finite, [jax.ShapeDtypeStruct(shape, jnp.float32)] * number, None, platform
    )
    assert re.findall(r"stablehlo.reduce\(.*-> tensor<(.*)>", text) == reduced


def test_gpus_check_arrays_that_may_be_sharded_one_by_one():
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    arrays = [jax.ShapeDtypeStruct((2**13, 2), jnp.float32)] * 3
    text = lowered(ols.all_finite, arrays, NamedSharding(mesh, P()), "cuda")
    assert text.count("stablehlo.reduce(") == 3


def test_arrays_of_symbolic_size_are_checked_on_every_platform():
    (rows,) = export.symbolic_shape("rows")
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 3), (4,))]
    check = export.export(jax.jit(ols.all_finite), platforms=["cpu", "cuda", "tpu"])(arrays)
    assert check.call([jnp.ones((5, 3)), jnp.ones(4)])
    assert not check.call([jnp.full((5, 3), jnp.inf), jnp.ones(4)])


def test_a_check_is_dispatched_once_in_eager_execution():
    jaxpr = jax.make_jaxpr(ols.all_finite)([jnp.ones(2), jnp.ones(3)])
    assert len(jaxpr.eqns) == 1


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_spread_over_devices_are_judged_as_a_whole_and_where_they_are(axis_type):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    arrays = {
        P("d"): [(8, 4), (2**17,), (24, 4096), (2**16 + 8,), (8 * 1031 * 8,)],
        P(None, "d"): [(4096, 64), (4096, 24), (16, 8, 1031)],
        P(): [(2**17,)],
    }
    for spec, shapes in arrays.items():
        sharding = NamedSharding(mesh, spec)
        tree = [np.ones(shape, np.float32) for shape in shapes]
        compiled = each_finite.lower(jax.device_put(tree, sharding)).compile()
        collectives = set(re.findall(r"all-\w+|collective-\w+", compiled.as_text()))
        assert collectives == ({"all-reduce"} if "d" in spec else set())
        assert all(compiled(jax.device_put(tree, sharding)))
        for position in (0, -1, 1000):
            for array in tree:
                array.flat[position % array.size] = np.inf
            spread = jax.device_put(tree, sharding)
            assert not any(compiled(spread))
            assert not verdict(spread[0])
            for array in tree:
                array.fill(1)


KEYS = jax.random.split(jax.random.key(0))
RBG_KEYS = jax.random.split(jax.random.key(1, impl="rbg"))
PAIRS = {
    **{
        dtype: (jnp.array([1, 0]).astype(dtype), jnp.array([0, 1]).astype(dtype))
        for dtype in [*FLOATS, *FP8, "complex64", "int8", "int32", "uint32", "bool"]
    },
    "0-d": (jnp.float32(1), jnp.float32(2)),
    "zero-size": (jnp.zeros((0, 2)), jnp.ones((0, 2))),
    "numpy": (np.ones(2, np.float32), np.zeros(2, np.float32)),
    "NaN and inf": (jnp.array([jnp.nan]), jnp.array([jnp.inf])),
    "negative zero": (jnp.array([-0.0]), jnp.array([0.0])),
    "PRNG key": tuple(KEYS),
    "PRNG keys": (KEYS, KEYS[::-1]),
    "rbg key": tuple(RBG_KEYS),
    "state": (ols.init(8), ols.init(2)),
    "None": (None, None),
}


def test_it_selects_whole_trees_bit_for_bit_in_their_own_containers():
    select = jax.jit(ols.tree_where)
    on_true, on_false = ({name: [pair[i]] for name, pair in PAIRS.items()} for i in (0, 1))
    assert_same_bits(select(True, on_true, on_false), on_true)
    assert_same_bits(select(False, on_true, on_false), on_false)


@pytest.mark.parametrize("pred", [True, np.bool_(True), np.array(True), jnp.asarray(True)])
def test_the_predicate_may_be_a_python_bool_or_an_array(pred):
    assert ols.tree_where(pred, np.ones(2), np.zeros(2)).tolist() == [1, 1]
    assert ols.tree_where(not pred, np.ones(2), np.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    "leaf",
    [
        *("text", 3, 0.5, True, float("nan")),
        pytest.param(jnp.exp, id="function"),
        pytest.param(np.zeros(2, jax.dtypes.float0), id="float0"),
    ],
)
def test_a_leaf_other_than_an_array_passes_through_if_both_trees_have_it(leaf):
    for pred in (True, False):
        chosen = ols.tree_where(pred, {"a": leaf, "w": np.ones(1)}, {"a": leaf, "w": np.zeros(1)})
        assert chosen["a"] is leaf
        assert chosen["w"].tolist() == [float(pred)]
    # They may be equal but different objects.
    assert ols.tree_where(True, (("a", "b")[0] * 2, 0.5), ("aa", 1 / 2)) == ("aa", 0.5)
