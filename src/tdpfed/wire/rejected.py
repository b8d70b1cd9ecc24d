"""The error for a refused message: its sender, the violated rule and the tensor."""

from typing import Literal

from tdpfed.errors import TDPFedError

Rule = Literal[
    "size", "magic", "version", "header", "checksum",  # refused by decode
    "kind", "client", "duplicate", "round", "weight", "codec", "form", "layout", "payload",  # by validate: the header
    "values", "nan", "norm",  # by validate: the numbers
    "gauge",  # refused by the server's gate, for CP factors
]  # fmt: skip


class Rejected(TDPFedError):  # noqa: N818 - the name describes the message
    """A refused message: the sender if known, the rule it violates, and the tensor at fault if any."""

    def __init__(self, rule: Rule, reason: str, *, client: int | None = None, tensor: str | None = None) -> None:
        sender = "an unknown client" if client is None else f"client {client}"
        super().__init__(_plain(reason, 400), field=f"message of {sender}")
        self.rule, self.client = rule, client
        self.tensor = None if tensor is None else _plain(tensor, 200)


def _plain(text: str, most: int) -> str:
    """Return an untrusted text as a limited number of ASCII characters."""
    return text[:most].encode("ascii", "backslashreplace").decode()[:most]
