"""A comparison with torch's GradScaler on the CPU. `make oracles` installs torch and runs this."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import optax_lossscale as ols

pytestmark = pytest.mark.integration

# The recipe of the page, which is run there on numbers, is run here on a live `GradScaler`.
PAGE = Path(__file__).parents[2] / "docs/migration/torch.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
RECIPE = {"jnp": jnp, "ols": ols}
exec(next(block for block in BLOCKS if "def from_grad_scaler" in block), RECIPE)  # noqa: S102
from_grad_scaler, to_grad_scaler = RECIPE["from_grad_scaler"], RECIPE["to_grad_scaler"]


def scaler_with(**arguments):
    return torch.amp.GradScaler(device="cpu", **arguments)


def run_torch(scaler, flags):
    """Return the loss scale and the count after each step, given whether its gradient is finite."""
    after = []
    for finite in flags:
        weight = torch.nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        scaler.scale(weight * (1.0 if finite else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        after.append((scaler.state_dict()["scale"], scaler.state_dict()["_growth_tracker"]))
    return np.array(after)


def run_ours(policy, state, flags):
    """Return the same for this library, and the final state."""

    def step(state, finite):
        state = policy.update(state, finite)
        return state, (state.loss_scale, state.growth_count)

    state, after = jax.jit(lambda s: jax.lax.scan(step, s, jnp.asarray(flags)))(state)
    return state, np.stack([np.asarray(array, np.float64) for array in after], axis=1)


@pytest.mark.parametrize("seed", range(12))
def test_torch_and_what_it_became_move_at_the_same_step_there_and_back(seed):
    rng = np.random.default_rng(seed)
    interval, factor = int(rng.integers(1, 9)), float(rng.choice([2.0, 4.0, 3.0]))
    scaler = scaler_with(
        init_scale=float(rng.choice([1.0, 3.0]) * 2.0 ** rng.integers(-4, 16)),
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=interval,
    )
    # As many moves up as down, so that the loss scale stays within the bounds.
    flags = rng.random(400) < 0.5 ** (1 / interval)
    run_torch(scaler, flags[: rng.integers(1, 40)])
    d = scaler.state_dict()
    policy, state = from_grad_scaler(d)
    assert to_grad_scaler(policy, state) == d
    state, _ = run_ours(policy, state, flags[:37])
    run_torch(scaler, flags[:37])
    loaded = scaler_with()
    loaded.load_state_dict(to_grad_scaler(policy, state))
    _, ours = run_ours(policy, state, flags)
    for each in (scaler, loaded):
        theirs = run_torch(each, flags)
        np.testing.assert_array_equal(ours[:, 1], theirs[:, 1])
        moves = np.sum(np.diff(theirs[:, 0]) != 0)
        assert moves >= 10  # otherwise the comparison is empty
        # One unit in the last place per move if the factors are not powers of two.
        rtol = 2**-23 * (moves + 37) if factor == 3 else 0
        np.testing.assert_allclose(ours[:, 0], theirs[:, 0], rtol)


def run_both(scaler, flags):
    ours = run_ours(*from_grad_scaler(scaler.state_dict()), flags)[1]
    return run_torch(scaler, flags)[:, 0].tolist(), ours[:, 0].tolist()


def test_torch_stays_at_a_count_beyond_its_interval_and_has_no_bounds():
    d = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    scaler = scaler_with()
    scaler.load_state_dict(d | {"growth_interval": 3, "_growth_tracker": 3})
    assert run_both(scaler, [True]) == ([8.0], [16.0])
    # At the top it goes one doubling further, at the bottom to zero.
    theirs, ours = run_both(scaler_with(init_scale=2.0**125, growth_interval=1), [True] * 3)
    assert (theirs, ours) == ([2.0**126, 2.0**127, 2.0**127], [2.0**126] * 3)
    theirs, ours = run_both(scaler_with(init_scale=2.0**-125), [False] * 26)
    assert (theirs[0], theirs[-1], ours) == (2.0**-126, 0, [2.0**-126] * 26)


# The same network in both libraries, with the same start and data. Random steps get bad gradients,
# and every activation and gradient is rounded to float16, so that most overflows come from the loss
# scale itself: its change at one step determines which later steps overflow. Other arithmetic is
# float64, so that both libraries round to the same float16 although they sum in different orders.

STEPS, BATCH = 150, 16
SHAPES = {"b0": (12,), "b1": (3,), "w0": (5, 12), "w1": (12, 3)}
OPTIMIZERS = {
    "sgd": (
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        lambda: optax.sgd(0.05, momentum=0.9),
    ),
    "adam": (lambda params: torch.optim.Adam(params, lr=0.02), lambda: optax.adam(0.02)),
}
TOLERANCE = 2**-53 * 40  # of the parameters at any step, relative to the largest


class Problem:
    """The initial network, the data, the terms added to the gradients, and the policy."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.start = {n: np.asarray(rng.normal(size=s) / 2) for n, s in SHAPES.items()}
        self.x = rng.normal(size=(STEPS, BATCH, 5))
        self.y = np.sin(self.x @ rng.normal(size=(5, 3)))
        self.spoil = {n: np.zeros((STEPS, *s)) for n, s in SHAPES.items()}
        self.spoilt = np.flatnonzero(rng.random(STEPS) < 0.05)
        for step in self.spoilt:
            array = self.spoil[rng.choice(list(SHAPES))][step]
            array.flat[rng.integers(array.size)] = rng.choice([np.inf, -np.inf, np.nan])
        self.scaler = scaler_with(
            init_scale=2.0 ** rng.integers(20, 24),  # far too high at first, and soon again
            growth_factor=2.0 ** rng.integers(1, 3),
            backoff_factor=0.5 ** rng.integers(1, 3),
            growth_interval=int(rng.integers(2, 7)),
        )


def predict(params, x, rounded, tanh):
    """Apply the network, in torch or in JAX."""
    p = {n: rounded(v) for n, v in params.items()}
    hidden = tanh(rounded(rounded(x) @ p["w0"] + p["b0"][None]))
    return rounded(rounded(hidden) @ p["w1"] + p["b1"][None])


def train_torch(problem, make_optimizer):
    """Return after each step the parameters, the loss scale, the count and the steps skipped."""
    params = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in problem.start.items()}
    optimizer = make_optimizer(params.values())
    applied = []
    optimizer.register_step_post_hook(lambda *_: applied.append(1))

    def rounded(x):
        return x.half().to(x.dtype)

    history, moves = [], []
    for i, (x, y) in enumerate(zip(*map(torch.tensor, (problem.x, problem.y)), strict=True)):
        optimizer.zero_grad()
        loss = torch.mean((predict(params, x, rounded, torch.tanh) - y) ** 2)
        problem.scaler.scale(loss).backward()
        for name, param in params.items():
            param.grad += torch.tensor(problem.spoil[name][i])
        problem.scaler.step(optimizer)
        problem.scaler.update()
        history.append([params[n].detach().numpy().copy().ravel() for n in SHAPES])
        d = problem.scaler.state_dict()
        moves.append((d["scale"], d["_growth_tracker"], i + 1 - len(applied)))
    return np.stack([np.concatenate(each) for each in history]), np.array(moves)


def train_ours(problem, make_optimizer):
    """Return the same for the wrapper, with the same inputs as torch."""
    policy, start = from_grad_scaler(problem.scaler.state_dict())
    tx = ols.with_loss_scaling(make_optimizer(), policy)

    def rounded(x):
        return x.astype(jnp.float16).astype(x.dtype)

    def loss_fn(params, x, y):
        return jnp.mean((predict(params, x, rounded, jnp.tanh) - y) ** 2)

    def step(carry, given):
        params, state = carry
        x, y, spoil = given
        _, grads = ols.value_and_grad(loss_fn)(state, params, x, y)
        grads = jax.tree.map(jnp.add, grads, spoil)
        updates, state = tx.update(grads, state, params)  # torch never sees the loss
        params = optax.apply_updates(params, updates)
        s = state.loss_scale_state
        flat = jnp.concatenate([params[n].ravel() for n in SHAPES])
        return (params, state), (flat, (s.loss_scale, s.growth_count, s.total_skipped))

    params = jax.tree.map(jnp.asarray, problem.start)
    carry = params, tx.init(params)._replace(loss_scale_state=start)
    data = problem.x, problem.y, problem.spoil
    history, moves = jax.jit(lambda carry: jax.lax.scan(step, carry, data)[1])(carry)
    return np.asarray(history), np.stack([np.asarray(m, np.float64) for m in moves], axis=1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("x64")
def test_a_network_trains_as_in_torch(name, seed):
    in_torch, in_optax = OPTIMIZERS[name]
    problem = Problem(seed)
    ours, our_moves = train_ours(problem, in_optax)  # first: the scaler moves while torch trains
    theirs, their_moves = train_torch(problem, in_torch)
    np.testing.assert_array_equal(our_moves, their_moves)
    assert (np.abs(ours - theirs).max(1) / np.abs(theirs).max(1)).max() < TOLERANCE
    # Both kinds of steps occurred, and more steps overflowed than were made bad.
    assert len(set(their_moves[:, 0])) > 3
    assert their_moves[-1, 2] > len(problem.spoilt) + 5
    assert np.abs(theirs[-1] - theirs[0]).max() > 0.1
