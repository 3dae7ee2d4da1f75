"""The wheel and the sdist: what is in them, what they say, and use of them without the checkout."""

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from test_documents import ROOT, files_of_the_project

import optax_lossscale as ols

NAME = "optax_lossscale"
STEM = f"{NAME}-{ols.__version__}"
INFO = f"{STEM}.dist-info"
# What lies about in a checkout that is worked in, and belongs to nobody else.
LITTER = [
    ".venv/lib/left.py",
    ".nox/newest/left.py",
    ".hypothesis/left",
    ".pytest_cache/left",
    ".coverage",
    "build/left.py",
    "dist/left.whl",
    "output/left.png",
    "left.py",
    "optax_lossscale/_step/__pycache__/left.cpython-311.pyc",
    "tests/__pycache__/left.cpython-311.pyc",
]


def python(*arguments, cwd, executable=sys.executable):
    """Run Python as one who knows nothing of this checkout; return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(executable), *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)  # noqa: S603
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(kind, source, target):
    """Call the build backend as pip does, but with what is installed, and so without a network."""
    code = f"import sys, hatchling.build as backend; print(backend.build_{kind}(sys.argv[1]))"
    target.mkdir()
    return target / python("-c", code, target, cwd=source).split()[-1]


@pytest.fixture(scope="module")
def files():
    return sorted(path.relative_to(ROOT).as_posix() for path in files_of_the_project())


@pytest.fixture(scope="module")
def source(files, tmp_path_factory):
    """Copy the checkout, and leave litter in the copy."""
    path = tmp_path_factory.mktemp("source")
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, path / name)
    for name in LITTER:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"")
    return path


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    return build("sdist", source, tmp_path_factory.mktemp("sdist") / "dist")


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    path = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(path, filter="data")
    return path / STEM


@pytest.fixture(scope="module")
def metadata(wheel):
    """Return what the wheel says of itself; an error if a field is not as the standard has it."""
    with zipfile.ZipFile(wheel) as archive:
        return Metadata.from_email(archive.read(f"{INFO}/METADATA"), validate=True)


@pytest.fixture(scope="module")
def empty(wheel, tmp_path_factory):
    """Install the wheel beside its declared dependencies, and nothing else; return the Python.

    The environment is made by the standard library. The dependencies, and theirs, are linked from
    where they are installed here, which takes no network; `make matrix` installs them anew.
    """
    path = tmp_path_factory.mktemp("empty")
    venv.create(path, with_pip=False)
    executable = Path(sysconfig.get_path("scripts", "venv", {"base": str(path)})) / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(path)}))
    for distribution in needed(requirements_of(wheel)):
        for file in distribution.files or []:
            link = site / file.parts[0]
            if file.parts[0] not in {"..", "__pycache__"} and not link.exists():
                link.symlink_to(Path(distribution.locate_file(file.parts[0])))
    pip = ["-m", "pip", "--disable-pip-version-check", "--python", executable]
    python(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=path)
    return executable


def requirements_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        headers = email.message_from_bytes(archive.read(f"{INFO}/METADATA"))
    return headers.get_all("Requires-Dist", [])


def needed(requirements):
    """Return every distribution that these requirements lead to, those for extras left out."""
    found, asked = {}, [requirements]
    while asked:
        for requirement in map(Requirement, asked.pop()):
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in found:
                distribution = importlib.metadata.distribution(requirement.name)
                found[requirement.name] = distribution
                asked.append(distribution.requires or [])
    return list(found.values())


def test_the_wheel_holds_the_package_its_types_and_its_licence(wheel, files):
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(archive.namelist())
    package = [name for name in files if re.fullmatch(rf"{NAME}/([\w/]+\.py|py\.typed)", name)]
    assert {f"{NAME}/py.typed", f"{NAME}/_step/scale.py"} <= set(package)
    info = [f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")]
    assert names == sorted([*package, *info])
    assert wheel.name == f"{STEM}-py3-none-any.whl"


def test_the_sdist_holds_what_git_does(sdist, files):
    with tarfile.open(sdist) as archive:
        names = sorted(member.name for member in archive.getmembers())
    assert names == sorted(f"{STEM}/{name}" for name in [*files, "PKG-INFO"])
    assert sdist.name == f"{STEM}.tar.gz"


def test_the_sdist_makes_the_same_wheel_to_the_byte(unpacked, wheel, tmp_path):
    again = build("wheel", unpacked, tmp_path / "dist")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_tests_in_the_sdist_run(unpacked):
    arguments = ["-q", "-p", "no:cacheprovider", "tests/test_public_names.py"]
    printed = python("-m", "pytest", *arguments, cwd=unpacked)
    assert re.search(r"\d+ passed", printed)


def test_the_metadata_say_what_the_project_does(metadata):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert metadata.name == NAME
    assert str(metadata.version) == ols.__version__
    assert metadata.summary == project["description"]
    assert str(metadata.requires_python) == project["requires-python"]
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text("utf-8")
    assert metadata.classifiers == project["classifiers"]
    assert "Typing :: Typed" in metadata.classifiers


def test_the_metadata_ask_for_what_the_project_does_and_no_more(metadata):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = {str(Requirement(line)) for line in project["dependencies"]}
    for extra, lines in extras.items():
        asked |= {str(Requirement(f'{line}; extra == "{extra}"')) for line in lines}
    assert {str(requirement) for requirement in metadata.requires_dist} == asked
    assert sorted(metadata.provides_extra) == sorted(extras)


def test_the_classifiers_name_the_pythons_that_are_tested(metadata):
    named = [
        line.rpartition(" ")[2] for line in metadata.classifiers if re.search(r":: 3\.\d+$", line)
    ]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    tested = re.search(r"python: \[(.*)\]", workflow)[1]
    assert named == re.findall(r"3\.\d+", tested)
    assert str(metadata.requires_python) == f">={named[0]}"


def test_the_description_can_be_rendered(wheel, sdist):
    pytest.importorskip("twine", reason="the release checklist in BUILD.md installs twine")
    python("-m", "twine", "check", "--strict", wheel, sdist, cwd=wheel.parent)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("CHANGELOG.md", r"^## \[(.+?)\]"), ("CITATION.cff", r"^version: \"?([^\"\n]+)")],
)
def test_a_document_names_the_version_of_the_package(name, pattern):
    text = (ROOT / name).read_text("utf-8")
    assert re.search(pattern, text, re.MULTILINE)[1] == ols.__version__


def test_the_version_stands_in_the_package_once():
    assigned = [
        path.relative_to(ROOT / NAME).as_posix()
        for path in sorted((ROOT / NAME).rglob("*.py"))
        if re.search(r"^__version__ = ", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert assigned == ["__init__.py"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == f"{NAME}/__init__.py"


def test_it_trains_where_nothing_but_its_dependencies_is_installed(empty, tmp_path):
    code = """
import importlib.metadata, pathlib, sys
import jax, jax.numpy as jnp, optax
import optax_lossscale as ols
import optax_lossscale.interop, optax_lossscale.keras, optax_lossscale.testing

assert pathlib.Path(ols.__file__).is_relative_to(sys.prefix), ols.__file__
assert importlib.metadata.version("optax_lossscale") == ols.__version__
tx = ols.with_loss_scaling(optax.adam(0.1))
w = jnp.ones(3, jnp.float16)
opt_state = tx.init(w)

@jax.jit
def step(w, opt_state, x):
    loss, grads = ols.value_and_grad(
        lambda w: jnp.mean((w * x).astype(jnp.float32) ** 2)
    )(opt_state, w)
    updates, opt_state = tx.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state

for x in (1, 1, 6e4):
    w, opt_state = step(w, opt_state, jnp.float16(x))
state = ols.loss_scale_state(opt_state)
print(int(state.total_skipped), float(state.loss_scale))
"""
    assert python("-c", code, cwd=tmp_path, executable=empty).split() == ["1", "16384.0"]


def test_what_an_extra_brings_is_missed_only_where_it_is_used(empty, tmp_path):
    code = """
import jax.numpy as jnp
import optax_lossscale as ols

exponents = ols.diagnostics.gradient_exponents(jnp.ones(3))
for use in (
    lambda: __import__("optax_lossscale.flax"),
    lambda: ols.diagnostics.plot_gradient_exponents(exponents),
):
    try:
        use()
    except ModuleNotFoundError as error:
        print(error.name.partition(".")[0])
"""
    printed = python("-c", code, cwd=tmp_path, executable=empty)
    assert printed.split() == ["flax", "matplotlib"]
