"""Records what MindSpore's loss-scale managers and scalers do on the CPU, once, as JSON.

Run it where MindSpore is installed, away from the project's own environment:

    pip install mindspore
    python tests/oracles/record_mindspore.py

It writes `recorded/mindspore-<version>.json`, which `tests/test_recorded.py` reads.
"""

import os
import sys

os.environ.setdefault("GLOG_v", "3")
sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120, as the other record script

import mindspore as ms
import numpy as np
import recording
from mindspore import amp, nn, ops

FACTORS = [2, 2, 2, 4, 8, 3]


def value(tensor):
    return recording.shortest(tensor.asnumpy())


def run(kind, steps, arguments, update):
    """Record one run: `update(finite)` returns the factor, and perhaps the count."""
    after = [update(recording.multiplier_of(step) == 1) for step in steps]
    recorded = {"kind": kind, **arguments, "steps": steps, "loss_scale": [a[0] for a in after]}
    if len(after[0]) > 1:
        recorded["counter"] = [a[1] for a in after]
    return recorded


def record_manager(start, interval, factor, steps):
    """Record the rule that the manager applies on the host, in Python's float64."""
    manager = amp.DynamicLossScaleManager(start, factor, interval)

    def update(finite):
        manager.update_loss_scale(not finite)
        return (recording.shortest(manager.get_loss_scale()),)

    arguments = {"init_loss_scale": start, "scale_factor": factor, "scale_window": interval}
    return run("DynamicLossScaleManager", steps, arguments, update)


def record_cell(start, interval, factor, steps):
    """Record the cell that the manager hands to the training step."""
    cell = amp.DynamicLossScaleManager(start, factor, interval).get_update_cell()
    scale = ms.Parameter(ms.Tensor(start, ms.float32), name="scale")

    def update(finite):
        cell(scale, ms.Tensor(not finite))
        return (value(scale),)

    arguments = {"init_loss_scale": start, "scale_factor": factor, "scale_window": interval}
    return run("DynamicLossScaleUpdateCell", steps, arguments, update)


def record_scaler(start, interval, factor, steps):
    """Record the functional scaler, which counts as we do."""
    scaler = amp.DynamicLossScaler(start, factor, interval)

    def update(finite):
        scaler.adjust(ms.Tensor(finite))
        return value(scaler.scale_value), int(scaler.counter.asnumpy())

    arguments = {"init_loss_scale": start, "scale_factor": factor, "scale_window": interval}
    return run("DynamicLossScaler", steps, arguments, update)


def record_fixed(start, steps, drop):
    """Record the fixed manager: it never moves, and says whether a bad step is dropped."""
    manager = amp.FixedLossScaleManager(start, drop)

    def update(finite):
        manager.update_loss_scale(not finite)
        return (recording.shortest(manager.get_loss_scale()),)

    assert manager.get_drop_overflow_update() is drop
    assert (manager.get_update_cell() is None) is not drop
    arguments = {"init_loss_scale": start, "drop_overflow_update": drop}
    return run("FixedLossScaleManager", steps, arguments, update)


INNER = {
    "sgd": ({"learning_rate": 0.05, "momentum": 0.9}, nn.SGD),
    "adam": ({"learning_rate": 0.05, "epsilon": 1e-20}, nn.Adam),
}


def train(name, problem, factor):
    """Record the weights after each step of the functional loop, a bad step dropped."""
    arguments, make = INNER[name]
    w, b = (ms.Parameter(ms.Tensor(problem[n], ms.float32), name=n) for n in "wb")
    x, y = (ms.Tensor(problem[n], ms.float32) for n in "xy")
    keywords = {"eps" if key == "epsilon" else key: v for key, v in arguments.items()}
    optimizer = make([w, b], **keywords)
    scaler = amp.DynamicLossScaler(problem["initial_scale"], factor, problem["interval"])

    def forward(multiplier):
        loss = ops.mean((ops.matmul(x, w) + b - y) ** 2) * multiplier
        return scaler.scale(loss)

    grad = ms.value_and_grad(forward, None, [w, b])
    weights, scales, counts = [], [], []
    for letter in problem["steps"]:
        _, grads = grad(ms.Tensor(recording.multiplier_of(letter), ms.float32))
        grads = scaler.unscale(grads)
        finite = amp.all_finite(grads)
        if finite:
            optimizer(grads)
        scaler.adjust(finite)
        weights.append([recording.shortest(v) for p in (w, b) for v in p.asnumpy().ravel()])
        scales.append(value(scaler.scale_value))
        counts.append(int(scaler.counter.asnumpy()))
    return {
        "kind": "DynamicLossScaler",
        "inner": name,
        **arguments,
        "factor": float(factor),
        **problem,
        "weights": weights,
        "loss_scale": scales,
        "counter": counts,
    }


def train_often(name, problem, factor):
    """Return what most of five trainings gave.

    About one in thirty differs from all others, from the step after a move of the scaler on, as if
    the loss had been scaled by the factor before it. That is MindSpore's, with and without
    `launch_blocking`, and not its rule.
    """
    runs = [train(name, problem, factor) for _ in range(5)]
    common = max(runs, key=runs.count)
    assert runs.count(common) >= 3
    return common


def main():
    """Record everything."""
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    trajectories = [
        *(record_manager(*rule) for rule in recording.draw_rules(31, 100, FACTORS)),
        *(record_cell(*rule) for rule in recording.draw_rules(32, 60, FACTORS)),
        *(record_scaler(*rule) for rule in recording.draw_rules(33, 60, FACTORS)),
        *(record_scaler(*rule) for rule in recording.draw_rules(34, 10, [2], (110, 125))),
    ]
    for i, (start, _, _, steps) in enumerate(recording.draw_rules(35, 6, FACTORS)):
        trajectories.append(record_fixed(start, steps, bool(i % 2)))
    trainings = [
        train_often(name, recording.draw_problem(40 + seed), factor)
        for seed, factor in enumerate([2, 2, 4])
        for name in INNER
    ]
    version = ".".join(ms.__version__.split(".")[:2])
    versions = {"mindspore": ms.__version__, "numpy": np.__version__}
    recording.write(f"mindspore-{version}", versions, trajectories, trainings)


if __name__ == "__main__":
    main()
