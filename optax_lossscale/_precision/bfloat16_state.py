"""The state of any optimizer in bfloat16, rounded stochastically."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._order import refuse_masters_inside, refuse_second_guard
from optax_lossscale._precision.halves import array_seed, rounded_at_random
from optax_lossscale._state import Bfloat16State, subtrees
from optax_lossscale._support import checks
from optax_lossscale._support.jaxprs import Jaxpr, inner_jaxprs, is_literal, is_move
from optax_lossscale._support.lines import warn_of_keep
from optax_lossscale._support.nnx import named_leaves
from optax_lossscale._support.notes import add_likely_causes
from optax_lossscale._support.primitives import CALLS
from optax_lossscale._support.tree import ARRAYS, KeyPath, in_dtype, is_symbolic, split


def with_bfloat16_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    keep: Callable[[str], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Store the state of an optimizer in bfloat16, in half the memory.

    Every float32 array of at least 4,096 elements is stored in bfloat16. The inner optimizer sees
    float32, and its new state is rounded stochastically: to one of the two nearest bfloat16
    numbers, so that the expectation is the number itself. Rounded to the nearest, `0.999 * v` is
    `v` again, and Adam's second moment would never fall. Numbers that bfloat16 holds stay as they
    are, and no finite number becomes infinite. Derivatives pass through as if nothing was rounded.

    Arrays of which an optimizer takes small differences stay in float32: copies of the parameters
    (what `inner.init` makes of them by moving alone, as in Prodigy, DoG, mechanize and
    `schedule_free`), the two moments of which centered RMSProp takes the variance, and the
    memories of L-BFGS and of line searches.

    The random bits depend on the step's number, the array's path in the state and the element's
    index: the same state gives the same step, on any number of devices under `jax.jit`. Inside
    `jax.shard_map` and `jax.vmap`, each member counts its own elements.

    It belongs inside of masters and guards, around the optimizer or a part of it:
    `with_master_weights(with_bfloat16_state(optax.adamw(1e-3)), remainders=True)`. A plain
    optimizer's checkpoint, cast to the dtypes that `init` gives, is its `inner_state`.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      keep: A function from a path in the inner optimizer's state, as `jax.tree_util.keystr` formats
        it, to whether the array there stays in float32: `lambda path: ".ema" in path`. `init` asks
        it of each array that would not stay.

    Returns:
      A gradient transformation whose state is a `Bfloat16State`, of which no dtype changes.

    Raises:
      TypeError: If an argument is of the wrong type, the state that `update` is given included.
      ValueError: From `init`, if `inner` keeps master weights, rounds parameters, skips steps, or
        does this already.

    Warns:
      UserWarning: From `init`, if `keep` names none of the arrays.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_bfloat16_state(optax.adam(1e-3), keep=lambda path: ".mu" in path)
      >>> params = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(params, opt_state, params)
      >>> adam = opt_state.inner_state[0]
      >>> print(adam.mu["w"].dtype, adam.nu["w"].dtype, adam.nu["b"].dtype)
      float32 bfloat16 float32

    References:
      Gupta et al., `Deep Learning with Limited Numerical Precision
      <https://arxiv.org/abs/1502.02551>`_, 2015. Zamirai et al., `Revisiting BFloat16 Training
      <https://arxiv.org/abs/2010.06192>`_, 2020. The mixer of 32 bits: Wellons, `Prospecting for
      Hash Functions <https://nullprogram.com/blog/2018/07/31/>`_, 2018.
    """
    inner = checks.read_optimizer("inner", inner)
    checks.require_keep(keep)

    def init_fn(params: optax.Params) -> Bfloat16State:
        inner_state = inner.init(params)
        refuse_second_guard("inner", inner_state, "`with_loss_scaling(with_bfloat16_state(inner))`")
        refuse_masters_inside(inner_state)
        stay = {*_differences(inner_state), *_copies(inner.init, params, inner_state)}
        return Bfloat16State(jnp.zeros((), jnp.uint32), _in_bfloat16(inner_state, stay, keep))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Bfloat16State]:
        checks.refuse_hidden_storage("with_bfloat16_state")
        count, old = checks.read_state(state, Bfloat16State)
        # The new count, so that the old one has one reader, and XLA overwrites it in place.
        count = jnp.asarray(count, jnp.uint32) + 1
        leaves, treedef = jax.tree.flatten(old)
        wide = (in_dtype(x, jnp.float32) if _is_bfloat16(x) else x for x in leaves)
        try:
            updates, new = inner.update(updates, treedef.unflatten(wide), params, **extra_args)
        except Exception as error:
            add_likely_causes(error, updates, params)
            raise
        arrays = treedef.flatten_up_to(new)
        for i, (name, _, leaf) in enumerate(named_leaves(old)):
            if _is_bfloat16(leaf):
                arrays[i] = rounded_at_random(arrays[i], count, array_seed(name))
        return updates, Bfloat16State(count, treedef.unflatten(arrays))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


_LEAST_SIZE = 4096
# States whose arrays need float32: their differences matter. A variance of rounded moments may be
# negative, and line searches compare what they remember.
_DIFFERENCES: tuple[type[Any], ...] = tuple(
    getattr(optax, name)
    for name in (
        *("ScaleByRStdDevState", "ScaleByRStdDevWithCountState", "ScaleByLBFGSState"),
        *("ScaleByZoomLinesearchState", "ScaleByBacktrackingLinesearchState"),
    )
    if hasattr(optax, name)  # not all are in Optax 0.2.6
)
# What changes neither the numbers nor their order.
_CONVERSIONS = frozenset(["convert_element_type", "device_put", "stop_gradient"])


def _differences(inner_state: optax.OptState) -> Iterator[KeyPath]:
    """Yield the paths of all arrays in states whose differences matter."""
    for path, state in subtrees(inner_state, *_DIFFERENCES):
        for below, _ in jax.tree_util.tree_leaves_with_path(state):
            yield path + below


def _copies(
    init: Callable[[Any], Any], params: optax.Params, inner_state: optax.OptState
) -> set[KeyPath]:
    """Return the paths in the state of what `init` makes of the parameters by moving alone.

    Its jaxpr tells: `jax.jit` and `optax.flatten` make copies of other identity, and equal values
    need not be copies.
    """
    arrays, join = split(params, lambda x: isinstance(x, (ARRAYS, jax.ShapeDtypeStruct)))
    paths: list[KeyPath] = []

    def on_arrays(arrays: list[Any]) -> list[Any]:
        leaves = jax.tree_util.tree_leaves_with_path(init(join(arrays)))
        found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, ARRAYS)]
        paths.extend(path for path, _ in found)
        return [leaf for _, leaf in found]

    try:
        jaxpr = jax.make_jaxpr(on_arrays)(arrays).jaxpr
    except Exception:  # noqa: BLE001 - `init` ran before: it reads values, and cannot be traced
        leaves = jax.tree_util.tree_leaves_with_path(inner_state)
        return {path for path, leaf in leaves if any(leaf is array for array in arrays)}
    is_copy = _moved(jaxpr, [True] * len(arrays))
    return {path for path, copied in zip(paths, is_copy, strict=True) if copied}


def _moved(jaxpr: Jaxpr, is_parameter: list[bool]) -> list[bool]:
    """Return which outputs are made of parameters by moving alone."""
    known = {var for var, yes in zip(jaxpr.invars, is_parameter, strict=True) if yes}

    def are_known(atoms: list[Any]) -> list[bool]:
        return [not is_literal(atom) and atom in known for atom in atoms]

    for eqn in jaxpr.eqns:
        sources = are_known(eqn.invars)
        if eqn.primitive.name in CALLS:
            pairs = zip(eqn.outvars, _moved(next(inner_jaxprs(eqn)), sources), strict=True)
            known.update(var for var, yes in pairs if yes)
        elif all(sources) and (is_move(eqn) or eqn.primitive.name in _CONVERSIONS):
            known.update(eqn.outvars)
    return are_known(jaxpr.outvars)


def _in_bfloat16(
    inner_state: optax.OptState, stay: set[KeyPath], keep: Callable[[str], bool] | None
) -> optax.OptState:
    """Return the state of an optimizer with its large arrays in bfloat16."""
    names: dict[str, bool] = {}

    def convert(name: str, path: KeyPath, leaf: Any) -> Any:
        is_small = not is_symbolic(getattr(leaf, "size", 0)) and leaf.size < _LEAST_SIZE
        if getattr(leaf, "dtype", None) != jnp.float32 or is_small or path in stay:
            return leaf
        if keep is not None and names.setdefault(name, bool(keep(name))):
            return leaf
        return in_dtype(leaf, jnp.bfloat16)

    converted = [convert(*leaf) for leaf in named_leaves(inner_state)]
    if names and not any(names.values()):
        warn_of_keep(names)
    return jax.tree.structure(inner_state).unflatten(converted)


def _is_bfloat16(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bfloat16
