"""The small changes to a Python module that make mutants.

Some code is left out because nothing depends on it or another test covers it: docstrings,
annotations, protocols, `__all__`, the version, messages of exceptions and warnings, f-strings,
strings that contain a space, and the keywords below.
"""

import ast
import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

KEYWORDS_LEFT_OUT = {
    *("strict", "stacklevel"),  # guards against our own mistakes
    *("color", "edgecolor", "facecolor", "linewidth", "alpha", "zorder", "width", "label"),
    *("fontsize", "ncols", "loc", "figsize", "layout", "title", "xlabel", "ylabel"),
}
OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
}
for one, other in (
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr)),
):
    OPERATORS |= {one: (other,), other: (one,)}
_PAIRS = "minimum maximum, min max, any all, floor ceil, pmin pmax, isnan isinf, float16 float32"
NAMES = dict(pair.split() for pair in _PAIRS.split(", "))
NAMES |= {other: name for name, other in NAMES.items()}
NAMES |= {"isfinite": "isnan", "int32": "int16", "nan": "inf", "inf": "nan"}
NAMES |= {"inexact": "floating", "complexfloating": "floating"}

Rows = tuple[int, int]  # the first and the last
Change = tuple[Any, str, str]  # the node to replace, its replacement, and a description


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change to one module."""

    path: str
    change: str  # the function, the change, and a number if there are several
    line: str  # the source line where the change begins
    rows: Rows  # executed together with the change
    scope: Rows  # of the enclosing function or class, or of the statement
    source: bytes = dataclasses.field(repr=False)  # of the module with the change

    @property
    def key(self) -> str:
        """Return a unique name that does not depend on the line number."""
        return f"{self.path} {self.change}"


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a module, in the order of its source."""
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    mutants: list[Mutant] = []
    seen: Counter[str] = Counter()
    for outermost in ast.parse(source).body:
        for (node, new, what), function, scope, rows in _walk(outermost, "", _rows(outermost)):
            begin = starts[node.lineno - 1] + node.col_offset - what.startswith("without @")
            end = starts[node.end_lineno - 1] + node.end_col_offset
            change = f"{function}: {what}" if function else what
            seen[change] += 1
            change += f" #{seen[change]}" if seen[change] > 1 else ""
            line = lines[node.lineno - 1].decode().strip()
            mutated = source[:begin] + new.encode() + source[end:]
            mutants.append(Mutant(path, change, line, rows or _rows(node), scope, mutated))
    return mutants


def _walk(node: Any, function: str, scope: Rows, rows: Rows | None = None) -> Iterator[Any]:
    """Yield the possible changes of a node, the outermost first, and their locations."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}" if function else node.name
        scope, rows = _rows(node), None
    elif isinstance(node, ast.stmt):
        rows = None if hasattr(node, "body") else _rows(node)
    if not _is_left_out(node):
        for change in _changes(node):
            yield change, function, scope, rows
        for part in _parts(node):
            yield from _walk(part, function, scope, rows)


def _is_left_out(node: Any) -> bool:
    match node:
        case (
            ast.JoinedStr()
            | ast.arg()
            | ast.Expr(value=ast.Constant() | ast.Yield())
            | ast.If(test=ast.Name("TYPE_CHECKING"))
            | ast.ClassDef(bases=[ast.Name("Protocol")])
            | ast.Call(func=ast.Name("TypeVar" | "ParamSpec") | ast.Attribute(attr="warn"))
            | ast.Assign(targets=[ast.Name("__all__" | "__version__")])
            | ast.AnnAssign(annotation=ast.Name("TypeAlias"))
        ):
            return True
    return isinstance(node, ast.keyword) and node.arg in KEYWORDS_LEFT_OUT


def _parts(node: Any) -> Iterable[ast.AST]:
    match node:
        case ast.Raise() | ast.AnnAssign(value=None):
            return ()
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            return (node.value,)
        case ast.FunctionDef():
            return (*node.decorator_list, node.args, *node.body)
    return ast.iter_child_nodes(node)


def _changes(node: Any) -> Iterator[Change]:  # noqa: C901, PLR0912 - a case for each kind
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            for decorator in node.decorator_list:
                name = ast.unparse(decorator).partition("(")[0]
                yield decorator, "", f"without @{name}"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None", "return None"
        case ast.Raise():
            yield node, "pass", "raise removed"
        case ast.Continue():
            yield node, "break", "break"
        case ast.Expr():
            yield node, "pass", "statement removed"
        case ast.AugAssign():
            for other in OPERATORS.get(type(node.op), ()):
                swapped = ast.unparse(_with(node, op=other()))
                yield node, swapped, swapped
        # Comparisons and `not` have cases of their own.
        case ast.If() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield _negated(node.test)
        case ast.comprehension():
            yield from map(_negated, node.ifs)
        case ast.Lambda():
            yield node.body, "None", f"{_short(node.body)} -> None"
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                for other in OPERATORS[type(operator)]:
                    yield _into(node, _with(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]]))
        case ast.BoolOp():
            yield _into(node, _with(node, op=OPERATORS[type(node.op)][0]()))
            for i in range(len(node.values)):
                rest = node.values[:i] + node.values[i + 1 :]
                yield _into(node, _with(node, values=rest) if len(rest) > 1 else rest[0])
        case ast.BinOp() if not _is_text(node):
            for other in OPERATORS.get(type(node.op), ()):
                yield _into(node, _with(node, op=other()))
        case ast.UnaryOp():
            yield _into(node, node.operand)
        case ast.IfExp():
            yield _into(node, _with(node, body=node.orelse, orelse=node.body))
        case ast.Constant(value=bool() as value):
            yield _into(node, ast.Constant(not value))
        case ast.Constant(value=int() as value):
            yield _into(node, ast.Constant(value + 1))
        case ast.Constant(value=float() as value):
            yield _into(node, ast.Constant(value * 2 or 1.0))
        case ast.Constant(value=str() as value) if value and " " not in value:
            yield _into(node, ast.Constant(value[::-1] + "_"))
        case ast.Attribute(attr=name) if name in NAMES:
            yield _into(node, _with(node, attr=NAMES[name]))
        case ast.Name(id="min" | "max" | "any" | "all" as name):
            yield _into(node, _with(node, id=NAMES[name]))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    vars(new).update(fields)
    return new


def _into(node: ast.AST, new: ast.AST) -> Change:
    return node, f"({ast.unparse(new)})", f"{_short(node)} -> {_short(new)}"


def _negated(node: ast.expr) -> Change:
    return node, f"(not ({ast.unparse(node)}))", f"not ({_short(node)})"


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-25:]}"


def _rows(node: Any) -> Rows:
    return node.lineno, node.end_lineno


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(getattr(part, "value", None), str) for part in ast.walk(node))
