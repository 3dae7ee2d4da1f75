"""A step as XLA compiles it, and what it costs: figures of the program, without a clock."""

import jax
import jax.numpy as jnp
import optax


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def lowered_step(tx, params, grads=None, place=lambda shapes: shapes):
    """Lower a step that is given the loss, too, and overwrites parameters and state."""
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grads, loss):
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    given = params, place(jax.eval_shape(tx.init, params)), params if grads is None else grads
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        return jax.jit(step, donate_argnums=(0, 1)).lower(*given, loss)


def compiled_step(*args, **kwargs):
    return lowered_step(*args, **kwargs).compile()


def temporaries(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def bytes_accessed(compiled):
    return compiled.cost_analysis()["bytes accessed"]
