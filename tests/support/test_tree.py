"""Pytrees: the check for finite numbers, and the choice between two trees."""

import functools
import re

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import OPTIMIZED
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from leaves import FP8, not_numbers
from plain_where import assert_same_bits

import optax_lossscale as ols

FLOATS = ["float16", "bfloat16", "float32"]
# With an axis that splits into groups first, last, in the middle, and not at all; for eight devices
# into groups of 32, 16 and 8.
LARGE = [
    *((2**16,), (2**16 + 8,), (65_537,), (2**16, 1), (257, 257), (17, 31, 131), (512, 200)),
    *((384, 200), (192, 500), (33, 2048), (100, 1024), (200, 512), (5, 256, 64)),
]


@functools.partial(jax.jit, compiler_options=OPTIMIZED)
def each_finite(tree):
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
        bad = (np.inf, -np.inf, np.nan)[i % 3]
        for array in arrays.values():
            parts = array.view("f4") if array.dtype == np.complex64 else array
            parts.flat[position % parts.size] = bad
        found = each_finite(arrays)
        assert not any(found.values()), (position, bad, found)
        for array in arrays.values():
            array.fill(1)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_one_bad_element_of_a_large_array_is_found_at_any_position():
    arrays = largest(LARGE, ["float32"]) | largest([(512, 200)], ["float16", "bfloat16"])
    arrays |= largest([(2**16,), (512, 200)], ["complex64"])
    anywhere = np.random.default_rng(0).integers(2**20, size=20)
    assert_found_anywhere(arrays, [0, 7, 8, 31, 32, -33, -1, *anywhere])


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_one_bad_element_of_a_small_array_is_found():
    # XLA:CPU's `max` drops NaN in arrays of 4096 elements and more.
    arrays = largest([(1,), (2,), (4095,), (4096,)], [*FLOATS, "complex64"])
    assert_found_anywhere(arrays, [0, 0, 0, -1, -1, -1, 2048, 2049])
    assert_found_anywhere(largest([(3,), (2**16,)], FP8), [0, 1, 2, -1, -2, -3])


def test_a_leaf_without_floating_point_numbers_counts_as_finite():
    empty = {"containers": {"a": [], "b": ((), None)}, "zero-size": np.zeros((3, 0), np.float16)}
    for leaf in (not_numbers() | empty).values():
        finite = ols.all_finite(leaf)
        assert isinstance(finite, jax.Array)
        assert (finite, finite.shape, finite.dtype) == (True, (), jnp.bool_)
        assert not ols.all_finite({"a": leaf, "w": np.array([1.0, np.nan])})


@pytest.mark.parametrize("bad", [float("nan"), complex(0, float("inf")), np.float16("inf")])
def test_numbers_of_python_and_numpy_are_looked_at(bad):
    assert ols.all_finite([1.0, 1j, np.float16(1)])
    assert not ols.all_finite([1.0, bad])
    assert not ols.all_finite(flax.core.freeze({"params": {"scale": bad}, "w": np.ones(2)}))


def test_arrays_of_symbolic_size_are_checked_on_every_platform():
    (rows,) = export.symbolic_shape("rows")
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 3), (4,))]
    check = export.export(jax.jit(ols.all_finite), platforms=["cpu", "cuda", "tpu"])(arrays)
    assert check.call([jnp.ones((5, 3)), jnp.ones(4)])
    assert not check.call([jnp.full((5, 3), jnp.inf), jnp.ones(4)])


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_arrays_are_checked_as_a_whole_without_moving_them(axis_type):
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
            assert not any(compiled(jax.device_put(tree, sharding)))
            for array in tree:
                array.fill(1)


@pytest.mark.slow
def test_it_selects_whole_trees_bit_for_bit_in_their_own_containers():
    keys = jax.random.split(jax.random.key(1, impl="rbg"))
    dtypes = *FLOATS, *FP8, "complex64", "int8", "int32", "uint32", "bool"
    pairs = {
        "0-d": (jnp.float32(1), jnp.float32(2)),
        "zero-size": (jnp.zeros((0, 2)), jnp.ones((0, 2))),
        "numpy": (np.ones(2, np.float32), np.zeros(2, np.float32)),
        "NaN and inf": (jnp.array([jnp.nan]), jnp.array([jnp.inf])),
        "negative zero": (jnp.array([-0.0]), jnp.array([0.0])),
        "PRNG key": tuple(keys),
        "PRNG keys": (keys, keys[::-1]),
        "state": (ols.init(8), ols.init(2)),
        "None": (None, None),
        **{dtype: [jnp.asarray(np.array(x, dtype)) for x in ([1, 0], [0, 1])] for dtype in dtypes},
    }
    select = jax.jit(ols.tree_where)
    on_true, on_false = ({name: [pair[i]] for name, pair in pairs.items()} for i in (0, 1))
    assert_same_bits(select(True, on_true, on_false), on_true)
    assert_same_bits(select(False, on_true, on_false), on_false)


def test_the_predicate_may_be_a_python_bool_or_an_array():
    for kind in (bool, np.bool_, np.array, jnp.asarray):
        assert ols.tree_where(kind(True), np.ones(2), np.zeros(2)).tolist() == [1, 1]
        assert ols.tree_where(kind(False), np.ones(2), np.zeros(2)).tolist() == [0, 0]


def test_a_leaf_other_than_an_array_passes_through_if_both_trees_have_it():
    for leaf in ("text", 0.5, float("nan"), jnp.exp, np.zeros(2, jax.dtypes.float0)):
        chosen = ols.tree_where(True, {"a": leaf, "w": np.ones(1)}, {"a": leaf, "w": np.zeros(1)})
        assert chosen["a"] is leaf
    # They may be equal but different objects.
    assert ols.tree_where(True, (("a", "b")[0] * 2, 0.5), ("aa", 1 / 2)) == ("aa", 0.5)


@jax.tree_util.register_pytree_node_class
class Dense:
    """A layer that reads its array when it is made, so nothing else can be in the array's place."""

    def __init__(self, w):
        self.w = jnp.reshape(w, (64, 64))

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


WRAPPERS = {
    "loss scaling": ols.with_loss_scaling,
    "a rule": lambda tx: ols.with_skipping(tx, ols.Spike("grad_norm")),
    "masters": ols.with_master_weights,
    "remainders": lambda tx: ols.with_master_weights(tx, remainders=True),
    "rounded parameters": ols.with_stochastic_rounding,
    "rounded state": ols.with_bfloat16_state,
}


@pytest.mark.filterwarnings("ignore:`params` are bfloat16, and no float32 master")
@pytest.mark.integration
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_layer_that_reads_its_array_when_it_is_made_is_trained_in_every_wrapper(name):
    tx = WRAPPERS[name](optax.adam(0.1, mu_dtype=jnp.float32))
    layer = Dense(jnp.ones((64, 64), "bfloat16"))
    grads = jax.grad(ols.autocast(lambda layer: jnp.sum(layer.w @ layer.w), "bfloat16"))(layer)
    updates, _ = jax.jit(tx.update)(grads, tx.init(layer), layer)
    trained = optax.apply_updates(layer, updates)
    assert isinstance(trained, Dense)
    np.testing.assert_allclose(trained.w.astype("float32"), 0.9, rtol=0.01)
