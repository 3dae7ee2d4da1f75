"""bfloat16 parameters without masters: neighbors, unbiased, by bits of their own."""

import os
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from checkpoint_formats import FORMATS
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits, types

import optax_lossscale as ols

pytestmark = pytest.mark.integration

BF16 = jnp.dtype("bfloat16")
ADD = optax.stateless(lambda updates, _: updates)  # adds the gradients to the parameters
ADDING = ols.with_stochastic_rounding(ADD)


def stepped(tx, params, grads, state=None):
    updates, state = jax.jit(tx.update)(grads, state or tx.init(params), params)
    return optax.apply_updates(params, updates), state


def words(array):
    return np.asarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def test_each_parameter_becomes_a_neighbor_of_the_new_weight():
    random = np.random.default_rng(0)
    # XLA:CPU flushes subnormal differences, so the smallest weights are left out.
    start = jnp.asarray(random.integers(0x1000, 0x7000, 2**18).astype(np.uint16).view(BF16))
    start *= jnp.asarray(random.choice([-1, 1], start.shape), BF16)
    share = random.choice([0, 1e-6, 1e-3, 0.3, -1, -1 + 2**-20, -2, 1e6], start.shape)
    moves = jnp.asarray(share, jnp.float32) * start.astype(jnp.float32)
    new = start.astype(jnp.float32) + moves
    found = words(stepped(ADDING, start, moves)[0])
    below, is_exact = (words(new) >> 16).astype(np.uint16), words(new) << 16 == 0
    is_beyond = np.abs(new) >= float(jnp.finfo(BF16).max)
    is_normal = (np.abs(new) >= 2.0**-126) | (new == 0)
    is_neighbor = (found == below) | ((found == below + 1) & ~is_exact & ~is_beyond)
    assert is_neighbor[is_normal & np.isfinite(new)].all()
    assert 0.2 < (found != below)[is_normal & ~is_exact].mean() < 0.6


def test_the_expectation_is_the_weight():
    params = jnp.ones(2**16, BF16)
    for share in (0.1, 0.5, 0.9):
        new, _ = stepped(ADDING, params, jnp.full(params.shape, share * 2.0**-7))
        ups = (np.float32(new) > 1).mean()
        assert abs(ups - share) < 5 * (share * (1 - share)) ** 0.5 / 2**8


def test_weights_that_do_not_change_keep_their_bits_and_special_numbers_pass():
    params = jnp.array([0.0, -0.0, 1.0, -3.0, np.inf, -np.inf, np.nan, 1, 1, np.inf], BF16)
    moves = jnp.full(10, -0.0).at[7:].set(jnp.array([np.inf, np.nan, -np.inf]))
    found, _ = stepped(ADDING, params, moves)
    assert_same_bits(found[:6], params[:6])
    np.testing.assert_array_equal(np.float32(found[6:]), [np.nan, np.inf, np.nan, np.nan])


def test_the_inner_optimizer_sees_float32_and_other_leaves_are_its_own():
    seen = []

    def update(grads, state, params):
        seen.append([str(x.dtype) for x in jax.tree.leaves((grads, params))])
        return grads, state

    tx = ols.with_stochastic_rounding(optax.GradientTransformation(lambda p: p, update))
    params = {"w": jnp.ones(4, BF16), "n": jnp.ones(4, jnp.float32), "none": None}
    state = tx.init(params | {"masked": optax.MaskedNode()})
    assert types(state.inner_state["w"]) == types(state.inner_state["n"])
    assert types(state.rounding_count) == ((), jnp.uint32)
    params |= {"masked": optax.MaskedNode()}
    new, _ = stepped(tx, params, jax.tree.map(lambda p: p / 3, params), state)
    assert seen == [["float32"] * 4]
    assert_same_bits(new["n"], params["n"] + params["n"] / 3)
    assert new["w"].dtype == BF16


def test_without_a_bfloat16_parameter_a_step_is_that_of_the_inner_optimizer():
    params = {"w": jnp.full((8, 8), 0.3)}
    grads = {"w": jnp.full((8, 8), 0.7)}
    tx = ols.with_stochastic_rounding(optax.adamw(0.1))
    found, state = stepped(tx, params, grads)
    expected, inner_state = stepped(optax.adamw(0.1), params, grads)
    assert_same_bits((found, state.inner_state), (expected, inner_state))


def test_a_move_in_float64_is_rounded_to_float32_first():
    with jax.enable_x64(True):
        params = jnp.ones(4096, BF16)
        found, _ = stepped(ADDING, params, jnp.full(4096, -1 + 1e-12, jnp.float64))
    assert_same_bits(found, jnp.zeros(4096, BF16))


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"w": jnp.ones(2, jnp.float16)}, r"must not be float16, got it at `\['w'\]`.*masters"),
        ({"w": jnp.ones(2, BF16)}, "`params` must be given"),
    ],
)
def test_float16_and_missing_parameters_are_refused(params, match):
    with pytest.raises(ValueError, match=match):
        ADDING.update(params, ADDING.init(params))


REFUSED = {
    "masters inside": lambda tx: ols.with_stochastic_rounding(ols.with_master_weights(tx)),
    "masters outside": lambda tx: ols.with_master_weights(ols.with_stochastic_rounding(tx)),
    "twice": lambda tx: ols.with_stochastic_rounding(ols.with_stochastic_rounding(tx)),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_one_message_names_both_wrappers(make):
    tx = make(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"`with_master_weights.inner.` or `with_stochastic_round"):
        tx.init(jnp.ones(2, BF16))


def test_a_guard_inside_and_changed_updates_are_refused():
    inner = ols.with_stochastic_rounding(ols.with_skipping(optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"`with_skipping\(with_stochastic_rounding\(inner\)\)`"):
        inner.init(jnp.ones(2, BF16))
    around = ols.with_skipping(optax.chain(ADDING, optax.scale(-1.0)))
    with pytest.raises(ValueError, match=r"updates of `with_stochastic_rounding`.*StochasticRound"):
        around.init(jnp.ones(2, BF16))


def test_a_guard_does_not_warn_of_rounded_parameters(recwarn):
    ols.with_skipping(ADDING).init(jnp.ones(2, BF16))
    assert not recwarn.list


def test_a_skipped_and_an_accumulated_step_change_no_bit():
    tx = ols.with_loss_scaling(ADDING, 8.0)
    params, state = stepped(tx, jnp.ones(4096, BF16), jnp.full(4096, 0.01))
    new, after = stepped(tx, params, jnp.full(4096, jnp.inf), state)
    assert_same_bits((new, after.inner_state), (params, state.inner_state))
    assert int(state.inner_state.rounding_count) == 1
    # Inside, MultiSteps gives zeros, so no weight changes; outside, the state does not either.
    tx = ols.with_stochastic_rounding(optax.MultiSteps(optax.sgd(1e-2), 2))
    assert_same_bits(stepped(tx, params, jnp.ones(4096))[0], params)
    tx = optax.MultiSteps(ADDING, 2)
    new, after = stepped(tx, params, jnp.ones(4096), tx.init(params))
    assert_same_bits(new, params)
    assert int(after.inner_opt_state.rounding_count) == 0


# -- the bits

HALFWAY = 2.0**-8


def ups(tx, params):
    """Return which elements of each parameter are rounded up."""
    new, _ = stepped(tx, params, jax.tree.map(lambda p: jnp.full(p.shape, HALFWAY), params))
    return [np.sign(np.float32(p) - 1 - HALFWAY).ravel() for p in jax.tree.leaves(new)]


def correlation(a, b):
    return abs(float(a @ b)) / len(a)


ONES = jnp.ones((64, 64), BF16)


def test_parameters_groups_and_a_state_inside_have_bits_of_their_own():
    groups = {"one": ADDING, "other": ADDING}
    tx = optax.partition(groups, {"a": "one", "b": "other", "c": "one"})
    found = ups(tx, dict.fromkeys("abc", ONES))
    store = optax.GradientTransformation(
        lambda params: params, lambda grads, *_: (grads, jax.tree.map(lambda g: 1 + g, grads))
    )
    inside = ols.with_stochastic_rounding(ols.with_bfloat16_state(store))
    for params in (ONES, {"a": ONES}):
        new, state = stepped(inside, params, jax.tree.map(lambda p: HALFWAY * p, params))
        arrays = *jax.tree.leaves(new), *jax.tree.leaves(state.inner_state.inner_state)
        pair = [np.sign(np.float32(array) - 1 - HALFWAY).ravel() for array in arrays]
        assert correlation(*pair) < 5 / 64
    pairs = [(i, j) for i in range(3) for j in range(i)]
    assert max(correlation(found[i], found[j]) for i, j in pairs) < 5 / 64


def test_two_states_in_bfloat16_in_a_partition_share_no_bits():
    store = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads)
    )
    tx = ols.with_bfloat16_state(store)
    params = {"a": jnp.full((64, 64), 1 + HALFWAY), "b": jnp.full((64, 64), 1 + HALFWAY)}
    labels = {"a": "one", "b": "other"}
    _, state = stepped(optax.partition({"one": tx, "other": tx}, labels), params, params)
    arrays = [x for x in jax.tree.leaves(state) if x.dtype == BF16]
    first, second = (np.sign(np.float32(x) - 1 - HALFWAY).ravel() for x in arrays)
    assert correlation(first, second) < 5 / 64


def test_the_bits_are_the_same_in_every_container():
    params = {"w": ONES}
    for container in (FrozenDict(params), nnx.State(jax.tree.map(nnx.Param, params))):
        np.testing.assert_array_equal(ups(ADDING, container), ups(ADDING, params))


PROGRAM = """
import jax.numpy as jnp, numpy as np, optax, optax_lossscale as ols, zlib
tx = ols.with_stochastic_rounding(ols.with_bfloat16_state(optax.adam(1e-3)))
params = {"b": jnp.ones((64, 64), jnp.bfloat16), "w": jnp.ones((64, 64), jnp.bfloat16)}
updates, state = tx.update(params, tx.init(params), params)
arrays = [updates["b"], updates["w"], state.inner_state.inner_state[0].mu["w"]]
print(zlib.crc32(b"".join(np.asarray(a).tobytes() for a in arrays)))
"""


@pytest.mark.slow
def test_the_bits_are_the_same_in_every_process():
    def run(seed):
        env = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.check_output(command, env=env, text=True)  # noqa: S603

    assert run("1") == run("2")


@pytest.mark.parametrize(("spec", "kind"), [(P("x"), AxisType.Auto), (P("x"), AxisType.Explicit)])
def test_the_bits_are_those_of_any_sharding(spec, kind):
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])
    placed = jax.device_put(ONES, NamedSharding(mesh, spec))
    grads = jnp.full((64, 64), HALFWAY)
    found, _ = stepped(ADDING, placed, jax.device_put(grads, NamedSharding(mesh, spec)))
    assert_same_bits(jax.device_get(found), jax.device_get(stepped(ADDING, ONES, grads)[0]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_runs_in_shard_map_and_members_of_vmap_share_bits(check_vma):
    mesh = jax.make_mesh((4,), ("i",), (AxisType.Auto,), devices=jax.devices()[:4])
    tx = ols.with_skipping(ADDING, axis_name="i")
    state = tx.init(ONES)
    specs = {"in_specs": (P("i"), P(), P("i")), "out_specs": (P("i"), P())}
    step = jax.shard_map(tx.update, mesh=mesh, check_vma=check_vma, **specs)
    updates, after = jax.jit(step)(jnp.full((64, 64), HALFWAY), state, ONES)
    assert types(after) == types(state)
    assert {*np.unique(np.float32(optax.apply_updates(ONES, updates)))} == {1, 1 + 2 * HALFWAY}
    many = jnp.stack([ONES] * 2)
    states = jax.vmap(ADDING.init)(many)
    first, second = jax.jit(jax.vmap(ADDING.update))(jnp.full(many.shape, HALFWAY), states, many)[0]
    assert_same_bits(first, second)


def test_a_step_is_exported_donated_and_restored(tmp_path):
    tx = ols.with_skipping(ols.with_stochastic_rounding(ols.with_bfloat16_state(optax.adam(0.1))))
    state, treedef = tx.init(ONES), jax.tree.structure(tx.init(ONES))

    def step(params, leaves):
        updates, new = tx.update(params, treedef.unflatten(leaves), params)
        return optax.apply_updates(params, updates), jax.tree.leaves(new)

    plain, leaves = jax.jit(step)(ONES, jax.tree.leaves(state))
    exported = jax.export.export(jax.jit(step))(ONES, jax.tree.leaves(state))
    assert_same_bits(exported.call(ONES, jax.tree.leaves(state)), (plain, leaves))
    donated = jax.jit(step, donate_argnums=(0, 1))(ONES + 0, jax.tree.leaves(tx.init(ONES)))
    assert_same_bits(donated, (plain, leaves))
    state = treedef.unflatten(leaves)
    for name, (save, restore) in FORMATS.items():
        save(tmp_path / name, state)
        assert_same_bits(restore(tmp_path / name, state), state)


def test_a_name_is_hashed_by_crc32():
    start = np.full(1, zlib.crc32(b"params['w']"), np.uint32)

    def mixed(x):
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
        return x ^ (x >> 16)

    # One axis: its first index is multiplied by the size.
    index = np.arange(4, dtype=np.uint32) + start * np.uint32(4)
    carry = (mixed(mixed(index) + start + np.uint32(1)) >> 16) + 0x8000 >= 2**16
    (found,) = ups(ADDING, {"w": jnp.ones(4, BF16)})
    np.testing.assert_array_equal(found > 0, carry)
