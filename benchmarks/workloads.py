"""The workloads: trees of arrays, and a transformer to train."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import attention

Tree = Any
Shape = tuple[int, ...]
LossFn = Callable[[Tree, jax.Array], jax.Array]

# The loss scale of every contender. With a power of two, scaling is exact, so all must agree.
LOSS_SCALE = 2.0**10

ADAMW = "adamw"
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    ADAMW: lambda: optax.adamw(1e-3),
    "sgd": lambda: optax.sgd(1e-3),
    "sgd, momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-3),
    "clipping + adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the workloads. The published numbers use the defaults."""

    wide: int = 100_000_000  # parameters
    stages: tuple[int, ...] = (3, 4, 6, 3)  # blocks of ResNet-50
    width: int = 64  # channels of its first stage
    inner: int = 10_000_000  # parameters under the other inner optimizers
    layers: int = 8
    features: int = 512
    vocabulary: int = 9216
    batch: int = 2
    length: int = 32  # tokens in a sequence

    def larger(self) -> "Sizes":
        """Return sizes for a transformer with four times the parameters and 64 times the tokens."""
        layers, features = 3 * self.layers // 2, 3 * self.features // 2
        longer = {"batch": 4 * self.batch, "length": 16 * self.length}
        vocabulary = 4 * self.vocabulary
        return dataclasses.replace(
            self, layers=layers, features=features, vocabulary=vocabulary, **longer
        )


SIZES = {
    "full": Sizes(),
    "small": Sizes(
        wide=8_000_000, width=16, inner=1_000_000, layers=2, features=128, vocabulary=2048
    ),
    "tiny": Sizes(
        wide=2_000, stages=(1,), width=2, inner=2_000, layers=1, features=16, vocabulary=64
    ),
}  # fmt: skip


class Gradients(NamedTuple):
    """Parameters, their gradients with and without loss scaling, and the loss."""

    params: Tree
    scaled: Tree
    unscaled: Tree
    loss: jax.Array


class Training(NamedTuple):
    """Parameters, and a loss function and a batch to compute their gradients."""

    params: Tree
    loss_fn: LossFn
    batch: jax.Array


def gradients(
    shapes: list[Shape], dtype: Any = jnp.float32, params_dtype: Any = jnp.float32
) -> Gradients:
    """Draw parameters with these shapes, and gradients with dtype `dtype`."""
    keys = jax.random.split(jax.random.key(0), 2 * len(shapes))
    params = [0.1 * jax.random.normal(k, s) for k, s in zip(keys[::2], shapes, strict=True)]
    scaled = [jax.random.normal(k, s, dtype) for k, s in zip(keys[1::2], shapes, strict=True)]
    unscaled = [g / jnp.asarray(LOSS_SCALE, dtype) for g in scaled]
    return Gradients(optax.tree.cast(params, params_dtype), scaled, unscaled, jnp.float32(1))


def wide(parameters: int) -> list[Shape]:
    """Twelve large arrays."""
    rows = math.sqrt(parameters / 24)
    multiple = 64 if rows > 64 else 1
    rows = max(1, round(rows / multiple)) * multiple
    return 12 * [(rows, 2 * rows)]


def resnet50(sizes: Sizes) -> list[Shape]:
    """The arrays of ResNet-50, in order: 161 arrays with 25.6M parameters at full size."""

    def conv(size: int, inputs: int, outputs: int) -> list[Shape]:
        return [(size, size, inputs, outputs), (outputs,), (outputs,)]  # and its BatchNorm

    shapes = conv(7, 3, sizes.width)
    inputs = sizes.width
    for stage, blocks in enumerate(sizes.stages):
        features = sizes.width * 2**stage
        for block in range(blocks):
            shapes += conv(1, inputs, features) + conv(3, features, features)
            shapes += conv(1, features, 4 * features)
            if block == 0:
                shapes += conv(1, inputs, 4 * features)
            inputs = 4 * features
    return [*shapes, (inputs, 1000), (1000,)]


def transformer(
    sizes: Sizes,
    *,
    scanned: bool = False,
    plain: bool = False,
    run_layer: Callable[..., Any] | None = None,
    stored: Any = jnp.float32,
) -> Training:
    """A language model that computes in float16: 69 arrays with 35M parameters at full size.

    If `scanned`, the arrays of all layers are stacked, and a scan runs over them. If `plain`, it
    computes in the dtype of its parameters. `stored` is that dtype. `run_layer` computes a layer.
    """
    rng = np.random.default_rng(0)
    features, hidden = sizes.features, 4 * sizes.features

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    def layer() -> dict[str, jax.Array]:
        return {
            "norm_1": jnp.ones(features),
            "qkv": weights(features, 3 * features),
            "out": weights(features, features),
            "norm_2": jnp.ones(features),
            "up": weights(features, hidden),
            "up_bias": jnp.zeros(hidden),
            "down": weights(hidden, features),
            "down_bias": jnp.zeros(features),
        }

    layers = [layer() for _ in range(sizes.layers)]
    params = {
        "tokens": weights(sizes.vocabulary, features),
        "positions": weights(sizes.length, features),
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if scanned else layers,
        "norm": jnp.ones(features),
        "head": weights(features, sizes.vocabulary),
        "head_bias": jnp.zeros(sizes.vocabulary),
    }
    tokens = rng.integers(sizes.vocabulary, size=(sizes.batch, sizes.length + 1))
    loss_fn = _language_model_loss if plain else _language_model_in_half
    loss_fn = functools.partial(loss_fn, run_layer=run_layer or plain_layer)
    params = optax.tree.cast(params, stored)
    return Training(params, jax.tree_util.Partial(loss_fn), jnp.asarray(tokens, jnp.int32))


def plain_layer(
    x: jax.Array, layer: Tree, attend: Callable[..., jax.Array] = attention.plain
) -> tuple[jax.Array, None]:
    """Run a layer of the transformer."""
    heads = (*x.shape[:-1], 8, x.shape[-1] // 8)
    q, k, v = jnp.split(_norm(x, layer["norm_1"]) @ layer["qkv"], 3, axis=-1)
    mixed = attend(q.reshape(heads), k.reshape(heads), v.reshape(heads))
    x = x + mixed.reshape(x.shape) @ layer["out"]
    hidden = jax.nn.gelu(_norm(x, layer["norm_2"]) @ layer["up"] + layer["up_bias"])
    return x + hidden @ layer["down"] + layer["down_bias"], None


# For the backward pass, it keeps only results of matrix products.
layer_that_keeps_dots = jax.checkpoint(plain_layer, policy=jax.checkpoint_policies.checkpoint_dots)
checkpointed_layer = jax.checkpoint(plain_layer)
layer_by_blocks = functools.partial(plain_layer, attend=attention.by_blocks)


def _language_model_in_half(params: Tree, tokens: jax.Array, run_layer: Callable) -> jax.Array:
    return _language_model_loss(optax.tree.cast(params, jnp.float16), tokens, run_layer)


def _language_model_loss(params: Tree, tokens: jax.Array, run_layer: Callable) -> jax.Array:
    x = params["tokens"][tokens[:, :-1]] + params["positions"]
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x, _ = run_layer(x, layer)
    else:
        x, _ = jax.lax.scan(run_layer, x, params["layers"])
    logits = _norm(x, params["norm"]) @ params["head"] + params["head_bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return jnp.mean(losses)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale
