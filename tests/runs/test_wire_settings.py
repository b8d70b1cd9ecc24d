"""The wire and the server's optimizer from the command line: bad input, and runs that are resumed to the bit."""

import sys
from pathlib import Path

import pytest
import torch

import small
from tdpfed import cli
from tdpfed.core.state import WIRE
from tdpfed.runs.checkpoints import Checkpoints, Snapshot

TINY = [
    "run.rounds=6", "data.clients=5", "data.max_samples=40", "algorithm.tau=2", "data.per_client=5",
    "participation.clients=3", "participation.dropout=0.2", "checkpoint.every=2",
]  # fmt: skip
FEDAVG = "algorithm.name=fedavg"
FACTORS, DOWN = "wire.update=factors", "wire.down=factors"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the console script's function in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["tdpfed", *arguments])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def options(*settings: str) -> list[str]:
    return [part for setting in (*TINY, *settings) for part in ("--set", setting)]


BAD: dict[str, tuple[list[str], list[str]]] = {
    "no terms": (["wire.terms=0", FACTORS, FEDAVG], ["wire.terms: 0 given", "at least 1"]),
    "terms below": (["wire.terms=-2", FACTORS, FEDAVG], ["wire.terms: -2 given", "at least 1"]),
    "part of a term": (["wire.terms=1.5", FACTORS, FEDAVG], ["wire.terms: 1.5 given", "whole number"]),
    "terms above": (["wire.terms=65", FACTORS, FEDAVG], ["wire.terms: 65 given, must be at most 64"]),
    "terms down": (["wire.down_terms=65", DOWN, FEDAVG], ["wire.down_terms: 65 given, must be at most 64"]),
    "no terms down": (["wire.down_terms=0", DOWN, FEDAVG], ["wire.down_terms: 0 given", "at least 1"]),
    "compression 1": (["wire.compression=1", FACTORS, FEDAVG], ["wire.compression: 1 given", "above 1"]),
    "compression out of reach": (
        ["wire.compression=1e4", FACTORS, FEDAVG], ["wire.compression: 10000 given", "at most"],
    ),
    "both": (
        ["wire.compression=4", "wire.terms=2", FACTORS, FEDAVG], ["wire.compression: 4 given", "terms is 2", "one of"],
    ),
    "no share": (["wire.share=0", "wire.update=top-k"], ["wire.share: 0 given", "above 0 and at most 1"]),
    "more than all": (["wire.share=1.01", "wire.update=top-k"], ["wire.share: 1.01 given", "at most 1"]),
    "share nan": (["wire.share=nan", "wire.update=top-k"], ["wire.share: nan given"]),
    "no sweeps": (["wire.sweeps=0", FACTORS, FEDAVG], ["wire.sweeps: 0 given", "at least 1 and at most 100"]),
    "many sweeps": (["wire.sweeps=101", FACTORS, FEDAVG], ["wire.sweeps: 101 given", "at most 100"]),
    "4 bits of whole values": (
        ["wire.codec=int4", "wire.feedback=false"], ["wire.codec: 'int4' given", "feedback = true"],
    ),
    "update": (["wire.update=factor"], ["wire.update: 'factor' given", "did you mean 'factors'"]),
    "codec": (["wire.codec=int9"], ["wire.codec: 'int9' given", "did you mean 'int8'"]),
    "kernels": (["wire.kernels=tensors"], ["wire.kernels: 'tensors' given", "did you mean 'tensor'"]),
    "subsets": ([FACTORS, "algorithm.name=fedavg_sar"], ["wire.update: 'factors' given", "'fedavg_sar'"]),
    "top-k of subsets": (["wire.update=top-k", "algorithm.name=fedavg_sar"], ["wire.update", "'fedavg_sar'"]),
    "factors of factors": ([FACTORS], ["wire.update: 'factors' given, must be 'dense' or 'top-k'", "'tdpfed'"]),
    "down to each its own": ([DOWN, "algorithm.name=fedavg_sar"], ["wire.down: 'factors' given", "'dense'"]),
    "factors down": ([DOWN], ["wire.down: 'factors' given, must be 'dense'", "'tdpfed' sends CP factors"]),
    "no average, local": (
        ["server.optimizer=adam", "algorithm.name=local"],
        ["server.optimizer: 'adam' given, must be 'average'", "'local'"],
    ),
    "no average, act": (
        ["server.optimizer=sgd", "algorithm.aggregation=act"], ["server.optimizer: 'sgd' given, must be 'average'"],
    ),
    "optimizer": (["server.optimizer=adan"], ["server.optimizer: 'adan' given", "did you mean 'adam'"]),
    "rate": (["server.rate=0", "server.optimizer=sgd"], ["server.rate: 0 given", "above 0"]),
    "momentum": (["server.momentum=1", "server.optimizer=sgd"], ["server.momentum: 1 given", "below 1"]),
    "gauge": (
        [FACTORS, FEDAVG, "robust.attack=gauge"], ["robust.attack: 'gauge' given", "'fedavg' sends no CP factors"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_status_2_and_leaves_nothing(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, words = BAD[case]
    assert call(["run", *options(*settings), "--json"], monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err
    assert list(Path().iterdir()) == []


def test_errors_of_both_sections_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["wire.terms=0", "wire.share=2", "server.rate=-1", "server.optimizer=sdg"]
    assert call(["run", *options(*settings)], monkeypatch) == 2
    told = capsys.readouterr().err
    assert all(key in told for key in ("wire.terms", "wire.share", "server.rate", "server.optimizer"))


FORMS = {
    "factors both ways": [FEDAVG, FACTORS, "wire.terms=2", DOWN, "wire.down_terms=1"],
    "factors both ways, momentum": [FEDAVG, FACTORS, DOWN, "server.optimizer=sgd", "server.momentum=0.9"],
    "top-k, yogi": ["algorithm.name=pfedme", "wire.update=top-k", "server.optimizer=yogi", "server.rate=0.01"],
    "tdpfed in 4 bits": ["wire.codec=int4", "algorithm.s_prime=2"],
}


def result_of(folder: Path) -> tuple[list[dict[str, object]], Snapshot]:
    found = Checkpoints(folder / "checkpoints").load()
    assert found is not None
    assert found[1] == []
    return small.lines(folder / "metrics.jsonl", "seconds"), found[0]


def replaced(folder: Path, old: str, new: str) -> None:
    """Change a line of a run's configuration; the run counts as not finished."""
    config = folder / "config.toml"
    text = config.read_text()
    assert text.count(f"\n{old}\n") == 1
    config.write_text(text.replace(f"\n{old}\n", f"\n{new}\n"))
    (folder / "summary.json").unlink(missing_ok=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_is_resumed_equals_one_that_is_not_to_the_bit(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(["run", *options(*FORMS[form]), "--out", "whole", "--json"], monkeypatch) == 0
    assert call(["run", *options(*FORMS[form], "run.rounds=4"), "--out", "parted", "--json"], monkeypatch) == 0
    replaced(Path("parted"), "rounds = 4", "rounds = 6")
    assert call(["run", "--resume", "parted", "--json"], monkeypatch) == 0
    (lines, whole), (own_lines, parted) = result_of(Path("whole")), result_of(Path("parted"))
    assert own_lines == lines
    assert [line["round"] for line in lines] == [2, 4, 6]
    assert whole.round == parted.round == 6
    everybody = torch.arange(5)
    rows, own_rows = whole.private.rows(everybody), parted.private.rows(everybody)
    for left, right in ((whole.server, parted.server), (rows, own_rows)):
        assert left.keys() == right.keys()
        assert all(torch.equal(value, right[name]) for name, value in left.items())
    assert [name for name in rows if name.startswith(WIRE)]
    assert whole.meta["ledger"] == parted.meta["ledger"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('update = "factors"', 'update = "dense"', ["wire.terms", "given"]),
        ("sweeps = 2", "sweeps = 3", ["wire.sweeps: 3 given, must be 2"]),
        ('down = "factors"', 'down = "dense"', ["wire.down: 'dense' given, must be 'factors'"]),
        ('optimizer = "sgd"', 'optimizer = "average"', ["server.optimizer: 'average' given, must be 'sgd'"]),
        ("momentum = 0.9", "momentum = 0.5", ["server.momentum: 0.5 given, must be 0.9"]),
    ],
)
def test_a_run_folder_whose_form_was_changed_is_not_resumed(
    old: str, new: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [FEDAVG, FACTORS, "wire.terms=2", DOWN, "server.optimizer=sgd", "server.momentum=0.9"]
    assert call(["run", *options(*settings), "--out", "run", "--json"], monkeypatch) == 0
    before = (Path("run") / "metrics.jsonl").read_bytes()
    replaced(Path("run"), old, new)
    capsys.readouterr()
    assert call(["run", "--resume", "run", "--json"], monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("error: ")
    assert all(word in captured.err for word in words if "terms" not in word), captured.err
    assert (Path("run") / "metrics.jsonl").read_bytes() == before
