"""Configurations that are damaged, or made to do harm: errors that name the key, and never anything else."""

import json
import tomllib
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdpfed.algorithms import ALGORITHMS
from tdpfed.config import load_config, parse_config, preset_text, presets, to_toml
from tdpfed.config.keys import describe
from tdpfed.config.loading import parse_toml
from tdpfed.config.sections import SECTIONS
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.prepare import prepare

pytestmark = pytest.mark.hostile

FILES: dict[str, str] = {
    "lists without end": "[run]\nrounds = " + "[" * 5000,
    "closed lists": "[run]\nrounds = " + "[" * 900 + "]" * 900,
    "tables in tables": "a = " + "{a = " * 900 + "1" + "}" * 900,
    "a key of many parts": ".".join("a" * 3000) + " = 1",
    "options in options": "[data.options]\n" + ".".join("a" * 400) + " = 1",
    "a decimal of many digits": "[run]\nrounds = " + "9" * 5000,
    "a hexadecimal of many digits": "[run]\nrounds = 0x" + "f" * 5000,
    "a seed of many digits": "[data.options]\nseed = 0x" + "f" * 5000,
    "a name of many digits": "[algorithm]\nname = 0x" + "f" * 5000,
    "a model of many digits": "[model]\nname = 0x" + "f" * 5000,
    "many digits in a list": "[algorithm]\nexclude = [0x" + "f" * 5000 + "]",
    "a method of many digits": "[algorithms.0x" + "f" * 5000 + "]\ntau = 1",
    "a float of many digits": "[algorithm]\nlam = " + "9" * 5000 + ".0",
    "an exponent of many digits": "[algorithm]\nlam = 1e" + "9" * 5000,
    "infinite": "[algorithm]\nlam = inf",
    "no number": "[algorithm]\nlam = nan",
    "an infinite option": "[data.options]\nalpha = inf",
    "a date": "[data.options]\nalpha = 2020-01-01",
    "a section that is a number": "run = 1",
    "a section that is a list": "[[run]]\nrounds = 1",
    "methods that are a number": "algorithms = 1",
    "a method that is a number": "[algorithms]\nfedavg = 1",
    "a name that is a table": "[algorithm.name]\na = 1",
    "a name that is a list": "[model]\nname = ['dnn']",
    "a name with a zero": '[data]\nname = "a\\u0000.npz"',
    "a long name": '[data]\nname = "' + "a" * 100_000 + '"',
    "a long file name": '[data]\nname = "' + "a" * 100_000 + '.npz"',
    "a path that is a folder": '[data]\nname = "/.npz"',
    "a long unknown key": "[run]\n" + "a" * 100_000 + " = 1",
    "not text": "\udcff",
    "zero": "\x00",
    "longer than a mebibyte": "#" * (1 << 20) + "\n",
}


def answer(path: Path, *overrides: str) -> str:
    """Return the errors of a configuration and of the run it describes; empty if there are none."""
    try:
        config = load_config(str(path), list(overrides))
        assert parse_config(json.loads(json.dumps(config.as_dict())) | {}) == config
        prepare(config)
    except TDPFedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", FILES)
def test_a_file_made_to_do_harm_is_refused_in_few_words(tmp_path: Path, how: str) -> None:
    (tmp_path / "run.toml").write_bytes(FILES[how].encode("utf-8", "surrogateescape"))
    assert 0 < len(answer(tmp_path / "run.toml")) < 3000


@pytest.mark.parametrize(
    "override",
    [
        "run.rounds=" + "9" * 5000, "run.rounds=0x" + "f" * 5000, "run.rounds=" + "[" * 5000, "run.rounds=-0",
        "data.options=" + "{a=" * 300 + "1" + "}" * 300, "data.name=\udcff", "model.name=\udcff", "run.loggers=\udcff",
        "data.options.a=\udcff", ".".join("a" * 5000) + "=1", "data.options." + ".".join("a" * 5000) + "=1", "=",
        "run.=", ".rounds=1", "run.rounds.a=1", "algorithm.name=0x" + "f" * 5000, "algorithms.fedavg=1",
        "algorithms.fedavg.tau=x",
        "\x00.\x00=\x00", "run.rounds=" + "\n" * 100, "data.options=1979-05-27", "data.options={a = 07:32:00}",
        "algorithm.compression=1e-308", "algorithm.lam=1e308", "algorithm.eta=1e-320", "server.rate=1e300",
        "wire.compression=1e308",
    ],
)  # fmt: skip
def test_an_override_made_to_do_harm_is_refused_in_few_words(override: str) -> None:
    with pytest.raises(TDPFedError) as error:
        load_config("digits", [override])
    assert len(str(error.value)) < 3000


def test_minus_zero_is_zero() -> None:
    names = ["data.size_skew", "algorithm.lam"]
    federations = [prepare(load_config("digits", [f"{name}={zero}" for name in names])) for zero in ("0.0", "-0.0")]
    assert federations[0].federation.digest == federations[1].federation.digest


# Whatever the values are, nothing but an error of use comes out


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.builds(pow, st.sampled_from([-2, 2]), st.sampled_from([64, 65, 20_001]))
    | st.text(st.characters(codec=None), max_size=3) | st.just(date(2020, 1, 1))
    | st.sampled_from([-0.0, 1e308, 5e-324])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@given(st.data())
def test_any_value_of_any_key_is_taken_or_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    keys = [key.name for key in describe(name)]
    values: dict[str, Any] = {"algorithm": {"name": name}}
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=5)):
        section, _, inner = key.partition(".")
        values.setdefault(section, {})[inner] = data.draw(VALUES)
    if data.draw(st.booleans()):
        values[data.draw(st.sampled_from([*SECTIONS, "algorithms", "x"]))] = data.draw(VALUES)
    taken_or_refused(values)


def taken_or_refused(values: dict[str, Any]) -> None:
    try:
        config, words = parse_config(values), ""
    except TDPFedError as error:
        config, words = None, str(error)
    assert len(words) < 20_000
    if config is not None:
        assert parse_config(tomllib.loads(to_toml(config))) == config


@pytest.mark.slow
@settings(max_examples=10_000)
@given(st.dictionaries(st.sampled_from([*SECTIONS, "algorithms", "x"]), VALUES, max_size=4))
def test_any_tables_are_taken_or_refused(values: dict[str, Any]) -> None:
    taken_or_refused(values)


SYMBOLS = [
    "[",
    "]",
    "{",
    "}",
    "=",
    '"',
    "'",
    "\n",
    ".",
    "0",
    "9" * 5000,
    "-",
    "e",
    "#",
    "\x00",
    "\xff",
    "inf",
    "[" * 2000,
]


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_mutated_file_is_read_or_refused(tmp_path: Path, count: int) -> None:
    random, names, refused = Random(0), presets(), 0
    for _ in range(count):
        text = preset_text(random.choice(names))
        for _ in range(random.choice([1, 1, 2, 5])):
            place, end = random.randrange(len(text)), random.randrange(8)
            text = text[:place] + random.choice([*SYMBOLS, text[place : place + end] * 2, ""]) + text[place + end :]
        (tmp_path / "run.toml").write_bytes(text.encode("latin-1", "replace"))
        words = ""
        try:
            load_config(str(tmp_path / "run.toml"))
        except TDPFedError as error:
            words = str(error)
        assert len(words) < 20_000
        refused += bool(words)
    assert refused > count // 4


# Numbers at the ends of their range


ENDS = ["-0.0", "0.0", "5e-324", "1e-308", "2e-38", "1e-20", "0.999999999", "1e20", "3e38", "1e308", "-1e308"]
WHOLE = ["-1", "0", "1", "2", str(2**31), str(2**53), str(2**63 - 1), str(2**63)]
TINY = [
    "run.rounds=1", "data.clients=4", "data.max_samples=20", "data.per_client=5", "model.name=logistic",
    "algorithm.tau=1", "algorithm.batch_size=4",
]  # fmt: skip
LONG = {"algorithm.tau", "algorithm.s", "algorithm.s_prime", "algorithm.act_sweeps", "participation.attempts"}
"""Numbers of repetitions: a large one takes long, as asked for."""


def extremes(name: str) -> list[tuple[str, str]]:
    return [
        (key.name, value)
        for key in describe(name)
        for kind, values in (("whole number", WHOLE), ("number", ENDS))
        if key.allowed.startswith(kind) or f"or {kind}" in key.allowed
        for value in values
        if key.name not in LONG or float(value) < 3
    ]


@pytest.mark.parametrize("share", [0.06, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.filterwarnings("ignore")  # an overflow is not an error here: the run ends with one of its own
def test_a_run_with_a_number_at_the_end_of_its_range_ends_or_is_refused(name: str, share: float) -> None:
    pairs = extremes(name)
    chosen = pairs if share == 1 else Random(name).sample(pairs, int(share * len(pairs)))
    for key, value in chosen:
        try:
            simulation: Simulation = prepare(load_config("digits", [*TINY, f"algorithm.name={name}", f"{key}={value}"]))
            simulation.step()
            simulation.record(0.0)
        except TDPFedError:
            pass
        except Exception as error:
            raise AssertionError(f"{key}={value}") from error


@pytest.mark.parametrize(
    "text",
    [
        "a." * 200_000 + "b = 1", "[" + "a." * 200_000 + "b]", '"a b".' * 20_000 + "c = 1",
        '"a\\"b" . ' * 20_000 + "c = 1", "x = {" + "'a b' . " * 20_000 + "c = 1}",
    ],
    ids=["key", "table", "quoted", "escaped", "inline"],
)  # fmt: skip
def test_keys_of_many_parts_are_refused_before_they_are_parsed(text: str) -> None:
    """Python's parser would take memory and time for the square of their number."""
    with pytest.raises(TDPFedError, match="a key of more than 100 parts"):
        parse_toml(text)


@pytest.mark.parametrize("text", ["x" * 500_000, '"\\' * 300_000, '\\"' * 300_000, 'v = "' + "a" * 500_000])
def test_the_parts_of_keys_are_counted_in_one_pass(text: str) -> None:
    """With a pass from every character these texts would take an hour."""
    with pytest.raises(TDPFedError):
        parse_toml(text + "." * 200)


@pytest.mark.parametrize(
    "before",
    [
        '# "\\\n', "# it's\n", '# "\n', 'x = """a\n"""\n', "x = '''a\n'''\n", 'y = """a"\n"b""""\n',
        "z = '''a'\n'b''''\n", 'q = """\\""" "\n"""\n',
    ],
)  # fmt: skip
def test_no_comment_and_no_text_hides_a_key_of_many_parts(before: str) -> None:
    with pytest.raises(TDPFedError, match="a key of more than 100 parts"):
        parse_toml(before + "a." * 8_000 + "b = 1")
    assert parse_toml(before + "a.b = 1")["a"] == {"b": 1}


def test_a_key_in_a_table_behind_a_text_of_several_lines_is_counted() -> None:
    with pytest.raises(TDPFedError, match="a key of more than 100 parts"):
        parse_toml('x = {a = """\n\'""", ' + "a." * 200 + "b = 1}")


def test_dots_in_comments_and_texts_are_no_parts_of_a_key() -> None:
    dots = "x . " * 150
    text = f"# {dots}\na = 1 # {dots}\nb = \"\"\"\n{dots}\n\"\"\"\nc = '''\n{dots}'''\n"
    assert parse_toml(text)["a"] == 1


def test_keys_of_fewer_parts_and_numbers_with_dots_are_parsed() -> None:
    assert parse_toml("a." * 99 + 'b = "' + "c." * 90 + '"')["a"]
    assert parse_toml(f"a = {[0.5] * 1000}") == {"a": [0.5] * 1000}
