"""How gradients lie in memory: what that costs on a CPU, with loss scaling and without.

    python -m benchmarks.row_major

The gradient of a weight is a transposed product of matrices. XLA:CPU (seen in jaxlib 0.10.2) leaves
it so, and fuses the transposition into each loop that reads it, against the order in memory. This
times the training step of plain Optax and of this library, as they are and with every gradient put
into the order of the parameters first. It explains why some peers, which write a copy of each
gradient, come out ahead of plain Optax in the training step of `benchmarks.run`.
"""

import argparse
import functools
from collections.abc import Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from tqdm import tqdm

from benchmarks import measure
from benchmarks.contenders import Contender, Control, OptaxAlone, Ours, State
from benchmarks.workloads import ADAMW, SIZES, Tree, transformer


def row_major(tree: Tree) -> Tree:
    """Return the arrays laid out in memory as JAX lays out arguments and results."""
    return jax.tree.map(
        lambda x: with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim)))), tree
    )


class OptaxRowMajor(OptaxAlone):
    """Plain Optax on gradients in row-major order."""

    name = "Optax alone, row-major"

    def apply(self, state: State, grads: Tree) -> State:
        """Take one step of the optimizer."""
        return super().apply(state, row_major(grads))


class OursRowMajor(Ours):
    """This library on gradients in row-major order."""

    name = "optax_lossscale, row-major"

    def apply(self, state: State, grads: Tree) -> State:
        """Take one step of the optimizer."""
        return super().apply(state, row_major(grads))


CONTENDERS: tuple[type[Contender], ...] = (OptaxAlone, Control, OptaxRowMajor, Ours, OursRowMajor)


def main(argv: Sequence[str] | None = None) -> None:
    """Time the steps side by side, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.row_major",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="full", help="of the transformer")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timed steps")
    parser.add_argument("--sample-seconds", type=float, default=1.0, help="length of one sample")
    args = parser.parse_args(argv)

    workload = transformer(SIZES[args.size])
    steps: dict[str, measure.Compiled] = {}
    facts: dict[str, measure.Facts] = {}
    for kind in CONTENDERS:
        contender = kind(ADAMW, workload.params)
        step = functools.partial(contender.training_step, workload.loss_fn)
        init = functools.partial(contender.init, workload.params)
        run, facts[kind.name] = measure.compile_step(step, init(), workload.batch)
        steps[kind.name] = measure.Compiled(run, init, workload.batch)
    with tqdm(total=len(steps) * (args.rounds + 1)) as bar:

        def tick(_: str) -> None:
            bar.update()

        samples = measure.time_steps(
            steps,
            rounds=args.rounds,
            sample_seconds=args.sample_seconds,
            seed=0,
            tick=tick,
        )
    print("| | ratio | quartiles | temporary memory | transpositions |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, taken in samples.items():
        ratios = measure.ratios(taken.seconds, samples[OptaxAlone.name].seconds)
        low, median, high = measure.quartiles(ratios)
        memory, transpositions = facts[name].temporary / 1e6, facts[name].transpositions
        print(
            f"| {name} | {median:.2f} | {low:.2f} to {high:.2f} | {memory:.0f} MB "
            f"| {transpositions} |"
        )


if __name__ == "__main__":
    main()
