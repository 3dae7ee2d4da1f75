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
from mindspore import amp, nn, ops


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


def standing(scaler):
    count = int(scaler.counter.asnumpy())
    return {"loss_scale": value(scaler.scale_value), "growth_count": count}


def record_scaler(policy, steps):
    """Record the functional scaler, which counts as this library does."""
    scaler = amp.DynamicLossScaler(*arguments_of(policy))

    def step(multiplier):
        scaler.adjust(ms.Tensor(multiplier == 1))
        return standing(scaler)

    return recording.record(type(scaler).__name__, policy, steps, step)


def train(name, arrays, policy, steps):
    """Record the weights after each step of the functional loop, which drops bad steps."""
    inner = recording.INNER[name]
    w, b = (ms.Parameter(ms.Tensor(arrays[n], ms.float32), name=n) for n in "wb")
    x, y = (ms.Tensor(arrays[n], ms.float32) for n in "xy")
    if name == "sgd":
        optimizer = nn.SGD([w, b], **inner)
    else:
        optimizer = nn.Adam([w, b], inner["learning_rate"], eps=inner["epsilon"])
    scaler = amp.DynamicLossScaler(*arguments_of(policy))

    def forward(multiplier):
        loss = ops.mean((ops.matmul(x, w) + b - y) ** 2) * multiplier
        return scaler.scale(loss)

    grad = ms.value_and_grad(forward, None, [w, b])

    def step(multiplier):
        _, grads = grad(ms.Tensor(multiplier, ms.float32))
        grads = scaler.unscale(grads)
        finite = amp.all_finite(grads)
        if finite:
            optimizer(grads)
        scaler.adjust(finite)
        weights = [recording.shortest(v) for p in (w, b) for v in p.asnumpy().ravel()]
        return {"weights": weights, **standing(scaler)}

    kind = type(scaler).__name__
    return recording.record(kind, policy, steps, step, inner=inner, **arrays)


def train_often(*problem):
    """Return the most common result of five trainings.

    About one in thirty differs from the others after a change of the loss scale, as if the loss
    were scaled by the previous value. This happens in MindSpore with and without
    `launch_blocking`, and is not part of its rule.
    """
    runs = [train(*problem) for _ in range(5)]
    common = max(runs, key=runs.count)
    assert runs.count(common) >= 3
    return common


def main():
    """Record everything."""
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
    trainings = [
        train_often(name, *recording.draw_problem(40 + seed, factor))
        for seed, factor in enumerate([2.0, 2.0, 4.0])
        for name in recording.INNER
    ]
    version = ".".join(ms.__version__.split(".")[:2])
    versions = {"mindspore": ms.__version__, "numpy": np.__version__}
    recording.write(f"mindspore-{version}", versions, trajectories, trainings)


if __name__ == "__main__":
    main()
