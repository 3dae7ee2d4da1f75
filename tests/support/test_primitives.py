"""The names of JAX's primitives are those that JAX uses."""

import ast
import sys
from pathlib import Path

import jax.experimental.pallas  # noqa: F401 - it defines primitives
from jax.extend.core import Primitive

from optax_lossscale._support import primitives

# jax 0.7 has no `stack`, for example, and 0.12 no `xla_pmap`.
NOT_IN_ALL_VERSIONS = {
    *("closed_call", "eval_jaxpr", "one_minus_square", "polynomial", "stack", "tile", "unstack"),
    "xla_pmap",
}


def all_names():
    constants = {key: names for key, names in vars(primitives).items() if key.isupper()}
    return set().union(*({x} if isinstance(x, str) else x for x in constants.values()))


def test_every_name_is_that_of_a_primitive_of_jax():
    modules = [module for name, module in sys.modules.items() if name.startswith("jax.")]
    found = [x for module in modules for x in vars(module).values() if isinstance(x, Primitive)]
    made_by_jax = {primitive.name for primitive in found}
    ours = all_names()
    assert ours - NOT_IN_ALL_VERSIONS <= made_by_jax
    assert ours >= NOT_IN_ALL_VERSIONS


def test_no_other_module_compares_an_equation_with_a_name():
    package = Path(primitives.__file__).parents[1]
    names, found = all_names(), []
    for path in set(package.rglob("*.py")) - {Path(primitives.__file__)}:
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        inside = [
            x for node in nodes if isinstance(node, ast.Compare | ast.Set) for x in ast.walk(node)
        ]
        found += [(path.name, x.value) for x in inside if getattr(x, "value", None) in names]
    assert found == []
