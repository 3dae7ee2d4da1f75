"""The public surface, and the architecture: what may import what."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib
import types

import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale.testing import assert_scaled_once

PACKAGE = pathlib.Path(inspect.getfile(ols)).parent
# Imports go one way, upward in this list never. Modules of one row know nothing of each other.
ORDER = [
    ["_tree"],
    ["_state", "_replay", "_first_nonfinite"],
    ["_selection"],
    ["_policy"],
    ["_scaling"],
    ["_transform"],
    ["_diagnostics", "keras", "flax", "interop"],
    ["testing"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

PUBLIC = {
    "DynamicLossScale",
    "FirstNonfinite",
    "FixedLossScale",
    "GradientExponents",
    "LossScale",
    "LossScaleStalledError",
    "LossScaleState",
    "LossScaledState",
    "NonfiniteCounts",
    "all_finite",
    "as_loss_scale",
    "calibrate",
    "check_health",
    "first_nonfinite",
    "format_nonfinite_report",
    "gradient_exponents",
    "init",
    "loss_scale_state",
    "metrics",
    "nonfinite_report",
    "plot_gradient_exponents",
    "scale_loss",
    "suggest_scale",
    "tree_where",
    "unscale_and_check",
    "update",
    "value_and_grad",
    "with_loss_scaling",
}
FIELDS = (
    "loss_scale",
    "growth_count",
    "overflow_count",
    "consecutive_skipped",
    "total_skipped",
)


def imports(module):
    """Yield the full name of everything that a module imports, wherever the import stands."""
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}.py has a relative import"
            yield f"{node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module):
    """Return the modules of the package that a module imports."""
    parts = (name.split(".") for name in imports(module) if name.startswith("optax_lossscale."))
    return {names[1] for names in parts if names[1] in MODULES}


def packages(module):
    return {name.split(".")[0] for name in imports(module)}


def test_all_is_the_sorted_public_names():
    names = sorted(
        name
        for name, value in vars(ols).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    )
    assert ols.__all__ == names
    assert set(names) >= PUBLIC


def test_the_fields_of_the_state_are_those_that_checkpoints_hold():
    assert ols.LossScaleState._fields == FIELDS
    assert ols.LossScaledState._fields == ("loss_scale_state", "inner_state")


def test_every_public_name_has_a_docstring():
    assert [name for name in ols.__all__ if not getattr(ols, name).__doc__] == []


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (ols.init, "(loss_scale='dynamic')"),
        (ols.update, "(state, grads_finite, loss_scale, *, loss_finite=True)"),
        (ols.scale_loss, "(loss, state)"),
        (ols.unscale_and_check, "(grads, state, *, axis_name=None)"),
        (
            ols.value_and_grad,
            "(fun, argnums=0, has_aux=False, *, transform=value_and_grad, **kwargs)",
        ),
        (ols.all_finite, "(tree)"),
        (ols.tree_where, "(pred, on_true, on_false)"),
        (ols.loss_scale_state, "(opt_state)"),
        (ols.with_loss_scaling, "(inner, loss_scale='dynamic', *, axis_name=None)"),
        (ols.metrics, "(opt_state)"),
        (ols.check_health, "(opt_state, *, max_consecutive_skipped=50, loss_scale=None)"),
        (ols.first_nonfinite, "(fun, *args, **kwargs)"),
        (ols.nonfinite_report, "(grads)"),
        (ols.format_nonfinite_report, "(report)"),
        (ols.gradient_exponents, f"(grads, *, dtype={jnp.float16}, loss_scale=1.0)"),
        (ols.suggest_scale, f"(exponents, *, headroom=4, dtype={jnp.float16})"),
        (ols.plot_gradient_exponents, f"(exponents, ax=None, *, dtype={jnp.float16})"),
        (ols.calibrate, "(grad_fn, state, *args, loss_scale='dynamic', axis_name=None)"),
        (assert_scaled_once, "(grad_fn, state, *args)"),
    ],
)
def test_the_signatures_are_those_of_the_contract(function, signature):
    parameters = inspect.signature(function).parameters.values()
    bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    assert re.sub(r"<function (\w+) at \w+>", r"\1", str(bare)) == signature


def test_the_package_is_typed_and_has_one_version():
    assert (PACKAGE / "py.typed").is_file()
    assert ols.__version__[0].isdigit()
    pyproject = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))
    assert pyproject["project"]["dynamic"] == ["version"]


def test_every_module_has_its_place_in_the_order():
    assert set(MODULES) - {"__init__"} <= set(LEVEL)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "__init__"])
def test_imports_go_one_way(module):
    assert {name for name in own_imports(module) if LEVEL[name] >= LEVEL[module]} == set()


@pytest.mark.parametrize("module", MODULES)
def test_only_one_module_imports_flax(module):
    assert ("flax" in packages(module)) is (module == "flax")


@pytest.mark.parametrize("module", ["_tree", "_state", "_policy", "_scaling"])
def test_the_pure_part_does_not_import_optax(module):
    assert "optax" not in packages(module)


def test_what_holds_for_any_tree_imports_jax_only():
    allowed = {"jax", "numpy", *sys.stdlib_module_names}
    assert packages("_tree") - allowed == set()


def test_the_package_holds_nothing_but_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    statements = {type(node) for node in tree.body[1:]}  # the first is the docstring
    assert statements <= {ast.ImportFrom, ast.Assign}


def test_importing_it_imports_neither_flax_nor_a_plotting_library():
    code = (
        "import sys, optax_lossscale; "
        "print(*sorted({'flax', 'keras', 'torch', 'jmp', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert result.stdout.strip() == ""
