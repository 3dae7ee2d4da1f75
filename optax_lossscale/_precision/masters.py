"""Float32 master weights of parameters in half precision."""

import collections
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._precision import halves
from optax_lossscale._support import checks
from optax_lossscale._support.nnx import is_nnx
from optax_lossscale._support.tree import (
    KeyPath,
    PyTree,
    Tree,
    at_least_float32,
    children,
    has_fp8_metadata,
    path_name,
    subtrees,
)


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      master_weights: A tree like the parameters: `float32` arrays for those in float16 and
        bfloat16, with `remainders=True` `int16` arrays for those in bfloat16, and
        `optax.MaskedNode()` for all others.
      inner_state: The inner optimizer's state, as it would be for float32 parameters.
    """

    master_weights: PyTree
    inner_state: optax.OptState


MasterWeightsState.__module__ = "optax_lossscale"  # as pickles name it


def with_master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps, *, remainders: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Keep float32 masters of float16 and bfloat16 parameters, and optimize those.

    An update below half the distance between two float16 numbers is lost: 1000 steps of -1e-4 leave
    a float16 weight of 1.0 where it is. With masters it adds up. The inner optimizer sees float32
    masters and float32 gradients, and after each step the parameters are the masters, rounded:
    `optax.apply_updates(params, updates)` is `master.astype(param.dtype)`. Others have no master.

    The masters follow the parameters. Where a parameter is not its rounded master, since it was
    loaded, averaged or edited after the last step, the step starts from the parameter.

    It belongs inside of a guard, and around all else, so that nothing changes its updates:
    `with_loss_scaling(with_master_weights(optax.chain(...)))`.

    Two cases differ from float32. If one step shrinks a weight to under 1/8192 of its size (1/65536
    in bfloat16), but not to zero, one float32 addition cannot reach it: the master takes what the
    parameter became, off by at most 2**-23 of the old weight. And the master of a float16 parameter
    stays within plus and minus 65504, since no addition leads back from infinity.

    Args:
      inner: Any Optax optimizer, or an `optax.MultiSteps`.
      remainders: Whether to keep only the lower half of a bfloat16 parameter's master, in two bytes
        for four. The parameter is the upper half: a bfloat16 number is a float32 without its last
        sixteen bits. Together they are the same master, bit for bit, rounded to the nearest, ties
        away from zero. A parameter that was replaced keeps the lower half that was there.

    Returns:
      A gradient transformation whose `update` needs `params`, and whose state is a
      `MasterWeightsState`.

    Raises:
      TypeError: If an argument is of the wrong type, the state that `update` is given included.
      ValueError: From `update`, without `params`, or with others than those that `init` was given.

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
    inner = checks.transformation("inner", inner)
    remainders = checks.boolean("remainders", remainders)

    def master(param: Any) -> Any:
        wide = halves.widened(param)
        if wide is param:
            return optax.MaskedNode()
        if remainders and param.dtype == jnp.bfloat16:
            is_array = not isinstance(param, jax.ShapeDtypeStruct)
            return halves.in_dtype(jnp.zeros_like(param) if is_array else param, jnp.int16)
        return wide

    def init_fn(params: optax.Params) -> MasterWeightsState:
        masters = jax.tree.map(master, params)
        return MasterWeightsState(masters, inner.init(jax.tree.map(halves.widened, params)))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterWeightsState]:
        masters, inner_state = checks.expect_state(state, MasterWeightsState)
        for name, given in (("updates", updates), ("params", params)):
            if given is None:
                raise ValueError(f"`{name}` must be given: `update(grads, state, params)`.")
        numbers, weights = _weights(masters, params)
        kept, masters_def = jax.tree.flatten(masters, is_leaf=_is_missing)
        old, params_def = jax.tree.flatten(params)
        grads = jax.tree.map(at_least_float32, updates)
        updates, inner_state = inner.update(
            grads, inner_state, params_def.unflatten(weights), **extra_args
        )
        moves = params_def.flatten_up_to(updates)
        for i, number in enumerate(numbers):
            if number is not None:
                new = jnp.asarray(optax.apply_updates(weights[i], moves[i]), jnp.float32)
                has_remainder = kept[number].dtype == jnp.int16
                move = halves.move_remainder if has_remainder else halves.move_master
                kept[number], moves[i] = move(new, old[i])
        state = MasterWeightsState(masters_def.unflatten(kept), inner_state)
        return params_def.unflatten(moves), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def master_weights(opt_state: PyTree, params: Tree) -> Tree:
    """Return the parameters in full precision, to evaluate or export them.

    Args:
      opt_state: A `MasterWeightsState`, or an optimizer's state that holds exactly one.
      params: The parameters that it belongs to, in any container: as in training, the state of a
        `flax.nnx` model, or the model itself. It may hold other arrays, too.

    Returns:
      `params`, with the float32 master of each leaf that has one: from where the next step starts.

    Raises:
      TypeError: If a master, or the parameter that it belongs to, is of another dtype.
      ValueError: If `opt_state` holds no `MasterWeightsState`, or several, or one of others.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.with_loss_scaling(ols.with_master_weights(optax.sgd(1e-4)), 8)
      >>> params = {"w": jnp.float16(1), "norm": jnp.float32(1)}
      >>> opt_state = tx.init(params)
      >>> grads = {"w": jnp.float16(8), "norm": jnp.float32(8)}
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> ols.master_weights(opt_state, optax.apply_updates(params, updates))
      {'norm': Array(0.9999, dtype=float32), 'w': Array(0.9999, dtype=float32)}
    """
    if is_nnx(params, "Module"):  # of which a Variable may occur twice
        nnx: Any = sys.modules["flax.nnx"]
        graph, arrays = nnx.split(params)
        return nnx.merge(graph, master_weights(opt_state, arrays))
    remedy = "Wrap the optimizer with `with_master_weights`, or pass the state that is meant."
    state = checks.only_one("opt_state", opt_state, MasterWeightsState, remedy)
    if has_fp8_metadata(params) and not has_fp8_metadata(state.master_weights):
        # Flax's TrainState shows its optimizer the parameters alone.
        variables: Any = params
        trained = master_weights(opt_state, variables["params"])
        return type(variables)({**variables, "params": trained})
    _, weights = _weights(state.master_weights, params, others=True)
    return jax.tree.structure(params).unflatten(weights)


def warn_without_masters(params: optax.Params, opt_state: optax.OptState) -> None:
    """Warn of parameters in half precision if `opt_state`, whose init it is, keeps no masters."""
    dtypes = {getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(params)}
    half = sorted(str(dtype) for dtype in dtypes.intersection(halves.HALF))
    if half and not any(subtrees(opt_state, MasterWeightsState)):
        least = 4 / max(jnp.finfo(dtype).eps for dtype in half)
        checks.warn(
            f"`params` are {' and '.join(half)}, and no float32 master weights are kept: an update "
            f"below 1/{least:.0f} of a weight is lost. Wrap `with_master_weights(inner)`, or keep "
            "the parameters in float32 and differentiate `autocast(loss_fn, dtype)`."
        )


def refuse_changed_updates(inner_state: optax.OptState) -> None:
    """Refuse masters around which stands more than is known to hand their updates through."""
    for path, _ in subtrees(inner_state, MasterWeightsState):
        around, node = None, inner_state
        for key in path:
            found = {own: child for (own,), child in children(node)[0]}
            is_chain = type(node) in (tuple, collections.OrderedDict)  # of `named_chain`
            is_group = isinstance(around, optax.MultiTransformState)  # a dict of states by label
            is_last = is_chain and key == [*found][-1]
            if not (is_last or is_group or isinstance(node, _HAND_THROUGH)):
                raise ValueError(
                    "`inner` must leave the updates of `with_master_weights` as they are, got a "
                    f"MasterWeightsState at {path_name(path)} inside of a {type(node).__name__}. "
                    "Wrap all of it, decay and averages too: `with_master_weights(inner)`."
                )
            around, node = node, found[key]


_HAND_THROUGH = (
    *(optax.MaskedState, optax.MultiTransformState, optax.MultiStepsState),
    *(optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState),
)


def _is_missing(master: Any) -> bool:
    return isinstance(master, optax.MaskedNode)


def _weights(
    masters: PyTree, params: PyTree, *, others: bool = False
) -> tuple[list[int | None], list[Any]]:
    """Return for each leaf of `params` the number of its master, or None, and where a step starts.

    A `MaskedNode` among the masters says that one parameter has none, or all below. With `others`,
    `params` may hold arrays of which `masters` does not know.
    """
    kept = jax.tree_util.tree_leaves_with_path(masters, is_leaf=_is_missing)
    missing = {_names(path) for path, master in kept if _is_missing(master)}
    places = {_names(path): i for i, (path, master) in enumerate(kept) if not _is_missing(master)}
    numbers: list[int | None] = []
    weights: list[Any] = []
    strangers: list[KeyPath] = []
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        names = _names(path)
        number = places.pop(names, None)
        above = (names[:end] for end in range(len(names) + 1))
        if number is None and not (others or any(each in missing for each in above)):
            strangers.append(path)
        weight = param
        if number is not None:
            master = kept[number][1]
            checks.same_shape("params", path, param, master, _INITIALIZED)
            if (param.dtype.name, master.dtype.name) not in _STORED:
                raise TypeError(
                    "`opt_state` must hold float32 masters, or int16 remainders of bfloat16, got "
                    f"{master.dtype} for {param.dtype} at {path_name(path)}. {_INITIALIZED}"
                )
            weight = halves.start(param, master)
        numbers.append(number)
        weights.append(weight)
    for path in [*strangers, *(kept[number][0] for number in places.values())]:
        message = f"`params` must keep its structure, got another at {path_name(path)}."
        raise ValueError(f"{message} {_INITIALIZED}")
    return numbers, weights


def _names(path: KeyPath) -> tuple[Any, ...]:
    """Return the keys of a path, in any container.

    The array in an `nnx.Variable` is at `.value`, in the parameters or in the masters: a last key
    of this name is left out everywhere, which makes no two leaves the same.
    """
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path]
    return tuple(keys[:-1] if keys[-1:] == ["value"] else keys)


# The dtypes of a parameter and of its master.
_STORED = {("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "int16")}
_INITIALIZED = "Give the parameters that the state was initialized with."
