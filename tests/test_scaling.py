"""Where the loss scale goes in and out: the loss, the gradients, and the function of both."""

import warnings

import equinox
import flax.core
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

F32_MAX = float(np.finfo(np.float32).max)
FP8 = sorted(
    name for name in dir(jnp) if name.startswith("float8") and hasattr(getattr(jnp, name), "dtype")
)
BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}

# given, result; float64 and complex128 are tried where JAX has them.
LOSS_DTYPES = [
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float32"),
    *((name, "float32") for name in FP8),
]
GRAD_DTYPES = [*LOSS_DTYPES, ("complex64", "complex64")]

NO_LOSSES = {
    "int": (3, "int at the root of the tree"),
    "bool": (True, "bool at the root of the tree"),
    "complex": (1j, "complex at the root of the tree"),
    "string": ("loss", "str at the root of the tree"),
    "int array": ({"a": jnp.int32(3)}, r"int32 at `\['a'\]`"),
    "bool array": ({"a": [jnp.array(True)]}, r"bool at `\['a'\]\[0\]`"),
    "complex array": ((jnp.float32(1), jnp.complex64(1)), r"complex64 at `\[1\]`"),
    "PRNG key": ({"k": jax.random.key(0)}, r"key<fry> at `\['k'\]`"),
    "function": ({"f": jnp.sum}, r"at `\['f'\]`"),
}

PASSED_THROUGH = {
    "float0": np.zeros(2, jax.dtypes.float0),
    "integers": jnp.arange(3),
    "numpy integers": np.arange(3),
    "4-bit integers": jnp.ones(2, jnp.int4),
    "bools": jnp.array([True, False]),
    "PRNG key": jax.random.key(0),
    "Python int": 10**400,
    "Python bool": True,
    "string": "inf",
    "function": jnp.exp,
    "object": object(),
    "strings": np.array(["nan"]),
    "objects": np.array([np.nan, None], object),
}

FACTORS = [2.0**-126, 2.0**-24, 0.5, 1.0, 2.0, 2.0**15, 2.0**24, 2.0**126]
ROUGH_FACTORS = [3.0, 10.0, 0.1, 1000.0, 65504.0, 1.9999999, 1e-30, 7e37]


@pytest.fixture
def silent():
    """Turn the warning about float16 losses off, where it is not the point."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss is float16", UserWarning)
        yield


def state_of(factor):
    return ols.FixedLossScale(factor).init()


def unscaled(grads, factor, **kwargs):
    """Return what `unscale_and_check` returns, the flag as a bool after a look at its type."""
    grads, finite = ols.unscale_and_check(grads, state_of(factor), **kwargs)
    assert isinstance(finite, jax.Array)
    assert (finite.shape, finite.dtype) == ((), jnp.bool_)
    return grads, bool(finite)


# scale_loss


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(("given", "expected"), LOSS_DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 2)])
def test_a_loss_is_scaled_in_at_least_float32(given, expected, shape):
    loss = jnp.full(shape, 2).astype(given)
    scaled = ols.scale_loss(loss, state_of(2.0**20))
    assert (scaled.dtype, scaled.shape, scaled.weak_type) == (expected, shape, False)
    np.testing.assert_array_equal(scaled, np.full(shape, 2.0**21))


@pytest.mark.usefixtures("silent", "x64")
@pytest.mark.parametrize(("given", "expected"), [*LOSS_DTYPES, ("float64", "float64")])
def test_a_loss_keeps_double_precision(given, expected):
    scaled = ols.scale_loss(jnp.asarray(2).astype(given), state_of(3))
    assert (scaled.dtype, float(scaled)) == (expected, 6)
    assert float(ols.scale_loss(jnp.float64(1e300), state_of(8))) == 8e300


def test_a_pytree_of_losses_is_scaled_leaf_by_leaf():
    losses = {"a": jnp.float32(1), "b": [np.float32(2), None, 3.0], "c": jnp.ones(2, jnp.bfloat16)}
    scaled = ols.scale_loss(losses, state_of(4))
    assert jax.tree.map(lambda x: x.tolist(), scaled) == {"a": 4, "b": [8, None, 12], "c": [4, 4]}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(scaled))


def test_a_python_float_is_a_loss():
    scaled = ols.scale_loss(3.0, state_of(8))
    assert (float(scaled), scaled.dtype, scaled.weak_type) == (24, jnp.float32, False)


@pytest.mark.parametrize("loss", [jnp.float16(3), np.float16(3)])
def test_a_float16_loss_of_three_is_finite_and_warns(loss):
    match = r"loss is float16.*infinite there above 65504.*[Cc]ompute the loss in float32"
    with pytest.warns(UserWarning, match=match) as record:
        scaled = ols.scale_loss(loss, ols.init())
    assert float(scaled) == 3 * 2.0**15
    assert [warning.filename for warning in record] == [__file__]


@pytest.mark.parametrize(
    "loss", [jnp.bfloat16(3), jnp.float32(3), 3.0, *(jnp.ones((), t) for t in FP8)], ids=repr
)
def test_only_a_float16_loss_warns(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ols.scale_loss({"loss": loss}, ols.init())


def test_a_float16_loss_among_others_warns_once_and_while_tracing():
    losses = [jnp.float32(1), jnp.float16(1), jnp.float16(2)]
    with pytest.warns(UserWarning, match="float16") as record:
        compiled = jax.jit(ols.scale_loss).lower(losses, ols.init()).compile()
    assert len(record) == 1
    assert [float(x) for x in compiled(losses, ols.init())] == [2.0**15, 2.0**15, 2.0**16]


@pytest.mark.parametrize(("loss", "where"), NO_LOSSES.values(), ids=NO_LOSSES.keys())
def test_what_is_no_floating_point_loss_is_refused(loss, where):
    with pytest.raises(TypeError, match=f"`loss` must be floating-point, got .*{where}.*astype"):
        ols.scale_loss(loss, ols.init())


def test_a_loss_that_is_no_loss_is_refused_while_tracing():
    with pytest.raises(TypeError, match="`loss` must be floating-point, got int32"):
        jax.jit(ols.scale_loss)(3, ols.init())


def test_a_loss_is_scaled_inside_grad_and_jit(runner):
    gradient = runner(jax.grad(lambda w, state: ols.scale_loss(jnp.sum(w**2), state)))
    assert gradient(jnp.array([1.0, 2.0]), state_of(8)).tolist() == [16, 32]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_loss_that_is_not_finite_stays_so(value):
    np.testing.assert_array_equal(ols.scale_loss(jnp.float32(value), ols.init()), value)


# The gradients: their dtypes and values


@pytest.mark.parametrize(("given", "expected"), GRAD_DTYPES)
def test_gradients_are_unscaled_in_at_least_float32(given, expected, runner):
    grads = {"w": jnp.array([1, 2]).astype(given), "b": jnp.asarray(1).astype(given)}
    state = state_of(2.0**20)
    true, finite = runner(ols.unscale_and_check)(grads, state)
    assert {(leaf.dtype.name, leaf.weak_type) for leaf in true.values()} == {(expected, False)}
    assert (true["w"].tolist(), true["b"].tolist()) == ([2.0**-20, 2.0**-19], 2.0**-20)
    assert (finite.dtype, finite.shape, bool(finite)) == (jnp.bool_, (), True)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_gradients_keep_double_precision(dtype):
    (true,), finite = unscaled([jnp.array([1e300, 1 + 2**-50]).astype(dtype)], 2.0**10)
    assert true.dtype == dtype
    assert true.tolist() == [1e300 / 2**10, (1 + 2**-50) / 2**10]
    assert finite


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("factor", FACTORS)
def test_a_power_of_two_comes_out_exactly(factor, transform):
    mantissas = np.array([1, -1.5, 2 - 2**-23, 1 + 2**-23, 1.1, -0.0], np.float32)
    grads = mantissas if factor < 2 else mantissas * np.float32(min(factor, 2.0**120))
    (true, finite) = transform(ols.unscale_and_check)(grads, state_of(factor))
    expected = np.float64(grads) / factor
    np.testing.assert_array_equal(np.float64(true), expected)
    np.testing.assert_array_equal(np.signbit(true), np.signbit(expected))
    assert bool(finite)


@pytest.mark.parametrize("factor", FACTORS)
def test_scaling_and_unscaling_by_a_power_of_two_is_the_identity(factor):
    value = jnp.float32(1.2345678)
    true, finite = unscaled(ols.scale_loss(value, state_of(factor)), factor)
    assert (float(true), finite) == (float(value), True)


@pytest.mark.parametrize("factor", ROUGH_FACTORS)
def test_other_factors_are_within_one_unit_in_the_last_place(factor):
    mantissas = np.linspace(1, 2, 5003, endpoint=False, dtype=np.float32)
    grads = np.concatenate([mantissas, -mantissas, 3 * mantissas]) * np.float32(min(factor, 1e37))
    true, finite = unscaled(grads, factor)
    quotient = grads / np.float32(factor)
    assert np.max(np.abs(np.asarray(true) - quotient) / np.spacing(np.abs(quotient))) <= 1
    assert finite


def test_it_is_the_reciprocal_that_is_taken_once_in_float32():
    grads = np.linspace(1, 2, 1001, dtype=np.float32)
    true, _ = unscaled(grads, 3)
    np.testing.assert_array_equal(true, grads * (np.float32(1) / np.float32(3)))


def test_it_divides_by_the_factor_the_loss_was_scaled_with():
    policy = ols.DynamicLossScale(8, 1)
    before = policy.init()
    grads = jax.grad(lambda w: ols.scale_loss(3 * w, before))(jnp.float32(1))
    true, finite = ols.unscale_and_check(grads, before)
    assert float(true) == 3
    assert float(policy.update(before, finite).loss_scale) == 16


# The gradients: leaves of other kinds


@pytest.mark.parametrize("leaf", PASSED_THROUGH.values(), ids=PASSED_THROUGH.keys())
def test_a_leaf_that_is_no_number_passes_through_and_counts_as_finite(leaf):
    grads, finite = unscaled({"a": leaf, "w": jnp.ones(2)}, 2)
    assert grads["a"] is leaf
    assert grads["w"].tolist() == [0.5, 0.5]
    assert finite
    assert not unscaled({"a": leaf, "w": jnp.array([1, jnp.inf])}, 2)[1]


@pytest.mark.parametrize("tree", [None, {}, [], {"a": None, "b": [(), {}]}], ids=str)
def test_an_empty_tree_is_finite(tree):
    assert unscaled(tree, 2) == (tree, True)


@pytest.mark.parametrize(("given", "expected"), GRAD_DTYPES)
def test_a_zero_size_leaf_is_finite(given, expected):
    (leaf,), finite = unscaled((jnp.zeros((0, 3)).astype(given),), 2)
    assert (leaf.shape, leaf.dtype) == ((0, 3), expected)
    assert finite


def test_numpy_arrays_and_scalars_are_gradients():
    given = {"array": np.ones(2, np.float16), "scalar": np.float32(3), "0-d": np.array(5, "f4")}
    grads, finite = unscaled(given, 2)
    assert jax.tree.map(lambda x: x.tolist(), grads) == {
        "array": [0.5, 0.5],
        "scalar": 1.5,
        "0-d": 2.5,
    }
    assert finite
    assert not unscaled(given | {"bad": np.float16("nan")}, 2)[1]


META = "_overwrite_with_gradient"
OVERWRITTEN = {
    "top": {META: jnp.array([3.0]), "w": jnp.array([3.0])},
    "nested": {META: {"Dense_0": {"k": [jnp.array([3.0])]}}, "w": jnp.array([3.0])},
    "below": {"layer": {META: {"k": jnp.array([3.0])}}, "w": jnp.array([3.0])},
    "in a list": [{META: (jnp.array([3.0]),)}, jnp.array([3.0])],
    "FrozenDict": flax.core.freeze({"l": {META: {"k": jnp.array([3.0])}}, "w": jnp.array([3.0])}),
}


@pytest.mark.parametrize("grads", OVERWRITTEN.values(), ids=OVERWRITTEN.keys())
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_what_overwrites_is_not_unscaled(grads, transform):
    true, finite = transform(ols.unscale_and_check)(grads, state_of(4))
    assert jax.tree.structure(true) == jax.tree.structure(grads)
    values = {
        META in jax.tree_util.keystr(path): leaf.tolist()
        for path, leaf in jax.tree_util.tree_leaves_with_path(true)
    }
    assert values == {True: [3], False: [0.75]}
    assert bool(finite)


def test_what_overwrites_keeps_its_type():
    grads = {META: jnp.ones(1, jnp.float8_e4m3fn), "h": jnp.ones(1, jnp.float16)}
    true, _ = unscaled(grads, 4)
    assert (true[META].dtype, true["h"].dtype) == (jnp.float8_e4m3fn, jnp.float32)


@pytest.mark.parametrize("name", ["overwrite_with_gradient", f"{META}_", f"my{META}"])
def test_only_that_very_key_overwrites(name):
    assert unscaled({name: jnp.array([3.0])}, 4)[0][name].tolist() == [0.75]


# The gradients: whether they are finite


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("size", [1, 4096, 100_000])
def test_one_bad_gradient_is_found_wherever_it_stands(size, dtype):
    check = jax.jit(ols.unscale_and_check)
    state = ols.init()
    grads = np.ones(size, jnp.dtype(dtype))
    assert bool(check(grads, state)[1])
    for position in {0, size // 2, size - 1}:
        for bad in BAD.values():
            spoilt = grads.copy()
            spoilt[position] = bad
            assert not bool(check(spoilt, state)[1]), (position, bad)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("part", ["real", "imag"])
def test_both_parts_of_a_complex_gradient_are_looked_at(part, bad):
    grads = np.ones(4099, np.complex64)
    getattr(grads, part)[4098] = bad
    assert not unscaled(grads, 2)[1]


@pytest.mark.parametrize("dtype", FP8)
def test_a_gradient_of_eight_bits_is_looked_at(dtype):
    assert not unscaled(jnp.array([1, jnp.nan]).astype(dtype), 2)[1]
    assert unscaled(jnp.full(5000, jnp.finfo(dtype).max, dtype), 2)[1]


@pytest.mark.parametrize("factor", [1, 2.0**15, 3])
@pytest.mark.parametrize("size", [1, 4096, 100_000])
def test_large_gradients_whose_sum_or_norm_overflows_are_finite(size, factor):
    grads = {"a": jnp.full(size, F32_MAX), "b": jnp.full(size, -F32_MAX)}
    assert unscaled(grads, factor)[1]


@pytest.mark.parametrize(
    ("grad", "factor", "finite"),
    [
        (F32_MAX, 1, True),
        (F32_MAX, 0.5, False),
        (F32_MAX / 2, 0.5, True),
        (2.0**3, 2.0**-126, False),
        (1.0, 2.0**-126, True),
        (-(2.0**100), 2.0**-100, False),
        (65504, 2.0**-100, True),
        (0.0, 2.0**-126, True),
    ],
)
def test_a_gradient_that_is_infinite_only_when_unscaled_is_not_finite(grad, factor, finite):
    grads = jnp.ones(3).at[1].set(grad)
    assert unscaled({"w": grads}, factor)[1] is finite
    assert unscaled({"w": grads.astype(jnp.complex64)}, factor)[1] is finite


@pytest.mark.parametrize("factor", [2.0**126, 2.0**-126, 3.0])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_no_factor_makes_a_bad_gradient_finite(bad, factor):
    true, finite = unscaled(jnp.array([1, bad]), factor)
    assert not finite
    np.testing.assert_array_equal(true[1], bad)


def test_float32s_smallest_numbers_are_finite():
    assert unscaled(jnp.array([2.0**-126, 1e-45, 0.0, -0.0]), 2.0**24)[1]


# The gradients: on several devices

BAD_AT = pytest.mark.parametrize("bad_at", [None, 0, 3, 7])


def spread(bad_at):
    """Return float32[8, 2], one row for each member, with a bad number in one of them."""
    grads = np.ones((8, 2), np.float32)
    if bad_at is not None:
        grads[bad_at, 1] = np.nan
    return jnp.asarray(grads)


@BAD_AT
@pytest.mark.parametrize("mapped", [jax.vmap, jax.pmap])
def test_the_members_of_a_mapped_axis_agree(mapped, bad_at):
    state = ols.init()

    def check(grads, axis_name):
        return ols.unscale_and_check({"g": grads}, state, axis_name=axis_name)[1]

    agreed = mapped(lambda g: check(g, "d"), axis_name="d")(spread(bad_at))
    alone = mapped(lambda g: check(g, None), axis_name="d")(spread(bad_at))
    assert (agreed.dtype, agreed.tolist()) == (jnp.bool_, [bad_at is None] * 8)
    assert alone.tolist() == [i != bad_at for i in range(8)]


@BAD_AT
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_name", ["a", "b", ("a", "b"), ("b", "a"), ("a",)], ids=str)
def test_the_shards_of_the_named_axes_agree(axis_name, check_vma, bad_at):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    rest = tuple({"a", "b"} - set(names))

    def check(grads, replicated):
        tree = {"g": grads, "replicated": replicated}
        _, finite = ols.unscale_and_check(tree, ols.init(), axis_name=axis_name)
        return finite[None]

    checked = jax.jit(
        jax.shard_map(
            check,
            mesh=mesh,
            in_specs=(P(("a", "b")), P()),
            out_specs=P(rest),  # with check_vma, this says too that the named axes agree
            check_vma=check_vma,
        )
    )
    good = np.arange(8).reshape(4, 2) != (-1 if bad_at is None else bad_at)
    axes = tuple("ab".index(name) for name in names)
    assert checked(spread(bad_at), jnp.ones(3)).tolist() == good.all(axes).reshape(-1).tolist()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("grads", [{}, None, {"replicated": jnp.ones(2)}], ids=str)
def test_gradients_that_do_not_vary_agree(grads, check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def check(grads):
        return ols.unscale_and_check(grads, ols.init(), axis_name="d")[1]

    mapped = jax.shard_map(check, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
    assert bool(jax.jit(mapped)(grads))


@BAD_AT
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P()], ids=str)
def test_plain_jit_is_global_by_itself(spec, axis_type, bad_at):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(axis_type,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, spec)
    grads = jax.device_put(spread(bad_at), sharding)
    true, finite = jax.jit(ols.unscale_and_check)({"g": grads}, state_of(2))
    assert bool(finite) is (bad_at is None)
    assert true["g"].sharding.is_equivalent_to(sharding, 2)


# value_and_grad


def square(w):
    return jnp.sum(w**2)


W = jnp.array([1.0, 2.0])


@pytest.mark.parametrize("factor", [1, 8, 0.5, 3, 2.0**24])
def test_the_value_is_true_and_the_gradients_are_scaled(factor, runner):
    value, grads = runner(ols.value_and_grad(square))(state_of(factor), W)
    assert float(value) == 5
    assert grads.tolist() == [2 * factor, 4 * factor]


def test_an_optimizers_state_will_do():
    tx = ols.with_loss_scaling(optax.sgd(1.0), 8)
    value, grads = ols.value_and_grad(square)(tx.init(W), W)
    assert (float(value), grads.tolist()) == (5, [16, 32])
    value, grads = ols.value_and_grad(square)({"deep": [tx.init(W)]}, W)
    assert (float(value), grads.tolist()) == (5, [16, 32])


@pytest.mark.parametrize("container", [tuple, list])
def test_aux_comes_back_as_it_is(container):
    def fun(w):
        return container([square(w), {"double": 2 * w, "text": "kept", "n": 3}])

    (value, aux), grads = ols.value_and_grad(fun, has_aux=True)(state_of(8), W)
    assert (float(value), grads.tolist()) == (5, [16, 32])
    assert (aux["double"].tolist(), aux["text"], aux["n"]) == ([2, 4], "kept", 3)


def weighted(x, y, *, weight=1.0, shift):
    return weight * jnp.sum(x * y) + shift


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        (0, [24.0, 40.0]),
        (1, [8.0, 16.0]),
        (-1, [8.0, 16.0]),
        ((0,), ([24.0, 40.0],)),
        ((0, 1), ([24.0, 40.0], [8.0, 16.0])),
        ((1, 0), ([8.0, 16.0], [24.0, 40.0])),
        ([0, 1], ([24.0, 40.0], [8.0, 16.0])),
    ],
    ids=str,
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_argnums_counts_from_the_first_argument_of_the_function(argnums, expected, transform):
    f = transform(ols.value_and_grad(weighted, argnums))
    value, grads = f(state_of(4), W, jnp.array([3.0, 5.0]), weight=2.0, shift=jnp.float32(7))
    assert float(value) == 2 * 13 + 7
    assert jax.tree.map(lambda g: g.tolist(), grads) == expected


def test_keyword_arguments_reach_the_function():
    f = ols.value_and_grad(weighted)
    with pytest.raises(TypeError, match="shift"):
        f(state_of(4), W, W)
    value, _ = f(state_of(4), W, y=W, shift=jnp.float32(1))
    assert float(value) == 6


def test_keyword_arguments_of_the_transform_reach_it():
    f = ols.value_and_grad(lambda w: jnp.sum(w["x"]), allow_int=True)
    _, grads = f(state_of(4), {"x": W, "i": jnp.arange(2)})
    assert grads["i"].dtype == jax.dtypes.float0
    assert grads["x"].tolist() == [4, 4]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [3.0, np.inf, -np.inf, np.nan, 60000.0])
def test_the_value_is_as_the_function_returned_it(value, dtype):
    loss = jnp.asarray(value).astype(dtype)
    returned, _ = ols.value_and_grad(lambda w: w + loss)(ols.init(), jnp.zeros((), dtype))
    assert returned.dtype == dtype
    np.testing.assert_array_equal(returned.astype(jnp.float32), loss.astype(jnp.float32))


def test_a_loss_that_only_overflows_when_scaled_is_reported_as_it_is():
    value, grads = ols.value_and_grad(lambda w: w)(state_of(2.0**24), jnp.float32(1e35))
    assert float(value) == float(np.float32(1e35))
    assert float(grads) == 2.0**24


def test_the_gradients_have_the_types_of_the_parameters():
    params = {"h": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16), "f": jnp.ones(2)}

    def loss(params):
        return sum(jnp.sum(p.astype(jnp.float32)) for p in params.values())

    value, grads = ols.value_and_grad(loss)(ols.init(), params)
    assert float(value) == 6
    assert [grads[k].dtype.name for k in "hbf"] == ["float16", "bfloat16", "float32"]
    assert [g.tolist() for g in grads.values()] == [[2.0**15] * 2] * 3


def test_small_float16_gradients_survive_only_when_scaled():
    def loss(w):
        return jnp.sum((w * jnp.float16(2)).astype(jnp.float32)) * 1e-9

    w = jnp.ones(2, jnp.float16)
    assert jax.grad(loss)(w).tolist() == [0, 0]
    _, grads = ols.value_and_grad(loss)(ols.init(), w)
    true, finite = ols.unscale_and_check(grads, ols.init())
    np.testing.assert_allclose(true, [2e-9] * 2, rtol=1e-2)
    assert bool(finite)


def test_a_float16_loss_warns_here_too():
    with pytest.warns(UserWarning, match="float16"):
        ols.value_and_grad(jnp.sum)(ols.init(), jnp.ones(2, jnp.float16))


def test_nnx_differentiates_a_module():
    model = flax.nnx.Linear(2, 1, use_bias=False, rngs=flax.nnx.Rngs(0))
    x = jnp.array([[1.0, 2.0]])
    f = ols.value_and_grad(lambda m, x: jnp.sum(m(x)), transform=flax.nnx.value_and_grad)
    value, grads = f(state_of(8), model, x)
    np.testing.assert_array_equal(value, jnp.sum(model(x)))
    assert jax.tree.leaves(grads)[0].tolist() == [[8], [16]]


def test_nnx_differentiates_with_aux_and_argnums():
    model = flax.nnx.Linear(2, 1, use_bias=False, rngs=flax.nnx.Rngs(0))

    def fun(x, model):
        return jnp.sum(model(x)), "aux"

    f = ols.value_and_grad(fun, 1, has_aux=True, transform=flax.nnx.value_and_grad)
    (_, aux), grads = f(state_of(8), jnp.array([[1.0, 2.0]]), model)
    assert aux == "aux"
    assert jax.tree.leaves(grads)[0].tolist() == [[8], [16]]


def test_equinox_differentiates_a_module():
    model = equinox.nn.Linear(2, 1, use_bias=False, key=jax.random.key(0))
    x = jnp.array([1.0, 2.0])

    def fun(model, x):
        return jnp.sum(model(x)), {"text": "aux"}

    f = ols.value_and_grad(fun, has_aux=True, transform=equinox.filter_value_and_grad)
    (value, aux), grads = equinox.filter_jit(f)(state_of(8), model, x)
    np.testing.assert_allclose(value, jnp.sum(model(x)), rtol=1e-6)
    assert aux == {"text": "aux"}
    assert grads.weight.tolist() == [[8, 16]]


@pytest.mark.parametrize(
    "result",
    [
        3.0,
        (1.0, 2.0),
        [(1.0, None), 2.0],
        ((1.0, None, None), 2.0),
        ((1.0, None), 2.0, None),
        ((1.0, None),),
    ],
    ids=str,
)
def test_what_returns_no_value_beside_the_gradients_is_refused(result):
    f = ols.value_and_grad(jnp.sum, transform=lambda *_, **__: lambda *_: result)
    with pytest.raises(TypeError, match=r"`transform` must return \(\(loss, aux\), grads\)"):
        f(state_of(8), W)


@pytest.mark.parametrize(
    ("fun", "match"),
    [
        (lambda w: jnp.sum(w).astype(jnp.int32), "`loss` must be floating-point, got int32"),
        (lambda w: jnp.sum(w) > 0, "`loss` must be floating-point, got bool"),
        (lambda w: jnp.sum(w) * 1j, "`loss` must be floating-point, got complex64"),
        (lambda w: {"a": 3, "b": w}, r"`loss` must be floating-point, got int at `\['a'\]`"),
        (lambda w: w, "scalar"),
    ],
)
def test_a_function_that_returns_no_loss_is_refused(fun, match):
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match=match):
        ols.value_and_grad(fun)(ols.init(), W)


# One step of training, with the pure functions only


def test_a_training_loop_of_pure_functions_compiles_once_and_learns():
    policy = ols.DynamicLossScale(2.0**24, 4)
    loss_and_grads = ols.value_and_grad(
        lambda w, x: jnp.mean((x @ w.astype(jnp.float16)).astype(jnp.float32) ** 2)
    )
    traced = []

    @jax.jit
    def step(w, state, x):
        traced.append(None)
        loss, grads = loss_and_grads(state, w, x)
        grads, finite = ols.unscale_and_check(grads, state)
        w = ols.tree_where(finite, w - 0.1 * grads, w)
        return w, ols.update(state, finite, policy, loss_finite=ols.all_finite(loss)), loss

    w, state = jnp.ones(4), policy.init()
    x = jnp.eye(4, dtype=jnp.float16)
    losses = []
    for _ in range(40):
        w, state, loss = step(w, state, x)
        losses.append(float(loss))
    assert len(traced) == 1
    assert int(state.total_skipped) >= 7  # half a cotangent of one, times 2**24, in float16
    assert losses[-1] < 0.5 * losses[0]
