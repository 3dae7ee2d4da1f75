"""Runs the Python blocks of the documents, and keeps the memory of a test run small.

A block marked `text` that follows a Python block is what that block prints. With
OLS_TESTS_WITHOUT_XLA=1 in the environment, all tests run without `optax_lossscale._xla`.
"""

import collections
import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

_evaluate = PythonEvaluator()

# XLA:CPU's emitters take half of the time that is left where JAX asks for few optimizations. Jaxlib
# 0.10 can do without them, and 0.12 cannot. XLA reads the flags when it compiles its first program.
IS_QUICK = jax.config.read("jax_disable_most_optimizations")
if IS_QUICK and jax.version.__version_info__[:2] == (0, 10):
    without_emitters = "--xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{without_emitters} {os.environ.get('XLA_FLAGS', '')}"

WITHOUT_XLA = os.environ.get("OLS_TESTS_WITHOUT_XLA") == "1"
if WITHOUT_XLA:
    importlib.import_module("optax_lossscale._xla").enabled = False


def pytest_configure(config: pytest.Config) -> None:
    """Run named tests, slow or not, and keep compiled programs.

    A program is compiled once for all files, processes and runs. `--cache-clear` forgets them.
    """
    if all("::" in name for name in config.args) and "-m" not in config.invocation_params.args:
        config.option.markexpr = ""
    cache = getattr(config, "cache", None)
    if IS_QUICK and cache and jax.version.__version_info__ >= (0, 8):  # jax 0.7 may abort here
        options = {
            "jax_compilation_cache_dir": str(cache.mkdir("jax")),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        for option, value in options.items():
            jax.config.update(option, value)
            os.environ[option.upper()] = str(value)  # for processes that a test starts


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow cases of a claim as exhaustive, except two, and except where each is needed."""
    cases: collections.Counter[str] = collections.Counter()
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        if "slow" in markers and not markers & {"each_case", "exhaustive"}:
            claim = item.nodeid.partition("[")[0]
            cases[claim] += 1
            if cases[claim] > 2:
                item.add_marker(pytest.mark.exhaustive)


def _run(example: Example) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        _evaluate(example)
    example.namespace["_printed"] = printed.getvalue()


def _compare(example: Example) -> str | None:
    printed = example.namespace.pop("_printed", "")
    return None if printed == example.parsed else f"Printed:\n{printed}"


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Drop what was compiled for a file: nearly all memory of a long run, and of no use to another.

    JAX keeps each compiled program for as long as the function lives, and functions of `jax.numpy`
    live for ever.
    """
    yield
    if jax.version.__version_info__ >= (0, 8):  # jax 0.7 may abort here
        jax.clear_caches()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that count what only `_xla` saves."""
    if WITHOUT_XLA and item.get_closest_marker("needs_xla"):
        pytest.skip("it counts what only `_xla` saves")


@pytest.fixture(autouse=True)
def _doctest_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a docstring's example as a reader does, too."""
    if isinstance(request.node, pytest.DoctestItem):
        with _promotion(), _as_if_nothing_was_scaled():
            yield
    else:
        yield


@pytest.fixture(scope="module")
def _defaults() -> Iterator[None]:
    """Run as a reader does, without the strictness that `tests` asks of the library."""
    with _promotion():
        yield


@pytest.fixture(scope="module")
def _new_process() -> Iterator[None]:
    """Run a document as in a new process, so that its guards must be given scaled gradients."""
    with _as_if_nothing_was_scaled():
        yield


@contextlib.contextmanager
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def _as_if_nothing_was_scaled() -> Iterator[None]:
    """Forget that earlier tests have scaled a loss, which silences a warning."""
    never_scaled = importlib.import_module("optax_lossscale._loss_scale.never_scaled")
    never_scaled.mark_scaled(has_scaled=False)
    yield
    never_scaled.mark_scaled()


def _define_a_program(namespace: dict[str, Any]) -> None:
    """Define what README's blocks expect of the reader's program."""

    def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.mean((batch @ params["w"]) ** 2)

    namespace |= {
        "jax": jax,
        "loss_fn": loss_fn,
        "float32_loss_fn": loss_fn,
        "params": {"w": jnp.ones((64, 64))},
        "batch": jnp.ones((8, 64)),
    }


_PARSERS = [CodeBlockParser("python", _run), CodeBlockParser("text", _compare)]
_FIXTURES = ["_defaults", "_new_process"]
_PAGES = ["BUILD.md", "docs/*.md", "docs/api/*.md", "docs/migration/*.md"]
pytest_collect_file = (
    Sybil(_PARSERS, patterns=["README.md"], setup=_define_a_program, fixtures=_FIXTURES)
    + Sybil(_PARSERS, patterns=_PAGES, fixtures=_FIXTURES)
).pytest()
