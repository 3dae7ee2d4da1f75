"""The settings of JAX that change the meaning of programs, each on and shown to be on.

`run` trains in float16, with steps whose gradients overflow, one whose gradients are NaN and one
whose loss is NaN. With each setting, the results must be bitwise the same as without it. Explicit
mesh axes are in `test_distributed.py`, and XLA's own settings in `test_fast_math.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_where import assert_same_bits

import optax_lossscale as ols

BAD = [2, 3, 5, 7]
X, WEIGHTS = np.ones((2, 12), np.float32)
WEIGHTS[BAD[:2]] = 1e6  # the gradient is infinite in float16, the loss is not
X[5] = np.inf  # the gradient is NaN, the loss is not
WEIGHTS[7] = np.nan
POLICY = ols.DynamicLossScale(2.0**8, growth_interval=3)
TX = ols.with_loss_scaling(optax.chain(optax.trace(0.9), optax.sgd(2.0**-6)), POLICY)


# Already on the device: under some settings, moving NaN there is itself an error.


@pytest.fixture(scope="module", autouse=True)
def batches():
    return list(zip(jnp.float16(X), jnp.asarray(WEIGHTS), strict=True))


@pytest.fixture(scope="module", autouse=True)
def bad_grads():
    return jnp.float32([np.nan, np.inf, -np.inf, 1])


@pytest.fixture(scope="module", autouse=True)
def bad_loss():
    return jnp.float32([np.nan, np.inf])


@pytest.fixture(scope="module", autouse=True)
def not_a_number():
    return jnp.float32(np.nan)


def initial():
    params = jnp.linspace(-1, 1, 4)
    return params, TX.init(params)


def loss_fn(params, x, weight):
    hidden = params.astype(jnp.float16) * x
    return weight * jnp.mean(jnp.tanh(hidden.astype(jnp.float32) / 8))


def step(params, opt_state, x, weight):
    loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x, weight)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def run(batches, compiled=None, start=None):
    """Train, and return the parameters and states after each step."""
    compiled = compiled or jax.jit(step)
    params, opt_state = start or initial()
    history = []
    for x, weight in batches:
        params, opt_state = compiled(params, opt_state, x, weight)
        history.append((params, opt_state))
    return jax.device_get(history)


def scale_states(history):
    return [opt_state.loss_scale_state for _, opt_state in history]


@pytest.fixture(scope="module")
def expected(batches):
    """Return a run that skips what is bad, and whose loss scale moves both ways."""
    history = run(batches)
    counts = [state.total_skipped for state in scale_states(history)]
    assert np.flatnonzero(np.diff([0, *counts])).tolist() == BAD
    moves = np.diff([state.loss_scale for state in scale_states(history)])
    assert min(moves) < 0 < max(moves)
    return history


@pytest.mark.slow
def test_promotion_and_what_the_package_does_not_read_change_no_bit(batches, expected):
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision("highest"),
        jax.threefry_partitionable(False),
        jax.default_prng_impl("rbg"),
    ):
        assert_same_bits(run(batches), expected)


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
def test_a_compiled_step_skips_and_raises_nothing(batches, expected):
    """JAX checks only the outputs of a compiled program, and these are finite."""
    assert_same_bits(run(batches), expected)


BY_NORM = ols.with_skipping(optax.sgd(1.0), ols.Spike("grad_norm"))


@pytest.mark.slow
@pytest.mark.usefixtures("debugger")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("tx", [TX, BY_NORM], ids=["loss scaling", "a rule"])
def test_an_update_with_bad_gradients_and_loss_skips_and_raises_nothing(
    tx, transform, bad_grads, bad_loss
):
    params, _ = initial()
    before = tx.init(params)
    updates, after = transform(tx.update)(bad_grads, before, params, value=bad_loss)
    assert int(after.loss_scale_state.consecutive_skipped) == 1
    assert_same_bits(after.inner_state, before.inner_state)
    assert_same_bits(updates, np.full_like(params, -0.0))


def difference(grads, _, other):
    return jnp.sum(grads**2) - jnp.sum(grads**2) > other


@pytest.mark.slow
@pytest.mark.usefixtures("debugger")
@pytest.mark.parametrize("rule", [ols.Spike("grad_norm"), ols.Spike("other"), difference])
def test_a_measure_of_finite_gradients_may_overflow_or_be_nan(rule, not_a_number):
    grads = jnp.full(2, 1e30)
    tx = ols.with_skipping(optax.sgd(1.0), rule)
    _, state = tx.update(grads, tx.init(grads), other=not_a_number)
    assert ols.applied(state) == (rule is difference)


@pytest.mark.usefixtures("debugger")
def test_a_function_that_returns_the_bad_numbers_raises_if_compiled(bad_grads):
    """`unscale_and_check` cannot know whether its caller reads the flag.

    In eager execution it raises nothing, because it switches the setting off for its own work.
    """
    _, opt_state = initial()
    _, finite = ols.unscale_and_check(bad_grads, opt_state)
    assert not finite
    with pytest.raises(FloatingPointError):
        jax.jit(ols.unscale_and_check)(bad_grads, opt_state)


@pytest.mark.slow
def test_no_tracer_is_kept(batches):
    kept = []
    start = initial()
    with jax.checking_leaks():
        with pytest.raises(Exception, match="Leaked"):
            jax.eval_shape(jax.jit(lambda x: kept.append(x * 2) or x), jnp.ones(3))
        for transform in (jax.jit, jax.checkpoint):
            jax.eval_shape(transform(step), *start, *batches[0])


@pytest.mark.slow
def test_a_compiled_step_transfers_nothing(batches, expected):
    start, compiled, metrics = initial(), jax.jit(step), jax.jit(ols.diagnostics.metrics)
    compiled(*start, *batches[0])
    metrics(start[1])
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.ones(3) + np.ones(3, np.float32)
        assert_same_bits(run(batches, compiled, start), expected)
        metrics(start[1])
        jax.jit(TX.init)(start[0])
        # Users call it on the host, so its transfers are intended.
        ols.diagnostics.check_health(start[1])


@pytest.mark.slow
def test_without_compilation_the_same_steps_are_skipped(batches, expected):
    with jax.disable_jit():
        seen = []
        jax.jit(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or x)(jnp.ones(3))
        assert seen == [False]
        history = run(batches)
        assert not ols.all_finite(jnp.float32([1, np.nan]))
    assert_same_bits(scale_states(history), scale_states(expected))
    params, wanted = ([params for params, _ in run] for run in (history, expected))
    np.testing.assert_allclose(params, wanted, rtol=1e-2, atol=1e-4)
