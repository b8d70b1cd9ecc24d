"""Build a federation from plain options: load, partition, limit sizes, split, normalize."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from numpy.typing import NDArray

from tdpfed.data import partition as partitions
from tdpfed.data.datasets import Dataset, load
from tdpfed.data.federation import Federation
from tdpfed.data.partition import Indices
from tdpfed.errors import TDPFedError, unknown, wrong

Partition = Literal["iid", "classes", "classes-in-turn", "classes-in-groups", "dirichlet", "natural"]
Split = Literal["client", "official", "time"]
PARTITIONS, SPLITS = get_args(Partition), get_args(Split)
BY_CLASS = ("classes", "classes-in-turn", "classes-in-groups")
"""Partitions with a number of classes per client."""
SKEWED = ("iid", "classes", "classes-in-turn")
"""Partitions with log-normal shares."""


def make_federation(
    dataset: str = "digits",
    *,
    root: Path | None = None,
    download: bool = True,
    options: Mapping[str, Any] | None = None,
    partition: str | None = None,
    clients: int | None = None,
    per_client: int | None = None,
    alpha: float | None = None,
    capped: bool = False,
    size_skew: float | None = None,
    min_samples: int = 1,
    max_samples: int | None = None,
    split: str | None = None,
    test_fraction: float = 0.25,
    normalize: str = "standard",
    augment: str = "none",
    validation: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Federation:
    """Load a data set and distribute its samples to clients.

    ``partition`` defaults to natural if the data have natural clients, otherwise to classes, or to iid if there
    are no classes; ``clients`` defaults to 20, or to all natural clients. ``per_client`` (default 2) applies to all
    kinds of classes, ``alpha`` (default 0.5) and ``capped`` to dirichlet, ``size_skew`` to iid (default 0), classes and
    classes-in-turn (default 0.5): with another partition they are errors. ``split`` "client" holds out
    ``test_fraction`` of each client's samples at random, "time" the last of them, "official" the samples of the data
    set's own test part; the defaults are official for your own file with a ``test_mask``, time for data in the order of
    time, client for others. ``augment`` changes training images when they are drawn.
    ``validation`` is the share of each client's training samples that a run holds out.
    ``options`` are passed to the data set's loader.
    """
    settings = {name: value for name, value in locals().items() if name not in ("root", "download", "dtype")}
    if partition is not None and partition not in PARTITIONS:
        raise unknown("partition", partition, PARTITIONS)
    if split is not None and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    given = dict(options or {})
    if dataset == "synthetic":
        given = {"seed": seed, **({"clients": clients} if clients and partition in (None, "natural") else {}), **given}
    data = load(dataset, root, download=download, **given)
    strata = data.y if data.targets == "classes" else data.strata
    usual = "natural" if data.owner is not None else "iid" if strata is None else "classes"
    kind = partition or usual
    if strata is None and kind not in ("iid", "natural"):
        raise wrong("partition", kind, f"iid or natural for {data.name!r}, whose targets are {data.targets}")
    for field, value, fitting in (
        ("alpha", alpha, ("dirichlet",)),
        ("capped", capped or None, ("dirichlet",)),
        ("per_client", per_client, BY_CLASS),
        ("size_skew", size_skew, SKEWED),
    ):
        unsaid = field == "per_client" and partition is None  # then it is for the case that the data have no clients
        if value is not None and kind not in fitting and not unsaid:
            raise TDPFedError(f"{value!r} with partition {kind!r}; allowed: with {', '.join(fitting)}", field=field)
    ids: Sequence[str] = ()
    if kind == "natural":
        parts, ids = _natural(data, clients, seed)
    else:
        parts = _assigned(
            data.y if strata is None else strata, kind, 20 if clients is None else clients,
            2 if per_client is None else per_client, 0.5 if alpha is None else alpha, capped, size_skew,
            min_samples, seed,
        )  # fmt: skip
    parts = partitions.bounded(parts, seed, min_samples=min_samples, max_samples=max_samples)
    own_mask = Path(dataset).suffix in (".npz", ".parquet") and data.official_test is not None
    split = split or ("official" if own_mask else "time" if data.in_time else "client")
    if split == "client":
        pairs = partitions.split(parts, test_fraction, seed)
    elif split == "time":
        pairs = partitions.split_in_time(parts, test_fraction)
    elif data.official_test is None:
        raise TDPFedError(
            f"'official' for {data.name!r}, which has no official test part; allowed: client, time", field="split"
        )
    else:
        pairs = partitions.split_official(parts, data.official_test)
    made = Federation.from_parts(data, pairs, normalize=normalize, dtype=dtype, ids=ids).with_augment(augment)
    made = made.with_validation(validation)
    return replace(made, settings=settings) if dtype == torch.float32 else made  # a configuration names no type


def _assigned(
    labels: NDArray[Any],
    kind: str,
    clients: int,
    per_client: int,
    alpha: float,
    capped: bool,
    size_skew: float | None,
    min_samples: int,
    seed: int,
) -> list[Indices]:
    skew = {} if size_skew is None else {"size_skew": size_skew}
    if kind == "iid":
        return partitions.iid(labels, clients, seed, min_samples=min_samples, **skew)
    if kind == "dirichlet":
        return partitions.dirichlet(labels, clients, alpha, seed, min_samples, capped=capped)
    if kind == "classes-in-groups":
        return partitions.class_groups(labels, clients, per_client, seed, min_samples=min_samples)
    in_turn = kind == "classes-in-turn"
    return partitions.classes(labels, clients, per_client, seed, in_turn=in_turn, min_samples=min_samples, **skew)


def _natural(data: Dataset, clients: int | None, seed: int) -> tuple[list[Indices], Sequence[str]]:
    """Return the data's natural clients and their ids: all of them, or the given number, drawn with the seed."""
    if data.owner is None:
        raise TDPFedError(
            f"'natural' for {data.name!r}, which has no natural clients; allowed: "
            f"{', '.join(kind for kind in PARTITIONS if kind != 'natural')}",
            field="partition",
        )
    parts, ids = partitions.natural(data.owner), partitions.names(data.owner)
    if clients is None:
        return parts, ids
    if not 1 <= clients <= len(parts):
        raise TDPFedError(
            f"{clients!r}; allowed: 1 to {len(parts)}, the natural clients of {data.name!r}", field="clients"
        )
    chosen = sorted(partitions.generator(seed).choice(len(parts), clients, replace=False))
    return [parts[k] for k in chosen], [ids[k] for k in chosen]
