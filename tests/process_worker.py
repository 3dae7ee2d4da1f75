"""A tiny task to train on one device, on several devices, and in several processes.

Run as a script, this file is one of these processes, with orders in JSON on the command line.
"""

import functools
import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_where import with_plain_where

import optax_lossscale as ols

BATCH = 32
STEPS, SAVED = 8, 3
BAD_ROW = 30  # always in the last process's part of the batch
# The rounding of float16 sums in another order; less than a tenth of the effect of one step.
TOLERANCE = 4e-4
# Growth after two finite steps in a row lets these few steps move the loss scale both ways.
POLICY = ols.DynamicLossScale(initial_scale=2.0**8, growth_interval=2)
# Its schedule counts the applied steps, and its update is linear in the gradients.
INNER = optax.sgd(optax.linear_schedule(0.1, 0.02, 6), momentum=0.9)
EXAMPLE = Path(__file__).parents[1] / "examples" / "sharded_transformer.py"


def init_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w1": jax.random.normal(keys[0], (16, 64)) / 4,
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(keys[1], (64, 8)) / 8,
    }


def loss_fn(params, x, y):
    """Return the mean squared error, in float32, of a network that computes in float16."""
    p = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    hidden = jax.nn.relu(x.astype(jnp.float16) @ p["w1"] + p["b1"][None])
    return jnp.mean(((hidden @ p["w2"]).astype(jnp.float32) - y) ** 2)


def batch(step, row=None):
    """Return the batch of one step; at some steps, `row` is bad.

    At steps 1 and 6, the target of the row is so large that the gradient overflows float16, while
    the float32 loss is finite. At step 4, the loss is infinite.
    """
    rng = np.random.default_rng(step)
    x = rng.normal(size=(BATCH, 16)).astype(np.float32)
    y = np.tanh(x[:, :8] - x[:, 8:])
    if row is not None and step in {1, 4, 6}:
        y[row, -1] = np.inf if step == 4 else 1e6
    return x, y


def counts(state):
    return [float(leaf) for leaf in ols.loss_scale_state(state)]


def make_step(tx):
    def step(params, state, x, y):
        loss, grads = ols.value_and_grad(loss_fn)(state, params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return step


ORACLE = with_plain_where(INNER, POLICY)
_oracle_step = jax.jit(make_step(ORACLE))


def one_device(row):
    """Return the final state on one device with this bad row, and the counts after each step."""
    params = init_params()
    state = ORACLE.init(params)
    seen = []
    for i in range(STEPS):
        params, state = _oracle_step(params, state, *batch(i, row))
        seen.append(counts(state))
    return jax.device_get((params, state)), seen


def identity(tree):
    return tree


def train(mesh, step, args, first=0, manager=None):
    """Train to the last step; return the counts after each step and the full parameters."""
    seen = []
    for i in range(first, STEPS):
        data = (
            # JAX asks each process only for the rows of its own devices.
            jax.make_array_from_callback(a.shape, NamedSharding(mesh, P("data")), a.__getitem__)
            for a in batch(i, BAD_ROW)
        )
        args = step(*args, *data)
        seen.append(counts(args[1]))
        if manager and i + 1 == SAVED:
            manager.save(SAVED, args=ocp.args.StandardSave(args))
            manager.wait_until_finished()
    if jax.process_index() == 0:  # it looks at its own parts, and waits for no other process
        with jax.set_mesh(mesh):
            ols.diagnostics.check_health(args[1])
    gather = jax.jit(identity, out_shardings=NamedSharding(mesh, P()))
    params = jax.tree.map(lambda a: np.asarray(a).tolist(), gather(args[0]))
    return {"seen": seen, "params": params}


@functools.cache
def sharded_programs(mesh):
    """Return programs that start and that take a step, sharded over all devices."""
    tx = ols.with_loss_scaling(INNER, POLICY)

    def start():
        return init_params(), tx.init(init_params())

    places = jax.tree.map(
        lambda a: NamedSharding(mesh, P("data") if a.shape else P()), jax.eval_shape(start)
    )
    step = jax.jit(make_step(tx), donate_argnums=(0, 1), out_shardings=places)
    return jax.jit(start, out_shardings=places), step


def sharded(mesh, directory, *, resume):
    """Train under plain jit, with every array sharded over all devices of all processes."""
    start, step = sharded_programs(mesh)
    fresh = start()
    with ocp.CheckpointManager(directory) as manager:
        if resume:
            restored = manager.restore(SAVED, args=ocp.args.StandardRestore(fresh))
            return train(mesh, step, restored, first=SAVED)
        return train(mesh, step, fresh, manager=manager)


def replicas(mesh):
    """Train under shard_map, with a replica of everything on each device of each process."""
    inside = optax.chain(optax.stateless(lambda g, _: jax.lax.pmean(g, "data")), INNER)
    tx = ols.with_loss_scaling(inside, POLICY, axis_name="data")
    specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
    step = jax.shard_map(make_step(tx), mesh=mesh, check_vma=False, **specs)
    everywhere = NamedSharding(mesh, P())
    start = jax.jit(lambda: (init_params(), tx.init(init_params())), out_shardings=everywhere)
    return train(mesh, jax.jit(step), start())


def tiny_example(batch, length, width):
    """Return the `main` of the example, which trains a smaller model of one layer."""
    main = runpy.run_path(str(EXAMPLE))["main"]
    shapes = {"tokens": (256, width), "positions": (length, width)}
    shapes |= {"qkv": (1, width, 3 * width), "out": (1, width, width)}
    shapes |= {"up": (1, width, 4 * width), "down": (1, 4 * width, width)}
    assert shapes.keys() == main.__globals__["SHAPES"].keys()
    main.__globals__.update(BATCH=batch, LENGTH=length, SHAPES=shapes)
    return main


def main(orders):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", orders["devices"])
    jax.distributed.initialize(
        orders["coordinator"],
        orders["processes"],
        orders["process"],
        coordinator_bind_address=orders["coordinator"],  # the default is every interface
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    directory = Path(orders["directory"])
    report = {
        "devices": [jax.local_device_count(), jax.device_count()],
        "sharded": sharded(mesh, directory / "sharded", resume=False),
        "resumed": sharded(mesh, directory / "sharded", resume=True),
        "replicas": replicas(mesh),
    }
    (directory / f"report{orders['process']}.json").write_text(json.dumps(report))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
