"""Numbers between markers: each is what its key says, an edited one is found, and what cannot work is an error."""

import gzip
import json
from pathlib import Path

import figures
import pytest
from figures import filled, value_of
from sources import FigureError, Sources

ROOT = Path(__file__).parents[1]


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """A small study of the paper's kind, one of rows and columns, a benchmark, and packed runs of two seeds."""
    line = {"run": "x2", "ours": {"mean": 98.904, "sd": 0.15}, "late": {"mean": 90.0, "sd": None}}
    cell = {"personalized_accuracy": {"mean": 93.95, "sd": None}}

    def sent(bytes_: float) -> dict[str, object]:
        return {"uplink_bytes": {"mean": bytes_, "spread": None}}

    files = {
        "results/paper/results.json": {"tables": {"1": [], "2": [line]}, "provenance": {"seconds": {"x2": [1.0, 2.0]}}},
        "results/cells/results.json": {"rows": {"s = 2": {"a, b": cell}}},
        "results/methods/results.json": {"methods": [{"algorithm": "local", "personalized_accuracy": 0.5}]},
        "results/settings/results.json": {"settings": {"few": {"ours": sent(2e6), "theirs": sent(7e6)}}},
        "benchmarks/results/demo.json": {"share": 0.053, "cases": [{"bytes": 1234567}]},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    curves = {seed: {10: 0.10 + seed, 30: 0.30 + seed, 20: 0.20 + seed} for seed in (0, 0.02)}
    runs = [
        {"name": f"run-seed{n}", "records": [{"round": r, "personalized_accuracy": a} for r, a in curve.items()]}
        for n, curve in enumerate(curves.values())
    ]
    with gzip.open(tmp_path / "results/paper/runs.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(run) + "\n" for run in runs))
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("paper/x2/ours", "98.90 ± 0.15"),
        ("paper/x2/ours/mean:1", "98.9"),
        ("paper/x2/late", "90.00"),
        ("paper/x2/ours/mean - paper/x2/late/mean:3", "8.904"),
        ("paper/x2/seconds:1", "1.5"),
        ("cells/s = 2/a, b/personalized_accuracy", "93.95"),
        ("methods/local/personalized_accuracy:0", "50"),
        ("demo/cases/0/bytes:0", "1,234,567"),
        ("percent/demo/share:1", "5.3"),
        ("megabytes/settings/few/ours/uplink_bytes:1", "2.0"),
        ("smaller/few/ours/theirs:1", "3.5"),
        ("curve/paper/run/at", "21.00 ± 1.41"),
        ("curve/paper/run/best/mean:0", "31"),
        ("curve/paper/run/at/10", "11.00 ± 1.41"),
        ("curve/paper/run-seed1/late", "22.00"),
    ],
)
def test_a_key_is_looked_up_and_rounded(key: str, text: str, sources: Sources) -> None:
    assert value_of(key, sources) == text


@pytest.mark.parametrize(
    "key",
    ["nothing/x2", "paper/x3/ours", "paper/x2/ours/median", "paper/x2", "curve/paper/walk/at", "curve/paper/run/at/15",
     "curve/paper/run/worst", "demo/cases/7/bytes", "paper/x2/ours:many", "paper", "turns/nobody/plain loop"],
)  # fmt: skip
def test_an_unknown_key_is_an_error(key: str, sources: Sources) -> None:
    with pytest.raises(FigureError):
        value_of(key, sources)


def test_what_is_current_stays_and_what_is_edited_is_renewed(sources: Sources) -> None:
    page = "It has <!--=paper/x2/ours-->98.90 ±\n0.15<!--/--> % and <!--=paper/x2/late-->90.00<!--/--> %.\n"
    assert filled(page, sources) == page
    assert filled(page.replace("90.00", "91.00"), sources) == page


@pytest.mark.parametrize(
    "page",
    [
        "It has <!--=paper/x2/ours-->98.90 %.",
        "It has <!--=paper/x2/ours-->98.90 <!--=paper/x2/late-->90<!--/-->.",
        "It has 98.90<!--/--> %.",
        "It has\n  <!--=paper/x2/ours-->98.90<!--/--> %.",
    ],
)
def test_a_marker_that_cannot_work_is_an_error(page: str, sources: Sources) -> None:
    with pytest.raises(FigureError):
        filled(page, sources)


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="a source distribution has no results")
@pytest.mark.parametrize("page", [page for page in figures.pages(ROOT) if "<!--=" in page.read_text(encoding="utf-8")])
def test_every_number_between_markers_is_checked(page: Path) -> None:
    """Whatever stands between markers, the generator restores the page; so none of them is passed over."""
    text, sources = page.read_text(encoding="utf-8"), Sources(ROOT)
    edited = figures.MARK.sub(lambda found: f"<!--={found[1]}-->0<!--/-->", text)
    assert filled(edited, sources).split() == text.split()
