"""`precision_report` sees every matrix product that runs, and in which dtype."""

import dataclasses
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal, shape
from flax import nnx
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec

from optax_lossscale.diagnostics import MatrixProducts, precision_report

# Users' programs rely on dtype promotion, and the report shows its effect.
pytestmark = pytest.mark.integration
F16, F32 = jnp.float16, jnp.float32
X, W = shape(4, 8, dtype=F16), shape(8, 8, dtype=F16)
CLOSED_OVER = np.ones((8, 8), np.float32)
ONE = 2 * 4 * 8 * 8  # the operations of X @ W


def counts(fun, *args, **kwargs):
    report = precision_report(fun, *args, **kwargs)
    return {dtype: products.count for dtype, products in report.items()}


def line_of(comment):
    """Return path, number and text of the line in this file that ends with `comment`."""
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    ((number, line),) = ((n, line) for n, line in lines if line.endswith(comment))
    return f"{__file__}:{number}: {line.strip()}"


@pytest.mark.slow
def test_a_step_that_updates_an_nnx_module_is_counted():
    def loss_fn(model, x):
        return jnp.mean(model(x))

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss_fn)(model, x))

    first, head = (nnx.Linear(8, 8, dtype=dtype, rngs=nnx.Rngs(0)) for dtype in ("bfloat16", F32))
    model = nnx.Sequential(first, head)
    optimizer, x = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), jnp.ones((4, 8))
    assert counts(loss_fn, model, x) == {"bfloat16": 1, "float32": 1}
    assert counts(nnx.jit(nnx.value_and_grad(loss_fn)), model, x) == {"bfloat16": 2, "float32": 3}
    for fun in (step, nnx.jit(step)):
        assert counts(fun, model, optimizer, x) == {"bfloat16": 2, "float32": 2}


def in_scan(x, w):
    outer = lambda x, _: lax.scan(lambda x, _: (x @ w, None), x, length=3)  # noqa: E731
    return lax.scan(outer, x, length=5)[0]


def in_a_carry_that_another_reads(x, w):
    carry = 0, x, jnp.zeros_like(x)
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w, c[2] + c[1]), carry)[2]


def in_cond(*functions):
    return lambda x, w: lax.switch(x[0, 0].astype(int), functions, x, w)


def wide(x, w):
    return (x.astype(F32) @ w.astype(F32)).astype(F16)


doubled = jax.custom_vjp(jnp.matmul)
doubled.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (2 * (g.astype(F32) @ kept[1].T.astype(F32)).astype(F16), 2 * kept[0].T @ g),
)


one_way = jax.custom_jvp(jnp.matmul)
one_way.defjvps(lambda tangent, _, __, w: tangent @ w, None)


def in_pallas(x, w):
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    row, whole = pallas.BlockSpec((1, 8), lambda i: (i, 0)), pallas.BlockSpec(w.shape)
    where = {"grid": (4,), "in_specs": [row, whole], "out_specs": row}
    return pallas.pallas_call(kernel, X, **where, interpret=True)(x, w)


def in_shard_map(x, w):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("data")
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)
    return mapped(x, w)


def unused(x, w):
    _ = x @ w @ w
    _, kept = jax.jit(lambda x: (x @ w @ w, x @ w))(x)
    return kept, 1.0


def of_both(fun):
    return jax.grad(lambda x, w: fun(x, w).astype(F32).sum(), (0, 1))


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (jax.jit(jnp.matmul), {"float16": 1}),
        (lambda x, w: jnp.dot(x, w, preferred_element_type=F32), {"float16": 1}),
        (lambda x, w: x.astype(F32) @ w, {"float32": 1}),
        (lambda x, w: x.astype("int8") @ w.astype("int8"), {"int8": 1}),
        # dtypes that do not promote
        (
            lambda x, w: lax.dot(x.astype("float8_e5m2"), w.astype("float8_e4m3fn")),
            {"float8_e4m3fn x float8_e5m2": 1},
        ),
        (lambda x, w: x + w[:4], {}),
        (in_scan, {"float16": 15}),
        (of_both(in_scan), {"float16": 15 * 3}),
        (lambda x, w: jnp.linalg.solve(w.astype(F32), x.T.astype(F32)), {}),  # no product runs
        # The stacked result is not used.
        (lambda x, w: lax.scan(lambda x, _: (x @ w, x @ w @ w), x, length=5)[0], {"float16": 5}),
        # The condition and the body of a loop.
        (
            lambda x, w: lax.while_loop(
                lambda c: (c[0] @ w).sum() < c[1], lambda c: (c[0] @ w, c[1]), (x, F16(9))
            )[0],
            {"float16": 2},
        ),
        (in_a_carry_that_another_reads, {"float16": 1}),
        (lambda x, w: jax.jit(lambda x: (x @ w, 1.0))(x), {"float16": 1}),
        (lambda x, w: lax.fori_loop(0, 6, lambda _, x: x @ w, x), {"float16": 6}),
        (in_cond(jnp.matmul, lambda x, w: x @ w @ w, lambda x, _: x), {"float16": 2}),
        (in_cond(jnp.matmul, wide), {"float16": 1, "float32": 1}),
        (doubled, {"float16": 1}),
        (of_both(doubled), {"float16": 1, "float32": 1}),
        (one_way, {"float16": 1}),
        (jax.grad(lambda x, w: one_way(x, w).astype(F32).sum()), {"float16": 1}),
        (of_both(lambda x, w: jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)(x)), {"float16": 5}),
        (in_pallas, {"float16": 4}),
        (in_shard_map, {"float16": 1}),
        (unused, {"float16": 1}),
    ],
)
def test_products_in_every_control_flow_and_custom_derivative_are_counted(fun, expected):
    assert counts(fun, X, W) == expected
    assert counts(fun, *normal([X, W])) == expected
    while_tracing = []
    jax.eval_shape(lambda x, w: while_tracing.append(counts(fun, x, w)), X, W)
    assert while_tracing == [expected]


def test_products_in_a_primitive_with_several_functions_are_counted():
    assert set(counts(jax.scipy.sparse.linalg.cg, shape(8, 8), shape(8))) == {"float32"}


def convolution(lhs, kernel, **options):
    options = {"window_strides": (1, 1), "padding": "VALID"} | options
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(lhs, kernel, dimension_numbers=numbers, **options)


IMAGES, KERNEL = shape(2, 9, 9, 4), shape(3, 3, 4, 6)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (jnp.dot, (X, W)),
        (jnp.dot, (shape(8), shape(8))),
        (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (shape(3, 4, 5), shape(3, 6, 5))),
        (convolution, (IMAGES, KERNEL)),
        (partial(convolution, window_strides=(2, 3), rhs_dilation=(2, 1)), (IMAGES, KERNEL)),
        (partial(convolution, feature_group_count=2), (IMAGES, shape(3, 3, 2, 6))),
        (partial(convolution, batch_group_count=2), (IMAGES, KERNEL)),
    ],
)
def test_operations_agree_with_the_count_of_xla(fun, args):
    (products,) = precision_report(fun, *args).values()
    lowered = jax.jit(fun).lower(*(shape(*arg.shape) for arg in args))
    assert products.flops == lowered.cost_analysis()["flops"]


def test_the_gradient_of_a_strided_convolution_takes_about_as_many_operations():
    given = shape(2, 8, 8, 4), shape(2, 2, 4, 6)
    loss = lambda *args: convolution(*args, window_strides=(2, 2)).sum()  # noqa: E731
    forward, backward = (precision_report(f, *given)["float32"] for f in (loss, jax.grad(loss)))
    assert backward.flops == pytest.approx(forward.flops, rel=0.35)  # the padding differs


def test_each_row_of_a_ragged_product_counts_the_operations_of_one_group():
    groups = np.array([1, 2, 3])
    given = shape(6, 4, dtype=F16), shape(3, 4, 5, dtype=F16)
    loss = lambda x, experts: lax.ragged_dot(x, experts, groups).astype(F32).sum()  # noqa: E731
    for fun, count in ((loss, 1), (jax.grad(loss, (0, 1)), 2)):
        (products,) = precision_report(fun, *given).values()
        assert (products.count, products.flops) == (count, count * 2 * 6 * 4 * 5)


def test_the_source_is_the_line_of_the_product_with_the_most_operations():
    def fun(x, w):
        small = x[:1] @ w  # 1/4
        large = x @ w  # the largest
        often = lax.scan(lambda x, _: (x @ w, None), x[:1], length=8)[0]  # twice as much
        return small, large, often if x.dtype == F32 else 0

    assert precision_report(fun, X, W)["float16"].source == line_of("# the largest")
    wide = precision_report(fun, shape(4, 8), shape(8, 8))["float32"]
    assert wide.source == line_of("# twice as much")
    assert (wide.count, wide.flops) == (10, ONE // 4 + ONE + 2 * ONE)


def test_the_dtype_with_the_most_operations_is_first_in_order_and_in_print():
    def fun(x, w):
        wide = x.astype(F32) @ w.astype(F32)  # in float32
        return wide, x[:1] @ w, x[:1] @ w

    report = precision_report(fun, X, w=W)
    assert list(report) == ["float32", "float16"]
    assert str(report).splitlines()[:-1] == [
        "float32: 1 matrix product, 512 operations (66.7 %)",
        f"  the largest at {line_of('# in float32')}",
        "float16: 2 matrix products, 256 operations (33.3 %)",
    ]


def test_equally_large_dtypes_are_listed_in_the_same_order_in_each_process():
    assert [*precision_report(in_cond(jnp.matmul, wide), X, W)] == ["float16", "float32"]


def test_block_scaled_products_are_counted():
    operands = (jax.ShapeDtypeStruct((1, n, 32), "float8_e4m3fn") for n in (4, 6))
    scales = (jax.ShapeDtypeStruct((1, n, 1), "float8_e8m0fnu") for n in (4, 6))
    report = precision_report(jax.nn.scaled_matmul, *operands, *scales)
    assert report == {"float8_e4m3fn": MatrixProducts(1, 2 * 4 * 6 * 32, ANY)}


def test_reports_without_products_operations_or_lines_print():
    assert str(precision_report(jnp.sum, X)) == "No matrix products or convolutions."
    empty = precision_report(jnp.dot, np.zeros((0, 8)), np.zeros((8, 2)))
    assert "0 operations (0 %)" in str(empty)
    report = type(empty)({"float16": MatrixProducts(count=1, flops=2, source="")})
    assert repr(report) == "float16: 1 matrix product, 2 operations (100 %)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report["float16"].count = 2


def test_a_shape_in_the_result_is_passed_through():
    def fun(x):
        return x @ x.T, jax.eval_shape(jnp.sin, x)

    (products,) = precision_report(fun, jnp.ones((8, 8))).values()
    assert products.count == 1
