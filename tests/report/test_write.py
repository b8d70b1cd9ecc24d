"""Reports on disk: where they go, what they hold, what is refused, and how a page follows a run."""

import json
import os
import re
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import folders
from tdpfed import cli
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError
from tdpfed.report import Report, export, figures, follow, read_run, write_page
from tdpfed.report.page import render
from tdpfed.report.plans import plan_of
from tdpfed.runs.folder import RunFolder
from tdpfed.runs.seals import sealed


def data_of(page: Path) -> dict[str, Any]:
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert text is not None
    found: dict[str, Any] = json.loads(text[1])
    return found


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["report", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_one_run_gets_its_page_beside_it_several_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = folders.make(tmp_path / "one"), folders.make(tmp_path / "two", seed=1)
    monkeypatch.chdir(tmp_path)
    assert call(str(one)) == (0, f"{one / 'report.html'}\n", "")
    assert call(str(one), str(two)) == (0, "report.html\n", "")
    assert call(str(one), "--out", "deep/down/page.html", "--json")[0] == 0
    for page in (one / "report.html", tmp_path / "report.html", tmp_path / "deep" / "down" / "page.html"):
        assert data_of(page)["runs"][0]["name"] == "one"
        assert [path.name for path in page.parent.iterdir() if path.name.endswith(".part")] == []


def test_json_names_page_files_and_notes(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", rounds=3, status=None)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4')
    status, out, err = call(str(path), str(path), "--json")
    answer = json.loads(out)
    assert (status, answer["page"], answer["files"]) == (0, str(path / "report.html"), [])
    assert [f"note: {note}" for note in answer["notes"]] == err.splitlines()
    assert "metrics.jsonl is truncated" in err
    assert "more than once" in err
    assert data_of(path / "report.html")["notes"] == answer["notes"]


def test_bad_input_is_status_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = folders.make(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    cases = {
        (str(tmp_path / "folder"),): ["RUN", "must be a run folder", "config.toml"],
        (str(run), str(tmp_path / "nowhere")): ["RUN", "nowhere"],
        (str(run), "--out", str(tmp_path / "folder")): ["--out", "is a folder"],
        (str(run), "--out", str(tmp_path / "file" / "page.html")): ["--out", "cannot write"],
        (str(run), "--export", str(tmp_path / "file")): ["--export", "is a file", "must be a folder"],
    }
    for arguments, words in cases.items():
        monkeypatch.setattr(sys, "argv", ["tdpfed", "report", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        assert (stop.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
        assert captured.err.startswith("error: ")
        assert all(word in captured.err for word in words), captured.err
        assert not (run / "report.html").exists(), "nothing is written before everything has been checked"


@pytest.mark.parametrize(("package", "arguments"), [("plotly", []), ("matplotlib", ["--export", "figures"])])
def test_a_missing_extra_is_named(
    package: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TDPFedError, match=rf"{package} is not installed; pip install 'tdpfed\[report\]'"):
        call(str(folders.make(tmp_path / "run")), *arguments)


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders.make(tmp_path / "run")
    (path / "report.html").write_text("old")

    def broken(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(TDPFedError, match="No space left"):
        write_page([path])
    assert (path / "report.html").read_text() == "old"
    assert not [one for one in path.iterdir() if one.name.endswith(".part")]


HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&\"'"


def test_what_a_folder_says_is_never_markup(tmp_path: Path) -> None:
    path = folders.make(tmp_path / HOSTILE.replace("/", "_"), status=None)
    config = path / "config.toml"
    config.write_text(config.read_text().replace('name = "digits"', f"name = {json.dumps(HOSTILE)}"))
    page = write_page([path], tmp_path / "page.html").page
    text, plain = page.read_text(), write_page([folders.make(tmp_path / "plain")]).page.read_text()
    for tag in ("<script", "</script", "<img", "<!--"):
        assert text.count(tag) == plain.count(tag), tag
    assert data_of(page)["datasets"][0]["name"] == HOSTILE


def test_a_page_of_twenty_runs_of_800_rounds_is_small(tmp_path: Path) -> None:
    paths = [folders.make(tmp_path / f"{i}", f"algorithm.lam={i + 1}.0", rounds=800) for i in range(20)]
    page = write_page(paths, tmp_path / "page.html").page
    assert page.stat().st_size < 8e6
    runs = data_of(page)["runs"]
    assert len(runs) == 20
    assert all(len(run["series"][name]) == 800 for run in runs for name in ("round", "personalized_accuracy", "mb"))


def test_numbers_on_the_page_are_those_of_the_run(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", every={"diagnostics": {"drift": 2.0}, "rejected": 3})
    run, page = read_run(path), data_of(write_page([path]).page)["runs"][0]
    for field in ("round", "personalized_accuracy", "minibatch_loss", "seconds", "rejected"):
        assert page["series"][field] == pytest.approx(run.series[field], rel=1e-4)
    assert page["series"]["mb"] == pytest.approx([0.3 * t for t in range(1, 21)])
    assert page["clients"] == pytest.approx(run.clients, rel=1e-4)
    assert page["diagnostics"]["drift"]["value"] == 20 * [2]
    assert page["toml"] == (path / "config.toml").read_text()
    assert "epsilon" not in page["series"]


def test_many_clients_are_thinned_to_quantiles(tmp_path: Path) -> None:
    path = folders.make(
        tmp_path / "run", rounds=1, status=None, every={"client_accuracy": [k / 9999 for k in range(10_000)]}
    )
    clients = data_of(write_page([path]).page)["runs"][0]["clients"]
    assert (len(clients), clients[0], clients[-1]) == (2001, 0, 1)
    assert clients[1000] == pytest.approx(0.5, abs=1e-3)


def test_refusals_are_counted_by_rule_and_client(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", "robust.attack=gauge", "robust.gauge=1.0", status=None)
    lines = [(1, 5, "gauge"), (1, 6, "gauge"), (2, 5, "gauge"), (2, None, "size")]
    text = "".join(
        json.dumps({"round": r, "client": c, "rule": rule, "reason": f"{rule} {r}"}) + "\n" for r, c, rule in lines
    )
    (path / "refusals.jsonl").write_text(text)
    robust = data_of(write_page([path]).page)["groups"][0]["robust"]
    assert robust["rules"] == [["gauge", 3, "gauge 1"], ["size", 1, "size 2"]]
    assert robust["clients"] == [["5", 2], ["6", 1], ["unknown", 1]]
    assert (robust["rejected"], robust["used"]["attack"], robust["used"]["hostile share"]) == (4, "gauge", "0.2")
    assert data_of(write_page([folders.make(tmp_path / "calm")]).page)["groups"][0]["robust"] is None


def test_the_samples_of_runs_with_the_same_clients_are_on_the_page_once(tmp_path: Path) -> None:
    paths = [folders.with_data(folders.make(tmp_path / f"{i}", seed=i // 2), i // 2) for i in range(4)]
    data = data_of(write_page([*paths, folders.make(tmp_path / "old")], tmp_path / "page.html").page)
    assert [run["federation"] for run in data["runs"]] == [0, 0, 1, 1, None]
    one = data["federations"][1]
    assert one["classes"] == ["ill", "<b>well</b>", "3"]
    assert (one["size"], one["ids"], one["clients"]) == (10, *2 * [[f"ward-{k}" for k in range(10)]])
    assert one["counts"] == [[k % 7, 1, 2] for k in range(10)]


def test_samples_of_many_clients_are_thinned_and_uncounted_ones_left_out(tmp_path: Path) -> None:
    many = tuple(str(k) for k in range(3001))
    paths = [
        folders.with_data(folders.make(tmp_path / "a"), ids=many),
        folders.with_data(folders.make(tmp_path / "b"), counts=()),
    ]
    first, second = data_of(write_page(paths, tmp_path / "page.html").page)["federations"]
    assert (len(first["counts"]), first["clients"][0], first["clients"][-1]) == (400, "0", "3000")
    assert (first["size"], first["ids"], second["counts"], len(second["ids"])) == (3001, [], [], 10)


def test_rejected_clients_have_their_ids(tmp_path: Path) -> None:
    path = folders.with_data(folders.make(tmp_path / "run", status=None))
    for client in (7, 99):
        line = {"round": 1, "client": client, "rule": "size", "reason": "too long"}
        with (path / "refusals.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    robust = data_of(write_page([path]).page)["groups"][0]["robust"]
    assert robust["clients"] == [["ward-7", 1], ["99", 1]]


@pytest.mark.parametrize(
    "change",
    [
        {"ids": ["a"] * 9}, {"ids": list(range(10))}, {"class_counts": [[1, 2, 3]] * 9},
        {"class_counts": [[1, 2]] * 10}, {"class_counts": [[1, 2, -3]] * 10}, {"class_counts": [3] * 10},
        {"train_size": ["1"] * 10}, {"classes": 2.0}, {"class_names": ["ill"]},
    ],
)  # fmt: skip
def test_a_card_that_does_not_fit_together_is_a_note(tmp_path: Path, change: dict[str, Any]) -> None:
    path = folders.with_data(folders.make(tmp_path / "run"))
    values = json.loads((path / "federation.json").read_text())
    del values["sha256"]
    (path / "federation.json").write_text(sealed(json.dumps(values | change)))
    report = write_page([path])
    assert [note for note in report.notes if "federation.json is ignored" in note]
    assert data_of(report.page)["federations"] == []


def test_the_plan_is_that_of_the_configuration(tmp_path: Path) -> None:
    plan = plan_of(read_run(folders.make(tmp_path / "a", "algorithm.compression=4", "algorithm.exclude=['fc2*']")))
    assert isinstance(plan, FactorPlan)
    ranks = {row.name: (row.shape, row.rank) for row in plan.rows()}
    assert ranks["fc1.weight"] == ((100, 64), 10)
    assert ranks["fc2.weight"] == ((10, 100), None)
    settings = ("data.name=synthetic", "data.options={dimension=30, classes=5}", "model.name=logistic")
    other = plan_of(read_run(folders.make(tmp_path / "b", *settings)))
    assert isinstance(other, FactorPlan)
    assert other.dense.shapes == ((5, 30), (5,))
    assert plan_of(read_run(folders.make(tmp_path / "c", "algorithm.name=fedavg"))) is None


def test_a_plan_that_needs_code_or_data_is_left_out_and_said(tmp_path: Path) -> None:
    own = plan_of(read_run(folders.make(tmp_path / "a", "model.name=os:getcwd")))
    assert isinstance(own, str)
    assert "does not import" in own
    file = plan_of(read_run(folders.make(tmp_path / "b", "data.name=mine.npz")))
    assert isinstance(file, str)
    assert "mine.npz" in file
    path = folders.make(tmp_path / "c")
    (path / "config.toml").write_text('[algorithm]\nname = "tdpfed"\ncompression = "high"\n')
    assert "algorithm.compression" in str(plan_of(read_run(path)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("export")
    few: dict[str, Any] = {"local_accuracy": None, "personalized_loss": None, "global_loss": None}
    measured = {**few, "diagnostics": {"gradient_norm": 0.5}}
    paths = [folders.make(root / f"t{s}", seed=s, level=0.8 + 0.1 * s, rounds=5, every=measured) for s in (0, 1)]
    silent = {**few, "global_accuracy": None}
    odd = folders.make(root / "$_broken{math", "algorithm.name=local", rounds=5, up=0, every=silent)
    (odd / "config.toml").write_text((odd / "config.toml").read_text().replace('"local"', '"_$x^{ 漢"'))
    report = write_page([*paths, odd], root / "page.html")
    return root / "figures", export(report.groups, root / "figures")


def test_exports_are_there_and_parse(exported: tuple[Path, list[Path]]) -> None:
    folder, files = exported
    assert sorted(files) == sorted(folder.iterdir())
    stems = {file.stem for file in files if file.suffix == ".png"}
    assert {"accuracy-personalized-rounds", "accuracy-global-megabytes", "loss-minibatch-seconds", "clients"} <= stems
    assert "accuracy-personalized-final" in stems
    assert "diagnostics-gradient-norm" in stems
    for stem in stems:
        with Image.open(folder / f"{stem}.png") as image:
            colors = image.convert("RGB").getcolors(1 << 24)
            assert min(image.size) > 300
            assert colors is not None
            assert len(colors) > 20
        svg = ET.parse(folder / f"{stem}.svg").getroot()
        assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 10
        assert "mathdefault" not in "".join(svg.itertext())
        pdf = (folder / f"{stem}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF-")
        assert pdf.rstrip().endswith(b"%%EOF")
    assert {file.name for file in files if file.suffix in (".csv", ".md", ".tex")} == {
        f"{name}.{ending}" for name in ("results", "runs", "plan") for ending in ("csv", "md", "tex")
    }


def test_a_curve_of_an_svg_has_a_point_per_round(exported: tuple[Path, list[Path]]) -> None:
    folder, _ = exported
    root = ET.parse(folder / "accuracy-personalized-rounds.svg").getroot()
    lines = [
        path.get("d", "")
        for path in root.iter("{http://www.w3.org/2000/svg}path")
        if "stroke: #0072b2" in path.get("style", "")
    ]
    assert any(line.count("L") == 4 for line in lines)
    assert "_$x^{" in "".join(root.itertext())


def test_a_latex_table_has_six_columns_or_those_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdpfed.report.figures.draw", lambda groups, save: None)  # the tables are what is tested
    run, folder = folders.make(tmp_path / "run"), tmp_path / "tables"
    cases: tuple[tuple[tuple[str, ...], int], ...] = (((), 6), (("--columns", "seconds, up MB"), 3))
    for arguments, width in cases:
        assert call(str(run), "--export", str(folder), *arguments)[0] == 0
        text = (folder / "results.tex").read_text()
        head = [title.strip() for title in text.splitlines()[2].removesuffix("\\\\").split("&")]
        assert len(head) == width
        assert head[0] == "method"
        assert re.search(r"tabular\}\{l(r+)\}", text)[1] == "r" * (width - 1)  # type: ignore[index]
    assert head == ["method", "seconds", "up MB"]
    assert "best personalized %" in (folder / "results.csv").read_text(), "the other formats have all columns"
    for arguments, words in {
        ("--columns", "seconds"): "no effect without --export",
        ("--export", "x", "--columns", "second"): "did you mean 'seconds'",
        ("--export", "x", "--columns", "seconds,seconds"): "only once",
    }.items():
        with pytest.raises(TDPFedError, match=words):
            call(str(run), *arguments)
    assert not Path("x").exists()


def test_a_figure_ends_below_what_diverges(tmp_path: Path) -> None:
    paths = [folders.make(tmp_path / name, f"algorithm.name={name}", rounds=5) for name in ("fedavg", "ditto", "apfl")]
    lines = [json.loads(line) for line in (paths[0] / "metrics.jsonl").read_text().splitlines()]
    grown = [{**line, "minibatch_loss": 10.0 ** line["round"]} for line in lines]
    (paths[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in grown))
    drawn: dict[str, Any] = {}
    figures.draw(write_page(paths, tmp_path / "page.html").groups, drawn.__setitem__)
    axes = drawn["loss-minibatch-rounds"].axes[0]
    assert 1.5 < axes.get_ylim()[1] < 2.5
    assert "FedAvg (up to 1e+05)" in axes.get_title("right")


def test_data_sets_are_exported_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(figures, "draw", lambda groups, save: drawn.append([group.label for group in groups]))
    paths = [folders.make(tmp_path / "a"), folders.make(tmp_path / "b", "data.name=mnist", "algorithm.name=fedavg")]
    export(write_page(paths, tmp_path / "page.html").groups, tmp_path / "figures")
    assert drawn == [["TDPFed"], ["FedAvg"]]


def test_only_a_page_that_is_kept_up_to_date_reloads_itself(tmp_path: Path) -> None:
    going, ended = folders.make(tmp_path / "going", status=None), folders.make(tmp_path / "ended")
    assert data_of(write_page([going]).page)["live"] == 0
    assert data_of(write_page([going], reload_every=5.0).page)["live"] == 5
    assert data_of(write_page([ended], reload_every=5.0).page)["live"] == 0


def test_following_writes_the_page_with_every_change_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folders.make(tmp_path / "run", rounds=2, status=None)
    records = [folders.record(t) for t in range(1, 5)]
    writer = RunFolder(path)
    steps = [
        lambda: writer.append(records[2]),
        lambda: None,
        lambda: writer.append(records[3]),
        lambda: writer.finish(folders.summary(records)),
    ]
    monkeypatch.setattr(time, "sleep", lambda _: steps.pop(0)())
    seen: list[tuple[int, float]] = []

    def on_page(report: Report) -> None:
        data = data_of(report.page)
        seen.append((data["runs"][0]["rounds"], data["live"]))

    last = follow([path], None, on_page)
    assert seen == [(2, 5), (3, 5), (4, 5), (4, 0)]
    assert not last.unfinished


def test_a_folder_of_runs_stands_for_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = tmp_path / "grid"
    paths = [folders.make(grid / f"tdpfed-seed{s}", seed=s) for s in (10, 9, 1)]
    for path in paths:  # begun at the same time: then by name
        os.utime(path / "config.toml", (1e9, 1e9))
    first = folders.make(grid / "zero", "algorithm.name=fedavg")
    os.utime(first / "config.toml", (1e8, 1e8))
    (grid / "table.md").write_text("")
    (grid / "figures").mkdir()
    other = folders.make(tmp_path / "other", "algorithm.name=local")
    monkeypatch.chdir(tmp_path)
    assert call("grid") == (0, "grid/report.html\n", "")
    names = [run["name"] for run in data_of(grid / "report.html")["runs"]]
    assert names == ["zero", "tdpfed-seed1", "tdpfed-seed9", "tdpfed-seed10"]
    assert call("grid", str(other)) == (0, "report.html\n", "")
    assert len(data_of(tmp_path / "report.html")["runs"]) == 5
    assert "tdpfed-seed9: given more than once" in call("grid", str(paths[1]))[2]


def test_a_folder_of_runs_is_followed_to_runs_that_begin_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.make(tmp_path / "grid" / "a")  # finished, and no other begun yet
    steps = [lambda: folders.make(tmp_path / "grid" / "b", seed=1, rounds=2, status=None)]

    def sleep(_: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop()()

    monkeypatch.setattr(time, "sleep", sleep)
    seen: list[tuple[int, float]] = []

    def on_page(report: Report) -> None:
        data = data_of(report.page)
        seen.append((len(data["runs"]), data["live"]))

    follow([tmp_path / "grid"], None, on_page)
    assert seen == [(1, 5), (2, 5)]
    assert data_of(tmp_path / "grid" / "report.html")["live"] == 0


def test_following_that_is_broken_off_leaves_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = folders.make(tmp_path / "run", rounds=2, status=None)

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    status, out, err = call(str(path), "--watch")
    assert (status, out) == (0, f"{path / 'report.html'}\n")
    assert err.count("Ctrl-C") == 1
    assert data_of(path / "report.html")["live"] == 0


def test_a_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    report = write_page([folders.make(tmp_path / "run")])
    head = render(report.groups, []).partition('<script id="data"')[0]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', head)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert re.search(r"\b(src|href)=\"(?!data:)", head) is None
