"""A tiny task to be trained on one device, on several, and by several processes.

Run as a script, it is one of these processes. It takes its orders as JSON on the command line and
leaves what it has seen as JSON in a file. The tests start it; nobody else needs it.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

BATCH = 32
# The loss scale grows after two finite steps in a row, so that these few steps move it both ways.
POLICY = ols.DynamicLossScale(initial_scale=2.0**8, growth_interval=2)
# Its schedule counts the applied steps, and its update is linear in the gradients.
INNER = optax.sgd(optax.linear_schedule(0.1, 0.02, 6), momentum=0.9)


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
    """Return the batch of one step; at some of them, `row` spoils it.

    At steps 1 and 6 its target is so far away that the gradient overflows float16, in which the
    network computes, and the loss, in float32, does not. At step 4 the loss is infinite.
    """
    rng = np.random.default_rng(step)
    x = rng.normal(size=(BATCH, 16)).astype(np.float32)
    y = np.tanh(x[:, :8] - x[:, 8:])
    if row is not None and step in {1, 4, 6}:
        y[row, -1] = np.inf if step == 4 else 1e6
    return x, y


def counts(state):
    """Return the five numbers of loss scaling."""
    return [float(leaf) for leaf in ols.loss_scale_state(state)]


def spec_of_state(tx, params, specs):
    """Return the partition specs of the state: the params' where it has their shape."""
    state = jax.eval_shape(tx.init, params)
    return optax.tree.map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P()
    )


def main(orders):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", orders["devices"])
    jax.distributed.initialize(
        orders["coordinator"],
        orders["processes"],
        orders["process"],
        coordinator_bind_address=orders["coordinator"],  # on every interface otherwise
        initialization_timeout=60,
        heartbeat_timeout_seconds=30,
        shutdown_timeout_seconds=30,
    )
    report = {"local": jax.local_device_count(), "global": jax.device_count()}
    for name, run in (("fsdp", fsdp), ("replicas", replicas)):
        if name in orders["runs"]:
            report[name] = run(orders)
    Path(orders["report"]).write_text(json.dumps(report))
    jax.distributed.shutdown()


def fsdp(orders):
    """Train under plain jit, with every array spread over all devices of all processes."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    tx = ols.with_loss_scaling(INNER, POLICY)
    split = NamedSharding(mesh, P("data"))
    everywhere = NamedSharding(mesh, P())

    def start():
        params = init_params()
        return {"params": params, "opt_state": tx.init(params)}

    shapes = jax.eval_shape(start)
    shardings = jax.tree.map(lambda leaf: split if leaf.shape else everywhere, shapes)

    def step(train, x, y):
        params, opt_state = train["params"], train["opt_state"]
        loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}

    step = jax.jit(step, donate_argnums=0, out_shardings=shardings)
    with checkpoints(orders["directory"]) as manager:
        first = manager.latest_step() if orders["resume"] else None
        if first is None:
            first, train = 0, jax.jit(start, out_shardings=shardings)()
        else:
            train = restore(manager, shapes, shardings)
        return loop(orders, manager, step, train, first)


def loop(orders, manager, step, train, first):
    import orbax.checkpoint as ocp  # noqa: PLC0415, seconds that not every import should take

    mesh = jax.tree.leaves(train)[0].sharding.mesh
    seen = []
    for i in range(first, orders["stop"]):
        if i == orders["die_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        train = step(train, *own_part(orders, mesh, i))
        seen.append(counts(train["opt_state"]))
        if i + 1 in orders["save_at"]:
            manager.save(i + 1, args=ocp.args.StandardSave(train))
            manager.wait_until_finished()
    return {"first": first, "seen": seen, "params": whole(train["params"])}


def own_part(orders, mesh, step):
    """Return the batch, of which each process makes the rows for its own devices."""
    for array in batch(step, orders["bad_row"]):
        rows = len(array) // orders["processes"]
        mine = array[orders["process"] * rows :][:rows]
        yield jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)


def whole(tree):
    """Return every array in full, as nested lists; all processes must take part."""
    mesh = jax.tree.leaves(tree)[0].sharding.mesh
    gather = jax.jit(lambda t: t, out_shardings=NamedSharding(mesh, P()))
    return jax.tree.map(lambda a: np.asarray(a).tolist(), gather(tree))


def checkpoints(directory):
    import orbax.checkpoint as ocp  # noqa: PLC0415

    return ocp.CheckpointManager(directory)


def restore(manager, shapes, shardings):
    """Read the latest checkpoint, each device the part that is its own."""
    import orbax.checkpoint as ocp  # noqa: PLC0415

    wanted = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(wanted))


def replicas(orders):
    """Train under shard_map, with a replica of everything on each device of each process."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    tx = ols.with_loss_scaling(INNER, POLICY, axis_name="data")

    def step(params, opt_state, x, y):
        loss, grads = ols.value_and_grad(loss_fn)(opt_state, params, x, y)
        grads = jax.lax.pmean(grads, "data")
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), P("data"), P("data")),
            out_specs=P(),
            check_vma=False,
        )
    )
    everywhere = NamedSharding(mesh, P())
    params = jax.jit(init_params, out_shardings=everywhere)()
    opt_state = jax.jit(tx.init, out_shardings=everywhere)(params)
    seen = []
    for i in range(orders["stop"]):
        params, opt_state = step(params, opt_state, *own_part(orders, mesh, i))
        seen.append(counts(opt_state))
    return {"seen": seen, "params": jax.tree.map(lambda a: np.asarray(a).tolist(), params)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
