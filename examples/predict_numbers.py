"""Regression: predict how a disease progresses, from ten measurements of patients in groups by age and sex.

    python examples/predict_numbers.py --rounds 30

The data come with scikit-learn. Each group is a client; groups differ in size and in how the disease progresses.
"""

import argparse

import torch
from torch import nn

from tdpfed import FedAvg, Local, make_federation, simulate


def main() -> None:
    """Train with a robust loss, together and alone; print two metrics of the clients' own models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds

    federation = make_federation("diabetes")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))  # one output: the number
    for method in (FedAvg(tau=5), Local(tau=5)):
        result = simulate(model, federation, method, rounds, loss="huber", metrics=["mse", "r2"], evaluate_every=rounds)
        assert result.final.metrics is not None
        error, explained = (result.final.metrics[name]["personalized"] for name in ("mse", "r2"))
        print(f"{method.name:7} squared error {error:.3f}, R2 {explained:.3f}")
        if method.name == "fedavg":
            for name, one in zip(federation.ids, result.final.metrics["mse"]["clients"], strict=True):
                print(f"        {name:20} {'-' if one is None else f'{one:.3f}'}")


if __name__ == "__main__":
    main()
