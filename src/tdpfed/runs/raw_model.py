"""A trained model that takes raw inputs: the normalization of its training data is its first step."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tdpfed.core.inputs import Inputs
from tdpfed.data.normalization import Normalization

Array = NDArray[Any]


class RawModel(nn.Module):
    """A model behind the normalization that it was trained with; a copy of its own, in evaluation mode.

    ``forward`` maps raw inputs ``(B, *input_shape)`` to the model's outputs, with the same bits as in training. If the
    model takes several tensors, they are given as to the model itself, by position or by name. An input may be a tensor
    or an array of NumPy.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, normalization: Normalization, inputs: Inputs, *, tokens: bool) -> None:
        super().__init__()
        self.model, self.inputs, self.tokens = model, inputs, tokens
        self.normalizes, self.dtype = normalization.changes, next(model.parameters()).dtype
        self.register_buffer("mean", normalization.mean, persistent=False)
        self.register_buffer("scale", normalization.scale, persistent=False)
        self.eval()

    def forward(self, *inputs: Tensor | Array, **by_name: Tensor | Array) -> Tensor:
        """Return the outputs for raw inputs; with classes, the scores of each class."""
        values, named = [_tensor(value) for value in inputs], {name: _tensor(one) for name, one in by_name.items()}
        parts, places = self.inputs.parts, self.inputs.places
        if not parts:
            (x,) = values
            outputs: Tensor = self.model(x.long() if self.tokens else self._normalized(x, self.mean, self.scale))
            return outputs
        given = [*values, *(named[part.name] for part in parts[len(values) :])]
        made: list[Any] = []
        for part, place, x in zip(parts, places, given, strict=True):
            mean, scale = (row[:, place].reshape(1, *part.shape) for row in (self.mean, self.scale))
            made.append(x.long() if part.tokens else self._normalized(x, mean, scale))
        if parts[0].name:
            outputs = self.model(**dict(zip((part.name for part in parts), made, strict=True)))
        else:
            outputs = self.model(*made)
        return outputs

    def _normalized(self, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        x = x.to(mean.dtype)
        return ((x - mean) / scale if self.normalizes else x).to(self.dtype)


def _tensor(value: Tensor | Array) -> Tensor:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
