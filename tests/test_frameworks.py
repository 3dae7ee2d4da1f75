"""Flax's own `TrainState` and `nnx.Optimizer` with the wrapper, without special integrations."""

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


@pytest.mark.parametrize(
    ("framework", "loss_scale"),
    [
        (stock_train_state, 2.0**8),  # it cannot pass `value`, so both count as overflows
        (nnx_optimizer, 2.0**9),  # the first loss that is NaN is forgiven
    ],
)
def test_a_framework_skips_in_one_trace(framework, loss_scale):
    def arrays(carry):
        leaves = jax.tree.leaves(nnx.state(carry) if framework is nnx_optimizer else carry)
        return [np.array(x) for x in leaves if np.ndim(x)]

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
