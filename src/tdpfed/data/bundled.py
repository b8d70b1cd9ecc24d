"""Data that need no files, from scikit-learn: digits, with one class or several labels each, and a regression."""

import numpy as np
from numpy.typing import NDArray

PROPERTIES = {
    "even": (0, 2, 4, 6, 8), "prime": (2, 3, 5, 7), "five or more": (5, 6, 7, 8, 9), "closed loop": (0, 6, 8, 9),
}  # fmt: skip
"""Labels of a digit, and the digits that have them."""

AGES = ("under 30", "30 to 39", "40 to 49", "50 to 59", "60 and over")


def digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return 1,797 images (N, 1, 8, 8), whose gray values 0..16 become 0..1, and their classes (N,)."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)


def properties(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which of the :data:`PROPERTIES` the digits (N,) have: (N, 4) of 0 and 1."""
    return np.stack([np.isin(y, having) for having in PROPERTIES.values()], axis=1).astype(np.int64)


def diabetes() -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.str_]]:
    """Return ten measurements of 442 patients, how far the disease is a year later, and each one's age group and sex.

    The progression, 25 to 346, is shifted by 150 and divided by 75, which makes its mean about 0 and its deviation 1.
    """
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    band = np.clip(x[:, 0] // 10 - 2, 0, len(AGES) - 1).astype(int)
    owner = np.array([f"{AGES[b]}, sex {sex:.0f}" for b, sex in zip(band, x[:, 1], strict=True)])
    return x.astype(np.float32), ((y - 150) / 75).astype(np.float32), owner
