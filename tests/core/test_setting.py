"""Settings: what is declared once is checked, read, described and reported together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import pytest

from tdpfed.core.setting import build, check, default_of, doc_of, plain, range_of, read, same, setting, words
from tdpfed.errors import CombinedError, TDPFedError


@dataclass(frozen=True)
class Own:
    """One setting of each type."""

    whole: int = setting(3, "a whole number", least=1, most=10)
    real: float = setting(0.5, "a number", above=0, below=1)
    maybe: float | None = setting(None, "an optional number", above=0)
    choice: Literal["near", "far"] = setting("near", "a word")
    mixed: float | Literal["median"] | None = setting(None, "a number or a word", above=0)
    flag: bool = setting(False, "a switch")
    text: str = setting("a", "a text")
    names: tuple[str, ...] = setting((), "a list")
    ranks: Mapping[str, int] | None = setting(None, "a table", least=1)
    options: dict[str, Any] = setting({}, "anything")

    def __post_init__(self) -> None:
        check(self)
        if self.flag and self.maybe is None:
            raise TDPFedError("none given, must be set with flag", field="maybe")


GOOD: list[tuple[str, Any, Any]] = [
    ("whole", 10, 10), ("real", 0.25, 0.25), ("maybe", 2, 2.0), ("maybe", None, None), ("choice", "far", "far"),
    ("mixed", "median", "median"), ("mixed", 1, 1.0), ("mixed", None, None), ("flag", False, False), ("text", "", ""),
    ("names", ["a", "b"], ("a", "b")), ("ranks", {"fc*": 3}, {"fc*": 3}), ("ranks", None, None),
    ("options", {"a": [1, None]}, {"a": [1, None]}), ("whole", np.int64(4), 4), ("maybe", np.float32(0.5), 0.5),
]  # fmt: skip

BAD: list[tuple[str, Any, str]] = [
    ("whole", 0, "a whole number of at least 1 and at most 10"), ("whole", 1.0, "a whole number"),
    ("whole", True, "a whole number"), ("whole", "3", "a whole number"), ("whole", None, "a whole number"),
    ("real", 1, "a finite number above 0 and below 1"), ("real", math.nan, "a finite number"),
    ("maybe", 0, "a finite number above 0"), ("maybe", math.inf, "a finite number above 0"),
    ("maybe", 10**400, "a finite number"), ("maybe", "x", "a finite number above 0"),
    ("choice", "fra", "'near' or 'far'; did you mean 'far'?"), ("choice", ["far"], "'near' or 'far'"),
    ("mixed", "medan", "a finite number above 0 or 'median'; did you mean 'median'?"), ("mixed", -1, "or 'median'"),
    ("flag", 1, "true or false"), ("text", 3, "text"), ("names", [1], "a list of text"), ("names", 3, "a list of text"),
    ("ranks", {"a": 0}, "a table of whole numbers at least 1"), ("ranks", {1: 1}, "a table"), ("ranks", 8, "a table"),
    ("options", 3, "a table"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "kept"), GOOD, ids=str)
def test_what_fits_is_taken_and_read_as_its_type(name: str, given: Any, kept: Any) -> None:
    Own(**{name: given})
    errors: list[TDPFedError] = []
    made = build(Own, {name: given}, "own", errors)
    assert errors == []
    assert getattr(made, name) == kept
    assert type(getattr(made, name)) is type(kept)


@pytest.mark.parametrize(("name", "given", "allowed"), BAD, ids=lambda value: str(value)[:30])
def test_what_does_not_is_refused_in_python_and_in_files_alike(name: str, given: Any, allowed: str) -> None:
    with pytest.raises(TDPFedError) as error:
        Own(**{name: given})
    assert (error.value.field, error.value.value) == (name, given) or given != given
    assert allowed in str(error.value)
    errors: list[TDPFedError] = []
    assert build(Own, {name: given}, "own", errors) is None
    assert [str(one) for one in errors] == [f"own.{error.value}"]
    assert errors[0].field == f"own.{name}"


def test_all_errors_are_found_at_once_and_those_across_settings_when_each_is_right() -> None:
    errors: list[TDPFedError] = []
    assert build(Own, {"whole": 0, "reel": 1, "choice": "x", "flag": True}, "own", errors) is None
    assert [one.field for one in errors] == ["own.whole", "own", "own.choice"]
    assert "did you mean 'real'" in str(errors[1])
    with pytest.raises(CombinedError) as error:
        Own(whole=0, real=3)
    assert [one.field for one in error.value.errors] == ["whole", "real"]
    errors = []
    assert build(Own, {"flag": True}, "own", errors) is None
    assert [str(one) for one in errors] == ["own.maybe: none given, must be set with flag"]
    errors = []
    assert build(Own, 3, "own", errors) is None
    assert [str(one) for one in errors] == ["own: 3 given, must be a table"]


def test_a_single_text_is_a_list_of_one_in_a_file() -> None:
    assert read(Own, {"names": "a"}, "own", []) == {"names": ("a",)}


def test_a_setting_without_a_default_must_be_given() -> None:
    @dataclass(frozen=True)
    class Needs:
        clip: float = setting(doc="needed", above=0)

    errors: list[TDPFedError] = []
    assert build(Needs, {}, "needs", errors) is None
    assert [str(one) for one in errors] == ["needs.clip: none given, must be a finite number above 0"]

    @dataclass(frozen=True)
    class Lent:
        limit: float | None = same(Needs, "clip", None)

    (item,) = fields(Lent)
    assert (default_of(item), doc_of(item), str(range_of(item))) == (None, "needed", "above 0")


def test_defaults_are_not_shared_between_instances() -> None:
    assert plain(Own())["options"] is not Own().options
    assert plain(Own()) == plain(build(Own, {}, "own", []))


def test_plain_fields_count_as_settings_without_a_range() -> None:
    @dataclass(frozen=True)
    class Plain:
        size: int = 3
        names: list[str] | None = None

    assert build(Plain, {"size": -1, "names": ["a"]}, "plain", []) == Plain(-1, ["a"])
    assert words(int | None, range_of(fields(Plain)[0])) == "a whole number"
