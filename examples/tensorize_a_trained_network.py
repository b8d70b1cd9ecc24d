"""Compress a trained network: replace its layers by CP factors fitted to its weights, then fine-tune briefly.

    python examples/tensorize_a_trained_network.py --epochs 15

There is no federation here: ``tensorize`` is useful wherever a model must be smaller to store, send or run.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tdpfed import densify, tensorize


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    """Train the model in place, like any other model: factors are ordinary parameters."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in percent."""
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).double().mean())


def main() -> None:
    """Train a dense network; print size and accuracy of its tensorized copies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    train(model, train_x, train_y, epochs, 2e-3)
    print(f"dense: {sum(p.numel() for p in model.parameters()):,} parameters, {accuracy(model, test_x, test_y):.1f} %")

    for compression in (2, 4, 8):
        # Returns a copy. The first and last layers are small, and a low rank would hurt them most: keep them dense.
        small = tensorize(model, compression, exclude=("0.*", "8.*"))
        fitted = accuracy(small, test_x, test_y)
        train(small, train_x, train_y, max(1, epochs // 5), 1e-3)
        size = sum(p.numel() for p in small.parameters())
        print(f"rate {compression}: {size:,} parameters, {fitted:.1f} %, tuned {accuracy(small, test_x, test_y):.1f} %")

    dense = densify(small)  # back to ordinary layers, for tools that need them
    print(f"dense again: largest difference {(dense(test_x) - small(test_x)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
