"""Optimistix, whose solvers make pytrees of the functions and optimizers that they are given.

`make oracles` installs it and runs this.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest

import optax_lossscale as ols

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("_defaults")]

X, Y = jax.random.normal(jax.random.key(0), (2, 64, 16))
START = {"w": jnp.zeros((16, 16))}


def loss_fn(params, args):
    x, y = args
    return jnp.mean((x @ params["w"] - y) ** 2)


def minimum(fun, solver, steps):
    found = optx.minimise(fun, solver, START, args=(X, Y), max_steps=steps, throw=False)
    return float(loss_fn(found.value, (X, Y)))


FUNCTIONS = {
    "autocast": ols.autocast(loss_fn, jnp.bfloat16),
    "scale_inside": ols.scale_inside(ols.autocast(loss_fn, jnp.float16), 2.0**10),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfgs_minimises_a_function_in_half_precision(name):
    solver = optx.BFGS(rtol=1e-3, atol=1e-3)
    exact = minimum(loss_fn, solver, 64)
    assert exact < loss_fn(START, (X, Y)) - 0.1
    np.testing.assert_allclose(minimum(FUNCTIONS[name], solver, 64), exact, rtol=0.03)


OPTIMIZERS = {
    "with_skipping": ols.with_skipping,
    "a rule": lambda tx: ols.with_skipping(tx, [ols.Spike("grad_norm")]),
    "with_master_weights": ols.with_master_weights,
    "with_bfloat16_state": ols.with_bfloat16_state,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_minimiser_takes_an_optimizer_and_a_function_in_half_precision(name):
    losses = [
        minimum(fun, optx.OptaxMinimiser(tx, rtol=1e-3, atol=1e-3), 200)
        for fun, tx in (
            (loss_fn, optax.adam(1e-2)),
            (FUNCTIONS["autocast"], OPTIMIZERS[name](optax.adam(1e-2))),
        )
    ]
    assert losses[0] < loss_fn(START, (X, Y)) - 0.1
    np.testing.assert_allclose(*losses, rtol=0.03)
