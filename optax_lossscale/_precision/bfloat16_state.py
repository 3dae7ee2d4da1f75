"""The state of any optimizer in bfloat16, rounded stochastically."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._precision.halves import in_dtype, rounded_at_random, widened
from optax_lossscale._precision.masters import MasterWeightsState
from optax_lossscale._state import refuse_guard
from optax_lossscale._support import checks
from optax_lossscale._support.nnx import is_nnx
from optax_lossscale._support.tree import KeyPath, path_name, subtrees


class Bfloat16State(NamedTuple):
    """The state of `with_bfloat16_state`.

    Attributes:
      rounding_count: Steps, modulo 2**32, which choose the random bits. `uint32[]`.
      inner_state: The inner optimizer's state, its large float32 arrays in bfloat16.
    """

    rounding_count: jax.Array
    inner_state: optax.OptState


Bfloat16State.__module__ = "optax_lossscale"  # as pickles name it


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
    (a parameter's own array in the state that `inner.init` returns, as in Prodigy, DoG and
    mechanize, and `z` of `schedule_free`), and the memories of L-BFGS and of line searches.

    The random bits depend on the step's number, the array's place in the state and the element's
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
      ValueError: From `init`, if `inner` keeps master weights, skips steps, or does this already.

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
    inner = checks.transformation("inner", inner)
    checks.keep(keep)

    def init_fn(params: optax.Params) -> Bfloat16State:
        inner_state = inner.init(params)
        refuse_guard("inner", inner_state, "`with_loss_scaling(with_bfloat16_state(inner))`")
        for path, found in subtrees(inner_state, MasterWeightsState, Bfloat16State):
            raise ValueError(
                f"`inner` must be the optimizer alone, got a {type(found).__name__} at "
                f"{path_name(path)} of its state. Keep masters around it: "
                "`with_master_weights(with_bfloat16_state(inner))`."
            )
        return Bfloat16State(jnp.zeros((), jnp.uint32), _in_bfloat16(inner_state, params, keep))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Bfloat16State]:
        count, old = checks.expect_state(state, Bfloat16State)
        # The new count, so that the old one has one reader, and XLA overwrites it in place.
        count = jnp.asarray(count, jnp.uint32) + 1
        leaves, treedef = jax.tree.flatten(old)
        wide = treedef.unflatten(widened(x) if _is_bfloat16(x) else x for x in leaves)
        updates, new = inner.update(updates, wide, params, **extra_args)
        arrays = treedef.flatten_up_to(new)
        for place, leaf in enumerate(leaves):
            if _is_bfloat16(leaf):
                arrays[place] = rounded_at_random(arrays[place], count, place)
        return updates, Bfloat16State(count, treedef.unflatten(arrays))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


_LEAST_SIZE = 4096
# Whose arrays are subtracted from others, or handed to a line search as they are.
_LINE_SEARCHES = (
    optax.ScaleByLBFGSState,
    optax.ScaleByZoomLinesearchState,
    optax.ScaleByBacktrackingLinesearchState,
)


def _in_bfloat16(
    inner_state: optax.OptState, params: optax.Params, keep: Callable[[str], bool] | None
) -> optax.OptState:
    """Return the state of an optimizer with its large arrays in bfloat16."""
    averages = subtrees(inner_state, optax.contrib.ScheduleFreeState)
    memories = subtrees(inner_state, *_LINE_SEARCHES)
    copies = [params, *(state.z for _, state in averages), *(state for _, state in memories)]
    stay = set(map(id, jax.tree.leaves(copies)))
    names: dict[str, bool] = {}

    def convert(path: KeyPath, leaf: Any) -> Any:
        if getattr(leaf, "dtype", None) != jnp.float32 or leaf.size < _LEAST_SIZE:
            return leaf
        name = jax.tree_util.keystr(path)
        if id(leaf) in stay or (keep is not None and names.setdefault(name, bool(keep(name)))):
            return leaf
        return in_dtype(leaf, jnp.bfloat16)

    def convert_node(path: KeyPath, node: Any) -> Any:
        return jax.tree.map(lambda leaf: convert(path, leaf), node)

    # The path of an array in a Variable of flax.nnx, too, is that of other containers.
    converted = jax.tree_util.tree_map_with_path(
        convert_node, inner_state, is_leaf=lambda node: is_nnx(node, "Variable")
    )
    if names and not any(names.values()):
        checks.warn(f"`keep` names none of the arrays, whose paths are: {', '.join(names)}.")
    return converted


def _is_bfloat16(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bfloat16
