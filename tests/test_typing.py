"""What a type checker reports about the installed package, and about calls to it."""

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
API = Path(__file__).with_name("typing_api.py").read_text("utf-8")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("pyright") is None,
        reason="pyright is in the group `check`, which `make check` installs",
    ),
]


@pytest.fixture(scope="module")
def pyright(tmp_path_factory):
    """Return a function that runs pyright beside an installed copy of the package.

    In an editable install, pyright does not require `py.typed` and infers missing annotations, so
    the results would differ from those of users.
    """
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    folders = {"base": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", folders))
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    # A path in a .pth file follows its own folder on the path, so the copy is found first.
    (site / "what_is_installed_here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    # `--verifytypes` ignores `--pythonpath` and uses the first Python on PATH.
    path = os.pathsep.join((sysconfig.get_path("scripts", "venv", folders), os.environ["PATH"]))
    env = {**os.environ, "PATH": path}
    env.pop("PYTHONPATH", None)  # a checkout on it would be checked instead

    def run(cwd, *arguments):
        command = [sys.executable, "-m", "pyright", "--outputjson", *arguments]
        done = subprocess.run(  # noqa: S603, no untrusted arguments
            command, cwd=cwd, env=env, capture_output=True, text=True, check=False
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    return run


def test_every_public_name_has_a_known_type(pyright, tmp_path):
    output = pyright(tmp_path, "--verifytypes", PACKAGE.name, "--ignoreexternal")
    completeness = output["typeCompleteness"]
    modules = {module["name"] for module in completeness["modules"]}
    paths = {path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py")}
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    assert modules == {name for name in names if "._" not in name}
    assert "site-packages" in completeness["pyTypedPath"]
    unknown = {symbol["name"] for symbol in completeness["symbols"] if not symbol["isTypeKnown"]}
    # They return a subclass of a class of Optax, which has no `py.typed`, so pyright does not read
    # the types of that class here. It does in the other test, as in an editor.
    wrappers = {name for name in ols.__all__ if name.startswith("with_")} | {"loss_scale_optimizer"}
    assert {name.rpartition(".")[2] for name in unknown} == {*wrappers, "Guard", "Transformation"}


def test_right_calls_have_their_types_and_wrong_ones_are_rejected(pyright, tmp_path):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]
    settings |= {"include": ["."], "reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "api.py").write_text(API, "utf-8")
    output = pyright(tmp_path)
    assert output["summary"]["filesAnalyzed"] == 1
    assert output["generalDiagnostics"] == []


def test_the_calls_name_every_public_name():
    names = [f"ols.{name}" for name in ols.__all__]
    names += [f"diagnostics.{name}" for name in ols.diagnostics.__all__]
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", API)] == []
