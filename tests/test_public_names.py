"""The public names, and the architecture: which modules may import which."""

import ast
import graphlib
import importlib
import inspect
import re
import sys
import types
import typing
from pathlib import Path

import pytest

import optax_lossscale as ols
import optax_lossscale.flax
import optax_lossscale.keras

PACKAGE = Path(inspect.getfile(ols)).parent
PUBLIC_ROOMS = [ols, ols.diagnostics, ols.flax, ols.keras]
PUBLIC = {name for room in PUBLIC_ROOMS for name in room.__all__}
MOST_LINES = 450
INNER = {
    *("_autocast", "_guard", "_loss_scale", "_order", "_precision", "_state", "_support", "_xla")
}
# Loss scaling and casting know nothing of each other, nor of the guard, which joins them.
MAY_IMPORT = {
    "_support": set(),
    "_state": {"_support"},
    "_order": {"_state", "_support"},
    "_xla": {"_support"},
    "_loss_scale": {"_order", "_state", "_support", "_xla"},
    "_autocast": {"_support"},
    "_precision": {"_autocast", "_order", "_state", "_support"},
    "_guard": INNER,
    "diagnostics": INNER,
    "flax": INNER,
    "keras": INNER,
    "testing": INNER,
    "": {*INNER, "diagnostics", "testing"},
}
# Other rooms import only from the `__init__.py` of these folders, and never from `_support`'s.
DOORS = {"_autocast", "_guard", "_loss_scale", "_order", "_precision", "_xla"}
sys.path.insert(0, str(PACKAGE.parent / "tools"))
rooms = importlib.import_module("rooms")
MODULES = rooms.modules(PACKAGE)

FLOAT16 = "<class 'jax.numpy.float16'>"
DIFFERENTIATE = "(fun, argnums=0, has_aux=False, *, transform=value_and_grad, **kwargs)"
# The signature of each name; for a state its fields, which are part of checkpoints.
TOP_LEVEL = {
    "Bfloat16State": "(rounding_count, inner_state)",
    "DynamicLossScale": (
        "(initial_scale=32768.0, *, growth_interval=2000, growth_factor=2.0, backoff_factor=0.5, "
        "min_scale=1.0, max_scale=16777216.0, hysteresis=1, consecutive_hysteresis=False, "
        "loss_patience=5)"
    ),
    "FixedLossScale": "(scale, skip_nonfinite=True)",
    "GuardState": "(loss_scale_state, rule_states, inner_state)",
    "LossScale": None,
    "LossScaleLike": None,
    "LossScaleState": (
        "(loss_scale, growth_count, overflow_count, consecutive_skipped, total_skipped)"
    ),
    "MasterWeightsState": "(master_weights, inner_state)",
    "StochasticRoundingState": "(rounding_count, inner_state)",
    "Rule": None,
    "Spike": "(of='value', *, window=128, sigmas=6.0, warmup=None, max_consecutive_skipped=None)",
    "SpikeState": "(values, held, consecutive_skipped)",
    "all_finite": "(tree)",
    "applied": "(opt_state)",
    "as_loss_scale": "(loss_scale)",
    "autocast": "(fun, dtype, *, keep=(), checkpoint_dtype=None)",
    "cast": "(tree, dtype, *, keep=None)",
    "diagnostics": None,
    "grad": DIFFERENTIATE,
    "init": "(loss_scale='dynamic')",
    "loss_scale_state": "(opt_state)",
    "master_weights": "(opt_state, params)",
    "scale_loss": "(loss, state)",
    "testing": None,
    "tree_where": "(pred, on_true, on_false)",
    "unscale_and_check": "(grads, state, *, axis_name=None)",
    "update": "(state, grads_finite, policy, *, loss_finite=True)",
    "scale_inside": "(fun, loss_scale)",
    "value_and_grad": DIFFERENTIATE,
    "with_bfloat16_state": "(inner, *, keep=None)",
    "with_loss_scaling": "(inner, loss_scale='dynamic', *, skip_if=None, axis_name=None)",
    "with_master_weights": "(inner, *, remainders=False)",
    "with_stochastic_rounding": "(inner)",
    "with_skipping": "(inner, skip_if=None, *, axis_name=None)",
}
DIAGNOSTICS = {
    "FirstNonfinite": None,
    "GradientExponents": "(histogram, zero, flushed, subnormal, overflow, size)",
    "LineError": "(error, flops)",
    "LossScaleStalledError": None,
    "MatrixProducts": "(count, flops, source)",
    "NonfiniteCounts": "(nan, inf, size)",
    "PrecisionSearch": "(error, array, array_error, lines, keep, error_kept, dtype, tolerance)",
    "check_health": "(opt_state, *, max_consecutive_skipped=50, policy=None)",
    "first_nonfinite": "(fun, *args, **kwargs)",
    "gradient_exponents": f"(grads, *, dtype={FLOAT16}, loss_scale=1.0)",
    "is_stalled": "(opt_state, *, max_consecutive_skipped=50)",
    "metrics": "(opt_state)",
    "nonfinite_report": "(grads)",
    "plot_gradient_exponents": f"(exponents, ax=None, *, dtype={FLOAT16})",
    "precision_report": "(fun, *args, **kwargs)",
    "precision_search": (
        "(fun, *args, dtype=<class 'jax.numpy.bfloat16'>, argnums=0, has_aux=False, "
        "transform=value_and_grad, tolerance=0.05, progress=None, **kwargs)"
    ),
    "suggest_loss_scale": f"(exponents, *, headroom=4, dtype={FLOAT16})",
}


def signature(function):
    parameters = inspect.signature(function).parameters.values()
    bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    return re.sub(r"<function (\w+) at \w+>", r"\1", str(bare))


TESTING = {"assert_scaled_once": "(grad_fn, state, *args)"}


@pytest.mark.parametrize(
    ("module", "contract"),
    [(ols, TOP_LEVEL), (ols.diagnostics, DIAGNOSTICS), (ols.testing, TESTING)],
)
def test_names_signatures_and_fields_are_those_of_the_contract(module, contract):
    called = {name: call and signature(getattr(module, name)) for name, call in contract.items()}
    assert called == contract
    assert set(module.__all__) == contract.keys()


@pytest.mark.parametrize("module", PUBLIC_ROOMS)
def test_all_is_the_sorted_public_names_which_have_docstrings(module):
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (value in (ols.diagnostics, ols.testing) or not isinstance(value, types.ModuleType))
    ]
    assert module.__all__ == sorted(names)
    bare = [name for name in names if not getattr(module, name).__doc__]
    # An alias cannot hold one before Python 3.14; docs/api/policies.md describes it.
    assert bare == (["LossScaleLike"] if module is ols and sys.version_info < (3, 14) else [])


def test_pickles_name_states_policies_and_spikes_as_they_are_imported():
    classes = [value for value in vars(ols).values() if isinstance(value, type)]
    inner = {each for each in classes if each.__module__ != "optax_lossscale"}
    assert inner == {ols.LossScale}  # a protocol has no objects
    for state in (optax_lossscale.keras.DecayedState, optax_lossscale.keras.EmaParamsState):
        assert state.__module__ == "optax_lossscale.keras"


def exported(module):
    """Return the names that the `__init__.py` of a private folder exports."""
    door = f"{PACKAGE.name}.{module}"
    return importlib.import_module(door).__all__ if module in DOORS else ()


def own_imports():
    """Yield a module, a module of the package that it imports, and the name from there or ""."""
    for importer, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                found = [(f"{node.module}", alias.name) for alias in node.names]
            else:
                aliases = node.names if isinstance(node, ast.Import) else []
                found = [(alias.name, "") for alias in aliases]
            for module, name in found:
                root, _, inner = module.partition(".")
                submodule = f"{inner}.{name}".strip(".")
                is_module = submodule in MODULES and name not in exported(inner)
                if root == PACKAGE.name:
                    yield (importer, *((submodule, "") if is_module else (inner, name)))


def test_a_door_exports_what_other_rooms_import():
    used = {door: set() for door in DOORS - {"_xla"}}  # `_xla` is imported as a whole
    for importer, module, name in own_imports():
        if module in used and room(importer) != module:
            used[module].add(name)
    assert {door: set(exported(door)) for door in used} == used


def room(module):
    return module.partition(".")[0]


def test_imports_go_one_way_and_never_past_a_door():
    graph, past_a_door = {name: set() for name in MODULES}, set()
    for importer, module, name in own_imports():
        graph[importer].add(module)
        if room(module) in DOORS and room(importer) != room(module) and module not in DOORS:
            past_a_door.add((importer, module, name))
    assert past_a_door == set()
    graphlib.TopologicalSorter(graph).prepare()  # a circle is a CycleError
    for importer, others in rooms.arrows(PACKAGE).items():
        assert others <= MAY_IMPORT[importer], importer


def test_modules_are_short_and_the_picture_is_that_of_today():
    lengths = {path: path.read_text("utf-8").count("\n") for path in MODULES.values()}
    assert [path for path, length in lengths.items() if length > MOST_LINES] == []
    assert rooms.PICTURE.read_text("utf-8") == rooms.draw(PACKAGE)  # by `python tools/rooms.py`


@pytest.mark.parametrize(
    "module",
    [ols, ols.diagnostics, ols.testing, optax_lossscale.flax, optax_lossscale.keras],
    ids=lambda module: module.__name__,
)
def test_the_type_hints_of_every_public_function_can_be_read(module):
    functions = list(filter(inspect.isfunction, map(vars(module).get, module.__all__)))
    assert functions or module is optax_lossscale.flax
    for function in functions:
        assert "return" in typing.get_type_hints(function), function
