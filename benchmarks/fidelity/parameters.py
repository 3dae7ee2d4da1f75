"""Train with parameters in bfloat16: with float32 masters, with remainders, and with neither.

python -m benchmarks.fidelity.parameters --write docs/training.md
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from benchmarks import command
from benchmarks.fidelity.report import shown
from benchmarks.fidelity.tasks import Task, all_tasks
from benchmarks.page import Part, interval, table

PART = Part("parameters")
# The dtype of the parameters, and what keeps the rest of them.
WAYS = {
    "float32 parameters": (jnp.float32, lambda tx: tx),
    "masters": (jnp.bfloat16, ols.with_master_weights),
    "remainders": (jnp.bfloat16, lambda tx: ols.with_master_weights(tx, remainders=True)),
    "nothing": (jnp.bfloat16, lambda tx: tx),
}
NAMES = "photograph", "digits", "characters"


def train(task: Task, way: str, seed: int) -> float:
    """Compute in bfloat16, and return the metric of the float32 weights after the last step."""
    dtype, keep = WAYS[way]
    tx = optax.with_extra_args_support(keep(task.tx))

    @jax.jit
    def run(data: tuple, key: jax.Array) -> jax.Array:
        def train_step(carry: tuple, key: jax.Array) -> tuple:
            params, opt_state = carry
            grads = jax.grad(task.loss_fn)(params, data, key, jnp.bfloat16)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        init_key, key = jax.random.split(key)
        params = ols.cast(task.init(init_key), dtype)
        keys = jax.random.split(key, task.steps)
        params, opt_state = jax.lax.scan(train_step, (params, tx.init(params)), keys)[0]
        if isinstance(opt_state, ols.MasterWeightsState):
            params = ols.master_weights(opt_state, params)
        return task.evaluate(ols.cast(params, jnp.float32), data)

    return float(run(task.data, jax.random.key(seed)))


def measure(tasks: Sequence[Task], seeds: int) -> str:
    """Return the table of all tasks: float32's result, and the differences from it."""
    rows = []
    for task in tasks:
        ends = {way: np.array([train(task, way, seed) for seed in range(seeds)]) for way in WAYS}
        reference, *others = ends.values()
        form = f".{task.decimals}f"
        gaps = [shown(interval(end - reference), f"+{form}") for end in others]
        rows.append([f"**{task.name}**: {task.metric}", shown(interval(reference), form), *gaps])
    return table(["task", *WAYS], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the table or write it to a page."""
    parser = command.parser("benchmarks.fidelity.parameters", __doc__)
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds, at least 2")
    parser.add_argument("--quick", action="store_true", help="train for a few steps, as a check")
    parser.add_argument("--tasks", nargs="*", default=NAMES, choices=NAMES, help="tasks to train")
    parser.add_argument("--write", type=Path, help="page to update")
    args = parser.parse_args(argv)
    block = measure(all_tasks(args.tasks, quick=args.quick), args.seeds)
    print(block)
    if args.write:
        page = PART.replaced(args.write.read_text("utf-8"), block)
        args.write.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
