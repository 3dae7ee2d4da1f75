"""An optimizer's step, after which the state is the old one where a flag is false.

The result is that of `jnp.where` on what the optimizer returns, and in eager execution it is
computed so. In a compiled step that would be slow: XLA:CPU (seen in jaxlib 0.10.2) computes Adam's
new moments a second time inside the loop that writes the parameters. The old moments then have two
readers, cannot be overwritten in place, and are copied: three to six times the cost of the step.
Here the update is traced, and each leaf of the state is chosen where its new value is computed.
What comes after it reads the chosen leaf, and the old one has a single reader.

Where the flag is false, everything that is computed after a choice is thrown away, so it may be
anything: it reads a constant in place of the leaf. No derivative passes through it either. Whatever
goes in or comes out is selected, and a selection discards even the NaN of an infinite derivative.

The replay can go once XLA:CPU writes the outputs that share a computation in one loop, as XLA:TPU
does: `test_plain_where_on_the_outputs_copies_the_state` fails then.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer, eval_jaxpr

from optax_lossscale._step.choose import (
    check_alike,
    constant_unless,
    is_selectable,
    negative_zero_unless,
    tree_where,
    zero_unless,
)
from optax_lossscale._support import checks
from optax_lossscale._support.jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    Variable,
    inner_jaxprs,
    is_literal,
    read_by,
)
from optax_lossscale._support.tree import KeyPath, PyTree, Tree, is_array, is_inexact, path_name

# Stands for a leaf that is thrown away. It is neither 0 nor 1 and more than its own square, so that
# no optimizer of Optax divides by zero or takes the root of zero, not even in a derivative: the
# root of b, 1 - b, and centered RMSprop's variance b - b**2 are all positive.
_THROWN_AWAY = 0.5

# What may not end, or may act, on numbers that no step produces. LAPACK's iterations are among the
# first.
_LOOPS_AND_CALLS = frozenset(["while", "eig", "eigh", "schur", "svd", "pure_callback", "ffi_call"])


def apply_where(
    applied: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    *,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Take a step where `applied` is true. Elsewhere updates are -0.0, and the state is kept."""
    given = {name: zero_unless(applied, arg) for name, arg in extra_args.items()}
    if not isinstance(applied, Tracer):  # a compiled update gets all that it closes over this way
        params = jax.tree.map(functools.partial(constant_unless, applied), params)
    updates, inner_state = update_where(
        applied,
        lambda grads, state: apply(inner, grads, state, params, extra_args=given),
        grads,
        as_arrays(inner_state),
    )
    return negative_zero_unless(applied, updates), inner_state


def apply(
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    *,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Take a step, after which the state has the dtypes that it had before."""
    try:
        updates, new_state = inner.update(grads, inner_state, params, **extra_args)
        return updates, _cast_like(new_state, inner_state)
    except (TypeError, ValueError) as error:
        dtypes = [jnp.result_type(p) for p in jax.tree.leaves(params) if is_inexact(p)]
        if any(jnp.finfo(dtype).bits < 32 for dtype in dtypes):
            error.add_note(
                "`params` are of a smaller dtype than float32, and the gradients may be float32, "
                "which `inner` may not take together. Wrap it: `with_master_weights(inner)`. Or "
                "keep the parameters in float32, and cast them inside the loss function."
            )
        leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda grad: grad is None)
        nones = [path_name(path) for path, grad in leaves if grad is None]
        if nones:
            error.add_note(
                f"The gradient is None at {', '.join(nones)}. Give zeros, or leave the parameter "
                "out: `optax.masked`, `optax.partition`."
            )
        raise


def as_arrays(state: Tree) -> Tree:
    """Return `state` with arrays for numbers of Python and NumPy, as `jax.jit` does."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, (np.ndarray, np.generic)):
            is_number = leaf.dtype.kind not in "OSU" and leaf.dtype != jax.dtypes.float0
        else:
            is_number = isinstance(leaf, (int, float, complex))
        return jnp.asarray(leaf) if is_number else leaf

    return jax.tree.map(convert, state)


def _cast_like(new: Tree, old: Tree) -> Tree:
    """Return the new state of the inner optimizer with the dtypes of the old one.

    Optax promotes: Adam's float16 moments become float32 when they meet float32 gradients. The
    state would change its type from one step to the next, which `jax.lax.scan` refuses and
    `jax.jit` compiles twice.
    """
    remedy = "Keep what changes in the state in arrays of a fixed shape."
    checks.same_structure("inner", new, old, remedy)

    def cast(path: KeyPath, new_leaf: Any, old_leaf: Any) -> Any:
        if not is_array(old_leaf):
            return new_leaf
        checks.same_shape(
            "inner", path, new_leaf, old_leaf, "Give it the parameters it was initialized with."
        )
        if is_array(new_leaf) and new_leaf.dtype == old_leaf.dtype:
            return new_leaf
        if is_inexact(new_leaf) and not jnp.issubdtype(old_leaf.dtype, jnp.inexact):
            raise TypeError(
                "`inner` must keep the kind of numbers in its state, got "
                f"{jnp.result_type(new_leaf)} for {old_leaf.dtype} at {path_name(path)}. "
                "Initialize it with that dtype."
            )
        return jnp.asarray(new_leaf, old_leaf.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)


def update_where(
    pred: jax.Array, update: Callable[[Any, Any], tuple[Any, Any]], grads: Any, state: Any
) -> tuple[Any, Any]:
    """Return `update(grads, state)`, but the old state where `pred` is false.

    Args:
      pred: Whether the state moves. `bool[]`.
      update: Returns an output and a new state with the structure, shapes and dtypes of the one
        it is given.
      grads: What the state moves by. Where `pred` is false, `update` may be given zeros.
      state: The old state.

    Returns:
      The output, which is undefined where `pred` is false, and the chosen state.
    """
    given, join_given = _split(grads)
    old, join_old = _split(state)
    join: dict[str, Callable[[Sequence[Any]], PyTree]] = {}

    def traced(given: list[Any], old: list[Any]) -> list[Any]:
        out, new_state = update(join_given(given), join_old(old))
        check_alike(new_state, state)
        new, join["new"] = _split(new_state)
        outputs, join["out"] = _split(out)
        return [*new, *outputs]

    closed = _trace(traced, given, old) if isinstance(pred, Tracer) else None
    if closed is None:
        kept = join_old([constant_unless(pred, leaf) for leaf in old])
        out, new_state = update(zero_unless(pred, grads), kept)
        return out, tree_where(pred, new_state, state)
    values = _replay(pred, closed, given, old)
    return join["out"](values[len(old) :]), join["new"](values[: len(old)])


def _split(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """Return the arrays of `tree`, and a function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    # Objects that outlive the trace must not hold its tracers.
    rest = [_ARRAY if is_selectable(leaf) else leaf for leaf in leaves]

    def join(arrays: Sequence[Any]) -> PyTree:
        remaining = iter(arrays)
        return treedef.unflatten(next(remaining) if leaf is _ARRAY else leaf for leaf in rest)

    return [leaf for leaf in leaves if is_selectable(leaf)], join


_ARRAY = object()  # stands for an array


def _trace(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr | None:
    """Return the jaxpr of `fun`, or None if it must run in its caller's own trace."""
    try:
        return jax.make_jaxpr(fun)(*args)
    except Exception as error:
        # flax.nnx allows writes to a Variable only in the trace that made it.
        if type(error).__name__ == "TraceContextError":
            return None
        raise


def _replay(pred: jax.Array, closed: ClosedJaxpr, grads: list[Any], old: list[Any]) -> list[Any]:
    """Evaluate a jaxpr from gradients and the old state to the new state, and more outputs."""
    jaxpr = closed.jaxpr
    # A line search loops on NaN, and a callback may raise. They see zeros for bad gradients, and
    # one state, which is chosen at the end.
    sees_zeros = acts(jaxpr) or _debugs()
    # So does everything on the CPU, where zeros cost nothing, and keep `checkify` silent for most
    # optimizers. Elsewhere they would cost one more read of the gradients if the update takes their
    # norm: without them, XLA reads them once for the norm and the check. The flag is chosen, and
    # not the arrays: of those, XLA:CPU would write some to memory.
    seen = (
        pred
        if sees_zeros
        else jax.lax.platform_dependent(
            pred, cpu=lambda flag: flag, default=lambda flag: flag | True
        )
    )
    inputs = [*closed.consts, *zero_unless(seen, grads), *old]
    inputs = [constant_unless(pred, array) for array in inputs]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    read = {var for var in jaxpr.outvars if not is_literal(var)} | read_by(jaxpr.eqns).keys()
    early = {} if sees_zeros else _leaves_read_later(jaxpr, len(old))
    kept: dict[int, jax.Array] = {}
    start = 0
    for end, eqn in enumerate(jaxpr.eqns, start=1):
        chosen = [var for var in eqn.outvars if var in early]
        if not chosen and end < len(jaxpr.eqns):
            continue
        # All equations since the last choice. As a jaxpr they keep their contexts and names.
        eqns, start = jaxpr.eqns[start:end], end
        made = [var for each in eqns for var in each.outvars if var in read]
        needed = [var for var in read_by(eqns) if var in values]
        piece = jaxpr.replace(constvars=[], invars=needed, outvars=made, eqns=eqns)
        results = eval_jaxpr(piece, [], *map(values.get, needed))
        values.update(zip(made, results, strict=True))
        for var in chosen:
            leaf = old[early[var]]
            choice = jnp.where(pred, values[var], leaf)
            # Under `shard_map` one of them may vary over axes over which the other does not, and
            # the equations were traced for their types.
            if jax.typeof(choice) == jax.typeof(leaf) == var.aval:
                kept[early[var]] = values[var] = choice
                if is_inexact(choice):
                    thrown_away = jax.lax.full_like(choice, _THROWN_AWAY)
                    values[var] = jnp.where(pred, choice, thrown_away)
    outputs = [var.val if is_literal(var) else values[var] for var in jaxpr.outvars]
    for leaf, array in enumerate(old):
        outputs[leaf] = kept[leaf] if leaf in kept else jnp.where(pred, outputs[leaf], array)
    return outputs


def _debugs() -> bool:
    """Return whether JAX looks for NaN or infinity."""
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def _leaves_read_later(jaxpr: Jaxpr, leaves: int) -> dict[Variable, int]:
    """Return the new leaves, other than scalars, that equations make and equations read."""
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}.intersection(read_by(jaxpr.eqns))
    found: dict[Variable, int] = {}
    for leaf, var in enumerate(jaxpr.outvars[:leaves]):
        if not is_literal(var) and var in made and var.aval.shape:
            found.setdefault(var, leaf)  # two leaves that are one variable: the first
    return found


def acts(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr has a loop that may not end, a callback or another effect."""
    # The axis of a collective is called an effect, too.
    effects = {type(effect).__name__ for effect in jaxpr.effects} - {"NamedAxisEffect"}
    if effects or any(eqn.primitive.name in _LOOPS_AND_CALLS for eqn in jaxpr.eqns):
        return True
    return any(acts(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn))
