"""What a method cannot do is refused on the command line: field, value, what is allowed, status 2, nothing written."""

import sys
from pathlib import Path

import pytest

from tdpfed.cli import main

BAD = {
    "no such layer": ("fedper", "algorithm.personal=['head*']", ["algorithm.personal: ", "'head*'", "fc1.weight"]),
    "every layer": ("fedrep", "algorithm.personal=['*']", ["algorithm.personal: ", "['*']", "must remain"]),
    "nothing personal": ("fedbabu", "algorithm.personal=[]", ["algorithm.personal: [] given, must be at least one"]),
    "alpha": ("apfl", "algorithm.alpha=1.5", ["algorithm.alpha: 1.5 given, must be", "at least 0 and at most 1"]),
    "lambda": ("ditto", "algorithm.lam=-1", ["algorithm.lam: -1 given, must be", "at least 0"]),
    "mu": ("fedprox", "algorithm.mu=-0.1", ["algorithm.mu: -0.1 given, must be", "at least 0"]),
    "a mixture": ("mapper", "algorithm.mixes=[0.5, 2]", ["algorithm.mixes: [0.5, 2] given, must be"]),
    "clusters": ("hypcluster", "algorithm.clusters=7", ["algorithm.clusters: 7 given, must be at most 6"]),
    "another model": ("mocha", "model.name=dnn", ["algorithm.name: 'mocha' given, must be", "'logistic'"]),
    "public samples": ("dapper", "algorithm.public=100000", ["algorithm.public: 100000 given, must be at most"]),
    "no sample left": ("fedavg", "data.max_samples=2", ["data.validation: 0.3 given, must be 0, or with at least 2"]),
    "all held out": ("fedavg", "data.validation=1", ["data.validation: 1 given, must be", "below 1"]),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, setting, words = BAD[case]
    given = ["data.clients=6", "data.max_samples=60", "data.validation=0.3", f"algorithm.name={name}", setting]
    sets = [part for text in given for part in ("--set", text)]
    monkeypatch.setattr("sys.argv", ["tdpfed", "run", "digits", *sets, "--out", str(tmp_path / "run")])
    monkeypatch.setattr("sys.path", sys.path[:])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert all(word in error for word in words), error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
