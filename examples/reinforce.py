"""A policy learns from its own samples, in float32, bfloat16 and float16 with loss scaling.

A small transformer learns to sort digits by REINFORCE. A digit in the right place earns 1, minus
the mean over all answers to the same prompt (the group baseline of GRPO). The policy is computed
twice. Sampling decodes token by token with a key-value cache, and its attention divides last, as in
fused kernels. Training reads the whole sequence at once. Rounding makes their log-probabilities
differ: the mismatch. It is that of one seed; docs/recipes.md measures several.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import trange

import optax_lossscale as ols

DIGITS, START, WIDTH = 6, 10, 64  # START is the token that begins an answer
PROMPTS, GROUP = 32, 8  # prompts in a batch, and answers to each
SHAPES = {"embed": (11, WIDTH), "position": (2 * DIGITS, WIDTH), "qkv": (WIDTH, 3 * WIDTH)}
SHAPES |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "head": (WIDTH, 10)}
POLICY = ols.DynamicLossScale(growth_interval=50)  # the default is 2000, longer than this run
FORMATS = {  # the dtype, the loss scale (None neither scales nor checks), and how it is drawn
    "float32": (jnp.float32, None, {"color": "#999999", "lw": 5}),
    "bfloat16": (jnp.bfloat16, None, {"color": "#009e73", "lw": 2}),
    "float16 + loss scaling": (jnp.float16, POLICY, {"color": "#0072b2", "lw": 2, "ls": "--"}),
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
# By default, XLA keeps some bfloat16 results in float32, and different ones in the two policies.
ROUND = {"xla_allow_excess_precision": False}


def forward(
    params: dict, tokens: Any, start: Any = 0, cache: Any = None, *, divides_last: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Return float32 logits of the next digits, and the cache with these tokens' keys and values.

    Computes in the dtype of the parameters. `start` is the position of the first token.
    """
    places = start + jnp.arange(tokens.shape[1])
    x = params["embed"][tokens] + params["position"][places]
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    if cache is not None:
        k, v = cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v]), (0, 0, start, 0))
    scores = (q @ k.mT).astype(jnp.float32) / WIDTH**0.5
    scores = jnp.where(jnp.arange(k.shape[1]) <= places[:, None], scores, -jnp.inf)
    if divides_last:
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = (weights.astype(x.dtype) @ v).astype(jnp.float32)
        x += (attended / weights.sum(axis=-1, keepdims=True)).astype(x.dtype)
    else:
        x += jax.nn.softmax(scores).astype(x.dtype) @ v
    x += jax.nn.gelu(x @ params["up"]) @ params["down"]
    return (x @ params["head"]).astype(jnp.float32), cache


def sample(params: dict, prompts: Any, key: Any, *, divides_last: bool = True) -> tuple:
    """Return answers, and the log-probability of each token."""
    step_forward = partial(forward, params, divides_last=divides_last)

    def decode(carry: tuple, step: tuple) -> tuple:
        (token, cache), (place, key) = carry, step
        logits, cache = step_forward(token[:, None], place, cache)
        token = jax.random.categorical(key, logits[:, 0])
        return (token, cache), (token, -cross_entropy(logits[:, 0], token))

    cache = jnp.zeros((2, len(prompts), 2 * DIGITS, WIDTH), params["qkv"].dtype)
    _, cache = step_forward(prompts, 0, cache)
    steps = DIGITS + jnp.arange(DIGITS), jax.random.split(key, DIGITS)
    _, sampled = jax.lax.scan(decode, (jnp.full(len(prompts), START), cache), steps)
    return jax.tree.map(jnp.transpose, sampled)


def trained(params: dict, prompts: jax.Array, answers: jax.Array) -> jax.Array:
    """Return the log-probability of each token of the answers, from one pass over all tokens."""
    begin = jnp.full_like(answers[:, :1], START)
    logits, _ = forward(params, jnp.concatenate([prompts, begin, answers[:, :-1]], axis=1))
    return -cross_entropy(logits[:, DIGITS:], answers)


def train(dtype: Any, loss_scale: Any, steps: int, rate: float = 3e-3, seed: int = 0) -> tuple:
    """Return parameters, and the reward, mismatch, skipped steps and loss scale after each step."""
    tx = ols.with_loss_scaling(optax.adam(rate), loss_scale)

    def loss_fn(params: dict, prompts: Any, answers: Any, advantage: Any) -> tuple:
        log_probs = trained(ols.cast(params, dtype), prompts, answers)  # as in `sample`
        return -jnp.mean(advantage * log_probs), log_probs

    @partial(jax.jit, compiler_options=ROUND)
    def train_step(params: dict, opt_state: optax.OptState, key: jax.Array) -> tuple:
        prompts = jax.random.randint(key, (PROMPTS, DIGITS), 0, 10).repeat(GROUP, axis=0)
        answers, sampled = sample(ols.cast(params, dtype), prompts, jax.random.fold_in(key, 1))
        reward = (answers == jnp.sort(prompts)).astype(jnp.float32).reshape(PROMPTS, GROUP, DIGITS)
        advantage = (reward - reward.mean(axis=1, keepdims=True)).reshape(answers.shape)
        loss_and_grads = ols.value_and_grad(loss_fn, has_aux=True)
        (loss, log_probs), grads = loss_and_grads(opt_state, params, prompts, answers, advantage)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params, state = optax.apply_updates(params, updates), ols.loss_scale_state(opt_state)
        mismatch = jnp.abs(log_probs - sampled).mean()
        return params, opt_state, (reward.mean(), mismatch, state.total_skipped, state.loss_scale)

    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    params = {k: jnp.float32(rng.normal(0, n**-0.5, (n, m))) for k, (n, m) in SHAPES.items()}
    opt_state, history = tx.init(params), []
    for step in trange(steps, desc=dtype.__name__, disable=None):  # None: in a terminal only
        params, opt_state, log = train_step(params, opt_state, jax.random.fold_in(key, step))
        history.append(jax.device_get(log))
    return params, np.transpose(history)


def report(runs: dict[str, np.ndarray], path: Path) -> None:
    """Print the table, and draw the reward and the mismatch. All are means of ten steps."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    steps = np.arange(10, 1 + len(runs["float32"][0]), 10)
    shown = len(steps) * np.arange(1, 5) // 4 - 1
    row = "{:<23}{:>6}{:>6}{:>6}{:>6}{:>16}{:>9}{:>12}".format
    print(row("right digits by step", *steps[shown], "mean mismatch", "skipped", "loss scale"))
    for name, (*curves, skipped, scale) in runs.items():
        right, gap = (curve[: steps[-1]].reshape(-1, 10).mean(axis=1) for curve in curves)
        for ax, curve in zip(axes, (100 * right, gap), strict=True):
            ax.plot(steps, curve, label=name, **FORMATS[name][2])
        ends = (f"{skipped[-1]:.0f}", f"{scale[-1]:,.0f}") if FORMATS[name][1] else "--"
        print(row(name, *(f"{x:.0%}" for x in right[shown]), f"{gap.mean():.7f}", *ends))
    axes[0].set(title="Digits in the right place, %", xlabel="step")
    axes[1].set(title="Mismatch of the log-probabilities", xlabel="step", yscale="log")
    axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> dict[str, np.ndarray]:
    """Train in each format, print a table, draw a picture, and return the curves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("output/reinforce.png"))
    args = parser.parse_args(argv)
    runs = {name: train(*how, args.steps)[1] for name, (*how, _) in FORMATS.items()}
    report(runs, args.output)
    return runs


if __name__ == "__main__":
    main()
