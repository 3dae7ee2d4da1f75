"""Products in half precision on a CPU: exact in every form and context."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from arrays import shape
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale._autocast import products_on_cpu

BF16 = jnp.bfloat16
WORKER = Path(__file__).parents[1] / "cpu_worker.py"


def errors(*arguments):
    command = [sys.executable, WORKER, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_gradients_are_as_exact_as_their_dtype_in_every_form_and_context(devices):
    found = errors(devices)
    assert len(found) >= 36
    assert {name: error for name, error in found.items() if not error < 0.006} == {}


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, jaxlib.__version__.split(".")[:3])) < (0, 11, 2),
    reason="XLA:CPU adds these products in float32 before jaxlib 0.11.2",
)
def test_xla_adds_other_products_in_half_precision():
    found = errors(2, "--off")
    assert found["dense on three axes, shard_map, bfloat16"] > 0.01
    assert found["attention's scores, shard_map, bfloat16"] > 0.006


def products(fun, *args):
    """Return the operands' shapes and the numbers of dimensions of each product in bfloat16."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            operands = [x.aval for x in eqn.invars]
            if eqn.primitive.name == "dot_general" and operands[0].dtype == BF16:
                found.append((*(x.shape for x in operands), eqn.params["dimension_numbers"]))
            for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(param, "eqns"):
                    walk(getattr(param, "jaxpr", param))

    walk(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


def of_matrices(lhs, rhs, numbers):
    """Return whether a product has one free and one contracted axis on each side."""
    (contracted, others), (batch, other_batch) = numbers
    is_plain = batch == other_batch == tuple(range(len(batch)))
    return (
        is_plain and len(contracted) == len(others) == 1 and len(lhs) == len(rhs) == len(batch) + 2
    )


def attention(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v).sum()


QKV = shape(8, 16, 2, 8), shape(8, 16, 2, 8), shape(8, 16, 2, 8)
STEP = jax.grad(ols.autocast(attention, BF16), argnums=(0, 1, 2))


def mapped(fun, axis_types):
    mesh = jax.make_mesh((2, 1), ("b", "h"), axis_types=axis_types, devices=jax.devices()[:2])
    names = {"b", "h"} if axis_types[1] == AxisType.Auto else {"b"}
    return jax.shard_map(
        fun, mesh=mesh, in_specs=P("b"), out_specs=P("b"), axis_names=names, check_vma=False
    )


def per_device(fun):
    return lambda *args: (fun(*args)[None],)


def test_a_product_is_one_of_matrices_where_all_axes_are_local():
    step = ols.autocast(mapped(per_device(attention), (AxisType.Auto, AxisType.Auto)), BF16)
    found = products(jax.grad(lambda *args: step(*args)[0].sum(), argnums=(0, 1, 2)), *QKV)
    assert len(found) == 6
    assert all(of_matrices(*each) for each in found)


def one_device(axis_type):
    return jax.make_mesh((1,), ("b",), axis_types=(axis_type,), devices=jax.devices()[:1])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("b"), P(None, None, "b"), P()])
def test_a_mesh_of_one_cpu_gets_products_of_matrices(axis_type, spec):
    sharding = NamedSharding(one_device(axis_type), spec)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in QKV]
    found = products(STEP, *args)
    assert len(found) == 6
    assert all(of_matrices(*each) for each in found)
    shardings = [x.sharding for x in jax.eval_shape(STEP, *args)]
    plain = jax.grad(attention, argnums=(0, 1, 2))
    assert shardings == [x.sharding for x in jax.eval_shape(plain, *args)]


def test_products_of_several_devices_are_left_alone():
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharded = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(None, "b")))
        for x in QKV
    ]
    partly = ols.autocast(mapped(per_device(attention), (AxisType.Auto, AxisType.Explicit)), BF16)
    assert not all(of_matrices(*each) for each in products(STEP, *QKV))  # eight devices
    assert not all(of_matrices(*each) for each in products(STEP, *sharded))
    assert not all(of_matrices(*each) for each in products(partly, *QKV))


def test_the_switch_and_the_default_device_are_part_of_the_key(monkeypatch):
    inner = jax.jit(attention)  # whose edited forms are kept

    def is_of_matrices():
        step = ols.autocast(functools.partial(inner), BF16)
        return all(of_matrices(*each) for each in products(step, *QKV))

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    found = []
    for enabled in (True, False, True):
        monkeypatch.setattr(products_on_cpu, "enabled", enabled)
        found.append(is_of_matrices())
    assert found == [True, False, True]
    with jax.default_device("cpu"):
        assert is_of_matrices()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not is_of_matrices()
    with jax.default_device(jax.devices("cpu")[0]):
        assert is_of_matrices()


def test_names_stored_arguments_reports_and_empty_arrays_are_as_before(monkeypatch):
    def loss(w, x):
        y = checkpoint_name(jnp.einsum("btd,dhf->bthf", x, w), "named")
        return jnp.sum(y**2)

    args = shape(16, 2, 8, dtype=BF16), shape(4, 16, 16)
    policy = jax.checkpoint_policies.save_only_these_names("named")

    def measured():
        step = ols.autocast(jax.checkpoint(loss, policy=policy), BF16)
        pullback = jax.eval_shape(lambda *args: jax.vjp(step, *args)[1], *args)
        kept = sorted(f"{x.dtype}{x.shape}" for x in jax.tree.leaves(pullback))
        report = ols.diagnostics.precision_report(jax.grad(step), *args)
        grad = jax.eval_shape(jax.grad(step), *args)
        return kept, dict(report.items()), grad

    before = measured()
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert measured() == before
    assert "bfloat16(4, 16, 2, 8)" in before[0]
    nothing = ols.autocast(functools.partial(jnp.einsum, "btd,dhf->bthf"), BF16)
    empty = jax.eval_shape(nothing, shape(0, 16, 16), shape(16, 2, 8))
    assert empty.shape == (0, 16, 2, 8)
