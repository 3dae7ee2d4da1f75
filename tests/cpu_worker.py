"""Measure products in half precision on one or two simulated CPUs: `cpu_worker.py DEVICES [--off]`.

It prints, as JSON, the largest relative error of the gradients of each form of product in each
context and format. With `--off`, products are given to XLA as they are written.
`test_products_on_cpu.py` runs it, since JAX fixes the number of devices when it starts.
"""

import functools
import json
import string
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale._autocast import products_on_cpu

# As `jnp.einsum` writes them. The axis b is the batch, which devices share.
FORMS = {
    "dense on two axes": "bd,df->bf",
    "dense on three axes": "btd,df->btf",
    "several heads": "btd,dhf->bthf",
    "DenseGeneral": "bthd,hdf->btf",
    "attention's scores": "bqhd,bkhd->bhqk",
    "attention's mixture": "bhqk,bkhd->bqhd",
    "batched weights": "ebd,edf->ebf",
    "a layer for each example": "btd,bdf->btf",
    "turned": "dbt,fd->tfb",
}
SIZES = dict.fromkeys(string.ascii_lowercase, 32) | {"b": 64, "h": 2, "e": 2}


def arrays(form, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [[SIZES[axis] for axis in term] for term in form.replace("->", ",").split(",")]
    return [jnp.asarray(rng.normal(0, 1, shape), jnp.float32) for shape in shapes]


def exact_gradients(form, x, y, g):
    (a, b), out = form.split("->")[0].split(","), form.split("->")[1]
    x, y, g = (np.asarray(array, np.float64) for array in (x, y, g))
    return np.einsum(f"{out},{b}->{a}", g, y, optimize=True), np.einsum(
        f"{a},{out}->{b}", x, g, optimize=True
    )


def loss(form, x, y, g):
    return jnp.sum(jnp.einsum(form, x, y) * g)


def spec(term):
    return P(*("b" if axis == "b" else None for axis in term))


def mapped(form, *, check_vma):
    mesh = jax.make_mesh((jax.device_count(),), ("b",), axis_types=(AxisType.Auto,))
    specs = tuple(map(spec, form.replace("->", ",").split(",")))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    def local(*args):
        return lax.psum(loss(form, *args), "b")

    return local


def in_pmap(form):
    places = [
        term.find("b") if "b" in term else None for term in form.replace("->", ",").split(",")
    ]

    def split(array, place):
        """Return the part of each device, first."""
        if place is None:
            return array
        first = jnp.moveaxis(array, place, 0)
        return first.reshape(jax.device_count(), -1, *first.shape[1:])

    def local(*parts):
        pairs = zip(parts, places, strict=True)
        return loss(form, *(x if at is None else jnp.moveaxis(x, 0, at) for x, at in pairs))

    axes = tuple(None if place is None else 0 for place in places)
    return lambda *args: jnp.sum(jax.pmap(local, in_axes=axes)(*map(split, args, places)))


def scanned(form):
    def fun(*args):
        step = lambda total, row: (total + loss(form, *row), None)  # noqa: E731
        return lax.scan(step, 0.0, jax.tree.map(lambda x: x[None], args))[0]

    return fun


ONE = {
    "plain": lambda form: functools.partial(loss, form),
    "scan": scanned,
    "cond": lambda form: (
        lambda x, *rest: lax.cond(
            x.ravel()[0] < 100, functools.partial(loss, form), lambda *_: 0.0, x, *rest
        )
    ),
    "remat": lambda form: jax.checkpoint(functools.partial(loss, form)),
    "vmap": lambda form: (
        lambda *args: jnp.sum(
            jax.vmap(functools.partial(loss, form))(*jax.tree.map(lambda x: x[None], args))
        )
    ),
}
SHARED = {
    "shard_map": functools.partial(mapped, check_vma=True),
    "shard_map without check_vma": functools.partial(mapped, check_vma=False),
    "pmap": in_pmap,
}


def gradients(make, args, dtype):
    """Return the gradients of every form in one context, from one program."""
    losses = {form: ols.autocast(make(form), dtype) for form in args}

    def all_gradients(args):
        return {form: jax.grad(fun, argnums=(0, 1))(*args[form]) for form, fun in losses.items()}

    return jax.jit(all_gradients)


def with_symbolic_batch(args):
    fun = gradients(ONE["plain"], args, "bfloat16")
    (n,) = export.symbolic_shape("n")
    shapes = {
        form: [
            jax.ShapeDtypeStruct([n if axis == "b" else SIZES[axis] for axis in term], jnp.float32)
            for term in form.replace("->", ",").split(",")
        ]
        for form in args
    }
    return export.export(fun)(shapes).call(args)


def under_an_explicit_mesh(args):
    """Return the gradients under a mesh of one device, whose axis splits the batch."""
    mesh = jax.make_mesh((1,), ("b",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    placed = {
        form: [
            jax.device_put(array, jax.sharding.NamedSharding(mesh, spec(term)))
            for array, term in zip(each, form.replace("->", ",").split(","), strict=True)
        ]
        for form, each in args.items()
    }
    with jax.set_mesh(mesh):
        return gradients(ONE["plain"], args, "bfloat16")(placed)


def error(got, exact):
    pairs = zip(got, exact, strict=True)
    return max(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b) for a, b in pairs)


def main(devices, *options):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    products_on_cpu.enabled = "--off" not in options
    warnings.simplefilter("ignore")  # some products are narrow, and pmap warns in jax 0.7
    args = {form: arrays(form) for form in FORMS.values()}
    exact = {form: exact_gradients(form, *each) for form, each in args.items()}
    is_one = jax.device_count() == 1
    got = {}
    for context, make in (SHARED | ONE if is_one else SHARED).items():
        got[f"{context}, bfloat16"] = gradients(make, args, "bfloat16")(args)
        if context in ("plain", "shard_map"):
            got[f"{context}, float16"] = gradients(make, args, "float16")(args)
    if is_one:
        got["symbolic sizes"] = with_symbolic_batch(args)
        if hasattr(jax, "set_mesh"):  # since jax 0.7.1
            got["Explicit axes"] = under_an_explicit_mesh(args)
    return {
        f"{name}, {context}": error(grads[form], exact[form])
        for context, grads in got.items()
        for name, form in FORMS.items()
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
