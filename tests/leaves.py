"""Leaves of a tree of gradients that the package must leave alone, and small number formats."""

import jax
import jax.numpy as jnp
import numpy as np

FP8 = [name for name in dir(jnp) if name[:6] == "float8" and hasattr(getattr(jnp, name), "dtype")]


def not_numbers():
    return {
        "None": None,
        "float0": np.zeros(2, jax.dtypes.float0),
        "integers": jnp.arange(3),
        "4-bit integer": jnp.int4(3),
        "bools": jnp.array([True, False]),
        "PRNG key": jax.random.key(0),
        "PRNG keys": jax.random.split(jax.random.key(0), 3),
        "Python int": 10**400,
        "Python bool": True,
        "string": "nan",
        "function": jnp.exp,
        "dtype": jnp.float32,
        "strings": np.array(["nan"]),
        "objects": np.array([np.nan, None], object),
        "datetime": np.datetime64("NaT", "s"),
    }
