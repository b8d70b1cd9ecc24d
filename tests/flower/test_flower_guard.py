"""Who is on the same machine: without the keys no task, no run, no file; checked without processes, and with them.

The last test starts a federation and an intruder who is another user: ``python -m pytest -m slow tests/flower``.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import flwr.superlink.main as superlink_main
import httpx
from flwr.cli.auth_plugin.oidc_cli_plugin import OidcCliPlugin
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.auth import create_superexec_auth_metadata, derive_auth_secret, load_superexec_auth_secret
from flwr.supercore.constant import TASK_TOKEN_HEADER, TaskType
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from flwr.supernode.main import create_app as supernode_app
from flwr.supernode.nodestate import NodeStateFactory
from test_flower_services import PATIENCE, Trial, left_over
from typer.testing import CliRunner

from tdpfed.cli import app
from tdpfed.errors import TDPFedError
from tdpfed.flower import guard, superexec
from tdpfed.flower.guard import log_in, private_folder, superlink_command, supernode_command
from tdpfed.flower.keys import make_keys
from tdpfed.flower.processes import Processes
from tdpfed.flower.services import QUIET
from tdpfed.flower.superlink import OperatorKey

pytestmark = pytest.mark.hostile

SECRET, KEY = b"s" * 32, "k" * 64
HEADERS = {
    "content-type": PROTOBUF_MEDIA_TYPE,
    **dict(RuntimeVersionMetadata.from_local_component("flwr CLI").as_metadata()),
}
LOGIN = ("get-login-details", "get-auth-tokens", "refresh-auth-tokens")
"""What Flower answers before anyone has logged in."""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", 1)
    return tmp_path / "keys"


# -- what Flower's servers answer --------------------------------------------------------------------------------------


class Server:
    """A server that is asked without a network."""

    def __init__(self, app_: Any) -> None:
        self.app = app_
        app_.state.superexec_auth_secret = SECRET

    def post(self, path: str, headers: Mapping[str, str] | None = None, content: bytes = b"") -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.post(path, content=content, headers={**HEADERS, **(headers or {})})

        return asyncio.run(ask())

    def paths(self, prefix: str) -> list[str]:
        return [path for path in self.app.openapi()["paths"] if path.startswith(prefix)]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Server]:
    """Flower's own servers as they are started here, within this process."""
    monkeypatch.setattr(superlink_main, "load_control_authn_plugin", lambda: OperatorKey(KEY.encode()))
    return {
        "SuperLink": Server(superlink_main.create_app()),
        "SuperNode": Server(supernode_app(NodeStateFactory(objectstore_factory=ObjectStoreFactory()))),
    }


@pytest.mark.parametrize("name", ["SuperLink", "SuperNode"])
def test_only_who_has_the_secret_gets_a_task(servers: dict[str, Server], name: str) -> None:
    request = AcquireTaskRequest(supported_task_types=["flwr-clientapp", "flwr-serverapp"])

    def ask(secret: bytes | None) -> int:
        signed = {} if secret is None else create_superexec_auth_metadata(
            auth_secret=derive_auth_secret(secret), method="/flwr.proto.Runtime/AcquireTask", request=request,
        )  # fmt: skip
        return servers[name].post("/v1/runtime/acquire-task", signed, request.SerializeToString()).status_code

    assert ask(SECRET) == 200
    assert ask(None) == 401
    assert ask(b"t" * 32) == 401
    servers[name].app.state.superexec_auth_secret = None  # as Flower starts its servers
    assert ask(None) == 200


@pytest.mark.parametrize("name", ["SuperLink", "SuperNode"])
def test_nothing_else_of_the_runtime_is_open_either(servers: dict[str, Server], name: str) -> None:
    paths = servers[name].paths("/v1/runtime/")
    assert len(paths) > 10
    for path in paths:
        for extra in (dict[str, str](), {TASK_TOKEN_HEADER: "x", "authorization": "Bearer x"}):
            assert servers[name].post(path, extra).status_code == 401, path


def test_only_the_operator_can_start_runs_and_register_nodes(servers: dict[str, Server]) -> None:
    def ask(path: str, key: str | None) -> int:
        sent = {} if key is None else {"authorization": f"Bearer {key}"}
        return servers["SuperLink"].post(path, sent).status_code

    paths = [path for path in servers["SuperLink"].paths("/v1/control/") if not path.endswith(LOGIN)]
    assert {"/v1/control/start-run", "/v1/control/register-node", "/v1/control/stream-logs"} <= set(paths)
    for path in paths:
        assert ask(path, None) == 401, path
        assert ask(path, KEY[:-1]) == 401, path
    assert ask("/v1/control/list-runs", KEY) == 200
    for path in LOGIN:  # these give away no key
        answer = servers["SuperLink"].post(f"/v1/control/{path}")
        assert KEY.encode() not in answer.content
        assert answer.status_code >= 400 or not answer.content.strip(b"\0")


def test_an_empty_key_is_nobody_s() -> None:
    for key, sent in ((b"", ""), (b"", "x"), (KEY.encode(), ""), (KEY.encode(), "\N{EURO SIGN}")):
        assert OperatorKey(key).validate_tokens_in_metadata([("flwr-oidc-access-token", sent)]) == (False, None)


# -- how the services are started --------------------------------------------------------------------------------------


def parts(command: list[str]) -> tuple[list[str], list[str]]:
    """Return the commands of the SuperExec and of the service."""
    assert command[1:3] == ["-ISc", guard.WITH_SUPEREXEC]
    return json.loads(command[3]), command[4:]


def test_a_supernode_is_started_with_a_secret_and_a_certificate_of_its_own(tmp_path: Path) -> None:
    seen = set()
    for _ in range(2):
        arguments = ["--superlink", "a:1", "--insecure", "--port", "9100"]
        executor, service = parts(supernode_command(tmp_path / "runtime", arguments))
        given = _parse_args_run_supernode().parse_args(service[1:])
        assert given.isolation == "process"
        assert given.superlink == "a:1"
        secret = load_superexec_auth_secret(given.superexec_auth_secret_file)
        assert secret is not None
        assert len(secret) == 32
        seen |= {secret, Path(given.ssl_keyfile).read_bytes()}
        told = dict(zip(executor[3::2], executor[4::2], strict=True))
        assert told == {
            "--runtime-api-address": "127.0.0.1:9100",
            "--root-certificates": given.ssl_ca_certfile,
            "--superexec-auth-secret-file": given.superexec_auth_secret_file,
        }
        assert mode(tmp_path / "runtime") == 0o700
        assert {mode(file) for file in (tmp_path / "runtime").iterdir()} == {0o600}
        assert not any(secret.hex() in word for word in (*executor, *service))
    assert len(seen) == 4  # new ones for each start


def test_a_superlink_is_started_with_a_secret_and_an_operator(tmp_path: Path, keys: Path) -> None:
    database = tmp_path / "superlink.db"
    database.touch(0o644)
    options = ["--ssl-ca-certfile", str(keys / "ca.pem"), "--database", str(database), "--host", "0.0.0.0"]
    executor, service = parts(superlink_command(tmp_path / "runtime", keys / "operator.key", options))
    given = _parse_args_run_superlink().parse_args(service[4:])
    assert service[3] == str(keys / "operator.key")
    assert given.isolation == "process"
    assert load_superexec_auth_secret(given.superexec_auth_secret_file)
    assert executor[3:7] == ["--runtime-api-address", "127.0.0.1:8000", "--root-certificates", str(keys / "ca.pem")]
    assert mode(database) == 0o600
    assert parts(superlink_command(tmp_path / "runtime", None, ["--insecure"]))[1][0].endswith("flower-superlink")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--isolation", "subprocess"], "--isolation: must be left out"),
        (["--superexec-auth-secret-file=x"], "--superexec-auth-secret-file: must be left out"),
        (["--ssl-certfile", "x"], "--ssl-certfile: must be left out"),
        (["--port"], "--port: expected one argument"),
    ],
)
def test_what_is_set_here_cannot_be_given(tmp_path: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        supernode_command(tmp_path / "runtime", arguments)
    assert not (tmp_path / "runtime").exists()


def test_a_superlink_needs_an_operator_or_a_clear_word(tmp_path: Path, keys: Path) -> None:
    command = ["flower", "superlink", "--runtime", str(tmp_path / "runtime")]
    for extra in ([], ["--open", "--operator", str(keys / "operator.key")]):
        done = CliRunner().invoke(app, [*command, *extra, "--insecure"])
        assert isinstance(done.exception, TDPFedError), extra
        assert "--operator: must be given" in str(done.exception)
    for extra in ([], ["--insecure", "--ssl-ca-certfile", "x"]):
        with pytest.raises(TDPFedError, match="--ssl-ca-certfile: must be given, or --insecure"):
            superlink_command(tmp_path / "runtime", keys / "operator.key", extra)


@pytest.mark.parametrize("service", ["superlink", "supernode"])
def test_the_commands_become_the_services(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    own = ["--operator", str(keys / "operator.key")] if service == "superlink" else []
    done = CliRunner().invoke(
        app, ["flower", service, "--runtime", str(tmp_path / "runtime"), *own, "--insecure", "--host", "::1"]
    )
    assert done.exit_code == 0, done.exception
    ((program, command, environment),) = became
    assert program == command[0] == sys.executable
    executor, told = parts(command)
    assert told[-6:-3] == ["--insecure", "--host", "::1"] or "--host" in told
    assert executor[4].startswith("[::1]:")
    assert environment["PATH"].startswith(str(Path(sys.executable).parent) + os.pathsep)


def test_the_superexec_belongs_to_its_service(tmp_path: Path) -> None:
    tell = "import json, os, sys; m = os.umask(0); json.dump([os.getpid(), m, sys.argv[2:]], open(sys.argv[1], 'w'))"
    child, service = ([sys.executable, "-c", tell, str(tmp_path / name)] for name in ("child", "service"))
    subprocess.run(
        [sys.executable, "-ISc", guard.WITH_SUPEREXEC, json.dumps(child), *service, "x"], check=True, timeout=60
    )
    end = time.monotonic() + 30
    while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    pid, umask, words = json.loads((tmp_path / "service").read_text())
    assert (umask, words) == (0o077, ["x"])
    assert json.loads((tmp_path / "child").read_text())[1:] == [0o077, ["--parent-pid", str(pid)]]


TOLD = """#!{python}
import os, pathlib, sys
name = sys.argv[sys.argv.index("--token-file") + 1]
assert os.path.isfile(name)  # as Flower checks
pathlib.Path({out!r}).write_text("\\n".join([pathlib.Path(name).read_text(), *sys.argv[1:], *os.environ.values()]))
"""


def test_the_token_of_a_task_is_neither_in_its_command_nor_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, out, token = tmp_path / "flwr-clientapp", tmp_path / "out", hashlib.sha256(b"token").hexdigest()
    program.write_text(TOLD.format(python=sys.executable, out=str(out)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    started: list[subprocess.Popen[Any]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)))
    spec = ExecutionSpec(
        task_type=TaskType.CLIENT_APP, runtime_api_address="127.0.0.1:1", token=token, insecure=False,
        root_certificates_path="ca.pem", runtime_dependency_install=False, parent_pid=7, suppress_output=False,
        task_id=1,
    )  # fmt: skip
    superexec.TokenInFile().launch(spec)
    assert started[0].wait(60) == 0
    read, *others = out.read_text().split("\n")
    assert read == token
    assert not any(token in word for word in others)
    assert others[:3] == ["--runtime-api-address", "127.0.0.1:1", "--token-file"]
    assert others[4:8] == ["--root-certificates", "ca.pem", "--parent-pid", "7"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_folder_becomes_its_owner_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("new", "old"):
        if name == "old":
            (tmp_path / name).mkdir(0o755)
        assert mode(private_folder(tmp_path / name)) == 0o700
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "old")
    for name in ("file", "link"):
        with pytest.raises(TDPFedError, match="--out: "):
            private_folder(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(TDPFedError, match="must be a folder of the user who runs this command"):
        private_folder(tmp_path / "old")


def test_what_processes_write_is_for_one_user(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as processes:
        process = processes.start("one", [sys.executable, "-c", f"open({str(tmp_path / 'x')!r}, 'w')"], os.environ)
        assert process.wait(60) == 0
    assert mode(tmp_path / "x") == mode(tmp_path / "logs" / "one.log") == 0o600
    assert mode(tmp_path / "logs") == 0o700


def test_an_operator_is_logged_in_by_a_file_that_only_the_owner_can_read(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    done = CliRunner().invoke(app, ["flower", "login", "a:8000", "--operator", str(keys / "operator.key")])
    assert done.exit_code == 0, done.exception
    file = tmp_path / "home" / "credentials.yaml"
    assert done.stdout.strip() == str(file)
    assert mode(file) == 0o600
    plugin = OidcCliPlugin("a:8000")
    plugin.store = FileCredentialStore(file)
    plugin.load_tokens()
    key = (keys / "operator.key").read_bytes().strip()
    assert OperatorKey(key).validate_tokens_in_metadata(plugin.write_tokens_to_metadata([]))[0]
    (keys / "operator.key").chmod(0o644)
    with pytest.raises(TDPFedError, match="can be read by every user"):
        log_in("a:8000", keys / "operator.key", tmp_path / "home")
    (keys / "operator.key").write_text("short\n")
    with pytest.raises(TDPFedError, match="must hold a key"):
        log_in("a:8000", keys / "operator.key", tmp_path / "home")
    assert key.isalnum()
    assert len(key) == 64


# -- with processes and another user -----------------------------------------------------------------------------------

OTHER = 54_321
"""The id of a user without an account: the kernel knows users by their ids, and nothing has to be removed later."""


def other_user(python: str, arguments: Sequence[str], home: Path) -> "subprocess.Popen[str]":
    """Start Python as another user, with nothing of this process's environment but the way to Flower."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "FLWR_HOME": str(home / "flwr"), **QUIET,
        "PYTHONPATH": sysconfig.get_path("purelib"),
    }  # fmt: skip
    return subprocess.Popen(
        [python, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=home, user=OTHER, group=OTHER, extra_groups=(), env=environment,
    )  # fmt: skip


def python_of_other(home: Path) -> str:
    """Return a Python that another user can run, and that imports the same Flower."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, *(f"{folder}/{version}" for folder in ("/usr/local/bin", "/usr/bin"))):
        with contextlib.suppress(OSError):
            said, _ = other_user(python, ["-c", "import flwr.cli.app, httpx; print('there')"], home).communicate()
            if "there" in said:
                return python
    pytest.skip(f"another user can run no {version} with this Flower")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users can enter, with a home for another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "home").mkdir(0o700)
        os.chown(folder / "home", OTHER, OTHER)
        yield folder
        assert left_over(folder) == []
    finally:
        shutil.rmtree(folder)
    assert not [entry for entry in Path("/proc").glob("[0-9]*") if owner(entry) == OTHER]


def owner(entry: Path) -> int:
    try:
        return entry.stat().st_uid
    except OSError:
        return -1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="command lines are read in /proc")
def test_another_user_gets_no_task_starts_no_run_and_reads_no_file(shared: Path) -> None:
    home, script = shared / "home", shared / "intruder.py"
    python = python_of_other(home)
    trial = Trial(shared / "federation", 2, "algorithm.keep_theta=true", "participation.quorum=2", "run.rounds=2")
    shutil.copy(Path(__file__).with_name("intruder.py"), script)
    shutil.copytree(shared / "federation" / "app", home / "app")
    (home / "flwr").mkdir()
    shutil.copy(trial.federation.keys / "ca.pem", home / "ca.pem")  # the authority is no secret
    text = (shared / "federation" / "server" / "flwr" / "config.toml").read_text()
    (home / "flwr" / "config.toml").write_text(text.replace(str(trial.federation.keys), str(home)))
    for place in home.rglob("*"):
        os.chown(place, OTHER, OTHER)
    script.chmod(0o644)
    intruder = other_user(python, [str(script), str(shared / "federation")], home)
    try:
        with trial.federation as federation:
            trial.start()
            process = federation.submit(shared / "federation" / "app")
            run = ["-c", "from flwr.cli.app import app; app()", "run", str(home / "app"), "federation"]
            said, _ = (started := other_user(python, run, home)).communicate(timeout=PATIENCE)
            assert started.returncode != 0, said
            assert "uthenticat" in said, said
            trial.finish(process)
        got = json.loads(intruder.communicate(timeout=60)[0].splitlines()[-1])
    finally:
        intruder.kill()
        intruder.wait()
    trial.equals_simulation()
    assert {line["round"]: line["refused"] for line in trial.rounds()} == {1: [], 2: []}
    assert got["user"] == OTHER
    assert (got["tasks"], got["opened"]) == ([], [])
    asked = {name.split()[0]: 0 for name in got["statuses"]}
    assert asked.keys() == {"runtime/acquire-task", "control/list-runs", "control/start-run"}
    assert {name for name in got["statuses"] if name.endswith(" 401")} == {f"{name} 401" for name in asked}
    assert not [name for name in got["statuses"] if name.split()[1].startswith("2")], got["statuses"]
    for app_ in ("flwr-clientapp", "flwr-serverapp"):
        seen = [line for line in got["lines"] if app_ in line.split("\0")[1]]
        assert seen, got["lines"]
        assert all("\0--token-file\0/dev/fd/" in line for line in seen), seen
    assert not [line for line in got["lines"] if "\0--token\0" in line]
    ports = {address for line in got["lines"] for address in re.findall(r"--runtime-api-address\0([\w.:]+)", line)}
    assert len(ports) == 3  # the SuperLink's and both SuperNodes'
    with sqlite3.connect(shared / "federation" / "server" / "superlink.db") as database:
        assert database.execute("SELECT COUNT(*) FROM run").fetchall() == [(1,)]
    assert mode(shared / "federation" / "server" / "superlink.db") == 0o600
    assert mode(shared / "federation") == 0o700
    assert not open_to_others(shared / "federation" / "server") | open_to_others(shared / "federation" / "node-0")


def open_to_others(folder: Path) -> set[str]:
    """Return the files that services wrote below a folder and that other users could read if they could enter it."""
    written = {str(path) for path in folder.rglob("*") if not path.is_symlink() and mode(path) & 0o077}
    return {path for path in written if not path.endswith(("/data.npz", "/config.toml"))}  # not written by a service
