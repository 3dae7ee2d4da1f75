"""The tasks: handwritten digits, a photograph, and text, all from scikit-learn."""

import ast
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn
from sklearn.datasets import load_sample_image

from examples import digits as digits_example

Params = Any
Data = Any

FREQUENCIES = 64  # of the photograph's coordinates, each with a sine and a cosine
DEVIATION = 10.0  # standard deviation of these frequencies
SHRINK = 4  # divides the photograph's sides
CONTEXT = 64  # characters that the language model sees


class Task(NamedTuple):
    """A task, and how its result is measured."""

    name: str
    weight: float  # of the loss
    metric: str
    decimals: int  # of the metric in the table
    steps: int
    evaluations: int  # spread evenly over the steps, the last at the end
    tx: optax.GradientTransformation
    data: Data
    init: Callable[[jax.Array], Params]  # from a random key; float32
    loss_fn: Callable[[Params, Data, jax.Array, Any], jax.Array]  # key of the step, dtype
    evaluate: Callable[[Params, Data], jax.Array]  # in float32


def all_tasks(*, quick: bool = False) -> list[Task]:
    """Return each task at loss weight 1 and at a small one; if `quick`, once, for a few steps.

    The small weights are the share of one pixel among 100,000, of a pixel in the full-size
    photograph, and of one batch in an average over 512.
    """
    if quick:
        tasks = digits(1e-5), photograph(1), text(1, blocks=1)
        return [task._replace(steps=4, evaluations=2) for task in tasks]
    return [
        *(digits(weight) for weight in (1, 1e-5)),
        *(photograph(weight) for weight in (1, 1 / 16)),
        *(text(weight) for weight in (1, 1 / 512)),
    ]


def adam_epsilon(weight: float) -> float:
    """Return Adam's epsilon for a loss of this weight.

    Otherwise, Adam's step does not depend on the weight. In exact arithmetic, training is then the
    same at every weight, and any difference comes from the number format.
    """
    return 1e-8 * weight


def shown(weight: float) -> str:
    """Return a weight as readable text."""
    return f"1/{1 / weight:g}" if 1e-4 < weight < 1 else f"{weight:g}".replace("e-0", "e-")


def digits(weight: float) -> Task:
    """Classify scikit-learn's digits, with the network, the data and the weights of `make demo`."""
    train_images, test_images, train_labels, test_labels = digits_example.load_data()

    def loss_fn(params: Params, data: Data, key: jax.Array, dtype: Any) -> jax.Array:
        images, labels, *_ = data
        batch = jax.random.choice(key, len(images), (digits_example.BATCH,), replace=False)
        logits = digits_example.forward(params, images[batch], dtype)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[batch])
        return weight * jnp.mean(losses)

    def evaluate(params: Params, data: Data) -> jax.Array:
        *_, images, labels = data
        predicted = jnp.argmax(digits_example.forward(params, images, jnp.float32), axis=-1)
        return 100 * jnp.mean(predicted == labels)

    return Task(
        name=f"digits, loss weight {shown(weight)}",
        weight=weight,
        metric="test accuracy in %",
        decimals=2,
        steps=560,
        evaluations=10,
        tx=optax.adam(1e-3, eps=adam_epsilon(weight)),
        data=(train_images, train_labels, test_images, test_labels),
        init=digits_example.init_params,
        loss_fn=loss_fn,
        evaluate=evaluate,
    )


class Painter(nn.Module):
    """Predicts the colours of points from the Fourier features of their coordinates."""

    dtype: Any

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """Return red, green and blue, in float32."""
        x = features
        for _ in range(2):
            x = nn.relu(nn.Dense(64, dtype=self.dtype)(x))
        return nn.sigmoid(nn.Dense(3, dtype=self.dtype)(x).astype(jnp.float32))


def photograph(weight: float) -> Task:
    """Fit one photograph. Each step uses all of its pixels."""
    image = load_sample_image("china.jpg")[: 104 * SHRINK, : 160 * SHRINK] / np.float32(255)
    height, width, channels = (side // by for side, by in zip(image.shape, (4, 4, 1), strict=True))
    image = image.reshape(height, SHRINK, width, SHRINK, channels).mean((1, 3))
    points = np.stack(np.meshgrid(*(np.arange(n) / width for n in image.shape[:2]), indexing="ij"))
    frequencies = np.random.default_rng(0).normal(0, DEVIATION, (2, FREQUENCIES))
    angles = 2 * np.pi * points.reshape(2, -1).T @ frequencies
    features = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)

    steps = 300

    def mean_square(params: Params, data: Data, dtype: Any) -> jax.Array:
        features, colours = data
        return jnp.mean((Painter(dtype).apply(params, features) - colours) ** 2)

    return Task(
        name=f"photograph, loss weight {shown(weight)}",
        weight=weight,
        metric="PSNR in dB",
        decimals=2,
        steps=steps,
        evaluations=10,
        tx=optax.adam(optax.cosine_decay_schedule(5e-3, steps), eps=adam_epsilon(weight)),
        data=(jnp.asarray(features, jnp.float32), jnp.asarray(image.reshape(-1, channels))),
        init=lambda key: Painter(jnp.float32).init(key, jnp.zeros((1, 2 * FREQUENCIES))),
        loss_fn=lambda params, data, _, dtype: weight * mean_square(params, data, dtype),
        evaluate=lambda params, data: -10 * jnp.log10(mean_square(params, data, jnp.float32)),
    )


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array, **_: Any
) -> jax.Array:
    """Compute attention with both products in the query's dtype and the softmax in float32.

    Flax's own `force_fp32_for_softmax` computes the second product in float32 too.
    """
    scores = jnp.einsum("...qhd,...khd->...hqk", query / query.shape[-1] ** 0.5, key)
    weights = jax.nn.softmax(scores.astype(jnp.float32), where=mask)
    return jnp.einsum("...hqk,...khd->...qhd", weights.astype(query.dtype), value)


class LanguageModel(nn.Module):
    """A small pre-norm transformer over characters."""

    dtype: Any
    characters: int
    blocks: int
    features: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of each next character, in float32."""
        mask = nn.make_causal_mask(x, dtype=jnp.bool_)
        places = self.param("places", nn.initializers.normal(0.02), (CONTEXT, self.features))
        x = nn.Embed(self.characters, self.features, dtype=self.dtype)(x)
        x = x + places.astype(self.dtype)[None]
        for _ in range(self.blocks):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                num_heads=4, dtype=self.dtype, attention_fn=attention
            )(y, mask=mask)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.features, dtype=self.dtype)(y))
            x = x + nn.Dense(self.features, dtype=self.dtype)(y)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.characters, dtype=self.dtype)(x).astype(jnp.float32)


def text(weight: float, *, blocks: int = 2, batch: int = 16, tested: int = 128) -> Task:
    """Predict the next character of scikit-learn's docstrings."""
    train, test = corpus()
    characters = sorted(set(train + test))
    numbers = {character: number for number, character in enumerate(characters)}
    train, test = (np.array([numbers[c] for c in part], np.uint8) for part in (train, test))
    starts = np.linspace(0, len(test) - CONTEXT - 1, tested).astype(int)
    windows = test[starts[:, None] + np.arange(CONTEXT + 1)]

    def cross_entropy(params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
        tokens = tokens.astype(jnp.int32)
        logits = LanguageModel(dtype, len(characters), blocks).apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses)

    def loss_fn(params: Params, data: Data, key: jax.Array, dtype: Any) -> jax.Array:
        train, _ = data
        starts = jax.random.randint(key, (batch, 1), 0, len(train) - CONTEXT)
        return weight * cross_entropy(params, train[starts + jnp.arange(CONTEXT + 1)[None]], dtype)

    def init(key: jax.Array) -> Params:
        tokens = jnp.zeros((1, CONTEXT), jnp.int32)
        return LanguageModel(jnp.float32, len(characters), blocks).init(key, tokens)

    steps = 300
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 30, steps)
    return Task(
        name=f"text, loss weight {shown(weight)}",
        weight=weight,
        metric="bits per character",
        decimals=3,
        steps=steps,
        evaluations=10,
        tx=optax.chain(
            optax.clip_by_global_norm(weight), optax.adamw(rate, eps=adam_epsilon(weight))
        ),
        data=(jnp.asarray(train), jnp.asarray(windows)),
        init=init,
        loss_fn=loss_fn,
        evaluate=lambda params, data: cross_entropy(params, data[1], jnp.float32) / math.log(2),
    )


def corpus() -> tuple[str, str]:
    """Return scikit-learn's docstrings in ASCII: to train on, and to test on (every tenth file)."""
    root = Path(sklearn.__file__).parent
    paths = [path for path in root.rglob("*.py") if "tests" not in path.relative_to(root).parts]
    texts = ["\n\n".join(docstrings(path)) for path in sorted(paths)]
    test = texts[::10]
    del texts[::10]
    parts = ("\n\n".join(filter(None, part)) for part in (texts, test))
    train, test = (part.encode("ascii", "ignore").decode() for part in parts)
    return train, test


def docstrings(path: Path) -> list[str]:
    """Return all docstrings of a module."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
    return list(filter(None, found))


def corpus_facts() -> dict[str, Any]:
    """Identify the text, which depends on the version of scikit-learn."""
    train, test = corpus()
    return {
        "train_characters": len(train),
        "test_characters": len(test),
        "sha256": hashlib.sha256(f"{train}\n{test}".encode()).hexdigest(),
    }
