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
from tdpfed.core.inputs import Inputs, Part
from tdpfed.core.tasks import KINDS, Kind
from tdpfed.data import partition
from tdpfed.data.datasets import Dataset
from tdpfed.data.normalization import RAW, Normalization, normalized
from tdpfed.data.partition import Parts
from tdpfed.data.targets import checked_targets, count_outputs, kind_of
from tdpfed.errors import TDPFedError, nearest, shown, unknown, wrong

Augment = Literal["none", "flip", "flip-shift"]
AUGMENT = get_args(Augment)

Values = Tensor | NDArray[Any]


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of K clients: first all training samples, client by client, then all test samples in the same order."""

    name: str
    x: Tensor  # (N, *input_shape), floating; int64 for token ids
    y: Tensor  # (N,) or (N, ...): int64 for classes and tokens, floating for numbers and labels
    train_start: Tensor  # (K,) int64
    train_size: Tensor  # (K,) int64, at least 1
    test_start: Tensor  # (K,) int64
    test_size: Tensor  # (K,) int64, may be 0
    classes: int  # of labels, tokens or numbers their number: the outputs that a model needs
    augment: str = "none"  # how training images are changed when they are drawn
    validation: float = 0.0  # share of each client's training samples that is held out
    digest: str = ""  # SHA-256 sum of the samples as given, their labels and owners; empty if made by hand
    ids: tuple[str, ...] = ()  # (K,) the clients' names, all different; "0" to "K - 1" if none are given
    class_names: tuple[str, ...] = ()  # by label; empty if the classes have no names
    normalization: Normalization = RAW  # what was applied to the raw inputs
    targets: Kind = "classes"
    parts: tuple[Part, ...] = ()  # what a row of x holds, if a model takes several tensors
    class_counts: Tensor | None = None  # (K, classes) samples of each class, for training and tests; None: not counted
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
        size = f"{self.clients} clients, {train} + {test} samples of {shape}, {self.classes} {self.targets}"
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
    def inputs(self) -> Inputs:
        """What a sample holds: how a model is called with it."""
        return Inputs(self.input_shape, self.parts)

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.x.device

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Return the federation on ``device``, its samples as ``dtype`` if one is given; whole numbers stay whole."""
        ranges = ("train_start", "train_size", "test_start", "test_size")
        moved = {name: getattr(self, name).to(device) for name in ranges}
        for name in ("x", "y"):
            values: Tensor = getattr(self, name)
            wanted = _floating(dtype) if dtype is not None and values.is_floating_point() else values.dtype
            moved[name] = values.to(device, wanted)
        return replace(self, **moved)

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
        made = cls._gather(dataset.name, x, y, parts, dataset.classes, normalize, dtype, dataset.targets)
        return replace(made, ids=tuple(ids), class_names=dataset.class_names)

    @classmethod
    def from_tensors(
        cls,
        x: Values | Mapping[str, Values] | tuple[Values, ...],
        y: Values,
        client_ids: Values | Sequence[Any],
        *,
        test_mask: Values | None = None,
        test_fraction: float = 0.25,
        classes: int | None = None,
        targets: Kind | None = None,
        normalize: str = "standard",
        seed: int = 0,
        name: str = "custom",
        dtype: torch.dtype = torch.float32,
        class_names: Sequence[str] = (),
    ) -> Self:
        """Make a federation from your own data: samples ``x`` (N, ...), targets ``y`` (N, ...) and client ids (N,).

        ``x`` may be a dict or tuple of tensors, with which a model is called by name or by position. Inputs of int64 or
        int32 are token ids, which stay as they are. ``targets`` says what ``y`` is, where :func:`kind_of` would guess
        wrong. Ids may be numbers or strings; client k is the k-th smallest and keeps its id. Test samples are those of
        ``test_mask``, or a random ``test_fraction`` of each client's. ``normalize``: "standard" (mean 0, variance 1 per
        channel of an image, per feature of a flat sample), "feature" (the same per pixel), "unit" (bytes to 0..1),
        "symmetric" (to -1..1) or "none".
        """
        several = isinstance(x, Mapping | tuple)
        given = [_tensor(one).detach() for one in (x.values() if isinstance(x, Mapping) else x if several else (x,))]  # type: ignore[arg-type]
        names = list(x) if isinstance(x, Mapping) else None
        y = _tensor(y)
        if y.is_complex():
            raise TDPFedError(f"{y.dtype}; allowed: whole or real numbers", field="y")
        if targets is not None and targets not in KINDS:
            raise unknown("targets", targets, KINDS)
        ids = client_ids.cpu().numpy() if isinstance(client_ids, Tensor) else np.asarray(client_ids)
        mask = None if test_mask is None else torch.as_tensor(test_mask).cpu().numpy()
        if mask is not None and mask.dtype != np.bool_:
            raise TDPFedError(f"{mask.dtype}; allowed: bool", field="test_mask")
        count = len(given[0]) if given and given[0].ndim else 0
        for argument, values in (("client_ids", ids), ("test_mask", mask)):
            if values is not None and tuple(values.shape) != (count,):
                raise TDPFedError(
                    f"shape {tuple(values.shape)}; allowed: one value for each of the {count} samples of x",
                    field=argument,
                )
        if y.ndim < 1 or len(y) != count:
            raise TDPFedError(
                f"shape {tuple(y.shape)}; allowed: a target for each of the {count} samples of x", field="y"
            )
        if count == 0:
            raise TDPFedError("no samples; allowed: 1 or more", field="x")
        kind = kind_of(y) if targets is None else targets
        owned = partition.natural(ids)
        parts = partition.split(owned, test_fraction, seed) if mask is None else partition.split_official(owned, mask)
        classes = len(class_names) if class_names and classes is None else classes
        classes = count_outputs(y, kind) if classes is None else classes
        if several:
            x = dict(zip(names, given, strict=True)) if names is not None else tuple(given)
        made = cls._gather(name, x if several else given[0], y, parts, classes, normalize, dtype, kind)  # type: ignore[arg-type]
        return replace(made, ids=partition.names(ids), class_names=tuple(class_names))

    @classmethod
    def _gather(
        cls,
        name: str,
        x: Tensor | Mapping[str, Tensor] | tuple[Tensor, ...],
        y: Tensor,
        parts: Parts,
        classes: int,
        normalize: str,
        dtype: torch.dtype,
        kind: Kind = "classes",
    ) -> Self:
        _floating(dtype)
        several = Inputs((), ()) if isinstance(x, Tensor) else Inputs.of(x)
        tensors = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
        for one in tensors:
            if one.ndim < (2 if isinstance(x, Tensor) else 1) or one.is_complex() or 0 in one.shape[1:]:
                raise TDPFedError(
                    f"{one.dtype} of shape {tuple(one.shape)}; allowed: real numbers of shape (samples, ...)", field="x"
                )
        if not parts:
            raise TDPFedError("0; allowed: 1 or more", field="clients")
        device = tensors[0].device
        y = checked_targets(y.to(device), kind, classes, dtype)
        sizes = torch.tensor([[len(train), len(test)] for train, test in parts], device=device)
        for k, count in enumerate(sizes[:, 0].tolist()):
            if count == 0:
                raise TDPFedError(f"client {k}: 0 training samples; allowed: 1 or more")
        order = np.concatenate([part for kind in zip(*parts, strict=True) for part in kind]).astype(np.int64)
        index = torch.from_numpy(order).to(device)
        trained = int(sizes[:, 0].sum())
        starts = sizes.cumsum(0) - sizes
        made = [normalized(one, index, trained, normalize, dtype) for one in tensors]
        if several.parts:
            inputs = several.pack([one for one, _ in made], dtype)
            normalization = Normalization.joined([found for _, found in made], several)
        else:
            inputs, normalization = made[0]
        return cls(
            name=name,
            x=inputs,
            y=y[index],
            train_start=starts[:, 0].contiguous(),
            train_size=sizes[:, 0].contiguous(),
            test_start=(trained + starts[:, 1]).contiguous(),
            test_size=sizes[:, 1].contiguous(),
            classes=classes,
            digest=_digest(tensors, y, sizes, order),
            normalization=normalization,
            targets=kind,
            parts=several.parts,
            class_counts=_class_counts(y[index], sizes, classes, kind),
        )


def _class_counts(y: Tensor, sizes: Tensor, classes: int, kind: Kind) -> Tensor | None:
    """Return how many samples of each class every client has; ``sizes`` (K, 2) are those of training and test parts.

    A sample may have several labels, and counts for each. Numbers and tokens are not counted.
    """
    if kind not in ("classes", "labels"):
        return None
    clients = torch.arange(len(sizes), device=y.device).repeat(2).repeat_interleave(sizes.T.flatten())
    if kind == "labels":
        return torch.zeros_like(y[: len(sizes)]).index_add(0, clients, y).long().cpu()
    return (clients * classes + y).bincount(minlength=len(sizes) * classes).reshape(-1, classes).cpu()


def unknown_client(given: object, ids: Sequence[str]) -> TDPFedError:
    """Return the error for a client that there is not, with a few of those there are."""
    near = nearest(given, ids)
    shown_ids = ", ".join(ids[:5]) + (f", ... ({len(ids):,} clients)" if len(ids) > 5 else "")
    hint = f", did you mean {near!r}?" if near else ";"
    return TDPFedError(
        f"unknown {shown(given)}{hint} Allowed: {shown_ids}", field="client", value=given, allowed=list(ids)
    )


def _digest(x: Sequence[Tensor], y: Tensor, sizes: Tensor, order: NDArray[np.int64]) -> str:
    """Return the SHA-256 sum of samples, labels, and which client has which for training and for tests.

    Taken before normalization, whose last bits may depend on the machine, and while bytes are still bytes.
    """
    words = "".join(f"{one.dtype} {tuple(one.shape)} " for one in x)
    found = hashlib.sha256(f"{words}{tuple(sizes.shape)}".encode())
    for values in (*(one.detach() for one in x), y, sizes):
        found.update(values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    found.update(order.data)
    return found.hexdigest()


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise TDPFedError(f"{dtype}; allowed: a floating-point type", field="dtype")
    return dtype


def _tensor(values: Tensor | NDArray[Any]) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements=["C", "W"]))
