"""The first training step of a process is traced and compiled once.

JAX 0.12 discards a trace during which a primitive is registered or a part of JAX is imported.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import jax, jax.numpy as jnp, optax
import optax_lossscale as ols

jax.config.update("jax_platforms", "cpu")
tx = {optimizer}
params = {{"w": jnp.ones((5, 3), jnp.bfloat16)}}
opt_state = tx.init(params)
seen = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.append(event))

def loss_fn(params):
    return jnp.sum(params["w"].astype(jnp.float32) ** 2)

@jax.jit
def train_step(params, opt_state):
    seen.append("trace")
    loss, grads = ols.value_and_grad(ols.autocast(loss_fn, jnp.bfloat16))(opt_state, params)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state

for _ in range(3):
    params, opt_state = train_step(params, opt_state)
print(seen.count("trace"), seen.count("/jax/core/compile/backend_compile_duration"))
"""
MASTERS = "ols.with_master_weights(optax.adamw(1e-2), remainders=True)"
SKIPPING = f"ols.with_skipping({MASTERS}, ols.Spike())"
SCALING = f"ols.with_loss_scaling({MASTERS})"


@pytest.mark.parametrize(
    "optimizer", [SKIPPING, pytest.param(SCALING, marks=pytest.mark.exhaustive)]
)
def test_the_first_step_of_a_process_is_compiled_once(optimizer):
    command = [sys.executable, "-c", PROGRAM.format(optimizer=optimizer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.stdout.split(), done.returncode) == (["1", "1"], 0), done.stderr
