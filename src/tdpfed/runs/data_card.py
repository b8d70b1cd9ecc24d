"""What a run folder keeps of its data: ``federation.json``, with the clients' ids, the classes and the normalization.

Without it a trained model could not be used on raw inputs, nor a client be asked for by its name. The file ends with
its own checksum, and the summary holds that of the whole file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tdpfed.core.inputs import Inputs, Part
from tdpfed.core.tasks import Kind
from tdpfed.data.federation import Federation
from tdpfed.data.normalization import Normalization
from tdpfed.errors import TDPFedError
from tdpfed.files import read_file
from tdpfed.runs.folder import FEDERATION, RunFolder
from tdpfed.runs.seals import is_sealed, sealed

FORMAT = 1


@dataclass(frozen=True)
class DataCard:
    """The data of a run, without the samples."""

    name: str
    digest: str
    input_shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...]  # empty if the classes have no names
    ids: tuple[str, ...]  # (K,) of the clients
    train_size: tuple[int, ...]  # (K,)
    test_size: tuple[int, ...]  # (K,)
    normalization: Normalization
    targets: Kind = "classes"
    parts: tuple[Part, ...] = ()  # what a sample holds, if a model takes several tensors
    tokens: bool = False  # whether inputs are token ids, which are not normalized
    class_counts: tuple[tuple[int, ...], ...] = ()  # (K, classes) samples of each class; empty if not counted

    @classmethod
    def of(cls, federation: Federation) -> Self:
        """Return the card of a federation."""
        counts = federation.class_counts
        return cls(
            name=federation.name,
            digest=federation.digest,
            input_shape=federation.input_shape,
            classes=federation.classes,
            class_names=federation.class_names,
            ids=federation.ids,
            train_size=tuple(federation.train_size.tolist()),
            test_size=tuple(federation.test_size.tolist()),
            normalization=federation.normalization,
            class_counts=() if counts is None else tuple(map(tuple, counts.tolist())),
            targets=federation.targets,
            parts=federation.parts,
            tokens=not federation.x.is_floating_point(),
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.class_names or tuple(map(str, range(self.classes)))

    @property
    def inputs(self) -> Inputs:
        """What a sample holds: how a model is called with it."""
        return Inputs(self.input_shape, self.parts)

    def as_text(self) -> str:
        """Return the content of the file."""
        parts = [vars(part) for part in self.parts]
        values = {**vars(self), "parts": parts, "format": FORMAT, "normalization": self.normalization.as_dict()}
        return sealed(json.dumps(values, ensure_ascii=False)) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the card in the content of a file; a damaged one raises a :class:`ValueError`."""
        if is_sealed(text) is not True:
            raise ValueError("its checksum is wrong or missing")
        values: dict[str, Any] = json.loads(text)
        if values.pop("format", None) != FORMAT:
            raise ValueError(f"of another format than {FORMAT}, which this version reads")
        values.pop("sha256")
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        parts = tuple(Part(one["name"], tuple(one["shape"]), one["tokens"]) for one in values.get("parts", ()))
        if counts := lists.get("class_counts"):
            lists["class_counts"] = tuple(map(tuple, counts))
        values |= {**lists, "parts": parts, "normalization": Normalization.from_dict(values["normalization"])}
        made = cls(**values)
        made._check()
        return made

    def _check(self) -> None:
        """Raise a :class:`ValueError` unless there is one value of each kind for each client."""
        names = all(type(name) is str for name in (self.name, *self.ids, *self.class_names))
        rows = (self.train_size, self.test_size, *self.class_counts)
        whole = all(type(n) is int and 0 <= n < 2**53 for n in (self.classes, *(n for row in rows for n in row)))
        sizes = {len(self.train_size), len(self.test_size), len(self.class_counts) or len(self.ids)}
        if not (names and whole and sizes == {len(self.ids)}):
            raise ValueError("not a name and a size of each client")
        if {len(self.class_names) or self.classes, *map(len, self.class_counts)} > {self.classes}:
            raise ValueError("not a value for each class")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the card in a run folder."""
        file = path / FEDERATION
        try:
            return cls.from_text(read_file(file).decode())
        except OSError as error:
            raise TDPFedError(f"cannot read {str(file)!r} ({error.strerror})", field="RUN") from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TDPFedError(f"{str(file)!r} is damaged ({error})", field="RUN") from None


def keep(folder: RunFolder, federation: Federation) -> list[str]:
    """Write the card of a run's data into its folder, unless it is there; return warnings about a damaged one.

    A card of other clients is refused.
    """
    card = DataCard.of(federation)
    warnings: list[str] = []
    if (folder.path / FEDERATION).exists():
        try:
            found = DataCard.read(folder.path)
        except TDPFedError as error:
            warnings.append(f"{error.reason}; written again")
        else:
            if found.ids != card.ids or found.class_names != card.class_names:
                raise TDPFedError(
                    f"{FEDERATION}: clients or classes in {str(folder.path)!r} have other names than those of the data"
                )
            return warnings
    folder.write(FEDERATION, card.as_text())
    return warnings
