"""Settings for every test."""

import jax
import pytest

import optax_lossscale as ols

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Many tests update a guard with gradients of their own. `tests/test_never_scaled.py` holds the
# warning about gradients that were never scaled, in processes of their own.
ols.scale_loss(1.0, ols.init())


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


@pytest.fixture(scope="session")
def _every_compilation():
    seen = []  # of one listener for all tests, since jax 0.7 cannot remove one
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: seen.append(name) if "backend_compile" in name else None
    )
    return seen


@pytest.fixture
def compilations(_every_compilation):
    """Return a list that grows with each program that is compiled."""
    _every_compilation.clear()
    return _every_compilation
