"""Small matrices that are treated as large ones."""

from collections.abc import Iterator

import pytest

from tdpfed.fast import padded


@pytest.fixture
def any_matrix_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tdpfed.fast.factor_algebra.SMALL_MATRIX_VALUES", 1)
    monkeypatch.setattr("tdpfed.fast.padded.SMALL_MATRIX_VALUES", 1)
    padded.padded_plan.cache_clear()
    yield
    padded.padded_plan.cache_clear()
