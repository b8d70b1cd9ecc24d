"""What counts as equal when an old and a new version are compared."""

import argparse
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from safetensors.torch import save_file


def compared(folder: Path, old: dict[str, Any], new: dict[str, Any], records: tuple[Any, Any] = ({}, {})) -> float:
    options = argparse.Namespace(file=folder / "record.json", ignore=["ignored"])
    for what, values in (("record", old), ("check", new)):
        file = golden._stored(options, "run", what)
        file.parent.mkdir(exist_ok=True)
        save_file({name: torch.tensor(value) for name, value in values.items()}, file)
    before, now = ({"records": [one]} for one in records)
    return golden._farthest(before, now, "run", options)


def test_differences_are_relative_to_the_norm(tmp_path: Path) -> None:
    assert compared(tmp_path, {"a": [3.0, 4.0]}, {"a": [3.0, 4.5]}) == pytest.approx(0.1)
    assert compared(tmp_path, {"a": [3.0, 4.0]}, {"a": [3.0, 4.0], "new": [1.0]}) == 0
    assert compared(tmp_path, {"a": [1.0]}, {"a": [1.0]}, ({"loss": 2.0}, {"loss": 1.0})) == pytest.approx(0.5)
    assert compared(tmp_path, {"a": [torch.inf, torch.nan, 1.0]}, {"a": [torch.inf, torch.nan, 1.0]}) == 0


@pytest.mark.parametrize("value", [[3.0, torch.nan], [torch.inf, 4.0], [3.0], [[3.0, 4.0]]])
def test_what_is_not_finite_or_of_another_shape_is_infinitely_far(tmp_path: Path, value: Any) -> None:
    assert compared(tmp_path, {"a": [3.0, 4.0]}, {"a": value}) == torch.inf
    assert compared(tmp_path, {"a": value}, {"a": [3.0, 4.0]}) == torch.inf


def test_what_is_missing_or_not_a_number_must_be_equal(tmp_path: Path) -> None:
    assert compared(tmp_path, {"a": [1.0], "b": [1.0]}, {"a": [1.0]}) == torch.inf
    one = {"a": [1.0]}
    assert compared(tmp_path, one, one, ({"uplink_bytes": 1}, {"uplink_bytes": 2})) == torch.inf
    assert compared(tmp_path, one, one, ({"loss": 1.0}, {"loss": None})) == torch.inf
    assert compared(tmp_path, one, one, ({"ignored": 1}, {"ignored": 2})) == 0
