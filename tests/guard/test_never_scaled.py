"""The warning about gradients that were never scaled, in a process of its own."""

import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._loss_scale.never_scaled import mark_scaled

BEFORE = """
import jax, jax.numpy as jnp, optax, warnings, optax_lossscale as ols
from optax_lossscale._loss_scale.never_scaled import mark_scaled
from optax_lossscale.flax import TrainState
w, loss_fn = jnp.ones(3), lambda w: jnp.sum(w**2)

def step(tx, read=lambda state: None):
    state = tx.init(w)
    read(state)
    tx.update(w, state, w)

def read_another(state):
    try:
        ols.loss_scale_state(())
    except ValueError:
        pass

def train_state(read):
    state = TrainState.create(apply_fn=None, params=w, tx=optax.sgd(0.1))
    read(state)
    state.apply_gradients(grads=w)

scaling, heard = ols.with_loss_scaling(optax.sgd(0.1)), []
warnings.showwarning = lambda message, *_: heard.append(str(message))
warnings.simplefilter("always")
step(scaling)  # nothing is marked in a new process
first = [*heard]
"""
WARNED = {
    "a trainer of others": "step(scaling); step(scaling)",
    "a fixed loss scale": "step(ols.with_loss_scaling(optax.sgd(0.1), 8))",
    "functions that are only made": "ols.value_and_grad(loss_fn); ols.grad(loss_fn); step(scaling)",
    "our own readers": "step(scaling, ols.applied); step(scaling, ols.diagnostics.metrics)",
    "a look at the loss scale": "step(scaling, ols.loss_scale_state)",
    "a look at a TrainState": "train_state(lambda state: state.loss_scale)",
    "loss_scale_state that raises": "step(scaling, read_another)",
    "check_health": "step(scaling, ols.diagnostics.check_health)",
    "is_stalled": "step(scaling, ols.diagnostics.is_stalled)",
    "scale_inside": "jax.grad(ols.scale_inside(loss_fn, 8))(w); step(scaling)",
    "a TrainState": "train_state(lambda state: state.applied)",
    "while it is compiled": "jax.jit(lambda: step(scaling))()",
}  # fmt: skip
SILENT = {
    "value_and_grad": "ols.value_and_grad(loss_fn)(ols.init(), w); step(scaling)",
    "grad": "step(scaling, lambda state: ols.grad(loss_fn)(state, w))",
    "scale_loss": "ols.scale_loss(1.0, ols.init()); step(scaling)",
    "a traced read": "step(scaling, jax.jit(lambda s: ols.loss_scale_state(s).loss_scale * 2))",
    "a factor by hand": "step(scaling, lambda s: ols.scale_loss(1.0, s))",
    "TrainState.scale_loss": "train_state(lambda state: state.scale_loss(1.0))",
    "a traced read of a TrainState": "train_state(jax.jit(lambda state: state.loss_scale * 2))",
    "with_skipping": "step(ols.with_skipping(optax.sgd(0.1)))",
    "fixed at 1": "step(ols.with_loss_scaling(optax.sgd(0.1), 1))",
    "off": "step(ols.with_loss_scaling(optax.sgd(0.1), None))",
}


@pytest.mark.slow
def test_one_warning_per_process_if_gradients_were_never_scaled():
    programs = WARNED | SILENT
    runs = [
        f"mark_scaled(has_scaled=False); heard.clear(); {run}; print(len(heard))"
        for run in programs.values()
    ]
    command = [sys.executable, "-c", "\n".join([BEFORE, *runs, "print(*first)"])]
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
    *numbers, message = done.stdout.splitlines()
    assert dict(zip(programs, numbers, strict=True)) == dict.fromkeys(WARNED, "1") | dict.fromkeys(
        SILENT, "0"
    )
    remedies = (
        "If ",
        "`value_and_grad",
        "`with_skipping",
        "bfloat16)`",
        "`scale_inside",
        "`scale_loss(1.0",
    )
    assert [text for text in remedies if text not in message] == []


@pytest.fixture
def nothing_scaled():
    mark_scaled(has_scaled=False)
    yield
    mark_scaled()


@pytest.mark.usefixtures("nothing_scaled")
def test_the_warning_names_the_line_that_calls_update():
    tx, grads = ols.with_loss_scaling(optax.sgd(0.1)), jnp.ones(3)
    state = tx.init(grads)
    with pytest.warns(UserWarning, match="has not scaled a loss") as caught:
        tx.update(grads, state)
    assert [warning.filename for warning in caught] == [__file__]
    tx.update(grads, state)  # warnings are errors, and this one is given once


@pytest.mark.usefixtures("nothing_scaled")
def test_a_warning_that_is_an_error_is_raised_again():
    tx, grads = ols.with_loss_scaling(optax.sgd(0.1)), jnp.ones(3)
    state = tx.init(grads)
    for _ in range(2):
        with pytest.raises(UserWarning, match="has not scaled a loss"):
            tx.update(grads, state)
