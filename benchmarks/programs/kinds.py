"""Drivers of further kinds of programs: two towers, graphs, speech, a flow, a NeRF, named axes.

Packages outside the group `test` are imported by name, since type checkers need not find them.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from absl import flags
from flax import jax_utils

from benchmarks.programs.drivers import (
    TENSORFLOW,
    Tensor,
    batches,
    digits,
    english,
    give_older_names,
    labels,
)
from benchmarks.programs.source import Source, stand_in

HALF_TOWER = {"dtype_mm": "bfloat16"}


def siglip(source: Source) -> None:
    """Train SigLIP to match digits with their names."""
    give_older_names()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    letters = np.array([[ord(c) - 96 for c in name.ljust(8, "`")] for name in names], np.int32)
    images, texts = digits(16, 3) * 2 - 1, letters[labels()]
    tower: dict[str, Any] = {"width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4}
    patch, width, words, rows = 4, 64, 32, 32
    if source.large:
        images, texts = np.zeros((64, 224, 224, 3), np.float32), np.ones((64, 64), np.int32)
        tower = {"width": 768, "depth": 12, "mlp_dim": 3072, "num_heads": 12, **source.large}
        patch, width, words, rows = 16, 768, 32000, 64

    def training(config: Any) -> Any:
        def spec(x: np.ndarray) -> Any:
            shape = (config.batch_size, *x.shape[1:])
            return SimpleNamespace(shape=shape, dtype=SimpleNamespace(as_numpy_dtype=x.dtype))

        element = {"image": spec(images), "labels": spec(texts)}
        return SimpleNamespace(element_spec=element), len(images)

    def start_global(*_: Any) -> Iterator[dict[str, np.ndarray]]:
        for image, text in batches(rows, images, texts):
            yield {"image": image, "labels": text}

    source.package("big_vision")
    stand_in(*TENSORFLOW, "tensorflow.io.gfile", "clu.parameter_overview")
    stand_in("ml_collections.config_flags")
    stand_in("big_vision.evaluators.common", from_config=lambda *_: [])
    stand_in("big_vision.pp", "big_vision.pp.ops_general")
    stand_in("big_vision.input_pipeline", training=training, start_global=start_global)
    stand_in("big_vision.pp.registry")
    utils = source.package("big_vision.utils")
    utils.BigVisionMetricWriter, utils.sync = mock.MagicMock(), mock.MagicMock()
    trainer = source.package("big_vision.trainers.proj.image_text.siglip")
    if source.own:
        towers = source.package("big_vision.models.proj.image_text.two_towers")
        towers.Model = functools.partial(towers_in_half, towers.Model)
    trainer.CONFIG = importlib.import_module("ml_collections").ConfigDict(
        {
            "input": {"batch_size": rows},
            "pp_modules": ["ops_general"],
            "total_steps": 40,
            "log_training_steps": 20,
            "model_name": "proj.image_text.two_towers",
            "model": {
                "image": {
                    "patch_size": (patch, patch),
                    "pool_type": "map",
                    "scan": True,
                    **tower,
                },
                "text": {"vocab_size": words, "scan": True, **tower},
                "out_dim": (None, width),
                "temperature_init": 10.0,
                "bias_init": -2.71,
            },
            "optax_name": "scale_by_adam",
            "grad_clip_norm": 1.0,
            "lr": 1e-3,
            "wd": 1e-4,
            "schedule": {"decay_type": "cosine", "warmup_steps": 10},
            "evals": {},
        }
    )
    trainer.main(None)


def towers_in_half(make: Callable[..., Any], *, image: Any, **config: Any) -> Any:
    """Return SigLIP's model with the authors' half precision and the first weights of float32.

    It draws some weights in the dtype of activations, and bfloat16 has other random numbers.
    """
    plain, half = make(image=image, **config), make(image={**image, **HALF_TOWER}, **config)

    def init(*args: Any) -> Any:
        shapes = jax.eval_shape(half.init, *args)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), plain.init(*args), shapes)

    return SimpleNamespace(init=init, apply=half.apply)


class Graphs(list[Any]):
    """Batches of graphs as a data set of TensorFlow offers them."""

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Yield the batches."""
        return iter(self)


def graphs(source: Source) -> None:
    """Train a graph network to tell properties of random rings."""
    jraph = importlib.import_module("jraph")
    importlib.import_module("clu.metrics")  # before a stand-in for the rest of `clu`

    rng = np.random.default_rng(0)

    def ring() -> Any:
        n = int(rng.integers(5, 12))
        nodes, edges = rng.normal(size=(n, 16)), rng.normal(size=(2 * n, 8))
        here = np.arange(n)
        there = (here + 1) % n
        properties = nodes[:, :8].mean(0) + edges[:, :8].mean(0) > 0
        return jraph.GraphsTuple(
            nodes.astype(np.float32),
            edges.astype(np.float32),
            np.r_[here, there],
            np.r_[there, here],
            properties[None].astype(np.float32),
            np.array([n]),
            np.array([2 * n]),
        )

    def batch() -> Any:
        return jraph.pad_with_graphs(jraph.batch_np([ring() for _ in range(16)]), 192, 384, 17)

    loaded = Graphs(batch() for _ in range(61))
    sets = {"train": loaded, "validation": loaded[:1], "test": loaded[:1]}
    sets = {name: Graphs(each) for name, each in sets.items()}
    saved = SimpleNamespace(restore_or_initialize=lambda state: state, save=lambda _: None)
    stand_in("tensorflow", "clu.metric_writers", "clu.periodic_actions", "clu.parameter_overview")
    stand_in("clu.checkpoint", Checkpoint=lambda *_, **__: saved)
    stand_in("input_pipeline", get_datasets=lambda *_, **__: sets)
    config = source.module("configs.default").get_config()
    config.update(num_train_steps=60, message_passing_steps=2, latent_size=64, num_classes=8)
    source.module().train_and_evaluate(config, str(source.root))


def speech(source: Source) -> None:
    """Train a Conformer to spell tones."""
    stand_in("torch.nn.functional", "torch.utils.data")
    stand_in("torch", "torch.nn", Tensor=Tensor, Module=Tensor)
    base = "algoperf.workloads.librispeech_conformer"
    source.package("algoperf")
    stand_in(f"{base}.metrics", f"{base}.input_pipeline", "algoperf.data_utils")
    workload = source.package(f"{base}.librispeech_jax.workload").LibriSpeechConformerWorkload()
    models = source.package(f"{base}.librispeech_jax.models")
    dtype = jnp.bfloat16 if source.own else jnp.float32
    models.ConformerConfig = functools.partial(models.ConformerConfig, dtype=dtype)
    submission = source.module()
    hyper = SimpleNamespace(
        learning_rate=2e-3,
        one_minus_beta1=0.1,
        beta2=0.99,
        warmup_factor=5 / workload.step_hint,  # five steps
        weight_decay=0.01,
        grad_clip=5.0,
        dropout_rate=0.0,
    )
    key = jax.random.PRNGKey(0)
    params, model_state = workload.init_model_fn(key)
    params = source.library.cast(params, source.stored)
    state = submission.init_optimizer_state(workload, params, model_state, hyper, key)
    rng = np.random.default_rng(0)
    time = np.arange(2000) / 16000
    for step in range(30):
        spelled = rng.integers(1, 32, (8, 4))
        waves = np.sin(2 * np.pi * (200 + 100 * spelled)[..., None] * time)
        inputs = (0.3 * waves).reshape(8, -1).astype(np.float32)
        batch = {
            "inputs": (inputs, np.zeros_like(inputs)),
            "targets": (spelled.astype(np.int32), np.zeros(spelled.shape, np.float32)),
        }
        state, params, model_state = submission.update_params(
            workload, params, None, model_state, hyper, batch, None, state, [], step, key
        )


def flow(source: Source) -> None:
    """Train a flow on digits."""
    images = (digits(8, 1) * 255).astype(np.uint8)
    stand_in("tensorflow_datasets")
    program = source.module()
    sizes = {"flow_num_layers": 2, "hidden_size": 128, "training_steps": 40, "batch_size": 64}
    flags.FLAGS(["flow", *(f"--{name}={value}" for name, value in sizes.items())])
    program.load_dataset = lambda _, size: ({"image": image} for (image,) in batches(size, images))
    program.main(None)


def nerf(source: Source) -> None:
    """Train a NeRF on rays that hit or miss a colored ball."""
    source.package("internal")
    stand_in("internal.datasets", "internal.vis", "pycolmap", "cv2", "rawpy")
    train_utils = source.package("internal.train_utils")
    configs, utils = source.package("internal.configs"), source.package("internal.utils")
    gin = importlib.import_module("gin")
    for name, value in {
        "NerfMLP.net_width": 64,
        "PropMLP.net_width": 64,
        "NerfMLP.net_depth": 4,
        "PropMLP.net_depth": 2,
        "NerfMLP.bottleneck_width": 64,
        "NerfMLP.net_width_viewdirs": 64,
        "Model.num_prop_samples": 16,
        "Model.num_nerf_samples": 8,
        # As in the authors' own configuration for scenes without bounds.
        "PropMLP.disable_density_normals": True,
        "PropMLP.disable_rgb": True,
        "NerfMLP.disable_density_normals": True,
    }.items():
        gin.bind_parameter(name, value)
    config = configs.Config(max_steps=40, lr_delay_steps=8, batch_size=128)
    _, state, _, step, _ = train_utils.setup_model(config, jax.random.PRNGKey(0))
    state, rngs = jax_utils.replicate(state), jax.random.split(jax.random.PRNGKey(1), 1)
    rng = np.random.default_rng(0)
    for number in range(config.max_steps):
        origins = rng.normal(size=(128, 3))
        origins *= 4 / np.linalg.norm(origins, axis=-1, keepdims=True)
        aim = rng.uniform(-1, 1, size=(128, 3)) - origins
        aim /= np.linalg.norm(aim, axis=-1, keepdims=True)
        along = -np.sum(origins * aim, -1)  # to the point of the ray nearest to the ball's center
        inside = 1 - np.sum((origins + along[:, None] * aim) ** 2, -1)
        hit = origins + (along - np.sqrt(np.maximum(inside, 0)))[:, None] * aim
        rgb = np.where(inside[:, None] > 0, (hit + 1) / 2, 1.0)
        one = np.ones((128, 1))
        rays = utils.Rays(
            origins=origins,
            directions=aim,
            viewdirs=aim,
            radii=0.005 * one,
            imageplane=np.zeros((128, 2)),
            lossmult=one,
            near=2 * one,
            far=6 * one,
            cam_idx=np.zeros((128, 1), np.int32),
            exposure_values=one,
        )
        batch = utils.Batch(rays=rays, rgb=rgb)
        batch = jax.tree.map(lambda x: x[None].astype(np.float32), batch)
        state, _, rngs = step(rngs, state, batch, None, number / config.max_steps, 1.0)


def named_axes(source: Source) -> None:
    """Train Levanter's GPT-2 on the characters of Python's help. The loop is ours."""
    give_older_names()
    hax = importlib.import_module("haliax")
    folder = str(source.root / "src/levanter")
    stand_in("levanter", __path__=[folder])
    stand_in("levanter.models", __path__=[f"{folder}/models"])
    stand_in("levanter.layers", __path__=[f"{folder}/layers"])
    stand_in("levanter.inference.utils", "levanter.inference.page_table", "transformers")
    stand_in("levanter.utils", __path__=[f"{folder}/utils"])
    stand_in("levanter.utils.logging", "levanter.utils.flop_utils")
    stand_in("jax.experimental.shard_map", shard_map=jax.shard_map)
    lm = source.package("levanter.models.lm_model")
    stand_in(
        "levanter.compat.hf_checkpoints",
        HFCompatConfig=lm.LmConfig,
        LmWithHfSerializationMixin=lm.LmHeadModel,
        HFCheckpointConverter=dict,
    )
    gpt2 = source.package("levanter.models.gpt2")
    sizes: dict[str, Any] = {"seq_len": 64, "hidden_dim": 64, "num_layers": 2, "num_heads": 4}
    rows, vocabulary = hax.Axis("batch", 16), hax.Axis("vocab", 128)
    if source.large:
        sizes, vocabulary = {**source.large}, hax.Axis("vocab", 50257)
    config = gpt2.Gpt2Config(**sizes)
    ols = source.library
    model = gpt2.Gpt2LMHeadModel.init(vocabulary, config, key=jax.random.PRNGKey(0))
    model = ols.cast(model, source.stored)
    tx = ols.with_loss_scaling(optax.adam(3e-3))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    # The authors' trainer casts the model for each step, by this library's `Policy`.
    policy = jmp.get_policy("params=float32,compute=bfloat16" if source.own else "float32")

    def loss_fn(model: Any, tokens: Any) -> Any:
        model = policy.cast_to_compute(model) if source.own else model
        example = hax.vmap(lm.LmExample.causal, rows)(hax.named(tokens, (rows, config.Pos)))
        return lm.compute_next_token_loss(model, example, reduction=None).mean().scalar()

    loss_and_grads = ols.value_and_grad(
        ols.autocast(loss_fn, source.half), transform=eqx.filter_value_and_grad
    )

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, tokens: Any) -> Any:
        _, grads = loss_and_grads(opt_state, model, tokens)
        arrays = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, arrays)
        return ols.cast(eqx.apply_updates(model, updates), source.stored), opt_state

    text = np.array([ord(character) for character in english()], np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(text, config.seq_len)
    for (tokens,) in itertools.islice(batches(rows.size, windows), 60):
        model, opt_state = step(model, opt_state, tokens)
