"""The wrapper and the pure functions where people use them, without anything made for the place."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from plain_where import assert_same_bits

import optax_lossscale as ols

pytestmark = pytest.mark.integration

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
BAD = X.copy()
BAD[1, 1] = np.inf
FLAGS = False, True, True, False  # whether the batch is bad


def policy(growth_interval=2):
    return ols.DynamicLossScale(initial_scale=2.0**10, growth_interval=growth_interval)


def counted(fun):
    """Return `fun`, and a list that grows by one with each trace of it."""
    traces = []

    @functools.wraps(fun)
    def wrapper(*args):
        traces.append(None)
        return fun(*args)

    return wrapper, traces


# Flax's own TrainState.


def test_a_stock_train_state_takes_the_wrapper_as_it_is():
    model = nn.Dense(2)

    def step(state, x):
        def loss_fn(params):
            logits = state.apply_fn(params, x)
            return ols.scale_loss(jnp.mean(logits**2), state.opt_state)

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    step, traces = counted(step)
    step = jax.jit(step)
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), X),
        tx=ols.with_loss_scaling(optax.adam(0.1), policy()),
    )
    for n, bad in enumerate(FLAGS, start=1):
        before, state = state, step(state, BAD if bad else X)
        same = jax.tree.map(jnp.array_equal, before.params, state.params)
        assert set(map(bool, jax.tree.leaves(same))) == {bad}
        if bad:
            assert_same_bits(state.opt_state.inner_state, before.opt_state.inner_state)
        assert int(state.step) == n  # Flax counts every call
    assert int(ols.loss_scale_state(state).total_skipped) == 2
    assert int(optax.tree.get(state, "count")) == 2
    assert len(traces) == 1


# Flax NNX.


class Module(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 4, rngs=rngs, dtype=jnp.float16)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs, dtype=jnp.float16)

    def __call__(self, x):
        return self.norm(self.linear(x)).astype(jnp.float32)


def nnx_loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def nnx_step(model, optimizer, x):
    old = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    loss_and_grads = ols.value_and_grad(nnx_loss, transform=nnx.value_and_grad)
    loss, grads = loss_and_grads(optimizer.opt_state, model, x)
    optimizer.update(model, grads, value=loss)
    applied = ols.loss_scale_state(optimizer.opt_state).consecutive_skipped == 0
    new = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    nnx.update(model, ols.tree_where(applied, new, old))
    return loss


def test_nnx_skips_with_its_batch_statistics_in_one_trace():
    step, traces = counted(nnx_step)
    step = nnx.jit(step)
    model = Module()
    optimizer = nnx.Optimizer(
        model, ols.with_loss_scaling(optax.adam(0.1), policy()), wrt=nnx.Param
    )
    for bad in FLAGS:
        before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state((model, optimizer.opt_state))))
        step(model, optimizer, BAD if bad else X)
        after = nnx.to_pure_dict(nnx.state((model, optimizer.opt_state)))
        same = jax.tree.map(lambda a, b: bool((a == b).all()), before[0], after[0])
        # A bias before BatchNorm has a gradient that is nearly zero, and may round to it.
        assert same["linear"]["kernel"] is same["norm"]["mean"] is same["norm"]["var"] is bad
        assert not bad or all(jax.tree.leaves(same))
    scale_state = ols.loss_scale_state(optimizer.opt_state)
    assert (int(scale_state.total_skipped), int(scale_state.growth_count)) == (2, 1)
    assert int(optimizer.opt_state.inner_state[0].count[...]) == 2
    assert len(traces) == 1


def test_nnx_gradients_are_those_of_the_unscaled_loss():
    model = Module()
    loss, scaled = ols.value_and_grad(nnx_loss, transform=nnx.value_and_grad)(
        ols.init(policy()), model, X
    )
    expected_loss, expected = nnx.value_and_grad(nnx_loss)(model, X)
    assert float(loss) == float(expected_loss)
    grads, finite = ols.unscale_and_check(nnx.to_pure_dict(scaled), ols.init(policy()))
    assert finite
    close = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3)
    jax.tree.map(close, grads, nnx.to_pure_dict(expected))


def test_nnx_forwards_the_value():
    seen = []

    def update(updates, state, params=None, *, value):
        del params
        seen.append(float(value))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    model = Module()
    optimizer = nnx.Optimizer(model, ols.with_loss_scaling(inner, policy()), wrt=nnx.Param)
    loss = nnx_step(model, optimizer, X)
    assert seen == [float(loss)]
    loss = nnx_step(model, optimizer, BAD)  # the loss itself is bad: the factor stays
    assert float(ols.loss_scale_state(optimizer.opt_state).loss_scale) == 2.0**10
    assert not jnp.isfinite(loss)


# Equinox.


def test_equinox_leaves_what_is_no_array_alone():
    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    model = eqx.nn.MLP(3, 2, 4, depth=1, use_bias=False, key=jax.random.key(0))
    tx = ols.with_loss_scaling(optax.adam(0.1), policy())
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model, opt_state, x):
        loss_and_grads = ols.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)
        loss, grads = loss_and_grads(opt_state, model, x)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss, grads

    step, traces = counted(step)
    step = eqx.filter_jit(step)
    for bad in FLAGS:
        x = BAD if bad else X
        expected_loss = loss_fn(model, x)
        before = model
        model, opt_state, loss, grads = step(model, opt_state, x)
        assert grads.layers[0].bias is None
        assert grads.activation is None
        assert bool(eqx.tree_equal(before, model)) is bad
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert int(ols.loss_scale_state(opt_state).total_skipped) == 2
    assert len(traces) == 1


# Several losses.


def normal(seed, shape=()):
    return jax.random.normal(jax.random.key(seed), shape)


def gan_scores(d, x):
    return x.astype(jnp.float16) * d[0].astype(jnp.float16) + d[1].astype(jnp.float16)


def generate(g, noise):
    return noise @ g["w"] + g["b"]


def loss_d(d, g, noise, real):
    real_scores, fake_scores = (
        gan_scores(d, x).astype(jnp.float32) for x in (real, generate(g, noise))
    )
    return jnp.mean(jax.nn.softplus(-real_scores)) + jnp.mean(jax.nn.softplus(fake_scores))


def loss_g(g, d, noise):
    return jnp.mean(jax.nn.softplus(-gan_scores(d, generate(g, noise)).astype(jnp.float32)))


def test_two_networks_with_a_loss_each_have_a_factor_each():
    """A small GAN: one network's overflow neither skips the other nor moves its factor."""
    tx = {name: ols.with_loss_scaling(optax.adam(0.05), policy(4)) for name in ("g", "d")}
    params = {"g": {"w": normal(0, (2,)), "b": normal(1)}, "d": normal(2, (2,))}
    opt_state = {name: tx[name].init(params[name]) for name in tx}

    @jax.jit
    def step(params, opt_state, noise, real):
        losses = {
            "d": (loss_d, (params["g"], noise, real)),
            "g": (loss_g, (params["d"], noise)),
        }
        new_params, new_state = {}, {}
        for name, (loss_fn, args) in losses.items():
            loss, grads = ols.value_and_grad(loss_fn)(opt_state[name], params[name], *args)
            updates, new_state[name] = tx[name].update(
                grads, opt_state[name], params[name], value=loss
            )
            new_params[name] = optax.apply_updates(params[name], updates)
        return new_params, new_state

    for n in range(12):
        noise, real = normal(n, (8, 2)), 3 + normal(100 + n, (8,))
        # Too large for the gradient in float16, and only the discriminator sees it.
        real = real.at[0].set(-60000.0) if n == 6 else real
        before = params, opt_state
        params, opt_state = step(params, opt_state, noise, real)
        skipped = {
            name: bool(ols.loss_scale_state(opt_state[name]).consecutive_skipped) for name in tx
        }
        assert skipped == {"g": False, "d": n == 6}
        if n == 6:
            assert_same_bits(params["d"], before[0]["d"])
            assert_same_bits(opt_state["d"].inner_state, before[1]["d"].inner_state)
    scales = {name: float(ols.loss_scale_state(opt_state[name]).loss_scale) for name in tx}
    assert scales == {"g": 2.0**13, "d": 2.0**11}  # d: grown, halved, grown
    with pytest.raises(ValueError, match="exactly one LossScaleState, got 2"):
        ols.scale_loss(jnp.float32(1), opt_state)


def test_two_optimizers_share_one_loss_and_one_factor():
    inner = {"body": optax.sgd(0.5), "head": optax.adam(0.1)}
    params = {"body": jnp.float32(1), "head": jnp.float32(2)}
    scale_state = ols.init(policy())
    states = {name: inner[name].init(params[name]) for name in inner}

    @jax.jit
    def step(params, states, scale_state, x):
        def loss_fn(params):
            return params["body"] * x["body"] + params["head"] * x["head"]

        _, grads = ols.value_and_grad(loss_fn)(scale_state, params)
        grads, finite = ols.unscale_and_check(grads, scale_state)
        new_params, new_states = {}, {}
        for name, tx in inner.items():
            updates, new_states[name] = tx.update(grads[name], states[name], params[name])
            new_params[name] = optax.apply_updates(params[name], updates)
        kept = ols.tree_where(finite, (new_params, new_states), (params, states))
        return *kept, ols.update(scale_state, finite, policy())

    history = []
    for x in (1.0, jnp.inf, 1.0):
        before = params, states
        params, states, scale_state = step(
            params, states, scale_state, {"body": jnp.float32(1), "head": jnp.float32(x)}
        )
        if x == jnp.inf:  # the head's alone, and yet neither moves
            assert_same_bits((params, states), before)
        history.append(float(scale_state.loss_scale))
    assert history == [2.0**10, 2.0**9, 2.0**9]
    assert float(params["body"]) == 1 - 2 * 0.5
    assert float(params["head"]) == pytest.approx(2 - 2 * 0.1)


def test_one_wrapper_around_a_partition_is_the_same_in_fewer_words():
    tx = ols.with_loss_scaling(
        optax.partition({"a": optax.sgd(0.5), "b": optax.adam(0.1)}, {"body": "a", "head": "b"}),
        policy(),
    )
    params = {"body": jnp.float32(1), "head": jnp.float32(2)}
    state = tx.init(params)
    for x in (1.0, jnp.inf, 1.0):
        grads = jax.tree.map(
            lambda g, s=state: g * ols.loss_scale_state(s).loss_scale,
            {"body": jnp.float32(1), "head": jnp.float32(x)},
        )
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert float(params["body"]) == 1 - 2 * 0.5
    assert float(params["head"]) == pytest.approx(2 - 2 * 0.1)


# Gradient accumulation.


def accumulate(tx, values):
    """Return the parameter and the factor after each micro-step."""
    w = jnp.float32(0)
    state = tx.init(w)
    history = []
    for value in values:
        updates, state = tx.update(value * ols.loss_scale_state(state).loss_scale, state, w)
        w = optax.apply_updates(w, updates)
        history.append((float(w), float(ols.loss_scale_state(state).loss_scale)))
    return history


def test_multi_steps_inside_drops_the_bad_micro_batch_alone():
    tx = ols.with_loss_scaling(optax.MultiSteps(optax.sgd(1.0), 2), policy(10))
    assert accumulate(tx, [1.0, jnp.inf, 3.0, 5.0, 7.0]) == [
        (0, 1024),
        (0, 512),
        (-2, 512),
        (-2, 512),
        (-8, 512),
    ]


def test_multi_steps_outside_is_poisoned_for_ever():
    inner = ols.with_loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(initial_scale=8))
    tx = optax.MultiSteps(inner, 2).gradient_transformation()
    history = accumulate(tx, [1.0, jnp.inf] + [1.0] * 8)
    assert [w for w, _ in history] == [0.0] * 10  # nothing is learned any more
    assert [scale for _, scale in history] == [8, 4, 4, 2, 2, 1, 1, 1, 1, 1]


def test_multi_steps_that_skips_by_itself_hides_the_overflow_from_the_factor():
    inner = ols.with_loss_scaling(optax.sgd(1.0), policy(10))
    tx = optax.MultiSteps(inner, 2, should_skip_update_fn=optax.skip_not_finite)
    history = accumulate(tx.gradient_transformation(), [jnp.inf] * 4)
    assert [scale for _, scale in history] == [1024] * 4


@pytest.mark.parametrize("bad", [None, 0, 3])
def test_a_whole_window_is_checked_once_and_moves_the_factor_once(bad):
    values = jnp.arange(1.0, 5.0)
    values = values if bad is None else values.at[bad].set(jnp.inf)
    state = ols.init(policy(1))

    def micro_step(total, x):
        _, grads = ols.value_and_grad(lambda w: w * x)(state, jnp.float32(0))
        return total + grads, None

    total, _ = jax.lax.scan(micro_step, jnp.float32(0), values)
    grads, finite = ols.unscale_and_check(total, state)
    after = ols.update(state, finite, policy(1))
    assert bool(finite) is (bad is None)
    assert float(after.loss_scale) == (2.0**11 if bad is None else 2.0**9)
    assert bad is not None or float(grads) == 10
