"""How Sphinx builds the site: `make docs`. The pages are plain Markdown and need none of this."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import optax_lossscale
import optax_lossscale.flax
import optax_lossscale.keras

sys.path.insert(0, str(Path(__file__).parent))
import notebooks

project = "optax_lossscale"
author = "The optax_lossscale authors"
version = release = optax_lossscale.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
default_role = "literal"  # a backtick in a docstring is code; see `LinkNames`
highlight_language = "none"  # a block that names no language is a rule or a drawing

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# Types of other libraries, whose inventories need a network, also as Optax and matplotlib shorten
# them; our type variables; and the classes of what our wrappers return.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|flax|jax|matplotlib|numpy|optax)\..*"),
    ("py:class", r"ArrayTree|Axes|P|optax_lossscale\._state\.Guard"),
    ("py:class", r"optax_lossscale\._\w+\.\w+\.(Tree|Result|Transformation|Value)"),
]

add_module_names = False
toc_object_entries_show_parents = "hide"
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_attr_annotations = False
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"optax_lossscale {version}"
html_favicon = "images/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_search_scorer = str(Path(__file__).parent / "scorer.js")
pygments_style = "default"
pygments_dark_style = "native"

# Public names are known where they are imported from, not in the module that defines them, whose
# source is shown. Public states and policies name the package as their module, for pickles.
SOURCES = {}


def defines(module: ModuleType, name: str, value: object) -> bool:
    """Return whether a module of ours holds the source of a name."""
    if not module.__name__.startswith("optax_lossscale.") or vars(module).get(name) is not value:
        return False
    source = Path(str(module.__file__)).read_text("utf-8")
    return re.search(rf"^(class|def) {name}\b", source, re.MULTILINE) is not None


for room in (
    optax_lossscale,
    optax_lossscale.diagnostics,
    optax_lossscale.flax,
    optax_lossscale.keras,
):
    for name in room.__all__:
        value = getattr(room, name)
        for module in [module for module in sys.modules.values() if defines(module, name, value)]:
            SOURCES[room.__name__, name] = module.__name__
            value.__module__ = room.__name__

# What is linked wherever it stands in backticks: `ols.init`, and `scale_loss` without more; but not
# `init` or `update` alone, which are words of every page.
_TOP = [name for name in optax_lossscale.__all__ if name not in ("diagnostics", "testing")]
_PUBLIC = {name: f"optax_lossscale.{name}" for name in _TOP}
_PUBLIC |= {
    f"diagnostics.{name}": f"optax_lossscale.diagnostics.{name}"
    for name in optax_lossscale.diagnostics.__all__
}
_AMBIGUOUS = {"init", "loss_scale_state", "metrics", "update", "value_and_grad"}
LINKED = {f"ols.{name}": target for name, target in _PUBLIC.items()}
LINKED |= {name.removeprefix("diagnostics."): target for name, target in _PUBLIC.items()}
for name in _AMBIGUOUS:
    del LINKED[name]
_ELSEWHERE = {
    "assert_scaled_once": "optax_lossscale.testing.assert_scaled_once",
    "ema_params": "optax_lossscale.keras.ema_params",
    "loss_scale_optimizer": "optax_lossscale.keras.loss_scale_optimizer",
}
LINKED |= _ELSEWHERE | {target: target for target in _ELSEWHERE.values()}
# Only in full: Flax's own is spoken of as often.
LINKED |= {"optax_lossscale.flax.TrainState": "optax_lossscale.flax.TrainState"}

# What is searched for, by the page or section that answers it.
WORDS = tomllib.loads(Path(__file__).with_name("search_words.toml").read_text("utf-8"))


class LinkNames(SphinxTransform):
    """Links a public name in backticks to its entry in the reference.

    Not where others' classes of the same names are spoken of.
    """

    default_priority = 500

    def apply(self, **kwargs: object) -> None:
        """Replace each literal that is such a name by a reference to it."""
        del kwargs
        if self.env.docname.startswith("migration"):
            return
        for literal in list(self.document.findall(nodes.literal)):
            target = LINKED.get(literal.astext())
            if target is None or isinstance(
                literal.parent, (nodes.reference, nodes.title, addnodes.pending_xref)
            ):
                continue
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True
            )
            literal.replace_self(link)
            link += literal


class FindWords(SphinxTransform):
    """Puts the section that answers a search first, where its title has other words."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        """Give the section entries in the index, which the search ranks above titles."""
        del kwargs
        sections = list(self.document.findall(nodes.section))
        for place, words in WORDS.items():
            page, _, anchor = place.partition("#")
            if page == self.env.docname and sections:
                named = [section for section in sections if anchor in section["ids"]]
                (section,) = named if anchor else sections[:1]
                for word in words:
                    entry = ("single", word, section["ids"][0], "main", None)
                    section.insert(1, addnodes.index(entries=[entry]))


class JoinPercents(SphinxTransform):
    """Keeps a number and its percent sign on one line."""

    default_priority = 500

    def apply(self, **kwargs: object) -> None:
        """Replace the space before each percent sign of the prose."""
        del kwargs
        for text in list(self.document.findall(nodes.Text)):
            if " %" in text and not isinstance(text.parent, (nodes.literal, nodes.literal_block)):
                text.parent.replace(text, nodes.Text(re.sub(r"(?<=\d) %", "\u00a0%", text)))


class LeaveFieldsOut(SphinxTransform):
    """Leaves the fields of a state or a report out of the contents beside its page."""

    default_priority = 500

    def apply(self, **kwargs: object) -> None:
        """Mark each attribute as Sphinx marks what has no entry there."""
        del kwargs
        for entry in self.document.findall(addnodes.desc):
            if entry["objtype"] == "attribute":
                entry["no-contents-entry"] = True


class LinkNotebooks(SphinxTransform):
    """Links the notebook of an example beside the example."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        """Add a link after each link to an example on the page of recipes."""
        del kwargs
        if self.env.docname != "recipes":
            return
        for link in list(self.document.findall(addnodes.download_reference)):
            target = f"notebooks/{Path(link['reftarget']).stem}.ipynb"
            notebook = nodes.reference("", "notebook", refuri=target)
            link.parent.insert(link.parent.index(link) + 1, [nodes.Text(", "), notebook])


def write_notebooks(app: Sphinx, exception: Exception | None) -> None:
    """Put a notebook of each example into the site."""
    if exception is None and app.builder.format == "html":
        notebooks.write(Path(app.outdir) / "notebooks")


def source_of(app: Sphinx, module: str, name: str) -> str | None:
    """Return the module that defines a public name."""
    del app
    return SOURCES.get((module, name.partition(".")[0]))


def keep_bars(*event: Any) -> None:
    """Let the bars of a magnitude in a docstring be bars; between two of them is a substitution."""
    lines = event[-1]
    lines[:] = [line.replace("|g|", r"\|g\|") for line in lines]


def setup(app: Sphinx) -> None:
    """Add what is ours."""
    app.add_transform(LinkNames)
    app.add_transform(FindWords)
    app.add_transform(LeaveFieldsOut)
    app.add_transform(LinkNotebooks)
    app.add_transform(JoinPercents)
    app.connect("build-finished", write_notebooks)
    app.connect("viewcode-follow-imported", source_of)
    app.connect("autodoc-process-docstring", keep_bars)
