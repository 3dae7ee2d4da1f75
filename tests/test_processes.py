"""Two real processes, with JAX's distributed runtime, give the results of one process.

They communicate over the loopback interface. They start once for all tests in this file, and are
always killed at the end.
"""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from process_worker import BAD_ROW, SAVED, TOLERANCE, one_device, sharded

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WORKER = Path(__file__).with_name("process_worker.py")
TIMEOUT = 240  # for a busy machine; a run takes ten seconds


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the reports of two processes with two devices each, and their checkpoint folder."""
    directory = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    inherited["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # they compile more than they compute
    orders = {"coordinator": coordinator, "processes": 2, "devices": 2, "directory": str(directory)}

    def work(process):
        order = json.dumps(orders | {"process": process})
        command = [sys.executable, "-W", "error", str(WORKER), order]
        options = {"capture_output": True, "text": True, "env": inherited, "timeout": TIMEOUT}
        return subprocess.run(command, check=False, **options)  # noqa: S603, our own script

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(work, range(2)))
    assert [each.returncode for each in done] == [0, 0], [each.stderr[-3000:] for each in done]
    reports = [json.loads((directory / f"report{i}.json").read_text()) for i in range(2)]
    assert [report["devices"] for report in reports] == [[2, 4]] * 2
    return reports, directory


@pytest.fixture(scope="module")
def alone():
    """The results of one device on the same batches: the params, and the counts of each step."""
    (params, _), seen = one_device(BAD_ROW)
    assert [s[4] for s in seen] == [0, 1, 1, 1, 2, 2, 3, 3]
    return params, seen


def assert_same_training(report, params, seen):
    assert report["seen"] == seen
    for name, array in params.items():
        np.testing.assert_allclose(report["params"][name], array, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("how", ["sharded", "replicas"])
def test_what_is_bad_in_one_of_two_processes_is_skipped_by_both(run, alone, how):
    reports, _ = run
    for report in reports:
        assert_same_training(report[how], *alone)
        assert report[how] == reports[0][how]  # bit for bit


def test_training_resumes_bit_for_bit_from_the_checkpoint_that_both_have_saved(run):
    for report in run[0]:
        assert report["resumed"]["seen"] == report["sharded"]["seen"][SAVED:]
        assert report["resumed"]["params"] == report["sharded"]["params"]


def test_one_process_resumes_where_two_have_saved(run, alone):
    params, seen = alone
    report = sharded(Mesh(jax.devices(), ("data",)), run[1] / "sharded", resume=True)
    assert_same_training(report, params, seen[SAVED:])
