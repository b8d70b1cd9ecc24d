"""The demo without Flower's processes: the checks before the start, the messages meanwhile, and the summary."""

import os
import shlex
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from tdpfed.cli import app
from tdpfed.config.loading import load_config
from tdpfed.errors import TDPFedError
from tdpfed.flower import demo as demos
from tdpfed.flower import services
from tdpfed.flower.app import init_app
from tdpfed.flower.demo import Demo, interruptible, node_settings, plan, run_demo
from tdpfed.flower.exchange import ITS_OWN
from tdpfed.flower.settings import read_settings
from tdpfed.flower.strategy import AWAY, SILENT
from tdpfed.flower.watch import Complaints, failure_of, follow, speed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 0}, "--nodes: 0 given"),
        ({"nodes": 100}, "--nodes: 100 given, must be at least 1 and at most 64"),
        ({"rounds": 0}, "--rounds: 0 given"),
        ({"node_config": "a=1"}, "--node-config: 'a=1' given, must be left out without --app"),
    ],
)
def test_a_demo_of_nonsense_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        Demo(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "fedagv"}, "did you mean 'fedavg'"),
        ({"overrides": ("run.nothing=1",)}, "unknown 'nothing'"),
        ({"overrides": ("robust.attack=alie",)}, "robust.attack: 'alie' given, must be left out"),
        ({"overrides": ("flower.deadlin=9",)}, "did you mean 'deadline'"),
        ({"app": Path("nowhere")}, "--app: 'nowhere' is not an app"),
        ({"overrides": ("flower.out=x",)}, "--set: 'flower.out' given, must be given as --out"),
        ({"overrides": (" flower.nodes =7",)}, "--set: 'flower.nodes' given, must be given as --nodes"),
        ({"overrides": ("data.clients=7",)}, "must be given as --nodes"),
        ({"overrides": ("model.name=lenet",)}, "--set: 'model.name' given, must be left out"),
        ({"overrides": ("data.augment=flip",)}, "data.augment: 'flip' given, must be 'none'"),
        ({"overrides": ("privacy.epsilon=3",)}, "privacy.epsilon: 3 given, must be left out"),
        ({"overrides": ("run.device=cuda",)}, "run.device: 'cuda' given, but PyTorch sees no GPU"),
    ],
)
def test_a_demo_that_cannot_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TDPFedError, match=words):
        run_demo(Demo(tmp_path / "demo", **options), print, print)
    assert not (tmp_path / "demo").exists()


def test_what_nodes_of_an_own_app_are_told(tmp_path: Path) -> None:
    demo = Demo(tmp_path, app=tmp_path, node_config="ward=\"A 1\" data='/x/y' beds=30")
    assert node_settings(demo, 0) == {"ward": "A 1", "data": "/x/y", "beds": 30}
    shares = Demo(tmp_path, app=tmp_path, node_config="data=/srv/ward-{partition-id}.npz bed={partition-id}")
    assert node_settings(shares, 2) == {"data": "/srv/ward-2.npz", "bed": 2}
    for name in ("partition-id", "num-partitions"):
        with pytest.raises(TDPFedError, match=f"--node-config: '{name}' given, must be left out"):
            node_settings(Demo(tmp_path, app=tmp_path, node_config=f"a=1 {name}=3"), 0)
    with pytest.raises(TDPFedError, match="--node-config: 'ward' given"):
        node_settings(Demo(tmp_path, app=tmp_path, node_config="ward"), 0)
    with pytest.raises(TDPFedError, match=r"--node-config: .* given, must be key=value pairs \("):
        node_settings(Demo(tmp_path, app=tmp_path, node_config="a='b"), 0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for options in ({}, {"app": tmp_path / "wards"}):
        if options:
            init_app(tmp_path / "wards")
        with pytest.raises(TDPFedError, match="--out: cannot write to"):
            run_demo(Demo(tmp_path / "file" / "x", **options), print, print)  # type: ignore[arg-type]


def test_the_same_in_simulation_is_a_command_that_runs(tmp_path: Path) -> None:
    overrides = ('algorithm.include=["fc*"]', "flower.deadline=9", " flower.max_samples=5000")
    program, run, name, *told = shlex.split(Demo(tmp_path, overrides=overrides).same)
    assert (program, run, name) == ("tdpfed", "run", "digits")
    config = load_config("digits", told[1::2])
    assert config.algorithm["include"] == ("fc*",)
    assert config.run.rounds == 3


def test_lists_reach_an_own_app(tmp_path: Path, without_flower: list[str]) -> None:
    init_app(tmp_path / "wards")
    with (tmp_path / "wards" / "pyproject.toml").open("a") as file:
        file.write("\n")
    given = ('algorithms.tdpfed.include=["fc1*", "fc2*"]', "flower.max_samples=77")
    with pytest.raises(TDPFedError, match="the run did not start"):
        run_demo(Demo(tmp_path / "demo", app=tmp_path / "wards", overrides=given), print, print)
    read = parse_config_args([without_flower[-1]])
    config, flower = read_settings(read)
    assert config.algorithm["include"] == ("fc1*", "fc2*")
    assert flower.max_samples == 77
    with pytest.raises(TDPFedError, match="both kinds of quotes"):
        run_demo(Demo(tmp_path / "a'\"b", app=tmp_path / "wards"), print, print)


def test_lines_are_followed_to_the_last(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    seen: list[Any] = []
    parts = iter(["", '{"round": 1}\n{"rou', 'nd": 2}\n'])  # half a line is not a line yet

    def running() -> bool:
        text = next(parts)
        with file.open("a") as out:
            out.write(text)
        return not text.startswith("nd")

    follow(file, running, seen.append)
    assert seen == [{"round": 1}, {"round": 2}]


def test_a_terminated_demo_ends_as_an_interrupted_one() -> None:
    def terminated() -> None:
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        terminated()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_speed_is_rounds_per_minute_and_our_share() -> None:
    lines = [{"train_seconds": 10.0, "server_seconds": 0.1, "client_seconds": 0.4}] * 2
    assert speed(lines) == {"rounds_per_minute": 6.0, "own_share": pytest.approx(0.05)}
    assert speed([]) == {"rounds_per_minute": None, "own_share": None}


# -- messages of a demo while it runs ----------------------------------------------------------------------------------

FAILED = f"node {{}} {SILENT} {ITS_OWN}task.load: no"


def logged(*texts: str, level: str = "INFO") -> str:
    return "".join(f"\x1b[92m{level} \x1b[0m:      tdpfed: {text}\n" for text in texts)


def test_why_nodes_cannot_take_part_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "node-1.log").write_text("\x1b[92mINFO \x1b[0m:      SuperNode ID: 12\n")
    said: list[str] = []
    complaints = Complaints(tmp_path, 2, said.append)
    complaints.look()  # there is nothing yet
    lost = "round 2: client 0: failed: Node Unavailable"
    whole = logged(FAILED.format(12), FAILED.format(12), lost, "client 0 is node 12, with 3 samples", FAILED.format(11))
    for end in (60, 200, len(whole) - 3, len(whole)):  # half a line is not a line yet
        (tmp_path / "run.log").write_text(whole[:end])
        complaints.look()
    assert said == [FAILED.format(12).replace("node 12", "node-1"), lost, FAILED.format(11)]
    assert complaints.failed == {"11"}  # the other has joined


@pytest.mark.parametrize("text", [FAILED, f"node {{}} {AWAY} partition-id: 0 given"])
def test_a_demo_that_no_node_can_take_part_in_stops(tmp_path: Path, text: str) -> None:
    silent = FAILED.replace(f"{ITS_OWN}task.load: no", "no reply within 120 seconds")  # it may come yet
    (tmp_path / "run.log").write_text(logged(text.format(11), silent.format(12)))
    complaints = Complaints(tmp_path, 2, lambda said: None)
    complaints.look()
    with (tmp_path / "run.log").open("a") as log:
        log.write(logged(text.format(12)))
    with pytest.raises(TDPFedError, match=r"no node can take part.* node 12 .*: (task.load: no|partition-id)"):
        complaints.look()


def test_the_error_of_a_run_without_summary_is_never_another_line() -> None:
    start = "Using SuperLink: federation\n" + logged("client 0 is node 1, with 2 samples")
    ours = logged("flower.out: no", level="ERROR")
    trace = (
        "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'pandas'\nExit Code: 201\n"
    )
    assert failure_of(start + ours + trace) == "the run failed: flower.out: no"
    assert failure_of(start + trace) == "the run failed: ModuleNotFoundError: No module named 'pandas'"
    assert failure_of("╭─ Error ─╮\n│ no such app │\n") == "the run did not start: Error no such app"
    assert failure_of("").startswith("the run did not start: ")


def test_with_an_own_app_its_values_count_unless_options_are_given(
    tmp_path: Path, without_flower: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    init_app(tmp_path / "wards")
    file = tmp_path / "wards" / "pyproject.toml"
    text = file.read_text()
    own = text.replace('name = "tdpfed"', 'name = "pfedme"').replace("rounds = 10", "rounds = 7")
    file.write_text(own.replace("nodes = 3", "nodes = 4").replace("insecure = false", "insecure = true"))
    asked = plan(tmp_path / "one", None, None, None, app=tmp_path / "wards")
    assert (asked.nodes, asked.rounds, asked.algorithm) == (4, 7, "pfedme")
    with pytest.raises(TDPFedError, match="the run did not start"):
        run_demo(asked, print, print)
    assert parse_config_args([without_flower[-1]]) == {"flower.out": str(asked.run), "flower.insecure": False}
    asked = plan(tmp_path / "two", 2, 1, "fedavg", app=tmp_path / "wards", insecure=True)
    with pytest.raises(TDPFedError, match="the run did not start"):
        run_demo(asked, print, print)
    given = {"flower.nodes": 2, "run.rounds": 1, "algorithm.name": "fedavg"}
    assert parse_config_args([without_flower[-1]]) == {"flower.out": str(asked.run), **given}
    monkeypatch.chdir(tmp_path)
    asked = plan(None, None, None, None)
    assert (asked.nodes, asked.rounds, asked.algorithm, asked.work.name[:14]) == (3, 3, "tdpfed", "flower-tdpfed-")


def test_mistakes_of_the_app_come_before_those_of_options(tmp_path: Path) -> None:
    init_app(tmp_path / "wards")
    file = tmp_path / "wards" / "pyproject.toml"
    text = file.read_text()
    file.write_text(text.replace("rounds = 10", "roundz = 10"))
    with pytest.raises(TDPFedError, match=r"run: unknown 'roundz', did you mean 'rounds'.*pyproject.toml"):
        plan(tmp_path / "demo", None, 1, None, app=tmp_path / "wards")
    file.write_text(text.replace("rounds = 10\n", ""))
    with pytest.raises(TDPFedError, match=r"--rounds: 'run.rounds' is not in .*pyproject.toml"):
        run_demo(plan(tmp_path / "demo", None, 1, None, app=tmp_path / "wards"), print, print)
    assert not (tmp_path / "demo").exists()


class FakeProcess:
    pid = 0

    def poll(self) -> int:
        return 0


@pytest.fixture
def without_flower(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A federation whose processes are not started; what would have been done is noted."""
    done: list[str] = []
    for name in ("start_superlink", "register"):
        monkeypatch.setattr(services.LocalFederation, name, lambda self, name=name: done.append(name))
    monkeypatch.setattr(services.LocalFederation, "start_node", lambda self, k, given: done.append(f"node {k}"))

    def submit(self: Any, path: Path, overrides: str = "") -> FakeProcess:
        done.append(overrides)
        return FakeProcess()

    monkeypatch.setattr(services.LocalFederation, "submit", submit)
    return done


def test_a_run_that_does_not_start_says_what_flower_said(tmp_path: Path, without_flower: list[str]) -> None:
    (tmp_path / "demo" / "logs").mkdir(parents=True)
    with pytest.raises(TDPFedError, match="not empty"):
        run_demo(Demo(tmp_path / "demo"), print, print)
    with pytest.raises(TDPFedError, match="the run did not start"):
        run_demo(Demo(tmp_path / "other"), print, print)
    assert without_flower == ["start_superlink", "register", "node 0", "node 1", "node 2", ""]
    config = tomllib.loads((tmp_path / "other" / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["flower"]["out"] == str(tmp_path / "other" / "run")
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o700
    assert config["algorithm"]["name"] == "tdpfed"


def test_an_own_app_is_checked_before_anything_starts(tmp_path: Path, without_flower: list[str]) -> None:
    init_app(tmp_path / "wards")

    def tried(*overrides: str) -> None:
        run_demo(Demo(tmp_path / "demo", app=tmp_path / "wards", overrides=overrides), print, print)

    for setting, words in (
        ("algorithms.tdpfed.tau=-1", "algorithms?.tau: -1 given|tau: -1 given"),
        ("run.roundz=1", "run: unknown 'roundz', did you mean 'rounds'"),
        ("robust.clip=1.0", "--set: 'robust.clip' is not in .*pyproject.toml"),
    ):
        with pytest.raises(TDPFedError, match=words):
            tried(setting)
        assert not (tmp_path / "demo").exists()
    with pytest.raises(TDPFedError, match="the run did not start"):
        tried("flower.deadline=9.5", "algorithms.tdpfed.tau=2")
    assert without_flower[-1].endswith(" flower.deadline=9.5 algorithms.tdpfed.tau=2")


def test_the_command_line_shows_the_summary(
    tmp_path: Path, without_flower: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fake import digits, simulated

    from tdpfed.runs.summary import facts_of, summarize

    simulation = simulated(digits("algorithm.name=fedavg"), 1)
    made = {**summarize(facts_of(simulation, "dnn"), [simulation.record(1.0)], "finished"), "error": None}
    made |= {"rounds_per_minute": 6.0, "own_share": 0.04}

    def ran(demo: Demo, notify: Any, on_round: Any) -> dict[str, Any]:
        notify("starting")
        on_round({"round": 1, "lost": {"1": "not connected"}, "refused": ["x"], "replies": 2, "seconds": 1.0})
        return made

    monkeypatch.setattr(demos, "run_demo", ran)
    done = CliRunner().invoke(app, ["flower", "demo", "--out", str(tmp_path / "x")])
    assert done.exit_code == 0, done.output
    assert "round 1 of 3: 2 replies, 1 lost, 1 refused, 1.0 s" in done.stderr
    assert "6.0 rounds per minute without evaluations, 4.00 %" in done.stderr
    assert f"run folder: {tmp_path}/x/run\n" in done.stderr
    assert "tdpfed run digits --set run.rounds=3" in done.stderr
    assert "tdpfed's own code" in done.stderr
    made |= {"status": "failed", "error": "round 2: no"}
    init_app(tmp_path / "ward")
    done = CliRunner().invoke(
        app, ["flower", "demo", "--json", "--app", str(tmp_path / "ward"), "--out", str(tmp_path / "x")]
    )
    assert done.exit_code == 1
    assert "the run failed: round 2: no" in done.stderr
    monkeypatch.setattr(demos, "run_demo", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert CliRunner().invoke(app, ["flower", "demo", "--out", str(tmp_path / "y")]).exit_code == 130
