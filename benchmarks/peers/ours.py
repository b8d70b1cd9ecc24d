"""Our side of ``run.py``: seconds of each round after the warm-up, as one line of JSON.

``ours.py DATA METHOD ROUNDS [--conv] [KEY=VALUE ...]``; the data file's clients are those of the preset.
"""

import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tdpfed
from tdpfed.config.loading import load_config
from tdpfed.runs.prepare import prepare, threads

WARM_UP = 2
CONV_STEPS = 5


def main() -> None:
    path, method, rounds, *rest = sys.argv[1:]
    conv, settings = "--conv" in rest, [word for word in rest if word != "--conv"]
    with tempfile.TemporaryDirectory() as place, np.load(path, allow_pickle=False) as given:
        # Samples already belong to clients: each uses all but one of its samples for training.
        owner = np.repeat(np.arange(len(given["sizes"])), given["sizes"])
        mask = np.r_[owner[1:] != owner[:-1], True]
        file = Path(place) / "clients.npz"
        np.savez(file, x=given["x"], y=given["y"], client_ids=owner, test_mask=mask)
        preset = "cifar10-paper" if conv else "mnist-paper"
        same = [f"algorithm.tau={CONV_STEPS if conv else 23}"]  # as in the plain loop
        same += ["algorithm.momentum=0.5"] if method == "tdpfed-momentum" else []
        name = method.partition("-")[0]
        data = [f"data.name={file}", "data.normalize=none", "run.device=cpu", f"algorithm.name={name}"]
        config = load_config(preset, [*data, *same, *settings])
        simulation = prepare(config)
    torch.set_num_threads(threads(config, simulation))
    seconds = []
    for _ in range(WARM_UP + int(rounds)):
        began = time.perf_counter()
        simulation.step()
        seconds.append(time.perf_counter() - began)
    versions = {"tdpfed": tdpfed.__version__, "torch": torch.__version__, "python": platform.python_version()}
    answer: dict[str, Any] = {"seconds": seconds[WARM_UP:], "first_round": seconds[0], "versions": versions}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
