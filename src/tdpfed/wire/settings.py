"""The settings of the wire: which form of an upload travels, in which numbers."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from tdpfed.core.setting import check, setting
from tdpfed.errors import TDPFedError, wrong
from tdpfed.wire.codecs import Codec

Update = Literal["dense", "factors", "top-k"]

DEFAULT_CODEC: dict[str, Codec] = {"dense": "float32", "factors": "int4", "top-k": "int8"}
DEFAULT_TERMS = 4
DEFAULT_DOWN_TERMS = 8


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What of an upload and of the server's message is sent, and in which numbers."""

    update: Update = setting(
        "dense",
        "what clients upload: all values; or of the change since the received model, rank-one terms of each parameter "
        "(factors), or the largest values (top-k)",
    )
    codec: Codec | None = setting(
        None, "number format of uploads; default: float32 for dense, int4 for factors, int8 for top-k"
    )
    terms: int | None = setting(
        None, "factors: rank-one terms per parameter, at most what it has; default: 4, or by wire.compression", least=1
    )
    compression: float | None = setting(
        None, "factors: chooses the terms of each parameter for this rate of numbers, by the paper's rule", above=1
    )
    sweeps: int = setting(
        2, "factors: power steps per round; more for clients that take part rarely", least=1, most=100
    )
    kernels: Literal["matrix", "tensor"] = setting(
        "matrix", "factors: take a convolution kernel as a matrix (outputs x rest), or as a tensor"
    )
    share: float = setting(0.01, "top-k: share of the values that is sent", above=0, most=1)
    feedback: bool | None = setting(
        None,
        "whether clients keep what an upload lost and add it to their next change; default: true for factors, top-k "
        "and int4. With dense it makes the upload a change",
    )
    down: Literal["dense", "factors"] = setting(
        "dense", "what the server sends: its model, or rank-one terms of its change since the last round"
    )
    down_terms: int = setting(DEFAULT_DOWN_TERMS, "down = factors: rank-one terms per parameter", least=1)
    down_codec: Codec = setting("int4", "down = factors: number format of the terms")

    def __post_init__(self) -> None:
        check(self)
        if self.terms is not None and self.compression is not None:
            raise TDPFedError(
                f"{self.compression:g} given, but terms is {self.terms}; give one of the two", field="compression"
            )
        if self.number_format == "int4" and self.update == "dense" and self.feedback is False:
            raise wrong(
                "codec",
                "int4",
                "another without feedback: 4 bits of the whole values lose too much; set feedback = true",
            )

    def spelled_out(self) -> Self:
        """Return the same settings with the defaults that depend on others filled in."""
        return replace(self, codec=self.number_format, feedback=self.keeps_lost)

    @property
    def number_format(self) -> Codec:
        """The codec of uploads."""
        return DEFAULT_CODEC[self.update] if self.codec is None else self.codec

    @property
    def sends_changes(self) -> bool:
        """Whether uploads are changes against what the client received."""
        return self.update != "dense" or self.keeps_lost

    @property
    def keeps_lost(self) -> bool:
        """Whether clients keep what an upload lost."""
        if self.feedback is None:
            return self.update != "dense" or self.number_format == "int4"
        return self.feedback


PLAIN = Wire()
"""Uploads of all values in float32."""
