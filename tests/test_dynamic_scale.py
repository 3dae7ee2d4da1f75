"""`optax_lossscale.flax.DynamicScale` against Flax's own class, which grows one step later.

`Theirs(growth_interval=N - 1)` and `Ours(growth_interval=N)` must agree, apart from the named
differences at the end.
"""

import dataclasses
import functools
import inspect
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, serialization
from flax.training import common_utils, dynamic_scale, train_state
from plain_where import assert_same_bits

import optax_lossscale.flax as ols_flax

pytestmark = pytest.mark.integration

Ours, Theirs = ols_flax.DynamicScale, dynamic_scale.DynamicScale
FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)

# Flax's examples, whose state has one more field.
MODULES = {"theirs": dynamic_scale, "ours": ols_flax}


def pair(growth_interval=2000, scale=65536.0, **hyperparams):
    """Return both classes with arrays in them, such that they should agree."""
    return (
        Ours(growth_interval=growth_interval, scale=scale, **hyperparams),
        Theirs(
            growth_interval=growth_interval - 1,
            scale=jnp.float32(scale),
            fin_steps=jnp.int32(0),
            **hyperparams,
        ),
    )


def assert_equal(actual, expected):
    """Hold a result of ours to one of theirs: every number, shape and dtype."""
    names = "finite", "aux", "grad"
    assert_same_bits(*({name: getattr(r, name) for name in names} for r in (actual, expected)))
    ours, theirs = actual.dynamic_scale, expected.dynamic_scale
    assert_same_bits((ours.scale, ours.fin_steps), (theirs.scale, theirs.fin_steps))


def assert_close(actual, expected):
    """Hold two trees of float32 and integers to each other, but for how XLA fuses them."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, actual, expected)


def in_float16(w, x, b):
    """A loss whose gradient overflows in float16 if the factor or x is large."""
    hidden = w["inner"].astype(jnp.float16) * x.astype(jnp.float16)
    return jnp.sum(hidden.astype(jnp.float32) * jnp.float32(0.01)) + w["outer"] * b


def with_aux(w, x, b):
    return in_float16(w, x, b), {"x": x + 1, "count": jnp.int32(3)}


CASES = {
    "default": (in_float16, {}),
    "the second argument": (in_float16, {"argnums": 1}),
    "a tuple of one": (in_float16, {"argnums": (0,)}),
    "two arguments": (in_float16, {"argnums": (2, 0)}),
    "aux": (with_aux, {"has_aux": True}),
    "two arguments and aux": (with_aux, {"argnums": (0, 2), "has_aux": True}),
}
RULES = [
    {"growth_interval": 3},
    {"growth_interval": 1, "scale": 2.0**-3},
    {"growth_interval": 2, "scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25},
    {"growth_interval": 4, "minimum_scale": 64.0},
    {"growth_interval": 2, "scale": 0.25, "minimum_scale": None},
    {"growth_interval": 2, "scale": 2.0, "minimum_scale": 16.0},
    {"growth_interval": 3, "growth_factor": 1.0},
    {"growth_interval": 3, "scale": 1.0, "backoff_factor": 1},
    {"growth_interval": -7, "minimum_scale": np.float64(0.0)},
]


def arguments(steps, seed=0):
    """Return random arguments for `steps` steps, one in six of which is bad whatever the factor."""
    rng = np.random.default_rng(seed)
    w = {"inner": rng.normal(size=(steps, 3)), "outer": rng.normal(size=steps)}
    x, b = rng.normal(size=(steps, 3)), rng.normal(size=steps)
    kind = rng.integers(18, size=steps)
    for bad, value in enumerate((np.inf, -np.inf, np.nan)):
        x[kind == bad, bad] = value
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (w, x, b))


@functools.partial(jax.jit, static_argnums=(0, 3))
def run(fun, start, args, options=()):
    """Return the results of all steps, stacked."""

    def step(ds, args):
        result = ds.value_and_grad(fun, **dict(options))(*args)
        return result.dynamic_scale, result

    return jax.lax.scan(step, start, args)[1]


@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_aux_are_those_of_flax(case):
    fun, options = CASES[case]
    args = arguments(300)
    results = [run(fun, ds, args, tuple(options.items())) for ds in pair(growth_interval=4)]
    assert_equal(*results)
    assert 50 < np.sum(np.asarray(results[0].finite)) < 295  # both kinds of steps


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_factor_moves_at_the_steps_of_flax(rule):
    results = [run(in_float16, ds, arguments(300, seed=1)) for ds in pair(**rule)]
    assert_equal(*results)
    assert len(set(np.asarray(results[0].dynamic_scale.scale).tolist())) >= 3


def test_factors_that_are_no_powers_of_two_agree_to_a_unit_in_the_last_place():
    rule = {"growth_interval": 2, "growth_factor": 1.7, "backoff_factor": 0.3}
    ours, theirs = (run(in_float16, ds, arguments(300)) for ds in pair(**rule))
    assert_same_bits(ours.dynamic_scale.scale, theirs.dynamic_scale.scale)
    assert_same_bits(ours.finite, theirs.finite)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=3e-7), ours.grad, theirs.grad)


@pytest.mark.parametrize("axis_name", ["batch", None])
def test_replicas_average_and_agree_as_in_flax(axis_name):
    w, x, b = arguments(200)
    sharded = jax.tree.map(lambda a: a.reshape(2, 100, *a.shape[1:]), (w, x, b))
    options = (("axis_name", axis_name), ("has_aux", True))
    results = []
    for ds in pair(growth_interval=3):
        replicated = jax_utils.replicate(ds, jax.devices()[:2])
        mapped = jax.pmap(
            lambda ds, args: run(with_aux, ds, args, options), "batch", devices=jax.devices()[:2]
        )
        results.append(mapped(replicated, sharded))
    assert_equal(*results)
    finite = np.asarray(results[0].finite)
    assert (finite[0] == finite[1]).all() == (axis_name is not None)


def test_a_mean_over_replicas_that_overflows_is_not_finite_as_in_flax():
    def mapped(ds):
        return jax.vmap(
            ds.value_and_grad(lambda w, x: w * x, axis_name="batch"), (None, 0), axis_name="batch"
        )(jnp.float32(1), jnp.full(2, FLOAT32_MAX))

    ours, theirs = (mapped(ds) for ds in pair(scale=1.0))
    assert_equal(ours, theirs)
    assert not ours.finite.any()


# What Flax's class was seen to do, with its `growth_interval`.
SEQUENCES = [
    ({"scale": 1.0, "growth_interval": 2}, "TTTTTTTTTT", "1 1 2 2 2 4 4 4 8 8", "1201201201"),
    ({"scale": 1.0, "growth_interval": 1}, "TTTFTT", "1 2 2 1 1 2", "101010"),
    ({"scale": 4.0, "growth_interval": 2}, "TTFTTT", "4 4 2 2 2 4", "120120"),
]


@pytest.mark.parametrize(("rule", "flags", "scales", "counts"), SEQUENCES)
@pytest.mark.parametrize("which", ["ours", "theirs"])
def test_known_sequences(which, rule, flags, scales, counts):
    rule = {**rule, "growth_interval": rule["growth_interval"] + 1}
    ds = dict(zip(("ours", "theirs"), pair(**rule), strict=True))[which]
    x = jnp.where(jnp.array([flag == "T" for flag in flags]), 1.0, jnp.inf)
    after = run(lambda w, x: w * x, ds, (jnp.ones(len(flags)), x)).dynamic_scale
    assert after.scale.tolist() == [float(s) for s in scales.split()]
    assert after.fin_steps.tolist() == [int(c) for c in counts]


def test_constructor_and_fields_are_those_of_flax():
    ours, theirs = (list(inspect.signature(cls).parameters.values()) for cls in (Ours, Theirs))
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]
    assert isinstance(Ours(), Theirs)
    for field in dataclasses.fields(Theirs):
        assert getattr(Ours(), field.name) == getattr(Theirs(), field.name), field.name
    given = 4.0, 0.25, 7, 3, 1024.0, 2.0
    assert [getattr(Ours(*given), f.name) for f in dataclasses.fields(Ours)] == list(given)


def test_the_result_is_flaxs_own():
    result = Ours().value_and_grad(lambda w: w)(1.0)
    assert type(result) is dynamic_scale.DynamicScaleResult
    assert type(result.dynamic_scale) is Ours


def test_keyword_arguments_reach_the_function():
    result = Ours().value_and_grad(lambda w, *, x: w * x)(2.0, x=3.0)
    assert (float(result.aux), float(result.grad)) == (6.0, 3.0)


# Existing training code, in which nothing but the import changes.


class ImageNetState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: dynamic_scale.DynamicScale


class ImageNetModel(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(4, (3, 3), use_bias=False, dtype=jnp.float16)(x)
        x = nn.BatchNorm(not train, momentum=0.9, dtype=jnp.float16)(x)
        x = jnp.mean(nn.relu(x), axis=(1, 2))
        return nn.Dense(10, dtype=jnp.float16)(x).astype(jnp.float32)


def imagenet_train_step(state, batch, learning_rate_fn):
    """Perform a single training step, as Flax's ImageNet example does."""

    def loss_fn(params):
        logits, new_model_state = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
        )
        one_hot_labels = common_utils.onehot(batch["label"], num_classes=10)
        loss = jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot_labels))
        weight_penalty_params = jax.tree_util.tree_leaves(params)
        weight_l2 = sum(jnp.sum(x**2) for x in weight_penalty_params if x.ndim > 1)
        loss = loss + 0.0001 * 0.5 * weight_l2
        return loss, (new_model_state, logits)

    dynamic_scale = state.dynamic_scale
    lr = learning_rate_fn(state.step)
    if dynamic_scale:
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
        dynamic_scale, is_fin, aux, grads = grad_fn(state.params)
        # dynamic loss takes care of averaging gradients across replicas
    new_model_state, logits = aux[1]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    metrics = {"loss": jax.lax.pmean(jnp.mean(loss), "batch"), "learning_rate": lr}
    new_state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
    if dynamic_scale:
        # if is_fin == False the gradients contain Inf/NaNs and optimizer state and
        # params should be restored (= skip this step).
        new_state = new_state.replace(
            opt_state=jax.tree_util.tree_map(
                functools.partial(jnp.where, is_fin), new_state.opt_state, state.opt_state
            ),
            params=jax.tree_util.tree_map(
                functools.partial(jnp.where, is_fin), new_state.params, state.params
            ),
            dynamic_scale=dynamic_scale,
        )
        metrics["scale"] = dynamic_scale.scale
    return new_state, metrics


def test_the_imagenet_example_runs_with_the_import_changed():
    finals, scales = {}, {}
    for name, module in MODULES.items():
        model = ImageNetModel()
        variables = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))
        learning_rate_fn = optax.cosine_decay_schedule(0.1, 100)
        state = ImageNetState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=optax.sgd(learning_rate_fn, momentum=0.9, nesterov=True),
            batch_stats=variables["batch_stats"],
            dynamic_scale=module.DynamicScale(growth_interval=2 + (name == "ours"), scale=2.0**22),
        )
        state = jax_utils.replicate(state, jax.devices()[:2])
        p_train_step = jax.pmap(
            functools.partial(imagenet_train_step, learning_rate_fn=learning_rate_fn),
            axis_name="batch",
            devices=jax.devices()[:2],
        )
        rng = np.random.default_rng(0)
        scales[name] = []
        for _ in range(12):
            image = rng.normal(size=(2, 4, 8, 8, 1)).astype(np.float32)
            batch = {"image": image, "label": rng.integers(10, size=(2, 4))}
            state, metrics = p_train_step(state, batch)
            scales[name].append(float(metrics["scale"][0]))
        finals[name] = jax.device_get((state.params, state.opt_state, metrics))
    assert_close(finals["ours"], finals["theirs"])
    assert scales["ours"] == scales["theirs"]
    assert min(scales["ours"]) < scales["ours"][-1] < 2**22  # backed off, and has grown since


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8, dtype=jnp.float16)(tokens)
        x = nn.LayerNorm(dtype=jnp.float16)(nn.relu(nn.Dense(8, dtype=jnp.float16)(x)))
        return nn.Dense(16, dtype=jnp.float16)(x)


class LanguageModelState(train_state.TrainState):
    dynamic_scale: dynamic_scale.DynamicScale


def wmt_train_step(state, batch):
    """Perform a single training step, as Flax's language-model examples (WMT, LM1B) do."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"])
        loss = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["targets"]
        )
        return jnp.sum(loss * batch["weights"]) / jnp.sum(batch["weights"]), logits

    if state.dynamic_scale:
        # dynamic scale takes care of averaging gradients across replicas
        grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        dynamic_scale, is_fin, (loss, logits), grads = grad_fn(state.params)
        state = state.replace(dynamic_scale=dynamic_scale)
    new_state = state.apply_gradients(grads=grads)
    metrics = {"loss": loss, "denominator": jnp.sum(batch["weights"]), "logits": logits}
    if dynamic_scale:
        select_fn = functools.partial(jnp.where, is_fin)
        new_state = new_state.replace(
            opt_state=jax.tree_util.tree_map(select_fn, new_state.opt_state, state.opt_state),
            params=jax.tree_util.tree_map(select_fn, new_state.params, state.params),
        )
        metrics["loss_scale"] = dynamic_scale.scale * metrics["denominator"]
    return new_state, metrics


def test_the_language_model_example_runs_with_the_import_changed():
    finals, scales, traces = {}, {}, {"ours": 0, "theirs": 0}
    for name, module in MODULES.items():
        model = LanguageModel()
        state = LanguageModelState.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))["params"],
            tx=optax.adamw(1e-2, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1),
            dynamic_scale=module.DynamicScale(growth_interval=3 + (name == "ours"), scale=2.0**20),
        )

        @jax.jit
        def train_step(state, batch, name=name):
            traces[name] += 1
            return wmt_train_step(state, batch)

        rng = np.random.default_rng(0)
        scales[name] = []
        for _ in range(15):
            tokens = rng.integers(16, size=(4, 5))
            batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((4, 4))}
            state, metrics = train_step(state, batch)
            scales[name].append(float(metrics["loss_scale"]))
        finals[name] = jax.device_get((state.params, state.opt_state, metrics["loss"]))
    assert_close(finals["ours"], finals["theirs"])
    assert scales["ours"] == scales["theirs"]
    assert min(scales["ours"]) < scales["ours"][0]  # has backed off
    assert traces == {"ours": 1, "theirs": 2}


# The differences.


def test_it_grows_on_the_interval_and_flax_one_step_later():
    x = (jnp.ones(4), jnp.ones(4))
    scales = {
        cls: run(lambda w, x: w * x, cls(growth_interval=3, scale=jnp.float32(8)), x).dynamic_scale
        for cls in (Ours, Theirs)
    }
    assert scales[Ours].scale.tolist() == [8, 8, 16, 16]
    assert scales[Theirs].scale.tolist() == [8, 8, 8, 16]


@pytest.mark.parametrize(
    ("start", "in_flax"),
    [
        ({}, 2),
        ({"scale": 1024.0}, 2),
        ({"scale": 1024}, 2),
        ({"scale": 1024.0, "fin_steps": 1}, 2),
        ({"scale": jnp.asarray(1024.0)}, 2),  # weakly typed
        ({"scale": np.float32(1024)}, 1),
    ],
    ids=str,
)
def test_a_step_is_traced_once_and_in_flax_twice(start, in_flax):
    for cls, expected in ((Ours, 1), (Theirs, in_flax)):
        traces = []

        @jax.jit
        def step(ds, w, traces=traces):
            traces.append(None)
            return ds.value_and_grad(lambda w: w**2)(w).dynamic_scale

        ds = cls(**start)
        for _ in range(4):
            ds = step(ds, jnp.float32(1))
        assert len(traces) == expected


def test_every_leaf_keeps_its_type():
    before = jax.tree.leaves(Ours())
    after = jax.tree.leaves(Ours().value_and_grad(lambda w: w)(1.0).dynamic_scale)
    expected = [(jnp.dtype("int32"), (), False), (jnp.dtype("float32"), (), False)]
    for leaves in (before, after):
        assert [(x.dtype, x.shape, x.weak_type) for x in leaves] == expected


def test_a_long_run_of_finite_steps_is_counted():
    ds = Ours(growth_interval=10**6, fin_steps=2**16)
    assert int(ds.value_and_grad(jnp.sum)(jnp.ones(2)).dynamic_scale.fin_steps) == 2**16 + 1


@pytest.mark.usefixtures("x64")
def test_it_stays_float32_where_jax_has_float64():
    ds = Ours(scale=1024.0)
    assert (ds.scale.dtype, ds.fin_steps.dtype) == (jnp.float32, jnp.int32)
    result = ds.value_and_grad(jnp.sum)(jnp.ones(2, jnp.float64) / 3)
    assert (result.dynamic_scale.scale.dtype, result.grad.dtype) == (jnp.float32, jnp.float64)


def test_the_factor_stays_below_the_ceiling_and_in_flax_grows_to_the_largest_float32():
    args = (jnp.ones(7), jnp.zeros(7))
    ours, theirs = (
        run(lambda w, x: w * x, ds, args).dynamic_scale.scale.tolist()
        for ds in pair(growth_interval=1, scale=FLOAT32_MAX / 8)
    )
    assert max(ours) == 2.0**126
    assert max(theirs) == FLOAT32_MAX


@pytest.mark.parametrize("minimum_scale", [None, 0.0, 1e-40, 2.0**-126, jnp.finfo("float32").tiny])
def test_the_factor_never_backs_off_below_the_smallest_normal_number(minimum_scale):
    ds = Ours(scale=2.0**-125, minimum_scale=minimum_scale)
    after = run(lambda w, x: w * x, ds, (jnp.ones(3), jnp.full(3, jnp.inf))).dynamic_scale
    assert after.scale.tolist() == [2.0**-126] * 3


def test_a_factor_beyond_the_ceiling_that_flax_saved_gives_true_gradients():
    result = jax.jit(lambda ds: ds.value_and_grad(lambda w: w * 0.25)(0.0))(
        Ours().replace(scale=jnp.float32(FLOAT32_MAX))
    )
    assert (float(result.grad), float(result.dynamic_scale.scale)) == (0.25, 2.0**126)


def test_a_count_beyond_the_interval_grows_at_the_next_finite_step_and_in_flax_never():
    ours, theirs = (
        cls(growth_interval=2, fin_steps=jnp.int32(5), scale=jnp.float32(8)).value_and_grad(
            lambda w: w
        )(1.0)
        for cls in (Ours, Theirs)
    )
    assert (float(ours.dynamic_scale.scale), float(theirs.dynamic_scale.scale)) == (16, 8)


def test_a_loss_near_the_largest_number_is_returned_and_in_flax_overflows():
    ours, theirs = (ds.value_and_grad(lambda w: w + 1e38)(1.0) for ds in pair())
    assert float(ours.aux) == np.float32(1e38)
    assert float(theirs.aux) == np.inf
    assert ours.finite
    assert theirs.finite


def test_a_float16_loss_stays_float16_and_says_why_that_is_bad():
    with pytest.warns(UserWarning, match="The loss is float16"):
        ours, theirs = (
            ds.value_and_grad(lambda w: w.astype(jnp.float16) ** 2)(jnp.float32(1))
            for ds in pair(scale=128.0)
        )
    assert (ours.aux.dtype, theirs.aux.dtype) == (jnp.float16, jnp.float32)
    assert_same_bits(ours.grad, theirs.grad)


@pytest.mark.usefixtures("x64")
def test_float64_gradients_keep_their_type_and_in_flax_do_not():
    ours, theirs = (
        ds.value_and_grad(lambda w: jnp.sum(w**3))(jnp.array([1 / 3], jnp.float64)) for ds in pair()
    )
    assert (ours.grad.dtype, theirs.grad.dtype) == (jnp.float64, jnp.float32)
    np.testing.assert_allclose(ours.grad, 1 / 3, rtol=1e-15)


def test_fp8_metadata_are_not_divided_and_in_flax_are():
    @jax.custom_vjp
    def note(x, history):
        del history
        return x

    note.defvjp(lambda x, history: (x, (x, history)), lambda res, g: (g, res[0]))

    def loss_fn(params):
        return note(params["params"], params["_overwrite_with_gradient"]) ** 2

    params = {"params": jnp.float32(3), "_overwrite_with_gradient": jnp.float32(0)}
    ours, theirs = (ds.value_and_grad(loss_fn)(params).grad for ds in pair(scale=8.0))
    assert ours == {"params": 6, "_overwrite_with_gradient": 3}
    assert theirs == {"params": 6, "_overwrite_with_gradient": 3 / 8}


@pytest.mark.parametrize(
    ("hyperparams", "scale"),
    [
        ({"minimum_scale": 2.0**127, "backoff_factor": 0.5}, 2.0**126),
        ({"growth_factor": float("inf"), "growth_interval": 1}, 2.0**126),
    ],
    ids=str,
)
def test_no_hyperparameter_moves_the_loss_scale_out_of_its_bounds(hyperparams, scale):
    slope = jnp.inf if "minimum_scale" in hyperparams else 1.0
    after = Ours(**hyperparams).value_and_grad(lambda w: w * slope)(1.0).dynamic_scale
    assert float(after.scale) == scale


# A pytree like any other.


def test_it_can_be_a_tree_of_axes_or_of_nothing():
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), Ours(scale=8.0))
    axes = jax.tree.map(lambda _: 0, stacked)
    assert jax.tree.leaves(axes) == [0, 0]
    assert all(type(axis) is int for axis in jax.tree.leaves(axes))
    result = jax.vmap(
        lambda ds, w: ds.value_and_grad(lambda w: w)(w).dynamic_scale, (axes, None), out_axes=axes
    )(stacked, 1.0)
    assert result.scale.tolist() == [8, 16]
    assert jax.tree.leaves(jax.tree.map(lambda _: None, stacked)) == []
    shapes = jax.eval_shape(Ours)
    assert [type(leaf) for leaf in jax.tree.leaves(shapes)] == [jax.ShapeDtypeStruct] * 2


def test_it_can_be_donated_and_fetched():
    step = jax.jit(lambda ds: ds.value_and_grad(lambda w: w)(1.0).dynamic_scale, donate_argnums=0)
    first, other = Ours(), Ours()
    after = step(first)
    assert first.scale.is_deleted()
    assert not other.fin_steps.is_deleted()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(jax.device_get(after)))


NOT_DEFAULT = {
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "fin_steps": 5,
    "scale": 12.0,
    "minimum_scale": 2.0,
}
ROUND_TRIPS = {
    "flatten": lambda ds: jax.tree.unflatten(jax.tree.structure(ds), jax.tree.leaves(ds)),
    "jit": jax.jit(lambda ds: ds),
    "pickle": lambda ds: pickle.loads(pickle.dumps(ds)),  # noqa: S301, our own
    "replace": lambda ds: Ours().replace(**dataclasses.asdict(ds)),
    "bytes": lambda ds: serialization.from_bytes(
        ds.replace(fin_steps=0, scale=1.0), serialization.to_bytes(ds)
    ),
    "Flax's state dict": lambda ds: serialization.from_state_dict(
        ds.replace(fin_steps=0, scale=1.0), serialization.to_state_dict(Theirs(**NOT_DEFAULT))
    ),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_every_field_survives(name):
    before = Ours(**NOT_DEFAULT)
    after = ROUND_TRIPS[name](before)
    for field in dataclasses.fields(Ours):
        assert getattr(after, field.name) == NOT_DEFAULT[field.name], field.name
    assert_same_bits(after, before)
