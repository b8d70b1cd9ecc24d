"""Settings of the server that belong to a method: a table ``[algorithms.NAME.server]``."""

from pathlib import Path

import pytest

from tdpfed.config import load_config, parse_config, to_toml
from tdpfed.config.loading import parse_toml
from tdpfed.errors import TDPFedError
from tdpfed.server.step import ServerStep

FILE = """
[algorithms.fedavg]
eta = 0.02
server = {optimizer = "sgd", rate = 1.5}

[algorithms.ditto.server]
optimizer = "yogi"
rate = 0.01
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(FILE)
    return str(tmp_path / "mine.toml")


def server(source: str, *overrides: str) -> ServerStep:
    return load_config(source, list(overrides)).server


def test_it_holds_for_its_method_only(source: str) -> None:
    assert server(source, "algorithm.name=fedavg") == ServerStep(optimizer="sgd", rate=1.5)
    assert server(source, "algorithm.name=ditto") == ServerStep(optimizer="yogi", rate=0.01)
    assert server(source, "algorithm.name=local") == ServerStep()
    assert load_config(source, ["algorithm.name=fedavg"]).algorithm["eta"] == 0.02


def test_the_section_itself_takes_precedence(source: str) -> None:
    given = ("algorithm.name=fedavg", "server.rate=0.5", "server.momentum=0.9")
    assert server(source, *given) == ServerStep(optimizer="sgd", rate=0.5, momentum=0.9)
    assert server(source, "algorithm.name=fedavg", "algorithms.fedavg.server.rate=3").rate == 3


def test_a_resolved_configuration_needs_no_table(source: str) -> None:
    config = load_config(source, ["algorithm.name=ditto"])
    assert parse_config(parse_toml(to_toml(config))) == config


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("algorithms.ditto.server.rate=-1", "algorithms.ditto.server.rate"),
        ("algorithms.ditto.server.rat=1", "algorithms.ditto.server"),
        ("algorithms.ditto.server=1", "algorithms.ditto.server"),
    ],
)
def test_errors_name_the_table_also_of_another_method(source: str, override: str, field: str) -> None:
    with pytest.raises(TDPFedError) as error:
        load_config(source, ["algorithm.name=local", override])
    assert error.value.field == field
