"""Whatever is public works with whatever else is public, or is refused with the remedy.

A program takes twelve steps: two overflow, two have a loss that spikes, and training is saved and
goes on after the sixth. The oracle is the bare optimizer of Optax in float32, on the steps that are
to be applied. The gradients are given numbers, and the loss is a given number too, so that a skip
and the rounding of a parameter change no later gradient.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_checkpoints import FORMATS

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.flax import DynamicScale, TrainState
from optax_lossscale.keras import loss_scale_optimizer

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quickly_compiled")]

GOOD, OVERFLOW, SPIKE = range(3)
KINDS = [GOOD, GOOD, GOOD, OVERFLOW, SPIKE, GOOD, GOOD, GOOD, OVERFLOW, SPIKE, GOOD, GOOD]
SAVED_AFTER = 6
START = {
    "encoder": {"w": jnp.tile(jnp.array([0.5, -1.0, 2.0, 0.25]), 1024)},
    "head": {"w": jnp.array([1.0, -0.5]), "b": jnp.array(0.5)},
}
SIZES = jnp.array([0.25, 0.5, -0.5, 1.0, -1.0])


def batch(step):
    """Return what the gradients are, and the loss."""
    keys = iter(jax.random.split(jax.random.key(step), 3))
    x = jax.tree.map(lambda p: jax.random.choice(next(keys), SIZES, p.shape), START)
    if KINDS[step] == OVERFLOW:
        x["head"]["w"] = x["head"]["w"].at[1].set(jnp.inf)
    return x, jnp.float32(1000 if KINDS[step] == SPIKE else 1 + step % 2 / 2)


BATCHES = [batch(step) for step in range(len(KINDS))]


def loss_fn(params, x, loss):
    """Return `loss`, whose gradient is `x`."""
    products = jax.tree.map(lambda p, x: (p - jax.lax.stop_gradient(p)) * x, params, x)
    return sum(jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(products)) + loss


# The features. A program is made of the defaults and of what two features change.


@dataclasses.dataclass(frozen=True)
class Program:
    """What a training program uses."""

    holder: str = "plain"  # what holds parameters and the optimizer's state, and takes a step
    wrap: str = "with_loss_scaling"  # or Keras' optimizer
    rules: tuple[Any, ...] = ()
    half: Any = None  # the dtype of the parameters, whose masters are kept; bfloat16: as remainders
    two_bytes: bool = False  # whether the optimizer's state is stored in bfloat16
    inner: tuple[str, ...] = ()  # wrappers of Optax, from the inside
    compute_dtype: bool = False  # whether the model computes in float16
    axis_name: bool = False  # whether it runs in `shard_map`
    sharded: bool = False  # whether parameters are sharded
    formats: tuple[str, ...] = ()  # in which it is saved and restored, one after the other
    read: tuple[str, ...] = ()  # what reads the optimizer's state after each step


class Twice:
    def init(self, params):
        del params
        return jnp.zeros((), jnp.int32)

    def measure(self, grads, params, *, value, **_):
        del grads, params
        return value

    def judge(self, state, measure):
        skip = (measure > 100) & (state < 2)
        return skip, state + skip


def above(grads, params, *, value, **_):
    del grads, params
    return value > 100


RULE = ols.Spike(window=4, warmup=2)
FEATURES: dict[str, dict[str, Any]] = {
    "TrainState": {"holder": "TrainState"},
    "nnx.Optimizer": {"holder": "nnx"},
    "Equinox": {"holder": "Equinox"},
    "DynamicScale": {"holder": "DynamicScale"},
    "loss_scale_optimizer": {"wrap": "keras"},
    "loss_scale_optimizer with decay and EMA": {"wrap": "keras with decay and EMA"},
    "skip_if=function": {"rules": (above,)},
    "skip_if=object": {"rules": (Twice(),)},
    "skip_if=Spike": {"rules": (RULE,)},
    "skip_if=tuple": {"rules": (above, RULE)},
    "masters": {"half": jnp.float16},
    "masters with remainders": {"half": jnp.bfloat16},
    "state in two bytes": {"two_bytes": True},
    "MultiSteps": {"inner": ("MultiSteps",)},
    "masked": {"inner": ("masked",)},
    "partition": {"inner": ("partition",)},
    "inject_hyperparams": {"inner": ("inject_hyperparams",)},
    "schedule_free": {"inner": ("schedule_free",)},
    "compute_dtype with keep": {"compute_dtype": True},
    "axis_name": {"axis_name": True},
    "sharded parameters": {"sharded": True},
    "checkpoints": {"formats": ("orbax", "flax", "pickle")},
    "what reads the state": {"read": ("metrics", "health")},
    "master_weights": {"read": ("master_weights",), "half": jnp.float16},
}


def program(*features):
    """Return the program with these features: tuples are joined, all else is replaced."""
    settings: dict[str, Any] = {}
    for name in features:
        for key, value in FEATURES[name].items():
            known = settings.get(key)
            joined = (*known, *value) if isinstance(known, tuple) else value
            settings[key] = known if key == "half" and known is not None else joined
    return Program(**settings)


# One of two that do the same thing in their own way.
ALTERNATIVES = [
    {"TrainState", "nnx.Optimizer", "Equinox", "DynamicScale"},
    {"loss_scale_optimizer", "loss_scale_optimizer with decay and EMA"},
    {"masters", "masters with remainders"},
]


# What takes a step. Each is written as its own page of the documentation shows it.


class Plain:
    """Parameters in a dict, and `tx.update`."""

    def __init__(self, program, tx):
        self.program, self.tx = program, tx

    def prefix(self, encoder, head):
        return {"encoder": encoder, "head": head}

    def initial(self):
        return ols.cast(START, self.program.half or jnp.float32)

    def start(self):
        params = self.initial()
        return params, self.tx.init(params)

    def value_and_grad(self, fun, **kwargs):
        if self.program.compute_dtype:
            kwargs |= {"compute_dtype": jnp.float16, "keep": lambda path: "'head'" in path}
        return ols.value_and_grad(fun, **kwargs)

    def step(self, carry, x, loss, mean):
        params, opt_state = carry
        loss, grads = self.value_and_grad(loss_fn)(opt_state, params, x, loss)
        updates, opt_state = self.tx.update(mean(grads), opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    def params(self, carry):
        return carry[0]

    def opt_state(self, carry):
        return carry[1]

    def parameters(self, carry):
        """Return the parameters as `master_weights` takes them."""
        return self.params(carry)

    def saved(self, carry):
        return carry

    def restored(self, carry, tree):
        del carry
        return tree


class Linen(Plain):
    """Our `TrainState`, which wraps the optimizer."""

    def start(self):
        return TrainState.create(
            apply_fn=loss_fn,
            params=self.initial(),
            tx=self.tx,
            loss_scale=POLICY,
            skip_if=self.program.rules,
            axis_name="i" if self.program.axis_name else None,
        )

    def step(self, carry, x, loss, mean):
        loss, grads = self.value_and_grad(carry.apply_fn)(carry, carry.params, x, loss)
        return carry.apply_gradients(grads=mean(grads), value=loss)

    def params(self, carry):
        return carry.params

    def opt_state(self, carry):
        return carry

    def saved(self, carry):
        return {"step": carry.step, "params": carry.params, "opt_state": carry.opt_state}

    def restored(self, carry, tree):
        return carry.replace(**tree)


class Group(nnx.Module):
    def __init__(self, arrays):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))


class NnxModel(nnx.Module):
    def __init__(self, params):
        self.encoder, self.head = Group(params["encoder"]), Group(params["head"])

    def tree(self):
        return {
            "encoder": {"w": self.encoder.w[...]},
            "head": {"w": self.head.w[...], "b": self.head.b[...]},
        }


class Nnx(Plain):
    def prefix(self, encoder, head):
        return nnx.State({"encoder": encoder, "head": head})

    def start(self):
        model = NnxModel(self.initial())
        optimizer = nnx.Optimizer(model, self.tx, wrt=nnx.Param)
        self.graph, state = nnx.split((model, optimizer))
        return state

    def step(self, carry, x, loss, mean):
        model, optimizer = nnx.merge(self.graph, carry)

        def nnx_loss_fn(model, x, loss):
            return loss_fn(model.tree(), x, loss)

        loss_and_grads = self.value_and_grad(nnx_loss_fn, transform=nnx.value_and_grad)
        loss, grads = loss_and_grads(optimizer.opt_state, model, x, loss)
        optimizer.update(model, mean(grads), value=loss)
        return nnx.state((model, optimizer))

    def params(self, carry):
        return nnx.merge(self.graph, carry)[0].tree()

    def opt_state(self, carry):
        return nnx.merge(self.graph, carry)[1].opt_state

    def parameters(self, carry):
        return nnx.state(nnx.merge(self.graph, carry)[0], nnx.Param)

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
    """An Equinox module, of which the floating-point arrays are optimized."""

    def prefix(self, encoder, head):
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

    def params(self, carry):
        return {"encoder": carry[0].encoder, "head": carry[0].head}

    def parameters(self, carry):
        return carry[0]

    def saved(self, carry):
        return dict(enumerate(jax.tree.leaves(carry)))  # Flax and Orbax know no modules

    def restored(self, carry, tree):
        leaves = [tree[key] for key in sorted(tree, key=int)]
        return jax.tree.unflatten(jax.tree.structure(carry), leaves)


class Scaled(Plain):
    """`DynamicScale`, which unscales the gradients, and an optimizer that scales nothing."""

    def start(self):
        return DynamicScale(scale=8.0), *super().start()

    def step(self, carry, x, loss, mean):
        del mean  # Flax's class averages
        scale, params, opt_state = carry

        def cast_loss_fn(params, x, loss):
            if self.program.compute_dtype:
                keep = lambda path: "'head'" in path  # noqa: E731
                params, x = (ols.cast(tree, jnp.float16, keep=keep) for tree in (params, x))
            return loss_fn(params, x, loss)

        axis_name = "i" if self.program.axis_name else None
        loss_and_grads = scale.value_and_grad(cast_loss_fn, axis_name=axis_name)
        scale, _, loss, grads = loss_and_grads(params, x, loss)
        updates, opt_state = self.tx.update(grads, opt_state, params, value=loss)
        return scale, optax.apply_updates(params, updates), opt_state

    def params(self, carry):
        return carry[1]

    def opt_state(self, carry):
        return carry[2]


HOLDERS = {
    "plain": Plain,
    "TrainState": Linen,
    "nnx": Nnx,
    "Equinox": Equinox,
    "DynamicScale": Scaled,
}
POLICY = ols.DynamicLossScale(8.0, growth_interval=100)
DECAY = {"learning_rate": 0.5, "weight_decay": 0.125, "use_ema": True}


def optimizer(program, prefix, *, half):
    """Return the optimizer of Optax, with masters if parameters are in half precision."""
    tx = optax.adam(0.5)
    if "inject_hyperparams" in program.inner:
        tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    if "schedule_free" in program.inner:
        tx = optax.contrib.schedule_free(tx, learning_rate=0.5)
    if program.two_bytes:
        tx = ols.with_bfloat16_state(tx)
    if half:
        tx = ols.with_master_weights(tx, remainders=program.half == jnp.bfloat16)
    if "masked" in program.inner:
        tx = optax.masked(tx, prefix(True, False))
    if "partition" in program.inner:
        tx = optax.partition(
            {"trained": tx, "frozen": optax.set_to_zero()}, prefix("trained", "frozen")
        )
    if "MultiSteps" in program.inner:
        tx = optax.MultiSteps(tx, 2)
    return tx


def guarded(program, inner):
    """Return the optimizer that the holder takes."""
    axis_name = "i" if program.axis_name else None
    if program.wrap.startswith("keras"):
        inner = ols.skip_if(inner, program.rules) if program.rules else inner
        decay = DECAY if "decay" in program.wrap else {}
        fixed = {"initial_scale": 1, "dynamic": False}
        scale = fixed if program.holder == "DynamicScale" else {"initial_scale": 8}
        return loss_scale_optimizer(inner, axis_name=axis_name, **scale, **decay)
    if program.holder == "TrainState":
        return inner
    if program.holder == "DynamicScale":
        return ols.skip_if(inner, program.rules, axis_name=axis_name)
    return ols.with_loss_scaling(inner, POLICY, skip_if=program.rules, axis_name=axis_name)


# What reads the state after each step, and what it must find.


def reads(name, opt_state, parameters, expected, *, atol):
    consecutive, total, weights = expected
    if name == "metrics":
        found = diagnostics.metrics(opt_state)
        assert found["applied"] == (consecutive == 0) == ols.applied(opt_state)
        assert (found["consecutive_skipped"], found["total_skipped"]) == (consecutive, total)
    if name == "health":
        diagnostics.check_health(opt_state)
        stalled = diagnostics.is_stalled(opt_state, max_consecutive_skipped=0)
        assert stalled == (consecutive > 0)
        if consecutive:
            with pytest.raises(diagnostics.LossScaleStalledError, match=f"{total} since"):
                diagnostics.check_health(opt_state, max_consecutive_skipped=0)
    if name == "master_weights":
        found = jax.tree.leaves(ols.master_weights(opt_state, parameters))
        for a, b in zip(found, jax.tree.leaves(weights), strict=True):
            assert a.dtype == jnp.float32 or np.array_equal(a, b.astype(a.dtype))
            rtol = 1e-2 if a.dtype != b.dtype else 1e-5
            np.testing.assert_allclose(np.float32(a), b, rtol=rtol, atol=atol)


# The oracle, and a run.


def skipped(program):
    return [kind == OVERFLOW or (kind == SPIKE and bool(program.rules)) for kind in KINDS]


def oracle(program):
    """Return the float32 parameters after each step, by the bare optimizer."""
    return trained(program.inner, "decay" in program.wrap, tuple(skipped(program)))


@functools.cache
def trained(inner, decays, skipped):
    tx = optimizer(Program(inner=inner), Plain(None, None).prefix, half=False)
    if decays:
        tx = loss_scale_optimizer(tx, initial_scale=1.0, dynamic=False, **DECAY)
    elif isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    update = jax.jit(tx.update)
    params, state, history = START, tx.init(START), []
    for (grads, _), skip in zip(BATCHES, skipped, strict=True):
        if not skip:
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        history.append(params)
    return history


def run(program, folder):
    """Train, and compare with the oracle after each step."""
    make = HOLDERS[program.holder]
    prefix = make(program, None).prefix
    holder = make(program, guarded(program, optimizer(program, prefix, half=bool(program.half))))
    carry = holder.start()
    if program.sharded:
        place = lambda a: NamedSharding(mesh(program), P("j") if a.shape == (4096,) else P())  # noqa: E731
        carry = jax.device_put(carry, jax.tree.map(place, carry))
    step = jax.jit(one_step(program, holder))
    consecutive = total = 0
    for i, (weights, skip) in enumerate(zip(oracle(program), skipped(program), strict=True)):
        carry = step(carry, *BATCHES[i])
        consecutive, total = (consecutive + 1, total + 1) if skip else (0, total)
        if i + 1 == SAVED_AFTER:
            for format_ in program.formats:
                save, restore = FORMATS[format_]
                save(folder / format_, tree := holder.saved(carry))
                carry = holder.restored(carry, restore(folder / format_, tree))
        for found, expected in zip(
            jax.tree.leaves(holder.params(carry)), jax.tree.leaves(weights), strict=True
        ):
            assert found.dtype == (program.half or jnp.float32)
            rounded = np.float32(expected.astype(found.dtype))
            # Moments in bfloat16 move a parameter by a little else, a wrong step by 0.5.
            near = {"atol": 0.05} if program.two_bytes else {"rtol": 1e-2, "atol": 1e-6}
            np.testing.assert_allclose(np.float32(found), rounded, **near)
        found = holder.opt_state(carry), holder.parameters(carry)
        for name in program.read:
            atol = 0.05 if program.two_bytes else 1e-6
            reads(name, *found, (consecutive, total, weights), atol=atol)
    assert total == sum(skipped(program))


def mesh(program):
    """Return a mesh of one axis for `shard_map`, and one over which parameters are sharded."""
    shape = 1 + program.axis_name, 1 + program.sharded
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, ("i", "j"), (AxisType.Auto,) * 2, devices=devices)


def one_step(program, holder):
    """Return a function of the carry and a batch."""
    if not program.axis_name:
        return functools.partial(holder.step, mean=lambda grads: grads)

    def on_each(carry, x, loss):
        # The two see different gradients and losses, of which the means are those of the batch.
        sign = jnp.where(jax.lax.axis_index("i") == 0, 1.0, -1.0)
        x = jax.tree.map(lambda x: x * (1 + sign), x)
        # In float32: XLA:CPU (jaxlib 0.10.2) aborts on a sum of bfloat16 over some axes of a mesh.
        mean = lambda grads: jax.lax.pmean(ols.cast(grads, jnp.float32), "i")  # noqa: E731
        return holder.step(carry, x, loss * (1 + sign / 8), mean=mean)

    everywhere = {"in_specs": P(), "out_specs": P()}
    return jax.shard_map(
        on_each, mesh=mesh(program), axis_names={"i"}, check_vma=False, **everywhere
    )


KERAS = ("loss_scale_optimizer", "loss_scale_optimizer with decay and EMA")
ANOTHER_GUARD = "must not decide about steps itself"
# The pairs that are refused, with the remedy.
REFUSED = {
    **{("TrainState", k): f"{ANOTHER_GUARD}.*TrainState.create.tx=inner, skip_if=" for k in KERAS},
    **{
        (keras, rule): f"{ANOTHER_GUARD}.*`with_loss_scaling.inner, skip_if=rule.`"
        for keras in KERAS
        for rule in FEATURES
        if rule.startswith("skip_if")
    },
    **{(keras, "MultiSteps"): "Use `gradient_accumulation_steps`" for keras in KERAS},
    **{
        (KERAS[1], masters): "`inner` must leave the updates of `with_master_weights` as they are"
        for masters in ("masters", "masters with remainders", "master_weights")
    },
    (
        "nnx.Optimizer",
        "compute_dtype with keep",
    ): "Give its layers the argument `dtype",
}


# Close to another feature: `make test-all` alone pairs them.
VARIANTS = {
    *("skip_if=function", "skip_if=object", "skip_if=Spike"),
    *("loss_scale_optimizer", "masters", "masked"),
}


def pairs():
    for pair in itertools.combinations_with_replacement(FEATURES, 2):
        if not any(len(set(pair) & group) > 1 for group in ALTERNATIVES):
            is_variant = len(set(pair)) > 1 and not VARIANTS.isdisjoint(pair)
            mark = pytest.mark.exhaustive if is_variant else pytest.mark.slow
            yield pytest.param(*pair, id=" with ".join(dict.fromkeys(pair)), marks=mark)


@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_every_pair_works_or_is_refused_with_the_remedy(one, other, tmp_path):
    chosen = program(*dict.fromkeys((one, other)))
    if (one, other) not in REFUSED:
        run(chosen, tmp_path)
        return
    with pytest.raises((TypeError, ValueError), match=REFUSED[one, other]):
        run(chosen, tmp_path)


@pytest.mark.slow
def test_a_wrong_decision_would_show(tmp_path, monkeypatch):
    never = lambda *_, **__: False  # noqa: E731
    monkeypatch.setitem(FEATURES, "never", {"rules": (never,)})
    with pytest.raises(AssertionError):  # the oracle skips every spike if there is a rule
        run(program("never"), tmp_path)
