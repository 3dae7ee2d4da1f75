"""The extra arguments of `update`: which hold the gradients once more, and which is the loss."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._guard.rules import Function, Rule
from optax_lossscale._support.flags import all_true
from optax_lossscale._support.lines import warn
from optax_lossscale._support.tree import PyTree, is_array, is_inexact


def unscale_copies(
    extra_args: dict[str, Any], scaled: optax.Updates, grads: optax.Updates
) -> dict[str, Any]:
    """Return the extra arguments, with true gradients for those that hold the scaled ones.

    Optax' line searches are called with `grad=grads`. What differs from the scaled gradients in one
    bit is in true units, and stays.
    """
    scaled_leaves, grads_leaves = jax.tree.leaves(scaled), jax.tree.leaves(grads)

    def unscale(name: str, arg: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(arg)
        if name == "value" or len(leaves) != len(scaled_leaves) or not leaves:
            return arg
        pairs = list(zip(leaves, scaled_leaves, strict=True))
        if all(leaf is one for leaf, one in pairs):  # also in the Variables of flax.nnx
            return treedef.unflatten(grads_leaves)
        if treedef != jax.tree.structure(scaled) or not all(_are_alike(*pair) for pair in pairs):
            return arg
        # Two arguments of a jitted function may hold the same numbers.
        are_same = all_true([_have_same_bits(*pair) for pair in pairs if is_inexact(pair[0])])
        choose = lambda true, leaf: jnp.where(are_same, true, leaf.astype(true.dtype))  # noqa: E731
        return jax.tree.map(lambda g, x: choose(g, x) if is_inexact(x) else x, grads, arg)

    return {name: unscale(name, arg) for name, arg in extra_args.items()}


def _are_alike(a: Any, b: Any) -> bool:
    return is_array(a) and is_array(b) and (a.shape, a.dtype) == (b.shape, b.dtype)


def _have_same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    def bits(x: jax.Array) -> list[jax.Array]:
        parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
        kind = f"uint{jnp.finfo(x.dtype).bits}"
        return [jax.lax.bitcast_convert_type(part, kind) for part in parts]

    return all_true([jnp.all(x == y) for x, y in zip(bits(a), bits(b), strict=True)])


def warn_of_loss(rules: tuple[Rule, ...], extra_args: dict[str, Any]) -> bool:
    """Warn of a loss that is not checked: Optax calls it `value`. Return whether it was warned."""
    if "loss" not in extra_args or "value" in extra_args or any(map(_asks_for_loss, rules)):
        return False
    warn(
        "`loss` is an extra argument, and is not checked: a step whose loss is NaN may be applied. "
        "Optax calls the loss `value`: `tx.update(grads, state, params, value=loss)`."
    )
    return True


def _asks_for_loss(rule: Any) -> bool:
    fun = rule.function if isinstance(rule, Function) else rule.measure
    try:
        named = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # of some functions written in C
        named = {}
    return "loss" in named or getattr(rule, "of", None) == "loss"
