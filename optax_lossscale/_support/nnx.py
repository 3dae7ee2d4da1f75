"""Helpers for `flax.nnx`, which is imported only if the user's program has."""

import functools
import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from optax_lossscale._support.tree import KeyPath, Leaf, PyTree, Tree

P = ParamSpec("P")
Result = TypeVar("Result")
_Function: TypeAlias = Callable[..., Any]


def is_nnx(node: object, *classes: str) -> bool:
    """Return whether `node` is an object of one of these classes of `flax.nnx`."""
    nnx = sys.modules.get("flax.nnx")  # no such object exists before it is imported
    return nnx is not None and isinstance(node, tuple(getattr(nnx, name) for name in classes))


def is_write_error(error: Exception) -> bool:
    """Return whether `flax.nnx` raised because a trace wrote into an object of an outer one."""
    return type(error).__name__ == "TraceContextError"


def without_variables(tree: Tree) -> Tree:
    """Return `tree` with the array of each Variable in place of the Variable."""
    is_variable = lambda node: is_nnx(node, "Variable")  # noqa: E731
    return jax.tree.map(
        lambda node: jax.tree.leaves(node)[0] if is_variable(node) else node,
        tree,
        is_leaf=is_variable,
    )


def with_state(module: Tree, fun: Callable[[PyTree], PyTree]) -> Tree:
    """Return a copy of a module, whose state is `fun` of the state of `module`."""
    nnx = sys.modules["flax.nnx"]
    graph, state = nnx.split(module)
    return nnx.merge(graph, fun(state))


def plain_keys(path: KeyPath) -> tuple[Hashable, ...]:
    """Return the keys of a path as plain values, which are the same in any container.

    A last key `value` is left out. It leads to the array in a Variable, and also in the mapping
    that a Variable becomes in some checkpoints.
    """
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path]
    return tuple(keys[:-1] if keys[-1:] == ["value"] else keys)


def named_leaves(tree: PyTree) -> list[tuple[str, KeyPath, Leaf]]:
    """Return the leaves of a tree, each with its name and its path.

    The name is the path as `jax.tree_util.keystr` writes it. It is the same in every container: the
    array in a Variable has the name that it would have in the Variable's place.
    """
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: is_nnx(x, "Variable"))
    leaves = [
        (path, below, leaf)
        for path, node in nodes
        for below, leaf in jax.tree_util.tree_leaves_with_path(node)
    ]
    # The first key below a Variable is the attribute that holds its value.
    return [
        (jax.tree_util.keystr(path + below[1:]), path + below, leaf) for path, below, leaf in leaves
    ]


def taken_apart(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return a tree with the states of its objects, and a function that makes a copy from it.

    Objects of `flax.nnx` are modules, variables, random streams and the like. Two that share a
    variable share its copy.
    """
    if not _holds_objects(tree):
        return tree, lambda parts: parts
    parts = _Parts(tree, _is_object)
    return (parts.state, parts.rest), lambda given: parts.joined(*given)[0]


class _Parts:
    """A tree in two parts: the state of the chosen objects, and all other leaves."""

    def __init__(self, tree: PyTree, is_chosen: Callable[[PyTree], bool]) -> None:
        leaves, self.treedef = jax.tree.flatten(tree, is_leaf=_is_object)
        self.places = [i for i, leaf in enumerate(leaves) if _is_object(leaf) and is_chosen(leaf)]
        self.objects = [leaves[place] for place in self.places]
        self.graph, self.state = sys.modules["flax.nnx"].split(self.objects)
        self.rest = [None if i in self.places else leaf for i, leaf in enumerate(leaves)]

    def joined(self, state: PyTree, rest: Sequence[PyTree]) -> tuple[PyTree, list[PyTree]]:
        """Return a tree with copies of the objects, and these."""
        leaves, copies = [*rest], sys.modules["flax.nnx"].merge(self.graph, state)
        for place, copy in zip(self.places, copies, strict=True):
            leaves[place] = copy
        return self.treedef.unflatten(leaves), copies


def _holds_objects(tree: PyTree) -> bool:
    """Return whether there are modules, variables, random streams or other objects in a tree."""
    is_imported = "flax.nnx" in sys.modules
    return is_imported and any(map(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))


def _is_object(node: PyTree) -> bool:
    nnx = sys.modules["flax.nnx"]
    base = "Pytree" if hasattr(nnx, "Pytree") else "Object"  # its name before Flax 0.12
    return is_nnx(node, base, "Variable")


def transformed(
    fun: Callable[P, Result],
    transform: Callable[[_Function], _Function],
    *,
    keep_dtypes: bool = False,
) -> Callable[P, Result]:
    """Return `transform(fun)`, where arguments may hold objects of `flax.nnx`.

    With `keep_dtypes`, floating-point arrays in them keep their dtypes, whatever `fun` writes.
    """

    @functools.wraps(fun, updated=())
    def transformed(*args: P.args, **kwargs: P.kwargs) -> Result:
        def call(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Result:
            return fun(*args, **kwargs)

        if not _holds_objects((args, kwargs)):
            return transform(call)(args, kwargs)
        on_objects = lambda call: _with_same_dtypes(transform(call))  # noqa: E731
        return _on_arrays(on_objects if keep_dtypes else transform, call)(args, kwargs)

    return transformed


def _on_arrays(transform: Callable[[_Function], _Function], fun: _Function) -> _Function:
    """Return `transform(fun)` for a transform that only handles arrays.

    Changes that `fun` makes to the objects among its arguments are written back, as `nnx.jit` does.
    Objects of an outer trace are only read: there, flax.nnx refuses every write.
    """
    # Flax's transforms are made of these two functions, of which `flax.nnx` shows neither.
    from flax.nnx.transforms.general import merge_inputs, split_inputs  # noqa: PLC0415

    nnx = sys.modules["flax.nnx"]

    def on_arrays(*args: PyTree) -> PyTree:
        parts = _Parts(args, lambda leaf: not _may_write(leaf))
        arrays, state_def = jax.tree.flatten(parts.state)

        def with_read_objects(arrays: Sequence[Leaf], rest: Sequence[PyTree]) -> PyTree:
            args, objects = parts.joined(state_def.unflatten(arrays), rest)
            result = fun(*args)
            graph, state = nnx.split(objects)
            is_same = map(operator.is_, jax.tree.leaves(state), arrays)
            if graph != parts.graph or not all(is_same):
                nnx.update(parts.objects, state)  # raises Flax's error
            return result

        return split_inputs(transform(merge_inputs(with_read_objects)))(arrays, parts.rest)

    return on_arrays


def _with_same_dtypes(fun: _Function) -> _Function:
    """Return `fun`, from `_on_arrays`, with every floating-point array written in its dtype.

    Its results are what it wrote into its arguments, and the results of the function that it calls.
    """

    def written_as_given(*given: PyTree) -> PyTree:
        leaves = jax.tree_util.tree_leaves_with_path(given)
        dtypes = {path: x.dtype for path, x in leaves if _is_floating(x)}
        written, results = fun(*given)

        def as_given(path: KeyPath, new: Leaf) -> Leaf:
            return new.astype(dtypes[path]) if path in dtypes and _is_floating(new) else new

        return jax.tree_util.tree_map_with_path(as_given, written), results

    return written_as_given


def _is_floating(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _may_write(node: object) -> bool:
    """Return whether `flax.nnx` lets the current trace write into an object."""
    nnx, errors = sys.modules["flax.nnx"], sys.modules["flax.errors"]
    try:
        nnx.update([node], nnx.state([node]))  # it holds a Variable, or is one
    except errors.TraceContextError:
        return False
    return True
