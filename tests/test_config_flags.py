"""The settings of JAX that change the meaning of programs, each on and shown to be on.

`run` trains in float16, with steps whose gradients overflow, one whose gradients are NaN and one
whose loss is NaN. With each setting, the results must be bitwise the same as without it. Explicit
mesh axes are in `test_distributed.py`, and XLA's own settings in `test_fast_math.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_where import assert_same_bits

import optax_lossscale as ols

STEPS = 12
OVERFLOWS, NAN_GRADS, NAN_LOSS = (2, 3), 5, 7
BAD = sorted([*OVERFLOWS, NAN_GRADS, NAN_LOSS])
POLICY = ols.DynamicLossScale(2.0**8, growth_interval=3)
TX = ols.with_loss_scaling(optax.chain(optax.trace(0.9), optax.sgd(2.0**-6)), POLICY)


def initial():
    params = {"w": jnp.linspace(-1, 1, 16, dtype=jnp.float32).reshape(4, 4), "b": jnp.ones(4)}
    return params, TX.init(params)


def batches():
    x = np.random.default_rng(0).normal(size=(STEPS, 8, 4)).astype(np.float16)
    weight = np.ones(STEPS, np.float32)
    weight[list(OVERFLOWS)] = 1e6  # the gradient is infinite in float16, the loss is not
    x[OVERFLOWS, :] = abs(x[OVERFLOWS, :])  # no difference of infinities, which is NaN
    x[NAN_GRADS, 0, 0] = np.inf
    weight[NAN_LOSS] = np.nan
    return list(zip(map(jnp.asarray, x), map(jnp.asarray, weight), strict=True))


# Already on the device: under some settings, moving NaN there is itself an error.
BATCHES = batches()
BAD_LOSS = jnp.float32([np.nan, np.inf])
BAD_GRADS = {"w": jnp.full((4, 4), np.nan), "b": jnp.full(4, np.inf)}


def loss_fn(params, x, weight):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = x @ half["w"] + half["b"][None]
    return weight * jnp.mean(jnp.tanh(hidden.astype(jnp.float32) / 8))


def step(params, opt_state, x, weight):
    loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x, weight)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def run(step=None, start=None, steps=STEPS):
    """Train, and return the parameters and states after each step."""
    step = step or jax.jit(globals()["step"])
    params, opt_state = start or initial()
    history = []
    for x, weight in BATCHES[:steps]:
        params, opt_state = step(params, opt_state, x, weight)
        history.append((params, opt_state))
    return jax.device_get(history)


def scale_states(history):
    return [opt_state.loss_scale_state for _, opt_state in history]


@pytest.fixture(scope="module")
def expected():
    """Return a run that skips what is bad, and whose loss scale moves both ways."""
    history = run()
    counts = [state.total_skipped for state in scale_states(history)]
    assert np.flatnonzero(np.diff([0, *counts])).tolist() == BAD
    moves = np.diff([state.loss_scale for state in scale_states(history)])
    assert min(moves) < 0 < max(moves)
    return history


@pytest.mark.slow
def test_promotion_and_what_the_package_does_not_read_change_no_bit(expected):
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision("highest"),
        jax.threefry_partitionable(False),
        jax.default_prng_impl("rbg"),
    ):
        assert_same_bits(run(), expected)


@pytest.fixture(params=["nans", "infs"])
def debugger(request):
    """Each of the two settings, shown to be on."""
    nans = request.param == "nans"
    with (jax.debug_nans if nans else jax.debug_infs)(True):
        with pytest.raises(FloatingPointError):
            jax.jit(lambda x: x * 2)(jnp.float32(np.nan if nans else np.inf))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("debugger")
def test_a_compiled_step_skips_and_raises_nothing(expected):
    """JAX checks only the outputs of a compiled program, and these are finite."""
    assert_same_bits(run(), expected)


BY_NORM = ols.skip_if(optax.sgd(1.0), ols.Spike("grad_norm"))


@pytest.mark.slow
@pytest.mark.usefixtures("debugger")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("tx", [TX, BY_NORM], ids=["loss scaling", "a rule"])
def test_an_update_with_bad_gradients_and_loss_skips_and_raises_nothing(tx, transform):
    params, _ = initial()
    before = tx.init(params)
    updates, after = transform(tx.update)(BAD_GRADS, before, params, value=BAD_LOSS)
    assert int(after.loss_scale_state.consecutive_skipped) == 1
    assert_same_bits(after.inner_state, before.inner_state)
    assert_same_bits(updates, jax.tree.map(lambda p: np.full_like(p, -0.0), params))


def difference(grads, _):
    return jnp.sum(grads["w"] ** 2) - jnp.sum(grads["w"] ** 2) > 0


@pytest.mark.usefixtures("debugger")
@pytest.mark.parametrize("rule", [ols.Spike("grad_norm"), difference], ids=["norm", "difference"])
def test_a_measure_of_finite_gradients_may_overflow(rule):
    grads = {"w": jnp.full(2, 1e30)}
    tx = ols.skip_if(optax.sgd(1.0), rule)
    _, state = tx.update(grads, tx.init(grads))
    assert ols.applied(state) == (rule is difference)


@pytest.mark.usefixtures("debugger")
def test_a_function_that_returns_the_bad_numbers_raises_if_compiled():
    """`unscale_and_check` cannot know whether its caller reads the flag.

    In eager execution it raises nothing, because it switches the setting off for its own work.
    """
    _, opt_state = initial()
    _, finite = ols.unscale_and_check(BAD_GRADS, opt_state)
    assert not finite
    with pytest.raises(FloatingPointError):
        jax.jit(ols.unscale_and_check)(BAD_GRADS, opt_state)


@pytest.mark.slow
def test_no_tracer_is_kept():
    kept = []
    start = initial()
    with jax.checking_leaks():
        with pytest.raises(Exception, match="Leaked"):
            jax.eval_shape(jax.jit(lambda x: kept.append(x * 2) or x), jnp.ones(3))
        for transform in (jax.jit, jax.checkpoint):
            jax.eval_shape(transform(step), *start, *BATCHES[0])


@pytest.mark.slow
def test_a_compiled_step_transfers_nothing(expected):
    start, compiled, metrics = initial(), jax.jit(step), jax.jit(ols.diagnostics.metrics)
    compiled(*start, *BATCHES[0])
    metrics(start[1])
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.ones(3) + np.ones(3, np.float32)
        assert_same_bits(run(compiled, start), expected)
        metrics(start[1])
        jax.jit(TX.init)(start[0])
        # Users call it on the host, so its transfers are intended.
        ols.diagnostics.check_health(start[1])


@pytest.mark.slow
def test_without_compilation_the_same_steps_are_skipped(expected):
    with jax.disable_jit():
        seen = []
        jax.jit(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or x)(jnp.ones(3))
        assert seen == [False]
        history = run(steps=8)
        assert not ols.all_finite(jnp.float32([1, np.nan]))
    assert_same_bits(scale_states(history), scale_states(expected[:8]))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-4)
    jax.tree.map(close, [params for params, _ in history], [params for params, _ in expected[:8]])
