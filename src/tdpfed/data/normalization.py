"""How raw inputs become those of a model: ``(x - mean) / scale``, with statistics of the training samples.

They are kept with the federation, in run folders and with every model that leaves them: a model that was trained on
normalized inputs is useless on raw ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from tdpfed.core.inputs import WHOLE, Inputs
from tdpfed.errors import TDPFedError, unknown

Normalize = Literal["standard", "feature", "unit", "symmetric", "none"]
NORMALIZE = get_args(Normalize)

RANGES = {"unit": (0.0, 1.0), "symmetric": (-1.0, 1.0)}
"""Where bytes, and values from 0 to 1, are scaled to."""


def _of(value: float) -> Tensor:
    return torch.tensor([value])


@dataclass(frozen=True, eq=False)
class Normalization:
    """The statistics that were applied to the samples of a federation; both broadcast against ``(N, *input_shape)``."""

    kind: str = "none"
    mean: Tensor = field(default_factory=lambda: _of(0.0))
    scale: Tensor = field(default_factory=lambda: _of(1.0))

    @classmethod
    def measured(cls, train: Tensor, kind: str, raw: torch.dtype) -> Self:
        """Return the statistics of training samples ``(N, ...)``; ``raw`` is their type as they were given."""
        if kind in ("standard", "feature"):
            others = [d for d in range(train.ndim) if d != 1] if kind == "standard" else [0]
            variance, mean = torch.var_mean(train, others, correction=0, keepdim=True)
            constant = train.amin(others, keepdim=True) == train.amax(others, keepdim=True)
            return cls(kind, mean.cpu(), torch.where(constant, 1.0, variance.sqrt()).cpu())
        low, high = RANGES.get(kind, (0.0, 1.0))
        largest = 255.0 if raw == torch.uint8 and kind in RANGES else 1.0
        scale = largest / (high - low)
        return cls(kind, _of(-low * scale).to(train.dtype), _of(scale).to(train.dtype))

    @classmethod
    def joined(cls, found: Sequence[Self], inputs: Inputs) -> Self:
        """Return the statistics of rows that hold several inputs, from those of each input."""
        rows = [
            torch.cat([getattr(one, name).double().expand(1, *part.shape).reshape(1, -1)
                       for one, part in zip(found, inputs.parts, strict=True)], 1)
            for name in ("mean", "scale")
        ]  # fmt: skip
        kinds = {one.kind for one, part in zip(found, inputs.parts, strict=True) if not part.tokens}
        dtype = torch.promote_types(
            torch.float32, max((one.mean.dtype for one in found), key=lambda kind: kind.itemsize)
        )
        return cls(kinds.pop() if kinds else "none", rows[0].to(dtype), rows[1].to(dtype))

    @property
    def changes(self) -> bool:
        """Whether inputs differ from raw ones."""
        return bool((self.mean != 0).any() or (self.scale != 1).any())

    def apply(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return raw inputs as a model of ``dtype`` takes them, with the same bits as in training."""
        if x.dtype in WHOLE:
            return x.long()
        work = x.to(self.mean.dtype)
        if self.changes:
            work = work.sub(self.mean.to(x.device)).div_(self.scale.to(x.device))
        return work.to(dtype)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as plain values for JSON, which keep every bit."""
        shape = {"type": str(self.mean.dtype).removeprefix("torch."), "shape": list(self.mean.shape)}
        return {
            "kind": self.kind,
            **shape,
            "mean": self.mean.flatten().tolist(),
            "scale": self.scale.flatten().tolist(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the statistics from :meth:`as_dict`; values that are none raise an error."""
        try:
            kind, dtype = values["kind"], getattr(torch, values["type"])
            mean, scale = (
                torch.tensor(values[name], dtype=dtype).reshape(values["shape"]) for name in ("mean", "scale")
            )
            good = bool(mean.isfinite().all() and scale.isfinite().all() and (scale > 0).all())
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise TDPFedError(
                f"unreadable ({error}); allowed: kind, type, shape, mean, scale", field="normalize"
            ) from None
        if kind not in NORMALIZE:
            raise unknown("normalize", kind, NORMALIZE)
        if not good:
            raise TDPFedError(
                "a mean or scale that is not finite, or a scale below 0; allowed: none", field="normalize"
            )
        return cls(kind, mean, scale)


RAW = Normalization()
"""Inputs as they were given."""


def normalized(
    x: Tensor, index: Tensor, trained: int, normalize: str, dtype: torch.dtype
) -> tuple[Tensor, Normalization]:
    """Return ``x[index]`` as ``dtype``, and what was applied; the first ``trained`` of the indices are for training."""
    if normalize not in NORMALIZE:
        raise unknown("normalize", normalize, NORMALIZE)
    work = torch.promote_types(dtype, torch.float32)
    raw = x.dtype
    if raw in WHOLE:
        if x.numel() and int(x.min()) < 0:
            raise TDPFedError(f"token ids from {int(x.min())}; allowed: 0 or more; numbers must be floats", field="x")
        return x[index].long(), RAW
    if raw == torch.uint8:
        x = x[index].to(work)
    else:
        x = x.to(work)[index]
        if not x.isfinite().all():
            raise TDPFedError(f"NaN, infinite or beyond {work}; allowed: finite numbers", field="x")
    found = Normalization.measured(x[:trained], normalize, raw)
    if found.changes:
        x = x.sub_(found.mean.to(x.device)).div_(found.scale.to(x.device))
    if normalize in RANGES and not RANGES[normalize][0] <= x.min() <= x.max() <= RANGES[normalize][1]:
        low, high = (x.min() * found.scale + found.mean).item(), (x.max() * found.scale + found.mean).item()
        raise TDPFedError(
            f"{normalize!r} with values from {low:g} to {high:g}; allowed: bytes or values from 0 to 1",
            field="normalize",
        )
    return x.to(dtype), found
