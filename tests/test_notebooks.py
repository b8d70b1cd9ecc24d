"""The notebooks run, and print what is stored in them: the same words, and numbers that are close."""

import re
import warnings
from pathlib import Path

import notebooks
import pytest

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


def test_there_are_two() -> None:
    assert [path.stem for path in PATHS] == ["first-federation", "own-method"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(path: Path) -> None:
    notebook = notebooks.load(path)
    stored = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # those of matplotlib about fonts
        made = [outputs for _, outputs in notebooks.executed(notebook)]
    assert any(stored), "run: python docs/notebooks.py"
    for now, then in zip(made, stored, strict=True):
        assert [one["output_type"] for one in now] == [one["output_type"] for one in then]
        for a, b in zip(map(notebooks.text_of, now), map(notebooks.text_of, then), strict=True):
            assert NUMBER.sub("#", a) == NUMBER.sub("#", b), "run: python docs/notebooks.py"
            # Other processors round differently, and a client has a dozen test samples.
            numbers = [[float(text) for text in NUMBER.findall(part)] for part in (a, b)]
            assert numbers[0] == pytest.approx(numbers[1], rel=0.2)


def test_a_cell_shows_its_text_its_last_expression_and_its_figures() -> None:
    sources = [
        ["x = 3\n", "print('x', x)\n", "x + 1"],
        ["from matplotlib import pyplot\n", "figure, axes = pyplot.subplots()\n", "axes.plot([1, 2]);"],
        ["y = x"],
    ]
    book = {"cells": [{"cell_type": "code", "source": source} for source in sources]}
    (text, value), (image,), nothing = (outputs for _, outputs in notebooks.executed(book))
    assert (notebooks.text_of(text), notebooks.text_of(value)) == ("x 3\n", "4")
    assert image["data"]["image/png"]
    assert nothing == []
