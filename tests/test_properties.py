"""What holds for every pytree, policy and loss scale, tried on drawn ones.

Trees are of any structure, with leaves of every kind and dtype. Their numbers are drawn as bits, so
that subnormal numbers, negative zeros and the largest finite ones are among them, and NaN of every
payload. NumPy says what is right. The draws are the same in every run.
"""

import dataclasses
import functools
import json
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from plain_where import assert_same_bits, bits
from reference import Reference, dynamic_step, fixed_step, trajectory

import optax_lossscale as ols


def examples(number):
    """Try so many draws, the same ones in every run, however slow the machine is."""
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        # Shrinking would take minutes, where every try is compiled anew. Add `Phase.shrink` to
        # look for the smallest draw that fails.
        phases=[Phase.generate],
        # The fixture that lets JAX have float64 holds for all examples of a test.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


# -- numbers ------------------------------------------------------------------------------------

# The smallest magnitude, as bits, that is not finite. Above it are the NaNs.
NOT_FINITE = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
    "float8_e4m3fn": 0x7F,  # which has no infinity
    "float8_e5m2": 0x7C,
}
PARTS = {"complex64": "float32", "complex128": "float64"}
DOUBLE = ("float64", "complex128")
DTYPES = [*NOT_FINITE, *PARTS]
# Some of 2**16 elements or more, which XLA:CPU is given in groups: along each axis, and in none.
SHAPES = [(), (3,), (2, 3), (0,), (2, 0)]
LARGE = [(2**16,), (2**16 + 1,), (256, 257), (257, 256), (3, 256, 128)]


def part_dtype(dtype):
    """Return the dtype of the real numbers that an array of `dtype` is made of."""
    return np.dtype(PARTS.get(str(dtype), dtype))


def as_bits(array):
    """Return the same memory as unsigned integers, one for each real number."""
    part = part_dtype(array.dtype)
    return array.reshape(-1).view(part).view(f"u{part.itemsize}")


def finite_array(dtype, shape, seed):
    """Return an array of finite numbers: the extreme ones first, then any."""
    part = part_dtype(dtype)
    array = np.zeros(shape, dtype)
    words = as_bits(array)
    limit, sign = NOT_FINITE[part.name], 1 << (8 * part.itemsize - 1)
    rng = np.random.default_rng(seed)
    words[:] = rng.integers(0, limit, words.size, dtype=words.dtype)
    smallest_normal = 1 << ml_dtypes.finfo(part).nmant
    extreme = np.array([limit - 1, 0, 1, smallest_normal - 1, smallest_normal], words.dtype)
    few = extreme[: words.size]
    words[: few.size] = rng.permutation(few) if few.size == extreme.size else few
    words |= rng.integers(0, 2, words.size, dtype=words.dtype) * words.dtype.type(sign)
    return array


def with_bad_number(array, where, kind, negative):
    """Return a copy in which the number at the fraction `where` is NaN or infinite."""
    array = array.copy()
    part = part_dtype(array.dtype)
    words = as_bits(array)
    limit, sign = NOT_FINITE[part.name], 1 << (8 * part.itemsize - 1)
    magnitude = {"first": limit, "second": min(limit + 1, sign - 1), "last": sign - 1}[kind]
    words[int(where * (words.size - 1))] = magnitude | (sign if negative else 0)
    return array


def widened(array):
    """Return an array in double precision, where NumPy knows everything about it."""
    with np.errstate(invalid="ignore"):  # what NumPy says to some NaNs
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def is_finite(leaf):
    """NumPy's answer, for a leaf of any kind."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return True
    array = np.asarray(leaf)
    if array.dtype.name in DTYPES:
        return bool(np.isfinite(widened(array)).all())
    return True


# -- trees --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["activation"]
)
@dataclasses.dataclass
class Layer:
    weights: Any
    activation: str = "tanh"


NOT_NUMBERS = [
    lambda: np.arange(3, dtype=np.int32),
    lambda: jnp.uint8(255),
    lambda: np.array([True, False]),
    lambda: np.zeros(2, jax.dtypes.float0),
    lambda: jax.random.key(0),
    lambda: jax.random.split(jax.random.key(1), 2),
    lambda: jax.random.PRNGKey(2),
    lambda: 7,
    lambda: True,
    lambda: "nan",
]
OVERWRITE = "_overwrite_with_gradient"


def trees(leaf, *, max_leaves=4):
    """Draw nested containers of `leaf`."""

    def containers(children):
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["w", "b", OVERWRITE]), children, max_size=3),
            st.builds(Pair, children, children),
            st.builds(Layer, children, st.sampled_from(["tanh", "relu"])),
        )

    return st.recursive(leaf | st.none(), containers, max_leaves=max_leaves)


@st.composite
def arrays(draw, dtypes):
    """Draw an array of finite numbers: NumPy's, JAX's, or a NumPy scalar."""
    shape = draw(st.sampled_from(SHAPES) | st.sampled_from(LARGE))
    array = finite_array(draw(st.sampled_from(dtypes)), shape, draw(st.integers(0, 99)))
    return draw(st.sampled_from([np.asarray, jnp.asarray, operator.itemgetter(())]))(array)


def large_arrays(*, double):
    """Draw an array that XLA:CPU is given in groups, if it can be; complex ones often."""
    real = st.sampled_from([name for name in NOT_FINITE if double or name not in DOUBLE])
    dtypes = real | st.sampled_from([name for name in PARTS if double or name not in DOUBLE])
    return st.builds(finite_array, dtypes, st.sampled_from(LARGE), st.integers(0, 99))


def any_leaf(*, double):
    dtypes = [name for name in DTYPES if double or name not in DOUBLE]
    other = st.sampled_from(NOT_NUMBERS).map(lambda make: make())
    return st.one_of(arrays(dtypes), arrays(dtypes), other, st.just(1.5))


def any_tree(*, double=False):
    tree, leaf = trees(any_leaf(double=double)), any_leaf(double=double)
    return tree | st.builds(lambda a, b, c: {"w": a, OVERWRITE: b, "b": [c]}, leaf, leaf, tree)


# Where to put a bad number: which leaf, where in it, which one, its sign.
spoiling = st.tuples(
    st.integers(0, 20),
    st.floats(0, 1, width=16),
    st.sampled_from(["first", "second", "last"]),
    st.booleans(),
)


def has_numbers(leaf):
    return isinstance(leaf, float) or (
        isinstance(leaf, (jax.Array, np.ndarray, np.generic))
        and leaf.dtype.name in DTYPES
        and leaf.size > 0
    )


def spoiled(tree, spoil):
    """Return `tree` with one number in it that is not finite, if it holds numbers."""
    leaves, treedef = jax.tree.flatten(tree)
    numbers = [i for i, leaf in enumerate(leaves) if has_numbers(leaf)]
    if not numbers:
        return tree
    which, where, kind, negative = spoil
    chosen = numbers[which % len(numbers)]
    old = leaves[chosen]
    if isinstance(old, float):
        leaves[chosen] = -math.inf if negative else math.nan
    else:
        new = with_bad_number(np.asarray(old), where, kind, negative)
        leaves[chosen] = jnp.asarray(new) if isinstance(old, jax.Array) else new
        if isinstance(old, np.generic):
            leaves[chosen] = new[()]
    return jax.tree.unflatten(treedef, leaves)


# -- transformations ----------------------------------------------------------------------------


def calm(tree):
    """Return a tree of the same types in which every number is 1."""
    return jax.tree.map(jnp.ones_like, tree)


def both(tree):
    """Return `tree` and a calm one, stacked."""
    return jax.tree.map(lambda a, b: jnp.stack([jnp.asarray(a), b]), tree, calm(tree))


def first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def by_vmap(fun):
    return lambda tree: first(jax.jit(jax.vmap(fun))(both(tree)))


def by_scan(fun):
    return lambda tree: first(jax.lax.scan(lambda _, x: (None, fun(x)), None, both(tree))[1])


def by_jvp(fun):
    def run(tree):
        tree = jax.tree.map(jnp.asarray, tree)
        return jax.jit(lambda tree: jax.jvp(fun, (tree,), (calm(tree),))[0])(tree)

    return run


THROUGH = {
    "plain": lambda fun: fun,
    "jit": jax.jit,
    "vmap": by_vmap,
    "scan": by_scan,
    "remat": lambda fun: jax.jit(jax.checkpoint(fun)),
    "jvp": by_jvp,
}


def apply_through(name, fun, tree):
    """Return `fun(tree)`, with the numbers in `tree` as arguments of the transformed function.

    What no transformation of JAX takes, as strings, is closed over.
    """
    leaves, treedef = jax.tree.flatten(tree)
    chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, float) or has_numbers(leaf)]

    def of_numbers(numbers):
        filled = dict(enumerate(leaves)) | dict(zip(chosen, numbers, strict=True))
        return fun(jax.tree.unflatten(treedef, [filled[i] for i in range(len(leaves))]))

    if not chosen:
        return fun(tree)
    return THROUGH[name](of_numbers)([leaves[i] for i in chosen])


@pytest.fixture(params=[False, True], ids=["single", "double"])
def double(request):
    """Without and with float64."""
    jax.config.update("jax_enable_x64", request.param)
    yield request.param
    jax.config.update("jax_enable_x64", False)


# -- all_finite, unscale_and_check, nonfinite_report --------------------------------------------


def test_the_drawn_numbers_are_what_they_are_meant_to_be():
    """NumPy must say of each array that it is finite, and of each bad number that it is not."""
    for dtype in DTYPES:
        array = finite_array(dtype, (7,), 0)
        assert is_finite(array)
        part = part_dtype(dtype)
        magnitudes = np.abs(widened(as_bits(array).view(part)))
        info = ml_dtypes.finfo(part)
        for number in (0.0, info.smallest_subnormal, info.tiny, info.max):
            assert float(number) in magnitudes, (dtype, number)
        for kind in ("first", "second", "last"):
            for where in (0.0, 0.5, 1.0):
                bad = with_bad_number(array, where, kind, negative=True)
                assert not is_finite(bad)
                assert (as_bits(bad) != as_bits(array)).sum() == 1


@examples(8)
@given(
    data=st.data(),
    spoil=spoiling,
    through=st.sampled_from([*THROUGH]),
)
def test_all_finite_is_numpys_answer(double, data, spoil, through):
    large = data.draw(large_arrays(double=double))
    tree = [data.draw(any_tree(double=double)), large]
    arrays_of_numbers = sum(map(has_numbers, jax.tree.leaves(tree)))
    everywhere = [
        (i, where, *spoil[2:]) for i in range(arrays_of_numbers) for where in (0.0, spoil[1], 1.0)
    ]
    for each in [tree, *(spoiled(tree, one) for one in everywhere)]:
        flag = apply_through(through, ols.all_finite, each)
        assert (flag.shape, flag.dtype) == ((), jnp.bool_)
        assert bool(flag) == all(map(is_finite, jax.tree.leaves(each)))


def overwrites(path):
    return any(getattr(key, "key", None) == OVERWRITE for key in path)


def unscaled_by_numpy(path, leaf, factor):
    """Return what `unscale_and_check` must make of a leaf that holds numbers."""
    array = np.asarray(leaf, jnp.result_type(float) if isinstance(leaf, float) else None)
    if overwrites(path):
        return array
    if part_dtype(array.dtype).itemsize < 4:
        array = array.astype(np.float32)
    parts = array.reshape(-1).view(part_dtype(array.dtype))
    mantissa, exponent = math.frexp(factor)
    with np.errstate(all="ignore"):
        if mantissa == 0.5:  # a power of two: the exact quotient
            parts = np.ldexp(parts, 1 - exponent)
        else:
            parts = parts * (np.float32(1) / np.float32(factor)).astype(parts.dtype)
    return parts.view(array.dtype).reshape(array.shape)


def assert_same_numbers(actual, expected, given):
    """Compare bit for bit, but for what XLA:CPU flushes to zero and the signs of complex zeros."""
    actual = np.asarray(actual)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if not is_finite(expected):
        assert not is_finite(actual)
        return
    part = part_dtype(expected.dtype)
    if ml_dtypes.finfo(part).bits < 32:
        assert np.array_equal(bits(actual), bits(expected))
        return
    ours, right = (x.reshape(-1).view(part) for x in (actual, expected))
    given = np.asarray(given).astype(expected.dtype).reshape(-1).view(part)
    tiny = np.finfo(part).tiny
    flushed = ((np.abs(right) < tiny) | (np.abs(given) < tiny)) & (ours == 0)
    same = (ours == right) & ((np.signbit(ours) == np.signbit(right)) | (actual.dtype.kind == "c"))
    assert (same | flushed).all()


powers_of_two = st.integers(-126, 126).map(lambda k: 2.0**k)
factors = st.one_of(
    powers_of_two,
    powers_of_two,
    st.floats(2.0**-126, 2.0**126, width=32),
    st.floats(0.5, 2.0**17, width=32),
)


@examples(20)
@given(
    data=st.data(),
    spoil=st.none() | spoiling,
    factor=factors,
    through=st.sampled_from([*THROUGH]),
)
def test_unscaling_is_exact_and_its_check_is_numpys(double, data, spoil, factor, through):
    tree = data.draw(any_tree(double=double))
    if spoil is not None:
        tree = spoiled(tree, spoil)
    state = ols.init(factor)

    def numbers_unscaled(tree):
        # Strings and keys cannot leave a transformation; they are looked at below.
        unscaled, finite = ols.unscale_and_check(tree, state)
        return [x if has_numbers(x) else None for x in jax.tree.leaves(unscaled)], finite

    numbers, finite = apply_through(through, numbers_unscaled, tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    right = True
    for (path, leaf), ours in zip(leaves, numbers, strict=True):
        assert (ours is None) == (not has_numbers(leaf))
        if ours is not None:
            expected = unscaled_by_numpy(path, leaf, factor)
            assert_same_numbers(ours, expected, leaf)
            right = right and is_finite(leaf) and is_finite(expected)
    assert (finite.shape, finite.dtype) == ((), jnp.bool_)
    assert bool(finite) == right
    unscaled, _ = ols.unscale_and_check(tree, state)
    assert jax.tree.structure(unscaled) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(unscaled), strict=True):
        if not has_numbers(before) and not (hasattr(before, "size") and before.size == 0):
            assert after is before


@examples(20)
@given(
    tree=any_tree(),
    spoil=st.lists(spoiling, max_size=3),
    through=st.sampled_from(["plain", "jit"]),
)
def test_the_report_counts_what_numpy_counts(tree, spoil, through):
    tree = [functools.reduce(spoiled, spoil, tree), np.complex64(complex(np.nan, np.inf))]
    report = apply_through(through, ols.diagnostics.nonfinite_report, tree)
    counted = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, float) or getattr(getattr(leaf, "dtype", None), "name", "") in DTYPES
    }
    assert report.keys() == counted.keys()
    for name, array in counted.items():
        wide = widened(array)
        expected = (np.isnan(wide).sum(), (np.isinf(wide) & ~np.isnan(wide)).sum(), wide.size)
        assert tuple(map(int, report[name])) == expected, name


# -- tree_where ---------------------------------------------------------------------------------


@st.composite
def pairs_of_trees(draw):
    """Draw a tree, and another of the same structure, shapes, dtypes and other leaves."""
    tree = draw(any_tree())
    leaves, treedef = jax.tree.flatten(tree)

    def another(leaf):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.fold_in(leaf, 1) if leaf.ndim == 0 else leaf[::-1]
        if isinstance(leaf, (bool, int, float, str)) or leaf.dtype == jax.dtypes.float0:
            return leaf
        if leaf.dtype.name not in DTYPES:
            return np.asarray(leaf)[..., ::-1] if leaf.ndim else leaf - 1
        other = finite_array(leaf.dtype, leaf.shape, draw(st.integers(100, 199)))
        return spoiled([other], draw(spoiling))[0] if draw(st.booleans()) else other

    return tree, jax.tree.unflatten(treedef, map(another, leaves))


def assert_same_choice(actual, expected):
    """Compare bit for bit, but for which NaN it is where XLA:CPU selects in float32.

    It does so in bfloat16 and float8_e5m2 (jaxlib 0.10.2), and comes back with NaN of one kind.
    """

    def one_nan(leaf):
        if getattr(leaf, "dtype", None) not in (jnp.bfloat16, jnp.float8_e5m2):
            return leaf
        array = np.array(leaf)
        array[np.isnan(widened(array))] = np.nan
        return array

    assert_same_bits(jax.tree.map(one_nan, actual), jax.tree.map(one_nan, expected))


def without_strings(tree):
    """Return the tree with None for what no compiled function takes."""
    return jax.tree.map(
        lambda x: None if isinstance(x, str) or jnp.result_type(x) == jax.dtypes.float0 else x, tree
    )


@examples(30)
@given(pair=pairs_of_trees(), flag=st.booleans(), through=st.sampled_from(["plain", "jit"]))
def test_tree_where_takes_all_bits_of_one_tree(pair, flag, through):
    on_true, on_false = pair
    if through == "plain":
        chosen = ols.tree_where(flag, on_true, on_false)
    else:
        on_true, on_false = without_strings(on_true), without_strings(on_false)
        chosen = jax.jit(ols.tree_where)(flag, on_true, on_false)
    expected = on_true if flag else on_false
    assert jax.tree.structure(chosen) == jax.tree.structure(expected)
    for ours, right in zip(jax.tree.leaves(chosen), jax.tree.leaves(expected), strict=True):
        if isinstance(right, (bool, int, float, str)):
            assert ours == right
        elif right.dtype != jax.dtypes.float0:
            assert_same_choice(ours, right)


# -- the rule -----------------------------------------------------------------------------------

sizes = st.integers(1, 4)


@st.composite
def dynamic_policies(draw):
    low, start, high = sorted(draw(st.lists(factors, min_size=3, max_size=3)))
    return ols.DynamicLossScale(
        start,
        growth_interval=draw(sizes | st.just(2**31 - 1)),
        growth_factor=draw(st.just(2.0) | st.floats(1.001, 2.0**127)),
        backoff_factor=draw(st.just(0.5) | st.floats(2.0**-126, 0.999)),
        min_scale=low,
        max_scale=high,
        hysteresis=draw(sizes),
        consecutive_hysteresis=draw(st.booleans()),
        loss_patience=draw(sizes | st.just(2**31 - 1)),
    )


policies = st.one_of(
    dynamic_policies(),
    dynamic_policies(),
    st.builds(ols.FixedLossScale, factors, skip_nonfinite=st.booleans()),
)
counts = st.integers(0, 5) | st.sampled_from([2**31 - 2, 2**31 - 1])
# As restored from training under another policy.
other_states = st.builds(Reference, factors, counts, counts, counts, counts)
mostly = st.sampled_from([True, True, True, False])
flags = st.lists(st.tuples(mostly, mostly), min_size=4, max_size=12)


def from_reference(state):
    dtypes = [jnp.float32, *[jnp.int32] * 4]
    return ols.LossScaleState(*map(jnp.asarray, state, dtypes))


def step_of(policy):
    """Return the rule of a policy as the oracle has it."""
    hyper = {k: v for k, v in policy.get_config().items() if k != "class_name"}
    if isinstance(policy, ols.DynamicLossScale):
        return dynamic_step(**hyper)
    return fixed_step(skip_nonfinite=hyper["skip_nonfinite"])


def types(tree):
    """Return what must stay the same for a loop to compile once."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.shape, x.dtype, x.aval.weak_type) for x in leaves]


def run_plain(policy, state, flags):
    states = []
    for grads_finite, loss_finite in flags:
        after = ols.update(state, grads_finite, policy, loss_finite=loss_finite)
        assert types(after) == types(state)
        states.append(after)
        state = after
    return jax.tree.map(lambda *fields: np.stack(fields), *states)


def run_scan(policy, state, flags):
    def step(state, both):
        state = ols.update(state, both[0], policy, loss_finite=both[1])
        return state, state

    return jax.jit(lambda *args: jax.lax.scan(step, *args)[1])(state, jnp.asarray(flags))


def run_vmap(policy, state, flags):
    """Run beside a second state that sees the opposite."""
    states = jax.tree.map(lambda a, b: jnp.stack([a, b]), state, policy.init())
    flags = np.asarray(flags)
    return first(jax.vmap(functools.partial(run_scan, policy))(states, np.stack([flags, ~flags])))


RUNS = {"plain": run_plain, "scan": run_scan, "vmap": run_vmap}


@examples(25)
@given(
    policy=policies, restored=st.none() | other_states, flags=flags, run=st.sampled_from([*RUNS])
)
def test_every_policy_follows_the_written_rule_from_every_state(policy, restored, flags, run):
    start = policy.init() if restored is None else from_reference(restored)
    states = RUNS[run](policy, start, flags)
    ours = np.stack([np.asarray(field, np.float64) for field in states], axis=1)
    before = Reference(float(start.loss_scale), *map(int, start[1:]))
    np.testing.assert_array_equal(ours, trajectory(step_of(policy), before, flags))
    if isinstance(policy, ols.DynamicLossScale) and restored is None:
        assert (np.float32(policy.min_scale) <= states.loss_scale).all()
        assert (states.loss_scale <= np.float32(policy.max_scale)).all()


@examples(30)
@given(policy=policies, restored=other_states)
def test_the_metrics_say_what_the_state_says(policy, restored):
    state = from_reference(restored)
    for grads_finite in (None, False, True):
        if grads_finite is not None:
            state = policy.update(state, grads_finite)
        metrics = ols.diagnostics.metrics({"opt": [state, None]})
        assert bool(metrics.pop("grads_finite")) == (int(state.consecutive_skipped) == 0)
        assert metrics.keys() == {*state._fields} - {"overflow_count"}
        for name, value in metrics.items():
            assert_same_bits(value, getattr(state, name))


@examples(100)
@given(policy=policies)
def test_every_policy_goes_through_json(policy):
    config = json.loads(json.dumps(policy.get_config()))
    for again in (type(policy).from_config(config), ols.as_loss_scale(config)):
        assert again == policy
        assert hash(again) == hash(policy)
        assert_same_bits(again.init(), policy.init())


@examples(60)
@given(
    tree=trees(st.integers(0, 5)), path=st.lists(st.integers(0, 3), max_size=4), n=st.integers(0, 2)
)
def test_the_state_is_found_at_any_depth_and_only_alone(tree, path, n):
    nest = [
        lambda x: [x, tree],
        lambda x: {"inner": x, "other": tree},
        lambda x: Pair(tree, x),
        Layer,
    ]
    states = [ols.init(2.0**i) for i in range(n)]
    opt_state = {"at": [functools.reduce(lambda x, i: nest[i](x), path, s) for s in states]}
    if n == 1:
        assert_same_bits(ols.loss_scale_state(opt_state), states[0])
        return
    with pytest.raises(ValueError, match=f"exactly one LossScaleState, got {n} ") as error:
        ols.loss_scale_state(opt_state)
    assert all(f"['at'][{i}]" in str(error.value) for i in range(n))


# -- the loss -----------------------------------------------------------------------------------


def losses_of(dtypes):
    return trees(st.builds(finite_array, st.sampled_from(dtypes), st.sampled_from(SHAPES), sizes))


@examples(30)
@given(
    losses=losses_of(["bfloat16", "float32"]),
    factor=factors,
    through=st.sampled_from(["plain", "jit", "vmap", "remat"]),
)
def test_a_loss_is_multiplied_in_float32(losses, factor, through):
    state = ols.init(factor)
    scaled = apply_through(through, lambda losses: ols.scale_loss(losses, state), losses)
    assert jax.tree.structure(scaled) == jax.tree.structure(losses)
    for ours, loss in zip(jax.tree.leaves(scaled), jax.tree.leaves(losses), strict=True):
        with np.errstate(all="ignore"):
            expected = loss.astype(np.float32) * np.float32(factor)
        if is_finite(expected):
            assert_same_numbers(ours, np.asarray(expected), loss)
        else:
            np.testing.assert_array_equal(np.isinf(ours), np.isinf(expected))


def normal(dtype, shape, seed):
    """Return numbers of the size that parameters have."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def models(dtypes, *, shapes=((), (3,), (2, 2), (0,))):
    """Draw a tree of parameters."""
    leaf = st.builds(normal, st.sampled_from(dtypes), st.sampled_from(shapes), st.integers(0, 9))
    return trees(leaf, max_leaves=3).filter(jax.tree.leaves)


# `inject_hyperparams` refuses both types of sixteen bits at once.
mixed_models = models(["float32", "float16"]) | models(["float32", "bfloat16"])


def squares(params):
    """Return a loss for any tree; its gradient is the tree itself."""
    return sum(jnp.sum(p * p) for p in jax.tree.leaves(params)) / 2


@examples(20)
@given(
    params=models(["float32"]),
    exponent=st.integers(-30, 90),
    aux=st.booleans(),
    through=st.sampled_from(["plain", "jit", "vmap", "remat"]),
)
def test_the_value_is_the_functions_and_the_gradients_are_exact(params, exponent, aux, through):
    state = ols.init(2.0**exponent)

    def fun(params):
        value = squares(params)
        return (value, value + 1) if aux else value

    def ours(params):
        value, grads = ols.value_and_grad(fun, has_aux=aux)(state, params)
        return value, grads, ols.unscale_and_check(grads, state)

    def theirs(params):
        return jax.value_and_grad(fun, has_aux=aux)(params)

    value, grads, (unscaled, finite) = apply_through(through, ours, params)
    right, right_grads = apply_through(through, theirs, params)
    assert finite
    assert_same_bits(value, right)
    assert_same_bits(grads, jax.tree.map(lambda g: g * np.float32(2.0**exponent), right_grads))
    for (path, got), g, scaled in zip(
        jax.tree_util.tree_leaves_with_path(unscaled),
        jax.tree.leaves(right_grads),
        jax.tree.leaves(grads),
        strict=True,
    ):
        assert_same_bits(got, scaled if overwrites(path) else g)


# -- a step of an optimizer ---------------------------------------------------------------------

INNERS = {
    "sgd": lambda: optax.sgd(0.5, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "clipped adamw": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9))
    ),
    "accumulating": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "noisy": lambda: optax.chain(optax.add_noise(0.1, 0.5, 3), optax.trace(0.9)),
    "injected": lambda: optax.inject_hyperparams(optax.rmsprop)(0.1, momentum=0.5),
}
inners = st.sampled_from([*INNERS])


def unscaled_like_the_wrapper(grads, factor):
    """Return `grads * (1 / factor)` in float32, but for what overwrites."""
    reciprocal = 1 / factor
    return jax.tree_util.tree_map_with_path(
        lambda path, g: g if overwrites(path) else g.astype(jnp.float32) * reciprocal,
        grads,
    )


def gradients(params, factor, seed):
    """Return scaled gradients of the params' dtypes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape) * min(factor, 2.0**8), p.dtype), params
    )


def with_a_past(state, seed):
    """Return an optimizer's state in which every float is any finite one, or NaN."""

    def replace(leaf):
        if not has_numbers(leaf):
            return leaf
        array = finite_array(leaf.dtype, leaf.shape, seed)
        bad = with_bad_number(array, 1.0, "first" if seed % 2 else "last", negative=seed % 3 == 0)
        return jnp.asarray(bad)

    return jax.tree.map(replace, state)


@pytest.mark.integration  # Optax promotes
@examples(25)
@given(
    params=mixed_models,
    name=inners,
    policy=dynamic_policies(),
    spoil=spoiling,
    seed=st.integers(0, 9),
    bad_loss=st.booleans(),
    through=st.sampled_from(["plain", "plain", "jit", "remat"]),
)
def test_a_skipped_step_moves_no_bit(*, params, name, policy, spoil, seed, bad_loss, through):
    tx = ols.with_loss_scaling(INNERS[name](), policy)
    opt_state = tx.init(params)
    opt_state = opt_state._replace(inner_state=with_a_past(opt_state.inner_state, seed))
    grads = gradients(params, policy.initial_scale, seed)
    bad_grads = spoiled(grads, spoil)
    grads_finite = bad_grads is grads  # nothing to spoil
    loss = jnp.float32(np.nan) if bad_loss or grads_finite else jnp.float32(1)
    update = THROUGH[through](lambda g, s, p, value: tx.update(g, s, p, value=value))
    updates, after = update(bad_grads, opt_state, params, loss)
    assert_same_choice(after.inner_state, opt_state.inner_state)
    assert types(after) == types(opt_state)
    zeros = jax.tree.map(lambda u: np.full(u.shape, -0.0, u.dtype), updates)
    assert_same_bits(updates, zeros)
    assert_same_bits(optax.apply_updates(params, updates), params)
    expected = policy.update(
        opt_state.loss_scale_state, grads_finite, loss_finite=bool(np.isfinite(loss))
    )
    assert_same_bits(after.loss_scale_state, expected)


@pytest.mark.integration
@examples(18)
@given(
    params=mixed_models,
    name=inners,
    policy=policies,
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    through=st.sampled_from(["plain", "plain", "jit", "remat"]),
)
def test_a_good_step_is_the_inner_optimizers(params, name, policy, seeds, through):
    inner = INNERS[name]()
    tx = ols.with_loss_scaling(inner, policy)
    opt_state = tx.init(params)

    def plain(grads, state, params, factor):
        unscaled = unscaled_like_the_wrapper(grads, factor)
        updates, after = inner.update(unscaled, state, params)
        return updates, jax.tree.map(
            lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), after, state
        )

    ours, theirs = THROUGH[through](tx.update), THROUGH[through](plain)
    for seed in seeds:
        factor = opt_state.loss_scale_state.loss_scale
        grads = gradients(params, float(factor), seed)
        if not all(map(is_finite, jax.tree.leaves(unscaled_like_the_wrapper(grads, factor)))):
            return  # unscaled by a factor below 1 they overflow
        expected = theirs(grads, opt_state.inner_state, params, factor)
        updates, after = ours(grads, opt_state, params)
        # XLA:CPU may contract a product and a sum in one of two programs and not in the other
        # (jaxlib 0.10.2), which rounds alike only where the product is exact.
        exact = math.frexp(float(factor))[0] == 0.5 and name != "noisy"
        if through == "plain" or exact:
            assert_same_bits((updates, after.inner_state), expected)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected[0]), strict=True):
            eps = float(ml_dtypes.finfo(a.dtype).eps)
            wide_a, wide_b = widened(np.asarray(a)), widened(np.asarray(b))
            np.testing.assert_allclose(wide_a, wide_b, rtol=4 * eps, atol=4 * eps)
        assert types(after) == types(opt_state)
        state = policy.update(opt_state.loss_scale_state, grads_finite=True)
        assert_same_bits(after.loss_scale_state, state)
        params, opt_state = optax.apply_updates(params, updates), after


# -- many steps, and derivatives of a step ------------------------------------------------------

POLICY = ols.DynamicLossScale(2.0**10, growth_interval=2, hysteresis=2)


def make_step(tx):
    """Return a whole step whose gradients, or whose loss, a bad batch makes infinite or NaN."""

    def step(carry, batch):
        params, opt_state = carry
        grads_bad, loss_bad = batch

        def loss_fn(params):
            # Nothing by itself, and a gradient that overflows once it is scaled.
            steep = jnp.where(grads_bad, np.float32(1e38), np.float32(0))
            first_leaf = next(p for p in jax.tree.leaves(params) if p.size)
            spike = steep * (first_leaf - jax.lax.stop_gradient(first_leaf)).ravel()[0]
            return jnp.where(loss_bad, np.float32(np.nan), np.float32(1)) * (
                squares(params) + spike
            )

        loss, grads = ols.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), ols.diagnostics.metrics(opt_state)

    return step


def one_by_one(step, carry, batches):
    step, metrics = jax.jit(step), []
    for batch in zip(*batches, strict=True):
        carry, seen = step(carry, batch)
        metrics.append(seen)
    assert step._cache_size() == 1  # noqa: SLF001, the only way to ask
    return carry, jax.tree.map(lambda *xs: np.stack(xs), *metrics)


def donating(step, carry, batches):
    """Let every step overwrite the buffers that it is given, those of a fresh state, too."""
    donor, metrics = jax.jit(step, donate_argnums=0), []
    carry = jax.tree.map(jnp.copy, carry[0]), carry[1]
    for batch in zip(*batches, strict=True):
        given = jax.tree.leaves(carry)
        carry, seen = donor(carry, batch)
        assert all(array.is_deleted() for array in given if array.size)
        metrics.append(jax.device_get(seen))
    return carry, jax.tree.map(lambda *xs: np.stack(xs), *metrics)


def scanned(step, carry, batches):
    return jax.jit(lambda *args: jax.lax.scan(step, *args))(carry, batches)


def rematerialised(step, carry, batches):
    return scanned(jax.checkpoint(step), carry, batches)


def beside_another(step, carry, batches):
    """Map over two members, the second of which has other flags."""
    carries = jax.tree.map(lambda x: jnp.stack([x, x]), carry)
    others = jax.tree.map(lambda x: jnp.stack([x, ~x]), batches)
    return first(jax.vmap(functools.partial(scanned, step))(carries, others))


LOOPS = {
    "donating": donating,
    "scan": scanned,
    "remat": rematerialised,
    "vmap": beside_another,
}


@pytest.mark.integration
@examples(9)
@given(
    params=models(["float32"], shapes=((), (3,), (2, 2))),
    name=inners.filter(lambda name: name != "noisy"),
    flags=flags,
    loop=st.sampled_from([*LOOPS]),
)
def test_every_loop_takes_the_same_steps(params, name, flags, loop):
    tx = ols.with_loss_scaling(INNERS[name](), POLICY)
    step, start = make_step(tx), (params, tx.init(params))
    batches = tuple(jnp.asarray([not flag[i] for flag in flags]) for i in range(2))
    one = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(step, start, one)[0])
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), start)

    right, right_metrics = one_by_one(step, start, batches)
    after, metrics = LOOPS[loop](step, start, batches)
    assert types(after) == types(start) == types(right)
    assert_same_bits(after[1].loss_scale_state, right[1].loss_scale_state)
    assert_same_bits(jax.device_get(metrics), jax.device_get(right_metrics))
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(right), strict=True):
        if loop == "donating":  # the same program
            assert_same_bits(ours, theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    skipped = [not all(flag) for flag in flags]
    np.testing.assert_array_equal(right_metrics["grads_finite"], np.logical_not(skipped))
    np.testing.assert_array_equal(right_metrics["total_skipped"], np.cumsum(skipped))


SMOOTH = {
    "sgd": INNERS["sgd"],
    "adam": lambda: optax.adam(0.1, eps_root=1e-8),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5)),
}


@pytest.mark.integration
@examples(15)
@given(
    params=models(["float32"], shapes=((), (3,), (2, 2))),
    name=st.sampled_from([*SMOOTH]),
    exponent=st.integers(-8, 15),
    spoil=st.none() | spoiling,
    through=st.sampled_from(["plain", "jit"]),
)
def test_a_step_is_differentiated_as_the_inner_optimizers(params, name, exponent, spoil, through):
    """And a skipped one is the identity: nothing flows into its gradients, and no NaN comes out."""
    inner = SMOOTH[name]()
    tx = ols.with_loss_scaling(inner, ols.FixedLossScale(2.0**exponent))
    opt_state = tx.init(params)
    grads = gradients(params, 2.0**exponent, seed=1)
    if spoil is not None:
        grads = spoiled(grads, spoil)

    def after(params, grads):
        updates, _ = tx.update(grads, opt_state, params)
        return squares(optax.apply_updates(params, updates))

    def after_inner(params, grads):
        unscaled = unscaled_like_the_wrapper(grads, jnp.float32(2.0**exponent))
        updates, _ = inner.update(unscaled, opt_state.inner_state, params)
        return squares(optax.apply_updates(params, updates))

    ours = THROUGH[through](jax.grad(after, argnums=(0, 1)))(params, grads)
    if spoil is None:
        theirs = THROUGH[through](jax.grad(after_inner, argnums=(0, 1)))(params, grads)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.max(np.abs(b), initial=1))
    else:
        assert_same_bits(ours[0], params)
        assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(ours[1]))


@pytest.mark.integration
@pytest.mark.parametrize("weight", [1.0, 2e35], ids=["good", "skipped"])
@pytest.mark.parametrize("name", SMOOTH)
def test_a_whole_step_is_differentiated_twice(name, weight):
    """As in learning to learn: through the gradients of the loss, too.

    The second derivative of the scaled loss is finite here. Where that overflows as well, zero
    times infinity is NaN in the backward pass of the backward pass, which is not the wrapper's.
    """
    inner, params = SMOOTH[name](), jnp.array([1.0, -2.0, 3.0])
    tx = ols.with_loss_scaling(inner, POLICY)
    opt_state = tx.init(params)

    def loss_fn(params):
        return weight * squares(params)

    def after(params):
        loss, grads = ols.value_and_grad(loss_fn)(opt_state, params)
        updates, _ = tx.update(grads, opt_state, params, value=loss)
        return squares(optax.apply_updates(params, updates))

    def after_inner(params):
        updates, _ = inner.update(jax.grad(loss_fn)(params), opt_state.inner_state, params)
        return squares(optax.apply_updates(params, updates))

    ours = jax.jit(jax.grad(after))(params)
    if weight == 1:
        theirs = jax.jit(jax.grad(after_inner))(params)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(ours, params)
    else:  # the parameters stay, and so do their derivatives
        np.testing.assert_array_equal(ours, params)
