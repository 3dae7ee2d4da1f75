"""Edit jaxprs, and what an editor asks about them."""

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import jax
import numpy as np
from jax.extend.core import Literal, Var

from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr
from optax_lossscale._support.tree import Leaf

P = ParamSpec("P")
Result = TypeVar("Result")
Mark = TypeVar("Mark")


def renamed(atoms: Iterable[Atom], new: Mapping[Atom, Atom]) -> list[Atom]:
    """Return operands with the variables in `new` replaced."""
    return [x if isinstance(x, Literal) else new.get(x, x) for x in atoms]


def number_of_uses(jaxpr: Jaxpr) -> Counter[Atom]:
    """Return how often each variable is read or returned."""
    atoms = [x for equation in jaxpr.eqns for x in equation.invars] + jaxpr.outvars
    return Counter(x for x in atoms if not isinstance(x, Literal))


def propagated(
    jaxpr: Jaxpr,
    marks: Sequence[Mark | None],
    marks_of: Callable[[tuple[Equation, ...], Sequence[Mark | None]], Sequence[Mark | None]],
    within: tuple[Equation, ...] = (),
    *,
    of_literals: Mark | None = None,
) -> list[Mark | None]:
    """Return the marks of the outputs of a program, given the marks of its inputs.

    `marks_of` takes an equation, followed by those that contain it, and the marks of its operands.
    It returns the marks of its results. Functions that an equation calls are followed.
    """
    inputs = zip(jaxpr.invars, marks, strict=True)
    known = {x: mark for x, mark in inputs if mark is not None}

    def of(atoms: Iterable[Atom]) -> list[Mark | None]:
        return [of_literals if isinstance(x, Literal) else known.get(x) for x in atoms]

    for equation in jaxpr.eqns:
        path, sources = (equation, *within), of(equation.invars)
        results, name = marks_of(path, sources), equation.primitive.name
        if name in primitives.FOLLOWED | primitives.CUSTOM_DERIVATIVES:
            for inner in jaxprs.functions_in(equation.params):
                # The first operand of a conditional is its index.
                given = sources[len(sources) - len(inner.invars) :]
                inside = propagated(inner, given, marks_of, path, of_literals=of_literals)
                results = inside if name in primitives.CALLS else results
        outputs = zip(equation.outvars, results, strict=True)
        known |= {x: mark for x, mark in outputs if mark is not None}
    return of(jaxpr.outvars)


def with_edit(edit: Callable[[Jaxpr], Jaxpr], jaxpr: Jaxpr) -> Jaxpr:
    """Return `edit(jaxpr)`, where `edit` is given the jaxpr without its constants."""
    # Before jax 0.12, a program with its constants is an object around another.
    inner = jaxprs.without_constants(jaxpr)
    new = edit(inner)
    if new is inner:
        return jaxpr
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def with_equations(jaxpr: Jaxpr, equations: list[Equation]) -> Jaxpr:
    """Return a jaxpr with these equations, or the same object if they are its own."""
    old = jaxpr.eqns
    is_same = len(equations) == len(old) and all(map(operator.is_, equations, old))
    return jaxpr if is_same else jaxpr.replace(eqns=equations)


def with_edited_functions(
    equation: Equation,
    edit: Callable[Concatenate[Jaxpr, P], Jaxpr],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Equation:
    """Return an equation with its functions edited, or the same object if none changes."""

    def edited(param: Any) -> Any:
        if type(param) is tuple:  # the branches of a conditional
            new = tuple(map(edited, param))
            # The same object where nothing changes, so that the equation stays the same too.
            return param if all(map(operator.is_, new, param)) else new
        return edit(param, *args, **kwargs) if jaxprs.holds_equations(param) else param

    params = {key: edited(param) for key, param in equation.params.items()}
    is_same = all(params[key] is param for key, param in equation.params.items())
    return equation if is_same else equation.replace(params=params)


def memoized(
    fun: Callable[Concatenate[Jaxpr, P], Result],
) -> Callable[Concatenate[Jaxpr, P], Result]:
    """Return `fun` with a cache, so that it returns the same object for the same jaxpr.

    JAX's caches know a jaxpr by its identity: without this, it would compile an edited one again in
    each call. Results are freed with the jaxpr.
    """
    # The values must not hold the keys, or nothing would ever be freed.
    results: weakref.WeakKeyDictionary[Jaxpr, dict[Hashable, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(fun)
    def looked_up(jaxpr: Jaxpr, *args: P.args, **kwargs: P.kwargs) -> Result:
        known, key = results.setdefault(jaxpr, {}), (args, *kwargs.items())
        if key not in known:
            result: Any = fun(jaxpr, *args, **kwargs)
            known[key] = None if result is jaxpr else result  # else the cache keeps `jaxpr` alive
        cached: Any = known[key]
        return cast(Any, jaxpr) if cached is None else cached

    return looked_up


def constants_of(jaxpr: Jaxpr) -> Iterator[Leaf]:
    """Yield the arrays that a program, and the functions in it, close over."""
    yield from getattr(jaxpr, "consts", ())
    for equation in jaxprs.without_constants(jaxpr).eqns:
        for param in jax.tree.leaves(equation.params, is_leaf=jaxprs.holds_equations):
            if jaxprs.holds_equations(param):
                yield from constants_of(param)


def variable_like(atom: Atom, dtype: np.dtype) -> Atom:
    """Return a new variable of the type of an operand, except for its dtype."""
    return cast(Any, Var(atom.aval.update(dtype=dtype, weak_type=False)))


def conversion(old: Atom, new: Atom, beside: Equation) -> Equation:
    """Return the equation that converts `old` to the dtype of `new`, and assigns it to `new`.

    It is attributed to the same line of the user's code as the equation `beside`.
    """
    return beside.replace(
        primitive=jax.lax.convert_element_type_p,
        invars=[old],
        outvars=[new],
        params={"new_dtype": new.aval.dtype, "weak_type": new.aval.weak_type, "sharding": None},
        effects=frozenset(),
    )


def inlined(
    jaxpr: Jaxpr, operands: Sequence[Any], results: Sequence[Any], beside: Equation
) -> list[Equation]:
    """Return the equations of a small program that reads `operands` and assigns `results`.

    They are attributed to the same line of the user's code as the equation `beside`.
    """
    jaxpr = jaxprs.without_constants(jaxpr)
    pairs = zip([*jaxpr.invars, *jaxpr.outvars], [*operands, *results], strict=True)
    new: dict[Atom, Any] = dict(pairs)
    equations: list[Equation] = []
    for inner in jaxpr.eqns:
        new |= {x: Var(x.aval) for x in inner.outvars if x not in new}
        equations.append(
            beside.replace(
                primitive=inner.primitive,
                invars=renamed(inner.invars, new),
                outvars=renamed(inner.outvars, new),
                params=inner.params,
                effects=inner.effects,
            )
        )
    return equations


def is_move(equation: Equation) -> bool:
    """Return whether an equation only rearranges the elements of its operands."""
    if equation.primitive.name not in primitives.MOVES:
        return False
    # A result that is larger repeats elements, and its transpose adds their cotangents.
    return sum(x.aval.size for x in equation.invars) == equation.outvars[0].aval.size


def manual_axes_of(equation: Equation) -> frozenset[str]:
    """Return the axes of the mesh that a `shard_map` maps over. jax 0.8 renamed the parameter."""
    names = ("newly_manual_axes", "manual_axes")
    return next(equation.params[name] for name in names if name in equation.params)
