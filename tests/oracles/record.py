"""Record how TensorFlow, tf.keras and MindSpore change the loss scale, as JSON.

`tests/test_peers.py` reads the files in `recorded`. Each was written in an environment of its own:

| file                 | framework  | Python | installed                               |
| -------------------- | ---------- | ------ | --------------------------------------- |
| tensorflow-2.4.json  | tensorflow | 3.8    | tensorflow-cpu==2.4.4                   |
| tensorflow-2.21.json | tensorflow | 3.11   | tensorflow-cpu==2.21.0 tf_keras==2.21.0 |
| mindspore-2.10.json  | mindspore  | 3.11   | mindspore==2.10.0                       |

`python tests/oracles/record.py <framework>` writes the same float32 numbers again. The loss scales
of TensorFlow 2.4's `tf.mixed_precision.experimental` are those of `tf.compat.v1.mixed_precision`.
"""

# ruff: noqa: C901, PLC0415, since each framework is imported in an environment of its own

import functools
import json
import math
import pathlib
import platform
import random
import sys

import numpy as np

# The multiplier of every gradient in a step, by the letter of the step.
STEP = {"T": 1.0, "n": math.nan, "+": math.inf, "-": -math.inf}
RECORDED = pathlib.Path(__file__).parent / "recorded"


def draw(seed, count, factors=(2.0, 2.0, 2.0, 4.0, 8.0, 3.0), exponents=(0, 24)):
    """Draw runs: the arguments of our `DynamicLossScale`, and the letters of the steps."""
    rng = random.Random(seed)  # noqa: S311, reproducible, not secret
    for _ in range(count):
        interval = rng.choice([1, 1, 2, 2, 3, 5, 10])
        start = float(2 ** rng.randint(*exponents)) * rng.choice([1.0, 1.0, 1.0, 1.3])
        factor = rng.choice(factors)
        policy = {"initial_scale": start, "growth_interval": interval}
        policy.update(growth_factor=factor, backoff_factor=1 / factor)
        # Overflows are balanced with growth, rare, frequent, none, or all.
        bad = rng.choice([1 - 0.5 ** (1 / interval)] * 3 + [0.03, 0.2, 0.6, 0.0, 1.0])
        steps = (rng.choice("n+-") if rng.random() < bad else "T" for _ in range(40))
        yield policy, "".join(steps)


def draw_fixed(seed, count, skips=(False,)):
    """Draw the arguments of our `FixedLossScale`, and steps."""
    for i, (policy, steps) in enumerate(draw(seed, count)):
        yield {"scale": policy["initial_scale"], "skip_nonfinite": skips[i % len(skips)]}, steps


def record(make, policy, steps):
    """Record a run of the object and of its step that `make(policy)` returns."""
    theirs, step = make(policy)
    after = [step(STEP[letter]) for letter in steps]
    columns = {name: [each[name] for each in after] for name in after[0]}
    return {"kind": type(theirs).__name__, "policy": policy, "steps": steps, **columns}


def shortest(number):
    """Return the shortest decimal that rounds to a float32, to keep the files small."""
    short = float(str(np.float32(number)))
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def tensorflow():
    """Return the versions and the runs of TensorFlow and tf.keras."""
    import tensorflow as tf

    scales = tf.compat.v1.mixed_precision
    keras = tf.keras
    if getattr(keras, "__version__", "").startswith("3"):
        import tf_keras as keras  # since TensorFlow 2.16 a package of its own

    def loss_scale(policy):
        if "scale" in policy:
            theirs = scales.FixedLossScale(policy["scale"])
        else:
            names = "initial_scale", "growth_interval", "growth_factor"
            theirs = scales.DynamicLossScale(*(policy[name] for name in names))

        @tf.function
        def update(value):
            return theirs.update([tf.stack([1.0, value]), None, tf.constant(2.0)])[1]

        def step(multiplier):
            applied = int(update(tf.constant(multiplier, tf.float32)))
            return {"loss_scale": shortest(theirs()), "applied": applied}

        return theirs, step

    def optimizer_around(module, policy):
        if "scale" in policy:
            arguments = {"dynamic": False, "initial_scale": policy["scale"]}
        else:
            arguments = {"initial_scale": policy["initial_scale"]}
            arguments["dynamic_growth_steps"] = policy["growth_interval"]
        theirs = keras.mixed_precision.LossScaleOptimizer(module.SGD(0.01), **arguments)
        variable = tf.Variable([1.0, 2.0])

        @tf.function
        def update(value):
            grads = theirs.get_unscaled_gradients([tf.stack([1.0, value]) * theirs.loss_scale])
            theirs.apply_gradients([(grads[0], variable)])

        def step(multiplier):
            before = variable.numpy()
            update(tf.constant(multiplier, tf.float32))
            return {
                "loss_scale": shortest(theirs.loss_scale),
                # A fixed loss scale has no count.
                "growth_count": int(theirs.dynamic_counter) if theirs.dynamic else 0,
                # NaN differs from itself.
                "applied": int((variable.numpy() != before).any()),
            }

        return theirs, step

    # Exponents up to 125: TensorFlow has no ceiling, but stops below float32's infinity.
    runs = [
        *((loss_scale, *run) for run in draw(1, 90)),
        *((loss_scale, *run) for run in draw(2, 20, (2.0, 4.0), (110, 125))),
        *((loss_scale, *run) for run in draw_fixed(3, 6)),
    ]
    legacy = getattr(keras.optimizers, "legacy", None)
    for seed, module in enumerate([keras.optimizers, *([legacy] if legacy else [])]):
        make = functools.partial(optimizer_around, module)
        for policy, steps in draw(10 + seed, 55):
            policy.update(growth_factor=2.0, backoff_factor=0.5)
            runs.append((make, policy, steps))
        runs += [(make, *run) for run in draw_fixed(20 + seed, 4)]
    keras_name = "tf.keras" if keras is tf.keras else "tf_keras"
    versions = {"tensorflow": tf.__version__, "numpy": np.__version__}
    return {**versions, keras_name: keras.__version__}, runs


def mindspore():
    """Return the versions and the runs of MindSpore on the CPU."""
    import mindspore as ms
    from mindspore import amp

    ms.set_device("CPU")
    ms.runtime.launch_blocking()

    def manager_of(policy):
        if "scale" in policy:
            manager = amp.FixedLossScaleManager(policy["scale"], policy["skip_nonfinite"])
            assert manager.get_drop_overflow_update() is policy["skip_nonfinite"]
            return manager
        return amp.DynamicLossScaleManager(*arguments_of(policy))

    def arguments_of(policy):
        return policy["initial_scale"], int(policy["growth_factor"]), policy["growth_interval"]

    def manager(policy):
        """Make the rule that a manager applies on the host, in Python's float64."""
        theirs = manager_of(policy)

        def step(multiplier):
            theirs.update_loss_scale(multiplier != 1)
            return {"loss_scale": shortest(theirs.get_loss_scale())}

        return theirs, step

    def cell(policy):
        """Make the cell that the manager passes to the training step."""
        theirs = manager_of(policy).get_update_cell()
        scale = ms.Parameter(ms.Tensor(policy["initial_scale"], ms.float32), name="scale")

        def step(multiplier):
            theirs(scale, ms.Tensor(multiplier != 1))
            return {"loss_scale": shortest(scale.asnumpy())}

        return theirs, step

    def scaler(policy):
        """Make the functional scaler, which counts as this library does."""
        theirs = amp.DynamicLossScaler(*arguments_of(policy))

        def step(multiplier):
            theirs.adjust(ms.Tensor(multiplier == 1))
            scale, count = theirs.scale_value.asnumpy(), theirs.counter.asnumpy()
            return {"loss_scale": shortest(scale), "growth_count": int(count)}

        return theirs, step

    return {"mindspore": ms.__version__, "numpy": np.__version__}, [
        *((manager, *run) for run in draw(31, 100)),
        *((cell, *run) for run in draw(32, 60)),
        *((scaler, *run) for run in draw(33, 60)),
        *((scaler, *run) for run in draw(34, 10, [2.0], (110, 125))),
        *((manager, *run) for run in draw_fixed(35, 6, skips=(False, True))),
    ]


def main(framework):
    """Write the recording as JSON, a run on each line."""
    versions, runs = {"tensorflow": tensorflow, "mindspore": mindspore}[framework]()
    rows = [json.dumps(record(*run), separators=(",", ":"), allow_nan=False) for run in runs]
    head = json.dumps({"python": platform.python_version(), **versions})
    version = ".".join(versions[framework].split(".")[:2])
    path = RECORDED / f"{framework}-{version}.json"
    text = f'{{\n"versions": {head},\n"trajectories": [\n' + ",\n".join(rows) + "\n]\n}\n"
    path.write_text(text, encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1])
