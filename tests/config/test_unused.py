"""Settings without effect are said, those with one are not."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tdpfed.algorithms import ALGORITHMS
from tdpfed.cli import app
from tdpfed.config import load_config, presets, to_toml
from tdpfed.config.unused import advice
from tdpfed.core.layout import Layout
from tdpfed.models import build

LAYOUT = Layout.of(build("dnn", (1, 8, 8), 10))


LINEAR = Layout.of(build("logistic", (64,), 10))


def said(*settings: str, source: str = "digits", layout: Layout = LAYOUT) -> list[str]:
    config = load_config(source, list(settings))
    return advice(config, config.make_algorithm().bind(layout, 20))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["data.alpha=0.1"], "data.alpha: 0.1 given"),
        (["data.alpha=0.5"], "data.alpha: 0.5 given"),
        (["data.alpha=0.1", "data.partition=iid"], "data.alpha"),
        (["data.per_client=3", "data.partition=iid"], "data.per_client"),
        (["data.per_client=3", "data.partition=natural"], "data.per_client: 3 given"),
        (["data.size_skew=1.0", "data.partition=dirichlet"], "data.size_skew"),
        (["robust.fraction=0.1"], "robust.fraction"),
        (["robust.byzantine=2", "robust.name=median"], "robust.byzantine"),
        (["robust.keep=2", "robust.name=krum"], "robust.keep"),
        (["robust.attack_fraction=0.5"], "robust.attack_fraction"),
        (["robust.attack_strength=2.0"], "robust.attack_strength"),
        (["privacy.delta=1e-6"], "privacy.delta"),
        (["wire.codec=int8", "algorithm.name=local"], "wire.codec: 'int8' given"),
        (["wire.update=factors", "algorithm.name=local"], "wire.update: 'factors' given"),
        (["wire.feedback=true", "algorithm.name=local"], "wire.feedback: True given"),
        (["wire.down=factors", "algorithm.name=local"], "wire.down: 'factors' given"),
        (["wire.terms=2"], "wire.terms: 2 given"),
        (["wire.terms=2", "wire.update=top-k", "algorithm.name=fedavg"], "wire.terms: 2 given"),
        (["wire.terms=2", "wire.down=factors", "algorithm.name=fedavg"], "wire.terms: 2 given"),
        (["wire.compression=4.0", "wire.codec=int8"], "wire.compression: 4.0 given"),
        (["wire.sweeps=3"], "wire.sweeps: 3 given"),
        (["wire.sweeps=2"], "wire.sweeps: 2 given"),
        (["wire.kernels=tensor", "wire.update=top-k"], "wire.kernels: 'tensor' given"),
        (["wire.share=0.1"], "wire.share: 0.1 given"),
        (["wire.share=0.1", "wire.update=factors", "algorithm.name=fedavg"], "wire.share"),
        (["wire.down_terms=2", "wire.update=factors", "algorithm.name=fedavg"], "wire.down_terms: 2 given"),
        (["wire.down_codec=int4"], "wire.down_codec: 'int4' given"),
        (["server.rate=0.5"], "server.rate: 0.5 given"),
        (["server.momentum=0.5"], "server.momentum: 0.5 given"),
        (["server.decay=0.5", "server.optimizer=sgd", "server.momentum=0.9"], "server.decay: 0.5 given"),
        (["server.floor=0.5"], "server.floor: 0.5 given"),
        (["robust.name=median", "algorithm.name=local"], "robust.name"),
        (["robust.clip=1.0", "algorithm.name=local"], "robust.clip"),
        (["robust.gauge=1.0", "algorithm.name=fedavg"], "robust.gauge"),
        (["robust.norms=median", "algorithm.name=fedavg"], "robust.norms"),
        (["robust.bound=20.0", "privacy.clip=1.0", "privacy.noise=1.0"], "robust.bound"),
        (["robust.weight_cap=2.0", "algorithm.weights=uniform"], "robust.weight_cap"),
        (["robust.attack=zeros", "robust.attack_strength=2.0"], "robust.attack_strength"),
        (["algorithm.compression=1000"], "algorithm.compression: 1000 given, 19.6 reached"),
        (["algorithm.compression=0.5"], "algorithm.compression: 0.5 given, 1 reached"),
        (["algorithm.name=fedavg_sar", "algorithm.compression=1e6"], "algorithm.compression"),
    ],
)
def test_settings_without_effect_are_reported(settings: list[str], key: str) -> None:
    (line,) = said(*settings)
    assert line.startswith(key), line


@pytest.mark.parametrize(
    "settings",
    [
        ["data.alpha=0.1", "data.partition=dirichlet"],
        ["data.per_client=3"],
        ["data.per_client=3", "data.size_skew=1.0", "data.partition=classes-in-turn"],
        ["data.partition=dirichlet"],
        ["robust.name=trimmed-mean", "robust.fraction=0.1"],
        ["robust.name=multi-krum", "robust.keep=2", "robust.byzantine=2"],
        ["robust.attack=noise", "robust.attack_fraction=0.5", "robust.attack_strength=2.0"],
        ["privacy.clip=1.0", "privacy.noise=1.0", "privacy.delta=1e-6"],
        ["wire.codec=int8"],
        ["wire.codec=int4", "wire.feedback=true"],
        ["wire.update=factors", "wire.terms=2", "wire.sweeps=3", "wire.kernels=tensor", "algorithm.name=fedavg"],
        ["wire.update=factors", "wire.compression=4.0", "wire.feedback=false", "algorithm.name=fedavg"],
        ["wire.down=factors", "wire.down_terms=2", "wire.down_codec=int4", "wire.sweeps=3", "algorithm.name=fedavg"],
        ["wire.update=top-k", "wire.share=0.1"],
        ["server.optimizer=sgd", "server.rate=0.5", "server.momentum=0.5"],
        ["server.optimizer=yogi", "server.rate=0.5", "server.momentum=0.5", "server.decay=0.5", "server.floor=0.5"],
        *(["algorithm.name=tdpfed", f"algorithm.compression={rate}"] for rate in (1, 1.5, 2, 4, 8)),
        ["algorithm.compression=1000", "algorithm.exclude=['fc2*']"],
        ["algorithm.name=fedavg_sar", "algorithm.compression=32"],
    ],
)
def test_settings_with_an_effect_are_not(settings: list[str]) -> None:
    assert said(*settings) == []


FACTORS_ONLY = {"robust.gauge", "robust.norms"}
"""What a preset for all methods sets and only CP factors need."""


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("name", ALGORITHMS)
def test_presets_and_their_resolved_files_are_not_warned_of(preset: str, name: str, tmp_path: Path) -> None:
    layout = LINEAR if name == "mocha" else LAYOUT
    expected = FACTORS_ONLY if preset == "robust-recommended" and name != "tdpfed" else set[str]()
    if expected and name == "local":
        expected = expected | {"robust.name"}
    told = said(f"algorithm.name={name}", source=preset, layout=layout)
    assert {text.partition(":")[0] for text in told} == expected
    file = tmp_path / "config.toml"
    file.write_text(to_toml(load_config(preset, [f"algorithm.name={name}"])))
    assert said(source=str(file), layout=layout) == told


def test_a_run_says_it_before_it_starts_and_a_comparison_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("run.rounds=1", "data.clients=5", "algorithm.tau=1", "wire.codec=int8")
    options = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner().invoke(app, ["run", *options, "--set", "algorithm.name=local", "--out", "run", "--json"])
    assert done.exit_code == 0
    assert done.stderr.count("warning: wire.codec: 'int8' given") == 1
    assert CliRunner().invoke(app, ["run", "--resume", "run", "--json"]).stderr == ""
    many = CliRunner().invoke(app, ["compare", "--algorithms", "fedavg,local", "--seeds", "2", *options])
    assert many.exit_code == 0
    assert many.stderr.count("wire.codec") == 1
    assert "warning: local-seed0: wire.codec" in many.stderr
