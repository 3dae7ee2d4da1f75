"""`loss_scale_optimizer` held step for step against live Keras, and what it promises beyond Keras.

Keras takes most of the arguments on the inner optimizer, since its own wrapper refuses them.
"""

import functools
import itertools
import os
import pickle
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale.keras import ema_params, loss_scale_optimizer

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras

pytestmark = pytest.mark.integration

RATE = 0.05
SCALE = {"initial_scale": 2.0**10, "dynamic_growth_steps": 3}
OVERFLOWS = {0, 1, 6, 11, 12, 20, 27}  # steps, of 36, in which one gradient is spoilt
BAD_VALUES = (np.inf, np.nan, -np.inf)
SHAPES = {"b": (3,), "k": (2, 3), "s": ()}


def decreasing(step):
    return RATE / (1 + 0.1 * step)


class DecreasingInKeras(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return decreasing(keras.ops.cast(step, "float32"))


def keras_sgd(rate=RATE, **arguments):
    return keras.optimizers.SGD(rate, momentum=0.9, **arguments)


def keras_adam(rate=RATE, **arguments):
    return keras.optimizers.Adam(rate, epsilon=EPSILON, **arguments)


def sgd(learning_rate=RATE):
    # Keras' velocity holds the rate of each step; Optax's `sgd` multiplies by the last one.
    return optax.chain(optax.scale_by_learning_rate(learning_rate), optax.trace(0.9))


def adam(learning_rate=RATE):
    return optax.adam(learning_rate, eps=EPSILON)


# Keras adds epsilon to a root that is not corrected for its bias, so only where epsilon does not
# count are the two the same.
EPSILON = 1e-20
OPTIMIZERS = {"sgd": (keras_sgd, sgd), "adam": (keras_adam, adam)}

CLIPNORM = {"clipnorm": 0.7}
CLIPVALUE = {"clipvalue": 0.4}
GLOBAL_CLIPNORM = {"global_clipnorm": 1.1}
DECAY = {"weight_decay": 0.3}
EMA = {"use_ema": True, "ema_momentum": 0.9}
OVERWRITTEN = {**EMA, "ema_overwrite_frequency": 3}
THREE = {"gradient_accumulation_steps": 3}

# What Keras' inner optimizer is given, and ours.
ARGUMENTS = {
    "plain": {},
    "clipnorm": CLIPNORM,
    "clipvalue": CLIPVALUE,
    "global_clipnorm": GLOBAL_CLIPNORM,
    "decay": DECAY,
    "accumulation": THREE,
    "accumulation of two": {"gradient_accumulation_steps": 2},
    "ema": EMA,
    "ema that overwrites": OVERWRITTEN,
    "ema that overwrites always": {**EMA, "ema_overwrite_frequency": 1},
    "clipnorm, decay, ema": {**CLIPNORM, **DECAY, **EMA},
    "global_clipnorm, decay, ema that overwrites": {**GLOBAL_CLIPNORM, **DECAY, **OVERWRITTEN},
    "accumulation, clipvalue": {**THREE, **CLIPVALUE},
    "accumulation, global_clipnorm, decay": {**THREE, **GLOBAL_CLIPNORM, **DECAY},
    "accumulation, clipnorm, ema": {**THREE, **CLIPNORM, **EMA},
}
WITH_ADAM = (
    "plain",
    "ema that overwrites",
    "clipnorm, decay, ema",
    "global_clipnorm, decay, ema that overwrites",
    "accumulation, global_clipnorm, decay",
)


class Step(NamedTuple):
    """What a step leaves behind."""

    params: dict
    ema: dict | None
    loss_scale: float
    growth_count: int
    iterations: int | None


def start():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(*, steps=36, overflows=OVERFLOWS):
    rng = np.random.default_rng(1)
    history = []
    for i in range(steps):
        grads = {name: rng.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
        bad, where = rng.choice(BAD_VALUES), rng.choice(sorted(SHAPES))
        if i in overflows:
            grads[where] = np.where(
                np.arange(grads[where].size).reshape(SHAPES[where]), grads[where], bad
            )
        history.append({name: grad.astype(np.float32) for name, grad in grads.items()})
    return history


def run_keras(inner, history, params=None, scale=SCALE):
    """Return what Keras' LossScaleOptimizer makes of the true gradients in `history`."""
    tx = keras.optimizers.LossScaleOptimizer(inner, **scale)
    params = start() if params is None else params
    variables = [keras.Variable(value) for value in params.values()]
    tx.build(variables)
    update = jax.jit(tx.stateless_apply)  # its `apply` does not work on JAX
    names = [variable.path.split("/", 1)[1] for variable in tx.variables]
    own = names.index("iteration", 1)  # the first is the wrapper's own, which stays 0
    state = [variable.value for variable in tx.variables]
    values = [variable.value for variable in variables]
    steps = []
    for grads in history:
        factor = state[names.index("dynamic_scale")]
        values, state = update(state, [grads[name] * factor for name in params], values)
        averages = [s for s, n in zip(state, names, strict=True) if "average" in n]
        steps.append(
            Step(
                dict(zip(params, map(np.asarray, values), strict=True)),
                dict(zip(params, map(np.asarray, averages), strict=True)) if averages else None,
                float(state[names.index("dynamic_scale")]),
                int(state[names.index("step_counter")]),
                int(state[own]),
            )
        )
    return steps


def run_ours(tx, history, params=None):
    """Return what `tx` makes of the true gradients in `history`."""
    params = jax.tree.map(jnp.asarray, start() if params is None else params)
    state = tx.init(params)
    has_ema = "EmaParamsState" in repr(jax.tree.structure(state))
    steps = []

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(ols.scale_loss(grads, state), state, params)
        return optax.apply_updates(params, updates), state

    for grads in history:
        params, state = update(grads, state, params)
        scale_state = ols.loss_scale_state(state)
        steps.append(
            Step(
                jax.tree.map(np.asarray, params),
                jax.tree.map(np.asarray, ema_params(state)) if has_ema else None,
                float(scale_state.loss_scale),
                int(scale_state.growth_count),
                None,
            )
        )
    return steps


def assert_close(actual, expected):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), actual, expected
    )


def assert_same_steps(ours, theirs, *, ema=True):
    for step, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert (our.loss_scale, our.growth_count) == (their.loss_scale, their.growth_count), step
        assert_close(our.params, their.params)
        if ema and their.iterations:
            assert_close(our.ema, their.ema)


def our_arguments(arguments):
    return {**arguments, "learning_rate": RATE} if "weight_decay" in arguments else arguments


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, "sgd") for name in ARGUMENTS] + [(name, "adam") for name in WITH_ADAM],
)
def test_every_argument_does_what_it_does_in_keras(name, optimizer):
    theirs, ours = OPTIMIZERS[optimizer]
    arguments = ARGUMENTS[name]
    history = gradients()
    tx = loss_scale_optimizer(ours(), **SCALE, **our_arguments(arguments))
    # Of an average while accumulating Keras makes something else: see below.
    ema = "use_ema" in arguments and "gradient_accumulation_steps" not in arguments
    expected = run_keras(theirs(**arguments), history)
    assert_same_steps(run_ours(tx, history), expected, ema=ema)
    moved = [step.params["b"] for step in expected]
    assert len({p.tobytes() for p in moved}) > len(history) // 4  # the comparison is not of nothing


@pytest.mark.parametrize("arguments", [{}, CLIPNORM, OVERWRITTEN], ids=str)
def test_decay_by_a_schedule_is_that_of_keras(arguments):
    history = gradients()
    tx = loss_scale_optimizer(
        sgd(decreasing), **SCALE, **DECAY, **arguments, learning_rate=decreasing
    )
    inner = keras_sgd(DecreasingInKeras(), **DECAY, **arguments)
    assert_same_steps(run_ours(tx, history), run_keras(inner, history), ema="use_ema" in arguments)


@pytest.mark.parametrize("rate", ["number", "schedule"])
@pytest.mark.parametrize("arguments", [{}, CLIPVALUE, OVERWRITTEN], ids=str)
def test_decay_by_an_injected_rate_is_that_of_keras(arguments, rate):
    history = gradients()
    ours, theirs = (RATE, RATE) if rate == "number" else (decreasing, DecreasingInKeras())
    inner = optax.inject_hyperparams(sgd)(ours)
    tx = loss_scale_optimizer(inner, **SCALE, **DECAY, **arguments)
    expected = run_keras(keras_sgd(theirs, **DECAY, **arguments), history)
    assert_same_steps(run_ours(tx, history), expected, ema="use_ema" in arguments)


def test_the_factor_may_be_fixed_as_on_keras_inner_optimizer():
    history = gradients(overflows=())
    inner = keras_sgd(loss_scale_factor=64.0)
    params = start()
    variables = [keras.Variable(value) for value in params.values()]
    inner.build(variables)
    for grads in history:
        inner.apply([grads[name] * np.float32(64) for name in params], variables)
    ours = run_ours(loss_scale_optimizer(sgd(), loss_scale_factor=64.0), history)
    assert_close(list(ours[-1].params.values()), [np.asarray(v.value) for v in variables])
    assert {step.loss_scale for step in ours} == {64.0}


# Where Keras goes wrong, or counts something else.


def test_keras_factor_grows_to_infinity_ours_to_its_bound():
    history = [{"p": np.float32(0.0)}] * 6
    params = {"p": np.float32(1.0)}
    scale = {"initial_scale": 2.0**126, "dynamic_growth_steps": 1}
    theirs = run_keras(keras.optimizers.SGD(0.1), history, params, scale)
    ours = run_ours(loss_scale_optimizer(optax.sgd(0.1), **scale), history, params)
    # A finite step, then zero times infinity for ever.
    assert [step.loss_scale for step in theirs] == [2.0**127, *[np.inf] * 5]
    assert [step.loss_scale for step in ours] == [2.0**126] * 6
    usual = loss_scale_optimizer(optax.sgd(0.1), 2.0**23, 1)
    assert [s.loss_scale for s in run_ours(usual, history, params)] == [2.0**24] * 6


def test_keras_factor_shrinks_below_one_ours_stays_at_one():
    history = [{"p": np.float32(np.inf)}] * 6
    params = {"p": np.float32(1.0)}
    scale = {"initial_scale": 4.0, "dynamic_growth_steps": 2000}
    theirs = run_keras(keras.optimizers.SGD(0.1), history, params, scale)
    ours = run_ours(loss_scale_optimizer(optax.sgd(0.1), 4.0), history, params)
    assert [step.loss_scale for step in theirs] == [2, 1, 0.5, 0.25, 0.125, 0.0625]
    assert [step.loss_scale for step in ours] == [2, 1, 1, 1, 1, 1]


def test_keras_ema_moves_on_every_micro_step_ours_on_applied_steps():
    history = gradients(steps=12, overflows={4})
    arguments = {"gradient_accumulation_steps": 3, **EMA}
    theirs = run_keras(keras_sgd(**arguments), history)
    ours = run_ours(loss_scale_optimizer(sgd(), **SCALE, **arguments), history)
    assert_same_steps(ours, theirs, ema=False)

    # The first window ends with step 2, the second, for which step 4 does not count, with step 6.
    # Keras: each micro-step of the second window pulls the average to the params.
    first, second = theirs[2].params["b"], theirs[6].params["b"]
    assert_close(theirs[6].ema["b"], 0.9 * first + 0.1 * second)
    third = theirs[9].params["b"]
    expected = theirs[6].ema["b"]
    for params in (second, second, third):
        expected = 0.9 * expected + 0.1 * params
    assert_close(theirs[9].ema["b"], expected)

    expected = first
    for step, applied in ((6, second), (9, third)):
        assert_same_bits(ours[step - 1].ema, ours[step - 3].ema)
        expected = 0.9 * expected + 0.1 * applied
        assert_close(ours[step].ema["b"], expected)


def test_keras_ema_overwrites_within_a_window_ours_at_its_end():
    history = gradients(steps=12, overflows=())
    arguments = {"gradient_accumulation_steps": 3, **EMA, "ema_overwrite_frequency": 2}
    theirs = run_keras(keras_sgd(**arguments), history)
    ours = run_ours(loss_scale_optimizer(sgd(), **SCALE, **arguments), history)
    # Keras overwrites on each micro-step of the second window, and so twice before it moves.
    for step in (3, 4, 5):
        assert_same_bits(theirs[step].params, theirs[step].ema)
    # Ours moves the params only with the last of a window, and overwrites with the second of two.
    for step, before in ((3, 2), (4, 2), (7, 5), (10, 8)):
        assert_same_bits(ours[step].params, ours[before].params)
    for step in (5, 11):
        assert_close(ours[step].params, ours[step].ema)
    assert np.abs(ours[8].params["b"] - ours[8].ema["b"]).max() > 1e-2


def test_keras_schedules_count_micro_steps_ours_applied_steps():
    history = gradients(steps=6, overflows={1})
    ones = jax.tree.map(np.ones_like, start())
    finite = [jax.tree.map(np.zeros_like, g) for g in history]
    finite[1] = history[1]

    def rates(steps):
        """Undo `params -= rate * weight_decay * params`, from which nothing else moves them."""
        values = [1.0, *(float(step.params["s"]) for step in steps)]
        return [(1 - b / a) / 0.3 for a, b in itertools.pairwise(values)]

    two = {"gradient_accumulation_steps": 2, **DECAY}
    theirs = run_keras(keras_sgd(DecreasingInKeras(), **two), finite, ones)
    tx = loss_scale_optimizer(sgd(decreasing), **SCALE, **two, learning_rate=decreasing)
    ours = run_ours(tx, finite, ones)
    # Applied with the second and the fourth finite step; the skipped one counts for nobody.
    expected = {"theirs": [0, 0, decreasing(1), 0, decreasing(3), 0]}
    expected["ours"] = [0, 0, decreasing(0), 0, decreasing(1), 0]
    np.testing.assert_allclose(rates(theirs), expected["theirs"], atol=1e-6)
    np.testing.assert_allclose(rates(ours), expected["ours"], atol=1e-6)


def test_keras_clips_a_norm_that_overflows_to_nan_ours_to_zero():
    history = [{"p": np.full(2, 3e37, np.float32)}]  # finite, but its square is not
    params = {"p": np.ones(2, np.float32)}
    scale = {"initial_scale": 1.0, "dynamic_growth_steps": 2000}
    inner = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    (theirs,) = run_keras(inner, history, params, scale)
    tx = loss_scale_optimizer(optax.sgd(1.0), **scale, global_clipnorm=1.0)
    (ours,) = run_ours(tx, history, params)
    assert np.isnan(theirs.params["p"]).all()
    assert_same_bits(ours.params, params)


def test_keras_decays_before_the_inner_optimizer_ours_after_it():
    # The difference shows in an optimizer that reads the params, as does this one, which removes
    # them: Keras' then sees the decayed ones.
    class Removing(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            del gradient, learning_rate
            self.assign_sub(variable, variable)

    remove = optax.stateless(lambda _, params: jax.tree.map(jnp.negative, params))
    history, params = [{"p": np.float32(0.0)}], {"p": np.float32(1.0)}
    arguments = {"weight_decay": 0.5}
    (theirs,) = run_keras(Removing(0.1, **arguments), history, params)
    tx = loss_scale_optimizer(remove, **SCALE, **arguments, learning_rate=0.1)
    (ours,) = run_ours(tx, history, params)
    np.testing.assert_allclose((theirs.params["p"], ours.params["p"]), (0.0, -0.05), rtol=1e-6)


def test_keras_and_ours_count_no_skipped_step_tensorflow_does():
    # TensorFlow's own test: 2 iterations after a gradient of 2 and one of NaN.
    history, params = [{"p": np.float32(2.0)}, {"p": np.float32(np.nan)}], {"p": np.float32(5.0)}
    theirs = run_keras(keras.optimizers.SGD(1.0), history, params)
    tx = loss_scale_optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
    state = tx.init(params)
    values = params
    for i, grads in enumerate(history):
        updates, state = tx.update(ols.scale_loss(grads, state), state, values)
        values = optax.apply_updates(values, updates)
        assert float(values["p"]) == theirs[i].params["p"] == 3.0
        assert int(state.inner_state.count) == theirs[i].iterations == 1


def test_keras_refuses_the_arguments_on_the_wrapper_ours_takes_them():
    for arguments in ARGUMENTS.values():
        if arguments:
            with pytest.raises(ValueError, match="does not support"):
                keras.optimizers.LossScaleOptimizer(keras_sgd(), **arguments)
            loss_scale_optimizer(sgd(), **our_arguments(arguments))
    with pytest.raises(ValueError, match="no longer supports `dynamic=False`"):
        keras.optimizers.LossScaleOptimizer(keras_sgd(), dynamic=False)
    loss_scale_optimizer(sgd(), 2.0, dynamic=False)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        loss_scale_optimizer(sgd(), nesterov=True)


def test_keras_inner_factor_is_disabled_ours_is_refused():
    inner = keras.optimizers.SGD(0.5, loss_scale_factor=100.0)
    keras.optimizers.LossScaleOptimizer(inner)
    assert inner.loss_scale_factor is None
    twice = loss_scale_optimizer(loss_scale_optimizer(optax.sgd(0.5), loss_scale_factor=100.0))
    with pytest.raises(ValueError, match="once, around the whole"):
        twice.init(jnp.ones(2))


# What Keras' own tests publish: tf.keras (Keras 2), then Keras 3.


def take(tx, params, state, grads, *, scaled=False):
    """Take a step with true gradients, or with those of the scaled loss."""
    grads = jax.tree.map(jnp.float32, grads)
    grads = grads if scaled else ols.scale_loss(grads, state)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def scale_of(state):
    return float(ols.loss_scale_state(state).loss_scale)


def test_tf_keras_fixed_minimize():
    tx = loss_scale_optimizer(optax.sgd(2.0), 10, dynamic=False)
    params = jnp.float32(5.0)
    state = tx.init(params)
    loss, grad = ols.value_and_grad(lambda p: p)(state, params)
    assert (float(loss), float(grad)) == (5.0, 10.0)
    params, state = take(tx, params, state, grad, scaled=True)
    assert (float(params), scale_of(state)) == (3.0, 10.0)


def test_tf_keras_dynamic():
    tx = loss_scale_optimizer(optax.sgd(2.0), 2, 1)
    params = jnp.float32(5.0)
    state = tx.init(params)
    for scaled, expected in ((2.0, 3.0), (4.0, 1.0)):
        _, grad = ols.value_and_grad(lambda p: p)(state, params)
        assert float(grad) == scaled
        params, state = take(tx, params, state, grad, scaled=True)
        assert float(params) == expected


def test_tf_keras_defaults():
    tx = loss_scale_optimizer(optax.sgd(1.0))
    params = jnp.zeros(())
    state = tx.init(params)
    assert scale_of(state) == 2.0**15
    state = optax.tree.set(state, growth_count=jnp.int32(1998))
    _, state = take(tx, params, state, 1.0)
    assert scale_of(state) == 2.0**15
    _, state = take(tx, params, state, 1.0)
    assert scale_of(state) == 2.0**16


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_tf_keras_clipping(clip):
    params = jnp.float32(5.0)
    state = loss_scale_optimizer(optax.sgd(2.0), 2, 1, **{clip: 2.0}).init(params)
    for threshold, grad, expected in (
        (2.0, 4.0, (1, 4)),
        (3.0, 4.0, (-5, 8)),
        (3.0, np.inf, (-5, 4)),
    ):
        tx = loss_scale_optimizer(optax.sgd(2.0), 2, 1, **{clip: threshold})
        params, state = take(tx, params, state, grad)
        assert (float(params), scale_of(state)) == expected


def test_tf_keras_dynamic_update():
    tx = loss_scale_optimizer(optax.sgd(1.0), 2, 1)
    params = jnp.array([1.0, 2.0])
    state = tx.init(params)
    for grad, expected in ((2.0, 4), (np.nan, 2)):
        params, state = take(tx, params, state, np.full(2, grad))
        assert (params.tolist(), scale_of(state)) == ([-1.0, 0.0], expected)


def test_tf_keras_a_float16_loss():
    tx = loss_scale_optimizer(optax.sgd(2.0), 2, 1)
    params = jnp.float32(5.0)
    state = tx.init(params)
    with pytest.warns(UserWarning, match="float16"):
        _, grad = ols.value_and_grad(lambda p: p.astype(jnp.float16))(state, params)
    params, _ = take(tx, params, state, grad, scaled=True)
    assert float(params) == 3.0


@pytest.mark.parametrize("mapped", ["pmap", "shard_map", "shard_map, check_vma=False"])
def test_tf_keras_nan_on_one_replica_only(mapped):
    tx = loss_scale_optimizer(
        optax.sgd(1.0, momentum=0.9), 2, 2, axis_name="replicas", **CLIPNORM, **OVERWRITTEN
    )
    params = jnp.array([1.0, 2.0])
    state = tx.init(params)

    def step(grads):
        return take(tx, params, state, grads.reshape(2), scaled=True)

    grads = jnp.array([[1.0, 1.0], [1.0, jnp.nan]])
    if mapped == "pmap":
        mapped_step = jax.pmap(step, axis_name="replicas", devices=jax.devices()[:2])
    else:
        mapped_step = jax.jit(
            jax.shard_map(
                lambda g: jax.tree.map(lambda x: x[None], step(g)),
                mesh=jax.sharding.Mesh(jax.devices()[:2], ("replicas",)),
                in_specs=PartitionSpec("replicas"),
                out_specs=PartitionSpec("replicas"),
                check_vma=mapped == "shard_map",
            )
        )
    after = mapped_step(grads)
    for replica in range(2):
        new_params, new_state = jax.tree.map(lambda x, i=replica: x[i], after)
        assert scale_of(new_state) == 1.0
        assert_same_bits((new_params, new_state.inner_state), (params, state.inner_state))
    new_params, _ = jax.tree.map(lambda x: x[1], mapped_step(jnp.ones((2, 2))))
    assert (new_params != params).all()


def test_tf_keras_slots():
    tx = loss_scale_optimizer(optax.sgd(1.0, momentum=1.0), 2, 1)
    params = jnp.array([1.0, 2.0])
    state = tx.init(params)
    for slot, expected, scale in ((1.0, [0.0, 1.0], 4), (2.0, [-2.0, -1.0], 8)):
        params, state = take(tx, params, state, np.ones(2))
        assert (params.tolist(), scale_of(state)) == (expected, scale)
        assert optax.tree.get(state, "trace").tolist() == [slot, slot]  # Keras: minus that


@pytest.mark.parametrize(("saved", "restored"), [(True, True), (True, False), (False, True)])
def test_tf_keras_checkpoint_matrix(saved, restored):
    plain = optax.sgd(1.0, momentum=1.0)
    wrapped = loss_scale_optimizer(plain, 1, 2)

    def take_either(tx, params, state):
        if isinstance(state, ols.WithLossScalingState):
            return take(tx, params, state, 1.0)
        updates, state = tx.update(jnp.float32(1.0), state, params)
        return optax.apply_updates(params, updates), state

    tx = wrapped if saved else plain
    params = jnp.float32(2.0)
    params, state = take_either(tx, params, tx.init(params))
    assert (float(params), float(optax.tree.get(state, "trace"))) == (1.0, 1.0)
    if saved:
        assert (scale_of(state), int(state.loss_scale_state.growth_count)) == (1.0, 1)

    params, state = pickle.loads(pickle.dumps((params, state)))  # noqa: S301
    if saved and not restored:
        state = state.inner_state
    if restored and not saved:
        state = wrapped.init(params)._replace(inner_state=state)
    if restored:
        assert int(state.loss_scale_state.growth_count) == (1 if saved else 0)
    params, state = take_either(wrapped if restored else plain, params, state)
    assert (float(params), float(optax.tree.get(state, "trace"))) == (-1.0, 2.0)


def test_tf_keras_hyperparameters_are_read_and_set_through_the_wrapper():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.0)
    tx = loss_scale_optimizer(inner, weight_decay=0.5, clipnorm=1.0, use_ema=True)
    params = jnp.float32(1.0)
    state = tx.init(params)
    assert float(optax.tree.get(state, "learning_rate")) == 1.0
    params, state = take(tx, params, state, 0.0)
    assert float(params) == 0.5  # 1 - 1.0 * 0.5 * 1
    state = optax.tree.set(state, learning_rate=jnp.float32(0.5))
    params, state = take(tx, params, state, 0.0)
    assert float(params) == 0.375  # 0.5 - 0.5 * 0.5 * 0.5
    assert int(optax.tree.get(state, "count")) == 2  # the inner optimizer's, and no other


KERAS_VARIABLES = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("grads", "expected"),
    [([1.0, 6.0, 7.0, 2.0], [0.5, -1.0, -0.5, 3.0]), ([np.inf] * 4, KERAS_VARIABLES)],
    ids=["finite_step", "infinite_step"],
)
def test_keras_finite_and_infinite_step(grads, expected):
    params = {"p": np.array(KERAS_VARIABLES, np.float32)}
    history = [{"p": np.array(grads, np.float32)}]
    (ours,) = run_ours(loss_scale_optimizer(optax.sgd(0.5)), history, params)
    (theirs,) = run_keras(keras.optimizers.SGD(0.5), history, params, {})
    assert ours.params["p"].tolist() == theirs.params["p"].tolist() == expected


@pytest.mark.parametrize(
    ("scale", "grad", "steps", "scaled"),
    [((400,), np.inf, 4, 25.0), ((2, 2), 1.0, 8, 32.0)],
    ids=["downscaling", "upscaling"],
)
def test_keras_downscaling_and_upscaling(scale, grad, steps, scaled):
    tx = loss_scale_optimizer(optax.sgd(0.5), *scale)
    params = jnp.ones(())
    state = tx.init(params)
    for _ in range(steps):
        params, state = take(tx, params, state, grad)
    assert float(ols.scale_loss(jnp.float32(1.0), state)) == scaled


def test_keras_random_mix():
    history = [{"p": np.float32(1.0 if flag == "T" else np.inf)} for flag in "FTTTFTFTTTF"]
    params = {"p": np.float32(1.0)}
    scale = {"initial_scale": 4.0, "dynamic_growth_steps": 2}
    ours = run_ours(loss_scale_optimizer(optax.sgd(0.5), **scale), history, params)
    theirs = run_keras(keras.optimizers.SGD(0.5), history, params, scale)
    assert_same_steps(ours, theirs, ema=False)
    assert [s.loss_scale for s in ours] == [2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1]
    assert [s.growth_count for s in ours] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert [s.iterations for s in theirs] == [0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 7]


# What is promised beyond Keras.

EVERYTHING = {**GLOBAL_CLIPNORM, **DECAY, **OVERWRITTEN, "gradient_accumulation_steps": 2}


def everything():
    return loss_scale_optimizer(
        optax.adam(decreasing), **SCALE, **EVERYTHING, learning_rate=decreasing
    )


def types(tree):
    return jax.tree.map(lambda x: jax.typeof(x).str_short(), tree)


def test_nothing_moves_on_a_skipped_step_and_the_state_keeps_its_type():
    tx = everything()
    params = jax.tree.map(jnp.asarray, start())
    state = tx.init(params)
    expected = types((params, state))
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        return take(tx, params, state, grads)

    for i, grads in enumerate(gradients()):
        before = params, state
        params, state = step(params, state, grads)
        assert types((params, state)) == expected
        assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(state))
        if i in OVERFLOWS:
            assert_same_bits((params, state.inner_state), (before[0], before[1].inner_state))
    assert len(traces) == 1


def test_a_scan_is_the_loop():
    tx = everything()
    params = jax.tree.map(jnp.asarray, start())
    history = gradients()
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *history)

    def body(carry, grads):
        return take(tx, *carry, grads), None

    (params, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, stacked))(
        (params, tx.init(params))
    )
    last = run_ours(tx, history)[-1]
    assert_close((params, ema_params(state)), (last.params, last.ema))


@pytest.mark.parametrize("rate", ["number", "schedule", "injected"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_small_params_are_decayed_and_averaged_in_float32(dtype, rate):
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=2.0**-12)
    tx = loss_scale_optimizer(
        inner,
        learning_rate={"number": 2.0**-12, "schedule": lambda _: 2.0**-12, "injected": None}[rate],
        weight_decay=2.0**-14,
        use_ema=True,
        ema_momentum=0.5,
    )
    params = {"p": jnp.ones(2, dtype)}
    state = tx.init(params)
    expected = types(state)
    grads = {"p": jnp.zeros(2, dtype)}
    # Under jit XLA may keep more digits between two operations than their dtype has.
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(grads, state, params)
        # 2**-26 is 0 in float16, and so it would be had it been multiplied there.
        assert np.asarray(updates["p"], np.float64).tolist() == [-(2.0**-26)] * 2
        assert types(state) == expected
    params = {"p": jnp.full(2, 1.015625, dtype)}
    _, state = update(grads, state, params)
    average = ema_params(state)["p"]
    assert average.dtype == jnp.float32
    assert average.tolist() == [1.0078125] * 2


def test_an_overwriting_step_in_float16_gives_the_rounded_average():
    tx = loss_scale_optimizer(optax.sgd(0.1), use_ema=True, ema_overwrite_frequency=1)
    params = jax.tree.map(jnp.float16, start())
    state = tx.init(params)
    for grads in gradients(overflows=()):
        params, state = take(tx, params, state, grads)
        rounded = jax.tree.map(lambda e: e.astype(jnp.float16), ema_params(state))
        assert_same_bits(params, rounded)


def test_params_that_are_integers_have_no_average_but_themselves():
    tx = loss_scale_optimizer(
        optax.stateless(lambda grads, _: grads),
        1,
        use_ema=True,
        ema_momentum=1.0,
        ema_overwrite_frequency=1,
    )
    params = {"p": jnp.ones(2), "n": jnp.arange(2), "none": None}
    state = tx.init(params)
    grads = {"p": jnp.ones(2), "n": jnp.array([3, 3]), "none": None}
    for expected in ([3, 4], [6, 7]):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert_same_bits((params["n"], ema_params(state)["n"]), (jnp.array(expected),) * 2)
    assert params["p"].tolist() == ema_params(state)["p"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("scale", "ulps"), [("near", 0), ("far", 1)])
def test_the_average_replaces_the_params_as_closely_as_an_addition_can(scale, ulps):
    rng = np.random.default_rng(2)
    old = rng.normal(size=4096).astype(np.float32)
    # The average follows from what the inner optimizer makes of the params: nothing, or anything.
    factor = rng.uniform(0.6, 1.9, 4096) if scale == "near" else 10 ** rng.uniform(-9, 9, 4096)
    sign = 1 if scale == "near" else rng.choice([-1, 1], 4096)
    new = (old * factor * sign).astype(np.float32)
    tx = loss_scale_optimizer(
        optax.stateless(lambda _, params: new - params), use_ema=True, ema_overwrite_frequency=1
    )
    state = tx.init(old)
    updates, state = tx.update(old, state, jnp.asarray(old))
    ema = np.asarray(ema_params(state))
    after = np.asarray(optax.apply_updates(jnp.asarray(old), updates))
    error = np.abs(after.astype(np.float64) - ema)
    assert (error <= ulps * np.spacing(np.maximum(np.abs(old), np.abs(ema)))).all()


def test_under_jit_the_average_replaces_the_params_to_two_ulps():
    rng = np.random.default_rng(3)
    tx = loss_scale_optimizer(optax.sgd(0.1), use_ema=True, ema_overwrite_frequency=2)

    @jax.jit
    def step(params, state, grads):
        return take(tx, params, state, grads)

    params = jnp.asarray(rng.normal(size=4096).astype(np.float32))
    state = tx.init(params)
    for i in range(20):
        old = np.asarray(params)
        params, state = step(params, state, rng.normal(size=4096).astype(np.float32))
        ema = np.asarray(ema_params(state))
        error = np.abs(np.asarray(params, np.float64) - ema)
        close = error <= 2 * np.spacing(np.maximum(np.abs(old), np.abs(ema)))
        assert close.all() if i % 2 else i == 0 or not close.any()


def test_the_weights_of_the_average_add_up_to_one():
    # With 0.9999 and 0.0001 rounded to float32 on their own, it would be 2e-4 too small.
    history = np.random.default_rng(4).uniform(0.5, 1.5, (20_000, 64)).astype(np.float32)
    become = optax.stateless(lambda grads, params: jax.tree.map(jnp.subtract, grads, params))
    tx = loss_scale_optimizer(become, 1, 10**6, use_ema=True, ema_momentum=0.9999)
    params = jnp.zeros(64)

    def body(carry, grads):
        return take(tx, *carry, grads), None

    (_, state), _ = jax.lax.scan(body, (params, tx.init(params)), history)
    momentum = float(np.float32(0.9999))
    expected = history[0].astype(np.float64)
    for params in history[1:]:
        expected = momentum * expected + (1 - momentum) * params
    assert abs(np.mean(ema_params(state) - expected)) < 1e-5


def test_momentum_of_zero_and_one_are_the_params_and_the_first_ones():
    history = gradients(steps=5, overflows={0})
    zero = run_ours(loss_scale_optimizer(sgd(), use_ema=True, ema_momentum=0), history)
    one = run_ours(loss_scale_optimizer(sgd(), use_ema=True, ema_momentum=1), history)
    for step in zero:
        assert_same_bits(step.ema, step.params)
    assert_same_bits(one[0].ema, start())  # nothing has been applied yet
    for step in one[1:]:
        assert_same_bits(step.ema, one[1].params)


def test_between_steps_of_accumulation_no_bit_of_the_params_moves():
    # The inner updates of the first micro-step alone would be infinite, and -0.0 + 0.0 is 0.0.
    tx = loss_scale_optimizer(
        optax.scale(-8.0), loss_scale_factor=1.0, gradient_accumulation_steps=2
    )
    params = jnp.array([-0.0, 1.0])
    after, state = take(tx, params, tx.init(params), jnp.full(2, 1e38))
    assert_same_bits(after, params)
    after, state = take(tx, after, state, jnp.full(2, -0.75e38))
    np.testing.assert_allclose(after, -1e38, rtol=1e-6)


def test_a_bad_micro_step_is_dropped_alone():
    tx = loss_scale_optimizer(
        optax.sgd(1.0), 8, gradient_accumulation_steps=2, **DECAY, learning_rate=0.0
    )
    params = jnp.zeros(())
    state = tx.init(params)
    step = jax.jit(functools.partial(take, tx))
    history = []
    for grad in (1.0, np.nan, 3.0, np.inf, np.inf, 5.0, 7.0):
        params, state = step(params, state, grad)
        history.append(float(params))
    assert history == [0, 0, -2, -2, -2, -2, -8]


def test_extra_arguments_reach_the_inner_optimizer_through_everything():
    def update(updates, state, params=None, *, value, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda u: -value * u, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = loss_scale_optimizer(inner, 1, **EVERYTHING, learning_rate=RATE)
    update = jax.jit(tx.update)
    params = jnp.zeros(3)
    state = tx.init(params)
    for expected in (0.0, -0.5):
        updates, state = update(jnp.full(3, 0.25), state, params, value=jnp.float32(2.0))
        np.testing.assert_allclose(updates, expected, rtol=1e-6)
    _, state = update(jnp.full(3, 0.25), state, params, value=jnp.float32(np.nan))
    assert int(ols.loss_scale_state(state).total_skipped) == 1
    assert scale_of(state) == 1.0


def test_without_other_arguments_the_inner_state_is_the_optimizers_own():
    params = start()
    for arguments in ({}, {"loss_scale_factor": 8.0}, {"initial_scale": 8.0, "dynamic": False}):
        state = loss_scale_optimizer(optax.adam(1e-3), **arguments).init(params)
        assert_same_bits(state.inner_state, optax.adam(1e-3).init(params))


@pytest.mark.parametrize(
    ("arguments", "scales", "moved"),
    [
        ({"initial_scale": 8.0, "dynamic": False}, {8.0}, False),
        ({"loss_scale_factor": 8.0}, {8.0}, True),
        ({"loss_scale_factor": 8.0, "dynamic": False}, {8.0}, True),
    ],
    ids=str,
)
def test_a_fixed_factor_skips_unless_it_is_a_loss_scale_factor(arguments, scales, moved):
    history = [{"p": np.float32(np.inf)}, {"p": np.float32(np.inf)}]
    tx = loss_scale_optimizer(optax.sgd(1.0), **arguments)
    steps = run_ours(tx, history, {"p": np.float32(1.0)})
    assert {step.loss_scale for step in steps} == scales
    assert np.isinf(steps[0].params["p"]) == moved


@pytest.mark.parametrize(("start_at", "bounds"), [(2.0**-3, (2.0**-3, 2**24)), (2**30, (1, 2**30))])
def test_a_factor_may_start_beyond_the_usual_bounds(start_at, bounds):
    tx = loss_scale_optimizer(optax.sgd(1.0), start_at, 1)
    params = {"p": np.float32(1.0)}
    down = run_ours(tx, [{"p": np.float32(np.nan)}] * 40, params)
    up = run_ours(tx, [{"p": np.float32(0.0)}] * 40, params)
    assert (down[-1].loss_scale, up[-1].loss_scale) == bounds


def test_init_takes_shapes_and_shares_no_buffer():
    tx = everything()
    params = jax.tree.map(jnp.asarray, start())
    state = tx.init(params)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    assert types(tx.init(shapes)) == types(jax.eval_shape(tx.init, params)) == types(state)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(set(pointers)) == len(pointers)
    assert_same_bits(ema_params(state), params)


def test_init_of_weakly_typed_params_is_strongly_typed():
    state = loss_scale_optimizer(optax.sgd(0.1), use_ema=True).init({"p": jnp.asarray(1.0)})
    assert not jax.typeof(ema_params(state)["p"]).weak_type


def test_the_average_is_sharded_like_the_params():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, PartitionSpec("x"))
    params = jax.device_put(jnp.ones(16), sharding)
    state = loss_scale_optimizer(optax.sgd(0.1), use_ema=True).init(params)
    assert ema_params(state).sharding.is_equivalent_to(sharding, 1)


def test_a_state_in_which_nothing_is_at_its_default_is_pickled():
    tx = everything()
    params = jax.tree.map(jnp.asarray, start())
    state = tx.init(params)
    step = jax.jit(functools.partial(take, tx))
    for grads in gradients(steps=9):
        params, state = step(params, state, grads)
    assert_same_bits(pickle.loads(pickle.dumps(state)), state)  # noqa: S301


def test_ema_params_finds_the_average_wherever_it_is():
    tx = everything()
    state = tx.init(start())
    assert_same_bits(ema_params({"train": [{"opt_state": state}]}), start())


def test_ema_params_says_where_it_looked():
    tx = loss_scale_optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"got 0 in a WithLossScalingState.*nowhere.*use_ema=True"):
        ema_params(tx.init(jnp.ones(2)))
    state = everything().init(start())
    with pytest.raises(ValueError, match=r"got 2 in a dict.*\['one'\].*\['two'\]"):
        ema_params({"one": state, "two": state})


REFUSED = [
    # arguments, error, what it says
    ({"initial_scale": False}, TypeError, "`initial_scale` must be a Python number, got False"),
    ({"initial_scale": 0}, ValueError, "`initial_scale` must lie between .* got 0"),
    ({"initial_scale": float("nan")}, ValueError, "`initial_scale` must be finite .* got nan"),
    ({"dynamic_growth_steps": 2.0}, TypeError, "must be an integer, got 2.0"),
    ({"dynamic_growth_steps": 0}, ValueError, "must be at least 1 .* got 0"),
    ({"dynamic": False}, ValueError, "`initial_scale` must be given .* got None.* 2\\*\\*15"),
    (
        {"dynamic": False, "initial_scale": 2, "dynamic_growth_steps": 5},
        ValueError,
        "`dynamic_growth_steps` must be None for a fixed loss scale, got 5",
    ),
    (
        {"loss_scale_factor": 2, "dynamic_growth_steps": 5},
        ValueError,
        "`dynamic_growth_steps` must be None for a fixed loss scale, got 5",
    ),
    (
        {"loss_scale_factor": 2, "initial_scale": 5},
        ValueError,
        "`initial_scale` must be None with `loss_scale_factor`, got 5",
    ),
    ({"loss_scale_factor": -1}, ValueError, "must lie between .* got -1"),
    ({"weight_decay": -0.1, "learning_rate": 1}, ValueError, "`weight_decay` must lie between 0"),
    ({"weight_decay": 0.1, "learning_rate": -1}, ValueError, "`learning_rate` must lie between 0"),
    ({"weight_decay": 0.1, "learning_rate": "1"}, TypeError, "`learning_rate` must be a Python"),
    ({"learning_rate": 0.1}, ValueError, "`learning_rate` must be None without `weight_decay`"),
    ({"clipnorm": 0}, ValueError, "`clipnorm` must lie between .* got 0"),
    ({"clipvalue": -1.0}, ValueError, "`clipvalue` must lie between .* got -1.0"),
    ({"global_clipnorm": jnp.ones(())}, TypeError, "`global_clipnorm` must be a Python number"),
    (
        {"clipnorm": 1, "clipvalue": 2},
        ValueError,
        "only one of .* got {'clipnorm': 1, 'clipvalue': 2}",
    ),
    ({"clipnorm": 1, "global_clipnorm": 2}, ValueError, "only one of"),
    ({"clipvalue": 1, "global_clipnorm": 2}, ValueError, "only one of"),
    ({"use_ema": True, "ema_momentum": 1.1}, ValueError, "`ema_momentum` must lie between 0 and 1"),
    ({"use_ema": True, "ema_momentum": None}, TypeError, "`ema_momentum` must be a Python number"),
    (
        {"use_ema": True, "ema_overwrite_frequency": 0},
        ValueError,
        "`ema_overwrite_frequency` must be at least 1",
    ),
    (
        {"ema_overwrite_frequency": 3},
        ValueError,
        "`ema_overwrite_frequency` must be None without an average, got 3. Set `use_ema=True`",
    ),
    ({"gradient_accumulation_steps": 1}, ValueError, "`gradient_accumulation_steps` must be at"),
    ({"gradient_accumulation_steps": 2.5}, TypeError, "`gradient_accumulation_steps` must be an"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_an_argument_is_refused_when_the_optimizer_is_built(arguments, error, message):
    with pytest.raises(error, match=message):
        loss_scale_optimizer(optax.sgd(0.1), **arguments)


LARGEST = float(np.finfo(np.float32).max)
AT_THE_BOUNDS = [
    *({"initial_scale": value} for value in (2.0**-126, 2.0**126)),
    *({"loss_scale_factor": value} for value in (2.0**-126, 2.0**126)),
    *({"dynamic_growth_steps": value} for value in (1, 2**31 - 1)),
    *({"weight_decay": value, "learning_rate": value} for value in (0, LARGEST)),
    *({clip: 2.0**-126} for clip in ("clipnorm", "clipvalue", "global_clipnorm")),
    *({clip: LARGEST} for clip in ("clipnorm", "clipvalue", "global_clipnorm")),
    *({"use_ema": True, "ema_overwrite_frequency": value} for value in (1, 2**31 - 1)),
    *({"gradient_accumulation_steps": value} for value in (2, 2**31 - 1)),
]
# With the name that the policy has for it.
BEYOND = [
    ("initial_scale", 2.0**-127, "initial_scale"),
    ("initial_scale", 2.0**127, "initial_scale"),
    ("loss_scale_factor", 2.0**127, "scale"),
    ("dynamic_growth_steps", 2**31, "growth_interval"),
    ("clipnorm", 2.0**-127, "clipnorm"),
    ("clipnorm", 2 * LARGEST, "clipnorm"),
    ("clipvalue", float("inf"), "clipvalue"),
    ("gradient_accumulation_steps", 2**31, "gradient_accumulation_steps"),
]


@pytest.mark.parametrize("arguments", AT_THE_BOUNDS, ids=str)
def test_the_bounds_themselves_are_allowed(arguments):
    loss_scale_optimizer(optax.sgd(0.1), **arguments)


@pytest.mark.parametrize(("argument", "value", "name"), BEYOND)
def test_what_is_beyond_the_bounds_is_refused_by_its_name(argument, value, name):
    with pytest.raises(ValueError, match=f"`{name}` must .* got"):
        loss_scale_optimizer(optax.sgd(0.1), **{argument: value})


def test_the_counters_are_int32():
    tx = loss_scale_optimizer(optax.sgd(0.1), weight_decay=0.1, learning_rate=0.1, use_ema=True)
    state = tx.init(jnp.ones(2))
    steps = [optax.tree.get(state, name) for name in ("decay_steps", "ema_steps")]
    assert [(n.dtype, n.shape, n.weak_type) for n in steps] == [(jnp.int32, (), False)] * 2


def test_what_stands_beside_a_schedule_is_checked_too():
    with pytest.raises(ValueError, match="`weight_decay` must lie between 0"):
        loss_scale_optimizer(optax.sgd(0.1), weight_decay=-1.0, learning_rate=lambda count: count)


@pytest.mark.parametrize("argument", ["clipnorm", "weight_decay", "ema_momentum"])
def test_only_the_learning_rate_may_be_a_schedule(argument):
    with pytest.raises(TypeError, match=f"`{argument}` must be a Python number, got <function"):
        loss_scale_optimizer(optax.sgd(0.1), **{argument: lambda count: count})


def test_numpy_numbers_are_numbers():
    tx = loss_scale_optimizer(
        optax.sgd(0.1),
        np.float32(8),
        np.int64(2),
        clipnorm=np.float64(1.0),
        gradient_accumulation_steps=np.int32(2),
    )
    run_ours(tx, gradients(steps=2))


@pytest.mark.parametrize(
    "inner",
    [keras_sgd(), optax.adam, optax.MultiSteps(sgd(), 2)],
    ids=["Keras' optimizer", "a factory", "MultiSteps"],
)
def test_an_inner_optimizer_that_is_not_optax_is_refused(inner):
    with pytest.raises(TypeError, match=r"must be an optax\.Gradient.*\. (Call|Use) "):
        loss_scale_optimizer(inner)


def test_decay_without_a_rate_names_both_remedies():
    remedies = r"Give `learning_rate=`.*inject_hyperparams"
    with pytest.raises(ValueError, match=rf"0 injected.*nowhere.*{remedies}"):
        loss_scale_optimizer(optax.sgd(0.1), weight_decay=0.1).init(jnp.ones(2))
    two = optax.partition(
        {name: optax.inject_hyperparams(optax.sgd)(0.1) for name in "bks"}, {n: n for n in "bks"}
    )
    with pytest.raises(ValueError, match=rf"3 injected.*\['b'\].*\['k'\].*{remedies}"):
        loss_scale_optimizer(two, weight_decay=0.1).init(start())
    run_ours(loss_scale_optimizer(two, weight_decay=0.1, learning_rate=0.1), gradients(steps=1))


def test_a_param_called_learning_rate_is_not_taken_for_the_rate():
    params = {"hyperparams": {"learning_rate": jnp.float32(5.0)}, "learning_rate": jnp.float32(7.0)}
    tx = loss_scale_optimizer(optax.inject_hyperparams(optax.adam)(0.1), weight_decay=1.0)
    after, _ = take(tx, params, tx.init(params), jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(jax.tree.leaves(after), [4.5, 6.3], rtol=1e-6)


@pytest.mark.parametrize("arguments", [{"weight_decay": 0.1, "learning_rate": 0.1}, EMA], ids=str)
def test_params_are_asked_for_where_they_are_needed(arguments):
    tx = loss_scale_optimizer(optax.sgd(0.1), **arguments)
    name = "use_ema" if "use_ema" in arguments else "weight_decay"
    with pytest.raises(ValueError, match=f"`params` must be given to `update` because of `{name}`"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    plain = loss_scale_optimizer(optax.sgd(0.1), clipnorm=1.0)
    plain.update(jnp.ones(2), plain.init(jnp.ones(2)))


def test_keras_is_not_imported():
    code = "import sys, optax_lossscale.keras; sys.exit('keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603
