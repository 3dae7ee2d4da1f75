"""What a type checker says about the package, as it is installed, and about calls to it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import optax_lossscale as ols

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "optax_lossscale"
API = Path(__file__).with_name("typing_api.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None,
    reason="pyright is in the group `check`, which `make check` installs",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return an environment that holds a copy of the package, beside what is installed here.

    An editable package is not judged as one that users install: pyright does not ask for its
    `py.typed`, and infers what is not annotated.
    """
    return environment(tmp_path_factory.mktemp("environment"))


def environment(path, package=PACKAGE):
    venv.create(path, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(path)}))
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, site / PACKAGE.name, ignore=caches)
    # A path in a .pth file comes after the folder that it lies in: the copy is found first.
    (site / "what_is_installed_here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return path


def pyright(environment, cwd, *arguments):
    """Run pyright as one who has activated the environment; return what it says as data."""
    # `--verifytypes` takes no heed of `--pythonpath`: the first Python of the PATH is meant.
    binaries = sysconfig.get_path("scripts", "venv", {"base": str(environment)})
    env = os.environ | {"PATH": os.pathsep.join((binaries, os.environ["PATH"]))}
    env.pop("PYTHONPATH", None)  # a checkout on it would be judged instead
    command = [sys.executable, "-m", "pyright", "--outputjson", *arguments]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)  # noqa: S603
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def check_calls(environment, cwd, source):
    """Return what pyright finds in a file, under the settings of the project."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]
    settings |= {"include": ["calls.py"], "reportUnnecessaryTypeIgnoreComment": "error"}
    (cwd / "pyrightconfig.json").write_text(json.dumps(settings))
    (cwd / "calls.py").write_text(source, "utf-8")
    output = pyright(environment, cwd)
    assert output["summary"]["filesAnalyzed"] == 1
    return [
        f"line {finding['range']['start']['line'] + 1}: {finding['message']}"
        for finding in output["generalDiagnostics"]
    ]


def test_every_public_name_has_a_known_type(installed, tmp_path):
    output = pyright(installed, tmp_path, "--verifytypes", "optax_lossscale", "--ignoreexternal")
    completeness = output["typeCompleteness"]
    modules = {module["name"] for module in completeness["modules"]}
    paths = {path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")}
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    assert modules == {name for name in names if "._" not in name}
    assert completeness["pyTypedPath"].startswith(str(installed.resolve()))
    unknown = [symbol["name"] for symbol in completeness["symbols"] if not symbol["isTypeKnown"]]
    assert unknown == []
    assert completeness["completenessScore"] == 1


def test_calls_have_the_types_that_users_rely_on_and_wrong_ones_are_rejected(installed, tmp_path):
    assert check_calls(installed, tmp_path, API.read_text("utf-8")) == []


def test_a_wrong_type_and_a_wrong_call_that_is_accepted_are_found(installed, tmp_path):
    source = (
        "from typing import assert_type\n"
        "import optax_lossscale as ols\n"
        "assert_type(ols.init().loss_scale, float)\n"
        "ols.init(8)  # pyright: ignore[reportArgumentType]\n"
    )
    found = check_calls(installed, tmp_path, source)
    assert [line.partition(":")[0] for line in found] == ["line 3", "line 4"]
    assert "assert_type" in found[0]
    assert "Unnecessary" in found[1]


def test_the_calls_name_every_public_name():
    source = API.read_text("utf-8")
    names = [f"ols.{name}" for name in ols.__all__]
    names += [f"ols.diagnostics.{name}" for name in ols.diagnostics.__all__]
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", source)] == []
