"""Bad input of every kind, for every parameter of every public function.

What comes out is a TypeError or a ValueError of our own that names the argument, what it was and
what to do; never an AttributeError, an error from the depths of JAX, or silence. The rows of
`TABLE` say what is refused. `EXCEPT` says which parameters nothing is refused for, and why. A test
compares the two with the signatures, so that no parameter can be forgotten.
"""

import dataclasses
import fractions
import functools
import inspect
import pathlib
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale as TheirDynamicScale

import optax_lossscale as ols
from optax_lossscale import flax as ols_flax
from optax_lossscale import interop, keras, testing

PACKAGE = pathlib.Path(inspect.getfile(ols)).parent

NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # no float64 holds it
STATE = ols.init(8.0)
PARAMS = {"w": jnp.ones(3)}
SGD = optax.sgd(0.1)
TX = ols.with_loss_scaling(SGD)
OPT_STATE = TX.init(PARAMS)
EXPONENTS = ols.gradient_exponents(PARAMS)
COUNTS = ols.NonfiniteCounts(*(jnp.zeros((), jnp.int32) for _ in range(3)))
TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 100,
    "_growth_tracker": 7,
}


class Bad(NamedTuple):
    """A value that is refused, and what the message says of it where not the value itself."""

    value: Any
    says: str


class Row(NamedTuple):
    """A parameter of a public function, a call with it, and the values that are refused."""

    function: str
    parameter: str
    call: Any
    bad: tuple[Any, ...]
    # What the message calls the argument, in any of these words.
    names: tuple[str, ...]


# Found inside of what it was handed in with.
STATES = ("`opt_state`", "`state`", "`state.")


def row(function, parameter, call, *bad, name=None):
    names = (
        STATES if "state" in parameter else (f"`{parameter}`", f"`{parameter}.", f"`{parameter}[")
    )
    return Row(function, parameter, call, bad, (f"`{name}",) if name else names)


class Opaque:
    """A value of a kind that nothing here knows."""

    def __repr__(self):
        return "Opaque()"


OPAQUE = Opaque()
NO_NUMBER = (None, "x", True, 1j, [1], jnp.ones(2), OPAQUE)
NO_NUMBER_BUT_NONE = NO_NUMBER[1:]
NO_FACTOR = (*NO_NUMBER, jnp.float32(4), NAN, INF, -INF, -1.0, 0, 2.0**-127, 2.0**127, HUGE)
NO_COUNT = (*NO_NUMBER, jnp.int32(4), 1.5, NAN, 0, -1, 2**31, HUGE)
NO_BOOL = ("x", 0, 1, 1.0, NAN, [True], jnp.array(True), OPAQUE)
NO_FLAG = (None, "x", 0, 1, 1.0, OPAQUE, Bad(jnp.ones(2, bool), "shape (2,)"))
NO_POLICY = (
    "x",
    "Dynamic",
    True,
    [8],
    1j,
    OPAQUE,
    jnp.float32(8),
    ols.DynamicLossScale,
    Bad({}, "class_name=None"),
    Bad({"class_name": "Other"}, "class_name='Other'"),
    NAN,
    INF,
    -1.0,
    0,
    HUGE,
)
# What each function that looks for a state refuses, and what it says.
NO_STATE = (
    Bad(None, "0 in a NoneType"),
    Bad("x", "0 in a str"),
    Bad(8.0, "0 in a float"),
    Bad(PARAMS, "0 in a dict"),
    Bad(tuple(STATE), "0 in a tuple"),
    Bad(ols.DynamicLossScale(), "0 in a DynamicLossScale"),
    Bad((OPT_STATE, STATE), "found at: `[0].loss_scale_state`, `[1]`"),
    Bad(STATE._replace(growth_count=None), "as growth_count of the LossScaleState"),
    Bad({"a": STATE._replace(loss_scale=None)}, "at `['a']`, got None"),
)
BAD_FACTORS = (
    Bad(STATE._replace(loss_scale="x"), "`state.loss_scale` must be a real number, got 'x'"),
    Bad(STATE._replace(loss_scale=1j), "`state.loss_scale` must be a real number, got 1j"),
    Bad(STATE._replace(loss_scale=True), "`state.loss_scale` must be a real number, got True"),
    Bad(STATE._replace(loss_scale=NAN), "got nan"),
    Bad(STATE._replace(loss_scale=0), "`state.loss_scale` must lie between"),
    Bad(STATE._replace(loss_scale=-8.0), "got -8.0"),
    Bad(STATE._replace(loss_scale=HUGE), "`state.loss_scale` must lie between"),
)
STACKED = Bad(jax.tree.map(lambda x: jnp.stack([x, x]), STATE), "shape (2,)")
BAD_COUNTS = (
    Bad(STATE._replace(growth_count="x"), "`state.growth_count` must be an integer, got 'x'"),
    Bad(STATE._replace(overflow_count=1.5), "`state.overflow_count` must be an integer, got 1.5"),
    Bad(STATE._replace(total_skipped=jnp.float32(1)), "`state.total_skipped` must be an integer"),
    Bad(STATE._replace(total_skipped=-1), "`state.total_skipped` must lie between"),
    Bad(STATE._replace(consecutive_skipped=2**31), "`state.consecutive_skipped` must lie between"),
)
NO_AXIS = (3, True, ["x"], {}, Bad(("x", 0), "('x', 0)"), Bad(jnp.ones(2), "got Array([1."))
NOT_MAPPED = ("x", ("x", "y"))
NO_DTYPE = (None, "x", 1, OPAQUE, Bad(int, "int"), Bad(jnp.complex64, "complex64"))
NO_SMALL_DTYPE = (*NO_DTYPE, Bad(jnp.float64, "float64"))
NO_EXPONENTS = (
    None,
    "x",
    tuple(EXPONENTS),
    Bad(EXPONENTS._replace(zero="x"), "`exponents.zero` must hold counts, got 'x'"),
    Bad(EXPONENTS._replace(histogram=None), "`exponents.histogram` must hold counts, got None"),
    Bad(EXPONENTS._replace(histogram=jnp.zeros((2, 277))), "shape (2, 277)"),
    Bad(EXPONENTS._replace(histogram=-jnp.ones(277)), "negative"),
    Bad(EXPONENTS._replace(histogram=jnp.full(277, NAN)), "counts"),
)


def loss_fn(w):
    return jnp.sum(w**2)


def grad_fn(state, w):
    return state.loss_scale * w


def differentiated(**given):
    return ols.value_and_grad(**({"fun": loss_fn} | given))(STATE, jnp.ones(2))


def returning(value):
    """Return a loss function that returns this, whatever it is given."""
    return lambda w: value  # noqa: ARG005


# -- the transformation -------------------------------------------------------------------------


def updated(updates=PARAMS, state=OPT_STATE, params=PARAMS, **extra_args):
    return TX.update(updates, state, params, **extra_args)


# -- Keras --------------------------------------------------------------------------------------

KERAS_NEEDS = {
    "learning_rate": {"weight_decay": 0.1},
    "weight_decay": {"learning_rate": 0.1},
    "ema_momentum": {"use_ema": True},
    "ema_overwrite_frequency": {"use_ema": True},
}


def keras_call(name):
    return lambda value: keras.loss_scale_optimizer(
        **({"inner_optimizer": SGD} | KERAS_NEEDS.get(name, {}) | {name: value})
    )


def keras_rows():
    factor = (*NO_NUMBER_BUT_NONE, NAN, INF, -1.0, 0, HUGE)
    steps = (*NO_NUMBER_BUT_NONE, 1.5, NAN, 0, -1, 2**31, HUGE)
    rate = (*NO_NUMBER_BUT_NONE, NAN, INF, -1.0, HUGE)
    positive = (*rate, 0)
    refused = {
        "inner_optimizer": (None, "x", 1, optax.sgd, optax.MultiSteps(SGD, 2)),
        "initial_scale": factor,
        "dynamic_growth_steps": steps,
        "dynamic": (None, *NO_BOOL),
        "learning_rate": rate,
        "weight_decay": rate,
        "clipnorm": positive,
        "clipvalue": positive,
        "global_clipnorm": positive,
        "use_ema": (None, *NO_BOOL),
        "ema_momentum": (*NO_NUMBER, NAN, INF, -0.1, 1.1, HUGE),
        "ema_overwrite_frequency": steps,
        "loss_scale_factor": factor,
        "gradient_accumulation_steps": (*steps, 1),
        "axis_name": NO_AXIS,
    }
    return [
        row("keras.loss_scale_optimizer", name, keras_call(name), *bad)
        for name, bad in refused.items()
    ]


# -- Flax ---------------------------------------------------------------------------------------


def created(**given):
    arguments = {"apply_fn": None, "params": PARAMS, "tx": SGD} | given
    return ols_flax.TrainState.create(**arguments)


TRAIN_STATE = created()


def applied(**given):
    return TRAIN_STATE.apply_gradients(**({"grads": PARAMS} | given))


def dynamic_scale_grad(**given):
    arguments = {"fun": loss_fn} | given
    return ols_flax.DynamicScale().value_and_grad(**arguments)(jnp.ones(2))


# -- interop ------------------------------------------------------------------------------------


def interop_rows():
    """Each attribute or key of the foreign object, by the name of the argument that holds it."""
    no_number = ("x", True, 1j, OPAQUE)
    stacked = Bad(np.ones(2), "shape (2,)")
    factor = (*no_number, None, stacked, NAN, INF, -1.0, 0, HUGE)
    bound = (*no_number, stacked, NAN, INF, HUGE)
    count = (*no_number, None, stacked, NAN, INF, 1.5, -1, HUGE)
    interval = (*no_number, None, stacked, NAN, INF, 1.5, Bad(-1, "`growth_interval`"), HUGE)
    factors = (*no_number, None, stacked, NAN, INF, -1.0, 1, HUGE)
    theirs = {
        ("from_flax_dynamic_scale", "ds"): (
            lambda name, value: TheirDynamicScale().replace(**{name: value}),
            {
                "scale": factor,
                "fin_steps": count,
                "growth_interval": interval,
                "growth_factor": factors,
                "backoff_factor": factors,
                "minimum_scale": bound,
            },
        ),
        # JMP itself refuses factors that are no arrays.
        ("from_jmp", "ls"): (
            lambda name, value: dataclasses.replace(
                jmp.DynamicLossScale(jnp.float32(8)), **{name: value}
            ),
            {
                "loss_scale": (Bad(jnp.ones(2), "shape (2,)"), *map(jnp.float32, (NAN, 0, -1))),
                "counter": count,
                "period": (*interval, 0),
                "factor": factors,
                "min_loss_scale": (Bad(jnp.ones(2), "shape (2,)"), jnp.float32(NAN)),
            },
        ),
        ("from_torch_state_dict", "d"): (
            lambda name, value: TORCH | {name: value},
            {
                "scale": factor,
                "_growth_tracker": count,
                "growth_interval": (*interval, 0),
                "growth_factor": factors,
                "backoff_factor": factors,
            },
        ),
    }
    rows = []
    for (function, argument), (make, attributes) in theirs.items():
        convert = getattr(interop, function)
        for name, bad in attributes.items():

            def call(value, convert=convert, make=make, name=name):
                return convert(make(name, value))

            rows.append(row(f"interop.{function}", argument, call, *bad))
        lacking = (Bad(each, "lacks") for each in (None, "x", 1, [], OPAQUE))
        rows.append(row(f"interop.{function}", argument, convert, *lacking, Bad({}, "lacks")))
    return rows


def policy_rows():
    refused = {
        "initial_scale": NO_FACTOR,
        "min_scale": (*NO_FACTOR, 2.0**16),
        "max_scale": (*NO_FACTOR, 2.0**14),
        "growth_interval": NO_COUNT,
        "hysteresis": NO_COUNT,
        "loss_patience": NO_COUNT,
        "growth_factor": (*NO_NUMBER, jnp.float32(4), NAN, INF, -2.0, 0, 1, 1 + 1e-9, HUGE),
        "backoff_factor": (*NO_NUMBER, jnp.float32(0.5), NAN, INF, -0.5, 0, 1, 1e-50, HUGE),
        "consecutive_hysteresis": (None, *NO_BOOL),
    }
    return [
        row(
            "DynamicLossScale",
            name,
            lambda value, name=name: ols.DynamicLossScale(**{name: value}),
            *bad,
        )
        for name, bad in refused.items()
    ]


def update_rows(function, update):
    return [
        row(
            function,
            "state",
            lambda v: update(v, True),
            Bad(None, "NoneType"),
            Bad("x", "str"),
            Bad(OPT_STATE, "LossScaledState"),
            Bad(tuple(STATE), "tuple"),
            Bad(STATE._replace(loss_scale=None), "`state.loss_scale` must be a real number"),
            *BAD_FACTORS,
            *BAD_COUNTS,
        ),
        row(function, "grads_finite", lambda v: update(STATE, v), *NO_FLAG),
        row(function, "loss_finite", lambda v: update(STATE, True, loss_finite=v), *NO_FLAG),
    ]


NO_CONFIG = (
    None,
    "x",
    1,
    [],
    Bad({"scale": 1, "typo": 2}, "'typo'"),
    Bad({"scale": 1, 1: 2, "x": 3}, "'x'"),
    Bad({"class_name": "Other"}, "'Other'"),
    Bad({"class_name": []}, "[]"),
)
NO_FUNCTION = (None, "x", 1, PARAMS)
AUX = "because of `has_aux=True`"

TABLE = [
    *policy_rows(),
    row("FixedLossScale", "scale", ols.FixedLossScale, *NO_FACTOR),
    row(
        "FixedLossScale",
        "skip_nonfinite",
        lambda v: ols.FixedLossScale(8, skip_nonfinite=v),
        None,
        *NO_BOOL,
    ),
    *update_rows("DynamicLossScale.update", ols.DynamicLossScale().update),
    *update_rows("FixedLossScale.update", ols.FixedLossScale(8).update),
    *update_rows("update", functools.partial(ols.update, loss_scale="dynamic")),
    row("update", "loss_scale", lambda v: ols.update(STATE, True, v), *NO_POLICY),
    row(
        "DynamicLossScale.from_config",
        "config",
        ols.DynamicLossScale.from_config,
        *NO_CONFIG,
        Bad({"growth_interval": 1, "typo": 2}, "['typo']"),
    ),
    row("FixedLossScale.from_config", "config", ols.FixedLossScale.from_config, *NO_CONFIG),
    row("as_loss_scale", "loss_scale", ols.as_loss_scale, *NO_POLICY),
    row("init", "loss_scale", ols.init, *NO_POLICY),
    row("loss_scale_state", "opt_state", ols.loss_scale_state, *NO_STATE),
    row(
        "scale_loss",
        "loss",
        lambda v: ols.scale_loss(v, STATE),
        Bad("x", "str"),
        Bad(True, "bool"),
        Bad(1, "int"),
        Bad(1j, "complex"),
        Bad(OPAQUE, "Opaque"),
        Bad({"a": [1.0, "x"]}, "str at `['a'][1]`"),
        Bad(np.array(["a"]), "<U1"),
        Bad(jnp.int32(1), "int32"),
        Bad(jnp.array(True), "bool"),
        Bad(jax.random.key(0), "key<fry>"),
    ),
    row(
        "scale_loss",
        "state",
        lambda v: ols.scale_loss(1.0, v),
        *NO_STATE,
        *BAD_FACTORS,
        STACKED,
    ),
    row(
        "unscale_and_check",
        "state",
        lambda v: ols.unscale_and_check(PARAMS, v),
        *NO_STATE,
        *BAD_FACTORS,
        STACKED,
    ),
    row(
        "unscale_and_check",
        "axis_name",
        lambda v: ols.unscale_and_check(PARAMS, STATE, axis_name=v),
        *NO_AXIS,
        *NOT_MAPPED,
    ),
    row("value_and_grad", "fun", lambda v: differentiated(fun=v), *NO_FUNCTION),
    row(
        "value_and_grad",
        "fun",
        lambda v: differentiated(fun=v, has_aux=True),
        *(
            Bad(returning(each), AUX)
            for each in (None, "x", 1.0, (1.0,), (1.0, 2.0, 3.0), np.ones(2), {"a": 1.0, "b": 2.0})
        ),
    ),
    row(
        "value_and_grad",
        "fun",
        lambda v: differentiated(fun=v),
        Bad(returning("x"), "got str at the root"),
        Bad(returning(1), "got int at the root"),
        Bad(returning({"a": True}), "got bool at `['a']`"),
        name="loss",
    ),
    row(
        "value_and_grad",
        "argnums",
        lambda v: differentiated(argnums=v),
        *(None, "x", 1.0, True, (), [], (0, "x"), (0, 0), jnp.int32(0), {0}, OPAQUE),
    ),
    row("value_and_grad", "has_aux", lambda v: differentiated(has_aux=v), None, *NO_BOOL),
    row(
        "value_and_grad",
        "transform",
        lambda v: differentiated(transform=v),
        None,
        "x",
        1,
        Bad(jax.grad, "grad"),
        Bad(lambda fun, has_aux: fun, "function"),  # noqa: ARG005
    ),
    row(
        "value_and_grad(fun)",
        "state",
        lambda v: ols.value_and_grad(loss_fn)(v, jnp.ones(2)),
        *NO_STATE,
        *BAD_FACTORS,
    ),
    row(
        "tree_where",
        "pred",
        lambda v: ols.tree_where(v, PARAMS, PARAMS),
        *NO_FLAG,
    ),
    row(
        "tree_where",
        "on_true",
        lambda v: ols.tree_where(True, v, {"w": jnp.ones(3)}),
        Bad(None, "PyTreeDef(None)"),
        Bad({"v": jnp.ones(3)}, "`['v']`"),
        name="on_true` and `on_false",
    ),
    row(
        "tree_where",
        "on_true",
        lambda v: ols.tree_where(True, v, {"w": jnp.ones(3)}),
        Bad({"w": jnp.ones(4)}, "(4,)"),
        Bad({"w": jnp.ones(3, jnp.float16)}, "float16"),
        Bad({"w": "x"}, "'x'"),
        name="['w']",
    ),
    row(
        "tree_where",
        "on_false",
        lambda v: ols.tree_where(True, {"w": jnp.ones(3)}, v),
        Bad({"w": 1.0}, "1.0"),
        Bad({"w": jnp.ones(())}, "()"),
        Bad({"w": jnp.ones(3, int)}, "int32"),
        name="['w']",
    ),
    row(
        "with_loss_scaling",
        "inner",
        ols.with_loss_scaling,
        *(None, "x", 1, optax.sgd, OPT_STATE),
    ),
    row(
        "with_loss_scaling",
        "inner",
        lambda v: ols.with_loss_scaling(v).init(PARAMS),
        Bad(TX, "LossScaleState at `.loss_scale_state`"),
        Bad(optax.chain(SGD, TX), "LossScaleState at `[1].loss_scale_state`"),
    ),
    row("with_loss_scaling", "loss_scale", lambda v: ols.with_loss_scaling(SGD, v), *NO_POLICY),
    row(
        "with_loss_scaling",
        "axis_name",
        lambda v: ols.with_loss_scaling(SGD, axis_name=v),
        *NO_AXIS,
    ),
    row(
        "with_loss_scaling",
        "axis_name",
        lambda v: ols.with_loss_scaling(SGD, axis_name=v).update(PARAMS, OPT_STATE),
        *NOT_MAPPED,
    ),
    row(
        "with_loss_scaling(inner).update",
        "state",
        lambda v: updated(state=v),
        Bad(None, "NoneType"),
        Bad("x", "str"),
        Bad(STATE, "LossScaleState"),
        Bad(SGD.init(PARAMS), "tuple"),
    ),
    row(
        "with_loss_scaling(inner).update",
        "state",
        lambda v: updated(state=OPT_STATE._replace(loss_scale_state=v)),
        *NO_STATE,
        *BAD_FACTORS,
        *BAD_COUNTS,
        STACKED,
    ),
    row(
        "with_loss_scaling(inner).update",
        "extra_args",
        lambda v: updated(value=v),
        *("x", "nan", OPAQUE, Bad(np.array("x"), "'x'"), Bad([1.0, "x"], "'x' at `[1]`")),
        name="value",
    ),
    row("metrics", "opt_state", ols.metrics, *NO_STATE),
    row("metrics", "opt_state", ols.metrics, *BAD_FACTORS, *BAD_COUNTS),
    row("check_health", "opt_state", ols.check_health, *NO_STATE, STACKED),
    row("check_health", "opt_state", ols.check_health, *BAD_FACTORS, *BAD_COUNTS),
    row(
        "check_health",
        "opt_state",
        ols.check_health,
        Bad(STATE._replace(loss_scale=jnp.float32(NAN)), "got nan"),
        Bad(STATE._replace(loss_scale=jnp.float32(INF)), "got inf"),
        Bad(STATE._replace(loss_scale=jnp.float32(0)), "got 0"),
        Bad(STATE._replace(loss_scale=jnp.float32(-8)), "got -8"),
        Bad(STATE._replace(growth_count=jnp.int32(-5)), "growth_count=-5"),
        Bad(STATE._replace(total_skipped=jnp.int32(-1)), "total_skipped=-1"),
    ),
    row(
        "check_health",
        "max_consecutive_skipped",
        lambda v: ols.check_health(STATE, max_consecutive_skipped=v),
        *(None, "x", True, 1.5, -1, NAN, jnp.int32(3), OPAQUE),
    ),
    row("check_health", "loss_scale", lambda v: ols.check_health(STATE, loss_scale=v), *NO_POLICY),
    row(
        "format_nonfinite_report",
        "report",
        ols.format_nonfinite_report,
        *(None, "x", 1, [1], OPAQUE, Bad(COUNTS, "NonfiniteCounts(")),
        Bad({"a": None}, "`report['a']` must be NonfiniteCounts, got None"),
        Bad({"a": (1, 2)}, "got (1, 2)"),
        Bad({"a": COUNTS, 1: 2}, "`report[1]` must be NonfiniteCounts, got 2"),
        Bad({"a": (0, 0, "x")}, "(0, 0, 'x')"),
        Bad({"a": (1, 2, 0)}, "(1, 2, 0)"),
        Bad({"a": (-1, 0, 3)}, "(-1, 0, 3)"),
        Bad({"a": COUNTS._replace(nan=jnp.zeros(2, jnp.int32))}, "[0, 0]"),
    ),
    row(
        "gradient_exponents",
        "dtype",
        lambda v: ols.gradient_exponents(PARAMS, dtype=v),
        *NO_SMALL_DTYPE,
    ),
    row(
        "gradient_exponents",
        "loss_scale",
        lambda v: ols.gradient_exponents(PARAMS, loss_scale=v),
        *(None, "x", True, 1j, [1], OPAQUE, STATE, jnp.array(True)),
        *(NAN, INF, -1.0, 0, HUGE, Bad(jnp.ones(2), "shape (2,)")),
    ),
    row("suggest_scale", "exponents", ols.suggest_scale, *NO_EXPONENTS),
    row(
        "suggest_scale",
        "exponents",
        ols.suggest_scale,
        Bad(EXPONENTS._replace(histogram=jnp.zeros(277)), "empty histogram"),
    ),
    row(
        "suggest_scale",
        "headroom",
        lambda v: ols.suggest_scale(EXPONENTS, headroom=v),
        *(None, "x", True, 1.5, -1, NAN, jnp.int32(3), OPAQUE),
    ),
    row(
        "suggest_scale",
        "dtype",
        lambda v: ols.suggest_scale(EXPONENTS, dtype=v),
        *NO_SMALL_DTYPE,
    ),
    row("plot_gradient_exponents", "exponents", ols.plot_gradient_exponents, *NO_EXPONENTS),
    row(
        "plot_gradient_exponents",
        "ax",
        lambda v: ols.plot_gradient_exponents(EXPONENTS, v),
        *("x", 1, OPAQUE),
    ),
    row(
        "plot_gradient_exponents",
        "dtype",
        lambda v: ols.plot_gradient_exponents(EXPONENTS, dtype=v),
        *NO_SMALL_DTYPE,
    ),
    row(
        "calibrate",
        "grad_fn",
        lambda v: ols.calibrate(v, STATE, jnp.ones(())),
        *NO_FUNCTION,
        Bad(lambda *_: None, "PyTreeDef(None)"),
        Bad(lambda *_: {"a": 1}, "PyTreeDef({'a': *})"),
    ),
    row(
        "calibrate",
        "state",
        lambda v: ols.calibrate(grad_fn, v, jnp.ones(())),
        *NO_STATE,
    ),
    row(
        "calibrate",
        "state",
        lambda v: ols.calibrate(grad_fn, v, jnp.ones(())),
        *BAD_FACTORS,
        *BAD_COUNTS,
    ),
    row(
        "calibrate",
        "loss_scale",
        lambda v: ols.calibrate(grad_fn, STATE, jnp.ones(()), loss_scale=v),
        *NO_POLICY,
        Bad(None, "FixedLossScale"),
        Bad(8, "FixedLossScale"),
        ols.DynamicLossScale(3, min_scale=3, max_scale=3.5),
    ),
    row(
        "calibrate",
        "axis_name",
        lambda v: ols.calibrate(grad_fn, STATE, jnp.ones(()), axis_name=v),
        *NO_AXIS,
        *NOT_MAPPED,
    ),
    row(
        "flax.TrainState.create",
        "tx",
        lambda v: created(tx=v),
        *(None, "x", 1, optax.sgd, Bad(TX, "LossScaleState at `.loss_scale_state`")),
    ),
    row("flax.TrainState.create", "loss_scale", lambda v: created(loss_scale=v), *NO_POLICY),
    row("flax.TrainState.create", "axis_name", lambda v: created(axis_name=v), *NO_AXIS),
    row(
        "flax.TrainState.create",
        "count_skipped",
        lambda v: created(count_skipped=v),
        None,
        *NO_BOOL,
    ),
    row(
        "flax.TrainState.apply_gradients",
        "grads",
        lambda v: applied(grads=v),
        Bad(None, "`['w']`"),
        Bad("x", "`['w']`"),
        Bad(1.0, "`['w']`"),
        Bad({"v": jnp.ones(3)}, "`['v']`"),
        Bad({"w": jnp.ones(3), "b": jnp.ones(3)}, "`['b']`"),
        Bad({"w": None}, "`['w']`"),
        Bad({"w": "x"}, "'x' at `['w']`"),
        Bad({"w": OPAQUE}, "Opaque() at `['w']`"),
        Bad({"w": jnp.ones(4)}, "(4,) for (3,) at `['w']`"),
        Bad({"w": jnp.ones(())}, "() for (3,) at `['w']`"),
        Bad({"w": jnp.ones((3, 1))}, "(3, 1) for (3,) at `['w']`"),
    ),
    row(
        "flax.TrainState.apply_gradients",
        "value",
        lambda v: applied(value=v),
        *("x", OPAQUE, Bad([1.0, "x"], "'x' at `[1]`")),
    ),
    row(
        "flax.TrainState.apply_gradients",
        "kwargs",
        lambda v: applied(**{v: 1}),
        *("typo", "step", "params", "opt_state", "grads_finite", "loss_scale"),
        name="apply_gradients",
    ),
    row(
        "flax.TrainState.apply_gradients",
        "kwargs",
        lambda v: applied(count_skipped=v),
        True,
        name="['count_skipped']",
    ),
    row(
        "flax.TrainState.scale_loss",
        "loss",
        TRAIN_STATE.scale_loss,
        *(Bad("x", "str"), Bad(1, "int"), Bad(True, "bool"), Bad(1j, "complex")),
    ),
    row("flax.DynamicScale.value_and_grad", "fun", lambda v: dynamic_scale_grad(fun=v), None, "x"),
    row(
        "flax.DynamicScale.value_and_grad",
        "argnums",
        lambda v: dynamic_scale_grad(argnums=v),
        *(None, "x", 1.0, True, (), (0, 0)),
    ),
    row(
        "flax.DynamicScale.value_and_grad",
        "has_aux",
        lambda v: dynamic_scale_grad(has_aux=v),
        None,
        *NO_BOOL,
    ),
    row(
        "flax.DynamicScale.value_and_grad",
        "axis_name",
        lambda v: dynamic_scale_grad(axis_name=v),
        *NOT_MAPPED,
        *NO_AXIS,
    ),
    *keras_rows(),
    row(
        "keras.ema_params",
        "opt_state",
        keras.ema_params,
        Bad(None, "0 in a NoneType"),
        Bad("x", "0 in a str"),
        Bad(OPT_STATE, "0 in a LossScaledState"),
        Bad([keras.EmaParamsState(PARAMS, jnp.int32(0))] * 2, "found at: `[0]`, `[1]`"),
    ),
    *interop_rows(),
    row(
        "interop.to_torch_state_dict",
        "policy",
        lambda v: interop.to_torch_state_dict(v, STATE),
        *(None, "x", 8, "dynamic", ols.FixedLossScale(8), ols.DynamicLossScale, STATE),
        Bad(ols.DynamicLossScale(hysteresis=2), "got 2"),
    ),
    row(
        "interop.to_torch_state_dict",
        "state",
        lambda v: interop.to_torch_state_dict(ols.DynamicLossScale(), v),
        *NO_STATE,
    ),
    row(
        "interop.to_torch_state_dict",
        "state",
        lambda v: interop.to_torch_state_dict(ols.DynamicLossScale(), v),
        STACKED,
        Bad(STATE._replace(loss_scale=jnp.float32(NAN)), "got nan"),
        Bad(STATE._replace(loss_scale=jnp.float32(-8)), "got -8.0"),
        Bad(STATE._replace(loss_scale="x"), "loss_scale='x'"),
        Bad(STATE._replace(growth_count=jnp.int32(-5)), "and -5"),
        Bad(STATE._replace(growth_count=1.5), "growth_count=1.5"),
    ),
    row(
        "testing.assert_scaled_once",
        "grad_fn",
        lambda v: testing.assert_scaled_once(v, STATE, jnp.ones(2)),
        *NO_FUNCTION,
        Bad(lambda *_: None, "all zero"),
        Bad(lambda *_: "x", "all zero"),
    ),
    row(
        "testing.assert_scaled_once",
        "state",
        lambda v: testing.assert_scaled_once(grad_fn, v, jnp.ones(2)),
        *NO_STATE,
    ),
]

ANY_TREE = "any pytree will do, by contract: what is no number passes through or is left out"
CONTAINER = "a container that JAX itself fills with leaves of every kind; read by the functions"
INNER = "belongs to the inner optimizer, which alone knows what it takes"
FORWARDED = "handed on to a function of the caller, which alone knows what it takes"

# The parameters that no row is about: (function, parameter), or a function with all of them.
EXCEPT = {
    "FirstNonfinite": CONTAINER,
    ("first_nonfinite", "fun"): "Python refuses to call what is not a function",
    ("first_nonfinite", "args"): FORWARDED,
    ("first_nonfinite", "kwargs"): FORWARDED,
    "GradientExponents": CONTAINER,
    "NonfiniteCounts": CONTAINER,
    "LossScaleState": CONTAINER,
    "LossScaledState": CONTAINER,
    "keras.DecayedState": CONTAINER,
    "keras.EmaParamsState": CONTAINER,
    "LossScale": "a protocol: a class of the user, with parameters of its own",
    "LossScaleStalledError": "an exception: any arguments will do",
    ("all_finite", "tree"): ANY_TREE,
    ("nonfinite_report", "grads"): ANY_TREE,
    ("gradient_exponents", "grads"): ANY_TREE,
    ("unscale_and_check", "grads"): ANY_TREE,
    ("with_loss_scaling(inner).init", "params"): INNER,
    ("with_loss_scaling(inner).update", "updates"): INNER,
    ("with_loss_scaling(inner).update", "params"): INNER,
    ("flax.TrainState.create", "params"): INNER,
    ("flax.TrainState.create", "apply_fn"): "kept for the caller; Flax takes None, too",
    ("flax.TrainState.create", "kwargs"): "fields; Python refuses those that are not known",
    ("value_and_grad", "kwargs"): "handed on to `transform`, which refuses what it does not know",
    ("value_and_grad(fun)", "args"): FORWARDED,
    ("value_and_grad(fun)", "kwds"): FORWARDED,
    ("calibrate", "args"): FORWARDED,
    ("testing.assert_scaled_once", "args"): FORWARDED,
    **{
        ("flax.DynamicScale", field.name): "as in Flax; JAX builds the object with specs and axes"
        for field in dataclasses.fields(ols_flax.DynamicScale)
    },
    "flax.TrainState": "made with `create`, and rebuilt by JAX with leaves of every kind",
}


def public_callables():
    """Yield the name and the function of everything public that takes arguments."""
    modules = {"": ols, "flax.": ols_flax, "keras.": keras, "interop.": interop}
    for prefix, module in (modules | {"testing.": testing}).items():
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        for name in names:
            value = getattr(module, name)
            yield prefix + name, value
            if inspect.isclass(value) and f"{prefix}{name}" not in {
                each for each in EXCEPT if each != "flax.TrainState"
            }:
                for attribute, method in vars(value).items():
                    if not attribute.startswith("_") and (
                        inspect.isfunction(method) or isinstance(method, classmethod)
                    ):
                        yield f"{prefix}{name}.{attribute}", getattr(value, attribute)
            if inspect.isclass(value) and hasattr(value, "from_config"):
                yield f"{prefix}{name}.from_config", value.from_config
    yield "with_loss_scaling(inner).init", TX.init
    yield "with_loss_scaling(inner).update", TX.update
    yield "value_and_grad(fun)", ols.value_and_grad(loss_fn)


def parameters():
    """Return every parameter of every public function."""
    return {
        (name, parameter)
        for name, function in public_callables()
        if name not in EXCEPT
        for parameter in inspect.signature(function).parameters
        if parameter != "self" and not name.endswith(".replace")  # which dataclasses of Flax have
    }


def untested(table):
    return parameters() - {(each.function, each.parameter) for each in table} - EXCEPT.keys()


def test_every_parameter_of_every_public_function_is_refused_something():
    assert not untested(TABLE)


def test_no_row_and_no_exception_is_about_what_does_not_exist():
    functions = {name for name, _ in public_callables()}
    rows = {(each.function, each.parameter) for each in TABLE}
    exceptions = {each for each in EXCEPT if isinstance(each, tuple)}
    assert not (rows | exceptions) - parameters()
    assert not {each for each in EXCEPT if isinstance(each, str)} - functions
    assert not rows & exceptions


def test_a_parameter_without_a_row_is_noticed():
    for gone in {each[:2] for each in TABLE}:
        assert untested([each for each in TABLE if each[:2] != gone]) == {gone}


def cases():
    for i, each in enumerate(TABLE):
        for j, bad in enumerate(each.bad):
            yield pytest.param(each, bad, id=f"{each.function}-{each.parameter}-{i}-{j}")


def names_for(value):
    """Return the words that stand for a value in a message."""
    words = [repr(value), str(value), f"got {type(value).__name__}"]
    if isinstance(value, (int, float)):
        words.append(f"{value:g}" if abs(value) < HUGE else "got inf")
    return words


@pytest.mark.parametrize(("each", "bad"), list(cases()))
def test_bad_input_is_refused_by_name_with_the_value_and_a_remedy(each, bad):
    value, says = bad if isinstance(bad, Bad) else (bad, None)
    with pytest.raises((TypeError, ValueError)) as caught:
        each.call(value)
    assert caught.type in {TypeError, ValueError}, "a kind of error that only JAX knows"
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert PACKAGE in pathlib.Path(last.filename).parents, f"raised in {last.filename}"
    message = str(caught.value)
    assert any(name in message for name in each.names), message
    assert any(word in message for word in ([says] if says else names_for(value))), message
    # What was wrong and what to do about it; a list of all there is to choose from is a remedy.
    remedies = (". ", "must be True or False", "or a dict from `get_config`; got")
    assert message.endswith("."), message
    assert any(remedy in message for remedy in remedies), message


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(ols.DynamicLossScale)])
def test_a_traced_number_is_no_hyper_parameter(name):
    def build(number):
        return ols.DynamicLossScale(**{name: number}).init()

    with pytest.raises(TypeError, match=f"`{name}` must be .*, got (JitTracer|Traced)"):
        jax.jit(build)(getattr(ols.DynamicLossScale(), name))


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (ols.as_loss_scale, "loss_scale"),
        (ols.init, "loss_scale"),
        (ols.FixedLossScale, "scale"),
        (lambda v: ols.FixedLossScale(8, skip_nonfinite=v), "skip_nonfinite"),
        (lambda v: ols.with_loss_scaling(SGD, v), "loss_scale"),
        (lambda v: ols.check_health(STATE, max_consecutive_skipped=v), "max_consecutive_skipped"),
        (lambda v: ols.suggest_scale(EXPONENTS, headroom=v), "headroom"),
        (lambda v: ols.value_and_grad(loss_fn, v), "argnums"),
        (lambda v: ols.value_and_grad(loss_fn, has_aux=v), "has_aux"),
        (lambda v: created(count_skipped=v), "count_skipped"),
        (lambda v: keras.loss_scale_optimizer(SGD, v), "initial_scale"),
        (lambda v: keras.loss_scale_optimizer(SGD, use_ema=v), "use_ema"),
        (lambda v: interop.from_torch_state_dict(TORCH | {"scale": v}), "d"),
    ],
)
def test_a_traced_number_is_refused_where_a_python_one_is_needed(function, argument):
    with pytest.raises(TypeError, match=f"`{argument}` must .*(JitTracer|Traced)"):
        jax.jit(lambda v: function(v) and v)(jnp.float32(1))


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (lambda w: ols.check_health(ols.init()._replace(loss_scale=w.sum())), "opt_state"),
        (lambda w: ols.suggest_scale(ols.gradient_exponents(w)), "exponents"),
        (lambda w: ols.plot_gradient_exponents(ols.gradient_exponents(w)), "exponents"),
        (lambda w: ols.format_nonfinite_report(ols.nonfinite_report(w)), "report"),
        (lambda w: testing.assert_scaled_once(grad_fn, STATE, w), "grad_fn"),
        (
            lambda w: interop.to_torch_state_dict(
                ols.DynamicLossScale(), STATE._replace(loss_scale=w.sum())
            ),
            "state",
        ),
    ],
    ids=["check_health", "suggest_scale", "plot", "format", "assert_scaled_once", "to_torch"],
)
def test_what_answers_on_the_host_refuses_traced_arrays_by_name(function, argument):
    with pytest.raises(TypeError, match=f"`{argument}.* must .*(traced|Traced|JitTracer)"):
        jax.jit(function)(jnp.ones(3))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("initial_scale", np.float16(8)),
        ("initial_scale", np.float64(8)),
        ("initial_scale", np.int64(8)),
        ("initial_scale", fractions.Fraction(17, 2)),
        ("growth_interval", np.int32(7)),
        ("hysteresis", np.uint8(7)),
        ("loss_patience", np.int16(7)),
        ("growth_factor", np.float32(4)),
        ("backoff_factor", np.float32(0.25)),
        ("consecutive_hysteresis", np.True_),
    ],
)
def test_numbers_of_numpy_are_taken_where_numbers_of_python_are(name, number):
    kept = getattr(ols.DynamicLossScale(**{name: number}), name)
    assert kept == number
    assert type(kept) in {float, int, bool}


def test_the_rest_takes_numbers_of_numpy_too():
    assert float(ols.init(np.float32(8)).loss_scale) == 8
    assert float(ols.scale_loss(np.float32(0.5), STATE)) == 4
    assert ols.suggest_scale(EXPONENTS, headroom=np.int64(4)) == ols.suggest_scale(EXPONENTS)
    ols.check_health(STATE, max_consecutive_skipped=np.int32(3))
    assert int(ols.gradient_exponents(PARAMS, loss_scale=np.float32(2**17)).overflow) == 3
    assert int(ols.update(STATE, np.False_, 8).total_skipped) == 1
    assert float(ols.scale_loss(1.0, STATE._replace(loss_scale=np.int64(4)))) == 4
    tx = keras.loss_scale_optimizer(SGD, np.float32(8), np.int64(3), clipnorm=np.float64(1))
    assert float(tx.init(PARAMS).loss_scale_state.loss_scale) == 8
    _, state = interop.from_torch_state_dict(TORCH | {"scale": np.float32(4)})
    assert float(state.loss_scale) == 4


def test_no_parameters_is_a_use_that_says_what_is_missing():
    """Python's own words: they name the function and the argument."""
    for function in (ols.scale_loss, ols.update, ols.with_loss_scaling, ols.FixedLossScale):
        with pytest.raises(TypeError, match=r"missing .* required positional argument"):
            function()
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        ols.DynamicLossScale(typo=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        created(typo=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        differentiated(typo=1)
