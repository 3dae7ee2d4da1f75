"""Functions as JAX traces them."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import jax

# `jax.extend.core` has these classes. Importing it takes as long as all else of the package.
Jaxpr: TypeAlias = Any
ClosedJaxpr: TypeAlias = Any
Equation: TypeAlias = Any
Variable: TypeAlias = Any


def is_literal(atom: Any) -> bool:
    """Return whether what an equation reads is a number, and not a variable."""
    return hasattr(atom, "val")


def read_by(equations: Iterable[Equation]) -> dict[Variable, None]:
    """Return the variables that equations read, without duplicates, in order."""
    atoms = (atom for equation in equations for atom in equation.invars)
    return dict.fromkeys(atom for atom in atoms if not is_literal(atom))


def inner_jaxprs(equation: Equation) -> Iterator[Jaxpr]:
    """Yield the functions that an equation calls, without their constants."""
    for param in jax.tree.leaves(equation.params, is_leaf=_holds_equations):
        if _holds_equations(param):
            yield getattr(param, "jaxpr", param)


def _holds_equations(param: Any) -> bool:
    return hasattr(getattr(param, "jaxpr", param), "eqns")
