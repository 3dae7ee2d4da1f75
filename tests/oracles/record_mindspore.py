"""Record the results of MindSpore's loss-scale managers and scalers on the CPU as JSON.

Run it in a separate environment with MindSpore:

    pip install mindspore
    python tests/oracles/record_mindspore.py

It writes `recorded/mindspore-<version>.json`, which `tests/test_peers.py` reads.
"""

import os
import sys

os.environ.setdefault("GLOG_v", "3")
sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120, as the other record script

import mindspore as ms
import numpy as np
import recording
from mindspore import amp


def value(tensor):
    return recording.shortest(tensor.asnumpy())


def arguments_of(policy):
    return policy["initial_scale"], int(policy["growth_factor"]), policy["growth_interval"]


def record_manager(policy, steps):
    """Record the rule that a manager applies on the host, in Python's float64."""
    if "scale" in policy:
        manager = amp.FixedLossScaleManager(policy["scale"], policy["skip_nonfinite"])
        assert manager.get_drop_overflow_update() is policy["skip_nonfinite"]
    else:
        manager = amp.DynamicLossScaleManager(*arguments_of(policy))

    def step(multiplier):
        manager.update_loss_scale(multiplier != 1)
        return {"loss_scale": recording.shortest(manager.get_loss_scale())}

    return recording.record(type(manager).__name__, policy, steps, step)


def record_cell(policy, steps):
    """Record the cell that the manager passes to the training step."""
    cell = amp.DynamicLossScaleManager(*arguments_of(policy)).get_update_cell()
    scale = ms.Parameter(ms.Tensor(policy["initial_scale"], ms.float32), name="scale")

    def step(multiplier):
        cell(scale, ms.Tensor(multiplier != 1))
        return {"loss_scale": value(scale)}

    return recording.record(type(cell).__name__, policy, steps, step)


def record_scaler(policy, steps):
    """Record the functional scaler, which counts as this library does."""
    scaler = amp.DynamicLossScaler(*arguments_of(policy))

    def step(multiplier):
        scaler.adjust(ms.Tensor(multiplier == 1))
        count = int(scaler.counter.asnumpy())
        return {"loss_scale": value(scaler.scale_value), "growth_count": count}

    return recording.record(type(scaler).__name__, policy, steps, step)


def main():
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    draw, fixed = recording.draw_runs, recording.fixed
    trajectories = [
        *(record_manager(*run) for run in draw(31, 100)),
        *(record_cell(*run) for run in draw(32, 60)),
        *(record_scaler(*run) for run in draw(33, 60)),
        *(record_scaler(*run) for run in draw(34, 10, [2.0], (110, 125))),
    ]
    for i, (policy, steps) in enumerate(draw(35, 6)):
        trajectories.append(record_manager(fixed(policy["initial_scale"], bool(i % 2)), steps))
    version = ".".join(ms.__version__.split(".")[:2])
    versions = {"mindspore": ms.__version__, "numpy": np.__version__}
    recording.write(f"mindspore-{version}", versions, trajectories)


if __name__ == "__main__":
    main()
