"""Residuals of a scan: what it saves for its backward pass.

JAX stacks every value that the derivative of a scan's body reads: for a norm, softmax or activation
in float32, several float32 arrays. Here the backward pass repeats moves and cheap arithmetic, from
values that are saved anyway: the results of half-precision products, kernels, reductions and loops.
It repeats elementary functions too, if that saves enough memory. The gradients are the same.

The body becomes one `jax.checkpoint`, whose policy says which results are saved. Where a policy is
not asked, or must not save, an identity behind the result is asked instead (`_saved`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import linear_util
from jax.extend.core import Literal, Var

from optax_lossscale._autocast import edits
from optax_lossscale._autocast.matrix_products import SHORTEST
from optax_lossscale._support import jaxprs, primitives
from optax_lossscale._support.jaxprs import Atom, Equation, Jaxpr, ScanOperands
from optax_lossscale._support.tree import is_symbolic


@edits.memoized
def with_fewer_residuals(body: Jaxpr, operands: ScanOperands) -> Jaxpr:
    """Return the body of a scan with fewer residuals, or the same object if it saves as few."""

    def checkpointed_or_same(body: Jaxpr) -> Jaxpr:
        if jaxprs.has_effects(body) or _chooses_by_itself(body):
            return body
        saving = _checkpointed(body, operands.constants)
        repeating = _with_params(saving, policy=_repeats_elementary)
        try:
            return _saving_least(body, saving, repeating, operands)
        except NameError:  # from a collective, whose axis has no size outside of its map
            return saving if body.effects else body
        except Exception:  # noqa: BLE001 - a derivative that nobody may ask for may raise anything
            return body

    return edits.with_edit(checkpointed_or_same, body)


def _chooses_by_itself(body: Jaxpr) -> bool:
    """Return whether the program has a `jax.checkpoint` of its own, which says what is saved."""
    policies = [
        eqn.params["policy"] for eqn in jaxprs.all_equations(body) if "policy" in eqn.params
    ]
    return not {*policies} <= {*_POLICIES}


def _saves_elementary(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether a result is saved for the backward pass. A policy for `jax.checkpoint`."""
    return _is_saved(primitives.ARITHMETIC, primitive, avals, params)


def _repeats_elementary(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether a result is saved, if elementary functions are repeated. A policy."""
    return _is_saved(primitives.ARITHMETIC | primitives.ELEMENTARY, primitive, avals, params)


_POLICIES = (_saves_elementary, _repeats_elementary)


def _is_saved(
    repeated: frozenset[str], primitive: Any, avals: Iterable[Any], params: Mapping[str, Any]
) -> bool:
    """Return whether a result is saved, if operations in `repeated` are repeated."""
    if primitive.name in primitives.COMPARISONS:
        # For floats, the result needs one byte, and the operands at least eight.
        return any(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
    if _is_repeated(repeated, primitive, params) or primitive.name in primitives.MAKES_COMPLEX:
        return False
    results = [x.aval for inner in jaxprs.functions_in(params) for x in inner.outvars]
    # The parts of a complex number are saved instead: see `_saved_as`.
    return not any(map(_is_complex, (*avals, *results, *params.get("result_avals", ()))))


def _is_repeated(repeated: frozenset[str], primitive: Any, params: Mapping[str, Any]) -> bool:
    if primitive.name not in primitives.PLAIN_CALLS | {primitives.CUSTOM_JVP}:
        return primitive.name in repeated
    # A function without equations may be `_saved`.
    eqns = [eqn for jaxpr in jaxprs.functions_in(params) for eqn in jaxpr.eqns]
    return bool(eqns) and all(_is_repeated(repeated, eqn.primitive, eqn.params) for eqn in eqns)


def _is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _saving_least(body: Jaxpr, saving: Jaxpr, repeating: Jaxpr, operands: ScanOperands) -> Jaxpr:
    """Return a body unchanged, or in a checkpoint with the better policy if that saves less.

    Elementary functions are repeated if that saves more than two bytes for each result. A float32
    result needs four bytes. Repeating it saves all four if it is computed from a product that is
    saved anyway, and two if that is saved for nothing else. The gates of recurrent networks are
    functions of two products, which need four bytes, and repeating them makes the networks 1.3
    times slower (jaxlib 0.10.2, CPU).
    """
    chosen, least = saving, _bytes_saved(saving, operands)
    if elements := _elementary_results(body):
        fewest = _bytes_saved(repeating, operands)
        if least - fewest > 2 * elements:
            chosen, least = repeating, fewest
    return chosen if least < _bytes_saved(body, operands) else body


def _elementary_results(jaxpr: Jaxpr) -> int:
    """Return the number of elements of all results of elementary functions."""
    elements = 0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in primitives.ELEMENTARY:
            elements += _size(eqn.outvars[0])
        elif name in primitives.FOLLOWED | {primitives.CUSTOM_JVP}:
            times = params["mesh"].size if name == primitives.SHARD_MAP else params.get("length", 1)
            elements += times * sum(map(_elementary_results, jaxprs.functions_in(params)))
    return elements


def _bytes_saved(body: Jaxpr, operands: ScanOperands) -> int:
    """Return how many bytes a scan stacks in each iteration for the derivative of its body.

    Rows exist already, and what depends only on constants is saved once.
    """

    def derivative(*args: Any) -> Any:
        return jax.vjp(functools.partial(jaxprs.evaluate, body), *args)[1]

    avals = [x.aval for x in body.constvars], *(x.aval for x in body.invars)
    program = jaxprs.without_constants(jaxprs.make_jaxpr(derivative)(*avals))
    first = len(body.constvars) + operands.constants
    # JAX hoists what depends only on constants, so only what varies is stacked.
    varies = [True if i >= first else None for i in range(len(program.invars))]
    are_stacked = edits.propagated(
        program, varies, lambda path, sources: [any(sources) or None] * len(path[0].outvars)
    )
    stacked = set(itertools.compress(program.outvars, are_stacked))
    rows = program.invars[first + operands.carried :]
    return sum(_size(x) * x.aval.dtype.itemsize for x in stacked.difference(rows))


def _size(atom: Atom) -> int:
    return math.prod(SHORTEST if is_symbolic(size) else size for size in atom.aval.shape)


def _checkpointed(jaxpr: Jaxpr, constants: int) -> Jaxpr:
    """Return the body of a scan in one equation, which runs it in `jax.checkpoint`.

    JAX still computes what depends only on the scan's constants before its loop.
    """
    operands = [*jaxpr.constvars, *jaxpr.invars]
    results = [Var(x.aval) for x in jaxpr.outvars]
    debug_info = jaxpr.debug_info._replace(
        arg_names=("",) * len(operands), result_paths=("",) * len(results)
    )
    body = _with_saved_results(_with_saved_invariants(jaxpr, constants))
    # A checkpoint takes no constants: they become operands like the others.
    body = body.replace(constvars=[], invars=operands, debug_info=debug_info)
    body = _with_saved_inputs(body, [x for x in operands if _is_complex(x.aval)])
    checkpoint = _checkpoint()
    eqn = jaxpr.eqns[0].replace(  # so it has their context, such as the mesh
        primitive=checkpoint.primitive,
        invars=operands,
        outvars=results,
        params=checkpoint.params | {"jaxpr": body},
        effects=jaxpr.effects,
    )
    return jaxpr.replace(eqns=[eqn], outvars=results)


@functools.cache
def _checkpoint() -> Equation:
    """Return an equation with the primitive of `jax.checkpoint`, which jax 0.7 does not export."""
    fun = jax.checkpoint(jnp.sin, policy=_saves_elementary, prevent_cse=False)
    (eqn,) = jax.make_jaxpr(fun)(jnp.float32(0)).eqns
    return eqn


def _with_params(checkpointed: Jaxpr, **params: Any) -> Jaxpr:
    (eqn,) = checkpointed.eqns
    return checkpointed.replace(eqns=[eqn.replace(params=eqn.params | params)])


@edits.memoized
def _with_saved_results(jaxpr: Jaxpr) -> Jaxpr:
    """Return a program that saves the results of loops, and what is expensive and complex.

    A policy is asked about single operations. JAX asks about the operations inside a scan instead
    of the scan, and about a `while_loop` not at all (jax 0.7 to 0.12), so it would run every loop
    again in the backward pass. Here an identity follows each result, and policies save what that
    returns. Then nothing in the backward pass reads the loop itself, and JAX drops it there.
    """

    def edited(eqn: Equation) -> list[Equation]:
        name = eqn.primitive.name
        if name in _DERIVATIVES:
            eqn = _with_saving_derivative(eqn)
        elif name == primitives.SCAN:
            operands = jaxprs.operands_of_scan(eqn)
            eqn = edits.with_edited_functions(eqn, _with_saved_carries, operands)
        elif name in primitives.FOLLOWED:  # under the policy of the checkpoint around it
            return [edits.with_edited_functions(eqn, _with_saved_results)]
        cheap = primitives.ARITHMETIC | primitives.ELEMENTARY
        is_complex = any(_is_complex(x.aval) for x in (*eqn.invars, *eqn.outvars))
        is_expensive = is_complex and not _is_repeated(cheap, eqn.primitive, eqn.params)
        return _followed_by_saved(eqn) if name in primitives.LOOPS or is_expensive else [eqn]

    def with_saved_results(jaxpr: Jaxpr) -> Jaxpr:
        return edits.with_equations(jaxpr, [new for eqn in jaxpr.eqns for new in edited(eqn)])

    return edits.with_edit(with_saved_results, jaxpr)


@edits.memoized
def _with_saved_carries(body: Jaxpr, operands: ScanOperands) -> Jaxpr:
    """Return the body of a scan in the body of another. It saves its carries.

    The backward pass of a scan needs the carry of each iteration. Of a scan inside a checkpoint,
    JAX does not stack the carries: it would run the scan once more, only to compute them. Saved in
    the body, under a new name for everything that reads it, a carry is a residual like any other.
    """

    def with_saved_carries(body: Jaxpr) -> Jaxpr:
        if not body.eqns:
            return body
        is_checkpointed = [eqn.params.get("policy") in _POLICIES for eqn in body.eqns] == [True]
        checkpointed = body if is_checkpointed else _checkpointed(body, operands.constants)
        inside = checkpointed.eqns[0].params["jaxpr"]
        first = len(body.constvars) + operands.constants
        carries = inside.invars[first : first + operands.carried]
        # An operand of a half-precision product needs two bytes, and the carry four.
        inside = _saving(
            inside,
            lambda eqn: eqn.primitive.name in primitives.CONVERSIONS and eqn.invars[0] in carries,
        )
        # The policy of the checkpoint around is applied in here first. If this one saved more than
        # that, JAX would compute the difference in one more loop.
        return _with_params(
            checkpointed, jaxpr=_with_saved_inputs(inside, carries), policy=_repeats_elementary
        )

    return edits.with_edit(with_saved_carries, body)


def _with_saved_inputs(jaxpr: Jaxpr, inputs: Iterable[Var]) -> Jaxpr:
    """Return a program that saves some of its inputs under new names, which all else reads."""
    given = {x: Var(x.aval) for x in inputs}
    saved = [new for x in given for new in _saved_as(given[x], x, beside=jaxpr.eqns[0])]
    invars = [given.get(x, x) for x in jaxpr.invars]
    return jaxpr.replace(invars=invars, eqns=[*saved, *jaxpr.eqns]) if given else jaxpr


def _with_saved_invariants(body: Jaxpr, constants: int) -> Jaxpr:
    """Return the body of a scan that saves functions of its constants.

    JAX computes them before the loop, and saves them once.
    """
    variables = set(body.invars[constants:])

    def is_invariant(eqn: Equation) -> bool:
        if not variables.isdisjoint(jaxprs.read_by([eqn])):
            variables.update(eqn.outvars)
            return False
        return not _is_repeated(primitives.ARITHMETIC, eqn.primitive, eqn.params)

    return _saving(body, is_invariant)


# Functions with a custom derivative, and the parameter that traces it. A loop in the derivative is
# in no jaxpr yet: JAX calls the user's function when it differentiates, under the policy of the
# checkpoint around. So that function is wrapped, and the program that it returns is edited then.
# These parameters are undocumented, and so is `wrap_init` (the same in jax 0.7.0 to 0.12.0).
_DERIVATIVES = {primitives.CUSTOM_JVP: "jvp_jaxpr_fun", primitives.CUSTOM_VJP: "fwd_jaxpr_thunk"}


def _with_saving_derivative(eqn: Equation) -> Equation:
    """Return a function whose custom derivative saves its results, if it has a loop."""
    name = _DERIVATIVES[eqn.primitive.name]
    derivative = eqn.params[name]
    # A `custom_vjp` returns residuals too, which are saved. A `custom_jvp` also returns tangents.
    number = len(eqn.outvars) if name == "jvp_jaxpr_fun" else None

    def traced(*zeros: bool) -> tuple[Any, ...]:
        jaxpr, *rest = derivative.call_wrapped(*zeros)
        return _with_saved_outputs(jaxpr, number), *rest

    wrapped = linear_util.wrap_init(traced, debug_info=derivative.debug_info)
    return eqn.replace(params=eqn.params | {name: wrapped})


@edits.memoized
def _with_saved_outputs(jaxpr: Jaxpr, number: int | None) -> Jaxpr:
    """Return a program that saves its first `number` results, if it has a loop."""
    if not any(eqn.primitive.name in primitives.LOOPS for eqn in jaxprs.all_equations(jaxpr)):
        return jaxpr
    outputs = {x for x in jaxpr.outvars[:number] if not isinstance(x, Literal)}
    return _saving(jaxpr, lambda eqn: not outputs.isdisjoint(eqn.outvars))


def _saving(jaxpr: Jaxpr, is_chosen: Callable[[Equation], bool]) -> Jaxpr:
    """Return a program that saves the results of the chosen equations."""
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        eqns += _followed_by_saved(eqn) if is_chosen(eqn) else [eqn]
    return edits.with_equations(jaxpr, eqns)


def _followed_by_saved(eqn: Equation) -> list[Equation]:
    """Return an equation, and others that save its results."""
    results = [Var(x.aval) for x in eqn.outvars]
    pairs = zip(results, eqn.outvars, strict=True)
    return [
        eqn.replace(outvars=results),
        *(e for old, new in pairs for e in _saved_as(old, new, eqn)),
    ]


def _saved_as(old: Var, new: Var, beside: Equation) -> list[Equation]:
    """Return the equations that save `old`, and assign it to `new`.

    A complex number is saved as its two parts: JAX rounds what a checkpoint saves to its own
    precision, by `reduce_precision`, which takes no complex value (jax 0.7 to 0.12).
    """

    def saved(x: jax.Array) -> jax.Array:
        return jax.lax.complex(_saved(x.real), _saved(x.imag)) if _is_complex(x) else _saved(x)

    return edits.inlined(jaxprs.make_jaxpr(saved)(old.aval), [old], [new], beside)


@jax.custom_jvp
def _saved(x: jax.Array) -> jax.Array:
    """Return `x`. The policies save it, as they save what has a derivative of its own.

    A `checkpoint_name` would do, but a policy of the program around may save all names.
    """
    return x


@_saved.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _saved(*primals), *tangents
