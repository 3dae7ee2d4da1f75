"""The benchmarks: every contender takes the same step, and the report says who is left out."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import aot, hlo, measure, row_major, run, suite, workloads
from benchmarks.contenders import (
    ALL_CONTENDERS,
    CONTENDERS,
    MASTERS,
    Jmp,
    KerasAlone,
    OptaxAlone,
    Ours,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quickly_compiled"),
    pytest.mark.filterwarnings("default:::(jmp|mpx|jaxamp|equinox|keras)"),
]

SHAPES = [(4, 3), (3,)]
OPTIONS = suite.Options(
    workloads.SIZES["tiny"], ALL_CONTENDERS, rounds=2, sample_seconds=0, compile_rounds=1,
    compile_limit=60, seed=0,
)  # fmt: skip
SHORT = "--size=tiny", "--rounds=1", "--sample-seconds=0", "--compile-rounds=1"

each_contender = pytest.mark.parametrize(
    "kind", [kind for kind in CONTENDERS if kind.version()], ids=lambda kind: kind.__name__
)


def loss_fn(params, batch):
    weights, bias = (p.astype(jnp.float16) for p in params)
    return jnp.mean((batch.astype(jnp.float16) @ weights + bias).astype(jnp.float32) ** 2)


def compiled(kind, workload):
    contender, step, data = suite.build(kind, "adamw", workload, ALL_CONTENDERS)
    return jax.jit(step), contender.init(workload.params), data


def assert_optaxs(kind, before, state, grads, steps):
    """Compare with steps of Optax on true gradients."""
    tx = optax.adamw(1e-3)
    expected = before
    opt_state = tx.init(expected)
    for _ in range(steps):
        updates, opt_state = tx.update(grads, opt_state, expected)
        expected = optax.apply_updates(expected, updates)
    # The updates are about 1e-3. Keras adds Adam's epsilon in another place.
    rtol = 2e-2 if issubclass(kind, KerasAlone) else 1e-3
    for p, a, e in zip(before, state.params, expected, strict=True):
        np.testing.assert_allclose(a - p, e - p, rtol=rtol, atol=1e-7)
    # A wrong scale of the gradients hardly changes Adam's step, but it changes the first moment.
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == SHAPES[0]]
    moment = (1 - 0.9**steps) * grads[0]
    assert any(np.allclose(leaf, moment, rtol=1e-2) for leaf in moments)


@each_contender
def test_the_training_step_is_optaxs(kind):
    params = workloads.gradients(SHAPES, jnp.float16).params
    step, state, batch = compiled(kind, workloads.Training(params, loss_fn, jnp.eye(4)))
    grads = jax.grad(loss_fn)(params, batch)
    assert_optaxs(kind, params, step(state, batch), grads, steps=1)


@each_contender
def test_an_overflow_is_skipped_by_all_who_say_so_and_later_steps_are_optaxs(kind):
    workload = workloads.gradients(SHAPES, jnp.float16)
    grads = [g.astype(jnp.float32) for g in workload.unscaled]
    step, state, data = compiled(kind, workload)
    bad = step(state, [data[0].at[1, 2].set(jnp.inf), *data[1:]])
    scale = workloads.LOSS_SCALE if kind.scales else 1.0
    if kind.skips:
        jax.tree.map(np.testing.assert_array_equal, bad.params, workload.params)
        state = bad  # only the loss scale has changed
        scale = scale / 2 if kind.scales else scale
    else:
        assert not np.isfinite(bad.params[0]).all()
    good = [(g * scale).astype(jnp.float16) for g in grads]
    assert_optaxs(kind, workload.params, step(step(state, good), good), grads, steps=2)


def test_masters_are_kept_as_by_hand():
    workload = workloads.half_parameters(SHAPES)
    assert {p.dtype for p in (*workload.params, *workload.scaled)} == {jnp.dtype("float16")}
    reached = []
    for kind in MASTERS:
        step, state, data = compiled(kind, workload)
        reached.append(step(step(state, data), data).params)
    before, by_hand, *others = workload.params, *reached
    for other in others:
        for p, a, e in zip(before, other, by_hand, strict=True):
            assert (a != p).any()
            np.testing.assert_allclose(a, e, atol=2**-10 * 0.1)


def test_who_is_left_out_is_reported_and_an_interrupted_run_keeps_its_results(
    tmp_path, monkeypatch
):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Jmp, "package", "a package that nobody has")
    monkeypatch.setattr(suite, "run_compilation", stop)
    options = *SHORT, f"--output={tmp_path}", "--only", "wide", "compilation"
    with pytest.raises(KeyboardInterrupt):
        run.main([*options, "--contenders", "Ours", "Jmp"])
    kept = json.loads((tmp_path / "benchmarks.json").read_text())
    assert list(kept["steps"]) == ["wide"]
    ((wide,),) = kept["steps"].values()
    assert list(wide["rows"]) == [kind.name for kind in CONTENDERS]
    assert wide["rows"]["JMP"]["left_out"] == "not installed"
    assert wide["rows"]["mpx"]["left_out"] == "not chosen"
    ours = wide["rows"][Ours.name]
    assert len(ours["ratios"]) == 1
    assert ours["in_place"] == ours["state"]
    assert "| JMP | not installed |" in (tmp_path / "benchmarks.md").read_text()
    assert (tmp_path / "benchmarks.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_the_command_runs_every_benchmark(tmp_path):
    run.main([*SHORT, "--contenders", "Ours", "MastersScaled", f"--output={tmp_path}"])
    found = json.loads((tmp_path / "benchmarks.json").read_text())
    assert list(found["steps"]) == list(suite.STEPS)
    benchmarks = [*itertools.chain(*found["steps"].values()), *found["compilation"]]
    ratios = [len(benchmark["rows"][Ours.name]["ratios"]) for benchmark in benchmarks]
    assert ratios == (5 + 6 + 2) * [1]
    assert (tmp_path / "benchmarks.md").read_text().count("\n## ") == 7


def test_who_compiles_too_long_is_stopped_and_reported():
    options = dataclasses.replace(OPTIONS, contenders=(OptaxAlone,), compile_limit=0.0)
    first, second = suite.run_compilation(options)
    assert len(first["rows"][OptaxAlone.name]["seconds"]) == 1
    assert second["rows"][OptaxAlone.name]["left_out"].endswith("s at 3 arrays, then stopped")


def test_who_fails_is_reported_unless_it_is_us(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such luck\nsecond line")

    workload = workloads.gradients(SHAPES, jnp.float16)
    monkeypatch.setattr(Ours, "optimizer_step", fail)
    with pytest.raises(RuntimeError, match="no such luck"):
        suite.build(Ours, "adamw", workload, [Ours])
    failing = type("Failing", (OptaxAlone,), {"name": "another", "optimizer_step": fail})
    with pytest.raises(suite.LeftOutError, match=r"RuntimeError: no such luck$"):
        suite.build(failing, "adamw", workload, [failing])


def test_a_sample_starts_fresh_and_drops_its_first_step():
    taken = []

    def one_step(state, data):
        taken.append(int(state))
        return state + data

    step = measure.Compiled(one_step, init=lambda: jnp.zeros((), jnp.int32), data=1)
    samples = measure.time_steps(
        {"it": step}, rounds=3, sample_seconds=0, seed=0, tick=lambda _: None
    )
    assert taken == 4 * [0, 1]  # a round to warm up and three rounds, each of two steps
    assert len(samples["it"].seconds) == 3


def test_the_workloads_are_what_they_claim():
    shapes = workloads.resnet50(workloads.Sizes())
    assert (len(shapes), sum(map(np.prod, shapes))) == (161, 25_557_032)
    shapes = workloads.wide(100_000_000)
    assert (len(shapes), sum(map(np.prod, shapes))) == (12, 100_663_296)
    leaves = jax.tree.leaves(workloads.transformer(workloads.Sizes()).params)
    assert (len(leaves), round(sum(leaf.size for leaf in leaves) / 1e6)) == (69, 35)


@pytest.mark.exhaustive
def test_in_row_major_order_each_gradient_is_transposed_once(capsys):
    row_major.main(["--size=tiny", "--rounds=1", "--sample-seconds=0"])
    _, _, *lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    transpositions = {name: int(count) for name, *_, count in cells}
    assert list(transpositions) == [kind.name for kind in row_major.CONTENDERS]
    matrices = 5  # four in its only layer, and the head; the embedding's gradient is a scatter
    assert transpositions[OptaxAlone.name] == 2 * matrices
    for kind in (row_major.OptaxRowMajor, row_major.OursRowMajor):
        assert transpositions[kind.name] == matrices


PROGRAM = """\
%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} copy(%p)
}

ENTRY %main (a: f32[1024,2], b: f16[4], c: f32[8]) -> (f32[1024,2], pred[]) {
  %a = f32[1024,2]{1,0} parameter(0)
  %b = f16[4]{0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %v = f32[8]{0:T(8)S(1)} fusion(%c), kind=kLoop, calls=%f, "estimated_cycles":"7"
  %copy.1 = f32[1024,2]{0,1} copy(%a)
  %f = (f32[1024,2]{1,0}, /*index=1*/f16[4]{0}) fusion(%a, %b, %a), kind=kLoop, calls=%g, \
"exec_time_us":1.5,"compute_time_us":1,"name":"" "exec_time_us":9,"name":"sol"
  %w = f32[8]{0} while(%c), condition=%d, body=%body
  %r = pred[]{:T(512)} all-reduce-start(%e), replica_groups={}, to_apply=%and
  %done = pred[] all-reduce-done(%r)
  ROOT %t = (f32[1024,2]{1,0}, pred[]) tuple(%copy.1, %done)
}
"""


def test_a_program_is_counted_in_its_text():
    program = PROGRAM.replace("%r = pred", "%e = pred[] and(%x, %y)\n  %r = pred")
    assert hlo.count(program) == hlo.Counts(
        # In the order of the lines: fused into fast memory, copied, fused, copied in the loop, the
        # conjunction, and the exchange.
        bytes=32 + 2 * 8192 + (2 * 8192 + 2 * 8) + 2 * 32 + 1 + 2,
        kernels=6,
        copies=1,
        collectives=1,
        exchanged=1,
        microseconds=1.5,
        cycles=7,
    )


def test_steps_are_compiled_for_devices_and_counted(tmp_path):
    cases = ["wide", "fsdp", "shard_map", "masters"]
    size = ["--size=tiny", f"--output={tmp_path}", "--backends=cpu"]
    aot.main([*size, "--cases", *cases, "--contenders", "Ours", "OverAxis", "MastersScaled"])
    rows = {(r["case"], r["contender"]): r for r in json.loads((tmp_path / "aot.json").read_text())}
    assert [case for case, name in rows if name == Ours.name] == cases
    for case, plain in zip(cases, 3 * ["Optax alone"] + ["Masters by hand"], strict=True):
        ours, bare = rows[case, Ours.name], rows[case, plain]
        assert ours["bytes"] > bare["bytes"]
        assert ours["in_place"] > bare["in_place"] > 0
        assert (ours["collectives"] > 0, bare["collectives"]) == (case in ("fsdp", "shard_map"), 0)
    assert (tmp_path / "aot.md").read_text().count("\n| optax_lossscale |") == len(cases)
    assert (tmp_path / "hlo/cpu-fsdp-Ours.txt").exists()
