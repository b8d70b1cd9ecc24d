"""Real federations: a SuperLink and SuperNodes as processes, with TLS and node authentication, and what goes wrong.

The first test runs with all others; those marked slow take minutes: ``python -m pytest -m slow tests/flower``.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
if not Path("/proc").is_dir():
    pytest.skip("processes are looked up in /proc", allow_module_level=True)

import torch
from fake import DigitsTask, FakeGrid, run_config
from safetensors.torch import load_file
from typer.testing import CliRunner

import page_methods
from page_methods import METHODS
from tdpfed.cli import app
from tdpfed.config import Config, load_config
from tdpfed.flower import guard
from tdpfed.flower.app import init_app
from tdpfed.flower.demo import Demo, deal
from tdpfed.flower.envelope import ENVELOPE, REQUESTS
from tdpfed.flower.keys import make_keys
from tdpfed.flower.private import PrivateStore
from tdpfed.flower.server_app import run_server
from tdpfed.flower.services import LocalFederation, free_port
from tdpfed.flower.settings import Flower, as_run_config
from tdpfed.runs.prepare import prepare

COMMAND = [sys.executable, "-c", "from tdpfed.cli import main; main()", "flower", "demo"]
PATIENCE = 400.0


def left_over(folder: Path) -> list[str]:
    """Return the command lines of processes that were started for a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={folder}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def until(holds: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.2)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def difference(one: Path, wanted: dict[str, torch.Tensor]) -> float:
    made = load_file(one)
    return max(float((made[name] - value).abs().max()) for name, value in wanted.items())


class Trial:
    """An app on the digits and a federation to run it on, both below one folder."""

    def __init__(self, work: Path, nodes: int, *overrides: str, **flower: Any) -> None:
        self.demo = Demo(work, nodes, overrides=(*overrides, "run.runner=loop"))  # nodes compute one by one
        self.config: Config = load_config("digits", self.demo.settings)
        deal(self.config, self.demo)
        given = {"nodes": nodes, "out": str(work / "run"), "deadline": 60.0, "wait": 300.0, **flower}
        self.flower = Flower(**given)
        init_app(work / "app", as_run_config(self.config, self.flower))
        self.federation, self.run = LocalFederation(work, nodes), work / "run"
        self.federation.prepare()

    def start(self, **extra: Any) -> None:
        self.federation.start_superlink()
        self.federation.register()
        for number in range(self.demo.nodes):
            self.start_node(number, **extra.get(f"node_{number}", {}))

    def start_node(self, number: int, **extra: Any) -> None:
        data = str(self.demo.work / f"node-{number}" / "data.npz")
        self.federation.start_node(number, {"data": data, **extra})

    def rounds(self) -> list[dict[str, Any]]:
        return lines(self.run / "rounds.jsonl")

    def finish(self, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
        process.wait(PATIENCE)
        log = self.federation.processes.log("run")
        assert (self.run / "summary.json").exists(), log
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        assert summary["status"] == "finished", (summary["error"], log)
        return summary

    def state(self, number: int) -> PrivateStore:
        (folder,) = (self.demo.work / f"node-{number}" / "state").glob(f"*/client-{number}")
        return PrivateStore(folder)

    def equals_simulation(self) -> None:
        simulation = prepare(self.config)
        for _ in range(self.config.run.rounds):
            simulation.step()
        shipped = simulation.global_model()
        assert shipped is not None
        assert difference(self.run / "global.safetensors", simulation.objective.state_dict(shipped)) <= 1e-6
        for number in range(self.demo.nodes):
            kept = self.state(number).upto(10**6)
            assert kept is not None
            assert float((kept["theta"] - simulation.private["theta"][number]).abs().max()) <= 1e-6


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "federation"
    yield folder
    assert left_over(folder) == []


def demo(work: Path, *arguments: str) -> dict[str, Any]:
    """Run the command to its end, in this process; all others of the federation have their own."""
    done = CliRunner().invoke(app, ["flower", "demo", "--out", str(work), "--json", *arguments])
    assert done.exit_code == 0, (done.stderr, done.exception)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def check_demo(work: Path, algorithm: str, nodes: int, rounds: int) -> None:
    summary = demo(work, "--algorithm", algorithm, "--nodes", str(nodes), "--rounds", str(rounds))
    settings = [*Demo(work, nodes, rounds, algorithm).settings, "run.runner=loop"]  # nodes compute one by one
    simulation = prepare(load_config("digits", settings))
    for _ in range(rounds):
        simulation.step()
    shipped, record = simulation.global_model(), simulation.record(0.0)
    if shipped is not None:
        assert difference(work / "run" / "global.safetensors", simulation.objective.state_dict(shipped)) <= 1e-6
    assert summary["personalized_accuracy"] == pytest.approx(record.personalized_accuracy)
    assert summary["uplink_bytes"] == simulation.ledger.uplink
    with sqlite3.connect(work / "server" / "superlink.db") as database:
        ((received,),) = database.execute("SELECT bytes_recv FROM run").fetchall()
    # What the SuperLink itself counted: uploads, and the replies of first contact and evaluation.
    replies = simulation.ledger.uploads + 2 * nodes
    wanted = simulation.ledger.uplink + replies * (ENVELOPE + REQUESTS)
    assert abs(received - wanted) <= 0.02 * simulation.ledger.uplink
    assert left_over(work) == []


def test_the_demo_is_the_simulation(work: Path) -> None:
    check_demo(work, "tdpfed", nodes=2, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["tdpfed", "fedavg", "pfedme"])
def test_a_longer_demo_is_the_simulation(work: Path, algorithm: str) -> None:
    check_demo(work, algorithm, nodes=3, rounds=3)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", METHODS)
def test_two_real_nodes_run_the_methods_of_the_docs(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    page_methods.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    check_demo(work, algorithm, nodes=2, rounds=2)


TAMPERING = '''
from flwr.app import Array, ArrayRecord
from tdpfed.flower import client_app
from app import task

app = client_app(task)
honest = app.__call__


def tampered(message, context):
    """What a hostile node sends, a round each: NaN, another shape, far too much, zeros, huge numbers."""
    reply = honest(message, context)
    if not context.node_config.get("bad") or message.metadata.message_type != "train":
        return reply
    import torch
    from tdpfed.flower.node import Node
    from tdpfed.wire import Form, encode, with_header

    round_ = int(message.metadata.group_id)
    node = Node(task, context.run_config, context.node_config)
    given, form = {"kind": "up", "round_": round_, "client": 2, "samples": len(node.data.x)}, node.side.channel.form
    (section,) = form.sections
    if round_ == 2:
        data = encode([torch.ones(12)], Form.whole({"factors": 12}), **given)
    elif round_ == 3:
        data = bytes(60_000_000)
    else:
        value = {1: float("nan"), 4: 0.0, 5: 1e25}[round_]
        data = with_header(torch.full((section.length,), value).numpy().tobytes(), form, **given)
    reply.content["wire"] = ArrayRecord({"wire": Array("uint8", (len(data),), "tdpfed.wire", data)})
    return reply


methods = {"__call__": lambda self, message, context: tampered(message, context)}
app.__class__ = type("Tampering", (app.__class__,), methods)
'''


INTRUDERS = {
    10: "Failed to activate SuperNode",  # a key that is not registered
    11: "CERTIFICATE_VERIFY_FAILED",  # another certificate authority
    12: "Failed to initialize the connection",  # no TLS
}


@pytest.mark.slow
@pytest.mark.hostile
def test_a_federation_with_hostile_nodes_intruders_and_a_restart(work: Path) -> None:
    keep = (
        "algorithm.keep_theta=true", "participation.quorum=2", "run.rounds=5", "run.evaluate_every=9",
        "robust.gauge=1.0",
    )  # fmt: skip
    trial = Trial(work, 3, *keep, deadline=45.0)
    (work / "app" / "app" / "client_app.py").write_text(TAMPERING)
    make_keys(work / "others", 1)
    with trial.federation as federation:
        trial.start(node_2={"bad": True})
        keys, ca, plain = work / "others" / "node-0.key", work / "others" / "ca.pem", str(free_port())
        federation.start_node(10, {}, key=keys)
        federation.start_node(11, {}, key=federation.keys / "node-1.key", ca=ca)
        federation.processes.start(
            "node-12",
            [str(Path(sys.executable).parent / "flower-supernode"), "--insecure", "--superlink", federation.address,
             "--host", "127.0.0.1", "--port", plain, "--max-retries", "2"],
            federation.environment("node-12"),
        )  # fmt: skip
        process = federation.submit(work / "app")
        until(lambda: len(trial.rounds()) >= 1 or process.poll() is not None, "the first round")
        before = trial.state(1).upto(1)
        federation.processes.end("node-1")
        trial.start_node(1)
        summary = trial.finish(process)
        for intruder, words in INTRUDERS.items():
            log = federation.processes.log(f"node-{intruder}")
            assert words in log, log
            assert "SuperNode ID" not in log, log
            assert federation.processes.running[f"node-{intruder}"].poll()
    refused = {(line["round"], line["client"], line["rule"]) for line in lines(trial.run / "refusals.jsonl")}
    assert refused == {(1, 2, "nan"), (2, 2, "layout"), (3, 2, "size"), (4, 2, "gauge"), (5, 2, "gauge")}
    assert summary["rounds"] == 5
    # Whatever was repeated, the model is that of the two honest clients: none has lost its own.
    assert before is not None
    folder = work / "twin"
    task = DigitsTask(prepare(trial.config))
    settings = run_config(trial.config, folder / "run", nodes=3, wait=0.01)
    run_server(task, FakeGrid(task, settings, folder / "state", nodes=[0, 1]), settings)
    assert difference(trial.run / "global.safetensors", load_file(folder / "run" / "global.safetensors")) <= 1e-6
    for number in (0, 1):
        (twin,) = (folder / "state").glob(f"*/client-{number}")
        kept, wanted = trial.state(number).upto(9), PrivateStore(twin).upto(9)
        assert kept is not None
        assert wanted is not None
        assert float((kept["theta"] - wanted["theta"]).abs().max()) <= 1e-6


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(work: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--out", str(work), "--nodes", "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until(lambda: (work / "logs" / "node-1.log").exists() or process.poll() is not None, "the last node")
    time.sleep(1)
    assert left_over(work)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted; all processes " in output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell children")
def test_a_killed_demo_leaves_nothing_behind(work: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--out", str(work), "--nodes", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until(lambda: "flwr-clientapp" in (" ".join(left_over(work))) or process.poll() is not None, "work on a node")
    process.kill()
    process.wait()
    until(lambda: not left_over(work), "all processes to end", 30)


@pytest.mark.slow
def test_the_demo_says_why_no_node_can_take_part(work: Path, tmp_path: Path) -> None:
    init_app(tmp_path / "wards")
    began = time.monotonic()
    done = subprocess.run(
        [*COMMAND, "--out", str(work), "--app", str(tmp_path / "wards"), "--nodes", "2"], capture_output=True,
        text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert time.monotonic() - began < 200  # and not the 600 seconds of flower.wait
    said = [line for line in done.stderr.splitlines() if line.startswith("node-")]
    assert len(said) == 2, done.stderr
    assert all(line.endswith("its app failed: task.load: failed (KeyError: 'data')") for line in said)
    assert "error: no node can take part; the last error: node-" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_node_killed_and_started_again_keeps_its_model(work: Path) -> None:
    trial = Trial(work, 2, "algorithm.keep_theta=true", "participation.quorum=2", "run.rounds=4", deadline=30.0)
    with trial.federation as federation:
        trial.start()
        process = federation.submit(work / "app")
        until(lambda: len(trial.rounds()) >= 1, "the first round")
        federation.processes.end("node-1", signal.SIGKILL)
        kept = trial.state(1).upto(9)

        def back() -> bool:
            """The SuperLink takes a node for alive until its last heartbeat is a minute old."""
            running = federation.processes.running.get("node-1")
            if running is None or running.poll() is not None:
                trial.start_node(1)
                time.sleep(3)
            return federation.processes.log("node-1").count("SuperNode ID") == 2

        until(back, "the node", 120)
        assert kept is not None
        trial.finish(process)
    trial.equals_simulation()


def server_app_of(federation: LocalFederation) -> int:
    """Return the process of the ServerApp."""
    for pid in federation.processes.alive():
        if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no ServerApp runs")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server app", "SuperLink"])
def test_a_killed_server_goes_on_from_its_checkpoint(work: Path, victim: str) -> None:
    trial = Trial(
        work, 2, "algorithm.keep_theta=true", "participation.quorum=2", "run.rounds=4", "checkpoint.every=1",
        deadline=60.0,
    )  # fmt: skip
    with trial.federation as federation:
        trial.start()
        process = federation.submit(work / "app")
        until(lambda: len(trial.rounds()) >= 2, "the second round")
        time.sleep(2)
        if victim == "server app":
            os.kill(server_app_of(federation), signal.SIGKILL)
        else:
            federation.processes.end("superlink", signal.SIGKILL)
            time.sleep(2)
            federation.start_superlink()
        process.kill()
        process.wait()
        trial.finish(federation.submit(work / "app"))
        assert "resuming from round" in federation.processes.log("run")
    trial.equals_simulation()


ONE_BEHIND = """
import flwr.supernode.start_client_internal as internal
pull, times = internal._pull_and_store_message, []


def once(**given):
    # As where the run ends before the SuperLink hears that the message has come: nobody waits for the reply.
    found = pull(**given)
    times.append(found)
    return None if found is not None and len([one for one in times if one is not None]) == 1 else found


internal._pull_and_store_message = once
from flwr.supernode.cli.flower_supernode import flower_supernode
flower_supernode()
"""


@pytest.mark.slow
def test_a_supernode_that_is_a_message_behind_is_set_right(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(work, 2, "algorithm.keep_theta=true", "participation.quorum=2", "run.rounds=4", deadline=60.0)
    behind = work / "behind"
    behind.write_text(f"#!{sys.executable}\n{ONE_BEHIND}")
    behind.chmod(0o755)
    with trial.federation as federation:
        federation.start_superlink()
        federation.register()
        trial.start_node(0)
        path = guard.command_path
        monkeypatch.setattr(
            guard, "command_path", lambda name: str(behind) if name == "flower-supernode" else path(name)
        )
        trial.start_node(1)
        monkeypatch.setattr(guard, "command_path", path)
        trial.finish(federation.submit(work / "app"))
    trial.equals_simulation()
    assert [line["lost"] for line in trial.rounds()] == [{}] * 4
    told = re.findall(r"(Receiving|Sending): (\w+) message", federation.processes.log("node-1"))
    first, last = (told.index(("Receiving", "query")), len(told) - told[::-1].index(("Receiving", "train")))
    assert told[first + 1] == ("Receiving", "query"), told  # the reply to the first message stays, until it is nudged
    assert told[last] == ("Sending", "train"), told  # in the end none stays: two replies were sent in one go


@pytest.mark.slow
def test_an_own_model_and_own_data_run_from_the_template(work: Path, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_federation.py"
    done = subprocess.run(
        [sys.executable, str(example), "--out", str(work), "--rounds", "2"], capture_output=True, text=True,
        check=False, timeout=PATIENCE, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "personalized accuracy" in done.stdout
    summary = json.loads((work / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["personalized_accuracy"] > 0.6


@pytest.mark.slow
def test_without_tls_only_when_asked_for_and_said_loudly(work: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--out", str(work), "--insecure", "--nodes", "1", "--rounds", "1", "--algorithm", "fedavg"],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "INSECURE" in done.stderr
    assert "INSECURE" in (work / "logs" / "run.log").read_text()
