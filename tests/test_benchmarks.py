"""The benchmarks: everybody takes the same step, and nobody is left out in silence."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure, report, row_major, run, suite, workloads  # noqa: E402 - no package
from benchmarks.contenders import CONTENDERS, Jmp, KerasAlone, OptaxAlone, Ours  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default:::(jmp|mpx|jaxamp|equinox|keras)"),
]

INSTALLED = [kind for kind in CONTENDERS if kind.version()]
SHAPES = [(4, 3), (5,)]
TINY = workloads.SIZES["tiny"]

each_contender = pytest.mark.parametrize("kind", INSTALLED, ids=lambda kind: kind.__name__)


@pytest.fixture(autouse=True)
def _rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


def options(*contenders):
    return suite.Options(
        sizes=TINY,
        contenders=contenders,
        rounds=2,
        sample_seconds=0,
        compile_rounds=1,
        compile_limit=60,
        seed=0,
    )


def by_hand(params, grads, steps=1):
    """Return `params` after steps of Optax on true gradients."""
    tx = optax.adamw(1e-3)
    opt_state = tx.init(params)
    for _ in range(steps):
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_same_step(kind, before, after, expected):
    """Compare what a step added, which is about 1e-3, and leave room for rounding near 0.1."""
    rtol = 2e-2 if issubclass(kind, KerasAlone) else 1e-3  # Keras adds Adam's epsilon elsewhere
    for p, a, e in zip(*map(jax.tree.leaves, (before, after, expected)), strict=True):
        np.testing.assert_allclose(a - p, e - p, rtol=rtol, atol=1e-7)


@each_contender
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_the_optimizer_step_is_optaxs(kind, dtype):
    workload = workloads.gradients(SHAPES, dtype)
    _, step, data = suite.build(kind, "adamw", workload, options(kind))
    state = kind("adamw", workload.params).init(workload.params)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), workload.unscaled)
    step = jax.jit(step)
    for steps in (1, 2):
        state = step(state, data)
        assert_same_step(
            kind, workload.params, state.params, by_hand(workload.params, grads, steps)
        )
        if steps == 1:  # Adam hardly minds a factor on its gradients, but its first moment does
            moments = [m for m in jax.tree.leaves(state.opt_state) if m.shape == SHAPES[0]]
            assert any(np.allclose(m, 0.1 * grads[0], rtol=1e-3) for m in moments)


@each_contender
def test_the_training_step_is_optaxs(kind):
    workload = workloads.transformer(TINY)
    contender, step, batch = suite.build(kind, "adamw", workload, options(kind))
    scale = workloads.LOSS_SCALE if kind.scales else 1.0
    grads = jax.grad(lambda params: scale * workload.loss_fn(params, batch))(workload.params)
    expected = by_hand(workload.params, jax.tree.map(lambda g: g / scale, grads))
    # Eager: all contenders share the primitives, and only those compile.
    after = step(contender.init(workload.params), batch).params

    def added(params):
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(workload.params), strict=True)
        return np.concatenate([np.ravel(new - old) for new, old in pairs])

    # Adam's first step is nearly the gradients' sign: float16 decides that of the smallest.
    error = np.linalg.norm(added(after) - added(expected)) / np.linalg.norm(added(expected))
    assert error < 0.05


@each_contender
def test_an_overflow_is_skipped_by_all_who_say_so(kind):
    workload = workloads.gradients(SHAPES, jnp.float32)
    contender, step, data = suite.build(kind, "adamw", workload, options(kind))
    before = contender.init(workload.params)
    bad = [data[0].at[1, 2].set(jnp.inf), *data[1:]]
    step = jax.jit(step)
    after = step(before, bad)
    if not kind.skips:
        assert not np.isfinite(after.params[0]).all()
        return
    jax.tree.map(np.testing.assert_array_equal, after.params, workload.params)
    # Nothing else moved but the factor: what comes now is the first step.
    scale = workloads.LOSS_SCALE / 2 if kind.scales else 1.0
    good = jax.tree.map(lambda g: g * scale, workload.unscaled)
    expected = by_hand(workload.params, workload.unscaled)
    assert_same_step(kind, workload.params, step(after, good).params, expected)


def test_who_is_not_installed_is_reported(monkeypatch):
    installed = metadata.version

    def version(package):
        if package == "jmp":
            raise metadata.PackageNotFoundError(package)
        return installed(package)

    monkeypatch.setattr(metadata, "version", version)
    (benchmark,) = suite.STEPS["wide"]
    result = suite.run_steps(benchmark, options(OptaxAlone, Ours, Jmp))
    assert list(result["rows"]) == [kind.name for kind in CONTENDERS]
    assert result["rows"]["JMP"]["left_out"] == "not installed"
    assert result["rows"]["mpx"]["left_out"] == "not chosen"
    assert len(result["rows"][Ours.name]["ratios"]) == 2
    assert "| JMP | not installed |" in report.markdown(results(wide=[result]))


def results(**steps):
    environment = dict.fromkeys(
        ("date", "device", "processor", "system", "python", "xla_flags"), ""
    )
    environment |= {"cores": 1, "versions": {"jmp": None}, "load_before": 0.0, "load_after": 0.0}
    settings = {"size": "tiny", "rounds": 2, "sample_seconds": 0.0, "seed": 0}
    return {
        "environment": environment,
        "settings": settings,
        "steps": steps,
        "compilation": [],
    }


def test_who_fails_is_reported_unless_it_is_us(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such luck\nsecond line")

    workload = workloads.gradients(SHAPES, jnp.float32)

    class Failing(OptaxAlone):
        name = "another"
        optimizer_step = fail

    with pytest.raises(suite.LeftOutError, match="raises RuntimeError: no such luck"):
        suite.build(Failing, "adamw", workload, options(Failing))
    monkeypatch.setattr(Ours, "optimizer_step", fail)
    with pytest.raises(RuntimeError, match="no such luck"):
        suite.build(Ours, "adamw", workload, options(Ours))


def test_who_compiles_too_long_is_stopped_and_reported():
    few = dataclasses.replace(options(OptaxAlone), compile_limit=0.0)
    first, second = suite.run_compilation(few)
    assert len(first["rows"][OptaxAlone.name]["seconds"]) == 1
    assert second["rows"][OptaxAlone.name]["left_out"].endswith("s at 3 arrays, then stopped")


def test_a_sample_starts_fresh_and_drops_its_first_step():
    taken = []

    def run(state, data):
        taken.append(int(state))
        return state + data

    step = measure.Compiled(run, init=lambda: jnp.zeros((), jnp.int32), data=1)
    samples = measure.time_steps(
        {"it": step}, rounds=3, sample_seconds=0, seed=0, tick=lambda _: None
    )
    assert taken == 4 * [0, 1]  # a round to warm up and three rounds, each of two steps
    assert len(samples["it"].seconds) == 3


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        ("  %copy.1 = f32[4,3]{1,0} copy(%p)", 1),
        ("  ROOT %copy = f16[4,3]{0,1:T(8,128)} copy(f16[4,3]{1,0} %p)", 1),
        ("  %copy.2 = f32[4]{0} copy(%p)", 0),
        ("  %copy.3 = f32[] copy(%p)", 0),
        ("  %copy_fusion = f32[4,3]{1,0} fusion(%p), kind=kLoop", 0),
    ],
)
def test_copies_are_counted(line, copies):
    assert measure.count_copies(f"ENTRY main {{\n{line}\n}}", {(4, 3), ()}) == copies


def test_the_workloads_are_what_they_claim():
    shapes = workloads.resnet50(workloads.Sizes())
    assert (len(shapes), sum(map(np.prod, shapes))) == (161, 25_557_032)
    shapes = workloads.wide(100_000_000)
    assert (len(shapes), sum(map(np.prod, shapes))) == (12, 100_663_296)
    leaves = jax.tree.leaves(workloads.transformer(workloads.Sizes()).params)
    assert (len(leaves), round(sum(leaf.size for leaf in leaves) / 1e6)) == (69, 35)


def test_the_command_writes_table_picture_and_numbers(tmp_path):
    command = [sys.executable, "-m", "benchmarks.run", "--size=tiny", "--rounds=2"]
    command += ["--sample-seconds=0.001", "--compile-rounds=1", f"--output={tmp_path}"]
    command += ["--contenders", "Ours", "--only", "wide", "training", "inner", "compilation"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)  # noqa: S603

    found = json.loads((tmp_path / "benchmarks.json").read_text())
    assert list(found["steps"]) == ["wide", "training", "inner"]
    assert found["environment"]["versions"]["jax"] == jax.__version__
    names = [kind.name for kind in CONTENDERS]
    benchmarks = [*itertools.chain(*found["steps"].values()), *found["compilation"]]
    assert len(benchmarks) == 1 + 1 + 6 + 2
    for benchmark in benchmarks:
        assert list(benchmark["rows"]) == names
        for row in benchmark["rows"].values():
            assert "ratios" in row or row["left_out"] in ("not chosen", "not installed")
        assert len(benchmark["rows"][Ours.name]["ratios"]) in (1, 2)
    (wide,) = found["steps"]["wide"]
    ours = wide["rows"][Ours.name]
    assert ours["in_place"] == ours["state"]

    table = (tmp_path / "benchmarks.md").read_text()
    headings = [line for line in table.splitlines() if line.startswith("## ")]
    assert len(headings) == 4
    assert f"| {Ours.name} | " in table
    assert (tmp_path / "benchmarks.png").stat().st_size > 10_000


def test_who_stops_a_run_keeps_what_was_measured(tmp_path, monkeypatch):
    measured = suite.run_steps

    def stop_at_the_second(benchmark, given):
        if benchmark not in suite.STEPS["wide"]:
            raise KeyboardInterrupt
        return measured(benchmark, given)

    monkeypatch.setattr(suite, "run_steps", stop_at_the_second)
    arguments = ["--size=tiny", "--rounds=1", "--sample-seconds=0", "--contenders", "Ours"]
    with pytest.raises(KeyboardInterrupt):
        run.main([*arguments, "--output", str(tmp_path)])
    kept = json.loads((tmp_path / "benchmarks.json").read_text())
    assert list(kept["steps"]) == ["wide"]
    assert kept["steps"]["wide"][0]["rows"][Ours.name]["ratios"]
    assert Ours.name in (tmp_path / "benchmarks.md").read_text()
    assert (tmp_path / "benchmarks.png").stat().st_size > 0


def test_in_row_major_order_each_gradient_is_transposed_once(capsys):
    row_major.main(["--size=tiny", "--rounds=1", "--sample-seconds=0"])
    _, _, *lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    transpositions = {name: int(count) for name, *_, count in cells}
    assert list(transpositions) == [kind.name for kind in row_major.CONTENDERS]
    assert all(float(ratio) > 0 for _, ratio, *_ in cells)
    matrices = 5  # four in its only layer, and the head; the embedding's gradient is a scatter
    assert transpositions[OptaxAlone.name] == 2 * matrices
    for kind in (row_major.OptaxRowMajor, row_major.OursRowMajor):
        assert transpositions[kind.name] == matrices
