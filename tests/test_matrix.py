"""The script behind `make matrix`: what it finds, runs, reports and returns."""

import importlib
import importlib.metadata
import os
import re
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


sys.path.insert(0, str(ROOT / "tools"))
matrix = importlib.import_module("matrix")


def pins(path):
    lines = (ROOT / path).read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def normalized(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """Make the environment of one cell from what is installed here, which takes no network."""
    chosen = matrix.Cell("newest", HERE)
    monkeypatch.setattr(matrix, "CELLS", (chosen,))
    path = tmp_path / "environments" / chosen.name
    venv.create(path, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(path)}))
    (site / "what_is_installed_here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    wanted = matrix.stamp(chosen, matrix.find_interpreter(HERE))
    (path / "made.txt").write_text(wanted, "utf-8")
    return chosen


def run(tmp_path, *tests, arguments=()):
    folders = ["--folder", str(tmp_path / "environments"), "--output", str(tmp_path / "output")]
    paths = ["--tests", *map(str, tests)] if tests else []
    return matrix.main([*folders, "--workers", "0", *arguments, *paths])


def write(path, *lines):
    path.write_text("\n".join([*lines, ""]), "utf-8")
    return path


def test_the_newest_run_on_every_python_and_the_oldest_on_the_oldest():
    names = [cell.name for cell in matrix.CELLS]
    assert names == ["newest-3.11", "newest-3.12", "newest-3.13", "oldest-3.11"]


def test_every_python_that_the_project_names_has_a_cell():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [re.search(r":: (3\.\d+)$", line) for line in project["classifiers"]]
    assert [match[1] for match in named if match] == list(matrix.PYTHONS)
    assert project["requires-python"] == f">={matrix.PYTHONS[0]}"


def test_the_oldest_versions_are_those_that_the_project_promises():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    promised = dict(line.split(">=") for line in lines)
    pinned = pins("tools/oldest.txt")
    assert {"jax", "jaxlib", "optax", "flax", "matplotlib"} <= promised.keys()
    for name, floor in promised.items():
        assert re.sub(r"(\.0)+$", "", pinned[name]) == re.sub(r"(\.0)+$", "", floor), name


def test_the_oldest_versions_pin_all_that_the_tests_need():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    asked = [line for line in groups["test"] + groups["examples"] if isinstance(line, str)]
    names = {normalized(re.match(r"[\w.-]+", line)[0]) for line in asked}
    assert names <= {normalized(name) for name in pins("tools/oldest.txt")}


def test_what_is_left_out_exists_and_has_a_reason():
    for name, reason in matrix.NOT_ON_THE_OLDEST.items():
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert test.partition("[")[0] in (ROOT / path).read_text("utf-8"), name
        assert reason, name


def test_only_the_oldest_leave_something_out(monkeypatch):
    monkeypatch.setattr(matrix, "NOT_ON_THE_OLDEST", {"tests/a.py": "", "tests/b.py::test_c": ""})
    assert matrix.left_out(matrix.Cell("newest", "3.11")) == []
    assert matrix.left_out(matrix.Cell("oldest", "3.11")) == [
        "--ignore=tests/a.py",
        "--deselect=tests/b.py::test_c",
    ]


def test_an_interpreter_is_found_behind_one_that_does_not_run(tmp_path, monkeypatch):
    broken, other, working = (tmp_path / name for name in ("broken", "other", "working"))
    for folder, does in (
        (broken, "exit 1"),
        (other, "echo 3.98"),  # another version than its name says
        (working, "echo 3.99"),
    ):
        folder.mkdir()
        write(folder / "python3.99", "#!/bin/sh", does).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (broken, other, working))))
    assert matrix.find_interpreter("3.99") == working / "python3.99"


def test_an_interpreter_is_found_among_those_of_pyenv(tmp_path, monkeypatch):
    prefix = tmp_path / "versions" / "3.99.10"
    (prefix / "bin").mkdir(parents=True)
    write(prefix / "bin" / "python", "#!/bin/sh", "echo 3.99").chmod(0o755)
    write(
        tmp_path / "pyenv",
        "#!/bin/sh",
        'case "$1 $2" in',
        '"versions --bare") printf "3.9.1\\n3.99.10\\n3.999.1\\n" ;;',
        f'"prefix 3.99.10") echo {prefix} ;;',
        "*) exit 1 ;;",
        "esac",
    ).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert matrix.find_interpreter("3.99") == prefix / "bin" / "python"
    assert matrix.find_interpreter("3.97") is None


def test_a_missing_interpreter_is_reported_and_fails_with_strict_alone(
    tmp_path, monkeypatch, capsys, cell
):
    monkeypatch.setattr(matrix, "CELLS", (cell, matrix.Cell("oldest", "3.97")))
    passing = write(tmp_path / "test_passing.py", "def test_one(): pass")
    assert run(tmp_path, passing) == 0
    assert "| oldest-3.97 | missing |" in capsys.readouterr().out
    assert "| oldest-3.97 | missing |" in (tmp_path / "output" / "table.md").read_text("utf-8")
    assert run(tmp_path, passing, arguments=["--strict"]) == 1


def test_a_matrix_of_which_nothing_ran_has_not_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "CELLS", (matrix.Cell("newest", "3.97"),))
    assert run(tmp_path) == 1


def test_a_cell_that_does_not_exist_is_refused(tmp_path, capsys):
    assert run(tmp_path, arguments=["--only", "newest-2.7"]) == 1
    assert "newest-3.13" in capsys.readouterr().out


def test_a_cell_says_what_passed_and_on_which_versions(tmp_path, cell, capsys):
    tests = write(
        tmp_path / "test_two.py",
        "import pytest",
        "def test_one(): pass",
        "def test_two(): pytest.skip('no reason')",
    )
    assert run(tmp_path, tests) == 0
    header, _, row = [
        line.strip("| ").split(" | ")
        for line in (tmp_path / "output" / "table.md").read_text("utf-8").splitlines()
    ]
    says = dict(zip(header, row, strict=True))
    assert says["cell"] == cell.name
    assert says["result"] == "passed"
    assert (says["passed"], says["failed"], says["skipped"]) == ("1", "0", "1")
    assert says["jax"] == importlib.metadata.version("jax")
    assert says["Python"].startswith(HERE)
    assert "1 passed, 1 skipped" in (tmp_path / "output" / f"{cell.name}.log").read_text("utf-8")
    assert f"{cell.name}: passed" in capsys.readouterr().out


def test_a_cell_in_which_a_test_fails_has_failed(tmp_path, cell, capsys):
    failing = write(tmp_path / "test_failing.py", "def test_one(): assert False")
    assert run(tmp_path, failing) == 1
    assert f"| {cell.name} | failed |" in capsys.readouterr().out


def test_an_environment_that_cannot_be_made_breaks_the_cell_and_not_the_run(
    tmp_path, monkeypatch, capsys, cell
):
    # A stamp of another set of versions: the environment is made anew, by a Python that cannot.
    (tmp_path / "environments" / cell.name / "made.txt").write_text("", "utf-8")
    write(tmp_path / "python", "#!/bin/sh", "echo no space left", "exit 1").chmod(0o755)
    monkeypatch.setattr(matrix, "find_interpreter", lambda _: tmp_path / "python")
    assert run(tmp_path) == 1
    assert f"| {cell.name} | broken |" in capsys.readouterr().out
    assert not (tmp_path / "environments" / cell.name).exists()
    assert "no space left" in (tmp_path / "output" / f"{cell.name}.log").read_text("utf-8")


@pytest.mark.parametrize("changed", ["constraints.txt", "pyproject.toml"])
def test_an_environment_is_made_anew_when_what_it_depends_on_has_changed(
    tmp_path, monkeypatch, changed
):
    for name in ("constraints.txt", "pyproject.toml"):
        write(tmp_path / name, "before")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    arguments = (matrix.Cell("newest", HERE), Path(sys.executable))
    before = matrix.stamp(*arguments)
    assert matrix.stamp(*arguments) == before
    write(tmp_path / changed, "after")
    assert matrix.stamp(*arguments) != before


def test_the_list_names_every_cell_and_starts_nothing(tmp_path, capsys):
    assert run(tmp_path, arguments=["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{cell.name}: " in printed for cell in matrix.CELLS)
    assert f"newest-{HERE}: missing" not in printed
    assert not (tmp_path / "output").exists()
