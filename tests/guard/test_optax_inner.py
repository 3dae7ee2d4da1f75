"""Each optimizer of Optax inside `with_loss_scaling`: the table is in `optimizers.py`.

Each test compares the wrapper with the inner optimizer alone, which sees the same gradients,
unscaled, and only the good steps.
"""

import functools
import inspect
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import NOT_TO_BE_SKIPPED, OPTIMIZERS, UNFUSED, factories, loss, spoil, tiers
from plain_where import assert_same_bits, types

import optax_lossscale as ols

pytestmark = pytest.mark.integration

POLICY = ols.DynamicLossScale(initial_scale=2.0**10, growth_interval=2)

# The bad number in the gradients of each step, and its leaf. None is a good step.
STEPS = (None, None, ("inf", 0), None, ("nan", 1), ("-inf", 2), None, None)

# One of each kind in `make test`; the others consist of the same parts.
KINDS = {
    "adafactor: factored",
    "contrib.sam: opaque",
    "contrib.split_real_and_imaginary",
    "inject_hyperparams",
    "MultiSteps",
    "scale_by_backtracking_linesearch",
}
NAMES = tiers(KINDS)


class Step(NamedTuple):
    """One step: what it starts from, and the results of the wrapper and of the inner optimizer."""

    params: Any
    before: ols.GuardState
    updates: Any
    after: ols.GuardState
    plain: tuple[Any, Any] | None


class Training:
    """The history of one optimizer, run on first use."""

    def __init__(self, name):
        self.optimizer = OPTIMIZERS[name]
        self.tx = ols.with_loss_scaling(self.optimizer.make(), POLICY)
        self.inner = self.optimizer.plain()

    def stepping(self, tx):
        """Return a step, and a list with an entry for each program that is traced."""
        traces = []

        @functools.partial(jax.jit, compiler_options=UNFUSED)
        def step(grads, state, params, i, value):
            traces.append(None)
            extra_args = self.optimizer.extra_args(i, value=value, grad=grads)
            return tx.update(grads, state, params, **extra_args)

        return step, traces

    @functools.cached_property
    def history(self):
        """Every step of `STEPS`."""
        (wrapped, traces), (plain, plain_traces) = map(self.stepping, (self.tx, self.inner))
        params = self.optimizer.params()
        after, plain_state = self.tx.init(params), self.inner.init(params)
        history = []
        for i, bad in enumerate(STEPS):
            before = after
            value, grads = value_and_gradients(self.optimizer.grads, params, i)
            grads = spoil(grads, bad[1], float(bad[0])) if bad else jax.tree.map(np.asarray, grads)
            scale = np.asarray(before.loss_scale_state.loss_scale)
            scaled = jax.tree.map(lambda g, scale=scale: np.asarray(g * scale), grads)
            updates, after = wrapped(scaled, before, params, i, value)
            out = None if bad else plain(grads, plain_state, params, i, value)
            plain_state = out[1] if out else plain_state
            history.append(Step(params, before, updates, after, out))
            params = optax.apply_updates(params, updates)
        self.programs = len(traces), len(plain_traces)
        return history


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(grads, params, step):
    return loss(params, step), grads(params, step)


@pytest.fixture(scope="module", params=NAMES)
def training(request):
    return Training(request.param)


def test_an_applied_step_is_bitwise_the_inner_optimizers(training):
    for step in training.history:
        if step.plain:
            assert_same_bits((step.updates, step.after.inner_state), step.plain)


def test_a_skipped_step_leaves_params_and_inner_state_bitwise_unchanged(training):
    nothing = jax.tree.map(lambda u: -jnp.zeros_like(u), training.history[0].updates)
    for step in training.history:
        if not step.plain:
            assert_same_bits(step.after.inner_state, step.before.inner_state)
            assert_same_bits(step.updates, nothing)
            assert_same_bits(optax.apply_updates(step.params, step.updates), step.params)


def test_the_state_keeps_its_types_and_no_step_compiles_because_of_loss_scaling(training):
    def weak(tree):
        return {i for i, leaf in enumerate(jax.tree.leaves(tree)) if jax.typeof(leaf).weak_type}

    # A leaf is weakly typed after a step only if the inner optimizer leaves it so.
    inner_weak = weak(training.history[0].plain[1])
    for step in training.history:
        assert types(step.after) == types(step.before)
        assert weak(step.after.inner_state) <= inner_weak
        assert not weak(step.after.loss_scale_state)
    ours, plain = training.programs
    assert 1 <= ours <= plain


@pytest.mark.skipif(optax.__version__ != "0.2.8", reason="the exceptions are those of Optax 0.2.8")
def test_the_table_calls_every_factory_of_optax():
    called = set()
    sys.setprofile(lambda frame, *_: called.add(frame.f_code))
    try:
        for optimizer in OPTIMIZERS.values():
            optimizer.make()
    finally:
        sys.setprofile(None)
    codes = {name: inspect.unwrap(made).__code__ for name, made in factories().items()}
    missing = {name for name, code in codes.items() if code not in called}
    # `lbfgs` calls the line search when Optax is imported.
    assert missing - NOT_TO_BE_SKIPPED == {"scale_by_zoom_linesearch"}
    assert not KINDS.difference(OPTIMIZERS)
