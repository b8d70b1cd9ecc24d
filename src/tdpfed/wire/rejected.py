"""The error with which a receiver refuses a message: who sent it, which rule it breaks, and where."""

from typing import Literal

from tdpfed.errors import TDPFedError

Rule = Literal[
    "size", "magic", "version", "header", "checksum", "payload",  # the bytes: refused by decode
    "dtype", "shape",  # refused by either
    "kind", "client", "duplicate", "round", "weight", "codec", "layout", "names", "nan",  # refused by validate
    "gauge",  # refused by the server of a federation of factors
]  # fmt: skip


class Rejected(TDPFedError):  # noqa: N818 - it says what happened to the message
    """A message that must not be used: the sender as far as known, the rule it breaks and the tensor that does."""

    def __init__(self, rule: Rule, reason: str, *, client: int | None = None, tensor: str | None = None) -> None:
        sender = "an unknown client" if client is None else f"client {client}"
        super().__init__(_plain(reason, 400), field=f"message of {sender}")
        self.rule, self.client = rule, client
        self.tensor = None if tensor is None else _plain(tensor, 200)


def _plain(text: str, most: int) -> str:
    """Return a text that may come from anyone as a bounded number of ASCII characters."""
    return text[:most].encode("ascii", "backslashreplace").decode()[:most]
