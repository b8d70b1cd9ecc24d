"""The message format of simulation and deployment: encoding, codecs, message sizes and validation."""

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
