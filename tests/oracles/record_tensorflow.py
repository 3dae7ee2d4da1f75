"""Record the results of TensorFlow's loss scales and tf.keras' LossScaleOptimizer as JSON.

Run it in a separate environment with TensorFlow:

    pip install tensorflow-cpu tf_keras     # or an older TensorFlow alone, with its own tf.keras
    python tests/oracles/record_tensorflow.py

It writes `recorded/tensorflow-<version>.json`, which `tests/test_peers.py` reads.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120, as old as Python 3.8

import numpy as np
import recording
import tensorflow as tf

v1 = tf.compat.v1
keras = tf.keras
if getattr(keras, "__version__", "").startswith("3"):
    # Keras 2 is a separate package since TensorFlow 2.16.
    import tf_keras as keras
LossScaleOptimizer = keras.mixed_precision.LossScaleOptimizer


def shortest(tensor):
    return recording.shortest(np.ravel(tensor)[0])


def loss_scale_of(policy):
    if "scale" in policy:
        return v1.mixed_precision.FixedLossScale(policy["scale"])
    names = "initial_scale", "growth_interval", "growth_factor"
    return v1.mixed_precision.DynamicLossScale(*(policy[name] for name in names))


def record_class(policy, steps):
    """Record `DynamicLossScale` or `FixedLossScale`."""
    theirs = loss_scale_of(policy)

    @tf.function
    def update(value):
        return theirs.update([tf.stack([1.0, value]), None, tf.constant(2.0)])[1]

    def step(multiplier):
        applied = int(update(tf.constant(multiplier, tf.float32)))
        return {"loss_scale": shortest(theirs()), "applied": applied}

    return recording.record(type(theirs).__name__, policy, steps, step)


def wrap(inner, policy):
    if "scale" in policy:
        return LossScaleOptimizer(inner, dynamic=False, initial_scale=policy["scale"])
    start, interval = policy["initial_scale"], policy["growth_interval"]
    return LossScaleOptimizer(inner, initial_scale=start, dynamic_growth_steps=interval)


def record_optimizer(policy, steps, inner):
    """Record `LossScaleOptimizer` of tf.keras."""
    optimizer = wrap(inner, policy)
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def update(value):
        grads = optimizer.get_unscaled_gradients([tf.stack([1.0, value]) * optimizer.loss_scale])
        optimizer.apply_gradients([(grads[0], variable)])

    def step(multiplier):
        before = variable.numpy()
        update(tf.constant(multiplier, tf.float32))
        applied = int((variable.numpy() != before).any())  # NaN differs from itself
        # A fixed loss scale has no count.
        count = int(optimizer.dynamic_counter) if optimizer.dynamic else 0
        scale = shortest(optimizer.loss_scale)
        return {"loss_scale": scale, "growth_count": count, "applied": applied}

    return recording.record(type(optimizer).__name__, policy, steps, step)


def main():
    modules = [keras.optimizers]
    if hasattr(keras.optimizers, "legacy"):
        modules.append(keras.optimizers.legacy)
    draw, fixed = recording.draw_runs, recording.fixed
    # Exponents up to 125: TensorFlow has no ceiling, but stops below float32's infinity.
    trajectories = [
        *(record_class(*run) for run in draw(1, 90)),
        *(record_class(*run) for run in draw(2, 20, (2.0, 4.0), (110, 125))),
        *(record_class(fixed(p["initial_scale"], False), s) for p, s in draw(3, 6)),
    ]
    for seed, module in enumerate(modules):
        for policy, steps in draw(10 + seed, 55):
            policy.update(growth_factor=2.0, backoff_factor=0.5)
            trajectories.append(record_optimizer(policy, steps, module.SGD(0.01)))
        for policy, steps in draw(20 + seed, 4):
            stays = fixed(policy["initial_scale"], False)
            trajectories.append(record_optimizer(stays, steps, module.SGD(0.01)))
    versions = {"tensorflow": tf.__version__, "numpy": np.__version__}
    versions["tf_keras" if keras is not tf.keras else "tf.keras"] = keras.__version__
    version = ".".join(tf.__version__.split(".")[:2])
    recording.write(f"tensorflow-{version}", versions, trajectories)


if __name__ == "__main__":
    main()
