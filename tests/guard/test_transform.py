"""`with_loss_scaling`: what the inner optimizer sees, what a step returns, and the errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from arrays import ones, shape
from flax import nnx
from jax import export
from plain_where import assert_same_bits

import optax_lossscale as ols

NAN, INF = float("nan"), float("inf")
X = ones(shape(2))
DYNAMIC = ols.DynamicLossScale(8.0)

integration = pytest.mark.integration
# A gradient, the loss, the loss scale after the step (8 before), and whether the step is applied.
STEPS = {
    "a finite gradient": (16.0, None, 8.0, True),
    "a finite gradient and a finite loss": (16.0, 3.0, 8.0, True),
    "an infinite gradient": (INF, None, 4.0, False),
    "a negative infinite gradient of a finite loss": (-INF, 3.0, 4.0, False),
    "a NaN gradient": (NAN, None, 4.0, False),
    "a NaN loss": (16.0, NAN, 8.0, False),
    "an infinite loss": (16.0, INF, 8.0, False),
    "a NaN loss and a NaN gradient": (NAN, NAN, 8.0, False),
}


def recording(seen):
    """Return an optimizer that appends the arguments of each update to `seen`."""

    def update(updates, state, params=None, **extra_args):
        arrays = {name: x for name, x in extra_args.items() if not callable(x)}
        append = lambda *given: seen.append(jax.tree.map(np.asarray, given))  # noqa: E731
        jax.debug.callback(append, updates, params, arrays)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda _: (), update)


@pytest.fixture(scope="module", params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def recorded(request):
    """Return a step, and the list of what the inner optimizer sees."""
    seen = []
    tx = ols.with_loss_scaling(recording(seen), DYNAMIC)
    step = functools.partial(tx.update, state=tx.init(None), value_fn=jnp.sum)
    return request.param(step), seen


@pytest.mark.parametrize(("grad", "loss", "scale", "applied"), STEPS.values(), ids=STEPS)
def test_the_inner_optimizer_sees_true_gradients_or_zeros(grad, loss, scale, applied, recorded):
    step, seen = recorded
    grads = {
        "w": jnp.array([-4.0, grad]),
        "half": jnp.full((2, 2), 8.0, jnp.float16),
        "complex": jnp.array([8j]),
        "index": jnp.array([3]),
        "flag": jnp.array([True]),
    }
    true = grads | {"w": grads["w"] / 8, "half": jnp.ones((2, 2)), "complex": jnp.array([1j])}
    floats = ("w", "half", "complex")
    zeros = true | {name: jnp.zeros_like(true[name]) for name in floats}
    added = true | {name: -jnp.zeros_like(true[name]) for name in (*floats, "index")}
    value = {} if loss is None else {"value": loss}
    updates, state = step(grads, params=5 * X, more=true, key=7, **value)
    jax.effects_barrier()
    given, params, extra_args = seen.pop()
    assert not seen
    assert_same_bits(given, true if applied else zeros)
    assert_same_bits(extra_args.pop("more"), true if applied else zeros)
    expected = {"key": 7} if loss is None else {"key": 7, "value": loss if applied else 0}
    assert extra_args == expected
    np.testing.assert_array_equal(params, 5 * X)
    assert_same_bits(updates, true if applied else added)
    assert ols.loss_scale_state(state).loss_scale == scale
    assert ols.loss_scale_state(state).total_skipped == (0 if applied else 1)
    flag = ols.applied(state)
    assert (flag.shape, flag.dtype, flag) == ((), jnp.bool_, applied)


@pytest.mark.parametrize(
    ("value", "applied"),
    [
        (jnp.array([1.0, NAN]), False),
        ({"main": jnp.float16(1.0), "aux": jnp.float32(INF)}, False),
        (np.float32(NAN), False),
        (jnp.int32(3), True),
        (None, True),
    ],
)
def test_a_loss_may_be_any_tree_and_any_inner_optimizer_may_ignore_it(value, applied):
    tx = ols.with_loss_scaling(optax.scale(-1.0), DYNAMIC)
    updates, _ = tx.update(X, tx.init(X), value=value, other=object())
    np.testing.assert_array_equal(updates, -X / 8 if applied else -0.0 * X)


@pytest.mark.parametrize("rate", [0.5, -2.0, NAN, INF, np.float32(0.5), np.array(2.0)])
def test_a_constant_is_not_traced_under_jit(rate):
    def update(updates, state, params, *, given):
        rate = given["rate"]
        assert params == 3  # a constant, too
        return given["count"] * (-rate if rate < 0 else rate) * updates, state  # if it is no tracer

    tx = ols.with_skipping(optax.GradientTransformationExtraArgs(lambda _: (), update))

    def step(grads, count):  # beside an array that is traced
        given = {"rate": rate, "count": count}
        return tx.update(grads, tx.init(grads), np.float32(3), given=given)[0]

    np.testing.assert_array_equal(jax.jit(step)(X, jnp.float32(2)), 2 * abs(rate) * X)


@pytest.mark.parametrize("run", [lambda f: f, nnx.jit])
def test_an_update_may_modify_its_arguments(run):
    def update(updates, state, _, *, seen, log):
        seen[...] += 1
        log["updates"] = updates
        return updates, state

    tx = ols.with_skipping(optax.GradientTransformationExtraArgs(lambda _: (), update))
    seen, log = nnx.Variable(jnp.zeros(())), {}
    run(lambda seen: tx.update(X, tx.init(X), seen=seen, log=log)[0])(seen)
    assert (float(seen[...]), list(log)) == (1.0, ["updates"])


WRAP = "`with_master_weights(inner)`. Or keep"


@pytest.mark.filterwarnings("ignore:`params` are b?float16")
@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [("float16", WRAP), ("bfloat16", WRAP), ("float8_e5m2", "gradients. Keep"), ("float32", None)],
)
def test_an_error_of_the_inner_optimizer_names_half_precision_parameters(dtype, remedy):
    def update(*_):
        raise TypeError

    tx = ols.with_loss_scaling(optax.GradientTransformation(lambda _: (), update))
    params = {"w": X, "other": X.astype(dtype), "step": 1}
    with pytest.raises(TypeError) as caught:
        tx.update(params, tx.init(params), params)
    notes = getattr(caught.value, "__notes__", [])
    assert [remedy in note for note in notes] == ([True] if remedy else [])


class CountsFlags:
    """A user-defined policy that skips nothing. Its loss scale depends on the flags."""

    @property
    def skip_nonfinite(self):
        return False

    def init(self):
        return ols.init(4.0)

    def update(self, state, grads_finite, *, loss_finite=True):
        both = grads_finite and loss_finite
        return state._replace(loss_scale=state.loss_scale * (3.0 if both else 0.5))


@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [
        (ols.FixedLossScale(8.0, skip_nonfinite=False), 8.0, 8.0),
        (None, 1.0, 1.0),
        (CountsFlags(), 4.0, 12.0),
    ],
    ids=["fixed", "none", "of the user's own"],
)
def test_a_policy_that_skips_nothing_checks_nothing_but_for_a_rule(policy, before, after):
    seen = []
    tx = ols.with_loss_scaling(recording(seen), policy, axis_name="not mapped")
    state = tx.init(X)
    updates, new = tx.update(jnp.array([NAN, 16.0]), state, value=NAN)
    np.testing.assert_array_equal(updates, [NAN, 16.0 / before])
    assert np.isnan(seen[0][2]["value"])
    assert_same_bits(new, state._replace(loss_scale_state=ols.init(after)))
    assert ols.applied(new)
    program = str(jax.make_jaxpr(tx.update)(X, state, value=1.0))
    assert not re.search("finite|pmin", program)
    tx = ols.with_loss_scaling(optax.identity(), policy, skip_if=lambda *_: False)
    good, bad = (tx.update(g * X, tx.init(X))[1] for g in (1, INF))
    assert (ols.applied(good), ols.applied(bad)) == (True, False)
    # A fixed loss scale then counts as one that skips.
    assert good.loss_scale_state.growth_count == (0 if isinstance(policy, CountsFlags) else 1)


def test_skipped_updates_add_nothing_in_any_dtype_and_may_be_weakly_typed():
    dtypes = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8"]
    zeros = {dtype: jnp.full((1, 2), -0.0).astype(dtype) for dtype in dtypes}
    # This type has no negative zero; its NaN has that bit pattern.
    zeros["float8_e4m3fnuz"] = jnp.zeros((1, 2), "float8_e4m3fnuz")
    zeros["complex64"] = jnp.full((1, 2), complex(-0.0, -0.0))
    cast = optax.stateless(lambda g, _: {name: g.astype(name) for name in zeros} | {"weak": 1.0})
    tx = ols.with_loss_scaling(cast, DYNAMIC)
    grads = jnp.array([[8.0, INF]])
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    weak = updates.pop("weak")
    assert (weak.weak_type, weak == 0, jnp.signbit(weak)) == (True, True, True)
    assert_same_bits(updates, zeros)


@pytest.mark.parametrize(("w", "expected"), [(8.0, 1.0), (INF, 0.0)])
def test_leaves_that_are_not_numbers_pass_through(w, expected):
    others = {
        "masked": optax.MaskedNode(),
        "key": jax.random.key(3),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "empty": jnp.zeros((0, 3)),
    }
    tx = ols.with_loss_scaling(optax.identity(), DYNAMIC)
    grads = others | {"w": w * X, "name": "frozen"}
    updates, _ = tx.update(grads, tx.init(None))
    np.testing.assert_array_equal(updates.pop("w"), expected * X)
    assert updates.pop("name") == "frozen"
    assert_same_bits(updates, others)


# What an inner optimizer keeps, and what it returns in its place.
KEPT = {
    "float": (jnp.float16(1), jnp.float32(2)),
    "integer": (jnp.int32(1), jnp.int8(2)),
    "complex": (jnp.complex64(1), jnp.float32(2)),
    "number for an array": (jnp.int32(1), 2),
    "number of NumPy": (np.int64(1), jnp.int32(2)),
    "number of Python": (1.0, 2.0),
    "bool": (True, False),
    "array of NumPy": (np.ones(2), np.zeros(2)),
}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", ["dynamic", None])
def test_a_state_keeps_its_types_and_its_numbers_become_arrays(policy, transform):
    old, new = ({name: both[i] for name, both in KEPT.items()} for i in (0, 1))
    others = {"name": "x", "float0": np.zeros(3, jax.dtypes.float0)}
    if policy is None:
        others["text"] = np.array(["a"])  # cannot be selected

    def update(updates, state, _):
        assert all(isinstance(state[name], jax.Array) for name in KEPT)
        return updates, state | new

    inner = optax.GradientTransformation(lambda _: old | others, update)
    tx = ols.with_loss_scaling(inner, policy)

    def step(grads):
        state = tx.update(grads, tx.init(X))[1].inner_state
        assert all(state[name] is leaf for name, leaf in others.items())
        return {name: state[name] for name in KEPT}

    for grads, expected in ((X, new), (X * INF, old if policy else new)):
        arrays = {n: jnp.asarray(expected[n], jnp.asarray(old[n]).dtype) for n in KEPT}
        assert_same_bits(transform(step)(grads), arrays)


@integration
def test_hyperparameters_and_fields_are_read_and_set_through_the_wrapper():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    tx = ols.with_loss_scaling(inner, ols.DynamicLossScale(8.0, growth_interval=1))
    state = tx.init(X)
    assert (optax.tree.get(state, "learning_rate"), optax.tree.get(state, "loss_scale")) == (0.5, 8)
    state = optax.tree.set(state, learning_rate=jnp.float32(2.0), loss_scale=32.0)
    updates, state = jax.jit(tx.update)(32 * X, state, X)
    np.testing.assert_allclose(updates, -2 * X, rtol=1e-6)
    assert (optax.tree.get(state, "learning_rate"), optax.tree.get(state, "loss_scale")) == (2, 64)


@integration
@pytest.mark.parametrize("policy", ["dynamic", None])
def test_a_gradient_that_is_none_is_named(policy):
    tx = ols.with_loss_scaling(optax.adam(0.1), policy)
    params = {"w": X, "b": X}
    with pytest.raises(ValueError, match="None") as caught:
        tx.update({"w": X, "b": None}, tx.init(params), params)
    assert "The gradient is None at `['b']`. Pass zeros, or exclude" in caught.value.__notes__[-1]
    some = params | {"b": None}  # as Equinox filters both
    assert jax.jit(tx.update)(some, tx.init(some), some)[0]["b"] is None


@pytest.mark.slow
@integration
def test_a_step_exports_with_symbolic_dimensions_and_the_policy_is_dynamic_by_default():
    (rows,) = export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, 2), jnp.float32)
    tx = ols.with_loss_scaling(optax.adam(0.1))
    exported = export.export(jax.jit(tx.update))(shape, jax.eval_shape(tx.init, shape), shape)
    params = jnp.ones((3, 2))
    updates, state = jax.jit(exported.call)(params.at[1, 0].set(INF), tx.init(params), params)
    assert_same_bits(state.loss_scale_state, ols.update(ols.init(), False, "dynamic"))
    assert_same_bits(updates, -0.0 * params)


INSTEAD = {  # of this, with any of the below
    ols.with_bfloat16_state: ": `with_loss_scaling(with_bfloat16_state(inner))`.",
    ols.with_loss_scaling: "`with_loss_scaling(inner, skip_if=rule)`",
    ols.with_skipping: "`with_skipping(inner, skip_if=rule)`",
}


@pytest.mark.parametrize("inside", [ols.with_loss_scaling, ols.with_skipping])
@pytest.mark.parametrize("outside", INSTEAD)
def test_a_guard_inside_a_guard_is_refused_with_the_line_to_write(outside, inside):
    instead = next(line for each, line in INSTEAD.items() if each in (outside, inside))
    masked = optax.masked(inside(optax.sgd(0.1)), {"w": True})
    for tx in (inside(optax.sgd(0.1)), optax.MultiSteps(optax.chain(optax.clip(1.0), masked), 2)):
        with pytest.raises(ValueError, match="`inner` must not decide about steps itself") as error:
            outside(tx).init({"w": X})
        assert instead in str(error.value)
