"""The tasks: ordinary training with unweighted losses, on data that come with scikit-learn."""

import ast
import collections
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn
from sklearn.datasets import load_diabetes, load_digits, load_sample_image
from sklearn.model_selection import train_test_split

import optax_lossscale as ols

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
Params = dict[str, Any]  # by layer
Data = Any


class Task(NamedTuple):
    """A task, and how to measure its result."""

    name: str
    metric: str
    decimals: int  # of the metric in the table
    steps: int
    tx: optax.GradientTransformation
    data: Data
    init: Callable[[jax.Array], Params]  # from a random key; float32
    loss_fn: Callable[[Params, Data, jax.Array, Any], jax.Array]  # key of the step, dtype
    evaluate: Callable[[Params, Data], jax.Array]  # in float32

    def loss_with(self, data: Data, dtype: Any) -> Callable[[Params, jax.Array], jax.Array]:
        """Return a loss as a function of the parameters and a step's key."""
        return lambda params, key: self.loss_fn(params, data, key, dtype)


def all_tasks(names: Sequence[str] = (), *, quick: bool = False) -> list[Task]:
    """Return the tasks with these names, or all of them. If `quick`, they are small and short."""
    chosen = [task for name, task in TASKS.items() if not names or name in names]
    tasks = [make(**smaller if quick else {}) for make, smaller in chosen]
    return [task._replace(steps=4) if quick else task for task in tasks]


def words(*, vocabulary: int = 4096, batch: int = 16384, tx: Any = None) -> Task:
    """Predict the next word of scikit-learn's docstrings from the last few, with few parameters."""
    context, features = 4, 32
    parts = [re.findall(r"\w+|[^\w\s]", part) for part in corpus()]
    common = collections.Counter(parts[0]).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, start=1)}  # 0: all others
    train, test = (np.array([numbers.get(word, 0) for word in part]) for part in parts)
    sizes = {"hidden": (context * features, features), "output": (features, vocabulary)}

    def init(key: jax.Array) -> Params:
        first, second = jax.random.split(key)
        embedding = 0.1 * jax.random.normal(first, (vocabulary, features))
        return {"embedding": embedding, **init_layers(second, sizes)}

    def mean_loss(params: Params, text: jax.Array, places: jax.Array, dtype: Any) -> jax.Array:
        """Return the mean for the words at these positions."""
        before = text[places[:, None] - jnp.arange(context, 0, -1)]
        x = ols.cast(params["embedding"], dtype)[before].reshape(len(places), -1)
        logits = perceptron([params["hidden"], params["output"]], x, dtype, jnp.tanh)
        return jnp.mean(cross_entropy(logits, text[places]))

    def loss_fn(params: Params, data: Data, key: jax.Array, dtype: Any) -> jax.Array:
        text, *_ = data
        places = jax.random.randint(key, (batch,), context, len(text))
        return mean_loss(params, text, places, dtype)

    places = np.linspace(context, len(test) - 1, 2048).astype(int)
    return Task(
        name="words",
        metric="test cross-entropy",
        decimals=3,
        steps=40,
        tx=tx or optax.adam(1e-2),
        data=tuple(map(jnp.asarray, (train, test, places))),
        init=init,
        loss_fn=loss_fn,
        evaluate=lambda params, data: mean_loss(params, *data[1:], jnp.float32),
    )


def photograph(*, shrink: int = 1) -> Task:
    """Map coordinates to the colours of a photograph. Each step uses all of its pixels."""
    image = load_sample_image("china.jpg")[::shrink, ::shrink] / np.float32(255)
    points = np.stack(np.meshgrid(*(np.arange(n) for n in image.shape[:2]), indexing="ij"))
    waves = np.random.default_rng(0).normal(0, 10, (2, 32)) / image.shape[1]
    angles = 2 * np.pi * points.reshape(2, -1).T @ waves
    inputs = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    pixels = jnp.asarray(inputs, jnp.float32), jnp.asarray(image.reshape(-1, 3))

    def loss(outputs: jax.Array, colours: jax.Array) -> jax.Array:
        return jnp.mean((nn.sigmoid(outputs) - colours) ** 2)

    return supervised(
        widths=(64, 32, 32, 32, 32, 3),
        loss=loss,
        score=lambda *pair: -10 * jnp.log10(loss(*pair)),
        data=(*pixels, *pixels),
        name="photograph",
        metric="PSNR in dB",
        decimals=2,
        steps=120,
        tx=optax.adam(optax.cosine_decay_schedule(1e-2, 120)),
    )


def diabetes() -> Task:
    """Predict the progress of diabetes after a year. The loss is a sum, in the data's units."""
    inputs, targets = load_diabetes(return_X_y=True, scaled=False)
    split = train_test_split(inputs, targets, test_size=0.2, random_state=0)
    train, test, train_targets, test_targets = split
    train, test = ((part - train.mean(0)) / train.std(0) for part in (train, test))
    data = train, train_targets, test, test_targets

    def squares(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return (outputs[:, 0] - targets) ** 2

    return supervised(
        widths=(10, 64, 64, 1),
        loss=lambda *pair: jnp.sum(squares(*pair)),
        score=lambda *pair: jnp.sqrt(jnp.mean(squares(*pair))),
        data=tuple(jnp.asarray(part, jnp.float32) for part in data),
        name="diabetes",
        metric="RMSE on test patients",
        decimals=2,
        steps=200,
        tx=optax.adam(1e-2),
    )


def digits(*, batch: int = 128, features: int = 256) -> Task:
    """Classify handwritten digits."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    return supervised(
        widths=(64, features, features, 10),
        loss=lambda *pair: jnp.mean(cross_entropy(*pair)),
        score=lambda logits, labels: 100 * jnp.mean(jnp.argmax(logits, axis=-1) == labels),
        data=(images, labels, test_images, test_labels),
        batch=batch,
        name="digits",
        metric="test accuracy in %",
        decimals=2,
        steps=560,
        tx=optax.adam(1e-3),
    )


def supervised(
    *,
    widths: Sequence[int],
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    score: Callable[[jax.Array, jax.Array], jax.Array],
    data: Data,
    batch: int = 0,
    **about: Any,
) -> Task:
    """Return the task of a perceptron, given training and test data, with or without batches."""
    sizes = {f"layer {i}": pair for i, pair in enumerate(itertools.pairwise(widths), start=1)}

    def outputs(params: Params, inputs: jax.Array, dtype: Any) -> jax.Array:
        return perceptron([params[name] for name in sizes], inputs, dtype)

    def loss_fn(params: Params, data: Data, key: jax.Array, dtype: Any) -> jax.Array:
        inputs, targets, *_ = data
        if batch:
            chosen = jax.random.choice(key, len(inputs), (batch,), replace=False)
            inputs, targets = inputs[chosen], targets[chosen]
        return loss(outputs(params, inputs, dtype), targets)

    def evaluate(params: Params, data: Data) -> jax.Array:
        *_, inputs, targets = data
        return score(outputs(params, inputs, jnp.float32), targets)

    init = functools.partial(init_layers, sizes=sizes)
    return Task(data=data, init=init, loss_fn=loss_fn, evaluate=evaluate, **about)


def init_layers(key: jax.Array, sizes: dict[str, tuple[int, int]]) -> Params:
    """Return float32 weights and biases for layers with these names and sizes."""
    draw = jax.nn.initializers.lecun_normal()
    keys = jax.random.split(key, len(sizes))
    return {
        name: {"weights": draw(key, size), "bias": jnp.zeros(size[1])}
        for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def perceptron(
    layers: Sequence[Params],
    x: jax.Array,
    dtype: Any,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu,
) -> jax.Array:
    """Return the last layer's output, in float32. Both passes compute in `dtype`."""
    *hidden, last = ols.cast(list(layers), dtype)
    x = x.astype(dtype)
    for layer in hidden:
        x = activation(x @ layer["weights"] + layer["bias"])
    return (x @ last["weights"] + last["bias"]).astype(jnp.float32)


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
        places = self.param("places", nn.initializers.normal(0.02), (x.shape[1], self.features))
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


def characters(*, blocks: int = 2, batch: int = 16, context: int = 64) -> Task:
    """Predict the next character of scikit-learn's docstrings."""
    train, test = corpus()
    alphabet = sorted(set(train + test))
    numbers = {character: number for number, character in enumerate(alphabet)}
    train, test = (np.array([numbers[c] for c in part], np.uint8) for part in (train, test))
    starts = np.linspace(0, len(test) - context - 1, 128).astype(int)
    windows = test[starts[:, None] + np.arange(context + 1)]

    def model(dtype: Any) -> LanguageModel:
        return LanguageModel(dtype, len(alphabet), blocks)

    def mean_loss(params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
        tokens = tokens.astype(jnp.int32)
        logits = model(dtype).apply({"params": params}, tokens[:, :-1])
        return jnp.mean(cross_entropy(logits, tokens[:, 1:]))

    def loss_fn(params: Params, data: Data, key: jax.Array, dtype: Any) -> jax.Array:
        train, _ = data
        starts = jax.random.randint(key, (batch, 1), 0, len(train) - context)
        return mean_loss(params, train[starts + jnp.arange(context + 1)[None]], dtype)

    def init(key: jax.Array) -> Params:
        tokens = jnp.zeros((1, context), jnp.int32)
        return model(jnp.float32).init(key, tokens)["params"]

    steps = 100
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 30, steps)
    return Task(
        name="characters",
        metric="bits per character",
        decimals=3,
        steps=steps,
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)),
        data=(jnp.asarray(train), jnp.asarray(windows)),
        init=init,
        loss_fn=loss_fn,
        evaluate=lambda params, data: mean_loss(params, data[1], jnp.float32) / math.log(2),
    )


@functools.cache
def corpus() -> tuple[str, str]:
    """Return scikit-learn's docstrings in ASCII, for training and testing (every tenth file)."""
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


# Each task, and the arguments that make it small enough for a check.
TASKS = {
    "words": (words, {"vocabulary": 512, "batch": 256}),
    "photograph": (photograph, {"shrink": 16}),
    "diabetes": (diabetes, {}),
    "digits": (digits, {}),
    "characters": (characters, {"blocks": 1}),
}
