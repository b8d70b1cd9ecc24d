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
from typer.testing import CliRunner

from tdpfed.algorithms import ALGORITHMS
from tdpfed.cli import app
from tdpfed.errors import TDPFedError
from tdpfed.flower import guard
from tdpfed.flower.app import default_tables, init_app
from tdpfed.flower.keys import make_keys
from tdpfed.flower.processes import Processes, marked

# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_what_tls_and_flower_take(tmp_path: Path) -> None:
    files = make_keys(tmp_path / "keys", 2, ["superlink.example.org", "10.0.0.7"])
    names = {file.name for file in files}
    assert names == {
        "ca.pem",
        "ca.key",
        "server.pem",
        "server.key",
        "operator.key",
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
        with pytest.raises(TDPFedError, match="not empty"):
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
    [("class", "Python keyword"), ("Torch", "'torch' is"), ("tdpfed", "'tdpfed' is"), ("json", "'json' is")],
)
def test_names_that_would_hide_another_module_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["flower", "init", name]).exception
    assert isinstance(error, TDPFedError)
    assert words in str(error)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wards").mkdir()
    assert init_app(tmp_path / "wards")


def test_an_app_is_never_written_over_something(tmp_path: Path) -> None:
    init_app(tmp_path / "mine")
    with pytest.raises(TDPFedError, match="not empty"):
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

    with pytest.raises(TDPFedError, match="process: 'child'"):
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


# -- the command line --------------------------------------------------------------------------------------------------


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
        guard.command_path("flower-superlink")
