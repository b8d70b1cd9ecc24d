"""Your own model on your own data: predict the state of twelve machines from their vibrations.

    python examples/own_model_own_data.py --rounds 30

Every machine runs at its own speed, and a fault raises its pitch, so one model for all machines is a compromise.
"""

import argparse

import torch
from torch import Tensor, nn

from tdpfed import FedAvg, Federation, Local, TDPFed, simulate

MACHINES, SAMPLES, LENGTH, STATES = 12, 32, 64, 3


def vibrations(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return spectra ``(N, LENGTH // 2 + 1)``, the state of each, and the machine it comes from."""
    generator = torch.Generator().manual_seed(seed)
    machine = torch.arange(MACHINES).repeat_interleave(SAMPLES)
    state = torch.randint(STATES, machine.shape, generator=generator)
    speed = 2 + 4 * torch.rand(MACHINES, generator=generator)
    pitch = speed[machine] * (1 + 0.5 * state)
    phase = 2 * torch.pi * torch.rand(len(machine), 1, generator=generator)
    noise = 0.5 * torch.randn(len(machine), LENGTH, generator=generator)
    signal = torch.sin(pitch[:, None] * torch.linspace(0, 2 * torch.pi, LENGTH) + phase) + noise
    return torch.fft.rfft(signal).abs(), state, machine


def main() -> None:
    """Train three methods; print the accuracy of the clients' own models and of the global one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds

    x, y, machine = vibrations(seed=0)
    federation = Federation.from_tensors(x, y, machine, name="vibrations")  # holds out a quarter of each machine
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, STATES))  # any module without BatchNorm

    # The last layer is small and separates the classes, so it stays dense.
    methods = (TDPFed(compression=2, exclude=("2.*",), lam=4.0, tau=10, eta=5e-3), FedAvg(tau=10), Local(tau=10))
    for method in methods:
        result = simulate(model, federation, method, rounds, evaluate_every=rounds)
        own, common = result.final.personalized_accuracy, result.final.global_accuracy
        print(
            f"{method.name:7} personalized {'-' if own is None else f'{own:.1%}'}, "
            f"global {'-' if common is None else f'{common:.1%}'}, {result.final.uplink_bytes / 1e6:.2f} MB uploaded"
        )
        if method is methods[0]:
            model_of_machine_3 = result.personalized()[3]  # a state_dict, for model.load_state_dict
            print(f"        machine 3's own model: {', '.join(model_of_machine_3)}")


if __name__ == "__main__":
    main()
