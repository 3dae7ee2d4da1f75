"""The cost of the memory layout of gradients on a CPU, with and without loss scaling.

    python -m benchmarks.row_major

The gradient of a weight is a transposed matrix product. XLA:CPU (seen in jaxlib 0.10.2) does not
store it in row-major order, but fuses the transposition into each loop that reads it, against the
order in memory. This benchmark times the training step of plain Optax and of this library, first
unchanged and then with every gradient stored in the order of the parameters. It explains why some
peers, which write a copy of each gradient, are faster than plain Optax in the training step of
`benchmarks.run`.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from benchmarks import command, measure, suite
from benchmarks.contenders import Contender, Control, OptaxAlone, Ours, State
from benchmarks.workloads import SIZES, Tree


class RowMajor(Contender):
    """Stores gradients in row-major order, as JAX stores arguments and results."""

    def apply(self, state: State, grads: Tree) -> State:
        """Take one step of the optimizer."""

        def row_major(grad: jax.Array) -> jax.Array:
            return with_layout_constraint(grad, Layout(major_to_minor=tuple(range(grad.ndim))))

        return super().apply(state, jax.tree.map(row_major, grads))


class OptaxRowMajor(RowMajor, OptaxAlone):
    """Plain Optax on gradients in row-major order."""

    name = "Optax alone, row-major"


class OursRowMajor(RowMajor, Ours):
    """This library on gradients in row-major order."""

    name = "optax_lossscale, row-major"


CONTENDERS: tuple[type[Contender], ...] = (OptaxAlone, Control, OptaxRowMajor, Ours, OursRowMajor)


def main(argv: Sequence[str] | None = None) -> None:
    """Time the steps side by side, and print a table."""
    parser = command.parser("benchmarks.row_major", __doc__)
    parser.add_argument("--size", choices=SIZES, default="full", help="size of the transformer")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timed steps")
    parser.add_argument("--sample-seconds", type=float, default=1.0, help="length of one sample")
    args = parser.parse_args(argv)

    options = suite.Options(
        sizes=SIZES[args.size],
        contenders=CONTENDERS,
        rounds=args.rounds,
        sample_seconds=args.sample_seconds,
        compile_rounds=0,
        compile_limit=0,
        seed=0,
    )
    (training,) = suite.STEPS["training"]
    training = dataclasses.replace(training, contenders=CONTENDERS)
    rows = suite.run_steps(training, options)["rows"]
    print("| | ratio | quartiles | temporary memory | transpositions |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        low, median, high = measure.quartiles(row["ratios"])
        print(
            f"| {name} | {median:.2f} | {low:.2f} to {high:.2f} | {row['temporary'] / 1e6:.0f} MB "
            f"| {row['transpositions']} |"
        )


if __name__ == "__main__":
    main()
