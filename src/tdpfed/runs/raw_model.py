"""A trained model that takes raw inputs: the normalization of its training data is its first step."""

from torch import Tensor, nn

from tdpfed.data.normalization import Normalization


class RawModel(nn.Module):
    """A model behind the normalization that it was trained with; a copy of its own, in evaluation mode.

    ``forward`` maps raw inputs ``(B, *input_shape)`` to the model's outputs, with the same bits as in training.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, normalization: Normalization) -> None:
        super().__init__()
        self.model, self.normalizes = model, normalization.changes
        self.dtype = next(model.parameters()).dtype
        self.register_buffer("mean", normalization.mean, persistent=False)
        self.register_buffer("scale", normalization.scale, persistent=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for raw inputs; with classes, the scores of each class."""
        x = x.to(self.mean.dtype)
        if self.normalizes:
            x = (x - self.mean) / self.scale
        outputs: Tensor = self.model(x.to(self.dtype))
        return outputs
