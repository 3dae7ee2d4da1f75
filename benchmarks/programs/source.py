"""Public programs: where they are, what is changed in them, and what replaces their libraries."""

import contextlib
import difflib
import importlib
import importlib.machinery
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import page

RESULTS = page.RESULTS / "programs.json"


class Program(NamedTuple):
    """A program that others wrote, and how it is trained.

    Attributes:
      name: What the table calls it, and after a colon a result that is no loss.
      repository: Its owner and name on GitHub.
      file: The file that is changed.
      changes: What is changed in its files, with marks: «new» or «new|old». Each line that differs
        counts.
      run: Trains it, and returns a result other than the last losses, or None.
      license: What its authors allow.
      settings: What else is replaced: its size, its data, and names that newer libraries miss.
      also: Further files or folders that it reads.
      devices: The number of devices on which it runs.
      own: The authors' own setting for half precision, if they have one.
      unsuited: The ways of training that it should not use.
      reason: Why, from what was measured, or what else the table does not show.
    """

    name: str
    repository: str
    file: str
    changes: Sequence[str]
    run: Callable[["Source"], float | None]
    settings: Mapping[str, str] = {}
    also: Sequence[str] = ()
    devices: int = 1
    license: str = "Apache-2.0"
    own: str = ""
    unsuited: Sequence[str] = ()
    reason: str = ""


class Source(NamedTuple):
    """The files of a program, as they are trained.

    Attributes:
      root: The folder that holds them.
      file: The changed one.
      library: The changed lines call it `ols`.
      half: The changed lines call it `half`: the dtype of matrix products.
      stored: The changed lines call it `stored`: the dtype of parameters.
      own: Whether to turn on the authors' own half precision.
      large: Settings of a model of the authors' own size. Without any, it is small.
    """

    root: Path
    file: str
    library: Any
    half: str
    stored: str
    own: bool = False
    large: Mapping[str, Any] = {}

    def module(self, name: str = "") -> Any:
        """Import a module beside the changed file, which is the default."""
        path = self.root / self.file
        sys.path.insert(0, str(path.parent))
        return importlib.import_module(name or path.stem)

    def package(self, name: str) -> Any:
        """Import a module by its name from the root of the repository."""
        sys.path.insert(0, str(self.root))
        return importlib.import_module(name)

    def execute(self) -> dict[str, Any]:
        """Execute the changed file up to a `raise StopIteration`, and return its names."""
        path = self.root / self.file
        names: dict[str, Any] = {"__name__": path.stem}
        with contextlib.suppress(StopIteration):
            exec(compile(path.read_text(), path, "exec"), names)  # noqa: S102
        return names


def git(folder: Path, *arguments: str) -> bytes:
    """Return what a command of Git prints about the repository in the folder."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603


def find(folder: Path, repository: str) -> Path:
    """Return the repository's checkout or Git directory in the folder, however it is named."""
    owner, name = repository.split("/")
    names = f"{owner}+{name}/repo", f"{owner}+{name}", f"{owner}/{name}", name, f"{name}.git"
    for path in (folder / found for found in names):
        if any((path / entry).exists() for entry in (".git", "HEAD")):
            return path
    raise FileNotFoundError(f"no checkout of {repository} in {folder}")


def commit(folder: Path) -> str:
    """Return the commit of a repository."""
    return git(folder, "rev-parse", "HEAD").decode().strip()


def library() -> str:
    """Return the last commit that changed this library, and whether its files differ from it."""
    here, package = Path(__file__).parents[2], "optax_lossscale"
    changed = git(here, "status", "--porcelain", "--", package)
    sha = git(here, "log", "-1", "--format=%h", "--abbrev=8", "--", package).decode().strip()
    return f"{sha}, with changes" if changed else sha


def read(file: Path) -> dict[str, Any]:
    """Return the results in a file: of the programs, and of their memory."""
    return json.loads(file.read_text()) if file.exists() else {"programs": {}, "memory": {}}


def extract(program: Program, folder: Path, root: Path) -> int:
    """Write the program to `root` with its changes, and return the number of changed lines."""
    repository = find(folder, program.repository)
    names = program.file, *program.also
    form = "--format=%(objecttype) %(path)"
    listed = git(repository, "ls-tree", "-r", "-z", form, "HEAD", *names).decode()
    texts: dict[Path, str] = {}
    for name in re.findall(r"blob ([^\0]+)", listed):  # submodules are no files
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = git(repository, "show", f"HEAD:{name}")
        path.write_bytes(content)
        if path.suffix == ".ipynb":
            texts[path] = code(content.decode())
        elif path.suffix == ".py":
            texts[path] = content.decode()
    sized = replace(texts, program.settings)
    changed = replace(sized, dict(map(change, program.changes)))
    for path, text in changed.items():
        path.write_text(text)
    lines = sum(new_lines(sized[path], text) for path, text in changed.items())
    return lines + 1  # one imports the library


def code(notebook: str) -> str:
    """Return the code of a notebook, without the lines that are for the notebook itself."""
    cells = json.loads(notebook)["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return re.sub(r"^[%!].*$", "", code, flags=re.MULTILINE)


def change(marked: str) -> tuple[str, str]:
    """Return a part of a program before and after the change that its marks show."""
    mark = re.compile(r"«([^|»]*)\|?([^»]*)»")
    return mark.sub(r"\2", marked), mark.sub(r"\1", marked)


def replace(texts: Mapping[Path, str], pairs: Mapping[str, str]) -> dict[Path, str]:
    """Return the texts with each of these replaced. One or more must hold it."""
    texts = dict(texts)
    for old, new in pairs.items():
        if not any(old in text for text in texts.values()):
            raise ValueError(f"another version of the program, which has no {old!r}")
        texts = {path: text.replace(old, new) for path, text in texts.items()}
    return texts


def new_lines(before: str, after: str) -> int:
    """Return the number of lines that are new or changed."""
    if before == after:
        return 0
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return sum(line.startswith("+ ") for line in lines)


def stand_in(*names: str, **attributes: Any) -> None:
    """Let modules that load data or write logs be imported, and do nothing but these attributes."""
    for name in names:
        parents = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
        for parent in parents:
            with contextlib.suppress(ImportError):
                importlib.import_module(parent)
            sys.modules.setdefault(parent, _Nothing(parent))
        sys.modules.setdefault(name, _Nothing(name))
        vars(sys.modules[name]).update(attributes)


class _Nothing(ModuleType):
    """A module whose every name is a mock."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        """Return the module of this name, or a mock."""
        if name.startswith("__"):
            raise AttributeError(name)
        found = sys.modules.get(f"{self.__name__}.{name}")
        vars(self)[name] = mock.MagicMock() if found is None else found
        return vars(self)[name]
