"""How Flower's services are started, so that other users of the same machine can neither use nor read them.

Flower's SuperLink and SuperNode give a task to whoever asks for it on their port. Started from here they give it only
to their own SuperExec, the process that starts apps: both know a secret (SuperExec authentication, which Flower has
with ``--isolation process``), and a SuperNode's port has TLS with a certificate of its own, so that nobody else can
pose as the SuperNode. Files are for their owner alone.
"""

import argparse
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.common.constant import AuthnType
from flwr.supercore.address import resolve_bind_address
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

from tdpfed.errors import TDPFedError
from tdpfed.files import write_errors, write_file
from tdpfed.flower.keys import certificates

OWNER_ONLY = 0o077
"""The umask of all services: files and folders can be used by their owner alone."""

WITH_SUPEREXEC = (
    "import json, os, subprocess, sys; os.umask(0o077); "
    "subprocess.Popen([*json.loads(sys.argv[1]), '--parent-pid', str(os.getpid())]); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Starts a SuperExec and becomes the service that it belongs to; when that ends, the SuperExec ends."""

SET_HERE = ("--isolation", "--superexec-auth-secret-file")
NODE_SET_HERE = (*SET_HERE, "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile")
"""Options of Flower's commands that may not be given, because they are set here."""


def private_folder(folder: Path, field: str = "--out") -> Path:
    """Create a folder that its owner alone can use, or make an existing one of this user's so; return its path."""
    with write_errors(field, folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise TDPFedError(f"{field}: {str(folder)!r} given, must be a folder of the user who runs this command")
        if found.st_mode & OWNER_ONLY:
            folder.chmod(0o700)
    return folder.resolve()


def superlink_command(runtime: Path, operator: Path | None, arguments: Sequence[str]) -> list[str]:
    """Return the command of a SuperLink that keeps its secret in ``runtime``; without ``operator`` anyone may run code.

    ``arguments`` are options of ``flower-superlink``.
    """
    options = _options(arguments, SET_HERE, port=8000)
    runtime = private_folder(runtime, "--runtime")
    for suffix in ("", "-wal", "-shm", "-journal") if options.database else ():
        file = Path(f"{options.database}{suffix}")
        if file.is_file():  # written without these precautions
            file.chmod(0o600)
    trust = ["--insecure"] if options.insecure else ["--root-certificates", options.ssl_ca_certfile or ""]
    if options.insecure == bool(options.ssl_ca_certfile):
        raise TDPFedError("--ssl-ca-certfile: must be given, or --insecure; not both")
    start = [command_path("flower-superlink")]
    if operator is not None:
        _key_of(operator)
        start = [sys.executable, "-P", _script("superlink"), str(operator)]
    return _with_superexec(runtime, options, trust, [*start, *arguments])


def supernode_command(runtime: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command of a SuperNode that keeps its secret and its own certificate in ``runtime``.

    ``arguments`` are options of ``flower-supernode``. The certificate is for the port of the node's own machine only.
    """
    options = _options(arguments, NODE_SET_HERE, port=9094)
    runtime = private_folder(runtime, "--runtime")
    made = certificates([options.host], days=3650)
    files = {name: runtime / f"runtime-{name}" for name in ("ca.pem", "server.pem", "server.key")}
    for name, file in files.items():
        write_file(file, made[name], field="--runtime", mode=0o600)
    tls = [
        "--ssl-certfile", str(files["server.pem"]), "--ssl-keyfile", str(files["server.key"]),
        "--ssl-ca-certfile", str(files["ca.pem"]),
    ]  # fmt: skip
    command = [command_path("flower-supernode"), *arguments, *tls]
    return _with_superexec(runtime, options, ["--root-certificates", str(files["ca.pem"])], command)


def log_in(address: str, operator: Path, home: Path) -> Path:
    """Let Flower's commands send an operator's key to a SuperLink: write it to Flower's folder of this user."""
    key = _key_of(operator)
    file = private_folder(home, "FLWR_HOME") / "credentials.yaml"
    store = FileCredentialStore(file)
    with write_errors("FLWR_HOME", file):
        for name, value in (
            (AUTHN_TYPE_STORE_KEY, AuthnType.OIDC.encode()),  # of Flower's ways to send a key, the only one there is
            (ACCESS_TOKEN_STORE_KEY, key),
            (REFRESH_TOKEN_STORE_KEY, b"none"),
        ):
            store.set(name % address, value)
        file.chmod(0o600)
    return file


def command_path(name: str) -> str:
    """Return the path of a Flower command: next to this Python, or on the search path."""
    local = Path(sys.executable).parent / name
    found = str(local) if local.exists() else shutil.which(name)
    if found is None:
        raise TDPFedError(f"{name}: not found; install Flower with pip install 'tdpfed[flower]'")
    return found


def search_path() -> str:
    """Return the search path for commands with those next to this Python first, where Flower's are."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _with_superexec(
    runtime: Path, options: argparse.Namespace, trust: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the command of a service and its SuperExec, which share a new secret."""
    secret = runtime / "superexec.key"
    write_file(secret, secrets.token_bytes(32), field="--runtime", mode=0o600)
    host = f"[{options.host}]" if ":" in options.host else options.host
    shared = ["--superexec-auth-secret-file", str(secret)]
    superexec = [
        sys.executable, "-P", _script("superexec"), "--runtime-api-address",
        resolve_bind_address(f"{host}:{options.port}"), *trust, *shared,
    ]  # fmt: skip
    return [
        sys.executable, "-ISc", WITH_SUPEREXEC, json.dumps(superexec), *command, "--isolation", "process", *shared,
    ]  # fmt: skip


def _options(arguments: Sequence[str], set_here: Sequence[str], port: int) -> argparse.Namespace:
    """Return those of Flower's options that matter here; reject those that are set here."""
    for word in arguments:
        if word.partition("=")[0] in set_here:
            raise TDPFedError(f"{word.partition('=')[0]}: must be left out: this command sets it")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--database", "--ssl-ca-certfile"):
        parser.add_argument(name)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default=port)
    parser.add_argument("--insecure", action="store_true")
    try:
        return parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError as error:
        raise TDPFedError(f"{error.argument_name}: {error.message}") from None


def _key_of(operator: Path) -> bytes:
    """Return the key in an operator's file; reject files that other users can read."""
    try:
        key, mode = operator.read_bytes().strip(), operator.stat().st_mode
    except OSError as error:
        raise TDPFedError(f"--operator: cannot read {str(operator)!r} ({error.strerror or error})") from None
    if len(key) < 32 or not key.isalnum():
        raise TDPFedError(f"--operator: {str(operator)!r} given, must hold a key as made by tdpfed flower keys")
    if mode & 0o007:
        raise TDPFedError(f"--operator: {str(operator)!r} can be read by every user, must be for its owner: chmod 600")
    return key


def _script(name: str) -> str:
    return str(Path(__file__).with_name(f"{name}.py"))
