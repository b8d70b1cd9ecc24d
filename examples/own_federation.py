"""Your own model and data on Flower: create an app from the template and run it on this machine as real processes.

Needs the extra ``flower``. ``python examples/own_federation.py --out runs/wards --rounds 5`` writes a data file for
each of three hospital wards and an app whose ``task.py`` reads it, and runs the app with TLS and node authentication.
"""

import argparse
from pathlib import Path

import numpy as np

from tdpfed.flower.app import init_app
from tdpfed.flower.demo import Demo, run_demo

TASK = '''
"""Predict from eight measurements whether a patient needs attention; every ward has its own threshold."""

from pathlib import Path

import numpy as np
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))


def load(node_config):
    file = Path(node_config["wards"]) / f"ward-{node_config['partition-id']}.npz"
    with np.load(file, allow_pickle=False) as data:
        x, y = data["x"].astype("float32"), data["y"]
    return x[:150], y[:150], x[150:], y[150:]
'''


def write_wards(folder: Path, wards: int) -> None:
    """Write the data that each node would have."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for ward in range(wards):
        x = draw.normal(size=(200, 8))
        y = (x[:, :3].sum(1) > ward - 1).astype(np.int64)
        np.savez(folder / f"ward-{ward}.npz", x=x, y=y)


def main() -> None:
    """Create the data and the app, then run a federation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="new folder for the federation")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    around = given.out.with_name(f"{given.out.name}-files")
    write_wards(around / "data", wards=3)
    init_app(around / "wards")  # like `tdpfed flower init`
    (around / "wards" / "wards" / "task.py").write_text(TASK, encoding="utf-8")
    demo = Demo(
        given.out, nodes=3, rounds=given.rounds, app=around / "wards",
        node_config=f"wards={(around / 'data').resolve()}", overrides=("algorithms.tdpfed.tau=10",),
    )  # fmt: skip
    summary = run_demo(demo, print, lambda line: print(f"round {line['round']}: {line['replies']} replies"))
    print(f"personalized accuracy {summary['personalized_accuracy']:.3f}, global {summary['global_accuracy']:.3f}")


if __name__ == "__main__":
    main()
