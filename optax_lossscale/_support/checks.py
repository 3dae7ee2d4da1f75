"""Checks of arguments. Each one raises an error where silence would corrupt or mislead.

`require_…` returns nothing. `read_…` returns the value in the form that the caller uses.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from optax_lossscale._support.bounds import INT32_MAX, LARGEST_SCALE, SMALLEST_SCALE, as_float32
from optax_lossscale._support.tree import (
    ARRAYS,
    HALF,
    Array,
    AxisName,
    KeyPath,
    Leaf,
    PyTree,
    Tree,
    first_difference,
    path_name,
    shown,
)


def read_number(name: str, value: object) -> float:
    """Return `value` as a Python float that is finite in float32."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a Python number, got {shown(value)}.")
    try:
        number = float(value)
    except OverflowError:  # an int or a Fraction beyond float64
        number = math.inf
    if not math.isfinite(as_float32(number)):
        raise ValueError(f"`{name}` must be finite in float32, got {value}.")
    return number


def read_scale(name: str, value: object) -> float:
    """Return `value` as a Python float within the bounds of a loss scale."""
    number = read_number(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"`{name}` must be between 2**-126 and 2**126, got {value}. Use a power of two, such "
            "as 2**15."
        )
    return number


def read_positive(name: str, value: object) -> float:
    """Return `value` as a positive Python float."""
    number = read_number(name, value)
    if number <= 0:
        raise ValueError(f"`{name}` must be positive, got {value}.")
    return number


def read_bool(name: str, value: object) -> bool:
    """Return `value` as a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        what = "the string " if isinstance(value, str) else ""
        raise TypeError(f"`{name}` must be True or False, got {what}{shown(value)}.")
    return bool(value)


def read_count(name: str, value: object, *, least: int = 1) -> int:
    """Return `value` as an int that fits an int32."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {shown(value)}.")
    if not least <= int(value) <= INT32_MAX:
        raise ValueError(f"`{name}` must be an integer from {least} to 2**31 - 1, got {value}.")
    return int(value)


def read_flag(name: str, value: ArrayLike) -> jax.Array:
    """Return `value` as a `bool[]` array."""
    if not (isinstance(value, bool) or (isinstance(value, ARRAYS) and value.dtype == jnp.bool_)):
        raise TypeError(
            f"`{name}` must be a bool or a boolean array, got {shown(value)}. Compute it with "
            "`all_finite`, `unscale_and_check` or a comparison."
        )
    array = jnp.asarray(value)
    require_scalar(name, array, "Reduce it with `jnp.all`, or map over it with `jax.vmap`.")
    return array


def require_numbers(value: PyTree) -> None:
    """Raise if the loss `value` contains anything but numbers, which would count as finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        is_number = isinstance(leaf, ARRAYS) and jnp.issubdtype(leaf.dtype, np.number)
        if not (is_number or isinstance(leaf, (bool, int, float, complex))):
            raise TypeError(
                f"`value` must be a number, an array or a tree of them, got {shown(leaf)} at "
                f"{path_name(path)}. Pass the loss that `value_and_grad` returns."
            )


def require_function(name: str, value: object, remedy: str) -> None:
    """Raise if `value` cannot be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function, got {shown(value)}. {remedy}")


def require_keep(value: object) -> None:
    """Raise if `keep` is neither a function nor None."""
    if value is not None:
        require_function("keep", value, 'For example `lambda path: "norm" in path`.')


def read_strings(name: str, values: Any) -> tuple[str, ...]:
    """Return the strings of an iterable, which is not a string itself."""
    is_iterable = isinstance(values, Iterable) and not isinstance(values, str)
    strings = (*values,) if is_iterable else (None,)
    if not all(isinstance(each, str) for each in strings):
        raise TypeError(
            f"`{name}` must be an iterable of lines, such as `precision_search(...).keep`, got "
            f"{shown(values)}."
        )
    return strings


def require_extra_args(rule: Callable[..., object], *args: PyTree, **extra_args: PyTree) -> None:
    """Raise if a rule does not take the extra arguments that `update` was given."""
    try:
        inspect.signature(rule).bind(*args, **extra_args)
    except TypeError as error:
        raise TypeError(
            f"`skip_if` must take the extra arguments of `update`: {error}. Write `def rule(grads, "
            "params, *, value, **extra_args)`, and pass `update` the ones that it names."
        ) from error
    except ValueError:  # a function written in C has no signature
        pass


def read_argnums(argnums: Any) -> tuple[int, ...]:
    """Return the positions in `argnums`, a number or a sequence of them."""
    is_several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    positions: tuple[Any, ...] = (*argnums,) if is_several else (argnums,)
    for number in positions:
        if not isinstance(number, numbers.Integral):
            raise TypeError(
                f"`argnums` must be an integer or a tuple of them, got {shown(number)}. Count from "
                "the first argument of `fun`."
            )
    return positions


def require_pair(result: object) -> None:
    """Raise if a loss function with `has_aux=True` did not return a pair."""
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise TypeError(
            f"`fun` must return a pair with `has_aux=True`, got {shown(result)}. Return the loss "
            "and the aux, or leave `has_aux` out."
        )


def require_no_functions(args: Sequence[PyTree], positions: Sequence[int]) -> None:
    """Raise if arguments that JAX differentiates contain functions, as Equinox modules do."""
    chosen = [args[number] for number in positions if -len(args) <= number < len(args)]
    functions = [leaf for leaf in jax.tree.leaves(chosen) if callable(leaf)]
    if functions:
        raise TypeError(
            "`transform` must be one that ignores functions in the parameters, got "
            f"`jax.value_and_grad` for parameters with {shown(functions[0])}. For an Equinox "
            "module, pass `transform=equinox.filter_value_and_grad`."
        )


def require_wide(arg: Array) -> None:
    """Raise if an argument that is differentiated has fewer exponents than float32."""
    if jnp.finfo(arg.dtype).minexp > jnp.finfo(jnp.float32).minexp:
        raise ValueError(
            f"`fun` must not be differentiated with respect to {arg.dtype} arguments, got "
            f"{shown(arg)}. Their gradients would underflow when `scale_inside` divides them. "
            "Store them in float32 or bfloat16."
        )


def require_scalar(name: str, value: PyTree, remedy: str) -> None:
    """Raise if `value` is not one real number or flag: an array with axes, a container, text."""
    if not jax.tree_util.all_leaves([value]):
        raise TypeError(f"`{name}` must be a scalar, got a {type(value).__name__}. {remedy}")
    if np.shape(value):
        raise ValueError(f"`{name}` must be a scalar, got shape {np.shape(value)}. {remedy}")
    is_number = isinstance(value, (*ARRAYS, numbers.Real, jax.ShapeDtypeStruct))
    if not (is_number or hasattr(value, "__jax_array__")) or jnp.iscomplexobj(value):
        raise TypeError(
            f"`{name}` must be a Python number or a real array, got {shown(value)}. {remedy}"
        )


def require_given(updates: PyTree, params: PyTree) -> None:
    """Raise if the updates or the parameters are left out."""
    for name, given in (("updates", updates), ("params", params)):
        if given is None:
            raise ValueError(f"`{name}` must be given: `update(grads, state, params)`.")


def require_same_structure(name: str, tree: PyTree, expected: PyTree, remedy: str) -> None:
    """Raise if a tree differs in structure or shapes, and name the first difference."""
    if jax.tree.structure(tree) != jax.tree.structure(expected):
        path, *nodes = first_difference(tree, expected)
        got, wanted = (type(node).__name__ for node in nodes)
        types = f" (a {got} for a {wanted})" if got != wanted else ""
        raise ValueError(
            f"`{name}` must keep its structure, got another at {path_name(path)}{types}. {remedy}"
        )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(expected), strict=True):
        require_same_shape(name, path, leaf, other, remedy)


def differing_structures(updates: PyTree, params: PyTree) -> ValueError:
    """Return the error that names the path at which updates and parameters differ."""
    path = path_name(first_difference(updates, params)[0])
    return ValueError(f"`updates` and `params` differ in structure at {path}.")


def require_same_shape(name: str, path: KeyPath, leaf: Leaf, expected: Leaf, remedy: str) -> None:
    """Raise if a leaf has another shape, since it would be broadcast."""
    got, wanted = (getattr(x, "shape", ()) for x in (leaf, expected))
    if got != wanted:
        raise ValueError(
            f"`{name}` must keep its shapes, got {got} for {wanted} at {path_name(path)}. {remedy}"
        )


def require_same(path: KeyPath, new: Leaf, old: Leaf) -> None:
    """Raise if a leaf that is not an array changes, since `jnp.where` cannot select it."""
    if not (new is old or (type(new) is type(old) and np.all(new == old))):
        raise ValueError(
            f"the leaf at {path_name(path)} must be an array in both trees or the same in both, "
            f"got {shown(new)} and {shown(old)}. Make it an array with `jnp.asarray` if it changes."
        )


_INIT = (
    "Make it with `init`; a plain optimizer's state goes into its `inner_state`. The order is "
    "`update(grads, state, params)`."
)


def read_state(state: object, kind: type[Tree], name: str = "state", remedy: str = _INIT) -> Tree:
    """Return `state` if it has the type `kind`."""
    if not isinstance(state, kind):
        raise TypeError(f"`{name}` must be a {kind.__name__}, got {type(state).__name__}. {remedy}")
    return state


def require_rule_states(rule_states: object, rules: Sequence[object]) -> None:
    """Raise unless there is a tuple with a state for each rule."""
    if type(rule_states) is not tuple or len(rule_states) != len(rules):
        raise ValueError(
            f"`state.rule_states` must be a tuple with the state of each of {len(rules)} rules, "
            f"got {shown(rule_states)}. After a change of the rules, write "
            "`state._replace(rule_states=(rule.init(params),))`."
        )


def require_values(name: str, tree: PyTree, remedy: str) -> None:
    """Raise if a tree contains traced or abstract arrays."""
    leaves = jax.tree.leaves(tree)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise TypeError(f"`{name}` must hold values, got traced arrays. {remedy}")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TypeError(f"`{name}` must hold values, got abstract arrays, as of `jax.eval_shape`.")


def require_axis_name(axis_name: AxisName | None) -> None:
    """Raise if `axis_name` cannot name axes."""
    try:
        names = {*axis_name} if isinstance(axis_name, tuple) else {axis_name}
    except TypeError:  # a value that cannot be hashed cannot be a name either
        names = {0}
    # JAX would take an integer as an axis of the array.
    if any(isinstance(name, numbers.Integral) for name in names):
        raise TypeError(
            "`axis_name` must be the name of a mapped axis or a tuple of them, got "
            f"{shown(axis_name)}. Pass the one that `jax.shard_map` or `jax.vmap` maps over."
        )


def read_float_dtype(dtype: DTypeLike | None, *, most_bits: int = 64) -> np.dtype:
    """Return a floating-point dtype of at most `most_bits`."""
    read = _dtype_of(dtype)
    if read is None or not jnp.issubdtype(read, jnp.floating) or jnp.finfo(read).bits > most_bits:
        raise TypeError(
            f"`dtype` must be a floating-point dtype of at most {most_bits} bits, got "
            f"{shown(dtype)}. Use `jnp.float16` or `jnp.bfloat16`."
        )
    return read


def _dtype_of(dtype: DTypeLike | None) -> np.dtype | None:
    """Return a dtype, or None if it is not one. NumPy would read None as float64."""
    try:
        return None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError):  # not the name of a dtype
        return None


def read_half_or_float32(dtype: DTypeLike | None) -> np.dtype:
    """Return a dtype that matrix products can run in: float16, bfloat16 or float32."""
    read = read_float_dtype(dtype)
    if read not in (jnp.float16, jnp.bfloat16, jnp.float32):
        remedy = "Use `jnp.float16` or `jnp.bfloat16`."
        if jnp.finfo(read).bits < 16:
            remedy = (
                "fp8 needs a scale for each array: use Qwix or Flax's `Fp8DirectDotGeneralOp` "
                "inside `autocast(loss_fn, jnp.bfloat16)`, as docs/flax.md#fp8-layers shows."
            )
        raise TypeError(
            f"`dtype` must be float16, bfloat16 or float32, got {shown(dtype)}. {remedy}"
        )
    return read


def read_half(dtype: DTypeLike | None) -> np.dtype:
    """Return a half-precision dtype."""
    read = read_half_or_float32(dtype)
    if read == jnp.float32:
        raise TypeError(f"`dtype` must be float16 or bfloat16, got {shown(dtype)}.")
    return read


def read_checkpoint_dtype(checkpoint_dtype: DTypeLike | None, dtype: np.dtype) -> np.dtype | None:
    """Return the dtype in which `autocast` to `dtype` saves inputs of layers, None if unchanged."""
    if checkpoint_dtype is None:
        return None
    read = _dtype_of(checkpoint_dtype)
    if read not in HALF:
        raise TypeError(
            "`checkpoint_dtype` must be float16, bfloat16 or None, got "
            f"{shown(checkpoint_dtype)}. Use `jnp.bfloat16`."
        )
    if read == jnp.float16 and dtype == jnp.bfloat16:
        raise ValueError(
            "`checkpoint_dtype` must not be float16 if `dtype` is bfloat16: numbers above 65,504 "
            "would be infinite in the backward pass. Use `jnp.bfloat16`."
        )
    return None if dtype == jnp.float32 else read  # no product runs in half precision


def require_policy(value: object) -> None:
    """Raise if `policy` is a number, since it might be meant as the current loss scale."""
    is_named = value is None or isinstance(value, Mapping) or str(value) == "dynamic"
    if not is_named and (isinstance(value, type) or not hasattr(value, "skip_nonfinite")):
        raise (ValueError if isinstance(value, str) else TypeError)(
            f'`policy` must be a policy, "dynamic" or a dict from `get_config`, got '
            f"{shown(value)}. For a fixed loss scale x, write `FixedLossScale(x)`."
        )


def read_optimizer(
    name: str, optimizer: optax.GradientTransformation | optax.MultiSteps
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that takes extra arguments."""
    if isinstance(optimizer, optax.MultiSteps):
        # `gradient_transformation()` drops the extra arguments (Optax 0.2.8).
        update: Any = optimizer.update
        return optax.GradientTransformationExtraArgs(optimizer.init, update)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"`{name}` must be an optax.GradientTransformation or an optax.MultiSteps, got "
            f"{shown(optimizer)}. Call the optimizer's factory first, as in `optax.adam(1e-3)`."
        )
    return optax.with_extra_args_support(optimizer)
