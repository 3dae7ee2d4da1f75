"""A converted loss scale changes at the same steps as in the live source library."""

import flax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ols
from optax_lossscale import interop
from optax_lossscale.flax import DynamicScale as OurDynamicScale

pytestmark = pytest.mark.integration

TORCH = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5}
TORCH |= {"growth_interval": 3, "_growth_tracker": 2}


class NamedDynamicScale(OurDynamicScale):
    name: str = flax.struct.field(pytree_node=False, default="generator")


def as_jmp(factor, _, interval, count, scale, floor):
    counts = {"counter": jnp.int32(count), "period": interval, "factor": int(factor)}
    return jmp.DynamicLossScale(jnp.float32(scale), **counts, min_loss_scale=jnp.float32(floor))


def run(step, state, finite, *names):
    """Return the fields of these names after each step."""
    seen = []
    for each in finite:
        state = step(state, jnp.asarray(each))
        seen.append([float(getattr(state, name)) for name in names])
    return np.array(seen).T


def run_ours(policy, state, finite):
    return run(jax.jit(policy.update), state, finite, "loss_scale", "growth_count")


def run_flax(ds, finite):
    @jax.jit
    def step(ds, finite):
        slope = jnp.where(finite, 1.0, jnp.inf)
        return ds.value_and_grad(lambda p: p * slope)(jnp.float32(1)).dynamic_scale

    return run(step, ds, finite, "scale", "fin_steps")


def run_jmp(ls, finite):
    return run(jmp.DynamicLossScale.adjust, ls, finite, "loss_scale", "counter")


def assert_same_moves(theirs, ours, *, exact=True):
    np.testing.assert_array_equal(ours[1], theirs[1])
    moved = [np.diff(scales) != 0 for scales in (ours[0], theirs[0])]
    np.testing.assert_array_equal(*moved)
    assert moved[0].sum() >= 5  # otherwise the comparison is empty
    # One unit in the last place per move if `growth_factor` is not a power of two.
    rtol = 0 if exact else float(2**-23 * moved[0].sum())
    np.testing.assert_allclose(ours[0], theirs[0], rtol=rtol)


# How to make, convert and run the object, and how many extra steps it waits before it grows.
PEERS = {
    "flax": (DynamicScale, interop.from_flax_dynamic_scale, run_flax, 1),
    "ours": (NamedDynamicScale, interop.from_flax_dynamic_scale, run_flax, 0),
    "jmp": (as_jmp, interop.from_jmp, run_jmp, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(
    "fields", [(2.0, 2, 1, 2.0**9, 8.0), (3.0, 4, 3, 3.0 * 2**6, 0.5), (4.0, 1, 0, 1.0, 2.0)]
)
def test_what_was_converted_moves_at_the_same_steps(peer, fields):
    make, convert, run, waits = PEERS[peer]
    factor, interval, _, scale, floor = fields
    theirs = make(factor, 1 / factor, *fields[1:])
    policy, state = convert(theirs)
    assert policy.growth_interval == interval + waits
    assert policy.initial_scale == max(scale, floor)
    # It grows as often as it backs off, and meets its floor.
    finite = np.random.default_rng(interval).random(60) < 0.5 ** (1 / interval)
    assert_same_moves(run(theirs, finite), run_ours(policy, state, finite), exact=factor != 3)


def test_without_a_floor_it_gets_the_lowest_there_is():
    from_torch, _ = interop.from_torch_state_dict(TORCH)
    for floor in (None, 0.0):
        policy, _ = interop.from_flax_dynamic_scale(DynamicScale(minimum_scale=floor))
        for each in (policy, from_torch):
            assert (each.min_scale, each.max_scale) == (2**-126, 2**126)


def test_a_loss_scale_below_its_floor_is_lifted_by_any_step_and_in_flax_by_an_overflow():
    ds = DynamicScale(scale=0.5, minimum_scale=4.0, growth_interval=2)
    finite = [True, False, True]
    ours = run_ours(*interop.from_flax_dynamic_scale(ds), finite)
    np.testing.assert_array_equal(run_flax(ds, finite)[0], [0.5, 4, 4])
    np.testing.assert_array_equal(ours[0], [4, 4, 4])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "ceiling"), [("float16", 2**15), ("bfloat16", 2.0**126)])
def test_jmp_stops_growing_only_in_float16_where_twice_as_much_is_infinite(dtype, ceiling):
    one = jnp.ones((), dtype)
    ls = jmp.DynamicLossScale(one * 2**12, period=2, min_loss_scale=one)
    finite = [True] * 12 + [False] * 6 + [True] * 8
    policy, state = interop.from_jmp(ls)
    assert policy.max_scale == ceiling
    assert_same_moves(run_jmp(ls, finite), run_ours(policy, state, finite))


def test_torchs_dict_survives_the_way_here_and_back():
    policy, state = interop.from_torch_state_dict(TORCH)
    opt_state = ols.WithLossScalingState(state, (), ())
    for holder in (state, jax.tree.map(np.asarray, state), opt_state):
        d = interop.to_torch_state_dict(policy, holder)
        assert d == TORCH
        assert [type(d[key]) for key in TORCH] == [float, float, float, int, int]


def test_a_count_beyond_the_interval_grows_on_the_next_finite_step():
    ls = jmp.DynamicLossScale(jnp.float32(8), counter=jnp.int32(9), period=3)
    for policy, state in (
        interop.from_flax_dynamic_scale(DynamicScale(growth_interval=3, fin_steps=9, scale=8.0)),
        interop.from_jmp(ls),
        interop.from_torch_state_dict(TORCH | {"scale": 8.0, "_growth_tracker": 9}),
    ):
        assert float(policy.update(state, grads_finite=True).loss_scale) == 16
        # Torch tests for equality, so it receives a count just below the interval.
        d = interop.to_torch_state_dict(policy, state)
        assert d["_growth_tracker"] == d["growth_interval"] - 1


@pytest.mark.parametrize(
    ("cls", "grows_late", "late"),
    [(DynamicScale, True, 1), (DynamicScale, False, 0), (OurDynamicScale, True, 0)],
)
def test_flax_may_grow_late_and_ours_does_not(cls, grows_late, late):
    def converted(interval):
        ds = cls(growth_interval=interval)
        return interop.from_flax_dynamic_scale(ds, grows_late=grows_late)[0].growth_interval

    assert (converted(5), converted(0)) == (5 + late, 1)
    with pytest.raises(ValueError, match="`growth_interval` must be at least 1"):
        converted(-1)


def test_an_interval_beyond_an_int32_never_comes():
    never = 2**31 - 1
    d = TORCH | {"growth_interval": 10**12, "_growth_tracker": 10**12}
    for policy, state in (
        interop.from_flax_dynamic_scale(DynamicScale(growth_interval=never, fin_steps=never)),
        interop.from_torch_state_dict(d),
    ):
        assert policy.growth_interval == int(state.growth_count) == never
        assert [jax.typeof(field) for field in state] == [jax.typeof(f) for f in policy.init()]
        assert not any(field.aval.weak_type for field in state)
