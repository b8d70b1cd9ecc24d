import numpy as np
import pytest

from tdpfed.data.synthetic import synthetic
from tdpfed.errors import TDPFedError


def test_shapes_types_and_owners() -> None:
    x, y, owner = synthetic(0.5, 0.5, clients=6, dimension=7, classes=4, seed=3)
    assert x.shape == (len(y), 7)
    assert x.dtype == np.float32
    assert len(owner) == len(y)
    assert 0 <= y.min() <= y.max() < 4
    assert np.array_equal(np.unique(owner), np.arange(6))
    assert np.bincount(owner).min() >= 50
    assert len(set(np.bincount(owner).tolist())) > 3


def test_same_seed_same_data_and_clients_do_not_depend_on_their_number() -> None:
    few, again, many, other = (synthetic(clients=k, seed=s) for k, s in ((3, 1), (3, 1), (5, 1), (3, 2)))
    kept = many[2] < 3
    for i in range(3):
        assert np.array_equal(few[i], again[i])
        assert np.array_equal(few[i], many[i][kept])
    assert not np.array_equal(few[0][:50], other[0][:50])


def test_variance_of_feature_j_is_j_to_the_minus_1_2() -> None:
    x, _, owner = synthetic(clients=30, dimension=20, seed=0)
    largest = x[owner == np.bincount(owner).argmax()]
    assert len(largest) > 1000
    assert np.allclose(largest.var(0) * np.arange(1, 21) ** 1.2, 1, atol=0.15)


def test_beta_sets_the_inputs_of_clients_apart() -> None:
    def spread(beta: float) -> float:
        x, _, owner = synthetic(0.0, beta, clients=60, seed=5)
        return float(np.var([x[owner == k].mean() for k in range(60)]))

    assert spread(0.0) < 0.1
    assert 9 * 0.6 < spread(9.0) < 9 * 1.5


def test_alpha_moves_all_logits_alike_and_no_label() -> None:
    (x, y, _), (x_far, y_far, _) = (synthetic(alpha, clients=5, seed=6) for alpha in (0.0, 4.0))
    assert np.array_equal(x, x_far)
    assert np.mean(y == y_far) > 0.999


def test_labels_follow_a_linear_model_of_each_client() -> None:
    x, y, owner = synthetic(clients=1, dimension=2, classes=2, seed=4)
    assert owner.max() == 0
    # Two classes of a linear model: the boundary is a line, so some direction separates them.
    angles = np.linspace(0, 2 * np.pi, 721)
    ordered = (x @ np.stack([np.cos(angles), np.sin(angles)])).T
    assert len(np.unique(y)) == 2
    assert any(scores[y == 1].min() >= scores[y == 0].max() - 0.02 for scores in ordered)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, r"alpha: -1\.0; allowed"),
        ({"beta": float("nan")}, "beta: nan; allowed"),
        ({"clients": 0}, "clients: 0; allowed: 1 to 1,000,000"),
        ({"dimension": 0}, "dimension: 0"),
        ({"classes": 1}, "classes: 1; allowed: 2 to 1,000,000"),
        ({"seed": -1}, "seed: -1"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        synthetic(**options)  # type: ignore[arg-type]
