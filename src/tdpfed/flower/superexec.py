"""Flower's SuperExec, except that task tokens are not on command lines, where every user of the machine can read them.

Run as a script, with the options of ``flower-superexec``; it imports nothing of this package and no PyTorch.
"""

import subprocess
import tempfile
from importlib import import_module
from typing import Any

from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND
from flwr.supercore.superexec.executor import LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec


class TokenInFile(SubprocessExecutor):
    """Starts the process of a task; it inherits its token in a file that has no name."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process described by ``spec``."""
        with tempfile.TemporaryFile() as token:
            token.write(spec.token.encode())
            token.seek(0)
            subprocess.Popen(command_of(spec, token.fileno()), pass_fds=[token.fileno()])
        return LaunchResult.accepted()


def command_of(spec: ExecutionSpec, token: int) -> list[str]:
    """Return the command of a task whose token is in the file of a descriptor."""
    trust = ["--root-certificates", spec.root_certificates_path] if spec.root_certificates_path else []
    parent = [] if spec.parent_pid is None else ["--parent-pid", str(spec.parent_pid)]
    install = ["--allow-runtime-dependency-installation"] if spec.runtime_dependency_install else []
    return [
        TASK_TYPE_TO_COMMAND[spec.task_type], TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type],
        spec.runtime_api_address, "--token-file", f"/dev/fd/{token}", *(["--insecure"] if spec.insecure else trust),
        *parent, *install,
    ]  # fmt: skip


def main() -> None:
    """Run Flower's command with this way of starting tasks, which it has no option for."""
    command: Any = import_module("flwr.supercore.cli.flower_superexec")
    loop: Any = import_module("flwr.supercore.superexec.run_superexec")
    loop.get_executor = lambda *_, **__: TokenInFile()
    command.flower_superexec()


if __name__ == "__main__":
    main()
