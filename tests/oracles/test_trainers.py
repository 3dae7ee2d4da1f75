"""Two public trainers, whose training steps are not ours: FlowJAX, and OTT's neural dual.

`make oracles` installs both and runs this. What is passed to them is what docs/trainers.md says.
"""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import StandardNormal
from flowjax.flows import coupling_flow
from flowjax.train import fit_to_data
from flowjax.train.losses import MaximumLikelihoodLoss

import optax_lossscale as ols
from optax_lossscale._loss_scale.never_scaled import mark_scaled

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # JAXopt's
    from ott.neural.methods.neuraldual import W2NeuralDual
    from ott.neural.networks.potentials import PotentialMLP

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("_defaults")]

FORMATS = {
    "float32": lambda fun: fun,
    "bfloat16": lambda fun: ols.autocast(fun, jnp.bfloat16),
    "float16": lambda fun: ols.scale_inside(ols.autocast(fun, jnp.float16), 2.0**12),
}


def parabola(key, count):
    first, noise = jax.random.normal(key, (2, count))
    return jnp.stack([first, first**2 / 2 + 0.2 * noise], axis=1)


def flow(points, **options):
    """Fit a flow with FlowJAX's own loop, and return the losses of its epochs."""
    spline = RationalQuadraticSpline(knots=8, interval=4)
    layers = {"transformer": spline, "flow_layers": 2, "nn_width": 32}
    start = coupling_flow(jax.random.key(0), base_dist=StandardNormal((2,)), **layers)
    options = {"max_epochs": 8, "return_best": False, "show_progress": False, **options}
    _, losses = fit_to_data(jax.random.key(1), start, points, **options)
    return np.array(losses["train"])


@pytest.fixture(scope="module")
def flows():
    tx = ols.with_skipping(optax.adam(3e-3), ols.Spike("grad_norm"))
    points = parabola(jax.random.key(2), 2000)
    return {
        name: flow(points, loss_fn=in_format(MaximumLikelihoodLoss()), optimizer=tx)
        for name, in_format in FORMATS.items()
    }


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_flowjax_learns_in_half_precision_what_it_learns_in_float32(flows, name):
    assert flows["float32"][-1] < flows["float32"][0] - 0.3
    np.testing.assert_allclose(flows[name], flows["float32"], atol=0.05)
    assert (flows[name] != flows["float32"]).all()  # so the products are rounded


def test_flowjax_loses_one_batch_to_a_nan_and_goes_on():
    points = parabola(jax.random.key(2), 2000).at[7].set(jnp.nan)
    tx = optax.adam(3e-3)
    seen = []  # since FlowJAX only returns the mean of an epoch

    def loss_fn(params, static, x, key):
        loss = MaximumLikelihoodLoss()(params, static, x, key=key)
        jax.debug.callback(seen.append, loss)
        return loss

    for guard, finite in (lambda tx: tx, False), (ols.with_skipping, True):
        seen.clear()
        flow(points, loss_fn=loss_fn, optimizer=guard(tx), max_epochs=3)
        jax.effects_barrier()
        assert np.isfinite(seen[-3:]).any() == finite


def dual(in_format):
    """Train OTT's two potentials, whose one loss is inside, and return the solver and its log."""
    solver = W2NeuralDual(
        2,
        PotentialMLP([32, 32]),
        PotentialMLP([32, 32], is_potential=False),
        *(ols.with_skipping(optax.adam(1e-3)) for _ in range(2)),
        num_train_iters=200,
        back_and_forth=False,
        logging=True,
        log_freq=199,
        rng=jax.random.key(0),
    )

    def run(model):
        def plain(params, x):
            return model.apply({"params": params}, x)

        half = in_format(plain)
        # The solver of the conjugate calls the first potential for one point at a time.
        return lambda params, *_: lambda x: (half if x.ndim == 2 else plain)(params, x)

    f, g = solver.neural_f, solver.neural_g
    solver.state_f = solver.state_f.replace(potential_value_fn=run(f))
    solver.state_g = solver.state_g.replace(potential_gradient_fn=run(g))
    keys = (jax.random.key(seed) for seed in itertools.count())
    source = (jax.random.normal(key, (128, 2)) for key in keys)
    target = (parabola(key, 128) for key in keys)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        _, logs = solver(source, target, source, target)
    return solver, logs["train_logs"]["w_dist"]


@pytest.fixture(scope="module")
def duals():
    return {name: dual(in_format) for name, in_format in FORMATS.items()}


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_otts_neural_dual_learns_in_half_precision_what_it_learns_in_float32(duals, name):
    solver, distances = duals[name]
    _, exact = duals["float32"]
    assert exact[-1] > exact[0] + 0.3
    np.testing.assert_allclose(distances, exact, atol=0.05)
    assert distances[-1] != exact[-1]  # so the products are rounded
    for state in (solver.state_f, solver.state_g):
        assert ols.loss_scale_state(state).total_skipped == 0


def test_a_bad_batch_changes_only_the_potential_of_ott_whose_gradient_is_bad(duals):
    solver, _ = duals["float16"]
    batch = {"source": jnp.ones((128, 2)).at[3].set(jnp.inf), "target": jnp.ones((128, 2))}
    f, g, *_ = solver.train_step_parallel(solver.state_f, solver.state_g, batch)
    assert not ols.applied(f.opt_state)
    jax.tree.map(np.testing.assert_array_equal, f.params, solver.state_f.params)
    assert ols.applied(g.opt_state)


def test_flowjax_is_warned_of_a_loss_scale_that_it_never_applies():
    tx = ols.with_loss_scaling(optax.adam(3e-3))
    mark_scaled(has_scaled=False)  # as in a new process
    with pytest.warns(UserWarning, match="scale_inside"):
        flow(parabola(jax.random.key(2), 500), optimizer=tx, max_epochs=1)
