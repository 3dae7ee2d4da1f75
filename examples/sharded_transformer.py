"""A float16 language model, sharded over all devices, from a laptop to many machines.

A small transformer learns to continue the text of Python's own help pages, byte by byte. It
computes in float16. Its parameters and Adam's moments are float32 and are sharded equally over all
devices of all processes (FSDP). Loss scaling keeps small gradients from rounding to zero, and skips
the steps that overflow, on all devices or on none.

Run one process, with all devices of this machine:

    python examples/sharded_transformer.py

Run several processes, each with its own number, on one machine or on many:

    python examples/sharded_transformer.py --coordinator 10.0.0.1:1234 --processes 2 --process-id 0
    python examples/sharded_transformer.py --coordinator 10.0.0.1:1234 --processes 2 --process-id 1

Under Slurm, Open MPI or Kubernetes, or on a TPU pod, `--coordinator auto` is enough.
With `--checkpoints DIRECTORY`, which all processes must share, the same command resumes an
interrupted run, even with a different number of processes or devices.

Exits with an error if the model does not predict unseen text better than byte frequencies do.
"""

import argparse
import contextlib
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import optax_lossscale as ols

VOCABULARY = 256  # bytes
EVALUATED = 32  # windows of unseen text

Params = dict[str, Any]
State = dict[str, Any]  # params and opt_state; what a checkpoint holds


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Return the training bytes, and the test bytes: the last tenth of each topic."""
    topics = [text.encode() for _, text in sorted(pydoc_data.topics.topics.items())]
    cuts = [int(0.9 * len(topic)) for topic in topics]
    learned = b"".join(topic[:cut] for topic, cut in zip(topics, cuts, strict=True))
    unseen = b"".join(topic[cut:] for topic, cut in zip(topics, cuts, strict=True))
    return np.frombuffer(learned, np.uint8), np.frombuffer(unseen, np.uint8)


def unigram_loss(learned: np.ndarray, unseen: np.ndarray) -> float:
    """Return the cross-entropy on the unseen bytes of a model of byte frequencies."""
    counts = np.bincount(learned, minlength=VOCABULARY) + 1.0
    return float(-np.mean(np.log(counts / counts.sum())[unseen]))


# The model.


def init_params(key: jax.Array, *, layers: int, width: int, length: int) -> Params:
    """Return float32 parameters, with those of all layers stacked."""
    shapes = {
        "qkv": (layers, width, 3 * width),
        "attended": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }
    *keys, key_tokens, key_positions = jax.random.split(key, len(shapes) + 2)
    draw = jax.nn.initializers.lecun_normal(batch_axis=0)
    blocks = {name: draw(k, shapes[name]) for name, k in zip(shapes, keys, strict=True)}
    blocks["norm1"] = blocks["norm2"] = jnp.ones((layers, width))
    return {
        "tokens": 0.02 * jax.random.normal(key_tokens, (VOCABULARY, width)),
        "positions": 0.02 * jax.random.normal(key_positions, (length, width)),
        "blocks": jax.tree.map(jnp.array, blocks),
        "norm": jnp.ones(width),
    }


def logits_fn(params: Params, tokens: jax.Array, *, heads: int, dtype: Any) -> jax.Array:
    """Return float32 logits of each next byte. All large operations run in `dtype`."""
    length = tokens.shape[1]
    embedding = params["tokens"].astype(dtype)
    x = embedding[tokens] + params["positions"][:length].astype(dtype)

    def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda a: a.astype(dtype), p)
        q, k, v = jnp.split(normalize(x, p["norm1"]) @ w["qkv"], 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(dtype)  # the softmax in float32
        x += jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ w["attended"]
        x += jax.nn.gelu(normalize(x, p["norm2"]) @ w["up"]) @ w["down"]
        return x, None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    return (normalize(x, params["norm"]) @ embedding.T).astype(jnp.float32)


def normalize(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Divide by the root mean square, in float32 because the squares overflow float16."""
    wide = x.astype(jnp.float32)
    rms = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * rms * weight).astype(x.dtype)


# Sharding and data.


def fully_sharded(shapes: State, mesh: Mesh) -> State:
    """Shard each array over all devices, along its longest divisible axis."""

    def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        divisible = [n if n % mesh.size == 0 else 0 for n in leaf.shape]
        spec = [None] * len(leaf.shape)
        if any(divisible):
            spec[divisible.index(max(divisible))] = "data"
        return NamedSharding(mesh, P(*spec))

    return jax.tree.map(place, shapes)


def batches(
    text: np.ndarray, mesh: Mesh, *, size: int, length: int, first: int
) -> Iterator[jax.Array]:
    """Yield windows of the text from step `first` on. They depend on the step only."""
    spread = NamedSharding(mesh, P("data"))
    step = first
    while True:
        starts = np.random.default_rng(step).integers(0, len(text) - length, size)
        windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        # JAX asks each process only for the rows of its own devices.
        yield jax.make_array_from_callback(windows.shape, spread, windows.__getitem__)
        step += 1


# Training.


def make_functions(
    args: argparse.Namespace, mesh: Mesh
) -> tuple[Callable, Callable, Callable, Callable, State]:
    """Return functions to start, train, evaluate and generate, and the state's shardings."""
    warmup, end = args.horizon // 10 + 1, args.horizon + 2
    rate = optax.warmup_cosine_decay_schedule(0, args.rate, warmup, end)
    tx = ols.with_loss_scaling(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(rate),
        ),
        # Too high on purpose: the first few steps overflow and lower the scale until it fits.
        ols.DynamicLossScale(initial_scale=2.0**20, growth_interval=100),
    )
    dtype = jnp.dtype(args.dtype)

    def start() -> State:
        params = init_params(
            jax.random.key(0), layers=args.layers, width=args.width, length=args.length
        )
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params: Params, windows: jax.Array) -> jax.Array:
        logits = logits_fn(params, windows[:, :-1], heads=args.heads, dtype=dtype)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]))

    def train_step(state: State, windows: jax.Array) -> tuple[State, jax.Array]:
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, windows)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}, loss

    def generate(params: Params, prompt: jax.Array, key: jax.Array) -> jax.Array:
        def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = logits_fn(params, window[None], heads=args.heads, dtype=dtype)[0, -1]
            byte = jax.random.categorical(key, logits / 0.7)
            return jnp.append(window[1:], byte), byte

        _, generated = jax.lax.scan(next_byte, prompt, jax.random.split(key, args.generate))
        return generated

    places = fully_sharded(jax.eval_shape(start), mesh)
    everywhere = NamedSharding(mesh, P())
    return (
        jax.jit(start, out_shardings=places),
        jax.jit(train_step, donate_argnums=0, out_shardings=(places, everywhere)),
        jax.jit(loss_fn, out_shardings=everywhere),
        jax.jit(generate, out_shardings=everywhere),
        places,
    )


def train(args: argparse.Namespace) -> list[str]:
    """Train, print the results, and return the problems found."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    args.batch = -(-args.batch // mesh.size) * mesh.size  # a multiple of the devices
    learned, unseen = load_text()
    baseline = unigram_loss(learned, unseen)
    start, train_step, evaluate, generate, places = make_functions(args, mesh)
    is_first = jax.process_index() == 0
    say = print if is_first else lambda *_: None

    with contextlib.ExitStack() as stack:
        manager, first = None, 0
        if args.checkpoints:
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            manager = stack.enter_context(
                ocp.CheckpointManager(args.checkpoints.absolute(), options=options)
            )
            first = manager.latest_step() or 0
        state = start() if first == 0 else restore(manager, first, start, places)
        size = sum(p.size for p in jax.tree.leaves(state["params"]))
        say(
            f"{size:,} parameters on {mesh.size} devices of {jax.process_count()} processes, "
            f"from step {first}"
        )
        progress = stack.enter_context(
            tqdm(total=args.steps, initial=first, unit="step", disable=not is_first)
        )
        data = batches(learned, mesh, size=args.batch, length=args.length, first=first)
        for step in range(first + 1, args.steps + 1):
            state, loss = train_step(state, next(data))
            if step % args.report == 0:  # reading a number waits for it
                scale = ols.loss_scale_state(state["opt_state"])
                progress.set_postfix(
                    loss=f"{loss:.3f}",
                    scale=f"2**{np.log2(scale.loss_scale):.0f}",
                    skipped=int(scale.total_skipped),
                )
            progress.update()
            if manager and (step % args.save == 0 or step == args.steps):
                manager.save(step, args=ocp.args.StandardSave(state))
        if manager:
            manager.wait_until_finished()

    windows = next(
        batches(unseen, mesh, size=max(EVALUATED, mesh.size), length=args.length, first=0)
    )
    reached = float(evaluate(state["params"], windows))
    scale = ols.loss_scale_state(state["opt_state"])
    say(
        f"skipped {int(scale.total_skipped)} steps, loss scale 2**{np.log2(scale.loss_scale):.0f}\n"
        f"loss on unseen text: {reached:.3f} nats per byte; of byte frequencies: {baseline:.3f}"
    )
    prompt = jnp.asarray(unseen[: args.length], jnp.int32)
    generated = np.asarray(generate(state["params"], prompt, jax.random.key(1)), np.uint8)
    say(f"--- generated\n{generated.tobytes().decode(errors='replace')}\n---")
    return problems(reached, baseline)


def restore(
    manager: ocp.CheckpointManager, step: int, start: Callable[[], State], places: State
) -> State:
    """Restore a checkpoint. Each device reads its own part, whichever device wrote it."""
    wanted = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(start),
        places,
    )
    return manager.restore(step, args=ocp.args.StandardRestore(wanted))


def problems(reached: float, baseline: float) -> list[str]:
    """Return the problems with the final loss. NaN never passes."""
    if reached < baseline:
        return []
    expected = f"expected less than the {baseline:.3f} of byte frequencies"
    return [f"the loss on unseen text is {reached:.3f}, {expected}; train for more --steps"]


def main(argv: Sequence[str] | None = None) -> list[str]:
    """Read the options, join the other processes if there are any, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--steps", default=600, help="number of the last step", **number)
    parser.add_argument("--horizon", help="end of the rate schedule; --steps if omitted", **number)
    parser.add_argument("--batch", default=16, help="windows per step, over all devices", **number)
    parser.add_argument("--length", default=128, help="bytes per window", **number)
    parser.add_argument("--layers", default=4, help="transformer blocks", **number)
    parser.add_argument("--width", default=128, help="size of the hidden state", **number)
    parser.add_argument("--heads", default=4, help="attention heads; must divide --width", **number)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--generate", default=400, help="bytes to generate at the end", **number)
    parser.add_argument("--report", default=10, help="steps between reports", **number)
    parser.add_argument("--save", default=100, help="steps between checkpoints", **number)
    parser.add_argument("--checkpoints", type=Path, help="checkpoint folder; default: none")
    parser.add_argument("--coordinator", help='host:port of process 0, or "auto"')
    parser.add_argument("--processes", help="number of processes", **number)
    parser.add_argument("--process-id", help="number of this process, from 0", **number)
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "length", "layers", "width", "heads", "report", "save"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.width % args.heads:
        parser.error(f"--heads must divide --width, got {args.heads} and {args.width}")
    args.horizon = args.horizon or args.steps
    if not args.coordinator:
        return train(args)
    address = None if args.coordinator == "auto" else args.coordinator
    jax.distributed.initialize(address, args.processes, args.process_id)
    try:
        return train(args)
    finally:
        jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit("\n".join(main()) or None)
