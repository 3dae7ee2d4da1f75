"""What XLA compiles a step to for an H100, and for TPUs. `make aot` runs these tests.

Compilation needs no such device, but XLA's compilers for them, which `make test` does not install.
"""

import json
import math

import pytest

from benchmarks import aot
from benchmarks.contenders import CONTENDERS, Ours
from benchmarks.workloads import SIZES, wide

for needed in ("jax_cuda12_plugin", "libtpu"):
    pytest.importorskip(needed, reason=f"{needed} is of the group `aot`: `make aot` installs it")

pytestmark = pytest.mark.slow

# Against plain Optax: bytes, kernels, exchanges between devices and bytes exchanged, at most.
ON_H100 = {
    "wide": (1.145, 21, 0, 0),
    "deep": (1.145, 198, 0, 0),
    "clip": (1.005, 35, 0, 0),
    "clip-deep": (1.005, 304, 0, 0),
    "fsdp": (1.15, 277, 1, 1),
    "replicated": (1.15, 280, 1, 1),
    "explicit": (1.15, 216, 1, 1),
    "tensor": (1.15, 277, 1, 1),
    "shard_map": (1.15, 199, 1, 2),
    "training-clip": (1.002, 540, 0, 0),
    "stack-shard_map": (1.005, 47, 1, 12),
}
# Bytes for each parameter, and kernels, on an H100: of ours at most, of others as they were.
PATHS = {
    "functions": {"Where": (32, 21), "Functional": (32, 22), "Jmp": (32, 43)},
    "guards": {
        "SkipIf": (32, 19),
        "IfFinite": (32, 40),
        "Spike": (32, 29),
        "SpikeByHand": (32, 44),
        "SpikeNorm": (32, 40),
        "SpikeNormByHand": (32, 56),
        "MaxText": (32, 45),
        "Levanter": (32, 51),
    },
    "masters": {
        "MastersByHand": (28, 14),
        "Masters": (30, 14),
        "Apex": (30, 43),
        "MastersScaled": (32, 21),
    },
    "remainders": {
        "MastersByHand": (28, 14),
        "Remainders": (26, 14),
        "SkipIfRemainders": (28, 19),
        "RemaindersBfloat16State": (18, 15),
        "SpikeRemaindersBfloat16State": (20, 32),
    },
    "remainders-clip": {
        "MastersByHand": (30, 39),
        "SkipIfRemainders": (28, 32),
        "RemaindersBfloat16State": (20, 40),
        "SpikeRemaindersBfloat16State": (20, 46),
    },
    "state": {"Bfloat16State": (20, 15)},
    "stack": {"Stack": (32, 46), "StackByHand": (32, 60)},
    "stack-half": {"Stack": (32, 46), "StackOfHalvesByHand": (30, 60)},
}
# Estimated cycles on a v5e against the baseline without any of it, at most.
PATHS_ON_V5E = {
    ("functions", "Where"): 1.19,
    ("functions", "Functional"): 1.19,
    ("guards", "SkipIf"): 1.19,
    ("guards", "Spike"): 1.195,
    ("guards", "SpikeNorm"): 1.48,
    ("masters", "MastersScaled"): 1.195,
    ("state", "Bfloat16State"): 0.715,
    ("stack", "Stack"): 1.155,
    ("stack-half", "Stack"): 1.165,
}
# Estimated cycles against plain Optax, at most.
CYCLES = {
    ("v5e", "wide"): 1.19,
    ("v5e", "deep"): 1.28,
    ("v6e", "wide"): 1.14,
    ("v6e", "deep"): 1.64,
}


def compile_all(output, backend, cases, names):
    """Return what is counted, by case and contender."""
    chosen = "--cases", *cases, "--contenders", *names
    aot.main(["--backends", backend, *chosen, f"--output={output}"])
    results = json.loads((output / "aot.json").read_text())
    return {case: results[f"{backend} {case}"]["rows"] for case in cases}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Return what is counted of plain Optax and of ours, by backend and case."""
    cases = {"h100": ON_H100, "v5e": ("wide", "deep"), "v6e": ("wide", "deep")}
    found = {}
    for backend, names in cases.items():
        output = tmp_path_factory.mktemp(backend)
        for case, rows in compile_all(output, backend, names, ["Ours", "Stack"]).items():
            plain, ours = rows.values()
            assert plain["baseline"] == ours["baseline"] == CONTENDERS["Optax"].name
            found[backend, case] = plain, ours
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Return what is counted of each path, by backend, case and contender."""
    names = {name for limits in PATHS.values() for name in limits}
    cases, ours = map(dict.fromkeys, zip(*PATHS_ON_V5E, strict=True))
    return {
        "h100": compile_all(tmp_path_factory.mktemp("h100"), "h100", PATHS, names),
        "v5e": compile_all(tmp_path_factory.mktemp("v5e"), "v5e", cases, ours),
    }


@pytest.mark.parametrize("case", ON_H100)
def test_bytes_kernels_and_exchanges_on_a_gpu_do_not_grow(counted, case):
    plain, ours = counted["h100", case]
    limits = ON_H100[case]
    found = (
        ours["bytes"] / plain["bytes"],
        ours["kernels"],
        ours["collectives"] - plain["collectives"],
        ours["exchanged"] - plain["exchanged"],
    )
    assert all(a <= b for a, b in zip(found, limits, strict=True)), (found, limits)


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, limits in PATHS.items() for name in limits]
)
def test_bytes_and_kernels_of_a_path_do_not_grow_and_others_are_as_they_were(paths, case, name):
    contender = CONTENDERS[name]
    found = paths["h100"][case][contender.name]
    parameters = sum(map(math.prod, wide(SIZES["full"].wide // 2)))
    moved, kernels = PATHS[case][name]
    if isinstance(contender, Ours):
        assert found["bytes"] / parameters <= moved + 0.01
        assert found["kernels"] <= kernels
    else:
        assert found["bytes"] / parameters == pytest.approx(moved, abs=0.01)
        assert found["kernels"] == kernels


@pytest.mark.parametrize(("case", "name"), PATHS_ON_V5E)
def test_estimated_cycles_of_a_path_do_not_grow(paths, case, name):
    found = paths["v5e"][case][CONTENDERS[name].name]
    plain = paths["v5e"][case][found["baseline"]]
    assert found["cycles"] / plain["cycles"] <= PATHS_ON_V5E[case, name]


@pytest.mark.parametrize(("backend", "case"), CYCLES)
def test_estimated_cycles_on_a_tpu_do_not_grow(counted, backend, case):
    plain, ours = counted[backend, case]
    assert ours["cycles"] / plain["cycles"] <= CYCLES[backend, case]
    assert ours["bytes"] / plain["bytes"] <= 1.09
