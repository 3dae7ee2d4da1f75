"""The command lines of the benchmarks."""

import argparse


def parser(module: str, doc: str) -> argparse.ArgumentParser:
    """Return a parser for `python -m` this module, which its docstring describes."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
