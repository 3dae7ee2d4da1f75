"""Measurements: XLA's analysis of a compiled step, and times paired within a round."""

import dataclasses
import math
import re
import resource
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.contenders import State
from benchmarks.workloads import Tree

Tick = Callable[[str], None]


class Compiled(NamedTuple):
    """A compiled step: `state = run(state, data)`, starting from `init()`."""

    run: Callable[[State, Tree], State]
    init: Callable[[], State]
    data: Tree


@dataclasses.dataclass(frozen=True)
class Facts:
    """XLA's analysis of a compiled step. All sizes are in bytes.

    Attributes:
      bytes_accessed: Bytes read and written, from XLA's cost analysis; None if unavailable.
      temporary: Memory beyond arguments and results.
      state: The size of the donated state.
      in_place: How much of the state the results overwrite in place.
      copies: Copy instructions with the shape of a parameter, in the optimised program.
      transpositions: Instructions that transpose a matrix, inside a fused loop or on their own.
      hlo_length: The length of the optimised program, in characters.
      compile_seconds: The time to trace and compile once.
    """

    bytes_accessed: float | None
    temporary: int
    state: int
    in_place: int
    copies: int
    transpositions: int
    hlo_length: int
    compile_seconds: float


@dataclasses.dataclass
class Samples:
    """The measurements of one step, one for each round."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    page_faults: list[float] = dataclasses.field(default_factory=list)


def tree_bytes(tree: Tree) -> int:
    """Return the size in bytes of the arrays of `tree`, or of its abstract arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compile_step(
    step: Callable[[State, Tree], State], state: State, data: Tree
) -> tuple[Callable[[State, Tree], State], Facts]:
    """Compile a step with its state donated; return it with its `Facts`."""
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, data).compile()
    seconds = time.perf_counter() - start
    hlo = compiled.as_text() or ""
    memory = compiled.memory_analysis()
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.params)}
    facts = Facts(
        bytes_accessed=(compiled.cost_analysis() or {}).get("bytes accessed"),
        temporary=memory.temp_size_in_bytes,
        state=tree_bytes(state),
        in_place=memory.alias_size_in_bytes,
        copies=count_copies(hlo, shapes),
        transpositions=len(re.findall(r"= \w+\[\d+,\d+\]\S* transpose\(", hlo)),
        hlo_length=len(hlo),
        compile_seconds=seconds,
    )
    return compiled, facts


def count_copies(hlo: str, shapes: Collection[tuple[int, ...]]) -> int:
    """Count the instructions of `hlo` that copy an array of one of these shapes."""
    found = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", hlo)
    return sum(tuple(map(int, shape.split(","))) in shapes for shape in found)


def time_steps(
    steps: Mapping[str, Compiled], *, rounds: int, sample_seconds: float, seed: int, tick: Tick
) -> dict[str, Samples]:
    """Time the steps side by side.

    Each round samples every step once, in shuffled order. A sample runs a few steps in a row from
    a fresh state and discards the first. Only one state is alive at a time.

    Args:
      steps: The compiled steps, by name.
      rounds: The number of rounds, after a discarded one that estimates the time of a step.
      sample_seconds: The target length of a sample, which has at least one step.
      seed: Of the shuffling.
      tick: Called with the name of each sampled step.
    """
    rng = np.random.default_rng(seed)
    samples = {name: Samples() for name in steps}
    counts = {}
    for name, step in steps.items():
        seconds, _ = _sample(step, 1)
        counts[name] = min(1000, max(1, math.ceil(sample_seconds / seconds)))
        tick(name)
    for _ in range(rounds):
        for name in rng.permutation(list(steps)):
            seconds, page_faults = _sample(steps[name], counts[name])
            samples[name].seconds.append(seconds)
            samples[name].page_faults.append(page_faults)
            tick(name)
    return samples


def _sample(step: Compiled, count: int) -> tuple[float, float]:
    """Return the seconds and page faults per step, averaged over `count` steps."""
    state = jax.block_until_ready(step.run(step.init(), step.data))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    for _ in range(count):
        state = step.run(state, step.data)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return seconds / count, faults / count


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return float(low), float(median), float(high)


def ratios(values: list[float], baseline: list[float]) -> list[float]:
    """Return the ratio in each round."""
    return [value / base for value, base in zip(values, baseline, strict=True)]


def time_compilation(
    steps: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    limit: float,
    seed: int,
    tick: Tick,
) -> dict[str, list[float]]:
    """Time the tracing and compilation of each step, with cleared caches.

    Args:
      steps: By name, functions that trace and compile a step and return its `Facts` last.
      rounds: The number of rounds. Each compiles every step once, in shuffled order.
      limit: A step that took longer than this many seconds is not compiled again.
      seed: Of the shuffling.
      tick: Called with the name of each step after its turn.
    """
    rng = np.random.default_rng(seed)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in rng.permutation(list(steps)):
            if max(seconds[name], default=0) <= limit:
                jax.clear_caches()
                *_, facts = steps[name]()
                seconds[name].append(facts.compile_seconds)
            tick(name)
    return seconds
