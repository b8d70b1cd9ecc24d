"""Read run folders into one pandas table, with a row per run and evaluated round.

tdpfed compare digits --algorithms tdpfed,fedavg,local --seeds 3
python examples/results_into_pandas.py runs/compare-digits/*-seed*
"""

import argparse
import tomllib
from pathlib import Path

import pandas as pd


def read(run: Path) -> pd.DataFrame:
    """Return the records of a run; the first columns identify the run."""
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    records = pd.read_json(run / "metrics.jsonl", lines=True)
    records.insert(0, "run", run.name)
    records.insert(1, "algorithm", config["algorithm"]["name"])
    records.insert(2, "seed", config["run"]["seed"])
    return records


def main() -> None:
    """Print a few summaries, as a notebook would."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--csv", type=Path, help="also write every record to this file")
    options = parser.parse_args()

    records = pd.concat([read(run) for run in options.runs], ignore_index=True)
    last = records.sort_values("round").groupby("run").tail(1)

    print("After the last round, mean and standard deviation over seeds:")
    accuracies = ["personalized_accuracy", "global_accuracy"]
    print(last.groupby("algorithm")[accuracies].agg(["mean", "std"]).round(4).to_string(), end="\n\n")

    print("Personalized accuracy by round, mean over seeds:")
    curves = records.pivot_table("personalized_accuracy", "round", "algorithm")
    print(curves.round(4).tail(5).to_string(), end="\n\n")

    print("Accuracy of each client's own model after the last round:")
    clients = last.explode("client_accuracy").astype({"client_accuracy": float})
    print(clients.groupby("algorithm")["client_accuracy"].describe().round(4).to_string())

    if options.csv is not None:
        records.drop(columns=["client_accuracy", "diagnostics"]).to_csv(options.csv, index=False)


if __name__ == "__main__":
    main()
