"""Count what a compiled step does, from its program."""

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

_ARRAY = re.compile(r"\b([a-z]+\d*)(?:e\w+)?\[([\d,]*)\](\{[^}]*\})?")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_CALLS = {"call", "while", "conditional"}
_CALLED = re.compile(r"(?:to_apply|body|\w+_computations?)=(?:\{([^}]*)\}|(%[\w.\-]+))")
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?$"
)


@dataclasses.dataclass
class Counts:
    """Counts for one run of a program, with its longest branches. Sizes are in bytes."""

    bytes: int = 0  # read and written by kernels in main memory: each operand and result once
    kernels: int = 0  # launches: fused loops, single operations, copies, collectives
    copies: int = 0  # of 4 kB and more
    collectives: int = 0  # communication between devices
    exchanged: int = 0
    microseconds: float = 0.0  # XLA:GPU's own estimate for the kernels, without launches
    cycles: int = 0  # XLA:TPU's own estimate


class _Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: list[str]
    line: str


def compile_step(
    step: Any, state: Any, data: Any, *, options: dict[str, Any] | None = None, **shardings: Any
) -> tuple[Any, dict[str, Any]]:
    """Compile a step with its state donated. Return it and its figures.

    The figures are the fields of `Counts`; the bytes that XLA counts as `accessed`; the sizes in
    bytes of `temporary` memory, of the donated `state`, and of the part of it that is overwritten
    `in_place`; the number of `transpositions` of matrices, including those in fused loops; and
    `compile_seconds`, which include `trace_seconds`.
    """
    start = time.perf_counter()
    traced = jax.jit(step, donate_argnums=0, **shardings).trace(state, data)
    trace_seconds = time.perf_counter() - start
    compiled = traced.lower().compile(options)
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    return compiled, dataclasses.asdict(count(text)) | {
        "accessed": (compiled.cost_analysis() or {}).get("bytes accessed"),
        "temporary": memory.temp_size_in_bytes,
        "state": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "in_place": memory.alias_size_in_bytes,
        "transpositions": len(re.findall(r"= \w+\[\d+,\d+\]\S* transpose\(", text)),
        "trace_seconds": trace_seconds,
        "compile_seconds": seconds,
    }


def count(text: str) -> Counts:
    """Return the counts of a program, given its optimized HLO."""
    return _count(dict(_computations(text)), "ENTRY")


def _count(programs: dict[str, list[_Instruction]], name: str) -> Counts:
    counts, program = Counts(), programs[name]
    types = {instruction.name: instruction.type for instruction in program}
    for _, type_, opcode, operands, line in program:
        if opcode in _CALLS:
            found = ["".join(names) for names in _CALLED.findall(line)]
            names = re.findall(r"%([\w.\-]+)", " ".join(found))
            called = max((_count(programs, name) for name in names), key=lambda each: each.bytes)
            for field, value in vars(called).items():
                setattr(counts, field, getattr(counts, field) + value)
        if opcode in _FREE | _CALLS or opcode.endswith("-done") or "ConcatBitcast" in line:
            continue
        read = [_size(types.get(name, "")) for name in dict.fromkeys(operands)]
        if opcode in ("copy-start", "slice-start"):
            # A prefetch. Its type begins with the destination; the type of a slice begins with the
            # sources.
            dtype, dims, layout = _ARRAY.findall(type_)[opcode == "slice-start"]
            counts.bytes += bool(read[0]) * _elements(dtype, dims) + _size_of(dtype, dims, layout)
            continue
        written = _size(type_)
        counts.kernels += 1
        counts.bytes += written + sum(read)
        counts.copies += opcode == "copy" and written >= 2**12
        if _COLLECTIVE.match(opcode):
            counts.collectives += 1
            counts.exchanged += sum(read)
        for estimate in re.findall(r'"exec_time_us":([\d.e+\-]+)[^{}]*"name":""', line):
            counts.microseconds += float(estimate)
        for estimate in re.findall(r'"estimated_cycles":"(\d+)"', line):
            counts.cycles += int(estimate)
    return counts


def _computations(text: str) -> Iterator[tuple[str, list[_Instruction]]]:
    lines = iter(text.splitlines())
    for line in lines:
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            body = itertools.takewhile(lambda line: not line.startswith("}"), lines)
            yield "ENTRY" if head[1] else head[2], [i for i in map(_instruction, body) if i]


def _instruction(line: str) -> _Instruction | None:
    """Read `ROOT %name = type opcode(operands), attributes`."""
    head = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    end = _top_level(line, head.end(), " ")
    opcode, _, rest = line[end + 1 :].partition("(")
    operands = re.findall(r"%([\w.\-]+)", rest[: _top_level(rest + ")", 0, ")")])
    return _Instruction(head[1], line[head.end() : end], opcode, operands, line)


def _top_level(text: str, start: int, wanted: str) -> int:
    """Return the index of the first such character outside of all brackets."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] == wanted and not depth:
            return place
        depth += (text[place] in "({[") - (text[place] in ")}]")
    raise ValueError(f"no {wanted!r} in {text!r}")


def _size(type_: str) -> int:
    return sum(_size_of(*array) for array in _ARRAY.findall(type_))


def _size_of(dtype: str, dims: str, layout: str) -> int:
    # S(1) and above are memories next to the cores.
    return 0 if re.search(r"S\([1-9]\)", layout) else _elements(dtype, dims)


def _elements(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)
    return bits // 8 * math.prod(int(n) for n in dims.split(",") if n)
