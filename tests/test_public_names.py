"""The public names, and the architecture: which module may import what."""

import ast
import graphlib
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib
import types
from typing import NamedTuple

import jax.numpy as jnp
import pytest

import optax_lossscale as ols
import optax_lossscale.flax
import optax_lossscale.keras
from optax_lossscale.testing import assert_scaled_once

PACKAGE = pathlib.Path(inspect.getfile(ols)).parent
# A room is a top-level module or package. It imports from the rows below it only.
ROWS = [
    [""],  # `optax_lossscale/__init__.py`
    ["diagnostics", "flax", "interop", "keras", "testing"],
    ["_step"],
    ["_policy"],
    ["_state"],
    ["_support"],
]
ROW = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
PUBLIC_ROOMS = [ols, ols.diagnostics, ols.flax, ols.keras]
OPEN_ROOMS = {"_support", "_state"}  # whose names are for every other room
MOST_NAMES, MOST_ARROWS, MOST_LINES = 28, 35, 250

PUBLIC = {
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleLike",
    "LossScaleState",
    "WithLossScalingState",
    "all_finite",
    "as_loss_scale",
    "diagnostics",
    "init",
    "loss_scale_state",
    "scale_loss",
    "tree_where",
    "unscale_and_check",
    "update",
    "value_and_grad",
    "with_loss_scaling",
}
DIAGNOSTICS = {
    "FirstNonfinite",
    "GradientExponents",
    "LossScaleStalledError",
    "NonfiniteCounts",
    "calibrate",
    "check_health",
    "first_nonfinite",
    "format_nonfinite_report",
    "gradient_exponents",
    "metrics",
    "nonfinite_report",
    "plot_gradient_exponents",
    "suggest_scale",
}
FIELDS = (
    "loss_scale",
    "growth_count",
    "overflow_count",
    "consecutive_skipped",
    "total_skipped",
)


class Import(NamedTuple):
    """One imported name. A module of the package is named from within: `_step.scale`."""

    importer: str
    module: str
    name: str = ""


def modules(package):
    """Return the path of every module of a package by its dotted name."""
    names = {
        path: path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py")
    }
    return {".".join(p for p in parts if p != "__init__"): path for path, parts in names.items()}


def imports(package):
    """Yield every import in a package, also those inside functions."""
    for importer, path in modules(package).items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from (Import(importer, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path} has a relative import"
                yield from (Import(importer, f"{node.module}", alias.name) for alias in node.names)


def own_imports(package):
    """Yield the imports of the package's own modules and names."""
    known = modules(package)
    for importer, module, name in imports(package):
        root, _, inner = module.partition(".")
        if root == package.name:
            submodule = f"{inner}.{name}".strip(".")
            is_module = submodule in known
            yield Import(importer, submodule) if is_module else Import(importer, inner, name)


def room(module):
    return module.partition(".")[0]


def arrows(package):
    """Return the pairs of rooms of which the first imports from the second."""
    pairs = {(room(found.importer), room(found.module)) for found in own_imports(package)}
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def wrong_arrows(package):
    """Return the arrows that do not lead to a row below."""
    return {(a, b) for a, b in arrows(package) if ROW[b] <= ROW[a]}


def circle(package):
    """Return the modules of a circle of imports, if there is one."""
    graph = {name: set() for name in modules(package)}
    for found in own_imports(package):
        graph[found.importer].add(found.module)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return set(error.args[1])
    return set()


def public_names(package):
    """Return the names in `__all__` of the package and of its public rooms."""
    return {
        name
        for module, path in modules(package).items()
        if path.name == "__init__.py" and not module.startswith("_")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


def names_across_rooms(package):
    """Return the imports of names that are not public from another room that is not open."""
    public = public_names(package)
    return {
        found
        for found in own_imports(package)
        if room(found.module) not in OPEN_ROOMS | {room(found.importer)}
        and (found.name or found.module) not in public
    }


def long_modules(package):
    lengths = {
        name: len(path.read_text("utf-8").splitlines()) for name, path in modules(package).items()
    }
    return {name for name, length in lengths.items() if length > MOST_LINES}


def libraries(package, module):
    """Return the top-level packages that a module imports."""
    return {room(found.module) for found in imports(package) if found.importer == module}


def importers(package, library):
    """Return the rooms that import a library."""
    return {room(name) for name in modules(package) if library in libraries(package, name)}


def foreign_to_trees(package):
    """Return what `_support/tree.py` imports beside JAX, NumPy and the standard library."""
    return libraries(package, "_support.tree") - {"jax", "numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("module", PUBLIC_ROOMS)
def test_all_is_the_sorted_public_names(module):
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (value is ols.diagnostics or not isinstance(value, types.ModuleType))
    ]
    assert module.__all__ == sorted(names)


def test_the_public_names_are_those_of_the_contract():
    assert set(ols.__all__) == PUBLIC
    assert set(ols.diagnostics.__all__) == DIAGNOSTICS
    assert len(PUBLIC) <= MOST_NAMES


def test_the_fields_of_the_state_are_those_that_checkpoints_hold():
    assert ols.LossScaleState._fields == FIELDS
    assert ols.WithLossScalingState._fields == ("loss_scale_state", "inner_state")


def test_every_public_name_has_a_docstring():
    names = [
        name
        for module in PUBLIC_ROOMS
        for name in module.__all__
        if not getattr(module, name).__doc__
    ]
    assert names == ["LossScaleLike"]  # an alias cannot hold one; docs/api/policies.md describes it


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
        (ols.diagnostics.metrics, "(opt_state)"),
        (
            ols.diagnostics.check_health,
            "(opt_state, *, max_consecutive_skipped=50, loss_scale=None)",
        ),
        (ols.diagnostics.first_nonfinite, "(fun, *args, **kwargs)"),
        (ols.diagnostics.nonfinite_report, "(grads)"),
        (ols.diagnostics.format_nonfinite_report, "(report)"),
        (ols.diagnostics.gradient_exponents, f"(grads, *, dtype={jnp.float16}, loss_scale=1.0)"),
        (ols.diagnostics.suggest_scale, f"(exponents, *, headroom=4, dtype={jnp.float16})"),
        (ols.diagnostics.plot_gradient_exponents, f"(exponents, ax=None, *, dtype={jnp.float16})"),
        (
            ols.diagnostics.calibrate,
            "(grad_fn, state, *args, loss_scale='dynamic', axis_name=None)",
        ),
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


def test_every_room_has_its_row():
    assert {room(name) for name in modules(PACKAGE)} == set(ROW)


def test_rooms_import_one_way():
    assert wrong_arrows(PACKAGE) == set()


def test_modules_import_without_a_circle():
    assert circle(PACKAGE) == set()


def test_few_arrows_join_the_rooms():
    assert 0 < len(arrows(PACKAGE)) <= MOST_ARROWS


def test_rooms_share_public_names_only():
    assert public_names(PACKAGE) >= PUBLIC | DIAGNOSTICS
    assert names_across_rooms(PACKAGE) == set()


def test_modules_are_short():
    assert long_modules(PACKAGE) == set()


def test_only_the_room_of_flax_imports_flax():
    assert importers(PACKAGE, "flax") == {"flax"}


def test_what_holds_for_any_tree_imports_jax_only():
    assert libraries(PACKAGE, "_support.tree") >= {"jax", "numpy"}
    assert foreign_to_trees(PACKAGE) == set()


@pytest.mark.parametrize(
    "module", ["_state", "_policy.policies", "_step.scale", "_step.finite", "_step.differentiate"]
)
def test_the_pure_functions_do_not_import_optax(module):
    assert module in modules(PACKAGE)
    assert "optax" not in libraries(PACKAGE, module)


def test_an_init_file_holds_names_only():
    paths = [path for path in modules(PACKAGE).values() if path.name == "__init__.py"]
    assert len(paths) > 1
    for path in paths:
        _docstring, *body = ast.parse(path.read_text("utf-8")).body
        assert {type(node) for node in body} <= {ast.ImportFrom, ast.Assign}, path


SOUND = {
    "__init__.py": (
        "from tiny import diagnostics\n"
        "from tiny._step.scale import f\n"
        "__all__ = ['diagnostics', 'f']"
    ),
    "_support/tree.py": "import re\nimport jax.numpy\nfrom numpy import ndarray",
    "_state.py": "from tiny._support import tree",
    "_step/__init__.py": "",
    "_step/scale.py": "from tiny._state import anything\nfrom tiny._step.finite import of_its_room",
    "_step/finite.py": "import optax",
    "diagnostics/__init__.py": "from tiny.diagnostics.health import g\n__all__ = ['g']",
    "diagnostics/health.py": "from tiny._step.scale import f",
    "flax/__init__.py": "def late():\n    import flax.core",
}


def tiny(path, **changes):
    """Write a small package of the same rooms, with some of its files changed."""
    for name, text in (SOUND | changes).items():
        file = path / "tiny" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return path / "tiny"


def test_a_sound_package_passes_every_check(tmp_path):
    package = tiny(tmp_path)
    assert arrows(package) == {
        ("", "_step"),
        ("", "diagnostics"),
        ("_state", "_support"),
        ("_step", "_state"),
        ("diagnostics", "_step"),
    }
    assert public_names(package) == {"diagnostics", "f", "g"}
    assert importers(package, "flax") == {"flax"}
    for check in (wrong_arrows, circle, names_across_rooms, long_modules, foreign_to_trees):
        assert check(package) == set()


@pytest.mark.parametrize(
    ("check", "file", "text", "found"),
    [
        (wrong_arrows, "_state.py", "from tiny._step.scale import f", {("_state", "_step")}),
        (wrong_arrows, "flax/__init__.py", "import tiny.diagnostics", {("flax", "diagnostics")}),
        (wrong_arrows, "_state.py", "def late():\n    import tiny", {("_state", "")}),
        (
            circle,
            "_step/finite.py",
            "from tiny._step import scale",
            {"_step.finite", "_step.scale"},
        ),
        (
            circle,
            "diagnostics/health.py",
            "from tiny.diagnostics import g",
            {"diagnostics", "diagnostics.health"},
        ),
        (
            names_across_rooms,
            "flax/__init__.py",
            "from tiny._step.scale import f, h",
            {("flax", "_step.scale", "h")},
        ),
        (
            names_across_rooms,
            "flax/__init__.py",
            "from tiny._step import scale",
            {("flax", "_step.scale", "")},
        ),
        (long_modules, "_state.py", "\n" * 251, {"_state"}),
        (foreign_to_trees, "_support/tree.py", "import jax\nimport optax", {"optax"}),
        (foreign_to_trees, "_support/tree.py", "from tiny import _state", {"tiny"}),
        (
            lambda package: importers(package, "flax"),
            "_step/finite.py",
            "from flax import core",
            {"flax", "_step"},
        ),
    ],
)
def test_a_broken_rule_is_found(check, file, text, found, tmp_path):
    assert check(tiny(tmp_path, **{file: text})) == found


def test_importing_it_imports_neither_flax_nor_a_plotting_library():
    code = (
        "import sys, optax_lossscale; "
        "print(*sorted({'flax', 'keras', 'torch', 'jmp', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert result.stdout.strip() == ""
