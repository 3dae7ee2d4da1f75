"""The state in two bytes: rounded to a neighbour, unbiased, by bits that depend on nothing else."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from arrays import ones, shape
from checkpoint_formats import FORMATS
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS, tiers
from plain_where import assert_same_bits, types

import optax_lossscale as ols
from optax_lossscale import diagnostics

pytestmark = pytest.mark.integration

LEAST = 4096
PARAMS = ones({"w": shape(64, 64), "b": shape(64)})
BF16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
# An optimizer whose state is the gradients that it is given, so that any numbers can be rounded.
STORE = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads)
)
ADAM, STORING = ols.with_bfloat16_state(optax.adam(0.1)), ols.with_bfloat16_state(STORE)
store = jax.jit(lambda grads, state: STORING.update(grads, state)[1])


def stored(grads, *, steps=1):
    """Return what is stored of gradients in the last of some steps."""
    state = STORING.init(grads)
    for _ in range(steps):
        state = store(grads, state)
    return state.inner_state


def words(array):
    return np.asarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def rounds_up(word, like, **kwargs):
    """Return where the float32 of a word, in arrays like these, is stored as the upper one."""
    given = optax.tree.full_like(like, np.uint32(word).view(np.float32))
    return jax.tree.map(lambda a: words(a) != word >> 16, stored(given, **kwargs))


@pytest.mark.slow
def test_a_number_is_stored_as_one_of_its_two_neighbours_and_special_numbers_exactly():
    random = np.random.default_rng(0).integers(2**32, size=2**21).astype(np.uint32)
    special = [2.0**-126, float(jnp.finfo(BF16).max), float(jnp.finfo(FLOAT32).max), np.inf]
    quiet_and_other_nans = np.array([0x7F800001, 0x7F8FFFFF, 0x7FC00000, 0x7FFFFFFF], np.uint32)
    given = np.r_[random, np.float32(special).view(np.uint32), 0, quiet_and_other_nans]
    given = np.r_[given, given | 2**31].astype(np.uint32)
    x = given.view(np.float32)
    found = words(stored(jnp.asarray(x)))
    is_nan = np.isnan(x)
    assert np.isnan(found[is_nan].view(BF16).astype(np.float32)).all()
    is_normal = ~is_nan & ((np.abs(x) >= 2.0**-126) | (x == 0))
    below, is_exact = (given >> 16).astype(np.uint16), (given & 0xFFFF) == 0
    is_below, is_above = found == below, found == below + 1
    beyond = np.isfinite(x) & (np.abs(x) >= float(jnp.finfo(BF16).max))
    assert (is_below | (is_above & ~is_exact & ~beyond))[is_normal].all()
    assert 0.4 < is_above[is_normal].mean() < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.9])
def test_the_expectation_is_the_number_at_every_exponent(share):
    exponents = np.arange(-103, 128)
    lower = int(share * 2**16)
    word = (exponents + 127 << 23) + lower + (0x7E << 16)  # of the last, close to the largest
    n = 2**14
    found = stored(jnp.asarray(np.repeat(word, n).astype(np.uint32).view(np.float32)))
    ups = words(found).reshape(-1, n) == (word >> 16)[:, None] + 1
    z = (ups.mean(1) - lower / 2**16) / np.sqrt(share * (1 - share) / n)
    assert np.abs(z).max() < 4.5
    assert np.abs(z.mean()) < 4.5 / np.sqrt(len(z))


@pytest.mark.slow
def test_the_bits_are_uniform_and_independent_across_steps_arrays_and_elements():
    n, arrays, shape = 2**20, 3, (1024, 1024)
    rising = np.arange(1, 64) * 2**10
    ups = [rounds_up(0x3F800000 + int(lower), jnp.zeros(shape)).mean() for lower in rising]
    counts = n * np.diff([0, *ups, 1])
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 140  # of chi-square with 63 degrees: 1e-7
    ups = [rounds_up(0x3F808000, [jnp.zeros(shape)] * arrays, steps=steps) for steps in (1, 2, 3)]
    signs = np.where(np.reshape(ups, (-1, n)), np.float32(1), np.float32(-1))
    for shift in (0, 1, 2, 3, 32, 1024, 4096):  # of neighbours, rows, and a few more
        correlations = signs[:, shift:] @ signs[:, : n - shift].T / n
        if shift == 0:
            correlations -= np.eye(len(signs))
        assert np.abs(correlations).max() < 5 / np.sqrt(n)


def test_arrays_of_4096_elements_are_stored_in_two_bytes_unless_kept():
    params = {"a": jnp.ones(LEAST), "b": jnp.ones(LEAST - 1), "norm": jnp.ones((LEAST, 1))}
    params |= {"f16": jnp.ones(LEAST, jnp.float16), "n": jnp.ones(LEAST, jnp.int32)}
    state = ols.with_bfloat16_state(STORE, keep=lambda path: "norm" in path).init(params)
    dtypes = {name: str(array.dtype) for name, array in state.inner_state.items()}
    expected = {"a": "bfloat16", "b": "float32", "norm": "float32", "f16": "float16", "n": "int32"}
    assert dtypes == expected
    assert types(state.rounding_count) == ((), jnp.uint32)


NNX = nnx.State(jax.tree.map(nnx.Param, PARAMS))


@pytest.mark.parametrize(
    "params", [PARAMS, FrozenDict(PARAMS), NNX], ids=["dict", "FrozenDict", "nnx"]
)
def test_a_path_is_the_same_in_every_container(params):
    seen = []
    tx = ols.with_bfloat16_state(optax.adam(0.1), keep=lambda path: seen.append(path) or True)
    tx.init(params)
    assert seen == ["[0].mu['w']", "[0].nu['w']"]


def test_keep_that_names_nothing_is_warned_of():
    tx = ols.with_bfloat16_state(optax.adam(0.1), keep=lambda path: "norm" in path)
    with pytest.warns(UserWarning, match=r"`keep` names none .*\[0\]\.mu\['w'\], \[0\]\.nu"):
        tx.init(PARAMS)
    tx.init({"small": jnp.ones(3)})  # nothing to name


# A part of the paths of the large arrays that stay in float32.
STAY = {
    "contrib.cocob": ".init_particles",
    **dict.fromkeys(("contrib.dog", "contrib.dowg"), ".init_params"),
    **dict.fromkeys(("contrib.madgrad", "contrib.mechanize"), ".x0"),
    "contrib.prodigy": ".params0",
    "contrib.sam": ".cache",
    "contrib.schedule_free": ".z",
    "contrib.schedule_free_adamw": ".z",
    "contrib.schedule_free_sgd": ".z",
    **dict.fromkeys(("lbfgs", "lbfgs: backtracking", "lbfgs: learning rate"), ""),  # all
    # Their two moments.
    **dict.fromkeys(("rmsprop: centered", "rmsprop: centered, corrected"), "u['w']"),
}

# One for each way to find them, and two without any.
KINDS = [
    *("contrib.dog", "contrib.mechanize", "contrib.schedule_free_adamw"),
    *("lbfgs", "lbfgs: backtracking", "adamw", "lion"),
]


@pytest.mark.parametrize("name", tiers(KINDS))
def test_any_optimizer_keeps_its_kinds_of_arrays_and_copies_of_parameters_in_float32(name):
    optimizer = OPTIMIZERS[name]
    small = optimizer.params()
    has_matrix = any(a.ndim == 2 for a in jax.tree.leaves(small))
    if name == "contrib.split_real_and_imaginary" or not has_matrix:
        pytest.skip("it has no float32 matrix")
    tx = ols.with_bfloat16_state(optimizer.make())
    params = jax.tree.map(lambda p: jnp.tile(p, (64, 32)) if p.ndim == 2 else p, small)
    before = tx.init(params)

    @jax.jit
    def stepped(params):
        grads = optimizer.grads(params, 0)
        extra = optimizer.extra_args(0, value=1.0, grad=grads)
        return tx.update(grads, tx.init(params), params, **extra)[1]

    assert types(stepped(params)) == types(before)
    plain = jax.tree_util.tree_leaves_with_path(optimizer.plain().init(params))
    large = [
        (jax.tree_util.keystr(path), array.dtype)
        for (path, single), array in zip(plain, jax.tree.leaves(before.inner_state), strict=True)
        if single.dtype == FLOAT32 and single.size >= LEAST
    ]
    kept = {path for path, dtype in large if dtype == FLOAT32}
    assert kept == {path for path, _ in large if STAY.get(name, "nothing") in path}
    assert bool(kept) == (name in STAY)


def test_arrays_that_the_optimizer_itself_keeps_in_bfloat16_are_widened_for_it():
    seen = []

    def update(grads, state, _):
        seen.append(state.dtype)
        return grads, 0.999 * state  # bfloat16 would lose the change

    inner = optax.GradientTransformation(lambda p: jnp.ones(p.shape, BF16), update)
    tx = ols.with_bfloat16_state(inner)
    state = jax.jit(tx.update)(None, tx.init(jnp.ones(64)))[1].inner_state
    assert (seen, state.dtype) == ([FLOAT32], BF16)
    assert 0 < jnp.sum(state != 1) < 64


@pytest.mark.parametrize("remainders", [False, True])
def test_init_of_guards_and_masters_accepts_shapes(remainders):
    def fresh(param):
        is_shape = isinstance(param, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(param.shape, param.dtype) if is_shape else jnp.zeros_like(param)

    params = {"w": jnp.ones((64, 64)), "h": jnp.ones((64, 64), BF16)}
    params |= {"f": jnp.ones((64, 64), jnp.float16)}
    copy = optax.GradientTransformation(lambda params: params, STORE.update)
    moment = optax.GradientTransformation(lambda p: jax.tree.map(fresh, p), STORE.update)
    inner = ols.with_bfloat16_state(optax.chain(moment, copy))
    init = ols.with_skipping(
        ols.with_master_weights(inner, remainders=remainders), ols.Spike()
    ).init
    found = init(jax.eval_shape(lambda: params))
    assert types(found) == types(jax.eval_shape(init, params)) == types(init(params))
    moments, copies = found.inner_state.inner_state.inner_state
    assert {a.dtype for a in jax.tree.leaves(moments)} == {BF16}
    assert {a.dtype for a in jax.tree.leaves(copies)} == {FLOAT32}


def after(tx, params):
    """Return the state after two steps."""
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(jax.tree.map(lambda p: p / 3, params), state, params)
    return state


@pytest.mark.parametrize(
    ("spec", "axis_type"),
    [(P("x"), AxisType.Auto), (P("x", "y"), AxisType.Explicit), (P(None, "y"), AxisType.Auto)],
    ids=str,
)
def test_the_bits_do_not_depend_on_the_sharding(spec, axis_type):
    mesh = jax.make_mesh((2, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices()[:4])
    plain = jnp.ones((64, 128))
    params = jax.device_put(plain, NamedSharding(mesh, spec))
    tx = ols.with_bfloat16_state(optax.trace(0.9))
    state = after(tx, params)
    assert state.inner_state.trace.sharding.is_equivalent_to(params.sharding, 2)
    assert_same_bits(jax.device_get(state), jax.device_get(after(tx, plain)))


@pytest.mark.slow
def test_steps_are_the_same_one_by_one_in_scan_and_after_a_restart(tmp_path):
    tx = ols.with_loss_scaling(ols.with_bfloat16_state(optax.sgd(0.1, momentum=0.9)), 8.0)
    grads = jax.random.normal(jax.random.key(0), (4, 64, 64))
    update = jax.jit(tx.update)
    state = start = tx.init(grads[0])
    for i, grad in enumerate(grads):
        _, state = update(grad, state, grad)
        if i == 1:
            for name, (save, restore) in FORMATS.items():
                save(tmp_path / name, state)
                assert_same_bits(restored := restore(tmp_path / name, state), state)
                state = restored
    scanned, _ = jax.lax.scan(lambda s, g: (tx.update(g, s, g)[1], None), start, grads)
    assert_same_bits(state, scanned)
    assert int(state.inner_state.rounding_count) == 4


def test_a_skipped_step_leaves_state_and_count():
    tx = ols.with_loss_scaling(ADAM, 8.0)
    state = after(tx, PARAMS)
    grads = jax.tree.map(lambda p: p.at[0].set(jnp.inf), PARAMS)
    _, skipped = jax.jit(tx.update)(grads, state, PARAMS)
    assert_same_bits(skipped.inner_state, state.inner_state)
    bad = state.inner_state.inner_state[0].nu["w"].at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match=r"nu\['w'\]"):
        diagnostics.check_health(optax.tree.set(state, nu=PARAMS | {"w": bad}))


@pytest.mark.parametrize(
    ("guard", "check_vma"), [(None, True), (None, False), (ols.with_loss_scaling, True)]
)
def test_a_state_made_outside_is_updated_inside_of_shard_map(guard, check_vma):
    # A shard is smaller than what init leaves in float32.
    mesh = jax.make_mesh((4,), ("i",), (AxisType.Auto,), devices=jax.devices()[:4])
    tx = guard(STORING, 1, axis_name="i") if guard else STORING
    params = jnp.full((64, 64), 1 + 2.0**-8)  # halfway between two neighbours
    state = tx.init(params)
    specs = jax.tree.map(lambda a: P("i") if a.ndim else P(), state)
    step = jax.shard_map(
        lambda params, state: tx.update(params, state, params)[1],
        mesh=mesh,
        in_specs=(P("i"), specs),
        out_specs=specs,
        check_vma=check_vma,
    )
    found = jax.jit(step)(params, state)
    assert types(found) == types(state)
    stored = found.inner_state.inner_state if guard else found.inner_state
    values, counts = np.unique(np.float32(stored), return_counts=True)
    assert values.tolist() == [1, 1 + 2.0**-7]
    assert counts.min() > 1500


@pytest.mark.parametrize("guard", [None, ols.with_loss_scaling])
def test_a_state_made_outside_is_updated_inside_of_vmap(guard):
    tx = guard(STORING, 1, axis_name="i") if guard else STORING
    params = jnp.full((4, LEAST), 1 / 3)
    state = jax.vmap(tx.init)(params)
    stepped = jax.jit(jax.vmap(tx.update, axis_name="i"))(params, state)[1]
    assert types(stepped) == types(state)
    if guard is None:
        alone = store(params[0], tx.init(params[0]))
        assert_same_bits(jax.tree.map(lambda a: a[2], stepped), alone)


def test_a_step_is_exported_and_reported():
    params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    leaves, treedef = jax.tree.flatten(jax.eval_shape(ADAM.init, params))

    def step(grads, leaves):
        return jax.tree.leaves(ADAM.update(grads, treedef.unflatten(leaves), grads))

    exported = jax.export.export(jax.jit(step))(params, leaves)
    grads = jnp.full((64, 64), 0.3)
    start = jax.tree.leaves(ADAM.init(grads))
    assert_same_bits(exported.call(grads, start), jax.jit(step)(grads, start))
    product = lambda w, s: jnp.sum(w @ w) + jnp.sum(ADAM.update(w, s, w)[0])  # noqa: E731
    assert list(diagnostics.precision_report(product, grads, ADAM.init(grads))) == ["float32"]


# -- what stays in float32: differences of near-equal arrays

COPIES = {
    "prodigy": optax.contrib.prodigy(),
    "dog": optax.contrib.dog(),
    "cocob": optax.contrib.cocob(),
    "mechanize": optax.contrib.mechanize(optax.sgd(1e-2)),
    "schedule_free": optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2),
    "none: adam": optax.adam(1e-2),
    "none: ema": optax.ema(0.9),
}
AROUND = {
    "alone": lambda inner: inner,
    "flatten": optax.flatten,
    "jit": lambda inner: optax.GradientTransformationExtraArgs(jax.jit(inner.init), inner.update),
    "masked": lambda inner: optax.masked(inner, {"w": True, "b": False}),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, 2),
    "inject_hyperparams": lambda inner: optax.inject_hyperparams(lambda _rate: inner)(0.1),
}


def large(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): x.dtype for path, x in leaves if getattr(x, "size", 0) >= LEAST
    }


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_parameters_are_found_by_tracing_init(name, around):
    tx = ols.with_bfloat16_state(AROUND[around](COPIES[name]))
    init = tx.init
    for state in init(PARAMS), jax.jit(init)(PARAMS), jax.eval_shape(init, PARAMS):
        kept = [path for path, dtype in large(state).items() if dtype == FLOAT32]
        assert len(kept) == (0 if "none" in name else 1), large(state)


def test_every_way_to_copy_a_parameter_is_found_and_what_is_computed_is_no_copy():
    def init(params):
        w, v = params
        return {
            "jnp.copy": jnp.copy(w),
            "device_put": jax.device_put(w),
            "cast": v.astype(jnp.float32),
            "stopped": jax.lax.stop_gradient(w),
            "two": jnp.concatenate([w, w]),
            "a function": jax.jit(lambda w: (w * 2, w))(w)[1],
            "not: half": jnp.concatenate([w, jnp.ones_like(w)]),
            "not: computed": jnp.abs(w),
            "not: a function": jax.jit(lambda w: (w * 2, w))(w)[0],
            "not: a random number": jax.random.normal(jax.random.key(0), w.shape),
        }

    inner = optax.GradientTransformation(init, optax.identity().update)
    params = jnp.ones(LEAST), jnp.ones(LEAST, BF16)
    dtypes = large(ols.with_bfloat16_state(inner).init(params).inner_state)
    assert dtypes == {name: BF16 if "not" in name else FLOAT32 for name in dtypes}
    assert len(dtypes) == 10


def test_copies_are_found_under_vmap_and_sizes_may_be_symbolic():
    inner = COPIES["prodigy"]
    stacked = {"w": jnp.ones((3, 64, 64))}
    state = jax.vmap(ols.with_bfloat16_state(inner).init)(stacked)
    assert state.inner_state.params0["w"].dtype == FLOAT32
    assert state.inner_state.exp_avg["w"].dtype == BF16
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 64"), jnp.float32)
    leaves = lambda w: jax.tree.leaves(ols.with_bfloat16_state(inner).init({"w": w}))  # noqa: E731
    exported = jax.export.export(jax.jit(leaves))(shape)
    kinds = [aval.dtype.name for aval in exported.out_avals if aval.shape]
    assert sorted(kinds) == ["bfloat16"] * 3 + ["float32"]


def train(tx, extra, *, steps=2000):
    """Train with gradients whose mean is large beside their deviation."""
    target = jax.random.normal(jax.random.key(0), (64, 64))

    def step(carry, key):
        params, state = carry

        def loss_fn(params):
            noise = 0.005 * jax.random.normal(key, target.shape)
            return jnp.sum((0.5e-4 * (params["w"] - target) + 5 + noise) * params["w"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        functions = {"value_fn": loss_fn, "obj_fn": loss_fn}
        functions["grad_fn"] = lambda params, _: jax.grad(loss_fn)(params)
        given = {"value": loss, "grad": grads} | functions
        given = {name: arg for name, arg in given.items() if name in extra}
        updates, state = tx.update(grads, state, params, **given)
        return (optax.apply_updates(params, updates), state), None

    params = {"w": jnp.zeros((64, 64))}
    keys = jax.random.split(jax.random.key(1), steps)
    with jax.numpy_rank_promotion("allow"):  # some optimizers need it
        carry = params, tx.init(params)
        return jax.jit(lambda carry: jax.lax.scan(step, carry, keys)[0])(carry)


# An optimizer of the table has other parameters, or needs them as they are there.
OF_OTHER_PARAMETERS = {"freeze", "selective_transform", "lookahead", "lookahead: reset_state"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name == "rmsprop: centered" else pytest.mark.exhaustive
        )
        for name in sorted(OPTIMIZERS.keys() - OF_OTHER_PARAMETERS)
    ],
)
def test_a_state_in_bfloat16_gives_nan_only_if_float32_does(name):
    problem = OPTIMIZERS[name]
    inner = problem.plain()
    if not ols.all_finite(train(inner, problem.extra)):
        pytest.skip("it diverges in float32")
    assert ols.all_finite(train(ols.with_bfloat16_state(inner), problem.extra))


@pytest.mark.parametrize("bias_correction", [False, True])
def test_moments_that_are_subtracted_from_one_another_stay_in_float32(bias_correction):
    options = {"centered": True, "momentum": 0.9, "bias_correction": bias_correction}
    centered = ols.with_bfloat16_state(optax.rmsprop(1e-4, eps=1e-4, **options))
    dtypes = large(centered.init(PARAMS)).values()
    assert sorted(map(str, dtypes)) == ["bfloat16", "float32", "float32"]
    params, _ = train(centered, (), steps=300)
    assert ols.all_finite(params)


def test_an_init_that_cannot_be_traced_works_and_its_copies_are_found_by_identity():
    def init(params):
        assert float(params["w"][0, 0]) == 1  # reads a value
        return {"copy": params["w"], "moment": jnp.asarray(np.zeros((64, 64), np.float32))}

    inner = optax.GradientTransformation(init, lambda grads, state, _params=None: (grads, state))
    tx = ols.with_bfloat16_state(inner)
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    opt_state = tx.init(params)
    dtypes = {name: leaf.dtype for name, leaf in opt_state.inner_state.items()}
    assert dtypes == {"copy": jnp.float32, "moment": jnp.bfloat16}
    _, after = tx.update(params, opt_state, params)
    assert types(after) == types(opt_state)


def test_the_error_for_a_wrapper_inside_says_what_to_write():
    for inner, remedy in (
        (
            ols.with_master_weights(optax.adam(0.1)),
            "with_master_weights(with_bfloat16_state(inner))",
        ),
        (ADAM, "with_bfloat16_state(inner)"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"Write `{remedy}`.")):
            ols.with_bfloat16_state(inner).init(jnp.ones(2))


def test_numbers_and_text_in_a_state_stay():
    given = (0.5, 2, "adam", jnp.ones(4096))
    inner = optax.GradientTransformation(
        lambda _: given, lambda grads, state, _=None: (grads, state)
    )
    tx = ols.with_bfloat16_state(inner)
    state = tx.init(jnp.ones(4096))
    assert state.inner_state[:3] == given[:3]
    assert state.inner_state[3].dtype == jnp.bfloat16
    _, state = tx.update(jnp.ones(4096), state)
    assert state.inner_state[:3] == given[:3]
