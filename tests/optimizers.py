"""Every optimizer of Optax, built from the names of its factory's parameters.

A name is the factory's path below `optax`, with any variant after a colon. New factories of Optax
enter the table automatically, or a test reports what is missing.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest


def real_params():
    """A matrix, a vector and a scalar, with negative zeros among them."""
    return {
        "w": jnp.array([[0.5, -0.0, -1.5, 2.0], [1.0, 0.25, -0.0, -0.75], [0.1, 0.2, 0.3, 0.4]]),
        "b": jnp.array([-0.0, 1.0, -2.0, 0.5]),
        "s": jnp.array(-0.0, jnp.float32),
    }


def loss(params, step):
    """Return the squared distance to a target that moves at each step."""

    def distance(leaf):
        target = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32) + step).reshape(leaf.shape)
        return jnp.sum(jnp.abs(leaf - target) ** 2)

    return sum(jax.tree.leaves(jax.tree.map(distance, params)))


mean_gradients = jax.grad(loss)


def gradients_per_example(params, step):
    return jax.vmap(mean_gradients, in_axes=(None, 0))(params, jnp.arange(3) + step)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An inner optimizer."""

    build: Callable  # builds it, and may warn that it is deprecated
    params: Callable = real_params
    grads: Callable = mean_gradients  # at `(params, step)`
    extra: tuple[str, ...] = ()  # the extra arguments that its `update` requires

    def make(self):
        """Return the argument of `with_loss_scaling`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return self.build()

    def plain(self):
        """Return the optimizer without loss scaling, as a transformation with extra arguments."""
        inner = self.make()
        if isinstance(inner, optax.MultiSteps):
            inner = inner.gradient_transformation()
        return optax.with_extra_args_support(inner)

    def extra_args(self, step, *, value, grad):
        """Return the extra arguments of `update`: `grad` is the gradients that it is given."""
        available = {
            "value": value,
            "grad": grad,
            "value_fn": functools.partial(loss, step=step),
            "obj_fn": functools.partial(loss, step=step),
            "grad_fn": lambda params, i: mean_gradients(params, step + i),
        }
        return {name: available[name] for name in self.extra}


ADAM = optax.adam(0.1)
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 20)
ADVERSARY = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
FREEZE = {"w": True, "b": False, "s": False}

# The arguments of the factories, required or not, by the names of their parameters.
ARGUMENTS = {
    **dict.fromkeys(("inner", "tx", "optimizer", "base_optimizer", "fast_optimizer"), ADAM),
    **dict.fromkeys(("clipping", "eta", "learning_rate", "noise_multiplier", "weight_decay"), 0.1),
    **dict.fromkeys(("gamma", "max_delta", "max_norm", "slow_step_size", "threshold"), 0.5),
    **dict.fromkeys(("k", "rank", "sync_period", "update_interval", "update_proj_gap"), 2),
    "adv_optimizer": ADVERSARY,
    "decay": 0.9,
    "f": lambda g, _: jax.tree.map(jnp.tanh, g),
    "freeze_mask": FREEZE,
    "inner_factory": optax.adam,
    "key": 0,
    "l2_norm_clip": 1.0,
    "mask": lambda params: jax.tree.map(lambda p: p.ndim > 0, params),
    "max_consecutive_errors": 3,
    "measure": optax.tree.norm,
    "measure_name": "norm",
    "memory_size": 3,
    "param_labels": lambda params: jax.tree.map(lambda p: "ab"[p.ndim == 2], params),
    "patience": 1,
    "should_transform_fn": lambda step: step % 2 == 0,
    "step_size": -0.1,
    "transforms": {"a": ADAM, "b": optax.sgd(0.1, momentum=0.9)},
    "warmup_steps": 2,
}

# Variants that the names of the parameters do not give.
VARIANTS = {
    "adafactor: factored": lambda: optax.adafactor(
        SCHEDULE, min_dim_size_to_factor=2, momentum=0.9
    ),
    "adam: mu_dtype": lambda: optax.adam(SCHEDULE, mu_dtype=jnp.bfloat16, nesterov=True),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(SCHEDULE)),
    "contrib.dog": lambda: build(optax.contrib.dog),
    "contrib.dowg": lambda: build(optax.contrib.dowg),
    "contrib.dpsgd": lambda: optax.contrib.dpsgd(0.1, 1.0, 0.1, seed=0, momentum=0.9),
    "contrib.sam: opaque": lambda: optax.contrib.sam(ADAM, ADVERSARY, opaque_mode=True),
    "freeze": lambda: optax.freeze(FREEZE),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(SCHEDULE, b1=0.8),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(SCHEDULE),
    "lbfgs: backtracking": lambda: optax.lbfgs(
        memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(10, store_grad=True)
    ),
    "lbfgs: learning rate": lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None),
    "lookahead: reset_state": lambda: optax.lookahead(ADAM, 2, 0.5, reset_state=True),
    "MultiSteps": lambda: optax.MultiSteps(ADAM, 2),
    "MultiSteps: transformation": lambda: optax.MultiSteps(
        ADAM, lambda step: 1 + step, use_grad_mean=False
    ).gradient_transformation(),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", ADAM)),
    "polyak_sgd: sps+": lambda: optax.polyak_sgd(variant="sps+"),
    "radam": lambda: optax.radam(0.1, b2=0.9, threshold=4.0),
    "rmsprop: centered": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9, nesterov=True),
    "rmsprop: centered, corrected": lambda: optax.rmsprop(0.1, centered=True, bias_correction=True),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
    ),
    "scale_by_distance_over_gradients": lambda: build(optax.scale_by_distance_over_gradients),
    "scale_by_param_block_norm": lambda: build(optax.scale_by_param_block_norm),
}

# Exceptions to the defaults. A variant without an entry uses the factory's.
LINE_SEARCH = {"extra": ("value", "grad", "value_fn")}
VALUE = {"extra": ("value",)}
PROBLEMS = {
    "contrib.differentially_private_aggregate": {"grads": gradients_per_example},
    "contrib.dpsgd": {"grads": gradients_per_example},
    "contrib.momo": VALUE,
    "contrib.momo_adam": VALUE,
    "contrib.reduce_on_plateau": VALUE,
    "contrib.sam: opaque": {"extra": ("grad_fn",)},
    "contrib.sophia": {"extra": ("obj_fn",)},
    "contrib.split_real_and_imaginary": {
        "params": lambda: {"z": jnp.array([complex(-0.0, -0.0), 1 - 2j]), "b": jnp.array([-0.0])}
    },
    "keep_params_nonnegative": {"params": lambda: jax.tree.map(jnp.abs, real_params())},
    "lbfgs": LINE_SEARCH,
    "lookahead": {
        "params": lambda: optax.LookaheadParams.init_synced(real_params()),
        "grads": lambda params, step: mean_gradients(params.fast, step),
    },
    "polyak_sgd": VALUE,
    "scale_by_backtracking_linesearch": LINE_SEARCH,
    # DoG promotes ranks: an error under our settings, or a scalar that becomes a vector.
    "scale_by_distance_over_gradients": {"params": lambda: {"b": real_params()["b"]}},
    "sm3": {"params": lambda: real_params() | {"s": None}},  # takes maxima over slices
}

# `monitor` has nothing to keep before its first update, and `measure_with_ema` returns nothing to
# apply. `snapshot`, in the table, covers measurements.
NOT_TO_BE_SKIPPED = {"monitor", "measure_with_ema"}


def factories():
    return {
        prefix + name: member
        for prefix, module in (("", optax), ("contrib.", optax.contrib))
        for name, member in inspect.getmembers(module, inspect.isfunction)
        if "GradientTransformation" in str(inspect.signature(member).return_annotation)
        and not name.startswith("_")
    }


def build(factory):
    parameters = inspect.signature(factory).parameters
    return factory(**{name: ARGUMENTS[name] for name in parameters if name in ARGUMENTS})


def optimizers():
    """Yield an entry for each factory except the parts of the aliases."""
    by_name = {
        name: functools.partial(build, factory)
        for name, factory in factories().items()
        if "scale_by_" not in name and name not in NOT_TO_BE_SKIPPED
    }
    for name, make in (by_name | VARIANTS).items():
        factory = name.split(":")[0]
        with contextlib.suppress(AttributeError):  # Optax is older than the factory
            operator.attrgetter(factory)(optax)
            yield name, Optimizer(make, **PROBLEMS.get(name, PROBLEMS.get(factory, {})))


OPTIMIZERS = dict(optimizers())

# Where XLA:CPU fuses a product and a sum, it contracts them to one instruction with one rounding.
# The same optimizer can then differ by a few units in the last place between two programs. Bitwise
# comparisons therefore compile without fusion, and without LLVM's optimizations for speed.
UNFUSED = {"xla_backend_optimization_level": "0", "xla_disable_hlo_passes": "fusion"}


def spoil(grads, leaf, value):
    """Return the gradients, as NumPy arrays, with `value` as the last element of one leaf."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, grads))
    leaves[leaf % len(leaves)].flat[-1] = value
    return jax.tree.unflatten(treedef, leaves)


def tiers(kinds):
    """Return every optimizer's name: those of `kinds` in `make test`, the rest in `test-all`."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in kinds else pytest.mark.exhaustive)
        for name in OPTIMIZERS
    ]
