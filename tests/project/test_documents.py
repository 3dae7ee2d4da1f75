"""The documents, set-up files and examples agree, and do not name any machine."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
DOCS = ROOT / "docs"
PAGES = {path: path.read_text("utf-8") for path in [*ROOT.glob("*.md"), *DOCS.glob("**/*.md")]}

# One letter is in brackets so that the pattern does not match itself.
NAMES_A_MACHINE = re.compile(
    r"pyp[i]\.org|pythonhoste[d]\.org|registry\.npmj[s]|anacond[a]\.(?:org|com)"
    r"|(?<![\w.~])/(?:wor[k]|roo[t]|hom[e]|User[s]|tmp/ven[v]|op[t]/py\w*)(?![\w-])"
)


def read(name):
    return (ROOT / name).read_text("utf-8")


def test_no_file_names_a_package_registry_or_a_path_of_a_machine(files):
    assert all(map(NAMES_A_MACHINE.search, ["https://py" + "pi.org/simple", "cd /roo" + "t"]))
    assert "Makefile" in files
    found = [
        f"{name}: {match[0]}"
        for name in files
        for match in NAMES_A_MACHINE.finditer((ROOT / name).read_text("latin-1"))
    ]
    assert found == []


# Names of earlier editions, one letter of each in brackets, as above.
OLD_NAME = re.compile(
    r"\bskip_i[f]\(|WithLossScalingStat[e]|\brule_stat[e]\b|\bsuggest_scal[e]\b"
    r"|format_(?:nonfinite|precision)_repor[t]|optax_lossscale\.intero[p]"
)


def test_names_of_earlier_editions_stand_in_the_changelog_alone(files):
    found = {
        name: set(OLD_NAME.findall((ROOT / name).read_text("latin-1")))
        for name in files
        if name != "CHANGELOG.md" and OLD_NAME.search((ROOT / name).read_text("latin-1"))
    }
    assert found == {"docs/checkpoints.md": {"rule_" + "state"}}  # a field that older states have


def words_of(text):
    return len(CODE.sub("", text).split())


def test_the_readme_is_short_and_a_page_explains_the_minimal_example():
    assert words_of(read("README.md")) <= 660
    _docstring, _, code = read("examples/minimal.py").partition('"""\n\n')
    assert f"```python\n{code}```\n" in read("docs/why.md")  # runs there, its output is compared


FIRST_SCREEN = (
    "in mixed precision (AMP)", "*Not released yet.", "not yet run on",
    "| you have | take | change | what you gain |", "A100", "T4, V100", "| TPU |",
    "AMX", "small layers", "**Leave out `dtype=`", "**bfloat16** (bf16)", "(docs/casting.md)",
    "`torch.autocast`", "import jax.numpy as jnp", "with_skipping",
    "**float16** (fp16)", "`GradScaler`", "```diff", "the same in [Flax]", "Equinox",
    "**every**", "[**guards**]", "bit for bit", "apply_if_finite",
    "**The likeliest mistake**", "`ols.testing.assert_scaled_once`", "(docs/trainers.md)",
    "\npip install", "cuda12", "make demo", "make test", "word_model.png)",
    "precision_report", "precision_search", "keep=found.keep", "in bytes per parameter",
    "`LossScaleState`",
)  # fmt: skip


def test_the_first_screen_of_the_readme_has_what_a_reader_looks_for_in_this_order():
    first = read("README.md").partition("<!-- Where to go. -->")[0]
    assert [text for text in FIRST_SCREEN if text not in first] == []
    assert sorted(FIRST_SCREEN, key=first.index) == list(FIRST_SCREEN)


def blocks(language):
    """Return the README's blocks of code in a language. The Python ones also run as they are."""
    return re.findall(rf"^```{language}\n(.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL)


def test_bfloat16_takes_the_one_line_that_the_readme_shows_first():
    names = {"loss_fn": lambda w, x: jnp.sum((x @ w) ** 2)}
    first, *_ = blocks("python")
    line, guard = (line for line in first.splitlines() if line and "import" not in line)
    assert line == "loss_fn = ols.autocast(loss_fn, jnp.bfloat16)"
    assert guard.startswith("tx = ols.with_skipping(")
    exec(first, names)  # noqa: S102
    gradient, w = jax.grad(names["loss_fn"]), jnp.ones((8, 8))
    assert list(ols.diagnostics.precision_report(gradient, w, w)) == ["bfloat16"]
    assert gradient(w, w).dtype == jnp.float32
    opt_state = names["tx"].init(w)
    updates, opt_state = names["tx"].update(gradient(w, jnp.inf * w), opt_state, w)
    assert (updates == 0).all()
    assert not ols.applied(opt_state)


def test_a_large_model_takes_the_bytes_that_the_readme_says():
    count, stored, with_gradients = re.search(
        r"(\d+) billion parameters take (\d+) GB, and (\d+) GB with", read("README.md")
    ).groups()
    names = {"jax": jax, "jnp": jnp, "ols": ols, "optax": optax}
    names["params"] = jnp.ones(1 << 16)
    (recipe,) = (block for block in blocks("python") if "with_master_weights" in block)
    exec(recipe, names)  # noqa: S102
    arrays = jax.tree.leaves((names["params"], names["opt_state"]))
    size = round(sum(array.nbytes for array in arrays) / names["params"].size)
    assert (size, size + 2) == (int(stored) / int(count), int(with_gradients) / int(count))


def test_the_package_is_described_in_the_words_that_people_search_for():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    words = ("mixed precision", "amp", "autocast", "fp16", "bf16", "GradScaler")
    assert [word for word in words if word not in project["keywords"]] == []
    assert "mixed precision" in project["description"].lower()


def test_the_demo_says_what_it_is_about_to_do_before_it_installs(tmp_path):
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    command = [make, "--dry-run", f"VENV={tmp_path}/env", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    said = re.compile(
        r"^Installs [\d.]+ GB into [^\n]*, then trains a word model$.*-m venv.* --group",
        re.MULTILINE | re.DOTALL,
    )
    assert said.search(done.stdout)
    assert not (tmp_path / "env").exists()


def test_four_lines_of_a_training_step_change_and_it_learns_the_same():
    (diff,) = blocks("diff")
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert (len(removed), len(added)) == (4, 4)
    params = {"w": jnp.ones((8, 8))}
    batch = jnp.arange(64.0).reshape(8, 8) / 64

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    after = {}
    for sign in "-+":
        step = "\n".join(line[1:] for line in diff.splitlines() if line[:1] in {sign, "", " "})
        names = {"jax": jax, "jnp": jnp, "ols": ols, "optax": optax, "loss_fn": loss_fn}
        exec(step, names)  # noqa: S102
        opt_state, train_step = names["tx"].init(params), names["train_step"]
        after[sign], opt_state, _ = train_step(params, opt_state, batch)
        products = ols.diagnostics.precision_report(train_step, params, opt_state, batch)
        assert list(products) == ["float32" if sign == "-" else "float16"]
    np.testing.assert_allclose(after["+"]["w"], after["-"]["w"], rtol=1e-6)
    assert (after["+"]["w"] < params["w"]).all()


def test_the_bytes_per_parameter_that_the_readme_shows_are_those_of_the_arrays():
    row = re.compile(r"^\| .*? \| \**(\d+)\** \| \**(\d+)\** \|$", re.MULTILINE)
    adamw, count, rows = optax.adamw(1e-3), 1 << 20, []
    for dtype, tx in (
        (jnp.float32, adamw),
        (jnp.bfloat16, ols.with_master_weights(adamw)),
        (jnp.bfloat16, ols.with_master_weights(adamw, remainders=True)),
        (jnp.bfloat16, ols.with_master_weights(ols.with_bfloat16_state(adamw), remainders=True)),
        (jnp.bfloat16, ols.with_stochastic_rounding(ols.with_bfloat16_state(adamw))),
    ):
        params = jax.ShapeDtypeStruct((count,), dtype)
        arrays = jax.tree.leaves((params, jax.eval_shape(tx.init, params)))
        stored = round(sum(array.size * array.dtype.itemsize for array in arrays) / count)
        rows.append((str(stored), str(stored + params.dtype.itemsize)))
    assert row.findall(read("README.md")) == rows


@pytest.mark.integration
def test_the_order_of_wrappers_that_the_pages_show_is_accepted_without_a_warning():
    line = "guard(with_master_weights(MultiSteps(chain(clip, with_bfloat16_state(adamw)), k)))"
    assert all(f"`{line}`" in read(f"docs/{page}.md") for page in ("order", "bfloat16_state"))
    params = jnp.ones((64, 64), jnp.bfloat16)
    for guard in (ols.with_skipping, ols.with_loss_scaling):
        names = {**vars(optax), **vars(ols), "guard": guard, "k": 2}
        names |= {"clip": optax.clip_by_global_norm(1.0), "adamw": optax.adamw(1e-2)}
        tx = eval(line, names)  # noqa: S307
        opt_state, w = tx.init(params), params
        for _ in range(2):
            updates, opt_state = tx.update(params, opt_state, w)
            w = optax.apply_updates(w, updates)
        assert ols.applied(opt_state)
        assert (w != params).all()
        assert any(array.dtype == jnp.bfloat16 for array in jax.tree.leaves(opt_state))


def test_code_on_the_pages_and_in_docstrings_does_not_scroll_sideways():
    off_site = "BUILD.md", "index.md"  # or in a directive of Sphinx
    pages = "\n".join(text for path, text in PAGES.items() if path.name not in off_site)
    lines = [line for code in CODE.findall(pages) for line in code.splitlines()]
    example = re.compile(r"^ +((?:>>>|\.\.\.) .*)$", re.MULTILINE)
    sources = "".join(path.read_text("utf-8") for path in ROOT.glob("optax_lossscale/**/*.py"))
    examples = example.findall(sources)
    assert (len(lines) > 2000, len(examples) > 150) == (True, True)
    assert [line for line in lines if len(line) > 88] == []
    assert [line for line in examples if len(line) > 86] == []


def length(page):
    """Return about how many thirtieths of a screen of 1280 by 800 a page takes on the site.

    A browser shows 25 to 38 of them on one: fewer where the prose is dense.
    """
    shown = re.sub(r"^```\{toctree\}\n:hidden:.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in shown.splitlines() if line.strip()]
    return sum(2 if line[0] == "|" else 12 if line.startswith("![") else 1 for line in lines)


def test_the_pages_are_few_and_have_few_words_and_at_most_seven_screens():
    on_site = {path: text for path, text in PAGES.items() if path.is_relative_to(DOCS)}
    guides = [path for path in on_site if path.parent != DOCS / "api"]
    assert [path.name for path in guides if length(on_site[path]) > 205] == []
    words = {path: words_of(text) for path, text in on_site.items()}
    assert words.pop(DOCS / "changelog.md") == 0  # its only block includes the file
    assert 30 < len(words) <= 38
    assert 12_000 < sum(words.values()) <= 16_500
    assert max(words.values()) <= 1_400
    by_name = {path.stem: count for path, count in words.items()}
    assert sum(by_name[name] for name in ("comparison", "evidence", "performance")) <= 2_800
    assert by_name["casting"] <= 800
    assert by_name["bfloat16_state"] <= 700


def test_links_within_the_project_lead_somewhere():
    link = re.compile(r"\]\((?!https?:|#)([^)#]+)")
    found = [path.parent / to for path, text in PAGES.items() for to in link.findall(text)]
    assert len(found) > 50
    assert [target for target in found if not target.exists()] == []


def test_the_page_of_recipes_has_the_bytes_of_its_recipes():
    names = {"adamw": optax.adamw(1e-3), "guard": ols.with_loss_scaling, **vars(ols)}
    row = r"^\| [^|]* \| (float32|bfloat16) \| `(guard.*?)`[^|]* \| \**(\d+)\** \| \**(\d+)\** \|$"
    rows = re.findall(row, read("docs/install.md"), re.MULTILINE)
    assert len(rows) == 4
    for dtype, line, stored, with_gradients in rows:
        params = jax.ShapeDtypeStruct((1 << 20,), dtype)
        arrays = jax.tree.leaves((params, jax.eval_shape(eval(line, names).init, params)))  # noqa: S307
        found = round(sum(array.size * array.dtype.itemsize for array in arrays) / params.size)
        assert (found, found + params.dtype.itemsize) == (int(stored), int(with_gradients)), line
    billions, *sizes = re.search(
        r"(\d) billion parameters .* take (.*?) GB.*?over (8) devices.*?holds (.*?) GB",
        read("docs/install.md").replace("\n", " "),
    ).groups()
    totals, devices, shares = sizes
    totals, shares = (list(map(float, re.findall(r"[\d.]+", text))) for text in (totals, shares))
    assert totals == [int(billions) * int(with_gradients) for *_, with_gradients in rows]
    assert shares == [total / int(devices) for total in totals]


@pytest.mark.exhaustive
def test_the_pictures_of_the_pages_are_drawn_by_their_script(tmp_path):
    pictures = runpy.run_path(str(DOCS / "draw.py"))["PICTURES"]
    for name, draw in pictures.items():
        draw(tmp_path / f"{name}.png", steps=4)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert any(f"(images/{name}.png)" in text for text in PAGES.values())
        assert (DOCS / f"images/{name}.png").stat().st_size < 60_000


# By row of the page: the case and the contender of `make aot`, and the baseline's bytes.
COSTS = {
    "`adamw`, 52M parameters": ("wide", "Ours", 1),
    "ResNet-50, 161 arrays": ("deep", "Ours", 1),
    "clipping": ("clip", "Ours", 1),
    "clipping, 161 arrays": ("clip-deep", "Ours", 1),
    "FSDP, 161 arrays": ("fsdp", "Ours", 1),
    "`shard_map`, 161 arrays": ("shard_map", "Ours", 1),
    "`with_skipping`": ("guards", "SkipIf", 28),
    '`with_skipping`, `Spike("grad_norm")`': ("guards", "SpikeNorm", 28),
    "float16 masters": ("masters", "Masters", 28),
    "bfloat16 remainders": ("remainders", "Remainders", 28),
    "remainders, clipping, `with_skipping`": ("remainders-clip", "SkipIfRemainders", 30),
    "remainders, `with_bfloat16_state`": ("remainders", "RemaindersBfloat16State", 28),
    "stochastic rounding, `with_bfloat16_state`": ("remainders", "RoundedBfloat16State", 28),
}


@pytest.mark.parametrize("row", COSTS)
def test_the_page_of_costs_has_the_bytes_and_kernels_that_make_aot_allows(row):
    literal = r"^LIMITS = (\{.*?^\})"
    source = read("tests/project/test_compiled.py")
    limits = ast.literal_eval(re.search(literal, source, re.MULTILINE | re.DOTALL)[1])
    line = re.search(rf"^\| {re.escape(row)} \|(.*)", read("docs/performance.md"), re.MULTILINE)[1]
    found, kernels = map(float, re.findall(r"[\d.]+", line)[:2])
    case, name, baseline = COSTS[row]
    most, *count = limits[case, name, "h100"]
    assert count[0] - 1 <= kernels <= count[0]
    assert most - 0.01 <= found / baseline <= most


def test_every_test_that_a_document_names_exists():
    name = re.compile(r"\b(tests/[\w/]+\.py)(?:::(\w+))?")
    named = {found for text in PAGES.values() for found in name.findall(text)}
    assert len(named) > 5
    for file, test in named:
        assert (f"def {test}(" if test else "") in read(file), (file, test)


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert "make test" in read(".ci/run")
    workflows = [*ROOT.glob(".github/workflows/*.yml"), ROOT / ".github/pull_request_template.md"]
    documents = "README.md", "BUILD.md", "CONTRIBUTING.md", ".ci/run"
    for name in (*documents, *(str(path.relative_to(ROOT)) for path in workflows)):
        named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", read(name)))
        assert named
        assert named <= targets, name
    assert os.access(ROOT / ".ci/run", os.X_OK)
