"""Two spike guards of other programs, reimplemented: which steps they skip, and at what cost.

Both remember the last losses and gradient norms, including those of skipped steps, and skip a step
whose loss or norm is more than six deviations above their mean. Their logging is left out here.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

WINDOW, SIGMAS = 128, 6.0


def maxtext(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """MaxText's guard. Its caller measures the norm, after clipping.

    AI-Hypercomputer/maxtext at e591f30c: `skip_step_on_spikes` in
    src/maxtext/optimizers/optimizers.py, with the settings of configs/base.yml.
    """

    def init(params: optax.Params) -> dict[str, Any]:
        return {
            "inner": inner.init(params),
            "losses": jnp.zeros(WINDOW),
            "norms": jnp.zeros(WINDOW),
            "count": jnp.int32(0),
            "is_skipped": jnp.bool_(False),
        }

    def update(grads: Any, state: Any, params: Any, *, loss: Any, grad_norm: Any = None) -> Any:
        count = state["count"]
        new = {"losses": state["losses"].at[count % WINDOW].set(loss), "norms": state["norms"]}
        is_spike = is_above(state["losses"], count, loss)
        if grad_norm is not None:
            new["norms"] = state["norms"].at[count % WINDOW].set(grad_norm)
            is_spike |= is_above(state["norms"], count, grad_norm)
        updates, new["inner"] = jax.lax.cond(
            is_spike,
            lambda: (jax.tree.map(jnp.zeros_like, grads), state["inner"]),
            lambda: inner.update(grads, state["inner"], params),
        )
        return updates, new | {"count": count + 1, "is_skipped": is_spike}

    return optax.GradientTransformationExtraArgs(init, update)


def is_above(past: jax.Array, count: jax.Array, value: jax.Array) -> jax.Array:
    """Return whether MaxText considers a value a spike, given `count` values before it."""
    number = jnp.minimum(count, WINDOW)
    is_valid = jnp.arange(WINDOW) < number
    mean = jnp.sum(jnp.where(is_valid, past, 0)) / jnp.maximum(number, 1)
    squares = jnp.sum(jnp.where(is_valid, (past - mean) ** 2, 0))
    deviation = jnp.sqrt(squares / jnp.maximum(number - 1, 1))
    return ~((count + 1 < WINDOW // 2) | (value - mean <= SIGMAS * deviation))


def levanter(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Levanter's guard, which multiplies the updates of a skipped step by zero.

    marin-community/marin at 303c88f2: `SkipStepConfig` in
    lib/levanter/src/levanter/optim/skipstep.py, with its defaults.
    """

    def init(params: optax.Params) -> dict[str, Any]:
        return {
            "inner": inner.init(params),
            "losses": jnp.zeros(WINDOW),
            "norms": jnp.zeros(WINDOW),
            "is_valid": jnp.zeros(WINDOW, bool),
            "place": jnp.int32(0),
            "count": jnp.int32(0),
        }

    def update(grads: Any, state: Any, params: Any, *, loss: Any) -> Any:
        now = {"losses": loss, "norms": optax.tree.norm(grads)}
        is_valid, place = state["is_valid"], state["place"]

        def is_usual(name: str) -> jax.Array:
            deviation = jnp.maximum(jnp.std(state[name], where=is_valid), 1e-6)
            return now[name] <= jnp.mean(state[name], where=is_valid) + SIGMAS * deviation

        is_spike = ~(is_usual("losses") & is_usual("norms")) & (state["count"] >= WINDOW // 2)
        factor = jnp.where(is_spike, 0.0, 1.0)
        updates, moved = inner.update(grads, state["inner"], params)
        kept = jax.tree.map(
            lambda old, new: jnp.where(factor == 0, old, new), state["inner"], moved
        )
        return jax.tree.map(lambda update: factor * update, updates), {
            "inner": kept,
            **{name: state[name].at[place].set(value) for name, value in now.items()},
            "is_valid": is_valid.at[place].set(True),
            "place": (place + 1) % WINDOW,
            "count": jnp.minimum(state["count"] + 1, WINDOW),
        }

    return optax.GradientTransformationExtraArgs(init, update)
