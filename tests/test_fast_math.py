"""The check under XLA's fast math, which may assume away what it looks for."""

import os
import subprocess
import sys

SCRIPT = """
import itertools
import jax, jax.numpy as jnp, numpy as np
import optax_lossscale as ols

rng = np.random.default_rng(0)
checked = 0
for dtype, shape in itertools.product(
    (jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64, jnp.float8_e5m2),
    ((), (1,), (4097,), (257, 300), (3, 70000), (96, 31, 33)),
):
    good = jnp.asarray(rng.normal(size=shape), dtype)
    for state in (ols.init(8.0), ols.init(2.0**-4)):
        check = jax.jit(lambda g: ols.unscale_and_check([jnp.ones(3), g], state)[1])
        assert bool(check(good)), (dtype, shape)
        for bad in (jnp.nan, jnp.inf, -jnp.inf):
            where = tuple(int(rng.integers(n)) for n in shape)
            assert not bool(check(good.at[where].set(bad))), (dtype, shape, bad, where)
            checked += 1
# Finite as they came, infinite unscaled.
big = jnp.full((128, 1024), 3e38, jnp.float32)
assert bool(jax.jit(lambda g: ols.unscale_and_check(g, ols.init(1))[1])(big))
assert not bool(jax.jit(lambda g: ols.unscale_and_check(g, ols.init(0.25))[1])(big))
print(checked)
"""


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
    assert int(result.stdout) == 5 * 6 * 2 * 3
