"""Make, read and edit jaxprs, the programs that JAX traces."""

import functools
import inspect
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import jax
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import Literal, Var

from optax_lossscale._support.primitives import (
    CALLS,
    CONDITIONAL,
    DEVICE_MAPS,
    MOVES,
    SCAN,
)
from optax_lossscale._support.tree import ARRAYS, KeyPath, Leaf, PyTree, split

P = ParamSpec("P")
Result = TypeVar("Result")
Mark = TypeVar("Mark")


# With the classes of `jax.extend.core`, pyright reports 28 errors: their operands have no shape or
# dtype, and their `replace` has no parameters. These protocols fit jax 0.7 to 0.12.
class Atom(Protocol):
    """An operand: a variable or a literal."""

    aval: Any
    val: Any  # of a literal

    def __hash__(self) -> int: ...


class Equation(Protocol):
    """One operation of a jaxpr."""

    primitive: Any
    invars: list[Any]
    outvars: list[Any]
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    def replace(
        self,
        *,
        primitive: Any = ...,
        invars: Sequence[Any] = ...,
        outvars: Sequence[Any] = ...,
        params: Mapping[str, Any] = ...,
        effects: Any = ...,
        source_info: Any = ...,
        ctx: Any = ...,
    ) -> "Equation": ...


class Jaxpr(Protocol):
    """A traced program, with or without its constants."""

    constvars: list[Any]
    invars: list[Any]
    outvars: list[Any]
    eqns: list[Equation]
    effects: Any
    debug_info: Any
    consts: list[Any]
    jaxpr: Any

    def replace(
        self,
        *,
        jaxpr: "Jaxpr" = ...,
        constvars: Sequence[Any] = ...,
        invars: Sequence[Any] = ...,
        outvars: Sequence[Any] = ...,
        eqns: Sequence[Equation] = ...,
        debug_info: Any = ...,
    ) -> "Jaxpr": ...


# JAX's functions, typed by these protocols. `jax.extend.core.jaxpr_as_fun` turns `jax.debug_nans`
# off; `evaluate` does not.
make_jaxpr: Callable[[Callable[..., Any]], Callable[..., Jaxpr]] = cast(Any, jax.make_jaxpr)
evaluate: Callable[..., list[Any]] = cast(Any, eval_jaxpr)


def traced(
    fun: Callable[[PyTree], PyTree], tree: PyTree, is_traced: Callable[[Leaf], bool]
) -> tuple[Jaxpr, list[Leaf], Callable[[Sequence[Leaf]], PyTree]]:
    """Trace `fun(tree)`. Return its jaxpr, the inputs, and a function from outputs to its result.

    Inputs and outputs are the leaves for which `is_traced` is true. Others are passed through.
    """
    inputs, join_inputs = split(tree, is_traced)
    joins: list[Callable[[Sequence[Leaf]], PyTree]] = []

    def on_inputs(inputs: list[Leaf]) -> list[Leaf]:
        outputs, join = split(fun(join_inputs(inputs)), is_traced)
        joins.append(join)  # JAX returns nothing but arrays
        return outputs

    jaxpr = make_jaxpr(on_inputs)(inputs)
    return jaxpr, inputs, joins[0]


def trace(
    fun: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Jaxpr, list[tuple[str, KeyPath, Leaf]]]:
    """Return the jaxpr of `fun` and its inputs: each array with its argument's name and key path.

    Arrays and `jax.ShapeDtypeStruct`s are traced; all other leaves are passed through. Arrays that
    `fun` writes into its arguments, such as modules of `flax.nnx`, are among the results.
    """
    names = [*argument_names(fun, len(args)), *kwargs]
    given = [*args, *kwargs.values()]
    is_array = lambda x: isinstance(x, (*ARRAYS, jax.ShapeDtypeStruct))  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(given)
    inputs = [(names[root.idx], tuple(path), x) for (root, *path), x in leaves if is_array(x)]

    def results_and_written(given: list[PyTree]) -> PyTree:
        before = set(map(id, jax.tree.leaves(given)))
        by_name = dict(zip(kwargs, given[len(args) :], strict=True))
        results = fun(*given[: len(args)], **by_name)
        return results, [x for x in jax.tree.leaves(given) if id(x) not in before]

    return traced(results_and_written, given, is_array)[0], inputs


def argument_names(fun: Callable[..., Any], number: int) -> list[str]:
    """Return the names that the signature of `fun` gives its first `number` arguments."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        parameters = []
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in by_position[:number]]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return [*names, *(f"{rest}[{i}]" for i in range(number - len(names)))]


def variables(atoms: Iterable[Atom]) -> dict[Atom, None]:
    """Return the variables among operands, without duplicates, in order."""
    return dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal))


def read_by(equations: Iterable[Equation]) -> dict[Atom, None]:
    """Return the variables that equations read, without duplicates, in order."""
    atoms = (atom for equation in equations for atom in equation.invars)
    return dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal))


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
    rule: Callable[[tuple[Equation, ...], Sequence[Mark | None]], Sequence[Mark | None]],
    within: tuple[Equation, ...] = (),
) -> list[Mark | None]:
    """Return the marks of the outputs of a program, given the marks of its inputs.

    `rule` takes an equation, followed by those that contain it, and the marks of its operands. It
    returns the marks of its results. Functions that an equation calls are followed.
    """
    inputs = zip(jaxpr.invars, marks, strict=True)
    known = {x: mark for x, mark in inputs if mark is not None}

    def of(atoms: Iterable[Atom]) -> list[Mark | None]:
        return [None if isinstance(x, Literal) else known.get(x) for x in atoms]

    for equation in jaxpr.eqns:
        path, sources = (equation, *within), of(equation.invars)
        results, name = rule(path, sources), equation.primitive.name
        if name in CALLS | DEVICE_MAPS | {SCAN, CONDITIONAL}:
            for inner in inner_jaxprs(equation):  # the first operand of a conditional is its index
                given = sources[len(sources) - len(inner.invars) :]
                inside = propagated(inner, given, rule, path)
                results = inside if name in CALLS else results
        outputs = zip(equation.outvars, results, strict=True)
        known |= {x: mark for x, mark in outputs if mark is not None}
    return of(jaxpr.outvars)


def inner_jaxprs(equation: Equation) -> Iterator[Jaxpr]:
    """Return the jaxprs of the functions that an equation calls, without their constants."""
    return jaxprs_in(equation.params)


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """Yield the jaxprs among the parameters of an equation, without their constants."""
    for param in jax.tree.leaves(params, is_leaf=holds_equations):
        if holds_equations(param):
            yield without_constants(param)


def all_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yield the equations of a program, and of all functions in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner)


def holds_equations(param: object) -> bool:
    """Return whether a parameter of an equation is a jaxpr, with or without its constants."""
    return hasattr(param, "eqns")


def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without its constants. Since jax 0.12, one class has both forms."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def with_edit(edit: Callable[[Jaxpr], Jaxpr], jaxpr: Jaxpr) -> Jaxpr:
    """Return `edit(jaxpr)`, where `edit` is given the jaxpr without its constants."""
    inner = without_constants(jaxpr)
    return edit(jaxpr) if inner is jaxpr else jaxpr.replace(jaxpr=edit(inner))


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
            return param if all(map(operator.is_, new, param)) else new
        return edit(param, *args, **kwargs) if holds_equations(param) else param

    params = {key: edited(param) for key, param in equation.params.items()}
    is_same = all(params[key] is param for key, param in equation.params.items())
    return equation if is_same else equation.replace(params=params)


def memoized(
    fun: Callable[Concatenate[Jaxpr, P], Result],
) -> Callable[Concatenate[Jaxpr, P], Result]:
    """Return `fun` with a cache, so that it returns the same object for the same jaxpr.

    Without it, JAX would compile an edited jaxpr again in each call. Results are freed with the
    jaxpr.
    """
    results: weakref.WeakKeyDictionary[Jaxpr, dict[Hashable, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(fun)
    def run(jaxpr: Jaxpr, *args: P.args, **kwargs: P.kwargs) -> Result:
        known, key = results.setdefault(jaxpr, {}), (args, *kwargs.items())
        if key not in known:
            result: Any = fun(jaxpr, *args, **kwargs)
            known[key] = None if result is jaxpr else result  # else the cache keeps `jaxpr` alive
        kept: Any = known[key]
        return cast(Any, jaxpr) if kept is None else kept

    return run


def has_effects(jaxpr: Jaxpr) -> bool:
    """Return whether a program has effects, not counting the axes of collectives."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in jaxpr.effects)


def constants_of(jaxpr: Jaxpr) -> Iterator[Leaf]:
    """Yield the arrays that a program, and the functions in it, close over."""
    yield from getattr(jaxpr, "consts", ())
    for equation in without_constants(jaxpr).eqns:
        for param in jax.tree.leaves(equation.params, is_leaf=holds_equations):
            if holds_equations(param):
                yield from constants_of(param)


def variable(aval: Any) -> Atom:
    """Return a new variable of this type."""
    return cast(Any, Var(aval))


def variable_like(atom: Atom, dtype: np.dtype) -> Atom:
    """Return a new variable of the type of an operand, except for its dtype."""
    return variable(atom.aval.update(dtype=dtype, weak_type=False))


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


def is_move(equation: Equation) -> bool:
    """Return whether an equation only rearranges the elements of its operands."""
    if equation.primitive.name not in MOVES:
        return False
    return sum(x.aval.size for x in equation.invars) == equation.outvars[0].aval.size


def manual_axes_of(equation: Equation) -> frozenset[str]:
    """Return the axes of the mesh that a `shard_map` maps over. jax 0.8 renamed the parameter."""
    names = ("newly_manual_axes", "manual_axes")
    return next(equation.params[name] for name in names if name in equation.params)


class ScanOperands(NamedTuple):
    """The numbers of constant, carried and scanned operands of a scan, in this order."""

    constants: int
    carried: int
    scanned: int


def operands_of_scan(equation: Equation) -> ScanOperands:
    """Return the numbers of constant, carried and scanned operands of a scan.

    They are derived from shapes, since versions of JAX name these parameters differently. Scanned
    and stacked arrays have one axis more outside the body than inside.
    """
    (body,) = inner_jaxprs(equation)

    def count_whole(inside: Sequence[Atom], outside: Sequence[Atom]) -> int:
        pairs = zip(inside, outside, strict=True)
        return sum(inner.aval.ndim == outer.aval.ndim for inner, outer in pairs)

    whole = count_whole(body.invars, equation.invars)
    carried = count_whole(body.outvars, equation.outvars)
    return ScanOperands(whole - carried, carried, len(equation.invars) - whole)
