"""The wheel and the sdist, their use without the checkout, and the versions that are supported."""

import re
import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import optax_lossscale as ols

ROOT = Path(__file__).parents[2]
NAME = "optax_lossscale"
STEM = f"{NAME}-{ols.__version__}"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT, GROUPS = SETTINGS["project"], SETTINGS["dependency-groups"]
# Files that a used checkout may contain and that must not be packed.
LITTER = ".venv/lib/left.py", ".coverage", "dist/left.whl", "output/left.png", "left.py"


@pytest.fixture(scope="module")
def build(files, python, tmp_path_factory):
    """Return a function that builds in a folder, by default in a copy of the checkout with litter.

    It calls the build backend as pip does, but with the installed packages and without a network.
    """
    checkout = tmp_path_factory.mktemp("checkout")
    for name in [*files, *LITTER]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        if name in LITTER:
            (checkout / name).touch()
        else:
            shutil.copy(ROOT / name, checkout / name)

    def run(kind, source=checkout):
        target = tmp_path_factory.mktemp(kind)
        code = f"import sys, hatchling.build as backend; print(backend.build_{kind}(sys.argv[1]))"
        printed, _ = python("-c", code, target, cwd=source)
        return target / printed.split()[-1]

    return run


@pytest.fixture(scope="module")
def wheel(build):
    return build("wheel")


@pytest.fixture(scope="module")
def sdist(build):
    return build("sdist")


def test_the_wheel_holds_the_package_and_its_description(wheel, files):
    package = [name for name in files if re.fullmatch(rf"{NAME}/([\w/]+\.py|py\.typed)", name)]
    assert {f"{NAME}/py.typed", f"{NAME}/_loss_scale/scale.py"} <= set(package)
    info = ["METADATA", "RECORD", "WHEEL", "licenses/LICENSE"]
    assert wheel.name == f"{STEM}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(archive.namelist())
        raw = archive.read(f"{STEM}.dist-info/METADATA")
    assert names == sorted([*package, *(f"{STEM}.dist-info/{name}" for name in info)])

    metadata = Metadata.from_email(raw, validate=True)
    assert (metadata.name, str(metadata.version)) == (NAME, ols.__version__)
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description.startswith(f"# {NAME}\n")
    assert sorted(metadata.provides_extra) == sorted(PROJECT["optional-dependencies"])


def test_the_sdist_holds_what_git_does_and_makes_the_wheel(files, wheel, sdist, build, tmp_path):
    assert sdist.name == f"{STEM}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = sorted(member.name for member in archive.getmembers())
    assert names == sorted(f"{STEM}/{name}" for name in [*files, "PKG-INFO"])
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    again = build("wheel", tmp_path / STEM)
    assert (again.name, again.read_bytes()) == (wheel.name, wheel.read_bytes())


RELATIVE = re.compile(r"""\]\((?!https?:|#)[^)]*\)|(?:src|href)=["'](?!https?:)""")


@pytest.mark.parametrize("address", ["", "https://example.org/name"])
def test_every_link_of_the_long_description_leads_somewhere(address, sdist, build, tmp_path):
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    project = tmp_path / STEM / "pyproject.toml"
    (tmp_path / STEM / "PKG-INFO").unlink()  # it holds the description already
    settings = re.sub(r"\[project\.urls\]\n(.+\n)+", "", project.read_text("utf-8"))
    settings += f'[project.urls]\nRepository = "{address}"\n' if address else ""
    project.write_text(settings, "utf-8")
    with zipfile.ZipFile(build("wheel", tmp_path / STEM)) as archive:
        text = archive.read(f"{STEM}.dist-info/METADATA").decode()
    assert RELATIVE.search((ROOT / "README.md").read_text("utf-8"))
    assert RELATIVE.search(text) is None
    for link in ("raw/{}/docs/images/word_model.png", "blob/{}/docs/why.md"):
        assert (f"]({address}/{link})".format(f"v{ols.__version__}") in text) == bool(address)


def test_the_uploaders_own_check_takes_the_wheel_and_the_sdist(wheel, sdist, python, tmp_path):
    pytest.importorskip("twine", reason="it is of the group `check`: `make check` installs it")
    said, _ = python("-m", "twine", "check", "--strict", wheel, sdist, cwd=tmp_path)
    assert said.count("PASSED") == 2


def test_the_wheel_trains_without_the_extras_and_names_what_they_bring(wheel, python, tmp_path):
    shutil.unpack_archive(wheel, tmp_path, "zip")
    code = """
import sys
sys.modules["flax"] = sys.modules["matplotlib"] = None  # as if they were not installed

import jax.numpy as jnp, optax
import optax_lossscale as ols
import optax_lossscale.keras

tx = ols.with_loss_scaling(optax.adam(0.1))
grads = jnp.array([jnp.inf, 1.0])
_, opt_state = tx.update(grads, tx.init(grads), grads)
print(ols.__file__, float(ols.loss_scale_state(opt_state).loss_scale))
exponents = ols.diagnostics.gradient_exponents(grads)
plot = ols.diagnostics.plot_gradient_exponents
for use, argument in (__import__, "optax_lossscale.flax"), (plot, exponents):
    try:
        use(argument)
    except ModuleNotFoundError as error:
        print(error.name.partition(".")[0])
"""
    printed, _ = python("-c", code, cwd=tmp_path)
    file = str(tmp_path / NAME / "__init__.py")
    assert printed.split() == [file, "16384.0", "flax", "matplotlib"]


def test_a_person_starts_a_release_and_nothing_but_the_build_runs_where_its_files_are_made():
    workflow = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    assert "\non:\n  workflow_dispatch:\n\n" in workflow
    assert workflow.count("id-token: write") == workflow.count("environment: release") == 1
    build = re.search(r"\n  build:\n(.*?)\n\n", workflow, re.DOTALL)[1]
    assert re.findall("run: (.*)", build) == ["make release"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    recipe = re.search(r"^release: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe[1].splitlines()[1:] == ["\t$(NOX) --session build"]
    trial = workflow.index("  trial:\n    needs: build\n")
    assert trial < workflow.index("    needs: [test, trial]\n")


MOVABLE = r"uses: (?!\S+@[0-9a-f]{40} # v[\d.]+\n)\S+"  # anything but a commit and its version


def test_every_action_of_a_workflow_is_a_commit():
    assert re.findall(MOVABLE, f"uses: a/b@v4\nuses: a/c@{40 * 'f'} # v1.2\n") == ["uses: a/b@v4"]
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        assert re.findall(MOVABLE, path.read_text("utf-8")) == [], path.name


def test_documents_name_the_packages_version_and_address():
    assert "version" not in PROJECT  # hatchling reads it from the package
    patterns = {"CHANGELOG.md": r"^## \[(.+?)\]", "CITATION.cff": r"^version: \"?([^\"\n]+)"}
    for name, pattern in patterns.items():
        text = (ROOT / name).read_text("utf-8")
        assert re.search(pattern, text, re.MULTILINE)[1] == ols.__version__, name
    cited = re.search(r"^repository-code: \"?([^\"\n]+)", text, re.MULTILINE)
    assert PROJECT.get("urls", {}).get("Repository") == (cited and cited[1])


def test_the_package_is_called_alpha_until_it_has_run_on_a_gpu():
    has_run = "not yet run on" not in (ROOT / "README.md").read_text("utf-8")
    (status,) = re.findall(r"Development Status :: \d - (\w+)", str(PROJECT["classifiers"]))
    assert (status == "Alpha") != has_run


# --- `make matrix`: the versions that the project supports

PYTHONS = re.findall(r"Python :: (3\.\d+)", str(PROJECT["classifiers"]))


def pins(path, python):
    """Return the versions that a file pins for this Python on Linux, by distribution."""
    environment = {"python_full_version": f"{python}.99", "sys_platform": "linux"}
    lines = (ROOT / path).read_text("utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if not line.lstrip().startswith("#")]
    pinned = [r for r in requirements if r.marker is None or r.marker.evaluate(environment)]
    version = re.compile(r"==([\w.]+)")
    versions = {canonicalize_name(r.name): version.fullmatch(str(r.specifier))[1] for r in pinned}
    assert len(versions) == len(pinned)  # one version of each
    return versions


def asked(*groups):
    # What is no string is another group.
    lines = [line for group in groups for line in GROUPS[group] if isinstance(line, str)]
    lines += PROJECT["dependencies"]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_the_classifiers_name_the_pythons_that_are_tested_and_all_that_is_asked_for_is_pinned():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    assert re.findall(r"3\.\d+", re.search(r"python: \[(.*)\]", workflow)[1]) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    for python in PYTHONS:
        assert asked(*GROUPS) <= pins("constraints.txt", python).keys()
    assert asked("test", "examples") <= pins("constraints-oldest.txt", PYTHONS[0]).keys()


def test_the_oldest_versions_are_those_that_the_project_promises():
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    promised = dict(line.split(">=") for line in lines)
    pinned = pins("constraints-oldest.txt", PYTHONS[0])
    assert {"jax", "jaxlib", "optax", "flax", "matplotlib"} <= promised.keys()
    for name, floor in promised.items():
        assert re.sub(r"(\.0)+$", "", pinned[name]) == re.sub(r"(\.0)+$", "", floor), name


def test_what_cannot_run_on_the_oldest_versions_exists_and_has_a_reason():
    cannot_run = tomllib.loads((ROOT / "tools/not_on_the_oldest.toml").read_text("utf-8"))
    for name, reason in cannot_run.items():
        path, _, test = name.partition("::")
        assert test.partition("[")[0] in (ROOT / path).read_text("utf-8"), name
        assert reason, name
