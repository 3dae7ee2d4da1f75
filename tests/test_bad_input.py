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
from flax import nnx

import optax_lossscale as ols
from optax_lossscale import DynamicLossScale, FixedLossScale, keras
from optax_lossscale import diagnostics as diag
from optax_lossscale.flax import TrainState
from optax_lossscale.testing import assert_scaled_once

NAN, INF, HUGE = float("nan"), float("inf"), 10**400  # HUGE does not fit a float64
FLOAT32_MAX, INT32_MAX = float(np.finfo(np.float32).max), 2**31 - 1
ONE, TWO, HALF = jnp.ones(1), jnp.ones(2), jnp.ones(1, jnp.float16)
PARAMS, SGD = {"w": ONE}, optax.sgd(0.1)
MANY = {"held": jnp.int32(129)}
INJECTED = optax.chain(*[optax.inject_hyperparams(optax.sgd)(0.1)] * 2)
TX, SKIPS = ols.with_loss_scaling(SGD), ols.with_skipping(SGD)
MASTERS, SMALL = ols.with_master_weights(SGD), ols.with_bfloat16_state(SGD)
ROUNDED = ols.with_stochastic_rounding(SGD)
STATE, OPT_STATE, SPIKES = ols.init(8.0), TX.init(PARAMS), ols.Spike().init(PARAMS)
COUNTS, FULL = STATE._fields[1:], SPIKES._replace(held=jnp.int32(128))
EXPONENTS, NO_EXPONENTS = map(diag.gradient_exponents, (PARAMS, [0.0, NAN, INF]))
STATES, STACKED = jax.tree.map(lambda x: jnp.stack([x, x]), (STATE, EXPONENTS))
DECAY, EMA = {"weight_decay": 0.1, "learning_rate": 0.1}, {"use_ema": True}
SHAPE = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float16)
WRAPPERS = ols.with_loss_scaling, ols.with_skipping, ols.with_bfloat16_state
FOR_PARAMETERS = ols.with_master_weights, ols.with_stochastic_rounding
EXPONENTS_READERS = diag.suggest_loss_scale, diag.plot_gradient_exponents
READERS = diag.metrics, diag.check_health, diag.is_stalled, ols.applied


def returning(value):
    return lambda *_, **__: value


# Calls that lack only the tested argument.
having, holding = STATE._replace, OPT_STATE._replace
updates = (
    FixedLossScale(8).update,
    DynamicLossScale().update,
    functools.partial(ols.update, policy="dynamic"),
)
scale_loss = functools.partial(ols.scale_loss, 1.0)
choose = functools.partial(ols.tree_where, True)
unscale = functools.partial(ols.unscale_and_check, PARAMS)
check_health, configured = diag.check_health, FixedLossScale.from_config
suggest_loss_scale = functools.partial(diag.suggest_loss_scale, EXPONENTS)
plot = functools.partial(diag.plot_gradient_exponents, EXPONENTS)
exponents = functools.partial(diag.gradient_exponents, PARAMS)
train_state = functools.partial(TrainState.create, apply_fn=None, params=PARAMS)
optimizer = functools.partial(keras.loss_scale_optimizer, SGD)
rule_that = functools.partial(
    SimpleNamespace, init=returning(()), measure=returning(0.0), judge=returning((False, ()))
)


def traced(call):
    return lambda: jax.jit(call)(8.0)


def health(**fields):
    return check_health(having(**fields))


def differentiate(fun, state=STATE, **arguments):
    return ols.value_and_grad(fun, **arguments)(state, ONE)


def take(state=STATE, axis_name=None, value=0.0):
    tx = ols.with_loss_scaling(SGD, axis_name=axis_name)
    return tx.update(PARAMS, holding(loss_scale_state=state), value=value)


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


def started(inner, **arguments):
    return keras.loss_scale_optimizer(inner, **arguments).init(PARAMS)


def given(functions, names, *values, **others):
    """Return a row for each function, each argument and each value, next to the others."""
    return [
        (name, functools.partial(function, **others, **{name: value}))
        for function in (functions if isinstance(functions, tuple) else (functions,))
        for name in names.split()
        for value in values
    ]


def named(name, *calls):
    return [(name, call) for call in calls]


# By type and first words: the calls that raise it. `{}` stands for an argument, or for what a row
# names beside its call.
TABLE = {
    # -- numbers
    "TypeError: `{}` must be a Python number": [
        *given(FixedLossScale, "scale", None, "x", True, 1j, [1], jnp.float32(4)),
        *given(DynamicLossScale, "initial_scale min_scale max_scale", "x"),
        *given(DynamicLossScale, "growth_factor backoff_factor", "x"),
        *given(ols.Spike, "sigmas", "x"),
        *given(optimizer, "initial_scale ema_momentum clipnorm", "x", False),
        *given(optimizer, "weight_decay", jnp.sin, learning_rate=0.1),
        *given(optimizer, "learning_rate", "x", weight_decay=0.1),
        *given(exponents, "loss_scale", True, "1024"),
        *named("scale", traced(FixedLossScale)),
        *named("state.loss_scale", lambda: scale_loss(having(loss_scale="x"))),
        *named("state.loss_scale", lambda: scale_loss(having(loss_scale=None))),
    ],
    "TypeError: `{}` must be True or False": [
        *given(DynamicLossScale, "consecutive_hysteresis", "false"),
        *given(FixedLossScale, "skip_nonfinite", "no", 1, scale=8),
        *given(ols.with_master_weights, "remainders", "no", inner=SGD),
        *given(train_state, "count_skipped", "no", tx=SGD),
        *given(optimizer, "dynamic use_ema", "False"),
    ],
    "ValueError: `{}` must be finite in float32": [
        *given(FixedLossScale, "scale", NAN, INF, -INF, HUGE, 2 * FLOAT32_MAX),
        *given(DynamicLossScale, "growth_factor", INF),
        *given(DynamicLossScale, "min_scale", NAN),
        *given(exponents, "loss_scale", NAN, INF),
    ],
    "ValueError: `{}` must be between": [
        *given(FixedLossScale, "scale", -1.0, 0, 2.0**-127, 2.0**127),
        *given(DynamicLossScale, "initial_scale min_scale max_scale", 0),
        *given(DynamicLossScale, "backoff_factor", -0.5, 0.0, 1.0, 1 - 1e-9, 2.0**-127),
        *given(ols.as_loss_scale, "loss_scale", 0),
        *given(optimizer, "initial_scale", 0, 2.0**127),
        *given(optimizer, "loss_scale_factor", -1),
        *given(exponents, "loss_scale", 0, -1.0, jnp.float32(0)),
        *named("state.loss_scale", lambda: scale_loss(having(loss_scale=-1))),
        *given(optimizer, "clipnorm clipvalue global_clipnorm", -1.0, 0, 2.0**-127),
        *given(optimizer, "weight_decay", -0.1, learning_rate=jnp.sin),
        *given(optimizer, "learning_rate", -0.1, weight_decay=0.1),
        *given(optimizer, "ema_momentum", -0.1, 1.1),
    ],
    "ValueError: `initial_scale` must be between `min_scale` and `max_scale`": [
        *given(DynamicLossScale, "min_scale", 2.0**16),
        *given(DynamicLossScale, "max_scale", 2.0**14),
    ],
    "ValueError: `growth_factor` must be greater than 1": [
        *given(DynamicLossScale, "growth_factor", -2.0, 0.0, 1.0, 1 + 1e-9),
    ],
    "TypeError: `{}` must be an integer": [
        *given(DynamicLossScale, "growth_interval", None, "x", True, 1.5, jnp.int32(4)),
        *given(DynamicLossScale, "hysteresis loss_patience", 1.5),
        *given(ols.Spike, "window warmup max_consecutive_skipped", 1.5),
        *given(READERS[1:3], "max_consecutive_skipped", True, opt_state=STATE),
        *given(suggest_loss_scale, "headroom", 1.5),
        *given(optimizer, "dynamic_growth_steps gradient_accumulation_steps", 2.5),
        *given(optimizer, "ema_overwrite_frequency", 1.5, use_ema=True),
        *named("state.growth_count", lambda: diag.metrics(having(growth_count=1.5))),
    ],
    "ValueError: `{}` must be an integer from": [
        *given(DynamicLossScale, "growth_interval", 0, -1, 2**31, HUGE),
        *given(DynamicLossScale, "hysteresis loss_patience", 0),
        *given(ols.Spike, "window", 1),
        *given(ols.Spike, "warmup max_consecutive_skipped", 0),
        *given(READERS[1:3], "max_consecutive_skipped", -1, opt_state=STATE),
        *given(suggest_loss_scale, "headroom", -1),
        *given(optimizer, "dynamic_growth_steps", 0),
        *given(optimizer, "gradient_accumulation_steps", 1),
        *given(optimizer, "ema_overwrite_frequency", 0, use_ema=True),
        *((f"state.{n}", lambda n=n: diag.metrics(having(**{n: -1}))) for n in COUNTS),
    ],
    # -- policies
    "TypeError: `{}` must be a policy": [
        *given(check_health, "policy", 8.0, True, opt_state=STATE),
        *given(ols.update, "policy", jnp.float32(8), state=STATE, grads_finite=True),
        *given(ols.as_loss_scale, "loss_scale", True, 1j, [8], np.ones(2), FixedLossScale),
        *named("loss_scale", traced(ols.init)),
    ],
    "ValueError: `config` must describe a FixedLossScale, got class_name={}": [
        *named("'Dynamic'", lambda: configured({"class_name": "Dynamic"})),
        *named("'FixedLossScale' and", lambda: configured({"x": 1, "scale": 8, 1: 2})),
    ],
    "ValueError: `loss_scale` must be a policy": [
        *given(ols.as_loss_scale, "loss_scale", "Dynamic"),
        *given(ols.with_loss_scaling, "loss_scale", "x", inner=SGD),
        *given(train_state, "loss_scale", "x", tx=SGD),
    ],
    "ValueError: `{}` must name a class": given(
        ols.init, "loss_scale", {}, {"class_name": "Other"}, {"class_name": ["x"]}
    ),
    # -- flags and states
    "TypeError: `{}` must be a bool or a boolean array": [
        *given(ols.tree_where, "pred", None, "x", 1, jnp.float32(1), on_true=ONE, on_false=ONE),
        *given(updates, "grads_finite", 1, state=STATE),
        *given(updates, "loss_finite", 1, state=STATE, grads_finite=True),
        *named("skip_if", lambda: skip(returning(1))),
        *named("SimpleNamespace.judge", lambda: skip((rule_that(judge=returning((1, ()))),))),
    ],
    "TypeError: `{}` must be a number, an array or a tree": given(
        take, "value", "nan", decimal.Decimal("NaN"), np.array([NAN], object), [1.0, "x"]
    ),
    "ValueError: `policy` must be a policy": [
        lambda: ols.update(STATE, True, "static"),
        lambda: check_health(STATE, policy="static"),
    ],
    "TypeError: `policy` must be a policy": [
        lambda x=x: check_health(STATE, policy=x) for x in (8.0, [], SGD, DynamicLossScale, ONE)
    ],
    "TypeError: `{}` must be a scalar": [
        *named("value", lambda: skip(ols.Spike(), value={"a": 1.0})),
        *given(exponents, "loss_scale", STATE),
    ],
    "ValueError: `{}` must be a scalar": [
        *given(ols.tree_where, "pred", ONE > 0, TWO > 0, on_true=ONE, on_false=ONE),
        *given(exponents, "loss_scale", TWO),
        *((f"opt_state.{n}", lambda n=n: check_health(having(**{n: TWO}))) for n in STATE._fields),
        *named("state.loss_scale", lambda: scale_loss(STATES), lambda: take(STATES)),
        *named("value", lambda: skip(ols.Spike(), value=TWO)),
        *named("SimpleNamespace.measure", lambda: skip(rule_that(measure=returning(TWO)))),
    ],
    "TypeError: `state` must be a {}": [
        *named("LossScaleState", lambda: updates[0](tuple(STATE), True)),
        *named("GuardState", lambda: TX.update(PARAMS, STATE)),
        *named("GuardState", lambda: SKIPS.update(PARAMS, STATE)),
        *named("MasterWeightsState", lambda: MASTERS.update(PARAMS, STATE)),
        *named("StochasticRoundingState", lambda: ROUNDED.update(PARAMS, STATE)),
        *named("Bfloat16State", lambda: SMALL.update(PARAMS, STATE)),
        *named("StochasticRoundingState", lambda: ROUNDED.update(PARAMS, STATE)),
    ],
    "ValueError: `{}` must hold exactly one": [
        *named("state", lambda: scale_loss(None), lambda: unscale(tuple(STATE))),
        *named("state", lambda: take(state=())),
        *given((ols.loss_scale_state, *READERS), "opt_state", SGD, {"loss_scale": ONE}),
        *named("state", lambda: assert_scaled_once(apply, PARAMS)),
        *named("opt_state", lambda: keras.ema_params({}), lambda: ols.master_weights({}, PARAMS)),
    ],
    "ValueError: `opt_state` must hold exactly one LossScaleState, got 2 in a dict, found at: "
    "`['a'].loss_scale_state`, `['b'][0]`. ": given(
        READERS, "opt_state", {"a": OPT_STATE, "b": [STATE]}
    ),
    "ValueError: `state` must hold exactly one LossScaleState, got 0 in a ArrayImpl. ": [
        lambda: ols.grad(jnp.sum)(ONE, ONE)
    ],
    # -- axes, optimizers, rules
    "TypeError: `{}` must be the name of a mapped axis": [
        *given(unscale, "axis_name", 3, True, ["x"], ("x", 0), ONE, state=STATE),
        *given((ols.with_loss_scaling, ols.with_skipping), "axis_name", 3, inner=SGD),
    ],
    "ValueError: `{}` must be the name of a mapped axis": [
        *given(unscale, "axis_name", "x", ("x", "y"), state=STATE),
        *given(take, "axis_name", "x"),
    ],
    "TypeError: `{}` must be an optax.GradientTransformation": [
        *given(ols.with_loss_scaling, "inner", None, "x", OPT_STATE),
        *given(WRAPPERS, "inner", optax.sgd),
        *given(FOR_PARAMETERS, "inner", optax.sgd),
        *given(train_state, "tx", optax.sgd),
        *given(keras.loss_scale_optimizer, "inner_optimizer", optax, optax.MultiSteps(SGD, 2)),
    ],
    "TypeError: `{}` must be the result of": given(apply, "tx", SGD, optax.chain(TX), grads=PARAMS),
    "TypeError: `{}` must be a function": [
        *given(ols.with_skipping, "skip_if", *NO_RULES, (ols.Spike(), 3), inner=SGD),
        *given(ols.with_loss_scaling, "skip_if", 3, [(ols.Spike(),)], inner=SGD),
        *given(train_state, "skip_if", 3, tx=SGD),
        *given(ols.cast, "keep", "bias", 3, tree=PARAMS, dtype="float16"),
        *given(ols.with_bfloat16_state, "keep", "bias", inner=SGD),
        *given((ols.value_and_grad, ols.grad), "fun", None),
        *given(ols.autocast, "fun", PARAMS, dtype="float16"),
        *given((diag.precision_report, diag.first_nonfinite), "fun", PARAMS),
        *named("fun", lambda: diag.precision_report(np.asarray, ONE)),
        *named("fun", lambda: diag.precision_report(lambda x: ONE[x > 0], ONE)),
    ],
    "ValueError: `state.rule_states` must be a tuple with the state of each of {} rules": [
        *named("0", lambda: skip(None, (SPIKES,))),
        *named("1", *(lambda x=x: skip(ols.Spike(), x, value=1.0) for x in ((), {"0": SPIKES}))),
        *named("2", lambda: skip((ols.Spike(), returning(False)), (SPIKES,), value=1.0)),
    ],
    "ValueError: `state.rule_states` must hold a window of shape (2,)": [
        lambda: skip(ols.Spike(window=2), (SPIKES,), value=1.0)
    ],
    "TypeError: `state.rule_states` must be a {}": [
        *named("EmptyState", lambda: skip(returning(True), (SPIKES,))),
        *named("SpikeState", lambda: skip(ols.Spike(), (optax.EmptyState(),), value=1.0)),
    ],
    'TypeError: `{}` must be "value", "grad_norm" or': given(ols.Spike, "of", None, 3),
    "ValueError: `{}` must be greater than 1.5": given(
        ols.Spike, "sigmas", -1.0, 0, 1.5, 1.5 + 1e-9
    ),
    "ValueError: `{}` must be at most `window`": given(ols.Spike, "warmup", 5, window=4),
    "TypeError: `{}` must be given to `update`, because Spike": [
        *named("value", lambda: skip(ols.Spike())),
        *named("lag", lambda: skip(ols.Spike("lag"), value=1.0)),
    ],
    "ValueError: `{}` must not decide about steps itself": [
        *named("inner", *(lambda f=f: f(TX).init(PARAMS) for f in WRAPPERS)),
        *named("inner", lambda: ols.with_loss_scaling(SKIPS).init(PARAMS), lambda: started(SKIPS)),
        *named("tx", lambda: train_state(tx=optax.chain(SGD, TX))),
    ],
    # -- masters, small states, casts
    "ValueError: `{}` must be given": [
        *named("params", lambda: master_step(None)),
        *named("params", lambda: ROUNDED.update(PARAMS, ROUNDED.init(PARAMS))),
        *named("updates", lambda: ROUNDED.update(None, ROUNDED.init(PARAMS), PARAMS)),
        *named("params", lambda: optimizer(**EMA).update(PARAMS, started(SGD, **EMA))),
        *named("updates", lambda: master_step(PARAMS, None)),
        *named("initial_scale", lambda: optimizer(dynamic=False)),
    ],
    "TypeError: `opt_state` must hold float32 masters": [lambda: master_step(PARAMS)],
    "ValueError: `inner` must leave the updates of `with_master_weights` as they are": [
        lambda: ols.with_skipping(optax.chain(MASTERS, optax.scale(-1.0))).init({"w": HALF}),
        lambda: started(MASTERS, **DECAY),
        lambda: started(optax.chain(MASTERS), **EMA),
    ],
    "ValueError: `inner` must leave the updates of `with_stochastic_rounding` as they are": [
        lambda: ols.with_skipping(optax.chain(ROUNDED, optax.scale(-1.0))).init(PARAMS),
        lambda: started(ROUNDED, **DECAY),
        lambda: started(optax.chain(ROUNDED), **EMA),
    ],
    "ValueError: `inner` must not keep masters or round parameters itself, got a {}": [
        *named("MasterWeightsState", lambda: ols.with_stochastic_rounding(MASTERS).init(PARAMS)),
        *(("StochasticRoundingState", lambda f=f: f(ROUNDED).init(PARAMS)) for f in FOR_PARAMETERS),
    ],
    "ValueError: `params` must not be float16 for stochastic rounding, got one at {}": [
        *named("`['w']`", lambda: ROUNDED.init({"w": HALF})),
    ],
    "ValueError: `inner` must be a plain optimizer, got a {}": [
        *named("StochasticRoundingState", lambda: ols.with_bfloat16_state(ROUNDED).init(PARAMS)),
        *named("MasterWeightsState", lambda: ols.with_bfloat16_state(MASTERS).init(PARAMS)),
        *named("Bfloat16State", lambda: ols.with_bfloat16_state(SMALL).init(PARAMS)),
        *named("StochasticRoundingState", lambda: ols.with_bfloat16_state(ROUNDED).init(PARAMS)),
    ],
    "TypeError: `{}` must be a floating-point dtype": [
        *given(ols.cast, "dtype", "int8", None, "complex64", "bf16", PARAMS, tree=PARAMS),
        *given(ols.autocast, "dtype", None, "int8", "bf16", fun=jnp.sum),
        *given(exponents, "dtype", "int8", "complex64"),
        *given((suggest_loss_scale, plot), "dtype", "int8"),
    ],
    "TypeError: `{}` must be float16, bfloat16 or float32": [
        *given(ols.autocast, "dtype", "float64", float, fun=jnp.sum)
    ],
    "TypeError: `dtype` must be float16, bfloat16 or float32, got {}. fp8 needs a scale": [
        ("'float8_e4m3fn'", lambda: ols.autocast(jnp.sum, "float8_e4m3fn"))
    ],
    "TypeError: `{}` must be a floating-point dtype of at most": given(exponents, "dtype", "f8"),
    "TypeError: `tree` must not hold a stateful flax.nnx object, got {}": [
        *named("Average", lambda: ols.cast([nnx.metrics.Average()], "float16"))
    ],
    # -- losses
    "TypeError: `loss` must be floating-point, got {}": [
        *named("str at the root", lambda: train_state(tx=SGD).scale_loss("x")),
        *named("complex at the root", lambda: ols.scale_loss(1j, STATE)),
        *named("key<fry> at the root", lambda: ols.scale_loss(jax.random.key(0), STATE)),
        *named("int at `['a'][1]`", lambda: ols.scale_loss({"a": [1.0, 1]}, STATE)),
        *named("str at `[1]`", lambda: differentiate(returning([1.0, "x"]))),
    ],
    "TypeError: `fun` must return a {}": [
        *(
            ("pair", lambda x=x: differentiate(returning(x), has_aux=True))
            for x in (None, (1.0,), (1.0, 2.0, 3.0), {"a": 1.0, "b": 2.0})
        ),
    ],
    "TypeError: `transform` must take a function and has_aux, argnums": [
        lambda: differentiate(jnp.sum, transform=lambda fun: fun, argnums=1)
    ],
    "TypeError: `transform` must return ((loss, aux), grads)": [
        lambda x=x: differentiate(jnp.sum, transform=returning(returning(x)))
        for x in (3.0, (1.0, 2.0), (jnp.ones(2), 2.0), ((1.0, None),))
    ],
    # -- arguments that are kept for later
    "TypeError: `{}` must be a function, got ": [
        *given((ols.value_and_grad, ols.grad), "transform", None, 3, fun=jnp.sum),
        *given(assert_scaled_once, "grad_fn", None, ONE, state=STATE),
    ],
    "TypeError: `argnums` must be an integer or a tuple of them, got ": [
        lambda f=f, x=x: f(jnp.sum, argnums=x)
        for f in (ols.value_and_grad, ols.grad)
        for x in ("w", 1.5, None, (0, "w"))
    ],
    "TypeError: `has_aux` must be True or False, got ": [
        lambda x=x: ols.value_and_grad(jnp.sum, has_aux=x) for x in ("aux", None, 2)
    ],
    "TypeError: `ax` must be matplotlib axes, got ": [
        lambda: plot(ax=3),
        lambda: plot(ax="x"),
    ],
    "TypeError: `extra_args` must be a mapping": [
        lambda: apply(PARAMS, extra_args=[("kl", 1.0)]),
        lambda: apply(PARAMS, extra_args=1.0),
    ],
    "TypeError: `extra_args` must not have `{}`": [
        (name, lambda name=name: apply(PARAMS, extra_args={"kl": 1.0, name: PARAMS}))
        for name in ("value", "grads", "params")
    ],
    "TypeError: `name` must be a string": given(optimizer, "name", 3),
    "ValueError: `grad` must be the gradients themselves": [
        lambda x=x: TX.update(PARAMS, OPT_STATE, PARAMS, grad=x)
        for x in ({"w": ONE + 0}, ONE + 0, {"w": ONE, "v": ONE}, {}, 1.0)
    ],
    "ValueError: `{}` must be in true units": [
        (name, lambda name=name, x=x: TX.update(PARAMS, OPT_STATE, PARAMS, **{name: x}))
        for name, x in {"again": PARAMS, "partly": [0.0, ONE]}.items()
    ],
    # -- arguments in the place of others
    "TypeError: `state` must be a GuardState, got dict": [
        lambda: TX.update(PARAMS, PARAMS, OPT_STATE),
    ],
    "TypeError: `skip_if` must take the extra arguments of `update`": [
        lambda: skip(lambda _grads, _params: False, value=1.0),
    ],
    "ValueError: `state.rule_states` must be a tuple with the state of each of 0 rules": [
        lambda: TX.update(PARAMS, holding(rule_states=[]), PARAMS),
        lambda: TX.update(PARAMS, holding(rule_states=optax.EmptyState()), PARAMS),
    ],
    # -- trees
    "ValueError: `on_true` must keep its structure, got another at {}": [
        *named("`['a']`", lambda: choose({"a": None}, {"a": 1}), lambda: choose(1, {"a": 1})),
        *named("`['a']`", lambda: choose({"a": [1]}, {"a": (1,)})),
        *named("`['b']`", lambda: choose({"a": 1, "b": 1}, {"a": 1})),
        *named("`['b'][0]`", lambda: choose({"a": [1], "b": [1]}, {"a": [1], "b": []})),
        *named("`.loss_scale`", lambda: choose(STATE, tuple(STATE))),
        *named("the root of the tree", lambda: choose(None, 1)),
        *named("`[0]`", lambda: skip(rule_that(judge=returning((False, [1]))))),
    ],
    "ValueError: `{}` must keep its structure": [
        *named("inner", lambda: keep([1], [1, 1])),
        *named("grads", lambda: apply({"v": ONE})),
        *named("params", lambda: master_step({"v": HALF}), lambda: master_step({"w": None})),
    ],
    "ValueError: `{}` must keep its shapes": [
        *named("on_true", lambda: choose([ONE], [TWO]), lambda: choose(ONE, jnp.float32(1))),
        *named("inner", lambda: keep(ONE, TWO)),
        *named("grads", lambda: apply({"w": "x"})),
        *named("params", lambda: master_step({"w": HALF[None]})),
    ],
    "ValueError: the leaf at {} must be an array in both trees or the same in both": [
        *named("`['a']`", lambda: choose({"a": "x"}, {"a": "y"})),
        *named("`['a']`", lambda: keep({"a": "x"}, {"a": "y"})),
        *named("the root of the tree", lambda: choose("x", jnp.float32(1))),
        *named("the root of the tree", lambda: choose(np.array(["a", "b"]), np.array(["a", "c"]))),
        *named("the root of the tree", lambda: choose(1, 2), lambda: choose(jnp.float32(1), 1.0)),
    ],
    "TypeError: the leaf at {} must have one dtype in both trees": [
        *named("`['a']`", lambda: choose({"a": ONE}, {"a": HALF})),
        *named("the root of the tree", lambda: choose(np.zeros(1, jax.dtypes.float0), ONE)),
    ],
    "TypeError: `inner` must not replace integers in its state": [lambda: keep(jnp.arange(1), ONE)],
    # -- diagnostics and testing
    "ValueError: `opt_state` must hold {}": [
        *(
            ("a loss scale", lambda x=x: check_health(having(**x)))
            for x in (
                *({"loss_scale": jnp.float32(x)} for x in (NAN, INF, 0, -8, 2.0**127)),
                *({name: jnp.int32(-1)} for name in COUNTS),
            )
        ),
        *named("a loss scale", lambda: check_health(having(loss_scale=0.5), policy="dynamic")),
        *named("a loss scale", lambda: check_health(STATE, policy=FixedLossScale(16))),
        *(
            ("a Spike", lambda x=x: check_health(holding(rule_states=(SPIKES._replace(**x),))))
            for x in (MANY, {"held": jnp.int32(-1)}, {"consecutive_skipped": jnp.int32(-1)})
        ),
        *named("counts", lambda: check_health(holding(inner_state={"count": jnp.int32(-1)}))),
        *(
            ("arrays of finite", lambda x=x: check_health(holding(inner_state=x)))
            for x in ([ONE, NAN * ONE], {"m": INF * HALF})
        ),
    ],
    "TypeError: `{}` must hold values, got traced arrays": [
        *named("opt_state", traced(lambda n: health(growth_count=n))),
        *named("exponents", traced(lambda n: diag.suggest_loss_scale(EXPONENTS._replace(zero=n)))),
        *named("exponents", traced(diag.plot_gradient_exponents)),
        *named("args", traced(lambda n: diag.first_nonfinite(jnp.sin, n))),
        *named("grad_fn", traced(lambda n: assert_scaled_once(returning([ONE, n]), STATE))),
    ],
    "TypeError: `{}` must be a GradientExponents": given(EXPONENTS_READERS, "exponents", PARAMS),
    "TypeError: `{}` must be a dict": given(configured, "config", None, []),
    "ValueError: `grads` must have at most": [lambda: jax.eval_shape(exponents.func, SHAPE)],
    "ValueError: `{}` must hold one histogram": given(EXPONENTS_READERS, "exponents", STACKED),
    "ValueError: `exponents` must hold counts, got negative numbers": [
        lambda x=x: diag.suggest_loss_scale(EXPONENTS._replace(histogram=x))
        for x in (-EXPONENTS.histogram, np.full(277, NAN))
    ],
    "ValueError: `{}` must count at": given(diag.suggest_loss_scale, "exponents", NO_EXPONENTS),
    "ValueError: `grad_fn` must return gradients that are finite and not all zero": [
        lambda x=x: assert_scaled_once(returning(x), STATE) for x in (None, "x", 0.0, NAN, INF)
    ],
    # -- Keras' arguments
    "ValueError: only one of `clipnorm`": [lambda: optimizer(clipvalue=1, global_clipnorm=2)],
    "ValueError: `{}` must be None": [
        *given(optimizer, "initial_scale dynamic_growth_steps", 5, loss_scale_factor=2),
        *given(optimizer, "dynamic_growth_steps", 5, initial_scale=2, dynamic=False),
        *given(optimizer, "learning_rate", 0.1),
        *given(optimizer, "ema_overwrite_frequency", 3),
    ],
    "ValueError: `weight_decay` must have one learning rate to be multiplied by, got {}": [
        (f"{found} injected into `inner_optimizer`, found at: {where}", call)
        for found, where, call in (
            (0, "nowhere. ", lambda: started(SGD, weight_decay=1)),
            (2, "`[0].hyperparams['learning_rate']`, ", lambda: started(INJECTED, weight_decay=1)),
        )
    ],
}


@pytest.mark.parametrize("message", TABLE)
def test_bad_input_is_refused_by_name(message):
    for row in TABLE[message]:
        name, call = row if isinstance(row, tuple) else ("", row)
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert said.startswith(message.format(name)), said
        assert said.endswith("."), said


ACCEPTED = [
    *given(FixedLossScale, "scale", 2.0**-126, 2.0**126),
    *given(DynamicLossScale, "growth_interval", 1, INT32_MAX),
    *given(DynamicLossScale, "backoff_factor", 2.0**-126),
    *given(optimizer, "clipnorm", 2.0**-126, FLOAT32_MAX),
    *given(optimizer, "weight_decay", 0, FLOAT32_MAX, learning_rate=0),
    *given(optimizer, "learning_rate", FLOAT32_MAX, weight_decay=0),
    *given(optimizer, "ema_momentum", 0, 1),
    *given(optimizer, "ema_overwrite_frequency", 1, INT32_MAX, use_ema=True),
    *given(optimizer, "gradient_accumulation_steps", 2, INT32_MAX),
    *given(health, "loss_scale", 2.0**-126, 2.0**126),
    *given(health, " ".join(COUNTS), 0),
    *given(ols.Spike, "sigmas", 1.5 + 2.0**-22, FLOAT32_MAX),
    *(("held", lambda x=x: check_health(holding(rule_states=(x,)))) for x in (SPIKES, FULL)),
    *given(check_health, "max_consecutive_skipped", 0, opt_state=STATE),
    *given(suggest_loss_scale, "headroom", np.int64(0)),
    *given(exponents, "dtype", "float32"),
    ("texts", lambda: choose(np.array(["a"]), np.array(["a"]))),
    *given(lambda leaf: choose(leaf, leaf), "leaf", type("Opaque", (), {"__array__": None})()),
    *given(take, "value", None, 1, True, np.float16(1), {"a": jnp.int32(1)}),
]


def guarded_masters(inner):
    return ols.with_loss_scaling(ols.with_master_weights(inner))


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
def test_an_optimizers_error_names_the_parameter_that_is_no_array(wrapper):
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
def test_a_state_restored_into_plain_containers_is_told_to_go_onto_that_of_init(wrapper):
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


def test_a_policy_in_the_place_of_a_rule_is_told_its_own_place():
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
            ols.value_and_grad(lambda *_: 0.0, argnums=argnums)(STATE, *args)
    # JAX's own error, without advice about another argument.
    with pytest.raises(TypeError, match="requires at least 3 positional arguments"):
        ols.value_and_grad(lambda *_: 0.0, argnums=(0, 2))(STATE, ONE, layer)


def test_an_error_of_another_transform_is_its_own():
    with pytest.raises(TypeError, match="not iterable"):
        ols.value_and_grad(jnp.sum, transform=lambda *_, **__: lambda *_: max(3))(STATE, jnp.tanh)


@pytest.mark.parametrize(
    ("new", "kinds"), [([1.0], r" \(a list for a tuple\)"), ((1.0, 1.0, 1.0), "")]
)
def test_containers_of_another_kind_are_named(new, kinds):
    with pytest.raises(ValueError, match=rf"got another at [^()]+{kinds}\. `on_true`"):
        choose({"a": new}, {"a": (1.0, 2.0)} if not kinds else {"a": (1.0,)})


def test_a_function_without_a_signature_is_taken():
    assert callable(ols.value_and_grad(max))


def test_the_bounds_themselves_are_accepted():
    for _, call in ACCEPTED:
        call()
