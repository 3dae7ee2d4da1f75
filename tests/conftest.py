"""Settings for every test, and the ways to run a function."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def _promotion(request):
    """Relax dtype promotion for tests of other libraries, such as Optax's adam, that rely on it."""
    if request.node.get_closest_marker("integration"):
        with jax.numpy_dtype_promotion("standard"):
            yield
    else:
        yield


def _setting(name, value):
    """Return a fixture with which JAX has this setting."""

    def fixture():
        before = jax.config.values[name]
        jax.config.update(name, value)
        yield
        jax.config.update(name, before)

    return pytest.fixture(fixture)


x64 = _setting("jax_enable_x64", True)
# As users compile, in quick runs too: the test counts what the compiler makes of it.
optimized = _setting("jax_disable_most_optimizations", False)


def _pmap(fun):
    """Run on two devices with the same arguments, and return the result of the first."""
    mapped = jax.pmap(fun, devices=jax.devices()[:2])

    def run(*args):
        results = mapped(*jax.tree.map(lambda x: np.stack([np.asarray(x)] * 2), args))
        first, second = (jax.tree.map(lambda x, i=i: x[i], results) for i in range(2))
        jax.tree.map(np.testing.assert_array_equal, first, second)
        return first

    return run


def _shard_map(fun):
    """Run on two devices with the same arguments and a replicated result."""
    mesh = jax.make_mesh((2,), ("shards",), devices=jax.devices()[:2])
    everywhere = PartitionSpec()
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=everywhere, out_specs=everywhere))


_RUNNERS = {"plain": lambda fun: fun, "jit": jax.jit, "pmap": _pmap, "shard_map": _shard_map}


@pytest.fixture(params=_RUNNERS.values(), ids=_RUNNERS.keys())
def runner(request):
    """Each way to run a function of arrays: plain, jit, pmap and jit(shard_map)."""
    return request.param
