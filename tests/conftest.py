"""Settings of every test, and the ways a function is run."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def _promotion(request):
    """Relax dtype promotion where code of others, Optax's adam for one, relies on it."""
    if request.node.get_closest_marker("integration"):
        with jax.numpy_dtype_promotion("standard"):
            yield
    else:
        yield
