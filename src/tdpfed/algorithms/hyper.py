"""Hyper-parameters of a method: settings like any other, under the name that methods know them by."""

from dataclasses import MISSING
from typing import Any

from tdpfed.core.setting import check as check_hyper
from tdpfed.core.setting import setting

__all__ = ["check_hyper", "hyper"]


def hyper(
    default: Any = MISSING,
    doc: str = "",
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a hyper-parameter: its default (none: it must be given), what it means and its range."""
    return setting(default, doc, above=above, least=least, most=most, below=below)
