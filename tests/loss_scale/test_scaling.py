"""Scale losses, unscale gradients, and the function that does both."""

import functools
import inspect

import equinox as eqx
import flax.core
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from leaves import FP8, not_numbers
from plain_where import assert_same_bits

import optax_lossscale as ols

F32_MAX = float(np.finfo(np.float32).max)
SMALL_FLOATS = ["float16", "bfloat16", "float32", *FP8]  # promoted to float32
BAD = np.inf, -np.inf, np.nan
silent = pytest.mark.filterwarnings("ignore:The loss is float16")


unscale = jax.jit(ols.unscale_and_check)


def types_of(tree):
    return jax.tree.map(lambda x: (x.dtype.name, x.weak_type), tree)


@silent
@pytest.mark.usefixtures("x64")
def test_losses_are_scaled_in_at_least_float32_leaf_by_leaf():
    shapes = [(), (3,), (0,)]
    expected = dict.fromkeys(SMALL_FLOATS, "float32") | {"float64": "float64"}
    losses = {dtype: [np.full(shape, 2).astype(dtype) for shape in shapes] for dtype in expected}
    scaled = jax.jit(ols.scale_loss)({"a": losses, "b": [None]}, ols.init(2.0**20))
    assert types_of(scaled["a"]) == {dtype: [(new, False)] * 3 for dtype, new in expected.items()}
    for values in scaled["a"].values():
        for value, shape in zip(values, shapes, strict=True):
            np.testing.assert_array_equal(value, np.full(shape, 2.0**21))
    assert scaled["b"] == [None]


def test_a_float16_loss_is_finite_and_warns_once():
    losses = [np.float32(1), np.float16(1), jnp.float16(3)]
    with pytest.warns(UserWarning, match="loss is float16.*infinite above 65504") as record:
        scaled = ols.scale_loss(losses, ols.init())
    assert [float(x) for x in scaled] == [2.0**15, 2.0**15, 3 * 2.0**15]
    assert [warning.filename for warning in record] == [__file__]
    with pytest.warns(UserWarning, match="float16") as record:
        jax.jit(ols.value_and_grad(jnp.sum)).lower(ols.init(), np.ones(2, np.float16))
    assert len(record) == 1


@pytest.mark.parametrize("run", [ols.unscale_and_check, unscale], ids=["eager", "jit"])
def test_gradients_are_unscaled_in_at_least_float32(run):
    expected = dict.fromkeys(SMALL_FLOATS, "float32") | {"complex64": "complex64"}
    grads = {dtype: np.ones(2, jnp.dtype(dtype)) for dtype in expected}
    grads |= {shape: np.ones(shape, np.float16) for shape in ((), (0, 3))}
    grads |= {"a number of NumPy": np.float32(1), "a number of Python": 1.0}
    true, finite = run([*grads.values()], ols.init(2.0**20))
    assert types_of(true) == [(expected.get(key, "float32"), False) for key in grads]
    for grad, given in zip(true, grads.values(), strict=True):
        np.testing.assert_array_equal(grad, np.full(np.shape(given), 2.0**-20))
    assert (finite.dtype, finite.shape, bool(finite)) == (jnp.bool_, (), True)


def test_a_leaf_without_floating_point_numbers_passes_through_and_counts_as_finite():
    for name, leaf in not_numbers().items():
        grads, finite = ols.unscale_and_check({"a": leaf, "w": np.ones(2, "f4")}, ols.init(2))
        assert grads["a"] is leaf, name
        assert grads["w"].tolist() == [0.5, 0.5]
        assert bool(finite)


def test_gradients_that_overwrite_are_not_unscaled():
    name, three = "_overwrite_with_gradient", np.float32(3)
    fp8 = {name: {"Dense_0": {"k": [three]}}, "w": three}
    similar = {"overwrite_with_gradient": three, f"{name}_": three}
    grads = [fp8, flax.core.freeze({"layer": fp8}), {name: (three,)}, similar]
    true, finite = unscale(grads, ols.init(4))
    assert jax.tree.structure(true) == jax.tree.structure(grads)
    for path, leaf in jax.tree_util.tree_leaves_with_path(true):
        assert leaf == (3 if f"'{name}'" in jax.tree_util.keystr(path) else 0.75)
    assert bool(finite)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize(
    ("grad", "loss_scale", "finite"),
    [
        (F32_MAX, 1, True),
        (F32_MAX, 0.5, False),
        (F32_MAX / 2, 0.5, True),
        (2.0**3, 2.0**-126, False),
        (1.0, 2.0**-126, True),
        (-(2.0**100), 2.0**-100, False),
        (65504, 2.0**-100, True),
        (0.0, 2.0**-126, True),
        *((bad, loss_scale, False) for bad in BAD for loss_scale in (2.0**126, 3.0)),
    ],
)
def test_a_gradient_must_be_finite_before_and_after_unscaling(grad, loss_scale, finite, dtype):
    grads = np.array([1, grad, 1], dtype)
    true, found = unscale(grads, ols.init(loss_scale))
    assert bool(found) is finite
    if not np.isfinite(grad):
        np.testing.assert_array_equal(true.real[1], grad)


@pytest.mark.parametrize("mapped", [jax.vmap, jax.pmap])
def test_the_members_of_a_mapped_axis_agree(mapped):
    @functools.partial(mapped, axis_name="d")
    def check(grads):
        return [ols.unscale_and_check(grads, ols.init(), axis_name=d)[1] for d in ("d", None)]

    for bad_at in (None, 0, 7):
        is_good = np.arange(8) != bad_at
        agreed, alone = check(np.where(is_good, 1, np.float32("nan"))[:, None])
        assert (agreed.dtype, agreed.tolist()) == (jnp.bool_, [bad_at is None] * 8)
        assert alone.tolist() == is_good.tolist()


def square(w):
    return jnp.sum(w**2)


W = np.array([1.0, 2.0], np.float32)


@pytest.mark.parametrize("loss_scale", [np.nan, 0.0, -8.0, 2.0**-127, 2.0**127, np.inf])
def test_a_loss_scale_out_of_its_bounds_makes_nan_of_all_gradients(loss_scale):
    state = ols.init(8.0)._replace(loss_scale=jnp.float32(loss_scale))
    grads, finite = jax.jit(ols.unscale_and_check)(jnp.array([0.0, 1.0, 2.0**100]), state)
    assert np.isnan(grads).all()
    assert not finite


@pytest.mark.parametrize("transform", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_the_value_is_true_and_the_gradients_are_scaled(transform):
    loss_and_grads = transform(ols.value_and_grad(square))
    for loss_scale in (1, 8, 0.5, 3, 2.0**24):
        value, grads = loss_and_grads(ols.init(loss_scale), W)
        assert float(value) == 5
        assert grads.tolist() == [2 * loss_scale, 4 * loss_scale]


@pytest.mark.parametrize("container", [tuple, list])
def test_aux_is_returned_unchanged(container):
    def fun(w):
        return container([square(w), {"double": 2 * w, "text": "kept"}])

    (value, aux), grads = ols.value_and_grad(fun, has_aux=True)(ols.init(8), W)
    assert (float(value), grads.tolist()) == (5, [16, 32])
    assert (aux["double"].tolist(), aux["text"]) == ([2, 4], "kept")


def test_jit_finds_the_arguments_of_the_function_by_name_and_one_may_be_named_state():
    def fun(w, n, state=1.0):
        return state * jnp.sum(w**n)

    def parameters(fun):
        return [*inspect.signature(ols.grad(fun)).parameters]

    for transform in (ols.value_and_grad, ols.grad):
        step = jax.jit(transform(fun), static_argnames="n")
        for named, grad in (({}, 24.0), ({"state": 3.0}, 72.0)):
            found = jax.tree.leaves(step(ols.init(8), jnp.ones(2), 3, **named))
            assert found[-1].tolist() == [grad, grad]
        assert [*inspect.signature(transform(fun)).parameters] == ["opt_state", "w", "n", "state"]
    assert parameters(lambda w: w) == ["state", "w"]
    assert parameters(lambda state, opt_state: state * opt_state)[0] == "opt_state_"


@silent
@pytest.mark.filterwarnings("ignore:The loss is bfloat16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_value_is_as_the_function_returned_it(dtype):
    loss_and_grads = jax.jit(ols.value_and_grad(lambda w: w))
    for value in (3.0, np.inf, np.nan, 60000.0):  # the last is infinite if scaled in float16
        loss = np.asarray(value).astype(jnp.dtype(dtype))
        returned, grad = loss_and_grads(ols.init(), loss)
        assert returned.dtype == grad.dtype == dtype
        np.testing.assert_array_equal(returned.astype(np.float32), loss.astype(np.float32))
        assert float(grad) == 2.0**15
    value, _ = loss_and_grads(ols.init(2.0**24), np.float32(1e35))
    assert float(value) == float(np.float32(1e35))


def named(model, x, scale=2.0, *, offset=1.0):
    """A loss whose arguments a trainer passes by name."""
    return scale * jnp.mean(model(x) ** 2) + offset


class Square(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x


TRANSFORMS = {
    "nnx": (flax.nnx.value_and_grad, lambda: flax.nnx.Linear(8, 8, rngs=flax.nnx.Rngs(0))),
    "equinox": (eqx.filter_value_and_grad, lambda: Square(jnp.ones((8, 8)))),
}


@pytest.mark.integration
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_keyword_arguments_are_passed_by_position_to_any_transform(name, dtype):
    transform, make = TRANSFORMS[name]
    cast = lambda f: ols.autocast(f, dtype) if dtype else f  # noqa: E731
    x, model = jnp.ones((8, 8)), make()
    # Flax itself refuses functions with keyword-only arguments.
    expected, grads = transform(cast(lambda model, x: named(model, x, scale=2.0)))(model, x)
    for fun, kwargs in (
        (named, {"x": x}),
        (named, {"scale": 2.0, "x": x}),
        (functools.partial(named, offset=1.0), {"x": x}),
        (functools.partial(named, scale=2.0), {"x": x}),
    ):
        loss_and_grads = ols.value_and_grad(cast(fun), transform=transform)
        value, scaled = loss_and_grads(ols.init(8), model, **kwargs)
        assert value == expected
        assert_same_bits(jax.tree.leaves(scaled), [8 * x for x in jax.tree.leaves(grads)])
        grad = ols.grad(cast(fun), transform=transform)(ols.init(8), model, **kwargs)
        assert_same_bits(jax.tree.leaves(grad), jax.tree.leaves(scaled))


def test_keyword_arguments_of_jax_keep_their_meaning():
    seen = []

    def fun(a, /, b, c=3.0, *rest, d=4.0, **more):
        seen.append((b, c, rest, d, more))
        return a * b * c

    f = ols.value_and_grad(fun)
    for args, kwargs, expected in (
        ((1.0, 2.0), {}, (2.0, 3.0, (), 4.0, {})),
        ((1.0,), {"b": 2.0}, (2.0, 3.0, (), 4.0, {})),
        ((1.0,), {"c": 5.0, "b": 2.0}, (2.0, 5.0, (), 4.0, {})),
        ((1.0, 2.0), {"d": 6.0, "a": 7.0}, (2.0, 3.0, (), 6.0, {"a": 7.0})),
        ((1.0, 2.0, 3.0, 4.0), {"d": 6.0}, (2.0, 3.0, (4.0,), 6.0, {})),
    ):
        f(ols.init(8), *args, **kwargs)
        assert seen.pop() == expected
    # The last argument is the last one that is given, not a default.
    _, grad = ols.value_and_grad(fun, -1)(ols.init(1), 5.0, b=2.0)
    assert grad == 15
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        f(ols.init(8), 1.0)


def test_nnx_differentiates_with_aux_and_argnums():
    model = flax.nnx.Linear(2, 1, use_bias=False, rngs=flax.nnx.Rngs(0))

    def fun(x, model):
        return jnp.sum(model(x)), "aux"

    f = ols.value_and_grad(fun, 1, has_aux=True, transform=flax.nnx.value_and_grad)
    x = jnp.array([[1.0, 2.0]])
    (value, aux), grads = f(ols.init(8), x, model)
    np.testing.assert_array_equal(value, jnp.sum(model(x)))
    assert aux == "aux"
    assert jax.tree.leaves(grads)[0].tolist() == [[8], [16]]


@pytest.mark.parametrize("differentiate", [ols.value_and_grad, ols.grad])
def test_a_bfloat16_loss_is_warned_of_once(differentiate):
    function, w = differentiate(lambda w: w * w), jnp.bfloat16(1)
    with pytest.warns(UserWarning, match="The loss is bfloat16"):
        function(ols.init(), w)
    function(ols.init(), w)


def test_float16_gradients_are_scaled_without_a_warning():
    ols.scale_loss(jnp.ones(3, jnp.float16), ols.init(8))
