"""Optimizer state in bfloat16, with stochastic rounding."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._autocast import refuse_hidden_storage
from optax_lossscale._order import refuse_masters_inside, refuse_second_guard
from optax_lossscale._precision.cast import warn_if_unused
from optax_lossscale._precision.copies import copies_of
from optax_lossscale._precision.rounding import array_seed, rounded_at_random
from optax_lossscale._state import Bfloat16State
from optax_lossscale._support import checks, tree
from optax_lossscale._support.nnx import named_leaves
from optax_lossscale._support.notes import add_likely_causes
from optax_lossscale._support.transformation import Transformation
from optax_lossscale._support.tree import KeyPath, Leaf


def with_bfloat16_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    keep: Callable[[str], bool] | None = None,
) -> Transformation[Bfloat16State]:
    """Store the state of an optimizer in bfloat16, which halves its memory.

    Every float32 array with at least 4,096 elements is stored in bfloat16. The inner optimizer sees
    float32. Its new state is rounded stochastically: each number becomes one of the two nearest
    bfloat16 numbers at random, and its expected value is the number itself. Rounding to nearest
    would round `0.999 * v` back to `v`, and Adam's second moment would never decrease. Numbers that
    bfloat16 can represent do not change, and no finite number becomes infinite. Derivatives ignore
    the rounding.

    Arrays that an optimizer subtracts from one another stay in float32: copies of the parameters
    (arrays that `inner.init` copies without arithmetic, as in Prodigy, DoG, mechanize and
    `schedule_free`), the two moments from which centered RMSProp computes a variance, and the
    history of L-BFGS and of line searches.

    The random bits depend on the step's number, the array's path in the state and the element's
    index: the same state gives the same step, on any number of devices under `jax.jit`. Inside
    `jax.shard_map`, each shard counts its own elements. Under `jax.vmap` all instances get the same
    bits, and so do two optimizers of one program whose arrays have equal paths.

    It belongs inside masters and guards, around the optimizer or a part of it:
    `with_master_weights(with_bfloat16_state(optax.adamw(1e-3)), remainders=True)`. To restore the
    checkpoint of a plain optimizer, cast it to the dtypes that `init` gives, and use it as
    `inner_state`.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      keep: A predicate that selects arrays that stay in float32, by their path in the inner
        optimizer's state, as `jax.tree_util.keystr` formats it: `lambda path: ".ema" in path`.
        `init` calls it for each array that would otherwise be stored in bfloat16.

    Returns:
      A gradient transformation whose state is a `Bfloat16State`. Its dtypes never change.

    Raises:
      TypeError: If `inner` is not an optimizer, or `keep` is not a function. From `update`, if
        `state` is not a `Bfloat16State`.
      ValueError: From `init`, if `inner` keeps master weights, rounds parameters, skips steps, or
        stores its state in bfloat16 already, or if a key in its state has an address in its text.
        From `update`, inside `autocast`.

    Warns:
      UserWarning: From `init`, if `keep` selects none of the arrays.

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
      <https://arxiv.org/abs/2010.06192>`_, 2020. The 32-bit hash: Wellons, `Prospecting for Hash
      Functions <https://nullprogram.com/blog/2018/07/31/>`_, 2018.
    """
    inner = checks.read_optimizer("inner", inner)
    checks.require_keep(keep)

    def init_fn(params: optax.Params) -> Bfloat16State:
        inner_state = inner.init(params)
        refuse_second_guard("inner", inner_state, "`with_loss_scaling(with_bfloat16_state(inner))`")
        refuse_masters_inside(inner_state)
        every = [True] * len(jax.tree.leaves(params))
        copies = copies_of(every, params, inner.init, inner_state)
        stay = {*_differences(inner_state), *copies}
        return Bfloat16State(jnp.zeros((), jnp.uint32), _in_bfloat16(inner_state, stay, keep))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Bfloat16State]:
        refuse_hidden_storage("with_bfloat16_state")
        count, old = checks.read_state(state, Bfloat16State)
        # Round with the new count. If the old one were used below, XLA:GPU would copy it first: 16
        # kernels in a step of AdamW on an H100 instead of 15, the same bytes (jaxlib 0.10.2).
        count = jnp.asarray(count, jnp.uint32) + 1
        wide = tree.in_float32(old, jnp.bfloat16)
        try:
            updates, new = inner.update(updates, wide, params, **extra_args)
        except Exception as error:
            add_likely_causes(error, updates, params)
            raise
        treedef = jax.tree.structure(old)
        arrays = treedef.flatten_up_to(new)
        for i, (name, _, leaf) in enumerate(named_leaves(old)):
            if tree.is_in(leaf, jnp.bfloat16):
                arrays[i] = rounded_at_random(arrays[i], count, array_seed(name))
        return updates, Bfloat16State(count, treedef.unflatten(arrays))

    return Transformation(init_fn, update_fn)


_LEAST_SIZE = 4096
# States whose arrays need float32, because small differences between them matter: a variance of
# rounded moments may be negative, and line searches compare stored values. Optax 0.2.8 does not
# export all of these classes, so they are recognized by name.
_DIFFERENCES = frozenset(
    [
        *("ScaleByRStdDevState", "ScaleByRStdDevWithCountState", "ScaleByLBFGSState"),
        *("ScaleByZoomLinesearchState", "ScaleByBacktrackingLinesearchState"),
    ]
)


def _differences(inner_state: optax.OptState) -> Iterator[KeyPath]:
    """Yield the paths of the arrays in these states."""
    needs_float32 = lambda node: type(node).__name__ in _DIFFERENCES  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(inner_state, is_leaf=needs_float32)
    for path, state in nodes:
        if needs_float32(state):
            yield from (path + below for below, _ in jax.tree_util.tree_leaves_with_path(state))


def _in_bfloat16(
    inner_state: optax.OptState, stay: set[KeyPath], keep: Callable[[str], bool] | None
) -> optax.OptState:
    """Return the state of an optimizer with its large arrays in bfloat16."""
    selected: dict[str, bool] = {}

    def convert(name: str, path: KeyPath, leaf: Leaf) -> Leaf:
        if not tree.is_in(leaf, jnp.float32) or path in stay:
            return leaf
        if not tree.is_symbolic(leaf.size) and leaf.size < _LEAST_SIZE:
            return leaf
        selected[name] = keep is not None and bool(keep(name))
        if selected[name]:
            return leaf
        array_seed(name)  # raises for a key that has no fixed text
        return tree.in_dtype(leaf, jnp.bfloat16)

    converted = [convert(*leaf) for leaf in named_leaves(inner_state)]
    if keep is not None:
        warn_if_unused(selected)
    return jax.tree.structure(inner_state).unflatten(converted)
