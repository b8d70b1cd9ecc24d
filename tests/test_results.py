"""Figures that pages under results and README give are those of the records beside them."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def accuracies(metrics: Path) -> dict[int, float]:
    """Personalised accuracy in per cent, by round."""
    records: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {record["round"]: 100 * record["personalized_accuracy"] for record in records}


def is_rounded(text: str, value: float) -> bool:
    return abs(float(text) - value) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9


def rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_trials_on_cifar10() -> None:
    folder, checked = ROOT / "results/cifar10/trials", 0
    for first, *_, at_60, last, best in rows(folder / "README.md"):
        if found := re.fullmatch(r"\[(.+)\]\((.+)\)", first):
            curve = accuracies(folder / found[2])
            values = (curve[60], list(curve.values())[-1], max(curve.values()))
            for text, value in zip((at_60, last, best), values, strict=True):
                assert text == "-" or is_rounded(text, value), (found[1], text, value)
            checked += 1
    assert checked == len(list(folder.glob("*/metrics.jsonl")))


def test_trials_on_mnist() -> None:
    folder, at, checked = ROOT / "results/mnist", 0, set[str]()
    known = {"3e-4": "tdpfed-x2-eta=3e-4", "8e-4": "tdpfed-x2", "as Table III": "tdpfed-x2-eta=3e-4"}
    known |= {f"as Table IV, s = {s}": f"tdpfed-x2-s={s}" for s in (2, 8)}
    for first, *cells in rows(folder / "trials/README.md"):
        if found := re.fullmatch(r"round (\d+)", cells[0]):
            at = int(found[1])
            continue
        if first == "---":
            continue
        linked = re.fullmatch(r"\[.+\]\((.+)-seed0/metrics\.jsonl\)", first)
        name = f"runs/{known[first]}" if first in known else f"trials/{linked[1] if linked else f'eta-{first}'}"
        curves = [accuracies(folder / f"{name}-seed{seed}" / "metrics.jsonl") for seed in range(3)]
        measured = (
            [curve[at] for curve in curves],
            [statistics.median(curve[round_] for round_ in range(at - 90, at + 1, 10)) for curve in curves],
            [max(value for round_, value in curve.items() if round_ <= at) for curve in curves],
        )
        for cell, values in zip(cells, measured, strict=True):
            mean, spread = cell.split(" ± ")
            assert is_rounded(mean, statistics.mean(values)), (first, cell)
            assert is_rounded(spread, statistics.stdev(values)), (first, cell)
        checked.add(first)
    assert checked >= known.keys()
    own = {first for first in checked - known.keys() if "(../" not in first}
    assert 3 * len(own) == len(list(folder.glob("trials/*/metrics.jsonl")))


def lines_of(folder: str) -> dict[str, dict[str, str]]:
    """Rows of a folder's tables II to IV, by their first cell."""
    header, found = list[str](), {}
    for cells in rows(ROOT / folder / "README.md"):
        if cells[0] == "paper":  # the cell before it is empty
            header = cells
        elif len(cells) == len(header) + 1:
            found[cells[0]] = dict(zip(header, cells[1:], strict=True))
    return found


def test_what_the_paper_says_of_tdpfed_on_mnist_is_met_by_one_way_to_deal_or_the_other() -> None:
    random, turns = (lines_of(f"results/mnist{place}") for place in ("", "/classes-in-turn"))
    others = ("pFedMe", "s = 2", "s = 8", "baseline")
    ours = {name: line for name, line in random.items() if line["of"] == "personalised" and name not in others}
    judged = [name for name, line in ours.items() if line["paper"] != "-"]
    assert len(judged) == 12
    for name in judged:
        assert min(abs(float(lines[name]["difference"])) for lines in (random, turns)) <= 0.3, name
        gained = float(turns[name]["late"].split()[0]) - float(random[name]["late"].split()[0])
        assert 0.25 <= gained <= 0.5 + 1e-9, (name, gained)
    text = " ".join((ROOT / "docs/paper.md").read_text(encoding="utf-8").split())
    for name, said in (("TDPFed, x2, eta = 3e-4", "**99.22 ± 0.07**"), ("TDPFed, x1.5, eta = 3e-4", "99.20 ± 0.07")):
        assert said in text
        assert turns[name]["ours"] == said.strip("*")
    for pattern, names in (
        (r"FedAvg's global model ends at ([\d.]+) % \(paper 96\.78\)", ("FedAvg",)),
        (r"subsets at ([\d.]+) and ([\d.]+) \(96\.15 and 95\.80\)", ("FedAvg (s.a.r.), x1.5", "FedAvg (s.a.r.), x2")),
        (r"pFedMe at ([\d.]+) \(98\.64\)", ("pFedMe",)),
        (r"training alone \(([\d.]+)\) and", ("local only (ours)",)),
        (r"FedAvg's local models \(([\d.]+)\) all end above TDPFed", ("FedAvg, fine-tuned (ours)",)),
    ):
        found = re.search(pattern, text)
        assert found is not None, pattern
        assert list(found.groups()) == [turns[name]["ours"].split()[0] for name in names]
    pairs = json.loads((ROOT / "results/mnist/classes-in-turn/pairs.json").read_text(encoding="utf-8"))["runs"]
    own, alone = pairs["tdpfed-x2-eta=3e-4"], pairs["local"]
    told = re.search(
        r"clients is ([\d.]+) % without these and ([\d.]+) with them; in turn it is ([\d.]+)\. The eight pairs that "
        r"both have, ten clients at random and 48 in turn, gain too, ([\d.]+) to ([\d.]+), while training alone does "
        r"not \(([\d.]+) and ([\d.]+);",
        text,
    )
    assert told is not None
    both = [run[kind]["pairs in both"] for run in (own, alone) for kind in ("classes", "classes-in-turn")]
    values = (own["classes"]["others"], own["classes"]["all"], own["classes-in-turn"]["all"], *both)
    assert all(is_rounded(number, value) for number, value in zip(told.groups(), values, strict=True))


LABELS = {
    "tdpfed": "ours", "fedjax 0.0.17, jit": "fedjax", "plain PyTorch loop": "plain loop", "fluke 0.8.1": "fluke",
    "the same with data loaders": "plain loop with loaders", "pfl 0.6.0": "pfl", "Flower simulation 1.41": "flower",
}  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
def test_speed_in_readme(label: str) -> None:
    methods = json.loads((ROOT / "benchmarks/results/peers.json").read_text(encoding="utf-8"))["methods"]
    row = next(row for row in rows(ROOT / "README.md") if row[0] == label and re.match(r"\d", row[1]))
    for cell, method in zip(row[1:], ("fedavg", "pfedme", "tdpfed"), strict=True):
        found = methods[method].get(LABELS[label], {}).get("median")
        if found is None:
            assert cell == "-"
            continue
        seconds, times = re.fullmatch(r"([\d.]+)(?: \(([\d.]+)\))?(?:, .*)?", cell).groups()  # type: ignore[union-attr]
        assert is_rounded(seconds, found), cell
        assert times is None or is_rounded(times, found / methods[method]["ours"]["median"]), cell


def test_what_readme_says_beside_its_speed_table() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    dense, conv = (
        json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["methods"]
        for name in ("peers", "peers-conv")
    )

    def of_turns(method: str, name: str) -> list[float]:
        pairs = zip(*(dense[method][who]["medians_of_turns"] for who in (name, "ours")), strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def of_all(methods: dict[str, Any], method: str) -> float:
        ratio: float = methods[method]["plain loop"]["median"] / methods[method]["ours"]["median"]
        return ratio

    plain, fedavg, pfedme = of_turns("tdpfed", "plain loop"), of_turns("fedavg", "fedjax"), of_turns("pfedme", "fedjax")
    said = {
        r"plain loop took ([\d.]+) to ([\d.]+) times": (min(plain), max(plain)),
        r"with TDPFed, ([\d.]+) to ([\d.]+) with FedAvg and ([\d.]+) to ([\d.]+) with pFedMe, fedjax": tuple(
            bound(of_turns(method, "plain loop")) for method in ("fedavg", "pfedme") for bound in (min, max)
        ),
        r"fedjax ([\d.]+) to ([\d.]+) times with FedAvg": (min(fedavg), max(fedavg)),
        r"and ([\d.]+) to ([\d.]+) times with pFedMe": (min(pfedme), max(pfedme)),
        r"momentum 0\.5 the plain loop takes ([\d.]+) times": (of_all(dense, "tdpfed-momentum"),),
        r"it takes ([\d.]+) \(FedAvg\), ([\d.]+) \(pFedMe\) and ([\d.]+) \(TDPFed\)": tuple(
            of_all(conv, method) for method in ("fedavg", "pfedme", "tdpfed")
        ),
    }
    for pattern, values in said.items():
        found = re.search(pattern, text)
        assert found is not None, pattern
        for number, value in zip(found.groups(), values, strict=True):
            assert is_rounded(number, value), (pattern, number, value)


def test_a_trial_of_one_seed_on_mnist() -> None:
    folder = ROOT / "results/mnist"
    places = ("trials/one-seed/optimizer-run-seed0", "runs/tdpfed-x2-eta=3e-4-seed0", "runs/tdpfed-x2-seed0")
    curves = [accuracies(folder / place / "metrics.jsonl") for place in places]
    text = " ".join((folder / "trials/README.md").read_text(encoding="utf-8").split())
    found = re.search(r"([\d.]+) %, where seed 0 of .* has ([\d.]+) and of eta = 8e-4 ([\d.]+); in the last", text)
    last = re.search(r"in the last round ([\d.]+), ([\d.]+) and ([\d.]+)\.", text)
    assert found is not None
    assert last is not None
    for late, at_end, curve in zip(found.groups(), last.groups(), curves, strict=True):
        assert is_rounded(late, statistics.median(list(curve.values())[-10:])), late
        assert is_rounded(at_end, curve[800]), at_end


def test_speed_on_a_gpu() -> None:
    made = json.loads((ROOT / "benchmarks/results/gpu.json").read_text(encoding="utf-8"))
    known = {(row["data"], row["method"], row["precision"]): row for row in made["rows"]}
    lines = [
        row for row in rows(ROOT / "docs/performance.md") if row[0].endswith(("FedAvg", "pFedMe", "compression 2"))
    ]
    assert len(lines) == 6
    labels = {"fedavg": "FedAvg", "pfedme": "pFedMe", "tdpfed": "TDPFed, compression 2"}
    for (data, method), (label, *cells) in zip(dict.fromkeys(key[:2] for key in known), lines, strict=True):
        assert label.endswith(labels[method])
        full, short = (known[data, method, precision] for precision in ("float32", "tf32"))
        kernels, share = short["kernels_per_local_round"], 100 * short["share_of_product_rate"]
        together = (full["cost_of_seeds_together"], short["cost_of_seeds_together"])
        values = (*(row["milliseconds_per_local_round"] for row in (full, short)), kernels, share, *together)
        for cell, value in zip(cells, values, strict=True):
            assert cell == "-" if value is None else is_rounded(cell.removesuffix(" %").replace(",", ""), value), cell
    for page in ("docs/performance.md", "README.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert re.search(rf"takes? {made['whole'][0]['seconds']:.0f} s on MNIST", text), page
