"""Thousands of random runs against live libraries, and against the rule in plain Python.

Everything is compared bit for bit. Where another library differs by design, the difference stands
here as what is made of its results to get what we must give: a longer interval for Flax, bounds for
Keras and JMP, a rounded reciprocal for JMP's division.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
import reference
import sequences
from flax.training.dynamic_scale import DynamicScale
from sequences import BAD, GOOD, MOMENTUM, RATE, REST, START, Step, Traced, assert_same, ours, walk

import optax_lossscale as ols

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras

pytestmark = pytest.mark.integration

CASES, STEPS = 2000, 48
LARGEST, SMALLEST = np.float32(2.0**126), np.float32(2.0**-126)
# Nobody but us counts towards a hysteresis.
FIELDS = ("loss_scale", "growth_count", "consecutive_skipped", "total_skipped")
STEPPED = (*FIELDS, "params", "inner")

# What is tried when a failing case is made simpler, the best first.
SIMPLEST = {
    "initial_scale": (1.0, 2.0, 4.0, 8.0, 256.0, 2.0**15),
    "growth_interval": (1, 2, 3, 4),
    "growth_factor": (2.0, 4.0, 3.0),
    "backoff_factor": (0.5, 0.25),
    "min_scale": (1.0, 0.5, 0.25),
    "max_scale": (2.0**24, 2.0**15, 8.0, 4.0, 2.0, float(LARGEST)),
    "hysteresis": (1, 2, 3),
    "loss_patience": (2, 1, 3),
    "half": (False,),
}


def powers(rng, low, high, size=CASES):
    """Draw powers of two, both ends included."""
    return np.exp2(rng.integers(low, high + 1, size)).astype(np.float32)


def chosen(rng, values, dtype=np.float32, size=CASES):
    return rng.choice(np.array(values, dtype), size)


def is_power_of_two(*arrays):
    return np.logical_and.reduce([np.frexp(array)[0] == 0.5 for array in arrays])


def policy_of(hyper):
    return {name: hyper[name] for name in reference.DYNAMIC_DEFAULTS if name in hyper}


def is_valid(hyper):
    """Say whether a policy takes these hyper-parameters."""
    try:
        ols.DynamicLossScale(**policy_of(hyper))
    except ValueError:
        return False
    return True


def is_unbounded(hyper):
    """Say whether no run meets a bound: where others have none, or another arithmetic."""
    return (hyper["min_scale"], hyper["max_scale"]) == (SMALLEST, LARGEST)


def only(system, *names):
    """Return the system with these results alone."""
    return lambda batch: {name: array for name, array in system(batch).items() if name in names}


def assert_tells(trace):
    """The comparison was of something: runs that skip, that grow, and that do neither."""
    assert CASES / 4 < (trace["total_skipped"][:, -1] > 0).sum() < CASES
    grew = (np.diff(trace["loss_scale"], axis=1) > 0).any(axis=1)
    assert CASES / 4 < grew.sum() < CASES
    assert len(np.unique(trace["loss_scale"])) > 100


# The rule in plain Python, and the step around it as the contract has it.


def draw_everything(rng, size=CASES):
    """Draw all hyper-parameters of the dynamic rule."""
    low, start, high = np.sort(rng.integers(-60, 61, (3, size)), axis=0)
    # The bounds need not be powers of two, nor what the factor is multiplied by.
    odd = np.where(rng.random((3, size)) < 0.3, rng.uniform(1, 1.99, (3, size)), 1)
    odd = np.float32(np.sort(odd, axis=0))
    growth = chosen(rng, [2, 2, 2, 4, 8, 1.5, 3, 1.1, 1e3], size=size)
    backoff = chosen(rng, [0.5, 0.5, 0.5, 0.25, 0.125, 0.8, 1 / 3, 0.99, 1e-3], size=size)
    tight = rng.random(size) < 0.5
    return {
        "initial_scale": np.exp2(start).astype(np.float32) * odd[1],
        "growth_interval": rng.choice(np.int32([1, 1, 2, 2, 3, 4, 7, 20, 2000]), size),
        "growth_factor": growth,
        "backoff_factor": backoff,
        "min_scale": np.exp2(np.where(tight, low, -100)).astype(np.float32) * odd[0],
        "max_scale": np.exp2(np.where(tight, high, 100)).astype(np.float32) * odd[2],
        "hysteresis": rng.choice(np.int32([1, 1, 2, 3, 5]), size),
        "loss_patience": rng.choice(np.int32([1, 2, 2, 3, 5]), size),
        "half": np.zeros(size, bool),
    }


def plain_python(batch, *, consecutive_hysteresis=False):
    """Return what the contract says of each step, computed number by number."""
    rows = range(len(batch.grad))
    finite, loss_finite = np.isfinite(batch.grad), np.isfinite(batch.loss)
    states = []
    for row in rows:
        case = {name: array[row].item() for name, array in policy_of(batch.hyper).items()}
        step = reference.dynamic_step(**case, consecutive_hysteresis=consecutive_hysteresis)
        start = reference.Reference(case["initial_scale"])
        flags = zip(finite[row].tolist(), loss_finite[row].tolist(), strict=True)
        states.append(reference.trajectory(step, start, flags))
    states = np.array(states)
    types = [np.float32, *[np.int32] * 4]
    trace = {
        name: states[..., i].astype(dtype)
        for i, (name, dtype) in enumerate(zip(ols.LossScaleState._fields, types, strict=True))
    }
    scales = np.concatenate(
        [batch.hyper["initial_scale"][:, None], trace["loss_scale"][:, :-1]], axis=1
    )
    params = np.broadcast_to(START, (len(rows), START.size))
    velocity = np.zeros_like(params)
    history = []
    for i in range(batch.grad.shape[1]):
        grads = np.where(
            np.arange(START.size) == batch.at[:, i, None], batch.grad[:, i, None], REST
        )
        scale = scales[:, i, None]
        with np.errstate(invalid="ignore"):
            true = (grads * scale) * (np.float32(1) / scale)
            moved = true + np.float32(MOMENTUM) * velocity
            applied = (finite & loss_finite)[:, i, None]
            params = np.where(applied, params - np.float32(RATE) * moved, params)
            velocity = np.where(applied, moved, velocity)
        history.append((params, velocity))
    return trace | {
        "params": np.stack([p for p, _ in history], axis=1),
        "inner": np.stack([v for _, v in history], axis=1),
    }


RUN = {
    consecutive: ours(
        lambda hyper, consecutive=consecutive: {
            **policy_of(hyper),
            "consecutive_hysteresis": consecutive,
        },
        with_value=True,
    )
    for consecutive in (False, True)
}


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_run_is_what_plain_python_makes_of_the_contract(consecutive):
    rng = np.random.default_rng(int(consecutive))
    batch = sequences.random_batch(rng, draw_everything(rng), STEPS, bad_losses=True)
    trace = assert_same(
        RUN[consecutive],
        lambda batch: plain_python(batch, consecutive_hysteresis=consecutive),
        batch,
        names=("ours", "plain Python"),
        simplest=SIMPLEST,
        valid=is_valid,
    )
    assert_tells(trace)
    assert (trace["overflow_count"].max(axis=1) > 1).sum() > CASES / 10
    assert (trace["loss_scale"] == batch.hyper["max_scale"][:, None]).any(axis=1).sum() > CASES / 20
    assert (trace["loss_scale"] == batch.hyper["min_scale"][:, None]).any(axis=1).sum() > CASES / 20


def test_a_policy_of_python_numbers_moves_as_the_one_whose_numbers_are_arrays():
    rng = np.random.default_rng(2)
    hyper = draw_everything(rng, 24)
    flags = rng.random((24, 200)) < rng.choice([0.3, 0.7, 0.95], (24, 1))

    def run(hyper, flags, kind):
        policy = kind(**policy_of(hyper))
        start = policy.init()._replace(loss_scale=jnp.float32(hyper["initial_scale"]))
        return jax.lax.scan(lambda s, f: (policy.update(s, f),) * 2, start, flags)[1]

    arrays = jax.jit(jax.vmap(lambda h, f: run(h, f, Traced)))(hyper, flags)
    for row in range(24):
        numbers = {name: array[row].item() for name, array in hyper.items()}
        expected = jax.jit(lambda f, n=numbers: run(n, f, ols.DynamicLossScale))(flags[row])
        for one, other in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(one[row], other)
    assert len(np.unique(arrays.loss_scale)) > 100


# The search for the shortest case finds it.


class GrowsLate(Traced):
    """Grows one step late, as Flax does."""

    def update(self, state, grads_finite, *, loss_finite=True):
        late = dataclasses.replace(self, growth_interval=self.growth_interval + 1)
        return Traced.update(late, state, grads_finite, loss_finite=loss_finite)


class ForgetsToStartAnew(Traced):
    """Lets the count of finite steps stand on an overflow."""

    def update(self, state, grads_finite, *, loss_finite=True):
        after = super().update(state, grads_finite, loss_finite=loss_finite)
        count = jnp.where(grads_finite, after.growth_count, state.growth_count)
        return after._replace(growth_count=count)


class IgnoresTheFloor(Traced):
    """Backs off for ever."""

    def update(self, state, grads_finite, *, loss_finite=True):
        bottomless = dataclasses.replace(self, min_scale=0.0)
        return Traced.update(bottomless, state, grads_finite, loss_finite=loss_finite)


class RefillsOnBackOff(Traced):
    """Counts overflows afresh after each back-off."""

    def update(self, state, grads_finite, *, loss_finite=True):
        after = super().update(state, grads_finite, loss_finite=loss_finite)
        count = jnp.where(after.overflow_count >= self.hysteresis, 0, after.overflow_count)
        return after._replace(overflow_count=count)


class BacksOffForTheLoss(Traced):
    """Takes a loss that is not finite for an overflow."""

    def update(self, state, grads_finite, *, loss_finite=True):
        return super().update(state, grads_finite & loss_finite)


class NeverBacksOffForTheLoss(Traced):
    """Leaves the loss scale unchanged as long as the loss is not finite."""

    def update(self, state, grads_finite, *, loss_finite=True):
        patient = dataclasses.replace(self, loss_patience=reference.INT32_MAX)
        return Traced.update(patient, state, grads_finite, loss_finite=loss_finite)


PLAINEST = (
    "initial_scale={} growth_interval={} growth_factor=2 backoff_factor=0.5 min_scale={} "
    "max_scale=16777216 hysteresis={} loss_patience={} half=0"
)
PLANTED = {
    # The bug, the shortest steps in which it shows, the plainest numbers, and the two results.
    GrowsLate: ("T", (1, 1, 1, 1, 2), "1", "2"),
    ForgetsToStartAnew: ("T F T", (1, 2, 1, 1, 2), "1 1 2", "1 1 1"),
    IgnoresTheFloor: ("F", (1, 1, 1, 1, 2), "0.5", "1"),
    RefillsOnBackOff: ("F F F", (1, 1, 0.25, 2, 2), "1 0.5 0.5", "1 0.5 0.25"),
    BacksOffForTheLoss: ("L", (1, 1, 0.5, 1, 2), "0.5", "1"),
    NeverBacksOffForTheLoss: ("L", (1, 1, 0.5, 1, 1), "1", "0.5"),
}


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_a_bug_is_shown_by_the_shortest_sequence_with_the_plainest_numbers(bug):
    rng = np.random.default_rng(3)
    hyper = draw_everything(rng, sequences.ROWS)
    batch = sequences.random_batch(rng, hyper, 24, bad_losses=True)
    broken = only(ours(policy_of, with_value=True, policy=bug), "loss_scale")
    with pytest.raises(AssertionError) as caught:
        assert_same(
            broken, only(plain_python, "loss_scale"), batch, simplest=SIMPLEST, valid=is_valid
        )
    steps, numbers, wrong, right = PLANTED[bug]
    count, *report = str(caught.value).splitlines()
    assert count.endswith("of 128 random sequences differ. The shortest found:")
    assert report == [
        f"  steps: {steps}",
        f"  with:  {PLAINEST.format(*numbers)}",
        f"  loss_scale, ours: {wrong}",
        f"  loss_scale, theirs: {right}",
    ]


def test_steps_are_shown_with_what_is_not_plain_about_them():
    steps = Step(), Step(0.25, 3), Step(BAD), Step(float("nan"), 5), Step(GOOD, 0, float("-inf"))
    shown = "T", "T(grad=0.25, at=3)", "F", "F(grad=nan, at=5)", "L(loss=-inf)"
    assert tuple(map(str, steps)) == shown
    assert str(Step(BAD, 0, BAD)) == "B"


# The live libraries. Each trains by its own means: its own scaling of the loss, its own check.


def true_gradients(scaled, scale):
    """Return what the contract makes of scaled gradients, where another library divides."""
    reciprocal = 1 / scale
    return jax.tree.map(lambda g: g * reciprocal, scaled)


def step_if(finite, inner, grads, carry):
    """Take a step of `inner`, or none, as who uses Flax or JMP writes it."""
    params, inner_state = carry
    updates, new_state = inner.update(grads, inner_state, params)
    new = optax.apply_updates(params, updates), new_state
    return jax.tree.map(lambda a, b: jax.lax.select(finite, a, b), new, carry)


def counts_of(finite):
    """Return the counters that the others lack: steps skipped in a row, and since the start."""
    skipped = ~finite
    total = np.cumsum(skipped, axis=1)
    before = np.maximum.accumulate(np.where(finite, total, 0), axis=1)
    return {
        "consecutive_skipped": (total - before).astype(np.int32),
        "total_skipped": total.astype(np.int32),
    }


def run_flax(hyper, steps):
    """Let Flax's DynamicScale train."""
    inner = sequences.exact_inner()

    def step(carry, given):
        scale, count, params, inner_state = carry
        ds = DynamicScale(
            growth_factor=hyper["growth_factor"],
            backoff_factor=hyper["backoff_factor"],
            growth_interval=hyper["growth_interval"],
            fin_steps=count,
            scale=scale,
            minimum_scale=hyper["min_scale"],
        )
        weights = sequences.weights_of(given.grad, given.at)
        result = ds.value_and_grad(sequences.loss_fn)(params, weights, hyper["half"])
        # Flax divides. By a power of two that is our product; else the product takes its place.
        scaled = jax.grad(lambda p: scale * sequences.loss_fn(p, weights, hyper["half"]))(params)
        grads = jax.tree.map(
            lambda quotient, product: jnp.where(hyper["exact"], quotient, product),
            result.grad,
            true_gradients(scaled, scale),
        )
        kept = step_if(result.finite, inner, grads, (params, inner_state))
        ds = result.dynamic_scale
        after = {
            "loss_scale": ds.scale,
            "growth_count": ds.fin_steps,
            "finite": result.finite,
            "params": sequences.flat(kept[0]),
            "inner": sequences.flat(kept[1]),
        }
        return (ds.scale, ds.fin_steps, *kept), after

    params = sequences.params_at_start()
    start = hyper["initial_scale"], jnp.int32(0), params, inner.init(params)
    return jax.lax.scan(step, start, steps)[1]


FLAX = sequences.batched(run_flax)


def flax_system(batch):
    trace = FLAX(batch)
    return trace | counts_of(trace.pop("finite"))


def draw_flax(rng):
    growth, backoff = chosen(rng, [2, 2, 4, 1.5, 3]), chosen(rng, [0.5, 0.5, 0.25, 0.7, 1 / 3])
    start = powers(rng, -10, 20) * chosen(rng, [1, 1, 1, 1.3])
    return {
        "initial_scale": start,
        "growth_interval": rng.choice(np.int32([0, 1, 1, 2, 3, 6, 20, 2000]), CASES),
        "growth_factor": growth,
        "backoff_factor": backoff,
        "min_scale": np.minimum(powers(rng, -40, 20) * chosen(rng, [1, 1, 1.3]), start),
        "half": rng.random(CASES) < 0.5,
        "exact": is_power_of_two(start, growth, backoff),
    }


def as_flax(hyper):
    # Flax grows on the first finite step after its interval: ours is longer by that one.
    policy = policy_of(hyper)
    return policy | {"growth_interval": hyper["growth_interval"] + 1, "max_scale": LARGEST}


def is_valid_in_flax(hyper):
    numbers = ("initial_scale", "growth_factor", "backoff_factor", "min_scale")
    exact = is_power_of_two(*(hyper[name] for name in numbers))
    return hyper["min_scale"] <= hyper["initial_scale"] and (exact or not hyper["exact"])


def test_a_run_is_that_of_flax_with_an_interval_longer_by_one():
    rng = np.random.default_rng(10)
    batch = sequences.random_batch(rng, draw_flax(rng), STEPS, exponents=(-12, 4))
    # A floor that is no power of two leaves its mark only where it is met.
    batch.hyper["exact"] &= is_power_of_two(batch.hyper["min_scale"])
    trace = assert_same(
        only(ours(as_flax), *STEPPED),
        flax_system,
        batch,
        names=("ours", "Flax"),
        simplest=SIMPLEST,
        valid=is_valid_in_flax,
    )
    assert_tells(trace)
    assert_overflows_by_itself(batch, trace)


def assert_overflows_by_itself(batch, trace):
    """In float16 some steps were skipped that nobody spoilt: there the two sides feed back."""
    skipped = np.diff(trace["total_skipped"], axis=1, prepend=0) > 0
    unspoilt = skipped & np.isfinite(batch.grad) & batch.hyper["half"][:, None]
    assert unspoilt.any(axis=1).sum() > CASES / 20


def run_jmp(hyper, steps):
    """Let JMP train. Made anew in each step, its object keeps the floor that `jit` would lose."""
    inner = sequences.exact_inner()

    def step(carry, given):
        scale, count, params, inner_state = carry
        ls = jmp.DynamicLossScale(
            scale,
            counter=count,
            period=hyper["growth_interval"],
            factor=hyper["factor"],
            min_loss_scale=hyper["min_scale"],
        )
        weights = sequences.weights_of(given.grad, given.at)
        scaled = jax.grad(lambda p: ls.scale(sequences.loss_fn(p, weights, hyper["half"])))(params)
        grads = ls.unscale(scaled)
        finite = jmp.all_finite(grads)
        updates, new_state = inner.update(grads, inner_state, params)
        new = optax.apply_updates(params, updates), new_state
        kept = jmp.select_tree(finite, new, (params, inner_state))
        ls = ls.adjust(finite)
        after = {
            "loss_scale": ls.loss_scale,
            "growth_count": ls.counter,
            "finite": finite,
            "params": sequences.flat(kept[0]),
            "inner": sequences.flat(kept[1]),
        }
        return (ls.loss_scale, ls.counter, *kept), after

    params = sequences.params_at_start()
    start = hyper["initial_scale"], jnp.int32(0), params, inner.init(params)
    return jax.lax.scan(step, start, steps)[1]


JMP = sequences.batched(run_jmp)


def jmp_system(batch):
    trace = JMP(batch)
    hyper, theirs = batch.hyper, trace["loss_scale"]
    # JMP has no ceiling, and divides by its factor where we multiply by the rounded reciprocal.
    factor = hyper["factor"].astype(np.float32)
    bounds = hyper["min_scale"], hyper["max_scale"]
    moved = walk(hyper["initial_scale"], theirs, (factor, np.float32(1) / factor), bounds)
    below = (theirs <= hyper["max_scale"][:, None]).all(axis=1)
    scales = np.where((is_power_of_two(factor) & below)[:, None], theirs, moved)
    return trace | counts_of(trace.pop("finite")) | {"loss_scale": scales}


def as_jmp(hyper):
    factor = jnp.asarray(hyper["factor"], jnp.float32)
    return policy_of(hyper) | {"growth_factor": factor, "backoff_factor": 1 / factor}


def test_a_run_is_that_of_jmp_below_a_ceiling():
    rng = np.random.default_rng(20)
    start, half = powers(rng, -10, 20), rng.random(CASES) < 0.5
    # In float16 a factor decides which steps overflow: there both sides need the same bounds.
    ceiling = np.maximum(powers(rng, 0, 30), start)
    hyper = {
        "initial_scale": start,
        "growth_interval": rng.choice(np.int32([1, 2, 2, 3, 5, 20, 2000]), CASES),
        "factor": rng.choice(np.int32([2, 2, 2, 4]), CASES),
        "min_scale": np.minimum(powers(rng, -30, 10), start),
        "max_scale": np.where(half | (rng.random(CASES) < 0.5), LARGEST, ceiling),
        "half": half,
    }
    batch = sequences.random_batch(rng, hyper, STEPS, exponents=(-12, 4))
    trace = assert_same(
        only(ours(as_jmp), *STEPPED),
        jmp_system,
        batch,
        names=("ours", "JMP"),
        simplest=SIMPLEST | {"factor": (2, 4)},
        valid=lambda h: is_valid(h) and (not h["half"] or h["max_scale"] == LARGEST),
    )
    assert_tells(trace)
    assert_overflows_by_itself(batch, trace)
    assert (trace["loss_scale"] == hyper["min_scale"][:, None]).any(axis=1).sum() > CASES / 20
    assert (trace["loss_scale"] == hyper["max_scale"][:, None]).any(axis=1).sum() > CASES / 20


def test_a_factor_moves_as_that_of_jmp_but_is_multiplied_where_jmp_divides():
    rng = np.random.default_rng(21)
    hyper = {
        "initial_scale": powers(rng, 10, 20) * chosen(rng, [1, 1.3]),
        "growth_interval": rng.choice(np.int32([2, 2, 3, 5, 20, 2000]), CASES),
        "factor": rng.choice(np.int32([3, 5, 7]), CASES),  # 7**48 is below 2**136
        "min_scale": np.full(CASES, SMALLEST),
        "max_scale": np.full(CASES, LARGEST),
        "half": np.zeros(CASES, bool),
    }
    batch = sequences.random_batch(rng, hyper, STEPS)
    trace = assert_same(
        only(ours(as_jmp), *FIELDS),
        only(jmp_system, *FIELDS),
        batch,
        names=("ours", "JMP"),
        simplest=SIMPLEST | {"factor": (3, 5)},
        valid=is_unbounded,
    )
    assert_tells(trace)
    assert (trace["loss_scale"] != JMP(batch)["loss_scale"]).any()  # the difference is there


def run_keras(hyper, steps):
    """Let Keras train: its optimizer's numbers are variables, so each run sets its own."""
    inner = keras.optimizers.SGD(RATE)
    tx = keras.optimizers.LossScaleOptimizer(inner)
    start = [START[:2], START[2:].reshape(2, 2)]
    variables = [keras.Variable(value) for value in start]
    tx.build(variables)
    tx.dynamic_growth_steps = hyper["growth_interval"]
    names = [variable.path.split("/", 1)[1] for variable in tx.variables]
    count, scale = names.index("step_counter"), names.index("dynamic_scale")
    applied = names.index("iteration", 1)  # the first is the wrapper's own, which stays 0

    def step(carry, given):
        params, state = carry
        weights = sequences.weights_of(given.grad, given.at)

        def scaled_loss(params):
            tree = dict(zip(("b", "w"), params, strict=True))
            return sequences.loss_fn(tree, weights, hyper["half"]) * state[scale]

        params, state = tx.stateless_apply(state, jax.grad(scaled_loss)(params), params)
        after = {
            "loss_scale": state[scale],
            "growth_count": state[count],
            "applied": state[applied],
            "params": sequences.flat(params),
        }
        return (params, state), after

    state = [variable.value for variable in tx.variables]
    state[scale] = hyper["initial_scale"]
    return jax.lax.scan(step, ([jnp.asarray(p) for p in start], state), steps)[1]


KERAS = sequences.batched(run_keras)


def keras_system(batch):
    trace = KERAS(batch)
    hyper = batch.hyper
    # Keras has no bounds.
    bounds = hyper["min_scale"], hyper["max_scale"]
    scales = walk(hyper["initial_scale"], trace["loss_scale"], np.float32([2, 0.5]), bounds)
    applied = trace.pop("applied")
    finite = np.diff(applied, axis=1, prepend=0) == 1
    return trace | counts_of(finite) | {"loss_scale": scales}


def as_keras(hyper):
    return policy_of(hyper)


def draw_keras(rng, start, *, bounded):
    return {
        "initial_scale": start,
        "growth_interval": rng.choice(np.int32([1, 2, 2, 3, 5, 20, 2000]), CASES),
        "min_scale": np.where(bounded, np.minimum(powers(rng, -30, 10), start), SMALLEST),
        "max_scale": np.where(bounded, np.maximum(powers(rng, 0, 30), start), LARGEST),
    }


def test_a_run_is_that_of_keras_between_bounds():
    rng = np.random.default_rng(30)
    half = rng.random(CASES) < 0.5
    bounded = ~half & (rng.random(CASES) < 0.5)
    hyper = draw_keras(rng, powers(rng, -10, 20), bounded=bounded) | {"half": half}
    batch = sequences.random_batch(rng, hyper, STEPS, exponents=(-12, 4))
    names = (*FIELDS, "params")
    trace = assert_same(
        only(ours(as_keras, inner=lambda: optax.sgd(RATE)), *names),
        keras_system,
        batch,
        names=("ours", "Keras"),
        simplest=SIMPLEST,
        valid=lambda h: is_valid(h) and (not h["half"] or is_unbounded(h)),
    )
    assert_tells(trace)
    assert_overflows_by_itself(batch, trace)
    at_floor = trace["loss_scale"] == hyper["min_scale"][:, None]
    assert (at_floor & bounded[:, None]).any(axis=1).sum() > CASES / 20
    # Away from the bounds nothing was made of what Keras gave.
    theirs = KERAS(batch)["loss_scale"]
    np.testing.assert_array_equal(trace["loss_scale"][~bounded], theirs[~bounded])


def test_a_factor_that_is_no_power_of_two_moves_as_that_of_keras():
    rng = np.random.default_rng(31)
    start = rng.uniform(1e-3, 1e6, CASES).astype(np.float32)
    hyper = draw_keras(rng, start, bounded=np.zeros(CASES, bool))
    batch = sequences.random_batch(rng, hyper | {"half": np.ones(CASES, bool)}, STEPS)
    trace = assert_same(
        only(ours(as_keras), *FIELDS),
        only(keras_system, *FIELDS),
        batch,
        names=("ours", "Keras"),
        simplest=SIMPLEST,
        valid=is_unbounded,
    )
    assert_tells(trace)


# The skip alone, against Optax' own.


def run_apply_if_finite(hyper, steps):
    inner = optax.apply_if_finite(sequences.exact_inner(), hyper["patience"])

    def step(carry, given):
        params, state = carry
        grads = sequences.weights_of(given.grad, given.at)
        updates, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        after = {
            "consecutive_skipped": state.notfinite_count,
            "total_skipped": state.total_notfinite,
            "params": sequences.flat(params),
            "inner": sequences.flat(state.inner_state),
        }
        return (params, state), after

    params = sequences.params_at_start()
    return jax.lax.scan(step, (params, inner.init(params)), steps)[1]


APPLY_IF_FINITE = sequences.batched(run_apply_if_finite)


def draw_skips(rng, patience):
    ones = np.ones(CASES, np.float32)
    return {
        "initial_scale": powers(rng, -10, 20),
        "min_scale": ones * SMALLEST,
        "max_scale": ones * LARGEST,
        "growth_interval": rng.choice(np.int32([1, 2, 5, 2000]), CASES),
        "half": np.zeros(CASES, bool),
        "patience": patience,
    }


def without_the_sign_of_zero(system):
    """Add +0.0, as `apply_if_finite` does on a step it skips, where ours leaves -0.0 as it is."""

    def run(batch):
        trace = system(batch)
        return trace | {name: trace[name] + np.float32(0) for name in ("params", "inner")}

    return run


def test_what_a_skip_leaves_is_what_apply_if_finite_leaves():
    rng = np.random.default_rng(40)
    hyper = draw_skips(rng, np.full(CASES, STEPS, np.int32))
    batch = sequences.random_batch(rng, hyper, STEPS)
    names = ("consecutive_skipped", "total_skipped", "params", "inner")
    trace = assert_same(
        without_the_sign_of_zero(only(ours(policy_of), *names)),
        without_the_sign_of_zero(APPLY_IF_FINITE),
        batch,
        names=("ours", "apply_if_finite"),
        simplest=SIMPLEST,
        valid=is_valid,
    )
    assert (trace["consecutive_skipped"].max(axis=1) == STEPS).any()
    assert np.isfinite(trace["params"]).all()


def test_apply_if_finite_gives_up_at_the_step_that_our_counter_names_and_we_do_not():
    rng = np.random.default_rng(41)
    hyper = draw_skips(rng, rng.choice(np.int32([0, 1, 2, 3, 5, 10]), CASES))
    batch = sequences.random_batch(rng, hyper, STEPS)

    def ours_says(batch):
        trace = ours_plain(batch)
        assert np.isfinite(trace["params"]).all()
        over = trace["consecutive_skipped"] > batch.hyper["patience"][:, None]
        return {"poisoned": np.logical_or.accumulate(over, axis=1)}

    def theirs_are(batch):
        return {"poisoned": ~np.isfinite(APPLY_IF_FINITE(batch)["params"]).all(axis=2)}

    ours_plain = ours(policy_of)
    trace = assert_same(ours_says, theirs_are, batch, simplest=SIMPLEST, valid=is_valid)
    assert CASES / 4 < trace["poisoned"][:, -1].sum() < CASES
