"""How Sphinx builds the site: `make docs`. The pages are plain Markdown and need none of this."""

import re
import sys
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
pygments_style = "friendly"
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
WORDS = {
    "accumulation": (
        "accumulate",
        "gradient accumulation",
        "microbatch",
        "micro-batch",
        "MultiSteps",
        "batch size",
    ),
    "averages": ("EMA", "exponential moving average", "moving average", "schedule_free"),
    "bfloat16_state": (
        "mu_dtype",
        "optimizer state",
        "optimizer memory",
        "memory",
        "out of memory",
        "OOM",
        "8-bit",
        "8-bit adam",
        "Adafactor",
        "Lion",
    ),
    "casting": (
        "mixed precision",
        "automatic mixed precision",
        "AMP",
        "cast",
        "autocast",
        "half precision",
        "bf16 parameters",
        "preferred_element_type",
        "stored in bfloat16",
        "store parameters",
    ),
    "casting#what-runs-in-half-precision": ("vmap", "x64", "float64"),
    "casting#what-must-stay-in-float32": (
        "attention",
        "flash attention",
        "cuDNN",
        "embedding",
        "ctc_loss",
        "covariance",
        "one-hot",
        "precision highest",
    ),
    "checkpoints": ("checkpoint", "resume", "restore", "Orbax", "npz", "savez", "v2 dtype"),
    "comparison": (
        "Accelerate",
        "Hugging Face",
        "Lightning",
        "DeepSpeed",
        "bitsandbytes",
        "FlashOptim",
        "grampax",
        "quantization",
        "int8",
    ),
    "diagnostics": (
        "NaN",
        "NaN loss",
        "loss is NaN",
        "loss does not decrease",
        "overflow",
        "underflow",
        "infinity",
        "loss explodes",
        "exploding gradients",
        "training unstable",
        "diverges",
        "loss inf",
        "inf loss",
        "bf16 nan",
        "loss scale stuck",
        "stuck",
        "stalled",
        "FAQ",
    ),
    "diagnostics#choose-settings": ("reset loss scale",),
    "diagnostics#find-a-loss-scale": ("vanishing gradients", "gradients are zero"),
    "diagnostics#how-do-i-read-or-set-the-learning-rate": ("inject_hyperparams",),
    "diagnostics#the-loss-scale-falls-to-1": ("falls to 1", "loss scale 1"),
    "diagnostics#the-run-has-stalled": ("stop training early",),
    "diagnostics#which-lines-need-float32": (
        "which layer needs float32",
        "sensitive layers",
        "accuracy",
        "worse than float32",
        "Polygraphy",
    ),
    "distributed": (
        "multi gpu",
        "multi-gpu",
        "multi host",
        "multi-host",
        "data parallel",
        "FSDP",
        "host_platform_device_count",
    ),
    "evidence": ("trust", "tested"),
    "fine_tuning": ("LoRA", "frozen", "adapters"),
    "fine_tuning#some-parameters-of-one-tree": ("multi_transform",),
    "flax": (
        "Linen",
        "NNX",
        "BatchNorm",
        "dropout",
        "only=nnx.Param",
        "compute_dtype",
        "dtype float16",
    ),
    "flax#store-a-model-in-bfloat16": ("param_dtype", "store parameters"),
    "flax#fp8-layers": ("fp8", "Qwix", "Fp8DirectDotGeneralOp", "te.autocast"),
    "gradient_penalty": ("WGAN", "hypergradients", "meta-learning"),
    "index#install-run-test": ("run tests", "make test"),
    "install": ("pip", "CUDA", "Windows", "GPU", "Kaggle", "Colab", "notebook"),
    "install#why-half-precision-may-not-be-faster": ("no speedup", "not faster", "slow"),
    "install#what-is-stable": ("license", "citation", "contribute"),
    "install#which-recipe": (
        "bfloat16",
        "bf16",
        "float16",
        "fp16",
        "tensor core",
        "V100",
        "T4",
        "TPU",
        "compute capability",
        "half_dtype",
        "recipe",
        "7b",
        "Llama",
        "how much memory",
    ),
    "jax": ("jit", "NumPyro", "donate"),
    "jax#ninjax-and-numpyro": ("Ninjax",),
    "jax#with-pure-functions": (
        "LossScaleState fields",
        "losscalestate fields",  # as it is typed: three equal letters are easily missed
        "growth_count",
        "unscale_and_check",
        "pure functions",
    ),
    "logging": ("wandb", "W&B", "TensorBoard"),
    "logging#the-norm-of-the-gradients": ("gradient norm",),
    "master_weights": ("master weights", "bf16 parameters", "remainders"),
    "master_weights#without-masters": ("stochastic rounding", "torchao", "torchtitan"),
    "migration/flax_dynamic_scale": ("DynamicScale",),
    "migration/index": ("migrate", "switch"),
    "migration/jmp": ("JMP",),
    "migration/keras": ("Keras", "stateless_call"),
    "migration/mindspore": ("MindSpore",),
    "migration/torch": ("PyTorch", "torch", "AMP", "GradScaler"),
    "migration/torch#line-by-line": (
        "ReduceLROnPlateau",
        "ReduceOnPlateau",
        "scheduler.step",
        "lr scheduler",
    ),
    "order": ("clip", "gradient clipping", "weight decay", "schedule", "learning rate", "mistakes"),
    "order#silent-mistakes": (
        "must hold exactly one LossScaleState",
        "must hold exactly one losscalestate",  # as above
    ),
    "performance": (
        "cost",
        "overhead",
        "slow",
        "speed",
        "how fast",
        "benchmark",
        "profiling",
        "compile time",
    ),
    "performance#cpu": ("AMX", "CPU", "Xeon", "slow on cpu"),
    "recipes#compute-activations-again-remat": (
        "remat",
        "jax.checkpoint",
        "checkpoint_dots",
        "checkpoint_name",
        "activation memory",
    ),
    "recipes#keep-the-state-in-host-memory-offload": ("offload", "pinned_host"),
    "recipes#muon": ("Muon",),
    "recipes#sweep-learning-rates": (
        "hyperparameter search",
        "sweep",
        "vmap learning rates",
    ),
    "recipes#line-searches": ("L-BFGS", "lbfgs", "line search"),
    "recipes#reinforcement-learning": (
        "RL",
        "PPO",
        "REINFORCE",
        "GRPO",
        "Dreamer",
        "rollout",
        "rewards",
    ),
    "recipes#whole-programs": ("examples", "gallery"),
    "several_losses": ("two losses", "several losses"),
    "several_losses#a-gan": ("GAN",),
    "sharded": ("pmap", "shard_map", "FSDP"),
    "skipping": ("loss spike", "skip bad batch", "skip step", "guard", "rule"),
    "skipping#your-own-rule-and-ranges-of-steps": (
        "custom policy",
        "own loss scale",
        "custom rule",
    ),
    "skipping#skip-spikes": ("warmup",),
    "testing": ("test", "assert", "pytest"),
    "trainers": (
        "Brax",
        "Tunix",
        "FlowJAX",
        "OTT",
        "trainer",
        "PINN",
        "per-example gradients",
        "DP-SGD",
        "Optimistix",
        "neural ODE",
        "Diffrax",
    ),
    "using": ("serving", "inference", "deploy"),
    "using#decode-with-a-cache": ("decoding", "KV cache"),
    "using#export": ("export",),
    "why": ("why loss scaling", "do I need loss scaling"),
}


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
