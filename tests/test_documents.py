"""The documents, set-up files and examples agree, and name no machine."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "BUILD.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
]
COMMANDS = [
    "README.md",
    "BUILD.md",
    "CONTRIBUTING.md",
    ".ci/run",
    ".pre-commit-config.yaml",
    ".github/workflows/ci.yml",
]

# A letter stands in brackets so that no pattern matches itself.
NAMES_A_MACHINE = re.compile(
    r"pyp[i]\.org|pythonhoste[d]\.org|registry\.npmj[s]|anacond[a]\.(?:org|com)"
    r"|(?<![\w.~])/(?:wor[k]|roo[t]|hom[e]|User[s]|tmp/ven[v]|op[t]/py\w*)(?![\w-])"
)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def files_of_the_project():
    """List what git tracks, and what it would with `git add --all`."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(  # noqa: S603, no argument comes from outside
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_package_registry_or_a_path_of_a_machine():
    files = files_of_the_project()
    assert ROOT / "Makefile" in files
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        for match in NAMES_A_MACHINE.finditer(path.read_bytes().decode("latin-1"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "https://py" + "pi.org/simple",
        "--index-url https://files.python" + "hosted.org",
        "/wor" + "k/main/README.md",
        "cd /roo" + "t",
        "'/tmp/" + "venv/bin/python'",
        "file:///hom" + "e/someone",
    ],
)
def test_the_search_for_names_of_machines_finds_them(text):
    assert NAMES_A_MACHINE.search(text)


@pytest.mark.parametrize(
    "text", ["a framework/model", "tests/roots", "the /workflows", "../home/x"]
)
def test_the_search_for_names_of_machines_leaves_the_rest(text):
    assert not NAMES_A_MACHINE.search(text)


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) < 150


def test_the_readme_shows_the_minimal_example():
    _docstring, _, code = read("examples/minimal.py").partition('"""\n\n')
    assert f"```python\n{code}```\n" in read("README.md")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_within_the_project_lead_somewhere(name):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", read(name))
    here = (ROOT / name).parent
    assert [target for target in targets if not (here / target).exists()] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_make_target_that_is_named_exists(name):
    named = set(re.findall(r"\bmake ([a-z]+)", read(name)))
    assert named
    assert named <= set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))


def test_continuous_integration_can_be_executed():
    assert os.access(ROOT / ".ci/run", os.X_OK)
