"""The programs of the table, as `listed.toml` has them."""

import tomllib
from pathlib import Path

from benchmarks.programs import drivers, kinds
from benchmarks.programs.source import Program

_TRAIN = vars(drivers) | vars(kinds)
_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

PROGRAMS = {name: Program(run=_TRAIN[name], **fields) for name, fields in _LISTED.items()}
