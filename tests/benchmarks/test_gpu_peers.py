"""The GPU benchmark on a CPU: its loops are the methods they claim to be, it resumes, and its page shows its record."""

import json
from dataclasses import replace
from pathlib import Path

import gpu_peers
import gpu_table
import pytest
import torch
from gpu_peers import ROWS, Loop, OneModule, Row

from tdpfed.models import MODELS

SMALL = Row("small", "lenet", (1, 8, 8), 3, 4, 2, classes=3)


@pytest.mark.parametrize("method", gpu_peers.METHODS)
@pytest.mark.parametrize("kind", [Loop, OneModule])
def test_a_loop_is_the_method(kind: type[Loop], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With minibatches that are all alike, a loop's round equals ours."""
    data = gpu_peers.federation(SMALL, torch.device("cpu"))
    first = data.train_start[:, None].expand(-1, 8)
    alike = replace(data, x=data.x[first].flatten(0, 1), y=data.y[first].flatten())
    for name, rate in (("ETA", 0.05), ("ETA_P", 0.03)):
        monkeypatch.setattr(gpu_peers, name, rate)
    made = kind(SMALL, method, alike)
    start = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    made.round()
    run = gpu_peers.ours(SMALL, method, alike, "float32")
    run()
    theirs = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    mine = run.__self__.global_model()  # type: ignore[attr-defined]
    assert float((theirs - start).norm()) > 1e-3
    torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-6)


def test_counts_by_hand() -> None:
    """A perceptron of one layer: 2 operations per weight and sample forward, and again for its gradient."""
    row = Row("one layer", "logistic", (1, 2, 5), 3, 4, 6, classes=7)
    data = gpu_peers.federation(row, torch.device("cpu"))
    assert gpu_peers.operations(row, "fedavg", data) == 3 * 4 * 6 * 2 * (2 * 10 * 7)
    assert gpu_peers.operations(row, "pfedme", data) == gpu_peers.S * gpu_peers.operations(row, "fedavg", data)
    activations = 6 * (10 + 7)  # flattened, and the layer's outputs
    assert gpu_peers.least_bytes(row, "fedavg") == 4 * 3 * 4 * (5 * 77 + 4 * activations)


def test_it_measures_resumes_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    options = ["--device", "cpu", "--tiny", "--precision", "float32", "--repeats", "1", "--out", str(out)]
    monkeypatch.delitem(gpu_peers.PEERS, "compiled")  # a compiler takes long
    gpu_peers.main([*options, "--only", "LeNet"])
    first = json.loads(out.read_text())
    assert [(row["row"], row["method"]) for row in first["rows"]] == [
        ("LeNet, 20 clients", "fedavg"), ("LeNet, 20 clients", "pfedme"),
    ]  # fmt: skip
    for row in first["rows"]:
        times = row["seconds"]
        assert times["graphed"] == {"error": "RuntimeError: needs a GPU"}
        assert row["ratios"]["plain"] == times["plain"]["median"] / times["ours"]["median"]
        assert row["floor_seconds"] == max(
            row["operations"] / row["operations_per_second"], row["bytes"] / row["bytes_per_second"]
        )
    table = gpu_table.table(first)
    assert len({line.count("|") for line in table}) == 1
    for row, line in zip(first["rows"], table[2:], strict=True):
        own, plain = (1000 * row["seconds"][name]["median"] for name in ("ours", "plain"))
        assert f"| {own:,.1f} | {plain:,.1f} ({plain / own:.1f}x) | - | - |" in line
    assert all(line in gpu_table.page(first) for line in table)
    capsys.readouterr()
    gpu_peers.main([*options, "--only", "LeNet"])
    assert json.loads(out.read_text()) == first
    assert capsys.readouterr().out == ""


def test_rows_are_models_of_the_package() -> None:
    assert {row.model for row in ROWS} <= set(MODELS)
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_peer_that_fails_is_reported() -> None:
    def fail() -> None:
        raise RuntimeError("no compiler")

    found = gpu_peers.turns({"ours": lambda: None, "compiled": fail}, torch.device("cpu"), 2, 10.0)
    assert found["compiled"] == {"error": "RuntimeError: no compiler"}
    assert found["ours"]["rounds"] == 2
