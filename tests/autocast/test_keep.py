"""Lines that `autocast(fun, dtype, keep=lines)` leaves in float32."""

import importlib.util
import json
import linecache
import textwrap
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from arrays import normal, shape
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale.diagnostics import precision_report, precision_search

BF16 = jnp.bfloat16
W, X = shape(16, 16), shape(32, 16)


def layers(w, x):
    angles = x @ w  # ANGLES
    return jnp.sum(jnp.sin(angles) @ w)  # HEAD


def line_of(fun, *args, mark="ANGLES"):
    """Return the line with a product that has a mark, as the reports write it."""
    marked = lambda *args: jnp.sum(fun(*args))  # noqa: E731
    sources = {product.source for product in precision_report(marked, *args).values()}
    (source,) = sources
    assert mark in source
    return source


ANGLES = f"{__file__}:29: angles = x @ w  # ANGLES"


def dtypes(fun, *args):
    report = precision_report(fun, *args)
    return {dtype: products.count for dtype, products in report.items()}


def on_two_devices(fun):
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    mapped = lambda w, x: lax.psum(fun(w, x), "i")  # noqa: E731
    return jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())


def scanned(fun):
    return lambda w, x: lax.scan(lambda c, w: (c + fun(w, x), None), 0.0, w[None])[0]


CONTEXTS = {
    "plain": layers,
    "jit": jax.jit(layers),
    "remat": jax.checkpoint(layers),
    "scan": scanned(layers),
    "vmap": lambda w, x: jnp.sum(jax.vmap(layers, (None, 0))(w, x[None])),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, layers, layers, w, x),
    "shard_map": on_two_devices(layers),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_products_of_a_kept_line_are_in_float32_and_others_in_half(name):
    fun = CONTEXTS[name]
    cast, kept = (ols.autocast(fun, BF16, keep=keep) for keep in ((), [ANGLES]))
    assert dtypes(cast, W, X) == {"bfloat16": 2}
    assert dtypes(kept, W, X) == {"bfloat16": 1, "float32": 1}
    backward = dtypes(jax.value_and_grad(kept, argnums=(0, 1)), W, X)
    repeated = name == "remat"  # by the backward pass
    assert backward == {"bfloat16": 3, "float32": 3 + repeated}
    assert "HIGHEST" in str(jax.make_jaxpr(kept)(W, X))


def test_a_kept_line_is_exact_for_stored_parameters_and_with_a_loss_scale():
    w, x = 30 * normal(W), normal(X, seed=1)
    kept = ols.autocast(layers, BF16, keep=[ANGLES])
    exact = jax.grad(layers)(w, x)
    state = ols.init(2.0**8)
    _, scaled = ols.value_and_grad(kept)(state, w, x)
    for grad in (
        scaled / 2**8,
        jax.grad(ols.scale_inside(kept, 2.0**8))(w, x),
        jax.grad(kept)(w, x),
    ):
        assert jnp.linalg.norm(grad - exact) < 0.01 * jnp.linalg.norm(exact)
    (report,) = ({*dtypes(kept, w.astype(BF16), x)},)
    assert report == {"bfloat16", "float32"}


@pytest.mark.integration
def test_lines_of_models_are_kept():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(jnp.sin(nn.Dense(16)(x)))  # LINEN

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return jnp.sum(self.dense(x))  # NNX

    class Equinox(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return jnp.sum(x @ self.w)  # EQUINOX

    x = normal(X)
    linen = Linen()
    params = linen.init(jax.random.key(0), x)
    haiku = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(8)(x) + 1))  # HAIKU
    for fun, *args in (
        (linen.apply, params, x),
        (haiku.apply, haiku.init(jax.random.key(0), x), x),
        (lambda model, x: model(x), Nnx(nnx.Rngs(0)), x),
        (lambda model, x: model(x), Equinox(normal(W)), x),
    ):
        line = line_of(fun, *args, mark="")
        assert {*dtypes(ols.autocast(fun, BF16, keep=[line]), *args)} == {"float32"}


def test_an_inner_autocast_decides_for_its_products():
    inner = ols.autocast(layers, BF16)
    outer = ols.autocast(lambda w, x: inner(w, x) + jnp.sum(x @ w), BF16, keep=[ANGLES])
    assert dtypes(outer, W, X) == {"bfloat16": 3}


def test_without_lines_the_program_is_the_same():
    plain, empty = ols.autocast(layers, BF16), ols.autocast(layers, BF16, keep=())
    assert str(jax.make_jaxpr(plain)(W, X)) == str(jax.make_jaxpr(empty)(W, X))


@pytest.mark.parametrize("keep", ["a line", 3, None, [3], {"a": 1}.values()])
def test_anything_but_strings_is_refused(keep):
    with pytest.raises(TypeError, match="`keep` must be an iterable of lines"):
        ols.autocast(layers, BF16, keep=keep)


CODE = """
import jax.numpy as jnp

def loss_fn(w, x):
    angles = (
        x @ w
        + 1
    )
    other = (
        x @ w
        - 1
    )
    return jnp.sum(jnp.sin(angles) * other)
"""


def load(folder, code=CODE, name="model.py"):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(textwrap.dedent(code))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.loss_fn


def products_kept(loss_fn, lines):
    kept = ols.autocast(loss_fn, BF16, keep=lines)
    return dtypes(kept, W, X).get("float32", 0)


def test_a_statement_is_recognized_in_another_folder_below_an_edit(tmp_path):
    here = load(tmp_path / "here")
    (line,) = {product.source for product in precision_report(here, W, X).values()}
    stored = json.loads(json.dumps([line]))
    assert line.startswith(f"{tmp_path}")
    assert line.endswith(":6: angles = ( x @ w + 1 )")
    there = load(tmp_path / "there", "\n# A comment.\n\n" + CODE)
    assert products_kept(here, stored) == products_kept(there, stored) == 1


def test_a_line_that_was_edited_or_is_in_another_file_warns_once_and_names_the_others(tmp_path):
    loss_fn = load(tmp_path / "a", CODE.replace("+ 1", "+ 2"))
    elsewhere = load(tmp_path / "b", CODE, name="other.py")
    (line,) = {x.source for x in precision_report(load(tmp_path / "c"), W, X).values()}
    for fun in (loss_fn, elsewhere):
        kept = ols.autocast(fun, BF16, keep=[line])
        with pytest.warns(UserWarning, match=r"make no product of `fun`: model.py: angles") as got:
            jax.eval_shape(lambda w, x: kept(w, x) + kept(w, x), W, X)  # noqa: B023
        assert len(got) == 1
        assert "other = ( x @ w - 1 )" in str(got[0].message)
        assert dtypes(kept, W, X) == {"bfloat16": 2}


def cell(name, code=CODE):
    """Return the loss of a cell of a notebook, whose file exists only in memory."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    space = {}
    exec(compile(code, name, "exec"), space)  # noqa: S102
    return space["loss_fn"]


@pytest.mark.parametrize(
    "names",
    [
        ("/tmp/ipykernel_17/1052.py", "/tmp/ipykernel_92/3308.py"),  # noqa: S108
        ("<ipython-input-3-1b2c>", "<ipython-input-9-77aa>"),
    ],
)
def test_a_cell_of_a_notebook_is_recognized_by_its_code(names):
    first, again = map(cell, names)
    (line,) = {product.source for product in precision_report(first, W, X).values()}
    assert products_kept(first, [line]) == products_kept(again, [line]) == 1


def test_code_that_cannot_be_parsed_is_recognized_by_its_line():
    name = "<ipython-input-7-33ce>"
    loss_fn = cell(name)
    shown = CODE.replace("import jax.numpy as jnp", "%matplotlib inline")  # as the reader wrote it
    linecache.cache[name] = (len(shown), None, shown.splitlines(keepends=True), name)
    (line,) = {product.source for product in precision_report(loss_fn, W, X).values()}
    assert line == f"{name}:6: x @ w"
    assert products_kept(loss_fn, [line]) == 2  # both lines look the same


def test_lines_are_kept_at_the_highest_precision_where_no_product_is_cast():
    exact = ols.autocast(layers, jnp.float32, keep=[ANGLES])
    assert str(jax.make_jaxpr(exact)(W, X)).count("Precision.HIGHEST") == 2  # of both operands
    with pytest.warns(UserWarning, match="make no product"):
        jax.eval_shape(ols.autocast(layers, jnp.float32, keep=["model.py:1: gone"]), W, X)


def test_without_code_a_line_is_its_file_and_number(tmp_path):
    loss_fn = load(tmp_path)
    (tmp_path / "model.py").unlink()
    linecache.clearcache()
    assert products_kept(loss_fn, [f"{tmp_path}/model.py:6"]) == 1


def test_lines_that_look_the_same_are_kept_together(tmp_path):
    code = "def loss_fn(w, x):\n    x = x @ w\n    x = x @ w\n    return x.sum()\n"
    assert products_kept(load(tmp_path, code), ["elsewhere/model.py:99: x = x @ w"]) == 2


def test_a_line_in_any_branch_is_kept_without_a_warning():
    def branches(w, x):
        two = lambda x: x @ w @ w  # noqa: E731
        one = lambda x: x @ w  # noqa: E731 (ONE)
        return lax.switch(0, [two, one, jnp.sin], x)

    line = "test_keep.py: one = lambda x: x @ w # noqa: E731 (ONE)"
    other = line.replace("one =", "two =").replace("x @ w", "x @ w @ w").replace(" (ONE)", "")
    for keep in ([line], [line, other]):
        kept = ols.autocast(branches, BF16, keep=keep)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            program = str(jax.make_jaxpr(kept)(W, X))
        assert program.count("Precision.HIGHEST, Precision.HIGHEST") == 2 * len(keep) - 1


def test_kept_products_are_left_out_of_the_share():
    def head(w, x):
        return jnp.sum(x[:4] @ w), x @ w  # a few rows, and ANGLES

    (line,) = {each.source for each in precision_report(head, W, X).values()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(ols.autocast(layers, BF16, keep=[ANGLES]), W, X)
        jax.eval_shape(ols.autocast(head, BF16, keep=[line]), W, X)


def gradient_of_sum(fun, *, has_aux):
    def summed(*args):
        values, aux = fun(*args)
        return jnp.sum(jnp.sin(values)), aux

    return jax.value_and_grad(summed, has_aux=has_aux)


@pytest.mark.integration
def test_products_of_installed_packages_have_an_entry_of_their_own():
    layer, x = nn.Dense(16), normal(X)
    params = layer.init(jax.random.key(0), x)
    found = precision_search(layer.apply, params, x, tolerance=1e-6, transform=gradient_of_sum)
    assert [*found.lines] == [*found.keep] == ["products that only installed packages make"]
    assert dtypes(ols.autocast(layer.apply, BF16), params, x) == {"bfloat16": 1}
    assert dtypes(ols.autocast(layer.apply, BF16, keep=found.keep), params, x) == {"float32": 1}


def test_a_checkpointed_layer_keeps_its_line_and_saves_halves():
    def layer(x, w):
        angles = x @ w  # ANGLES
        return jnp.sin(angles) @ w, None

    def loss(ws, x):
        return jnp.sum(lax.scan(jax.checkpoint(layer), x, ws)[0])

    ws = shape(3, 16, 16)
    (line,) = {x.source for x in precision_report(loss, ws, X).values() if "ANGLES" in x.source}
    kept = ols.autocast(loss, BF16, keep=[line], checkpoint_dtype=BF16)
    assert dtypes(kept, ws, X) == {"bfloat16": 3, "float32": 3}
    saved = jax.eval_shape(lambda *args: jax.vjp(kept, *args)[1], ws, X)
    stacked = [x.dtype for x in jax.tree.leaves(saved) if x.shape == (3, *X.shape)]
    assert stacked == [BF16]
