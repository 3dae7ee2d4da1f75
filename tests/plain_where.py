"""The simplest optimizer with loss scaling, and a bitwise comparison with it.

It is the oracle for `with_loss_scaling`. It shares only the state types and the policies with the
package. The finiteness check is a conjunction, and the skip is `jnp.where` on the results of the
inner optimizer.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols


def with_plain_where(inner, policy):
    """Return `with_loss_scaling(inner, policy)`, written directly from its contract."""
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return ols.GuardState(policy.init(), (), inner.init(params))

    def update(updates, state, params=None, **extra_args):
        reciprocal = 1 / state.loss_scale_state.loss_scale
        grads = jax.tree.map(lambda g: g * reciprocal, updates)
        flags = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        finite = functools.reduce(operator.and_, flags)
        loss_finite = jnp.all(jnp.isfinite(extra_args.get("value", 0.0)))
        applied = finite & loss_finite

        def unless_skipped(tree):
            return jax.tree.map(lambda x: jnp.where(applied, x, jnp.zeros_like(x)), tree)

        new_updates, new_inner = inner.update(
            unless_skipped(grads), state.inner_state, params, **unless_skipped(extra_args)
        )
        return (
            jax.tree.map(lambda u: jnp.where(applied, u, -jnp.zeros_like(u)), new_updates),
            ols.GuardState(
                policy.update(state.loss_scale_state, finite, loss_finite=loss_finite),
                state.rule_states,
                jax.tree.map(
                    lambda new, old: jnp.where(applied, new, old), new_inner, state.inner_state
                ),
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def bits(leaf):
    """Return the bytes of an array's elements."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.frombuffer(np.asarray(leaf).tobytes(), np.uint8)


def assert_same_bits(actual, expected):
    """Compare structure, shapes, dtypes and bits of two trees."""
    actual_leaves, actual_def = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_def = jax.tree_util.tree_flatten_with_path(expected)
    assert actual_def == expected_def
    for (path, a), (_, b) in zip(actual_leaves, expected_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b)), name
        assert np.array_equal(bits(a), bits(b)), f"{name}: {a} is not {b}"


def types(tree):
    """Return the shape and the dtype of each leaf."""
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)
