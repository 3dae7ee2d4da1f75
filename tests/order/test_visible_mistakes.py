"""Mistakes that are visible while a step is traced: transformations outside the guard."""

import contextlib
import warnings
from typing import NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from arrays import ones, shape
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale.flax import TrainState

PARAMS = ones({"a": shape(3), "b": shape(3)})
GUARD = ols.with_loss_scaling(optax.sgd(0.1))
MASK, OTHERS = {"a": True, "b": False}, {"a": False, "b": True}
MASKED = optax.masked(GUARD, MASK)
LABELS = {"a": "train", "b": "frozen"}


def groups(train, frozen):
    return optax.partition({"train": train, "frozen": frozen}, LABELS)


OUTSIDE = {
    "clip": (optax.chain(optax.clip_by_global_norm(1.0), GUARD), "optax.chain("),
    "a chain in a chain": (optax.chain(GUARD, optax.adam(0.1)), "optax.chain("),
    "named": (optax.named_chain(("decay", optax.add_decayed_weights(0.1)), ("g", GUARD)), "chain("),
    "MultiSteps": (
        optax.MultiSteps(ols.with_skipping(optax.sgd(0.1)), 2),
        "optax.MultiSteps(inner, k)",
    ),
    "apply_if_finite": (optax.apply_if_finite(GUARD, 3), "with_loss_scaling(inner)"),
    "masked": (MASKED, "optax.masked("),
    "deep": (optax.MultiSteps(optax.chain(optax.clip(1.0), GUARD), 2), "optax.MultiSteps("),
    "schedule_free": (optax.contrib.schedule_free(GUARD, 0.1), "schedule_free("),
    "injected": (
        optax.inject_hyperparams(lambda rate: ols.with_loss_scaling(optax.sgd(rate)))(rate=0.1),
        "optax.inject_hyperparams(",
    ),
    "masked in a group": (groups(MASKED, optax.identity()), "optax.masked("),
    "masked and more": (
        optax.chain(MASKED, optax.masked(optax.clip(1.0), MASK), optax.clip(1.0)),
        "optax.chain(",
    ),
    "two masked": (optax.chain(MASKED, optax.masked(optax.adam(0.1), MASK)), "optax.chain("),
    "two groups": (groups(GUARD, optax.adam(0.1)), "optax.partition("),
    # Wrappers that the library does not know by name.
    "mechanize": (optax.contrib.mechanize(GUARD), "(one has the state MechanicState)"),
    "sam": (optax.contrib.sam(GUARD, optax.sgd(0.1)), "(one has the state SAMState)"),
    "sam's adversary": (optax.contrib.sam(optax.sgd(0.1), GUARD), "(one has the state SAMState)"),
    "conditionally_transform": (
        optax.conditionally_transform(GUARD, lambda n: n < 2),
        "ConditionallyTransformState). If one",
    ),
    "in a split of complex numbers": (
        optax.contrib.split_real_and_imaginary(optax.chain(optax.clip(1.0), GUARD)),
        "optax.chain(",
    ),
}
INSIDE = {
    "in a chain of its own": optax.chain(GUARD).init,
    "all inside": ols.with_loss_scaling(optax.MultiSteps(optax.chain(optax.clip(1.0)), 2)).init,
    "frozen": groups(GUARD, optax.set_to_zero()).init,
    "masked twice": optax.chain(MASKED, optax.masked(optax.set_to_zero(), OTHERS)).init,
    "a tuple of one's own": lambda params: (
        *(GUARD.init(params), optax.clip(1.0).init(params)),
        (optax.EmptyState(), {"mean": jnp.ones(3)}),
    ),
    "a dict of one's own": lambda params: {"a": GUARD.init(params), "b": optax.EmptyState()},
    "the numbers alone": lambda _: ols.init(),
    "complex numbers": optax.contrib.split_real_and_imaginary(GUARD).init,
    "a wrapper of others": lambda params: OptaxlikeState(GUARD.init(params)),
}


class OptaxlikeState(NamedTuple):
    """A state of a package whose name begins like Optax's."""

    inner_state: ols.GuardState


OptaxlikeState.__module__ = "optaxlike.wrappers"


def loss_fn(params):
    return jnp.sum(params["a"] ** 2)


@contextlib.contextmanager
def warnings_of(*words):
    """Expect one warning for each of these, where it was called."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen
    assert len(seen) == len(words), [str(each.message) for each in seen]
    for each, word in zip(seen, words, strict=True):
        assert word in str(each.message)
        assert each.filename == __file__


def test_a_warning_names_the_users_line_below_any_library():
    for wrap in (jax.jit, nnx.jit, equinox.filter_jit, lambda fun: fun):  # and contextlib, below
        warnings_of("The loss is float16")(wrap(ols.scale_loss))(jnp.float16(1), ols.init())
    with warnings_of("`params` are float16"):
        optax.chain(GUARD).init(jnp.float16(1))


@pytest.mark.integration
@pytest.mark.parametrize(("tx", "line"), OUTSIDE.values(), ids=OUTSIDE)
def test_a_transformation_outside_the_guard_is_named_once_with_the_corrected_line(
    tx, line, monkeypatch
):
    for module in ("diagnostics.logs", "_loss_scale.scale"):  # once in each process
        monkeypatch.setattr(f"optax_lossscale.{module}._WARNED", set())
    state = tx.init(PARAMS)
    for function in (ols.value_and_grad(loss_fn), ols.grad(loss_fn)):
        with warnings_of(line):
            function(state, PARAMS)
            function(state, PARAMS)
    for read in (ols.diagnostics.metrics, lambda state: ols.scale_loss(1.0, state)):
        with warnings_of(line):
            read(state)
            read(state)
    with warnings_of():
        ols.grad(loss_fn)(ols.loss_scale_state(state), PARAMS)
        ols.scale_loss(1.0, ols.loss_scale_state(state))


@pytest.mark.integration
def test_a_correct_state_uses_up_no_warning_and_each_message_is_given():
    loss_and_grads = ols.value_and_grad(loss_fn)
    with warnings_of():
        loss_and_grads(ols.init(), PARAMS)
    for tx, line in OUTSIDE["named"], OUTSIDE["MultiSteps"]:
        with warnings_of(line):
            loss_and_grads(tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("init", INSIDE.values(), ids=INSIDE)
def test_a_correct_order_gives_no_warning(init):
    with warnings_of():
        ols.grad(loss_fn)(init(PARAMS), PARAMS)
        ols.scale_loss(1.0, init(PARAMS))
        ols.diagnostics.metrics(init(PARAMS))


def optimized(tx):
    """Return how to start, to take a step, and to read parameters and the optimizer's state."""

    def step(training, grads):
        params, state = training
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return lambda params: (params, tx.init(params)), step, lambda training: training


def train_state(create, tx):
    return (
        lambda params: create(apply_fn=None, params=params, tx=tx),
        lambda state, grads: state.apply_gradients(grads=grads),
        lambda state: (state.params, state),
    )


class Arrays(nnx.Module):
    def __init__(self, arrays):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))


def of_nnx():
    def start(params):
        model = Arrays(params)
        return model, nnx.Optimizer(model, GUARD, wrt=nnx.Param)

    def step(training, grads):
        model, optimizer = training
        optimizer.update(model, nnx.state(Arrays(grads)))
        return training

    return start, step, lambda training: (nnx.state(training[0]), training[1].opt_state)


RIGHT = {
    "the guard": optimized(GUARD),
    "frozen": optimized(groups(GUARD, optax.set_to_zero())),
    "masked twice": optimized(
        optax.chain(MASKED, optax.masked(optax.set_to_zero(), OTHERS)),
    ),
    "complex numbers": optimized(optax.contrib.split_real_and_imaginary(GUARD)),
    "our TrainState": train_state(TrainState.create, optax.sgd(0.1)),
    "Flax's TrainState": train_state(FlaxTrainState.create, GUARD),
    "nnx.Optimizer": of_nnx(),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", RIGHT)
def test_right_training_is_silent_and_an_overflow_changes_no_parameter(name):
    start, step, read = RIGHT[name]
    training = start(PARAMS)
    with warnings_of():
        for size in (1.0, np.inf, 1.0):
            before, state = jax.tree.map(np.array, read(training)[0]), read(training)[1]
            ols.scale_loss(1.0, state)
            ols.diagnostics.metrics(state)
            _, grads = ols.value_and_grad(loss_fn)(state, PARAMS)
            training = step(training, jax.tree.map(lambda g: g * size, grads))  # noqa: B023
            params, state = read(training)
            is_same = all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(before)))
            assert ols.applied(state) == np.isfinite(size) != is_same
    assert ols.loss_scale_state(state).total_skipped == 1


@pytest.mark.parametrize("argnums", [1, np.int64(1), -2, (1,), [0, 1]])
def test_arguments_are_chosen_as_jax_chooses_them(argnums):
    fun, args = lambda w, x: jnp.mean(x @ w), (jnp.ones((4, 2)), jnp.ones((8, 4)))
    assert_same_bits(ols.grad(fun, argnums)(ols.init(1), *args), jax.grad(fun, argnums)(*args))


def test_an_argument_of_the_transform_is_passed_on():
    params = {"w": jnp.ones(3), "n": jnp.arange(3)}
    grads = ols.grad(lambda p: jnp.sum(p["w"]), allow_int=True)(ols.init(8), params)
    assert grads["n"].dtype == jax.dtypes.float0
