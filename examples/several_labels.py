"""Several labels for each sample: is a handwritten digit even, prime, five or more, drawn with a closed loop?

    python examples/several_labels.py --rounds 20

The data come with scikit-learn. The model has one output for each label, and a label is predicted where its output is
above 0.
"""

import argparse

import torch
from torch import nn

from tdpfed import FedAvg, Wire, make_federation, simulate


def main() -> None:
    """Train with dense and with factored uploads; print metrics and what the global model says of one digit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds

    federation = make_federation("digits-properties", clients=10)
    labels = federation.class_names
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(labels)))
    for wire in (Wire(), Wire(update="factors", terms=4)):
        result = simulate(  # the loss of labels is binary cross-entropy
            model,
            federation,
            FedAvg(tau=10),
            rounds,
            metrics=["f1", "auc", "accuracy"],
            wire=wire,
            evaluate_every=rounds,
        )
        assert result.final.metrics is not None
        values = ", ".join(f"{name} {one['global']:.3f}" for name, one in result.final.metrics.items())
        print(f"{wire.update:8} global model: {values}; {result.final.uplink_bytes / 1e6:.2f} MB uploaded")

    trained = result.global_model()
    assert trained is not None  # FedAvg has a global model
    model.load_state_dict(trained)
    _, _, x, y = federation.client(0)
    said, true = model(x[:1])[0], y[0]
    for label, output, truth in zip(labels, said.tolist(), true.tolist(), strict=True):
        print(f"         {label:14} {'yes' if output > 0 else 'no':3} (true: {'yes' if truth else 'no'})")


if __name__ == "__main__":
    main()
