"""The programs of the table: where each is, and the lines that are changed in it.

A change is a part of the program with marks: «new» is inserted, and «new|old» stands in place of
what was there. The changed lines call this library `ols`, the dtype of matrix products `half`, and
the dtype of parameters `stored`.
"""

from benchmarks.programs import drivers, kinds
from benchmarks.programs.source import Program

# Equinox differentiates functions by a decorator.
FILTERED = (
    "@«lambda f: ols.value_and_grad(ols.autocast(f, half), transform=»eqx.filter_value_and_grad«)»"
)
# It adds float32 updates to bfloat16 parameters, and leaves the sum in float32.
ADDED = "«ols.cast(»eqx.apply_updates(model, updates)«, stored)»"

PROGRAMS = {
    "gemma": Program(
        name="Flax's Gemma, 4 x 2 devices",
        repository="google/flax",
        file="examples/gemma/train.py",
        also=("examples/gemma",),
        changes=(
            "«ols|jax».value_and_grad(«ols.autocast(»loss_fn«, half)», has_aux=True)",
            "grad_fn(«optimizer.opt_state, »params, rngs.fork())",
            (
                "    «nnx.update(model, ols.cast(nnx.state(model), stored))\n    »"
                "optimizer = nnx.Optimizer(\n"
            ),
            "tx=«ols.with_loss_scaling(»optax.adamw(",
            "weight_decay=config.weight_decay,\n        )«)»,",
        ),
        run=drivers.gemma,
        devices=8,
        own="`use_bfloat16`",
    ),
    "shard_map": Program(
        name="JAX's FSDP and TP notebook",
        repository="jax-ml/jax",
        file="docs/notebooks/shard_map.py",
        changes=(
            (
                "jax.jit(«ols|jax».grad(«ols.autocast(»loss_fsdp_tp«, half)»))"
                "(«ols.init(), »params, batch)"
            ),
        ),
        settings={"# #### SPMD pipeline parallelism": "raise StopIteration\n# "},
        run=drivers.shard_map,
        devices=8,
    ),
    "dit": Program(
        name="A diffusion transformer",
        repository="kvfrans/jax-diffusion-transformer",
        file="train_diffusion.py",
        also=("diffusion_transformer.py", "schedulers.py", "utils"),
        changes=(
            (
                "«ols|jax».grad(«ols.autocast(»loss_fn«, half)», has_aux=True)"
                "(«self.model.opt_state, »self.model.params)"
            ),
            "TrainState.create(model_def, «ols.cast(»params«, stored)», tx=tx)",
            (
                "tx = «ols.with_loss_scaling(»optax.adam(learning_rate=FLAGS.model['lr'], "
                "b1=FLAGS.model['beta1'], b2=FLAGS.model['beta2'])«)»"
            ),
        ),
        run=drivers.diffusion_transformer,
    ),
    "vq_vae": Program(
        name="Haiku's VQ-VAE",
        repository="google-deepmind/dm-haiku",
        file="examples/vqvae_example.ipynb",
        changes=(
            (
                "«ols|jax».grad(«ols.autocast(»adapt_forward«, half)», has_aux=True)"
                "(«opt_state, »params, state, data))"
            ),
            "«ols.with_loss_scaling(»optax.adam(learning_rate)«)»",
            "optimizer.update(grads, opt_state«, params»)",
            "«params = ols.cast(params, stored)\n»opt_state = optimizer.init(params)",
            # Convolutions refuse float32 images with bfloat16 weights.
            "«params = ols.cast(params, 'float32')\n»train_batch = next(iter(train_dataset))",
        ),
        settings={
            "num_training_updates = 100000": "num_training_updates = 30",
            "num_hiddens = 128\n": "num_hiddens = 64\n",
        },
        run=drivers.vq_vae,
    ),
    "language": Program(
        name="Haiku's transformer",
        repository="google-deepmind/dm-haiku",
        file="examples/transformer/train.py",
        also=("examples/transformer", "examples/__init__.py"),
        changes=(
            "«ols|jax».value_and_grad(«ols.autocast(»loss_fn.apply«, half)»)",
            "loss_and_grad_fn(«state.opt_state, »state.params,",
            "«ols.cast(»loss_fn.init(init_rng, data)«, stored)»",
            "update(gradients, state.opt_state«, state.params»)",
            "return «ols.with_loss_scaling(»optax.chain(",
            "b2=0.99),\n  )«)»",
        ),
        run=drivers.language,
    ),
    "vae": Program(
        name="Flax's VAE",
        repository="google/flax",
        file="examples/vae/train.py",
        also=("examples/vae",),
        changes=(
            "«ols|jax».grad(«ols.autocast(»loss_fn«, half)»)(«state.opt_state, »state.params)",
            "      params=«ols.cast(»params«, stored)»,",
            "tx=«ols.with_loss_scaling(»optax.adam(config.learning_rate)«)»,",
        ),
        run=drivers.vae,
    ),
    "vit": Program(
        name="Equinox's vision transformer",
        repository="patrick-kidger/equinox",
        file="docs/examples/vision_transformer.ipynb",
        changes=(
            FILTERED,
            "compute_grads(«state, »model, images,",
            "optimizer.update(grads, state, «eqx.filter(»model«, eqx.is_inexact_array)»)",
            ADDED,
            "«model = ols.cast(model, stored)\n»state = optimizer.init(",
            "optimizer = «ols.with_loss_scaling(»optax.adamw(",
            "b2=beta2,\n)«)»",
        ),
        settings={
            "num_steps = 100000": "num_steps = 50",
            "embedding_dim = 512": "embedding_dim = 64",
            "hidden_dim = 256": "hidden_dim = 128",
            "num_heads = 8": "num_heads = 4",
            "num_layers = 6": "num_layers = 2",
            "lr = 0.0001": "lr = 0.001",
            "accuracies = []": "raise StopIteration",
        },
        run=drivers.vision_transformer,
    ),
    "score": Program(
        name="Equinox's score model",
        repository="patrick-kidger/equinox",
        file="docs/examples/score_based_diffusion.ipynb",
        changes=(
            (
                "«ols.value_and_grad(ols.autocast(batch_loss_fn, half), "
                "transform=»eqx.filter_value_and_grad«|(batch_loss_fn»)"
            ),
            "grads = loss_fn(«opt_state, »model, weight,",
            "«ols.with_loss_scaling(»optax.adabelief(lr)«)»",
            "opt_update(grads, opt_state«, eqx.filter(model, eqx.is_inexact_array)»)",
            ADDED,
            "    «model = ols.cast(model, stored)\n    »opt_state = opt.init(",
            # Convolutions refuse float32 images with bfloat16 weights.
            "ft.partial(single_sample_fn, «ols.cast(»model«, 'float32')»,",
        ),
        settings={"\nmain()": ""},
        run=drivers.score,
    ),
    "rnn": Program(
        name="Equinox's RNN",
        repository="patrick-kidger/equinox",
        file="docs/examples/train_rnn.ipynb",
        changes=(
            FILTERED,
            "compute_loss(«opt_state, »model, x, y)\n        updates",
            "«ols.with_loss_scaling(»optax.adam(learning_rate)«)»",
            ADDED,
            "    «model = ols.cast(model, stored)\n    »opt_state = optim.init(",
        ),
        settings={"\nmain()": "\n"},
        run=drivers.rnn,
        unsuited=("masters",),
        reason=(
            "all arrays have fewer than 4,096 elements, so their moments stay in float32, and "
            "masters save nothing"
        ),
    ),
    "ppo": Program(
        name="PureJaxRL's PPO: return",
        repository="luchris429/purejaxrl",
        file="purejaxrl/ppo.py",
        also=("purejaxrl/wrappers.py",),
        changes=(
            "«ols|jax».value_and_grad(«ols.autocast(»_loss_fn«, half)», has_aux=True)",
            "«train_state.opt_state, »train_state.params, traj_batch,",
            "params=«ols.cast(»network_params«, stored)»,",
            "tx=«ols.with_loss_scaling(»tx«)»,",
        ),
        run=drivers.ppo,
        reason=(
            "one seed says nothing: float32 returns 284, and 238 from weights rounded to bfloat16"
        ),
    ),
    "allen_cahn": Program(
        name="JAX-PI's Allen-Cahn: error",
        repository="PredictiveIntelligenceLab/jaxpi",
        license="Penn's own",
        file="jaxpi/models.py",
        also=("jaxpi", "examples/allen_cahn"),
        changes=(
            " «ols.»grad(«ols.autocast(»self.loss«, half)»)(«state.opt_state, »state.params,",
            "        params=«ols.cast(»params«, stored)»,\n        tx",
            "    return «ols.with_loss_scaling(»tx«)»\n",
        ),
        run=drivers.allen_cahn,
    ),
    "s5": Program(
        name="S5",
        repository="lindermanlab/S5",
        license="MIT",
        file="s5/train_helpers.py",
        also=("s5",),
        changes=(
            (
                "«ols|jax».value_and_grad(«ols.autocast(»loss_fn«, half)», has_aux=True)"
                "(«state.opt_state, »state.params)"
            ),
            "params=«ols.cast(»params«, stored)», tx=«ols.with_loss_scaling(»tx«)»",
            "«ols.inner(»state.opt_state«)».inner_states[",
        ),
        settings={'variables["params"].unfreeze()': 'variables["params"]'},
        run=drivers.s5,
        reason="complex products and parameters are left alone",
    ),
    "neural_ode": Program(
        name="Diffrax's neural ODE",
        repository="patrick-kidger/diffrax",
        file="docs/examples/neural_ode.ipynb",
        changes=(
            FILTERED,
            "grad_loss(«opt_state, »model, ti, yi)\n        updates",
            "«ols.with_loss_scaling(»optax.adabelief(lr)«)»",
            "optim.update(grads, opt_state«, eqx.filter(model, eqx.is_inexact_array)»)",
            ADDED,
            "        «model = ols.cast(model, stored)\n        »opt_state = optim.init(",
        ),
        settings={"\nts, ys, model = main()": "\n"},
        run=drivers.neural_ode,
        unsuited=("autocast",),
        reason="nothing runs in half precision, since the solver has its own derivative",
    ),
    "siglip": Program(
        name="big_vision's SigLIP, two towers",
        repository="google-research/big_vision",
        file="big_vision/trainers/proj/image_text/siglip.py",
        also=(
            *("big_vision/__init__.py", "big_vision/models", "big_vision/pp/registry.py"),
            *("big_vision/optax.py", "big_vision/sharding.py", "big_vision/utils.py"),
        ),
        changes=(
            "«ols|jax».value_and_grad(«ols.autocast(»loss_fn«, half)»)(«opt, »params)",
            "    return «ols.cast(»params«, stored)»\n\n  # This seed",
            "  «tx = ols.with_loss_scaling(tx)\n  »opt_shape = jax.eval_shape(",
        ),
        settings={
            'jax.config.update("jax_transfer_guard", "disallow")': "",
            "jax.distributed.initialize()": "",
            "flags.FLAGS.config": "CONFIG",
            "flags.FLAGS.workdir": "None",
        },
        run=kinds.siglip,
        own="`dtype_mm` (image tower)",
    ),
    "graphs": Program(
        name="Flax's graph network",
        repository="google/flax",
        file="examples/ogbg_molpcba/train.py",
        also=("examples/ogbg_molpcba",),
        changes=(
            "«ols|jax».value_and_grad(«ols.autocast(»loss_fn«, half)», has_aux=True)",
            "grad_fn(«state.opt_state, »state.params, graphs)",
            "params=«ols.cast(»params«, stored)», tx=«ols.with_loss_scaling(»tx«)»\n",
        ),
        run=kinds.graphs,
    ),
    "speech": Program(
        name="AlgoPerf's Conformer, CTC",
        repository="mlcommons/algorithmic-efficiency",
        file="algorithms/archived_paper_baselines/nadamw/jax/submission.py",
        also=("algoperf",),
        changes=(
            "«ols|jax».value_and_grad(«ols.autocast(»_loss_fn«, half)», has_aux=True)",
            "grad_fn(\n    «optimizer_state, »current_param_container\n  )",
            "opt_init_fn, opt_update_fn = «ols.with_loss_scaling(»nadamw(",
            "    weight_decay=hyperparameters.weight_decay,\n  )«)»\n",
            "jnp.zeros(s.shape_tuple«, stored»)",
        ),
        settings={
            "from ._version import version as __version__": "",
            "[(320000,), (320000,)]": "[(8000,), (8000,)]",
            "vocab_size: int = 1024": "vocab_size: int = 32",
            "encoder_dim: int = 512": "encoder_dim: int = 64",
            "num_attention_heads: int = 8": "num_attention_heads: int = 4",
            "num_encoder_layers: int = 4": "num_encoder_layers: int = 1",
        },
        run=kinds.speech,
        own="`dtype`",
        reason="the spectrogram is made by constant matrices, so it stays in float32",
    ),
    "flow": Program(
        name="Distrax's spline flow",
        repository="google-deepmind/distrax",
        file="examples/flow.py",
        changes=(
            "«ols|jax».grad(«ols.autocast(»loss_fn«, half)»)(«opt_state, »params,",
            "«ols.with_loss_scaling(»optax.adam(FLAGS.learning_rate)«)»",
            "optimizer.update(grads, opt_state«, params»)",
            "  «params = ols.cast(params, stored)\n  »opt_state = optimizer.init(params)",
        ),
        settings={"(28, 28, 1)": "(8, 8, 1)"},
        run=kinds.flow,
    ),
    "nerf": Program(
        name="MultiNeRF's mip-NeRF 360",
        repository="google-research/multinerf",
        file="internal/train_utils.py",
        also=("internal",),
        changes=(
            "«ols|jax».value_and_grad(«ols.autocast(»loss_fn«, half)», has_aux=True)",
            "loss_grad_fn(«state.opt_state, »state.params)",
            "tx = «ols.with_loss_scaling(»optax.adam(learning_rate=lr_fn_main, **adam_kwargs)«)»",
            "apply_fn=None, params=«ols.cast(»variables«, stored)»,",
        ),
        run=kinds.nerf,
    ),
    "named_axes": Program(
        name="Levanter's GPT-2, named axes",
        repository="stanford-crfm/levanter",
        file="src/levanter/models/gpt2.py",
        also=("src/levanter",),
        changes=(),
        run=kinds.named_axes,
        own="a jmp policy",
        reason="trained in a loop of ours",
    ),
}
