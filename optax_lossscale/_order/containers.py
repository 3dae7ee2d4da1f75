"""The nodes of an optimizer's state that contain a state, and what kind of container each is."""

import collections
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import optax

from optax_lossscale._support.tree import KeyPath, PyTree, children


class Container(NamedTuple):
    """A node on the path to a state."""

    node: PyTree
    key: Hashable  # of the child on the path
    members: dict[Hashable, PyTree]  # all children
    around: "Container | None"


def containers(tree: PyTree, path: KeyPath) -> Iterator[Container]:
    """Yield the nodes on a path, the outermost first."""
    container = None
    for key in path:
        members = {own: child for (own,), child in children(tree)[0]}
        container = Container(tree, key, members, container)
        yield container
        tree = members[key]


INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def is_chain(node: PyTree) -> bool:
    return type(node) in (tuple, collections.OrderedDict)  # from `chain` and `named_chain`


def is_partition(container: Container) -> bool:
    """Return whether a container is the dict of states by label."""
    around = container.around
    return around is not None and isinstance(around.node, optax.MultiTransformState)
