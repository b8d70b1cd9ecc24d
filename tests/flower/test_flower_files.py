"""Keys, templates and child processes: what `tdpfed flower` writes and starts without Flower."""

import errno
import io
import os
import shlex
import signal
import ssl
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from tdpfed.algorithms import ALGORITHMS
from tdpfed.cli import app
from tdpfed.config import load_config
from tdpfed.errors import TDPFedError
from tdpfed.flower import demo as demos
from tdpfed.flower import federation as federations
from tdpfed.flower.app import default_tables, init_app
from tdpfed.flower.demo import Demo, interruptible, node_settings, plan, run_demo
from tdpfed.flower.keys import make_keys
from tdpfed.flower.processes import Processes, marked
from tdpfed.flower.settings import read_settings
from tdpfed.flower.watch import Complaints, follow, speed, why

# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_what_tls_and_flower_take(tmp_path: Path) -> None:
    files = make_keys(tmp_path / "keys", 2, ["superlink.example.org", "10.0.0.7"])
    names = {file.name for file in files}
    assert names == {
        "ca.pem",
        "ca.key",
        "server.pem",
        "server.key",
        *(f"node-{k}.{e}" for k in (0, 1) for e in ("key", "pub")),
    }
    for file in files:
        assert file.stat().st_mode & 0o777 == (0o600 if file.suffix == ".key" else 0o644)
    folder = tmp_path / "keys"
    ssl.create_default_context(cafile=str(folder / "ca.pem"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    authority, leaf = (x509.load_pem_x509_certificate((folder / n).read_bytes()) for n in ("ca.pem", "server.pem"))
    leaf.verify_directly_issued_by(authority)
    san = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "superlink.example.org" in san.get_values_for_type(x509.DNSName)
    assert {"10.0.0.7", "127.0.0.1"} <= {str(a) for a in san.get_values_for_type(x509.IPAddress)}
    key, public = load_ssh_private_key((folder / "node-0.key").read_bytes(), None), (folder / "node-0.pub").read_bytes()
    loaded = load_ssh_public_key(public)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(loaded, ec.EllipticCurvePublicKey)
    assert key.public_key() == loaded
    assert (folder / "node-1.pub").read_bytes() != public


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nodes": 0}, "--nodes: 0 given"),
        ({"days": 0}, "--days: 0 given"),
        ({"hosts": ["http://x"]}, "--host: 'http://x' given"),
        ({"hosts": ["x:9092"]}, "without port"),
        ({"hosts": [""]}, "--host: '' given"),
        ({"hosts": ["-x"]}, "--host: '-x' given"),
    ],
)
def test_keys_for_nonsense_are_refused_and_nothing_is_written(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(TDPFedError, match=words):
        make_keys(tmp_path / "keys", **{"nodes": 1, **arguments})
    assert not (tmp_path / "keys").exists()


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1)
    before = (tmp_path / "keys" / "ca.key").read_bytes()
    for place in (tmp_path / "keys", tmp_path / "keys" / "ca.pem"):
        with pytest.raises(TDPFedError, match="already there"):
            make_keys(place, 1)
    with pytest.raises(TDPFedError, match="cannot write"):
        make_keys(tmp_path / "keys" / "ca.pem" / "below", 1)
    assert (tmp_path / "keys" / "ca.key").read_bytes() == before


# -- templates ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_a_new_app_is_one_that_flower_takes(tmp_path: Path) -> None:
    init_app(tmp_path / "my-ward")
    config, warnings = load_and_validate(tmp_path / "my-ward" / "pyproject.toml")
    assert not warnings
    assert config["tool"]["flwr"]["app"]["components"]["clientapp"] == "my_ward.client_app:app"
    assert build_fab_from_disk(tmp_path / "my-ward")
    compile((tmp_path / "my-ward" / "my_ward" / "task.py").read_text(), "task.py", "exec")


def test_a_new_app_has_every_key_that_can_be_changed_on_the_command_line() -> None:
    tables = default_tables()
    assert {f"algorithms.{name}" for name in ALGORITHMS} <= tables.keys()
    assert "attack" not in tables["robust"]
    assert tables["flower"].keys() == {"nodes", "wait", "deadline", "max_samples", "out", "insecure"}
    assert not {"seeds", "evaluate_clients"} & tables["run"].keys()
    assert tables["algorithms.tdpfed"]["compression"] == 2.0


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_what_runs_leave_in_an_app_is_not_sent_to_nodes(tmp_path: Path) -> None:
    app_ = tmp_path / "ward"
    init_app(app_)
    for place in ("runs/flower-x/notes.md", "keys/ca.key", "keys/notes.md", "ward/extra.py"):
        (app_ / place).parent.mkdir(parents=True, exist_ok=True)
        (app_ / place).write_text("x = 1\n")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app_))) as sent:
        names = sent.namelist()
    assert "ward/extra.py" in names
    assert not [name for name in names if name.startswith(("runs/", "keys/"))]


@pytest.mark.parametrize("make", [lambda folder: make_keys(folder, 2), init_app], ids=["keys", "app"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, there: bool
) -> None:
    folder, opened, opens = tmp_path / "mine", os.open, []
    if there:
        folder.mkdir()

    def full(*arguments: Any, **options: Any) -> int:
        opens.append(1)
        if len(opens) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(*arguments, **options)

    with monkeypatch.context() as disk:
        disk.setattr(os, "open", full)
        with pytest.raises(TDPFedError, match=r"cannot write to .*No space left"):
            make(folder)
    assert [entry.name for entry in tmp_path.rglob("*")] == (["mine"] if there else [])
    assert all(file.exists() for file in make(folder))


@pytest.mark.parametrize("name", ["1st", "under_score", "x" * 33, "a b"])
def test_names_that_flower_would_refuse_are_refused_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(TDPFedError, match="must be letters, digits and hyphens"):
        init_app(tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [("class", "a word of Python's own"), ("Torch", "'torch' is"), ("tdpfed", "'tdpfed' is"), ("json", "'json' is")],
)
def test_names_that_would_hide_another_module_are_refused(tmp_path: Path, name: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tdpfed", "flower", "init", name], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wards").mkdir()
    assert init_app(tmp_path / "wards")


def test_an_app_is_never_written_over_something(tmp_path: Path) -> None:
    init_app(tmp_path / "mine")
    with pytest.raises(TDPFedError, match="already there"):
        init_app(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(TDPFedError, match="cannot write"):
        init_app(tmp_path / "file" / "below")


# -- processes ---------------------------------------------------------------------------------------------------------

SLEEPER = "[sys.executable, '-c', 'import time; time.sleep(600)']"
CHILD = f"import subprocess, sys, time; subprocess.Popen({SLEEPER}, start_new_session=True); print('up', flush=True); "
CHILD += "time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def up(processes: Processes, name: str) -> None:
    end = time.monotonic() + 30
    while "up" not in processes.log(name) and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_nothing_is_left_not_even_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    processes = Processes(tmp_path, patience=1.0)

    def fails() -> None:
        with processes:
            processes.start("child", [sys.executable, "-c", CHILD], os.environ)
            processes.start("stubborn", [sys.executable, "-c", STUBBORN], os.environ)
            up(processes, "child")
            up(processes, "stubborn")
            assert len(processes.alive()) == 3
            processes.start("child", ["true"], {})

    with pytest.raises(TDPFedError, match="'child' runs already"):
        fails()
    assert marked(processes.mark) == []


IMPATIENT = f"""
import sys
from pathlib import Path
from tdpfed.flower.demo import interruptible
from tdpfed.flower.processes import Processes
import os, time
with interruptible(), Processes(Path(sys.argv[1]), patience=2.0) as processes:
    processes.start("stubborn", [sys.executable, "-c", {STUBBORN!r}], os.environ)
    while "up" not in processes.log("stubborn"):
        time.sleep(0.05)
    print(processes.mark, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_while_ending_leaves_nothing_behind(tmp_path: Path, second: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    mark = process.stdout.readline().strip()
    assert len(marked(mark)) == 1
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # it is ending what it started, politely first
    process.send_signal(second)
    _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert marked(mark) == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_what_is_started_while_others_end_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, alive = Processes(tmp_path, patience=3.0), Processes.alive
    calls: list[int] = []

    def late(self: Processes) -> list[int]:
        """Another one appears after the first look, as a child would that was being started."""
        found = alive(self)
        calls.append(1)
        if len(calls) == 1:
            self.start("late", [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
        return found

    monkeypatch.setattr(Processes, "alive", late)
    processes.start("one", [sys.executable, "-c", STUBBORN], os.environ)
    up(processes, "one")
    began = time.monotonic()
    processes.stop()
    assert processes.running["late"].returncode == -signal.SIGTERM
    assert time.monotonic() - began < 10
    assert marked(processes.mark) == []


KILLED = f"""
import os, sys, time
from pathlib import Path
from tdpfed.flower.processes import Processes
with Processes(Path(sys.argv[1])) as processes:
    processes.start("stubborn", [sys.executable, "-c", {STUBBORN!r}], os.environ)
    while "up" not in processes.log("stubborn"):
        time.sleep(0.05)
    print(processes.mark, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell children")
def test_when_we_are_killed_those_we_started_end_too(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    mark = process.stdout.readline().strip()
    assert len(marked(mark)) == 1
    process.kill()
    process.communicate()
    end = time.monotonic() + 10
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert marked(mark) == []


def test_one_process_can_be_ended_and_started_again(tmp_path: Path) -> None:
    with Processes(tmp_path, patience=0.5) as processes:
        processes.start("one", [sys.executable, "-c", STUBBORN], os.environ)
        up(processes, "one")
        processes.end("one")
        processes.start("one", [sys.executable, "-c", STUBBORN], os.environ)
        processes.end("one", signal.SIGKILL)
    assert processes.log("one").count("up") >= 1
    assert processes.log("other") == ""


# -- the demo, up to where Flower begins -------------------------------------------------------------------------------


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
        ({"app": Path("nowhere")}, "--app: 'nowhere' is no app with a configuration"),
        ({"overrides": ("flower.out=x",)}, "--set: 'flower.out' given, must be given as --out"),
        ({"overrides": (" flower.nodes =7",)}, "--set: 'flower.nodes' given, must be given as --nodes"),
        ({"overrides": ("data.clients=7",)}, "must be given as --nodes"),
        ({"overrides": ("model.name=lenet",)}, "a demo has its own model and data"),
        ({"overrides": ("privacy.epsilon=3",)}, "privacy.epsilon: 3.0 given, must be left out"),
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
        with pytest.raises(TDPFedError, match=f"--node-config: '{name}' given, must be left out: a demo tells each"):
            node_settings(Demo(tmp_path, app=tmp_path, node_config=f"a=1 {name}=3"), 0)
    with pytest.raises(TDPFedError, match="--node-config: 'ward' given"):
        node_settings(Demo(tmp_path, app=tmp_path, node_config="ward"), 0)
    with pytest.raises(TDPFedError, match=r"--node-config: .* cannot be read"):
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


# -- what a demo says while it runs ------------------------------------------------------------------------------------

FAILED = "node {} does not say who it is, and will be asked again: its app failed: task.load: no"


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
    assert complaints.failed == {"11"}  # the other came to be a client after all


@pytest.mark.parametrize("text", [FAILED, "node {} is turned away: partition-id: 0 given, which node 3 has already"])
def test_a_demo_that_no_node_can_take_part_in_is_given_up(tmp_path: Path, text: str) -> None:
    silent = FAILED.replace("its app failed: task.load: no", "no reply within 120 seconds")  # it may come yet
    (tmp_path / "run.log").write_text(logged(text.format(11), silent.format(12)))
    complaints = Complaints(tmp_path, 2, lambda said: None)
    complaints.look()
    with (tmp_path / "run.log").open("a") as log:
        log.write(logged(text.format(12)))
    with pytest.raises(TDPFedError, match=r"no node can take part; the last: node 12 .*: (task.load: no|partition-id)"):
        complaints.look()


def test_the_error_of_a_run_without_summary_is_never_another_line() -> None:
    start = "Using SuperLink: federation\n" + logged("client 0 is node 1, with 2 samples")
    ours = logged("flower.out: no", level="ERROR")
    trace = (
        "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'pandas'\nExit Code: 201\n"
    )
    assert why(start + ours + trace) == "the run failed: flower.out: no"
    assert why(start + trace) == "the run failed: ModuleNotFoundError: No module named 'pandas'"
    assert why("╭─ Error ─╮\n│ no such app │\n") == "the run did not start: Error no such app"
    assert why("") == "the run did not start: nothing was said"


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
    with pytest.raises(TDPFedError, match=r"pyproject.toml: run: unknown 'roundz', did you mean 'rounds'"):
        plan(tmp_path / "demo", None, 1, None, app=tmp_path / "wards")
    file.write_text(text.replace("rounds = 10\n", ""))
    with pytest.raises(TDPFedError, match=r"--rounds: 'run.rounds' does not stand in the app's pyproject.toml"):
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
        monkeypatch.setattr(federations.LocalFederation, name, lambda self, name=name: done.append(name))
    monkeypatch.setattr(federations.LocalFederation, "start_node", lambda self, k, given: done.append(f"node {k}"))

    def submit(self: Any, path: Path, overrides: str = "") -> FakeProcess:
        done.append(overrides)
        return FakeProcess()

    monkeypatch.setattr(federations.LocalFederation, "submit", submit)
    return done


def test_a_run_that_does_not_start_says_what_flower_said(tmp_path: Path, without_flower: list[str]) -> None:
    (tmp_path / "demo" / "logs").mkdir(parents=True)
    with pytest.raises(TDPFedError, match="already there and not empty"):
        run_demo(Demo(tmp_path / "demo"), print, print)
    with pytest.raises(TDPFedError, match="the run did not start: nothing was said"):
        run_demo(Demo(tmp_path / "other"), print, print)
    assert without_flower == ["start_superlink", "register", "node 0", "node 1", "node 2", ""]
    config = tomllib.loads((tmp_path / "other" / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["flower"]["out"] == str(tmp_path / "other" / "run")
    assert config["algorithm"]["name"] == "tdpfed"


def test_an_own_app_is_checked_before_anything_starts(tmp_path: Path, without_flower: list[str]) -> None:
    init_app(tmp_path / "wards")

    def tried(*overrides: str) -> None:
        run_demo(Demo(tmp_path / "demo", app=tmp_path / "wards", overrides=overrides), print, print)

    for setting, words in (
        ("algorithms.tdpfed.tau=-1", "algorithms?.tau: -1 given|tau: -1 given"),
        ("run.nothing=1", "does not stand in the app's pyproject.toml"),
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

    from tdpfed.engine.folder import summarize

    simulation = simulated(digits("algorithm.name=fedavg"), 1)
    made = {**summarize(simulation, [simulation.record(1.0)], model="dnn", status="finished"), "error": None}
    made |= {"rounds_per_minute": 6.0, "own_share": 0.04}

    def ran(demo: Demo, tell: Any, on_round: Any) -> dict[str, Any]:
        tell("starting")
        on_round({"round": 1, "lost": {"1": "not there"}, "refused": ["x"], "replies": 2, "seconds": 1.0})
        return made

    monkeypatch.setattr(demos, "run_demo", ran)
    done = CliRunner().invoke(app, ["flower", "demo", "--out", str(tmp_path / "x")])
    assert done.exit_code == 0, done.output
    assert "round 1 of 3: 2 replies, 1 lost, 1 refused, 1.0 s" in done.stderr
    assert "6.0 rounds per minute without evaluations, 4.00 %" in done.stderr
    assert f"run folder: {tmp_path}/x/run\n" in done.stderr
    assert "tdpfed run digits --set run.rounds=3" in done.stderr
    assert "imports apart" in done.stderr
    made |= {"status": "failed", "error": "round 2: no"}
    init_app(tmp_path / "ward")
    done = CliRunner().invoke(
        app, ["flower", "demo", "--json", "--app", str(tmp_path / "ward"), "--out", str(tmp_path / "x")]
    )
    assert done.exit_code == 1
    assert "the run failed: round 2: no" in done.stderr
    monkeypatch.setattr(demos, "run_demo", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert CliRunner().invoke(app, ["flower", "demo", "--out", str(tmp_path / "y")]).exit_code == 130


def test_init_and_keys_from_the_command_line(tmp_path: Path) -> None:
    for command, place in (("init", "ward"), ("keys", "keys")):
        done = CliRunner().invoke(app, ["flower", command, str(tmp_path / place)])
        assert done.exit_code == 0, done.output
        if command == "init":
            told = shlex.split(done.stderr.partition("here with: tdpfed flower demo ")[2])
            assert told == ["--app", str(tmp_path / place), "--node-config", "data=/PATH/TO/node-{partition-id}.npz"]
        done = CliRunner().invoke(app, ["flower", command, str(tmp_path / f"{place}-json"), "--json"])
        assert f'"folder": "{tmp_path / place}-json"' in done.stdout


@pytest.mark.parametrize("command", [["init", "x"], ["keys", "x"], ["demo"]])
def test_without_flower_the_extra_is_named(command: list[str], tmp_path: Path) -> None:
    hide = "import sys; sys.modules['flwr'] = None; sys.argv = ['tdpfed', 'flower', *sys.argv[1:]]; "
    done = subprocess.run(
        [sys.executable, "-c", hide + "from tdpfed.cli import main; main()", *command], cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "pip install 'tdpfed[flower]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_command_of_flowers_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TDPFedError, match="flower-superlink: not found"):
        federations.command_path("flower-superlink")
