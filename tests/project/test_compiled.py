"""What XLA compiles a step to for an H100, and for TPUs. `make aot` runs these tests.

Compilation needs no such device, but XLA's compilers for them, which `make test` does not install.
"""

import json
import math

import pytest

from benchmarks import aot, contenders
from benchmarks.contenders import MastersByHand, OptaxAlone
from benchmarks.workloads import SIZES, wide

for needed in ("jax_cuda12_plugin", "libtpu"):
    pytest.importorskip(needed, reason=f"{needed} is of the group `aot`: `make aot` installs it")

pytestmark = pytest.mark.slow

CONTENDERS = "OptaxAlone", "Ours", "OverAxis", "Stack", "StackOverAxis"

PLAIN = {OptaxAlone.name, MastersByHand.name}

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
    "stack": (1.005, 46, 0, 0),
    "stack-shard_map": (1.005, 47, 1, 12),
}
# Bytes for each parameter, and kernels, at most: of clipping, AdamW, masters, Spike and scaling; of
# masters in two bytes with AdamW, and with clipping and a guard.
HALF = {
    ("stack-half", "HalfStack"): (32.01, 46),
    ("remainders", "Remainders"): (26.1, 14),
    ("remainders-clip", "RemaindersSkipped"): (28.1, 32),
}
# Estimated cycles against plain Optax, at most.
CYCLES = {
    ("v5e", "wide"): 1.19,
    ("v5e", "deep"): 1.28,
    ("v6e", "wide"): 1.14,
    ("v6e", "deep"): 1.64,
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Return what is counted, by backend, case and whether it is plain Optax."""
    output = tmp_path_factory.mktemp("aot")
    cases = {"h100": ON_H100, "v5e": ("wide", "deep"), "v6e": ("wide", "deep")}
    found = {}
    for backend, names in cases.items():
        options = f"--output={output}", "--contenders", *CONTENDERS
        aot.main(["--backends", backend, "--cases", *names, *options])
        for row in json.loads((output / "aot.json").read_text()):
            found[backend, row["case"], row["contender"] in PLAIN] = row
    return found


@pytest.mark.parametrize("case", ON_H100)
def test_bytes_kernels_and_exchanges_on_a_gpu_do_not_grow(counted, case):
    plain, ours = (counted["h100", case, is_plain] for is_plain in (True, False))
    limits = ON_H100[case]
    found = (
        ours["bytes"] / plain["bytes"],
        ours["kernels"],
        ours["collectives"] - plain["collectives"],
        ours["exchanged"] - plain["exchanged"],
    )
    assert all(a <= b for a, b in zip(found, limits, strict=True)), (found, limits)


@pytest.mark.parametrize(("case", "contender"), HALF)
def test_bytes_and_kernels_of_half_precision_do_not_grow(case, contender, tmp_path):
    chosen = "--cases", case, "--contenders", contender, f"--output={tmp_path}"
    aot.main(["--backends", "h100", *chosen])
    *_, found = json.loads((tmp_path / "aot.json").read_text())
    parameters = sum(map(math.prod, wide(SIZES["full"].wide // 2)))
    assert found["contender"] == getattr(contenders, contender).name
    most_bytes, most_kernels = HALF[case, contender]
    assert found["bytes"] / parameters <= most_bytes
    assert found["kernels"] <= most_kernels


@pytest.mark.parametrize(("backend", "case"), CYCLES)
def test_estimated_cycles_on_a_tpu_do_not_grow(counted, backend, case):
    plain, ours = (counted[backend, case, is_plain] for is_plain in (True, False))
    assert ours["cycles"] / plain["cycles"] <= CYCLES[backend, case]
    assert ours["bytes"] / plain["bytes"] <= 1.09
