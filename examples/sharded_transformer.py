"""A float16 language model, sharded over all devices of all processes.

A small transformer learns Python's own help pages, byte by byte. It computes in float16. Parameters
and Adam's moments are float32, sharded over all devices (FSDP). The loss scale starts too high, so
the first steps overflow. They are skipped on all devices. The same command resumes an interrupted
run from its last checkpoint, even with another number of processes or devices. To start several
processes, give each the address of the first, the number of processes, and its own number. Under
Slurm, Open MPI or Kubernetes, or on a TPU pod, `--distributed` without arguments is enough.

    python examples/sharded_transformer.py --distributed 10.0.0.1:1234 2 0
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm, trange

import optax_lossscale as ols

BATCH, WIDTH, LENGTH, LAYERS, HEADS = 32, 128, 64, 4, 4  # the first two: multiples of the devices
SHAPES = {"tokens": (256, WIDTH), "positions": (LENGTH, WIDTH)}
SHAPES |= {"qkv": (LAYERS, WIDTH, 3 * WIDTH), "out": (LAYERS, WIDTH, WIDTH)}
SHAPES |= {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
TEXT = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
TRAIN, TEST = np.split(TEXT, [len(TEXT) * 9 // 10])
POLICY = ols.DynamicLossScale(initial_scale=2.0**24, growth_interval=100)
ADAM = optax.adamw(optax.warmup_constant_schedule(0, 3e-3, 20))
TX = ols.with_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), ADAM), POLICY)


def init() -> tuple:
    """Return the float32 parameters and the optimizer's state."""
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    params = optax.tree.scale(0.02, optax.tree.random_like(jax.random.key(0), like))
    return params, TX.init(params)


def loss_fn(params: dict, windows: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of each next byte."""
    norm = jax.nn.standardize

    def block(x: jax.Array, w: dict) -> tuple[jax.Array, None]:
        heads = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)
        q, k, v = jnp.split(heads, 3, axis=-1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(scores, where=jnp.tri(LENGTH, dtype=bool))
        x += (weights @ v).swapaxes(1, 2).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    x = params["tokens"][windows[:, :-1]] + params["positions"]
    x, _ = jax.lax.scan(block, x, {name: p for name, p in params.items() if p.ndim == 3})
    logits = norm(x) @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


half_loss = ols.autocast(loss_fn, jnp.float16)


def train_step(params: dict, opt_state: optax.OptState, windows: jax.Array) -> tuple:
    """Apply one step, or skip it on all devices."""
    loss, grads = ols.value_and_grad(half_loss)(opt_state, params, windows)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def train(steps: int, checkpoints: Path) -> None:
    """Train, starting from the last checkpoint, and print a table."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    say = tqdm.write if jax.process_index() == 0 else lambda _: None

    def draw(text: np.ndarray, step: int) -> jax.Array:  # JAX asks only for local rows
        starts = np.random.default_rng(step).integers(0, len(text) - LENGTH, (BATCH, 1))
        windows, rows = text[starts + np.arange(LENGTH + 1)], jax.NamedSharding(mesh, jax.P("data"))
        return jax.make_array_from_callback(windows.shape, rows, windows.__getitem__)

    def place(leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:  # shards the last axis
        return jax.NamedSharding(mesh, jax.P(*(None, None, "data")[3 - leaf.ndim :]))

    places = jax.tree.map(place, jax.eval_shape(init))
    start = jax.jit(init, out_shardings=places)
    step_fn = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=places)
    options = ocp.CheckpointManagerOptions(save_interval_steps=100, max_to_keep=2)
    with ocp.CheckpointManager(checkpoints.absolute(), options=options) as manager:
        first = manager.latest_step() or 0
        wanted = ocp.args.StandardRestore(start.eval_shape())  # each device reads its part
        state = manager.restore(first, args=wanted) if first else start()
        say(f"{mesh.size} devices of {jax.process_count()} processes, from step {first}")
        say("  step  loss on unseen text    loss scale  skipped")
        for step in trange(first, steps + 1, unit="step", disable=jax.process_index() > 0 or None):
            if step in {first, steps} or step % (steps // 5 or 1) == 0:
                loss = jax.jit(half_loss)(state[0], draw(TEST, 0))
                scale = ols.loss_scale_state(state[1])
                say(f"{step:6}{loss:21.3f}{scale.loss_scale:14,.0f}{scale.total_skipped:9}")
            if step < steps:
                state = step_fn(*state, draw(TRAIN, step))
                manager.save(step + 1, args=ocp.args.StandardSave(state), force=step + 1 == steps)


def main(argv: list[str] | None = None) -> None:
    """Read the options, join the other processes if there are any, and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, default=Path("output/checkpoints"))
    parser.add_argument("--distributed", nargs="*", metavar="ADDRESS PROCESSES NUMBER")
    args = parser.parse_args(argv)
    if args.distributed is not None:
        address, *numbers = args.distributed or [None]
        jax.distributed.initialize(address, *map(int, numbers))
    train(args.steps, args.checkpoints)


if __name__ == "__main__":
    main()
