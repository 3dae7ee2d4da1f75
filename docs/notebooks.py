"""Writes each example as a Jupyter notebook: `python docs/notebooks.py FOLDER`."""

import ast
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def parts(source: str) -> list[str]:
    """Split a module after its docstring, at its definitions and where its imports end."""
    lines = source.splitlines(keepends=True)
    docstring, *body = ast.parse(source).body
    cells, before, end = [], None, docstring.end_lineno
    for node in body:
        kind = type(node)
        is_import = issubclass(kind, ast.Import | ast.ImportFrom)
        is_definition = issubclass(kind, ast.ClassDef | ast.FunctionDef)
        now = "import" if is_import else "definition" if is_definition else "other"
        text = "".join(lines[end : node.end_lineno])  # with the comments above
        if now == before != "definition":
            cells[-1] += text
        else:
            cells.append(text)
        before, end = now, node.end_lineno
    return [cell.strip("\n") for cell in cells]


def notebook(path: Path) -> dict:
    """Return an example in the format of Jupyter, version 4."""
    source = path.read_text("utf-8")
    start = f'import sys\n\nsys.argv = ["{path.name}"]  # a notebook has no command line'
    cells = [
        {
            "cell_type": "markdown",
            "source": f"# {path.name}\n\n{ast.get_docstring(ast.parse(source))}",
        }
    ]
    cells += [
        {"cell_type": "code", "source": code, "execution_count": None, "outputs": []}
        for code in [start, *parts(source)]
    ]
    cells = [{"id": f"part-{i}", "metadata": {}, **cell} for i, cell in enumerate(cells)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write(folder: Path) -> None:
    """Write a notebook for each example."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(EXAMPLES.glob("*.py")):
        text = json.dumps(notebook(path), indent=1, ensure_ascii=False)
        (folder / f"{path.stem}.ipynb").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
