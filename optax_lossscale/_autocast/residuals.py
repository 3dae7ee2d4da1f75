"""Residuals of a scan: what it keeps for its backward pass.

JAX stacks every value that the derivative of a scan's body reads: for a norm, softmax or activation
in float32, several float32 arrays. Here the backward pass repeats moves and cheap arithmetic, from
values that are kept anyway: the results of half-precision products, kernels, reductions and loops.
It repeats elementary functions too, if that saves enough memory. The gradients are the same.
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
    """Return the body of a scan with fewer residuals, or the same object if it keeps as few."""

    def edit(body: Jaxpr) -> Jaxpr:
        # By a `jax.checkpoint` of its own, the program decides what is kept.
        eqns = jaxprs.all_equations(body)
        is_free = all(eqn.params.get("policy", _keeps_elementary) in _POLICIES for eqn in eqns)
        if jaxprs.has_effects(body) or not is_free:
            return body
        keeping = _checkpointed(body, operands.constants)
        repeating = _with_params(keeping, policy=_repeats_elementary)
        try:
            return _keeping_least(body, keeping, repeating, operands)
        except Exception:  # noqa: BLE001
            # It has collectives, whose axes are unknown here, or no derivative.
            return keeping

    return edits.with_edit(edit, body)


def _keeps_elementary(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether a result is kept for the backward pass. A policy for `jax.checkpoint`."""
    return _is_kept(primitives.ARITHMETIC, primitive, avals, params)


def _repeats_elementary(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether a result is kept, if elementary functions are repeated. A policy."""
    return _is_kept(primitives.ARITHMETIC | primitives.ELEMENTARY, primitive, avals, params)


_POLICIES = (_keeps_elementary, _repeats_elementary)


def _is_kept(
    repeated: frozenset[str], primitive: Any, avals: Iterable[Any], params: Mapping[str, Any]
) -> bool:
    """Return whether a result is kept, if operations in `repeated` are repeated."""
    if primitive.name in primitives.COMPARISONS:
        # For floats, the result needs one byte, and the operands at least eight.
        return any(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
    return not _is_repeated(repeated, primitive, params)


def _is_repeated(repeated: frozenset[str], primitive: Any, params: Mapping[str, Any]) -> bool:
    if primitive.name not in primitives.PLAIN_CALLS | {primitives.CUSTOM_JVP}:
        return primitive.name in repeated
    # A function without equations may be `_keep`.
    eqns = [eqn for jaxpr in jaxprs.functions_in(params) for eqn in jaxpr.eqns]
    return bool(eqns) and all(_is_repeated(repeated, eqn.primitive, eqn.params) for eqn in eqns)


def _keeping_least(body: Jaxpr, keeping: Jaxpr, repeating: Jaxpr, operands: ScanOperands) -> Jaxpr:
    """Return a body unchanged, or in a checkpoint with the better policy if that keeps less.

    Elementary functions are repeated if that saves more than two bytes for each result. A float32
    result needs four bytes. Repeating it saves all four if it is computed from a product that is
    kept anyway, and two if that is kept for nothing else. The gates of recurrent networks are
    functions of two products, which need four bytes, and repeating them makes the networks 1.3
    times slower (jaxlib 0.10.2, CPU).
    """
    chosen, kept = keeping, _bytes_kept(keeping, operands)
    if elements := _elementary_results(body):
        fewest = _bytes_kept(repeating, operands)
        if kept - fewest > 2 * elements:
            chosen, kept = repeating, fewest
    # This keeps what JAX keeps of the body itself, and shares the trace of its tangents.
    everything = _with_params(keeping, policy=jax.checkpoint_policies.everything_saveable)
    return chosen if kept < _bytes_kept(everything, operands) else body


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


def _bytes_kept(body: Jaxpr, operands: ScanOperands) -> int:
    """Return how many bytes a scan stacks in each iteration for the derivative of its body.

    Rows exist already, and what depends only on constants is kept once.
    """

    def derivative(*args: Any) -> Any:
        return jax.vjp(functools.partial(jaxprs.evaluate, body), *args)[1]

    avals = [x.aval for x in body.constvars], *(x.aval for x in body.invars)
    program = jaxprs.without_constants(jaxprs.make_jaxpr(derivative)(*avals))
    first = len(body.constvars) + operands.constants
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
    body = _with_kept_loops(_with_kept_invariants(jaxpr, constants))
    body = body.replace(constvars=[], invars=operands, debug_info=debug_info)
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
    fun = jax.checkpoint(jnp.sin, policy=_keeps_elementary, prevent_cse=False)
    (eqn,) = jax.make_jaxpr(fun)(jnp.float32(0)).eqns
    return eqn


def _is_checkpointed(jaxpr: Jaxpr) -> bool:
    return [eqn.params.get("policy") in _POLICIES for eqn in jaxpr.eqns] == [True]


def _with_params(checkpointed: Jaxpr, **params: Any) -> Jaxpr:
    (eqn,) = checkpointed.eqns
    return checkpointed.replace(eqns=[eqn.replace(params=eqn.params | params)])


@edits.memoized
def _with_kept_loops(jaxpr: Jaxpr) -> Jaxpr:
    """Return a program that keeps the results of its loops, and the carries of its scans.

    A policy is asked about single operations. JAX asks about the operations inside a scan instead
    of the scan, and about a `while_loop` not at all (jax 0.7 to 0.12), so it would run every loop
    again in the backward pass. Here an identity follows each result, and policies keep what that
    returns. Then nothing in the backward pass reads the loop itself, and JAX drops it there.
    """

    def edited(eqn: Equation) -> list[Equation]:
        name = eqn.primitive.name
        if name in _RULES:
            return [_with_kept_rule(eqn)]
        if name == primitives.SCAN:
            eqn = edits.with_edited_functions(eqn, _with_kept_carries, jaxprs.operands_of_scan(eqn))
        elif name in primitives.FOLLOWED:  # under the policy of the checkpoint around it
            eqn = edits.with_edited_functions(eqn, _with_kept_loops)
        return _with_kept_results(eqn) if name in primitives.LOOPS else [eqn]

    def edit(jaxpr: Jaxpr) -> Jaxpr:
        return edits.with_equations(jaxpr, [new for eqn in jaxpr.eqns for new in edited(eqn)])

    return edits.with_edit(edit, jaxpr)


@edits.memoized
def _with_kept_carries(body: Jaxpr, operands: ScanOperands) -> Jaxpr:
    """Return the body of a scan in the body of another. It keeps its carries.

    The backward pass of a scan needs the carry of each iteration. Of a scan inside a checkpoint,
    JAX does not stack the carries: it would run the scan once more, only to compute them. Kept in
    the body, under a new name for everything that reads it, a carry is a residual like any other.
    """

    def edit(body: Jaxpr) -> Jaxpr:
        if not body.eqns:
            return body
        checkpointed = body if _is_checkpointed(body) else _checkpointed(body, operands.constants)
        inside = checkpointed.eqns[0].params["jaxpr"]
        first = len(body.constvars) + operands.constants
        carries = inside.invars[first : first + operands.carried]
        # An operand of a half-precision product needs two bytes, and the carry four.
        inside = _with_kept(
            inside,
            lambda eqn: eqn.primitive.name in primitives.CONVERSIONS and eqn.invars[0] in carries,
        )
        new = {x: Var(x.aval) for x in carries}
        kept = [_kept_as(new[x], x, beside=inside.eqns[0]) for x in carries]
        inputs = [new.get(x, x) for x in inside.invars]
        inside = inside.replace(invars=inputs, eqns=[*kept, *inside.eqns])
        # The policy of the checkpoint around is applied in here first. If this one kept more than
        # that, JAX would compute the difference in one more loop.
        return _with_params(checkpointed, jaxpr=inside, policy=_repeats_elementary)

    return edits.with_edit(edit, body)


def _with_kept_invariants(body: Jaxpr, constants: int) -> Jaxpr:
    """Return the body of a scan that keeps functions of its constants.

    JAX computes them before the loop, and keeps them once.
    """
    variables = set(body.invars[constants:])

    def is_kept(eqn: Equation) -> bool:
        if not variables.isdisjoint(jaxprs.read_by([eqn])):
            variables.update(eqn.outvars)
            return False
        return not _is_repeated(primitives.ARITHMETIC, eqn.primitive, eqn.params)

    return _with_kept(body, is_kept)


# Functions with a custom derivative, and the parameter that traces their rule. A loop in a rule is
# in no jaxpr yet: JAX calls the rule when it differentiates, under the policy of the checkpoint
# around. So the rule is wrapped, and the program that it returns is edited then. These parameters
# are undocumented, and so is `wrap_init` (the same in jax 0.7.0, 0.10.2 and 0.12.0).
_RULES = {primitives.CUSTOM_JVP: "jvp_jaxpr_fun", primitives.CUSTOM_VJP: "fwd_jaxpr_thunk"}


def _with_kept_rule(eqn: Equation) -> Equation:
    """Return a function with a custom derivative whose rule keeps its results, if it has a loop."""
    name = _RULES[eqn.primitive.name]
    rule = eqn.params[name]
    # A forward rule returns residuals too. The other rule also returns tangents.
    number = len(eqn.outvars) if name == "jvp_jaxpr_fun" else None

    def traced(*zeros: bool) -> tuple[Any, ...]:
        jaxpr, *rest = rule.call_wrapped(*zeros)
        return _with_kept_outputs(jaxpr, number), *rest

    wrapped = linear_util.wrap_init(traced, debug_info=rule.debug_info)
    return eqn.replace(params=eqn.params | {name: wrapped})


@edits.memoized
def _with_kept_outputs(jaxpr: Jaxpr, number: int | None) -> Jaxpr:
    """Return a program that keeps its first `number` results, if it has a loop."""
    if not any(eqn.primitive.name in primitives.LOOPS for eqn in jaxprs.all_equations(jaxpr)):
        return jaxpr
    outputs = {x for x in jaxpr.outvars[:number] if not isinstance(x, Literal)}
    return _with_kept(jaxpr, lambda eqn: not outputs.isdisjoint(eqn.outvars))


def _with_kept(jaxpr: Jaxpr, is_kept: Callable[[Equation], bool]) -> Jaxpr:
    """Return a program that keeps the results of some equations."""
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        eqns += _with_kept_results(eqn) if is_kept(eqn) else [eqn]
    return edits.with_equations(jaxpr, eqns)


def _with_kept_results(eqn: Equation) -> list[Equation]:
    """Return an equation, and others that keep its results."""
    results = [Var(x.aval) for x in eqn.outvars]
    kept = [_kept_as(old, new, eqn) for old, new in zip(results, eqn.outvars, strict=True)]
    return [eqn.replace(outvars=results), *kept]


def _kept_as(old: Var, new: Var, beside: Equation) -> Equation:
    """Return the equation that assigns `old`, which is kept, to `new`."""
    (eqn,) = jax.make_jaxpr(_keep)(old.aval).eqns
    return eqn.replace(invars=[old], outvars=[new], source_info=beside.source_info, ctx=beside.ctx)


@jax.custom_jvp
def _keep(x: jax.Array) -> jax.Array:
    """Return `x`. The policies keep it, as they keep what has a rule of its own.

    A `checkpoint_name` would do, but a policy of the program around may keep all names.
    """
    return x


@_keep.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _keep(*primals), *tangents
