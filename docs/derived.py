"""Numbers and tables that are computed from result files: each function is a source of keys for ``figures.py``."""

import math
import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sources import FigureError, Sources, as_text, walk

LATE = 10
"""How many of the last evaluations the late accuracy is the median of."""

PEERS = {
    "tdpfed": ("ours", ""),
    "fedjax {fedjax}, jit": ("fedjax", ", written on its API"),
    "plain PyTorch loop": ("plain loop", ""),
    "the same with data loaders": ("plain loop with loaders", ""),
    "pfl {pfl}": ("pfl", ""),
    "fluke {fluke-fl}": ("fluke", ", without its proximal term"),
    "Flower simulation {flwr}": ("flower", ""),
}
"""Rows of the table of speed: label, name in peers.json, what is to be said about its pFedMe."""


def _stat(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def curve(sources: Sources, folder: str, run: str, quantity: str, until: str = "") -> Any:
    """Return the personalized accuracy of a run, or of its seeds, at a round, by its late median, or the best."""
    packed = sources.packed(folder)
    found = [packed[run]] if run in packed else [one for name, one in packed.items() if _is_seed(name, run)]
    if not found:
        raise FigureError(f"{folder!r} holds no run {run!r}")
    values = []
    for one in found:
        known = {record["round"]: 100 * record["personalized_accuracy"] for record in one["records"]}
        known = {round_: value for round_, value in known.items() if not until or round_ <= int(until)}
        if until and int(until) not in known:
            raise FigureError(f"{one['name']!r} has no round {until}")
        points = list(known.values())
        values.append({"at": points[-1], "late": statistics.median(points[-LATE:]), "best": max(points)}[quantity])
    return _stat(values)


def _is_seed(name: str, run: str) -> bool:
    return re.fullmatch(re.escape(run) + r"-seed\d+", name) is not None


def percent(sources: Sources, *path: str) -> Any:
    """Return a share as percent, or its mean with the deviation."""
    found = walk(sources.tree(path[0]), path[1:])
    if isinstance(found, Mapping):
        return {"mean": 100 * found["mean"], "sd": 100 * found["spread"]}
    return 100 * float(found)


def megabytes(sources: Sources, *path: str) -> float:
    """Return bytes as megabytes."""
    return float(walk(sources.tree(path[0]), [*path[1:], "mean"])) / 1e6


def turns(sources: Sources, method: str, who: str) -> tuple[float, float]:
    """Return how many times as long as ours another takes, from turn to turn: the least and the most."""
    found = sources.tree("peers")["methods"][method]
    pairs = zip(found[who]["medians_of_turns"], found["ours"]["medians_of_turns"], strict=True)
    ratios = [theirs / ours for theirs, ours in pairs]
    return min(ratios), max(ratios)


def times(sources: Sources, file: str, method: str, who: str = "plain loop") -> float:
    """Return how many times as long as ours another takes, by the medians."""
    found = sources.tree(file)["methods"][method]
    return float(found[who]["median"] / found["ours"]["median"])


def doubling(sources: Sources, method: str, least: str) -> tuple[float, float]:
    """Return what twice as many parameters cost, from so many on: the least and the most."""
    cases = [case for case in sources.tree("scale-models")["cases"] if case["method"] == method]
    medians = [case["median"] for case in sorted(cases, key=_parameters) if _parameters(case) >= int(least)]
    ratios = [more / less for less, more in pairwise(medians)]
    return min(ratios), max(ratios)


def _parameters(case: Mapping[str, Any]) -> int:
    return int(case["parameters"])


def clients(sources: Sources, number: str, *path: str) -> Any:
    """Return a figure of the benchmark with so many clients."""
    case = next(case for case in sources.tree("scale-clients")["cases"] if case["case"] == number)
    return max(case["save_seconds"]) if path == ("longest save",) else walk(case, path)


def within(sources: Sources, without: str, *folders: str) -> float:
    """Return the most that the paper's number for a setting of TDPFed is off the nearest of ours, rounded up."""
    found = [sources.tree(folder) for folder in folders]
    runs = [run for run in found[0] if run.startswith("tdpfed") and not any(one in run for one in without.split(","))]
    off = [min(abs(lines[run]["ours"]["mean"] - lines[run]["paper"]) for lines in found) for run in runs]
    return float(math.ceil(10 * max(off)) / 10)


def in_turn_gain(sources: Sources) -> tuple[float, float]:
    """Return how much TDPFed gains on MNIST by classes in turn, s = 2 and s = 8 aside: the least and the most."""
    random, turn = sources.tree("mnist"), sources.tree("mnist-classes-in-turn")
    runs = [run for run in random if run.startswith("tdpfed") and "s=" not in run]
    gains = [turn[run]["late"]["mean"] - random[run]["late"]["mean"] for run in runs]
    return min(gains), max(gains)


def loss(sources: Sources, study: str, rule: str, against: str) -> float:
    """Return the most that a robust rule's personalized accuracy is below its honest one, attacks at 1.5 aside."""
    rows = sources.tree(study)
    honest = next(iter(rows[against].values()))["personalized_accuracy"]["mean"]  # the first column: no attack
    attacked = [one["personalized_accuracy"]["mean"] for name, one in rows[rule].items() if "1.5" not in name]
    return float(honest - min(attacked))


def fewer_bytes(sources: Sources, data: str, without: str = "") -> tuple[float, float]:
    """Return how many percent fewer bytes than FedAvg TDPFed x2 uploads to the accuracy of training alone, in int8."""
    shares = []
    for setting, methods in sources.tree("settings").items():
        if setting.split(",")[0].split()[0] in data.split() and not (without and without in setting):
            ours, theirs = (
                methods[one]["uplink_bytes_to_alone"]["mean"] for one in ("TDPFed x2, int8", "FedAvg, int8")
            )
            shares.append(100 * (1 - ours / theirs))
    return min(shares), max(shares)


def smaller(sources: Sources, setting: str, method: str, than: str, study: str = "settings") -> float:
    """Return how many times fewer bytes a method uploads than another, in a study of settings."""
    ours, theirs = (sources.tree(study)[setting][one]["uplink_bytes"]["mean"] for one in (method, than))
    return float(theirs / ours)


def cost_of_x4(sources: Sources, data: str, codec: str = "") -> float:
    """Return the most points that TDPFed loses from compression 2 to compression 4, over the settings of a data set."""
    settings = [methods for setting, methods in sources.tree("settings").items() if setting.startswith(data)]
    means = [
        [methods[f"TDPFed {rate}{codec}"]["personalized_accuracy"]["mean"] for rate in ("x2", "x4")]
        for methods in settings
    ]
    return float(max(two - four for two, four in means))


def traffic(sources: Sources, setting: str, method: str) -> float:
    """Return how many times fewer bytes than dense FedAvg's a method sends in both directions."""
    found = sources.tree("updates")[setting]
    dense, ours = (sum(found[one][f"{way}link_bytes"]["mean"] for way in ("up", "down")) for one in ("FedAvg", method))
    return float(dense / ours)


def compared(sources: Sources, ours: str, other: str, outcome: str) -> float:
    """Return in how many settings a form of upload is ``more`` or ``less`` accurate than another, or ``equal``.

    Accuracies are equal if they are as printed, in percent with two digits. Both forms must upload about as many bytes.
    """
    outcomes = []
    for setting, forms in sources.tree("updates").items():
        if ours not in forms or other not in forms:
            continue
        sent = [forms[one]["uplink_bytes"]["mean"] for one in (ours, other)]
        if max(sent) > 1.05 * min(sent):
            raise FigureError(f"{setting}: {ours} and {other} upload different numbers of bytes")
        gap = forms[ours]["personalized_accuracy"]["mean"] - forms[other]["personalized_accuracy"]["mean"]
        outcomes.append("equal" if abs(gap) < 0.005 else "more" if gap > 0 else "less")
    return float(outcomes.count(outcome) if outcome != "all" else len(outcomes))


TERMS = ("8 terms", "4 terms", "2 terms", "1 term")
"""Forms of FedAvg's uploads in the tables of factored updates."""


def updates_glance(sources: Sources, *only: str) -> str:
    """Return the table of factored updates: accuracy in each setting, and how many times fewer bytes are uploaded."""
    forms = {"dense, 4 bits": "FedAvg, int4"} | {terms: f"FedAvg, {terms}" for terms in TERMS}
    lines = [f"| setting | training alone | dense | {' | '.join(forms)} |", "| --- |" + " ---: |" * (2 + len(forms))]
    for setting, methods in sources.tree("updates").items():
        if only and not any(word in setting for word in only):
            continue
        cells = []
        for form in ("local", "FedAvg", *forms.values()):
            line = methods.get(form)
            accuracy = "-" if line is None else f"{line['personalized_accuracy']['mean']:.1f}"
            saved = f" ({line['times_up']:.0f}x)" if line is not None and form in forms.values() else ""
            cells.append(accuracy + saved)
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def updates_sizes(sources: Sources, model: str = "dnn", size: str = "28", channels: str = "1") -> str:
    """Return the table of message sizes for a model, by terms."""
    from tdpfed.algorithms import FedAvg
    from tdpfed.core.losses import cross_entropy
    from tdpfed.core.objective import Objective
    from tdpfed.models import build
    from tdpfed.wire import Wire
    from tdpfed.wire.channel import Channel

    del sources
    layout = Objective.of(build(model, (int(channels), int(size), int(size)), 10, seed=0), cross_entropy).layout
    algorithm = FedAvg().bind(layout, 1)
    kinds = {"float32": Wire(), "int8": Wire(codec="int8"), "int4, with feedback": Wire(codec="int4")}
    kinds |= {f"{n} term{'s' * (n > 1)}": Wire(update="factors", terms=n) for n in (16, 8, 4, 2, 1)}
    bytes_ = {name: Channel(algorithm, wire, 0).form.bytes for name, wire in kinds.items()}
    lines = ["| upload | bytes of a message | times smaller |", "| --- | ---: | ---: |"]
    return "\n".join(
        [*lines, *(f"| {name} | {sent:,} | {bytes_['float32'] / sent:.1f} |" for name, sent in bytes_.items())]
    )


def demo_upload(sources: Sources) -> float:
    """Return the kilobytes of one upload of the Flower demo."""
    found = sources.tree("flower")
    return float(found["uplink_bytes"] / sum(one["replies"] for one in found["per_round"]) / 1000)


def speed(sources: Sources) -> str:
    """Return the table of seconds per round, ours and other packages'."""
    methods = sources.tree("peers")["methods"]
    heads = {
        "fedavg": "FedAvg", "fedprox": "FedProx", "ditto": "Ditto", "pfedme": "pFedMe, 5 inner steps",
        "tdpfed": "TDPFed, compression 2",
    }  # fmt: skip
    lines = [f"| | {' | '.join(heads.values())} |", "| --- |" + " ---: |" * len(heads)]
    for label, (who, about) in PEERS.items():
        cells = []
        for method in heads:
            median = methods[method].get(who, {}).get("median")
            decimals = 3 if method != "tdpfed" else 2 if who == "ours" else 1
            ratio = "" if who == "ours" or median is None else f" ({times(sources, 'peers', method, who):.1f})"
            note = about if method == "pfedme" and median is not None else ""
            cells.append("-" if median is None else f"{median:.{decimals}f}{ratio}{note}")
        versions = {key: value.removesuffix(".0") for key, value in methods["fedavg"][who]["versions"].items()}
        versions["pfl"] = methods["fedavg"][who]["versions"].get("pfl", "")
        lines.append(f"| {label.format_map(versions)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_rounds(sources: Sources) -> str:
    """Return the table of local rounds on a GPU."""
    rows = {(row["data"], row["method"], row["precision"]): row for row in sources.tree("gpu")["rows"]}
    kinds = {"mnist": "MNIST, DNN, 20 clients: ", "cifar10": "CIFAR-10, VGG8, 10 clients: "}
    names = {"fedavg": "FedAvg", "pfedme": "pFedMe", "tdpfed": "TDPFed, compression 2"}
    heads = ("milliseconds, float32", "milliseconds, TF32", "kernels", "share, TF32")
    lines = [f"| | {' | '.join((*heads, 'three seeds, float32', 'three seeds, TF32'))} |", "| --- |" + " ---: |" * 6]
    for data, method in dict.fromkeys(key[:2] for key in rows):
        full, short = (rows[data, method, precision] for precision in ("float32", "tf32"))
        cells = [f"{row['milliseconds_per_local_round']:.2f}" for row in (full, short)]
        cells += [f"{short['kernels_per_local_round']:,.0f}", f"{100 * short['share_of_product_rate']:.1f} %"]
        together = [row["cost_of_seeds_together"] for row in (full, short)]
        cells += ["-" if cost is None else f"{cost:.2f}" for cost in together]
        lines.append(f"| {kinds[data] if method == 'fedavg' else ''}{names[method]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def trials(sources: Sources, folder: str, name: str) -> str:
    """Return a table of trials as the folder's tables.toml describes it: label, run, and what else is to be said."""
    table = tomllib.loads((sources.root / "results" / folder / "tables.toml").read_text(encoding="utf-8"))[name]
    heads = table["heads"]
    lines = [f"| {' | '.join(heads)} |", "| " + " | ".join(["---"] * (len(heads) - 3) + ["---:"] * 3) + " |"]
    for *words, run in table["rows"]:
        place, _, own = run.rpartition("/")
        values = [curve(sources, place or folder, own, *one) for one in table["columns"]]
        cells = [as_text(value, table.get("decimals", 2)) for value in values]
        lines.append(f"| {' | '.join([*words, *cells])} |")
    return "\n".join(lines)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "curve": curve, "percent": percent, "megabytes": megabytes, "turns": turns, "times": times, "doubling": doubling,
    "clients": clients, "within": within, "in-turn-gain": in_turn_gain, "loss": loss, "speed": speed,
    "gpu-rounds": gpu_rounds, "trials": trials, "fewer-bytes": fewer_bytes, "cost-of-x4": cost_of_x4,
    "smaller": smaller, "demo-upload": demo_upload,
    "traffic": traffic, "compared": compared, "updates-glance": updates_glance, "updates-sizes": updates_sizes,
}  # fmt: skip
