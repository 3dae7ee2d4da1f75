"""Optax's own tests of its optimizers, run from the installed Optax on loss-scaled optimizers.

Each factory in Optax's test modules returns its optimizer inside `with_loss_scaling`, and the
gradients in the tests are scaled before they reach `update`.
"""

import functools
import inspect
import re
import types
import unittest
from typing import NamedTuple

import jax
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.integration

# Gradients above 4 overflow: the runs to convergence skip steps.
DYNAMIC = ols.DynamicLossScale(initial_scale=2.0**124, growth_interval=5, max_scale=2.0**126)
FIXED = ols.FixedLossScale(2.0**10)


class Claim(NamedTuple):
    """A claim that Optax tests for each optimizer: the first test with these parameters runs."""

    module: str
    method: str
    parameters: str
    loss_scale: ols.LossScale
    eager: bool = False  # faster if each function runs once

    def __str__(self):
        return f"{self.method}-{self.parameters or self.module}"


ALIAS, CONTRIB = "optax._src.alias_test", "optax.contrib._common_test"
INJECT = "test_optimizers_can_be_wrapped_in_inject_hyperparams"
CLAIMS = [
    Claim(ALIAS, "test_optimization", "rosenbrock.*float32", DYNAMIC),
    Claim(ALIAS, "test_optimization", "parabola.*complex64", DYNAMIC),
    Claim(ALIAS, "test_explicit_dtype", "='bfloat16', state_dtype='float32'", FIXED),
    Claim(ALIAS, "test_gradient_accumulation", "float32", FIXED, eager=True),
    Claim(ALIAS, INJECT, "", FIXED, eager=True),
    Claim(CONTRIB, "test_optimizers", "mixed_tensor", DYNAMIC),
    Claim(CONTRIB, "test_state_shape_dtype_shard_stability", "float16", FIXED),
    Claim(CONTRIB, "test_optimizers_accept_extra_args", "wrap=True", FIXED, eager=True),
    Claim(CONTRIB, INJECT, "", FIXED, eager=True),
]

# The others belong to the same two kinds.
KINDS = {"adam", "momo"}


def cases_by_optimizer(claim, module):
    found = {}
    test_class = getattr(module, "AliasTest", None) or module.ContribTest
    for name in unittest.TestLoader().getTestCaseNames(test_class):
        case = test_class(name)
        # The names of Optax 0.2.6 hold the parameters, and those of jitted variants "__with_".
        makes_claim = re.match(rf"{claim.method}(\d+$|_\()", name) and "__with_" not in name
        if makes_claim and re.search(claim.parameters, str(case)):
            *_, optimizer = re.findall(r"(?:opt|wrapper)_name='(\w+)'", str(case))
            # Novograd does not accept float32 gradients of float16 params.
            if (optimizer, claim.parameters) != ("novograd", "float16"):
                found.setdefault(optimizer, case)
    return found


class LossScaled(optax.GradientTransformationExtraArgs):
    """A loss-scaled optimizer that takes unscaled gradients, with the inner one as an attribute."""


def loss_scaled(inner, loss_scale):
    tx = ols.with_loss_scaling(inner, loss_scale)

    def update(updates, state, params, **extra_args):
        scale = ols.loss_scale_state(state).loss_scale
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), updates)
        updates, state = tx.update(grads, state, params, **extra_args)
        # Unscaled float16 gradients are float32, and so are the updates. Like `apply_updates`:
        return jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params), state

    scaled = LossScaled(tx.init, update)
    scaled.inner = inner
    return scaled


def without_loss_scaling(argument):
    """Return the inner optimizer or inner state, for functions that build on it or read it."""
    if isinstance(argument, LossScaled):
        return argument.inner
    return argument.inner_state if hasattr(argument, "loss_scale_state") else argument


def with_loss_scaled_factories(module, loss_scale):
    """Return a copy of `module` whose functions return each optimizer with loss scaling."""

    def scaled(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            result = function(*map(without_loss_scaling, args), **kwargs)
            is_optimizer = isinstance(result, optax.GradientTransformation)
            return loss_scaled(result, loss_scale) if is_optimizer else result

        return call

    return types.SimpleNamespace(
        **{name: scaled(x) if inspect.isfunction(x) else x for name, x in vars(module).items()}
    )


# Optax 0.2.6 does not expect the warning in its own tests.
@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`params` are b?float16")
@pytest.mark.parametrize("claim", CLAIMS, ids=str)
@pytest.mark.parametrize(
    "others",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["adam or momo", "all others"],
)
def test_optax_tests_of_an_optimizer_pass_with_loss_scaling(claim, others, subtests, monkeypatch):
    module = pytest.importorskip(claim.module, reason="this Optax comes without its own tests")
    found = cases_by_optimizer(claim, module)
    assert not found.keys().isdisjoint(KINDS)
    for name in ("alias", "combine", "contrib"):
        if hasattr(module, name):
            factories = with_loss_scaled_factories(getattr(module, name), claim.loss_scale)
            monkeypatch.setattr(module, name, factories)
    # Optax draws a condition that XLA cannot fold; compiling it takes longer than most updates.
    monkeypatch.setattr(jax.random, "randint", lambda *_: 0)
    for optimizer in sorted(found.keys() - KINDS if others else found.keys() & KINDS):
        with (
            subtests.test(optimizer),
            jax.numpy_rank_promotion("allow"),
            jax.disable_jit(claim.eager),
        ):
            found[optimizer].debug()
