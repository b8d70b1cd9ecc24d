"""Configuration: presets, files, overrides, and one clear line for everything that is wrong."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tdpfed import FedAvg, PFedMe, TDPFed
from tdpfed.algorithms import ALGORITHMS
from tdpfed.config import Config, load_config, parse_config, presets, to_toml
from tdpfed.core.setting import plain
from tdpfed.errors import CombinedError, TDPFedError


def again(config: Config) -> Config:
    return parse_config(tomllib.loads(to_toml(config)))


@pytest.mark.parametrize("preset", presets())
def test_every_preset_is_valid_and_survives_toml(preset: str) -> None:
    config = load_config(preset)
    assert config.algorithm["name"] == ("fedavg" if preset.startswith("shakespeare") else "tdpfed")
    assert again(config) == config
    assert again(config).make_algorithm() == config.make_algorithm()


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_serves_every_algorithm(preset: str, name: str) -> None:
    config = load_config(preset, [f"algorithm.name={name}"])
    algorithm = config.make_algorithm()
    assert type(algorithm) is ALGORITHMS[name]
    usual = load_config(preset).make_algorithm()
    lengths = [one.tau if one.epochs is None else one.epochs for one in (algorithm, usual)]
    assert lengths[0] == lengths[1], "methods are compared at equal local work"
    assert again(config) == config


def test_the_presets_of_the_issue() -> None:
    assert {"digits", "mnist-paper", "cifar10-paper", "qmnist-writers", "robust-recommended", "fashion-mnist",
            "shakespeare", "shakespeare-transformer"} <= set(presets())  # fmt: skip
    assert load_config() == load_config("digits")


def test_the_papers_settings() -> None:
    mnist, cifar = load_config("mnist-paper"), load_config("cifar10-paper")
    assert (mnist.run.rounds, mnist.data.clients, mnist.data.per_client, mnist.model.name) == (800, 20, 2, "dnn")
    assert (cifar.run.rounds, cifar.data.clients, cifar.data.per_client, cifar.model.name) == (800, 10, 2, "vgg8")
    keys = ("batch_size", "tau", "lam", "beta", "s", "s_prime", "eta", "eta_p")
    assert [mnist.algorithm[key] for key in keys] == [20, 23, 12, 1, 5, 17, 8e-4, 0.08]
    assert [cifar.algorithm[key] for key in keys] == [20, 25, 14, 1, 4, 15, 4e-5, 0.03]
    assert mnist.participation.train == cifar.participation.train == "all"
    short = load_config("mnist").as_dict()
    assert short == {**mnist.as_dict(), "run": {**plain(mnist.run), "rounds": 60, "evaluate_every": 2}}


def test_an_override_takes_a_value_back() -> None:
    given, back = load_config("digits"), load_config("digits", ["data.max_samples=", "data.per_client = "])
    assert given.data.max_samples == 50
    assert (back.data.max_samples, back.data.per_client) == (None, load_config("mnist").data.per_client)
    assert load_config("digits", ["privacy.noise=", "no.such.key="]) == given


def test_overrides() -> None:
    config = load_config(
        "digits",
        [
            "run.rounds=7", "algorithm.lam = 3.5", "algorithm.exclude=['fc2.*']", 'data.name="my data.npz"',
            "algorithm.ranks={'fc1.*' = 8}", "algorithm.keep_theta=true", "participation.clients=3", "run.chunk=2",
            "data.options.alpha=0.5", "model.name=lenet", "run.rounds=8",
        ],
    )  # fmt: skip
    assert (config.run.rounds, config.run.chunk, config.participation.clients) == (8, 2, 3)  # the later one counts
    assert (config.data.name, config.data.options, config.model.name) == ("my data.npz", {"alpha": 0.5}, "lenet")
    algorithm = config.make_algorithm()
    assert isinstance(algorithm, TDPFed)
    assert (algorithm.lam, algorithm.exclude, algorithm.ranks) == (3.5, ("fc2.*",), {"fc1.*": 8})
    assert algorithm.keep_theta is True
    assert again(config) == config


def test_values_with_equals_signs_and_bare_words() -> None:
    config = load_config("digits", ["data.name=a=b.npz", "run.runner=loop", "model.name= pack.mod:make "])
    assert (config.data.name, config.run.runner, config.model.name) == ("a=b.npz", "loop", "pack.mod:make")


def test_a_table_for_each_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        "[algorithm]\nname = 'pfedme'\nlam = 9\n[algorithms.pfedme]\nlam = 3\ntau = 4\n[algorithms.fedavg]\ntau = 5\n"
    )
    config = load_config(str(file))
    algorithm = config.make_algorithm()
    assert isinstance(algorithm, PFedMe)
    assert (algorithm.lam, algorithm.tau, algorithm.s) == (
        9,
        4,
        5,
    )  # the chosen table, over the method's own, over defaults
    assert "algorithms" not in to_toml(config)
    other = load_config(str(file), ["algorithm={name = 'fedavg'}", "algorithms.fedavg.eta=0.2"][1:])
    assert other.algorithm["name"] == "pfedme"
    file.write_text("[algorithms.fedavg]\ntau = 5\n")
    chosen = load_config(str(file), ["algorithm.name=fedavg", "algorithms.fedavg.eta=0.2"]).make_algorithm()
    assert isinstance(chosen, FedAvg)
    assert (chosen.tau, chosen.eta) == (5, 0.2)
    assert load_config(str(file)).make_algorithm() == TDPFed()


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("")
    config = load_config(str(file))
    assert config.make_algorithm() == TDPFed()
    assert config.run.rounds == 50
    assert (config.data.name, config.model.name) == ("digits", "dnn")


BAD = {
    "unknown preset": ("digts", [], ["preset", "'digts'", "did you mean 'digits'"]),
    "unknown preset, nothing near": ("zzz", [], ["preset", "'zzz'", "mnist-paper", ".toml"]),
    "missing file": ("/no/such/file.toml", [], ["'/no/such/file.toml'", "No such file"]),
    "unknown section": ("digits", ["rum.rounds=3"], ["'rum'", "did you mean 'run'"]),
    "unknown key": ("digits", ["run.round=3"], ["run", "'round'", "did you mean 'rounds'"]),
    "unknown key of data": ("digits", ["data.client=3"], ["data", "'client'", "did you mean 'clients'"]),
    "unknown algorithm": ("digits", ["algorithm.name=fedavgg"], ["algorithm.name", "'fedavgg'", "did you mean"]),
    "algorithm is a number": ("digits", ["algorithm.name=3"], ["algorithm.name", "3", "tdpfed"]),
    "unknown hyper-parameter": ("digits", ["algorithm.lambda=3"], ["algorithm", "'lambda'", "Allowed", "lam"]),
    "another method's": ("digits", ["algorithm.name=fedavg", "algorithm.lam=3"], ["algorithm", "'lam'", "eta"]),
    "unknown table": ("digits", ["algorithms.fedavgg.tau=3"], ["algorithms", "'fedavgg'", "did you mean"]),
    "bad key in a table not chosen": ("digits", ["algorithms.pfedme.tao=3"], ["algorithms.pfedme", "'tao'", "'tau'"]),
    "a table that is none": ("digits", ["algorithms.pfedme=3"], ["algorithms.pfedme", "3"]),
    "rounds zero": ("digits", ["run.rounds=0"], ["run.rounds", "0", "at least 1"]),
    "rounds no number": ("digits", ["run.rounds=many"], ["run.rounds", "'many'", "whole number"]),
    "rounds a fraction": ("digits", ["run.rounds=1.5"], ["run.rounds", "1.5", "whole number"]),
    "seed negative": ("digits", ["run.seed=-1"], ["run.seed", "-1"]),
    "runner": ("digits", ["run.runner=fast"], ["run.runner", "'fast'", "'batched' or 'loop'"]),
    "chunk": ("digits", ["run.chunk=0"], ["run.chunk", "0", "'auto'"]),
    "threads": ("digits", ["run.threads=100000"], ["run.threads", "100000", "1,024", "'auto'"]),
    "device": ("digits", ["run.device=tpu"], ["run.device", "'tpu'", "'cuda'"]),
    "lambda": ("digits", ["algorithm.lam=-1"], ["algorithm.lam", "-1", "at least 0"]),
    "rate": ("digits", ["algorithm.eta=0"], ["algorithm.eta", "0", "above 0"]),
    "rate nan": ("digits", ["algorithm.eta=nan"], ["algorithm.eta", "nan", "finite"]),
    "personal rate": ("digits", ["algorithm.eta_p=-0.1"], ["algorithm.eta_p", "-0.1", "above 0"]),
    "tau": ("digits", ["algorithm.tau=0"], ["algorithm.tau", "0", "at least 1"]),
    "tau a word": ("digits", ["algorithm.tau=lots"], ["algorithm.tau", "'lots'", "whole number"]),
    "batch": ("digits", ["algorithm.batch_size=0"], ["algorithm.batch_size", "0", "at least 1"]),
    "optimizer": ("digits", ["algorithm.optimizer=sgd"], ["algorithm.optimizer", "'sgd'", "'adam'"]),
    "near": ("digits", ["data.partition=classes-in-trun"], ["must be 'iid'", "; did you mean 'classes-in-turn'?"]),
    "compression": ("digits", ["algorithm.compression=0"], ["algorithm.compression", "0", "above 0"]),
    "exclude a number": ("digits", ["algorithm.exclude=3"], ["algorithm.exclude", "3"]),
    "als alternating": (
        "digits", ["algorithm.optimizer=als", "algorithm.factor_steps=alternating"], ["algorithm.factor_steps"],
    ),
    "partition": ("digits", ["data.partition=random"], ["data.partition", "'random'", "'dirichlet'"]),
    "test fraction": ("digits", ["data.test_fraction=1"], ["data.test_fraction", "1", "below 1"]),
    "dropout": ("digits", ["participation.dropout=1"], ["participation.dropout", "1", "below 1"]),
    "no participants": ("digits", ["participation.clients=0"], ["participation.clients", "0"]),
    "section is a value": ("digits", ["run=3"], ["--set", "'run=3'", "section.key=value"]),
    "no value": ("digits", ["run.rounds"], ["--set", "'run.rounds'", "section.key=value"]),
    "no key": ("digits", ["run.=3"], ["--set", "'run.=3'", "section.key=value"]),
    "below a value": ("digits", ["run.rounds.more=3"], ["--set", "'run.rounds.more'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told(case: str) -> None:
    source, overrides, words = BAD[case]
    with pytest.raises(TDPFedError) as error:
        load_config(source, overrides)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[run\n", ["valid TOML", "line 1"]),
        (b"\xff\xfe", ["valid TOML"]),
        (b"run = 3\n", ["run: 3 given"]),
        (b"algorithm = 3\n", ["algorithm: 3 given", "table"]),
        (b"algorithms = [1]\n", ["algorithms: [1] given", "tables"]),
        (b"rounds = 3\n", ["'rounds'", "Allowed", "run"]),
    ],
)
def test_bad_files(content: bytes, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(TDPFedError) as error:
        load_config(str(file))
    assert all(word in str(error.value) for word in words), str(error.value)
    with pytest.raises(TDPFedError, match="cannot read"):
        load_config(str(tmp_path / "missing.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(TDPFedError, match="cannot read"):
        load_config(str(tmp_path / "folder.toml"))


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TDPFedError, match=r"run\.device: 'cuda' given"):
        load_config("digits", ["run.device=cuda"]).device()
    assert load_config("digits").device().type == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert load_config("digits").device().type == "cuda"
    assert load_config("digits", ["run.device=cpu"]).device().type == "cpu"


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@example('a\x7f"\\\n\U0001f600', 1.0, 0, ["\x00"])
@given(TEXT, st.floats(1e-37, 1e38), st.integers(0, 2**63 - 1), st.lists(TEXT, max_size=3))
def test_toml_keeps_every_value(name: str, lam: float, seed: int, patterns: list[str]) -> None:
    values: dict[str, Any] = {
        "run": {"seed": seed}, "data": {"name": name, "options": {name: [lam, True]}},
        "algorithm": {"lam": lam, "exclude": patterns, "ranks": {name: 3}},
    }  # fmt: skip
    config = parse_config(values)
    assert (config.data.name, config.algorithm["lam"], config.run.seed) == (name, lam, seed)
    assert again(config) == config


def test_another_data_set_does_not_inherit_what_a_preset_says_of_its_own(tmp_path: Path) -> None:
    assert load_config("digits").data.clients == 20
    assert load_config("digits", ["data.name=mnist"]).data.clients is None
    assert load_config("digits", ["data.name=mnist", "data.clients=7"]).data.clients == 7
    assert load_config("digits", ["data.name=digits"]).data.clients == 20
    usual = load_config("mnist").data.per_client
    assert load_config("digits").data.per_client == 5 != usual
    assert load_config("digits", ["data.partition=dirichlet"]).data.per_client == usual
    assert load_config("digits", ["data.partition=classes", "data.per_client=3"]).data.per_client == 3
    own = tmp_path / "own.toml"
    own.write_text('[data]\nname = "mnist"\nclients = 5\n')
    assert load_config(str(own), ["data.name=digits"]).data.clients == 5


@pytest.mark.parametrize(
    "override", ["run.rounds=true", "run.rounds='5'", "algorithm.keep_theta=yes", "algorithm.tau=1.5"]
)
def test_types_are_strict(override: str) -> None:
    with pytest.raises(TDPFedError, match=override.partition("=")[0]):
        load_config("digits", [override])


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        "[run]\nrounds = 0\nsed = 3\n[data]\nalpha = 'x'\nclients = 0\n[nothing]\n[robust]\nclip = 'x'\n"
        "[algorithm]\nname = 'pfedme'\ntau = 0\neta = -1.0\n[algorithms.fedavg]\ntao = 3\n[algorithms.fedvg]\n"
    )
    with pytest.raises(CombinedError) as error:
        load_config(str(file))
    keys = {line.partition(":")[0] for line in error.value.lines}
    assert keys == {
        "run.rounds", "run", "data.alpha", "data.clients", "section", "robust.clip", "algorithm.tau", "algorithm.eta",
        "algorithms.fedavg", "algorithms",
    }  # fmt: skip
    assert len(error.value.lines) == len(keys)
    assert str(error.value) == "; ".join(error.value.lines)
    assert next(line for line in error.value.lines if line.startswith("robust.clip")).count(" or ") == 1


def test_wrong_types_of_hyper_parameters_and_overrides_are_told_at_once() -> None:
    with pytest.raises(CombinedError) as error:
        load_config("digits", ["algorithm.tau=1.5", "algorithm.lamb=1", "run.rounds=0", "wire.codec=int9"])
    assert [line.partition(":")[0] for line in error.value.lines] == [
        "algorithm.tau", "algorithm", "run.rounds", "wire.codec",
    ]  # fmt: skip
    with pytest.raises(CombinedError) as error:
        load_config("digits", ["rounds=1", "run.rounds=2", "run.=3"])
    assert ["'rounds=1'" in line or "'run.=3'" in line for line in error.value.lines] == [True, True]


def test_an_unknown_method_does_not_hide_the_rest() -> None:
    with pytest.raises(CombinedError, match="did you mean 'fedavg'") as error:
        load_config("digits", ["algorithm.name=fedvg", "run.rounds=0"])
    assert len(error.value.lines) == 2
