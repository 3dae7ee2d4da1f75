"""`make matrix` tests the versions that the project supports."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PYTHONS = re.findall(r"Python :: (3\.\d+)", str(PROJECT["project"]["classifiers"]))


def pins(path, python):
    """Return the versions that a file pins for this Python on Linux, by distribution."""
    environment = {"python_full_version": f"{python}.99", "sys_platform": "linux"}
    lines = (ROOT / path).read_text("utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if not line.lstrip().startswith("#")]
    pinned = [r for r in requirements if r.marker is None or r.marker.evaluate(environment)]
    versions = {
        canonicalize_name(r.name): re.fullmatch(r"==([\w.]+)", str(r.specifier))[1] for r in pinned
    }
    assert len(versions) == len(pinned)  # one version of each
    return versions


def asked(*groups):
    entries = [entry for group in groups for entry in PROJECT["dependency-groups"][group]]
    lines = [entry for entry in entries if isinstance(entry, str)]  # not another group
    lines += PROJECT["project"]["dependencies"]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_the_classifiers_name_the_pythons_that_are_tested_and_all_that_is_asked_for_is_pinned():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    assert re.findall(r"3\.\d+", re.search(r"python: \[(.*)\]", workflow)[1]) == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    for python in PYTHONS:
        assert asked(*PROJECT["dependency-groups"]) <= pins("constraints.txt", python).keys()
    assert asked("test", "examples") <= pins("constraints-oldest.txt", PYTHONS[0]).keys()


def test_the_oldest_versions_are_those_that_the_project_promises():
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
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
