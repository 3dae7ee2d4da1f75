"""The mutation tester: what it changes, what it leaves unchanged, and what it reports."""

import ast
import importlib
import runpy
import shutil
import subprocess
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
    "x = [a if b else c for a in b if c]": ["c if b else a", "(not (c))"],
    "x = lambda a: a, max(a, np.isnan(b))": ["None", "min", "np.isinf"],
    "x = 3, 0.0, 2.5, True, 'key'": ["4", "1.0", "5.0", "False", "'yek_'"],
    "x += a\nf(b)": ["x -= a", "pass"],
    "while a:\n  if b == c: continue": ["(not (a))", "b != c", "break"],
    "def f(a=1, *, b=True): return a": ["False", "2", "return None"],
    "raise E('a' + b, 1)\nwarnings.warn('a' + b, stacklevel=2)": ["pass", "pass"],
    "@b(c=1)\nclass A:\n  d: int = 2": ["", "3", "2"],
    "try: a()\nexcept E: b()\nelse: c()\nfinally: d()": ["pass", "pass", "pass", "pass"],
    # Code that nothing depends on is left out.
    "def f(a: 1, *, b: 'b') -> 3:\n  '''a'''\n  return None": [],
    "__all__ = ['a']\nX: TypeAlias = 'a'": [],
    "x = f'{a + 1}', 'two words' + a, zip(a, b, strict=True)": [],
    "if TYPE_CHECKING: x = 1\nclass P(Protocol):\n  def f(self): return 1": [],
}


@pytest.mark.parametrize(("source", "expected"), CHANGES.items(), ids=CHANGES)
def test_each_kind_of_change_is_made_and_nothing_else(source, expected):
    mutants = [m.source.decode() for m in mutants_of("m.py", source.encode())]
    assert len(mutants) == len(expected)
    for mutated, new in zip(mutants, expected, strict=True):
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
        assert new in mutated


def test_a_mutant_is_named_by_what_it_changes_and_not_by_where_that_stands():
    source = b"def f():\n    return a + 1, b + 1\n"
    there = mutants_of("m.py", source)
    moved = mutants_of("m.py", b"# a comment\n\n" + source)
    assert [m.key for m in moved] == [m.key for m in there]
    assert {m.rows for m in moved} == {(4, 4)}
    assert {"m.py f: 1 -> 2", "m.py f: 1 -> 2 #2"} < {m.key for m in there}


def test_every_listed_survivor_exists_and_has_a_reason():
    for path, table in tomllib.loads((TOOL / "survivors.toml").read_text("utf-8")).items():
        assert table.keys() <= {m.change for m in mutants_of(path, (ROOT / path).read_bytes())}
        assert all(len(reason) > 20 for reason in table.values())


@pytest.mark.parametrize(("killer", "status"), [("a test", 0), ("", 1), (None, 2)])
def test_the_exit_status_says_whether_all_were_judged_and_killed(killer, status):
    (mutant,) = mutants_of("m.py", b"x = 1")
    results = {} if killer is None else {mutant.key: killer}
    assert runpy.run_path(str(TOOL / "__main__.py"))["_report"]([mutant], results) == status


SUMS = '''
LIMIT = 3

def clipped(x, limit=LIMIT):
    """Return at most the limit.

    >>> clipped(1)
    1
    """
    if x >= limit:
        return limit
    return x

def untested(x):
    return x
'''
TESTS = """
def test_that_imports_the_module():
    import optax_lossscale.sums
def test_what_is_outside_is_clipped():
    from optax_lossscale.sums import clipped
    assert clipped(5) == 3
"""
SETTINGS = '[tool.pytest]\naddopts = ["--doctest-modules"]\nmarkers = ["exhaustive: many"]\n'
BOUNDARY = '["optax_lossscale/sums.py"]\n"clipped: x >= limit -> x > limit" = "no change"\n'


@pytest.mark.slow
def test_a_survivor_must_be_listed_and_what_is_listed_must_survive(tmp_path):
    shutil.copytree(TOOL, tmp_path / "tools" / "mutants")
    slow_to_import = "equinox", "flax", "jmp", "keras", "optax", "orbax"
    files = {f"tools/mutants/{name}.py": "" for name in slow_to_import}
    files |= {"optax_lossscale/sums.py": SUMS, "tests/test_sums.py": TESTS}
    for name, content in (files | {"pyproject.toml": SETTINGS}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "optax_lossscale" / "__init__.py").touch()

    def run(survivors, *options):
        (tmp_path / "tools" / "mutants" / "survivors.toml").write_text(survivors)
        command = [sys.executable, "tools/mutants", *options]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603
        return found.returncode, found.stdout

    status, said = run(BOUNDARY + '"clipped: return None" = "a test kills it"\n')
    assert status == 1
    assert "sums.py:15 SURVIVED\n  return x\n  untested: return None" in said
    assert "sums.py: 6 mutants: 1 SURVIVED, 1 justified, 4 killed" in said
    assert "OUT OF DATE in survivors.toml: optax_lossscale/sums.py clipped: return None" in said
    # Kills are remembered, also that of the constant, which is executed at import only.
    status, said = run(BOUNDARY, "--minutes", "0")
    assert status == 2
    assert "sums.py: 6 mutants: 4 killed, 2 not judged" in said
