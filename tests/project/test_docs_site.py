"""The documentation site builds without warnings, is complete, and loads from no other host.

Needs the group `docs`, which `make test` does not install.
"""

import json
import operator
import re
import shutil
import subprocess
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


def test_the_index_of_the_reference_has_a_line_for_every_public_name(site):
    index = (site / "api/index.html").read_text("utf-8")
    row = r'href="\w+\.html#([\w.]+)"[^\n]*>(\w+)</span></code></a></p></td>\n<td><p>[A-Z].*\.</p>'
    named = dict(re.findall(row, index))
    public = {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__}
    missing = (
        public - {f"optax_lossscale.{name}" for name in ("diagnostics", "testing")} - set(named)
    )
    assert missing == {"optax_lossscale.LossScaleLike"}  # is no class or function; in a sentence
    assert all(target.endswith(f".{shown}") for target, shown in named.items())


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


# What people type, and the pages that answer it.
SEARCHED = {
    "mixed precision, automatic mixed precision, autocast, half precision, cast":
        "casting why index",
    "amp": "casting migration/torch index",
    "gradscaler, torch, pytorch": "migration/torch",
    "fp16, bf16, t4, v100, compute capability, half_dtype, tpu": "install",
    "loss is nan, nan, nan loss, loss does not decrease, stuck, falls to 1": "diagnostics",
    "overflow": "diagnostics",
    "underflow": "diagnostics why",
    "loss explodes, training unstable, exploding gradients, diverges, inf loss, loss inf":
        "diagnostics",
    "vanishing gradients, gradients are zero, bf16 nan": "diagnostics",
    "loss spike, skip bad batch, skip step": "skipping",
    "stop training early, reset loss scale, loss scale 1":
        "diagnostics skipping logging checkpoints api/policies",
    "warmup": "skipping diagnostics order",
    "gradient norm": "logging skipping",
    "out of memory, optimizer state, mu_dtype, 8-bit, 8-bit adam, memory": "bfloat16_state",
    "bitsandbytes, flashoptim, grampax": "comparison bfloat16_state",
    "stochastic rounding, torchao, torchtitan": "master_weights",
    "master weights, bf16 parameters": "master_weights casting",
    "preferred_element_type": "casting",
    "remat, checkpoint_dots, checkpoint_name, activation memory, offload, pinned_host": "recipes",
    "gradient clipping, weight decay, schedule": "order",
    "learning rate": "order logging diagnostics",
    "gradient accumulation, accumulate, microbatch, batch size": "accumulation",
    "ema, moving average, exponential moving average, schedule_free": "averages",
    "checkpoint, resume, orbax": "checkpoints",
    "wandb, tensorboard, logging": "logging",
    "pmap, shard_map, fsdp, multi gpu, multi-host, host_platform_device_count":
        "distributed sharded",
    "jit, equinox, haiku, numpyro": "jax",
    "flax, nnx, batchnorm, dropout, only=nnx.Param": "flax",
    "compute_dtype, dtype float16": "flax casting",
    "param_dtype, stored in bfloat16, store parameters": "flax casting",
    "keras, stateless_call": "migration/keras",
    "mindspore, deepspeed config": "migration/index",
    "jmp": "migration/jmp",
    "dynamicscale": "migration/flax_dynamic_scale",
    "lora, frozen, fine-tuning, adapters": "fine_tuning",
    "serving, inference, deploy, decoding, kv cache, export": "using",
    "fp8, qwix, fp8directdotgeneralop, te.autocast": "flax",
    "attention, cudnn, flash attention, embedding, ctc_loss, covariance, one-hot": "casting",
    "precision highest": "casting",
    "which layer needs float32, sensitive layers, accuracy, worse than float32, polygraphy":
        "diagnostics",
    "speed, overhead, how fast, cost": "performance",
    "amx, cpu, xeon, slow on cpu": "performance install",
    "benchmark, profiling, compile time": "performance",
    "no speedup, not faster, slow": "performance install",
    "rl, ppo, dreamer, rollout, rewards": "recipes",
    "gan, several losses": "several_losses",
    "gradient penalty, wgan": "gradient_penalty",
    "adafactor, lion": "bfloat16_state",
    "muon": "recipes casting",
    "lbfgs, line search": "recipes",
    "deepspeed, lightning, hugging face, accelerate": "comparison",
    "why loss scaling, do i need loss scaling": "why",
    "test, assert, pytest": "testing",
    "trust": "evidence",
    "migrate": "migration/index",
    "kaggle, colab, notebook": "install",
    "7b, llama, how much memory": "install",
    "reduceonplateau, reducelronplateau, scheduler.step, lr scheduler": "migration/torch",
    "custom policy, own loss scale, custom rule": "api/policies api/guards skipping",
    "run tests, make test": "index",
    "losscalestate fields, lossscalestate fields, growth_count": "jax checkpoints",
    "unscale_and_check": "jax checkpoints",
    "must hold exactly one losscalestate, must hold exactly one lossscalestate":
        "order diagnostics",
    "hyperparameter search, sweep, vmap learning rates": "recipes",
    "brax, tunix, flowjax, ott, trainer": "trainers",
    "pinn, per-example gradients, dp-sgd, optimistix, neural ode, diffrax": "trainers",
    "npz, savez, v2 dtype": "checkpoints",
    "quantization, int8": "comparison",
    "inject_hyperparams": "diagnostics logging order migration/keras",
    "multi_transform": "fine_tuning several_losses",
    "donate": "jax distributed master_weights",
    "vmap": "casting jax recipes",
    "x64": "casting install",
    "license, citation, contribute": "index install",
    "gradscaler equivalent jax, loss scaling jax": "migration/torch jax api/policies",
    "dynamic loss scaling": "migration/torch jax api/policies why",
    "inference half precision, export onnx": "using",
    "qlora, lora jax, merge adapters": "fine_tuning",
    "debug nan, fp16 nan loss flax": "diagnostics",
    "reduce optimizer memory, adam 8 bit": "bfloat16_state comparison",
    "multiple gpus, tensor parallel, 70b": "distributed sharded",
    "ema of weights": "averages",
    "speed up training": "performance why",
    "layernorm in float32, softmax in float32": "casting",
    "unit test": "testing",
    "gradient checkpointing, activation checkpointing": "recipes sharded",
    "transformer example": "recipes",
    "type hints": "api/index install",
    "log the loss scale": "logging",
    "unscale gradients before clipping": "order",
}  # fmt: skip


def search(site, *queries):
    """Return the page and the title of each result, in the order of the site's own script."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js, which runs the search of Sphinx")
    command = [node, str(Path(__file__).with_name("search.js")), str(site), *queries]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_searched_for_is_among_the_first_three_results(site):
    wanted = {
        word: pages.split() for words, pages in SEARCHED.items() for word in words.split(", ")
    }
    found = dict(zip(wanted, search(site, *wanted), strict=True))
    first = {word: {page for page, _ in results[:3]} for word, results in found.items()}
    assert [word for word, pages in wanted.items() if not first[word] & set(pages)] == []
    titles = {word: [title for _, title in results] for word, results in found.items()}
    twice = [word for word, names in titles.items() if any(map(operator.eq, names, names[1:]))]
    assert twice == []
    pages = {word: [page for page, _ in results] for word, results in found.items()}
    assert any("changelog" in places for places in pages.values())
    assert [word for word, places in pages.items() if "changelog" in places[:-1]] == []


def test_a_query_that_no_page_answers_whole_leads_to_the_pages_with_most_of_its_words(site):
    most, none = search(site, "orbax checkpoint qwertyuiop", "qwertyuiop")
    pages = [page for page, _ in most]
    assert pages[0] == "checkpoints"
    assert len(pages) == len(set(pages))
    assert "bfloat16_state" not in pages  # it has a checkpoint, and no Orbax
    assert none == []


def luminance(color):
    """Return the relative luminance of a color `#rrggbb` or `#rgb`, as WCAG 2 defines it."""
    digits = color.lstrip("#")
    step = len(digits) // 3
    parts = [int(digits[i : i + step] * (3 - step), 16) / 255 for i in range(0, len(digits), step)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(map(operator.mul, (0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    low, high = sorted(luminance(color) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_every_color_of_code_has_a_contrast_of_four_and_a_half_in_light_and_in_dark(site):
    assert contrast("#fff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    css = (site / "_static/pygments.css").read_text("utf-8")
    rule = re.compile(
        r'^(body\[data-theme="dark"\] )?\.highlight (?:\.(\w+) )?\{ ([^}]*)\}', re.MULTILINE
    )
    pages = "".join(path.read_text("utf-8") for path in sorted(site.rglob("*.html")))
    used = set(re.findall(r'<span class="(\w{1,3})">', pages))
    background, colors = {}, {}
    for dark, token, style in rule.findall(css):
        found = dict(re.findall(r"\b(background|color|background-color): (#\w+)", style))
        if not token:
            background[bool(dark)] = found["background"]
        elif "color" in found and token in used - {"w"}:  # white space
            colors[bool(dark), token] = found["color"]
    assert len(colors) > 50
    assert {"c1", "gi", "gd", "mi", "nb", "s2"} <= {token for _, token in colors}
    assert {key: c for key, c in colors.items() if contrast(c, background[key[0]]) < 4.5} == {}
    # Code that goes on to the right has a shadow on the same background.
    edges = re.findall(r"--edge: (#\w+)", (site / "_static/site.css").read_text("utf-8"))
    assert edges[:2] == [background[False], background[True]]


def test_a_name_in_a_table_is_not_broken_in_its_middle():
    css = (DOCS / "_static/site.css").read_text("utf-8")
    of_code = re.findall(r"^ *table\.docutils[^{\n]*code\.literal \{([^}]*)\}", css, re.MULTILINE)
    assert of_code
    assert all("anywhere" not in rule and "break-" not in rule for rule in of_code)


def sidebar(page):
    """Return the parts of the contents beside a page, with the pages of each, also folded ones."""
    tree = page.partition('<div class="sidebar-tree">')[2].partition("</div>\n</div>")[0]
    parts = re.split(r'<p class="caption"[^>]*><span class="caption-text">(.*?)</span>', tree)
    links = [re.findall(r'<a class="reference internal" href="([^"#]+)"', part) for part in parts]
    return dict(zip(parts[1::2], links[2::2], strict=True))


def test_the_contents_have_parts_and_each_page_stands_in_one(site):
    parts = sidebar((site / "index.html").read_text("utf-8"))
    assert list(parts) == ["Start", "Train", "Save and watch", "When it goes wrong", "Know more"]
    assert parts["Save and watch"] == [
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
