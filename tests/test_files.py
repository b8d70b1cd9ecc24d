"""Files that are written completely or not at all."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tdpfed.errors import TDPFedError
from tdpfed.files import append, part_of, read_file, write_errors, write_file, write_folder, write_part

CALLS = ("open", "write", "fsync", "replace")


@pytest.fixture(autouse=True)
def usual_umask() -> Any:
    before = os.umask(0o022)
    yield
    os.umask(before)


def failing(name: str, error: BaseException) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if name == "write":
            real(arguments[0], bytes(arguments[1][:2]))  # a part of it arrives
        raise error

    return call


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("content", ["größer\n", b"\x00\xff", "", b""])
def test_a_file_holds_what_was_written_and_nothing_lies_beside_it(
    tmp_path: Path, content: str | bytes, unique: bool
) -> None:
    for before in (None, b"a longer content than the new one"):
        path = tmp_path / "file"
        if before is not None:
            path.write_bytes(before)
        write_file(path, content, field="--out", unique=unique)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("there", [False, True])
def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, name: str, there: bool, unique: bool
) -> None:
    path = tmp_path / "file"
    if there:
        path.write_text("old")
    for error in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, failing(name, error))
            with pytest.raises((TDPFedError, KeyboardInterrupt)) as raised:
                write_file(path, "new", field="checkpoint.every", unique=unique)
        if isinstance(error, OSError):
            assert str(raised.value) == f"checkpoint.every: cannot write to {str(path)!r} (No space left on device)"
        assert {one.name: one.read_text() for one in tmp_path.iterdir()} == ({"file": "old"} if there else {})


def test_content_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    replace_ = os.replace

    def move(source: Path, target: Path) -> None:
        events.append(f"-> {target.name}")
        replace_(source, target)

    monkeypatch.setattr(os, "fsync", lambda number: events.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))
    monkeypatch.setattr(os, "replace", move)
    write_file(tmp_path / "file", "new", field="--out")
    assert events == ["file.part", "-> file"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda number, data: write(number, bytes(data[:3])))
    write_file(tmp_path / "file", "ten bytes\n", field="--out")
    assert (tmp_path / "file").read_text() == "ten bytes\n"


def test_permissions_are_those_asked_for_less_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for mode, expected in ((0o666, 0o644), (0o600, 0o600), (0o660, 0o640)):
        part_of(path).write_text("left by a process that was killed")
        part_of(path).chmod(0o777)
        write_file(path, "new", field="--out", mode=mode)
        assert path.stat().st_mode & 0o777 == expected


def test_a_temporary_name_is_never_followed_or_shared(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    part_of(tmp_path / "file").symlink_to(other)
    with pytest.raises(FileExistsError):
        write_part(part_of(tmp_path / "file"), "new")
    write_file(tmp_path / "file", "new", field="--out")
    assert (other.read_text(), (tmp_path / "file").read_text()) == ("mine", "new")


def test_places_that_cannot_be_written_to_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path / "folder", "Is a directory"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path / "none" / "below", "No such file or directory"),
    ):
        with pytest.raises(TDPFedError) as raised:
            write_file(path, "", field="--export")
        assert str(raised.value) == f"--export: cannot write to {str(path)!r} ({words})"
    with (
        pytest.raises(TDPFedError, match=r"^--out: cannot write to 'x' \(no number\)$"),
        write_errors("--out", Path("x")),
    ):
        raise OSError("no number")


def test_text_is_added_to_a_regular_file_of_one_name_alone(tmp_path: Path) -> None:
    append(tmp_path / "file", "one\n")
    append(tmp_path / "file", "zwölf\n")
    assert (tmp_path / "file").read_text() == "one\nzwölf\n"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    os.link(tmp_path / "file", tmp_path / "second name")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "second name", "file", "pipe", ".", "none/below"):
        with pytest.raises(OSError, match=r".+"):
            append(tmp_path / name, "three\n")
    assert (tmp_path / "file").read_text() == "one\nzwölf\n"
    assert not (tmp_path / "none").exists()


def test_only_regular_files_are_read_and_no_more_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "file") == read_file(tmp_path / "link", most=5) == b"12345"
    for name in ("pipe", "endless", ".", "none"):
        with pytest.raises(OSError, match=r".+"):
            read_file(tmp_path / name)
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_file(tmp_path / "file", most=4)
    with pytest.raises(OSError, match=r".+"):
        read_file(tmp_path / "link", follow=False)


def test_a_folder_is_complete_or_not_there(tmp_path: Path) -> None:
    files = {"a": b"1", "deep/b.key": b"2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", failing("write", OSError(errno.ENOSPC, "full")))
        with pytest.raises(TDPFedError, match=r"^DIR: cannot write to .*\(full\)"):
            write_folder(tmp_path / "new", files, field="DIR")
    assert not list(tmp_path.iterdir())
    made = write_folder(tmp_path / "new", files, field="DIR", mode=0o700, private=".key")
    assert [(file.read_bytes(), file.stat().st_mode & 0o777) for file in made] == [(b"1", 0o644), (b"2", 0o600)]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    with pytest.raises(TDPFedError, match=r"^--out: .*not empty"):
        write_folder(tmp_path / "new", files, field="--out")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
