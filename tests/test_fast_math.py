"""The check under settings of XLA that must be set before JAX starts, in new processes.

Fast math may assume that NaN and infinity do not occur. XLA may also compute float16 with excess
precision, which decides what overflows, but an overflow is always seen.
"""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import optax_lossscale as ols

check = jax.jit(lambda *args: ols.unscale_and_check(*args)[1])
state = ols.init(8.0)
rng = np.random.default_rng(0)
for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64, jnp.float8_e5m2):
    shapes = (), (4097,), (257, 300), (96, 31, 33)
    good = [np.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    assert check(good, state), dtype
    for i, shape in enumerate(shapes):
        where = tuple(int(rng.integers(n)) for n in shape)
        for bad in (np.nan, np.inf, -np.inf):
            one_bad = [array.copy() for array in good]
            one_bad[i][where] = bad
            assert not check(one_bad, state), (dtype, shape, where, bad)
# Finite before unscaling, infinite after it.
big = jnp.full((128, 1024), 3e38, jnp.float32)
assert check(big, ols.init(1.0)) and not check(big, ols.init(0.25))

@jax.jit
def overflows(x, four):
    grads = (x.astype(jnp.float16) * four).astype(jnp.float32)
    unscaled, finite = ols.unscale_and_check(grads, state)
    return ~jnp.isfinite(unscaled).all(), ~finite

x = rng.uniform(2e4, 6e4, (400, 3)).astype(np.float32)
infinite, found = np.array([overflows(row, jnp.float16(4)) for row in x]).T
print((infinite == found).sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--xla_cpu_enable_fast_math=true",
        pytest.param("--xla_allow_excess_precision=false", marks=pytest.mark.exhaustive),
    ],
)
def test_the_check_is_exact(flags):
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "false"
    result = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "400\n"
