"""Train bfloat16 parameters without master weights, by stochastic rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._order import refuse_second_for_parameters, refuse_second_guard
from optax_lossscale._precision.halves import rounded_at_random
from optax_lossscale._precision.storage import refuse_hidden_storage
from optax_lossscale._state import MasterWeightsState, StochasticRoundingState
from optax_lossscale._support import checks
from optax_lossscale._support.nnx import leaf_names
from optax_lossscale._support.notes import add_likely_causes
from optax_lossscale._support.tree import HALF, PyTree, in_dtype, path_name


def with_stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Train bfloat16 parameters without master weights, rounding each step stochastically.

    Rounded to nearest, an update below 1/512 of a weight is lost, however often it comes. Here, the
    inner optimizer sees float32 parameters and gradients, and each new float32 weight is rounded
    at random to one of its two bfloat16 neighbors, such that its expectation is the weight itself:
    1000 steps of -1e-4 take 1.0 to about 0.9. `optax.apply_updates(params, updates)` is exactly
    that neighbor. A weight that the inner optimizer does not change keeps its bits. Parameters of
    other dtypes are optimized as by `inner`. Derivatives pass through rounding as through the
    identity.

    Rounding needs no memory, but it is not exact: after long training at a constant learning rate,
    weights wander around a minimum by two to three bfloat16 steps, whatever the rate. A schedule
    that ends at zero helps. `with_master_weights(inner, remainders=True)` is exact, for two more
    bytes per parameter.

    The random bits depend on the step's number, the parameter's path and the element's index: the
    same state gives the same step, on any number of devices under `jax.jit`. Inside
    `jax.shard_map`, each shard counts its own elements; members of a `jax.vmap` share bits.

    It goes inside a guard and around everything else, so that nothing changes its updates:
    `with_skipping(with_stochastic_rounding(optax.chain(...)))`.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.

    Returns:
      A gradient transformation whose state is a `StochasticRoundingState`. Its `update` needs
      `params`.

    Raises:
      TypeError: If `inner` is not an optimizer. From `update`, if the state is of another type.
      ValueError: From `init`, if a parameter is float16, or if `inner` contains a guard, master
        weights, or `with_stochastic_rounding`. From `update`, without `params`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_stochastic_rounding(optax.sgd(1e-4))
      >>> params = jnp.ones(4096, jnp.bfloat16)
      >>> opt_state = tx.init(params)
      >>> for _ in range(1000):
      ...     updates, opt_state = jax.jit(tx.update)(jnp.ones_like(params), opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f"{params.astype(jnp.float32).mean():.3f}")
      0.900

    References:
      Zamirai et al., `Revisiting BFloat16 Training <https://arxiv.org/abs/2010.06192>`_, 2020.
      Ozkara et al., `Stochastic Rounding for LLM Training: Theory and Practice
      <https://arxiv.org/abs/2502.20566>`_, 2025.
    """
    inner = checks.read_optimizer("inner", inner)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        _refuse_float16(params)
        inner_state = inner.init(_in_float32(params))
        instead = "`with_skipping(with_stochastic_rounding(inner))`"
        refuse_second_guard("inner", inner_state, instead)
        kinds = MasterWeightsState, StochasticRoundingState
        refuse_second_for_parameters("with_stochastic_rounding", inner_state, *kinds)
        return StochasticRoundingState(jnp.zeros((), jnp.uint32), inner_state)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        refuse_hidden_storage("with_stochastic_rounding")
        count, inner_state = checks.read_state(state, StochasticRoundingState)
        for name, given in (("updates", updates), ("params", params)):
            if given is None:
                raise ValueError(f"`{name}` must be given: `update(grads, state, params)`.")
        # The new count, so that the old one has one reader, and XLA overwrites it in place.
        count = jnp.asarray(count, jnp.uint32) + 1
        wide = _in_float32(params)
        try:
            moves, inner_state = inner.update(_in_float32(updates), inner_state, wide, **extra_args)
        except Exception as error:
            add_likely_causes(error, updates, params)
            raise
        old, params_def = jax.tree.flatten(params)
        moves = params_def.flatten_up_to(moves)
        leaves = zip(old, jax.tree.leaves(wide), leaf_names(params), strict=True)
        for place, (param, weight, name) in enumerate(leaves):
            if getattr(param, "dtype", None) == jnp.bfloat16:
                # No array in the state of `with_bfloat16_state` has this name, so none has the
                # same random bits.
                moves[place] = _to_neighbor(weight, moves[place], count, f"params{name}")
        return params_def.unflatten(moves), StochasticRoundingState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _to_neighbor(weight: jax.Array, move: jax.Array, count: jax.Array, name: str) -> jax.Array:
    """Return the update from a bfloat16 `weight` to a bfloat16 neighbor of `weight + move`.

    Adding it to the weight is exact. A sum of two float32 numbers is either close to the larger
    one, or a multiple of its last digit, and then so is the difference.
    """
    move = jnp.asarray(move, jnp.float32)
    end = rounded_at_random(weight + move, count, name).astype(jnp.float32)
    # The negative of a difference: -0.0 for equal numbers, which leaves zeros of either sign.
    # Infinite and NaN weights are added to as usual, since `inf - inf` is NaN.
    return jnp.where(jax.lax.is_finite(weight), -(weight - end), move)


def _in_float32(tree: PyTree) -> PyTree:
    """Return a tree with its half-precision arrays in float32."""
    is_half = lambda x: getattr(x, "dtype", None) in HALF  # noqa: E731
    return jax.tree.map(lambda x: in_dtype(x, jnp.float32) if is_half(x) else x, tree)


def _refuse_float16(params: optax.Params) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if getattr(leaf, "dtype", None) == jnp.float16:
            raise ValueError(
                f"`params` must not be float16, got it at {path_name(path)}. Keep masters of them, "
                "`with_master_weights(inner)`, or store them in bfloat16: "
                "`cast(params, jnp.bfloat16)`."
            )
