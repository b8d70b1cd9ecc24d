"""Flower's SuperLink, except that only who has the operator's key can register nodes, start runs and read their logs.

Flower has the interface for this (account authentication), but no implementation outside of its commercial version.
Run as a script: the file of the key, then the options of ``flower-superlink``. It imports nothing of this package and
no PyTorch.
"""

import hmac
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.superlink.auth_plugin import ControlAuthnPlugin

Metadata = Sequence[tuple[str, str | bytes]]


class OperatorKey(ControlAuthnPlugin):
    """Accepts the requests of an operator who sends the key; there is no other way to log in."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        """Return whether the key was sent, and the only account there is."""
        sent = [value for name, value in metadata if name == ACCESS_TOKEN_KEY]
        if len(sent) != 1 or not self.key:
            return False, None
        given = sent[0].encode() if isinstance(sent[0], str) else sent[0]
        if not hmac.compare_digest(given, self.key):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        """Return None: the key is handed over in a file."""
        return None

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:  # noqa: ARG002
        """Return None: the key is handed over in a file."""
        return None

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:  # noqa: ARG002
        """Return None: the key does not expire."""
        return None, None


def main() -> None:
    """Run Flower's command with the key in the given file."""
    plugin = OperatorKey(Path(sys.argv.pop(1)).read_bytes().strip())
    if not plugin.key:
        sys.exit("the operator's key is empty")
    command: Any = import_module("flwr.superlink.cli.flower_superlink")
    command.load_control_authn_plugin = lambda: plugin
    command.flower_superlink()


if __name__ == "__main__":
    main()
