"""What holds for every number of any pytree at any loss scale, tested on random ones.

Trees have leaves and containers of every kind. Their numbers are drawn as bits and include
subnormal numbers, negative zeros, the largest finite numbers, and NaN with any payload. NumPy is
the oracle. Each tree is compiled once and then filled with many numbers.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from leaves import not_numbers
from plain_where import bits

import optax_lossscale as ols

# The bits of infinity. The bits of NaN are a larger number.
NOT_FINITE = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
    "float8_e4m3fn": 0x7F,  # which has no infinity
    "float8_e5m2": 0x7C,
}
PARTS = {"complex64": "float32", "complex128": "float64"}
DTYPES = [*NOT_FINITE, *PARTS]
# `LARGE` arrays are checked in groups on XLA:CPU: along each axis, or without groups.
LARGE = [(2**16,), (2**16 + 1,), (256, 257), (257, 256), (3, 256, 128)]


def part_dtype(dtype):
    return np.dtype(PARTS.get(str(dtype), dtype))


def as_bits(array):
    """Return the same memory as unsigned integers, one for each real number."""
    part = part_dtype(array.dtype)
    return array.reshape(-1).view(part).view(f"u{part.itemsize}")


def finite_array(dtype, shape, rng):
    """Return an array of finite numbers, extreme ones first."""
    part = part_dtype(dtype)
    array = np.zeros(shape, dtype)
    words = as_bits(array)
    limit, sign = NOT_FINITE[part.name], 1 << (8 * part.itemsize - 1)
    words[:] = rng.integers(0, limit, words.size, dtype=words.dtype)
    smallest_normal = 1 << ml_dtypes.finfo(part).nmant
    extreme = np.array([limit - 1, 0, 1, smallest_normal - 1, smallest_normal], words.dtype)
    words[:5] = rng.permutation(extreme)[: words.size]
    words |= rng.integers(0, 2, words.size, dtype=words.dtype) * words.dtype.type(sign)
    return array


def with_bad_number(array, where, rng, negative):
    """Return a copy with NaN or infinity at the fraction `where` of its elements."""
    array = np.array(array)
    part = part_dtype(array.dtype)
    words = as_bits(array)
    limit, sign = NOT_FINITE[part.name], 1 << (8 * part.itemsize - 1)
    magnitude = int(rng.choice([limit, min(limit + 1, sign - 1), sign - 1]))
    words[int(where * (words.size - 1))] = magnitude | (sign if negative else 0)
    return array


def is_finite(array):
    """Look in double precision, which NumPy fully supports."""
    with np.errstate(invalid="ignore"):  # NumPy warns about some NaNs
        wide = np.asarray(array).astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return bool(np.isfinite(wide).all())


OVERWRITE = "_overwrite_with_gradient"


def draw_tree(rng):
    """Draw a tree of every kind of leaf and container."""

    def draw(dtype, shapes):
        return finite_array(dtype, shapes[rng.integers(len(shapes))], rng)

    each = [draw(dtype, [(3,), (2, 3)]) for dtype in rng.permutation(DTYPES)]
    small = [draw(dtype, [(), (0,), (2, 0)]) for dtype in DTYPES]
    return {
        "each": (each[::2], tuple(map(jnp.asarray, each[1::2]))),
        "large": draw(rng.choice(DTYPES), LARGE),
        "others": [*not_numbers().values(), None, 1.5, {}, small],
        OVERWRITE: {"w": draw(rng.choice(DTYPES), [(3,)])},
    }


def has_numbers(leaf):
    return isinstance(leaf, float) or (
        isinstance(leaf, (jax.Array, np.ndarray)) and leaf.dtype.name in DTYPES and leaf.size > 0
    )


def split(tree):
    """Return the numbers in `tree` by key path, and a function that replaces them.

    Leaves that JAX transformations reject, such as strings, are excluded.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    numbers = {path: np.asarray(leaf) for path, leaf in leaves if has_numbers(leaf)}

    def join(others):
        given = dict(zip(numbers, others, strict=True))
        return treedef.unflatten([given.get(path, leaf) for path, leaf in leaves])

    return numbers, join


def beside_another(transform):
    """Return the first result of a batch of two, whose second element is finite."""

    def through(fun):
        def run(args):
            both = jax.tree.map(lambda a: jnp.stack([a, jnp.ones_like(a)]), args)
            return jax.tree.map(lambda leaf: leaf[0], transform(fun)(both))

        return jax.jit(run)

    return through


THROUGH = {
    "jit": jax.jit,
    "vmap": beside_another(jax.vmap),
    "scan": beside_another(
        lambda fun: lambda both: jax.lax.scan(lambda _, x: (None, fun(x)), None, both)[1]
    ),
    "jvp": lambda fun: jax.jit(lambda args: jax.jvp(fun, (args,), (args,))[0]),
}


def promoted(array):
    return array.astype(np.float32) if part_dtype(array.dtype).itemsize < 4 else array


def unscaled_by_numpy(array, loss_scale):
    """Return the expected result of `unscale_and_check` for an array of numbers."""
    array = promoted(array)
    parts = array.reshape(-1).view(part_dtype(array.dtype))
    with np.errstate(all="ignore"):
        parts = parts * (np.float32(1) / np.float32(loss_scale)).astype(parts.dtype)
    return parts.view(array.dtype).reshape(array.shape)


def assert_same_numbers(actual, expected, given):
    """Compare bits, except numbers that XLA:CPU flushes to zero and signs of complex zeros."""
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
    given = given.astype(expected.dtype).reshape(-1).view(part)
    tiny = np.finfo(part).tiny
    flushed = ((np.abs(right) < tiny) | (np.abs(given) < tiny)) & (ours == 0)
    same = (ours == right) & ((np.signbit(ours) == np.signbit(right)) | (actual.dtype.kind == "c"))
    assert (same | flushed).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:The loss is float16")
@pytest.mark.parametrize(
    ("seed", "through"),
    [
        pytest.param(seed, name, marks=pytest.mark.exhaustive if seed else pytest.mark.slow)
        for seed in range(10)
        for name in THROUGH
    ],
)
def test_every_number_of_any_tree_is_treated_as_numpy_says(seed, through):
    rng = np.random.default_rng(seed)
    numbers, join = split(draw_tree(rng))

    def everything(args):
        loss_scale, others = args
        state = ols.init(1)._replace(loss_scale=loss_scale)
        filled = join(others)
        unscaled, finite = ols.unscale_and_check(filled, state)
        assert jax.tree.structure(unscaled) == jax.tree.structure(filled)
        return (
            ols.all_finite(filled),
            finite,
            list(filter(has_numbers, jax.tree.leaves(unscaled))),
            ols.scale_loss([x for x in others if not jnp.iscomplexobj(x)], state),
        )

    run = THROUGH[through](everything)
    bad = [  # each array in turn, at its ends and in between
        (path, where, negative)
        for path in numbers
        for where, negative in ((0.0, False), (rng.random(), True), (1.0, False))
    ]
    for spoil in [(), (), *bad]:
        power = 2.0 ** rng.integers(-126, 127)
        scale = rng.choice([power, rng.uniform(0.5, 2.0**17), power * 0.7 + 2.0**-126])
        current, scale = dict(numbers), np.float32(scale)
        if spoil:
            path, where, negative = spoil
            current[path] = with_bad_number(numbers[path], where, rng, negative)
        others = list(current.values())
        all_finite, finite, unscaled, scaled = run((scale, others))
        for flag in (all_finite, finite):
            assert (flag.shape, flag.dtype) == ((), jnp.bool_)
        assert bool(all_finite) == all(map(is_finite, others))
        right = [
            array if OVERWRITE in jax.tree_util.keystr(path) else unscaled_by_numpy(array, scale)
            for path, array in current.items()
        ]
        assert bool(finite) == all(map(is_finite, [*others, *right]))
        for ours, expected, array in zip(unscaled, right, others, strict=True):
            assert_same_numbers(ours, expected, array)
        real = [array for array in others if array.dtype.kind != "c"]
        for ours, array in zip(scaled, real, strict=True):
            with np.errstate(all="ignore"):
                expected = promoted(array) * promoted(array).dtype.type(scale)
            assert_same_numbers(ours, expected, array)
