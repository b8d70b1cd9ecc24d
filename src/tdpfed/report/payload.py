"""The data of a page as plain values for JSON: compact, and formatted as text where it is displayed."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tdpfed.config import flat
from tdpfed.cp.plan import FactorPlan
from tdpfed.report.group import SEEDS, Group, rivals_of
from tdpfed.report.parse import ACCURACIES, LOSSES, Number
from tdpfed.report.plans import plan_of
from tdpfed.report.read import Run, Series
from tdpfed.report.table import COLUMNS, REACH_AT, Cell, cells, run_cells, target_of
from tdpfed.runs.data_card import DataCard

MAX_CLIENTS = 2000
"""Maximum number of clients whose accuracies a page contains; beyond it, evenly spaced quantiles are used."""
MAX_ROWS, MAX_COLUMNS = 400, 400
"""Maximum number of clients and classes in a page's table of classes by client; beyond it, evenly spaced ones."""
MAX_REJECTED = 20
"""Maximum number of clients with rejected uploads that a page lists."""


def payload(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the groups, their runs and their settings."""
    datasets = list(dict.fromkeys(group.dataset for group in groups))
    members = {name: [group for group in groups if group.dataset == name] for name in datasets}
    runs = [run for group in groups for run in group.runs]
    number = {id(run): i for i, run in enumerate(runs)}
    cards = {_key(run.data): run.data for run in runs if run.data is not None}
    tasks = list(dict.fromkeys(group.task for group in groups))
    return {
        "datasets": [
            {"name": name, "targets": {field: target_of(members[name], field) for field in ACCURACIES}}
            for name in datasets
        ],
        "columns": [column.title for column in COLUMNS],
        "reach_at": REACH_AT,
        "groups": [
            {
                "label": group.label,
                "method": group.method,
                "look": asdict(group.look),
                "dataset": datasets.index(group.dataset),
                "task": tasks.index(group.task),
                "status": group.status,
                "runs": [number[id(run)] for run in group.runs],
                "counted": [number[id(run)] for run in group.counted],
                "cells": [_cell(cell) for cell in cells(group, rivals_of(group, groups))],
                "mean": _series(group.mean) if len(group.counted) > 1 else None,
                "spread": _series(group.spread) if len(group.counted) > 1 else None,
                "plan": _plan(plan_of(group.runs[0])),
                "robust": _robust(group),
            }
            for group in groups
        ],
        "runs": [
            _run(run) | {"federation": None if run.data is None else list(cards).index(_key(run.data))} for run in runs
        ],
        "federations": [_federation(card) for card in cards.values()],
        "settings": settings(groups),
    }


def settings(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return every key of the configurations with its value in each group, and whether it is a seed."""
    configs = [[flat(run.config) for run in group.runs] for group in groups]
    keys = dict.fromkeys(key for group in configs for config in group for key in config)
    found = []
    for key in keys:
        values = [", ".join(dict.fromkeys(_word(config.get(key)) for config in group)) for group in configs]
        found.append({"key": key, "values": values, "seed": key in SEEDS})
    return found


def _word(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "seed": run.setting("run.seed"),
        "status": run.status,
        "rounds": run.rounds,
        "planned": run.setting("run.rounds"),
        "changed": f"{run.changed:%Y-%m-%d %H:%M:%S}",
        "device": run.texts.get("device"),
        "versions": run.versions,
        "cells": [_cell(cell) for cell in run_cells(run)],
        "series": _series(run.series),
        "clients": _clients(run.clients),
        "diagnostics": {name: {k: _short(v, 5) for k, v in at.items()} for name, at in run.diagnostics.items()},
        "privacy": [_digits(run.figures[key], 4) for key in ("epsilon", "delta")],
        "toml": run.toml,
    }


def _cell(cell: Cell) -> list[Any]:
    """Return the value to sort by, the text to show and the mark."""
    return [_digits(cell.value, 9), str(cell), cell.mark]


def _series(series: Series) -> dict[str, list[Number]]:
    """Return the quantities that a page draws, in its units, without those that have no values."""
    found = {"round": series["round"]} if "round" in series else {}
    found |= {field: _short(series[field], 5) for field in (*ACCURACIES, *LOSSES)}
    if "round" in series:
        found["mb"] = [None if sent is None else _digits(sent / 1e6, 7) for sent in series["uplink_bytes"]]
        found["seconds"] = _short(series["seconds"], 6)
        found["epsilon"] = _short(series["epsilon"], 5)
        found["rejected"] = _short(series["rejected"] if any(series["rejected"]) else [], 9)
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _clients(accuracies: Sequence[Number]) -> list[Number]:
    if len(accuracies) <= MAX_CLIENTS:
        return _short(accuracies, 5)
    known = sorted(accuracy for accuracy in accuracies if accuracy is not None)
    return _short([known[i * (len(known) - 1) // MAX_CLIENTS] for i in range(MAX_CLIENTS + 1)] if known else [], 5)


def _key(card: DataCard) -> tuple[object, ...]:
    """Return what two runs with the same clients have in common."""
    return card.digest, card.ids, card.train_size, card.class_counts


def _federation(card: DataCard) -> dict[str, Any]:
    """Return the clients' ids, as far as single clients are shown, and how many samples of each class they have."""
    rows = _spaced(len(card.ids), MAX_ROWS)
    columns = _spaced(card.classes, MAX_COLUMNS)
    counts = [[card.class_counts[k][c] for c in columns] for k in rows] if card.class_counts else []
    return {
        "size": len(card.ids),
        "ids": card.ids if len(card.ids) <= MAX_CLIENTS else [],
        "clients": [card.ids[k] for k in rows] if counts else [],
        "classes": [card.labels[c] for c in columns] if counts else [],
        "all_classes": card.classes,
        "counts": counts,
    }


def _spaced(count: int, most: int) -> list[int]:
    return list(range(count)) if count <= most else [i * (count - 1) // (most - 1) for i in range(most)]


def _plan(plan: FactorPlan | str | None) -> dict[str, Any] | str | None:
    if not isinstance(plan, FactorPlan):
        return plan
    rows = [[row.name, "x".join(map(str, row.shape)), row.rank, row.dense, row.factored] for row in plan.rows()]
    return {"rows": rows, "total": [plan.dense.size, plan.factors.size]}


def _robust(group: Group) -> dict[str, Any] | None:
    """Return the robustness settings and the rejected uploads of a group; None if there are neither."""
    first = group.runs[0]
    rule, attack = first.setting("robust.name", "mean"), first.setting("robust.attack")
    used: Mapping[str, Any] = {
        "average": rule if rule != "mean" else None,
        "clip": first.setting("robust.clip"),
        "gauge": first.setting("robust.gauge"),
        "attack": attack,
        "hostile share": first.setting("robust.attack_fraction") if attack else None,
        "strength": first.setting("robust.attack_strength") if attack else None,
    }
    refusals = [one for run in group.runs for one in run.refusals]
    rejected = sum(run.figures["rejected_uploads"] or 0 for run in group.runs)
    if not refusals and not rejected and all(value is None for value in used.values()):
        return None
    reasons = {one.rule: one.reason for one in reversed(refusals)}
    clients = Counter(_client_of(run, one.client) for run in group.runs for one in run.refusals)
    return {
        "used": {key: str(value) for key, value in used.items() if value is not None},
        "rejected": max(rejected, len(refusals)),
        "rules": [[rule, n, reasons[rule]] for rule, n in Counter(one.rule for one in refusals).most_common()],
        "clients": clients.most_common(MAX_REJECTED),
        "others": max(0, len(clients) - MAX_REJECTED),
    }


def _client_of(run: Run, client: int | None) -> str:
    """Return a client's id, or its number if the run does not know it."""
    if client is None:
        return "unknown"
    ids = run.data.ids if run.data is not None else ()
    return ids[client] if 0 <= client < len(ids) else str(client)


def _short(values: Sequence[Number], digits: int) -> list[Number]:
    return [_digits(value, digits) for value in values]


def _digits(value: Number, digits: int) -> Number:
    """Return a number rounded to significant digits; whole numbers become integers."""
    if value is None or isinstance(value, int):
        return value
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
