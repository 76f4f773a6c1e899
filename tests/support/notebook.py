"""Run the notebook of examples/, and rewrite the outputs that it stores.

PYTHONPATH=.:tests python tests/support/notebook.py
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from support.folders import inside

NOTEBOOK = Path(__file__).parents[2] / "examples/plan_and_audit.ipynb"


def run_cells(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs that its cells give in the working directory."""
    names: dict[str, Any] = {}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = _outputs("".join(cell["source"]), names, count)
            cell = {**cell, "execution_count": count, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(code: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return what a cell prints, and the value of its last line where that is an expression."""
    tree, out, outputs = ast.parse(code), io.StringIO(), []
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(out):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if text := out.getvalue():
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        result = {"data": data, "execution_count": count, "metadata": {}}
        outputs.append({"output_type": "execute_result", **result})
    return outputs


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    with tempfile.TemporaryDirectory() as folder, inside(Path(folder)):
        notebook = run_cells(notebook)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
