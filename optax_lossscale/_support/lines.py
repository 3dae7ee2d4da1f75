"""Attribute warnings and reports to lines of the user's code."""

import ast
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LIBRARIES = ("optax_lossscale", "jax", "optax", "flax", "equinox", "haiku", "contextlib")


def warn(message: str) -> None:
    """Warn, with the line of the user's code that called the library."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class GivenWarnings(set[str]):
    """The warnings that a function has given.

    They are compared and hashed by identity, so that the functions that close over them can be
    hashed: solvers such as Optimistix make pytrees of functions, and hash what those close over.
    """

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


class Silence(GivenWarnings):
    """All warnings count as given, so that none is."""

    def __contains__(self, _: object) -> bool:
        """Return True."""
        return True


def warn_once(message: str, given: set[str], key: str = "") -> None:
    """Warn unless `given` contains the message, or its `key`, and add it there.

    A warning that is turned into an error is not added, so that the next call raises too.
    """
    if (key or message) not in given:
        warn(message)
        given.add(key or message)


# What `keep` and `precision_search` call products that only installed packages make.
LIBRARY = "products that only installed packages make"


def source_of(*equations: Any) -> str:
    """Return the user's innermost source line, from the first of the equations that has one.

    It is `file:line: code`, where the code is the whole statement. For some functions, such as
    `jnp.where` and `jax.checkpoint`, JAX does not record the caller. Lines outside of the function
    that this library traces do not count: a search and a training step call it from other lines.
    """
    tracebacks = (equation.source_info.traceback for equation in equations)
    for frame in (frame for traceback in tracebacks if traceback for frame in _inside(traceback)):
        if is_users(frame.file_name):
            code = _statement(frame.file_name, frame.line_num)
            return f"{frame.file_name}:{frame.line_num}" + (f": {code}" if code else "")
    return ""


def _inside(traceback: Any) -> Iterator[Any]:
    """Yield the frames inside of the function that is traced, the innermost first."""
    is_outside = lambda frame: frame.file_name.startswith(_TRACED_BY)  # noqa: E731
    return itertools.takewhile(lambda frame: not is_outside(frame), traceback.frames)


_PACKAGE = Path(__file__).parents[1]
_TRACED_BY = (
    str(_PACKAGE / "_autocast" / "autocast.py"),
    str(_PACKAGE / "diagnostics" / "programs" / "precision.py"),
    str(_PACKAGE / "diagnostics" / "programs" / "runs.py"),
)


def _statement(file_name: str, number: int) -> str:
    """Return the statement that a line belongs to, in one line. A long one is cut and hashed."""
    lines = linecache.getlines(file_name)
    if not 0 < number <= len(lines):
        return ""
    first, last = _statements("".join(lines)).get(number, (number, number))
    code = " ".join(map(str.strip, lines[first - 1 : last]))
    return code if len(code) <= _LONGEST else f"{code[:_LONGEST]}… ({zlib.crc32(code.encode()):x})"


_LONGEST = 160  # characters of a statement in a message


@functools.lru_cache(maxsize=64)
def _statements(code: str) -> dict[int, tuple[int, int]]:
    """Return the first and the last line of the statement that each line of a file belongs to."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # such as the magic commands of a notebook
        return {}
    found: dict[int, tuple[int, int]] = {}
    for node in ast.walk(tree):  # outer statements first
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            # Of a function, a loop or a condition, only the head.
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            found |= dict.fromkeys(range(node.lineno, last + 1), (node.lineno, last))
    return found


def line_key(source: str) -> str:
    """Return what a line from `source_of` is recognized by: the name of its file, and its code.

    So it survives edits elsewhere in the file, a restart and another machine. A cell of a notebook
    has only its code, since its file is named after its text or its execution. If there is no code,
    it is the file and the line's number. `""` is for products that only installed packages make.
    """
    if source == LIBRARY:
        return ""
    match = re.fullmatch(r"(.+?):(\d+)(?:: (.*))?", source, re.DOTALL)
    if not match:
        return source
    path, number, code = match.groups()
    name = re.split(r"[/\\]", path)[-1]
    if not code:
        return f"{name}:{number}"
    code = " ".join(code.split())
    return code if re.search(_NOTEBOOK, path) else f"{name}: {code}"


# The files of cells: `<ipython-input-3-...>`, `<stdin>`, and those of Jupyter, Colab and marimo.
_NOTEBOOK = r"^<|ipykernel_\d+|ipython-input|marimo_\d+"


def is_users(file_name: str) -> bool:
    """Return whether a file is the user's own, not part of Python or an installed package."""
    return not file_name.startswith(_folders_of_libraries())


def is_own(error: BaseException) -> bool:
    """Return whether an exception was raised by this library."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return (
        trace is not None
        and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _LIBRARIES[0]
    )


def _folders_of_libraries() -> tuple[str, ...]:
    """Return the folders of libraries: Python's own, those beside JAX, and editable installs."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    for folder in (Path(file).parent for file in files if file):
        installed = folder.parent.name in ("site-packages", "dist-packages")
        folders.add(str(folder.parent if installed else folder))
    return tuple(folder + os.sep for folder in folders)
