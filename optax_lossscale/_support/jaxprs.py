"""Reading jaxprs, the programs that JAX traces."""

import inspect
import linecache
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax

# `jax.extend.core` has these classes. Importing it takes as long as all else of the package.
Jaxpr: TypeAlias = Any
ClosedJaxpr: TypeAlias = Any
Equation: TypeAlias = Any
Variable: TypeAlias = Any


def argument_names(fun: Callable[..., Any], number: int) -> list[str]:
    """Return the names of this many positional arguments in the signature of `fun`."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # of some functions written in C
        parameters = []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in by_position][:number]
    rest = (p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL)
    rest = next(rest, "args")
    return [*names, *(f"{rest}[{i}]" for i in range(number - len(names)))]


def is_literal(atom: Any) -> bool:
    """Return whether an operand of an equation is a number, and not a variable."""
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


def source_of(*equations: Equation) -> str:
    """Return the innermost line that is not of an installed package, of the first that has one.

    JAX forgets where the caller of some functions stands: of `jnp.where`, of a `jax.checkpoint`.
    """
    libraries = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    installed = (*libraries, str(Path(__file__).parents[1]))
    tracebacks = (equation.source_info.traceback for equation in equations)
    for frame in (frame for traceback in tracebacks if traceback for frame in traceback.frames):
        if not frame.file_name.startswith(installed):
            line = linecache.getline(frame.file_name, frame.line_num).strip()
            return f"{frame.file_name}:{frame.line_num}" + (f": {line}" if line else "")
    return ""


def _holds_equations(param: Any) -> bool:
    return hasattr(param, "eqns")
