"""Products that no rule can tell from layers: what goes wrong, and that the page names each."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_lossscale as ols

F16, BF16 = jnp.float16, jnp.bfloat16
PAGE = Path(__file__).parents[2] / "docs" / "casting.md"


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def distances(x):
    return jnp.sum(x**2, 1)[:, None] - 2 * x @ x.T + jnp.sum(x**2, 1)[None]


def lookup(table, rows):
    return jax.nn.one_hot(rows, len(table)) @ table


def integers(n):
    return jnp.arange(float(n))[:, None] * jnp.ones(8)[None]


def positions(routed, ones):
    return jnp.tril(ones) @ routed


def ctc(logits, labels):
    paddings = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    return optax.ctc_loss(logits, paddings[0], labels, paddings[1])


def ctc_gradient(logits, labels):
    return jax.grad(lambda logits: jnp.sum(ctc(logits, labels)))(logits)


LABELS = jnp.stack([jnp.arange(1, 9)] * 2)
ROUTED = jax.nn.one_hot(jnp.zeros(1024, jnp.int32), 8)
# What the page says, a function, its arguments, and the dtypes in which results are rounded.
FACTS = {
    "distances as x²": (distances, [normal(16, 16) + 30], (F16, BF16)),
    "`jnp.cov`": (lambda x: jnp.cov(x, rowvar=False), [normal(64, 16) + 30], (F16, BF16)),
    "`jnp.corrcoef`": (jnp.corrcoef, [normal(16, 64) + 30], (F16, BF16)),
    "above 2,048 in float16": (lookup, [integers(4096), jnp.arange(4096)], (F16, BF16)),
    "256 in bfloat16": (lookup, [integers(1024), jnp.arange(1024)], (BF16,)),
    "counts and positions": (positions, [ROUTED, jnp.ones((1024, 1024))], (BF16,)),
    "angles": (lambda x, w: jnp.cos(x @ w), [normal(64, 8), 30 * normal(8, 16)], (F16, BF16)),
    "`optax.ctc_loss`": (ctc_gradient, [0.1 * normal(2, 64, 32), LABELS], (F16, BF16)),
}


@pytest.mark.integration
@pytest.mark.parametrize("named", FACTS)
def test_a_product_that_looks_like_a_layer_is_rounded_and_the_page_names_it(named):
    fun, args, dtypes = FACTS[named]
    exact = fun(*args)
    for dtype in (F16, BF16):
        error = jnp.max(jnp.abs(ols.autocast(fun, dtype)(*args) - exact))
        assert (float(error) > 1e-5 * float(jnp.max(jnp.abs(exact)))) == (dtype in dtypes)
        with jax.default_matmul_precision("highest"):
            kept = ols.autocast(fun, dtype)
            with pytest.warns(UserWarning, match="not the default one"):
                np.testing.assert_allclose(kept(*args), exact, rtol=1e-5, atol=1e-4)
    text = " ".join(PAGE.read_text("utf-8").split())
    assert named in text


def test_a_class_masked_with_a_large_number_makes_ctc_nan_in_float16():
    logits = (0.1 * normal(2, 64, 32)).at[:, :, -1].set(-1e9)
    assert jnp.isfinite(ctc(logits, LABELS)).all()
    assert not jnp.isfinite(ols.autocast(ctc, F16)(logits, LABELS)).all()


def test_devices_add_gradients_in_half_precision_under_jit_and_in_float32_in_shard_map():
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.NamedSharding(mesh, jax.P("i"))
    x, w = jax.device_put(normal(64, 16), rows), normal(16, 8)

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
