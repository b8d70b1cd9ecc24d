"""Atomic writes of files and folders, and a delayed Ctrl-C.

Content is written under a temporary name in the same folder, flushed to disk and then renamed: readers see the old file
or the new one, even after a crash. Errors are reported as a :class:`TDPFedError` that names the option and the path.
"""

import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tdpfed.errors import TDPFedError

PART = ".part"
"""The suffix of temporary names."""


def write_file(path: Path, content: str | bytes, *, field: str, mode: int = 0o666, unique: bool = False) -> None:
    """Write a file atomically; text is encoded as UTF-8. ``field`` is the option or key that an error message names.

    ``mode`` are its permissions before the umask. The temporary name is ``NAME.part``; with ``unique`` it has a random
    part, for files that several processes may write at the same time.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PART}") if unique else part_of(path)
    with write_errors(field, path):
        part.unlink(missing_ok=True)  # left by a process that was killed
        try:
            write_part(part, content, mode=mode)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def part_of(path: Path) -> Path:
    """Return the temporary name under which a file is written."""
    return path.with_name(path.name + PART)


def write_part(part: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = True) -> None:
    """Create a file, which must not exist, and with ``sync`` wait until its content is on the disk."""
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        rest = memoryview(content.encode() if isinstance(content, str) else content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(field: str, path: Path) -> Iterator[None]:
    """Report errors of the operating system as a :class:`TDPFedError` that names the field and the path."""
    try:
        yield
    except OSError as error:
        raise TDPFedError(f"{field}: cannot write to {str(path)!r} ({error.strerror or error})") from None


def write_folder(
    folder: Path, files: Mapping[str, bytes], *, field: str, mode: int = 0o777, private: str = ""
) -> list[Path]:
    """Write files into a new or empty folder and return them; only the owner can read names that end in ``private``.

    They are first written to a temporary folder next to it, which only the owner can read, and moved when complete.
    """
    folder = folder.expanduser()
    temporary: Path | None = None
    try:
        with write_errors(field, folder):
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise TDPFedError(f"{field}: {str(folder)!r} given, which is not empty; must be a new or empty folder")
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.resolve().parent))
            staged = temporary / folder.name
            staged.mkdir(mode)
            for name, content in files.items():
                place = staged / name
                place.parent.mkdir(parents=True, exist_ok=True)
                write_part(place, content, mode=0o600 if private and name.endswith(private) else 0o644, sync=False)
            if folder.exists():  # it may be a working directory: fill it, do not replace it
                for entry in staged.iterdir():
                    entry.rename(folder / entry.name)
            else:
                staged.rename(folder)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return [folder / name for name in files]


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delay a Ctrl-C inside the block until its end, so that related writes are all completed."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(received[0], None)
