"""Each optimizer of Optax inside `with_loss_scaling`: the table is in `optimizers.py`.

Three see the same gradients: the wrapper; the inner optimizer alone, which is given the good steps
only and unscaled gradients; and the oracle, `jnp.where` around the inner optimizer.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from optimizers import INSIDE, NOT_TO_BE_SKIPPED, OPTIMIZERS, factory, loss, spoil
from plain_where import assert_same_bits, with_plain_where

import optax_lossscale as ols

pytestmark = pytest.mark.integration

POLICY = ols.DynamicLossScale(initial_scale=2.0**10, growth_interval=2)

# What is put into the gradients at each step, and into which leaf; None is a good step.
STEPS = (None, None, ("inf", 0), None, ("nan", 1), ("-inf", 2), None, None)
GOOD = [i for i, bad in enumerate(STEPS) if bad is None]
BAD = [i for i, bad in enumerate(STEPS) if bad is not None]

NAMES = [name for name in OPTIMIZERS if factory(name)]

# For speed LLVM optimizes nothing here; XLA does all it does for users.
QUICK = {"xla_backend_optimization_level": "0"}

# XLA:CPU contracts a product and a sum to one instruction, with one rounding, wherever its fusion
# happens to bring them together: the same optimizer then differs by some units in the last place
# between any two programs. What is compared bit for bit is therefore compiled without fusion.
UNFUSED = QUICK | {"xla_disable_hlo_passes": "fusion"}


class Step(NamedTuple):
    """One step: what went in, and what each of the three made of it."""

    grads: Any
    loss: dict[str, Any]
    params: Any
    before: ols.WithLossScalingState
    updates: Any
    after: ols.WithLossScalingState
    oracle: tuple[Any, ols.WithLossScalingState]
    plain: tuple[Any, Any] | None


class Training:
    """The history of one optimizer, run when a test first asks for it."""

    def __init__(self, name):
        self.optimizer = OPTIMIZERS[name]
        self.tx = ols.with_loss_scaling(self.optimizer.make(), POLICY)
        self.inner = self.optimizer.plain()
        self.traces = {self.tx: 0, self.inner: 0}

    def update(self, tx, grads, state, params, *, grad, value, step):
        extra_args = self.optimizer.extra_args(step, value=value, grad=grad)
        return tx.update(grads, state, params, **extra_args)

    def compiled(self, tx):
        def update(grads, state, params, **loss):
            self.traces[tx] += 1
            return self.update(tx, grads, state, params, **loss)

        return jax.jit(update, compiler_options=UNFUSED)

    @functools.cached_property
    def history(self):
        """Every step of `STEPS`."""
        wrapped, plain = self.compiled(self.tx), self.compiled(self.inner)
        oracle = with_plain_where(
            optax.GradientTransformationExtraArgs(self.inner.init, plain), POLICY
        )
        params = self.optimizer.params()
        after = self.tx.init(params)
        oracle_out = None, oracle.init(params)
        plain_out = None, self.inner.init(params)
        history = []
        for i, bad in enumerate(STEPS):
            before = after
            value, true_grads = value_and_gradients(self.optimizer.grads, params, i)
            true_grads = jax.tree.map(np.asarray, true_grads)
            if bad:
                true_grads = spoil(true_grads, bad[1], float(bad[0]))
            scale = np.asarray(before.loss_scale_state.loss_scale)
            grads = jax.tree.map(lambda g, scale=scale: np.asarray(g * scale), true_grads)
            loss = {"grad": true_grads, "value": value, "step": i}
            updates, after = wrapped(grads, before, params, **loss)
            oracle_out = oracle.update(grads, oracle_out[1], params, **loss)
            if not bad:
                plain_out = plain(true_grads, plain_out[1], params, **loss)
            history.append(
                Step(
                    grads=grads,
                    loss=loss,
                    params=params,
                    before=before,
                    updates=updates,
                    after=after,
                    oracle=oracle_out,
                    plain=None if bad else plain_out,
                )
            )
            params = optax.apply_updates(params, updates)
        return history


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(grads, params, step):
    return loss(params, step), grads(params, step)


@pytest.fixture(scope="module", params=NAMES)
def training(request):
    return Training(request.param)


def types(tree):
    """Return shape and dtype of each leaf, by path."""
    return {
        jax.tree_util.keystr(path): (jnp.shape(leaf), jnp.result_type(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def weak(tree):
    """Return the paths of the weakly typed leaves."""
    return {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jax.typeof(leaf).weak_type
    }


def test_a_good_step_is_the_inner_optimizers_to_the_bit(training):
    for i in GOOD[:2]:
        step = training.history[i]
        assert_same_bits((step.updates, step.after.inner_state), step.plain)


def test_training_goes_on_as_if_a_bad_step_had_never_been(training):
    for i in GOOD[2:]:
        step = training.history[i]
        assert_same_bits((step.updates, step.after.inner_state), step.plain)


def test_a_bad_step_moves_no_bit_of_the_inner_state(training):
    for i in BAD:
        step = training.history[i]
        assert_same_bits(step.after.inner_state, step.before.inner_state)


def test_the_updates_of_a_bad_step_are_negative_zeros_like_those_of_a_good_one(training):
    zeros = jax.tree.map(lambda u: -jnp.zeros_like(u), training.history[GOOD[0]].updates)
    for i in BAD:
        step = training.history[i]
        assert_same_bits(step.updates, zeros)
        assert_same_bits(optax.apply_updates(step.params, step.updates), step.params)


def test_every_step_is_that_of_plain_where(training):
    for step in training.history:
        assert_same_bits((step.updates, step.after), step.oracle)


def test_the_state_keeps_its_types_under_jit(training):
    # A leaf is weakly typed after a step only where the inner optimizer itself leaves it so.
    inner_weak = weak(training.history[0].plain[1])
    for step in training.history:
        assert types(step.after) == types(step.before)
        assert weak(step.after.inner_state) <= inner_weak
        assert not weak(step.after.loss_scale_state)


def test_without_jit_a_bad_step_is_skipped_alike(training):
    step = training.history[BAD[0]]
    out = training.update(training.tx, step.grads, step.before, step.params, **step.loss)
    assert_same_bits(out, (step.updates, step.after))


def test_a_second_step_does_not_compile_unless_the_inner_optimizers_does(training):
    assert len(training.history) == len(STEPS)
    assert 1 <= training.traces[training.tx] <= training.traces[training.inner]


def test_inside_a_scan_a_bad_step_moves_nothing(training):
    first, last = training.history[0], training.history[-1]
    inputs = [(step.grads, step.loss) for step in training.history]

    def body(carry, inputs):
        params, state = carry
        grads, loss = inputs
        updates, state = training.update(training.tx, grads, state, params, **loss)
        params = optax.apply_updates(params, updates)
        return (params, state), (updates, params, state)

    scan = jax.jit(functools.partial(jax.lax.scan, body), compiler_options=QUICK)
    carry, outputs = scan(
        (first.params, first.before), jax.tree.map(lambda *leaves: np.stack(leaves), *inputs)
    )
    assert types(carry) == types((last.params, last.after))
    assert_same_bits(carry[1].loss_scale_state, last.after.loss_scale_state)
    for i in BAD:
        _, params_before, before = jax.tree.map(lambda leaf, i=i: leaf[i - 1], outputs)
        updates, params, after = jax.tree.map(lambda leaf, i=i: leaf[i], outputs)
        assert_same_bits((params, after.inner_state), (params_before, before.inner_state))
        assert_same_bits(updates, jax.tree.map(lambda u: -jnp.zeros_like(u), updates))


def test_init_takes_shapes_in_place_of_arrays(training):
    params = training.optimizer.params()
    state = training.tx.init(params)
    assert types(jax.eval_shape(training.tx.init, params)) == types(state)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    try:
        training.inner.init(shapes)
    except (TypeError, AttributeError, ValueError):
        return  # this optimizer's `init` reads its params
    assert types(training.tx.init(shapes)) == types(state)


def test_params_may_be_left_out_where_the_inner_optimizer_allows_it(training):
    step = training.history[0]

    def outcome(tx, state):
        try:
            _, state = jax.eval_shape(
                lambda: training.update(tx, step.grads, state, None, **step.loss)
            )
        except (TypeError, ValueError, AttributeError) as error:
            return type(error), str(error).partition(" got ")[0]  # then come arrays
        return types(state.inner_state if tx is training.tx else state)

    expected = outcome(training.inner, step.before.inner_state)
    assert isinstance(expected, tuple) == training.optimizer.needs_params
    assert outcome(training.tx, step.before) == expected


@pytest.mark.skipif(optax.__version__ != "0.2.8", reason="the table is that of Optax 0.2.8")
def test_no_optimizer_of_optax_is_left_out():
    known = {name.split(":")[0] for name in (*OPTIMIZERS, *INSIDE, *NOT_TO_BE_SKIPPED)}
    found = {
        prefix + name
        for prefix, module in (("", optax), ("contrib.", optax.contrib))
        for name, member in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
        and "GradientTransformation" in str(inspect.signature(member).return_annotation)
    }
    assert found <= known
    assert {name for name in known if not factory(name)} == set()


def test_what_is_inside_another_entry_has_one():
    assert set(INSIDE.values()) <= {name.split(":")[0] for name in OPTIMIZERS}


@pytest.mark.skipif(not factory("monitor"), reason="this Optax has no monitor")
def test_a_state_that_changes_its_structure_cannot_be_skipped():
    params = {"w": jnp.ones(3)}
    tx = ols.with_loss_scaling(NOT_TO_BE_SKIPPED["monitor"]())
    with pytest.raises(ValueError, match=r"structure.*norm"):
        tx.update(params, tx.init(params), params)
