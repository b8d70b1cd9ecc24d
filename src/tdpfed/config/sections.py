"""Sections of the configuration that say how a run is carried out, and leave its numbers as they are."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Engine(Section):
    """Where the state of many clients lies; the numbers of a run do not depend on it."""

    state: Literal["auto", "ram", "mmap"] = Field(
        "auto",
        description="what clients keep between rounds: in memory, or in a memory-mapped file beside the run folder; "
        "auto: in memory if it takes at most half of what is free",
    )
