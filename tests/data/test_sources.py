import hashlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import requests

from tdpfed.data import sources
from tdpfed.data.sources import SOURCES, Source, locate, obtain, places
from tdpfed.errors import TDPFedError

CONTENT = b"seven letters" * 20_000
SOURCE = Source("a.gz", ("a",), ("set", "."), "https://example.org/a.gz", hashlib.sha256(CONTENT).hexdigest())


class Response:
    """What pooch needs of an answer of requests."""

    headers: ClassVar = {"content-length": str(len(CONTENT))}

    def __init__(self, content: bytes) -> None:
        self.content = content

    def raise_for_status(self) -> None:
        pass

    def iter_content(self, chunk_size: int) -> list[bytes]:
        return [self.content[i : i + chunk_size] for i in range(0, len(self.content), chunk_size)]

    def close(self) -> None:
        pass


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes) -> list[str]:
    asked: list[str] = []

    def request(session: Any, method: str, url: str, **options: Any) -> Response:
        asked.append(url)
        return Response(content)

    monkeypatch.setattr(requests.Session, "request", request)
    return asked


def test_places_are_root_then_environment_then_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_around: Path
) -> None:
    (tmp_path / "env").mkdir()
    monkeypatch.setenv("TDPFED_DATA", str(tmp_path / "env"))
    assert places(tmp_path) == [tmp_path, tmp_path / "env", nothing_around]
    monkeypatch.setenv("TDPFED_DATA", "")
    assert places(None) == [nothing_around]


def test_places_refuses_what_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TDPFedError, match=r"data root: '.*nowhere' is not a folder"):
        places(tmp_path / "nowhere")
    monkeypatch.setenv("TDPFED_DATA", str(tmp_path / "gone"))
    with pytest.raises(TDPFedError, match=r"\$TDPFED_DATA: '.*gone' is not a folder"):
        places(None)


@pytest.mark.parametrize("folder", ["set", "."])
@pytest.mark.parametrize("file", ["a", "a.gz"])
def test_locate_finds_packed_and_unpacked_in_each_folder(tmp_path: Path, folder: str, file: str) -> None:
    assert locate(SOURCE, [tmp_path]) is None
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / file).write_bytes(b"")
    assert locate(SOURCE, [tmp_path]) == [tmp_path / folder / file]


def test_locate_needs_every_member(tmp_path: Path) -> None:
    source = Source("b.tar.gz", ("b1", "b2"), (".",), "", "")
    (tmp_path / "b1").write_bytes(b"")
    assert locate(source, [tmp_path]) is None
    (tmp_path / "b2").write_bytes(b"")
    assert locate(source, [tmp_path]) == [tmp_path / "b1", tmp_path / "b2"]


def test_earlier_places_win(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    for place in (first, second):
        place.mkdir()
        (place / "a").write_bytes(b"")
    assert locate(SOURCE, [second, first]) == [second / "a"]


def test_obtain_downloads_what_is_missing_and_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").write_bytes(b"x")
    here = Source("here.gz", ("here",), (".",), "https://example.org/here.gz", "0" * 64)
    asked = serve(monkeypatch, CONTENT)
    assert obtain("set", (here, SOURCE), tmp_path, download=True) == [[tmp_path / "here"], [tmp_path / "set/a.gz"]]
    assert asked == [SOURCE.url]
    assert (tmp_path / "set/a.gz").read_bytes() == CONTENT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "a.gz" in captured.err
    assert obtain("set", (SOURCE,), tmp_path, download=True) == [[tmp_path / "set/a.gz"]]
    assert asked == [SOURCE.url]


def test_a_download_with_a_wrong_checksum_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, CONTENT[:-1])
    with pytest.raises(TDPFedError, match=r"'set': .* https://example\.org/a\.gz \(SHA256 .*; put a\.gz into"):
        obtain("set", (SOURCE,), tmp_path, download=True)
    assert list(tmp_path.iterdir()) == []


def test_offline_says_which_files_to_put_where(tmp_path: Path) -> None:
    other = Source("c.gz", ("c",), ("elsewhere",), "https://example.org/c.gz", "0" * 64)
    wanted = rf"put a\.gz into {tmp_path}/set and c\.gz into {tmp_path}/elsewhere, .* --data-root"
    with pytest.raises(TDPFedError, match=r"https://example\.org/a\.gz \(ConnectionError\); " + wanted):
        obtain("set", (SOURCE, other), tmp_path, download=True)
    with pytest.raises(TDPFedError, match=rf"'set': not found under {tmp_path}, .*; " + wanted):
        obtain("set", (SOURCE, other), tmp_path, download=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(TDPFedError):
        obtain("set", (SOURCE,), tmp_path, download=True)
    assert (tmp_path / "set").is_dir()


def test_every_source_has_an_https_address_of_its_file_and_a_digest_of_its_own() -> None:
    unique = {source for group in SOURCES.values() for source in group}
    for source in unique:
        assert source.url.startswith("https://")
        assert source.url.endswith("/" + source.file)
        assert len(bytes.fromhex(source.sha256)) == 32
    assert len({source.sha256 for source in unique}) == len(unique) == 13
    assert sources.CIFAR10.members[-1] == "test_batch.bin"
