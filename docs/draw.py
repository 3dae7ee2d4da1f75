"""Draw pictures of the pages: `python docs/draw.py`.

The layers of wrappers with the bytes that each holds (order.md), the loss scale
over a run (logging.md), and gradients beside the range of float16 (why.md).
"""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from sklearn.datasets import load_digits

import optax_lossscale as ols

DOCS = Path(__file__).parent
ORANGE, BLUE, GREEN, DARK = "#d55e00", "#0072b2", "#009e73", "#00684c"
FIFTEEN = "\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT FIVE}"


def save(figure: Figure, path: Path) -> None:
    """Write the picture, small enough to be read on a phone."""
    figure.savefig(path, dpi=130, facecolor="white")


def held(tx: optax.GradientTransformation, dtype: jax.typing.DTypeLike) -> int:
    """Return the bytes that the state of an optimizer holds for each parameter."""
    params = jax.ShapeDtypeStruct((1 << 20,), dtype)
    arrays = jax.tree.leaves(jax.eval_shape(tx.init, params))
    return round(sum(array.size * array.dtype.itemsize for array in arrays) / params.size)


def draw_layers(path: Path, steps: int = 0) -> None:
    """Draw a box for each wrapper of bfloat16 parameters, in one another, with its bytes."""
    del steps
    adamw, clip = optax.adamw(1e-3), optax.clip_by_global_norm(1.0)
    state = ols.with_bfloat16_state(adamw)
    chain = optax.chain(clip, state)
    multi = optax.MultiSteps(chain, 4).gradient_transformation()
    masters = ols.with_master_weights(multi, remainders=True)
    full = ols.with_master_weights(multi)
    guard = ols.with_loss_scaling(masters)
    moments, plain = held(state, jnp.float32), held(adamw, jnp.float32)
    sums = held(multi, jnp.float32) - held(chain, jnp.float32)
    lower = held(masters, jnp.bfloat16) - held(multi, jnp.float32)
    whole = held(full, jnp.bfloat16) - held(multi, jnp.float32)
    none = held(guard, jnp.bfloat16) - held(masters, jnp.bfloat16)
    layers = (
        ("guard: with_loss_scaling", f"{none}", "decides: apply or skip all below"),
        ("with_master_weights", f"{lower}", f"remainders ({whole}: float32 masters)"),
        ("MultiSteps", f"{sums}", "adds up micro-batches, if you need it"),
        ("clip_by_global_norm", f"{held(clip, jnp.float32)}", "sees true gradients"),
        ("with_bfloat16_state(adamw)", f"{moments}", f"moments ({plain}: in float32)"),
    )
    figure = Figure(figsize=(4.4, 3.5))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 4.4), ylim=(0, 3.5))
    ax.axis("off")
    ax.text(0.12, 3.28, "bfloat16 parameters: 2 bytes. Each layer adds:", va="center")
    for place, (name, size, what) in enumerate(layers):
        depth = min(place, 3)  # clipping and the optimizer are side by side in a chain
        left, top = 0.08 + 0.14 * depth, 3.08 - 0.58 * place
        low = 0.06 + 0.07 * depth if place < 3 else top - 0.5
        style = {"facecolor": BLUE, "alpha": 0.09, "edgecolor": "none"}
        size_of = 4.4 - 2 * left, top - low
        ax.add_patch(
            FancyBboxPatch((left, low), *size_of, "round,pad=0,rounding_size=.07", **style)
        )
        ax.text(left + 0.1, top - 0.15, name, va="center", weight="bold", fontsize=9.5)
        ax.text(left + 0.1, top - 0.36, what, va="center", fontsize=9)
        ax.text(3.75, top - 0.25, size, va="center", ha="right", fontsize=15, color=DARK)
    save(figure, path)


def draw_loss_scale(path: Path, steps: int = 400) -> None:
    """Draw the loss scale of a run on handwritten digits, and the steps that it skips."""
    example = runpy.run_path(str(DOCS.parent / "examples/diagnose.py"))
    images, labels = map(jnp.asarray, load_digits(return_X_y=True))
    data = images[360:], images[:360], labels[360:], labels[:360]
    policy = ols.DynamicLossScale(growth_interval=15)  # the default is 2000
    _, _, skipped, loss_scale = example["train"]("digits", steps, data, policy)
    at = np.flatnonzero(np.diff(skipped, prepend=0))
    before = np.concatenate([[2.0**15], loss_scale])[at]
    figure = Figure(figsize=(5.2, 2.6), layout="constrained")
    ax = figure.subplots()
    ax.step(np.arange(1, len(loss_scale) + 1), loss_scale, color=BLUE, where="post", lw=2)
    ax.plot(at + 1, before, "x", color=ORANGE, ms=8, mew=2.5, label=f"{len(at)} skipped steps")
    ax.set_yscale("log", base=2)
    ax.set(xlabel="step", ylabel="loss scale")
    ax.legend(frameon=False, loc="lower right")
    save(figure, path)


def draw_exponents(path: Path, steps: int = 20, batch: int = 16384) -> None:
    """Draw the gradient of a word model's logits, in float32, by magnitude."""
    example = runpy.run_path(str(DOCS.parent / "examples/word_model.py"))
    rng, loss_fn = np.random.default_rng(0), example["loss_fn"]
    data, shapes = example["load_data"](), example["SHAPES"]
    params = {key: jnp.float32(rng.normal(0, 0.1, shape)) for key, shape in shapes.items()}
    tx, gradient = optax.adam(4e-2, b1=0.7, b2=0.95), jax.jit(jax.grad(loss_fn))
    opt_state = tx.init(params)
    for _ in range(steps):
        updates, opt_state = tx.update(gradient(params, rng.choice(data, 2048)), opt_state, params)
        params = optax.apply_updates(params, updates)
    rows = rng.choice(data, 512)  # of the batch
    hidden = params["words"][rows[:, :4]].reshape(len(rows), -1) @ params["hidden"]
    loss_of = optax.softmax_cross_entropy_with_integer_labels
    logits = jnp.tanh(hidden) @ params["output"]
    _, pull_back = jax.vjp(lambda logits: loss_of(logits, rows[:, 4]), logits)
    (grads,) = pull_back(jnp.full(len(rows), 1 / batch))
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    ax = figure.subplots()
    ax.axvspan(-25, 16, facecolor=GREEN, alpha=0.15, linewidth=0)
    ax.axvline(-25, color=GREEN, linewidth=1)
    lost = ""
    for factor, color, label in (1.0, ORANGE, "gradients"), (2.0**15, BLUE, f"times 2{FIFTEEN}"):
        found = ols.diagnostics.gradient_exponents(grads * factor)
        share = 100 * np.asarray(found.histogram) / int(found.size)
        ax.bar(-149 + np.arange(len(share)) + 0.5, share, color=color, alpha=0.8, label=label)
        lost = lost or f"rounded to zero:\n{found.flushed / found.size:.0%}"
    top = ax.get_ylim()[1] * 1.35
    ax.text(-4.5, top * 0.96, "float16 has numbers here", ha="center", va="top", color=DARK)
    ax.text(-25.7, top * 0.96, lost, ha="right", va="top", color=DARK)
    ax.set(xlim=(-46, 18), ylim=(0, top), xlabel="power of two", ylabel="% of the elements")
    ax.legend(loc="upper right", bbox_to_anchor=(1.0, 0.85), frameon=False)
    save(figure, path)


PICTURES = {"layers": draw_layers, "loss_scale": draw_loss_scale, "why": draw_exponents}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(DOCS / f"images/{name}.png")
