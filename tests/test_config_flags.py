"""The settings of JAX and XLA that change what programs mean, each switched on and shown to be on.

Training here is `run`: float16, with steps whose gradients overflow, one whose gradients are NaN
and one whose loss is. Under a setting it must give the bits that it gives without.

| setting | what it must not change, or what it changes |
| --- | --- |
| jax_enable_x64 | the state stays float32 and int32, gradients of float64 stay float64 |
| jax_numpy_dtype_promotion=strict | nothing; all of these tests run under it |
| jax_numpy_rank_promotion=raise | nothing; all of these tests run under it |
| jax_debug_nans, jax_debug_infs | a step that is skipped raises nothing: see below |
| jax_check_tracer_leaks | nothing; no tracer is kept |
| jax_transfer_guard=disallow | a compiled step moves nothing between host and device |
| jax_disable_jit | the same steps are skipped |
| jax_enable_custom_prng | keys are selected whatever they are made of |
| jax_explain_cache_misses | nothing to explain after the first step |
| compilation cache | the same bits from the cache as without |
| jax_use_shardy_partitioner | nothing: no sharding is written in the package but one, by name |
| explicit mesh axes | the same bits, and the state says where it is |
| jax_array_garbage_collection_guard | nothing; no array lies in a reference cycle |
| --xla_allow_excess_precision | which numbers overflow, but never that what overflowed is skipped |
| --xla_cpu_enable_fast_math | nothing: `test_fast_math.py` |

Under jax_debug_nans an eager backward pass raises where it makes the number, and a compiled
function raises if it returns it; the library hides neither. Under the transfer guard eager
functions raise, ours as Optax's: see the tests.

Irrelevant, since the package calls nothing that reads them: jax_default_matmul_precision (it
multiplies no matrices), jax_threefry_partitionable, jax_default_prng_impl, jax_legacy_prng_key and
jax_random_seed_offset (it draws no random numbers and makes no keys), jax_softmax_custom_jvp (it
has no softmax), and what only logs, profiles or starts processes. A test runs with the first three
changed all the same.
"""

import functools
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from plain_where import assert_same_bits

import optax_lossscale as ols

STEPS = 12
OVERFLOWS, NAN_GRADS, NAN_LOSS = (2, 3), 5, 7
POLICY = ols.DynamicLossScale(2.0**8, growth_interval=3)
TX = ols.with_loss_scaling(optax.chain(optax.trace(0.9), optax.sgd(2.0**-6)), POLICY)


def initial():
    params = {"w": jnp.linspace(-1, 1, 16, dtype=jnp.float32).reshape(4, 4), "b": jnp.ones(4)}
    return params, TX.init(params)


def batches():
    """Return inputs and a factor of the loss for each step."""
    x = np.random.default_rng(0).normal(size=(STEPS, 8, 4)).astype(np.float16)
    weight = np.ones(STEPS, np.float32)
    weight[list(OVERFLOWS)] = 1e6  # the gradient is infinite in float16, the loss is not
    x[OVERFLOWS, :] = abs(x[OVERFLOWS, :])  # and no NaN comes of a difference of infinities
    x[NAN_GRADS, 0, 0] = np.inf
    weight[NAN_LOSS] = np.nan
    return list(zip(map(jnp.asarray, x), map(jnp.asarray, weight), strict=True))


def loss_fn(params, x, weight):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = x @ half["w"] + half["b"][None]
    return weight * jnp.mean(jnp.tanh(hidden.astype(jnp.float32) / 8))


def step(params, opt_state, x, weight):
    loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x, weight)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def run(step=None, start=None, data=None):
    """Train, and return the parameters and states after each step."""
    step = step or jax.jit(globals()["step"])
    params, opt_state = start or initial()
    history = []
    for x, weight in data or batches():
        params, opt_state = step(params, opt_state, x, weight)
        history.append((params, opt_state))
    return jax.device_get(history)


def skipped(history):
    """Return which steps were skipped."""
    counts = [int(ols.loss_scale_state(opt_state).total_skipped) for _, opt_state in history]
    return np.flatnonzero(np.diff([0, *counts])).tolist()


BAD = sorted([*OVERFLOWS, NAN_GRADS, NAN_LOSS])


@pytest.fixture(scope="module")
def expected():
    return run()


def test_the_run_skips_what_is_bad_and_moves_both_ways(expected):
    assert skipped(expected) == BAD
    scales = [float(ols.loss_scale_state(opt_state).loss_scale) for _, opt_state in expected]
    assert min(np.diff(scales)) < 0 < max(np.diff(scales))


# -- promotion ----------------------------------------------------------------------------------


def test_promotion_is_strict_in_all_of_these_tests(expected):
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(3, jnp.float16) + jnp.ones(3, jnp.float32)
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones(3) + jnp.ones((2, 3))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_same_bits(run(), expected)


def test_under_x64_the_state_stays_and_double_precision_stays(expected, x64):
    del x64
    assert jnp.asarray(1.0).dtype == jnp.float64
    params, opt_state = initial()
    assert params["b"].dtype == jnp.float64
    history = run()
    assert skipped(history) == BAD
    dtypes = [field.dtype for field in ols.loss_scale_state(history[-1][1])]
    assert dtypes == [np.float32, np.int32, np.int32, np.int32, np.int32]
    assert history[-1][0]["b"].dtype == np.float64
    assert_same_bits(
        [opt_state.loss_scale_state for _, opt_state in history],
        [opt_state.loss_scale_state for _, opt_state in expected],
    )
    grads, _ = ols.unscale_and_check({"w": jnp.full(3, 1 + 2**-40)}, opt_state)
    assert (np.asarray(grads["w"]) == (1 + 2**-40) * 2.0**-8).all()


# -- NaN and infinity as errors -----------------------------------------------------------------

# On the device already: to put NaN there is itself an error under the settings.
BAD_GRADS = {"w": jnp.full((4, 4), np.nan), "b": jnp.full(4, np.inf)}
LOSSES = {
    "none": None,
    "finite": jnp.float32(1),
    "nan": jnp.float32(np.nan),
    "inf": jnp.float32(np.inf),
}
DEBUGGERS = {"nans": (jax.debug_nans, np.nan), "infs": (jax.debug_infs, np.inf)}


@pytest.fixture(params=DEBUGGERS)
def debugger(request):
    """Each of the two settings, shown to be on, with a number that it raises for."""
    setting, number = DEBUGGERS[request.param]
    bad = jnp.float32(number)
    with setting(True):
        with pytest.raises(FloatingPointError):
            jax.jit(lambda x: x * 2)(bad)
        yield bad


def test_a_compiled_step_skips_and_raises_nothing(expected, debugger):
    """Inside a compiled program nothing is looked at, and what comes out of it is finite."""
    del debugger
    with jax.debug_nans(False), jax.debug_infs(False):
        start, data = initial(), batches()
    assert_same_bits(run(start=start, data=data), expected)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("value", LOSSES)
def test_an_update_with_bad_gradients_skips_and_raises_nothing(debugger, transform, value):
    del debugger
    params, opt_state = initial()
    given = {} if value == "none" else {"value": LOSSES[value]}
    update = transform(TX.update)
    updates, after = update(BAD_GRADS, opt_state, params, **given)
    assert int(after.loss_scale_state.consecutive_skipped) == 1
    assert_same_bits(after.inner_state, opt_state.inner_state)
    assert all((np.signbit(u) & (u == 0)).all() for u in map(np.asarray, jax.tree.leaves(updates)))


def test_a_function_that_returns_the_bad_numbers_raises_if_compiled(debugger):
    """`unscale_and_check` does, and by itself it cannot know that its caller will look at the flag.

    Eager it raises nothing: there it switches the setting off for what it computes.
    """
    del debugger
    _, opt_state = initial()
    _, finite = ols.unscale_and_check(BAD_GRADS, opt_state)
    assert not finite
    with pytest.raises(FloatingPointError):
        jax.jit(ols.unscale_and_check)(BAD_GRADS, opt_state)


def test_what_only_looks_raises_nothing(debugger):
    del debugger
    assert not ols.all_finite(BAD_GRADS)
    assert int(ols.diagnostics.nonfinite_report(BAD_GRADS)["['w']"].nan) == 16
    assert int(ols.diagnostics.gradient_exponents(BAD_GRADS).overflow) == 4
    assert not jax.jit(ols.all_finite)(BAD_GRADS)


def test_an_eager_backward_pass_raises_where_it_makes_the_number():
    """The settings are for finding that place; the library does not hide it.

    An overflow is infinity and not NaN, so that `jax_debug_nans` lets it pass until it meets
    another, or a zero. `jax_debug_infs` stops at it.
    """
    with jax.debug_nans(True):
        params, opt_state = initial()
    data = batches()
    with jax.debug_nans(True):
        _, after = step(params, opt_state, *data[OVERFLOWS[0]])
        assert int(after.loss_scale_state.total_skipped) == 1
        with pytest.raises(FloatingPointError, match="nan"):
            step(params, opt_state, *data[NAN_LOSS])
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        step(params, opt_state, *data[OVERFLOWS[0]])


# -- leaks, transfers, compilation --------------------------------------------------------------


def test_no_tracer_is_kept(expected):
    kept = []
    with jax.checking_leaks():
        with pytest.raises(Exception, match="Leaked"):
            jax.jit(lambda x: kept.append(x * 2) or x)(jnp.ones(3))
        kept.clear()
        assert_same_bits(run(), expected)
        assert_same_bits(run(jax.jit(jax.checkpoint(step))), expected)


def test_a_compiled_step_transfers_nothing(expected):
    start, data = initial(), batches()
    compiled, metrics = jax.jit(step), jax.jit(ols.diagnostics.metrics)
    compiled(*start, *data[0])
    metrics(start[1])
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.ones(3) + np.ones(3, np.float32)
        assert_same_bits(run(compiled, start, data), expected)
        metrics(start[1])
        jax.jit(TX.init)(start[0])


def test_eager_functions_transfer_their_constants_as_optax_does():
    """A number in eager code is put on the device when it is met, and the guard forbids that.

    It is so for every function that is not compiled, for Optax's as for ours. Compile what runs
    under the guard.
    """
    params, opt_state = initial()
    inner = optax.adam(0.1)
    inner_state = inner.init(params)
    with jax.transfer_guard("disallow"):
        for eager in (
            lambda: inner.update(params, inner_state),
            lambda: TX.update(params, opt_state),
            ols.init,
            lambda: ols.diagnostics.metrics(opt_state),
        ):
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                eager()


def test_health_can_be_checked_in_a_guarded_loop():
    """It is asked for on the host, so that what it moves there is no accident."""
    _, opt_state = initial()
    with jax.transfer_guard("disallow"):
        ols.diagnostics.check_health(opt_state)


def test_without_compilation_the_same_steps_are_skipped(expected):
    with jax.disable_jit():
        seen = []
        jax.jit(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or x)(jnp.ones(3))
        assert seen == [False]
        history = run()
    for (params, state), (expected_params, expected_state) in zip(history, expected, strict=True):
        assert_same_bits(state.loss_scale_state, expected_state.loss_scale_state)
        for name, array in params.items():
            np.testing.assert_allclose(array, expected_params[name], rtol=1e-2, atol=1e-4)
    assert skipped(history) == BAD


def test_only_the_first_step_is_a_cache_miss(caplog):
    # A function of its own, which no other test has traced.
    compiled, start, data = jax.jit(functools.partial(step)), initial(), batches()
    with jax.explain_cache_misses(True), caplog.at_level("WARNING", "jax"):
        params, opt_state = compiled(*start, *data[0])
        assert "TRACING CACHE MISS" in caplog.text
        caplog.clear()
        run(compiled, (params, opt_state), data[1:])
    assert "CACHE MISS" not in caplog.text


# -- random keys --------------------------------------------------------------------------------


@pytest.mark.integration  # Optax's noise
@pytest.mark.parametrize("custom", [False, True])
def test_keys_are_kept_on_a_skipped_step_whatever_they_are_made_of(custom):
    with jax.enable_custom_prng(custom):
        key, other = jax.random.PRNGKey(0), jax.random.PRNGKey(1)
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key) == custom
        tx = ols.with_loss_scaling(optax.add_noise(1.0, 0.0, 3))
        params = jnp.ones(3)
        state = tx.init(params)
        _, bad = jax.jit(tx.update)(params * jnp.nan, state, params)
        _, good = jax.jit(tx.update)(params, state, params)
        key_of = lambda s: jax.random.key_data(s.inner_state.rng_key)  # noqa: E731
        assert (key_of(bad) == key_of(state)).all()
        assert (key_of(good) != key_of(state)).any()
        for flag in (True, False):
            chosen = ols.tree_where(flag, key, other)
            assert (
                jax.random.key_data(chosen) == jax.random.key_data(key if flag else other)
            ).all()


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.threefry_partitionable(False),
        lambda: jax.default_prng_impl("rbg"),
    ],
    ids=["matmul_precision", "threefry_partitionable", "prng_impl"],
)
def test_what_is_irrelevant_changes_no_bit(expected, setting):
    with setting():
        assert_same_bits(run(), expected)


# -- devices ------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="jax.set_mesh is newer than this JAX")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_explicit_mesh_axes_change_no_bit(expected, kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        everywhere = NamedSharding(mesh, PartitionSpec())
        start, data = jax.device_put((initial(), batches()), everywhere)
        assert jax.typeof(start[0]["w"]).sharding.mesh.axis_types == (kind,)
        compiled = jax.jit(step)
        assert_same_bits(run(compiled, start, data), expected)
        params, opt_state = compiled(*start, *data[0])
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves((params, opt_state)))


# -- what must be set before JAX starts ---------------------------------------------------------

PROLOGUE = """
import sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, {here!r})
import test_config_flags as here
"""

EXCESS = """
def cast_and_back(x):
    return (x.astype(jnp.float16) * jnp.float16(4)).astype(jnp.float32) / 4

# A product in float16 that overflows, unless its precision is excessive.
print(bool(jnp.isinf(jax.jit(cast_and_back)(jnp.float32(3e4)))))
"""

FRESH = {
    "excess precision": ({"XLA_FLAGS": "--xla_allow_excess_precision=true"}, EXCESS, None),
    "no excess precision": ({"XLA_FLAGS": "--xla_allow_excess_precision=false"}, EXCESS, "True"),
    "x64 from the start": (
        {"JAX_ENABLE_X64": "1"},
        "print(jnp.asarray(1.0).dtype)",
        "float64",
    ),
    "no shardy": (
        {"JAX_USE_SHARDY_PARTITIONER": "0"},
        """
mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
text = jax.jit(lambda x: x * 2, in_shardings=spread).lower(jnp.ones(4)).as_text()
print("sdy" in text)
""",
        "False",
    ),
    "garbage guard": (
        {"JAX_ARRAY_GARBAGE_COLLECTION_GUARD": "log"},
        "print(jax.config.jax_array_garbage_collection_guard)",
        "log",
    ),
}

# The others compile other programs.
SAME_BITS = ("excess precision", "no shardy", "garbage guard")


def start_fresh(environment, code, *arguments):
    """Run code in a new process, with training in `here`."""
    script = PROLOGUE.format(here=os.path.dirname(__file__)) + code  # noqa: PTH120
    process = subprocess.run(  # noqa: S603, the interpreter and our own code
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process


def fresh_run(environment, code, folder):
    """Train in a new process; return what it printed and its history."""
    path = folder / "history.pickle"
    save = """
import pickle
with open(sys.argv[1], "wb") as file:
    pickle.dump(here.run(), file)
"""
    printed = start_fresh(environment, code + save, path).stdout.strip()
    return printed, pickle.loads(path.read_bytes())  # noqa: S301, written by this test


@pytest.mark.parametrize("name", FRESH)
def test_a_process_with_the_setting_skips_the_same_steps(name, expected, tmp_path):
    environment, code, proof = FRESH[name]
    printed, history = fresh_run(environment, code, tmp_path)
    assert proof is None or printed == proof
    assert skipped(history) == BAD
    states, expected_states = (
        [ols.loss_scale_state(opt_state) for _, opt_state in each] for each in (history, expected)
    )
    assert_same_bits(states, expected_states)
    if name in SAME_BITS:
        assert_same_bits(history, expected)


def test_excess_precision_decides_what_overflows_and_never_what_is_skipped():
    """Whichever it is, a step is skipped if and only if what it would apply is not finite."""
    code = """
import optax_lossscale as ols
rng = np.random.default_rng(0)
x = jnp.asarray(rng.uniform(1e4, 6e4, (400, 3)), jnp.float32)

@jax.jit
def step(x, four):
    grads = (x.astype(jnp.float16) * four).astype(jnp.float32)
    unscaled, finite = ols.unscale_and_check(grads, ols.init(8.0))
    return jnp.isfinite(unscaled).all(), finite

flags = np.array([step(row, jnp.float16(4)) for row in x])
assert (flags[:, 0] == flags[:, 1]).all()
print(int((~flags[:, 1]).sum()))
"""
    overflows = [
        int(start_fresh({"XLA_FLAGS": f"--xla_allow_excess_precision={flag}"}, code).stdout)
        for flag in ("true", "false")
    ]
    assert overflows[0] <= overflows[1]
    assert 0 < overflows[1] <= 400


def test_a_program_from_the_compilation_cache_gives_the_same_bits(expected, tmp_path):
    cache = tmp_path / "cache"
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    _, first = fresh_run(environment, "", tmp_path)
    entries = {path.name for path in cache.iterdir() if path.name.endswith("-cache")}
    assert any("jit_step" in name for name in entries)
    _, second = fresh_run(environment, "", tmp_path)
    assert {path.name for path in cache.iterdir() if path.name.endswith("-cache")} == entries
    assert_same_bits(first, expected)
    assert_same_bits(second, expected)


def test_no_array_lies_in_a_reference_cycle():
    """What the guard logs when the garbage collector meets an array."""
    code = """
import gc
class Cycle:
    def __init__(self):
        self.me, self.array = self, jnp.ones(3)

def collected():
    gc.collect()
    sys.stderr.flush()

print("before", file=sys.stderr, flush=True)
history = here.run()
for _ in range(3):
    here.TX.update(*here.initial())
    here.ols.diagnostics.metrics(here.initial()[1])
del history
collected()
print("after", file=sys.stderr, flush=True)
Cycle()
collected()
"""
    process = start_fresh({"JAX_ARRAY_GARBAGE_COLLECTION_GUARD": "log"}, code)
    ours, proof = process.stderr.split("before", 1)[1].split("after", 1)
    assert "garbage collector" in proof
    assert "garbage collector" not in ours
