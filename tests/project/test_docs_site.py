"""The documentation site builds without warnings, is complete, and loads from no other host.

Needs the group `docs`, which `make test` does not install.
"""

import json
import re
import zlib
from pathlib import Path

import pytest

import optax_lossscale as ols
import optax_lossscale.flax
import optax_lossscale.keras

for needed in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(needed, reason=f"{needed} is of the group `docs`: `make docs` installs it")

MODULES = ols, ols.diagnostics, ols.flax, ols.keras, ols.testing
DOCS = Path(__file__).parents[2] / "docs"
# As in `make docs`: broken links and missing pictures are warnings, and warnings are errors.
SPHINX = "-m", "sphinx", "-W", "--keep-going", "-n", "-E", "-b", "html"


@pytest.fixture(scope="module")
def site(python, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    python(*SPHINX, DOCS, target, cwd=DOCS.parent)
    return target


def test_every_page_and_every_public_name_is_there(site):
    pages = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")]
    assert Path("api/guards.html") in pages
    assert [page for page in pages if not (site / page).exists()] == []
    # The inventory for links from other projects: four lines of text, then compressed data.
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    entries = {line.split(" ")[0] for line in inventory.splitlines() if " py:" in line}
    for module in MODULES:
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= entries


def test_the_index_of_the_reference_has_a_line_for_every_public_name():
    index = (DOCS / "api/index.md").read_text("utf-8")
    named = re.findall(r"^\| `(?:\w+\.)*(\w+)` \| [A-Z].*[^. ] \|$", index, re.MULTILINE)
    assert named[:2] == ["with_loss_scaling", "value_and_grad"]
    assert {name for module in MODULES for name in module.__all__} - {
        "diagnostics",
        "testing",
    } <= set(named)
    assert len(named) == len(set(named))


def test_a_public_name_leads_to_its_source_and_code_can_be_copied(site):
    linked = "api/guards.html#optax_lossscale.with_skipping"
    assert linked in (site / "order.html").read_text("utf-8")
    page = (site / "api/guards.html").read_text("utf-8")
    assert 'href="../_modules/optax_lossscale/_guard/guard.html#with_loss_scaling"' in page
    source = site / "_modules/optax_lossscale/_guard/guard.html"
    assert 'id="with_loss_scaling"' in source.read_text("utf-8")
    policies = (site / "api/policies.html").read_text("utf-8")
    # Whose classes name the package as their module.
    assert "_loss_scale/policies.html#DynamicLossScale" in policies
    assert "_static/copy.js" in page


SEARCHED = {
    "accumulation": ["accumulate"],
    "api/index": ["glossary"],
    "averages": ["exponential moving average"],
    "bfloat16_state": [
        "8-bit adam", "memory", "mu_dtype", "optimizer memory", "out of memory",
        "stochastic rounding",
    ],
    "casting": [
        "autocast", "automatic mixed precision", "cast", "half precision", "mixed precision",
    ],
    "checkpoints": ["checkpoint", "resume"],
    "diagnostics": [
        "falls to 1", "loss is nan", "loss scale stuck", "nan", "nan loss", "overflow", "stuck",
    ],
    "distributed": ["multi gpu", "multi-gpu", "multi-host"],
    "fine_tuning": ["lora"],
    "flax": ["fp8", "qwix"],
    "install": ["bf16", "compute capability", "fp16", "half_dtype", "t4", "tpu", "v100"],
    "logging": ["wandb"],
    "migration/index": ["migrate"],
    "migration/torch": ["amp", "pytorch"],
    "order": ["gradient clipping"],
    "performance": ["overhead"],
    "recipes": ["remat"],
    "reinforcement_learning": ["rollout"],
    "several_losses": ["two losses"],
    "skipping": ["skip step"],
    "trust": ["trust"],
    "using": ["decoding", "deploy", "export", "inference", "kv cache", "serving"],
    "why": ["do i need loss scaling", "underflow", "why loss scaling"],
}  # fmt: skip


def test_a_word_that_is_searched_for_leads_to_its_page(site):
    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    found = {
        word: [index["docnames"][number] for number, _, main in index["indexentries"][word] if main]
        for words in SEARCHED.values()
        for word in words
    }
    assert found == {word: [page] for page, words in SEARCHED.items() for word in words}


def sidebar(page):
    """Return the parts of the contents beside a page, with the pages of each, also folded ones."""
    tree = page.partition('<div class="sidebar-tree">')[2].partition("</div>\n</div>")[0]
    parts = re.split(r'<p class="caption"[^>]*><span class="caption-text">(.*?)</span>', tree)
    links = [re.findall(r'<a class="reference internal" href="([^"#]+)"', part) for part in parts]
    return dict(zip(parts[1::2], links[2::2], strict=True))


def test_the_contents_have_parts_and_each_page_stands_in_one(site):
    parts = sidebar((site / "index.html").read_text("utf-8"))
    assert parts["Save, log, test, serve"] == [
        "checkpoints.html",
        "logging.html",
        "testing.html",
        "using.html",
    ]
    listed = [page for pages in parts.values() for page in pages]
    assert sorted(listed) == sorted(set(listed))
    pages = {str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md")}
    assert set(listed) == pages - {"index.html"}


def test_the_contents_of_a_page_of_the_reference_list_names_and_no_fields(site):
    page = (site / "api/guards.html").read_text("utf-8")
    listed = re.findall(r'href="#([^"]*)"', page.partition('<div class="toc-tree">')[2])
    assert {"optax_lossscale.with_skipping", "optax_lossscale.GuardState"} <= set(listed)
    assert 'id="optax_lossscale.GuardState.rule_states"' in page
    assert [name for name in listed if ".GuardState." in name or ".SpikeState." in name] == []


def test_the_first_page_shows_the_diff_and_the_picture_whole():
    css = (DOCS / "_static/site.css").read_text("utf-8")
    assert "max-height" not in css  # a picture is as wide as its column
    phone = re.findall(r"^@media \(max-width: 46em\) \{\n(.*?)^\}", css, re.MULTILINE | re.DOTALL)
    assert any(
        re.search(r"\.highlight-diff\b.* pre \{ white-space: pre-wrap", rule) for rule in phone
    )


def test_a_block_that_names_no_language_is_not_coloured_as_python(site):
    pages = {path: path.read_text("utf-8") for path in sorted(site.glob("*.html"))}
    plain = re.findall(r'<div class="highlight-none.*?</pre>', "".join(pages.values()), re.DOTALL)
    assert any("value=loss not finite" in block for block in plain)  # README's rule
    assert [block for block in plain if '<span class="k' in block] == []
    assert [path.name for path, text in pages.items() if "highlight-default" in text] == []


def test_every_example_is_among_the_recipes_with_its_notebook(site):
    recipes = (site / "recipes.html").read_text("utf-8")
    linked = re.findall(r'href="(_downloads/[^"]*\.py|notebooks/[^"]*)"', recipes)
    examples = {path.stem for path in (DOCS.parent / "examples").glob("*.py")}
    assert {Path(link).stem for link in linked if link.endswith(".py")} == examples
    assert {Path(link).stem for link in linked if link.endswith(".ipynb")} == examples
    assert [link for link in linked if not (site / link).exists()] == []


def test_pictures_have_words_and_nothing_is_loaded_from_another_host(site):
    text = "".join(path.read_text("utf-8") for path in sorted(site.rglob("*.html")))
    pictures = re.findall(r"<img [^>]*>", text)
    assert pictures
    assert [picture for picture in pictures if not re.search(r'\balt="[^"]', picture)] == []
    text += "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    loads = r"""<(?:img|link|script|iframe)\b[^>]*\b(?:src|href)=["']|url\(["']?|@import\s*["']"""
    assert re.findall(rf"(?:{loads})(?:data:|[\w./])", text)
    assert re.findall(rf"(?:{loads})(?:https?:)?//[^>\s]*", text) == []
