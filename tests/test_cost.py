"""What loss scaling costs, as far as it does not depend on a clock.

Temporary memory, aliased buffers, copies, bytes accessed, the size of the program and the number
of compilations are facts of the compiled step. `benchmarks/` measures time.
"""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from plain_where import with_plain_where

import optax_lossscale as ols

pytestmark = pytest.mark.integration

SHAPES = [(512, 512)] * 6 + [(64, 3, 3, 128), (1024, 300), (512,), (7,), ()]

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(1e-3),
    "sgd with momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
    "adam in a chain": optax.chain(optax.clip(1.0), optax.adam(optax.cosine_decay_schedule(1, 9))),
}


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compile_step(tx, shapes, grad_dtype=jnp.float32):
    """Compile the step as a user writes it, and return it with the bytes of params and state."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grads = [jax.ShapeDtypeStruct(shape, grad_dtype) for shape in shapes]
    state = jax.eval_shape(tx.init, params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    return compiled, nbytes(params), nbytes(state)


def in_float32(tx):
    """What plain Optax needs to take float16 gradients without turning its state into float16."""
    cast = optax.stateless_with_tree_map(lambda g, _: g.astype(jnp.float32))
    return optax.chain(cast, tx)


def large_copies(compiled, size):
    """Return the `copy` instructions of arrays with at least `size` elements."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", compiled.as_text())
    return [shape for shape in found if shape and math.prod(map(int, shape.split(","))) >= size]


def temporaries(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def bytes_accessed(compiled):
    return compiled.cost_analysis()["bytes accessed"]


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def optimizer(request):
    return request.param


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_step_takes_next_to_no_memory(optimizer, dtype):
    plain, params, _ = compile_step(in_float32(optimizer), SHAPES, dtype)
    scaled, _, _ = compile_step(ols.with_loss_scaling(optimizer), SHAPES, dtype)
    assert temporaries(scaled) <= temporaries(plain) + 0.02 * params


def test_params_and_state_are_updated_in_place(optimizer):
    plain, _, _ = compile_step(optimizer, SHAPES)
    scaled, params, state = compile_step(ols.with_loss_scaling(optimizer), SHAPES)
    assert scaled.memory_analysis().alias_size_in_bytes == params + state
    # Lion reads the old moment for the update and for the new moment, and copies it by itself.
    assert len(large_copies(scaled, 512)) == len(large_copies(plain, 512))


def test_the_gradients_are_read_once_more(optimizer):
    plain, params, _ = compile_step(optimizer, SHAPES)
    scaled, _, _ = compile_step(ols.with_loss_scaling(optimizer), SHAPES)
    # One read of the gradients, and 2 % of it for the flags of the groups and the counters.
    assert bytes_accessed(scaled) <= bytes_accessed(plain) + 1.02 * params


def test_adamw_accesses_at_most_twelve_percent_more():
    plain, _, _ = compile_step(optax.adamw(1e-3), SHAPES)
    scaled, _, _ = compile_step(ols.with_loss_scaling(optax.adamw(1e-3)), SHAPES)
    assert bytes_accessed(scaled) <= 1.12 * bytes_accessed(plain)


def test_what_checks_nothing_costs_nothing(optimizer):
    plain, _, _ = compile_step(optimizer, SHAPES)
    scaled, _, _ = compile_step(
        ols.with_loss_scaling(optimizer, ols.FixedLossScale(1024, skip_nonfinite=False)), SHAPES
    )
    assert temporaries(scaled) <= temporaries(plain) + 1024
    assert bytes_accessed(scaled) <= bytes_accessed(plain) + 1024
    assert len(large_copies(scaled, 512)) == len(large_copies(plain, 512))


def test_plain_where_on_the_outputs_copies_the_state():
    # The reason for `_step/replay.py`, and what shows that the tests above can fail. When this one
    # fails, XLA has learnt to do without, and the module can go.
    plain, params, _ = compile_step(optax.adamw(1e-3), SHAPES)
    copying, _, _ = compile_step(
        with_plain_where(optax.adamw(1e-3), ols.DynamicLossScale()), SHAPES
    )
    assert temporaries(copying) > temporaries(plain) + 1.5 * params
    assert len(large_copies(copying, 512)) > 8
    assert bytes_accessed(copying) > 1.4 * bytes_accessed(plain)


def program_size(tx, n_arrays):
    compiled, _, _ = compile_step(tx, [(40, 32)] * n_arrays)
    return len(compiled.as_text())


def test_the_program_grows_linearly_with_the_number_of_arrays():
    tx = ols.with_loss_scaling(optax.adamw(1e-3))
    small, medium, large = (program_size(tx, n) for n in (20, 40, 80))
    assert large - medium <= 1.1 * 2 * (medium - small)


def test_a_conjunction_of_flags_grows_quadratically():
    # Shows that the test above can fail: the flags of the reference are combined with `and`.
    tx = with_plain_where(optax.adamw(1e-3), ols.DynamicLossScale())
    small, medium, large = (program_size(tx, n) for n in (20, 40, 80))
    assert large - medium > 1.1 * 2 * (medium - small)


def test_one_compilation_serves_good_and_bad_steps(optimizer):
    tx = ols.with_loss_scaling(optimizer, ols.DynamicLossScale(growth_interval=2))
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}

    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for factor in (1.0, jnp.nan, 1.0, jnp.inf, 1.0):
        params, state = step(params, state, optax.tree.scale(factor, params))
    assert state.loss_scale_state.total_skipped == 2
    assert len(traces) == 1


def test_buffers_are_donated():
    tx = ols.with_loss_scaling(optax.adam(1e-3))
    params = jnp.ones((256, 256))
    state = tx.init(params)
    step = jax.jit(tx.update, donate_argnums=1)
    _, new_state = step(params, state, params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new_state))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_check_writes_no_mask_of_the_array(dtype):
    array = jax.ShapeDtypeStruct((2048, 1024), dtype)
    ours = jax.jit(ols.all_finite).lower(array).compile()
    assert temporaries(ours) <= array.size / 16
    # Shows that it can fail, and that the groups are still needed.
    mask = jax.jit(lambda x: jnp.all(jnp.isfinite(x))).lower(array).compile()
    assert temporaries(mask) >= array.size
