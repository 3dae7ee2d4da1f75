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
    assert Path("api/core.html") in pages
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
    assert "api/core.html#optax_lossscale.with_skipping" in (site / "order.html").read_text("utf-8")
    page = (site / "api/core.html").read_text("utf-8")
    assert 'href="../_modules/optax_lossscale/_guard/guard.html#with_loss_scaling"' in page
    source = site / "_modules/optax_lossscale/_guard/guard.html"
    assert 'id="with_loss_scaling"' in source.read_text("utf-8")
    assert (
        "_loss_scale/policies.html#DynamicLossScale" in page
    )  # which names the package as its module
    assert "_static/copy.js" in page


SEARCHED = {
    "averages": ["exponential moving average"],
    "bfloat16_state": ["mu_dtype", "optimizer memory", "stochastic rounding"],
    "casting": ["mixed precision"],
    "checkpoints": ["resume"],
    "diagnostics": ["falls to 1", "nan", "nan loss", "overflow"],
    "fine_tuning": ["lora"],
    "install": ["bf16", "fp16"],
    "logging": ["wandb"],
    "migration/index": ["migrate"],
    "migration/torch": ["amp", "pytorch"],
    "order": ["gradient clipping"],
    "performance": ["overhead"],
    "recipes": ["remat"],
    "reinforcement_learning": ["rollout"],
    "several_losses": ["two losses"],
    "trust": ["trust"],
}


def test_a_word_that_is_searched_for_leads_to_its_page(site):
    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    found = {
        word: [index["docnames"][number] for number, _, main in index["indexentries"][word] if main]
        for words in SEARCHED.values()
        for word in words
    }
    assert found == {word: [page] for page, words in SEARCHED.items() for word in words}


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
