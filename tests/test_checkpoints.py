"""Training that was saved goes on, in a new process, as if nothing had happened.

Run as a script this file is that process: see `resume_all`.
"""

import itertools
import json
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from plain_where import assert_same_bits, bits

import optax_lossscale as ols

pytestmark = pytest.mark.integration

STEPS = 30
OUTLIERS = (4, 9, 10, 15, 17, 22)  # their gradients overflow float16
NAN_LOSS = 19
# After finite steps with a history of overflows, and after two overflows in a row.
SAVED_AFTER = (13, 11)
POLICY = ols.DynamicLossScale(2.0**6, growth_interval=3, hysteresis=3)
MESHES = {"4x2": (4, 2), "2x4": (2, 4), "one_device": (1, 1)}
DAMAGED = list(
    itertools.product(["_METADATA", "manifest.ocdbt", "d/*"], ["cut off", "flipped", "missing"])
)


def batches():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(STEPS, 8, 8)).astype(np.float32)
    y = x @ rng.normal(size=(8, 8)).astype(np.float32)
    y[OUTLIERS, 0] = 1e5
    y[NAN_LOSS, 0] = np.nan
    return list(zip(x, y, strict=True))


def initial_params():
    w = np.random.default_rng(5).normal(size=(2, 8, 8)).astype(np.float32) / 3
    return {"hidden": jnp.asarray(w[0]), "out": jnp.asarray(w[1]), "gain": jnp.ones(())}


def inner_optimizer():
    schedule = optax.cosine_decay_schedule(0.05, 100)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return optax.MultiSteps(chain, 2)


def loss_fn(params, x, y):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = jnp.tanh(x.astype(jnp.float16) @ half["hidden"])
    predicted = (hidden @ half["out"] * half["gain"]).astype(jnp.float32)
    return jnp.mean((predicted - y) ** 2)


def initial_state(tx):
    params = initial_params()
    return {"params": params, "opt_state": tx.init(params), "step": jnp.zeros((), jnp.int32)}


def make_step(tx):
    """Return a compiled training step, and a list that grows whenever it is traced."""
    traces = []

    @jax.jit
    def step(state, x, y):
        traces.append(None)
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    return step, traces


def train(step, state, data):
    """Return the state after the batches that it has not seen, and each loss and factor."""
    history = []
    for x, y in data[int(state["step"]) :]:
        state, loss = step(state, x, y)
        history.append((float(loss), float(ols.loss_scale_state(state["opt_state"]).loss_scale)))
    return state, history


def shardings(tree, mesh):
    """Matrices are cut along both axes of the mesh; the rest, the loss scale too, is copied."""
    parts = {2: PartitionSpec("data", "model")}
    return jax.tree.map(lambda x: NamedSharding(mesh, parts.get(np.ndim(x), PartitionSpec())), tree)


def make_mesh(name):
    rows, columns = MESHES[name]
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("data", "model"))


def on_mesh(mesh, state, data):
    """Put a state and the batches onto a mesh."""
    batch = NamedSharding(mesh, PartitionSpec("data"))
    return jax.device_put(state, shardings(state, mesh)), jax.device_put(data, batch)


def abstract(state, placed=None):
    """Return what Orbax is told to restore: shapes, dtypes and where to put them."""
    placed = placed or jax.tree.map(lambda x: x.sharding, state)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
    )


def save_pickle(path, state):
    path.write_bytes(pickle.dumps(state))


def restore_pickle(path, like):
    del like
    return pickle.loads(path.read_bytes())  # noqa: S301, written by this test


def save_flax(path, state):
    path.write_bytes(serialization.to_bytes(state))


def restore_flax(path, like):
    return serialization.from_bytes(like, path.read_bytes())


def save_orbax(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore_orbax(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, abstract(like))


def save_managed(path, state):
    with ocp.CheckpointManager(path) as manager:
        manager.save(int(state["step"]), args=ocp.args.StandardSave(state))


def restore_managed(path, like, step=None):
    with ocp.CheckpointManager(path) as manager:
        args = ocp.args.StandardRestore(abstract(like))
        return manager.restore(manager.latest_step() if step is None else step, args=args)


FORMATS = {
    "pickle": (save_pickle, restore_pickle),
    "flax": (save_flax, restore_flax),
    "orbax": (save_orbax, restore_orbax),
    "orbax_manager": (save_managed, restore_managed),
}


def damage(path, pattern, how):
    """Damage one file of an Orbax checkpoint."""
    (file,) = path.glob(pattern)
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "flipped":
        file.write_bytes(content[:1] + bytes(255 - byte for byte in content[1:]))
    else:
        file.write_bytes(content[: len(content) // 2])


def with_one_bit_flipped(content, where):
    i = int(where * (len(content) - 1))
    return content[:i] + bytes([content[i] ^ 16]) + content[i + 1 :]


HARMS = {
    "missing": lambda file, _: file.unlink(),
    "emptied": lambda file, _: file.write_bytes(b""),
    "cut off": lambda file, content: file.write_bytes(content[: len(content) // 2]),
    **{
        f"a bit at {where}": lambda file, content, where=where: file.write_bytes(
            with_one_bit_flipped(content, where)
        )
        for where in (0.0, 0.5, 1.0)
    },
}


def outcome_of(restore, *args):
    """Return what is restored, or the type of the error, for the test to look at."""
    try:
        return restore(*args)
    except Exception as error:  # noqa: BLE001
        return type(error)


def restore_after_each_harm(folder, like):
    """Damage every file of an Orbax checkpoint in every way, and return what came of each."""
    outcomes = {}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for file, (harm, do) in itertools.product(files, HARMS.items()):
        content = file.read_bytes()
        do(file, content)
        key = file.relative_to(folder).parts[0], file.name, harm
        outcomes[key] = outcome_of(restore_orbax, folder, like)
        file.write_bytes(content)
    return outcomes


def restore_after_the_latest_is_damaged(folder, like):
    """Return the manager's latest step, what came of its restoring, and the step before it."""
    earlier, latest = sorted(int(path.name) for path in folder.iterdir())
    damage(folder / str(latest) / "default", "manifest.ocdbt", "missing")
    with ocp.CheckpointManager(folder) as manager:
        seen = manager.latest_step()
    outcome = outcome_of(restore_managed, folder, like)
    return seen, outcome, restore_managed(folder, like, earlier)


def resume_all(folder):
    """Restore every checkpoint of `folder`, train to the end, and write down what came of it."""
    policy = ols.as_loss_scale(json.loads((folder / "policy.json").read_text("utf-8")))
    tx = ols.with_loss_scaling(inner_optimizer(), policy)
    fresh = initial_state(tx)
    step, traces = make_step(tx)
    results = {}
    for name, (_, restore) in FORMATS.items():
        for saved_after in SAVED_AFTER:
            restored = restore(folder / f"{name}_{saved_after}", fresh)
            results[name, saved_after] = (restored, *train(step, restored, batches()))
    results["traces"] = len(traces)
    for name in MESHES:
        mesh = make_mesh(name)
        target = abstract(fresh, shardings(fresh, mesh))
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder / "mesh", target)
        placed = {str(x.sharding) for x in jax.tree.leaves(restored)}
        asked = {str(x.sharding) for x in jax.tree.leaves(target)}
        _, data = on_mesh(mesh, restored, batches())
        results[name] = (restored, *train(step, restored, data), placed == asked)
    # Here because Orbax closes its event loop on an error while other reads are still under way.
    for name in DAMAGED:
        damaged = folder / "_".join(name).replace("/*", "")
        results[name] = outcome_of(restore_orbax, damaged, fresh)
    results["harms"] = restore_after_each_harm(folder / f"orbax_{SAVED_AFTER[1]}", fresh)
    results["damaged latest"] = restore_after_the_latest_is_damaged(folder / "two_steps", fresh)
    (folder / "results.pickle").write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train without a break, save on the way, and let a new process resume from each save."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with jax.numpy_dtype_promotion("standard"):
        tx = ols.with_loss_scaling(inner_optimizer(), POLICY)
        step, _ = make_step(tx)
        state, data = initial_state(tx), batches()
        states = {}
        for save_after in sorted(SAVED_AFTER):
            state, _ = train(step, state, data[:save_after])
            states[save_after] = state
            for name, (save, _) in FORMATS.items():
                save(folder / f"{name}_{save_after}", state)
            save_managed(folder / "two_steps", state)
        finals = {n: train(step, states[n], data) for n in SAVED_AFTER}
        sharded, sharded_data = on_mesh(make_mesh("4x2"), *(states[SAVED_AFTER[0]], data))
        save_orbax(folder / "mesh", sharded)
        finals["4x2"] = train(step, sharded, sharded_data)
    for name in DAMAGED:
        copy = folder / "_".join(name).replace("/*", "")
        shutil.copytree(folder / f"orbax_{SAVED_AFTER[0]}", copy)
        damage(copy, *name)
    (folder / "policy.json").write_text(json.dumps(POLICY.get_config()), "utf-8")
    command = [sys.executable, __file__, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603, the interpreter and this file
    assert process.returncode == 0, process.stderr
    resumed = pickle.loads((folder / "results.pickle").read_bytes())  # noqa: S301
    return states, finals, resumed


def test_the_saves_hold_every_field_at_a_value_of_its_own(run):
    states, finals, _ = run
    amid, after_skip = (ols.loss_scale_state(states[n]) for n in SAVED_AFTER)
    assert [int(count) for count in amid[1:]] == [2, 2, 0, 3]
    assert [int(count) for count in after_skip[1:]] == [0, 2, 2, 3]
    assert float(amid.loss_scale) == float(after_skip.loss_scale) == 4 * POLICY.initial_scale
    for n in SAVED_AFTER:
        final, history = finals[n]
        moves = np.diff([factor for _, factor in history])
        assert moves.min() < 0 < moves.max()  # the factor moves both ways after the save
        assert int(ols.loss_scale_state(final).total_skipped) == len(OUTLIERS) + 1
        assert np.isnan([loss for loss, _ in history]).sum() == 1


@pytest.mark.parametrize("saved_after", SAVED_AFTER)
@pytest.mark.parametrize("name", FORMATS)
def test_training_goes_on_bit_for_bit_in_a_new_process(run, name, saved_after):
    states, finals, resumed = run
    restored, final, history = resumed[name, saved_after]
    assert_same_bits(restored, states[saved_after])
    expected, expected_history = finals[saved_after]
    assert_same_bits(final, expected)
    np.testing.assert_array_equal(history, expected_history)
    assert len(history) == STEPS - saved_after


def test_a_restored_state_does_not_compile_the_step_again(run):
    *_, resumed = run
    assert resumed["traces"] == 1


@pytest.mark.parametrize("name", MESHES)
def test_a_sharded_save_is_restored_onto_any_mesh(run, name):
    states, finals, resumed = run
    restored, final, history, as_asked = resumed[name]
    assert as_asked
    assert_same_bits(restored, states[SAVED_AFTER[0]])
    expected, expected_history = finals["4x2"]
    if name == "4x2":
        assert_same_bits(final, expected)
        np.testing.assert_array_equal(history, expected_history)
    # Another mesh adds in another order, but the factor takes the same way.
    losses, factors = zip(*history, strict=True)
    expected_losses, expected_factors = zip(*expected_history, strict=True)
    assert factors == expected_factors
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-2)
    assert_same_bits(
        ols.loss_scale_state(final["opt_state"]), ols.loss_scale_state(expected["opt_state"])
    )


def synthetic_grads(seed):
    rng = np.random.default_rng(seed)
    return [{"w": jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)} for _ in range(4)]


def apply_all(tx, params, opt_state, grads):
    for g in grads:
        updates, opt_state = tx.update(g, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


def apply_all_scaled(tx, params, opt_state, grads):
    for g in grads:
        factor = ols.loss_scale_state(opt_state).loss_scale
        scaled = jax.tree.map(lambda x, factor=factor: x * factor, g)
        updates, opt_state = tx.update(scaled, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


@pytest.mark.parametrize("name", ["pickle", "flax", "orbax"])
def test_a_checkpoint_of_the_plain_optimizer_goes_in_and_out_through_inner_state(name, tmp_path):
    save, restore = FORMATS[name]
    plain = optax.adamw(0.1)
    tx = ols.with_loss_scaling(plain, ols.DynamicLossScale(2.0**10, growth_interval=2))
    params = {"w": jnp.ones((4, 4))}
    params, plain_state = apply_all(plain, params, plain.init(params), synthetic_grads(0))

    save(tmp_path / "plain", plain_state)
    fresh = tx.init(params)
    restored = restore(tmp_path / "plain", fresh.inner_state)
    opt_state = fresh._replace(inner_state=restored)
    expected = apply_all(plain, params, plain_state, synthetic_grads(1))
    params, opt_state = apply_all_scaled(tx, params, opt_state, synthetic_grads(1))
    assert_same_bits((params, opt_state.inner_state), expected)
    assert float(ols.loss_scale_state(opt_state).loss_scale) == 2.0**12

    save(tmp_path / "inner", opt_state.inner_state)
    back = restore(tmp_path / "inner", plain.init(params))
    expected = apply_all(plain, params, expected[1], synthetic_grads(2))
    assert_same_bits(apply_all(plain, params, back, synthetic_grads(2)), expected)


class OlderState(NamedTuple):
    """A LossScaleState as an older version might have written it, one field short."""

    loss_scale: jax.Array
    growth_count: jax.Array
    overflow_count: jax.Array
    consecutive_skipped: jax.Array

    def __reduce__(self):
        return ols.LossScaleState, tuple(self)


def states_of_two_versions():
    """Return a state of today in the middle of a run, and the same as of an older version."""
    tx = ols.with_loss_scaling(optax.adam(0.1), ols.DynamicLossScale(2.0**10, hysteresis=2))
    opt_state = tx.init({"w": jnp.ones((4, 4))})
    for factor in (jnp.inf, 1.0):
        _, opt_state = tx.update({"w": jnp.full((4, 4), factor)}, opt_state)
    older = OlderState(*opt_state.loss_scale_state[:-1])
    return opt_state, opt_state._replace(loss_scale_state=older)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("pickle", TypeError, "missing 1 required positional argument: 'total_skipped'"),
        ("flax", ValueError, r"do not match.*'total_skipped'.* at path \./loss_scale_state"),
        ("orbax", ValueError, r"loss_scale_state\.total_skipped:\s.*\s.*Target: MISSING"),
    ],
)
def test_a_field_that_an_older_file_lacks_is_named(name, error, message, tmp_path):
    save, restore = FORMATS[name]
    today, older = states_of_two_versions()
    save(tmp_path / "older", older)
    with pytest.raises(error, match=message):
        restore(tmp_path / "older", today)


def test_flax_bytes_that_lack_a_field_are_completed_by_hand():
    today, older = states_of_two_versions()
    raw = serialization.msgpack_restore(serialization.to_bytes(older))
    raw["loss_scale_state"]["total_skipped"] = np.int32(1)
    assert_same_bits(serialization.from_state_dict(today, raw), today)


def test_an_orbax_checkpoint_that_lacks_a_field_is_completed_by_hand(tmp_path):
    today, older = states_of_two_versions()
    save_orbax(tmp_path / "older", older)
    fields = today.loss_scale_state._asdict()
    del fields["total_skipped"]
    restored = restore_orbax(tmp_path / "older", today._replace(loss_scale_state=fields))
    completed = ols.LossScaleState(**restored.loss_scale_state, total_skipped=jnp.int32(1))
    assert_same_bits(restored._replace(loss_scale_state=completed), today)


@pytest.mark.parametrize(("name", "other_way"), [("flax", KeyError), ("orbax", ValueError)])
def test_a_plain_optimizers_file_is_not_taken_for_the_wrappers(name, other_way, tmp_path):
    save, restore = FORMATS[name]
    today, _ = states_of_two_versions()
    save(tmp_path / "plain", today.inner_state)
    with pytest.raises(ValueError, match=r"do not match"):
        restore(tmp_path / "plain", today)
    save(tmp_path / "wrapped", today)
    with pytest.raises(other_way):
        restore(tmp_path / "wrapped", today.inner_state)


def test_what_orbax_restores_without_a_target_is_refused_and_not_trained_with(tmp_path):
    today, _ = states_of_two_versions()
    save_orbax(tmp_path / "today", today)
    with ocp.StandardCheckpointer() as checkpointer:
        raw = checkpointer.restore(tmp_path / "today")
    tx = ols.with_loss_scaling(optax.adam(0.1))
    with pytest.raises(TypeError, match=r"`state` must be a WithLossScalingState, got dict"):
        tx.update({"w": jnp.ones((4, 4))}, raw)
    with pytest.raises(ValueError, match=r"exactly one LossScaleState, got 0 in a dict"):
        ols.scale_loss(jnp.float32(1), raw)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6, 0.99])
@pytest.mark.parametrize(
    ("name", "error"), [("pickle", (pickle.UnpicklingError, EOFError)), ("flax", ValueError)]
)
def test_a_file_that_was_cut_off_is_an_error(name, error, kept, tmp_path):
    save, restore = FORMATS[name]
    today, _ = states_of_two_versions()
    path = tmp_path / "file"
    save(path, today)
    assert_same_bits(restore(path, today), today)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(error):
        restore(path, today)


@pytest.mark.parametrize("damaged", DAMAGED)
def test_an_orbax_checkpoint_that_was_damaged_is_an_error(run, damaged):
    *_, resumed = run
    assert issubclass(resumed[damaged], (ValueError, FileNotFoundError))


def test_no_harm_to_any_file_of_an_orbax_checkpoint_restores_another_state(run):
    """Orbax notices, or it did not need what was harmed: its copies of each process's part."""
    states, _, resumed = run
    outcomes = resumed["harms"]
    noticed = {part for (part, *_), each in outcomes.items() if isinstance(each, type)}
    for outcome in outcomes.values():
        if isinstance(outcome, type):
            assert issubclass(outcome, (ValueError, FileNotFoundError))
        else:
            assert_same_bits(outcome, states[SAVED_AFTER[1]])
    assert {"_METADATA", "d", "manifest.ocdbt"} <= noticed


def test_the_managers_earlier_step_is_there_when_the_latest_is_damaged(run):
    states, _, resumed = run
    latest, outcome, restored = resumed["damaged latest"]
    assert latest == max(SAVED_AFTER)
    assert issubclass(outcome, (ValueError, FileNotFoundError))
    assert_same_bits(restored, states[min(SAVED_AFTER)])


@pytest.mark.parametrize("name", ["pickle", "flax"])
def test_a_flipped_bit_is_an_error_or_changes_a_number_and_nothing_else(name, tmp_path):
    """Neither format has a checksum: what it holds may change, but never the type of the state."""
    save, restore = FORMATS[name]
    today, _ = states_of_two_versions()
    path = tmp_path / "file"
    save(path, today)
    content = path.read_bytes()
    errors = changed = 0
    for i in range(len(content)):
        path.write_bytes(with_one_bit_flipped(content, i / (len(content) - 1)))
        try:
            found = ols.loss_scale_state(restore(path, today))
            after = ols.update(found, True, "dynamic")
        except Exception:  # noqa: BLE001, whatever the library of the format raises
            errors += 1
            continue
        assert [(x.shape, x.dtype) for x in after] == [(x.shape, x.dtype) for x in ols.init()]
        changed += any(
            bits(a).tolist() != bits(b).tolist() for a, b in zip(found, today[0], strict=True)
        )
    assert errors > len(content) / 4
    assert changed > 10  # the bytes of the five fields


DAMAGED_NUMBERS = [
    *[("loss_scale", number) for number in (np.nan, np.inf, -np.inf, 0.0, -1024.0, 3e38)],
    *[(name, -1) for name in ols.LossScaleState._fields[1:]],
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("field", "number"), DAMAGED_NUMBERS)
def test_a_damaged_number_that_no_format_notices_is_found_by_check_health(
    name, field, number, tmp_path
):
    save, restore = FORMATS[name]
    tx = ols.with_loss_scaling(optax.sgd(0.5))
    state = {"opt": tx.init(jnp.ones(2)), "step": jnp.zeros((), jnp.int32)}
    ols.diagnostics.check_health(state)
    fields = state["opt"].loss_scale_state
    damaged = fields._replace(**{field: jnp.asarray(number, getattr(fields, field).dtype)})
    path = tmp_path / "file"
    save(path, state | {"opt": state["opt"]._replace(loss_scale_state=damaged)})
    restored = restore(path, state)
    found = re.escape(f"{number:g}")
    with pytest.raises(ValueError, match=rf"`opt_state` must hold .* got .*{found}\b"):
        ols.diagnostics.check_health(restored)


@pytest.mark.parametrize("damaged", [np.nan, np.inf, -np.inf, 0.0, -1024.0, 1e-45, 1e30])
def test_training_from_a_damaged_factor_applies_true_steps_or_none(damaged):
    policy = ols.DynamicLossScale(2.0**10, growth_interval=2)
    tx = ols.with_loss_scaling(optax.sgd(0.125), policy)
    loss_and_grads = ols.value_and_grad(lambda w: jnp.sum(w * w) / 2)

    @jax.jit
    def step(w, opt_state):
        loss, grads = loss_and_grads(opt_state, w)
        updates, opt_state = tx.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state

    w = jnp.array([1.0, -2.0])
    opt_state = tx.init(w)
    fields = opt_state.loss_scale_state._replace(loss_scale=jnp.asarray(damaged, jnp.float32))
    opt_state = opt_state._replace(loss_scale_state=fields)
    applied = 0
    for _ in range(60):
        before = w
        w, opt_state = step(w, opt_state)
        if int(opt_state.loss_scale_state.consecutive_skipped):
            assert_same_bits(w, before)
        else:
            np.testing.assert_allclose(w, before * 0.875, rtol=1e-6)
            applied += 1
    if np.isnan(damaged) or damaged == np.inf:  # the rule cannot lead out of it
        assert applied == 0
        opt_state = opt_state._replace(
            loss_scale_state=opt_state.loss_scale_state._replace(loss_scale=jnp.float32(1024))
        )
        with pytest.raises(ols.diagnostics.LossScaleStalledError, match="60 steps were skipped"):
            ols.diagnostics.check_health(opt_state)
    else:
        assert applied >= 59


def test_the_comparison_of_bits_sees_a_single_one():
    today, _ = states_of_two_versions()
    other = jax.tree.map(lambda x: x + 0, today)
    assert_same_bits(other, today)
    nudged = np.nextafter(np.float32(today.loss_scale_state.loss_scale), np.float32(0))
    assert not np.array_equal(bits(nudged), bits(today.loss_scale_state.loss_scale))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    resume_all(pathlib.Path(sys.argv[1]))
