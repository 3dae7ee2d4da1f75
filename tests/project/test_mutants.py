"""`tools/mutants.py`, which shows that the tests find lines of the package that are broken."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/mutants.py"


def test_each_line_to_break_is_in_its_file_once_and_its_tests_exist():
    tool = runpy.run_path(str(TOOL))
    for mutant in tool["MUTANTS"].values():
        source = (ROOT / "optax_lossscale" / mutant["file"]).read_text("utf-8")
        assert tool["broken"](source, mutant) != source
        assert [test for test in mutant["tests"] if not (ROOT / test).exists()] == []


@pytest.mark.slow
def test_a_line_is_found_whose_fault_a_test_shows(python, tmp_path):
    printed, _ = python(TOOL, "hysteresis", cwd=tmp_path)
    assert printed.startswith("hysteresis: tests/loss_scale/test_policy.py::")
    assert printed.endswith("1 of 1 are found\n")
