"""Jaxprs, the programs that JAX traces: making and reading them."""

import inspect
import linecache
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from optax_lossscale._support.tree import KeyPath, is_array

# `jax.extend.core` has these classes. Importing it takes as long as all else of the package.
Jaxpr: TypeAlias = Any
ClosedJaxpr: TypeAlias = Any
Equation: TypeAlias = Any
Variable: TypeAlias = Any


def trace(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[ClosedJaxpr, list[tuple[KeyPath, Any]]]:
    """Return the jaxpr of `fun`, and its inputs: arrays, with their key paths in `(args, kwargs)`.

    Arrays and `jax.ShapeDtypeStruct`s are traced; every other leaf stays as it is. Arrays that the
    function writes into its arguments, such as modules of `flax.nnx`, are among its results.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    is_traced = [is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for _, x in leaves]
    inputs = [leaf for leaf, t in zip(leaves, is_traced, strict=True) if t]

    def on_arrays(arrays: Sequence[Any]) -> list[Any]:
        replaced = iter(arrays)
        both = [next(replaced) if t else x for (_, x), t in zip(leaves, is_traced, strict=True)]
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, both)
        results = jax.tree.leaves(fun(*inner_args, **inner_kwargs))
        given = set(map(id, both))
        written = [x for x in jax.tree.leaves((inner_args, inner_kwargs)) if id(x) not in given]
        return [x for x in [*results, *written] if is_array(x)]

    return jax.make_jaxpr(on_arrays)([x for _, x in inputs]), inputs


def argument_names(fun: Callable[..., Any], number: int) -> list[str]:
    """Return the names of this many positional arguments in the signature of `fun`."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # of some functions written in C
        parameters = []
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in by_position[:number]]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
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
