"""The programs of the table: where each lies, and the lines that are changed in it.

The changed lines say `ols` for this library and `half` for the dtype.
"""

from benchmarks.programs import drivers
from benchmarks.programs.source import Program

# Equinox differentiates functions by a decorator.
FILTERED = "@eqx.filter_value_and_grad"
OURS = "@lambda f: ols.value_and_grad(ols.autocast(f, half), transform=eqx.filter_value_and_grad)"

PROGRAMS = {
    "gemma": Program(
        name="Flax's Gemma, 4 x 2 devices",
        repository="google/flax",
        file="examples/gemma/train.py",
        also=("examples/gemma",),
        changes={
            "jax.value_and_grad(loss_fn, has_aux=True)": (
                "ols.value_and_grad(ols.autocast(loss_fn, half), has_aux=True)"
            ),
            "grad_fn(params, rngs.fork())": "grad_fn(optimizer.opt_state, params, rngs.fork())",
            "tx=optax.adamw(": "tx=ols.with_loss_scaling(optax.adamw(",
            "weight_decay=config.weight_decay,\n        ),": (
                "weight_decay=config.weight_decay,\n        )),"
            ),
        },
        run=drivers.gemma,
        devices=8,
    ),
    "shard_map": Program(
        name="JAX's FSDP and TP notebook",
        repository="jax-ml/jax",
        file="docs/notebooks/shard_map.py",
        changes={
            "jax.jit(jax.grad(loss_fsdp_tp))(params, batch)": (
                "jax.jit(ols.grad(ols.autocast(loss_fsdp_tp, half)))(ols.init(), params, batch)"
            )
        },
        settings={"# #### SPMD pipeline parallelism": "raise StopIteration\n# "},
        run=drivers.shard_map,
        devices=8,
    ),
    "dit": Program(
        name="A diffusion transformer",
        repository="kvfrans/jax-diffusion-transformer",
        file="train_diffusion.py",
        also=("diffusion_transformer.py", "schedulers.py", "utils"),
        changes={
            "jax.grad(loss_fn, has_aux=True)(self.model.params)": (
                "ols.grad(ols.autocast(loss_fn, half), has_aux=True)"
                "(self.model.opt_state, self.model.params)"
            ),
            "tx = optax.adam(learning_rate=FLAGS.model['lr'], b1=FLAGS.model['beta1'], "
            "b2=FLAGS.model['beta2'])": (
                "tx = ols.with_loss_scaling(optax.adam(learning_rate=FLAGS.model['lr'], "
                "b1=FLAGS.model['beta1'], b2=FLAGS.model['beta2']))"
            ),
        },
        run=drivers.diffusion_transformer,
    ),
    "vq_vae": Program(
        name="Haiku's VQ-VAE",
        repository="google-deepmind/dm-haiku",
        file="examples/vqvae_example.ipynb",
        changes={
            "jax.grad(adapt_forward, has_aux=True)(params, state, data))": (
                "ols.grad(ols.autocast(adapt_forward, half), has_aux=True)"
                "(opt_state, params, state, data))"
            ),
            "optax.adam(learning_rate)": "ols.with_loss_scaling(optax.adam(learning_rate))",
        },
        settings={
            "num_training_updates = 100000": "num_training_updates = 60",
            "num_hiddens = 128\n": "num_hiddens = 64\n",
        },
        run=drivers.vq_vae,
    ),
    "language": Program(
        name="Haiku's transformer",
        repository="google-deepmind/dm-haiku",
        file="examples/transformer/train.py",
        also=("examples/transformer", "examples/__init__.py"),
        changes={
            "jax.value_and_grad(loss_fn.apply)": (
                "ols.value_and_grad(ols.autocast(loss_fn.apply, half))"
            ),
            "loss_and_grad_fn(state.params,": "loss_and_grad_fn(state.opt_state, state.params,",
            "return optax.chain(": "return ols.with_loss_scaling(optax.chain(",
            "b2=0.99),\n  )": "b2=0.99),\n  ))",
        },
        run=drivers.language,
    ),
    "vae": Program(
        name="Flax's VAE",
        repository="google/flax",
        file="examples/vae/train.py",
        also=("examples/vae",),
        changes={
            "jax.grad(loss_fn)(state.params)": (
                "ols.grad(ols.autocast(loss_fn, half))(state.opt_state, state.params)"
            ),
            "tx=optax.adam(config.learning_rate),": (
                "tx=ols.with_loss_scaling(optax.adam(config.learning_rate)),"
            ),
        },
        run=drivers.vae,
    ),
    "vit": Program(
        name="Equinox's vision transformer",
        repository="patrick-kidger/equinox",
        file="docs/examples/vision_transformer.ipynb",
        changes={
            FILTERED: OURS,
            "compute_grads(model, images,": "compute_grads(state, model, images,",
            "optimizer = optax.adamw(": "optimizer = ols.with_loss_scaling(optax.adamw(",
            "b2=beta2,\n)": "b2=beta2,\n))",
        },
        settings={
            "num_steps = 100000": "num_steps = 100",
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
        changes={
            "eqx.filter_value_and_grad(batch_loss_fn)": (
                "ols.value_and_grad(ols.autocast(batch_loss_fn, half), "
                "transform=eqx.filter_value_and_grad)"
            ),
            "grads = loss_fn(model, weight,": "grads = loss_fn(opt_state, model, weight,",
            "optax.adabelief(lr)": "ols.with_loss_scaling(optax.adabelief(lr))",
        },
        settings={"\nmain()": ""},
        run=drivers.score,
    ),
    "rnn": Program(
        name="Equinox's RNN",
        repository="patrick-kidger/equinox",
        file="docs/examples/train_rnn.ipynb",
        changes={
            FILTERED: OURS,
            "compute_loss(model, x, y)\n        updates": (
                "compute_loss(opt_state, model, x, y)\n        updates"
            ),
            "optax.adam(learning_rate)": "ols.with_loss_scaling(optax.adam(learning_rate))",
        },
        settings={"\nmain()": "\n"},
        run=drivers.rnn,
    ),
    "ppo": Program(
        name="PureJaxRL's PPO: return",
        repository="luchris429/purejaxrl",
        file="purejaxrl/ppo.py",
        also=("purejaxrl/wrappers.py",),
        changes={
            "jax.value_and_grad(_loss_fn, has_aux=True)": (
                "ols.value_and_grad(ols.autocast(_loss_fn, half), has_aux=True)"
            ),
            "train_state.params, traj_batch,": (
                "train_state.opt_state, train_state.params, traj_batch,"
            ),
            "tx=tx,": "tx=ols.with_loss_scaling(tx),",
        },
        run=drivers.ppo,
    ),
    "allen_cahn": Program(
        name="JAX-PI's Allen-Cahn: error",
        repository="PredictiveIntelligenceLab/jaxpi",
        file="jaxpi/models.py",
        also=("jaxpi", "examples/allen_cahn"),
        changes={
            "grad(self.loss)(state.params,": (
                "ols.grad(ols.autocast(self.loss, half))(state.opt_state, state.params,"
            ),
            "    return tx\n": "    return ols.with_loss_scaling(tx)\n",
        },
        run=drivers.allen_cahn,
    ),
    "s5": Program(
        name="S5",
        repository="lindermanlab/S5",
        file="s5/train_helpers.py",
        also=("s5",),
        changes={
            "jax.value_and_grad(loss_fn, has_aux=True)(state.params)": (
                "ols.value_and_grad(ols.autocast(loss_fn, half), has_aux=True)"
                "(state.opt_state, state.params)"
            ),
            "tx=tx)": "tx=ols.with_loss_scaling(tx))",
            "tx=tx, batch_stats=": "tx=ols.with_loss_scaling(tx), batch_stats=",
            "opt_state.inner_states[": "opt_state.inner_state.inner_states[",
        },
        settings={'variables["params"].unfreeze()': 'variables["params"]'},
        run=drivers.s5,
    ),
    "neural_ode": Program(
        name="Diffrax's neural ODE",
        repository="patrick-kidger/diffrax",
        file="docs/examples/neural_ode.ipynb",
        changes={
            FILTERED: OURS,
            "grad_loss(model, ti, yi)\n        updates": (
                "grad_loss(opt_state, model, ti, yi)\n        updates"
            ),
            "optax.adabelief(lr)": "ols.with_loss_scaling(optax.adabelief(lr))",
        },
        settings={"\nts, ys, model = main()": "\n"},
        run=drivers.neural_ode,
    ),
}
