"""precision_search: which lines need float32, found by measurement."""

import functools
import importlib.util
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm
from flax import nnx
from jax.sharding import PartitionSpec

import optax_lossscale as ols
from benchmarks import workloads
from optax_lossscale.diagnostics import precision_search
from optax_lossscale.diagnostics.programs.search import _Sensitive

X = jax.random.normal(jax.random.key(0), (64, 16))


def fourier_params():
    keys = jax.random.split(jax.random.key(1), 2)
    frequencies = 30 * jax.random.normal(keys[0], (16, 32))
    return {"angles": frequencies, "head": jax.random.normal(keys[1], (32, 8)) / 6}


def fourier(params, x, scale=1.0, *, mode="sin"):
    angles = x @ params["angles"]  # ANGLES
    features = getattr(jnp, mode)(angles) * scale
    return jnp.mean((features @ params["head"] - x[:, :8]) ** 2)


TOLERANCES = [(jnp.bfloat16, 0.05), (jnp.float16, 0.02)]


def plain(params, x):
    return jnp.mean((jnp.tanh(x @ params["angles"] / 60) @ params["head"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_the_line_that_needs_float32_is_named(dtype, tolerance):
    params = fourier_params()
    found = precision_search(fourier, params, X, dtype=dtype, tolerance=tolerance)
    assert found.array_error > found.error > tolerance
    assert found.error_kept < tolerance
    (line,) = found.keep
    assert "# ANGLES" in line
    assert line in found.lines
    assert sum(each.flops for each in found.lines.values()) == pytest.approx(1)
    text = str(found)
    assert f"autocast(fun, jnp.{jnp.dtype(dtype)}, keep=found.keep)" in text
    assert f"They have {found.lines[line].flops:.1%} of the operations" in text
    assert 'precision="highest"' in text
    assert "jax.default_matmul_precision" in text
    assert "one batch" in text
    with pytest.raises(AttributeError):
        found.error = 0


@pytest.mark.slow
def test_a_model_that_needs_nothing_takes_two_compilations(compilations):
    params = fourier_params()
    jax.block_until_ready(X)
    compilations.clear()
    found = precision_search(plain, params, X)
    assert len(compilations) <= 2
    assert (found.keep, dict(found.lines), found.error_kept) == ((), {}, found.error)
    assert "No line needs float32" in str(found)


@pytest.mark.slow
def test_what_is_not_an_array_is_passed_through_and_has_aux_and_keywords_work():
    def with_aux(params, x, name, *, scale):
        assert name == "text"
        return fourier(params, x, scale), {"mean": jnp.mean(x)}

    found = precision_search(with_aux, fourier_params(), X, "text", scale=1.0, has_aux=True)
    assert len(found.keep) == 1


def on_two_devices(params, x):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    split = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    return split(lambda params, x: jax.lax.pmean(fourier(params, x), "data"))(params, x)


def in_a_scan(params, x):
    return jax.lax.scan(lambda sum_, _: (sum_ + fourier(params, x), None), 0.0, length=3)[0]


def for_each_row(params, x):
    return jnp.mean(jax.vmap(lambda row: fourier(params, row[None]))(x))


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


sine.defjvp(lambda x, tangents: (jnp.sin(*x), jnp.cos(*x) * tangents[0]))


def with_a_custom_rule(params, x):
    features = sine(x @ params["angles"])  # ANGLES
    return jnp.mean((features @ params["head"] - x[:, :8]) ** 2)


def by_the_array(angles, head, x):
    return fourier({"angles": angles, "head": head}, x)


CONTEXTS = {
    "shard_map": (on_two_devices, {}),
    "remat": (jax.checkpoint(fourier), {}),
    "remat that keeps products": (
        jax.checkpoint(fourier, policy=jax.checkpoint_policies.checkpoint_dots),
        {},
    ),
    "scan": (in_a_scan, {}),
    "vmap": (for_each_row, {}),
    "custom_jvp": (with_a_custom_rule, {}),
    "jit": (jax.jit(fourier), {}),
    "tqdm": (fourier, {"progress": functools.partial(tqdm.tqdm, disable=True)}),
}


SEVERAL = "shard_map", "remat", "scan", "custom_jvp"


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SEVERAL else pytest.mark.exhaustive)
        for name in CONTEXTS
    ],
)
def test_the_line_is_named_in_each_context(context):
    fun, options = CONTEXTS[context]
    found = precision_search(fun, fourier_params(), X, **options)
    (line,) = found.keep
    assert "# ANGLES" in line
    assert found.error_kept < 0.03


@pytest.mark.slow
def test_the_line_is_named_for_two_argnums_and_for_stored_parameters():
    angles, head = fourier_params().values()
    found = [
        precision_search(by_the_array, angles, head, X, argnums=(0, 1)),
        precision_search(by_the_array, angles, head, X, argnums=1),
        precision_search(fourier, ols.cast(fourier_params(), jnp.bfloat16), X),
    ]
    assert [each.array for each in found] == ["[0]", "", "['angles']"]
    for each in found:
        assert each.error > 0.25
        assert each.error_kept < 0.03
        assert ["# ANGLES" in line for line in each.keep] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_a_named_line_kept_by_hand_gives_the_same_gradient(dtype, tolerance):
    def by_hand(params, x):
        with jax.default_matmul_precision("highest"):
            angles = x @ params["angles"]
        return jnp.mean((jnp.sin(angles) @ params["head"] - x[:, :8]) ** 2)

    params = fourier_params()
    (line,) = precision_search(fourier, params, X, dtype=dtype, tolerance=tolerance).keep
    kept = jax.jit(jax.grad(ols.autocast(fourier, dtype, keep=[line])))(params, X)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.jit(jax.grad(ols.autocast(by_hand, dtype)))(params, X),
        kept,
    )


@pytest.mark.slow
def test_a_loss_that_is_not_finite_in_half_is_infinitely_far():
    def large(params, x):
        products = (1e4 * x) @ (1e3 * params["angles"])  # LARGE
        return jnp.mean(jnp.tanh(products / 1e9) @ params["head"])

    found = precision_search(large, fourier_params(), X, dtype=jnp.float16)
    assert found.error == np.inf
    assert ["# LARGE" in line for line in found.keep] == [True]
    assert found.error_kept < 0.01


def one_wrong_array(number):
    """Return a loss with a small array whose gradient is wrong, among arrays that are right."""
    waves = 400 * jax.random.normal(jax.random.key(3), (16, 8))
    keys = jax.random.split(jax.random.key(2), number - 1)
    params = {"waves": waves} | {str(i): jax.random.normal(k, (16, 8)) for i, k in enumerate(keys)}

    def loss_fn(params, x):
        small = jnp.mean(jnp.sin(x @ params["waves"]) ** 2)  # SMALL
        others = (x @ params[str(i)] for i in range(number - 1))
        return sum(jnp.mean(y**2) for y in others) + 10 * small

    return loss_fn, params


@pytest.mark.slow
@pytest.mark.parametrize("number", [8, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_small_array_that_is_wrong_is_seen_and_named(number):
    loss_fn, params = one_wrong_array(number)
    with jax.numpy_dtype_promotion("standard"):
        found = precision_search(loss_fn, params, X)
    assert (found.array, found.array_error > 0.5) == ("['waves']", True)
    assert "So that array is wrong" in str(found)
    assert ["# SMALL" in line for line in found.keep] == [True]
    assert found.error == pytest.approx(found.array_error / number**0.5, rel=0.05)


@pytest.mark.slow
def test_an_error_is_a_root_mean_square_over_the_arrays():
    params = fourier_params()
    half, exact = (
        jax.jit(jax.grad(fun), compiler_options={"xla_allow_excess_precision": False})(params, X)
        for fun in (ols.autocast(fourier, jnp.bfloat16), fourier)
    )
    typical = np.sqrt(np.mean(np.concatenate([np.ravel(x) for x in exact.values()]) ** 2))
    errors = [
        np.linalg.norm(half[name] - x) / (np.linalg.norm(x) + 0.03 * typical * x.size**0.5)
        for name, x in exact.items()
    ]
    found = precision_search(fourier, params, X)
    assert found.error == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=0.01)
    assert found.array_error == pytest.approx(max(errors), rel=0.01)


def many_lines(folder, number, sensitive):
    """Return a loss with a product on each of its lines, and its parameters."""
    lines = [
        f"    y += jnp.sin(x @ (p['{i}'] * {400 if i in sensitive else 1e-3}))"
        for i in range(number)
    ]
    code = "import jax.numpy as jnp\ndef loss_fn(p, x):\n    y = 0.0\n" + "\n".join(lines)
    file = folder / "many.py"
    file.write_text(f"{code}\n    return jnp.mean(y ** 2)\n")
    spec = importlib.util.spec_from_file_location("many", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    keys = jax.random.split(jax.random.key(5), number)
    return module.loss_fn, {str(i): jax.random.normal(keys[i], (16, 8)) for i in range(number)}


@pytest.mark.slow
def test_many_lines_are_bisected(tmp_path, compilations):
    loss_fn, params = many_lines(tmp_path, 17, {11})
    jax.block_until_ready(X)
    compilations.clear()
    seen = []
    with jax.numpy_dtype_promotion("standard"):
        found = precision_search(
            loss_fn, params, X, progress=lambda runs: (seen.append(x) or x for x in runs)
        )
    assert ["p['11']" in line for line in found.keep] == [True]
    assert len(compilations) <= 2 + 2 * 5 + 1
    assert seen[0] == "8 lines"
    assert found.error_kept < 0.05 < found.error
    others = 17 - len(found.lines)
    assert others > 10
    assert f"{others} other lines were not measured alone" in str(found)


def test_groups_within_the_tolerance_are_looked_into_if_they_are_not_together():
    sizes = dict(zip(range(32), (0.01 * (1 + n % 7) for n in range(32)), strict=True))
    runs = []

    def error_of(lines):
        runs.append(lines)
        return sum(sizes[line] ** 2 for line in lines) ** 0.5

    sensitive = _Sensitive(error_of, tolerance=0.15)
    sensitive.measure({n: str(n) for n in sizes}, iter)
    assert len(runs) < 32
    found = []
    for _ in sizes:
        found.append(sensitive.most_sensitive(but=found))
    assert [sizes[n] for n in found] == sorted(sizes.values(), reverse=True)


@pytest.mark.slow
def test_arrays_of_numpy_are_compiled_over():
    params = jax.tree.map(np.asarray, fourier_params())
    by_jax = precision_search(fourier, fourier_params(), X)
    found = precision_search(fourier, params, np.asarray(X))
    assert (found.keep, found.error) == (by_jax.keep, by_jax.error)

    def with_numbers(params, x):
        scale = 1.0 if x[0, 0] == x[0, 0] else 0.0  # it reads a value
        return fourier(params, jnp.asarray(x), scale)

    def written(params, x):
        x = x.copy()
        x[0] = 0  # which JAX's arrays refuse
        return fourier(params, jnp.asarray(x))

    for fun in (with_numbers, written):
        found = precision_search(fun, fourier_params(), np.asarray(X))
        assert ["# ANGLES" in line for line in found.keep] == [True]
        assert "The code needs the values of NumPy's arrays" in str(found)
    with pytest.raises(ZeroDivisionError):
        precision_search(lambda *_: 1 / 0, params, np.asarray(X))


@pytest.mark.slow
def test_the_line_is_named_in_a_branch_with_fewer_operations():
    def branches(params, x):
        def rough(x):
            return jnp.sin(x @ params["angles"]) @ params["head"]

        def fine(x):
            products = x @ params["angles"][:, :16]  # FINE
            return jnp.tile(jnp.sin(products), (1, 2))[:, :8]

        return jnp.mean(jax.lax.cond(x[0, 0] > 1e9, rough, fine, x) ** 2)

    found = precision_search(branches, fourier_params(), X)
    assert ["# FINE" in line for line in found.keep] == [True]
    assert found.error_kept < 0.03


@pytest.mark.slow
def test_no_choice_of_lines_helps_if_the_loss_differs_in_each_call():
    rng = np.random.default_rng(0)

    def loss_fn(params, x):
        return plain(params, x * (rng.random((64, 1)) > 0.5))  # dropout by NumPy

    with jax.numpy_dtype_promotion("standard"):
        text = str(precision_search(loss_fn, fourier_params(), X))
    assert "No choice of lines helps" in text
    assert "Is the loss the same in each call?" in text
    assert "keep=found.keep" not in text


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_transformer_needs_no_line_in_float32(scanned):
    training = workloads.transformer(workloads.SIZES["tiny"], scanned=scanned, plain=True)
    with jax.numpy_rank_promotion("allow"):
        found = precision_search(training.loss_fn, training.params, training.batch)
    assert (found.keep, found.error < 0.05) == ((), True)


@pytest.mark.slow
def test_a_module_of_nnx_is_as_it_was_to_the_bit():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.angles = nnx.Linear(16, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            features = jnp.sin(30 * self.norm(self.angles(100 * x + 100)))
            return self.head(self.dropout(features))

    def loss_fn(model, x):
        return jnp.mean((model(x) - x[:, :8]) ** 2)

    def numbers(model):
        leaves = jax.tree.leaves(nnx.state(model))
        keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
        pairs = zip(leaves, keys, strict=True)
        return [np.array(jax.random.key_data(x) if is_key else x) for x, is_key in pairs]

    model = Model(nnx.Rngs(0))
    before = numbers(model)
    found = precision_search(loss_fn, model, X, transform=nnx.value_and_grad)
    jax.tree.map(np.testing.assert_array_equal, numbers(model), before)
    assert len(before) >= 10
    assert found.error > 0.05
    assert found.error_kept < 0.03


@pytest.mark.slow
def test_a_module_of_equinox_is_searched():
    model = eqx.nn.MLP(16, 8, 16, 1, key=jax.random.key(0))
    found = precision_search(
        lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2),
        model,
        X,
        transform=eqx.filter_value_and_grad,
    )
    assert found.error < 0.05


@pytest.mark.slow
def test_a_loss_without_products_and_a_gradient_of_zeros_have_no_error():
    found = precision_search(lambda w: jnp.sum(w**2), jnp.ones(3))
    assert (found.error, found.array, "worst array" in str(found)) == (0, "", False)
    for dtype in (jnp.bfloat16, jnp.float16):
        loss_fn = lambda w, x: jnp.sum(x @ w) * 0.0  # noqa: E731
        found = precision_search(loss_fn, jnp.ones((16, 8)), X, dtype=dtype)
        assert found.error == 0
        assert "The gradient is zero in float32, so nothing was measured." in str(found)


@pytest.mark.slow
def test_no_line_is_blamed_for_an_underflow():
    tiny = lambda params, x: 1e-7 * plain(params, x)  # noqa: E731
    params = fourier_params()
    grads = jax.grad(ols.autocast(tiny, jnp.float16))(params, X)
    assert (grads["angles"] == 0).mean() > 0.5
    found = precision_search(tiny, params, X, dtype=jnp.float16)
    assert (found.keep, found.error < 0.01) == ((), True)


@pytest.mark.slow
def test_autocast_is_as_before_after_a_search_that_raised():
    def stop(_):
        raise KeyboardInterrupt

    half = ols.autocast(fourier, jnp.bfloat16)
    before = str(jax.make_jaxpr(jax.grad(half))(fourier_params(), X))
    with pytest.raises(KeyboardInterrupt):
        precision_search(fourier, fourier_params(), X, progress=stop)
    again = ols.autocast(fourier, jnp.bfloat16)
    assert str(jax.make_jaxpr(jax.grad(again))(fourier_params(), X)) == before
    assert "HIGHEST" not in before


@pytest.mark.slow
def test_warnings_are_given_once_and_autocast_is_as_before():
    def narrow(w, x):
        return jnp.sum(jnp.dot(x, w, precision="highest") ** 2) + jnp.sum(x[:8, :8] @ w[:8, :8])

    w = jnp.ones((16, 32))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        precision_search(narrow, w, X)
    assert len([each for each in given if "Only" in str(each.message)]) == 1
    half = ols.autocast(plain, jnp.bfloat16)
    report = ols.diagnostics.precision_report(half, fourier_params(), X)
    assert [*report] == ["bfloat16"]


def test_wrong_arguments_are_refused_before_the_function_is_called():
    def never(*_):
        raise AssertionError

    for wrong in ({"dtype": jnp.float32}, {"tolerance": "a"}, {"progress": 3}):
        with pytest.raises(TypeError, match=f"`{next(iter(wrong))}` must"):
            precision_search(never, jnp.ones(3), **wrong)
    with pytest.raises(ValueError, match="`tolerance` must be positive"):
        precision_search(never, jnp.ones(3), tolerance=0)
    with pytest.raises(TypeError, match="`fun` must be a function"):
        precision_search(3)


@pytest.mark.slow
def test_a_loss_that_cannot_be_searched_is_told_why():
    with pytest.raises(ValueError, match="first_nonfinite"):
        precision_search(lambda w: jnp.log(jnp.sum(w) * 0 - 1), jnp.ones(3))
    with pytest.raises(TypeError, match="wrapped by `autocast` already"):
        precision_search(ols.autocast(plain, jnp.bfloat16), fourier_params(), X)
    with jax.default_matmul_precision("highest"), pytest.raises(TypeError, match="'highest'"):
        precision_search(plain, fourier_params(), X)


@pytest.mark.slow
def test_a_product_that_stays_has_the_highest_precision():
    params = fourier_params()
    (line,) = precision_search(fourier, params, X).keep
    half = ols.autocast(fourier, jnp.bfloat16, keep=[line])
    assert str(jax.make_jaxpr(half)(params, X)).count("Precision.HIGHEST") >= 1
