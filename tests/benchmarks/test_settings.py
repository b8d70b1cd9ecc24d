"""Runs belong to a study if their configuration has the same effect."""

from settings import _effective

from tdpfed.config import Config, load_config


def down(codec: str, *values: str) -> Config:
    return load_config("digits", ["algorithm.name=fedavg", f"wire.down_codec={codec}", *values])


def test_a_setting_without_effect_makes_no_difference() -> None:
    assert _effective(down("int8")) == _effective(down("int4"))
    factored = ("wire.update=factors", "wire.down=factors")
    assert _effective(down("int8", *factored)) != _effective(down("int4", *factored))
    assert _effective(down("int8")) != _effective(down("int8", "run.rounds=3"))
