"""Solvers such as Optimistix make pytrees of functions, and hash what those close over.

`make oracles` runs Optimistix itself; here are Equinox's functions that it uses.
"""

import copy
import functools

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from arrays import ones, shape

import optax_lossscale as ols
from optax_lossscale._support.lines import GivenWarnings
from optax_lossscale.keras import loss_scale_optimizer

PARAMS = ones({"w": shape(8, 8)})
HALF = ols.cast(PARAMS, jnp.bfloat16)
ADAM = optax.adam(1e-2)
STATE = ols.init(1024)


def loss_fn(params, *_):
    return jnp.mean((params["w"] @ params["w"] - 1) ** 2)


def never(*_, **__):
    return False


FUNCTIONS = {
    "autocast": (ols.autocast(loss_fn, jnp.bfloat16), (PARAMS,)),
    "autocast to float32": (ols.autocast(loss_fn, jnp.float32), (HALF,)),
    "scale_inside": (ols.scale_inside(loss_fn, 2.0), (PARAMS,)),
    "value_and_grad": (ols.value_and_grad(loss_fn), (STATE, PARAMS)),
    "grad": (ols.grad(loss_fn), (STATE, PARAMS)),
    "keyword arguments": (ols.value_and_grad(loss_fn, allow_int=True), (STATE, PARAMS)),
    "argnums in a list": (ols.grad(loss_fn, argnums=[0, 1]), (STATE, PARAMS, PARAMS)),
    "a partial": (ols.value_and_grad(functools.partial(loss_fn)), (STATE, PARAMS)),
    "one in another": (
        ols.value_and_grad(ols.scale_inside(ols.autocast(loss_fn, jnp.float16), 8.0)),
        (STATE, PARAMS),
    ),
}
OPTIMIZERS = {
    "with_loss_scaling": ols.with_loss_scaling(ADAM, 1024),
    "dynamic": ols.with_loss_scaling(ADAM, ols.DynamicLossScale().get_config()),
    "rules in a list": ols.with_skipping(ADAM, [ols.Spike("grad_norm"), never]),
    "axes": ols.with_skipping(ADAM, axis_name=None),
    "with_stochastic_rounding": ols.with_stochastic_rounding(ADAM),
    "with_master_weights": ols.with_master_weights(ADAM, remainders=True),
    "with_bfloat16_state": ols.with_bfloat16_state(ADAM, keep=lambda path: ".mu" in path),
    "all of them": ols.with_loss_scaling(
        ols.with_master_weights(ols.with_bfloat16_state(ADAM)), skip_if=[never]
    ),
    "Keras": loss_scale_optimizer(ADAM, clipnorm=1.0, use_ema=True, ema_overwrite_frequency=2),
}
ROUNDING = "with_stochastic_rounding", "with_master_weights", "all of them"


def closed_over(fun):
    """Yield what a function, and the functions among that, close over."""
    for cell in getattr(fun, "__closure__", None) or ():
        yield cell.cell_contents
        if callable(cell.cell_contents):
            yield from closed_over(cell.cell_contents)


def as_pytree(fun, *args):
    """Call a function as a solver does."""
    return eqx.filter_jit(lambda fun, args: fun(*args))(eqx.internal.closure_to_pytree(fun), args)


@pytest.mark.integration
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_a_pytree_of_hashable_values(name):
    fun, args = FUNCTIONS[name]
    assert len([hash(value) for value in closed_over(fun)]) > 0
    jax.block_until_ready(as_pytree(fun, *args))


@pytest.mark.integration
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_a_pytree_of_hashable_values(name):
    tx = OPTIMIZERS[name]
    params = HALF if name in ROUNDING else PARAMS
    assert len([hash(value) for fun in tx for value in closed_over(fun)]) > 0
    jax.block_until_ready(as_pytree(tx.update, params, tx.init(params), params))


def test_given_warnings_are_compared_by_identity_and_copied_as_new_ones():
    given, others = GivenWarnings(["heard"]), GivenWarnings(["heard"])
    assert given != others
    assert len({given, others}) == 2
    for copied in (copy.deepcopy(given), cloudpickle.loads(cloudpickle.dumps(given))):
        assert {*copied} == {"heard"}
        copied.add("another")
    assert {*given} == {"heard"}


@pytest.mark.integration
def test_a_function_and_an_optimizer_can_be_pickled():
    fun, tx = cloudpickle.loads(
        cloudpickle.dumps((FUNCTIONS["one in another"][0], OPTIMIZERS["rules in a list"]))
    )
    loss, grads = fun(STATE, PARAMS)
    tx.update(grads, tx.init(PARAMS), PARAMS, value=loss)
