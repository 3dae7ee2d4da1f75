"""Count the code that a reader of one training step has to follow: `python tools/step_trace.py`.

A step is traced under `jax.jit`. The tool counts the functions of the package that run, without
lambdas and comprehensions; their files; and how often one call and the next are in different files.
"""

import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from optax_lossscale import _xla

PACKAGE = str(Path(ols.__file__).parent)
PLAIN = ols.with_loss_scaling(optax.adam(1e-3))
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ols.with_bfloat16_state(optax.adamw(1e-3)))
STACK = ols.with_loss_scaling(
    ols.with_master_weights(CLIPPED, remainders=True), skip_if=ols.Spike()
)


class Walk(NamedTuple):
    """The functions, files and changes of file in one traced step."""

    functions: int
    files: int
    changes: int


def walk(tx: optax.GradientTransformationExtraArgs, *, dtype: Any = jnp.float32) -> Walk:
    """Return the counts for one traced step of an optimizer."""
    params = {"w": jnp.ones((3, 3), dtype), "b": jnp.ones(3, dtype)}
    loss_and_grads = ols.value_and_grad(
        lambda p: sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in p.values())
    )

    def step(params: Any, opt_state: Any) -> Any:
        loss, grads = loss_and_grads(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    calls: list[tuple[str, int]] = []

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_named = not code.co_name.startswith("<")
        if event == "call" and is_named and code.co_filename.startswith(PACKAGE):
            calls.append((code.co_filename, code.co_firstlineno))

    opt_state = tx.init(params)
    jax.clear_caches()  # so that functions of an earlier trace are traced again
    sys.setprofile(record)
    try:
        jax.jit(step).trace(params, opt_state)
    finally:
        sys.setprofile(None)
    files = [file for file, _ in calls]
    changes = sum(a != b for a, b in itertools.pairwise(files))
    return Walk(len({*calls}), len({*files}), changes)


if __name__ == "__main__":
    for enabled in (False, True):
        _xla.enabled = enabled
        state = "on" if enabled else "off"
        print(f"_xla {state}: a plain guard {walk(PLAIN)}")
        print(f"_xla {state}: README's stack {walk(STACK, dtype=jnp.bfloat16)}")
