"""Matrix products in half precision, in a form that XLA:CPU computes exactly and fast.

For XLA:CPU since jaxlib 0.11.2 (to 0.12.0). If an operand has several free or contracted axes, as
in a layer on `(batch, time, width)`, XLA puts a transpose in front of the product
(`DotDecomposer`), and a later pass folds it in again. The product is then not one for its library
(YNNPACK), but a plain loop that adds in half precision: 8,192 ones give 6,656. Products of
matrices, with or without leading batch axes, go to the library, which adds in float32 and runs on
AMX (`amx_bf16`). So such a product becomes transposes, reshapes and a product of matrices.

A training step of a transformer runs at 1.8 times the speed of float32, with scanned layers at 2.0
times, instead of .53 (a Xeon with AMX, two cores). Its gradients are off by .007 to .011 instead of
.022 to .065. Remove this file once `test_xla_adds_other_products_in_half_precision` fails.

A merged axis may be sharded, where a reshape would exchange data. So products of arrays on several
devices, and on other platforms, are left alone, as far as their types show it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_lossscale._autocast import edits
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Equation, Jaxpr

enabled = True  # what counts programs for other platforms, without a mesh, turns it off


def is_default_device() -> bool | None:
    """Return whether an array without a mesh is on the only device, a CPU; None if not `enabled`.

    An exported function, and a single device of another platform, cannot be seen here. They get
    this form too, which is right there.
    """
    if not enabled:
        return None
    device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    platform = getattr(device, "platform", device) or jax.default_backend()
    return platform == "cpu" and jax.device_count() == 1


def product_of_matrices(eqn: Equation, *, is_default: bool | None) -> list[Equation]:
    """Return a product as transposes, reshapes and a product of matrices, where XLA:CPU needs it.

    Elsewhere it is returned alone. `is_default` is the result of `is_default_device`.
    """
    if eqn.primitive.name != primitives.PRODUCT or not _is_on_one_cpu(eqn, is_default=is_default):
        return [eqn]
    (result,) = eqn.outvars
    avals, params = (*(x.aval for x in eqn.invars), result.aval), tuple(eqn.params.items())
    with eqn.ctx.manager:  # with the mesh of the product
        jaxpr = _traced(avals, params, eqn.ctx.cur_abstract_mesh)
    return edits.inlined(jaxpr, eqn.invars, [result], beside=eqn)


def _is_on_one_cpu(eqn: Equation, *, is_default: bool | None) -> bool:
    """Return whether a product runs on a CPU, with no axis sharded over devices there."""
    if is_default is None:
        return False
    contexts = [eqn.ctx.cur_abstract_mesh, *(x.aval.sharding.mesh for x in eqn.invars)]
    meshes = [mesh for mesh in contexts if not mesh.empty]
    return all(map(_has_local_axes, meshes)) if meshes else is_default


def _has_local_axes(mesh: Any) -> bool:
    """Return whether no axis of an array is sharded over devices, and they are CPUs."""
    device = getattr(mesh, "abstract_device", None)  # jax 0.7 does not have it
    platform = device.platform if device else jax.default_backend()
    is_manual = {*mesh.axis_types} == {AxisType.Manual}  # as in `shard_map`: shapes are local
    return platform == "cpu" and (mesh.size == 1 or is_manual)


@functools.lru_cache
def _traced(avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...], mesh: Any) -> Jaxpr:
    del mesh  # it is a part of the key
    *operands, result = avals
    fun = functools.partial(_merged, result=result, **dict(params))
    return jaxprs.without_constants(jaxprs.make_jaxpr(fun)(*operands))


def _merged(
    lhs: jax.Array, rhs: jax.Array, *, result: Any, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """Return a `dot_general` as a product of matrices: `(rows, contracted)` times its columns."""
    contracted, batch = dimension_numbers
    free = [
        [axis for axis in range(x.ndim) if axis not in (*contracted[side], *batch[side])]
        for side, x in enumerate((lhs, rhs))
    ]
    x = _matrices(lhs, batch[0], free[0], contracted[0])
    y = _matrices(rhs, batch[1], contracted[1], free[1])
    front = tuple(range(len(batch[0])))
    numbers = ((x.ndim - 1,), (y.ndim - 2,)), (front, front)
    product = jax.lax.dot_general(x, y, numbers, **params)
    return _reshaped(product, result.shape, result.sharding.spec)


def _matrices(x: jax.Array, batch: Sequence[int], *sides: Sequence[int]) -> jax.Array:
    """Return an array with its axes merged into batch axes, and one axis for each of two sides."""
    turned = jax.lax.transpose(x, [*batch, *(axis for side in sides for axis in side)])
    sizes = (math.prod(x.shape[axis] for axis in side) for side in sides)
    return _reshaped(turned, (*turned.shape[: len(batch)], *sizes))


def _reshaped(x: jax.Array, shape: Sequence[int], spec: Any = None) -> jax.Array:
    """Reshape an array. With Explicit axes in its mesh, JAX asks how the result is sharded."""
    mesh: Any = jax.typeof(x).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
        return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, spec or PartitionSpec()))
    return jax.lax.reshape(x, shape)
