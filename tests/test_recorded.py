"""Held against what TensorFlow, tf.keras and MindSpore did, which are too large to install here.

`tests/oracles/record_*.py` ran them once; `tests/oracles/recorded/*.json` is what they left, with
their versions. `tests/oracles/recording.py` says which script, versions and command made each file.
Where they differ by design, `walk` makes of their moves what ours must give: they divide by a
factor where we multiply by its reciprocal, and none has a ceiling.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sequences import Traced, walk

import optax_lossscale as ols
from optax_lossscale.keras import loss_scale_optimizer

pytestmark = pytest.mark.integration

RECORDED = Path(__file__).parent / "oracles" / "recorded"
FILES = sorted(RECORDED.glob("*.json"))
SPOILT = {"n": np.nan, "+": np.inf, "-": -np.inf}
LARGEST = 2.0**126
FLOAT32_MAX = float(np.finfo(np.float32).max)
PER_STEP = ("steps", "loss_scale", "counter", "applied", "weights")
# What each file is a recording of, and what it must hold.
SYSTEMS = {
    "tensorflow": {"DynamicLossScale", "FixedLossScale", "MixedPrecisionLossScaleOptimizer"},
    "mindspore": {
        "DynamicLossScaleManager",
        "DynamicLossScaleUpdateCell",
        "DynamicLossScaler",
        "FixedLossScaleManager",
    },
}


def load(path):
    """Return a recording, unless it is empty or does not say what it is of."""
    recording = json.loads(path.read_text(encoding="ascii"))
    system, version = path.stem.rsplit("-", 1)
    if not recording.get("versions", {}).get(system, "").startswith(version + "."):
        raise ValueError(f"{path.name} does not say which version of {system} it is a record of")
    for key in ("trajectories", "trainings"):
        if not recording.get(key):
            raise ValueError(f"{path.name} holds no {key}")
    for run in recording["trajectories"] + recording["trainings"]:
        lengths = {len(run[k]) for k in PER_STEP if k in run}
        if lengths != {len(run["steps"])} or not run["steps"]:
            raise ValueError(f"{path.name} holds a {run['kind']} with steps missing")
    return recording


RECORDINGS = {path.stem: load(path) for path in FILES}


def numbers_of(run):
    """Return what any of the systems calls its start, its interval and its factor."""
    names = {
        "start": ("initial_scale", "init_loss_scale"),
        "interval": ("increment_period", "dynamic_growth_steps", "scale_window", "interval"),
        "factor": ("multiplier", "scale_factor", "factor"),
    }
    found = {key: [run[n] for n in ns if run.get(n) is not None] for key, ns in names.items()}
    return {key: values[0] if values else None for key, values in found.items()}


def is_dynamic(run):
    return numbers_of(run)["interval"] is not None


def gradients_of(runs):
    """Return the gradients of all steps, [runs, steps]."""
    return np.array([[SPOILT.get(step, 1.0) for step in run["steps"]] for run in runs], np.float32)


def field(runs, name, dtype):
    return np.array([run[name] for run in runs], dtype)


def run_ours(policy, grads):
    """Return the states after each step of one run, and which steps moved the parameter."""
    tx = ols.with_loss_scaling(optax.sgd(0.01), policy)

    def step(carry, grad):
        param, state = carry
        updates, state = tx.update(ols.scale_loss(grad, state), state, param)
        after = optax.apply_updates(param, updates)
        moved = (after != param) | ~jnp.isfinite(after)  # what is infinite stays where it is
        return (after, state), (state.loss_scale_state, moved.astype(jnp.int32))

    param = jnp.zeros(())
    return jax.lax.scan(step, (param, tx.init(param)), grads)[1]


def assert_same(ours, theirs, runs, what):
    """Hold results [runs, steps] to each other; name the first run that differs, up to there."""
    ours = np.asarray(ours)
    rows, columns = np.nonzero(ours != theirs)
    if rows.size:
        row, upto = rows[0], columns[0] + 1
        run = {k: v for k, v in runs[row].items() if not isinstance(v, list) and k != "steps"}
        pytest.fail(
            f"{what} differs in {len(set(rows))} of {len(runs)} runs, first in {run} after "
            f"{runs[row]['steps'][:upto]}: ours {ours[row, :upto].tolist()}, theirs "
            f"{theirs[row, :upto].tolist()}"
        )


def expected_scales(runs, hyper):
    """Return what our factor must be after each step, [runs, steps]."""
    theirs = field(runs, "loss_scale", np.float32)
    factors = hyper["growth_factor"], hyper["backoff_factor"]
    bounds = np.float32(1), np.float32(LARGEST)
    moved = walk(hyper["initial_scale"], theirs, factors, bounds)
    # Nothing is made of what they did where their arithmetic is ours and no ceiling is met.
    same = (np.frexp(factors[0])[0] == 0.5) & (theirs.max(axis=1) <= LARGEST)
    assert same.sum() > len(runs) / 2
    np.testing.assert_array_equal(moved[same], theirs[same])
    return moved


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_dynamic_scale_moves_and_skips_as_recorded(name):
    runs = [run for run in RECORDINGS[name]["trajectories"] if is_dynamic(run)]
    numbers = [numbers_of(run) for run in runs]
    factor = np.array([n["factor"] or 2 for n in numbers], np.float32)
    hyper = {
        "initial_scale": np.array([n["start"] for n in numbers], np.float32),
        "growth_interval": np.array([n["interval"] for n in numbers], np.int32),
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "max_scale": np.full(len(runs), LARGEST, np.float32),
    }
    run = jax.jit(jax.vmap(lambda hyper, grads: run_ours(Traced(**hyper), grads)))
    states, applied = run(hyper, gradients_of(runs))
    # A product that would be infinite they reject, and stay below our ceiling where they stand: a
    # factor of 8 leaves 2**125 in place. From there on only the rest is compared.
    theirs = field(runs, "loss_scale", np.float32).astype(np.float64)
    rejects = (theirs * factor[:, None] > FLOAT32_MAX) & (theirs < LARGEST)
    compared = ~np.logical_or.accumulate(rejects, axis=1)
    assert np.mean(compared) > 0.99
    ours, expected = np.asarray(states.loss_scale), expected_scales(runs, hyper)
    assert_same(np.where(compared, ours, 0), np.where(compared, expected, 0), runs, "the factor")
    for key, ours in (("counter", states.growth_count), ("applied", applied)):
        rows = [row for row, run in enumerate(runs) if key in run]
        if rows:
            having = [runs[row] for row in rows]
            assert_same(np.asarray(ours)[rows], field(having, key, np.int32), having, key)
    # The recording tells: factors that grew, and that met the floor of one and the largest number.
    assert np.sum(theirs[:, -1] > hyper["initial_scale"]) > 10
    assert np.sum(theirs[:, -1] == 1) > 10
    assert theirs.max() > LARGEST
    assert len(runs) > 100


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_fixed_scale_skips_or_does_not_as_recorded(name):
    runs = [run for run in RECORDINGS[name]["trajectories"] if not is_dynamic(run)]
    assert len(runs) >= 4
    for run in runs:
        # TensorFlow's and tf.keras' check nothing, and MindSpore's are told.
        drops = run.get("drop_overflow_update", False)
        policy = ols.FixedLossScale(numbers_of(run)["start"], skip_nonfinite=drops)
        states, applied = jax.jit(lambda g, p=policy: run_ours(p, g))(gradients_of([run])[0])
        assert_same(
            [states.loss_scale], field([run], "loss_scale", np.float32), [run], "the factor"
        )
        expected = run.get("applied", [int(s == "T" or not drops) for s in run["steps"]])
        assert_same([applied], np.array([expected]), [run], "applied")
        assert int(states.total_skipped[-1]) == (len(expected) - sum(expected) if drops else 0)


def adam_by_the_step(learning_rate, eps):
    """Return Adam that corrects its bias by the step it is told, not by the updates it has seen.

    tf.keras counts a skipped step as an iteration, and its Adam reads that count. Ours stands.
    """

    def update(grads, state, params=None, *, step, **_):
        del params
        mean, square = state
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, grads)
        c = learning_rate * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        updates = jax.tree.map(lambda m, v: -c * m / (jnp.sqrt(v) + eps), mean, square)
        return updates, (mean, square)

    zeros = optax.tree.zeros_like
    return optax.GradientTransformationExtraArgs(lambda p: (zeros(p), zeros(p)), update)


def inner_of(run):
    """Return the recorded inner optimizer, as Optax has it."""
    if run["inner"] == "sgd":
        return optax.sgd(run["learning_rate"], momentum=run["momentum"] or None)
    adam = adam_by_the_step if run["kind"].startswith("LossScaleOptimizer") else optax.adam
    return adam(run["learning_rate"], eps=run["epsilon"])


# How far weights may lie apart, relative to the largest: a few roundings to float32, 2**-24, in
# each of 30 steps, and for Adam what the power 0.999**t loses in float32 when 1 is taken from it,
# 2**-24 / 0.001 in the first step.
TOLERANCES = {"sgd": 2**-24 * 30, "adam": 1e-4}


def train(tx, run):
    """Return the weights, the factors and the counts after each step of the recorded problem."""
    x, y, w, b = (jnp.asarray(run[name], jnp.float32) for name in ("x", "y", "w", "b"))

    def loss_fn(params, spoil):
        return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2) * spoil

    def step(carry, given):
        params, state = carry
        number, spoil = given
        _, grads = ols.value_and_grad(loss_fn)(state, params, spoil)
        # The others never see the loss.
        updates, state = tx.update(grads, state, params, step=number)
        params = optax.apply_updates(params, updates)
        weights = jnp.concatenate([params["w"].ravel(), params["b"]])
        scale_state = ols.loss_scale_state(state)
        return (params, state), (weights, scale_state.loss_scale, scale_state.growth_count)

    params = {"w": w, "b": b}
    spoils = gradients_of([run])[0]
    steps = np.arange(1, len(spoils) + 1, dtype=np.float32), spoils
    return jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), steps)[1])()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=f"{name}-{run['kind']}-{run['inner']}-{number}")
        for name, recording in RECORDINGS.items()
        for number, run in enumerate(recording["trainings"])
    ],
)
def test_weights_are_those_of_a_recorded_training(run):
    inner, factor = inner_of(run), run["factor"]
    rule = run["initial_scale"], run["interval"]
    policy = ols.DynamicLossScale(*rule, factor, 1 / factor, max_scale=LARGEST)
    transformations = [(ols.with_loss_scaling(inner, policy), LARGEST)]
    if run["kind"].startswith("LossScaleOptimizer"):
        transformations.append((loss_scale_optimizer(inner, *rule), 2.0**24))
    start, moved = np.float32(run["initial_scale"]), np.array(run["loss_scale"], np.float32)
    theirs = np.array(run["weights"], np.float32)
    skipped = np.array([step != "T" for step in run["steps"]])
    for tx, ceiling in transformations:
        weights, scales, counts = train(tx, run)
        expected = walk(start[None], moved[None], (factor, 1 / factor), (1, ceiling))[0]
        np.testing.assert_array_equal(scales, expected)
        if "counter" in run:
            np.testing.assert_array_equal(counts, run["counter"])
        apart = np.abs(weights - theirs).max() / np.abs(theirs).max()
        assert apart < TOLERANCES[run["inner"]]
        # No bit moves on a skipped step, theirs or ours.
        for history in (theirs, np.asarray(weights)):
            stood = (history[1:] == history[:-1]).all(axis=1)
            np.testing.assert_array_equal(stood, skipped[1:])
    assert skipped.sum() >= 3


# What is read was recorded, and is all there.


@pytest.mark.parametrize("system", SYSTEMS)
def test_there_is_a_recording_of_every_system(system):
    found = [RECORDINGS[name] for name in RECORDINGS if name.startswith(system + "-")]
    assert found
    for recording in found:
        kinds = {run["kind"] for run in recording["trajectories"] + recording["trainings"]}
        assert kinds >= SYSTEMS[system]
        assert {run["inner"] for run in recording["trainings"]} == {"sgd", "adam"}


def test_tf_keras_is_recorded_both_ways_it_was_written():
    kinds = {run["kind"] for r in RECORDINGS.values() for run in r["trajectories"]}
    assert kinds >= {"LossScaleOptimizer", "LossScaleOptimizerV3"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_written_down_how_a_recording_was_made(path):
    rows = (RECORDED.parent / "recording.py").read_text(encoding="utf-8").splitlines()
    (row,) = [row.split() for row in rows if row.startswith(f"| {path.name} ")]
    system = path.stem.rsplit("-", 1)[0]
    versions = RECORDINGS[path.stem]["versions"]
    assert versions["python"].startswith(row[5] + ".")
    assert row[7].endswith("==" + versions[system])
    assert (RECORDED.parent / row[3]).is_file()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recording_is_small(path):
    assert path.stat().st_size < 200_000


def without(key):
    return lambda r: r.pop(key)


DAMAGED = {
    "no versions": (without("versions"), "does not say which version of tensorflow"),
    "another's version": (
        lambda r: r["versions"].pop("tensorflow"),
        "does not say which version of tensorflow",
    ),
    "another version": (
        lambda r: r["versions"].update(tensorflow="1.15.0"),
        "does not say which version of tensorflow",
    ),
    "no trajectories": (lambda r: r["trajectories"].clear(), "holds no trajectories"),
    "trainings missing": (without("trainings"), "holds no trainings"),
    "a step missing": (lambda r: r["trajectories"][3]["loss_scale"].pop(), "steps missing"),
    "weights missing": (lambda r: r["trainings"][0]["weights"].pop(), "steps missing"),
    "no steps": (
        lambda r: r["trajectories"][0].update(steps="", loss_scale=[], applied=[]),
        "steps missing",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_recording_is_refused(damage, message, tmp_path):
    path = next(path for path in FILES if path.stem.startswith("tensorflow"))
    recording = json.loads(path.read_text(encoding="ascii"))
    damage(recording)
    copy = tmp_path / path.name
    copy.write_text(json.dumps(recording), encoding="ascii")
    with pytest.raises(ValueError, match=message):
        load(copy)
