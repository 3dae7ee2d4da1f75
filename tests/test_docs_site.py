"""The documentation as a site: it builds without a warning, is complete, and nothing is broken.

Needs the group `docs`, which `make test` does not install.
"""

import html.parser
import inspect
import re
import shutil
import subprocess
import sys
import urllib.parse
import zlib
from pathlib import Path

import pytest

import optax_lossscale as ols
import optax_lossscale.flax
import optax_lossscale.interop
import optax_lossscale.keras
import optax_lossscale.testing

for needed in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(needed, reason=f"{needed} is of the group `docs`: `make docs` installs it")

ROOT = Path(__file__).parents[1]
PUBLIC = [
    f"{module.__name__}.{name}"
    for module in (ols, ols.diagnostics, ols.flax, ols.keras)
    for name in module.__all__
]
PUBLIC += [
    f"{module.__name__}.{name}"
    for module in (ols.interop, ols.testing)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if not name.startswith("_") and function.__module__ == module.__name__
]


def build(source, target):
    """Build as `make docs` does, and return whether it worked and what was said."""
    command = ["-m", "sphinx", "-W", "--keep-going", "-n", "-E", "-b", "html"]
    done = subprocess.run(  # noqa: S603, no argument comes from outside
        [sys.executable, *command, source, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    built, said = build(ROOT / "docs", target)
    assert built, said
    return target


class Page(html.parser.HTMLParser):
    """What a page holds, and what it asks for."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.files, self.silent = {""}, [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and "href" in found:
            self.files.append(found["href"])
        if tag in {"script", "img", "iframe", "source"} and "src" in found:
            self.files.append(found["src"])
        if tag == "img" and not found.get("alt"):
            self.silent.append(found.get("src"))


def complaints(site):
    """Return what is wrong with the pages in a folder."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert pages
    wrong = []
    for path, page in pages.items():
        where = path.relative_to(site).as_posix()
        wrong += [f"{where}: the picture {source} has no text" for source in page.silent]
        for url in page.links + page.files:
            scheme, host, target, _, fragment = urllib.parse.urlsplit(url)
            if scheme == "data":
                continue
            if scheme or host:
                if url in page.files:
                    wrong.append(f"{where}: {url} is asked of another host")
                continue
            file = (path.parent / urllib.parse.unquote(target)).resolve() if target else path
            if not file.is_file():
                wrong.append(f"{where}: {url} is not there")
            elif fragment and file in pages and fragment not in pages[file].anchors:
                wrong.append(f"{where}: {url} has no such anchor")
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        for url in re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""", text):
            wrong.append(f"{sheet.name}: {url} is asked of another host")
    return wrong


def entries(site):
    """Return the Python names in the inventory, which other projects link by."""
    inventory = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(inventory.split(b"\n", 4)[4]).decode().splitlines()
    return {line.split(" ")[0] for line in lines if " py:" in line}


def test_every_public_name_has_an_entry_in_the_reference(site):
    assert "optax_lossscale.keras.ema_params" in PUBLIC
    assert [name for name in PUBLIC if name not in entries(site)] == []


def test_every_link_picture_and_anchor_is_there_and_nothing_is_asked_of_another_host(site):
    assert complaints(site) == []


def test_every_page_is_built(site):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert Path("api/flax.md") in pages
    assert [page for page in pages if not (site / page).with_suffix(".html").exists()] == []


def test_names_in_backticks_are_linked_to_the_reference(site):
    page = (site / "order.html").read_text(encoding="utf-8")
    assert "api/optax.html#optax_lossscale.with_loss_scaling" in page
    assert "api/scaling.html#optax_lossscale.tree_where" in page


def test_a_class_of_flax_is_not_linked_to_ours_of_the_same_name(site):
    page = (site / "comparison.html").read_text(encoding="utf-8")
    assert ">DynamicScale<" in page
    assert "#optax_lossscale.flax.DynamicScale" not in page


@pytest.mark.parametrize("name", ["comparison.md", "numerics.md", "design.md", "distributed.md"])
def test_every_test_that_is_named_exists(name):
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / name).read_text())
    assert named
    for file, function in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text or not function, f"{file}::{function}"


# The guards.


def test_a_page_with_a_link_to_nowhere_is_not_built(tmp_path):
    source = tmp_path / "docs"
    source.mkdir()
    for name in ("_static", "images"):
        shutil.copytree(ROOT / "docs" / name, source / name)
    shutil.copy(ROOT / "docs/conf.py", source)
    (source / "index.md").write_text("# A page\n\n[One](#a-page), and [another](#nowhere).\n")
    built, said = build(source, tmp_path / "site")
    assert not built
    assert "'nowhere'" in said
    assert said.count("WARNING") == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('<a href="missing.html">x</a>', "missing.html is not there"),
        ('<a href="../page.html">x</a>', "../page.html is not there"),
        ('<a href="other.html#nowhere">x</a>', "other.html#nowhere has no such anchor"),
        ('<a href="#nowhere">x</a>', "#nowhere has no such anchor"),
        ('<img alt="a curve" src="missing.png">', "missing.png is not there"),
        ('<img src="there.png">', "the picture there.png has no text"),
        ('<img alt="x" src="https://example.org/x.png">', "is asked of another host"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "is asked of another host"),
        ('<script src="//example.org/x.js"></script>', "is asked of another host"),
        ('<link rel="stylesheet" href="foreign.css">', "is asked of another host"),
    ],
)
def test_what_is_broken_is_found(line, complaint, tmp_path):
    if "foreign" in line:
        (tmp_path / "foreign.css").write_text("@import 'https://example.org/font.css';")
    (tmp_path / "there.png").write_bytes(b"")
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "page.html").write_text(f"<html><head></head><body>{line}</body></html>")
    (found,) = complaints(tmp_path)
    assert complaint in found


def test_what_is_whole_is_not_complained_of(tmp_path):
    (tmp_path / "there.png").write_bytes(b"")
    (tmp_path / "page.html").write_text(
        '<h1 id="here">x</h1><a href="#here">x</a><a href="page.html#here">x</a>'
        '<a href="https://example.org">x</a><img alt="a curve" src="there.png">'
    )
    assert complaints(tmp_path) == []
