"""The script that breaks the package: what it changes, what it leaves alone, and what it says."""

import ast
import importlib
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "mutants.py"

sys.path.insert(0, str(SCRIPT.parent))
mutants = importlib.import_module("mutants")


def changes(source):
    return [m.change for m in mutants.mutants_of("m", textwrap.dedent(source).encode())]


def sources(source):
    """Return what each mutant has in place of the single line that `source` is."""
    return [m.source.decode() for m in mutants.mutants_of("m", source.encode())]


CHANGES = {
    "x = a < b": ["x = (a <= b)", "x = (a >= b)"],
    "x = a <= b": ["x = (a < b)", "x = (a > b)"],
    "x = a > b": ["x = (a >= b)", "x = (a <= b)"],
    "x = a >= b": ["x = (a > b)", "x = (a < b)"],
    "x = a == b": ["x = (a != b)"],
    "x = a != b": ["x = (a == b)"],
    "x = a is b": ["x = (a is not b)"],
    "x = a is not b": ["x = (a is b)"],
    "x = a in b": ["x = (a not in b)"],
    "x = a not in b": ["x = (a in b)"],
    "x = a < b == c": ["x = (a <= b == c)", "x = (a >= b == c)", "x = (a < b != c)"],
    "x = 3": ["x = (4)"],
    "x = 2.5": ["x = (5.0)"],
    "x = 0.0": ["x = (1.0)"],
    "x = True": ["x = (False)"],
    "x = 'key'": ["x = ('yek_')"],
    "x = a + b": ["x = (a - b)"],
    "x = a - b": ["x = (a + b)"],
    "x = a * b": ["x = (a / b)"],
    "x = a / b": ["x = (a * b)"],
    "x = a // b": ["x = (a * b)"],
    "x = a % b": ["x = (a * b)"],
    "x = a ** b": ["x = (a * b)"],
    "x = a & b": ["x = (a | b)"],
    "x = a | b": ["x = (a & b)"],
    "x = a << b": ["x = (a >> b)"],
    "x = a >> b": ["x = (a << b)"],
    "x = -a": ["x = (a)"],
    "x = ~a": ["x = (a)"],
    "x = not a": ["x = (a)"],
    "x = a and b": ["x = (a or b)", "x = (b)", "x = (a)"],
    "x = a or b or c": ["x = (a and b and c)", "x = (b or c)", "x = (a or c)", "x = (a or b)"],
    "x = a if b else c": ["x = (c if b else a)"],
    "x = [a for a in b if c]": ["x = [a for a in b if (not (c))]"],
    "x = lambda a: a": ["x = lambda a: None"],
    "x = max(a, b)": ["x = (min(a, b))"],
    "x = np.isnan(a)": ["x = (np.isinf)(a)"],
    "x += a": ["x -= a"],
    "x *= a": ["x /= a"],
    "f(a)": ["pass"],
    "x: int = a + b": ["x: int = (a - b)"],
    "if a: f": ["if (not (a)): f", "if a: pass"],
    "if a == b: x = c": ["if (a != b): x = c"],
    "while a: x = c": ["while (not (a)): x = c"],
    "for a in b + c: x = a": ["for a in (b - c): x = a"],
    "with a(not b): x = c": ["with a((b)): x = c"],
    "def f(): return a": ["def f(): return None"],
    "def f(a=1, *, b=True): x = a": [
        "def f(a=(2), *, b=True): x = a",
        "def f(a=1, *, b=(False)): x = a",
    ],
    "def f(): raise ValueError": ["def f(): pass"],
    "try: a()\nexcept E: b()\nelse: c()\nfinally: d()": [
        "try: pass\nexcept E: b()\nelse: c()\nfinally: d()",
        "try: a()\nexcept E: pass\nelse: c()\nfinally: d()",
        "try: a()\nexcept E: b()\nelse: pass\nfinally: d()",
        "try: a()\nexcept E: b()\nelse: c()\nfinally: pass",
    ],
}


@pytest.mark.parametrize(("source", "expected"), CHANGES.items(), ids=CHANGES.keys())
def test_each_kind_of_change_is_made(source, expected):
    assert sources(source) == expected


LEFT_OUT = {
    "a docstring": '''
        def f():
            """Return 1 < 2."""
    ''',
    "an annotation": "def f(a: int | None, *, b: Literal['b']) -> tuple[int, 3]: x = a",
    "an annotated name": "x: Literal[1, 2]",
    "an import": "from a import b",
    "a list of names": "__all__ = ['a']",
    "the version": "__version__ = '1'",
    "an alias": "X: TypeAlias = int | None",
    "a type variable": "X = TypeVar('X')",
    "an f-string": "x = f'{a + 1} of {b or 2}'",
    "a text": "x = 'two words'",
    "two texts": "x = 'two words' + a",
    "a guard of zip": "x = zip(a, b, strict=True)",
    "a colour": "x = draw(color='red')",
    "imports for types": """
        if TYPE_CHECKING:
            x = 1
    """,
    "a protocol": """
        class P(Protocol):
            def f(self):
                return 1
    """,
    "a bare return": "def f(): return",
    "a return of None": "def f(): return None",
}


@pytest.mark.parametrize("source", LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_what_nothing_depends_on_is_left_out(source):
    assert changes(source) == []


def test_what_an_error_or_a_warning_says_is_left_out_but_not_that_it_is_given():
    assert changes("raise ValueError('a' + b, 1)") == ["raise removed"]
    assert changes("warnings.warn('a' + b, stacklevel=2)") == ["statement removed"]


def test_a_decorator_is_removed_and_its_arguments_are_changed():
    source = "class A:\n    @b(c=True)\n    def d(self):\n        x = self\n"
    without, changed = mutants.mutants_of("m", source.encode())
    assert (without.function, without.change) == ("A.d", "without @b")
    assert ast.unparse(ast.parse(without.source)) == ast.unparse(
        ast.parse(source.replace("@b(c=True)", ""))
    )
    assert changed.source.decode() == source.replace("True", "(False)")


def test_a_mutant_is_named_by_what_it_changes_and_not_by_where_that_stands():
    source = b"def f():\n    return a + 1, b + 1\n"
    there = mutants.mutants_of("m", source)
    moved = mutants.mutants_of("m", b"# a comment\n\n\n" + source)
    assert [m.key for m in moved] == [m.key for m in there]
    assert [m.rows for m in moved] == [(5, 5)] * len(there)
    ones = [m for m in there if m.change == "1 -> 2"]
    assert [m.number for m in ones] == [0, 1]
    assert len({m.source for m in ones}) == 2


@pytest.mark.parametrize("module", mutants.MODULES)
def test_each_mutant_of_the_package_is_another_program(module):
    source = (ROOT / "optax_lossscale" / f"{module}.py").read_bytes()
    made = mutants.mutants_of(module, source)
    assert len(made) > 10
    assert len({m.key for m in made}) == len(made)
    original = ast.dump(ast.parse(source))
    assert all(ast.dump(ast.parse(m.source)) != original for m in made)


def test_every_module_with_code_is_gone_through():
    package = ROOT / "optax_lossscale"
    paths = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    modules = [path.relative_to(package).with_suffix("").as_posix() for path in paths]
    assert sorted(mutants.MODULES) == sorted(modules)


def test_every_justified_survivor_exists_and_says_why():
    entries = tomllib.loads(mutants.SURVIVORS.read_text("utf-8")).get("survivor", [])
    exist = {
        m.key
        for module in mutants.MODULES
        for m in mutants.mutants_of(
            module, (ROOT / "optax_lossscale" / f"{module}.py").read_bytes()
        )
    }
    keys = [
        (e["module"], e["function"], e["line"], e["change"], e.get("number", 0)) for e in entries
    ]
    assert [key for key in keys if key not in exist] == []
    assert len(set(keys)) == len(keys)
    assert [e["line"] for e in entries if len(e["reason"]) < 20] == []


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


def doubled(x):
    return x * 2


def untested(x):
    return x + 1
'''
TESTS = """
from tiny.sums import clipped, doubled

def test_what_is_small_stays():
    assert clipped(2) == 2

def test_what_is_large_is_clipped():
    assert clipped(5) == 3

def test_half_of_it():
    assert doubled(2) == 4
"""
SURVIVOR = """
[[survivor]]
module = "sums"
function = "{}"
line = "{}"
change = "{}"
reason = "where the two are equal, either is right"
"""
DRIVER = """
import sys
sys.path.insert(0, {tools!r})
import mutants
from pathlib import Path
mutants.ROOT, mutants.PACKAGE, mutants.MODULES = Path.cwd(), "tiny", ["sums"]
mutants.SURVIVORS = Path("survivors.toml")
sys.exit(mutants.main())
"""


@pytest.fixture
def tiny(tmp_path):
    """Return a function that runs the script on a package of three functions."""
    files = {"tiny/__init__.py": "", "tiny/sums.py": SUMS, "tests/test_sums.py": TESTS}
    files["pyproject.toml"] = '[tool.pytest]\naddopts = ["--doctest-modules"]\n'
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)  # noqa: S603, S607

    def run(*options, survivors=""):
        (tmp_path / "survivors.toml").write_text(survivors)
        driver = DRIVER.format(tools=str(SCRIPT.parent))
        return subprocess.run(  # noqa: S603
            [sys.executable, "-c", driver, "--output", str(tmp_path / "out"), *options],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run


def test_survivors_are_found_and_must_be_justified(tiny):
    found = tiny()
    assert found.returncode == 1, found.stdout + found.stderr
    assert (
        "SURVIVED sums:11, in clipped\n  if x >= limit:\n  x >= limit -> x > limit" in found.stdout
    )
    # 2 + 2 is 2 ** 2 is 2 * 2, but none of these is a change that is made.
    assert "in doubled" not in found.stdout
    assert "NOT COVERED sums:21, in untested\n  return x + 1\n  x + 1 -> x - 1" in found.stdout
    assert "LIMIT" not in found.stdout.partition("SURVIVED")[2]  # a constant of the module is seen
    boundary = SURVIVOR.format("clipped", "if x >= limit:", "x >= limit -> x > limit")
    # Only what is not justified is told of, and nothing is judged again.
    again = tiny(survivors=boundary)
    assert again.returncode == 1
    assert "in clipped" not in again.stdout
    assert "in untested" in again.stdout
    assert ": killed" not in again.stdout
    within = tiny("--lines", "1-17", survivors=boundary)
    assert within.returncode == 0, within.stdout
    assert "NOT GONE THROUGH" not in within.stdout
    # What was justified and is killed, or is there no more, is told of too.
    killed = SURVIVOR.format("doubled", "return x * 2", "2 -> 3")
    gone = SURVIVOR.format("doubled", "return 2 * x", "2 -> 3")
    stale = tiny("--lines", "17", survivors=killed)
    assert stale.returncode == 1
    assert "OUT OF DATE in survivors.toml: sums doubled `return x * 2` 2 -> 3" in stale.stdout
    stale = tiny(survivors=boundary + gone)
    assert "OUT OF DATE in survivors.toml: sums doubled `return 2 * x` 2 -> 3" in stale.stdout


def test_what_was_not_gone_through_is_said_and_is_no_success(tiny):
    none = tiny("--minutes", "0")
    assert none.returncode == 2, none.stdout + none.stderr
    total = len(mutants.mutants_of("sums", SUMS.encode()))
    assert f"sums: {total} mutants: {total} not judged" in none.stdout
    assert f"NOT GONE THROUGH: {total} of {total} mutants" in none.stdout
