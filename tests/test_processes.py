"""Several real processes, over JAX's own distributed runtime, do what one process does.

They talk over the loopback interface. Each run is made once and looked at by several tests; its
processes are killed when the fixture that started them ends, whatever has happened.
"""

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_where import with_plain_where
from process_worker import INNER, POLICY, batch, checkpoints, counts, init_params, loss_fn, restore

import optax_lossscale as ols

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("process_worker.py")
EXAMPLE = Path(__file__).parents[1] / "examples" / "sharded_transformer.py"
STOP = 8
SAVED = 3
BAD_ROW = 30  # in the part of the batch of the last process, however many there are
TOLERANCE = 4e-4  # as in test_distributed.py
TIMEOUT = 240  # for a machine that does other things; a run takes ten seconds


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Processes:
    """Some processes that work together, and what each of them prints."""

    def __init__(self, directory, commands, **env):
        self.logs = [directory / f"log{i}.txt" for i in range(len(commands))]
        self.running = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
        for command, log in zip(commands, self.logs, strict=True):
            with log.open("wb") as out:
                process = subprocess.Popen(  # noqa: S603, our own scripts
                    [sys.executable, "-W", "error", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=inherited | env,
                )
            self.running.append(process)

    def wait(self):
        """Wait until all have ended, and well."""
        end = time.monotonic() + TIMEOUT
        waiting = list(self.running)
        while waiting and time.monotonic() < end:
            waiting = [p for p in waiting if p.poll() is None]
            if any(p.poll() for p in self.running):
                break  # the others would wait for it in vain
            time.sleep(0.05)
        codes = [p.poll() for p in self.running]
        assert codes == [0] * len(codes), "\n".join(
            f"process {i}: {code}\n{log.read_text(errors='replace')[-3000:]}"
            for i, (code, log) in enumerate(zip(codes, self.logs, strict=True))
        )

    def kill(self):
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start processes, and kill what is left of them in the end."""
    started = []

    def start(commands, **env):
        started.append(Processes(tmp_path_factory.mktemp("processes"), commands, **env))
        return started[-1]

    yield start
    for processes in started:
        processes.kill()


@pytest.fixture(scope="module")
def launch(start, tmp_path_factory):
    """Start workers with these orders, and return them and how to read their reports."""

    def launch(count, *, victim=None, die_at=None, **orders):
        directory = tmp_path_factory.mktemp("reports")
        reports = [directory / f"{i}.json" for i in range(count)]
        common = {
            "coordinator": f"127.0.0.1:{free_port()}",
            "processes": count,
            "bad_row": BAD_ROW,
            "stop": STOP,
            "save_at": [],
            "resume": False,
            "runs": ["fsdp"],
            **orders,
        }
        own = [
            {"process": i, "report": str(report), "die_at": die_at if i == victim else None}
            for i, report in enumerate(reports)
        ]
        return start([[str(WORKER), json.dumps(common | orders)] for orders in own]), reports

    return launch


def finish(launched):
    """Wait for workers, and return their reports."""
    processes, reports = launched
    processes.wait()
    return [json.loads(report.read_text()) for report in reports]


@pytest.fixture(scope="module")
def two(launch, tmp_path_factory):
    """Two processes with two devices each, which save a checkpoint on their way."""
    directory = tmp_path_factory.mktemp("two")
    launched = launch(
        2, devices=2, directory=str(directory), save_at=[SAVED], runs=["fsdp", "replicas"]
    )
    return finish(launched), directory


@pytest.fixture(scope="module")
def four(launch, two, tmp_path_factory):
    """Four processes with one device each, which go on from the checkpoint of the two."""
    directory = tmp_path_factory.mktemp("four") / "copy"
    shutil.copytree(two[1], directory)
    return finish(
        launch(4, devices=1, directory=str(directory), resume=True, runs=["fsdp", "replicas"])
    )


@pytest.fixture(scope="module")
def alone():
    """What one device does with the same batches: counters after each step, and the params."""
    tx = with_plain_where(INNER, POLICY)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = ols.value_and_grad(loss_fn)(state, params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params = init_params()
    state = tx.init(params)
    seen = []
    for i in range(STOP):
        params, state = step(params, state, *batch(i, BAD_ROW))
        seen.append(counts(state))
    return seen, jax.device_get(params)


def assert_near(params, expected):
    for name, array in expected.items():
        np.testing.assert_allclose(np.asarray(params[name]), array, atol=TOLERANCE, rtol=0)


def test_the_one_process_skips_three_steps(alone):
    seen, _ = alone
    assert [s[4] for s in seen] == [0, 1, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("run", ["fsdp", "replicas"])
def test_what_is_bad_in_one_of_two_processes_is_skipped_by_both(two, alone, run):
    reports, _ = two
    seen, params = alone
    assert [(r["local"], r["global"]) for r in reports] == [(2, 4)] * 2
    for report in reports:
        assert report[run]["seen"] == seen
        assert_near(report[run]["params"], params)
    assert reports[0][run] == reports[1][run]  # bit for bit


@pytest.mark.parametrize("run", ["fsdp", "replicas"])
def test_what_is_bad_in_one_of_four_processes_is_skipped_by_all(four, alone, run):
    seen, params = alone
    assert [(r["local"], r["global"]) for r in four] == [(1, 4)] * 4
    for report in four:
        first = report[run].get("first", 0)
        assert report[run]["seen"] == seen[first:]
        assert_near(report[run]["params"], params)
        assert report[run] == four[0][run]


def test_four_processes_go_on_where_two_have_saved(two, four, alone):
    assert [report["fsdp"]["first"] for report in four] == [SAVED] * 4
    # Which skips the step before the checkpoint and two after it.
    assert four[0]["fsdp"]["seen"] == alone[0][SAVED:]
    for name, array in two[0][0]["fsdp"]["params"].items():
        np.testing.assert_allclose(
            np.asarray(four[0]["fsdp"]["params"][name]), np.asarray(array), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("count", [1, 8])
def test_one_process_reads_what_two_have_saved(two, alone, count):
    mesh = jax.make_mesh(
        (count,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:count]
    )
    tx = ols.with_loss_scaling(INNER, POLICY)
    shapes = jax.eval_shape(lambda: {"params": init_params(), "opt_state": tx.init(init_params())})
    shardings = jax.tree.map(
        lambda leaf: NamedSharding(mesh, P("data") if leaf.shape else P()), shapes
    )
    with checkpoints(two[1]) as manager:
        train = restore(manager, shapes, shardings)
    assert jax.tree.map(lambda a: a.sharding, train) == shardings
    assert counts(train["opt_state"]) == alone[0][SAVED - 1] == [128, 1, 1, 0, 1]
    params, opt_state = train["params"], train["opt_state"]

    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    for i in range(SAVED, STOP):
        data = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in batch(i, BAD_ROW))
        params, opt_state = step(params, opt_state, *data)
        assert counts(opt_state) == alone[0][i]
    assert_near(params, alone[1])


def test_training_resumes_from_the_checkpoint_after_a_process_has_died(launch, two, tmp_path):
    orders = {"devices": 2, "directory": str(tmp_path / "checkpoints"), "save_at": [SAVED]}
    dying, unwritten = launch(2, victim=1, die_at=SAVED + 2, **orders)
    assert dying.running[1].wait(TIMEOUT) == -signal.SIGKILL, dying.logs[1].read_text()
    # Nobody goes on alone: the other one cannot finish the step, and is ended like any launcher
    # would end it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        assert dying.running[0].wait(1) != 0
    dying.kill()
    assert not any(path.exists() for path in unwritten)

    reports = finish(launch(2, resume=True, **orders))
    whole = [report["fsdp"] for report in two[0]]
    for resumed, uninterrupted in zip(reports, whole, strict=True):
        assert resumed["fsdp"]["first"] == SAVED
        assert resumed["fsdp"]["seen"] == uninterrupted["seen"][SAVED:]
        assert resumed["fsdp"]["params"] == uninterrupted["params"]  # bit for bit


def test_the_example_is_the_same_on_one_process_and_on_two(start, tmp_path, capsys):
    tiny = ["--steps=3", "--batch=4", "--length=16", "--layers=1", "--width=16", "--generate=9"]
    coordinator = f"127.0.0.1:{free_port()}"
    together = [str(EXAMPLE), *tiny, f"--coordinator={coordinator}", "--processes=2"]
    kept = f"--checkpoints={tmp_path / 'checkpoints'}"
    two = start(
        [[*together, kept, f"--process-id={i}"] for i in range(2)],
        JAX_PLATFORMS="cpu",
        JAX_COORDINATOR_BIND_ADDRESS=coordinator,
    )
    # Too few steps to learn anything: both say so.
    assert [process.wait(TIMEOUT) for process in two.running] == [1, 1], two.logs[0].read_text()
    first, second = (log.read_text() for log in two.logs)
    assert "on 2 devices of 2 processes, from step 0" in first
    assert "parameters" not in second  # one process speaks for all
    # Alone, it has nothing left to do but to read what the two have saved.
    with jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(EXAMPLE))["main"]([*tiny, kept])
    alone = capsys.readouterr().out
    assert f"on {jax.device_count()} devices of 1 processes, from step 3" in alone
    assert result(first) == result(alone)
    assert len(result(first)) == 2


def result(log):
    return re.findall(r"^(?:skipped|loss on).*$", log, re.MULTILINE)


def test_the_processes_of_a_failed_test_do_not_stay(start):
    waiting = start([["-c", "import time; time.sleep(600)"]])
    waiting.kill()
    assert [process.poll() for process in waiting.running] == [-signal.SIGKILL]
