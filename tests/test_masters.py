"""Float32 masters: after every step the parameters are those of the float32 run, rounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS, tiers
from plain_where import assert_same_bits

import optax_lossscale as ols

pytestmark = pytest.mark.integration

HALF = [jnp.float16, jnp.bfloat16]
KINDS = ["adamw", "lookahead", "partition"]
EVERY = [
    param
    for param in tiers(KINDS)
    if not any(map(jnp.iscomplexobj, jax.tree.leaves(OPTIMIZERS[param.values[0]].params())))
]


@pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", EVERY)
def test_the_parameters_are_those_of_the_float32_run_rounded(name, dtype):
    optimizer = OPTIMIZERS[name]
    plain, tx = optimizer.plain(), ols.with_master_weights(optimizer.make())
    half = ols.cast(optimizer.params(), dtype)
    single = ols.cast(half, jnp.float32)
    half_state, single_state = tx.init(half), plain.init(single)
    for step in range(5):
        grads = ols.cast(ols.cast(optimizer.grads(single, step), dtype), jnp.float32)
        extra = optimizer.extra_args(step, value=1.0 + step, grad=grads)
        updates, single_state = plain.update(grads, single_state, single, **extra)
        single = optax.apply_updates(single, updates)
        updates, half_state = tx.update(ols.cast(grads, dtype), half_state, half, **extra)
        half = optax.apply_updates(half, updates)
        assert_same_bits(half, ols.cast(single, dtype))
        jax.tree.map(np.testing.assert_array_equal, ols.master_weights(half_state, half), single)
    assert_same_bits(half_state.inner_state, single_state)


NUMBERS = [0.0, -0.0, 1e-9, -1e-9, 6e-8, -6e-8, 1.0, -1.0, 0.3333, 65504.0, -7e4, 3e38, np.inf]


@pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])
def test_every_number_is_reached_from_every_other_of_like_size(dtype):
    random = np.random.default_rng(0)
    numbers = np.float32(random.normal(size=3000) * 10.0 ** random.integers(-8, 5, 3000))
    masters = jnp.asarray(np.r_[np.repeat(NUMBERS, len(NUMBERS)), numbers], jnp.float32)
    others = np.r_[np.tile(NUMBERS, len(NUMBERS)), numbers * random.uniform(-2, 2000, 3000)]
    params = jnp.asarray(others, jnp.float32).astype(dtype)
    tx = ols.with_master_weights(optax.identity())
    # Added to negative zero, each number is itself, with its sign.
    state = tx.init(params)._replace(master_weights=-jnp.zeros_like(masters))
    updates, state = jax.jit(tx.update)(masters, state, params)
    assert_same_bits(state.master_weights, masters)
    reached, wanted = optax.apply_updates(params, updates), masters.astype(dtype)
    tiny = jnp.abs(wanted) < jnp.abs(params) / 4096  # see the documentation
    tiny = tiny | (jnp.isinf(params) & (wanted != params))  # infinity stays, or becomes NaN
    np.testing.assert_array_equal(reached[~tiny], wanted[~tiny])
    # Negative zero is the sum of two negative zeros, and of no other two numbers.
    signed = ~tiny & ~(
        (masters == 0) & jnp.signbit(masters) & ~((params == 0) & jnp.signbit(params))
    )
    np.testing.assert_array_equal(jnp.signbit(reached)[signed], jnp.signbit(wanted)[signed])
    assert jnp.mean(tiny) < 0.25


@pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])
def test_no_cast_is_taken_straight_back(dtype):
    # XLA:GPU drops such a pair, and the parameters would not be the rounded masters.
    tx = ols.with_master_weights(optax.sgd(0.1))
    param = jnp.ones(4, dtype)
    jaxpr = jax.make_jaxpr(tx.update)(param, tx.init(param), param)
    casts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type"]
    rounded = {eqn.outvars[0] for eqn in casts if eqn.invars[0].aval.dtype == jnp.float32}
    assert rounded
    assert not rounded & {eqn.invars[0] for eqn in casts}


def test_small_steps_add_up_in_half_precision_parameters():
    def train(tx, params):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jnp.ones_like(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=1000)[0][0]

    sgd = optax.sgd(1e-4)
    assert train(sgd, jnp.float16(1)) == 1
    assert train(ols.with_master_weights(sgd), jnp.float16(1)) == jnp.float16(0.9)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["jit", "eager"])
def test_a_skipped_step_leaves_the_masters_alone(loop):
    inner = ols.with_master_weights(optax.adamw(0.1))
    params = {"w": jnp.linspace(-1, 1, 8, dtype=jnp.float16), "norm": jnp.ones(2)}
    for tx in (ols.with_loss_scaling(inner, 8), ols.skip_if(inner)):
        update = jax.jit(tx.update) if loop == "jit" else tx.update
        _, state = update(params, tx.init(params), params)
        bad = {**params, "norm": jnp.array([1.0, jnp.inf])}
        updates, after = update(bad, state, params)
        assert_same_bits(after.inner_state, state.inner_state)
        assert_same_bits(optax.apply_updates(params, updates), params)
        assert after.inner_state.master_weights["norm"] == optax.MaskedNode()


@pytest.mark.slow
@pytest.mark.parametrize("inner", [optax.adamw(1e-3), optax.sgd(1e-3)])
def test_a_donated_step_copies_nothing(inner):
    shapes = [jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)] * 6
    masters = ols.with_master_weights(inner)
    guards = ols.skip_if(masters), ols.with_loss_scaling(masters, skip_if=lambda *_: False)
    for tx in (masters, *guards):
        state = jax.eval_shape(tx.init, shapes)

        def step(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, state, shapes).compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes <= 0.02 * 6 * 256 * 256 * 2
        arrays = jax.tree.leaves((shapes, state))
        nbytes = sum(a.size * a.dtype.itemsize for a in arrays)
        assert memory.alias_size_in_bytes >= 0.99 * nbytes


def test_masters_are_sharded_like_the_parameters():
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    sharding = NamedSharding(mesh, P("data"))
    params = jax.device_put(jnp.ones((8, 4), jnp.bfloat16), sharding)
    tx = ols.with_loss_scaling(ols.with_master_weights(optax.adamw(0.1)))
    state = jax.jit(tx.init)(params)
    assert state.inner_state.master_weights.sharding.is_equivalent_to(sharding, 2)
    updates, state = jax.jit(tx.update)(params, state, params)
    assert state.inner_state.master_weights.sharding.is_equivalent_to(sharding, 2)
    assert updates.sharding.is_equivalent_to(sharding, 2)


@pytest.mark.slow
def test_a_float32_checkpoint_goes_in_and_comes_out(tmp_path):
    plain = optax.adamw(0.1)
    single = {"w": jnp.linspace(-1, 1, 8), "n": jnp.ones(2, jnp.float32)}
    updates, plain_state = plain.update(single, plain.init(single), single)
    single = optax.apply_updates(single, updates)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", {"params": single, "opt_state": plain_state})

    tx = ols.with_master_weights(optax.adamw(0.1))
    half = {**single, "w": single["w"].astype(jnp.bfloat16)}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "plain")
    like = jax.tree.structure(plain_state)
    state = tx.init(half)
    masters = {"w": restored["params"]["w"], "n": state.master_weights["n"]}
    inner = like.unflatten(jax.tree.leaves(restored["opt_state"]))
    state = state._replace(master_weights=masters, inner_state=inner)
    # Out again.
    assert_same_bits(ols.master_weights(state, half), single)
    assert_same_bits(state.inner_state, plain_state)
    # And on, with all of its own state on disk.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", state)
    with ocp.StandardCheckpointer() as checkpointer:
        again = checkpointer.restore(tmp_path / "half", tx.init(half))
    assert_same_bits(again, state)


def test_init_takes_shapes():
    params = {"w": jnp.ones(3, jnp.float16), "n": jnp.ones(2)}
    tx = ols.with_master_weights(optax.adam(0.1))
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    types = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert (
        types(tx.init(shapes)) == types(jax.eval_shape(tx.init, params)) == types(tx.init(params))
    )


@pytest.mark.parametrize("guard", [ols.with_loss_scaling, ols.skip_if])
@pytest.mark.parametrize(("dtype", "least"), [("float16", 4096), ("bfloat16", 512)])
def test_half_precision_parameters_without_masters_are_warned_of_once(guard, dtype, least):
    params = {"w": jnp.ones(3, dtype), "b": jnp.ones(2, dtype), "s": jnp.ones(2)}
    match = rf"are {dtype}, and no float32 master .* below 1/{least} of .*`with_master_weights"
    with pytest.warns(UserWarning, match=match) as caught:
        guard(optax.sgd(0.1)).init(params)
    assert [warning.filename for warning in caught] == [__file__]
    # Less than that is lost.
    assert jnp.nextafter(params["w"], jnp.zeros_like(params["w"]))[0] == 1 - 2 / least
    guard(ols.with_master_weights(optax.sgd(0.1))).init(params)
    guard(
        optax.masked(ols.with_master_weights(optax.sgd(0.1)), {"w": True, "b": False, "s": False})
    ).init(params)
    guard(optax.sgd(0.1)).init(ols.cast(params, jnp.float32))


def test_masked_parameters_have_no_masters():
    params = {"base": jnp.ones(2, jnp.float16), "lora": jnp.ones(2, jnp.float16)}
    labels = {"base": "frozen", "lora": "trained"}
    inner = {"trained": ols.with_master_weights(optax.sgd(0.1)), "frozen": optax.set_to_zero()}
    tx = optax.partition(inner, labels)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    assert_same_bits(optax.apply_updates(params, updates)["base"], params["base"])
    full = ols.master_weights(state, params)
    assert full["base"].dtype == jnp.float16
    np.testing.assert_array_equal(full["lora"], np.float32([0.9, 0.9]))
