"""One message format for simulation and deployment: state to bytes and back, with its codecs, its size and its gate."""

from tdpfed.wire.codecs import Codec, Kind, Layouts, lossy
from tdpfed.wire.message import Message, decode, encode, encoded_size
from tdpfed.wire.rejected import Rejected, Rule
from tdpfed.wire.validate import Expected, screen, validate

__all__ = [
    "Codec",
    "Expected",
    "Kind",
    "Layouts",
    "Message",
    "Rejected",
    "Rule",
    "decode",
    "encode",
    "encoded_size",
    "lossy",
    "screen",
    "validate",
]
