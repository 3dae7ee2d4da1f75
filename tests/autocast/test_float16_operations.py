"""The warning about what the code itself computes in float16, where it overflows."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from arrays import shape
from flax import nnx
from jax import lax

import optax_lossscale as ols

F16 = jnp.float16
W, X = shape(16, 16), shape(32, 16)


def in_half(fun):
    """Return a loss whose layer computes in float16, as one made with `dtype=jnp.float16` does."""

    def loss_fn(w, x):
        hidden = x.astype(F16) @ w.astype(F16)
        return jnp.sum(fun(hidden).astype(jnp.float32))

    return loss_fn


OVERFLOWS = {
    "a square": (in_half(lambda x: x**2), "a power"),
    "a product with itself": (in_half(lambda x: x * x), "a power"),
    "jnp.square": (in_half(jnp.square), "a power"),
    "a norm": (in_half(lambda x: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))), "a power"),
    "jax.nn.standardize": (in_half(jax.nn.standardize), "a power"),
    "a general power": (in_half(lambda x: jnp.power(x, x)), "a power"),
    "a sum": (in_half(lambda x: jnp.sum(x, -1)), "a sum"),
    "a cumulative sum": (in_half(lambda x: jnp.cumsum(x, 0)), "a sum"),
    "a sum in float32 that is stored": (
        in_half(lambda x: jnp.sum(x.astype(jnp.float32), -1).reshape(4, 8).astype(F16)),
        "a sum",
    ),
    "an exponential": (in_half(jnp.exp), "an exponential"),
    "softmax without the maximum": (
        in_half(lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True)),
        "an exponential",
    ),
    "in jit, remat and a scan": (
        jax.jit(
            jax.checkpoint(
                in_half(lambda x: lax.scan(lambda c, y: (c + y**2, None), x[0], x)[0]),
            )
        ),
        "a power",
    ),
    "a norm by einsum": (in_half(lambda x: jnp.einsum("ij,ij->i", x, x)), "a sum"),
    "in a while_loop": (
        in_half(lambda x: lax.while_loop(lambda y: jnp.max(y) < 3, jnp.square, x)),
        "a power",
    ),
    "in a branch": (
        in_half(lambda x: lax.cond(x[0, 0] > 0, jnp.square, lambda x: x, x)),
        "a power",
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", OVERFLOWS)
def test_what_overflows_in_float16_is_named_once_with_its_line_and_the_remedy(name):
    fun, what = OVERFLOWS[name]
    half = ols.autocast(fun, F16)
    with pytest.warns(UserWarning, match=f"computes {what} in float16, at {__file__}") as caught:
        jax.eval_shape(lambda w, x: half(w, x) + half(w, x), W, X)
    (warning,) = caught
    assert "Leave out the `dtype` of the layers" in str(warning.message)
    assert "policy `float32`" in str(warning.message)


def kernel(x):
    from jax.experimental import pallas as pl  # noqa: PLC0415

    def square(ref, out):
        out[...] = ref[...] ** 2

    return pl.pallas_call(square, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@jax.custom_jvp
def cubed(x):
    return x**3


cubed.defjvp(lambda primals, tangents: (cubed(*primals), 3 * cubed(*tangents)))


def softmax(x, mask=lambda x: x):
    shifted = mask(jnp.exp(x - lax.stop_gradient(jnp.max(x, -1, keepdims=True))))
    return shifted / jnp.sum(shifted, -1, keepdims=True)


def by_flax(x):
    """Return the result of layers and norms with `dtype=jnp.float16`."""
    for layer in (nn.LayerNorm(dtype=F16), nn.RMSNorm(dtype=F16), nn.GroupNorm(4, dtype=F16)):
        x = layer.apply(layer.init(jax.random.key(0), x), x)
    return nn.gelu(nnx.LayerNorm(16, dtype=F16, rngs=nnx.Rngs(0))(x))


HARMLESS = {
    "softmax": in_half(jax.nn.softmax),
    "log_softmax": in_half(jax.nn.log_softmax),
    "logsumexp": in_half(lambda x: jax.nn.logsumexp(x, -1)),
    "softmax by hand": in_half(softmax),
    "the exponential of log_softmax": in_half(lambda x: jnp.exp(jax.nn.log_softmax(x))),
    "mean and variance": in_half(lambda x: jnp.mean(x, -1) + jnp.var(x, -1) + jnp.std(x, -1)),
    "activations": in_half(
        lambda x: sum(f(x) for f in (jax.nn.gelu, jax.nn.silu, jax.nn.elu, jnp.tanh))
    ),
    "norms of Flax": in_half(by_flax),
    "masked softmax by hand": in_half(
        lambda x: softmax(x, lambda y: jnp.where(y > 0.1, y, 0) * (y > 0.2).astype(F16))
    ),
    "roots and decays": in_half(
        lambda x: jnp.abs(x) ** 0.5 + 0.9 ** jnp.abs(x) + jnp.exp(-jnp.abs(x))
    ),
    "what depends on no argument": in_half(lambda x: x * jnp.exp(-jnp.arange(16, dtype=F16))[None]),
    "counts": in_half(lambda x: jnp.sum((x > 0).astype(F16), -1)),
    "a product with itself": in_half(lambda x: x @ x.T),
    "a kernel": in_half(kernel),
    "a rule of its own": in_half(cubed),
    "cross entropy": in_half(
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.zeros(32, int))
    ),
    "data in float16 before a layer": lambda w, x: jnp.sum((x.astype(F16) @ w) ** 2),
    "a loss scale by hand": lambda w, x: jnp.mean((x @ w) ** 2) * 2.0**15,
    "an inner autocast": ols.autocast(in_half(jnp.square), jnp.float32),
}


@pytest.mark.integration
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", HARMLESS)
def test_what_cannot_overflow_or_is_someone_elses_gives_no_warning(name):
    jax.eval_shape(ols.autocast(HARMLESS[name], F16), W, X)


@pytest.mark.filterwarnings("error")
def test_storage_in_float16_and_other_formats_give_no_warning():
    def loss_fn(w, x):
        return jnp.mean(jnp.exp((x @ w) ** 2))

    stored = (shape(*each.shape, dtype=F16) for each in (W, X))
    jax.eval_shape(ols.autocast(loss_fn, F16), *stored)
    in_bfloat16 = lambda w, x: jnp.sum((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) ** 2)  # noqa: E731
    jax.eval_shape(ols.autocast(in_bfloat16, jnp.bfloat16), W, X)


def test_the_warning_does_not_repeat_after_the_advice_is_followed():
    def network(dtype):
        layer = nn.Dense(16, dtype=dtype)
        params = layer.init(jax.random.key(0), jnp.ones((32, 16)))

        def loss_fn(params, x):
            y = layer.apply(params, x)
            return jnp.mean(y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6))

        return ols.autocast(loss_fn, F16), params

    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("error")
        half, params = network(None)
        jax.eval_shape(jax.grad(half), params, X)
        half, params = network(F16)
        with pytest.raises(UserWarning, match="a power in float16"):
            jax.eval_shape(jax.grad(half), params, X)
