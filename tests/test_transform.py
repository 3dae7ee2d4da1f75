"""`with_loss_scaling`: what the inner optimizer sees, what a step returns, and what is refused."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec
from plain_where import assert_same_bits

import optax_lossscale as ols

NAN, INF = float("nan"), float("inf")

# What makes a step bad: what stands in the gradients and the loss, and whether the factor, 8 with
# `backoff_factor=0.5`, backs off.
BAD_STEPS = {
    "an infinite gradient": (INF, None, 4.0),
    "a negative infinite gradient": (-INF, None, 4.0),
    "a NaN gradient": (NAN, None, 4.0),
    "an infinite gradient of a finite loss": (INF, 1.0, 4.0),
    "a NaN loss": (1.0, NAN, 8.0),
    "an infinite loss": (1.0, INF, 8.0),
    "a NaN loss and a NaN gradient": (NAN, NAN, 8.0),
}

# Optimizers of which a wrapper inside is hidden, and where the error must say it is.
NESTED = {
    "alone": (lambda tx: tx, "`.loss_scale_state`"),
    "chain": (lambda tx: optax.chain(optax.clip(1.0), tx), "`[1].loss_scale_state`"),
    "masked": (lambda tx: optax.masked(tx, {"w": True}), "`.inner_state.loss_scale_state`"),
    "masked in a chain in a chain": (
        lambda tx: optax.chain(optax.chain(optax.masked(tx, {"w": True})), optax.scale(1.0)),
        "`[0][0].inner_state.loss_scale_state`",
    ),
    "partition": (
        lambda tx: optax.partition({"a": tx}, {"w": "a"}),
        "`.inner_states['a'].inner_state.loss_scale_state`",
    ),
    "MultiSteps": (lambda tx: optax.MultiSteps(tx, 2), "`.inner_opt_state.loss_scale_state`"),
    "apply_if_finite": (
        lambda tx: optax.apply_if_finite(tx, 2),
        "`.inner_state.loss_scale_state`",
    ),
}

X = jnp.ones(2)
HALVES = (jnp.float16, jnp.bfloat16)
MIXED = [(p, g) for p in (*HALVES, jnp.float32) for g in (*HALVES, jnp.float32)]

integration = pytest.mark.integration


def dynamic(initial_scale=8.0, **kwargs):
    return ols.DynamicLossScale(initial_scale=initial_scale, **kwargs)


def recording(seen, state=()):
    """An inner transformation that appends what each update is given to `seen`."""

    def update(updates, state, params=None, **extra_args):
        arrays = {k: v for k, v in extra_args.items() if not callable(v)}
        jax.debug.callback(
            lambda *given: seen.append(jax.tree.map(np.asarray, given)), updates, params, arrays
        )
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda _: state, update)


def passing():
    """An inner transformation that returns what it is given."""
    return optax.stateless(lambda updates, _: updates)


def casting(dtype):
    return optax.stateless(lambda updates, _: jax.tree.map(lambda u: u.astype(dtype), updates))


def train(tx, params, grads_of, steps):
    """Return the params and the loss scale after each step, under jit; `grads_of(params, step)`."""
    update = jax.jit(tx.update)
    state, history = tx.init(params), []
    for step in range(steps):
        grads = grads_of(params, ols.loss_scale_state(state).loss_scale, step)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append((params, float(state.loss_scale_state.loss_scale)))
    return history, state


def types(tree):
    return [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]


# What the inner optimizer sees.


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_inner_optimizer_sees_true_gradients_and_what_else_it_is_given(transform):
    seen = []
    tx = ols.with_loss_scaling(recording(seen), dynamic())
    update = transform(functools.partial(tx.update, value_fn=jnp.sum))
    params, grads = {"w": jnp.full(2, 5.0)}, {"w": jnp.array([16.0, -4.0])}
    update(grads, tx.init(params), params, value=jnp.float32(3.0), grad=grads, key=jnp.int32(7))
    jax.effects_barrier()
    ((updates, seen_params, extra_args),) = seen
    np.testing.assert_array_equal(updates["w"], [2.0, -0.5])
    np.testing.assert_array_equal(seen_params["w"], [5.0, 5.0])
    assert extra_args["value"] == 3.0
    assert extra_args["key"] == 7
    np.testing.assert_array_equal(extra_args["grad"]["w"], [16.0, -4.0])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("grad", "loss", "scale"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_on_a_bad_step_the_inner_optimizer_sees_zeros(grad, loss, scale, transform):
    seen = []
    tx = ols.with_loss_scaling(recording(seen), dynamic())
    grads = {
        "bad": jnp.array([1.0, grad]),
        "good": jnp.ones((2, 2), jnp.float16),
        "complex": jnp.array([1j]),
        "index": jnp.array([3]),
    }
    params = jax.tree.map(lambda g: g * 0 + 5, {k: g for k, g in grads.items() if k != "bad"})
    value = {} if loss is None else {"value": loss}
    out, state = transform(tx.update)(grads, tx.init(params), params, grad=grads, key=7, **value)
    jax.effects_barrier()
    ((updates, seen_params, extra_args),) = seen
    for given in (updates, extra_args["grad"]):
        for name in ("bad", "good", "complex"):
            np.testing.assert_array_equal(given[name], np.zeros_like(given[name]))
    np.testing.assert_array_equal(updates["index"], [3])
    assert extra_args.get("value", 0.0) == 0.0
    assert extra_args["key"] == 7
    jax.tree.map(np.testing.assert_array_equal, seen_params, params)
    assert state.loss_scale_state.loss_scale == scale
    assert state.loss_scale_state.total_skipped == 1
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(out))


def test_clipping_inside_neither_sees_scaled_gradients_nor_hides_an_overflow():
    tx = ols.with_loss_scaling(optax.clip(1.0), dynamic())
    updates, state = tx.update(jnp.array([4.0, 80.0]), tx.init(jnp.zeros(2)))
    np.testing.assert_array_equal(updates, [0.5, 1.0])
    updates, state = tx.update(jnp.array([4.0, INF]), state)
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert state.loss_scale_state.loss_scale == 4.0


def test_extra_arguments_are_dropped_by_an_inner_optimizer_that_takes_none():
    tx = ols.with_loss_scaling(optax.scale(-1.0), dynamic())
    updates, _ = tx.update(jnp.float32(8.0), tx.init(jnp.float32(0.0)), value=1.0, other=object())
    assert updates == -1.0


def test_an_extra_argument_that_the_inner_optimizer_misses_is_its_own_error():
    tx = ols.with_loss_scaling(optax.contrib.reduce_on_plateau())
    params = jnp.ones(2)
    with pytest.raises(TypeError, match="'value'"):
        tx.update(params, tx.init(params), params)


@integration
def test_the_loss_reaches_an_optimizer_that_needs_it():
    tx = ols.with_loss_scaling(optax.polyak_sgd(max_learning_rate=10.0), dynamic())
    params = jnp.float32(2.0)
    # loss p**2 / 2 = 2, gradient 2, so Polyak's step is 2 * 2 / 2**2.
    updates, state = tx.update(jnp.float32(16.0), tx.init(params), params, value=jnp.float32(2.0))
    assert updates == -1.0
    updates, state = tx.update(jnp.float32(16.0), state, params, value=jnp.float32(NAN))
    assert_same_bits(updates, jnp.float32(-0.0))
    assert state.loss_scale_state.loss_scale == 8.0


# The loss decides, if it is given.


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_a_loss_that_is_forgiven_spends_no_hysteresis(hysteresis):
    tx = ols.with_loss_scaling(passing(), dynamic(hysteresis=hysteresis, loss_patience=4))
    grads, state = jnp.array([INF]), tx.init(jnp.zeros(1))
    for value in (NAN, INF, -INF):
        _, state = tx.update(grads, state, value=value)
    assert [leaf.item() for leaf in state.loss_scale_state] == [8.0, 0, 0, 3, 3]
    _, state = tx.update(grads, state, value=1.0)
    assert state.loss_scale_state.overflow_count == 1
    assert state.loss_scale_state.loss_scale == (4.0 if hysteresis == 1 else 8.0)


@pytest.mark.parametrize(
    ("value", "applied"),
    [
        (jnp.array([1.0, NAN]), False),
        ({"main": jnp.float16(1.0), "aux": jnp.float32(INF)}, False),
        (np.float32(NAN), False),
        (jnp.array([1.0, 2.0]), True),
        (jnp.int32(3), True),
        (None, True),
    ],
)
def test_any_loss_will_do(value, applied):
    tx = ols.with_loss_scaling(passing(), dynamic())
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=value)
    assert (state.loss_scale_state.total_skipped == 0) == applied


# What checks nothing.


@pytest.mark.parametrize("policy", [ols.FixedLossScale(8.0, skip_nonfinite=False), None])
def test_what_checks_nothing_applies_nan_and_counts_nothing(policy):
    seen = []
    tx = ols.with_loss_scaling(recording(seen), policy)
    before = tx.init(jnp.ones(2))
    updates, after = tx.update(jnp.array([NAN, 16.0]), before, value=NAN)
    np.testing.assert_array_equal(updates, [NAN, 16.0 if policy is None else 2.0])
    assert_same_bits(after, before)
    assert np.isnan(seen[0][2]["value"])


def test_what_checks_nothing_is_not_in_the_program_and_needs_no_agreement():
    tx = ols.with_loss_scaling(optax.sgd(0.1), None, axis_name="no such axis")
    params = jnp.ones(2)
    program = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params, value=1.0))
    assert not re.search("is_finite|select_n|pmin", program)


@integration
def test_without_loss_scaling_the_state_has_the_same_shape_and_the_steps_the_same_bits():
    params, grads = jnp.array([1.0, 2.0]), jnp.array([0.3, -0.7])
    plain, off = optax.adam(0.1), ols.with_loss_scaling(optax.adam(0.1), None)
    on = ols.with_loss_scaling(optax.adam(0.1), "dynamic")
    assert jax.tree.structure(off.init(params)) == jax.tree.structure(on.init(params))
    assert types(off.init(params)) == types(on.init(params))
    updates, state = off.update(grads, off.init(params), params)
    assert_same_bits((updates, state.inner_state), plain.update(grads, plain.init(params), params))


# Leaves of every kind.


@pytest.mark.parametrize(
    ("dtype", "zero"),
    [
        (jnp.float16, -0.0),
        (jnp.bfloat16, -0.0),
        (jnp.float8_e4m3fn, -0.0),
        (jnp.float8_e5m2, -0.0),
        (jnp.float8_e4m3fnuz, 0.0),  # has no negative zero: that pattern is its NaN
        (jnp.complex64, complex(-0.0, -0.0)),
        (jnp.int32, 0),
        (jnp.uint8, 0),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_skipped_updates_add_nothing_in_any_dtype(dtype, zero, transform):
    tx = ols.with_loss_scaling(casting(dtype), dynamic())
    grads = jnp.array([[8.0, INF]])
    updates, _ = transform(tx.update)(grads, tx.init(grads))
    assert_same_bits(updates, jnp.asarray(np.full((1, 2), zero), dtype))


@pytest.mark.parametrize("bad", [False, True])
def test_leaves_that_are_no_numbers_pass_through(bad):
    updates = {
        "w": jnp.array([8.0, INF if bad else 8.0]),
        "none": None,
        "masked": optax.MaskedNode(),
        "key": jax.random.key(3),
        "flag": jnp.array(True),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "empty": jnp.zeros((0, 3)),
        "name": "frozen",
    }
    tx = ols.with_loss_scaling(passing(), dynamic())
    out, _ = tx.update(updates, tx.init(updates))
    assert jax.tree.structure(out) == jax.tree.structure(updates)
    for name in ("key", "flag", "float0"):
        assert_same_bits(out[name], updates[name])
    assert out["name"] == "frozen"
    np.testing.assert_array_equal(out["w"], [0.0, 0.0] if bad else [1.0, 1.0])
    assert np.signbit(out["w"]).all() == bad


def test_an_integer_gradient_is_not_unscaled_and_adds_nothing_on_a_bad_step():
    tx = ols.with_loss_scaling(passing(), dynamic())
    state = tx.init(None)
    updates, state = tx.update({"n": jnp.array([16]), "w": jnp.ones(1)}, state)
    np.testing.assert_array_equal(updates["n"], [16])
    updates, state = tx.update({"n": jnp.array([16]), "w": jnp.full(1, NAN)}, state)
    np.testing.assert_array_equal(updates["n"], [0])
    assert updates["n"].dtype == jnp.int32


@integration
@pytest.mark.parametrize("part", [complex(NAN, 0.0), complex(0.0, INF)])
def test_one_bad_part_of_a_complex_gradient_skips_and_leaves_both_signs_of_zero(part):
    params = {"z": jnp.array([complex(-0.0, -0.0), complex(0.0, -0.0)])}
    tx = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9), dynamic())
    grads = {"z": jnp.array([8.0 + 8.0j, part])}
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert_same_bits(state.inner_state, tx.init(params).inner_state)
    assert_same_bits(optax.apply_updates(params, updates), params)


@integration
@pytest.mark.parametrize(("param_dtype", "grad_dtype"), MIXED, ids=lambda d: d.__name__)
def test_no_mixture_of_dtypes_changes_the_types_of_the_state(param_dtype, grad_dtype):
    params = {"w": jnp.array([1.0, -0.0, 3.0], param_dtype), "s": jnp.asarray(-0.0, param_dtype)}
    tx = ols.with_loss_scaling(optax.adamw(0.1), dynamic())
    state = tx.init(params)
    grads = jax.tree.map(lambda p: jnp.full((4, *p.shape), 8.0, grad_dtype), params)
    grads["w"] = grads["w"].at[2, 1].set(INF)

    def body(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), params

    (new_params, new_state), history = jax.jit(functools.partial(jax.lax.scan, body))(
        (params, state), grads
    )
    assert types((new_params, new_state)) == types((params, state))
    assert new_state.loss_scale_state.total_skipped == 1
    assert_same_bits(history["w"][3], history["w"][2])
    assert not np.array_equal(history["w"][2], history["w"][1])
    _, eager_state = tx.update(jax.tree.map(lambda g: g[0], grads), state, params)
    assert types(eager_state) == types(state)


@integration
def test_half_precision_gradients_are_unscaled_in_float32():
    # 2**-30 is zero in float16, as which the inner optimizer must not see it.
    tx = ols.with_loss_scaling(optax.scale(1.0), ols.FixedLossScale(2.0**20))
    grads = jnp.array([2.0**-10], jnp.float16)
    updates, _ = tx.update(grads, tx.init(grads), grads)
    assert_same_bits(updates, jnp.array([2.0**-30], jnp.float32))


@pytest.mark.parametrize("bad_first", [False, True])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_python_numbers_in_the_inner_state_become_arrays(bad_first, transform):
    class Counting(NamedTuple):
        count: int
        rate: float
        done: bool

    def update(updates, state, params=None):
        del params
        return updates, Counting(state.count + 1, state.rate * 0.5, state.done)

    inner = optax.GradientTransformation(lambda _: Counting(3, 0.5, done=True), update)
    tx = ols.with_loss_scaling(inner, dynamic())
    grads = jnp.array([INF if bad_first else 8.0])
    _, first = transform(tx.update)(grads, tx.init(grads))
    count, rate, done = first.inner_state
    assert (count, rate, done) == ((3, 0.5, True) if bad_first else (4, 0.25, True))
    _, second = transform(tx.update)(jnp.ones(1), first)
    assert types(second) == types(first)
    assert second.inner_state.count == count + 1


def test_a_transformation_of_ones_own_needs_to_know_nothing_of_skipping():
    def update(updates, state, params=None):
        del params
        total, key = state
        key, _ = jax.random.split(key)
        total = total + updates
        return -jax.lax.rsqrt(total), (total, key)

    inner = optax.GradientTransformation(lambda p: (jnp.ones_like(p), jax.random.key(0)), update)
    tx = ols.with_loss_scaling(inner, dynamic())
    history = [jnp.array([8.0, 16.0]), jnp.array([8.0, NAN]), jnp.array([8.0, 16.0])]
    state, update = tx.init(jnp.ones(2)), jax.jit(tx.update)
    states = [state := update(grads, state)[1] for grads in history]
    assert_same_bits(states[1].inner_state, states[0].inner_state)
    # 1 at first, then 8 and 16 at a factor of 8, then the same at a factor of 4
    np.testing.assert_array_equal(states[2].inner_state[0], [1.0 + 1.0 + 2.0, 1.0 + 2.0 + 4.0])


# The whole life of a state.


@integration
def test_a_checkpoint_of_the_plain_optimizer_goes_in_and_out():
    params, grads = jnp.array([1.0, 2.0]), jnp.array([0.25, -0.5])
    plain = optax.adam(0.1)
    _, checkpoint = plain.update(grads, plain.init(params), params)
    tx = ols.with_loss_scaling(plain, dynamic())
    state = tx.init(params)
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(checkpoint)
    _, state = tx.update(grads * 8, state._replace(inner_state=checkpoint), params)
    assert_same_bits(state.inner_state, plain.update(grads, checkpoint, params)[1])


@integration
def test_hyperparameters_are_read_and_set_through_the_wrapper():
    tx = ols.with_loss_scaling(
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.5), dynamic(growth_interval=1)
    )
    params, update = jnp.zeros(1), jax.jit(tx.update)
    state = tx.init(params)
    assert optax.tree.get(state, "learning_rate") == 0.5
    assert optax.tree.get(state, "loss_scale") == 8.0
    state = optax.tree.set(state, learning_rate=jnp.float32(2.0), loss_scale=jnp.float32(32.0))
    updates, state = update(jnp.array([32.0]), state, params)
    np.testing.assert_array_equal(updates, [-2.0])
    assert optax.tree.get(state, "loss_scale") == 64.0
    assert optax.tree.get(state, "learning_rate") == 2.0
    updates, state = update(jnp.array([INF]), state, params)
    assert optax.tree.get(state, "learning_rate") == 2.0


@integration
def test_a_python_number_set_as_loss_scale_is_float32_after_the_next_step():
    tx = ols.with_loss_scaling(optax.sgd(1.0), dynamic())
    params = jnp.zeros(1, jnp.float16)
    state = optax.tree.set(tx.init(params), loss_scale=1024.0)
    updates, state = tx.update(jnp.array([2.0], jnp.float16), state, params)
    np.testing.assert_array_equal(updates, np.array([-(2.0**-9)]))
    assert jax.typeof(state.loss_scale_state.loss_scale) == jax.typeof(jnp.float32(0))


@integration
def test_no_field_hides_one_of_the_inner_optimizer():
    state = ols.with_loss_scaling(optax.adam(0.1)).init(jnp.ones(2))
    for name in ("count", "mu", "nu"):
        assert optax.tree.get(state, name) is not None


@integration
def test_a_fresh_state_and_params_are_donated_and_skipped_steps_work_in_place():
    tx = ols.with_loss_scaling(optax.adamw(0.1), dynamic())

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    params = {"w": jnp.array([1.0, -0.0]), "b": jnp.asarray(-0.0, jnp.float32)}
    state = tx.init(params)
    for bad in (False, True, True, False):
        grads = jax.tree.map(lambda p, bad=bad: np.full_like(p, INF if bad else 8.0), params)
        before = jax.tree.map(np.array, (state.inner_state, params))
        old, (state, params) = (state, params), step(grads, state, params)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        if bad:
            assert_same_bits((state.inner_state, params), jax.tree.map(jnp.asarray, before))
    assert state.loss_scale_state.total_skipped == 2


@integration
def test_a_skipped_step_does_not_trip_jax_debug_nans():
    tx = ols.with_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    params = {"w": jnp.ones(3)}
    update, state = jax.jit(tx.update), tx.init(params)
    with jax.debug_nans(True), jax.debug_infs(True):
        for bad in (NAN, INF):
            updates, state = update({"w": np.array([1.0, bad, 2.0], np.float32)}, state, params)
            jax.block_until_ready(updates)
    assert state.loss_scale_state.total_skipped == 2


@integration
def test_multisteps_inside_drops_the_bad_micro_step_alone():
    tx = ols.with_loss_scaling(optax.MultiSteps(optax.sgd(1.0), 2), dynamic(initial_scale=2.0))
    params, update = jnp.float32(0.0), jax.jit(tx.update)
    state, sums = tx.init(params), []
    for grad in (1.0, NAN, 3.0, 5.0, INF, -INF, 7.0):
        scaled = jnp.float32(grad) * ols.loss_scale_state(state).loss_scale
        updates, state = update(scaled, state, params)
        params = optax.apply_updates(params, updates)
        sums.append(float(params))
    assert sums == [0.0, 0.0, -2.0, -2.0, -2.0, -2.0, -8.0]
    assert state.inner_state.gradient_step == 2


@integration
def test_the_members_of_an_ensemble_skip_each_for_itself():
    tx = ols.with_loss_scaling(optax.adam(0.1), dynamic())
    params = jnp.array([[1.0], [2.0], [3.0]])
    state = jax.vmap(tx.init)(params)
    grads = jnp.array([[8.0], [NAN], [8.0]])
    updates, new_state = jax.jit(jax.vmap(tx.update))(grads, state, params)
    np.testing.assert_array_equal(new_state.loss_scale_state.loss_scale, [8.0, 4.0, 8.0])
    np.testing.assert_array_equal(new_state.inner_state[0].count, [1, 0, 1])
    np.testing.assert_array_equal(updates[:, 0] == 0, [False, True, False])


@integration
def test_weakly_typed_params_compile_no_more_often_than_without_loss_scaling():
    params = jnp.array(1.0)
    assert jax.typeof(params).weak_type
    traces = {}
    for name, tx in {
        "plain": optax.adam(0.1),
        "ours": ols.with_loss_scaling(optax.adam(0.1)),
    }.items():
        traces[name] = 0

        def update(grads, state, params, tx=tx, name=name):
            traces[name] += 1
            return tx.update(grads, state, params)

        step, state = jax.jit(update), tx.init(params)
        for _ in range(4):
            _, state = step(jnp.float32(1.0), state, params)
    assert traces["ours"] <= traces["plain"]


# Policies.


class CountsDown:
    """A policy of one's own: the factor falls by one with each applied step."""

    skip_nonfinite = True

    def init(self):
        return ols.init(4.0)

    def update(self, state, grads_finite, *, loss_finite=True):
        applied = grads_finite & loss_finite
        return state._replace(
            loss_scale=jnp.where(applied, state.loss_scale - 1, state.loss_scale),
            total_skipped=state.total_skipped + ~applied,
        )


@integration
def test_a_policy_of_ones_own_works():
    tx = ols.with_loss_scaling(optax.scale(1.0), CountsDown())
    update, state = jax.jit(tx.update), tx.init(jnp.ones(1))
    updates, state = update(jnp.array([12.0]), state)
    np.testing.assert_array_equal(updates, [3.0])
    updates, state = update(jnp.array([INF]), state)
    np.testing.assert_array_equal(updates, [0.0])
    updates, state = update(jnp.array([12.0]), state)
    np.testing.assert_allclose(updates, [4.0], rtol=1e-6)
    assert (state.loss_scale_state.loss_scale, state.loss_scale_state.total_skipped) == (2.0, 1)


class CountsFlags:
    """A policy that checks nothing, and moves by what it is told."""

    skip_nonfinite = False

    def init(self):
        return ols.init(2.0)

    def update(self, state, grads_finite, *, loss_finite=True):
        both = grads_finite and loss_finite
        return state._replace(loss_scale=state.loss_scale * (3.0 if both else 0.5))


def test_a_policy_that_checks_nothing_is_told_that_all_is_finite():
    tx = ols.with_loss_scaling(optax.identity(), CountsFlags())
    _, state = tx.update(jnp.array([NAN]), tx.init(jnp.ones(1)), value=NAN)
    assert state.loss_scale_state.loss_scale == 6


@pytest.mark.parametrize(
    ("loss_scale", "initial"),
    [("dynamic", 2.0**15), (128, 128.0), (None, 1.0), (dynamic().get_config(), 8.0)],
)
def test_whatever_names_a_policy_will_do(loss_scale, initial):
    tx = ols.with_loss_scaling(optax.sgd(0.1), loss_scale)
    assert tx.init(jnp.ones(1)).loss_scale_state.loss_scale == initial


# Keras' own tests, and TensorFlow's (scenarios.md, 3 and 4).


@integration
@pytest.mark.parametrize(
    ("policy", "scaled", "values", "scales"),
    [
        (ols.FixedLossScale(10.0), [10.0, 10.0], [3.0, 1.0], [10.0, 10.0]),
        (dynamic(2.0, growth_interval=1), [2.0, 4.0], [3.0, 1.0], [4.0, 8.0]),
    ],
    ids=["fixed", "dynamic"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_keras_minimize(policy, scaled, values, scales, dtype):
    tx = ols.with_loss_scaling(optax.sgd(2.0), policy)
    var, seen = jnp.float32(5.0), []

    def grads_of(var, scale, step):
        del step
        grad = jax.grad(lambda v: v.astype(dtype).astype(jnp.float32) * scale)(var)
        seen.append(float(grad))
        return grad

    history, _ = train(tx, var, grads_of, 2)
    assert seen == scaled
    assert [(float(v), s) for v, s in history] == list(zip(values, scales, strict=True))


@integration
@pytest.mark.parametrize(
    "clip", [optax.clip_by_global_norm, optax.clip], ids=["global_clipnorm", "clipvalue"]
)
def test_keras_clipping(clip):
    inner = optax.inject_hyperparams(lambda limit: optax.chain(clip(limit), optax.sgd(2.0)))
    tx = ols.with_loss_scaling(inner(limit=2.0), dynamic(2.0, growth_interval=1))
    var, state = jnp.float32(5.0), tx.init(jnp.float32(5.0))
    for limit, true_grad, value, scale in ((2.0, 4.0, 1.0, 4.0), (3.0, 4.0, -5.0, 8.0)):
        state = optax.tree.set(state, limit=jnp.float32(limit))
        grads = true_grad * state.loss_scale_state.loss_scale
        updates, state = tx.update(grads, state, var)
        var = optax.apply_updates(var, updates)
        assert (var, state.loss_scale_state.loss_scale) == (value, scale)
    updates, state = tx.update(jnp.float32(INF), state, var)
    assert (var + updates, state.loss_scale_state.loss_scale) == (-5.0, 4.0)


@integration
@pytest.mark.parametrize(
    ("optimizer", "policy", "var", "true_grads", "expected"),
    [
        # A NaN gradient leaves the variable and halves the factor.
        (
            optax.sgd(1.0),
            dynamic(2.0, growth_interval=1),
            [1.0, 2.0],
            [2.0, NAN],
            [([-1.0, 0.0], 4.0), ([-1.0, 0.0], 2.0)],
        ),
        # Momentum sees true gradients, however the factor moves.
        (
            optax.sgd(1.0, momentum=1.0),
            dynamic(2.0, growth_interval=1),
            [1.0, 2.0],
            [1.0, 1.0],
            [([0.0, 1.0], 4.0), ([-2.0, -1.0], 8.0)],
        ),
        # TensorFlow 1: the same with a factor that grows by 4.
        (
            optax.sgd(1.0, momentum=1.0),
            dynamic(2.0, growth_interval=1, growth_factor=4.0),
            [1.0, 2.0],
            [1.0, 1.0],
            [([0.0, 1.0], 8.0), ([-2.0, -1.0], 32.0)],
        ),
        # Keras 3's finite and infinite steps.
        (
            optax.sgd(0.5),
            dynamic(2.0**15),
            [1.0, 2.0, 3.0, 4.0],
            [np.array([1.0, 6.0, 7.0, 2.0]), INF],
            [([0.5, -1.0, -0.5, 3.0], 2.0**15), ([0.5, -1.0, -0.5, 3.0], 2.0**14)],
        ),
    ],
    ids=["dynamic update", "slots", "slots in TensorFlow 1", "Keras 3"],
)
def test_keras_updates(optimizer, policy, var, true_grads, expected):
    def grads_of(var, scale, step):
        return jnp.broadcast_to(jnp.asarray(true_grads[step], jnp.float32) * scale, var.shape)

    history, _ = train(
        ols.with_loss_scaling(optimizer, policy), jnp.array(var), grads_of, len(true_grads)
    )
    assert [(v.tolist(), s) for v, s in history] == expected


@integration
def test_keras_iterations_are_applied_steps():
    def grads_of(var, scale, step):
        return jnp.full_like(var, (1.0, INF, 1.0)[step]) * scale

    _, state = train(ols.with_loss_scaling(optax.adam(0.1)), jnp.ones(1), grads_of, 3)
    assert optax.tree.get(state, "count") == 2


@integration
def test_keras_the_first_step_after_a_restart_goes_on_where_training_stopped():
    # Row "checkpoint": init 1, growth 2, momentum 1; after one step counter 1, then the factor
    # doubles on the next.
    tx = ols.with_loss_scaling(optax.sgd(1.0, momentum=1.0), dynamic(1.0, growth_interval=2))
    var, state = jnp.float32(2.0), tx.init(jnp.float32(2.0))
    expected = ((1.0, 1.0, 1, 1.0), (-1.0, 2.0, 0, 2.0))
    for value, scale, count, momentum in expected:
        state = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, state))  # to disk and back
        updates, state = tx.update(state.loss_scale_state.loss_scale, state, var)
        var = optax.apply_updates(var, updates)
        assert (var, state.loss_scale_state.loss_scale) == (value, scale)
        assert (state.loss_scale_state.growth_count, optax.tree.get(state, "trace")) == (
            count,
            momentum,
        )


# Several devices.


def mesh_of_two(axis_name):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((2,), (axis_name,), auto, devices=jax.devices()[:2])


def sharded_step(tx, *, check_vma=True):
    """A step on two devices, whose gradients and losses differ and whose state does not."""
    mesh = mesh_of_two("replicas")
    everywhere, split = PartitionSpec(), PartitionSpec("replicas")

    def step(grads, state, params, value):
        mean = jax.lax.pmean((grads[0], value[0]), "replicas")
        return tx.update(mean[0], state, params, value=value[0])

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(split, everywhere, everywhere, split),
            out_specs=everywhere,
            check_vma=check_vma,
        )
    )


def sharded_params_step(tx):
    """A step on two devices, each of which holds its own part of the params and the moments."""
    mesh = mesh_of_two("shards")
    split, everywhere = PartitionSpec("shards"), PartitionSpec()
    moments = jax.tree.map(lambda leaf: split if leaf.ndim else everywhere, tx.init(jnp.zeros(4)))
    return jax.jit(
        jax.shard_map(
            tx.update,
            mesh=mesh,
            in_specs=(split, moments, split),
            out_specs=(split, moments),
        )
    )


@integration
@pytest.mark.parametrize("bad_at", [0, 1])
@pytest.mark.parametrize(
    ("grad", "loss", "scale"), [(NAN, 1.0, 1.0), (1.0, NAN, 2.0)], ids=["gradient", "loss"]
)
def test_a_bad_replica_is_a_bad_step_for_all_under_pmap(bad_at, grad, loss, scale):
    tx = ols.with_loss_scaling(
        optax.adam(0.1), dynamic(2.0, growth_interval=2), axis_name="replicas"
    )
    update = jax.pmap(
        lambda g, s, p, v: tx.update(g, s, p, value=v),
        axis_name="replicas",
        in_axes=(0, None, None, 0),
        devices=jax.devices()[:2],
    )
    params = jnp.array([1.0, -0.0])
    grads, value = np.ones((2, 2), np.float32), np.ones(2, np.float32)
    grads[bad_at, -1], value[bad_at] = grad, loss
    updates, state = update(grads, tx.init(params), params, value)
    np.testing.assert_array_equal(state.loss_scale_state.loss_scale, [scale, scale])
    expected = jnp.full(2, -0.0), tx.init(params).inner_state
    for replica in range(2):
        # As NumPy arrays: JAX's indexing of a sharded array adds zeros, and loses a negative one.
        actual = jax.tree.map(lambda x, i=replica: np.asarray(x)[i], (updates, state.inner_state))
        assert_same_bits(actual, expected)


@integration
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("bad_at", [None, 0, 1])
def test_the_loss_of_one_replica_decides_for_all_under_shard_map(bad_at, check_vma):
    tx = ols.with_loss_scaling(optax.adam(0.1), dynamic(), axis_name="replicas")
    params = jnp.array([1.0, -0.0])
    value = np.ones(2, np.float32)
    if bad_at is not None:
        value[bad_at] = NAN
    step = sharded_step(tx, check_vma=check_vma)
    updates, state = step(np.ones((2, 2), np.float32), tx.init(params), params, value)
    skipped = bad_at is not None
    assert [int(leaf) for leaf in state.loss_scale_state] == [
        8,
        int(not skipped),
        0,
        int(skipped),
        int(skipped),
    ]
    assert (np.asarray(updates) == 0).all() == skipped


@integration
@pytest.mark.parametrize("bad_at", [None, 0, 3])
def test_the_shards_of_an_optimizer_skip_together(bad_at):
    tx = ols.with_loss_scaling(optax.adam(0.1), dynamic(), axis_name="shards")
    params = jnp.arange(4.0)
    grads = np.full(4, 8.0, np.float32)
    if bad_at is not None:
        grads[bad_at] = INF
    updates, state = sharded_params_step(tx)(grads, tx.init(params), params)
    assert (np.asarray(updates) == 0).tolist() == [bad_at is not None] * 4
    assert state.loss_scale_state.total_skipped == (bad_at is not None)
    assert state.inner_state[0].count == (bad_at is None)


@integration
@pytest.mark.parametrize("value", [False, True])
def test_agreement_takes_one_collective(value):
    tx = ols.with_loss_scaling(optax.adam(0.1), dynamic(), axis_name="shards")
    mesh = mesh_of_two("shards")
    split, everywhere = PartitionSpec("shards"), PartitionSpec()
    params = {"w": jnp.arange(4.0), "b": jnp.ones((2, 2))}
    state = tx.init(params)
    specs = jax.tree.map(lambda leaf: split if leaf.ndim else everywhere, state)

    def update(grads, state, params, loss):
        return tx.update(grads, state, params, **({"value": loss[0]} if value else {}))

    step = jax.jit(
        jax.shard_map(
            update, mesh=mesh, in_specs=(split, specs, split, split), out_specs=(split, specs)
        )
    )
    lowered = step.lower(params, state, params, jnp.ones(2))
    # As it is written, since XLA may combine two into one.
    collective = r"\b(all_reduce|all_gather|all_to_all|collective_\w+|reduce_scatter)\b"
    assert re.findall(collective, lowered.as_text()) == ["all_reduce"]
    compiled = re.findall(collective.replace("_", "-"), lowered.compile().as_text())
    assert set(compiled) == {"all-reduce"}


# What is refused.


@pytest.mark.parametrize(("nest", "where"), NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("evaluate", [lambda f, x: f(x), jax.eval_shape], ids=["init", "shapes"])
def test_wrapping_twice_is_refused(nest, where, evaluate):
    tx = ols.with_loss_scaling(nest(ols.with_loss_scaling(optax.sgd(0.1))))
    with pytest.raises(ValueError, match=re.escape(where)):
        evaluate(tx.init, {"w": jnp.ones(2)})


@pytest.mark.parametrize(
    "inner",
    [optax.adam, optax.sgd(0.1).update, None, "by name", (lambda p: p, lambda g, s: (g, s))],
)
def test_what_is_no_transformation_is_refused(inner):
    with pytest.raises(TypeError, match=r"`inner` must be .*GradientTransformation.*got"):
        ols.with_loss_scaling(inner)


@pytest.mark.parametrize("loss_scale", [True, "static", -1.0, object(), [], 0.0, NAN])
def test_what_names_no_policy_is_refused_at_once(loss_scale):
    with pytest.raises((TypeError, ValueError), match="`loss_scale` must"):
        ols.with_loss_scaling(optax.sgd(0.1), loss_scale)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", ["plain", "inner", "scale", "tuple"])
def test_the_state_of_another_optimizer_is_refused(kind, transform):
    tx = ols.with_loss_scaling(optax.trace(0.9))
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    wrong = {
        "plain": optax.trace(0.9).init(params),
        "inner": (state,),
        "scale": state.loss_scale_state,
        "tuple": tuple(state),
    }[kind]
    with pytest.raises(
        TypeError, match=rf"WithLossScalingState, got {type(wrong).__name__}\b.*`init`"
    ):
        transform(tx.update)(params, wrong, params)


def changing(before, after):
    """An optimizer whose state is `before` at first and then `after`."""
    return optax.GradientTransformation(lambda _: before, lambda g, *_: (g, after))


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ([X], [X, X], r"structure.* at `\[1\]`"),
        ({"n": X}, {"n": X[:1]}, r"must keep its shapes, got \(1,\) for \(2,\) at `\['n'\]`"),
        ({"n": X}, {"n": 1.0}, r"must keep its shapes, got \(\) for \(2,\) at `\['n'\]`"),
    ],
    ids=["structure", "shape", "number"],
)
@pytest.mark.parametrize("policy", ["dynamic", None])
def test_a_state_that_changes_its_shape_is_refused_with_its_path(before, after, match, policy):
    tx = ols.with_loss_scaling(changing(before, after), policy)
    with pytest.raises(ValueError, match=f"`inner` .*{match}"):
        tx.update(X, tx.init(X))


@pytest.mark.parametrize("policy", ["dynamic", None])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (jnp.float16(1), jnp.float32(2)),
        (jnp.int32(1), jnp.int8(2)),
        (jnp.int32(1), 2),
        (jnp.complex64(1), jnp.float32(2)),
    ],
    ids=["float", "integer", "number", "complex"],
)
def test_a_state_keeps_its_types_whatever_the_inner_optimizer_returns(before, after, policy):
    tx = ols.with_loss_scaling(
        changing({"n": before, "name": "x"}, {"n": after, "name": "x"}), policy
    )
    _, state = tx.update(X, tx.init(X))
    assert state.inner_state["name"] == "x"
    assert state.inner_state["n"] == 2
    assert state.inner_state["n"].dtype == before.dtype


def test_nothing_raises_for_numbers():
    tx = ols.with_loss_scaling(optax.scale(1.0), dynamic())
    state = tx.init(jnp.ones(1))
    for grad in (NAN, INF, -INF, 3e38, 1e-45, 0.0):
        updates, state = tx.update(jnp.array([grad]), state)
        assert np.isfinite(updates).all()


@pytest.mark.integration
def test_extra_arguments_reach_an_optimizer_inside_multi_steps():
    seen = []

    def update(updates, state, params=None, *, value, **extra_args):
        del params, extra_args
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = ols.with_loss_scaling(optax.MultiSteps(inner, 2), 4)
    params = jnp.ones(3)
    tx.update(params, tx.init(params), params, value=jnp.float32(2.5))
    assert seen  # Optax evaluates it more than once


def test_a_counter_that_becomes_a_fraction_is_refused():
    inner = optax.GradientTransformation(
        lambda _: {"count": jnp.zeros((), jnp.int32)},
        lambda updates, state, _=None: (updates, {"count": state["count"].astype(jnp.float32)}),
    )
    tx = ols.with_loss_scaling(inner)
    with pytest.raises(TypeError, match=r"float32 for int32 at `\['count'\]`"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
