"""`loss_scale_optimizer` compared step by step with live Keras, and what it adds to Keras.

Keras' inner optimizer receives most of the arguments, since Keras' wrapper rejects them.
"""

import functools
import importlib
import itertools
import os
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from plain_where import assert_same_bits, types

import optax_lossscale as ols
from optax_lossscale.keras import ema_params, loss_scale_optimizer

pytestmark = pytest.mark.integration

RATE = 0.05
SCALE = {"initial_scale": 2.0**10, "dynamic_growth_steps": 3}
OVERFLOWS = {0, 1, 6, 11, 12, 20, 27}  # steps, of 36, in which one gradient is not finite
SHAPES = {"b": (3,), "k": (2, 3), "s": ()}

CLIPNORM, CLIPVALUE, GLOBAL = {"clipnorm": 0.7}, {"clipvalue": 0.4}, {"global_clipnorm": 1.1}
DECAY, EMA = {"weight_decay": 0.3}, {"use_ema": True, "ema_momentum": 0.9}
OVERWRITTEN = {**EMA, "ema_overwrite_frequency": 3}
TWO, THREE = ({"gradient_accumulation_steps": n} for n in (2, 3))
EVERYTHING = {**GLOBAL, **DECAY, **OVERWRITTEN, **TWO, "learning_rate": RATE}


def decreasing(step):
    return RATE / (1 + 0.1 * step)


def import_keras():
    """Import Keras, and with it scikit-learn, only when a test needs it."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    return importlib.import_module("keras")


def decreasing_in_keras():
    keras = import_keras()

    class Decreasing(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return decreasing(keras.ops.cast(step, "float32"))

    return Decreasing()


def keras_sgd(rate=RATE, **arguments):
    return import_keras().optimizers.SGD(rate, momentum=0.9, **arguments)


def sgd(learning_rate=RATE):
    # Keras' velocity includes the rate of each step; Optax's `sgd` multiplies by the last rate.
    return optax.chain(optax.scale_by_learning_rate(learning_rate), optax.trace(0.9))


class Step(NamedTuple):
    params: dict
    ema: dict | None
    loss_scale: float
    growth_count: int


def start():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(*, steps=36, overflows=OVERFLOWS):
    rng = np.random.default_rng(1)
    history = []
    for i in range(steps):
        grads = {k: np.asarray(rng.normal(size=shape), np.float32) for k, shape in SHAPES.items()}
        if i in overflows:
            grads[rng.choice(sorted(SHAPES))].flat[0] = rng.choice([np.inf, np.nan, -np.inf])
        history.append(grads)
    return history


def run_keras(inner, history, params=None):
    """Return the steps of Keras' LossScaleOptimizer on the true gradients in `history`."""
    keras = import_keras()
    tx = keras.optimizers.LossScaleOptimizer(inner, **SCALE)
    params = start() if params is None else params
    variables = [keras.Variable(value) for value in params.values()]
    tx.build(variables)
    update = jax.jit(tx.stateless_apply)  # its `apply` does not work on JAX
    names = [variable.path.split("/", 1)[1] for variable in tx.variables]
    state = [variable.value for variable in tx.variables]
    values = [variable.value for variable in variables]
    steps = []
    for grads in history:
        loss_scale = state[names.index("dynamic_scale")]
        values, state = update(state, [grads[name] * loss_scale for name in params], values)
        averages = [s for s, n in zip(state, names, strict=True) if "average" in n]
        new, ema = (dict(zip(params, map(np.asarray, x), strict=False)) for x in (values, averages))
        numbers = (state[names.index(name)] for name in ("dynamic_scale", "step_counter"))
        steps.append(Step(new, ema, *map(float, numbers)))
    return steps


def take(tx, params, state, grads):
    grads = jax.tree.map(jnp.float32, grads)
    updates, state = tx.update(ols.scale_loss(grads, state), state, params)
    return optax.apply_updates(params, updates), state


def run_ours(tx, history, params=None):
    """Return the steps of `tx` on the true gradients in `history`."""
    params = jax.tree.map(jnp.asarray, start() if params is None else params)
    state = tx.init(params)
    has_ema = "EmaParamsState" in repr(jax.tree.structure(state))
    step = jax.jit(functools.partial(take, tx))
    steps = []
    for grads in history:
        params, state = step(params, state, grads)
        ema = ema_params(state) if has_ema else None
        steps.append(Step(*jax.device_get((params, ema)), *ols.loss_scale_state(state)[:2]))
    return steps


def assert_close(actual, expected):
    compare = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
    jax.tree.map(compare, actual, expected)


@pytest.mark.parametrize(
    ("rate", "arguments"),
    [
        ("schedule", {**CLIPNORM, **DECAY, **OVERWRITTEN}),
        ("number", {**CLIPVALUE, **TWO}),
        ("injected number", {**GLOBAL, **DECAY, **THREE}),
        ("injected schedule", {**DECAY, **EMA}),
        *(
            pytest.param("number", arguments, marks=pytest.mark.exhaustive)
            for arguments in (
                *({}, CLIPNORM, CLIPVALUE, GLOBAL, DECAY, THREE, EMA),
                *({**EMA, "ema_overwrite_frequency": 1}, {**GLOBAL, **DECAY, **OVERWRITTEN}),
                {**CLIPNORM, **THREE, **EMA},
            )
        ),
    ],
)
@pytest.mark.slow
def test_every_argument_has_the_effect_that_it_has_in_keras(rate, arguments):
    history = gradients()
    theirs, ours = (decreasing_in_keras(), decreasing) if "sch" in rate else (RATE, RATE)
    inner = optax.inject_hyperparams(sgd)(ours) if "injected" in rate else sgd(ours)
    given = {"learning_rate": ours} if "weight_decay" in arguments and rate[0] != "i" else {}
    expected = run_keras(keras_sgd(theirs, **arguments), history)
    actual = run_ours(loss_scale_optimizer(inner, **SCALE, **arguments, **given), history)
    # Keras' average differs under gradient accumulation: see below.
    has_ema = "use_ema" in arguments and "gradient_accumulation_steps" not in arguments
    for step, (our, their) in enumerate(zip(actual, expected, strict=True)):
        assert (our.loss_scale, our.growth_count) == (their.loss_scale, their.growth_count), step
        assert_close(our.params, their.params)
        if has_ema and their.ema["s"]:  # Keras' average starts at the first applied step
            assert_close(our.ema, their.ema)


# Differences from Keras: its bugs, and which steps it counts.


@pytest.mark.slow
def test_the_average_changes_on_applied_steps_and_in_keras_on_micro_steps():
    history = gradients(steps=12, overflows={4})
    theirs = run_keras(keras_sgd(**THREE, **EMA), history)
    ours = run_ours(loss_scale_optimizer(sgd(), **SCALE, **THREE, **EMA), history)
    # The first window ends with step 2. The second ends with step 6, as step 4 does not count.
    params = [step.params["b"] for step in ours]
    for steps, first, later in ((ours, 2, (6, 9)), (theirs, 6, (7, 8, 9))):
        expected = steps[first].ema["b"]
        for step in later:
            expected = 0.9 * expected + 0.1 * params[step]
        assert_close(steps[9].ema["b"], expected)
    assert_same_bits(ours[2].ema["b"], params[2])


@pytest.mark.slow
def test_schedules_count_applied_steps_and_in_keras_micro_steps():
    ones = jax.tree.map(np.ones_like, start())
    history = [jax.tree.map(np.zeros_like, ones)] * 6
    history[1] = gradients(steps=1, overflows={0})[0]
    theirs = run_keras(keras_sgd(decreasing_in_keras(), **TWO, **DECAY), history, ones)
    tx = loss_scale_optimizer(sgd(decreasing), **SCALE, **TWO, **DECAY, learning_rate=decreasing)
    ours = run_ours(tx, history, ones)
    # Decay applies at the second and fourth finite steps. The skipped step does not count.
    for steps, first, second in ((theirs, 1, 3), (ours, 0, 1)):
        values = [1.0, *(float(step.params["s"]) for step in steps)]
        rates = [(1 - b / a) / 0.3 for a, b in itertools.pairwise(values)]
        expected = [0, 0, decreasing(first), 0, decreasing(second), 0]
        np.testing.assert_allclose(rates, expected, atol=1e-6)


@pytest.mark.slow
def test_weights_decay_after_the_inner_optimizer_and_in_keras_before_it():
    # The difference shows in an optimizer that reads the params. This one subtracts them.
    class Removing(import_keras().optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            del gradient, learning_rate
            self.assign_sub(variable, variable)

    remove = optax.stateless(lambda _, params: jax.tree.map(jnp.negative, params))
    history, params = [{"p": np.float32(0.0)}], {"p": np.float32(1.0)}
    (theirs,) = run_keras(Removing(0.1, weight_decay=0.5), history, params)
    tx = loss_scale_optimizer(remove, **SCALE, weight_decay=0.5, learning_rate=0.1)
    (ours,) = run_ours(tx, history, params)
    np.testing.assert_allclose((theirs.params["p"], ours.params["p"]), (0.0, -0.05), rtol=1e-6)


@pytest.mark.slow
def test_the_wrapper_takes_arguments_that_keras_refuses_on_its_wrapper():
    for arguments in (CLIPNORM, CLIPVALUE, GLOBAL, DECAY, EMA, TWO):
        with pytest.raises(ValueError, match="does not support"):
            import_keras().optimizers.LossScaleOptimizer(keras_sgd(), **arguments)
    loss_scale_optimizer(sgd(), 2.0, dynamic=False, **EVERYTHING)


# What the library adds to Keras.


@pytest.mark.slow
def test_the_defaults_equal_those_of_tf_keras():
    tx = loss_scale_optimizer(optax.sgd(1.0), use_ema=True)
    params = jnp.float32(0)
    state = optax.tree.set(tx.init(params), growth_count=jnp.int32(1998))
    for loss_scale, average in ((2.0**15, -1), (2.0**16, -1.01)):
        params, state = take(tx, params, state, 1.0)
        assert ols.loss_scale_state(state).loss_scale == loss_scale
        np.testing.assert_allclose(ema_params(state), average, rtol=1e-6)


def test_a_skipped_step_changes_nothing_and_the_state_keeps_its_type():
    tx = loss_scale_optimizer(optax.adam(decreasing), **SCALE, **EVERYTHING)
    params = jax.tree.map(jnp.asarray, start())
    state = tx.init(params)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    assert types(tx.init(shapes)) == types(jax.eval_shape(tx.init, params)) == types(state)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(set(pointers)) == len(pointers)
    assert_same_bits(ema_params({"train": [{"opt_state": state}]}), params)
    assert_same_bits(ema_params(serialization.to_state_dict(state)), params)
    assert_same_bits(pickle.loads(pickle.dumps(state)), state)  # noqa: S301, our own

    step = jax.jit(functools.partial(take, tx))
    expected = types((params, state))
    for i, grads in enumerate(gradients(steps=12)):
        before = params, state.inner_state
        params, state = step(params, state, grads)
        assert types((params, state)) == expected
        assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(state))
        assert (i in OVERFLOWS) == (ols.loss_scale_state(state).consecutive_skipped > 0)
        if i in OVERFLOWS:
            assert_same_bits((params, state.inner_state), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`params` are b?float16")
@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(jnp.bfloat16, lambda _: 2.0**-12), (jnp.float16, None)],
    ids=["schedule", "injected"],
)
def test_small_params_are_decayed_and_averaged_in_float32(dtype, rate):
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=2.0**-12)
    average = {"use_ema": True, "ema_momentum": 0.5}
    tx = loss_scale_optimizer(inner, learning_rate=rate, weight_decay=2.0**-14, **average)
    grads, params = {"p": jnp.zeros(2, dtype)}, {"p": jnp.ones(2, dtype)}
    with pytest.warns(UserWarning, match="`inject_hyperparams` keeps numbers in"):
        state = tx.init(params)
    expected = types(state)
    # Under jit XLA may keep more digits between two operations than their dtype has.
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(grads, state, params)
        # 2**-26 is 0 in float16, so a float16 product would be 0.
        assert np.asarray(updates["p"], np.float64).tolist() == [-(2.0**-26)] * 2
        assert types(state) == expected
    _, state = update(grads, state, {"p": jnp.full(2, 1.015625, dtype)})
    assert ema_params(state)["p"].dtype == jnp.float32
    assert ema_params(state)["p"].tolist() == [1.0078125] * 2
    # An average that replaces the params is rounded to their dtype.
    tx = loss_scale_optimizer(optax.sgd(0.1), **average, ema_overwrite_frequency=1)
    state = tx.init(params)
    for grad in (0.3, -0.7):
        params, state = take(tx, params, state, {"p": jnp.full(2, grad)})
        assert_same_bits(params["p"], ema_params(state)["p"].astype(dtype))


@pytest.mark.slow
def test_integer_params_are_their_own_average_and_no_average_is_weakly_typed():
    arguments = {"use_ema": True, "ema_momentum": 1.0, "ema_overwrite_frequency": 1}
    tx = loss_scale_optimizer(optax.stateless(lambda grads, _: grads), 1, **arguments)
    params = {"p": jnp.asarray(1.0), "n": jnp.arange(2), "none": None}
    state = tx.init(params)
    assert not jax.typeof(ema_params(state)["p"]).weak_type
    grads = {"p": jnp.float32(1), "n": jnp.array([3, 3]), "none": None}
    for expected in ([3, 4], [6, 7]):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert_same_bits((params["n"], ema_params(state)["n"]), (jnp.array(expected),) * 2)
    assert params["p"].tolist() == ema_params(state)["p"].tolist() == 2.0


@pytest.mark.parametrize(("run", "ulps"), [(lambda f: f, 1), (jax.jit, 2)])
@pytest.mark.slow
def test_the_average_replaces_the_params_up_to_the_rounding_of_an_addition(run, ulps):
    rng = np.random.default_rng(2)
    old = rng.normal(size=4096).astype(np.float32)
    ratio = 10 ** rng.uniform(-9, 9, 4096) * rng.choice([-1, 1], 4096)
    new = (old * ratio).astype(np.float32)
    become = optax.stateless(lambda _, params: new - params)
    tx = loss_scale_optimizer(become, use_ema=True, ema_overwrite_frequency=1)
    after, state = run(functools.partial(take, tx))(jnp.asarray(old), tx.init(old), old)
    ema = np.asarray(ema_params(state))
    error = np.abs(np.asarray(after, np.float64) - ema)
    assert (error <= ulps * np.spacing(np.maximum(np.abs(old), np.abs(ema)))).all()


@pytest.mark.slow
def test_the_weights_of_the_average_sum_to_one():
    # If 0.9999 and 0.0001 were rounded separately, the average would be 4e-5 too small.
    history = np.random.default_rng(4).uniform(0.5, 1.5, (2000, 64)).astype(np.float32)
    become = optax.stateless(lambda grads, params: jax.tree.map(jnp.subtract, grads, params))
    tx = loss_scale_optimizer(become, 1, 10**6, use_ema=True, ema_momentum=0.9999)
    params = jnp.zeros(64)
    (_, state), _ = jax.lax.scan(
        lambda carry, grads: (take(tx, *carry, grads), None), (params, tx.init(params)), history
    )
    momentum = float(np.float32(0.9999))
    expected = history[0].astype(np.float64)
    for params in history[1:]:
        expected = momentum * expected + (1 - momentum) * params
    assert abs(np.mean(ema_params(state) - expected)) < 4e-6


def test_accumulating_steps_leave_the_params_unchanged_bit_for_bit():
    # An inner update after only the first micro-step would be infinite, and -0.0 + 0.0 is 0.0.
    tx = loss_scale_optimizer(optax.scale(-8.0), loss_scale_factor=1.0, **TWO)
    params = jnp.array([-0.0, 1.0])
    after, state = take(tx, params, tx.init(params), jnp.full(2, 1e38))
    assert_same_bits(after, params)
    after, state = take(tx, after, state, jnp.full(2, -0.75e38))
    np.testing.assert_allclose(after, -1e38, rtol=1e-6)


@pytest.mark.slow
def test_extra_arguments_reach_the_inner_optimizer_through_every_wrapper():
    inner = optax.GradientTransformationExtraArgs(
        lambda _: (), lambda grads, state, _params, *, value, **_: (-value * grads, state)
    )
    tx = loss_scale_optimizer(inner, 1, **EVERYTHING)
    update = jax.jit(tx.update)
    params = jnp.zeros(3)
    state = tx.init(params)
    for expected in (0.0, -0.5):
        updates, state = update(jnp.full(3, 0.25), state, params, value=jnp.float32(2.0))
        np.testing.assert_allclose(updates, expected, rtol=1e-6)
    _, state = update(jnp.full(3, 0.25), state, params, value=jnp.float32(np.nan))
    assert int(ols.loss_scale_state(state).total_skipped) == 1


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("name", "applied"), [("initial_scale", 0), ("loss_scale_factor", 1)])
def test_nonfinite_steps_are_skipped_unless_loss_scale_factor_is_given(name, applied, dynamic):
    tx = loss_scale_optimizer(optax.adam(1e-3), **{name: 8.0}, dynamic=dynamic)
    state = tx.init(jnp.float32(1))
    assert_same_bits(state.inner_state, optax.adam(1e-3).init(jnp.float32(1)))
    updates, state = tx.update(jnp.float32(np.inf), state)  # does not need params
    assert np.isnan(updates) == applied
    assert ols.loss_scale_state(state).loss_scale == (4 if dynamic and not applied else 8)


@pytest.mark.parametrize(("start_at", "bounds"), [(2.0**-3, (2.0**-3, 2**24)), (2**30, (1, 2**30))])
def test_the_initial_loss_scale_may_exceed_the_usual_bounds(start_at, bounds):
    tx = loss_scale_optimizer(optax.sgd(1.0), start_at, 1)
    grads = [{"p": np.float32(grad)} for grad in [np.nan] * 31 + [0.0] * 31]
    steps = run_ours(tx, grads, {"p": np.float32(1.0)})
    assert (steps[30].loss_scale, steps[-1].loss_scale) == bounds


def test_a_param_named_learning_rate_is_not_mistaken_for_the_learning_rate():
    params = {"hyperparams": {"learning_rate": jnp.float32(5.0)}, "learning_rate": jnp.float32(7.0)}
    inner = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(0.1))
    tx = loss_scale_optimizer(inner, weight_decay=1.0)
    after, _ = take(tx, params, tx.init(params), jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(jax.tree.leaves(after), [4.5, 6.3], rtol=1e-6)


@pytest.mark.parametrize("name", [None, "loss_scale_optimizer"])
def test_a_name_is_taken_and_names_nothing(name):
    params = jnp.ones(3)
    tx, plain = (loss_scale_optimizer(optax.sgd(0.1), **kw) for kw in ({"name": name}, {}))
    assert_same_bits(
        tx.update(params, tx.init(params), params), plain.update(params, plain.init(params), params)
    )


def test_none_leaves_an_argument_out():
    params = start()
    left_out = dict.fromkeys(["dynamic", "use_ema", "ema_momentum", "initial_scale", "clipnorm"])
    for with_none, given in (
        ({}, {}),
        ({"use_ema": True}, {"use_ema": True, "ema_momentum": 0.99}),
    ):
        one, other = (
            run_ours(loss_scale_optimizer(optax.sgd(0.1), **arguments), gradients(steps=3), params)
            for arguments in (left_out | with_none, given)
        )
        assert_same_bits(one, other)


def test_the_first_of_several_wrong_arguments_is_named():
    with pytest.raises(TypeError, match="`dynamic_growth_steps` must be an integer"):
        loss_scale_optimizer(optax.sgd(0.1), None, "x", name=1, dynamic="x", use_ema="x")


def test_the_second_argument_of_tf_keras_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match="`dynamic=False, initial_scale=1024`"):
        loss_scale_optimizer(optax.sgd(0.1), False)
