"""What travels between server and clients: forms of uploads, number formats, messages, and their validation.

Methods are known here only by their interface, :class:`tdpfed.algorithms.Algorithm`.
"""

from tdpfed.wire.codecs import Codec, Kind, Layouts, lossy
from tdpfed.wire.forms import Form
from tdpfed.wire.message import Message, decode, encode, packed, whole_parts, with_header
from tdpfed.wire.rejected import Rejected, Rule
from tdpfed.wire.settings import PLAIN, Wire
from tdpfed.wire.validate import Expected, screen, validate

__all__ = [
    "PLAIN",
    "Codec",
    "Expected",
    "Form",
    "Kind",
    "Layouts",
    "Message",
    "Rejected",
    "Rule",
    "Wire",
    "decode",
    "encode",
    "lossy",
    "packed",
    "screen",
    "validate",
    "whole_parts",
    "with_header",
]
