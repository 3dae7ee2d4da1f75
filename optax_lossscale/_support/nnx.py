"""All knowledge of `flax.nnx`, which the library never imports by itself."""

import sys
from collections.abc import Callable
from typing import Any

import jax


def is_nnx(node: Any, *classes: str) -> bool:
    """Return whether `node` is an object of one of these classes of `flax.nnx`."""
    nnx = sys.modules.get("flax.nnx")  # there is no such object before it is imported
    return nnx is not None and isinstance(node, tuple(getattr(nnx, name) for name in classes))


def holds_objects(tree: Any) -> bool:
    """Return whether there are modules, variables, random streams or other objects in a tree."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))


def _is_object(node: Any) -> bool:
    nnx = sys.modules["flax.nnx"]
    base = "Pytree" if hasattr(nnx, "Pytree") else "Object"  # its name before Flax 0.12
    return is_nnx(node, base, "Variable")


def on_arrays(
    transform: Callable[[Callable[..., Any]], Callable[..., Any]], fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `transform(fun)` for a transform that knows arrays alone.

    Changes that `fun` makes to the objects among its arguments are written back, as by `nnx.jit`.
    """
    # Flax's transforms are made of these two functions, of which `flax.nnx` shows neither.
    from flax.nnx.transforms.general import merge_inputs, split_inputs  # noqa: PLC0415

    return split_inputs(transform(merge_inputs(fun)))
