"""Messages of the package's one error class."""

from tdpfed.errors import TDPFedError, unknown


def test_the_error_is_a_value_error() -> None:
    assert issubclass(TDPFedError, ValueError)


def test_unknown_names_field_value_nearest_and_all_allowed() -> None:
    error = unknown("model", "vgg", ["vgg8", "dnn"])
    assert isinstance(error, TDPFedError)
    assert str(error) == "model: unknown 'vgg', did you mean 'vgg8'? Allowed: dnn, vgg8"


def test_unknown_without_a_near_name_suggests_nothing() -> None:
    assert str(unknown("model", 17, iter(["vgg8", "dnn"]))) == "model: unknown 17; Allowed: dnn, vgg8"
