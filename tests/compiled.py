"""A step as XLA compiles it, and what it costs: figures of the program, without a clock."""

import jax
import jax.numpy as jnp
import optax

# For tests with all optimizations: `conftest.py` turns this one off in a quick run.
IS_KNOWN = jax.version.__version_info__[:2] == (0, 10)
OPTIMIZED = {"xla_cpu_use_fusion_emitters": True} if IS_KNOWN else None
LOSS = jax.ShapeDtypeStruct((), jnp.float32)


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def lowered_step(tx, params, grads=None, *, place=lambda shapes: shapes, **extra_args):
    """Lower a step that overwrites parameters and state, given shapes in place of arrays."""

    def step(params, state, grads, extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    state = place(jax.eval_shape(tx.init, params))
    given = params, state, params if grads is None else grads, extra_args
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        return jax.jit(step, donate_argnums=(0, 1)).lower(*given)


def compiled_step(*args, **kwargs):
    return lowered_step(*args, **kwargs).compile(OPTIMIZED)


def temporaries(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def bytes_accessed(compiled):
    return compiled.cost_analysis()["bytes accessed"]
