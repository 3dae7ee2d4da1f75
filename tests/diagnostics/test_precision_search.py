"""precision_search: which lines need float32, found by measurement."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_lossscale as ols
from optax_lossscale.diagnostics import precision_search

X = jax.random.normal(jax.random.key(0), (64, 16))


def fourier_params():
    keys = jax.random.split(jax.random.key(1), 2)
    frequencies = 30 * jax.random.normal(keys[0], (16, 32))
    return {"angles": frequencies, "head": jax.random.normal(keys[1], (32, 8)) / 6}


def fourier(params, x, scale=1.0, *, mode="sin"):
    angles = x @ params["angles"]  # ANGLES
    features = getattr(jnp, mode)(angles) * scale
    return jnp.mean((features @ params["head"] - x[:, :8]) ** 2)


def plain(params, x):
    return jnp.mean((jnp.tanh(x @ params["angles"] / 60) @ params["head"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_line_that_needs_float32_is_named_and_keeping_it_by_hand_is_the_same(dtype):
    params = fourier_params()
    found = precision_search(fourier, params, X, dtype=dtype)
    assert found.error > 0.05
    assert found.error_kept < 0.03
    (line,) = found.keep
    assert "# ANGLES" in line
    assert line in found.lines
    assert sum(each.flops for each in found.lines.values()) == pytest.approx(1)
    text = str(found)
    assert 'precision="highest"' in text
    assert "jax.default_matmul_precision" in text
    assert "one batch" in text
    with pytest.raises(AttributeError):
        found.error = 0


@pytest.mark.slow
def test_a_model_that_needs_nothing_takes_two_compilations(compilations):
    params = fourier_params()
    jax.block_until_ready(X)
    compilations.clear()
    found = precision_search(plain, params, X)
    assert len(compilations) <= 2
    assert (found.keep, dict(found.lines), found.error_kept) == ((), {}, found.error)
    assert "No line needs float32" in str(found)


@pytest.mark.slow
def test_what_is_not_an_array_is_passed_through_and_has_aux_and_keywords_work():
    def with_aux(params, x, name, *, scale):
        assert name == "text"
        return fourier(params, x, scale), {"mean": jnp.mean(x)}

    found = precision_search(with_aux, fourier_params(), X, "text", scale=1.0, has_aux=True)
    assert len(found.keep) == 1


@pytest.mark.slow
def test_a_module_of_nnx_is_as_it_was():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.dense(x)))

    model = Model(nnx.Rngs(0))
    before = jax.tree.map(np.array, jax.tree.leaves(nnx.state(model, nnx.Param, nnx.BatchStat)))
    found = precision_search(
        lambda model, x: jnp.mean(model(x) ** 3), model, X, transform=nnx.value_and_grad
    )
    after = jax.tree.leaves(nnx.state(model, nnx.Param, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert found.error < 0.05


@pytest.mark.slow
def test_a_module_of_equinox_is_searched():
    model = eqx.nn.MLP(16, 8, 16, 1, key=jax.random.key(0))
    found = precision_search(
        lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2),
        model,
        X,
        transform=eqx.filter_value_and_grad,
    )
    assert found.error < 0.05


@pytest.mark.slow
def test_a_loss_without_products_and_a_gradient_of_zeros_have_no_error():
    assert precision_search(lambda w: jnp.sum(w**2), jnp.ones(3)).error == 0
    found = precision_search(lambda w, x: jnp.sum(x @ w) * 0.0, jnp.ones((16, 8)), X)
    assert found.error == 0


@pytest.mark.slow
def test_warnings_are_given_once_and_autocast_is_as_before():
    def narrow(w, x):
        return jnp.sum(jnp.dot(x, w, precision="highest") ** 2) + jnp.sum(x[:8, :8] @ w[:8, :8])

    w = jnp.ones((16, 32))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        precision_search(narrow, w, X)
    assert len([each for each in given if "Only" in str(each.message)]) == 1
    half = ols.autocast(plain, jnp.bfloat16)
    report = ols.diagnostics.precision_report(half, fourier_params(), X)
    assert [*report] == ["bfloat16"]


def test_wrong_arguments_are_refused_before_the_function_is_called():
    def never(*_):
        raise AssertionError

    for wrong in ({"dtype": jnp.float32}, {"tolerance": "a"}, {"progress": 3}):
        with pytest.raises(TypeError, match=f"`{next(iter(wrong))}` must"):
            precision_search(never, jnp.ones(3), **wrong)
    with pytest.raises(ValueError, match="`tolerance` must be positive"):
        precision_search(never, jnp.ones(3), tolerance=0)
    with pytest.raises(TypeError, match="`fun` must be a function"):
        precision_search(3)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_or_wrapped_already_is_told_so():
    with pytest.raises(ValueError, match="first_nonfinite"):
        precision_search(lambda w: jnp.log(jnp.sum(w) * 0 - 1), jnp.ones(3))
    with pytest.raises(ValueError, match="wrapped by `autocast` already"):
        precision_search(ols.autocast(plain, jnp.bfloat16), fourier_params(), X)


@pytest.mark.slow
def test_a_product_that_stays_has_the_highest_precision():
    from optax_lossscale._precision import autocast_except  # noqa: PLC0415

    params = fourier_params()
    (line,) = precision_search(fourier, params, X).keep
    half = autocast_except(frozenset([line]), fourier, np.dtype(jnp.bfloat16), None)
    assert str(jax.make_jaxpr(half)(params, X)).count("Precision.HIGHEST") >= 1
