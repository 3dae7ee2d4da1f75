"""`checkpoint_dtype`: what checkpointed layers save, values and derivatives, and who is harmed."""

import collections
import functools
import gc
import warnings
import weakref

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal, shape
from flax import linen, nnx
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from plain_where import assert_same_bits

import optax_lossscale as ols
from optax_lossscale.diagnostics import first_nonfinite, precision_report

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
nothing = jax.checkpoint_policies.nothing_saveable
everything = jax.checkpoint_policies.everything_saveable
similar = pytest.mark.exhaustive

# A stream of 8 words and 10 numbers each, which a product makes, passes through three layers.
LAYERS, WORDS, WIDTH = 3, 8, 10
INPUTS = shape(WORDS, 13)
PARAMS = {"first": shape(13, WIDTH), "layers": shape(LAYERS, WIDTH, 12)}


def layer(x, w):
    return x + jnp.tanh(x @ w) @ w.T


checkpointed = jax.checkpoint(layer)


def scanned(x, ws, layer=checkpointed):
    return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]


def unrolled(x, ws, layer=checkpointed):
    for w in ws:
        x = layer(x, w)
    return x


def model(layers, params=PARAMS):
    """Return a loss, and shapes of its arguments. It saves nothing beside its layers."""

    def loss(params, inputs):
        return jnp.mean(layers(inputs @ params["first"], params["layers"]))

    return loss, params, INPUTS


def halved(loss, dtype=BF16, checkpoint_dtype=BF16):
    return ols.autocast(loss, dtype, checkpoint_dtype=checkpoint_dtype)


def saved(fun, *args, devices=1):
    """Return how many arrays as large as the stream are saved, by dtype. JAX counts them."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))
    counts = collections.Counter()
    for x in leaves:
        if x.shape[-1:] == (WIDTH,) and x.shape[-2] % WORDS == 0:
            counts[x.dtype.name] += x.size / (WORDS * WIDTH * devices)
    return counts


def error(tree, exact):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(exact), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


# -- everywhere


def nested(x, ws):
    return jax.checkpoint(unrolled)(x, ws)


def in_branches(x, w):
    return lax.cond(w[0, 0] > 0, checkpointed, lambda x, w: checkpointed(x, 2 * w), x, w)


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(WIDTH)(jnp.tanh(linen.Dense(12)(x)))


def of_linen(layers):
    def loss(params, inputs):
        return jnp.mean(layers.apply(params["layers"], inputs @ params["first"]))

    keys = jax.eval_shape(lambda: jax.random.key(0))
    layers_params = jax.eval_shape(layers.init, keys, shape(WORDS, WIDTH))
    return loss, {"first": PARAMS["first"], "layers": layers_params}, INPUTS


def of_nnx():
    @nnx.remat
    def run(layer, x):
        return x + layer[1](jnp.tanh(layer[0](x)))

    def made():
        rngs = nnx.Rngs(0)
        new_list = getattr(nnx, "List", list)  # Flax 0.11 takes Python's
        linear = functools.partial(nnx.Linear, rngs=rngs)
        return new_list([new_list([linear(WIDTH, 12), linear(12, WIDTH)]) for _ in range(LAYERS)])

    graph, state = nnx.split(nnx.eval_shape(made))

    def loss(params, inputs):
        x = inputs @ params["first"]
        for layer in nnx.merge(graph, params["layers"]):
            x = run(layer, x)
        return jnp.mean(x)

    return loss, {"first": PARAMS["first"], "layers": state}, INPUTS


def of_haiku():
    def block(x):
        return x + hk.Linear(WIDTH)(jnp.tanh(hk.Linear(12)(x)))

    def layers(x):
        for _ in range(LAYERS):
            x = hk.remat(block)(x)
        return x

    layers = hk.without_apply_rng(hk.transform(layers))
    params = jax.eval_shape(lambda x: layers.init(jax.random.key(0), x), shape(WORDS, WIDTH))

    def loss(params, inputs):
        return jnp.mean(layers.apply(params["layers"], inputs @ params["first"]))

    return loss, {"first": PARAMS["first"], "layers": params}, INPUTS


def over_devices(layers, *, check=True, gathers=False):
    """Return a loss on two devices, where layers have collectives, or gather their parameters."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    @jax.checkpoint
    def run(x, w):
        if gathers:
            w = lax.all_gather(w, "d", axis=1, tiled=True)
        return layer(x, w) + lax.pmean(jnp.mean(x), "d")

    def loss(params, inputs):
        return jnp.mean(layers(inputs @ params["first"], params["layers"], run))[None]

    split = P(None, None, "d") if gathers else P()
    mapped = jax.shard_map(
        loss,
        mesh=mesh,
        in_specs=({"first": P(), "layers": split}, P("d")),
        out_specs=P("d"),
        check_vma=check,
    )
    return (lambda *args: jnp.mean(mapped(*args))), PARAMS, shape(2 * WORDS, 13)


def pmapped():
    loss, *_ = model(scanned)
    mapped = jax.pmap(loss, axis_name="d", devices=jax.devices()[:2])
    return (lambda *args: jnp.mean(mapped(*args))), *(
        jax.tree.map(lambda x: shape(2, *x.shape), (PARAMS, INPUTS))
    )


EVERYWHERE = {
    "scanned": lambda: model(scanned),
    "unrolled": lambda: model(unrolled),
    "nothing_saveable": lambda: model(
        functools.partial(scanned, layer=jax.checkpoint(layer, policy=nothing))
    ),
    "in jit": lambda: model(functools.partial(unrolled, layer=jax.jit(checkpointed))),
    "in jit in scan": lambda: model(functools.partial(scanned, layer=jax.jit(checkpointed))),
    "in branches": lambda: model(functools.partial(scanned, layer=in_branches)),
    "without prevent_cse": lambda: model(
        functools.partial(scanned, layer=jax.checkpoint(layer, prevent_cse=False))
    ),
    "Linen": lambda: of_linen(linen.Sequential([linen.remat(LinenLayer)() for _ in range(LAYERS)])),
    "remat_scan": lambda: of_linen(linen.remat_scan(LinenLayer, lengths=(LAYERS, 1))()),
    "nnx": of_nnx,
    "Haiku": of_haiku,
    "Equinox": lambda: model(functools.partial(unrolled, layer=eqx.filter_checkpoint(layer))),
    "shard_map, scanned": lambda: over_devices(scanned),
    "shard_map, unrolled": lambda: over_devices(unrolled),
    "shard_map, unchecked": lambda: over_devices(scanned, check=False),
    "FSDP, scanned": lambda: over_devices(scanned, gathers=True),
    "FSDP, unchecked": lambda: over_devices(unrolled, check=False, gathers=True),
    "pmap": pmapped,
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_inputs_of_layers_are_saved_in_half_precision(name):
    loss, *args = EVERYWHERE[name]()
    devices = 2 if {"shard_map", "FSDP", "pmap"} & {*name.replace(",", "").split()} else 1
    counts = saved(halved(loss), *args, devices=devices)
    assert counts == {"bfloat16": LAYERS}


@pytest.mark.parametrize(
    ("dtype", "checkpoint_dtype"), [(F16, F16), (F16, BF16), (BF16, "bfloat16")]
)
def test_they_are_saved_in_the_dtype_that_is_asked_for(dtype, checkpoint_dtype):
    loss, *args = model(scanned)
    name = jnp.dtype(checkpoint_dtype).name
    assert saved(halved(loss, dtype, checkpoint_dtype), *args) == {name: LAYERS}


def test_nested_checkpoints_save_halves_inside_and_outside():
    loss, *args = model(nested)
    assert saved(halved(loss), *args) == {"bfloat16": 1}
    inner = jax.make_jaxpr(jax.grad(halved(loss)))(*args)
    assert str(inner).count("bf16[8,10]") > 2 * LAYERS


def test_parameters_that_are_stored_in_half_precision_stay_so():
    loss, params, inputs = model(scanned)
    params = jax.tree.map(lambda x: shape(*x.shape, dtype=BF16), params)
    half = halved(loss)
    assert saved(half, params, inputs) == {"bfloat16": LAYERS}
    grads = jax.eval_shape(jax.grad(half), params, inputs)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"bfloat16"}


# -- what is saved unchanged


def saved_with(layers, *, outer=lambda loss: loss, **kwargs):
    loss, *args = model(layers)
    return saved(outer(halved(loss, **kwargs)), *args)


def test_other_policies_decide_for_themselves():
    for policy in (everything, jax.checkpoint_policies.save_anything_except_these_names()):
        layers = functools.partial(scanned, layer=jax.checkpoint(layer, policy=policy))
        loss, *args = model(layers)
        assert saved(halved(loss), *args) == saved(ols.autocast(loss, BF16), *args)


def test_layers_that_print_are_left_alone():
    def printing(x, w):
        jax.debug.print("{}", x[0, 0])
        return layer(x, w)

    assert saved_with(functools.partial(scanned, layer=jax.checkpoint(printing))) == {
        "float32": LAYERS
    }


def test_what_depends_on_no_product_is_saved_unchanged():
    """Positions, counts, masks, targets, and small numbers beside the stream."""

    def run(carry, w):
        x, positions, count, scale = carry
        x = layer(x * scale + jnp.sin(positions), w)
        return (x, positions + 1000, count + 1, scale * jnp.mean(x)), None

    def layers(x, ws):
        carry = x, jnp.asarray(np.arange(80.0, dtype=np.float32).reshape(8, 10)), 0, jnp.float32(1)
        return lax.scan(jax.checkpoint(run), carry, ws)[0][0]

    loss, *args = model(layers)
    assert saved(halved(loss), *args) == {"bfloat16": LAYERS, "float32": LAYERS}


def test_a_mask_from_a_product_is_exact():
    def loss(params, inputs):
        x = inputs @ params["first"]
        largest = jax.nn.one_hot(jnp.argmax(x, -1), WIDTH)
        return jnp.mean(jax.checkpoint(lambda x, y: jnp.sin(x) * jnp.sin(y))(largest, x))

    assert saved(halved(loss), PARAMS, INPUTS) == {"bfloat16": 1, "float32": 1}


def test_constants_and_rows_of_a_scan_are_saved_once_and_unchanged():
    """They exist outside of the loop."""

    def layers(x, ws):
        skips = jnp.stack([x, x + 1, x + 2])
        run = jax.checkpoint(lambda y, skip, w: layer(jnp.sin(y) + jnp.sin(skip) + jnp.sin(x), w))
        return lax.scan(lambda y, row: (run(y, *row), None), x, (skips, ws))[0]

    # The rows, and the constant.
    assert saved_with(layers) == {"bfloat16": LAYERS, "float32": LAYERS + 1}


def test_inside_float32_loops_and_rules_nothing_changes():
    @jax.custom_jvp
    def custom(x, ws):
        return checkpointed(x, ws[0])

    custom.defjvp(lambda primals, tangents: (custom(*primals), 2 * tangents[0]))

    def looped(x, ws):
        def turn(carry):
            return carry[0] + 1, checkpointed(carry[1], ws[0])

        return lax.while_loop(lambda carry: carry[0] < 2, turn, (0, x))[1]

    for layers in (ols.autocast(scanned, F32), custom, looped):
        loss, *args = model(lambda x, ws, layers=layers: layers(x @ ws[0] @ ws[0].T, ws))
        with warnings.catch_warnings(action="ignore"):  # few products are cast
            half, plain = halved(loss), ols.autocast(loss, BF16)
            assert str(jax.make_jaxpr(half)(*args)) == str(jax.make_jaxpr(plain)(*args))


@pytest.mark.parametrize("layers", [scanned, unrolled, lambda x, ws: unrolled(x, ws, layer)])
def test_without_the_option_or_a_checkpoint_the_program_is_the_same(layers):
    loss, *args = model(layers)
    programs = [
        str(jax.make_jaxpr(jax.grad(fun))(*args))
        for fun in (
            ols.autocast(loss, BF16),
            halved(loss, BF16, None),
            ols.autocast(loss, F32),
            halved(loss, F32, F16),
            halved(loss),
        )
    ]
    assert programs[0] == programs[1]
    assert programs[2] == programs[3]
    assert (programs[0] == programs[4]) == (layers not in (scanned, unrolled))


# -- values and derivatives


@pytest.mark.parametrize("layers", [scanned, unrolled, pytest.param(nested, marks=similar)])
def test_values_are_the_same_to_the_bit(layers):
    """Operation by operation, since XLA rounds differently in fusions."""
    loss, *args = model(layers)
    args = normal(args)
    with jax.disable_jit():
        value = ols.autocast(loss, BF16)(*args)
        assert_same_bits(halved(loss)(*args), value)
        assert_same_bits(jax.value_and_grad(halved(loss))(*args)[0], value)


def test_the_derivative_is_that_of_the_layer_at_its_rounded_input():
    """No cotangent is rounded."""
    w, inputs, factor = normal((shape(13, WIDTH), INPUTS, shape(WORDS, WIDTH)))

    def loss(bias):
        return jnp.sum(jax.checkpoint(jnp.square)(inputs @ w + bias) * factor)

    bias = jnp.full((WORDS, WIDTH), 1 / 3)
    x = jnp.matmul(inputs.astype(BF16), w.astype(BF16)).astype(F32) + bias
    expected = 2 * x.astype(BF16).astype(F32) * factor
    with jax.disable_jit():
        assert_same_bits(jax.grad(halved(loss))(bias), expected)


def gradient(loss, *args, wrap=lambda grad: grad):
    return jax.jit(wrap(jax.grad(loss)))(*args)


def close_to_float32(loss, *args, half=halved, wrap=lambda grad: grad):
    """Return the error of a gradient, relative to float32's."""
    args = normal(args)
    args[0]["layers"] /= 6
    return error(gradient(half(loss), *args, wrap=wrap), gradient(loss, *args, wrap=wrap))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("in branches", "FSDP, unchecked"),
        *(pytest.param(name, marks=similar) for name in ("unrolled", "FSDP, scanned")),
    ],
)
def test_gradients_are_those_of_half_precision(name):
    assert close_to_float32(*EVERYWHERE[name]()) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("layers", [scanned, pytest.param(unrolled, marks=similar)])
def test_under_vmap_and_at_a_fixed_loss_scale(layers):
    loss, params, inputs = model(layers)
    many = shape(2, *inputs.shape)
    vmapped = lambda grad: jax.vmap(grad, (None, 0))  # noqa: E731
    assert close_to_float32(loss, params, many, wrap=vmapped) < 0.01
    half = lambda loss: ols.scale_inside(halved(loss, F16, F16), 2.0**10)  # noqa: E731
    assert saved(half(loss), params, inputs) == {"float16": LAYERS}
    assert close_to_float32(loss, params, inputs, half=half) < 0.002


@pytest.mark.slow
@pytest.mark.parametrize("layers", [scanned, pytest.param(nested, marks=similar)])
@pytest.mark.parametrize("derivative", [jax.jvp, "forward over reverse", "reverse over reverse"])
def test_every_kind_of_derivative(layers, derivative):
    loss, *args = model(layers)
    params, inputs = normal(args)
    tangent = normal(PARAMS, seed=1)

    def found(fun):
        fun = functools.partial(fun, inputs=inputs)
        if derivative == "forward over reverse":
            return jax.jvp(jax.grad(fun), (params,), (tangent,))[1]
        if derivative == "reverse over reverse":
            along = lambda p: optax.tree.vdot(jax.grad(fun)(p), tangent)  # noqa: E731
            return jax.grad(along)(params)
        return jax.jvp(fun, (params,), (tangent,))[1]

    params["layers"] /= 6
    assert error(*(jax.jit(found, static_argnums=0)(fun) for fun in (halved(loss), loss))) < 0.05


@pytest.mark.slow
def test_gradients_are_exported():
    loss, *args = model(scanned)
    (words,) = export.symbolic_shape("words")
    params, inputs = normal(args)
    shapes = args[0], jax.ShapeDtypeStruct((words, 13), F32)
    exported = export.export(jax.jit(jax.grad(halved(loss))))(*shapes)
    assert "xbf16" in exported.mlir_module()
    assert error(exported.call(params, inputs), jax.grad(halved(loss))(params, inputs)) < 0.02


# -- costs


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_nothing_is_computed_twice():
    loss, *args = model(unrolled)

    def flops(fun):
        return jax.jit(jax.grad(fun)).lower(*args).compile().cost_analysis()["flops"]

    assert flops(halved(loss)) < 1.01 * flops(ols.autocast(loss, BF16))


def test_a_layer_that_is_used_again_is_traced_once():
    calls = []

    def counted(x, w):
        calls.append(1)
        return layer(x, w)

    loss, *args = model(functools.partial(unrolled, layer=jax.checkpoint(counted)))
    jax.make_jaxpr(jax.grad(halved(loss)))(*args)
    assert len(calls) == 1


def test_eager_calls_compile_nothing_again(compilations):
    loss, *args = model(unrolled)
    args = normal(args)
    half = halved(loss)
    jax.grad(half)(*args)
    assert compilations
    compilations.clear()
    jax.grad(half)(*args)
    assert not compilations


def test_edited_layers_are_freed():
    def freed():
        weight = jnp.ones((WIDTH, 12))
        run = jax.checkpoint(lambda x: layer(x, weight))
        loss = lambda w: jnp.sum(run(jnp.ones((WORDS, 13)) @ w))  # noqa: E731
        jax.make_jaxpr(jax.grad(halved(loss)))(jnp.ones((13, WIDTH)))
        return weakref.ref(run)

    ref = freed()
    jax.clear_caches()
    gc.collect()
    assert ref() is None


# -- diagnostics


def test_diagnostics_name_lines_inside_checkpointed_layers():
    def failing(x, w):
        return jnp.log(x @ w - 1e6) @ w.T

    loss, *args = model(functools.partial(unrolled, layer=jax.checkpoint(failing)))
    args = normal(args)
    assert "jnp.log(x @ w - 1e6)" in str(first_nonfinite(halved(loss), *args))
    report, plain = (
        precision_report(jax.grad(half), *args) for half in (halved(loss), ols.autocast(loss, BF16))
    )
    assert report["bfloat16"].count == plain["bfloat16"].count
    assert report.keys() == {"bfloat16"}


# -- who is harmed


def moved(c, w):
    """Move coordinates by a network that sees their distances."""
    distances = jnp.sin(c[:, None] - c[None]).reshape(16, -1)[:, :32]
    return c + jnp.tanh(distances @ w)[:, :8] / 10


def of_coordinates(**options):
    step = jax.checkpoint(moved, **options)

    def loss(ws, c):
        c = lax.scan(lambda c, w: (step(c, w), None), c, ws)[0]
        return jnp.mean(jnp.cos(c[:, None] - c[None]))

    return loss


def error_at(offset, half, **options):
    ws, c = normal((shape(5, 32, 32), shape(16, 8)))
    loss, args = of_coordinates(**options), (ws / 6, c + offset)
    return error(gradient(half(loss), *args), gradient(loss, *args))


@pytest.mark.slow
def test_coordinates_far_from_zero_need_another_policy():
    plain = lambda loss: ols.autocast(loss, BF16)  # noqa: E731
    assert error_at(1000.0, halved) > 0.5
    assert error_at(1000.0, plain) < 0.05
    assert error_at(1000.0, halved, policy=everything) < 0.05


def test_float16_needs_bfloat16_beyond_its_range():
    def layers(x, ws):
        return scanned(x * 1e5, ws, jax.checkpoint(lambda x, w: layer(x / 1e5, w) * 1e5)) / 1e5

    loss, *args = model(layers)
    args = normal(args)
    args[0]["layers"] /= 6

    def is_finite(checkpoint_dtype):
        return ols.all_finite(gradient(halved(loss, F16, checkpoint_dtype), *args))

    assert [bool(is_finite(dtype)) for dtype in (None, F16, BF16)] == [True, False, True]


@pytest.mark.slow
def test_gradients_of_a_deep_transformer_are_as_exact_as_without_it():
    width, words, tokens = 32, 16, 64

    def norm(x):
        y = x.astype(F32)
        return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    def block(x, w):
        q, k, v = (norm(x) @ w[name] for name in ("q", "k", "v"))
        scores = (jnp.einsum("bqd,bkd->bqk", q, k) / width**0.5).astype(F32)
        x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores).astype(x.dtype), v) @ w["o"]
        return x + jax.nn.silu(norm(x) @ w["up"]) @ w["down"]

    def loss(params, ids):
        x = params["embed"][ids]
        x = scanned(x, params["blocks"], jax.checkpoint(block))
        logits = (norm(x) @ params["head"]).astype(F32)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    def by_hand(params, ids):
        return loss(ols.cast(params, BF16), ids)

    square = {name: shape(12, width, width) for name in "qkvo"}
    blocks = square | {"up": shape(12, width, 64), "down": shape(12, 64, width)}
    params = normal({"embed": shape(tokens, width), "blocks": blocks, "head": shape(width, tokens)})
    params = jax.tree.map(lambda x: x / 6, params)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, tokens, (4, words)))
    exact, *others = (
        jnp.concatenate([x.ravel() for x in jax.tree.leaves(gradient(fun, params, ids))])
        for fun in (loss, ols.autocast(loss, BF16), halved(loss), by_hand)
    )
    plain, half, hand = (error(other, exact) for other in others)
    assert half < min(1.1 * plain, hand), (half, plain, hand)
