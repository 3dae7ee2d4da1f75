"""Parameters rounded stochastically: to a neighbor, unbiased, by bits of their own."""

import contextlib
import functools
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from checkpoint_formats import FORMATS
from compiled import compiled_step, nbytes
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits, types

import optax_lossscale as ols

pytestmark = pytest.mark.integration

BF16 = jnp.dtype("bfloat16")
# An update that is given as the gradients.
MOVE = optax.GradientTransformation(lambda _: (), lambda grads, *_: (grads, ()))
MOVING = ols.with_stochastic_rounding(MOVE)
ROUNDED, CLIP = ols.with_stochastic_rounding(optax.sgd(0.1)), optax.clip(1.0)
HALFWAY = 2.0**-8  # from 1 to the next bfloat16 number


def step(tx, params, state, grads, **extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def moved(params, grads, tx=MOVING):
    return jax.jit(lambda p, g: step(tx, p, tx.init(p), g)[0])(params, grads)


def words(array):
    return np.asarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


@pytest.mark.parametrize("compiled", [True, False])
def test_a_parameter_becomes_one_of_its_two_neighbors(compiled):
    # Close numbers, sums that cancel, and any two numbers.
    n = 2**14
    random = np.random.default_rng(0)
    start = random.integers(2**14, 2**15 - 256, size=n).astype(np.uint16)  # from 2.0 to 2**127
    start = np.where(random.random(n) < 0.5, start, start | 2**15).astype(np.uint16).view(BF16)
    wide = start.astype(np.float32) * np.float32(2.0**-64)
    start = wide.astype(BF16)
    near = wide * random.uniform(-0.02, 0.02, n).astype(np.float32)
    other = random.permutation(wide)
    for move in (near, -wide * random.uniform(0.9, 1.1, n).astype(np.float32), other):
        with contextlib.nullcontext() if compiled else jax.disable_jit():
            new = np.asarray(jnp.asarray(wide) + jnp.asarray(move))
            found = np.asarray(moved(jnp.asarray(start), jnp.asarray(move)))
        below = (words(new) >> 16).astype(np.uint16)
        is_exact = (words(new) & 0xFFFF) == 0
        is_neighbor = (words(found) == below) | ((words(found) == below + 1) & ~is_exact)
        assert is_neighbor.all()
        assert is_exact.all() or 0.3 < (words(found) != below)[~is_exact].mean() < 0.7


def test_the_expectation_is_the_float32_weight():
    n = 2**16
    for share in (0.25, 0.5, 0.9):
        found = moved(jnp.ones(n, BF16), jnp.full(n, share * 2 * HALFWAY))
        up = np.mean(np.float32(found) > 1)
        assert set(np.unique(np.float32(found))) == {1, 1 + 2 * HALFWAY}
        assert abs(up - share) < 5 * np.sqrt(share * (1 - share) / n)


@pytest.mark.parametrize("nothing", [0.0, -0.0])
def test_a_weight_that_does_not_change_keeps_its_bits_and_nan_and_infinity_pass(nothing):
    every = jnp.asarray(np.arange(2**16).astype(np.uint16).view(BF16))
    found = moved(every, jnp.full(every.shape, nothing, jnp.float32))
    is_subnormal = (words(every) & 0x7FFF < 0x80) & (words(every) & 0x7FFF > 0)
    is_nan = np.isnan(np.float32(every))
    keeps = ~is_subnormal & ~is_nan
    np.testing.assert_array_equal(words(found)[keeps], words(every)[keeps])
    assert np.isnan(np.float32(found)[is_nan]).all()
    given = jnp.asarray([1, 1, 1, np.inf, -np.inf, np.nan], BF16)
    moves = jnp.asarray([np.inf, -np.inf, np.nan, 1, np.inf, 1], jnp.float32)
    expected = [np.inf, -np.inf, np.nan, np.inf, -np.inf, np.nan]
    np.testing.assert_array_equal(np.float32(moved(given, moves)), expected)


def test_zero_is_reached_with_the_sign_of_the_sum():
    given = jnp.asarray([1, -1, 0.0, -0.0, -0.0], BF16)
    moves = jnp.asarray([-1, 1, -0.0, -0.0, 0.5], jnp.float32)
    assert_same_bits(moved(given, moves), jnp.asarray([0.0, 0.0, 0.0, -0.0, 0.5], BF16))


@pytest.mark.slow
def test_parameters_in_float32_are_updated_by_the_inner_optimizer_unchanged():
    params = {"w": jnp.ones(3), "none": None, "masked": optax.MaskedNode(), "n": jnp.float32(2)}
    inner = optax.adamw(0.1)
    tx = ols.with_stochastic_rounding(inner)
    found, state = step(tx, params, tx.init(params), params)
    expected, inner_state = step(inner, params, inner.init(params), params)
    assert_same_bits((found, state.inner_state), (expected, inner_state))
    assert (types(state.rounding_count), int(state.rounding_count)) == (((), jnp.uint32), 1)


def test_the_inner_optimizer_sees_float32():
    seen = []

    def update(grads, state, params, *, value):
        del value
        seen.extend((grads["w"].dtype, params["w"].dtype))
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda p: seen.append(p["w"].dtype) or (), update)
    params = {"w": jnp.ones(3, BF16)}
    tx = ols.with_stochastic_rounding(inner)
    tx.update(params, tx.init(params), params, value=1.0)
    tx.init(jax.eval_shape(lambda: params))
    assert set(seen) == {jnp.dtype("float32")}


# -- which random bits

SHAPE = (64, 64)


def signs(array):
    return np.where(np.float32(array) > 1, 1, -1).reshape(-1)


def rounds_up(params, tx=MOVING):
    """Return which elements of parameters that are one round up from halfway."""
    grads = jax.tree.map(lambda p: jnp.full(p.shape, HALFWAY, jnp.float32), params)
    return [signs(x) for x in jax.tree.leaves(moved(params, grads, tx))]


def assert_independent(*signs):
    n = signs[0].size
    correlations = np.array(signs) @ np.array(signs).T / n - np.eye(len(signs))
    assert np.abs(correlations).max() < 5 / np.sqrt(n)


def test_parameters_steps_and_an_inner_state_use_independent_bits():
    params = {"a": jnp.ones(SHAPE, BF16), "b": jnp.ones(SHAPE, BF16)}
    halfway = jax.tree.map(lambda p: jnp.full(p.shape, HALFWAY, jnp.float32), params)
    keep = optax.GradientTransformation(  # stores what is halfway, too
        lambda p: jax.tree.map(jnp.zeros_like, p),
        lambda grads, *_: (grads, jax.tree.map(lambda g: 1 + g, grads)),
    )
    tx = ols.with_stochastic_rounding(ols.with_bfloat16_state(keep))
    state, found = tx.init(params), []
    for _ in range(2):
        rounded, state = jax.jit(lambda state: step(tx, params, state, halfway))(state)
        found += [signs(x) for x in jax.tree.leaves((rounded, state.inner_state.inner_state))]
    assert_independent(*found)


@pytest.mark.parametrize("wrap", [ols.with_stochastic_rounding, ols.with_bfloat16_state])
def test_two_wrappers_in_a_partition_use_independent_bits(wrap):
    dtype = BF16 if wrap is ols.with_stochastic_rounding else jnp.float32
    params = {"a": jnp.ones(SHAPE, dtype), "b": jnp.ones(SHAPE, dtype)}
    halfway = jax.tree.map(lambda p: jnp.full(p.shape, HALFWAY, jnp.float32), params)
    inner = optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, p),
        lambda grads, *_: (grads, jax.tree.map(lambda g: 1 + g, grads)),
    )
    tx = optax.partition({"a": wrap(inner), "b": wrap(inner)}, {"a": "a", "b": "b"})
    found = jax.jit(lambda: step(tx, params, tx.init(params), halfway))()
    halves = [x for x in jax.tree.leaves(found) if x.dtype == BF16]
    assert len(halves) == 2
    assert_independent(*map(signs, halves))


class Model(nnx.Module):
    def __init__(self, params):
        for name, x in params.items():
            setattr(self, name, nnx.Param(x))


def test_the_bits_are_the_same_in_every_container():
    params = {"a": jnp.ones(SHAPE, BF16), "b": jnp.ones(SHAPE, BF16)}
    expected = rounds_up(params)
    variables = nnx.State(jax.tree.map(nnx.Param, params))
    for given in (FrozenDict(params), variables, nnx.state(Model(params))):
        np.testing.assert_array_equal(rounds_up(given), expected)
    # An array in a Variable that holds several has bits of its own.
    several = rounds_up(nnx.State({"both": nnx.Param(params)}))
    np.testing.assert_array_equal(several, rounds_up({"both": params}))
    assert_independent(*several)


@pytest.mark.slow
def test_the_bits_are_the_same_in_another_process(capsys):
    program = textwrap.dedent("""
        import jax, jax.numpy as jnp, optax, optax_lossscale as ols
        tx = ols.with_stochastic_rounding(ols.with_bfloat16_state(optax.sgd(2.0**-8, momentum=0.9)))

        @jax.jit
        def train():
            params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
            state = tx.init(params)
            for _ in range(2):
                updates, state = tx.update({"w": jnp.full((64, 64), 1 / 3)}, state, params)
                params = optax.apply_updates(params, updates)
            return params["w"], state.inner_state.inner_state[0].trace["w"]

        halves = [a.view("uint16").ravel() for a in train()]
        print(*(sum(int(x) * i for i, x in enumerate(words)) for words in halves))
    """)
    exec(program, {})  # noqa: S102, our own program
    command = [sys.executable, "-c", program]
    options = {"capture_output": True, "text": True, "timeout": 240}
    other = subprocess.run(command, check=True, **options)  # noqa: S603, our own program
    assert other.stdout == capsys.readouterr().out
    assert len(other.stdout.split()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_bits_do_not_depend_on_the_sharding(axis_type):
    mesh = jax.make_mesh((2, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices()[:4])
    plain = jnp.ones(SHAPE, BF16)
    for spec in (P("x"), P("x", "y"), P(None, "y")):
        params = jax.device_put(plain, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(rounds_up(params), rounds_up(plain))


@pytest.mark.slow
def test_vmapped_parameters_share_bits_and_each_shard_counts_its_own_elements():
    params, grads = jnp.ones((4, 4096), BF16), jnp.full((4, 4096), HALFWAY, jnp.float32)
    stacked = jax.vmap(MOVING.init)(params)
    found, _ = jax.jit(jax.vmap(lambda *x: step(MOVING, *x)))(params, stacked, grads)
    alone = moved(params[0], grads[0])
    assert_same_bits(found, jnp.stack([alone] * 4))
    mesh = jax.make_mesh((4,), ("i",), (AxisType.Auto,), devices=jax.devices()[:4])
    for tx in (MOVING, ols.with_loss_scaling(MOVING, 1, axis_name="i")):
        state = tx.init(params)
        sharded = jax.shard_map(
            lambda *x, tx=tx: step(tx, *x),
            mesh=mesh,
            in_specs=(P("i"), P(), P("i")),
            out_specs=(P("i"), P()),
        )
        found, after = jax.jit(sharded)(params, state, grads)
        assert types(after) == types(state)
        assert set(np.unique(np.float32(found))) == {1, 1 + 2 * HALFWAY}


# -- steps


@pytest.fixture
def params():
    wide = np.linspace(-2, 2, 4096, dtype=np.float32)
    return {"w": jnp.asarray(wide.astype(BF16)), "b": jnp.ones(64, BF16), "n": jnp.ones(3)}


@pytest.mark.slow
def test_steps_are_the_same_one_by_one_in_scan_and_after_a_restart(params, tmp_path):
    inner = ols.with_stochastic_rounding(ols.with_bfloat16_state(optax.adam(1e-2)))
    tx = ols.with_loss_scaling(inner, 8.0)
    take = jax.jit(lambda carry, grads: step(tx, *carry, grads))
    steps = [
        jax.tree.map(lambda p, i=i: 8 * jnp.cos(p.astype(jnp.float32) + i), params)
        for i in range(4)
    ]
    carry = start = params, tx.init(params)
    for i, grads in enumerate(steps):
        carry = take(carry, grads)
        if i == 1:
            for name, (save, restore) in FORMATS.items():
                save(tmp_path / name, carry)
                assert_same_bits(restored := restore(tmp_path / name, carry), carry)
                carry = restored
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *steps)
    scanned, _ = jax.lax.scan(lambda c, g: (step(tx, *c, g), None), start, stacked)
    assert_same_bits(carry, scanned)
    assert int(carry[1].inner_state.rounding_count) == 4
    assert type(carry[1].inner_state) is ols.StochasticRoundingState


def test_a_skipped_step_and_a_step_that_only_accumulates_change_no_bit():
    params = {"w": jnp.asarray([1, -2, 0.0, -0.0, 3], BF16)}
    tx = ols.with_loss_scaling(ols.with_stochastic_rounding(optax.adam(0.1)), 8.0)
    state = tx.init(params)
    bad = {"w": jnp.full(5, jnp.inf)}
    after, skipped = jax.jit(lambda *x: step(tx, *x))(params, state, bad)
    assert_same_bits((after, skipped.inner_state), (params, state.inner_state))
    for tx in (
        ols.with_stochastic_rounding(optax.MultiSteps(optax.sgd(0.1), 2)),
        optax.MultiSteps(ROUNDED, 2),
    ):
        take = jax.jit(functools.partial(step, tx))
        after, state = take(params, tx.init(params), {"w": jnp.ones(5)})
        assert_same_bits(after, params)
        after, state = take(after, state, {"w": jnp.ones(5)})
        assert (after["w"] != params["w"]).all()


def test_small_updates_add_up():
    params, grads = jnp.ones(4096, BF16), jnp.full(4096, -1e-4)
    take = lambda carry, _: (step(MOVING, *carry, grads), None)  # noqa: E731
    (found, _), _ = jax.jit(lambda c: jax.lax.scan(take, c, length=1000))(
        (params, MOVING.init(params))
    )
    assert abs(float(jnp.mean(found.astype(jnp.float32))) - 0.9) < 1e-3


@pytest.mark.needs_xla
@pytest.mark.usefixtures("optimized")
@pytest.mark.slow
def test_a_donated_step_copies_nothing():
    shapes = [jax.ShapeDtypeStruct((512, 256), BF16)] * 3
    tx = ols.with_stochastic_rounding(optax.adamw(1e-3))
    memory = compiled_step(tx, shapes).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.04 * nbytes(shapes)
    in_place = nbytes((shapes, jax.eval_shape(tx.init, shapes)))
    assert memory.alias_size_in_bytes >= 0.99 * in_place


def test_a_step_can_be_exported(params):
    leaves, treedef = jax.tree.flatten((params, ROUNDED.init(params)))

    def take(leaves):
        params, state = treedef.unflatten(leaves)
        return jax.tree.leaves(step(ROUNDED, params, state, params))

    exported = jax.export.export(jax.jit(take))(leaves)
    assert_same_bits(exported.call(leaves), jax.jit(take)(leaves))
    (size,) = jax.export.symbolic_shape("n")
    symbolic = jax.ShapeDtypeStruct((size,), BF16)
    exported = jax.export.export(jax.jit(moved))(symbolic, symbolic)
    ones = jnp.ones(300, BF16)
    assert_same_bits(exported.call(ones, ones * HALFWAY), moved(ones, ones * HALFWAY))


def test_models_of_nnx_and_equinox_are_trained():
    model = Model({"w": jnp.ones(SHAPE, BF16)})
    optimizer = nnx.Optimizer(model, ols.with_skipping(ROUNDED), wrt=nnx.Param)
    grads = nnx.state(Model({"w": jnp.full(SHAPE, -10 * HALFWAY, BF16)}), nnx.Param)
    nnx.jit(lambda optimizer, model: optimizer.update(model, grads))(optimizer, model)
    linear = eqx.filter_eval_shape(eqx.nn.Linear, *SHAPE, use_bias=False, key=jax.random.key(0))
    linear = eqx.tree_at(lambda m: m.weight, linear, jnp.ones(SHAPE, BF16))
    params, static = eqx.partition(linear, eqx.is_inexact_array)
    grads = jax.tree.map(lambda p: jnp.full_like(p, -10 * HALFWAY), params)
    tx = ols.with_skipping(ROUNDED)
    trained, _ = jax.jit(functools.partial(step, tx))(params, tx.init(params), grads)
    for weight in (model.w[...], eqx.combine(trained, static).weight):
        assert set(np.unique(np.float32(weight))) == {1, 1 + 2 * HALFWAY}


# -- the order

IN_STATE = "`with_stochastic_rounding\\(with_bfloat16_state\\(inner\\)\\)`"
ONE_OF_TWO = "Use one wrapper: `with_master_weights.*` or `with_stochastic_rounding"


@pytest.mark.parametrize(
    ("wrap", "inner", "match"),
    [
        (
            ols.with_stochastic_rounding,
            ols.with_skipping(CLIP),
            "decide .*`with_skipping\\(with_sto",
        ),
        (ols.with_stochastic_rounding, ols.with_master_weights(CLIP), ONE_OF_TWO),
        (ols.with_stochastic_rounding, optax.chain(CLIP, ROUNDED), ONE_OF_TWO),
        (ols.with_master_weights, optax.chain(ROUNDED), ONE_OF_TWO),
        (ols.with_bfloat16_state, optax.chain(ROUNDED), IN_STATE),
        (ols.with_skipping, optax.chain(ROUNDED, CLIP), "updates of `with_stochastic_rounding`"),
        (ols.with_loss_scaling, optax.contrib.schedule_free(ROUNDED, 0.1), "`with_stochastic_roun"),
    ],
)
@pytest.mark.filterwarnings("ignore:`with_stochastic_rounding.* got no bfloat16")  # the inner one
def test_wrappers_that_it_does_not_combine_with_are_refused_by_name(wrap, inner, match):
    with pytest.raises(ValueError, match=match):
        wrap(inner).init({"w": jnp.ones(3, BF16)})


contrib = optax.contrib
OF_PARAMETERS = {
    "ScheduleFreeState": contrib.schedule_free_adamw(1e-3),
    "MechanicState": contrib.mechanize(optax.adam(1e-3)),
    "DoGState": contrib.dog(),
    "DoWGState": contrib.dowg(),
}


def scaled(tx, factor):
    return optax.chain(tx, optax.scale(factor))


# Where such an optimizer may be.
PLACES = {
    "alone": lambda tx: tx,
    "in a chain": lambda tx: optax.chain(CLIP, tx),
    "in a partition": lambda tx: optax.partition({"a": tx, "b": MOVE}, {"w": "a", "b": "b"}),
    "in MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "in flatten": optax.flatten,
    "in inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda x: scaled(tx, x))(1.0),
    "with a small state": ols.with_bfloat16_state,
}  # fmt: skip
TWO = {"w": jax.ShapeDtypeStruct((64, 64), BF16), "b": jax.ShapeDtypeStruct((4,), jnp.float32)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_an_optimizer_that_computes_its_state_from_the_parameters_is_refused(name, place):
    tx = ols.with_skipping(ols.with_stochastic_rounding(PLACES[place](OF_PARAMETERS[name])))
    remedy = r"with_master_weights\(inner, remainders=True\)"
    with pytest.raises(ValueError, match=f"got a {name} with a copy at .* Use `{remedy}`"):
        jax.eval_shape(tx.init, TWO)


def test_it_is_not_refused_for_copies_of_float32_parameters_alone():
    free = optax.partition(
        {"a": MOVE, "b": OF_PARAMETERS["ScheduleFreeState"]}, {"w": "a", "b": "b"}
    )
    jax.eval_shape(ols.with_stochastic_rounding(free).init, TWO)
    around = optax.partition({"a": ROUNDED, "b": OF_PARAMETERS["DoGState"]}, {"w": "a", "b": "b"})
    jax.eval_shape(ols.with_skipping(around).init, TWO)


COPIES = {
    "prodigy": contrib.prodigy(),
    **({"madgrad": contrib.madgrad(1e-3)} if hasattr(contrib, "madgrad") else {}),  # optax 0.2.7
    "cocob": contrib.cocob(),
    "sam": contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
}
NO_COPIES = {
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": contrib.muon(1e-3),
    "momo": contrib.momo(),
    "ademamix": contrib.ademamix(1e-3),
    "dadapt": contrib.dadapt_adamw(),
}


@pytest.mark.parametrize("name", COPIES | NO_COPIES)
def test_other_copies_of_parameters_are_warned_of_once(name, recwarn):
    tx = ols.with_stochastic_rounding((COPIES | NO_COPIES)[name])
    jax.eval_shape(tx.init, TWO)
    jax.eval_shape(tx.init, TWO)
    heard = [str(warning.message) for warning in recwarn]
    assert len(heard) == (name in COPIES)
    for text in heard:
        assert "`inner` keeps copies of bfloat16 parameters, at `" in text
        assert "remainders=True)`" in text


def test_copies_are_found_by_identity_if_init_reads_values():
    tx = ols.with_stochastic_rounding(
        optax.GradientTransformation(
            lambda p: contrib.dog().init(p) if float(p["w"][0]) else None, MOVE.update
        )
    )
    with pytest.raises(ValueError, match="got a DoGState"):
        tx.init({"w": jnp.ones(3, BF16)})


@pytest.mark.parametrize("params", [{"w": jnp.ones(3)}, {"w": jnp.ones(3), "n": jnp.arange(2)}])
def test_a_tree_without_bfloat16_is_warned_of_once_in_init_and_once_in_update(params, recwarn):
    tx = ols.with_skipping(ols.with_stochastic_rounding(MOVE))
    for _ in range(2):
        state = tx.init(params)
        updates, state = tx.update(params, state, params)
        assert_same_bits(updates["w"], params["w"])
    heard = [str(warning.message) for warning in recwarn]
    methods = [text[: text.index(" got")] for text in heard]
    assert methods == [f"`with_stochastic_rounding.{name}`" for name in ("init", "update")]
    assert all("`eqx.apply_updates`" in text for text in heard)


def test_a_tree_without_floats_or_a_group_of_a_partition_is_not_warned_of():
    integers = {"n": jnp.arange(2)}
    MOVING.update(integers, MOVING.init(integers), integers)
    params = {"w": jnp.ones(3), "b": jnp.ones(3, BF16)}
    tx = optax.partition({"a": MOVING, "b": MOVE}, {"w": "a", "b": "b"})
    tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("wrapper", [ols.with_stochastic_rounding, ols.with_bfloat16_state])
def test_an_array_may_have_a_dimension_that_no_int32_holds(wrapper):
    tx = wrapper(optax.adam(1e-3))
    dtype = BF16 if wrapper is ols.with_stochastic_rounding else jnp.float32
    for sizes in ((2**31 + 8,), (2**32 + 8, 2), (2, 2**33)):
        params = {"w": jax.ShapeDtypeStruct(sizes, dtype)}
        jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)


class Address:
    """A key without a text of its own."""

    def __lt__(self, other):
        return id(self) < id(other)


@pytest.mark.parametrize("wrapper", [ols.with_stochastic_rounding, ols.with_bfloat16_state])
def test_a_key_whose_text_is_an_address_is_refused_by_init(wrapper):
    dtype = BF16 if wrapper is ols.with_stochastic_rounding else jnp.float32
    params = {Address(): jnp.ones((64, 64), dtype)}
    with pytest.raises(ValueError, match="must have keys with the same text in every process, got"):
        wrapper(optax.adam(1e-3)).init(params)


def test_correct_places_in_a_guard_give_no_warning():
    params = {"w": jnp.ones(2, BF16), "b": jnp.ones(2, BF16)}
    chained = optax.chain(CLIP, ROUNDED)
    for inner in (
        chained,
        optax.masked(ROUNDED, {"w": True, "b": False}),
        optax.MultiSteps(chained, 2),
    ):
        ols.with_skipping(inner).init(params)


def test_it_keeps_no_masters(params):
    with pytest.raises(ValueError, match="must hold exactly one MasterWeightsState"):
        ols.master_weights(ROUNDED.init(params), params)


def test_a_float16_parameter_is_refused_with_the_remedies():
    with pytest.raises(ValueError, match=r"\['b'\].*`with_master_weights.*bfloat16"):
        ROUNDED.init({"w": jnp.ones(3, BF16), "b": jnp.ones(3, jnp.float16)})


def test_it_differentiates_like_the_identity_also_at_zero():
    def moved(move):
        updates, _ = MOVING.update(move, MOVING.init(params), params)
        return optax.apply_updates(params.astype(jnp.float32), updates)

    params = jnp.asarray([1, 1, -1, 0, -0.0, 3], BF16)
    move = jnp.asarray([0.3, -1, 1, 0, -0.0, 0], jnp.float32)
    for derivative in (jax.jacfwd, jax.jacrev):
        np.testing.assert_array_equal(jax.jit(derivative(moved))(move), np.eye(6))
