"""Three ways that float16 training fails: how to find each cause, and how to fix it.

A network learns handwritten digits in float16 with loss scaling. It fails for three reasons in
turn: gradients that round to zero, a layer that overflows, and NaN in the data. Each time, the
example asks the library what is wrong, prints the answer, and follows the advice.

Draws two pictures. Exits with an error unless every failure occurs, every answer names its cause,
and every fix works.
"""

import argparse
import operator
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

BATCH = 128
LAYERS = ("first", "second", "third", "head")
SIZES = (64, 128, 128, 128, 10)
# The default growth interval is 2000 finite steps, longer than these runs.
POLICY = ols.DynamicLossScale(growth_interval=40)

Params = dict[str, dict[str, jax.Array]]
Data = dict[str, jax.Array]
Activation = Callable[[jax.Array], jax.Array]


class Setting(NamedTuple):
    """The settings in which a failing run and its fix differ."""

    loss_scale: Any = POLICY
    loss_weight: float = 1.0
    activation: Activation = jax.nn.silu  # of the second layer
    dtype: Any = jnp.float16


class Run(NamedTuple):
    """The result of training."""

    params: Params
    opt_state: optax.OptState
    accuracy: float
    loss_scale: np.ndarray  # after each step
    skipped: np.ndarray  # whether each step was skipped


def softplus_by_hand(x: jax.Array) -> jax.Array:
    """Return log(1 + exp(x)). In float16, exp(12) overflows, and the result is infinite."""
    return jnp.log(1 + jnp.exp(x))


def softplus_in_float32(x: jax.Array) -> jax.Array:
    """Return log(1 + exp(x)), computed in float32."""
    return softplus_by_hand(x.astype(jnp.float32)).astype(x.dtype)


def init_params(key: jax.Array) -> Params:
    """Return weights and biases, in float32."""
    draw = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(LAYERS))
    return {
        name: {"weights": draw(keys[i], SIZES[i : i + 2]), "bias": jnp.zeros(SIZES[i + 1])}
        for i, name in enumerate(LAYERS)
    }


def forward(params: Params, images: jax.Array, setting: Setting) -> jax.Array:
    """Return float32 logits. The forward and backward passes compute in `dtype`."""
    params = jax.tree.map(lambda p: p.astype(setting.dtype), params)
    x = images.astype(setting.dtype)
    for name in LAYERS[:-1]:
        x = x @ params[name]["weights"] + params[name]["bias"]
        x = setting.activation(x) if name == "second" else jax.nn.relu(x)
    return (x @ params["head"]["weights"] + params["head"]["bias"]).astype(jnp.float32)


def loss_fn(params: Params, images: jax.Array, labels: jax.Array, setting: Setting) -> jax.Array:
    """Return the mean cross-entropy times the loss weight."""
    logits = forward(params, images, setting)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return setting.loss_weight * jnp.mean(losses)


def train(data: Data, setting: Setting, epochs: int) -> Run:
    """Train from scratch. Every call uses the same batches."""
    tx = ols.with_loss_scaling(optax.adam(1e-3, eps=1e-15), setting.loss_scale)

    def train_step(carry: tuple, batch: jax.Array) -> tuple:
        params, opt_state = carry
        examples = data["images"][batch], data["labels"][batch]
        loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, *examples, setting)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), ols.diagnostics.metrics(opt_state)

    params = init_params(jax.random.key(0))
    carry = (params, tx.init(params))
    train_epoch = jax.jit(lambda carry, batches: jax.lax.scan(train_step, carry, batches))
    logs = []
    # disable=None shows the bar in a terminal only.
    for epoch in tqdm(batches(data, epochs), desc="epochs", leave=False, disable=None):
        carry, log = train_epoch(carry, epoch)
        logs.append(jax.device_get(log))
    params, opt_state = carry
    predicted = jnp.argmax(forward(params, data["test_images"], setting), axis=-1)
    return Run(
        params=params,
        opt_state=opt_state,
        accuracy=float(jnp.mean(predicted == data["test_labels"])),
        loss_scale=np.concatenate([log["loss_scale"] for log in logs]),
        skipped=~np.concatenate([log["grads_finite"] for log in logs]),
    )


def batches(data: Data, epochs: int) -> jax.Array:
    """Return the indices of each batch. `int32[epochs, steps, BATCH]`."""
    size = len(data["labels"])
    orders = jax.vmap(lambda key: jax.random.permutation(key, size))(
        jax.random.split(jax.random.key(1), epochs)
    )
    return orders[:, : size // BATCH * BATCH].reshape(epochs, -1, BATCH)


def health(run: Run, setting: Setting) -> str:
    """Return the message of `check_health`."""
    try:
        ols.diagnostics.check_health(run.opt_state, loss_scale=setting.loss_scale)
    except ols.diagnostics.LossScaleStalledError as error:
        return str(error)
    return "healthy"


def count_exponents(data: Data, setting: Setting) -> ols.diagnostics.GradientExponents:
    """Count the exponents of the initial scaled gradients over one epoch."""
    params = init_params(jax.random.key(0))
    state = ols.init(setting.loss_scale)

    @jax.jit
    def count(batch: jax.Array) -> ols.diagnostics.GradientExponents:
        _, grads = ols.value_and_grad(loss_fn)(
            state, params, data["images"][batch], data["labels"][batch], setting
        )
        return ols.diagnostics.gradient_exponents(grads)

    counts = [count(batch) for batch in batches(data, epochs=1)[0]]
    total = counts[0]
    for each in counts[1:]:
        total = jax.tree.map(operator.add, total, each)
    return total


def share(exponents: ols.diagnostics.GradientExponents, name: str) -> float:
    """Return one of the counts as a share of all entries."""
    return int(getattr(exponents, name)) / int(exponents.size)


def underflow(data: Data, epochs: int, path: Path) -> list[str]:
    """Show gradients that are too small for float16, and fix them with a suggested scale."""
    failing = Setting(loss_scale=1.0, loss_weight=1e-6)
    failed = train(data, failing, epochs)
    report_failure("1. No step is skipped, but the network learns little", failed, failing)

    ask("Are the gradients too small? `gradient_exponents` of the same loss in float32:")
    before = count_exponents(data, failing._replace(dtype=jnp.float32))
    scale = ols.diagnostics.suggest_scale(before)
    print(f"float16 would round {share(before, 'flushed'):.1%} of the entries to zero.")
    print(f"`suggest_scale`: 2**{np.log2(scale):.0f}")

    fixed = failing._replace(loss_scale=scale)
    after = count_exponents(data, fixed._replace(dtype=jnp.float32))
    worked = train(data, fixed, epochs)
    print(f"With this scale: {share(after, 'flushed'):.1%}. {result(worked)}")
    draw_exponents(before, after, scale, path)
    return problems(
        (failed.accuracy < 0.8, f"underflow: expected a failure, got {result(failed)}"),
        (not failed.skipped.any(), "underflow: a step was skipped"),
        (share(before, "flushed") > 0.5, "underflow: most entries should have been flushed"),
        (share(after, "flushed") < 0.02, "underflow: entries are still flushed"),
        (int(after.overflow) == 0, "underflow: the suggested scale overflows"),
        (worked.accuracy > 0.9, f"underflow: the scale did not help: {result(worked)}"),
    )


def overflow(data: Data, epochs: int) -> tuple[list[str], dict[str, Run]]:
    """Show a layer that overflows in the forward pass, and fix it by computing it in float32."""
    data = with_pixels(data, lambda pixels: 16 * pixels)  # the original range, 0 to 16
    failing = Setting(activation=softplus_by_hand)
    failed = train(data, failing, epochs)
    said = report_failure("2. Every step is skipped at the lowest loss scale", failed, failing)

    ask("Which layer overflows? `first_nonfinite` of the loss:")
    batch = batches(data, epochs=1)[0, 0]
    found = ols.diagnostics.first_nonfinite(
        loss_fn, failed.params, data["images"][batch], data["labels"][batch], failing
    )
    print(found)
    print("Compute its activation in float32:")

    fixed = failing._replace(activation=softplus_in_float32)
    worked = train(data, fixed, epochs)
    print(result(worked))
    return problems(
        (failed.accuracy < 0.5, f"overflow: expected a failure, got {result(failed)}"),
        ("at its floor of 1" in said, "overflow: the loss scale should be at its floor"),
        ("1. The forward pass" in said, "overflow: the forward pass should be the likeliest cause"),
        (
            found is not None and found.layer == "params['second']",
            f"overflow: expected the second layer, found {found}",
        ),
        (worked.accuracy > 0.9, f"overflow: float32 did not help: {result(worked)}"),
    ), {"one layer overflows": failed, "that layer in float32": worked}


def nan_in_data(data: Data, epochs: int) -> tuple[list[str], dict[str, Run]]:
    """Show NaN in the training data, and repair it."""
    mean, deviation = data["images"].mean(0), data["images"].std(0)
    # The corner pixels are always black, so this is 0 / 0 there.
    standardized = with_pixels(data, lambda pixels: (pixels - mean) / deviation)
    setting = Setting()
    failed = train(standardized, setting, epochs)
    said = report_failure("3. Every step is skipped again", failed, setting)

    ask("Is the data finite? `nonfinite_report` of the data:")
    report = ols.diagnostics.nonfinite_report(standardized)
    print(ols.diagnostics.format_nonfinite_report(report))
    found = int(report["['images']"].nan)

    fixed = with_pixels(standardized, lambda pixels: jnp.where(deviation > 0, pixels, 0.0))
    worked = train(fixed, setting, epochs)
    print(f"With constant pixels set to 0: {result(worked)}")
    return problems(
        (failed.accuracy < 0.5, f"NaN in the data: expected a failure, got {result(failed)}"),
        ("batch or the parameters hold NaN" in said, "NaN in the data: should be a likely cause"),
        (found > 0, "NaN in the data: the report should have found it"),
        (worked.accuracy > 0.9, f"NaN in the data: its removal did not help: {result(worked)}"),
    ), {"NaN in the data": failed}


def report_failure(title: str, run: Run, setting: Setting) -> str:
    """Print the result of a run and the message of `check_health`, and return the message."""
    said = health(run, setting)
    print(f"\n{title}\n{'=' * len(title)}\n{result(run)}\n")
    print(f"`check_health`:\n{said}")
    return said


def ask(question: str) -> None:
    """Print a question."""
    print(f"\n{question}")


def result(run: Run) -> str:
    """Return a one-line summary of a run."""
    return f"accuracy {run.accuracy:.1%}, {run.skipped.sum()} of {run.skipped.size} steps skipped"


def problems(*expected: tuple[bool, str]) -> list[str]:
    """Return the messages whose condition is false."""
    return [message for holds, message in expected if not holds]


def draw_exponents(
    before: ols.diagnostics.GradientExponents,
    after: ols.diagnostics.GradientExponents,
    scale: float,
    path: Path,
) -> None:
    """Draw histograms of the gradients, unscaled and scaled."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots(2, sharex=True, sharey=True)
    for ax, exponents, title in (
        (axes[0], before, "as they are"),
        (axes[1], after, f"times the suggested scale, 2**{np.log2(scale):.0f}"),
    ):
        ols.diagnostics.plot_gradient_exponents(exponents, ax)
        ax.set_title(f"gradients {title} ({ax.get_title()})")
    axes[0].set(xlabel="", xlim=(-55, 20))
    figure.savefig(path, dpi=120)


def draw_loss_scales(runs: dict[str, Run], path: Path) -> None:
    """Draw the loss scale over the steps, and mark each skipped step."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(len(runs), sharex=True, sharey=True)
    for ax, (title, run) in zip(axes, runs.items(), strict=True):
        steps = np.arange(1, run.skipped.size + 1)
        ax.step(steps, run.loss_scale, where="post", color="#0072b2", label="loss scale")
        ax.plot(
            steps[run.skipped],
            run.loss_scale[run.skipped],
            "|",
            color="#d55e00",
            markersize=12,
            label="skipped step",
        )
        ax.axhline(POLICY.min_scale, color="#555555", linestyle=":", label="floor")
        ax.set_yscale("log", base=2)
        ax.set_title(f"{title}: {result(run)}")
        ax.set_ylabel("loss scale\nafter the step")
        ax.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=120)


def with_pixels(data: Data, function: Callable[[jax.Array], jax.Array]) -> Data:
    """Return the data with `function` applied to the images."""
    return {**data, **{name: function(data[name]) for name in ("images", "test_images")}}


def load_data() -> Data:
    """Return 1797 images with pixels from 0 to 1, and their labels, split into train and test."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    names = ("images", "test_images", "labels", "test_labels")
    return dict(zip(names, map(jnp.asarray, split), strict=True))


def main(argv: Sequence[str] | None = None) -> list[str]:
    """Run the three demonstrations and return the problems found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("output"), help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.epochs < 6:
        parser.error(f"--epochs must be at least 6, for enough skipped steps; got {args.epochs}")
    args.output.mkdir(parents=True, exist_ok=True)
    pictures = [args.output / "gradient_exponents.png", args.output / "loss_scale.png"]

    data = load_data()
    found = underflow(data, args.epochs, pictures[0])
    also_found, runs = overflow(data, args.epochs)
    found += also_found
    also_found, more_runs = nan_in_data(data, args.epochs)
    draw_loss_scales({**more_runs, **runs}, pictures[1])
    print("\npictures:", *pictures)
    return found + also_found


if __name__ == "__main__":
    sys.exit("\n".join(main()) or None)
