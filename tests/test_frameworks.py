"""The wrapper and the pure functions in other frameworks, without special integrations.

The documents run more: BatchNorm, two losses with an optimizer each, a partition, several losses in
one step, and accumulation over a window.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import optax_lossscale as ols

pytestmark = [pytest.mark.integration, pytest.mark.slow]

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
BAD = X.copy()
BAD[1, 1] = np.inf  # the loss itself is NaN
TX = ols.with_loss_scaling(optax.adam(0.1), ols.DynamicLossScale(2.0**10, growth_interval=2))


# Each returns a step, its initial state, and a function that finds the optimizer's state.


def stock_train_state(traces):
    @jax.jit
    def step(state, x):
        def loss_fn(params):
            loss = jnp.mean(state.apply_fn(params, x) ** 2)
            return ols.scale_loss(loss, state.opt_state)

        traces.append(1)
        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    model = nn.Dense(2)
    params = model.init(jax.random.key(0), X)
    create = train_state.TrainState.create
    return step, create(apply_fn=model.apply, params=params, tx=TX), lambda state: state.opt_state


def nnx_optimizer(traces):
    @nnx.jit
    def update(model, optimizer, x):
        traces.append(1)
        loss_and_grads = ols.value_and_grad(
            lambda model: jnp.mean(model(x) ** 2), transform=nnx.value_and_grad
        )
        loss, grads = loss_and_grads(optimizer.opt_state, model)
        optimizer.update(model, grads, value=loss)

    def step(graph, x):
        update(*graph, x)
        return graph

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    return step, (model, optimizer), lambda graph: graph[1].opt_state


def equinox_module(traces):
    @eqx.filter_jit
    def step(carry, x):
        def loss_fn(model):
            return jnp.mean(jax.vmap(model)(x) ** 2)

        traces.append(1)
        model, opt_state = carry
        loss_and_grads = ols.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)
        loss, grads = loss_and_grads(opt_state, model)
        assert grads.layers[0].bias is None
        assert grads.activation is None
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = TX.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(model, updates), opt_state

    model = eqx.nn.MLP(3, 2, 4, depth=1, use_bias=False, key=jax.random.key(0))
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, opt_state), lambda carry: carry[1]


@pytest.mark.parametrize(
    ("framework", "loss_scale"),
    [
        (stock_train_state, 2.0**8),  # it cannot pass `value`, so both count as overflows
        (nnx_optimizer, 2.0**9),  # the first loss that is NaN is forgiven
        (equinox_module, 2.0**9),
    ],
)
def test_a_framework_skips_in_one_trace(framework, loss_scale):
    def arrays(carry):
        leaves = jax.tree.leaves(nnx.state(carry) if framework is nnx_optimizer else carry)
        return [np.array(x) for x in leaves if eqx.is_inexact_array(x) and x.ndim]

    traces = []
    step, carry, opt_state_of = framework(traces)
    for bad in (False, True, True, False):
        before = arrays(carry)
        carry = step(carry, BAD if bad else X)
        same = jax.tree.map(np.array_equal, before, arrays(carry))
        assert all(same) is bad
    state = ols.loss_scale_state(opt_state_of(carry))
    assert [int(n) for n in state] == [loss_scale, 1, state.overflow_count, 0, 2]
    assert int(optax.tree.get(opt_state_of(carry), "count")[...]) == 2
    assert len(traces) == 1


SGD = optax.sgd(1.0)
WRAPPED = ols.with_loss_scaling(SGD, ols.DynamicLossScale(8))


@pytest.mark.parametrize(
    ("tx", "grads", "params", "loss_scales"),
    [
        # Only the bad micro-batch is dropped.
        (
            ols.with_loss_scaling(optax.MultiSteps(SGD, 2), ols.DynamicLossScale(8)),
            [1, np.inf, 3, 5, 7],
            [0, 0, -2, -2, -8],
            [8, 4, 4, 4, 4],
        ),
        # Training no longer learns.
        (
            optax.MultiSteps(WRAPPED, 2).gradient_transformation(),
            [1, np.inf, 1, 1, 1, 1, 1, 1],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [8, 4, 4, 2, 2, 1, 1, 1],
        ),
        # The overflow is hidden from the policy.
        (
            optax.MultiSteps(
                WRAPPED, 2, should_skip_update_fn=optax.skip_not_finite
            ).gradient_transformation(),
            [np.inf, np.inf, np.inf],
            [0, 0, 0],
            [8, 8, 8],
        ),
    ],
    ids=["inside", "outside", "outside, and skipping by itself"],
)
def test_accumulation_goes_inside_the_wrapper(tx, grads, params, loss_scales):
    def step(carry, grad):
        w, state = carry
        updates, state = tx.update(grad * ols.loss_scale_state(state).loss_scale, state, w)
        w = optax.apply_updates(w, updates)
        return (w, state), (w, ols.loss_scale_state(state).loss_scale)

    w = jnp.float32(0)
    _, history = jax.lax.scan(step, (w, tx.init(w)), jnp.array(grads, jnp.float32))
    assert [x.tolist() for x in history] == [params, loss_scales]
