"""Test the package with the newest and the oldest supported versions: `make matrix`.

Only `make test-pages` covers the examples, benchmarks, documents and packaging (tests/project).
`make release` runs the session `build`, and `make trial` the session `trial`.

Arguments after `--` go to pytest: `make matrix MATRIX="-s oldest -- tests/loss_scale"`.
"""

import tomllib
from pathlib import Path

import nox

nox.options.download_python = "never"
nox.options.reuse_venv = "yes"  # pip updates an environment when the pins change
nox.options.sessions = ["newest", "oldest"]

PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """Test the versions in constraints.txt, the newest for each Python."""
    _test(session, "constraints.txt")


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """Test constraints-oldest.txt on the oldest Python: half of it has no wheels for later ones."""
    cannot_run = tomllib.loads(Path("tools/not_on_the_oldest.toml").read_text("utf-8"))
    _test(
        session,
        "constraints-oldest.txt",
        *(f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in cannot_run),
    )


@nox.session(python=PYTHONS[0], reuse_venv=False)
def build(session: nox.Session) -> None:
    """Build the sdist and the wheel in an environment with nothing else."""
    session.install("--constraint", "constraints.txt", "hatchling")
    session.run("python", "-m", "hatchling", "build")


@nox.session(python=PYTHONS, reuse_venv=False)
def trial(session: nox.Session) -> None:
    """Install the wheel into an empty environment, as users will, and train with it."""
    (wheel,) = Path("dist").glob("*.whl")
    session.install("--constraint", "constraints.txt", f"{wheel}[flax]")
    script = Path("examples/minimal.py").resolve()
    session.chdir(session.create_tmp())  # so that the checkout cannot be imported
    session.run("python", "-W", "error", str(script))
    session.run("python", "-W", "error", "-c", "import optax_lossscale.flax")


def _test(session: nox.Session, pins: str, *arguments: str) -> None:
    session.install("--constraint", pins, "--upgrade", "pip")
    session.install("--constraint", pins, "--group", "test", "--editable", ".")
    session.run("python", "-c", "import jax; jax.print_environment_info()")
    # Each file runs in one worker, since the blocks of a document build on each other.
    workers = ("-n", "2", "--dist", "loadfile")
    arguments = ("-m", "", "--ignore=tests/project", *arguments, *session.posargs)
    session.run("python", "-m", "pytest", *workers, *arguments)
