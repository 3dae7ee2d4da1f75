"""Every error that bad input raises: its type, its message, and the calls that raise it.

A message names the argument, shows its value and ends with a remedy; `...` matches any text. The
table is complete: it reaches each `raise` of the package and each call of a check.
"""

import ast
import dataclasses
import fractions
import functools
import pathlib
import re
import traceback
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale as TheirDynamicScale

import optax_lossscale as ols
from optax_lossscale import DynamicLossScale, FixedLossScale, interop, keras
from optax_lossscale import diagnostics as diag
from optax_lossscale.flax import DynamicScale, TrainState
from optax_lossscale.testing import assert_scaled_once

PACKAGE = pathlib.Path(ols.__file__).parent

NAN, INF, HUGE = float("nan"), float("inf"), 10**400  # HUGE does not fit a float64
FLOAT32_MAX, INT32_MAX = float(np.finfo(np.float32).max), 2**31 - 1
ONE, TWO, HALF = jnp.ones(1), jnp.ones(2), jnp.ones(1, jnp.float16)
KEY, TRUE, FLOAT0 = jax.random.key(0), jnp.array(True), np.zeros(1, jax.dtypes.float0)
PARAMS, SGD = {"w": ONE}, optax.sgd(0.1)
INJECTED = optax.chain(*[optax.inject_hyperparams(optax.sgd)(0.1)] * 2)
TX = ols.with_loss_scaling(SGD)
STATE, OPT_STATE = ols.init(8.0), TX.init(PARAMS)
COUNTS = STATE._fields[1:]
EXPONENTS = diag.gradient_exponents(PARAMS)
SKIPS = ols.skip_if(SGD)
SKIPPED = SKIPS.init(PARAMS)
SPIKES = ols.Spike().init(PARAMS)
MASTERS = ols.with_master_weights(SGD)
STATES, STACKED = jax.tree.map(lambda x: jnp.stack([x, x]), (STATE, EXPONENTS))
TORCH = interop.to_torch_state_dict(DynamicLossScale(), STATE)
DECAY = {"weight_decay": 0.1, "learning_rate": 0.1}
SHAPE = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float16)

# Calls that lack only the tested argument.
having = STATE._replace
fixed_update, dynamic_update = FixedLossScale(8).update, DynamicLossScale().update
scale_loss = functools.partial(ols.scale_loss, 1.0)
unscale = functools.partial(ols.unscale_and_check, PARAMS)
check_health = diag.check_health
suggest_scale = functools.partial(diag.suggest_scale, EXPONENTS)
plot = functools.partial(diag.plot_gradient_exponents, EXPONENTS)
exponents = functools.partial(diag.gradient_exponents, PARAMS)
train_state = functools.partial(TrainState.create, apply_fn=None, params=PARAMS)
optimizer = functools.partial(keras.loss_scale_optimizer, SGD)
to_torch = functools.partial(interop.to_torch_state_dict, DynamicLossScale())
from_torch = interop.from_torch_state_dict


def from_flax(**values):
    return interop.from_flax_dynamic_scale(TheirDynamicScale(**values))


def from_jmp(**values):
    return interop.from_jmp(jmp.DynamicLossScale(**{"loss_scale": jnp.float16(8)} | values))


def health(**fields):
    return diag.check_health(having(**fields))


def skip_health(**fields):
    return diag.check_health(SKIPPED._replace(**fields))


def returning(value):
    return lambda *_, **__: value


def init_half(inner):
    return ols.skip_if(inner).init({"w": jnp.ones(2, jnp.float16)})


def differentiate(fun, state=STATE, **arguments):
    return ols.value_and_grad(fun, **arguments)(state, ONE)


def choose(on_true, on_false, pred=True):
    return ols.tree_where(pred, on_true, on_false)


def take(state=STATE, axis_name=None):
    tx = ols.with_loss_scaling(SGD, axis_name=axis_name)
    return tx.update(PARAMS, OPT_STATE._replace(loss_scale_state=state))


def keep(before, after):
    """Take a step with an optimizer whose state changes from `before` to `after`."""
    inner = optax.GradientTransformation(lambda _: before, lambda grads, *_: (grads, after))
    tx = ols.with_loss_scaling(inner)
    return tx.update(ONE, tx.init(ONE))


def rule_that(answers, *, measures=False, after=()):
    """Return a rule with these answers and this state after a step."""
    says = {"update": returning((answers, after))}
    if measures:
        says = {"measure": returning(0.0), "judge": returning((answers, after))}
    return SimpleNamespace(init=returning(()), **says)


NO_RULES = (
    *("x", 3, ols.Spike, {}, SimpleNamespace(init=len)),
    *(SimpleNamespace(init=len, **{name: len}) for name in ("measure", "judge")),
)


def spike_health(**fields):
    diag.check_health(OPT_STATE._replace(rule_state=SPIKES._replace(**fields)))


def skip_from(rule_state, rule):
    tx = ols.skip_if(SGD, rule)
    return tx.update(PARAMS, tx.init(PARAMS)._replace(rule_state=rule_state), value=1.0)


def skip(rule, **extra_args):
    tx = ols.skip_if(SGD, rule)
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS, **extra_args)


def master_step(params):
    half = {"w": HALF}
    return MASTERS.update(half, MASTERS.init(half), params)


def apply(grads, **fields):
    return train_state(tx=SGD).replace(**fields).apply_gradients(grads=grads)


def started(inner, **arguments):
    return keras.loss_scale_optimizer(inner, **arguments).init(PARAMS)


def without_params(**arguments):
    tx = optimizer(**arguments)
    return tx.update(PARAMS, tx.init(PARAMS))


def given(function, names, *values, **others):
    """Return a row for each of these arguments with each of these values, next to the others."""
    return [
        (functools.partial(function, **others, **{name: value}), name, repr(value))
        for name in names.split()
        for value in values
    ]


def each(functions, argument, name, got):
    """Return a row for each of these functions with this argument."""
    return [(functools.partial(function, argument), name, got) for function in functions]


def traced(call):
    return lambda: jax.jit(call)(8.0)


REPLICA, MAP = "(2,). Take one replica: ...", "(2,). Map over the replicas with ..."
NOWHERE = "0 in a dict, found at: nowhere"
READERS = diag.metrics, diag.check_health, diag.is_stalled, ols.applied
SKIP_COUNTS = "consecutive_skipped", "total_skipped"
RANGE = "2**-126 and 2**126"

# By type and message: the calls that raise it, and the `name` and the `got` in its message.
TABLE = {
    # -- numbers
    "TypeError: `{name}` must be a Python number, got {got}. Convert an array with `float`, ...": [
        *given(FixedLossScale, "scale", None, "x", True, 1j, [1], jnp.float32(4)),
        (traced(FixedLossScale), "scale", "...Trace..."),
        *given(DynamicLossScale, "initial_scale min_scale max_scale", "x"),
        *given(DynamicLossScale, "growth_factor backoff_factor", "x"),
        *given(ols.Spike, "sigmas", "x"),
        *given(optimizer, "initial_scale", "x"),
        *given(optimizer, "clipnorm", jnp.sin),
        *given(optimizer, "weight_decay", jnp.sin, learning_rate=0.1),
        *given(optimizer, "learning_rate", "x", weight_decay=0.1),
        *given(optimizer, "ema_momentum", "x"),
        *given(exponents, "loss_scale", True, "1024"),
        *each((scale_loss, *READERS[:2]), having(loss_scale="x"), "state.loss_scale", "'x'"),
        (lambda: fixed_update(having(loss_scale="x"), True), "state.loss_scale", "'x'"),
        (lambda: dynamic_update(having(loss_scale="x"), True), "state.loss_scale", "'x'"),
    ],
    "TypeError: `{name}` must be True or False, got {got}. Any text is True.": [
        *given(DynamicLossScale, "consecutive_hysteresis", "false"),
        *given(functools.partial(FixedLossScale, 8), "skip_nonfinite", "no", 1),
        *given(functools.partial(ols.with_master_weights, SGD), "remainders", "no"),
        *given(functools.partial(train_state, tx=SGD), "count_skipped", "no"),
        *given(optimizer, "dynamic use_ema", "False"),
    ],
    "ValueError: `{name}` must be finite in float32, got {got}. Use a finite number.": [
        *given(FixedLossScale, "scale", NAN, INF, -INF, HUGE, 2 * FLOAT32_MAX),
        *given(DynamicLossScale, "growth_factor", INF),
        *given(exponents, "loss_scale", NAN, INF),
    ],
    "ValueError: `{name}` must lie between 2**-126 and 2**126, ..., got {got}. Use a power ...": [
        *given(FixedLossScale, "scale", -1.0, 0, 2.0**-127, 2.0**127),
        *given(DynamicLossScale, "initial_scale min_scale max_scale", 0),
        *given(ols.as_loss_scale, "loss_scale", 0),
        *given(optimizer, "initial_scale", 0, 2.0**127),
        *given(optimizer, "initial_scale", 0, dynamic=False),
        *given(optimizer, "loss_scale_factor", -1),
        *given(exponents, "loss_scale", 0, -1.0),
        (lambda: exponents(loss_scale=jnp.float32(0)), "loss_scale", "0.0"),
        (lambda: scale_loss(having(loss_scale=-1)), "state.loss_scale", "-1"),
    ],
    "ValueError: `{name}` must lie between ... and ..., got {got}. Change it, or leave it out.": [
        *given(optimizer, "clipnorm clipvalue global_clipnorm", -1.0, 0, 2.0**-127),
        *given(optimizer, "weight_decay", -0.1, learning_rate=jnp.sin),
        *given(optimizer, "learning_rate", -0.1, weight_decay=0.1),
        *given(optimizer, "ema_momentum", -0.1, 1.1),
    ],
    "TypeError: `{name}` must be an integer, got {got}. Use `int` to convert it.": [
        *given(DynamicLossScale, "growth_interval", None, "x", True, 1.5, jnp.int32(4)),
        *given(DynamicLossScale, "hysteresis loss_patience", 1.5),
        (lambda: from_jmp(period=1.5), "growth_interval", "1.5"),
        *given(ols.Spike, "window warmup max_consecutive_skipped", 1.5),
        *given(diag.is_stalled, "max_consecutive_skipped", True, opt_state=STATE),
        *given(check_health, "max_consecutive_skipped", True, opt_state=STATE),
        *given(suggest_scale, "headroom", 1.5),
        *given(optimizer, "dynamic_growth_steps gradient_accumulation_steps", 2.5),
        *given(optimizer, "ema_overwrite_frequency", 1.5, use_ema=True),
        (lambda: diag.metrics(having(growth_count=1.5)), "state.growth_count", "1.5"),
        (lambda: diag.metrics(having(growth_count=None)), "state.growth_count", "None"),
    ],
    "ValueError: `{name}` must be at least ... and fit an int32, got {got}. Use an integer ...": [
        *given(DynamicLossScale, "growth_interval", 0, -1, 2**31, HUGE),
        *given(DynamicLossScale, "hysteresis loss_patience", 0),
        *given(ols.Spike, "window", 1),
        *given(ols.Spike, "warmup max_consecutive_skipped", 0),
        *given(diag.is_stalled, "max_consecutive_skipped", -1, opt_state=STATE),
        *given(check_health, "max_consecutive_skipped", -1, opt_state=STATE),
        *given(suggest_scale, "headroom", -1),
        *given(optimizer, "dynamic_growth_steps", 0),
        *given(optimizer, "gradient_accumulation_steps", 1),
        *given(optimizer, "ema_overwrite_frequency", 0, use_ema=True),
        *((lambda n=n: diag.metrics(having(**{n: -1})), f"state.{n}", "-1") for n in COUNTS),
    ],
    # -- policies
    "ValueError: `{name}` must be greater than 1 in float32, got {got}. Use 2, or ...": [
        *given(DynamicLossScale, "growth_factor", -2.0, 0.0, 1.0, 1 + 1e-9),
    ],
    "ValueError: `{name}` must lie between 0 and 1, both ..., got {got}. Use 0.5.": [
        *given(DynamicLossScale, "backoff_factor", -0.5, 0.0, 1.0, 1 - 1e-9, 2.0**-127),
    ],
    "ValueError: `initial_scale` must lie between `min_scale` and `max_scale`, got ... Move ...": [
        *given(DynamicLossScale, "min_scale", 2.0**16),
        *given(DynamicLossScale, "max_scale", 2.0**14),
    ],
    'TypeError: `{name}` must be a policy, "dynamic" or a dict from `get_config`, got {got}...': [
        *given(functools.partial(check_health, STATE), "policy", 8.0, 8, True, jnp.float32(8)),
    ],
    "TypeError: `{name}` must be a dict from `get_config`, got {got}. Use `as_loss_scale` ...": [
        *given(FixedLossScale.from_config, "config", None, "x", []),
    ],
    "ValueError: `config` must describe a FixedLossScale, got class_name={got}. Use `as_loss_...": [
        (lambda: FixedLossScale.from_config({"class_name": "Dynamic"}), "", "'Dynamic'"),
    ],
    "ValueError: `config` has unknown keys {got}; FixedLossScale has [...]. Remove them.": [
        (lambda: FixedLossScale.from_config({"x": 1, "scale": 8, 1: 2}), "", "[1, 'x']"),
    ],
    "ValueError: `{name}` must be a policy ..., or a dict from `get_config`; got {got}.": [
        *given(ols.as_loss_scale, "loss_scale", "x", "Dynamic"),
        *given(ols.update, "loss_scale", "x", state=STATE, grads_finite=True),
        *given(ols.with_loss_scaling, "loss_scale", "x", inner=SGD),
        *given(train_state, "loss_scale", "x", tx=SGD),
    ],
    "TypeError: `{name}` must be a policy ..., or a dict from `get_config`; got {got}.": [
        *given(ols.as_loss_scale, "loss_scale", True, 1j, [8], jnp.float32(8), FixedLossScale),
        (traced(ols.init), "loss_scale", "...Trace..."),
    ],
    "ValueError: `loss_scale` must name a class in [...], got class_name={got}. Call ...": [
        (lambda: ols.init({}), "", "None"),
        (lambda: ols.init({"class_name": "Other"}), "", "'Other'"),
        (lambda: ols.init({"class_name": ["FixedLossScale"]}), "", "['FixedLossScale']"),
    ],
    # -- flags and states
    "TypeError: `{name}` must be a bool or a boolean array, got {got}. Compute it with ...": [
        *given(choose, "pred", None, "x", 1, jnp.float32(1), on_true=ONE, on_false=ONE),
        *given(ols.update, "grads_finite", 1, state=STATE, loss_scale="dynamic"),
        *given(ols.update, "loss_finite", 1, state=STATE, loss_scale=8, grads_finite=True),
        *given(fixed_update, "grads_finite", 1, state=STATE),
        *given(fixed_update, "loss_finite", 1, state=STATE, grads_finite=True),
        *given(dynamic_update, "grads_finite", 1, state=STATE),
        *given(dynamic_update, "loss_finite", 1, state=STATE, grads_finite=True),
        (lambda: skip(returning(1)), "rule", "1"),
        (lambda: skip(rule_that(1)), "rule", "1"),
        (lambda: skip((rule_that(1, measures=True),)), "rule", "1"),
    ],
    "ValueError: `{name}` must be a scalar, got shape {got}": [
        (lambda: choose(ONE, ONE, ONE > 0), "pred", "(1,). Reduce it with `jnp.all`, or map ..."),
        (lambda: choose(ONE, ONE, TWO > 0), "pred", "(2,). Reduce it with `jnp.all`, or map ..."),
        *each((scale_loss, unscale, take), STATES, "state.loss_scale", MAP),
        (lambda: differentiate(jnp.sum, STATES), "state.loss_scale", MAP),
        *((lambda n=n: health(**{n: TWO}), f"opt_state.{n}", REPLICA) for n in STATE._fields),
        *((lambda n=n: skip_health(**{n: TWO}), f"opt_state.{n}", REPLICA) for n in SKIP_COUNTS),
        (lambda: exponents(loss_scale=TWO), "loss_scale", "(2,). Look at one replica at a time."),
        (lambda: from_flax(scale=TWO), "ds.scale", REPLICA),
        (lambda: from_flax(minimum_scale=TWO), "ds.minimum_scale", REPLICA),
        (lambda: to_torch(STATES), "state.loss_scale", REPLICA),
        (lambda: skip(ols.Spike(), value=TWO), "value", "(2,). Take its mean."),
    ],
    "TypeError: `state` must be a {name}, got {got}": [
        (lambda: fixed_update(tuple(STATE), True), "LossScaleState", "tuple. Find it in ..."),
        (lambda: dynamic_update(tuple(STATE), True), "LossScaleState", "tuple. Find it in ..."),
        (lambda: TX.update(PARAMS, STATE), "WithLossScalingState", "LossScaleState. Make it ..."),
        (lambda: TX.update(PARAMS, SKIPPED), "WithLossScalingState", "SkipIfState. Make it ..."),
        (lambda: SKIPS.update(PARAMS, STATE), "SkipIfState", "LossScaleState. Make it ..."),
        (lambda: SKIPS.update(PARAMS, OPT_STATE), "SkipIfState", "WithLossScalingState. Make ..."),
        (lambda: MASTERS.update(PARAMS, STATE), "MasterWeightsState", "LossScaleState. Make ..."),
    ],
    "ValueError: `{name}` must hold exactly one LossScaleState, got {got}. Wrap the whole ...": [
        (lambda: scale_loss(None), "state", "0 in a NoneType, found at: nowhere"),
        (lambda: unscale(tuple(STATE)), "state", "0 in a tuple, found at: nowhere"),
        (lambda: differentiate(jnp.sum, PARAMS), "state", NOWHERE),
        (lambda: ols.loss_scale_state(SGD), "opt_state", "0 in a Gradient..., found at: nowhere"),
        (lambda: assert_scaled_once(apply, PARAMS), "opt_state", NOWHERE),
        *each([to_torch], PARAMS, "opt_state", NOWHERE),
        (
            lambda: ols.loss_scale_state({"a": OPT_STATE, "b": [STATE]}),
            "opt_state",
            "2 in a dict, found at: `['a'].loss_scale_state`, `['b'][0]`",
        ),
    ],
    "ValueError: `{name}` must hold exactly one EmaParamsState, got {got}. Build ...": [
        (lambda: keras.ema_params(PARAMS), "opt_state", NOWHERE),
    ],
    "ValueError: `{name}` must hold exactly one MasterWeightsState, got {got}. Wrap the ...": [
        (lambda: ols.master_weights({}, PARAMS), "opt_state", NOWHERE),
    ],
    "ValueError: `{name}` must hold exactly one ...LossScaleState..., got {got}. Wrap ..., or...": [
        *each(READERS, PARAMS, "opt_state", NOWHERE),
        *each(
            READERS, {"a": SKIPPED, "b": OPT_STATE}, "opt_state", "2 in ...: `['a']`, `['b']...`"
        ),
    ],
    # -- axes, optimizers, losses
    "TypeError: `{name}` must be the name of a mapped axis, ..., got {got}. Give the one ...": [
        *given(unscale, "axis_name", 3, True, ["x"], ("x", 0), ONE, state=STATE),
        *given(ols.with_loss_scaling, "axis_name", 3, inner=SGD),
        *given(ols.skip_if, "axis_name", 3, inner=SGD),
        *given(DynamicScale().value_and_grad, "axis_name", 3, fun=jnp.sum),
    ],
    "ValueError: `{name}` must be the name of a mapped axis, ..., got {got}. Call the ...": [
        *given(unscale, "axis_name", "x", ("x", "y"), state=STATE),
        *given(take, "axis_name", "x"),
    ],
    "TypeError: `{name}` must be an optax.Gr... or an optax.Mu..., got {got}. Call ...": [
        *given(ols.with_loss_scaling, "inner", None, "x", optax.sgd, OPT_STATE),
        *given(ols.skip_if, "inner", optax.sgd),
        *given(ols.with_master_weights, "inner", optax.sgd),
        *given(train_state, "tx", optax.sgd),
        (lambda: keras.loss_scale_optimizer(optax), "inner_optimizer", "<module ..."),
        (lambda: keras.loss_scale_optimizer(optax, **DECAY), "inner_optimizer", "<module ..."),
    ],
    "TypeError: `{name}` must be an optax..., got an optax.MultiSteps, ... Use `gradient_acc...": [
        *given(keras.loss_scale_optimizer, "inner_optimizer", optax.MultiSteps(SGD, 2)),
    ],
    "TypeError: `{name}` must be what `with_loss_scaling` returns, got {got}. Make the ...": [
        *given(apply, "tx", SGD, optax.chain(TX), grads=PARAMS),
    ],
    # -- rules, masters and casts
    "TypeError: `{name}` must be a function of ..., an object ..., got {got}. Use ...": [
        *given(ols.skip_if, "rule", *NO_RULES, inner=SGD),
        *given(ols.with_loss_scaling, "skip_if", *NO_RULES, inner=SGD),
        *given(train_state, "skip_if", *NO_RULES, tx=SGD),
        (lambda: ols.skip_if(SGD, (ols.Spike(), 3)), "rule", "3"),
        (lambda: ols.with_loss_scaling(SGD, skip_if=[(ols.Spike(),)]), "skip_if", "(Spike(...),)"),
    ],
    "ValueError: `state.rule_state` must be that of `{name}`, got {got}. Make it ...": [
        (lambda: skip_from(SPIKES, None), "rule", "SpikeState(...)"),
        (lambda: skip_from((), (ols.Spike(),)), "rule", "()"),
        (lambda: skip_from(SPIKES, (ols.Spike(),)), "rule", "SpikeState(...)"),
    ],
    "TypeError: `state.rule_state` must be a {name}, got {got}. Make it ...": [
        (lambda: skip_from(SPIKES, returning(True)), "EmptyState", "SpikeState"),
        (lambda: skip_from(optax.EmptyState(), ols.Spike()), "SpikeState", "EmptyState"),
    ],
    'TypeError: `{name}` must be "value", "grad_norm" or ..., got {got}. Leave it out ...': [
        *given(ols.Spike, "of", None, 3),
    ],
    "ValueError: `sigmas` must exceed 1.5, got {got}: ... Use 6.": [
        *given(ols.Spike, "sigmas", -1.0, 0, 1.5, 1.5 + 1e-9),
    ],
    "ValueError: `warmup` must be at most `window`, got {got}. More values are never held.": [
        (lambda: ols.Spike(window=4, warmup=5), "", "5 and 4"),
    ],
    "TypeError: `{name}` must be given to `update`, because {got} measures it. Call ...": [
        (lambda: skip(ols.Spike()), "value", "Spike(of='value', ...)"),
        (lambda: skip(ols.Spike("lag"), value=1.0), "lag", "Spike(of='lag', ...)"),
    ],
    "ValueError: `params` must be given to `update`, got None: ... Call ...": [
        (lambda: MASTERS.update(PARAMS, MASTERS.init(PARAMS)), "", ""),
    ],
    "TypeError: `opt_state` must hold float32 masters ..., got {got} at `['w']`. Give the ...": [
        (lambda: master_step({"w": ONE}), "", "float32 for a float32 parameter"),
    ],
    "TypeError: `{name}` must be a floating-point dtype, got {got}. Use ...": [
        (lambda: ols.cast(PARAMS, "int8"), "dtype", "int8"),
        (lambda: ols.cast(PARAMS, None), "dtype", "None"),
        (lambda: ols.cast(PARAMS, "complex64"), "dtype", "complex64"),
        (lambda: ols.value_and_grad(jnp.sum, compute_dtype="int8"), "compute_dtype", "int8"),
    ],
    "ValueError: `keep` must be given together with `compute_dtype`, got `keep` alone. Say ...": [
        (lambda: ols.value_and_grad(jnp.sum, keep=bool), "", ""),
    ],
    "TypeError: `tree` must not hold a stateful flax.nnx object, got {got}: ... Give ...": [
        (lambda: ols.cast([nnx.BatchNorm(1, rngs=nnx.Rngs(0))], "float16"), "", "BatchNorm"),
        (lambda: ols.cast([nnx.metrics.Average()], "float16"), "", "Average"),
    ],
    "ValueError: `inner` must leave the updates of ..., got a ... at {got} of ... Keep ...": [
        (lambda: init_half(optax.chain(MASTERS, optax.scale(-1.0))), "", "`[0]`"),
        (
            lambda: init_half(optax.named_chain(("z", MASTERS), ("a", optax.scale(-1.0)))),
            "",
            "`['z']`",
        ),
        (
            lambda: init_half(optax.contrib.schedule_free(MASTERS, 0.1)),
            "",
            "`.base_optimizer_state`",
        ),
    ],
    "ValueError: `{name}` must not decide about steps itself, got a ... at {got} of ... Use ...": [
        (lambda: ols.with_loss_scaling(TX).init(PARAMS), "inner", "`.loss_scale_state`"),
        (lambda: ols.skip_if(TX).init(PARAMS), "inner", "`.loss_scale_state`"),
        (lambda: ols.with_loss_scaling(SKIPS).init(PARAMS), "inner", "the root of the tree"),
        (lambda: train_state(tx=optax.chain(SGD, TX)), "tx", "`[1].loss_scale_state`"),
        (lambda: started(SKIPS), "inner", "the root of the tree"),
    ],
    "ValueError: `{name}` must be left out if `inner_optimizer` keeps ..., got {got}. Decay ...": [
        (lambda: started(MASTERS, **DECAY), "weight_decay", "..."),
        (lambda: started(optax.chain(MASTERS), use_ema=True), "use_ema", "..."),
    ],
    "TypeError: `loss` must be floating-point, got {name} at {got}. Cast it with `astype(...": [
        (lambda: ols.scale_loss("x", STATE), "str", "the root of the tree"),
        (lambda: ols.scale_loss(1j, STATE), "complex", "the root of the tree"),
        (lambda: ols.scale_loss(KEY, STATE), "key<fry>", "the root of the tree"),
        (lambda: ols.scale_loss(jnp.int32(1), STATE), "int32", "the root of the tree"),
        (lambda: ols.scale_loss({"a": [1.0, 1]}, STATE), "int", "`['a'][1]`"),
        (lambda: train_state(tx=SGD).scale_loss("x"), "str", "the root of the tree"),
        (lambda: differentiate(returning([1.0, "x"])), "str", "`[1]`"),
    ],
    "TypeError: `{name}` must return a pair, ..., got {got}. Return both, or leave ...": [
        (lambda value=value: differentiate(returning(value), has_aux=True), "fun", repr(value))
        for value in (None, 1.0, (1.0,), (1.0, 2.0, 3.0), {"a": 1.0, "b": 2.0})
    ],
    "TypeError: `transform` must return ((loss, aux), grads) ..., got {got} of <... Pass ...": [
        (lambda x=x: differentiate(jnp.sum, transform=returning(returning(x))), "", repr(x))
        for x in (
            *(3.0, (1.0, 2.0), [(1.0, None), 2.0], ((1.0, None, None), 2.0)),
            *(([1.0, None], 2.0), ((1.0, None), 2.0, None), ((1.0, None),)),
        )
    ],
    # -- trees
    "ValueError: `{name}` must keep its structure, got another at {got}. ...": [
        (lambda: choose({"a": None}, {"a": 1}), "on_true", "`['a']`"),
        (lambda: choose({"a": [1]}, {"a": (1,)}), "on_true", "`['a']`"),
        (lambda: choose({"a": 1, "b": 1}, {"a": 1}), "on_true", "`['b']`"),
        (lambda: choose({"a": [1, 1]}, {"a": [1]}), "on_true", "`['a'][1]`"),
        (lambda: choose({"a": [1], "b": [1]}, {"a": [1], "b": []}), "on_true", "`['b'][0]`"),
        (lambda: choose({"a": 1}, {"a": {"b": 1}}), "on_true", "`['a']['b']`"),
        (lambda: choose(STATE, tuple(STATE)), "on_true", "`.loss_scale`"),
        (lambda: choose(None, 1), "on_true", "the root of the tree"),
        (lambda: keep([1], [1, 1]), "inner", "`[1]`"),
        (lambda: apply({"v": ONE}), "grads", "`['v']`"),
        (lambda: skip(rule_that(TRUE, after=[1])), "rule", "`[0][0]`"),
        (lambda: master_step({"v": HALF}), "params", "`['v']`"),
        (lambda: master_step({"w": None}), "params", "`['w']`"),
    ],
    "ValueError: `{name}` must keep its shapes, got {got}. ...": [
        (lambda: choose([ONE], [TWO]), "on_true", "(1,) for (2,) at `[0]`"),
        (lambda: choose(ONE, jnp.float32(1)), "on_true", "(1,) for () at the root of the tree"),
        (lambda: keep(ONE, TWO), "inner", "(2,) for (1,) at the root of the tree"),
        (lambda: apply({"w": "x"}), "grads", "() for (1,) at `['w']`"),
        (lambda: master_step({"w": HALF[None]}), "params", "(1, 1) for (1,) at `['w']`"),
        (lambda: ols.Spike(window=2).update(SPIKES, 1, value=1.0), "state", "(128,) for (2,) ..."),
    ],
    "ValueError: the leaf at {name} must be an array in both ..., got {got}. Make it ...": [
        (lambda: choose({"a": "x"}, {"a": "y"}), "`['a']`", "'x' and 'y'"),
        (lambda: choose(1, 2), "the root of the tree", "1 and 2"),
        (lambda: choose(1.0, jnp.float32(1)), "the root of the tree", "1.0 and Array(1., ...)"),
        (lambda: choose(jnp.float32(1), 1.0), "the root of the tree", "Array(1., ...) and 1.0"),
    ],
    "TypeError: the leaf at {name} must have one dtype in both trees, got {got}. Cast one ...": [
        (lambda: choose({"a": ONE}, {"a": HALF}), "`['a']`", "float32 and float16"),
        (lambda: choose(FLOAT0, ONE), "the root of the tree", "...float0... and float32"),
        (lambda: choose(KEY, jax.random.PRNGKey(0)), "the root of the tree", "key<fry> and uint32"),
    ],
    "TypeError: `{name}` must keep the kind of numbers in its state, got {got}. Initialize ...": [
        (lambda: keep(jnp.arange(1), ONE), "inner", "float32 for int32 at the root of the tree"),
    ],
    # -- diagnostics and testing
    "ValueError: `opt_state` must hold a loss scale between {name} and ..., got {got}. Res...": [
        *(
            (lambda x=x: health(loss_scale=jnp.float32(x)), RANGE, f"{x:g} and {{'growth_count...")
            for x in (NAN, INF, 0, -8, 2.0**127)
        ),
        (
            lambda: check_health(having(loss_scale=0.5), policy="dynamic"),
            "1 and 1.67772e+07",
            "0.5 and ...",
        ),
        *(
            (lambda n=n: health(**{n: jnp.int32(-1)}), RANGE, f"8 and ...'{n}': -1...")
            for n in COUNTS
        ),
    ],
    "ValueError: `opt_state` must hold a loss scale of {name}, that of ..., got {got}. Rest...": [
        (lambda: check_health(STATE, policy=FixedLossScale(16)), "16", "8 and ..."),
    ],
    "ValueError: `opt_state` must hold counts of at least 0, got {got} of the inner state. ...": [
        (lambda: skip_health(inner_state={"count": -1}), "", "-1 at `['count']`"),
    ],
    "ValueError: `opt_state` must hold a Spike with at most the 128 ..., got {got}. Restore ...": [
        (lambda: spike_health(held=jnp.int32(129)), "", "{'held': 129, ...} at the root ..."),
        (lambda: spike_health(held=jnp.int32(-1)), "", "{'held': -1, ...} at the root of the tree"),
        (lambda: spike_health(consecutive_skipped=jnp.int32(-1)), "", "...': -1} at the root ..."),
    ],
    "ValueError: `opt_state` must hold arrays of finite ..., got NaN or infinity at {got} ...": [
        (lambda: skip_health(inner_state=[ONE, NAN * ONE]), "", "`[1]`"),
        (lambda: skip_health(inner_state={"m": INF * HALF}), "", "`['m']`"),
    ],
    "TypeError: `{name}` must hold values, got traced arrays. {got}": [
        (traced(lambda n: health(growth_count=n)), "opt_state", "Call `check_health` ..."),
        (traced(lambda n: skip_health(total_skipped=n)), "opt_state", "Call `check_health` ..."),
        (traced(lambda n: diag.suggest_scale(EXPONENTS._replace(zero=n))), "exponents", "Ret..."),
        (traced(diag.plot_gradient_exponents), "exponents", "Return them ..."),
        (traced(lambda n: diag.format_nonfinite_report({"": (n, 0)})), "report", "Return it ..."),
        (traced(lambda n: diag.first_nonfinite(jnp.sin, n)), "args", "Call `first_nonfinite` ..."),
        (traced(lambda n: assert_scaled_once(returning([ONE, n]), STATE)), "grad_fn", "Call ..."),
    ],
    "TypeError: `fun` must be a function, got {got}. Give its arguments after it.": [
        *each((diag.precision_report, diag.first_nonfinite), {"w": 1}, "", "{'w': 1}"),
    ],
    "TypeError: `exponents` must be a GradientExponents, got {got}. Count them with ...": [
        *each((diag.suggest_scale, diag.plot_gradient_exponents), PARAMS, "", "dict"),
    ],
    "TypeError: `report` must be a dict of {name}, got {got}. Make it with `nonfinite_report`.": [
        *each([diag.format_nonfinite_report], PARAMS, "NonfiniteCounts", "ArrayImpl"),
        *each(
            [diag.format_nonfinite_report],
            diag.NonfiniteCounts(0, 0, 1),
            "NonfiniteCounts",
            "NonfiniteCounts",
        ),
    ],
    "TypeError: `report` must be a dict of {name}, got {got}. Make it with `precision_report`.": [
        *each([diag.format_precision_report], jnp.sum, "MatrixProducts", "function"),
    ],
    "TypeError: `fun` must be a function that JAX can trace, got {got}, which reads ...": [
        (lambda: diag.precision_report(np.asarray, ONE), "", "<built-in function asarray>"),
        (lambda: diag.precision_report(lambda x: ONE[x > 0], ONE), "", "..."),
    ],
    "TypeError: `{name}` must be a floating-point dtype of at most 32 bits, got ... Use ...": [
        *given(exponents, "dtype", "int8", "complex64", "float64"),
        *given(suggest_scale, "dtype", "int8"),
        *given(plot, "dtype", "int8"),
    ],
    "ValueError: `grads` must have at most 2**31 - 1 elements, got 2147483648. Look at one ...": [
        (lambda: jax.eval_shape(diag.gradient_exponents, SHAPE), "", ""),
    ],
    "ValueError: `exponents` must hold one histogram, got shape (2, 277). Sum over ...": [
        (lambda: diag.suggest_scale(STACKED), "", ""),
        (lambda: diag.plot_gradient_exponents(STACKED), "", ""),
    ],
    "ValueError: `exponents` must hold counts, got negative ones: ... Add on the host, ...": [
        (lambda: diag.suggest_scale(EXPONENTS._replace(histogram=-EXPONENTS.histogram)), "", ""),
        (lambda: diag.suggest_scale(EXPONENTS._replace(histogram=np.full(277, NAN))), "", ""),
    ],
    "ValueError: `exponents` must count at least one ..., got an empty histogram. Count ...": [
        (lambda: diag.suggest_scale(diag.gradient_exponents([0.0, NAN, INF])), "", ""),
    ],
    "ValueError: `grad_fn` must return gradients that are finite and not all zero, ... Choo...": [
        (lambda x=x: assert_scaled_once(returning(x), STATE), "", "")
        for x in (None, "x", 0.0, NAN, INF)
    ],
    # -- states of other libraries
    "TypeError: `{name}` lacks {got}": [
        (lambda: interop.from_flax_dynamic_scale(None), "ds", "scale, fin_steps, ... It must ..."),
        (lambda: interop.from_jmp(jmp.NoOpLossScale()), "ls", "counter, ...; for a jmp.Static..."),
        (lambda: from_torch(3), "d", "scale, ... It must be the result of torch's ..."),
        (lambda: from_torch({"scale": 2.0}), "d", "_growth_tracker, ... It must be ..."),
    ],
    "TypeError: `{name}` must hold concrete numbers, got {got}. Convert it outside of ...": [
        (lambda: from_flax(scale=None), "ds", "scale=None"),
        (lambda: from_flax(minimum_scale="x"), "ds", "minimum_scale='x'"),
        (lambda: from_jmp(period=1j), "ls", "period=1j"),
        (lambda: from_torch(TORCH | {"scale": "x"}), "d", "scale='x'"),
        (lambda: to_torch(having(growth_count="x")), "state", "growth_count='x'"),
        (traced(lambda x: from_flax(scale=x)), "ds", "scale=...Trace..."),
        (traced(lambda x: to_torch(having(loss_scale=x))), "state", "loss_scale=...Trace..."),
    ],
    "ValueError: `{name}` must hold a loss scale between ..., got {got}. Start again ...": [
        *(
            (lambda x=x: from_torch(TORCH | {"scale": x}), "d", f"{x} and 0")
            for x in (NAN, INF, 0.0, -8.0, 2.0**-127, 2.0**127)
        ),
        (lambda: from_torch(TORCH | {"_growth_tracker": -1}), "d", "8.0 and -1"),
        (lambda: from_torch(TORCH | {"_growth_tracker": NAN}), "d", "8.0 and nan"),
        (lambda: to_torch(having(growth_count=1.5)), "state", "8.0 and 1.5"),
        (lambda: from_flax(scale=0.0), "ds", "0.0 and 0"),
        (lambda: from_jmp(counter=-1), "ls", "8.0 and -1"),
        (lambda: to_torch(having(loss_scale=0)), "state", "0.0 and 0"),
    ],
    "ValueError: `{name}` cannot be represented. `{got}` must ...": [
        (lambda: from_torch(TORCH | {"growth_factor": 1.0}), "d", "growth_factor"),
        (lambda: from_torch(TORCH | {"backoff_factor": 1.0}), "d", "backoff_factor"),
        (lambda: from_torch(TORCH | {"growth_interval": 0}), "d", "growth_interval"),
        (lambda: from_flax(minimum_scale=NAN), "ds", "min_scale"),
        (lambda: from_jmp(factor=0), "ls", "growth_factor"),
        (lambda: from_jmp(factor=1), "ls", "growth_factor"),
    ],
    "TypeError: `policy` must be a DynamicLossScale, got FixedLossScale... Pass the policy ...": [
        (lambda: interop.to_torch_state_dict(FixedLossScale(8), STATE), "", ""),
    ],
    "ValueError: `policy` must have hysteresis=1, got 2: ... Pass `dataclasses.replace(...": [
        (lambda: interop.to_torch_state_dict(DynamicLossScale(hysteresis=2), STATE), "", ""),
    ],
    # -- Keras' arguments
    "TypeError: `initial_scale` must be a Python number, got {got}. The second argument ...": [
        (lambda: optimizer(False, 1024), "", "False"),
    ],
    "ValueError: `initial_scale` must be given if `dynamic` is False, got None. It is ...": [
        *given(optimizer, "dynamic", False),
    ],
    "ValueError: only one of ... may be given, got {got}. Leave the others out, or ...": [
        (lambda clips=clips: optimizer(**clips), "", repr(clips))
        for clips in ({"clipnorm": 1, "clipvalue": 2}, {"clipvalue": 1, "global_clipnorm": 2})
    ],
    "ValueError: `{name}` must be None ..., got {got}. ...": [
        *given(optimizer, "initial_scale", 5, loss_scale_factor=2),
        *given(optimizer, "dynamic_growth_steps", 5, loss_scale_factor=2),
        *given(optimizer, "dynamic_growth_steps", 5, initial_scale=2, dynamic=False),
        *given(optimizer, "learning_rate", 0.1),
        *given(optimizer, "ema_overwrite_frequency", 3),
    ],
    "ValueError: `weight_decay` must have one learning rate ..., got no ... and {got}. Give ...": [
        (lambda: started(SGD, weight_decay=1), "", "0 ..., found at: nowhere"),
        (lambda: started(INJECTED, weight_decay=1), "", "2 ...: `[0].hyp...`, `[1].hyp...rate']`"),
    ],
    "ValueError: `params` must be given to `update` because of `{name}`, got None. Call ...": [
        (lambda: without_params(**DECAY), "weight_decay", ""),
        (lambda: without_params(use_ema=True), "use_ema", ""),
    ],
}
ROWS = [
    (call, message.format(name=name, got=got))
    for message, rows in TABLE.items()
    for call, name, got in rows
]


def error_of(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("call", "message"), ROWS, ids=[f"{i}-{message:.50}" for i, (_, message) in enumerate(ROWS)]
)
def test_bad_input_is_refused_by_name_with_the_value_and_a_remedy(call, message):
    error = error_of(call)
    said = f"{type(error).__name__}: {error}"
    assert re.fullmatch(".*".join(map(re.escape, message.split("..."))), said, re.DOTALL), said


def errors_and_checks():
    """Yield the places where the package raises an error for bad input or calls a check."""
    relevant = re.compile(r"raise (Type|Value)Error\(|checks\.(?!as_float32)\w+\(")
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise | ast.Call) and relevant.match(ast.unparse(node)):
                yield str(path), range(node.lineno, node.end_lineno + 1)


def test_every_error_and_every_check_of_the_package_is_reached_from_the_table():
    reached = {
        (frame.filename, frame.lineno)
        for call, _ in ROWS
        for frame in traceback.extract_tb(error_of(call).__traceback__)
    }
    missing = [
        f"{path}:{lines[0]}"
        for path, lines in errors_and_checks()
        if reached.isdisjoint((path, line) for line in lines)
    ]
    assert not missing


ACCEPTED = [
    *given(FixedLossScale, "scale", 2.0**-126, 2.0**126),
    *given(DynamicLossScale, "growth_interval", 1, INT32_MAX),
    *given(DynamicLossScale, "min_scale max_scale", 2.0**15),
    *given(DynamicLossScale, "backoff_factor", 2.0**-126),
    *given(optimizer, "initial_scale", 2.0**-126, 2.0**126),
    *given(optimizer, "clipnorm", 2.0**-126, FLOAT32_MAX),
    *given(optimizer, "weight_decay", 0, FLOAT32_MAX, learning_rate=0),
    *given(optimizer, "learning_rate", 0, FLOAT32_MAX, weight_decay=0),
    *given(optimizer, "ema_momentum", 0, 1),
    *given(optimizer, "ema_overwrite_frequency", 1, INT32_MAX, use_ema=True),
    *given(optimizer, "gradient_accumulation_steps", 2, INT32_MAX),
    *given(from_torch, "d", *(TORCH | {"scale": x} for x in (2.0**-126, 2.0**126))),
    *given(health, "loss_scale", 2.0**-126, 2.0**126),
    *given(health, " ".join(COUNTS), 0),
    *given(ols.Spike, "sigmas", 1.5 + 2.0**-22, FLOAT32_MAX),
    *given(spike_health, "held", jnp.int32(0), jnp.int32(128)),
    *given(check_health, "max_consecutive_skipped", 0, opt_state=STATE),
    *given(suggest_scale, "headroom", np.int64(0)),
    *given(exponents, "dtype", "float32"),
]


@pytest.mark.parametrize(
    "call", [call for call, *_ in ACCEPTED], ids=[f"{name}={got}" for _, name, got in ACCEPTED]
)
def test_the_bounds_themselves_are_accepted(call):
    call()


def test_numbers_of_numpy_become_numbers_of_python():
    half, eight = fractions.Fraction(1, 2), np.float16(8)
    kept = dataclasses.astuple(
        DynamicLossScale(eight, np.int32(7), np.float32(4), np.float64(0.25), half, np.int64(9))
    )
    assert kept == (8, 7, 4, 0.25, 0.5, 9, 1, False, 2)
    assert list(map(type, kept)) == [float, int, float, float, float, float, int, bool, int]
    assert type(DynamicLossScale(consecutive_hysteresis=np.True_).consecutive_hysteresis) is bool
    kept = dataclasses.astuple(FixedLossScale(np.int32(8), np.False_))
    assert list(map(type, kept)) == [float, bool]
