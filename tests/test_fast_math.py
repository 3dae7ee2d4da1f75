"""The check under XLA's fast math, which may assume that NaN and infinity do not occur."""

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
checked = 0
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
            checked += 1
# Finite as they came, infinite unscaled.
big = jnp.full((128, 1024), 3e38, jnp.float32)
assert check(big, ols.init(1.0)) and not check(big, ols.init(0.25))
print(checked)
"""


@pytest.mark.slow
def test_the_check_is_exact_under_fast_math():
    flags = "--xla_cpu_enable_fast_math=true"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == 5 * 4 * 3
