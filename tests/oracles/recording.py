"""Shared by the record scripts: the random runs, and the file format.

It uses NumPy alone and supports Python 3.8, which old releases of the recorded libraries require.
One script wrote each file in `recorded`, in a separate environment with only these packages and
their dependencies:

| file                 | script               | Python | installed                               |
| -------------------- | -------------------- | ------ | --------------------------------------- |
| tensorflow-2.4.json  | record_tensorflow.py | 3.8    | tensorflow-cpu==2.4.4                   |
| tensorflow-2.21.json | record_tensorflow.py | 3.11   | tensorflow-cpu==2.21.0 tf_keras==2.21.0 |
| mindspore-2.10.json  | record_mindspore.py  | 3.11   | mindspore==2.10.0                       |

The command is `python tests/oracles/<script>`. With the same versions, it writes the same
float32 numbers again.

TensorFlow 2.4 still has the loss scales of `tf.mixed_precision.experimental`. They are the same as
the recorded ones of `tf.compat.v1.mixed_precision`. For 2.21, Keras 2 is the package `tf_keras`.
"""

import json
import math
import pathlib
import platform
import random

import numpy as np

# The multiplier of every gradient in a step, by the letter of the step.
STEP = {"T": 1.0, "n": math.nan, "+": math.inf, "-": -math.inf}
RECORDED = pathlib.Path(__file__).parent / "recorded"


def policy_of(start, interval, factor):
    """Return the arguments of our `DynamicLossScale`."""
    return {
        "initial_scale": start,
        "growth_interval": interval,
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
    }


def fixed(start, skip_nonfinite):
    """Return the arguments of our `FixedLossScale`."""
    return {"scale": start, "skip_nonfinite": skip_nonfinite}


def draw_steps(rng, interval):
    """Draw steps with overflows: balanced with growth, rare, frequent, none, or all."""
    bad = rng.choice([1 - 0.5 ** (1 / interval)] * 3 + [0.03, 0.2, 0.6, 0.0, 1.0])
    return "".join(rng.choice("n+-") if rng.random() < bad else "T" for _ in range(40))


def draw_runs(seed, count, factors=(2.0, 2.0, 2.0, 4.0, 8.0, 3.0), exponents=(0, 24)):
    """Draw the policies and the steps of `count` runs."""
    rng = random.Random(seed)  # noqa: S311, reproducible, not secret
    for _ in range(count):
        interval = rng.choice([1, 1, 2, 2, 3, 5, 10])
        start = float(2 ** rng.randint(*exponents)) * rng.choice([1.0, 1.0, 1.0, 1.3])
        policy = policy_of(start, interval, rng.choice(factors))
        yield policy, draw_steps(rng, interval)


def record(kind, policy, steps, step):
    """Record a run: `step(multiplier)` takes a step and returns the results by name."""
    after = [step(STEP[letter]) for letter in steps]
    columns = {name: [each[name] for each in after] for name in after[0]}
    return {"kind": kind, "policy": policy, "steps": steps, **columns}


def shortest(number):
    """Return the shortest decimal that rounds to a float32, to keep the files small."""
    short = float(str(np.float32(number)))
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def write(name, versions, trajectories):
    """Write the recording as JSON, a run on each line."""
    versions = {"python": platform.python_version(), **versions}
    rows = [json.dumps(run, separators=(",", ":"), allow_nan=False) for run in trajectories]
    head = f'{{\n"versions": {json.dumps(versions)},\n"trajectories": [\n'
    path = RECORDED / f"{name}.json"
    path.write_text(head + ",\n".join(rows) + "\n]\n}\n", encoding="ascii")
    print(f"{path.name}: {path.stat().st_size} bytes")  # noqa: T201, a script's result
