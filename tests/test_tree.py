"""What holds for any pytree: whether it is finite, and choosing between two of them."""

import re

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale._step.finite import _finite, _finite_in_groups, _grouping

F32_MAX = float(np.finfo(np.float32).max)
FP8 = sorted(
    name for name in dir(jnp) if name.startswith("float8") and hasattr(getattr(jnp, name), "dtype")
)
FLOATS = ["float16", "bfloat16", "float32"]
# XLA:CPU's `max` drops NaN in arrays of 4096 elements and more.
SIZES = [1, 2, 4095, 4096, 5000, 100_000]
# Large shapes: with an axis that splits into groups first, last, in the middle, and not at all.
LARGE = [
    (2**16,),
    (2**16 + 8,),
    (65_537,),
    (257, 256),
    (256, 257),
    (257, 257),
    (17, 31, 131),
    (2**16, 1),
    # Split for eight devices into groups of 32, 16 and 8: rows first, then columns.
    (512, 200),
    (384, 200),
    (192, 500),
    (33, 2048),
    (100, 1024),
    (200, 512),
    (5, 256, 64),
]
SHARDED = [
    # shape, spec over eight devices
    ((8, 4), P("d")),
    ((2**17,), P("d")),
    ((4096, 64), P(None, "d")),
    ((4096, 24), P(None, "d")),
    ((24, 4096), P("d")),
    ((16, 8, 1031), P(None, "d")),
    ((2**16 + 8,), P("d")),
    ((8 * 1031 * 8,), P("d")),
    ((2**17,), P()),
]
BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}
NOT_NUMBERS = {
    "None": None,
    "float0": np.zeros(2, jax.dtypes.float0),
    "integers": jnp.arange(3),
    "4-bit integer": jnp.int4(3),
    "largest integer": np.int64(2**62),
    "bools": jnp.array([True, False]),
    "PRNG key": jax.random.key(0),
    "PRNG keys": jax.random.split(jax.random.key(0), 3),
    "raw PRNG key": jax.random.PRNGKey(0),
    "Python int": 10**400,
    "Python bool": True,
    "string": "nan",
    "bytes": b"inf",
    "function": jnp.exp,
    "object": object(),
    "dtype": jnp.float32,
    "strings": np.array(["nan"]),
    "objects": np.array([np.nan, None], object),
    "datetime": np.datetime64("NaT", "s"),
}
EMPTY = {
    "nothing": None,
    "dict": {},
    "nested": {"a": [], "b": ((), None)},
    "zero-size": jnp.zeros((0, 3)),
    "zero-size float16": np.zeros((3, 0), np.float16),
    "zero-size complex": jnp.zeros(0, jnp.complex64),
}


def positions(size):
    return sorted({0, size // 2, size - 1})


def verdict(tree):
    """Return `all_finite` after a look at its type."""
    finite = ols.all_finite(tree)
    assert isinstance(finite, jax.Array)
    assert (finite.shape, finite.dtype) == ((), jnp.bool_)
    return bool(finite)


# all_finite


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
@pytest.mark.parametrize("size", SIZES)
def test_one_bad_element_is_found_wherever_it_stands(size, dtype):
    check = jax.jit(ols.all_finite)
    clean = np.ones(size, jnp.dtype(dtype))
    assert bool(check(clean))
    for position in positions(size):
        for bad in BAD.values():
            spoilt = clean.copy()
            spoilt[position] = bad
            assert not bool(check(spoilt)), (position, bad)
            assert not verdict(jnp.asarray(spoilt)), (position, bad)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_one_bad_element_of_a_large_array_is_found_wherever_it_stands(shape, dtype):
    check = jax.jit(ols.all_finite)
    array = np.full(shape, np.finfo(np.float16).max, jnp.dtype(dtype))
    assert bool(check(array))
    anywhere = np.random.default_rng(0).integers(array.size, size=64)
    for position in (0, 7, 8, 31, 32, array.size - 33, array.size - 1, *anywhere):
        array.flat[position] = np.nan
        assert not bool(check(array)), position
        array.flat[position] = 1


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("part", ["real", "imag"])
@pytest.mark.parametrize("size", [5000, 2**16])
def test_both_parts_of_a_complex_number_are_looked_at(size, part, bad):
    array = np.ones(size, np.complex64)
    getattr(array, part)[4999] = bad
    assert not verdict({"c": array})
    assert not verdict({"c": jnp.asarray(array)})


@pytest.mark.parametrize("size", [3, 2**16])
@pytest.mark.parametrize("dtype", FP8)
def test_eight_bit_formats_are_looked_at(dtype, size):
    clean = np.ones(size, np.float32)
    assert verdict(clean.astype(dtype))
    clean[1] = np.nan
    assert not verdict(clean.astype(dtype))


def test_an_infinity_in_eight_bits_is_found():
    assert not verdict(jnp.array([1.0, jnp.inf]).astype(jnp.float8_e5m2))
    assert verdict(jnp.array([57344.0, 1.0]).astype(jnp.float8_e5m2))


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (4096,), (100_000,), (64, 64)])
@pytest.mark.parametrize("value", [F32_MAX, -F32_MAX, 1e-45, 2.0**-126, 0.0, -0.0])
def test_values_whose_sum_or_norm_overflows_are_finite(shape, value):
    array = jnp.full(shape, value, jnp.float32)
    assert verdict(array)
    assert bool(jax.jit(ols.all_finite)({"a": array, "b": [array, array]}))


def test_the_largest_values_of_each_type_are_finite():
    assert verdict({t: jnp.full(5000, jnp.finfo(t).max, t) for t in [*FLOATS, *FP8]})
    assert verdict(np.full(5000, np.finfo(np.float32).max * (1 + 1j), np.complex64))


@pytest.mark.parametrize("leaf", NOT_NUMBERS.values(), ids=NOT_NUMBERS.keys())
def test_what_is_no_number_counts_as_finite(leaf):
    assert verdict(leaf)
    assert verdict({"a": leaf, "w": jnp.ones(2)})
    assert not verdict({"a": leaf, "w": jnp.array([1.0, jnp.nan])})


@pytest.mark.parametrize("tree", EMPTY.values(), ids=EMPTY.keys())
def test_what_is_empty_is_finite(tree):
    assert verdict(tree)
    assert jax.jit(ols.all_finite)(tree).shape == ()


@pytest.mark.parametrize("bad", [0, 6, 12])
def test_one_bad_leaf_among_many_is_found(bad):
    leaves = [jnp.ones((i,)) for i in range(1, 14)]
    assert verdict(leaves)
    leaves[bad] = leaves[bad].at[-1].set(jnp.nan)
    assert not verdict(leaves)
    assert not verdict(flax.core.freeze({"params": {str(i): x for i, x in enumerate(leaves)}}))


def test_every_example_of_vmap_is_judged_alone():
    for size in (2, 2**16):
        batch = jnp.ones((4, size)).at[1, 0].set(jnp.nan).at[2, -1].set(jnp.inf)
        assert jax.vmap(ols.all_finite)({"a": batch}).tolist() == [True, False, False, True]


def views_of(shape, dtype="float32"):
    """Return what an array is reshaped into to be checked."""
    program = jax.jit(ols.all_finite).lower(jax.ShapeDtypeStruct(shape, dtype)).as_text()
    return re.findall(
        r"stablehlo.reshape %\w+ : \(tensor<[\dx]+xi\d+>\) -> tensor<([\dx]+)xi\d+>", program
    )


@pytest.mark.parametrize("shape", [(2048, 1024), (3, 3, 512, 256), (512, 8, 64), (4, 512, 512)])
def test_an_array_is_split_before_its_last_axis(shape):
    # XLA:CPU reads a transposed product against its order in memory where the last one is split.
    view, *_ = views_of(shape)
    assert view.endswith(f"x{shape[-1]}")
    assert "x2x16x" in view


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_large_arrays_are_split_and_small_ones_left_alone(dtype):
    assert views_of((256, 256), dtype)[0] == "8x2x16x256"  # 2**16 elements
    assert views_of((256, 255), dtype) == []
    assert views_of((257, 257), dtype) == []  # which nothing divides


SPLIT = {
    # What each shape becomes for eight devices, and which axis the groups are.
    (256, 3): (1, (-1, 2, 16, 3)),
    (128, 3): (1, (-1, 1, 16, 3)),
    (64, 3): (1, (-1, 1, 8, 3)),
    (32, 3): None,
    (256, 256, 3): (2, (256, -1, 2, 16, 3)),
    (256, 128, 3): (1, (-1, 2, 16, 128, 3)),
    (64, 2048): (1, (-1, 1, 8, 2048)),
    (32, 2048): (2, (32, -1, 2, 16, 8)),
    (32, 1024): (2, (32, -1, 1, 16, 8)),
    (32, 512): (2, (32, -1, 1, 8, 8)),
    (2, 3, 2048): (3, (2, 3, -1, 2, 16, 8)),
    (2048,): (1, (-1, 2, 16, 8)),
    (2049,): None,
    (256,): None,
}


@pytest.mark.parametrize(("shape", "split"), SPLIT.items(), ids=str)
def test_a_shape_is_split_where_it_splits_for_every_device(shape, split):
    assert _grouping(shape) == split


@pytest.mark.parametrize("check", [_finite, _finite_in_groups])
def test_both_ways_to_check_look_at_every_element(check):
    arrays = [np.ones(2**16, np.float32), np.ones((8, 2**13), np.float32), np.ones(5, np.float16)]
    assert check(arrays).tolist() == [True, True, True]
    for i, position in enumerate((0, 2**15, 4)):
        arrays[i].flat[position] = -np.inf
    assert check(arrays).tolist() == [False, False, False]


def test_a_check_is_dispatched_once_in_eager_execution():
    jaxpr = jax.make_jaxpr(ols.all_finite)([jnp.ones(2), jnp.ones(3)])
    assert len(jaxpr.eqns) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("shape", "spec"), SHARDED, ids=str)
def test_an_array_spread_over_devices_is_judged_as_a_whole(shape, spec, axis_type):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    check = jax.jit(ols.all_finite)
    for position in (None, 0, -1, 1000 % np.prod(shape)):
        array = np.ones(shape, np.float32)
        if position is not None:
            array.flat[position] = np.inf
        spread = jax.device_put(array, NamedSharding(mesh, spec))
        for judge in (check, ols.all_finite):
            assert bool(judge({"w": spread})) is (position is None)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("shape", "spec"), SHARDED, ids=str)
def test_no_array_is_gathered_to_be_judged(shape, spec, axis_type):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    compiled = jax.jit(ols.all_finite).lower([array, array]).compile().as_text()
    collectives = set(re.findall(r"all-\w+|collective-\w+", compiled))
    assert collectives == ({"all-reduce"} if "d" in spec else set())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_double_precision_is_judged_in_double_precision(dtype):
    assert verdict(jnp.full(5000, 1e300, dtype))
    assert not verdict(jnp.full(5000, 1e300, dtype).at[7].set(jnp.nan))


# tree_where

KEYS = jax.random.split(jax.random.key(0))
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
    "rbg key": (jax.random.key(1, impl="rbg"), jax.random.key(2, impl="rbg")),
}


def raw(leaf):
    """Return what an array is made of, bit for bit."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_it_selects_bit_for_bit(pair, transform):
    select = transform(ols.tree_where)
    for pred, expected in zip((True, False), pair, strict=True):
        tree = select(jnp.asarray(pred), {"a": [pair[0]]}, {"a": [pair[1]]})
        (leaf,) = tree["a"]
        assert (leaf.dtype, leaf.shape) == (expected.dtype, expected.shape)
        assert raw(leaf) == raw(expected)


def test_it_selects_whole_trees_in_their_own_containers():
    new, old = (ols.init(s)._replace(total_skipped=jnp.int32(s)) for s in (8, 2))
    for pred, tree in ((True, new), (False, old)):
        chosen = ols.tree_where(pred, {"s": new, "n": None}, {"s": old, "n": None})
        assert type(chosen["s"]) is ols.LossScaleState
        assert chosen["n"] is None
        assert [x.tolist() for x in chosen["s"]] == [x.tolist() for x in tree]


@pytest.mark.parametrize("pred", [True, np.bool_(True), np.array(True), jnp.asarray(True)])
def test_the_predicate_may_be_a_python_bool_or_an_array(pred):
    assert ols.tree_where(pred, jnp.ones(2), jnp.zeros(2)).tolist() == [1, 1]
    assert ols.tree_where(not pred, jnp.ones(2), jnp.zeros(2)).tolist() == [0, 0]


def test_it_maps_over_predicates():
    chosen = jax.vmap(ols.tree_where, in_axes=(0, None, None))(
        jnp.array([True, False]), {"a": jnp.ones(2)}, {"a": jnp.zeros(2)}
    )
    assert chosen["a"].tolist() == [[1, 1], [0, 0]]


def test_a_gradient_flows_through_the_chosen_tree_only():
    def loss(w, pred):
        return jnp.sum(ols.tree_where(pred, {"a": w * 3}, {"a": w * 5})["a"])

    assert jax.grad(loss)(jnp.ones(2), True).tolist() == [3, 3]
    assert jax.grad(loss)(jnp.ones(2), False).tolist() == [5, 5]


@pytest.mark.parametrize(
    "leaf",
    [
        *("text", 3, 0.5, True, float("nan")),
        pytest.param(jnp.exp, id="function"),
        pytest.param(np.zeros(2, jax.dtypes.float0), id="float0"),
    ],
)
@pytest.mark.parametrize("pred", [True, False])
def test_what_is_no_array_passes_through_when_it_is_the_same(leaf, pred):
    chosen = ols.tree_where(pred, {"a": leaf, "w": jnp.ones(1)}, {"a": leaf, "w": jnp.zeros(1)})
    assert chosen["a"] is leaf
    assert chosen["w"].tolist() == [float(pred)]


def test_equal_values_that_are_no_arrays_are_the_same():
    assert ols.tree_where(True, (("a", "b")[0] * 2, 0.5), ("aa", 1 / 2)) == ("aa", 0.5)


ONE, TWO = jnp.ones(1), jnp.ones(2)
MISMATCHES = {
    "missing key": ({"a": ONE, "b": ONE}, {"a": ONE}, ValueError, r"structure.*`\['b'\]`"),
    "added key": ({"a": ONE}, {"a": ONE, "c": ONE}, ValueError, r"structure.*`\['c'\]`"),
    "deep": ({"a": [ONE, ONE]}, {"a": [ONE]}, ValueError, r"structure.*`\['a'\]\[1\]`"),
    "behind what is the same": (
        {"a": [ONE], "b": [ONE]},
        {"a": [ONE], "b": []},
        ValueError,
        r"structure.*`\['b'\]\[0\]`",
    ),
    "None": ({"a": None}, {"a": ONE}, ValueError, r"structure.*`\['a'\]`"),
    "leaf and dict": ({"a": ONE}, {"a": {"b": ONE}}, ValueError, r"structure.*`\['a'\]"),
    "list and tuple": ({"a": [ONE]}, {"a": (ONE,)}, ValueError, r"structure.*`\['a'\]"),
    "empty containers": ({"a": []}, {"a": ()}, ValueError, r"structure.*`\['a'\]"),
    "state and tuple": (ols.init(), tuple(ols.init()), ValueError, "structure.*loss_scale"),
    "shape": ({"a": ONE}, {"a": TWO}, ValueError, r"shapes, got \(1,\) for \(2,\) at `\['a'\]`"),
    "rank": ([ONE], [jnp.ones((1, 1))], ValueError, r"got \(1,\) for \(1, 1\) at `\[0\]`"),
    "scalar": ([ONE], [jnp.float32(1)], ValueError, r"got \(1,\) for \(\) at `\[0\]`"),
    "dtype": (
        {"a": ONE},
        {"a": ONE.astype(jnp.float16)},
        TypeError,
        r"`\['a'\]`.*dtype.*float32 and float16.*`astype`",
    ),
    "int and float": ([ONE], [jnp.ones(1, int)], TypeError, "dtype.*float32 and int32"),
    "bool and int": ([jnp.array(True)], [jnp.array(1)], TypeError, "dtype.*bool and int32"),
    "float0": ([np.zeros(1, jax.dtypes.float0)], [ONE], TypeError, "dtype.*float0.* and float32"),
    "key": ([KEYS[0]], [jax.random.PRNGKey(0)], TypeError, "dtype.*key<fry> and uint32"),
    "kinds of key": ([KEYS[0]], [PAIRS["rbg key"][0]], TypeError, "key<fry> and key<rbg>"),
    "different strings": (
        {"a": "x"},
        {"a": "y"},
        ValueError,
        r"`\['a'\]`.*same in both, got 'x' and 'y'.*`jnp.asarray`",
    ),
    "different numbers": ({"a": 1}, {"a": 2}, ValueError, "same in both, got 1 and 2"),
    "1 and True": ({"a": 1}, {"a": True}, ValueError, "same in both, got 1 and True"),
    "array and number": ({"a": jnp.float32(1)}, {"a": 1.0}, ValueError, r"`\['a'\]`.*in both"),
    "at the root": (ONE, TWO, ValueError, "shapes, .* at the root of the tree"),
}


@pytest.mark.parametrize(
    ("on_true", "on_false", "error", "match"), MISMATCHES.values(), ids=MISMATCHES.keys()
)
@pytest.mark.parametrize("pred", [True, False])
def test_a_mismatch_is_an_error_that_names_the_place(pred, on_true, on_false, error, match):
    with pytest.raises(error, match=match):
        ols.tree_where(pred, on_true, on_false)


@pytest.mark.parametrize(
    ("pred", "error", "match"),
    [
        (1, TypeError, "`pred` must be a bool or a boolean array, got 1"),
        (None, TypeError, "`pred` must be a bool or a boolean array, got None"),
        ("yes", TypeError, "`pred` must be a bool or a boolean array, got 'yes'"),
        (jnp.float32(1), TypeError, "`pred` must be a bool or a boolean array"),
        (jnp.int32(1), TypeError, "`pred` must be a bool or a boolean array"),
        (jnp.array([True]), ValueError, r"`pred` must be a scalar, got shape \(1,\).*`jnp.all`"),
        (jnp.array([True, False]), ValueError, r"`pred` must be a scalar.*\(2,\).*`jax.vmap`"),
    ],
)
def test_a_predicate_that_is_no_boolean_scalar_is_refused(pred, error, match):
    with pytest.raises(error, match=match):
        ols.tree_where(pred, TWO, TWO)


def test_the_errors_are_raised_while_tracing_too():
    with pytest.raises(TypeError, match=r"`\['a'\]`.*float32 and float16"):
        jax.jit(ols.tree_where)(True, {"a": ONE}, {"a": ONE.astype(jnp.float16)})
    with pytest.raises(TypeError, match="`pred` must be a bool"):
        jax.jit(ols.tree_where)(1.0, ONE, ONE)
