"""Every optimizer of Optax, one table: how it is made and what its `update` must be given.

A name is the factory's path below `optax`, with a variant behind a colon. No public factory of
Optax 0.2.8 is left out: what is not in the table is in `INSIDE` or in `NOT_TO_BE_SKIPPED`.
"""

import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax


def real_params():
    """A matrix, a vector and a scalar, with negative zeros among them."""
    return {
        "w": jnp.array([[0.5, -0.0, -1.5, 2.0], [1.0, 0.25, -0.0, -0.75], [0.1, 0.2, 0.3, 0.4]]),
        "b": jnp.array([-0.0, 1.0, -2.0, 0.5]),
        "s": jnp.array(-0.0, jnp.float32),
    }


def array_params():
    """Without the scalar, for SM3, which has no slices of it to take maxima over."""
    return {name: p for name, p in real_params().items() if p.ndim > 0}


def flat_params():
    """The vector alone, for DoG, which promotes ranks: an error under our settings, or a scalar
    parameter that becomes a vector.
    """
    return {name: p for name, p in real_params().items() if p.ndim == 1}


def complex_params():
    return {"z": jnp.array([complex(-0.0, -0.0), 1 - 2j, 0.5j]), "b": jnp.array([-0.0, 1.0])}


def nonnegative_params():
    return jax.tree.map(lambda p: jnp.where(p == 0, p, jnp.abs(p)), real_params())


def lookahead_params():
    return optax.LookaheadParams.init_synced(real_params())


def loss(params, step):
    """Squared distance to a target that moves from step to step."""

    def distance(leaf):
        target = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32) + step).reshape(leaf.shape)
        return jnp.sum(jnp.abs(leaf - target) ** 2)

    return sum(jax.tree.leaves(jax.tree.map(distance, params)))


def mean_gradients(params, step):
    return jax.grad(loss)(params, step)


def fast_gradients(params, step):
    """Lookahead's gradients have the structure of its fast params alone."""
    return jax.grad(loss)(params.fast, step)


def gradients_per_example(params, step):
    return jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, jnp.arange(3) + step)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An inner optimizer.

    Args:
      make: Builds it. What it returns is the argument of `with_loss_scaling`.
      extra: Names of the extra arguments that its `update` must be given.
      needs_params: Whether its `update` refuses `params=None`.
      params: Builds the params.
      grads: The gradients at `(params, step)`.
    """

    make: Callable
    extra: tuple[str, ...] = ()
    needs_params: bool = False
    params: Callable = real_params
    grads: Callable = mean_gradients

    def plain(self):
        """Return the optimizer without loss scaling, as a transformation with extra arguments."""
        inner = self.make()
        if isinstance(inner, optax.MultiSteps):
            inner = inner.gradient_transformation()
        return optax.with_extra_args_support(inner)

    def extra_args(self, step, *, value, grad):
        """Return the extra arguments of `update`; `value` and `grad` are in true units."""
        available = {
            "value": value,
            "grad": grad,
            "value_fn": functools.partial(loss, step=step),
            "obj_fn": functools.partial(loss, step=step),
            "grad_fn": lambda params, i: mean_gradients(params, step + i),
        }
        return {name: available[name] for name in self.extra}


def _deprecated(make):
    """Return `make` without the warning of Optax that it will go."""

    def make_silently():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return make()

    return make_silently


def _needs_params(make, **kwargs):
    return Optimizer(make, needs_params=True, **kwargs)


def _labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "rest", params)


def _mask(params):
    return jax.tree.map(lambda p: p.ndim > 0, params)


_SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 20)
_LINE_SEARCH = ("value", "grad", "value_fn")
_PER_EXAMPLE = {"grads": gradients_per_example}
_FREEZE = {"w": True, "b": False, "s": False}

OPTIMIZERS = {
    # Aliases.
    "adabelief": Optimizer(lambda: optax.adabelief(0.1)),
    "adabelief: nesterov": Optimizer(lambda: optax.adabelief(0.1, nesterov=True)),
    "adadelta": _needs_params(lambda: optax.adadelta(0.1, weight_decay=0.1)),
    "adafactor": _needs_params(lambda: optax.adafactor(0.1)),
    "adafactor: factored, momentum": _needs_params(
        lambda: optax.adafactor(_SCHEDULE, min_dim_size_to_factor=2, momentum=0.9)
    ),
    "adagrad": Optimizer(lambda: optax.adagrad(0.1)),
    "adam": Optimizer(lambda: optax.adam(0.1)),
    "adam: schedule": Optimizer(lambda: optax.adam(_SCHEDULE)),
    "adam: mu_dtype, nesterov": Optimizer(
        lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16, nesterov=True)
    ),
    "adamax": Optimizer(lambda: optax.adamax(0.1)),
    "adamaxw": _needs_params(lambda: optax.adamaxw(0.1)),
    "adamw": _needs_params(lambda: optax.adamw(0.1, weight_decay=0.1)),
    "adamw: mask": _needs_params(lambda: optax.adamw(_SCHEDULE, weight_decay=0.1, mask=_mask)),
    "adan": _needs_params(lambda: optax.adan(0.1, weight_decay=0.1)),
    "amsgrad": Optimizer(lambda: optax.amsgrad(0.1)),
    "fromage": _needs_params(lambda: optax.fromage(0.1)),
    "lamb": _needs_params(lambda: optax.lamb(0.1, weight_decay=0.1)),
    "lars": _needs_params(lambda: optax.lars(0.1, weight_decay=0.1)),
    "lbfgs": _needs_params(lambda: optax.lbfgs(memory_size=3), extra=_LINE_SEARCH),
    "lbfgs: backtracking": _needs_params(
        lambda: optax.lbfgs(
            memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(10, store_grad=True)
        ),
        extra=_LINE_SEARCH,
    ),
    "lbfgs: learning rate": _needs_params(lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None)),
    "lion": _needs_params(lambda: optax.lion(0.1)),
    "noisy_sgd": Optimizer(lambda: optax.noisy_sgd(0.1, key=0)),
    "novograd": _needs_params(lambda: optax.novograd(0.1)),
    "optimistic_adam": Optimizer(_deprecated(lambda: optax.optimistic_adam(0.1))),
    "optimistic_adam_v2": Optimizer(lambda: optax.optimistic_adam_v2(0.1)),
    "optimistic_gradient_descent": Optimizer(lambda: optax.optimistic_gradient_descent(0.1)),
    "polyak_sgd": Optimizer(optax.polyak_sgd, extra=("value",)),
    "polyak_sgd: sps+": Optimizer(lambda: optax.polyak_sgd(variant="sps+"), extra=("value",)),
    "radam": Optimizer(lambda: optax.radam(0.1, b2=0.9, threshold=4.0)),
    "rmsprop": Optimizer(lambda: optax.rmsprop(0.1)),
    "rmsprop: centered, momentum": Optimizer(
        lambda: optax.rmsprop(0.1, centered=True, momentum=0.9, nesterov=True)
    ),
    "rprop": Optimizer(lambda: optax.rprop(0.1)),
    "sgd": Optimizer(lambda: optax.sgd(0.1)),
    "sgd: nesterov": Optimizer(lambda: optax.sgd(_SCHEDULE, momentum=0.9, nesterov=True)),
    "sign_sgd": Optimizer(lambda: optax.sign_sgd(0.1)),
    "signum": Optimizer(lambda: optax.signum(0.1)),
    "sm3": Optimizer(lambda: optax.sm3(0.1), params=array_params),
    "yogi": Optimizer(lambda: optax.yogi(0.1)),
    # Single transformations.
    "adaptive_grad_clip": _needs_params(lambda: optax.adaptive_grad_clip(0.1)),
    "add_noise": Optimizer(lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(0))),
    "apply_every": Optimizer(lambda: optax.apply_every(2)),
    "centralize": Optimizer(optax.centralize),
    "clip": Optimizer(lambda: optax.clip(0.5)),
    "clip_by_block_rms": Optimizer(lambda: optax.clip_by_block_rms(0.5)),
    "clip_by_global_norm": Optimizer(lambda: optax.clip_by_global_norm(0.5)),
    "ema": Optimizer(lambda: optax.ema(0.9)),
    "ema: accumulator_dtype": Optimizer(lambda: optax.ema(0.9, accumulator_dtype=jnp.float16)),
    "freeze": Optimizer(lambda: optax.freeze(_FREEZE)),
    "identity": Optimizer(optax.identity),
    "keep_params_nonnegative": _needs_params(
        optax.keep_params_nonnegative, params=nonnegative_params
    ),
    "normalize_by_update_norm": Optimizer(optax.normalize_by_update_norm),
    "scale": Optimizer(lambda: optax.scale(-0.1)),
    "scale_by_backtracking_linesearch": _needs_params(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
        extra=_LINE_SEARCH,
    ),
    "scale_by_distance_over_gradients": _needs_params(
        optax.scale_by_distance_over_gradients, params=flat_params
    ),
    "scale_by_param_block_norm": _needs_params(optax.scale_by_param_block_norm),
    "set_to_zero": Optimizer(optax.set_to_zero),
    "snapshot": Optimizer(lambda: optax.snapshot("norm", optax.tree.norm)),
    "stateless": Optimizer(
        lambda: optax.stateless(lambda updates, _: jax.tree.map(jnp.tanh, updates))
    ),
    "stateless_with_tree_map": _needs_params(
        lambda: optax.stateless_with_tree_map(lambda g, p: g + 0.1 * p)
    ),
    "zero_nans": Optimizer(optax.zero_nans),
    # What is built around others.
    "apply_if_finite": Optimizer(lambda: optax.apply_if_finite(optax.adam(0.1), 3)),
    "chain": _needs_params(
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(_SCHEDULE), optax.ema(0.9))
    ),
    "conditionally_mask": Optimizer(
        lambda: optax.conditionally_mask(optax.adam(0.1), lambda step: step % 2 == 0)
    ),
    "conditionally_transform": Optimizer(
        lambda: optax.conditionally_transform(optax.adam(0.1), lambda step: step % 2 == 0)
    ),
    "flatten": Optimizer(lambda: optax.flatten(optax.adam(0.1))),
    "inject_hyperparams": Optimizer(
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=_SCHEDULE, b1=0.8)
    ),
    "inject_stateful_hyperparams": Optimizer(
        _deprecated(lambda: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=_SCHEDULE))
    ),
    "lookahead": _needs_params(
        lambda: optax.lookahead(optax.adam(0.1), 2, 0.5),
        params=lookahead_params,
        grads=fast_gradients,
    ),
    "lookahead: reset_state": _needs_params(
        lambda: optax.lookahead(optax.adam(0.1), 2, 0.5, reset_state=True),
        params=lookahead_params,
        grads=fast_gradients,
    ),
    "masked": Optimizer(lambda: optax.masked(optax.adam(0.1), _mask)),
    "MultiSteps": Optimizer(lambda: optax.MultiSteps(optax.adam(0.1), 2)),
    "MultiSteps: as a transformation, sum": Optimizer(
        lambda: optax.MultiSteps(
            optax.adam(0.1), lambda step: 1 + step, use_grad_mean=False
        ).gradient_transformation()
    ),
    "multi_transform": Optimizer(
        lambda: optax.multi_transform(
            {"matrix": optax.adam(0.1), "rest": optax.sgd(0.1, momentum=0.9)}, _labels
        )
    ),
    "named_chain": Optimizer(
        lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(0.1)))
    ),
    "partition": Optimizer(
        lambda: optax.partition({"matrix": optax.adam(0.1), "rest": optax.set_to_zero()}, _labels)
    ),
    "selective_transform": Optimizer(
        lambda: optax.selective_transform(optax.adam(0.1), freeze_mask=_FREEZE)
    ),
    "with_extra_args_support": Optimizer(
        lambda: optax.with_extra_args_support(optax.scale_by_adam())
    ),
    # Contributed.
    "contrib.acprop": _needs_params(lambda: optax.contrib.acprop(0.1)),
    "contrib.ademamix": _needs_params(lambda: optax.contrib.ademamix(0.1)),
    "contrib.adopt": Optimizer(lambda: optax.contrib.adopt(0.1)),
    "contrib.cocob": _needs_params(optax.contrib.cocob),
    "contrib.dadapt_adamw": _needs_params(optax.contrib.dadapt_adamw),
    "contrib.dog": _needs_params(optax.contrib.dog),
    "contrib.dowg": _needs_params(optax.contrib.dowg),
    "contrib.dpsgd": Optimizer(
        _deprecated(lambda: optax.contrib.dpsgd(0.1, 1.0, 0.1, seed=0, momentum=0.9)),
        **_PER_EXAMPLE,
    ),
    "contrib.galore": _needs_params(
        lambda: optax.contrib.galore(0.1, rank=2, update_proj_gap=2, weight_decay=0.1)
    ),
    "contrib.madgrad": _needs_params(lambda: optax.contrib.madgrad(0.1)),
    "contrib.mechanize": _needs_params(lambda: optax.contrib.mechanize(optax.adam(0.1))),
    "contrib.momo": _needs_params(optax.contrib.momo, extra=("value",)),
    "contrib.momo_adam": _needs_params(optax.contrib.momo_adam, extra=("value",)),
    "contrib.muon": _needs_params(lambda: optax.contrib.muon(0.1)),
    "contrib.prodigy": _needs_params(optax.contrib.prodigy),
    "contrib.reduce_on_plateau": Optimizer(
        lambda: optax.contrib.reduce_on_plateau(patience=1), extra=("value",)
    ),
    "contrib.sam": _needs_params(
        lambda: optax.contrib.sam(
            optax.adam(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
        )
    ),
    "contrib.sam: opaque": _needs_params(
        lambda: optax.contrib.sam(
            optax.adam(0.1),
            optax.chain(optax.contrib.normalize(), optax.sgd(0.1)),
            opaque_mode=True,
        ),
        extra=("grad_fn",),
    ),
    "contrib.schedule_free": _needs_params(
        lambda: optax.contrib.schedule_free(optax.adam(0.1, b1=0.0), 0.1)
    ),
    "contrib.schedule_free_adamw": _needs_params(
        lambda: optax.contrib.schedule_free_adamw(0.1, warmup_steps=2)
    ),
    "contrib.schedule_free_sgd": _needs_params(lambda: optax.contrib.schedule_free_sgd(0.1)),
    "contrib.simplified_ademamix": _needs_params(lambda: optax.contrib.simplified_ademamix(0.1)),
    "contrib.sophia": _needs_params(
        lambda: optax.contrib.sophia(0.1, update_interval=2), extra=("obj_fn",)
    ),
    "contrib.split_real_and_imaginary": Optimizer(
        lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.1)), params=complex_params
    ),
}

#: What the table holds inside another entry, which gives it its arguments.
INSIDE = {
    "scale_by_adadelta": "adadelta",
    "scale_by_adam": "adam",
    "scale_by_adamax": "adamax",
    "scale_by_adan": "adan",
    "scale_by_amsgrad": "amsgrad",
    "scale_by_belief": "adabelief",
    "scale_by_factored_rms": "adafactor",
    "scale_by_lbfgs": "lbfgs",
    "scale_by_lion": "lion",
    "scale_by_novograd": "novograd",
    "scale_by_optimistic_gradient": "optimistic_gradient_descent",
    "scale_by_param_block_rms": "adafactor",
    "scale_by_polyak": "polyak_sgd",
    "scale_by_radam": "radam",
    "scale_by_rms": "rmsprop",
    "scale_by_rprop": "rprop",
    "scale_by_rss": "adagrad",
    "scale_by_sm3": "sm3",
    "scale_by_stddev": "rmsprop",
    "scale_by_trust_ratio": "lamb",
    "scale_by_yogi": "yogi",
    "scale_by_zoom_linesearch": "lbfgs",
    "scale_by_learning_rate": "sgd",
    "scale_by_schedule": "sgd",
    "scale_by_sign": "sign_sgd",
    "add_decayed_weights": "adamw",
    "trace": "sgd",
    "contrib.scale_by_acprop": "contrib.acprop",
    "contrib.scale_by_ademamix": "contrib.ademamix",
    "contrib.scale_by_adopt": "contrib.adopt",
    "contrib.scale_by_cocob": "contrib.cocob",
    "contrib.scale_by_galore": "contrib.galore",
    "contrib.scale_by_madgrad": "contrib.madgrad",
    "contrib.scale_by_muon": "contrib.muon",
    "contrib.scale_by_simplified_ademamix": "contrib.simplified_ademamix",
    "contrib.normalize": "contrib.sam",
    "contrib.differentially_private_aggregate": "contrib.dpsgd",
    "contrib.hutchinson_estimator_diag_hessian": "contrib.sophia",
}

#: What cannot be skipped, nor carried through a scan, nor compiled once: the state of `monitor` has
#: no measurements before its first update, so that there is nothing to keep. Its `measure_with_ema`
#: returns no updates that could be applied. `snapshot`, in the table, measures too.
NOT_TO_BE_SKIPPED = {
    "monitor": lambda: optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    "measure_with_ema": lambda: optax.measure_with_ema(optax.tree.norm, 0.9),
}


def factory(name):
    """Return the factory of Optax that an entry of the table is called after, or None."""
    try:
        return operator.attrgetter(name.split(":")[0])(optax)
    except AttributeError:
        return None


def spoil(grads, leaf, value):
    """Return the gradients, as NumPy arrays, with `value` as the last element of one leaf."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, grads))
    leaves[leaf % len(leaves)].flat[-1] = value
    return jax.tree.unflatten(treedef, leaves)
