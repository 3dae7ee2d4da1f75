"""Stochastic rounding of bfloat16 parameters, instead of master weights."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _order
from optax_lossscale._autocast import refuse_hidden_storage
from optax_lossscale._precision.copies import copies_of
from optax_lossscale._precision.rounding import array_seed, update_at_random
from optax_lossscale._precision.wide_step import step_in_float32
from optax_lossscale._state import MasterWeightsState, StochasticRoundingState
from optax_lossscale._support import checks, tree
from optax_lossscale._support.lines import GivenWarnings, warn_once
from optax_lossscale._support.nnx import named_leaves
from optax_lossscale._support.transformation import Transformation
from optax_lossscale._support.tree import PyTree


def with_stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> Transformation[StochasticRoundingState]:
    """Train bfloat16 parameters without master weights, by rounding each step stochastically.

    Rounding to nearest loses every update below 1/512 of a weight, however many there are. Here,
    the new float32 weight is rounded at random to one of its two bfloat16 neighbors, and its
    expected value is the weight itself: 1,000 steps of -1e-4 change 1.0 to about 0.9. The inner
    optimizer sees float32 parameters and float32 gradients, and
    `optax.apply_updates(params, updates)` equals that neighbor. A weight that the inner optimizer
    does not change keeps its bits. Parameters with other dtypes get the updates of `inner`.
    Derivatives ignore the rounding.

    It needs no extra memory: a parameter and its state take 6 bytes with
    `with_stochastic_rounding(with_bfloat16_state(optax.adamw(1e-3)))`. But it is not exact. After
    long training at a constant learning rate, however small, weights wander around a minimum by
    about two bfloat16 steps.
    `with_master_weights(inner, remainders=True)` is exact and takes two bytes more.

    The random bits depend on the step's number, the parameter's path and the element's index: the
    same state gives the same step, on any number of devices under `jax.jit`. Inside
    `jax.shard_map`, each shard counts its own elements. Under `jax.vmap` all instances get the same
    bits, and so do two optimizers of one program whose arrays have equal paths (twin critics, a
    GAN).

    It belongs inside a guard and around everything else, so that nothing changes its updates:
    `with_skipping(with_stochastic_rounding(optax.chain(...)))`. It is only right around optimizers
    that add to the weights. One that computes its own state from the parameters takes a rounding
    for a step.

    Args:
      inner: An Optax optimizer that keeps no copy of the parameters, or an `optax.MultiSteps`.

    Returns:
      A gradient transformation whose `update` needs `params`, and whose state is a
      `StochasticRoundingState`.

    Raises:
      TypeError: If `inner` is not an optimizer. From `update`, if `state` is not a
        `StochasticRoundingState`.
      ValueError: From `init`, if `inner` keeps master weights, skips steps, rounds stochastically
        already, or computes its state from bfloat16 parameters (`schedule_free`, `mechanize`, DoG,
        DoWG), or if a key of the parameters has an address in its text. From `update`, without
        `params`, or inside `autocast`. From both, if a parameter is float16.

    Warns:
      UserWarning: From `init`, if `inner` keeps any other copy of a bfloat16 parameter. From `init`
        and from `update`, once each, if no parameter is bfloat16, so that nothing is rounded. A
        group of a `partition` may have none.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_stochastic_rounding(optax.sgd(1e-4))
      >>> params = jnp.ones(4096, jnp.bfloat16)
      >>> opt_state, update = tx.init(params), jax.jit(tx.update)
      >>> for _ in range(1000):
      ...     updates, opt_state = update(jnp.ones(4096), opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f"{params.astype(jnp.float32).mean():.3f}")
      0.900

    References:
      Zamirai et al., `Revisiting BFloat16 Training <https://arxiv.org/abs/2010.06192>`_, 2020.
      Ozkara et al., `Stochastic Rounding for LLM Training <https://arxiv.org/abs/2502.20566>`_,
      2025.
    """
    inner = checks.read_optimizer("inner", inner)
    warnings_given = GivenWarnings()

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        _refuse_float16(params)
        _seeds(params)  # raises for keys that have no fixed text
        wide = tree.in_float32(params, jnp.bfloat16)
        inner_state = inner.init(wide)
        instead = "`with_skipping(with_stochastic_rounding(inner))`"
        _order.refuse_second_guard("inner", inner_state, instead)
        _order.refuse_two_for_parameters(inner_state, MasterWeightsState, StochasticRoundingState)
        is_rounded = [tree.is_in(param, jnp.bfloat16) for param in jax.tree.leaves(params)]
        copies = copies_of(is_rounded, wide, inner.init, inner_state)
        _order.refuse_state_of_parameters(inner_state, copies, warnings_given)
        _warn_if_nothing_is_rounded("init", params, warnings_given)
        return StochasticRoundingState(jnp.zeros((), jnp.uint32), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        refuse_hidden_storage("with_stochastic_rounding")
        count, inner_state = checks.read_state(state, StochasticRoundingState)
        checks.require_given(updates, params)
        _refuse_float16(params)
        _warn_if_nothing_is_rounded("update", params, warnings_given)
        # Round with the new count, as `with_bfloat16_state` does.
        count = jnp.asarray(count, jnp.uint32) + 1
        old, params_def = jax.tree.flatten(params)
        seeds = _seeds(params)
        weights = {i: tree.in_dtype(old[i], jnp.float32) for i in seeds}
        moves, new, inner_state = step_in_float32(
            inner, updates, inner_state, params, weights=weights, extra_args=extra_args
        )
        for i, seed in seeds.items():
            moves[i] = update_at_random(new[i], old[i], count, seed)
        return params_def.unflatten(moves), StochasticRoundingState(count, inner_state)

    return Transformation(init_fn, update_fn)


def _seeds(params: PyTree) -> dict[int, int]:
    """Return the seed of each bfloat16 leaf, by its position."""
    # Paths in an optimizer's state do not start with a word, so no seed is shared with them.
    return {
        i: array_seed("params" + name)
        for i, (name, _, param) in enumerate(named_leaves(params))
        if tree.is_in(param, jnp.bfloat16)
    }


def _refuse_float16(params: PyTree) -> None:
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        if tree.is_in(param, jnp.float16):
            raise ValueError(
                f"`params` must not be float16 for stochastic rounding, got one at "
                f"{tree.path_name(path)}. Use `with_master_weights(inner)`, or cast it to bfloat16."
            )


def _warn_if_nothing_is_rounded(method: str, params: PyTree, given: set[str]) -> None:
    """Warn, once per method, if no parameter is bfloat16, except in a group of a `partition`."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    leaves = jax.tree.leaves(params, is_leaf=is_masked)
    is_expected = any(map(is_masked, leaves)) or not any(map(tree.is_inexact, leaves))
    if not is_expected and not any(tree.is_in(leaf, jnp.bfloat16) for leaf in leaves):
        warn_once(
            f"`with_stochastic_rounding.{method}` got no bfloat16 parameter, so nothing is "
            "rounded. Code that adds updates without a cast, such as `eqx.apply_updates`, makes "
            "bfloat16 parameters float32: use `optax.apply_updates`.",
            given,
        )
