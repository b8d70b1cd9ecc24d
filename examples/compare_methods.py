"""Compare methods in Python: accuracy and uploaded megabytes over several seeds.

    python examples/compare_methods.py --rounds 30 --seeds 3

The command line does the same, with run folders that can be resumed, a table that marks differences within the spread
over seeds, and a page of curves: ``tdpfed compare digits --algorithms tdpfed,pfedme,fedavg,local --seeds 3``.
"""

import argparse
import statistics

from tdpfed import FedAvg, Local, PFedMe, TDPFed, make_federation, simulate
from tdpfed.models import build
from tdpfed.server.records import Record

METHODS = (
    TDPFed(compression=2, tau=10, lam=12.0, s_prime=10, eta=2e-3),
    PFedMe(tau=10),
    FedAvg(tau=10),
    Local(tau=10),
)


def spread(values: list[float | None]) -> str:
    """Return mean and standard deviation in percent, or a dash if the method has no such model."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.1f} ± {statistics.stdev(known) if len(known) > 1 else 0:.1f}"


def main() -> None:
    """Run every method with every seed; for each seed, all methods use the same clients and the same initial model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()

    finals: dict[str, list[Record]] = {method.name: [] for method in METHODS}
    for seed in range(options.seeds):
        federation = make_federation("digits", clients=10, per_client=2, seed=seed)
        model = build("dnn", federation.input_shape, federation.classes, seed=seed)
        for method in METHODS:
            result = simulate(model, federation, method, options.rounds, seed=seed, evaluate_every=options.rounds)
            finals[method.name].append(result.final)

    print(f"{'method':8} {'personalized %':>16} {'global %':>16} {'uploaded MB':>12}")
    for name, records in finals.items():
        personal = spread([record.personalized_accuracy for record in records])
        shared = spread([record.global_accuracy for record in records])
        megabytes = statistics.fmean(record.uplink_bytes for record in records) / 1e6
        print(f"{name:8} {personal:>16} {shared:>16} {megabytes:12.2f}")


if __name__ == "__main__":
    main()
