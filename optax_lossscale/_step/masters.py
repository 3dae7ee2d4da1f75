"""Float32 master weights of parameters in half precision."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._support import checks
from optax_lossscale._support.tree import KeyPath, PyTree, at_least_float32, leaves_of_type


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      master_weights: A tree like the parameters: `float32` arrays for those in float16 or bfloat16,
        and `optax.MaskedNode()` for all others.
      inner_state: The inner optimizer's state, as it would be for float32 parameters.
    """

    master_weights: PyTree
    inner_state: optax.OptState


def with_master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Keep float32 masters of float16 and bfloat16 parameters, and optimize those.

    An update that is smaller than half the distance between two float16 numbers is lost: 1000
    steps of -1e-4 leave a float16 weight of 1.0 where it is. With masters it adds up. The inner
    optimizer sees float32 master weights and float32 gradients, and after each step the parameters
    are the masters, rounded: `optax.apply_updates(params, updates)` is
    `master.astype(param.dtype)`. Parameters in float32 have no master and are unchanged by this.

    It belongs inside of `with_loss_scaling` and `skip_if`, so that a skipped step leaves the
    masters alone: `with_loss_scaling(with_master_weights(optax.adamw(1e-3)))`.

    One case is not exact. A weight that shrinks to less than 1/8192 of itself in a single step
    (1/65536 in bfloat16), but not to zero, cannot be reached by one addition in float32. It is off
    by the rounding of that addition until the next step, and its master is right.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.

    Returns:
      A gradient transformation whose `update` needs `params`, and whose state is a
      `MasterWeightsState`. It holds four more bytes for each parameter in half precision.

    Raises:
      TypeError: If `inner` is not a gradient transformation; from `update`, if its state is not a
        `MasterWeightsState`.
      ValueError: From `update`, without `params`, or with others than those that `init` was given.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_master_weights(optax.sgd(1e-4))
      >>> params = jnp.float16(1)
      >>> opt_state = tx.init(params)
      >>> for _ in range(1000):
      ...     updates, opt_state = tx.update(jnp.float16(1), opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params)
      0.9

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    inner = checks.transformation("inner", inner)

    def init_fn(params: optax.Params) -> MasterWeightsState:
        masters = jax.tree.map(_master, params)
        return MasterWeightsState(masters, inner.init(_filled(masters, params)))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        masters, inner_state = checks.expect_state(state, MasterWeightsState)
        if params is None:
            raise ValueError(
                "`params` must be given to `update`, got None: the updates lead from the "
                "parameters to the rounded masters. Call `update(grads, state, params)`."
            )
        weights = _filled(masters, params)
        grads = jax.tree.map(at_least_float32, updates)
        updates, inner_state = inner.update(grads, inner_state, weights, **extra_args)
        masters = jax.tree.map(
            lambda master, update: master if _is_missing(master) else _add(master, update),
            masters,
            updates,
            is_leaf=_is_missing,
        )
        updates = jax.tree.map(
            lambda master, update, param: (
                update if _is_missing(master) else _towards(master, param)
            ),
            masters,
            updates,
            params,
            is_leaf=_is_missing,
        )
        return updates, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def master_weights(opt_state: PyTree, params: optax.Params) -> optax.Params:
    """Return the parameters in full precision, to evaluate or export them.

    Args:
      opt_state: A `MasterWeightsState`, or an optimizer's state that holds exactly one.
      params: The parameters that it belongs to.

    Returns:
      `params`, with the float32 master of each leaf that has one.

    Raises:
      ValueError: If `opt_state` holds no `MasterWeightsState`, or several, or `params` are others
        than those that it was made for.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(ols.with_master_weights(optax.sgd(1e-4)), 8)
      >>> params = {"w": jnp.float16(1), "norm": jnp.float32(1)}
      >>> opt_state = tx.init(params)
      >>> _, opt_state = tx.update({"w": jnp.float16(8), "norm": 8.0}, opt_state, params)
      >>> ols.master_weights(opt_state, params)
      {'norm': Array(1., dtype=float32), 'w': Array(0.9999, dtype=float32)}
    """
    _, state = checks.only_one(
        "opt_state",
        opt_state,
        MasterWeightsState,
        "Wrap the optimizer with `with_master_weights`, or pass the state that is meant.",
    )
    return _filled(state.master_weights, params)


def warn_without_masters(params: optax.Params, opt_state: optax.OptState) -> None:
    """Warn of parameters in half precision if `opt_state`, whose init it is, keeps no masters."""
    dtypes = {getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(params)}
    half = sorted(str(dtype) for dtype in dtypes & {jnp.dtype("float16"), jnp.dtype("bfloat16")})
    if half and not any(leaves_of_type(opt_state, MasterWeightsState)):
        least = 4 / max(jnp.finfo(dtype).eps for dtype in half)
        warnings.warn(
            f"`params` are {' and '.join(half)}, and no float32 master weights are kept: an update "
            f"below 1/{least:.0f} of a weight is lost. Wrap `with_master_weights(inner)`, or keep "
            "the parameters in float32 and cast them in the loss function: `compute_dtype`.",
            stacklevel=4,
        )


def _master(param: Any) -> Any:
    if getattr(param, "dtype", None) not in (jnp.float16, jnp.bfloat16):
        return optax.MaskedNode()
    if isinstance(param, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=param.sharding)
    return jnp.asarray(param, jnp.float32)


def _is_missing(master: Any) -> bool:
    return isinstance(master, optax.MaskedNode)


def _filled(masters: PyTree, params: optax.Params) -> optax.Params:
    """Return `params` with masters for those that have one."""
    # MaskedNode stands for a parameter without a master here, and for none at all in `params`.
    given, known = (jax.tree.map(lambda _: 0, t, is_leaf=_is_missing) for t in (params, masters))
    remedy = "Give the parameters that the state was initialized with."
    checks.same_structure("params", given, known, remedy)

    def fill(path: KeyPath, master: Any, param: Any) -> Any:
        if _is_missing(master):
            return param
        checks.same_shape("params", path, param, master, remedy)
        return master

    return jax.tree_util.tree_map_with_path(fill, masters, params, is_leaf=_is_missing)


def _add(master: jax.Array, update: Any) -> jax.Array:
    return jnp.asarray(optax.apply_updates(master, update), jnp.float32)


def _towards(master: jax.Array, param: jax.Array) -> jax.Array:
    """Return the float32 number that makes `param` the rounded master when it is added."""
    rounded = master.astype(param.dtype)
    start = param.astype(jnp.float32)
    is_zero = rounded == 0
    # Of a cast there and straight back, XLA:GPU takes neither (jaxlib 0.10.2, which allows excess
    # precision by default: `xla_allow_excess_precision`). It keeps both with a choice in between.
    nonzero = jnp.where(is_zero, jnp.ones_like(rounded), rounded).astype(jnp.float32)
    end = jnp.where(is_zero, master, nonzero)  # of zero it has the sign
    # Of infinity, the difference is NaN; of -0.0, it is 0.0, which makes 0.0 of it.
    is_there = (rounded == param) & (jnp.signbit(rounded) == jnp.signbit(param))
    is_there &= jnp.isinf(param) | (master == 0)
    return jnp.where(is_there, -jnp.zeros_like(start), end - start)
