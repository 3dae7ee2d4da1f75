"""Float32 masters: after every step the parameters are those of the float32 run, rounded."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import compiled_step, nbytes
from flax import nnx, serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS, UNFUSED, tiers
from plain_where import assert_same_bits

import optax_lossscale as ols

pytestmark = pytest.mark.integration

each_half = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
each_kind = pytest.mark.parametrize("remainders", [False, True])
MASTERS, CLIP = ols.with_master_weights(optax.sgd(0.1)), optax.clip(1.0)
KINDS = ["adamw", "lookahead"]
# All whose parameters are real.
EVERY = [each for each in tiers(KINDS) if each.values != ("contrib.split_real_and_imaginary",)]


def rounded_away(single):
    """Return the nearest bfloat16s of float32s, away from zero if two are as near."""
    words = (np.asarray(single).view(np.uint32) + 2**15) >> 16
    return jnp.asarray(words.astype(np.uint16).view(jnp.bfloat16.dtype))


def step_of(optimizer, tx):
    @functools.partial(jax.jit, compiler_options=UNFUSED)
    def step(params, state, grads, number):
        wide = ols.cast(grads, jnp.float32)
        extra = optimizer.extra_args(number, value=1.0 + number, grad=wide)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def float32_run(optimizer):
    """Return the optimizer, its step, and its gradients, compiled once for all dtypes."""
    plain = optimizer.plain()
    return plain, step_of(optimizer, plain), jax.jit(optimizer.grads)


@pytest.mark.parametrize(
    ("dtype", "remainders"), [("float16", False), ("bfloat16", False), ("bfloat16", True)]
)
@pytest.mark.parametrize("name", EVERY)
def test_parameters_are_those_of_the_float32_run_rounded(name, dtype, remainders):
    optimizer = OPTIMIZERS[name]
    rounded = rounded_away if remainders else lambda single: single.astype(dtype)
    plain, plain_step, gradients = float32_run(optimizer)
    tx = ols.with_master_weights(optimizer.make(), remainders=remainders)
    step = step_of(optimizer, tx)
    half = ols.cast(optimizer.params(), dtype)
    single = ols.cast(half, jnp.float32)
    half_state, single_state = tx.init(half), plain.init(single)
    for number in range(5):
        grads = ols.cast(gradients(single, number), dtype)
        wide = ols.cast(grads, jnp.float32)
        single, single_state = plain_step(single, single_state, wide, number)
        if dtype == "float16" and any(jnp.abs(x).max() > 65504 for x in jax.tree.leaves(single)):
            assert name == "scale_by_param_block_norm"  # which grows without limit
            return
        half, half_state = step(half, half_state, grads, number)
        assert_same_bits(half, jax.tree.map(rounded, single))
        jax.tree.map(np.testing.assert_array_equal, ols.master_weights(half_state, half), single)
    assert_same_bits(half_state.inner_state, single_state)


NUMBERS = [0.0, -0.0, 1e-9, -1e-9, 6e-8, -6e-8, 1.0, -1.0, 0.3333, 65504.0, -7e4, 3e38, np.inf]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_float16_master_stays_within_the_range_of_float16(sign):
    tx = ols.with_master_weights(optax.identity())
    param = jnp.float16(sign * 60000)
    updates, state = tx.update(jnp.float32(sign * 7e4), tx.init(param), param)
    assert optax.apply_updates(param, updates) == state.master_weights == sign * 65504


@pytest.mark.slow
@each_kind
@each_half
def test_every_number_is_reached_from_every_other_of_like_size(dtype, remainders):
    random = np.random.default_rng(0)
    numbers = np.float32(random.normal(size=3000) * 10.0 ** random.integers(-8, 5, 3000))
    targets = np.float32(np.r_[np.repeat(NUMBERS, len(NUMBERS)), numbers])
    others = np.r_[np.tile(NUMBERS, len(NUMBERS)), numbers * random.uniform(-2, 2000, 3000)]
    params = jnp.asarray(others, jnp.float32).astype(dtype)
    tx = ols.with_master_weights(optax.identity(), remainders=remainders)
    moves = targets - params.astype(jnp.float32)
    # What one addition in float32 gives, and the range of float16.
    masters = params.astype(jnp.float32) + moves
    if dtype == "float16":
        masters = jnp.where(jnp.isinf(masters), masters, jnp.clip(masters, -65504, 65504))
    updates, state = jax.jit(tx.update)(moves, tx.init(params), params)
    reached = optax.apply_updates(params, updates)
    wanted = masters.astype(dtype)
    if remainders and dtype == "bfloat16":
        wanted = rounded_away(masters)
    tiny = jnp.abs(wanted) < jnp.abs(params) / 4096  # see the documentation
    tiny = tiny | jnp.isinf(params)  # from which no addition leads away
    np.testing.assert_array_equal(reached[~tiny], wanted[~tiny])
    assert_same_bits(ols.master_weights(state, reached)[~tiny], masters[~tiny])
    assert not jnp.isnan(reached).any()
    # Negative zero is the sum of two negative zeros, and of no other two numbers.
    may_be = (masters != 0) | ~jnp.signbit(masters) | ((params == 0) & jnp.signbit(params))
    signed = ~tiny & may_be
    np.testing.assert_array_equal(jnp.signbit(reached)[signed], jnp.signbit(wanted)[signed])
    assert jnp.mean(tiny) < 0.25
    # Where it is not reached, the next step starts from what the parameter became, which is near.
    again = ols.master_weights(state, reached).astype(jnp.float32)
    is_finite = jnp.isfinite(again) & jnp.isfinite(masters)
    off = jnp.abs(jnp.where(is_finite, again - masters, 0))
    assert (off <= jnp.abs(params.astype(jnp.float32)) * 2.0**-23)[is_finite].all()


@pytest.mark.slow
@pytest.mark.parametrize("sign", [0, 2**31])
def test_parameter_and_remainder_are_the_master_for_every_upper_half(sign):
    # float32 words: every upper half with one sign, and lower halves that are 0, the least, the
    # greatest, about half, and random. XLA flushes subnormal numbers, and NaN is NaN.
    random = np.random.default_rng(1).integers(2**16, size=10)
    lower = np.r_[0, 1, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, random]
    words = sign + (np.arange(2**15)[:, None] << 16) + lower
    singles = words.astype(np.uint32).view(np.float32)
    normal = np.isnan(singles) | np.isinf(singles) | (np.abs(singles) >= 2.0**-126) | (singles == 0)
    singles = singles[normal]
    tx = ols.with_master_weights(optax.identity(), remainders=True)
    params = jnp.full(singles.shape, -0.0, jnp.bfloat16)
    updates, state = jax.jit(tx.update)(singles, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert (params.dtype, state.master_weights.dtype) == (jnp.bfloat16, jnp.int16)
    is_nan = np.isnan(singles)
    assert np.isnan(params[is_nan]).all()
    found = ols.master_weights(state, params)
    assert np.isnan(found[is_nan]).all()
    assert_same_bits(found[~is_nan], jnp.asarray(singles[~is_nan]))
    # A positive zero, which is the sum of a negative and a positive one, has no sign to show.
    assert_same_bits(params[~is_nan], rounded_away(singles[~is_nan]))


def test_a_float32_splits_into_halves_and_back_exactly():
    # Subnormal numbers too, whose halves no arithmetic may touch.
    random = np.random.default_rng(2).integers(2**32, size=2**18)
    words = np.r_[random, np.arange(2**16), 2**31 + np.arange(2**16)].astype(np.uint32)
    words = words[~np.isnan(words.view(np.float32))]
    lower = words.astype(np.int16)
    upper = ((words - lower.astype(np.int32).view(np.uint32)) >> 16).astype(np.uint16)
    state = ols.MasterWeightsState(jnp.asarray(lower), optax.EmptyState())
    found = jax.jit(ols.master_weights)(state, jnp.asarray(upper.view(jnp.bfloat16.dtype)))
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), words)


@pytest.mark.slow
@each_kind
@each_half
def test_masters_follow_parameters_that_were_replaced(dtype, remainders):
    tx = ols.with_loss_scaling(ols.with_master_weights(optax.sgd(1.0), remainders=remainders), 8.0)
    start = jnp.array([0.3, -2.0, 1e-3, 5.0, -0.0, 0.0, 1.0], dtype)
    loaded = jnp.array([7.0, 0.0, -0.0, float(jnp.finfo(dtype).max), 3e-5, 2.0, np.inf], dtype)
    state = tx.init({"w": start})
    step = jax.jit(lambda g, s, p: tx.update({"w": g * 8}, s, {"w": p}))
    small = jnp.full(7, 1e-3, dtype)
    updates, state = step(small, state, start)  # leaves remainders
    before = ols.master_weights(state, {"w": loaded})["w"]
    updates, state = step(small, state, loaded)
    params = optax.apply_updates(loaded, updates["w"])
    np.testing.assert_array_equal(before.astype(dtype), loaded)
    expected = before - small.astype(jnp.float32)
    np.testing.assert_allclose(ols.master_weights(state, {"w": params})["w"], expected, rtol=1e-6)
    # A replaced parameter has no remainder but noise below its own rounding.
    exact = loaded.astype(jnp.float32)
    half_an_ulp = jnp.where(jnp.isinf(exact), 0, jnp.abs(exact) * float(jnp.finfo(dtype).eps) / 2)
    assert (jnp.abs(jnp.where(jnp.isinf(exact), 0, before - exact)) <= half_an_ulp).all()
    assert remainders or bool((before == exact).all())


def test_masters_at_the_edges():
    def found(params, kept, *, remainders):
        tx = ols.with_master_weights(optax.identity(), remainders=remainders)
        return ols.master_weights(tx.init(params)._replace(master_weights=kept), params)

    # A zero of the other sign has the same master.
    zeros, kept = jnp.zeros(2, jnp.float16), jnp.array([1e-9, -1e-9])
    for params in (zeros, -zeros):
        assert_same_bits(found(params, kept, remainders=False), kept)
    # A replaced parameter leaves no number that no remainder makes.
    params = jnp.array([jnp.inf, -jnp.inf, jnp.inf, 0, -0.0, 0, 1], jnp.bfloat16)
    kept = jnp.array([1, 2**15 - 1, -1, -1, -(2**15), 1, -1], jnp.int16)
    least_below_one = np.nextafter(np.float32(1), np.float32(0))
    expected = [np.inf, -np.inf, jnp.finfo(jnp.float32).max, 0, -0.0, 2.0**-149, least_below_one]
    assert_same_bits(found(params, kept, remainders=True), jnp.array(expected, jnp.float32))


@each_kind
@each_half
def test_no_cast_is_taken_straight_back(dtype, remainders):
    # XLA:GPU drops such a pair, and the parameters would not be the rounded masters.
    tx = ols.with_master_weights(optax.sgd(0.1), remainders=remainders)
    param = jnp.ones(4, dtype)
    jaxpr = jax.make_jaxpr(tx.update)(param, tx.init(param), param)
    casts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type"]
    rounded = {eqn.outvars[0] for eqn in casts if eqn.invars[0].aval.dtype == jnp.float32}
    assert bool(rounded) != (remainders and dtype == "bfloat16")
    assert not rounded & {eqn.invars[0] for eqn in casts}


@pytest.mark.needs_xla
@pytest.mark.usefixtures("optimized")
@pytest.mark.slow
def test_a_donated_step_copies_nothing():
    shapes = [jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)] * 3
    masters = ols.with_master_weights(optax.adamw(1e-3))
    scaling = ols.with_loss_scaling(masters, skip_if=lambda *_: False)
    # XLA:CPU writes gradients that are unscaled in bfloat16, and a mask of a sixteenth of them.
    for tx, gradients in ((masters, 0), (scaling, 0), (ols.with_skipping(masters), 1)):
        memory = compiled_step(tx, shapes).memory_analysis()
        assert memory.temp_size_in_bytes <= (0.04 + gradients) * nbytes(shapes)
        in_place = nbytes((shapes, jax.eval_shape(tx.init, shapes)))
        assert memory.alias_size_in_bytes >= 0.99 * in_place


@each_kind
def test_masters_are_sharded_like_the_parameters(remainders):
    sharding = NamedSharding(jax.sharding.Mesh(jax.devices()[:4], ("data",)), P("data"))
    params = jax.device_put(jnp.ones((8, 4), jnp.bfloat16), sharding)
    tx = ols.with_master_weights(optax.sgd(0.1), remainders=remainders)
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    for array in (state.master_weights, after.master_weights, updates):
        assert array.sharding.is_equivalent_to(sharding, 2)


@pytest.mark.parametrize("guard", [ols.with_loss_scaling, ols.with_skipping])
@pytest.mark.parametrize(
    ("dtypes", "least"), [("float16", 4096), ("bfloat16", 512), ("bfloat16 and float16", 512)]
)
def test_half_precision_parameters_without_masters_are_warned_of_once(guard, dtypes, least):
    first, last = dtypes.split()[0], dtypes.split()[-1]
    params = {"w": jnp.ones(3, first), "b": jnp.ones(2, last), "s": jnp.ones(2)}
    match = rf"are {dtypes}, and no float32 master .* below 1/{least} of .*`with_master_weights"
    with pytest.warns(UserWarning, match=match) as caught:
        guard(optax.sgd(0.1)).init(params)
    assert [warning.filename for warning in caught] == [__file__]
    # Less than that is lost.
    assert jnp.nextafter(params["w"], jnp.zeros_like(params["w"]))[0] == 1 - 2 / least
    mask = {"w": True, "b": False, "s": False}
    for inner in (MASTERS, optax.masked(MASTERS, mask)):
        guard(inner).init(params)
    guard(optax.sgd(0.1)).init(ols.cast(params, jnp.float32))


@pytest.mark.filterwarnings("ignore:`params` are bfloat16")
def test_numbers_injected_in_half_precision_are_warned_of_inside_of_others():
    def inner(rate):
        return optax.inject_hyperparams(optax.adam)(rate)

    around = optax.inject_hyperparams(inner, hyperparam_dtype=jnp.float32)(0.1)
    with pytest.warns(UserWarning, match="`inject_hyperparams` keeps numbers in bfloat16"):
        ols.with_skipping(around).init(jnp.ones(2, jnp.bfloat16))


@each_kind
@pytest.mark.parametrize(
    "mask",
    [{"base": False, "head": True}, {"base": {"w": False}, "head": {"w": True, "b": True}}],
    ids=["prefix", "whole"],
)
def test_masters_of_some_parameters_are_found_among_all(mask, remainders):
    inner = ols.with_master_weights(optax.sgd(0.1), remainders=remainders)
    head = {"w": jnp.full(2, 2, jnp.bfloat16), "b": jnp.ones(())}
    params = {"base": {"w": jnp.ones(2, jnp.bfloat16)}, "head": head}
    tx = optax.partition({True: inner, False: optax.set_to_zero()}, mask)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    full = ols.master_weights(state, moved)
    assert full["base"]["w"] is moved["base"]["w"]
    assert full["head"]["w"].dtype == jnp.float32
    np.testing.assert_allclose(full["head"]["w"], [1.8, 1.8], rtol=1e-7)
    np.testing.assert_allclose(full["head"]["b"], 0.9, rtol=1e-7)


@pytest.mark.slow
def test_a_model_of_nnx_is_exported_in_any_container():
    class Model(nnx.Module):
        def __init__(self, rngs):
            linear = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=rngs)
            self.layers = nnx.List([linear, nnx.BatchNorm(3, rngs=rngs)])

    model = Model(nnx.Rngs(0))
    inner = ols.with_master_weights(optax.sgd(2.0**-10), remainders=True)
    optimizer = nnx.Optimizer(model, ols.with_loss_scaling(inner, 8.0), wrt=nnx.Param)
    start = model.layers[0].kernel[...].astype(jnp.float32)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 8), nnx.state(model, nnx.Param))
    nnx.jit(lambda optimizer, model: optimizer.update(model, grads))(optimizer, model)
    params = nnx.state(model, nnx.Param)
    for given in (params, nnx.to_pure_dict(params), model, nnx.state(model)):
        full = ols.master_weights(optimizer.opt_state, given)
        assert jax.tree.structure(full) == jax.tree.structure(given)
        kernel = next(x for x in jax.tree.leaves(full) if x.shape == (2, 3))
        np.testing.assert_array_equal(kernel, start - 2.0**-10)
    of_module = inner.init(model)  # its paths have indices, where those of a state have keys
    assert ols.master_weights(of_module, params)["layers"][0]["kernel"][...].dtype == jnp.float32


def test_masters_are_found_in_a_mapping_of_their_fields():
    params = {"w": jnp.ones(3, jnp.float16), "norm": jnp.ones(3)}
    tx = ols.with_loss_scaling(ols.with_master_weights(optax.sgd(1e-4)), 1)
    _, opt_state = tx.update(params, tx.init(params), params)  # 1 - 1e-4 rounds to 1
    restored = serialization.to_state_dict(opt_state)  # as Orbax without a target makes it
    masters = ols.master_weights(restored, params)
    assert_same_bits(masters, ols.master_weights(opt_state, params))
    assert (masters["w"] < 1).all()
    assert opt_state.inner_state.master_weights["norm"] == optax.MaskedNode()


def test_tied_weights_of_nnx_stay_tied():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=rngs)
            self.b = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=rngs)
            self.b.kernel = self.a.kernel

    model = Tied(nnx.Rngs(0))
    tx = ols.with_skipping(ols.with_master_weights(optax.sgd(1.0)))
    full = ols.master_weights(nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state, model)
    assert full.a.kernel is full.b.kernel
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(full))} == {jnp.dtype("float32")}


@pytest.mark.filterwarnings("ignore:`inject_hyperparams` keeps")
@pytest.mark.parametrize(
    ("tx", "around"),
    [
        (optax.named_chain(("z", CLIP), ("a", MASTERS)), None),
        (optax.MultiSteps(optax.chain(CLIP, CLIP, MASTERS), 2), None),
        (optax.partition({"all": optax.chain(CLIP, optax.masked(MASTERS, True))}, "all"), None),
        (optax.inject_hyperparams(lambda rate: optax.chain(CLIP, MASTERS))(0.1), None),  # noqa: ARG005
        (optax.chain(CLIP, MASTERS, CLIP), "tuple"),
        (optax.named_chain(("z", MASTERS), ("a", CLIP)), "OrderedDict"),
        (optax.contrib.schedule_free(MASTERS, 0.1), "ScheduleFreeState"),
        (optax.apply_if_finite(MASTERS, 5), "ApplyIfFiniteState"),
        (optax.GradientTransformation(lambda p: {"a": MASTERS.init(p)}, MASTERS.update), "dict"),
    ],
)
def test_masters_are_refused_only_in_transformations_that_may_change_their_updates(tx, around):
    match = f"inside a {around}\\. .*`with_master_weig"
    for inner in (tx, optax.masked(tx, True)) if around else (tx,):
        with pytest.raises(ValueError, match=match) if around else contextlib.nullcontext():
            ols.with_skipping(inner).init({"w": jnp.ones(2, jnp.float16)})


@pytest.mark.slow
def test_a_parameter_may_be_named_value():
    # The array in an nnx.Variable is at `.value`; attention has a layer of that name.
    params = {name: jnp.full(2, len(name), jnp.bfloat16) for name in ("key", "query", "value")}
    params |= {"inner": params | {"other": jnp.ones(3, jnp.bfloat16)}}
    tx = ols.with_master_weights(optax.sgd(2.0**-10), remainders=True)
    updates, state = tx.update(params, tx.init(params), params)
    full = ols.master_weights(state, optax.apply_updates(params, updates))
    expected = jax.tree.map(lambda p: p.astype(jnp.float32) * (1 - 2.0**-10), params)
    jax.tree.map(np.testing.assert_array_equal, full, expected)
    with pytest.raises(ValueError, match=r"`params` must keep its structure, .* at `\['value'\]`"):
        tx.update(params, state, {name: params[name] for name in ("key", "query", "inner")})


def test_a_remainder_leaves_its_parameter_the_derivative_down_to_the_smallest_normal_number():
    tx = ols.with_master_weights(optax.sgd(2.0**-10), remainders=True)
    tiny = 2.0**-126
    param = jnp.array([tiny, -tiny, 2 * tiny, 1.0, 1.5, 2.0, 2.5, -3.0, 7e4, 1e38], jnp.bfloat16)
    tangent = jax.jvp(
        lambda p: ols.master_weights(tx.init(param), p), (param,), (jnp.ones_like(param),)
    )[1]
    np.testing.assert_array_equal(tangent, jnp.ones(len(param)))


class Norm(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((2, 2), jnp.bfloat16))
        self.scale = nnx.Param(jnp.ones(2))


@pytest.mark.parametrize("remainders", [False, True])
def test_no_variable_of_nnx_is_without_an_array(remainders):
    model, tx = Norm(), ols.with_master_weights(optax.adam(0.1), remainders=remainders)
    masters = tx.init(nnx.state(model, nnx.Param)).master_weights
    assert type(masters["scale"]) is optax.MaskedNode
    assert masters["kernel"][...].dtype == (jnp.int16 if remainders else jnp.float32)
    optimizer = nnx.Optimizer(model, ols.with_skipping(tx), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    kept = nnx.state(optimizer, nnx.optimizer.OptState)
    variables = jax.tree.leaves(kept, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert all(map(jax.tree.leaves, variables))
    assert (model.scale[...] < 1).all()


def test_arrays_without_masters_are_handed_through_and_other_masters_are_refused():
    params = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
    state, more = MASTERS.init(params), params | {"c": jnp.ones(2, jnp.float16)}
    assert ols.master_weights(state, more)["c"] is more["c"]
    with pytest.raises(ValueError, match=r"got float16 at `\['c'\]`, where the state holds no m"):
        MASTERS.update(more, state, more)
    with pytest.raises(ValueError, match=r"`params` must keep its structure, .* at `\['a'\]`"):
        ols.master_weights(state, {"b": params["b"]})
    with pytest.raises(TypeError, match=r"float32 at `\['a'\]`, .* a float32 master.*eqx.apply_up"):
        ols.master_weights(state, params | {"a": jnp.ones(2)})
    remainder = state._replace(master_weights=state.master_weights | {"a": jnp.zeros(2, jnp.int16)})
    with pytest.raises(TypeError, match=r"float16 at `\['a'\]`, .* an int16 remainder of bfloat16"):
        MASTERS.update(params, remainder, params)


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    """A pytree whose keys are plain strings."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten_with_keys(self):
        return (("a", self.a), ("b", self.b)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_keys_of_a_pytree_may_be_any_objects(dtype):
    params = Pair(jnp.ones(3, dtype), 2 * jnp.ones(3, dtype))
    tx = ols.with_master_weights(optax.sgd(0.1))
    updates, opt_state = tx.update(params, tx.init(params), params)
    masters = ols.master_weights(opt_state, optax.apply_updates(params, updates))
    np.testing.assert_allclose(masters.a, [0.9] * 3, rtol=1e-6)  # no number in half precision
    np.testing.assert_allclose(masters.b, [1.8] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    "wrap",
    [
        ols.with_master_weights,
        functools.partial(ols.with_master_weights, remainders=True),
        ols.with_stochastic_rounding,
    ],
)
def test_a_number_among_the_parameters_may_have_no_gradient(wrap):
    # An Equinox module may hold a number, which `eqx.filter` and `eqx.filter_grad` leave out.
    params, trained = ({"w": jnp.ones(3, jnp.bfloat16), "size": n} for n in (4, None))
    tx = wrap(optax.adamw(0.5))
    updates, state = tx.update(trained, tx.init(trained), params)
    again, _ = tx.update(trained, tx.init(trained), trained)
    assert updates["size"] is None
    np.testing.assert_array_equal(updates["w"], again["w"])
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(trained))
