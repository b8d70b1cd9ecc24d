"""Run the notebooks of ``docs/notebooks`` and store what their cells print and draw; show a notebook as Markdown.

``python docs/notebooks.py`` runs them all; a test does, too, and compares what they print with what is stored. Code
cells are Python without Jupyter's own commands, so nothing but the package and matplotlib is needed for this.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
FENCE = {"markdown": "{}", "code": "```python\n{}\n```"}

Cell = dict[str, Any]


def load(path: Path) -> dict[str, Any]:
    """Return a notebook."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def executed(notebook: dict[str, Any]) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    """Run the code cells one after another; yield each with its outputs: text, the last expression, figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
        source, printed = "".join(cell["source"]).rstrip(), io.StringIO()
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) and not source.endswith(";") else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"cell {number}", "exec"), space)
            shown = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
            value = eval(compile(shown, f"cell {number}", "eval"), space) if shown else None
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
        if value is not None:
            text = {"text/plain": lines(repr(value))}
            outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": text})
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png", dpi=110)
            image = {"image/png": base64.b64encode(drawn.getvalue()).decode(), "text/plain": ["<Figure>"]}
            outputs.append({"output_type": "display_data", "metadata": {}, "data": image})
        pyplot.close("all")
        yield {**cell, "execution_count": number}, outputs


def lines(text: str) -> list[str]:
    """Return a text as a notebook stores it."""
    return text.splitlines(keepends=True)


def text_of(output: dict[str, Any]) -> str:
    """Return what an output shows as text; a figure shows none."""
    data = output.get("data", {})
    return "" if "image/png" in data else "".join(output.get("text") or data.get("text/plain", ""))


def markdown(path: Path) -> str:
    """Return a notebook as Markdown, with its stored outputs below the cells."""
    parts = []
    for cell in load(path)["cells"]:
        parts.append(FENCE[cell["cell_type"]].format("".join(cell["source"])))
        for output in cell.get("outputs", ()):
            shown = f"```text\n{text_of(output).rstrip()}\n```"
            if image := output.get("data", {}).get("image/png"):
                shown = f'<img alt="What the code above draws" src="data:image/png;base64,{image}">'
            parts.append(f'<div class="output" markdown>\n\n{shown}\n\n</div>')
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run every notebook and store its outputs."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = load(path)
        code = iter([{**cell, "outputs": outputs} for cell, outputs in executed(notebook)])
        cells = [next(code) if cell["cell_type"] == "code" else cell for cell in notebook["cells"]]
        path.write_text(json.dumps({**notebook, "cells": cells}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sys.stdout.write(f"docs/notebooks/{path.name}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
