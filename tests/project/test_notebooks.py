"""Each example is also a notebook, with the same code."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_notebook_has_the_code_of_its_example_and_all_that_the_format_requires(tmp_path):
    runpy.run_path(str(ROOT / "docs/notebooks.py"))["write"](tmp_path)
    examples = [*(ROOT / "examples").glob("*.py")]
    assert len(examples) == len([*tmp_path.glob("*.ipynb")]) > 5
    for example in examples:
        notebook = json.loads((tmp_path / f"{example.stem}.ipynb").read_text("utf-8"))
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        cells = notebook["cells"]
        assert len({cell["id"] for cell in cells}) == len(cells) > 3
        for cell in cells:
            more = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
            assert cell.keys() == {"id", "cell_type", "metadata", "source"} | more

        first, *codes = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        assert first.startswith("import sys\n\nsys.argv = ")
        docstring, code = example.read_text("utf-8").removeprefix('"""').split('"""\n', 1)
        assert docstring.strip() in cells[0]["source"]
        lines = [line for line in "\n".join(codes).splitlines() if line]
        assert lines == [line for line in code.splitlines() if line]
        assert all(code and not code.startswith("\n") for code in codes)
