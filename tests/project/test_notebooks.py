"""Each example is also a notebook, with the same code."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    runpy.run_path(str(ROOT / "docs/notebooks.py"))["write"](folder)
    return {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.ipynb")}


def code_of(notebook):
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_code_of_a_notebook_is_that_of_the_example(notebooks, path):
    first, *cells = code_of(notebooks[path.stem])
    assert first.startswith("import sys\n\nsys.argv = ")
    docstring, code = path.read_text("utf-8").removeprefix('"""').split('"""\n', 1)
    assert docstring.strip() in notebooks[path.stem]["cells"][0]["source"]
    assert [line for line in "\n".join(cells).splitlines() if line] == [
        line for line in code.splitlines() if line
    ]
    assert all(cell and not cell.startswith("\n") for cell in cells)


def test_every_notebook_has_what_the_format_requires(notebooks):
    assert len(notebooks) == len(EXAMPLES) > 5
    for notebook in notebooks.values():
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        cells = notebook["cells"]
        assert len({cell["id"] for cell in cells}) == len(cells) > 3
        for cell in cells:
            keys = {"id", "cell_type", "metadata", "source"}
            code = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
            assert cell.keys() == keys | code
