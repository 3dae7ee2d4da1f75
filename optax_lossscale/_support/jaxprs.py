"""Make, read and edit jaxprs, the programs that JAX traces, and find their matrix products."""

import functools
import inspect
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
from jax.extend.core import Literal, Var

from optax_lossscale._support.lines import source_of
from optax_lossscale._support.primitives import MOVES, PRODUCTS, SCALED_PRODUCT
from optax_lossscale._support.tree import ARRAYS, KeyPath, Leaf, PyTree, is_symbolic

# With the classes of `jax.extend.core`, pyright reports 28 errors: their operands have no shape or
# dtype, and their `replace` has no parameters.
Jaxpr: TypeAlias = Any  # with or without its constants
Equation: TypeAlias = Any
Atom: TypeAlias = Any  # an operand: a variable or a literal

P = ParamSpec("P")
Result = TypeVar("Result")


def trace(
    fun: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Jaxpr, list[tuple[str, KeyPath, Leaf]]]:
    """Return the jaxpr of `fun` and its inputs: each array with its argument's name and key path.

    Arrays and `jax.ShapeDtypeStruct`s are traced; all other leaves are passed through. Arrays that
    `fun` writes into its arguments, such as modules of `flax.nnx`, are among the results.
    """
    names = [*argument_names(fun, len(args)), *kwargs]
    leaves, treedef = jax.tree_util.tree_flatten_with_path([*args, *kwargs.values()])
    is_traced = [isinstance(x, (ARRAYS, jax.ShapeDtypeStruct)) for _, x in leaves]
    given = itertools.compress(leaves, is_traced)
    inputs = [(names[root.idx], tuple(path), x) for (root, *path), x in given]

    def call_with_arrays(arrays: Sequence[Leaf]) -> list[Leaf]:
        replaced = iter(arrays)
        both = [next(replaced) if t else x for (_, x), t in zip(leaves, is_traced, strict=True)]
        inner = treedef.unflatten(both)
        by_name = dict(zip(kwargs, inner[len(args) :], strict=True))
        results = jax.tree.leaves(fun(*inner[: len(args)], **by_name))
        before = set(map(id, both))
        written = [x for x in jax.tree.leaves(inner) if id(x) not in before]
        return [x for x in [*results, *written] if isinstance(x, ARRAYS)]

    return jax.make_jaxpr(call_with_arrays)([x for *_, x in inputs]), inputs


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


def read_by(equations: Iterable[Equation]) -> dict[Var, None]:
    """Return the variables that equations read, without duplicates, in order."""
    atoms = (atom for equation in equations for atom in equation.invars)
    return dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal))


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
            result = fun(jaxpr, *args, **kwargs)
            known[key] = None if result is jaxpr else result  # else the cache keeps `jaxpr` alive
        return jaxpr if known[key] is None else known[key]

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


class Product(NamedTuple):
    """A matrix product or convolution in a traced program."""

    dtype: str  # the wider dtype of its operands, or both if they are equally wide
    itemsize: int  # of that dtype, in bytes
    times: int  # how often it runs
    flops: int  # in all runs; a multiplication and an addition are two
    equations: tuple[Equation, ...]  # its own, and those that contain it, innermost first

    def source(self) -> str:
        """Return the file and line of the user's code that it comes from, `""` if unknown."""
        return source_of(*self.equations)


def products_of(jaxpr: Jaxpr) -> list[Product]:
    """Return the products that the outputs of a jaxpr depend on, the last one first.

    For a conditional, these are the products of the branch with the most operations in their dtype.
    """
    jaxpr = without_constants(jaxpr)
    return list(_products(jaxpr, [True] * len(jaxpr.outvars)))


def total_flops(products: Iterable[Product]) -> int:
    """Return the number of floating-point operations in all products."""
    return sum(product.flops for product in products)


def _products(
    jaxpr: Jaxpr, is_used: list[bool], times: int = 1, within: tuple[Equation, ...] = ()
) -> Iterator[Product]:
    used = {
        x for x, u in zip(jaxpr.outvars, is_used, strict=True) if u and not isinstance(x, Literal)
    }
    for equation in reversed(jaxpr.eqns):
        results = [result in used for result in equation.outvars]
        if not any(results) and not equation.effects:
            continue
        used.update(read_by([equation]))
        name, path = equation.primitive.name, (equation, *within)
        if name in PRODUCTS or name == SCALED_PRODUCT:
            lhs, rhs = (operand.aval for operand in equation.invars[:2])
            flops = 2 * math.prod(sizes_of(equation))
            if name == "conv_general_dilated":
                # The gradient of a strided convolution reads zeros between the elements.
                flops //= math.prod(equation.params["lhs_dilation"])
            widest = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
            dtypes = {x.dtype.name for x in (lhs, rhs) if x.dtype.itemsize == widest}
            yield Product(" x ".join(sorted(dtypes)), widest, times, times * flops, path)
            continue
        # A linear solve also contains the product that it inverts, and does not run it.
        solve = [equation.params["jaxprs"].solve.jaxpr] if name == "custom_linear_solve" else None
        inner_times = times
        if name == "scan":
            inner_times *= equation.params["length"]
        elif name == "pallas_call":
            inner_times *= math.prod(equation.params["grid_mapping"].grid)
        inside = [
            list(_products(inner, _used_of(inner, equation, results), inner_times, path))
            for inner in solve or inner_jaxprs(equation)
        ]
        yield from _largest(inside) if name == "cond" else itertools.chain(*inside)


def _largest(branches: list[list[Product]]) -> Iterator[Product]:
    """Yield, for each dtype, the products of the branch with the most operations in that dtype."""
    dtypes = dict.fromkeys(product.dtype for branch in branches for product in branch)
    for dtype in dtypes:
        alike = [[product for product in branch if product.dtype == dtype] for branch in branches]
        yield from max(alike, key=total_flops)


def _used_of(inner: Jaxpr, equation: Equation, is_used: list[bool]) -> list[bool]:
    """Return which results of a function are used, given which results of its equation are."""
    if len(inner.outvars) != len(is_used):
        return [True] * len(inner.outvars)
    # Carried results, which have no extra axis, may be used by the next iteration of a loop.
    is_loop = equation.primitive.name in ("scan", "while")
    results = zip(is_used, inner.outvars, equation.outvars, strict=True)
    return [used or (is_loop and x.aval.ndim == y.aval.ndim) for used, x, y in results]


# The shortest side of a tensor core's block. Symbolic dimensions count as this size.
SHORTEST = 8


class ProductSizes(NamedTuple):
    """The sizes of a matrix product: batch, rows, columns, and contracted length.

    For a convolution, these are 1, the number of output positions in the whole batch, the number of
    output channels, and the number of weights for each channel.
    """

    batch: int
    rows: int
    columns: int
    contracted: int


def sizes_of(equation: Equation) -> ProductSizes:
    """Return the sizes of the product that an equation computes."""
    params = equation.params
    lhs, rhs, result = (
        [SHORTEST if is_symbolic(size) else size for size in x.aval.shape]
        for x in (*equation.invars[:2], equation.outvars[0])
    )
    if equation.primitive.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        channels = rhs[numbers.rhs_spec[0]]
        positions = _product(result, but=[numbers.out_spec[1]])
        return ProductSizes(1, positions, channels, _product(rhs, but=[numbers.rhs_spec[0]]))
    groups: Sequence[int] = ()
    if ragged := params.get("ragged_dot_dimension_numbers"):  # each row belongs to one group
        dimensions, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    else:
        dimensions = params.get("dimension_numbers", (((2,), (2,)), ((0,), (0,))))
    (contracted, rhs_contracted), (batch, rhs_batch) = dimensions
    return ProductSizes(
        batch=math.prod(lhs[axis] for axis in batch),
        rows=_product(lhs, but=[*contracted, *batch]),
        columns=_product(rhs, but=[*rhs_contracted, *rhs_batch, *groups]),
        contracted=math.prod(lhs[axis] for axis in contracted),
    )


def _product(shape: Sequence[int], but: Sequence[int]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in but)
