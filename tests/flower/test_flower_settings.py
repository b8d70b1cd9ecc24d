"""The configuration of a deployment: our keys through Flower's flat dict, and what is refused with a reason."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.common.config import flatten_dict
from torch import nn

import my_own_method
from tdpfed.config import flat
from tdpfed.core.setting import plain
from tdpfed.errors import CombinedError, TDPFedError
from tdpfed.flower import envelope
from tdpfed.flower.node import Node
from tdpfed.flower.settings import OWN_CODE, Flower, as_run_config, read_settings
from tdpfed.flower.task import client_id, data_of, objective_of
from tdpfed.wire import Rejected

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["mocha", "dapper"])
def test_a_method_that_needs_what_a_node_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(TDPFedError, match=f"algorithm.name: '{name}' given"):
        read_settings({"algorithm.name": name, "flower.out": "run", "flower.nodes": 3})


def test_flat_keys_are_those_of_the_simulator() -> None:
    config, flower = read_settings(
        {
            "run.rounds": 7,
            "algorithm.name": "tdpfed",
            "algorithms.tdpfed.tau": 5,
            "algorithms.fedavg.tau": 9,
            "algorithm.include": '["fc*"]',
            "algorithm.ranks": "{'fc1.weight' = 3}",
            "flower.nodes": 4,
        }
    )
    assert (config.run.rounds, config.algorithm["tau"], flower.nodes, config.data.name) == (7, 5, 4, "own data")
    assert (config.algorithm["include"], config.algorithm["ranks"]) == (("fc*",), {"fc1.weight": 3})
    assert read_settings({})[1] == Flower()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounds": 3}, "configuration: 'rounds' given, must be section.key"),
        ({"run.rounds": 0}, "run.rounds: 0 given"),
        ({"run.rouns": 1}, "run: unknown 'rouns', did you mean 'rounds'"),
        ({"flower.nods": 1}, "flower: unknown 'nods', did you mean 'nodes'"),
        ({"flower.deadline": 0}, "flower.deadline: 0 given"),
        ({"flower.nodes": 2, "participation.clients": 3}, "participation.clients: 3 given, must be at most 2"),
        ({"flower.nodes": 2, "robust.name": "krum"}, "cannot work with the 2 clients"),
        ({"run.seed": 1, "run.seed.deep": 1}, "inside a single value"),
        ({"algorithm.include": "[1"}, "must be a list or table in TOML"),
        ({"data.clients": 3}, "data.clients: 3 given, comes from the app's task.py"),
        ({"participation.dropout": 0.5}, "participation.dropout: 0.5 given, must be 0: real nodes"),
        ({"robust.attack": "alie"}, "robust.attack: 'alie' given, must be left out"),
        ({"data.name": "mnist"}, "data.name: 'mnist' given, comes from the app's task.py"),
        ({"model.name": "dnn"}, "model.name: 'dnn' given, comes from the app's task.py"),
        ({"privacy.clip": 1.0, "privacy.noise": 1.0}, "privacy.clip: 1.0 given, .* every node knows the seed"),
        ({"privacy.epsilon": 3.0}, "privacy.epsilon: 3.0 given, must be left out"),
        ({"privacy.delta": 1e-3}, "privacy.delta: 0.001 given, must be left out"),
        ({"run.diagnostics_every": 1}, "run.diagnostics_every: 1 given"),
        ({"run.seeds": 3}, "run.seeds: 3 given, must be 1"),
        ({"run.evaluate_clients": 3}, "run.evaluate_clients: 3 given, must be left out"),
        ({"engine.state": "mmap"}, "engine.state: 'mmap' given, must be left out"),
        ({"flower.max_samples": 0}, "flower.max_samples: 0 given"),
        ({"flower.secure_aggregation": True}, "SecAgg\\+ works only with its older client"),
        ({"flower.secure_aggregation": True, "robust.name": "median"}, "robust rules need each client"),
        ({"flower.secure_aggregation": True, "robust.gauge": 1.0}, "robust rules need each client"),
        (
            {"flower.secure_aggregation": True, "algorithm.aggregation": "act"},
            "'tdpfed' as configured needs more than the sum",
        ),
        (
            {"flower.secure_aggregation": True, "algorithm.name": "local"},
            "'local' as configured needs more than the sum",
        ),
        ({"flower.secure_aggregation": True, "wire.update": "factors"}, "secure_aggregation: True .* 'factors'"),
        ({"flower.secure_aggregation": True, "wire.update": "top-k"}, "secure_aggregation: True .* 'top-k'"),
        ({"flower.secure_aggregation": True, "wire.codec": "int4"}, "secure_aggregation: True .* 'int4'"),
        ({"flower.secure_aggregation": True, "wire.codec": "int8"}, "secure_aggregation: True .* 'int8'"),
        ({"wire.update": "few"}, "wire.update: 'few' given"),
        ({"wire.terms": 0}, "wire.terms: 0 given"),
        ({"wire.down": "top-k"}, "wire.down: 'top-k' given"),
        ({"wire.codec": "int4", "wire.feedback": False}, "wire.codec: 'int4' given"),
        ({"server.optimizer": "lamb"}, "server.optimizer: 'lamb' given"),
        ({"server.rate": 0.0}, "server.rate: 0.0 given"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        read_settings(given)


def test_a_method_of_ones_own_is_found_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    my_own_method.write(tmp_path, monkeypatch, on_path=False)
    given = {"algorithm.name": my_own_method.NAME, f"algorithms.{my_own_method.NAME}.tau": 3}
    with pytest.raises(TDPFedError, match="no module 'users_methods'"):
        read_settings(given)
    monkeypatch.setenv(OWN_CODE, str(tmp_path))
    config, flower = read_settings(given)
    assert (config.make_algorithm().name, config.algorithm["tau"]) == ("ditto", 3)
    assert read_settings(flat(as_run_config(config, flower))) == (config, flower)
    with pytest.raises(TDPFedError, match="did you mean 'lam'"):
        read_settings({**given, "algorithm.lamm": 1.0})


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    with pytest.raises(CombinedError) as error:
        read_settings(
            {
                "rounds": 3, "flower.nodes": 0, "flower.out": "", "data.name": "mnist", "robust.attack": "alie",
                "privacy.epsilon": 3.0, "run.rounds": 0, "algorithm.tau": 0,
            }
        )  # fmt: skip
    assert [one.field for one in error.value.errors] == [
        "configuration", "flower.nodes", "data.name", "robust.attack", "privacy.epsilon", "algorithm.tau", "run.rounds",
    ]  # fmt: skip
    with pytest.raises(CombinedError) as error:
        read_settings({"flower.nodes": 2, "participation.clients": 3, "participation.quorum": 4, "robust.name": "krum"})
    assert [one.field for one in error.value.errors] == ["participation.clients", "participation.quorum", "robust.name"]
    with pytest.raises(TDPFedError, match="2 nodes"):
        read_settings({"flower.nodes": 2, "flower.samples": "[1]"})


# -- the user's task ---------------------------------------------------------------------------------------------------

X, Y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])


class Own:
    """A task of which each part can be exchanged."""

    def __init__(self, samples: Any = (X, Y, X, Y), model: Any = None) -> None:
        self.samples, self.made = samples, model

    def model(self) -> nn.Module:
        if isinstance(self.made, Exception):
            raise self.made
        return nn.Linear(3, 2) if self.made is None else self.made

    def load(self, node_config: Any) -> Any:
        if isinstance(self.samples, Exception):
            raise self.samples
        return self.samples


def test_the_model_is_drawn_from_the_seed_and_nothing_else() -> None:
    one, again, other = (objective_of(Own(), seed).initial() for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_arrays_and_tensors_are_taken() -> None:
    data = data_of(Own((np.zeros((4, 3)), np.array([0, 1, 0, 1]), X[:0], Y[:0])), {}, CPU)
    assert data.x.dtype == torch.float32
    assert len(data.x_test) == 0
    for kind in ("int8", "uint8", "int16", "int32", "bool"):
        labels = np.array([0, 1, 0, 1]).astype(kind)
        data = data_of(Own((X, labels, X, torch.from_numpy(labels))), {}, CPU)
        assert data.y.dtype == data.y_test.dtype == torch.int64


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (OSError("no such file"), "task.load: failed \\(OSError: no such file\\)"),
        ((X, Y), "task.load: 2 values returned"),
        (([1, 2], Y, X, Y), "x_train is a list"),
        ((np.array([object()]), Y, X, Y), "must be a tensor or an array of numbers"),
        ((X, Y[:3], X, Y), "one label for each sample"),
        ((X, Y, X, Y[:3]), "one label for each sample"),
        ((X, Y, X[:, :2], Y), "must be samples of the same shape"),
        ((X[:0], Y[:0], X, Y), "no training samples"),
        ((X / 0, Y, X, Y), "x_train holds NaN"),
    ],
)
def test_samples_that_cannot_be_used_are_named(samples: Any, words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        data_of(Own(samples), {}, CPU)


@pytest.mark.parametrize(
    ("model", "words"),
    [(ValueError("no"), "task.model: failed"), ("net", "returned a str"), (nn.Identity(), "no param")],
)
def test_models_that_cannot_be_used_are_named(model: Any, words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        objective_of(Own(model=model), 0)


@pytest.mark.parametrize("given", [None, -1, 3, "0", True, 1.0])
def test_a_node_must_know_who_it_is(given: Any) -> None:
    with pytest.raises(TDPFedError, match=r"partition-id: .* must be a whole number from 0 to 2"):
        client_id({"partition-id": given}, 3)
    assert client_id({"partition-id": 2}, 3) == 2


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Own((X[:, :2], Y, X[:, :2], Y)), "cannot take inputs of shape \\(2,\\)"),
        (Own((X, Y + 1, X, Y)), "labels from 0 to 2"),
        (Own((X, Y.float(), X, Y)), "must be class numbers"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_named_at_first_contact(task: Own, words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        Node(task, {}, {"partition-id": 0}).hello()


def test_own_losses_are_used() -> None:
    task = Own((X, torch.zeros(4, 2).sum(1), X, torch.zeros(4)))
    task.loss = lambda outputs, targets: (outputs.sum(1) - targets).square().mean()  # type: ignore[attr-defined]
    hello = Node(task, {"run.threads": 1}, {"partition-id": 0}).hello()
    assert (hello["samples"], hello["tests"]) == (4, 4)


@pytest.mark.parametrize("fields", [{"round": -1}, {"round": 1.5}, {"round": True}, {}])
def test_numbers_of_a_message_are_checked_on_the_node(fields: Any, tmp_path: Path) -> None:
    node = Node(Own(), {}, {"partition-id": 0, "state-dir": str(tmp_path)})
    with pytest.raises(TDPFedError, match=r"round: .* in a message"):
        node.train({"session": 1, "settled": 0, "run": "0" * 16, **fields}, lambda limit: b"")


def test_a_message_down_passes_the_gate_too(tmp_path: Path) -> None:
    node = Node(Own(), {}, {"partition-id": 0, "state-dir": str(tmp_path)})
    fields = {"round": 1, "session": 1, "settled": 0, "counted": 0, "run": "0" * 16, "starts": "0"}
    with pytest.raises(Rejected, match="begins with"):
        node.train(fields, lambda limit: b"nonsense")
    assert not list(tmp_path.iterdir())


# -- envelopes ---------------------------------------------------------------------------------------------------------


class Bare:
    """As much of a message as an envelope looks at."""

    def __init__(self, content: RecordDict | None) -> None:
        self.content = content

    def has_content(self) -> bool:
        return self.content is not None


def test_an_envelope_without_its_records_is_refused() -> None:
    for message in (Bare(None), Bare(RecordDict()), Bare(RecordDict({"wire": ConfigRecord()}))):
        with pytest.raises(Rejected, match="no record 'tdpfed'"):
            envelope.fields_of(message)  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="no record 'wire'"):
        envelope.wire_of(Bare(RecordDict({"wire": ConfigRecord()})), 9, 0)  # type: ignore[arg-type]
    assert envelope.metrics_of(Bare(RecordDict())) == {}  # type: ignore[arg-type]


def test_every_key_of_its_own_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert not [key for key in plain(Flower()) if f"| `flower.{key}` |" not in page]


def test_every_key_reaches_flower_as_it_was(tmp_path: Path) -> None:
    import tomllib

    from tdpfed.flower.app import init_app

    init_app(tmp_path / "mine")
    tables = tomllib.loads((tmp_path / "mine" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config, flower = read_settings(flatten_dict(tables))
    assert (config.checkpoint.every, flower.nodes, config.algorithm["name"]) == (1, 3, "tdpfed")
