"""Messages of the package's one error class."""

import pytest

from tdpfed.errors import CombinedError, TDPFedError, UnknownError, each, raise_all, unknown, wrong


def test_the_error_is_a_value_error() -> None:
    assert issubclass(TDPFedError, ValueError)


def test_unknown_names_field_value_nearest_and_all_allowed() -> None:
    error = unknown("model", "vgg", ["vgg8", "dnn"])
    assert isinstance(error, TDPFedError)
    assert str(error) == "model: unknown 'vgg', did you mean 'vgg8'? Allowed: dnn, vgg8"


def test_unknown_without_a_near_name_suggests_nothing() -> None:
    assert str(unknown("model", 17, iter(["vgg8", "dnn"]))) == "model: unknown 17; Allowed: dnn, vgg8"


def test_an_error_carries_its_field_and_moves_below_a_section() -> None:
    error = wrong("tau", 0, "at least 1")
    assert (str(error), error.field, error.value, error.allowed) == (
        "tau: 0 given, must be at least 1", "tau", 0, "at least 1",
    )  # fmt: skip
    moved = error.within("algorithm")
    assert (str(moved), moved.field, moved.value) == ("algorithm.tau: 0 given, must be at least 1", "algorithm.tau", 0)
    assert str(error.at("--tau").noting("for fedavg")) == "--tau: 0 given, must be at least 1 (for fedavg)"
    assert str(TDPFedError("no field").within("algorithm")) == "algorithm: no field"
    assert isinstance(unknown("name", "x", ["y"]).within("algorithm"), UnknownError)


def test_several_errors_move_together() -> None:
    both = CombinedError([wrong("tau", 0, "at least 1"), wrong("eta", 0, "above 0")])
    assert both.within("algorithm").noting("x").lines == [
        "algorithm.tau: 0 given, must be at least 1 (x)", "algorithm.eta: 0 given, must be above 0 (x)",
    ]  # fmt: skip
    assert each(both) == both.errors
    with pytest.raises(CombinedError):
        raise_all(both.errors)
    with pytest.raises(TDPFedError, match="tau"):
        raise_all(both.errors[:1])
    raise_all([])
