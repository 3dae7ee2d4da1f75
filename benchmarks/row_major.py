"""The cost of the memory layout of gradients on a CPU, with and without loss scaling.

    python -m benchmarks.row_major

The gradient of a weight is a transposed matrix product. XLA:CPU (seen in jaxlib 0.10.2) does not
store it in row-major order, but fuses the transposition into each loop that reads it, against the
order in memory. This benchmark times the training step of plain Optax and of this library, first
unchanged and then with every gradient stored in the order of the parameters. It explains why some
peers, which write a copy of each gradient, are faster than plain Optax in the training step of
`benchmarks.run`, whose options it takes.
"""

import sys

from benchmarks import run

if __name__ == "__main__":
    run.main(["--only=row-major", "--rounds=15", "--sample-seconds=1", *sys.argv[1:]])
