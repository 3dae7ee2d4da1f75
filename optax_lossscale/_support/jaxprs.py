"""Jaxprs, the programs that JAX traces: making and reading them, and their matrix products."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from optax_lossscale._support.lines import source_of
from optax_lossscale._support.tree import ARRAYS, KeyPath, is_symbolic

# `jax.extend.core` has these classes. Importing it takes as long as all else of the package.
Jaxpr: TypeAlias = Any  # with or without its constants
Equation: TypeAlias = Any


# Operations that do nothing but run a function, those with derivatives of their own among them.
# `eval_jaxpr` is the name of `closed_call` since jax 0.12.
HAVE_RULES = frozenset(["custom_jvp_call", "custom_vjp_call"])
CALLS = frozenset(["closed_call", "eval_jaxpr", "jit", "remat2"]) | HAVE_RULES


def trace(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Jaxpr, list[tuple[str, KeyPath, Any]]]:
    """Return the jaxpr of `fun`, and its inputs: arguments' names, key paths in them, and arrays.

    Arrays and `jax.ShapeDtypeStruct`s are traced; every other leaf stays as it is. Arrays that the
    function writes into its arguments, such as modules of `flax.nnx`, are among its results.
    """
    names = [*argument_names(fun, len(args)), *kwargs]
    leaves, treedef = jax.tree_util.tree_flatten_with_path([*args, *kwargs.values()])
    is_traced = [isinstance(x, (ARRAYS, jax.ShapeDtypeStruct)) for _, x in leaves]
    given = itertools.compress(leaves, is_traced)
    inputs = [(names[root.idx], tuple(path), x) for (root, *path), x in given]

    def on_arrays(arrays: Sequence[Any]) -> list[Any]:
        replaced = iter(arrays)
        both = [next(replaced) if t else x for (_, x), t in zip(leaves, is_traced, strict=True)]
        inner = treedef.unflatten(both)
        by_name = dict(zip(kwargs, inner[len(args) :], strict=True))
        results = jax.tree.leaves(fun(*inner[: len(args)], **by_name))
        before = set(map(id, both))
        written = [x for x in jax.tree.leaves(inner) if id(x) not in before]
        return [x for x in [*results, *written] if isinstance(x, ARRAYS)]

    return jax.make_jaxpr(on_arrays)([x for *_, x in inputs]), inputs


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


def read_by(equations: Iterable[Equation]) -> dict[Any, None]:
    """Return the variables that equations read, without duplicates, in order."""
    atoms = (atom for equation in equations for atom in equation.invars)
    return dict.fromkeys(atom for atom in atoms if not is_literal(atom))


def inner_jaxprs(equation: Equation) -> Iterator[Jaxpr]:
    """Yield the functions that an equation calls, without their constants."""
    for param in jax.tree.leaves(equation.params, is_leaf=holds_equations):
        if holds_equations(param):
            yield getattr(param, "jaxpr", param)


def holds_equations(param: Any) -> bool:
    """Return whether a parameter of an equation is a function, with or without its constants."""
    return hasattr(param, "eqns")


class Product(NamedTuple):
    """A matrix product or convolution in a traced program."""

    dtype: str  # the wider dtype of its operands, or both if they are as wide
    itemsize: int  # the bytes of a number of that dtype
    times: int  # how often it runs
    flops: int  # the operations of all its runs: a multiplication and an addition are two
    equations: tuple[Equation, ...]  # its own, and those that it lies within, the innermost first

    def source(self) -> str:
        """Return the line of the user's code that it comes from, with its file; `""` if none."""
        return source_of(*self.equations)


def products_of(jaxpr: Jaxpr) -> list[Product]:
    """Return the products on the way to the outputs of a jaxpr, the last one first.

    A conditional counts as its branch with the most operations in their dtype.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return list(_products(jaxpr, [True] * len(jaxpr.outvars)))


def total_flops(products: Iterable[Product]) -> int:
    """Return the operations of all products."""
    return sum(product.flops for product in products)


def _products(
    jaxpr: Jaxpr, is_used: list[bool], times: int = 1, within: tuple[Equation, ...] = ()
) -> Iterator[Product]:
    used = {x for x, u in zip(jaxpr.outvars, is_used, strict=True) if u and not is_literal(x)}
    for equation in reversed(jaxpr.eqns):
        results = [result in used for result in equation.outvars]
        if not any(results) and not equation.effects:
            continue
        used.update(read_by([equation]))
        name, path = equation.primitive.name, (equation, *within)
        if name in _PRODUCTS:
            lhs, rhs = (operand.aval for operand in equation.invars[:2])
            flops = 2 * math.prod(sides_of(equation))
            if name == "conv_general_dilated":
                # The gradient of a convolution with strides reads zeros between the elements.
                flops //= math.prod(equation.params["lhs_dilation"])
            widest = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
            dtypes = {x.dtype.name for x in (lhs, rhs) if x.dtype.itemsize == widest}
            yield Product(" x ".join(sorted(dtypes)), widest, times, times * flops, path)
            continue
        # A linear solve holds the product that it inverts, too.
        solve = [equation.params["jaxprs"].solve.jaxpr] if name == "custom_linear_solve" else None
        again = times
        if name == "scan":
            again *= equation.params["length"]
        elif name == "pallas_call":
            again *= math.prod(equation.params["grid_mapping"].grid)
        inside = [
            list(_products(inner, _used_of(inner, equation, results), again, path))
            for inner in solve or inner_jaxprs(equation)
        ]
        yield from _largest(inside) if name == "cond" else itertools.chain(*inside)


def _largest(branches: list[list[Product]]) -> Iterator[Product]:
    """Yield, for each dtype, the products of the branch that has the most operations in it."""
    for dtype in {product.dtype for branch in branches for product in branch}:
        alike = [[product for product in branch if product.dtype == dtype] for branch in branches]
        yield from max(alike, key=total_flops)


def _used_of(inner: Jaxpr, equation: Equation, is_used: list[bool]) -> list[bool]:
    """Return which results of a function are used, given those of the equation that runs it."""
    if len(inner.outvars) != len(is_used):
        return [True] * len(inner.outvars)
    # The next iteration of a loop may use a result that is carried, and so not stacked.
    is_loop = equation.primitive.name in ("scan", "while")
    results = zip(is_used, inner.outvars, equation.outvars, strict=True)
    return [used or (is_loop and x.aval.ndim == y.aval.ndim) for used, x, y in results]


_PRODUCTS = frozenset(
    # The last is `jax.nn.scaled_matmul`, scaled by blocks.
    ["dot_general", "ragged_dot_general", "conv_general_dilated", "scaled_matmul_wrapper"]
)
LONG = 8  # the shortest side of a tensor core's block, and of a dimension without a number


class Sides(NamedTuple):
    """The sides of a product: how many, of how many rows and columns, of how many terms each.

    A convolution has the positions of its output in all examples as rows, its output channels as
    columns, and the weights of each channel as terms.
    """

    batch: int
    rows: int
    columns: int
    terms: int


def sides_of(equation: Equation) -> Sides:
    """Return the sides of the product that an equation is."""
    params = equation.params
    lhs, rhs, result = (
        [LONG if is_symbolic(size) else size for size in x.aval.shape]
        for x in (*equation.invars[:2], equation.outvars[0])
    )
    if equation.primitive.name == "conv_general_dilated":
        channels = rhs[params["dimension_numbers"].rhs_spec[0]]
        positions = _product(result, but=[params["dimension_numbers"].out_spec[1]])
        weights = _product(rhs, but=[params["dimension_numbers"].rhs_spec[0]])
        return Sides(1, positions, channels, weights)
    groups: Sequence[int] = ()
    if ragged := params.get("ragged_dot_dimension_numbers"):  # each row takes part in one group
        dimensions, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    else:
        dimensions = params.get("dimension_numbers", (((2,), (2,)), ((0,), (0,))))
    (contracted, rhs_contracted), (batch, rhs_batch) = dimensions
    return Sides(
        batch=math.prod(lhs[axis] for axis in batch),
        rows=_product(lhs, but=[*contracted, *batch]),
        columns=_product(rhs, but=[*rhs_contracted, *rhs_batch, *groups]),
        terms=math.prod(lhs[axis] for axis in contracted),
    )


def _product(shape: Sequence[int], but: Sequence[int]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in but)
