"""Thousands of random training runs at once, and the shortest that tells two systems apart.

A case is the hyper-parameters of one run and its steps; a step says what one entry of the gradient
is, which entry that is, and what the loss is. `Batch` holds many cases as arrays, so that a system
that JAX can trace runs them all under one `vmap(scan)`: ours takes its hyper-parameters as arrays,
through `Traced`. Systems that JAX cannot trace loop over them.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

# The parameters of each run, and the entries of its gradients that no step replaces. All are sums
# of a few powers of two, so that a step with a power of two as its rate is exact in float32.
START = np.float32([1.0, -0.0, 0.5, -2.0, 0.0, 4.0])
REST = np.float32([0.25, 0.0, -0.5, 0.125, -0.0, 1.0])
RATE, MOMENTUM = 0.5, 0.5
GOOD, BAD = 1.0, float("inf")
ROWS = 128  # candidates that are tried at once, compiled for one size
LONGEST_TRIED = 9  # every shorter sequence is tried where the shortest found is no longer


class Step(NamedTuple):
    """One step: the entry `at` of the true gradient is `grad`, and the loss is `loss`."""

    grad: float = GOOD
    at: int = 0
    loss: float = GOOD

    def __str__(self):
        finite = bool(np.isfinite(self.grad)), bool(np.isfinite(self.loss))
        letter = {(True, True): "T", (False, True): "F", (True, False): "L", (False, False): "B"}
        plain = Step(GOOD if finite[0] else BAD, 0, GOOD if finite[1] else BAD)
        details = [
            f"{n}={v:g}" for n, v, p in zip(self._fields, self, plain, strict=True) if v != p
        ]
        return letter[finite] + (f"({', '.join(details)})" if details else "")


class Case(NamedTuple):
    """One run: hyper-parameters and steps."""

    hyper: dict[str, float]
    steps: tuple[Step, ...]


class Batch(NamedTuple):
    """Many runs: `hyper` of arrays [cases], the steps as arrays [cases, steps]."""

    hyper: dict[str, np.ndarray]
    grad: np.ndarray
    at: np.ndarray
    loss: np.ndarray

    def case(self, row: int, length: int) -> Case:
        """Return the first steps of one run."""
        fields = (array[row, :length].tolist() for array in (self.grad, self.at, self.loss))
        steps = tuple(Step(*step) for step in zip(*fields, strict=True))
        return Case({name: array[row].item() for name, array in self.hyper.items()}, steps)


# What a system leaves behind after each step, by name: arrays [cases, steps, ...].
Trace = dict[str, np.ndarray]
System = Callable[[Batch], Trace]
Simplest = dict[str, tuple[float, ...]]


def stack(cases: list[Case], like: Batch) -> Batch:
    """Return the cases as arrays of the types in `like`, filled up with good steps."""
    missing = (Step(),) * like.grad.shape[1]
    steps = np.array([(case.steps + missing)[: len(missing)] for case in cases], np.float64)
    return Batch(
        {n: np.array([c.hyper[n] for c in cases], a.dtype) for n, a in like.hyper.items()},
        *(steps[..., i].astype(array.dtype) for i, array in enumerate(like[1:])),
    )


def random_batch(
    rng: np.random.Generator,
    hyper: dict[str, np.ndarray],
    steps: int,
    *,
    exponents: tuple[int, int] = (-3, 0),
    bad_losses: bool = False,
) -> Batch:
    """Draw the steps of runs with these hyper-parameters, which say how often one may be bad."""
    intervals = hyper["growth_interval"]
    shape = (len(intervals), steps)
    # As many moves up as down for a third of the runs; rare, frequent, none and only for the rest.
    balanced = 1 - 0.5 ** (1 / np.maximum(intervals, 1))
    others = rng.choice([0.0, 0.03, 0.2, 0.6, 1.0], shape[0])
    probability = np.where(rng.random(shape[0]) < 1 / 3, balanced, others)[:, None]
    bad = rng.choice(np.float32([np.nan, np.inf, -np.inf]), shape)
    good = rng.choice(np.float32([1, -1]), shape) * np.exp2(rng.integers(*exponents, shape, "i4"))
    loss = np.ones(shape, np.float32)
    if bad_losses:
        frequency = rng.choice([0.0, 0.1, 0.5], (shape[0], 1))
        loss = np.where(rng.random(shape) < frequency, rng.permuted(bad), loss)
    return Batch(
        hyper,
        np.where(rng.random(shape) < probability, bad, good.astype(np.float32)),
        rng.integers(0, START.size, shape, np.int32),
        loss,
    )


# Our side, and what every side trains.


class Traced(ols.DynamicLossScale):
    """The policy itself, without its check that hyper-parameters are Python numbers."""

    def __post_init__(self):
        pass


def params_at_start():
    return {"b": jnp.asarray(START[:2]), "w": jnp.asarray(START[2:]).reshape(2, 2)}


def flat(tree):
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def weights_of(grad, at):
    """Return the tree that the gradient of `loss_fn` is."""
    entries = jnp.where(jnp.arange(START.size) == at, grad, REST)
    return {"b": entries[:2], "w": entries[2:].reshape(2, 2)}


def loss_fn(params, weights, half):
    """Return a loss whose gradient is `weights`; with `half` it passes through float16.

    There it overflows where the loss scale is too large, and rounds where it is too small.
    """

    def through(leaf):
        rounded = leaf.astype(jnp.float16).astype(jnp.float32)
        return jnp.where(half, rounded, leaf)

    products = jax.tree.map(lambda p, w: jnp.sum(through(p) * w), params, weights)
    return sum(jax.tree.leaves(products))


def exact_inner():
    """Return an optimizer with a state, whose products are exact."""
    return optax.sgd(RATE, momentum=MOMENTUM)


def batched(run):
    """Run `run(hyper, steps)`, which scans over the steps of one case, for all cases at once."""
    compiled = jax.jit(jax.vmap(run))

    def system(batch):
        trace = compiled(batch.hyper, Step(batch.grad, batch.at, batch.loss))
        return {name: np.asarray(array) for name, array in trace.items()}

    return system


def ours(policy_of, *, inner=exact_inner, with_value=False, policy=Traced) -> System:
    """Return our side, with the policy's hyper-parameters that `policy_of(hyper)` names."""

    def run(hyper, steps):
        tx = ols.with_loss_scaling(inner(), policy(**policy_of(hyper)))

        def step(carry, given):
            params, state = carry
            weights = weights_of(given.grad, given.at)
            _, grads = ols.value_and_grad(loss_fn)(state, params, weights, hyper["half"])
            extra = {"value": given.loss} if with_value else {}
            updates, state = tx.update(grads, state, params, **extra)
            params = optax.apply_updates(params, updates)
            after = state.loss_scale_state._asdict()
            after |= {"params": flat(params), "inner": flat([*_arrays(state.inner_state)])}
            return (params, state), after

        params = params_at_start()
        return jax.lax.scan(step, (params, tx.init(params)), steps)[1]

    return batched(run)


def _arrays(tree):
    return [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)] or [jnp.zeros(1)]


# The comparison.


def walk(start, theirs, factors, bounds):
    """Move as others did at each step, by our arithmetic: one product in float32, then a bound.

    `theirs` is their loss scale after each step, [cases, steps]; `factors` are those of a move up
    and of one down, `bounds` the floor and the ceiling.
    """
    (up, down), (floor, ceiling) = factors, bounds
    before, scale, after = start, start, []
    for their in np.moveaxis(theirs, 1, 0):
        with np.errstate(over="ignore", under="ignore"):
            grown, shrunk = np.minimum(scale * up, ceiling), np.maximum(scale * down, floor)
        moved = np.where(their > before, grown, np.where(their < before, shrunk, scale))
        before, scale = their, moved.astype(np.float32)
        after.append(scale)
    return np.stack(after, axis=1)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.int32) if array.dtype == np.float32 else array


def first_differences(one: Trace, other: Trace) -> np.ndarray:
    """Return the first step of each case at which a bit differs, or the number of steps."""
    assert one.keys() == other.keys()
    differs = np.zeros(next(iter(one.values())).shape[:2], bool)
    for name, array in one.items():
        assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape), name
        differs |= (bits(array) != bits(other[name])).reshape(*differs.shape, -1).any(axis=-1)
    return np.where(differs.any(axis=1), differs.argmax(axis=1), differs.shape[1])


def assert_same(
    left: System,
    right: System,
    batch: Batch,
    *,
    names: tuple[str, str] = ("ours", "theirs"),
    simplest: Simplest | None = None,
    valid: Callable[[dict[str, float]], bool] = lambda _: True,
) -> Trace:
    """Hold two systems to each other, bit for bit; on failure show the shortest case that differs.

    `simplest` lists values of hyper-parameters that a reader prefers, the best first.
    Returns what the first system left behind.
    """
    trace = left(batch)
    at = first_differences(trace, right(batch))
    length = batch.grad.shape[1]
    if (at == length).all():
        return trace
    row = int(at.argmin())
    case = shrink(
        batch.case(row, int(at[row]) + 1),
        lambda cases: _lengths_that_fail(left, right, cases, batch),
        {name: v for name, v in (simplest or {}).items() if name in batch.hyper},
        valid,
    )
    raise AssertionError(_report(case, batch, (left, right), names, f"{(at < length).sum()}"))


def _lengths_that_fail(left, right, cases, like):
    """Return after how many of its steps each case differs, or None."""
    lengths = []
    for chunk in (cases[i : i + ROWS] for i in range(0, len(cases), ROWS)):
        filled = [*chunk, *[chunk[0]] * (ROWS - len(chunk))]
        batch = stack(filled, like)
        at = first_differences(left(batch), right(batch))
        lengths += [
            int(i) + 1 if i < len(c.steps) else None for i, c in zip(at, chunk, strict=False)
        ]
    return lengths


def _report(case, like, systems, names, count):
    batch = stack([case] * ROWS, like)
    traces = [system(batch) for system in systems]
    lines = [
        f"{count} of {len(like.grad)} random sequences differ. The shortest found:",
        "  steps: " + " ".join(map(str, case.steps)),
        "  with:  " + " ".join(f"{n}={v:.9g}" for n, v in case.hyper.items()),
    ]
    last = len(case.steps) - 1
    for name in traces[0]:
        found = [trace[name][0, : last + 1] for trace in traces]
        if (bits(found[0][last]) != bits(found[1][last])).any():
            for system, values in zip(names, found, strict=True):
                shown = values if values.ndim == 1 else values[last]
                lines.append(f"  {name}, {system}: " + " ".join(f"{v:.9g}" for v in shown))
    return "\n".join(lines)


# The search for the shortest.


def shrink(
    case: Case,
    lengths_that_fail: Callable[[list[Case]], list[int | None]],
    simplest: Simplest,
    valid: Callable[[dict[str, float]], bool] = lambda _: True,
) -> Case:
    """Return the shortest and simplest case that still fails.

    `lengths_that_fail` says for each case after how many of its steps it fails, None if it does
    not. Each round halves, drops steps, simplifies a step or a hyper-parameter, and goes on with
    the smallest that fails; then two hyper-parameters at a time, then every shorter sequence.
    """
    size = functools.partial(_size, simplest=simplest)
    while True:
        for candidates in (_smaller(case, simplest), _two_changed(case, simplest), _shorter(case)):
            worth = [c for c in candidates if size(c) < size(case) and valid(c.hyper)]
            if not worth:
                continue
            lengths = lengths_that_fail(worth)
            failing = [
                c._replace(steps=c.steps[:n]) for c, n in zip(worth, lengths, strict=True) if n
            ]
            if failing:
                case = min(failing, key=size)
                break
        else:
            return case


def _size(case: Case, simplest: Simplest) -> tuple[float, ...]:
    """Return what orders cases: fewer steps first, then simpler steps, then simpler parameters."""
    ranks = [_rank(case.hyper[name], preferred) for name, preferred in simplest.items()]
    bad = sum(not np.isfinite([s.grad, s.loss]).all() for s in case.steps)
    return len(case.steps), bad, sum(len(str(step)) for step in case.steps), sum(ranks), *ranks


def _rank(value, preferred):
    return preferred.index(value) if value in preferred else len(preferred)


def _smaller(case: Case, simplest: Simplest) -> Iterator[Case]:
    steps = case.steps
    width = len(steps) // 2
    while width:
        for start in range(0, len(steps) - width + 1, max(1, width // 2)):
            yield case._replace(steps=steps[:start] + steps[start + width :])
        width //= 2
    for i, step in enumerate(steps):
        for simpler in {
            Step(),
            Step(BAD),
            Step(GOOD, 0, BAD),
            Step(BAD, 0, BAD),
            step._replace(at=0),
            step._replace(grad=BAD),
            step._replace(loss=GOOD),
            step._replace(grad=GOOD),
            step._replace(loss=BAD),
        }:
            yield case._replace(steps=(*steps[:i], simpler, *steps[i + 1 :]))
    for change in _changes(simplest):
        yield case._replace(hyper={**case.hyper, **change})


def _two_changed(case: Case, simplest: Simplest) -> Iterator[Case]:
    """Yield what no single change reaches: a bound, say, and the factor that lies within."""
    for one, other in itertools.combinations(_changes(simplest), 2):
        yield case._replace(hyper={**case.hyper, **one, **other})


def _changes(simplest: Simplest) -> list[dict[str, float]]:
    return [{name: value} for name, preferred in simplest.items() for value in preferred]


def _shorter(case: Case) -> Iterator[Case]:
    """Yield every sequence of plain steps that is shorter, where there are not too many."""
    if len(case.steps) > LONGEST_TRIED:
        return
    for length in range(1, len(case.steps)):
        for steps in itertools.product([Step(), Step(BAD)], repeat=length):
            yield case._replace(steps=steps)
