"""The small ways in which a module of Python is broken: see `mutants.py`, which does it.

Left out, because nothing depends on them or another test holds them:

* docstrings, annotations, imports, type aliases, `__all__` (tests/test_public_names.py), protocols;
* what an exception or a warning says, f-strings, and every string with a space in it;
* `strict=` of `zip`, which guards against ourselves, and `stacklevel=`;
* colours, widths and texts of the picture.
"""

import ast
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change to one module.

    Attributes:
      module: The module's name.
      function: The qualified name of the function or class that is changed, "" for the module.
      line: The line of source that the change begins on.
      change: What is changed into what.
      number: Counts those that are alike in all this.
      rows: The first and the last row of the statement.
      source: The module's source with the change.
    """

    module: str
    function: str
    line: str
    change: str
    number: int
    rows: tuple[int, int]
    source: bytes = dataclasses.field(repr=False)

    @property
    def is_coarse(self) -> bool:
        """Whether it turns a result or a condition into its opposite, which any test notices."""
        return self.change.startswith(("return None", "not ("))

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What names it, wherever its line stands."""
        return self.module, self.function, self.line, self.change, self.number


_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_BOTH_WAYS = {
    "minimum": "maximum",
    "min": "max",
    "any": "all",
    "floor": "ceil",
    "pmin": "pmax",
    "isnan": "isinf",
    "float16": "float32",
}
_OTHER_NAME = {
    **_BOTH_WAYS,
    **{b: a for a, b in _BOTH_WAYS.items()},
    "isfinite": "isnan",
    "int32": "int16",
    "inexact": "floating",
    "complexfloating": "floating",
    "nan": "inf",
    "inf": "nan",
}
_KEYWORDS_LEFT_OUT = {
    *("strict", "stacklevel"),
    *("color", "edgecolor", "facecolor", "linewidth", "alpha", "zorder", "width", "label"),
    *("fontsize", "ncols", "loc", "figsize", "layout", "title", "xlabel", "ylabel"),
}


def mutants_of(module: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a module's source, in its order."""
    lines = source.split(b"\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def offset(row: int, column: int) -> int:
        return starts[row - 1] + column

    seen: Counter[tuple[str, ...]] = Counter()
    mutants: list[Mutant] = []
    for place, (node, new, change) in _changes(ast.parse(source)):
        begin = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno, node.end_col_offset)
        if change.startswith("without @"):
            begin -= 1  # the sign itself, which is no part of the node
        text = lines[node.lineno - 1].decode().strip()
        name = (module, place.function, text, change)
        mutants.append(
            Mutant(*name, seen[name], place.rows, source[:begin] + new.encode() + source[end:])
        )
        seen[name] += 1
    return mutants


@dataclasses.dataclass(frozen=True)
class _Place:
    function: str = ""
    rows: tuple[int, int] = (0, 0)


_Change = tuple[Any, str, str]


def _changes(tree: ast.Module) -> Iterator[tuple[_Place, _Change]]:
    yield from _in_body(tree.body, _Place())


def _in_body(body: list[ast.stmt], place: _Place) -> Iterator[tuple[_Place, _Change]]:
    for statement in body:
        yield from _in_statement(statement, place)


def _in_statement(  # noqa: C901, PLR0912, PLR0915 - a case for each kind of statement
    node: ast.stmt, place: _Place
) -> Iterator[tuple[_Place, _Change]]:
    """Yield what may be changed in a statement, with where it stands."""
    here = dataclasses.replace(place, rows=rows_of(node))

    def within(*nodes: ast.AST | None) -> Iterator[tuple[_Place, _Change]]:
        for each in nodes:
            if each is not None:
                rows = (
                    rows_of(each) if isinstance(node, (ast.If, ast.While, ast.For)) else here.rows
                )
                for change in _in_expression(each):
                    yield dataclasses.replace(here, rows=rows), change

    match node:
        case ast.FunctionDef() | ast.ClassDef():
            name = f"{place.function}.{node.name}" if place.function else node.name
            inside = _Place(name, (node.lineno, node.lineno))
            if any("Protocol" in ast.unparse(base) for base in getattr(node, "bases", ())):
                return
            for decorator in node.decorator_list:
                short = ast.unparse(decorator).partition("(")[0]
                yield inside, (decorator, "", f"without @{short}")
                yield from ((inside, change) for change in _in_expression(decorator))
            if isinstance(node, ast.FunctionDef):
                defaults = [*node.args.defaults, *node.args.kw_defaults]
                for default in filter(None, defaults):
                    yield from ((inside, change) for change in _in_expression(default))
            yield from _in_body(node.body, dataclasses.replace(place, function=name))
        case ast.If():
            if ast.unparse(node.test) == "TYPE_CHECKING":
                return
            yield from _condition(node.test, here)
            yield from within(node.test)
            yield from _in_body([*node.body, *node.orelse], place)
        case ast.While():
            yield from _condition(node.test, here)
            yield from within(node.test)
            yield from _in_body(node.body, place)
        case ast.For():
            yield from within(node.iter)
            yield from _in_body(node.body, place)
        case ast.With():
            yield from within(*(item.context_expr for item in node.items))
            yield from _in_body(node.body, place)
        case ast.Try():
            handled = [statement for handler in node.handlers for statement in handler.body]
            yield from _in_body([*node.body, *handled, *node.orelse, *node.finalbody], place)
        case ast.Return():
            if node.value is not None and not _is_none(node.value):
                yield here, (node, "return None", "return None")
                yield from within(node.value)
        case ast.Raise():
            yield here, (node, "pass", "raise removed")
        case ast.Continue():
            yield here, (node, "break", "break")
        case ast.Expr(value=ast.Constant() | ast.Yield()):
            return
        case ast.Expr():
            yield here, (node, "pass", "statement removed")
            if not ast.unparse(node).startswith("warnings.warn"):
                yield from within(node.value)
        case ast.AugAssign():
            if type(node.op) in _OPERATORS:
                new = _OPERATORS[type(node.op)]()
                swapped = ast.unparse(ast.AugAssign(node.target, new, node.value))
                yield here, (node, swapped, swapped)
            yield from within(node.value)
        case ast.Assign():
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if not names & {"__all__", "__version__"} and "TypeVar(" not in ast.unparse(node):
                yield from within(node.value)
        case ast.AnnAssign():
            if ast.unparse(node.annotation) != "TypeAlias":
                yield from within(node.value)
        case _:
            return


def _condition(test: ast.expr, here: _Place) -> Iterator[tuple[_Place, _Change]]:
    if not isinstance(test, ast.Compare | ast.UnaryOp):  # those are negated as expressions
        yield dataclasses.replace(here, rows=rows_of(test)), _negated(test)


def _in_expression(node: ast.AST) -> Iterator[_Change]:
    """Yield what may be changed in an expression, itself first."""
    yield from _here(node)
    match node:
        case ast.JoinedStr():
            return
        case ast.keyword(arg=name) if name in _KEYWORDS_LEFT_OUT:
            return
        case ast.Call() if ast.unparse(node.func) in {"warnings.warn", "TypeVar"}:
            return
        case ast.Lambda():
            yield node.body, "None", f"{_short(node.body)} -> None"
            for default in node.args.defaults:
                yield from _in_expression(default)
            yield from _in_expression(node.body)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _in_expression(child)


def _here(node: ast.AST) -> Iterator[_Change]:  # noqa: C901, PLR0912 - a case for each kind
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                for other in _COMPARISONS[type(operator)]:
                    ops = [*node.ops[:i], other(), *node.ops[i + 1 :]]
                    yield _into(node, ast.Compare(node.left, ops, node.comparators))
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield _into(node, ast.BoolOp(other, node.values))
            for i in range(len(node.values)):
                rest = node.values[:i] + node.values[i + 1 :]
                yield _into(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        case ast.BinOp() if type(node.op) in _OPERATORS and not _is_text(node):
            yield _into(node, ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))
        case ast.UnaryOp():
            yield _into(node, node.operand)
        case ast.IfExp():
            yield _into(node, ast.IfExp(node.test, node.orelse, node.body))
        case ast.comprehension():
            for condition in node.ifs:
                yield _negated(condition)
        case ast.Constant(value=bool()):
            yield _into(node, ast.Constant(not node.value))
        case ast.Constant(value=int()):
            yield _into(node, ast.Constant(node.value + 1))
        case ast.Constant(value=float()):
            yield _into(node, ast.Constant(node.value * 2 or 1.0))
        case ast.Constant(value=str()) if node.value and " " not in node.value:
            yield _into(node, ast.Constant(node.value[::-1] + "_"))
        case ast.Attribute(attr=name) if name in _OTHER_NAME:
            yield _into(node, ast.Attribute(node.value, _OTHER_NAME[name]))
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER_NAME:
            yield _into(node, ast.Call(ast.Name(_OTHER_NAME[name]), node.args, node.keywords))
        case _:
            return


def _into(node: ast.AST, new: ast.AST) -> _Change:
    text = ast.unparse(new)
    return node, f"({text})", f"{_short(node)} -> {_short(new)}"


def _negated(node: ast.expr) -> _Change:
    return node, f"(not ({ast.unparse(node)}))", f"not ({_short(node)})"


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-25:]}"


def rows_of(node: ast.AST) -> tuple[int, int]:
    """Return the first and the last row of a part of a module."""
    return node.lineno, node.end_lineno or node.lineno


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.BinOp) -> bool:
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
    return any(isinstance(p, ast.JoinedStr) or isinstance(p.value, str) for p in parts)


def program(source: bytes) -> bytes:
    """Return what a module's source does, and on which rows, without annotations and docstrings."""
    tree = ast.parse(source)
    rows = [rows_of(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = None
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ...
    return f"{ast.dump(tree)} {rows}".encode()
