"""The mutation tester: what it changes, and the survivors that are listed."""

import ast
import importlib
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "mutants"
sys.path.insert(0, str(TOOL))
mutants_of = importlib.import_module("changes").mutants_of

CHANGES = {
    "x = a <= b < c, a is b": ["a < b", "a > b", "b <= c", "b >= c", "a is not b"],
    "x = a - b * c, a | b": ["a + b * c", "b / c", "a & b"],
    "x = a or not b": ["a and (not b)", "(not b)", "(a)", "(b)"],
    "x = lambda a: a, max(a, np.isnan(b))": ["None", "min", "np.isinf"],
    "x = 3, 0.0, 2.5, True, 'key'": ["4", "1.0", "5.0", "False", "'yek_'"],
    "while a:\n  if b == c: continue": ["(not (a))", "b != c", "break"],
    "raise E('a' + b, 1)\nwarnings.warn('a' + b, stacklevel=2)": ["pass", "pass"],
    # Code that nothing depends on is left out.
    "def f(a: 1, *, b: 'b') -> 3:\n  '''a'''\n  return None": [],
    "if TYPE_CHECKING: x = 1\nclass P(Protocol):\n  def f(self): return 1": [],
}


@pytest.mark.parametrize(("source", "expected"), CHANGES.items(), ids=CHANGES)
def test_each_kind_of_change_is_made_and_nothing_else(source, expected):
    mutants = [m.source.decode() for m in mutants_of("m.py", source.encode())]
    assert len(mutants) == len(expected)
    for mutated, new in zip(mutants, expected, strict=True):
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
        assert new in mutated


@pytest.mark.slow
def test_every_listed_survivor_exists_and_has_a_reason():
    for path, table in tomllib.loads((TOOL / "survivors.toml").read_text("utf-8")).items():
        assert table.keys() <= {m.change for m in mutants_of(path, (ROOT / path).read_bytes())}
        assert all(len(reason) > 20 for reason in table.values())
