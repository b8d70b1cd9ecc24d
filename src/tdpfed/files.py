"""Files and folders: atomic writes, appended lines, bounded reads, locks; and a delayed Ctrl-C.

Content is written under a temporary name in the same folder, flushed to disk and then renamed: readers see the old file
or the new one, even after a crash. Files are created exclusively and symbolic links are never followed when writing, so
that a link planted in an output folder leads nowhere. Errors are reported as a :class:`TDPFedError` that names the
option and the path.
"""

import errno
import fcntl
import os
import secrets
import shutil
import signal
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    _write_all(descriptor, content, sync)


def append(path: Path, content: str) -> None:
    """Add text to a regular file, created if missing, and wait until it is on the disk; no link is followed.

    A file with a second name (a hard link) is refused too: what is added would appear under both.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EPERM, "not a regular file, or one with several names")
    _write_all(descriptor, content, sync=True)


def _write_all(descriptor: int, content: str | bytes, sync: bool) -> None:
    """Write, flush if ``sync``, and close."""
    try:
        rest = memoryview(content.encode() if isinstance(content, str) else content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path, *, most: int | None = None, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes; raises an :class:`OSError` for anything else.

    A pipe or a device is refused without waiting for it, and without ``follow`` a symbolic link is refused as well.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "Is a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file")
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"longer than {most:,} bytes")
    return content


def check_regular(path: Path) -> None:
    """Raise an :class:`OSError` unless the path is a regular file, or a link to one; the file is not opened."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def make_folder(path: Path) -> None:
    """Create a folder inside an output folder; a symbolic link in its place raises an :class:`OSError`."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, must be a folder")


class FolderLock:
    """An exclusive lock on a folder, held until :meth:`release`, or until the process ends, however it ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def release(self) -> None:
        """Let others use the folder."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def lock_folder(path: Path, *, field: str, wait: float = 0.0) -> FolderLock:
    """Create a folder if it does not exist and lock it; a folder that another process uses is refused.

    The folder itself is the lock, so nothing is written. ``wait`` is how many seconds to wait for its release.
    """
    end = time.monotonic() + wait
    with write_errors(field, path):
        while True:
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            locked = _flock(lock._descriptor, path)
            if locked and _same_file(lock._descriptor, path):
                return lock
            lock.release()
            if not locked and time.monotonic() >= end:
                raise TDPFedError(
                    f"{str(path)!r} given, which another process is using; wait until it ends, or give another folder",
                    field=field,
                    value=str(path),
                )
            time.sleep(0.0 if locked else 0.2)


def _flock(descriptor: int, path: Path) -> bool:
    """Try to lock; a file system without locks is used without, with a warning."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        warnings.warn(f"{path}: the file system has no locks ({error.strerror}); use it in one process", stacklevel=3)
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    """Whether the path still names the open folder; another process may have removed it in between."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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
        raise TDPFedError(f"cannot write to {str(path)!r} ({error.strerror or error})", field=field) from None


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


@contextmanager
def ctrl_c_asks(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed in the block; only the second press interrupts it.

    ``on_first`` is called at the first press, by the signal handler.
    """
    before = signal.getsignal(signal.SIGINT)
    asked: list[int] = []
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            before(number, frame)
        else:
            on_first()

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
