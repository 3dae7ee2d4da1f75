"""The same network trained in torch with its GradScaler and here, from one start on one data set.

In float32 nothing overflows by itself, so random steps are spoilt. In float16 every activation and
every gradient on its way back is rounded to float16, and most overflows come from the scale itself:
what one step does to the scale decides which later steps overflow. There the rest is float64, so
that the two libraries round to the same float16 although they add up in another order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import optax_lossscale as ols
from optax_lossscale import interop

pytestmark = pytest.mark.integration

SEEDS = range(6)
STEPS, BATCH, WIDTHS = 150, 16, (5, 12, 3)
NAMES = ("b0", "b1", "w0", "w1")
OPTIMIZERS = {
    "sgd": (
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        lambda: optax.sgd(0.05, momentum=0.9),
    ),
    "adam": (
        lambda params: torch.optim.Adam(params, lr=0.02),
        lambda: optax.adam(0.02),
    ),
}
# How far the parameters may lie apart at any step, relative to the largest of them. A float32 has a
# relative error of 2**-24; sums of 16 products in another order, over 150 steps that the momentum
# averages, leave a few times ten of them. Optax computes Adam's 1 - 0.999**t in float32, whose
# first value, 0.001, is known to 2**-24 / 0.001 = 6e-5 alone; the step takes its square root, which
# halves that. In float64 both have room.
TOLERANCES = {
    ("float32", "sgd"): 2**-24 * 40,
    ("float32", "adam"): 3e-5,
    ("float16", "sgd"): 2**-53 * 40,
    ("float16", "adam"): 2**-53 * 40,
}


class Problem:
    """The network's start, its data, which gradients are spoilt, and the scaler's numbers."""

    def __init__(self, kind, seed):
        rng = np.random.default_rng(seed)
        self.half = kind == "float16"
        dtype = np.float64 if self.half else np.float32
        shapes = {"w0": WIDTHS[:2], "b0": WIDTHS[1:2], "w1": WIDTHS[1:], "b1": WIDTHS[2:]}
        self.start = {n: (rng.normal(size=shapes[n]) / 2).astype(dtype) for n in NAMES}
        self.x = rng.normal(size=(STEPS, BATCH, WIDTHS[0])).astype(dtype)
        teacher = rng.normal(size=(WIDTHS[0], WIDTHS[-1]))
        self.y = np.sin(self.x @ teacher).astype(dtype)
        # Added to one entry of one gradient.
        self.spoil = {n: np.zeros((STEPS, *shapes[n]), dtype) for n in NAMES}
        for step in np.flatnonzero(rng.random(STEPS) < (0.05 if self.half else 0.15)):
            array = self.spoil[rng.choice(NAMES)][step]
            array.flat[rng.integers(array.size)] = rng.choice([np.inf, -np.inf, np.nan])
        self.spoilt = sum(~np.isfinite(a).reshape(STEPS, -1).all(1) for a in self.spoil.values())
        self.scaler = torch.amp.GradScaler(
            device="cpu",
            # In float16 far too high, and soon too high again.
            init_scale=2.0 ** rng.integers(20, 24) if self.half else 2.0 ** rng.integers(4, 12),
            growth_factor=2.0 ** rng.integers(1, 3),
            backoff_factor=0.5 ** rng.integers(1, 3),
            growth_interval=int(rng.integers(2, 7)),
        )


def train_torch(problem, make_optimizer):
    """Return after each step the parameters, the factor, the count and the steps applied."""
    params = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in problem.start.items()}
    optimizer = make_optimizer(params.values())
    applied = []
    optimizer.register_step_post_hook(lambda *_: applied.append(1))
    scaler = problem.scaler

    def rounded(x):
        return x.half().to(x.dtype) if problem.half else x

    after = []
    for i, (x, y) in enumerate(zip(problem.x, problem.y, strict=True)):
        optimizer.zero_grad()
        p = {n: rounded(v) for n, v in params.items()}
        hidden = torch.tanh(rounded(rounded(torch.tensor(x)) @ p["w0"] + p["b0"]))
        predicted = rounded(rounded(hidden) @ p["w1"] + p["b1"])
        scaler.scale(torch.mean((predicted - torch.tensor(y)) ** 2)).backward()
        for name, param in params.items():
            param.grad += torch.tensor(problem.spoil[name][i])
        scaler.step(optimizer)
        scaler.update()
        now = {n: v.detach().numpy().copy() for n, v in params.items()}
        d = scaler.state_dict()
        after.append((now, d["scale"], d["_growth_tracker"], len(applied)))
    return after


def train_ours(problem, make_optimizer):
    """Return the same of the wrapper, told nothing but what torch is told."""
    policy, start = interop.from_torch_state_dict(problem.scaler.state_dict())
    tx = ols.with_loss_scaling(make_optimizer(), policy)

    def rounded(x):
        return x.astype(jnp.float16).astype(x.dtype) if problem.half else x

    def loss_fn(params, x, y):
        p = {n: rounded(v) for n, v in params.items()}
        hidden = jnp.tanh(rounded(rounded(x) @ p["w0"] + p["b0"][None]))
        predicted = rounded(rounded(hidden) @ p["w1"] + p["b1"][None])
        return jnp.mean((predicted - y) ** 2)

    def step(carry, given):
        params, state = carry
        x, y, spoil = given
        _, grads = ols.value_and_grad(loss_fn)(state, params, x, y)
        grads = jax.tree.map(jnp.add, grads, spoil)
        updates, state = tx.update(grads, state, params)  # torch never sees the loss
        params = optax.apply_updates(params, updates)
        return (params, state), (params, state.loss_scale_state)

    params = jax.tree.map(jnp.asarray, problem.start)
    carry = params, tx.init(params)._replace(loss_scale_state=start)
    data = problem.x, problem.y, problem.spoil
    params, states = jax.jit(lambda carry: jax.lax.scan(step, carry, data)[1])(carry)
    counts = np.arange(1, STEPS + 1) - states.total_skipped
    return [
        ({n: np.asarray(v[i]) for n, v in params.items()}, *map(float, rest))
        for i, rest in enumerate(zip(states.loss_scale, states.growth_count, counts, strict=True))
    ]


def furthest(theirs, ours):
    """Return how far apart two histories of parameters are, relative to the largest of them."""
    apart = 0.0
    for their, our in zip(theirs, ours, strict=True):
        largest = max(np.abs(v).max() for v in their[0].values())
        apart = max(apart, *(np.abs(their[0][n] - our[0][n]).max() / largest for n in NAMES))
    return apart


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_network_trains_as_in_torch(kind, name, seed, request):
    if kind == "float16":
        request.getfixturevalue("x64")
    in_torch, in_optax = OPTIMIZERS[name]
    problem = Problem(kind, seed)
    ours = train_ours(problem, in_optax)  # first: the scaler moves while torch trains
    theirs = train_torch(problem, in_torch)

    assert [step[1:] for step in ours] == [step[1:] for step in theirs]
    assert furthest(theirs, ours) < TOLERANCES[kind, name]
    # It was a training, with steps of both kinds, and more overflows than were made in float16.
    skipped = STEPS - theirs[-1][-1]
    assert len({step[1] for step in theirs}) > 3
    if kind == "float16":
        assert skipped > problem.spoilt.sum() + 5
    else:
        assert skipped == problem.spoilt.sum() > 5
    assert np.abs(theirs[-1][0]["w0"] - problem.start["w0"]).max() > 0.1


def test_a_step_that_torch_skips_and_we_do_not_would_be_seen():
    problem = Problem("float32", 0)
    ours = train_ours(problem, OPTIMIZERS["sgd"][1])
    for spoil in problem.spoil.values():
        spoil[np.flatnonzero(problem.spoilt)[0]] = 0
    theirs = train_torch(problem, OPTIMIZERS["sgd"][0])
    assert furthest(theirs, ours) > 100 * TOLERANCES["float32", "sgd"]
