"""A converted loss scale changes at the same steps as in the live library it comes from."""

import dataclasses
import subprocess
import sys
import types

import flax.jax_utils
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ols
from optax_lossscale import interop
from optax_lossscale.flax import DynamicScale as OurDynamicScale

pytestmark = pytest.mark.integration

STEPS = 400
SEEDS = range(8)
TORCH = {
    "scale": 512.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "_growth_tracker": 2,
}
# What a step of the two libraries makes of T and F, from init 4 and an interval of 2.
MIX = [c == "T" for c in "FTTTFTFTTTF"]


class OnTheInterval(DynamicScale):
    """Flax's class at commit 8163517a of its main branch, which does not wait one more step."""

    def value_and_grad(self, *args, **kwargs):
        sooner = DynamicScale(**vars(self) | {"growth_interval": self.growth_interval - 1})

        def grad_fn(*xs):
            result = sooner.value_and_grad(*args, **kwargs)(*xs)
            after = result.dynamic_scale
            return result._replace(
                dynamic_scale=self.replace(scale=after.scale, fin_steps=after.fin_steps)
            )

        return grad_fn


class NamedDynamicScale(OurDynamicScale):
    name: str = flax.struct.field(pytree_node=False, default="generator")


def random_rule(seed):
    """Draw what a run may look like in the middle: a rule, where it stands, and its steps."""
    rng = np.random.default_rng(seed)
    interval = int(rng.integers(1, 9))
    factor = 3.0 if seed % 3 == 0 else 2.0 ** int(rng.integers(1, 3))
    # As many moves up as down: the factor stays within the bounds, and meets its floor.
    finite = rng.random(STEPS) < 0.5 ** (1 / interval)
    return types.SimpleNamespace(
        scale=float(rng.choice([1.0, 3.0]) * 2.0 ** int(rng.integers(4, 16))),
        interval=interval,
        count=int(rng.integers(0, interval)),
        factor=factor,
        floor=float(2.0 ** int(rng.integers(-3, 4))),
        finite=jnp.asarray(finite),
    )


def run_ours(policy, state, finite):
    """Return the factors and the counts of finite steps after each step."""

    def step(state, finite):
        state = policy.update(state, finite)
        return state, (state.loss_scale, state.growth_count)

    return jax.jit(lambda state: jax.lax.scan(step, state, finite)[1])(state)


def run_flax(ds, finite):
    """Let Flax itself differentiate a loss whose gradient is finite, or is not."""
    ds = ds.replace(scale=jnp.float32(ds.scale), fin_steps=jnp.int32(ds.fin_steps))

    def step(ds, finite):
        slope = jnp.where(finite, 1.0, jnp.inf)
        ds, is_finite, _, _ = ds.value_and_grad(lambda p: p * slope)(jnp.float32(1))
        return ds, (ds.scale, ds.fin_steps, is_finite)

    scales, counts, seen = jax.jit(lambda ds: jax.lax.scan(step, ds, finite)[1])(ds)
    np.testing.assert_array_equal(seen, finite)
    return scales, counts


def run_jmp(ls, finite):
    """Step eagerly: under `jax.jit` JMP forgets its floor."""
    after = []
    for flag in finite:
        ls = ls.adjust(flag)
        after.append((ls.loss_scale, ls.counter))
    return tuple(np.stack([np.asarray(x) for x in xs]) for xs in zip(*after, strict=True))


def assert_same_moves(theirs, ours, *, exact):
    (their_scales, their_counts), (our_scales, our_counts) = theirs, ours
    np.testing.assert_array_equal(our_counts, their_counts)
    moved = [np.diff(np.asarray(s, np.float64)) != 0 for s in (their_scales, our_scales)]
    np.testing.assert_array_equal(*moved)
    assert moved[0].sum() >= 10  # or the comparison says nothing
    # One unit in the last place for each move, where the factors are no powers of two.
    rtol = 0 if exact else float(2**-23 * moved[0].sum())
    np.testing.assert_allclose(our_scales, their_scales, rtol=rtol)


@pytest.mark.parametrize("seed", SEEDS)
def test_flax_and_what_it_became_move_at_the_same_step(seed):
    rule = random_rule(seed)
    ds = DynamicScale(
        growth_factor=rule.factor,
        backoff_factor=1 / rule.factor,
        growth_interval=rule.interval,
        fin_steps=rule.count,
        scale=rule.scale,
        minimum_scale=rule.floor,
    )
    theirs = run_flax(ds, rule.finite)
    ours = run_ours(*interop.from_flax_dynamic_scale(ds), rule.finite)
    assert_same_moves(theirs, ours, exact=rule.factor != 3)


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_flax_can_be_left_at_any_step(seed):
    rule = random_rule(seed)
    ds = DynamicScale(growth_interval=rule.interval, scale=rule.scale)
    for finite in rule.finite[: 20 + seed]:
        slope = 1.0 if finite else jnp.inf
        ds = ds.value_and_grad(lambda p, slope=slope: p * slope)(jnp.float32(1)).dynamic_scale
    theirs = run_flax(ds, rule.finite)
    ours = run_ours(*interop.from_flax_dynamic_scale(ds), rule.finite)
    assert_same_moves(theirs, ours, exact=True)


def test_flax_waits_for_one_step_more_than_its_interval_says():
    ds = DynamicScale(growth_interval=2, scale=1.0)
    policy, state = interop.from_flax_dynamic_scale(ds)
    assert policy.growth_interval == 3
    expected = [1, 1, 2, 2, 2, 4, 4, 4, 8, 8]
    finite = jnp.ones(10, bool)
    np.testing.assert_array_equal(run_flax(ds, finite)[0], expected)
    np.testing.assert_array_equal(run_ours(policy, state, finite)[0], expected)


@pytest.mark.parametrize("cls", [OurDynamicScale, NamedDynamicScale, OnTheInterval])
@pytest.mark.parametrize("seed", SEEDS[::3])
def test_a_class_that_does_not_wait_is_converted_as_such(cls, seed):
    rule = random_rule(seed)
    ds = cls(growth_interval=rule.interval, fin_steps=rule.count, scale=rule.scale)
    policy, state = interop.from_flax_dynamic_scale(ds)
    assert policy.growth_interval == rule.interval
    assert_same_moves(run_flax(ds, rule.finite), run_ours(policy, state, rule.finite), exact=True)


def test_concrete_numbers_are_converted_under_jit_too():
    intervals = []

    @jax.jit
    def convert(x):
        policy, state = interop.from_flax_dynamic_scale(DynamicScale(growth_interval=4))
        intervals.append(policy.growth_interval)
        return x * state.loss_scale

    assert float(convert(1.0)) == 65536
    assert intervals == [5]


def test_flax_without_a_floor_gets_the_lowest_there_is():
    for floor in (None, 0.0, float(jnp.finfo(jnp.float32).tiny)):
        policy, _ = interop.from_flax_dynamic_scale(DynamicScale(minimum_scale=floor))
        assert (policy.min_scale, policy.max_scale) == (2.0**-126, 2.0**126)


def test_a_factor_below_its_floor_is_lifted_by_an_overflow_as_in_flax():
    ds = DynamicScale(scale=0.5, minimum_scale=4.0, growth_interval=2)
    policy, state = interop.from_flax_dynamic_scale(ds)
    finite = jnp.asarray([True, False, True])
    np.testing.assert_array_equal(run_flax(ds, finite)[0], [0.5, 4, 4])
    np.testing.assert_array_equal(run_ours(policy, state, finite)[0], [0.5, 4, 4])


@pytest.mark.parametrize("seed", SEEDS)
def test_jmp_and_what_it_became_move_at_the_same_step(seed):
    rule = random_rule(seed)
    ls = jmp.DynamicLossScale(
        jnp.float32(rule.scale),
        counter=jnp.int32(rule.count),
        period=rule.interval,
        factor=int(rule.factor),
        min_loss_scale=jnp.float32(rule.floor),
    )
    theirs = run_jmp(ls, rule.finite)
    assert_same_moves(theirs, run_ours(*interop.from_jmp(ls), rule.finite), exact=rule.factor != 3)


def test_jmp_forgets_its_floor_under_jit_and_the_policy_does_not():
    ls = jmp.DynamicLossScale(jnp.float32(4), min_loss_scale=jnp.float32(0.25))
    overflows = jnp.zeros(6, bool)
    np.testing.assert_array_equal(run_jmp(ls, overflows)[0], [2, 1, 0.5, 0.25, 0.25, 0.25])
    ours, _ = run_ours(*interop.from_jmp(ls), overflows)
    np.testing.assert_array_equal(ours, [2, 1, 0.5, 0.25, 0.25, 0.25])

    adjust = jax.jit(lambda ls, finite: ls.adjust(finite))
    forgot = adjust(ls, overflows[0])
    assert interop.from_jmp(forgot)[0].min_scale == 1  # what it goes on with
    for finite in overflows[1:]:
        forgot = adjust(forgot, finite)
    assert float(forgot.loss_scale) == 1


@pytest.mark.parametrize(("scale", "ceiling"), [(2**12, 2**15), (4094, 65504)])
def test_jmp_in_float16_stops_growing_where_twice_as_much_is_infinite(scale, ceiling):
    ls = jmp.DynamicLossScale(jnp.float16(scale), period=2, min_loss_scale=jnp.float16(1))
    finite = jnp.asarray([True] * 12 + [False] * 6 + [True] * 20)
    policy, state = interop.from_jmp(ls)
    assert policy.max_scale == ceiling
    assert_same_moves(run_jmp(ls, finite), run_ours(policy, state, finite), exact=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_jmp_in_wider_types_has_no_ceiling_but_that_of_every_policy(dtype):
    policy, state = interop.from_jmp(jmp.DynamicLossScale(dtype(2**12)))
    assert policy.max_scale == 2.0**126
    assert state.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("ls", [jmp.StaticLossScale(jnp.float32(8)), jmp.NoOpLossScale()])
def test_jmps_other_classes_are_sent_to_the_fixed_policy(ls):
    with pytest.raises(TypeError, match=r"`ls` lacks .*counter.*`FixedLossScale\(float\(ls\.loss"):
        interop.from_jmp(ls)


def test_torchs_dict_survives_the_way_here_and_back():
    assert interop.to_torch_state_dict(*interop.from_torch_state_dict(TORCH)) == TORCH


def test_what_came_from_torch_moves_as_torchs_documentation_says():
    d = {**TORCH, "scale": 4.0, "growth_interval": 2, "_growth_tracker": 0}
    scales, counts = run_ours(*interop.from_torch_state_dict(d), jnp.asarray(MIX))
    np.testing.assert_array_equal(scales, [2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1])
    np.testing.assert_array_equal(counts, [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0])


def test_what_came_from_torch_may_sink_below_one():
    scales, _ = run_ours(
        *interop.from_torch_state_dict({**TORCH, "scale": 2.0}), jnp.zeros(3, bool)
    )
    np.testing.assert_array_equal(scales, [1, 0.5, 0.25])


def test_torch_gets_the_rule_and_where_it_stands_as_python_numbers():
    policy = ols.DynamicLossScale(2.0**10, 7, growth_factor=4.0, backoff_factor=0.25)
    state = policy.init()
    for finite in (True, False, True, True):
        state = policy.update(state, finite)
    expected = {
        "scale": 256.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 2,
    }
    opt_state = ols.with_loss_scaling(optax.adam(1e-3), policy).init(jnp.ones(3))
    opt_state = opt_state._replace(loss_scale_state=state)
    for holder in (state, jax.tree.map(np.asarray, state), opt_state):
        d = interop.to_torch_state_dict(policy, holder)
        assert d == expected
        assert [type(value) for value in d.values()] == [float, float, float, int, int]


def test_a_count_beyond_the_interval_grows_on_the_next_finite_step():
    ds = DynamicScale(growth_interval=3, fin_steps=9, scale=8.0)
    ls = jmp.DynamicLossScale(jnp.float32(8), counter=jnp.int32(9), period=3)
    for policy, state in (
        interop.from_flax_dynamic_scale(ds),
        interop.from_jmp(ls),
        interop.from_torch_state_dict({**TORCH, "scale": 8.0, "_growth_tracker": 9}),
    ):
        assert float(policy.update(state, grads_finite=True).loss_scale) == 16
        # Torch asks for equality, so it is told of a count just before it.
        d = interop.to_torch_state_dict(policy, state)
        assert d["_growth_tracker"] == d["growth_interval"] - 1


@pytest.mark.parametrize(
    "converted",
    [
        interop.from_flax_dynamic_scale(DynamicScale(fin_steps=3)),
        interop.from_jmp(jmp.DynamicLossScale(np.float16(8), counter=np.int32(3))),
        interop.from_torch_state_dict({**TORCH, "scale": 8, "_growth_tracker": 3}),
    ],
    ids=["flax", "jmp", "torch"],
)
def test_the_state_is_of_the_type_that_every_policy_makes(converted):
    policy, state = converted
    assert int(state.growth_count) == 3
    for field, ours in zip(state, policy.init(), strict=True):
        assert jax.typeof(field) == jax.typeof(ours)
        assert not field.aval.weak_type
    assert len({leaf.unsafe_buffer_pointer() for leaf in state}) == len(state)


def test_an_interval_that_never_comes_stays_one():
    never = 2**31 - 1
    policy, _ = interop.from_flax_dynamic_scale(DynamicScale(growth_interval=never))
    assert policy.growth_interval == never
    policy, _ = interop.from_torch_state_dict({**TORCH, "growth_interval": 10**12})
    assert policy.growth_interval == never


def test_training_goes_on_where_it_was_left():
    ds = DynamicScale(growth_interval=4, fin_steps=4, scale=64.0)
    policy, state = interop.from_flax_dynamic_scale(ds)
    tx = ols.with_loss_scaling(optax.sgd(0.5), policy)
    opt_state = tx.init(jnp.float32(1))._replace(loss_scale_state=state)
    updates, opt_state = tx.update(jnp.float32(64), opt_state)
    assert float(updates) == -0.5
    assert float(ols.loss_scale_state(opt_state).loss_scale) == 128


LACKING = [
    (interop.from_flax_dynamic_scale, {"scale": 2.0}, r"`ds` lacks fin_steps.*DynamicScale"),
    (interop.from_flax_dynamic_scale, None, r"`ds` lacks scale, fin_steps"),
    (interop.from_jmp, DynamicScale(), r"`ls` lacks loss_scale, counter.*DynamicLossScale"),
    (interop.from_torch_state_dict, {}, r"`d` lacks scale.*enabled=False.*as_loss_scale\(None\)"),
    (interop.from_torch_state_dict, 3, r"`d` lacks scale.*state_dict\(\)"),
    (
        interop.from_torch_state_dict,
        {k: v for k, v in TORCH.items() if k != "_growth_tracker"},
        r"`d` lacks _growth_tracker\.",
    ),
]


@pytest.mark.parametrize(("convert", "theirs", "message"), LACKING)
def test_what_is_missing_is_named(convert, theirs, message):
    with pytest.raises(TypeError, match=message):
        convert(theirs)


OUT_OF_BOUNDS = [
    (
        {"scale": float("inf")},
        r"`d` must hold a loss scale between 2\*\*-126 and 2\*\*126.*got inf",
    ),
    ({"scale": float("nan")}, r"`d` must hold a loss scale.*got nan"),
    ({"scale": 0.0}, r"`d` must hold a loss scale.*Start again"),
    ({"_growth_tracker": -1}, r"`d` must hold .* a count of at least 0, got 512.0 and -1"),
    ({"growth_factor": 1.0}, r"`d` cannot be represented.*`growth_factor` must be greater than 1"),
    ({"backoff_factor": 1.0}, r"`d` cannot be represented.*`backoff_factor`"),
    ({"growth_interval": 0}, r"`d` cannot be represented.*`growth_interval` must be at least 1"),
    ({"growth_interval": float("nan")}, r"`d` must count whole steps"),
]


@pytest.mark.parametrize(("change", "message"), OUT_OF_BOUNDS)
def test_what_no_policy_can_express_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        interop.from_torch_state_dict({**TORCH, **change})


@pytest.mark.parametrize("factor", [0, 1])
def test_a_factor_of_jmp_that_does_not_grow_is_refused(factor):
    with pytest.raises(ValueError, match=r"`ls` cannot be represented.*`growth_factor`"):
        interop.from_jmp(jmp.DynamicLossScale(jnp.float16(8), factor=factor))


def test_a_floor_that_is_no_scalar_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"`ds.minimum_scale` must be a scalar, got shape"):
        interop.from_flax_dynamic_scale(DynamicScale(minimum_scale=np.ones(2)))


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
def test_a_factor_at_the_bounds_is_taken(scale):
    _, state = interop.from_torch_state_dict({**TORCH, "scale": scale})
    assert float(state.loss_scale) == scale


def test_a_value_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="`d` must hold concrete numbers, got scale=None"):
        interop.from_torch_state_dict({**TORCH, "scale": None})


def test_a_replicated_state_is_refused_with_the_way_to_one_replica():
    ds = flax.jax_utils.replicate(DynamicScale(), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"`ds.scale` must be a scalar, got shape \(2,\)"):
        interop.from_flax_dynamic_scale(ds)
    policy, _ = interop.from_flax_dynamic_scale(jax.tree.map(lambda x: x[0], ds))
    assert policy.initial_scale == 65536

    states = jax.tree.map(lambda x: jnp.stack([x, x]), ols.init())
    with pytest.raises(ValueError, match=r"`state.loss_scale` must be a scalar, got shape"):
        interop.to_torch_state_dict(ols.DynamicLossScale(), states)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: interop.from_flax_dynamic_scale(DynamicScale(scale=x)),
        lambda x: interop.from_jmp(jmp.DynamicLossScale(x)),
        lambda x: interop.from_torch_state_dict({**TORCH, "scale": x}),
        lambda x: interop.to_torch_state_dict(
            ols.DynamicLossScale(), ols.init()._replace(loss_scale=x)
        ),
    ],
    ids=["flax", "jmp", "from_torch", "to_torch"],
)
def test_a_traced_value_is_refused(convert):
    with pytest.raises(TypeError, match=r"must hold concrete numbers, got .* outside of `jax.jit`"):
        jax.jit(convert)(jnp.float32(8))


def test_torch_is_not_given_a_rule_that_it_lacks():
    policy = ols.DynamicLossScale(hysteresis=2)
    with pytest.raises(ValueError, match=r"`policy` must have hysteresis=1, got 2.*replace"):
        interop.to_torch_state_dict(policy, policy.init())
    lenient = dataclasses.replace(policy, hysteresis=1)
    assert interop.to_torch_state_dict(lenient, policy.init())["scale"] == 2**15


def test_a_state_without_loss_scaling_is_refused():
    with pytest.raises(ValueError, match=r"exactly one LossScaleState, got 0"):
        interop.to_torch_state_dict(ols.DynamicLossScale(), optax.adam(1e-3).init(jnp.ones(3)))


def test_none_of_the_three_is_imported():
    code = "import sys, optax_lossscale.interop; print({'flax', 'jmp', 'torch'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert result.stdout.strip() == "set()"
