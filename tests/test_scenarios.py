"""What other systems' own tests publish, replayed here, and where this library differs by design.

T is a step with finite gradients, F one without; the scales are those after each step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

MIX = "FTTTFTFTTTF"
S = "FTFTFTTTFFT"
START_4 = {"initial_scale": 4, "growth_interval": 2}
START_1 = {"initial_scale": 1, "growth_interval": 2}
EVERY_1 = {"initial_scale": 1, "growth_interval": 1}
WITH_2 = {"growth_interval": 2, "hysteresis": 2}
NO_FLOOR = {"min_scale": 2**-126}

SCALES = [
    # name, hyper-parameters, flags, scales
    ("common denominator", START_4, MIX, "2 2 4 4 2 2 1 1 2 2 1"),
    ("TensorFlow: increase", START_1, "TTTTTT", "1 2 2 4 4 8"),
    (
        "TensorFlow: increase until capped, here at max_scale and not at float32's maximum",
        {"initial_scale": 2**22, "growth_interval": 2},
        "TTTTTT",
        "4194304 8388608 8388608 16777216 16777216 16777216",
    ),
    ("TensorFlow: decrease", {"initial_scale": 1024}, "FFFFFF", "512 256 128 64 32 16"),
    ("TensorFlow: decrease until one", {"initial_scale": 16}, "FFFFFF", "8 4 2 1 1 1"),
    ("TensorFlow: a bad step clears the good ones", START_1, "TTTFT", "1 2 2 1 1"),
    ("TensorFlow: trigger each step", EVERY_1, "TTTFTT", "2 4 8 4 8 16"),
    ("TensorFlow: alternate each step", EVERY_1, "TFTFTFTFT", "2 1 2 1 2 1 2 1 2"),
    (
        "TensorFlow: alternate every other step",
        {"initial_scale": 32, "growth_interval": 2},
        "TFTFTFT",
        "32 16 16 8 8 4 4",
    ),
    (
        "TensorFlow: multiplier",
        {**START_4, "growth_factor": 3, "backoff_factor": 1 / 3},
        "TTFTT",
        "4 12 4 4 12",
    ),
    (
        "TensorFlow contrib: a bad step clears the good ones",
        {**START_1, **WITH_2},
        "TTTFT",
        "1 2 2 2 2",
    ),
    (
        "TensorFlow contrib: a good step does not clear the bad ones",
        {**START_1, **WITH_2},
        "TTTFTF",
        "1 2 2 2 2 1",
    ),
    (
        "TensorFlow contrib: mix",
        {**START_4, **WITH_2},
        "FFTTTFTFTTTF",
        "4 2 2 4 4 4 4 2 2 4 4 4",
    ),
    ("Keras: downscaling", {"initial_scale": 400}, "FFFF", "200 100 50 25"),
    (
        "Keras: upscaling",
        {"initial_scale": 2, "growth_interval": 2},
        "TTTTTTTT",
        "2 4 4 8 8 16 16 32",
    ),
    (
        "Keras: below one, with a floor as low as it goes",
        {**START_4, **NO_FLOOR},
        "FFFFFF",
        "2 1 .5 .25 .125 .0625",
    ),
    ("JMP: floor", {**START_4, "min_scale": 0.25}, "FFFFFF", "2 1 .5 .25 .25 .25"),
    (
        "Flax: floor at the smallest normal number",
        {"initial_scale": 2**-124, **NO_FLOOR},
        "FFFF",
        f"{2**-125} {2**-126} {2**-126} {2**-126}",
    ),
    ("mpx: decrease", {"initial_scale": 2**14}, "F", "8192"),
    ("DeepSpeed: all overflow", {"initial_scale": 16}, "FFFFFFFF", "8 4 2 1 1 1 1 1"),
    (
        "DeepSpeed: all overflow, unfused",
        {"initial_scale": 16, "min_scale": 2},
        "FFFFFFFF",
        "8 4 2 2 2 2 2 2",
    ),
    (
        "DeepSpeed: hysteresis 2",
        {"initial_scale": 16, "hysteresis": 2},
        "FFFFFF",
        "16 8 4 2 1 1",
    ),
    (
        "DeepSpeed: hysteresis 3",
        {"initial_scale": 2**16, "hysteresis": 3},
        "FFFFFF",
        "65536 65536 32768 16384 8192 4096",
    ),
    (
        "Paddle: a good step clears the bad ones",
        {**START_4, **WITH_2, "consecutive_hysteresis": True},
        "FFTTTFTFTTTF",
        "4 2 2 4 4 4 4 4 4 8 8 8",
    ),
]

GROWS_LATE = "grows one step late the first time and after each overflow"
NO_REFILL = "starts to count overflows afresh after each back-off"
DIFFERENCES = [
    # name, hyper-parameters, flags, theirs, ours
    (f"Flax {GROWS_LATE}", START_4, MIX, "2 2 2 4 2 2 1 1 1 2 1", "2 2 4 4 2 2 1 1 2 2 1"),
    (
        "Flax grows every third step with an interval of two",
        START_1,
        "TTTTTTTTTT",
        "1 1 2 2 2 4 4 4 8 8",
        "1 2 2 4 4 8 8 16 16 32",
    ),
    ("Flax with an interval of one", EVERY_1, "TTTFTT", "1 2 2 1 1 2", "2 4 8 4 8 16"),
    (f"jaxamp {GROWS_LATE}", START_4, MIX, "2 2 2 4 2 2 1 1 1 2 1", "2 2 4 4 2 2 1 1 2 2 1"),
    (f"DeepSpeed {GROWS_LATE}", START_4, MIX, "2 2 2 4 2 2 1 1 1 2 1", "2 2 4 4 2 2 1 1 2 2 1"),
    (
        f"DeepSpeed {GROWS_LATE}: no overflow",
        {"initial_scale": 256, "growth_interval": 2},
        "TTTTTTTTTT",
        "256 256 512 512 1024 1024 2048 2048 4096 4096",
        "256 512 512 1024 1024 2048 2048 4096 4096 8192",
    ),
    (
        f"DeepSpeed {GROWS_LATE}: some overflow",
        {"initial_scale": 256, "growth_interval": 2},
        "FFTTTF",
        "128 64 64 64 128 64",
        "128 64 64 128 128 64",
    ),
    (
        f"DeepSpeed {GROWS_LATE}: hysteresis 2",
        {"initial_scale": 16, **WITH_2},
        S,
        "16 16 8 8 4 4 4 8 8 4 4",
        "16 16 8 8 4 4 8 8 8 4 4",
    ),
    (
        f"DeepSpeed {GROWS_LATE}: consecutive hysteresis 2",
        {"initial_scale": 16, **WITH_2, "consecutive_hysteresis": True},
        S,
        "16 16 16 16 16 16 16 32 32 16 16",
        "16 16 16 16 16 16 32 32 32 16 16",
    ),
    (
        "DeepSpeed raises at the floor",
        {"initial_scale": 4},
        "FFFF",
        "2 1 nan nan",
        "2 1 1 1",
    ),
    ("Keras has no floor", {"initial_scale": 4}, "FFFFFF", "2 1 .5 .25 .125 .0625", "2 1 1 1 1 1"),
    (
        "JMP loses its floor under jit",
        {"initial_scale": 4, "min_scale": 0.25},
        "FFFFFF",
        "2 1 1 1 1 1",
        "2 1 .5 .25 .25 .25",
    ),
    (
        "mpx clips at float16's maximum and leaves the powers of two",
        {"initial_scale": 2**15, "growth_interval": 1},
        "TTFFTT",
        "65504 65504 32752 16376 32752 65504",
        "65536 131072 65536 32768 65536 131072",
    ),
    (
        f"TensorFlow contrib {NO_REFILL}",
        {"initial_scale": 1024, **WITH_2},
        "FFFFFF",
        "1024 512 512 256 256 128",
        "1024 512 256 128 64 32",
    ),
    (
        f"Paddle {NO_REFILL}",
        {"initial_scale": 16, **WITH_2},
        "FFFFFFFFFF",
        "16 8 8 4 4 2 2 1 1 1",
        "16 8 4 2 1 1 1 1 1 1",
    ),
]

# What other systems start with and this one refuses, and what became of it there.
REFUSED = {
    "TensorFlow: float32's maximum": {"initial_scale": float(np.finfo(np.float32).max) / 4 * 2},
    "Keras: stuck at infinity": {"initial_scale": 3e38, "max_scale": 3e38},
    "JMP: a floor of zero": {"initial_scale": 10, "min_scale": 0},
    "mpx: a start below its floor": {"initial_scale": 2**-15, "min_scale": 2**-14},
    "DeepSpeed: zero means dynamic": {"initial_scale": 0},
    "DeepSpeed: negative": {"initial_scale": -1},
    "DeepSpeed: infinite": {"initial_scale": float("inf")},
    "DeepSpeed: NaN": {"initial_scale": float("nan")},
}


def numbers(text):
    return [float(word) for word in text.split()]


def states_after(policy, flags):
    """Return the state after each step."""
    state = policy.init()
    update = jax.jit(policy.update)
    return [state := update(state, jnp.asarray(flag == "T")) for flag in flags]


def scales_after(policy, flags):
    return [float(state.loss_scale) for state in states_after(policy, flags)]


def ids(table):
    return {"ids": [row[0] for row in table]}


@pytest.mark.parametrize(("name", "hyper", "flags", "scales"), SCALES, **ids(SCALES))
def test_it_gives_the_published_scales(name, hyper, flags, scales):
    del name
    assert scales_after(ols.DynamicLossScale(**hyper), flags) == numbers(scales)


@pytest.mark.parametrize(
    ("name", "hyper", "flags", "theirs", "ours"), DIFFERENCES, **ids(DIFFERENCES)
)
def test_it_differs_from_a_peer_where_the_contract_says_so(name, hyper, flags, theirs, ours):
    del name
    scales = scales_after(ols.DynamicLossScale(**hyper), flags)
    assert scales == numbers(ours)
    assert scales != numbers(theirs)


@pytest.mark.parametrize("hyper", REFUSED.values(), ids=REFUSED.keys())
def test_it_refuses_what_a_peer_accepts(hyper):
    with pytest.raises(ValueError, match=r"`(initial|min|max)_scale` must"):
        ols.DynamicLossScale(**hyper)


# TensorFlow


@pytest.mark.parametrize("gradient", [0.0, float("nan")])
def test_tensorflow_a_fixed_scale_applies_every_step(gradient):
    policy = ols.FixedLossScale(1000, skip_nonfinite=False)
    tx = ols.with_loss_scaling(optax.sgd(1.0), policy)
    params = jnp.zeros(())
    updates, state = tx.update(jnp.asarray(gradient), tx.init(params), params)
    np.testing.assert_array_equal(updates, -gradient)
    assert [float(field) for field in state.loss_scale_state] == [1000, 0, 0, 0, 0]


@pytest.mark.parametrize("grads", [[None], [], None, {}])
def test_tensorflow_gradients_that_are_none_count_as_finite(grads):
    unscaled, grads_finite = ols.unscale_and_check(grads, ols.init())
    assert unscaled == grads
    assert bool(grads_finite)


def test_tensorflow_a_single_array_is_a_tree_of_gradients():
    unscaled, grads_finite = ols.unscale_and_check(jnp.asarray(4.0), ols.init(2))
    assert float(unscaled) == 2
    assert bool(grads_finite)


def test_tensorflow_a_config_comes_back():
    policy = ols.DynamicLossScale(1, 2, 3)
    config = policy.get_config()
    assert [config[k] for k in ("initial_scale", "growth_interval", "growth_factor")] == [1, 2, 3]
    assert ols.DynamicLossScale.from_config(config) == policy


def test_tensorflow_get():
    assert ols.as_loss_scale(123) == ols.FixedLossScale(123)
    policy = ols.as_loss_scale("dynamic")
    assert (policy.initial_scale, policy.growth_interval, policy.growth_factor) == (2**15, 2000, 2)


@pytest.mark.parametrize(
    "row", [row for row in SCALES if row[0].startswith("TensorFlow:")], ids=str
)
def test_tensorflow_one_bad_replica_is_a_bad_step_for_all(row):
    _, hyper, flags, scales = row
    policy = ols.DynamicLossScale(**hyper)

    def step(state, grads):
        _, grads_finite = ols.unscale_and_check(grads, state, axis_name="replicas")
        return policy.update(state, grads_finite)

    step = jax.jit(jax.vmap(step, axis_name="replicas"))
    state = jax.tree.map(lambda x: jnp.stack([x] * 2), policy.init())
    for flag, scale in zip(flags, numbers(scales), strict=True):
        state = step(state, jnp.array([1.0 if flag == "T" else jnp.nan, 1.0]))
        assert state.loss_scale.tolist() == [scale, scale]


# Keras


def test_keras_get_scaled_loss():
    state = ols.init(2)
    assert float(ols.scale_loss(jnp.float32(5), state)) == 10
    with pytest.warns(UserWarning, match="float16"):
        assert float(ols.scale_loss(jnp.float16(5), state)) == 10


def test_keras_get_unscaled_gradients():
    grads = [jnp.float32(3), None, jnp.float16(-4), jnp.array([[4.0, 2.0], [8.0, 5.0]])]
    unscaled, grads_finite = ols.unscale_and_check(grads, ols.init(2))
    assert [None if g is None else g.tolist() for g in unscaled] == [
        1.5,
        None,
        -2.0,
        [[2.0, 1.0], [4.0, 2.5]],
    ]
    assert bool(grads_finite)


def test_keras_a_finite_step_sees_true_gradients():
    grads = jnp.array([1.0, 6, 7, 2]) * 2**15
    unscaled, grads_finite = ols.unscale_and_check(grads, ols.init())
    assert unscaled.tolist() == [1, 6, 7, 2]
    assert bool(grads_finite)
    assert not bool(ols.unscale_and_check(jnp.full(4, jnp.inf), ols.init())[1])


def test_keras_a_variable_to_overwrite_is_not_unscaled():
    grads = {"_overwrite_with_gradient": jnp.array([1.0, 6, 7, 2])}
    assert ols.unscale_and_check(grads, ols.init())[0]["_overwrite_with_gradient"].tolist() == [
        1,
        6,
        7,
        2,
    ]


@pytest.mark.parametrize(
    ("hyper", "flags", "scaled"),
    [
        ({"initial_scale": 400}, "FFFF", 25),
        ({"initial_scale": 2, "growth_interval": 2}, "TTTTTTTT", 32),
    ],
)
def test_keras_the_loss_is_scaled_by_the_factor_of_the_moment(hyper, flags, scaled):
    state = states_after(ols.DynamicLossScale(**hyper), flags)[-1]
    assert float(ols.scale_loss(jnp.float32(1), state)) == scaled


def test_keras_dynamic_counter():
    states = states_after(ols.DynamicLossScale(**START_4), MIX)
    assert [int(s.growth_count) for s in states] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]


def test_keras_one_bad_element_on_one_replica_is_a_bad_step_for_all():
    policy = ols.DynamicLossScale(2, 2)

    def step(grads):
        state = policy.init()
        _, grads_finite = ols.unscale_and_check(grads, state, axis_name="replicas")
        return policy.update(state, grads_finite).loss_scale

    grads = jnp.ones((2, 3)).at[1, 2].set(jnp.nan)
    assert jax.pmap(step, axis_name="replicas")(grads).tolist() == [1, 1]


# JMP


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_jmp_scale_and_unscale(scale):
    state = ols.init(scale)
    scaled = ols.scale_loss({"a": jnp.float32(1)}, state)
    assert scaled == {"a": scale}
    assert ols.unscale_and_check(scaled, state)[0] == {"a": 1}


@pytest.mark.parametrize(("period", "factor"), [(20, 2), (30, 3)])
def test_jmp_increase(period, factor):
    policy = ols.DynamicLossScale(10, period, factor)
    states = states_after(policy, "T" * period)
    assert [float(s.loss_scale) for s in states] == [10] * (period - 1) + [10 * factor]
    assert [int(s.growth_count) for s in states] == [*range(1, period), 0]


@pytest.mark.parametrize(
    ("factor", "floor"), [(2, 1), (3, 1), (2, 0.3125), (3, 0.37), (2, 2**-126)]
)
def test_jmp_reduce(factor, floor):
    policy = ols.DynamicLossScale(10, 20, factor, 1 / factor, floor)
    states = states_after(policy, "F" * 100)
    expected = [max(floor, 10 / factor**i) for i in range(1, 101)]
    np.testing.assert_allclose([float(s.loss_scale) for s in states], expected, rtol=1e-5)
    assert not any(int(s.growth_count) for s in states)


@pytest.mark.parametrize(
    ("tree", "finite"),
    [
        (None, True),
        ({}, True),
        ({"a": jnp.ones(3)}, True),
        ({"a": jnp.ones(3), "b": {"c": jnp.array([1.0, jnp.inf])}}, False),
        ({"a": jnp.array(jnp.nan), "b": jnp.ones(3)}, False),
    ],
)
def test_jmp_all_finite(tree, finite):
    assert bool(ols.all_finite(tree)) is finite


# Flax, mpx, DeepSpeed, Paddle


def test_flax_replicas_disagree_only_without_an_axis_name():
    policy = ols.DynamicLossScale(65536)

    def scale_after(grads, axis_name):
        _, grads_finite = ols.unscale_and_check(grads, policy.init(), axis_name=axis_name)
        return policy.update(policy.init(), grads_finite).loss_scale

    grads = jnp.array([1.0, jnp.inf])
    for axis_name, expected in (("d", [32768, 32768]), (None, [65536, 32768])):
        mapped = jax.pmap(scale_after, axis_name="d", static_broadcasted_argnums=1)
        assert mapped(grads, axis_name).tolist() == expected


def test_mpx_value_and_gradient_are_unscaled_by_the_factor_they_were_scaled_with():
    """Mpx unscales by the factor that has grown already: 1.5 instead of 3 on every second step."""
    policy = ols.DynamicLossScale(8, 2)
    loss_and_grad = ols.value_and_grad(lambda p: 3 * p)
    state = policy.init()
    for step in range(5):
        value, grad = loss_and_grad(state, jnp.float32(1))
        unscaled, grads_finite = ols.unscale_and_check(grad, state)
        assert (float(value), float(unscaled)) == (3, 3)
        state = policy.update(state, grads_finite)
        assert float(state.loss_scale) == 8 * 2 ** ((step + 1) // 2)


def test_mpx_the_value_of_a_bad_step_is_the_loss():
    """Mpx reports 6 for a loss of 3."""
    loss_and_grad = ols.value_and_grad(lambda p: 3 + jnp.sqrt(p))
    value, grad = loss_and_grad(ols.init(8), jnp.float32(0))
    assert float(value) == 3
    assert not bool(ols.all_finite(grad))


@pytest.mark.parametrize("given", [0, -1, float("inf"), float("nan"), True, [], {}, "3"])
def test_deepspeed_configs_that_are_refused(given):
    with pytest.raises((TypeError, ValueError), match="`loss_scale` must"):
        ols.as_loss_scale(given)


@pytest.mark.parametrize("given", [1, 2.0])
def test_deepspeed_configs_that_are_accepted(given):
    assert ols.as_loss_scale(given).scale == given


@pytest.mark.parametrize(
    ("grads_finite", "scale"), [(True, 4096), (False, float(np.float32(2048) * np.float32(0.8)))]
)
def test_paddle_the_operator_on_the_edge_of_both_counts(grads_finite, scale):
    policy = ols.DynamicLossScale(2048, 1000, 2, 0.8, hysteresis=2)
    state = policy.init()._replace(growth_count=jnp.int32(999), overflow_count=jnp.int32(1))
    state = policy.update(state, grads_finite)
    assert (float(state.loss_scale), int(state.growth_count)) == (scale, 0)


# Numeric facts


def test_numerics_the_factor_of_a_float16_loss_overflows_on_its_way_back():
    def gradient(scale):
        with pytest.warns(UserWarning, match="infinite there above 65504"):
            return float(jax.grad(lambda w: ols.scale_loss(w, ols.init(scale)))(jnp.float16(1)))

    assert gradient(2.0**15) == 2.0**15
    assert gradient(2.0**16) == np.inf


def test_numerics_a_mean_in_float32_allows_a_large_factor():
    def loss(w):
        return ols.scale_loss(jnp.mean(w.astype(jnp.float32)), ols.init(2.0**24))

    assert jax.grad(loss)(jnp.ones(1024, jnp.float16)).tolist() == [16384.0] * 1024


def test_numerics_the_mean_of_unscaled_float16_gradients_does_not_overflow():
    def mean(grads, *, unscale_first):
        if unscale_first:
            grads, _ = ols.unscale_and_check(grads, ols.init(2), axis_name="d")
        return jax.lax.pmean(grads, "d")

    grads = jnp.full(2, 40000, jnp.float16)
    for unscale_first, expected in ((True, 20000), (False, np.inf)):
        mapped = jax.pmap(lambda g, u=unscale_first: mean(g, unscale_first=u), axis_name="d")
        assert mapped(grads).tolist() == [expected] * 2
