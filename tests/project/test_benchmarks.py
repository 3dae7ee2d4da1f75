"""The benchmarks: every contender takes the same step, and the report says who is left out."""

import dataclasses
import json
import re
import subprocess
import types
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from benchmarks import aot, attention, cases, gpu, guards, page, run, workloads
from benchmarks.contenders import CONTENDERS, Keras
from benchmarks.page import version
from benchmarks.programs import __main__ as programs
from benchmarks.programs import memory, sensitive, training
from benchmarks.programs.source import RESULTS, Program, change, library

pytestmark = pytest.mark.filterwarnings("default:::(jmp|mpx|jaxamp|equinox|keras)")

ROOT = Path(__file__).parents[2]
SHAPES = [(4, 3), (3,)]
SHORT = "--size=tiny", "--rounds=1", "--sample-seconds=0"
OURS, PLAIN = CONTENDERS["Ours"].name, CONTENDERS["Optax"].name
FOUND = [name for name in CONTENDERS if version(CONTENDERS[name].package)]
UNLIKE = re.compile("Masters|Remainders|Rounded|StackByHand|ByHandBfloat16")
ALIKE = [name for name in FOUND if not UNLIKE.search(name)]
each_contender = pytest.mark.parametrize("name", ALIKE)


def loss_fn(params, batch):
    weights, bias = (p.astype(jnp.float16) for p in params)
    return jnp.mean((batch.astype(jnp.float16) @ weights + bias).astype(jnp.float32) ** 2)


def compiled(contender, workload):
    init, step = cases.build(contender, "adamw", workload)
    return jax.jit(step.run), init(workload.params), step.data


def assert_optaxs(contender, before, state, grads, steps):
    """Compare with steps of Optax on true gradients."""
    tx = optax.adamw(1e-3)
    expected = before
    opt_state = tx.init(expected)
    for _ in range(steps):
        updates, opt_state = tx.update(grads, opt_state, expected)
        expected = optax.apply_updates(expected, updates)
    # The updates are about 1e-3. Keras adds Adam's epsilon in another place.
    rtol = 2e-2 if isinstance(contender, Keras) else 1e-3
    for p, a, e in zip(before, state.params, expected, strict=True):
        np.testing.assert_allclose(a - p, e - p, rtol=rtol, atol=1e-7)
    # A wrong scale of the gradients hardly changes Adam's step, but it changes the first moment.
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == SHAPES[0]]
    moment = (1 - 0.9**steps) * grads[0]
    assert any(np.allclose(leaf, moment, rtol=1e-2) for leaf in moments)


@pytest.mark.filterwarnings("ignore:Only 0%.*float16")  # `loss_fn` casts by hand
@each_contender
def test_the_training_step_is_optaxs(name):
    contender = CONTENDERS[name]
    params = workloads.gradients(SHAPES, jnp.float16).params
    workload = workloads.Training(params, jax.tree_util.Partial(loss_fn), jnp.eye(4))
    step, state, batch = compiled(contender, workload)
    grads = jax.grad(loss_fn)(params, batch)
    assert_optaxs(contender, params, step(state, batch), grads, steps=1)


@each_contender
def test_an_overflow_is_skipped_by_all_who_say_so_and_later_steps_are_optaxs(name):
    contender = CONTENDERS[name]
    workload = workloads.gradients(SHAPES, jnp.float16)
    true = [g.astype(jnp.float32) for g in workload.unscaled]
    step, state, (grads, loss) = compiled(contender, workload)
    bad = step(state, ([grads[0].at[1, 2].set(jnp.inf), *grads[1:]], loss))
    scale = workloads.LOSS_SCALE if contender.scales else 1.0
    if contender.skips:
        jax.tree.map(np.testing.assert_array_equal, bad.params, workload.params)
        state = bad  # only the loss scale has changed
        scale = scale / 2 if contender.scales else scale
    else:
        assert not np.isfinite(bad.params[0]).all()
    good = [(g * scale).astype(jnp.float16) for g in true], loss
    assert_optaxs(contender, workload.params, step(step(state, good), good), true, steps=2)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("Spike", "loss"), ("SpikeNorm", "norm"), ("StackByHand", "loss")),
        *((name, what) for name in ("MaxText", "Levanter") for what in ("loss", "norm")),
    ],
)
def test_a_spike_is_skipped_by_who_judges_it(name, what):
    step, state, (grads, loss) = compiled(CONTENDERS[name], workloads.gradients(SHAPES))
    for number in range(guards.WINDOW):
        usual = 1 + 0.1 * (number % 3)
        state = step(state, ([usual * g for g in grads], usual * loss))
    larger = {"loss": 1, "norm": 1} | {what: 10}
    spiked = step(state, ([larger["norm"] * g for g in grads], larger["loss"] * loss))
    jax.tree.map(np.testing.assert_array_equal, spiked.params, state.params)
    applied = step(spiked, (grads, loss))
    assert all((a != b).any() for a, b in zip(applied.params, state.params, strict=True))


def test_masters_are_kept_as_by_hand():
    workload = workloads.gradients(SHAPES, jnp.float16, jnp.float16)
    assert {p.dtype for p in (*workload.params, *workload.scaled)} == {jnp.dtype("float16")}
    reached = []
    for name in cases.CASES["masters"].contenders:
        step, state, data = compiled(CONTENDERS[name], workload)
        reached.append(step(step(state, data), data).params)
    by_hand, *others = reached
    for other in others:
        for p, a, e in zip(workload.params, other, by_hand, strict=True):
            assert (a != p).any()
            np.testing.assert_allclose(a, e, atol=2**-10 * 0.1)


def test_attention_by_blocks_has_the_results_and_gradients_of_plain_attention():
    shape = 2, 8 * attention.BLOCKS, 3, 5
    *qkv, g = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4))

    def found(attend):
        result, pull_back = jax.vjp(attend, *qkv)
        return result, *pull_back(g)

    for a, e in zip(found(attention.by_blocks), found(attention.plain), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_who_is_left_out_is_said_and_an_interrupted_run_keeps_its_results(tmp_path, monkeypatch):
    missing = dataclasses.replace(CONTENDERS["Jmp"], package="a package that nobody has")
    monkeypatch.setitem(CONTENDERS, "Jmp", missing)
    monkeypatch.delitem(cases.CASES, "deep")
    options = *SHORT, f"--output={tmp_path}", "--only", "wide", "deep"
    with pytest.raises(KeyError):
        run.main([*options, "--contenders", "Ours", "Jmp"])
    kept = json.loads((tmp_path / "benchmarks.json").read_text())
    assert list(kept["steps"]) == ["wide"]
    rows = kept["steps"]["wide"]["rows"]
    assert list(rows) == [PLAIN, OURS, "JMP"]
    assert rows["JMP"]["left_out"] == "not installed"
    assert len(rows[OURS]["ratios"]) == 1
    assert rows[OURS]["in_place"] == rows[OURS]["state"]
    assert "| JMP | not installed |" in (tmp_path / "benchmarks.md").read_text()


def test_a_checkout_is_measured_without_being_installed(monkeypatch, python):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    assert page.version("optax_lossscale") == ols.__version__
    assert page.version("a package that nobody has") is None
    imported, _ = python("-c", "import benchmarks.run, sys; print(*sys.modules)", cwd=ROOT)
    assert not {"jmp", "keras", "matplotlib"} & set(imported.split())


def test_a_table_names_the_card_of_a_gpu_its_memory_and_its_driver(tmp_path, monkeypatch):
    card = types.SimpleNamespace(platform="gpu", device_kind="Some GPU", local_hardware_id=3)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert page.describe(card) == "Some GPU, memory unknown, driver unknown"
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "${3:-}" = --id=3 ] && echo "16384 MiB, 550.1"\n')
    smi.chmod(0o755)
    assert page.describe(card) == "Some GPU, memory 16384 MiB, driver 550.1"
    assert page.describe(jax.devices()[0]) == "cpu"


@pytest.mark.exhaustive
def test_the_command_runs_every_benchmark(tmp_path):
    names = "Ours", "SkipIf", "MastersScaled"
    run.main([*SHORT, "--contenders", *names, f"--output={tmp_path}"])
    found = json.loads((tmp_path / "benchmarks.json").read_text())
    assert tuple(found["steps"]) == run.STEPS
    rows = [row for each in found["steps"].values() for row in each["rows"].values()]
    assert [len(row["ratios"]) for row in rows] == 2 * len(run.STEPS) * [1]
    assert (tmp_path / "benchmarks.md").read_text().count("\n## ") == len(run.STEPS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Only 0%.*float16")  # cast by hand
def test_what_a_gpu_must_show_is_so_on_a_cpu(tmp_path, capsys):
    assert gpu.main(["--dry", f"--output={tmp_path}"]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["checks"]) == list(gpu.CHECKS)
    assert {each["result"] for each in found["checks"].values()} == {gpu.PASSED}
    table = capsys.readouterr().out.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert table[0] == "| cpu | result | figures |"
    assert len(table) == 2 + len(gpu.CHECKS)
    errors = found["checks"]["relative error of the worst gradient"]["figures"]
    assert 0 < float(errors["bfloat16 with autocast"]) < 0.05


def test_a_check_that_fails_or_raises_is_reported_and_the_others_run(tmp_path, monkeypatch, capsys):
    claims, limits = {"it is small": False, "it is positive": True}, {"it is fast": False}
    found = gpu.Found({"share": 2}, claims, limits)
    checks = {"first": lambda _: 1 / 0, "second": lambda _: found, "third": gpu.peak_memory}
    monkeypatch.setattr(gpu, "CHECKS", checks)
    assert gpu.main(["--dry", f"--output={tmp_path}"]) == 2
    printed = capsys.readouterr().out
    assert "| first | FAILED; ZeroDivisionError: division by zero |  |" in printed
    assert "| second | FAILED; it is small | share 2 |" in printed  # a CPU need not be fast
    assert gpu.check("second", gpu.FULL)["broken"] == ["it is small", "it is fast"]
    assert "| third | passed |" in printed
    assert gpu.main(["--dry", f"--output={tmp_path}", "--seconds=0"]) == 3
    assert capsys.readouterr().out.count("| not run: out of time |") == 3


def test_the_worst_error_is_nan_if_a_gradient_is():
    exact = [jnp.ones(2), jnp.ones(3)]
    assert gpu.worst_error([exact[0], 1.5 * exact[1]], exact) == 0.5
    assert np.isnan(gpu.worst_error([exact[0], jnp.nan * exact[1]], exact))


def test_steps_are_compiled_for_devices_and_counted(tmp_path):
    names = ["wide", "shard_map"]
    size = ["--size=tiny", f"--output={tmp_path}", "--backends=cpu"]
    aot.main([*size, "--cases", *names, "--contenders", "Ours"])
    results = json.loads((tmp_path / "aot.json").read_text())
    assert list(results) == [f"cpu {case}" for case in names]
    for case in names:
        ours, bare = (results[f"cpu {case}"]["rows"][name] for name in (OURS, PLAIN))
        assert ours["bytes"] > bare["bytes"]
        assert ours["in_place"] > bare["in_place"] > 0
        assert (ours["collectives"] > 0, bare["collectives"]) == (case == "shard_map", 0)
    assert (tmp_path / "aot.md").read_text().count("\n| optax_lossscale |") == len(names)
    assert (tmp_path / "hlo/cpu-shard_map-Ours.txt").exists()


PUBLIC = """\
import jax, jax.numpy as jnp, optax
HALF = False
x = jnp.ones((16, 8))
def loss_fn(params, y):
  cast = jnp.bfloat16 if HALF else jnp.float32
  return jnp.mean((x.astype(cast) @ params.astype(cast) - y) ** 2)
tx = optax.sgd(STEP)
params = jnp.full((8, 8), 0.1)
opt_state = tx.init(params)
for _ in range(20):
  grads = jax.grad(loss_fn)(params, jnp.ones((16, 8)))
  updates, opt_state = tx.update(grads, opt_state)
  params = optax.apply_updates(params, updates)
"""


WAVES = """\
import jax, jax.numpy as jnp, optax
keys = jax.random.split(jax.random.key(0), 2)
tx = optax.sgd(0.001)
params = {'waves': 30 * jax.random.normal(keys[0], (16, 32)), 'last': jnp.ones((32, 8)) / 6}
opt_state = tx.init(params)
@jax.jit
def step(params, opt_state, x):
  def loss_fn(params):
    angles = x @ params['waves']
    return jnp.mean((jnp.sin(angles) @ params['last'] - x[:, :8]) ** 2), x
  grads, _ = jax.grad(loss_fn, has_aux=True)(params)
  updates, opt_state = tx.update(grads, opt_state)
  return optax.apply_updates(params, updates), opt_state
for _ in range(3):
  params, opt_state = step(params, opt_state, jax.random.normal(keys[1], (64, 16)))
"""
WAVES_CHANGES = (
    "«ols|jax».grad(«ols.autocast(»loss_fn«, half)», has_aux=True)(«opt_state, »params",
    "«ols.with_loss_scaling(»optax.sgd(0.001)«)»",
)
ON_A_MESH = (
    "«mesh = jax.make_mesh((2,), ('rows',), devices=jax.devices()[:2])  # explicit\n"
    "with jax.set_mesh(mesh):\n  »for _ in range(3):\n  «  »params, opt_state = step(params, "
    "opt_state, «jax.device_put(»jax.random.normal(keys[1], (64, 16))«, jax.P('rows'))»)"
)


def train_lines(source):
    path = source.root / source.file
    path.write_text(path.read_text().replace("HALF = False", f"HALF = {source.own}"))
    source.execute()


LINES = Program(
    name="Lines: loss",
    repository="someone/lines",
    file="train.py",
    changes=(
        "«ols|jax».grad(«ols.autocast(»loss_fn«, half)»)(«opt_state, »params",
        "«ols.with_loss_scaling(»optax.sgd(0.1)«)»",
        "«params = ols.cast(params, stored)\n»opt_state = tx.init(params)",
        "tx.update(grads, opt_state«, params»)",
    ),
    settings={"STEP": "0.1"},
    run=train_lines,
    own="`HALF`",
    unsuited=("masters",),
    reason="lines need digits",
)


@pytest.fixture
def public(tmp_path):
    """A folder of checkouts, which holds one program."""
    folder = tmp_path / "someone/lines"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(PUBLIC)
    (folder / "waves.py").write_text(WAVES)
    user = "-c", "user.name=Someone", "-c", "user.email=someone@example.org"
    for command in (["init"], ["add", "."], [*user, "commit", "--message=All"]):
        subprocess.run(["git", "-C", folder, *command], check=True, capture_output=True)  # noqa: S603, S607
    return tmp_path


def test_the_marks_of_a_change_show_what_is_inserted_and_what_is_replaced():
    marked = "«ols|jax».grad(«ols.autocast(»f«, half)»)"
    assert change(marked) == ("jax.grad(f)", "ols.grad(ols.autocast(f, half))")


@pytest.mark.integration
def test_a_public_program_is_changed_and_trained_in_each_way(public):
    trained = {name: training.train(LINES, public, way) for name, way in training.WAYS.items()}
    results = {name: result for name, (result, _) in trained.items()}
    assert [result.share for result in results.values()] == [0, 0, 1, 1, 1, 1]
    assert all(result[3:5] == (20, 0) and not result.error for result in results.values())
    assert all(result.final < 1 for result in results.values())
    # Momentum-free SGD keeps nothing but the guard's counts, and remainders keep two bytes.
    assert [round(result.held) for result in results.values()] == [4, 4, 4, 4, 2, 4]
    # 0.1 is no bfloat16, so the weights of one float32 run are not those of the other.
    exact, rounded = (trained[name][1] for name in ("float32", "rounded"))
    assert 0 < training.distance(rounded, exact) < 2**-7
    assert training.distance(exact, exact) == 0
    for way, start in training.EXACT.items():
        assert 0 <= training.distance(trained[way][1], trained[start][1]) < 2**-6
    cells = programs.row(LINES, results, "0123456789")
    link = "[Lines](https://github.com/someone/lines/blob/01234567/train.py): loss"
    assert cells[:2] == [link, "100"]
    assert [cell.endswith(" †") for cell in cells[2:5]] == [False, False, True]
    own = programs.own_row(LINES, results, "01")
    assert own[1:4] == ["`HALF`", "100", "100"]
    with pytest.raises(ValueError, match="another version of the program"):
        training.train(LINES._replace(changes=["tx.step"]), public, training.WAYS["float32"])
    failing = LINES._replace(run=lambda _: 1 / 0)
    failed, none = training.train(failing, public, training.WAYS["float32"])
    assert (programs.share(failed), programs.final(failed)) == ("none", "ZeroDivisionError")
    assert np.isnan(training.distance(none, exact))


@pytest.mark.integration
def test_the_lines_of_a_public_program_that_need_float32_are_named(public):
    def search(**changed):
        found = sensitive.search(LINES._replace(**changed), public)
        return found, sensitive.cell({step: each._asdict() for step, each in found.items()})

    found, shown = search()
    assert [*found] == ["fresh", "trained"]
    fresh, trained = found.values()
    assert (fresh.named, fresh.missing) == ([], "")
    assert fresh.error == fresh.error_kept < 0.05
    assert fresh.error <= fresh.array_error
    assert trained.error > 0.05  # little is left of the gradient
    line = re.escape("`return jnp.mean((x.astype(cast) @ params.astype(cast) - y) ** 2)`")
    assert re.fullmatch(rf"none/{line}: 0\.\d+/\d+ \(0\.\d+/\d+\)", shown)
    for changes in (WAVES_CHANGES, (*WAVES_CHANGES, ON_A_MESH)):
        found, shown = search(file="waves.py", changes=changes, settings={})
        for each in found.values():
            assert each.named == ["angles = x @ params['waves']"]
            assert each.error > 0.3
            assert each.error_kept < 0.03
        assert shown.startswith("`angles = ")
    found, shown = search(run=lambda _: 1 / 0)
    assert found["fresh"].missing == "ZeroDivisionError: division by zero"
    assert shown == sensitive.cell(None) == ""


def test_a_cell_has_the_lines_of_each_step_where_they_differ():
    none, one = sensitive.Found(0.01, 0.02), sensitive.Found(0.06, 0.1, 0.02, ["x @ w"])
    found = {"fresh": none._asdict(), "trained": one._asdict()}
    assert sensitive.cell(found) == "none/`x @ w`: 1/6 (2/10)"


def result(**fields):
    known = {"lines": 5, "flops": {"bfloat16": 3, "float32": 1}, "final": 0.5, "steps": 20}
    return training.Result(**known | fields)


def test_the_command_keeps_results_and_writes_them_to_the_page(public, monkeypatch, capsys):
    ways = {way: result(held=4.0, distance=0.01) for way in training.WAYS}
    monkeypatch.setattr(programs, "PROGRAMS", {"lines": LINES})
    monkeypatch.setattr(programs, "measure", lambda *_: ways)
    found = sensitive.Found(0.3, 0.4, 0.01, ["x @ w"])._asdict()
    searched = {"library": "89abcdef", "environment": page.environment(*programs.PACKAGES)}
    searched |= {"fresh": found, "trained": found}
    monkeypatch.setattr(programs, "search", lambda *_: searched)
    (public / "evidence.md").write_text(
        "\n".join(["Before", *page.comments(programs.PART, programs.COMMAND), "After"])
    )
    results = public / "results.json"
    programs.main([str(public), f"--results={results}", f"--pages={public}"])
    written = (public / "evidence.md").read_text()
    assert "0.5 † | 1 | `x @ w`: 30/30 (40/40) |" in written
    assert " at 89abcdef." in written
    assert "- † Lines, masters: lines need digits." in written
    assert "(1 programs), it runs 75 to 75 % of the operations" in written
    assert f"optax_lossscale at {library()}." in written
    assert written.startswith("Before")
    assert written.endswith("After")
    programs.main([str(public), f"--results={results}", "--only"])
    printed = capsys.readouterr().out
    assert written.partition("-->\n\n")[2].partition("\n\n<!--")[0] in printed
    assert printed.endswith("| `HALF` | 75 | 75 | 0.5 | 0.5 | 0.5 | 1 | 1 |\n")
    stored = results.read_text()
    monkeypatch.setattr(programs, "measure", None)  # a search trains nothing
    searched["fresh"] = sensitive.Found(0.01, 0.02)._asdict()
    programs.main([str(public), f"--results={results}", f"--pages={public}", "--search"])
    assert "| none/`x @ w`: 1/30 (2/40) |" in (public / "evidence.md").read_text()
    old, new = (json.loads(text)["programs"]["lines"] for text in (stored, results.read_text()))
    assert old.pop("search") != new.pop("search")
    assert old == new
    results.write_text(stored.replace(new["commit"], "0123"))
    with pytest.raises(ValueError, match="the results of lines are of 0123, got "):
        programs.main([str(public), f"--results={results}", "--search"])
    results.write_text(stored)
    merged = public / "merged.json"
    programs.main([str(public), f"--results={merged}", "--merge", str(results), "--only"])
    assert merged.read_text() == results.read_text()
    kept = json.loads(results.read_text())["programs"]
    monkeypatch.setitem(programs.PROGRAMS, "other", LINES._replace(name="Others"))
    kept["other"] = kept["lines"] | {"library": "01234567"}
    assert "1 of them at 01234567" in programs.table(kept)
    kept["other"]["environment"] += ", jax 0.0.1"
    with pytest.raises(ValueError, match="must be of one machine"):
        programs.table(kept)


def test_the_memory_of_a_programs_gradient_is_counted(public, monkeypatch):
    monkeypatch.setattr(memory, "DEVICE", "cpu")
    row = {way: memory.count(LINES, public, training.WAYS[way], {}) for way in memory.COLUMNS}
    assert all(counts["temporary"] > 0 for counts in row.values())
    (cells,) = memory.table({"Lines": row}).splitlines()[2:]
    assert cells == "| Lines | 0.00 | 0.00 | 0.00 | 0.00 |"


def test_a_program_that_is_missing_is_wanted_and_not_run(tmp_path, capsys):
    results = f"--results={tmp_path / 'results.json'}"
    programs.main([str(tmp_path / "programs"), results, "--only", "nerf"])
    wanted = tmp_path / "programs/google-research+multinerf"
    printed = capsys.readouterr().out
    assert f"github.com/google-research/multinerf in {wanted}" in printed
    assert printed.count("| not run |") == len(programs.PROGRAMS)


def test_the_page_has_a_row_for_each_program_as_the_command_writes_it():
    text = (ROOT / f"docs/{programs.PAGE}.md").read_text()
    begin, end = page.comments(programs.PART, programs.COMMAND)
    results = json.loads(RESULTS.read_text())
    written = text.partition(begin)[2].partition(end)[0].strip()
    assert written == programs.table(results["programs"])
    assert "not run" not in written
    assert set(results["programs"]) == set(programs.PROGRAMS)
