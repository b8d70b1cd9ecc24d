from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_around(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data of this machine: an empty cache, no $TDPFED_DATA, and no network."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no network in tests")

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.delenv("TDPFED_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda project: cache / project)
    monkeypatch.setattr("requests.Session.request", refuse)
    return cache / "tdpfed"
