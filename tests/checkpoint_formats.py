"""The formats of checkpoints: how each saves a state, and restores one like another."""

import pickle

import jax
import orbax.checkpoint as ocp
from flax import serialization


def save_orbax(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore_orbax(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


FORMATS = {
    "pickle": (
        lambda path, state: path.write_bytes(pickle.dumps(state)),
        lambda path, _: pickle.loads(path.read_bytes()),  # noqa: S301, written by a test
    ),
    "flax": (
        lambda path, state: path.write_bytes(serialization.to_bytes(state)),
        lambda path, like: serialization.from_bytes(like, path.read_bytes()),
    ),
    "orbax": (save_orbax, restore_orbax),
}
