"""Held against torch's own GradScaler, on the CPU: `make oracles` installs torch and runs this."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import optax_lossscale as ols
from optax_lossscale import interop

pytestmark = pytest.mark.integration

STEPS = 400
SEEDS = range(12)


def step_torch(scaler, finite):
    """Take one step of an optimizer whose gradient is finite, or is not."""
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight * (1.0 if finite else float("inf"))).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.state_dict()


def run_torch(scaler, flags):
    """Return the factors and the counts of finite steps after each step."""
    after = [step_torch(scaler, finite) for finite in flags]
    return [d["scale"] for d in after], [d["_growth_tracker"] for d in after]


def run_ours(policy, state, flags):
    def step(state, finite):
        state = policy.update(state, finite)
        return state, (state.loss_scale, state.growth_count)

    return jax.jit(lambda state: jax.lax.scan(step, state, jnp.asarray(flags)))(state)


def random_scaler(rng):
    """Draw a scaler in the middle of a run, and the steps that follow."""
    interval = int(rng.integers(1, 9))
    factor = float(rng.choice([2.0, 4.0, 3.0]))
    scaler = torch.amp.GradScaler(
        device="cpu",
        init_scale=float(rng.choice([1.0, 3.0]) * 2.0 ** rng.integers(-4, 16)),
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=interval,
    )
    # As many moves up as down, so that the factor stays within the bounds.
    flags = rng.random(STEPS) < 0.5 ** (1 / interval)
    run_torch(scaler, flags[: rng.integers(1, 40)])
    return scaler, flags


def assert_same_moves(theirs, ours, factor):
    np.testing.assert_array_equal(ours[1], theirs[1])
    moves = np.sum(np.diff(theirs[0]) != 0)
    assert moves >= 10  # or the comparison says nothing
    # One unit in the last place for each move, where the factors are no powers of two.
    np.testing.assert_allclose(ours[0], theirs[0], rtol=2**-23 * moves if factor == 3 else 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_and_what_it_became_move_at_the_same_step(seed):
    scaler, flags = random_scaler(np.random.default_rng(seed))
    d = scaler.state_dict()
    _, ours = run_ours(*interop.from_torch_state_dict(d), flags)
    assert_same_moves(run_torch(scaler, flags), ours, d["growth_factor"])


@pytest.mark.parametrize("seed", SEEDS)
def test_ours_and_what_torch_loads_move_at_the_same_step(seed):
    scaler, flags = random_scaler(np.random.default_rng(seed))
    policy, state = interop.from_torch_state_dict(scaler.state_dict())
    state, _ = run_ours(policy, state, flags[:37])
    loaded = torch.amp.GradScaler(device="cpu")
    loaded.load_state_dict(interop.to_torch_state_dict(policy, state))
    _, ours = run_ours(policy, state, flags)
    assert_same_moves(run_torch(loaded, flags), ours, policy.growth_factor)


def test_the_dict_survives_the_way_here_and_back():
    scaler, _ = random_scaler(np.random.default_rng(1))
    d = scaler.state_dict()
    assert interop.to_torch_state_dict(*interop.from_torch_state_dict(d)) == d


def test_torch_takes_a_dict_whether_it_has_stepped_or_not():
    policy = ols.DynamicLossScale(2.0**7, growth_interval=5)
    state = policy.update(policy.init(), grads_finite=True)
    d = interop.to_torch_state_dict(policy, state)
    fresh, used = (torch.amp.GradScaler(device="cpu") for _ in range(2))
    step_torch(used, finite=True)
    for scaler in (fresh, used):
        scaler.load_state_dict(d)
        assert scaler.state_dict() == d
        assert step_torch(scaler, finite=True)["_growth_tracker"] == 2


def test_a_scaler_that_is_disabled_is_refused():
    d = torch.amp.GradScaler(device="cpu", enabled=False).state_dict()
    with pytest.raises(TypeError, match="enabled=False"):
        interop.from_torch_state_dict(d)


def test_torch_stays_at_a_count_beyond_its_interval_and_we_grow():
    d = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    d |= {"growth_interval": 3, "_growth_tracker": 3}
    scaler = torch.amp.GradScaler(device="cpu")
    scaler.load_state_dict(d)
    assert step_torch(scaler, finite=True)["scale"] == 8
    policy, state = interop.from_torch_state_dict(d)
    assert float(policy.update(state, grads_finite=True).loss_scale) == 16


def test_at_the_top_torch_goes_one_doubling_further():
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**125, growth_interval=1)
    policy, state = interop.from_torch_state_dict(scaler.state_dict())
    flags = [True] * 4
    _, (ours, _) = run_ours(policy, state, flags)
    assert run_torch(scaler, flags)[0] == [2.0**126, 2.0**127, 2.0**127, 2.0**127]
    assert ours.tolist() == [2.0**126] * 4


def test_at_the_bottom_torch_goes_on_to_zero():
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**-125)
    policy, state = interop.from_torch_state_dict(scaler.state_dict())
    flags = [False] * 26
    _, (ours, _) = run_ours(policy, state, flags)
    theirs, _ = run_torch(scaler, flags)
    assert theirs[0] == ours[0] == 2.0**-126
    assert theirs[-1] == 0
    assert ours[-1] == 2.0**-126


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_training_run_is_the_same_in_torch(name):
    rng = np.random.default_rng(7)
    xs = rng.normal(size=(60, 16, 4)).astype(np.float32)
    ys = xs @ np.float32([1.0, -2.0, 3.0, 0.5]) + np.float32(0.1)
    # What the loss is multiplied by; its gradient is infinite where this is.
    weights = np.where(rng.random(60) < 0.2, np.inf, 1.0).astype(np.float32)
    start = rng.normal(size=4).astype(np.float32)
    growth_interval = 3

    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]([weight], lr=0.05)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10, growth_interval=growth_interval)
    their_scales = []
    for x, y, w in zip(*(torch.tensor(a) for a in (xs, ys, weights)), strict=True):
        optimizer.zero_grad()
        scaler.scale(w * torch.mean((x @ weight - y) ** 2)).backward()
        scaler.step(optimizer)
        scaler.update()
        their_scales.append(scaler.get_scale())

    def loss_fn(params, x, y, w):
        return w * jnp.mean((x @ params - y) ** 2)

    tx = ols.with_loss_scaling(
        {"sgd": optax.sgd, "adam": optax.adam}[name](0.05),
        ols.DynamicLossScale(2.0**10, growth_interval),
    )

    @jax.jit
    def step(params, opt_state, *batch):
        _, grads = ols.value_and_grad(loss_fn)(opt_state, params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)  # torch never sees the loss
        return optax.apply_updates(params, updates), opt_state

    params = jnp.asarray(start)
    opt_state = tx.init(params)
    our_scales = []
    for batch in zip(xs, ys, weights, strict=True):
        params, opt_state = step(params, opt_state, *batch)
        our_scales.append(float(ols.loss_scale_state(opt_state).loss_scale))

    assert our_scales == their_scales
    assert len(set(our_scales)) > 3
    assert int(ols.loss_scale_state(opt_state).total_skipped) == np.isinf(weights).sum() > 0
    # Optax computes Adam's 1 - 0.999**t in float32.
    rtol = {"sgd": 1e-5, "adam": 1e-4}[name]
    np.testing.assert_allclose(params, weight.detach().numpy(), rtol=rtol)
    assert not np.allclose(params, start, atol=0.1)
