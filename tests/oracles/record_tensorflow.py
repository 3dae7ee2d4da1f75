"""Records what TensorFlow's loss scales and tf.keras' LossScaleOptimizer do, once, as JSON.

Run it where TensorFlow is installed, away from the project's own environment:

    pip install tensorflow-cpu tf_keras     # or an older TensorFlow alone, with its own tf.keras
    python tests/oracles/record_tensorflow.py

It writes `recorded/tensorflow-<version>.json`, which `tests/test_recorded.py` reads.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120, as old as Python 3.8

import numpy as np
import recording
import tensorflow as tf

v1 = tf.compat.v1
FACTORS = [2.0, 2.0, 2.0, 4.0, 8.0, 3.0]


def keras_of_tensorflow():
    """Return tf.keras where it is Keras 2, and the package that holds it since TensorFlow 2.16."""
    if hasattr(tf.keras, "__version__") and tf.keras.__version__.startswith("3"):
        import tf_keras  # noqa: PLC0415

        return tf_keras
    return tf.keras


keras = keras_of_tensorflow()
LossScaleOptimizer = keras.mixed_precision.LossScaleOptimizer


def numbers(tensor):
    return [recording.shortest(x) for x in np.ravel(tensor)]


def record_class(start, interval, factor, steps):
    """Record `DynamicLossScale`, or `FixedLossScale` if there is no interval."""
    if interval is None:
        policy, name, arguments = v1.mixed_precision.FixedLossScale(start), "FixedLossScale", {}
    else:
        policy = v1.mixed_precision.DynamicLossScale(start, interval, factor)
        name = "DynamicLossScale"
        arguments = {"increment_period": interval, "multiplier": factor}

    @tf.function
    def update(value):
        grads = [tf.stack([1.0, value]), None, tf.constant(2.0)]
        _, should_apply = policy.update(grads)
        return should_apply

    scales, applied = [], []
    for step in steps:
        should_apply = update(tf.constant(recording.multiplier_of(step), tf.float32))
        applied.append(int(should_apply))
        scales += numbers(policy())
    return {
        "kind": name,
        "initial_scale": start,
        **arguments,
        "steps": steps,
        "loss_scale": scales,
        "applied": applied,
    }


def record_optimizer(start, interval, steps, inner):
    """Record `LossScaleOptimizer` of tf.keras, whose factor is fixed if there is no interval."""
    if interval is None:
        optimizer = LossScaleOptimizer(inner, dynamic=False, initial_scale=start)
    else:
        optimizer = LossScaleOptimizer(inner, initial_scale=start, dynamic_growth_steps=interval)
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def update(value):
        grads = optimizer.get_unscaled_gradients([tf.stack([1.0, value]) * optimizer.loss_scale])
        optimizer.apply_gradients([(grads[0], variable)])

    scales, counts, applied = [], [], []
    for step in steps:
        before = variable.numpy()
        update(tf.constant(recording.multiplier_of(step), tf.float32))
        scales += numbers(optimizer.loss_scale)
        counts.append(int(optimizer.dynamic_counter) if interval else 0)
        applied.append(int((variable.numpy() != before).any()))  # NaN is not NaN
    return {
        "kind": type(optimizer).__name__,
        "initial_scale": start,
        "dynamic_growth_steps": interval,
        "steps": steps,
        "loss_scale": scales,
        "counter": counts,
        "applied": applied,
    }


INNER = {
    "sgd": ({"learning_rate": 0.05, "momentum": 0.9}, "SGD"),
    "adam": ({"learning_rate": 0.05, "epsilon": 1e-20}, "Adam"),
}


def loss_of(problem, w, b, multiplier):
    x, y = (tf.constant(problem[name], tf.float32) for name in "xy")
    return tf.reduce_mean((x @ w + b - y) ** 2) * multiplier


def train_keras(name, module, problem):
    """Record the weights after each step, scaled and unscaled by the wrapper's own functions."""
    arguments, cls = INNER[name]
    optimizer = LossScaleOptimizer(
        getattr(module, cls)(**arguments),
        initial_scale=problem["initial_scale"],
        dynamic_growth_steps=problem["interval"],
    )
    w, b = (tf.Variable(problem[n], dtype=tf.float32) for n in "wb")

    @tf.function
    def step(multiplier):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(loss_of(problem, w, b, multiplier))
        grads = optimizer.get_unscaled_gradients(tape.gradient(loss, [w, b]))
        optimizer.apply_gradients([(grads[0], w), (grads[1], b)])

    weights, scales, counts = [], [], []
    for letter in problem["steps"]:
        step(tf.constant(recording.multiplier_of(letter), tf.float32))
        weights.append(numbers(w) + numbers(b))
        scales += numbers(optimizer.loss_scale)
        counts.append(int(optimizer.dynamic_counter))
    return {
        "kind": type(optimizer).__name__,
        "inner": name,
        **arguments,
        "factor": 2.0,
        **problem,
        "weights": weights,
        "loss_scale": scales,
        "counter": counts,
    }


def train_v1(problem, factor):
    """Record TensorFlow 1's wrapper around plain gradient descent, in a graph."""
    with tf.Graph().as_default(), v1.Session() as session:
        policy = v1.mixed_precision.DynamicLossScale(
            problem["initial_scale"], problem["interval"], factor
        )
        optimizer = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
            v1.train.GradientDescentOptimizer(0.05), policy
        )
        w, b = (tf.Variable(np.float32(problem[n])) for n in "wb")
        multiplier = v1.placeholder(tf.float32, [])
        update = optimizer.minimize(lambda: loss_of(problem, w, b, multiplier), var_list=[w, b])
        session.run(v1.global_variables_initializer())
        weights, scales = [], []
        for letter in problem["steps"]:
            session.run(update, {multiplier: recording.multiplier_of(letter)})
            weights.append(numbers(session.run(w)) + numbers(session.run(b)))
            scales += numbers(session.run(policy()))
    return {
        "kind": "MixedPrecisionLossScaleOptimizer",
        "inner": "sgd",
        "learning_rate": 0.05,
        "momentum": 0.0,
        "factor": factor,
        **problem,
        "weights": weights,
        "loss_scale": scales,
    }


def main():
    """Record everything."""
    modules = [keras.optimizers] + (
        [keras.optimizers.legacy] if hasattr(keras.optimizers, "legacy") else []
    )
    # Exponents up to 125: without a ceiling of its own TensorFlow stops below float32's infinity.
    trajectories = [
        *(record_class(*run) for run in recording.draw_rules(1, 90, FACTORS)),
        *(record_class(*run) for run in recording.draw_rules(2, 20, [2.0, 4.0], (110, 125))),
        *(record_class(r[0], None, None, r[3]) for r in recording.draw_rules(3, 6, FACTORS)),
    ]
    for seed, module in enumerate(modules):
        for start, interval, _, steps in recording.draw_rules(10 + seed, 55, FACTORS):
            inner = module.SGD(0.01)
            trajectories.append(record_optimizer(start, interval, steps, inner))
        for start, _, _, steps in recording.draw_rules(20 + seed, 4, FACTORS):
            trajectories.append(record_optimizer(start, None, steps, module.SGD(0.01)))
    trainings = [
        train_keras(name, module, recording.draw_problem(seed))
        for seed in range(3)
        for name in INNER
        for module in modules
    ]
    trainings += [
        train_v1(recording.draw_problem(10 + seed), factor)
        for seed, factor in enumerate([2.0, 4.0, 8.0])
    ]
    version = ".".join(tf.__version__.split(".")[:2])
    name = keras.__name__.split(".")[0]
    versions = {"tensorflow": tf.__version__, "numpy": np.__version__}
    versions["tf_keras" if name == "tf_keras" else "tf.keras"] = keras.__version__
    recording.write(f"tensorflow-{version}", versions, trajectories, trainings)


if __name__ == "__main__":
    main()
