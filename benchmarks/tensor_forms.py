"""What is left of a client's change if it is sent as CP terms, as a Tucker tensor or as a sum of Tucker blocks.

A model is trained for some steps on all data, then each client goes on alone, which gives its change. All
weights of two or more dimensions are approximated by the wire's CP terms, unquantized, and by Tucker tensors and blocks
that have at most as many values per weight. The result is the share of the change that is lost,
``||change - sent||^2 / ||change||^2``, over all these weights; smaller is better.

    python benchmarks/tensor_forms.py --data-root DIR --out benchmarks/results/tensor_forms.json
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from common import provenance, write
from torch import Tensor, nn
from torch.nn import functional

from tdpfed import make_federation
from tdpfed.cp.tucker import compose_blocks, decompose_blocks, ranks_for, values
from tdpfed.models import build
from tdpfed.wire.blocks import terms_block

MODELS = {"dnn": "mnist", "lenet": "mnist", "resnet8": "cifar10", "vgg8-gn": "cifar10"}
TERMS = (1, 2, 4, 8)
BLOCKS = (1, 2, 4)
CLIENTS, SAMPLES, BATCH, RATE = 4, 500, 20, 0.05


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, seed: int) -> None:
    """Plain SGD."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def changes(name: str, root: Path | None, steps: tuple[int, int], seed: int) -> list[dict[str, Tensor]]:
    """Return each client's change of every weight, by name."""
    data = make_federation(MODELS[name], root=root, clients=CLIENTS, per_client=5, max_samples=SAMPLES, seed=seed)
    x, y = data.x[: int(data.train_size.sum())], data.y[: int(data.train_size.sum())]
    model = build(name, data.input_shape, data.classes, seed=seed)
    train(model, x, y, steps[0], seed)
    common = {key: value.detach().clone() for key, value in model.named_parameters()}
    found = []
    for k in range(data.clients):
        mine = slice(int(data.train_start[k]), int(data.train_start[k] + data.train_size[k]))
        model.load_state_dict(common)
        train(model, data.x[mine], data.y[mine], steps[1], 100 * seed + k)
        found.append({key: p.detach() - common[key] for key, p in model.named_parameters() if p.ndim > 1})
    return found


def as_terms(change: Tensor, terms: int, sweeps: int = 10) -> tuple[Tensor, int]:
    """Return what CP terms on the wire make of a change, without rounding, and their number of values."""
    block = terms_block(tuple(change.shape), terms, sweeps, "float32")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, block.kept, generator=generator) if block.kept else change.new_zeros(1, 0)
    parts, _ = block.shrink(change.reshape(1, -1), start)
    return block.grow(parts).view(change.shape), sum(section.length for section in block.sections)


def as_blocks(change: Tensor, budget: int, blocks: int) -> Tensor:
    """Return the best sum of Tucker blocks with at most this many values; nothing at all if none is that small."""
    if budget >= change.numel():
        return change
    ranks = ranks_for(change.shape, change.numel() / budget, blocks)
    if values(change.shape, ranks, blocks) > budget:
        return torch.zeros_like(change)
    return compose_blocks(*decompose_blocks(change, ranks, blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--before", type=int, default=200, help="steps before the clients part")
    parser.add_argument("--steps", type=int, default=25, help="steps of each client")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance(0, torch.device("cpu")), "models": {}}
    for name in options.models.split(","):
        lost = {f"{form} like {terms} terms": 0.0 for terms in TERMS for form in _forms()}
        whole, compression = 0.0, dict.fromkeys(TERMS, 0)
        size = 0
        for seed in range(options.seeds):
            for change in changes(name, options.data_root, (options.before, options.steps), seed):
                size += sum(weight.numel() for weight in change.values())
                whole += sum(float(weight.square().sum()) for weight in change.values())
                for terms in TERMS:
                    for weight in change.values():
                        sent, budget = as_terms(weight, terms)
                        compression[terms] += budget
                        lost[f"CP terms like {terms} terms"] += float((weight - sent).square().sum())
                        for blocks in BLOCKS:
                            left = weight - as_blocks(weight, budget, blocks)
                            lost[f"{_name(blocks)} like {terms} terms"] += float(left.square().sum())
        shares = {key: value / whole for key, value in lost.items()}
        result["models"][name] = {"lost": shares, "compression": {t: size / n for t, n in compression.items()}}
        print(name, {key: round(value, 3) for key, value in shares.items()}, flush=True)
    if options.out is not None:
        write(options.out, result)


def _forms() -> list[str]:
    return ["CP terms", *map(_name, BLOCKS)]


def _name(blocks: int) -> str:
    return "Tucker" if blocks == 1 else f"{blocks} blocks"


if __name__ == "__main__":
    main()
