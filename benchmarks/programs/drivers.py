"""The programs of the table, what is changed in each, and how each is trained small."""

import itertools
import pydoc_data.topics
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src import tree_util
from sklearn import datasets

from benchmarks.programs.source import Source, stand_in

TENSORFLOW = "tensorflow", "tensorflow_datasets", "tensorflow.compat.v2"


class Tensor:
    """The type of another framework: einops asks whether its arguments have it."""


def as_tensor(array: np.ndarray) -> SimpleNamespace:
    """Return an array as a data loader of Torch yields it."""
    return SimpleNamespace(numpy=lambda: array)


def give_older_names() -> None:
    """Give JAX the names that older programs use and newer versions miss."""
    older = (jax, "tree_map", jax.tree.map), (jax, "tree_leaves", jax.tree.leaves)
    keys = tree_util, "BuiltInKeyEntry", object
    for module, name, value in (*older, (jnp, "DeviceArray", jax.Array), keys):
        setattr(module, name, value)


def digits(size: int, channels: int) -> np.ndarray:
    """Return scikit-learn's digits as square images of this size, between 0 and 1."""
    pixels, _ = datasets.load_digits(return_X_y=True)
    small = np.reshape(pixels, (-1, 8, 8)) / 16
    times = size // 8
    large = np.kron(small, np.ones((times, times)))
    border = (size - 8 * times) // 2
    large = np.pad(large, ((0, 0), (border, border), (border, border)))
    return np.repeat(large[..., None], channels, axis=-1).astype(np.float32)


def labels() -> np.ndarray:
    """Return which digits they are."""
    _, target = datasets.load_digits(return_X_y=True)
    return np.asarray(target, np.int32)


def batches(size: int, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield random batches for ever, the same in each run."""
    rng = np.random.default_rng(0)
    while True:
        rows = rng.choice(len(arrays[0]), size, replace=False)
        yield tuple(array[rows] for array in arrays)


def english() -> str:
    """Return CPython's own help as text."""
    text = "\n".join(pydoc_data.topics.topics.values())
    return "".join(character for character in text if 0 < ord(character) < 128)


def gemma(source: Source) -> None:
    """Train Flax's Gemma on characters, on eight devices in a mesh of 4 x 2."""
    text = np.array([ord(character) for character in english()], np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(text, 65)

    def get_datasets(*, data_sharding: Any, **_: Any) -> Any:
        def loader() -> Iterator[dict[str, jax.Array]]:
            for (window,) in batches(32, windows):
                batch = {"inputs": window[:, :-1], "targets": window[:, 1:]}
                batch["inputs_position"] = np.tile(np.arange(64), (32, 1))
                yield {name: jax.device_put(x, data_sharding) for name, x in batch.items()}

        encoder = SimpleNamespace(vocab_size=lambda: 128, pad_id=lambda: 0)
        return loader(), loader(), encoder

    stand_in("clu.metric_writers", "clu.periodic_actions", "sampler", "tokenizer", "grain")
    stand_in("input_pipeline", get_datasets=get_datasets)
    train = source.module()
    size = {"num_layers": 2, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32}
    config = source.module("configs.tiny").get_config()
    config = config.replace(
        transformer_params={**config.transformer_params, **size, "attention_types": (1, 1)},
        use_bfloat16=source.own,
        fsdp_parallelism=4,
        tensor_parallelism=2,
        num_train_steps=30,
        warmup_steps=10,
        num_eval_steps=1,
        save_checkpoints=False,
        restore_checkpoints=False,
    )
    train.train_and_evaluate(config, str(source.root / "work"))


def shard_map(source: Source) -> None:
    """Train the network of JAX's notebook with FSDP and TP on its batch. The loop is ours."""
    names = source.execute()
    ols, half = source.library, source.half
    params, batch = ols.cast(names["params"], source.stored), names["batch"]
    tx = ols.with_loss_scaling(optax.adam(1e-3))
    loss_and_grads = ols.value_and_grad(ols.autocast(names["loss_fsdp_tp"], half))

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        _, grads = loss_and_grads(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for _ in range(40):
        # XLA's collectives between threads time out if steps are queued on a few cores.
        params, opt_state = jax.block_until_ready(step(params, opt_state))


def dit(source: Source) -> None:
    """Train a diffusion transformer on digits, as its `main` does."""
    source.module("utils")
    stand_in("tensorflow", Tensor=Tensor, Variable=Tensor)
    stand_in("wandb", *TENSORFLOW, "utils.wandb", "utils.checkpoint", "utils.stable_vae")
    stand_in("ml_collections.config_flags", "localutils.debugger")
    give_older_names()
    train = source.module()
    images, classes = digits(16, 3) * 2 - 1, labels()
    size = {"patch_size": 2, "hidden_size": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 1}
    model = train.DiT(**size, class_dropout_prob=0.1, num_classes=10)
    loader = batches(64, images, classes)
    image, label = next(loader)
    keys = dict(zip(("params", "label_dropout"), jax.random.split(jax.random.key(0)), strict=True))
    params = model.init(keys, image, jnp.zeros(64), label)["params"]
    tx = source.library.with_loss_scaling(optax.adam(1e-3, 0.9, 0.99))
    stored = source.library.cast(params, source.stored)
    states = train.TrainState.create(model, stored, tx=tx), train.TrainState.create(model, params)
    scheduler = train.GaussianDiffusion(500)
    config = train.ml_collections.FrozenConfigDict(train.model_config)
    trainer = train.DiffusionTrainer(jax.random.PRNGKey(0), *states, config, scheduler)
    trainer = train.flax.jax_utils.replicate(trainer)
    for image, label in itertools.islice(loader, 60):
        trainer, _ = trainer.update(image[None], label[None])


def vq_vae(source: Source) -> None:
    """Train Haiku's VQ-VAE on digits in color; the notebook does it all."""
    images = (digits(32, 3) * 255).astype(np.uint8)
    rows = [
        {"image": batch / np.float32(255) - 0.5}
        for (batch,) in itertools.islice(batches(32, images), 31)
    ]
    loaded = iter([{"image": images, "id": None, "label": None}, rows, rows])
    stand_in(*TENSORFLOW, "matplotlib.pyplot")
    stand_in("tensorflow_datasets", as_numpy=lambda _: next(loaded))
    stand_in("tensorflow.compat.v2", __version__="none")
    source.execute()


def rnn(source: Source) -> None:
    """Train Equinox's recurrent network; the notebook makes its data."""
    np.random.seed(0)  # noqa: NPY002 (the notebook draws from it)
    source.execute()["main"](steps=200, batch_size=64)


def score(source: Source) -> None:
    """Train Equinox's score model on digits."""
    stand_in("matplotlib.pyplot")
    images = (digits(28, 1) * 255).astype(np.uint8).transpose(0, 3, 1, 2)
    main = source.execute()
    main["mnist"] = lambda: jnp.asarray(images)
    sizes = {"mix_patch_size": 128, "mix_hidden_size": 128, "num_blocks": 2}
    main["main"](**sizes, num_steps=120, batch_size=64, sample_size=1, dt0=5.0)


def vit(source: Source) -> None:
    """Train Equinox's vision transformer on digits in color."""
    images = digits(32, 3).transpose(0, 3, 1, 2)
    loader = ([as_tensor(array) for array in each] for each in batches(64, images, labels()))
    stand_in("torch", Tensor=Tensor)
    stand_in("torchvision.transforms")
    stand_in("torch.utils.data", DataLoader=lambda *_, **__: loader)
    source.execute()


def ppo(source: Source) -> float:
    """Train PureJaxRL's PPO to balance a pole; return the mean return at the end."""
    stand_in("brax.envs.wrappers.training", "navix")
    give_older_names()
    train = source.module()
    config = {"LR": 2.5e-4, "NUM_ENVS": 4, "NUM_STEPS": 128, "TOTAL_TIMESTEPS": 6e4}
    config |= {"UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95}
    config |= {"CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5}
    config |= {"ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "ANNEAL_LR": True}
    metrics = jax.jit(train.make_train(config))(jax.random.PRNGKey(30))["metrics"]
    returns = np.asarray(metrics["returned_episode_returns"])
    return float(returns[-len(returns) // 10 :].mean())


def vae(source: Source) -> None:
    """Train Flax's VAE on digits in black and white."""
    images = (digits(28, 1) > 0.5).reshape(-1, 784).astype(np.float32)
    splits = {"train": SimpleNamespace(num_examples=128 * 60)}
    builder = SimpleNamespace(
        download_and_prepare=lambda: None, info=SimpleNamespace(splits=splits)
    )
    stand_in(*TENSORFLOW, "utils")
    stand_in("tensorflow_datasets", builder=lambda _: builder)
    stand_in(
        "input_pipeline",
        build_train_set=lambda size, _: (batch for (batch,) in batches(size, images)),
        build_test_set=lambda _: images,
    )
    config = SimpleNamespace(batch_size=128, latents=20, learning_rate=1e-3, num_epochs=1)
    source.module().train_and_evaluate(config, str(source.root))


def language(source: Source) -> None:
    """Train Haiku's transformer on the characters of Python's help."""
    random.seed(0)
    train = source.package("examples.transformer.train")
    loader = train.dataset.load_ascii_dataset(english(), batch_size=8, sequence_length=64)
    state = train.init(jax.random.PRNGKey(0), next(loader))
    for batch in itertools.islice(loader, 100):
        state, _ = train.update(state, batch)


def neural_ode(source: Source) -> None:
    """Train Diffrax's neural ODE; the notebook makes its data."""
    stand_in("matplotlib.pyplot")
    source.execute()["main"](steps_strategy=(100, 100), plot=False)


def allen_cahn(source: Source) -> float:
    """Train JAX-PI's network as its `train_and_evaluate` does; return the solution's error."""
    stand_in("torch.utils.data", Dataset=object)
    give_older_names()
    source.package("jaxpi.models")
    from scipy import io  # noqa: PLC0415 (only this program needs it)

    folder = source.root / "examples/allen_cahn"
    example = source._replace(file="examples/allen_cahn/models.py")
    models, config = example.module(), example.module("configs.default").get_config()
    data = io.loadmat(str(folder / "data/allen_cahn.mat"))
    times, places = data["t"].flatten(), data["x"].flatten()
    config.arch.hidden_dim, config.arch.fourier_emb.embed_dim = 64, 64
    domain = jnp.array([[times[0], times[-1]], [places[0], places[-1]]])
    sampler = iter(source.package("jaxpi.samplers").UniformSampler(domain, 512))
    model = models.AllenCahn(config, data["usol"][0], times, places)
    for step in range(300):
        batch = next(sampler)
        model.state = model.step(model.state, batch)
        if step % 100 == 0:
            model.state = model.update_weights(model.state, batch)
    params = jax.tree.map(lambda x: x[0], model.state.params)
    return float(model.compute_l2_error(params, data["usol"]))


def s5(source: Source) -> None:
    """Train a stack of S5 layers on digits, pixel by pixel."""
    pixels = digits(8, 1).reshape(-1, 64, 1)
    loader = batches(64, pixels, labels())
    epoch = [tuple(as_tensor(array) for array in next(loader)) for _ in range(60)]
    made = epoch, None, epoch[:1], {}, 10, 64, 1, 64 * len(epoch)
    source.package("s5")
    stand_in("wandb")
    stand_in("s5.dataloading", Datasets={"digits": lambda *_, **__: made})
    give_older_names()
    settings = {"dataset": "digits", "dir_name": "", "jax_seed": 0, "bsz": 64, "epochs": 1}
    settings |= {"ssm_size_base": 32, "blocks": 1, "conj_sym": True, "clip_eigs": False}
    settings |= {"ssm_lr_base": 1e-3, "lr_factor": 3, "lr_min": 0, "warmup_end": 0}
    settings |= {"d_model": 64, "n_layers": 2, "p_dropout": 0.0, "batchnorm": False}
    settings |= {"C_init": "trunc_standard_normal", "discretization": "zoh", "bidirectional": False}
    settings |= {"dt_min": 0.001, "dt_max": 0.1, "dt_global": False, "prenorm": True}
    settings |= {"activation_fn": "half_glu1", "opt_config": "standard", "weight_decay": 0.01}
    settings |= {"mode": "pool", "bn_momentum": 0.9, "cosine_anneal": True, "USE_WANDB": False}
    settings |= {"early_stop_patience": 10, "reduce_factor": 1, "lr_patience": 10}
    source.package("s5.train").train(SimpleNamespace(**settings))
