"""Products that no rule can tell from layers: what goes wrong, and that the page names each."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal, shape
from jax import lax

import optax_lossscale as ols

F16, BF16 = jnp.float16, jnp.bfloat16
PAGE = Path(__file__).parents[2] / "docs" / "casting.md"


def distances(x):
    return jnp.sum(x**2, 1)[:, None] - 2 * x @ x.T + jnp.sum(x**2, 1)[None]


def lookup(table, rows):
    return jax.nn.one_hot(rows, len(table)) @ table


def positions(routed, ones):
    return jnp.tril(ones) @ routed


def labels():
    return jnp.stack([jnp.arange(1, 9)] * 2)


def logits():
    return 0.1 * normal(shape(2, 64, 32))


@jax.jit
def ctc(logits, labels):
    paddings = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    return optax.ctc_loss(logits, paddings[0], labels, paddings[1])


@jax.jit
def ctc_gradient(logits, labels):
    return jax.grad(lambda logits: jnp.sum(ctc(logits, labels)))(logits)


def far_away(*sizes):
    return [normal(shape(*sizes)) + 30]


def table_and_rows(n):
    return np.arange(n, dtype=np.float32)[:, None] * np.ones(8, np.float32), np.arange(n)


def all_to_one_expert(n):
    return jax.nn.one_hot(jnp.zeros(n, jnp.int32), 8), jnp.ones((n, n))


# What the page says, a function, what makes its arguments, and the dtypes in which results are
# rounded.
FACTS = {
    "distances as x²": (distances, lambda: far_away(16, 16), (F16, BF16)),
    "`jnp.cov`": (lambda x: jnp.cov(x, rowvar=False), lambda: far_away(64, 16), (F16, BF16)),
    "`jnp.corrcoef`": (jnp.corrcoef, lambda: far_away(16, 64), (F16, BF16)),
    "above 2,048 in float16": (lookup, lambda: table_and_rows(2112), (F16, BF16)),
    "256 in bfloat16": (lookup, lambda: table_and_rows(1024), (BF16,)),
    "counts and positions": (positions, lambda: all_to_one_expert(512), (BF16,)),
    "angles": (
        lambda x, w: jnp.cos(30 * x @ w),
        lambda: normal([shape(64, 8), shape(8, 16)]),
        (F16, BF16),
    ),
    "`optax.ctc_loss`": (ctc_gradient, lambda: (logits(), labels()), (F16, BF16)),
}


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("named", FACTS)
def test_a_product_that_looks_like_a_layer_is_rounded_and_the_page_names_it(named):
    fun, make, dtypes = FACTS[named]
    args = jax.tree.map(jnp.asarray, make())
    exact = fun(*args)
    for dtype in (F16, BF16):
        error = jnp.max(jnp.abs(ols.autocast(fun, dtype)(*args) - exact))
        assert (float(error) > 1e-5 * float(jnp.max(jnp.abs(exact)))) == (dtype in dtypes)
    with jax.default_matmul_precision("highest"):
        kept = ols.autocast(fun, F16)
        with pytest.warns(UserWarning, match="not the default one"):
            np.testing.assert_allclose(kept(*args), exact, rtol=1e-5, atol=1e-4)
    text = " ".join(PAGE.read_text("utf-8").split())
    assert named in text


@pytest.mark.slow
def test_a_class_masked_with_a_large_number_makes_ctc_nan_in_float16():
    masked = logits().at[:, :, -1].set(-1e9)
    assert jnp.isfinite(ctc(masked, labels())).all()
    assert not jnp.isfinite(ols.autocast(ctc, F16)(masked, labels())).all()


def test_devices_add_gradients_in_half_precision_under_jit_and_in_float32_in_shard_map():
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.NamedSharding(mesh, jax.P("i"))
    x, w = jax.device_put(normal(shape(64, 16)), rows), normal(shape(16, 8))

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    half = ols.autocast(loss, F16)
    mapped = jax.shard_map(
        lambda w, x: lax.psum(jax.grad(half)(w, x), "i"),
        mesh=mesh,
        in_specs=(jax.P(), jax.P("i")),
        out_specs=jax.P(),
        check_vma=False,
    )
    for grad, dtype in (jax.grad(half), "f16"), (mapped, "f32"):
        text = jax.jit(grad).lower(w, x).compile().as_text()
        sums = [line.split(" = ")[1] for line in text.splitlines() if " all-reduce(" in line]
        assert sums
        assert all(each.lstrip("(").startswith(dtype) for each in sums)
