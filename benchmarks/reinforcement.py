"""Reinforcement learning in four formats: how far the sampling and the trained policy drift apart.

It measures what examples/reinforce.py shows, over several seeds and learning rates, with a larger
transformer: a digit-sorting policy with two layers and two heads. After a short supervised warm
start, an answer earns reward 1 if it is right.
"""

import functools
import itertools
import platform
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks.fidelity.training import fit, zero_share
from benchmarks.page import Report, draw_runs, interval, table

DIGITS, START = 6, 10  # START is the token that begins the answer
LENGTH = 2 * DIGITS  # the prompt, START, and all digits of the answer but the last
WIDTH, HEADS, LAYERS = 32, 2, 2
PROMPTS, GROUP = 32, 8  # prompts in a batch, and answers to each
POINT = 5  # steps that each point of a curve averages

# The dtype of both policies, the loss scale, and whether the loss corrects for the mismatch.
FLOAT32, SCALED = "float32", "float16 + loss scaling"
WAYS = {
    FLOAT32: (jnp.float32, None, False),
    "bfloat16": (jnp.bfloat16, None, False),
    "bfloat16 + importance weights": (jnp.bfloat16, None, True),
    "float16": (jnp.float16, None, False),
    SCALED: (jnp.float16, ols.DynamicLossScale(growth_interval=20), False),
}
COLOURS = dict(zip(WAYS, ("#999999", "#009e73", "#cc79a7", "#d55e00", "#0072b2"), strict=True))
LABELS = {
    "reward": "share of right answers\n(mean, range over seeds)",
    "gap": "mean difference of the\ntwo log-probabilities",
}

# By default XLA may keep a bfloat16 result in float32 where it fuses operations, so that the same
# code rounds differently in two programs. Turned off, each operation rounds, as in float16.
ROUND = {"xla_allow_excess_precision": False}

# How sampling differs from training: whether its attention is fused, and the options of XLA.
PROGRAMS = {
    "the same operations, each rounded": (False, ROUND),
    "the same operations, XLA's default": (False, None),
    "attention in another order, each operation rounded": (True, ROUND),
}

Params = dict[str, Any]
Results = dict[str, Any]


def init_params(key: jax.Array) -> Params:
    """Return float32 parameters. Those of the layers are stacked."""
    draw, keys = jax.nn.initializers.lecun_normal(batch_axis=0), jax.random.split(key, 7)
    sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    layers = {
        name: draw(key, (LAYERS, WIDTH * fan_in, WIDTH * fan_out))
        for key, (name, (fan_in, fan_out)) in zip(keys, sizes.items(), strict=False)
    }
    embed = jax.random.normal(keys[4], (START + 1, WIDTH))
    position = jax.random.normal(keys[5], (LENGTH, WIDTH))
    head = draw(keys[6], (1, WIDTH, START))[0]
    return {"layers": layers, "embed": embed, "position": position, "head": head}


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, fused: bool) -> jax.Array:
    """Return attention, with its softmax in float32.

    A fused kernel divides by the softmax's sum last, so it rounds the weights before the division.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    if not fused:
        return jnp.einsum("bhqk,bkhd->bqhd", (weights / total).astype(v.dtype), v)
    summed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)
    return (summed.astype(jnp.float32) / total.swapaxes(1, 2)).astype(v.dtype)


def norm(x: jax.Array) -> jax.Array:
    """Return x divided by its root mean square, which is computed in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def forward(
    params: Params, tokens: jax.Array, start: Any = 0, cache: Any = None, *, fused: bool
) -> tuple[jax.Array, jax.Array]:
    """Return float32 log-probabilities of each next digit, and the cache with these tokens' part.

    Computes in the dtype of the parameters. `start` is the position of the first token. The cache
    has the keys and values of the tokens before it.
    """
    batch, count = tokens.shape
    if cache is None:
        shape = LAYERS, batch, LENGTH, 2, HEADS, WIDTH // HEADS
        cache = jnp.zeros(shape, params["head"].dtype)
    places = start + jnp.arange(count)
    mask = jnp.arange(LENGTH) <= places[:, None]

    def layer(x: jax.Array, weights_and_cache: tuple) -> tuple[jax.Array, jax.Array]:
        w, cache = weights_and_cache
        qkv = (norm(x) @ w["qkv"]).reshape(batch, count, 3, HEADS, WIDTH // HEADS)
        cache = jax.lax.dynamic_update_slice(cache, qkv[:, :, 1:], (0, start, 0, 0, 0))
        attended = attend(qkv[:, :, 0], cache[:, :, 0], cache[:, :, 1], mask, fused=fused)
        x += attended.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], cache

    x = params["embed"][tokens] + params["position"][places]
    x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
    return jax.nn.log_softmax((norm(x) @ params["head"]).astype(jnp.float32)), cache


def chosen(log_probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probability of each token."""
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


def trained_log_probs(params: Params, prompts: jax.Array, answers: jax.Array) -> jax.Array:
    """Return the log-probability of each token of the answers, from one pass over all tokens."""
    begin = jnp.full_like(answers[:, :1], START)
    tokens = jnp.concatenate([prompts, begin, answers[:, :-1]], axis=1)
    log_probs, _ = forward(params, tokens, fused=False)
    return chosen(log_probs[:, DIGITS:], answers)


def sample(
    params: Params, prompts: jax.Array, key: jax.Array, *, fused: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Return answers, and the log-probability of each token as the sampling policy sees it."""
    _, cache = forward(params, prompts, fused=fused)

    def decode(carry: tuple, step: tuple) -> tuple:
        (token, cache), (place, key) = carry, step
        log_probs, cache = forward(params, token[:, None], place, cache, fused=fused)
        token = jax.random.categorical(key, log_probs[:, 0])
        return (token, cache), (token, chosen(log_probs[:, 0], token))

    steps = DIGITS + jnp.arange(DIGITS), jax.random.split(key, DIGITS)
    _, sampled = jax.lax.scan(decode, (jnp.full(len(prompts), START), cache), steps)
    return jax.tree.map(jnp.transpose, sampled)


def draw_prompts(key: jax.Array, count: int) -> jax.Array:
    """Return rows of random digits."""
    return jax.random.randint(key, (count, DIGITS), 0, 10)


@functools.partial(jax.jit, static_argnames="steps")
def warm_start(key: jax.Array, steps: int) -> Params:
    """Return parameters trained on right answers in float32, so that some samples earn a reward."""
    params, tx = init_params(key), optax.adam(1e-3)

    def loss_fn(params: Params, key: jax.Array) -> jax.Array:
        prompts = draw_prompts(key, 128)
        return -jnp.mean(trained_log_probs(params, prompts, jnp.sort(prompts, axis=1)))

    return fit(tx, loss_fn, params, jax.random.split(jax.random.fold_in(key, 1), steps))[0][0]


def make_train_step(tx: Any, dtype: Any, *, corrected: bool) -> Callable[..., tuple]:
    """Return a training step: sample answers, reward them, and update the parameters once."""

    def loss_fn(params: Params, prompts: Any, answers: Any, advantage: Any, sampled: Any) -> tuple:
        trained = trained_log_probs(ols.cast(params, dtype), prompts, answers)
        ratio = jnp.minimum(jnp.exp(jax.lax.stop_gradient(trained) - sampled), 2.0)
        weight = advantage[:, None] * (ratio if corrected else 1)
        return -jnp.mean(weight * trained), trained

    def train_step(params: Params, opt_state: optax.OptState, key: jax.Array) -> tuple:
        prompt_key, sample_key = jax.random.split(key)
        prompts = jnp.repeat(draw_prompts(prompt_key, PROMPTS), GROUP, axis=0)
        answers, sampled = sample(ols.cast(params, dtype), prompts, sample_key)
        right = jnp.all(answers == jnp.sort(prompts, axis=1), axis=1)
        reward = right.astype(jnp.float32).reshape(PROMPTS, GROUP)
        advantage = (reward - reward.mean(axis=1, keepdims=True)).reshape(-1)
        loss_and_grads = ols.value_and_grad(loss_fn, has_aux=True)
        arguments = params, prompts, answers, advantage, sampled
        (loss, trained), grads = loss_and_grads(opt_state, *arguments)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        log = {"reward": reward.mean(), "zero_share": zero_share(grads)}
        return optax.apply_updates(params, updates), opt_state, log | mismatch(sampled, trained)

    return jax.jit(train_step, compiler_options=ROUND)


def mismatch(sampled: jax.Array, trained: jax.Array) -> dict[str, jax.Array]:
    """Return how far two log-probabilities of the sampled tokens are apart.

    `kl` estimates the divergence of the trained policy from the sampling one, per token. No sample
    of it is negative, because exp(x) >= 1 + x.
    """
    gap = trained - sampled
    size = jnp.abs(gap)
    return {"gap": size.mean(), "largest": size.max(), "kl": jnp.mean(jnp.expm1(gap) - gap)}


def sources(params: Params) -> dict[str, dict[str, float]]:
    """Return the mean gap of one policy in each format, for programs that differ ever more."""
    dtypes, keys = (jnp.float32, jnp.bfloat16, jnp.float16), jax.random.split(jax.random.key(0))

    def gap(fused: bool, params: Params, key: jax.Array) -> jax.Array:
        prompts = draw_prompts(key, PROMPTS * GROUP)
        answers, sampled = sample(params, prompts, key, fused=fused)
        return mismatch(sampled, trained_log_probs(params, prompts, answers))["gap"]

    def mean(run: Callable, dtype: Any) -> float:
        return float(np.mean([run(ols.cast(params, dtype), key) for key in keys]))

    runs = {
        name: jax.jit(functools.partial(gap, fused), compiler_options=options)
        for name, (fused, options) in PROGRAMS.items()
    }
    return {name: {d.__name__: mean(run, d) for d in dtypes} for name, run in runs.items()}


def train(seed: int, params: Params, opt_state: Any, train_step: Callable, steps: int) -> dict:
    """Train from the given parameters, and return the curves and what the table shows."""
    key, history = jax.random.key(seed), []
    for step in tqdm(range(steps), leave=False, disable=None):  # None: in a terminal only
        params, opt_state, log = train_step(params, opt_state, jax.random.fold_in(key, step))
        history.append(log)
    history = jax.device_get(history)
    logs = {name: np.array([log[name] for log in history]) for name in history[0]}
    curves = {name: logs[name].reshape(-1, POINT).mean(axis=1) for name in ("reward", "gap")}
    return {
        **{name: [float(f"{x:.4g}") for x in curve] for name, curve in curves.items()},
        "largest": float(logs["largest"].max()),
        "kl": float(logs["kl"].mean()),
        "zero_share": float(logs["zero_share"].mean()),
        "skipped": int(ols.loss_scale_state(opt_state).total_skipped),
    }


def end_reward(runs: list[dict]) -> np.ndarray:
    """Return the percentage of right answers in the last fifth of training, for each seed."""
    curves = np.array([run["reward"] for run in runs])
    return 100 * curves[:, -max(1, curves.shape[1] // 5) :].mean(axis=1)


def tables(results: Results) -> str:
    """Return the results as Markdown."""
    head = "rate", "computed in", "right answers", "minus float32, same seed", "mean gap", "skipped"
    body = []
    for rate, ways in results["runs"].items():
        for way, runs in ways.items():
            end, base = end_reward(runs), end_reward(ways[FLOAT32])
            gap, skipped = (np.mean([run[name] for run in runs]) for name in ("gap", "skipped"))
            row = [rate, way, "{:.1f} ± {:.1f} %".format(*interval(end))]
            row.append("" if way == FLOAT32 else "{:+.1f} ± {:.1f}".format(*interval(end - base)))
            body.append([*row, f"{gap:.1e}", f"{skipped:.1f}" if way == SCALED else ""])
    gaps = [[k, *(f"{x:.1e}" for x in v.values())] for k, v in results["sources"].items()]
    programs = table(["two programs", "float32", "bfloat16", "float16"], gaps)
    return "\n\n".join([table(head, body, texts=(1,)), programs, results["circumstances"]])


def draw(results: Results) -> Figure:
    """Draw reward and gap against the step, one column for each learning rate."""
    columns = len(results["runs"])
    figure = Figure(figsize=(1 + 4 * columns, 6), layout="constrained")
    axes = figure.subplots(2, columns, sharex=True, sharey="row", squeeze=False)
    for column, (rate, ways) in enumerate(results["runs"].items()):
        for (way, runs), (row, name) in itertools.product(ways.items(), enumerate(LABELS)):
            ax, curves = axes[row, column], np.array([run[name] for run in runs])
            steps = POINT * np.arange(1, curves.shape[1] + 1)
            style = {"linewidth": 5 if way == FLOAT32 else 1.6, "linestyle": "-:"["+ imp" in way]}
            draw_runs(ax, steps, curves, COLOURS[way], label=way, **style)
            axes[row, 0].set_ylabel(LABELS[name])
        axes[0, column].set_title(f"learning rate {rate}")
        axes[1, column].set(yscale="log", xlabel="step")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=1 + columns)
    return figure


def measure(*, quick: bool) -> Report:
    """Train in every format at two learning rates."""
    return compare(2, 10, 20, (1e-3,)) if quick else compare(5, 200, 120, (1e-3, 3e-3))


def compare(
    seeds: int, steps: int, warm: int, rates: tuple[float, ...], names: Iterable[str] = tuple(WAYS)
) -> Report:
    """Train this many steps in each way, after so many of the warm start."""
    starts = [warm_start(jax.random.key(seed), warm) for seed in range(seeds)]
    runs: dict[str, dict[str, list]] = {f"{rate:g}": {} for rate in rates}
    for rate, way in itertools.product(rates, names):
        dtype, loss_scale, corrected = WAYS[way]
        tx = ols.with_loss_scaling(optax.adam(rate), loss_scale)
        train_step = make_train_step(tx, dtype, corrected=corrected)
        runs[f"{rate:g}"][way] = [
            train(seed, params, tx.init(params), train_step, steps)
            for seed, params in enumerate(starts)
        ]
    circumstances = (
        f"{seeds} seeds and {steps} steps, after {warm} steps of the warm start. "
        f"Means with 95 % confidence intervals, by Student's t. {jax.default_backend()}, "
        f"{platform.machine()}, jax {jax.__version__}, optax {optax.__version__}."
    )
    results = {"circumstances": circumstances, "sources": sources(starts[0]), "runs": runs}
    return Report(tables(results), results, {"reinforce": draw(results)})
