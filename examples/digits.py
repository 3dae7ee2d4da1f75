"""Handwritten digits in float32, in float16, and in float16 with loss scaling.

Trains the same small network in these three ways, from the same initial parameters and on the same
batches, for several seeds. The loss is the mean cross-entropy times a weight. At weight 1, all
three learn the task. The weight 1e-5 is chosen to make float16 fail: most gradient entries are then
too small for it. Without loss scaling, float16 learns slowly for a while and then loses what it has
learned.

Prints a table, draws a picture, and exits with an error if the results are not as expected.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import optax_lossscale as ols

LAYERS = (64, 256, 256, 10)
BATCH = 128
SMALL, ONE = LOSS_WEIGHTS = (1e-5, 1.0)

# The dtype of the forward and backward passes, and the loss scale. `None` neither scales nor
# checks: it is the plain optimizer. The default growth interval is 2000 finite steps, longer than
# this run.
FLOAT32, FLOAT16, SCALED = "float32", "float16", "float16 + loss scaling"
WAYS = {
    FLOAT32: (jnp.float32, None),
    FLOAT16: (jnp.float16, None),
    SCALED: (jnp.float16, ols.DynamicLossScale(growth_interval=40)),
}

Params = list[tuple[jax.Array, jax.Array]]
Data = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Run(NamedTuple):
    """The results of training in one way at one loss weight, for all seeds."""

    accuracy: np.ndarray  # on the test images after each epoch; [seeds, epochs]
    zero_share: np.ndarray  # of the gradient's entries at each step; [seeds, steps]
    loss_scale: np.ndarray  # after each step; [seeds, steps]
    skipped: np.ndarray  # steps; [seeds]


Runs = dict[tuple[float, str], Run]  # by loss weight and way


def init_params(key: jax.Array) -> Params:
    """Return weights and biases, in float32."""
    draw = jax.nn.initializers.lecun_normal()
    shapes = list(itertools.pairwise(LAYERS))
    keys = jax.random.split(key, len(shapes))
    return [
        (draw(key, shape), jnp.zeros(shape[1])) for key, shape in zip(keys, shapes, strict=True)
    ]


def forward(params: Params, images: jax.Array, dtype: Any) -> jax.Array:
    """Return float32 logits. The forward and backward passes compute in `dtype`."""
    (*hidden, last) = jax.tree.map(lambda p: p.astype(dtype), params)
    x = images.astype(dtype)
    for weights, bias in hidden:
        x = jax.nn.relu(x @ weights + bias)
    weights, bias = last
    return (x @ weights + bias).astype(jnp.float32)


def make_train_epoch(
    data: Data, dtype: Any, tx: optax.GradientTransformationExtraArgs
) -> Callable[..., tuple]:
    """Return a function that trains for one epoch and tests, vectorized over the seeds."""
    train_images, test_images, train_labels, test_labels = data

    def loss_fn(params: Params, batch: jax.Array, loss_weight: jax.Array) -> jax.Array:
        logits = forward(params, train_images[batch], dtype)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, train_labels[batch])
        return loss_weight * jnp.mean(losses)

    def train_epoch(
        params: Params, opt_state: optax.OptState, key: jax.Array, loss_weight: jax.Array
    ) -> tuple:
        def train_step(carry: tuple, batch: jax.Array) -> tuple:
            params, opt_state = carry
            loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, batch, loss_weight)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
            params = optax.apply_updates(params, updates)
            loss_scale = ols.loss_scale_state(opt_state).loss_scale
            return (params, opt_state), (zero_share(grads), loss_scale)

        steps = len(train_images) // BATCH
        order = jax.random.permutation(key, len(train_images))[: steps * BATCH]
        batches = order.reshape(steps, BATCH)
        (params, opt_state), curves = jax.lax.scan(train_step, (params, opt_state), batches)
        predicted = jnp.argmax(forward(params, test_images, dtype), axis=-1)
        return params, opt_state, (jnp.mean(predicted == test_labels), *curves)

    return jax.jit(jax.vmap(train_epoch, in_axes=(0, 0, 0, None)))


def train(
    data: Data, way: str, *, epochs: int, seeds: int, after_epoch: Callable[[], Any]
) -> dict[float, Run]:
    """Train in one way, from scratch at each loss weight."""
    dtype, loss_scale = WAYS[way]
    tx = ols.with_loss_scaling(optax.adam(1e-3, eps=1e-15), loss_scale)
    train_epoch = make_train_epoch(data, dtype, tx)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    runs = {}
    for weight in LOSS_WEIGHTS:
        params = jax.vmap(init_params)(keys)
        opt_state = jax.vmap(tx.init)(params)
        history = []
        for epoch in range(epochs):
            epoch_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, epoch)
            params, opt_state, curves = train_epoch(params, opt_state, epoch_keys, weight)
            history.append(jax.device_get(curves))
            after_epoch()
        accuracy, zeros, loss_scales = zip(*history, strict=True)
        runs[weight] = Run(
            accuracy=np.stack(accuracy, axis=1),
            zero_share=np.concatenate(zeros, axis=1),
            loss_scale=np.concatenate(loss_scales, axis=1),
            skipped=np.asarray(ols.loss_scale_state(opt_state).total_skipped),
        )
    return runs


def zero_share(grads: Params) -> jax.Array:
    """Return the share of entries that are exactly zero."""
    zeros = sum(jnp.sum(g == 0) for g in jax.tree.leaves(grads))
    return zeros / sum(g.size for g in jax.tree.leaves(grads))


def load_data() -> Data:
    """Return train images, test images, train labels and test labels; 1797 images in all."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, split)
    return train_images, test_images, train_labels, test_labels


def table(runs: Runs) -> str:
    """Return the results of all runs as a text table."""
    row = "{:>11}  {:<22}  {:>8}  {:>8}  {:>14}  {:>13}  {:>7}  {:>10}".format
    lines = [
        row("", "", "accuracy", "accuracy", "at the end", "zero gradient", "skipped", "loss scale"),
        row(
            "loss weight",
            "computed in",
            "at best",
            "at end",
            "min .. max",
            "entries",
            "steps",
            "at end",
        ),
    ]
    for weight, way in itertools.product(LOSS_WEIGHTS, WAYS):
        run = runs[weight, way]
        _, policy = WAYS[way]
        final = run.accuracy[:, -1]
        lines.append(
            row(
                f"{weight:g}",
                way,
                f"{run.accuracy.mean(axis=0).max():.1%}",
                f"{final.mean():.1%}",
                f"{final.min():.1%} .. {final.max():.1%}",
                f"{run.zero_share.mean():.1%}",
                f"{run.skipped.mean():.1f}" if policy else "-",
                f"2**{np.log2(run.loss_scale[:, -1]).mean():.1f}" if policy else "-",
            )
        )
    return "\n".join(lines)


def problems(accuracy: dict[tuple[float, str], float]) -> list[str]:
    """Return a message for each final accuracy that is not as expected.

    Args:
      accuracy: The mean over the seeds, from 0 to 1, by loss weight and way. NaN never passes.
    """
    found = []

    def expect(holds: bool, weight: float, way: str, expected: str) -> None:
        if not holds:
            at = f"at loss weight {weight:g}, {way} reached {accuracy[weight, way]:.1%}"
            found.append(f"{at}, expected {expected}")

    for weight in LOSS_WEIGHTS:
        reference = accuracy[weight, FLOAT32]
        expect(reference >= 0.9, weight, FLOAT32, "at least 90%")
        near = f"within one point of float32's {reference:.1%}"
        expect(abs(accuracy[weight, SCALED] - reference) <= 0.01, weight, SCALED, near)
        gap = reference - accuracy[weight, FLOAT16]
        if weight == ONE:
            expect(abs(gap) <= 0.01, weight, FLOAT16, near)
        else:
            far = f"a failure, 20 points or more below float32's {reference:.1%}"
            expect(gap >= 0.2, weight, FLOAT16, far)
    return found


def draw(runs: Runs, path: Path) -> None:
    """Draw accuracy and loss scale against the step, one column for each loss weight."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, len(LOSS_WEIGHTS), sharex=True, sharey="row")
    styles = {
        FLOAT32: {"color": "#999999", "linewidth": 5},
        FLOAT16: {"color": "#d55e00", "linewidth": 1.8},
        SCALED: {"color": "#0072b2", "linewidth": 1.8, "linestyle": "--"},
    }
    for column, weight in enumerate(LOSS_WEIGHTS):
        upper, lower = axes[:, column]
        for way, style in styles.items():
            run = runs[weight, way]
            steps_an_epoch = run.loss_scale.shape[1] // run.accuracy.shape[1]
            steps = steps_an_epoch * np.arange(1, run.accuracy.shape[1] + 1)
            upper.plot(steps, 100 * run.accuracy.mean(axis=0), label=way, **style)
            band = 100 * run.accuracy.min(axis=0), 100 * run.accuracy.max(axis=0)
            upper.fill_between(steps, *band, color=style["color"], alpha=0.2, linewidth=0)
        for loss_scale in runs[weight, SCALED].loss_scale:
            lower.plot(loss_scale, color=styles[SCALED]["color"], alpha=0.6, drawstyle="steps-post")
        upper.set_title(f"loss weight {weight:g}")
        upper.set_ylim(0, 102)
        lower.set_yscale("log", base=2)
        lower.set_xlabel("step")
        for ax in (upper, lower):
            ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("test accuracy in %\n(mean, range over seeds)")
    axes[1, 0].set_ylabel("loss scale\n(one line for each seed)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[str]:
    """Run the demonstration and return the problems found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--output", type=Path, default=Path("output/digits.png"), help="default: %(default)s"
    )
    args = parser.parse_args(argv)
    if min(args.epochs, args.seeds) < 1:
        parser.error(f"--epochs and --seeds must be at least 1, got {args.epochs}, {args.seeds}")
    data = load_data()
    runs: Runs = {}
    epochs = len(WAYS) * len(LOSS_WEIGHTS) * args.epochs
    with tqdm(total=epochs, unit="epoch", disable=None) as progress:  # None: in a terminal only
        for way in WAYS:
            progress.set_description(way)
            trained = train(
                data, way, epochs=args.epochs, seeds=args.seeds, after_epoch=progress.update
            )
            runs |= {(weight, way): run for weight, run in trained.items()}
    print(table(runs))
    draw(runs, args.output)
    print(f"\npicture: {args.output}")
    return problems({case: run.accuracy[:, -1].mean() for case, run in runs.items()})


if __name__ == "__main__":
    sys.exit("\n".join(main()) or None)
