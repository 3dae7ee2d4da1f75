"""Find the operation that makes the first NaN or infinity."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from optax_lossscale._support import checks
from optax_lossscale._support.jaxprs import trace
from optax_lossscale._support.tree import KeyPath, PyTree, is_array
from optax_lossscale.diagnostics.first_search import Search
from optax_lossscale.diagnostics.first_values import FirstNonfinite

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def first_nonfinite(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> FirstNonfinite | None:
    """Find the operation that makes the first NaN or infinity: which layer overflowed?

    `fun` is traced, and run on the host operation by operation in the order of the program. Of the
    operations that turn finite numbers into NaN or infinity, the earliest whose result reaches the
    output is returned. What does not reach the output is harmless: `x / (1 + exp(-x))` is right
    where `exp` overflows. Its derivative is not, so if the loss is finite and the gradients are
    not, search `jax.grad(loss_fn)`.

    Infinities that are written into the code (`jnp.where(mask, scores, -jnp.inf)`), and negative
    ones in the arguments, are taken as meant. An operation that makes NaN of them is returned.

    This is much slower than a compiled call: use it after training has failed. Each operation is
    rounded to its own dtype. A compiled function may keep more digits in between, and overflow
    later. Calls, `jax.checkpoint`, `jax.lax.cond` and `jax.lax.scan` are followed; other operations
    that hold a function, `jax.lax.while_loop` for one, are returned as a whole.

    Args:
      fun: The function: the loss, the model, or a gradient function for the backward pass. Any
        framework's; hand the parameters or the module in as an argument, because layers are named
        after the arguments' key paths.
      *args: The arguments of `fun`, any pytrees. Arrays are traced, and every other leaf is handed
        on as it is.
      **kwargs: Its keyword arguments, likewise.

    Returns:
      What made the first NaN or infinity, or None if the outputs are finite. If an argument holds
      NaN or positive infinity that reaches the output, that argument.

    Raises:
      TypeError: If an argument is traced: call it outside of `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> params = {"energy": jnp.full((2, 2), 300.0), "head": jnp.ones((2, 1))}
      >>> def loss_fn(params, x):
      ...     energy = (x @ params["energy"]).astype(jnp.float16) ** 2
      ...     return jnp.mean(energy.astype(jnp.float32) @ params["head"])
      >>> found = ols.diagnostics.first_nonfinite(loss_fn, params, jnp.ones((4, 2)))
      >>> found.layer, found.operation, found.inf
      ("params['energy']", 'integer_pow', 8)
    """
    named = _by_name(fun, args, kwargs)
    arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
    checks.concrete(
        "args", arrays, "Call `first_nonfinite` outside of `jax.jit`; `fun` itself may be jitted."
    )
    # NaN is what is looked for, and the user's own guards against it would stop the search.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        closed, arrays = trace(fun, *args, **kwargs)
        return Search(named).run_all(closed, arrays)


def _by_name(
    fun: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, KeyPath]]:
    """Return the argument and the key path within it of each array, in the order of the tree."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a built-in
        parameters = ()
    names = [p.name for p in parameters if p.kind in _POSITIONAL]
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    roots = [*zip(names, args, strict=False), *kwargs.items()]
    # Keyword arguments are leaves in alphabetical order, as JAX flattens dicts.
    roots[len(args) :] = sorted(roots[len(args) :])
    return [
        (name, path)
        for name, tree in roots
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_array(leaf)
    ]
