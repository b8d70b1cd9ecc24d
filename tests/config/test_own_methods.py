"""A method of the user's own in a configuration: its keys are checked, suggested and listed like built-in ones."""

import inspect
import sys
import tomllib
from pathlib import Path

import pytest

import my_own_method
from tdpfed.config import flat, load_config, parse_config, to_toml
from tdpfed.config.keys import describe
from tdpfed.config.loading import own_code, raw_config
from tdpfed.config.sections import Data
from tdpfed.core.setting import plain
from tdpfed.data import make_federation
from tdpfed.errors import CombinedError, TDPFedError, each

NAME = my_own_method.NAME


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return my_own_method.write(tmp_path, monkeypatch)


def test_it_is_chosen_by_file_and_by_override_and_survives_toml(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f'[algorithm]\nname = "{NAME}"\nlam = 3\n[algorithms."{NAME}"]\ntau = 4\nlam = 5\n')
    config = load_config(str(file), [f"algorithms.{NAME}.eta=0.5", "algorithm.kind=near"])
    assert config.algorithm["name"] == config.method_name == NAME
    method = config.make_algorithm()
    assert (type(method).__name__, method.name, method.tau) == ("Ditto", "ditto", 4)
    assert (config.algorithm["lam"], config.algorithm["eta"], config.algorithm["bound"]) == (3.0, 0.5, None)
    again = parse_config(tomllib.loads(to_toml(config)))
    assert again == config
    assert again.make_algorithm() == method
    assert load_config("digits", [f"algorithm.name={NAME}"]).make_algorithm() == type(method)()


def test_its_keys_are_checked_with_all_others_at_once() -> None:
    with pytest.raises(CombinedError) as error:
        load_config(
            "digits",
            [f"algorithm.name={NAME}", "algorithm.lamm=1", "algorithm.lam=-1", "algorithm.bound=0", "run.rounds=0"],
        )
    found = {one.field: str(one) for one in error.value.errors}
    assert set(found) == {"algorithm", "algorithm.lam", "algorithm.bound", "run.rounds"}
    assert "did you mean 'lam'" in found["algorithm"]
    assert "above 0" in found["algorithm.bound"]
    with pytest.raises(CombinedError) as error:
        load_config("digits", [f"algorithm.name={NAME}", "algorithm.kind=far", "wire.codec=int9"])
    assert [one.field for one in error.value.errors] == ["algorithm.bound", "wire.codec"]
    with pytest.raises(TDPFedError, match="did you mean 'lam'") as one:
        load_config("digits", [f"algorithms.{NAME}.lan=1"])
    assert one.value.field == f"algorithms.{NAME}"


@pytest.mark.parametrize("name", ["users_methods:Dito", "nowhere:Ditto"])
def test_one_that_is_not_there_hides_no_other_error(name: str) -> None:
    with pytest.raises(CombinedError) as error:
        load_config("digits", [f"algorithm.name={name}", "run.rounds=0", f"algorithms.{name}.tau=1"])
    assert [one.field for one in error.value.errors] == ["algorithm.name", "run.rounds"]


def test_its_keys_are_listed() -> None:
    found = {key.name: key for key in describe(NAME)}
    assert (found["algorithm.name"].default, found["algorithm.lam"].meaning) == (NAME, "pull towards the global model")
    assert found["algorithm.bound"].allowed == "number > 0"
    assert found["algorithm.kind"].allowed == "near, far"
    with pytest.raises(TDPFedError, match="did you mean 'Ditto'") as error:
        describe("users_methods:Dito")
    assert error.value.field == "algorithm"


def test_a_module_in_a_package_keeps_its_dots_in_keys(tmp_path: Path) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text(my_own_method.SOURCE)
    name = "own_package.deep:Ditto"
    for key in (f"algorithms.{name}.tau=3", f'algorithms."{name}".tau=3'):
        config = load_config("digits", [f"algorithm.name={name}", key])
        assert config.algorithm["tau"] == 3
    assert flat({"run": {"rounds": 1}, "algorithms": {name: {"tau": 3}}, "odd": 1}) == {
        "run.rounds": 1, f"algorithms.{name}.tau": 3, "odd": 1,
    }  # fmt: skip
    for loaded in ("own_package.deep", "own_package"):
        sys.modules.pop(loaded, None)


def test_own_code_is_known_before_it_is_imported() -> None:
    raw = raw_config("digits", [f"algorithm.name={NAME}", "model.name=a:b", "algorithms.c:D.tau=1"])
    assert own_code(raw) == [NAME, "a:b", "c:D"]
    assert own_code(raw_config("digits")) == []
    assert own_code({"algorithm": 3}) == []
    assert "users_methods" not in sys.modules


def test_checks_across_settings_come_with_all_others() -> None:
    with pytest.raises(TDPFedError) as error:
        parse_config(
            {
                "algorithm": {"optimizer": "als", "factor_steps": "alternating"}, "privacy": {"clip": 1.0},
                "participation": {"dropout": 1, "sampling": "poison"}, "robust": {"attack_fraction": 2},
            }
        )  # fmt: skip
    assert {one.field for one in each(error.value)} == {
        "algorithm.factor_steps", "privacy.noise", "participation.dropout", "participation.sampling",
        "robust.attack_fraction",
    }  # fmt: skip
    for values, field in (({"epsilon": 1.0}, "privacy.epsilon"), ({"noise": 1.0}, "privacy.clip")):
        with pytest.raises(TDPFedError) as error:
            parse_config({"privacy": values})
        assert error.value.field == field


def test_the_data_section_has_the_defaults_of_the_function_it_feeds() -> None:
    given = {name: one.default for name, one in inspect.signature(make_federation).parameters.items()}
    section = plain(Data())
    assert section.pop("name") == given["dataset"]
    assert section.pop("seed") is None
    assert section.pop("options") == {}
    by_partition = {"per_client": 2, "alpha": 0.5}  # in Python refused with another partition if given, so None there
    assert section == {name: by_partition.get(name, given[name]) for name in section}
    assert all(given[name] is None for name in by_partition)
