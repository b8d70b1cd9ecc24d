"""Seeds of one configuration become a mean and a spread; everything else stays apart and gets a name of its own."""

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import folders
from tdpfed.report import group_runs, read_runs
from tdpfed.report.group import Group, Stat
from tdpfed.report.parse import ACCURACIES, FIELDS, LOSSES


def grouped(*paths: Path) -> tuple[list[Group], list[str]]:
    return group_runs(read_runs(paths)[0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_mean_and_spread_are_those_of_the_standard_library(values: list[float]) -> None:
    stat = Stat.of(values)
    assert stat.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert stat.spread == pytest.approx(statistics.stdev(values), abs=1e-6, rel=1e-6)


def test_what_a_run_lacks_has_no_mean() -> None:
    assert Stat.of([]) == Stat.of([None]) == Stat.of([1.0, None]) == Stat(None, None)
    assert Stat.of([3.0]) == Stat(3.0, None)


def test_means_are_apart_when_their_spreads_do_not_meet() -> None:
    assert not Stat(0.90, 0.02).separated(Stat(0.93, 0.02))
    assert Stat(0.90, 0.01).separated(Stat(0.93, 0.01))
    assert Stat(0.90).separated(Stat(0.93))
    assert Stat(0.90, 0.5).separated(Stat(None))
    assert not Stat(0.90).separated(Stat(0.90))


def test_seeds_of_one_configuration_are_one_group(tmp_path: Path) -> None:
    paths = [folders.make(tmp_path / f"a{s}", seed=s, level=0.8 + 0.1 * s) for s in (0, 1)]
    paths.append(folders.make(tmp_path / "a2", "data.seed=7", seed=2, level=0.85))
    paths.append(folders.make(tmp_path / "b", "algorithm.name=fedavg"))
    groups, notes = grouped(*paths)
    assert [(group.label, len(group.runs)) for group in groups] == [("TDPFed", 3), ("FedAvg", 1)]
    assert notes == []
    seeds = groups[0]
    values = [run.figures["personalized_accuracy"] or 0 for run in seeds.runs]
    assert seeds.stat("personalized_accuracy").mean == pytest.approx(statistics.fmean(values))
    for field in FIELDS:
        columns = [run.series[field] for run in seeds.runs]
        for i, mean in enumerate(seeds.mean[field]):
            at = [column[i] for column in columns]
            assert mean == (None if None in at else pytest.approx(sum(one or 0 for one in at) / 3))
    for field in (*ACCURACIES, *LOSSES):
        sixth = [value for run in seeds.runs if (value := run.series[field][5]) is not None]
        assert seeds.spread[field][5] == (pytest.approx(statistics.stdev(sixth)) if sixth else None)


def test_a_mean_counts_finished_runs_at_the_rounds_they_share(tmp_path: Path) -> None:
    paths = [folders.make(tmp_path / f"{s}", seed=s) for s in (0, 1)]
    paths.append(folders.make(tmp_path / "2", seed=2, rounds=3, status=None))
    paths.append(folders.make(tmp_path / "3", seed=3, rounds=0, status=None))
    (group,), _ = grouped(*paths)
    assert [run.name for run in group.counted] == ["0", "1"]
    spent = [folders.make(tmp_path / f"spent{s}", seed=s, rounds=8, status="privacy budget spent") for s in (4, 5)]
    assert len(grouped(*spent, paths[2])[0][0].counted) == 2
    assert group.status == "2 finished, 2 in progress"
    assert group.mean["round"] == list(range(1, 21))
    (going,), _ = grouped(*paths[2:])
    assert [run.name for run in going.counted] == ["2"]
    (none,), _ = grouped(paths[3])
    assert (none.counted, none.mean["round"], none.stat("seconds")) == ((), [], Stat(None))


def test_names_say_what_tells_groups_apart(tmp_path: Path) -> None:
    sweep = [folders.make(tmp_path / f"c{c}", f"algorithm.compression={c}") for c in (2, 4, 8)]
    assert [group.label for group in grouped(*sweep)[0]] == [f"TDPFed, compression {c}" for c in (2, 4, 8)]
    odd = folders.make(tmp_path / "odd", "algorithm.compression=2", "robust.attack=alie")
    plain = folders.make(tmp_path / "plain", "algorithm.compression=2", "run.evaluate_every=5")
    labels = [group.label for group in grouped(sweep[0], odd, plain)[0]]
    assert labels == ["TDPFed (c2)", "TDPFed, attack alie", "TDPFed (plain)"]
    sections = ("robust.name=median", "participation.clients=3", "robust.clip=1.0")
    few = [folders.make(tmp_path / section, section) for section in sections]
    assert [group.label for group in grouped(sweep[0], *few)[0]][1:] == [
        "TDPFed, robust median", "TDPFed, participation.clients 3", "TDPFed, clip 1",
    ]  # fmt: skip
    many = [
        f"algorithm.{key}" for key in ("lam=3.0", "s=2", "tau=3", "eta=0.1", "eta_p=0.2", "momentum=0.1", "beta=0.5")
    ]
    assert [group.label for group in grouped(sweep[0], folders.make(tmp_path / "many", *many))[0]][1] == "many"


def test_data_sets_are_grouped_and_said(tmp_path: Path) -> None:
    digits = [folders.make(tmp_path / f"d{s}", seed=s) for s in (0, 1)]
    other = folders.make(tmp_path / "s", "data.name=synthetic", "data.options={alpha=0.5}")
    groups, (note,) = grouped(digits[0], other, digits[1])
    assert [group.dataset for group in groups] == ["digits", "synthetic (alpha=0.5)"]
    assert "digits" in note
    assert "synthetic (alpha=0.5)" in note


def test_the_same_seed_twice_is_said(tmp_path: Path) -> None:
    groups, (note,) = grouped(folders.make(tmp_path / "a"), folders.make(tmp_path / "b"))
    assert len(groups) == 1
    assert "a, b" in note
    assert "same seed" in note


def test_runs_without_a_configuration_stay_apart(tmp_path: Path) -> None:
    paths = [folders.make(tmp_path / f"{s}") for s in (0, 1)]
    for path in paths:
        (path / "config.toml").write_text("[broken")
    groups, _ = grouped(*paths)
    assert [group.label for group in groups] == ["TDPFed (0)", "TDPFed (1)"]
