"""A federation on one machine: a SuperLink and SuperNodes as separate processes, on loopback.

TLS and node authentication are on unless ``insecure`` is set. Other users of the machine can neither start code nor get
a task, and read none of the files (:mod:`tdpfed.flower.guard`). The processes started here send no telemetry, do not
check for updates and install nothing.
"""

import os
import shlex
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tdpfed.config import toml_value
from tdpfed.errors import TDPFedError
from tdpfed.files import write_file
from tdpfed.flower.guard import command_path, log_in, private_folder, search_path, superlink_command, supernode_command
from tdpfed.flower.keys import make_keys
from tdpfed.flower.processes import Processes
from tdpfed.flower.settings import OWN_CODE

LINK = "federation"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
ANSWER_WITHIN = 60.0
"""Seconds that the SuperLink may take to answer."""


class LocalFederation:
    """The processes of a federation and their folder; leaving the ``with`` block stops them all."""

    def __init__(self, work: Path, nodes: int, insecure: bool = False, own_code: Path | None = None) -> None:
        self.work, self.nodes, self.insecure, self.own_code = work.resolve(), nodes, insecure, own_code
        self.port = free_port()
        self.processes = Processes(self.work / "logs")

    def __enter__(self) -> "LocalFederation":
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.__exit__(None, None, None)

    @property
    def keys(self) -> Path:
        """The folder of certificates and node keys."""
        return self.work / "keys"

    @property
    def address(self) -> str:
        """The address that the SuperLink listens on."""
        return f"127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Make keys, and the files in which Flower's commands look up the SuperLink and the operator's key."""
        private_folder(self.work)
        make_keys(self.keys, self.nodes)
        home = private_folder(self.work / "server") / "flwr"
        log_in(self.address, self.keys / "operator.key", home)
        trust = "insecure = true" if self.insecure else f"root-certificates = {toml_value(str(self.keys / 'ca.pem'))}"
        text = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{self.address}"\n{trust}\n'
        write_file(home / "config.toml", text, field="--out")

    def start_superlink(self) -> None:
        """Start the SuperLink, with its database on disk, and wait until it answers."""
        secure = [
            "--ssl-ca-certfile", str(self.keys / "ca.pem"), "--ssl-certfile", str(self.keys / "server.pem"),
            "--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth",
        ]  # fmt: skip
        options = [
            *(["--insecure"] if self.insecure else secure), "--host", "127.0.0.1", "--port", str(self.port),
            "--database", str(self.work / "server" / "superlink.db"),
        ]  # fmt: skip
        command = superlink_command(self.work / "server" / "runtime", self.keys / "operator.key", options)
        process = self.processes.start("superlink", command, self.environment("server"))
        end = time.monotonic() + ANSWER_WITHIN
        while not self._answers():
            if process.poll() is not None or time.monotonic() > end:
                raise TDPFedError(f"SuperLink: did not start; end of its log: {self._log_tail('superlink')}")
            time.sleep(0.2)

    def register(self) -> None:
        """Register the keys of all nodes with the SuperLink."""
        commands = [
            [command_path("flwr"), "supernode", "register", str(self.keys / f"node-{k}.pub"), LINK]
            for k in range(0 if self.insecure else self.nodes)
        ]
        for command in commands:
            try:
                done = subprocess.run(
                    command, env=self.environment("server"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                    check=False, timeout=ANSWER_WITHIN,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise TDPFedError(
                    f"SuperLink: no answer within {ANSWER_WITHIN:g} seconds to {shlex.join(command)}"
                ) from None
            if done.returncode:
                raise TDPFedError(f"SuperLink: cannot register {command[3]!r}: {done.stdout} {done.stderr}")

    def start_node(self, number: int, node_config: Mapping[str, Any], **changed: Path) -> None:
        """Start the SuperNode of a client; ``key`` and ``ca`` replace the files of its own key and authority."""
        key, authority = changed.get("key", self.keys / f"node-{number}.key"), changed.get("ca", self.keys / "ca.pem")
        secure = ["--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]
        settings = {
            "partition-id": number, "num-partitions": self.nodes,
            "state-dir": str(self.work / f"node-{number}" / "state"), **node_config,
        }  # fmt: skip
        options = [
            *(["--insecure"] if self.insecure else secure), "--superlink", self.address, "--host", "127.0.0.1",
            "--port", str(free_port()), "--node-config",
            " ".join(f"{name}={toml_value(value)}" for name, value in settings.items()),
        ]  # fmt: skip
        command = supernode_command(self.work / f"node-{number}" / "runtime", options)
        self.processes.start(f"node-{number}", command, self.environment(f"node-{number}"))

    def submit(self, app: Path, overrides: str = "") -> "subprocess.Popen[bytes]":
        """Start the app; the returned process streams its log and ends when the app ends."""
        given = ["--run-config", overrides] if overrides else []
        command = [command_path("flwr"), "run", str(app), LINK, "--stream", *given]
        return self.processes.start("run", command, self.environment("server"))

    def environment(self, place: str) -> dict[str, str]:
        """Return the environment of a process: no telemetry, a separate Flower folder, this Python's commands first."""
        own = {} if self.own_code is None else {OWN_CODE: str(self.own_code)}
        return {
            **os.environ, **QUIET, **own, "FLWR_HOME": str(self.work / place / "flwr"),
            "PATH": search_path(),
        }  # fmt: skip

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as plain:
                if not self.insecure:
                    context = ssl.create_default_context(cafile=str(self.keys / "ca.pem"))
                    context.wrap_socket(plain, server_hostname="localhost").close()
            return True
        except OSError:
            return False

    def _log_tail(self, name: str) -> str:
        return " ".join(self.processes.log(name).split()[-60:]) or "none"


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
