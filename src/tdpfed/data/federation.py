"""All samples of all clients as one tensor on the device; a client is a range of its rows.

There is no loader between the data and a step: a batch is ``x[train_start[k] + draw]``. Normalization statistics are
computed from the training samples of all clients only.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tdpfed.core.draws import held_out_sizes
from tdpfed.core.extras import held_out_rows
from tdpfed.data import partition
from tdpfed.data.datasets import Dataset
from tdpfed.data.formats import count_classes
from tdpfed.data.normalization import RAW, Normalization, normalized
from tdpfed.data.partition import Parts
from tdpfed.errors import TDPFedError, nearest, shown, unknown, wrong

Augment = Literal["none", "flip", "flip-shift"]
AUGMENT = get_args(Augment)


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of K clients: first all training samples, client by client, then all test samples in the same order."""

    name: str
    x: Tensor  # (N, *input_shape), floating
    y: Tensor  # (N,) int64
    train_start: Tensor  # (K,) int64
    train_size: Tensor  # (K,) int64, at least 1
    test_start: Tensor  # (K,) int64
    test_size: Tensor  # (K,) int64, may be 0
    classes: int
    augment: str = "none"  # how training images are changed when they are drawn
    validation: float = 0.0  # share of each client's training samples that is held out
    digest: str = ""  # SHA-256 sum of the samples as given, their labels and owners; empty if made by hand
    ids: tuple[str, ...] = ()  # (K,) the clients' names, all different; "0" to "K - 1" if none are given
    class_names: tuple[str, ...] = ()  # by label; empty if the classes have no names
    normalization: Normalization = RAW  # what was applied to the raw inputs
    settings: Mapping[str, Any] = field(default_factory=dict)  # as make_federation was given them; empty: made by hand

    def __post_init__(self) -> None:
        if not self.ids:
            object.__setattr__(self, "ids", tuple(map(str, range(self.clients))))
        if len(self.ids) != self.clients or len(set(self.ids)) != self.clients:
            raise TDPFedError(
                f"{len(set(self.ids))} different names; allowed: one for each of {self.clients} clients", field="ids"
            )
        if self.class_names and (len(self.class_names) != self.classes or not all(self.class_names)):
            raise TDPFedError(
                f"{len(self.class_names)} names; allowed: one for each of {self.classes} classes", field="class_names"
            )

    def __repr__(self) -> str:
        train, test = int(self.train_size.sum()), int(self.test_size.sum())
        shape = "x".join(map(str, self.input_shape))
        size = f"{self.clients} clients, {train} + {test} samples of {shape}, {self.classes} classes"
        return f"Federation({self.name!r}: {size})"

    @property
    def clients(self) -> int:
        """K, the number of clients."""
        return len(self.train_size)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.x.device

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Return the federation on ``device``, its samples as ``dtype`` if one is given."""
        dtype = _floating(dtype or self.x.dtype)
        ranges = ("y", "train_start", "train_size", "test_start", "test_size")
        moved = {field: getattr(self, field).to(device) for field in ranges}
        return replace(self, x=self.x.to(device, dtype), **moved)

    def with_augment(self, kind: str) -> Self:
        """Return the federation with training images randomly mirrored ("flip") and shifted ("flip-shift")."""
        if kind not in AUGMENT:
            raise unknown("augment", kind, AUGMENT)
        if kind != "none" and len(self.input_shape) != 3:
            shape = self.input_shape
            raise TDPFedError(
                f"{kind!r} for samples of shape {shape}; allowed: for images (channels, H, W) only", field="augment"
            )
        return replace(self, augment=kind)

    def with_validation(self, share: float) -> Self:
        """Return the federation with a share of each client's training samples held out, at least one sample."""
        if not 0 <= share < 1:
            raise wrong("validation", share, "at least 0 and below 1")
        if share and bool((held_out_sizes(self.train_size, share) >= self.train_size).any()):
            client = int(self.train_size.argmin())
            raise wrong(
                "validation", share, f"0, or with at least 2 training samples for every client: client {client} has 1"
            )
        return replace(self, validation=share)

    def held_out(self, seed: int, share: float) -> Self:
        """Return the samples that a run with this seed holds out, as the clients' test samples."""
        rows, held = (
            held_out_rows(seed, self.train_start, self.train_size, share),
            held_out_sizes(self.train_size, share),
        )
        none = torch.zeros_like(held)
        return replace(
            self, x=self.x[rows], y=self.y[rows], train_start=none, train_size=none, test_start=held.cumsum(0) - held,
            test_size=held,
        )  # fmt: skip

    def only(self, clients: Tensor) -> Self:
        """Return the federation with the samples of some clients only; sizes of the others are kept."""
        clients = clients.to(self.device)
        index, starts, begin = [], dict[str, Any](), 0
        for kind in ("train", "test"):
            start, size = getattr(self, f"{kind}_start")[clients], getattr(self, f"{kind}_size")[clients]
            first = size.cumsum(0) - size
            inside = torch.arange(int(size.sum()), device=self.device) - first.repeat_interleave(size)
            index.append(start.repeat_interleave(size) + inside)
            starts[f"{kind}_start"] = torch.zeros_like(self.train_start).index_copy(0, clients, begin + first)
            begin += len(inside)
        kept = torch.cat(index)
        return replace(self, x=self.x[kept], y=self.y[kept], **starts)

    def position(self, client: str) -> int:
        """Return the number of the client with this id."""
        try:
            return self.ids.index(client)
        except ValueError:
            raise unknown_client(client, self.ids) from None

    def client(self, k: int | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return views of client k's x_train, y_train, x_test, y_test; a text is a client's id."""
        k = self.position(k) if isinstance(k, str) else k
        if not 0 <= k < self.clients:
            raise TDPFedError(f"{k!r}; allowed: 0 to {self.clients - 1}", field="client")
        train = slice(int(self.train_start[k]), int(self.train_start[k] + self.train_size[k]))
        test = slice(int(self.test_start[k]), int(self.test_start[k] + self.test_size[k]))
        return self.x[train], self.y[train], self.x[test], self.y[test]

    @classmethod
    def from_parts(
        cls,
        dataset: Dataset,
        parts: Parts,
        *,
        normalize: str = "standard",
        dtype: torch.dtype = torch.float32,
        ids: Sequence[str] = (),
    ) -> Self:
        """Make a federation from a data set: (training, test) indices for each client, and the clients' names."""
        x, y = _tensor(dataset.x), _tensor(dataset.y)
        made = cls._gather(dataset.name, x, y, parts, dataset.classes, normalize, dtype)
        return replace(made, ids=tuple(ids), class_names=dataset.class_names)

    @classmethod
    def from_tensors(
        cls,
        x: Tensor | NDArray[Any],
        y: Tensor | NDArray[Any],
        client_ids: Tensor | NDArray[Any] | Sequence[Any],
        *,
        test_mask: Tensor | NDArray[Any] | None = None,
        test_fraction: float = 0.25,
        classes: int | None = None,
        normalize: str = "standard",
        seed: int = 0,
        name: str = "custom",
        dtype: torch.dtype = torch.float32,
        class_names: Sequence[str] = (),
    ) -> Self:
        """Make a federation from your own data: samples ``x`` (N, ...), labels ``y`` (N,) and client ids (N,).

        Ids may be numbers or strings; client k is the k-th smallest and keeps its id. Test samples are those of
        ``test_mask``, or a random ``test_fraction`` of each client's. ``normalize``: "standard" (mean 0, variance 1 per
        channel of an image, per feature of a flat sample), "feature" (the same per pixel), "unit" (bytes to 0..1) or
        "none".
        """
        x, y = _tensor(x).detach(), _tensor(y)
        ids = client_ids.cpu().numpy() if isinstance(client_ids, Tensor) else np.asarray(client_ids)
        mask = None if test_mask is None else torch.as_tensor(test_mask).cpu().numpy()
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise TDPFedError(f"{y.dtype}; allowed: whole numbers", field="y")
        if mask is not None and mask.dtype != np.bool_:
            raise TDPFedError(f"{mask.dtype}; allowed: bool", field="test_mask")
        for argument, values in (("y", y), ("client_ids", ids), ("test_mask", mask)):
            if values is not None and tuple(values.shape) != tuple(x.shape[:1]):
                raise TDPFedError(
                    f"shape {tuple(values.shape)}; allowed: one value for each of the {len(x)} samples of x",
                    field=argument,
                )
        if len(x) == 0:
            raise TDPFedError("no samples; allowed: 1 or more", field="x")
        owned = partition.natural(ids)
        parts = partition.split(owned, test_fraction, seed) if mask is None else partition.split_official(owned, mask)
        classes = len(class_names) if class_names and classes is None else classes
        classes = count_classes(y.numpy(force=True)) if classes is None else classes
        made = cls._gather(name, x, y, parts, classes, normalize, dtype)
        return replace(made, ids=partition.names(ids), class_names=tuple(class_names))

    @classmethod
    def _gather(
        cls, name: str, x: Tensor, y: Tensor, parts: Parts, classes: int, normalize: str, dtype: torch.dtype
    ) -> Self:
        _floating(dtype)
        if x.ndim < 2 or x.is_complex() or 0 in x.shape[1:]:
            raise TDPFedError(
                f"{x.dtype} of shape {tuple(x.shape)}; allowed: real numbers of shape (samples, ...)", field="x"
            )
        if not parts:
            raise TDPFedError("0; allowed: 1 or more", field="clients")
        y = y.to(x.device).long()
        if not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise TDPFedError(f"labels from {y.min()} to {y.max()}; allowed: 0 to {classes - 1}", field="y")
        sizes = torch.tensor([[len(train), len(test)] for train, test in parts], device=x.device)
        for k, count in enumerate(sizes[:, 0].tolist()):
            if count == 0:
                raise TDPFedError(f"client {k}: 0 training samples; allowed: 1 or more")
        order = np.concatenate([part for kind in zip(*parts, strict=True) for part in kind]).astype(np.int64)
        index = torch.from_numpy(order).to(x.device)
        trained = int(sizes[:, 0].sum())
        starts = sizes.cumsum(0) - sizes
        inputs, normalization = normalized(x, index, trained, normalize, dtype)
        return cls(
            name=name,
            x=inputs,
            y=y[index],
            train_start=starts[:, 0].contiguous(),
            train_size=sizes[:, 0].contiguous(),
            test_start=(trained + starts[:, 1]).contiguous(),
            test_size=sizes[:, 1].contiguous(),
            classes=classes,
            digest=_digest(x, y, sizes, order),
            normalization=normalization,
        )


def unknown_client(given: object, ids: Sequence[str]) -> TDPFedError:
    """Return the error for a client that there is not, with a few of those there are."""
    near = nearest(given, ids)
    shown_ids = ", ".join(ids[:5]) + (f", ... ({len(ids):,} clients)" if len(ids) > 5 else "")
    hint = f", did you mean {near!r}?" if near else ";"
    return TDPFedError(
        f"unknown {shown(given)}{hint} Allowed: {shown_ids}", field="client", value=given, allowed=list(ids)
    )


def _digest(x: Tensor, y: Tensor, sizes: Tensor, order: NDArray[np.int64]) -> str:
    """Return the SHA-256 sum of samples, labels, and which client has which for training and for tests.

    Taken before normalization, whose last bits may depend on the machine, and while bytes are still bytes.
    """
    found = hashlib.sha256(f"{x.dtype} {tuple(x.shape)} {tuple(sizes.shape)}".encode())
    for values in (x.detach(), y, sizes):
        found.update(values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    found.update(order.data)
    return found.hexdigest()


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise TDPFedError(f"{dtype}; allowed: a floating-point type", field="dtype")
    return dtype


def _tensor(values: Tensor | NDArray[Any]) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements=["C", "W"]))
