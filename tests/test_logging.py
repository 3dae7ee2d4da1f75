"""The how-to for logging: what is written can be read back, and the loop is not held up."""

import struct

import jax
import jax.numpy as jnp
import optax
import pytest
import tqdm
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

import optax_lossscale as ols

pytestmark = pytest.mark.integration

POLICY = ols.DynamicLossScale(2.0**15, growth_interval=3)
OVERFLOWS_AT = 4


def make_step():
    tx = ols.with_loss_scaling(optax.sgd(0.1), POLICY)

    def train_step(w, opt_state, x):
        loss, grads = ols.value_and_grad(lambda w: jnp.sum(w**2) * x)(opt_state, w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return (
            optax.apply_updates(w, updates),
            opt_state,
            ols.diagnostics.metrics(opt_state) | {"loss": loss},
        )

    # The state's buffers are overwritten by the next step; what `metrics` returned is not.
    return tx, jax.jit(train_step, donate_argnums=(0, 1))


def inputs():
    return [jnp.float32(jnp.inf if step == OVERFLOWS_AT else 1.0) for step in range(10)]


def train(write, every, xs=None):
    """Run the loop of the how-to: what is written is of the last time, not of this step."""
    tx, train_step = make_step()
    w = jnp.ones(3)
    opt_state = tx.init(w)
    pending = None
    for step, x in enumerate(xs or inputs()):
        with jax.transfer_guard("disallow"):
            w, opt_state, measured = train_step(w, opt_state, x)
        if step % every == 0:
            if pending:
                write(*pending)
            pending = step, measured
    write(*pending)


def scalars(path):
    """Read (tag, step, value) from event files: records of length, checksum, data, checksum."""
    found = []
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            content = content[12 + length + 4 :]
    return found


def expected():
    """Return the metrics after each step, from the policy alone."""
    state, history = POLICY.init(), []
    for step in range(10):
        state = POLICY.update(state, step != OVERFLOWS_AT)
        history.append(
            {name: float(value) for name, value in ols.diagnostics.metrics(state).items()}
        )
    return history


@pytest.mark.parametrize("every", [1, 3, 20])
def test_tensorboard_files_hold_every_metric_of_every_logged_step(tmp_path, every):
    with SummaryWriter(str(tmp_path)) as writer:

        def write(step, measured):
            for name, value in jax.device_get(measured).items():
                writer.add_scalar(f"train/{name}", float(value), step)

        train(write, every)

    found = {(tag, step): value for tag, step, value in scalars(tmp_path)}
    wanted = {
        (f"train/{name}", step): value
        for step, measured in enumerate(expected())
        if step % every == 0
        for name, value in measured.items()
    }
    assert {key: value for key, value in found.items() if key[0] != "train/loss"} == wanted
    assert ("train/loss", 0) in found
    skipped = found.get(("train/grads_finite", OVERFLOWS_AT))
    assert skipped == (0.0 if every == 1 else None)


def test_a_progress_bar_shows_the_loss_scale_and_the_skipped_steps(capsys):
    tx, train_step = make_step()
    w = jnp.ones(3)
    opt_state = tx.init(w)
    progress = tqdm.tqdm(inputs(), mininterval=0, ascii=True)
    for step, x in enumerate(progress):
        w, opt_state, measured = train_step(w, opt_state, x)
        if step % 3 == 0:
            progress.set_postfix(
                loss_scale=f"{float(measured['loss_scale']):g}",
                skipped=int(measured["total_skipped"]),
                refresh=False,
            )
    shown = capsys.readouterr().err
    assert "loss_scale=32768, skipped=0" in shown
    assert f"loss_scale={expected()[9]['loss_scale']:g}, skipped=1]" in shown


def test_what_is_fetched_is_always_of_a_step_before_the_last_one():
    started, fetched = [], []

    def recorded():
        for x in inputs():
            started.append(x)
            yield x

    def write(step, measured):
        fetched.append((step, len(started) - 1))
        jax.device_get(measured)

    train(write, every=3, xs=recorded())
    assert fetched == [(0, 3), (3, 6), (6, 9), (9, 9)]  # the last after the loop


def test_metrics_taken_outside_of_a_step_that_donates_are_lost():
    tx, train_step = make_step()
    w = jnp.ones(3)
    opt_state = tx.init(w)
    w, opt_state, inside = train_step(w, opt_state, jnp.float32(1))
    outside = ols.diagnostics.metrics(opt_state)
    train_step(w, opt_state, jnp.float32(1))
    assert inside["loss_scale"].item() == 2.0**15
    with pytest.raises(RuntimeError, match="deleted"):
        outside["loss_scale"].item()
