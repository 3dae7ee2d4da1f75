"""Count what a compiled step does, from its program."""

import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from optax_lossscale._autocast import products_on_cpu

_ARRAY = re.compile(r"\b([a-z]+\d*)(?:e\w+)?\[([\d,]*)\](\{[^}]*\})?")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_CALLS = {"call", "while", "conditional"}
_SLICES = {"slice", "dynamic-slice"}
_UPDATE = "dynamic-update-slice"
_CALLED = re.compile(r"(?:to_apply|body|\w+_computations?)=(?:\{([^}]*)\}|(%[\w.\-]+))")
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?$"
)
_MICROSECONDS = re.compile(r'"exec_time_us":([\d.e+\-]+)[^{}]*"name":""')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass
class Counts:
    """Counts for one run of a program, with its longest branches. Sizes are in bytes.

    What is in a loop counts as often as the loop runs.
    """

    bytes: float = 0  # read and written by kernels in main memory: each operand and result once
    kernels: float = 0  # launches: fused loops, single operations, copies, collectives
    copies: float = 0  # of 4 kB and more
    collectives: float = 0  # communication between devices
    exchanged: float = 0
    microseconds: float = 0  # XLA:GPU's own estimate for the kernels, without launches
    cycles: float = 0  # XLA:TPU's own estimate

    def add(self, other: "Counts", times: float = 1) -> None:
        """Add the counts of a program that runs this many times."""
        for field, value in vars(other).items():
            setattr(self, field, getattr(self, field) + times * value)


class _Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: list[str]
    line: str


_Program = dict[str, _Instruction]  # by name; the last one is the root


@contextlib.contextmanager
def for_another_platform() -> Iterator[None]:
    """Trace programs for one device that is not here, which the types of its arrays do not show.

    It is also a decorator.
    """
    before, products_on_cpu.enabled = products_on_cpu.enabled, False
    try:
        yield
    finally:
        products_on_cpu.enabled = before


def compile_step(
    step: Any,
    state: Any,
    data: Any,
    *,
    options: dict[str, Any] | None = None,
    unknown_trips: float = 1,
    **shardings: Any,
) -> tuple[Any, dict[str, Any]]:
    """Compile a step with its state donated. Return it and its figures.

    The figures are the fields of `Counts`; the sizes in bytes of `temporary` memory, of all memory
    at its `peak`, of the donated `state`, and of the part of it that is overwritten `in_place`; the
    number of `transpositions` of matrices in the program, including those in fused loops; and
    `compile_seconds`, which include `trace_seconds`. `unknown_trips` is that of `count`.
    """
    start = time.perf_counter()
    traced = jax.jit(step, donate_argnums=0, **shardings).trace(state, data)
    trace_seconds = time.perf_counter() - start
    compiled = traced.lower().compile(options)
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    counts = count(text, unknown_trips=unknown_trips)
    return compiled, dataclasses.asdict(counts) | {
        "temporary": memory.temp_size_in_bytes,
        # Not `peak_memory_in_bytes`, which leaves out temporary memory (jaxlib 0.12).
        "peak": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "state": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "in_place": memory.alias_size_in_bytes,
        "transpositions": len(re.findall(r"= \w+\[\d+,\d+\]\S* transpose\(", text)),
        "trace_seconds": trace_seconds,
        "compile_seconds": seconds,
    }


def count(text: str, *, unknown_trips: float = 1) -> Counts:
    """Return the counts of a program, given its optimized HLO.

    A loop runs `unknown_trips` times if the program does not show how often it runs.
    """
    programs = dict(_computations(text))

    def run(name: str) -> Counts:
        counts, program = Counts(), programs[name]
        for each in program.values():
            if each.opcode in _CALLS:
                branches = [run(branch) for branch in _called(each.line)]
                is_loop = each.opcode == "while"
                trips = _trips(each, program, programs) or unknown_trips if is_loop else 1
                counts.add(max(branches, key=lambda branch: branch.bytes), trips)
            else:
                counts.add(_kernel(each, program, programs))
        return counts

    return run("ENTRY")


def _called(line: str) -> list[str]:
    """Return the programs that an instruction calls, of which one runs."""
    found = ["".join(names) for names in _CALLED.findall(line)]
    return re.findall(r"%([\w.\-]+)", " ".join(found))


def _trips(loop: _Instruction, program: _Program, programs: dict[str, _Program]) -> int | None:
    """Return how often a loop runs, if that is known."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line)
    if known:
        return int(known[1])
    # XLA:TPU does not write it (libtpu 0.0.42). JAX's loops count from one constant to another.
    condition = programs[re.findall(r"condition=%?([\w.\-]+)", loop.line)[0]]
    test, carry = _root(condition), program[loop.operands[0]]
    if test.opcode != "compare" or "direction=LT" not in test.line or carry.opcode != "tuple":
        return None
    counter, last = test.operands
    place = re.search(r"get-tuple-element\(.*index=(\d+)", condition[counter].line)
    start = _integer(carry.operands[int(place[1])], program) if place else None
    end = _integer(last, condition)
    return None if start is None or end is None else end - start


def _integer(name: str, program: _Program) -> int | None:
    if program[name].opcode == "copy":
        return _integer(program[name].operands[0], program)
    found = re.search(r" s32\[\]\S* constant\((\d+)\)", program[name].line)
    return int(found[1]) if found else None


def _root(program: _Program) -> _Instruction:
    return program[next(reversed(program))]


def _kernel(kernel: _Instruction, program: _Program, programs: dict[str, _Program]) -> Counts:
    """Return the counts of an instruction that is not a loop, a branch or a call."""
    _, type_, opcode, operands, line = kernel
    if opcode in _FREE or opcode.endswith("-done") or "ConcatBitcast" in line:
        return Counts()
    if opcode in ("copy-start", "slice-start"):
        # A prefetch. Its type begins with the destination; the type of a slice begins with the
        # sources.
        place = int(opcode == "slice-start")
        is_read = sum(_sizes_in_memory(program[operands[0]].type)) > 0
        return Counts(is_read * _sizes(type_)[place] + _sizes_in_memory(type_)[place])
    read, written = _read_and_written(kernel, program, programs)
    is_collective = bool(_COLLECTIVE.match(opcode))
    return Counts(
        bytes=read + written,
        kernels=1,
        copies=opcode == "copy" and written >= 2**12,
        collectives=is_collective,
        exchanged=is_collective * read,
        microseconds=sum(map(float, _MICROSECONDS.findall(line))),
        cycles=sum(map(int, _CYCLES.findall(line))),
    )


def _read_and_written(
    kernel: _Instruction, program: _Program, programs: dict[str, _Program]
) -> tuple[float, float]:
    """Return the bytes that a kernel reads and writes in main memory.

    If it only slices an array, it reads the slices. If it updates a part of an array, it writes
    that part.
    """
    _, type_, opcode, operands, line = kernel
    if opcode == "fusion":
        body = programs[re.findall(r"calls=%?([\w.\-]+)", line)[0]]
        parameters = [each for each in body.values() if each.opcode == "parameter"]
        names = [each.name for each in sorted(parameters, key=_parameter_number)]
    else:
        body = {name: program[name]._replace(operands=[]) for name in operands}
        body[kernel.name], names = kernel, operands
    pairs = list(zip(operands, names, strict=True))
    read = sum(
        min(
            sum(_sizes_in_memory(program[name].type)),
            sum(_part_read(parameter, body) for operand, parameter in pairs if operand == name),
        )
        for name in set(operands)
    )
    results = zip(_sizes_in_memory(type_), _parts_written(_root(body), body), strict=True)
    return read, sum(map(min, results))


def _parameter_number(instruction: _Instruction) -> int:
    return int(re.findall(r"parameter\((\d+)\)", instruction.line)[0])


def _part_read(name: str, body: _Program) -> float:
    """Return how many bytes of an array a kernel reads; infinity means all of them."""
    total: float = 0
    for user in body.values():
        if name not in user.operands:
            continue
        is_array = user.operands[0] == name  # and not an index or an update
        if user.opcode in _SLICES and is_array:
            total += sum(_sizes(user.type))
        elif user.opcode in ("bitcast", "tuple") or (user.opcode == _UPDATE and is_array):
            total += _part_read(user.name, body)
        else:
            return math.inf
    return total


def _parts_written(root: _Instruction, body: _Program) -> list[int]:
    """Return how many bytes of each result a kernel writes."""
    if root.opcode == "tuple":
        return [part for name in root.operands for part in _parts_written(body[name], body)]
    if root.opcode == "bitcast":
        return _parts_written(body[root.operands[0]], body)
    type_ = body[root.operands[1]].type if root.opcode == _UPDATE else root.type
    return _sizes(type_)


def _computations(text: str) -> Iterator[tuple[str, _Program]]:
    lines = iter(text.splitlines())
    for line in lines:
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            body = itertools.takewhile(lambda line: not line.startswith("}"), lines)
            program = {each.name: each for each in map(_instruction, body) if each}
            yield "ENTRY" if head[1] else head[2], program


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


def _sizes_in_memory(type_: str) -> list[int]:
    """Return the bytes of each array, 0 for those in memories next to the cores."""
    # These are S(1) and above.
    arrays = zip(_ARRAY.findall(type_), _sizes(type_), strict=True)
    return [0 if re.search(r"S\([1-9]\)", layout) else size for (_, _, layout), size in arrays]


def _sizes(type_: str) -> list[int]:
    """Return the bytes of each array."""
    return [_bits(dtype) * _elements(dims) // 8 for dtype, dims, _ in _ARRAY.findall(type_)]


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)
