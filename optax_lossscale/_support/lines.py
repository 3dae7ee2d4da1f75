"""Attribute warnings and reports to lines of the user's code."""

import inspect
import linecache
import os
import sys
import sysconfig
import warnings
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


def warn_once(message: str, given: set[str] | None, key: str = "") -> None:
    """Warn unless `given` is None or contains the message, or its `key`, and add it there.

    A warning that is turned into an error is not added, so that the next call raises too.
    """
    if given is not None and (key or message) not in given:
        warn(message)
        given.add(key or message)


def source_of(*equations: Any) -> str:
    """Return the user's innermost source line, from the first of the equations that has one.

    For some functions, such as `jnp.where` and `jax.checkpoint`, JAX does not record the caller.
    """
    tracebacks = (equation.source_info.traceback for equation in equations)
    for frame in (frame for traceback in tracebacks if traceback for frame in traceback.frames):
        if is_users(frame.file_name):
            line = linecache.getline(frame.file_name, frame.line_num).strip()
            return f"{frame.file_name}:{frame.line_num}" + (f": {line}" if line else "")
    return ""


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
