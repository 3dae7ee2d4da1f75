"""Every error that bad input raises: its type, its first words, and the calls that raise it.

The first words name the argument.
"""

import decimal
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import ones, shape
from flax import nnx

import optax_lossscale as ols
from optax_lossscale import DynamicLossScale, FixedLossScale, keras
from optax_lossscale import diagnostics as diag
from optax_lossscale.flax import TrainState
from optax_lossscale.testing import assert_scaled_once

NAN, INF, HUGE = float("nan"), float("inf"), 10**400  # HUGE does not fit a float64
FLOAT32_MAX, INT32_MAX = float(np.finfo(np.float32).max), 2**31 - 1
ONE, TWO, HALF = ones((shape(1), shape(2), shape(1, dtype=jnp.float16)))
PARAMS, SGD = {"w": ONE}, optax.sgd(0.1)
TX, SKIPS = ols.with_loss_scaling(SGD), ols.with_skipping(SGD)
MASTERS, SMALL = ols.with_master_weights(SGD), ols.with_bfloat16_state(SGD)
ROUNDED, BFLOAT16 = ols.with_stochastic_rounding(SGD), {"w": ones(shape(1, dtype=jnp.bfloat16))}
FIELDS = ols.LossScaleState._fields
DECAY, EMA = {"weight_decay": 0.1, "learning_rate": 0.1}, {"use_ema": True}
SHAPE = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float16)
WRAPPERS = ols.with_loss_scaling, ols.with_skipping, ols.with_bfloat16_state
INJECTED = optax.chain(*[optax.inject_hyperparams(optax.sgd)(0.1)] * 2)
FOR_PARAMETERS = ols.with_master_weights, ols.with_stochastic_rounding
EXPONENTS_READERS = diag.suggest_loss_scale, diag.plot_gradient_exponents
READERS = diag.metrics, diag.check_health, diag.is_stalled, ols.applied


def constant(value):
    """Return a function whose result this always is."""
    return lambda *_, **__: value


# States, with some of the fields replaced.


def scale_state(**fields):
    return ols.init(8.0)._replace(**fields)


def guard_state(**fields):
    return TX.init(PARAMS)._replace(**fields)


def spike_state(**fields):
    return ols.Spike().init(PARAMS)._replace(**fields)


def exponents_of(grads=PARAMS, **fields):
    return diag.gradient_exponents(grads)._replace(**fields)


def stacked(tree):
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


# Calls that lack only the tested argument.
updates = (
    FixedLossScale(8).update,
    DynamicLossScale().update,
    functools.partial(ols.update, policy="dynamic"),
)
scale_loss = functools.partial(ols.scale_loss, 1.0)
choose = functools.partial(ols.tree_where, True)
unscale = functools.partial(ols.unscale_and_check, PARAMS)
check_health, from_config = diag.check_health, FixedLossScale.from_config
exponents = functools.partial(diag.gradient_exponents, PARAMS)
train_state = functools.partial(TrainState.create, apply_fn=None, params=PARAMS)
optimizer = functools.partial(keras.loss_scale_optimizer, SGD)
rule_that = functools.partial(
    SimpleNamespace, init=constant(()), measure=constant(0.0), judge=constant((False, ()))
)


def suggest_loss_scale(**arguments):
    return diag.suggest_loss_scale(exponents_of(), **arguments)


def plot(**arguments):
    return diag.plot_gradient_exponents(exponents_of(), **arguments)


def square(x):
    return jnp.sum(x @ x)


def search(fun, *args, **options):
    return diag.precision_search(fun, *args or (ONE,), **options)


def traced(call):
    return lambda: jax.jit(call)(8.0)


def health(**fields):
    return check_health(scale_state(**fields))


def inner_health(inner_state):
    return check_health(guard_state(inner_state=inner_state))


def differentiate(fun, state=None, **arguments):
    return ols.value_and_grad(fun, **arguments)(state or scale_state(), ONE)


def take(state=None, axis_name=None, value=0.0):
    tx = ols.with_loss_scaling(SGD, axis_name=axis_name)
    state = scale_state() if state is None else state
    return tx.update(PARAMS, guard_state(loss_scale_state=state), value=value)


def keep(before, after):
    """Take a step with an optimizer whose state changes from `before` to `after`."""
    inner = optax.GradientTransformation(lambda _: before, lambda grads, *_: (grads, after))
    tx = ols.with_loss_scaling(inner)
    return tx.update(ONE, tx.init(ONE))


NO_RULES = (
    *("x", 3, ols.Spike, {}, SGD, optax.MultiSteps(SGD, 2), SimpleNamespace(init=len, update=len)),
    *(SimpleNamespace(init=len, **{name: len}) for name in ("measure", "judge")),
)


def skip(rule, rule_states=None, **extra_args):
    tx = ols.with_skipping(SGD, rule)
    state = tx.init(PARAMS)
    state = state if rule_states is None else state._replace(rule_states=rule_states)
    return tx.update(PARAMS, state, PARAMS, **extra_args)


def master_step(params, updates=PARAMS):
    return MASTERS.update(updates, MASTERS.init({"w": HALF}), params)


def apply(grads, extra_args=None, **fields):
    state = train_state(tx=SGD).replace(**fields)
    return state.apply_gradients(grads=grads, extra_args=extra_args)


def keras_init(inner, **arguments):
    return keras.loss_scale_optimizer(inner, **arguments).init(PARAMS)


def calls(functions, names, *values, **others):
    """Return a row for each function, each argument and each value, next to the others."""
    return [
        (name, functools.partial(function, **others, **{name: value}))
        for function in (functions if isinstance(functions, tuple) else (functions,))
        for name in names.split()
        for value in values
    ]


def rows(name, *calls):
    return [(name, call) for call in calls]


# The type and the first words of each error, and what makes the calls that raise it. `{}` is the
# name at the start of a row: an argument, say.
TABLE = {
    # -- numbers
    "TypeError: `{}` must be a Python number": lambda: [
        *calls(search, "tolerance", "x", None, fun=jnp.sum),
        *calls(FixedLossScale, "scale", None, "x", True, 1j, [1], jnp.float32(4)),
        *calls(DynamicLossScale, "initial_scale min_scale max_scale", "x"),
        *calls(DynamicLossScale, "growth_factor backoff_factor", "x"),
        *calls(ols.Spike, "sigmas", "x"),
        *calls(optimizer, "initial_scale ema_momentum clipnorm", "x", False),
        *calls(optimizer, "weight_decay", jnp.sin, learning_rate=0.1),
        *calls(optimizer, "learning_rate", "x", weight_decay=0.1),
        *calls(exponents, "loss_scale", True, "1024"),
        *rows("scale", traced(FixedLossScale)),
        *rows("state.loss_scale", lambda: scale_loss(scale_state(loss_scale="x"))),
        *rows("state.loss_scale", lambda: scale_loss(scale_state(loss_scale=None))),
    ],
    "TypeError: `{}` must be True or False": lambda: [
        *calls(DynamicLossScale, "consecutive_hysteresis", "false"),
        *calls(FixedLossScale, "skip_nonfinite", "no", 1, scale=8),
        *calls(ols.with_master_weights, "remainders", "no", inner=SGD),
        *calls(train_state, "count_skipped", "no", tx=SGD),
        *calls(optimizer, "dynamic use_ema", "False"),
    ],
    "ValueError: `{}` must be finite in float32": lambda: [
        *calls(FixedLossScale, "scale", NAN, INF, -INF, HUGE, 2 * FLOAT32_MAX),
        *calls(DynamicLossScale, "growth_factor", INF),
        *calls(DynamicLossScale, "min_scale", NAN),
        *calls(exponents, "loss_scale", NAN, INF),
    ],
    "ValueError: `{}` must be between": lambda: [
        *calls(FixedLossScale, "scale", -1.0, 0, 2.0**-127, 2.0**127),
        *calls(DynamicLossScale, "initial_scale min_scale max_scale", 0),
        *calls(DynamicLossScale, "backoff_factor", -0.5, 0.0, 1.0, 1 - 1e-9, 2.0**-127),
        *calls(ols.as_loss_scale, "loss_scale", 0),
        *calls(optimizer, "initial_scale", 0, 2.0**127),
        *calls(optimizer, "loss_scale_factor", -1),
        *calls(exponents, "loss_scale", 0, -1.0, jnp.float32(0)),
        *rows("state.loss_scale", lambda: scale_loss(scale_state(loss_scale=-1))),
        *calls(optimizer, "clipnorm clipvalue global_clipnorm", -1.0, 0, 2.0**-127),
        *calls(optimizer, "weight_decay", -0.1, learning_rate=jnp.sin),
        *calls(optimizer, "learning_rate", -0.1, weight_decay=0.1),
        *calls(optimizer, "ema_momentum", -0.1, 1.1),
    ],
    "ValueError: `initial_scale` must be between `min_scale` and `max_scale`": lambda: [
        *calls(DynamicLossScale, "min_scale", 2.0**16),
        *calls(DynamicLossScale, "max_scale", 2.0**14),
    ],
    "ValueError: `growth_factor` must be greater than 1": lambda: [
        *calls(DynamicLossScale, "growth_factor", -2.0, 0.0, 1.0, 1 + 1e-9),
    ],
    "TypeError: `{}` must be an integer": lambda: [
        *calls(DynamicLossScale, "growth_interval", None, "x", True, 1.5, jnp.int32(4)),
        *calls(DynamicLossScale, "hysteresis loss_patience", 1.5),
        *calls(ols.Spike, "window warmup max_consecutive_skipped", 1.5),
        *calls(READERS[1:3], "max_consecutive_skipped", True, opt_state=scale_state()),
        *calls(suggest_loss_scale, "headroom", 1.5),
        *calls(optimizer, "dynamic_growth_steps gradient_accumulation_steps", 2.5),
        *calls(optimizer, "ema_overwrite_frequency", 1.5, use_ema=True),
        *rows("state.growth_count", lambda: diag.metrics(scale_state(growth_count=1.5))),
    ],
    "ValueError: `{}` must be an integer from": lambda: [
        *calls(DynamicLossScale, "growth_interval", 0, -1, 2**31, HUGE),
        *calls(DynamicLossScale, "hysteresis loss_patience", 0),
        *calls(ols.Spike, "window", 1),
        *calls(ols.Spike, "warmup max_consecutive_skipped", 0),
        *calls(READERS[1:3], "max_consecutive_skipped", -1, opt_state=scale_state()),
        *calls(suggest_loss_scale, "headroom", -1),
        *calls(optimizer, "dynamic_growth_steps", 0),
        *calls(optimizer, "gradient_accumulation_steps", 1),
        *calls(optimizer, "ema_overwrite_frequency", 0, use_ema=True),
        *((f"state.{n}", lambda n=n: diag.metrics(scale_state(**{n: -1}))) for n in FIELDS[1:]),
    ],
    # -- policies
    "TypeError: `{}` must be a policy": lambda: [
        *calls(check_health, "policy", 8.0, True, [], ONE, opt_state=scale_state()),
        *calls(check_health, "policy", SGD, DynamicLossScale, opt_state=scale_state()),
        *calls(ols.update, "policy", jnp.float32(8), state=scale_state(), grads_finite=True),
        *calls(ols.as_loss_scale, "loss_scale", True, 1j, [8], np.ones(2), FixedLossScale),
        *rows("loss_scale", traced(ols.init)),
    ],
    "ValueError: `config` must describe a FixedLossScale, got class_name={}": lambda: [
        *rows("'Dynamic'", lambda: from_config({"class_name": "Dynamic"})),
        *rows("'FixedLossScale' and", lambda: from_config({"x": 1, "scale": 8, 1: 2})),
    ],
    "ValueError: `{}` must be a policy": lambda: [
        *calls(check_health, "policy", "static", opt_state=scale_state()),
        *calls(ols.update, "policy", "static", state=scale_state(), grads_finite=True),
        *calls(ols.as_loss_scale, "loss_scale", "Dynamic"),
        *calls(ols.with_loss_scaling, "loss_scale", "x", inner=SGD),
        *calls(train_state, "loss_scale", "x", tx=SGD),
    ],
    "ValueError: `{}` must name a class": lambda: calls(
        ols.init, "loss_scale", {}, {"class_name": "Other"}, {"class_name": ["x"]}
    ),
    # -- flags and states
    "TypeError: `{}` must be a bool or a boolean array": lambda: [
        *calls(ols.tree_where, "pred", None, "x", 1, jnp.float32(1), on_true=ONE, on_false=ONE),
        *calls(updates, "grads_finite", 1, state=scale_state()),
        *calls(updates, "loss_finite", 1, state=scale_state(), grads_finite=True),
        *rows("skip_if", lambda: skip(constant(1))),
        *rows("SimpleNamespace.judge", lambda: skip((rule_that(judge=constant((1, ()))),))),
    ],
    "TypeError: `{}` must be a number, an array or a tree": lambda: calls(
        take, "value", "nan", decimal.Decimal("NaN"), np.array([NAN], object), [1.0, "x"]
    ),
    "TypeError: `{}` must be a scalar": lambda: [
        *rows("value", lambda: skip(ols.Spike(), value={"a": 1.0})),
        *calls(exponents, "loss_scale", scale_state()),
    ],
    "ValueError: `{}` must be a scalar": lambda: [
        *calls(ols.tree_where, "pred", ONE > 0, TWO > 0, on_true=ONE, on_false=ONE),
        *calls(exponents, "loss_scale", TWO),
        *((f"opt_state.{n}", lambda n=n: health(**{n: TWO})) for n in FIELDS),
        *rows(
            "state.loss_scale",
            lambda: scale_loss(stacked(scale_state())),
            lambda: take(stacked(scale_state())),
        ),
        *rows("value", lambda: skip(ols.Spike(), value=TWO)),
        *rows("SimpleNamespace.measure", lambda: skip(rule_that(measure=constant(TWO)))),
    ],
    "TypeError: `state` must be a {}": lambda: [
        *rows("LossScaleState", lambda: updates[0](tuple(scale_state()), True)),
        *rows("GuardState, got dict", lambda: TX.update(PARAMS, PARAMS, guard_state())),
        *rows(
            "GuardState", *(lambda tx=tx: tx.update(PARAMS, scale_state()) for tx in (TX, SKIPS))
        ),
        *rows("MasterWeightsState", lambda: MASTERS.update(PARAMS, scale_state())),
        *rows("Bfloat16State", lambda: SMALL.update(PARAMS, scale_state())),
        *rows("StochasticRoundingState", lambda: ROUNDED.update(PARAMS, scale_state())),
    ],
    "ValueError: `{}` must hold exactly one": lambda: [
        *rows("state", lambda: scale_loss(None), lambda: unscale(tuple(scale_state()))),
        *rows("state", lambda: take(state=())),
        *calls((ols.loss_scale_state, *READERS), "opt_state", SGD, {"loss_scale": ONE}),
        *rows("state", lambda: assert_scaled_once(apply, PARAMS)),
        *rows("opt_state", lambda: keras.ema_params({}), lambda: ols.master_weights({}, PARAMS)),
    ],
    "ValueError: `opt_state` must hold exactly one LossScaleState, got 2 in a dict, found at: "
    "`['a'].loss_scale_state`, `['b'][0]`. ": lambda: calls(
        READERS, "opt_state", {"a": guard_state(), "b": [scale_state()]}
    ),
    "ValueError: `state` must hold exactly one LossScaleState, got 0 in a ArrayImpl. ": lambda: [
        lambda: ols.grad(jnp.sum)(ONE, ONE)
    ],
    # -- axes, optimizers, rules
    "TypeError: `{}` must be the name of a mapped axis": lambda: [
        *calls(unscale, "axis_name", 3, True, ["x"], ("x", 0), ONE, state=scale_state()),
        *calls((ols.with_loss_scaling, ols.with_skipping), "axis_name", 3, inner=SGD),
    ],
    "ValueError: `{}` must be the name of a mapped axis": lambda: [
        *calls(unscale, "axis_name", "x", ("x", "y"), state=scale_state()),
        *calls(take, "axis_name", "x"),
    ],
    "TypeError: `{}` must be an optax.GradientTransformation": lambda: [
        *calls(ols.with_loss_scaling, "inner", None, "x", guard_state()),
        *calls(WRAPPERS, "inner", optax.sgd),
        *calls(FOR_PARAMETERS, "inner", optax.sgd),
        *calls(train_state, "tx", optax.sgd),
        *calls(keras.loss_scale_optimizer, "inner_optimizer", optax, optax.MultiSteps(SGD, 2)),
    ],
    "TypeError: `{}` must be the result of": lambda: calls(
        apply, "tx", SGD, optax.chain(TX), grads=PARAMS
    ),
    "TypeError: `{}` must be a function": lambda: [
        *calls(ols.with_skipping, "skip_if", *NO_RULES, (ols.Spike(), 3), inner=SGD),
        *calls(ols.with_loss_scaling, "skip_if", 3, [(ols.Spike(),)], inner=SGD),
        *calls(train_state, "skip_if", 3, tx=SGD),
        *calls(ols.cast, "keep", "bias", 3, tree=PARAMS, dtype="float16"),
        *calls(ols.with_bfloat16_state, "keep", "bias", inner=SGD),
        *calls((ols.value_and_grad, ols.grad), "fun", None),
        *calls(ols.autocast, "fun", PARAMS, dtype="float16"),
        *calls((diag.precision_report, diag.first_nonfinite, search), "fun", PARAMS),
        *calls(search, "transform progress", 3, fun=jnp.sum),
        *rows("fun", lambda: diag.precision_report(np.asarray, ONE)),
        *rows("fun", lambda: diag.precision_report(lambda x: ONE[x > 0], ONE)),
    ],
    "ValueError: `state.rule_states` must be a tuple with the state of each of {} rules": lambda: [
        *rows(
            "0", *(lambda x=x: skip(None, x) for x in ((spike_state(),), [], optax.EmptyState()))
        ),
        *rows(
            "1", *(lambda x=x: skip(ols.Spike(), x, value=1.0) for x in ((), {"0": spike_state()}))
        ),
        *rows("2", lambda: skip((ols.Spike(), constant(False)), (spike_state(),), value=1.0)),
    ],
    "ValueError: `state.rule_states` must hold a window of shape (2,)": lambda: [
        lambda: skip(ols.Spike(window=2), (spike_state(),), value=1.0)
    ],
    "TypeError: `state.rule_states` must be a {}": lambda: [
        *rows("EmptyState", lambda: skip(constant(True), (spike_state(),))),
        *rows("SpikeState", lambda: skip(ols.Spike(), (optax.EmptyState(),), value=1.0)),
    ],
    'TypeError: `{}` must be "value", "grad_norm" or': lambda: calls(ols.Spike, "of", None, 3),
    "ValueError: `{}` must be greater than 1.5": lambda: calls(
        ols.Spike, "sigmas", -1.0, 0, 1.5, 1.5 + 1e-9
    ),
    "ValueError: `{}` must be at most `window`": lambda: calls(ols.Spike, "warmup", 5, window=4),
    "TypeError: `{}` must be given to `update`, because Spike": lambda: [
        *rows("value", lambda: skip(ols.Spike())),
        *rows("lag", lambda: skip(ols.Spike("lag"), value=1.0)),
    ],
    "ValueError: `{}` must not decide about steps itself": lambda: [
        *rows("inner", lambda: keras_init(SKIPS)),
        *rows("inner", lambda: ols.with_stochastic_rounding(SKIPS).init(PARAMS)),
        *rows("inner", lambda: ols.with_bfloat16_state(SKIPS).init(PARAMS)),
        *rows("tx", lambda: train_state(tx=optax.chain(SGD, TX))),
    ],
    # -- masters, small states, casts
    "ValueError: `{}` must be given": lambda: [
        *rows("params", lambda: master_step(None)),
        *rows("params", lambda: ROUNDED.update(PARAMS, ROUNDED.init(BFLOAT16))),
        *rows("updates", lambda: ROUNDED.update(None, ROUNDED.init(BFLOAT16), BFLOAT16)),
        *rows("params", lambda: optimizer(**EMA).update(PARAMS, keras_init(SGD, **EMA))),
        *rows("updates", lambda: master_step(PARAMS, None)),
        *rows("initial_scale", lambda: optimizer(dynamic=False)),
    ],
    "TypeError: `params` must keep the dtypes": lambda: [lambda: master_step(PARAMS)],
    "ValueError: `inner` must not change the updates of `{}`": lambda: [
        (wrap.__name__, lambda init=init, wrap=wrap: init(wrap(SGD)))
        for wrap in FOR_PARAMETERS
        for init in (
            lambda tx: ols.with_skipping(optax.chain(tx, optax.scale(-1.0))).init(BFLOAT16),
            lambda tx: keras_init(tx, **DECAY),
            lambda tx: keras_init(optax.chain(tx), **EMA),
        )
    ],
    "ValueError: `inner` must not keep masters or round parameters itself, got a {}": lambda: [
        *rows("MasterWeightsState", lambda: ols.with_stochastic_rounding(MASTERS).init(BFLOAT16)),
        *(
            ("StochasticRoundingState", lambda f=f: f(ROUNDED).init(BFLOAT16))
            for f in FOR_PARAMETERS
        ),
    ],
    "ValueError: `params` must not be float16 for stochastic rounding, got one at {}": lambda: [
        *rows("`['w']`", lambda: ROUNDED.init({"w": HALF})),
        *rows("`['w']`", lambda: ROUNDED.update(PARAMS, ROUNDED.init(BFLOAT16), {"w": HALF})),
    ],
    "ValueError: `inner` must be a plain optimizer, got a {}": lambda: [
        *rows("StochasticRoundingState", lambda: ols.with_bfloat16_state(ROUNDED).init(BFLOAT16)),
        *rows("MasterWeightsState", lambda: ols.with_bfloat16_state(MASTERS).init(PARAMS)),
        *rows("Bfloat16State", lambda: ols.with_bfloat16_state(SMALL).init(PARAMS)),
    ],
    "TypeError: `{}` must be a floating-point dtype": lambda: [
        *calls(ols.cast, "dtype", "int8", None, "complex64", "bf16", PARAMS, tree=PARAMS),
        *calls(ols.autocast, "dtype", None, "int8", "bf16", fun=jnp.sum),
        *calls(exponents, "dtype", "int8", "complex64"),
        *calls((suggest_loss_scale, plot), "dtype", "int8"),
    ],
    "TypeError: `{}` must be float16, bfloat16 or float32": lambda: [
        *calls(ols.autocast, "dtype", "float64", float, fun=jnp.sum)
    ],
    "TypeError: `{}` must be float16, bfloat16 or None": lambda: [
        *calls(
            ols.autocast, "checkpoint_dtype", jnp.float32, "f8", 16, fun=jnp.sum, dtype="bfloat16"
        ),
        *calls(ols.autocast, "checkpoint_dtype", "float64", fun=jnp.sum, dtype="float32"),
    ],
    "ValueError: `{}` must not be float16 if `dtype` is bfloat16": lambda: calls(
        ols.autocast, "checkpoint_dtype", "float16", fun=jnp.sum, dtype="bfloat16"
    ),
    "TypeError: `{}` must be float16 or bfloat16": lambda: [
        *calls(search, "dtype", jnp.float32, fun=jnp.sum),
    ],
    "ValueError: `{}` must be positive": lambda: [
        *calls(search, "tolerance", 0, -0.1, fun=jnp.sum),
    ],
    "ValueError: `{}` must have a finite loss and gradient in float32": lambda: [
        *calls(search, "fun", lambda x: jnp.sum(x) * NAN, lambda x: jnp.sqrt(jnp.sum(x) * 0)),
    ],
    "TypeError: `{}` must have products that `autocast(fun, bfloat16)` casts": lambda: [
        *rows("fun", lambda: search(ols.autocast(square, jnp.bfloat16), jnp.eye(16))),
    ],
    "TypeError: `dtype` must be float16, bfloat16 or float32, got {}. fp8 needs a scale": lambda: [
        ("'float8_e4m3fn'", lambda: ols.autocast(jnp.sum, "float8_e4m3fn"))
    ],
    "TypeError: `{}` must be a floating-point dtype of at most": lambda: calls(
        exponents, "dtype", "f8"
    ),
    "TypeError: `tree` must not hold a stateful flax.nnx object, got {}": lambda: [
        *rows("Average", lambda: ols.cast([nnx.metrics.Average()], "float16"))
    ],
    # -- losses
    "TypeError: `loss` must be floating-point, got {}": lambda: [
        *rows("str at the root", lambda: train_state(tx=SGD).scale_loss("x")),
        *rows("complex at the root", lambda: ols.scale_loss(1j, scale_state())),
        *rows("key<fry> at the root", lambda: ols.scale_loss(jax.random.key(0), scale_state())),
        *rows("int at `['a'][1]`", lambda: ols.scale_loss({"a": [1.0, 1]}, scale_state())),
        *rows("str at `[1]`", lambda: differentiate(constant([1.0, "x"]))),
    ],
    "TypeError: `fun` must return a {}": lambda: [
        *(
            ("pair", lambda x=x: differentiate(constant(x), has_aux=True))
            for x in (None, (1.0,), (1.0, 2.0, 3.0), {"a": 1.0, "b": 2.0})
        ),
    ],
    "TypeError: `transform` must take a function and has_aux, argnums": lambda: [
        lambda: differentiate(jnp.sum, transform=lambda fun: fun, argnums=1)
    ],
    "TypeError: `transform` must return ((loss, aux), grads)": lambda: (
        [
            lambda x=x: differentiate(jnp.sum, transform=constant(constant(x)))
            for x in (3.0, (1.0, 2.0), (jnp.ones(2), 2.0), ((1.0, None),))
        ]
        + [  # two gradients look like a loss and its aux
            lambda x=x: ols.value_and_grad(lambda pair: pair[0] * pair[1], transform=jax.grad)(
                scale_state(), x
            )
            for x in ([2.0, 3.0], (2.0, 3.0))
        ]
    ),
    # -- arguments that are kept for later
    "TypeError: `{}` must be a function, got ": lambda: [
        *calls((ols.value_and_grad, ols.grad), "transform", None, 3, fun=jnp.sum),
        *calls(assert_scaled_once, "grad_fn", None, ONE, state=scale_state()),
    ],
    "TypeError: `argnums` must be an integer or a tuple of them, got ": lambda: [
        lambda f=f, x=x: f(jnp.sum, argnums=x)
        for f in (ols.value_and_grad, ols.grad)
        for x in ("w", "", 1.5, None, (0, "w"))
    ],
    "TypeError: `has_aux` must be True or False, got ": lambda: [
        lambda x=x: ols.value_and_grad(jnp.sum, has_aux=x) for x in ("aux", None, 2)
    ],
    "TypeError: `ax` must be matplotlib axes, got ": lambda: [
        lambda: plot(ax=3),
        lambda: plot(ax="x"),
    ],
    "TypeError: `extra_args` must be a mapping": lambda: [
        lambda: apply(PARAMS, extra_args=[("kl", 1.0)]),
        lambda: apply(PARAMS, extra_args=1.0),
    ],
    "TypeError: `extra_args` must not have `{}`": lambda: [
        (name, lambda name=name: apply(PARAMS, extra_args={"kl": 1.0, name: PARAMS}))
        for name in ("value", "grads", "params")
    ],
    "TypeError: `name` must be a string": lambda: calls(optimizer, "name", 3),
    "ValueError: `grad` must be the gradients themselves": lambda: [
        lambda x=x: TX.update(PARAMS, guard_state(), PARAMS, grad=x)
        for x in ({"w": ONE + 0}, ONE + 0, {"w": ONE, "v": ONE}, {}, 1.0)
    ],
    "ValueError: `{}` must be in true units": lambda: [
        (name, lambda name=name, x=x: TX.update(PARAMS, guard_state(), PARAMS, **{name: x}))
        for name, x in {"again": PARAMS, "partly": [0.0, ONE]}.items()
    ],
    # -- arguments in the place of others
    "TypeError: `skip_if` must take the extra arguments of `update`": lambda: [
        lambda: skip(lambda _grads, _params: False, value=1.0),
    ],
    # -- trees
    "ValueError: `on_true` must keep its structure, got another at {}": lambda: [
        *rows("`['a']`", lambda: choose({"a": None}, {"a": 1}), lambda: choose(1, {"a": 1})),
        *rows("`['a']`", lambda: choose({"a": [1]}, {"a": (1,)})),
        *rows("`['b']`", lambda: choose({"a": 1, "b": 1}, {"a": 1})),
        *rows("`['b'][0]`", lambda: choose({"a": [1], "b": [1]}, {"a": [1], "b": []})),
        *rows("`.loss_scale`", lambda: choose(scale_state(), tuple(scale_state()))),
        *rows("the root of the tree", lambda: choose(None, 1)),
        *rows("`[0]`", lambda: skip(rule_that(judge=constant((False, [1]))))),
    ],
    "ValueError: `{}` must keep its structure": lambda: [
        *rows("inner", lambda: keep([1], [1, 1])),
        *rows("grads", lambda: apply({"v": ONE})),
        *rows("params", lambda: master_step({"v": HALF}), lambda: master_step({"w": None})),
    ],
    "ValueError: `{}` must keep its shapes": lambda: [
        *rows("on_true", lambda: choose([ONE], [TWO]), lambda: choose(ONE, jnp.float32(1))),
        *rows("inner", lambda: keep(ONE, TWO)),
        *rows("grads", lambda: apply({"w": "x"})),
        *rows("params", lambda: master_step({"w": HALF[None]})),
    ],
    "ValueError: the leaf at {} must be an array in both trees or the same in both": lambda: [
        *rows("`['a']`", lambda: choose({"a": "x"}, {"a": "y"})),
        *rows("`['a']`", lambda: keep({"a": "x"}, {"a": "y"})),
        *rows("the root of the tree", lambda: choose("x", jnp.float32(1))),
        *rows("the root of the tree", lambda: choose(np.array(["a", "b"]), np.array(["a", "c"]))),
        *rows("the root of the tree", lambda: choose(1, 2), lambda: choose(jnp.float32(1), 1.0)),
    ],
    "TypeError: the leaf at {} must have one dtype in both trees": lambda: [
        *rows("`['a']`", lambda: choose({"a": ONE}, {"a": HALF})),
        *rows("the root of the tree", lambda: choose(np.zeros(1, jax.dtypes.float0), ONE)),
    ],
    "TypeError: `inner` must not replace integers in its state": lambda: [
        lambda: keep(jnp.arange(1), ONE)
    ],
    # -- diagnostics and testing
    "ValueError: `opt_state` must hold {}": lambda: [
        *(
            ("a loss scale", lambda x=x: health(**x))
            for x in (
                *({"loss_scale": jnp.float32(x)} for x in (NAN, INF, 0, -8, 2.0**127)),
                *({name: jnp.int32(-1)} for name in FIELDS[1:]),
            )
        ),
        *rows("a loss scale", lambda: check_health(scale_state(loss_scale=0.5), policy="dynamic")),
        *rows("a loss scale", lambda: check_health(scale_state(), policy=FixedLossScale(16))),
        *(
            ("arrays of finite", lambda x=x: inner_health(x))
            for x in ([ONE, NAN * ONE], {"m": INF * HALF})
        ),
    ],
    "TypeError: `{}` must hold values, got traced arrays": lambda: [
        *rows("opt_state", traced(lambda n: health(growth_count=n))),
        *rows("exponents", traced(lambda n: diag.suggest_loss_scale(exponents_of(zero=n)))),
        *rows("exponents", traced(diag.plot_gradient_exponents)),
        *rows("args", traced(lambda n: diag.first_nonfinite(jnp.sin, n))),
        *rows("args", traced(lambda n: search(jnp.sin, n))),
        *rows("grad_fn", traced(lambda n: assert_scaled_once(constant([ONE, n]), scale_state()))),
    ],
    "TypeError: `{}` must be a GradientExponents": lambda: calls(
        EXPONENTS_READERS, "exponents", PARAMS
    ),
    "TypeError: `{}` must be a dict": lambda: calls(from_config, "config", None, []),
    "ValueError: `grads` must have at most": lambda: [
        lambda: jax.eval_shape(exponents.func, SHAPE)
    ],
    "ValueError: `{}` must hold one histogram": lambda: calls(
        EXPONENTS_READERS, "exponents", stacked(exponents_of())
    ),
    "ValueError: `exponents` must hold counts, got negative numbers": lambda: [
        lambda x=x: diag.suggest_loss_scale(exponents_of(histogram=x))
        for x in (-exponents_of().histogram, np.full(277, NAN))
    ],
    "ValueError: `{}` must count at": lambda: [
        *calls(diag.suggest_loss_scale, "exponents", exponents_of([0.0, NAN, INF])),
        *calls(diag.suggest_loss_scale, "exponents", exponents_of([0.0])),
    ],
    "ValueError: `grad_fn` must return gradients that are finite and not all zero": lambda: [
        lambda x=x: assert_scaled_once(constant(x), scale_state())
        for x in (None, "x", 0.0, NAN, INF)
    ],
    # -- Keras' arguments
    "ValueError: only one of `clipnorm`": lambda: [
        lambda: optimizer(clipvalue=1, global_clipnorm=2)
    ],
    "ValueError: `{}` must be None": lambda: [
        *calls(optimizer, "initial_scale dynamic_growth_steps", 5, loss_scale_factor=2),
        *calls(optimizer, "dynamic_growth_steps", 5, initial_scale=2, dynamic=False),
        *calls(optimizer, "learning_rate", 0.1),
        *calls(optimizer, "ema_overwrite_frequency", 3),
    ],
    "ValueError: `weight_decay` must have one learning rate to be multiplied by, got {}": lambda: [
        (f"{found} injected into `inner_optimizer`, found at: {where}", call)
        for found, where, call in (
            (0, "nowhere. ", lambda: keras_init(SGD, weight_decay=1)),
            (
                2,
                "`[0].hyperparams['learning_rate']`, ",
                lambda: keras_init(INJECTED, weight_decay=1),
            ),
        )
    ],
}


# Of parameters that are float32, as those of a wrapper inside another are.
ROUNDS_NOTHING = pytest.mark.filterwarnings("ignore:`with_stochastic_rounding.* got no bfloat16")


@ROUNDS_NOTHING
@pytest.mark.parametrize("message", TABLE)
def test_bad_input_is_refused_by_name(message, subtests):
    for number, row in enumerate(TABLE[message]()):
        name, call = row if isinstance(row, tuple) else ("", row)
        with subtests.test(f"row {number}", name=name, call=getattr(call, "__code__", call)):
            with pytest.raises((TypeError, ValueError)) as caught:
                call()
            said = f"{type(caught.value).__name__}: {caught.value}"
            assert said.startswith(message.format(name)), said
            assert said.endswith("."), said


def guarded_masters(inner):
    return ols.with_loss_scaling(ols.with_master_weights(inner))


@ROUNDS_NOTHING
@pytest.mark.integration
@pytest.mark.parametrize("wrapper", [*WRAPPERS, *FOR_PARAMETERS, guarded_masters])
def test_an_optimizers_error_says_where_updates_and_params_differ(wrapper):
    tx, params = wrapper(optax.adamw(0.1)), {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    for place, updates in (
        ("structure at `['v']`", {**params, "v": ONE}),
        ("shape at `['w']`", {**params, "w": jnp.ones((2, 3))}),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            tx.update(updates, tx.init(params), params)
        assert caught.value.__notes__.count(f"`updates` and `params` differ in {place}.") == 1
    with pytest.raises(ValueError, match="param") as caught:
        tx.update(params, tx.init(params))
    assert "differ" not in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("wrapper", [ols.with_loss_scaling, ols.with_skipping])
def test_an_optimizers_error_names_the_parameter_that_is_not_an_array(wrapper):
    with pytest.raises(TypeError) as caught:
        wrapper(optax.adam(0.1)).init({"a": ONE, "b": 1.0, "w": "text"})
    assert caught.value.__notes__ == ["`params` must be a tree of arrays, got 'text' at `['w']`."]


class CodedError(Exception):
    """An error of an optimizer's own, of no type that the library knows."""


@pytest.mark.parametrize("wrapper", [*WRAPPERS, ols.with_master_weights, guarded_masters])
def test_an_optimizers_own_error_keeps_its_type_and_arguments(wrapper):
    def update(*_):
        raise CodedError(42, "bad")

    tx = wrapper(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    with pytest.raises(CodedError) as caught:
        tx.update({"v": ONE}, tx.init(PARAMS), PARAMS)
    assert caught.value.args == (42, "bad")
    assert caught.value.__notes__ == ["`updates` and `params` differ in structure at `['v']`."]


@pytest.mark.parametrize("wrapper", [*WRAPPERS, ols.with_master_weights])
def test_the_error_for_a_state_restored_into_plain_containers_says_how_to_restore_it(wrapper):
    tx = wrapper(optax.adam(0.1))
    state = tx.init(PARAMS)
    restored = {"0": state.inner_state[0]._asdict(), "1": {}}
    with pytest.raises(AttributeError) as caught:
        tx.update(PARAMS, state._replace(inner_state=restored), PARAMS)
    assert ["Restore a checkpoint onto" in note for note in caught.value.__notes__] == [True]


def test_an_attribute_error_of_another_object_has_no_note():
    tx = ols.with_skipping(optax.GradientTransformation(lambda _: (), lambda *_: optax.nothing))
    with pytest.raises(AttributeError) as caught:
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert not hasattr(caught.value, "__notes__")


def test_the_error_for_a_policy_given_as_a_rule_names_the_right_argument():
    with pytest.raises(TypeError, match=r"Use `with_loss_scaling\(inner, policy\)`\.$"):
        ols.with_loss_scaling(SGD, skip_if=FixedLossScale(8))
    for rule in (3, FixedLossScale):
        with pytest.raises(TypeError) as caught:
            ols.with_loss_scaling(SGD, skip_if=rule)
        assert "Use" not in str(caught.value)


def test_functions_among_the_parameters_are_named_where_jax_cannot_differentiate_them():
    layer = {"w": ONE, "activation": jnp.tanh}
    for argnums, args in ((0, (layer,)), (1, (ONE, layer)), (-1, (ONE, layer)), (-2, (layer, ONE))):
        with pytest.raises(
            TypeError, match=r"^`transform` must be .*equinox.filter_value_and_grad"
        ):
            ols.value_and_grad(lambda *_: 0.0, argnums=argnums)(scale_state(), *args)
    # JAX's own error, without advice about another argument.
    with pytest.raises(TypeError, match="requires at least 3 positional arguments"):
        ols.value_and_grad(lambda *_: 0.0, argnums=(0, 2))(scale_state(), ONE, layer)


def test_an_error_inside_another_transform_is_not_changed():
    with pytest.raises(TypeError, match="not iterable"):
        ols.value_and_grad(jnp.sum, transform=lambda *_, **__: lambda *_: max(3))(
            scale_state(), jnp.tanh
        )


@pytest.mark.parametrize(
    ("new", "kinds"), [([1.0], r" \(a list for a tuple\)"), ((1.0, 1.0, 1.0), "")]
)
def test_containers_of_another_kind_are_named(new, kinds):
    with pytest.raises(ValueError, match=rf"got another at [^()]+{kinds}\. `on_true`"):
        choose({"a": new}, {"a": (1.0, 2.0)} if not kinds else {"a": (1.0,)})


def test_a_function_without_a_signature_is_taken():
    assert callable(ols.value_and_grad(max))


def test_the_bounds_themselves_are_accepted():
    accepted = [
        *calls(FixedLossScale, "scale", 2.0**-126, 2.0**126),
        *calls(DynamicLossScale, "growth_interval", 1, INT32_MAX),
        *calls(DynamicLossScale, "backoff_factor", 2.0**-126),
        *calls(optimizer, "clipnorm", 2.0**-126, FLOAT32_MAX),
        *calls(optimizer, "weight_decay", 0, FLOAT32_MAX, learning_rate=0),
        *calls(optimizer, "learning_rate", FLOAT32_MAX, weight_decay=0),
        *calls(optimizer, "ema_momentum", 0, 1),
        *calls(optimizer, "ema_overwrite_frequency", 1, INT32_MAX, use_ema=True),
        *calls(optimizer, "gradient_accumulation_steps", 2, INT32_MAX),
        *calls(health, "loss_scale", 2.0**-126, 2.0**126),
        *calls(health, " ".join(FIELDS[1:]), 0),
        *calls(ols.Spike, "sigmas", 1.5 + 2.0**-22, FLOAT32_MAX),
        *calls(check_health, "max_consecutive_skipped", 0, opt_state=scale_state()),
        *calls(suggest_loss_scale, "headroom", np.int64(0)),
        *calls(exponents, "dtype", "float32"),
        ("texts", lambda: choose(np.array(["a"]), np.array(["a"]))),
        *calls(lambda leaf: choose(leaf, leaf), "leaf", type("Opaque", (), {"__array__": None})()),
        *calls(take, "value", None, 1, True, np.float16(1), {"a": jnp.int32(1)}),
    ]
    for _, call in accepted:
        call()


def test_a_string_in_place_of_a_bool_is_called_a_string():
    # Without the words, `got 'False'` looks like the right value.
    with pytest.raises(TypeError, match=r"must be True or False, got the string 'False'\.$"):
        FixedLossScale(1, skip_nonfinite="False")
    with pytest.raises(TypeError, match=r"must be True or False, got 0\.$"):
        FixedLossScale(1, skip_nonfinite=0)
