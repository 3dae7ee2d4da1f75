"""No message prints the numbers of an array, or grows with a tree."""

import functools
import importlib
import sys
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from optax_lossscale import diagnostics as diag
from optax_lossscale._support.tree import shown
from optax_lossscale.flax import TrainState
from optax_lossscale.keras import loss_scale_optimizer

TREE = {f"layer{i}": jnp.full((8, 8), 0.123) for i in range(50)}
STORED, SGD = ols.cast(TREE, jnp.bfloat16), optax.sgd(0.1)
MASTERS, ROUNDED = ols.with_master_weights(SGD), ols.with_stochastic_rounding(SGD)


def loss_fn(tree):
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))


class Rule:
    """A rule with an array, whose `repr` prints it."""

    array = TREE["layer0"]

    def __init__(self):
        self.array = TREE["layer0"]

    def __repr__(self):
        return f"Rule({self.array})"


def updates(tx):
    """Return calls of an optimizer's `update` with a tree in the place of each argument."""
    state = tx.init(TREE)
    return [
        lambda: tx.update(state, TREE, TREE),
        lambda: tx.update(TREE, TREE, TREE),
        lambda: tx.update(TREE, TREE, state),
        lambda: tx.update(TREE, state, state),
        lambda: tx.update(TREE, state, dict.fromkeys(TREE)),
        lambda: tx.update(dict.fromkeys(TREE), state, TREE),
    ]


# Calls with the first two arguments swapped, and with a tree of arrays in each place.
CALLS = [
    lambda: ols.tree_where(TREE, TREE, True),
    lambda: ols.tree_where(True, TREE, {**TREE, "layer0": 1}),
    lambda: ols.tree_where(True, {**TREE, "layer0": Rule()}, {**TREE, "layer0": Rule()}),
    lambda: ols.cast(jnp.float16, TREE),
    lambda: ols.cast(TREE, TREE),
    lambda: ols.cast(TREE, jnp.float16, keep=TREE),
    lambda: ols.cast(TREE, jnp.float16, keep=lambda _: False),
    lambda: ols.autocast(jnp.float16, loss_fn),
    lambda: ols.autocast(loss_fn, TREE),
    lambda: ols.scale_inside(8.0, loss_fn),
    lambda: ols.scale_inside(loss_fn, TREE),
    lambda: ols.scale_loss(ols.init(), TREE),
    lambda: ols.scale_loss({**TREE, "layer0": 1}, ols.init()),
    lambda: ols.unscale_and_check(ols.init(), TREE),
    lambda: ols.unscale_and_check(TREE, ols.init(), axis_name=(TREE["layer0"],)),
    lambda: ols.value_and_grad(0, loss_fn),
    lambda: ols.value_and_grad(loss_fn, TREE),
    lambda: ols.value_and_grad(loss_fn, has_aux=TREE),
    lambda: ols.value_and_grad(loss_fn, transform=TREE),
    lambda: ols.value_and_grad(loss_fn)(TREE, ols.init()),
    lambda: ols.value_and_grad(lambda tree: tree, has_aux=True)(ols.init(), TREE),
    lambda: ols.value_and_grad(loss_fn, transform=functools.partial)(ols.init(), TREE),
    lambda: ols.update(True, ols.init(), "dynamic"),
    lambda: ols.update(ols.init(), TREE, "dynamic"),
    lambda: ols.update(ols.init(), True, TREE["layer0"]),
    lambda: ols.init(TREE),
    lambda: ols.as_loss_scale(TREE["layer0"]),
    lambda: ols.DynamicLossScale(TREE["layer0"]),
    lambda: ols.FixedLossScale(TREE),
    lambda: ols.FixedLossScale.from_config(TREE),
    lambda: ols.Spike(TREE["layer0"]),
    lambda: ols.Spike(window=TREE),
    lambda: ols.loss_scale_state([ols.init()] * 50),
    lambda: ols.applied(TREE),
    lambda: ols.master_weights(TREE, MASTERS.init(TREE)),
    lambda: ols.with_loss_scaling("dynamic", SGD),
    lambda: ols.with_loss_scaling(SGD, SGD),
    lambda: ols.with_loss_scaling(SGD, ols.Spike()),
    lambda: ols.with_skipping(SGD, ols.DynamicLossScale()),
    lambda: ols.with_skipping(SGD, [TREE]),
    lambda: ols.with_skipping(Rule(), SGD),
    lambda: ols.with_skipping(SGD, Rule()),
    lambda: ols.with_skipping(SGD, functools.partial(loss_fn, TREE)).init(0).update(),
    lambda: ols.with_master_weights(TREE),
    lambda: ols.with_bfloat16_state(nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
    lambda: ols.with_stochastic_rounding(optax.contrib.prodigy()).init(
        ols.cast(TREE, jnp.bfloat16)
    ),
    lambda: loss_scale_optimizer(TREE, SGD),
    lambda: loss_scale_optimizer(SGD, TREE["layer0"]),
    lambda: loss_scale_optimizer(SGD, clipnorm=TREE),
    lambda: diag.metrics(TREE),
    lambda: diag.check_health(TREE),
    lambda: diag.check_health(ols.init(), policy=TREE["layer0"]),
    lambda: diag.is_stalled(ols.init(), max_consecutive_skipped=TREE),
    lambda: diag.suggest_loss_scale(TREE),
    lambda: diag.plot_gradient_exponents(diag.gradient_exponents(TREE), TREE),
    lambda: diag.gradient_exponents(TREE, loss_scale=TREE["layer0"]),
    lambda: diag.first_nonfinite(TREE, loss_fn),
    lambda: diag.precision_report(TREE, loss_fn),
    lambda: ols.testing.assert_scaled_once(ols.init(), loss_fn, TREE),
    lambda: ols.testing.assert_scaled_once(lambda *args: args[1], ols.init(), TREE),
    lambda: TrainState.create(apply_fn=None, params=SGD, tx=TREE),
    lambda: TrainState.create(apply_fn=None, params=TREE, tx=SGD).apply_gradients(
        grads=TREE, extra_args=TREE["layer0"]
    ),
    *(call for tx in (ols.with_loss_scaling(optax.adam(0.1)), MASTERS) for call in updates(tx)),
]


@pytest.mark.filterwarnings("ignore:`with_stochastic_rounding.* got no bfloat16")
@pytest.mark.integration
def test_messages_are_short_and_show_no_numbers_of_an_array():
    raised = 0
    for number, call in enumerate([*CALLS, *updates(ROUNDED)]):
        text = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except Exception as error:  # noqa: BLE001 - some are Optax's own
                text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        text += "\n".join(str(warning.message) for warning in caught)
        raised += bool(text)
        assert len(text) <= 1200, (number, text)
        assert "0.123" not in text, (number, text)
    assert raised > 60


def test_what_a_message_shows_of_a_value():
    assert shown(TREE["layer0"]) == "float32[8,8]"
    assert (
        shown({"a": TREE["layer0"], "b": [1.5, None, "text"]})
        == "dict(float32[8,8], list(1.5, None, 'text'))"
    )
    assert shown(Rule()) == "an object of type Rule"
    assert shown(functools.partial(loss_fn, TREE)) == "an object of type partial"
    assert shown(ols.FixedLossScale(8)) == repr(ols.FixedLossScale(8))
    assert shown(loss_fn) == "function `loss_fn`"
    assert len(shown(TREE)) == len(shown("text" * 100)) == 200
    state = ols.with_loss_scaling(SGD).init(TREE)
    assert shown(state).startswith("GuardState(LossScaleState(float32[], int32[], int32[], ")


@pytest.mark.parametrize(
    ("call", "order"),
    [
        (lambda: ols.scale_loss(ols.init(), 1.0), "(loss, state)` takes the loss first."),
        (lambda: ols.unscale_and_check(ols.init(), 1.0), "(grads, state)` takes the gradients f"),
        (lambda: ols.grad(loss_fn)(TREE, ols.init()), "(opt_state, params, ...)` takes the state"),
        (lambda: ols.applied(TREE), "or pass the state that is meant."),
        (lambda: MASTERS.update(SGD.init(0), TREE, TREE), "`update(grads, state, params)`."),
    ],
)  # fmt: skip
def test_a_swap_is_answered_with_the_order_of_that_function(call, order):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert order in str(caught.value)


@pytest.mark.parametrize("name", ["GradScaler", "LossScaleOptimizer", "DynamicScale"])
def test_a_name_of_another_system_is_answered_with_the_name_here(name):
    with pytest.raises(AttributeError, match=rf"'{name}'\. It is `with_loss_scaling\(") as caught:
        getattr(ols, name)
    assert not hasattr(ols, "nothing")
    assert "has no attribute" in str(caught.value)


def test_a_rule_that_is_not_called_is_told_to_be():
    for guard in (ols.with_skipping, functools.partial(ols.with_loss_scaling, loss_scale=8)):
        with pytest.raises(TypeError, match=r"Call it: `Spike\(\)`\.$"):
            guard(SGD, skip_if=ols.Spike)


def test_a_missing_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("optax_lossscale.flax")]:
        monkeypatch.delitem(sys.modules, name)
    for library in ("flax", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, library, None)  # as if it was not installed
    with pytest.raises(ModuleNotFoundError, match=r"the extra `flax`: .*\.\[flax\]"):
        importlib.import_module("optax_lossscale.flax")
    with pytest.raises(ModuleNotFoundError, match=r"the extra `plot`: .*\.\[plot\]"):
        diag.plot_gradient_exponents(diag.gradient_exponents(jnp.ones(3)))


def test_another_missing_module_is_not_called_flax(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("optax_lossscale.flax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optax_lossscale._guard", None)
    with pytest.raises(ModuleNotFoundError, match=r"optax_lossscale\._guard"):
        importlib.import_module("optax_lossscale.flax")


def test_a_guard_is_printed_with_its_policy_and_rules():
    spike, own = ols.Spike(window=8), lambda *_, **__: False
    assert repr(ols.with_skipping(SGD)) == "with_skipping(inner)"
    assert repr(ols.with_skipping(SGD, spike)) == f"with_skipping(inner, skip_if={spike})"
    rules = f"({spike}, function `{own.__qualname__}`)"
    found = ols.with_loss_scaling(SGD, "dynamic", skip_if=[spike, own])
    assert repr(found) == f"with_loss_scaling(inner, {ols.DynamicLossScale()}, skip_if={rules})"
    assert (
        repr(ols.with_loss_scaling(SGD, 8)) == f"with_loss_scaling(inner, {ols.FixedLossScale(8)})"
    )
    assert repr(found._replace(init=SGD.init)).startswith("Guard(init=<function")
