"""Uses of Flax's `DynamicScale` in public programs give the same results with ours."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training import dynamic_scale, train_state

import optax_lossscale.flax as ols_flax

pytestmark = pytest.mark.integration


def loss_fn(w):
    return jnp.sum(w.astype(jnp.float16).astype(jnp.float32) ** 2)


def step(ds, w=1.0, **options):
    """Return the results of a step on two parameters, without class-specific types."""
    result = ds.value_and_grad(options.pop("fun", loss_fn), **options)(jnp.full(2, w))
    after = result.dynamic_scale
    return after.scale, after.fin_steps, *result[1:]


def both_steps(ds):
    """Return the results of a finite step and of one that overflows."""
    # In Flax, a Python float would take the dtype of `minimum_scale`, such as float16.
    return [step(ds.replace(scale=jnp.float32(scale))) for scale in (8, 2**20)]


def as_static_field(lib):
    class State(train_state.TrainState):
        loss_scale: lib.DynamicScale = struct.field(pytree_node=False)

    params, loss_scale = {"w": jnp.ones(2)}, lib.DynamicScale(scale=8.0)
    state = State.create(apply_fn=None, params=params, tx=optax.sgd(0.1), loss_scale=loss_scale)

    @jax.jit
    def train_step(state):
        grads = state.loss_scale.value_and_grad(lambda p: loss_fn(p["w"]))(state.params).grad
        return state.apply_gradients(grads=grads)

    return train_step(state).params


def as_static_argument(lib):
    static = jax.jit(lambda w, ds: step(ds, w), static_argnames="ds")
    return [static(jnp.float32(1), ds=lib.DynamicScale(scale=s)) for s in (8.0, 8.0, 2.0**20)]


def with_nnx(lib):
    params = nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Param)
    result = lib.DynamicScale(scale=8.0).value_and_grad(lambda p: loss_fn(p["scale"][...]))(params)
    assert isinstance(result.grad, nnx.State)
    return jax.tree.leaves(result.grad)


def traced_minimum(lib):
    return jax.jit(lambda m: step(lib.DynamicScale(scale=2.0**20, minimum_scale=m)))(2.0**19.5)


USES = {
    "a field that is static": as_static_field,
    "a static argument": as_static_argument,
    "nnx": with_nnx,
    "a traced minimum": traced_minimum,
    "as NumPy arrays": lambda lib: step(jax.tree.map(np.array, lib.DynamicScale())),
    "compared": lambda lib: [lib.DynamicScale() == lib.DynamicScale(scale=s) for s in (2.0, 2**16)],
    "a float16 gradient": lambda lib: step(
        lib.DynamicScale(scale=8.0), jnp.float16(1), fun=lambda w: jnp.sum(w.astype(jnp.float32))
    ),
    "aux in a list": lambda lib: step(
        lib.DynamicScale(), fun=lambda w: [jnp.sum(w), 1], has_aux=True
    ),
    "aux and more": lambda lib: step(
        lib.DynamicScale(), fun=lambda w: (jnp.sum(w), 1, "more"), has_aux=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_use_of_flaxs_module_gives_the_same_with_ours(use):
    actual, expected = (jax.device_get(USES[use](lib)) for lib in (ols_flax, dynamic_scale))
    np.testing.assert_equal(actual, expected)
    assert jax.tree.map(np.result_type, actual) == jax.tree.map(np.result_type, expected)


@pytest.mark.parametrize(
    "hyperparams",
    [
        *({"minimum_scale": jnp.finfo(dtype).tiny} for dtype in ("float16", "bfloat16", "float32")),
        *({"minimum_scale": cast(2**19.5)} for cast in (jnp.float32, jnp.bfloat16, np.float64)),
        *({"minimum_scale": minimum} for minimum in (0, 1, None)),
        {"growth_factor": 1.0, "backoff_factor": 1.0},
        {"growth_factor": np.float64(1.7), "growth_interval": 0},
        {"backoff_factor": jnp.float32(0.3)},
        *({"growth_interval": n} for n in (0, -1, np.int64(2**40), 2000.0, float("inf"))),
    ],
    ids=str,
)
@pytest.mark.slow
def test_hyperparameters_that_flax_takes_do_the_same_here(hyperparams):
    actual, expected = (
        jax.device_get(both_steps(lib.DynamicScale(**hyperparams)))
        for lib in (ols_flax, dynamic_scale)
    )
    np.testing.assert_equal(actual, expected)
