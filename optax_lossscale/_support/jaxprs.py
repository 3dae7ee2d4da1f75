"""Make and read jaxprs, the programs that JAX traces."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal

from optax_lossscale._support.primitives import CONDITIONAL
from optax_lossscale._support.tree import Leaf, PyTree, split


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


def variables(atoms: Iterable[Atom]) -> dict[Atom, None]:
    """Return the variables among operands, without duplicates, in order."""
    return dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal))


def read_by(equations: Iterable[Equation]) -> dict[Atom, None]:
    """Return the variables that equations read, without duplicates, in order."""
    return variables(atom for equation in equations for atom in equation.invars)


def functions_in(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """Yield the functions among the parameters of an equation, without their constants."""
    for param in jax.tree.leaves(params, is_leaf=holds_equations):
        if holds_equations(param):
            yield without_constants(param)


def inputs_of_functions(equation: Equation) -> Sequence[Atom]:
    """Return the operands that the functions of an equation take."""
    # The first operand of a conditional is its index.
    return equation.invars[1:] if equation.primitive.name == CONDITIONAL else equation.invars


def all_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yield the equations of a program, and of all functions in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in functions_in(equation.params):
            yield from all_equations(inner)


def holds_equations(param: object) -> bool:
    """Return whether a parameter of an equation is a jaxpr, with or without its constants."""
    return hasattr(param, "eqns")


def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without its constants. Since jax 0.12, one class has both forms."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def has_effects(jaxpr: Jaxpr) -> bool:
    """Return whether a program has effects, not counting the axes of collectives."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in jaxpr.effects)


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
    (body,) = functions_in(equation.params)

    def count_whole(inside: Sequence[Atom], outside: Sequence[Atom]) -> int:
        pairs = zip(inside, outside, strict=True)
        return sum(inner.aval.ndim == outer.aval.ndim for inner, outer in pairs)

    whole = count_whole(body.invars, equation.invars)
    carried = count_whole(body.outvars, equation.outvars)
    return ScanOperands(whole - carried, carried, len(equation.invars) - whole)
