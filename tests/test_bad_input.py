"""Bad input for every parameter of every public function.

What the library checks itself raises a TypeError or a ValueError that names the argument, what it
was and what to do. `TABLE` lists what is refused so. `EXCEPT` lists the parameters that the library
does not check, and why. Together they must cover every signature, so that none is forgotten.
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
HUGE = 10**400  # does not fit a float64
STATE = ols.init(8.0)
PARAMS = {"w": jnp.ones(3)}
SGD = optax.sgd(0.1)
TX = ols.with_loss_scaling(SGD)
OPT_STATE = TX.init(PARAMS)
TRAIN_STATE = ols_flax.TrainState.create(apply_fn=None, params=PARAMS, tx=SGD)
EXPONENTS = ols.diagnostics.gradient_exponents(PARAMS)
TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 100,
    "_growth_tracker": 7,
}


class Opaque:
    """A value of a kind that nothing here knows."""

    def __repr__(self):
        return "Opaque()"


class Bad(NamedTuple):
    """A value that is refused, and what the message says of it where not the value itself."""

    value: Any
    says: str


OPAQUE = Opaque()
NO_NUMBER = (None, "x", True, 1j, [1], jnp.ones(2), OPAQUE)
NO_NUMBER_BUT_NONE = NO_NUMBER[1:]
NO_SCALE = (*NO_NUMBER, jnp.float32(4), NAN, INF, -INF, -1.0, 0, 2.0**-127, 2.0**127, HUGE)
NO_COUNT = (*NO_NUMBER, jnp.int32(4), 1.5, NAN, 0, -1, 2**31, HUGE)
NO_LIMIT = (None, "x", True, 1.5, -1, NAN, jnp.int32(3), OPAQUE)
NO_FLAG = (None, "x", 0, 1, 1.0, OPAQUE, Bad(jnp.ones(2, bool), "shape (2,)"))
NO_POLICY = (
    *("x", "Dynamic", True, [8], 1j, OPAQUE, jnp.float32(8), ols.DynamicLossScale),
    *(Bad({}, "class_name=None"), Bad({"class_name": "Other"}, "class_name='Other'")),
    *(NAN, INF, -1.0, 0, HUGE),
)
NO_CONFIG = (
    *(None, "x", 1, [], Bad({"class_name": "Other"}, "'Other'"), Bad({"class_name": []}, "[]")),
    *(Bad({"typo": 2}, "['typo']"), Bad({1: 3, "x": 3}, "'x'")),
)
NO_STATE = (
    Bad(None, "0 in a NoneType"),
    Bad("x", "0 in a str"),
    Bad(8.0, "0 in a float"),
    Bad(PARAMS, "0 in a dict"),
    Bad(tuple(STATE), "0 in a tuple"),
    Bad(ols.DynamicLossScale(), "0 in a DynamicLossScale"),
    Bad((OPT_STATE, STATE), "found at: `[0].loss_scale_state`, `[1]`"),
)
# Numbers that were set by hand. What an array holds is data, and is not looked at.
BAD_SCALES = (
    *(Bad(STATE._replace(loss_scale=bad), f"got {bad!r}") for bad in ("x", 1j, True, NAN)),
    *(Bad(STATE._replace(loss_scale=bad), f"got {bad}") for bad in (0, -8.0, HUGE)),
)
BAD_COUNTS = (
    Bad(STATE._replace(growth_count="x"), "`state.growth_count` must be an integer, got 'x'"),
    Bad(STATE._replace(overflow_count=1.5), "`state.overflow_count` must be an integer, got 1.5"),
    Bad(STATE._replace(total_skipped=-1), "got -1"),
    Bad(STATE._replace(consecutive_skipped=2**31), "got 2147483648"),
)
STACKED = Bad(jax.tree.map(lambda x: jnp.stack([x, x]), STATE), "shape (2,)")
NO_AXIS = (3, True, ["x"], {}, Bad(("x", 0), "('x', 0)"), Bad(jnp.ones(2), "got Array([1."))
NOT_MAPPED = ("x", ("x", "y"))
NO_SMALL_DTYPE = tuple(Bad(dtype, jnp.dtype(dtype).name) for dtype in (int, complex, np.float64))
NO_EXPONENTS = (
    Bad(EXPONENTS._replace(histogram=jnp.zeros((2, 277))), "shape (2, 277)"),
    Bad(EXPONENTS._replace(histogram=-jnp.ones(277)), "negative"),
    Bad(EXPONENTS._replace(histogram=jnp.full(277, NAN)), "counts"),
)
NO_OPTIMIZER = (None, "x", 1, optax.sgd, OPT_STATE)
NO_GRADS = (
    Bad(lambda *_: None, "PyTreeDef(None)"),
    Bad(lambda *_: {"a": 1}, "PyTreeDef({'a': *})"),
)
BAD_LOSSES = (
    *(Bad("x", "str"), Bad(True, "bool"), Bad(1, "int"), Bad(1j, "complex"), Bad(OPAQUE, "Opaque")),
    *(Bad({"a": [1.0, "x"]}, "str at `['a'][1]`"), Bad(np.array(["a"]), "<U1")),
    *(Bad(jnp.int32(1), "int32"), Bad(jnp.array(True), "bool"), Bad(jax.random.key(0), "key<fry>")),
)


# -- the public functions, and arguments that each of them takes ----------------------------------


def public_callables():
    """Yield the name and the function of everything public that takes arguments."""
    modules = {"": ols, "diagnostics.": ols.diagnostics, "flax.": ols_flax, "keras.": keras}
    for prefix, module in (modules | {"interop.": interop, "testing.": testing}).items():
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        for name in names:
            value = getattr(module, name)
            if inspect.isclass(value):
                yield from methods(prefix + name, value)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield prefix + name, value
    yield "with_loss_scaling(inner).init", TX.init
    yield "with_loss_scaling(inner).update", TX.update
    yield "value_and_grad(fun)", ols.value_and_grad(loss_fn)


def methods(name, cls):
    """Yield the public methods of a class that takes part in training; containers have none."""
    if EXCEPT.get(name) in {CONTAINER, PROTOCOL, EXCEPTION}:
        return
    for attribute in [*vars(cls), "from_config"]:
        # Flax adds `replace` to its dataclasses.
        if not attribute.startswith("_") and attribute != "replace":
            method = getattr(cls, attribute, None)
            if inspect.isfunction(method) or inspect.ismethod(method):
                yield f"{name}.{attribute}", method


def loss_fn(w):
    return jnp.sum(w**2)


def returning(value):
    """Return a loss function that returns this, whatever it is given."""
    return lambda w: value  # noqa: ARG005


def differentiated(**arguments):
    return ols.value_and_grad(**arguments)(STATE, jnp.ones(2))


UPDATE = {"state": STATE, "grads_finite": True}
GOOD = {
    "DynamicLossScale.update": {"self": ols.DynamicLossScale()} | UPDATE,
    "FixedLossScale.update": {"self": ols.FixedLossScale(8)} | UPDATE,
    "FixedLossScale": {"scale": 8},
    "update": {"loss_scale": "dynamic"} | UPDATE,
    "scale_loss": {"loss": 1.0, "state": STATE},
    "unscale_and_check": {"grads": PARAMS, "state": STATE},
    "value_and_grad": {"fun": loss_fn},
    "tree_where": {"pred": True, "on_true": PARAMS, "on_false": PARAMS},
    "with_loss_scaling": {"inner": SGD},
    "with_loss_scaling(inner).update": {"updates": PARAMS, "state": OPT_STATE, "params": PARAMS},
    "diagnostics.check_health": {"opt_state": STATE},
    "diagnostics.gradient_exponents": {"grads": PARAMS},
    "diagnostics.suggest_scale": {"exponents": EXPONENTS},
    "diagnostics.plot_gradient_exponents": {"exponents": EXPONENTS},
    "diagnostics.calibrate": {
        "grad_fn": lambda state: (64 * state.loss_scale).astype(jnp.float16),
        "state": STATE,
    },
    "flax.TrainState.create": {"apply_fn": None, "params": PARAMS, "tx": SGD},
    "flax.TrainState.apply_gradients": {"self": TRAIN_STATE, "grads": PARAMS},
    "flax.TrainState.scale_loss": {"self": TRAIN_STATE, "loss": 1.0},
    "flax.DynamicScale.value_and_grad": {"self": ols_flax.DynamicScale(), "fun": loss_fn},
    "keras.loss_scale_optimizer": {"inner_optimizer": SGD},
    "interop.to_torch_state_dict": {"policy": ols.DynamicLossScale(), "state": STATE},
    "testing.assert_scaled_once": {"grad_fn": lambda state: state.loss_scale, "state": STATE},
}


# -- what is refused ----------------------------------------------------------------------------


class Row(NamedTuple):
    """A parameter of a public function, a call with it, and the values that are refused."""

    function: str
    parameter: str
    call: Any
    bad: tuple[Any, ...]
    # What the message calls the argument, in any of these words.
    names: tuple[str, ...]


def refused(function, /, *, call=None, name=None, **values):
    """Return a row for each parameter of a function, with the values that it refuses."""
    return [
        Row(
            function,
            parameter,
            call or functools.partial(call_with, function, parameter),
            bad,
            (f"`{name}",) if name else names_of(parameter),
        )
        for parameter, bad in values.items()
    ]


def call_with(function, parameter, value):
    # `kwargs` are given by their own names.
    given = value if parameter == "kwargs" else {parameter: value}
    return CALLS[function](**(GOOD.get(function, {}) | given))


def names_of(parameter):
    if "state" in parameter:  # it is found inside what it was handed in with
        return "`opt_state`", "`opt_state.", "`state`", "`state."
    return f"`{parameter}`", f"`{parameter}.", f"`{parameter}["


def update_rows(function):
    no_state = (Bad(None, "NoneType"), Bad("x", "str"), Bad(OPT_STATE, "WithLossScalingState"))
    return refused(
        function,
        state=(*no_state, Bad(tuple(STATE), "tuple"), *BAD_SCALES, *BAD_COUNTS),
        grads_finite=NO_FLAG,
        loss_finite=NO_FLAG,
    )


def keras_rows():
    rate = (*NO_NUMBER_BUT_NONE, NAN, INF, -1.0, HUGE)
    no_scale = (True, NAN, INF, -1.0, 0, HUGE)
    no_steps = (1.5, NAN, -1, 2**31, HUGE)
    needs = {
        "learning_rate": {"weight_decay": 0.1},
        "weight_decay": {"learning_rate": 0.1},
        "ema_overwrite_frequency": {"use_ema": True},
    }
    values = {
        "initial_scale": no_scale,
        "learning_rate": rate,
        "weight_decay": rate,
        "clipnorm": (*rate, 0),
        "clipvalue": (*rate, 0),
        "global_clipnorm": (*rate, 0),
        "ema_momentum": (*NO_NUMBER, NAN, INF, -0.1, 1.1, HUGE),
        "ema_overwrite_frequency": (*NO_NUMBER_BUT_NONE, *no_steps, 0),
        "gradient_accumulation_steps": (*NO_NUMBER_BUT_NONE, *no_steps, 0, 1),
        "axis_name": NO_AXIS,
    }
    build = functools.partial(keras.loss_scale_optimizer, SGD)
    function = "keras.loss_scale_optimizer"
    return [
        # Refused by what it is handed on to, which has a name of its own for it.
        *refused(function, inner_optimizer=(None, "x", 1, optax.sgd), name="inner"),
        *refused(
            function, dynamic_growth_steps=("x", True, OPAQUE, *no_steps, 0), name="growth_interval"
        ),
        *refused(function, loss_scale_factor=(*NO_NUMBER_BUT_NONE, *no_scale[1:]), name="scale"),
        *(
            each
            for name, bad in values.items()
            for each in refused(
                function,
                call=lambda value, name=name: build(**needs.get(name, {}), **{name: value}),
                **{name: bad},
            )
        ),
    ]


def interop_rows():
    """Return a row for each attribute or key of the foreign objects."""
    no_number = ("x", 1j, OPAQUE)
    stacked = Bad(np.ones(2), "shape (2,)")
    scale = (*no_number, None, stacked, NAN, INF, -1.0, 0)
    bound = (*no_number, stacked, NAN, INF)
    count = (*no_number, None, stacked, NAN, INF, 1.5, -1)
    interval = (*no_number, None, stacked, NAN, INF, 1.5, Bad(-1, "`growth_interval`"))
    factors = (*no_number, None, stacked, NAN, INF, -1.0, 1)
    theirs = {
        ("from_flax_dynamic_scale", "ds"): (
            lambda **given: TheirDynamicScale().replace(**given),
            {
                "scale": scale,
                "fin_steps": count,
                "growth_interval": interval,
                "growth_factor": factors,
                "backoff_factor": factors,
                "minimum_scale": bound,
            },
        ),
        # JMP itself refuses a loss scale that is not an array.
        ("from_jmp", "ls"): (
            lambda **given: dataclasses.replace(jmp.DynamicLossScale(jnp.float32(8)), **given),
            {
                "loss_scale": (Bad(jnp.ones(2), "shape (2,)"), *map(jnp.float32, (NAN, 0, -1))),
                "counter": count,
                "period": (*interval, 0),
                "factor": factors,
                "min_loss_scale": (Bad(jnp.ones(2), "shape (2,)"), jnp.float32(NAN)),
            },
        ),
        ("from_torch_state_dict", "d"): (
            lambda **given: TORCH | given,
            {
                "scale": scale,
                "_growth_tracker": count,
                "growth_interval": (*interval, 0),
                "growth_factor": factors,
                "backoff_factor": factors,
            },
        ),
    }
    lacking = tuple(Bad(each, "lacks") for each in (None, "x", 1, [], OPAQUE, {}))
    rows = []
    for (function, argument), (make, attributes) in theirs.items():
        convert = getattr(interop, function)
        rows += refused(f"interop.{function}", **{argument: lacking})
        for name, bad in attributes.items():

            def call(value, convert=convert, make=make, name=name):
                return convert(make(**{name: value}))

            rows += refused(f"interop.{function}", call=call, **{argument: bad})
    return rows


TABLE = [
    *refused(
        "DynamicLossScale",
        initial_scale=NO_SCALE,
        min_scale=(*NO_SCALE, 2.0**16),
        max_scale=(*NO_SCALE, 2.0**14),
        growth_interval=NO_COUNT,
        hysteresis=NO_COUNT,
        loss_patience=NO_COUNT,
        growth_factor=(*NO_NUMBER, jnp.float32(4), NAN, INF, -2.0, 0, 1, 1 + 1e-9, HUGE),
        backoff_factor=(*NO_NUMBER, jnp.float32(0.5), NAN, INF, -0.5, 0, 1, 1e-50, HUGE),
    ),
    *refused("FixedLossScale", scale=NO_SCALE),
    *refused("DynamicLossScale.from_config", config=NO_CONFIG),
    *refused("FixedLossScale.from_config", config=NO_CONFIG),
    *(
        each
        for name in ("DynamicLossScale.", "FixedLossScale.", "")
        for each in update_rows(name + "update")
    ),
    *refused("update", loss_scale=NO_POLICY),
    *refused("as_loss_scale", loss_scale=NO_POLICY),
    *refused("init", loss_scale=NO_POLICY),
    *refused("loss_scale_state", opt_state=NO_STATE),
    *refused("scale_loss", loss=BAD_LOSSES, state=(*NO_STATE, *BAD_SCALES, STACKED)),
    *refused(
        "unscale_and_check",
        state=(*NO_STATE, *BAD_SCALES, STACKED),
        axis_name=(*NO_AXIS, *NOT_MAPPED),
    ),
    *refused(
        "value_and_grad",
        call=lambda fun: differentiated(fun=fun, has_aux=True),
        fun=tuple(
            Bad(returning(each), "because of `has_aux=True`")
            for each in (None, "x", 1.0, (1.0,), (1.0, 2.0, 3.0), np.ones(2), {"a": 1.0, "b": 2.0})
        ),
    ),
    *refused(
        "value_and_grad",
        fun=(
            Bad(returning("x"), "str at the root"),
            Bad(returning({"a": True}), "bool at `['a']`"),
        ),
        name="loss",
    ),
    *refused(
        "value_and_grad", transform=(Bad(jax.grad, "grad"), Bad(lambda fun, **_: fun, "function"))
    ),
    *refused("value_and_grad(fun)", state=(*NO_STATE, *BAD_SCALES, STACKED)),
    *refused(
        "tree_where",
        pred=NO_FLAG,
        on_true=(
            Bad(None, "`['w']`"),
            Bad({"v": jnp.ones(3)}, "`['v']`"),
            Bad({"w": jnp.ones(4)}, "(4,) for (3,) at `['w']`"),
        ),
    ),
    *refused(
        "tree_where",
        on_false=(
            Bad({"w": 1.0}, "1.0"),
            Bad({"w": "x"}, "'x'"),
            Bad({"w": jnp.ones(3, jnp.float16)}, "float16"),
        ),
        name="['w']",
    ),
    *refused("with_loss_scaling", inner=NO_OPTIMIZER, loss_scale=NO_POLICY, axis_name=NO_AXIS),
    *refused(
        "with_loss_scaling",
        call=lambda inner: ols.with_loss_scaling(inner).init(PARAMS),
        inner=(
            Bad(TX, "LossScaleState at `.loss_scale_state`"),
            Bad(optax.chain(SGD, TX), "LossScaleState at `[1].loss_scale_state`"),
        ),
    ),
    *refused(
        "with_loss_scaling",
        call=lambda name: ols.with_loss_scaling(SGD, axis_name=name).update(PARAMS, OPT_STATE),
        axis_name=NOT_MAPPED,
    ),
    *refused(
        "with_loss_scaling(inner).update",
        state=(
            *(Bad(None, "NoneType"), Bad("x", "str"), Bad(STATE, "LossScaleState")),
            Bad(OPT_STATE._replace(loss_scale_state=STACKED.value), STACKED.says),
            *(
                Bad(OPT_STATE._replace(loss_scale_state=v), says)
                for v, says in BAD_SCALES + BAD_COUNTS
            ),
        ),
    ),
    *refused("diagnostics.metrics", opt_state=(*NO_STATE, *BAD_SCALES, *BAD_COUNTS)),
    *refused(
        "diagnostics.check_health",
        opt_state=(
            *(*NO_STATE, *BAD_SCALES, *BAD_COUNTS, STACKED),
            Bad(STATE._replace(loss_scale=jnp.float32(NAN)), "got nan"),
            Bad(STATE._replace(loss_scale=jnp.float32(INF)), "got inf"),
            Bad(STATE._replace(loss_scale=jnp.float32(0)), "got 0"),
            Bad(STATE._replace(loss_scale=jnp.float32(-8)), "got -8"),
            Bad(STATE._replace(growth_count=jnp.int32(-5)), "-5"),
        ),
        max_consecutive_skipped=NO_LIMIT,
        loss_scale=NO_POLICY,
    ),
    *refused("diagnostics.gradient_exponents", dtype=NO_SMALL_DTYPE),
    *refused(
        "diagnostics.suggest_scale",
        exponents=(
            *NO_EXPONENTS,
            Bad(EXPONENTS._replace(histogram=jnp.zeros(277)), "empty histogram"),
        ),
        headroom=NO_LIMIT,
        dtype=NO_SMALL_DTYPE,
    ),
    *refused("diagnostics.plot_gradient_exponents", exponents=NO_EXPONENTS, dtype=NO_SMALL_DTYPE),
    *refused(
        "diagnostics.calibrate",
        grad_fn=NO_GRADS,
        state=(*NO_STATE, *BAD_SCALES, *BAD_COUNTS),
        loss_scale=(
            *(*NO_POLICY, Bad(None, "FixedLossScale"), Bad(8, "FixedLossScale")),
            ols.DynamicLossScale(3, min_scale=3, max_scale=3.5),
        ),
        axis_name=(*NO_AXIS, *NOT_MAPPED),
    ),
    *refused("flax.TrainState.create", tx=NO_OPTIMIZER, loss_scale=NO_POLICY, axis_name=NO_AXIS),
    *refused(
        "flax.TrainState.create",
        tx=(Bad(TX, "LossScaleState at `.loss_scale_state`"),),
        name="inner",
    ),
    *refused(
        "flax.TrainState.apply_gradients",
        grads=(
            *(Bad(None, "`['w']`"), Bad("x", "`['w']`"), Bad({"w": None}, "`['w']`")),
            *(Bad({"v": jnp.ones(3)}, "`['v']`"), Bad(PARAMS | {"b": jnp.ones(3)}, "`['b']`")),
            Bad({"w": "x"}, "() for (3,) at `['w']`"),
            Bad({"w": jnp.ones(4)}, "(4,) for (3,) at `['w']`"),
            Bad({"w": jnp.ones((3, 1))}, "(3, 1) for (3,) at `['w']`"),
        ),
    ),
    *refused(
        "flax.TrainState.apply_gradients",
        kwargs=(Bad({"count_skipped": True}, "['count_skipped']"), Bad({"step": 1}, "['step']")),
        name="[",
    ),
    *refused("flax.TrainState.scale_loss", loss=BAD_LOSSES),
    *refused("flax.DynamicScale.value_and_grad", axis_name=NO_AXIS),
    *keras_rows(),
    *refused(
        "keras.ema_params",
        opt_state=(
            *(Bad(None, "0 in a NoneType"), Bad(OPT_STATE, "0 in a WithLossScalingState")),
            Bad([keras.EmaParamsState(PARAMS, jnp.int32(0))] * 2, "found at: `[0]`, `[1]`"),
        ),
    ),
    *interop_rows(),
    *refused(
        "interop.to_torch_state_dict",
        policy=(Bad(ols.DynamicLossScale(hysteresis=2), "got 2"),),
        state=(
            *(*NO_STATE, STACKED),
            Bad(STATE._replace(loss_scale=jnp.float32(NAN)), "got nan"),
            Bad(STATE._replace(loss_scale=jnp.float32(-8)), "got -8.0"),
            Bad(STATE._replace(loss_scale="x"), "loss_scale='x'"),
            Bad(STATE._replace(growth_count=jnp.int32(-5)), "and -5"),
            Bad(STATE._replace(growth_count=1.5), "growth_count=1.5"),
        ),
    ),
    *refused(
        "testing.assert_scaled_once",
        grad_fn=(Bad(lambda *_: None, "all zero"), Bad(lambda *_: "x", "all zero")),
        state=NO_STATE,
    ),
]

ANY_TREE = "any pytree: what holds no numbers passes through, or is left out"
CALLED = "Python refuses to call what is not a function"
CONTAINER = "a container, which JAX fills with leaves of every kind"
EXCEPTION = "an exception, with any arguments"
FORWARDED = "handed on to the caller's function, which knows what it takes"
INNER = "handed on to the inner optimizer, which knows what it takes"
JAX = "JAX refuses it"
PROTOCOL = "a protocol: the classes of users have parameters of their own"
TRUTH = "true or false, as Python takes any object; JAX refuses to take a traced array so"

# The parameters that no row is about: (function, parameter), or a function with all of them.
EXCEPT = {
    "LossScale": PROTOCOL,
    "LossScaleState": CONTAINER,
    "WithLossScalingState": CONTAINER,
    "diagnostics.FirstNonfinite": CONTAINER,
    "diagnostics.GradientExponents": CONTAINER,
    "diagnostics.NonfiniteCounts": CONTAINER,
    "diagnostics.LossScaleStalledError": EXCEPTION,
    "flax.DynamicScaleResult": CONTAINER,
    "flax.DynamicScale": "as in Flax, which checks nothing; JAX builds it with specs and axes",
    "flax.TrainState": "made with `create`, and rebuilt by JAX with leaves of every kind",
    "keras.DecayedState": CONTAINER,
    "keras.EmaParamsState": CONTAINER,
    ("DynamicLossScale", "consecutive_hysteresis"): TRUTH,
    ("FixedLossScale", "skip_nonfinite"): TRUTH,
    ("all_finite", "tree"): ANY_TREE,
    ("unscale_and_check", "grads"): ANY_TREE,
    ("value_and_grad", "argnums"): JAX,
    ("value_and_grad", "has_aux"): TRUTH,
    ("value_and_grad", "kwargs"): "handed on to `transform`, which refuses what it does not know",
    ("value_and_grad(fun)", "args"): FORWARDED,
    ("value_and_grad(fun)", "kwds"): FORWARDED,
    ("with_loss_scaling(inner).init", "params"): INNER,
    ("with_loss_scaling(inner).update", "updates"): INNER,
    ("with_loss_scaling(inner).update", "params"): INNER,
    ("with_loss_scaling(inner).update", "extra_args"): INNER,
    ("diagnostics.nonfinite_report", "grads"): ANY_TREE,
    ("diagnostics.format_nonfinite_report", "report"): "Python refuses what is not a report",
    ("diagnostics.gradient_exponents", "grads"): ANY_TREE,
    ("diagnostics.gradient_exponents", "loss_scale"): JAX,
    ("diagnostics.plot_gradient_exponents", "ax"): "Python refuses what has no method `bar`",
    ("diagnostics.first_nonfinite", "fun"): CALLED,
    ("diagnostics.first_nonfinite", "args"): FORWARDED,
    ("diagnostics.first_nonfinite", "kwargs"): FORWARDED,
    ("diagnostics.calibrate", "args"): FORWARDED,
    ("flax.DynamicScale.value_and_grad", "fun"): CALLED,
    ("flax.DynamicScale.value_and_grad", "argnums"): JAX,
    ("flax.DynamicScale.value_and_grad", "has_aux"): TRUTH,
    ("flax.TrainState.create", "apply_fn"): "kept for the caller; Flax takes None, too",
    ("flax.TrainState.create", "params"): INNER,
    ("flax.TrainState.create", "count_skipped"): TRUTH,
    ("flax.TrainState.create", "kwargs"): "Python refuses fields that are not known",
    ("flax.TrainState.apply_gradients", "value"): INNER,
    ("keras.loss_scale_optimizer", "dynamic"): TRUTH,
    ("keras.loss_scale_optimizer", "use_ema"): TRUTH,
    ("testing.assert_scaled_once", "args"): FORWARDED,
}

CALLS = dict(public_callables()) | {"value_and_grad": differentiated}


def parameters():
    """Return every parameter of every public function."""
    return {
        (name, parameter)
        for name, function in public_callables()
        if name not in EXCEPT
        for parameter in inspect.signature(function).parameters
        if parameter != "self"
    }


def untested(table):
    return parameters() - {(each.function, each.parameter) for each in table} - EXCEPT.keys()


def test_every_parameter_of_every_public_function_has_a_row_or_a_reason():
    assert not untested(TABLE)


def test_every_row_and_every_exception_is_about_a_parameter_that_exists():
    functions = {name for name, _ in public_callables()}
    rows = {(each.function, each.parameter) for each in TABLE}
    exceptions = {each for each in EXCEPT if isinstance(each, tuple)}
    assert not (rows | exceptions) - parameters()
    assert not {each for each in EXCEPT if isinstance(each, str)} - functions
    assert not rows & exceptions


def test_a_parameter_without_a_row_is_noticed():
    for gone in {each[:2] for each in TABLE}:
        assert untested([each for each in TABLE if each[:2] != gone]) == {gone}


@pytest.mark.parametrize("function", GOOD)
def test_without_the_bad_value_the_call_is_accepted(function):
    CALLS[function](**GOOD[function])


def cases():
    for i, each in enumerate(TABLE):
        for j, bad in enumerate(each.bad):
            yield pytest.param(each, bad, id=f"{each.function}-{each.parameter}-{i}-{j}")


def words_for(value):
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
    assert any(word in message for word in ([says] if says else words_for(value))), message
    # What was wrong and what to do about it; a list of all there is to choose from is a remedy.
    assert message.endswith("."), message
    assert ". " in message or "or a dict from `get_config`; got" in message, message


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        *(
            (lambda v, name=f.name: ols.DynamicLossScale(**{name: v}), f.name)
            for f in dataclasses.fields(ols.DynamicLossScale)
            if f.type is not bool
        ),
        (ols.FixedLossScale, "scale"),
        (ols.as_loss_scale, "loss_scale"),
        (ols.init, "loss_scale"),
        (lambda v: ols.with_loss_scaling(SGD, v), "loss_scale"),
        (
            lambda v: ols.diagnostics.check_health(STATE, max_consecutive_skipped=v),
            "max_consecutive_skipped",
        ),
        (lambda v: ols.diagnostics.suggest_scale(EXPONENTS, headroom=v), "headroom"),
        (lambda v: keras.loss_scale_optimizer(SGD, clipnorm=v), "clipnorm"),
        (lambda v: interop.from_torch_state_dict(TORCH | {"scale": v}), "d"),
    ],
)
def test_a_traced_number_is_refused_where_a_python_one_is_needed(function, argument):
    with pytest.raises(TypeError, match=f"`{argument}` must .*(JitTracer|Traced)"):
        jax.jit(lambda v: function(v) and v)(jnp.float32(1))


@pytest.mark.parametrize(
    ("function", "parameter"), [each for each, why in EXCEPT.items() if why is TRUTH]
)
def test_a_traced_array_is_not_true_or_false(function, parameter):
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda v: call_with(function, parameter, v) and None)(jnp.array(True))


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (ols.diagnostics.check_health, "opt_state"),
        (
            lambda s: ols.diagnostics.suggest_scale(EXPONENTS._replace(zero=s.growth_count)),
            "exponents",
        ),
        (
            lambda s: ols.diagnostics.plot_gradient_exponents(
                EXPONENTS._replace(zero=s.growth_count)
            ),
            "exponents",
        ),
        (lambda s: ols.diagnostics.format_nonfinite_report({"a": s[1:4]}), "report"),
        (lambda s: testing.assert_scaled_once(lambda _: s.loss_scale, STATE), "grad_fn"),
        (lambda s: interop.to_torch_state_dict(ols.DynamicLossScale(), s), "state"),
    ],
    ids=["check_health", "suggest_scale", "plot", "format", "assert_scaled_once", "to_torch"],
)
def test_what_answers_on_the_host_refuses_traced_arrays_by_name(function, argument):
    with pytest.raises(TypeError, match=f"`{argument}.* must .*(traced|Traced|JitTracer)"):
        jax.jit(function)(STATE)


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
    assert ols.diagnostics.suggest_scale(EXPONENTS, headroom=np.int64(4)) == 2.0**11
    ols.diagnostics.check_health(STATE, max_consecutive_skipped=np.int32(3))
    counts = ols.diagnostics.gradient_exponents(PARAMS, loss_scale=np.float32(2**17))
    assert int(counts.overflow) == 3
    assert int(ols.update(STATE, np.False_, 8).total_skipped) == 1
    assert float(ols.scale_loss(1.0, STATE._replace(loss_scale=np.int64(4)))) == 4
    tx = keras.loss_scale_optimizer(SGD, np.float32(8), np.int64(3), clipnorm=np.float64(1))
    assert float(tx.init(PARAMS).loss_scale_state.loss_scale) == 8
    _, state = interop.from_torch_state_dict(TORCH | {"scale": np.float32(4)})
    assert float(state.loss_scale) == 4


def test_an_argument_that_is_missing_or_unknown_is_named_by_python():
    for function in (ols.scale_loss, ols.update, ols.with_loss_scaling, ols.FixedLossScale):
        with pytest.raises(TypeError, match=r"missing .* required positional argument"):
            function()
    for function in ("DynamicLossScale", "flax.TrainState.create", "value_and_grad"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
            call_with(function, "typo", 1)
