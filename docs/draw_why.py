"""Draw the picture of why.md: gradients and the range of float16, with and without loss scaling."""

import runpy
from pathlib import Path

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import optax_lossscale as ols

DOCS = Path(__file__).parent
LOWEST = -149  # the exponent of the histogram's first bar
LOSS_SCALE = 2.0**15


def draw(path: Path) -> None:
    """Draw the exponents of the logits' gradient in `examples/minimal.py`, in float32."""
    example = runpy.run_path(str(DOCS.parent / "examples/minimal.py"))
    words = example["words"][:256]  # all rows look alike
    logits = example["hidden"][:256] @ example["params"]
    loss_of = optax.softmax_cross_entropy_with_integer_labels
    grads = jax.grad(lambda x: loss_of(x, words).sum() / len(example["words"]))(logits)
    count = ols.diagnostics.gradient_exponents
    figure = Figure(figsize=(7, 2.9), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.axvspan(-25, 16, facecolor="#009e73", alpha=0.15, linewidth=0)
    ax.axvline(-25, color="#009e73", linewidth=1)
    for loss_scale, color, label in (
        (1.0, "#d55e00", "gradients"),
        (LOSS_SCALE, "#0072b2", "gradients times 2\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT FIVE}"),
    ):
        exponents = count(grads * loss_scale)
        share = 100 * np.asarray(exponents.histogram) / int(exponents.size)
        ax.bar(LOWEST + np.arange(len(share)) + 0.5, share, color=color, alpha=0.85, label=label)
    top = ax.get_ylim()[1] * 1.3
    ax.text(-4.5, top * 0.9, "float16 has numbers here", ha="center", color="#00684c")
    ax.text(-25.7, top * 0.9, "rounded to zero", ha="right", color="#00684c")
    ax.set(
        xlim=(-45, 18),
        ylim=(0, top),
        xlabel="power of two (bfloat16 has numbers from -134 to 127, beyond both sides)",
        ylabel="% of the elements",
    )
    ax.legend(loc="upper right", bbox_to_anchor=(1.0, 0.85), frameon=False)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw(DOCS / "images/why.png")
