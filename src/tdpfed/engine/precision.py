"""The precision of a GPU's matrix products: float32, or faster with rounded inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Multiply in float32, or with ``tf32`` and ``bf16`` with 10-bit mantissas; values in memory stay float32.

    With ``bf16`` the objective also computes the model's layers in bfloat16.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
