import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from tdpfed.data import datasets, make_federation
from tdpfed.data.class_names import CLASS_NAMES
from tdpfed.data.datasets import Dataset, available, load
from tdpfed.errors import TDPFedError

from .files import cifar_records, idx, write_mnist, write_qmnist, write_tar


def test_digits_are_embedded_and_between_0_and_1() -> None:
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == np.float32
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert data.y.dtype == np.int64
    assert np.array_equal(np.unique(data.y), np.arange(10))
    assert data.official_test is None
    assert data.owner is None


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_mnist_is_found_packed_and_plain_in_both_layouts(tmp_path: Path, name: str, packed: bool, flat: bool) -> None:
    write_mnist(tmp_path if flat else tmp_path / name, packed=packed)
    data = load(name, tmp_path, download=False)
    assert data.name == name
    assert data.x.shape == (16, 1, 28, 28)
    assert data.x.dtype == np.uint8
    assert data.y.tolist() == [*range(10), 0, 1, 0, 1, 2, 3]
    assert data.official_test is not None
    assert data.official_test.tolist() == [False] * 12 + [True] * 4


def test_the_environment_and_the_cache_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_around: Path
) -> None:
    write_mnist(nothing_around / "mnist", seed=1)
    from_cache = load("mnist", download=False)
    write_mnist(tmp_path / "mnist", seed=2)
    monkeypatch.setenv("TDPFED_DATA", str(tmp_path))
    assert not np.array_equal(load("mnist", download=False).x, from_cache.x)


def test_offline_names_the_files_and_the_folder(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(TDPFedError, match=rf"'mnist': .*; put t10k-labels-idx1-ubyte\.gz into {tmp_path}/mnist"):
        load("mnist", tmp_path)
    with pytest.raises(TDPFedError, match=r"'cifar100': .*; put cifar-100-binary\.tar\.gz into "):
        load("cifar100", tmp_path)


def test_mnist_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(np.zeros(11, np.uint8))))
    with pytest.raises(TDPFedError, match=r"train-labels-idx1-ubyte\.gz': 11 labels; expected 12"):
        load("mnist", tmp_path)
    labels.write_bytes(gzip.compress(idx(np.full(12, 10, np.uint8))))
    with pytest.raises(
        TDPFedError, match=r"train-labels-idx1-ubyte\.gz': labels from 10 to 10; expected labels from 0"
    ):
        load("mnist", tmp_path)


def test_one_data_set_is_not_taken_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    labels = bytes((*range(10), 0, 1))
    monkeypatch.setattr(datasets, "_TRAIN_LABELS", {hashlib.sha256(labels).hexdigest(): "mnist"})
    assert load("mnist", tmp_path).name == "mnist"
    with pytest.raises(TDPFedError, match="holds the labels of mnist; expected those of fashion-mnist"):
        load("fashion-mnist", tmp_path)


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR with one image per batch in place of ten thousand."""
    small = {
        "cifar10": datasets._cifar("cifar10", (1,) * 6, 1, 10),
        "cifar100": datasets._cifar("cifar100", (2, 1), 2, 100),
    }
    monkeypatch.setattr(datasets, "_LOADERS", datasets._LOADERS | small)


CIFAR10 = {f"data_batch_{i}.bin": cifar_records(1, i, seed=i) for i in range(1, 6)} | {
    "test_batch.bin": cifar_records(1, 9)
}


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize("folder", ["cifar10", "cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "."])
def test_cifar10_unpacked_in_every_layout(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name, content in CIFAR10.items():
        (tmp_path / folder / name).write_bytes(content)
    data = load("cifar10", tmp_path, download=False)
    assert data.x.shape == (6, 3, 32, 32)
    assert data.y.tolist() == [1, 2, 3, 4, 5, 9]
    assert data.x[2].tobytes() == CIFAR10["data_batch_3.bin"][1:]
    assert data.official_test is not None
    assert data.official_test.tolist() == [False] * 5 + [True]


@pytest.mark.usefixtures("small_cifar")
def test_cifar_archives(tmp_path: Path) -> None:
    write_tar(tmp_path / "cifar-10-binary.tar.gz", CIFAR10)
    assert load("cifar10", tmp_path).y.tolist() == [1, 2, 3, 4, 5, 9]
    fine = {"train.bin": cifar_records(2, 19, 99), "test.bin": cifar_records(1, 3, 41)}
    write_tar(tmp_path / "cifar100/cifar-100-binary.tar.gz", fine)
    data = load("cifar100", tmp_path)
    assert data.classes == 100
    assert data.y.tolist() == [99, 99, 41]


def test_a_cifar_batch_must_be_whole(tmp_path: Path) -> None:
    for name, content in CIFAR10.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TDPFedError, match=r"data_batch_1\.bin': 3073 bytes; expected 10000 records"):
        load("cifar10", tmp_path)


def test_qmnist_writers_own_the_images(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    write_qmnist(tmp_path / "qmnist")
    data = load("qmnist-writers", tmp_path, download=False)
    assert data.x.shape == (12, 1, 28, 28)
    assert data.owner is not None
    assert data.owner.tolist() == [100] * 3 + [101] * 3 + [102] * 3 + [103] * 3
    assert data.official_test is None
    both = load("qmnist-writers", tmp_path, download=False, writers="all")
    assert both.owner is not None
    # QMNIST lists six test digits, MNIST kept four.
    assert both.owner.tolist()[12:] == [200] * 3 + [201]
    assert np.array_equal(both.x, load("mnist", tmp_path).x)
    with pytest.raises(TDPFedError, match=r"writers: unknown 'trian'.*did you mean"):
        load("qmnist-writers", tmp_path, writers="trian")


def test_qmnist_digits_must_be_those_of_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    write_qmnist(tmp_path / "qmnist", shift=1)
    with pytest.raises(TDPFedError, match=r"qmnist-train-labels-idx2-int\.gz': its digits differ"):
        load("qmnist-writers", tmp_path)
    write_qmnist(tmp_path / "qmnist", train=11)
    with pytest.raises(TDPFedError, match=r"qmnist-train-labels-idx2-int\.gz': its digits differ"):
        load("qmnist-writers", tmp_path)


def test_synthetic_takes_its_options() -> None:
    data = load("synthetic", clients=3, dimension=5, classes=4, seed=2)
    assert data.x.shape[1:] == (5,)
    assert data.classes == 4
    assert data.owner is not None
    assert data.owner.max() == 2


def test_unknown_names_and_options() -> None:
    with pytest.raises(TDPFedError, match=r"data set: unknown 'fashon-mnist'.*did you mean 'fashion-mnist'\?"):
        load("fashon-mnist")
    with pytest.raises(TDPFedError, match=r"option of data set 'synthetic': unknown 'alhpa'.*did you mean 'alpha'\?"):
        load("synthetic", alhpa=1)
    with pytest.raises(TDPFedError, match="option of data set 'digits': unknown 'seed'"):
        load("digits", seed=1)


def test_own_npz(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    x, y = np.arange(12.0).reshape(4, 3), np.array([0, 2, 1, 0])
    np.savez(path, x=x, y=y, client_ids=np.array(["b", "a", "b", "a"]), test_mask=y == 0)
    data = load(str(path))
    assert data.x.dtype == np.float32
    assert np.array_equal(data.x, x)
    assert data.classes == 3
    assert data.owner is not None
    assert data.owner.tolist() == ["b", "a", "b", "a"]
    assert data.official_test is not None
    assert data.official_test.tolist() == [True, False, False, True]
    assert load(str(path), classes=5).classes == 5
    np.savez(path, x=x.astype(np.uint8), y=y)
    assert load(str(path)).x.dtype == np.uint8
    assert load(str(path)).owner is None


def test_own_npz_with_names_of_classes_and_clients(tmp_path: Path) -> None:
    path, ids = tmp_path / "own.npz", np.array([7, 5, 30]).repeat(4)
    np.savez(path, x=np.ones((12, 2)), y=np.arange(12) % 2, client_ids=ids, class_names=np.array(["no", "yes", "?"]))
    assert (load(str(path)).classes, load(str(path)).class_names) == (3, ("no", "yes", "?"))
    fed = make_federation(str(path))
    assert (fed.ids, fed.class_names) == (("5", "7", "30"), ("no", "yes", "?"))
    assert make_federation(str(path), clients=2, seed=1).ids in {("5", "7"), ("5", "30"), ("7", "30")}
    assert make_federation(str(path), partition="iid", clients=2).ids == ("0", "1")
    np.savez(path, x=np.ones((12, 2)), y=np.arange(12) % 2, class_names=np.array([1, 2]))
    with pytest.raises(TDPFedError, match=r"class_names of .*allowed: a text for each class"):
        load(str(path))
    with pytest.raises(TDPFedError, match="class_names of 'one': 1 names; allowed: one for each of the 2 classes"):
        Dataset("one", np.ones((2, 2)), np.arange(2), 2, class_names=("a",))


@pytest.mark.parametrize(("name", "count"), [("fashion-mnist", 10), ("cifar10", 10), ("cifar100", 100)])
def test_classes_of_public_data_sets_have_names(name: str, count: int) -> None:
    assert len(set(CLASS_NAMES[name])) == count


GOOD = {"x": np.ones((3, 2)), "y": np.array([0, 1, 1])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.array([["a"]] * 3)}, "x of .*allowed: numbers"),
        ({"x": np.ones(3)}, r"x of .*shape \(3,\); allowed: numbers of shape \(samples, \.\.\.\)"),
        (
            {"x": np.array([[1.0, 2], [3, np.nan], [5, 6]])},
            "x of .*NaN or infinite in sample 1; allowed: finite numbers",
        ),
        ({"x": np.array([[1.0, 2], [3, 4], [5, np.inf]])}, "x of .*NaN or infinite in sample 2"),
        ({"x": np.ones((0, 2)), "y": np.ones(0, int)}, "y of .*0 values"),
        ({"y": np.array([0.0, np.inf, 1])}, "y of .*NaN or infinite"),
        ({"y": np.array([0, 1])}, r"y of .*shape \(2,\); allowed: one value for each of the 3 samples"),
        ({"y": np.array([0, -1, 1])}, "labels from -1 to 1; expected labels from 0 to 1"),
        ({"test_mask": np.array([0, 1, 1])}, "test_mask of .*int64; allowed: true or false"),
        ({"test_mask": np.array([True])}, "test mask of .*shape"),
        ({"client_ids": np.array([1, 2])}, "client ids of .*shape"),
        ({"client_ids": np.array([1.0, 2, 3])}, "client ids: float64"),
    ],
)
def test_own_npz_refuses(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, **(GOOD | change))  # type: ignore[arg-type]
    with pytest.raises(TDPFedError, match=message):
        load(str(path))


def test_own_file_must_exist_and_labels_fit_the_classes(tmp_path: Path) -> None:
    with pytest.raises(TDPFedError, match=r"data file '.*gone\.parquet': not found"):
        load(str(tmp_path / "gone.parquet"))
    np.savez(tmp_path / "own.npz", **GOOD)  # type: ignore[arg-type]
    with pytest.raises(TDPFedError, match="labels from 0 to 1; expected labels from 0 to 0"):
        load(str(tmp_path / "own.npz"), classes=1)
    with pytest.raises(TDPFedError, match="x of 'empty': no samples"):
        Dataset("empty", np.ones((0, 2)), np.ones(0, np.int64), 2)


def test_available_says_what_is_where(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    there = available(tmp_path)
    assert there.keys() == datasets._LOADERS.keys()
    assert there["mnist"].path == tmp_path / "mnist"
    assert there["qmnist-writers"].path is None
    assert there["cifar10"].path is None
    assert there["digits"].embedded
    write_qmnist(tmp_path)
    assert available(tmp_path)["qmnist-writers"].path == tmp_path / "mnist"
    data = load("digits")
    assert (there["digits"].samples, there["digits"].shape) == (len(data.x), data.x.shape[1:])
