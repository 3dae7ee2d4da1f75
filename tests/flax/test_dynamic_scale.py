"""`optax_lossscale.flax.DynamicScale` against Flax's own class, which grows one step later.

`Theirs(growth_interval=N - 1)` and `Ours(growth_interval=N)` agree, apart from the differences
named at the end.
"""

import dataclasses
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from flax.training import dynamic_scale
from plain_where import assert_same_bits

import optax_lossscale.flax as ols_flax

pytestmark = pytest.mark.integration

Ours, Theirs = ols_flax.DynamicScale, dynamic_scale.DynamicScale
FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
FIELDS = [field.name for field in dataclasses.fields(Ours)]
NOT_DEFAULT = dict(zip(FIELDS, (4.0, 0.25, 7, 5, 12.0, 2.0), strict=True))


def pair(growth_interval=2000, scale=65536.0, **hyperparams):
    """Return both classes with array fields that should make them agree."""
    arrays = {"scale": jnp.float32(scale), "fin_steps": jnp.int32(0)}
    return (
        Ours(growth_interval=growth_interval, scale=scale, **hyperparams),
        Theirs(growth_interval=growth_interval - 1, **arrays, **hyperparams),
    )


def numbers(result):
    """Return what a step returns, without the classes of a library."""
    return result.dynamic_scale.scale, result.dynamic_scale.fin_steps, *result[1:]


def linear(w, x):
    return w * x


def in_float16(w, x, b):
    """A loss whose gradient overflows in float16 if the loss scale or x is large."""
    hidden = w["inner"].astype(jnp.float16) * x.astype(jnp.float16)
    return jnp.sum(hidden.astype(jnp.float32) * jnp.float32(0.01)) + w["outer"] * b


CASES = [
    ({"growth_interval": 1, "scale": 2.0**-3}, {"argnums": 1}),
    ({"growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}, {"argnums": (0,)}),
    ({"growth_interval": 2, "scale": 0.25, "minimum_scale": None}, {"has_aux": True}),
    ({"growth_interval": 3, "scale": 2.0, "minimum_scale": 16.0}, {"argnums": (2, 0)}),
]


def arguments(steps=300):
    """Return random arguments for some steps, one in six of which is bad at any loss scale."""
    rng = np.random.default_rng(1)
    w = {"inner": rng.normal(size=(steps, 3)), "outer": rng.normal(size=steps)}
    x, b = rng.normal(size=(steps, 3)), rng.normal(size=steps)
    for bad in (np.inf, -np.inf, np.nan):
        x[rng.random(steps) < 1 / 18, rng.integers(3)] = bad
    return jax.tree.map(jnp.float32, (w, x, b))


def run(fun, start, args, **options):
    # Not under one `jax.jit`: jaxlib 0.10 to 0.12 takes pytree dataclasses with equal fields for
    # equal, and its cache now and then runs the program of one class for the other.
    def step(ds, args):
        result = ds.value_and_grad(fun, **options)(*args)
        return result.dynamic_scale, result

    return jax.lax.scan(step, start, args)[1]


def step(ds, fun, *args):
    return jax.jit(lambda ds, *args: ds.value_and_grad(fun)(*args))(ds, *args)


def both(fun, *args, **rule):
    return [step(ds, fun, *args) for ds in pair(**rule)]


@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
@pytest.mark.slow
def test_values_gradients_aux_and_loss_scales_are_those_of_flax(rule, options):
    def with_aux(*args):
        return in_float16(*args), {"x": args[1] + 1, "count": jnp.int32(3)}

    fun = with_aux if "has_aux" in options else in_float16
    results = [run(fun, ds, arguments(), **options) for ds in pair(**rule)]
    assert_same_bits(*map(numbers, results))
    assert 50 < np.sum(np.asarray(results[0].finite)) < 295  # both kinds of steps
    assert len(set(np.asarray(results[0].dynamic_scale.scale).tolist())) >= 3


def test_replicas_average_and_agree_as_in_flax():
    # At the second step each replica is finite, but the sum of both is not.
    x = jnp.array([[1, FLOAT32_MAX, 1, 1, 2], [3, FLOAT32_MAX, jnp.inf, 1, 1]])
    ours, theirs = (
        jax.vmap(lambda x, d=ds: run(linear, d, (jnp.ones(5), x), axis_name="r"), axis_name="r")(x)
        for ds in pair(growth_interval=2, scale=1.0)
    )
    assert_same_bits(numbers(ours), numbers(theirs))
    assert ours.finite.tolist() == [[True, False, False, True, True]] * 2


def test_constructor_fields_and_results_are_those_of_flax():
    ours, theirs = (list(inspect.signature(cls).parameters.values()) for cls in (Ours, Theirs))
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]
    assert isinstance(Ours(), Theirs)
    assert [getattr(Ours(), p.name) for p in ours] == [getattr(Theirs(), p.name) for p in ours]
    given = tuple(NOT_DEFAULT.values())
    assert tuple(getattr(Ours(*given), p.name) for p in ours) == given
    assert hash(Ours()) == hash(Ours(scale=8.0))  # a static argument has a hash
    result = Ours().value_and_grad(lambda w, *, x: w * x)(2.0, x=3.0)
    assert (float(result.aux), float(result.grad)) == (6.0, 3.0)
    assert type(result) is dynamic_scale.DynamicScaleResult
    assert type(result.dynamic_scale) is Ours


# The deliberate differences.


def test_it_grows_on_the_interval_and_flax_one_step_later():
    # From a count beyond the interval, Flax never grows.
    for count, ours, theirs in ((0, [8, 8, 16, 16], [8, 8, 8, 16]), (2**16, [16, 16], [8, 8])):
        x = (jnp.ones(len(ours)), jnp.ones(len(ours)))
        for cls, expected in ((Ours, ours), (Theirs, theirs)):
            ds = cls(growth_interval=3, fin_steps=jnp.int32(count), scale=jnp.float32(8))
            assert run(linear, ds, x).dynamic_scale.scale.tolist() == expected


@pytest.mark.parametrize(
    "start",
    [
        *({}, {"scale": 1}, {"scale": jnp.asarray(1024.0)}, {"fin_steps": 2, "scale": 1}),
        *({"fin_steps": np.int32(3), "scale": np.float32(8)}, {"fin_steps": 0, "scale": 2}),
    ],
    ids=str,
)
def test_numbers_become_strongly_typed_arrays_and_compile_once(start):
    traces = []

    @jax.jit
    def step(ds):
        traces.append(1)
        return ds.value_and_grad(lambda w: w)(jnp.float32(1)).dynamic_scale

    ds = Ours(**start)
    assert (ds.fin_steps, ds.scale) == (start.get("fin_steps", 0), start.get("scale", 65536))
    for _ in range(3):
        leaves = jax.tree.leaves(ds)
        assert [(x.dtype, x.shape) for x in leaves] == [(jnp.int32, ()), (jnp.float32, ())]
        assert not any(getattr(x, "weak_type", False) for x in leaves)
        ds = step(ds)
    assert len(traces) == 1


def test_it_can_be_a_tree_of_axes_or_of_shapes():
    for axes in ((0, 0), (0, 1), (-1, 1), (0, None), (True, True)):
        ds = Ours(fin_steps=axes[0], scale=axes[1])
        assert (ds.fin_steps, ds.scale) == axes
        assert not isinstance(ds.fin_steps, jax.Array)
    # If they are numbers after all, it works.
    after = step(Ours(fin_steps=0, scale=1), lambda w: w, 1.0).dynamic_scale
    assert (after.fin_steps, after.scale.dtype) == (1, jnp.float32)

    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), Ours(scale=8.0))
    axes = jax.tree.map(lambda _: 0, stacked)
    after = lambda ds, w: ds.value_and_grad(lambda w: w)(w).dynamic_scale  # noqa: E731
    mapped = jax.vmap(after, (axes, None), out_axes=axes)
    assert jax.jit(mapped)(stacked, 1.0).scale.tolist() == [8, 16]
    shapes = jax.eval_shape(Ours)
    assert [type(leaf) for leaf in jax.tree.leaves(shapes)] == [jax.ShapeDtypeStruct] * 2


@pytest.mark.usefixtures("x64")
def test_float64_gradients_keep_their_type_and_in_flax_do_not():
    assert [x.dtype for x in jax.tree.leaves(Ours(scale=1024.0))] == [jnp.int32, jnp.float32]
    ours, theirs = both(lambda w: jnp.sum(w**3), jnp.array([1 / 3], jnp.float64), scale=1024.0)
    assert (ours.dynamic_scale.scale.dtype, ours.grad.dtype) == (jnp.float32, jnp.float64)
    assert theirs.grad.dtype == jnp.float32
    np.testing.assert_allclose(ours.grad, 1 / 3, rtol=1e-15)


def test_the_loss_scale_stays_within_bounds_and_in_flax_grows_to_the_largest_float32():
    args = (jnp.ones(7), jnp.zeros(7))
    ours, theirs = (
        run(linear, ds, args).dynamic_scale.scale.tolist()
        for ds in pair(growth_interval=1, scale=FLOAT32_MAX / 8)
    )
    assert (max(ours), max(theirs)) == (2.0**126, FLOAT32_MAX)

    def backed_off(minimum):
        ds = Ours(scale=2.0**-125, backoff_factor=0.25, minimum_scale=minimum)
        return ds.value_and_grad(lambda w: w * jnp.inf)(1.0).dynamic_scale.scale

    floors = jnp.array([0.0, 1e-40, 2.0**-126, 2.0**-125, 2.0**127])
    expected = [2.0**-126, 2.0**-126, 2.0**-126, 2.0**-125, 2.0**126]
    assert jax.jit(jax.vmap(backed_off))(floors).tolist() == expected
    assert float(backed_off(None)) == 2.0**-126


def test_a_loss_scale_out_of_bounds_becomes_the_bound_and_gradients_are_true():
    for given, bound in (
        ({"growth_factor": np.inf, "growth_interval": 0}, 2.0**126),
        # Loss scales that Flax saved.
        *(({"scale": jnp.float32(x)}, 2.0**126) for x in (FLOAT32_MAX, np.inf)),
        ({"scale": jnp.float32(0)}, 2.0**-126),
    ):
        result = step(Ours(**given), lambda w: w * 2, 0.0)
        assert (float(result.grad), float(result.dynamic_scale.scale)) == (2, bound)


def test_the_loss_is_returned_as_it_is_and_in_flax_overflows_or_becomes_float32():
    ours, theirs = both(lambda w: w + 1e38, 1.0)
    assert (float(ours.aux), float(theirs.aux)) == (np.float32(1e38), np.inf)
    assert ours.finite & theirs.finite
    with pytest.warns(UserWarning, match="The loss is float16"):
        ours, theirs = both(lambda w: w.astype(jnp.float16) ** 2, 1.0, scale=128.0)
    assert (ours.aux.dtype, theirs.aux.dtype) == (jnp.float16, jnp.float32)
    assert_same_bits(ours.grad, theirs.grad)


def test_fp8_metadata_are_not_divided_and_in_flax_are():
    owg = "_overwrite_with_gradient"
    params = {"params": jnp.float32(3), owg: jnp.float32(0)}
    results = both(lambda p: p["params"] ** 2 + 3 * p[owg], params, scale=8.0)
    assert [r.grad for r in results] == [{"params": 6, owg: 3 * 8}, {"params": 6, owg: 3}]


def test_it_can_be_donated():
    first, other = Ours(), Ours()
    jax.jit(lambda ds: ds.value_and_grad(lambda w: w)(1.0).dynamic_scale, donate_argnums=0)(first)
    assert first.scale.is_deleted()
    assert not other.fin_steps.is_deleted()


def test_every_field_survives():
    before, theirs = Ours(**NOT_DEFAULT), Theirs(**NOT_DEFAULT)
    empty = Ours(**NOT_DEFAULT | {"fin_steps": 0, "scale": 1.0})
    for after in (
        pickle.loads(pickle.dumps(before)),  # noqa: S301, our own
        serialization.from_bytes(empty, serialization.to_bytes(before)),
        serialization.from_state_dict(empty, serialization.to_state_dict(theirs)),
    ):
        assert {field: getattr(after, field) for field in FIELDS} == NOT_DEFAULT
        assert_same_bits(after, before)


# What public programs do with it.


def loss_fn(w):
    return jnp.sum(w.astype(jnp.float16).astype(jnp.float32) ** 2)


def numbers_of_step(ds, w=1.0, fun=loss_fn, **options):
    return numbers(ds.value_and_grad(fun, **options)(jnp.full(2, w)))


USES = {
    "a static argument": lambda lib: [
        jax.jit(numbers_of_step, static_argnums=0)(lib.DynamicScale(scale=scale))
        for scale in (8.0, 8.0, 2.0**20)
    ],
    "a traced minimum": lambda lib: jax.jit(
        lambda m: numbers_of_step(lib.DynamicScale(scale=2.0**20, minimum_scale=m))
    )(2.0**19.5),
    "traced intervals": lambda lib: jax.vmap(
        lambda n: numbers_of_step(lib.DynamicScale(scale=8.0, growth_interval=n))
    )(jnp.array([-7, 0, 2])),
    "as NumPy arrays": lambda lib: numbers_of_step(jax.tree.map(np.array, lib.DynamicScale())),
    "compared": lambda lib: [lib.DynamicScale() == lib.DynamicScale(scale=s) for s in (2.0, 2**16)],
    "a float16 gradient": lambda lib: numbers_of_step(
        lib.DynamicScale(scale=8.0), jnp.float16(1), fun=lambda w: jnp.sum(w.astype(jnp.float32))
    ),
    "aux in a list": lambda lib: numbers_of_step(
        lib.DynamicScale(), fun=lambda w: [jnp.sum(w), 1], has_aux=True
    ),
    "aux and more": lambda lib: numbers_of_step(
        lib.DynamicScale(), fun=lambda w: (jnp.sum(w), 1, "more"), has_aux=True
    ),
}


# Hyper-parameters that Flax takes, each on a step that is finite and on one that is not.
HYPERPARAMS = [
    {"minimum_scale": jnp.finfo("float16").tiny},
    *({"minimum_scale": cast(2**19.5)} for cast in (jnp.bfloat16, np.float64)),
    *({"minimum_scale": minimum} for minimum in (1, None)),
    {"growth_factor": 1.0, "backoff_factor": 1.0},
    {"growth_factor": np.float64(1.7), "growth_interval": 0},
    {"backoff_factor": jnp.float32(0.3)},
    *({"growth_interval": n} for n in (0, -1, np.int64(2**40), 2000.0, float("inf"))),
]
# In Flax, a Python float would take the dtype of `minimum_scale`, such as float16.
USES |= {
    str(hyperparams): lambda lib, hyperparams=hyperparams: [
        numbers_of_step(lib.DynamicScale(scale=jnp.float32(scale), **hyperparams))
        for scale in (8, 2**20)
    ]
    for hyperparams in HYPERPARAMS
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_use_of_flaxs_module_gives_the_same_with_ours(use):
    actual, expected = (jax.device_get(USES[use](lib)) for lib in (ols_flax, dynamic_scale))
    np.testing.assert_equal(actual, expected)
    assert jax.tree.map(np.result_type, actual) == jax.tree.map(np.result_type, expected)
