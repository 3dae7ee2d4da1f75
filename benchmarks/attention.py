"""Causal attention: plain, and by blocks, as users write it in JAX.

Attention by blocks never has all scores in memory. It is two loops, and has a derivative of its own
that computes the scores again.
"""

from typing import Any

import jax
import jax.numpy as jnp

BLOCKS = 4  # of a sequence
# The inner loops skip the blocks that the mask hides. XLA does not know how often they run.
INNER_TRIPS = (BLOCKS + 1) / 2  # on average


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return the results of attention, `dtype[batch, length, heads, size]` as its arguments."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


def by_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return what `plain` returns. The length is a multiple of `BLOCKS`."""
    batch, length, heads, size = q.shape

    def split(x: jax.Array) -> jax.Array:
        blocks = x.reshape(batch, BLOCKS, length // BLOCKS, heads, size)
        return blocks.transpose(1, 0, 3, 2, 4)

    # Scaled here, so that float16 does not overflow in the products.
    mixed = _attend(split(q * size**-0.5), split(k), split(v))
    return mixed.transpose(1, 0, 3, 2, 4).reshape(q.shape)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    def mix(queries: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, q_i = queries

        def add_block(j: Any, carry: Any) -> Any:
            mixed, total, largest = carry
            scores = _scores(q_i, k[j], i, j)
            new = jnp.maximum(largest, scores.max(-1, keepdims=True))
            weights, rescale = jnp.exp(scores - new), jnp.exp(largest - new)
            mixed = rescale * mixed + _product("bhqk,bhkd->bhqd", weights.astype(v.dtype), v[j])
            return mixed, rescale * total + weights.sum(-1, keepdims=True), new

        zeros = jnp.zeros(q_i.shape, jnp.float32)
        start = zeros, zeros[..., :1], zeros[..., :1] - jnp.inf
        mixed, total, largest = jax.lax.fori_loop(0, i + 1, add_block, start)
        return (mixed / total).astype(v.dtype), largest + jnp.log(total)

    mixed, log_totals = jax.lax.map(mix, (jnp.arange(BLOCKS), q))
    return mixed, (q, k, v, mixed, log_totals)


def _backward(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, mixed, log_totals = kept
    means = jnp.sum(g.astype(jnp.float32) * mixed, -1, keepdims=True)

    def differentiate(dq: jax.Array, keys: Any) -> tuple[jax.Array, Any]:
        j, k_j, v_j = keys

        def add_block(i: Any, carry: Any) -> Any:
            dq, dk, dv = carry
            shares = jnp.exp(_scores(q[i], k_j, i, j) - log_totals[i])
            d_scores = shares * (_product("bhqd,bhkd->bhqk", g[i], v_j) - means[i])
            d_scores, shares = d_scores.astype(q.dtype), shares.astype(g.dtype)
            dq = dq.at[i].set(dq[i] + _product("bhqk,bhkd->bhqd", d_scores, k_j))
            dk += _product("bhqk,bhqd->bhkd", d_scores, q[i])
            return dq, dk, dv + _product("bhqk,bhqd->bhkd", shares, g[i])

        zeros = jnp.zeros(k_j.shape, jnp.float32)
        dq, dk, dv = jax.lax.fori_loop(j, BLOCKS, add_block, (dq, zeros, zeros))
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    start = jnp.zeros(q.shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(differentiate, start, (jnp.arange(BLOCKS), k, v))
    return dq.astype(q.dtype), dk, dv


_attend.defvjp(_forward, _backward)


def _scores(q: jax.Array, k: jax.Array, i: Any, j: Any) -> jax.Array:
    """Return the scores of block `i` of the queries and block `j` of the keys."""
    rows = jnp.arange(q.shape[-2])
    is_earlier = rows + j * rows.size <= (rows + i * rows.size)[:, None]
    return jnp.where(is_earlier, _product("bhqd,bhkd->bhqk", q, k), -jnp.inf)


def _product(indices: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(indices, x, y, preferred_element_type=jnp.float32)
