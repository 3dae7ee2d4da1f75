"""The names of JAX's primitives are those that JAX uses."""

import sys

import jax.experimental.pallas  # noqa: F401 - it defines primitives
from jax.extend.core import Primitive

from optax_lossscale._support import primitives

# jax 0.7 has no `stack`, for example, and 0.12 no `xla_pmap`.
NOT_IN_ALL_VERSIONS = {
    *("closed_call", "eval_jaxpr", "one_minus_square", "polynomial", "stack", "tile", "unstack"),
    "xla_pmap",
}


def test_every_name_is_that_of_a_primitive_of_jax():
    modules = [module for name, module in sys.modules.items() if name.startswith("jax.")]
    found = [x for module in modules for x in vars(module).values() if isinstance(x, Primitive)]
    made_by_jax = {primitive.name for primitive in found}
    ours = set().union(
        *(names for names in vars(primitives).values() if isinstance(names, frozenset)),
        [primitives.SCALED_PRODUCT],
    )
    assert ours - NOT_IN_ALL_VERSIONS <= made_by_jax
    assert ours >= NOT_IN_ALL_VERSIONS
