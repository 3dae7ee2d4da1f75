"""Whatever is public works with whatever else is public, or is refused with the remedy.

A program takes twelve steps: two overflow, two have a loss that spikes, and training is saved and
goes on after the sixth. The oracle is the bare optimizer of Optax in float32, on the steps that are
to be applied. The gradients are given numbers, and the loss is a given number too, so that a skip
and the rounding of a parameter change no later gradient.
"""

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_formats import FORMATS
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.flax import TrainState
from optax_lossscale.keras import loss_scale_optimizer

pytestmark = pytest.mark.integration

GOOD, OVERFLOW, SPIKE = range(3)
KINDS = [GOOD, GOOD, GOOD, OVERFLOW, SPIKE, GOOD, GOOD, GOOD, OVERFLOW, SPIKE, GOOD, GOOD]
SAVED_AFTER = 6
SIZES = np.float32([0.25, 0.5, -0.5, 1.0, -1.0])


def initial_params():
    params = {
        "encoder": {"w": np.tile(np.float32([0.5, -1.0, 2.0, 0.25]), 1024)},
        "head": {"w": np.float32([1.0, -0.5]), "b": np.float32(0.5)},
    }
    return jax.tree.map(jnp.asarray, params)


@functools.cache
def batches():
    """Return what the gradients are, and the loss, of each step."""
    rng = np.random.default_rng(0)
    made = []
    for i, kind in enumerate(KINDS):
        x = jax.tree.map(lambda p: rng.choice(SIZES, p.shape), initial_params())
        if kind == OVERFLOW:
            x["head"]["w"][1] = np.inf
        loss = jnp.float32(1000 if kind == SPIKE else 1 + i % 2 / 2)
        made.append((jax.tree.map(jnp.asarray, x), loss))
    return made


IDENTITY = np.eye(64, dtype=np.float32)  # closed over, and so not a constant of the program


def loss_fn(params, x, loss):
    """Return `loss`, whose gradient is `x`."""

    def nothing(p, x):
        zeros = (p - jax.lax.stop_gradient(p)).astype(jnp.float32)
        if zeros.size == 4096:  # a layer, exact in half precision too
            zeros = (zeros.reshape(64, 64) @ IDENTITY).reshape(-1)
        return jnp.sum(zeros * x)

    return sum(jax.tree.leaves(jax.tree.map(nothing, params, x))) + loss


def above(grads, params, *, value, **_):
    del grads, params
    return value > 100


SPIKE_RULE = ols.Spike(window=4, warmup=2)
RULES = {
    "skip_if=function": (above,),
    "skip_if=Spike": (SPIKE_RULE,),
    "skip_if=tuple": (above, SPIKE_RULE),
}
KERAS = "loss_scale_optimizer", "loss_scale_optimizer with decay and EMA"
# Parameters in this dtype have masters, or are rounded; masters of bfloat16 are remainders.
HALVES = {
    "masters": jnp.float16,
    "masters with remainders": jnp.bfloat16,
    "master_weights": jnp.float16,
    "stochastic rounding": jnp.bfloat16,
}
INNER = "MultiSteps", "masked", "partition", "inject_hyperparams", "schedule_free"
SAVED_AS = "orbax", "flax", "pickle"  # one after the other


def rules(features):
    return tuple(rule for name in features for rule in RULES.get(name, ()))


def half(features):
    return next((HALVES[name] for name in features if name in HALVES), None)


def axis_name(features):
    return "i" if "axis_name" in features else None


# What takes a step. Each is written as its own page of the documentation shows it.


class Plain:
    """Parameters in a dict, and `tx.update`."""

    def __init__(self, features, tx):
        self.features, self.tx = features, tx

    @staticmethod
    def prefix(encoder, head):
        return {"encoder": encoder, "head": head}

    def initial(self):
        return ols.cast(initial_params(), half(self.features) or jnp.float32)

    def start(self):
        params = self.initial()
        return params, self.tx.init(params)

    def cast(self, fun):
        fun = ols.autocast(fun, jnp.float16) if "autocast" in self.features else fun
        return ols.scale_inside(fun, 64.0) if "scale_inside" in self.features else fun

    def value_and_grad(self, fun, **kwargs):
        return ols.value_and_grad(self.cast(fun), **kwargs)

    def step(self, carry, x, loss, mean):
        params, opt_state = carry
        loss, grads = self.value_and_grad(loss_fn)(opt_state, params, x, loss)
        updates, opt_state = self.tx.update(mean(grads), opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    def parts(self, carry):
        """Return the parameters and the optimizer's state."""
        return carry

    def saved(self, carry):
        return carry

    def restored(self, carry, tree):
        del carry
        return tree


class Linen(Plain):
    """Our `TrainState`, which wraps the optimizer."""

    def start(self):
        given = {"skip_if": rules(self.features), "axis_name": axis_name(self.features)}
        given |= {"params": self.initial(), "tx": self.tx, "loss_scale": POLICY}
        return TrainState.create(apply_fn=loss_fn, **given)

    def step(self, carry, x, loss, mean):
        loss, grads = self.value_and_grad(carry.apply_fn)(carry, carry.params, x, loss)
        return carry.apply_gradients(grads=mean(grads), value=loss)

    def parts(self, carry):
        return carry.params, carry

    def saved(self, carry):
        return {"step": carry.step, "params": carry.params, "opt_state": carry.opt_state}

    def restored(self, carry, tree):
        return carry.replace(**tree)


class NnxModel(nnx.Module):
    def __init__(self, params):
        for name, x in params.items():
            setattr(self, name, NnxModel(x) if isinstance(x, dict) else nnx.Param(x))


class Nnx(Plain):
    @staticmethod
    def prefix(encoder, head):
        return nnx.State({"encoder": encoder, "head": head})

    def start(self):
        model = NnxModel(self.initial())
        optimizer = nnx.Optimizer(model, self.tx, wrt=nnx.Param)
        self.graph, state = nnx.split((model, optimizer))
        return state

    def step(self, carry, x, loss, mean):
        model, optimizer = nnx.merge(self.graph, carry)

        def nnx_loss_fn(model, x, loss):
            return loss_fn(nnx.to_pure_dict(nnx.state(model, nnx.Param)), x, loss)

        loss_and_grads = self.value_and_grad(nnx_loss_fn, transform=nnx.value_and_grad)
        loss, grads = loss_and_grads(optimizer.opt_state, model, x, loss)
        optimizer.update(model, mean(grads), value=loss)
        return nnx.state((model, optimizer))

    def parts(self, carry):
        model, optimizer = nnx.merge(self.graph, carry)
        return nnx.state(model, nnx.Param), optimizer.opt_state

    def saved(self, carry):
        return nnx.to_pure_dict(carry)

    def restored(self, carry, tree):
        nnx.replace_by_pure_dict(carry, tree)
        return carry


class EquinoxModel(eqx.Module):
    encoder: Any
    head: Any
    activation: Callable[..., Any] = eqx.field(default=jax.nn.relu)


class Equinox(Plain):
    """An Equinox module. Its floating-point arrays are optimized."""

    @staticmethod
    def prefix(encoder, head):
        return EquinoxModel(encoder, head, None)

    def start(self):
        model = EquinoxModel(**self.initial())
        params, self.static = eqx.partition(model, eqx.is_inexact_array)
        return params, self.tx.init(params)

    def step(self, carry, x, loss, mean):
        params, opt_state = carry

        def equinox_loss_fn(model, x, loss):
            assert model.activation is jax.nn.relu
            return loss_fn({"encoder": model.encoder, "head": model.head}, x, loss)

        transform = eqx.filter_value_and_grad
        loss_and_grads = self.value_and_grad(equinox_loss_fn, transform=transform)
        model = eqx.combine(params, self.static)
        loss, grads = loss_and_grads(opt_state, model, x, loss)
        updates, opt_state = self.tx.update(mean(grads), opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    def saved(self, carry):
        return dict(enumerate(jax.tree.leaves(carry)))  # Flax and Orbax know no modules

    def restored(self, carry, tree):
        leaves = [tree[key] for key in sorted(tree, key=int)]
        return jax.tree.unflatten(jax.tree.structure(carry), leaves)


HOLDERS = {"TrainState": Linen, "nnx.Optimizer": Nnx, "Equinox": Equinox}
POLICY = ols.DynamicLossScale(8.0, growth_interval=100)
DECAY = {"learning_rate": 0.5, "weight_decay": 0.125, "use_ema": True}


def optimizer(features, prefix):
    """Return the optimizer of Optax, with masters if parameters are in half precision."""
    tx = optax.adam(0.5)
    if "inject_hyperparams" in features:
        tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    if "schedule_free" in features:
        tx = optax.contrib.schedule_free(tx, learning_rate=0.5)
    if "state in two bytes" in features:
        tx = ols.with_bfloat16_state(tx)
    if "stochastic rounding" in features:
        tx = ols.with_stochastic_rounding(tx)
    elif half(features):
        tx = ols.with_master_weights(tx, remainders=half(features) == jnp.bfloat16)
    if "masked" in features:
        tx = optax.masked(tx, prefix(True, False))
    if "partition" in features:
        groups = {"trained": tx, "frozen": optax.set_to_zero()}
        tx = optax.partition(groups, prefix("trained", "frozen"))
    if "MultiSteps" in features:
        tx = optax.MultiSteps(tx, 2)
    return tx


def guarded(features, inner):
    """Return the optimizer that the holder takes."""
    given = {"axis_name": axis_name(features)}
    if keras := set(KERAS) & set(features):
        inner = ols.with_skipping(inner, rules(features)) if rules(features) else inner
        decay = DECAY if KERAS[1] in keras else {}
        return loss_scale_optimizer(inner, **given, initial_scale=8, **decay)
    if "TrainState" in features:
        return inner
    return ols.with_loss_scaling(inner, POLICY, skip_if=rules(features), **given)


@functools.cache
def oracle(features, skips):
    """Return the float32 parameters after each step, by the bare optimizer."""
    tx = optimizer(features, Plain.prefix)
    if KERAS[1] in features:
        tx = loss_scale_optimizer(tx, initial_scale=1.0, dynamic=False, **DECAY)
    elif isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    update = jax.jit(tx.update)
    params = initial_params()
    state, history = tx.init(params), []
    for (grads, _), skip in zip(batches(), skips, strict=True):
        if not skip:
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        history.append(jax.tree.leaves(params))
    return history


def skip_checkpoints_of_a_mesh(features):
    has_mesh = not {"axis_name", "sharded parameters"}.isdisjoint(features)
    if has_mesh and "checkpoints" in features and jax.version.__version_info__ < (0, 8):
        pytest.skip("with jax 0.7, Orbax 0.12 enters the mesh of sharded arrays, and leaves it set")


def run(features, folder):
    """Train, and compare with the oracle after each step."""
    skip_checkpoints_of_a_mesh(features)
    make = next((HOLDERS[name] for name in features if name in HOLDERS), Plain)
    holder = make(features, guarded(features, optimizer(features, make.prefix)))
    carry = holder.start()
    if "sharded parameters" in features:
        place = lambda a: NamedSharding(mesh(features), P("j") if a.shape == (4096,) else P())  # noqa: E731
        carry = jax.device_put(carry, jax.tree.map(place, carry))
    step = jax.jit(one_step(features, holder))
    skips = tuple(k == OVERFLOW or (k == SPIKE and bool(rules(features))) for k in KINDS)
    seen_by_oracle = tuple(name for name in features if name in (*INNER, KERAS[1]))
    # Moments in bfloat16 move a parameter by a little else, a wrong step by 0.5.
    atol, rtol = (0.05, 0) if "state in two bytes" in features else (1e-6, 1e-2)
    if "stochastic rounding" in features:  # by up to a bfloat16 step in each of ten
        atol, rtol = 0.125, 0.02
    consecutive = total = 0
    for i, (weights, skip) in enumerate(zip(oracle(seen_by_oracle, skips), skips, strict=True)):
        carry = step(carry, *batches()[i])
        consecutive, total = (consecutive + 1, total + 1) if skip else (0, total)
        if i + 1 == SAVED_AFTER and "checkpoints" in features:
            for name in SAVED_AS:
                save, restore = FORMATS[name]
                save(folder / name, tree := holder.saved(carry))
                carry = holder.restored(carry, restore(folder / name, tree))
        params, opt_state = holder.parts(carry)
        for found, expected in zip(jax.tree.leaves(params), weights, strict=True):
            assert found.dtype == (half(features) or jnp.float32)
            rounded = np.float32(expected.astype(found.dtype))
            np.testing.assert_allclose(np.float32(found), rounded, rtol=rtol, atol=atol)
        if "what reads the state" in features:
            assert_read(opt_state, consecutive, total)
        if "master_weights" in features:
            found = jax.tree.leaves(ols.master_weights(opt_state, params))
            for a, b in zip(found, weights, strict=True):
                assert a.dtype == jnp.float32 or np.array_equal(a, b.astype(a.dtype))
                near = 1e-2 if a.dtype != b.dtype else 1e-5
                np.testing.assert_allclose(np.float32(a), b, rtol=near, atol=atol)


def assert_read(opt_state, consecutive, total):
    found = diagnostics.metrics(opt_state)
    assert found["applied"] == (consecutive == 0) == ols.applied(opt_state)
    assert (found["consecutive_skipped"], found["total_skipped"]) == (consecutive, total)
    diagnostics.check_health(opt_state)
    assert diagnostics.is_stalled(opt_state, max_consecutive_skipped=0) == (consecutive > 0)
    if consecutive:
        with pytest.raises(diagnostics.LossScaleStalledError, match=f"{total} since"):
            diagnostics.check_health(opt_state, max_consecutive_skipped=0)


def mesh(features):
    """Return a mesh of one axis for `shard_map`, and one over which parameters are sharded."""
    shape = 1 + ("axis_name" in features), 1 + ("sharded parameters" in features)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, ("i", "j"), (AxisType.Auto,) * 2, devices=devices)


def one_step(features, holder):
    """Return a function of the carry and a batch."""
    if not axis_name(features):
        return functools.partial(holder.step, mean=lambda grads: grads)

    def on_each(carry, x, loss):
        # The two see different gradients and losses. Their means are the gradients and loss given.
        sign = jnp.where(jax.lax.axis_index("i") == 0, 1.0, -1.0)
        x = jax.tree.map(lambda x: x * (1 + sign), x)
        # In float32: XLA:CPU (jaxlib 0.10.2) aborts on a sum of bfloat16 over some axes of a mesh.
        mean = lambda grads: jax.lax.pmean(ols.cast(grads, jnp.float32), "i")  # noqa: E731
        return holder.step(carry, x, loss * (1 + sign / 8), mean=mean)

    options = {"in_specs": P(), "out_specs": P(), "axis_names": {"i"}, "check_vma": False}
    return jax.shard_map(on_each, mesh=mesh(features), **options)


FEATURES = [
    *(*HOLDERS, *KERAS, *RULES, "masters", "masters with remainders", *INNER),
    *("stochastic rounding", "state in two bytes"),
    *("autocast", "scale_inside", "axis_name", "sharded parameters", "checkpoints"),
    *("what reads the state", "master_weights"),
]
# One of two that do the same thing in their own way.
ALTERNATIVES = [{*HOLDERS}, {*KERAS}, {"masters", "masters with remainders", "stochastic rounding"}]
ANOTHER_GUARD = "must not decide about steps itself"
# What is refused with what, and the remedy.
REFUSED = [
    (["TrainState"], KERAS, f"{ANOTHER_GUARD}.*TrainState.create.tx=inner, .*skip_if="),
    (KERAS, RULES, f"{ANOTHER_GUARD}.*`with_loss_scaling.inner, skip_if=rule.`"),
    (KERAS, ["MultiSteps"], "Use `gradient_accumulation_steps`"),
    (KERAS[1:], HALVES, "`inner` must not change the updates of `with_"),
    (["stochastic rounding"], ["schedule_free"], "with_master_weights.inner, remainders=True"),
    (["masters", "master_weights"], ["scale_inside"], "float16 arguments, .* float32 or bfloat16"),
    (["stochastic rounding"], ["master_weights"], "exactly one MasterWeightsState, got 0"),
]


def refusal(one, other):
    """Return the message with which a pair is refused, or None if it works."""
    pairs = ((one, other), (other, one))
    found = (text for ones, others, text in REFUSED for a, b in pairs if a in ones and b in others)
    return next(found, None)


def all_pairs():
    """Return all pairs of features, and each feature with itself."""
    pairs = itertools.combinations_with_replacement(FEATURES, 2)
    return [pair for pair in pairs if not any(len({*pair} & group) > 1 for group in ALTERNATIVES)]


def groups(most=10):
    """Yield groups of features that work together, such that at least one contains each pair."""
    left = dict.fromkeys(pair for pair in all_pairs() if refusal(*pair) is None)
    work = {*left}
    while left:
        group = {*next(iter(left))}
        while len(group) < most:
            fitting = [
                pairs
                for name in FEATURES
                if name not in group and (pairs := pairs_within(group | {name})) <= work
            ]
            best = max(fitting, key=lambda pairs: len(pairs & left.keys()), default=set())
            if not best & left.keys():
                break
            group = {name for pair in best for name in pair}
        for pair in pairs_within(group):
            left.pop(pair, None)
        yield tuple(sorted(group, key=FEATURES.index))


def pairs_within(group):
    in_order = sorted(group, key=FEATURES.index)
    return {*itertools.combinations_with_replacement(in_order, 2)}


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize("features", list(groups()), ids=" with ".join)
def test_whatever_is_public_works_with_whatever_else_is(features, tmp_path):
    run(features, tmp_path)


def each_pair():
    for pair in all_pairs():
        mark = pytest.mark.slow if refusal(*pair) else pytest.mark.exhaustive
        yield pytest.param(*pair, id=" with ".join(dict.fromkeys(pair)), marks=mark)


@pytest.mark.each_case
@pytest.mark.parametrize(("one", "other"), list(each_pair()))
def test_every_pair_works_or_is_refused_with_the_remedy(one, other, tmp_path):
    message = refusal(one, other)
    error = pytest.raises((TypeError, ValueError), match=message) if message else nullcontext()
    with error:
        run(tuple(dict.fromkeys((one, other))), tmp_path)
