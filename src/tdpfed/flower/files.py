"""A new folder with files in it, whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tdpfed.errors import TDPFedError


def write_folder(folder: Path, files: Mapping[str, bytes], *, mode: int = 0o777, private: str = "") -> list[Path]:
    """Write files into a new or empty folder and return them; only the owner reads names that end in ``private``.

    They are written beside it, where nobody else can look, and moved there when all are complete.
    """
    folder = folder.expanduser()
    beside: Path | None = None
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise TDPFedError(f"DIR: {str(folder)!r} is already there and not empty; give a new or empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.resolve().parent))
        whole = beside / folder.name
        whole.mkdir(mode)
        for name, content in files.items():
            place = whole / name
            place.parent.mkdir(parents=True, exist_ok=True)
            allowed = 0o600 if private and name.endswith(private) else 0o644
            with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, allowed), "wb") as file:
                file.write(content)
        if folder.exists():  # it may be where somebody stands: fill it, do not replace it
            for entry in whole.iterdir():
                entry.rename(folder / entry.name)
        else:
            whole.rename(folder)
    except OSError as error:
        raise TDPFedError(f"DIR: cannot write to {str(folder)!r} ({error.strerror})") from None
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
    return [folder / name for name in files]
