"""Float32 master weights for half-precision parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._autocast import refuse_hidden_storage
from optax_lossscale._order import refuse_two_for_parameters
from optax_lossscale._precision import bits
from optax_lossscale._precision.wide_step import step_in_float32
from optax_lossscale._state import MasterWeightsState, StochasticRoundingState, find
from optax_lossscale._support import checks, nnx, tree
from optax_lossscale._support.transformation import Transformation
from optax_lossscale._support.tree import HALF, KeyPath, Leaf, PyTree, Tree


def with_master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps, *, remainders: bool = False
) -> Transformation[MasterWeightsState]:
    """Optimize float32 master copies of float16 and bfloat16 parameters.

    A float16 weight of 1.0 does not change in 1,000 steps of -1e-4: each update is smaller than
    half the distance to the next float16 number, and rounds away. In a float32 master, such updates
    add up. The inner optimizer sees the masters and float32 gradients. After each step, the
    parameters are the rounded masters: `optax.apply_updates(params, updates)` equals
    `master.astype(param.dtype)`. Parameters with other dtypes have no master.

    If a parameter was loaded, averaged or edited since the last step, it no longer equals its
    rounded master. The next step then starts from the parameter.

    It belongs inside a guard and around everything else, so that nothing changes its updates:
    `with_loss_scaling(with_master_weights(optax.chain(...)))`.

    Training differs from float32 in two cases. If one step shrinks a weight to less than 1/8192 of
    its size (1/65536 in bfloat16), but not to zero, adding the float32 update to the parameter does
    not give the rounded master exactly. The next step starts from the parameter, which is off by at
    most 2**-23 of the old weight. And the master of a float16 parameter is clipped to between
    -65504 and 65504, because no update makes an infinite parameter finite again.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      remainders: Whether to store only the lower 16 bits of a bfloat16 parameter's master, in two
        bytes instead of four. The parameter holds the rest, and both together are the exact master.
        Parameters are then rounded to nearest with ties away from zero, not to even. If a parameter
        is replaced, its old lower bits are kept.

    Returns:
      A gradient transformation whose `update` needs `params`, and whose state is a
      `MasterWeightsState`.

    Raises:
      TypeError: If `inner` is not an optimizer, or `remainders` is not a bool. From `update`, if
        `state` is not a `MasterWeightsState`, or a parameter with a master is no longer in half
        precision.
      ValueError: From `init`, if `inner` rounds parameters stochastically. From `update`, without
        `params`, inside `autocast`, or if their structure or shapes differ from the ones that
        `init` was given, or a parameter in half precision has no master.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
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
      Remainders: `store_param_remainders` of Apex' `DistributedFusedAdam`, and Megatron-LM.
    """
    inner = checks.read_optimizer("inner", inner)
    remainders = checks.read_bool("remainders", remainders)

    def init_fn(params: optax.Params) -> MasterWeightsState:
        inner_state = inner.init(tree.in_float32(params, *HALF))
        refuse_two_for_parameters(inner_state, StochasticRoundingState)
        return MasterWeightsState(_initial_masters(params, remainders), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        refuse_hidden_storage("with_master_weights")
        masters, inner_state = checks.read_state(state, MasterWeightsState)
        checks.require_given(updates, params)
        stored, (old, params_def) = _masters_by_position(masters, params), jax.tree.flatten(params)
        for i, (path, param) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
            if tree.is_in(param, *HALF) and i not in stored:
                raise ValueError(_of_other_dtype(path, param, "no master"))
        weights = {i: _current_master(old[i], master) for i, master in stored.items()}
        moves, new, inner_state = step_in_float32(
            inner, updates, inner_state, params, weights=weights, extra_args=extra_args
        )
        for i, master in stored.items():
            is_remainder = master.dtype == jnp.int16
            move = _move_remainder if is_remainder else _move_master
            stored[i], moves[i] = move(new[i], old[i])
        masters = jax.tree.structure(masters).unflatten(stored.values())
        return params_def.unflatten(moves), MasterWeightsState(masters, inner_state)

    return Transformation(init_fn, update_fn)


def master_weights(opt_state: PyTree, params: Tree) -> Tree:
    """Return the parameters in full precision, to evaluate or export them.

    Args:
      opt_state: A `MasterWeightsState`, or an optimizer's state that holds exactly one.
      params: The current parameters, in any container: the one used in training, the state of a
        `flax.nnx` model, or the model itself. It may hold other arrays besides.

    Returns:
      `params`, with the float32 master in place of each parameter that has one. The next step
      starts from these values.

    Raises:
      TypeError: If a parameter or its master has an unexpected dtype.
      ValueError: If `opt_state` holds no `MasterWeightsState`, several, or one that was initialized
        with other parameters.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(ols.with_master_weights(optax.sgd(1e-4)), 8)
      >>> params = {"w": jnp.float16(1), "norm": jnp.float32(1)}
      >>> opt_state = tx.init(params)
      >>> loss_fn = lambda params: params["w"].astype(jnp.float32) + params["norm"]
      >>> grads = ols.grad(loss_fn)(opt_state, params)
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> ols.master_weights(opt_state, optax.apply_updates(params, updates))
      {'norm': Array(0.9999, dtype=float32), 'w': Array(0.9999, dtype=float32)}
    """
    if nnx.is_nnx(params, "Module"):  # it may contain one Variable twice, and its state does not
        return nnx.with_state(params, functools.partial(master_weights, opt_state))
    masters = find(MasterWeightsState, "opt_state", opt_state).master_weights
    if tree.has_fp8_metadata(params) and not tree.has_fp8_metadata(masters):
        # Flax's TrainState passes only the trained parameters to its optimizer.
        variables: Any = params
        trained = master_weights(opt_state, variables["params"])
        return type(variables)({**variables, "params": trained})
    leaves, treedef = jax.tree.flatten(params)
    for i, master in _masters_by_position(masters, params).items():
        leaves[i] = _current_master(leaves[i], master)
    return treedef.unflatten(leaves)


def _initial_masters(params: PyTree, remainders: bool) -> PyTree:
    """Return the masters of parameters before the first step."""

    def master(param: Leaf) -> PyTree:
        if nnx.is_nnx(param, "Variable"):
            masters = jax.tree.map(master, param, is_leaf=lambda node: node is not param)
            # Code that reads `variable.value`, as flax.nnx does, fails for one without an array.
            return masters if jax.tree.leaves(masters) else optax.MaskedNode()
        if not tree.is_in(param, *HALF):
            return optax.MaskedNode()
        if remainders and param.dtype == jnp.bfloat16:
            is_array = not isinstance(param, jax.ShapeDtypeStruct)
            return tree.in_dtype(jnp.zeros_like(param) if is_array else param, jnp.int16)
        return tree.in_dtype(param, jnp.float32)

    return jax.tree.map(master, params, is_leaf=lambda node: nnx.is_nnx(node, "Variable"))


def _masters_by_position(masters: PyTree, params: PyTree) -> dict[int, jax.Array]:
    """Return each master by the position of its parameter. Raise if that is missing or differs."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    # Sometimes only the parameters or only the masters are in Variables.
    positions = {nnx.plain_keys(path): i for i, (path, _) in enumerate(leaves)}
    found: dict[int, jax.Array] = {}
    for path, master in jax.tree_util.tree_leaves_with_path(masters):
        position = positions.get(nnx.plain_keys(path))
        if position is None:
            raise _of_others(path)
        where, param = leaves[position]
        checks.require_same_shape("params", where, param, master, _INITIALIZED)
        if (param.dtype.name, master.dtype.name) not in _STORED:
            is_remainder = master.dtype == jnp.int16
            held = "an int16 remainder of bfloat16" if is_remainder else f"a {master.dtype} master"
            raise TypeError(_of_other_dtype(where, param, held))
        found[position] = master
    return found


def _of_others(path: KeyPath) -> ValueError:
    where = tree.path_name(path)
    return ValueError(f"`params` must keep its structure, got another at {where}. {_INITIALIZED}")


def _of_other_dtype(path: KeyPath, param: Leaf, held: str) -> str:
    return (
        f"`params` must keep the dtypes that the state was initialized with, got {param.dtype} at "
        f"{tree.path_name(path)}, where the state holds {held}. Code that adds updates without a "
        "cast, such as `eqx.apply_updates`, makes bfloat16 parameters float32: use "
        f"`optax.apply_updates`. {_INITIALIZED}"
    )


def _current_master(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Return the master weight, or the parameter if it was replaced since the last step."""
    if stored.dtype == jnp.int16:
        return bits.join(param, stored)
    # Compare bits. If this compared numbers, XLA:GPU would remove the cast to half precision and
    # back (jaxlib 0.10.2, by its default `xla_allow_excess_precision`), and XLA:CPU would write
    # both sides to memory in float32.
    rounded = stored.astype(param.dtype)
    are_zeros = bits.is_zero(rounded) & bits.is_zero(param)
    is_its_own = (bits.of(rounded) == bits.of(param)) | are_zeros
    return jnp.where(is_its_own, stored, param.astype(jnp.float32))


def _move_remainder(new: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the remainder of a new master weight, and the update of `param` to its upper half."""
    word = jax.lax.bitcast_convert_type(new, jnp.int32)
    remainder = jnp.where(jnp.isnan(new), 0, word).astype(jnp.int16)  # NaN must stay NaN
    # Subtract instead of masking `word`. With a mask, a step of AdamW reads and writes 38 bytes per
    # parameter on a TPU v5e instead of 26, in 1.56 times the estimated cycles (libtpu 0.0.42.1).
    upper = jax.lax.bitcast_convert_type(word - remainder.astype(jnp.int32), jnp.float32)
    rounded = bits.with_derivative_of(new, upper)
    return remainder, _update_to(new, rounded, rounded == 0, param)


def _move_master(new: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the master weight to keep, and the update of `param` to its rounded value."""
    if param.dtype == jnp.float16:  # adding an update to infinity cannot make it finite
        largest = jnp.finfo(jnp.float16).max.astype(jnp.float32)
        new = jnp.where(jax.lax.is_finite(new), jax.lax.clamp(-largest, new, largest), new)
    half = new.astype(param.dtype)
    # A `where` between the casts stops XLA:GPU from removing both (see `_current_master`).
    rounds_to_zero = bits.is_zero(half)
    rounded = jnp.where(rounds_to_zero, jnp.ones_like(half), half).astype(jnp.float32)
    return new, _update_to(new, rounded, rounds_to_zero, param)


def _update_to(
    new: jax.Array, rounded: jax.Array, rounds_to_zero: jax.Array, param: jax.Array
) -> jax.Array:
    """Return the update that makes `param` equal to `rounded`, including the sign of zero.

    ============  ========================  =====================================================
    rounded       param                     update
    ============  ========================  =====================================================
    not zero      finite                    `rounded - param`
    zero          zero of the same sign     `-0.0`: no change
    zero          any other finite number   `new - param`: the sum rounds to zero, signed as `new`
    any           infinite or NaN           `-0.0`: no update makes it finite
    ============  ========================  =====================================================
    """
    old = param.astype(jnp.float32)
    target = jnp.where(rounds_to_zero, new, rounded)
    is_same_zero = rounds_to_zero & bits.is_zero(param) & (jnp.signbit(new) == jnp.signbit(old))
    is_unchanged = is_same_zero | ~jax.lax.is_finite(old)
    return jnp.where(is_unchanged, jnp.full_like(old, -0.0), target - old)


# The dtypes of a parameter and of its master.
_STORED = {("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "int16")}
_INITIALIZED = "Give the `params` that the state was initialized with."
