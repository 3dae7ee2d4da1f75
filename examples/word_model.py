"""A word model in float32, in float16, and in float16 with loss scaling.

It predicts each word of scikit-learn's docstrings from the four words before it. The loss is a mean
over the batch, so the gradient of a wrong word's logit is its probability over the batch size: 7e-9
on average, with 8,192 words and batches of 16,384. float16 rounds that to zero. The loss itself is
not scaled down. The three runs start from the same parameters and see the same batches.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn
from matplotlib.figure import Figure
from tqdm import trange

import optax_lossscale as ols

VOCABULARY = 8192
SHAPES = {"words": (VOCABULARY, 32), "hidden": (4 * 32, 32), "output": (32, VOCABULARY)}
POLICY = ols.DynamicLossScale(growth_interval=5)  # the default is 2000, longer than this run
FORMATS = {  # the dtype, the loss scale (None neither scales nor checks), and how it is drawn
    "float32": (jnp.float32, None, {"color": "#999999", "lw": 6}),
    "float16": (jnp.float16, None, {"color": "#d55e00", "lw": 2}),
    "float16 + loss scaling": (jnp.float16, POLICY, {"color": "#0072b2", "lw": 2, "ls": "--"}),
}


def load_data() -> np.ndarray:
    """Return all sequences of five words as numbers, `[positions, 5]`. Rare words are 0."""
    files = sorted(Path(sklearn.__file__).parent.rglob("*.py"))
    docstrings = re.findall('"""(.*?)"""', "".join(f.read_text("utf-8") for f in files), re.DOTALL)
    words = re.findall(r"\w+|[^\w\s]", "\n".join(docstrings))
    numbers = {w: i for i, (w, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), 1)}
    return np.lib.stride_tricks.sliding_window_view([numbers.get(word, 0) for word in words], 5)


def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the fifth word, given the four before it."""
    before = params["words"][batch[:, :4]].reshape(len(batch), -1)
    logits = jnp.tanh(before @ params["hidden"]) @ params["output"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 4]).mean()


def train(name: str, data: np.ndarray, steps: int, size: int) -> tuple[np.ndarray, float]:
    """Return the loss, zeros, skipped steps and loss scale of each step; bytes per parameter."""
    dtype, loss_scale, _ = FORMATS[name]
    tx = ols.with_loss_scaling(optax.adam(4e-2, b1=0.7, b2=0.95), loss_scale)

    @jax.jit
    def train_step(params: dict, opt_state: optax.OptState, batch: jax.Array) -> tuple:
        loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, dtype))
        loss, grads = loss_and_grads(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params, state = optax.apply_updates(params, updates), ols.loss_scale_state(opt_state)
        results = jnp.mean(grads["output"] == 0), state.total_skipped, state.loss_scale
        return params, opt_state, (loss_fn(params, test), *results)

    rng = np.random.default_rng(0)
    train_data, test_data = np.split(data, [len(data) * 9 // 10])
    test = rng.choice(test_data, 2048)
    params = {key: jnp.float32(rng.normal(0, 0.1, shape)) for key, shape in SHAPES.items()}
    opt_state, history = tx.init(params), []
    for _ in trange(steps, desc=f"{name:<22}", unit="step", disable=None):
        params, opt_state, results = train_step(params, opt_state, rng.choice(train_data, size))
        history.append(jax.device_get(results))
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state)))
    return np.transpose(history), stored / sum(leaf.size for leaf in jax.tree.leaves(params))


def report(runs: dict[str, tuple], path: Path) -> None:
    """Print the table, and draw the test loss and the share of zeros against the step."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    row = "{:<24}{:>11}{:>16}{:>9}{:>12}{:>21}".format
    print(row("", "test loss", "gradient zeros", "skipped", "loss scale", "bytes per parameter"))
    for name, ((loss, zeros, skipped, scale), stored) in runs.items():
        left.plot(1 + np.arange(len(loss)), loss, label=name, **FORMATS[name][2])
        right.plot(1 + np.arange(len(loss)), 100 * zeros, **FORMATS[name][2])
        ends = f"{loss[-1]:.2f}", f"{zeros.mean():.1%}", f"{skipped[-1]:.0f}", f"{scale[-1]:,.0f}"
        print(row(name, *ends, f"{stored:.1f}"))
    axis = {"xlabel": "step", "xticks": len(loss) * np.arange(5) // 4}
    left.set(ylabel="test loss", **axis)
    right.set(ylabel="zeros in the output gradient, %", ylim=(-3, 103), **axis)
    left.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def problems(float32: float, float16: float, scaled: float) -> list[str]:
    """Return a message for each final test loss that is not as expected. NaN never is."""
    expected = {
        f"float32: {float32:.2f}, expected at most 5.1": float32 <= 5.1,
        f"float16: {float16:.2f}, expected {float32 + 0.3:.2f} or more": float16 >= float32 + 0.3,
        f"with scaling: {scaled:.2f}, expected {float32:.2f} ± 0.1": abs(scaled - float32) <= 0.1,
    }
    return [f"final test loss, {message}" for message, holds in expected.items() if not holds]


def main(argv: list[str] | None = None) -> list[str]:
    """Train, print a table, draw a picture, and return what is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16384, help="words in a batch")
    parser.add_argument("--output", type=Path, default=Path("output/word_model.png"))
    args = parser.parse_args(argv)
    print(f"Trains in three formats: about a minute on two cores. Writes {args.output}")
    runs = {name: train(name, load_data(), args.steps, args.batch) for name in FORMATS}
    report(runs, args.output)
    print(f"Written to {args.output}")
    return problems(*(history[0, -1] for history, _ in runs.values()))


if __name__ == "__main__":
    raise SystemExit("\n".join(main()) or None)
