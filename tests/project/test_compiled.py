"""What XLA compiles a step to for an H100, and for TPUs. `make aot` runs these tests.

Compilation needs no such device, but XLA's compilers for them, which `make test` does not install.
"""

import functools
import json

import pytest

from benchmarks import aot
from benchmarks.contenders import CONTENDERS

for needed in ("jax_cuda12_plugin", "libtpu"):
    pytest.importorskip(needed, reason=f"{needed} is of the group `aot`: `make aot` installs it")

pytestmark = pytest.mark.usefixtures("optimized")

# By case, contender and backend, at most: bytes (on a TPU, estimated cycles) against the baseline,
# kernels, exchanges between devices, and bytes exchanged, both beyond the baseline's.
LIMITS = {
    ("wide", "Ours", "h100"): (1.145, 26),
    ("deep", "Ours", "h100"): (1.145, 203),
    ("clip", "Ours", "h100"): (1.005, 39),
    ("clip-deep", "Ours", "h100"): (1.005, 307),
    ("fsdp", "Ours", "h100"): (1.15, 281, 1, 1),
    ("replicated", "Ours", "h100"): (1.15, 284, 1, 1),
    ("explicit", "Ours", "h100"): (1.15, 220, 1, 1),
    ("shard_map", "Ours", "h100"): (1.15, 200, 1, 2),
    ("training-clip", "Ours", "h100"): (1.002, 545),
    ("functions", "Functional", "h100"): (1.145, 25),
    ("functions", "Jmp", "h100"): (1.145, 43),
    ("guards", "SkipIf", "h100"): (1.145, 24),
    ("guards", "Spike", "h100"): (1.145, 34),
    ("guards", "SpikeNorm", "h100"): (1.145, 45),
    ("masters", "Masters", "h100"): (1.073, 14),
    ("masters", "MastersScaled", "h100"): (1.145, 26),
    ("remainders", "Remainders", "h100"): (0.93, 14),
    ("remainders", "SkipIfRemainders", "h100"): (1.001, 24),
    ("remainders", "RemaindersBfloat16State", "h100"): (0.644, 15),
    ("remainders", "SpikeRemaindersBfloat16State", "h100"): (0.716, 35),
    ("remainders-clip", "SkipIfRemainders", "h100"): (0.934, 37),
    ("remainders-clip", "RemaindersBfloat16State", "h100"): (0.668, 40),
    ("remainders-clip", "SpikeRemaindersBfloat16State", "h100"): (0.668, 48),
    # Against 28, 30 and 20 bytes per parameter: 14, 16 and 10.
    ("remainders", "RoundedBfloat16State", "h100"): (0.501, 17),
    ("remainders-clip", "SpikeRoundedBfloat16State", "h100"): (0.535, 50),
    ("remainders-lion", "RoundedBfloat16State", "h100"): (0.501, 16),
    ("remainders-fsdp", "RoundedBfloat16State", "h100"): (1, 300, 0, 0),
    ("state", "Bfloat16State", "h100"): (0.716, 15),
    ("stack", "Stack", "h100"): (1.005, 47),
    ("stack-half", "Stack", "h100"): (1.068, 47),
    ("stack-shard_map", "Stack", "h100"): (1.005, 47, 1, 12),
    ("wide", "Ours", "v5e"): (1.19,),
    ("deep", "Ours", "v5e"): (1.28,),
    ("wide", "Ours", "v6e"): (1.14,),
    ("deep", "Ours", "v6e"): (1.64,),
    ("functions", "Functional", "v5e"): (1.19,),
    ("guards", "SkipIf", "v5e"): (1.19,),
    ("guards", "Spike", "v5e"): (1.195,),
    ("guards", "SpikeNorm", "v5e"): (1.48,),
    ("masters", "MastersScaled", "v5e"): (1.195,),
    ("state", "Bfloat16State", "v5e"): (0.715,),
    ("autocast", "Autocast", "h100"): (0.75, 800),
    ("autocast", "ByHand", "h100"): (0.75, 850),
    ("autocast-scanned", "Autocast", "h100"): (0.56, 1050),
    ("autocast-scanned", "ByHand", "h100"): (0.67, 1400),
    ("autocast-remat", "Autocast", "h100"): (0.75, 1150),
    ("autocast-remat", "AutocastCheckpoints", "h100"): (0.73, 1220),
    ("autocast-remat", "ByHand", "h100"): (0.67, 1120),
    ("flash", "Autocast", "h100"): (0.77, 4600),
    ("flash", "ByHand", "h100"): (0.76, 4900),
    ("autocast-stored", "AutocastRemaindersBfloat16State", "h100"): (0.84, 1100),
    ("autocast-stored-dots", "AutocastRemaindersBfloat16State", "h100"): (1.1, 1100),
    ("stack", "Stack", "v5e"): (1.155,),
    ("stack-half", "Stack", "v5e"): (1.165,),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Return a function that compiles a case once and returns what is counted, by contender."""

    @functools.cache
    def compile_case(case, backend):
        output = tmp_path_factory.mktemp(backend)
        names = [name for key, name, where in LIMITS if (key, where) == (case, backend)]
        options = "--backends", backend, "--cases", case, f"--output={output}"
        aot.main([*options, "--contenders", *names])
        return json.loads((output / "aot.json").read_text())[f"{backend} {case}"]["rows"]

    return compile_case


@pytest.mark.parametrize(("case", "name", "backend"), LIMITS)
def test_a_compiled_step_does_no_more_than_before(case, name, backend, counted):
    rows = counted(case, backend)
    ours = rows[CONTENDERS[name].name]
    plain = rows[ours["baseline"]]
    measure = "bytes" if backend == "h100" else "cycles"
    more = [ours[name] - plain[name] for name in ("collectives", "exchanged")]
    found = [ours[measure] / plain[measure], ours["kernels"], *more]
    limits = [*LIMITS[case, name, backend], 0, 0]
    if backend != "h100":
        del found[1:2]  # its compilers count other things as kernels
        assert case not in {"wide", "deep"} or ours["bytes"] <= 1.09 * plain["bytes"]
    assert all(a <= b for a, b in zip(found, limits, strict=False)), (found, limits)


@pytest.mark.parametrize(
    ("case", "name", "most_bytes", "most_memory"),
    [
        ("autocast", "Autocast", 1.12, 1.22),
        ("autocast-scanned", "Autocast", 0.84, 0.42),
        ("autocast-remat", "Autocast", 1.14, 0.94),
        ("autocast-remat", "AutocastCheckpoints", 1.11, 0.88),
        ("flash", "Autocast", 1.03, 0.46),
    ],
)
def test_autocast_against_a_model_in_half_precision(case, name, most_bytes, most_memory, counted):
    rows = counted(case, "h100")
    found, by_hand = (rows[CONTENDERS[key].name] for key in (name, "ByHand"))
    assert found["bytes"] <= most_bytes * by_hand["bytes"]
    assert found["temporary"] <= most_memory * by_hand["temporary"]


def test_the_plain_check_of_jmp_takes_twice_the_kernels(counted):
    # If it takes fewer, a GPU no longer needs the check in `_xla/finite.py`.
    assert counted("functions", "h100")[CONTENDERS["Jmp"].name]["kernels"] == 43
