from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdpfed.data import Federation, classes, load, make_federation, split
from tdpfed.errors import TDPFedError

from .files import write_mnist


def sizes(fed: Federation) -> list[int]:
    return (fed.train_size + fed.test_size).tolist()


def held(fed: Federation) -> list[set[int]]:
    return [set(torch.cat(fed.client(k)[1::2]).tolist()) for k in range(fed.clients)]


@pytest.mark.parametrize(
    ("given", "partition", "allowed"),
    [
        ({"alpha": 0.1}, None, "dirichlet"), ({"alpha": 0.1}, "iid", "dirichlet"),
        ({"per_client": 3}, "dirichlet", "classes"), ({"size_skew": 1.0}, "dirichlet", "iid"),
    ],
)  # fmt: skip
def test_what_another_partition_would_ignore_is_refused(
    given: dict[str, float], partition: str | None, allowed: str
) -> None:
    with pytest.raises(TDPFedError, match=rf"with partition .*; allowed: with {allowed}"):
        make_federation(partition=partition, clients=4, **given)  # type: ignore[arg-type]


def test_the_default_is_digits_two_classes_to_each_of_twenty() -> None:
    fed = make_federation()
    assert (fed.name, fed.clients, fed.input_shape, fed.classes) == ("digits", 20, (1, 8, 8), 10)
    assert all(len(mine) <= 2 for mine in held(fed))
    assert sum(sizes(fed)) == 1797
    assert int(fed.test_size.sum()) / 1797 == pytest.approx(0.25, abs=0.01)
    data = load("digits")
    parts = split(classes(data.y, 20, 2, 0), 0.25, 0)
    assert torch.equal(fed.x, Federation.from_parts(data, parts).x)


def test_options_reach_their_stage() -> None:
    base: dict[str, Any] = {"clients": 5, "seed": 3}
    assert max(sizes(make_federation(partition="iid", **base))) == 360
    skewed = sizes(make_federation(partition="iid", size_skew=1.0, **base))
    assert max(skewed) > 2 * min(skewed)
    assert all(len(mine) == 3 for mine in held(make_federation(per_client=3, **base)))
    turns = held(make_federation(partition="classes-in-turn", **{**base, "clients": 10}))
    assert [set(mine) for mine in turns] == [{k, (k + 1) % 10} for k in range(10)]
    groups = held(make_federation(partition="classes-in-groups", **{**base, "clients": 10}))
    assert [set(mine) for mine in groups] == [{2 * (k // 2), 2 * (k // 2) + 1} for k in range(10)]
    skew = [sizes(make_federation(partition="dirichlet", alpha=0.1, capped=capped, **base)) for capped in (False, True)]
    assert np.std(skew[1]) < np.std(skew[0])
    with pytest.raises(TDPFedError, match=r"capped: True with partition 'classes'; allowed: with dirichlet"):
        make_federation(capped=True, **base)
    capped = make_federation(max_samples=40, test_fraction=0.5, normalize="unit", dtype=torch.float64, **base)
    assert sizes(capped) == [40] * 5
    assert capped.test_size.tolist() == [20] * 5
    assert capped.x.dtype == torch.float64
    assert [float(bound) for bound in capped.x.aminmax()] == [0, 1]
    uneven = make_federation(partition="dirichlet", alpha=0.1, min_samples=15, **base)
    even = make_federation(partition="dirichlet", alpha=1e4, **base)
    assert min(sizes(uneven)) >= 15
    assert np.std(sizes(uneven)) > 10 * np.std(sizes(even))


def test_the_seed_decides_all() -> None:
    one, same, other = (make_federation(max_samples=50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.x, same.x)
    assert torch.equal(one.y, same.y)
    assert not torch.equal(one.y, other.y)


def test_natural_clients_are_the_default_where_there_are_some() -> None:
    fed = make_federation("synthetic", clients=6, seed=4, options={"dimension": 8})
    data = load("synthetic", clients=6, dimension=8, seed=4)
    assert data.owner is not None
    assert sizes(fed) == np.bincount(data.owner).tolist()
    assert make_federation("synthetic").clients == 20
    again = make_federation("synthetic", clients=4, partition="iid", options={"clients": 9, "seed": 5})
    assert again.clients == 4
    assert len(again.x) == len(load("synthetic", clients=9, seed=5).x)


def test_fewer_natural_clients_are_drawn_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    owner = np.repeat(np.arange(12), 5)
    np.savez(path, x=owner[:, None], y=np.zeros(60, int), client_ids=owner)

    def drawn(seed: int, clients: int | None) -> list[int]:
        fed = make_federation(str(path), clients=clients, seed=seed, normalize="none")
        return [int(fed.client(k)[0][0]) for k in range(fed.clients)]

    assert drawn(0, None) == list(range(12))
    assert len(set(drawn(0, 4))) == 4
    assert drawn(0, 4) == sorted(drawn(0, 4))
    assert drawn(0, 4) != drawn(1, 4)
    for clients in (0, 13):
        with pytest.raises(TDPFedError, match=rf"clients: {clients}; allowed: 1 to 12, the natural clients of"):
            drawn(0, clients)


def test_the_official_split(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=120, test=40)
    fed = make_federation("mnist", root=tmp_path, download=False, partition="iid", clients=4, split="official")
    assert (int(fed.train_size.sum()), int(fed.test_size.sum())) == (120, 40)
    official = load("mnist", tmp_path)
    assert sorted(fed.y[120:].tolist()) == sorted(official.y[official.official_test].tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "digit"}, "data set: unknown 'digit'.*did you mean 'digits'"),
        ({"partition": "iidd"}, "partition: unknown 'iidd'.*did you mean 'iid'"),
        ({"split": "offical"}, "split: unknown 'offical'.*did you mean 'official'"),
        ({"split": "official"}, "split: 'official' for 'digits', which has no official test part; allowed: client"),
        ({"partition": "natural"}, "partition: 'natural' for 'digits', which has no natural clients"),
        (
            {"partition": "dirichlet", "size_skew": 1.0},
            r"size_skew: 1\.0 with partition 'dirichlet'; allowed: with iid",
        ),
        ({"clients": 4}, "clients: 4 with 2 classes each"),
        ({"clients": 0}, "clients: 0; allowed: 1 to 1797"),
        ({"clients": 2000, "partition": "iid"}, "clients: 2000; allowed: 1 to 1797"),
        ({"max_samples": 0}, "max_samples: 0"),
        ({"dataset": "synthetic", "clients": 3, "min_samples": 100_000}, r"min_samples: client \d has \d+ samples"),
        ({"options": {"writers": "all"}}, "option of data set 'digits': unknown 'writers'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        make_federation(**options)


def test_a_files_own_test_mask_counts_unless_another_split_is_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    mask = np.arange(60) % 3 == 0
    path = tmp_path / "own.npz"
    np.savez(path, x=rng.normal(size=(60, 4)), y=np.arange(60) % 2, client_ids=np.arange(60) // 20, test_mask=mask)
    assert make_federation(str(path)).test_size.tolist() == [7, 7, 6]
    assert make_federation(str(path), split="client").test_size.tolist() == [5, 5, 5]
