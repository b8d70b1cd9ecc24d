"""The table: its numbers are those of the summaries, and every format says the same."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import folders
from tdpfed.report import Group, group_runs, read_runs, table
from tdpfed.report.table import COLUMNS, Cell, Table, cells, cost_to, reach_cells, results, run_cells, target_of


@pytest.fixture
def groups(tmp_path: Path) -> list[Group]:
    paths = [folders.make(tmp_path / f"tdpfed-{s}", seed=s, level=0.9 + 0.04 * s) for s in (0, 1)]
    paths += [folders.make(tmp_path / f"fedavg-{s}", "algorithm.name=fedavg", seed=s, level=0.9) for s in (0, 1)]
    paths += [folders.make(tmp_path / f"local-{s}", "algorithm.name=local", seed=s, level=0.7, up=0) for s in (0, 1)]
    return group_runs(read_runs(paths)[0])[0]


def test_a_runs_cells_are_its_summary(groups: list[Group]) -> None:
    for run in (run for group in groups for run in group.runs):
        summary = json.loads((run.path / "summary.json").read_text())
        for column, cell in zip(COLUMNS, run_cells(run), strict=True):
            assert cell.value == pytest.approx(summary[column.key] * column.scale)
            assert cell.spread is None


def test_a_groups_cells_are_the_mean_of_its_runs(groups: list[Group]) -> None:
    for group in groups:
        for i, cell in enumerate(cells(group, groups)):
            values = [run_cells(run)[i].value for run in group.runs]
            assert cell.value == pytest.approx(sum(value or 0 for value in values) / 2)
            if COLUMNS[i].key.endswith("accuracy"):
                spread = abs((values[0] or 0) - (values[1] or 0)) / math.sqrt(2)
                assert cell.spread == pytest.approx(spread, abs=1e-9)


def test_the_best_is_marked_and_what_the_spread_does_not_separate(groups: list[Group]) -> None:
    marks = {group.label: cells(group, groups)[0].mark for group in groups}
    assert marks == {"TDPFed": "best", "FedAvg": "close", "Local": ""}
    at = [column.key for column in COLUMNS].index("uplink_bytes")
    assert {group.label: cells(group, groups)[at].mark for group in groups} == {
        "TDPFed": "",
        "FedAvg": "",
        "Local": "best",
    }
    assert {cells(group, groups)[-1].mark for group in groups} == {""}, "more rounds are neither good nor bad"
    costs = {group.label: [cell.mark for cell in reach_cells(group, groups, 0.6)] for group in groups}
    assert costs["Local"] == ["", "best"]
    assert costs["TDPFed"][0] == "best"
    assert {cell.mark for group in groups for cell in reach_cells(group, groups, 0.99)} == {""}
    assert [cell.mark for cell in cells(groups[0], groups[:1])] == len(COLUMNS) * [""]


def test_what_was_dealt_differently_is_no_rival(tmp_path: Path) -> None:
    paths = [
        folders.make(tmp_path / f"{name}{alpha}", f"algorithm.name={name}", f"data.alpha={alpha}", level=level)
        for name, alpha, level in (
            ("fedavg", 0.1, 0.9),
            ("local", 0.1, 0.95),
            ("fedavg", 1.0, 0.7),
            ("local", 1.0, 0.6),
        )
    ]
    (made, notes) = group_runs(read_runs(paths)[0])
    at = results(made).titles.index("personalized %")
    marks = [getattr(row[at], "mark", None) for row in results(made).rows]
    assert marks == ["", "best", "best", ""]
    assert any("2 different ways" in note for note in notes)


@pytest.mark.parametrize("percent", range(1, 101))
def test_the_common_target_is_exact(percent: int, groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = {id(run): run for run in groups[0].runs[:1]}.values()
    group = Group("x", (replace(run, series={**run.series, "personalized_accuracy": [percent / 100]}),))
    assert target_of([group]) == percent / 100


def test_cost_to_a_target_by_hand(groups: list[Group]) -> None:
    run = groups[0].runs[0]
    curve = [accuracy or 0 for accuracy in run.series["personalized_accuracy"]]
    for target in (0.3, 0.5, curve[7]):
        first = next(i for i, accuracy in enumerate(curve) if accuracy >= target)
        assert cost_to(run, target) == (first + 1, 300_000 * (first + 1))
    assert cost_to(run, 0.99) == (None, None)


def test_the_common_target_is_reached_by_every_run(groups: list[Group]) -> None:
    target = target_of(groups)
    assert target is not None
    assert round(100 * target, 9).is_integer()
    reached = [cost_to(run, target)[0] for group in groups for run in group.runs]
    assert None not in reached
    assert None in [cost_to(run, target + 0.01)[0] for group in groups for run in group.runs]
    assert target_of([]) is None


def test_no_mean_cost_where_one_run_never_got_there(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "target_of", lambda _: 0.9)
    at = results(groups).titles.index("rounds to target")
    assert [isinstance(cell := row[at], Cell) and cell.value for row in results(groups).rows] == [None, None, None]


@pytest.mark.parametrize(("target", "shown"), [(0.29, "29"), (0.9153, "91.53"), (0.57, "57")])
def test_a_target_is_shown_as_it_is(target: float, shown: str, groups: list[Group]) -> None:
    made = results(groups, target)
    assert {str(row[made.titles.index("target %")]) for row in made.rows} == {shown}


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_holds_every_number_in_full(groups: list[Group]) -> None:
    for line, group in zip(read_csv(table.to_csv(results(groups))), groups, strict=True):
        assert (line["data set"], line["method"], line["runs"]) == ("digits", group.label, "2")
        stat = group.stat("personalized_accuracy")
        assert float(line["personalized %"]) == 100 * (stat.mean or 0)
        assert float(line["personalized % sd"]) == 100 * (stat.spread or 0)
    lines = read_csv(table.to_csv(table.single_runs(groups)))
    assert [line["run"] for line in lines] == [run.name for group in groups for run in group.runs]


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def test_markdown_and_latex_have_the_same_cells(groups: list[Group]) -> None:
    made = results(groups)
    markdown = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.to_markdown(made).splitlines()]
    latex = [line.removesuffix(" \\\\").split(" & ") for line in table.to_latex(made).splitlines() if "&" in line]
    assert len(markdown) == len(latex) + 1 == len(groups) + 2
    for row, left, right in zip(made.rows, markdown[2:], latex[1:], strict=True):
        for cell, a, b in zip(row, left, right, strict=True):
            bare = unescaped(b).replace("textbf{", "").replace("}", "").replace("$pm$", "±").replace("$approx$", "≈")
            assert unescaped(a).strip(" *") == bare
            assert str(cell) in bare


HOSTILE: list[Any] = ["a|b", "a & b", "100 % $x$ #1 {_} ~ ^ \\cmd", "<b>*bold*</b>", "two\nlines", '"quoted", 1']


def test_names_do_not_break_the_formats() -> None:
    made = Table(["name", "value"], [[name, Cell(1.0)] for name in HOSTILE])
    assert [line["name"] for line in read_csv(table.to_csv(made))] == HOSTILE
    markdown = table.to_markdown(made).splitlines()
    assert len(markdown) == len(HOSTILE) + 2
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in markdown)
    assert "<b>" not in "".join(markdown)
    latex = table.to_latex(made)
    assert latex.count("\\\\\n") == len(HOSTILE) + 1
    assert re.search(r"(?<!\\)[%#~^]", latex) is None


def test_an_empty_table_is_still_a_table() -> None:
    empty = Table(["a", "b"], [])
    assert table.to_csv(empty) == "a,b\n"
    assert table.to_markdown(empty).count("\n") == 2
    assert "\\end{tabular}" in table.to_latex(empty)
