"""Three ways in which float16 training fails, how to find each cause, and how to fix it.

A network learns handwritten digits in float16. It fails for three reasons in turn: the gradients of
a loss with a small weight round to zero, a layer overflows, and the data contain NaN. Each time,
the library finds the cause, and the example fixes it.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import optax_lossscale as ols

BATCH = 128
SHAPES = {"first": (64, 128), "second": (128, 128), "third": (128, 128), "head": (128, 10)}
POLICY = ols.DynamicLossScale(growth_interval=40)  # the default is 2000, longer than these runs
STYLES = {"fails": {"color": "#d55e00"}, "fixed": {"color": "#0072b2", "ls": "--"}}


def loss_fn(
    params: dict, images: Any, labels: Any, weight: float = 1.0, softplus: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted cross-entropy and the accuracy. In float16, softplus overflows at 12."""
    x = jax.nn.relu(images @ params["first"])
    x = jnp.log(1 + jnp.exp((x @ params["second"]).astype(softplus))).astype(jnp.float32)
    logits = jax.nn.relu(x @ params["third"]) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return weight * losses.mean(), jnp.mean(logits.argmax(axis=-1) == labels)


def train(name: str, steps: int, data: tuple, loss_scale: Any = POLICY, **options: Any) -> tuple:
    """Return the parameters, and accuracy, skipped steps and loss scale after each step."""
    images, test_images, labels, test_labels = data
    tx = ols.with_loss_scaling(optax.adam(1e-3, eps=1e-15), loss_scale)

    @jax.jit
    def train_step(params: dict, opt_state: optax.OptState, rows: jax.Array) -> tuple:
        loss_and_grads = ols.value_and_grad(ols.autocast(loss_fn, jnp.float16), has_aux=True)
        (loss, _), grads = loss_and_grads(opt_state, params, images[rows], labels[rows], **options)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params, state = optax.apply_updates(params, updates), ols.loss_scale_state(opt_state)
        _, accuracy = loss_fn(params, test_images, test_labels)
        return params, opt_state, (accuracy, state.total_skipped, state.loss_scale)

    rng = np.random.default_rng(0)
    params = {k: jnp.float32(rng.normal(0, n**-0.5, (n, m))) for k, (n, m) in SHAPES.items()}
    opt_state, history = tx.init(params), []
    for _ in trange(steps, desc=name, unit="step", disable=None):  # None: in a terminal only
        rows = rng.integers(len(labels), size=BATCH)
        params, opt_state, results = train_step(params, opt_state, rows)
        history.append(jax.device_get(results))
    print(f"{name}: {results[0]:.0%} right, {results[1]} of {steps} steps skipped")
    try:
        ols.diagnostics.check_health(opt_state, policy=ols.as_loss_scale(loss_scale))
    except ols.diagnostics.LossScaleStalledError as error:
        print(f"check_health: {error}")
    return params, *np.transpose(history)


def draw(runs: dict[str, tuple], path: Path) -> None:
    """Draw accuracy and loss scale against the step, with one column for each failure."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots(2, len(runs), sharex=True, sharey="row")
    for (top, bottom), (title, pair) in zip(axes.T, runs.items(), strict=True):
        for (_, accuracy, _, loss_scale), (label, style) in zip(pair, STYLES.items(), strict=True):
            top.plot(accuracy, label=label, lw=2, **style)
            bottom.plot(loss_scale, lw=2, **style)
        top.set(title=title, ylabel="accuracy")
        bottom.set(xlabel="step", ylabel="loss scale", yscale="log")
    axes[0, 0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> dict[str, tuple]:
    """Show and fix three failures, draw a picture, and return the failed and the fixed runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=Path("output/diagnose.png"))
    args = parser.parse_args(argv)
    split = train_test_split(*load_digits(return_X_y=True), test_size=0.2, random_state=0)
    images, test_images, labels, test_labels = data = tuple(map(jnp.asarray, split))
    print("1. No step is skipped, but the network does not learn")
    failed = train("loss scale 1", args.steps, data, 1.0, weight=1e-6)
    grads, _ = jax.grad(loss_fn, has_aux=True)(failed[0], images, labels, weight=1e-6)
    counts = ols.diagnostics.gradient_exponents(grads)
    print(f"gradient_exponents: float16 rounds {counts.flushed / counts.size:.0%} to zero")
    scale = ols.diagnostics.suggest_loss_scale(counts)
    fixed = train(f"suggest_loss_scale, {scale:,.0f}", args.steps, data, scale, weight=1e-6)
    runs = {"small gradients": (failed, fixed)}

    print("\n2. Every step is skipped at the lowest loss scale")
    failed = train("softplus in float16", args.steps, data, softplus=jnp.float16)
    half_loss, batch = ols.autocast(loss_fn, jnp.float16), (images[:BATCH], labels[:BATCH])
    print(ols.diagnostics.first_nonfinite(half_loss, failed[0], *batch, softplus=jnp.float16))
    runs["overflow in one layer"] = failed, train("softplus in float32", args.steps, data)

    print("\n3. Every step is skipped again")
    mean, deviation = images.mean(axis=0), images.std(axis=0)  # 0 for pixels that are always black
    data = (images - mean) / deviation, (test_images - mean) / deviation, labels, test_labels
    failed = train("standardized images", args.steps, data)
    report = ols.diagnostics.nonfinite_report({"images": data[0]})
    print(report)
    data = *(jnp.where(deviation > 0, x, 0) for x in data[:2]), *data[2:]
    runs["NaN in the data"] = failed, train("0 for these pixels", args.steps, data)
    draw(runs, args.output)
    return runs


if __name__ == "__main__":
    main()
